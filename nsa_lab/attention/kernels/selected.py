"""The selected branch in Triton: softmax attention of every query to the tokens <= t of the blocks it chose.

`selected_attention` is the one entry point. Two registered operators stand behind it, `nsa_lab::selected_fwd` and
`nsa_lab::selected_bwd`; what they launch is chosen from shapes alone, so nothing is read back from the device and a CUDA
graph can hold them. For the backward pass q, k, v, out, lse and blocks are kept; the inverted indices are built again,
unless the caller hands them over (whole.py does).

Source: arXiv 2502.11089, section 3.4 (kernel design), with the loop order turned round for groups of few heads.
"""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from nsa_lab.attention.kernels.common import ceil_div, check_attention_inputs, padded_width
from nsa_lab.attention.kernels.inverted_index import IndexSizes, InvertedIndex, build_inverted_index, index_sizes
from nsa_lab.attention.kernels.pieces import Geometry, Piece, chunk_entries, cut, is_ordered
from nsa_lab.attention.kernels.selected_backward import _backward_kernel, _delta_kernel, _finish_kernel
from nsa_lab.attention.kernels.selected_forward import LOG2_E, _gather_kernel, _merge_kernel, _union_kernel
from nsa_lab.config import NSAConfig

UNION_BLOCKS = 128  # the union kernel holds a query's choice in two 64-bit words
UNION_TOKENS = 4096  # up to here the union of a tile's blocks costs less than the traffic of partial outputs
REDUCE_TILE = 1024


class _Tuning(NamedTuple):
    rows: int
    warps: int
    stages: int


@functools.cache
def _is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def _tuning(kernel: str, dtype: torch.dtype, width: int, device: torch.device) -> _Tuning:
    """Tile heights and launch shapes, measured on one H200; on sm_8x each fits the 99 KB that the smaller of them have."""
    if dtype == torch.float32:
        return _Tuning(16 if width > 64 else 32, 4, 1)
    if width > 64:
        # The gathering kernels' third stage costs no memory on Hopper (see _gather_rows), a tile of it elsewhere.
        return _Tuning(64, 4, 3 if kernel != "union" and _is_hopper(device) else 2)
    return _Tuning(64, 4, 3)


def _merge_rows(width: int) -> int:
    """Rows a program of the kernels that only stream: as many as keep every slot's load in flight at once."""
    return 16 if width > 64 else 32


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
    check_attention_inputs("selected_attention", q, k, v, q.shape[1])
    B, T, G = k.shape[:3]
    if blocks.dim() != 4 or blocks.shape[:3] != (B, T, G) or blocks.dtype != torch.int32:
        raise ValueError(
            f"selected_attention: blocks must be int32 [{B}, {T}, {G}, n_sel], got {blocks.dtype} {list(blocks.shape)}"
        )
    check_limits(q, k, blocks.shape[3], nsa)
    return _selected_fwd(q, k, v, blocks, nsa.l_sel, forward_strategy(q.shape[1], nsa.l_sel))


