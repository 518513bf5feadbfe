"""Following a run in a notebook: one display handle, updated every few seconds, and a static picture at the end.

The trainer is another process; this only reads its event file. Headless, the same handle carries a compact line, so that an
executed notebook stays small and needs no widget.
"""

from __future__ import annotations

import time
from pathlib import Path

from IPython.display import display

from nsa_lab import launch
from nsa_lab.events import Tail
from nsa_lab.explore.notebook import Stop, log_tail
from nsa_lab.explore.plots import overview
from nsa_lab.explore.show import has_front_end, image, title
from nsa_lab.history import History
from nsa_lab.live import RunView

EVERY_S, PICTURE_EVERY_S = 3.0, 10.0
POLL_S = 0.25


class _Text(str):
    """Shown as it is, without quotes."""

    def __repr__(self) -> str:
        return str(self)


def follow(run: Path, *, every_s: float = EVERY_S, pictures: bool | None = None) -> str:
    """Follow the run until no trainer works on it; the state it is left in.

    `pictures`: redraw the curves while the run goes (None: only where a Jupyter front end is open). Interrupting the cell
    ends the following, never the run.
    """
    drawing = has_front_end() if pictures is None else pictures
    view, tail = RunView(run), Tail(run)
    line = display(_Text("waiting for the trainer"), display_id=True)
    curves = display(_Text(""), display_id=True) if drawing else None
    said = drawn = 0.0
    try:
        while launch.is_alive(run):
            view.take(tail.read())
            now = time.monotonic()
            if now - said >= every_s:
                line.update(_Text(view.line()))
                said = now
            if curves and now - drawn >= PICTURE_EVERY_S:
                _draw(curves, run)
                drawn = time.monotonic()
            time.sleep(POLL_S)
    except KeyboardInterrupt:
        raise Stop("following was interrupted and the trainer goes on; run this cell again to follow it, "
                   f"or stop it with: nsa-lab stop {run.name}") from None
    view.take(tail.read())
    state = launch.state(run)
    line.update(_Text(f"{state}: {view.line()}"))
    if curves:
        _draw(curves, run)
    if state == "DEAD":
        print(f"the trainer left no word; the end of its log:\n{log_tail(run)}")
    return state


def _draw(handle: object, run: Path) -> None:
    history = History.read(run)
    if history.steps:
        figure = overview(history)
        handle.update(image(figure, title(figure)))
