"""Bytes that one rank exchanges with others in an optimizer step, computed from the configuration.

A ring algorithm is assumed: of N ranks, each receives (N - 1) / N of the gathered bytes, and a sum over all ranks takes
twice as much. `nsa-lab plan --ranks N` prints the result. Overlap with computation is not estimated.
"""

from __future__ import annotations

from dataclasses import dataclass

from nsa_lab.config import ModelConfig, RunConfig, StageConfig
from nsa_lab.runs.summary import format_size


@dataclass(frozen=True)
class StageCommunication:
    """Bytes per rank in one stage. All are 0 with one rank; those of keys also where each rank has whole sequences.

    `context_size`: number of ranks that share each sequence. `text_bytes`: keys, values and index keys of the
    tokens of one micro-batch in one layer, which every rank holds. `gathered_bytes`, `scattered_bytes`: keys received, and
    gradients of keys sent, per layer and optimizer step (mean over layers). `parameter_bytes`: gradients, and weights if
    they are sharded, per optimizer step.
    """

    context_size: int
    n_layers: int
    text_bytes: int
    gathered_bytes: int
    scattered_bytes: int
    parameter_bytes: int

    def __str__(self) -> str:
        parameters = f"parameters {format_size(self.parameter_bytes)}"
        if self.context_size == 1:
            return parameters
        return (
            f"{self.context_size} ranks share each sequence: keys and values {format_size(self.gathered_bytes)} gathered, "
            f"{format_size(self.scattered_bytes)} scattered in each of {self.n_layers} layers; {parameters}"
        )


def count_key_numbers(model: ModelConfig) -> float:
    """Return the numbers per token that ranks gather in a layer: keys, values and index keys; mean over layers."""
    per_layer = len(model.kv_sets) * model.n_kv_groups * (model.d_k + model.d_v)
    n_indexers = sum(map(model.has_indexer_in, range(model.n_layers)))
    return per_layer + n_indexers / model.n_layers * model.index_groups * model.index_width


def count_text_tokens(stage: StageConfig, context_size: int, n_ranks: int) -> int:
    """Return the tokens of the largest micro-batch of a stage that a rank computes, alone or with others."""
    n_sequences = stage.sequences_per_step * context_size // n_ranks
    return min(stage.sequences_per_forward, n_sequences) * stage.seq_len


def estimate_communication(config: RunConfig, n_params: int, n_ranks: int) -> tuple[StageCommunication, ...]:
    """Return the communication of every stage. `n_params`: parameters of the model. With `hsdp`, ranks are on one host."""
    model, runtime = config.model, config.runtime
    dtype_bytes = 2 if runtime.precision == "bf16" else 4
    share_received = (n_ranks - 1) / n_ranks
    stages: list[StageCommunication] = []
    for stage, size in zip(config.train.plan, config.list_context_sizes(n_ranks), strict=True):
        token_bytes = count_key_numbers(model) * dtype_bytes if size > 1 else 0.0
        n_sequences = stage.sequences_per_step * size // n_ranks
        received = token_bytes * n_sequences * stage.seq_len * (size - 1) / size
        n_micro_batches = -(-n_sequences // stage.sequences_per_forward)
        # One sum of float32 gradients; sharded weights are also gathered for each forward and each backward pass.
        parameter_bytes = 2 * 4 * n_params
        if runtime.parallel != "ddp":
            parameter_bytes = (4 + 2 * dtype_bytes * n_micro_batches) * n_params
        stages.append(
            StageCommunication(
                context_size=size,
                n_layers=model.n_layers,
                text_bytes=round(token_bytes * count_text_tokens(stage, size, n_ranks)),
                # With gradient checkpointing, the forward pass of a layer is repeated.
                gathered_bytes=round(received * (2 if runtime.gradient_checkpointing else 1)),
                scattered_bytes=round(received),
                parameter_bytes=round(parameter_bytes * share_received),
            )
        )
    return tuple(stages)
