"""Export an executed notebook as one self-contained HTML page: opening it loads nothing and runs nothing.

Invariants
* Formulas are MathML, pictures are embedded and have alt text, and code is folded.
* The verdict comes from the files of the run, never from papermill's status of the notebook.
* An executed notebook of a run, or one that cannot be read, is never replaced by one that is built from its record.
* Neither the page nor the executed notebook in a run directory contains a path of the machine.
* A table of box characters keeps its lines, however long. All other output wraps.
* A failed notebook gives a page of its cells so far, with the error at the top.
"""

from __future__ import annotations

import base64
import html
import os
import re
from collections.abc import Sequence
from pathlib import Path

from nsa_lab.config.optional_deps import require

require("nbformat", "nbconvert", "pygments", "matplotlib", "nh3")

import nbformat
from nbconvert import HTMLExporter
from nbformat import NotebookNode
from nbformat.v4 import new_markdown_cell, new_notebook
from pygments.formatters import HtmlFormatter

import nsa_lab.figures as figures
from nsa_lab.figures.loss import plot_sweep
from nsa_lab.figures.style import render_png
from nsa_lab.health.paired_difference import summarize_comparisons
from nsa_lab.health.sweep_results import VariantResult
from nsa_lab.health.verdict_file import write_verdict
from nsa_lab.report.formulas import Formulas
from nsa_lab.report.glossary import link_terms, read_glossary, render_glossary
from nsa_lab.report.header import build_comparison_rows, find_notebook_error, list_different_settings, summarize_run
from nsa_lab.report.index import INDEX, write_index
from nsa_lab.report.record_notebook import IN_HEADER, build_record_notebook, is_record_notebook, list_plots, make_plot_cell
from nsa_lab.report.sanitize import POLICY, sanitize_html
from nsa_lab.report.strip_paths import strip_paths, strip_paths_in_place
from nsa_lab.runs import directory
from nsa_lab.runs.atomic_io import check_output_file, read_bounded, warn_once, write_bytes, write_text
from nsa_lab.runs.history import History, have_different_eval_texts
from nsa_lab.runs.summary import format_settings

__all__ = [
    "INDEX",
    "NOTEBOOK",
    "export_notebook",
    "strip_paths_in_place",
    "write_comparison",
    "write_index",
    "write_report",
    "write_sweep_plot",
]

NOTEBOOK, PAGE = "report.ipynb", "report.html"
# Pages of a run directory, which link to each other. The second is notebook 06 executed for the run.
RUN_PAGES = {PAGE: "the report of this run", "health.html": "its health checks in detail"}
TEMPLATES = Path(__file__).resolve().parent / "templates"
# A picture up to this width is scaled to the screen of a phone. A wider one scrolls sideways.
MAX_UNSCROLLED_PIXELS = 950
WIDGET_MIME_PREFIX = "application/vnd.jupyter.widget-"
PAPERMILL_ERROR_TAG = "papermill-error-cell-tag"
PREFORMATTED = re.compile(r"<pre\b([^>]*)>(.*?)</pre>", re.DOTALL)
BOX_CHARACTERS = ("┃", "│")
PAGE_END = "\n</main>\n</body>\n</html>\n"
TITLE = re.compile(r"^#\s+(.+)\n*", re.MULTILINE)
ANCHOR_LINK = re.compile(r"<a class=\"anchor-link\"[^>]*>.*?</a>", re.DOTALL)


def write_report(run: str | Path | History, page: str | Path | None = None, *, record_only: bool = False) -> Path:
    """Write `report.html` and `verdict.json` into a run directory, and return the path of the page.

    The page shows the run's executed notebook. Without a notebook, or with `record_only`, it shows plots of the run's
    record, and `report.ipynb` is written with the same content, unless it is an executed notebook. A damaged notebook is
    logged and not used. With `page`, only that file is written, without links to other pages, so that it can be shared. The
    verdict of a recorded run stays as it is.

    Raises `RunDirectoryError` if the folder is not a run directory; `UnwritableFile` for a page that cannot be written.
    """
    if page is not None:
        check_output_file(Path(page))
    history = History.read(run)
    notebook = history.run_dir / NOTEBOOK
    existing = _read_notebook(notebook)
    is_executed = existing is not None and not is_record_notebook(existing)
    if page is None:
        if not directory.is_recorded(history.run_dir):
            write_verdict(history)
        if is_executed:
            strip_paths_in_place(notebook)
    if is_executed and not record_only:
        return export_notebook(notebook, page, run_dir=history.run_dir)
    content = build_record_notebook(history)
    if page is None and not is_executed and (existing is not None or not os.path.lexists(notebook)):
        write_text(notebook, nbformat.writes(strip_paths(content)) + "\n")
    links = {} if page else _build_links(history, PAGE)
    return _write_page(content, Path(page or history.run_dir / PAGE), [history], title=history.run, links=links)


