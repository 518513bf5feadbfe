"""What a model keeps of the sequences that it reads, and attention of new tokens through it.

Invariants
* Everything is laid out once, for `batch` sequences of at most `capacity` tokens; a step writes into it and moves nothing.
* Sequences have lengths of their own. A step gives each the same number of tokens, of which the last ones may be padding:
  what they leave is beyond the sequence's length, is read by no token of it, and is overwritten by what comes.
* An NSA layer keeps selection keys and values of every token, window keys and values of the latest in a ring, compressed
  ones of every whole block and, in rings too, the tokens that the next block needs: phi is computed once for each block.
Shape suffixes: B batch, S new tokens, N compressed blocks, G key/value groups, D head width.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor, nn

from nsa_lab.attention import (
    BackendError,
    choose_blocks,
    compress,
    dense_attention,
    geometry,
    kernels,
    nsa_attention,
    resolve_backend,
)
from nsa_lab.attention.compression import BlockPool
from nsa_lab.attention.decoding import cached_attention, cached_dense_attention
from nsa_lab.attention.layer_cache import LayerCache, Places, Pool
from nsa_lab.config import NSAConfig
from nsa_lab.inference import memory
from nsa_lab.inference.maps import mapped
from nsa_lab.model import Block, DenseAttention, Indexer, NSATransformer, RMSNorm, Rotary, ShortConvolution, SparseAttention
from nsa_lab.model.attention import Heads, split_projection, turned_heads, unturned_heads


@dataclass(frozen=True)
class Step:
    """New tokens of every sequence.

    Where they go, in a cache of which shape, is the same for keys and values and in all layers: it is worked out for the
    first that asks. Places are numbered through all sequences, so that a write is one copy of whole rows.
    """

    starts: tuple[int, ...] | None
    """Tokens of each sequence before these; None in a step that is captured once and replayed at any lengths."""
    lengths: Tensor
    """The same, int32 [B] on the device."""
    positions: Tensor
    """Of the new tokens, int64 [B, S]."""
    counts: Tensor
    """How many of them are no padding, int64 [B]."""
    rows: Tensor
    """0 .. B-1, int64 [B, 1]."""
    _known: dict[Hashable, Tensor] = field(default_factory=dict[Hashable, Tensor])

    @property
    def width(self) -> int:
        return self.positions.shape[1]

    @property
    def begins(self) -> bool:
        """Whether there is nothing before them in any sequence; a captured step never begins."""
        return self.starts is not None and not any(self.starts)

    def in_rows(self, capacity: int) -> Tensor:
        """Places of the new tokens in `TokenRows`, int64 [B * S]."""
        return self._once(("rows", capacity), lambda: _in_rows(self.rows, self.positions, capacity))

    def in_ring(self, slots: int) -> Tensor:
        """Places of the new tokens in a `Ring`, int64 [B * S]."""
        return self._once(("ring", slots), lambda: _in_ring(self.rows, self.positions, slots))

    def beginning_of_ring(self, slots: int) -> Tensor:
        """Which of the new tokens a `Ring` begins with, by their places among them all, int64 [B * slots]."""

        def latest() -> Tensor:
            last = self.counts[:, None] - 1
            slot = torch.arange(slots, device=last.device)
            return (self.rows * self.width + (last - (last - slot) % slots).clamp_min(0)).flatten()

        return self._once(("beginning", slots), latest)

    def before_in_ring(self, slots: int) -> Tensor:
        """Place in a `Ring` of the token before the new ones, int64 [B]; of a sequence without one, any."""
        return self._once(("before", slots), lambda: _in_ring(self.rows, self.positions[:, :1] - 1, slots))

    def tokens_of_blocks(self, nsa: NSAConfig, blocks: int, slots: int) -> Tensor:
        """Places in a `Ring` of the tokens of so many blocks from the first that is not complete, int64 [B * tokens]."""

        def tokens() -> Tensor:
            first = self._first_block(nsa) * nsa.d
            each = torch.arange((blocks - 1) * nsa.d + nsa.l, device=first.device)
            return _in_ring(self.rows, first + each, slots)

        return self._once(("tokens", nsa.l, nsa.d, blocks, slots), tokens)

    def in_blocks(self, nsa: NSAConfig, blocks: int, capacity: int) -> Tensor:
        """Places in `TokenRows` of so many blocks from the first that is not complete, int64 [B * blocks]."""

        def places() -> Tensor:
            first = self._first_block(nsa)
            return _in_rows(self.rows, first + torch.arange(blocks, device=first.device), capacity)

        return self._once(("blocks", nsa.l, nsa.d, blocks, capacity), places)

    def _first_block(self, nsa: NSAConfig) -> Tensor:
        """The first block that was not complete before this step, int64 [B, 1]."""
        before = self.positions[:, :1] - 1
        return self._once(("first", nsa.l, nsa.d), lambda: geometry.visible_compressed(before, nsa))

    def _once(self, key: Hashable, make: Callable[[], Tensor]) -> Tensor:
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]


def _in_rows(rows: Tensor, places: Tensor, capacity: int) -> Tensor:
    """Of places [B, n] in each sequence, those past `capacity` in the row that follows all."""
    return torch.where(places < capacity, rows * capacity + places, len(rows) * capacity).flatten()


def _in_ring(rows: Tensor, positions: Tensor, slots: int) -> Tensor:
    return (rows * slots + positions % slots).flatten()


class TokenRows:
    """[B, capacity, G, D], and one row more, where padding past the capacity goes."""

    def __init__(self, capacity: int, groups: int, width: int, batch: int, like: Tensor) -> None:
        self.capacity, self._batch = capacity, batch
        self._kept = like.new_zeros(batch * capacity + 1, groups, width)

    @property
    def rows(self) -> Tensor:
        return self._kept[:-1].unflatten(0, (self._batch, self.capacity))

    def grow(self, capacity: int) -> None:
        """Room for `capacity` tokens; what is there stays."""
        there, self.capacity = self.rows, capacity
        self._kept = there.new_zeros(self._batch * capacity + 1, *there.shape[2:])
        self.rows[:, : there.shape[1]] = there

    def put(self, x: Tensor, places: Tensor) -> None:
        """x [B, S, G, D] at `places`, as `Step` gives them."""
        self._kept.index_copy_(0, places, x.flatten(0, 1))


class Ring:
    """[B, R, G, D]: the token at position p lies in slot p % R."""

    def __init__(self, slots: int, groups: int, width: int, batch: int, like: Tensor) -> None:
        self.kept = like.new_zeros(batch, slots, groups, width)

    @property
    def slots(self) -> int:
        return self.kept.shape[1]

    def put(self, x: Tensor, step: Step) -> None:
        """x [B, S, G, D] behind what there is, S <= `memory.STEP`; from position 0 any S."""
        x, flat = x.flatten(0, 1), self.kept.flatten(0, 1)
        if step.begins:
            flat.copy_(x.index_select(0, step.beginning_of_ring(self.slots)))
        else:
            flat.index_copy_(0, step.in_ring(self.slots), x)

    def read(self, places: Tensor) -> Tensor:
        """Tokens at `places`, int64 [B * n] as `Step` gives them -> [B, n, G, D]."""
        return self.kept.flatten(0, 1).index_select(0, places).unflatten(0, (len(self.kept), -1))


class Compressed:
    """The blocks of the tokens seen, compressed as `nsa` says, and the raw tokens that blocks to come need."""

    IN_KERNELS = ("avg", "pool")
    """The phi that `kernels.complete` has."""

    def __init__(
        self, nsa: NSAConfig, phi: nn.Module | None, capacity: int, groups: int, width: int, batch: int, like: Tensor
    ) -> None:
        self.nsa, self._phi = nsa, phi
        self.blocks = TokenRows(geometry.num_compressed(capacity, nsa), groups, width, batch, like)
        self.raw = Ring(memory.raw_slots(nsa), groups, width, batch, like)

    def put(self, x: Tensor, step: Step) -> None:
        """New tokens [B, S, G, D], and the blocks that they complete in any sequence."""
        self.raw.put(x, step)
        if step.begins:
            self._put_blocks(compress(x, self.nsa, self._phi), step)
        else:
            self.complete(step)

    def complete(self, step: Step) -> None:
        """The blocks that new tokens, which are in the ring already, complete in any sequence."""
        if new := self._completed(step):
            tokens = self.raw.read(step.tokens_of_blocks(self.nsa, new, self.raw.slots))
            self._put_blocks(compress(tokens, self.nsa, self._phi), step)

    @property
    def pool(self) -> Pool | None:
        """The weights of phi, where it is pool."""
        return (self._phi.score, self._phi.place) if isinstance(self._phi, BlockPool) else None

    def _put_blocks(self, blocks: Tensor, step: Step) -> None:
        self.blocks.put(blocks, step.in_blocks(self.nsa, blocks.shape[1], self.blocks.capacity))

    def grow(self, capacity: int) -> None:
        self.blocks.grow(self._whole(capacity))

    def _completed(self, step: Step) -> int:
        """The most blocks that a sequence completes. A block that is computed before it is complete lies beyond what any
        query sees, and is computed anew when it is."""
        if step.starts is None:
            return -(-step.width // self.nsa.d)
        return max(self._whole(start + step.width) - self._whole(start) for start in step.starts)

    def _whole(self, length: int) -> int:
        return geometry.num_compressed(length, self.nsa)


class Past:
    """Keys of the latest tokens as they came, before the convolution that mixes each with the one before."""

    def __init__(self, convolution: ShortConvolution, batch: int, like: Tensor) -> None:
        self._convolution = convolution
        _, self._branches, self._groups, width = convolution.weight.shape
        self.ring = Ring(memory.past_slots(), self._branches * self._groups, width, batch, like)

    @property
    def mix(self) -> Tensor:
        """The convolution's weights, [2, branches G, D]."""
        return self._convolution.weight.flatten(1, 2)

    def before(self, step: Step) -> Tensor | None:
        """Those of the token before new ones, [B, 1, branches, G, D]: zeros where a sequence has none; None: none has."""
        if step.begins:
            return None
        kept = self.ring.read(step.before_in_ring(self.ring.slots)).unflatten(2, (self._branches, self._groups))
        return kept.masked_fill((step.lengths == 0).view(-1, 1, 1, 1, 1), 0)

    def put(self, unmixed: Tensor | None, step: Step) -> None:
        """unmixed [B, S, branches, G, D], as the layer gives them."""
        if unmixed is not None:
            self.ring.put(unmixed.flatten(2, 3), step)


