"""The `triton` backend: its limits and its functions. Kernels are imported at first use, because triton is optional.

    kernel_names      glossary of all names in this folder, and the names of kernels in a profile
    nsa_operator      all of NSA as one operator;  gating: the gated sum
    block_topk        block selection;  block_scores: scores of blocks for an indexer;  block_mass: its selection loss
    decoding/         all of NSA for a few new tokens over a cache
    band/             the compressed branch and the window branch;  selected/: the selected branch
    packed_tiles      packed documents: finds the document of a program, and its rows
    launch_table      tile sizes and compile options of each kernel
    tiles             device functions that several kernels share;  launch_utils: host functions that launchers share
    fast_launch       launches kernels with less host time;  parallel_compile: compiles several kernels at once

The public functions (attention/dispatch.py) check shapes. The functions here raise NotImplementedError for shapes that the
kernels do not support.

Causality is exact to the bit for finite keys and values, however large. Non-finite values are an exception: a tile of
values is multiplied by the probabilities of all its queries, and 0 * NaN is NaN, so a NaN can reach earlier queries of its
tile. `reference` and `torch` mask such values; here this would cost another pass over them. Block selection stays causal
even with non-finite keys.
"""

from __future__ import annotations

import importlib.util
import math
import os

import torch
from torch import Tensor

from nsa_lab.attention.layer_cache import CacheWriteBuffers, LayerCache, PoolWeights
from nsa_lab.attention.layout import Layout, Span
from nsa_lab.config import NSAConfig

WIDTH_STEP, WIDTH_LIMIT = 16, 256
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
L_SEL_STEP = 16  # keys in the smallest tensor-core tile; a kv block is a whole number of them
N_SEL_LIMIT = 64
STRIDES_LIMIT = 16  # strides per selection block; a compressed block may span four times this number


