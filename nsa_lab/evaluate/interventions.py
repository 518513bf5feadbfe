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
    choose_blocks,
    compressed_attention,
    dense_attention,
    reference,
    selected_attention,
    window_attention,
)
from nsa_lab.config import NSAConfig
from nsa_lab.evaluate import choices
from nsa_lab.evaluate.answers import teacher_forced
from nsa_lab.model import BRANCHES, AttentionInputs, Block, NSATransformer, Scoring, SparseAttention


@dataclass(frozen=True)
class Intervention:
    """Which blocks the selected branch reads, `times` as many as the model's n_sel, and the branch that is set to zero."""

    reads: Literal["chosen", "random", "nearest", "oracle", "all"] = "chosen"
    times: int = 1
    silent: Literal["cmp", "sel", "win"] | None = None


INTERVENTIONS: dict[str, Intervention] = {
    "chosen": Intervention(),
    "random": Intervention("random"),
    "nearest": Intervention("nearest"),
    "oracle": Intervention("oracle"),
    "twice": Intervention("chosen", times=2),
    "all": Intervention("all"),
    "no_cmp": Intervention(silent="cmp"),
    "no_sel": Intervention(silent="sel"),
    "no_win": Intervention(silent="win"),
}


@dataclass(frozen=True)
class Effect:
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
def forward(model: NSATransformer, tokens: Tensor, intervention: Intervention, seed: int | torch.Generator = 0) -> Tensor:
    """Logits [B, T, V] of tokens int64 [B, T] under an intervention; `seed`, or a generator of the tokens' device, is that
    of random blocks, which are others on another kind of device.

    Raises ValueError for a dense model, which has neither blocks nor branches.
    """
    choices.check_sparse(model)
    generator = torch.Generator(tokens.device).manual_seed(seed) if isinstance(seed, int) else seed
    x, rotary = model.enter(tokens)
    for block in cast("list[Block]", model.blocks):
        layer = cast(SparseAttention, block.attention)
        normed = block.attention_norm(x)
        inputs = layer.project(normed, rotary)
        scoring = layer.scoring(normed, inputs, rotary)
        x = x + layer.out(_mixed(inputs, scoring, layer, intervention, generator).flatten(2))
        x = x + block.mlp(block.mlp_norm(x))
    return model.head(model.norm(x))


def intervene(
    model: NSATransformer,
    tokens: Tensor,
    places: Tensor,
    *,
    names: Iterable[str] = tuple(INTERVENTIONS),
    seed: int = 0,
    sequences_at_once: int = 1,
) -> list[Effect]:
    """What each intervention does to tokens int64 [B, T] whose answers stand at `places` [B, n, value_length].

    `chosen`, the model as it is, comes first. Meant for float32: half precision hides small differences.
    """
    wanted = ["chosen", *(name for name in names if name != "chosen")]
    found = {name: _measured(model, tokens, places, INTERVENTIONS[name], seed, sequences_at_once) for name in wanted}
    base, _ = found["chosen"]
    return [
        Effect(name, *values, *(value - usual for value, usual in zip(values, base, strict=True)), right=right)
        for name, (values, right) in found.items()
    ]


def _measured(
    model: NSATransformer, tokens: Tensor, places: Tensor, intervention: Intervention, seed: int, at_once: int
) -> tuple[tuple[float, float, float], list[float]]:
    """Loss of the text, loss of the answers, and share of answers that are right; that share in each sequence."""
    # One for all parts, so that every sequence has dice of its own.
    generator = torch.Generator(tokens.device).manual_seed(seed)
    parts = [
        teacher_forced(lambda rows: forward(model, rows, intervention, generator), *rows)
        for rows in zip(tokens.split(at_once), places.split(at_once), strict=True)
    ]
    right, losses, text = (torch.cat(part) for part in zip(*parts, strict=True))
    found = right.all(-1).float().mean(1)
    return (text.mean().item(), losses.mean().item(), found.mean().item()), found.tolist()


def _mixed(
    inputs: AttentionInputs,
    scoring: Scoring,
    layer: SparseAttention,
    intervention: Intervention,
    generator: torch.Generator,
) -> Tensor:
    """`nsa_attention` of one layer under an intervention: [B, T, H, Dv]."""
    q, k_cmp, v_cmp, _, _, k_win, v_win, gates = inputs
    nsa, backend = layer.config.nsa, choices.backends_of(layer)
    out_cmp, _ = compressed_attention(q, k_cmp, v_cmp, nsa, backend=backend["compressed"])
    out_sel = _selected(inputs, scoring, layer, intervention, generator)
    out_win, _ = window_attention(q, k_win, v_win, nsa, backend=backend["window"])
    outs = zip(BRANCHES, (out_cmp, out_sel, out_win), strict=True)
    cmp, sel, win = (torch.zeros_like(out) if name == intervention.silent else out for name, out in outs)
    return reference.combine(cmp, sel, win, gates)


def _selected(
    inputs: AttentionInputs,
    scoring: Scoring,
    layer: SparseAttention,
    intervention: Intervention,
    generator: torch.Generator,
) -> Tensor:
    q, _, _, k_sel, v_sel, *_ = inputs
    nsa, G, backend = _with_more(layer.config.nsa, intervention), k_sel.shape[2], choices.backends_of(layer)["selected"]
    if intervention.reads == "all":
        return dense_attention(q, k_sel, v_sel)
    if intervention.reads == "random":
        blocks = choices.random_blocks(q, G, nsa, generator)
    elif intervention.reads == "nearest":
        blocks = choices.nearest_blocks(q, G, nsa)
    elif intervention.reads == "oracle":
        blocks = choices.oracle_blocks(q, k_sel, nsa)
    elif intervention.times == 1:
        blocks = choices.chosen_blocks(scoring, layer)
    else:
        backend = "auto"  # the model's own need not take so many blocks; they differ by rounding
        asking, keys, asked = scoring
        blocks = choose_blocks(asking, keys, _with_more(asked, intervention), backend=backend)
    return selected_attention(q, k_sel, v_sel, blocks, nsa, backend=backend)[0]


def _with_more(nsa: NSAConfig, intervention: Intervention) -> NSAConfig:
    return nsa.model_copy(update={"n_sel": nsa.n_sel * intervention.times})
