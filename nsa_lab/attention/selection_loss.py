"""Loss that trains block selection to predict where the selected branch would attend.

Block selection has no gradient (eq. 11). The compressed keys get a gradient only from the output of the compressed branch,
which does not depend on which blocks are useful to the selected branch. This loss compares the block importances (eq. 9,
10) with the attention that the selected branch would have over all past tokens. DeepSeek-V3.2 trains its indexer with a
similar loss (arXiv 2512.02556, section 2.1). docs/science/retrieval.md reports the effect.
"""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from nsa_lab.attention import geometry, input_checks
from nsa_lab.attention.layout import Span
from nsa_lab.attention.segment_ops import ABSENT, find_documents, map_rows
from nsa_lab.config import NSAConfig

# Added to every importance: it is 0 for a block that overlaps no visible compressed block, and log 0 has no gradient.
MIN_IMPORTANCE = 1e-9
# Fractional part of the golden ratio as a ratio of Fibonacci numbers. With integers, all devices and compilers sample the
# same rows. The numbers are small, so their products fit the 32-bit integers of torch.compile's kernels.
GOLDEN_NUMERATOR, GOLDEN_DENOMINATOR = 10_946, 17_711
# Score each query's document separately if at least this many documents of the largest length fit the row: most scores of
# the full row would be of keys of other documents.
SEPARATE_DOCUMENTS_RATIO = 4


