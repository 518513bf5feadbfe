"""Attention of a few new tokens to all that their sequences have seen, through a cache."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from nsa_lab.attention import kernels, reference
from nsa_lab.attention.span import Span
from nsa_lab.config import NSAConfig


class LayerCache(NamedTuple):
    """What one NSA layer keeps of B sequences. Rows beyond a sequence's length are never read."""

    k_cmp: Tensor  # [B, N_max, G, d_k]; block i covers tokens i*d .. i*d+l-1
    v_cmp: Tensor  # [B, N_max, G, d_v]
    k_sel: Tensor  # [B, capacity, G, d_k]
    v_sel: Tensor  # [B, capacity, G, d_v]
    k_win: Tensor  # [B, R, G, d_k], a ring: position p lies in slot p % R, and R >= w + S - 1
    v_win: Tensor  # [B, R, G, d_v]
    k_index: Tensor | None = None  # [B, N_idx_max, G, d_k], the indexer's compressed keys


def cached_attention(
    q: Tensor,
    gates: Tensor,
    cache: LayerCache,
    lengths: Tensor,
    nsa: NSAConfig,
    *,
    index_q: Tensor | None = None,
    choice_nsa: NSAConfig | None = None,
    backend: str = "torch",
) -> Tensor:
    """The three branches and their gated sum [B, S, H, d_v] for S new tokens, whose keys are in the cache already.

    q [B, S, H, d_k], gates [B, S, H, 3] in the order cmp, sel, win. `lengths` int32 [B], on q's device: the tokens of each
    sequence before these, so that query s of row b stands at lengths[b] + s. index_q [B, S, G, d_k] and choice_nsa are an
    indexer's queries and geometry; None: the compressed branch's own scores choose (eq. 8, 9).
    """
    if backend == "triton":
        return kernels.cached_attention(q, gates, cache, lengths, nsa, index_q=index_q, choice_nsa=choice_nsa)
    return _by_definition(q, gates, cache, lengths, nsa, index_q, choice_nsa or nsa)


def _by_definition(
    q: Tensor, gates: Tensor, cache: LayerCache, lengths: Tensor, nsa: NSAConfig, index_q: Tensor | None, choice: NSAConfig
) -> Tensor:
    """Sequence by sequence, with the reference on what the cache holds of each."""
    rows: list[Tensor] = []
    for b in range(q.shape[0]):
        before = int(lengths[b])
        here, end = slice(b, b + 1), before + q.shape[1]
        span = Span.chunk(before, q.shape[1])
        n = span.num_compressed(nsa)
        k_cmp, v_cmp = cache.k_cmp[here, :n], cache.v_cmp[here, :n]
        out_cmp, lse = reference.compressed_attention(q[here], k_cmp, v_cmp, nsa, span=span)
        if index_q is None or cache.k_index is None:
            blocks = reference.select_blocks(q[here], k_cmp, lse, nsa, span=span)
        else:
            keys = cache.k_index[here, : span.num_compressed(choice)]
            lse = reference.compressed_attention(index_q[here], keys, keys, choice, span=span)[1]
            blocks = reference.select_blocks(index_q[here], keys, lse, choice, span=span)
        out_sel, _ = reference.selected_attention(
            q[here], cache.k_sel[here, :end], cache.v_sel[here, :end], blocks, nsa, span=span
        )
        slots = torch.arange(end, device=q.device) % cache.k_win.shape[1]
        out_win, _ = reference.window_attention(q[here], cache.k_win[here, slots], cache.v_win[here, slots], nsa, span=span)
        rows.append(reference.combine(out_cmp, out_sel, out_win, gates[here]))
    return torch.cat(rows)
