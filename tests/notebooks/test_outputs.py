"""The committed notebooks and recorded reports as a forge shows them: executed, without errors, small, and well-formed."""

from __future__ import annotations

import base64
import io
import re
import sys
from pathlib import Path

import nbformat
import pytest
from nbformat import NotebookNode
from PIL import Image

from nsa_lab.figures.style import reduce_colours

from .conftest import NOTEBOOKS, ROOT, committed, pictures

REPORTS = sorted(ROOT.glob("outputs/*/report.ipynb")) if (ROOT / "outputs" / "README.md").is_file() else []
MAX_NOTEBOOK_BYTES, MAX_NOTEBOOKS_BYTES, MAX_REPORT_BYTES = 1_000_000, 6_000_000, 600_000
# Folders of any machine. Generic texts such as `/path/to/text` are no folders.
LOCAL_PATH = re.compile(r"/(?:home|Users|root|tmp|work|mnt|opt|workspace)/[\w.-]+")
ESCAPE_CODE = "\x1b["


def read(path: Path) -> NotebookNode:
    return nbformat.reads(committed(path), as_version=4)


def list_code_cells(notebook: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_cell_ran_in_order_without_an_error(path: Path) -> None:
    cells = list_code_cells(read(path))
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    for output in (output for cell in cells for output in cell.outputs):
        assert output.output_type != "error" and output.get("name") != "stderr"
        assert output.get("execution_count") in (None, *range(1, len(cells) + 1))


@pytest.mark.parametrize("path", [*NOTEBOOKS, *REPORTS], ids=lambda path: f"{path.parent.name}/{path.name}"[:40])
def test_outputs_are_portable(path: Path) -> None:
    """No path of the machine, no widget, no colour code; pictures have a palette and alt text."""
    text, notebook = committed(path), read(path)
    assert "widget-view" not in text and ESCAPE_CODE not in text and "widgets" not in notebook.metadata
    prose = re.sub(r'"image/png": "[^"]*"', "", text)
    assert not [folder for folder in (str(ROOT), sys.prefix, str(Path.home())) if f"{folder}/" in prose]
    assert not LOCAL_PATH.findall(prose)
    for picture in pictures(notebook):
        assert picture.metadata["image/png"]["alt"]
        assert Image.open(io.BytesIO(base64.b64decode(picture.data["image/png"]))).mode == "P"


def test_sizes() -> None:
    sizes = {path.name: len(committed(path).encode()) for path in NOTEBOOKS}
    assert max(sizes.values()) <= MAX_NOTEBOOK_BYTES, sizes
    assert sum(sizes.values()) <= MAX_NOTEBOOKS_BYTES, sizes
    for path in REPORTS:
        assert len(committed(path).encode()) <= MAX_REPORT_BYTES, path


@pytest.mark.parametrize("path", [*NOTEBOOKS, *REPORTS], ids=lambda path: f"{path.parent.name}/{path.name}"[:40])
def test_one_title_and_no_duplicate_link(path: Path) -> None:
    """Sphinx joins the cells of a notebook into one page: a second title starts another page, a second [1] is ignored."""
    prose = "\n".join(cell.source for cell in read(path).cells if cell.cell_type == "markdown")
    prose = re.sub(r"^```.*?^```", "", prose, flags=re.MULTILINE | re.DOTALL)
    assert len(re.findall(r"^# ", prose, re.MULTILINE)) == 1
    definitions = re.findall(r"^\[(\w+)\]: ", prose, re.MULTILINE)
    assert len(definitions) == len(set(definitions))
    used = set(re.findall(r"\]\[(\w+)\]", prose))
    assert used == set(definitions)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_folded_answers_are_markdown(path: Path) -> None:
    """Without a blank line after `<summary>`, the text is HTML: its formulas and code are not rendered."""
    for cell in read(path).cells:
        if cell.cell_type == "markdown":
            assert not re.search(r"^<details>.*\n(?!\n)", cell.source, re.MULTILINE), cell.source


def test_palette_picture_has_the_same_size_and_colours_and_fewer_bytes() -> None:
    """A picture with a colour map has many shades; they must not replace the colour of a curve of few pixels."""
    image = Image.linear_gradient("L").resize((400, 200)).convert("RGB")
    image.paste(Image.effect_noise((400, 60), 90).convert("RGB"), (0, 0))
    image.paste((0, 158, 115), (20, 160, 60, 161))
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    stored = Image.open(io.BytesIO(reduce_colours(buffer.getvalue())))
    assert stored.size == image.size and stored.mode == "P"
    colour = stored.convert("RGB").getpixel((30, 160))
    assert max(abs(a - b) for a, b in zip(colour, (0, 158, 115), strict=True)) < 10
    assert len(reduce_colours(buffer.getvalue())) < 0.6 * len(buffer.getvalue())
