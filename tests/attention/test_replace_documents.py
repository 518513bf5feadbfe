"""A span takes over another layout of documents: what is kept is then the other's, in the tensors that were there."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nsa_lab.attention import Span, compress, selection_loss
from nsa_lab.attention.compression import get_packed_indices
from nsa_lab.attention.layout import _iterate_tensors
from nsa_lab.attention.selection_loss import get_sampled_queries
from nsa_lab.config import NSAConfig

CPU = torch.device("cpu")
NSA = NSAConfig(l=6, d=3, l_sel=6, n_sel=4, w=7)
INDEX = NSA.model_copy(update={"l": 2, "d": 2})


def make_packed_span(*lengths: int, capacity: int | None = 8, longest: int | None = 40) -> Span:
    return Span.packed(torch.tensor([*accumulate(lengths, initial=0)], dtype=torch.int32), capacity, longest)


def build_all_tensors(span: Span) -> list[Tensor]:
    """All that is kept of a span on a device."""
    tables = span.cu_seqlens(CPU), span.row_bounds(NSA, CPU), span.row_bounds(INDEX, CPU), span.is_document_start(CPU)
    asks = get_sampled_queries(span, NSA, CPU), get_sampled_queries(span, INDEX, CPU, None)
    return [*tables, *get_packed_indices(span, NSA, CPU), *get_packed_indices(span, INDEX, CPU), *_iterate_tensors(asks)]


LENGTHS = st.lists(st.integers(0, 30), min_size=1, max_size=8)


@given(lengths=LENGTHS, data=st.data())
def test_all_cached_tensors_are_overwritten(lengths: list[int], data: st.DataObject) -> None:
    lengths = [*lengths[1:], lengths[0] + 1]
    others = [0] * 8
    for length in lengths:  # the same tokens, dealt out anew
        others[data.draw(st.integers(0, 7))] += length
    span, other = make_packed_span(*lengths, longest=256), make_packed_span(*others, longest=256)
    held, addresses = build_all_tensors(span), [x.data_ptr() for x in build_all_tensors(span)]
    span.replace_documents(other)
    kept, expected = build_all_tensors(span), build_all_tensors(make_packed_span(*others, longest=256))
    assert all(a is b for a, b in zip(kept, held, strict=True)) and [x.data_ptr() for x in kept] == addresses
    for found, wanted in zip(kept, expected, strict=True):
        assert found.dtype == wanted.dtype and torch.equal(found, wanted)
    assert torch.equal(span.positions(CPU), other.positions(CPU)), "computed anew from what is kept"


def test_cpu_counts_do_not_change() -> None:
    span, again, other = make_packed_span(30, 1, 9), make_packed_span(30, 1, 9), make_packed_span(4, 36)
    build_all_tensors(span)
    counted = span.documents, span.compressed_bounds(NSA), span.longest_document
    span.replace_documents(other)
    assert span == again and hash(span) == hash(again) and span.bounds == (0, 30, 31, 40)
    assert (span.documents, span.compressed_bounds(NSA), span.longest_document) == counted


def test_documents_can_be_replaced_repeatedly() -> None:
    first, second, third = (
        make_packed_span(*lengths, longest=10) for lengths in ((10, 9, 1, 10, 10), (10, 10, 10, 10), [5] * 8)
    )
    span = make_packed_span(10, 9, 1, 10, 10, longest=10)
    build_all_tensors(span)
    for layout in (second, third, third, first):
        span.replace_documents(layout)
        assert all(torch.equal(a, b) for a, b in zip(build_all_tensors(span), build_all_tensors(layout), strict=True))


LAYOUTS = {
    "one row": lambda: (make_packed_span(3, 17, 0, 14, 6), make_packed_span(22, 1, 1, 16)),
    "apart": lambda: (make_packed_span(3, 7, 0, 10, 10, 9, 1, longest=10), make_packed_span(10, 10, 10, 10, longest=10)),
}


@pytest.mark.parametrize("layouts", LAYOUTS)
def test_functions_compute_the_other_documents(layouts: str) -> None:
    """Compression and the selection loss, to the bit, and their gradients."""
    span, other = LAYOUTS[layouts]()
    assert (get_sampled_queries(other, NSA, CPU).document_rows is None) is (layouts == "one row")
    compress(torch.randn(1, 40, 2, 4), NSA, span=span)
    get_sampled_queries(span, NSA, CPU)
    span.replace_documents(other)
    found = []
    for of in (span, other):
        torch.manual_seed(0)
        q, k, raw = (torch.randn(1, 40, heads, 4).requires_grad_() for heads in (4, 2, 2))
        k_cmp = compress(raw, NSA, span=of)
        loss = selection_loss(q, k_cmp, k, NSA, span=of)
        found.append((k_cmp, loss, *torch.autograd.grad(loss + k_cmp.square().sum(), (q, raw))))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


INCOMPATIBLE: dict[str, Callable[[], tuple[Span, Span]]] = {
    "another capacity": lambda: (make_packed_span(30, 10), make_packed_span(10, 30, capacity=4)),
    "other tokens": lambda: (make_packed_span(30, 10), make_packed_span(30, 11)),
    "another longest": lambda: (make_packed_span(30, 10), make_packed_span(10, 30, longest=39)),
    "no capacity": lambda: (make_packed_span(30, 10, capacity=None), make_packed_span(10, 30, capacity=None)),
    "one text": lambda: (make_packed_span(40), Span.full(40)),
    "two texts": lambda: (Span.full(40), Span.full(40)),
}


@pytest.mark.parametrize("mistake", INCOMPATIBLE)
def test_a_layout_of_another_size_raises(mistake: str) -> None:
    span, other = INCOMPATIBLE[mistake]()
    before = span.cu_seqlens(CPU).clone()
    with pytest.raises(ValueError, match=r"cannot hold the documents of .* give Span\.packed the same capacity"):
        span.replace_documents(other)
    assert torch.equal(span.cu_seqlens(CPU), before)


@pytest.mark.parametrize(
    "made", [lambda span: torch.tensor(span.bounds), lambda span: (span.longest, torch.zeros(len(span.bounds)))]
)
def test_tensors_that_depend_on_the_documents_raise(made: Callable[[Span], object]) -> None:
    """Whoever keeps it: it would be broadcast, or half of it left. Nothing is copied then."""
    span, other = make_packed_span(30, 10), make_packed_span(10, 20, 10)
    table = span.cu_seqlens(CPU)
    span.get_or_build("mine", made)
    with pytest.raises(
        ValueError, match=r"kept as 'mine' has shapes \[\(3,\)\] for .* and \[\(4,\)\] for .* for the capacity"
    ):
        span.replace_documents(other)
    assert table.tolist()[1] == 30
