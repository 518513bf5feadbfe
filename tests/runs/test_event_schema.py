"""The event schema: frozen kinds and fields, recorded runs conform to it, and violations are reported with their line."""

from __future__ import annotations

import copy
import json
import math
import random
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fake_run
import numpy as np
import pytest

from nsa_lab.runs import directory, event_builder, event_columns, event_fields, event_schema, event_table, events
from nsa_lab.runs.event_builder import make_events
from nsa_lab.train.telemetry.event_log import EventLog

ROOT = Path(__file__).parents[2]
FROZEN = Path(__file__).with_name("event_schema.json")
ARCHIVE = ROOT / "docs/science/records/runs.tar.xz"


def describe_schema() -> dict[str, dict[str, list[Any]]]:
    """Return kind -> field -> [type, whether every event has it]."""
    return {
        kind: {name: [field.label, field.is_required] for name, field in event_fields.get_fields(kind).items()}
        for kind in event_schema.KINDS
    }


def test_kinds_and_fields_are_frozen() -> None:
    """A kind or an optional field may be added to both sides; nothing that is in the file may change."""
    frozen = json.loads(FROZEN.read_text(encoding="utf-8"))
    current = describe_schema()
    for kind, fields in frozen.items():
        assert {name: current[kind].get(name) for name in fields} == fields, kind
        added = current[kind].keys() - fields.keys()
        assert not added, f"{kind}: add {added} to {FROZEN.name}, as optional fields"
    assert current.keys() == frozen.keys()


def iterate_recorded_events() -> Iterator[tuple[str, bytes]]:
    """Yield (run, content of events.jsonl) of every recorded run."""
    for path in sorted((ROOT / "outputs").glob(f"*/{directory.RECORDED}")):
        yield path.parent.name, (path.parent / directory.EVENTS).read_bytes()
    with tarfile.open(ARCHIVE) as archive:
        for member in archive:
            if member.name.endswith(f"/{directory.EVENTS}"):
                file = archive.extractfile(member)
                assert file is not None
                yield member.name.partition("/")[0], file.read()


@pytest.mark.slow
def test_recorded_runs_conform_to_the_schema(tmp_path: Path) -> None:
    n_runs = 0
    for run, content in iterate_recorded_events():
        path = tmp_path / "events.jsonl"
        path.write_bytes(content)
        record = events.read_events(path)
        assert (record.violations.count, record.violations.listed) == (0, []), run
        assert record == [json.loads(line) for line in content.splitlines()], run
        n_runs += 1
    assert n_runs >= 74


def test_readers_import_neither_torch_nor_the_trainer() -> None:
    names = "nsa_lab.runs.history, nsa_lab.runs.events, nsa_lab.runs.csv_export, nsa_lab.health, nsa_lab.runs.live_view"
    script = f"import {names}, sys; assert not {{m for m in sys.modules if m == 'torch' or m.startswith('nsa_lab.train')}}"
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT)


def make_value(label: str, rng: random.Random) -> Any:
    """Return a value of a type of the schema."""
    parts = label.split(" or ")
    label = rng.choice(parts) if not label.startswith("a ") or len(parts) == 1 else parts[0]
    number = rng.choice([0.5, 3, -1e300, 2**60 + 1, 0])
    return {
        "an integer": rng.choice([0, 7, 2**62]),
        "a number": number,
        "text": rng.choice(["a", "ä" * 9]),
        "true or false": rng.choice([True, False]),
        "null": None,
        "a list of numbers": [number, 1.5, None][: rng.randrange(4)],
        "a list of text": ["a"],
        "a list of integers": [1, 2],
    }.get(label)


def make_random_events(rng: random.Random, count: int) -> list[dict[str, Any]]:
    """Return valid events of all kinds with random fields, and some of an unknown kind."""
    result = []
    for index in range(count):
        kind = rng.choice([*event_schema.KINDS, "of_tomorrow"])
        event: dict[str, Any] = {
            "v": 1,
            "t": float(index),
            "run": "x",
            "attempt": 1,
            "kind": kind,
            "step": index,
            "tokens": 0,
        }
        for name, field in event_fields.get_fields(kind).items():
            if name not in event and (field.is_required or rng.random() < 0.3):
                value = make_value(field.label, rng)
                event |= {name: value} if field.accepts(value) else {}
        if rng.random() < 0.5:
            event[f"new_{rng.randrange(4)}"] = rng.choice([1, 2.5, None, "a", [1, 2.0], {"b": [1]}, True, 10**30])
        result.append(event)
    return result


