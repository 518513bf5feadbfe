"""A loss that teaches the compressed branch to choose the blocks that the selected branch would look at.

The choice of blocks carries no gradient (eq. 11), and what trains the compressed keys, the compressed branch's own output,
need not care where the selected branch finds things. This loss says it directly: the importances of the choice (eq. 9, 10)
are held against the selected branch's attention as it would be over the whole past. DeepSeek-V3.2 trains its indexer by a
loss of this kind (arXiv 2512.02556, section 2.1); docs/science/retrieval.md shows what it does here.
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

# Added to every importance: a block that no visible compressed block overlaps has none, and log 0 has no gradient.
MIN_IMPORTANCE = 1e-9
# The golden ratio's fraction of a turn, as a ratio of Fibonacci numbers: in whole numbers every device and compiler names
# the same rows, and in small ones their products fit 32 bits, which torch.compile's kernels count in.
GOLDEN_NUMERATOR, GOLDEN_DENOMINATOR = 10_946, 17_711
# Each query's document is laid out by itself where so many of the longest would fill the row: most of its scores are then
# of other documents' keys.
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
    """Cross-entropy of the choice's importances against the selected branch's attention mass, nats, 0-d.

    q [B, T, H, D], k_cmp [B, N, G, D] as `compress` gives it, k_sel [B, T, G, D]; float32, or float64 for float64 inputs.
    `looking` [B, T, H', D'] are the selected branch's queries where q and k_cmp, of a width of their own, serve the choice
    alone (an indexer), and k_sel has their width; None: q.
    For query t and group g, over the blocks j that have begun and are not forced: -sum_j m_j log(I_j / sum_i I_i), with m_j
    the attention of t over all keys <= t that falls into block j, a mean over the group's heads, and I_j the importance;
    then the mean over batch, queries and groups. m is a target and carries no gradient; q and k_cmp receive one.

    `queries`: how many are asked, spread evenly over the span and over the places within a block; None: all. They are
    the same at every step, so that a resumed run repeats them. Memory is that of their scores over all keys. A query
    without free blocks adds 0. Raises ValueError for tensors that do not go together.
    """
    input_checks.check_compressed(q, k_cmp, k_cmp, nsa, span)
    attention_q = q if attention_q is None else attention_q
    input_checks.check_raw(attention_q, k_sel, k_sel, span, "_sel")
    return compute_sampled_loss(
        q, k_cmp, attention_q, k_sel, nsa, get_sampled_queries(span or Span.full(q.shape[1]), nsa, q.device, n_queries)
    )


class SampledQueries(NamedTuple):
    """The queries that are asked, and how documents are seen as a text in which each begins with a selection block.

    int64 on the device. Either all documents are one text, one after another, or, with `apart`, each query's document
    is a text by itself. A key or a compressed block is that of the row or of the query's document, S and N in number;
    `places` are those of the text.
    """

    query_rows: Tensor
    """[R], their rows of q."""
    compressed_range: Tensor
    """[2, R], the first compressed block of the query's document, and the end of those that the query sees."""
    key_range: Tensor
    """[2, R], the first key of the query's document, and the end of those up to the query's own."""
    text_positions: Tensor
    """[2, R], of the first token of the query's document, and the query's own."""
    key_by_position: Tensor
    """[blocks * l_sel], or `ABSENT`."""
    compressed_positions: Tensor
    """[N], of the first token of each compressed block; `ABSENT` for padding."""
    document_rows: tuple[Tensor, Tensor] | None = None
    """[R, S] and [R, N], the row's keys and compressed blocks that are those of the query's document; past its end any."""


