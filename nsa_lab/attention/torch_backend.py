"""The `torch` backend: vectorised, any device, memory linear in T.

Queries go in chunks; a chunk meets a contiguous range of keys under a mask, or, for the selected branch of a long
sequence, the gathered tokens of its own blocks. The backward pass recomputes a chunk's probabilities from the saved LSE,
so no score of more than one chunk is ever held. Documents are chunks of their own, over their own keys: what a packed row
costs follows the lengths of its documents, and a `Span.chunk` costs what it reads. Functions and shapes as in `reference`.

torch.compile steps around these functions: traced, the loop over chunks is unrolled and its backward pass comes out wrong
(torch 2.13; tests/model holds compiled gradients against eager ones).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from nsa_lab.attention import geometry, reference
from nsa_lab.attention.compile_utils import disable_compile
from nsa_lab.attention.layout import DocumentRows, Span
from nsa_lab.config import NSAConfig

# Bytes of scores, or of gathered keys, that a chunk of queries may take: about a CPU's cache, or enough to fill a GPU.
# What it brings on a CPU that scores stay in the cache stands in docs/kernel_log.md.
CHUNK_BYTES = {"cpu": 4 * 2**20, "cuda": 256 * 2**20}
# The fewest queries that a window's chunk is made of: with fewer, starting a chunk takes longer than computing it.
MIN_WINDOW_CHUNK = 64
# Past this many selection budgets of keys, gathering each query's blocks beats masking the whole past: a gathered key is
# read once per query and group, a masked one once per chunk.
GATHER_MIN_BUDGETS = 8


class Chunk(NamedTuple):
    """Queries at positions first .. last-1 of a document, their rows in q, and the rows of the document's keys."""

    start: int
    end: int
    query_rows: slice
    key_rows: slice


# A chunk -> the range of rows they may see, and which of those each may not: bool [B|1, G|1, C, keys]
KeyRange = Callable[[Chunk], tuple[slice, Tensor]]


@disable_compile
def compressed_attention(
    q: Tensor, k_cmp: Tensor, v_cmp: Tensor, nsa: NSAConfig, *, span: Span | None = None
) -> tuple[Tensor, Tensor]:
    """As `reference.compressed_attention`. Computes in `reference`'s wide dtype, since the block choice hangs on it."""
    span = span or Span.full(q.shape[1])
    wide = get_selection_dtype(q.dtype)

    def keys(chunk: Chunk) -> tuple[slice, Tensor]:
        seen = geometry.num_compressed(chunk.end, nsa)
        t = geometry.positions(chunk.start, chunk.end, q.device)
        return _slice_keys(chunk, 0, seen), ~geometry.sees_compressed(t, seen, nsa)[None, None]

    chunks: list[Chunk] = []
    for document, rows in zip(span.documents, span.compressed_rows(nsa), strict=True):
        chunks += _split_into_chunks(document, rows, _compute_score_bytes(q, rows.stop - rows.start, wide), q.device)
    return _attend_ranges(q, k_cmp, v_cmp, keys, wide, chunks)


