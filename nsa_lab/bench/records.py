"""What a benchmark's record says of itself: when, on what, and of which code; and whether that code is still this one.

A speed is one of its sources. A record made while sources were not committed is marked `dirty`: nobody can look up what it
measured.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from nsa_lab.config import ConfigError
from nsa_lab.runs.environment import compute_source_digest, get_code_identity, get_versions

PACKAGE = Path(__file__).resolve().parents[1]
# What a speed depends on, each with a digest of its own, so that a changed report does not age a kernel.
PARTS = ("attention", "model", "inference", "data", "train", "bench")
# What is timed by each kind of benchmark.
OPERATOR, DECODING, TRAINING = (
    ("attention", "bench"),
    ("attention", "model", "inference", "bench"),
    ("attention", "model", "data", "train", "bench"),
)
STANDS = "as it stands"


def origin(device: str, of: Sequence[str] = PARTS) -> dict[str, Any]:
    """`when`, `device`, `versions` and `code` of a record made now; `code` has a digest of each part that it is `of`."""
    return {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": device,
        "versions": get_versions(),
        "code": get_code_identity() | {"sources": sources(of)},
    }


def sources(parts: Iterable[str] = PARTS) -> dict[str, str]:
    """Sixteen hex digits over the Python files of each part of the package, as they are now."""
    return {part: compute_source_digest(PACKAGE / part) for part in parts}


def device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def write(path: Path, record: Mapping[str, Any], *, indent: int | None = 1) -> None:
    path.write_text(json.dumps(record, indent=indent) + "\n", encoding="utf-8")


def read(path: Path) -> dict[str, Any]:
    """A record. Raises `ConfigError` for a file that is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path}: expected a record that nsa-lab bench --json wrote; it cannot be read: {error}"
        ) from None
    if not isinstance(found, dict) or "when" not in found:
        raise ConfigError(f"{path}: expected a record that nsa-lab bench --json wrote; it does not say when it was made")
    return found


def code_text(record: Mapping[str, Any]) -> str:
    """`commit 0123456789, 2026-11-22`, with what keeps it from being looked up."""
    code = record.get("code") or {}
    dirty = ", with changes that were not committed" if code.get("dirty") else ""
    commit = f"commit {code['commit'][:10]}" if code.get("commit") else "its commit is not recorded"
    return f"{commit}{dirty}, {record['when'][:10]}"


def standing(record: Mapping[str, Any]) -> str:
    """Whether today's sources are those that a record is of: `STANDS`, or why that cannot be said."""
    then = (record.get("code") or {}).get("sources")
    if not then:
        return "not known to be of this code: it does not say what it is of"
    now = sources(then)
    changed = [f"nsa_lab/{part}" for part in then if then[part] != now[part]]
    return f"of other code: {', '.join(changed)} changed since" if changed else STANDS
