"""Checks that the recorded numbers are possible together: relations between fields, and between events and status.

Every relation holds by definition of the fields, so its tolerance is rounding. A violation means that the record, or what
wrote it, is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from nsa_lab.config import BRANCHES
from nsa_lab.health import (
    ablation_relations,
    comparison_relations,
    configured_work,
    heartbeat_relations,
    start_checks,
    text_relations,
)
from nsa_lab.health.repetition_checks import MIN_EQUAL_READINGS, VARYING_FIELDS
from nsa_lab.health.selection_geometry import find_impossible_distance, find_impossible_keys, find_impossible_overlap
from nsa_lab.health.verdict import LIMITS, Limits, Problem, Verdict
from nsa_lab.runs.attempts import group_positions
from nsa_lab.runs.event_columns import NUMBERS
from nsa_lab.runs.event_fields import is_number
from nsa_lab.runs.event_table import Events
from nsa_lab.runs.history import History, find_stages

ROUNDING = 1e-3
RATE_ERROR = 0.01
# Bounds of the median of step time / time between events (1.0 measured).
LEAST_TIME_RATIO, LARGEST_TIME_RATIO, MIN_INTERVALS = 0.2, 3.0, 5
N_INTERVALS, CLOCK_S = (10, 100), 1.0  # intervals that are compared together, and the resolution of clocks
# Bytes of a weight, and of a checkpoint per parameter (8 to 12 measured: weights and two moments) with other bytes.
WEIGHT_BYTES, CHECKPOINT_BYTES, OTHER_BYTES = (0.5, 8.0), (2.0, 24.0), 1 << 24
MIN_WINDOWS = 4
# Relative spread of the ratio of two fields that counts as none (2e-2 measured), and fields with a constant ratio.
SAME_RATIO = 1e-6
PROPORTIONAL = ({"loss", "bpb"}, {"loss of evaluations", "bpb of evaluations"})
CHECKPOINT_RATIO = 1.5  # largest difference of a checkpoint's size from the median (1.000 measured)


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
    # Windows have different texts. Of noise, a model learns the same loss for all of them.
    is_equal = np.array([len(values) >= MIN_WINDOWS and not np.ptp(values) for values in lists], dtype=bool)
    if is_equal.any() and history.config.data.source != "synthetic":
        text = f"the losses of all {len(lists[int(is_equal.argmax())])} windows of an evaluation are equal"
        return Problem(history.evaluations.ints("step")[positions][is_equal], text)
    counts, recorded = np.array([len(values) for values in lists]), history.evaluations.numbers("windows")[positions]
    if (is_other := np.isfinite(recorded) & (counts != recorded)).any():
        text = f"an evaluation of {recorded[is_other][0]:,.0f} windows with the losses of {counts[is_other][0]:,}"
        return Problem(history.evaluations.ints("step")[positions][is_other], text)
    is_wrong = np.abs(means - losses) > ROUNDING * np.abs(losses)
    return Problem(
        history.evaluations.ints("step")[positions][is_wrong], "the validation loss is not the mean over its windows"
    )


def _check_selection(history: History) -> Problem | None:
    problem = find_impossible_keys(history) or find_impossible_overlap(history) or find_impossible_distance(history)
    return Problem(*problem) if problem else None


def _check_durations(history: History) -> Problem | None:
    """The duration of an evaluation, a save or a check is at most the time since the start of its attempt."""
    events = history.events_of_kind("eval", "checkpoint", "compile", "preflight")
    if not len(events):
        return None
    times, attempts = history.events.numbers("t"), history.events.ints("attempt")
    starts = {attempt: float(np.nanmin(times[own])) for attempt, own in group_positions(attempts).items()}
    elapsed = events.numbers("t") - np.array([starts[attempt] for attempt in events.ints("attempt").tolist()])
    seconds = events.numbers("seconds")
    is_wrong = (seconds > elapsed + LIMITS.clock_back_s) | (events.is_kind("eval") & (seconds <= 0))
    return Problem(
        events.ints("step")[is_wrong], "an evaluation, a save or a check takes longer than its attempt, or no time"
    )


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
    """No two measured fields have the same values in all readings, or a constant ratio: one of them is a copy."""
    names = [*VARYING_FIELDS, *(f"gate_share_{branch}" for branch in BRANCHES), "gate_entropy", "gate_update"]
    forms, steps = history.steps.list_fields(), history.steps.ints("step")
    # The median of one wait, and of two, is their mean, and all percentiles of one wait are equal.
    is_equal_by_definition = len(steps) > 1 and np.median(np.diff(steps)) <= 2
    derived = ("data_s_p50", "data_s_p95") if is_equal_by_definition else ()
    series = [
        (name, *(history.layer_series(name) if forms[name] == NUMBERS else history.series(name)))
        for name in names
        if name in forms and name not in derived
    ]
    evaluations = history.evaluations
    series += [
        (f"{name} of evaluations", evaluations.ints("step"), evaluations.numbers(name))
        for name in ("loss", "bpb", "first_loss")
    ]
    # Numbers that every reading has, with which those are also compared that some readings lack.
    complete = [(name, own) for name, own_steps, own in series if own.ndim == 1 and np.array_equal(own_steps, steps)]
    by_readings: dict[bytes, list[tuple[str, np.ndarray]]] = {}
    for name, own_steps, values in series:
        if len(values) < MIN_EQUAL_READINGS or not np.isfinite(values).all() or not values.all():
            continue  # a disabled branch has zeros
        if not np.ptp(values):
            continue  # two shares of exactly 1 are no copies
        same = by_readings.setdefault(own_steps.tobytes() + bytes(str(values.shape), "ascii"), [])
        is_partial = name in forms and values.ndim == 1 and len(values) < len(steps)
        own_places = np.searchsorted(steps, own_steps)
        for other, other_values in [*same, *((other, own[own_places]) for other, own in complete if is_partial)]:
            is_usable = np.isfinite(other_values).all() and other_values.all()
            if {name, other} not in PROPORTIONAL and is_usable and _are_proportional(values, other_values):
                relation = "equals" if np.array_equal(values, other_values) else "is proportional to"
                return Problem(own_steps, f"{name} {relation} {other}")
        same.append((name, values))
    return None


def _are_proportional(values: np.ndarray, others: np.ndarray) -> bool:
    """Return whether the ratio of two series [readings, ...] is the same in all readings."""
    few = slice(MIN_EQUAL_READINGS)  # of most pairs, a few readings decide
    return all(
        bool((np.ptp(ratios, axis=0) <= SAME_RATIO * np.abs(ratios).max(axis=0)).all())
        for ratios in (values[few] / others[few], values / others)
    )


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


def _check_phase_ages(history: History) -> Problem | None:
    """A phase of the trainer is younger than the last step but one, which was recorded in an earlier phase."""
    beats, all_steps = history.events_of_kind("heartbeat"), history.events_of_kind("step")
    beat_times, beat_ages, step_times = beats.numbers("t"), beats.numbers("phase_age_s"), all_steps.numbers("t")
    steps_of = group_positions(all_steps.ints("attempt"))
    for attempt, own in group_positions(beats.ints("attempt")).items():
        recorded = np.sort(step_times[steps_of.get(attempt, np.zeros(0, dtype=int))])
        n_before = np.searchsorted(recorded, beat_times[own])
        own, n_before = own[n_before >= 2], n_before[n_before >= 2]
        is_wrong = beat_ages[own] > beat_times[own] - recorded[n_before - 2] + LIMITS.clock_back_s
        if is_wrong.any():
            wrong = own[is_wrong]
            name = beats[int(wrong[0])].get("phase")
            text = f"the phase {name} is {beat_ages[wrong[0]]:,.0f} s old, which is longer than two recorded steps,"
            return Problem(beats.ints("step")[wrong], text)
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
    _check_selection,
    _check_durations,
    _check_sizes,
    _check_fields_differ,
    _check_work,
    _check_phase_ages,
    *start_checks.RELATIONS,
    *configured_work.RELATIONS,
    *heartbeat_relations.RELATIONS,
    *text_relations.RELATIONS,
    *ablation_relations.RELATIONS,
    *comparison_relations.RELATIONS,
)
