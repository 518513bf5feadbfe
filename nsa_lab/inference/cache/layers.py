"""What one layer keeps, NSA or dense, and attention of its new tokens through that.

New tokens are kept by torch, piece by piece (`put`), or in few launches of kernels (`append`).
Shape suffixes: B batch, S new tokens, G key/value groups, D head width.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from nsa_lab.attention import choose_blocks, dense_attention, geometry, kernels, nsa_attention
from nsa_lab.attention.decoding import cached_attention, cached_dense_attention
from nsa_lab.attention.layer_cache import LayerCache, Places
from nsa_lab.inference import memory
from nsa_lab.inference.cache.compressed import Compressed
from nsa_lab.inference.cache.step import Step
from nsa_lab.inference.cache.storage import Past, Ring, TokenRows
from nsa_lab.inference.maps import mapped
from nsa_lab.model import DenseAttention, Indexer, RMSNorm, Rotary, ShortConvolution, SparseAttention
from nsa_lab.model.attention import Heads, split_projection, turned_heads, unturned_heads
from nsa_lab.model.layers import narrowed


class NSACache:
    """The cache of one NSA layer, and attention through it."""

    def __init__(self, attention: SparseAttention, capacity: int, batch: int, like: Tensor, backend: str) -> None:
        if attention.backends is None:
            raise ValueError(
                "NSACache: expected a layer whose backends are resolved, as those of an NSATransformer are; got one that "
                "resolves them anew for each input"
            )
        c, nsa, G = attention.config, attention.config.nsa, attention.config.n_kv_groups
        self._attention, self._nsa, self._backends, self._backend = attention, nsa, attention.backends, backend
        self.k_cmp = Compressed(nsa, attention.phi_k, capacity, G, c.d_k, batch, like)
        self.v_cmp = Compressed(nsa, attention.phi_v, capacity, G, c.d_v, batch, like)
        self.k_sel, self.v_sel = (TokenRows(capacity, G, width, batch, like) for width in (c.d_k, c.d_v))
        self.k_win, self.v_win = (Ring(memory.window_slots(nsa), G, width, batch, like) for width in (c.d_k, c.d_v))
        self.past = _past(attention.convolution, batch, like)
        self.index = IndexCache(attention.indexer, capacity, batch, like) if attention.indexer else None
        # What a kernel can do behind the gates' map; what else there is, `opened` does.
        self._sigmoid = nsa.gate == "sigmoid" and not c.silent

    def attend(self, x: Tensor, norm: RMSNorm, rotary: Rotary, step: Step) -> Tensor:
        """x + attention(norm(x)), [B, S, C], of new tokens x; `rotary` is the table of all positions, [capacity, R/2]."""
        a, by_kernels = self._attention, self._backend == "triton" and not step.begins
        maps = [(a.qkv, ""), (a.gate, "sigmoid" if self._sigmoid else ""), *([(self.index.qk, "")] if self.index else [])]
        qkv, gates, *qk = mapped(x, *maps, norm=norm, by_kernels=by_kernels)
        gates = gates.unflatten(-1, (-1, 3)) if self._sigmoid else a.opened(gates).to(qkv.dtype)
        if by_kernels:
            q = self._append(qkv, rotary, step)
            index_q = self.index.append(qk[0], rotary, step) if self.index else None
        else:
            heads = self._put(qkv, rotary, step)
            q, index_q = heads.q, self.index.put(qk[0], rotary, step) if self.index else None
            if step.begins:
                branches = heads.keys[1], heads.values[1], heads.keys[2], heads.values[2]
                return x + a.out(self._first(q, branches, gates, index_q).flatten(2))
        out = self._next(q, gates, index_q, step)
        return mapped(out.flatten(2), (a.out, ""), residual=x, by_kernels=by_kernels)[0]

    def _put(self, qkv: Tensor, rotary: Rotary, step: Step) -> Heads:
        """Keeps new tokens; their heads."""
        a, past = self._attention, self.past
        unturned = unturned_heads(qkv, a.config, a.convolution, a.BRANCHES, None, past and past.before(step))
        if past:
            past.put(unturned.unmixed, step)
        heads = turned_heads(unturned, a.config, a.BRANCHES, step.rotary(rotary))
        for kept, new in zip((self.k_cmp, self.v_cmp), (heads.keys[0], heads.values[0]), strict=True):
            kept.put(new, step)
        for kept, new in zip((self.k_sel, self.v_sel), (heads.keys[1], heads.values[1]), strict=True):
            kept.put(new, step.in_rows(kept.capacity))
        for kept, new in zip((self.k_win, self.v_win), (heads.keys[2], heads.values[2]), strict=True):
            kept.put(new, step)
        return heads

    def _append(self, qkv: Tensor, rotary: Rotary, step: Step) -> Tensor:
        """As `_put`, in one launch for mixing, rotation and writing, and one for blocks; their queries."""
        roped, values = split_projection(qkv, self._attention.config, self._attention.BRANCHES)
        rings = self.k_cmp.raw.kept, self.v_cmp.raw.kept
        places = Places(*rings, self.k_sel.rows, self.v_sel.rows, self.k_win.kept, self.v_win.kept)
        q = _appended(roped, values, rotary, step, places, self.past)
        if self._nsa.phi in Compressed.IN_KERNELS:
            pools = {"k_pool": self.k_cmp.pool, "v_pool": self.v_cmp.pool}
            blocks = self.k_cmp.blocks.rows, self.v_cmp.blocks.rows
            kernels.complete(*rings, *blocks, step.lengths, step.width, self._nsa, **pools, settled=True)
        else:
            self.k_cmp.complete(step)
            self.v_cmp.complete(step)
        return q

    def _first(
        self, q: Tensor, branches: tuple[Tensor, Tensor, Tensor, Tensor], gates: Tensor, index_q: Tensor | None
    ) -> Tensor:
        """Attention of queries that are all tokens there are: the operator that trains."""
        k_cmp, v_cmp = (
            kept.blocks.rows[:, : geometry.num_compressed(q.shape[1], self._nsa)] for kept in (self.k_cmp, self.v_cmp)
        )
        blocks = None
        if self.index and index_q is not None:
            k_index = self.index.keys.blocks.rows[:, : geometry.num_compressed(q.shape[1], self.index.nsa)]
            blocks = choose_blocks(index_q, k_index, self.index.nsa, backend=self._backends)
        return nsa_attention(q, k_cmp, v_cmp, *branches, gates, self._nsa, blocks=blocks, backend=self._backends)

    def _next(self, q: Tensor, gates: Tensor, index_q: Tensor | None, step: Step) -> Tensor:
        return cached_attention(
            q,
            gates,
            self.layer(),
            step.lengths,
            self._nsa,
            index_q=index_q,
            choice_nsa=self.index.nsa if self.index else None,
            backend=self._backend,
        )

    def layer(self) -> LayerCache:
        """As `cached_attention` takes it."""
        return LayerCache(
            self.k_cmp.blocks.rows,
            self.v_cmp.blocks.rows,
            self.k_sel.rows,
            self.v_sel.rows,
            self.k_win.kept,
            self.v_win.kept,
            self.index.keys.blocks.rows if self.index else None,
        )

    def grow(self, capacity: int) -> None:
        """Room for `capacity` tokens; what is there stays."""
        for kept in (*self._compressed(), self.k_sel, self.v_sel):
            kept.grow(capacity)

    def _compressed(self) -> tuple[Compressed, ...]:
        return (self.k_cmp, self.v_cmp, *([self.index.keys] if self.index else []))

    def tensors(self) -> Iterator[Tensor]:
        """Everything that is kept, a sequence in every row."""
        yield from (kept for one in self._compressed() for kept in (one.blocks.rows, one.raw.kept))
        yield from (self.k_sel.rows, self.v_sel.rows, self.k_win.kept, self.v_win.kept)
        yield from (past.ring.kept for past in (self.past, self.index and self.index.past) if past)


class IndexCache:
    """What a layer's indexer keeps: its compressed keys."""

    def __init__(self, indexer: Indexer, capacity: int, batch: int, like: Tensor) -> None:
        c = indexer.config
        self._indexer, self.nsa, self.qk = indexer, indexer.nsa, indexer.qk
        self.keys = Compressed(indexer.nsa, indexer.phi, capacity, c.n_kv_groups, c.index_width, batch, like)
        self.past = _past(indexer.convolution, batch, like)

    def put(self, qk: Tensor, rotary: Rotary, step: Step) -> Tensor:
        """Keeps the keys of new tokens, of their map's output; their queries [B, S, G, D]."""
        q, k, unmixed = self._indexer.of(qk, step.rotary(rotary), before=self.past and self.past.before(step))
        if self.past:
            self.past.put(unmixed, step)
        self.keys.put(k, step)
        return q

    def append(self, qk: Tensor, rotary: Rotary, step: Step) -> Tensor:
        """As `put`, in two launches."""
        raw, keys = self.keys.raw.kept, self.keys
        roped = qk.unflatten(-1, (-1, raw.shape[3]))
        q = _appended(roped, None, narrowed(rotary, self._indexer.turned), step, Places(k_raw=raw), self.past)
        if self.nsa.phi in Compressed.IN_KERNELS:
            blocks = keys.blocks.rows
            kernels.complete(raw, None, blocks, None, step.lengths, step.width, self.nsa, k_pool=keys.pool, settled=True)
        else:
            keys.complete(step)
        return q