def _past(convolution: ShortConvolution | None, batch: int, like: Tensor) -> Past | None:
    return None if convolution is None else Past(convolution, batch, like)


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
        """x + attention(norm(x)), [B, S, C], of new tokens x."""
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
        heads = turned_heads(unturned, a.config, a.BRANCHES, rotary)
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
            kernels.complete(*rings, *blocks, step.lengths, step.width, self._nsa, **pools)
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
        self.keys = Compressed(indexer.nsa, indexer.phi, capacity, c.n_kv_groups, c.d_k, batch, like)
        self.past = _past(indexer.convolution, batch, like)

    def put(self, qk: Tensor, rotary: Rotary, step: Step) -> Tensor:
        """Keeps the keys of new tokens, of their map's output; their queries [B, S, G, D]."""
        q, k, unmixed = self._indexer.of(qk, rotary, before=self.past and self.past.before(step))
        if self.past:
            self.past.put(unmixed, step)
        self.keys.put(k, step)
        return q

    def append(self, qk: Tensor, rotary: Rotary, step: Step) -> Tensor:
        """As `put`, in two launches."""
        raw, keys = self.keys.raw.kept, self.keys
        roped = qk.unflatten(-1, (-1, raw.shape[3]))
        q = _appended(roped, None, rotary, step, Places(k_raw=raw), self.past)
        if self.nsa.phi in Compressed.IN_KERNELS:
            kernels.complete(raw, None, keys.blocks.rows, None, step.lengths, step.width, self.nsa, k_pool=keys.pool)
        else:
            keys.complete(step)
        return q


