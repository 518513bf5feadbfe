"""Branches that cover all keys equal dense causal attention, and the dense baseline equals brute force."""

from __future__ import annotations

import itertools
import sys
from types import SimpleNamespace

import brute_force
import numpy as np
import pytest
import torch
from attention_inputs import Shape, every_variant, use_variant
from hypothesis import given
from hypothesis import strategies as st
from looping import looped

from nsa_lab import attention
from nsa_lab.attention import Span, dense, flash, geometry
from nsa_lab.config import NSAConfig


@looped
@pytest.mark.parametrize(("G", "h", "d_v"), [(1, 1, 6), (2, 3, 6), (3, 1, 4)])
@pytest.mark.parametrize("length", [1, 2, 19])
def test_the_dense_baseline_equals_brute_force(length: int, G: int, h: int, d_v: int) -> None:
    x = Shape(T=length, B=2, G=G, h=h, d_v=d_v).inputs()
    expected, _ = brute_force.dense_attention(x.q.numpy(), x.k_win.numpy(), x.v_win.numpy())
    np.testing.assert_allclose(attention.dense_attention(x.q, x.k_win, x.v_win).numpy(), expected, rtol=1e-12, atol=1e-12)


@every_variant
@given(n_sel=st.integers(3, 6), l_sel=st.integers(1, 8), data=st.data())
def test_selection_is_dense_exactly_up_to_its_budget(variant: str, n_sel: int, l_sel: int, data: st.DataObject) -> None:
    nsa = NSAConfig(l=2, d=1, l_sel=l_sel, n_sel=n_sel, w=3)
    budget = n_sel * l_sel
    shape = Shape(nsa, T=data.draw(st.integers(1, budget)), h=2)
    x = shape.inputs()
    beyond = Shape(nsa, T=budget + 1, h=2).inputs()
    with use_variant(variant) as backend:
        assert_dense(x, nsa, backend, up_to=shape.T)
        assert_dense(beyond, nsa, backend, up_to=budget)


def assert_dense(x, nsa: NSAConfig, backend: str, up_to: int) -> None:
    _, lse = attention.compressed_attention(x.q, x.k_cmp, x.v_cmp, nsa, backend=backend)
    blocks = attention.select_blocks(x.q, x.k_cmp, lse, nsa, backend=backend)
    out, _ = attention.selected_attention(x.q, x.k_sel, x.v_sel, blocks, nsa, backend=backend)
    close = torch.isclose(out, attention.dense_attention(x.q, x.k_sel, x.v_sel), rtol=1e-12, atol=1e-12)
    assert close[:, :up_to].all()
    assert not close[:, up_to:].any()


@looped
@every_variant
def test_a_window_of_the_whole_sequence_is_dense(variant: str) -> None:
    nsa = NSAConfig(l=4, d=2, l_sel=4, n_sel=3, w=29)
    x = Shape(nsa, T=30).inputs()
    with use_variant(variant) as backend:
        out, _ = attention.window_attention(x.q, x.k_win, x.v_win, nsa, backend=backend)
    close = torch.isclose(out, attention.dense_attention(x.q, x.k_win, x.v_win), rtol=1e-12, atol=1e-12)
    close = close.flatten(2).all(-1)[0]
    assert close[:29].all() and not close[29]


@looped
@every_variant
def test_compression_of_single_tokens_is_dense_and_so_is_all_of_nsa(variant: str) -> None:
    nsa = NSAConfig(l=1, d=1, l_sel=8, n_sel=4, w=32)
    x = Shape(nsa, T=32).inputs()
    k, v = x.k_sel, x.v_sel
    gates = torch.rand(1, 32, 6, 3, dtype=torch.float64).softmax(-1)
    assert geometry.num_compressed(32, nsa) == 32 and torch.equal(attention.compress(k, nsa), k)
    with use_variant(variant) as backend:
        out = attention.nsa_attention(x.q, k, v, k, v, k, v, gates, nsa, backend=backend)
    torch.testing.assert_close(out, attention.dense_attention(x.q, k, v), rtol=1e-12, atol=1e-12)


