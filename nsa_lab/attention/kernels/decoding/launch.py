"""The launches of a decoding step. No size depends on the lengths of the sequences.

Two kernels write the new tokens and the compressed blocks that they complete; four kernels compute attention, or three
without a compressed branch; one kernel computes linear layers.
"""

# The functions of torch.library have no type annotations.
# pyright: reportUnknownMemberType=false, reportUntypedFunctionDecorator=false
from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nsa_lab.attention.kernels import launch_table
from nsa_lab.attention.kernels.block_topk import SelectionRule
from nsa_lab.attention.kernels.decoding import decode_linear as linear_kernel
from nsa_lab.attention.kernels.decoding import decoding_table
from nsa_lab.attention.kernels.decoding.compress_update import nsa_compress_update
from nsa_lab.attention.kernels.decoding.decode_linear import nsa_linear
from nsa_lab.attention.kernels.decoding.decode_topk import nsa_block_importance, nsa_block_logsumexp
from nsa_lab.attention.kernels.decoding.embedding import nsa_ngram_lookup, nsa_rms_norm
from nsa_lab.attention.kernels.decoding.index_append import nsa_index_append
from nsa_lab.attention.kernels.decoding.pdl import get_pdl_options
from nsa_lab.attention.kernels.decoding.rope_kv_append import nsa_rope_kv_append
from nsa_lab.attention.kernels.decoding.split_kv_attention import (
    nsa_compressed_decode,
    nsa_gate_merge,
    nsa_selected_and_window,
)
from nsa_lab.attention.kernels.kernel_names import LOG2E
from nsa_lab.attention.kernels.launch_table import Tile
from nsa_lab.attention.kernels.launch_utils import ceil_div, get_strides, padded_width
from nsa_lab.attention.kernels.stored_keys import get_format, get_load_format, get_mxfp4_chunk
from nsa_lab.attention.layer_cache import CacheWriteBuffers, PoolWeights

_KEYS_AND_VALUES = ", ".join(f"Tensor {kind}_{branch}" for branch in ("cmp", "sel", "win") for kind in "kv")
_RULE_SCHEMA = "int n_sel, int sink_blocks, int local_blocks, bool head_max, bool block_max"
# The first operator has all three branches and the paper's rule of selection.
_SCHEMAS = {
    "cached_attention": f"(Tensor q, Tensor gates, Tensor lengths, {_KEYS_AND_VALUES}, int l, int d, int l_sel, int n_sel,"
    " int w, Tensor? index_q=None, Tensor? k_index=None, int index_l=0, int index_d=0) -> Tensor",
    "cached_branches": f"(Tensor q, Tensor? gates, Tensor lengths, {_KEYS_AND_VALUES.replace('Tensor', 'Tensor?')}, int l,"
    f" int d, int l_sel, int w, {_RULE_SCHEMA}, Tensor? index_q=None, Tensor? k_index=None, int index_l=0, int index_d=0,"
    " Tensor? blocks=None) -> (Tensor, Tensor)",
}
for _name, _schema in _SCHEMAS.items():
    torch.library.define(f"nsa_lab::{_name}", _schema, tags=(torch.Tag.pt2_compliant_tag,))
cached_branches = torch.ops.nsa_lab.cached_branches.default


MAX_PROJECTIONS = 3  # per launch of the linear kernel


class SelectionScores(NamedTuple):
    """Scores of compressed keys for block selection, and the geometry of the keys."""

    scores: Tensor  # float32 [B, T, H, N], in units of log2
    sums: Tensor  # float32 [B, T, H, parts or more, 2]: peak, in units of log2, and total
    n_parts: int
    l: int
    d: int


class PartialOutputs(NamedTuple):
    """Partial outputs of all branches, not divided by their totals, and the number of parts per branch, in this order."""

    out: Tensor  # float32 [B, T, H, cmp + win + sel, Dv]
    sums: Tensor  # float32 [B, T, H, cmp + win + sel, 2]: peak, in units of log2, and total
    cmp_parts: int
    win_parts: int
    sel_parts: int


