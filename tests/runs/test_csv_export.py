"""A run as a table: every logged number, each step once."""

from __future__ import annotations

import csv
import io
import math
from pathlib import Path

import pytest
from fake_run import LAYERS, make_eval_event, make_step_event, write_run

from nsa_lab.runs.csv_export import iterate_rows, write_csv
from nsa_lab.runs.history import History


def read_rows(history: History) -> list[dict[str, str]]:
    text = io.StringIO()
    n_rows = write_csv(history, text)
    rows = list(csv.DictReader(io.StringIO(text.getvalue())))
    assert len(rows) == n_rows
    return rows


def test_table_has_every_number_of_every_step(tmp_path: Path) -> None:
    history = History.read(write_run(tmp_path))
    rows = read_rows(history)
    # Step 0 was only evaluated.
    assert [int(row["step"]) for row in rows] == [0, 1, *range(10, 201, 10)]
    row_by_step = {int(row["step"]): row for row in rows}
    for event in history.steps:
        row = row_by_step[event["step"]]
        assert float(row["loss"]) == event["loss"] and float(row["lr"]) == event["lr"]
        for layer in range(LAYERS):
            cell = row[f"gate_entropy.{layer}"]
            assert cell == (str(event["gate_entropy"][layer]) if "gate_entropy" in event else "")
    assert float(row_by_step[0]["validation_bpb"]) == 8.0 and row_by_step[0]["loss"] == ""
    assert float(row_by_step[50]["validation_bpb"]) == history.evaluations[1]["bpb"] != float(row_by_step[50]["bpb"])
    assert row_by_step[60]["validation_bpb"] == ""
    assert list(rows[0])[:4] == ["step", "tokens", "attempt", "t"] and not {"kind", "run", "v"} & set(rows[0])


def test_repeated_step_occurs_once(tmp_path: Path) -> None:
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


def test_nonfinite_numbers_and_mappings(tmp_path: Path) -> None:
    def spoil(events: list) -> None:
        for event in events:
            if event["kind"] == "step" and event["step"] == 20:
                event.update(grad_norm=None, nonfinite=["grad_norm"], weight_bytes={"float32": 12, "bfloat16": 6})

    history = History.read(write_run(tmp_path, spoil=spoil))
    row = next(row for row in iterate_rows(history) if row["step"] == 20)
    assert row["grad_norm"] is None and (row["weight_bytes.float32"], row["weight_bytes.bfloat16"]) == (12, 6)
    assert "weight_bytes.float32" not in next(row for row in iterate_rows(history) if row["step"] == 10)


def test_run_without_steps_gives_a_header(tmp_path: Path) -> None:
    text = io.StringIO()
    assert write_csv(History.read(write_run(tmp_path, spoil=lambda events: events[:1])), text) == 0
    assert text.getvalue() == "step,tokens,attempt,t\n"
    assert math.isclose(float(read_rows(History.read(write_run(tmp_path / "b")))[1]["data_s"]), 0.005, rel_tol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("to_file", [False, True])
def test_command_prints_or_writes_the_table(to_file: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    from nsa_lab import cli

    run_dir, file = write_run(tmp_path / "outputs"), tmp_path / "run.csv"
    options = ["--into", str(file)] if to_file else []
    monkeypatch.setattr("sys.argv", ["nsa-lab", "export", str(run_dir), "--csv", *options])
    with pytest.raises(SystemExit) as exit_info:
        cli.main()
    out = capsys.readouterr().out
    assert not exit_info.value.code
    assert (file.read_text() if to_file else out).startswith("step,tokens,attempt,t,")
    assert not to_file or out == f"{file}: 22 rows\n"
    monkeypatch.setattr("sys.argv", ["nsa-lab", "export", str(run_dir)])
    with pytest.raises(SystemExit) as exit_info:
        cli.main()
    assert exit_info.value.code == 2 and "--csv" in capsys.readouterr().err
