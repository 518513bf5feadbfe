"""Helpers of tests of whole runs: recorded events, final weights, and checkpoints to resume from."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from nsa_lab.runs import events

Make, Train = Callable[..., Path], Callable[..., int]


def kinds(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in events.read_events(run_dir) if event["kind"] == kind]


def final_weights(run_dir: Path, step: int = 12) -> dict[str, torch.Tensor]:
    return load_file(run_dir / f"checkpoints/step-{step:08d}/model.safetensors")


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def rewind(run_dir: Path, step: int) -> None:
    """Delete later checkpoints, as if the trainer had been killed before them."""
    for path in run_dir.glob("checkpoints/step-*"):
        if int(path.name[5:]) > step:
            shutil.rmtree(path)
