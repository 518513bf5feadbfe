"""Sequence layouts: their counts, and all functions on chunks and packed documents."""

from __future__ import annotations

import ast
import copy
import pickle
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest
import torch
from attention_inputs import Inputs, every_torch_variant, every_variant, use_variant
from layout_cases import (
    CASE_BUILDERS,
    Case,
    compute_compression_error,
    compute_worst_errors,
    make_chunk_case,
    make_packed_case,
)
from looping import looped
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from nsa_lab import attention
from nsa_lab.attention import Span, dense_attention, geometry, input_checks
from nsa_lab.attention.compression import compress, make_phi
from nsa_lab.config import NSAConfig

LIMITS = {"reference": 1e-12, "torch": 1e-10}
CPU = torch.device("cpu")
NSA = NSAConfig(l=6, d=3, l_sel=6, n_sel=4, w=7)
LENGTHS = (0, 31, 1, 0, 6, 40, 5, 0)
# Only make nightly uses the other two dtypes.
OTHER_DTYPES = [pytest.param(dtype, marks=pytest.mark.nightly) for dtype in (torch.float32, torch.float16)]
dtypes = pytest.mark.parametrize("dtype", [torch.float64, *OTHER_DTYPES, torch.bfloat16], ids=str)


def make_bounds(*lengths: int) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def make_nsa_packed_case(*lengths: int, capacity: int | None = None, nsa: NSAConfig = NSA) -> Case:
    span = Span.packed(make_bounds(*lengths), capacity)
    return Case(nsa, span, (0,) * len(lengths), lengths, 1, G=2, h=3, d_k=5, d_v=4, seed=3)


def make_nsa_chunk_case(start: int, length: int, nsa: NSAConfig = NSA) -> Case:
    return Case(nsa, Span.chunk(start, length), (start,), (length,), 2, G=2, h=3, d_k=5, d_v=4, seed=3)


def compute_all(x: Inputs, nsa: NSAConfig, backend: str, span: Span | None) -> dict[str, Tensor]:
    """Return all results, one row per row of q."""
    options = {"backend": backend, "span": span}
    out_cmp, lse_cmp = attention.compressed_attention(x.q, x.k_cmp, x.v_cmp, nsa, **options)
    blocks = attention.select_blocks(x.q, x.k_cmp, lse_cmp.detach(), nsa, **options)
    out_sel, lse_sel = attention.selected_attention(x.q, x.k_sel, x.v_sel, blocks, nsa, **options)
    out_win, lse_win = attention.window_attention(x.q, x.k_win, x.v_win, nsa, **options)
    results = {"out_cmp": out_cmp, "lse_cmp": lse_cmp, "blocks": blocks, "out_sel": out_sel, "lse_sel": lse_sel}
    mixed = attention.nsa_attention(*x, nsa, **options)
    return {**results, "out_win": out_win, "lse_win": lse_win, "mixed": mixed}


def compute_gradients(x: Inputs, nsa: NSAConfig, backend: str, span: Span | None) -> Inputs:
    leaves = x.map(lambda y: y.detach().requires_grad_())
    out = attention.nsa_attention(*leaves, nsa, backend=backend, span=span)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(1, 10**4, 1, generator=generator, dtype=torch.float64)[:, : out.shape[1]].unsqueeze(-1)
    return Inputs(*torch.autograd.grad((out.double() * weight).sum(), leaves))


# Counts of layouts


