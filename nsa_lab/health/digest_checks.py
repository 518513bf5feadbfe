"""Check that the files of a record are as the trainer wrote them, by the digests that it recorded.

Edits of somebody who also computes the digests again are not found: the digests are no signatures.
"""

from __future__ import annotations

from nsa_lab.health.verdict import Limits, Verdict
from nsa_lab.runs import directory, segment_digests
from nsa_lab.runs.atomic_io import compute_digest
from nsa_lab.runs.events import decode_line, read_lines
from nsa_lab.runs.history import History
from nsa_lab.runs.segment_digests import Segments

NAME = "record unchanged"
REMEDY = f"restore {directory.EVENTS} from a copy"
# Another rank, the heartbeat and the supervisor may write these after an attempt has ended.
LATE_KINDS = (segment_digests.KIND, "error", "heartbeat", "stall", "signal", "guard", "halt")
ENDED_STATES = (directory.DONE, directory.HALTED, directory.PREEMPTED)
FIRST_KEY = b'{"v":'


def check_unchanged(history: History, limits: Limits) -> Verdict | None:
    """Check that events.jsonl, environment.json and status.json match the digests in the events and in status.json.

    None for a record without digests, as older runs are. Lines since the last digest cannot be compared: an interrupted
    attempt may have left an incomplete one, but not one that is damaged.
    """
    has_digests = bool(len(history.events_of_kind(segment_digests.KIND))) or "events_digest" in history.status
    environments = [value for value in history.first_events.values("environment") if value is not None]
    recorded = history.status.get("digest")
    if not has_digests and not environments and recorded is None:
        return None
    if recorded not in (None, compute_digest(history.status)):
        text = f"{directory.STATUS} was changed after it was written; restore it from a copy"
        return Verdict(NAME, False, 1, 0, text)
    if not has_digests and not environments:
        return None
    if not (history.run_dir / directory.EVENTS).exists():
        return Verdict(NAME, False, 1, 0, f"{directory.EVENTS} is missing; {REMEDY}")
    segments = segment_digests.read_segments(history.run_dir / directory.EVENTS)
    if segments.changed:
        return Verdict(NAME, False, len(segments.changed), 0, f"{_describe_changes(segments)}; {REMEDY}")
    if (
        problem := _find_removed_digests(history)
        or _find_removed_end(history, segments)
        or _find_damaged_end(history, segments)
    ):
        return Verdict(NAME, False, 1, 0, f"{problem}; {REMEDY}")
    if problem := _find_other_end(history, segments) or _find_changed_environment(history, environments):
        return Verdict(NAME, False, 1, 0, problem)
    n_lines, n_segments = segments.next_line - 1, len(segments.digests)
    return Verdict(NAME, True, 0, 0, f"the first {n_lines:,} lines match their {n_segments:,} digests")


def _describe_changes(segments: Segments) -> str:
    first, last = segments.changed[0]
    n_others = len(segments.changed) - 1
    others = f", and {n_others:,} later parts" if n_others else ""
    return (
        f"lines {first:,} to {last:,}, or their digest in line {last + 1:,}, were changed after they were written{others}"
    )


def _find_removed_digests(history: History) -> str | None:
    """Return a text on an attempt that trained, whose first event has a digest and that has no others; None without one."""
    has_digest, has_trained = (
        {*history.events_of_kind(kind).ints("attempt").tolist()} for kind in (segment_digests.KIND, "step")
    )
    for event in history.first_events:
        attempt = event["attempt"]
        if event.get("environment") is not None and attempt in has_trained - has_digest:
            return f"the digest events of attempt {attempt} were removed"
    return None


def _find_removed_end(history: History, segments: Segments) -> str | None:
    """Return a text on a digest that status.json has and the events do not; None without one."""
    recorded = history.status.get("events_digest")
    if recorded is None or recorded in segments.digests:
        return None
    attempt = history.status.get("attempt")
    return f"the last lines of attempt {attempt} were removed or changed: status.json has a digest that the events lack"


def _find_other_end(history: History, segments: Segments) -> str | None:
    """Return a text on a status without the digest of the end of the last attempt, which the events have; None if it has.

    The status of an ended attempt was written right after the digest. If several processes recorded the end, it may be
    that of any of them.
    """
    status, attempt = history.status, history.last_attempt
    endings = history.events.select(history.events.ints("attempt") == attempt).of_kind("end", "halt").lines()
    if status.get("status") not in ENDED_STATES or status.get("attempt") not in (None, attempt) or not len(endings):
        return None
    expected = [digest for digest, line in zip(segments.digests, segments.lines, strict=True) if line > endings[0]]
    if not expected or status.get("events_digest") in expected:
        return None
    found = "no digest" if status.get("events_digest") is None else "an earlier digest"
    return f"{directory.STATUS} has {found} of the events, expected that of the end of attempt {attempt}; restore it"


def _find_damaged_end(history: History, segments: Segments) -> str | None:
    """Return a text on a line after the last segment that no trainer can have written; None without one."""
    has_ended = bool(segments.digests) and history.status.get("events_digest") == segments.digests[-1]
    path, first_line = history.run_dir / directory.EVENTS, segments.next_line
    for number, line, is_complete in read_lines(path, segments.end):
        event = decode_line(line) if is_complete else b""
        if not isinstance(event, dict):
            if line and not _is_beginning_of_event(line):
                return f"line {first_line + number - 1:,} is damaged: it is not the beginning of an event"
        elif has_ended and event.get("attempt") == segments.attempt and event.get("kind") not in LATE_KINDS:
            return f"line {first_line + number - 1:,} was added after the end of attempt {segments.attempt}"
    return None


def _is_beginning_of_event(line: bytes) -> bool:
    """Return whether a killed trainer can have left this line. Events are written in ASCII without control characters."""
    is_text = line.isascii() and line.decode().isprintable()
    return is_text and (line.startswith(FIRST_KEY) or FIRST_KEY.startswith(line))


def _find_changed_environment(history: History, recorded: list[str]) -> str | None:
    path = history.run_dir / directory.ENVIRONMENT
    if not recorded or not path.is_file():  # a copy may lack it, which is another check
        return None
    if {*recorded} == {directory.compute_file_digest(path)}:
        return None
    return f"{directory.ENVIRONMENT} was changed after an attempt began; restore the file"
