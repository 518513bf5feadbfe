"""Ranks that share each sequence (context parallelism) train and evaluate as one rank does."""

from __future__ import annotations

from pathlib import Path

import pytest
from rank_checks import run_ranks

pytestmark = [pytest.mark.timeout(200), pytest.mark.usefixtures("forked")]


@pytest.mark.slow
def test_two_ranks_that_share_each_sequence_train_as_one_rank(tmp_path: Path) -> None:
    run_ranks("shared_sequences_ddp", 2, tmp_path, "one sequence")


@pytest.mark.nightly
@pytest.mark.parametrize("check", ["shared_sequences", "shared_sequences_ddp"])
@pytest.mark.parametrize(("n_ranks", "local_size"), [(2, 0), (4, 0), (4, 2)])
def test_ranks_that_share_each_sequence_train_as_one_rank(
    n_ranks: int, local_size: int, check: str, tmp_path: Path
) -> None:
    if check == "shared_sequences_ddp" and local_size:
        pytest.skip("hosts make no difference to ddp")
    run_ranks(check, n_ranks, tmp_path, local_size=local_size)
