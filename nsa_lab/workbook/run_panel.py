"""The live view of a run in a notebook: its numbers, its curves, and buttons that stop and resume it.

Each button works in a separate thread, since a trainer may take minutes to save and exit. Everything is in one widget
whose state the kernel holds, so a reloaded page shows it unchanged.
"""

from __future__ import annotations

import html
import threading
from collections.abc import Callable
from pathlib import Path

import ipywidgets as widgets

from nsa_lab.runs import lifecycle
from nsa_lab.runs.directory import RunDirectoryError
from nsa_lab.runs.live_view import RunView

STOP_TIMEOUT_S = 600.0
PROGRESS_STYLE = {"bar_color": "#0072B2"}


class RunPanel:
    """Numbers, curves and buttons of one run. `view` is the widget to display; the follower updates it."""

    def __init__(self, run: Path, steps: int) -> None:
        self.is_left_stopped = False  # True if the user continues the notebook while the run is stopped
        self._run = run
        self._worker: threading.Thread | None = None
        self._message = ""
        self._bar = widgets.IntProgress(
            min=0, max=steps, description="step", style=PROGRESS_STYLE, layout=widgets.Layout(width="60%")
        )
        self._state = widgets.HTML()
        self._numbers, self._notes = widgets.HTML(), widgets.HTML()
        self._curves = widgets.Image(format="png", layout=widgets.Layout(max_width="100%", visibility="hidden"))
        self._stop = self._make_button(
            "Stop", "stop", "save a checkpoint and exit", lambda: lifecycle.stop(run, STOP_TIMEOUT_S)
        )
        self._resume = self._make_button(
            "Resume", "play", "continue from the newest checkpoint", lambda: lifecycle.resume(run)
        )
        self._leave = widgets.Button(
            description="Leave it stopped",
            icon="step-forward",
            disabled=True,
            tooltip="continue with the next cell of the notebook",
        )
        self._leave.on_click(self._on_leave)
        self.view = widgets.VBox(
            [
                widgets.HBox([self._bar, self._state]),
                widgets.HBox([self._stop, self._resume, self._leave]),
                self._numbers,
                self._curves,
                self._notes,
            ]
        )

    @property
    def is_busy(self) -> bool:
        """Return whether a button's action is still running."""
        return self._worker is not None and self._worker.is_alive()

    def update(self, view: RunView, state: str) -> None:
        """Update the numbers, the events and the buttons."""
        self._bar.value = view.step
        self._state.value = f"<b>{view.step:,}</b> of {view.config.train.steps:,}: {html.escape(self._message or state)}"
        cells = [
            f"<td style='padding:0 1.5em 0 0'><span style='opacity:.65'>{html.escape(name)}</span> "
            f"<b>{html.escape(value)}</b></td>"
            for name, value in view.format_numbers().items()
        ]
        rows = ["".join(cells[first : first + 3]) for first in range(0, len(cells), 3)]
        self._numbers.value = f"<table>{''.join(f'<tr>{row}</tr>' for row in rows)}</table>"
        self._notes.value = f"<pre style='font-size:85%; line-height:1.3'>{html.escape(chr(10).join(view.notes))}</pre>"
        is_alive = lifecycle.is_alive(self._run)
        self._stop.disabled = not is_alive or self.is_busy
        self._resume.disabled = is_alive or self.is_busy or state == "DONE"
        self._leave.disabled = self._resume.disabled

    def set_curves(self, png: bytes) -> None:
        """Show new curves."""
        self._curves.value = png
        self._curves.layout.visibility = "visible"

    def disable_buttons(self) -> None:
        """Disable all buttons. The rest stays as it is."""
        for button in (self._stop, self._resume, self._leave):
            button.disabled = True

    def _make_button(self, label: str, icon: str, tooltip: str, action: Callable[[], object]) -> widgets.Button:
        button = widgets.Button(description=label, icon=icon, tooltip=tooltip, disabled=True)

        def work() -> None:
            try:
                action()
                self._message = ""
            except (RunDirectoryError, TimeoutError, OSError) as error:
                self._message = str(error)

        def press(_button: widgets.Button) -> None:
            if not self.is_busy:
                self._message = f"{label.lower()} requested"
                self._stop.disabled = self._resume.disabled = self._leave.disabled = True
                self._worker = threading.Thread(target=work, name=f"{label} {self._run.name}", daemon=True)
                self._worker.start()

        button.on_click(press)
        return button

    def _on_leave(self, _button: widgets.Button) -> None:
        self.is_left_stopped = True