def _read_notebook(path: Path) -> NotebookNode | None:
    """Return a notebook; None if it is missing or damaged, which is logged."""
    if not os.path.lexists(path):
        return None
    try:
        notebook = nbformat.reads(read_bounded(path).decode(), as_version=4)
        nbformat.validate(notebook)
    except (*directory.READ_ERRORS, AttributeError, nbformat.ValidationError) as error:
        reason = directory.describe_read_error(error)
        warn_once(f"{path}: not a notebook ({reason}); not used and not replaced; restore or delete it")
        return None
    return notebook


def export_notebook(notebook: str | Path, page: str | Path | None = None, *, run_dir: str | Path | None = None) -> Path:
    """Export the executed notebook at `notebook` as a page, by default next to it, and return the path of the page.

    With `run_dir`, the header shows the verdict of that run. A notebook in that directory, exported next to itself, gets
    links to the other pages of the run.
    """
    source, target = Path(notebook), Path(page or Path(notebook).with_suffix(".html"))
    check_output_file(target)
    histories = [History.read(run_dir)] if run_dir else []
    content = strip_paths(nbformat.read(source, as_version=4))
    is_in_run_dir = histories and not page and source.parent.resolve() == histories[0].run_dir.resolve()
    return _write_page(
        content,
        target,
        histories,
        title=_take_title(content) or source.stem,
        folder=source.parent,
        links=_build_links(histories[0], target.name) if is_in_run_dir else {},
    )


def write_comparison(runs: Sequence[str | Path | History], page: str | Path) -> Path:
    """Write a page that compares several runs: their verdicts, then their curves in common plots."""
    check_output_file(Path(page))
    histories = [History.read(run) for run in runs]
    title = f"{len(histories)} runs compared"
    return _write_page(_build_comparison(histories), Path(page), histories, title=title, with_plots=False)


def write_sweep_plot(results: Sequence[VariantResult], name: str, path: Path) -> Path | None:
    """Write the plot of the variants that can be compared to `path` and return it, or None if there are none yet."""
    curves = [result.curve for result in results if result.curve]
    if not curves:
        return None
    excluded = [result.name for result in results if result.n_done and not result.curve]
    title = f"{name}: validation" + (
        f" (not shown, because evaluated on other text: {', '.join(excluded)})" if excluded else ""
    )
    write_bytes(path, render_png(plot_sweep(curves, title=title)))
    return path


def _write_page(
    notebook: NotebookNode,
    page: Path,
    histories: list[History],
    *,
    title: str,
    folder: Path | None = None,
    with_plots: bool = True,
    links: dict[str, str] | None = None,
) -> Path:
    formulas = Formulas()
    runs = [summarize_run(history, with_plots=with_plots) for history in histories]
    for run, settings in zip(runs, list_different_settings(histories), strict=True):
        run["different_settings"] = settings
    error = find_notebook_error(notebook)
    prepared = _prepare_notebook(notebook, formulas)
    exporter = HTMLExporter(template_name="run", extra_template_basedirs=[str(TEMPLATES)], embed_images=True)
    # The kernel sends the output of a cell in pieces; join them.
    exporter.register_preprocessor("nbconvert.preprocessors.CoalesceStreamsPreprocessor", enabled=True)
    subtitle = histories[0].run if len(histories) == 1 and histories[0].run != title else None
    resources = {
        "metadata": {"path": str(folder or page.parent), "name": page.stem},
        "page": {
            "policy": POLICY,
            "title": title,
            "subtitle": subtitle,
            "style": _build_style(),
            "error": error,
            "links": links or {},
            "runs": runs,
            "comparison": build_comparison_rows(runs, have_different_eval_texts(histories)) if len(runs) > 1 else None,
        },
    }
    text, _ = exporter.from_notebook_node(prepared, resources)
    glossary = read_glossary()
    # The part before <main> comes from the templates, which escape their values. The rest may come from the notebook,
    # including formulas and end tags without a start tag. Sanitize it last.
    head, _, body = text.partition("<main>")
    body = sanitize_html(formulas.restore(PREFORMATTED.sub(_add_boxed_class, ANCHOR_LINK.sub("", body))))
    if histories:
        head, terms = link_terms(head, glossary)
        head = head.replace("<!-- glossary -->", render_glossary(terms, glossary))
    head = head.replace("<!-- contents -->", sanitize_html(_build_contents(body)))
    write_text(page, f"{head}<main>{body.rstrip()}{PAGE_END}")
    return page


def _build_links(history: History, page: str) -> dict[str, str]:
    """Return the links of a run's page `page` to the other pages that exist: address and title."""
    links = {name: title for name, title in RUN_PAGES.items() if name != page and (history.run_dir / name).is_file()}
    return links | ({f"../{INDEX}": "all runs"} if (history.run_dir.parent / INDEX).is_file() else {})


