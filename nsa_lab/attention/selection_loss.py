"""A loss that teaches the compressed branch to choose the blocks that the selected branch would look at.

The choice of blocks carries no gradient (eq. 11), and what trains the compressed keys, the compressed branch's own output,
need not care where the selected branch finds things. This loss says it directly: the importances of the choice (eq. 9, 10)
are held against the selected branch's attention as it would be over the whole past. DeepSeek-V3.2 trains its indexer by a
loss of this kind (arXiv 2512.02556, section 2.1); docs/science/retrieval.md shows what it does here.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import pad

from nsa_lab.attention import checks, geometry
from nsa_lab.attention.span import DocumentRows, Span
from nsa_lab.config import NSAConfig

# Added to every importance: a block that no visible compressed block overlaps has none, and log 0 has no gradient.
FLOOR = 1e-9
GOLDEN = (5**0.5 - 1) / 2


def selection_loss(
    q: Tensor,
    k_cmp: Tensor,
    k_sel: Tensor,
    nsa: NSAConfig,
    *,
    looking: Tensor | None = None,
    queries: int | None = 64,
    span: Span | None = None,
) -> Tensor:
    """Cross-entropy of the choice's importances against the selected branch's attention mass, nats, 0-d.

    q [B, T, H, D], k_cmp [B, N, G, D] as `compress` gives it, k_sel [B, T, G, D]; float32, or float64 for float64 inputs.
    `looking` [B, T, H', D'] are the selected branch's queries where q and k_cmp, of a width of their own, serve the choice
    alone; None: q. k_sel has their width.
    For query t and group g, over the blocks j that have begun and are not forced: -sum_j m_j log(I_j / sum_i I_i), with m_j
    the attention of t over all keys <= t that falls into block j, a mean over the group's heads, and I_j the importance;
    then the mean over batch, queries and groups. m is a target and carries no gradient; q and k_cmp receive one.

    `queries`: how many are asked, spread evenly over the span and over the places within a block; None: all. They are
    the same at every step, so that a resumed run repeats them. Memory is that of their scores over all keys. A query
    without free blocks adds 0. Raises ValueError for tensors that do not go together.
    """
    checks.check_compressed(q, k_cmp, k_cmp, nsa, span)
    looking = q if looking is None else looking
    checks.check_raw(looking, k_sel, k_sel, span, "_sel")
    span = span or Span.full(q.shape[1])
    rows = spread(span.queries, queries)
    total = q.new_zeros((), dtype=torch.promote_types(q.dtype, torch.float32))
    # Full precision under autocast too: scores that are rounded to bfloat16 are a blunt target.
    with torch.autocast(q.device.type, enabled=False):
        for document, compressed in zip(span.documents, span.compressed_rows(nsa), strict=True):
            own = [row for row in rows if document.queries.start <= row < document.queries.stop]
            if own:
                total = total + _of_document(q, k_cmp[:, compressed], looking, k_sel[:, document.keys], own, document, nsa)
    return total / (q.shape[0] * k_sel.shape[2] * len(rows))


def spread(length: int, count: int | None) -> list[int]:
    """`count` different rows of `length`, one in each of as many equal stretches; all rows if there are no more.

    Where in its stretch a row stands follows multiples of the golden ratio, so that rows do not fall into step with blocks.
    """
    if count is None or count >= length:
        return list(range(length))
    if count < 1:
        raise ValueError(f"queries = {count}: expected at least 1, or None for all")
    bounds = [i * length // count for i in range(count + 1)]
    return [begin + int(i * GOLDEN % 1 * (end - begin)) for i, (begin, end) in enumerate(pairwise(bounds))]


def _of_document(
    q: Tensor, k_cmp: Tensor, looking: Tensor, k_sel: Tensor, rows: list[int], document: DocumentRows, nsa: NSAConfig
) -> Tensor:
    """Sum over batch, groups and the queries at `rows` of q; k_cmp and k_sel are the document's own."""
    wide, G, S = torch.promote_types(q.dtype, torch.float32), k_sel.shape[2], document.last
    index = torch.tensor(rows, device=q.device)
    t = index - document.queries.start + document.first
    blocks = geometry.num_selection(S, nsa)
    free = geometry.candidate_blocks(t, blocks, nsa) & ~geometry.forced_blocks(t, blocks, nsa)  # [R, blocks]

    def asked(q: Tensor) -> Tensor:
        return torch.unflatten(q.index_select(1, index).to(wide), 2, (G, -1)) * q.shape[-1] ** -0.5  # [B, R, G, h, D]

    with torch.no_grad():
        past = geometry.positions(0, S, q.device) <= t[:, None]
        mass = _shares(asked(looking), k_sel, past)  # [B, R, G, S]
        mass = torch.unflatten(pad(mass, (0, blocks * nsa.l_sel - S)), -1, (blocks, nsa.l_sel)).sum(-1)
    importance = _shares(asked(q), k_cmp, geometry.sees_compressed(t, k_cmp.shape[1], nsa))
    importance = importance @ geometry.overlap(k_cmp.shape[1], blocks, nsa, dtype=wide, device=q.device) + FLOOR
    free = free[:, None]
    chosen = importance.log() - (importance * free).sum(-1, keepdim=True).clamp_min(FLOOR).log()
    return -(mass * free * chosen).sum()


def _shares(q: Tensor, k: Tensor, allowed: Tensor) -> Tensor:
    """Attention of q [B, R, G, h, D] over the keys k [B, S, G, D] that `allowed` [R, S] lets it see, a mean over h.

    [B, R, G, S]; 0 where nothing is allowed.
    """
    scores = torch.einsum("brghd,bsgd->brghs", q, k.to(q.dtype))
    allowed = allowed[:, None, None]
    scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
    return (scores.softmax(-1) * allowed).mean(3)
