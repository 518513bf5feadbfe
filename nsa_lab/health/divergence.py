"""Diagnose from the record why a run diverged: what to inspect, and a command that trains it with other settings."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nsa_lab.config import ConfigError, RunConfig, parse_override
from nsa_lab.health.verdict import Limits
from nsa_lab.runs import directory, resolve
from nsa_lab.runs.history import History
from nsa_lab.runs.summary import diff_settings

N_SHOWN_LOSSES = 3  # number of last losses in the report
SAFE_LR = 1e-3  # models of these sizes train with this rate


@dataclass(frozen=True)
class Divergence:
    """Diagnosis of a diverged run. `action`: what to change; `resume_hint`: when to resume unchanged."""

    observations: list[str]
    action: str
    resume_hint: str

    @property
    def lines(self) -> list[str]:
        return [*self.observations, self.action, self.resume_hint]


def diagnose_divergence(history: History, limits: Limits) -> Divergence | None:
    """Diagnose a halted run whose losses rose or became non-finite. Return None for any other run."""
    if history.status.get("status") != directory.HALTED:
        return None
    steps, losses = _get_finite_series(history, "bpb")
    has_risen = len(losses) > 1 and losses[-1] > limits.diverged_loss * losses.min()
    is_nonfinite = any(event.get("rule") == "non_finite" for event in history.events_of_kind("guard"))
    if not (has_risen or is_nonfinite):
        return None
    gradient_growth = _describe_gradient_growth(history, limits)
    # AdamW, and Muon at its scale, moves every weight by about the rate per step, however small its gradient is.
    is_risky = _get_peak_lr(history) > limits.risky_lr or history.last_step <= history.config.train.warmup_steps
    observations = [_describe_last_losses(steps, losses), _describe_lr(history), gradient_growth]
    return Divergence(
        [line for line in observations if line],
        _describe_action(history, has_risen or is_risky or bool(gradient_growth)),
        _describe_resume(history),
    )


def _get_peak_lr(history: History) -> float:
    return max(stage.lr for stage in history.config.train.plan)


def _get_finite_series(history: History, name: str) -> tuple[np.ndarray, np.ndarray]:
    steps, values = history.series(name)
    is_finite = np.isfinite(values)
    return steps[is_finite], values[is_finite]


def _describe_last_losses(steps: np.ndarray, losses: np.ndarray) -> str:
    if not len(losses):
        return "No loss was finite, from the first step on."
    last_losses = ", ".join(
        f"{loss:,.3f} at step {step:,}"
        for step, loss in zip(steps[-N_SHOWN_LOSSES:], losses[-N_SHOWN_LOSSES:], strict=True)
    )
    return f"Last finite losses, bits per byte: {last_losses}; the lowest was {losses.min():,.3f}."


def _describe_lr(history: History) -> str | None:
    steps, rates = _get_finite_series(history, "lr")
    if not len(steps):
        return None
    return f"Learning rate {rates[-1]:.3g} at step {steps[-1]:,}; its peak, train.lr, is {_get_peak_lr(history):.3g}."


def _describe_gradient_growth(history: History, limits: Limits) -> str | None:
    """Return how much the gradient norm grew; None if it did not."""
    steps, norms = _get_finite_series(history, "grad_norm")
    if len(norms) < 2 or norms[-1] < limits.diverged_gradient * norms.min() or norms.min() <= 0:
        return None
    least = int(norms.argmin())
    return (
        f"The gradient norm grew from {norms[least]:.3g} at step {steps[least]:,} to {norms[-1]:.3g} at step "
        f"{steps[-1]:,}, before clipping to {history.config.train.grad_clip:g}."
    )


def _describe_action(history: History, is_lr_suspected: bool) -> str:
    if not is_lr_suspected:
        return (
            "Losses and gradients were normal until then, so the learning rate is an unlikely cause: inspect the batch in "
            "the newest halt-… folder of the run, and the precision and kernels of that step."
        )
    train = history.config.train
    warmup_hint = " and a longer train.warmup_steps" if train.warmup_steps < train.steps // 10 else ""
    return (
        f"Likely cause: the learning rate. Train again with a lower train.lr{warmup_hint}: "
        f"{build_rerun_command(history.run_dir, history.config, _lower_lr(history))}"
    )


def _lower_lr(history: History) -> RunConfig:
    """Return the run's configuration with a safer learning rate in every stage whose rate is higher."""
    rate = float(f"{min(_get_peak_lr(history) / 10, SAFE_LR):.1g}")
    sections = history.config.to_dict()
    for stage in sections["train"].get("stages") or [sections["train"]]:
        stage["lr"] = min(stage["lr"], rate)
        stage["min_lr"] = min(stage["min_lr"], stage["lr"])
    return RunConfig.from_dict(sections)


def _describe_resume(history: History) -> str:
    return (
        f"The weights are those of step {history.last_step:,}, the last good step. Resume from them with the same settings "
        f"only if the cause was the data or the machine: nsa-lab resume {history.run}"
    )


def build_rerun_command(run_dir: Path, config: RunConfig, new_config: RunConfig) -> str:
    """Return `nsa-lab run NAME -p KEY=VALUE ...`, which trains `new_config`.

    `config` is the configuration of the run in `run_dir`. Settings that differ between `config` and `new_config` come
    first. NAME is the run's preset if the preset with these options gives exactly `new_config`. Otherwise, for example if
    the preset has changed since, NAME is the configuration file in `run_dir`.
    """
    name, base = config.name, config
    changed_keys = [key for key, *_ in diff_settings(config, new_config)]
    try:
        base = resolve.load_config(name, [])
        is_exact = resolve.load_config(name, _list_overrides(base, new_config, changed_keys)).hash() == new_config.hash()
    except ConfigError:
        is_exact = False
    if not is_exact:
        name, base = f"{run_dir.parent.name}/{run_dir.name}/{directory.CONFIG}", config
    options = [f"-p {shlex.quote(override)}" for override in _list_overrides(base, new_config, changed_keys)]
    return " ".join(["nsa-lab run", shlex.quote(name), *options])


def _list_overrides(base: RunConfig, new_config: RunConfig, changed_keys: list[str]) -> list[str]:
    """Return the `-p` overrides that turn `base` into `new_config`.

    They include `changed_keys` even if `base` has the new value already, and omit keys that `new_config` does not read.
    """
    new_settings = new_config.settings()
    keys = dict.fromkeys([*changed_keys, *(key for key, *_ in diff_settings(base, new_config))])
    return [_format_override(key, new_settings[key]) for key in keys if key in new_settings]


def _format_override(key: str, value: Any) -> str:
    """Return `key=value`, for example `train.lr=0.001`. Quote a string only if YAML would parse it as another value."""
    unquoted = f"{key}={value}"
    try:
        is_plain_string = isinstance(value, str) and parse_override(unquoted)[1] == value
    except ConfigError:
        is_plain_string = False
    return unquoted if is_plain_string else f"{key}={json.dumps(value)}"
