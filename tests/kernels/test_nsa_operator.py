"""The NSA operator: forward bit for bit against its parts, backward against the reference."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from looping import looped, tiered

import nsa_lab.attention.kernels.nsa_operator  # noqa: F401 - registers the operators
from nsa_lab import attention
from nsa_lab.attention import kernels, reference
from nsa_lab.attention.geometry import num_compressed
from nsa_lab.attention.kernels.selected import launch as selected
from nsa_lab.attention.kernels.selected import workspace_pieces
from nsa_lab.bench.attention_parity import compute_plain
from nsa_lab.config import NSAConfig

# Minutes on a CPU, under the interpreter.
pytestmark = pytest.mark.slow

CUDA = torch.cuda.is_available()
# B, T, H, G, Dk, Dv; the second has no compressed block.
CASES = [(2, 75, 6, 2, 32, 64), (1, 9, 3, 1, 64, 32)]
# The narrowest and widest heads, widths that are not powers of two, and the 192 and 128 of the paper.
WIDTHS = [
    (1, 41, 3, 1, 192, 128),
    (1, 37, 2, 1, 16, 256),
    (1, 35, 5, 1, 48, 80),
    (1, 33, 1, 1, 256, 16),
    (1, 39, 2, 1, 112, 160),
]
GPU_CASES = [(2, 1500, 12, 2, 64, 64), (1, 4200, 16, 1, 128, 128)]
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if CUDA else [])
STRATEGIES = ["union", "gather"]
# Under the interpreter, the slow case runs once with each dtype and each strategy.
RUNS = [
    run
    for run in itertools.product(CASES + (GPU_CASES if CUDA else []), DTYPES, STRATEGIES)
    if CUDA or run[0] is not CASES[0] or run[1:] in list(zip(DTYPES, STRATEGIES, strict=True))
]
RUNS += [
    (case, *pair)
    for number, case in enumerate(WIDTHS)
    for pair in itertools.product(DTYPES, STRATEGIES)
    if CUDA or pair == (DTYPES[number % 2], STRATEGIES[number // 2 % 2])
]
FLOAT16_LARGE = (torch.float16, CASES[0])
SMALL = NSAConfig(l=16, d=8, l_sel=16, n_sel=3, w=20)
NAMES = ("q", "k_cmp", "v_cmp", "k_sel", "v_sel", "k_win", "v_win", "gates")


def make_inputs(case, dtype, device) -> list[torch.Tensor]:
    B, T, H, G, Dk, Dv = case
    N = num_compressed(T, SMALL)
    generator = torch.Generator().manual_seed(0)
    shapes = [(B, T, H, Dk), (B, N, G, Dk), (B, N, G, Dv)] + [(B, T, G, Dk), (B, T, G, Dv)] * 2
    x = [torch.randn(s, generator=generator).to(device, dtype).requires_grad_() for s in shapes]
    # Gates of either sign: the kernels make no assumption about them.
    return [*x, torch.randn(B, T, H, 3, generator=generator).to(device).requires_grad_()]


def compute_parts(q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates):
    out_cmp, lse = kernels.compressed_attention(q, k_cmp, v_cmp, SMALL)
    blocks = kernels.select_blocks(q, k_cmp, lse, SMALL)
    out_sel, _ = kernels.selected_attention(q, k_sel, v_sel, blocks, SMALL)
    out_win, _ = kernels.window_attention(q, k_win, v_win, SMALL)
    return kernels.combine(out_cmp, out_sel, out_win, gates)


def compute_reference(x, blocks):
    """Compute the reference with given blocks; other tests compare the selection."""
    q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates = x
    out_cmp, _ = reference.compressed_attention(q, k_cmp, v_cmp, SMALL)
    out_sel, _ = reference.selected_attention(q, k_sel, v_sel, blocks, SMALL)
    out_win, _ = reference.window_attention(q, k_win, v_win, SMALL)
    return reference.combine(out_cmp, out_sel, out_win, gates)


# Scores of such keys overflow, and the interpreter warns; they are masked.
@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")
@pytest.mark.parametrize("strategy", ["union", "gather"])
def test_largest_finite_future_values_change_no_past_bit(strategy, device, monkeypatch):
    """A tile contains queries that attend to a value and queries that do not: zero times the value must be zero."""
    if strategy == "gather":
        monkeypatch.setattr(selected, "UNION_TOKENS", 0)
    x = [a.detach() for a in make_inputs((1, 75, 2, 1, 32, 32), torch.float32, device)]
    before = kernels.nsa_attention(*x, SMALL)
    for last in (20, 40):
        changed = [a.clone() for a in x]
        for name, a in zip(NAMES, changed, strict=True):
            if name[:2] in ("k_", "v_"):
                first = num_compressed(last + 1, SMALL) if name.endswith("_cmp") else last + 1
                a[:, first:] = torch.finfo(torch.float32).max
        after = kernels.nsa_attention(*changed, SMALL)
        assert torch.equal(before[:, : last + 1], after[:, : last + 1])
        assert not torch.equal(before[:, last + 1 :], after[:, last + 1 :])


@looped
@pytest.mark.parametrize(
    ("case", "dtype", "strategy"),
    tiered(RUNS, nightly=lambda case, dtype, strategy: case in WIDTHS[2:] + GPU_CASES or (dtype, case) == FLOAT16_LARGE),
)
def test_matches_its_parts_and_the_reference(case, dtype, strategy, device, poisoned, monkeypatch, assert_error_within):
    if strategy == "gather":
        monkeypatch.setattr(selected, "UNION_TOKENS", 0)
    x = make_inputs(case, dtype, device)
    out = kernels.nsa_attention(*x, SMALL)
    d_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    grads = torch.autograd.grad(out, x, d_out)
    with torch.no_grad():
        assert torch.equal(out, compute_parts(*x))
        blocks = kernels.select_blocks(x[0], x[1], kernels.compressed_attention(*x[:3], SMALL)[1], SMALL)
    exact_x = [a.detach().double().requires_grad_() for a in x]
    exact_out = compute_reference(exact_x, blocks)
    exact = torch.autograd.grad(exact_out, exact_x, d_out.double())
    low_x = [a.detach().clone().requires_grad_() for a in x]
    low_out = compute_plain("whole", low_x, blocks, SMALL)
    low = torch.autograd.grad(low_out, low_x, d_out.to(low_out.dtype))
    assert_error_within("out", out, exact_out, low_out, 2)
    for name, given, grad, rough, wide in zip(NAMES, x, grads, low, exact, strict=True):
        assert grad.dtype == given.dtype
        assert_error_within(name, grad, wide, rough, 3)


BRANCH_SETS = [("cmp",), ("sel",), ("win",), ("cmp", "sel"), ("cmp", "win"), ("sel", "win"), ("cmp", "sel", "win")]
RULES = [
    {"sink_blocks": 0, "local_blocks": 1, "n_sel": 3},
    {"sink_blocks": 2, "local_blocks": 2, "n_sel": 5, "head_reduction": "max"},
    {"sink_blocks": 1, "local_blocks": 3, "n_sel": 4},  # no free slots
    {"l": 8, "sink_blocks": 1, "local_blocks": 1, "n_sel": 4, "block_reduction": "max"},
    {"l": 8, "sink_blocks": 0, "local_blocks": 2, "n_sel": 4, "head_reduction": "max", "block_reduction": "max"},
    {"l": 40, "sink_blocks": 0, "local_blocks": 1, "n_sel": 4},  # blocks that reach into three later ones
    {"sink_blocks": 1, "local_blocks": 1, "n_sel": 4, "scores": "mean_key"},
]


@looped
@pytest.mark.parametrize(
    ("branches", "rule", "strategy"),
    tiered(
        itertools.product(BRANCH_SETS, RULES, ["union", "gather"]),
        nightly=lambda branches, rule, strategy: (
            (BRANCH_SETS.index(branches) + RULES.index(rule)) % len(RULES) != 0 or strategy == "gather"
        ),
    ),
)
def test_branches_and_rules_match_the_reference(branches, rule, strategy, device, poisoned, monkeypatch):
    """With selection by mean keys if there is no compressed branch."""
    if strategy == "gather":
        monkeypatch.setattr(selected, "UNION_TOKENS", 0)
    nsa = SMALL.model_copy(update={**rule, **({} if "cmp" in branches else {"scores": "mean_key"})})
    generator, T = torch.Generator().manual_seed(0), 83
    lengths = {"cmp": num_compressed(T, nsa), "sel": T, "win": T}
    shapes = {"q": (1, T, 4, 16)} | {f"{kind}_{name}": (1, lengths[name], 2, 16 + 16 * (kind == "v"))
                                     for name in branches for kind in "kv"}  # fmt: skip
    if len(branches) > 1:
        shapes["gates"] = (1, T, 4, len(branches))
    given = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    d_out = torch.randn(1, T, 4, 32, generator=generator)
    results = []
    for attend, dtype, where in (
        (functools.partial(attention.nsa_attention, backend="triton"), torch.float32, device),
        (reference.nsa_attention, torch.float64, torch.device("cpu")),
    ):
        leaves = {name: x.to(where, dtype).requires_grad_() for name, x in given.items()}
        out = attend(*(leaves.get(name) for name in NAMES), nsa)
        gradients = torch.autograd.grad(out, list(leaves.values()), d_out.to(out))
        results.append({"out": out.detach(), **dict(zip(leaves, gradients, strict=True))})
    actual, exact = results
    for name, x in exact.items():
        torch.testing.assert_close(
            actual[name].cpu().double(), x, rtol=1e-4, atol=1e-4, msg=lambda m, name=name: f"{name}: {m}"
        )


@pytest.mark.nightly
@pytest.mark.parametrize("strategy", ["union", "gather"])
def test_opcheck_and_torch_compile(device, strategy, monkeypatch):
    if strategy == "gather":
        monkeypatch.setattr(selected, "UNION_TOKENS", 0)
    x = make_inputs((1, 37, 2, 1, 32, 32), torch.float32, device)
    geometry = (SMALL.l, SMALL.d, SMALL.l_sel, SMALL.n_sel, SMALL.w)
    # The tail of the index is uninitialized. Filled with a constant, it is equal in two calls.
    torch.use_deterministic_algorithms(True)
    try:
        torch.library.opcheck(torch.ops.nsa_lab.nsa_fwd.default, (*x, *geometry))
    finally:
        torch.use_deterministic_algorithms(False)
    x = [a.detach() for a in x]
    out, *kept = torch.ops.nsa_lab.nsa_fwd.default(*x, *geometry)
    torch.library.opcheck(
        torch.ops.nsa_lab.nsa_bwd.default, (torch.ones_like(out), *x, *kept, SMALL.l, SMALL.d, SMALL.l_sel, SMALL.w)
    )
    attend = lambda *x: kernels.nsa_attention(*x, SMALL)  # noqa: E731
    compiled = torch.compile(attend, fullgraph=True, backend="inductor" if CUDA else "aot_eager")
    assert torch.equal(compiled(*x), attend(*x))


def test_runs_are_bit_identical_on_any_stream(device, poisoned):
    """The backward pass uses two streams; their tensors must be neither read nor freed too early."""
    x = make_inputs(GPU_CASES[0] if CUDA else (1, 53, 3, 1, 32, 32), torch.float16, device)
    other = make_inputs((1, 333, 6, 1, 64, 64) if CUDA else CASES[1], torch.float16, device)

    def run(x):
        out = kernels.nsa_attention(*x, SMALL)
        return [out, *torch.autograd.grad(out, x, torch.ones_like(out))]

    first = run(x)
    for i in range(20 if CUDA else 1):
        if CUDA:
            torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream() if CUDA and i % 2 else None):
            results = run(x)
            run(other)  # its tensors reuse the freed memory
            assert all(torch.equal(a, b) for a, b in zip(results, first, strict=True))


@pytest.mark.parametrize("strategy", ["union", pytest.param("gather", marks=pytest.mark.nightly)])
def test_strides_do_not_matter(device, strategy, monkeypatch):
    if strategy == "gather":
        monkeypatch.setattr(selected, "UNION_TOKENS", 0)
    x = make_inputs((2, 41, 4, 2, 32, 64), torch.float16, device)
    out = kernels.nsa_attention(*x, SMALL)
    d_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    d_out = d_out.transpose(1, 3).contiguous().transpose(1, 3)
    grads = torch.autograd.grad(out, x, d_out)
    for axes in ((1, 2), (1, 3)):
        y = [a.detach().transpose(*axes).contiguous().transpose(*axes).requires_grad_() for a in x]
        other = kernels.nsa_attention(*y, SMALL)
        assert torch.equal(other, out)
        assert all(map(torch.equal, grads, torch.autograd.grad(other, y, d_out)))


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="no CUDA device")
def test_a_cuda_graph_replays_to_the_same_bits(device):
    x = make_inputs(GPU_CASES[0], torch.float16, device)
    d_out = torch.randn(2, 1500, 12, 64, dtype=torch.float16, device=device)
    run = lambda: torch.autograd.grad(kernels.nsa_attention(*x, SMALL), x, d_out)  # noqa: E731
    expected = run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for _ in range(3):
        for grad in captured:
            grad.detach().fill_(float("nan"))
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(captured, expected, strict=True))


def test_indices_of_several_pieces_are_saved(device, monkeypatch, poisoned):
    monkeypatch.setattr(selected, "UNION_TOKENS", 0)
    x = make_inputs((3, 45, 4, 2, 32, 64), torch.float32, device)
    sizes = selected._make_sizes(x[0], x[4], 3, 16)
    monkeypatch.setattr(
        workspace_pieces,
        "WORKSPACE_BYTES",
        sizes.T * sizes.heads * workspace_pieces.compute_backward_bytes(sizes, 4).per_row * 7 // 2,
    )
    number = len(workspace_pieces.split_into_pieces(sizes, 4))
    assert number > 3
    monkeypatch.setattr(selected, "should_sort_items", lambda *_: True)
    out, built = kernels.nsa_attention(*x, SMALL), []
    build = selected.build_inverted_index
    monkeypatch.setattr(selected, "build_inverted_index", lambda *a, **k: built.append(1) or build(*a, **k))
    d_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    grads = torch.autograd.grad(out, x, d_out)
    assert not built
    by_parts = torch.autograd.grad(compute_parts(*x), x, d_out)
    assert len(built) == 2 * number
    for name, grad, by_part in zip(NAMES, grads, by_parts, strict=True):
        torch.testing.assert_close(grad, by_part, rtol=1e-4, atol=1e-5, msg=name)


def test_mismatched_shapes_raise(device):
    """The public function checks shapes once for all backends."""
    *x, gates = make_inputs((1, 40, 4, 2, 32, 32), torch.float32, device)
    with pytest.raises(ValueError, match="gates"):
        attention.nsa_attention(*x, gates[..., :2], SMALL, backend="triton")
    with pytest.raises(NotImplementedError, match=r"nsa_attention, .* head widths .* d_k = 28; the nearest is 32"):
        kernels.nsa_attention(*(a[..., :28] for a in x), gates, SMALL)
