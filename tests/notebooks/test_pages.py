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
    sys.modules["pages"] = module  # where dataclasses look their module up
    spec.loader.exec_module(module)
    return module


pages = load()
WRITTEN = sorted(pages.PAGES.glob("*.html"))


def test_the_gallery_knows_every_notebook():
    assert [page.stem for page in pages.GALLERY] == [path.stem for path in NOTEBOOKS]


@pytest.mark.parametrize("path", WRITTEN, ids=lambda path: path.stem)
def test_a_page_is_small_opens_without_a_network_and_names_no_folder(path):
    text = path.read_text(encoding="utf-8")
    assert len(text.encode()) < pages.LIMIT_BYTES
    loads = find_external_loads(text)
    assert all(load.startswith('src of <img src="0') for load in loads) if path.stem == "index" else not loads
    assert str(ROOT) not in text and "The notebook stopped" not in text


@pytest.mark.parametrize("path", WRITTEN, ids=lambda path: path.stem)
def test_a_link_of_a_page_leads_to_a_file(path):
    links = re.findall(r'href="([^"#]+)(?:#[^"]*)?"', path.read_text(encoding="utf-8"))
    assert not [link for link in links if "://" not in link and not (path.parent / link).is_file()]


def test_a_link_of_a_notebook_leads_from_its_page_to_the_same():
    prose = (
        "[06](06_does_selection_find.ipynb), [why](../docs/science/retrieval.md), $[a](b)$\n\n[4]: 04_production_run.ipynb"
    )
    shown = new_output("display_data", data={"text/markdown": "[run](../outputs/README.md) <https://arxiv.org>"})
    notebook = new_notebook(cells=[new_markdown_cell(prose), new_code_cell("show()", outputs=[shown])])
    pages.lead_from_pages(notebook)
    page = "[06](06_does_selection_find.html), [why](../science/retrieval.md), $[a](b)$\n\n[4]: "
    assert notebook.cells[0].source == f"{page}../../outputs/{pages.NSA}/report.html"
    assert notebook.cells[1].outputs[0]["data"]["text/markdown"] == "[run](../../outputs/README.md) <https://arxiv.org>"


def test_what_the_gallery_shows_is_there():
    text = (pages.PAGES / "index.html").read_text(encoding="utf-8")
    assert text == pages.gallery()
    for link in re.findall(r'(?:href|src)="([^"]+)"', text):
        assert (pages.PAGES / link).is_file(), link
    assert {path.stem for path in WRITTEN} - {"index"} <= {page.stem for page in pages.GALLERY}


@pytest.mark.parametrize("path", [path for path in WRITTEN if path.stem != "index"], ids=lambda path: path.stem)
def test_the_readme_leads_to_each_page_by_its_picture(path):
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"docs/pages/{path.name}" in text
    assert not path.with_suffix(".webp").is_file() or f'src="docs/pages/{path.stem}.webp"' in text


def test_a_picture_keeps_its_size_and_loses_bytes():
    buffer = io.BytesIO()
    Image.effect_noise((300, 200), 60).convert("RGB").save(buffer, "PNG")
    drawn = buffer.getvalue()
    output = new_output("display_data", data={"image/png": base64.b64encode(drawn).decode()})
    notebook = new_notebook(cells=[new_code_cell("show()", outputs=[output])])
    pages.few_colours(notebook)
    (kept,) = pages.pictures(notebook)
    before, after = Image.open(io.BytesIO(drawn)), Image.open(io.BytesIO(base64.b64decode(kept)))
    assert after.size == before.size and after.mode == "P"
    assert len(base64.b64decode(kept)) < 0.6 * len(drawn)


def test_a_thin_curve_keeps_its_colour_beside_many_others():
    """As in a picture with a colour map: its many shades are not what a few pixels of green are given away for."""
    drawn = np.full((200, 200, 3), 255, dtype=np.uint8)
    drawn[:150] = np.linspace((0, 34, 78), (253, 234, 69), 200)[None]
    drawn[160, 20:60] = (0, 158, 115)
    buffer = io.BytesIO()
    Image.fromarray(drawn).save(buffer, "PNG")
    kept = np.asarray(Image.open(io.BytesIO(pages.with_palette(buffer.getvalue()))).convert("RGB"))
    assert np.abs(kept[160, 20:60].astype(int) - (0, 158, 115)).max() < 20
    assert np.abs(kept.astype(int) - drawn).max() < 20


def test_an_unknown_notebook_is_refused_before_anything_runs(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["pages.py", "07_more"])
    with pytest.raises(SystemExit) as caught:
        pages.main()
    assert caught.value.code == 2 and "no notebook 07_more; there are 00_start_here" in capsys.readouterr().err


def test_runs_that_no_clone_has_are_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "outputs" / "shared").mkdir(parents=True)
    for file in ("README.md", "shared/config.yaml"):
        (tmp_path / "outputs" / file).touch()
    for command in (["init", "-q"], ["add", "outputs"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    assert pages.own_runs() == []
    (tmp_path / "outputs" / "smoke-1").mkdir()
    monkeypatch.setattr(sys, "argv", ["pages.py"])
    with pytest.raises(SystemExit):
        pages.main()
    assert "outputs/ has smoke-1: pages would list them" in capsys.readouterr().err
