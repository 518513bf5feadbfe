"""Gradients equal finite differences in float64: every function and variant, including queries without keys."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from attention_inputs import Inputs, Shape, use_variant
from looping import looped
from torch import Tensor
from torch.autograd import gradcheck

from nsa_lab import attention
from nsa_lab.attention.compression import compress, make_phi
from nsa_lab.config import ModelConfig, NSAConfig
from nsa_lab.model import SparseAttention, get_rotary_table

every_variant = pytest.mark.parametrize("variant", ["reference", "torch", "torch, gathering"])
# Tokens 0 and 1 see no compressed block. Three of four selection blocks are selected; the last one is incomplete.
TINY = Shape(nsa=NSAConfig(l=3, d=1, l_sel=2, n_sel=3, w=3), T=7, G=2, h=2, d_k=3, d_v=2)
check = partial(gradcheck, eps=1e-6, atol=1e-7, rtol=1e-6)


def zero_infinite_lse(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    return out, torch.where(torch.isneginf(lse), 0.0, lse)


def make_leaves() -> Inputs:
    return TINY.inputs().map(lambda x: x.requires_grad_())


def make_blocks() -> Tensor:
    """Return fixed blocks with padding, and one query without blocks."""
    x = TINY.inputs()
    _, lse = attention.compressed_attention(x.q, x.k_cmp, x.v_cmp, TINY.nsa, backend="reference")
    blocks = attention.select_blocks(x.q, x.k_cmp, lse, TINY.nsa, backend="reference")
    blocks[:, 4, 1] = -1
    return blocks


@every_variant
def test_compressed_branch(variant: str) -> None:
    x = make_leaves()
    with use_variant(variant) as backend:
        assert check(
            lambda q, k, v: zero_infinite_lse(*attention.compressed_attention(q, k, v, TINY.nsa, backend=backend)),
            (x.q, x.k_cmp, x.v_cmp),
        )


@pytest.mark.slow
@every_variant
def test_selected_branch(variant: str) -> None:
    x, blocks = make_leaves(), make_blocks()
    with use_variant(variant) as backend:
        assert check(
            lambda q, k, v: zero_infinite_lse(*attention.selected_attention(q, k, v, blocks, TINY.nsa, backend=backend)),
            (x.q, x.k_sel, x.v_sel),
        )


@every_variant
def test_window_branch(variant: str) -> None:
    x = make_leaves()
    with use_variant(variant) as backend:
        assert check(
            lambda q, k, v: zero_infinite_lse(*attention.window_attention(q, k, v, TINY.nsa, backend=backend)),
            (x.q, x.k_win, x.v_win),
        )


@pytest.mark.slow
@looped
@every_variant
@pytest.mark.parametrize("projected", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_the_three_branches_and_their_gates(variant: str, projected: bool) -> None:
    """Along random directions and for single entries."""
    with use_variant(variant) as backend:
        attend = lambda *x: attention.nsa_attention(*x, TINY.nsa, backend=backend)  # noqa: E731
        assert check(attend, tuple(make_leaves()), fast_mode=projected)


@looped
@pytest.mark.parametrize("implementation", [attention.reference.compress, compress], ids=["reference", "fast"])
@pytest.mark.parametrize("phi", ["avg", "linear", "mlp", "pool"])
def test_compression(implementation: Callable[..., Tensor], phi: str) -> None:
    nsa = NSAConfig(l=4, d=2, l_sel=2, n_sel=3, w=3, phi=phi)
    torch.manual_seed(0)
    module = make_phi(nsa, 3)
    module = module and module.double()
    x = torch.randn(2, 9, 2, 3, dtype=torch.float64, requires_grad=True)
    weights = tuple(module.parameters()) if module is not None else ()
    assert check(lambda x, *_: implementation(x, nsa, module), (x, *weights))


@pytest.mark.slow
@looped
# In CI, tests/attention/test_torch_parity.py compares the gradients of both backends.
@pytest.mark.parametrize("backend", [pytest.param("reference", marks=pytest.mark.nightly), "torch"])
@pytest.mark.parametrize("phi", ["avg", "linear", "mlp", "pool"])
@pytest.mark.parametrize("gate", ["sigmoid", "softmax"])
def test_the_whole_layer(backend: str, phi: str, gate: str) -> None:
    """Projection, RoPE, compression, branches, gate and output, for its input and all weights."""
    nsa = TINY.nsa.model_copy(update={"phi": phi, "gate": gate})
    config = ModelConfig(dim=3, n_heads=2, n_kv_groups=1, d_k=2, d_v=1, nsa=nsa)
    torch.manual_seed(0)
    layer = SparseAttention(config, attention.resolve_backend("cpu", torch.float64, nsa, config, backend)).double()
    rotary = get_rotary_table(TINY.T, config.d_k, config.rope_theta, torch.device("cpu"))
    x = torch.randn(1, TINY.T, config.dim, dtype=torch.float64, requires_grad=True)
    assert check(lambda x, *_: layer(x, rotary)[0], (x, *layer.parameters()), fast_mode=phi == "mlp")


@every_variant
def test_a_query_without_keys_has_zero_output_and_gradients(variant: str) -> None:
    """For any incoming gradient, also of its LSE of -inf."""
    shape = Shape(nsa=NSAConfig(l=8, d=4, l_sel=4, n_sel=3, w=3), T=7)
    x = shape.inputs().map(lambda x: x.requires_grad_())
    blocks = torch.full((1, shape.T, shape.G, 3), -1, dtype=torch.int32)
    with use_variant(variant) as backend:
        cmp, sel = (x.q, x.k_cmp, x.v_cmp), (x.q, x.k_sel, x.v_sel)
        results = [
            (attention.compressed_attention(*cmp, shape.nsa, backend=backend), cmp),
            (attention.selected_attention(*sel, blocks, shape.nsa, backend=backend), sel),
        ]
    for (out, lse), inputs in results:
        assert (out == 0).all() and torch.isneginf(lse).all()
        for gradient in torch.autograd.grad((out, lse), inputs, (torch.ones_like(out), torch.ones_like(lse))):
            assert (gradient == 0).all()


@every_variant
def test_two_forward_passes_before_backward_are_independent(variant: str) -> None:
    first, second = (Shape(seed=seed).inputs().map(lambda x: x.requires_grad_()) for seed in (0, 1))
    with use_variant(variant) as backend:
        separate = torch.autograd.grad(attention.nsa_attention(*first, Shape().nsa, backend=backend).square().sum(), first)
        out = attention.nsa_attention(*first, Shape().nsa, backend=backend)
        attention.nsa_attention(*second, Shape().nsa, backend=backend).sum().backward()
        interleaved = torch.autograd.grad(out.square().sum(), first)
    assert all(torch.equal(a, b) for a, b in zip(separate, interleaved, strict=True))
