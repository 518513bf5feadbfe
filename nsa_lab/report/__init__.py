"""An executed notebook as one self-contained HTML page: nothing is fetched and nothing runs when it is opened.

Invariants
* Formulas are MathML, pictures are embedded and carry alt text, code is folded away but there.
* The verdict comes from the run's own files, never from what papermill says about the notebook.
* What the header says, the title above all, the notebook below it does not say again.
* No path of the machine that it ran on: neither on the page nor in the executed notebook of a run directory.
* A table drawn with box characters keeps its lines, however long; any other output wraps.
* A notebook that failed gives a page of what it did, with the error on top.
"""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from nsa_lab.config.optional_deps import require

require("nbformat", "nbconvert", "pygments", "matplotlib", "nh3")

import nbformat
from matplotlib.figure import Figure
from nbconvert import HTMLExporter
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from pygments.formatters import HtmlFormatter

import nsa_lab.figures as figures
from nsa_lab.figures.panels import cut, panel_boxes
from nsa_lab.figures.style import get_title, render_png
from nsa_lab.health import write_verdict
from nsa_lab.health.paired_difference import summarize_comparisons
from nsa_lab.report.formulas import Formulas
from nsa_lab.report.header import build_comparison_rows, find_notebook_error, list_different_settings, summarize_run
from nsa_lab.report.index import INDEX, write_index
from nsa_lab.report.once import once
from nsa_lab.report.sanitize import POLICY, find_external_loads, sanitize_html
from nsa_lab.report.strip_paths import strip_paths, strip_paths_in_place
from nsa_lab.runs.atomic_io import write_text
from nsa_lab.runs.history import History, have_different_eval_texts
from nsa_lab.runs.summary import format_settings

__all__ = [
    "INDEX",
    "NOTEBOOK",
    "export_notebook",
    "find_external_loads",
    "strip_paths_in_place",
    "write_comparison",
    "write_index",
    "write_report",
]

NOTEBOOK, PAGE = "report.ipynb", "report.html"
# Pages of a run directory that speak of each other where both are there; the second is notebook 05 on the run.
RUN_PAGES = {PAGE: "the report of this run", "health.html": "its health, in detail"}
TEMPLATES = Path(__file__).resolve().parent / "templates"
# A chart as wide as this can be read on a phone as a whole; a drawing that is wider scrolls there.
MAX_UNSCROLLED_PIXELS = 950
WIDGET_MIME_PREFIX = "application/vnd.jupyter.widget-"
PAPERMILL_ERROR_TAG = "papermill-error-cell-tag"
PREFORMATTED = re.compile(r"<pre\b([^>]*)>(.*?)</pre>", re.DOTALL)
BOX_CHARACTERS = ("┃", "│")
PAGE_END = "\n</main>\n</body>\n</html>\n"
TITLE = re.compile(r"^#\s+(.+)\n*", re.MULTILINE)
ANCHOR_LINK = re.compile(r"<a class=\"anchor-link\"[^>]*>.*?</a>", re.DOTALL)


def write_report(run_dir: str | Path, page: str | Path | None = None, *, record_only: bool = False) -> Path:
    """`report.html` in a run directory, from its executed notebook, or from its record alone where there is none, and with
    `record_alone`; and the verdict beside it. With `page` that file alone is written, and it links to no other, so that it
    can be handed on, or shared in a repository.

    Raises `RunDirectoryError` if the folder is not a run directory.
    """
    history = History.read(run_dir)
    notebook = history.run_dir / NOTEBOOK
    if page is None:
        write_verdict(history)
        if notebook.is_file():
            strip_paths_in_place(notebook)
    if notebook.is_file() and not record_only:
        return export_notebook(notebook, page, run_dir=history.run_dir)
    links = {} if page else _build_links(history, PAGE)
    return _write_page(
        _build_notebook([history]), Path(page or history.run_dir / PAGE), [history], title=history.run, links=links
    )


def export_notebook(notebook: str | Path, page: str | Path | None = None, *, run_dir: str | Path | None = None) -> Path:
    """The executed notebook at `notebook` as a page, by default beside it; with `run_dir`, that run's verdict on top.

    In the folder of that run it links to what else there is to read of it, unless `page` says where it goes.
    """
    source, target = Path(notebook), Path(page or Path(notebook).with_suffix(".html"))
    histories = [History.read(run_dir)] if run_dir else []
    content = strip_paths(nbformat.read(source, as_version=4))
    at_home = histories and not page and source.parent.resolve() == histories[0].run_dir.resolve()
    return _write_page(
        content,
        target,
        histories,
        title=_take_title(content) or source.stem,
        folder=source.parent,
        links=_build_links(histories[0], target.name) if at_home else {},
    )


