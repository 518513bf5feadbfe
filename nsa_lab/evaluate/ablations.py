"""What selection does, by changing it: other blocks in place of the chosen ones, or a branch that says nothing.

The forward pass here is the model's own, made of `SparseAttention.project` and the operator's public parts; with nothing
changed it gives the model's logits. An intervention holds in every layer at once.

How to read it: oracle far better than chosen, the choice is blind; twice as many blocks better than chosen, too few are
read; all blocks no better than chosen, the heads do not look for anything that the choice could miss, or never learned to
read so many; random blocks no worse than chosen, the choice does nothing.
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
    """Which blocks the selected branch reads, `times` as many as the model's n_sel, and the branch that is set to zero."""

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
    """What an intervention leaves.

    `loss`: mean nats per token of all that is no answer; `answer_loss`: per token of the answers; `accuracy`: share of the
    answers that are right in every token, teacher-forced. `d_`: less the same of `chosen`. `right`: the share of each
    sequence by itself, in order.
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
    """Logits [B, T, V] of tokens int64 [B, T] under an intervention; `seed`, or a generator of the tokens' device, is that
    of random blocks, which are others on another kind of device.

    Raises ValueError for a dense model, which has neither blocks nor branches.
    """
    block_selectors.check_is_sparse(model)
    generator = torch.Generator(tokens.device).manual_seed(seed) if isinstance(seed, int) else seed
    x, rotary = model.prepare_inputs(tokens)
    for block in cast("list[Block]", model.blocks):
        layer = cast(SparseAttention, block.attention)
        normed = block.attention_norm(x)
        inputs = layer.project(normed, rotary)
        scoring = layer.project_selection_inputs(normed, inputs, rotary)
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
    """What each intervention does to tokens int64 [B, T] whose answers stand at `places` [B, n, value_length].

    `chosen`, the model as it is, comes first. Meant for float32: half precision hides small differences.
    """
    wanted = ["chosen", *(name for name in names if name != "chosen")]
    found = {name: _measure_ablation(model, tokens, answer_positions, ABLATIONS[name], seed, batch_size) for name in wanted}
    base, _ = found["chosen"]
    return [
        AblationResult(name, *values, *(value - usual for value, usual in zip(values, base, strict=True)), right=right)
        for name, (values, right) in found.items()
    ]


def _measure_ablation(
    model: NSATransformer, tokens: Tensor, answer_positions: Tensor, ablation: Ablation, seed: int, batch_size: int
) -> tuple[tuple[float, float, float], list[float]]:
    """Loss of the text, loss of the answers, and share of answers that are right; that share in each sequence."""
    # One for all parts, so that every sequence has dice of its own.
    generator = torch.Generator(tokens.device).manual_seed(seed)
    parts = [
        score_teacher_forced(lambda rows: forward_with_ablation(model, rows, ablation, generator), *rows)
        for rows in zip(tokens.split(batch_size), answer_positions.split(batch_size), strict=True)
    ]
    right, losses, text = (torch.cat(part) for part in zip(*parts, strict=True))
    found = right.all(-1).float().mean(1)
    return (text.mean().item(), losses.mean().item(), found.mean().item()), found.tolist()


def _combine_branches(
    inputs: AttentionInputs,
    scoring: SelectionInputs,
    layer: SparseAttention,
    ablation: Ablation,
    generator: torch.Generator,
) -> Tensor:
    """`nsa_attention` of one layer under an intervention: [B, T, H, Dv]."""
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
        backend = "auto"  # the model's own need not take so many blocks; they differ by rounding
        asking, keys, asked = scoring
        blocks = score_and_select_blocks(asking, keys, _scale_n_sel(asked, ablation), backend=backend)
    return selected_attention(q, k_sel, v_sel, blocks, nsa, backend=backend)[0]


def _scale_n_sel(nsa: NSAConfig, ablation: Ablation) -> NSAConfig:
    return nsa.model_copy(update={"n_sel": nsa.n_sel * ablation.n_sel_factor})
