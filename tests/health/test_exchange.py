"""In a long record, two branches may cross by chance; an exchange of more distant ones is found however long it is."""

from __future__ import annotations

import math
from pathlib import Path

import fake_run
import pytest

from nsa_lab.health import LIMITS
from nsa_lab.health.identity_checks import USUAL_READINGS, find_exchange
from nsa_lab.runs.history import History

MOVEMENT = 0.05  # of every statistic from reading to reading, in its logarithm


def write_exchange(folder: Path, n_readings: int, distance: float, is_exchanged: bool = True) -> History:
    """Write a run in which two branches, `distance` movements apart, take each other's place in the middle."""

    def edit(events: list[fake_run.Event]) -> None:
        for event in (event for event in events if event["kind"] == "step"):
            place = event["step"] % 2 * MOVEMENT
            branches = ("cmp", "sel") if is_exchanged and event["step"] > n_readings // 2 else ("sel", "cmp")
            for number, branch in enumerate(branches):
                value = math.exp(place + number * distance * MOVEMENT)
                event[f"norm_{branch}"] = [value] * fake_run.LAYERS
            event["norm_win"] = [1e3 * math.exp(place)] * fake_run.LAYERS

    intervals = {"train__log_every": 1, "train__stats_every": 1}
    config = fake_run.make_config(train__steps=n_readings, train__warmup_steps=2, train__save_every=0, **intervals)
    return History.read(fake_run.write_run(folder, config, spoil=edit))


@pytest.mark.parametrize(
    ("n_readings", "distance", "is_found"),
    [(USUAL_READINGS, 2.7, True), (5 * USUAL_READINGS, 2.7, False), (5 * USUAL_READINGS, 3.2, True)],
)
def test_branches_that_exchange_in_a_long_run(tmp_path: Path, n_readings: int, distance: float, is_found: bool) -> None:
    history = write_exchange(tmp_path, n_readings, distance)
    found = find_exchange(history, fake_run.LAYERS, LIMITS)
    expected = f"the branches exchange norm at step {n_readings // 2 + 1:,}"
    assert found == (expected if is_found else None)
    healthy = write_exchange(tmp_path / "healthy", n_readings, distance, is_exchanged=False)
    assert find_exchange(healthy, fake_run.LAYERS, LIMITS) is None