def selection_loss(
    q: Tensor,
    k_cmp: Tensor,
    k_sel: Tensor,
    nsa: NSAConfig,
    *,
    attention_q: Tensor | None = None,
    n_queries: int | None = 64,
    span: Span | None = None,
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
    all keys. Raise ValueError for inconsistent tensors.
    """
    input_checks.check_compressed(q, k_cmp, k_cmp, nsa, span)
    attention_q = q if attention_q is None else attention_q
    input_checks.check_raw(attention_q, k_sel, k_sel, span, "_sel")
    return compute_sampled_loss(
        q, k_cmp, attention_q, k_sel, nsa, get_sampled_queries(span or Span.full(q.shape[1]), nsa, q.device, n_queries)
    )


class SampledQueries(NamedTuple):
    """Sampled queries, and the positions of keys and blocks in a text where each document starts at a selection block.

    int64 on the device. Without `document_rows`, the text is all documents one after another, and S keys and N compressed
    blocks are counted over the row. With `document_rows`, each query's document is a separate text, and S and N are
    counted within it.
    """

    query_rows: Tensor
    """[R], rows of q."""
    compressed_range: Tensor
    """[2, R], the first compressed block of the query's document, and the end of the blocks visible to the query."""
    key_range: Tensor
    """[2, R], the first key of the query's document, and the end of the keys up to the query's own."""
    text_positions: Tensor
    """[2, R], text position of the first token of the query's document, and of the query."""
    key_by_position: Tensor
    """[blocks * l_sel], the key at each text position, or `ABSENT`."""
    compressed_positions: Tensor
    """[N], text position of the first token of each compressed block; `ABSENT` for padding."""
    document_rows: tuple[Tensor, Tensor] | None = None
    """[R, S] and [R, N], rows of the keys and compressed blocks of the query's document; arbitrary past its end."""


def get_sampled_queries(span: Span, nsa: NSAConfig, device: torch.device, n_queries: int | None = 64) -> SampledQueries:
    """Return the sampled queries. For packed documents they are built once per span, device, geometry and number."""

    def build(span: Span) -> SampledQueries:
        return _build_sampled_queries(span, nsa, device, n_queries)

    # For one document everything follows from the shapes. It is built on the device, without a copy, as CUDA graphs need.
    key = ("asked", device, nsa.l, nsa.d, nsa.l_sel, n_queries)
    return span.get_or_build(key, build) if span.kind == "packed" else build(span)


def _build_sampled_queries(span: Span, nsa: NSAConfig, device: torch.device, n_queries: int | None) -> SampledQueries:
    query = sample_rows(span.n_queries, n_queries, device)
    # Number of keys per document. For a chunk this includes the keys before it.
    key_bounds = tuple(accumulate((document.end for document in span.documents), initial=0))
    layouts = [span.bounds, key_bounds, span.compressed_bounds(nsa), span.selection_bounds(nsa)]
    row_starts, key_starts, compressed_starts, block_starts = span.copy_bounds(layouts, device)
    document = find_documents(span.n_queries, row_starts)[query]
    t = span.start + query - row_starts[document]
    first_key, first_compressed, document_position = (
        key_starts[document],
        compressed_starts[document],
        block_starts[document] * nsa.l_sel,
    )
    n_visible = geometry.visible_compressed(t, nsa)
    if span.kind == "packed" and SEPARATE_DOCUMENTS_RATIO * span.longest_allocated <= span.n_keys:
        return _build_separate_documents(span, nsa, query, t, n_visible, first_key, first_compressed)
    return SampledQueries(
        query_rows=query,
        compressed_range=torch.stack([first_compressed, first_compressed + n_visible]),
        key_range=torch.stack([first_key, first_key + t + 1]),
        text_positions=torch.stack([document_position, document_position + t]),
        key_by_position=map_rows(span.num_selection_allocated(nsa) * nsa.l_sel, block_starts * nsa.l_sel, key_starts),
        compressed_positions=map_rows(
            span.num_compressed(nsa) * nsa.d, compressed_starts * nsa.d, block_starts * nsa.l_sel
        )[:: nsa.d],
    )


def _build_separate_documents(
    span: Span, nsa: NSAConfig, query: Tensor, t: Tensor, n_visible: Tensor, first_key: Tensor, first_compressed: Tensor
) -> SampledQueries:
    """Return the samples with a separate text for each query's document.

    `t`: position of each query in its document. `n_visible`: number of compressed blocks that it sees. `first_key`,
    `first_compressed`: first rows of its document's keys and compressed blocks.
    """
    max_length, n_compressed = span.longest_allocated, span.num_compressed(nsa)
    position = geometry.positions(0, geometry.num_selection(max_length, nsa) * nsa.l_sel, query.device)
    block = geometry.positions(0, min(geometry.num_compressed(max_length, nsa), n_compressed), query.device)
    zeros = torch.zeros_like(t)
    return SampledQueries(
        query_rows=query,
        compressed_range=torch.stack([zeros, n_visible]),
        key_range=torch.stack([zeros, t + 1]),
        text_positions=torch.stack([zeros, t]),
        key_by_position=torch.where(position < max_length, position, ABSENT),
        compressed_positions=block * nsa.d,
        document_rows=(
            (first_key[:, None] + position[:max_length]).clamp_max(span.n_keys - 1),
            (first_compressed[:, None] + block).clamp_max(n_compressed - 1),
        ),
    )


def compute_sampled_loss(
    q: Tensor, k_cmp: Tensor, attention_q: Tensor, k_sel: Tensor, nsa: NSAConfig, sampled: SampledQueries
) -> Tensor:
    """Return `selection_loss` of the `sampled` queries. The number of kernel launches does not depend on the documents."""
    acc_dtype, G = torch.promote_types(q.dtype, torch.float32), k_sel.shape[2]
    n_blocks = geometry.num_selection(len(sampled.key_by_position), nsa)
    document_position, query_position = sampled.text_positions
    is_free = geometry.candidate_blocks(query_position, n_blocks, nsa) & ~geometry.forced_blocks(
        query_position, n_blocks, nsa
    )  # [R, n_blocks]
    is_free = is_free & (geometry.positions(0, n_blocks, q.device) * nsa.l_sel > document_position[:, None])
    document_keys, document_compressed = sampled.document_rows or (None, None)
    # Disable autocast: targets from scores rounded to bfloat16 are too coarse.
    with torch.autocast(q.device.type, enabled=False):
        with torch.no_grad():
            mass = _compute_attention_mass(
                _gather_queries(attention_q, sampled, G), k_sel, sampled.key_range, document_keys
            )
            mass = mass.index_select(-1, sampled.key_by_position.clamp_min(0))
            mass = mass.masked_fill(sampled.key_by_position == ABSENT, 0)  # [B, R, G, n_blocks * l_sel]
            mass = torch.unflatten(mass, -1, (n_blocks, nsa.l_sel)).sum(-1)
        probabilities = _compute_attention_mass(
            _gather_queries(q, sampled, G), k_cmp, sampled.compressed_range, document_compressed
        )
        importance = (
            probabilities @ geometry.overlap_at(sampled.compressed_positions, n_blocks, nsa, dtype=acc_dtype)
            + MIN_IMPORTANCE
        )
        is_free = is_free[:, None]
        log_share = importance.log() - (importance * is_free).sum(-1, keepdim=True).clamp_min(MIN_IMPORTANCE).log()
        return -(mass * is_free * log_share).sum() / (q.shape[0] * G * len(sampled.query_rows))


def _gather_queries(q: Tensor, sampled: SampledQueries, groups: int) -> Tensor:
    """Return the sampled queries, [B, R, G, h, D], scaled, in the accumulation dtype."""
    sampled_q = q.index_select(1, sampled.query_rows).to(torch.promote_types(q.dtype, torch.float32))
    return torch.unflatten(sampled_q, 2, (groups, -1)) * q.shape[-1] ** -0.5


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


def _compute_attention_mass(q: Tensor, k: Tensor, visible_range: Tensor, document_rows: Tensor | None) -> Tensor:
    """Return the attention of q [B, R, G, h, D] over keys k [B, N, G, D] in visible_range[0] .. visible_range[1]-1.

    The mean over the h heads, [B, R, G, N]; or [B, R, G, S] over the keys that `document_rows` [R, S] gathers from k. 0 for
    a query that sees no key.

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
    allowed = ((position >= visible_range[0][:, None]) & (position < visible_range[1][:, None]))[None, :, None, None]
    scores = scores.masked_fill(is_nonfinite, torch.nan).masked_fill(~allowed, torch.finfo(scores.dtype).min)
    return (scores.softmax(-1) * allowed).mean(3)
