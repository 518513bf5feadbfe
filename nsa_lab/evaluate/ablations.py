"""Ablations of block selection: other blocks replace the selected ones, or a branch is disabled.

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
from nsa_lab.config import NSAConfig
from nsa_lab.evaluate import block_selectors
from nsa_lab.evaluate.scoring import score_teacher_forced
from nsa_lab.model import BRANCHES, AttentionInputs, Block, NSATransformer, SelectionInputs, SparseAttention


@dataclass(frozen=True)
class Ablation:
    """Blocks of the selected branch, their number as a multiple of n_sel, and a branch whose output is set to 0."""

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


@torch.no_grad()
def forward_with_ablation(
    model: NSATransformer, tokens: Tensor, ablation: Ablation, seed: int | torch.Generator = 0
) -> Tensor:
    """Return logits [B, T, V] of tokens int64 [B, T] under an ablation.

    seed: of random blocks, or a generator on the device of `tokens`. CPU and GPU give different blocks.
    Raises ValueError for a dense model, which has no block selection and no branches.
    """
    block_selectors.check_is_sparse(model)
    generator = torch.Generator(tokens.device).manual_seed(seed) if isinstance(seed, int) else seed
    x, rotary = model.prepare_inputs(tokens)
    for block in cast("list[Block]", model.blocks):
        layer = cast(SparseAttention, block.attention)
        normalized = block.attention_norm(x)
        inputs = layer.project(normalized, rotary)
        scoring = layer.project_selection_inputs(normalized, inputs, rotary)
        x = x + layer.out(_combine_branches(inputs, scoring, layer, ablation, generator).flatten(2))
        x = x + block.mlp(block.mlp_norm(x))
    return model.head(model.norm(x))


def run_ablations(
    model: NSATransformer,
    tokens: Tensor,
    answer_positions: Tensor,
    *,
    names: Iterable[str] = tuple(ABLATIONS),
    seed: int = 0,
    batch_size: int = 1,
) -> list[AblationResult]:
    """Measure each ablation on tokens int64 [B, T] with answers at `answer_positions` [B, n, value_length].

    The first result is `chosen`, the unmodified model. Use float32: half precision hides small differences.
    """
    ordered_names = ["chosen", *(name for name in names if name != "chosen")]
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


def _combine_branches(
    inputs: AttentionInputs,
    scoring: SelectionInputs,
    layer: SparseAttention,
    ablation: Ablation,
    generator: torch.Generator,
) -> Tensor:
    """Return `nsa_attention` of one layer under an ablation, [B, T, H, Dv]."""
    q, k_cmp, v_cmp, _, _, k_win, v_win, gates = inputs
    nsa, backend = layer.config.nsa, block_selectors.get_backends(layer)
    out_cmp, _ = compressed_attention(q, k_cmp, v_cmp, nsa, backend=backend["compressed"])
    out_sel = _attend_selected(inputs, scoring, layer, ablation, generator)
    out_win, _ = window_attention(q, k_win, v_win, nsa, backend=backend["window"])
    outs = zip(BRANCHES, (out_cmp, out_sel, out_win), strict=True)
    cmp, sel, win = (torch.zeros_like(out) if name == ablation.disabled_branch else out for name, out in outs)
    return reference.combine(cmp, sel, win, gates)


def _attend_selected(
    inputs: AttentionInputs,
    scoring: SelectionInputs,
    layer: SparseAttention,
    ablation: Ablation,
    generator: torch.Generator,
) -> Tensor:
    q, _, _, k_sel, v_sel, *_ = inputs
    nsa, G, backend = (
        _scale_n_sel(layer.config.nsa, ablation),
        k_sel.shape[2],
        block_selectors.get_backends(layer)["selected"],
    )
    if ablation.selection == "all":
        return dense_attention(q, k_sel, v_sel)
    if ablation.selection == "random":
        blocks = block_selectors.select_random_blocks(q, G, nsa, generator)
    elif ablation.selection == "nearest":
        blocks = block_selectors.select_nearest_blocks(q, G, nsa)
    elif ablation.selection == "oracle":
        blocks = block_selectors.select_oracle_blocks(q, k_sel, nsa)
    elif ablation.n_sel_factor == 1:
        blocks = block_selectors.select_model_blocks(scoring, layer)
    else:
        backend = "auto"  # the resolved backend may not support that many blocks; results differ by rounding
        scoring_q, scoring_k, scoring_nsa = scoring
        blocks = score_and_select_blocks(scoring_q, scoring_k, _scale_n_sel(scoring_nsa, ablation), backend=backend)
    return selected_attention(q, k_sel, v_sel, blocks, nsa, backend=backend)[0]


def _scale_n_sel(nsa: NSAConfig, ablation: Ablation) -> NSAConfig:
    return nsa.model_copy(update={"n_sel": nsa.n_sel * ablation.n_sel_factor})
