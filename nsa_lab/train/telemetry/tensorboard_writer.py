"""A mirror of the numbers of a run in TensorBoard. The record is events.jsonl; this can be rebuilt and may be missing.

Whatever goes wrong in here turns the mirror off, and ends nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from nsa_lab.config.optional_deps import require

# Lists are of layers, and windows of a text are none.
EXCLUDED_FIELDS = frozenset({"v", "t", "attempt", "step", "tokens", "window_losses"})


class TensorBoardWriter:
    """Writes every number of `step` and `eval` events as a scalar; a list becomes one scalar per layer.

    `why_off` says why nothing is written, or is None; `on_off` is told of it once, where that is found out later.
    """

    def __init__(self, folder: Path, from_step: int, on_disabled: Callable[[Exception], None]) -> None:
        self.disabled_reason: str | None = None
        self._on_disabled = on_disabled
        try:
            require("tensorboard")
            from torch.utils.tensorboard import SummaryWriter

            # Events of steps that this attempt does again are hidden, as in the record.
            self._writer = SummaryWriter(str(folder), purge_step=from_step + 1 if from_step else None, flush_secs=30)
        except (ImportError, OSError) as error:
            self.disabled_reason = str(error)

    def write(self, group: str, step: int, fields: dict[str, Any]) -> None:
        scalars = [
            (f"{group}/{name}{suffix}", number, step)
            for name, value in fields.items()
            if name not in EXCLUDED_FIELDS
            for suffix, number in _flatten_numbers(value)
        ]
        self._write_or_disable(lambda: [self._writer.add_scalar(*scalar) for scalar in scalars])

    def close(self) -> None:
        self._write_or_disable(lambda: self._writer.close())

    def _write_or_disable(self, write: Callable[[], Any]) -> None:
        if self.disabled_reason:
            return
        try:
            write()
        except Exception as error:  # noqa: BLE001 - TensorBoard writes in a thread of its own and hands on what that met
            self.disabled_reason = str(error)
            self._on_disabled(error)


def _flatten_numbers(value: Any) -> list[tuple[str, float]]:
    if isinstance(value, bool) or value is None:
        return []
    if isinstance(value, (int, float)):
        return [("", float(value))]
    if isinstance(value, list):
        return [(f"/layer_{i:02d}", float(v)) for i, v in enumerate(value) if isinstance(v, (int, float))]
    return []