@disable_compile
def select_blocks(q: Tensor, k_cmp: Tensor, lse: Tensor | None, nsa: NSAConfig, *, span: Span | None = None) -> Tensor:
    """As `reference.select_blocks`, streamed over chunks of queries."""
    span = span or Span.full(q.shape[1])
    if lse is None:
        _, lse = compressed_attention(q.detach(), k_cmp.detach(), k_cmp.detach(), nsa, span=span)
    B, T, H, _ = q.shape
    G = k_cmp.shape[2]
    wide = get_selection_dtype(q.dtype)
    k = k_cmp.detach().to(wide).transpose(1, 2)  # [B, G, N, D]
    chosen = torch.empty(B, T, G, nsa.n_sel, dtype=torch.int32, device=q.device)
    with torch.no_grad():
        for document, rows in zip(span.documents, span.compressed_rows(nsa), strict=True):
            for chunk in _split_into_chunks(
                document, rows, _compute_score_bytes(q, rows.stop - rows.start, wide), q.device
            ):
                first, last = chunk.start, chunk.end
                n = geometry.num_compressed(last, nsa)
                s = (
                    _to_group_rows(q[:, chunk.query_rows], G, wide)
                    @ k[:, :, _slice_keys(chunk, 0, n)].mT
                    * q.shape[-1] ** -0.5
                )
                s = torch.unflatten(s, 2, (last - first, H // G))  # [B, G, C, h, n]
                norm = _split_heads_groups_first(lse[:, chunk.query_rows], G, wide).unsqueeze(-1)
                seen = geometry.sees_compressed(geometry.positions(first, last, q.device), n, nsa)
                p = torch.where(seen.unsqueeze(1), s - norm, float("-inf")).exp().sum(3)  # [B, G, C, n]
                importance = sum_over_selection_blocks(p, geometry.num_selection(last, nsa), nsa).float().transpose(1, 2)
                chosen[:, chunk.query_rows] = reference.select_by_importance(importance, nsa, first=first)
    return chosen


@disable_compile
def selected_attention(
    q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, nsa: NSAConfig, *, span: Span | None = None
) -> tuple[Tensor, Tensor]:
    """As `reference.selected_attention`. Masks the past of a short document, and gathers from a long one."""
    span = span or Span.full(q.shape[1])
    runs = [(long, list(run)) for long, run in groupby(span.documents, lambda d: _is_long_document(d, nsa))]
    if len(runs) == 1:
        return _attend_selected(q, k, v, blocks, nsa, *runs[0])
    # Only packed documents make more than one run, and their rows of q and of k are the same.
    sizes = [run[-1].query_rows.stop - run[0].query_rows.start for _, run in runs]
    split = [torch.split(x, sizes, dim=1) for x in (q, k, v, blocks)]
    parts = [
        _attend_selected(q, k, v, blocks, nsa, long, _shift_to_first_row(run))
        for q, k, v, blocks, (long, run) in zip(*split, runs, strict=True)
    ]
    outs, lses = zip(*parts, strict=True)
    return torch.cat(outs, dim=1), torch.cat(lses, dim=1)


@disable_compile
def window_attention(q: Tensor, k: Tensor, v: Tensor, nsa: NSAConfig, *, span: Span | None = None) -> tuple[Tensor, Tensor]:
    """As `reference.window_attention`."""
    span = span or Span.full(q.shape[1])

    def keys(chunk: Chunk) -> tuple[slice, Tensor]:
        first, last = chunk.start, chunk.end
        start = max(first - nsa.w + 1, 0)
        future = ~_build_causal_mask(first, last, start, last, q.device)
        too_old = _build_causal_mask(first - nsa.w, last - nsa.w, start, last, q.device)
        return _slice_keys(chunk, start, last), (future | too_old)[None, None]

    wide = get_accumulation_dtype(q.dtype)
    chunks: list[Chunk] = []
    for document in span.documents:
        # The chunk's own length adds to its range, so chunks longer than the window would only grow the mask; but a narrow
        # window would make as many chunks as queries.
        longest = max(nsa.w, MIN_WINDOW_CHUNK)
        score_bytes = _compute_score_bytes(q, min(longest + nsa.w, document.end), wide)
        chunks += _split_into_chunks(document, document.key_rows, score_bytes, q.device, longest)
    return _attend_ranges(q, k, v, keys, wide, chunks)


def _is_long_document(document: DocumentRows, nsa: NSAConfig) -> bool:
    return GATHER_MIN_BUDGETS * nsa.n_sel * nsa.l_sel < document.end


def _shift_to_first_row(run: list[DocumentRows]) -> list[DocumentRows]:
    """The same documents, where the first row is the first one's."""
    begin = run[0].query_rows.start
    moved = [slice(d.query_rows.start - begin, d.query_rows.stop - begin) for d in run]
    return [DocumentRows(rows, rows, d.start, d.end) for rows, d in zip(moved, run, strict=True)]


def _attend_selected(
    q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, nsa: NSAConfig, is_long: bool, documents: list[DocumentRows]
) -> tuple[Tensor, Tensor]:
    """`selected_attention` of documents that are all long, or all short."""
    wide = get_accumulation_dtype(q.dtype)
    chunks: list[Chunk] = []
    if is_long:
        B, G, h = q.shape[0], k.shape[2], q.shape[2] // k.shape[2]
        gathered = B * G * blocks.shape[3] * nsa.l_sel * (q.shape[3] + v.shape[3] + h) * wide.itemsize
        for document in documents:
            chunks += _split_into_chunks(document, document.key_rows, gathered, q.device)
        return _attend_gathered(q, k, v, blocks, nsa.l_sel, chunks)
    per_group = blocks.transpose(1, 2)  # [B, G, T, n_sel]

    def keys(chunk: Chunk) -> tuple[slice, Tensor]:
        first, last = chunk.start, chunk.end
        n = geometry.num_selection(last, nsa)
        picks = per_group[:, :, chunk.query_rows]
        passed_over = torch.ones(*picks.shape[:3], n + 1, dtype=torch.bool, device=q.device)
        # Padding, and a block that no query of the chunk has reached, land in a spare column.
        passed_over.scatter_(-1, torch.where((picks < 0) | (picks > n), n, picks).long(), False)
        tokens = passed_over[..., :n].repeat_interleave(nsa.l_sel, dim=-1)[..., :last]
        return _slice_keys(chunk, 0, last), tokens | ~_build_causal_mask(first, last, 0, last, q.device)

    for document in documents:
        chunks += _split_into_chunks(document, document.key_rows, _compute_score_bytes(q, document.end, wide), q.device)
    return _attend_ranges(q, k, v, keys, wide, chunks)


combine = reference.combine


class _RangeAttention(torch.autograd.Function):
    """Masked softmax attention of chunks of queries over ranges of keys; scores are recomputed in backward."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, keys: KeyRange, wide: torch.dtype, chunks: list[Chunk]
    ) -> tuple[Tensor, Tensor]:
        B, T, H, D = q.shape
        G, Dv, scale = k.shape[2], v.shape[3], D**-0.5
        out = q.new_empty(B, T, H, Dv)
        lse = torch.empty(B, T, H, dtype=_get_lse_dtype(q.dtype), device=q.device)
        k_marked, v_sound = _replace_nonfinite(k, v, mark=float("nan"))
        for chunk in chunks:
            reach, hidden = keys(chunk)
            k_T, v_wide = k_marked[:, reach].to(wide).transpose(1, 2).mT, v_sound[:, reach].to(wide).transpose(1, 2)
            p = _mask_scores(_to_group_rows(q[:, chunk.query_rows], G, wide) * scale @ k_T, hidden)
            total, chunk_lse = _exponentiate(p)
            o = p.flatten(2, 3) @ v_wide / total.flatten(2, 3)
            out[:, chunk.query_rows] = _from_group_rows(o, H // G).to(q.dtype)
            lse[:, chunk.query_rows] = chunk_lse.transpose(1, 2).flatten(2)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.keys, ctx.wide, ctx.chunks = keys, wide, chunks
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        grad_out, grad_lse = grad_outputs
        q, k, v, out, lse = ctx.saved_tensors
        wide, h, G = ctx.wide, q.shape[2] // k.shape[2], k.shape[2]
        scale = q.shape[-1] ** -0.5
        grad_q = torch.empty_like(q)
        grad_k = torch.zeros(k.transpose(1, 2).shape, dtype=wide, device=k.device)
        grad_v = torch.zeros(v.transpose(1, 2).shape, dtype=wide, device=k.device)
        # d loss / d score = p * (dp - row), with row = sum(out * grad_out) - grad_lse
        row = (out.to(wide) * grad_out.to(wide)).sum(-1) - grad_lse.to(wide)
        k_sound, v_sound = _replace_nonfinite(k, v, mark=0.0)  # what is marked has reached the LSE
        for chunk in ctx.chunks:
            reach, hidden = ctx.keys(chunk)
            q_rows, do_rows = (
                _to_group_rows(q[:, chunk.rows], G, wide) * scale,
                _to_group_rows(grad_out[:, chunk.rows], G, wide),
            )
            k_wide, v_wide = k_sound[:, reach].to(wide).transpose(1, 2), v_sound[:, reach].to(wide).transpose(1, 2)
            p = _mask_scores(q_rows @ k_wide.mT, hidden)
            p.sub_(_zero_neginf(_split_heads_groups_first(lse[:, chunk.rows], G, wide)).unsqueeze(-1)).exp_()
            p = p.flatten(2, 3)
            ds = (
                (do_rows @ v_wide.mT)
                .sub_(_split_heads_groups_first(row[:, chunk.rows], G, wide).flatten(2, 3).unsqueeze(-1))
                .mul_(p)
            )
            grad_v[:, :, reach] += p.mT @ do_rows
            grad_k[:, :, reach] += ds.mT @ q_rows
            grad_q[:, chunk.rows] = _from_group_rows(ds @ k_wide * scale, h).to(q.dtype)
        return grad_q, grad_k.transpose(1, 2).to(k.dtype), grad_v.transpose(1, 2).to(v.dtype), None, None, None


class _GatherAttention(torch.autograd.Function):
    """Selected attention by gathering every query's own blocks: work and memory follow n_sel*l_sel, not T."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, l_sel: int, chunks: list[Chunk]
    ) -> tuple[Tensor, Tensor]:
        B, T, H, D = q.shape
        G, Dv = k.shape[2], v.shape[3]
        wide = get_accumulation_dtype(q.dtype)
        out = q.new_empty(B, T, H, Dv)
        lse = torch.empty(B, T, H, dtype=_get_lse_dtype(q.dtype), device=q.device)
        k_marked, v_sound = _replace_nonfinite(k, v, mark=float("nan"))
        for chunk in chunks:
            index, hidden = _index_block_tokens(blocks, chunk, l_sel)
            k_own, v_own = k_marked[:, chunk.key_rows][index].to(wide), v_sound[:, chunk.key_rows][index].to(wide)
            p = _split_heads(q[:, chunk.query_rows], G, wide) * D**-0.5 @ k_own.mT  # [B, C, G, h, S]
            p.masked_fill_(hidden.unsqueeze(3), float("-inf"))
            total, chunk_lse = _exponentiate(p)
            out[:, chunk.query_rows] = (p @ v_own / total).flatten(2, 3).to(q.dtype)
            lse[:, chunk.query_rows] = chunk_lse.flatten(2, 3)
        ctx.save_for_backward(q, k, v, blocks, out, lse)
        ctx.chunks, ctx.l_sel = chunks, l_sel
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        grad_out, grad_lse = grad_outputs
        q, k, v, blocks, out, lse = ctx.saved_tensors
        G, scale, wide = k.shape[2], q.shape[-1] ** -0.5, get_accumulation_dtype(q.dtype)
        grad_q = torch.empty_like(q)
        grad_k = torch.zeros(k.shape, dtype=wide, device=k.device)
        grad_v = torch.zeros(v.shape, dtype=wide, device=k.device)
        row = (out.to(wide) * grad_out.to(wide)).sum(-1) - grad_lse.to(wide)
        k_sound, v_sound = _replace_nonfinite(k, v, mark=0.0)  # what is marked has reached the LSE
        for chunk in ctx.chunks:
            index, hidden = _index_block_tokens(blocks, chunk, ctx.l_sel)
            k_own, v_own = k_sound[:, chunk.keys][index].to(wide), v_sound[:, chunk.keys][index].to(wide)
            q_own, do_own = _split_heads(q[:, chunk.rows], G, wide) * scale, _split_heads(grad_out[:, chunk.rows], G, wide)
            p = (q_own @ k_own.mT).masked_fill_(hidden.unsqueeze(3), float("-inf"))
            p.sub_(_zero_neginf(_split_heads(lse[:, chunk.rows].unsqueeze(-1), G, wide))).exp_()
            ds = (do_own @ v_own.mT).sub_(_split_heads(row[:, chunk.rows].unsqueeze(-1), G, wide)).mul_(p)
            grad_q[:, chunk.rows] = (ds @ k_own * scale).flatten(2, 3).to(q.dtype)
            _scatter_add(grad_k[:, chunk.keys], index[1], ds.mT @ q_own)
            _scatter_add(grad_v[:, chunk.keys], index[1], p.mT @ do_own)
        return grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype), None, None, None