def test_events_are_read_as_they_were_written(tmp_path: Path) -> None:
    """Stored by field, every event comes back equal: sparse fields, unknown fields and kinds, null, large integers."""
    rng = random.Random(0)
    for count in (0, 1, 3, 2000):
        written = make_random_events(rng, count)
        path = tmp_path / "events.jsonl"
        path.write_text("".join(json.dumps(event) + "\n" for event in written))
        record = events.read_events(path)
        missing = [violation for violation in record.violations.listed if violation.is_skipped]
        assert not missing and len(record) == count
        for own, event in zip(record, written, strict=True):
            # A required number that is missing is null.
            assert {name: value for name, value in own.items() if name in event} == event
            assert all(value is None for name, value in own.items() if name not in event)
        assert make_events(written) == written and copy.deepcopy(make_events(written)) == written


@pytest.mark.slow
def test_fields_are_read_as_arrays() -> None:
    rng = random.Random(1)
    written = make_random_events(rng, 1500)
    record = make_events(written)
    chosen = record.select(np.array([rng.random() < 0.5 for _ in written]))
    names = {name for event in written for name in event}
    for part in (record, chosen, record.of_kind("step", "eval"), record[::-3], record[:0]):
        rows = list(part)
        for name in names:
            assert part.values(name) == [row.get(name) for row in rows]
            assert part.has(name).tolist() == [name in row for row in rows]
            expected = [float(v) if type(v := row.get(name)) in (int, float) else np.nan for row in rows]
            np.testing.assert_array_equal(part.numbers(name), expected)
        positions, lists = part.lists("norm_sel")
        assert [(p, len(values)) for p, values in zip(positions, lists, strict=True)] == [
            (p, len(row["norm_sel"])) for p, row in enumerate(rows) if row.get("norm_sel")
        ]


def write_lines(run_dir: Path, *lines: Any) -> None:
    with open(run_dir / directory.EVENTS, "ab") as file:
        for line in lines:
            file.write((line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n")


def test_violations_are_reported_with_their_line(tmp_path: Path) -> None:
    run_dir = fake_run.write_run(tmp_path)
    n_lines = len((run_dir / directory.EVENTS).read_bytes().splitlines())
    envelope = {"v": 1, "t": 5.0, "run": run_dir.name, "attempt": 1, "step": 7, "tokens": 9}
    step = {**envelope, **fake_run.make_step_event(7, fake_run.make_config())}
    cases: list[tuple[Any, str, bool]] = [
        (b'{"kind": "st', "not JSON", True),
        ({**step, "loss": "2"}, "step: loss: expected a number or null, got '2'", True),
        ({**step, "step": 10**400}, "step: step: expected an integer", True),
        ({**step, "step": 2 * 10**9}, "step: step: expected 0 to 200", True),
        ({**step, "step": -1}, "step: step: expected 0 to 200", True),
        ({**step, "t": float("nan")}, "step: t: expected a finite number", True),
        ({**step, "loss": 10**400}, "step: loss: expected a number", True),
        ({**step, "sel_reuse": [1, "x"]}, "step: sel_reuse: expected a list of numbers", False),
        ({name: value for name, value in step.items() if name != "loss"}, "step: loss: missing", False),
        ({**step, "new": [1, {"a": 2}]}, "", False),
        ([1, 2], "expected an object", True),
        (b"[" * 100_000, "not JSON", True),
        (b'{"kind": "\xff"}', "not JSON", True),
    ]
    write_lines(run_dir, *(case for case, *_ in cases))
    record = events.read_events(run_dir, 200)
    found = {violation.line - n_lines: violation for violation in record.violations.listed}
    for number, (case, problem, is_skipped) in enumerate(cases, 1):
        violation = found.pop(number, None)
        assert (violation is None) == (problem == ""), case
        if violation:
            assert problem in str(violation) and str(violation).startswith(f"line {n_lines + number}: "), str(violation)
            assert violation.is_skipped is is_skipped
    assert not found
    assert next(event for event in record if event["kind"] == "step" and event["step"] == 7 and event["loss"] is None)
    assert len(record) == n_lines + sum(not is_skipped for *_, is_skipped in cases)


def test_number_of_kinds_and_fields_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    envelope = {"v": 1, "t": 1.0, "run": "x", "attempt": 1, "step": 0, "tokens": 0}
    kinds = [{**envelope, "kind": f"kind {n}"} for n in range(1000)]
    fields = [{**envelope, "kind": "x", f"field {n}": n} for n in range(1000)]
    path.write_text("".join(json.dumps(event) + "\n" for event in [{**envelope, "kind": "x"}, *fields, *kinds]))
    record = events.read_events(path)
    assert record.violations.count == 2001 - len(record) and len(record.violations.listed) == event_table.MAX_LISTED
    assert len({event["kind"] for event in record}) == event_builder.MAX_KINDS
    assert len({name for event in record for name in event}) <= event_builder.MAX_FIELDS + 7


def test_line_without_end_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "MAX_LINE", 1000)
    monkeypatch.setattr(events, "BLOCK_BYTES", 100)
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"kind": "a", "t": 1.0, "attempt": 1, "step": 0}\n' * 50)
    assert len(events.read_events(path)) == 50
    path.write_bytes(b"x" * 5000)
    with pytest.raises(OSError, match="line 1 is longer than 1,000 bytes"):
        events.read_events(path)


