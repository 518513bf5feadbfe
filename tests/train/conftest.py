"""Fixtures for tiny runs: a real model and real batches that take milliseconds per step."""

from __future__ import annotations

import gc
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nsa_lab.config import RunConfig
from nsa_lab.data import Dataset, prepare
from nsa_lab.runs import lifecycle
from nsa_lab.train.attempt import run
from nsa_lab.train.build import Builders, build_model

Make = Callable[..., Path]


@pytest.fixture(scope="session")
def make_tiny_config() -> Callable[..., RunConfig]:
    """`tiny(**changes)`: config of 12 steps of 4 x 32 synthetic tokens; `steps=3` changes train, `runtime={...}` a
    section.
    """

    def make(**changes: Any) -> RunConfig:
        sections: dict[str, Any] = {
            "name": "tiny",
            "model": {"dim": 16, "n_layers": 2, "n_heads": 4, "n_kv_groups": 2, "d_k": 4, "d_v": 4, "vocab_size": 256},
            "nsa": {"l": 8, "d": 4, "l_sel": 8, "n_sel": 3, "w": 16},
            "runtime": {"device": "cpu", "heartbeat_s": 60.0},
            "data": {"source": "synthetic", "max_tokens": 20_000, "val_fraction": 0.3},
            "train": {
                "steps": 12,
                "seq_len": 32,
                "batch_size": 2,
                "accumulate_grad_batches": 2,
                "warmup_steps": 2,
                "lr": 1e-2,
                "log_every": 1,
                "stats_every": 4,
                "eval_every": 6,
                "eval_batches": 2,
                "save_every": 5,
            },
        }
        for key, value in changes.items():
            if isinstance(value, dict):
                sections[key] = sections[key] | value
            else:
                sections["train"][key] = value
        return RunConfig.from_dict(sections)

    return make


@pytest.fixture(scope="session")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shards")


@pytest.fixture(scope="session")
def builders(shards: Path) -> Builders:
    """The real builders, with a shard cache that all tests share."""

    def data(*arguments: Any) -> Dataset:
        return prepare(*arguments, cache=shards)

    return Builders(data=data)


@pytest.fixture
def make_hooked_builders(builders: Builders) -> Callable[[Callable[[nn.Module], None]], Builders]:
    """`hooked(change)`: builders that apply `change(model)` to the model."""

    def make(change: Callable[[nn.Module], None]) -> Builders:
        def model(config: RunConfig, device: torch.device) -> nn.Module:
            built = build_model(config, device)
            change(built)
            return built

        return replace(builders, model=model)

    return make


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Path of a file with documents of 1 to 90 letters, one per line."""
    rng, path = random.Random(7), tmp_path_factory.mktemp("texts") / "short.jsonl"
    lines = ["".join(rng.choices("abcdefgh", k=rng.choice([1, 5, 12, 30, 90]))) for _ in range(300)]
    path.write_text("\n".join(f'{{"text": "{line}"}}' for line in lines))
    return str(path)


@pytest.fixture
def new_run(make_tiny_config: Callable[..., RunConfig], tmp_path: Path) -> Make:
    """`new_run(**changes)`: directory of a run that has not started."""
    return lambda **changes: lifecycle.create_run(make_tiny_config(**changes), tmp_path / "outputs")


@pytest.fixture(scope="session")
def train(builders: Builders) -> Callable[..., int]:
    """`train(run_dir)`: run one attempt in this process and return its exit code."""

    def attempt(run_dir: Path, **other: Any) -> int:
        # A trainer runs a full garbage collection once, which is slow with the objects of earlier tests.
        gc.freeze()
        return run(run_dir, builders=other.get("builders", builders))

    return attempt


@pytest.fixture(scope="session")
def trained_run(
    make_tiny_config: Callable[..., RunConfig], train: Callable[..., int], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The tiny run, trained to its end. Tests must not write to it."""
    run_dir = lifecycle.create_run(make_tiny_config(), tmp_path_factory.mktemp("trained"))
    assert train(run_dir) == 0
    return run_dir


@pytest.fixture
def finished_run(trained_run: Path, tmp_path: Path) -> Path:
    """A copy of that run for this test only."""
    return shutil.copytree(trained_run, tmp_path / "finished" / trained_run.name)
