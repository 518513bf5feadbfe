"""The learning rate: a pure function of the optimiser step, so that a resumed run needs no scheduler state."""

from __future__ import annotations

import math

from nsa_lab.config import StageConfig, TrainConfig


def learning_rate(step: int, train: TrainConfig) -> float:
    """Rate of optimiser step `step`, counted from 1 to `train.steps`.

    Every stage has a schedule of its own, and counts its own steps: linear to `lr`, reached at step `warmup_steps` (step 1
    without warm-up); then a half cosine that reaches `min_lr` at the stage's last step, or constant. Or `wsd` (warm-up,
    stable, decay: arXiv 2404.06395): constant, and over the last `decay_share` linear to `min_lr`, reached at the last step
    (the linear cooldown of arXiv 2405.18392). Accumulation does not enter: a step is an optimiser step.

    Raises ValueError for a step that the run does not have.
    """
    if not 1 <= step <= train.steps:
        raise ValueError(f"step {step} is outside 1..{train.steps}, the optimiser steps of this run")
    index, within = train.at(step)
    return _rate_in_stage(within, train.plan[index])


def _rate_in_stage(step: int, train: StageConfig) -> float:
    if step < train.warmup_steps:
        return train.lr * step / train.warmup_steps
    peak = max(train.warmup_steps, 1)
    if train.lr_schedule == "constant" or step <= peak:
        return train.lr
    if train.lr_schedule == "wsd":
        last_at_peak = max(train.steps - train.decay_steps, peak)
        if step <= last_at_peak:
            return train.lr
        return train.min_lr + (train.lr - train.min_lr) * (train.steps - step) / (train.steps - last_at_peak)
    progress = (step - peak) / (train.steps - peak)
    return train.min_lr + 0.5 * (train.lr - train.min_lr) * (1.0 + math.cos(math.pi * progress))
