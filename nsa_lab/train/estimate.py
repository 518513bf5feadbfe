"""What a run will take, from its configuration alone: parameters, tokens, FLOPs, memory, disk and, given a speed, hours.

Memory is what PyTorch will have allocated at the peak of a step on a GPU (`torch.cuda.max_memory_allocated`), not what the
driver reserves. A run on a CPU records the whole process, with Python and torch, which is more. `compare` puts a plan
beside what a run measured.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from nsa_lab.config import ConfigError, ModelConfig, RunConfig, TrainConfig
from nsa_lab.model import NSATransformer
from nsa_lab.runs.summary import format_duration, format_size
from nsa_lab.train.muon import find_muon_matrices
from nsa_lab.train.telemetry.system_metrics import get_memory_capacity

# Per parameter: float32 weights and gradients and two float32 moments.
STATE_BYTES_PER_PARAM = 16
WEIGHT_BYTES_PER_PARAM = 4
# A checkpoint holds weights and moments.
CHECKPOINT_BYTES_PER_PARAM = 12
BYTES_PER_MOMENT = 4
# The smallest model that a production run may train.
MIN_PRODUCTION_PARAMS = 50_000_000


@dataclass(frozen=True)
class ResourceEstimate:
    """Sizes in bytes, on one device; `hours` is None while the speed is not known."""

    name: str
    attention: str
    params: int
    steps: int
    # Of each stage: optimiser steps, and tokens of one.
    stages: tuple[tuple[int, int], ...]
    tokens: int
    flops_per_token_nsa: float
    flops_per_token_dense: float
    state_bytes: int
    activation_bytes: int
    memory_bytes: int
    checkpoint_bytes: int
    checkpoints_kept: int
    shard_bytes: int
    disk_bytes: int
    tokens_per_s: float | None
    hours: float | None

    def format_rows(self) -> list[tuple[str, str]]:
        """Name and value of each line, as a person reads them."""
        # One model's weights, read both ways: a dense twin has weights, and FLOPs, of its own.
        other = {"nsa": "", "dense": ""} | {"dense" if self.attention == "nsa" else "nsa": ", by the same weights"}
        speed = "not known" if self.tokens_per_s is None else f"{self.tokens_per_s:,.0f} tokens/s"
        return [
            ("parameters", f"{self.params:,}"),
            ("optimiser steps", ", then ".join(f"{steps:,} of {tokens:,} tokens" for steps, tokens in self.stages)),
            ("tokens", f"{self.tokens:,}"),
            ("MFLOPs per token, NSA", f"{self.flops_per_token_nsa / 1e6:,.1f}{other['nsa']}"),
            ("MFLOPs per token, dense", f"{self.flops_per_token_dense / 1e6:,.1f}{other['dense']}"),
            (
                "memory at the peak",
                f"{format_size(self.memory_bytes)} of tensors (state {format_size(self.state_bytes)}, activations "
                f"{format_size(self.activation_bytes)}); on a CPU Python and torch come on top",
            ),
            (
                "disk",
                f"{format_size(self.disk_bytes)} ({self.checkpoints_kept} checkpoints of "
                f"{format_size(self.checkpoint_bytes)}, shards {format_size(self.shard_bytes)})",
            ),
            ("speed", speed),
            ("time", "not known" if self.hours is None else format_duration(3600 * self.hours)),
        ]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        width = max(len(name) for name, _ in self.format_rows())
        return "\n".join([f"plan of {self.name}", *(f"  {name:<{width}}  {value}" for name, value in self.format_rows())])


def estimate_resources(config: RunConfig, tokens_per_s: float | None = None, n_ranks: int = 1) -> ResourceEstimate:
    """The plan of a run. `tokens_per_s` is the speed to plan with (of all ranks together); the default is the throughput
    gate of the configuration, the slowest that it accepts, and None without one."""
    model, train = build_meta_model(config.model), config.train
    flops, params, tokens = compute_flops_per_token(model, train), model.parameter_count(), train.tokens
    speed = tokens_per_s or train.min_tokens_per_s or None
    unneeded = count_omitted_moments(model, train) * BYTES_PER_MOMENT
    state, activations = params * STATE_BYTES_PER_PARAM - unneeded, estimate_activation_bytes(config, n_ranks)
    kept = count_retained_checkpoints(config)
    shards = min(tokens, config.data.max_tokens or tokens) * (1 if config.model.vocab_size <= 256 else 2)
    checkpoint = params * CHECKPOINT_BYTES_PER_PARAM - unneeded
    return ResourceEstimate(
        name=config.name,
        attention=config.model.attention,
        params=params,
        steps=train.steps,
        stages=tuple((stage.steps, stage.tokens_per_step) for stage in train.plan),
        tokens=tokens,
        flops_per_token_nsa=flops["nsa"],
        flops_per_token_dense=flops["dense"],
        state_bytes=state,
        activation_bytes=activations,
        memory_bytes=state + activations,
        checkpoint_bytes=checkpoint,
        checkpoints_kept=kept,
        shard_bytes=shards,
        disk_bytes=kept * checkpoint + shards,
        tokens_per_s=speed,
        hours=compute_hours(tokens, speed) if speed else None,
    )


def check_state_fits(config: RunConfig, device: torch.device, n_ranks: int = 1) -> None:
    """Raise `ConfigError` if the model's state alone is larger than the memory of the device of one rank."""
    model, there = build_meta_model(config.model), get_memory_capacity(device)
    params, shards = model.parameter_count(), n_ranks if config.runtime.parallel == "fsdp" else 1
    # Every rank builds the model whole before it is sharded.
    state = params * STATE_BYTES_PER_PARAM - count_omitted_moments(model, config.train) * BYTES_PER_MOMENT
    needed = max(state // shards, params * WEIGHT_BYTES_PER_PARAM)
    if needed > there:
        tables = model.ngrams.table.weight.numel() if model.ngrams else 0
        raise ConfigError(
            f"a model of {params:,} parameters: its float32 weights, gradients and moments take {needed:,} bytes "
            f"({format_size(needed)}){f' on each of {n_ranks} ranks' if n_ranks > 1 else ''}, before any activation, and "
            f"{'the GPU' if device.type == 'cuda' else 'this machine'} has {there:,} ({format_size(there)}). "
            f"Lower {'model.ngram_rows or model.ngram_width' if 2 * tables > params else 'model.dim or model.n_layers'}"
        )


def count_omitted_moments(model: NSATransformer, train: TrainConfig) -> int:
    """How many numbers the optimiser holds less than two for every weight: of Muon's, one."""
    return sum(weight.numel() for weight in find_muon_matrices(model)) if train.optimizer == "muon" else 0


def compute_flops_per_token(
    model: NSATransformer, train: TrainConfig, lengths: Sequence[Mapping[int, int]] | None = None
) -> dict[str, float]:
    """`NSATransformer.flops_per_token`, the mean over all tokens of a run.

    `lengths`: of each stage, how many documents there are of each length (`StagedBatches.lengths`); None: sequences are
    read as one text, or it is not known what is in them, and this is the most.
    """
    stages = lengths or [stage.seq_len for stage in train.plan]
    return average_over_stages(train, [model.flops_per_token(stage) for stage in stages])


def average_over_stages(train: TrainConfig, stage_values: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Means of the stages, each per token -> means over all tokens of a run."""
    shares = [stage.steps * stage.tokens_per_step / train.tokens for stage in train.plan]
    return {
        kind: sum(share * stage[kind] for share, stage in zip(shares, stage_values, strict=True))
        for kind in stage_values[0]
    }


def compute_hours(tokens: int, tokens_per_s: float) -> float:
    """Hours that `tokens` take. The one place where a duration is worked out: tokens of all micro-batches, all ranks."""
    return tokens / tokens_per_s / 3600


def build_meta_model(model: ModelConfig) -> NSATransformer:
    """The model without storage: for its counts."""
    with torch.device("meta"):
        return NSATransformer(model, backend="torch", device="meta")


def count_retained_checkpoints(config: RunConfig) -> int:
    """Most checkpoints on disk at once: the last ones, the permanent ones, and the one being written."""
    train = config.train
    last = min(train.keep_last, train.steps // train.save_every + 1) if train.save_every else 1
    permanent = train.steps // train.keep_every if train.keep_every and train.save_every else 0
    return last + permanent + 1


def estimate_activation_bytes(config: RunConfig, n_ranks: int = 1) -> int:
    """Bytes held between forward and backward of the largest micro-batch, and the largest temporary tensors of the loss.

    Per token and layer: the float32 residual stream, twice; two norms with their float32 and compute-dtype results, of
    which compilation keeps the latter only; the projections before and after rotation (dense, compiled: after); the
    outputs of the branches and their mix; the MLP before and after its non-linearity. Measured on one H200 at 65,536
    tokens, compiled: 414 KB per token for the production model without an indexer, 314 KB for its dense twin; what an
    indexer and the selection loss hold is not counted. With gradient checkpointing only the residual stream of a layer
    is kept, and one layer is recomputed.
    """
    m, train = config.model, config.train
    width = 2 if config.runtime.precision == "bf16" else 4
    branches = 3 if m.attention == "nsa" else 1
    projected = m.n_heads * m.d_k + branches * m.n_kv_groups * (m.d_k + m.d_v)
    outputs = (branches + 1) * m.n_heads * m.d_v
    mlp = (2 if m.mlp == "plain" else 4) * m.hidden_width
    compiled = config.runtime.compile
    norms = 2 * (width if compiled else 4 + width)
    rotations = 1 if compiled and m.attention == "dense" else 2
    layer = m.dim * (2 * 4 + norms) + width * (rotations * projected + outputs + mlp) + branches * m.n_heads * 8
    kept = 4 * m.dim * m.n_layers + layer if config.runtime.gradient_checkpointing else layer * m.n_layers
    # Of n-grams: the rows that are looked up, in float32 and as the product takes them, and where they lie.
    looked_up = (m.ngrams - 1) * (m.ngram_width * (4 if width == 4 else 4 + width) + 8) if m.ngrams else 0
    # Logits in the compute dtype, in float32, their softmax and its gradient.
    loss = m.vocab_size * (width + 3 * 4)
    return max(
        min(stage.sequences_per_forward, max(stage.sequences_per_step // n_ranks, 1)) * stage.seq_len
        for stage in train.plan
    ) * (kept + looked_up + loss)


def compare_with_measured(
    estimate: ResourceEstimate, step_events: Iterable[dict[str, Any]]
) -> list[tuple[str, float, float, float]]:
    """Name, planned, measured and measured/planned of what the `step` events of a run can tell."""
    measured = list(step_events)
    if not measured:
        return []
    peak = max(event["mem_peak_bytes"] for event in measured)
    speed = statistics.median(event["tokens_per_s"] for event in measured)
    rows = [("memory_bytes", float(estimate.memory_bytes), float(peak))]
    if estimate.hours:
        rows.append(("hours", estimate.hours, compute_hours(estimate.tokens, speed)))
    return [(name, expected, found, found / expected) for name, expected, found in rows]
