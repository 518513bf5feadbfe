"""Why a run diverged, as far as its record tells: what to look at and what to change, before anybody resumes it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nsa_lab.config import RunConfig
from nsa_lab.health.verdict import Limits
from nsa_lab.runs import directory
from nsa_lab.runs.history import History
from nsa_lab.runs.rerun_command import build_rerun_command

N_SHOWN_LOSSES = 3  # losses before the end
SAFE_LR = 1e-3  # models of these sizes train with it


@dataclass(frozen=True)
class Divergence:
    """`seen`: what the record says, a line each; `change`: what to do about it; `resume` comes last."""

    observations: list[str]
    action: str
    resume_hint: str

    @property
    def lines(self) -> list[str]:
        return [*self.observations, self.action, self.resume_hint]


def diagnose_divergence(history: History, limits: Limits) -> Divergence | None:
    """Of a run that is halted and whose losses rose, or ended in what is no number; None for any other."""
    if history.status.get("status") != directory.HALTED:
        return None
    steps, losses = _get_finite_series(history, "bpb")
    rose = len(losses) > 1 and losses[-1] > limits.diverged_loss * losses.min()
    broke = any(event.get("rule") == "non_finite" for event in history.events_of_kind("guard"))
    if not (rose or broke):
        return None
    gradient = _describe_gradient_growth(history, limits)
    # AdamW, and Muon at its scale, moves every weight by about the rate in a step, however small its gradient.
    rash = _get_peak_lr(history) > limits.risky_lr or history.last_step <= history.config.train.warmup_steps
    seen = [_describe_last_losses(steps, losses), _describe_lr(history), gradient]
    return Divergence(
        [line for line in seen if line],
        _describe_action(history, rose or rash or bool(gradient)),
        _describe_resume(history),
    )


def _get_peak_lr(history: History) -> float:
    return max(stage.lr for stage in history.config.train.plan)


def _get_finite_series(history: History, name: str) -> tuple[np.ndarray, np.ndarray]:
    steps, values = history.series(name)
    finite = np.isfinite(values)
    return steps[finite], values[finite]


def _describe_last_losses(steps: np.ndarray, losses: np.ndarray) -> str:
    if not len(losses):
        return "No loss was a number, from the first step on."
    shown = ", ".join(
        f"{loss:,.3f} at step {step:,}"
        for step, loss in zip(steps[-N_SHOWN_LOSSES:], losses[-N_SHOWN_LOSSES:], strict=True)
    )
    return f"Last losses that are numbers, bits per byte: {shown}; the lowest was {losses.min():,.3f}."


def _describe_lr(history: History) -> str | None:
    steps, rates = _get_finite_series(history, "lr")
    if not len(steps):
        return None
    return f"Learning rate {rates[-1]:.3g} at step {steps[-1]:,}; its peak, train.lr, is {_get_peak_lr(history):.3g}."


def _describe_gradient_growth(history: History, limits: Limits) -> str | None:
    """How the norm of the gradient grew; None where it did not."""
    steps, norms = _get_finite_series(history, "grad_norm")
    if len(norms) < 2 or norms[-1] < limits.diverged_gradient * norms.min() or norms.min() <= 0:
        return None
    least = int(norms.argmin())
    return (
        f"The gradient's norm grew from {norms[least]:.3g} at step {steps[least]:,} to {norms[-1]:.3g} at step "
        f"{steps[-1]:,}, before clipping to {history.config.train.grad_clip:g}."
    )


def _describe_action(history: History, grew: bool) -> str:
    if not grew:
        return (
            "Losses and gradients were as ever until then, so the learning rate is not the first suspect: look at the "
            "batch in the newest halt-… folder of the run, and at the precision and the kernels of that step."
        )
    train = history.config.train
    warm = " and a longer train.warmup_steps" if train.warmup_steps < train.steps // 10 else ""
    return (
        f"Suspect: the learning rate. Train anew with a lower train.lr{warm}: "
        f"{build_rerun_command(history.run_dir, history.config, _lower_lr(history))}"
    )


def _lower_lr(history: History) -> RunConfig:
    """The run's configuration with a learning rate that is worth a try, in every stage that is above it."""
    rate = float(f"{min(_get_peak_lr(history) / 10, SAFE_LR):.1g}")
    sections = history.config.to_dict()
    for stage in sections["train"].get("stages") or [sections["train"]]:
        stage["lr"] = min(stage["lr"], rate)
        stage["min_lr"] = min(stage["min_lr"], stage["lr"])
    return RunConfig.from_dict(sections)


def _describe_resume(history: History) -> str:
    return (
        f"The weights are those of step {history.last_step:,}, the last good one. Only if the cause lay outside, in data or "
        f"machine, is it worth going on from them with the same settings: nsa-lab resume {history.run}"
    )
