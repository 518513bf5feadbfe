"""Loss that trains block selection to predict where the selected branch would attend.

Block selection has no gradient (eq. 11). The compressed keys get a gradient only from the output of the compressed branch,
which does not depend on which blocks are useful to the selected branch. This loss compares the block importances (eq. 9,
10) with the attention that the selected branch would have over all past tokens. DeepSeek-V3.2 trains its indexer with a
similar loss (arXiv 2512.02556, section 2.1). docs/science/retrieval.md reports the effect.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, cast

import torch
from torch import Tensor

from nsa_lab.attention import geometry, input_checks
from nsa_lab.attention.context_parallel import ContextShard
from nsa_lab.attention.dispatch import ResolvedBackend, resolve_backend
from nsa_lab.attention.layout import Layout, Span
from nsa_lab.attention.segment_ops import ABSENT, find_documents_of_rows
from nsa_lab.attention.torch_backend import reduce_to_blocks
from nsa_lab.config import NSAConfig

# Added to every importance: it is 0 for a block that overlaps no visible compressed block, and log 0 has no gradient.
MIN_IMPORTANCE = 1e-9
# Fractional part of the golden ratio as a ratio of Fibonacci numbers. With integers, all devices and compilers sample the
# same rows. The numbers are small, so their products fit the 32-bit integers of torch.compile's kernels.
GOLDEN_NUMERATOR, GOLDEN_DENOMINATOR = 10_946, 17_711
# Score each query's document separately if at least this many documents of the largest length fit the row: most scores of
# the full row would be of keys of other documents.
SEPARATE_DOCUMENTS_RATIO = 4


class HeldRows(NamedTuple):
    """Sampled queries of a text that a rank holds."""

    text_rows: Tensor
    """int64 [R], rows of the text."""
    own_rows: Tensor
    """int64 [R], the same rows in the shard."""
    n_rows: int
    """Number of sampled queries of all ranks."""


def selection_loss(
    q: Tensor,
    k_cmp: Tensor,
    k_sel: Tensor,
    nsa: NSAConfig,
    *,
    attention_q: Tensor | None = None,
    n_queries: int | None = 64,
    span: Span | None = None,
    layout: Layout | None = None,
    held: HeldRows | None = None,
    query_weights: Tensor | None = None,
    backend: str | Mapping[str, ResolvedBackend] = "auto",
) -> Tensor:
    """Return the cross-entropy of block importances against the selected branch's attention mass, nats, 0-d.

    q [B, T, H, D], k_cmp [B, N, G, D] from `compress`, k_sel [B, T, G, D]. Computed in float32, or in float64 for float64
    inputs. `attention_q` [B, T, H', D']: the queries of the selected branch, with the width of k_sel, if q and k_cmp belong
    to an indexer, which can have another width; None: q.

    For query t and group g, the loss is -sum_j m_j log(I_j / sum_i I_i) over the candidate blocks j that are not forced.
    m_j is the attention mass of t on the tokens of block j, over all keys <= t, averaged over the heads of the group. I_j
    is the importance of block j. The loss is averaged over batch, queries and groups. The target m has no gradient; q and
    k_cmp get one. A query without free blocks contributes 0.

    `n_queries`: number of sampled queries, spread evenly over the sequence and over positions within a block; None: all.
    The sample is the same in every step, so a resumed run repeats it. Memory is proportional to the sampled queries times
    all keys, or all blocks with the kernels. `layout`: the span's layout for `nsa`; None: build it. `held`: the result of
    `select_held_rows`, if q and attention_q belong to a rank that shares a text with others, k_cmp and k_sel to the whole
    text; the sum of the results of all ranks is the loss of the text. `query_weights` [B, R]: the weights of the R sampled
    queries (see `sample_rows`), by which the losses are summed instead of averaged; the mean over groups remains.

    `backend`: a name, or the result of `resolve_backend`. With the backend triton, kernels compute the loss of keys that do
    not overlap (l = d, as for an indexer) and whose probabilities are summed over blocks and heads. PyTorch computes all
    others. Raise ValueError for inconsistent tensors, and the errors of `resolve_backend`.
    """
    attention_q = q if attention_q is None else attention_q
    if layout is None:
        if held is None:
            input_checks.check_compressed(q, k_cmp, k_cmp, nsa, span)
            input_checks.check_raw(attention_q, k_sel, k_sel, span, "_sel")
        layout = (span or Span.full(k_sel.shape[1])).layout(nsa, q.device)
    G = k_sel.shape[2]
    # The number of kernel launches below does not depend on the documents.
    if held is None:
        rows = own_rows = sample_rows(q.shape[1], n_queries, q.device)
        n_rows = len(rows)
    else:
        rows, own_rows, n_rows = held
    document = find_documents_of_rows(rows, layout.bounds[0])
    first_key, first_compressed, first_block = (starts[document] for starts in layout.bounds)
    t = layout.start + rows - first_key
    attention_q, k_sel = attention_q.detach(), k_sel.detach()  # the target has no gradient
    queries = SampledQueries(
        attention_q.index_select(1, own_rows), q.index_select(1, own_rows), t, first_key, first_compressed, first_block
    )
    if isinstance(backend, str):
        backend = resolve_backend(q.device, q.dtype, nsa, backend=backend, span=span)
    has_kernel = nsa.l == nsa.d and nsa.head_reduction == nsa.block_reduction == "sum"
    compute = _sum_by_block_in_kernels if has_kernel and backend["selection"].backend == "triton" else _sum_by_block
    # Disable autocast: targets from scores rounded to bfloat16 are too coarse.
    with torch.autocast(q.device.type, enabled=False):
        mass, importance, first_block = compute(queries, k_sel, k_cmp, nsa, layout)
        block_of_document = geometry.positions(0, mass.shape[-1], q.device) - first_block[:, None]  # [R, n_blocks]
        is_free = (block_of_document >= nsa.sink_blocks) & (
            block_of_document <= geometry.own_block(t, nsa)[:, None] - nsa.local_blocks
        )
        is_free, importance = is_free[:, None], importance + MIN_IMPORTANCE
        log_share = importance.log() - (importance * is_free).sum(-1, keepdim=True).clamp_min(MIN_IMPORTANCE).log()
        losses = mass * is_free * log_share
        if query_weights is None:
            return -losses.sum() / (q.shape[0] * G * n_rows)
        return -(losses.sum((2, 3)) * query_weights.to(losses)).sum() / G


class SampledQueries(NamedTuple):
    """Queries of the selected branch, [B, R, H', D'], and of the scores, [B, R, H, D], at the sampled rows."""

    attention_q: Tensor
    scoring_q: Tensor
    t: Tensor
    """int64 [R], positions in their documents."""
    first_key: Tensor
    first_compressed: Tensor
    first_block: Tensor
    """int64 [R], the first row of each query's document in k_sel, in k_cmp, and among the blocks."""