def write_comparison(run_dirs: Sequence[str | Path], page: str | Path) -> Path:
    """Several runs on one page: their verdicts, then their curves over each other."""
    histories = [History.read(run_dir) for run_dir in run_dirs]
    named = f"{len(histories)} runs compared"
    return _write_page(_build_notebook(histories), Path(page), histories, title=named, with_plots=False)


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
    for run, own in zip(runs, list_different_settings(histories), strict=True):
        run["unlike"] = own
    for run in runs[:1] if with_plots else []:
        once(notebook, run["said"])
    error = find_notebook_error(notebook)
    prepared = _prepare_notebook(notebook, formulas)
    exporter = HTMLExporter(template_name="run", extra_template_basedirs=[str(TEMPLATES)], embed_images=True)
    # What a cell prints comes in pieces, as it was printed; a reader wants it in one.
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
            "beside": build_comparison_rows(runs, have_different_eval_texts(histories)) if len(runs) > 1 else None,
        },
    }
    text, _ = exporter.from_notebook_node(prepared, resources)
    # Before <main> stands what the templates wrote, which escape what they show. All after it may be the notebook's, ends
    # of elements that it did not begin included, and formulas are the notebook's too: so this is done last.
    head, _, body = text.partition("<main>")
    body = sanitize_html(formulas.restore(PREFORMATTED.sub(_add_boxed_class, ANCHOR_LINK.sub("", body))))
    write_text(
        page, f"{head.replace('<!-- contents -->', sanitize_html(_build_contents(body)))}<main>{body.rstrip()}{PAGE_END}"
    )
    return page


def _build_links(history: History, page: str) -> dict[str, str]:
    """What there is to read beside the run's page of this name: addresses, and what each is."""
    there = {name: what for name, what in RUN_PAGES.items() if name != page and (history.run_dir / name).is_file()}
    return there | ({f"../{INDEX}": "all runs"} if (history.run_dir.parent / INDEX).is_file() else {})


def _prepare_notebook(notebook: NotebookNode, formulas: Formulas) -> NotebookNode:
    """A copy without widget state, with formulas hidden and with alt text on every picture."""
    copy = nbformat.from_dict(notebook)
    assert isinstance(copy, NotebookNode), "from_dict gives a node for a mapping"
    copy.metadata.pop("widgets", None)
    copy.cells = [cell for cell in copy.cells if PAPERMILL_ERROR_TAG not in cell.metadata.get("tags", [])]
    heading = "the report"
    for cell in copy.cells:
        if cell.cell_type == "markdown":
            heading = _last_heading(cell.source) or heading
            cell.source = formulas.hide(cell.source)
        elif cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if _prepare_output(output, formulas, heading)]
    return copy


def _prepare_output(output: NotebookNode, formulas: Formulas, heading: str) -> bool:
    """Make one output fit for the page, in place; False if nothing of it can be shown."""
    if "data" not in output:
        return True
    data = output.data
    if "image/svg+xml" in data:
        # A picture cannot run what markup could.
        drawn = base64.b64encode("".join(data.pop("image/svg+xml")).encode()).decode()
        described = html.escape(f"Figure of the section “{heading}”")
        data["text/html"] = f'<img alt="{described}" src="data:image/svg+xml;base64,{drawn}">'
    for kind in [kind for kind in data if kind.startswith(WIDGET_MIME_PREFIX)]:
        del data[kind]
    if "text/latex" in data:
        data["text/markdown"] = formulas.hide(data.pop("text/latex"))
    elif "text/markdown" in data:
        data["text/markdown"] = formulas.hide(data["text/markdown"])
    for kind in ("image/png", "image/jpeg"):
        if kind in data and not output.metadata.get(kind, {}).get("alt"):
            output.metadata.setdefault(kind, {})["alt"] = f"Figure of the section “{heading}”"
    if "image/png" in data and _get_png_width(data["image/png"]) > MAX_UNSCROLLED_PIXELS:
        # In the notebook format's own word, which the page's style knows.
        output.metadata["image/png"]["unconfined"] = True
    if panels := output.metadata.get("image/png", {}).get("panels"):
        data["text/html"] = _in_panels(data.pop("image/png"), panels, output.metadata["image/png"]["alt"])
    return bool(data)


