"""Execute notebooks and write each as a self-contained page into docs/pages, with a thumbnail, and a gallery of all pages.

    python notebooks/pages.py [STEM...]      # all notebooks or the named ones; the gallery is always rewritten

A page needs no network and runs nothing. Pictures are stored with few colours, which keeps a page small. Notebook 04 needs
a GPU, so its page is the report of a recorded run. Runs that the notebooks train here go to .cache/pages.
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
from nsa_lab.report import export_notebook, write_report
from nsa_lab.workbook.examples import make_byte_examples, read_standard_library
from nsa_lab.workbook.query_attention import compute_reads

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = ROOT / "notebooks"
PAGES, PICTURES = ROOT / "docs" / "pages", ROOT / "docs" / "pictures"
WORK = ROOT / ".cache" / "pages"
EMBEDDED_PNG = re.compile(r"(?<=data:image/png;base64,)[\w+/=]+")
# `[text](target)` and `[number]: target` in Markdown.
LINK = re.compile(r"(\]\(|^\[\w+\]: +)([^)\s]+)", re.MULTILINE)
NSA, DENSE = "production_50k-20261121T141448Z-afd3", "production_50k_dense-20261121T141448Z-bac4"
COLOURS, THUMBNAIL_PIXELS, LIMIT_BYTES = 96, (480, 300), 1_500_000


@dataclass(frozen=True)
class Page:
    """A notebook in the gallery: its description, its parameters, and the picture of its thumbnail.

    `picture` is the index among its pictures (-1: the last). If `recorded_run` is set, the page is the report of that run.
    """

    stem: str
    title: str
    description: str
    parameters: dict[str, Any] = field(default_factory=dict)
    picture: int = 0
    recorded_run: str = ""


RUNS = {"outputs": str(WORK / "runs")}
GALLERY = (
    Page("00_start_here", "Start here", "which notebook to open, and the list of runs"),
    Page("01_branch_derivations", "The three branches", "equation, code and picture of each step", picture=-1),
    Page("02_kernel_parity", "Kernel parity", "every backend compared with the definition in float64"),
    Page("03_smoke_training", "Training, small", "a small model trained on real text on a CPU", RUNS),
    Page(
        "04_production_run",
        "The production run",
        "50,000 steps on one H200",
        recorded_run=NSA,
    ),
    Page(
        "05_health_analysis",
        "Health of a run",
        "the production run compared with its dense baseline",
        {"run_dir": f"outputs/{NSA}", "other_run": f"outputs/{DENSE}"},
        picture=8,
    ),
    Page(
        "06_does_selection_find", "Does selection find?", "tiny models learn to recall; their block selection is replaced"
    ),
    Page("07_decoding", "Decoding", "what a decoding step reads, and its speed", picture=1),
    Page("08_long_texts", "Long texts", "NSA and its dense baseline at 65,536 bytes: facts, text, cost", picture=1),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stems", nargs="*", metavar="STEM", help="for example 01_branch_derivations; default: all")
    wanted = parser.parse_args().stems
    unknown = set(wanted) - {page.stem for page in GALLERY}
    if unknown:
        parser.error(f"no notebook {', '.join(sorted(unknown))}; there are {', '.join(page.stem for page in GALLERY)}")
    if untracked := find_untracked_runs():
        parser.error(
            f"outputs/ has untracked runs, which the pages would list: {', '.join(untracked)}; move them elsewhere first"
        )
    WORK.mkdir(parents=True, exist_ok=True)
    PAGES.mkdir(parents=True, exist_ok=True)
    large = [page.stem for page in GALLERY if (not wanted or page.stem in wanted) and build_page(page) > LIMIT_BYTES]
    (PAGES / "index.html").write_text(render_gallery(), encoding="utf-8")
    write_readme_pictures()
    if large:
        print(f"larger than {LIMIT_BYTES:,} bytes: {', '.join(large)}; show fewer or smaller pictures", file=sys.stderr)
    return 1 if large else 0


def find_untracked_runs() -> list[str]:
    """Return the runs in outputs/ that are not in git."""
    tracked = subprocess.run(["git", "ls-files", "outputs"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    shared = {Path(path).parts[1] for path in tracked.splitlines()}
    return sorted(path.name for path in (ROOT / "outputs").iterdir() if path.is_dir() and path.name not in shared)


def build_page(page: Page) -> int:
    """Execute, shrink and export one notebook, and return the size of its page."""
    start = time.monotonic()
    target = PAGES / f"{page.stem}.html"
    if page.recorded_run:
        run_dir = ROOT / "outputs" / page.recorded_run
        write_thumbnail(page, render_png(figures.plot_overview(run_dir)))
        text = write_report(run_dir, target, record_only=True).read_text(encoding="utf-8")
        target.write_text(EMBEDDED_PNG.sub(quantize_embedded, text), encoding="utf-8")
        return target.stat().st_size
    source = execute(page)
    notebook = nbformat.read(source, as_version=4)
    png_list = list_pictures(notebook)
    if png_list:
        write_thumbnail(page, base64.b64decode(png_list[min(page.picture, len(png_list) - 1)]))
    quantize_pictures(notebook)
    rewrite_links(notebook)
    nbformat.write(notebook, source)
    exported = export_notebook(source, target)
    print(f"{page.stem}: {exported.stat().st_size / 1e6:.2f} MB, {time.monotonic() - start:.0f} s", flush=True)
    return exported.stat().st_size


def execute(page: Page) -> Path:
    """Execute the notebook of a page and return its path in .cache."""
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


def list_outputs(notebook: NotebookNode) -> list[dict[str, Any]]:
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return [output["data"] for cell in cells for output in cell.outputs if "data" in output]


def list_pictures(notebook: NotebookNode) -> list[str]:
    """Return the pictures in a notebook's outputs, each a base64-encoded PNG."""
    return [data["image/png"] for data in list_outputs(notebook) if "image/png" in data]