@looped
@pytest.mark.parametrize("kind", CASE_BUILDERS)
@pytest.mark.parametrize("seed", range(20))
def test_layout_counts_equal_counting(kind: str, seed: int) -> None:
    case = CASE_BUILDERS[kind](seed)
    span, nsa = case.span, case.nsa
    ends = [start + length for start, length in zip(case.starts, case.lengths, strict=True)]
    positions = [t for start, end in zip(case.starts, ends, strict=True) for t in range(start, end)]
    document_ids = [i for i, length in enumerate(case.lengths) for _ in range(length)]
    assert span.n_queries == len(positions) and span.n_keys == sum(ends) and span.longest_document == max(ends)
    assert span.positions().tolist() == positions and span.positions().dtype == torch.int64
    assert span.query_document_ids().tolist() == document_ids
    assert [rows.stop - rows.start for rows in span.compressed_rows(nsa)] == case.blocks
    assert span.compressed_bounds(nsa)[-1] == sum(case.blocks)
    assert span.num_compressed(nsa) == (sum(ends) // nsa.d if span.capacity else sum(case.blocks))
    assert span.num_compressed(nsa) - span.num_padding(nsa) == sum(case.blocks)
    assert span.num_selection(nsa) == max(len(range(0, end, nsa.l_sel)) for end in ends)
    q, k = torch.arange(span.n_queries), torch.arange(span.n_keys)
    for document, start, length in zip(span.documents, case.starts, case.lengths, strict=True):
        assert (document.start, document.end) == (start, start + length)
        assert document.positions().tolist() == list(range(start, start + length))
        assert len(q[document.query_rows]) == length and len(k[document.key_rows]) == start + length
    assert torch.equal(torch.cat([q[d.query_rows] for d in span.documents]), q)
    assert torch.equal(torch.cat([k[d.key_rows] for d in span.documents]), k)


def test_layouts_compare_by_value() -> None:
    spans, equal = (
        [
            Span.full(9),
            Span.chunk(2, 7),
            Span.packed(make_bounds(3, 6)),
            Span.packed(make_bounds(3, 6), capacity=2, longest=7),
        ]
        for _ in range(2)
    )
    assert spans == equal and len(set(spans + equal)) == 4
    for span in spans:
        span.cu_seqlens(CPU)
        for copied in (copy.deepcopy(span), pickle.loads(pickle.dumps(span))):
            assert not copied._cache and copied == span and copied.documents == span.documents
        with pytest.raises(FrozenInstanceError):
            span.start = 3
    assert [repr(span) for span in spans[:2]] == ["Span.full(9)", "Span.chunk(2, 7)"]
    assert repr(spans[3]) == "Span.packed(2 documents, 9 tokens, capacity=2, longest=7)"


def test_different_layouts_are_unequal() -> None:
    """`longest` counts too, because kernels are launched for it."""
    options = [(None, None), (2, None), (3, None), (None, 7), (None, 8), (2, 7), (2, 8)]
    spans = [Span.packed(make_bounds(3, 6), *option) for option in options]
    spans += [Span.packed(make_bounds(4, 5)), Span.packed(make_bounds(9)), Span.full(9), Span.chunk(0, 9), Span.chunk(1, 9)]
    for number, span in enumerate(spans):
        assert [span == other for other in spans] == [number == at for at in range(len(spans))]
    assert Span.full(9) != (0, 9)


def test_integer_types_are_converted_to_int() -> None:
    span = Span.packed(make_bounds(3, 6), torch.tensor(4), torch.tensor(7))
    assert span == Span.packed(make_bounds(3, 6), 4, 7) and hash(span) == hash(Span.packed(make_bounds(3, 6), 4, 7))
    assert type(span.capacity) is type(span.max_document_length) is int


def test_launches_cover_the_longest_possible_document() -> None:
    """`longest`, but at most the row; without it, the row if there is a capacity."""
    expected = {(None, None): 6, (4, None): 9, (None, 8): 8, (4, 8): 8, (4, 6): 6, (4, 64): 9}
    for (capacity, longest), length in expected.items():
        assert Span.packed(make_bounds(3, 6), capacity, longest).longest_allocated == length


def test_the_bounds_are_copied_once_and_padded_to_the_capacity() -> None:
    bounds = make_bounds(3, 0, 6)
    span = Span.packed(bounds, capacity=5)
    bounds[1] = 0
    on_device = span.cu_seqlens(CPU)
    assert on_device.tolist() == [0, 3, 3, 9, 9, 9] and on_device.dtype == torch.int32
    assert span.cu_seqlens(CPU) is on_device
    assert Span.packed(make_bounds(3, 6)).cu_seqlens(CPU).tolist() == [0, 3, 9]


@looped
@pytest.mark.parametrize("total", [1, 5, 6, 40, 97])
def test_with_a_capacity_shapes_depend_only_on_the_total(total: int) -> None:
    cuts = torch.randint(0, total + 1, (20, 4), generator=torch.Generator().manual_seed(total)).sort(-1).values
    shapes = set()
    for cut in cuts:
        span = Span.packed(torch.cat([torch.tensor([0]), cut, torch.tensor([total])]).int(), capacity=8)
        x = torch.randn(1, total, 2, 4)
        shapes.add((compress(x, NSA, span=span).shape, span.cu_seqlens(CPU).shape, span.num_compressed(NSA)))
    assert shapes == {((1, total // NSA.d, 2, 4), (9,), total // NSA.d)}


MALFORMED = {
    "a chunk before the beginning": (lambda: Span.chunk(-1, 4), "start = -1: expected an integer of at least 0"),
    "a chunk of nothing": (lambda: Span.chunk(3, 0), "length = 0: expected an integer of at least 1"),
    "no length": (lambda: Span.full(0), "length = 0"),
    "half a token": (lambda: Span.full(2.5), "length = 2.5: expected an integer"),
    "a truth value": (lambda: Span.chunk(True, 4), "start = True"),
    "a list": (lambda: Span.packed([0, 4]), "got a list; use torch.tensor"),
    "another device": (lambda: Span.packed(make_bounds(4).to("meta")), "got one on meta; keep it on the CPU"),
    "int64": (lambda: Span.packed(make_bounds(4).long()), "got torch.int64; use cu_seqlens.int()"),
    "two dimensions": (lambda: Span.packed(make_bounds(4)[None]), "got shape (1, 2)"),
    "no document": (lambda: Span.packed(make_bounds()), "got shape (1,); one document of T tokens is [0, T]"),
    "a late start": (lambda: Span.packed(make_bounds(4) + 2), "it starts at 2"),
    "a fall": (lambda: Span.packed(torch.tensor([0, 5, 3, 9]).int()), "document 1 goes from 5 to 3"),
    "too many documents": (
        lambda: Span.packed(make_bounds(1, 2, 3), capacity=2),
        "3 documents in cu_seqlens, and capacity = 2",
    ),
    "a document past the longest": (
        lambda: Span.packed(make_bounds(4, 9), longest=8),
        "a document has 9 tokens, more than longest = 8",
    ),
    "no longest": (lambda: Span.packed(make_bounds(1), longest=0), "longest = 0: expected an integer of at least 1"),
    "no capacity": (lambda: Span.packed(make_bounds(1), capacity=0), "capacity = 0: expected an integer of at least 1"),
}


@looped
@pytest.mark.parametrize("mistake", MALFORMED)
def test_a_malformed_layout_raises_when_it_is_built(mistake: str) -> None:
    build, message = MALFORMED[mistake]
    with pytest.raises(ValueError) as caught:
        build()
    assert message in str(caught.value)


# Functions on layouts


@looped
@pytest.mark.parametrize("kind", CASE_BUILDERS)
@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=pytest.mark.nightly if seed >= 5 else pytest.mark.slow) for seed in range(10)]
)
def test_every_function_and_gradient_equals_brute_force(kind: str, seed: int) -> None:
    """More cases: python tests/attention/layout_cases.py 200."""
    case = CASE_BUILDERS[kind](seed)
    for backend, worst in compute_worst_errors(case).items():
        assert worst <= LIMITS[backend], f"{backend}: {case}"
    assert compute_compression_error(case) <= 1e-12


@looped
@every_variant
@dtypes
@pytest.mark.parametrize(("start", "length"), [(0, 9), (1, 40), (30, 1), (7, 23), (83, 1), (60, 24)])
def test_rows_of_a_chunk_equal_rows_of_the_full_call(variant: str, start: int, length: int, dtype: torch.dtype) -> None:
    case, end = make_nsa_chunk_case(start, length), start + length
    x = Case(NSA, Span.full(end), (0,), (end,), 2, G=2, h=3, d_k=5, d_v=4, seed=3).inputs(dtype)
    part = x._replace(q=x.q[:, start:], gates=x.gates[:, start:])
    limit = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}[dtype]
    with use_variant(variant) as backend:
        whole, rows = compute_all(x, NSA, backend, None), compute_all(part, NSA, backend, case.span)
    for name, expected in whole.items():
        torch.testing.assert_close(rows[name], expected[:, start:], rtol=limit, atol=limit, msg=f"{name}: {case}")


