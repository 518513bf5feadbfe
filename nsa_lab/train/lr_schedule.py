"""The learning rate: a pure function of the optimiser step, so that a resumed run needs no scheduler state."""

from __future__ import annotations

import math

from nsa_lab.config import StageConfig, TrainConfig


def compute_learning_rate(step: int, train: TrainConfig) -> float:
    """Rate of optimiser step `step`, counted from 1 to `train.steps`.

    Every stage has a schedule of its own, and counts its own steps: linear to `lr`, reached at step `warmup_steps` (step 1
    without warm-up); then a half cosine that reaches `min_lr` at the stage's last step, or constant. Or `wsd` (warm-up,
    stable, decay: arXiv 2404.06395): constant, and over the last `decay_share` linear to `min_lr`, reached at the last step
    (the linear cooldown of arXiv 2405.18392). Accumulation does not enter: a step is an optimiser step.

    Raises ValueError for a step that the run does not have.
    """
    if not 1 <= step <= train.steps:
        raise ValueError(f"step {step} is outside 1..{train.steps}, the optimiser steps of this run")
    index, within = train.locate_step(step)
    return _compute_stage_rate(within, train.plan[index])


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
