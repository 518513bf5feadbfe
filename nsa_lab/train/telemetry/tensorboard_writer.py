"""Copy the numbers of a run to TensorBoard. The record is events.jsonl; the TensorBoard files may be missing.

Any error here disables the writer and has no other effect.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from nsa_lab.config.optional_deps import require

# A list has one value per layer, except window_losses.
EXCLUDED_FIELDS = frozenset({"v", "t", "attempt", "step", "tokens", "window_losses"})


class TensorBoardWriter:
    """Writes every number of `step` and `eval` events as a scalar; a list becomes one scalar per layer.

    `disabled_reason`: why nothing is written, or None. `on_disabled` is called once if an error disables the writer
    later.
    """

    def __init__(self, folder: Path, from_step: int, on_disabled: Callable[[Exception], None]) -> None:
        self.disabled_reason: str | None = None
        self._on_disabled = on_disabled
        try:
            require("tensorboard")
            from torch.utils.tensorboard import SummaryWriter

            # Hide the steps that this attempt repeats, as readers of events.jsonl do.
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
        except Exception as error:  # noqa: BLE001 - TensorBoard raises any error of its writer thread here
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