def _get_png_width(picture: str) -> int:
    """Of a PNG in base 64, as its first bytes say; 0 if it is none."""
    begin = base64.b64decode(picture[:32])
    return int.from_bytes(begin[16:20], "big") if begin.startswith(b"\x89PNG") else 0


def _in_panels(picture: str, boxes: list[list[float]], alt: str) -> str:
    """A picture of several columns, cut so that its panels stand below each other on a narrow page."""
    pieces = [base64.b64encode(piece).decode() for piece in cut(base64.b64decode(picture), boxes)]
    named = html.escape(alt)
    shown = "".join(
        f'<img alt="{named}, panel {number}" src="data:image/png;base64,{piece}">' for number, piece in enumerate(pieces, 1)
    )
    return f'<figure class="panels"><figcaption>{named}</figcaption>{shown}</figure>'


def _add_boxed_class(found: re.Match[str]) -> str:
    """The <pre> with the class that forbids to break its lines, if it holds a table whose columns that would tear apart."""
    attributes, text = found.groups()
    return f'<pre class="boxed"{attributes}>{text}</pre>' if any(line in text for line in BOX_CHARACTERS) else found[0]


def _build_notebook(histories: list[History]) -> NotebookNode:
    """The pictures of runs as an executed notebook, for runs that were trained without one."""
    cells = []
    if len(histories) > 1:
        cells += [
            new_markdown_cell("\n".join(["# Side by side", *(f"* {line}" for line in summarize_comparisons(histories))]))
        ]
        cells += [
            _make_plot_cell(draw, histories)
            for draw in (figures.plot_loss_curves, figures.plot_learning_rate, figures.plot_throughput)
        ]
    for history in histories:
        if len(histories) > 1:
            cells += [new_markdown_cell(f"# {history.run}"), new_markdown_cell(format_settings(history.config))]
        if not history.steps:
            cells.append(new_markdown_cell("Nothing was recorded yet."))
            continue
        drawn = [*figures.RUN_PLOTS] if len(histories) == 1 else []
        drawn += figures.BRANCH_PLOTS if history.config.model.attention == "nsa" else ()
        cells += [_make_plot_cell(draw, history) for draw in drawn]
    return new_notebook(cells=cells)


def _make_plot_cell(plot: Callable[..., Figure], run: History | list[History]) -> NotebookNode:
    figure = plot(run)
    data = {"image/png": base64.b64encode(render_png(figure)).decode()}
    shown = {"alt": get_title(figure), "panels": panel_boxes(figure)}
    output = new_output("display_data", data=data, metadata={"image/png": shown})
    return new_code_cell(f"figures.{plot.__name__}(run)", outputs=[output])


def _take_title(notebook: NotebookNode) -> str | None:
    """The first heading, cut from its cell, in place: it stands at the top of the page, and once is enough."""
    for cell in notebook.cells:
        if cell.cell_type == "markdown" and (found := TITLE.search(cell.source)):
            cell.source = TITLE.sub("", cell.source, count=1)
            return found[1].strip().strip("`")
    return None


def _last_heading(markdown: str) -> str | None:
    found = re.findall(r"^#{1,4}\s+(.+)$", markdown, re.MULTILINE)
    return found[-1].strip() if found else None


def _build_contents(body: str) -> str:
    found = re.findall(r'<h([1-3])\b[^>]*\bid="([^"]+)"[^>]*>(.*?)</h\1>', body, re.DOTALL)
    items = [
        f'<li class="h{level}"><a href="#{anchor}">{re.sub(r"<(?!/?math|/?m)[^>]+>", "", text)}</a></li>'
        for level, anchor, text in found
    ]
    return f"<ol>{''.join(items)}</ol>" if len(items) > 2 else ""


def _build_style() -> str:
    sheet = (TEMPLATES / "run" / "style.css").read_text(encoding="utf-8")
    light, dark = (HtmlFormatter(style=name).get_style_defs(".highlight") for name in ("default", "github-dark"))
    return (
        f"{sheet}\n{light}\n.highlight {{ background: var(--panel); }}\n"
        f"@media (prefers-color-scheme: dark) {{\n{dark}\n.highlight {{ background: var(--panel); }}\n}}"
    )
