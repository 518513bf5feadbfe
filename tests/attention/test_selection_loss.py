"""The selection loss equals the same sum, computed query by query, head by head and block by block in float64."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from brute_force import Geometry, importance, select_by_importance, selection_blocks, softmax
from looping import looped
from numpy.typing import NDArray
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nsa_lab.attention import Span, compress, geometry, selection_loss
from nsa_lab.attention.selection_loss import MIN_IMPORTANCE, _has_separate_texts, sample_rows
from nsa_lab.config import NSAConfig

GEOMETRIES = [
    Geometry(4, 2, 4, 3, 5),
    Geometry(6, 3, 3, 4, 7),
    Geometry(8, 4, 4, 3, 6, over_heads="max"),
    Geometry(3, 1, 5, 5, 4, sink=0, local=1, over_block="max"),
]


def make_nsa(g: Geometry) -> NSAConfig:
    rule = {"sink_blocks": g.sink, "local_blocks": g.local, "head_reduction": g.over_heads, "block_reduction": g.over_block}
    return NSAConfig(l=g.l, d=g.d, l_sel=g.l_sel, n_sel=g.n_sel, w=g.w, **rule)


def compute_expected_loss(
    q: NDArray, k_cmp: NDArray, k_sel: NDArray, geometry: Geometry, rows: list[int], first: int = 0
) -> float:
    """Return the sum over batch, groups and `rows` of q, which is at positions first, first + 1, ..."""
    B, T, H, D = q.shape
    G = k_sel.shape[2]
    blocks = selection_blocks(first + T, geometry)
    scores, total = importance(q, k_cmp, geometry, first), 0.0
    for b in range(B):
        for row in rows:
            t = first + row
            own = t // geometry.l_sel
            free = [j for j in range(geometry.sink, own - geometry.local + 1) if blocks[j][0] <= t]
            for g in range(G):
                mass = np.zeros(len(blocks))
                for n in range(g * (H // G), (g + 1) * (H // G)):
                    p = softmax(k_sel[b, : t + 1, g] @ q[b, row, n] / np.sqrt(D))
                    for j in free:
                        mass[j] += sum(p[s] for s in blocks[j] if s <= t) / (H // G)
                shares = scores[b, row, g] / (H // G if geometry.over_heads == "sum" else 1) + MIN_IMPORTANCE
                total -= sum(mass[j] * np.log(shares[j] / shares[free].sum()) for j in free)
    return total


def draw_tensors(
    T: int, nsa: NSAConfig, span: Span | None = None, H: int = 4, G: int = 2, B: int = 2
) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(T)
    span = span or Span.full(T)
    q = torch.randn(B, span.n_queries, H, 6, dtype=torch.float64, generator=draw) * 2
    raw, k_sel = (torch.randn(B, span.n_keys, G, 6, dtype=torch.float64, generator=draw) * 2 for _ in range(2))
    return [q, compress(raw, nsa, span=span), k_sel]


@looped
@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("T", [1, 5, 29, 40])
def test_equals_the_explicit_sum(T: int, geometry: Geometry) -> None:
    nsa = make_nsa(geometry)
    q, k_cmp, k_sel = draw_tensors(T, nsa)
    for queries in (None, 7):
        rows = sample_rows(T, queries).tolist()
        expected = compute_expected_loss(q.numpy(), k_cmp.numpy(), k_sel.numpy(), geometry, rows) / (2 * 2 * len(rows))
        torch.testing.assert_close(
            selection_loss(q, k_cmp, k_sel, nsa, n_queries=queries).item(), expected, rtol=1e-11, atol=1e-11
        )


def make_packed_span(lengths: list[int], capacity: int | None = None, longest: int | None = None) -> Span:
    return Span.packed(torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32), capacity, longest)


# In the last three, each query is scored against its own document only.
PACKED = [
    make_packed_span([17, 0, 2, 26]),
    make_packed_span([17, 0, 2, 26], capacity=5, longest=30),
    make_packed_span([17, 0, 2, 1, 25, 9, 20, 13, 15, 14, 27], longest=31),
    make_packed_span([17, 0, 2, 1, 25, 9, 20, 13, 27], capacity=11, longest=28),
    make_packed_span([2, 1, 0, 3, 2, 3, 1], capacity=7, longest=3),
]


# The last has compressed blocks that overlap three selection blocks.
@looped
@pytest.mark.parametrize("geometry", [*GEOMETRIES, Geometry(12, 4, 4, 3, 5), Geometry(12, 4, 4, 3, 5, 1, 1, "max", "max")])
@pytest.mark.parametrize("span", PACKED, ids=str)
def test_documents_are_scored_separately(span: Span, geometry: Geometry) -> None:
    nsa = make_nsa(geometry)
    assert _has_separate_texts(span.layout(nsa, torch.device("cpu"))) is (len(span.documents) >= 7)
    q, k_cmp, k_sel = draw_tensors(0, nsa, span, B=1)
    total = 0.0
    for rows, compressed in zip(span.documents, span.compressed_rows(nsa), strict=True):
        q_own, k_own = q[:, rows.query_rows], k_sel[:, rows.key_rows]
        if q_own.shape[1]:
            total += compute_expected_loss(
                q_own.numpy(), k_cmp[:, compressed].numpy(), k_own.numpy(), geometry, list(range(q_own.shape[1]))
            )
    loss = selection_loss(q, k_cmp, k_sel, nsa, n_queries=None, span=span)
    torch.testing.assert_close(loss.item(), total / (2 * span.n_queries), rtol=1e-11, atol=1e-11)


@looped
@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("queries", [None, 9])
def test_separate_documents_have_the_same_loss_and_gradients(
    geometry: Geometry, queries: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    nsa, span = make_nsa(geometry), PACKED[3]
    tensors = draw_tensors(0, nsa, span, B=1)
    results = []
    for ratio in (4, 10**6):
        monkeypatch.setattr(sys.modules[_has_separate_texts.__module__], "SEPARATE_DOCUMENTS_RATIO", ratio)
        q, k_cmp, k_sel = (x.clone().requires_grad_() for x in tensors)
        layout = span.layout(nsa, q.device)
        assert _has_separate_texts(layout) is (ratio == 4)
        loss = selection_loss(
            q, k_cmp, k_sel, nsa, attention_q=q.detach().flip(1), n_queries=queries, span=span, layout=layout
        )
        results.append((loss.detach(), *torch.autograd.grad(loss, (q, k_cmp))))
    for first, second in zip(*results, strict=True):
        torch.testing.assert_close(first, second, rtol=1e-11, atol=1e-13)
    assert queries or all(x.abs().max() > 0 for x in results[0])


@pytest.mark.parametrize("geometry", GEOMETRIES[:2])
def test_chunks_are_scored_like_full_sequences(geometry: Geometry) -> None:
    nsa, span = make_nsa(geometry), Span.chunk(21, 8)
    q, k_cmp, k_sel = draw_tensors(1, nsa, span)
    expected = compute_expected_loss(q.numpy(), k_cmp.numpy(), k_sel.numpy(), geometry, list(range(8)), first=21) / (
        2 * 2 * 8
    )
    loss = selection_loss(q, k_cmp, k_sel, nsa, n_queries=None, span=span)
    torch.testing.assert_close(loss.item(), expected, rtol=1e-11, atol=1e-11)


def test_gradients_reach_queries_and_compressed_keys_but_not_the_target() -> None:
    nsa = make_nsa(GEOMETRIES[0])
    q, k_cmp, k_sel = (x.requires_grad_() for x in draw_tensors(23, nsa, B=1))

    def loss_of_keys(k: torch.Tensor) -> torch.Tensor:
        return selection_loss(q.detach(), k, k_sel, nsa, n_queries=9)

    assert torch.autograd.gradcheck(loss_of_keys, (k_cmp,))
    selection_loss(q, k_cmp, k_sel, nsa).backward()
    assert k_sel.grad is None
    assert q.grad is not None and q.grad.abs().sum() > 0
    # The gradient of the query is the gradient of the importances with a fixed target.
    detached = q.detach().clone().requires_grad_()
    fixed_target_loss = selection_loss(detached, k_cmp.detach(), k_sel.detach(), nsa)
    (expected,) = torch.autograd.grad(fixed_target_loss, detached)
    torch.testing.assert_close(q.grad, expected)


def test_minimum_is_the_entropy_of_the_target() -> None:
    """Blocks of one token: if compressed and selected keys are equal, importance and target are equal."""
    nsa = NSAConfig(l=1, d=1, l_sel=1, n_sel=3, w=2)
    q, _, k_sel = draw_tensors(19, nsa, H=2)
    same = selection_loss(q, k_sel, k_sel, nsa, n_queries=None)
    for scale in (0.5, 0.9, 1.1, 2.0):
        assert selection_loss(q, k_sel * scale, k_sel, nsa, n_queries=None) > same


def test_half_precision_is_scored_in_float32_under_autocast_too() -> None:
    nsa = make_nsa(GEOMETRIES[0])
    q, k_cmp, k_sel = (x.bfloat16() for x in draw_tensors(37, nsa))
    exact = selection_loss(q.double(), k_cmp.double(), k_sel.double(), nsa)
    with torch.autocast("cpu", torch.bfloat16):
        loss = selection_loss(q, k_cmp, k_sel, nsa)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), exact, rtol=1e-5, atol=1e-6)


def test_future_and_forced_blocks_do_not_count() -> None:
    nsa = make_nsa(GEOMETRIES[0])
    q, k_cmp, k_sel = draw_tensors(31, nsa)
    (t,) = sample_rows(31, 1).tolist()
    before = selection_loss(q, k_cmp, k_sel, nsa, n_queries=1)
    k_sel[:, t + 1 :] = 1e30
    k_cmp[:, max(0, (t + 1 - nsa.l) // nsa.d + 1) :] = 1e30
    assert torch.equal(selection_loss(q, k_cmp, k_sel, nsa, n_queries=1), before)
    # A text that forced blocks cover has nothing to choose.
    q, k_cmp, k_sel = draw_tensors(2 * nsa.l_sel, nsa)
    assert selection_loss(q, k_cmp, k_sel, nsa).item() == 0.0


@looped
@pytest.mark.parametrize("length", [65, 100, 2048, 32768])
def test_samples_are_spread_over_the_text_and_within_blocks(length: int) -> None:
    rows = sample_rows(length, 64).tolist()
    assert len(set(rows)) == 64 and rows == sorted(rows) and rows[0] >= 0 and rows[-1] < length
    for piece in range(4):
        assert 15 <= sum(piece * length <= 4 * row < (piece + 1) * length for row in rows) <= 17
    if length >= 2048:
        assert len({row % 64 for row in rows}) >= 24
    assert sample_rows(length, None).tolist() == list(range(length))


@pytest.mark.parametrize("span", [None, make_packed_span([101, 0, 29, 1])], ids=str)
def test_64_queries_are_sampled_by_default(span: Span | None) -> None:
    nsa = make_nsa(GEOMETRIES[0])
    q, k_cmp, k_sel = draw_tensors(131, nsa, span, B=1)
    assert torch.equal(
        selection_loss(q, k_cmp, k_sel, nsa, span=span), selection_loss(q, k_cmp, k_sel, nsa, n_queries=64, span=span)
    )


def test_sampling_fits_32_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled kernels use 32-bit integers: a product above 2**31 does not compile there, or wraps around."""
    lengths = [*range(513, 3000, 97), 32768, 65536, 100_001, 2**20]
    wide = [sample_rows(length, count) for length in lengths for count in (64, 512)]
    monkeypatch.setattr(geometry, "positions", lambda *args: torch.arange(*args[:2], dtype=torch.int32))
    narrow = [sample_rows(length, count) for length in lengths for count in (64, 512)]
    assert all(rows.dtype == torch.int32 and torch.equal(rows, same) for rows, same in zip(narrow, wide, strict=True))


