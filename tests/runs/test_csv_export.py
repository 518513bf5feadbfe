"""A run as a table: every number that was logged, each step once."""

from __future__ import annotations

import csv
import io
import math
from pathlib import Path

import pytest
from fake_run import LAYERS, make_eval_event, make_step_event, write_run

from nsa_lab.runs.csv_export import build_table, write_csv
from nsa_lab.runs.history import History


def read_rows(history: History) -> list[dict[str, str]]:
    text = io.StringIO()
    written = write_csv(history, text)
    rows = list(csv.DictReader(io.StringIO(text.getvalue())))
    assert len(rows) == written
    return rows


def test_every_number_of_every_step_is_in_the_table(tmp_path: Path) -> None:
    history = History.read(write_run(tmp_path))
    rows = read_rows(history)
    # 0 was evaluated only.
    assert [int(row["step"]) for row in rows] == [0, 1, *range(10, 201, 10)]
    at = {int(row["step"]): row for row in rows}
    for event in history.steps:
        row = at[event["step"]]
        assert float(row["loss"]) == event["loss"] and float(row["lr"]) == event["lr"]
        for layer in range(LAYERS):
            told = row[f"gate_entropy.{layer}"]
            assert told == (str(event["gate_entropy"][layer]) if "gate_entropy" in event else "")
    assert float(at[0]["validation_bpb"]) == 8.0 and at[0]["loss"] == ""
    assert float(at[50]["validation_bpb"]) == history.evaluations[1]["bpb"] != float(at[50]["bpb"])
    assert at[60]["validation_bpb"] == ""
    assert list(rows[0])[:4] == ["step", "tokens", "attempt", "t"] and not {"kind", "run", "v"} & set(rows[0])


def test_a_step_that_was_done_again_is_there_once_as_it_came_to_be(tmp_path: Path) -> None:
    def spoil(events: list) -> list:
        first = [e for e in events if e["step"] <= 130 and e["kind"] != "end"]
        resume = {"kind": "resume", "attempt": 2, "step": 100, "from_step": 100, "steps": 200}
        config = History.read(write_run(tmp_path / "other")).config
        again = [{**make_step_event(step, config, attempt=2), "loss": 9.0} for step in range(110, 201, 10)]
        return [*first, resume, *again, make_eval_event(150, 3.0, attempt=2)]

    rows = read_rows(History.read(write_run(tmp_path, spoil=spoil)))
    assert [(row["step"], row["attempt"], row["loss"]) for row in rows if row["step"] in ("110", "130")] == [
        ("110", "2", "9.0"),
        ("130", "2", "9.0"),
    ]
    assert len({row["step"] for row in rows}) == len(rows)


def test_what_was_not_finite_or_is_told_by_name(tmp_path: Path) -> None:
    def spoil(events: list) -> None:
        for event in events:
            if event["kind"] == "step" and event["step"] == 20:
                event.update(grad_norm=None, nonfinite=["grad_norm"], weight_bytes={"float32": 12, "bfloat16": 6})

    history = History.read(write_run(tmp_path, spoil=spoil))
    row = next(row for row in build_table(history) if row["step"] == 20)
    assert row["grad_norm"] is None and (row["weight_bytes.float32"], row["weight_bytes.bfloat16"]) == (12, 6)
    assert "weight_bytes.float32" not in next(row for row in build_table(history) if row["step"] == 10)


def test_a_run_without_a_step_is_a_header(tmp_path: Path) -> None:
    text = io.StringIO()
    assert write_csv(History.read(write_run(tmp_path, spoil=lambda events: events[:1])), text) == 0
    assert text.getvalue() == "step,tokens,attempt,t\n"
    assert math.isclose(float(read_rows(History.read(write_run(tmp_path / "b")))[1]["data_s"]), 0.005)


@pytest.mark.parametrize("into", [False, True])
def test_the_command_prints_it_or_writes_it(into: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    from nsa_lab import cli

    run_dir, file = write_run(tmp_path / "outputs"), tmp_path / "run.csv"
    rest = ["--into", str(file)] if into else []
    monkeypatch.setattr("sys.argv", ["nsa-lab", "export", str(run_dir), "--csv", *rest])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    out = capsys.readouterr().out
    assert not ended.value.code
    assert (file.read_text() if into else out).startswith("step,tokens,attempt,t,")
    assert not into or out == f"{file}: 22 rows\n"
    monkeypatch.setattr("sys.argv", ["nsa-lab", "export", str(run_dir)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2 and "--csv" in capsys.readouterr().err
