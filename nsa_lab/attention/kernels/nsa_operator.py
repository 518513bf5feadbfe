"""All of NSA as one operator: three branches, block selection and the gate (arXiv 2502.11089, eq. 5).

The results are equal to calling the parts one by one. The operator saves work between the parts:

* one call of PyTorch's dispatcher and one autograd node instead of five;
* the backward pass of the gate also computes sum(out * d_out) of each branch, for which the branch would read two tensors;
* the three gradients of q are accumulated into one tensor;
* the inverted index of the selected branch is built once, and saved for the backward pass (4 bytes per selected block);
* kernels that do not depend on each other run concurrently.
"""

# The functions of torch.library have no type annotations.
# pyright: reportUnknownMemberType=false, reportUntypedFunctionDecorator=false
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nsa_lab.attention.kernels import block_topk, gating
from nsa_lab.attention.kernels.band import launch as band
from nsa_lab.attention.kernels.launch_utils import (
    check_no_chunk_gradients,
    make_rows_contiguous,
    register_autograd,
    run_on_second_stream,
)
from nsa_lab.attention.kernels.parallel_compile import compile_before_first_call
from nsa_lab.attention.kernels.selected import launch as selected
from nsa_lab.attention.kernels.selected.inverted_index import IndexSizes, InvertedIndex
from nsa_lab.config import NSAConfig


# fmt: off
def nsa_attention(
    q: Tensor, k_cmp: Tensor, v_cmp: Tensor, k_sel: Tensor, v_sel: Tensor, k_win: Tensor, v_win: Tensor, gates: Tensor,
    nsa: NSAConfig, chosen: Tensor | None = None, documents: Tensor | None = None, longest: int = 0, first: int = 0,
) -> Tensor:
    """Return the output of NSA, [B, T, H, Dv].

    Args:
        q: [B, T, H, Dk].
        k_cmp, v_cmp: compressed keys and values [B, N, G, .].
        k_sel, v_sel, k_win, v_win: [B, T, G, .].
        gates: [B, T, H, 3] in the order cmp, sel, win.
        chosen: int32 [B, T, G, n_sel], the blocks of the selected branch; None: select them by the compressed scores.
        documents: `Layout.bounds` of packed documents (B = 1), each computed independently; None: not packed.
        longest: upper bound of the tokens of a document.
        first: position of query 0; keys start at position 0. If it is not 0, there is no backward pass.

    Raises:
        NotImplementedError: more pairs than the selected branch can number.
    """
    selected.check_pairs(q, k_sel, v_sel, nsa.n_sel, nsa.l_sel)
    geometry = nsa.l, nsa.d, nsa.l_sel, nsa.n_sel, nsa.w
    return _nsa_fwd(q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates, *geometry, chosen, documents, longest, first)[0]
# fmt: on


_INPUT_SCHEMA = "Tensor q, Tensor k_cmp, Tensor v_cmp, Tensor k_sel, Tensor v_sel, Tensor k_win, Tensor v_win, Tensor gates"
_SAVED_SCHEMA = (
    "Tensor out_cmp, Tensor lse_cmp, Tensor blocks, Tensor out_sel, Tensor lse_sel, Tensor entries, Tensor starts, "
    "Tensor work, Tensor order, Tensor out_win, Tensor lse_win"
)
_OPTION_SCHEMA = "Tensor? chosen=None, Tensor? documents=None, int longest=0"
# Defined by schema to save host time; see selected/launch.py for the measurement.
torch.library.define(
    "nsa_lab::nsa_fwd",
    f"({_INPUT_SCHEMA}, int l, int d, int l_sel, int n_sel, int w, {_OPTION_SCHEMA}, int first=0)"
    f" -> ({', '.join(['Tensor'] * 12)})",
    tags=(torch.Tag.pt2_compliant_tag,),
)
torch.library.define(
    "nsa_lab::nsa_bwd",
    f"(Tensor do, {_INPUT_SCHEMA}, {_SAVED_SCHEMA}, int l, int d, int l_sel, int w, {_OPTION_SCHEMA})"
    f" -> ({', '.join(['Tensor'] * 8)})",
    tags=(torch.Tag.pt2_compliant_tag,),
)
# An operator has a fixed number of outputs, so the inverted indices of all pieces are concatenated, field by field.
_INDEX_DTYPES = torch.int32, torch.int64, torch.int32, torch.int64