def _sum_by_block_in_kernels(
    queries: SampledQueries, k_sel: Tensor, k_cmp: Tensor, nsa: NSAConfig, layout: Layout
) -> tuple[Tensor, Tensor, Tensor]:
    """Return attention mass and importance of blocks [B, R, G, n_blocks], and the first block of each document [R]."""
    from nsa_lab.attention.kernels.block_mass import block_mass

    n_blocks, G = geometry.num_selection(layout.longest, nsa), k_sel.shape[2]
    mass = block_mass(queries.attention_q, k_sel, queries.first_key, queries.t + 1, nsa.l_sel, n_blocks)
    n_visible = geometry.visible_compressed(queries.t, nsa)
    importance = block_mass(queries.scoring_q, k_cmp, queries.first_compressed, n_visible, nsa.l_sel // nsa.d, n_blocks)
    mass, importance = (torch.unflatten(x, 2, (G, -1)).mean(3) for x in (mass, importance))
    return mass, importance, torch.zeros_like(queries.t)


def _sum_by_block(
    queries: SampledQueries, k_sel: Tensor, k_cmp: Tensor, nsa: NSAConfig, layout: Layout
) -> tuple[Tensor, Tensor, Tensor]:
    """Like `_sum_by_block_in_kernels`, for every geometry."""
    G, device = k_sel.shape[2], k_sel.device
    _, _, t, first_key, first_compressed, first_block = queries
    n_visible = geometry.visible_compressed(t, nsa)
    keys_of_query = compressed_of_query = None
    if _has_separate_texts(layout):
        # Each query's document is a separate text. Rows past its end are arbitrary, because they are never visible.
        position = geometry.positions(0, geometry.num_selection(layout.longest, nsa) * nsa.l_sel, device)
        block = geometry.positions(0, min(geometry.num_compressed(layout.longest, nsa), layout.n_compressed), device)
        keys_of_query = (first_key[:, None] + position[: layout.longest]).clamp_max(layout.n_keys - 1)
        compressed_of_query = (first_compressed[:, None] + block).clamp_max(layout.n_compressed - 1)
        text_keys, compressed_starts = torch.where(position < layout.longest, position, ABSENT), block * nsa.d
        first_block = first_key = first_compressed = torch.zeros_like(t)
    else:
        # All documents are one text, in which each document starts at a selection block.
        text_keys, compressed_starts = layout.block_aligned_keys, layout.block_aligned_starts
    n_blocks = geometry.num_selection(len(text_keys), nsa)
    attention_q = _scale_queries(queries.attention_q, G)
    mass = _compute_attention(attention_q, k_sel, first_key, first_key + t + 1, keys_of_query).mean(3)
    mass = mass.index_select(-1, text_keys.clamp_min(0)).masked_fill(text_keys == ABSENT, 0)
    mass = torch.unflatten(mass, -1, (n_blocks, nsa.l_sel)).sum(-1)
    probabilities = _compute_attention(
        _scale_queries(queries.scoring_q, G), k_cmp, first_compressed, first_compressed + n_visible, compressed_of_query
    )
    # A sum over heads and their mean give the same loss.
    probabilities = probabilities.mean(3) if nsa.head_reduction == "sum" else probabilities.amax(3)
    return mass, _reduce_to_blocks(probabilities, compressed_starts, n_blocks, nsa), first_block


def select_held_rows(shard: ContextShard, n_queries: int | None, device: torch.device) -> HeldRows:
    """Return the sampled queries that a rank holds; `n_queries` as in `selection_loss`."""
    sampled = cast("list[int]", sample_rows(shard.text.n_queries, n_queries).tolist())  # pyright: ignore[reportUnknownMemberType]
    text_rows, own_rows = shard.find_rows(sampled)
    rows = torch.tensor([text_rows, own_rows], dtype=torch.int64).to(device, non_blocking=True)
    return HeldRows(rows[0], rows[1], len(sampled))


def _has_separate_texts(layout: Layout) -> bool:
    return layout.is_document_start is not None and SEPARATE_DOCUMENTS_RATIO * layout.longest <= layout.n_keys


def _scale_queries(q: Tensor, groups: int) -> Tensor:
    """Return queries [B, R, H, D] as [B, R, G, h, D], scaled, in the accumulation dtype."""
    return torch.unflatten(q.to(torch.promote_types(q.dtype, torch.float32)), 2, (groups, -1)) * q.shape[-1] ** -0.5


def sample_rows(length: int, count: int | None, device: torch.device | None = None) -> Tensor:
    """Return `count` distinct rows of `length`, one from each of `count` equal segments, int64; all rows if there are
    fewer.

    Positions within the segments follow multiples of the golden ratio, so they do not align with block boundaries.
    """
    if count is None or count >= length:
        return geometry.positions(0, length, device)
    if count < 1:
        raise ValueError(f"n_queries = {count}: expected at least 1, or None for all")
    segment_starts = geometry.positions(0, count + 1, device) * length // count
    offsets = geometry.positions(0, count, device) * GOLDEN_NUMERATOR % GOLDEN_DENOMINATOR
    return segment_starts[:-1] + offsets * segment_starts.diff() // GOLDEN_DENOMINATOR


def _compute_attention(q: Tensor, k: Tensor, start: Tensor, stop: Tensor, document_rows: Tensor | None) -> Tensor:
    """Return the attention of q [B, R, G, h, D] over the keys `start` .. `stop`-1, each [R], of k [B, N, G, D].

    Shape [B, R, G, h, N]; or [B, R, G, h, S] over the keys that `document_rows` [R, S] gathers from k. 0 for a query that
    sees no key.

    All queries are multiplied with all keys: one large product is faster than copying each query's keys, and the gradient
    of a key is then not a sum over copies. A non-finite query or key makes only the probabilities that it takes part in
    NaN. It is replaced by 0 in the products, where zero times NaN would be NaN, so other values and gradients stay finite.
    """
    is_finite_q, is_finite_k = q.isfinite().all(-1, keepdim=True), k.isfinite().all(-1, keepdim=True)
    scores = torch.einsum("brghd,bsgd->brghs", q.where(is_finite_q, 0), k.where(is_finite_k, 0).to(q.dtype))
    is_nonfinite = ~(is_finite_q & is_finite_k.squeeze(-1).transpose(1, 2)[:, None, :, None])
    if document_rows is not None:
        rows = document_rows[None, :, None, None]
        scores, is_nonfinite = (x.gather(-1, rows.expand(*x.shape[:-1], -1)) for x in (scores, is_nonfinite))
    position = geometry.positions(0, scores.shape[-1], q.device)
    allowed = ((position >= start[:, None]) & (position < stop[:, None]))[None, :, None, None]
    scores = scores.masked_fill(is_nonfinite, torch.nan).masked_fill(~allowed, torch.finfo(scores.dtype).min)
    return scores.softmax(-1) * allowed


def _reduce_to_blocks(p: Tensor, compressed_starts: Tensor, n_blocks: int, nsa: NSAConfig) -> Tensor:
    """Reduce probabilities p [..., N] of compressed blocks that start at these positions [N] to blocks [..., n_blocks]."""
    n_strides = n_blocks * nsa.l_sel // nsa.d
    # Rows of padding have probability 0 for every query. No other two rows share a stride, so the result is deterministic.
    stride = torch.where(compressed_starts == ABSENT, n_strides, compressed_starts // nsa.d)
    by_stride = p.new_zeros(*p.shape[:-1], n_strides + 1).index_copy(-1, stride, p)
    return reduce_to_blocks(by_stride[..., :-1], n_blocks, nsa)