def _attend_ranges(
    q: Tensor, k: Tensor, v: Tensor, get_keys: KeyRange, wide: torch.dtype, chunks: list[Chunk]
) -> tuple[Tensor, Tensor]:
    return _RangeAttention.apply(q, k, v, get_keys, wide, chunks)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


def _attend_gathered(
    q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, l_sel: int, chunks: list[Chunk]
) -> tuple[Tensor, Tensor]:
    return _GatherAttention.apply(q, k, v, blocks, l_sel, chunks)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


def _index_block_tokens(blocks: Tensor, chunk: Chunk, l_sel: int) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    """Where a document's keys [B, S, G, D] hold the tokens [B, C, G, n] of the chunk's own blocks, and which are hidden."""
    own = blocks[:, chunk.query_rows]
    tokens = (own.long().unsqueeze(-1) * l_sel + torch.arange(l_sel, device=own.device)).flatten(-2)
    t = geometry.positions(chunk.start, chunk.end, own.device)[:, None, None]
    hidden = (tokens < 0) | (tokens > t)
    batch = torch.arange(own.shape[0], device=own.device)[:, None, None, None]
    group = torch.arange(own.shape[2], device=own.device)[:, None]
    return (batch, torch.where(hidden, 0, tokens), group), hidden


def _scatter_add(grad: Tensor, tokens: Tensor, parts: Tensor) -> None:
    """Adds parts [B, C, G, S, D] to grad [B, T, G, D] at tokens [B, C, G, S]."""
    index = tokens.transpose(1, 2).flatten(2).unsqueeze(-1)  # [B, G, C*S, 1]
    flat = parts.transpose(1, 2).flatten(2, 3)  # [B, G, C*S, D]
    grad.transpose(1, 2).scatter_add_(2, index.expand_as(flat), flat)


