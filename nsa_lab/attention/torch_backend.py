"""The `torch` backend: vectorized, any device, memory linear in T.

Queries are processed in chunks. A chunk attends to a contiguous range of keys under a mask or, for the selected branch of a
long sequence, to the gathered tokens of its selected blocks. The backward pass recomputes the probabilities of a chunk from
the saved LSE, so only the scores of one chunk exist at a time. Documents are split into chunks separately, each over its
own keys. The cost of a packed row therefore depends on the lengths of its documents, and the cost of a `Span.chunk` on the
keys that it attends to. Functions and shapes as in `reference`.

These functions are excluded from torch.compile: it unrolls the loop over chunks and computes a wrong backward pass
(torch 2.13; tests/model compares compiled and eager gradients).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from nsa_lab.attention import geometry, reference
from nsa_lab.attention.compile_utils import disable_compile
from nsa_lab.attention.layout import QueryRange, Span
from nsa_lab.attention.reference import get_definition_dtype
from nsa_lab.config import NSAConfig

# Bytes of scores, or of gathered keys, per chunk of queries: about the cache of a CPU, or enough to fill a GPU.
# docs/log/kernels.md has the speedup on a CPU of scores that stay in the cache.
CHUNK_BYTES = {"cpu": 4 * 2**20, "cuda": 256 * 2**20}
# Minimum number of queries per chunk of the window branch: for fewer, the overhead of a chunk exceeds its computation.
MIN_WINDOW_CHUNK = 64
# Documents longer than this many selection budgets (n_sel * l_sel keys) gather each query's blocks instead of masking all
# past keys. A gathered key is read once per query and group, a masked one once per chunk.
GATHER_MIN_BUDGETS = 8


# Map a chunk to its range of key rows, and a mask of the keys hidden from each query: bool [B|1, G|1, C, keys]
KeyRange = Callable[[QueryRange], tuple[slice, Tensor]]


@disable_compile
def compressed_attention(
    q: Tensor, k_cmp: Tensor, v_cmp: Tensor, nsa: NSAConfig, *, span: Span | None = None
) -> tuple[Tensor, Tensor]:
    """Return `reference.compressed_attention`, in its dtype, because block selection depends on the LSE."""
    span = span or Span.full(q.shape[1])
    acc_dtype = get_definition_dtype(q.dtype)

    def get_keys(chunk: QueryRange) -> tuple[slice, Tensor]:
        n_visible = geometry.num_compressed(chunk.end, nsa)
        t = geometry.positions(chunk.start, chunk.end, q.device)
        return _slice_keys(chunk, 0, n_visible), ~geometry.sees_compressed(t, n_visible, nsa)[None, None]

    chunks: list[QueryRange] = []
    for document, rows in zip(span.documents, span.compressed_rows(nsa), strict=True):
        chunks += _split_into_chunks(document, rows, _compute_score_bytes(q, rows.stop - rows.start, acc_dtype), q.device)
    return _attend_ranges(q, k_cmp, v_cmp, get_keys, acc_dtype, chunks)


@disable_compile
def select_blocks(q: Tensor, k_cmp: Tensor, lse: Tensor | None, nsa: NSAConfig, *, span: Span | None = None) -> Tensor:
    """Return `reference.select_blocks`, computed in chunks of queries."""
    span = span or Span.full(q.shape[1])
    if lse is None:
        _, lse = compressed_attention(q.detach(), k_cmp.detach(), k_cmp.detach(), nsa, span=span)
    B, T, H, _ = q.shape
    G = k_cmp.shape[2]
    acc_dtype = get_definition_dtype(q.dtype)
    k = k_cmp.detach().to(acc_dtype).transpose(1, 2)  # [B, G, N, D]
    blocks = torch.empty(B, T, G, nsa.n_sel, dtype=torch.int32, device=q.device)
    with torch.no_grad():
        for document, rows in zip(span.documents, span.compressed_rows(nsa), strict=True):
            for chunk in _split_into_chunks(
                document, rows, _compute_score_bytes(q, rows.stop - rows.start, acc_dtype), q.device
            ):
                start, end = chunk.start, chunk.end
                n = geometry.num_compressed(end, nsa)
                s = (
                    to_group_rows(q[:, chunk.query_rows].to(acc_dtype), G)
                    @ k[:, :, _slice_keys(chunk, 0, n)].mT
                    * q.shape[-1] ** -0.5
                )
                s = torch.unflatten(s, 2, (end - start, H // G))  # [B, G, C, h, n]
                norm = _split_heads_groups_first(lse[:, chunk.query_rows], G, acc_dtype).unsqueeze(-1)
                is_visible = geometry.sees_compressed(geometry.positions(start, end, q.device), n, nsa)
                p = torch.where(is_visible.unsqueeze(1), s - norm, float("-inf")).exp()  # [B, G, C, h, n]
                importance = compute_importance(p, geometry.num_selection(end, nsa), nsa).float().transpose(1, 2)
                blocks[:, chunk.query_rows] = reference.select_by_importance(importance, nsa, first=start)
    return blocks


@disable_compile
def selected_attention(
    q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, nsa: NSAConfig, *, span: Span | None = None
) -> tuple[Tensor, Tensor]:
    """Return `reference.selected_attention`. Short documents mask their past keys, long documents gather blocks."""
    span = span or Span.full(q.shape[1])
    runs = [(is_long, list(run)) for is_long, run in groupby(span.documents, lambda d: _is_long_document(d, nsa))]
    if len(runs) == 1:
        return _attend_selected(q, k, v, blocks, nsa, *runs[0])
    # Only packed documents have several runs. Their rows of q and k are equal.
    sizes = [run[-1].query_rows.stop - run[0].query_rows.start for _, run in runs]
    split = [torch.split(x, sizes, dim=1) for x in (q, k, v, blocks)]
    parts = [
        _attend_selected(q, k, v, blocks, nsa, is_long, _shift_to_first_row(run))
        for q, k, v, blocks, (is_long, run) in zip(*split, runs, strict=True)
    ]
    outs, lses = zip(*parts, strict=True)
    return torch.cat(outs, dim=1), torch.cat(lses, dim=1)


@disable_compile
def window_attention(q: Tensor, k: Tensor, v: Tensor, nsa: NSAConfig, *, span: Span | None = None) -> tuple[Tensor, Tensor]:
    """Return `reference.window_attention`."""
    span = span or Span.full(q.shape[1])

    def get_keys(chunk: QueryRange) -> tuple[slice, Tensor]:
        query_start, end = chunk.start, chunk.end
        key_start = max(query_start - nsa.w + 1, 0)
        future = ~_build_causal_mask(query_start, end, key_start, end, q.device)
        too_old = _build_causal_mask(query_start - nsa.w, end - nsa.w, key_start, end, q.device)
        return _slice_keys(chunk, key_start, end), (future | too_old)[None, None]

    acc_dtype = get_accumulation_dtype(q.dtype)
    chunks: list[QueryRange] = []
    for document in span.documents:
        # A chunk's key range is the window plus the chunk's own length, so chunks longer than the window only enlarge the
        # mask. For a narrow window this limit would give one chunk per query, hence the minimum.
        max_length = max(nsa.w, MIN_WINDOW_CHUNK)
        score_bytes = _compute_score_bytes(q, min(max_length + nsa.w, document.end), acc_dtype)
        chunks += _split_into_chunks(document, document.key_rows, score_bytes, q.device, max_length)
    return _attend_ranges(q, k, v, get_keys, acc_dtype, chunks)


def _is_long_document(document: QueryRange, nsa: NSAConfig) -> bool:
    return GATHER_MIN_BUDGETS * nsa.n_sel * nsa.l_sel < document.end


def _shift_to_first_row(run: list[QueryRange]) -> list[QueryRange]:
    """Return the documents with rows relative to the first document of the run."""
    first_row = run[0].query_rows.start
    shifted = [slice(d.query_rows.start - first_row, d.query_rows.stop - first_row) for d in run]
    return [QueryRange(d.start, d.end, document_rows, document_rows) for document_rows, d in zip(shifted, run, strict=True)]


def _attend_selected(
    q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, nsa: NSAConfig, is_long: bool, documents: list[QueryRange]
) -> tuple[Tensor, Tensor]:
    """Return `selected_attention` of documents that are all long or all short."""
    acc_dtype = get_accumulation_dtype(q.dtype)
    chunks: list[QueryRange] = []
    if is_long:
        B, G, h = q.shape[0], k.shape[2], q.shape[2] // k.shape[2]
        gathered_bytes = B * G * blocks.shape[3] * nsa.l_sel * (q.shape[3] + v.shape[3] + h) * acc_dtype.itemsize
        for document in documents:
            chunks += _split_into_chunks(document, document.key_rows, gathered_bytes, q.device)
        return _attend_gathered(q, k, v, blocks, nsa.l_sel, chunks)
    per_group = blocks.transpose(1, 2)  # [B, G, T, n_sel]

    def get_keys(chunk: QueryRange) -> tuple[slice, Tensor]:
        start, end = chunk.start, chunk.end
        n = geometry.num_selection(end, nsa)
        chunk_blocks = per_group[:, :, chunk.query_rows]
        is_hidden = torch.ones(*chunk_blocks.shape[:3], n + 1, dtype=torch.bool, device=q.device)
        # Column n collects padding (-1) and blocks after the end of the chunk.
        is_hidden.scatter_(-1, torch.where((chunk_blocks < 0) | (chunk_blocks > n), n, chunk_blocks).long(), False)
        hidden = is_hidden[..., :n].repeat_interleave(nsa.l_sel, dim=-1)[..., :end]
        return _slice_keys(chunk, 0, end), hidden | ~_build_causal_mask(start, end, 0, end, q.device)

    for document in documents:
        chunks += _split_into_chunks(
            document, document.key_rows, _compute_score_bytes(q, document.end, acc_dtype), q.device
        )
    return _attend_ranges(q, k, v, get_keys, acc_dtype, chunks)


combine = reference.combine


class _RangeAttention(torch.autograd.Function):
    """Masked softmax attention of chunks of queries over ranges of keys; the backward pass recomputes the scores."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, get_keys: KeyRange, acc_dtype: torch.dtype, chunks: list[QueryRange]
    ) -> tuple[Tensor, Tensor]:
        B, T, H, D = q.shape
        G, Dv, scale = k.shape[2], v.shape[3], D**-0.5
        out = q.new_empty(B, T, H, Dv)
        lse = torch.empty(B, T, H, dtype=get_accumulation_dtype(q.dtype), device=q.device)
        k_with_nan, finite_v = _replace_nonfinite(k, v, mark=float("nan"))
        for chunk in chunks:
            key_range, hidden = get_keys(chunk)
            chunk_k_T, chunk_v = (
                k_with_nan[:, key_range].to(acc_dtype).transpose(1, 2).mT,
                finite_v[:, key_range].to(acc_dtype).transpose(1, 2),
            )
            p = _mask_scores(to_group_rows(q[:, chunk.query_rows].to(acc_dtype), G) * scale @ chunk_k_T, hidden)
            denominator, chunk_lse = _exponentiate(p)
            o = p.flatten(2, 3) @ chunk_v / denominator.flatten(2, 3)
            out[:, chunk.query_rows] = from_group_rows(o, H // G).to(q.dtype)
            lse[:, chunk.query_rows] = chunk_lse.transpose(1, 2).flatten(2)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.get_keys, ctx.acc_dtype, ctx.chunks = get_keys, acc_dtype, chunks
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        grad_out, grad_lse = grad_outputs
        q, k, v, out, lse = ctx.saved_tensors
        acc_dtype, h, G = ctx.acc_dtype, q.shape[2] // k.shape[2], k.shape[2]
        scale = q.shape[-1] ** -0.5
        grad_q = torch.empty_like(q)
        grad_k = torch.zeros(k.transpose(1, 2).shape, dtype=acc_dtype, device=k.device)
        grad_v = torch.zeros(v.transpose(1, 2).shape, dtype=acc_dtype, device=k.device)
        # d loss / d score = p * (dp - delta), with delta = sum(out * grad_out) - grad_lse
        delta = (out.to(acc_dtype) * grad_out.to(acc_dtype)).sum(-1) - grad_lse.to(acc_dtype)
        finite_k, finite_v = _replace_nonfinite(k, v, mark=0.0)  # NaN of non-finite keys and values is in the LSE already
        for chunk in ctx.chunks:
            key_range, hidden = ctx.get_keys(chunk)
            q_rows, do_rows = (
                to_group_rows(q[:, chunk.query_rows].to(acc_dtype), G) * scale,
                to_group_rows(grad_out[:, chunk.query_rows].to(acc_dtype), G),
            )
            chunk_k, chunk_v = (
                finite_k[:, key_range].to(acc_dtype).transpose(1, 2),
                finite_v[:, key_range].to(acc_dtype).transpose(1, 2),
            )
            p = _mask_scores(q_rows @ chunk_k.mT, hidden)
            p.sub_(_zero_neginf(_split_heads_groups_first(lse[:, chunk.query_rows], G, acc_dtype)).unsqueeze(-1)).exp_()
            p = p.flatten(2, 3)
            ds = (
                (do_rows @ chunk_v.mT)
                .sub_(_split_heads_groups_first(delta[:, chunk.query_rows], G, acc_dtype).flatten(2, 3).unsqueeze(-1))
                .mul_(p)
            )
            grad_v[:, :, key_range] += p.mT @ do_rows
            grad_k[:, :, key_range] += ds.mT @ q_rows
            grad_q[:, chunk.query_rows] = from_group_rows(ds @ chunk_k * scale, h).to(q.dtype)
        return grad_q, grad_k.transpose(1, 2).to(k.dtype), grad_v.transpose(1, 2).to(v.dtype), None, None, None


class _GatherAttention(torch.autograd.Function):
    """Selected attention by gathering the blocks of each query: time and memory depend on n_sel*l_sel, not on T."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, l_sel: int, chunks: list[QueryRange]
    ) -> tuple[Tensor, Tensor]:
        B, T, H, D = q.shape
        G, Dv = k.shape[2], v.shape[3]
        acc_dtype = get_accumulation_dtype(q.dtype)
        out = q.new_empty(B, T, H, Dv)
        lse = torch.empty(B, T, H, dtype=get_accumulation_dtype(q.dtype), device=q.device)
        k_with_nan, finite_v = _replace_nonfinite(k, v, mark=float("nan"))
        for chunk in chunks:
            index, hidden = _index_block_tokens(blocks, chunk, l_sel)
            chunk_k, chunk_v = (
                k_with_nan[:, chunk.key_rows][index].to(acc_dtype),
                finite_v[:, chunk.key_rows][index].to(acc_dtype),
            )
            p = _split_heads(q[:, chunk.query_rows], G, acc_dtype) * D**-0.5 @ chunk_k.mT  # [B, C, G, h, S]
            p.masked_fill_(hidden.unsqueeze(3), float("-inf"))
            denominator, chunk_lse = _exponentiate(p)
            out[:, chunk.query_rows] = (p @ chunk_v / denominator).flatten(2, 3).to(q.dtype)
            lse[:, chunk.query_rows] = chunk_lse.flatten(2, 3)
        ctx.save_for_backward(q, k, v, blocks, out, lse)
        ctx.chunks, ctx.l_sel = chunks, l_sel
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        grad_out, grad_lse = grad_outputs
        q, k, v, blocks, out, lse = ctx.saved_tensors
        G, scale, acc_dtype = k.shape[2], q.shape[-1] ** -0.5, get_accumulation_dtype(q.dtype)
        grad_q = torch.empty_like(q)
        grad_k = torch.zeros(k.shape, dtype=acc_dtype, device=k.device)
        grad_v = torch.zeros(v.shape, dtype=acc_dtype, device=k.device)
        delta = (out.to(acc_dtype) * grad_out.to(acc_dtype)).sum(-1) - grad_lse.to(acc_dtype)
        finite_k, finite_v = _replace_nonfinite(k, v, mark=0.0)  # NaN of non-finite keys and values is in the LSE already
        for chunk in ctx.chunks:
            index, hidden = _index_block_tokens(blocks, chunk, ctx.l_sel)
            chunk_k, chunk_v = (
                finite_k[:, chunk.key_rows][index].to(acc_dtype),
                finite_v[:, chunk.key_rows][index].to(acc_dtype),
            )
            chunk_q, chunk_grad = (
                _split_heads(q[:, chunk.query_rows], G, acc_dtype) * scale,
                _split_heads(grad_out[:, chunk.query_rows], G, acc_dtype),
            )
            p = (chunk_q @ chunk_k.mT).masked_fill_(hidden.unsqueeze(3), float("-inf"))
            p.sub_(_zero_neginf(_split_heads(lse[:, chunk.query_rows].unsqueeze(-1), G, acc_dtype))).exp_()
            ds = (
                (chunk_grad @ chunk_v.mT).sub_(_split_heads(delta[:, chunk.query_rows].unsqueeze(-1), G, acc_dtype)).mul_(p)
            )
            grad_q[:, chunk.query_rows] = (ds @ chunk_k * scale).flatten(2, 3).to(q.dtype)
            _scatter_add(grad_k[:, chunk.key_rows], index[1], ds.mT @ chunk_q)
            _scatter_add(grad_v[:, chunk.key_rows], index[1], p.mT @ chunk_grad)
        return grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype), None, None, None


def _attend_ranges(
    q: Tensor, k: Tensor, v: Tensor, get_keys: KeyRange, acc_dtype: torch.dtype, chunks: list[QueryRange]
) -> tuple[Tensor, Tensor]:
    return _RangeAttention.apply(q, k, v, get_keys, acc_dtype, chunks)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


def _attend_gathered(
    q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, l_sel: int, chunks: list[QueryRange]
) -> tuple[Tensor, Tensor]:
    return _GatherAttention.apply(q, k, v, blocks, l_sel, chunks)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


def _index_block_tokens(blocks: Tensor, chunk: QueryRange, l_sel: int) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    """Return the index of the chunk's selected tokens [B, C, G, n] in keys [B, S, G, D], and which of them are hidden."""
    chunk_blocks = blocks[:, chunk.query_rows]
    tokens = (chunk_blocks.long().unsqueeze(-1) * l_sel + torch.arange(l_sel, device=chunk_blocks.device)).flatten(-2)
    t = geometry.positions(chunk.start, chunk.end, chunk_blocks.device)[:, None, None]
    hidden = (tokens < 0) | (tokens > t)
    batch = torch.arange(chunk_blocks.shape[0], device=chunk_blocks.device)[:, None, None, None]
    group = torch.arange(chunk_blocks.shape[2], device=chunk_blocks.device)[:, None]
    return (batch, torch.where(hidden, 0, tokens), group), hidden


def _scatter_add(grad: Tensor, tokens: Tensor, parts: Tensor) -> None:
    """Add parts [B, C, G, S, D] to grad [B, T, G, D] at tokens [B, C, G, S]."""
    index = tokens.transpose(1, 2).flatten(2).unsqueeze(-1)  # [B, G, C*S, 1]
    flat = parts.transpose(1, 2).flatten(2, 3)  # [B, G, C*S, D]
    grad.transpose(1, 2).scatter_add_(2, index.expand_as(flat), flat)


def compute_importance(p: Tensor, n_blocks: int, nsa: NSAConfig) -> Tensor:
    """Reduce probabilities p [..., h, n] of heads and compressed blocks to the importance [..., n_blocks] of selection
    blocks.

    As in `reference.block_importance`, without a matrix.
    """
    return reduce_to_blocks(p.sum(-2) if nsa.head_reduction == "sum" else p.amax(-2), n_blocks, nsa)


def reduce_to_blocks(p: Tensor, n_blocks: int, nsa: NSAConfig) -> Tensor:
    """Reduce p [..., n] of compressed blocks to selection blocks [..., n_blocks].

    The two sums of eq. 9 are computed in sequence: each stride of d tokens sums the l/d compressed blocks that contain it,
    then each selection block sums its l_sel/d strides. Maxima likewise.
    """
    strides_per_block, n_before = nsa.l_sel // nsa.d, nsa.l // nsa.d - 1
    padded = pad(p, (n_before, n_blocks * strides_per_block - p.shape[-1]))
    strides = padded[..., n_before:]
    for shift in range(n_before):
        shifted = padded[..., shift : shift + n_blocks * strides_per_block]
        strides = strides + shifted if nsa.block_reduction == "sum" else torch.maximum(strides, shifted)
    if nsa.block_reduction == "max":
        return torch.unflatten(strides, -1, (n_blocks, strides_per_block)).amax(-1)
    # A matrix product with ones takes 1/2 to 2/3 of the time of a sum over such a short dimension, for many queries.
    return torch.unflatten(strides, -1, (n_blocks, strides_per_block)) @ p.new_ones(strides_per_block)


def _build_causal_mask(query_start: int, query_end: int, key_start: int, key_end: int, device: torch.device) -> Tensor:
    """Return whether key position <= query position, bool [last - first, stop - start]."""
    return geometry.positions(key_start, key_end, device) <= geometry.positions(query_start, query_end, device)[:, None]


def _compute_score_bytes(q: Tensor, n_keys: int, acc_dtype: torch.dtype) -> int:
    """Return the bytes of the scores of one query position against `n_keys` keys."""
    return q.shape[0] * q.shape[2] * max(n_keys, 1) * acc_dtype.itemsize


def _split_into_chunks(
    document: QueryRange, key_rows: slice, bytes_per_query: int, device: torch.device, max_length: int | None = None
) -> list[QueryRange]:
    size = max(CHUNK_BYTES[device.type] // bytes_per_query, 1)
    size = min(size, max_length or size)
    row = document.query_rows.start - document.start
    ranges = [(start, min(start + size, document.end)) for start in range(document.start, document.end, size)]
    return [QueryRange(start, end, slice(row + start, row + end), key_rows) for start, end in ranges]


def _slice_keys(chunk: QueryRange, start: int, stop: int) -> slice:
    """Return the tensor rows of keys start .. stop-1 of the chunk's document."""
    return slice(chunk.key_rows.start + start, chunk.key_rows.start + stop)


def _replace_nonfinite(k: Tensor, v: Tensor, mark: float) -> tuple[Tensor, Tensor]:
    """Replace keys by `mark` and values by 0 where either of them is not finite.

    Zero times NaN is NaN, and the products with keys include keys that a query must not see. With a mark in the scores,
    which are masked later, non-finite values affect only the queries that attend to them.
    """
    is_finite = (k.isfinite().all(-1) & v.isfinite().all(-1)).unsqueeze(-1)
    return k.where(is_finite, mark), v.where(is_finite, 0.0)


def _mask_scores(s: Tensor, hidden: Tensor) -> Tensor:
    """Reshape scores [B, G, C*h, keys] to [B, G, C, h, keys] and set hidden ones to -inf, in place."""
    return torch.unflatten(s, 2, (hidden.shape[2], -1)).masked_fill_(hidden.unsqueeze(3), float("-inf"))


def _exponentiate(s: Tensor) -> tuple[Tensor, Tensor]:
    """Replace scores by exp(s - max) in place, and return their sum [..., 1] and LSE [...].

    A row without visible keys, or without any key, becomes zeros with sum 1 and LSE -inf.
    """
    if s.shape[-1] == 0:
        return s.new_ones(*s.shape[:-1], 1), s.new_full(s.shape[:-1], float("-inf"))
    max_score = _zero_neginf(s.amax(-1, keepdim=True))
    total = s.sub_(max_score).exp_().sum(-1, keepdim=True)
    return torch.where(total == 0, 1.0, total), (max_score + total.log()).squeeze(-1)


def _zero_neginf(lse: Tensor) -> Tensor:
    """Replace -inf, the LSE of a row without visible keys, by 0, so that exp of its scores (all -inf) is 0 and not NaN."""
    return torch.where(torch.isneginf(lse), 0.0, lse)


def to_group_rows(x: Tensor, groups: int) -> Tensor:
    """Reshape [B, C, H, D] to [B, G, C*h, D]; the heads of a group are rows of one matrix and share its keys and values."""
    if x.shape[1] == 1:  # no transpose needed
        return x.reshape(len(x), groups, -1, x.shape[3])
    return torch.unflatten(x, 2, (groups, -1)).transpose(1, 2).flatten(2, 3)


def from_group_rows(x: Tensor, heads: int) -> Tensor:
    """Reshape [B, G, C*h, D] to [B, C, H, D]; `heads`: h, the number of heads of a group."""
    if x.shape[2] == heads:
        return x.reshape(len(x), 1, -1, x.shape[3])
    return torch.unflatten(x, 2, (-1, heads)).transpose(1, 2).flatten(2, 3)


def _split_heads_groups_first(x: Tensor, groups: int, dtype: torch.dtype) -> Tensor:
    """Reshape [B, C, H] to [B, G, C, h]."""
    return torch.unflatten(x.to(dtype), 2, (groups, -1)).transpose(1, 2)


def _split_heads(x: Tensor, groups: int, dtype: torch.dtype) -> Tensor:
    """Reshape [B, C, H, D] to [B, C, G, h, D]."""
    return torch.unflatten(x.to(dtype), 2, (groups, -1))


def get_accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums and of the LSE for inputs of `dtype`: float64 for float64, else float32."""
    return torch.promote_types(dtype, torch.float32)
