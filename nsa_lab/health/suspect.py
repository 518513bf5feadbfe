"""Why a run diverged, as far as its record tells: what to look at and what to change, before anybody resumes it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nsa_lab.config import RunConfig
from nsa_lab.health.verdict import Limits
from nsa_lab.runs import directory
from nsa_lab.runs.anew import anew
from nsa_lab.runs.history import History

SHOWN = 3  # losses before the end
SAFE_RATE = 1e-3  # models of these sizes train with it


@dataclass(frozen=True)
class Suspect:
    """`seen`: what the record says, a line each; `change`: what to do about it; `resume` comes last."""

    seen: list[str]
    change: str
    resume: str

    @property
    def lines(self) -> list[str]:
        return [*self.seen, self.change, self.resume]


def suspect(history: History, limits: Limits) -> Suspect | None:
    """Of a run that is halted and whose losses rose, or ended in what is no number; None for any other."""
    if history.status.get("status") != directory.HALTED:
        return None
    steps, losses = _known(history, "bpb")
    rose = len(losses) > 1 and losses[-1] > limits.diverged_loss * losses.min()
    broke = any(event.get("rule") == "non_finite" for event in history.of_kind("guard"))
    if not (rose or broke):
        return None
    gradient = _growth(history, limits)
    # AdamW, and Muon at its scale, moves every weight by about the rate in a step, however small its gradient.
    rash = _peak(history) > limits.rash_rate or history.reached <= history.config.train.warmup_steps
    seen = [_last_losses(steps, losses), _rate(history), gradient]
    return Suspect([line for line in seen if line], _change(history, rose or rash or bool(gradient)), _resume(history))


def _peak(history: History) -> float:
    return max(stage.lr for stage in history.config.train.plan)


def _known(history: History, name: str) -> tuple[np.ndarray, np.ndarray]:
    steps, values = history.series(name)
    finite = np.isfinite(values)
    return steps[finite], values[finite]


def _last_losses(steps: np.ndarray, losses: np.ndarray) -> str:
    if not len(losses):
        return "No loss was a number, from the first step on."
    shown = ", ".join(f"{loss:,.3f} at step {step:,}" for step, loss in zip(steps[-SHOWN:], losses[-SHOWN:], strict=True))
    return f"Last losses that are numbers, bits per byte: {shown}; the lowest was {losses.min():,.3f}."


def _rate(history: History) -> str | None:
    steps, rates = _known(history, "lr")
    if not len(steps):
        return None
    return f"Learning rate {rates[-1]:.3g} at step {steps[-1]:,}; its peak, train.lr, is {_peak(history):.3g}."


def _growth(history: History, limits: Limits) -> str | None:
    """How the norm of the gradient grew; None where it did not."""
    steps, norms = _known(history, "grad_norm")
    if len(norms) < 2 or norms[-1] < limits.diverged_gradient * norms.min() or norms.min() <= 0:
        return None
    least = int(norms.argmin())
    return (
        f"The gradient's norm grew from {norms[least]:.3g} at step {steps[least]:,} to {norms[-1]:.3g} at step "
        f"{steps[-1]:,}, before clipping to {history.config.train.grad_clip:g}."
    )


def _change(history: History, grew: bool) -> str:
    if not grew:
        return (
            "Losses and gradients were as ever until then, so the learning rate is not the first suspect: look at the "
            "batch in the newest halt-… folder of the run, and at the precision and the kernels of that step."
        )
    train = history.config.train
    warm = " and a longer train.warmup_steps" if train.warmup_steps < train.steps // 10 else ""
    return (
        f"Suspect: the learning rate. Train anew with a lower train.lr{warm}: "
        f"{anew(history.run_dir, history.config, _slower(history))}"
    )


def _slower(history: History) -> RunConfig:
    """The run's configuration with a learning rate that is worth a try, in every stage that is above it."""
    rate = float(f"{min(_peak(history) / 10, SAFE_RATE):.1g}")
    sections = history.config.to_dict()
    for stage in sections["train"].get("stages") or [sections["train"]]:
        stage["lr"] = min(stage["lr"], rate)
        stage["min_lr"] = min(stage["min_lr"], stage["lr"])
    return RunConfig.from_dict(sections)


def _resume(history: History) -> str:
    return (
        f"The weights are those of step {history.reached:,}, the last good one. Only if the cause lay outside, in data or "
        f"machine, is it worth going on from them with the same settings: nsa-lab resume {history.run}"
    )