def sum_over_selection_blocks(p: Tensor, n_blocks: int, nsa: NSAConfig) -> Tensor:
    """Eq. 9 without its matrix: p [..., n] over compressed blocks -> importance [..., blocks].

    Its two sums, one after the other: a stride of d tokens collects the l/d compressed blocks that it lies in, and a
    selection block its l_sel/d strides.
    """
    step, lead = nsa.l_sel // nsa.d, nsa.l // nsa.d - 1
    padded = pad(p, (lead, n_blocks * step - p.shape[-1]))
    strides = padded[..., lead:]
    for shift in range(lead):
        strides = strides + padded[..., shift : shift + n_blocks * step]
    # A product with ones: of many queries it takes a half to two thirds of what a sum over so short a dimension does.
    return torch.unflatten(strides, -1, (n_blocks, step)) @ p.new_ones(step)


def _build_causal_mask(first: int, last: int, start: int, stop: int, device: torch.device) -> Tensor:
    """Bool [last - first, stop - start]: key number <= query number."""
    return geometry.positions(start, stop, device) <= geometry.positions(first, last, device)[:, None]


def _compute_score_bytes(q: Tensor, n_keys: int, wide: torch.dtype) -> int:
    """Of the scores of one query position against `keys`."""
    return q.shape[0] * q.shape[2] * max(n_keys, 1) * wide.itemsize