def _appended(
    roped: Tensor, values: Tensor | None, rotary: Rotary, step: Step, places: Places, past: Past | None
) -> Tensor:
    mixed = {} if past is None else {"past": past.ring.kept, "mix": past.mix}
    return kernels.append(roped, values, rotary, step.lengths, places, **mixed)


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
        q, (k,), (v,), _ = turned_heads(unturned, a.config, a.BRANCHES, rotary)
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


class Cache:
    """What a model keeps of `batch` sequences of at most `capacity` tokens; `backend` is `cached_attention`'s, by default
    triton for a model whose layers run on these kernels, and torch for any other.

    Raises ValueError where that is more memory than there is, and says how many sequences would fit; as `resolve_backend`
    where the backend cannot run, or does not take the model's shapes.
    """

    def __init__(self, model: NSATransformer, capacity: int, batch: int = 1, backend: str | None = None) -> None:
        like = model.head.weight
        backend = self.backend = backend or _own_backend(model)
        _check_backend(model, backend)
        memory.check_fits(model.config, capacity, batch, like.device, like.element_size())
        self.capacity, self.batch = capacity, batch
        self.starts = (0,) * batch
        self.lengths = torch.zeros(batch, dtype=torch.int32, device=like.device)
        self._rows = torch.arange(batch, device=like.device)[:, None]
        self.layers = [_layer(cast(Block, block).attention, capacity, batch, like, backend) for block in model.blocks]

    def step(self, width: int, counts: Sequence[int]) -> Step:
        """The next `width` tokens of every sequence, of which `counts` are no padding."""
        told = torch.tensor(counts, dtype=torch.int64).to(self.lengths.device, non_blocking=True)
        return self._step(self.starts, width, told)

    def step_at_any_length(self, counts: Tensor) -> Step:
        """The next token of every sequence, or padding, as `counts` say, int64 [B] of 1 and 0: nothing that the host would
        do depends on the lengths or on `counts`."""
        return self._step(None, 1, counts)

    def _step(self, starts: tuple[int, ...] | None, width: int, counts: Tensor) -> Step:
        positions = self.lengths.long()[:, None] + torch.arange(width, device=self.lengths.device)
        return Step(starts, self.lengths, positions, counts, self._rows)

    def advance(self, counts: Sequence[int], *, on_device: bool = True) -> None:
        """Every sequence is so many tokens longer; `on_device`: there, too, where a recorded step has done it itself."""
        self.starts = tuple(start + count for start, count in zip(self.starts, counts, strict=True))
        if on_device:
            # In place: a captured step looks for them where they are.
            self.lengths.copy_(torch.tensor(self.starts, dtype=torch.int32), non_blocking=True)

    def grow(self, capacity: int) -> None:
        """Room for `capacity` tokens of every sequence; everything that grows with them is copied."""
        self.capacity = capacity
        for layer in self.layers:
            layer.grow(capacity)

    def reorder(self, rows: Sequence[int]) -> None:
        """Sequence i becomes what sequence rows[i] was, as a search with beams asks for."""
        self.starts = tuple(self.starts[row] for row in rows)
        index = torch.tensor(rows, device=self.lengths.device)
        for kept in (self.lengths, *(tensor for layer in self.layers for tensor in layer.tensors())):
            kept.copy_(kept[index])


