"""What only a GPU can show: nothing waits for it between log points, bad updates are skipped on it, resumes are exact."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from nsa_lab.config import RunConfig
from nsa_lab.runs import events
from nsa_lab.train.distributed import World
from nsa_lab.train.parts import Builders, Parts, assemble
from nsa_lab.train.preflight import checks
from nsa_lab.train.step import BAD, Readback

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

Tiny, Make = Callable[..., RunConfig], Callable[..., Path]

# Heads and widths that the kernels take.
GPU: dict[str, Any] = {
    "model": {"dim": 128, "n_layers": 2, "n_heads": 4, "n_kv_groups": 2, "d_k": 32, "d_v": 32},
    "nsa": {"l": 32, "d": 16, "l_sel": 64, "n_sel": 4, "w": 64},
    "seq_len": 256,
    "data": {"source": "synthetic", "max_tokens": 100_000, "val_fraction": 0.3},
}
RUNTIME = {"device": "cuda", "precision": "bf16"}


@pytest.fixture(params=["adamw", "muon"])
def parts(tiny: Tiny, builders: Builders, request: pytest.FixtureRequest) -> Parts:
    config = tiny(**GPU, runtime=RUNTIME, optimizer=request.param)
    dataset = builders.data(config.data, config.model.vocab_size, config.train.seq_len, None)
    return assemble(config, World(), torch.device("cuda", 0), dataset, builders)


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_steps_do_not_wait_for_the_device(parts: Parts) -> None:
    readback = Readback(parts.device)
    pinned = [tuple(t.pin_memory() for t in parts.batches.batch(n)) for n in range(6)]
    parts.stepper.step(*pinned[0], 1e-3, lambda: None)
    with waiting_is_an_error():
        for step, pair in enumerate(pinned[1:], 1):
            readback.push(step, parts.stepper.step(*pair, 1e-3, lambda: None))
            assert [number for number, _ in readback.take()] == ([step - 1] if step > 1 else [])
    assert [number for number, _ in readback.take(everything=True)] == [5]


def test_a_bad_update_is_skipped_on_the_device(parts: Parts) -> None:
    def state() -> list[torch.Tensor]:
        moments = [t for s in parts.optimizer.state.values() for t in s.values()]
        return [t.detach().clone() for t in (*parts.model.parameters(), *moments)]

    parts.stepper.step(*parts.batches.batch(0), 1e-3, lambda: None)
    before = state()
    handle = parts.model.head.register_forward_hook(lambda module, inputs, output: output * float("nan"))
    assert parts.stepper.step(*parts.batches.batch(1), 1e-3, lambda: None)[BAD].item() == 1
    handle.remove()
    assert parts.stepper.step(*parts.batches.batch(2), 1e-3, lambda: None)[BAD].item() == 1
    assert all(torch.equal(a, b) for a, b in zip(before, state(), strict=True))


def test_preflight_passes_and_the_peak_is_near_the_plan(parts: Parts, tmp_path: Path) -> None:
    found = list(checks.preflight(parts, tmp_path))
    assert [(c.name, c.value) for c in found if not c.ok] == []


def losses(run_dir: Path) -> list[float]:
    return [e["loss"] for e in events.steps(events.read_events(run_dir))]


@pytest.mark.parametrize(("backend", "optimizer"), [("torch", "adamw"), ("auto", "adamw"), ("auto", "muon")])
def test_in_deterministic_mode_a_resumed_run_is_the_same_bit_for_bit(
    new_run: Make, train: Callable[..., int], backend: str, optimizer: str
) -> None:
    run_dir = new_run(**GPU, optimizer=optimizer, runtime=RUNTIME | {"deterministic": True, "backend": backend})
    assert train(run_dir) == 0
    final = run_dir / "checkpoints/step-00000012"
    expected, told = load_file(final / "model.safetensors"), losses(run_dir)
    for step in (10, 12):
        shutil.rmtree(run_dir / f"checkpoints/step-{step:08d}")
    assert train(run_dir) == 0
    found = load_file(final / "model.safetensors")
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert losses(run_dir) == told


def test_in_fast_mode_a_resumed_run_has_the_same_data_and_nearly_the_same_losses(
    new_run: Make, train: Callable[..., int]
) -> None:
    run_dir = new_run(**GPU, runtime=RUNTIME)
    assert train(run_dir) == 0
    told = losses(run_dir)
    for step in (10, 12):
        shutil.rmtree(run_dir / f"checkpoints/step-{step:08d}")
    assert train(run_dir) == 0
    assert losses(run_dir) == pytest.approx(told, rel=5e-3)
