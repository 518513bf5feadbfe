"""Resource estimate of a run from its configuration: parameters, tokens, FLOPs, memory, disk and, given a speed, hours.

Memory is the peak that PyTorch allocates during a step on a GPU (`torch.cuda.max_memory_allocated`), not the memory that
the driver reserves. A CPU run records the whole process including Python and torch, which is more.
`compare_with_measured` compares an estimate with the measurements of a run.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from nsa_lab.config import ConfigError, ModelConfig, RunConfig, TrainConfig
from nsa_lab.model import NSATransformer
from nsa_lab.model.indexer import freeze_all_but_indexers
from nsa_lab.model.transformer import BACKWARD_FLOPS
from nsa_lab.runs.summary import format_duration, format_size
from nsa_lab.train.communication import (
    StageCommunication,
    count_key_numbers,
    count_text_tokens,
    estimate_communication,
)
from nsa_lab.train.muon import find_muon_matrices
from nsa_lab.train.teacher import CHUNK_NUMBERS, FLOAT32_TENSORS_PER_CHUNK
from nsa_lab.train.telemetry.system_metrics import get_memory_capacity

# All in float32.
BYTES_PER_WEIGHT = BYTES_PER_GRADIENT = BYTES_PER_MOMENT = 4
# Minimum size of a model with runtime.profile = production.
MIN_PRODUCTION_PARAMS = 50_000_000
# A part of a record of `nsa-lab bench train`, shipped with the package for estimates without another measurement.
REFERENCE_THROUGHPUT = Path(__file__).with_name("reference_throughput.json")


@dataclass(frozen=True)
class ResourceEstimate:
    """Sizes in bytes, per device. `stages`: (optimizer steps, tokens per step) of each; `hours`: None without a speed."""

    name: str
    attention: str
    params: int
    steps: int
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
    ranks: int = 1
    communication: tuple[StageCommunication, ...] = ()
    """Bytes that one rank exchanges per optimizer step of every stage; empty for one rank."""

    def format_rows(self) -> list[tuple[str, str]]:
        """Return (name, value) of every line of the printed estimate."""
        # Both FLOP counts are for the same weights. A dense baseline has other weights, and other FLOPs.
        suffix = {"nsa": "", "dense": ""} | {"dense" if self.attention == "nsa" else "nsa": ", with the same weights"}
        speed = "unknown" if self.tokens_per_s is None else f"{self.tokens_per_s:,.0f} tokens/s"
        return [
            ("parameters", f"{self.params:,}"),
            ("optimizer steps", ", then ".join(f"{steps:,} of {tokens:,} tokens" for steps, tokens in self.stages)),
            ("tokens", f"{self.tokens:,}"),
            ("MFLOPs per token, NSA", f"{self.flops_per_token_nsa / 1e6:,.1f}{suffix['nsa']}"),
            ("MFLOPs per token, dense", f"{self.flops_per_token_dense / 1e6:,.1f}{suffix['dense']}"),
            (
                "peak memory",
                f"{format_size(self.memory_bytes)} of tensors (state {format_size(self.state_bytes)}, activations "
                f"{format_size(self.activation_bytes)}); on a CPU, plus Python and torch",
            ),
            (
                "disk",
                f"{format_size(self.disk_bytes)} ({self.checkpoints_kept} checkpoints of "
                f"{format_size(self.checkpoint_bytes)}, shards {format_size(self.shard_bytes)})",
            ),
            *self._format_communication(),
            ("speed", speed),
            ("time", "unknown" if self.hours is None else format_duration(3600 * self.hours)),
        ]

    def _format_communication(self) -> list[tuple[str, str]]:
        """Return a row per stage; one row if there is one stage, none for one rank."""
        name, unit = "communication", f"per step and rank, {self.ranks} ranks: "
        if len(self.communication) == 1:
            return [(name, f"{unit}{self.communication[0]}")]
        return [(f"{name}, stage {number}", f"{unit}{stage}") for number, stage in enumerate(self.communication, 1)]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        width = max(len(name) for name, _ in self.format_rows())
        return "\n".join([f"plan of {self.name}", *(f"  {name:<{width}}  {value}" for name, value in self.format_rows())])


def estimate_resources(config: RunConfig, tokens_per_s: float | None = None, n_ranks: int = 1) -> ResourceEstimate:
    """Return the resource estimate of a run. With `hsdp`, all `n_ranks` are on one host.

    `tokens_per_s`: assumed speed of all ranks together. Default: `train.min_tokens_per_s`, the slowest speed that the run
    accepts; None if that is 0.
    """
    model, train = _build_trained_meta_model(config), config.train
    flops, params, tokens = compute_flops_per_token(model, train), model.parameter_count(), train.tokens
    speed = tokens_per_s or train.min_tokens_per_s or None
    state_bytes = compute_state_bytes(model, config, 1 if config.runtime.parallel == "ddp" else n_ranks)
    activations = estimate_activation_bytes(config, n_ranks)
    n_checkpoints = count_retained_checkpoints(config)
    shard_bytes = min(tokens, config.data.max_tokens or tokens) * (1 if config.model.vocab_size <= 256 else 2)
    # A checkpoint contains weights and moments.
    checkpoint_bytes = params * BYTES_PER_WEIGHT + count_moments(model, train) * BYTES_PER_MOMENT
    return ResourceEstimate(
        name=config.name,
        attention=config.model.attention,
        params=params,
        steps=train.steps,
        stages=tuple((stage.steps, stage.tokens_per_step) for stage in train.plan),
        tokens=tokens,
        flops_per_token_nsa=flops["nsa"],
        flops_per_token_dense=flops["dense"],
        state_bytes=state_bytes,
        activation_bytes=activations,
        memory_bytes=state_bytes + activations,
        checkpoint_bytes=checkpoint_bytes,
        checkpoints_kept=n_checkpoints,
        shard_bytes=shard_bytes,
        disk_bytes=n_checkpoints * checkpoint_bytes + shard_bytes,
        tokens_per_s=speed,
        hours=compute_hours(tokens, speed) if speed else None,
        ranks=n_ranks,
        communication=estimate_communication(config, params, n_ranks) if n_ranks > 1 else (),
    )


def check_state_fits(config: RunConfig, device: torch.device, n_ranks: int = 1, n_shards: int = 1) -> None:
    """Raise `ConfigError` if the model's state alone exceeds the memory of one rank's device.

    `n_shards`: number of ranks that share one copy of the state.
    """
    model, capacity = _build_trained_meta_model(config), get_memory_capacity(device)
    params, needed_bytes = model.parameter_count(), compute_state_bytes(model, config, n_shards)
    if needed_bytes > capacity:
        table_size = model.ngrams.table.weight.numel() if model.ngrams else 0
        raise ConfigError(
            f"a model of {params:,} parameters: its float32 weights, gradients and moments take {needed_bytes:,} bytes "
            f"({format_size(needed_bytes)}){f' on each of {n_ranks} ranks' if n_ranks > 1 else ''}, before any activation; "
            f"{'the GPU' if device.type == 'cuda' else 'this machine'} has {capacity:,} ({format_size(capacity)}). "
            f"Lower {'model.ngram_rows or model.ngram_width' if 2 * table_size > params else 'model.dim or model.n_layers'}"
        )


def compute_state_bytes(model: NSATransformer, config: RunConfig, n_shards: int = 1) -> int:
    """Return the bytes of weights, gradients and moments on one rank, with the weights of the layer that is gathered.

    A teacher (`train.teacher_weight`) has weights only.

    `n_shards`: number of ranks that share one copy of the state; 1: nothing is gathered.
    """
    n_trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    n_teacher = sum(w.numel() for name, w in model.named_parameters() if ".indexer." not in name)
    state_bytes = (
        (model.parameter_count() + (n_teacher if config.train.teacher_weight else 0)) * BYTES_PER_WEIGHT
        + n_trained * BYTES_PER_GRADIENT
        + count_moments(model, config.train) * BYTES_PER_MOMENT
    )
    if n_shards == 1:
        return state_bytes
    largest_layer = max(sum(p.numel() for p in layer.parameters()) for layer in model.get_layers().values())
    return -(-state_bytes // n_shards) + largest_layer * (2 if config.runtime.precision == "bf16" else 4)


def count_moments(model: NSATransformer, train: TrainConfig) -> int:
    """Return the numbers in the optimizer's moments: two per trained weight, but one if Muon updates it."""
    single = {id(weight) for weight in find_muon_matrices(model)} if train.optimizer == "muon" else set[int]()
    return sum(weight.numel() * (1 if id(weight) in single else 2) for weight in model.parameters() if weight.requires_grad)


