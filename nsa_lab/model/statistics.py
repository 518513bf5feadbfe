"""What a layer's branches did, in numbers: statistics of `SparseAttention.observe`."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from nsa_lab.attention import Span, geometry
from nsa_lab.config import BRANCHES, ModelConfig

SATURATION_MARGIN = 0.01  # a gate this close to 0 or 1 has stopped passing gradient


def compute_branch_statistics(
    observed: Mapping[str, Tensor], config: ModelConfig, span: Span | None = None
) -> dict[str, Tensor]:
    """Scalars (0-d tensors, on the device) of one layer's `observe`, which was of `span`; None: whole sequences.

    gate_share_*: mean share of a branch in the gate's sum; gate_entropy: nats, of those shares, ln 3 at most;
    gate_saturation: share of gates within 0.01 of 0 or 1; sel_reuse: share of a query's blocks that the query before it
    chose too; sel_distance: mean distance of the chosen blocks, in blocks; sel_sink_share: attention that the first block
    holds, over queries past it; sel_window_overlap: share of the selected keys that the window reads too; sel_keys and
    sel_keys_most: selected keys of a query, mean and most; norm_*: root mean square of a branch's output.
    """
    nsa = config.nsa
    gates, blocks = observed["gates"].float(), observed["blocks"].long()
    share = gates / gates.sum(-1, keepdim=True)
    stats = {f"gate_share_{name}": share[..., i].mean() for i, name in enumerate(BRANCHES)}
    stats["gate_entropy"] = -(share * share.clamp_min(1e-9).log()).sum(-1).mean()
    stats["gate_saturation"] = ((gates < SATURATION_MARGIN) | (gates > 1 - SATURATION_MARGIN)).float().mean()

    span = span or Span.full(blocks.shape[1])
    positions = span.positions()
    t = positions.to(blocks.device)[:, None, None]
    valid = blocks >= 0
    bits = torch.zeros(*blocks.shape[:3], span.num_selection(nsa) + 1, dtype=torch.bool, device=blocks.device)
    bits.scatter_(-1, torch.where(valid, blocks, bits.shape[-1] - 1), True)
    again = (bits[:, 1:, :, :-1] & bits[:, :-1, :, :-1]).sum(-1) / valid[:, 1:].sum(-1)
    # The first query of a document has none before it.
    stats["sel_reuse"] = _average_rows(again, positions[1:] > 0)
    stats["sel_distance"] = torch.where(valid, geometry.own_block(t, nsa) - blocks, 0).sum() / valid.sum()
    past_first = positions >= geometry.after_first_block(span.longest_document, nsa)
    stats["sel_sink_share"] = _average_rows((observed["lse_sink"] - observed["lse_sel"]).float().exp(), past_first)

    keys, near = geometry.keys_of_blocks(blocks, t, nsa)
    stats["sel_window_overlap"] = near.sum() / keys.sum()
    per_query = keys.sum(-1).float()
    stats["sel_keys"], stats["sel_keys_most"] = per_query.mean(), per_query.max()
    for name in BRANCHES:
        stats[f"norm_{name}"] = observed[f"out_{name}"].float().pow(2).mean().sqrt()
    return stats


def _average_rows(values: Tensor, rows: Tensor) -> Tensor:
    """Mean over the rows of values [B, T, ...] that `rows` (bool [T], on the CPU) takes, 0-d; 0 where it takes none."""
    if not rows.any():
        return values.new_zeros(())
    return values.index_select(1, rows.nonzero().flatten().to(values.device)).mean()
