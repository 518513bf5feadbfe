"""Sharded ranks compute as one rank does: initial weights, training, gradient exchange and precision."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from rank_checks import run_ranks

from nsa_lab.config import ConfigError
from nsa_lab.train.distributed import World
from nsa_lab.train.matrix_exchange import assign_owners

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("forked")]


@pytest.mark.slow
@pytest.mark.parametrize(("n_ranks", "local_size"), [(3, 0), (4, 2)])
def test_sharded_weights_start_as_those_of_one_rank(n_ranks: int, local_size: int) -> None:
    run_ranks("initial_weights", n_ranks, local_size=local_size)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n_ranks", "local_size", "optimizer"),
    [
        (3, 0, "muon"),
        (4, 2, "adamw"),
        pytest.param(3, 0, "adamw", marks=pytest.mark.nightly),
        pytest.param(4, 2, "muon", marks=pytest.mark.nightly),
    ],
)
def test_sharded_ranks_train_as_one_rank(n_ranks: int, local_size: int, optimizer: str, tmp_path: Path) -> None:
    run_ranks("training", n_ranks, tmp_path, optimizer, local_size=local_size)


@pytest.mark.slow
def test_gradients_are_exchanged_once_per_step(tmp_path: Path) -> None:
    run_ranks("gradient_exchange", 2, tmp_path)


@pytest.mark.slow
def test_weights_are_gathered_in_bfloat16(tmp_path: Path) -> None:
    run_ranks("bf16", 2, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_gradient_that_is_not_finite_on_one_rank_changes_nothing(tmp_path: Path, optimizer: str) -> None:
    run_ranks("bad_step", 2, tmp_path, optimizer)


@pytest.mark.slow
def test_matrices_are_computed_by_one_rank_each() -> None:
    run_ranks("matrix_exchange", 3)


def test_expensive_matrices_are_spread_over_the_ranks() -> None:
    shapes = [torch.Size(shape) for shape in [(8, 8), (2, 2), (8, 8), (2, 2), (8, 8), (2, 2)]]
    owners = assign_owners(shapes, 3)
    assert sorted(owners[::2]) == [0, 1, 2] and sorted(owners[1::2]) == [0, 1, 2]
    large_last = [torch.Size(shape) for shape in [(2, 2), (2, 2), (9, 9)]]
    assert assign_owners(large_last, 2) == [1, 1, 0], "the small ones share a rank"
    assert assign_owners(shapes, 1) == [0] * 6


def test_the_ranks_of_a_host_share_one_copy() -> None:
    assert World(0, 8, 0, 4, parallel="hsdp").n_shards == 4
    assert World(0, 8, 0, 0, parallel="hsdp").n_shards == World(0, 8, 0, 4, parallel="fsdp").n_shards == 8
    assert World(0, 8, 0, 4).n_shards == World(parallel="fsdp").n_shards == World(parallel="hsdp").n_shards == 1
    with pytest.raises(
        ConfigError, match=r"^runtime\.parallel = hsdp: expected the same number of ranks on every host, got 6"
    ):
        _ = World(0, 6, 0, 4, parallel="hsdp").n_shards
