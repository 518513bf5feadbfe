"""A report is one file that loads and runs nothing. Formulas are MathML; pictures are embedded and have alt text."""

from __future__ import annotations

import io
import json
import os
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import nbformat
import pytest
from external_loads import find_external_loads
from fake_run import make_config, write_run
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from rich.console import Console
from rich.table import Table
from unpainted import unpainted

from nsa_lab import figures
from nsa_lab.health.headline_questions import QUESTIONS
from nsa_lab.report import NOTEBOOK, export_notebook, write_comparison, write_index, write_report
from nsa_lab.report.formulas import Formulas, to_mathml
from nsa_lab.report.sanitize import sanitize_html
from nsa_lab.runs import directory, resolve
from nsa_lab.runs.atomic_io import UnwritableFile, warn_once
from nsa_lab.runs.history import History

PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="
PROSE = r"""# Training a model

Importance is $p_t = \mathrm{softmax}(q_t K^\top)$, and

$$\mathrm{importance}(t, j) = \sum_i p(t, i) \cdot \frac{|B_i \cap S_j|}{d}$$

A price of $5 and `$x$` in code stay as they are. ![far](https://example.org/picture.png) [a link](https://example.org)

## Results
"""


class Page(HTMLParser):
    """External loads and pictures of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.scripts = 0
        self.pictures: list[dict[str, str | None]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        self.scripts += tag == "script"
        if tag == "img":
            self.pictures.append(attributes)
        sources = [attributes.get(name) for name in ("src", "srcset", "poster", "data")]
        sources += [attributes.get("href")] if tag == "link" else []
        self.fetched += [source for source in sources if source and not source.startswith("data:")]


def executed(*extra: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Return a notebook as papermill leaves it, with all kinds of outputs that a report must sanitize."""
    picture = new_output("display_data", data={"image/png": PIXEL, "text/plain": "<Figure>"})
    widget = new_output("display_data", data={"application/vnd.jupyter.widget-view+json": {"model_id": "x"}})
    markup = new_output(
        "display_data",
        data={
            "text/html": '<script src="https://cdn.example.org/a.js"></script>'
            '<b onclick="go()">bold</b><iframe src="//x.org"></iframe>'
        },
    )
    latex = new_output("execute_result", data={"text/latex": r"$\displaystyle x^2$", "text/plain": "x**2"})
    cells = [new_markdown_cell(PROSE), new_code_cell("secret_name = 1", outputs=[picture, widget, markup, latex])]
    return new_notebook(cells=[*cells, *extra], metadata={"widgets": {"application/vnd.jupyter.widget-state+json": {}}})


def assert_self_contained(text: str) -> Page:
    page = Page(text)
    assert page.fetched == []
    assert page.scripts == 0
    assert find_external_loads(text) == []
    assert all(picture.get("alt") for picture in page.pictures)
    return page


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> str:
    run_dir = write_run(tmp_path_factory.mktemp("reported"))
    nbformat.write(executed(), run_dir / "report.ipynb")
    page = write_report(run_dir)
    assert page == run_dir / "report.html"
    assert page.stat().st_size < 5_000_000
    return page.read_text(encoding="utf-8")


def test_report_loads_and_runs_nothing(reported: str) -> None:
    page = assert_self_contained(reported)
    assert {picture["alt"] for picture in page.pictures} >= {"Figure of the section “Results”"}
    assert "cdn.example.org" not in reported
    assert "onclick" not in reported
    assert "[picture not embedded: https://example.org/picture.png]" in reported
    assert '<a href="https://example.org">a link</a>' in reported


def test_formulas_are_mathml(reported: str) -> None:
    assert reported.count("<math") == 3
    assert 'display="block"' in reported
    assert "\\frac" not in reported
    assert "NSAFORMULA" not in reported
    assert "A price of $5 and" in reported
    assert "<code>$x$</code>" in reported


