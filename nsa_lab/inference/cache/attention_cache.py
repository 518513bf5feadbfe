"""Cache of one attention layer, NSA or dense, and attention of new tokens through it.

New tokens are projected by calling the maps of the layer and written by PyTorch operations (`attend`), or all of this is a
few fused kernel launches that read the weights (`add_fused_attention`).
Shape suffixes: B batch, S new tokens, G key/value groups, D head width.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from nsa_lab.attention import dense_attention, geometry, kernels, nsa_attention, score_and_select_blocks
from nsa_lab.attention.cached_attention import cached_attention, cached_dense_attention
from nsa_lab.attention.layer_cache import CacheWriteBuffers, LayerCache
from nsa_lab.config import ModelConfig
from nsa_lab.inference import kv_cache_size
from nsa_lab.inference.cache.cache_step import Step
from nsa_lab.inference.cache.compressed_cache import CompressedCache, get_pool_weights
from nsa_lab.inference.cache.storage import PreviousKeys, Ring, TokenRows
from nsa_lab.inference.fused_linear import apply_linears
from nsa_lab.model import DenseAttention, Indexer, RMSNorm, Rotary, ShortConvolution, SparseAttention
from nsa_lab.model.attention_layers import ProjectedHeads, split_projection
from nsa_lab.model.layers import subsample_rotary


class NSACache:
    """Cache of one NSA layer, and attention through it. `like`: a tensor with the device and dtype of its activations."""

    def __init__(self, config: ModelConfig, capacity: int, batch: int, like: Tensor, backend: str) -> None:
        c, nsa, G = config, config.nsa, config.n_kv_groups
        self._nsa, self._backend, self.like = nsa, backend, like
        self.k_cmp = CompressedCache(nsa, capacity, G, c.d_k, batch, like)
        self.v_cmp = CompressedCache(nsa, capacity, G, c.d_v, batch, like)
        self.k_sel, self.v_sel = (TokenRows(capacity, G, width, batch, like) for width in (c.d_k, c.d_v))
        self.k_win, self.v_win = (
            Ring(kv_cache_size.count_window_slots(nsa), G, width, batch, like) for width in (c.d_k, c.d_v)
        )
        self.previous_keys = PreviousKeys(SparseAttention.N_BRANCHES, G, c.d_k, batch, like) if c.matching_heads else None
        self.index = IndexCache(config, capacity, batch, like) if c.has_indexer else None
        # The kernel can apply a sigmoid gate to the projection; otherwise `activate_gates` does it.
        self._has_fused_gate = nsa.gate == "sigmoid" and not c.silent

    def attend(self, attention: SparseAttention, x: Tensor, rotary: Rotary, step: Step) -> Tensor:
        """Return the attention output of all heads, [B, S, H d_v], for normalized new tokens x. The maps are called.

        `rotary`: tables at the positions of the new tokens, [B, S, R/2].
        """
        a = attention
        if a.backends is None:
            raise ValueError(
                "NSACache: expected a layer with resolved backends, got one that resolves them for each input; "
                "use a layer of an NSATransformer"
            )
        heads = a.project_heads(x, rotary, None, self.previous_keys and self.previous_keys.read_previous(step))
        gates = a.compute_gates(x).to(self.like.dtype)
        self._put(a, heads, step)
        q, index_q = heads.q.to(self.like.dtype), self.index and self.index.put(a.indexer, x, rotary, step)
        if step.is_prefill:
            attended = self._attend_prefill(a, heads, gates, index_q)
        else:
            attended = self._attend_cached(q, gates, index_q, step)
        return attended.flatten(2).to(heads.q.dtype)

    def add_fused_attention(
        self, attention: SparseAttention, norm: RMSNorm, x: Tensor, rotary: Rotary, step: Step
    ) -> Tensor:
        """Return x + attention(norm(x)), [B, S, C], from fused kernels that read the weights, which must be plain.

        `rotary`: tables of all positions, [capacity, R/2].
        """
        a = attention
        projections = [(a.qkv, ""), (a.gate, "sigmoid" if self._has_fused_gate else "")]
        if a.indexer is not None:
            projections.append((a.indexer.qk, ""))
        qkv, gates, *qk = apply_linears(x, *projections, norm=norm)
        gates = gates.unflatten(-1, (-1, 3)) if self._has_fused_gate else a.activate_gates(gates).to(qkv.dtype)
        q = self._append(a, qkv, rotary, step)
        index_q = self.index and self.index.append(a.indexer, qk[0], rotary, step)
        attended = self._attend_cached(q, gates, index_q, step)
        return apply_linears(attended.flatten(2), (a.out, ""), residual=x)[0]

    def _put(self, attention: SparseAttention, heads: ProjectedHeads, step: Step) -> None:
        """Write the heads of new tokens."""
        if self.previous_keys:
            self.previous_keys.put(heads.k_before_conv, step)
        for storage, new, phi in zip(
            (self.k_cmp, self.v_cmp), (heads.keys[0], heads.values[0]), (attention.phi_k, attention.phi_v), strict=True
        ):
            storage.put(new, phi, step)
        for storage, new in zip((self.k_sel, self.v_sel), (heads.keys[1], heads.values[1]), strict=True):
            storage.put(new, step.get_row_indices(storage.capacity))
        for storage, new in zip((self.k_win, self.v_win), (heads.keys[2], heads.values[2]), strict=True):
            storage.put(new, step)

    def _append(self, attention: SparseAttention, qkv: Tensor, rotary: Rotary, step: Step) -> Tensor:
        """Same as `_put`, and return the queries. One launch convolves, rotates and writes; one compresses blocks."""
        roped, values = split_projection(qkv, attention.config, attention.N_BRANCHES)
        rings = self.k_cmp.raw_tokens.data, self.v_cmp.raw_tokens.data
        buffers = CacheWriteBuffers(*rings, self.k_sel.rows, self.v_sel.rows, self.k_win.data, self.v_win.data)
        q = _launch_append(roped, values, rotary, step, buffers, self.previous_keys, attention.convolution)
        if self._nsa.phi in CompressedCache.KERNEL_PHI:
            pools = {"k_pool": get_pool_weights(attention.phi_k), "v_pool": get_pool_weights(attention.phi_v)}
            blocks = self.k_cmp.blocks.rows, self.v_cmp.blocks.rows
            kernels.update_compressed(*rings, *blocks, step.lengths, step.width, self._nsa, **pools, can_prefetch=True)
        else:
            self.k_cmp.complete_blocks(attention.phi_k, step, qkv.dtype)
            self.v_cmp.complete_blocks(attention.phi_v, step, qkv.dtype)
        return q

    def _attend_prefill(
        self, attention: SparseAttention, heads: ProjectedHeads, gates: Tensor, index_q: Tensor | None
    ) -> Tensor:
        """Attend without earlier tokens, with the training operator."""
        assert attention.backends is not None
        q, k_sel, v_sel, k_win, v_win = (
            x.to(self.like.dtype) for x in (heads.q, heads.keys[1], heads.values[1], heads.keys[2], heads.values[2])
        )
        branches = k_sel, v_sel, k_win, v_win
        k_cmp, v_cmp = (
            cache.blocks.rows[:, : geometry.num_compressed(q.shape[1], self._nsa)] for cache in (self.k_cmp, self.v_cmp)
        )
        blocks = None
        if self.index and index_q is not None:
            k_index = self.index.keys.blocks.rows[:, : geometry.num_compressed(q.shape[1], self.index.nsa)]
            blocks = score_and_select_blocks(index_q, k_index, self.index.nsa, backend=attention.backends)
        return nsa_attention(q, k_cmp, v_cmp, *branches, gates, self._nsa, blocks=blocks, backend=attention.backends)

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

    def __init__(self, config: ModelConfig, capacity: int, batch: int, like: Tensor) -> None:
        G, D = config.n_kv_groups, config.index_width
        self.nsa = config.selection_nsa
        self.keys = CompressedCache(self.nsa, capacity, G, D, batch, like)
        self.previous_keys = PreviousKeys(1, G, D, batch, like) if config.matching_heads else None

    def put(self, indexer: Indexer | None, x: Tensor, rotary: Rotary, step: Step) -> Tensor:
        """Write the keys of new tokens x [B, S, C] and return their queries [B, S, G, D]."""
        assert indexer is not None
        q, k, k_before_conv = indexer(x, rotary, previous_k=self.previous_keys and self.previous_keys.read_previous(step))
        if self.previous_keys:
            self.previous_keys.put(k_before_conv, step)
        self.keys.put(k, indexer.phi, step)
        return q.to(self.keys.dtype)

    def append(self, indexer: Indexer | None, qk: Tensor, rotary: Rotary, step: Step) -> Tensor:
        """Same as `put`, given the output qk of the indexer's projection, in two kernel launches."""
        assert indexer is not None
        raw, keys = self.keys.raw_tokens.data, self.keys
        q = _launch_append(
            qk.unflatten(-1, (-1, raw.shape[3])),
            None,
            subsample_rotary(rotary, indexer.rotary_width),
            step,
            CacheWriteBuffers(k_raw=raw),
            self.previous_keys,
            indexer.convolution,
        )
        if self.nsa.phi in CompressedCache.KERNEL_PHI:
            blocks, pool = keys.blocks.rows, get_pool_weights(indexer.phi)
            kernels.update_compressed(
                raw, None, blocks, None, step.lengths, step.width, self.nsa, k_pool=pool, can_prefetch=True
            )
        else:
            keys.complete_blocks(indexer.phi, step, qk.dtype)
        return q


