"""`Span.replace_documents` overwrites all cached tensors in place with those of another layout."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from looping import looped
from torch import Tensor

from nsa_lab.attention import Span, compress, selection_loss
from nsa_lab.attention.layout import _iterate_tensors
from nsa_lab.attention.selection_loss import _has_separate_texts
from nsa_lab.config import NSAConfig

CPU = torch.device("cpu")
NSA = NSAConfig(l=6, d=3, l_sel=6, n_sel=4, w=7)
INDEX = NSA.model_copy(update={"l": 2, "d": 2})


def make_packed_span(*lengths: int, capacity: int | None = 8, longest: int | None = 40) -> Span:
    return Span.packed(torch.tensor([*accumulate(lengths, initial=0)], dtype=torch.int32), capacity, longest)


def build_all_tensors(span: Span) -> list[Tensor]:
    """Return all tensors that a span caches on a device."""
    return [span.cu_seqlens(CPU), *_iterate_tensors((span.layout(NSA, CPU), span.layout(INDEX, CPU)))]


LENGTHS = st.lists(st.integers(0, 30), min_size=1, max_size=8)


@given(lengths=LENGTHS, data=st.data())
def test_all_cached_tensors_are_overwritten(lengths: list[int], data: st.DataObject) -> None:
    lengths = [*lengths[1:], lengths[0] + 1]
    others = [0] * 8
    for length in lengths:  # the same number of tokens in other documents
        others[data.draw(st.integers(0, 7))] += length
    span, other = make_packed_span(*lengths, longest=256), make_packed_span(*others, longest=256)
    before, addresses = build_all_tensors(span), [x.data_ptr() for x in build_all_tensors(span)]
    span.replace_documents(other)
    after, expected = build_all_tensors(span), build_all_tensors(make_packed_span(*others, longest=256))
    assert all(a is b for a, b in zip(after, before, strict=True)) and [x.data_ptr() for x in after] == addresses
    for a, b in zip(after, expected, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)
    assert torch.equal(span.positions(CPU), other.positions(CPU)), "computed again from the cached tensors"


def test_cpu_counts_do_not_change() -> None:
    span, equal, other = make_packed_span(30, 1, 9), make_packed_span(30, 1, 9), make_packed_span(4, 36)
    build_all_tensors(span)
    counts = span.documents, span.compressed_bounds(NSA), span.longest_document
    span.replace_documents(other)
    assert span == equal and hash(span) == hash(equal) and span.bounds == (0, 30, 31, 40)
    assert (span.documents, span.compressed_bounds(NSA), span.longest_document) == counts


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
    "separate": lambda: (make_packed_span(3, 7, 0, 10, 10, 9, 1, longest=10), make_packed_span(10, 10, 10, 10, longest=10)),
}


@pytest.mark.parametrize("layouts", LAYOUTS)
def test_functions_compute_the_other_documents(layouts: str) -> None:
    """Compression, the selection loss and their gradients are bitwise equal."""
    span, other = LAYOUTS[layouts]()
    assert _has_separate_texts(other.layout(NSA, CPU)) is (layouts == "separate")
    compress(torch.randn(1, 40, 2, 4), NSA, span=span)
    span.layout(NSA, CPU)
    span.replace_documents(other)
    results = []
    for layout in (span, other):
        torch.manual_seed(0)
        q, k, raw = (torch.randn(1, 40, heads, 4).requires_grad_() for heads in (4, 2, 2))
        k_cmp = compress(raw, NSA, span=layout)
        loss = selection_loss(q, k_cmp, k, NSA, span=layout)
        results.append((k_cmp, loss, *torch.autograd.grad(loss + k_cmp.square().sum(), (q, raw))))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


INCOMPATIBLE: dict[str, Callable[[], tuple[Span, Span]]] = {
    "another capacity": lambda: (make_packed_span(30, 10), make_packed_span(10, 30, capacity=4)),
    "other tokens": lambda: (make_packed_span(30, 10), make_packed_span(30, 11)),
    "another longest": lambda: (make_packed_span(30, 10), make_packed_span(10, 30, longest=39)),
    "no capacity": lambda: (make_packed_span(30, 10, capacity=None), make_packed_span(10, 30, capacity=None)),
    "one text": lambda: (make_packed_span(40), Span.full(40)),
    "two texts": lambda: (Span.full(40), Span.full(40)),
}


@looped
@pytest.mark.parametrize("mistake", INCOMPATIBLE)
def test_a_layout_of_another_size_raises(mistake: str) -> None:
    span, other = INCOMPATIBLE[mistake]()
    before = span.cu_seqlens(CPU).clone()
    with pytest.raises(ValueError, match=r"cannot hold the documents of .* give Span\.packed the same capacity"):
        span.replace_documents(other)
    assert torch.equal(span.cu_seqlens(CPU), before)


@pytest.mark.parametrize(
    "build", [lambda span: torch.tensor(span.bounds), lambda span: (span.longest_document, torch.zeros(len(span.bounds)))]
)
def test_tensors_that_depend_on_the_documents_raise(build: Callable[[Span], object]) -> None:
    """Otherwise a copy would broadcast, or overwrite only a part. Nothing is copied."""
    span, other = make_packed_span(30, 10), make_packed_span(10, 20, 10)
    table = span.cu_seqlens(CPU)
    span.get_or_build("value", build)
    with pytest.raises(
        ValueError, match=r"cached as 'value' has shapes \[\(3,\)\] for .* but \[\(4,\)\] for .* from the capacity"
    ):
        span.replace_documents(other)
    assert table.tolist()[1] == 30
