"""Every later change of a record is found and its lines are named; a crash, a full disk and several ranks are no change."""

from __future__ import annotations

import errno
import json
import os
import random
import re
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import fake_run
import pytest

from nsa_lab.health import LIMITS, Verdict, examine
from nsa_lab.health.digest_checks import check_unchanged
from nsa_lab.runs import directory
from nsa_lab.runs.history import History
from nsa_lab.runs.segment_digests import read_segments
from nsa_lab.train.telemetry import event_log
from nsa_lab.train.telemetry.event_log import EventLog

EVERY = 25  # lines in a segment


@pytest.fixture
def signed(tmp_path: Path) -> History:
    run_dir = fake_run.write_run(tmp_path)
    fake_run.sign_record(run_dir, EVERY)
    return History.read(run_dir)


def write_lines(history: History, lines: list[bytes]) -> None:
    (history.run_dir / directory.EVENTS).write_bytes(b"".join(lines))


def read_lines(history: History) -> list[bytes]:
    return (history.run_dir / directory.EVENTS).read_bytes().splitlines(keepends=True)


def check(history: History) -> Verdict:
    verdict = check_unchanged(history, LIMITS)
    assert verdict is not None
    return verdict


def list_named_lines(text: str) -> range:
    """Return the lines that a verdict names."""
    first, last = re.match(r"lines ([\d,]+) to (?:[\d,]+), or their digest in line ([\d,]+),", text).groups()  # pyright: ignore
    return range(int(first.replace(",", "")), int(last.replace(",", "")) + 1)


def test_a_record_without_digests_is_not_judged(tmp_path: Path) -> None:
    history = History.read(fake_run.write_run(tmp_path))
    assert check_unchanged(history, LIMITS) is None
    fake_run.sign_record(history.run_dir)
    health = examine(history.run_dir)
    assert next(verdict.ok for verdict in health.verdicts if verdict.name == "record unchanged") and not health.failed