class DenseCache:
    """Cache of one dense layer, and attention through it. `like` as in `NSACache`."""

    def __init__(self, config: ModelConfig, capacity: int, batch: int, like: Tensor, backend: str) -> None:
        c, G = config, config.n_kv_groups
        self._backend, self.like = backend, like
        self.previous_keys = PreviousKeys(DenseAttention.N_BRANCHES, G, c.d_k, batch, like) if c.matching_heads else None
        self.k, self.v = (TokenRows(capacity, G, width, batch, like) for width in (c.d_k, c.d_v))

    def attend(self, attention: DenseAttention, x: Tensor, rotary: Rotary, step: Step) -> Tensor:
        """See `NSACache.attend`."""
        a, previous = attention, self.previous_keys
        heads = a.project_heads(x, rotary, None, previous and previous.read_previous(step))
        if previous:
            previous.put(heads.k_before_conv, step)
        q, k, v = (new.to(self.like.dtype) for new in (heads.q, *heads.keys, *heads.values))
        indices = step.get_row_indices(self.k.capacity)
        self.k.put(k, indices)
        self.v.put(v, indices)
        if step.is_prefill:
            attended = dense_attention(q, k, v, backend=a.backends["dense"].backend)
        else:
            attended = cached_dense_attention(q, self.k.rows, self.v.rows, step.lengths, backend=self._backend)
        return attended.flatten(2).to(heads.q.dtype)

    def add_fused_attention(
        self, attention: DenseAttention, norm: RMSNorm, x: Tensor, rotary: Rotary, step: Step
    ) -> Tensor:
        """See `NSACache.add_fused_attention`."""
        a = attention
        (qkv,) = apply_linears(x, (a.qkv, ""), norm=norm)
        roped, values = split_projection(qkv, a.config, a.N_BRANCHES)
        buffers = CacheWriteBuffers(k_sel=self.k.rows, v_sel=self.v.rows)
        q = _launch_append(roped, values, rotary, step, buffers, self.previous_keys, a.convolution)
        attended = cached_dense_attention(q, self.k.rows, self.v.rows, step.lengths, backend=self._backend)
        return apply_linears(attended.flatten(2), (a.out, ""), residual=x)[0]

    def grow(self, capacity: int) -> None:
        """See `NSACache.grow`."""
        self.k.grow(capacity)
        self.v.grow(capacity)

    def tensors(self) -> Iterator[Tensor]:
        """See `NSACache.tensors`."""
        yield from (self.k.rows, self.v.rows)
        if self.previous_keys:
            yield self.previous_keys.ring.data


def _launch_append(
    roped: Tensor,
    values: Tensor | None,
    rotary: Rotary,
    step: Step,
    buffers: CacheWriteBuffers,
    previous_keys: PreviousKeys | None,
    convolution: ShortConvolution | None,
) -> Tensor:
    conv_args = (
        {}
        if previous_keys is None or convolution is None
        else {"k_before_conv": previous_keys.ring.data, "conv_weight": convolution.weight.flatten(1, 2)}
    )
    return kernels.rotate_and_append(roped, values, rotary, step.lengths, buffers, **conv_args, can_prefetch=True)
