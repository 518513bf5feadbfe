"""`nsa-lab bench ranks`: several ranks that share one sequence, compared with one rank: attention, and a training step.

The ranks are processes of this host, one per GPU. In every case rank 0 first computes everything while the others wait,
then all compute together, so the ratio is from one run. A time is the mean of several calls in a row on rank 0. The results
must agree before anything is timed.

* operator: gather the keys and values of all branches, compress, attend, and return the gradients, for random inputs.
* step: the trainer's own step of a model on one sequence (as `bench train`).

`communication_ms`: only the collectives of the operator, forward and backward, without computation to overlap with. A
profile of as many more calls on rank 0 has the share of each part, also of communication that nothing hides. The first of
these calls waits for the other ranks, whose profiles start at another time. Peak memory includes the inputs, of which every
rank has the whole sequence.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, distributed

from nsa_lab.attention import Span, compress, nsa_attention
from nsa_lab.attention.context_parallel import ContextShard, slice_keys, split_queries
from nsa_lab.bench.harness import Benchmark, Output, RandomInputs, RowColumn, Setup, make_record, measure_if_correct
from nsa_lab.bench.step_breakdown import COMMUNICATION, compute_breakdown
from nsa_lab.bench.timing import synchronize
from nsa_lab.bench.training_speed import CPU_MODEL, make_bench_config
from nsa_lab.config import ConfigError, ModelConfig
from nsa_lab.data import Batch
from nsa_lab.train.build import build_model
from nsa_lab.train.distributed import World
from nsa_lab.train.launcher import wait_for_ranks
from nsa_lab.train.step import LOSS, Stepper, make_optimizer

PARTS = ("operator", "step")
GPU_LENGTHS, CPU_LENGTHS = (65_536, 131_072, 262_144), (515,)
# Target speedup over one rank, as a share of the number of ranks: 1.85 on two.
TARGET_EFFICIENCY = 0.925
# DistributedDataParallel waits for the device at the start of each of its first ten steps, to record statistics.
N_WARMUP, N_TIMED = 10, 8
# For texts of at least this many tokens, of which a step takes many seconds. The results that are compared are a warm-up.
LONG_TEXT, N_WARMUP_LONG, N_TIMED_LONG = 1 << 19, 0, 2
# Allowed relative difference of the outputs and of the loss: as attention in low precision, summed in another order.
MAX_DIFFERENCE = {torch.bfloat16: 2e-2, torch.float32: 1e-4}
# File of the exception of a rank.
FAILURE = "failure-{rank}.json"


@dataclass
class RanksRow:
    """One part at one length. Times in milliseconds, memory in bytes per rank; field names are keys of the record.

    `one_breakdown`, `shared_breakdown`: results of `compute_breakdown`, empty on a CPU.
    """

    part: str
    tokens: int
    ranks: int
    difference: float
    one_ms: float | None = None
    shared_ms: float | None = None
    speedup: float | None = None
    target: float | None = None
    communication_ms: float | None = None
    one_peak_bytes: int | None = None
    shared_peak_bytes: int | None = None
    loss: float | None = None
    note: str = ""
    one_breakdown: dict[str, float] = field(default_factory=dict[str, float])
    shared_breakdown: dict[str, float] = field(default_factory=dict[str, float])


def run_ranks_bench(
    lengths: tuple[int, ...] | None = None,
    json_path: Path | None = None,
    *,
    ranks: int,
    model: ModelConfig | None = None,
    parts: tuple[str, ...] = PARTS,
    alone: bool = True,
    gradient_checkpointing: bool = False,
    device: str | None = None,
    console: Console | None = None,
) -> list[RanksRow]:
    """Measure `ranks` ranks at each length, print a table and replace the JSON file after each case.

    `model`: heads and layers; default: the production model, on a CPU a tiny one. `alone`: also measure one rank; without,
    for lengths that do not fit into one GPU. `gradient_checkpointing`: of the step. Raises ConfigError if there are fewer
    GPUs than ranks.
    """
    setup = Setup.resolve(device)
    if setup.is_gpu and torch.cuda.device_count() < ranks:
        raise ConfigError(
            f"--ranks {ranks}: expected at most one rank per GPU, and torch finds {torch.cuda.device_count()}"
        )
    base = model or setup.select(gpu=ModelConfig(), cpu=CPU_MODEL)
    cases = [(part, length) for length in lengths or setup.select(gpu=GPU_LENGTHS, cpu=CPU_LENGTHS) for part in parts]
    record = make_record(
        setup,
        what="ranks that share one sequence, against one rank",
        ranks=ranks,
        gradient_checkpointing=gradient_checkpointing,
        model=base.model_dump(mode="json"),
    )
    options = {"alone": alone, "gradient_checkpointing": gradient_checkpointing, "device": setup.device.type}

    def measure(case: tuple[str, int]) -> list[RanksRow]:
        return [RanksRow(**_run_processes(base, *case, ranks, options))]

    return BENCHMARK.run(
        cases, measure, Output(json_path, console=console), record, label=lambda case: f"{case[0]}, {case[1]:,} tokens"
    )


def _run_processes(base: ModelConfig, part: str, tokens: int, ranks: int, options: dict[str, Any]) -> dict[str, Any]:
    """Run one case in a process per rank. Return the fields of its row. Raises RuntimeError if a rank fails."""
    with tempfile.TemporaryDirectory(prefix="nsa-lab-bench-") as name:
        folder = Path(name)
        case = {"model": base.model_dump(mode="json"), "part": part, "tokens": tokens, **options}
        (folder / "case.json").write_text(json.dumps(case))
        processes = [_start_rank(folder, rank, ranks) for rank in range(ranks)]
        # The other ranks wait in a collective for one that failed, and are then killed.
        if failure := wait_for_ranks(processes):
            _raise_failure(folder, *failure)
        return json.loads((folder / "row.json").read_text())


def _raise_failure(folder: Path, rank: int, code: int) -> None:
    """Raise RuntimeError with the first exception of a rank. `rank`, `code`: of the rank that ended first.

    The exceptions of the other ranks are its consequences, and a rank that waits for another can end before it. Of a rank
    that was killed, or failed in an import, only the last line of its output is known.
    """
    reports = [json.loads(path.read_text()) for path in folder.glob(FAILURE.format(rank="*"))]
    if not reports or (code < 0 and rank not in [report["rank"] for report in reports]):
        lines = (folder / f"errors-{rank}").read_text().strip().splitlines()
        raise RuntimeError(f"bench ranks: rank {rank} failed with {code}: {lines[-1] if lines else 'no output'}")
    first = min(reports, key=lambda report: report["time"])
    cause = RuntimeError(first["traceback"])
    raise RuntimeError(f"bench ranks: rank {first['rank']} failed: {first['exception']}") from cause


def _report_failure(folder: Path, rank: int, error: Exception) -> None:
    """Write the exception of a rank for `_raise_failure`."""
    report = {
        "rank": rank,
        "time": time.time(),
        "exception": "".join(traceback.format_exception_only(error)).strip(),
        "traceback": "".join(traceback.format_exception(error)),
    }
    path = folder / FAILURE.format(rank=rank)
    path.with_suffix(".part").write_text(json.dumps(report))
    path.with_suffix(".part").rename(path)


def _start_rank(folder: Path, rank: int, ranks: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "nsa_lab.bench.context_parallel", str(folder), str(rank), str(ranks)]
    loopback = "lo" if sys.platform == "linux" else "lo0"
    with open(folder / f"errors-{rank}", "wb") as errors:
        return subprocess.Popen(command, stderr=errors, env={**os.environ, "GLOO_SOCKET_IFNAME": loopback})


def _run_rank(folder: Path, rank: int, n_ranks: int) -> None:
    try:
        _measure_on_rank(folder, rank, n_ranks)
    except Exception as error:
        _report_failure(folder, rank, error)
        raise


def _measure_on_rank(folder: Path, rank: int, n_ranks: int) -> None:
    case = json.loads((folder / "case.json").read_text())
    is_gpu = case["device"] == "cuda"
    device = torch.device("cuda", rank) if is_gpu else torch.device("cpu")
    if is_gpu:
        torch.cuda.set_device(device)
    world = World(rank, n_ranks, rank, n_ranks, folder / "store", context_parallel=n_ranks)
    world.init_process_group(device)
    dtype = torch.bfloat16 if is_gpu else torch.float32
    base = ModelConfig.model_validate(case["model"])
    part = (
        _Operator(base, case["tokens"], device, dtype)
        if case["part"] == "operator"
        else _Step(base, case["tokens"], device, is_gpu, case["gradient_checkpointing"])
    )
    row = RanksRow(case["part"], case["tokens"], n_ranks, 0.0, target=TARGET_EFFICIENCY * n_ranks)
    is_long, expected = case["tokens"] >= LONG_TEXT, None
    n_warmup, n_timed = (N_WARMUP_LONG, N_TIMED_LONG) if is_long else (N_WARMUP, N_TIMED)
    time_calls = functools.partial(_time_calls, device, n_warmup, n_timed)
    if case["alone"]:
        if world.is_first:
            expected = part.compute(World(), None)
            row.one_ms, row.one_peak_bytes = time_calls(lambda: part.compute(World(), None), lambda: None)
            row.one_breakdown = compute_breakdown(lambda: part.compute(World(), None), device, n_timed)
        distributed.barrier()
    group = world.make_context_group(n_ranks, device)
    actual = part.compute(world, group)
    row.difference = 0.0 if expected is None else part.compare(actual, expected, rank, n_ranks)
    row.loss = actual[0].item() if isinstance(part, _Step) else None

    def measure() -> None:
        row.shared_ms, row.shared_peak_bytes = time_calls(lambda: part.compute(world, group), distributed.barrier)
        row.shared_breakdown = compute_breakdown(lambda: part.compute(world, group), device, n_timed)
        if isinstance(part, _Operator):
            communicate = functools.partial(part.communicate, world, group)
            row.communication_ms, _ = time_calls(communicate, distributed.barrier)
        if row.one_ms is not None and row.shared_ms is not None:
            row.speedup = row.one_ms / row.shared_ms

    # All ranks measure, or none.
    is_correct = not world.any_rank(row.difference > MAX_DIFFERENCE[dtype], device)
    measure_if_correct(row, is_correct, measure)
    if world.is_first:
        (folder / "row.json").write_text(json.dumps(asdict(row)))
    world.destroy_process_group()


def _time_calls(
    device: torch.device, n_warmup: int, n_timed: int, run: Callable[[], object], meet: Callable[[], object]
) -> tuple[float, int | None]:
    """Return the mean time of `run` in milliseconds and its peak memory. `meet`: a barrier of all ranks.

    The calls follow each other without a barrier, as the steps of a training run do: the collectives of `run` couple the
    ranks, and a barrier of NCCL takes milliseconds, because the CPU polls for its end.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    for _ in range(n_warmup):
        run()
    synchronize(device)
    meet()
    start = time.perf_counter()
    for _ in range(n_timed):
        run()
    synchronize(device)
    milliseconds = (time.perf_counter() - start) * 1e3 / n_timed
    meet()
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    return milliseconds, peak


