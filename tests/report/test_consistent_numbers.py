"""One number, one unit: whatever is said of the shipped production run, on its page or in a terminal, says the same."""

from __future__ import annotations

import base64
import html
import io
import re
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from fake_run import write_run
from nbformat.v4 import new_code_cell, new_notebook, new_output
from rich.console import Console
from typer.testing import CliRunner
from unpainted import PIXEL, unpainted

from nsa_lab import cli, report
from nsa_lab.health import examine
from nsa_lab.health.next_actions import list_advice
from nsa_lab.report import header, write_index
from nsa_lab.report.once import once
from nsa_lab.runs import directory, resolve
from nsa_lab.runs.events import read_events
from nsa_lab.runs.history import History
from nsa_lab.runs.live_view import RunView
from nsa_lab.workbook import plan_vs_actual, run_comparison
from nsa_lab.workbook.notebook import Stop, print_final_verdict

# Each asks a run that is trained for it.
pytestmark = pytest.mark.slow

SHIPPED = resolve.get_root() / "outputs/production_50k-20261121T141448Z-afd3"


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> str:
    """All that is told of the run, as text."""
    with unpainted():
        page = report.write_report(SHIPPED, tmp_path_factory.mktemp("page") / "page.html", record_only=True)
    texts = [_visible(page), *_in_a_terminal(), *_in_notebooks()]
    return "\n".join(" ".join(text.split()) for text in texts)


def _visible(page: Path) -> str:
    body = re.sub(r"<style>.*?</style>", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    return html.unescape(re.sub(r"<[^>]+>", " ", body))


def _in_a_terminal() -> Iterator[str]:
    for arguments in (["status"], ["status", str(SHIPPED)]):
        yield CliRunner().invoke(cli.app, arguments, env={"COLUMNS": "300"}).output
    view = RunView(SHIPPED)
    view.update(read_events(SHIPPED))
    console = Console(record=True, width=200, file=io.StringIO())
    console.print(*examine(SHIPPED).verdicts, view.format_line(), sep="\n")
    yield console.export_text()


def _in_notebooks() -> Iterator[str]:
    history = History.read(SHIPPED)
    yield str(plan_vs_actual.compare_plan_with_run(history))
    yield run_comparison.format_numbers_at([history], 0, history.last_step)


def test_the_speed(said: str) -> None:
    # The best tenth, the slowest stretch and the speed that preflight measured are other quantities, and are called so.
    told = re.findall(r"(?<!\d)(?<!at )(?<!pace, )(?<!speed )(?<!slowest )(42\d,\d{3})", said)
    assert len(told) >= 5 and set(told) == {"424,276"}


def test_the_training_loss(said: str) -> None:
    told = re.findall(r"(?:training,? (?:bits per byte )?|bpb |from 7\.987 to )(\d\.\d{3})", said)
    assert len(told) >= 5 and set(told) == {"0.965"}


def test_the_memory(said: str) -> None:
    told = set(re.findall(r"(\d+\.\d+) (?=[GM]i?B)", said)) & {"4.76", "4.75", "4.71", "4.43", "4.44"}
    assert told == {"4.76"} and "GiB" not in said and "MiB" not in said


def test_the_time(said: str) -> None:
    told = set(re.findall(r"1[78] min \d\d s", said))
    assert told == {"17 min 37 s", "18 min 23 s"} and not re.findall(r"\d\.\d+ h\b", said)
    assert "17 min 37 s over 2 attempts; 18 min 23 s from start to end" in said


def test_the_backend(said: str) -> None:
    assert "triton (asked for: auto)" in said
    assert set(re.findall(r"backend:? (triton|torch)", said)) == {"triton"}


def test_each_verdict_stands_once_on_the_page(said: str) -> None:
    page = said.partition("\n")[0]
    for each in examine(SHIPPED).verdicts:
        if len(each.text) > 20:
            assert page.count(" ".join(each.text.split())) == 1, each


def test_what_the_header_says_a_notebook_below_it_does_not(tmp_path: Path) -> None:
    verdicts = "\n".join(map(str, examine(SHIPPED).verdicts))
    printed = [
        new_output("stream", name="stdout", text=text) for text in (verdicts, f"{verdicts}\nand more\n", "of its own")
    ]
    notebook = new_notebook(cells=[new_code_cell("verdict(run)", outputs=printed)])
    drawn = new_output("display_data", data={"image/png": "AA=="})
    notebook.cells.append(new_code_cell("training.overview()", outputs=[drawn]))
    once(notebook, {" ".join(line.split()) for line in verdicts.splitlines()})
    moved, partly, own = notebook.cells[0].outputs
    assert "at the top of this page" in moved.data["text/html"]
    assert "at the top of this page" in notebook.cells[1].outputs[0].data["text/html"]
    assert partly.text == "and more" and own.text == "of its own"
    assert isinstance(notebook, nbformat.NotebookNode)


def test_of_a_halted_run_what_to_do_stands_once_on_the_page(tmp_path: Path) -> None:
    """With its verdict, and neither in the box on the notebook nor in the cell that stopped."""
    run_dir = write_run(tmp_path, status={"status": directory.HALTED, "reason": "step 200: the loss is nan"})
    with pytest.raises(Stop) as stopped:
        print_final_verdict(run_dir)
    error = new_output("error", ename="Stop", evalue=str(stopped.value), traceback=[str(stopped.value)])
    nbformat.write(new_notebook(cells=[new_code_cell("verdict(run)", outputs=[error])]), run_dir / "report.ipynb")
    with unpainted():
        shown = " ".join(_visible(report.write_report(run_dir)).split())
    assert "The notebook stopped in code cell 1 of 1: the run is HALTED. Nothing in the notebook is broken" in shown
    (line,) = list_advice(History.read(run_dir))
    assert str(stopped.value) == f"the run is HALTED.\n{line}" and shown.count(line) == 1


def test_the_picture_on_top_is_not_shown_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(header, "render_png", lambda figure: PIXEL)
    run_dir = write_run(tmp_path)
    drawn = {"image/png": {"alt": "the run at a glance", "panels": [[0.0, 0.0, 1.0, 1.0]]}}
    picture = new_output("display_data", data={"image/png": base64.b64encode(PIXEL).decode()}, metadata=drawn)
    nbformat.write(new_notebook(cells=[new_code_cell("training.overview()", outputs=[picture])]), run_dir / "report.ipynb")
    body = report.write_report(run_dir).read_text(encoding="utf-8").partition("<main>")[2]
    assert "at the top of this page" in body and "<img" not in body


def test_the_list_of_runs_says_verdict_loss_speed_and_model(tmp_path: Path) -> None:
    (tmp_path / SHIPPED.name).mkdir()
    for name in ("config.yaml", "events.jsonl", "status.json", "verdict.json"):
        (tmp_path / SHIPPED.name / name).write_bytes((SHIPPED / name).read_bytes())
    shown = " ".join(_visible(write_index(tmp_path)).split())
    for told in ("healthy", "7.991 → 0.922", "424,276", "nsa, 78,600,960 parameters", "17 min 37 s"):
        assert told in shown