def quantize_pictures(notebook: NotebookNode) -> None:
    """Store every picture with a colour palette, in place."""
    for data in list_outputs(notebook):
        if "image/png" in data:
            data["image/png"] = base64.b64encode(quantize_png(base64.b64decode(data["image/png"]))).decode()


def rewrite_links(notebook: NotebookNode) -> None:
    """Change links in text and outputs from relative to the notebooks to relative to the pages, in place."""
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = LINK.sub(rewrite_link, cell.source)
    for data in list_outputs(notebook):
        if "text/markdown" in data:
            data["text/markdown"] = LINK.sub(rewrite_link, data["text/markdown"])


def rewrite_link(link: re.Match[str]) -> str:
    """Return the link to the page of another notebook, or to the same file. Leave other links unchanged."""
    prefix, target = link.groups()
    page = next((page for page in GALLERY if target == f"{page.stem}.ipynb"), None)
    if page:
        return f"{prefix}{page.stem}.html"
    return prefix + os.path.relpath(NOTEBOOKS / target, PAGES) if (NOTEBOOKS / target).is_file() else link[0]


def quantize_png(png: bytes) -> bytes:
    """Reduce a PNG to `COLOURS` colours, a third of the size."""
    buffer = io.BytesIO()
    image = Image.open(io.BytesIO(png)).convert("RGB")
    # The default method merges colours of few pixels, for example of a curve, which turned from green to blue.
    quantized = image.quantize(COLOURS, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    quantized.save(buffer, "PNG", optimize=True)
    return buffer.getvalue()


def quantize_embedded(match: re.Match[str]) -> str:
    """Return the quantized PNG of a base64-encoded one."""
    return base64.b64encode(quantize_png(base64.b64decode(match[0]))).decode()


def write_readme_pictures() -> None:
    """Write the pictures of the README: the explorer of notebook 01, and the production run minus its dense baseline."""
    model = load_model("needle-8m")
    layers = make_byte_examples(model, read_standard_library(2048).encode(), "needle-8m on textwrap.py")
    example = layers[model.config.n_layers // 2]
    PICTURES.mkdir(parents=True, exist_ok=True)
    for name, figure in (
        ("explorer.png", figures.plot_query_attention(compute_reads(example, model.config.nsa, 1900), example.description)),
        ("nsa_less_dense.png", figures.plot_loss_difference(ROOT / "outputs" / NSA, ROOT / "outputs" / DENSE)),
    ):
        (PICTURES / name).write_bytes(quantize_png(render_png(figure)))


def write_thumbnail(page: Page, drawn: bytes) -> None:
    """Write a PNG, scaled down, as the thumbnail of a page."""
    image = Image.open(io.BytesIO(drawn)).convert("RGB")
    image.thumbnail(THUMBNAIL_PIXELS)
    image.save(PAGES / f"{page.stem}.webp", quality=80)


def render_gallery() -> str:
    """Return the page that links to all others."""
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
<p>Each page is one file that needs no network. The code is folded.</p>
<main>
{"".join(render_card(page) for page in GALLERY if (PAGES / f"{page.stem}.html").is_file())}</main>
</body>
</html>
"""


def render_card(page: Page) -> str:
    link = f"{page.stem}.html"
    image = f'<img src="{page.stem}.webp" alt="">' if (PAGES / f"{page.stem}.webp").is_file() else ""
    return f'<a href="{link}">{image}<h2>{html.escape(page.title)}</h2><p>{html.escape(page.description)}</p></a>\n'


if __name__ == "__main__":
    sys.exit(main())
