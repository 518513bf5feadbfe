"""How a decoding step is launched: two kernels write its tokens and the blocks that they complete, five attend to them, six
with an indexer, and one computes linear maps; no size depends on how long sequences are."""

# torch.library's functions are not annotated.
# pyright: reportUnknownMemberType=false, reportUntypedFunctionDecorator=false
from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nsa_lab.attention.kernels import launch_table
from nsa_lab.attention.kernels.decoding import decode_linear as linear_kernel
from nsa_lab.attention.kernels.decoding.compress_update import nsa_compress_update
from nsa_lab.attention.kernels.decoding.decode_linear import nsa_linear
from nsa_lab.attention.kernels.decoding.decode_topk import nsa_block_importance, nsa_block_logsumexp, nsa_block_topk_decode
from nsa_lab.attention.kernels.decoding.merge import nsa_gate_merge
from nsa_lab.attention.kernels.decoding.pdl import get_pdl_options
from nsa_lab.attention.kernels.decoding.rope_kv_append import nsa_rope_kv_append
from nsa_lab.attention.kernels.decoding.split_kv_attention import nsa_compressed_and_window, nsa_selected_decode
from nsa_lab.attention.kernels.kernel_names import LOG2E
from nsa_lab.attention.kernels.launch_table import Tile
from nsa_lab.attention.kernels.launch_utils import ceil_div, get_strides, padded_width
from nsa_lab.attention.layer_cache import CacheWriteBuffers, PoolWeights

