"""Checks that measured numbers have noise, and that layers differ from each other.

A number that repeats, that is on a line, or that is that of another layer was written without a measurement.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from nsa_lab.health.completeness_checks import find_longest_constant, find_readings_with_selection
from nsa_lab.health.identity_checks import DISTINCT_STATISTICS, find_equal_layers, find_exchange
from nsa_lab.health.selection_geometry import find_fixed_overlaps
from nsa_lab.health.verdict import Limits, Verdict
from nsa_lab.runs.event_columns import NUMBER, NUMBERS
from nsa_lab.runs.event_fields import get_fields
from nsa_lab.runs.history import History

# Numbers of a reading that may repeat: formulas, peaks and counts. Other checks judge the gates.
REPEATING_FIELDS = ("lr", "mem_peak_bytes", "sel_keys", "sel_keys_most")
# The others are measured again in every reading.
VARYING_FIELDS = tuple(
    name
    for name, field in get_fields("step").items()
    if field.form in (NUMBER, NUMBERS) and name not in get_fields("") and not name.startswith(("gate_", *REPEATING_FIELDS))
)
# Ratios of counts: on short texts, and in many readings, a value returns by chance.
COUNTED_STATISTICS = ("sel_reuse", "sel_distance", "sel_window_overlap")
MIN_EQUAL_READINGS = 5
MIN_ORDERED = 3, 10  # layers and readings


def check_repeated_values(history: History, limits: Limits) -> Verdict:
    """Check that no measured value is bitwise equal in many readings in a row, or on a straight line: numbers have noise.

    Gates have other checks.
    """
    longest = (0, "", 0, limits.equal_losses)
    # A model learns of uniform noise only that it is uniform, and its loss hardly changes from then on.
    find_problems = (_find_few_values, _find_line)[: 1 if history.config.data.source == "synthetic" else 2]
    for name, steps, values, limit in _iterate_varying(history, limits):
        if not len(values):
            continue
        streak, end = find_longest_constant(values, (values.reshape(len(values), -1) != 0).any(axis=1))
        if streak >= limit:
            text = f"{name} is bitwise equal in {streak} readings in a row, up to step {steps[end]:,}"
            return Verdict("repeated values", False, streak, limit, text)
        own_finders = [
            find for find in find_problems if find is not _find_few_values or not name.startswith(COUNTED_STATISTICS)
        ]
        for find_problem in own_finders if values.ndim == 1 else ():
            is_used = np.isfinite(values) & (values != 0)  # a batch may have no waits, and a branch may be disabled
            if problem := find_problem(name, steps[is_used], values[is_used], limits):
                return Verdict("repeated values", False, *problem)
        longest = max(longest, (streak, name, int(steps[end]), limit))
    if not longest[0]:
        return Verdict("repeated values", None, None, limits.equal_losses, "no readings yet")
    return Verdict("repeated values", True, longest[0], longest[3], "losses, gradients and times differ between readings")


def _find_few_values(name: str, steps: np.ndarray, values: np.ndarray, limits: Limits) -> tuple[float, float, str] | None:
    """Return value, limit and text of readings [n] that take turns among few values, or repeat an earlier part of the run.

    None if there are none.
    """
    size = limits.distinct_readings
    if len(values) < size:
        return None
    windows = np.sort(np.lib.stride_tricks.sliding_window_view(values, size)[:: size // 4], axis=1)
    shares = (1 + (np.diff(windows, axis=1) != 0).sum(axis=1)) / size
    least = int(shares.argmin())
    if shares[least] < limits.distinct_share:
        n_values, last = round(shares[least] * size), steps[least * (size // 4) + size - 1]
        text = f"{name} has {n_values} values in {size} readings in a row, up to step {last:,}"
        return float(shares[least]), limits.distinct_share, text
    share = 1 - len(np.unique(values)) / len(values)
    if share <= limits.repeated_share:
        return None
    return float(share), limits.repeated_share, f"{name} has the value of an earlier reading in {share:.0%} of the readings"


def _find_line(name: str, steps: np.ndarray, values: np.ndarray, limits: Limits) -> tuple[float, float, str] | None:
    """Return value, limit and text of readings [n] in a row on a line, or almost constant; None if there are none."""
    size = limits.line_readings
    if len(values) < size:
        return None
    places, windows = (
        np.lib.stride_tricks.sliding_window_view(own.astype(np.float64), size)[:: size // 4] for own in (steps, values)
    )
    places = places - places.mean(axis=1, keepdims=True)
    slopes = (windows * places).sum(axis=1) / np.maximum((places**2).sum(axis=1), 1e-12)
    deviations = windows - windows.mean(axis=1, keepdims=True) - slopes[:, None] * places
    spreads = deviations.std(axis=1) / np.median(np.abs(windows), axis=1)
    least = int(spreads.argmin())
    if spreads[least] >= limits.line_spread:
        return None
    text = f"{name} has no noise in {size} readings in a row, up to step {steps[least * (size // 4) + size - 1]:,}: "
    text += f"they deviate from a line by {spreads[least]:.1g} of their value, expected at least {limits.line_spread:g}"
    return float(spreads[least]), limits.line_spread, text


def _iterate_varying(history: History, limits: Limits) -> Iterator[tuple[str, np.ndarray, np.ndarray, int]]:
    """Yield name, steps, values [n, ...] and the limit of the streak of everything that varies."""
    forms = history.steps.list_fields()
    for name in (name for name in VARYING_FIELDS if name in forms):
        if forms[name] == NUMBERS:
            steps, values = history.layer_series(name)
            if name.startswith("sel_"):  # otherwise all blocks are selected, and these are constant
                is_used = find_readings_with_selection(history, steps)
                steps, values = steps[is_used], values[is_used]
            # On short texts the window may have only the latest blocks of a selection, or all of it.
            can_repeat = np.zeros(values.shape, dtype=bool)
            if name == "sel_window_overlap":
                can_repeat = find_fixed_overlaps(history, steps, values)
            for layer in range(values.shape[1]):
                own = ~can_repeat[:, layer]
                yield f"{name} of layer {layer}", steps[own], values[own, layer], limits.equal_losses
        else:
            yield name, *history.series(name), limits.equal_losses
    steps = history.evaluations.ints("step")
    is_trained = steps > 0
    for name in ("loss", "bpb", "first_loss", "seconds"):
        values = history.evaluations.numbers(name)
        yield f"validation {name}", steps[is_trained], values[is_trained], limits.equal_evaluations
    benefits = history.current_events("reach")
    losses = [list(value.values()) for value in benefits.values("answer_loss") if isinstance(value, dict)]
    if losses and len({len(values) for values in losses}) == 1:
        measured = benefits.ints("step")[benefits.has("answer_loss")]
        rows = np.array([[np.nan if value is None else value for value in values] for values in losses], dtype=np.float64)
        yield "the loss of the ablations of selection", measured, rows, limits.equal_evaluations


def check_layers_differ(history: History, limits: Limits) -> Verdict:
    """Check that no two layers are identical in every statistic, and that layers keep their order.

    Otherwise it is the same layer, or the same numbers, recorded twice, or the layers are mixed up.
    """
    n_layers = history.config.model.n_layers
    series = [history.layer_series(name)[1] for name, form in history.steps.list_fields().items() if form == NUMBERS]
    readings = [values for values in series if values.shape[1] == n_layers and len(values)]
    if n_layers < 2 or not readings:
        return Verdict("layers differ", None, None, 0, "one layer" if n_layers < 2 else "no layer statistics were recorded")
    columns = np.concatenate(readings)
    # Equal layers have equal sums, so they are neighbors in this order.
    order = np.argsort(columns.sum(axis=0), kind="stable")
    for first, second in itertools.pairwise(order.tolist()):
        if np.allclose(columns[:, first], columns[:, second], rtol=limits.layers_equal, atol=0, equal_nan=True):
            text = f"layers {min(first, second)} and {max(first, second)} are equal in all {len(columns):,} statistics"
            return Verdict("layers differ", False, 1, 0, text)
    finders = (find_equal_layers, _find_equal_gradients, _find_random_order, find_exchange)
    if problem := next(filter(None, (find(history, n_layers, limits) for find in finders)), None):
        return Verdict("layers differ", False, 1, 0, problem)
    return Verdict("layers differ", True, 0, 0, f"{n_layers} layers, no two with equal statistics")


def _find_equal_gradients(history: History, n_layers: int, limits: Limits) -> str | None:
    """Return a text on gradient norms that are almost the same in all layers, in all readings; None if they are not."""
    _, norms = history.layer_series("grad_norm_layers")
    norms = norms[(norms > 0).all(axis=1)]
    if len(norms) < MIN_ORDERED[1] or norms.shape[1] != n_layers:
        return None
    spread = float((np.ptp(norms, axis=1) / norms.mean(axis=1)).max())
    if spread >= limits.gradient_layers_spread:
        return None
    return f"the gradient norms of the layers differ by at most {spread:.1g} of their mean: it is one number"


def _find_random_order(history: History, n_layers: int, limits: Limits) -> str | None:
    """Return a text on layers whose order by their statistics changes from reading to reading; None if it does not."""
    least_layers, least_readings = MIN_ORDERED
    correlations = []
    for name in DISTINCT_STATISTICS:
        _, values = history.layer_series(name)
        if len(values) < least_readings or values.shape[1] != n_layers or n_layers < least_layers:
            continue
        ranks = values.argsort(axis=1, kind="stable").argsort(axis=1) - (n_layers - 1) / 2
        correlations.append(np.median((ranks[1:] * ranks[:-1]).sum(axis=1)) / (ranks[0] ** 2).sum())
    if not correlations or np.mean(correlations) >= limits.layers_order:
        return None
    text = "the order of the layers changes from reading to reading: the correlation of their ranks is"
    return f"{text} {np.mean(correlations):.2f}, expected at least {limits.layers_order:g}"
