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
from torch import Tensor

from nsa_lab.attention import choose_blocks, compress, dense_attention, geometry, kernels, nsa_attention, resolve_backend
from nsa_lab.attention.decoding import cached_attention, cached_dense_attention
from nsa_lab.attention.layer_cache import LayerCache
from nsa_lab.config import NSAConfig
from nsa_lab.inference import memory
from nsa_lab.model import Block, DenseAttention, Indexer, NSATransformer, Rotary, SparseAttention
from nsa_lab.model.attention import Heads


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

    def last_rows(self) -> Tensor:
        """Each sequence's latest token, by its place among one from before this step and the new ones: int64 [B]."""
        return self._once("last", lambda: self.rows.flatten() * (self.width + 1) + self.counts)

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

    def __init__(
        self,
        nsa: NSAConfig,
        phi: Callable[[Tensor], Tensor],
        capacity: int,
        groups: int,
        width: int,
        batch: int,
        like: Tensor,
    ) -> None:
        self.nsa, self._phi = nsa, phi
        self.blocks = TokenRows(geometry.num_compressed(capacity, nsa), groups, width, batch, like)
        self.raw = Ring(memory.raw_slots(nsa), groups, width, batch, like)

    def put(self, x: Tensor, step: Step) -> None:
        """New tokens [B, S, G, D], and the blocks that they complete in any sequence."""
        self.raw.put(x, step)
        if step.begins:
            self._put_blocks(self._phi(x), step)
        else:
            self.complete(step)

    def complete(self, step: Step) -> None:
        """The blocks that new tokens, which are in the ring already, complete in any sequence."""
        if new := self._completed(step):
            self._put_blocks(self._phi(self.raw.read(step.tokens_of_blocks(self.nsa, new, self.raw.slots))), step)

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


class Latest:
    """Of every sequence, the row of its latest token before a convolution; zeros before there is one."""

    def __init__(self) -> None:
        self.kept: Tensor | None = None

    def put(self, x: Tensor | None, step: Step) -> None:
        """x [B, S, ...]; None where there is no convolution."""
        if x is not None:
            self.kept = torch.zeros_like(x[:, :1]) if self.kept is None else self.kept
            seen = torch.cat([self.kept, x], dim=1).flatten(0, 1)
            self.kept.copy_(seen.index_select(0, step.last_rows()).unsqueeze(1))


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
        phi_k, phi_v = attention.phi_k, attention.phi_v
        self.k_cmp = Compressed(nsa, lambda k: compress(k, nsa, phi_k), capacity, G, c.d_k, batch, like)
        self.v_cmp = Compressed(nsa, lambda v: compress(v, nsa, phi_v), capacity, G, c.d_v, batch, like)
        self.k_sel, self.v_sel = (TokenRows(capacity, G, width, batch, like) for width in (c.d_k, c.d_v))
        self.k_win, self.v_win = (Ring(memory.window_slots(nsa), G, width, batch, like) for width in (c.d_k, c.d_v))
        self._before = Latest()
        self.index = IndexCache(attention.indexer, capacity, batch, like) if attention.indexer else None

    def attend(self, x: Tensor, rotary: Rotary, step: Step) -> Tensor:
        """Output [B, S, C] for new tokens x [B, S, C]."""
        if step.begins:
            heads = self._put(x, rotary, step)
            index_q, gates = self._index(x, rotary, step), self._gates(x, heads.q)
            branches = heads.keys[1], heads.values[1], heads.keys[2], heads.values[2]
            return self._attention.out(self._first(heads.q, branches, gates, index_q).flatten(2))
        q = self._put(x, rotary, step).q if self._backend == "torch" else self._append(x, rotary, step)
        return self._attention.out(self._next(q, self._gates(x, q), self._index(x, rotary, step), step).flatten(2))

    def _put(self, x: Tensor, rotary: Rotary, step: Step) -> Heads:
        """Keeps new tokens; their heads."""
        heads = self._attention.heads(x, rotary, before=self._before.kept)
        self._before.put(heads.unmixed, step)
        for kept, new in zip((self.k_cmp, self.v_cmp), (heads.keys[0], heads.values[0]), strict=True):
            kept.put(new, step)
        for kept, new in zip((self.k_sel, self.v_sel), (heads.keys[1], heads.values[1]), strict=True):
            kept.put(new, step.in_rows(kept.capacity))
        for kept, new in zip((self.k_win, self.v_win), (heads.keys[2], heads.values[2]), strict=True):
            kept.put(new, step)
        return heads

    def _append(self, x: Tensor, rotary: Rotary, step: Step) -> Tensor:
        """As `_put`, in one launch for rotation and writing; their queries."""
        roped, values, unmixed = self._attention.unturned(x, before=self._before.kept)
        self._before.put(unmixed, step)
        rings = self.k_cmp.raw.kept, self.v_cmp.raw.kept
        q = kernels.append(roped, values, rotary, step.lengths, self.layer(), *rings)
        for kept in (self.k_cmp, self.v_cmp):
            kept.complete(step)
        return q

    def _index(self, x: Tensor, rotary: Rotary, step: Step) -> Tensor | None:
        return self.index.put(x, rotary, step) if self.index else None

    def _gates(self, x: Tensor, like: Tensor) -> Tensor:
        return self._attention.gates(x).to(like.dtype)

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
        latest = (self._before, *([self.index.before] if self.index else []))
        yield from (one.kept for one in latest if one.kept is not None)


