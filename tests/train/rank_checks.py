"""Checks that need several ranks: `python rank_checks.py STORE RANK SIZE NAME ...` runs one of them on one rank.

`run_ranks` starts the ranks. A check is a function of the world; it raises on the rank where it fails.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import itertools
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from nsa_lab.config import RunConfig
from nsa_lab.data import prepare
from nsa_lab.model import NSATransformer
from nsa_lab.model.sharded_files import INDEX, read_weights
from nsa_lab.runs.checkpoint_files import find_problems
from nsa_lab.train import checkpoint_state, validation
from nsa_lab.train.build import Builders, TrainContext, build_context, build_model
from nsa_lab.train.checkpoint import CheckpointStore
from nsa_lab.train.checkpoint_writer import CheckpointWriter
from nsa_lab.train.distributed import World
from nsa_lab.train.guard import Finding
from nsa_lab.train.postmortem import collect_postmortem
from nsa_lab.train.preflight.startup_checks import check_causality, check_documents, check_initial_loss, run_preflight
from nsa_lab.train.sharded_checkpoint import ShardFileWriter
from nsa_lab.train.validation import evaluate_held_out

CPU = torch.device("cpu")
# 3 and 4 ranks do not divide these widths, and a rank may have no row of the smallest weights.
ODD_MODEL: dict[str, Any] = {
    "dim": 20,
    "n_layers": 2,
    "n_heads": 4,
    "n_kv_groups": 2,
    "d_k": 6,
    "d_v": 10,
    "mlp_hidden": 22,
    "vocab_size": 258,
    "rotary_share": 1.0,
    "matching_heads": 1,
    "selection_loss": 0.1,
    "indexer_block": 4,
    "ngrams": 3,
    "ngram_rows": 101,
    "ngram_width": 10,
    "nsa": {"l": 8, "d": 4, "l_sel": 8, "n_sel": 3, "w": 16, "phi": "mlp"},
}


def run_ranks(name: str, n_ranks: int, *arguments: object, local_size: int = 0) -> list[str]:
    """Run a check of this file on `n_ranks` ranks and return their outputs."""
    from gloo_ranks import start_ranks  # a rank cannot import it

    return start_ranks(__file__, n_ranks, name, local_size, *arguments)


def make_config(folder: Path | None = None, **sections: dict[str, Any]) -> RunConfig:
    """Return the configuration of a run of the odd model, with changed sections."""
    defaults: dict[str, dict[str, Any]] = {
        "model": ODD_MODEL,
        "runtime": {"device": "cpu", "heartbeat_s": 60.0},
        "data": {"source": "synthetic", "max_tokens": 20_000, "val_fraction": 0.3},
        "train": {"steps": 6, "seq_len": 40, "batch_size": 4, "accumulate_grad_batches": 3, "lr": 1e-2, "save_every": 0},
    }
    merged = {name: {**values, **sections.get(name, {})} for name, values in defaults.items()}
    merged["nsa"] = {**merged["model"].pop("nsa", {}), **sections.get("nsa", {})} if "nsa" in merged["model"] else {}
    merged["model"] = {key: value for key, value in merged["model"].items() if key != "nsa"}
    return RunConfig.from_dict({"name": "ranks", **merged})


def build_float64_model(config: RunConfig, device: torch.device) -> NSATransformer:
    """Return the model in float64, in which rounding does not change the selected blocks."""
    return build_model(config, device).double()


def make_context(world: World, folder: Path, builders: Builders | None = None, **sections: dict[str, Any]) -> TrainContext:
    """Return a context of the odd model. `folder`: cache of the data, which all ranks share."""
    config = make_config(**sections)
    dataset = prepare(config.data, config.model.vocab_size, config.train.seq_len, cache=folder / f"cache-{world.rank}")
    return build_context(config, world, CPU, dataset, builders or Builders())


def take_steps(context: TrainContext, steps: range) -> list[float]:
    """Take optimizer steps; return the losses."""
    losses = []
    for step in steps:
        stage = context.enter_stage(step)
        start, count = context.world.get_sequence_share(stage.sequences_per_step)
        inputs, targets, weights, documents = context.batches.weighted_batch(step - 1, start, count)
        result = context.stepper.step(inputs, targets, stage.lr, lambda: None, weights=weights, documents=documents)
        losses.append(result[0].item())
    return losses


def gather_weights(context: TrainContext) -> dict[str, Tensor]:
    full_tensor = context.world.full_tensor
    return {name: full_tensor(value).clone() for name, value in context.model.state_dict().items()}


class CollectiveCounter(TorchDispatchMode):
    """Counts the collectives of this process by name while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.counts[func._schema.name.removeprefix("c10d::")] += 1
        return func(*args, **(kwargs or {}))


