"""`nsa-lab demo`: decoding time against context length on a CPU, NSA and dense attention, drawn while it is measured.

The models have the shape of the bundled model, or a small one if there is none, and random weights and caches, because the
time of a decode step depends on the shapes only. Lengths double until the next one would exceed the time. The remainder is
used to repeat the measurements; their median is shown.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from nsa_lab.bench.decode_speed import StepTime, plot_speeds, time_models
from nsa_lab.config import ModelConfig, RunConfig
from nsa_lab.config.optional_deps import MissingPackage, require
from nsa_lab.runs import directory, resolve

SHORTEST, LONGEST = 1024, 131_072
BAR_WIDTH = 40
NAMES = {"nsa": "NSA", "dense": "dense"}


class DecodeTimes:
    """Measured times of a decode step by length and kind of attention, in milliseconds."""

    def __init__(self) -> None:
        self._rows: dict[tuple[int, str], list[StepTime]] = {}

    def add(self, rows: list[StepTime]) -> None:
        for row in rows:
            self._rows.setdefault((row.tokens, row.by), []).append(row)

    @property
    def lengths(self) -> list[int]:
        return sorted({length for length, _ in self._rows})

    def get_ms(self, length: int, kind: str) -> float:
        """Return the median over the repetitions."""
        return statistics.median(row.ms or 0.0 for row in self._rows[length, kind])

    def list_rows(self) -> list[StepTime]:
        return [replace(rows[0], ms=self.get_ms(*key)) for key, rows in sorted(self._rows.items())]

    def render(self, console: Console) -> Table:
        """Return bars of the time per token."""
        table = Table("context", "", "time per token", box=None, pad_edge=False)
        longest_ms = max((self.get_ms(length, kind) for length in self.lengths for kind in NAMES), default=1.0)
        block = "#" if console.options.ascii_only else "█"
        for length in self.lengths:
            for kind, name in NAMES.items():
                ms = self.get_ms(length, kind)
                bar = Text(block * max(1, round(BAR_WIDTH * ms / longest_ms)), style="blue" if kind == "nsa" else "red")
                table.add_row(f"{length:,}" if kind == "nsa" else "", name, bar + Text(f" {ms:.1f} ms", style="default"))
        return table

    def summarize(self) -> list[str]:
        """Return the result in sentences."""
        length = self.lengths[-1]
        nsa, dense = (self.get_ms(length, kind) for kind in NAMES)
        winner, ratio = ("NSA", dense / nsa) if nsa < dense else ("dense attention", nsa / dense)
        lines = [
            f"At {length:,} tokens of context, a token takes {nsa:.1f} ms with NSA and {dense:.1f} ms with dense "
            f"attention; {winner} is {ratio:.1f} times as fast."
        ]
        faster = [n for n in self.lengths if self.get_ms(n, "nsa") < self.get_ms(n, "dense")]
        slower = [n for n in self.lengths if n not in faster]
        if slower:
            lines.append(f"Dense attention is at least as fast at {', '.join(f'{n:,}' for n in slower)} tokens.")
        return lines


def run_demo(
    seconds: float = 120.0,
    picture: Path | None = None,
    *,
    longest: int = LONGEST,
    config: ModelConfig | None = None,
    console: Console | None = None,
    measure: Callable[[ModelConfig, list[int]], list[StepTime]] = time_models,
) -> DecodeTimes:
    """Measure for about `seconds`, draw bars in the terminal, and save a plot to `picture` (None: no plot).

    Without a terminal, print a line per measurement. `measure`: times models of a configuration at some lengths.
    """
    console = console or Console()
    config = config or find_demo_config()
    console.print(f"Decode step of {config.n_layers} layers of width {config.dim} on the CPU, about {seconds:.0f} s:")
    times, start = DecodeTimes(), time.monotonic()
    show_live = Live(times.render(console), console=console, auto_refresh=False) if console.is_terminal else nullcontext()
    with show_live as live:
        durations: dict[int, float] = {}
        lengths = [SHORTEST]
        while lengths:
            length, begun = lengths.pop(0), time.monotonic()
            times.add(measure(config, [length]))
            durations[length] = time.monotonic() - begun
            remainder = seconds - (time.monotonic() - start)
            if live:
                live.update(
                    Group(times.render(console), Text(f"{max(remainder, 0):.0f} s left", style="dim")), refresh=True
                )
            else:
                found = ", ".join(f"{name} {times.get_ms(length, kind):.1f} ms" for kind, name in NAMES.items())
                console.print(f"{length:,} tokens: {found}", highlight=False)
            if length == times.lengths[-1] and 2 * length <= longest and 2.5 * durations[length] <= remainder:
                lengths = [2 * length]
            elif not lengths and sum(durations.values()) <= remainder:
                lengths = list(times.lengths)  # again
        if live:
            live.update(times.render(console), refresh=True)
    for line in times.summarize():
        console.print(line, highlight=False, soft_wrap=True)
    if picture:
        console.print(_save_picture(times, picture), highlight=False, soft_wrap=True)
    return times


def find_demo_config() -> ModelConfig:
    """Return the shape of the bundled model, or a small one if the package has none."""
    file = next(iter(sorted(resolve.MODELS_DIR.glob(f"*/{directory.CONFIG}"))), None)
    return RunConfig.from_yaml(file).model if file else ModelConfig(n_layers=2)


def _save_picture(times: DecodeTimes, path: Path) -> str:
    try:
        require("matplotlib")
    except MissingPackage as error:
        return f"no picture: {error}"
    plot_speeds(times.list_rows(), path)
    return f"picture: {path}"