class DenseCache:
    """The cache of one dense layer, and attention through it."""

    def __init__(self, attention: DenseAttention, capacity: int, batch: int, like: Tensor, backend: str) -> None:
        c = attention.config
        self._attention, self._backend, self.past = attention, backend, _past(attention.convolution, batch, like)
        self.k, self.v = (TokenRows(capacity, c.n_kv_groups, width, batch, like) for width in (c.d_k, c.d_v))

    def attend(self, x: Tensor, norm: RMSNorm, rotary: Rotary, step: Step) -> Tensor:
        """As `NSACache.attend`."""
        a, by_kernels = self._attention, self._backend == "triton" and not step.begins
        (qkv,) = mapped(x, (a.qkv, ""), norm=norm, by_kernels=by_kernels)
        if by_kernels:
            roped, values = split_projection(qkv, a.config, a.BRANCHES)
            q = _appended(roped, values, rotary, step, Places(k_sel=self.k.rows, v_sel=self.v.rows), self.past)
        else:
            q, k, v = self._put(qkv, rotary, step)
            if step.begins:
                return x + a.out(dense_attention(q, k, v, backend=a.backends["dense"].backend).flatten(2))
        out = cached_dense_attention(q, self.k.rows, self.v.rows, step.lengths, backend=self._backend)
        return mapped(out.flatten(2), (a.out, ""), residual=x, by_kernels=by_kernels)[0]

    def _put(self, qkv: Tensor, rotary: Rotary, step: Step) -> tuple[Tensor, Tensor, Tensor]:
        """Keeps new tokens; their heads."""
        a, past = self._attention, self.past
        unturned = unturned_heads(qkv, a.config, a.convolution, a.BRANCHES, None, past and past.before(step))
        if past:
            past.put(unturned.unmixed, step)
        q, (k,), (v,), _ = turned_heads(unturned, a.config, a.BRANCHES, step.rotary(rotary))
        places = step.in_rows(self.k.capacity)
        self.k.put(k, places)
        self.v.put(v, places)
        return q, k, v

    def grow(self, capacity: int) -> None:
        """As `NSACache.grow`."""
        self.k.grow(capacity)
        self.v.grow(capacity)

    def tensors(self) -> Iterator[Tensor]:
        """As `NSACache.tensors`."""
        yield from (self.k.rows, self.v.rows)
        if self.past:
            yield self.past.ring.kept


def _past(convolution: ShortConvolution | None, batch: int, like: Tensor) -> Past | None:
    return None if convolution is None else Past(convolution, batch, like)


def _appended(
    roped: Tensor, values: Tensor | None, rotary: Rotary, step: Step, places: Places, past: Past | None
) -> Tensor:
    mixed = {} if past is None else {"past": past.ring.kept, "mix": past.mix}
    return kernels.append(roped, values, rotary, step.lengths, places, **mixed, settled=True)