def check_initial_weights(world: World) -> None:
    """Sharded ranks start with the weights of one rank, and no rank holds all of them."""
    from torch.distributed.tensor import Replicate, Shard

    config = make_config().model
    model = world.build_model(lambda: NSATransformer(config, device=CPU, seed=5))
    assert all(parameter.is_meta for parameter in model.parameters())
    world.wrap(model, CPU, seed=5, use_bf16=False)
    expected = NSATransformer(config, seed=5).state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(world.full_tensor(value), expected[name]), name
        assert value.placements == ((Shard(0),) if world.parallel == "fsdp" else (Replicate(), Shard(0))), name
    held = sum(parameter.to_local().numel() for parameter in model.parameters())
    assert held < 1.5 * sum(value.numel() for value in expected.values()) / world.n_shards


def check_training(world: World, folder: str, optimizer: str) -> None:
    """Sharded ranks have the losses and weights of one rank."""
    sections = {"runtime": {"parallel": world.parallel}, "train": {"optimizer": optimizer}}
    context = make_context(world, Path(folder), **sections)
    losses, weights = take_steps(context, range(1, 6)), gather_weights(context)
    single = make_context(World(), Path(folder), train={"optimizer": optimizer})
    assert torch.tensor(losses).allclose(torch.tensor(take_steps(single, range(1, 6))), atol=1e-5, rtol=0)
    for name, value in single.model.state_dict().items():
        # AdamW divides small moments by each other, so rounding differences of a gradient grow.
        assert torch.allclose(weights[name], value, atol=2e-3, rtol=0), name
        assert (weights[name] - value).abs().mean() < 1e-5, name


# Sections of runs in which several ranks share each sequence, with lengths that no number of ranks divides. Of the four
# blocks of a query, one is selected by importance.
SHARED_RUNS: dict[str, dict[str, dict[str, Any]]] = {
    "one sequence": {"train": {"seq_len": 83, "batch_size": 1, "accumulate_grad_batches": 1}},
    "documents, two micro-batches": {
        "train": {"seq_len": 83, "batch_size": 2, "accumulate_grad_batches": 1, "micro_batch_size": 1},
        "data": {"source": "stdlib", "documents": "mask"},
        "runtime": {"context_parallel": 2},
    },
    "at least two ranks": {
        "train": {"seq_len": 59, "batch_size": 6, "accumulate_grad_batches": 2},
        "data": {"source": "stdlib", "documents": "mask"},
        "runtime": {"context_parallel": 2},
    },
}


def check_shared_sequences(world: World, folder: str, only: str = "") -> None:
    """Ranks that share each sequence have the losses, held-out losses and weights of one rank.

    Everything is computed in float64: in float32, another number of ranks would round importances to another selection, and
    another processor losses to other sums.
    """
    builders, n_steps, limit = Builders(build_float64_model), 4, 1e-9
    for name, sections in SHARED_RUNS.items() if not only else [(only, SHARED_RUNS[only])]:
        runtime = {"parallel": world.parallel, **sections.get("runtime", {})}
        sections = {**sections, "nsa": {"n_sel": 4}}
        context = make_context(world, Path(folder), builders, **{**sections, "runtime": runtime})
        assert context.stepper.context_size > 1, name
        single = make_context(World(), Path(folder), builders, **{**sections, "runtime": {}})
        # A sharded model draws its initial weights in float64, one rank in float32.
        for key, value in single.model.named_parameters():
            context.world.copy_rows(context.model.get_parameter(key).detach(), value.detach())
        losses = [take_steps(some, range(1, n_steps + 1)) for some in (context, single)]
        assert losses[0] == pytest.approx(losses[1], abs=limit), name
        actual, expected = (
            evaluate_held_out(some, some.get_evaluation(n_steps), lambda: None) for some in (context, single)
        )
        assert actual.loss == pytest.approx(expected.loss, abs=limit), name
        assert actual.first_token_loss == pytest.approx(expected.first_token_loss, abs=limit), name
        # Recorded with six digits.
        assert actual.window_losses == pytest.approx(expected.window_losses, abs=limit + 1.1e-6), name
        weights = gather_weights(context)
        for key, value in single.model.state_dict().items():
            assert (weights[key] - value).abs().mean() < limit, (name, key)


