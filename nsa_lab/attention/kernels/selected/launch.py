"""The operators of the selected branch, and the launches of its kernels.

The operators are `nsa_lab::selected_fwd`, `nsa_lab::selected_bwd` and, for chunks, `nsa_lab::selected_chunk_bwd`. q, k, v,
out, lse and blocks are saved for the backward pass. The inverted indices are rebuilt there, unless the caller passes them,
as nsa_operator.py does.
"""

# The functions of torch.library have no type annotations.
# pyright: reportUnknownMemberType=false, reportUntypedFunctionDecorator=false
from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nsa_lab.attention.kernels import launch_table
from nsa_lab.attention.kernels.kernel_names import LOG2E
from nsa_lab.attention.kernels.launch_utils import (
    ceil_div,
    get_strides,
    make_rows_contiguous,
    padded_width,
    register_autograd,
)
from nsa_lab.attention.kernels.packed_tiles import TOKEN_ROW, count_tiles, split_bounds
from nsa_lab.attention.kernels.selected.backward import nsa_selected_backward, nsa_selected_delta, nsa_selected_sum
from nsa_lab.attention.kernels.selected.forward import nsa_selected_gather, nsa_selected_merge, nsa_selected_union
from nsa_lab.attention.kernels.selected.inverted_index import (
    IndexSizes,
    InvertedIndex,
    build_inverted_index,
    compute_index_sizes,
    globalize_blocks,
)
from nsa_lab.attention.kernels.selected.workspace_pieces import (
    Piece,
    Sizes,
    compute_item_entries,
    should_sort_items,
    split_into_pieces,
)

UNION_BLOCKS = 128  # the union kernel stores the selection of a query in two 64-bit words
UNION_TOKENS = 4096  # up to this length, the union of a tile's blocks costs less than the traffic of partial outputs


def selected_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: Tensor,
    l_sel: int,
    documents: Tensor | None = None,
    longest: int = 0,
    first: int = 0,
) -> tuple[Tensor, Tensor]:
    """Compute attention to the selected blocks.

    Args:
        q: [B, T, H, Dk]. q, k and v may have any strides; a last stride of 1 avoids a copy.
        k: [B, T, G, Dk]; G divides H, head n belongs to group n // (H / G).
        v: [B, T, G, Dv].
        blocks: int32 [B, T, G, n_sel], ascending and distinct along n_sel, padded with −1. A block that starts after
            its query counts as −1.
        l_sel: tokens of a block.
        documents: `Layout.bounds` of packed documents (B = 1), each computed independently; block indices are local to a
            document. None: not packed.
        longest: upper bound of the tokens of a document.
        first: position of query 0; keys start at position 0.

    Returns:
        out [B, T, H, Dv] in q's dtype and lse float32 [B, T, H] (natural log). A query without blocks gets 0,
        −inf and zero gradients. Both are differentiable with respect to q, k and v, not to the selection.

    Raises:
        NotImplementedError: more (query, block, head) triples than the kernels can number.
    """
    check_pairs(q, k, v, blocks.shape[3], l_sel)
    strategy = get_forward_strategy(longest or k.shape[1], get_kernel_block(k, v, l_sel))
    out, lse = _selected_fwd(q, k, v, blocks, l_sel, strategy, documents, longest, first)
    return out, lse


