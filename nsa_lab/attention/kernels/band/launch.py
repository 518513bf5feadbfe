"""The operators of attention over a band of keys, and the launches of their kernels."""

# The functions of torch.library have no type annotations.
# pyright: reportUnknownMemberType=false, reportUntypedFunctionDecorator=false
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nsa_lab.attention.kernels import launch_table
from nsa_lab.attention.kernels.band.backward import nsa_band_dkv, nsa_band_dq, nsa_band_sum_chunks
from nsa_lab.attention.kernels.band.forward import nsa_band_forward
from nsa_lab.attention.kernels.kernel_names import LOG2E
from nsa_lab.attention.kernels.launch_utils import (
    ceil_div,
    get_strides,
    make_rows_contiguous,
    padded_width,
    register_autograd,
)
from nsa_lab.attention.kernels.packed_tiles import COMPRESSED_ROW, TOKEN_ROW, count_tiles, split_bounds

# Defined by schema to save host time; see selected/launch.py for the measurement.
torch.library.define(
    "nsa_lab::band_attention",
    "(Tensor q, Tensor k, Tensor v, int l, int d, int w, Tensor? documents=None, int longest=0, int first=0)"
    " -> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
torch.library.define(
    "nsa_lab::band_attention_backward",
    "(Tensor do, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, int l, int d, int w,"
    " Tensor? documents=None, int longest=0) -> (Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
# The backward pass of a chunk, whose queries begin at position `first`.
torch.library.define(
    "nsa_lab::band_chunk_backward",
    "(Tensor do, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, int l, int d, int w,"
    " Tensor? documents, int longest, int first) -> (Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_band_attention = torch.ops.nsa_lab.band_attention.default
_band_attention_backward = torch.ops.nsa_lab.band_attention_backward.default
_band_chunk_backward = torch.ops.nsa_lab.band_chunk_backward.default


# fmt: off
def band_attention(
    q: Tensor, k: Tensor, v: Tensor, l: int, d: int, w: int, documents: Tensor | None = None, longest: int = 0,
    first: int = 0,
) -> tuple[Tensor, Tensor]:
    """Return (out [B, T, H, Dv] in the dtype of q, lse float32 [B, T, H], natural log). Both are differentiable.

    Query t attends to key i iff i*d + l - 1 <= t and (w = 0 or i > t - w). A query without keys gets out 0, lse -inf and
    zero gradients.

    Args:
        q: [B, T, H, Dk].
        k: [B, N, G, Dk].
        v: [B, N, G, Dv].
        l, d, w: the band; w = 0: no window.
        documents: `Layout.bounds` of packed documents (B = 1), each computed independently; None: not packed.
        longest: upper bound of the tokens of a document.
        first: position of query 0; keys start at position 0.

    Raises:
        NotImplementedError: a window with l or d other than 1.
    """
    out, lse = _band_attention(q, k, v, l, d, w, documents, longest, first)
    return out, lse


def forward(
    q: Tensor, k: Tensor, v: Tensor, l: int, d: int, w: int, documents: Tensor | None = None, longest: int = 0,
    first: int = 0,
) -> tuple[Tensor, Tensor]:
    """Compute `band_attention` without PyTorch's dispatcher."""
    if w and (l, d) != (1, 1):
        raise NotImplementedError(f"band_attention: a window needs l = d = 1, got l, d, w = {l}, {d}, {w}")
    B, T, H, Dk = q.shape
    N, G, Dv = k.shape[1:3] + v.shape[3:]
    if N == 0:
        return q.new_zeros(B, T, H, Dv), q.new_full((B, T, H), float("-inf"), dtype=torch.float32)
    q, k, v = map(make_rows_contiguous, (q, k, v))
    out = q.new_empty(B, T, H, Dv)
    lse = q.new_empty(B, T, H, dtype=torch.float32)
    q_bounds, k_bounds, n_documents = split_bounds(documents, TOKEN_ROW if w else COMPRESSED_ROW)
    tile = launch_table.band_forward(q.dtype, max(Dk, Dv), w > 0, q.device)
    nsa_band_forward[(count_tiles(T * (H // G), tile.rows, n_documents) * B * G,)](
        q, k, v, out, lse, q_bounds, k_bounds,
        *get_strides(q, k, v),
        T, N, B, G, n_documents, first or None, Dk**-0.5 * LOG2E,
        **_get_constants(q, k, v, l, d, w, tile), **_get_width_parts(q, v), **tile.compile_options(),
    )
    return out, lse
# fmt: on


torch.library.impl("nsa_lab::band_attention", ("cpu", "cuda"), forward)


@torch.library.register_fake("nsa_lab::band_attention")
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3], dtype=torch.float32)


# fmt: off
def _compute_backward(
    do: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    l: int, d: int, w: int, documents: Tensor | None = None, longest: int = 0, first: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk, dv of `band_attention`, contiguous. `dlse` is None if lse has no gradient."""
    do, q, k, v = map(make_rows_contiguous, (do, q, k, v))
    dq = q.new_empty(q.shape)
    stats = compute_dq(do, q, k, v, lse, dq, l, d, w, documents, longest, first, out=out, dlse=dlse)
    return dq, *compute_dkv(do, q, k, v, stats, l, d, w, documents, longest, first)


for _name in ("band_attention_backward", "band_chunk_backward"):
    torch.library.impl(f"nsa_lab::{_name}", ("cpu", "cuda"), _compute_backward)


def compute_dq(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, dq: Tensor,
    l: int, d: int, w: int, documents: Tensor | None = None, longest: int = 0, first: int = 0, *,
    out: Tensor | None = None, dlse: Tensor | None = None, delta: Tensor | None = None, add: bool = False,
) -> Tensor:
    """Write the gradient of q to the contiguous `dq`, or add it. Return the stats that `compute_dkv` needs.

    Either `delta` is given, sum(do * out), float32 [B, T, H], if lse has no gradient; or `out` is given, and `dlse` if lse
    has a gradient. In float32 only dlse is read of these. do, q, k and v are results of `make_rows_contiguous`.
    """
    B, T, H, Dk = q.shape
    N, G = k.shape[1:3]
    q_bounds, k_bounds, n_documents = split_bounds(documents, TOKEN_ROW if w else COMPRESSED_ROW)
    stats_pad = launch_table.band_dkv(q.dtype, max(Dk, v.shape[3]), q.device).rows
    # The value of `get_first_stat` for a document after the last one.
    stats = q.new_empty(B, H, 2, (T // 16 + (n_documents or 1) * (stats_pad // 16 + 1)) * 16, dtype=torch.float32)
    if N == 0:
        if not add:
            dq.zero_()
        return stats
    scale = Dk**-0.5
    tile = launch_table.band_dq(q.dtype, max(Dk, v.shape[3]), w > 0, q.device)
    nsa_band_dq[(count_tiles(T * (H // G), tile.rows, n_documents) * B * G,)](
        q, k, v, out, lse, do, None if dlse is None else dlse.contiguous(), delta, dq, stats, q_bounds, k_bounds,
        *get_strides(q, k, v, do), stats.stride(2),
        T, N, B, G, n_documents, first or None, scale * LOG2E, scale,
        **_get_constants(q, k, v, l, d, w, tile), **_get_width_parts(q, v),
        HAS_DLSE=dlse is not None, HAS_DELTA=delta is not None, ADD=add,
        STATS_PAD=stats_pad, ONE_LOOP=tile.one_loop, **tile.compile_options(),
    )
    return stats


def compute_dkv(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, stats: Tensor,
    l: int, d: int, w: int, documents: Tensor | None = None, longest: int = 0, first: int = 0,
) -> tuple[Tensor, Tensor]:
    """Return dk and dv. Call it after `compute_dq`, with the same tensors."""
    B, T, H, Dk = q.shape
    N, G = k.shape[1:3]
    q_bounds, k_bounds, n_documents = split_bounds(documents, TOKEN_ROW if w else COMPRESSED_ROW)
    # Compressed keys after the last document belong to no tile, and keys far before a chunk to no query. Their gradient is
    # zero.
    dk, dv = (x.new_zeros(x.shape) if first or (w == 0 and n_documents) else x.new_empty(x.shape) for x in (k, v))
    if N == 0:
        return dk, dv
    scale = Dk**-0.5
    tile = launch_table.band_dkv(q.dtype, max(Dk, v.shape[3]), q.device)
    constants = _get_constants(q, k, v, l, d, w, tile)
    chunks, chunk_steps = _plan_chunks(longest if n_documents else T, N, B * G, H // G, w, tile)
    sums = (dk, dv) if chunks == 1 else tuple(x.new_empty(chunks, *x.shape, dtype=torch.float32) for x in (k, v))
    nsa_band_dkv[(count_tiles(N, tile.keys, n_documents) * B * G, chunks)](
        q, k, v, do, stats, *sums, q_bounds, k_bounds,
        *get_strides(q, k, v, do), stats.stride(2),
        T, N, B, G, n_documents, first or None, chunk_steps, scale * LOG2E, scale,
        **constants, **_get_width_parts(q, v),
        TAIL=bool(first) or n_documents is not None or T % tile.rows > 0 or tile.keys % tile.rows > 0,
        **tile.compile_options(),
    )
    if chunks > 1:
        slice_keys = launch_table.SUM_CHUNKS_KEYS
        nsa_band_sum_chunks[(count_tiles(N, slice_keys, n_documents) * B * G,)](
            *sums, dk, dv, q_bounds, k_bounds,
            T, N, B, G, n_documents, first or None, chunk_steps,
            **constants, DK_PAD=padded_width(Dk), DV_PAD=padded_width(v.shape[3]),
            SLICE=slice_keys, AT_ONCE=launch_table.SUM_CHUNKS_AT_ONCE, num_warps=launch_table.STREAMING_WARPS,
        )
    return dk, dv
# fmt: on


@torch.library.register_fake("nsa_lab::band_attention_backward")
@torch.library.register_fake("nsa_lab::band_chunk_backward")
def _(do: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _get_constants(q: Tensor, k: Tensor, v: Tensor, l: int, d: int, w: int, tile: launch_table.Tile) -> dict[str, int]:
    """Return the compile-time sizes of all kernels in this folder."""
    Dk, Dv = q.shape[3], v.shape[3]
    geometry = {"HEADS": q.shape[2] // k.shape[2], "L": l, "STRIDE": d, "W": w}
    return {**geometry, "DK": Dk, "DV": Dv, "ROWS": tile.rows, "KEYS": tile.keys}


def _get_width_parts(q: Tensor, v: Tensor) -> dict[str, int]:
    """Return the additional compile-time sizes of the kernels that multiply tiles."""
    return {**launch_table.split_width("DK", q.shape[3], q.device), **launch_table.split_width("DV", v.shape[3], q.device)}


def _plan_chunks(T: int, N: int, n_groups: int, heads: int, w: int, tile: launch_table.Tile) -> tuple[int, int]:
    """Return (number of chunks of the steps of a key tile, steps per chunk), so that all programs do about equal work.

    `n_groups`: groups of all sequences. The result depends only on shapes, so outputs do not depend on the size of the GPU.
    """
    # The first query of a window is aligned to 16, which adds up to 15 queries to the keys + w - 1 queries of a tile.
    max_steps = ceil_div(min(tile.keys + w + 14, T) if w else T, tile.rows) * heads
    work = ceil_div(N, tile.keys) * n_groups * max_steps
    # Enough programs to fill any current GPU. Without a window, all queries attend to the first key tile and few to the
    # last: half of the full rectangle.
    chunk_steps = work // 512 if w else work // 2 // 2048
    chunk_steps = min(max(chunk_steps, 8), max_steps)
    return ceil_div(max_steps, chunk_steps), chunk_steps


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, ctx.l, ctx.d, ctx.w, documents, ctx.longest, ctx.first = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, *output, documents)


def _autograd_backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse, documents = ctx.saved_tensors
    if do is None:
        do = torch.zeros_like(out)
    arguments = do, dlse, q, k, v, out, lse, ctx.l, ctx.d, ctx.w, documents, ctx.longest
    grads = _band_chunk_backward(*arguments, ctx.first) if ctx.first else _band_attention_backward(*arguments)
    return *grads, *(None,) * 6


register_autograd("band_attention", _autograd_backward, _setup_context)
