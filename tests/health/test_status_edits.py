"""Edits of status.json, config.yaml and checkpoints of a finished run fail their check; those of later commands pass."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fake_run
import pytest

from nsa_lab.config import RunConfig
from nsa_lab.health import LIMITS, Verdict
from nsa_lab.health.digest_checks import check_unchanged
from nsa_lab.health.ending_checks import check_status_agrees
from nsa_lab.health.evaluation_checks import find_foreign_evaluation
from nsa_lab.health.record_checks import check_clock, check_one_run
from nsa_lab.health.step_accounting import check_checkpoints
from nsa_lab.runs import checkpoint_files, directory, resolve
from nsa_lab.runs.evaluation import DIGEST, EVALUATION, write_evaluation
from nsa_lab.runs.history import History, get_monitor_settings

Event = dict[str, Any]


def write_signed(folder: Path, spoil: Callable[[list[Event]], list[Event] | None] | None = None, **status: Any) -> Path:
    """Write a run of which every 25 lines have a digest."""
    run_dir = fake_run.write_run(folder, spoil=spoil, status=status)
    fake_run.sign_record(run_dir, 25)
    return run_dir


def check(run_dir: Path) -> Verdict:
    verdict = check_unchanged(History.read(run_dir), LIMITS)
    assert verdict is not None
    return verdict


def edit_status(run_dir: Path, **values: Any) -> None:
    """Change status.json as an editor does, without its digest."""
    path = run_dir / directory.STATUS
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_any_edit_of_the_status_is_found(tmp_path: Path) -> None:
    run_dir = write_signed(tmp_path, pid=123, attempt=1, exit_code=0, gpu=None)
    status = json.loads((run_dir / directory.STATUS).read_text())
    assert check(run_dir).ok and check_status_agrees(History.read(run_dir), LIMITS).ok
    for name in status.keys() - {"run"}:
        value = status[name]
        edit_status(run_dir, **{name: value + 1 if isinstance(value, (int, float)) else f"{value or ''}0"})
        assert "status.json was changed after it was written" in check(run_dir).text, name
        edit_status(run_dir, **{name: value})
    # Later commands write the digest again; a status without one is of an older version.
    directory.write_status(run_dir, run=status["run"], status="DONE", gpu="0")
    assert check(run_dir).ok
    edit_status(run_dir, digest=None, gpu="1")
    assert check(run_dir).ok


def test_the_status_has_the_digest_of_the_end(tmp_path: Path) -> None:
    run_dir = write_signed(tmp_path, attempt=1)
    lines = (run_dir / directory.EVENTS).read_bytes().splitlines()
    earlier = [line for line in lines if b'"kind":"digest"' in line][1]
    status = directory.read_status(run_dir)
    cases: list[tuple[Any, str]] = [
        (None, "status.json has no digest of the events"),
        (hashlib.sha256(earlier).hexdigest(), "status.json has an earlier digest of the events"),
    ]
    for digest, text in cases:
        directory.write_status(run_dir, **status | {"events_digest": digest})
        assert check(run_dir).ok is False and text in check(run_dir).text, check(run_dir)
        # A run that was killed later has the digest of an earlier end, or none.
        directory.write_status(run_dir, **status | {"events_digest": digest, "status": "RUNNING"})
        assert check(run_dir).ok, text
        directory.write_status(run_dir, **status | {"events_digest": digest, "attempt": 2})
        assert check(run_dir).ok, text


def test_either_end_of_several_processes_counts(tmp_path: Path) -> None:
    """Two supervisors may record the halt of a run at once."""
    run_dir = write_signed(tmp_path, halt(ranks=2, count=2), status="HALTED", attempt=1, reason="lost")
    first = directory.read_status(run_dir)["events_digest"]
    assert check(run_dir).ok
    with open(run_dir / directory.EVENTS, "ab") as file:
        size, digest = hash_rest(run_dir)
        event = json.loads((run_dir / directory.EVENTS).read_bytes().splitlines()[-1])
        file.write(json.dumps(event | {"bytes": size, "sha256": digest}, separators=(",", ":")).encode() + b"\n")
    assert check(run_dir).ok and directory.read_status(run_dir)["events_digest"] == first


def hash_rest(run_dir: Path) -> tuple[int, str]:
    """Return the size and the SHA-256 of the lines that no digest covers."""
    rest = (run_dir / directory.EVENTS).read_bytes().splitlines(keepends=True)[-1]
    return len(rest), hashlib.sha256(rest).hexdigest()


def test_a_digest_of_no_line_is_found(tmp_path: Path) -> None:
    """With it, later lines would be after no end."""
    run_dir = write_signed(tmp_path)
    path = run_dir / directory.EVENTS
    event = json.loads(path.read_bytes().splitlines()[-1])
    empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    with open(path, "ab") as file:
        file.write(json.dumps(event | {"bytes": 0, "sha256": empty}, separators=(",", ":")).encode() + b"\n")
    assert check(run_dir).ok is False and "were changed after they were written" in check(run_dir).text


def test_a_status_is_as_old_as_the_last_event(tmp_path: Path) -> None:
    run_dir = fake_run.write_run(tmp_path)
    status = directory.read_status(run_dir)
    for seconds, ok in ((-120.0, False), (-50.0, True), (50.0, True), (120.0, False), (90_000.0, False)):
        directory.write_status(run_dir, **status | {"updated": status["updated"] + seconds})
        verdict = check_clock(History.read(run_dir), LIMITS)
        assert verdict.ok is ok and ("status.json was written" in verdict.text) is not ok, (seconds, verdict)
    # A thread or another rank writes after the end.
    late = {"kind": "error", "attempt": 1, "step": 200, "where": "rank 1", "message": "lost", "fatal": False, "t": 3000.0}
    other = fake_run.write_run(tmp_path / "late", spoil=lambda events: [*events, late])
    directory.write_status(other, **status | {"run": other.name})
    assert check_clock(History.read(other), LIMITS).ok


def test_an_evaluation_without_its_digest(tmp_path: Path) -> None:
    """Older versions wrote none, and no digests in events.jsonl."""
    run_dir = tmp_path / "long_64k-20261126T122445Z-0d29"
    shutil.copytree(resolve.get_root() / "outputs" / run_dir.name, run_dir)
    record = json.loads((run_dir / EVALUATION).read_text())
    assert DIGEST not in record and find_foreign_evaluation(History.read(run_dir)) is None
    fake_run.sign_record(run_dir)
    history = History.read(run_dir)
    assert "evaluation.json has no digest" in (find_foreign_evaluation(history) or "")
    write_evaluation(run_dir, record)
    assert find_foreign_evaluation(history) is None


def test_settings_of_a_finished_run(tmp_path: Path) -> None:
    """The first event has the settings that the hash does not cover. Those of a stopped run may change."""
    config = fake_run.make_config()
    settings = get_monitor_settings(config)

    def add_settings(events: list[Event]) -> None:
        events[0]["settings"] = settings

    run_dir = fake_run.write_run(tmp_path, spoil=add_settings)
    assert check_one_run(History.read(run_dir), LIMITS).ok
    status = directory.read_status(run_dir)
    for key, value in (("train.log_every", 5), ("train.save_every", 50), ("runtime.heartbeat_s", 3.0)):
        section, name = key.split(".")
        edited = config.to_dict()
        edited[section] = edited.get(section, {}) | {name: value}
        (run_dir / directory.CONFIG).write_text(RunConfig.from_dict(edited).to_yaml())
        directory.write_status(run_dir, **status)
        verdict = check_one_run(History.read(run_dir), LIMITS)
        assert verdict.ok is False and f"config.yaml has {key} = {value}, but attempt 1 had" in verdict.text, verdict
        directory.write_status(run_dir, **status | {"status": directory.PREEMPTED})
        assert check_one_run(History.read(run_dir), LIMITS).ok, key


def test_a_checkpoint_of_another_step(tmp_path: Path) -> None:
    """Also under the name of a step that the run did not save, or whose checkpoint was removed."""
    run_dir = fake_run.write_run(tmp_path)
    folders = {step: fake_run.write_checkpoint(run_dir, step) for step in (100, 200)}
    (folders[100] / checkpoint_files.STATE).write_text('{"step": 100}')
    manifest = json.loads((folders[100] / checkpoint_files.MANIFEST).read_text())

    def write_manifest(folder: Path, step: int) -> None:
        files = {"model.safetensors": manifest["files"]["model.safetensors"]}
        files[checkpoint_files.STATE] = checkpoint_files.read_manifest_entry(folder / checkpoint_files.STATE)
        (folder / checkpoint_files.MANIFEST).write_text(checkpoint_files.format_manifest(step, files))

    write_manifest(folders[100], 100)
    assert check_checkpoints(History.read(run_dir), LIMITS).ok
    copy = folders[100].with_name("step-00000150")
    shutil.copytree(folders[100], copy)
    verdict = check_checkpoints(History.read(run_dir), LIMITS)
    assert verdict.ok is False and "step 150: MANIFEST.json is that of step 100" in verdict.text, verdict
    write_manifest(copy, 150)
    verdict = check_checkpoints(History.read(run_dir), LIMITS)
    assert verdict.ok is False and "state.json is of step 100, MANIFEST.json of step 150" in verdict.text, verdict
    # A save that a killed trainer did not record.
    (copy / checkpoint_files.STATE).write_text('{"step": 150}')
    write_manifest(copy, 150)
    assert check_checkpoints(History.read(run_dir), LIMITS).ok


def test_a_damaged_status_fails(tmp_path: Path) -> None:
    run_dir = fake_run.write_run(tmp_path)
    status = directory.read_status(run_dir)
    wrong = ({"step": "many"}, {"status": 3}, {"tokens": [1]}, {"run": None})
    texts = ("", "[1]", "{}", '{"run"', "[" * 100_000 + "]" * 100_000, "\0", *(json.dumps(status | own) for own in wrong))
    for text in texts:
        (run_dir / directory.STATUS).write_text(text)
        verdict = check_status_agrees(History.read(run_dir), LIMITS)
        assert verdict.ok is False and "status.json is damaged" in verdict.text, (text[:40], verdict)
    # A missing one is inferred from the events: copies of older records have none.
    (run_dir / directory.STATUS).unlink()
    assert check_status_agrees(History.read(run_dir), LIMITS).ok
    (run_dir / directory.STATUS).mkdir()
    assert check_status_agrees(History.read(run_dir), LIMITS).ok is False


def halt(ranks: int, count: int) -> Callable[[list[Event]], list[Event]]:
    """Return an edit by which a run of several ranks halts `count` times, at its last step."""

    def edit(events: list[Event]) -> list[Event]:
        events[0]["ranks"] = ranks
        end = {"kind": "halt", "attempt": 1, "step": 200, "status": "HALTED", "exit_code": 1, "reason": "lost"}
        return [*events[:-1], *([end] * count)]

    return edit


@pytest.mark.parametrize(("ranks", "count", "ok"), [(1, 1, True), (1, 2, False), (2, 3, True), (2, 4, False), (4, 5, True)])
def test_every_rank_and_the_supervisor_may_record_a_halt(tmp_path: Path, ranks: int, count: int, ok: bool) -> None:
    status = {"status": "HALTED", "attempt": 1, "reason": "lost", "exit_code": 1}
    run_dir = fake_run.write_run(tmp_path, spoil=halt(ranks, count), status=status)
    verdict = check_status_agrees(History.read(run_dir), LIMITS)
    assert verdict.ok is ok and ("has ended twice" in verdict.text) is not ok, verdict