@pytest.mark.slow
@looped
@every_variant
@dtypes
@pytest.mark.parametrize("capacity", [None, 11])
def test_packed_documents_equal_separate_documents(variant: str, dtype: torch.dtype, capacity: int | None) -> None:
    """Values and gradients; padding rows contain NaN and get zero gradients."""
    case = make_nsa_packed_case(*LENGTHS, capacity=capacity)
    x = case.inputs(dtype)
    used = sum(case.blocks)
    x.k_cmp[:, used:], x.v_cmp[:, used:] = torch.nan, torch.nan
    separate: dict[str, list[Tensor]] = {}
    limit = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}[dtype]
    with use_variant(variant) as backend:
        packed = compute_all(x, NSA, backend, case.span)
        for _, part in case.documents(x):
            for name, y in compute_all(part, NSA, backend, None).items():
                separate.setdefault(name, []).append(y)
        for name, parts in separate.items():
            torch.testing.assert_close(packed[name], torch.cat(parts, 1), rtol=limit, atol=limit)
        grads = compute_gradients(x, NSA, backend, case.span)
        assert all(y.isfinite().all() for y in grads)
        assert (grads.k_cmp[:, used:] == 0).all() and (grads.v_cmp[:, used:] == 0).all()


@pytest.mark.slow
@looped
@every_variant
def test_nonfinite_values_stay_in_their_document(variant: str) -> None:
    """NaN in every tensor of one document changes no bit of the values and gradients of the others."""
    case = make_nsa_packed_case(*LENGTHS)
    x, changed_inputs = case.inputs(), case.inputs()
    documents = [d for d, length in enumerate(LENGTHS) if length]
    with use_variant(variant) as backend:
        before, grads = compute_all(x, NSA, backend, case.span), compute_gradients(x, NSA, backend, case.span)
        for number in documents:
            document, rows = case.span.documents[number], case.span.compressed_rows(NSA)[number]
            changed_inputs = x.map(torch.clone)
            for name, y in changed_inputs._asdict().items():
                y[:, rows if name.endswith("_cmp") else document.key_rows] = torch.nan
            after, new = (
                compute_all(changed_inputs, NSA, backend, case.span),
                compute_gradients(changed_inputs, NSA, backend, case.span),
            )
            in_document = case.span.query_document_ids() == number
            for name, y in before.items():
                assert torch.equal(y[:, ~in_document], after[name][:, ~in_document]), name
            assert after["mixed"][:, in_document].isnan().all()
            for name, y in grads._asdict().items():
                others = torch.ones(y.shape[1], dtype=torch.bool)
                others[rows if name.endswith("_cmp") else document.key_rows] = False
                assert torch.equal(y[:, others], getattr(new, name)[:, others]), name


