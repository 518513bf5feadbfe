"""Weights that are NaN or infinite are found in a file, without torch unless they are sharded."""

from __future__ import annotations

import math
import warnings
from pathlib import Path

import fake_run
import pytest
import torch
from safetensors.torch import save, save_file
from torch.distributed.checkpoint.state_dict_saver import save as save_shards

from nsa_lab.health import examine
from nsa_lab.runs import finite_weights
from nsa_lab.runs.checkpoint_files import MANIFEST, format_manifest, parse_step, read_manifest_entry
from nsa_lab.train.sharded_checkpoint import ShardFileWriter


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


@pytest.mark.slow
def test_health_reads_sharded_weights(tmp_path: Path) -> None:
    run_dir = fake_run.write_run(tmp_path)
    fake_run.write_checkpoint(run_dir, 100)
    checkpoint = fake_run.write_checkpoint(run_dir, 200)

    def read() -> tuple[bool | None, str]:
        return next((verdict.ok, verdict.text) for verdict in examine(run_dir).verdicts if verdict.name == "checkpoints")

    write_shards(checkpoint, {"weights": {"head.weight": torch.tensor([1.0, 2.0])}})
    assert read()[0]
    weights = {"a": torch.ones(3), "head.weight": torch.tensor([1.0, math.nan])}
    write_shards(checkpoint, {"weights": weights, "moments": {"a": torch.full((3,), math.nan)}})
    assert read() == (False, "step 200: head.weight: 1 of 2 values are NaN or infinite")
    (checkpoint / ".metadata").write_bytes(b"no index")
    sign(checkpoint)
    assert not read()[0] and ".metadata cannot be read (" in read()[1]


def write_shards(checkpoint: Path, tensors: dict[str, dict[str, torch.Tensor]]) -> None:
    """Replace the files of a checkpoint."""
    for path in checkpoint.iterdir():
        path.unlink()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is")  # there is one process
        save_shards(tensors, storage_writer=ShardFileWriter(checkpoint))
    (checkpoint / "state.json").write_text("{}")
    sign(checkpoint)


def sign(checkpoint: Path) -> None:
    """Write a manifest of all files."""
    files = {path.name: read_manifest_entry(path) for path in checkpoint.iterdir() if path.name != MANIFEST}
    (checkpoint / MANIFEST).write_text(format_manifest(parse_step(checkpoint), files))
