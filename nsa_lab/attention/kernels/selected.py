"""The selected branch in Triton: softmax attention of every query to the tokens <= t of the blocks it chose.

`selected_attention` is the one entry point. Two registered operators stand behind it, `nsa_lab::selected_fwd` and
`nsa_lab::selected_bwd`; what they launch is chosen from shapes alone, so nothing is read back from the device and a CUDA
graph can hold them. For the backward pass q, k, v, out, lse and blocks are kept; the inverted index is built again.

Source: arXiv 2502.11089, section 3.4 (kernel design), with the loop order turned round for groups of few heads.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from nsa_lab.attention.kernels.common import ceil_div, check_attention_inputs, padded_width
from nsa_lab.attention.kernels.inverted_index import build_inverted_index
from nsa_lab.attention.kernels.selected_backward import _backward_kernel, _delta_kernel, _finish_kernel
from nsa_lab.attention.kernels.selected_forward import LOG2_E, _gather_kernel, _merge_kernel, _union_kernel
from nsa_lab.config import NSAConfig

WORKSPACE_BYTES = 2 * 2**30  # partial results of one launch; longer inputs are worked through in pieces of queries
UNION_BLOCKS = 128  # the union kernel holds a query's choice in two 64-bit words
UNION_TOKENS = 4096  # up to here the union of a tile's blocks costs less than the traffic of partial outputs
SHORT_ITEM, LONG_ITEM = 1536, 6144  # (query, head) rows a work item: short ones spread a small problem over the chip
LONG_ROWS = 2**22
REDUCE_TILE = 1024


class _Tuning(NamedTuple):
    rows: int
    warps: int
    stages: int


def _tuning(kernel: str, dtype: torch.dtype, width: int) -> _Tuning:
    """Tile heights and launch shapes, measured on one H200; each fits the 99 KB of shared memory of the smaller sm_8x."""
    if dtype == torch.float32:
        return _Tuning(16 if width > 64 else 32, 4, 1)
    if width > 64:
        return {"gather": _Tuning(64, 4, 2), "union": _Tuning(64, 4, 2), "backward": _Tuning(64, 4, 2)}[kernel]
    return {"gather": _Tuning(64, 4, 3), "union": _Tuning(64, 4, 3), "backward": _Tuning(64, 4, 3)}[kernel]


def _merge_rows(width: int) -> int:
    """Rows a program of the kernels that only stream: as many as keep every slot's load in flight at once."""
    return 16 if width > 64 else 32


class _Geometry(NamedTuple):
    """The sizes every launch needs; `size` is the kernels' block, `n_sel` how many of those a query has."""

    B: int
    T: int
    H: int
    G: int
    n_sel: int
    size: int
    dk: int
    dv: int

    @property
    def heads(self) -> int:
        return self.H // self.G

    @property
    def n_blocks(self) -> int:
        return ceil_div(self.T, self.size)

    @property
    def scale(self) -> float:
        return self.dk**-0.5

    def constants(self) -> dict[str, int]:
        """The compile-time sizes that the gathering kernels share."""
        return {
            "HEADS": self.heads,
            "N_SEL": self.n_sel,
            "SIZE": self.size,
            "SIZE_PAD": padded_width(self.size),
            "DK": self.dk,
            "DV": self.dv,
            "DK_PAD": padded_width(self.dk),
            "DV_PAD": padded_width(self.dv),
        }