def test_local_paths_are_removed(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path)
    root, home = resolve.get_root(), Path.home()
    text = f"new run: {root}/outputs/x\n{home}/data.txt {sys.prefix}/lib/a.py {root}\n/tmp/ipykernel_12/34.py:1: Warning"
    printed = new_output("stream", name="stdout", text=text)
    picture = new_output("display_data", data={"image/png": PIXEL, "text/plain": f"{root}/a"})
    notebook = new_notebook(
        cells=[new_code_cell(f'run_dir = "{root}/outputs/x"', outputs=[printed, picture])],
        metadata={"papermill": {"input_path": f"{root}/notebooks/a.ipynb"}},
    )
    nbformat.write(notebook, run_dir / "report.ipynb")
    page = write_report(run_dir).read_text(encoding="utf-8")
    (cell,) = (stripped := nbformat.read(run_dir / "report.ipynb", as_version=4)).cells
    assert cell.source == 'run_dir = "outputs/x"'
    assert stripped.metadata.papermill.input_path == "notebooks/a.ipynb"
    assert cell.outputs[0].text == "new run: outputs/x\n~/data.txt <python>/lib/a.py .\n<cell>:1: Warning"
    assert cell.outputs[1].data["image/png"] == PIXEL
    for text in (page, (run_dir / "report.ipynb").read_text(encoding="utf-8")):
        assert not [folder for folder in (root, home, sys.prefix) if f"{folder}/" in text]


@pytest.mark.nightly
def test_page_of_a_long_run_is_small(tmp_path: Path) -> None:
    """The run has the size of the production run: 2,500 logged steps, 100 of them with statistics."""
    run_dir = write_run(
        tmp_path,
        make_config(
            train__steps=50_000, train__log_every=20, train__stats_every=500, train__eval_every=1000, train__save_every=5000
        ),
    )
    page = write_report(run_dir)
    assert len(History.read(run_dir).steps) == 2501
    assert page.stat().st_size < 5_000_000


@pytest.mark.slow
@unpainted()
def test_pages_of_a_run_link_to_each_other_and_to_the_run_list(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path)
    assert 'class="links"' not in write_report(run_dir).read_text(encoding="utf-8")
    write_index(tmp_path)
    nbformat.write(executed(), run_dir / "health.ipynb")
    health = export_notebook(run_dir / "health.ipynb", run_dir=run_dir).read_text(encoding="utf-8")
    report = write_report(run_dir).read_text(encoding="utf-8")
    assert _links(report) == ["health.html", "../index.html"] and _links(health) == ["report.html", "../index.html"]
    other_page = export_notebook(run_dir / "health.ipynb", tmp_path / "shared.html", run_dir=run_dir).read_text(
        encoding="utf-8"
    )
    assert _links(other_page) == []
    shared = write_report(run_dir, run_dir / "report.html", record_only=True).read_text(encoding="utf-8")
    assert _links(shared) == [], "a page that is asked for by its path stands alone"


def _links(page: str) -> list[str]:
    return re.findall(r'href="([^"#]+)"', page.partition("<main>")[0])


def test_code_is_folded(reported: str) -> None:
    folded = re.search(r'<details class="code">.*?</details>', reported, re.DOTALL)
    assert folded
    assert "secret_name" in folded[0]


def test_header_summarizes_the_run(reported: str) -> None:
    head = reported.partition("<main>")[0]
    assert "<h1>Training a model</h1>" in head and reported.count(">Training a model<") == 2, "in <title> and on top"
    assert '<div class="banner ok">\n<p>healthy: ' in head and "2.140 bits per byte" in head
    answers = re.search(r'<dl class="answers">(.*?)</dl>', head, re.DOTALL)
    assert answers
    assert re.findall(r"<dt>(.*?) <b>(.*?)</b>", answers[1]) == [(question, "ok") for question in QUESTIONS]
    for answer in (
        "8.000 → 2.140",
        "8,192",
        "neighboring queries share 93%",
        "compressed 40%, selected 35%, window 25%",
        "n_layers: 3",
    ):
        assert answer in head


