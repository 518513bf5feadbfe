"""A run as it goes, in a terminal: what it is doing, how far it is, how the loss, the gates and the pace are.

On a terminal the view is redrawn in place; anywhere else a compact line is printed now and then.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import numpy as np
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from nsa_lab.config import BRANCHES, RunConfig
from nsa_lab.runs import directory
from nsa_lab.runs.events import Event, Tail
from nsa_lab.runs.history import latest
from nsa_lab.runs.summary import filling_text

REDRAW_S, LINE_EVERY_S = 1.0, 10.0
NUMBERS = ("lr", "tokens_per_s", "grad_norm")
NOTED = ("start", "resume", "guard", "stall", "error", "halt", "signal", "checkpoint", "end")


class RunView:
    """What is known of a run from its events so far. `take` feeds it, `panel`, `numbers`, `notes` and `line` show it."""

    def __init__(self, run_dir: Path) -> None:
        self.run = run_dir.name
        self.config = RunConfig.from_yaml(run_dir / directory.CONFIG)
        self.step = 0
        self._latest: dict[str, float] = {}
        self._bpb: dict[int, float] = {}
        self._layers: dict[str, list[float]] = {}
        self._phase, self._phase_age_s, self._heard = "starting", 0.0, 0.0
        self._filling: str | None = None
        self._seconds: deque[float] = deque(maxlen=10)
        self._notes: deque[str] = deque(maxlen=5)

    def take(self, events: list[Event]) -> None:
        for event in events:
            self._take(event)

    def _take(self, event: Event) -> None:
        kind = event["kind"]
        if kind in ("start", "resume", "step", "eval"):
            self.step = event["step"]
        if kind in ("start", "resume"):
            # What lies behind the checkpoint is done again.
            self._bpb = {step: bpb for step, bpb in self._bpb.items() if step <= self.step}
        if kind == "step":
            self._latest |= {name: event[name] for name in NUMBERS if event.get(name) is not None}
            self._bpb[self.step] = math.nan if event.get("bpb") is None else event["bpb"]
            self._layers |= {name: value for name, value in event.items() if isinstance(value, list) and value}
            self._seconds += [event["dt_s"]] if event.get("dt_s") is not None else []
            self._phase, self._phase_age_s, self._heard = "step", 0.0, event["t"]
        elif kind == "eval" and event.get("bpb") is not None:
            self._latest["validation"] = event["bpb"]
        elif kind == "fill":
            self._phase, self._filling, self._heard = "prepare", filling_text(event), event["t"]
        elif kind == "heartbeat":
            self._phase, self._phase_age_s = event.get("phase") or "unknown", event.get("phase_age_s") or 0.0
            self._heard = event["t"]
        elif kind in ("start", "resume", "end"):
            self._phase, self._phase_age_s, self._heard = "ended" if kind == "end" else "starting", 0.0, event["t"]
        if self._phase != "prepare":
            self._filling = None
        if kind in NOTED:
            self._notes.append(note(event))

    @property
    def notes(self) -> list[str]:
        """The latest events that are not numbers, one line each, oldest first."""
        return list(self._notes)

    @property
    def _doing(self) -> str:
        return self._filling or self._phase

    @property
    def eta_s(self) -> float | None:
        """Seconds left at the pace of the last readings; evaluation and saves come on top."""
        return (self.config.train.steps - self.step) * statistics.fmean(self._seconds) if self._seconds else None

    def line(self) -> str:
        """One line for a log."""
        parts = [f"step {self.step:,}/{self.config.train.steps:,}"]
        losses = {"bpb": self.training_bpb, "validation": self._latest.get("validation")}
        parts += [f"{name} {value:,.3f}" for name, value in losses.items() if value is not None]
        if self.step < self.config.train.steps:
            parts += [f"{self._latest['tokens_per_s']:,.0f} tokens/s"] if "tokens_per_s" in self._latest else []
            parts.append(f"{clock(self.eta_s)} left" if self.eta_s else self._doing)
        return "  ".join(parts)

    @property
    def training_bpb(self) -> float | None:
        """Bits per byte of training as `history.training_now` has them: a mean of readings, since one is noise."""
        known, stage_at = list(self._bpb.items()), self.config.train.stage_at
        same = [bpb for step, bpb in known if stage_at(step).seq_len == stage_at(self.step).seq_len]
        readings = latest(np.array(same))
        return float(readings.mean()) if len(readings) else None

    def panel(self) -> Panel:
        done = TextColumn("{task.completed:,.0f} of {task.total:,.0f}")
        bar = Progress(TextColumn("{task.description}"), BarColumn(None), done, expand=True)
        bar.add_task("steps", total=self.config.train.steps, completed=self.step)
        notes = Text("\n".join(self.notes), style="dim", overflow="ellipsis", no_wrap=True)
        return Panel(
            Group(bar, self._table(), notes),
            title=self.run,
            border_style="dim",
            subtitle="Ctrl-C leaves the view; the trainer goes on",
        )

    def numbers(self) -> dict[str, str]:
        """What a person asks of a run under way, by name, as text; a dash where the run has not said."""
        age = self._phase_age_s + max(time.time() - self._heard, 0.0) if self._heard else 0.0
        shares = {words: self._mean(f"gate_share_{branch}") for branch, words in BRANCHES.items()}
        return {
            "bits per byte, training": "–" if (training := self.training_bpb) is None else f"{training:,.3f}",
            "bits per byte, validation": self._number("validation", "{:,.3f}"),
            "learning rate": self._number("lr", "{:.3g}"),
            "gradient norm": self._number("grad_norm", "{:.3g}"),
            "tokens per second, now": self._number("tokens_per_s", "{:,.0f}"),
            "time left": clock(self.eta_s),
            "phase": f"{self._doing}, {age:.0f} s",
            "gates": ", ".join(f"{words} {share:.0%}" for words, share in shares.items() if share is not None) or "–",
            "blocks reused": "–" if (reuse := self._mean("sel_reuse")) is None else f"{reuse:.0%}",
        }

    def _table(self) -> Group:
        table = Table.grid(padding=(0, 2), expand=True)
        items = [(name, Text.assemble((f"{name}  ", "dim"), value)) for name, value in self.numbers().items()]
        short = [shown for name, shown in items if name != "gates"]
        for first in range(0, len(short), 3):
            table.add_row(*short[first : first + 3])
        # Three shares with their names are as long as two numbers: in the table they would wrap at 100 columns.
        return Group(table, dict(items)["gates"])

    def _number(self, name: str, form: str) -> str:
        return form.format(self._latest[name]) if name in self._latest else "–"

    def _mean(self, name: str) -> float | None:
        return statistics.fmean(self._layers[name]) if name in self._layers else None


def watch(run_dir: Path, until: Callable[[], bool], console: Console) -> RunView:
    """Show the run until `until` says so, then everything that is written by then."""
    view, tail = RunView(run_dir), Tail(run_dir)
    if not console.is_terminal:
        return _watch_lines(view, tail, until, console)
    with Live(view.panel(), console=console, refresh_per_second=4, transient=False) as live:
        while True:
            last = until()
            view.take(tail.read())
            live.update(view.panel())
            if last:
                return view
            time.sleep(REDRAW_S)


def _watch_lines(view: RunView, tail: Tail, until: Callable[[], bool], console: Console) -> RunView:
    said, line = 0.0, ""
    while True:
        last = until()
        view.take(tail.read())
        if view.line() != line and (last or time.monotonic() - said > LINE_EVERY_S):
            line = view.line()
            console.print(line, highlight=False, soft_wrap=True)
            said = time.monotonic()
        if last:
            return view
        time.sleep(REDRAW_S / 5)


def note(event: Event) -> str:
    """One line about an event that is not a number."""
    kind, at = event["kind"], f"{time.strftime('%H:%M:%S', time.localtime(event['t']))}  step {event['step']:,}"
    said = {
        "guard": lambda: f"{event.get('rule')}: {event.get('text', event.get('action'))}",
        "stall": lambda: f"stall in {event.get('phase')} after {event.get('phase_age_s')} s",
        "error": lambda: f"{event.get('type')}: {event.get('message')}",
        "checkpoint": lambda: f"saved {event.get('path')} in {event.get('seconds')} s",
        "signal": lambda: f"{event.get('signal')} while in {event.get('phase')}: {event.get('action')}",
    }.get(kind, lambda: " ".join(filter(None, (kind, event.get("reason")))))
    return f"{at}  {' '.join(said().split())}"


def clock(seconds: float | None) -> str:
    """`2:03:04`, `3:04`, or a dash where it is not known."""
    if seconds is None:
        return "–"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
