"""Following a run in a notebook, until no trainer works on it any more.

The trainer is another process; this only reads its event file. Where a front end is open the run is shown in a `RunPanel`,
which a static picture replaces at the end; headless, one display handle carries a compact line and no widget is made, so
that an executed notebook stays small.

Following is a coroutine: a kernel answers widgets while a cell awaits, and not while a cell computes (ipykernel 7 hands the
press of a button to the shell that a computing cell holds).
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
# Drawing takes at most this share of the time, also where the machine is busy or the run is long.
MAX_PLOTTING_FRACTION = 0.1
POLL_INTERVAL_S = 0.25


class _PlainText(str):
    """Shown as it is, without quotes."""

    def __repr__(self) -> str:
        return str(self)


async def follow_run(run: Path, *, use_widgets: bool | None = None) -> str:
    """Follow the run until no trainer works on it; the state it is left in.

    In a cell: `await follow(run)`. `with_widgets`: yes, no, or (None) only where a front end is open. With them, a run that
    is stopped is waited for until it is resumed or left. Interrupting the cell ends the following, never the run.
    """
    view, tail = RunView(run), Tail(run)
    follow_it = _follow_in_panel if (has_front_end() if use_widgets is None else use_widgets) else _follow_in_line
    try:
        state = await follow_it(run, view, tail)
    except (KeyboardInterrupt, asyncio.CancelledError):
        raise Stop(_describe_interruption(run)) from None
    if state == "DEAD":
        print(f"the trainer left no word; the end of its log:\n{read_log_tail(run)}")
    return state


def _describe_interruption(run: Path) -> str:
    if not lifecycle.is_alive(run):
        return f"following was interrupted; the run is {lifecycle.get_state(run)}, and nsa-lab resume {run.name} goes on with it"
    return (
        "following was interrupted and the trainer goes on; run this cell again to follow it, "
        f"or stop it with: nsa-lab stop {run.name}"
    )


async def _follow_in_line(run: Path, view: RunView, tail: Tail) -> str:
    line, said = _display_with_handle(_PlainText("waiting for the trainer")), 0.0
    while lifecycle.is_alive(run):
        view.update(tail.read())
        if time.monotonic() - said >= UPDATE_INTERVAL_S:
            line.update(_PlainText(view.format_line()))
            said = time.monotonic()
        await asyncio.sleep(POLL_INTERVAL_S)
    view.update(tail.read())
    state = lifecycle.get_state(run)
    line.update(_PlainText(f"{state}: {view.format_line()}"))
    return state


def _display_with_handle(content: object) -> DisplayHandle:
    handle = display(content, display_id=True)
    assert handle is not None, "a cell that displays with an id gets a handle"
    return handle


async def _follow_in_panel(run: Path, view: RunView, tail: Tail) -> str:
    panel = RunPanel(run, view.config.train.steps)
    handle = _display_with_handle(panel.view)
    said, draw_at, drawn, picture = 0.0, 0.0, -1, None
    try:
        while True:
            state = lifecycle.get_state(run)
            over = not panel.is_busy and (
                state in (directory.DONE, directory.HALTED, "DEAD")
                or (state == directory.PREEMPTED and panel.is_left_stopped)
            )
            view.update(tail.read())
            now = time.monotonic()
            if over or now - said >= UPDATE_INTERVAL_S:
                panel.update(view, state)
                said = now
            if over or (now >= draw_at and view.step != drawn):
                drawn = view.step
                picture = _update_curves(panel, run)
                draw_at = time.monotonic() + max(PLOT_INTERVAL_S, (time.monotonic() - now) / MAX_PLOTTING_FRACTION)
            if over:
                break
            await asyncio.sleep(POLL_INTERVAL_S)
    finally:
        panel.disable_buttons()
    # The page that is saved keeps a picture, and no widget that nobody answers any more.
    handle.update(picture or _PlainText("the run recorded no step"))
    display(_PlainText(f"{state}: {view.format_line()}"))
    return state


def _update_curves(panel: RunPanel, run: Path) -> Image | None:
    """Put new curves into the panel; the same as a static picture, or None where nothing was recorded."""
    history = History.read(run)
    if not history.steps:
        return None
    figure = plot_progress(history)
    drawn = make_image(figure, get_title(figure))
    assert isinstance(drawn.data, bytes), "image() holds a PNG"
    panel.set_curves(drawn.data)
    return drawn
