"""A mirror of the numbers of a run in TensorBoard. The record is events.jsonl; this can be rebuilt and may be missing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nsa_lab.extras import require

NOT_MIRRORED = frozenset({"v", "t", "attempt", "step", "tokens"})


class TensorBoardMirror:
    """Writes every number of `step` and `eval` events as a scalar; a list becomes one scalar per layer.

    `why_off` says why nothing is written, or is None.
    """

    def __init__(self, folder: Path, from_step: int) -> None:
        self.why_off: str | None = None
        try:
            require("tensorboard")
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            self.why_off = str(error)
            return
        # Events of steps that this attempt does again are hidden, as in the record.
        self._writer = SummaryWriter(str(folder), purge_step=from_step + 1 if from_step else None, flush_secs=30)

    def write(self, group: str, step: int, fields: dict[str, Any]) -> None:
        if self.why_off:
            return
        for name, value in fields.items():
            if name in NOT_MIRRORED:
                continue
            for suffix, number in _numbers(value):
                self._writer.add_scalar(f"{group}/{name}{suffix}", number, step)

    def close(self) -> None:
        if not self.why_off:
            self._writer.close()


def _numbers(value: Any) -> list[tuple[str, float]]:
    if isinstance(value, bool) or value is None:
        return []
    if isinstance(value, (int, float)):
        return [("", float(value))]
    if isinstance(value, list):
        return [(f"/layer_{i:02d}", float(v)) for i, v in enumerate(value) if isinstance(v, (int, float))]
    return []
