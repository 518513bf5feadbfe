"""What a layer keeps of the tokens it has seen, and attention of new ones through it.

Invariants
* A layer caches selection keys and values of every token, window keys and values of the last w, and compressed ones of
  every whole block. Raw compression inputs are kept only until the last block that needs them is whole.
Shape suffixes: B batch, S cached tokens, N compressed blocks, G key/value groups, h heads per group, D head width.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from nsa_lab.attention import choose_blocks, compress, geometry, nsa_attention, reference
from nsa_lab.config import ModelConfig
from nsa_lab.model import DenseAttention, Index, Rotary, SparseAttention


class NSACache:
    """The cache of one NSA layer, and attention through it."""

    def __init__(self, attention: SparseAttention, capacity: int, batch: int, like: Tensor) -> None:
        if attention.backends is None:
            raise ValueError(
                "NSACache: expected a layer whose backends are resolved, as those of an NSATransformer are; got one that "
                "resolves them anew for each input"
            )
        config, nsa = attention.config, attention.config.nsa
        self._attention, self._backends, self._config, self._nsa = attention, attention.backends, config, nsa
        self._k_sel, self._v_sel = _room(config, capacity, batch, like)
        self._k_cmp, self._v_cmp = _room(config, geometry.num_compressed(capacity, nsa), batch, like)
        self._k_win, self._v_win = _room(config, 0, batch, like)
        self._k_raw, self._v_raw = _room(config, 0, batch, like)
        self._unread: Tensor | None = None
        self._blocks = 0
        indexer, G = attention.indexer, config.n_kv_groups
        self._k_index = like.new_empty(batch, geometry.num_compressed(capacity, nsa), G, config.indexer_width)
        self._k_index_raw = like.new_empty(batch, 0, G, config.indexer_width)
        self._index_unread: Tensor | None = None
        self._indexer = indexer

    def attend(self, x: Tensor, rotary: Rotary, position: int) -> Tensor:
        """Output [B, n, C] for x [B, n, C] at `position`, `position` + 1, ...; n is 1 unless `position` is 0."""
        q, (k_raw, k_sel, k_win), (v_raw, v_sel, v_win), self._unread = self._attention.heads(
            x, rotary, before=self._unread
        )
        end, gates = position + x.shape[1], self._attention.gates(x).to(q.dtype)
        self._k_sel[:, position:end], self._v_sel[:, position:end] = k_sel, v_sel
        self._k_win = torch.cat([self._k_win, k_win], dim=1)[:, -self._nsa.w :]
        self._v_win = torch.cat([self._v_win, v_win], dim=1)[:, -self._nsa.w :]
        index = self._index(x, rotary)
        self._compress(k_raw, v_raw, index.k if index else None)
        if position == 0:
            k_cmp, v_cmp = self._k_cmp[:, : self._blocks], self._v_cmp[:, : self._blocks]
            branches, blocks = (q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates), None
            if index:
                blocks = choose_blocks(index.q, self._k_index[:, : self._blocks], self._nsa, backend=self._backends)
            mixed = nsa_attention(*branches, self._nsa, blocks=blocks, backend=self._backends)
        else:
            mixed = self._one(q, index.q if index else None, gates, position)
        return self._attention.out(mixed.flatten(2))

    def _index(self, x: Tensor, rotary: Rotary) -> Index | None:
        """Of the new tokens, where the layer has an indexer."""
        if self._indexer is None:
            return None
        index = self._indexer(x, rotary, before=self._index_unread)
        self._index_unread = index.unread
        return index

    def _compress(self, k_raw: Tensor, v_raw: Tensor, k_index: Tensor | None) -> None:
        """Append the blocks that the new tokens complete; keep what the next block still needs."""
        self._k_raw, self._v_raw = torch.cat([self._k_raw, k_raw], dim=1), torch.cat([self._v_raw, v_raw], dim=1)
        if k_index is not None:
            self._k_index_raw = torch.cat([self._k_index_raw, k_index], dim=1)
        new = geometry.num_compressed(self._k_raw.shape[1], self._nsa)
        if not new:
            return
        whole = slice(self._blocks, self._blocks + new)
        self._k_cmp[:, whole] = compress(self._k_raw, self._nsa, self._attention.phi_k)
        self._v_cmp[:, whole] = compress(self._v_raw, self._nsa, self._attention.phi_v)
        if self._indexer:
            self._k_index[:, whole] = self._indexer.compress(self._k_index_raw)
        self._blocks += new
        read = slice(new * self._nsa.d, None)
        self._k_raw, self._v_raw, self._k_index_raw = self._k_raw[:, read], self._v_raw[:, read], self._k_index_raw[:, read]

    def _one(self, q: Tensor, q_index: Tensor | None, gates: Tensor, position: int) -> Tensor:
        """The three branches for one query [B, 1, H, D] at `position`, and their gated sum."""
        q = q.squeeze(1).unflatten(1, (self._config.n_kv_groups, -1))  # [B, G, h, D]
        p, v_cmp = self._shares(q, self._k_cmp), self._v_cmp[:, : self._blocks].transpose(1, 2)
        out_cmp = p @ v_cmp.to(p.dtype)
        if q_index is not None:
            p = self._shares(q_index.squeeze(1).unsqueeze(2), self._k_index)
        blocks = self._choose(p, position)
        out_sel = self._read_selected(q, blocks, position)
        out_win = _attend(q, self._k_win.transpose(1, 2), self._v_win.transpose(1, 2))
        cmp, sel, win = (out.flatten(1, 2).unsqueeze(1).to(gates.dtype) for out in (out_cmp, out_sel, out_win))
        return reference.combine(cmp, sel, win, gates)

    def _shares(self, q: Tensor, compressed: Tensor) -> Tensor:
        """What q [B, G, h, D] gives each whole block, all of them visible: [B, G, h, N].

        In the dtype of the definition's choice, so that a near-tie falls the same way.
        """
        wide = torch.float32 if q.dtype in (torch.bfloat16, torch.float16) else torch.float64
        k = compressed[:, : self._blocks].transpose(1, 2).to(wide)
        return (q.to(wide) @ k.mT * q.shape[-1] ** -0.5).softmax(-1)

    def _choose(self, p: Tensor, position: int) -> Tensor:
        """The blocks [B, G, n_sel] of the query at `position`, by its shares p [B, G, h, N]."""
        candidates = geometry.num_selection(position + 1, self._nsa)
        carry = geometry.overlap(self._blocks, candidates, self._nsa, dtype=p.dtype, device=p.device)
        importance = (p.sum(2) @ carry).float().unsqueeze(1)
        return reference.choose(importance, self._nsa, first=position).squeeze(1)

    def _read_selected(self, q: Tensor, blocks: Tensor, position: int) -> Tensor:
        within = torch.arange(self._nsa.l_sel, device=q.device)
        tokens = (blocks.long().unsqueeze(-1) * self._nsa.l_sel + within).flatten(-2)  # [B, G, n_sel * l_sel]
        read = (tokens >= 0) & (tokens <= position)
        index = torch.where(read, tokens, 0)
        batch = torch.arange(len(index), device=q.device)[:, None, None]
        group = torch.arange(index.shape[1], device=q.device)[:, None]
        return _attend(q, self._k_sel[batch, index, group], self._v_sel[batch, index, group], read.unsqueeze(2))


class DenseCache:
    """The cache of one dense layer, and attention through it."""

    def __init__(self, attention: DenseAttention, capacity: int, batch: int, like: Tensor) -> None:
        self._attention = attention
        self._k, self._v = _room(attention.config, capacity, batch, like)
        self._unread: Tensor | None = None

    def attend(self, x: Tensor, rotary: Rotary, position: int) -> Tensor:
        """As `NSACache.attend`."""
        end = position + x.shape[1]
        q, (k,), (v,), self._unread = self._attention.heads(x, rotary, before=self._unread)
        self._k[:, position:end], self._v[:, position:end] = k, v
        out = scaled_dot_product_attention(
            q.transpose(1, 2),
            self._k[:, :end].transpose(1, 2),
            self._v[:, :end].transpose(1, 2),
            is_causal=x.shape[1] > 1,
            enable_gqa=True,
        )
        return self._attention.out(out.transpose(1, 2).flatten(2))


def _room(config: ModelConfig, tokens: int, batch: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Empty keys and values [B, tokens, G, D]."""
    return (
        like.new_empty(batch, tokens, config.n_kv_groups, config.d_k),
        like.new_empty(batch, tokens, config.n_kv_groups, config.d_v),
    )


def _attend(q: Tensor, k: Tensor, v: Tensor, read: Tensor | None = None) -> Tensor:
    """Softmax attention of q [B, G, h, D] over k, v [B, G, S, D], where `read` [B, G, 1, S] allows it."""
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = q.to(wide) @ k.to(wide).mT * q.shape[-1] ** -0.5
    if read is not None:
        scores = scores.masked_fill(~read, float("-inf"))
    return scores.softmax(-1) @ v.to(wide)
