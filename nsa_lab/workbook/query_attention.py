"""What one query reads: the keys of each branch and the weight it gives them, by the definition's own formulas.

One row of the attention matrices is formed, so this is cheap at any length. The tests hold it against `reference`.
"""

from __future__ import annotations

import torch
from matplotlib.figure import Figure
from torch import Tensor

from nsa_lab.attention import geometry, reference
from nsa_lab.config import NSAConfig
from nsa_lab.figures.query_plot import AttentionReads
from nsa_lab.workbook.examples import Example


def compute_reads(example: Example, nsa: NSAConfig, position: int, group: int = 0) -> AttentionReads:
    """The reads of one query. Raises IndexError for a position or group that the example does not have."""
    if not (0 <= position < example.length and 0 <= group < example.groups):
        raise IndexError(
            f"position {position}, group {group}: the example has positions 0 to {example.length - 1} "
            f"and groups 0 to {example.groups - 1}"
        )
    heads = example.q.shape[2] // example.groups
    q = example.q[0, position, group * heads : (group + 1) * heads]  # [h, D]
    t = torch.tensor(position)
    visible = int(geometry.visible_compressed(t, nsa))
    p_cmp = p_choice = _softmax(q, reference.compress(example.k_cmp[:, : position + 1], nsa)[0, :visible, group])
    chooser = nsa
    if example.indexer_scoring:
        q_index, k_index, chooser = example.indexer_scoring
        chooser = chooser.model_copy(update={"l_sel": nsa.l_sel})  # its keys stay, whatever is chosen by them
        visible = int(geometry.visible_compressed(t, chooser))
        p_choice = _softmax(q_index[0, position, group][None], k_index[0, :visible, group])

    begun = geometry.num_selection(position + 1, nsa)
    carry = geometry.overlap(visible, begun, chooser, dtype=p_cmp.dtype)
    importance = (p_choice.sum(0) @ carry).float()
    chosen = reference.select_by_importance(importance[None, None, None], nsa, first=position)[0, 0, 0]
    blocks = [int(block) for block in chosen if block >= 0]
    forced = geometry.forced_blocks(t, begun, nsa).nonzero().flatten().tolist()

    token = torch.arange(position + 1)
    in_blocks = torch.isin(token // nsa.l_sel, torch.tensor(blocks))
    p_sel = _softmax(q, example.k_sel[0, : position + 1, group], in_blocks)
    p_win = _softmax(q, example.k_win[0, : position + 1, group], token > position - nsa.w)
    weights = p_cmp.mean(0), p_sel.mean(0), p_win.mean(0)
    return AttentionReads(
        position, group, nsa, *weights, importance, blocks, forced, has_indexer=bool(example.indexer_scoring)
    )


def _softmax(q: Tensor, k: Tensor, mask: Tensor | None = None) -> Tensor:
    """Weights [h, keys] of queries [h, D] over keys [keys, D]; zero where not allowed."""
    scores = q @ k.T * q.shape[-1] ** -0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return scores.softmax(-1)


def mark_token(figure: Figure, token: int) -> None:
    """A dashed line through every lane of a picture of reads, where a token stands."""
    for axes in figure.axes:
        axes.axvline(token + 0.5, color="#CC79A7", linewidth=1.5, linestyle="--")


def describe_selected_blocks(reads: AttentionReads, text: str, width: int = 48) -> str:
    """One line for each chosen block: why it is in, its importance, the weight it gets, and how its text begins."""
    n = reads.nsa
    before = text[max(reads.position - width + 1, 0) : reads.position + 1]
    lines = [
        f"query {reads.position:,}, group {reads.group}; the text up to it ends with {before!r}",
        f"{'block':>5}  {'why':<8} {'importance':>10} {'weight':>7}  text",
    ]
    for block in reads.blocks:
        first = block * n.l_sel
        weight = float(reads.sel[first : first + n.l_sel].sum())
        why = "forced" if block in reads.forced else "score"
        snippet = text[first : min(first + n.l_sel, reads.position + 1)][:width]
        lines.append(f"{block:>5}  {why:<8} {float(reads.importance[block]):>10.4f} {weight:>7.1%}  {snippet!r}")
    return "\n".join(lines)