def compute_flops_per_token(
    model: NSATransformer, train: TrainConfig, lengths: Sequence[Mapping[int, int]] | None = None
) -> dict[str, float]:
    """Return the mean of `NSATransformer.flops_per_token` over all tokens of a run, with the forward pass of a teacher.

    `lengths`: for each stage, the number of documents of each length (`StagedBatches.count_document_lengths`). None: no
    document masking, or unknown documents; the result is then an upper bound.
    """
    stages = lengths or [stage.seq_len for stage in train.plan]
    flops = average_over_stages(train, [model.flops_per_token(stage) for stage in stages])
    teacher_flops = flops["dense"] / (1 + BACKWARD_FLOPS) if train.teacher_weight else 0.0
    return {kind: value + teacher_flops for kind, value in flops.items()}


def average_over_stages(train: TrainConfig, stage_values: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Average per-token values of the stages over all tokens of the run."""
    shares = [stage.steps * stage.tokens_per_step / train.tokens for stage in train.plan]
    return {
        kind: sum(share * stage[kind] for share, stage in zip(shares, stage_values, strict=True))
        for kind in stage_values[0]
    }


def compute_hours(tokens: int, tokens_per_s: float) -> float:
    """Return the hours that `tokens` take. All durations are computed here; tokens count all micro-batches and ranks."""
    return tokens / tokens_per_s / 3600


def build_meta_model(model: ModelConfig) -> NSATransformer:
    """Build the model on the meta device, without storage, for its counts."""
    with torch.device("meta"):
        return NSATransformer(model, backend="torch", device="meta")


def _build_trained_meta_model(config: RunConfig) -> NSATransformer:
    """Build the model of a run on the meta device; only weights that are trained require a gradient."""
    model = build_meta_model(config.model)
    if config.train.trainable == "indexer":
        freeze_all_but_indexers(model)
    return model


def count_retained_checkpoints(config: RunConfig) -> int:
    """Return the maximum number of checkpoints on disk: the last ones, the permanent ones and the one being written."""
    train = config.train
    last = min(train.keep_last, train.steps // train.save_every + 1) if train.save_every else 1
    permanent = train.steps // train.keep_every if train.keep_every and train.save_every else 0
    return last + permanent + 1


def estimate_activation_bytes(config: RunConfig, n_ranks: int = 1) -> int:
    """Return the bytes held between forward and backward for the largest micro-batch, with temporary tensors of the loss.

    Per token and layer: the float32 residual stream, twice; two norms with their float32 and compute-dtype results (with
    compilation only the latter); the projections before and after RoPE (dense and compiled: after); the outputs of the
    branches and their sum; the MLP before and after its activation. Measured on one H200 at 65,536 tokens, compiled: 414
    KB per token for the production model without an indexer, 314 KB for its dense baseline. The tensors of an indexer and
    of the selection loss are not counted. With gradient checkpointing, only the residual stream of each layer is stored,
    plus one layer that is recomputed. With a frozen trunk, these are the input and the projections of each indexer, plus
    one layer. With a teacher, its logits, the gradient of the divergence, and the tensors of one chunk. If several ranks
    share each sequence, each has a part of these tensors, and the keys and values of all tokens, as gathered and after
    RoPE.
    """
    model, train = config.model, config.train
    dtype_bytes = 2 if config.runtime.precision == "bf16" else 4
    n_branches = len(model.branches) if model.attention == "nsa" else 1
    projected_width = model.n_heads * model.d_k + len(model.kv_sets) * model.n_kv_groups * (model.d_k + model.d_v)
    # A single NSA branch is its own sum.
    n_outputs = n_branches if n_branches == 1 and model.attention == "nsa" else n_branches + 1
    output_width = n_outputs * model.n_heads * model.d_v
    mlp_width = (2 if model.mlp == "plain" else 4) * model.hidden_width
    is_compiled = config.runtime.compile
    norm_bytes = 2 * (dtype_bytes if is_compiled else 4 + dtype_bytes)
    n_projection_copies = 1 if is_compiled and model.attention == "dense" else 2
    layer_bytes = (
        model.dim * (2 * 4 + norm_bytes)
        + dtype_bytes * (n_projection_copies * projected_width + output_width + mlp_width)
        + n_branches * model.n_heads * 8
    )
    is_frozen = train.trainable == "indexer"
    if is_frozen:
        index_width = (model.n_index_queries + model.index_groups) * model.index_width
        stored_bytes = model.n_scoring_layers * dtype_bytes * (model.dim + 2 * index_width) + layer_bytes
    elif config.runtime.gradient_checkpointing:
        stored_bytes = 4 * model.dim * model.n_layers + layer_bytes
    else:
        stored_bytes = layer_bytes * model.n_layers
    # N-grams: the rows that are looked up, in float32 and in the compute dtype, and their indices.
    ngram_bytes = (
        (model.ngrams - 1) * (model.ngram_width * (4 if dtype_bytes == 4 else 4 + dtype_bytes) + 8) if model.ngrams else 0
    )
    # Logits in the compute dtype, in float32, their softmax and, if the trunk is trained, its gradient.
    loss_bytes = model.vocab_size * (dtype_bytes + (2 if is_frozen else 3) * 4)
    if train.teacher_weight:
        loss_bytes += 2 * dtype_bytes * model.vocab_size
    token_bytes = stored_bytes + ngram_bytes + loss_bytes
    n_stored_layers = 1 if is_frozen or config.runtime.gradient_checkpointing else model.n_layers
    key_bytes = round(2 * count_key_numbers(model) * dtype_bytes * n_stored_layers)
    n_chunk_tensors = FLOAT32_TENSORS_PER_CHUNK if train.teacher_weight else 0
    return max(
        count_text_tokens(stage, size, n_ranks) * token_bytes // size
        + 4 * n_chunk_tensors * min(CHUNK_NUMBERS, count_text_tokens(stage, size, n_ranks) // size * model.vocab_size)
        + (count_text_tokens(stage, size, n_ranks) * key_bytes if size > 1 else 0)
        for stage, size in zip(train.plan, config.list_context_sizes(n_ranks), strict=True)
    )


def compare_with_measured(
    estimate: ResourceEstimate, step_events: Iterable[Mapping[str, Any]]
) -> list[tuple[str, float, float, float]]:
    """Return (name, estimated, measured, measured/estimated) for the quantities that `step` events record."""
    measured = list(step_events)
    if not measured:
        return []
    peak = max(event["mem_peak_bytes"] for event in measured)
    speed = statistics.median(event["tokens_per_s"] for event in measured)
    rows = [("memory_bytes", float(estimate.memory_bytes), float(peak))]
    if estimate.hours:
        rows.append(("hours", estimate.hours, compute_hours(estimate.tokens, speed)))
    return [(name, estimated, value, value / estimated) for name, estimated, value in rows]


def load_reference_throughput() -> dict[str, Any]:
    """Return device, date and model, and for each shape tokens per second and time shares of NSA and the dense baseline."""
    return json.loads(REFERENCE_THROUGHPUT.read_text(encoding="utf-8"))


def find_reference_speed(config: RunConfig) -> tuple[float, str] | None:
    """Return (tokens per second, GPU name) measured for this model and shape; None for any other."""
    record, train, model = load_reference_throughput(), config.train, config.model
    # Settings added after the record was made have their default, which is off.
    if model.model_copy(update={"attention": "nsa"}) != ModelConfig.model_validate(record["model"]):
        return None
    for row in record["rows"]:
        measured = row[model.attention]
        is_same_shape = all(
            (row["seq_len"], row["micro_batch"], measured["cuda_graph"])
            == (stage.seq_len, stage.sequences_per_forward, config.uses_cuda_graph(stage))
            for stage in train.plan
        )
        if is_same_shape and config.runtime.compile:
            return measured["tokens_per_s"], record["device"]
    return None
