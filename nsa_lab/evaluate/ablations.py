"""Ablations of block selection: other blocks replace the selected ones, or the output of a branch is set to 0.

The forward pass uses `SparseAttention.project` and the public functions of the operator. Without changes its logits equal
the logits of the model. An ablation applies to all layers at once.

Interpretation, compared with `chosen`, the unmodified model:
* oracle much better: selection misses important blocks;
* twice better: n_sel is too small;
* all not better: the heads need no block that selection misses, or have not learned to attend to that many blocks;
* random equally good: selection has no effect.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor

from nsa_lab.attention import (
    compressed_attention,
    dense_attention,
    reference,
    score_and_select_blocks,
    selected_attention,
    window_attention,
)
from nsa_lab.config import ModelConfig, NSAConfig
from nsa_lab.evaluate import block_selectors
from nsa_lab.evaluate.scoring import score_teacher_forced
from nsa_lab.model import AttentionInputs, Block, NSATransformer, SelectionInputs, SparseAttention


@dataclass(frozen=True)
class Ablation:
    """Blocks of the selected branch, their number as a multiple of n_sel, and a branch whose output is set to 0, if any."""

    selection: Literal["chosen", "random", "nearest", "oracle", "all"] = "chosen"
    n_sel_factor: int = 1
    disabled_branch: Literal["cmp", "sel", "win"] | None = None


ABLATIONS: dict[str, Ablation] = {
    "chosen": Ablation(),
    "random": Ablation("random"),
    "nearest": Ablation("nearest"),
    "oracle": Ablation("oracle"),
    "twice": Ablation("chosen", n_sel_factor=2),
    "all": Ablation("all"),
    "no_cmp": Ablation(disabled_branch="cmp"),
    "no_sel": Ablation(disabled_branch="sel"),
    "no_win": Ablation(disabled_branch="win"),
}


@dataclass(frozen=True)
class AblationResult:
    """Metrics under one ablation.

    `loss`: mean NLL (nats per token) over non-answer tokens; `answer_loss`: over answer tokens; `accuracy`: fraction of
    answers with all tokens correct, teacher-forced. `d_*`: difference from `chosen`. `right`: accuracy per sequence.
    """

    name: str
    loss: float
    answer_loss: float
    accuracy: float
    d_loss: float
    d_answer_loss: float
    d_accuracy: float
    right: list[float]


def list_ablations(config: ModelConfig) -> list[str]:
    """Return the names in `ABLATIONS` that apply to an NSA model, `chosen` first: all that change a branch it has."""
    return [name for name, ablation in ABLATIONS.items() if not _explain_misfit(ablation, config)]


@torch.no_grad()
def forward_with_ablation(
    model: NSATransformer, tokens: Tensor, ablation: Ablation, seed: int | torch.Generator = 0
) -> Tensor:
    """Return logits [B, T, V] of tokens int64 [B, T] under an ablation.

    seed: of random blocks, or a generator on the device of `tokens`. CPU and GPU give different blocks.
    Raises ValueError for a dense model, which has no block selection and no branches, and for an ablation of a branch that
    the model does not have.
    """
    block_selectors.check_is_sparse(model)
    if reason := _explain_misfit(ablation, model.config):
        raise ValueError(reason)
    generator = torch.Generator(tokens.device).manual_seed(seed) if isinstance(seed, int) else seed
    x, rotary = model.prepare_inputs(tokens)
    blocks: Tensor | None = None
    for block in cast("list[Block]", model.blocks):
        layer = cast(SparseAttention, block.attention)
        normalized = block.attention_norm(x)
        inputs = layer.project(normalized, rotary)
        scoring = layer.project_selection_inputs(normalized, inputs, rotary)
        blocks = _select_blocks(inputs, scoring, blocks, layer, ablation, generator)
        x = x + layer.out(_combine_branches(inputs, blocks, layer, ablation).flatten(2))
        x = x + block.mlp(block.mlp_norm(x))
    return model.head(model.norm(x))


def run_ablations(
    model: NSATransformer,
    tokens: Tensor,
    answer_positions: Tensor,
    *,
    names: Iterable[str] | None = None,
    seed: int = 0,
    batch_size: int = 1,
) -> list[AblationResult]:
    """Measure each ablation on tokens int64 [B, T] with answers at `answer_positions` [B, n, value_length].

    names: ablations; default: `list_ablations`. The first result is `chosen`, the unmodified model. Use float32: half
    precision hides small differences. Raises the errors of `forward_with_ablation`.
    """
    block_selectors.check_is_sparse(model)
    requested = list_ablations(model.config) if names is None else names
    ordered_names = ["chosen", *(name for name in requested if name != "chosen")]
    metrics_by_name = {
        name: _measure_ablation(model, tokens, answer_positions, ABLATIONS[name], seed, batch_size)
        for name in ordered_names
    }
    base, _ = metrics_by_name["chosen"]
    return [
        AblationResult(
            name,
            *metrics,
            *(value - base_value for value, base_value in zip(metrics, base, strict=True)),
            right=sequence_accuracy,
        )
        for name, (metrics, sequence_accuracy) in metrics_by_name.items()
    ]


def _measure_ablation(
    model: NSATransformer, tokens: Tensor, answer_positions: Tensor, ablation: Ablation, seed: int, batch_size: int
) -> tuple[tuple[float, float, float], list[float]]:
    """Return (text loss, answer loss, accuracy) and the accuracy of each sequence."""
    # One generator for all batches, so that every sequence gets its own random blocks.
    generator = torch.Generator(tokens.device).manual_seed(seed)
    batches = [
        score_teacher_forced(lambda rows: forward_with_ablation(model, rows, ablation, generator), *rows)
        for rows in zip(tokens.split(batch_size), answer_positions.split(batch_size), strict=True)
    ]
    is_correct, losses, text = (torch.cat(values) for values in zip(*batches, strict=True))
    sequence_accuracy = is_correct.all(-1).float().mean(1)
    return (text.mean().item(), losses.mean().item(), sequence_accuracy.mean().item()), sequence_accuracy.tolist()


def _explain_misfit(ablation: Ablation, config: ModelConfig) -> str | None:
    """Return why the ablation does not apply to an NSA model, or None if it does."""
    if ablation.disabled_branch and ablation.disabled_branch not in config.branches:
        return (
            f"Ablation.disabled_branch = {ablation.disabled_branch!r}: expected a branch of the model, which has "
            f"{', '.join(config.branches)}; use one of list_ablations(model.config)"
        )
    if ablation.selection != "chosen" or ablation.n_sel_factor != 1:
        return block_selectors.explain_no_selection(config)
    return None


def _select_blocks(
    inputs: AttentionInputs,
    scoring: SelectionInputs | None,
    earlier_blocks: Tensor | None,
    layer: SparseAttention,
    ablation: Ablation,
    generator: torch.Generator,
) -> Tensor | None:
    """Return the blocks of a layer under an ablation, int32 [B, T, G, n_sel]; None for all blocks or no selected branch.

    `earlier_blocks`: of the layer before, for a layer that has no indexer in a model with one.
    """
    q, _, _, k_sel, *_ = inputs
    if k_sel is None or ablation.selection == "all":
        return None
    nsa, G = _scale_n_sel(layer.config.nsa, ablation), k_sel.shape[2]
    if ablation.selection == "random":
        return block_selectors.select_random_blocks(q, G, nsa, generator)
    if ablation.selection == "nearest":
        return block_selectors.select_nearest_blocks(q, G, nsa)
    if ablation.selection == "oracle":
        return block_selectors.select_oracle_blocks(q, k_sel, nsa)
    if scoring is None:
        return earlier_blocks
    if ablation.n_sel_factor == 1:
        return block_selectors.select_model_blocks(scoring, layer)
    # The resolved backend may not support that many blocks; results differ by rounding.
    scoring_q, scoring_k, scoring_nsa = scoring
    return score_and_select_blocks(scoring_q, scoring_k, _scale_n_sel(scoring_nsa, ablation), backend="auto")


def _combine_branches(inputs: AttentionInputs, blocks: Tensor | None, layer: SparseAttention, ablation: Ablation) -> Tensor:
    """Return `nsa_attention` of one layer under an ablation, [B, T, H, Dv]."""
    q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates = inputs
    nsa, backend = layer.config.nsa, block_selectors.get_backends(layer)
    outs: dict[str, Tensor] = {}
    if k_cmp is not None and v_cmp is not None:
        outs["cmp"], _ = compressed_attention(q, k_cmp, v_cmp, nsa, backend=backend["compressed"])
    if k_sel is not None and v_sel is not None:
        if ablation.selection == "all":
            outs["sel"] = dense_attention(q, k_sel, v_sel)
        else:
            assert blocks is not None, "the first layer selects blocks"
            name = backend["selected"] if ablation.n_sel_factor == 1 else "auto"
            outs["sel"], _ = selected_attention(q, k_sel, v_sel, blocks, _scale_n_sel(nsa, ablation), backend=name)
    if k_win is not None and v_win is not None:
        outs["win"], _ = window_attention(q, k_win, v_win, nsa, backend=backend["window"])
    ordered = [torch.zeros_like(out) if name == ablation.disabled_branch else out for name, out in outs.items()]
    return ordered[0] if gates is None else reference.combine(*ordered, gates)


def _scale_n_sel(nsa: NSAConfig, ablation: Ablation) -> NSAConfig:
    return nsa.model_copy(update={"n_sel": nsa.n_sel * ablation.n_sel_factor})
