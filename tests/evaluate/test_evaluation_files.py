"""`evaluation.json` and `ruler.json`: valid files are read; damaged ones and those of another run count as missing."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_evaluation import make_evaluation, make_run_factory
from looping import looped
from typer.testing import CliRunner
from unpainted import unpainted

from nsa_lab import cli
from nsa_lab.runs import directory, resolve
from nsa_lab.runs.atomic_io import warn_once
from nsa_lab.runs.evaluation import EVALUATION, RULER, find_file_problem, read_evaluation, read_ruler, write_evaluation

Record = dict[str, Any]
Edit = Callable[[Record], object]

RESULT = {"task": "vt", "length": 900, "questions": 2, "references": 3, "found": [3, 0]}
RULER_RECORD: Record = {
    **make_evaluation(0),
    "tokenizer": "byte",
    "results": [{**RESULT, "score": 50.0, "low": 10.0, "high": 90.0}],
}


def set_at(*keys: str | int, value: Any) -> Edit:
    """Return an edit of one value inside a record."""

    def edit(record: Any) -> None:
        for key in keys[:-1]:
            record = record[key]
        record[keys[-1]] = value

    return edit


def set_tokens(right: int, loss: float = 1.0) -> Edit:
    """Return an edit of one cell: three answers of seven tokens, one of them right."""
    return lambda record: record["retrieval"][0].update(answers=3, right=1, tokens=21, tokens_right=right, loss=loss)


def remove(*keys: str | int) -> Edit:
    def edit(record: Any) -> None:
        for key in keys[:-1]:
            record = record[key]
        del record[keys[-1]]

    return edit


DAMAGED: dict[str, tuple[Edit, str]] = {
    "nothing but a version": (lambda record: [record.pop(key) for key in [*record] if key != "v"], "run: missing"),
    "another version": (set_at("v", value=2), "v: expected version 1 of the format, got 2"),
    "step as text": (set_at("step", value="200"), "step: expected a valid integer, got '200'"),
    "a step of true": (set_at("step", value=True), "step: expected a valid integer, got True"),
    "a negative step": (set_at("step", value=-1), "step: expected at least 0, got -1"),
    "no device": (remove("device"), "device: missing"),
    "retrieval of null": (set_at("retrieval", value=None), "retrieval: expected a valid list, got None"),
    "a cell that is a number": (set_at("retrieval", 2, value=7), "retrieval.2: expected a valid dictionary, got 7"),
    "a cell without a task": (remove("retrieval", 0, "task"), "retrieval.0.task: missing"),
    "no sequences": (set_at("retrieval", 0, "sequences", value=0), "retrieval.0.sequences: expected at least 1"),
    "a depth of 2": (set_at("retrieval", 0, "depth", value=2.0), "retrieval.0.depth: expected at most 1, got 2.0"),
    "more right answers than answers": (
        set_at("retrieval", 1, "right", value=8),
        "retrieval.1.right: expected at most the 7 answers, got 8",
    ),
    "more right answers than sequences": (
        set_at("retrieval", 1, "right_at_depth", value=8),
        "retrieval.1.right_at_depth: expected at most the 7 sequences, got 8",
    ),
    "fewer right answers at their depth": (
        lambda record: record["retrieval"][0].update(right=5, right_at_depth=0),
        "retrieval.0.right_at_depth: expected 5 with 5 right answers, got 0",
    ),
    "more answers at one depth than right ones": (
        lambda record: record["retrieval"][-1].update(right=2, right_at_depth=3),
        "right_at_depth: expected 0 to 2 with 2 right answers, got 3",
    ),
    "right wordings of wrong answers": (
        lambda record: record["retrieval"][0].update(right=5, wordings=[["a", "b", True]] * 7),
        "retrieval.0.wordings: expected 5 with 5 right answers, got 7",
    ),
    "no tokens": (set_at("text_tokens", value=0), "text_tokens: expected at least 1, got 0"),
    "an unknown dtype": (set_at("dtype", value="float31"), "dtype: expected 'float32'"),
    "more right tokens than tokens": (set_tokens(22), "tokens_right: expected at most the 21 tokens, got 22"),
    "right tokens of no answer": (set_tokens(0), "tokens_right: expected 7 to 19 with 1 right answers, got 0"),
    "wrong answers without wrong tokens": (set_tokens(20), "tokens_right: expected 7 to 19 with 1 right answers, got 20"),
    "wrong tokens at a low loss": (set_tokens(14, 0.2), "loss: expected at least 0.231 nats with 14 right tokens, got 0.2"),
    "more generated answers than answers": (set_at("retrieval", 0, "written_right", value=2), "at most the 1 written"),
    "windows of other numbers": (remove("positions", "octaves", 0, "windows", 0), "expected 5 values, got 4"),
    "no position ranges": (set_at("positions", "octaves", value=[]), "positions.octaves: expected at least 1 item"),
    "a row of text": (set_at("texts", "long", "rows", 3, value=["a", 1.0]), "texts.long.rows.3.0: expected a valid"),
    "a row without a loss": (set_at("texts", "long", "rows", 3, value=[30]), "texts.long.rows.3.1: missing"),
    "windows of fewer documents": (remove("texts", "long", "window_documents", 0), "expected 23 values, got 22"),
    "windows of fewer ranges": (remove("texts", "long", "windows", 1, 0), "expected 5 values, got 4"),
    "an accuracy above 1": (
        set_at("selection", 0, "interventions", 0, "accuracy", value=1.5),
        "expected at most 1, got 1.5",
    ),
    "results without depths": (remove("selection", 0, "depths"), "selection.0.interventions.right: expected 0 values"),
    "a reason that is a list": (set_at("not_asked", 0, "why", value=[1]), "not_asked.0.why: expected a valid string"),
}
DAMAGED_RULER: dict[str, tuple[Edit, str]] = {
    "a result of nothing": (set_at("results", 0, value={}), "results.0.task: missing"),
    "fewer questions": (set_at("results", 0, "questions", value=1), "results.0.found: expected 1 values, got 2"),
    "more than all": (set_at("results", 0, "found", value=[4, 0]), "found: expected at most the 3 references, got 4"),
    "a score of none": (set_at("results", 0, "found", value=[0, 0]), "score: expected 0.00 with 0 of 6 found, got 50"),
    "a score outside its interval": (set_at("results", 0, "low", value=60.0), "score: expected 60 to 90, its interval"),
    "a task twice": (
        lambda record: record["results"].append(record["results"][0]),
        "results: expected vt at 900 tokens once, got it twice",
    ),
    "a score of 101": (set_at("results", 0, "score", value=101.0), "results.0.score: expected at most 100"),
}
CASES = [(EVALUATION, name, *case) for name, case in DAMAGED.items()]
CASES += [(RULER, name, *case) for name, case in DAMAGED_RULER.items()]


@looped
@pytest.mark.parametrize(("file", "name", "edit", "reason"), CASES, ids=[name for _, name, *_ in CASES])
def test_damaged_file_counts_as_missing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, file: str, name: str, edit: Edit, reason: str
) -> None:
    read, valid = (read_ruler, RULER_RECORD) if file == RULER else (read_evaluation, make_evaluation(0))
    (tmp_path / file).write_text(json.dumps(valid))
    assert read(tmp_path) == valid
    record = json.loads(json.dumps(valid))
    edit(record)
    (tmp_path / file).write_text(json.dumps(record))
    warn_once.cache_clear()
    caplog.clear()
    with caplog.at_level(logging.WARNING, "nsa_lab.runs"):
        assert read(tmp_path) is None
    (message,) = caplog.messages
    assert message.startswith(f"{tmp_path / file}: ignored (") and reason in message, name


@pytest.mark.parametrize("file", [EVALUATION, RULER])
def test_a_changed_file_counts_as_missing(tmp_path: Path, file: str) -> None:
    """Also if every value is valid. Infinite losses and keys that are no text are unchanged in the file."""
    read, record = (read_ruler, RULER_RECORD) if file == RULER else (read_evaluation, make_evaluation(0))
    written = write_evaluation(tmp_path, {**record, "new_field": {1: math.inf, "10": [], 9: (1, 2)}}, file)
    assert read(tmp_path) == written == write_evaluation(tmp_path, written, file)
    for name, value in (("seed", written["seed"] + 1), ("device", "another"), ("digest", "0" * 64), ("digest", None)):
        (tmp_path / file).write_text(json.dumps(written | {name: value}))
        assert read(tmp_path) is None and "digest: does not match" in (find_file_problem(tmp_path, file) or ""), name


def test_valid_files_are_read() -> None:
    """Recorded runs, the packaged model, losses that are not finite, and parts that older versions did not write."""
    folders = [path.parent for path in (resolve.get_root() / "outputs").glob(f"*/{EVALUATION}")]
    assert len(folders) >= 2
    for folder in (*folders, resolve.MODELS_DIR / "needle-8m"):
        assert read_evaluation(folder) == json.loads((folder / EVALUATION).read_text()), folder


def test_losses_may_be_nan_and_new_fields_are_ignored(tmp_path: Path) -> None:
    evaluation = make_evaluation(0, new_field=1)
    evaluation["positions"]["octaves"][0]["loss"] = evaluation["texts"]["long"]["loss"] = math.inf
    evaluation["selection"][0]["interventions"][0]["d_loss"] = -math.inf
    evaluation["retrieval"][0]["new_field"] = [1]
    (tmp_path / EVALUATION).write_text(json.dumps(evaluation))
    assert read_evaluation(tmp_path) == evaluation


@unpainted()
def test_report_and_comparison_ignore_damaged_files_and_those_of_another_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_run = make_run_factory(tmp_path)
    run, dense = make_run("one", 0), make_run("other", 0, model__attention="dense")
    whole = (run / EVALUATION).read_text()

    def call(*arguments: str) -> str:
        warn_once.cache_clear()
        caplog.clear()
        page = tmp_path / "page.html"
        for command in (["report", run.name, "--record", "--page", str(page)], ["compare", run.name, dense.name]):
            result = CliRunner().invoke(cli.app, [*command, "--outputs", str(tmp_path)], catch_exceptions=False)
            assert result.exit_code == 0
        is_shown = "Evaluation on long texts" in page.read_text(encoding="utf-8")
        assert is_shown == (f"{run.name} has no readable evaluation" not in result.output)
        return "shown" if is_shown else "\n".join(caplog.messages)

    assert call() == "shown"
    (run / EVALUATION).write_text('{"v": 1}')
    assert "ignored (run: missing); restore the file, or run nsa-lab evaluate again" in call()
    (run / EVALUATION).write_text((dense / EVALUATION).read_text())
    assert f"{run / EVALUATION}: ignored (it is of another run: {dense.name!r}); restore the file" in call()
    (run / EVALUATION).write_text(whole)
    (run / RULER).write_text(json.dumps({**RULER_RECORD, "run": dense.name}))
    assert call() == "shown" and f"{run / RULER}: ignored (it is of another run" in caplog.text
    (run / directory.STATUS).unlink()
    (run / EVALUATION).write_text((dense / EVALUATION).read_text())
    assert call() == "shown", "a packaged model has no status, and another name than its run"
