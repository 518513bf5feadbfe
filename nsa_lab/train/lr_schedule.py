"""Learning rate as a pure function of the optimizer step, so that a resumed run needs no scheduler state."""

from __future__ import annotations

import math

from nsa_lab.config import StageConfig, TrainConfig


def compute_learning_rate(step: int, train: TrainConfig) -> float:
    """Return the learning rate of optimizer step `step`, in 1 ... `train.steps`.

    Every stage has its own schedule over its own steps. Warm-up is linear and reaches `lr` at step `warmup_steps` (at
    step 1 without warm-up). Then the rate follows `lr_schedule`:
    * `cosine`: half a cosine, which reaches `min_lr` at the last step of the stage.
    * `constant`: `lr`.
    * `wsd` (warm-up, stable, decay: arXiv 2404.06395): `lr`, then linear over the last `decay_share` of the steps to
      `min_lr` at the last step (the linear cooldown of arXiv 2405.18392).

    Gradient accumulation has no effect: a step is an optimizer step. Raises ValueError for a step outside the run.
    """
    if not 1 <= step <= train.steps:
        raise ValueError(f"step {step} is outside 1..{train.steps}, the optimizer steps of this run")
    index, step_in_stage = train.locate_step(step)
    return _compute_stage_rate(step_in_stage, train.plan[index])


def _compute_stage_rate(step: int, stage: StageConfig) -> float:
    if step < stage.warmup_steps:
        return stage.lr * step / stage.warmup_steps
    peak = max(stage.warmup_steps, 1)
    if stage.lr_schedule == "constant" or step <= peak:
        return stage.lr
    if stage.lr_schedule == "wsd":
        last_at_peak = max(stage.steps - stage.decay_steps, peak)
        if step <= last_at_peak:
            return stage.lr
        return stage.min_lr + (stage.lr - stage.min_lr) * (stage.steps - step) / (stage.steps - last_at_peak)
    progress = (step - peak) / (stage.steps - peak)
    return stage.min_lr + 0.5 * (stage.lr - stage.min_lr) * (1.0 + math.cos(math.pi * progress))