def find_device_problem(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why the kernels cannot run on this device with this dtype, and the remedy; None if they can.

    On a CPU they run under Triton's interpreter, which the environment variable TRITON_INTERPRET=1 enables.
    """
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed; pip install triton (it comes with the CUDA build of torch)"
    if device.type not in ("cpu", "cuda"):
        return f"the kernels need a CUDA device; got {device.type}"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        return f"the kernels need compute capability 8.0 or higher; {torch.cuda.get_device_name(device)} has less"
    if device.type == "cpu" and (problem := _find_interpreter_problem()):
        return problem
    if device.type == "cpu" and dtype == torch.bfloat16:
        return "Triton's interpreter, which runs the kernels on a cpu, multiplies bfloat16 wrongly; use float32 or float16"
    if dtype not in DTYPES:
        return f"the kernels support bfloat16, float16 and float32; got {dtype}"
    return None


def find_decoding_problem() -> str | None:
    """Return why the installed Triton cannot compile the decoding kernels, and the remedy; None if it can."""
    import triton

    if _get_triton_version() < (3, 3):
        return (
            f"the decoding kernels need Triton 3.3 or newer, which comes with torch 2.7; the compiler of "
            f"{triton.__version__} aborts on them"
        )
    return None


def _get_triton_version() -> tuple[int, ...]:
    import triton

    return tuple(int(part) for part in triton.__version__.split(".")[:2])


def _find_interpreter_problem() -> str | None:
    if os.environ.get("TRITON_INTERPRET") != "1":
        return "the device is cpu, where the kernels run only under Triton's interpreter: set TRITON_INTERPRET=1"
    from nsa_lab.attention.kernels import tiles

    if not tiles.IS_INTERPRETED:
        return "TRITON_INTERPRET=1 was set after Triton was imported, which reads it once; set it before Python starts"
    return None


def find_shape_problem(
    nsa: NSAConfig, d_k: int | None = None, d_v: int | None = None, indexer_width: int | None = None
) -> str | None:
    """Return which limit this geometry or these head widths exceed, and the nearest valid value; None if all are supported.

    Widths of None are not checked: the width is unknown, or there is no indexer. `find_scoring_problem` checks
    the geometry of the keys that select blocks, if the compressed branch does not.
    """
    width_problem = find_width_problem(d_k, d_v, indexer_width)
    return width_problem or _find_l_sel_problem(nsa) or _find_n_sel_problem(nsa)


def find_width_problem(d_k: int | None, d_v: int | None, indexer_width: int | None = None) -> str | None:
    """Like `find_shape_problem`, for head widths only."""
    for name, width in (("d_k", d_k), ("d_v", d_v), ("indexer_width", indexer_width)):
        if width is not None and (width % WIDTH_STEP or width > WIDTH_LIMIT):
            nearest = min(max(1, (2 * width + WIDTH_STEP) // (2 * WIDTH_STEP)) * WIDTH_STEP, WIDTH_LIMIT)
            return (
                f"the kernels take head widths in multiples of {WIDTH_STEP} up to {WIDTH_LIMIT}; got {name} = {width}; "
                f"the nearest is {nearest}"
            )
    return None


def _find_l_sel_problem(nsa: NSAConfig) -> str | None:
    if nsa.l_sel % L_SEL_STEP == 0:
        return None
    step = math.lcm(L_SEL_STEP, nsa.d)
    nearest = max(1, (2 * nsa.l_sel + step) // (2 * step)) * step
    return (
        f"the kernels take nsa.l_sel in multiples of {L_SEL_STEP}; got {nsa.l_sel}; the nearest that "
        f"nsa.d = {nsa.d} divides is {nearest}"
    )


def _find_n_sel_problem(nsa: NSAConfig) -> str | None:
    if nsa.n_sel > N_SEL_LIMIT:
        return f"the kernels take at most nsa.n_sel = {N_SEL_LIMIT} blocks per query; got {nsa.n_sel}"
    return None


def find_scoring_problem(nsa: NSAConfig) -> str | None:
    """Like `find_shape_problem`, for the geometry of the keys whose scores select the blocks."""
    if problem := _find_n_sel_problem(nsa):
        return problem
    if nsa.l == nsa.d:  # non-overlapping blocks: any number of them per selection block
        return None
    if nsa.block_reduction == "max":
        return (
            f"the kernels take the maximum over a block (nsa.block_reduction = max) only of keys that do not overlap; got "
            f"l = {nsa.l} and d = {nsa.d}; the nearest is l = {nsa.d}"
        )
    for name, length, limit in (("l_sel", nsa.l_sel, STRIDES_LIMIT), ("l", nsa.l, 4 * STRIDES_LIMIT)):
        if length // nsa.d > limit:
            return (
                f"the kernels take nsa.{name} up to {limit} times nsa.d = {nsa.d}; got {length}; the nearest is "
                f"{limit * nsa.d}"
            )
    return None


def _raise_unsupported(function: str, reason: str | None) -> None:
    if reason:
        raise NotImplementedError(f"{function}, backend = 'triton': {reason}; or use backend = 'torch'")


def _get_layout_args(span: Span | None, layout: Layout | None, nsa: NSAConfig, q: Tensor) -> tuple[Tensor | None, int, int]:
    """Return (bounds, longest document, position of the first query); (None, 0, position) if the span is not packed."""
    if layout is None and span is not None and span.kind == "packed":
        layout = span.layout(nsa, q.device)
    if layout is None:
        return None, 0, 0 if span is None else span.start
    return layout.bounds, layout.max_seqlen, 0


# Each function raises NotImplementedError if its kernels do not support a shape. The caller has checked that shapes match.
def compressed_attention(
    q: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor,
    nsa: NSAConfig,
    *,
    span: Span | None = None,
    layout: Layout | None = None,
) -> tuple[Tensor, Tensor]:
    """See `reference.compressed_attention`."""
    from nsa_lab.attention.kernels.band import launch

    _raise_unsupported("compressed_attention", find_width_problem(q.shape[3], v_cmp.shape[3]))
    return launch.band_attention(q, k_cmp, v_cmp, nsa.l, nsa.d, 0, *_get_layout_args(span, layout, nsa, q))


def select_blocks(
    q: Tensor,
    k_cmp: Tensor,
    lse: Tensor | None,
    nsa: NSAConfig,
    *,
    span: Span | None = None,
    layout: Layout | None = None,
) -> Tensor:
    """See `reference.select_blocks`."""
    from nsa_lab.attention.kernels import block_topk

    rule = block_topk.SelectionRule.from_config(nsa)
    if lse is None and rule.needs_lse(q.shape[2] // k_cmp.shape[2], nsa.l, nsa.d):
        _, lse = compressed_attention(q, k_cmp, k_cmp, nsa, span=span, layout=layout)
    _raise_unsupported("select_blocks", find_width_problem(q.shape[3], None) or find_scoring_problem(nsa))
    return block_topk.select_blocks(q, k_cmp, lse, nsa.l, nsa.d, nsa.l_sel, rule, *_get_layout_args(span, layout, nsa, q))


def selected_attention(
    q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, nsa: NSAConfig, *, span: Span | None = None
) -> tuple[Tensor, Tensor]:
    """See `reference.selected_attention`."""
    from nsa_lab.attention.kernels.selected import launch

    _raise_unsupported("selected_attention", find_width_problem(q.shape[3], v.shape[3]) or _find_l_sel_problem(nsa))
    return launch.selected_attention(q, k, v, blocks, nsa.l_sel, *_get_layout_args(span, None, nsa, q))


def window_attention(q: Tensor, k: Tensor, v: Tensor, nsa: NSAConfig, *, span: Span | None = None) -> tuple[Tensor, Tensor]:
    """See `reference.window_attention`."""
    from nsa_lab.attention.kernels.band import launch

    _raise_unsupported("window_attention", find_width_problem(q.shape[3], v.shape[3]))
    return launch.band_attention(q, k, v, 1, 1, nsa.w, *_get_layout_args(span, None, nsa, q))


def combine(*outs_and_gates: Tensor) -> Tensor:
    """See `reference.combine`. Supports any head width."""
    from nsa_lab.attention.kernels import gating

    return gating.gated_sum(*outs_and_gates)


# fmt: off
def nsa_attention(
    q: Tensor, k_cmp: Tensor | None, v_cmp: Tensor | None, k_sel: Tensor | None, v_sel: Tensor | None,
    k_win: Tensor | None, v_win: Tensor | None, gates: Tensor | None,
    nsa: NSAConfig, *, blocks: Tensor | None = None, span: Span | None = None, layout: Layout | None = None,
) -> Tensor:
    """See `dispatch.nsa_attention`. All parts run on Triton kernels."""
    from nsa_lab.attention.kernels import nsa_operator

    v = next(x for x in (v_cmp, v_sel, v_win) if x is not None)
    scoring_problem = find_scoring_problem(nsa) if k_sel is not None and blocks is None else None
    _raise_unsupported("nsa_attention", find_shape_problem(nsa, q.shape[3], v.shape[3]) or scoring_problem)
    return nsa_operator.nsa_attention(
        q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates, nsa, blocks, *_get_layout_args(span, layout, nsa, q)
    )


def cached_attention(
    q: Tensor, gates: Tensor | None, cache: LayerCache, lengths: Tensor, nsa: NSAConfig, *,
    index_q: Tensor | None = None, selection_nsa: NSAConfig | None = None, blocks: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """See `attention.cached_attention.attend_and_select`. Not differentiable.

    There is no host synchronization, and the launches depend only on shapes. The call can be captured in a CUDA graph, and
    `lengths` can be changed in place between replays. Intended for a few new tokens: a workspace holds the scores of all
    compressed keys that fit in the cache, float32 [B, S, H, N_max].
    """
    from nsa_lab.attention.kernels.block_topk import SelectionRule
    from nsa_lab.attention.kernels.decoding import launch

    d_v = next(x.shape[3] for x in (cache.v_cmp, cache.v_sel, cache.v_win) if x is not None)
    scoring_problem = find_scoring_problem(selection_nsa or nsa) if cache.k_sel is not None and blocks is None else None
    _raise_unsupported(
        "cached_attention", find_decoding_problem() or find_shape_problem(nsa, q.shape[3], d_v) or scoring_problem
    )
    if index_q is not None:
        _raise_unsupported("cached_attention, index_q", find_width_problem(None, None, index_q.shape[3]))
    for name, x in cache._asdict().items():
        if x is not None and x.stride(3) != 1:  # a copy would cost more than the step
            raise ValueError(f"{name}: expected a cache whose last axis is contiguous; got strides {x.stride()}")
    *branches, k_index = cache
    sizes, geometry = (nsa.l, nsa.d, nsa.l_sel, nsa.w), selection_nsa or nsa
    with torch.no_grad():
        out, selected = launch.cached_branches(
            q, gates, lengths, *branches, *sizes, *SelectionRule.from_config(nsa), index_q, k_index, geometry.l, geometry.d,
            blocks,
        )
    if cache.k_sel is None:
        return out, None
    return out, selected if blocks is None else blocks


def cached_dense_attention(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    """See `attention.cached_attention.cached_dense_attention`. There is no host synchronization."""
    from nsa_lab.attention.kernels.decoding import launch

    _raise_unsupported("cached_dense_attention", find_decoding_problem() or find_width_problem(q.shape[3], v.shape[3]))
    with torch.no_grad():
        return launch.cached_dense_attention(q if q.stride(3) == 1 else q.contiguous(), k, v, lengths)


def rotate_and_append(
    q_and_k: Tensor, values: Tensor, rotary: tuple[Tensor, Tensor], lengths: Tensor, write_buffers: CacheWriteBuffers, *,
    k_before_conv: Tensor | None = None, conv_weight: Tensor | None = None, can_prefetch: bool = False,
) -> Tensor:
    """Apply RoPE to S new tokens of each sequence, write keys and values to the cache, and return the rotated queries.

    One kernel launch. Returns [B, S, H, d_k] in the dtype of `write_buffers`. Not differentiable.

    Args:
        q_and_k: [B, S, H + branches G, d_k], queries, then keys of every branch that has a buffer in `write_buffers`, in
            the order cmp, sel, win.
        values: [B, S, branches G, d_v], values of the same branches.
        rotary: cos and sin of the leading channels at every position, see `model.layers.rotary_table`; float32
            [positions, .], both with the same strides.
        lengths: number of tokens before the new ones, see `cached_attention`.
        write_buffers: cache tensors to write to. Every ring has at least S slots. Tokens past the last row of `k_sel` are
            not written there.
        k_before_conv: ring [B, R, branches G, d_k] of keys before the convolution, R > S; contiguous. If given, keys are
            convolved before they are rotated: conv_weight[0] * own key + conv_weight[1] * key of the previous token.
        conv_weight: [2, branches G, d_k], contiguous.
        can_prefetch: True if the previous launch wrote neither `lengths` nor `rotary`, so that this kernel may load them
            before the previous kernel ends.

    Raises:
        NotImplementedError: the kernels do not support a head width.
    """
    from nsa_lab.attention.kernels.decoding import launch

    _raise_unsupported("rotate_and_append", find_width_problem(q_and_k.shape[3], values.shape[3]))
    with torch.no_grad():
        return launch.rotate_and_append(
            q_and_k, values, *rotary, lengths, write_buffers, k_before_conv, conv_weight, can_prefetch
        )


def update_compressed(
    k_raw: Tensor, v_raw: Tensor | None, k: Tensor, v: Tensor | None, lengths: Tensor, S: int, nsa: NSAConfig, *,
    k_pool: PoolWeights | None = None, v_pool: PoolWeights | None = None, can_prefetch: bool = False,
) -> None:
    """Compress the blocks that S new tokens complete into k and v. The tokens are already in the rings k_raw and v_raw.

    Rings are [B, R, G, .], blocks [B, N, G, .]; v_raw and v are None if only keys are cached. See `cached_attention` for
    `lengths`. phi is avg, or pool if `k_pool` and `v_pool` are given. Blocks past the last row are not written.
    `can_prefetch`: True if the previous launch did not write `lengths`, so that this kernel may load them before the
    previous kernel ends.
    """
    from nsa_lab.attention.kernels.decoding import launch

    with torch.no_grad():
        launch.update_compressed(k_raw, v_raw, k, v, k_pool, v_pool, lengths, S, nsa.l, nsa.d, can_prefetch)


def append_index(
    qk: Tensor, rotary: tuple[Tensor, Tensor], lengths: Tensor, k_raw: Tensor, k: Tensor, nsa: NSAConfig, *,
    k_before_conv: Tensor | None = None, conv_weight: Tensor | None = None, pool: PoolWeights | None = None,
    norm: tuple[Tensor, float] | None = None, rotates_tokens: bool = False, rotates_blocks: bool = False,
    is_norm_first: bool = False, can_prefetch: bool = False,
) -> Tensor:
    """Append S new tokens of each sequence to the index, and return their rotated index queries [B, S, H, D].

    One kernel launch. Keys of blocks of nsa.l = nsa.d tokens that the new tokens complete are written to k [B, N, G, .], in
    a format of `key_storage`. Blocks past the last row are not written. Not differentiable.

    Args:
        qk: [B, S, H + G, D], queries, then keys.
        rotary, lengths, conv_weight, can_prefetch, k_before_conv: see `rotate_and_append`.
        k_raw: ring [B, R, G, D] of tokens of incomplete blocks, R >= nsa.l - 1 + S; the new tokens are written to it.
        pool: weights of the mean of the tokens of a block; None: equal weights.
        norm: (weight [D], epsilon) of the RMSNorm of pooled keys; None: no norm.
        rotates_tokens, rotates_blocks: rotate keys before pooling, or pooled keys to the position of their first token.
        is_norm_first: normalize before the rotation of pooled keys.
    """
    from nsa_lab.attention.kernels.decoding import launch

    _raise_unsupported("append_index", find_width_problem(None, None, qk.shape[3]))
    with torch.no_grad():
        return launch.append_index(
            qk, rotary, lengths, k_raw, k, nsa.l, k_before_conv, conv_weight, pool, norm, rotates_tokens, rotates_blocks,
            is_norm_first, can_prefetch,
        )


def embed_ngrams(
    tokens: Tensor, latest: Tensor, lengths: Tensor, embedding: Tensor, table: Tensor, out: Tensor, n_rows: int,
    hash_constants: tuple[int, int, int], norm_eps: float | None,
) -> Tensor:
    """Return the sum of the embeddings of S new tokens of each sequence and of the n-grams that end with them, [B, S, C].

    Three kernel launches, for few rows (`has_few_rows`). Not differentiable.

    Args:
        tokens: int64 [B, S].
        latest: int64 [B, R], ring of the latest tokens, R >= S + n - 1; the new tokens are written to it.
        lengths: number of tokens before the new ones, see `cached_attention`.
        embedding: [V, C], weight of the token embedding.
        table, out: weights of `NgramEmbedding`, [(n - 1) n_rows, width] and [C, (n - 1) width].
        n_rows: rows of the table per n-gram length.
        hash_constants: base, multiplier and shift of the hash of `NgramEmbedding`.
        norm_eps: epsilon of the RMSNorm of the sum; None: no norm.
    """
    from nsa_lab.attention.kernels.decoding import launch

    with torch.no_grad():
        return launch.embed_ngrams(tokens, latest, lengths, embedding, table, out, n_rows, hash_constants, norm_eps)


def has_few_rows(x: Tensor) -> bool:
    """Return True if x [..., C] has few enough rows that `linear` is faster than a matrix product of PyTorch.

    More than a few rows are multiplied in several parts at once, on which the compiler of Triton 3.2 aborts. Versions
    before 3.6 were not tested.
    """
    from nsa_lab.attention.kernels.decoding import decoding_table

    can_split = _get_triton_version() >= (3, 6)
    limit = decoding_table.MAX_LINEAR_ROWS if can_split else decoding_table.MAX_NARROW_ROWS
    return x.numel() // x.shape[-1] <= limit


def linear(
    x: Tensor, *projections: tuple[Tensor, str], norm: tuple[Tensor, float] | None = None, residual: Tensor | None = None,
    is_gated: bool = False, can_prefetch: bool = False,
) -> list[Tensor]:
    """Return [residual + activation(n(x) @ weight.T), ...] for up to three projections (weight [N, C], activation).

    x is [..., C], contiguous. One kernel launch; sums are float32. Not differentiable.

    Args:
        projections: pairs of a weight and an activation: "" (identity), "silu" or "sigmoid".
        norm: (weight [C], epsilon) of an RMSNorm of x; None: no norm.
        residual: [..., N]; only with a single projection.
        is_gated: the weight of the single projection has 2 N rows, and the result is activation(first half) * second half
            (GLU variants, arXiv 2002.05202).
        can_prefetch: True if the previous launch wrote neither weights nor the residual, so that this kernel may load them
            before the previous kernel ends.
    """
    from nsa_lab.attention.kernels.decoding import launch

    with torch.no_grad():
        return launch.linear(x, projections, norm, residual, is_gated, can_prefetch)
# fmt: on
