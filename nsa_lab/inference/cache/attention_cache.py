"""Cache of one attention layer, NSA or dense, and attention of new tokens through it.

New tokens are written by PyTorch operations (`put`) or by a few fused kernel launches (`append`).
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
    """Cache of one NSA layer, and attention through it."""

    def __init__(self, attention: SparseAttention, capacity: int, batch: int, like: Tensor, backend: str) -> None:
        if attention.backends is None:
            raise ValueError(
                "NSACache: expected a layer with resolved backends, got one that resolves them for each input; "
                "use a layer of an NSATransformer"
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
        # The kernel can apply a sigmoid gate to the projection; otherwise `activate_gates` does it.
        self._has_fused_gate = nsa.gate == "sigmoid" and not c.silent

    def attend(self, x: Tensor, norm: RMSNorm, rotary: Rotary, step: Step) -> Tensor:
        """Return x + attention(norm(x)), [B, S, C], for new tokens x. `rotary`: table of all positions, [capacity, R/2]."""
        a, use_kernels = self._attention, self._backend == "triton" and not step.is_prefill
        projections = [
            (a.qkv, ""),
            (a.gate, "sigmoid" if self._has_fused_gate else ""),
            *([(self.index.qk, "")] if self.index else []),
        ]
        qkv, gates, *qk = apply_linears(x, *projections, norm=norm, use_kernels=use_kernels)
        gates = gates.unflatten(-1, (-1, 3)) if self._has_fused_gate else a.activate_gates(gates).to(qkv.dtype)
        if use_kernels:
            q = self._append(qkv, rotary, step)
            index_q = self.index.append(qk[0], rotary, step) if self.index else None
        else:
            heads = self._put(qkv, rotary, step)
            q, index_q = heads.q, self.index.put(qk[0], rotary, step) if self.index else None
            if step.is_prefill:
                branches = heads.keys[1], heads.values[1], heads.keys[2], heads.values[2]
                return x + a.out(self._attend_prefill(q, branches, gates, index_q).flatten(2))
        attended = self._attend_cached(q, gates, index_q, step)
        return apply_linears(attended.flatten(2), (a.out, ""), residual=x, use_kernels=use_kernels)[0]

    def _put(self, qkv: Tensor, rotary: Rotary, step: Step) -> ProjectedHeads:
        """Write new tokens and return their heads."""
        a, previous = self._attention, self.previous_keys
        unrotated = split_heads(qkv, a.config, a.convolution, a.N_BRANCHES, None, previous and previous.read_previous(step))
        if previous:
            previous.put(unrotated.k_before_conv, step)
        heads = rotate_heads(unrotated, a.config, a.N_BRANCHES, step.select_rotary(rotary))
        for storage, new in zip((self.k_cmp, self.v_cmp), (heads.keys[0], heads.values[0]), strict=True):
            storage.put(new, step)
        for storage, new in zip((self.k_sel, self.v_sel), (heads.keys[1], heads.values[1]), strict=True):
            storage.put(new, step.get_row_indices(storage.capacity))
        for storage, new in zip((self.k_win, self.v_win), (heads.keys[2], heads.values[2]), strict=True):
            storage.put(new, step)
        return heads

    def _append(self, qkv: Tensor, rotary: Rotary, step: Step) -> Tensor:
        """Same as `_put`, and return only the queries. One launch convolves, rotates and writes; one compresses blocks."""
        roped, values = split_projection(qkv, self._attention.config, self._attention.N_BRANCHES)
        rings = self.k_cmp.raw_tokens.data, self.v_cmp.raw_tokens.data
        buffers = CacheWriteBuffers(*rings, self.k_sel.rows, self.v_sel.rows, self.k_win.data, self.v_win.data)
        q = _launch_append(roped, values, rotary, step, buffers, self.previous_keys)
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
        """Attend without earlier tokens, with the training operator."""
        k_cmp, v_cmp = (
            cache.blocks.rows[:, : geometry.num_compressed(q.shape[1], self._nsa)] for cache in (self.k_cmp, self.v_cmp)
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
        """Return the tensors that `cached_attention` reads."""
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
        """Increase the capacity to `capacity` tokens and keep the contents."""
        for storage in (*self._get_compressed(), self.k_sel, self.v_sel):
            storage.grow(capacity)

    def _get_compressed(self) -> tuple[CompressedCache, ...]:
        return (self.k_cmp, self.v_cmp, *([self.index.keys] if self.index else []))

    def tensors(self) -> Iterator[Tensor]:
        """Yield all cached tensors; dimension 0 is the sequence."""
        yield from (tensor for cache in self._get_compressed() for tensor in (cache.blocks.rows, cache.raw_tokens.data))
        yield from (self.k_sel.rows, self.v_sel.rows, self.k_win.data, self.v_win.data)
        yield from (
            previous.ring.data for previous in (self.previous_keys, self.index and self.index.previous_keys) if previous
        )


class IndexCache:
    """Cache of the indexer of a layer: its compressed keys."""

    def __init__(self, indexer: Indexer, capacity: int, batch: int, like: Tensor) -> None:
        c = indexer.config
        self._indexer, self.nsa, self.qk = indexer, indexer.nsa, indexer.qk
        self.keys = CompressedCache(indexer.nsa, indexer.phi, capacity, c.n_kv_groups, c.index_width, batch, like)
        self.previous_keys = _make_previous_keys(indexer.convolution, batch, like)

    def put(self, qk: Tensor, rotary: Rotary, step: Step) -> Tensor:
        """Write the keys of new tokens, given the projection output qk, and return their queries [B, S, G, D]."""
        q, k, k_before_conv = self._indexer.split_and_rotate(
            qk, step.select_rotary(rotary), previous_k=self.previous_keys and self.previous_keys.read_previous(step)
        )
        if self.previous_keys:
            self.previous_keys.put(k_before_conv, step)
        self.keys.put(k, step)
        return q

    def append(self, qk: Tensor, rotary: Rotary, step: Step) -> Tensor:
        """Same as `put`, in two kernel launches."""
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
    """Cache of one dense layer, and attention through it."""

    def __init__(self, attention: DenseAttention, capacity: int, batch: int, like: Tensor, backend: str) -> None:
        c = attention.config
        self._attention, self._backend, self.previous_keys = (
            attention,
            backend,
            _make_previous_keys(attention.convolution, batch, like),
        )
        self.k, self.v = (TokenRows(capacity, c.n_kv_groups, width, batch, like) for width in (c.d_k, c.d_v))

    def attend(self, x: Tensor, norm: RMSNorm, rotary: Rotary, step: Step) -> Tensor:
        """See `NSACache.attend`."""
        a, use_kernels = self._attention, self._backend == "triton" and not step.is_prefill
        (qkv,) = apply_linears(x, (a.qkv, ""), norm=norm, use_kernels=use_kernels)
        if use_kernels:
            roped, values = split_projection(qkv, a.config, a.N_BRANCHES)
            q = _launch_append(
                roped, values, rotary, step, CacheWriteBuffers(k_sel=self.k.rows, v_sel=self.v.rows), self.previous_keys
            )
        else:
            q, k, v = self._put(qkv, rotary, step)
            if step.is_prefill:
                return x + a.out(dense_attention(q, k, v, backend=a.backends["dense"].backend).flatten(2))
        attended = cached_dense_attention(q, self.k.rows, self.v.rows, step.lengths, backend=self._backend)
        return apply_linears(attended.flatten(2), (a.out, ""), residual=x, use_kernels=use_kernels)[0]

    def _put(self, qkv: Tensor, rotary: Rotary, step: Step) -> tuple[Tensor, Tensor, Tensor]:
        """Write new tokens and return their heads."""
        a, previous = self._attention, self.previous_keys
        unrotated = split_heads(qkv, a.config, a.convolution, a.N_BRANCHES, None, previous and previous.read_previous(step))
        if previous:
            previous.put(unrotated.k_before_conv, step)
        q, (k,), (v,), _ = rotate_heads(unrotated, a.config, a.N_BRANCHES, step.select_rotary(rotary))
        indices = step.get_row_indices(self.k.capacity)
        self.k.put(k, indices)
        self.v.put(v, indices)
        return q, k, v

    def grow(self, capacity: int) -> None:
        """See `NSACache.grow`."""
        self.k.grow(capacity)
        self.v.grow(capacity)

    def tensors(self) -> Iterator[Tensor]:
        """See `NSACache.tensors`."""
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
    buffers: CacheWriteBuffers,
    previous_keys: PreviousKeys | None,
) -> Tensor:
    conv_args = (
        {}
        if previous_keys is None
        else {"k_before_conv": previous_keys.ring.data, "conv_weight": previous_keys.conv_weights}
    )
    return kernels.rotate_and_append(roped, values, rotary, step.lengths, buffers, **conv_args, can_prefetch=True)