def get_sampled_queries(span: Span, nsa: NSAConfig, device: torch.device, n_queries: int | None = 64) -> SampledQueries:
    """Of packed documents, made once per span, device, geometry and number; shapes as in `Span.packed`."""

    def make(span: Span) -> SampledQueries:
        return _build_sampled_queries(span, nsa, device, n_queries)

    # Of one document all of it follows from the shapes: nothing to keep, and it is made on the device, as CUDA graphs need.
    key = ("asked", device, nsa.l, nsa.d, nsa.l_sel, n_queries)
    return span.get_or_build(key, make) if span.kind == "packed" else make(span)


def _build_sampled_queries(span: Span, nsa: NSAConfig, device: torch.device, n_queries: int | None) -> SampledQueries:
    query = sample_rows(span.n_queries, n_queries, device)
    # Counted for the keys: of a chunk, those before it too.
    tokens = tuple(accumulate((document.end for document in span.documents), initial=0))
    layouts = [span.bounds, tokens, span.compressed_bounds(nsa), span.selection_bounds(nsa)]
    row, key, compressed, block = span.copy_bounds(layouts, device)
    owner = find_documents(span.n_queries, row)[query]
    t = span.start + query - row[owner]
    first_key, first_compressed, place = key[owner], compressed[owner], block[owner] * nsa.l_sel
    seen = geometry.visible_compressed(t, nsa)
    if span.kind == "packed" and SEPARATE_DOCUMENTS_RATIO * span.longest_allocated <= span.n_keys:
        return _build_separate_documents(span, nsa, query, t, seen, first_key, first_compressed)
    return SampledQueries(
        query_rows=query,
        compressed_range=torch.stack([first_compressed, first_compressed + seen]),
        key_range=torch.stack([first_key, first_key + t + 1]),
        text_positions=torch.stack([place, place + t]),
        key_by_position=map_rows(span.num_selection_allocated(nsa) * nsa.l_sel, block * nsa.l_sel, key),
        compressed_positions=map_rows(span.num_compressed(nsa) * nsa.d, compressed * nsa.d, block * nsa.l_sel)[:: nsa.d],
    )


def _build_separate_documents(
    span: Span, nsa: NSAConfig, query: Tensor, t: Tensor, seen: Tensor, first_key: Tensor, first_compressed: Tensor
) -> SampledQueries:
    """Each of `query` with its own document: `t` is where it stands there, `seen` how many compressed blocks it sees, and
    the last two where the document's keys and compressed blocks begin in the row."""
    longest, rows = span.longest_allocated, span.num_compressed(nsa)
    place = geometry.positions(0, geometry.num_selection(longest, nsa) * nsa.l_sel, query.device)
    number = geometry.positions(0, min(geometry.num_compressed(longest, nsa), rows), query.device)
    none = torch.zeros_like(t)
    return SampledQueries(
        query_rows=query,
        compressed_range=torch.stack([none, seen]),
        key_range=torch.stack([none, t + 1]),
        text_positions=torch.stack([none, t]),
        key_by_position=torch.where(place < longest, place, ABSENT),
        compressed_positions=number * nsa.d,
        document_rows=(
            (first_key[:, None] + place[:longest]).clamp_max(span.n_keys - 1),
            (first_compressed[:, None] + number).clamp_max(rows - 1),
        ),
    )


