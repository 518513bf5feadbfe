"""All pages and outputs show the same number, with the same unit, for the shipped production run."""

from __future__ import annotations

import html
import io
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner
from unpainted import unpainted

from nsa_lab import cli, report
from nsa_lab.health import examine
from nsa_lab.health.verdict_file import write_verdict
from nsa_lab.report import write_index
from nsa_lab.runs import resolve
from nsa_lab.runs.events import read_events
from nsa_lab.runs.history import History
from nsa_lab.runs.live_view import RunView
from nsa_lab.workbook import plan_vs_actual, run_comparison

# Each test reads a recorded run.
pytestmark = pytest.mark.slow

SHIPPED = resolve.get_root() / "outputs/production_50k-20261121T141448Z-afd3"


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return all texts about the run."""
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


def test_speed(said: str) -> None:
    # The speeds of the best tenth, of the slowest segment and of preflight are other quantities.
    values = re.findall(r"(?<!\d)(?<!at )(?<!pace, )(?<!speed )(?<!slowest )(?<!best tenth, )(42\d,\d{3})", said)
    assert len(values) >= 5 and set(values) == {"424,276"}


def test_training_loss(said: str) -> None:
    values = re.findall(r"(?:training,? (?:bits per byte )?|bpb |from 7\.987 to )(\d\.\d{3})", said)
    assert len(values) >= 5 and set(values) == {"0.965"}


def test_memory(said: str) -> None:
    values = set(re.findall(r"(\d+\.\d+) (?=[GM]i?B)", said)) & {"4.76", "4.75", "4.71", "4.43", "4.44"}
    assert values == {"4.76"} and "GiB" not in said and "MiB" not in said


def test_time(said: str) -> None:
    values = set(re.findall(r"1[78] min \d\d s", said))
    assert values == {"17 min 37 s", "18 min 23 s"} and not re.findall(r"\d\.\d+ h\b", said)
    assert "17 min 37 s over 2 attempts; 18 min 23 s from start to end" in said


def test_backend(said: str) -> None:
    assert "triton (requested: auto)" in said
    assert set(re.findall(r"backend:? (triton|torch)", said)) == {"triton"}


def test_each_check_is_on_the_page_once(said: str) -> None:
    page = said.partition("\n")[0]
    for each in examine(SHIPPED).verdicts:
        if len(each.text) > 20:
            assert page.count(" ".join(each.text.split())) == 1, each


def test_run_list_has_verdict_loss_speed_and_model(tmp_path: Path) -> None:
    (tmp_path / SHIPPED.name).mkdir()
    for name in ("config.yaml", "events.jsonl", "status.json"):
        (tmp_path / SHIPPED.name / name).write_bytes((SHIPPED / name).read_bytes())
    write_verdict(tmp_path / SHIPPED.name)
    shown = " ".join(_visible(write_index(tmp_path)).split())
    for values in ("healthy", "7.991 → 0.922", "424,276", "nsa, 78,600,960 parameters", "17 min 37 s"):
        assert values in shown
