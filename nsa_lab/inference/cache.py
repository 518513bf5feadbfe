"""What a layer keeps of the tokens it has seen, and attention of new ones through it.

Invariants
* A layer caches selection keys and values of every token, window keys and values of the last w, and compressed ones of
  every whole block. Raw compression inputs are kept only until the last block that needs them is whole.
Shape suffixes: B batch, S cached tokens, N compressed blocks, G key/value groups, h heads per group, D head width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from nsa_lab.attention import choose_blocks, compress, geometry, nsa_attention, reference
from nsa_lab.config import ModelConfig, NSAConfig
from nsa_lab.model import DenseAttention, Indexer, Rotary, SparseAttention


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
        self._k_win, self._v_win = _room(config, 0, batch, like)
        room = like.new_empty(batch, geometry.num_compressed(capacity, nsa), config.n_kv_groups, 0)
        phi_k, phi_v = attention.phi_k, attention.phi_v
        self._k_cmp = _Compressed(nsa, lambda k: compress(k, nsa, phi_k), room, config.d_k)
        self._v_cmp = _Compressed(nsa, lambda v: compress(v, nsa, phi_v), room, config.d_v)
        self._unread: Tensor | None = None
        self._index = _IndexCache(attention.indexer, capacity, batch, like) if attention.indexer else None

    def attend(self, x: Tensor, rotary: Rotary, position: int) -> Tensor:
        """Output [B, n, C] for x [B, n, C] at `position`, `position` + 1, ...; n is 1 unless `position` is 0."""
        q, (k_raw, k_sel, k_win), (v_raw, v_sel, v_win), self._unread = self._attention.heads(
            x, rotary, before=self._unread
        )
        end, gates = position + x.shape[1], self._attention.gates(x).to(q.dtype)
        self._k_sel[:, position:end], self._v_sel[:, position:end] = k_sel, v_sel
        self._k_win = torch.cat([self._k_win, k_win], dim=1)[:, -self._nsa.w :]
        self._v_win = torch.cat([self._v_win, v_win], dim=1)[:, -self._nsa.w :]
        self._k_cmp.append(k_raw)
        self._v_cmp.append(v_raw)
        index = self._index.append(x, rotary) if self._index else None
        if position == 0:
            branches = (q, self._k_cmp.rows, self._v_cmp.rows, k_sel, v_sel, k_win, v_win, gates)
            blocks = choose_blocks(index.q, index.k.rows, index.k.nsa, backend=self._backends) if index else None
            mixed = nsa_attention(*branches, self._nsa, blocks=blocks, backend=self._backends)
        else:
            mixed = self._one(q, index, gates, position)
        return self._attention.out(mixed.flatten(2))

    def _one(self, q: Tensor, index: _Asked | None, gates: Tensor, position: int) -> Tensor:
        """The three branches for one query [B, 1, H, D] at `position`, and their gated sum."""
        q = q.squeeze(1).unflatten(1, (self._config.n_kv_groups, -1))  # [B, G, h, D]
        p, v_cmp = _shares(q, self._k_cmp), self._v_cmp.rows.transpose(1, 2)
        out_cmp = p @ v_cmp.to(p.dtype)
        if index:
            p = _shares(index.q.squeeze(1).unsqueeze(2), index.k)
        out_sel = self._read_selected(q, self._choose(p, index.k if index else self._k_cmp, position), position)
        out_win = _attend(q, self._k_win.transpose(1, 2), self._v_win.transpose(1, 2))
        cmp, sel, win = (out.flatten(1, 2).unsqueeze(1).to(gates.dtype) for out in (out_cmp, out_sel, out_win))
        return reference.combine(cmp, sel, win, gates)

    def _choose(self, p: Tensor, keys: _Compressed, position: int) -> Tensor:
        """The blocks [B, G, n_sel] of the query at `position`, by the shares p [B, G, h, N] that it gives to `keys`."""
        candidates = geometry.num_selection(position + 1, self._nsa)
        carry = geometry.overlap(p.shape[-1], candidates, keys.nsa, dtype=p.dtype, device=p.device)
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


class _Compressed:
    """The whole blocks of the tokens seen, compressed as `nsa` says; of raw tokens, those that the next block needs.

    `room` [B, N, G, 0] has the sizes, dtype and device of N blocks, of keys or values `width` wide.
    """

    def __init__(self, nsa: NSAConfig, phi: Callable[[Tensor], Tensor], room: Tensor, width: int) -> None:
        batch, blocks, groups, _ = room.shape
        self.nsa, self._phi, self._whole = nsa, phi, 0
        self._rows = room.new_empty(batch, blocks, groups, width)
        self._raw = room.new_empty(batch, 0, groups, width)

    @property
    def rows(self) -> Tensor:
        """[B, blocks, G, D]"""
        return self._rows[:, : self._whole]

    def append(self, x: Tensor) -> None:
        """New tokens [B, n, G, D], and the blocks that they complete."""
        self._raw = torch.cat([self._raw, x], dim=1)
        new = geometry.num_compressed(self._raw.shape[1], self.nsa)
        if new:
            self._rows[:, self._whole : self._whole + new] = self._phi(self._raw)
            self._whole += new
            self._raw = self._raw[:, new * self.nsa.d :]


class _Asked(NamedTuple):
    """The indexer's queries [B, n, G, D] of new tokens, and all of its keys."""

    q: Tensor
    k: _Compressed


class _IndexCache:
    """What a layer's indexer keeps: its compressed keys."""

    def __init__(self, indexer: Indexer, capacity: int, batch: int, like: Tensor) -> None:
        self._indexer, config = indexer, indexer.config
        room = like.new_empty(batch, geometry.num_compressed(capacity, indexer.nsa), config.n_kv_groups, 0)
        self._keys = _Compressed(indexer.nsa, indexer.compress, room, config.d_k)
        self._unread: Tensor | None = None

    def append(self, x: Tensor, rotary: Rotary) -> _Asked:
        """Keeps the keys of new tokens x [B, n, C]."""
        q, k, self._unread = self._indexer(x, rotary, before=self._unread)
        self._keys.append(k)
        return _Asked(q, self._keys)


def _shares(q: Tensor, keys: _Compressed) -> Tensor:
    """What q [B, G, h, D] gives each whole block, all of them visible: [B, G, h, N].

    In the dtype of the definition's choice, so that a near-tie falls the same way.
    """
    wide = torch.float32 if q.dtype in (torch.bfloat16, torch.float16) else torch.float64
    return (q.to(wide) @ keys.rows.transpose(1, 2).to(wide).mT * q.shape[-1] ** -0.5).softmax(-1)


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
