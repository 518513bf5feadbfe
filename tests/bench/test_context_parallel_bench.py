"""The benchmark of ranks that share a sequence measures only results that agree with one rank."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nsa_lab.bench.context_parallel import MAX_DIFFERENCE, run_ranks_bench


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