def _prepare_notebook(notebook: NotebookNode, formulas: Formulas) -> NotebookNode:
    """Return a copy without widget state, with placeholders for formulas and alt text for every picture."""
    copy = nbformat.from_dict(notebook)
    assert isinstance(copy, NotebookNode), "from_dict returns a NotebookNode for a mapping"
    copy.metadata.pop("widgets", None)
    hidden = {PAPERMILL_ERROR_TAG, IN_HEADER}
    copy.cells = [cell for cell in copy.cells if not hidden & set(cell.metadata.get("tags", []))]
    heading = "the report"
    for cell in copy.cells:
        if cell.cell_type == "markdown":
            heading = _last_heading(cell.source) or heading
            cell.source = formulas.hide(cell.source)
        elif cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if _prepare_output(output, formulas, heading)]
    return copy


def _prepare_output(output: NotebookNode, formulas: Formulas, heading: str) -> bool:
    """Prepare one output for the page, in place. Return False if nothing of it can be shown."""
    if "data" not in output:
        return True
    data = output.data
    if "image/svg+xml" in data:
        # An SVG in an <img> cannot run scripts.
        encoded = base64.b64encode("".join(data.pop("image/svg+xml")).encode()).decode()
        alt = html.escape(f"Figure of the section “{heading}”")
        data["text/html"] = f'<img alt="{alt}" src="data:image/svg+xml;base64,{encoded}">'
    for mime in [mime for mime in data if mime.startswith(WIDGET_MIME_PREFIX)]:
        del data[mime]
    if "text/latex" in data:
        data["text/markdown"] = formulas.hide(data.pop("text/latex"))
    elif "text/markdown" in data:
        data["text/markdown"] = formulas.hide(data["text/markdown"])
    for mime in ("image/png", "image/jpeg"):
        if mime in data and not output.metadata.get(mime, {}).get("alt"):
            output.metadata.setdefault(mime, {})["alt"] = f"Figure of the section “{heading}”"
    if "image/png" in data and _get_png_width(data["image/png"]) > MAX_UNSCROLLED_PIXELS:
        # The key of the notebook format, which the style sheet uses.
        output.metadata["image/png"]["unconfined"] = True
    return bool(data)


def _get_png_width(picture: str) -> int:
    """Return the width of a base64-encoded PNG from its header, or 0 if it is not a PNG."""
    header = base64.b64decode(picture[:32])
    return int.from_bytes(header[16:20], "big") if header.startswith(b"\x89PNG") else 0


def _add_boxed_class(match: re.Match[str]) -> str:
    """Return the <pre> element with the class that forbids line breaks if it contains a table of box characters."""
    attributes, text = match.groups()
    return f'<pre class="boxed"{attributes}>{text}</pre>' if any(line in text for line in BOX_CHARACTERS) else match[0]


def _build_comparison(histories: list[History]) -> NotebookNode:
    """Return plots of several runs as an executed notebook: common curves, then the plots of each run."""
    lines = ["# Comparison", *(f"* {line}" for line in summarize_comparisons(histories))]
    cells = [new_markdown_cell("\n".join(lines))]
    for plot in (figures.plot_loss_curves, figures.plot_learning_rate, figures.plot_throughput):
        cells.append(make_plot_cell(plot, histories, f"figures.{plot.__name__}(runs)"))
    for history in histories:
        cells += [new_markdown_cell(f"# {history.run}"), new_markdown_cell(format_settings(history.config))]
        if not history.steps:
            cells.append(new_markdown_cell("Nothing has been recorded yet."))
            continue
        plots = [plot for plot in list_plots(history) if plot not in figures.RUN_PLOTS]
        cells += [make_plot_cell(plot, history, f"figures.{plot.__name__}(run)") for plot in plots]
    return new_notebook(cells=cells)


def _take_title(notebook: NotebookNode) -> str | None:
    """Remove the first heading from its cell, in place, and return it as the title of the page."""
    for cell in notebook.cells:
        if cell.cell_type == "markdown" and (match := TITLE.search(cell.source)):
            cell.source = TITLE.sub("", cell.source, count=1)
            return match[1].strip().strip("`")
    return None


def _last_heading(markdown: str) -> str | None:
    headings = re.findall(r"^#{1,4}\s+(.+)$", markdown, re.MULTILINE)
    return headings[-1].strip() if headings else None


def _build_contents(body: str) -> str:
    headings = re.findall(r'<h([1-3])\b[^>]*\bid="([^"]+)"[^>]*>(.*?)</h\1>', body, re.DOTALL)
    items = [
        f'<li class="h{level}"><a href="#{anchor}">{re.sub(r"<(?!/?math|/?m)[^>]+>", "", text)}</a></li>'
        for level, anchor, text in headings
    ]
    return f"<ol>{''.join(items)}</ol>" if len(items) > 2 else ""


def _build_style() -> str:
    sheet = (TEMPLATES / "run" / "style.css").read_text(encoding="utf-8")
    light, dark = (HtmlFormatter(style=name).get_style_defs(".highlight") for name in ("default", "github-dark"))
    return (
        f"{sheet}\n{light}\n.highlight {{ background: var(--panel); }}\n"
        f"@media (prefers-color-scheme: dark) {{\n{dark}\n.highlight {{ background: var(--panel); }}\n}}"
    )