def _join_indices(indices: list[InvertedIndex], like: Tensor) -> list[Tensor]:
    fields: list[Tensor] = []
    for index_field, dtype in enumerate(_INDEX_DTYPES):
        field_parts = [part for index in indices if (part := index[index_field]) is not None]
        match len(field_parts):
            case 0:
                fields.append(like.new_empty(0, dtype=dtype))
            case 1:
                fields += field_parts
            case _:
                fields.append(torch.cat(field_parts))
    return fields


def _split_indices(fields: Sequence[Tensor], sizes: list[IndexSizes]) -> list[InvertedIndex]:
    indices: list[InvertedIndex] = []
    ends = [0] * len(fields)
    for lengths in sizes:
        entries, starts, work, order = (field[end : end + n] for field, end, n in zip(fields, ends, lengths, strict=True))
        indices.append(InvertedIndex(entries, starts, work, order if order.numel() else None))
        ends = [end + n for end, n in zip(ends, lengths, strict=True)]
    return indices


_nsa_fwd = torch.ops.nsa_lab.nsa_fwd.default
_nsa_bwd = torch.ops.nsa_lab.nsa_bwd.default


# fmt: off
@torch.library.impl("nsa_lab::nsa_fwd", ("cpu", "cuda"))
@compile_before_first_call
def _(
    q: Tensor, k_cmp: Tensor, v_cmp: Tensor, k_sel: Tensor, v_sel: Tensor, k_win: Tensor, v_win: Tensor, gates: Tensor,
    l: int, d: int, l_sel: int, n_sel: int, w: int, chosen: Tensor | None = None, documents: Tensor | None = None,
    longest: int = 0, first: int = 0,
) -> tuple[Tensor, ...]:
    layout = documents, longest, first
    out_cmp, lse_cmp = band.forward(q, k_cmp, v_cmp, l, d, 0, *layout)
    blocks = block_topk.forward(q, k_cmp, lse_cmp, l, d, l_sel, n_sel, *layout) if chosen is None else chosen
    strategy = selected.get_forward_strategy(longest or k_sel.shape[1], selected.get_kernel_block(k_sel, v_sel, l_sel))
    out_sel, lse_sel, indices = selected.forward(q, k_sel, v_sel, blocks, l_sel, strategy, *layout)
    index = _join_indices(indices, blocks)
    # An operator must not return its inputs: blocks that the caller passed are saved as an input instead.
    saved = blocks if chosen is None else blocks.new_empty(0)
    out_win, lse_win = band.forward(q, k_win, v_win, 1, 1, w, *layout)
    out = gating.forward(out_cmp, out_sel, out_win, gates)
    return out, out_cmp, lse_cmp, saved, out_sel, lse_sel, *index, out_win, lse_win


@torch.library.register_fake("nsa_lab::nsa_fwd")
def _(
    q: Tensor, k_cmp: Tensor, v_cmp: Tensor, k_sel: Tensor, v_sel: Tensor, k_win: Tensor, v_win: Tensor, gates: Tensor,
    l: int, d: int, l_sel: int, n_sel: int, w: int, chosen: Tensor | None = None, documents: Tensor | None = None,
    longest: int = 0, first: int = 0,
) -> tuple[Tensor, ...]:
    out, lse = q.new_empty(*q.shape[:3], v_cmp.shape[3]), q.new_empty(q.shape[:3], dtype=torch.float32)
    shape = (q.shape[0], q.shape[1], k_cmp.shape[2], n_sel) if chosen is None else (0,)
    blocks = q.new_empty(shape, dtype=torch.int32)
    strategy = selected.get_forward_strategy(longest or k_sel.shape[1], selected.get_kernel_block(k_sel, v_sel, l_sel))
    sizes = selected.get_saved_index_sizes(q, v_sel, n_sel, l_sel, strategy, documents, first)
    index = [blocks.new_empty(sum(s[i] for s in sizes), dtype=dtype) for i, dtype in enumerate(_INDEX_DTYPES)]
    like = torch.empty_like
    return out, like(out), lse, blocks, like(out), like(lse), *index, like(out), like(lse)


