"""Ranks that share each sequence (context parallelism) train and evaluate as one rank does."""

from __future__ import annotations

from pathlib import Path

import pytest
from rank_checks import run_ranks

pytestmark = [pytest.mark.timeout(200), pytest.mark.usefixtures("forked")]


@pytest.mark.slow
def test_two_ranks_that_share_each_sequence_train_as_one_rank(tmp_path: Path) -> None:
    run_ranks("shared_sequences_ddp", 2, tmp_path, "one sequence")


@pytest.mark.slow
def test_no_rank_computes_a_whole_sequence_before_training_or_after_a_failure(tmp_path: Path) -> None:
    run_ranks("shared_preflight_ddp", 2, tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("check", "n_ranks", "local_size"),
    [
        ("shared_sequences", 2, 0),
        ("shared_sequences", 4, 0),
        ("shared_sequences", 4, 2),
        ("shared_preflight", 4, 0),
        ("shared_sequences_ddp", 2, 0),
        ("shared_sequences_ddp", 4, 0),
    ],
)
def test_ranks_that_share_each_sequence_train_as_one_rank(
    check: str, n_ranks: int, local_size: int, tmp_path: Path
) -> None:
    run_ranks(check, n_ranks, tmp_path, local_size=local_size)