@pytest.mark.parametrize("geometry", [GEOMETRIES[0], Geometry(1, 1, 64, 16, 512)])
def test_memory_is_linear_in_tokens(geometry: Geometry) -> None:
    """With one key per token too: no tensor has an entry for each pair of a key and a block."""
    nsa, largest = make_nsa(geometry), list[int]()
    for T in (512, 2048):
        q, k_cmp, k_sel = (x.requires_grad_() for x in draw_tensors(T, nsa, H=2, G=1, B=1))
        with RecordDeviceOps() as seen:
            selection_loss(q, k_cmp, k_sel, nsa, n_queries=3).backward()
        largest.append(seen.largest)
    assert largest[1] < 4.5 * largest[0]


class RecordDeviceOps(TorchDispatchMode):
    """Record the device types of the tensors of all operations, and the number of elements of the largest."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [x for x in tree_leaves((args, kwargs, result)) if isinstance(x, torch.Tensor)]
        self.seen |= {x.device.type for x in tensors}
        self.largest = max([self.largest, *(x.untyped_storage().size() // x.element_size() for x in tensors)])
        return result


@pytest.mark.parametrize("span", [Span.full(37), Span.chunk(21, 8)], ids=str)
def test_one_document_needs_no_copy_from_the_host(span: Span, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA graph would replay a copy from freed memory. Any CPU tensor indicates such a copy."""
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())  # the meta device has none
    nsa = make_nsa(GEOMETRIES[0])
    q, k_cmp, k_sel = (x.to("meta").requires_grad_() for x in draw_tensors(37, nsa, span))
    with RecordDeviceOps() as devices:
        selection_loss(q, k_cmp, k_sel, nsa, n_queries=5, layout=span.layout(nsa, q.device)).backward()
    assert devices.seen == {"meta"}


def test_inconsistent_inputs_raise() -> None:
    nsa = make_nsa(GEOMETRIES[0])
    q, k_cmp, k_sel = draw_tensors(31, nsa)
    with pytest.raises(ValueError, match="k_cmp: expected shape"):
        selection_loss(q, k_cmp[:, 1:], k_sel, nsa)
    with pytest.raises(ValueError, match="k_sel: expected shape"):
        selection_loss(q, k_cmp, k_sel[:, 1:], nsa)
    with pytest.raises(ValueError, match="n_queries = 0"):
        selection_loss(q, k_cmp, k_sel, nsa, n_queries=0)


def test_brute_force_and_library_agree_on_forced_blocks() -> None:
    geometry = GEOMETRIES[0]
    flat = np.zeros(12)
    assert select_by_importance(flat, 40, geometry) == [0, 9, 10]
