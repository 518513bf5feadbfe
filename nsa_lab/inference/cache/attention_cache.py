"""Cache of one attention layer, NSA or dense, and attention of new tokens through it.

New tokens are projected by calling the maps of the layer and written by PyTorch operations (`attend`), or all of this is a
few fused kernel launches that read the weights (`add_fused_attention`).
Shape suffixes: B batch, S new tokens, G key/value groups, D head width.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import cast

from torch import Tensor

from nsa_lab.attention import dense_attention, geometry, kernels, nsa_attention, score_and_select_blocks
from nsa_lab.attention.cached_attention import attend_and_select, cached_dense_attention
from nsa_lab.attention.key_storage import decode_keys, encode_keys, get_row_format
from nsa_lab.attention.layer_cache import CacheWriteBuffers, LayerCache
from nsa_lab.config import ModelConfig
from nsa_lab.inference import kv_cache_size
from nsa_lab.inference.cache.cache_step import Step
from nsa_lab.inference.cache.compressed_cache import CompressedCache, get_pool_weights
from nsa_lab.inference.cache.storage import PreviousKeys, Ring, TokenRows, TokenStorage
from nsa_lab.inference.fused_linear import apply_linears
from nsa_lab.model import DenseAttention, Indexer, RMSNorm, Rotary, ShortConvolution, SparseAttention
from nsa_lab.model.head_projections import ProjectedHeads, split_projection
from nsa_lab.model.indexer import IndexerOutput
from nsa_lab.model.layers import subsample_rotary


class NSACache:
    """Cache of one NSA layer, and attention through it. `like`: a tensor with the device and dtype of its activations.

    Branches that share keys and values share their storage: rows for all tokens if the selected branch is one of them,
    otherwise rings with the slots that the branches need. `layer_index`: as in `SparseAttention`.
    """

    def __init__(
        self, config: ModelConfig, capacity: int, batch: int, like: Tensor, backend: str, layer_index: int = 0
    ) -> None:
        c = config
        self._config, self._nsa, self._backend, self.like = c, c.nsa, backend, like
        self.tokens = [_make_token_storage(c, branches, capacity, batch, like) for branches in c.kv_sets]
        self._by_branch = {
            name: storage for branches, storage in zip(c.kv_sets, self.tokens, strict=True) for name in branches
        }
        self.compressed = [CompressedCache(c.nsa, capacity, raw, like) for raw in self._by_branch.get("cmp", ())]
        self.previous_keys = PreviousKeys(len(c.kv_sets), c.n_kv_groups, c.d_k, batch, like) if c.matching_heads else None
        self.scorer: IndexCache | MeanKeyCache | None = None
        if c.has_indexer_in(layer_index):
            self.scorer = IndexCache(c, capacity, batch, like)
        elif c.scores == "mean_key":
            self.scorer = MeanKeyCache(c, capacity, self._by_branch["sel"][0], like)
        # The kernel can apply a sigmoid gate to the projection; otherwise `activate_gates` does it.
        self._has_fused_gate = c.nsa.gate == "sigmoid" and not c.silent

    def attend(
        self, attention: SparseAttention, x: Tensor, rotary_table: Rotary, step: Step, blocks: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the attention output of all heads, [B, S, H d_v], for normalized new tokens x, and the selected blocks.

        The maps are called. `rotary_table`: tables of all positions, [capacity, R/2]. `blocks`: the selected blocks of an
        earlier layer, for a layer that does not select its own.
        """
        a, rotary = attention, step.select_rotary(rotary_table)
        if a.backends is None:
            raise ValueError(
                "NSACache: expected a layer with resolved backends, got one that resolves them for each input; "
                "use a layer of an NSATransformer"
            )
        heads = a.project_heads(x, rotary, None, self.previous_keys and self.previous_keys.read_previous(step))
        gates = a.compute_gates(x)
        gates = gates if gates is None else gates.to(self.like.dtype)
        self._put(a, heads, step)
        q = heads.q.to(self.like.dtype)
        index_q = self.scorer and self.scorer.put(a.indexer, x, q, heads, rotary_table, step)
        attend = partial(self._attend_prefill, a, heads) if step.is_prefill else self._attend_cached
        attended, blocks = attend(q, gates, index_q, step, self._drop_blocks(blocks))
        return attended.flatten(2).to(heads.q.dtype), blocks

    def add_fused_attention(
        self,
        attention: SparseAttention,
        norm: RMSNorm,
        x: Tensor,
        rotary_table: Rotary,
        step: Step,
        blocks: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return x + attention(norm(x)), [B, S, C], from fused kernels that read the weights, which must be plain.

        The rest as in `attend`.
        """
        a = attention
        projections = [(a.qkv, "")]
        if a.gate is not None:
            projections.append((a.gate, "sigmoid" if self._has_fused_gate else ""))
        if a.indexer is not None:
            projections.append((a.indexer.qk, ""))
        qkv, *rest = apply_linears(x, *projections, norm=norm)
        gates = rest.pop(0) if a.gate is not None else None
        if gates is not None:
            n = len(self._config.branches)
            gates = gates.unflatten(-1, (-1, n)) if self._has_fused_gate else a.activate_gates(gates).to(qkv.dtype)
        q = self._append(a, qkv, rotary_table, step)
        index_q = self.scorer and self.scorer.append(a.indexer, rest[0] if rest else None, q, rotary_table, step)
        attended, blocks = self._attend_cached(q, gates, index_q, step, self._drop_blocks(blocks))
        return apply_linears(attended.flatten(2), (a.out, ""), residual=x)[0], blocks

    def _drop_blocks(self, blocks: Tensor | None) -> Tensor | None:
        """Return the blocks of an earlier layer if this layer uses them, on its device."""
        if self.scorer is not None or not self._config.has_indexer or blocks is None:
            return None
        return blocks.to(self.like.device)

    def _put(self, attention: SparseAttention, heads: ProjectedHeads, step: Step) -> None:
        """Write the heads of new tokens, and the compressed blocks that they complete."""
        if self.previous_keys:
            self.previous_keys.put(heads.k_before_conv, step)
        for storage, *new in zip(self.tokens, heads.keys, heads.values, strict=True):
            for kind, x in zip(storage, new, strict=True):
                kind.put(x, step)
        if self.compressed:
            set_index = cast(int, self._config.get_kv_set("cmp"))
            new, phis = (heads.keys[set_index], heads.values[set_index]), (attention.phi_k, attention.phi_v)
            for cache, x, phi in zip(self.compressed, new, phis, strict=True):
                cache.put(x, phi, step)

    def _append(self, attention: SparseAttention, qkv: Tensor, rotary_table: Rotary, step: Step) -> Tensor:
        """Same as `_put`, and return the queries. One launch convolves, rotates and writes; one compresses blocks."""
        roped, values = split_projection(qkv, attention.config)
        buffers = _make_write_buffers(self._config, self.tokens)
        q = _launch_append(roped, values, rotary_table, step, buffers, self.previous_keys, attention.convolution)
        if not self.compressed:
            return q
        k, v = self.compressed
        if self._nsa.phi in CompressedCache.KERNEL_PHI:
            pools = {"k_pool": get_pool_weights(attention.phi_k), "v_pool": get_pool_weights(attention.phi_v)}
            rows = k.raw.rows, v.raw.rows, k.blocks.rows, v.blocks.rows
            kernels.update_compressed(*rows, step.lengths, step.width, self._nsa, **pools, can_prefetch=True)
        else:
            k.complete_blocks(attention.phi_k, step, qkv.dtype)
            v.complete_blocks(attention.phi_v, step, qkv.dtype)
        return q

    def _attend_prefill(
        self,
        attention: SparseAttention,
        heads: ProjectedHeads,
        q: Tensor,
        gates: Tensor | None,
        index_q: Tensor | None,
        step: Step,
        blocks: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend without earlier tokens, with the training operator."""
        assert attention.backends is not None
        by_branch: dict[str, tuple[Tensor, Tensor]] = {
            name: (k.to(self.like.dtype), v.to(self.like.dtype))
            for names, k, v in zip(self._config.kv_sets, heads.keys, heads.values, strict=True)
            for name in names
        }
        n_blocks = geometry.num_compressed(q.shape[1], self._nsa)
        k_cmp, v_cmp = [cache.blocks.rows[:, :n_blocks] for cache in self.compressed] or (None, None)
        (k_sel, v_sel), (k_win, v_win) = (by_branch.get(name, (None, None)) for name in ("sel", "win"))
        if self.scorer and index_q is not None:
            k_index = decode_keys(self.scorer.get_rows(), index_q.shape[3], index_q.dtype)
            k_index = k_index[:, : geometry.num_compressed(q.shape[1], self.scorer.nsa)]
            blocks = score_and_select_blocks(index_q, k_index, self.scorer.nsa, backend=attention.backends)
        inputs = q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates
        return nsa_attention(*inputs, self._nsa, blocks=blocks, backend=attention.backends), blocks

    def _attend_cached(
        self, q: Tensor, gates: Tensor | None, index_q: Tensor | None, step: Step, blocks: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        return attend_and_select(
            q,
            gates,
            self.get_layer_cache(),
            step.lengths,
            self._nsa,
            index_q=index_q,
            selection_nsa=self.scorer.nsa if self.scorer else None,
            blocks=blocks,
            backend=self._backend,
        )

    def get_layer_cache(self) -> LayerCache:
        """Return the tensors that `attend_and_select` reads."""
        cmp_rows = [cache.blocks.rows for cache in self.compressed]
        (k_cmp, v_cmp), (k_sel, v_sel), (k_win, v_win) = (
            rows or (None, None)
            for rows in (cmp_rows, *([x.rows for x in self._by_branch.get(name, ())] for name in ("sel", "win")))
        )
        return LayerCache(k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, self.scorer.get_rows() if self.scorer else None)

    def grow(self, capacity: int) -> None:
        """Increase the capacity to `capacity` tokens and keep the contents."""
        for storage in (*(x for pair in self.tokens for x in pair), *self._get_compressed()):
            storage.grow(capacity)

    def _get_compressed(self) -> list[CompressedCache]:
        return [*self.compressed, *([self.scorer.keys] if self.scorer else [])]

    def tensors(self) -> Iterator[Tensor]:
        """Yield all cached tensors; dimension 0 is the sequence."""
        yield from (x.rows for pair in self.tokens for x in pair)
        yield from (cache.blocks.rows for cache in self._get_compressed())
        if self.previous_keys:
            yield self.previous_keys.ring.rows
        if isinstance(self.scorer, IndexCache):
            yield from self.scorer.token_tensors()


class MeanKeyCache:
    """Mean keys of the selection blocks of a layer, which score the blocks. `raw`: the keys of the selected branch."""

    def __init__(self, config: ModelConfig, capacity: int, raw: TokenStorage, like: Tensor) -> None:
        self.nsa = config.selection_nsa
        self.keys = CompressedCache(self.nsa, capacity, raw, like)
        self._set_index = cast(int, config.get_kv_set("sel"))

    def put(self, indexer: object, x: Tensor, q: Tensor, heads: ProjectedHeads, rotary_table: Rotary, step: Step) -> Tensor:
        """Write the mean keys of blocks that new tokens complete, and return the queries q [B, S, H, d_k]."""
        self.keys.put(heads.keys[self._set_index], None, step)
        return q

    def append(self, indexer: object, qk: object, q: Tensor, rotary_table: Rotary, step: Step) -> Tensor:
        """Same as `put`, in one kernel launch."""
        raw, blocks = self.keys.raw.rows, self.keys.blocks.rows
        kernels.update_compressed(raw, None, blocks, None, step.lengths, step.width, self.nsa, can_prefetch=True)
        return q

    def get_rows(self) -> Tensor:
        """Return the keys that score blocks, [B, N, G, d_k]."""
        return self.keys.blocks.rows


class IndexCache:
    """Index keys of a layer, in the format of `ModelConfig.indexer_dtype`."""

    def __init__(self, config: ModelConfig, capacity: int, batch: int, like: Tensor) -> None:
        groups, width = config.index_groups, config.index_width
        self._config, self.nsa, self._dtype = config, config.selection_nsa, like.dtype
        raw = Ring(kv_cache_size.count_raw_slots(self.nsa), groups, width, batch, like)
        row_format = get_row_format(config.indexer_dtype, width, like.dtype)
        self.keys = CompressedCache(self.nsa, capacity, raw, like, row_format)
        self.previous_keys = PreviousKeys(1, groups, width, batch, like) if config.matching_heads else None
        pool_index = config.indexer_order.index("pool")
        self._rotates_tokens = "rotate" in config.indexer_order[:pool_index]
        self._steps_after_pool = config.indexer_order[pool_index + 1 :]
        self._can_fuse = "norm" not in config.indexer_order[:pool_index]  # the kernels do not normalize tokens

    def put(
        self, indexer: Indexer | None, x: Tensor, q: Tensor, heads: ProjectedHeads, rotary_table: Rotary, step: Step
    ) -> Tensor:
        """Write the keys of new tokens x [B, S, C] and return their queries [B, S, G * heads, D]."""
        assert indexer is not None
        output = indexer(x, step.select_rotary(rotary_table), previous_k=self._read_previous(step))
        return self._put_output(indexer, output, rotary_table, step)

    def _read_previous(self, step: Step) -> Tensor | None:
        return self.previous_keys and self.previous_keys.read_previous(step)

    def _put_output(self, indexer: Indexer, output: IndexerOutput, rotary_table: Rotary, step: Step) -> Tensor:
        """Write the keys that the indexer returned, and return its queries."""
        if self.previous_keys:
            self.previous_keys.put(output.k_before_conv, step)
        self.keys.raw.put(output.k, step)
        self.keys.put(output.k, indexer.phi, step, partial(self._finish_keys, indexer, rotary_table))
        return output.q.to(self._dtype)

    def _finish_keys(self, indexer: Indexer, rotary_table: Rotary, pooled: Tensor, positions: Tensor) -> Tensor:
        """Return pooled keys [B, n, index groups, D], of blocks that start at `positions`, in the format of the cache."""
        positions = positions.clamp_max(len(rotary_table[0]) - 1)
        keys = indexer.finish(pooled, (rotary_table[0][positions], rotary_table[1][positions]))
        return encode_keys(keys, self._config.indexer_dtype)

    def append(self, indexer: Indexer | None, qk: Tensor | None, q: Tensor, rotary_table: Rotary, step: Step) -> Tensor:
        """Same as `put`, given the output qk of the indexer's projection; in one kernel launch if it can store it."""
        assert indexer is not None and qk is not None
        if not self._can_fuse:
            rotary, previous_k = step.select_rotary(rotary_table), self._read_previous(step)
            output = indexer.split_and_rotate(qk, rotary, previous_k=previous_k)
            return self._put_output(indexer, output, rotary_table, step)
        norm, after = indexer.norm, self._steps_after_pool
        return kernels.append_index(
            qk.unflatten(-1, (-1, self._config.index_width)),
            subsample_rotary(rotary_table, indexer.rotary_width),
            step.lengths,
            self.keys.raw.rows,
            self.keys.blocks.rows,
            self.nsa,
            **_get_convolution(self.previous_keys, indexer.convolution),
            pool=get_pool_weights(indexer.phi),
            norm=None if norm is None else (norm.weight, norm.eps),
            rotates_tokens=self._rotates_tokens,
            rotates_blocks="rotate" in after,
            is_norm_first=after[:1] == ("norm",),
            can_prefetch=True,
        )

    def get_rows(self) -> Tensor:
        """Return the stored index keys, [B, N, G, row width]."""
        return self.keys.blocks.rows.expand(-1, -1, self._config.n_kv_groups, -1)

    def token_tensors(self) -> Iterator[Tensor]:
        """Yield the rings of raw tokens."""
        yield self.keys.raw.rows
        if self.previous_keys:
            yield self.previous_keys.ring.rows


class DenseCache:
    """Cache of one dense layer, and attention through it. `like` as in `NSACache`."""

    def __init__(
        self, config: ModelConfig, capacity: int, batch: int, like: Tensor, backend: str, layer_index: int = 0
    ) -> None:
        c = config
        self._backend, self.like = backend, like
        self.previous_keys = PreviousKeys(1, c.n_kv_groups, c.d_k, batch, like) if c.matching_heads else None
        self.k, self.v = _make_token_storage(c, ("dense",), capacity, batch, like)

    def attend(
        self, attention: DenseAttention, x: Tensor, rotary_table: Rotary, step: Step, blocks: Tensor | None
    ) -> tuple[Tensor, None]:
        """See `NSACache.attend`; there are no blocks."""
        a, previous = attention, self.previous_keys
        heads = a.project_heads(x, step.select_rotary(rotary_table), None, previous and previous.read_previous(step))
        if previous:
            previous.put(heads.k_before_conv, step)
        q, k, v = (new.to(self.like.dtype) for new in (heads.q, *heads.keys, *heads.values))
        self.k.put(k, step)
        self.v.put(v, step)
        if step.is_prefill:
            attended = dense_attention(q, k, v, backend=a.backends["dense"].backend)
        else:
            attended = cached_dense_attention(q, self.k.rows, self.v.rows, step.lengths, backend=self._backend)
        return attended.flatten(2).to(heads.q.dtype), None

    def add_fused_attention(
        self,
        attention: DenseAttention,
        norm: RMSNorm,
        x: Tensor,
        rotary_table: Rotary,
        step: Step,
        blocks: Tensor | None,
    ) -> tuple[Tensor, None]:
        """See `NSACache.add_fused_attention`; there are no blocks."""
        a = attention
        (qkv,) = apply_linears(x, (a.qkv, ""), norm=norm)
        roped, values = split_projection(qkv, a.config)
        buffers = CacheWriteBuffers(k_sel=self.k.rows, v_sel=self.v.rows)
        q = _launch_append(roped, values, rotary_table, step, buffers, self.previous_keys, a.convolution)
        attended = cached_dense_attention(q, self.k.rows, self.v.rows, step.lengths, backend=self._backend)
        return apply_linears(attended.flatten(2), (a.out, ""), residual=x)[0], None

    def grow(self, capacity: int) -> None:
        """See `NSACache.grow`."""
        self.k.grow(capacity)
        self.v.grow(capacity)

    def tensors(self) -> Iterator[Tensor]:
        """See `NSACache.tensors`."""
        yield from (self.k.rows, self.v.rows)
        if self.previous_keys:
            yield self.previous_keys.ring.rows


def _make_token_storage(
    config: ModelConfig, branches: tuple[str, ...], capacity: int, batch: int, like: Tensor
) -> tuple[TokenStorage, TokenStorage]:
    """Return storage for the keys and for the values that `branches` share."""
    G, n_slots = config.n_kv_groups, kv_cache_size.count_ring_slots(config.nsa, branches)
    keys, values = (
        TokenRows(capacity, G, width, batch, like) if n_slots is None else Ring(n_slots, G, width, batch, like)
        for width in (config.d_k, config.d_v)
    )
    return keys, values


def _make_write_buffers(config: ModelConfig, tokens: list[tuple[TokenStorage, TokenStorage]]) -> CacheWriteBuffers:
    """Return the storage of each set of keys and values, as the branch that determines its kind."""
    buffers: dict[str, Tensor] = {}
    for branches, (keys, values) in zip(config.kv_sets, tokens, strict=True):
        name = "sel" if "sel" in branches else "raw" if "cmp" in branches else "win"
        buffers |= {f"k_{name}": keys.rows, f"v_{name}": values.rows}
    return CacheWriteBuffers(**buffers)


def _launch_append(
    roped: Tensor,
    values: Tensor,
    rotary_table: Rotary,
    step: Step,
    buffers: CacheWriteBuffers,
    previous_keys: PreviousKeys | None,
    convolution: ShortConvolution | None,
) -> Tensor:
    conv_args = _get_convolution(previous_keys, convolution)
    return kernels.rotate_and_append(roped, values, rotary_table, step.lengths, buffers, **conv_args, can_prefetch=True)


def _get_convolution(previous_keys: PreviousKeys | None, convolution: ShortConvolution | None) -> dict[str, Tensor]:
    """Return the arguments of a kernel that convolves keys; none without a convolution."""
    if previous_keys is None or convolution is None:
        return {}
    return {"k_before_conv": previous_keys.ring.rows, "conv_weight": convolution.weight.flatten(1, 2)}