def selected_attention(q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, nsa: NSAConfig) -> tuple[Tensor, Tensor]:
    """Attention to the selected blocks.

    Args:
        q: [B, T, H, Dk], bfloat16, float16 or float32, as k and v. Any strides; a unit last stride saves a copy.
        k: [B, T, G, Dk]; G divides H, head n belongs to group n // (H / G).
        v: [B, T, G, Dv]; Dk and Dv in 32, 64, 96, 128.
        blocks: int32 [B, T, G, n_sel], ascending and distinct along n_sel, padded with −1. A block that starts after
            its query counts as −1.
        nsa: `l_sel` is read.

    Returns:
        out [B, T, H, Dv] in q's dtype and lse float32 [B, T, H] (natural log). A query without blocks gets 0,
        −inf and zero gradients. Both are differentiable, for q, k and v; the choice is not.

    Raises:
        ValueError: shapes or dtypes that do not belong together.
        NotImplementedError: a combination that the definition allows and these kernels do not.
    """
    _check(q, k, v, blocks, nsa)
    return _selected_fwd(q, k, v, blocks, nsa.l_sel, _forward_strategy(q.shape[1], nsa.l_sel))


def _check(q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, nsa: NSAConfig) -> None:
    check_attention_inputs("selected_attention", q, k, v, q.shape[1])
    B, T, G = k.shape[:3]
    if blocks.dim() != 4 or blocks.shape[:3] != (B, T, G) or blocks.dtype != torch.int32:
        raise ValueError(
            f"selected_attention: blocks must be int32 [{B}, {T}, {G}, n_sel], got {blocks.dtype} {list(blocks.shape)}"
        )
    if nsa.l_sel % 16:
        raise NotImplementedError(
            f"selected_attention: the Triton kernels take l_sel in multiples of 16, not {nsa.l_sel}"
        )
    slots = blocks.shape[3] * (nsa.l_sel // _kernel_block(nsa.l_sel))
    if T * slots * (q.shape[2] // G) >= 2**31:
        raise NotImplementedError(
            "selected_attention: the Triton kernels number (query, block, head) triples of a group in 31 bits, and "
            f"{T} x {slots} x {q.shape[2] // G} is more; split the sequence or the heads"
        )


def _forward_strategy(T: int, l_sel: int) -> str:
    return "union" if T <= UNION_TOKENS and ceil_div(T, _kernel_block(l_sel)) <= UNION_BLOCKS else "gather"


def _kernel_block(l_sel: int) -> int:
    """The block that the kernels work in: l_sel up to 64, else the divisor that wastes least of a power-of-two tile.

    Tiles of 128 keys spill registers in the backward pass; two of 64 do the same work without.
    """
    if l_sel <= 64:
        return l_sel
    divisors = [s for s in range(16, 65, 16) if l_sel % s == 0]
    return max(divisors, key=lambda s: (s / padded_width(s), s))


def _split_blocks(blocks: Tensor, l_sel: int) -> tuple[Tensor, int]:
    """The choice in the kernels' blocks (contiguous), and their size."""
    size = _kernel_block(l_sel)
    if size == l_sel:
        return blocks.contiguous(), size
    ratio = l_sel // size
    inner = torch.arange(ratio, dtype=torch.int32, device=blocks.device)
    split = torch.where(blocks[..., None] >= 0, blocks[..., None] * ratio + inner, -1)
    return split.flatten(-2).contiguous(), size


def _unit_stride(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


class _Piece(NamedTuple):
    """Sequences [b0, b1) and queries [t0, t1) that one launch works on."""

    b0: int
    b1: int
    t0: int
    t1: int

    def of(self, x: Tensor) -> Tensor:
        whole = self.b1 - self.b0 == x.shape[0] and self.t1 - self.t0 == x.shape[1]
        return x if whole else x[self.b0 : self.b1, self.t0 : self.t1]  # views cost the host microseconds

    def sequences(self, x: Tensor) -> Tensor:
        return x if self.b1 - self.b0 == x.shape[0] else x[self.b0 : self.b1]


def _pieces(geo: _Geometry, bytes_per_query: int) -> Iterator[_Piece]:
    """Whole sequences while one fits in the workspace, else parts of one sequence."""
    queries = max(1, WORKSPACE_BYTES // bytes_per_query)
    if queries >= geo.T:
        batch = queries // geo.T
        for b in range(0, geo.B, batch):
            yield _Piece(b, min(b + batch, geo.B), 0, geo.T)
        return
    for b in range(geo.B):
        for t in range(0, geo.T, queries):
            yield _Piece(b, b + 1, t, min(t + queries, geo.T))


def _chunk(blocks: Tensor, heads: int) -> int:
    """Entries a work item."""
    return max(1, (SHORT_ITEM if blocks.numel() * heads <= LONG_ROWS else LONG_ITEM) // heads)


def _precision(dtype: torch.dtype) -> str:
    # float32 inputs ask for float32 products: tf32 would be a silent loss of 13 bits.
    return "ieee" if dtype == torch.float32 else "tf32"


def _is_wide(geo: _Geometry, queries: int, width: int, *tensors: Tensor) -> bool:
    """Whether offsets inside one sequence of `tensors`, or of one group's pairs, pass 32 bits."""
    rows = max((geo.T - 1) * abs(x.stride(1)) + geo.H * abs(x.stride(2)) for x in tensors)
    return max(rows, queries * geo.n_sel * geo.heads * width) >= 2**31 - 2**10


def _exact_scale(geo: _Geometry, dtype: torch.dtype) -> bool:
    # Not in float16: an eighth of a small value may be subnormal there.
    return math.frexp(geo.scale)[0] == 0.5 and dtype != torch.float16


def _geometry(q: Tensor, v: Tensor, blocks: Tensor, size: int) -> _Geometry:
    B, T, H, dk = q.shape
    return _Geometry(B, T, H, v.shape[2], blocks.shape[3], size, dk, v.shape[3])


# Defined by schema and not with `torch.library.custom_op`, whose wrapper was measured at .3 ms of host time a call: as
# much as these kernels take on the device at 2048 tokens.
torch.library.define(
    "nsa_lab::selected_fwd",
    "(Tensor q, Tensor k, Tensor v, Tensor blocks, int l_sel, str strategy) -> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
torch.library.define(
    "nsa_lab::selected_bwd",
    "(Tensor grad_out, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor blocks, int l_sel)"
    " -> (Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_selected_fwd = torch.ops.nsa_lab.selected_fwd.default
_selected_bwd = torch.ops.nsa_lab.selected_bwd.default


@torch.library.impl("nsa_lab::selected_fwd", ("cpu", "cuda"))
def _(q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, l_sel: int, strategy: str) -> tuple[Tensor, Tensor]:
    q, k, v = (_unit_stride(x) for x in (q, k, v))
    blocks, size = _split_blocks(blocks, l_sel)
    geo = _geometry(q, v, blocks, size)
    out = q.new_empty(geo.B, geo.T, geo.H, geo.dv)
    lse = q.new_empty(geo.B, geo.T, geo.H, dtype=torch.float32)
    with torch.cuda.device_of(q):
        (_forward_union if strategy == "union" else _forward_gather)(q, k, v, blocks, out, lse, geo)
    return out, lse


@torch.library.register_fake("nsa_lab::selected_fwd")
def _(q, k, v, blocks, l_sel, strategy):
    B, T, H, _ = q.shape
    return q.new_empty(B, T, H, v.shape[3]), q.new_empty(B, T, H, dtype=torch.float32)


def _forward_union(q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, out: Tensor, lse: Tensor, geo: _Geometry) -> None:
    tuning = _tuning("union", q.dtype, max(geo.dk, geo.dv))
    tiles = ceil_div(geo.T * geo.heads, tuning.rows)
    unions = torch.empty(geo.B * geo.G * tiles * geo.n_blocks, dtype=torch.int32, device=q.device)
    # A tile of consecutive rows touches one query more than it holds, when it starts inside one.
    queries = (tuning.rows + geo.heads - 2) // geo.heads + 1
    _union_kernel[(tiles * geo.B * geo.G,)](
        q, k, v, blocks, unions, out, lse, geo.T, geo.G, geo.n_blocks,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:2], *lse.stride()[:2],
        geo.scale * LOG2_E, tiles, N_SEL_PAD=padded_width(geo.n_sel), ROWS=tuning.rows,
        QUERIES_PAD=padded_width(queries), BINS=padded_width(geo.n_blocks + 1),
        WORDS=ceil_div(geo.n_blocks, 64), BITS=32 if geo.n_blocks <= 32 else 64,
        WIDE=_is_wide(geo, 0, 0, k, v), PRECISION=_precision(q.dtype), **geo.constants(),
        num_warps=tuning.warps, num_stages=tuning.stages,
    )  # fmt: skip


def _forward_gather(q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, out: Tensor, lse: Tensor, geo: _Geometry) -> None:
    tuning = _tuning("gather", q.dtype, max(geo.dk, geo.dv))
    pair_bytes = geo.dv * q.element_size() + 4
    for piece in _pieces(geo, geo.n_sel * geo.H * pair_bytes):
        part_q, part_blocks, part_out, part_lse = (piece.of(x) for x in (q, blocks, out, lse))
        part_blocks = part_blocks.contiguous()
        B, T = part_blocks.shape[:2]
        chunk = _chunk(part_blocks, geo.heads)
        index = build_inverted_index(part_blocks, geo.size, chunk, geo.n_blocks, piece.t0)
        pairs = B * geo.G * T * geo.n_sel * geo.heads
        pair_out = q.new_empty(pairs * geo.dv)
        pair_lse = q.new_empty(pairs, dtype=torch.float32)
        _gather_kernel[(index.work.numel(),)](
            part_q, piece.sequences(k), piece.sequences(v), *index, pair_out, pair_lse,
            T, geo.T, geo.G, geo.n_blocks, piece.t0, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
            geo.scale * LOG2_E, WIDE=_is_wide(geo, T, geo.dv, q), CHUNK=chunk, ROWS=tuning.rows,
            PRECISION=_precision(q.dtype), **geo.constants(), num_warps=tuning.warps, num_stages=tuning.stages,
        )  # fmt: skip
        rows = _merge_rows(geo.dv)
        tiles = ceil_div(T * geo.heads, rows)
        _merge_kernel[(tiles * B * geo.G,)](
            pair_out, pair_lse, part_blocks, part_out, part_lse, T, geo.G, piece.t0,
            *out.stride()[:2], *lse.stride()[:2], tiles, HEADS=geo.heads, N_SEL=geo.n_sel, SIZE=geo.size,
            DV=geo.dv, DV_PAD=padded_width(geo.dv), ROWS=rows, num_warps=4,
        )  # fmt: skip


@torch.library.impl("nsa_lab::selected_bwd", ("cpu", "cuda"))
def _(
    grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    blocks: Tensor, l_sel: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    q, k, v, grad_out = (_unit_stride(x) for x in (q, k, v, grad_out))
    lse = lse.contiguous()
    blocks, size = _split_blocks(blocks, l_sel)
    geo = _geometry(q, v, blocks, size)
    with torch.cuda.device_of(q):
        delta = _delta(out, grad_out, grad_lse, geo)
        grad_q = q.new_empty(geo.B, geo.T, geo.H, geo.dk)
        grad_k = k.new_empty(geo.B, geo.T, geo.G, geo.dk)
        grad_v = v.new_empty(geo.B, geo.T, geo.G, geo.dv)
        _backward(q, k, v, grad_out, lse, delta, blocks, grad_q, grad_k, grad_v, geo)
    return grad_q, grad_k, grad_v


@torch.library.register_fake("nsa_lab::selected_bwd")
def _(grad_out, grad_lse, q, k, v, out, lse, blocks, l_sel):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _delta(out: Tensor, grad_out: Tensor, grad_lse: Tensor | None, geo: _Geometry) -> Tensor:
    out = _unit_stride(out)
    rows = geo.B * geo.T * geo.H
    delta = out.new_empty(geo.B, geo.T, geo.H, dtype=torch.float32)
    _delta_kernel[(ceil_div(rows, 64),)](
        out, grad_out, None if grad_lse is None else grad_lse.contiguous(), delta, rows, geo.T, geo.H,
        *out.stride()[:3], *grad_out.stride()[:3], HAS_GRAD_LSE=grad_lse is not None,
        DV=geo.dv, DV_PAD=padded_width(geo.dv), ROWS=64, num_warps=4,
    )  # fmt: skip
    return delta


def _backward(
    q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor, lse: Tensor, delta: Tensor, blocks: Tensor,
    grad_q: Tensor, grad_k: Tensor, grad_v: Tensor, geo: _Geometry,
) -> None:  # fmt: skip
    tuning = _tuning("backward", q.dtype, max(geo.dk, geo.dv))
    item = geo.size * (geo.dk + geo.dv)
    # A query brings its partial dQ and its share of the work items' float32 dK and dV.
    query_bytes = geo.n_sel * (geo.H * geo.dk * q.element_size() + geo.H * item * 4 // SHORT_ITEM)
    sums = None
    for piece in _pieces(geo, query_bytes):
        part_q, part_grad, part_lse, part_delta, part_blocks, part_grad_q = (
            piece.of(x) for x in (q, grad_out, lse, delta, blocks, grad_q)
        )
        part_k, part_v, part_grad_k, part_grad_v = (piece.sequences(x) for x in (k, v, grad_k, grad_v))
        part_blocks = part_blocks.contiguous()
        B, T = part_blocks.shape[:2]
        first, last = piece.t0 == 0, piece.t1 == geo.T
        if first and not last:
            sums = q.new_empty(B * geo.G * geo.n_blocks * item, dtype=torch.float32)
        chunk = _chunk(part_blocks, geo.heads)
        index = build_inverted_index(part_blocks, geo.size, chunk, geo.n_blocks, piece.t0)
        pair_dq = q.new_empty(B * geo.G * T * geo.n_sel * geo.heads * geo.dk)
        items = q.new_empty(index.work.numel() * item, dtype=torch.float32)
        _backward_kernel[(index.work.numel(),)](
            part_q, part_k, part_v, part_grad, part_lse, part_delta, *index, pair_dq, items, part_grad_k, part_grad_v,
            T, geo.T, geo.G, geo.n_blocks, piece.t0, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
            *grad_out.stride()[:3], *lse.stride()[:2], geo.scale, geo.scale * LOG2_E,
            WHOLE=first and last, WIDE=_is_wide(geo, T, geo.dk, q, grad_out), SCALED_V=_exact_scale(geo, q.dtype),
            CHUNK=chunk, ROWS=tuning.rows, PRECISION=_precision(q.dtype),
            **geo.constants(), num_warps=tuning.warps, num_stages=tuning.stages,
        )  # fmt: skip
        rows = _merge_rows(geo.dk)
        tiles = ceil_div(T * geo.heads, rows)
        parts = ceil_div(item, REDUCE_TILE)
        reductions = B * geo.G * geo.n_blocks * parts
        _finish_kernel[(reductions + tiles * B * geo.G,)](
            pair_dq, part_blocks, part_grad_q, items, index.starts, sums, part_grad_k, part_grad_v,
            T, geo.T, geo.G, geo.n_blocks, piece.t0, *grad_q.stride()[:2], tiles, reductions, parts,
            FIRST=first, LAST=last, CHUNK=chunk, ROWS=rows, TILE=REDUCE_TILE, DEPTH=4, **geo.constants(),
            num_warps=4,
        )  # fmt: skip


def _keep(ctx, inputs, output) -> None:
    q, k, v, blocks, l_sel, _ = inputs
    out, lse = output
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, out, lse, blocks)
    ctx.l_sel = l_sel


def _differentiate(ctx, grad_out, grad_lse):
    q, k, v, out, lse, blocks = ctx.saved_tensors
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    return *_selected_bwd(grad_out, grad_lse, q, k, v, out, lse, blocks, ctx.l_sel), None, None, None


torch.library.register_autograd("nsa_lab::selected_fwd", _differentiate, setup_context=_keep)
