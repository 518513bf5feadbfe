"""The selection loss by kernels against the same loss by PyTorch in float64, which tests/attention compares with loops."""

from __future__ import annotations

import pytest
import torch
from looping import looped

from nsa_lab.attention import Span, selection_loss
from nsa_lab.attention.kernels.block_mass import block_mass
from nsa_lab.config import NSAConfig

CUDA = torch.cuda.is_available()
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if CUDA else [])


def packed(*bounds: int, **options: int) -> Span:
    return Span.packed(torch.tensor(bounds, dtype=torch.int32), **options)


# batch, heads of the scores, heads of the branch, groups, width, span, geometry
CASES = [
    (2, 2, 6, 2, 32, Span.full(100), NSAConfig(l=1, d=1, l_sel=16, n_sel=4)),
    (1, 4, 3, 1, 48, Span.full(331), NSAConfig(l=4, d=4, l_sel=16, n_sel=4, sink_blocks=0, local_blocks=1)),
    (1, 1, 1, 1, 16, Span.chunk(150, 70), NSAConfig(l=1, d=1, l_sel=48, n_sel=3)),
    (1, 3, 6, 3, 96, packed(0, 17, 17, 19, 150, 260), NSAConfig(l=1, d=1, l_sel=16, n_sel=5, local_blocks=3)),
    (1, 4, 12, 2, 64, packed(0, 90, 91, 200, 317, capacity=6, longest=140), NSAConfig(l=2, d=2, l_sel=16, n_sel=4)),
    (1, 2, 2, 1, 64, Span.full(30), NSAConfig(l=1, d=1, l_sel=16, n_sel=4)),  # forced blocks cover the text
] + ([(1, 4, 12, 2, 64, packed(0, 9_000, 9_001, 20_000, capacity=8, longest=16384), NSAConfig(l=1, d=1))] if CUDA else [])


def draw(case, dtype, device, is_shared=False):
    B, H, H_branch, G, D, span, nsa = case
    generator = torch.Generator().manual_seed(1)
    sizes = (
        (span.n_queries, H),
        (span.num_compressed(nsa), 1 if is_shared else G),
        (span.n_keys, G),
        (span.n_queries, H_branch),
    )
    q, k, k_sel, attention_q = (torch.randn(B, *size, D, generator=generator).to(device, dtype) for size in sizes)
    return [q.requires_grad_(), k.requires_grad_(), k_sel, attention_q]


def compute(case, tensors, backend):
    """Return the loss of 9 sampled queries, and its gradients times 4,096, so that float16 does not underflow."""
    q, k, k_sel, attention_q = tensors
    span, nsa = case[-2:]
    keys = k.expand(-1, -1, k_sel.shape[2], -1)
    loss = selection_loss(q, keys, k_sel, nsa, attention_q=attention_q, n_queries=9, span=span, backend=backend)
    return loss, torch.autograd.grad(loss * 4096, (q, k))


@looped
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_float64(case, dtype, device, poisoned):
    for is_shared in (False, True):
        tensors = draw(case, dtype, device, is_shared)
        exact_tensors = [x.detach().double().requires_grad_(x.requires_grad) for x in tensors]
        loss, grads = compute(case, tensors, "triton")
        exact, exact_grads = compute(case, exact_tensors, "torch")
        torch.testing.assert_close(loss.double(), exact, rtol=1e-5, atol=1e-7)
        # The gradients of the scores are rounded to the dtype of the keys.
        limit = 4 * torch.finfo(dtype).eps + 2e-6
        for name, actual, expected in zip("qk", grads, exact_grads, strict=True):
            error = (actual.double() - expected).norm() / expected.norm().clamp_min(1e-3)
            assert actual.dtype == dtype and error <= limit, f"{name}: {error:.1e}, allowed {limit:.1e}"


def test_a_nonfinite_key_affects_only_the_queries_that_see_it(device):
    case = CASES[3]
    for position, value in ((160, float("nan")), (160, float("inf"))):
        clean, tensors = draw(case, torch.float32, device), draw(case, torch.float32, device)
        with torch.no_grad():
            for x in tensors[1:3]:
                x[:, position] = value
        nsa = case[-1]
        first, stop = torch.tensor([0, 19, 150, 150], device=device), torch.tensor([17, 100, 9, 60], device=device)
        actual, expected = (block_mass(x[3][:, :4], x[2], first, stop, nsa.l_sel, 10) for x in (tensors, clean))
        assert torch.equal(actual[:, :3], expected[:, :3]) and actual[:, 3].isnan().all()
        grads = [
            torch.autograd.grad(block_mass(x[0][:, :4], x[1], first, stop, 16, 10).square().sum(), x[:2])
            for x in (tensors, clean)
        ]
        for name, got, want, own in zip("qk", *grads, (slice(0, 3), slice(0, 150)), strict=True):
            assert torch.equal(got[:, own], want[:, own]), name


def test_gradients_are_bit_identical(device):
    tensors = draw(CASES[4], torch.float32, device)
    results = [compute(CASES[4], tensors, "triton") for _ in range(2)]
    assert torch.equal(results[0][0], results[1][0]) and all(map(torch.equal, results[0][1], results[1][1]))


@pytest.mark.slow
def test_opcheck(device):
    q, k, _, _ = draw(CASES[0], torch.float32, device)
    bounds = torch.tensor([0, 3], device=device), torch.tensor([40, 50], device=device)
    torch.library.opcheck(torch.ops.nsa_lab.block_mass.default, (q[:, :2].detach().requires_grad_(), k, *bounds, 16, 4))
