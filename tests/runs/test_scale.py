"""A long record and many runs: memory is bounded, and `status` reads only the end of a record (times: docs/testing.md)."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import fake_run
import numpy as np
import pytest
from large_record import write_long_run
from typer.testing import CliRunner

from nsa_lab import cli, health
from nsa_lab.runs import directory, event_table, events, segment_digests

RECORD_BYTES, MEMORY_BYTES = 200_000_000, 500_000_000


class Counted(np.ndarray):
    """An array that counts the elements of all arrays that numpy functions and operators are called with."""

    n_elements = 0

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, out: Any = None, **options: Any) -> Any:
        Counted.n_elements += max(np.size(value) for value in inputs)
        options |= {"out": tuple(map(_uncount, out))} if out else {}
        result = getattr(ufunc, method)(*map(_uncount, inputs), **options)
        return result.view(Counted) if isinstance(result, np.ndarray) else result

    def __getitem__(self, index: Any) -> Any:
        result = super().__getitem__(index)
        Counted.n_elements += max(np.size(index) if isinstance(index, np.ndarray) else 0, np.size(result))
        return result


def _uncount(value: Any) -> Any:
    return value.view(np.ndarray) if isinstance(value, Counted) else value


@pytest.mark.slow
def test_the_work_of_health_is_linear_in_the_number_of_attempts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop over attempts with one operation on all events would be a pass over them for each further attempt."""
    n_built = [0]
    make_event, numbers, split = event_table.EventTable.make_event, event_table.Events.numbers, event_table.Events._split

    def count_built(table: Any, row: int) -> Any:
        n_built[0] += 1
        return make_event(table, row)

    def count_split(self: Any, name: str | None = None) -> Any:
        Counted.n_elements += len(self)
        return split(self, name)

    monkeypatch.setattr(event_table.EventTable, "make_event", count_built)
    monkeypatch.setattr(event_table.Events, "numbers", lambda self, name: numbers(self, name).view(Counted))
    monkeypatch.setattr(event_table.Events, "_split", count_split)
    passes, built, counts = [], [], (100, 400)
    for n_attempts in counts:
        run_dir = write_long_run(tmp_path / str(n_attempts), 500_000, n_attempts=n_attempts)
        n_built[0] = Counted.n_elements = 0
        health.examine(run_dir)
        passes.append(Counted.n_elements / len(events.read_events(run_dir)))
        built.append(n_built[0])
    assert passes[1] - passes[0] < (counts[1] - counts[0]) / 4, passes
    assert built[1] < 6 * built[0], built


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_health_of_a_long_record_takes_bounded_memory(tmp_path: Path) -> None:
    run_dir = write_long_run(tmp_path, RECORD_BYTES, n_attempts=600)
    fake_run.sign_record(run_dir, every=1000)
    assert (run_dir / directory.EVENTS).stat().st_size > RECORD_BYTES * 0.95
    # The peak of a process includes the size of its parent at the fork. This process may be large, a new one is not.
    measure = (
        "import resource, subprocess, sys; code = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL).returncode; "
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss); sys.exit(code)"
    )
    command = [sys.executable, "-c", measure, sys.executable, "-m", "nsa_lab", "health", str(run_dir)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr
    peak = int(result.stdout) * 1024
    assert 50_000_000 < peak < MEMORY_BYTES, f"{peak:,} bytes"


def test_each_byte_of_a_record_is_hashed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The digests of a damaged record may have any size."""
    run_dir, n_hashed = fake_run.write_run(tmp_path), list[int]()
    hash_bytes = segment_digests._hash_bytes
    monkeypatch.setattr(
        segment_digests, "_hash_bytes", lambda file, start, size: n_hashed.append(size) or hash_bytes(file, start, size)
    )
    fake_run.sign_record(run_dir, every=1)
    path = run_dir / directory.EVENTS
    whole = path.read_text()
    for size in (None, 0, 1, 10**15, -1):
        path.write_text(whole if size is None else re.sub(r'"bytes":\d+', f'"bytes":{size}', whole))
        n_hashed.clear()
        segments = segment_digests.read_segments(path)
        assert sum(n_hashed) <= path.stat().st_size and bool(segments.changed) == (size is not None), size


@pytest.mark.slow
def test_status_reads_only_the_end_of_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = fake_run.write_run(tmp_path / "source")
    outputs = tmp_path / "outputs"
    outputs.mkdir()
    for number in range(40):
        copy = shutil.copytree(source, outputs / f"fake-20260101T0000{number:02d}Z-abcd")
        for name in (directory.STATUS, directory.EVENTS):
            text = (copy / name).read_text().replace(source.name, copy.name)
            # A long beginning that nothing needs.
            (copy / name).write_text(f"{text.splitlines()[0]}\n" * 20_000 + text if name == directory.EVENTS else text)
    n_decoded, decode = [0], events.decode_line

    def count(line: bytes) -> object:
        n_decoded[0] += 1
        return decode(line)

    monkeypatch.setattr(events, "decode_line", count)
    for options in ([], ["--json"]):
        n_decoded[0] = 0
        result = CliRunner().invoke(cli.app, ["status", "--outputs", str(outputs), *options], env={"COLUMNS": "200"})
        assert result.exit_code == 0 and result.output.count("DONE") == 40
        assert 40 < n_decoded[0] < 40 * 100, options