@pytest.mark.slow
@looped
@every_variant
@pytest.mark.parametrize("case", [make_nsa_chunk_case(31, 30), make_nsa_packed_case(20, 41)], ids=["chunk", "packed"])
def test_nonfinite_values_change_no_bit_of_the_past(case: Case, variant: str) -> None:
    """A non-finite key or value at t changes no bit of outputs before t, and makes the output at t non-finite.

    test_causality.py has the test for full sequences.
    """
    x = case.inputs()
    raw = x.k_sel, x.v_sel
    x = x._replace(k_cmp=compress(raw[0], NSA, span=case.span), v_cmp=compress(raw[1], NSA, span=case.span))
    start = case.span.n_keys - case.span.n_queries
    with use_variant(variant) as backend:
        before = compute_all(x, NSA, backend, case.span)
        for t, poison in ((-1, torch.inf), (-8, torch.nan), (-20, torch.inf), (-20, torch.nan)):
            t += case.span.n_keys
            for name in ("k_sel", "v_sel", "k_win", "v_win"):
                changed = getattr(x, name).clone()
                changed[:, t, 0] = poison
                changed_inputs = x._replace(**{name: changed})
                if name.endswith("_sel"):
                    cmp = name.replace("_sel", "_cmp")
                    changed_inputs = changed_inputs._replace(**{cmp: compress(changed, NSA, span=case.span)})
                after = compute_all(changed_inputs, NSA, backend, case.span)
                for result, y in before.items():
                    assert torch.equal(y[:, : t - start], after[result][:, : t - start]), f"{result}, {name} at {t}"
                assert not after["mixed"][:, t - start, 0].isfinite().any()


