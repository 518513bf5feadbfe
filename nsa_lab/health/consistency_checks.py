"""Checks that the recorded numbers are possible together: relations between fields, repeated values, identical layers.

Every relation holds by definition of the fields, so its tolerance is rounding. A violation means that the record, or what
wrote it, is wrong.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from nsa_lab.config import BRANCHES
from nsa_lab.health.log_integrity import find_longest_constant, find_readings_with_selection
from nsa_lab.health.verdict import LIMITS, Limits, Verdict
from nsa_lab.runs import directory
from nsa_lab.runs.event_columns import NUMBER, NUMBERS
from nsa_lab.runs.event_schema import EndEvent, get_fields, is_number
from nsa_lab.runs.event_table import Events
from nsa_lab.runs.history import History, find_stages

ROUNDING = 1e-3
RATE_ERROR = 0.01
# Bounds of the median of step time / time between events (1.0 measured).
LEAST_TIME_RATIO, LARGEST_TIME_RATIO, MIN_INTERVALS = 0.2, 3.0, 5
N_INTERVALS, CLOCK_S = (10, 100), 1.0  # intervals that are compared together, and the resolution of clocks
# Bytes of a weight, and of a checkpoint per parameter (8 to 12 measured: weights and two moments) with other bytes.
WEIGHT_BYTES, CHECKPOINT_BYTES, OTHER_BYTES = (0.5, 8.0), (2.0, 24.0), 1 << 24
CHECKPOINT_RATIO = 1.5  # largest difference of a checkpoint's size from the median (1.000 measured)
LARGEST_ENTROPY = 8.0  # of a byte
# Numbers of a reading that may repeat: formulas, peaks and counts. Other checks judge the gates.
REPEATING_FIELDS = ("lr", "mem_peak_bytes", "sel_keys", "sel_keys_most")
# The others are measured again in every reading.
VARYING_FIELDS = tuple(
    name
    for name, field in get_fields("step").items()
    if field.form in (NUMBER, NUMBERS) and name not in get_fields("") and not name.startswith(("gate_", *REPEATING_FIELDS))
)
# Statistics of real numbers that no two layers share.
DISTINCT_STATISTICS = (
    *("grad_norm_layers", "gate_entropy", "gate_update", "sel_sink_share"),
    *(f"norm_{branch}" for branch in BRANCHES),
)
MIN_EQUAL_READINGS = 5
MIN_ORDERED = 3, 10  # layers and readings


class Problem(NamedTuple):
    """Steps at which a relation does not hold, ascending, and a text about the first of them."""

    steps: np.ndarray
    text: str


def check_consistent(history: History, limits: Limits) -> Verdict:
    """Check relations between numbers: shares, entropies, losses, rates, times, memory, gradients and keys."""
    name = "consistent numbers"
    if not len(history.steps) and not len(history.evaluations):
        return Verdict(name, None, 0, 0, "no numbers were recorded")
    for find_problem in RELATIONS:
        problem = find_problem(history)
        if problem is not None and len(problem.steps):
            count = len(problem.steps)
            text = f"{problem.text} at step {problem.steps[0]:,}, which is impossible ({count} such readings)"
            return Verdict(name, False, count, 0, text)
    return Verdict(name, True, 0, 0, "shares, losses, rates, times, memory and gradients agree with each other")


def _check_gate_shares(history: History) -> Problem | None:
    series = [history.layer_series(f"gate_share_{branch}") for branch in history.config.model.branches]
    steps, _ = series[0]
    if not len(steps) or any(not np.array_equal(steps, own) for own, _ in series):
        return None
    total = np.sum([values for _, values in series], axis=0)
    is_wrong = (np.abs(total - 1) > ROUNDING).any(axis=1)
    return Problem(steps[is_wrong], f"the gate shares of a layer add up to {_get_worst(total[is_wrong], 1.0):.3f}")


def _check_gate_entropy(history: History) -> Problem | None:
    """The mean of entropies is at most the entropy of the mean shares."""
    steps, entropy = history.layer_series("gate_entropy")
    series = [history.layer_series(f"gate_share_{branch}") for branch in history.config.model.branches]
    if not len(steps) or any(not np.array_equal(steps, own) for own, _ in series):
        return None
    highest = -sum(values * np.log(np.maximum(values, 1e-12)) for _, values in series)
    is_wrong = (entropy > highest + ROUNDING).any(axis=1)
    worst = _get_worst((entropy - highest)[is_wrong], 0.0)
    return Problem(steps[is_wrong], f"the gate entropy of a layer is {worst:.3f} nats above that of its mean shares")


def _get_worst(values: np.ndarray, reference: float) -> float:
    return float(values.flat[np.abs(values - reference).argmax()]) if values.size else reference


def _check_training_bits(history: History) -> Problem | None:
    """`bpb` is `loss` in bits per byte; with marked tokens `loss` is between the losses of text and of marked tokens."""
    loss, marked = history.steps.numbers("loss"), history.steps.numbers("marked_loss")
    text = history.steps.numbers("bpb") * math.log(2) * _estimate_bytes_per_token(history)
    lowest, highest = np.fmin(text, marked), np.fmax(text, marked)
    is_wrong = (loss < lowest * (1 - ROUNDING)) | (loss > highest * (1 + ROUNDING))
    return _make_bits_problem(history.steps, is_wrong, "training")


def _check_validation_bits(history: History) -> Problem | None:
    loss = history.evaluations.numbers("loss")
    text = history.evaluations.numbers("bpb") * math.log(2) * _estimate_bytes_per_token(history)
    return _make_bits_problem(history.evaluations, np.abs(loss - text) > ROUNDING * np.abs(text), "validation")


def _make_bits_problem(events: Events, is_wrong: np.ndarray, subject: str) -> Problem:
    wrong = events.select(is_wrong)
    values = f"{wrong.numbers('loss')[0]:.4f} nats, {wrong.numbers('bpb')[0]:.4f} bits" if len(wrong) else ""
    return Problem(wrong.ints("step"), f"the {subject} loss per token and per byte disagree: {values},")


def _estimate_bytes_per_token(history: History) -> float:
    """Return 1 for bytes. For another tokenizer, which the record does not have, the median ratio of all losses."""
    if history.config.data.tokenizer == "byte":
        return 1.0
    plain = history.steps.select(~history.steps.has("marked_loss"))
    ratios = np.concatenate(
        [events.numbers("loss") / (events.numbers("bpb") * math.log(2)) for events in (plain, history.evaluations)]
    )
    finite = ratios[np.isfinite(ratios)]
    return float(np.median(finite)) if len(finite) else 1.0


def _check_rate(history: History) -> Problem | None:
    """Seconds per step times tokens per second is the number of tokens of a step.

    The interval of the first step of a stage may include steps of the stage before it.
    """
    train, steps = history.config.train, history.steps.ints("step")
    per_stage = np.array([stage.tokens_per_step for stage in train.plan], dtype=np.float64)
    stages = find_stages(steps, train)
    current = per_stage[stages]
    before = np.where(np.isin(steps, train.first_steps), per_stage[np.maximum(stages - 1, 0)], current)
    lowest, highest = np.minimum(before, current), np.maximum(before, current)
    product = history.steps.numbers("dt_s") * history.steps.numbers("tokens_per_s")
    is_wrong = (product < lowest * (1 - RATE_ERROR)) | (product > highest * (1 + RATE_ERROR))
    first = f"{product[is_wrong][0]:,.0f} tokens per step, not {current[is_wrong][0]:,.0f}," if is_wrong.any() else ""
    return Problem(steps[is_wrong], f"dt_s and tokens_per_s give {first}")


def _check_step_time(history: History) -> Problem | None:
    """The time of the steps between two readings is about the time between these events.

    Evaluations, saves and statistics make it longer, so intervals with them do not count.
    """
    steps, attempts = history.steps.ints("step"), history.steps.ints("attempt")
    elapsed = np.diff(history.steps.numbers("t"))
    ratio = np.diff(steps) * history.steps.numbers("dt_s")[1:] / np.where(elapsed > 0, elapsed, np.nan)
    statistics = history.steps.select(history.steps.has("grad_norm_layers"))
    others = (history.events_of_kind("eval", "checkpoint", "reach", "conversion", "compile"), statistics)
    busy = np.sort(np.concatenate([events.ints("step") for events in others]))
    is_plain = np.searchsorted(busy, steps[:-1], "left") == np.searchsorted(busy, steps[1:], "right")
    ratio = ratio[(np.diff(attempts) == 0) & is_plain & np.isfinite(ratio)]
    if len(ratio) < MIN_INTERVALS or LEAST_TIME_RATIO < np.median(ratio) < LARGEST_TIME_RATIO:
        return None
    return Problem(steps[-1:], f"the steps take {np.median(ratio):.3g} times the time between their events,")


def _check_elapsed_time(history: History) -> Problem | None:
    """Intervals in a row do not take less time than their steps. Where the clock was set back, nothing is known."""
    steps, attempts = history.steps.ints("step"), history.steps.ints("attempt")
    elapsed = np.diff(history.steps.numbers("t"))
    needed = np.diff(steps) * history.steps.numbers("dt_s")[1:]
    is_known = (np.diff(attempts) == 0) & (elapsed >= 0) & np.isfinite(needed) & np.isfinite(elapsed)
    for count in (count for count in N_INTERVALS if count <= len(needed)):
        known, total_needed, total_elapsed = (
            np.convolve(np.where(is_known, values, 0.0), np.ones(count), "valid")
            for values in (np.ones(len(needed)), needed, elapsed)
        )
        is_wrong = (known > count - 0.5) & (total_needed > LIMITS.time_ratio * (total_elapsed + CLOCK_S))
        if is_wrong.any():
            return Problem(steps[count:][is_wrong], f"{count} intervals take less time than their steps,")
    return None


def _check_waits(history: History) -> Problem | None:
    steps, wait, step_s = history.steps.ints("step"), history.steps.numbers("data_s"), history.steps.numbers("dt_s")
    median, high = history.steps.numbers("data_s_p50"), history.steps.numbers("data_s_p95")
    is_wrong = (wait > step_s * 1.05) | (median > high)
    return Problem(steps[is_wrong], "the wait for data is longer than the step, or its median above its 95th percentile,")


def _check_peak_memory(history: History) -> Problem | None:
    """The peak so far never falls within an attempt."""
    steps, attempts = history.steps.ints("step"), history.steps.ints("attempt")
    peak = history.steps.numbers("mem_peak_bytes")
    is_wrong = np.concatenate([[False], (np.diff(peak) < 0) & (np.diff(attempts) == 0)])[: len(steps)]
    return Problem(steps[is_wrong], "the peak memory so far falls")


def _check_gradient_sum(history: History) -> Problem | None:
    """The gradient norms of the layers are parts of the whole."""
    steps, layers = history.layer_series("grad_norm_layers")
    all_steps, norms = history.series("grad_norm")
    whole = norms[np.searchsorted(all_steps, steps)] if len(all_steps) else np.zeros(0)
    if not len(steps) or not len(whole):
        return None
    is_wrong = np.sqrt((layers**2).sum(axis=1)) > whole * 1.02
    return Problem(steps[is_wrong], "the gradient of the layers is larger than that of the model")


def _check_window_losses(history: History) -> Problem | None:
    positions, lists = history.evaluations.lists("window_losses")
    losses = history.evaluations.numbers("loss")[positions]
    means = np.array([values.mean() for values in lists])
    is_wrong = np.abs(means - losses) > ROUNDING * np.abs(losses)
    return Problem(
        history.evaluations.ints("step")[positions][is_wrong], "the validation loss is not the mean over its windows"
    )


def _check_selected_keys(history: History) -> Problem | None:
    nsa = history.config.model.nsa
    steps, most = history.layer_series("sel_keys_most")
    mean_steps, mean = history.layer_series("sel_keys")
    if not len(steps) or not np.array_equal(steps, mean_steps):
        return None
    is_wrong = ((most > nsa.n_sel * nsa.l_sel) | (mean > most * (1 + ROUNDING))).any(axis=1)
    return Problem(
        steps[is_wrong], f"a query reads more than nsa.n_sel * nsa.l_sel = {nsa.n_sel * nsa.l_sel:,} selected keys"
    )


def _check_durations(history: History) -> Problem | None:
    """The duration of an evaluation or a save is at most the time since the start of its attempt."""
    events = history.events_of_kind("eval", "checkpoint", "compile")
    if not len(events):
        return None
    times, attempts = history.events.numbers("t"), history.events.ints("attempt")
    starts = {attempt: float(np.nanmin(times[attempts == attempt])) for attempt in np.unique(attempts).tolist()}
    elapsed = events.numbers("t") - np.array([starts[attempt] for attempt in events.ints("attempt").tolist()])
    is_wrong = events.numbers("seconds") > elapsed + LIMITS.clock_back_s
    return Problem(events.ints("step")[is_wrong], "an evaluation or a save takes longer than its attempt")


def _check_sizes(history: History) -> Problem | None:
    """Weights, checkpoints and memory have the size of the parameters. All checkpoints of a run have the same tensors."""
    saved = history.events_of_kind("checkpoint")
    count = float(max((event.get("params") or 0 for event in history.first_events), default=0))
    share = count / max((event.get("ranks") or 1 for event in history.first_events), default=1)
    weighed = history.steps.select(history.steps.has("weight_bytes"))
    values = [value if isinstance(value, dict) else {} for value in weighed.values("weight_bytes")]
    weights = np.array([sum(size for size in value.values() if is_number(size)) if value else np.nan for value in values])
    sizes = saved.numbers("bytes")
    usual = float(np.nanmedian(sizes)) if np.isfinite(sizes).any() else 0.0
    most = CHECKPOINT_BYTES[1] * count + OTHER_BYTES if count else math.inf
    subjects = (
        ("the weights", weighed, weights, WEIGHT_BYTES[0] * share, WEIGHT_BYTES[1] * count if count else math.inf),
        ("the peak memory", history.steps, history.steps.numbers("mem_peak_bytes"), WEIGHT_BYTES[0] * share, math.inf),
        ("a checkpoint", saved, sizes, CHECKPOINT_BYTES[0] * count, most),
        ("a checkpoint", saved, sizes, usual / CHECKPOINT_RATIO, usual * CHECKPOINT_RATIO),
    )
    for name, events, own, low, high in subjects:
        is_wrong = (own < low) | (own > high)
        if is_wrong.any():
            bounds = f"at least {low:,.0f}" if math.isinf(high) else f"{low:,.0f} to {high:,.0f}"
            text = f"{name}: {own[is_wrong][0]:,.0f} bytes, expected {bounds} ({count:,.0f} parameters),"
            return Problem(events.ints("step")[is_wrong], text)
    return None


def _check_fields_differ(history: History) -> Problem | None:
    """No two measured fields have the same values in all readings: one of them is a copy."""
    names = [*VARYING_FIELDS, *(f"gate_share_{branch}" for branch in BRANCHES), "gate_entropy", "gate_update"]
    forms = history.steps.list_fields()
    series = [
        (name, *(history.layer_series(name) if forms[name] == NUMBERS else history.series(name)))
        for name in names
        if name in forms
    ]
    evaluations = history.evaluations
    series += [
        (f"{name} of evaluations", evaluations.ints("step"), evaluations.numbers(name))
        for name in ("loss", "bpb", "first_loss")
    ]
    seen: dict[bytes, str] = {}
    for name, steps, values in series:
        if len(values) < MIN_EQUAL_READINGS or not np.isfinite(values).all() or not values.any(axis=0).all():
            continue  # a disabled branch has zeros
        if not np.ptp(values):
            continue  # two shares of exactly 1 are no copies
        if (other := seen.setdefault(values.tobytes(), name)) != name:
            return Problem(steps, f"{name} equals {other}")
    return None


def _check_work(history: History) -> Problem | None:
    """A query reads at most all keys of its sequence, and no sequence is longer than those of training."""
    longest = max(stage.seq_len for stage in history.config.train.plan)
    measured = history.events_of_kind("reach", "conversion")
    is_wrong = measured.numbers("length") > longest
    if is_wrong.any():
        text = f"a sequence of {measured.numbers('length')[is_wrong][0]:,.0f} tokens, trained: {longest:,},"
        return Problem(measured.ints("step")[is_wrong], text)
    for event in history.first_events:
        reads = event.get("reads_per_token")
        for name, value in reads.items() if isinstance(reads, dict) else ():
            if value is not None and is_number(value) and value > longest:
                text = f"reads_per_token: {value:,.0f} of {name}, longer than a sequence of {longest:,} tokens,"
                return Problem(np.array([event["step"]]), text)
    return None


def _check_entropies(history: History) -> Problem | None:
    """The entropy of bytes is at most 8 bits, and not higher if the previous byte is known."""
    references = {event.get("name"): event for event in history.events_of_kind("reference")}
    highest = LARGEST_ENTROPY
    for name in ("order-0 entropy", "order-1 entropy"):
        bits = references.get(name, {}).get("bpb")
        if bits is not None and bits > highest + ROUNDING:
            text = f"{name}: {bits:.3f} bits per byte, expected at most {highest:.3f},"
            return Problem(np.array([references[name]["step"]]), text)
        highest = highest if bits is None else bits
    return None


RELATIONS: tuple[Callable[[History], Problem | None], ...] = (
    _check_gate_shares,
    _check_gate_entropy,
    _check_training_bits,
    _check_validation_bits,
    _check_rate,
    _check_step_time,
    _check_elapsed_time,
    _check_waits,
    _check_peak_memory,
    _check_gradient_sum,
    _check_window_losses,
    _check_selected_keys,
    _check_durations,
    _check_sizes,
    _check_fields_differ,
    _check_work,
    _check_entropies,
)


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
        for find_problem in find_problems if values.ndim == 1 else ():
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
                if name == "sel_window_overlap":  # a window may be as long as the text
                    is_used &= (values != 1).any(axis=1)
                steps, values = steps[is_used], values[is_used]
            for layer in range(values.shape[1]):
                yield f"{name} of layer {layer}", steps, values[:, layer], limits.equal_losses
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
    if problem := _find_equal_statistic(history, n_layers, limits) or _find_random_order(history, n_layers, limits):
        return Verdict("layers differ", False, 1, 0, problem)
    return Verdict("layers differ", True, 0, 0, f"{n_layers} layers, no two with equal statistics")


def _find_equal_statistic(history: History, n_layers: int, limits: Limits) -> str | None:
    """Return a text on two layers of which one statistic is equal in most readings; None if there are none."""
    for name in DISTINCT_STATISTICS:
        _, values = history.layer_series(name)
        if len(values) < MIN_EQUAL_READINGS or values.shape[1] != n_layers:
            continue
        for layer in np.flatnonzero(np.ptp(values, axis=0) > 0).tolist():
            is_equal = np.isclose(values[:, :layer], values[:, layer : layer + 1], rtol=limits.layers_equal, atol=0)
            share = is_equal.mean(axis=0)
            if layer and share.max() > 0.5:
                return f"{name} of layers {share.argmax()} and {layer} is equal in {share.max():.0%} of the readings"
    return None


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


def check_status_agrees(history: History, limits: Limits) -> Verdict:
    """Check that `status.json` and the last event of the last attempt tell the same end."""
    name = "status agrees"
    attempt = history.last_attempt
    endings = [event for event in history.events_of_kind("end", "halt") if event["attempt"] == attempt]
    status = history.status
    if history.is_alive or not endings:
        return Verdict(name, None, None, 0, "no attempt has ended" if not endings else "a trainer is at work")
    ending = endings[-1]
    if problem := _find_late_event(history, ending):
        return Verdict(name, False, 1, 0, problem)
    recorded_status = ending.get("status") or (directory.HALTED if ending["kind"] == "halt" else directory.DONE)
    recorded = {"status": recorded_status, "attempt": attempt, "step": ending["step"], "tokens": ending.get("tokens")}
    recorded["exit_code"] = ending.get("exit_code")
    different = [
        f"{key} {status[key]}, event {value}"
        for key, value in recorded.items()
        if value is not None and status.get(key) is not None and status[key] != value
    ]
    # A run that was resumed and has not recorded anything yet has the state RUNNING or PREEMPTED.
    if different:
        return Verdict(name, False, len(different), 0, f"status.json and the last event disagree: {'; '.join(different)}")
    return Verdict(name, True, 0, 0, f"status.json and the last event: {recorded_status} at step {ending['step']:,}")


def _find_late_event(history: History, ending: EndEvent) -> str | None:
    """Return a text on an attempt that ended twice or in two ways, or trained on after its end; None if it did neither."""
    attempt = ending["attempt"]
    own = history.events.select(history.events.ints("attempt") == attempt)
    kinds = {event["kind"] for event in own.of_kind("end", "halt")}
    if len(kinds) > 1:
        return f"attempt {attempt} has both ended and halted"
    if len(own.of_kind(ending["kind"])) > 1:
        return f"attempt {attempt} has ended twice"
    last = int(np.flatnonzero(own.is_kind(ending["kind"])).max())
    late = own.select(np.arange(len(own)) > last).of_kind("step", "eval")
    return f"attempt {attempt} records step {late[-1]['step']:,} after its end" if late else None
