"""Follow a run in a notebook until its trainer has ended.

The trainer is another process; this module only reads its event file. If a front end is open, a `RunPanel` shows the run,
and a static figure replaces it at the end. In a headless run, one display handle shows a compact line and no widget is
created, so that the executed notebook stays small.

Following is a coroutine: the kernel handles widget events while a cell awaits, but not while a cell computes (ipykernel 7
sends the press of a button to the shell channel, which a running cell blocks).
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from IPython.display import DisplayHandle, Image, display

from nsa_lab.figures import plot_progress
from nsa_lab.figures.style import get_title
from nsa_lab.runs import directory, lifecycle
from nsa_lab.runs.events import Tail
from nsa_lab.runs.history import History
from nsa_lab.runs.live_view import RunView
from nsa_lab.workbook.display import has_front_end, make_image
from nsa_lab.workbook.notebook import Stop, read_log_tail
from nsa_lab.workbook.run_panel import RunPanel

UPDATE_INTERVAL_S, PLOT_INTERVAL_S = 2.0, 6.0
# Plotting takes at most this fraction of the time, even if the machine is busy or the run is long.
MAX_PLOTTING_FRACTION = 0.1
POLL_INTERVAL_S = 0.25


class _PlainText(str):
    """A string that is displayed without quotes."""

    def __repr__(self) -> str:
        return str(self)


async def follow_run(run: Path, *, use_widgets: bool | None = None) -> str:
    """Follow the run until its trainer has ended, and return the state of the run.

    In a cell: `await follow_run(run)`. `use_widgets`: True, False, or None for widgets only if a front end is open. With
    widgets, a stopped run is followed until it is resumed or the user leaves it stopped. Interrupting the cell ends the
    following, never the run.
    """
    view, tail = RunView(run), Tail(run)
    follow = _follow_in_panel if (has_front_end() if use_widgets is None else use_widgets) else _follow_in_line
    try:
        state = await follow(run, view, tail)
    except (KeyboardInterrupt, asyncio.CancelledError):
        raise Stop(_describe_interruption(run)) from None
    if state == "DEAD":
        print(f"the trainer ended without a message; the end of its log:\n{read_log_tail(run)}")
    return state


def _describe_interruption(run: Path) -> str:
    if not lifecycle.is_alive(run):
        return (
            f"following was interrupted; the run is {lifecycle.get_state(run)}; continue it with: nsa-lab resume {run.name}"
        )
    return (
        "following was interrupted and the trainer is still running; run this cell again to follow it, "
        f"or stop it with: nsa-lab stop {run.name}"
    )


async def _follow_in_line(run: Path, view: RunView, tail: Tail) -> str:
    line, last_update = _display_with_handle(_PlainText("waiting for the trainer")), 0.0
    while lifecycle.is_alive(run):
        view.update(tail.read())
        if time.monotonic() - last_update >= UPDATE_INTERVAL_S:
            line.update(_PlainText(view.format_line()))
            last_update = time.monotonic()
        await asyncio.sleep(POLL_INTERVAL_S)
    view.update(tail.read())
    state = lifecycle.get_state(run)
    line.update(_PlainText(f"{state}: {view.format_line()}"))
    return state


def _display_with_handle(content: object) -> DisplayHandle:
    handle = display(content, display_id=True)
    assert handle is not None, "display with an id returns a handle"
    return handle


async def _follow_in_panel(run: Path, view: RunView, tail: Tail) -> str:
    panel = RunPanel(run, view.config.train.steps)
    handle = _display_with_handle(panel.view)
    last_update, next_plot, plotted_step, image = 0.0, 0.0, -1, None
    try:
        while True:
            state = lifecycle.get_state(run)
            is_over = not panel.is_busy and (
                state in (directory.DONE, directory.HALTED, "DEAD")
                or (state == directory.PREEMPTED and panel.is_left_stopped)
            )
            view.update(tail.read())
            now = time.monotonic()
            if is_over or now - last_update >= UPDATE_INTERVAL_S:
                panel.update(view, state)
                last_update = now
            if is_over or (now >= next_plot and view.step != plotted_step):
                plotted_step = view.step
                image = _update_curves(panel, run)
                next_plot = time.monotonic() + max(PLOT_INTERVAL_S, (time.monotonic() - now) / MAX_PLOTTING_FRACTION)
            if is_over:
                break
            await asyncio.sleep(POLL_INTERVAL_S)
    finally:
        panel.disable_buttons()
    # The saved page has a static image instead of a widget without a kernel.
    handle.update(image or _PlainText("the run has recorded no step"))
    display(_PlainText(f"{state}: {view.format_line()}"))
    return state


def _update_curves(panel: RunPanel, run: Path) -> Image | None:
    """Plot new curves into the panel and return them as a static image. Return None if nothing was recorded."""
    history = History.read(run)
    if not history.steps:
        return None
    figure = plot_progress(history)
    static_image = make_image(figure, get_title(figure))
    assert isinstance(static_image.data, bytes), "make_image returns PNG data"
    panel.set_curves(static_image.data)
    return static_image
