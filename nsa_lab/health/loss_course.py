"""Checks of the course of the losses over the whole run, and of the structure that the model has learned."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nsa_lab.health.loss_checks import drop_nonfinite, estimate_scatter
from nsa_lab.health.references import explain_trial
from nsa_lab.health.verdict import Limits, Verdict
from nsa_lab.runs.history import History, find_stages

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
    steps, bpb = drop_nonfinite(*history.series("bpb"))
    stages, n_windows = find_stages(steps, history.config.train), 0
    for stage in np.unique(stages):
        windows = _split_into_windows(steps[stages == stage], bpb[stages == stage], limits)
        n_windows += len(windows.means)
        if problem := windows.find_problem(limits):
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


@dataclass(frozen=True)
class _LossWindows:
    """Means and scatters of windows of training readings [windows], their first steps, and the error of a mean."""

    steps: np.ndarray
    means: np.ndarray
    scatters: np.ndarray
    error: float

    def find_problem(self, limits: Limits) -> tuple[float, float, str] | None:
        """Return value, limit and text of a rise, a sudden drop or an oscillation; None if there is none."""
        if len(self.means) < 3:
            return None
        change, errors = limits.course_change, limits.course_standard_errors * 2**0.5 * self.error
        lowest = np.minimum.accumulate(self.means)
        is_rise = (self.means > lowest * (1 + change)) & (self.means - lowest > errors)
        if is_rise.any():
            worst = int((self.means / lowest * is_rise).argmax())
            text = f"the training loss rises to {self.means[worst]:.3f} bits per byte from step {self.steps[worst]:,} on"
            return float(self.means[worst] / lowest[worst] - 1), change, f"{text}, from {lowest[worst]:.3f}"
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
        typical = float(np.median(self.scatters))
        ratios = self.scatters[late:] / max(typical, 1e-12)
        if typical and ratios.max() > limits.course_scatter:
            worst = int(ratios.argmax())
            text = f"the training loss oscillates from step {self.steps[late + worst]:,} on"
            return float(ratios.max()), limits.course_scatter, f"{text}: its scatter is {ratios.max():.1f} times the usual"
        return None


def _split_into_windows(steps: np.ndarray, bpb: np.ndarray, limits: Limits) -> _LossWindows:
    """Split the readings of a stage, without its beginning, into windows of equal numbers of readings."""
    start = int(limits.course_start * len(bpb))
    steps, bpb = steps[start:], bpb[start:]
    size = max(limits.course_readings, len(bpb) // 40)
    n_windows = len(bpb) // size
    windows = bpb[: n_windows * size].reshape(n_windows, size)
    scatters = np.array([estimate_scatter(window) for window in windows])
    return _LossWindows(steps[: n_windows * size : size], windows.mean(axis=1), scatters, estimate_scatter(bpb) / size**0.5)


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
    is_text = second["bpb"] < limits.structure_of_text * first["bpb"] and bpb[-1] <= limit * first["bpb"]
    verdict = Verdict(name, False, ratio, limit, f"{text}: the model has learned no more, or the text is noise")
    return verdict.to_warning() if is_text else verdict
