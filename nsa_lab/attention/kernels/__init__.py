"""The `triton` backend: what it takes, and its functions, whose kernels are imported when first used: triton is optional.

    vocabulary     the words that all of it uses, and the names that its kernels have in a profile
    operator       all of NSA as one operator;  gating: the gated sum;  choice: the block choice
    decoding/      all of NSA for a few new tokens, through a cache
    band/          the compressed and the window branch;  selected/: the selected branch
    documents      several documents in one row: which of them a program works on, and where its rows begin
    launch_table   tile sizes and how each kernel is compiled;  tiles, host: what kernels, or launchers, do alike
    launching      how a kernel is launched;  ahead: several compiled at once

Shapes are checked by the public functions (attention/dispatch.py); what the kernels do not take is refused here.

Causality holds to the bit for every finite key and value, the largest included. One that is not finite can reach earlier
queries: a tile of values is multiplied with the probabilities of all its queries, and zero times NaN is NaN. Taking such
values out, as `reference` and `torch` do, would cost a pass over them. A choice of blocks that they reach stays causal.
"""

from __future__ import annotations

import importlib.util
import math
import os
from typing import NamedTuple

import torch
from torch import Tensor

from nsa_lab.attention.layer_cache import CacheWriteBuffers, LayerCache, PoolWeights
from nsa_lab.attention.layout import Span
from nsa_lab.config import NSAConfig

WIDTH_STEP, WIDTH_LIMIT = 16, 256
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
L_SEL_STEP = 16  # keys in the smallest tile that a tensor core takes; a kv block fills whole ones
N_SEL_LIMIT = 64
STRIDES_LIMIT = 16  # strides per selection block; a compressed block may reach over four times as many


