"""Packed documents in other layouts: compression and the selection loss."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
import torch
from looping import looped
from torch import Tensor, nn

from nsa_lab.attention import Span, reference, selection_loss
from nsa_lab.attention.compression import compress, make_phi
from nsa_lab.attention.layout import _iterate_tensors
from nsa_lab.attention.segment_ops import ABSENT, gather_rows, map_rows
from nsa_lab.attention.selection_loss import sample_rows
from nsa_lab.config import NSAConfig

CPU = torch.device("cpu")
GEOMETRIES = {"l = d": (3, 3), "l = 2 d": (6, 3), "l = 4 d": (8, 2), "d = 1": (4, 1), "l = 1": (1, 1)}
# Including empty documents, ones shorter than a block, and one whose last tokens are in no block.
LENGTHS = {
    "many": (0, 1, 23, 0, 5, 2, 40, 0, 1, 8),
    "short": (1, 0, 2, 1),
    "one": (19,),
    "one token": (1,),
    "empty at the ends": (0, 0, 17, 0, 0),
}
every_geometry = pytest.mark.parametrize("geometry", GEOMETRIES)
every_row = pytest.mark.parametrize("lengths", LENGTHS)


def make_nsa(geometry: str, phi: str = "avg") -> NSAConfig:
    l, d = GEOMETRIES[geometry]
    return NSAConfig(l=l, d=d, l_sel=2 * d, n_sel=4, w=7, phi=phi)


def make_span(lengths: tuple[int, ...], capacity: int | None = None) -> Span:
    return Span.packed(torch.tensor([0, *accumulate(lengths)], dtype=torch.int32), capacity)


def draw_normal(rows: int, seed: int, heads: int = 2) -> Tensor:
    return torch.randn(1, rows, heads, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def make_random_phi(nsa: NSAConfig) -> nn.Module | None:
    torch.manual_seed(0)
    phi = make_phi(nsa, 5)
    return None if phi is None else phi.double()


@looped
@pytest.mark.parametrize("seed", range(20))
def test_mapped_rows_equal_counting(seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 6, (2, int(torch.randint(1, 6, (1,), generator=draw))), generator=draw)
    here, there = ([0, *accumulate(side.tolist())] for side in lengths)
    rows = here[-1] + 3
    expected = [ABSENT] * rows
    for (begin, end), (other, other_end) in zip(pairwise(here), pairwise(there), strict=True):
        for n in range(min(end - begin, other_end - other)):
            expected[begin + n] = other + n
    assert map_rows(rows, torch.tensor(here), torch.tensor(there)).tolist() == expected


def test_gathered_rows_and_their_gradients() -> None:
    x = draw_normal(6, 0).requires_grad_()
    rows, back = torch.tensor([4, ABSENT, 0, 2]), torch.tensor([2, ABSENT, 3, ABSENT, 0, ABSENT])
    taken = gather_rows(x, rows, back)
    assert torch.equal(taken[:, [0, 2, 3]], x[:, [4, 0, 2]]) and not taken[:, 1].any()
    assert torch.autograd.gradcheck(lambda x: gather_rows(x, rows, back), x)
    assert torch.autograd.gradgradcheck(lambda x: gather_rows(x, rows, back), x)
    nothing = gather_rows(x[:, :0], torch.tensor([ABSENT, ABSENT]), rows[:0])
    assert nothing.shape == (1, 2, 2, 5) and not nothing.any()


@pytest.mark.slow
@looped
@every_geometry
@every_row
@pytest.mark.parametrize("phi", ["avg", "linear", "mlp", "pool"])
@pytest.mark.parametrize("more", [None, 0, 3])
def test_packed_compression_equals_separate_compression(geometry: str, lengths: str, phi: str, more: int | None) -> None:
    """Values, and gradients of x and of phi's weights; padding is 0 and has no gradient."""
    nsa, of = make_nsa(geometry, phi), LENGTHS[lengths]
    span, module, x = make_span(of, None if more is None else len(of) + more), make_random_phi(nsa), draw_normal(sum(of), 1)
    x.requires_grad_()
    actual = compress(x, nsa, module, span=span)
    separate = torch.cat([reference.compress(part, nsa, module) for part in x.split(of, 1) if part.shape[1]], 1)
    used = separate.shape[1]
    assert actual.shape[1] == span.num_compressed(nsa) and not actual[:, used:].any()
    torch.testing.assert_close(actual[:, :used], separate, rtol=1e-12, atol=1e-12)
    leaves = [x, *([] if module is None else module.parameters())]
    weight = draw_normal(actual.shape[1], 2)
    expected = torch.autograd.grad((separate * weight[:, :used]).sum() + 0 * sum(y.sum() for y in leaves), leaves)
    gradients = torch.autograd.grad((actual * weight).sum(), leaves)
    for a, b in zip(gradients, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@looped
@every_geometry
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_packed_means_are_bitwise_equal_to_separate_means(geometry: str, dtype: torch.dtype) -> None:
    nsa, of = make_nsa(geometry), LENGTHS["many"]
    x = draw_normal(sum(of), 3).to(dtype)
    separate = torch.cat([compress(part, nsa) for part in x.split(of, 1) if part.shape[1]], 1)
    for capacity in (None, 12):
        assert torch.equal(compress(x, nsa, span=make_span(of, capacity))[:, : separate.shape[1]], separate)


@pytest.mark.slow
@looped
@every_geometry
@pytest.mark.parametrize("phi", ["avg", "linear", "mlp", "pool"])
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_nonfinite_values_are_compressed_within_their_document(geometry: str, phi: str, poison: float) -> None:
    """At any token, also in no block: no bit of other blocks changes, and the blocks of the token are non-finite."""
    nsa, of = make_nsa(geometry, phi), LENGTHS["many"]
    span, module, clean = make_span(of, 12), make_random_phi(nsa), draw_normal(sum(of), 4)
    owner = span.query_document_ids()

    def results(x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.clone().requires_grad_()
        out = compress(x, nsa, module, span=span)
        return out.detach(), torch.autograd.grad(out.square().sum(), x)[0]

    before, gradient = results(clean)
    for t in range(sum(of)):
        spoilt = clean.clone()
        spoilt[:, t] = poison
        after, moved = results(spoilt)
        document = int(owner[t])
        rows, begin = span.compressed_rows(nsa)[document], span.bounds[document]
        reads = [rows.start + i for i in range(rows.stop - rows.start) if 0 <= t - begin - i * nsa.d < nsa.l]
        others = [i for i in range(after.shape[1]) if i not in reads]
        assert not after[:, reads].isfinite().any()
        assert torch.equal(after[:, others], before[:, others])
        assert torch.equal(moved[:, owner != document], gradient[:, owner != document])


@pytest.mark.slow
@looped
@every_geometry
@every_row
@pytest.mark.parametrize("queries", [7, None])
def test_packed_selection_loss_equals_the_mean_over_documents(geometry: str, lengths: str, queries: int | None) -> None:
    """Its value and gradients are the sums over the documents, also with a capacity."""
    nsa, of = make_nsa(geometry), LENGTHS[lengths]
    total = sum(of)
    q, raw = ((2 * draw_normal(total, seed, heads)).requires_grad_() for seed, heads in ((5, 4), (6, 2)))
    k_sel, rows = 2 * draw_normal(total, 7), sample_rows(total, queries).tolist()
    expected = 0 * (q.sum() + raw.sum())
    for document in make_span(of).documents:
        own = [
            row - document.query_rows.start for row in rows if document.query_rows.start <= row < document.query_rows.stop
        ]
        k_cmp = compress(raw[:, document.key_rows], nsa) if document.end else None
        for row in own:  # a single query is scored as a chunk of its document
            end = row + 1
            here = slice(document.query_rows.start + row, document.query_rows.start + end)
            keys = slice(document.key_rows.start, document.key_rows.start + end)
            assert k_cmp is not None
            span = Span.chunk(row, 1)
            blocks = k_cmp[:, : span.num_compressed(nsa)]
            expected = expected + selection_loss(q[:, here], blocks, k_sel[:, keys], nsa, span=span)
    expected = expected / len(rows)
    for capacity in (None, len(of) + 3):
        span = make_span(of, capacity)
        actual = selection_loss(q, compress(raw, nsa, span=span), k_sel, nsa, n_queries=queries, span=span)
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
        for a, b in zip(*(torch.autograd.grad(y, [q, raw], retain_graph=True) for y in (actual, expected)), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


def test_selection_loss_keeps_nonfinite_values_in_their_document() -> None:
    """In keys and queries of one document: gradients of the others are bitwise equal, and the loss is not finite."""
    nsa, of = make_nsa("l = 2 d"), (30, 41, 30)
    span = make_span(of, 5)
    clean = [
        2 * draw_normal(sum(of), 5, heads=4),
        compress(2 * draw_normal(sum(of), 6), nsa, span=span),
        2 * draw_normal(sum(of), 7),
    ]

    def results(tensors: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        leaves = [x.clone().requires_grad_() for x in tensors[:2]]
        loss = selection_loss(*leaves, tensors[2], nsa, n_queries=None, span=span)
        return loss, list(torch.autograd.grad(loss, leaves))

    _, before = results(clean)
    rows, blocks = span.documents[1].query_rows, span.compressed_rows(nsa)[1]
    for number, own in enumerate((rows, blocks, rows)):
        spoilt = [x.clone() for x in clean]
        spoilt[number][:, own] = torch.nan
        loss, after = results(spoilt)
        assert loss.isnan()
        for mine, a, b in zip((rows, blocks), after, before, strict=True):
            others = torch.ones(a.shape[1], dtype=torch.bool)
            others[mine] = False
            assert torch.equal(a[:, others], b[:, others])


def test_cached_values_are_built_once_and_support_backward() -> None:
    """Also if they are built in inference mode."""
    nsa, span, x = make_nsa("l = 2 d"), make_span((20, 11), 4), draw_normal(31, 8)
    with torch.inference_mode():
        compress(x, nsa, span=span)
        begins = span.layout(nsa, CPU).is_document_start
    before = dict(span._cache)
    compress(x.requires_grad_(), nsa, span=span).sum().backward()
    assert span.layout(nsa, CPU).is_document_start is begins and begins.nonzero().flatten().tolist() == [0, 20]
    assert all(span._cache[key] is value for key, value in before.items()) and len(span._cache) == len(before)


@looped
@every_row
@pytest.mark.parametrize("capacity", [None, 11])
def test_cached_values_are_separate_per_configuration(lengths: str, capacity: int | None) -> None:
    """An indexer can have the stride of the compressed branch and shorter blocks, over the same documents."""
    span = make_span(LENGTHS[lengths], capacity)
    for l, d, l_sel in ((6, 3, 6), (3, 3, 6), (6, 6, 6), (6, 3, 12), (6, 3, 6)):
        nsa, new = NSAConfig(l=l, d=d, l_sel=l_sel, n_sel=4, w=7), make_span(LENGTHS[lengths], capacity)
        actual, expected = (list(_iterate_tensors(of.layout(nsa, CPU))) for of in (span, new))
        assert span.compressed_bounds(nsa) == new.compressed_bounds(nsa)
        assert len(actual) == len(expected) and all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
