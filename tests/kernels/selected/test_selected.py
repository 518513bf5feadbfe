"""Selected attention in Triton against the reference in float64: values, gradients, and guarantees to the user."""

from __future__ import annotations

import itertools

import pytest
import torch
from looping import looped, tiered
from selected_inputs import make_config, make_selection

from nsa_lab import attention
from nsa_lab.attention import reference
from nsa_lab.attention.kernels import launch_table, selected_attention
from nsa_lab.attention.kernels.selected import launch as selected
from nsa_lab.attention.kernels.selected import workspace_pieces
from nsa_lab.config import NSAConfig

# Minutes on a CPU, under the interpreter.
pytestmark = pytest.mark.slow

CUDA = torch.cuda.is_available()
needs_cuda = pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
# B, T, H, G, Dk, Dv, n_sel, l_sel. Odd lengths, a partial last block, heads that are not a power of two, Dk != Dv,
# blocks that are not a power of two or larger than a tile, fewer blocks than n_sel, more heads than rows of a tile, more
# slots than are merged at once.
CASES = [
    (2, 77, 6, 2, 64, 32, 3, 16),
    (1, 130, 3, 1, 32, 96, 4, 48),
    (1, 161, 7, 1, 64, 64, 3, 64),
    (1, 290, 2, 2, 32, 32, 3, 144),
    (1, 90, 2, 1, 96, 128, 3, 16),
    (1, 200, 2, 1, 160, 256, 3, 64),
    (1, 75, 2, 1, 32, 32, 17, 16),
]
GPU_CASES = [
    (2, 1531, 12, 2, 64, 64, 16, 64),
    (3, 2048, 12, 2, 64, 64, 16, 64),
    (1, 3001, 5, 1, 128, 64, 7, 32),
    (1, 1025, 64, 4, 128, 128, 16, 64),
    (1, 333, 150, 1, 32, 64, 4, 16),
    (2, 900, 6, 3, 96, 128, 5, 128),
    (1, 1200, 4, 1, 64, 96, 4, 256),
    (1, 700, 16, 16, 64, 64, 16, 64),
    (1, 1025, 64, 4, 192, 128, 16, 64),
]
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if CUDA else [])
STRATEGIES = ["union", "gather"]
PATTERNS = ["random", "shared", "empty rows"]


def list_cases() -> list[tuple]:
    """Return (case, pattern, dtype, strategy) of all tests.

    Under the interpreter, the first case runs with every dtype and strategy. The other cases alternate between the two
    assignments of one strategy per dtype, so that widths and patterns run with both.
    """
    if CUDA:
        return list(itertools.product(CASES + GPU_CASES, PATTERNS, DTYPES, STRATEGIES))
    pairs = [list(zip(DTYPES, order, strict=True)) for order in (STRATEGIES, STRATEGIES[::-1])]
    others = [(CASES[0], "shared"), (CASES[0], "empty rows"), *((case, "random") for case in CASES[1:])]
    return [(CASES[0], "random", *pair) for pair in pairs[0] + pairs[1]] + [
        (*run, *pair) for number, run in enumerate(others) for pair in pairs[number % 2]
    ]


def make_inputs(B, T, H, G, Dk, Dv, dtype, device, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(B, T, H, Dk), (B, T, G, Dk), (B, T, G, Dv)]
    return [torch.randn(s, generator=generator).to(device, dtype).requires_grad_() for s in shapes]


