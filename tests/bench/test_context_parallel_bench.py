"""The benchmark of ranks that share a sequence measures only results that agree with one rank."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nsa_lab.bench.context_parallel import MAX_DIFFERENCE, _raise_failure, _report_failure, run_ranks_bench


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_ranks_are_compared_with_one_rank_before_they_are_timed(tmp_path: Path) -> None:
    rows = run_ranks_bench((131,), tmp_path / "record.json", ranks=2, device="cpu")
    assert [(row.part, row.tokens, row.ranks, row.note) for row in rows] == [("operator", 131, 2, ""), ("step", 131, 2, "")]
    assert rows[0].difference > 0  # 0 if nothing were compared; the loss of a step can be equal to the bit
    for row in rows:
        assert row.difference < min(MAX_DIFFERENCE.values())
        assert row.one_ms and row.shared_ms and row.speedup == row.one_ms / row.shared_ms
    assert rows[0].difference and rows[0].communication_ms and rows[1].loss
    (row,) = run_ranks_bench((131,), ranks=2, device="cpu", parts=("step",), alone=False, gradient_checkpointing=True)
    assert row.loss == pytest.approx(rows[1].loss, abs=1e-5)
    assert row.one_ms is None and row.speedup is None and row.shared_ms
    record = json.loads((tmp_path / "record.json").read_text())
    assert record["ranks"] == 2 and len(record["rows"]) == 2


def test_the_first_exception_of_all_ranks_is_reported(tmp_path: Path) -> None:
    """Not its consequence on a rank that ended before, nor what libraries print when the process ends."""
    for rank in range(3):
        (tmp_path / f"errors-{rank}").write_text("Traceback\nsome error\n[W1128 ProcessGroup.cpp] Warning: not destroyed\n")
    with pytest.raises(RuntimeError, match=r"^bench ranks: rank 1 failed with 1: \[W1128"):
        _raise_failure(tmp_path, 1, 1)
    for rank, error in ((2, MemoryError("16 GB\nof 8 GB")), (0, ValueError("connection closed"))):
        _report_failure(tmp_path, rank, error)
    with pytest.raises(RuntimeError, match=r"^bench ranks: rank 2 failed: MemoryError: 16 GB\nof 8 GB$"):
        _raise_failure(tmp_path, 0, -6)
    with pytest.raises(RuntimeError, match=r"^bench ranks: rank 1 failed with -9: "):
        _raise_failure(tmp_path, 1, -9)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_rank_that_fails_ends_the_benchmark_with_its_exception() -> None:
    with pytest.raises(RuntimeError, match=r"rank [01] failed: ValueError: .*3 tokens, and each of 2 ranks") as failure:
        run_ranks_bench((3,), ranks=2, device="cpu", parts=("operator",), alone=False)
    assert "_measure_on_rank" in str(failure.value.__cause__)