def test_writer_reports_a_violation_once_and_writes_the_event(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = EventLog(tmp_path, "a-run", 1)
    for _ in range(3):
        log.append("end", status="DONE", exit_code="0", reason="done")
    log.append("end", status="DONE", exit_code=0, reason="done", new="a field of a newer version")
    assert [message for message in caplog.messages if "violates its schema" in message and "exit_code" in message]
    assert sum("violates" in message for message in caplog.messages) == 1
    record = events.read_events(tmp_path)
    assert len(record) == 1 and record.violations.count == 3


def test_reference_page_is_current() -> None:
    script = [sys.executable, str(ROOT / "tools/event_reference.py"), "--check"]
    result = subprocess.run(script, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def test_numbers_of_a_column_that_grows_and_has_other_values() -> None:
    """Brute force: a value that is not a number is NaN, also one that was added after the numbers were read."""
    values = [1, 2.5, None, 2**60, "text", 3, True, math.inf, [1], -4, None]
    for first in ([0.5], [7]):
        column, added = event_columns.make_column(None, list(first)), list(first)
        column.extend(0, list(first))
        for value in values:
            column.extend(len(added), [value])
            added.append(value)
            expected = [float(x) if type(x) in (int, float) else math.nan for x in added]
            np.testing.assert_array_equal(column.numbers(np.arange(len(added))), expected)
            order = np.arange(len(added))[::-2]
            np.testing.assert_array_equal(column.numbers(order), np.array(expected)[order])
            assert [column[index] for index in range(len(added))] == added


def test_lists_of_a_column_that_grows() -> None:
    """Brute force: batches of lists of any length, of floats only and with other values."""
    rng, added = random.Random(2), list[Any]()
    column = event_columns.make_column("numbers", [])
    for _ in range(60):
        others = rng.choice([[], [], [None, 3, 2**60]])
        batch = [[rng.choice([0.5, -1e9, *others]) for _ in range(rng.randrange(4))] for _ in range(rng.randrange(1, 5))]
        column.extend(len(added), copy.deepcopy(batch))
        added += batch
        assert [column[index] for index in range(len(added))] == column.get_values(list(range(len(added)))) == added
        lengths, starts, data = column.lists(np.arange(len(added)))
        expected = [[math.nan if value is None else float(value) for value in values] for values in added]
        for values, length, start in zip(expected, lengths, starts, strict=True):
            np.testing.assert_array_equal(data[start : start + length], values)
        del data  # a column cannot grow while its data is in use


def test_lines_are_decoded_as_by_json() -> None:
    lines = [
        b'{"a": 1.5}',
        b' {"a": [1]}\r',
        b'\xef\xbb\xbf{"a": 1}',
        b'{"a": "\xed\xa0\x80"}',
        b'{"a": 1} x',
        b'{"a": 1}{}',
    ]
    lines += [b"", b"{", b"1", b"NaN", b'{"a": "\xff"}', '{"a": "ä"}'.encode("utf-16"), b"[" * 100_000]
    for line in lines:
        try:
            expected = json.loads(line)
        except (ValueError, RecursionError):
            expected = None
        decoded = events.decode_line(line)
        assert repr(decoded) == repr(expected), line[:40]


def test_values_that_are_read_can_be_changed() -> None:
    for values in ([[1], [2]], ["a", [1], {"b": [2]}, None, 3.5], ["a", "b"], [{"a": 1}, {"a": 1}]):
        column = event_columns.make_column("object", [])
        column.extend(0, copy.deepcopy(values[:1]))
        column.extend(1, copy.deepcopy(values[1:]))
        for read in (column.get_values(list(range(len(values)))), [column[index] for index in range(len(values))]):
            assert read == values
            for value in read:
                if isinstance(value, (dict, list)):
                    value.clear()
        assert column.get_values(list(range(len(values)))) == values


def test_rows_of_a_sparse_column_are_located() -> None:
    rng = random.Random(3)
    column, present = event_columns.make_column("number", []), [row for row in range(60) if rng.random() < 0.4]
    for row in present:
        column.extend(row, [float(row)])
    for rows in (range(60), range(17, 41), range(59, -1, -1), range(0, 60, 3), [5], [], [7, 7, 2], present, [3, 5, 5, 6]):
        has, indices = column.locate(np.array(rows, dtype=np.int64))
        assert has.tolist() == [row in present for row in rows]
        assert column.numbers(indices).tolist() == [float(row) for row in rows if row in present]