def check_limits(q: Tensor, k: Tensor, n_sel: int, nsa: NSAConfig) -> None:
    """Raise NotImplementedError for sound inputs past a limit of these kernels."""
    if nsa.l_sel % 16:
        raise NotImplementedError(f"selected_attention: the Triton kernels take l_sel in multiples of 16, not {nsa.l_sel}")
    T, heads = q.shape[1], q.shape[2] // k.shape[2]
    slots = n_sel * (nsa.l_sel // _kernel_block(nsa.l_sel))
    if T * slots * heads >= 2**31:
        raise NotImplementedError(
            "selected_attention: the Triton kernels number (query, block, head) triples of a group in 31 bits, and "
            f"{T} x {slots} x {heads} is more; split the sequence or the heads"
        )


def forward_strategy(T: int, l_sel: int) -> str:
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


def _build_index(blocks: Tensor, geo: Geometry, piece: Piece, width: int) -> InvertedIndex:
    """Of a piece's part of the choice."""
    ordered = is_ordered(geo, blocks.shape[1], width)
    return build_inverted_index(blocks, geo.size, chunk_entries(geo, width), geo.n_blocks, piece.t0, ordered=ordered)


def kept_sizes(q: Tensor, v: Tensor, n_sel: int, l_sel: int, strategy: str) -> list[IndexSizes]:
    """Of the indices that `forward` gives to be kept for `backward`, one a piece; the union needs none."""
    if strategy == "union":
        return []
    B, T, H, dk = q.shape
    size = _kernel_block(l_sel)
    geo = Geometry(B, T, H, v.shape[2], n_sel * (l_sel // size), size, dk, v.shape[3])
    width = q.element_size()
    sizes = []
    for piece in cut(geo, width):
        rows, queries = (piece.b1 - piece.b0) * (piece.g1 - piece.g0), piece.t1 - piece.t0
        ordered = is_ordered(geo, queries, width)
        sizes.append(index_sizes(rows, queries, geo.n_blocks, geo.n_sel, chunk_entries(geo, width), ordered=ordered))
    return sizes


def _precision(dtype: torch.dtype) -> str:
    # float32 inputs ask for float32 products: tf32 would be a silent loss of 13 bits.
    return "ieee" if dtype == torch.float32 else "tf32"


def _is_wide(geo: Geometry, queries: int, width: int, *tensors: Tensor) -> bool:
    """Whether offsets inside one sequence of `tensors`, or of one group's pairs, pass 32 bits."""
    rows = max((geo.T - 1) * abs(x.stride(1)) + geo.H * abs(x.stride(2)) for x in tensors)
    return max(rows, queries * geo.n_sel * geo.heads * width) >= 2**31 - 2**10


def _split_scale(scale: float) -> tuple[float, float]:
    """A power of two, which V can carry without rounding, and the rest, with the scale as their product."""
    power = 2.0 ** (math.frexp(scale)[1] - 1)
    return power, scale / power


def _geometry(q: Tensor, v: Tensor, blocks: Tensor, size: int) -> Geometry:
    B, T, H, dk = q.shape
    return Geometry(B, T, H, v.shape[2], blocks.shape[3], size, dk, v.shape[3])


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


def forward(
    q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, l_sel: int, strategy: str
) -> tuple[Tensor, Tensor, list[InvertedIndex]]:
    """`selected_attention` itself, past its checks and PyTorch's dispatcher, and the indices that `backward` can use."""
    q, k, v = (_unit_stride(x) for x in (q, k, v))
    blocks, size = _split_blocks(blocks, l_sel)
    geo = _geometry(q, v, blocks, size)
    out = q.new_empty(geo.B, geo.T, geo.H, geo.dv)
    lse = q.new_empty(geo.B, geo.T, geo.H, dtype=torch.float32)
    with torch.cuda.device_of(q):
        if strategy == "union":
            _forward_union(q, k, v, blocks, out, lse, geo)
            return out, lse, []
        return out, lse, _forward_gather(q, k, v, blocks, out, lse, geo)


@torch.library.impl("nsa_lab::selected_fwd", ("cpu", "cuda"))
def _(q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, l_sel: int, strategy: str) -> tuple[Tensor, Tensor]:
    return forward(q, k, v, blocks, l_sel, strategy)[:2]


@torch.library.register_fake("nsa_lab::selected_fwd")
def _(q, k, v, blocks, l_sel, strategy):
    B, T, H, _ = q.shape
    return q.new_empty(B, T, H, v.shape[3]), q.new_empty(B, T, H, dtype=torch.float32)


def _forward_union(q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, out: Tensor, lse: Tensor, geo: Geometry) -> None:
    tuning = _tuning("union", q.dtype, max(geo.dk, geo.dv), q.device)
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


def _forward_gather(
    q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, out: Tensor, lse: Tensor, geo: Geometry
) -> list[InvertedIndex]:
    """Fills out and lse; the index of every piece."""
    tuning = _tuning("gather", q.dtype, max(geo.dk, geo.dv), q.device)
    indices = []
    for piece in cut(geo, q.element_size()):
        part_q, part_out, part_lse = (piece.of(x, geo.heads) for x in (q, out, lse))
        part_blocks = piece.of(blocks).contiguous()
        B, T, G = part_blocks.shape[:3]
        index = _build_index(part_blocks, geo, piece, q.element_size())
        indices.append(index)
        pairs = B * G * T * geo.n_sel * geo.heads
        pair_out = q.new_empty(pairs * geo.dv)
        pair_lse = q.new_empty(pairs, dtype=torch.float32)
        _gather_kernel[(index.work.numel(),)](
            part_q, piece.keys(k), piece.keys(v), *index, pair_out, pair_lse,
            T, geo.T, G, geo.n_blocks, piece.t0, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
            geo.scale * LOG2_E, WIDE=_is_wide(geo, T, geo.dv, q), CHUNK=chunk_entries(geo, q.element_size()),
            ROWS=tuning.rows, PRECISION=_precision(q.dtype), **geo.constants(),
            num_warps=tuning.warps, num_stages=tuning.stages,
        )  # fmt: skip
        rows = _merge_rows(geo.dv)
        tiles = ceil_div(T * geo.heads, rows)
        _merge_kernel[(tiles * B * G,)](
            pair_out, pair_lse, part_blocks, part_out, part_lse, T, G, piece.t0,
            *out.stride()[:2], *lse.stride()[:2], tiles, HEADS=geo.heads, N_SEL=geo.n_sel, SIZE=geo.size,
            DV=geo.dv, DV_PAD=padded_width(geo.dv), ROWS=rows, num_warps=4,
        )  # fmt: skip
    return indices


@torch.library.impl("nsa_lab::selected_bwd", ("cpu", "cuda"))
def _(
    grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    blocks: Tensor, l_sel: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    with torch.cuda.device_of(q):
        grad_out = _unit_stride(grad_out)
        grad_q = q.new_empty(q.shape)
        delta = _delta(out, grad_out, grad_lse)
        return grad_q, *backward(grad_out, delta, q, k, v, lse, blocks, l_sel, grad_q, add=False)


def backward(
    grad_out: Tensor, delta: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, blocks: Tensor, l_sel: int,
    grad_q: Tensor, *, add: bool, indices: Sequence[InvertedIndex] = (),
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """grad_k and grad_v; the gradient of q is written to the contiguous `grad_q`, or added to what is there.

    `delta` is sum(out * grad_out) - grad_lse, float32 [B, T, H]; `indices` what `forward` gave, if at hand.
    """
    q, k, v, grad_out = (_unit_stride(x) for x in (q, k, v, grad_out))
    blocks, size = _split_blocks(blocks, l_sel)
    geo = _geometry(q, v, blocks, size)
    grad_k = k.new_empty(k.shape)
    grad_v = v.new_empty(v.shape)
    _backward(q, k, v, grad_out, lse.contiguous(), delta, blocks, grad_q, grad_k, grad_v, geo, add, indices)
    return grad_k, grad_v


@torch.library.register_fake("nsa_lab::selected_bwd")
def _(grad_out, grad_lse, q, k, v, out, lse, blocks, l_sel):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _delta(out: Tensor, grad_out: Tensor, grad_lse: Tensor | None) -> Tensor:
    out = _unit_stride(out)
    B, T, H, dv = out.shape
    rows = B * T * H
    delta = out.new_empty(B, T, H, dtype=torch.float32)
    _delta_kernel[(ceil_div(rows, 64),)](
        out, grad_out, None if grad_lse is None else grad_lse.contiguous(), delta, rows, T, H,
        *out.stride()[:3], *grad_out.stride()[:3], HAS_GRAD_LSE=grad_lse is not None,
        DV=dv, DV_PAD=padded_width(dv), ROWS=64, num_warps=4,
    )  # fmt: skip
    return delta


def _backward(
    q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor, lse: Tensor, delta: Tensor, blocks: Tensor,
    grad_q: Tensor, grad_k: Tensor, grad_v: Tensor, geo: Geometry, add: bool, indices: Sequence[InvertedIndex],
) -> None:  # fmt: skip
    tuning = _tuning("backward", q.dtype, max(geo.dk, geo.dv), q.device)
    item = geo.size * (geo.dk + geo.dv)
    # Not in float16: an eighth of a small value may be subnormal there.
    scaled_v = q.dtype != torch.float16
    scale, rest = _split_scale(geo.scale) if scaled_v else (geo.scale, geo.scale)
    pieces = cut(geo, q.element_size())
    parts_of_groups = [p for p in pieces if p.t1 - p.t0 < geo.T]
    # Groups whose sums of dK and dV are alive at the same time: all, if a piece takes up what several left.
    held = geo.G if any(p.g1 - p.g0 > 1 for p in parts_of_groups) else 1
    all_sums = q.new_empty(held, geo.n_blocks * item, dtype=torch.float32) if parts_of_groups else None
    for number, piece in enumerate(pieces):
        part_q, part_grad, part_lse, part_delta, part_grad_q = (
            piece.of(x, geo.heads) for x in (q, grad_out, lse, delta, grad_q)
        )
        part_k, part_v, part_grad_k, part_grad_v = (piece.keys(x) for x in (k, v, grad_k, grad_v))
        part_blocks = piece.of(blocks).contiguous()
        B, T, G = part_blocks.shape[:3]
        first, last = piece.t0 == 0, piece.t1 == geo.T
        sums = None if all_sums is None else all_sums[piece.g0 % held :]
        chunk = chunk_entries(geo, q.element_size())
        index = indices[number] if indices else _build_index(part_blocks, geo, piece, q.element_size())
        pair_dq = q.new_empty(B * G * T * geo.n_sel * geo.heads * geo.dk)
        items = q.new_empty(index.work.numel() * item, dtype=torch.float32)
        _backward_kernel[(index.work.numel(),)](
            part_q, part_k, part_v, part_grad, part_lse, part_delta, *index, pair_dq, items, part_grad_k, part_grad_v,
            T, geo.T, G, geo.G, geo.n_blocks, piece.t0, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
            *grad_out.stride()[:3], *lse.stride()[:2], scale, rest, geo.scale * LOG2_E,
            WHOLE=first and last, WIDE=_is_wide(geo, T, geo.dk, q, grad_out), SCALED_V=scaled_v,
            CHUNK=chunk, ROWS=tuning.rows, PART=128 if q.dtype == torch.float32 else 64, PRECISION=_precision(q.dtype),
            **geo.constants(), num_warps=tuning.warps, num_stages=tuning.stages,
        )  # fmt: skip
        rows = _merge_rows(geo.dk)
        tiles = ceil_div(T * geo.heads, rows)
        parts = ceil_div(item, REDUCE_TILE)
        reductions = B * G * geo.n_blocks * parts
        _finish_kernel[(reductions + tiles * B * G,)](
            pair_dq, part_blocks, part_grad_q, items, index.starts, sums, part_grad_k, part_grad_v,
            T, geo.T, G, geo.G, geo.n_blocks, piece.t0, *grad_q.stride()[:2], rest if scaled_v else 1.0,
            tiles, reductions, parts,
            FIRST=first, LAST=last, ADD=add, CHUNK=chunk, ROWS=rows, TILE=REDUCE_TILE, DEPTH=4, **geo.constants(),
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
