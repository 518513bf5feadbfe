"""All of NSA as one operator: the branches, block selection and the gate (arXiv 2502.11089, eq. 5).

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
from nsa_lab.attention.kernels.block_topk import SelectionRule
from nsa_lab.attention.kernels.launch_utils import (
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
    q: Tensor, k_cmp: Tensor | None, v_cmp: Tensor | None, k_sel: Tensor | None, v_sel: Tensor | None,
    k_win: Tensor | None, v_win: Tensor | None, gates: Tensor | None, nsa: NSAConfig,
    chosen: Tensor | None = None, documents: Tensor | None = None, longest: int = 0, first: int = 0,
) -> Tensor:
    """Return the output of NSA, [B, T, H, Dv].

    Args:
        q: [B, T, H, Dk].
        k_cmp, v_cmp: compressed keys and values [B, N, G, .]. Keys and values of a branch that does not exist are None.
        k_sel, v_sel, k_win, v_win: [B, T, G, .].
        gates: [B, T, H, branches] in the order cmp, sel, win; None for a single branch.
        chosen: int32 [B, T, G, n_sel], the blocks of the selected branch; None: select them by the compressed scores.
        documents: `Layout.bounds` of packed documents (B = 1), each computed independently; None: not packed.
        longest: upper bound of the tokens of a document.
        first: position of query 0; keys start at position 0.

    Raises:
        NotImplementedError: more pairs than the selected branch can number.
    """
    if k_sel is not None and v_sel is not None:
        selected.check_pairs(q, k_sel, v_sel, nsa.n_sel, nsa.l_sel)
    geometry = nsa.l, nsa.d, nsa.l_sel, nsa.w, *SelectionRule.from_config(nsa)
    tensors = q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates
    return _branches_fwd(*tensors, *geometry, chosen, documents, longest, first)[0]
# fmt: on


_BRANCHES = ", ".join(f"Tensor {kind}_{branch}" for branch in ("cmp", "sel", "win") for kind in "kv")
_OPTIONAL_BRANCHES = _BRANCHES.replace("Tensor", "Tensor?")
_SAVED_SCHEMA = (
    "Tensor out_cmp, Tensor lse_cmp, Tensor blocks, Tensor out_sel, Tensor lse_sel, Tensor entries, Tensor starts, "
    "Tensor work, Tensor order, Tensor out_win, Tensor lse_win"
)
_OPTION_SCHEMA = "Tensor? chosen=None, Tensor? documents=None, int longest=0"
_RULE_SCHEMA = "int n_sel, int sink_blocks, int local_blocks, bool head_max, bool block_max"
# Defined by schema to save host time; see selected/launch.py for the measurement. The first two operators have all three
# branches and the paper's rule of selection.
_SCHEMAS = {
    "nsa_fwd": f"(Tensor q, {_BRANCHES}, Tensor gates, int l, int d, int l_sel, int n_sel, int w, {_OPTION_SCHEMA}, "
    f"int first=0) -> ({', '.join(['Tensor'] * 12)})",
    "nsa_bwd": f"(Tensor do, Tensor q, {_BRANCHES}, Tensor gates, {_SAVED_SCHEMA}, int l, int d, int l_sel, int w, "
    f"{_OPTION_SCHEMA}) -> ({', '.join(['Tensor'] * 8)})",
    "branches_fwd": f"(Tensor q, {_OPTIONAL_BRANCHES}, Tensor? gates, int l, int d, int l_sel, int w, {_RULE_SCHEMA}, "
    f"{_OPTION_SCHEMA}, int first=0) -> ({', '.join(['Tensor'] * 12)})",
    "branches_bwd": f"(Tensor do, Tensor q, {_OPTIONAL_BRANCHES}, Tensor? gates, Tensor out, {_SAVED_SCHEMA}, int l, "
    f"int d, int l_sel, int w, {_OPTION_SCHEMA}, int first=0) -> ({', '.join(['Tensor'] * 8)})",
}
for _name, _schema in _SCHEMAS.items():
    torch.library.define(f"nsa_lab::{_name}", _schema, tags=(torch.Tag.pt2_compliant_tag,))
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


_branches_fwd = torch.ops.nsa_lab.branches_fwd.default
_branches_bwd = torch.ops.nsa_lab.branches_bwd.default
_nsa_bwd = torch.ops.nsa_lab.nsa_bwd.default


# fmt: off
@compile_before_first_call
def _compute_forward(
    q: Tensor, k_cmp: Tensor | None, v_cmp: Tensor | None, k_sel: Tensor | None, v_sel: Tensor | None,
    k_win: Tensor | None, v_win: Tensor | None, gates: Tensor | None, l: int, d: int, l_sel: int, w: int,
    n_sel: int, sink_blocks: int, local_blocks: int, head_max: bool, block_max: bool,
    chosen: Tensor | None = None, documents: Tensor | None = None, longest: int = 0, first: int = 0,
) -> tuple[Tensor, ...]:
    """Return the output, and the tensors of `_SAVED_SCHEMA`. Those of branches that do not exist are empty."""
    layout = documents, longest, first
    # An operator must not return its inputs: blocks that the caller passed are saved as an input instead.
    saved_blocks = q.new_empty(0, dtype=torch.int32)
    outs, blocks, indices = dict[str, tuple[Tensor, Tensor]](), chosen, list[InvertedIndex]()
    if k_cmp is not None and v_cmp is not None:
        outs["cmp"] = band.forward(q, k_cmp, v_cmp, l, d, 0, *layout)
    if k_sel is not None and v_sel is not None:
        if blocks is None:
            assert k_cmp is not None, "the caller passes blocks if there is no compressed branch to select them"
            rule = SelectionRule(n_sel, sink_blocks, local_blocks, head_max, block_max)
            blocks = saved_blocks = block_topk.forward(q, k_cmp, outs["cmp"][1], l, d, l_sel, rule, *layout)
        strategy = selected.get_forward_strategy(longest or k_sel.shape[1], selected.get_kernel_block(k_sel, v_sel, l_sel))
        out_sel, lse_sel, indices = selected.forward(q, k_sel, v_sel, blocks, l_sel, strategy, *layout)
        outs["sel"] = out_sel, lse_sel
    if k_win is not None and v_win is not None:
        outs["win"] = band.forward(q, k_win, v_win, 1, 1, w, *layout)
    branch_outs = [out for out, _ in outs.values()]
    out = branch_outs[0] if gates is None else gating.forward(branch_outs, gates)

    def get_saved(name: str) -> tuple[Tensor, Tensor]:
        branch_out, lse = outs[name] if name in outs else (q.new_empty(0), q.new_empty(0, dtype=torch.float32))
        # The output of a single branch is the result, and an operator must not return a tensor twice.
        return branch_out if gates is not None else q.new_empty(0), lse

    return out, *get_saved("cmp"), saved_blocks, *get_saved("sel"), *_join_indices(indices, saved_blocks), *get_saved("win")


torch.library.impl("nsa_lab::branches_fwd", ("cpu", "cuda"), _compute_forward)


@torch.library.impl("nsa_lab::nsa_fwd", ("cpu", "cuda"))
def _(
    q: Tensor, k_cmp: Tensor, v_cmp: Tensor, k_sel: Tensor, v_sel: Tensor, k_win: Tensor, v_win: Tensor, gates: Tensor,
    l: int, d: int, l_sel: int, n_sel: int, w: int, chosen: Tensor | None = None, documents: Tensor | None = None,
    longest: int = 0, first: int = 0,
) -> tuple[Tensor, ...]:
    tensors, rule = (q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates), SelectionRule(n_sel)
    return _compute_forward(*tensors, l, d, l_sel, w, *rule, chosen, documents, longest, first)


def _fake_forward(
    q: Tensor, k_cmp: Tensor | None, v_cmp: Tensor | None, k_sel: Tensor | None, v_sel: Tensor | None,
    k_win: Tensor | None, v_win: Tensor | None, gates: Tensor | None, l: int, d: int, l_sel: int, w: int,
    n_sel: int, sink_blocks: int, local_blocks: int, head_max: bool, block_max: bool,
    chosen: Tensor | None = None, documents: Tensor | None = None, longest: int = 0, first: int = 0,
) -> tuple[Tensor, ...]:
    v = next(x for x in (v_cmp, v_sel, v_win) if x is not None)
    out_shape, lse_shape = (*q.shape[:3], v.shape[3]), q.shape[:3]
    block_shape, sizes = (0,), list[IndexSizes]()
    if k_sel is not None and v_sel is not None:
        if chosen is None:
            block_shape = (q.shape[0], q.shape[1], k_sel.shape[2], n_sel)
        strategy = selected.get_forward_strategy(longest or k_sel.shape[1], selected.get_kernel_block(k_sel, v_sel, l_sel))
        sizes = selected.get_saved_index_sizes(q, v_sel, n_sel, l_sel, strategy, documents, first)
    blocks = q.new_empty(block_shape, dtype=torch.int32)
    index = [blocks.new_empty(sum(s[i] for s in sizes), dtype=dtype) for i, dtype in enumerate(_INDEX_DTYPES)]

    def make_saved(v: Tensor | None) -> tuple[Tensor, Tensor]:
        out = q.new_empty((0,) if v is None or gates is None else out_shape)
        return out, q.new_empty((0,) if v is None else lse_shape, dtype=torch.float32)

    return q.new_empty(out_shape), *make_saved(v_cmp), blocks, *make_saved(v_sel), *index, *make_saved(v_win)


torch.library.register_fake("nsa_lab::branches_fwd", _fake_forward)


@torch.library.register_fake("nsa_lab::nsa_fwd")
def _(
    q: Tensor, k_cmp: Tensor, v_cmp: Tensor, k_sel: Tensor, v_sel: Tensor, k_win: Tensor, v_win: Tensor, gates: Tensor,
    l: int, d: int, l_sel: int, n_sel: int, w: int, chosen: Tensor | None = None, documents: Tensor | None = None,
    longest: int = 0, first: int = 0,
) -> tuple[Tensor, ...]:
    tensors, rule = (q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates), SelectionRule(n_sel)
    return _fake_forward(*tensors, l, d, l_sel, w, *rule, chosen, documents, longest, first)


@compile_before_first_call
def _compute_backward(
    do: Tensor,
    q: Tensor, k_cmp: Tensor | None, v_cmp: Tensor | None, k_sel: Tensor | None, v_sel: Tensor | None,
    k_win: Tensor | None, v_win: Tensor | None, gates: Tensor | None, out: Tensor,
    out_cmp: Tensor, lse_cmp: Tensor, blocks: Tensor, out_sel: Tensor, lse_sel: Tensor,
    entries: Tensor, starts: Tensor, work: Tensor, order: Tensor, out_win: Tensor, lse_win: Tensor,
    l: int, d: int, l_sel: int, w: int, chosen: Tensor | None = None, documents: Tensor | None = None, longest: int = 0,
    first: int = 0,
) -> tuple[Tensor, ...]:
    """Return the gradients of q, of the keys and values of the branches, and of the gates; empty if there is none."""
    blocks = blocks if chosen is None else chosen
    outs = {
        name: branch_out
        for name, branch_out, k in (("cmp", out_cmp, k_cmp), ("sel", out_sel, k_sel), ("win", out_win, k_win))
        if k is not None
    }
    if gates is None:
        d_outs, deltas, dgates = dict.fromkeys(outs, do), dict[str, Tensor](), q.new_empty(0)
    else:
        all_deltas = q.new_empty(len(outs), *q.shape[:3], dtype=torch.float32)
        *d_list, dgates = gating.backward(do, list(outs.values()), gates, all_deltas)
        d_outs, deltas = dict(zip(outs, d_list, strict=True)), dict(zip(outs, all_deltas, strict=True))
    dq, is_written = q.new_empty(q.shape), False
    q = make_rows_contiguous(q)
    band_inputs = list[tuple[str, Tensor, Tensor, tuple[Any, ...], Tensor]]()
    for name, k, v, lse, sizes in (("cmp", k_cmp, v_cmp, lse_cmp, (l, d, 0)), ("win", k_win, v_win, lse_win, (1, 1, w))):
        if k is None or v is None:
            continue
        k, v, options = make_rows_contiguous(k), make_rows_contiguous(v), (*sizes, documents, longest, first)
        d_out = make_rows_contiguous(d_outs[name])
        # Without gates, the delta is computed from the output.
        of_row = {"delta": deltas[name]} if name in deltas else {"out": out}
        stats = band.compute_dq(d_out, q, k, v, lse, dq, *options, **of_row, add=is_written)
        band_inputs.append((name, k, v, options, stats))
        is_written = True
    # Concurrently with the selected branch, whose sums are memory-bound. Each also fills multiprocessors that the last
    # programs of the other leave idle.
    with run_on_second_stream(q.device) as join:
        dkv = {
            name: band.compute_dkv(make_rows_contiguous(d_outs[name]), q, k, v, stats, *options)
            for name, k, v, options, stats in band_inputs
        }
    if k_sel is not None and v_sel is not None:
        strategy = selected.get_forward_strategy(longest or k_sel.shape[1], selected.get_kernel_block(k_sel, v_sel, l_sel))
        sizes = selected.get_saved_index_sizes(q, v_sel, blocks.shape[3], l_sel, strategy, documents, first)
        index = _split_indices((entries, starts, work, order), sizes)
        d_sel = make_rows_contiguous(d_outs["sel"])
        delta = deltas["sel"] if "sel" in deltas else selected.compute_delta(out, d_sel, None)
        dkv["sel"] = selected.backward(
            d_sel, delta, q, k_sel, v_sel, lse_sel, blocks, l_sel, dq, documents, first, add=is_written, indices=index
        )
    join()
    gradients = (
        dkv[name][i] if name in dkv else q.new_empty(0) for name in ("cmp", "sel", "win") for i in range(2)
    )
    return dq, *gradients, dgates


torch.library.impl("nsa_lab::branches_bwd", ("cpu", "cuda"), _compute_backward)


@torch.library.impl("nsa_lab::nsa_bwd", ("cpu", "cuda"))
def _(
    do: Tensor,
    q: Tensor, k_cmp: Tensor, v_cmp: Tensor, k_sel: Tensor, v_sel: Tensor, k_win: Tensor, v_win: Tensor, gates: Tensor,
    out_cmp: Tensor, lse_cmp: Tensor, blocks: Tensor, out_sel: Tensor, lse_sel: Tensor,
    entries: Tensor, starts: Tensor, work: Tensor, order: Tensor, out_win: Tensor, lse_win: Tensor,
    l: int, d: int, l_sel: int, w: int, chosen: Tensor | None = None, documents: Tensor | None = None, longest: int = 0,
) -> tuple[Tensor, ...]:
    inputs, index = (q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates), (entries, starts, work, order)
    saved = out_cmp, out_cmp, lse_cmp, blocks, out_sel, lse_sel, *index, out_win, lse_win  # the first one is not read
    return _compute_backward(do, *inputs, *saved, l, d, l_sel, w, chosen, documents, longest)


@torch.library.register_fake("nsa_lab::nsa_bwd")
@torch.library.register_fake("nsa_lab::branches_bwd")
def _(
    do: Tensor,
    q: Tensor, k_cmp: Tensor | None, v_cmp: Tensor | None, k_sel: Tensor | None, v_sel: Tensor | None,
    k_win: Tensor | None, v_win: Tensor | None, gates: Tensor | None,
    *_: Any,
) -> tuple[Tensor, ...]:
    inputs = q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates
    return tuple(q.new_empty((0,) if x is None else x.shape) for x in inputs)
# fmt: on


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, l, d, l_sel, _, w, chosen, documents, longest, ctx.first = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, *output[1:], chosen, documents)
    ctx.geometry, ctx.longest = (l, d, l_sel, w), longest


def _autograd_backward(ctx: Any, do: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if do is None:
        return (None,) * 17
    *saved, chosen, documents = ctx.saved_tensors
    if ctx.first:
        # `out` is not read, since there are gates.
        inputs, rest = saved[:8], saved[8:]
        gradients = _branches_bwd(do, *inputs, rest[0], *rest, *ctx.geometry, chosen, documents, ctx.longest, ctx.first)
    else:
        gradients = _nsa_bwd(do, *saved, *ctx.geometry, chosen, documents, ctx.longest)
    return *gradients, *(None,) * 9


def _setup_branches_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    tensors, geometry, (chosen, documents, ctx.longest, ctx.first) = inputs[:8], inputs[8:12], inputs[17:]
    ctx.set_materialize_grads(False)
    # Only a single branch needs the output itself.
    ctx.save_for_backward(*tensors, output[0] if tensors[7] is None else output[1], *output[1:], chosen, documents)
    ctx.geometry, ctx.is_absent = geometry, [x is None for x in tensors]


def _autograd_branches_backward(ctx: Any, do: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if do is None:
        return (None,) * 21
    *saved, chosen, documents = ctx.saved_tensors
    gradients = _branches_bwd(do, *saved, *ctx.geometry, chosen, documents, ctx.longest, ctx.first)
    return *(None if is_absent else x for x, is_absent in zip(gradients, ctx.is_absent, strict=True)), *(None,) * 13


register_autograd("nsa_fwd", _autograd_backward, _setup_context)
register_autograd("branches_fwd", _autograd_branches_backward, _setup_branches_context)