def check_shared_preflight(world: World, folder: str) -> None:
    """Checks and a diagnosis of ranks that share sequences have the results of one rank, without its whole sequences."""
    sections: dict[str, Any] = {
        # Longer than the probe, of which every rank computes all 256 tokens.
        "train": {"seq_len": 521, "batch_size": 1, "accumulate_grad_batches": 1},
        "data": {"source": "stdlib", "documents": "mask"},
    }
    context = make_context(world, Path(folder), **sections, runtime={"parallel": world.parallel})
    lengths, validation.MAX_MEASURED_TOKENS = set[int](), 64
    hook = context.model.blocks[0].register_forward_pre_hook(lambda module, inputs: lengths.add(inputs[0].shape[1]))
    checks = {check.name: check for check in run_preflight(context, Path(folder))}
    assert all(check.ok for check in checks.values()), checks
    diagnosis = collect_postmortem(context, Finding("test", 1, 0.0, 0.0, "halt", ""), 0)
    assert max(lengths) <= max(256, 522 // world.size), lengths
    hook.remove()
    single = make_context(World(), Path(folder), **sections)
    assert checks["initial_loss"].value == check_initial_loss(single).value
    loss = torch.tensor(float(diagnosis["micro_batch_losses"][0])) / world.size
    expected = float(collect_postmortem(single, Finding("test", 1, 0.0, 0.0, "halt", ""), 0)["micro_batch_losses"][0])
    assert world.all_reduce(loss).item() == pytest.approx(expected, abs=0.02), "ranks have one token more or less"
    # Every rank finds that a token reaches earlier ones and other documents.
    context.model.blocks[0].mlp.register_forward_hook(lambda module, inputs, output: output + 1e-3 * output.mean(1, True))
    assert not check_causality(context).ok and not check_documents(context).ok


def check_gradient_exchange(world: World, folder: str) -> None:
    """Gradients are exchanged once per step, not per micro-batch; a dry run leaves nothing to the next step."""
    context = make_context(world, Path(folder), runtime={"parallel": world.parallel})
    n_groups = len(context.model.get_layers()) - 1  # the norm and the head are one group
    with CollectiveCounter() as counter:
        first = take_steps(context, range(1, 2))
    assert counter.counts["_reduce_scatter_base_"] == n_groups, counter.counts
    assert counter.counts["_allgather_base_"] > 2 * n_groups, "there are several micro-batches"
    other = make_context(world, Path(folder), runtime={"parallel": world.parallel})
    start, count = world.get_sequence_share(12)
    other.stepper.dry_run(other.batches.weighted_batch(7, start, count))
    assert take_steps(other, range(1, 2)) == first
    assert all(map(torch.equal, gather_weights(other).values(), gather_weights(context).values()))


def check_bf16(world: World, folder: str) -> None:
    """Weights are gathered in bfloat16; the residual stream, gradients and the optimizer's weights are float32."""
    precision = {"precision": "bf16"}
    context = make_context(world, Path(folder), runtime={**precision, "parallel": world.parallel})
    seen: dict[str, torch.dtype] = {}

    def record_weight(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        seen["weight"] = module.up.weight.dtype

    def record_stream(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        seen["input"], seen["output"] = inputs[0].dtype, output[0].dtype

    context.model.blocks[1].mlp.register_forward_pre_hook(record_weight)
    context.model.blocks[1].register_forward_hook(record_stream)
    losses = take_steps(context, range(1, 6))
    assert seen == {"weight": torch.bfloat16, "input": torch.float32, "output": torch.float32}
    assert {parameter.dtype for parameter in context.model.parameters()} == {torch.float32}
    assert {parameter.grad.dtype for parameter in context.model.parameters() if parameter.grad is not None} == {
        torch.float32
    }
    exact = take_steps(make_context(World(), Path(folder)), range(1, 6))
    single = take_steps(make_context(World(), Path(folder), runtime=precision), range(1, 6))
    errors = [max(abs(a - b) for a, b in zip(exact, some, strict=True)) for some in (losses, single)]
    assert errors[0] <= max(3 * errors[1], 2e-3), errors


def check_bad_step(world: World, folder: str, optimizer: str) -> None:
    """A gradient that is not finite on one rank changes nothing on any rank."""
    context = make_context(world, Path(folder), runtime={"parallel": world.parallel}, train={"optimizer": optimizer})
    take_steps(context, range(1, 3))
    before = gather_weights(context)
    if world.rank == 1:
        context.model.register_forward_hook(lambda module, inputs, output: output * float("nan"))
    take_steps(context, range(3, 4))
    assert all(map(torch.equal, gather_weights(context).values(), before.values()))


def check_matrix_exchange(world: World) -> None:
    """Every rank gets its rows of what the owner of a matrix computes, also if it has none."""
    from torch.distributed.tensor import Shard, distribute_tensor

    from nsa_lab.train.fsdp import make_mesh
    from nsa_lab.train.matrix_exchange import exchange_matrices

    mesh = make_mesh(CPU, world.size, world.n_shards)
    shapes = [(7, 3), (2, 5), (12, 4), (1, 9), (5, 5), (8, 8)]
    matrices = [
        torch.arange(rows * columns, dtype=torch.float64).view(rows, columns) + 100 * i
        for i, (rows, columns) in enumerate(shapes)
    ]
    placements = [Shard(0)]
    sharded = [distribute_tensor(matrix, mesh, placements) for matrix in matrices]
    computed = []

    def function(numbers: list[int], values: list[Tensor]) -> list[Tensor]:
        computed.extend(numbers)
        assert all(torch.equal(value, matrices[i]) for i, value in zip(numbers, values, strict=True))
        return [-value - i for i, value in zip(numbers, values, strict=True)]

    results = exchange_matrices(sharded, [matrix.to_local() for matrix in sharded], function)
    for i, (result, matrix) in enumerate(zip(results, matrices, strict=True)):
        assert torch.equal(result, distribute_tensor(-matrix - i, mesh, placements).to_local())
    all_computed: list[Any] = [None] * world.size
    torch.distributed.all_gather_object(all_computed, computed)
    assert sorted(itertools.chain(*all_computed)) == list(range(len(shapes))), "each matrix has one owner"


def check_portable_checkpoint(world: World, folder: str, action: str, optimizer: str) -> None:
    """Save after 3 steps, or load that and compare with one rank's state and next steps."""
    sections = {"runtime": {"parallel": world.parallel}, "train": {"optimizer": optimizer}}
    context, store = make_context(world, Path(folder), **sections), CheckpointStore(Path(folder) / "checkpoints")
    state = {"step": 3, "number": 0.5}
    if action == "save":
        take_steps(context, range(1, 4))
        writer = CheckpointWriter(context, store)
        writer.start(3, state, {"config_hash": "c"})
        saved = writer.finish()
        assert (saved is not None) == world.is_first
        assert store.list_steps() == [3] and not find_problems(store.get_path(3))
        assert (store.get_path(3) / INDEX).is_file() == world.is_sharded
        return
    checkpoint_state.restore(store.get_path(3), context)
    assert checkpoint_state.read_state(store.get_path(3)) == state
    single = make_context(World(), Path(folder), train={"optimizer": optimizer})
    take_steps(single, range(1, 4))
    for name, value in gather_weights(context).items():
        assert torch.allclose(value, single.model.state_dict()[name], atol=2e-3, rtol=0), name
    losses = [take_steps(some, range(4, 7)) for some in (context, single)]
    assert torch.tensor(losses[0]).allclose(torch.tensor(losses[1]), atol=1e-5, rtol=0)


def check_equal_state(world: World, first: str, second: str) -> None:
    """Two checkpoints have the same weights and moments to the bit, read by these ranks."""
    states = []
    for folder in (first, second):
        context = make_context(world, Path(folder).parent, runtime={"parallel": world.parallel})
        checkpoint_state.restore(Path(folder), context)
        full = world.full_tensor
        moments = {
            f"{name} {key}": full(value).clone()
            for name, parameter in context.model.named_parameters()
            for key, value in context.optimizer.state.get(parameter, {}).items()
        }
        states.append(gather_weights(context) | moments)
    assert states[0].keys() == states[1].keys() and len(states[0]) > 60
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


def check_background_save(world: World, folder: str) -> None:
    """A checkpoint has the state of its step, although training continues while it is written."""
    context, store = make_context(world, Path(folder), runtime={"parallel": world.parallel}), CheckpointStore(Path(folder))
    take_steps(context, range(1, 3))
    expected, is_released, write_data = gather_weights(context), threading.Event(), ShardFileWriter.write_data

    def wait_and_write(*arguments: Any) -> Any:
        assert is_released.wait(60)
        return write_data(*arguments)

    ShardFileWriter.write_data = wait_and_write
    writer = CheckpointWriter(context, store)
    writer.start(2, {"step": 2}, {})
    take_steps(context, range(3, 5))
    assert writer.poll() is None and store.list_steps() == []
    is_released.set()
    writer.finish()
    assert not any(torch.equal(value, expected[name]) for name, value in gather_weights(context).items())
    saved = read_weights(store.get_path(2), CPU)
    assert saved.keys() == expected.keys() and all(torch.equal(saved[name], expected[name]) for name in expected)


def check_failed_save(world: World, folder: str) -> None:
    """If one rank cannot write, all ranks fail, nothing is left, and the next save succeeds."""
    context, store = make_context(world, Path(folder), runtime={"parallel": world.parallel}), CheckpointStore(Path(folder))
    writer, write_data = CheckpointWriter(context, store), ShardFileWriter.write_data
    for number, failure in enumerate((OSError(errno.ENOSPC, "No space left on device"), RuntimeError("torn"), None)):

        def write(*arguments: Any, failure: Exception | None = failure) -> Any:
            if failure and world.rank == 1:
                raise failure
            return write_data(*arguments)

        ShardFileWriter.write_data = write
        writer.start(number, {"step": number}, {})
        try:
            writer.finish()
            assert failure is None, "a rank failed"
        except OSError as error:
            assert failure is not None
            expected = ("the disk is full: a checkpoint needs ", "rank 1 could not write its shard: RuntimeError: torn")
            if world.is_first:
                assert str(error).startswith(expected[number]), error
                assert not list(store.folder.glob(".saving-*"))
    assert store.list_steps() == [2]


def check_memory_of_save(world: World, folder: str) -> None:
    """A save needs at most 1.5 times the shard of a rank in host memory, on top of training."""
    # Return freed memory to the system at once: M_MMAP_THRESHOLD of glibc.
    ctypes.CDLL(None).mallopt(-3, 1 << 16)
    shape = {"dim": 512, "mlp_hidden": 8192, "n_layers": 2, "ngrams": 0}
    runtime = {"parallel": world.parallel}
    context = make_context(world, Path(folder), model={**ODD_MODEL, **shape}, runtime=runtime)
    take_steps(context, range(1, 2))
    tensors = [*context.model.parameters(), *(v for s in context.optimizer.state.values() for v in s.values() if v.ndim)]
    shard = sum(4 * (tensor.to_local() if world.is_sharded else tensor).numel() for tensor in tensors)
    store = CheckpointStore(Path(folder))
    writer, used = CheckpointWriter(context, store), []
    for step in range(3):  # the first save also imports
        gc.collect()
        before = read_memory()
        with MemorySampler() as sampler:
            writer.start(step, {"step": step}, {})
            writer.finish()
        used.append((sampler.peak - before) / shard)
    n_bytes = sum(path.stat().st_size for path in store.get_path(2).iterdir())
    print(f"peak of three saves {used} of a shard of {shard:,} bytes; {n_bytes:,} bytes in all files", flush=True)
    assert max(used) <= 1.5 and n_bytes >= (world.size - 0.1) * shard, used


def read_memory() -> int:
    """Return the resident memory of this process in bytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


class MemorySampler:
    """Records the peak of the resident memory while it is active, every millisecond."""

    def __enter__(self) -> MemorySampler:
        self.peak, self._is_done = read_memory(), threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def _sample(self) -> None:
        while not self._is_done.wait(0.001):
            self.peak = max(self.peak, read_memory())

    def __exit__(self, *_: object) -> None:
        self._is_done.set()
        self._thread.join()


CHECKS: dict[str, Callable[..., None]] = {
    name.removeprefix("check_"): value for name, value in list(globals().items()) if name.startswith("check_")
}


def main(store: str, rank: str, size: str, name: str, local_size: str, *arguments: str) -> None:
    torch.set_num_threads(1)
    world = World(int(rank), int(size), int(rank), int(local_size), Path(store), "hsdp" if int(local_size) else "fsdp")
    if name.endswith("_ddp"):
        name, world = name.removesuffix("_ddp"), replace(world, parallel="ddp")
    world.init_process_group(CPU)
    try:
        CHECKS[name](world, *arguments)
    finally:
        world.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