# fmt: off
def _attend_cached(
    q: Tensor, gates: Tensor | None, lengths: Tensor, k_cmp: Tensor | None, v_cmp: Tensor | None, k_sel: Tensor | None,
    v_sel: Tensor | None, k_win: Tensor | None, v_win: Tensor | None, l: int, d: int, l_sel: int, w: int, n_sel: int,
    sink_blocks: int, local_blocks: int, head_max: bool, block_max: bool, index_q: Tensor | None = None,
    k_index: Tensor | None = None, index_l: int = 0, index_d: int = 0, blocks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the output, and the selected blocks if they are selected here.

    The scores of index_q over k_index select blocks, otherwise the scores of the compressed branch; or blocks are given.
    """
    # All kernels that torch launches come before our first kernel: later ones may start before the previous one has ended.
    q = q if q.stride(3) == 1 else q.contiguous()
    index_q = index_q if index_q is None or index_q.stride(3) == 1 else index_q.contiguous()
    parts = allocate_parts(q, v_cmp, v_sel, v_win, n_sel, w)
    rule = SelectionRule(n_sel, sink_blocks, local_blocks, head_max, block_max)
    # If all blocks that fit in the cache can be selected, scores are not needed.
    has_competition = k_sel is not None and blocks is None and ceil_div(k_sel.shape[1], l_sel) > n_sel
    block_scores, selected_blocks = None, torch.empty(0, dtype=torch.int32, device=q.device)
    T, n_blocks = q.shape[1], 0 if k_sel is None else ceil_div(k_sel.shape[1], l_sel)
    if k_cmp is not None and v_cmp is not None:
        scores = _allocate_scores(q, k_cmp) if has_competition and index_q is None else None
        launch_compressed(q, k_cmp, v_cmp, lengths, scores, parts, l, d)
        if scores is not None:
            selection = SelectionScores(scores, parts.sums, parts.cmp_parts, l, d)
            block_scores = compute_importance(T, k_cmp.shape[2], selection, lengths, n_blocks, l_sel, rule)
    if has_competition and index_q is not None and k_index is not None:
        block_scores = _score_blocks(index_q, k_index, lengths, n_blocks, index_l, index_d, l_sel, rule)
    if k_sel is not None or k_win is not None:
        selected = launch_selected_and_window(
            q, k_sel, v_sel, k_win, v_win, blocks, block_scores, lengths, parts, l_sel, w, rule
        )
        selected_blocks = selected_blocks if selected is None else selected
    return merge_parts(q, gates, parts), selected_blocks


torch.library.impl("nsa_lab::cached_branches", ("cpu", "cuda"), _attend_cached)


@torch.library.impl("nsa_lab::cached_attention", ("cpu", "cuda"))
def _(
    q: Tensor, gates: Tensor, lengths: Tensor, k_cmp: Tensor, v_cmp: Tensor, k_sel: Tensor, v_sel: Tensor, k_win: Tensor,
    v_win: Tensor, l: int, d: int, l_sel: int, n_sel: int, w: int, index_q: Tensor | None = None,
    k_index: Tensor | None = None, index_l: int = 0, index_d: int = 0,
) -> Tensor:
    branches, rule = (k_cmp, v_cmp, k_sel, v_sel, k_win, v_win), SelectionRule(n_sel)
    return _attend_cached(q, gates, lengths, *branches, l, d, l_sel, w, *rule, index_q, k_index, index_l, index_d)[0]


@torch.library.register_fake("nsa_lab::cached_branches")
def _(
    q: Tensor, gates: Tensor | None, lengths: Tensor, k_cmp: Tensor | None, v_cmp: Tensor | None, k_sel: Tensor | None,
    v_sel: Tensor | None, k_win: Tensor | None, v_win: Tensor | None, l: int, d: int, l_sel: int, w: int, n_sel: int,
    sink_blocks: int, local_blocks: int, head_max: bool, block_max: bool, index_q: Tensor | None = None,
    k_index: Tensor | None = None, index_l: int = 0, index_d: int = 0, blocks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    v = next(x for x in (v_cmp, v_sel, v_win) if x is not None)
    selects = k_sel is not None and blocks is None
    shape = (q.shape[0], q.shape[1], v.shape[2], n_sel) if selects else (0,)
    return q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(shape, dtype=torch.int32)


@torch.library.register_fake("nsa_lab::cached_attention")
def _(q: Tensor, gates: Tensor, lengths: Tensor, k_cmp: Tensor, v_cmp: Tensor, *_: Any) -> Tensor:
    return q.new_empty(*q.shape[:3], v_cmp.shape[3])


def _score_blocks(
    q: Tensor, keys: Tensor, lengths: Tensor, n_blocks: int, l: int, d: int, l_sel: int, rule: SelectionRule,
) -> Tensor:
    """Return a score of each block for q [B, T, H, D] and keys [B, N, G, D] that are used only for selection."""
    T, G = q.shape[1], keys.shape[2]
    n_heads = q.shape[2] // G
    if keys.stride(2) == 0:  # one key for all groups: load it once
        keys = keys[:, :, :1]
    if not rule.needs_lse(n_heads, l, d):
        # The probability of a block is the sum over its keys, so the log-sum-exps of the blocks replace the scores of the
        # keys. The probabilities of a single head have the same denominator, which is not needed.
        return compute_block_logsumexp(q, keys, lengths, n_blocks, d, l_sel, rule, n_heads)
    decoded = keys[..., :1].expand(*keys.shape[:3], q.shape[3])  # has the shape of keys that are not stored in fewer bits
    parts, scores = allocate_parts(q, decoded, None, None, 0, 0), _allocate_scores(q, keys)
    # The output is not used, so no values are read.
    launch_compressed(q, keys, None, lengths, scores, parts, l, d)
    selection = SelectionScores(scores, parts.sums, parts.cmp_parts, l, d)
    return compute_importance(T, G, selection, lengths, n_blocks, l_sel, rule)


def cached_dense_attention(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    """See `kernels.cached_dense_attention`. It is the compressed branch with one block per token."""
    parts = allocate_parts(q, v, None, None, 0, 0)
    launch_compressed(q, k, v, lengths, None, parts, 1, 1)
    return merge_parts(q, None, parts)


def rotate_and_append(
    q_and_k: Tensor, values: Tensor, cos: Tensor, sin: Tensor, lengths: Tensor, write_buffers: CacheWriteBuffers,
    k_before_conv: Tensor | None, conv_weight: Tensor | None, can_prefetch: bool,
) -> Tensor:
    """See `kernels.rotate_and_append`."""
    q_and_k = q_and_k if q_and_k.stride(3) == 1 else q_and_k.contiguous()
    values = values if values.stride(3) == 1 else values.contiguous()
    B, T, n_rows, Dk = q_and_k.shape
    first_branch, buffer = next((i // 2, x) for i, x in enumerate(write_buffers) if x is not None)
    G, n_keys = buffer.shape[2], buffer.shape[2] * sum(x is not None for x in write_buffers[::2])
    H, Dv = n_rows - n_keys, values.shape[3]
    q = buffer.new_empty(B, T, H, Dk)
    nsa_rope_kv_append[(B * T, H + 2 * n_keys)](
        q_and_k, values, cos, sin, lengths, q, *write_buffers, k_before_conv, conv_weight,
        *get_strides(q_and_k, values),
        *(stride for x in write_buffers for stride in _get_optional_strides(x)), *cos.stride(),
        T, 0 if write_buffers.k_sel is None else write_buffers.k_sel.shape[1], len(cos),
        *(0 if x is None else x.shape[1] for x in (write_buffers.k_raw, write_buffers.k_win, k_before_conv)), G,
        H=H, KEYS=n_keys, FIRST_BRANCH=first_branch, HALF=cos.shape[1], DK=Dk, DV=Dv,
        PAD=padded_width(max(Dk, Dv)),
        num_warps=decoding_table.APPEND_WARPS, **get_pdl_options(q.device, B * T, can_prefetch),
    )
    return q


def update_compressed(
    k_raw: Tensor, v_raw: Tensor | None, k: Tensor, v: Tensor | None,
    k_pool: PoolWeights | None, v_pool: PoolWeights | None,
    lengths: Tensor, T: int, l: int, d: int, can_prefetch: bool,
) -> None:
    """See `kernels.update_compressed`."""
    B, N, G, Dk = k.shape
    Dv = Dk if v is None else v.shape[3]
    (k_score, k_bias), (v_score, v_bias) = (pool or (None, None) for pool in (k_pool, v_pool))
    nsa_compress_update[(B * G, ceil_div(T, d), 1 if v is None else 2)](
        k_raw, v_raw, k, v, k_score, v_score, k_bias, v_bias, lengths,
        *get_strides(k_raw, k), *_get_optional_strides(v_raw), *_get_optional_strides(v),
        T, N, k_raw.shape[1], G,
        L=l, L_PAD=padded_width(l), STRIDE=d, DK=Dk, DV=Dv, PAD=padded_width(max(Dk, Dv)),
        num_warps=launch_table.STREAMING_WARPS, **get_pdl_options(k.device, B * T, can_prefetch),
    )


def append_index(
    qk: Tensor, rotary: tuple[Tensor, Tensor], lengths: Tensor, k_raw: Tensor, k: Tensor, l: int,
    k_before_conv: Tensor | None, conv_weight: Tensor | None, pool: PoolWeights | None, norm: tuple[Tensor, float] | None,
    rotates_tokens: bool, rotates_blocks: bool, is_norm_first: bool, can_prefetch: bool,
) -> Tensor:
    """See `kernels.append_index`."""
    qk = qk if qk.stride(3) == 1 else qk.contiguous()
    (B, T, n_rows, Dk), (raw_slots, G) = qk.shape, k_raw.shape[1:3]
    q, (score, bias), (norm_weight, eps) = k_raw.new_empty(B, T, n_rows - G, Dk), pool or (None, None), norm or (None, 0.0)
    k, key_format = get_format(k)
    # The new tokens are in at most this many blocks of l tokens.
    n_blocks = (T + l - 2) // l + 1
    nsa_index_append[(B, T * (n_rows - G) + n_blocks * G)](
        qk, q, k_raw, k, k_before_conv, conv_weight, score, bias, norm_weight, *rotary, lengths,
        *get_strides(qk, k_raw, k), *rotary[0].stride(),
        T, k.shape[1], len(rotary[0]), raw_slots, 0 if k_before_conv is None else k_before_conv.shape[1], G, eps,
        H=n_rows - G, L=l, L_PAD=padded_width(l), HALF=rotary[0].shape[1],
        ROTATE_TOKENS=rotates_tokens, ROTATE_BLOCKS=rotates_blocks, NORM_FIRST=norm is not None and is_norm_first,
        FORMAT=key_format, DK=Dk, PAD=padded_width(Dk),
        num_warps=decoding_table.APPEND_WARPS if l == 1 else launch_table.STREAMING_WARPS,
        **get_pdl_options(k.device, B * T, can_prefetch),
    )
    return q


def linear(
    x: Tensor, projections: Sequence[tuple[Tensor, str]], norm: tuple[Tensor, float] | None, residual: Tensor | None,
    is_gated: bool, can_prefetch: bool,
) -> list[Tensor]:
    """See `kernels.linear`."""
    n_rows, K = x.numel() // x.shape[-1], x.shape[-1]
    widths = [len(w) // 2 if is_gated else len(w) for w, _ in projections]
    out = [x.new_empty(*x.shape[:-1], width) for width in widths]
    unused = [None] * (MAX_PROJECTIONS - len(projections))
    activations = [linear_kernel.ACTIVATIONS[activation] for _, activation in projections]
    tile = decoding_table.linear_tile(x.dtype, n_rows, sum(widths), K, is_gated)
    nsa_linear[(sum(ceil_div(width, tile.columns) for width in widths), ceil_div(n_rows, tile.rows))](
        x, None if norm is None else norm[0], residual, *(w for w, _ in projections), *unused, *out, *unused,
        n_rows, 0.0 if norm is None else norm[1],
        *widths, *([0] * len(unused)), K, *activations, *([0] * len(unused)), is_gated,
        tile.rows, tile.columns, tile.chunk, tile.warps, num_warps=tile.warps, num_stages=tile.stages,
        **get_pdl_options(x.device, n_rows, can_prefetch),
    )
    return out


def embed_ngrams(
    tokens: Tensor, latest: Tensor, lengths: Tensor, embedding: Tensor, table: Tensor, out: Tensor, n_rows: int,
    hash_constants: tuple[int, int, int], norm_eps: float | None,
) -> Tensor:
    """See `kernels.embed_ngrams`."""
    B, T = tokens.shape
    dim, width = embedding.shape[1], table.shape[1]
    max_n = len(table) // n_rows + 1
    x, features = embedding.new_empty(B, T, dim), table.new_empty(B, T, (max_n - 1) * width)
    nsa_ngram_lookup[(B * T, max_n)](
        tokens.contiguous(), latest, lengths, embedding, table, x, features,
        T, latest.shape[1], n_rows,
        max_n, *hash_constants, dim, padded_width(dim), width, padded_width(width),
        num_warps=launch_table.STREAMING_WARPS, **get_pdl_options(x.device, B * T, False),
    )
    (x,) = linear(features, [(out, "")], None, x, is_gated=False, can_prefetch=False)
    if norm_eps is None:
        return x
    y = torch.empty_like(x)
    nsa_rms_norm[(B * T,)](
        x, y, norm_eps, dim, padded_width(dim), num_warps=launch_table.STREAMING_WARPS, **get_pdl_options(x.device, B * T)
    )
    return y


def _get_optional_strides(x: Tensor | None) -> tuple[int, ...]:
    return (0, 0, 0) if x is None else get_strides(x)


def _get_tile(q: Tensor, n_groups: int, width: int, n_queries: int) -> Tile:
    return decoding_table.decoding_tile(q.dtype, width, n_queries * (q.shape[2] // n_groups), q.device)


def _count_row_tiles(q: Tensor, n_groups: int, tile: Tile, n_queries: int) -> int:
    return ceil_div(n_queries * (q.shape[2] // n_groups), tile.rows)


def allocate_parts(
    q: Tensor, v_cmp: Tensor | None, v_sel: Tensor | None, v_win: Tensor | None, n_sel: int, w: int
) -> PartialOutputs:
    """Allocate the partial outputs of a decoding step; none for branches that do not exist."""
    B, T, H, _ = q.shape
    G, Dv = next(x for x in (v_cmp, v_sel, v_win) if x is not None).shape[2:]
    tile = _get_tile(q, G, max(q.shape[3], Dv), T)
    cmp_parts = win_parts = sel_parts = 0
    if v_cmp is not None:
        n_programs = B * G * _count_row_tiles(q, G, tile, T)
        cmp_parts = decoding_table.decoding_parts(n_programs, ceil_div(v_cmp.shape[1], tile.keys))
    if v_win is not None:
        win_parts = decoding_table.decoding_parts(B * G * T, ceil_div(w, tile.keys))
    if v_sel is not None:
        sel_parts = decoding_table.decoding_parts(B * G * T, n_sel)
    out = q.new_empty(B, T, H, cmp_parts + win_parts + sel_parts, Dv, dtype=torch.float32)
    return PartialOutputs(out, out.new_empty(*out.shape[:4], 2), cmp_parts, win_parts, sel_parts)


def _allocate_scores(q: Tensor, keys: Tensor) -> Tensor:
    """Allocate the scores of every query and head for every key that fits in the cache."""
    return q.new_empty(*q.shape[:3], keys.shape[1], dtype=torch.float32)


def launch_compressed(
    q: Tensor, k: Tensor, v: Tensor | None, lengths: Tensor, scores: Tensor | None, parts: PartialOutputs, l: int, d: int
) -> None:
    """Fill `scores` and the parts of the compressed branch. Without values, the keys take their place."""
    B, T, H, Dk = q.shape
    (N, G), Dv = k.shape[1:3], parts.out.shape[4]
    tile = _get_tile(q, G, max(Dk, Dv), T)
    row_tiles = _count_row_tiles(q, G, tile, T)
    k, key_format = get_load_format(k)
    nsa_compressed_decode[(B * G * row_tiles * parts.cmp_parts,)](
        q, k, v, lengths, scores, parts.out, parts.sums,
        *get_strides(q, k), *_get_optional_strides(v),
        T, N, B, G, row_tiles, Dk**-0.5 * LOG2E,
        HEADS=H // G, L=l, STRIDE=d, CMP_PARTS=parts.cmp_parts, PARTS=parts.sums.shape[3],
        DK=Dk, DV=Dv, DK_PAD=padded_width(Dk), DV_PAD=padded_width(Dv),
        ROWS=tile.rows, KEYS=tile.keys, FORMAT=key_format, **tile.compile_options(), **get_pdl_options(q.device, B * T),
    )


def compute_importance(
    T: int, G: int, selection: SelectionScores, lengths: Tensor, n_blocks: int, l_sel: int, rule: SelectionRule
) -> Tensor:
    """Return the importance of `n_blocks` blocks by the scores of compressed keys, float32 [B, T, G, n_blocks]."""
    B, _, H, N = selection.scores.shape
    heads_pad, importance = padded_width(H // G), selection.scores.new_empty(B, T, G, n_blocks)
    strides_pad = padded_width(l_sel // selection.d)
    blocks_per_program = decoding_table.importance_blocks(heads_pad * strides_pad)
    nsa_block_importance[(B * T * G, ceil_div(n_blocks, blocks_per_program))](
        selection.scores, selection.sums, lengths, importance,
        T, N, G, n_blocks, selection.sums.shape[3],
        HEADS=H // G, HEADS_PAD=heads_pad, L=selection.l, STRIDE=selection.d, L_SEL=l_sel, N_SEL=rule.n_sel,
        LOCAL=rule.local_blocks, HEAD_MAX=rule.head_max, BLOCK_MAX=rule.block_max,
        PARTS=selection.n_parts, PARTS_PAD=padded_width(selection.n_parts), BLOCKS=blocks_per_program,
        STRIDES_PAD=strides_pad, num_warps=launch_table.STREAMING_WARPS, **get_pdl_options(lengths.device, B * T),
    )
    return importance


def compute_block_logsumexp(
    q: Tensor, keys: Tensor, lengths: Tensor, n_blocks: int, d: int, l_sel: int, rule: SelectionRule, n_heads: int,
) -> Tensor:
    """Return the indexer scores of `n_blocks` blocks, float32 [B, T, H, n_blocks].

    q [B, T, H, D] has `n_heads` heads per group; keys [B, N, G or 1, .] cover d tokens each. With one head per group, the
    forced local blocks have no scores.
    """
    B, T, H, Dk = q.shape
    G = keys.shape[2]
    rows = decoding_table.index_rows(T * (H // G))
    row_tiles = ceil_div(T * (H // G), rows)
    tile = decoding_table.index_tile(q.dtype, Dk, B * G * row_tiles, n_blocks, l_sel // d)
    logsumexp = q.new_empty(B, T, H, n_blocks, dtype=torch.float32)
    keys, key_format = get_load_format(keys)
    chunk = get_mxfp4_chunk(Dk)
    nsa_block_logsumexp[(B * G * row_tiles * ceil_div(n_blocks, tile.blocks),)](
        q, keys, lengths, logsumexp,
        *get_strides(q), keys.stride(0), keys.stride(2),
        T, keys.shape[1], B, G, row_tiles, n_blocks, Dk**-0.5 * LOG2E,
        STRIDE_KN=keys.stride(1), STRIDE=d, L_SEL=l_sel, N_SEL=rule.n_sel, LOCAL=rule.local_blocks if n_heads == 1 else 0,
        BLOCK_MAX=rule.block_max, STRIDES=l_sel // d, HEADS=H // G, DK=Dk, DK_PAD=padded_width(Dk), FORMAT=key_format,
        CHUNK=chunk, CHUNK_PAD=max(padded_width(chunk), 16), ROW_BYTES=math.gcd(16, *get_strides(keys)),
        ROWS=rows, BLOCKS=tile.blocks, BLOCKS_AT_ONCE=tile.blocks_at_once, STRIDES_AT_ONCE=tile.strides,
        num_warps=tile.warps, num_stages=tile.stages, **get_pdl_options(q.device, B * T),
    )
    return logsumexp


def launch_selected_and_window(
    q: Tensor, k_sel: Tensor | None, v_sel: Tensor | None, k_win: Tensor | None, v_win: Tensor | None,
    given_blocks: Tensor | None, scores: Tensor | None, lengths: Tensor, parts: PartialOutputs, l_sel: int, w: int,
    rule: SelectionRule,
) -> Tensor | None:
    """Fill the parts of the selected branch and of the window, or of the one that exists. Return the blocks selected here.

    `scores`: float32 [B, T, G, blocks] of all blocks, or of several heads per group [B, T, G * heads, blocks]: log-sum-exps
    in units of log2. None: all blocks can be selected, or `given_blocks` are.
    """
    B, T, H, Dk = q.shape
    # The kernel reads nothing of a branch without parts.
    k, v = (k_win, v_win) if k_sel is None or v_sel is None else (k_sel, v_sel)
    assert k is not None and v is not None
    k_win, v_win = (k, v) if k_win is None or v_win is None else (k_win, v_win)
    N, G, Dv = v.shape[1:]
    blocks = None
    if k_sel is not None and given_blocks is None:
        blocks = torch.empty(B, T, G, rule.n_sel, dtype=torch.int32, device=q.device)
    n_sel = rule.n_sel if given_blocks is None else given_blocks.shape[3]
    n_blocks, score_heads = (0, 1) if scores is None else (scores.shape[3], scores.shape[2] // G)
    tile = _get_tile(q, G, max(Dk, Dv), 1)
    row_tiles = _count_row_tiles(q, G, tile, 1)
    nsa_selected_and_window[(B * G * T * row_tiles * (parts.win_parts + parts.sel_parts),)](
        q, k, v, k_win, v_win, given_blocks, scores, lengths, blocks, parts.out, parts.sums,
        *get_strides(q, k, v, k_win, v_win),
        T, N, k_win.shape[1], B, G, row_tiles, n_blocks, Dk**-0.5 * LOG2E,
        HEADS=H // G, L_SEL=l_sel, N_SEL=n_sel, N_SEL_PAD=padded_width(n_sel), W=w,
        SINK=rule.sink_blocks, LOCAL=rule.local_blocks, SCORE_HEADS=score_heads, SCORE_HEADS_PAD=padded_width(score_heads),
        BLOCKS=decoding_table.topk_blocks(n_blocks), FIRST_PART=parts.cmp_parts, WIN_PARTS=parts.win_parts,
        SEL_PARTS=parts.sel_parts, PARTS=parts.sums.shape[3],
        DK=Dk, DV=Dv, DK_PAD=padded_width(Dk), DV_PAD=padded_width(Dv),
        ROWS=tile.rows, KEYS=min(tile.keys, padded_width(l_sel)),
        **tile.compile_options(), **get_pdl_options(q.device, B * T),
    )
    return blocks


def merge_parts(q: Tensor, gates: Tensor | None, parts: PartialOutputs) -> Tensor:
    """Merge the partial outputs of all branches and apply the gates, if there are any; the result has the dtype of q."""
    B, T, H, n_parts, Dv = parts.out.shape
    out = q.new_empty(B, T, H, Dv)
    columns = min(decoding_table.MERGE_ELEMENTS // padded_width(n_parts), padded_width(Dv))
    nsa_gate_merge[(B * T * H, ceil_div(Dv, columns))](
        parts.out, parts.sums, gates, out,
        T, H, *((0, 0, 0, 0) if gates is None else gates.stride()),
        CMP_PARTS=parts.cmp_parts, WIN_PARTS=parts.win_parts, PARTS=n_parts, PARTS_PAD=padded_width(n_parts),
        DV=Dv, COLUMNS=columns, num_warps=decoding_table.MERGE_WARPS, **get_pdl_options(q.device, B * T),
    )
    return out
# fmt: on
