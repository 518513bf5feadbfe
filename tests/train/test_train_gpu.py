"""Training tests that need a GPU: no synchronization between log points, bad updates skipped, exact resumes.

Also: graphs replay any documents, and a stage switch compiles nothing.
"""

from __future__ import annotations

import gc
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from document_batches import SEP, make_document_batch
from safetensors.torch import load_file
from stage_config import make_staged_config
from torch import Tensor, nn

from nsa_lab.attention import dense
from nsa_lab.config import ConfigError, RunConfig
from nsa_lab.data import Batch
from nsa_lab.runs import events, lifecycle
from nsa_lab.train.build import Builders, TrainContext, build_context, build_model, compile_blocks, set_determinism
from nsa_lab.train.distributed import World
from nsa_lab.train.packing import make_spans
from nsa_lab.train.preflight import startup_checks
from nsa_lab.train.step import NON_FINITE, Readback, Stepper, make_optimizer
from nsa_lab.train.trainer import Trainer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

Tiny, Make = Callable[..., RunConfig], Callable[..., Path]

# Heads and widths that the kernels support.
GPU: dict[str, Any] = {
    "model": {"dim": 128, "n_layers": 2, "n_heads": 4, "n_kv_groups": 2, "d_k": 32, "d_v": 32},
    "nsa": {"l": 32, "d": 16, "l_sel": 64, "n_sel": 4, "w": 64},
    "seq_len": 256,
    "data": {"source": "synthetic", "max_tokens": 100_000, "val_fraction": 0.3},
}
RUNTIME = {"device": "cuda", "precision": "bf16"}


@pytest.fixture(params=["adamw", "muon"])
def context(make_tiny_config: Tiny, builders: Builders, request: pytest.FixtureRequest) -> TrainContext:
    config = make_tiny_config(**GPU, runtime=RUNTIME, optimizer=request.param)
    dataset = builders.data(config.data, config.model.vocab_size, config.train.seq_len, None)
    return build_context(config, World(), torch.device("cuda", 0), dataset, builders)


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_steps_do_not_wait_for_the_device(context: TrainContext) -> None:
    readback = Readback(context.device)
    pinned = [tuple(t.pin_memory() for t in context.batches.batch(n)) for n in range(6)]
    context.stepper.step(*pinned[0], 1e-3, lambda: None)
    with waiting_is_an_error():
        for step, pair in enumerate(pinned[1:], 1):
            readback.push(step, context.stepper.step(*pair, 1e-3, lambda: None))
            assert [number for number, _ in readback.take()] == ([step - 1] if step > 1 else [])
    assert [number for number, _ in readback.take(include_newest=True)] == [5]


def test_a_bad_update_is_skipped_on_the_device(context: TrainContext) -> None:
    def state() -> list[torch.Tensor]:
        moments = [t for s in context.optimizer.state.values() for t in s.values()]
        return [t.detach().clone() for t in (*context.model.parameters(), *moments)]

    context.stepper.step(*context.batches.batch(0), 1e-3, lambda: None)
    before = state()
    handle = context.model.head.register_forward_hook(lambda module, inputs, output: output * float("nan"))
    assert context.stepper.step(*context.batches.batch(1), 1e-3, lambda: None)[NON_FINITE].item() == 1
    handle.remove()
    assert context.stepper.step(*context.batches.batch(2), 1e-3, lambda: None)[NON_FINITE].item() == 1
    assert all(torch.equal(a, b) for a, b in zip(before, state(), strict=True))


def test_preflight_passes_and_the_peak_is_near_the_estimate(context: TrainContext, tmp_path: Path) -> None:
    result = list(startup_checks.run_preflight(context, tmp_path))
    assert [(c.name, c.value) for c in result if not c.ok] == []


def losses(run_dir: Path) -> list[float]:
    return [e["loss"] for e in events.get_step_events(events.read_events(run_dir))]


@pytest.mark.parametrize(("backend", "optimizer"), [("torch", "adamw"), ("auto", "adamw"), ("auto", "muon")])
def test_in_deterministic_mode_a_resumed_run_is_the_same_bit_for_bit(
    new_run: Make, train: Callable[..., int], backend: str, optimizer: str
) -> None:
    run_dir = new_run(**GPU, optimizer=optimizer, runtime=RUNTIME | {"deterministic": True, "backend": backend})
    assert train(run_dir) == 0
    final = run_dir / "checkpoints/step-00000012"
    expected, recorded = load_file(final / "model.safetensors"), losses(run_dir)
    for step in (10, 12):
        shutil.rmtree(run_dir / f"checkpoints/step-{step:08d}")
    assert train(run_dir) == 0
    result = load_file(final / "model.safetensors")
    assert all(torch.equal(expected[name], result[name]) for name in expected)
    assert losses(run_dir) == recorded