@unpainted()
def test_failed_notebook_has_an_error_banner_and_the_run_its_own_verdict(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path)
    error = new_output("error", ename="ZeroDivisionError", evalue="division by <zero>", traceback=["a", "b"])
    note = new_markdown_cell("<span>An Exception was encountered</span>", metadata={"tags": ["papermill-error-cell-tag"]})
    nbformat.write(executed(note, new_code_cell("1 / 0", outputs=[error])), run_dir / "report.ipynb")
    text = write_report(run_dir).read_text(encoding="utf-8")
    assert_self_contained(text)
    head = text.partition("<main>")[0]
    assert "The notebook stopped in code cell 2 of 2: ZeroDivisionError: division by &lt;zero&gt;" in head
    assert head.index("The notebook stopped") < head.index("<p>healthy: ")
    assert "An Exception was encountered" not in text


@unpainted()
def test_notebook_that_stopped_on_purpose_has_no_error(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path)
    error = new_output("error", ename="Stop", evalue="the run is HALTED: step 2; go on: nsa-lab resume x", traceback=[])
    nbformat.write(executed(new_code_cell("verdict(run)", outputs=[error])), run_dir / "report.ipynb")
    head = write_report(run_dir).read_text(encoding="utf-8").partition("<main>")[0]
    assert "The notebook stopped in code cell 2 of 2: the run is HALTED: step 2; go on: nsa-lab resume x" in head
    assert "The notebook itself has no error" in head


@pytest.mark.slow
@unpainted()
def test_halted_run_shows_reason_last_good_step_and_remedy(tmp_path: Path) -> None:
    run_dir = write_run(
        tmp_path,
        spoil=lambda events: [e for e in events if e["step"] <= 90 and e["kind"] != "end"],
        status={"status": directory.HALTED, "reason": "step 91: the loss is nan"},
    )
    text = write_report(run_dir).read_text(encoding="utf-8")
    assert_self_contained(text)
    head = text.partition("<main>")[0]
    assert "NOT healthy: finished: HALTED at step 90 of 200: step 91: the loss is nan" in head
    assert "The weights are those of step 90, the last good step." in head
    assert f"nsa-lab resume {run_dir.name}" in head


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, pytest.param({"model__attention": "dense"}, marks=pytest.mark.nightly)])
def test_run_without_a_notebook_has_a_report_of_its_record(changes: dict, tmp_path: Path) -> None:
    run_dir = write_run(tmp_path, make_config(**changes))
    text = write_report(run_dir).read_text(encoding="utf-8")
    page = assert_self_contained(text)
    # The panels of the header, then RUN_PLOTS, BRANCH_PLOTS and the benefit of the selection.
    assert len(page.pictures) == (3 if changes else 2 + 2 + 4 + 1)
    assert len(text) < 5_000_000


