"""Checks of the course of the losses over the whole run, and of the structure that the model has learned."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nsa_lab.health.completeness_checks import find_readings_with_selection
from nsa_lab.health.level_shifts import find_gap, find_swings
from nsa_lab.health.loss_checks import MIN_SCATTER_READINGS, drop_nonfinite, estimate_scatter
from nsa_lab.health.references import explain_trial
from nsa_lab.health.verdict import Limits, Verdict
from nsa_lab.runs.history import History, find_stages

TREND_READINGS = 41
SPECTRUM_READINGS = 64, 512  # minimum and maximum number of readings of a spectrum
N_PARTS, MIN_PART = 10, 5  # parts of the selection losses of a stage, and readings of a part
N_LASTING = 4  # windows of a rise that lasts
UNTRAINED = 1.1  # highest training loss after the start, relative to equal probabilities (0.66 measured)
MIN_COURSE_WINDOWS = 10  # with fewer, the fast fall at the start of a stage looks like a sudden drop


def check_loss_course(history: History, limits: Limits) -> Verdict:
    """Check that no loss rises, drops suddenly or oscillates before the last readings, which other checks judge.

    Training readings are averaged in windows within each stage; the first tenth of a stage, where the loss falls fast, does
    not count.
    """
    name = "loss course"
    if history.config.data.source == "synthetic":
        return Verdict(name, None, None, None, "not applicable: noise cannot be learned")
    if rise := _find_validation_rise(history, limits):
        return Verdict(name, False, *rise)
    finders = (
        *(_find_validation_swings, _find_selection_loss_rise, _find_vanished_selection_loss, _find_selection_loss_noise),
        *(_find_loss_shift, _find_unlearned),
    )
    if problem := next(filter(None, (find(history, limits) for find in finders)), None):
        return Verdict(name, False, *problem)
    steps, bpb = drop_nonfinite(*history.series("bpb"))
    stages, n_windows = find_stages(steps, history.config.train), 0
    for stage in np.unique(stages):
        windows = _split_into_windows(steps[stages == stage], bpb[stages == stage], limits)
        n_windows += len(windows.means)
        own = steps[stages == stage], bpb[stages == stage]
        if problem := windows.find_problem(limits) or _find_training_swings(*own, limits) or _find_wave(*own, limits):
            return Verdict(name, False, *problem)
    if not n_windows and len(history.evaluations) < 3:
        return Verdict(name, None, None, limits.course_change, "too few readings")
    return Verdict(name, True, 0.0, limits.course_change, "no rise, sudden drop or oscillation")


def _find_validation_rise(history: History, limits: Limits) -> tuple[float, float, str] | None:
    """Return value, limit and text of a validation loss far above an earlier one at its length; None if there is none."""
    steps, bpb = drop_nonfinite(*history.validation())
    steps, bpb = steps[steps > 0], bpb[steps > 0]
    plan = history.config.train.plan
    lengths = np.array([stage.seq_len for stage in plan])[find_stages(steps, history.config.train)]
    for length in np.unique(lengths):
        own_steps, own = steps[lengths == length], bpb[lengths == length]
        ratios = own / np.minimum.accumulate(own)
        worst = int(ratios.argmax())
        if ratios[worst] > limits.validation_rise:
            text = f"validation rises to {own[worst]:.3f} bits per byte at step {own_steps[worst]:,}, "
            return float(ratios[worst]), limits.validation_rise, f"{text}{ratios[worst]:.2f} times the best before it"
    return None


def _find_validation_swings(history: History, limits: Limits) -> tuple[float, float, str] | None:
    """Return value, limit and text of a validation loss that rises and falls in turns; None if there is none.

    The text of all evaluations is the same, so their differences have little noise.
    """
    steps, bpb = drop_nonfinite(*history.validation())
    steps, bpb = steps[steps > 0], bpb[steps > 0]
    lengths = np.array([stage.seq_len for stage in history.config.train.plan])[find_stages(steps, history.config.train)]
    for length in np.unique(lengths):
        if swings := find_swings(bpb[lengths == length], 1 + limits.validation_swing, limits.validation_swings):
            count, last = swings
            text = f"validation rises and falls in turns, by at least {limits.validation_swing:.0%}, in {count}"
            text += f" evaluations in a row, up to step {steps[lengths == length][last]:,}"
            return float(count), float(limits.validation_swings), text
    return None


def _find_selection_loss_rise(history: History, limits: Limits) -> tuple[float, float, str] | None:
    """Return value, limit and text of a selection loss that rises within stages, to their ends; None if there is none.

    Longer texts have a higher one, so stages are not compared with each other; their rises are multiplied. The first part
    of a stage is not judged, and no trial run: there, attention becomes sharper than at the start.
    """
    if explain_trial(history, limits):
        return None
    steps, losses = drop_nonfinite(*history.series("selection_loss"))
    steps, losses = steps[losses > 0], losses[losses > 0]
    stages, rise = find_stages(steps, history.config.train), 1.0
    for stage in np.unique(stages):
        own = losses[stages == stage]
        n_parts = min(N_PARTS, len(own) // MIN_PART)
        if n_parts >= 3:
            medians = np.array([np.median(part) for part in np.array_split(own, n_parts)[1:]])
            rise *= float(medians[-1] / medians.min())
    if rise <= limits.selection_loss_growth:
        return None
    text = f"the selection loss rises to {rise:.1f} times the lowest tenth before, from step {steps[0]:,} to {steps[-1]:,}"
    return rise, limits.selection_loss_growth, f"{text}, changes between stages not counted"


def _find_vanished_selection_loss(history: History, limits: Limits) -> tuple[float, float, str] | None:
    """Return value, limit and text of a selection loss that falls to almost nothing in readings in a row; None without."""
    steps, losses = drop_nonfinite(*history.series("selection_loss"))
    has_choice = find_readings_with_selection(history, steps)  # otherwise, the loss is 0
    steps, losses = steps[has_choice], losses[has_choice]
    is_small = losses < limits.selection_loss_least * losses.max(initial=0.0)
    in_a_row = (
        np.convolve(is_small, np.ones(limits.equal_losses), "valid") >= limits.equal_losses if len(losses) else is_small
    )
    if not in_a_row.any():
        return None
    first = int(in_a_row.argmax())
    share = float(losses[first] / losses.max())
    text = (
        f"the selection loss is {share:.1g} of its largest value from step {steps[first]:,} on: it is not that of attention"
    )
    return share, limits.selection_loss_least, text


def _find_selection_loss_noise(history: History, limits: Limits) -> tuple[float, float, str] | None:
    """Return value, limit and text of a selection loss that differs too much from reading to reading; None without.

    It is a mean over queries and layers, so neighboring readings are close. Less noise may be due to different batches.
    """
    steps, losses = drop_nonfinite(*history.series("selection_loss"))
    steps, losses = steps[losses > 0], losses[losses > 0]
    stages = find_stages(steps, history.config.train)
    for stage in np.unique(stages):
        logs = np.log(losses[stages == stage])
        if len(logs) >= MIN_SCATTER_READINGS and (scatter := estimate_scatter(logs)) > limits.selection_loss_scatter:
            text = f"the selection loss is noise: it differs by a factor of {np.exp(scatter):.1f} from reading to reading"
            return scatter, limits.selection_loss_scatter, f"{text}, from step {steps[stages == stage][0]:,} on"
    return None


def _find_loss_shift(history: History, limits: Limits) -> tuple[float, float, str] | None:
    """Return value, limit and text of a part of the loss that suddenly changes its size, and keeps it; None without."""
    for name in ("first_loss", "selection_loss"):
        steps, losses = drop_nonfinite(*history.series(name))
        if shift := find_gap(history, steps, losses, limits):
            text = f"{name} changes by a factor of at least {shift.factor:.0f} at step {shift.step:,}"
            return shift.factor, limits.loss_shift, text
    return None


def _find_unlearned(history: History, limits: Limits) -> tuple[float, float, str] | None:
    """Return value, limit and text of a training loss above that of equal probabilities after the start; None without."""
    steps, losses = drop_nonfinite(*history.series("loss"))
    is_late, limit = (
        steps > limits.course_start * history.config.train.steps,
        UNTRAINED * np.log(history.config.model.vocab_size),
    )
    if not is_late.any():
        return None
    index = int(np.argmax(np.where(is_late, losses, -np.inf)))
    highest = float(losses[index])
    text = (
        f"the training loss is {highest:.4g} nats at step {steps[index]:,}; an untrained model has {limit / UNTRAINED:.4g}"
    )
    return (highest, float(limit), text) if highest > limit else None


def _find_training_swings(steps: np.ndarray, bpb: np.ndarray, limits: Limits) -> tuple[float, float, str] | None:
    """Return value, limit and text of a loss that rises and falls in turns; None if it does not. It needs few readings."""
    start = int(limits.course_start * len(bpb))
    if not (swings := find_swings(bpb[start:], limits.training_swing, limits.training_swings)):
        return None
    count, last = swings
    text = (
        f"the training loss oscillates: it rises and falls in turns, by a factor of at least {limits.training_swing:g}, in "
    )
    return (
        float(count),
        float(limits.training_swings),
        f"{text}{count} readings in a row, up to step {steps[start + last]:,}",
    )


def _find_wave(steps: np.ndarray, bpb: np.ndarray, limits: Limits) -> tuple[float, float, str] | None:
    """Return value, limit and text of a periodic oscillation; None if there is none.

    Readings without a period have a flat spectrum. Its largest value is then about the logarithm of the number of
    frequencies times its mean.
    """
    start, half = int(limits.course_start * len(bpb)), TREND_READINGS // 2
    steps, bpb = steps[start:], bpb[start:]
    if len(bpb) < SPECTRUM_READINGS[0] + TREND_READINGS:
        return None
    residuals = bpb[half:-half] - np.convolve(bpb, np.full(TREND_READINGS, 1 / TREND_READINGS), "valid")
    size = min(SPECTRUM_READINGS[1], len(residuals))
    windows = np.lib.stride_tricks.sliding_window_view(residuals, size)[:: size // 4]
    # A single outlier has all frequencies.
    bound = 4 * windows.std(axis=1, keepdims=True)
    taper = np.hanning(size)
    amplitudes = 2 * np.abs(np.fft.rfft(np.clip(windows, -bound, bound) * taper, axis=1)) / taper.sum()
    first = size // 20  # slower waves are part of the trend
    power = amplitudes[:, first:] ** 2
    ratios = power / np.maximum(np.median(power, axis=1, keepdims=True) / np.log(2), 1e-24)
    window, frequency = np.unravel_index(ratios.argmax(), ratios.shape)
    ratio, height = float(ratios[window, frequency]), float(power[window, frequency] ** 0.5)
    if ratio <= limits.course_wave or height <= limits.course_wave_height * float(np.median(bpb)):
        return None
    step, period = steps[half + int(window) * (size // 4)], size / (first + int(frequency))
    text = f"the training loss oscillates with a period of {period:.1f} readings from about step {step:,} on"
    return ratio, limits.course_wave, text


@dataclass(frozen=True)
class _LossWindows:
    """Windows of training readings: their first steps, means, scatters of a reading about its neighbors, and standard
    deviations from a line, all [windows]; and the standard error of a mean.
    """

    steps: np.ndarray
    means: np.ndarray
    scatters: np.ndarray
    spreads: np.ndarray
    error: float

    def find_problem(self, limits: Limits) -> tuple[float, float, str] | None:
        """Return value, limit and text of a rise, a sudden drop or an oscillation; None if there is none."""
        if len(self.means) < 3:
            return None
        # With few windows, the texts of a window may differ from those of another.
        is_long = len(self.means) >= MIN_COURSE_WINDOWS
        rise = limits.course_change_long if is_long else limits.course_change
        n_errors = limits.course_standard_errors_long if is_long else limits.course_standard_errors
        change, errors = limits.course_change, limits.course_standard_errors * 2**0.5 * self.error
        if problem := self._find_rise(1, rise, n_errors):
            return problem
        if is_long and (problem := self._find_lasting_rise(limits)):
            return problem
        if len(self.means) < MIN_COURSE_WINDOWS:
            return None
        late = len(self.means) // 5
        before, after = self.means[late:-1], self.means[late + 1 :]
        is_drop = (after < before * (1 - change)) & (before - after > errors)
        if is_drop.any():
            worst = int(((1 - after / before) * is_drop).argmax())
            text = f"the training loss drops from {before[worst]:.3f} to {after[worst]:.3f} bits per byte at step "
            return (
                float(1 - after[worst] / before[worst]),
                change,
                f"{text}{self.steps[late + 1 + worst]:,}: a plateau before",
            )
        for scatters, limit in ((self.scatters, limits.course_scatter), (self.spreads, limits.course_spread)):
            typical = float(np.median(scatters))
            ratios = scatters[late:] / max(typical, 1e-12)
            if typical and ratios.max() > limit:
                worst = int(ratios.argmax())
                text = f"the training loss oscillates from step {self.steps[late + worst]:,} on"
                return float(ratios.max()), limit, f"{text}: its scatter is {ratios.max():.1f} times the usual"
        return None

    def _find_lasting_rise(self, limits: Limits) -> tuple[float, float, str] | None:
        return self._find_rise(N_LASTING, limits.course_change_lasting, limits.course_standard_errors_lasting)

    def _find_rise(self, n_windows: int, change: float, n_errors: float) -> tuple[float, float, str] | None:
        """Return value, limit and text of a rise of the means of `n_windows` windows above an earlier one; None if none."""
        means = np.convolve(self.means, np.full(n_windows, 1 / n_windows), "valid")
        lowest = np.minimum.accumulate(means)
        error = 2**0.5 * self.error / n_windows**0.5
        is_rise = (means > lowest * (1 + change)) & (means - lowest > n_errors * error)
        if not is_rise.any():
            return None
        worst = int((means / lowest * is_rise).argmax())
        text = f"the training loss rises to {means[worst]:.3f} bits per byte from step {self.steps[worst]:,} on"
        return float(means[worst] / lowest[worst] - 1), change, f"{text}, from {lowest[worst]:.3f}"


def _split_into_windows(steps: np.ndarray, bpb: np.ndarray, limits: Limits) -> _LossWindows:
    """Split the readings of a stage, without its beginning, into windows of equal numbers of readings."""
    start = int(limits.course_start * len(bpb))
    steps, bpb = steps[start:], bpb[start:]
    size = max(limits.course_readings, len(bpb) // 40)
    n_windows = len(bpb) // size
    windows = bpb[: n_windows * size].reshape(n_windows, size)
    scatters = np.array([estimate_scatter(window) for window in windows])
    places = np.arange(size) - (size - 1) / 2
    slopes = windows @ places / max(float(places @ places), 1e-12)
    spreads = (windows - windows.mean(axis=1, keepdims=True) - slopes[:, None] * places).std(axis=1)
    firsts = steps[: n_windows * size : size]
    return _LossWindows(firsts, windows.mean(axis=1), scatters, spreads, estimate_scatter(bpb) / size**0.5)


def check_structure(history: History, limits: Limits) -> Verdict | None:
    """Check that the model predicts bytes better than from the previous byte alone: below the order-1 entropy of the text.

    A model of pure noise reaches the entropy of single bytes, which is a large fall from the untrained loss. In a text with
    structure, it is a warning if the loss is at least below the entropy of single bytes.
    """
    if history.config.data.source == "synthetic" or history.config.data.tokenizer != "byte":
        return None
    name, limit = "learned structure", limits.structure_margin
    by_name = {event.get("name"): event for event in history.events_of_kind("reference")}
    first, second = (by_name.get(f"order-{order} entropy") for order in (0, 1))
    _, bpb = drop_nonfinite(*history.validation())
    if not (first and second and second.get("bpb") and first.get("bpb")):
        return Verdict(name, None, None, limit, "the record has no entropy of the held-out text (older version)")
    if len(bpb) < 2 or (second.get("bytes") or 0) < limits.structure_bytes:
        return Verdict(name, None, None, limit, "too few evaluations, or too little held-out text")
    if explain_trial(history, limits):
        return Verdict(name, None, None, limit, "not judged: a trial run")
    ratio = float(bpb[-1] / second["bpb"])
    text = (
        f"validation {bpb[-1]:.3f} bits per byte; a byte alone has {first['bpb']:.3f}, and {second['bpb']:.3f} "
        "if the previous one is known"
    )
    if ratio <= limit:
        return Verdict(name, True, ratio, limit, text)
    # In real text the previous byte tells much. A model between the two entropies has learned something, but little.
    is_text = second["bpb"] < limits.structure_of_text * first["bpb"] and bpb[-1] <= first["bpb"]
    verdict = Verdict(name, False, ratio, limit, f"{text}: the model has learned no more, or the text is noise")
    return verdict.to_warning() if is_text else verdict
