"""Flash attention over a band of keys: the compressed branch and the window branch are two cases of it.

Query t sees key i iff  i*d + l - 1 <= t  and, where there is a window,  i > t - w.  Compressed attention has the
geometry's l and d and no window (w = 0); window attention has l = d = 1, since a key is its own token.

* Rows of a tile are (query, head of the group) pairs, row = t*h + head, so a tile is full for any h and the h heads that
  share a key tile read it once.
* A tile knows from its first and last query which key tiles lie wholly inside the band: only those at an edge are masked,
  those outside are never touched.
* dQ is summed by the program that owns the rows, dK and dV by the programs that own the keys: no atomics, so equal inputs
  give equal bits. Long columns of rows are cut into chunks, whose float32 partial sums a last kernel adds in order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from nsa_lab.attention.kernels.band_kernels import dkv_kernel, dq_kernel, forward_kernel, sum_chunks_kernel
from nsa_lab.attention.kernels.common import LOG2E, ceil_div, padded_width, roomy, with_short_rows

_SLICE_KEYS = 4


class Tile(NamedTuple):
    """Sizes of a tile and how it is compiled.

    `registers` caps a thread's, so that more tiles share a multiprocessor. `one_loop`, of dQ: every tile is masked, in one
    loop; a second one, for the tiles that need no mask, can spill more registers than the masks are worth.
    """

    rows: int
    keys: int
    warps: int
    stages: int
    registers: int | None = None
    one_loop: bool = False

    def launch(self) -> dict[str, int]:
        cap = {} if self.registers is None else {"maxnreg": self.registers}
        return dict(ROWS=self.rows, KEYS=self.keys, num_warps=self.warps, num_stages=self.stages, **cap)


# Measured on one H200 (docs/decisions.md). `roomy`: the multiprocessor has an A100's shared memory or more.
def forward_tile(dtype: torch.dtype, width: int, windowed: bool, roomy: bool) -> Tile:
    if dtype == torch.float32:
        return Tile(32, 32, 4, 1)
    if width > 64:
        if windowed:
            return Tile(128, 32, 8, 3, 128)
        return Tile(128, 64, 8, 3) if roomy else Tile(64, 32, 4, 3, 168)
    return Tile(64, 32, 4, 3, 96) if windowed else Tile(64, 64, 4, 3, 128)


def dq_tile(dtype: torch.dtype, width: int, windowed: bool, roomy: bool) -> Tile:
    if dtype == torch.float32:
        return Tile(32, 32, 4, 1)
    if width > 64:
        return Tile(64, 32, 4, 2, 168, True) if windowed else Tile(64, 64, 4, 2) if roomy else Tile(64, 32, 4, 2)
    return Tile(64, 32, 4, 3, 96) if windowed else Tile(64, 64, 4, 3, 168)


def dkv_tile(dtype: torch.dtype, width: int, roomy: bool) -> Tile:
    if dtype == torch.float32:
        return Tile(32, 32, 4, 1)
    if width > 64:
        return Tile(64, 128, 8, 3) if roomy else Tile(32, 64, 4, 3)
    return Tile(64, 64, 4, 3)


# Defined by schema for the host's sake; selected.py has the figures.
torch.library.define(
    "nsa_lab::band_attention",
    "(Tensor q, Tensor k, Tensor v, int l, int d, int w) -> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
torch.library.define(
    "nsa_lab::band_attention_backward",
    "(Tensor do, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, int l, int d, int w)"
    " -> (Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_band_attention = torch.ops.nsa_lab.band_attention.default
_band_attention_backward = torch.ops.nsa_lab.band_attention_backward.default


def band_attention(q: Tensor, k: Tensor, v: Tensor, l: int, d: int, w: int) -> tuple[Tensor, Tensor]:
    """q [B, T, H, Dk], k [B, N, G, Dk], v [B, N, G, Dv] -> out [B, T, H, Dv] as q, lse float32 [B, T, H].

    Query t sees key i iff i*d + l - 1 <= t and (w = 0 or i > t - w); a window goes with l = d = 1 only. Inputs as
    `check_attention_inputs` accepts them.
    """
    return _band_attention(q, k, v, l, d, w)


def forward(q: Tensor, k: Tensor, v: Tensor, l: int, d: int, w: int) -> tuple[Tensor, Tensor]:
    """`band_attention` itself, past PyTorch's dispatcher."""
    if w and (l, d) != (1, 1):
        raise NotImplementedError(f"band_attention: a window needs l = d = 1, got l, d, w = {l}, {d}, {w}")
    B, T, H, Dk = q.shape
    N, G, Dv = k.shape[1], k.shape[2], v.shape[3]
    if N == 0:
        return q.new_zeros(B, T, H, Dv), q.new_full((B, T, H), float("-inf"), dtype=torch.float32)
    q, k, v = map(with_short_rows, (q, k, v))
    out = q.new_empty(B, T, H, Dv)
    lse = q.new_empty(B, T, H, dtype=torch.float32)
    tile = forward_tile(q.dtype, max(Dk, Dv), w > 0, roomy(q.device))
    forward_kernel[(ceil_div(T * (H // G), tile.rows) * B * G,)](
        q,
        k,
        v,
        out,
        lse,
        *q.stride()[:3],
        *k.stride()[:3],
        *v.stride()[:3],
        T,
        N,
        B,
        G,
        Dk**-0.5 * LOG2E,
        **_constants(H // G, l, d, w, Dk, Dv),
        **tile.launch(),
    )
    return out, lse


torch.library.impl("nsa_lab::band_attention", ("cpu", "cuda"), forward)


@torch.library.register_fake("nsa_lab::band_attention")
def _(q, k, v, l, d, w):
    return q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.impl("nsa_lab::band_attention_backward", ("cpu", "cuda"))
def _(
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    l: int,
    d: int,
    w: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of `band_attention`, contiguous, given the gradients of out and, if it was used, of lse."""
    dq = q.new_empty(q.shape)
    return dq, *backward(do, q, k, v, lse, dq, l, d, w, out=out, dlse=dlse)


def backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    dq: Tensor,
    l: int,
    d: int,
    w: int,
    *,
    out: Tensor | None = None,
    dlse: Tensor | None = None,
    delta: Tensor | None = None,
    add: bool = False,
) -> tuple[Tensor, Tensor]:
    """dk and dv; dq is written to `dq`, which is contiguous, or added to what is there.

    `delta` is sum(do * out) - dlse, float32 [B, T, H]; where it is not given, out and dlse are.
    """
    do, q, k, v = map(with_short_rows, (do, q, k, v))
    stats = backward_queries(do, q, k, v, lse, dq, l, d, w, out=out, dlse=dlse, delta=delta, add=add)
    return backward_keys(do, q, k, v, stats, l, d, w)


def backward_queries(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    dq: Tensor,
    l: int,
    d: int,
    w: int,
    *,
    out: Tensor | None = None,
    dlse: Tensor | None = None,
    delta: Tensor | None = None,
    add: bool = False,
) -> Tensor:
    """The half of `backward` that fills dq; it gives what `backward_keys` needs. do, q, k and v are `with_short_rows`."""
    B, T, H, Dk = q.shape
    N, G, Dv = k.shape[1], k.shape[2], v.shape[3]
    h = H // G
    stats = q.new_empty(B, H, 2, ceil_div(T, 16) * 16, dtype=torch.float32)
    if N == 0:
        if not add:
            dq.zero_()
        return stats
    scale = Dk**-0.5
    tile = dq_tile(q.dtype, max(Dk, Dv), w > 0, roomy(q.device))
    dq_kernel[(ceil_div(T * h, tile.rows) * B * G,)](
        q,
        k,
        v,
        out,
        lse,
        do,
        None if dlse is None else dlse.contiguous(),
        delta,
        dq,
        stats,
        *_strides(q, k, v, do, stats),
        T,
        N,
        B,
        G,
        scale * LOG2E,
        scale,
        **_constants(h, l, d, w, Dk, Dv),
        HAS_DLSE=dlse is not None,
        HAS_DELTA=delta is not None,
        ADD=add,
        ONE_LOOP=tile.one_loop,
        **tile.launch(),
    )
    return stats


def backward_keys(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, stats: Tensor, l: int, d: int, w: int
) -> tuple[Tensor, Tensor]:
    """The half of `backward` that gives dk and dv, after the other and of the same tensors."""
    B, T, H, Dk = q.shape
    N, G, Dv = k.shape[1], k.shape[2], v.shape[3]
    h = H // G
    dk, dv = (x.new_empty(x.shape) for x in (k, v))
    if N == 0:
        return dk, dv
    scale = Dk**-0.5
    constants = _constants(h, l, d, w, Dk, Dv)
    tile = dkv_tile(q.dtype, max(Dk, Dv), roomy(q.device))
    chunks, chunk_steps = _chunks(T, N, B * G, h, l, w, tile)
    key_programs = ceil_div(N, tile.keys) * B * G
    sums = (dk, dv) if chunks == 1 else tuple(x.new_empty(chunks, *x.shape, dtype=torch.float32) for x in (k, v))
    dkv_kernel[(key_programs, chunks)](
        q,
        k,
        v,
        do,
        stats,
        *sums,
        *_strides(q, k, v, do, stats),
        T,
        N,
        B,
        G,
        chunk_steps,
        scale * LOG2E,
        scale,
        **constants,
        TAIL=T % tile.rows > 0 or tile.keys % tile.rows > 0,
        **tile.launch(),
    )
    if chunks > 1:
        sum_chunks_kernel[(ceil_div(N, _SLICE_KEYS) * B * G,)](
            *sums,
            dk,
            dv,
            T,
            N,
            B,
            G,
            chunk_steps,
            **constants,
            ROWS=tile.rows,
            KEYS=tile.keys,
            SLICE=_SLICE_KEYS,
            AT_ONCE=8,
            num_warps=4,
        )
    return dk, dv


@torch.library.register_fake("nsa_lab::band_attention_backward")
def _(do, dlse, q, k, v, out, lse, l, d, w):
    return tuple(x.new_empty(x.shape) for x in (q, k, v))


def _strides(q: Tensor, k: Tensor, v: Tensor, do: Tensor, stats: Tensor) -> tuple[int, ...]:
    return (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *do.stride()[:3], stats.stride(2))


def _constants(h: int, l: int, d: int, w: int, Dk: int, Dv: int) -> dict[str, int]:
    return {"h": h, "L": l, "STRIDE": d, "W": w, "DK": Dk, "DV": Dv, "DKP": padded_width(Dk), "DVP": padded_width(Dv)}


def _chunks(T: int, N: int, groups: int, h: int, l: int, w: int, tile: Tile) -> tuple[int, int]:
    """Into how many chunks the steps of a key tile are cut, and the steps of a chunk; about equal work a program."""
    longest = ceil_div(min(tile.keys + w + 14, T) if w else T, tile.rows) * h  # 15: the alignment
    work = ceil_div(N, tile.keys) * groups * longest
    # Programs enough to fill any present GPU; constants, so that results do not depend on the GPU's size. Without a window
    # the queries of the key tiles fall from all to none: half of the full rectangle.
    chunk_steps = work // 512 if w else work // 2 // 1024
    chunk_steps = min(max(chunk_steps, 8), longest)
    return ceil_div(longest, chunk_steps), chunk_steps


def _setup_context(ctx, inputs, output):
    q, k, v, ctx.l, ctx.d, ctx.w = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, *output)


def _backward(ctx, do, dlse):
    q, k, v, out, lse = ctx.saved_tensors
    if do is None:
        do = torch.zeros_like(out)
    dq, dk, dv = _band_attention_backward(do, dlse, q, k, v, out, lse, ctx.l, ctx.d, ctx.w)
    return dq, dk, dv, None, None, None


torch.library.register_autograd("nsa_lab::band_attention", _backward, setup_context=_setup_context)
