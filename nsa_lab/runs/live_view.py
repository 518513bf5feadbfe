"""Show a run in progress in a terminal: phase, progress, loss, gates and speed.

On a terminal the view is redrawn in place. Otherwise a compact line is printed at intervals.
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
from nsa_lab.runs.event_fields import is_finite
from nsa_lab.runs.events import Event, Tail
from nsa_lab.runs.history import select_latest
from nsa_lab.runs.summary import format_fill_progress
from nsa_lab.runs.text_output import make_one_line

REDRAW_S, LINE_INTERVAL_S = 1.0, 10.0
NUMBER_FIELDS = ("lr", "tokens_per_s", "grad_norm")
NOTED_KINDS = ("start", "resume", "guard", "stall", "error", "halt", "signal", "checkpoint", "end")


class RunView:
    """State of a run according to its events so far. Call `update` with new events.

    `build_panel`, `format_numbers`, `notes` and `format_line` show the state.
    """

    def __init__(self, run_dir: Path) -> None:
        self.run = run_dir.name
        self.config = RunConfig.from_yaml(run_dir / directory.CONFIG)
        self.step = 0
        self._latest: dict[str, float] = {}
        self._bpb: dict[int, float] = {}
        self._layers: dict[str, list[float]] = {}
        self._phase, self._phase_age_s, self._last_event_time = "starting", 0.0, 0.0
        self._fill_progress: str | None = None
        self._step_seconds: deque[float] = deque(maxlen=10)
        self._notes: deque[str] = deque(maxlen=5)

    def update(self, events: list[Event]) -> None:
        for event in events:
            self._update_from(event)

    def _update_from(self, event: Event) -> None:
        kind = event["kind"]
        if kind in ("start", "resume", "step", "eval"):
            self.step = event["step"]
        if kind in ("start", "resume"):
            # Steps after the checkpoint are repeated.
            self._bpb = {step: bpb for step, bpb in self._bpb.items() if step <= self.step}
        if kind == "step":
            self._latest |= {name: event[name] for name in NUMBER_FIELDS if event.get(name) is not None}
            self._bpb[self.step] = math.nan if event.get("bpb") is None else event["bpb"]
            lists = {name: value for name, value in event.items() if isinstance(value, list) and value}
            self._layers |= {name: value for name, value in lists.items() if all(map(is_finite, value))}
            self._step_seconds += [event["dt_s"]] if event.get("dt_s") is not None else []
            self._phase, self._phase_age_s, self._last_event_time = "step", 0.0, event["t"]
        elif kind == "eval" and event.get("bpb") is not None:
            self._latest["validation"] = event["bpb"]
        elif kind == "fill":
            self._phase, self._fill_progress, self._last_event_time = "prepare", format_fill_progress(event), event["t"]
        elif kind == "heartbeat":
            self._phase, self._phase_age_s = event.get("phase") or "unknown", event.get("phase_age_s") or 0.0
            self._last_event_time = event["t"]
        elif kind in ("start", "resume", "end"):
            self._phase, self._phase_age_s, self._last_event_time = (
                "ended" if kind == "end" else "starting",
                0.0,
                event["t"],
            )
        if self._phase != "prepare":
            self._fill_progress = None
        if kind in NOTED_KINDS:
            self._notes.append(format_note(event))

    @property
    def notes(self) -> list[str]:
        """The latest events other than readings, one line each, oldest first."""
        return list(self._notes)

    @property
    def _activity(self) -> str:
        return self._fill_progress or self._phase

    @property
    def eta_s(self) -> float | None:
        """Remaining step time in seconds at the speed of the last readings, without evaluation and saving."""
        return (self.config.train.steps - self.step) * statistics.fmean(self._step_seconds) if self._step_seconds else None

    def format_line(self) -> str:
        """Return the state in one line, for a log."""
        parts = [f"step {self.step:,}/{self.config.train.steps:,}"]
        losses = {"bpb": self.training_bpb, "validation": self._latest.get("validation")}
        parts += [f"{name} {value:,.3f}" for name, value in losses.items() if value is not None]
        if self.step < self.config.train.steps:
            parts += [f"{self._latest['tokens_per_s']:,.0f} tokens/s"] if "tokens_per_s" in self._latest else []
            parts.append(f"{format_clock(self.eta_s)} left" if self.eta_s else self._activity)
        return "  ".join(parts)

    @property
    def training_bpb(self) -> float | None:
        """Training bits per byte, a mean over the same readings as `history.get_latest_training_losses`."""
        known, stage_at = list(self._bpb.items()), self.config.train.stage_at
        current_length = [bpb for step, bpb in known if stage_at(step).seq_len == stage_at(self.step).seq_len]
        readings = select_latest(np.array(current_length))
        return float(readings.mean()) if len(readings) else None

    def build_panel(self) -> Panel:
        count = TextColumn("{task.completed:,.0f} of {task.total:,.0f}")
        bar = Progress(TextColumn("{task.description}"), BarColumn(None), count, expand=True)
        bar.add_task("steps", total=self.config.train.steps, completed=self.step)
        notes = Text("\n".join(self.notes), style="dim", overflow="ellipsis", no_wrap=True)
        return Panel(
            Group(bar, self._build_table(), notes),
            title=Text(make_one_line(self.run)),
            border_style="dim",
            subtitle="Ctrl-C closes this view; training continues",
        )

    def format_numbers(self) -> dict[str, str]:
        """Return the current numbers of the run as text, by name. A dash if the run has not recorded one."""
        age = self._phase_age_s + max(time.time() - self._last_event_time, 0.0) if self._last_event_time else 0.0
        shares = {name: self._mean_over_layers(f"gate_share_{branch}") for branch, name in BRANCHES.items()}
        return {
            "bits per byte, training": "–" if (training := self.training_bpb) is None else f"{training:,.3f}",
            "bits per byte, validation": self._format_number("validation", "{:,.3f}"),
            "learning rate": self._format_number("lr", "{:.3g}"),
            "gradient norm": self._format_number("grad_norm", "{:.3g}"),
            "tokens per second, now": self._format_number("tokens_per_s", "{:,.0f}"),
            "time left": format_clock(self.eta_s),
            "phase": f"{self._activity}, {age:.0f} s",
            "gates": ", ".join(f"{name} {share:.0%}" for name, share in shares.items() if share is not None) or "–",
            "blocks reused": "–" if (reuse := self._mean_over_layers("sel_reuse")) is None else f"{reuse:.0%}",
        }

    def _build_table(self) -> Group:
        table = Table.grid(padding=(0, 2), expand=True)
        items = [(name, Text.assemble((f"{name}  ", "dim"), value)) for name, value in self.format_numbers().items()]
        cells = [cell for name, cell in items if name != "gates"]
        for first in range(0, len(cells), 3):
            table.add_row(*cells[first : first + 3])
        # The three gate shares with their names are too long for a table cell at a width of 100 columns.
        return Group(table, dict(items)["gates"])

    def _format_number(self, name: str, form: str) -> str:
        return form.format(self._latest[name]) if name in self._latest else "–"

    def _mean_over_layers(self, name: str) -> float | None:
        return statistics.fmean(self._layers[name]) if name in self._layers else None


def watch(run_dir: Path, is_finished: Callable[[], bool], console: Console) -> RunView:
    """Show the run until `is_finished` returns True, then show all events written by then."""
    view = RunView(run_dir)
    tail = Tail(run_dir, view.config.train.steps)
    if not console.is_terminal:
        return _print_lines(view, tail, is_finished, console)
    with Live(view.build_panel(), console=console, refresh_per_second=4, transient=False) as live:
        while True:
            is_last = is_finished()
            view.update(tail.read())
            live.update(view.build_panel())
            if is_last:
                return view
            time.sleep(REDRAW_S)


def _print_lines(view: RunView, tail: Tail, is_finished: Callable[[], bool], console: Console) -> RunView:
    printed_at, line = 0.0, ""
    while True:
        is_last = is_finished()
        view.update(tail.read())
        if view.format_line() != line and (is_last or time.monotonic() - printed_at > LINE_INTERVAL_S):
            line = view.format_line()
            console.print(line, highlight=False, soft_wrap=True)
            printed_at = time.monotonic()
        if is_last:
            return view
        time.sleep(REDRAW_S / 5)


def format_note(event: Event) -> str:
    """Return one line about an event that is not a reading."""
    kind, prefix = event["kind"], f"{format_time(event['t'])}  step {event['step']:,}"
    format_text = {
        "guard": lambda: f"{event.get('rule')}: {event.get('text', event.get('action'))}",
        "stall": lambda: f"stall in {event.get('phase')} after {event.get('phase_age_s')} s",
        "error": lambda: f"{event.get('type')}: {event.get('message')}",
        "checkpoint": lambda: f"saved {event.get('path')} in {event.get('seconds')} s",
        "signal": lambda: f"{event.get('signal')} while in {event.get('phase')}: {event.get('action')}",
    }.get(kind, lambda: " ".join(filter(None, (kind, event.get("reason")))))
    return f"{prefix}  {' '.join(format_text().split())}"


def format_time(seconds: float) -> str:
    """Return the local time of day; a dash for a time that the clock cannot have."""
    try:
        return time.strftime("%H:%M:%S", time.localtime(seconds))
    except (ValueError, OverflowError, OSError):
        return "–"


def format_clock(seconds: float | None) -> str:
    """Return `2:03:04` or `3:04`; a dash for None."""
    if seconds is None:
        return "–"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
