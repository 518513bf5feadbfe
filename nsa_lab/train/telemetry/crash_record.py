"""What is said of a run whose trainer could not say it: by whoever saw it end."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from nsa_lab.runs import directory
from nsa_lab.runs.events import read_events
from nsa_lab.train.telemetry.event_log import EventLog

logger = logging.getLogger("nsa_lab.train")


def write_crash_record(folder: Path, *, where: str, kind: str, reason: str, exit_code: int) -> None:
    """Write an `error` and a `halt` event at the last step of the record, and the status HALTED, all with `reason`.

    The error says `cause`: what others recorded before it, as they fell, are its consequences.
    """
    record = read_events(folder)
    last = max(record, key=lambda event: (event["attempt"], event["step"]), default=None)
    log = EventLog(folder, folder.name, last["attempt"] if last else 1)
    if last:
        log.step, log.tokens = last["step"], last.get("tokens") or 0
    log.append("error", where=where, type=kind, message=reason, fatal=True, cause=True)
    log.append("halt", status=directory.HALTED, exit_code=exit_code, reason=reason)
    log.close()
    fields = {"attempt": log.attempt, "pid": os.getpid(), "step": log.step, "tokens": log.tokens}
    directory.write_status(folder, run=folder.name, status=directory.HALTED, exit_code=exit_code, reason=reason, **fields)
    logger.error("%s", reason)