def test_in_fast_mode_a_resumed_run_has_equal_data_and_close_losses(new_run: Make, train: Callable[..., int]) -> None:
    run_dir = new_run(**GPU, runtime=RUNTIME)
    assert train(run_dir) == 0
    recorded = losses(run_dir)
    for step in (10, 12):
        shutil.rmtree(run_dir / f"checkpoints/step-{step:08d}")
    assert train(run_dir) == 0
    assert losses(run_dir) == pytest.approx(recorded, rel=5e-3)


# Graphs with document masking.

RECIPE = {"rotary_share": 0.5, "matching_heads": 1, "selection_loss": 0.1, "indexer_block": 8}
MODELS: dict[str, dict[str, Any]] = {"nsa": {}, "recipe": RECIPE, "dense": {"attention": "dense"}}
# Document lengths of the four rows of a step, alternately few and many, which need two graphs.
LENGTHS = [
    [[256], [100, 156], [255, 1], [256]],
    [[16] * 16, [256], [200, 56], [3, 253]],
    [[1, 255], [70, 186], [256], [90, 166]],
    [[256], [60, 4, 192], [32] * 8, [5] * 8 + [216]],
    [[128, 128], [64, 192], [10, 246], [256]],
    [[256]] * 3 + [[10] * 20 + [56]],
]
BATCHES = [make_document_batch(lengths, seed) for seed, lengths in enumerate(LENGTHS)]


@pytest.fixture
def deterministic() -> Iterator[None]:
    set_determinism(True)
    yield
    set_determinism(False)


def stepper_of(make_tiny_config: Tiny, *, graph: bool, compiled: bool = False, **changes: Any) -> tuple[nn.Module, Stepper]:
    """Return the bf16 model and its stepper, without a data set; two micro-batches of two rows unless `changes` differ."""
    grouped = {"batch_size": 4, "accumulate_grad_batches": 1, "micro_batch_size": 2}
    config = make_tiny_config(**GPU | grouped | {"runtime": RUNTIME} | changes)
    device = torch.device("cuda", 0)
    model = build_model(config, device)
    if compiled:
        compile_blocks(model)
    optimizer = make_optimizer(model, config.train)
    auxiliary = model.auxiliary_loss if config.model.has_selection_loss else None
    settings: dict[str, Any] = {
        "device": device,
        "use_bf16": True,
        "world": World(),
        "auxiliary_loss": auxiliary,
        "separator": SEP,
    }
    return model, Stepper(model, model, optimizer, config.train, use_graph=lambda stage: graph, **settings)


def masked_step(stepper: Stepper, batch: Batch) -> Tensor:
    return stepper.step(*batch[:2], 1e-3, lambda: None, weights=batch.weights, documents=batch.documents)


