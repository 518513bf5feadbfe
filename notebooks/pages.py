"""Executes notebooks and writes each as a self-contained page into docs/pages, with a thumbnail and a gallery of all.

    python notebooks/pages.py [STEM...]      # all of them, or those named; the gallery is written anew each time

A page needs no network and runs nothing. Pictures are stored with few colours, which keeps a page small. 04 needs a GPU, so
the gallery links the report of the run on one; what a notebook trains here goes to .cache/pages, and nowhere else.
"""

from __future__ import annotations

import argparse
import base64
import html
import io
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nbformat
import papermill
from nbformat import NotebookNode
from PIL import Image

from nsa_lab import figures, load_model
from nsa_lab.figures.style import render_png
from nsa_lab.report import export_notebook
from nsa_lab.workbook.examples import make_byte_examples, read_standard_library
from nsa_lab.workbook.query_attention import compute_reads

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = ROOT / "notebooks"
PAGES, PICTURES = ROOT / "docs" / "pages", ROOT / "docs" / "pictures"
WORK = ROOT / ".cache" / "pages"
# `[text](target)` and `[number]: target` of Markdown.
LINK = re.compile(r"(\]\(|^\[\w+\]: +)([^)\s]+)", re.MULTILINE)
NSA, DENSE = "production_50k-20261121T141448Z-afd3", "production_50k_dense-20261121T141448Z-bac4"
COLOURS, THUMBNAIL_PIXELS, LIMIT_BYTES = 96, (480, 300), 1_500_000


@dataclass(frozen=True)
class Page:
    """A notebook of the gallery: what it shows, its parameters, and which of its pictures stands for it, from 0; -1 is
    the last.

    `instead` is the page that there is already, from docs/pages.
    """

    stem: str
    title: str
    shows: str
    parameters: dict[str, Any] = field(default_factory=dict)
    picture: int = 0
    instead: str = ""


