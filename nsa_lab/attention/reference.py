"""Definition of NSA in plain PyTorch, for any floating dtype. All other implementations are compared with it.

Each function implements one formula of the paper (arXiv 2502.11089, section 3.3) and is written for reading, not for speed:
it builds the full score matrix, in float32 for half precision and in float64 otherwise.

Shapes as in flash-attention: q [B, T, H, D], k and v [B, T, G, D]; query head n belongs to group n // (H/G). The softmax
scale is d_k**-0.5. LSE is the natural logarithm, float32 (float64 for float64 inputs). A query that sees no key has LSE
-inf, output 0 and zero gradients, never NaN. Non-finite values are causal too: they turn the outputs of the queries that
attend to them into NaN, and change no other output.

`span` is the sequence layout (`Span`); None: one document whose tokens are all queries. Chunk: q, gates, outputs and blocks
have its `length` rows, and keys, values and compressed tensors cover positions 0 .. start+length-1. Packed: B is 1, each
document is computed separately, and block indices are local to it. The public functions of `nsa_lab.attention` check the
shapes; the functions here do not.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from nsa_lab.attention import geometry
from nsa_lab.attention.compression import check_phi, unfold_blocks
from nsa_lab.attention.layout import QueryRange, Span
from nsa_lab.config import NSAConfig


def compress(x: Tensor, nsa: NSAConfig, phi: torch.nn.Module | None = None, *, span: Span | None = None) -> Tensor:
    """Return phi of every block of l tokens, one every d tokens (eq. 7): x [B, T, G, D] -> [B, N, G, D].

    N = 0 if T < l else (T - l)//d + 1, and block i covers tokens [i*d, i*d + l). `avg` is the mean. With a span, x holds
    all its keys, and the blocks of its documents are concatenated; rows of padding are 0.
    """
    check_phi(nsa, phi)
    span = span or Span.full(x.shape[1])
    blocks = torch.cat(
        [unfold_blocks(x[:, document.key_rows], nsa) for document in span.documents], dim=1
    )  # [B, N, G, D, l]
    compressed = blocks.to(get_definition_dtype(x.dtype)).mean(-1).to(x.dtype) if phi is None else phi(blocks)
    return torch.nn.functional.pad(compressed, (0, 0, 0, 0, 0, span.num_padding(nsa)))


def compressed_attention(
    q: Tensor, k_cmp: Tensor, v_cmp: Tensor, nsa: NSAConfig, *, span: Span | None = None
) -> tuple[Tensor, Tensor]:
    """Return attention over the visible compressed blocks: query t sees block i iff i*d + l - 1 <= t (eq. 7 and 8).

    q [B, T, H, D], k_cmp [B, N, G, D], v_cmp [B, N, G, Dv] -> out [B, T, H, Dv], lse [B, T, H].
    """

    def attend_document(document: QueryRange, rows: slice) -> tuple[Tensor, Tensor]:
        k, v = k_cmp[:, rows], v_cmp[:, rows]
        visible = geometry.sees_compressed(document.positions(q.device), k.shape[1], nsa)
        return _attend_masked(q[:, document.query_rows], k, v, visible[None, :, None])

    span = span or Span.full(q.shape[1])
    return _concatenate(list(map(attend_document, span.documents, span.compressed_rows(nsa))))


def block_importance(q: Tensor, k_cmp: Tensor, lse: Tensor, nsa: NSAConfig, *, span: Span | None = None) -> Tensor:
    """Return the importance of every selection block for each query, summed over each group's heads (eq. 8, 9, 10).

    q [B, T, H, D], k_cmp [B, N, G, D], lse [B, T, H] from `compressed_attention` -> float32 [B, T, G, blocks]. The softmax
    is over the visible compressed blocks. Block indices are local to each document; blocks past its end get 0.

    `nsa.head_reduction` = max: the largest probability of the group's heads for a compressed block, instead of the sum.
    `nsa.block_reduction` = max: the largest of the compressed blocks that overlap a selection block, instead of the sum.
    """
    span = span or Span.full(q.shape[1])
    n_blocks = span.num_selection(nsa)
    parts: list[Tensor] = []
    for document, rows in zip(span.documents, span.compressed_rows(nsa), strict=True):
        part = _compute_document_importance(
            q[:, document.query_rows], k_cmp[:, rows], lse[:, document.query_rows], document, nsa
        )
        parts.append(torch.nn.functional.pad(part, (0, n_blocks - part.shape[-1])))
    return torch.cat(parts, dim=1)


def select_blocks(q: Tensor, k_cmp: Tensor, lse: Tensor | None, nsa: NSAConfig, *, span: Span | None = None) -> Tensor:
    """Return the n_sel blocks that each query and group attends to (eq. 11), int32 [B, T, G, n_sel], ascending, then -1.

    `lse` is the LSE of `compressed_attention` for q and k_cmp; None: compute it. Candidates are the blocks that start at or
    before t (j*l_sel <= t). The first `sink_blocks` and the latest `local_blocks`, the query's own included, are always
    selected and count towards n_sel. The others are selected by importance, ties to the lower index. There is no gradient.
    """
    span = span or Span.full(q.shape[1])
    with torch.no_grad():
        lse = compressed_attention(q, k_cmp, k_cmp, nsa, span=span)[1] if lse is None else lse
        importance = block_importance(q, k_cmp, lse, nsa, span=span)
    return torch.cat([select_by_importance(importance[:, d.query_rows], nsa, d.start) for d in span.documents], dim=1)


def select_by_importance(importance: Tensor, nsa: NSAConfig, first: int = 0) -> Tensor:
    """Select blocks by importance [B, T, G, blocks] as in `select_blocks`; `first` is the position of the first query."""
    T, n_blocks = importance.shape[1], importance.shape[3]
    t = geometry.positions(first, first + T, importance.device)
    forced = geometry.forced_blocks(t, n_blocks, nsa)[:, None]  # [T, 1, n_blocks]
    candidate = geometry.candidate_blocks(t, n_blocks, nsa)[:, None]
    rank = torch.where(candidate, torch.where(forced, float("inf"), importance), float("-inf"))
    # A stable descending sort keeps equal scores in index order, so ties go to the lower index.
    order = rank.sort(dim=-1, descending=True, stable=True).indices[..., : nsa.n_sel]
    order = torch.where(candidate.expand_as(rank).gather(-1, order), order, n_blocks)  # not a candidate: sorted to the end
    order = order.sort(dim=-1).values
    selected = torch.where(order < n_blocks, order, -1).to(torch.int32)
    return torch.nn.functional.pad(selected, (0, nsa.n_sel - selected.shape[-1]), value=-1)


def selected_attention(
    q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, nsa: NSAConfig, *, span: Span | None = None
) -> tuple[Tensor, Tensor]:
    """Return attention over the tokens <= t of the selected blocks (eq. 11, 12).

    q [B, T, H, D], k [B, T, G, D], v [B, T, G, Dv], blocks int32 [B, T, G, n_sel] -> out [B, T, H, Dv], lse [B, T, H].
    """

    def attend_document(document: QueryRange) -> tuple[Tensor, Tensor]:
        document_blocks = blocks[:, document.query_rows]
        S, n = document.end, geometry.num_selection(document.end, nsa)
        none_selected = torch.zeros(*document_blocks.shape[:3], n + 1, dtype=torch.bool, device=q.device)
        is_selected = none_selected.scatter(
            -1, torch.where(document_blocks < 0, n, document_blocks).long(), True
        )  # -1: column n
        t, s = document.positions(q.device), geometry.positions(0, S, q.device)
        tokens = is_selected[..., :n].repeat_interleave(nsa.l_sel, dim=-1)[..., :S] & (s <= t[:, None])[None, :, None]
        return _attend_masked(q[:, document.query_rows], k[:, document.key_rows], v[:, document.key_rows], tokens)

    return _concatenate(list(map(attend_document, (span or Span.full(q.shape[1])).documents)))


def window_attention(q: Tensor, k: Tensor, v: Tensor, nsa: NSAConfig, *, span: Span | None = None) -> tuple[Tensor, Tensor]:
    """Return attention over the w latest tokens, the query's own included: exactly min(w, t+1) keys (section 3.3.3).

    q [B, T, H, D], k [B, T, G, D], v [B, T, G, Dv] -> out [B, T, H, Dv], lse [B, T, H].
    """

    def attend_document(document: QueryRange) -> tuple[Tensor, Tensor]:
        t, s = document.positions(q.device), geometry.positions(0, document.end, q.device)
        is_visible = (s <= t[:, None]) & (s > t[:, None] - nsa.w)
        return _attend_masked(
            q[:, document.query_rows], k[:, document.key_rows], v[:, document.key_rows], is_visible[None, :, None]
        )

    return _concatenate(list(map(attend_document, (span or Span.full(q.shape[1])).documents)))


def combine(*outs_and_gates: Tensor) -> Tensor:
    """Return the gated sum of the branches (eq. 5): an output [B, T, H, Dv] for each, then gates [B, T, H, branches]."""
    *outs, gates = outs_and_gates
    return functools.reduce(torch.add, map(torch.mul, gates.unsqueeze(-1).unbind(-2), outs))


def nsa_attention(
    q: Tensor,
    k_cmp: Tensor | None,
    v_cmp: Tensor | None,
    k_sel: Tensor | None,
    v_sel: Tensor | None,
    k_win: Tensor | None,
    v_win: Tensor | None,
    gates: Tensor | None,
    nsa: NSAConfig,
    *,
    blocks: Tensor | None = None,
    span: Span | None = None,
) -> Tensor:
    """Return the gated sum of the branches, [B, T, H, Dv]. k_cmp and v_cmp are already compressed.

    Keys and values of a branch that does not exist are None. gates: [B, T, H, branches], in the order cmp, sel, win; None
    for a single branch, whose output is returned. `blocks` [B, T, G, n_sel]: the selected blocks; None: select as
    `nsa.scores` says.
    """
    outs: list[Tensor] = []
    lse = None
    if k_cmp is not None and v_cmp is not None:
        out, lse = compressed_attention(q, k_cmp, v_cmp, nsa, span=span)
        outs.append(out)
    if k_sel is not None and v_sel is not None:
        if blocks is None:
            scoring_nsa = geometry.get_scoring_geometry(nsa)
            keys = k_cmp if scoring_nsa is nsa else compress(k_sel, scoring_nsa, span=span)
            assert keys is not None, "nsa.scores = compressed needs the compressed branch"
            blocks = select_blocks(q, keys, lse if scoring_nsa is nsa else None, scoring_nsa, span=span)
        outs.append(selected_attention(q, k_sel, v_sel, blocks, nsa, span=span)[0])
    if k_win is not None and v_win is not None:
        outs.append(window_attention(q, k_win, v_win, nsa, span=span)[0])
    return outs[0] if gates is None else combine(*outs, gates)


def _concatenate(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Concatenate the outputs and LSE of all documents."""
    outs, lses = zip(*parts, strict=True)
    return torch.cat(outs, dim=1), torch.cat(lses, dim=1)