@looped
@every_variant
@pytest.mark.parametrize("branch", [0, 1, 2])
def test_a_gate_on_one_branch_returns_that_branch(variant: str, branch: int) -> None:
    """Order cmp, sel, win; the others contribute exactly nothing."""
    x, nsa = Shape().inputs(), Shape().nsa
    gates = torch.zeros_like(x.gates)
    gates[..., branch] = 1
    with use_variant(variant) as backend:
        out_cmp, lse = attention.compressed_attention(x.q, x.k_cmp, x.v_cmp, nsa, backend=backend)
        blocks = attention.select_blocks(x.q, x.k_cmp, lse, nsa, backend=backend)
        out_sel, _ = attention.selected_attention(x.q, x.k_sel, x.v_sel, blocks, nsa, backend=backend)
        out_win, _ = attention.window_attention(x.q, x.k_win, x.v_win, nsa, backend=backend)
        out = attention.nsa_attention(*x._replace(gates=gates), nsa, backend=backend)
    assert torch.equal(out, (out_cmp, out_sel, out_win)[branch])


class FlashStub:
    """Documented semantics of flash-attn: [B, T, H, D], a window that excludes the query's own key, LSE [B, H, T].

    If there are fewer queries than keys, they are the last ones. Packed: rows of all documents [tokens, H, D], LSE
    [H, tokens]; documents longer than `max_q` are not computed.
    """

    def __init__(self) -> None:
        self.calls = 0
        self.max_seqlens: list[int] = []

    def flash_attn_varlen_func(self, q, k, v, cu_q, cu_k, max_q, max_k, **options):
        assert cu_q.dtype == cu_k.dtype == torch.int32 and max_q == max_k
        self.max_seqlens.append(max_q)
        parts = []
        for (begin, end), (first, last) in zip(*(itertools.pairwise(cu.tolist()) for cu in (cu_q, cu_k)), strict=True):
            if 0 < end - begin <= max_q:
                parts.append(self.flash_attn_func(q[None, begin:end], k[None, first:last], v[None, first:last], **options))
        if not options.get("return_attn_probs"):
            return torch.cat(parts, 1)[0]
        return torch.cat([out for out, _, _ in parts], 1)[0], torch.cat([lse for _, lse, _ in parts], 2)[0], None

    def flash_attn_func(self, q, k, v, causal=False, window_size=(-1, -1), return_attn_probs=False):
        self.calls += 1
        left, right = window_size
        T, S = q.shape[1], k.shape[1]
        distance = torch.arange(S - T, S)[:, None] - torch.arange(S)
        allowed = (distance >= 0 if causal else distance >= -right) & ((distance <= left) | (left < 0))
        heads = q.shape[2] // k.shape[2]
        scores = torch.einsum("bthd,bshd->bhts", q, k.repeat_interleave(heads, 2)) * q.shape[-1] ** -0.5
        scores = scores.masked_fill(~allowed, float("-inf"))
        out = torch.einsum("bhts,bshd->bthd", scores.softmax(-1), v.repeat_interleave(heads, 2))
        return (out, scores.logsumexp(-1), None) if return_attn_probs else out