def check_pairs(q: Tensor, k: Tensor, v: Tensor, n_sel: int, l_sel: int) -> None:
    """Raise NotImplementedError if a group has more pairs than 31 bits can number."""
    T, heads = q.shape[1], q.shape[2] // k.shape[2]
    slots = n_sel * (l_sel // get_kernel_block(k, v, l_sel))
    if T * slots * heads >= 2**31:
        raise NotImplementedError(
            "selected_attention: the Triton kernels number (query, block, head) triples of a group in 31 bits; got "
            f"{T} x {slots} x {heads}; at most {(2**31 - 1) // (slots * heads)} queries are possible with these blocks and "
            "heads; split the sequence, or split the heads into more groups"
        )


def get_forward_strategy(T: int, block: int) -> str:
    """Return "union" or "gather". `block` is the result of `get_kernel_block`."""
    return "union" if T <= UNION_TOKENS and ceil_div(T, block) <= UNION_BLOCKS else "gather"


def get_kernel_block(k: Tensor, v: Tensor, l_sel: int) -> int:
    """Return the block size of the kernels: l_sel if it fits in a tile, otherwise its divisor that best fills a tile.

    Tiles are padded to powers of two. Tiles of 128 keys spill registers in the backward pass; two of 64 keys do not.
    """
    max_keys = launch_table.selected_keys(k.dtype, max(k.shape[3], v.shape[3]), k.device)
    if l_sel <= max_keys:
        return l_sel
    divisors = [size for size in range(16, max_keys + 1, 16) if l_sel % size == 0]
    return max(divisors, key=lambda size: (size / padded_width(size), size))


def _split_blocks(blocks: Tensor, l_sel: int, size: int) -> Tensor:
    """Return the selection in blocks of `size` tokens, contiguous."""
    if size == l_sel:
        return blocks.contiguous()
    ratio = l_sel // size
    sub_block = torch.arange(ratio, dtype=torch.int32, device=blocks.device)
    split = torch.where(blocks[..., None] >= 0, blocks[..., None] * ratio + sub_block, -1)
    return split.flatten(-2).contiguous()


def _make_sizes(q: Tensor, v: Tensor, n_sel: int, block: int, documents: int | None = None, first: int = 0) -> Sizes:
    B, T, H, dk = q.shape
    return Sizes(B, T, H, v.shape[2], n_sel, block, dk, v.shape[3], documents, first)


def _build_index(blocks: Tensor, sizes: Sizes, piece: Piece, element_size: int, bounds: Tensor | None) -> InvertedIndex:
    """Build the inverted index of a piece of the selection."""
    ordered = should_sort_items(sizes, blocks.shape[1], element_size)
    entries = compute_item_entries(sizes, element_size)
    return build_inverted_index(
        blocks, sizes.block, entries, sizes.n_blocks, sizes.first_query + piece.t0, sort_items=ordered, bounds=bounds
    )


def get_saved_index_sizes(
    q: Tensor, v: Tensor, n_sel: int, l_sel: int, strategy: str, documents: Tensor | None = None, first: int = 0
) -> list[IndexSizes]:
    """Return the sizes of the indices that `forward` returns for `backward`, one per piece; the union needs none."""
    if strategy == "union":
        return []
    block = get_kernel_block(q, v, l_sel)
    _, _, n_documents = split_bounds(documents, TOKEN_ROW)
    sizes, element_size = _make_sizes(q, v, n_sel * (l_sel // block), block, n_documents, first), q.element_size()
    saved_sizes: list[IndexSizes] = []
    for piece in split_into_pieces(sizes, element_size):
        rows, queries = (piece.b1 - piece.b0) * (piece.g1 - piece.g0), piece.t1 - piece.t0
        ordered, entries = should_sort_items(sizes, queries, element_size), compute_item_entries(sizes, element_size)
        saved_sizes.append(compute_index_sizes(rows, queries, sizes.n_blocks, sizes.n_sel, entries, sort_items=ordered))
    return saved_sizes


def needs_int64_offsets(sizes: Sizes, queries: int, width: int, *tensors: Tensor) -> bool:
    """Return True if offsets in a sequence of `tensors`, or in the pairs of a group, exceed 32 bits."""
    rows = max((sizes.n_keys - 1) * abs(x.stride(1)) + sizes.H * abs(x.stride(2)) for x in tensors)
    return max(rows, queries * sizes.n_sel * sizes.heads * width) >= 2**31 - 2**10


def _split_scale(scale: float) -> tuple[float, float]:
    """Return (a power of two, by which v can be multiplied without rounding; the remaining factor of the scale)."""
    power = 2.0 ** (math.frexp(scale)[1] - 1)
    return power, scale / power


# Defined by schema and not with `torch.library.custom_op`: its wrapper takes 0.3 ms of host time per call, as much as these
# kernels take on the device at 2048 tokens.
torch.library.define(
    "nsa_lab::selected_fwd",
    "(Tensor q, Tensor k, Tensor v, Tensor blocks, int l_sel, str strategy, Tensor? documents=None, int longest=0,"
    " int first=0) -> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
torch.library.define(
    "nsa_lab::selected_bwd",
    "(Tensor do, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor blocks, int l_sel,"
    " Tensor? documents=None, int longest=0) -> (Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
# The backward pass of a chunk, whose queries begin at position `first`.
torch.library.define(
    "nsa_lab::selected_chunk_bwd",
    "(Tensor do, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor blocks, int l_sel,"
    " Tensor? documents, int longest, int first) -> (Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_selected_fwd = torch.ops.nsa_lab.selected_fwd.default
_selected_bwd = torch.ops.nsa_lab.selected_bwd.default
_selected_chunk_bwd = torch.ops.nsa_lab.selected_chunk_bwd.default


# fmt: off
def forward(
    q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, l_sel: int, strategy: str,
    documents: Tensor | None = None, longest: int = 0, first: int = 0,
) -> tuple[Tensor, Tensor, list[InvertedIndex]]:
    """Compute `selected_attention` without PyTorch's dispatcher. Also return the indices, which `backward` can use."""
    q, k, v = map(make_rows_contiguous, (q, k, v))
    block = get_kernel_block(k, v, l_sel)
    blocks = _split_blocks(blocks, l_sel, block)
    bounds, _, n_documents = split_bounds(documents, TOKEN_ROW)
    sizes = _make_sizes(q, v, blocks.shape[3], block, n_documents, first)
    out = q.new_empty(sizes.B, sizes.T, sizes.H, sizes.dv)
    lse = q.new_empty(sizes.B, sizes.T, sizes.H, dtype=torch.float32)
    if strategy == "union":
        _forward_union(q, k, v, blocks, out, lse, sizes, bounds, longest or k.shape[1])
        return out, lse, []
    blocks = _globalize_if_packed(blocks, block, bounds)
    return out, lse, _forward_gather(q, k, v, blocks, out, lse, sizes, bounds)


def _globalize_if_packed(blocks: Tensor, block: int, bounds: Tensor | None) -> Tensor:
    """Return the selection in the numbering of the inverted index."""
    return blocks if bounds is None else globalize_blocks(blocks, block, bounds)


@torch.library.impl("nsa_lab::selected_fwd", ("cpu", "cuda"))
def _(
    q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, l_sel: int, strategy: str,
    documents: Tensor | None = None, longest: int = 0, first: int = 0,
) -> tuple[Tensor, Tensor]:
    return forward(q, k, v, blocks, l_sel, strategy, documents, longest, first)[:2]
# fmt: on


@torch.library.register_fake("nsa_lab::selected_fwd")
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3], dtype=torch.float32)


# fmt: off
def _forward_union(
    q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, out: Tensor, lse: Tensor, sizes: Sizes, bounds: Tensor | None,
    longest: int,
) -> None:
    tile = launch_table.selected_union(q.dtype, max(sizes.dk, sizes.dv))
    tiles = count_tiles(sizes.T * sizes.heads, tile.rows, sizes.n_documents)
    n_blocks = ceil_div(longest, sizes.block)  # that a query can select from
    # A tile of consecutive rows that starts inside a query overlaps one more query than fit into it.
    queries = (tile.rows + sizes.heads - 2) // sizes.heads + 1
    nsa_selected_union[(tiles * sizes.B * sizes.G,)](
        q, k, v, blocks, out, lse, bounds,
        sizes.T, sizes.G, sizes.n_documents, sizes.first_query or None,
        *get_strides(q, k, v), *out.stride()[:2], *lse.stride()[:2],
        sizes.scale * LOG2E, tiles,
        N_SEL_PAD=padded_width(sizes.n_sel), QUERIES_PAD=padded_width(queries),
        WORDS=ceil_div(n_blocks, 64), BITS=32 if n_blocks <= 32 else 64,
        **sizes.get_constants(), **sizes.get_width_parts(q.device), ROWS=tile.rows, **tile.compile_options(),
    )


def _forward_gather(
    q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, out: Tensor, lse: Tensor, sizes: Sizes, bounds: Tensor | None
) -> list[InvertedIndex]:
    """Fill out and lse, and return the index of every piece. `blocks` is a result of `_globalize_if_packed`."""
    tile = launch_table.selected_items(q.dtype, max(sizes.dk, sizes.dv), sizes.block, q.device)
    merge_rows = launch_table.streaming_rows(sizes.dv)
    indices: list[InvertedIndex] = []
    for piece in split_into_pieces(sizes, q.element_size()):
        part_q, part_out, part_lse = (piece.slice_queries(x, sizes.heads) for x in (q, out, lse))
        part_blocks = piece.slice_queries(blocks).contiguous()
        B, T, G = part_blocks.shape[:3]
        index = _build_index(part_blocks, sizes, piece, q.element_size(), bounds)
        indices.append(index)
        pairs = B * G * T * sizes.n_sel * sizes.heads
        pair_out = q.new_empty(pairs * sizes.dv)
        pair_lse = q.new_empty(pairs, dtype=torch.float32)
        nsa_selected_gather[(index.work.numel(),)](
            part_q, piece.slice_keys(k), piece.slice_keys(v), *index, pair_out, pair_lse, bounds,
            T, sizes.n_keys, G, sizes.n_blocks, sizes.first_query + piece.t0, sizes.n_documents,
            *get_strides(q, k, v),
            sizes.scale * LOG2E,
            WIDE=needs_int64_offsets(sizes, T, sizes.dv, q), ITEM_ENTRIES=compute_item_entries(sizes, q.element_size()),
            **sizes.get_constants(), **sizes.get_width_parts(q.device), ROWS=tile.rows, **tile.compile_options(),
        )
        tiles = ceil_div(T * sizes.heads, merge_rows)
        nsa_selected_merge[(tiles * B * G,)](
            pair_out, pair_lse, part_blocks, part_out, part_lse,
            T, G, sizes.first_query + piece.t0,
            *out.stride()[:2], *lse.stride()[:2],
            tiles,
            HEADS=sizes.heads, N_SEL=sizes.n_sel, BLOCK=sizes.block if bounds is None else 0,
            DV=sizes.dv, DV_PAD=padded_width(sizes.dv),
            ROWS=merge_rows, AT_ONCE=launch_table.slots_at_once(sizes.n_sel), num_warps=launch_table.STREAMING_WARPS,
        )
    return indices


def _compute_backward(
    do: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, blocks: Tensor,
    l_sel: int, documents: Tensor | None = None, longest: int = 0, first: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    do = make_rows_contiguous(do)
    dq = q.new_empty(q.shape)
    delta = compute_delta(out, do, dlse)
    return dq, *backward(do, delta, q, k, v, lse, blocks, l_sel, dq, documents, first, add=False)


for _name in ("selected_bwd", "selected_chunk_bwd"):
    torch.library.impl(f"nsa_lab::{_name}", ("cpu", "cuda"), _compute_backward)


def backward(
    do: Tensor, delta: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, blocks: Tensor, l_sel: int, dq: Tensor,
    documents: Tensor | None = None, first: int = 0, *, add: bool, indices: Sequence[InvertedIndex] = (),
) -> tuple[Tensor, Tensor]:
    """Return dk and dv. The gradient of q is written to the contiguous `dq`, or added to it.

    `delta` is sum(out * do) - dlse, float32 [B, T, H]. `indices`: those that `forward` returned; (): build them again.
    """
    q, k, v, do = map(make_rows_contiguous, (q, k, v, do))
    bounds, _, _ = split_bounds(documents, TOKEN_ROW)
    block = get_kernel_block(k, v, l_sel)
    blocks = _globalize_if_packed(_split_blocks(blocks, l_sel, block), block, bounds)
    dk, dv = k.new_empty(k.shape), v.new_empty(v.shape)
    _launch_backward(q, k, v, do, lse.contiguous(), delta, blocks, dq, dk, dv, block, add, indices, bounds, first)
    return dk, dv


@torch.library.register_fake("nsa_lab::selected_bwd")
@torch.library.register_fake("nsa_lab::selected_chunk_bwd")
def _(do: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def compute_delta(out: Tensor, do: Tensor, dlse: Tensor | None) -> Tensor:
    """Return sum(out * do) - dlse, float32 [B, T, H]."""
    out = make_rows_contiguous(out)
    B, T, H, dv = out.shape
    n_rows, tile_rows = B * T * H, launch_table.DELTA_ROWS
    delta = out.new_empty(B, T, H, dtype=torch.float32)
    nsa_selected_delta[(ceil_div(n_rows, tile_rows),)](
        out, do, None if dlse is None else dlse.contiguous(), delta,
        n_rows, T, H,
        *get_strides(out, do),
        HAS_DLSE=dlse is not None, DV=dv, DV_PAD=padded_width(dv), ROWS=tile_rows, num_warps=launch_table.STREAMING_WARPS,
    )
    return delta


def _launch_backward(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, lse: Tensor, delta: Tensor, blocks: Tensor,
    dq: Tensor, dk: Tensor, dv: Tensor, block: int, add: bool, indices: Sequence[InvertedIndex],
    bounds: Tensor | None, first_query: int,
) -> None:
    n_documents = None if bounds is None else len(bounds) - 1
    sizes, element_size = _make_sizes(q, v, blocks.shape[3], block, n_documents, first_query), q.element_size()
    tile = launch_table.selected_items(q.dtype, max(sizes.dk, sizes.dv), sizes.block, q.device)
    sum_rows, sum_elements = launch_table.streaming_rows(sizes.dk), launch_table.SUM_ITEMS_ELEMENTS
    item = sizes.block * (sizes.dk + sizes.dv)
    parts = ceil_div(item, sum_elements)
    entries = compute_item_entries(sizes, element_size)
    columns = launch_table.selected_columns(q.dtype, max(sizes.dk, sizes.dv))
    # Not in float16, where an eighth of a small value can be subnormal.
    is_v_scaled = q.dtype != torch.float16
    scale_ds, scale_dk = _split_scale(sizes.scale) if is_v_scaled else (sizes.scale, sizes.scale)
    pieces = split_into_pieces(sizes, element_size)
    all_sums = _allocate_sums(q, sizes, pieces)
    for number, piece in enumerate(pieces):
        part_q, part_do, part_lse, part_delta, part_dq = (
            piece.slice_queries(x, sizes.heads) for x in (q, do, lse, delta, dq)
        )
        part_k, part_v, part_dk, part_dv = (piece.slice_keys(x) for x in (k, v, dk, dv))
        part_blocks = piece.slice_queries(blocks).contiguous()
        B, T, G = part_blocks.shape[:3]
        first, last = piece.t0 == 0, piece.t1 == sizes.T
        sums = None if all_sums is None else all_sums[piece.g0 % all_sums.shape[0] :]
        index = indices[number] if indices else _build_index(part_blocks, sizes, piece, element_size, bounds)
        pair_dq = q.new_empty(B * G * T * sizes.n_sel * sizes.heads * sizes.dk)
        item_dkv = q.new_empty(index.work.numel() * item, dtype=torch.float32)
        nsa_selected_backward[(index.work.numel(),)](
            part_q, part_k, part_v, part_do, part_lse, part_delta, *index, pair_dq, item_dkv, part_dk, part_dv, bounds,
            T, sizes.n_keys, G, sizes.G, sizes.n_blocks, sizes.first_query + piece.t0, sizes.n_documents,
            *get_strides(q, k, v, do), *lse.stride()[:2],
            scale_ds, scale_dk, sizes.scale * LOG2E,
            ONE_PIECE=first and last, WIDE=needs_int64_offsets(sizes, T, sizes.dk, q, do), SCALED_V=is_v_scaled,
            ITEM_ENTRIES=entries,
            **sizes.get_constants(), **sizes.get_width_parts(q.device, columns), ROWS=tile.rows, **tile.compile_options(),
        )
        tiles = ceil_div(T * sizes.heads, sum_rows)
        reductions = B * G * sizes.n_blocks * parts
        nsa_selected_sum[(reductions + tiles * B * G,)](
            pair_dq, part_blocks, part_dq, item_dkv, index.starts, sums, part_dk, part_dv, bounds,
            T, sizes.n_keys, G, sizes.G, sizes.n_blocks, sizes.first_query + piece.t0, sizes.n_documents,
            *dq.stride()[:2],
            scale_dk if is_v_scaled else 1.0, tiles, reductions, parts,
            FIRST=first, LAST=last, ADD=add, ITEM_ENTRIES=entries, ROWS=sum_rows, ELEMENTS=sum_elements,
            ITEMS_AT_ONCE=launch_table.SUM_ITEMS_AT_ONCE, SLOTS_AT_ONCE=launch_table.slots_at_once(sizes.n_sel),
            **sizes.get_constants(), DK_PAD=padded_width(sizes.dk), num_warps=launch_table.STREAMING_WARPS,
        )
# fmt: on


def _allocate_sums(q: Tensor, sizes: Sizes, pieces: list[Piece]) -> Tensor | None:
    """Allocate the float32 sums of dk and dv that one part of a group's queries passes to the next; None if no group is
    split.

    [groups whose sums are in use at the same time, elements]: all groups, if one piece continues the sums of several.
    """
    partial_groups = [piece for piece in pieces if piece.t1 - piece.t0 < sizes.T]
    if not partial_groups:
        return None
    n_alive = sizes.G if any(piece.g1 - piece.g0 > 1 for piece in partial_groups) else 1
    return q.new_empty(n_alive, sizes.n_blocks * sizes.block * (sizes.dk + sizes.dv), dtype=torch.float32)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, blocks, l_sel, _, documents, longest, ctx.first = inputs
    out, lse = output
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, out, lse, blocks, documents)
    ctx.l_sel, ctx.longest = l_sel, longest


def _autograd_backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse, blocks, documents = ctx.saved_tensors
    if do is None:
        do = torch.zeros_like(out)
    arguments = do, dlse, q, k, v, out, lse, blocks, ctx.l_sel, documents, ctx.longest
    grads = _selected_chunk_bwd(*arguments, ctx.first) if ctx.first else _selected_bwd(*arguments)
    return *grads, *(None,) * 6


register_autograd("selected_fwd", _autograd_backward, _setup_context)