def plain_attention(q, k, v, blocks, nsa: NSAConfig) -> torch.Tensor:
    """Compute the same with plain operations in the dtype of the inputs."""
    T, h = q.shape[1], q.shape[2] // k.shape[2]
    n_blocks = -(-T // nsa.l_sel)
    chosen = torch.zeros(*blocks.shape[:3], n_blocks + 1, dtype=torch.bool, device=q.device)
    chosen = chosen.scatter(-1, torch.where(blocks < 0, n_blocks, blocks).long(), True)[..., :n_blocks]
    t = torch.arange(T, device=q.device)
    seen = chosen.repeat_interleave(nsa.l_sel, -1)[..., :T] & (t <= t[:, None])[None, :, None]
    seen = seen.repeat_interleave(h, 2)  # [B, T, H, T]
    k, v = k.repeat_interleave(h, 2), v.repeat_interleave(h, 2)
    scores = torch.einsum("bthd,bshd->bths", q, k) * q.shape[-1] ** -0.5
    p = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    return torch.einsum("bths,bshd->bthd", p.masked_fill(~seen, 0.0), v)


def run(fn, x, cotangent=None):
    """Return out, lse and the gradients of a random projection of both."""
    out, lse = fn(*x)
    generator = torch.Generator().manual_seed(1)
    d_out = torch.randn(out.shape, generator=generator).to(out)
    d_lse = torch.randn(lse.shape, generator=generator).to(lse)
    d_lse = torch.where(torch.isinf(lse), 0.0, d_lse)
    return [out.detach(), lse.detach(), *torch.autograd.grad((out, lse), x, (d_out, d_lse))]


def use_strategy(monkeypatch: pytest.MonkeyPatch, strategy: str) -> None:
    monkeypatch.setattr(selected, "UNION_TOKENS", 2**30 if strategy == "union" else 0)


@pytest.fixture(params=STRATEGIES)
def strategy(request, monkeypatch) -> str:
    use_strategy(monkeypatch, request.param)
    return request.param


@looped
@pytest.mark.parametrize(
    ("case", "pattern", "dtype", "strategy"),
    tiered(list_cases(), nightly=lambda case, pattern, dtype, strategy: case in GPU_CASES or dtype != torch.float32),
)
def test_matches_the_definition(case, pattern, dtype, strategy, device, poisoned, assert_error_within, monkeypatch):
    use_strategy(monkeypatch, strategy)
    *shape, n_sel, l_sel = case
    if device.type == "cpu" and max(case[4:6]) > 128:  # two tiles, as on Hopper
        monkeypatch.setattr(launch_table, "is_hopper", lambda device: True)
    nsa = make_config(n_sel, l_sel)
    x = make_inputs(*shape, dtype, device)
    blocks = make_selection(shape[0], shape[1], shape[3], nsa, device, pattern)
    out, lse, *grads = run(lambda q, k, v: selected_attention(q, k, v, blocks, nsa), x)
    exact_x = [a.detach().double().requires_grad_() for a in x]
    exact_out, exact_lse, *exact_grads = run(lambda q, k, v: reference.selected_attention(q, k, v, blocks, nsa), exact_x)
    plain_x = [a.detach().clone().requires_grad_() for a in x]
    # The plain version has no LSE. Its error comes from the gradients of the output only.
    plain_out = plain_attention(*plain_x, blocks, nsa)
    d_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    plain_grads = torch.autograd.grad(plain_out, plain_x, d_out)
    exact_plain = torch.autograd.grad(reference.selected_attention(*exact_x, blocks, nsa)[0], exact_x, d_out.double())

    assert out.dtype == dtype and lse.dtype == torch.float32
    assert_error_within("out", out, exact_out, torch.nan_to_num(plain_out), 2)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-5)
    for name, grad, exact, plain, exact_of_plain in zip(
        ("dq", "dk", "dv"), grads, exact_grads, plain_grads, exact_plain, strict=True
    ):
        assert grad.dtype == dtype
        assert torch.isfinite(grad).all(), name
        # Added to the exact gradient, which includes the LSE.
        assert_error_within(name, grad, exact, exact + (torch.nan_to_num(plain).double() - exact_of_plain), 3)


def test_one_token_attends_to_itself(strategy, device, poisoned):
    nsa = make_config(3, 64)
    q, k, v = x = make_inputs(1, 1, 5, 5, 32, 32, torch.float32, device)
    blocks = make_selection(1, 1, 5, nsa, device)
    out, lse = selected_attention(*x, blocks, nsa)
    torch.testing.assert_close(out, v)
    torch.testing.assert_close(lse, (q * k).sum(-1) * 32**-0.5)
    dq, dk, dv = torch.autograd.grad(out.sum(), x)
    torch.testing.assert_close(dq, torch.zeros_like(q), rtol=0, atol=1e-5)
    torch.testing.assert_close(dk, torch.zeros_like(k), rtol=0, atol=1e-5)
    torch.testing.assert_close(dv, torch.ones_like(v))


def test_a_query_without_blocks_gives_zero(strategy, device, poisoned):
    nsa = make_config(3, 16)
    x = make_inputs(1, 40, 4, 2, 32, 32, torch.float32, device)
    blocks = torch.full((1, 40, 2, 3), -1, dtype=torch.int32, device=device)
    out, lse, *grads = run(lambda q, k, v: selected_attention(q, k, v, blocks, nsa), x)
    assert (out == 0).all() and torch.isneginf(lse).all()
    assert all((g == 0).all() for g in grads)