class _Operator:
    """Attention with gathered keys and values, forward and backward, for random inputs of one sequence."""

    def __init__(self, model: ModelConfig, tokens: int, device: torch.device, dtype: torch.dtype) -> None:
        self.model, self.tokens = model, tokens
        inputs = RandomInputs(device, dtype, seed=0)
        # Keys, then values of every branch and group, as a projection returns them.
        widths = 3 * model.n_kv_groups * model.d_k, 3 * model.n_kv_groups * model.d_v
        self._inputs = [
            inputs.normal(1, tokens, model.n_heads, model.d_k),
            inputs.normal(1, tokens, 1, sum(widths)).flatten(2),
            inputs.gates(1, tokens, model.n_heads, 3),
            inputs.normal(1, tokens, model.n_heads, model.d_v),
        ]
        self._shares: dict[int, list[Tensor]] = {}

    def make_shard(self, world: World, group: Any) -> ContextShard:
        return ContextShard(Span.full(self.tokens), world.rank, world.size, group)

    def take_inputs(self, shard: ContextShard) -> list[Tensor]:
        """Return queries, keys with values, gates and output gradients of this rank's tokens, copied once."""
        if shard.size not in self._shares:
            self._shares[shard.size] = [shard.take(x) for x in self._inputs]
        return self._shares[shard.size]

    def compute(self, world: World, group: Any) -> list[Tensor]:
        """Return the output and the gradients of queries, keys and gates of this rank's tokens."""
        c, shard = self.model, self.make_shard(world, group)
        nsa, pieces = c.nsa.model_copy(update={"phi": "avg"}), shard.pieces
        *inputs, d_out = self.take_inputs(shard)
        leaves = [x.detach().requires_grad_() for x in inputs]
        q, keys, gates = leaves
        text = shard.gather(keys).split([c.n_kv_groups * c.d_k] * 3 + [c.n_kv_groups * c.d_v] * 3, dim=2)
        k_cmp, k_sel, k_win, v_cmp, v_sel, v_win = (x.unflatten(2, (c.n_kv_groups, -1)) for x in text)
        compressed_rows = [piece.compressed_rows(shard.text, nsa) for piece in pieces]
        key_rows = [piece.key_rows for piece in pieces]
        tensors = zip(
            split_queries(q, pieces),
            *(slice_keys(compress(x, nsa), compressed_rows) for x in (k_cmp, v_cmp)),
            *(slice_keys(x, key_rows) for x in (k_sel, v_sel, k_win, v_win)),
            split_queries(gates, pieces),
            strict=True,
        )
        outs: list[Tensor] = []
        for piece, own in zip(pieces, tensors, strict=True):
            own_q, own_k_cmp, own_v_cmp, own_k_sel, own_v_sel, own_k_win, own_v_win, own_gates = own
            branches = own_k_cmp, own_v_cmp, own_k_sel, own_v_sel, own_k_win, own_v_win
            outs.append(nsa_attention(own_q, *branches, own_gates, nsa, span=piece.span))
        out = torch.cat(outs, dim=1)
        return [out.detach(), *torch.autograd.grad(out, leaves, d_out)]

    def communicate(self, world: World, group: Any) -> None:
        """Gather the keys and scatter a gradient, without attention."""
        shard = self.make_shard(world, group)
        own = self.take_inputs(shard)[1].detach().requires_grad_()
        text = shard.gather(own)
        torch.autograd.grad(text, own, text.detach())

    def compare(self, actual: list[Tensor], expected: list[Tensor], rank: int, n_ranks: int) -> float:
        """Return the largest relative difference of this rank's results."""
        shard = ContextShard(Span.full(self.tokens), rank, n_ranks)
        pairs = [(x.float(), shard.take(y).float()) for x, y in zip(actual, expected, strict=True)]
        return max(((x - y).norm() / y.norm()).item() for x, y in pairs)


