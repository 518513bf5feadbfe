"""What one layer keeps, NSA or dense, and attention of its new tokens through that.

New tokens are kept by torch, piece by piece (`put`), or in few launches of kernels (`append`).
Shape suffixes: B batch, S new tokens, G key/value groups, D head width.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from nsa_lab.attention import dense_attention, geometry, kernels, nsa_attention, score_and_select_blocks
from nsa_lab.attention.cached_attention import cached_attention, cached_dense_attention
from nsa_lab.attention.layer_cache import CacheWriteBuffers, LayerCache
from nsa_lab.inference import kv_cache_size
from nsa_lab.inference.cache.cache_step import Step
from nsa_lab.inference.cache.compressed_cache import CompressedCache
from nsa_lab.inference.cache.storage import PreviousKeys, Ring, TokenRows
from nsa_lab.inference.fused_linear import apply_linears
from nsa_lab.model import DenseAttention, Indexer, RMSNorm, Rotary, ShortConvolution, SparseAttention
from nsa_lab.model.attention_layers import ProjectedHeads, rotate_heads, split_heads, split_projection
from nsa_lab.model.layers import subsample_rotary


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
        self.k_cmp = CompressedCache(nsa, attention.phi_k, capacity, G, c.d_k, batch, like)
        self.v_cmp = CompressedCache(nsa, attention.phi_v, capacity, G, c.d_v, batch, like)
        self.k_sel, self.v_sel = (TokenRows(capacity, G, width, batch, like) for width in (c.d_k, c.d_v))
        self.k_win, self.v_win = (
            Ring(kv_cache_size.count_window_slots(nsa), G, width, batch, like) for width in (c.d_k, c.d_v)
        )
        self.previous_keys = _make_previous_keys(attention.convolution, batch, like)
        self.index = IndexCache(attention.indexer, capacity, batch, like) if attention.indexer else None
        # What a kernel can do behind the gates' map; what else there is, `opened` does.
        self._has_fused_gate = nsa.gate == "sigmoid" and not c.silent

    def attend(self, x: Tensor, norm: RMSNorm, rotary: Rotary, step: Step) -> Tensor:
        """x + attention(norm(x)), [B, S, C], of new tokens x; `rotary` is the table of all positions, [capacity, R/2]."""
        a, by_kernels = self._attention, self._backend == "triton" and not step.is_prefill
        maps = [
            (a.qkv, ""),
            (a.gate, "sigmoid" if self._has_fused_gate else ""),
            *([(self.index.qk, "")] if self.index else []),
        ]
        qkv, gates, *qk = apply_linears(x, *maps, norm=norm, use_kernels=by_kernels)
        gates = gates.unflatten(-1, (-1, 3)) if self._has_fused_gate else a.activate_gates(gates).to(qkv.dtype)
        if by_kernels:
            q = self._append(qkv, rotary, step)
            index_q = self.index.append(qk[0], rotary, step) if self.index else None
        else:
            heads = self._put(qkv, rotary, step)
            q, index_q = heads.q, self.index.put(qk[0], rotary, step) if self.index else None
            if step.is_prefill:
                branches = heads.keys[1], heads.values[1], heads.keys[2], heads.values[2]
                return x + a.out(self._attend_prefill(q, branches, gates, index_q).flatten(2))
        out = self._attend_cached(q, gates, index_q, step)
        return apply_linears(out.flatten(2), (a.out, ""), residual=x, use_kernels=by_kernels)[0]

    def _put(self, qkv: Tensor, rotary: Rotary, step: Step) -> ProjectedHeads:
        """Keeps new tokens; their heads."""
        a, past = self._attention, self.previous_keys
        unturned = split_heads(qkv, a.config, a.convolution, a.N_BRANCHES, None, past and past.read_previous(step))
        if past:
            past.put(unturned.k_before_conv, step)
        heads = rotate_heads(unturned, a.config, a.N_BRANCHES, step.select_rotary(rotary))
        for kept, new in zip((self.k_cmp, self.v_cmp), (heads.keys[0], heads.values[0]), strict=True):
            kept.put(new, step)
        for kept, new in zip((self.k_sel, self.v_sel), (heads.keys[1], heads.values[1]), strict=True):
            kept.put(new, step.get_row_indices(kept.capacity))
        for kept, new in zip((self.k_win, self.v_win), (heads.keys[2], heads.values[2]), strict=True):
            kept.put(new, step)
        return heads

    def _append(self, qkv: Tensor, rotary: Rotary, step: Step) -> Tensor:
        """As `_put`, in one launch for mixing, rotation and writing, and one for blocks; their queries."""
        roped, values = split_projection(qkv, self._attention.config, self._attention.N_BRANCHES)
        rings = self.k_cmp.raw_tokens.data, self.v_cmp.raw_tokens.data
        places = CacheWriteBuffers(*rings, self.k_sel.rows, self.v_sel.rows, self.k_win.data, self.v_win.data)
        q = _launch_append(roped, values, rotary, step, places, self.previous_keys)
        if self._nsa.phi in CompressedCache.KERNEL_PHI:
            pools = {"k_pool": self.k_cmp.pool_weights, "v_pool": self.v_cmp.pool_weights}
            blocks = self.k_cmp.blocks.rows, self.v_cmp.blocks.rows
            kernels.update_compressed(*rings, *blocks, step.lengths, step.width, self._nsa, **pools, can_prefetch=True)
        else:
            self.k_cmp.complete_blocks(step)
            self.v_cmp.complete_blocks(step)
        return q

    def _attend_prefill(
        self, q: Tensor, branches: tuple[Tensor, Tensor, Tensor, Tensor], gates: Tensor, index_q: Tensor | None
    ) -> Tensor:
        """Attention of queries that are all tokens there are: the operator that trains."""
        k_cmp, v_cmp = (
            kept.blocks.rows[:, : geometry.num_compressed(q.shape[1], self._nsa)] for kept in (self.k_cmp, self.v_cmp)
        )
        blocks = None
        if self.index and index_q is not None:
            k_index = self.index.keys.blocks.rows[:, : geometry.num_compressed(q.shape[1], self.index.nsa)]
            blocks = score_and_select_blocks(index_q, k_index, self.index.nsa, backend=self._backends)
        return nsa_attention(q, k_cmp, v_cmp, *branches, gates, self._nsa, blocks=blocks, backend=self._backends)

    def _attend_cached(self, q: Tensor, gates: Tensor, index_q: Tensor | None, step: Step) -> Tensor:
        return cached_attention(
            q,
            gates,
            self.get_layer_cache(),
            step.lengths,
            self._nsa,
            index_q=index_q,
            selection_nsa=self.index.nsa if self.index else None,
            backend=self._backend,
        )

    def get_layer_cache(self) -> LayerCache:
        """As `cached_attention` takes it."""
        return LayerCache(
            self.k_cmp.blocks.rows,
            self.v_cmp.blocks.rows,
            self.k_sel.rows,
            self.v_sel.rows,
            self.k_win.data,
            self.v_win.data,
            self.index.keys.blocks.rows if self.index else None,
        )

    def grow(self, capacity: int) -> None:
        """Room for `capacity` tokens; what is there stays."""
        for kept in (*self._get_compressed(), self.k_sel, self.v_sel):
            kept.grow(capacity)

    def _get_compressed(self) -> tuple[CompressedCache, ...]:
        return (self.k_cmp, self.v_cmp, *([self.index.keys] if self.index else []))

    def tensors(self) -> Iterator[Tensor]:
        """Everything that is kept, a sequence in every row."""
        yield from (kept for one in self._get_compressed() for kept in (one.blocks.rows, one.raw_tokens.data))
        yield from (self.k_sel.rows, self.v_sel.rows, self.k_win.data, self.v_win.data)
        yield from (past.ring.data for past in (self.previous_keys, self.index and self.index.previous_keys) if past)


class IndexCache:
    """What a layer's indexer keeps: its compressed keys."""

    def __init__(self, indexer: Indexer, capacity: int, batch: int, like: Tensor) -> None:
        c = indexer.config
        self._indexer, self.nsa, self.qk = indexer, indexer.nsa, indexer.qk
        self.keys = CompressedCache(indexer.nsa, indexer.phi, capacity, c.n_kv_groups, c.index_width, batch, like)
        self.previous_keys = _make_previous_keys(indexer.convolution, batch, like)

    def put(self, qk: Tensor, rotary: Rotary, step: Step) -> Tensor:
        """Keeps the keys of new tokens, of their map's output; their queries [B, S, G, D]."""
        q, k, unmixed = self._indexer.split_and_rotate(
            qk, step.select_rotary(rotary), previous_k=self.previous_keys and self.previous_keys.read_previous(step)
        )
        if self.previous_keys:
            self.previous_keys.put(unmixed, step)
        self.keys.put(k, step)
        return q

    def append(self, qk: Tensor, rotary: Rotary, step: Step) -> Tensor:
        """As `put`, in two launches."""
        raw, keys = self.keys.raw_tokens.data, self.keys
        roped = qk.unflatten(-1, (-1, raw.shape[3]))
        q = _launch_append(
            roped,
            None,
            subsample_rotary(rotary, self._indexer.rotary_width),
            step,
            CacheWriteBuffers(k_raw=raw),
            self.previous_keys,
        )
        if self.nsa.phi in CompressedCache.KERNEL_PHI:
            blocks = keys.blocks.rows
            kernels.update_compressed(
                raw, None, blocks, None, step.lengths, step.width, self.nsa, k_pool=keys.pool_weights, can_prefetch=True
            )
        else:
            keys.complete_blocks(step)
        return q