@looped
@pytest.mark.parametrize("phi", ["linear", "mlp", "pool", "avg"])
@pytest.mark.parametrize("operator", [attention.reference.compress, compress], ids=["reference", "fast"])
@pytest.mark.parametrize("capacity", [None, 9])
@dtypes
def test_compression_of_packed_documents(operator: Callable, phi: str, capacity: int | None, dtype: torch.dtype) -> None:
    """Documents equal separate ones, including gradients of x and of phi's weights; padding rows are zero."""
    nsa = NSA.model_copy(update={"phi": phi})
    case = make_nsa_packed_case(*LENGTHS, capacity=capacity)
    torch.manual_seed(0)
    module = make_phi(nsa, case.d_k)
    weights = [] if module is None else list(module.to(dtype).parameters())
    x = case.inputs(dtype).k_sel.requires_grad_()
    out = operator(x, nsa, module, span=case.span)
    parts = [operator(part.k_sel, nsa, module) for _, part in case.documents(case.inputs(dtype)._replace(k_sel=x))]
    expected, used = torch.cat(parts, 1), sum(case.blocks)
    assert out.dtype == dtype and out.shape[1] == case.span.num_compressed(nsa)
    assert (out[:, used:] == 0).all()
    limit = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}[dtype]
    torch.testing.assert_close(out[:, :used], expected, rtol=limit, atol=limit)
    grads = [torch.autograd.grad(y.double().square().sum(), [x, *weights]) for y in (out, expected)]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=limit, atol=limit * max(b.abs().max().item(), 1.0))


def test_compression_for_a_chunk_covers_all_its_keys() -> None:
    x = torch.randn(2, 40, 2, 4)
    assert torch.equal(compress(x, NSA, span=Span.chunk(33, 7)), compress(x, NSA))


@looped
@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize(
    "span", [Span.full(29), Span.chunk(0, 29), Span.packed(make_bounds(29)), Span.packed(make_bounds(0, 29, 0))]
)
def test_equivalent_layouts_are_full(span: Span, backend: str) -> None:
    case = make_nsa_packed_case(29)
    x = case.inputs()
    assert span.is_full
    for name, y in compute_all(x, NSA, backend, None).items():
        assert torch.equal(y, compute_all(x, NSA, backend, span)[name]), name
    for a, b in zip(compute_gradients(x, NSA, backend, None), compute_gradients(x, NSA, backend, span), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    "span", [Span.chunk(1, 28), Span.packed(make_bounds(9, 20)), Span.packed(make_bounds(29), capacity=1)]
)
def test_other_layouts_are_not_full(span: Span) -> None:
    assert not span.is_full


