"""Compressed and window attention, two cases of one kernel family, against the reference in float64."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from looping import looped, tiered

import nsa_lab.attention.kernels.band.launch  # noqa: F401 - registers the operators
from nsa_lab import attention
from nsa_lab.attention import geometry, reference
from nsa_lab.attention.kernels import compressed_attention, launch_table, window_attention
from nsa_lab.config import NSAConfig

# Minutes on a CPU, under the interpreter.
pytestmark = pytest.mark.slow

CUDA = torch.cuda.is_available()
BRANCHES = {
    "compressed": (compressed_attention, reference.compressed_attention),
    "window": (window_attention, reference.window_attention),
}
SMALL = NSAConfig(l=8, d=4, l_sel=8, n_sel=4, w=13)
# B, T, H, G, Dk, Dv, geometry. Odd lengths, heads that are not a power of two, Dk != Dv, T < l, T = 1, w > T, w = 1, l = d;
# one length that fills its tiles, so that no mask ends at the last query; widths that are split into two tiles.
CASES = [
    (2, 77, 6, 2, 32, 64, SMALL),
    (1, 150, 12, 2, 64, 32, NSAConfig(w=70)),
    (1, 9, 3, 1, 96, 32, NSAConfig(l=16, d=16, w=70)),
    (2, 1, 5, 5, 32, 32, SMALL),
    (1, 131, 3, 3, 32, 96, NSAConfig(l=4, d=4, l_sel=4, n_sel=3, w=1)),
    (1, 192, 3, 1, 32, 32, NSAConfig(l=8, d=4, l_sel=8, n_sel=4, w=75)),
    (1, 45, 3, 1, 192, 144, SMALL),
]
GPU_CASES = [
    (2, 1531, 12, 2, 64, 64, NSAConfig()),
    (1, 2048, 12, 2, 64, 64, NSAConfig()),
    (3, 700, 7, 1, 128, 64, NSAConfig(l=64, d=16, w=300)),
    (1, 513, 16, 1, 128, 128, NSAConfig()),
    (1, 1025, 64, 4, 128, 128, NSAConfig()),
    (1, 1280, 32, 2, 128, 128, NSAConfig()),
    (1, 333, 130, 1, 32, 32, NSAConfig(w=100)),
    (2, 600, 6, 3, 96, 128, NSAConfig(l=48, d=16, l_sel=48, w=512)),
    (1, 513, 16, 1, 192, 128, NSAConfig()),
    (1, 333, 4, 2, 160, 208, NSAConfig(w=100)),
]
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if CUDA else [])


def make_inputs(
    branch: str, B: int, T: int, H: int, G: int, Dk: int, Dv: int, nsa: NSAConfig, dtype, device, seed: int = 0
):
    generator = torch.Generator().manual_seed(seed)
    N = geometry.num_compressed(T, nsa) if branch == "compressed" else T
    shapes = [(B, T, H, Dk), (B, N, G, Dk), (B, N, G, Dv)]
    return [torch.randn(s, generator=generator).to(device, dtype).requires_grad_() for s in shapes]


def plain_attention(branch: str, q, k, v, nsa: NSAConfig):
    """Compute the same with plain operations in the dtype of the inputs."""
    T, N, h = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    t, i = torch.arange(T, device=q.device)[:, None], torch.arange(N, device=q.device)
    seen = i * nsa.d + nsa.l - 1 <= t if branch == "compressed" else (i <= t) & (i > t - nsa.w)
    k, v = k.repeat_interleave(h, 2), v.repeat_interleave(h, 2)
    scores = torch.einsum("bthd,bnhd->bthn", q, k) * q.shape[-1] ** -0.5
    p = scores.masked_fill(~seen[None, :, None], float("-inf")).softmax(-1)
    return torch.einsum("bthn,bnhd->bthd", p.masked_fill(~seen[None, :, None], 0.0), v)


def make_cotangents(out, lse, seed: int = 1):
    generator = torch.Generator().manual_seed(seed)
    d_out = torch.randn(out.shape, generator=generator).to(out)
    d_lse = torch.randn(lse.shape, generator=generator).to(lse)
    return d_out, torch.where(torch.isinf(lse), 0.0, d_lse)


@looped
@pytest.mark.parametrize(
    ("branch", "case", "dtype"),
    tiered(
        itertools.product(BRANCHES, CASES + (GPU_CASES if CUDA else []), DTYPES),
        nightly=lambda branch, case, dtype: case in GPU_CASES or (dtype != torch.float32 and case != CASES[0]),
    ),
)
def test_matches_the_definition(branch, case, dtype, device, poisoned, assert_error_within, monkeypatch):
    kernel, definition = BRANCHES[branch]
    *shape, nsa = case
    if device.type == "cpu" and max(case[4:6]) > 128:  # two tiles, as on Hopper
        monkeypatch.setattr(launch_table, "is_hopper", lambda device: True)
    x = make_inputs(branch, *shape, nsa, dtype, device)
    exact_x = [a.detach().double().requires_grad_() for a in x]
    plain_x = [a.detach().clone().requires_grad_() for a in x]
    out, lse = kernel(*x, nsa)
    exact_out, exact_lse = definition(*exact_x, nsa)
    plain_out = plain_attention(branch, *plain_x, nsa)

    assert out.dtype == dtype and lse.dtype == torch.float32
    assert_error_within("out", out, exact_out, torch.nan_to_num(plain_out), 2)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-5)
    d_out, _ = make_cotangents(out, lse)
    grads = torch.autograd.grad(out, x, d_out)
    exact = torch.autograd.grad(exact_out, exact_x, d_out.double())
    plain = torch.autograd.grad(plain_out, plain_x, d_out)
    for name, a, b, c in zip(("dq", "dk", "dv"), grads, exact, plain, strict=True):
        assert_error_within(name, a, b, torch.nan_to_num(c), 3)


@pytest.mark.parametrize("branch", BRANCHES)
def test_the_gradient_of_lse_is_exact(branch, device):
    kernel, definition = BRANCHES[branch]
    x = make_inputs(branch, 1, 45, 4, 2, 32, 32, SMALL, torch.float32, device)
    exact_x = [a.detach().double().requires_grad_() for a in x]
    out, lse = kernel(*x, SMALL)
    exact_out, exact_lse = definition(*exact_x, SMALL)
    d_out, d_lse = make_cotangents(out, lse)
    exact = torch.autograd.grad((exact_out, exact_lse), exact_x, (d_out.double(), d_lse.double()))
    for a, b in zip(torch.autograd.grad((out, lse), x, (d_out, d_lse)), exact, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-5)


def test_queries_without_keys_give_zero(device, poisoned):
    q, k, v = make_inputs("compressed", 1, 40, 4, 2, 32, 32, NSAConfig(l=32, d=16), torch.float32, device)
    out, lse = compressed_attention(q, k, v, NSAConfig(l=32, d=16))
    assert (out[:, :31] == 0).all() and torch.isneginf(lse[:, :31]).all() and torch.isfinite(lse[:, 31:]).all()
    dq, dk, dv = torch.autograd.grad(out.sum(), (q, k, v))
    assert (dq[:, :31] == 0).all() and all(torch.isfinite(x).all() for x in (dq, dk, dv))


@pytest.mark.parametrize("branch", BRANCHES)
def test_output_is_causal_bit_for_bit(branch, device):
    kernel, _ = BRANCHES[branch]
    T, cut = 83, 50
    x = make_inputs(branch, 1, T, 6, 2, 32, 32, SMALL, torch.float32, device)
    other = make_inputs(branch, 1, T, 6, 2, 32, 32, SMALL, torch.float32, device, seed=9)
    known = geometry.num_compressed(cut, SMALL) if branch == "compressed" else cut
    mixed = [torch.cat((a[:, :n], b[:, n:]), 1) for a, b, n in zip(x, other, (cut, known, known), strict=True)]
    for a, b in zip(kernel(*x, SMALL), kernel(*mixed, SMALL), strict=True):
        assert torch.equal(a[:, :cut], b[:, :cut])


@pytest.mark.parametrize("branch", BRANCHES)
def test_strides_do_not_matter(branch, device):
    kernel, _ = BRANCHES[branch]
    x = make_inputs(branch, 2, 50, 4, 2, 32, 64, SMALL, torch.float32, device)
    heads_first = [a.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for a in x]
    width_first = [a.detach().transpose(1, 3).contiguous().transpose(1, 3).requires_grad_() for a in x]
    out, lse = kernel(*x, SMALL)
    d_out = torch.randn_like(out).transpose(1, 2).contiguous().transpose(1, 2)
    grads = torch.autograd.grad(out, x, d_out)
    for y in (heads_first, width_first):
        other, other_lse = kernel(*y, SMALL)
        assert torch.equal(out, other) and torch.equal(lse, other_lse)
        assert all(map(torch.equal, grads, torch.autograd.grad(other, y, d_out)))


@pytest.mark.parametrize("branch", BRANCHES)
def test_runs_are_bit_identical(branch, device):
    kernel, _ = BRANCHES[branch]
    shape = (2, 1500, 12, 2, 64, 64, NSAConfig()) if CUDA else (1, 40, 3, 1, 32, 32, SMALL)
    x = make_inputs(branch, *shape, torch.bfloat16 if CUDA else torch.float16, device)

    def run():
        out, lse = kernel(*x, shape[-1])
        return out, lse, *torch.autograd.grad(out, x, torch.ones_like(out))

    first = run()
    for _ in range(19 if CUDA else 2):
        assert all(map(torch.equal, first, run()))


@pytest.mark.parametrize("branch", BRANCHES)
def test_opcheck(branch, device):
    x = make_inputs(branch, 1, 30, 4, 2, 32, 64, SMALL, torch.float32, device)
    geometry_arguments = (SMALL.l, SMALL.d, 0) if branch == "compressed" else (1, 1, SMALL.w)
    torch.library.opcheck(torch.ops.nsa_lab.band_attention.default, (*x, *geometry_arguments))


@pytest.mark.parametrize("branch", BRANCHES)
def test_compiles_in_one_graph(branch, device):
    kernel, _ = BRANCHES[branch]
    x = make_inputs(branch, 1, 30, 4, 2, 32, 32, SMALL, torch.float32, device)
    compiled = torch.compile(lambda *y: kernel(*y, SMALL)[0], fullgraph=True, backend="aot_eager")
    out, _ = kernel(*x, SMALL)
    grads = torch.autograd.grad(out.sum(), x)
    other = compiled(*x)
    assert torch.equal(out, other)
    assert all(map(torch.equal, grads, torch.autograd.grad(other.sum(), x)))


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="CUDA graphs need a CUDA device")
@pytest.mark.parametrize("branch", BRANCHES)
def test_a_captured_graph_replays_to_the_same_bits(branch, device):
    kernel, _ = BRANCHES[branch]
    nsa = NSAConfig()
    x = make_inputs(branch, 1, 1000, 12, 2, 64, 64, nsa, torch.bfloat16, device)

    def run():
        out, _ = kernel(*x, nsa)
        return out, *torch.autograd.grad(out, x, torch.ones_like(out))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        expected = [y.clone() for y in run()]
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for y in captured:
        y.detach().zero_()
    graph.replay()
    assert all(map(torch.equal, expected, captured))


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="131072 tokens need a CUDA device")
@pytest.mark.parametrize("branch", BRANCHES)
def test_long_sequences_and_large_tensors(branch, device):
    """131072 tokens; then more than 2^31 elements in q, where a 32-bit offset would overflow."""
    kernel, _ = BRANCHES[branch]
    nsa = NSAConfig()
    for B, T, H in ((1, 131072, 12), (2, 131072, 72)):
        x = make_inputs(branch, 1, 1024, H, 2, 64, 64, nsa, torch.bfloat16, device)
        q = x[0].detach().repeat(B, T // 1024, 1, 1)[..., :64]
        if H == 72:
            q = torch.cat((q, q), -1)
        width = q.shape[-1]
        N = geometry.num_compressed(T, nsa) if branch == "compressed" else T
        k = torch.randn(B, N, 2, width, device=device, dtype=torch.bfloat16)
        q, k, v = q.requires_grad_(), k.requires_grad_(), k.detach().clone().requires_grad_()
        assert H != 72 or q.numel() > 2**31
        out, _ = kernel(q, k, v, nsa)
        grads = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
        assert all(torch.isfinite(g).all() for g in grads)
        # The last queries of the last sequence, from the reference in float64.
        rows = slice(T - 3, T)
        scores = torch.einsum("thd,nd->thn", q[-1, rows, -3:].double(), k[-1, :, -1].double()) * width**-0.5
        t, i = torch.arange(T - 3, T, device=device)[:, None], torch.arange(N, device=device)
        seen = i * nsa.d + nsa.l - 1 <= t if branch == "compressed" else (i <= t) & (i > t - nsa.w)
        p = scores.masked_fill(~seen[:, None], float("-inf")).softmax(-1)
        expected = torch.einsum("thn,nd->thd", p, v[-1, :, -1].double())
        torch.testing.assert_close(out[-1, rows, -3:].double(), expected, rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("branch", BRANCHES)
def test_error_names_the_limit(branch, device):
    """Errors of the kernels and of the public function."""
    kernel, _ = BRANCHES[branch]
    public = functools.partial(getattr(attention, f"{branch}_attention"), backend="triton")
    nsa = SMALL.model_copy(update={"l_sel": 16})
    q, k, v = (x.detach() for x in make_inputs(branch, 1, 30, 4, 2, 32, 32, nsa, torch.float32, device))
    with pytest.raises(attention.BackendError, match="float64"):
        public(q.double(), k.double(), v.double(), nsa)
    for call in (kernel, public):
        with pytest.raises(NotImplementedError, match=r"multiples of 16 up to 256; got d_k = 24; the nearest is 32"):
            call(q[..., :24], k[..., :24], v, nsa)
        with pytest.raises(NotImplementedError, match="d_v = 270; the nearest is 256"):
            call(q, k, v.new_zeros(*v.shape[:3], 270), nsa)
    with pytest.raises(ValueError, match="3 query heads"):
        public(q[:, :, :3], k, v, nsa)
    with pytest.raises(ValueError, match="expected shape"):
        public(q, k[:, 1:], v[:, 1:], nsa)