def _own_backend(model: NSATransformer) -> str:
    """triton where all that a layer computes is by triton, and for a dense model on a GPU, if our kernels take it."""
    if model.config.attention == "nsa":
        return "triton" if all(choice.backend == "triton" for choice in model.backends.values()) else "torch"
    return "triton" if model.head.weight.is_cuda and not any(_dense_limits(model)) else "torch"


def _check_backend(model: NSATransformer, backend: str) -> None:
    """Raises what `resolve_backend` raises; for a dense model, too."""
    c, like = model.config, model.head.weight
    if c.attention == "nsa" or backend != "triton":
        resolve_backend(like.device, like.dtype, c.nsa, c, backend)
        return
    absent, limit = _dense_limits(model)
    if absent:
        raise BackendError(f"backend = 'triton' cannot run: {absent}")
    if limit:
        raise NotImplementedError(f"decoding, backend = 'triton': {limit}; backend = 'torch' takes it as it is")


def _dense_limits(model: NSATransformer) -> tuple[str | None, str | None]:
    """Why our kernels cannot run here, and why they do not take this dense model's heads."""
    c, like = model.config, model.head.weight
    return kernels.unusable(like.device, like.dtype), kernels.width_limit(c.d_k, c.d_v)


def _layer(attention: object, capacity: int, batch: int, like: Tensor, backend: str) -> NSACache | DenseCache:
    if isinstance(attention, SparseAttention):
        return NSACache(attention, capacity, batch, like, backend)
    return DenseCache(cast(DenseAttention, attention), capacity, batch, like, backend)