@pytest.mark.slow
@unpainted()
def test_damaged_notebook_is_reported_and_not_replaced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Such a file may have been an executed notebook. The page has the plots of the record."""
    run_dir = write_run(tmp_path)
    expected = write_report(run_dir).read_text(encoding="utf-8")
    notebook = run_dir / "report.ipynb"
    whole = notebook.read_text(encoding="utf-8")
    for number, damaged in enumerate(('{"cells": 5}', whole[:500], json.dumps({**json.loads(whole), "cells": [{}]}))):
        notebook.write_text(damaged)
        caplog.clear()
        warn_once.cache_clear()
        assert write_report(run_dir, record_only=number > 0).read_text(encoding="utf-8") == expected
        assert notebook.read_text() == damaged and f"{notebook}: not a notebook (" in caplog.text
    notebook.unlink()
    write_report(run_dir)
    assert notebook.read_text(encoding="utf-8") == whole


def test_run_without_events_has_a_report(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path, status={"status": directory.PREEMPTED, "reason": "created, not started"})
    (run_dir / directory.EVENTS).unlink()
    assert "Nothing has been recorded yet." in write_report(run_dir).read_text(encoding="utf-8")


def test_a_page_that_cannot_be_written_is_refused_before_the_record_is_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "page.html")
    absent = tmp_path / "absent"
    for page in (tmp_path / "page.html", tmp_path, absent / "page.html"):
        for write in (
            lambda page=page: write_report(absent, page),
            lambda page=page: export_notebook(absent / NOTEBOOK, page),
            lambda page=page: write_comparison([absent, absent], page),
        ):
            with pytest.raises(UnwritableFile, match=re.escape(f"{page}: expected a")):
                write()
    assert (tmp_path / "page.html").is_fifo()


@pytest.mark.slow
@unpainted()
def test_comparison_page(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / "nsa"), write_run(tmp_path / "dense", make_config(model__attention="dense"))]
    text = write_comparison(runs, tmp_path / "comparison.html").read_text(encoding="utf-8")
    assert_self_contained(text)
    assert "2 runs compared" in text
    assert text.count('class="banner ok"') == 2 and "model.attention" in text
    head = text.partition("<main>")[0]
    rows = {
        name: re.findall(r"<td>(.*?)</td>", cells)
        for name, cells in re.findall(r'<tr><th scope="row">(.*?)</th>(<td>.*?)</tr>', head.partition("</table>")[0])
    }
    assert rows["verdict"] == ["healthy", "healthy", "–"] and rows["attention"] == ["nsa", "dense", "–"]
    assert rows["tokens"][-1] == "+0.0%" and rows["model.attention"] == ["nsa", "dense", "–"]
    assert rows["validation, bits per byte"][-1] == "+0.0000 (+0.0%)"
    for number, run in enumerate(map(History.read, runs), 1):
        assert f'<a href="#run-{number}">{run.run}</a>' in head and f'<h2 id="run-{number}">{run.run}</h2>' in head


def test_figure_links_to_its_code(reported: str) -> None:
    (target,) = set(re.findall(r'<a href="#(code-[^"]+)">the code of this figure</a>', reported))
    folded = re.search(r'<details class="code">.*?</details>', reported, re.DOTALL)
    assert folded
    assert f'id="{target}"' in folded[0]


@pytest.mark.slow
@unpainted()
def test_index_lists_every_run_and_unreadable_ones(tmp_path: Path) -> None:
    done = write_report(write_run(tmp_path / "first")).parent.rename(tmp_path / "done")
    halted = write_run(tmp_path, status={"status": directory.HALTED, "reason": "nan"})
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / directory.CONFIG).write_text("modell: <1>")
    text = write_index(tmp_path).read_text(encoding="utf-8")
    assert_self_contained(text)
    assert f'<a href="{done.name}/report.html">done</a>' in text
    assert halted.name in text and '<td class="bad">HALTED</td>' in text
    assert "cannot be read: " in text and "modell" in text
    assert "No runs yet" in write_index(tmp_path / "first").read_text(encoding="utf-8")


def test_notebook_without_a_run_is_exported_next_to_itself(tmp_path: Path) -> None:
    nbformat.write(executed(), tmp_path / "derivations.ipynb")
    page = export_notebook(tmp_path / "derivations.ipynb")
    assert page == tmp_path / "derivations.html"
    assert_self_contained(page.read_text(encoding="utf-8"))


def test_box_table_keeps_its_lines_and_other_output_wraps(tmp_path: Path) -> None:
    buffer = io.StringIO()
    wide = Table(*(f"column {n}" for n in range(12)), title="wide")
    wide.add_row(*(["x" * 9] * 12))
    Console(file=buffer, width=170).print(wide)
    printed = [buffer.getvalue(), "word " * 60, "a \x1b[1m│\x1b[0m b"]
    outputs = [new_output("stream", name="stdout", text=text) for text in printed]
    outputs += [
        new_output("execute_result", data={"text/plain": f"<Table>\n{buffer.getvalue()}"}),
        new_output("display_data", data={"text/html": '<pre style="color:red">┃</pre>', "text/plain": "x"}),
    ]
    cells = [new_code_cell("show()", outputs=[output]) for output in outputs] + [new_code_cell("'│'")]
    nbformat.write(new_notebook(cells=cells), tmp_path / "tables.ipynb")
    text = export_notebook(tmp_path / "tables.ipynb").read_text(encoding="utf-8")
    assert_self_contained(text)
    shown = re.findall(r"<pre\b([^>]*)>(?!<span></span>)(.*?)</pre>", text, re.DOTALL)
    boxed = ' class="boxed"'
    assert [attributes for attributes, _ in shown] == [boxed, "", boxed, boxed, f'{boxed} style="color:red"']
    assert buffer.getvalue().rstrip() in shown[0][1]
    assert ".output_area pre { white-space: pre-wrap;" in text and ".output_area pre.boxed { white-space: pre;" in text


def test_formulas_in_code_are_unchanged() -> None:
    text = "a `$x$` b\n```\n$$y$$\n```\nc $z$ and $5 or \\$6"
    formulas = Formulas()
    hidden = formulas.hide(text)
    assert "`$x$`" in hidden
    assert "$$y$$" in hidden
    assert formulas.restore(hidden).count("<math") == 1
    assert formulas.restore(hidden).endswith("and &#36;5 or &#36;6")


def test_thousands_separator_is_part_of_the_number() -> None:
    assert "<mn>1,048,576</mn>" in to_mathml("T = 1{,}048{,}576") and "<mn>64,</mn>" not in to_mathml("l = 64, 32, 128")


def test_invalid_formula_is_shown_as_code() -> None:
    assert to_mathml(r"x_1_2 < 3") == '<code class="formula">x_1_2 &lt; 3</code>'


def test_find_external_loads() -> None:
    page = (
        '<link rel="stylesheet" href="https://a.org/x.css">'
        '<style>@import "https://b.org"; p { background: url(c.png) }</style><img src="http://d.org/e.png">'
        '<script>1</script><a href="https://f.org">f</a><img src="data:image/png;base64,AA">'
    )
    assert len(find_external_loads(page)) == 5
    assert find_external_loads(sanitize_html(page)) == []
    assert '<a href="https://f.org">f</a>' in sanitize_html(page)


def test_note_on_the_omitted_steps_is_outside_the_axes(tmp_path: Path) -> None:
    """Inside the axes, the note could cover the label of a second attempt."""
    run_dir = write_run(tmp_path, make_config(train__steps=5_000, train__warmup_steps=100))
    for draw, axes in ((figures.plot_overview, 1), (figures.plot_loss_curves, 2)):
        figure = draw(run_dir)
        figure.draw_without_rendering()
        notes = [(text, panel) for panel in figure.axes for text in panel.texts if "the first steps" in text.get_text()]
        assert len(notes) == axes
        assert all(text.get_window_extent().y0 >= panel.bbox.y1 for text, panel in notes)


@pytest.mark.slow
def test_constant_line_is_not_on_the_frame(drawn_runs: list[Path]) -> None:
    memory = figures.plot_throughput(drawn_runs[0]).axes[-1]
    assert memory.get_ylim()[1] > 1.1 * max(memory.lines[0].get_ydata())


@pytest.fixture(scope="module")
def drawn_runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return a complete run, one without statistics, and runs of models that have two branches and one."""
    folder = tmp_path_factory.mktemp("drawn")
    two, one = ({"model__branches": branches, "nsa__scores": "mean_key"} for branches in (["sel", "win"], ["sel"]))
    return [
        write_run(folder / "full"),
        write_run(folder / "empty", spoil=lambda events: events[:1]),
        write_run(folder / "two", make_config(**two)),
        write_run(folder / "one", make_config(**one)),
        write_run(folder / "window", make_config(model__branches=["win"])),
    ]


@pytest.mark.parametrize(
    "draw", [figures.plot_overview, *figures.RUN_PLOTS, *figures.BRANCH_PLOTS, figures.plot_loss_curves]
)
def test_every_plot_has_title_and_labels_also_without_statistics(draw, drawn_runs: list[Path]) -> None:
    for run_dir in drawn_runs:
        figure = draw(run_dir)
        assert figure.get_suptitle() or figure.axes[0].get_title()
        assert any(axes.get_ylabel() for axes in figure.axes) or draw is figures.plot_selection_statistics
        assert any(axes.get_xlabel() for axes in figure.axes) or draw is figures.plot_gates_by_layer