class IndexCache:
    """What a layer's indexer keeps: its compressed keys."""

    def __init__(self, indexer: Indexer, capacity: int, batch: int, like: Tensor) -> None:
        c = indexer.config
        self._indexer, self.nsa, self.before = indexer, indexer.nsa, Latest()
        self.keys = Compressed(indexer.nsa, indexer.compress, capacity, c.n_kv_groups, c.d_k, batch, like)

    def put(self, x: Tensor, rotary: Rotary, step: Step) -> Tensor:
        """Keeps the keys of new tokens x [B, S, C]; their queries [B, S, G, D]."""
        q, k, unmixed = self._indexer(x, rotary, before=self.before.kept)
        self.before.put(unmixed, step)
        self.keys.put(k, step)
        return q


class DenseCache:
    """The cache of one dense layer, and attention through it."""

    def __init__(self, attention: DenseAttention, capacity: int, batch: int, like: Tensor) -> None:
        c = attention.config
        self._attention, self._before = attention, Latest()
        self.k, self.v = (TokenRows(capacity, c.n_kv_groups, width, batch, like) for width in (c.d_k, c.d_v))

    def attend(self, x: Tensor, rotary: Rotary, step: Step) -> Tensor:
        """As `NSACache.attend`."""
        q, (k,), (v,), unmixed = self._attention.heads(x, rotary, before=self._before.kept)
        self._before.put(unmixed, step)
        places = step.in_rows(self.k.capacity)
        self.k.put(k, places)
        self.v.put(v, places)
        if step.begins:
            out = dense_attention(q, k, v, backend=self._attention.backends["dense"].backend)
        else:
            out = cached_dense_attention(q, self.k.rows, self.v.rows, step.lengths)
        return self._attention.out(out.flatten(2))

    def grow(self, capacity: int) -> None:
        """As `NSACache.grow`."""
        self.k.grow(capacity)
        self.v.grow(capacity)

    def tensors(self) -> Iterator[Tensor]:
        """As `NSACache.tensors`."""
        yield from (self.k.rows, self.v.rows)
        if self._before.kept is not None:
            yield self._before.kept


class Cache:
    """What a model keeps of `batch` sequences of at most `capacity` tokens; `backend` is `cached_attention`'s, by default
    triton for a model whose layers run on these kernels, and torch for any other.

    Raises ValueError where that is more memory than there is, and says how many sequences would fit; as `resolve_backend`
    where the backend cannot run, or does not take the model's shapes.
    """

    def __init__(self, model: NSATransformer, capacity: int, batch: int = 1, backend: str | None = None) -> None:
        like = model.head.weight
        backend = self.backend = backend or _own_backend(model)
        resolve_backend(like.device, like.dtype, model.config.nsa, model.config, backend)
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

    def advance(self, counts: Sequence[int]) -> None:
        """Every sequence is so many tokens longer."""
        self.starts = tuple(start + count for start, count in zip(self.starts, counts, strict=True))
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
    """triton where all that a layer computes is by triton."""
    return "triton" if all(choice.backend == "triton" for choice in model.backends.values()) else "torch"


def _layer(attention: object, capacity: int, batch: int, like: Tensor, backend: str) -> NSACache | DenseCache:
    if isinstance(attention, SparseAttention):
        return NSACache(attention, capacity, batch, like, backend)
    return DenseCache(cast(DenseAttention, attention), capacity, batch, like)