def find_device_problem(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the kernels cannot run on this device at this dtype, with the remedy; None if they can.

    On a CPU they run under Triton's interpreter, which its own variable TRITON_INTERPRET=1 turns on.
    """
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed; pip install triton (it comes with the CUDA build of torch)"
    if device.type not in ("cpu", "cuda"):
        return f"the kernels need a CUDA device, and this is {device.type}"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        return f"the kernels need compute capability 8.0 or higher, and {torch.cuda.get_device_name(device)} has less"
    if device.type == "cpu" and (why_not := _find_interpreter_problem()):
        return why_not
    if device.type == "cpu" and dtype == torch.bfloat16:
        return "Triton's interpreter, which runs the kernels on a cpu, multiplies bfloat16 wrongly; use float32 or float16"
    if dtype not in DTYPES:
        return f"the kernels compute in bfloat16, float16 or float32, not {dtype}"
    return None


def find_decoding_problem() -> str | None:
    """Why the Triton that is here cannot compile the kernels of decoding, with the remedy; None if it can."""
    import triton

    if tuple(int(part) for part in triton.__version__.split(".")[:2]) < (3, 3):
        return (
            f"decoding's kernels need Triton 3.3 or newer, which comes with torch 2.7, and the compiler of "
            f"{triton.__version__} aborts over them"
        )
    return None


def _find_interpreter_problem() -> str | None:
    if os.environ.get("TRITON_INTERPRET") != "1":
        return "the device is cpu, where the kernels run only under Triton's interpreter: TRITON_INTERPRET=1"
    from nsa_lab.attention.kernels import tiles

    if not tiles.IS_INTERPRETED:
        return "TRITON_INTERPRET=1 came after Triton was imported, which reads it once; set it before Python starts"
    return None


def find_shape_problem(
    nsa: NSAConfig, d_k: int | None = None, d_v: int | None = None, indexer_width: int | None = None
) -> str | None:
    """Why the kernels do not take this geometry or these head widths, and the nearest that they take; None if they do.

    A width of None is not known yet and not judged, or that of an indexer that is not there.
    """
    return find_width_problem(d_k, d_v, indexer_width) or _find_l_sel_problem(nsa) or _find_selection_problem(nsa)


def find_width_problem(d_k: int | None, d_v: int | None, indexer_width: int | None = None) -> str | None:
    """As `unsupported`, of head widths alone."""
    for name, width in (("d_k", d_k), ("d_v", d_v), ("indexer_width", indexer_width)):
        if width is not None and (width % WIDTH_STEP or width > WIDTH_LIMIT):
            nearest = min(max(1, (2 * width + WIDTH_STEP) // (2 * WIDTH_STEP)) * WIDTH_STEP, WIDTH_LIMIT)
            return (
                f"the kernels take head widths in multiples of {WIDTH_STEP} up to {WIDTH_LIMIT}, and {name} = {width}; "
                f"the nearest is {nearest}"
            )
    return None


def _find_l_sel_problem(nsa: NSAConfig) -> str | None:
    if nsa.l_sel % L_SEL_STEP == 0:
        return None
    step = math.lcm(L_SEL_STEP, nsa.d)
    nearest = max(1, (2 * nsa.l_sel + step) // (2 * step)) * step
    return (
        f"the kernels take nsa.l_sel in multiples of {L_SEL_STEP}, and it is {nsa.l_sel}; the nearest that nsa.d = {nsa.d} "
        f"divides is {nearest}"
    )


def _find_selection_problem(nsa: NSAConfig, *, with_lse: bool = True) -> str | None:
    if nsa.n_sel > N_SEL_LIMIT:
        return f"the kernels keep at most nsa.n_sel = {N_SEL_LIMIT} blocks per query, and it is {nsa.n_sel}"
    if not with_lse:  # one head per group, of blocks side by side: any number of them per selection block
        return None
    for name, length, limit in (("l_sel", nsa.l_sel, STRIDES_LIMIT), ("l", nsa.l, 4 * STRIDES_LIMIT)):
        if length // nsa.d > limit:
            return (
                f"the kernels take nsa.{name} up to {limit} times nsa.d = {nsa.d}, and it is {length}; the nearest is "
                f"{limit * nsa.d}"
            )
    return None


def _find_indexer_problem(index_q: Tensor, k_sel: Tensor, nsa: NSAConfig) -> str | None:
    if index_q.shape[2] != k_sel.shape[2] or nsa.l != nsa.d:
        return (
            f"one query per group chooses, by keys of tokens side by side; got {index_q.shape[2]} queries for "
            f"{k_sel.shape[2]} groups, l = {nsa.l}, d = {nsa.d}"
        )
    return find_width_problem(None, None, index_q.shape[3])


def _raise_unsupported(function: str, reason: str | None) -> None:
    if reason:
        raise NotImplementedError(f"{function}, backend = 'triton': {reason}; backend = 'torch' takes it as it is")


class DocumentTable(NamedTuple):
    """All that the kernels ask of packed documents and one geometry. Where a `span` is asked for here it is taken in its
    place: traced, a table is the same whatever documents it holds."""

    row_bounds: Tensor
    """`Span.row_bounds`"""
    longest: int
    """Tokens that no document exceeds."""


def make_document_table(span: Span, nsa: NSAConfig, device: torch.device) -> DocumentTable:
    """Of `Span.packed`."""
    # A power of two, so that few lengths are compiled for.
    longest = min(1 << (span.longest_allocated - 1).bit_length(), span.n_queries)
    return DocumentTable(span.row_bounds(nsa, device), longest)


def _get_layout_args(span: Span | DocumentTable | None, nsa: NSAConfig, q: Tensor) -> tuple[Tensor | None, int, int]:
    """Where a span's documents begin, how long they are at most, and the position of the first query; else None and 0."""
    if isinstance(span, DocumentTable):
        return span.row_bounds, span.longest, 0
    if span is None or span.kind != "packed":
        return None, 0, 0 if span is None else span.start
    table = make_document_table(span, nsa, q.device)
    return table.row_bounds, table.longest, 0


# Each raises NotImplementedError past the limits of its own kernels. The caller has checked that shapes fit together.
def compressed_attention(
    q: Tensor, k_cmp: Tensor, v_cmp: Tensor, nsa: NSAConfig, *, span: Span | DocumentTable | None = None
) -> tuple[Tensor, Tensor]:
    """As `reference.compressed_attention`."""
    from nsa_lab.attention.kernels.band import launch

    _raise_unsupported("compressed_attention", find_width_problem(q.shape[3], v_cmp.shape[3]))
    return launch.band_attention(q, k_cmp, v_cmp, nsa.l, nsa.d, 0, *_get_layout_args(span, nsa, q))


def select_blocks(
    q: Tensor, k_cmp: Tensor, lse: Tensor | None, nsa: NSAConfig, *, span: Span | DocumentTable | None = None
) -> Tensor:
    """As `reference.select_blocks`."""
    from nsa_lab.attention.kernels import block_topk

    if lse is None and (q.shape[2] != k_cmp.shape[2] or nsa.l != nsa.d):
        _, lse = compressed_attention(q, k_cmp, k_cmp, nsa, span=span)
    _raise_unsupported(
        "select_blocks", find_width_problem(q.shape[3], None) or _find_selection_problem(nsa, with_lse=lse is not None)
    )
    return block_topk.select_blocks(q, k_cmp, lse, nsa.l, nsa.d, nsa.l_sel, nsa.n_sel, *_get_layout_args(span, nsa, q))


def selected_attention(
    q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, nsa: NSAConfig, *, span: Span | DocumentTable | None = None
) -> tuple[Tensor, Tensor]:
    """As `reference.selected_attention`."""
    from nsa_lab.attention.kernels.selected import launch

    _raise_unsupported("selected_attention", find_width_problem(q.shape[3], v.shape[3]) or _find_l_sel_problem(nsa))
    return launch.selected_attention(q, k, v, blocks, nsa.l_sel, *_get_layout_args(span, nsa, q))


def window_attention(
    q: Tensor, k: Tensor, v: Tensor, nsa: NSAConfig, *, span: Span | DocumentTable | None = None
) -> tuple[Tensor, Tensor]:
    """As `reference.window_attention`."""
    from nsa_lab.attention.kernels.band import launch

    _raise_unsupported("window_attention", find_width_problem(q.shape[3], v.shape[3]))
    return launch.band_attention(q, k, v, 1, 1, nsa.w, *_get_layout_args(span, nsa, q))


def combine(out_cmp: Tensor, out_sel: Tensor, out_win: Tensor, gates: Tensor) -> Tensor:
    """As `reference.combine`; of any width."""
    from nsa_lab.attention.kernels import gating

    return gating.gated_sum(out_cmp, out_sel, out_win, gates)


# fmt: off
def nsa_attention(
    q: Tensor, k_cmp: Tensor, v_cmp: Tensor, k_sel: Tensor, v_sel: Tensor, k_win: Tensor, v_win: Tensor, gates: Tensor,
    nsa: NSAConfig, *, blocks: Tensor | None = None, span: Span | DocumentTable | None = None,
) -> Tensor:
    """As `dispatch.nsa_attention`, every part on Triton."""
    from nsa_lab.attention.kernels import nsa_operator

    _raise_unsupported("nsa_attention", find_shape_problem(nsa, q.shape[3], v_cmp.shape[3]))
    return nsa_operator.nsa_attention(q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates, nsa, blocks, *_get_layout_args(span, nsa, q))


def cached_attention(
    q: Tensor, gates: Tensor, cache: LayerCache, lengths: Tensor, nsa: NSAConfig, *,
    index_q: Tensor | None = None, selection_nsa: NSAConfig | None = None,
) -> Tensor:
    """As `decoding.cached_attention`; carries no gradient.

    Nothing waits on the host, and what is launched depends on shapes alone: it can be captured in a CUDA graph, and
    lengths changed in place between replays. Meant for a few new tokens: the scores of all compressed keys that the cache
    has room for are kept meanwhile, float32 [B, S, H, N_max].
    """
    from nsa_lab.attention.kernels.decoding import launch

    _raise_unsupported("cached_attention", find_decoding_problem() or find_shape_problem(nsa, q.shape[3], cache.v_cmp.shape[3]))
    if index_q is not None and selection_nsa is not None:
        _raise_unsupported("cached_attention, the indexer", _find_indexer_problem(index_q, cache.k_sel, selection_nsa))
    for name, x in cache._asdict().items():
        if x is not None and x.stride(3) != 1:  # a copy would cost more than the step
            raise ValueError(f"{name}: expected a cache whose last axis is contiguous; got strides {x.stride()}")
    branches = cache.k_cmp, cache.v_cmp, cache.k_sel, cache.v_sel, cache.k_win, cache.v_win
    sizes = nsa.l, nsa.d, nsa.l_sel, nsa.n_sel, nsa.w
    geometry = selection_nsa or nsa
    with torch.no_grad():
        return launch.cached_attention(
            q, gates, lengths, *branches, *sizes, index_q, cache.k_index, geometry.l, geometry.d
        )


def cached_dense_attention(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    """As `decoding.cached_dense_attention`; nothing waits on the host, as in `cached_attention`."""
    from nsa_lab.attention.kernels.decoding import launch

    _raise_unsupported("cached_dense_attention", find_decoding_problem() or find_width_problem(q.shape[3], v.shape[3]))
    with torch.no_grad():
        return launch.cached_dense_attention(q if q.stride(3) == 1 else q.contiguous(), k, v, lengths)


def rotate_and_append(
    q_and_k: Tensor, values: Tensor | None, rotary: tuple[Tensor, Tensor], lengths: Tensor, places: CacheWriteBuffers, *,
    k_before_conv: Tensor | None = None, conv_weight: Tensor | None = None, can_prefetch: bool = False,
) -> Tensor:
    """Turns S new tokens of each sequence by their angles and keeps them, in one launch: their queries [B, S, H, d_k].

    roped [B, S, H + branches G, d_k] are queries, then keys of every branch that has a place in `places`, cmp, sel and win;
    values [B, S, branches G, d_v] of the same, None where there are places of keys alone. `rotary`: cos and sin of the
    leading channels at every position, as `model.layers.rotary_table` gives them, float32 [positions, .], with the same
    strides. `lengths` as in `cached_attention`. No ring is shorter than S. What stands past the last row of
    `places.k_sel` is not kept there. The places' dtype is the result's.

    With `past`, a ring [B, R, branches G, d_k] of keys as they came, R > S, keys are mixed before they are turned:
    mix[0] of a token's own and mix[1] of those of the token before, mix [2, branches G, d_k]; all contiguous.

    `settled`: what was launched last wrote neither `lengths` nor `rotary`, so that they may be read before it has ended.
    Raises NotImplementedError for head widths that the kernels do not take. Not differentiable.
    """
    from nsa_lab.attention.kernels.decoding import launch

    _raise_unsupported("append", find_width_problem(q_and_k.shape[3], None if values is None else values.shape[3]))
    with torch.no_grad():
        return launch.rotate_and_append(q_and_k, values, *rotary, lengths, places, k_before_conv, conv_weight, can_prefetch)


def update_compressed(
    k_raw: Tensor, v_raw: Tensor | None, k: Tensor, v: Tensor | None, lengths: Tensor, S: int, nsa: NSAConfig, *,
    k_pool: PoolWeights | None = None, v_pool: PoolWeights | None = None, can_prefetch: bool = False,
) -> None:
    """Compresses the blocks that S new tokens complete, which are in the rings k_raw and v_raw already, into k and v.

    Rings [B, R, G, .], blocks [B, N, G, .], the values None where there are keys alone; `lengths` as in `cached_attention`.
    phi is a mean (avg), or with the weights of `k_pool` and `v_pool` pool. Blocks past the last row are not kept.
    `settled`: what was launched last did not write `lengths`, so that they may be read before it has ended.
    """
    from nsa_lab.attention.kernels.decoding import launch

    with torch.no_grad():
        launch.update_compressed(k_raw, v_raw, k, v, k_pool, v_pool, lengths, S, nsa.l, nsa.d, can_prefetch)


def has_few_rows(x: Tensor) -> bool:
    """Whether x [..., C] has so few rows that `linear` is better than a library's products."""
    from nsa_lab.attention.kernels import launch_table

    return x.numel() // x.shape[-1] <= launch_table.MAX_LINEAR_ROWS


def linear(
    x: Tensor, *projections: tuple[Tensor, str], norm: tuple[Tensor, float] | None = None, residual: Tensor | None = None,
    is_gated: bool = False, can_prefetch: bool = False,
) -> list[Tensor]:
    """[residual + then(n(x) @ weight.T), ...] for each (weight [N, C], then) of up to three `maps`, x [..., C] contiguous.

    `then`: "", "silu" or "sigmoid". n is division by the root mean square, times a weight [C]: `norm` is that weight and
    the epsilon; None: x itself. A residual [..., N] is for one map. `gated`: the one map's weight has 2 N rows, and its
    result is then(the first half's) times the second's (arXiv 2002.05202). One launch for all; sums are float32.
    `settled`: what was launched last wrote neither weights nor the residual, so that they may be read before it has ended.
    Not differentiable.
    """
    from nsa_lab.attention.kernels.decoding import launch

    with torch.no_grad():
        return launch.linear(x, projections, norm, residual, is_gated, can_prefetch)
# fmt: on
