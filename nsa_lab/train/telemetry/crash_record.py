"""Record the end of a trainer that could not record it itself."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from nsa_lab.runs import directory
from nsa_lab.runs.events import read_events
from nsa_lab.train.telemetry.event_log import EventLog

logger = logging.getLogger("nsa_lab.train")


def write_crash_record(folder: Path, *, where: str, kind: str, reason: str, exit_code: int) -> None:
    """Append an `error` and a `halt` event at the last recorded step and set the status HALTED, all with `reason`.

    The error has `cause` set: errors that other ranks recorded before it are its consequences.
    """
    events = read_events(folder)
    last_event = max(events, key=lambda event: (event["attempt"], event["step"]), default=None)
    log = EventLog(folder, folder.name, last_event["attempt"] if last_event else 1)
    if last_event:
        log.step, log.tokens = last_event["step"], last_event.get("tokens") or 0
    log.append("error", where=where, type=kind, message=reason, fatal=True, cause=True)
    log.append("halt", status=directory.HALTED, exit_code=exit_code, reason=reason)
    log.close()
    fields = {"attempt": log.attempt, "pid": os.getpid(), "step": log.step, "tokens": log.tokens}
    directory.write_status(folder, run=folder.name, status=directory.HALTED, exit_code=exit_code, reason=reason, **fields)
    logger.error("%s", reason)