@looped
@every_torch_variant
def test_uninitialized_memory_is_never_read(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [(case, case.inputs()) for case in (make_nsa_packed_case(*LENGTHS, capacity=9), make_nsa_chunk_case(30, 11))]
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        make = getattr(owner, name)

        def make_poisoned(*args: object, make: Callable[..., Tensor] = make, **kwargs: object) -> Tensor:
            x = make(*args, **kwargs)
            return x.fill_(float("nan")) if x.is_floating_point() else x.fill_(-7)

        monkeypatch.setattr(owner, name, make_poisoned)
    for case, x in cases:
        with use_variant(variant) as backend:
            results = compute_all(x, NSA, backend, case.span)
            assert not any(y.isnan().any() for y in results.values()) and (results["blocks"] >= -1).all()
            assert not any(y.isnan().any() for y in compute_gradients(x, NSA, backend, case.span))


def count_flops(call: Callable[[], object]) -> int:
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


@pytest.mark.slow
@pytest.mark.parametrize(
    "variant", ["torch", "torch, gathering", pytest.param("torch, small chunks", marks=pytest.mark.slow)]
)
def test_packed_documents_cost_as_much_as_separate_ones(variant: str) -> None:
    """Matrix products, forward and backward: a long neighbor does not make a short document more expensive."""
    nsa = NSAConfig(l=4, d=2, l_sel=2, n_sel=3, w=5)
    case = make_nsa_packed_case(7, 0, 45, 12, 1, 30, nsa=nsa)
    x = case.inputs()
    with use_variant(variant) as backend:
        separate = sum(
            count_flops(lambda part=part: compute_gradients(part, nsa, backend, None)) for _, part in case.documents(x)
        )
        assert count_flops(lambda: compute_gradients(x, nsa, backend, case.span)) == separate


def test_a_chunk_costs_as_much_as_its_keys() -> None:
    """The last of 2000 queries costs at most twice the products with its keys; a full call costs thousands."""
    nsa = NSAConfig(l=4, d=2, l_sel=4, n_sel=4, w=16)
    case = make_nsa_chunk_case(1999, 1, nsa)
    x = case.inputs()
    cost = count_flops(lambda: attention.nsa_attention(*x, nsa, backend="torch", span=case.span))
    reads = geometry.decode_reads(2000, nsa)
    compressed = reads["cmp"] * (2 * case.d_k + case.d_v)  # once for the branch, once for selection
    assert cost <= 2 * 2 * case.B * case.G * case.h * (compressed + (reads["sel"] + reads["win"]) * (case.d_k + case.d_v))


# The dense baseline


@pytest.mark.parametrize(
    "case",
    [make_nsa_chunk_case(31, 9), make_nsa_packed_case(*LENGTHS), make_nsa_packed_case(*LENGTHS, capacity=9)],
    ids=repr,
)
def test_dense_attention_supports_layouts(case: Case) -> None:
    x = case.inputs().map(lambda y: y.requires_grad_())
    out = dense_attention(x.q, x.k_win, x.v_win, span=case.span)
    parts = []
    for start, part in case.documents(x):
        k, v = (y.repeat_interleave(case.h, dim=2) for y in (part.k_win, part.v_win))
        scores = torch.einsum("bthd,bshd->bhts", part.q, k) * case.d_k**-0.5
        is_visible = torch.arange(k.shape[1]) <= start + torch.arange(part.q.shape[1])[:, None]
        parts.append(torch.einsum("bhts,bshd->bthd", scores.masked_fill(~is_visible, -torch.inf).softmax(-1), v))
    expected = torch.cat(parts, 1)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    used = x.q, x.k_win, x.v_win
    grads = [torch.autograd.grad(y.square().sum(), used) for y in (out, expected)]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


# Block arithmetic is in one module.

PACKAGE = Path(attention.__file__).parents[1]
TIME_NAMES = {"T", "S", "N", "n", "first", "last", "start", "stop", "length", "tokens"}


def find_own_geometry(tree: ast.AST) -> list[str]:
    """Return uses of `T - 1`, `arange` over positions or blocks, and `t // l_sel`."""
    uses = []
    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp):
            left, right = ast.unparse(node.left), ast.unparse(node.right)
            last = isinstance(node.op, ast.Sub) and right == "1" and (left in TIME_NAMES or left.endswith("shape[1]"))
            block = isinstance(node.op, ast.FloorDiv) and right.endswith("l_sel")
            uses += [ast.unparse(node)] * (last or block)
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("arange"):
            names = {n.id for arg in node.args for n in ast.walk(arg) if isinstance(n, ast.Name)}
            is_length = any(ast.unparse(arg).endswith("shape[1]") for arg in node.args)
            uses += [ast.unparse(node)] * (bool(names & TIME_NAMES) or is_length)
    return uses


def test_block_arithmetic_is_in_one_module() -> None:
    files = [*(PACKAGE / "attention").glob("*.py"), *(PACKAGE / "model").glob("*.py")]
    assert len(files) > 8
    uses = {path.name: find_own_geometry(ast.parse(path.read_text(encoding="utf-8"))) for path in files}
    assert not {name: hits for name, hits in uses.items() if hits and name not in ("geometry.py", "layout.py")}


@looped
@pytest.mark.parametrize("text", ["T - 1", "q.shape[1] - 1", "torch.arange(T)", "t // nsa.l_sel", "arange(first, last)"])
def test_block_arithmetic_elsewhere_is_detected(text: str) -> None:
    assert find_own_geometry(ast.parse(text))


def test_inputs_are_checked_only_in_public_functions() -> None:
    """Neither the torch backend nor the definition raises for shapes."""
    for name in ("reference", "torch_backend"):
        tree = ast.parse((PACKAGE / "attention" / f"{name}.py").read_text(encoding="utf-8"))
        assert not [node for node in ast.walk(tree) if isinstance(node, ast.Raise)], name
    assert (torch.float64, torch.float32, torch.bfloat16, torch.float16) == input_checks.SUPPORTED_DTYPES


def test_the_random_cases_cover_the_edges() -> None:
    """Documents of length 0, 1, less than l, and many blocks; chunks from 0 and of one query."""
    lengths = {(length, case.nsa.l) for case in map(make_packed_case, range(10)) for length in case.lengths}
    assert {0, 1} <= {length for length, _ in lengths} and any(1 < length < l for length, l in lengths)
    assert max(length for length, _ in lengths) > 100
    assert any(case.span.capacity for case in map(make_packed_case, range(10)))
    assert any(case.lengths == (1,) for case in map(make_chunk_case, range(10)))
