"""The fused gated sum against the reference, forward and backward."""

from __future__ import annotations

import pytest
import torch
from looping import looped

from nsa_lab.attention import reference
from nsa_lab.attention.kernels.gating import gated_sum

CUDA = torch.cuda.is_available()
CASES = [(2, 5, 3, 96), (1, 1, 1, 32), (1, 33, 6, 64), (1, 7, 12, 128)] + ([(4, 2048, 12, 64)] if CUDA else [])


def make_inputs(case, dtype, device, gate_dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    outs = [torch.randn(case, generator=generator).to(device, dtype).requires_grad_() for _ in range(3)]
    gates = torch.rand((*case[:3], 3), generator=generator).to(device, gate_dtype).requires_grad_()
    return *outs, gates


@looped
@pytest.mark.parametrize("gate_dtype", ["float32", "own"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16] + ([torch.bfloat16] if CUDA else []), ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_the_definition(case, dtype, gate_dtype, device, poisoned, assert_error_within):
    x = make_inputs(case, dtype, device, dtype if gate_dtype == "own" else torch.float32)
    exact_x = [a.detach().double().requires_grad_() for a in x]
    plain_x = [a.detach().clone().requires_grad_() for a in x]
    out, exact, plain = gated_sum(*x), reference.combine(*exact_x), reference.combine(*plain_x)
    assert out.dtype == dtype
    assert_error_within("out", out, exact, plain, 2)
    d_out = torch.randn(case, generator=torch.Generator().manual_seed(1)).to(out)
    grads = torch.autograd.grad(out, x, d_out)
    names = ("d_cmp", "d_sel", "d_win", "d_gates")
    wide = torch.autograd.grad(exact, exact_x, d_out.double())
    low = torch.autograd.grad(plain, plain_x, d_out.to(plain))
    for name, a, b, c in zip(names, grads, wide, low, strict=True):
        assert_error_within(name, a, b, c, 3)


def test_strides_do_not_matter(device):
    x = make_inputs((2, 9, 4, 32), torch.float32, device)
    strided = [a.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for a in x]
    out, other = gated_sum(*x), gated_sum(*strided)
    d_out = torch.randn_like(out).transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(out, other)
    assert all(map(torch.equal, torch.autograd.grad(out, x, d_out), torch.autograd.grad(other, strided, d_out)))


@pytest.mark.slow
def test_opcheck_and_torch_compile(device):
    x = make_inputs((1, 5, 2, 32), torch.float32, device)
    torch.library.opcheck(torch.ops.nsa_lab.gated_sum.default, x)
    compiled = torch.compile(gated_sum, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*x), gated_sum(*x))


def test_mismatched_shapes_raise(device):
    a, b, c, gates = make_inputs((1, 5, 2, 32), torch.float32, device)
    with pytest.raises(ValueError, match="gates"):
        gated_sum(a, b, c, gates[..., :2])