class DenseCache:
    """The cache of one dense layer, and attention through it."""

    def __init__(self, attention: DenseAttention, capacity: int, batch: int, like: Tensor, backend: str) -> None:
        c = attention.config
        self._attention, self._backend, self.previous_keys = (
            attention,
            backend,
            _make_previous_keys(attention.convolution, batch, like),
        )
        self.k, self.v = (TokenRows(capacity, c.n_kv_groups, width, batch, like) for width in (c.d_k, c.d_v))

    def attend(self, x: Tensor, norm: RMSNorm, rotary: Rotary, step: Step) -> Tensor:
        """As `NSACache.attend`."""
        a, by_kernels = self._attention, self._backend == "triton" and not step.is_prefill
        (qkv,) = apply_linears(x, (a.qkv, ""), norm=norm, use_kernels=by_kernels)
        if by_kernels:
            roped, values = split_projection(qkv, a.config, a.N_BRANCHES)
            q = _launch_append(
                roped, values, rotary, step, CacheWriteBuffers(k_sel=self.k.rows, v_sel=self.v.rows), self.previous_keys
            )
        else:
            q, k, v = self._put(qkv, rotary, step)
            if step.is_prefill:
                return x + a.out(dense_attention(q, k, v, backend=a.backends["dense"].backend).flatten(2))
        out = cached_dense_attention(q, self.k.rows, self.v.rows, step.lengths, backend=self._backend)
        return apply_linears(out.flatten(2), (a.out, ""), residual=x, use_kernels=by_kernels)[0]

    def _put(self, qkv: Tensor, rotary: Rotary, step: Step) -> tuple[Tensor, Tensor, Tensor]:
        """Keeps new tokens; their heads."""
        a, past = self._attention, self.previous_keys
        unturned = split_heads(qkv, a.config, a.convolution, a.N_BRANCHES, None, past and past.read_previous(step))
        if past:
            past.put(unturned.k_before_conv, step)
        q, (k,), (v,), _ = rotate_heads(unturned, a.config, a.N_BRANCHES, step.select_rotary(rotary))
        places = step.get_row_indices(self.k.capacity)
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
        if self.previous_keys:
            yield self.previous_keys.ring.data


def _make_previous_keys(convolution: ShortConvolution | None, batch: int, like: Tensor) -> PreviousKeys | None:
    return None if convolution is None else PreviousKeys(convolution, batch, like)


def _launch_append(
    roped: Tensor,
    values: Tensor | None,
    rotary: Rotary,
    step: Step,
    places: CacheWriteBuffers,
    previous_keys: PreviousKeys | None,
) -> Tensor:
    mixed = {} if previous_keys is None else {"past": previous_keys.ring.data, "mix": previous_keys.conv_weights}
    return kernels.rotate_and_append(roped, values, rotary, step.lengths, places, **mixed, can_prefetch=True)