def test_block_after_the_query_is_ignored(strategy, device):
    nsa = make_config(3, 16)
    x = make_inputs(1, 60, 2, 1, 32, 32, torch.float32, device)
    blocks = make_selection(1, 60, 1, nsa, device)
    started = torch.where(blocks * 16 <= torch.arange(60, device=device)[None, :, None, None], blocks, -1)
    with_later_block = torch.where(started < 0, 3, started)  # block 3 starts at token 48, after three others
    torch.testing.assert_close(
        selected_attention(*x, with_later_block.int(), nsa)[0],
        selected_attention(*x, started.int(), nsa)[0],
        rtol=0,
        atol=0,
    )


def test_later_tokens_change_nothing(strategy, device):
    nsa = make_config(3, 16)
    q, k, v = (x.detach() for x in make_inputs(1, 70, 6, 2, 32, 32, torch.float16, device))
    blocks = make_selection(1, 70, 2, nsa, device)
    before = selected_attention(q, k, v, blocks, nsa)[0][:, :41]
    for x in (q, k, v):
        x[:, 41:] = 7.0
    assert torch.equal(before, selected_attention(q, k, v, blocks, nsa)[0][:, :41])


def test_strides_do_not_matter(strategy, device):
    nsa = make_config(3, 16)
    B, T, H, G = 2, 50, 6, 2
    x = make_inputs(B, T, H, G, 32, 64, torch.float32, device)
    blocks = make_selection(B, T, G, nsa, device)
    packed = torch.cat([a.detach().transpose(1, 2).flatten(0, 1) for a in (x[0], x[1])], 0)  # heads before time
    views = [
        packed[: B * H].view(B, H, T, 32).transpose(1, 2).requires_grad_(),
        packed[B * H :].view(B, G, T, 32).transpose(1, 2).requires_grad_(),
        x[2].detach().transpose(2, 3).contiguous().transpose(2, 3).requires_grad_(),  # last axis not contiguous
    ]
    assert not any(a.is_contiguous() for a in views)
    attend = lambda q, k, v: selected_attention(q, k, v, blocks, nsa)  # noqa: E731
    for got, want in zip(run(attend, views), run(attend, x), strict=True):
        assert torch.equal(got, want)
    # An expanded gradient, as a sum produces it.
    for got, want in zip(
        torch.autograd.grad(attend(*views)[0].sum(), views), torch.autograd.grad(attend(*x)[0].sum(), x), strict=True
    ):
        assert torch.equal(got, want)