@pytest.mark.parametrize("compiled", [False, True], ids=["plain", "compiled"])
@pytest.mark.parametrize("micro", [4, 2])
@pytest.mark.parametrize("kind", MODELS)
def test_replays_with_any_documents_equal_steps_without_graphs(
    make_tiny_config: Tiny, deterministic: None, kind: str, micro: int, compiled: bool
) -> None:
    """Losses by kind, gradient norm and final weights agree, with two alternating capacities."""
    if kind == "dense" and dense._load_varlen_attn() is None:
        pytest.skip("this torch has no attention over documents of any lengths")
    result, weights = [], []
    for graph in (False, True):
        torch.compiler.reset()
        changes = {"model": GPU["model"] | MODELS[kind], "micro_batch_size": micro}
        model, stepper = stepper_of(make_tiny_config, graph=graph, compiled=compiled, **changes)
        result.append(torch.stack([masked_step(stepper, batch) for batch in BATCHES]).cpu())
        weights.append(nn.utils.parameters_to_vector(model.parameters()).detach().cpu())
        if graph:
            capacities = {make_spans(batch.split(micro))[0].capacity for batch in BATCHES}
            assert len(stepper._graphs._captured_steps) == len(capacities) == 2
    assert result[0].isfinite().all() and (result[0][:, NON_FINITE] == 0).all()
    torch.testing.assert_close(result[1], result[0], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(weights[1], weights[0], rtol=0, atol=1e-4)


def test_a_replay_for_other_documents_does_not_wait_for_the_device(make_tiny_config: Tiny) -> None:
    _, stepper = stepper_of(make_tiny_config, graph=True)
    pinned = [Batch(*(x.pin_memory() for x in batch[:3]), batch.documents) for batch in BATCHES]
    for batch in pinned[:2]:  # the first call captures and may synchronize
        masked_step(stepper, batch)
    with waiting_is_an_error():
        results = [masked_step(stepper, batch) for batch in pinned[2:]]
    assert torch.stack(results).isfinite().all()


def test_a_backend_that_loops_over_documents_is_rejected(make_tiny_config: Tiny) -> None:
    _, stepper = stepper_of(make_tiny_config, graph=True, runtime=RUNTIME | {"backend": "torch"})
    recorded = r"(replayed with other documents|cannot be captured).*set cuda_graph: false in runtime or in the stage"
    with pytest.raises(ConfigError, match=recorded):
        masked_step(stepper, BATCHES[0])


def test_graphs_share_their_memory(make_tiny_config: Tiny) -> None:
    """Except gradients, a batch, tables and the workspace of a stream."""
    _, stepper = stepper_of(make_tiny_config, graph=True, seq_len=2048, micro_batch_size=4)
    gc.collect()  # do not count the memory of earlier tests
    torch.cuda.empty_cache()
    reserved = [torch.cuda.memory_reserved()]
    for rows in ([[2048]] * 4, [[64] * 32] * 4):
        masked_step(stepper, make_document_batch(rows, 0))
        torch.cuda.empty_cache()
        reserved.append(torch.cuda.memory_reserved())
    before, first, second = reserved
    assert second - first < (first - before) / 2


def assert_graphs_change_no_loss(new: Callable[[bool], Path], train: Callable[..., int]) -> None:
    """Assert equal losses of the runs of `new(use_graphs)`, also after a resume of the one with graphs."""
    recorded = []
    for graph in (False, True):
        run_dir = new(graph)
        assert train(run_dir) == 0
        recorded.append(losses(run_dir))
    assert recorded[1] == pytest.approx(recorded[0], rel=1e-4)
    for step in (10, 12):
        shutil.rmtree(run_dir / f"checkpoints/step-{step:08d}")
    assert train(run_dir) == 0
    assert losses(run_dir) == pytest.approx(recorded[1], rel=1e-6)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_masked_run_has_the_losses_of_one_without_graphs(
    new_run: Make, train: Callable[..., int], tmp_path: Path, optimizer: str
) -> None:
    """With preflight, evaluations, statistics and saves between the steps, and a resume."""
    rng, path = random.Random(7), tmp_path / "texts.jsonl"
    lines = ["".join(rng.choices("abcdefgh", k=rng.choice([1, 5, 30, 90, 400]))) for _ in range(1500)]
    path.write_text("\n".join(f'{{"text": "{line}"}}' for line in lines))
    data = {"source": "local", "path": str(path), "max_tokens": None, "documents": "mask"}
    runtime = RUNTIME | {"deterministic": True}
    assert_graphs_change_no_loss(
        lambda graph: new_run(**GPU | {"data": data, "optimizer": optimizer}, runtime=runtime | {"cuda_graph": graph}),
        train,
    )


# Stages.

STAGES: list[dict[str, Any]] = [
    {"steps": 4, "seq_len": 256, "batch_size": 4, "lr": 1e-3},
    {"steps": 4, "seq_len": 384, "batch_size": 2, "accumulate_grad_batches": 2, "lr": 1e-3, "rope_theta": 5e4},
    {"steps": 4, "seq_len": 1024, "batch_size": 1, "lr": 1e-3},
]


def staged_run(make_tiny_config: Tiny, folder: Path, model: dict[str, Any], **runtime: Any) -> Path:
    changes = {"model": GPU["model"] | model, "nsa": GPU["nsa"], "data": GPU["data"], "runtime": RUNTIME | runtime}
    return lifecycle.create_run(make_staged_config(make_tiny_config(**changes), STAGES), folder)


@pytest.mark.parametrize("kind", MODELS)
def test_a_stage_switch_compiles_no_block_and_no_kernel(
    make_tiny_config: Tiny, train: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Count, in the first step of each later stage, frames traced by torch.compile and kernels compiled by Triton."""
    knobs = pytest.importorskip("triton.knobs")
    kernels, result, one = [], [], Trainer._train_step
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", lambda *_, fn, **__: kernels.append(fn.name))
    torch.compiler.reset()

    def counted(self: Trainer, step: int, batches: Any) -> None:
        before = torch._dynamo.utils.counters["stats"]["unique_graphs"], len(kernels)
        one(self, step, batches)
        if step in (5, 9):
            graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"] - before[0]
            result.append((step, graphs, kernels[before[1] :]))

    monkeypatch.setattr(Trainer, "_train_step", counted)
    assert train(staged_run(make_tiny_config, tmp_path, MODELS[kind], compile=True)) == 0
    assert result == [(5, 0, []), (9, 0, [])]


def test_stages_with_graphs_have_the_losses_of_those_without(
    make_tiny_config: Tiny, train: Callable[..., int], tmp_path: Path
) -> None:
    """Also after a resume in the second stage."""
    assert_graphs_change_no_loss(
        lambda graph: staged_run(make_tiny_config, tmp_path, {}, deterministic=True, cuda_graph=graph), train
    )