def _compute_document_importance(q: Tensor, k_cmp: Tensor, lse: Tensor, document: QueryRange, nsa: NSAConfig) -> Tensor:
    """Return `block_importance` of one document."""
    N, acc_dtype = k_cmp.shape[1], get_definition_dtype(q.dtype)
    scores = _compute_scores(q, k_cmp)  # [B, T, G, h, N]
    sees_block = geometry.sees_compressed(document.positions(q.device), N, nsa)
    lse = _split_heads(lse.to(acc_dtype).unsqueeze(-1), k_cmp.shape[2])  # [B, T, G, h, 1]
    visible = sees_block[None, :, None, None]
    # Mask before exp: a query that sees no block has lse = -inf, and exp(s + inf) would be NaN or inf.
    p = torch.where(visible, scores - torch.where(torch.isneginf(lse), 0.0, lse), float("-inf")).exp()
    overlap_weights = geometry.overlap(N, geometry.num_selection(document.end, nsa), nsa, dtype=acc_dtype, device=q.device)
    p = p.sum(dim=3) if nsa.head_reduction == "sum" else p.amax(dim=3)  # [B, T, G, N]
    if nsa.block_reduction == "sum" or N == 0:
        return (p @ overlap_weights).float()
    return torch.where(overlap_weights > 0, p.unsqueeze(-1), 0.0).amax(dim=-2).float()