def _split_into_chunks(
    document: DocumentRows, key_rows: slice, bytes_per_query: int, device: torch.device, max_length: int | None = None
) -> list[Chunk]:
    size = max(CHUNK_BYTES[device.type] // bytes_per_query, 1)
    size = min(size, max_length or size)
    row = document.query_rows.start - document.start
    ends = [(first, min(first + size, document.end)) for first in range(document.start, document.end, size)]
    return [Chunk(first, last, slice(row + first, row + last), key_rows) for first, last in ends]


def _slice_keys(chunk: Chunk, start: int, stop: int) -> slice:
    """Keys start .. stop-1 of the chunk's document as rows of the tensor."""
    return slice(chunk.key_rows.start + start, chunk.key_rows.start + stop)


def _replace_nonfinite(k: Tensor, v: Tensor, mark: float) -> tuple[Tensor, Tensor]:
    """Keys with `mark`, and values with 0, where a key or its value is not finite.

    Zero times NaN is NaN, in a product over keys that most of its rows may not see. Taken out of the product and marked in
    the score, which is masked, what is not finite reaches the queries that read it and no others.
    """
    sound = (k.isfinite().all(-1) & v.isfinite().all(-1)).unsqueeze(-1)
    return k.where(sound, mark), v.where(sound, 0.0)


def _mask_scores(s: Tensor, hidden: Tensor) -> Tensor:
    """Scores [B, G, C*h, keys] -> [B, G, C, h, keys], in place, -inf where hidden."""
    return torch.unflatten(s, 2, (hidden.shape[2], -1)).masked_fill_(hidden.unsqueeze(3), float("-inf"))


def _exponentiate(s: Tensor) -> tuple[Tensor, Tensor]:
    """Turns scores into exp(s - max), in place; returns their sum [..., 1] and LSE [...].

    A row that sees nothing becomes zeros with sum 1 and LSE -inf, also when there is no key at all.
    """
    if s.shape[-1] == 0:
        return s.new_ones(*s.shape[:-1], 1), s.new_full(s.shape[:-1], float("-inf"))
    top = _zero_neginf(s.amax(-1, keepdim=True))
    total = s.sub_(top).exp_().sum(-1, keepdim=True)
    return torch.where(total == 0, 1.0, total), (top + total.log()).squeeze(-1)


def _zero_neginf(lse: Tensor) -> Tensor:
    """-inf, the mark of a row that sees nothing, as 0: its scores are all -inf, and their exp must come out 0."""
    return torch.where(torch.isneginf(lse), 0.0, lse)


def _to_group_rows(x: Tensor, groups: int, wide: torch.dtype) -> Tensor:
    """[B, C, H, D] -> [B, G, C*h, D]: the heads of a group are rows of one matrix."""
    return torch.unflatten(x.to(wide), 2, (groups, -1)).transpose(1, 2).flatten(2, 3)


def _from_group_rows(x: Tensor, heads: int) -> Tensor:
    """[B, G, C*h, D] -> [B, C, H, D]."""
    return torch.unflatten(x, 2, (-1, heads)).transpose(1, 2).flatten(2, 3)


def _split_heads_groups_first(x: Tensor, groups: int, wide: torch.dtype) -> Tensor:
    """[B, C, H] -> [B, G, C, h]."""
    return torch.unflatten(x.to(wide), 2, (groups, -1)).transpose(1, 2)


def _split_heads(x: Tensor, groups: int, wide: torch.dtype) -> Tensor:
    """[B, C, H, D] -> [B, C, G, h, D]."""
    return torch.unflatten(x.to(wide), 2, (groups, -1))


def get_accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def get_selection_dtype(dtype: torch.dtype) -> torch.dtype:
    """As in `reference`: two backends that round alike here choose the same blocks."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else torch.float64


def _get_lse_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
