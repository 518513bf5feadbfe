"""Statistics of the gates, the selected blocks and the branch outputs of one layer, from `SparseAttention.observe`."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from nsa_lab.attention import Span, geometry
from nsa_lab.config import ModelConfig

SATURATION_MARGIN = 0.01  # gates this close to 0 or 1 have almost no gradient


def compute_branch_statistics(
    observed: Mapping[str, Tensor], config: ModelConfig, span: Span | None = None
) -> dict[str, Tensor]:
    """Return statistics of one layer as 0-d tensors on the device. `span`: the layout of `observed`; None: full sequences.

    * gate_share_*: mean share of a branch in the sum of the gates
    * gate_entropy: entropy of these shares in nats, at most ln 3
    * gate_saturation: fraction of gates within 0.01 of 0 or 1
    * sel_reuse: fraction of a query's blocks that the previous query selected too
    * sel_distance: mean distance of the selected blocks, in blocks
    * sel_sink_share: attention share of the first block, over queries after it
    * sel_window_overlap: fraction of the selected keys that are also in the window
    * sel_keys, sel_keys_most: selected keys per query, mean and maximum
    * norm_*: root mean square of a branch's output

    Only of branches that exist. A single branch has no gates, and without a window there is no overlap with it.
    """
    stats: dict[str, Tensor] = {}
    if "gates" in observed:
        gates = observed["gates"].float()
        share = gates / gates.sum(-1, keepdim=True)
        stats |= {f"gate_share_{name}": share[..., i].mean() for i, name in enumerate(config.branches)}
        stats["gate_entropy"] = -(share * share.clamp_min(1e-9).log()).sum(-1).mean()
        stats["gate_saturation"] = ((gates < SATURATION_MARGIN) | (gates > 1 - SATURATION_MARGIN)).float().mean()
    if "blocks" in observed:
        stats |= _compute_selection_statistics(observed, config, span)
    for name in config.branches:
        stats[f"norm_{name}"] = observed[f"out_{name}"].float().pow(2).mean().sqrt()
    return stats


def _compute_selection_statistics(
    observed: Mapping[str, Tensor], config: ModelConfig, span: Span | None
) -> dict[str, Tensor]:
    nsa, blocks, stats = config.nsa, observed["blocks"].long(), dict[str, Tensor]()
    span = span or Span.full(blocks.shape[1])
    positions = span.positions()
    t = positions.to(blocks.device)[:, None, None]
    is_valid = blocks >= 0
    is_selected = torch.zeros(*blocks.shape[:3], span.num_selection(nsa) + 1, dtype=torch.bool, device=blocks.device)
    is_selected.scatter_(-1, torch.where(is_valid, blocks, is_selected.shape[-1] - 1), True)
    reused = (is_selected[:, 1:, :, :-1] & is_selected[:, :-1, :, :-1]).sum(-1) / is_valid[:, 1:].sum(-1)
    # The first query of a document has no previous query.
    stats["sel_reuse"] = _average_rows(reused, positions[1:] > 0)
    stats["sel_distance"] = torch.where(is_valid, geometry.own_block(t, nsa) - blocks, 0).sum() / is_valid.sum()
    is_past_first = positions >= geometry.after_first_block(span.longest_document, nsa)
    stats["sel_sink_share"] = _average_rows((observed["lse_sink"] - observed["lse_sel"]).float().exp(), is_past_first)

    keys, in_window = geometry.keys_of_blocks(blocks, t, nsa)
    if "win" in config.branches:
        stats["sel_window_overlap"] = in_window.sum() / keys.sum()
    per_query = keys.sum(-1).float()
    stats["sel_keys"], stats["sel_keys_most"] = per_query.mean(), per_query.max()
    return stats


def _average_rows(values: Tensor, rows: Tensor) -> Tensor:
    """Return the mean of values [B, T, ...] where `rows` (bool [T], on the CPU) is True, 0-d; 0 if none is."""
    if not rows.any():
        return values.new_zeros(())
    return values.index_select(1, rows.nonzero().flatten().to(values.device)).mean()
