"""The kernels have no second derivatives: they are refused, and first derivatives with create_graph=True are right."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from nsa_lab import attention
from nsa_lab.config import NSAConfig

NSA = NSAConfig(l=8, d=4, l_sel=16, n_sel=3, w=20)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def make_inputs() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "q": (1, 37, 2, 16),
        **{f"{kind}_{branch}": (1, 37, 1, 16) for kind in "kv" for branch in ("cmp", "sel", "win")},
    }
    inputs = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    inputs["gates"] = torch.rand(1, 37, 2, 3, generator=generator)
    return {name: x.to(DEVICE).requires_grad_() for name, x in inputs.items()}


def compute_all(x: dict[str, Tensor], backend: str) -> Tensor:
    k_cmp, v_cmp = attention.compress(x["k_cmp"], NSA), attention.compress(x["v_cmp"], NSA)
    rest = x["k_sel"], x["v_sel"], x["k_win"], x["v_win"], x["gates"]
    return attention.nsa_attention(x["q"], k_cmp, v_cmp, *rest, NSA, backend=backend)


def compute_compressed(x: dict[str, Tensor], backend: str) -> Tensor:
    k_cmp, v_cmp = attention.compress(x["k_cmp"], NSA), attention.compress(x["v_cmp"], NSA)
    return attention.compressed_attention(x["q"], k_cmp, v_cmp, NSA, backend=backend)[0]


def compute_selected(x: dict[str, Tensor], backend: str) -> Tensor:
    blocks = torch.tensor([0, 1, 2], dtype=torch.int32, device=DEVICE).expand(1, 37, 1, 3).contiguous()
    return attention.selected_attention(x["q"], x["k_sel"], x["v_sel"], blocks, NSA, backend=backend)[0]


def compute_window(x: dict[str, Tensor], backend: str) -> Tensor:
    return attention.window_attention(x["q"], x["k_win"], x["v_win"], NSA, backend=backend)[0]


CASES = {
    compute_all: ("q", "k_cmp", "v_sel", "k_win", "gates"),
    compute_compressed: ("q", "k_cmp", "v_cmp"),
    compute_selected: ("q", "k_sel", "v_sel"),
    compute_window: ("q", "k_win", "v_win"),
}


@pytest.mark.slow
@pytest.mark.parametrize("compute", CASES)
def test_second_derivatives_are_refused(compute: Callable[[dict[str, Tensor], str], Tensor]) -> None:
    names, first = CASES[compute], {}
    for backend in ("torch", "triton"):
        x = make_inputs()
        sources = [x[name] for name in names]
        grads = torch.autograd.grad(compute(x, backend).pow(2).sum(), sources, create_graph=True)
        first[backend] = [grad.detach() for grad in grads]
        for grad in grads:
            if backend == "torch":
                second = torch.autograd.grad(grad.pow(2).sum(), sources, retain_graph=True, allow_unused=True)
                assert any(part is not None and part.abs().sum() > 0 for part in second)
                continue
            with pytest.raises(
                NotImplementedError, match=r"no second derivatives: .*; use backend='torch', which has them"
            ):
                torch.autograd.grad(grad.pow(2).sum(), sources, retain_graph=True)
    for by_torch, by_triton in zip(first["torch"], first["triton"], strict=True):
        torch.testing.assert_close(by_triton, by_torch, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_checkpointed_kernels_allow_differentiable_first_derivatives() -> None:
    first: dict[str, Tensor] = {}
    for backend in ("torch", "triton"):
        x = make_inputs()
        output = checkpoint(compute_all, x, backend, use_reentrant=False)
        (grad,) = torch.autograd.grad(output.pow(2).sum(), x["q"], create_graph=True)
        first[backend] = grad.detach()
        if backend == "triton":
            with pytest.raises(NotImplementedError, match="no second derivatives"):
                grad.pow(2).sum().backward()
    torch.testing.assert_close(first["triton"], first["torch"], rtol=1e-3, atol=1e-4)
