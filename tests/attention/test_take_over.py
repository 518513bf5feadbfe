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
from nsa_lab.attention.compression import block_rows
from nsa_lab.attention.selection_loss import asked
from nsa_lab.attention.span import _tensors
from nsa_lab.config import NSAConfig

CPU = torch.device("cpu")
NSA = NSAConfig(l=6, d=3, l_sel=6, n_sel=4, w=7)
INDEX = NSA.model_copy(update={"l": 2, "d": 2})


def packed(*lengths: int, capacity: int | None = 8, longest: int | None = 40) -> Span:
    return Span.packed(torch.tensor([*accumulate(lengths, initial=0)], dtype=torch.int32), capacity, longest)


def everything(span: Span) -> list[Tensor]:
    """All that is kept of a span on a device."""
    tables = span.cu_seqlens(CPU), span.row_bounds(NSA, CPU), span.row_bounds(INDEX, CPU), span.begins(CPU)
    asks = asked(span, NSA, CPU), asked(span, INDEX, CPU, None)
    return [*tables, *block_rows(span, NSA, CPU), *block_rows(span, INDEX, CPU), *_tensors(asks)]


LENGTHS = st.lists(st.integers(0, 30), min_size=1, max_size=8)


@given(lengths=LENGTHS, data=st.data())
def test_all_that_is_kept_becomes_that_of_the_other(lengths: list[int], data: st.DataObject) -> None:
    lengths = [*lengths[1:], lengths[0] + 1]
    others = [0] * 8
    for length in lengths:  # the same tokens, dealt out anew
        others[data.draw(st.integers(0, 7))] += length
    span, other = packed(*lengths, longest=256), packed(*others, longest=256)
    held, addresses = everything(span), [x.data_ptr() for x in everything(span)]
    span.take_over(other)
    kept, expected = everything(span), everything(packed(*others, longest=256))
    assert all(a is b for a, b in zip(kept, held, strict=True)) and [x.data_ptr() for x in kept] == addresses
    for found, wanted in zip(kept, expected, strict=True):
        assert found.dtype == wanted.dtype and torch.equal(found, wanted)
    assert torch.equal(span.positions(CPU), other.positions(CPU)), "computed anew from what is kept"


def test_the_host_goes_on_counting_what_the_span_was_built_with() -> None:
    span, again, other = packed(30, 1, 9), packed(30, 1, 9), packed(4, 36)
    everything(span)
    counted = span.documents, span.compressed_bounds(NSA), span.longest
    span.take_over(other)
    assert span == again and hash(span) == hash(again) and span.bounds == (0, 30, 31, 40)
    assert (span.documents, span.compressed_bounds(NSA), span.longest) == counted


def test_it_may_take_over_again_and_back() -> None:
    first, second, third = (packed(*lengths, longest=10) for lengths in ((10, 9, 1, 10, 10), (10, 10, 10, 10), [5] * 8))
    span = packed(10, 9, 1, 10, 10, longest=10)
    everything(span)
    for layout in (second, third, third, first):
        span.take_over(layout)
        assert all(torch.equal(a, b) for a, b in zip(everything(span), everything(layout), strict=True))


LAYOUTS = {
    "one row": lambda: (packed(3, 17, 0, 14, 6), packed(22, 1, 1, 16)),
    "apart": lambda: (packed(3, 7, 0, 10, 10, 9, 1, longest=10), packed(10, 10, 10, 10, longest=10)),
}


@pytest.mark.parametrize("layouts", LAYOUTS)
def test_what_reads_it_computes_the_other_documents(layouts: str) -> None:
    """Compression and the selection loss, to the bit, and their gradients."""
    span, other = LAYOUTS[layouts]()
    assert (asked(other, NSA, CPU).apart is None) is (layouts == "one row")
    compress(torch.randn(1, 40, 2, 4), NSA, span=span)
    asked(span, NSA, CPU)
    span.take_over(other)
    found = []
    for of in (span, other):
        torch.manual_seed(0)
        q, k, raw = (torch.randn(1, 40, heads, 4).requires_grad_() for heads in (4, 2, 2))
        k_cmp = compress(raw, NSA, span=of)
        loss = selection_loss(q, k_cmp, k, NSA, span=of)
        found.append((k_cmp, loss, *torch.autograd.grad(loss + k_cmp.square().sum(), (q, raw))))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


REFUSED: dict[str, Callable[[], tuple[Span, Span]]] = {
    "another capacity": lambda: (packed(30, 10), packed(10, 30, capacity=4)),
    "other tokens": lambda: (packed(30, 10), packed(30, 11)),
    "another longest": lambda: (packed(30, 10), packed(10, 30, longest=39)),
    "no capacity": lambda: (packed(30, 10, capacity=None), packed(10, 30, capacity=None)),
    "one text": lambda: (packed(40), Span.full(40)),
    "two texts": lambda: (Span.full(40), Span.full(40)),
}


@pytest.mark.parametrize("mistake", REFUSED)
def test_a_layout_of_another_size_is_refused(mistake: str) -> None:
    span, other = REFUSED[mistake]()
    before = span.cu_seqlens(CPU).clone()
    with pytest.raises(ValueError, match=r"cannot hold the documents of .* give Span\.packed the same capacity"):
        span.take_over(other)
    assert torch.equal(span.cu_seqlens(CPU), before)


@pytest.mark.parametrize(
    "made", [lambda span: torch.tensor(span.bounds), lambda span: (span.longest, torch.zeros(len(span.bounds)))]
)
def test_what_is_not_laid_out_for_the_capacity_is_refused(made: Callable[[Span], object]) -> None:
    """Whoever keeps it: it would be broadcast, or half of it left. Nothing is copied then."""
    span, other = packed(30, 10), packed(10, 20, 10)
    table = span.cu_seqlens(CPU)
    span.kept("mine", made)
    with pytest.raises(
        ValueError, match=r"kept as 'mine' has shapes \[\(3,\)\] for .* and \[\(4,\)\] for .* for the capacity"
    ):
        span.take_over(other)
    assert table.tolist()[1] == 30
