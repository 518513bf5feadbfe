"""Where each branch covers everything it is dense causal attention; the dense baseline itself against brute force."""

from __future__ import annotations

import brute_force
import numpy as np
import pytest
import torch
from attention_inputs import Shape, arms, running
from hypothesis import given
from hypothesis import strategies as st

from nsa_lab import attention
from nsa_lab.attention import dense, flash, geometry
from nsa_lab.config import NSAConfig


@pytest.mark.parametrize(("G", "h", "d_v"), [(1, 1, 6), (2, 3, 6), (3, 1, 4)])
@pytest.mark.parametrize("length", [1, 2, 19])
def test_the_dense_baseline_equals_brute_force(length: int, G: int, h: int, d_v: int) -> None:
    x = Shape(T=length, B=2, G=G, h=h, d_v=d_v).inputs()
    expected, _ = brute_force.dense_attention(x.q.numpy(), x.k_win.numpy(), x.v_win.numpy())
    np.testing.assert_allclose(attention.dense_attention(x.q, x.k_win, x.v_win).numpy(), expected, rtol=1e-12, atol=1e-12)


@arms
@given(n_sel=st.integers(3, 6), l_sel=st.integers(1, 8), data=st.data())
def test_selection_is_dense_up_to_its_budget_and_not_one_token_past_it(
    arm: str, n_sel: int, l_sel: int, data: st.DataObject
) -> None:
    nsa = NSAConfig(l=2, d=1, l_sel=l_sel, n_sel=n_sel, w=3)
    budget = n_sel * l_sel
    shape = Shape(nsa, T=data.draw(st.integers(1, budget)), h=2)
    x = shape.inputs()
    beyond = Shape(nsa, T=budget + 1, h=2).inputs()
    with running(arm) as backend:
        assert_dense(x, nsa, backend, up_to=shape.T)
        assert_dense(beyond, nsa, backend, up_to=budget)


def assert_dense(x, nsa: NSAConfig, backend: str, up_to: int) -> None:
    _, lse = attention.compressed_attention(x.q, x.k_cmp, x.v_cmp, nsa, backend=backend)
    blocks = attention.select_blocks(x.q, x.k_cmp, lse, nsa, backend=backend)
    out, _ = attention.selected_attention(x.q, x.k_sel, x.v_sel, blocks, nsa, backend=backend)
    close = torch.isclose(out, attention.dense_attention(x.q, x.k_sel, x.v_sel), rtol=1e-12, atol=1e-12)
    assert close[:, :up_to].all()
    assert not close[:, up_to:].any()


@arms
def test_a_window_of_the_whole_sequence_is_dense(arm: str) -> None:
    nsa = NSAConfig(l=4, d=2, l_sel=4, n_sel=3, w=29)
    x = Shape(nsa, T=30).inputs()
    with running(arm) as backend:
        out, _ = attention.window_attention(x.q, x.k_win, x.v_win, nsa, backend=backend)
    close = torch.isclose(out, attention.dense_attention(x.q, x.k_win, x.v_win), rtol=1e-12, atol=1e-12)
    close = close.flatten(2).all(-1)[0]
    assert close[:29].all() and not close[29]


@arms
def test_compression_of_single_tokens_is_dense_and_so_is_all_of_nsa(arm: str) -> None:
    nsa = NSAConfig(l=1, d=1, l_sel=8, n_sel=4, w=32)
    x = Shape(nsa, T=32).inputs()
    k, v = x.k_sel, x.v_sel
    gates = torch.rand(1, 32, 6, 3, dtype=torch.float64).softmax(-1)
    assert geometry.num_compressed(32, nsa) == 32 and torch.equal(attention.compress(k, nsa), k)
    with running(arm) as backend:
        out = attention.nsa_attention(x.q, k, v, k, v, k, v, gates, nsa, backend=backend)
    torch.testing.assert_close(out, attention.dense_attention(x.q, k, v), rtol=1e-12, atol=1e-12)


@arms
@pytest.mark.parametrize("branch", [0, 1, 2])
def test_a_gate_of_one_branch_gives_that_branch_alone(arm: str, branch: int) -> None:
    """Order cmp, sel, win; the others contribute exactly nothing."""
    x, nsa = Shape().inputs(), Shape().nsa
    gates = torch.zeros_like(x.gates)
    gates[..., branch] = 1
    with running(arm) as backend:
        out_cmp, lse = attention.compressed_attention(x.q, x.k_cmp, x.v_cmp, nsa, backend=backend)
        blocks = attention.select_blocks(x.q, x.k_cmp, lse, nsa, backend=backend)
        out_sel, _ = attention.selected_attention(x.q, x.k_sel, x.v_sel, blocks, nsa, backend=backend)
        out_win, _ = attention.window_attention(x.q, x.k_win, x.v_win, nsa, backend=backend)
        mixed = attention.nsa_attention(*x._replace(gates=gates), nsa, backend=backend)
    assert torch.equal(mixed, (out_cmp, out_sel, out_win)[branch])


class FlashStub:
    """flash-attn's documented semantics: [B, T, H, D], a window that counts keys beside the query's own, LSE [B, H, T]."""

    def __init__(self) -> None:
        self.calls = 0

    def flash_attn_func(self, q, k, v, causal=False, window_size=(-1, -1), return_attn_probs=False):
        self.calls += 1
        left, right = window_size
        T = q.shape[1]
        behind = torch.arange(T)[:, None] - torch.arange(T)
        allowed = (behind >= 0 if causal else behind >= -right) & ((behind <= left) | (left < 0))
        heads = q.shape[2] // k.shape[2]
        scores = torch.einsum("bthd,bshd->bhts", q, k.repeat_interleave(heads, 2)) * q.shape[-1] ** -0.5
        scores = scores.masked_fill(~allowed, float("-inf"))
        out = torch.einsum("bhts,bshd->bthd", scores.softmax(-1), v.repeat_interleave(heads, 2))
        return (out, scores.logsumexp(-1), None) if return_attn_probs else out


@pytest.mark.parametrize("w", [1, 4, 100])
def test_flash_attn_is_asked_for_the_same_window(w: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its window is inclusive on both ends: w keys are a left size of w - 1."""
    stub = FlashStub()
    monkeypatch.setattr(flash, "_library", lambda: stub)
    nsa = NSAConfig(l=4, d=2, l_sel=4, n_sel=3, w=w)
    x = Shape(nsa, B=2, d_v=6).inputs()
    out, lse = flash.flash_window(x.q, x.k_win, x.v_win, nsa)
    true_out, true_lse = attention.window_attention(x.q, x.k_win, x.v_win, nsa, backend="reference")
    torch.testing.assert_close(out, true_out, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, true_lse, rtol=1e-12, atol=1e-12)
    baseline = dense.dense_attention(x.q, x.k_win, x.v_win, backend="flash")
    torch.testing.assert_close(baseline, attention.dense_attention(x.q, x.k_win, x.v_win), rtol=1e-12, atol=1e-12)
    assert stub.calls == 2