@pytest.mark.parametrize("w", [1, 4, 100])
def test_flash_attn_gets_the_same_window(w: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its window is inclusive on both ends: w keys correspond to a left size of w - 1."""
    stub = FlashStub()
    monkeypatch.setattr(flash, "_import_flash_attn", lambda: stub)
    nsa = NSAConfig(l=4, d=2, l_sel=4, n_sel=3, w=w)
    x = Shape(nsa, B=2, d_v=6).inputs()
    out, lse = flash.flash_window_attention(x.q, x.k_win, x.v_win, nsa)
    true_out, true_lse = attention.window_attention(x.q, x.k_win, x.v_win, nsa, backend="reference")
    torch.testing.assert_close(out, true_out, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, true_lse, rtol=1e-12, atol=1e-12)
    baseline = dense.dense_attention(x.q, x.k_win, x.v_win, backend="flash")
    torch.testing.assert_close(baseline, attention.dense_attention(x.q, x.k_win, x.v_win), rtol=1e-12, atol=1e-12)
    assert stub.calls == 2


LENGTHS = (7, 0, 1, 19, 13)
BOUNDS = torch.tensor([0, *LENGTHS]).cumsum(0).int()
SPANS = [Span.packed(BOUNDS), Span.packed(BOUNDS, capacity=9), Span.packed(BOUNDS, 9, longest=25), Span.chunk(23, 17)]


@pytest.fixture
def hopper_stub(monkeypatch: pytest.MonkeyPatch) -> FlashStub:
    """Use varlen attention, but separate calls for documents of at least 8 tokens, padded to multiples of 5."""
    stub = FlashStub()
    monkeypatch.setattr(
        dense,
        "_get_varlen_attn",
        lambda q, v: lambda *x, window_size: stub.flash_attn_varlen_func(*x, causal=window_size == (-1, 0)),
    )
    for name, value in {"LONG_DOCUMENT": 8, "LONG_DOCUMENT_MULTIPLE": 5, "_prefers_sdpa": lambda device: True}.items():
        monkeypatch.setattr(dense, name, value)
    return stub


@pytest.mark.parametrize("lengths", [LENGTHS, (9, 8, 3, 4), (7, 1, 30), (40,), (8, 7, 0, 0, 6, 19)], ids=repr)
@pytest.mark.parametrize("capacity", [None, 9])
def test_long_documents_are_attended_separately(
    hopper_stub: FlashStub, monkeypatch: pytest.MonkeyPatch, lengths: tuple[int, ...], capacity: int | None
) -> None:
    """Outputs against loops, gradients against each document by itself; rows laid out distance a document touch neither."""
    span = Span.packed(torch.tensor([0, *lengths]).cumsum(0).int(), capacity=capacity)
    x = Shape(T=span.n_queries, G=2, h=3, d_v=6).inputs()
    q, k, v = (t.requires_grad_() for t in (x.q, x.k_win, x.v_win))
    out = attention.dense_attention(q, k, v, span=span)
    expected = compute_expected(span, q.detach(), k.detach(), v.detach())
    np.testing.assert_allclose(out.detach().numpy(), expected, rtol=1e-12, atol=1e-12)
    g = torch.randn_like(out)
    actual = torch.autograd.grad(out, (q, k, v), g)
    monkeypatch.setattr(dense, "_get_varlen_attn", lambda q, v: None)
    for a, b in zip(actual, torch.autograd.grad(attention.dense_attention(q, k, v, span=span), (q, k, v), g), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    nonempty = [n for n in lengths if n]
    runs = [list(run) for is_long, run in itertools.groupby(nonempty, key=lambda n: n >= 8) if not is_long]
    assert hopper_stub.max_seqlens == [max(run) for run in runs], "one call for the documents between two long ones"


def test_a_captured_graph_does_not_depend_on_document_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph is replayed for other documents. Before Hopper, and on ROCm, SDPA has no faster kernel for one document."""
    device = torch.device("cuda")
    monkeypatch.setattr(torch.backends.cuda, "cudnn_sdp_enabled", lambda: True)
    for capturing, capability, prefers_sdpa in ((False, (9, 0), True), (True, (9, 0), False), (False, (8, 0), False)):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda value=capturing: value)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, value=capability: value)
        assert dense._prefers_sdpa(device) == prefers_sdpa
        with dense.force_single_call(), dense.force_single_call():
            assert not dense._prefers_sdpa(device)
        assert dense._prefers_sdpa(device) == prefers_sdpa
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 4))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.backends.cuda, "cudnn_sdp_enabled", lambda: False)
    assert not dense._prefers_sdpa(device), "cuDNN is disabled"
    monkeypatch.setattr(torch.backends.cuda, "cudnn_sdp_enabled", lambda: True)
    assert dense._prefers_sdpa(device)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert not dense._prefers_sdpa(device)


def test_a_failed_capture_does_not_slow_later_calls() -> None:
    with pytest.raises(ZeroDivisionError), dense.force_single_call():
        assert dense._single_call_contexts
        raise ZeroDivisionError
    assert not dense._single_call_contexts