@pytest.mark.nightly
def test_small_workspace_gives_equal_results(device, monkeypatch):
    monkeypatch.setattr(selected, "UNION_TOKENS", 0)
    nsa = make_config(3, 16)
    x = make_inputs(2, 55, 6, 2, 32, 32, torch.float32, device)
    blocks = make_selection(2, 55, 2, nsa, device)
    attend = lambda q, k, v: selected_attention(q, k, v, blocks, nsa)  # noqa: E731
    whole = run(attend, x)
    sizes = workspace_pieces.Sizes(2, 55, 6, 2, 3, 16, 32, 32)
    need = workspace_pieces.compute_backward_bytes(sizes, 4)
    group = sizes.T * sizes.heads * need.per_row + need.per_group
    for size, number in ((4 * group, 1), (2 * group, 2), (group, 4), (group // 2, 8)):
        monkeypatch.setattr(workspace_pieces, "WORKSPACE_BYTES", size)
        assert len(workspace_pieces.split_into_pieces(sizes, 4)) >= number
        for got, want in zip(run(attend, x), whole, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.fixture
def room_for_one_group(monkeypatch) -> workspace_pieces.Sizes:
    """Workspace for 256 queries of one of two groups."""
    sizes = workspace_pieces.Sizes(1, 340, 12, 2, 3, 16, 32, 32)
    row, group = map(
        max, workspace_pieces.compute_forward_bytes(sizes, 4), workspace_pieces.compute_backward_bytes(sizes, 4)
    )
    size = 256 * sizes.heads * row + group + sizes.G * sizes.n_blocks * workspace_pieces.compute_item_bytes(sizes)
    monkeypatch.setattr(workspace_pieces, "WORKSPACE_BYTES", size)
    return sizes


def test_last_parts_of_groups_form_one_piece(room_for_one_group):
    cut = workspace_pieces.split_into_pieces(room_for_one_group, 4)
    assert [(p.g0, p.g1, p.t0, p.t1) for p in cut] == [(0, 1, 0, 256), (1, 2, 0, 256), (0, 2, 256, 340)]


@pytest.mark.nightly
def test_piece_of_several_groups_gives_equal_results(device, monkeypatch, poisoned, room_for_one_group):
    monkeypatch.setattr(selected, "UNION_TOKENS", 0)
    nsa = make_config(3, 16)
    x = make_inputs(1, 340, 12, 2, 32, 32, torch.float32, device)
    blocks = make_selection(1, 340, 2, nsa, device)
    attend = lambda q, k, v: selected_attention(q, k, v, blocks, nsa)  # noqa: E731
    got_in_pieces = run(attend, x)
    monkeypatch.setattr(workspace_pieces, "WORKSPACE_BYTES", 2**30)
    whole = run(attend, x)
    for got, want in zip(got_in_pieces, whole, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_order_of_work_items_changes_no_bit(device, monkeypatch, poisoned):
    monkeypatch.setattr(selected, "UNION_TOKENS", 0)
    nsa = make_config(3, 16)
    x = make_inputs(2, 90, 6, 2, 32, 32, torch.float32, device)
    blocks = make_selection(2, 90, 2, nsa, device, "empty rows")
    attend = lambda q, k, v: selected_attention(q, k, v, blocks, nsa)  # noqa: E731
    by_block = run(attend, x)
    monkeypatch.setattr(selected, "should_sort_items", lambda *_: True)
    assert all(torch.equal(a, b) for a, b in zip(run(attend, x), by_block, strict=True))


@looped
@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"q": torch.zeros(1, 8, 3, 32)}, ValueError, "3 query heads"),
        ({"blocks": torch.zeros(1, 8, 2, 3, dtype=torch.int64)}, ValueError, "int32"),
        ({"blocks": torch.zeros(1, 7, 2, 3, dtype=torch.int32)}, ValueError, "blocks: expected"),
        ({"v": torch.zeros(1, 8, 2, 272)}, NotImplementedError, r"head widths .* d_v = 272; the nearest is 256"),
        ({"nsa": NSAConfig(l=8, d=8, l_sel=24, n_sel=3)}, NotImplementedError, r"multiples of 16; .* divides is 32"),
    ],
)
def test_unsupported_input_raises(change, error, words, device):
    given = {
        "q": torch.zeros(1, 8, 4, 32),
        "k": torch.zeros(1, 8, 2, 32),
        "v": torch.zeros(1, 8, 2, 32),
        "blocks": torch.tensor([0, -1, -1], dtype=torch.int32).expand(1, 8, 2, 3),
        "nsa": make_config(3, 16),
    }
    given = {n: x.to(device) if isinstance(x, torch.Tensor) else x for n, x in (given | change).items()}
    with pytest.raises(error, match=words):
        attention.selected_attention(**given, backend="triton")


def test_too_many_pairs_raise():
    q, k = torch.empty(1, 2**20, 128, 32, device="meta"), torch.empty(1, 2**20, 1, 32, device="meta")
    selected.check_pairs(q[:, : 2**20 - 1], k, k, 16, 64)
    with pytest.raises(NotImplementedError, match="at most 1048575 queries"):
        selected.check_pairs(q, k, k, 16, 64)


@pytest.mark.nightly
def test_opcheck(strategy, device):
    nsa = make_config(3, 16)
    q, k, v = make_inputs(1, 40, 4, 2, 32, 32, torch.float32, device)
    blocks = make_selection(1, 40, 2, nsa, device)
    torch.library.opcheck(selected._selected_fwd, (q, k, v, blocks, 16, strategy))
    out, lse = (x.detach() for x in selected_attention(q, k, v, blocks, nsa))
    q, k, v = q.detach(), k.detach(), v.detach()
    for dlse in (None, torch.ones_like(lse)):
        torch.library.opcheck(selected._selected_bwd, (torch.ones_like(out), dlse, q, k, v, out, lse, blocks, 16))


def test_compiles_in_one_graph(strategy, device):
    nsa = make_config(3, 16)
    x = make_inputs(1, 50, 4, 2, 32, 32, torch.float32, device)
    blocks = make_selection(1, 50, 2, nsa, device)
    attend = lambda q, k, v: selected_attention(q, k, v, blocks, nsa)  # noqa: E731
    compiled = torch.compile(attend, fullgraph=True, backend="inductor" if CUDA else "aot_eager")
    for got, want in zip(run(compiled, x), run(attend, x), strict=True):
        assert torch.equal(got, want)