def test_each_changed_line_is_named(signed: History) -> None:
    lines = read_lines(signed)
    n_digests = sum(b'"kind":"digest"' in line for line in lines)
    assert check(signed).ok and n_digests == -(-(len(lines) - n_digests) // EVERY)
    for index, line in enumerate(lines):
        before, after = lines[:index], lines[index + 1 :]
        number = random.Random(index).choice([place for place, byte in enumerate(line) if chr(byte).isdigit()])
        digit = str((int(chr(line[number])) + 1) % 10).encode()
        edits = {
            "a digit": [*before, line[:number] + digit + line[number + 1 :], *after],
            "removed": [*before, *after],
            "twice": [*before, line, line, *after],
            "moved": [*before, *after[:1], line, *after[1:]] if after else [*before[:-1], line, *before[-1:]],
            "a space": [*before, line[:-2] + b" }\n", *after],
            "another line end": [*before, line[:-1] + b"\r\n", *after],
        }
        for name, edited in edits.items():
            write_lines(signed, edited)
            verdict = check(signed)
            assert verdict.ok is False, (index, name)
            if verdict.text.startswith("lines "):
                named = list_named_lines(verdict.text)
                assert {index, index + 1, index + 2} & {*named}, (index, name, verdict.text)
                # One segment, or two that the removal of a digest event joins, or two that share a line that was moved.
                assert len(named) <= 2 * EVERY + 3 and verdict.value in (1, 2), (index, name, verdict.text)
            else:
                assert index >= len(lines) - 2, (index, name, verdict.text)


def test_the_lines_of_one_segment_are_named(signed: History) -> None:
    lines = read_lines(signed)
    lines[30] = lines[30].replace(b'"tokens": ', b'"tokens": 1', 1)
    write_lines(signed, lines)
    assert check(signed).text.startswith(
        "lines 26 to 51, or their digest in line 52, were changed after they were written;"
    )
    lines[57] = lines[58] = b""
    write_lines(signed, lines)
    assert "in line 52, were changed after they were written, and 1 later parts;" in check(signed).text


def test_other_damage_is_found(signed: History) -> None:
    lines = read_lines(signed)
    whole = b"".join(lines)
    last = json.loads(lines[-2])
    cases: dict[bytes, str] = {
        b"".join(lines[:-1]): "the last lines of attempt None were removed or changed",
        b"".join(lines[:40]): "the last lines of attempt None were removed or changed",
        whole[:-1]: "the last lines of attempt None were removed or changed",
        whole + bytes(100): f"line {len(lines) + 1:,} is damaged: it is not the beginning of an event",
        whole + b'{"v":1,"t"' + bytes(100): f"line {len(lines) + 1:,} is damaged",
        whole + b'{"t": 3}\n'[:-2]: f"line {len(lines) + 1:,} is damaged",
        whole
        + json.dumps({**last, "kind": "reach"}).encode()
        + b"\n": f"line {len(lines) + 1:,} was added after the end of",
        b"\xef\xbb\xbf" + whole: "lines 1 to 25, or",
        whole.decode().encode("utf-16"): "the last lines of attempt None were removed or changed",
        whole.replace(b"\n", b"\r\n"): "lines 1 to 25, or",
    }
    for content, text in cases.items():
        write_lines(signed, [content])
        assert check(signed).ok is False and text in check(signed).text, (text, check(signed).text)
    # Another rank, the heartbeat, or a next attempt writes after the end.
    for late in (
        {"kind": "error", "attempt": last["attempt"]},
        {"kind": "heartbeat", "attempt": last["attempt"]},
        {"kind": "fill", "attempt": last["attempt"] + 1},
    ):
        write_lines(signed, [whole, json.dumps(last | late).encode() + b"\n", b'{"v":1,"t":12'])
        assert check(signed).ok, late


def test_removed_digests_and_a_missing_file_are_found(signed: History) -> None:
    path = signed.run_dir / directory.EVENTS
    lines = path.read_bytes().splitlines(keepends=True)
    first = json.loads(lines[0]) | {"environment": "0" * 64}
    path.write_bytes(json.dumps(first).encode() + b"\n" + b"".join(x for x in lines[1:] if b'"digest"' not in x))
    verdict = check_unchanged(History.read(signed.run_dir), LIMITS)
    assert verdict is not None and verdict.ok is False and "digest events of attempt 1 were removed" in verdict.text
    path.unlink()
    verdict = check_unchanged(History.read(signed.run_dir), LIMITS)
    assert verdict is not None and verdict.ok is False and "is missing" in verdict.text
    assert examine(signed.run_dir).level == "failed"


def test_a_changed_environment_is_found(tmp_path: Path) -> None:
    run_dir = fake_run.write_run(tmp_path)
    fake_run.sign_record(run_dir)
    path = run_dir / directory.ENVIRONMENT
    digest = directory.compute_file_digest(path)
    history = fake_run.edit_history(History.read(run_dir), lambda events: events[0].update(environment=digest))
    assert check(history).ok
    path.write_text(path.read_text().replace("3.11", "3.12"))
    assert check(history).ok is False and "environment.json was changed" in check(history).text
    path.unlink()  # reported by another check
    assert check(history).ok


def append(log: EventLog, kind: str = "note", n: int = 0) -> None:
    log.append(kind, n=n)


def write_attempt(run_dir: Path, attempt: int, n_segments: int = 2) -> str | None:
    """Write an attempt with few lines in each of its segments. Return the digest that the status would have."""
    log, digest = EventLog(run_dir, "r", attempt), None
    for number in range(n_segments):
        append(log, n=number)
        append(log, n=number)
        digest = log.append_digest()
    log.close()
    return digest


@pytest.mark.slow
def test_a_kill_at_any_byte_is_no_change(signed: History, tmp_path: Path) -> None:
    """Also of a resumed run, before and after its resumption."""
    (tmp_path / "killed").mkdir()
    path = tmp_path / "killed" / directory.EVENTS
    write_attempt(path.parent, 1)
    first = path.read_bytes()
    ended = write_attempt(path.parent, 2)
    whole = path.read_bytes()
    killed = replace(signed, run_dir=path.parent, status={"status": directory.RUNNING})
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        assert check(killed).ok, size
        n_segments = len(read_segments(path).digests)
        if size % 13 == 0:
            digest = write_attempt(path.parent, 3, n_segments=1)
            # A digest that lacked only its line end counts.
            assert n_segments < len(read_segments(path).digests) <= n_segments + 2
            assert check(replace(killed, status={"events_digest": digest, "attempt": 3})).ok, size
            # The incomplete line is in the first segment of the new attempt.
            resumed = path.read_bytes()
            path.write_bytes(resumed[: max(size - 1, 0)] + b"!" + resumed[size or 1 :])
            assert check(killed).ok is False, size
    path.write_bytes(whole)
    assert check(replace(killed, status={"events_digest": ended})).ok
    # The end of an earlier attempt, for a run that was killed later.
    assert check(replace(killed, status={"events_digest": write_attempt(path.parent, 3)})).ok
    assert len(first) < len(whole)


@pytest.mark.slow
def test_a_full_disk_is_no_change(signed: History, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any number of bytes is written before the disk is full; then it has space again."""
    for room in range(0, 1500, 11):
        run_dir = tmp_path / f"full-{room}"
        run_dir.mkdir()
        left = [room]

        def write(descriptor: int, data: bytes, left: list[int] = left) -> int:
            if not left[0]:
                raise OSError(errno.ENOSPC, "No space left on device")
            n_written = os.write(descriptor, data[: left[0]])
            left[0] -= n_written
            return n_written

        full = replace(signed, run_dir=run_dir, status={})
        with monkeypatch.context() as patch:
            names = {name: getattr(os, name) for name in dir(os)} | {"write": write}
            patch.setattr(event_log, "os", types.SimpleNamespace(**names))
            log = EventLog(run_dir, "r", 1)
            for _ in range(3):
                append(log)
                append(log)
                log.append_digest()
            assert check(full).ok, room
            left[0] = 1 << 30
            append(log)
            digest = log.append_digest()
            log.close()
        assert (
            check(replace(full, status={"events_digest": digest})).ok and read_segments(run_dir / directory.EVENTS).digests
        )


def test_lines_of_other_ranks_are_in_a_segment(signed: History, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those written between the end of a segment and its digest event, complete or not."""
    run_dir = tmp_path / "ranks"
    run_dir.mkdir()
    path, hash_lines = run_dir / directory.EVENTS, event_log.hash_complete_lines
    first, second = EventLog(run_dir, "r", 1), EventLog(run_dir, "r", 1)

    def hash_and_wait(*arguments: Any) -> Any:
        os.write(second._file, b'{"v":1,"kind":')
        result = hash_lines(*arguments)
        os.write(second._file, b'"error","attempt":1}\n')
        second.append("error", where="rank 1", message="late", fatal=False)
        return result

    monkeypatch.setattr(event_log, "hash_complete_lines", hash_and_wait)
    history = replace(signed, run_dir=run_dir, status={})
    for _ in range(3):
        append(first)
        digest = first.append_digest()
        assert check(replace(history, status={"events_digest": digest})).ok
    monkeypatch.undo()
    # A line that is written in pieces, around a digest that is then no event.
    n_segments = len(read_segments(path).digests)
    os.write(second._file, b'{"v":1,"kind":')
    assert first.append_digest() is None and len(read_segments(path).digests) == n_segments
    os.write(second._file, b'"error"}\n')
    digest = first.append_digest()
    assert check(replace(history, status={"events_digest": digest})).ok
    whole = path.read_bytes()
    assert whole.count(b'"error"') == 7 and len(read_segments(path).digests) == 4
    for place in range(0, len(whole), 9):
        path.write_bytes(whole[:place] + (b"0" if whole[place : place + 1] != b"0" else b"1") + whole[place + 1 :])
        assert check(replace(history, status={"events_digest": digest})).ok is False, place