def get_definition_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of scores and block selection for inputs of `dtype`: float32 for half precision, else float64."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else torch.float64


def _split_heads(x: Tensor, groups: int) -> Tensor:
    """Reshape [B, T, H, D] to [B, T, G, h, D]."""
    return torch.unflatten(x, 2, (groups, x.shape[2] // groups))


def _compute_scores(q: Tensor, k: Tensor) -> Tensor:
    """Return scaled dot products [B, T, G, h, S] in the accumulation dtype."""
    acc_dtype = get_definition_dtype(q.dtype)
    return (
        torch.einsum("btghd,bsgd->btghs", _split_heads(q.to(acc_dtype), k.shape[2]), k.to(acc_dtype)) * q.shape[-1] ** -0.5
    )


def _attend_masked(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor]:
    """Return the softmax attention over the keys where `allowed` (bool, broadcast over [B, T, G, S]) is True."""
    # Zero times NaN is NaN. Non-finite keys and values are therefore replaced by 0, and their scores by NaN.
    is_finite = k.isfinite().all(-1) & v.isfinite().all(-1)  # [B, S, G]
    k, v = k.where(is_finite.unsqueeze(-1), 0.0), v.where(is_finite.unsqueeze(-1), 0.0)
    scores = _compute_scores(q, k).masked_fill(~is_finite.mT[:, None, :, None], float("nan"))
    scores = scores.masked_fill(~allowed.unsqueeze(3), float("-inf"))  # [B, T, G, h, S]
    if k.shape[1] == 0:
        lse = scores.sum(-1) - float("inf")  # part of the autograd graph, like every other LSE
    else:
        # logsumexp of a row of -inf has a NaN gradient: give such rows finite scores, then set their LSE to -inf.
        sees_none = ~allowed.any(-1).unsqueeze(-1).expand(scores.shape[:-1])
        lse = torch.where(sees_none, float("-inf"), scores.masked_fill(sees_none.unsqueeze(-1), 0.0).logsumexp(-1))
    p = torch.where(allowed.unsqueeze(3), scores - torch.where(torch.isneginf(lse), 0.0, lse).unsqueeze(-1), float("-inf"))
    out = torch.einsum("btghs,bsgd->btghd", p.exp(), v.to(p.dtype)).flatten(2, 3).to(q.dtype)
    return out, lse.flatten(2, 3).to(torch.promote_types(q.dtype, torch.float32))
