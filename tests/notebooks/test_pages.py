"""The executed notebooks under docs/pages: self-contained, small, in the gallery; and how they become so."""

import base64
import importlib.util
import io
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from external_loads import find_external_loads
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from PIL import Image

from .conftest import NOTEBOOKS, ROOT


def load():
    spec = importlib.util.spec_from_file_location("pages", ROOT / "notebooks" / "pages.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["pages"] = module  # dataclasses look up their module there
    spec.loader.exec_module(module)
    return module


pages = load()
EXISTING = sorted(pages.PAGES.glob("*.html"))


def test_gallery_has_every_notebook():
    assert [page.stem for page in pages.GALLERY] == [path.stem for path in NOTEBOOKS]


@pytest.mark.parametrize("path", EXISTING, ids=lambda path: path.stem)
def test_page_is_small_and_self_contained_and_has_no_local_path(path):
    text = path.read_text(encoding="utf-8")
    assert len(text.encode()) < pages.LIMIT_BYTES
    loads = find_external_loads(text)
    assert all(load.startswith('src of <img src="0') for load in loads) if path.stem == "index" else not loads
    assert str(ROOT) not in text and "The notebook stopped" not in text


@pytest.mark.parametrize("path", EXISTING, ids=lambda path: path.stem)
def test_links_of_pages_lead_to_files(path):
    links = re.findall(r'href="([^"#]+)(?:#[^"]*)?"', path.read_text(encoding="utf-8"))
    assert not [link for link in links if "://" not in link and not (path.parent / link).is_file()]


def test_links_of_notebooks_are_rewritten_for_pages():
    prose = (
        "[06](07_does_selection_find.ipynb), [why](../docs/science/retrieval.md), $[a](b)$\n\n[4]: 05_production_run.ipynb"
    )
    shown = new_output("display_data", data={"text/markdown": "[run](../outputs/README.md) <https://arxiv.org>"})
    notebook = new_notebook(cells=[new_markdown_cell(prose), new_code_cell("show()", outputs=[shown])])
    pages.rewrite_links(notebook)
    page = "[06](07_does_selection_find.html), [why](../science/retrieval.md), $[a](b)$\n\n[4]: "
    assert notebook.cells[0].source == f"{page}05_production_run.html"
    assert notebook.cells[1].outputs[0]["data"]["text/markdown"] == "[run](../../outputs/README.md) <https://arxiv.org>"


def test_gallery_is_current_and_complete():
    text = (pages.PAGES / "index.html").read_text(encoding="utf-8")
    assert text == pages.render_gallery()
    for link in re.findall(r'(?:href|src)="([^"]+)"', text):
        assert (pages.PAGES / link).is_file(), link
    assert {path.stem for path in EXISTING} - {"index"} <= {page.stem for page in pages.GALLERY}


def test_quantized_picture_has_the_same_size_and_fewer_bytes():
    buffer = io.BytesIO()
    Image.effect_noise((300, 200), 60).convert("RGB").save(buffer, "PNG")
    png = buffer.getvalue()
    output = new_output("display_data", data={"image/png": base64.b64encode(png).decode()})
    notebook = new_notebook(cells=[new_code_cell("show()", outputs=[output])])
    pages.quantize_pictures(notebook)
    (stored,) = pages.list_pictures(notebook)
    before, after = Image.open(io.BytesIO(png)), Image.open(io.BytesIO(base64.b64decode(stored)))
    assert after.size == before.size and after.mode == "P"
    assert len(base64.b64decode(stored)) < 0.6 * len(png)


def test_quantization_preserves_the_colour_of_a_thin_curve():
    """A picture with a colour map has many shades; they must not replace the colour of a curve of few pixels."""
    png = np.full((200, 200, 3), 255, dtype=np.uint8)
    png[:150] = np.linspace((0, 34, 78), (253, 234, 69), 200)[None]
    png[160, 20:60] = (0, 158, 115)
    buffer = io.BytesIO()
    Image.fromarray(png).save(buffer, "PNG")
    stored = np.asarray(Image.open(io.BytesIO(pages.quantize_png(buffer.getvalue()))).convert("RGB"))
    assert np.abs(stored[160, 20:60].astype(int) - (0, 158, 115)).max() < 20
    assert np.abs(stored.astype(int) - png).max() < 20


def test_unknown_notebook_is_an_error(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["pages.py", "07_more"])
    with pytest.raises(SystemExit) as caught:
        pages.main()
    assert caught.value.code == 2 and "no notebook 07_more; there are 00_start_here" in capsys.readouterr().err


def test_untracked_runs_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "outputs" / "shared").mkdir(parents=True)
    for file in ("README.md", "shared/config.yaml"):
        (tmp_path / "outputs" / file).touch()
    for command in (["init", "-q"], ["add", "outputs"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    assert pages.find_untracked_runs() == []
    (tmp_path / "outputs" / "smoke-1").mkdir()
    monkeypatch.setattr(sys, "argv", ["pages.py"])
    with pytest.raises(SystemExit):
        pages.main()
    assert "outputs/ has untracked runs, which the pages would list: smoke-1" in capsys.readouterr().err