RUNS = {"outputs": str(WORK / "runs")}
GALLERY = (
    Page("00_start_here", "Start here", "what to open for what, and the runs there are"),
    Page("01_branch_derivations", "The three branches", "equation, code and picture of each step", picture=-1),
    Page("02_kernel_parity", "Kernel parity", "every backend against the definition, in float64"),
    Page("03_smoke_training", "Training, small", "a small model learns real text on a CPU", RUNS),
    Page(
        "04_production_run",
        "The production run",
        "50,000 steps on one H200, executed there",
        instead=f"../../outputs/{NSA}/report.html",
    ),
    Page(
        "05_health_analysis",
        "Health of a run",
        "the production run beside its dense twin",
        {"run_dir": f"outputs/{NSA}", "other_run": f"outputs/{DENSE}"},
        picture=8,
    ),
    Page("06_does_selection_find", "Does selection find?", "tiny models learn to recall; their choice is replaced"),
    Page("07_decoding", "Decoding", "what one more token reads, and how long that takes", picture=1),
    Page("08_long_texts", "Long texts", "NSA beside its dense twin at 65,536 bytes: facts, text, cost", picture=1),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stems", nargs="*", metavar="STEM", help="e.g. 01_branch_derivations; all if none is named")
    wanted = parser.parse_args().stems
    unknown = set(wanted) - {page.stem for page in GALLERY}
    if unknown:
        parser.error(f"no notebook {', '.join(sorted(unknown))}; there are {', '.join(page.stem for page in GALLERY)}")
    if own := own_runs():
        parser.error(
            f"outputs/ has {', '.join(own)}: pages would list them, and no clone has them; move them away meanwhile"
        )
    WORK.mkdir(parents=True, exist_ok=True)
    PAGES.mkdir(parents=True, exist_ok=True)
    large = [page.stem for page in GALLERY if (not wanted or page.stem in wanted) and make(page) > LIMIT_BYTES]
    (PAGES / "index.html").write_text(gallery(), encoding="utf-8")
    readme_pictures()
    if large:
        print(
            f"larger than {LIMIT_BYTES:,} bytes: {', '.join(large)}; show fewer pictures, or smaller ones", file=sys.stderr
        )
    return 1 if large else 0


def own_runs() -> list[str]:
    """Runs in outputs/ beside those that are shared, which git keeps."""
    kept = subprocess.run(["git", "ls-files", "outputs"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    shared = {Path(path).parts[1] for path in kept.splitlines()}
    return sorted(path.name for path in (ROOT / "outputs").iterdir() if path.is_dir() and path.name not in shared)


def make(page: Page) -> int:
    """Execute, shrink and export one notebook; the bytes of its page. Where there is a page already, its picture alone."""
    began = time.monotonic()
    if page.instead:
        thumbnail(page, render_png(figures.plot_overview(ROOT / "outputs" / NSA)))
        return 0
    source = executed(page)
    notebook = nbformat.read(source, as_version=4)
    drawn = pictures(notebook)
    if drawn:
        thumbnail(page, base64.b64decode(drawn[min(page.picture, len(drawn) - 1)]))
    few_colours(notebook)
    lead_from_pages(notebook)
    nbformat.write(notebook, source)
    written = export_notebook(source, PAGES / f"{page.stem}.html")
    print(f"{page.stem}: {written.stat().st_size / 1e6:.2f} MB, {time.monotonic() - began:.0f} s", flush=True)
    return written.stat().st_size


def executed(page: Page) -> Path:
    """The executed notebook of a page, in .cache."""
    target = WORK / f"{page.stem}.ipynb"
    papermill.execute_notebook(
        NOTEBOOKS / target.name,
        target,
        parameters=page.parameters,
        cwd=str(NOTEBOOKS),
        progress_bar=False,
        log_output=False,
    )
    return target


def outputs(notebook: NotebookNode) -> list[dict[str, Any]]:
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return [output["data"] for cell in cells for output in cell.outputs if "data" in output]


def pictures(notebook: NotebookNode) -> list[str]:
    """The pictures in a notebook's outputs, base64 of a PNG each."""
    return [data["image/png"] for data in outputs(notebook) if "image/png" in data]


def few_colours(notebook: NotebookNode) -> None:
    """Store every picture with a palette, in place."""
    for data in outputs(notebook):
        if "image/png" in data:
            data["image/png"] = base64.b64encode(with_palette(base64.b64decode(data["image/png"]))).decode()


def lead_from_pages(notebook: NotebookNode) -> None:
    """Make links of prose and outputs, which lead from the folder of notebooks, lead from that of pages, in place."""
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = LINK.sub(from_pages, cell.source)
    for data in outputs(notebook):
        if "text/markdown" in data:
            data["text/markdown"] = LINK.sub(from_pages, data["text/markdown"])


def from_pages(link: re.Match[str]) -> str:
    """A link as a page has it: to the page of another notebook, or to the same file. What is no file is left alone."""
    before, target = link.groups()
    page = next((page for page in GALLERY if target == f"{page.stem}.ipynb"), None)
    if page:
        return before + (page.instead or f"{page.stem}.html")
    return before + os.path.relpath(NOTEBOOKS / target, PAGES) if (NOTEBOOKS / target).is_file() else link[0]


def with_palette(drawn: bytes) -> bytes:
    """A PNG with `COLOURS` colours, a third of the size."""
    buffer = io.BytesIO()
    image = Image.open(io.BytesIO(drawn)).convert("RGB")
    # The default method merges colours that few pixels have, and a curve is few pixels: its green came out blue.
    few = image.quantize(COLOURS, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    few.save(buffer, "PNG", optimize=True)
    return buffer.getvalue()


def readme_pictures() -> None:
    """The two pictures of the README: the explorer of notebook 01 as it begins, and the production run less its twin."""
    model = load_model("needle-8m")
    layers = make_byte_examples(model, read_standard_library(2048).encode(), "needle-8m on textwrap.py")
    read = layers[model.config.n_layers // 2]
    PICTURES.mkdir(parents=True, exist_ok=True)
    for name, figure in (
        ("explorer.png", figures.plot_query_attention(compute_reads(read, model.config.nsa, 1900), read.description)),
        ("nsa_less_dense.png", figures.plot_loss_difference(ROOT / "outputs" / NSA, ROOT / "outputs" / DENSE)),
    ):
        (PICTURES / name).write_bytes(with_palette(render_png(figure)))


def thumbnail(page: Page, drawn: bytes) -> None:
    """Write a PNG, made small, as the picture that stands for a page."""
    image = Image.open(io.BytesIO(drawn)).convert("RGB")
    image.thumbnail(THUMBNAIL_PIXELS)
    image.save(PAGES / f"{page.stem}.webp", quality=80)


def gallery() -> str:
    """The page that links all others."""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>nsa_lab: the notebooks, executed</title>
<style>
:root {{ color-scheme: light dark }}
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem }}
main {{ display: grid; grid-template-columns: repeat(auto-fill, minmax(min(18rem, 100%), 1fr)); gap: 1.2rem }}
h1 + p {{ margin-bottom: 1.5rem }}
a {{ color: inherit; text-decoration: none; border: 1px solid #8885; border-radius: 8px; padding: .8rem; display: block }}
a:hover {{ border-color: #0072b2 }}
img {{ width: 100%; height: 11rem; object-fit: contain; background: white; border-radius: 4px }}
h2 {{ font-size: 1.05rem; margin: .5rem 0 0 }}
p {{ margin: .2rem 0 0 }}
</style>
</head>
<body>
<h1>The notebooks, executed</h1>
<p>Each page is one file that opens without a network. The code is folded away, and there.</p>
<main>
{"".join(card(page) for page in GALLERY if page.instead or (PAGES / f"{page.stem}.html").is_file())}</main>
</body>
</html>
"""


def card(page: Page) -> str:
    link = page.instead or f"{page.stem}.html"
    image = f'<img src="{page.stem}.webp" alt="">' if (PAGES / f"{page.stem}.webp").is_file() else ""
    return f'<a href="{link}">{image}<h2>{html.escape(page.title)}</h2><p>{html.escape(page.shows)}</p></a>\n'


if __name__ == "__main__":
    sys.exit(main())