@torch.library.impl("nsa_lab::nsa_bwd", ("cpu", "cuda"))
@compile_before_first_call
def _(
    do: Tensor,
    q: Tensor, k_cmp: Tensor, v_cmp: Tensor, k_sel: Tensor, v_sel: Tensor, k_win: Tensor, v_win: Tensor, gates: Tensor,
    out_cmp: Tensor, lse_cmp: Tensor, blocks: Tensor, out_sel: Tensor, lse_sel: Tensor,
    entries: Tensor, starts: Tensor, work: Tensor, order: Tensor, out_win: Tensor, lse_win: Tensor,
    l: int, d: int, l_sel: int, w: int, chosen: Tensor | None = None, documents: Tensor | None = None, longest: int = 0,
) -> tuple[Tensor, ...]:
    blocks = blocks if chosen is None else chosen
    deltas = q.new_empty(3, *q.shape[:3], dtype=torch.float32)
    d_cmp, d_sel, d_win, dgates = gating.backward(do, out_cmp, out_sel, out_win, gates, deltas)
    dq = q.new_empty(q.shape)
    q, k_cmp, v_cmp, k_win, v_win = map(make_rows_contiguous, (q, k_cmp, v_cmp, k_win, v_win))
    cmp, win = (l, d, 0, documents, longest), (1, 1, w, documents, longest)
    stats_cmp = band.compute_dq(d_cmp, q, k_cmp, v_cmp, lse_cmp, dq, *cmp, delta=deltas[0])
    stats_win = band.compute_dq(d_win, q, k_win, v_win, lse_win, dq, *win, delta=deltas[2], add=True)
    # Concurrently with the selected branch, whose sums are memory-bound. Each also fills multiprocessors that the last
    # programs of the other leave idle.
    with run_on_second_stream(q.device) as join:
        dkv_cmp = band.compute_dkv(d_cmp, q, k_cmp, v_cmp, stats_cmp, *cmp)
        dkv_win = band.compute_dkv(d_win, q, k_win, v_win, stats_win, *win)
    strategy = selected.get_forward_strategy(longest or q.shape[1], selected.get_kernel_block(k_sel, v_sel, l_sel))
    sizes = selected.get_saved_index_sizes(q, v_sel, blocks.shape[3], l_sel, strategy, documents)
    saved = _split_indices((entries, starts, work, order), sizes)
    dkv_sel = selected.backward(
        d_sel, deltas[1], q, k_sel, v_sel, lse_sel, blocks, l_sel, dq, documents, add=True, indices=saved
    )
    join()
    return dq, *dkv_cmp, *dkv_sel, *dkv_win, dgates


@torch.library.register_fake("nsa_lab::nsa_bwd")
def _(
    do: Tensor,
    q: Tensor, k_cmp: Tensor, v_cmp: Tensor, k_sel: Tensor, v_sel: Tensor, k_win: Tensor, v_win: Tensor, gates: Tensor,
    *_: Any,
) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in (q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates))
# fmt: on


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, l, d, l_sel, _, w, chosen, documents, longest, ctx.first = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, *output[1:], chosen, documents)
    ctx.geometry, ctx.longest = (l, d, l_sel, w), longest


def _autograd_backward(ctx: Any, do: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if do is None:
        return (None,) * 17
    check_no_chunk_gradients(ctx.first)
    *saved, chosen, documents = ctx.saved_tensors
    return *_nsa_bwd(do, *saved, *ctx.geometry, chosen, documents, ctx.longest), *(None,) * 9


register_autograd("nsa_fwd", _autograd_backward, _setup_context)
