"""Digests in events.jsonl, by which a reader notices lines that were changed after the trainer wrote them.

The trainer writes a `digest` event after the first event of an attempt, after every checkpoint and at the end of an
attempt. It has the size and the SHA-256 of a segment of the file: the bytes from the end of the previous segment, or the
beginning of the file, to the end of a line before this event. The lines of digest events are in the segments that follow.

* Segments leave no gaps, and each has at least a line: the digest event of the one before it. A line that another rank
  writes between the end of a segment and its digest event belongs to the next segment, and so does a digest event that was
  not written completely.
* Incomplete lines that a killed attempt left are in the first segment of the next attempt.
* The last digest event, and lines after it, are in no segment. status.json has the SHA-256 of the line of the event with
  which the last attempt ended.

These digests are inside of the record. `record_digest` has digests of whole files, by which a verdict is out of
date.
"""

from __future__ import annotations

import hashlib
import os
from array import array
from bisect import bisect_left
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from nsa_lab.runs.atomic_io import open_regular, parse_json
from nsa_lab.runs.event_fields import is_int
from nsa_lab.runs.events import read_lines

KIND = "digest"
BLOCK_BYTES = 1 << 20


@dataclass
class Segments:
    """The segments of a file, compared with their digest events.

    `changed`: (first, last) line of each segment that does not match, from 1. `digests`: SHA-256 of the line of each
    digest event, in their order, and `lines` the numbers of these lines. `end`: byte at which the last segment ends, and
    `next_line` the line that begins there. `attempt`: of the last digest event; 0 without one.
    """

    changed: list[tuple[int, int]] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)
    end: int = 0
    next_line: int = 1
    attempt: int = 0


def hash_complete_lines(file: int, start: int) -> tuple[int, str]:
    """Return the size and the SHA-256 of the lines of a file, given as its descriptor, from a byte to the last line end."""
    digest, size, rest = hashlib.sha256(), 0, b""
    while block := os.pread(file, BLOCK_BYTES, start + size + len(rest)):
        lines, line_end, rest = (rest + block).rpartition(b"\n")
        digest.update(lines + line_end)
        size += len(lines) + len(line_end)
    return size, digest.hexdigest()


def read_segments(path: Path) -> Segments:
    """Compare all segments of a file with their digest events. Each byte is hashed at most once.

    After a segment that does not match, the next one is expected to begin with the digest event, so that an edit
    changes one segment only. Raises OSError as `nsa_lab.runs.events.read_events`.
    """
    segments, starts, offset = Segments(), array("q"), 0
    with open_regular(path) as file:
        for _, line, is_complete in read_lines(path):
            starts.append(offset)
            if is_complete and (event := _parse_digest(line)):
                size = event["bytes"]
                is_inside = 0 < size <= offset - segments.end
                is_equal = is_inside and _hash_bytes(file, segments.end, size) == event["sha256"]
                if not is_equal:
                    segments.changed.append((segments.next_line, max(len(starts) - 1, segments.next_line)))
                segments.end = segments.end + size if is_equal else offset
                segments.next_line = bisect_left(starts, segments.end) + 1
                segments.digests.append(hashlib.sha256(line).hexdigest())
                segments.lines.append(len(starts))
                segments.attempt = event["attempt"] if is_int(event.get("attempt")) else segments.attempt
            offset += len(line) + 1
    return segments


def _hash_bytes(file: BinaryIO, start: int, size: int) -> str:
    digest = hashlib.sha256()
    file.seek(start)
    while size and (block := file.read(min(size, BLOCK_BYTES))):
        digest.update(block)
        size -= len(block)
    return digest.hexdigest()


def _parse_digest(line: bytes) -> dict[str, Any] | None:
    """Return the digest event in a line; None if it has no valid one."""
    if b'"digest"' not in line:
        return None
    try:
        event = parse_json(line)
    except (ValueError, RecursionError):
        return None
    is_digest = isinstance(event, dict) and event.get("kind") == KIND
    return event if is_digest and is_int(event.get("bytes")) and isinstance(event.get("sha256"), str) else None
