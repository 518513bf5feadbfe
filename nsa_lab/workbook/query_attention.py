"""Compute what one query attends to: the keys of each branch and their weights, by the formulas of the definition.

Only one row of each attention matrix is computed, so this is cheap at any length. Tests compare it with `reference`.
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
    """Return the attention of one query. Raises IndexError for a position or group that the example does not have."""
    if not (0 <= position < example.length and 0 <= group < example.groups):
        raise IndexError(
            f"position {position}, group {group}: the example has positions 0 to {example.length - 1} "
            f"and groups 0 to {example.groups - 1}"
        )
    heads = example.q.shape[2] // example.groups
    q = example.q[0, position, group * heads : (group + 1) * heads]  # [h, D]
    t = torch.tensor(position)
    n_visible = int(geometry.visible_compressed(t, nsa))
    p_cmp = p_selection = _softmax(q, reference.compress(example.k_cmp[:, : position + 1], nsa)[0, :n_visible, group])
    scoring_nsa = nsa
    if example.scoring:
        q_index, k_index, scoring_nsa = example.scoring
        # The compression of the selection keys does not change with the block sizes of the branches.
        scoring_nsa = scoring_nsa.model_copy(update={"l_sel": nsa.l_sel})
        n_visible = int(geometry.visible_compressed(t, scoring_nsa))
        group_queries = q_index[0, position].unflatten(0, (k_index.shape[2], -1))[group]
        p_selection = _softmax(group_queries, k_index[0, :n_visible, group])

    n_candidates = geometry.num_selection(position + 1, nsa)
    overlap = geometry.overlap(n_visible, n_candidates, scoring_nsa, dtype=p_cmp.dtype)
    importance = (p_selection.sum(0) @ overlap).float()
    selected = reference.select_by_importance(importance[None, None, None], nsa, first=position)[0, 0, 0]
    blocks = [int(block) for block in selected if block >= 0]
    forced = geometry.forced_blocks(t, n_candidates, nsa).nonzero().flatten().tolist()

    token = torch.arange(position + 1)
    in_blocks = torch.isin(token // nsa.l_sel, torch.tensor(blocks))
    p_sel = _softmax(q, example.k_sel[0, : position + 1, group], in_blocks)
    p_win = _softmax(q, example.k_win[0, : position + 1, group], token > position - nsa.w)
    weights = p_cmp.mean(0), p_sel.mean(0), p_win.mean(0)
    return AttentionReads(
        position, group, nsa, *weights, importance, blocks, forced, has_selection_keys=bool(example.scoring)
    )


def _softmax(q: Tensor, k: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return weights [h, keys] of queries [h, D] over keys [keys, D]. Masked keys have weight 0."""
    scores = q @ k.T * q.shape[-1] ** -0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return scores.softmax(-1)


def mark_token(figure: Figure, token: int) -> None:
    """Mark a token with a dashed line in every lane of a query plot."""
    for axes in figure.axes:
        axes.axvline(token + 0.5, color="#CC79A7", linewidth=1.5, linestyle="--", zorder=0.5)


def describe_selected_blocks(reads: AttentionReads, text: str, width: int = 48) -> str:
    """Return one line per selected block: reason of the selection, importance, attention weight and first characters."""
    n = reads.nsa
    before = text[max(reads.position - width + 1, 0) : reads.position + 1]
    lines = [
        f"query {reads.position:,}, group {reads.group}; the text up to the query ends with {before!r}",
        f"{'block':>5}  {'reason':<8} {'importance':>10} {'weight':>7}  text",
    ]
    for block in reads.blocks:
        first = block * n.l_sel
        weight = float(reads.sel[first : first + n.l_sel].sum())
        reason = "forced" if block in reads.forced else "score"
        snippet = text[first : min(first + n.l_sel, reads.position + 1)][:width]
        lines.append(f"{block:>5}  {reason:<8} {float(reads.importance[block]):>10.4f} {weight:>7.1%}  {snippet!r}")
    return "\n".join(lines)