@looped
@pytest.mark.parametrize(
    ("longest", "row", "max_seqlen"), [(16, 40, 16), (17, 40, 32), (33, 40, 40), (40, 40, 40), (1, 3, 1)]
)
def test_max_seqlen_has_few_values_within_the_row(
    longest: int, row: int, max_seqlen: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the next power of two, so that torch.compile sees few lengths."""
    span = Span.packed(torch.tensor([0, 1, row] if longest < row else [0, row], dtype=torch.int32), 4, row)
    monkeypatch.setattr(Span, "longest_allocated", longest)
    assert span.layout(NSAConfig(), torch.device("cpu")).max_seqlen == max_seqlen


def compute_expected(span: Span, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> np.ndarray:
    """Compute attention with loops over each document; for a chunk, return its last rows."""
    rows = [
        brute_force.dense_attention(*(x[:, d.key_rows].numpy() for x in (pad_queries(span, q), k, v)))[0][:, d.start :]
        for d in span.documents
        if d.end
    ]
    return np.concatenate(rows, 1)


def pad_queries(span: Span, q: torch.Tensor) -> torch.Tensor:
    """Prepend zeros, so that there is a query for every key of a chunk."""
    return torch.cat([q.new_zeros(q.shape[0], span.start, *q.shape[2:]), q], 1)


@looped
@pytest.mark.parametrize("span", SPANS, ids=repr)
@pytest.mark.parametrize("kind", ["torch", "varlen", "varlen without groups", "flash"])
def test_dense_attention_of_a_span_equals_brute_force(kind: str, span: Span, monkeypatch: pytest.MonkeyPatch) -> None:
    """`varlen`: as on CUDA, with PyTorch's varlen attention, which has a window instead of flash-attn's causal flag. In
    torch 2.11 it needs equal numbers of query and key heads.
    """
    stub = FlashStub()

    def grouped(q, k, v, cu_q, cu_k, max_q, max_k, *, window_size, enable_gqa=False):
        assert enable_gqa and window_size == (-1, 0)
        return stub.flash_attn_varlen_func(q, k, v, cu_q, cu_k, max_q, max_k, causal=True)

    def ungrouped(q, k, v, cu_q, cu_k, max_q, max_k, *, window_size):
        assert q.shape == k.shape and window_size == (-1, 0)
        return stub.flash_attn_varlen_func(q, k, v, cu_q, cu_k, max_q, max_k, causal=True)

    monkeypatch.setattr(flash, "_import_flash_attn", lambda: stub)
    if kind.startswith("varlen"):
        module = SimpleNamespace(varlen_attn=grouped if kind == "varlen" else ungrouped)
        monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", module)
        varlen_attn = dense._load_varlen_attn.__wrapped__()
        monkeypatch.setattr(dense, "_get_varlen_attn", lambda q, v: varlen_attn)
    x = Shape(T=40, G=2, h=3, d_v=6).inputs()
    q, k, v = x.q[:, span.start : span.start + span.n_queries], x.k_win, x.v_win
    out = attention.dense_attention(q, k, v, backend="flash" if kind == "flash" else "torch", span=span)
    np.testing.assert_allclose(out.numpy(), compute_expected(span, q, k, v), rtol=1e-12, atol=1e-12)
    packed = span.kind == "packed" and kind != "torch"
    assert stub.max_seqlens == ([span.max_document_length or (40 if span.capacity else 19)] if packed else []), (
        "with a capacity, max_seqlen is the row or `longest`"
    )


@looped
@pytest.mark.parametrize("span", SPANS, ids=repr)
def test_flash_attn_gets_the_same_window_in_every_document(span: Span, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash, "_import_flash_attn", FlashStub)
    nsa = NSAConfig(l=4, d=2, l_sel=4, n_sel=3, w=5)
    x = Shape(nsa, T=40, d_v=6).inputs()
    q = x.q[:, span.start : span.start + span.n_queries]
    actual = flash.flash_window_attention(q, x.k_win, x.v_win, nsa, span=span)
    expected = attention.window_attention(q, x.k_win, x.v_win, nsa, backend="reference", span=span)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_a_flash_attn_that_pads_its_lse_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    class Older(FlashStub):
        def flash_attn_varlen_func(self, *x, **options):
            out, lse, none = super().flash_attn_varlen_func(*x, **options)
            return out, lse[None], none

    monkeypatch.setattr(flash, "_import_flash_attn", Older)
    x = Shape(T=40, d_v=6).inputs()
    with pytest.raises(NotImplementedError, match=r"as from 2\.6\.2 on; install a newer version, or use backend='torch'"):
        flash.flash_window_attention(x.q, x.k_win, x.v_win, Shape().nsa, span=SPANS[0])


def test_documents_use_varlen_attention_if_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA, in half precision, with equal and supported head widths."""
    monkeypatch.setattr(dense, "_load_varlen_attn", lambda: "kernel")

    class FakeTensor:
        def __init__(self, width: int, dtype: torch.dtype = torch.bfloat16, cuda: bool = True) -> None:
            self.shape, self.dtype, self.is_cuda = (1, 9, 2, width), dtype, cuda

    assert (
        dense._get_varlen_attn(FakeTensor(64), FakeTensor(64))
        == dense._get_varlen_attn(FakeTensor(256), FakeTensor(256))
        == "kernel"
    )
    others = [
        (FakeTensor(64), FakeTensor(32)),
        (FakeTensor(264), FakeTensor(264)),
        (FakeTensor(64, torch.float32), FakeTensor(64)),
        (FakeTensor(64, cuda=False), FakeTensor(64)),
    ]
    assert [dense._get_varlen_attn(*pair) for pair in others] == [None] * 4


def test_short_documents_are_attended_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda")
    monkeypatch.setattr(dense, "_load_varlen_attn", lambda: len)
    monkeypatch.setattr(dense, "_prefers_sdpa", lambda device: True)
    bounds = [torch.tensor([0, n, n + 5], dtype=torch.int32) for n in (dense.LONG_DOCUMENT - 1, dense.LONG_DOCUMENT)]
    short, long = (Span.packed(b, capacity=4, longest=int(b[1])) for b in bounds)
    assert dense.find_single_call(short, cuda) is len
    assert dense.find_single_call(long, cuda) is None
    assert dense.find_single_call(short, torch.device("cpu")) is None
    assert dense.find_single_call(Span.packed(bounds[0]), cuda) is None, "each number of documents would be another graph"
    monkeypatch.setattr(dense, "_prefers_sdpa", lambda device: False)
    assert dense.find_single_call(long, cuda) is len
    monkeypatch.setattr(dense, "_load_varlen_attn", lambda: None)
    assert dense.find_single_call(short, cuda) is None


@pytest.mark.parametrize("capacity", [8, None])
def test_a_layout_gives_the_output_of_its_span(capacity: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one varlen call, and in one call per document."""
    stub = FlashStub()
    monkeypatch.setattr(dense, "supports_varlen", lambda q, v: True)
    monkeypatch.setattr(dense, "_get_varlen_attn", lambda q, v: None)

    def varlen_attn(*x, window_size):
        return stub.flash_attn_varlen_func(*x, causal=window_size == (-1, 0))

    span = Span.packed(BOUNDS, capacity)
    x = Shape(T=40, G=2, h=3, d_v=6).inputs()
    layout = span.layout(NSAConfig(), torch.device("cpu"))
    for single_call in (None, varlen_attn):
        out = dense.dense_attention(x.q, x.k_win, x.v_win, span=span, layout=layout._replace(varlen_attn=single_call))
        np.testing.assert_allclose(out.numpy(), compute_expected(span, x.q, x.k_win, x.v_win), rtol=1e-12, atol=1e-12)
    assert stub.max_seqlens == [40 if capacity else 32]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@looped
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("d_v", [64, 32])
@pytest.mark.parametrize("n_queries", [20_000, 999])
def test_dense_attention_stores_no_scores(dtype: torch.dtype, d_v: int, n_queries: int) -> None:
    """20,000 keys; in float32 their scores for all queries would take 9.6 GB."""
    heads = (6, 64), (2, 64), (2, d_v)
    q, k, v = (torch.randn(1, 20_000, *shape, device="cuda", dtype=dtype) for shape in heads)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    attention.dense_attention(q[:, -n_queries:], k, v, span=Span.chunk(20_000 - n_queries, n_queries))
    assert torch.cuda.max_memory_allocated() - before < 0.3e9