@looped
@pytest.mark.parametrize(
    ("wide", "strategy"), tiered(itertools.product([False, True], STRATEGIES), nightly=lambda wide, strategy: wide)
)
def test_twenty_runs_are_bit_identical(wide, strategy, device, monkeypatch):
    use_strategy(monkeypatch, strategy)
    monkeypatch.setattr(workspace_pieces, "SORT_ABOVE_BYTES", 0)
    if CUDA:
        shape, n_sel, l_sel = (2, 1500, 32, 2, 128, 128) if wide else (2, 1500, 12, 2, 64, 64), 16, 64
    else:
        shape, n_sel, l_sel = (1, 70, 4, 1, 128, 128) if wide else (1, 70, 3, 1, 32, 32), 3, 16
    nsa = make_config(n_sel, l_sel)
    x = make_inputs(*shape, torch.bfloat16 if CUDA else torch.float16, device)
    blocks = make_selection(shape[0], shape[1], shape[3], nsa, device)
    attend = lambda q, k, v: selected_attention(q, k, v, blocks, nsa)  # noqa: E731
    first = run(attend, x)
    for _ in range(19 if CUDA else 1):
        assert all(torch.equal(a, b) for a, b in zip(run(attend, x), first, strict=True))


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize(("T", "H", "D"), [(700, 12, 64), (5000, 12, 64), (5000, 32, 128)])
def test_a_cuda_graph_replays_to_the_same_bits(T, H, D, device, monkeypatch):
    monkeypatch.setattr(workspace_pieces, "SORT_ABOVE_BYTES", 0)
    nsa = make_config(16, 64)
    x = make_inputs(1, T, H, 2, D, D, torch.bfloat16, device)
    blocks = make_selection(1, T, 2, nsa, device)
    d_out = torch.randn(1, T, H, D, device=device, dtype=torch.bfloat16)

    def step():
        out, _ = selected_attention(*x, blocks, nsa)
        return out, *torch.autograd.grad(out, x, d_out)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = step()
    with torch.no_grad():
        x[0].copy_(torch.randn_like(x[0]))
        blocks.copy_(make_selection(1, T, 2, nsa, device, seed=3))
    for result in held:
        result.detach().fill_(float("nan"))
    graph.replay()
    for got, want in zip(held, step(), strict=True):
        assert torch.equal(got, want)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize(
    ("T", "H", "D", "n_sel"), [(131072, 12, 64, 16), (131072, 132, 128, 3)], ids=["long", "wide offsets"]
)
def test_large_inputs(T, H, D, n_sel, device):
    """The second has more than 2^31 elements in q; sampled rows are checked against float64."""
    G, nsa = 2, make_config(n_sel, 64)
    torch.manual_seed(0)
    x = [torch.randn(1, T, n, D, device=device, dtype=torch.bfloat16, requires_grad=True) for n in (H, G, G)]
    t = torch.arange(T, device=device)
    own = t // 64
    picks = torch.rand(1, T, G, n_sel - 1, device=device) * own[None, :, None, None]
    blocks = torch.cat([picks.int(), own[None, :, None, None].expand(1, T, G, 1).int()], -1).sort(-1).values
    repeated = torch.cat([torch.zeros_like(blocks[..., :1], dtype=torch.bool), blocks[..., 1:] == blocks[..., :-1]], -1)
    blocks = torch.where(repeated, 2**30, blocks).sort(-1).values
    blocks = torch.where(blocks == 2**30, -1, blocks)
    out, _ = selected_attention(*x, blocks, nsa)
    d_out = torch.randn_like(out)
    dq, dk, dv = torch.autograd.grad(out, x, d_out)
    assert all(bool(torch.isfinite(g[:, -4096:]).all()) for g in (dq, dk, dv))
    for row in (0, 63, T // 2 + 1, T - 65, T - 1):
        for group in range(G):
            heads = slice(group * H // G, (group + 1) * H // G)
            chosen = blocks[0, row, group]
            keys = (chosen[chosen >= 0, None].long() * 64 + torch.arange(64, device=device)).flatten()
            keys = keys[keys <= row]
            q = x[0][0, row, heads].detach().double().requires_grad_()
            k, v = (y[0, keys, group].detach().double() for y in x[1:])
            exact = ((q @ k.T) * D**-0.5).softmax(-1) @ v
            (exact_dq,) = torch.autograd.grad(exact, q, d_out[0, row, heads].double())
            torch.testing.assert_close(out[0, row, heads].double(), exact.detach(), rtol=2e-2, atol=2e-2)
            torch.testing.assert_close(dq[0, row, heads].double(), exact_dq, rtol=3e-2, atol=3e-2)
