"""Identity of layers and branches: no two have the same statistics, and none takes the place of another."""

from __future__ import annotations

import itertools
import math

import numpy as np

from nsa_lab.config import BRANCHES
from nsa_lab.health.branch_checks import list_active_branches
from nsa_lab.health.verdict import Limits
from nsa_lab.runs.history import History, find_stages

# Statistics of real numbers that no two layers share.
DISTINCT_STATISTICS = (
    *("grad_norm_layers", "gate_entropy", "gate_update", "sel_sink_share"),
    *(f"norm_{branch}" for branch in BRANCHES),
)
SAME_VALUE = 1e-9  # relative difference of equal values
MAX_EQUAL = 2  # values that two layers share by chance (0 measured)
# Numbers that describe a layer or a branch in a reading, and the largest number of layers that are compared in pairs.
MIN_DIMENSIONS, MAX_ROWS = 3, 256
USUAL_READINGS = 100  # up to which `exchange_distance` is used as it is


def find_equal_layers(history: History, n_layers: int, _: Limits) -> str | None:
    """Return a text on two layers that share several values, in one statistic or more; None if there are none."""
    shared: dict[tuple[int, int], list[tuple[int, str]]] = {}
    for name in DISTINCT_STATISTICS:
        steps, values = history.layer_series(name)
        if not len(values) or values.shape[1] != n_layers:
            continue
        varies = np.ptp(values, axis=0) > 0  # other checks judge zeros and constants
        for layer in range(1, n_layers):
            own = values[:, layer : layer + 1]
            is_equal = np.isclose(values[:, :layer], own, rtol=SAME_VALUE, atol=0) & (own != 0)
            is_equal &= varies[:layer] & varies[layer]
            for reading, other in np.argwhere(is_equal)[: (MAX_EQUAL + 1) * layer].tolist():
                shared.setdefault((other, layer), []).append((int(steps[reading]), name))
    for (first, second), places in shared.items():
        if len(places) > MAX_EQUAL:
            step, name = places[0]
            return f"{name} of layers {first} and {second} is equal at step {step:,}, one of {len(places):,} such values"
    return None


def find_exchange(history: History, n_layers: int, limits: Limits) -> str | None:
    """Return a text on layers or branches that take each other's statistics from one reading to the next; None without.

    A branch is described by its values in all layers, a layer by all of its statistics.
    """
    branches = list_active_branches(history)
    groups = [
        (f"the branches exchange {prefix}", [f"{prefix}_{branch}" for branch in branches], 1)
        for prefix in ("norm", "gate_share")
        if len(branches) > 1
    ]
    for subject, names, axis in [*groups, ("the layers exchange their statistics", list(DISTINCT_STATISTICS), 2)]:
        series = [own for name in names if len((own := history.layer_series(name))[1]) and own[1].shape[1] == n_layers]
        steps = series[0][0] if series else np.zeros(0, dtype=np.int64)
        if (axis == 1 and len(series) < len(names)) or any(not np.array_equal(steps, own) for own, _ in series):
            continue
        if not series or len(steps) < 2:
            continue
        logs = np.log(np.maximum(np.stack([values for _, values in series], axis=axis), 1e-12))
        if axis == 2:
            logs = logs / np.maximum(logs.std(axis=(0, 1)), 1e-12)
        if (
            logs.shape[2] >= MIN_DIMENSIONS
            and logs.shape[1] <= MAX_ROWS
            and (step := _find_exchange_step(history, steps, logs, limits))
        ):
            return f"{subject} at step {step:,}"
    return None


def _find_exchange_step(history: History, steps: np.ndarray, rows: np.ndarray, limits: Limits) -> int | None:
    """Return the first step at which two rows of `rows` [readings, rows, numbers] take each other's earlier places.

    None if there is none. Rows whose distance is not larger than their usual movement have no place.
    """
    all_steps = history.steps.ints("step")
    attempts = history.steps.ints("attempt")[np.searchsorted(all_steps, steps)]
    stages = find_stages(steps, history.config.train)
    is_next = (np.diff(attempts) == 0) & (np.diff(stages) == 0)
    if not is_next.any():
        return None
    new, old = rows[1:][is_next], rows[:-1][is_next]
    stayed = np.linalg.norm(new - old, axis=-1)
    # Rows that cross can exchange their places by chance, the more so the more readings there are.
    factor = limits.exchange_distance * max(1.0, math.log(len(new)) / math.log(USUAL_READINGS)) ** 0.5
    first: list[int] = []
    for one, other in itertools.combinations(range(rows.shape[1]), 2):
        crossed = [np.linalg.norm(new[:, a] - old[:, b], axis=-1) for a, b in ((one, other), (other, one))]
        usual = np.median(np.minimum(stayed[:, [one, other]], np.stack(crossed, axis=1)))
        is_distinct = np.linalg.norm(old[:, one] - old[:, other], axis=-1) > factor * usual
        is_exchange = sum(crossed) < limits.exchange_ratio * (stayed[:, one] + stayed[:, other])
        if (found := is_distinct & is_exchange).any():
            first.append(int(steps[1:][is_next][found.argmax()]))
    return min(first, default=None)