torch.library.define(
    "nsa_lab::cached_attention",
    "(Tensor q, Tensor gates, Tensor lengths, Tensor k_cmp, Tensor v_cmp, Tensor k_sel, Tensor v_sel, Tensor k_win,"
    " Tensor v_win, int l, int d, int l_sel, int n_sel, int w, Tensor? index_q=None, Tensor? k_index=None,"
    " int index_l=0, int index_d=0) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
cached_attention = torch.ops.nsa_lab.cached_attention.default


MAX_PROJECTIONS = 3  # of one launch


class SelectionScores(NamedTuple):
    """What the choice is made from."""

    scores: Tensor  # float32 [B, T, H, N], in units of log2
    sums: Tensor  # float32 [B, T, H, parts or more, 2]: peak, in units of log2, and total
    n_parts: int
    l: int
    d: int


class PartialOutputs(NamedTuple):
    """Partial outputs of all branches, not divided by their totals, and how many parts each branch has; in this order."""

    out: Tensor  # float32 [B, T, H, cmp + win + sel, Dv]
    sums: Tensor  # float32 [B, T, H, cmp + win + sel, 2]: peak, in units of log2, and total
    cmp_parts: int
    win_parts: int
    sel_parts: int


# fmt: off
@torch.library.impl("nsa_lab::cached_attention", ("cpu", "cuda"))
def _(
    q: Tensor, gates: Tensor, lengths: Tensor, k_cmp: Tensor, v_cmp: Tensor, k_sel: Tensor, v_sel: Tensor, k_win: Tensor,
    v_win: Tensor, l: int, d: int, l_sel: int, n_sel: int, w: int, index_q: Tensor | None = None,
    k_index: Tensor | None = None, index_l: int = 0, index_d: int = 0,
) -> Tensor:
    # All that torch launches comes before the first kernel: those behind it may read before the one ahead has ended.
    q = q if q.stride(3) == 1 else q.contiguous()
    index_q = index_q if index_q is None or index_q.stride(3) == 1 else index_q.contiguous()
    parts = allocate_parts(q, v_cmp, n_sel, w)
    # Where every block that fits the cache has a place, scores do not matter.
    there = ceil_div(k_sel.shape[1], l_sel)
    competing = there > n_sel
    scores = _allocate_scores(q, k_cmp) if competing and index_q is None else None
    launch_compressed_and_window(q, k_cmp, v_cmp, k_win, v_win, lengths, scores, parts, l, d, w)
    found = None
    if scores is not None:
        scored = SelectionScores(scores, parts.sums, parts.cmp_parts, l, d)
        found = compute_importance(q.shape[1], k_sel.shape[2], scored, lengths, there, l_sel, n_sel)
    elif competing and index_q is not None and k_index is not None:
        found = compute_block_logsumexp(index_q, k_index, lengths, there, index_d, l_sel, n_sel)
    blocks = select_topk(q.shape[1], k_sel.shape[2], found, lengths, l_sel, n_sel)
    _launch_selected(q, k_sel, v_sel, blocks, lengths, parts, l_sel)
    return merge_parts(q, gates, parts)


@torch.library.register_fake("nsa_lab::cached_attention")
def _(q: Tensor, gates: Tensor, lengths: Tensor, k_cmp: Tensor, v_cmp: Tensor, *_: Any) -> Tensor:
    return q.new_empty(*q.shape[:3], v_cmp.shape[3])


def cached_dense_attention(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    """As `kernels.cached_dense_attention`: the compressed branch with a block for every token, and a window of nothing."""
    parts, gates = allocate_parts(q, v, 0, 0), q.new_ones(()).expand(*q.shape[:3], 3)  # before the first kernel, as above
    launch_compressed_and_window(q, k, v, k, v, lengths, None, parts, 1, 1, 0)
    return merge_parts(q, gates, parts)


def rotate_and_append(
    q_and_k: Tensor, values: Tensor | None, cos: Tensor, sin: Tensor, lengths: Tensor, places: CacheWriteBuffers, k_before_conv: Tensor | None,
    conv_weight: Tensor | None, can_prefetch: bool,
) -> Tensor:
    """As `kernels.append`."""
    q_and_k = q_and_k if q_and_k.stride(3) == 1 else q_and_k.contiguous()
    values = values if values is None or values.stride(3) == 1 else values.contiguous()
    B, T, rows, Dk = q_and_k.shape
    first, like = next((i // 2, x) for i, x in enumerate(places) if x is not None)
    G, keys = like.shape[2], like.shape[2] * sum(x is not None for x in places[::2])
    H, Dv = rows - keys, Dk if values is None else values.shape[3]
    q = like.new_empty(B, T, H, Dk)
    nsa_rope_kv_append[(B * T, H + keys * (1 if values is None else 2))](
        q_and_k, values, cos, sin, lengths, q, *places, k_before_conv, conv_weight,
        *get_strides(q_and_k), *_get_optional_strides(values), *(stride for x in places for stride in _get_optional_strides(x)), *cos.stride(),
        T, 0 if places.k_sel is None else places.k_sel.shape[1], len(cos),
        *(0 if x is None else x.shape[1] for x in (places.k_raw, places.k_win, k_before_conv)), G,
        H=H, KEYS=keys, FIRST=first, HALF=cos.shape[1], DK=Dk, DV=Dv, PAD=padded_width(max(Dk, Dv)),
        num_warps=launch_table.APPEND_WARPS, **get_pdl_options(q.device, B * T, can_prefetch),
    )
    return q


def update_compressed(
    k_raw: Tensor, v_raw: Tensor | None, k: Tensor, v: Tensor | None, k_pool: PoolWeights | None, v_pool: PoolWeights | None,
    lengths: Tensor, T: int, l: int, d: int, can_prefetch: bool,
) -> None:
    """As `kernels.complete`."""
    B, N, G, Dk = k.shape
    Dv = Dk if v is None else v.shape[3]
    (k_score, k_place), (v_score, v_place) = (pool or (None, None) for pool in (k_pool, v_pool))
    nsa_compress_update[(B * G, ceil_div(T, d), 1 if v is None else 2)](
        k_raw, v_raw, k, v, k_score, v_score, k_place, v_place, lengths,
        *get_strides(k_raw, k), *_get_optional_strides(v_raw), *_get_optional_strides(v),
        T, N, k_raw.shape[1], G,
        L=l, L_PAD=padded_width(l), STRIDE=d, DK=Dk, DV=Dv, PAD=padded_width(max(Dk, Dv)),
        num_warps=launch_table.STREAMING_WARPS, **get_pdl_options(k.device, B * T, can_prefetch),
    )


def linear(
    x: Tensor, projections: Sequence[tuple[Tensor, str]], norm: tuple[Tensor, float] | None, residual: Tensor | None, is_gated: bool,
    can_prefetch: bool,
) -> list[Tensor]:
    """As `kernels.linear`."""
    rows, K = x.numel() // x.shape[-1], x.shape[-1]
    widths = [len(w) // 2 if is_gated else len(w) for w, _ in projections]
    out = [x.new_empty(*x.shape[:-1], width) for width in widths]
    none = [None] * (MAX_PROJECTIONS - len(projections))
    thens = [linear_kernel.ACTIVATIONS[then] for _, then in projections]
    tile = launch_table.linear_tile(x.dtype, rows, sum(widths), K)
    nsa_linear[(sum(ceil_div(width, tile.columns) for width in widths), ceil_div(rows, tile.rows))](
        x, None if norm is None else norm[0], residual, *(w for w, _ in projections), *none, *out, *none,
        rows, 0.0 if norm is None else norm[1],
        *widths, *([0] * len(none)), K, *thens, *([0] * len(none)), is_gated,
        tile.rows, tile.columns, tile.chunk, num_warps=tile.warps, num_stages=tile.stages,
        **get_pdl_options(x.device, rows, can_prefetch),
    )
    return out


def _get_optional_strides(x: Tensor | None) -> tuple[int, ...]:
    return (0, 0, 0) if x is None else get_strides(x)


def _get_tile(q: Tensor, groups: int, width: int, queries: int) -> Tile:
    return launch_table.decoding_tile(q.dtype, width, queries * (q.shape[2] // groups), q.device)


def _count_row_tiles(q: Tensor, groups: int, tile: Tile, queries: int) -> int:
    return ceil_div(queries * (q.shape[2] // groups), tile.rows)


def allocate_parts(q: Tensor, v_cmp: Tensor, n_sel: int, w: int) -> PartialOutputs:
    """Room for the parts of a step; none for the selected branch if n_sel is 0."""
    B, T, H, _ = q.shape
    N, G, Dv = v_cmp.shape[1:]
    tile = _get_tile(q, G, max(q.shape[3], Dv), T)
    programs = B * G * _count_row_tiles(q, G, tile, T)
    cmp = launch_table.decoding_parts(programs, ceil_div(N, tile.keys))
    win = launch_table.decoding_parts(programs, ceil_div(w + T - 1, tile.keys))
    sel = launch_table.decoding_parts(B * G * T, n_sel) if n_sel else 0
    out = q.new_empty(B, T, H, cmp + win + sel, Dv, dtype=torch.float32)
    return PartialOutputs(out, out.new_empty(*out.shape[:4], 2), cmp, win, sel)


def _allocate_scores(q: Tensor, keys: Tensor) -> Tensor:
    """For the scores of every query and head to every key that the cache has room for."""
    return q.new_empty(*q.shape[:3], keys.shape[1], dtype=torch.float32)


def launch_compressed_and_window(
    q: Tensor, k_cmp: Tensor, v_cmp: Tensor, k_win: Tensor, v_win: Tensor, lengths: Tensor, scores: Tensor | None,
    parts: PartialOutputs, l: int, d: int, w: int,
) -> None:
    """Fills `scores` and the parts of both branches."""
    B, T, H, Dk = q.shape
    N, G, Dv = v_cmp.shape[1:]
    tile = _get_tile(q, G, max(Dk, Dv), T)
    row_tiles = _count_row_tiles(q, G, tile, T)
    nsa_compressed_and_window[(B * G * row_tiles * (parts.cmp_parts + parts.win_parts),)](
        q, k_cmp, v_cmp, k_win, v_win, lengths, scores, parts.out, parts.sums,
        *get_strides(q, k_cmp, v_cmp, k_win, v_win),
        T, N, k_win.shape[1], B, G, row_tiles, Dk**-0.5 * LOG2E,
        HEADS=H // G, L=l, STRIDE=d, W=w,
        CMP_PARTS=parts.cmp_parts, WIN_PARTS=parts.win_parts, PARTS=parts.sums.shape[3],
        DK=Dk, DV=Dv, DK_PAD=padded_width(Dk), DV_PAD=padded_width(Dv),
        ROWS=tile.rows, KEYS=tile.keys, **tile.compile_options(), **get_pdl_options(q.device, B * T),
    )


def compute_importance(T: int, G: int, selection_scores: SelectionScores, lengths: Tensor, n_blocks: int, l_sel: int, n_sel: int) -> Tensor:
    """Of all the blocks `there`, float32 [B, T, G, there], by the scores of compressed keys."""
    B, _, H, N = selection_scores.scores.shape
    heads, found = padded_width(H // G), selection_scores.scores.new_empty(B, T, G, n_blocks)
    strides_pad = padded_width(l_sel // selection_scores.d)
    blocks = launch_table.importance_blocks(heads * strides_pad)
    nsa_block_importance[(B * T * G, ceil_div(n_blocks, blocks))](
        selection_scores.scores, selection_scores.sums, lengths, found,
        T, N, G, n_blocks, selection_scores.sums.shape[3],
        HEADS=H // G, HEADS_PAD=heads, L=selection_scores.l, STRIDE=selection_scores.d, L_SEL=l_sel, N_SEL=n_sel,
        PARTS=selection_scores.n_parts, PARTS_PAD=padded_width(selection_scores.n_parts), BLOCKS=blocks,
        STRIDES_PAD=strides_pad, num_warps=launch_table.STREAMING_WARPS, **get_pdl_options(lengths.device, B * T),
    )
    return found


def compute_block_logsumexp(q: Tensor, keys: Tensor, lengths: Tensor, n_blocks: int, d: int, l_sel: int, n_sel: int) -> Tensor:
    """Of all the blocks `there`, float32 [B, T, G, there], by an indexer's keys of d tokens each; one head per group."""
    B, T, G, Dk = q.shape
    at_once = min(padded_width(l_sel // d), launch_table.block_topk_strides(q.dtype, Dk))
    tile = _get_tile(q, G, Dk, T)
    row_tiles = _count_row_tiles(q, G, tile, T)
    blocks = launch_table.logsumexp_blocks(B * G * row_tiles, n_blocks, at_once)
    found = q.new_empty(B, T, G, n_blocks, dtype=torch.float32)
    nsa_block_logsumexp[(B * G * row_tiles * ceil_div(n_blocks, blocks),)](
        q, keys, lengths, found,
        *get_strides(q, keys),
        T, keys.shape[1], B, G, row_tiles, n_blocks, Dk**-0.5 * LOG2E,
        STRIDE=d, L_SEL=l_sel, N_SEL=n_sel, STRIDES=l_sel // d, STRIDES_AT_ONCE=at_once,
        DK=Dk, DK_PAD=padded_width(Dk), ROWS=tile.rows, BLOCKS=blocks, **tile.compile_options(), **get_pdl_options(q.device, B * T),
    )
    return found


def select_topk(T: int, G: int, scores: Tensor | None, lengths: Tensor, l_sel: int, n_sel: int) -> Tensor:
    """The blocks int32 [B, T, G, n_sel] of T queries after `lengths`, by float32 scores [B, T, G, blocks] of all blocks;
    None where each of them has a place."""
    B, there = lengths.shape[0], 0 if scores is None else scores.shape[3]
    blocks = torch.empty(B, T, G, n_sel, dtype=torch.int32, device=lengths.device)
    at_once, warps = launch_table.topk_tile(there)
    nsa_block_topk_decode[(B * T * G,)](
        scores, lengths, blocks,
        T, G, there,
        L_SEL=l_sel, N_SEL=n_sel, N_SEL_PAD=padded_width(n_sel),
        BLOCKS=at_once, num_warps=warps, **get_pdl_options(lengths.device, B * T),
    )
    return blocks


def _launch_selected(
    q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, lengths: Tensor, parts: PartialOutputs, l_sel: int
) -> None:
    """Fills the parts of the selected branch."""
    B, T, H, Dk = q.shape
    N, G, Dv = v.shape[1:]
    tile = _get_tile(q, G, max(Dk, Dv), 1)
    row_tiles = _count_row_tiles(q, G, tile, 1)
    nsa_selected_decode[(B * G * T * row_tiles * parts.sel_parts,)](
        q, k, v, blocks, lengths, parts.out, parts.sums,
        *get_strides(q, k, v),
        T, N, B, G, row_tiles, Dk**-0.5 * LOG2E,
        HEADS=H // G, L_SEL=l_sel, N_SEL=blocks.shape[3],
        FIRST_PART=parts.cmp_parts + parts.win_parts, SEL_PARTS=parts.sel_parts, PARTS=parts.sums.shape[3],
        DK=Dk, DV=Dv, DK_PAD=padded_width(Dk), DV_PAD=padded_width(Dv),
        ROWS=tile.rows, KEYS=min(tile.keys, padded_width(l_sel)), **tile.compile_options(), **get_pdl_options(q.device, B * T),
    )


def merge_parts(q: Tensor, gates: Tensor, parts: PartialOutputs) -> Tensor:
    """The gated sum of all parts, in q's dtype."""
    B, T, H, number, Dv = parts.out.shape
    out = q.new_empty(B, T, H, Dv)
    columns = min(launch_table.MERGE_ELEMENTS // padded_width(number), padded_width(Dv))
    nsa_gate_merge[(B * T * H, ceil_div(Dv, columns))](
        parts.out, parts.sums, gates, out,
        T, H, *gates.stride(),
        CMP_PARTS=parts.cmp_parts, WIN_PARTS=parts.win_parts, PARTS=number, PARTS_PAD=padded_width(number),
        DV=Dv, COLUMNS=columns, num_warps=launch_table.MERGE_WARPS, **get_pdl_options(q.device, B * T),
    )
    return out
# fmt: on