class _Step:
    """The trainer's step of a model on one random sequence."""

    def __init__(
        self, model: ModelConfig, tokens: int, device: torch.device, is_gpu: bool, gradient_checkpointing: bool
    ) -> None:
        config = make_bench_config(model, model.attention, tokens, 1, is_gpu, None, graph=False)
        runtime = config.runtime.model_copy(update={"gradient_checkpointing": gradient_checkpointing})
        self.config = config.model_copy(update={"runtime": runtime})
        self.device = device
        generator = torch.Generator().manual_seed(0)
        text = torch.randint(model.vocab_size, (1, tokens + 1), generator=generator).to(device)
        self.batch = Batch(text[:, :-1], text[:, 1:])
        self._steppers: dict[int, Stepper] = {}

    def compute(self, world: World, group: Any) -> list[Tensor]:
        """Take a step with a learning rate of 0. Return its loss."""
        if world.size not in self._steppers:
            self._steppers.clear()  # one model at a time
            self._steppers[world.size] = self._make_stepper(world, group)
        return [self._steppers[world.size].step(*self.batch[:2], 0.0, lambda: None)[LOSS]]

    def _make_stepper(self, world: World, group: Any) -> Stepper:
        config = self.config
        model = build_model(config, self.device)
        if config.runtime.compile:
            from nsa_lab.train.build import compile_blocks

            compile_blocks(model)
        return Stepper(
            model,
            world.wrap(model, self.device, seed=config.train.seed, use_bf16=config.runtime.precision == "bf16"),
            make_optimizer(model, config.train),
            config.train,
            device=self.device,
            use_bf16=config.runtime.precision == "bf16",
            world=world,
            auxiliary_loss=model.auxiliary_loss if config.model.has_selection_loss else None,
            context_groups={world.size: group},
        )

    def compare(self, actual: list[Tensor], expected: list[Tensor], rank: int, n_ranks: int) -> float:
        return ((actual[0] - expected[0]).abs() / expected[0].abs()).item()


def _format_gigabytes(n_bytes: int | None) -> str:
    return "" if n_bytes is None else f"{n_bytes / 1e9:.2f}"


def _format_share(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"


BENCHMARK = Benchmark[RanksRow](
    title="Ranks that share one sequence: milliseconds, forward and backward",
    columns=(
        RowColumn("part", align="left"),
        RowColumn("tokens", lambda row: f"{row.tokens:,}"),
        RowColumn("ranks"),
        RowColumn("one rank", "one_ms"),
        RowColumn("shared", "shared_ms"),
        RowColumn("speedup"),
        RowColumn("target"),
        RowColumn("communication", "communication_ms"),
        RowColumn("not hidden", lambda row: _format_share(row.shared_breakdown.get(COMMUNICATION))),
        RowColumn("GB", lambda row: _format_gigabytes(row.one_peak_bytes)),
        RowColumn("GB shared", lambda row: _format_gigabytes(row.shared_peak_bytes)),
        RowColumn("loss"),
        RowColumn("difference", lambda row: f"{row.difference:.1e}"),
        RowColumn("note", align="left"),
    ),
    has_table_per_case=False,
)


if __name__ == "__main__":
    _run_rank(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