def compute_sampled_loss(
    q: Tensor, k_cmp: Tensor, attention_q: Tensor, k_sel: Tensor, nsa: NSAConfig, sampled: SampledQueries
) -> Tensor:
    """As `selection_loss`, of the queries that `rows` name. What it launches does not depend on the documents."""
    wide, G = torch.promote_types(q.dtype, torch.float32), k_sel.shape[2]
    blocks = geometry.num_selection(len(sampled.key_by_position), nsa)
    first, own = sampled.text_positions
    free = geometry.candidate_blocks(own, blocks, nsa) & ~geometry.forced_blocks(own, blocks, nsa)  # [R, blocks]
    free = free & (geometry.positions(0, blocks, q.device) * nsa.l_sel > first[:, None])
    keys_apart, compressed_apart = sampled.document_rows or (None, None)
    # Full precision under autocast too: scores that are rounded to bfloat16 are a blunt target.
    with torch.autocast(q.device.type, enabled=False):
        with torch.no_grad():
            mass = _compute_attention_mass(_gather_queries(attention_q, sampled, G), k_sel, sampled.key_range, keys_apart)
            mass = mass.index_select(-1, sampled.key_by_position.clamp_min(0))
            mass = mass.masked_fill(sampled.key_by_position == ABSENT, 0)  # [B, R, G, blocks * l_sel]
            mass = torch.unflatten(mass, -1, (blocks, nsa.l_sel)).sum(-1)
        weight = _compute_attention_mass(_gather_queries(q, sampled, G), k_cmp, sampled.compressed_range, compressed_apart)
        importance = weight @ geometry.overlap_at(sampled.compressed_positions, blocks, nsa, dtype=wide) + MIN_IMPORTANCE
        free = free[:, None]
        chosen = importance.log() - (importance * free).sum(-1, keepdim=True).clamp_min(MIN_IMPORTANCE).log()
        return -(mass * free * chosen).sum() / (q.shape[0] * G * len(sampled.query_rows))


def _gather_queries(q: Tensor, sampled: SampledQueries, groups: int) -> Tensor:
    """The queries that are asked, [B, R, G, h, D], scaled, in the wide dtype."""
    picked = q.index_select(1, sampled.query_rows).to(torch.promote_types(q.dtype, torch.float32))
    return torch.unflatten(picked, 2, (groups, -1)) * q.shape[-1] ** -0.5


def sample_rows(length: int, count: int | None, device: torch.device | None = None) -> Tensor:
    """`count` different rows of `length`, one in each of as many equal stretches; all rows if there are no more. int64.

    Where in its stretch a row stands follows multiples of the golden ratio, so that rows do not fall into step with blocks.
    """
    if count is None or count >= length:
        return geometry.positions(0, length, device)
    if count < 1:
        raise ValueError(f"queries = {count}: expected at least 1, or None for all")
    bounds = geometry.positions(0, count + 1, device) * length // count
    turned = geometry.positions(0, count, device) * GOLDEN_NUMERATOR % GOLDEN_DENOMINATOR
    return bounds[:-1] + turned * bounds.diff() // GOLDEN_DENOMINATOR


def _compute_attention_mass(q: Tensor, k: Tensor, visible_range: Tensor, document_rows: Tensor | None) -> Tensor:
    """Attention of q [B, R, G, h, D] over the keys k [B, N, G, D] from `seen[0]` to before `seen[1]`, a mean over h.

    [B, R, G, N], or, of the keys that `apart` [R, S] names in the place of k, [B, R, G, S]; 0 where nothing is seen. Every
    query is held against all keys: one large product takes less time than a copy of each query's own keys, and no key's
    gradient is the sum of several copies'. A query or key that is not finite makes NaN of the shares it has a part in, and
    touches no other, nor its gradient: it is taken out of the products, where zero times NaN would be NaN.
    """
    sound_q, sound_k = q.isfinite().all(-1, keepdim=True), k.isfinite().all(-1, keepdim=True)
    scores = torch.einsum("brghd,bsgd->brghs", q.where(sound_q, 0), k.where(sound_k, 0).to(q.dtype))
    lost = ~(sound_q & sound_k.squeeze(-1).transpose(1, 2)[:, None, :, None])
    if document_rows is not None:
        own = document_rows[None, :, None, None]
        scores, lost = (x.gather(-1, own.expand(*x.shape[:-1], -1)) for x in (scores, lost))
    number = geometry.positions(0, scores.shape[-1], q.device)
    allowed = ((number >= visible_range[0][:, None]) & (number < visible_range[1][:, None]))[None, :, None, None]
    scores = scores.masked_fill(lost, torch.nan).masked_fill(~allowed, torch.finfo(scores.dtype).min)
    return (scores.softmax(-1) * allowed).mean(3)
