"""Weights that are NaN or infinite are found in a file without torch."""

from __future__ import annotations

import math
from pathlib import Path

import fake_run
import pytest
import torch
from safetensors.torch import save, save_file

from nsa_lab.health import examine
from nsa_lab.runs import finite_weights


def test_values_that_are_not_finite_are_counted_in_every_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finite_weights, "CHUNK_VALUES", 4)
    file = tmp_path / "model.safetensors"
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        limits = torch.finfo(dtype)
        finite = torch.tensor([[0.0, -0.0, limits.max], [limits.min, limits.tiny, 1.5], [-2.0, 3.0, 4.0]], dtype=dtype)
        counts = torch.full((2,), 2**31 - 1, dtype=torch.int32)  # all bits of an exponent of float32 are set
        save_file({"counts": counts, "w": finite, "z": finite[:0]}, file, metadata={"format": "pt"})
        assert finite_weights.find_nonfinite_weights(file) is None
        for value in (math.nan, -math.nan, math.inf, -math.inf):
            spoiled = finite.clone()
            spoiled.view(-1)[[0, 5, 8]] = value
            save_file({"a": finite, "w": spoiled}, file)
            assert finite_weights.find_nonfinite_weights(file) == "w: 3 of 9 values are NaN or infinite"
    for content in (b"", b"\xff" * 8, (4).to_bytes(8, "little") + b"nope"):
        file.write_bytes(content)
        with pytest.raises(ValueError):
            finite_weights.find_nonfinite_weights(file)


def test_health_reports_weights_that_are_not_finite(tmp_path: Path) -> None:
    run_dir = fake_run.write_run(tmp_path)
    fake_run.write_checkpoint(run_dir, 100)
    fake_run.write_checkpoint(run_dir, 200, save({"head.weight": torch.tensor([1.0, -math.nan])}))
    verdict = next(verdict for verdict in examine(run_dir).verdicts if verdict.name == "checkpoints")
    assert verdict.ok is False and verdict.text == "step 200: head.weight: 1 of 2 values are NaN or infinite"
