"""Attention through a cache by the kernels: against plain loops in float64, NaN wherever nothing may be read."""

from __future__ import annotations

import pytest
import torch
from cache_cases import Case, attend_all, compute_all_importances, make_inputs, select_best_blocks

from nsa_lab.attention.cached_attention import cached_attention
from nsa_lab.attention.kernels import launch_table
from nsa_lab.attention.kernels.decoding import launch
from nsa_lab.attention.kernels.decoding.launch import SelectionScores
from nsa_lab.config import NSAConfig

# Interpreted, kernel by kernel: minutes on a CPU.
pytestmark = pytest.mark.slow

CUDA = torch.cuda.is_available()
SMALL = NSAConfig(l=8, d=4, l_sel=16, n_sel=4, w=20)
CASES = [
    Case((0, 1, 7, 8), 1, 6, 2, 32, 32, SMALL),
    Case((0, 7, 6), 8, 3, 1, 32, 48, SMALL),
    Case((203, 37, 130), 1, 6, 2, 32, 16, SMALL),
    Case((251, 100), 5, 5, 1, 96, 32, SMALL),
    # l > l_sel + d, so that a compressed block reaches over several selection blocks.
    Case((150, 333), 2, 2, 1, 16, 16, NSAConfig(l=40, d=4, l_sel=16, n_sel=5, w=33)),
    Case((161,), 3, 2, 2, 32, 64, NSAConfig(l=16, d=16, l_sel=48, n_sel=3, w=1)),  # no free places
    Case((651, 3), 2, 6, 2, 16, 16, NSAConfig(l=32, d=16, l_sel=80, n_sel=5, w=20)),  # five keys begin in a block
    Case((211, 5), 2, 64, 1, 16, 16, NSAConfig(l=8, d=8, l_sel=16, n_sel=6, w=500)),  # 128 rows; a window past the start
    Case((90, 40), 1, 4, 2, 16, 16, NSAConfig(l=8, d=4, l_sel=16, n_sel=16, w=7)),  # every block has a place
    Case(
        (3,), 1, 2, 1, 16, 16, NSAConfig(l=32, d=16, l_sel=64, n_sel=4, w=7), spare_rows=0
    ),  # no room for a compressed key
    Case((201, 9, 64), 1, 6, 2, 32, 32, SMALL, NSAConfig(l=8, d=8, l_sel=16, n_sel=4)),
    Case((140, 0), 4, 4, 2, 32, 16, NSAConfig(l=16, d=8, l_sel=32, n_sel=4, w=9), NSAConfig(l=8, d=8, l_sel=32, n_sel=4)),
    Case((140, 3), 2, 4, 2, 16, 16, SMALL, NSAConfig(l=1, d=1, l_sel=16, n_sel=4)),  # a key for every token
    Case((600, 70), 1, 4, 2, 16, 16, NSAConfig(l=8, d=4, l_sel=64, n_sel=4, w=20), NSAConfig(l=1, d=1, n_sel=4)),  # of 64
    Case((77, 240), 19, 6, 2, 16, 16, SMALL),  # a chunk of a prompt
    Case((260,), 2, 3, 1, 48, 80, NSAConfig(l=24, d=8, l_sel=80, n_sel=3, w=19)),  # blocks longer than a tile
]
GPU_CASES = [
    Case((5000, 777, 0), 1, 64, 4, 128, 128, NSAConfig()),
    Case((3333, 2049), 8, 12, 2, 64, 64, NSAConfig()),
    Case((3000, 1024, 31, 1500), 1, 12, 2, 64, 64, NSAConfig(), NSAConfig(l=8, d=8)),
    Case((2100,), 3, 32, 2, 192, 128, NSAConfig(w=77)),
    Case((1900, 600), 2, 16, 2, 256, 256, NSAConfig(n_sel=9)),
]
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if CUDA else [])
# Relative error of a float32 sum of exponentials of float32 scores of unit size.
ROUNDING = 2e-5


@pytest.fixture
def chosen(monkeypatch):
    """The blocks that the kernels choose, call by call."""
    calls, choose = [], launch.select_topk

    def recorded(*arguments):
        calls.append(choose(*arguments))
        return calls[-1]

    monkeypatch.setattr(launch, "choose", recorded)
    return calls


def run(inputs, case):
    return cached_attention(
        inputs.q, inputs.gates, inputs.cache, inputs.lengths, case.nsa,
        index_q=inputs.index_q, selection_nsa=case.choice, backend="triton",
    )  # fmt: skip


def assert_same_selection(blocks, inputs, case):
    """Equal to plain loops, but for blocks whose scores differ from the threshold by less than rounding."""
    for (b, s, g), importance in compute_all_importances(inputs, case).items():
        expected, ours = select_best_blocks(importance, case.nsa), [j for j in blocks[b, s, g].tolist() if j >= 0]
        assert blocks[b, s, g].tolist() == ours + [-1] * (case.nsa.n_sel - len(ours))
        assert ours == sorted(set(ours)) and len(ours) == len(expected)
        if ours == expected:
            continue
        out, into = ([importance[j] for j in a if j not in c] for a, c in ((expected, ours), (ours, expected)))
        assert max(out) - min(into) <= ROUNDING * max(out), f"{b, s, g}: chose {ours}, expected {expected}"


def assert_right(case, dtype, device, chosen, assert_error_within):
    inputs = make_inputs(case, dtype, device)
    out = run(inputs, case)
    assert_same_selection(chosen[-1], inputs, case)
    assert out.dtype == dtype and out.isfinite().all()
    exact = attend_all(inputs.to("cpu", torch.float64), chosen[-1], case)
    assert_error_within("out", out.cpu(), exact, attend_all(inputs.to("cpu"), chosen[-1], case), 2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES + (GPU_CASES if CUDA else []), ids=str)
def test_equals_plain_loops(case, dtype, device, poisoned, chosen, assert_error_within):
    assert_right(case, dtype, device, chosen, assert_error_within)


def test_more_of_an_indexer_s_blocks_than_are_ranked_at_once(device, poisoned, chosen, assert_error_within, monkeypatch):
    """Logarithms, which are negative as well as positive, and several programs of blocks."""
    monkeypatch.setattr(launch_table, "TOPK_BLOCKS", 8)
    monkeypatch.setattr(launch_table, "DECODING_PROGRAMS", 64)
    case = Case((520, 301), 2, 2, 1, 16, 16, NSAConfig(l=8, d=4, l_sel=16, n_sel=7, w=9), NSAConfig(l=2, d=2, l_sel=16))
    assert_right(case, torch.float32, device, chosen, assert_error_within)


@pytest.mark.parametrize("programs", [1, 8, 10**6])
def test_any_number_of_parts(programs, device, poisoned, chosen, assert_error_within, monkeypatch):
    monkeypatch.setattr(launch_table, "DECODING_PROGRAMS", programs)
    assert_right(Case((310, 2, 77), 2, 6, 2, 32, 32, SMALL), torch.float32, device, chosen, assert_error_within)


def test_more_blocks_than_are_ranked_at_once(device, poisoned, chosen, assert_error_within, monkeypatch):
    monkeypatch.setattr(launch_table, "TOPK_BLOCKS", 8)
    case = Case((520, 300), 2, 2, 1, 16, 16, NSAConfig(l=8, d=4, l_sel=16, n_sel=7, w=9))
    assert_right(case, torch.float32, device, chosen, assert_error_within)


def test_heads_of_unlike_sharpness(device, poisoned, chosen):
    """A share is of all parts of its own head: one head spreads over all keys, the other is decided by a few."""
    case = Case((520, 300, 411), 2, 6, 3, 16, 16, NSAConfig(l=8, d=4, l_sel=16, n_sel=7, w=9))
    inputs = make_inputs(case, torch.float32, device)
    inputs = inputs._replace(q=inputs.q * torch.tensor([0.3, 5.0], device=device).repeat(3)[:, None])
    run(inputs, case)
    assert_same_selection(chosen[-1], inputs, case)


def select_by_loops(importance: torch.Tensor, nsa: NSAConfig) -> list[int]:
    return select_best_blocks(importance.tolist(), nsa)


def test_of_equals_the_lower_index_is_chosen(device, monkeypatch):
    """Every share is a small whole number, so that ties are everywhere, between tiles of blocks too."""
    monkeypatch.setattr(launch_table, "TOPK_BLOCKS", 8)
    nsa, T, G, h, before = NSAConfig(l=4, d=2, l_sel=8, n_sel=7), 3, 2, 2, 401
    N = (before + T - nsa.l) // nsa.d + 1
    heads = torch.rand(1, T, G * h, N, generator=torch.Generator().manual_seed(1)) < 0.3
    scores = torch.where(heads, 0.0, float("-inf"))
    sums = torch.tensor([0.0, 1.0], device=device).expand(1, T, G * h, 1, 2).contiguous()
    scored = SelectionScores(scores.to(device), sums, 1, nsa.l, nsa.d)
    lengths = torch.tensor([before], dtype=torch.int32, device=device)
    found = launch.compute_importance(T, G, scored, lengths, (before + T) // nsa.l_sel + 1, nsa.l_sel, nsa.n_sel)
    blocks = launch.select_topk(T, G, found, lengths, nsa.l_sel, nsa.n_sel)
    for t in range(T):
        for g in range(G):
            position = before + t
            importance = torch.zeros(position // nsa.l_sel + 1)
            for i in range((position + 1 - nsa.l) // nsa.d + 1):
                weight = heads[0, t, g * h : (g + 1) * h, i].sum()
                for token in range(i * nsa.d, i * nsa.d + nsa.l):
                    importance[token // nsa.l_sel] += weight
            assert blocks[0, t, g].tolist() == select_by_loops(importance, nsa)


@pytest.mark.parametrize("at_once", [8, 2048])
def test_scores_of_either_sign_are_ranked(at_once, device, monkeypatch):
    """Logarithms are negative as well as positive; what is infinite ranks first or last, and NaN last."""
    monkeypatch.setattr(launch_table, "TOPK_BLOCKS", at_once)
    nsa, T, G, before, there = NSAConfig(l=4, d=2, l_sel=8, n_sel=7), 3, 2, 413, 55
    scores = torch.randn(1, T, G, there, generator=torch.Generator().manual_seed(1)) - 2
    scores[..., 3], scores[..., 7], scores[..., 12], scores[..., 50:] = float("inf"), float("nan"), float("-inf"), 9e9
    lengths = torch.tensor([before], dtype=torch.int32, device=device)
    blocks = launch.select_topk(T, G, scores.to(device), lengths, nsa.l_sel, nsa.n_sel)
    for t in range(T):
        for g in range(G):
            importance = scores[0, t, g, : (before + t) // nsa.l_sel + 1].nan_to_num(-1e30, 1e30, -1e30)
            assert blocks[0, t, g].tolist() == select_by_loops(importance, nsa)


def test_a_sequence_does_not_see_its_neighbours(device, poisoned):
    case = Case((120, 64, 200), 2, 6, 2, 32, 32, SMALL)
    other = case._replace(lengths=(30, 64, 7))
    inputs, others = make_inputs(case, torch.float16, device), make_inputs(other, torch.float16, device, seed=1)
    for ours, theirs in zip((*inputs[:2], *inputs.cache[:6]), (*others[:2], *others.cache[:6]), strict=True):
        rows = min(ours.shape[1], theirs.shape[1])
        for b in (0, 2):
            ours[b] = float("nan")
            ours[b, :rows] = theirs[b, :rows]
    alone = make_inputs(case, torch.float16, device)
    mixed = inputs._replace(lengths=others.lengths)
    assert torch.equal(run(mixed, case)[1], run(alone, case)[1])


def test_runs_are_bit_identical_and_strides_do_not_matter(device, poisoned):
    case = Case((211, 40), 2, 6, 2, 32, 32, SMALL)
    inputs = make_inputs(case, torch.float16, device)
    first = run(inputs, case)
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs.cache[:6]]
    gates = inputs.gates.transpose(1, 3).contiguous().transpose(1, 3)
    other = inputs._replace(cache=inputs.cache._make([*strided, None]), gates=gates, q=inputs.q.mT.contiguous().mT)
    for one in (inputs, other):
        assert torch.equal(first, run(one, case))


def test_a_nan_that_is_read_shows(device):
    case = Case((100, 100), 1, 2, 1, 16, 16, SMALL)
    for tensor, slot in (("k_cmp", 3), ("v_cmp", 3), ("k_sel", 1), ("v_sel", 1), ("k_win", 5), ("v_win", 5)):
        inputs = make_inputs(case, torch.float32, device)
        ring = inputs.cache.k_win.shape[1]
        getattr(inputs.cache, tensor)[1, (100 - slot) % ring if "win" in tensor else slot] = float("nan")
        out = run(inputs, case)
        assert out[0].isfinite().all() and out[1].isnan().any(), tensor


def test_the_operator_is_well_formed(device):
    case = Case((60,), 1, 2, 1, 16, 16, SMALL)
    q, gates, cache, lengths, _ = make_inputs(case, torch.float32, device)
    geometry = SMALL.l, SMALL.d, SMALL.l_sel, SMALL.n_sel, SMALL.w
    arguments = (q, gates, lengths, *(x.nan_to_num() for x in cache[:6]), *geometry)
    torch.library.opcheck(
        torch.ops.nsa_lab.cached_attention.default, arguments, test_utils=("test_schema", "test_faketensor")
    )


def test_refusals_name_the_limit(device):
    case = Case((60,), 1, 2, 2, 16, 16, SMALL)
    inputs = make_inputs(case, torch.float32, device)
    with pytest.raises(NotImplementedError, match="head widths"):
        run(inputs._replace(q=inputs.q[..., :12]), case)
    with pytest.raises(NotImplementedError, match="at most"):
        run(inputs, case._replace(nsa=SMALL.model_copy(update={"n_sel": 65})))
    small = case._replace(choice=NSAConfig(l=8, d=8, l_sel=16, n_sel=4))
    indexed = make_inputs(small, torch.float32, device)
    with pytest.raises(NotImplementedError, match=r"the indexer.*tokens side by side.* l = 8, d = 4"):
        run(indexed, small._replace(choice=SMALL))
    with pytest.raises(NotImplementedError, match=r"the indexer.*head widths"):
        run(indexed._replace(index_q=indexed.index_q[..., :12]), small)
    k_sel = inputs.cache.k_sel.mT.contiguous().mT
    with pytest.raises(ValueError, match=r"k_sel.*last axis"):
        run(inputs._replace(cache=inputs.cache._replace(k_sel=k_sel)), case)


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize("choice", [None, NSAConfig(l=8, d=8)], ids=["own", "indexer"])
def test_a_graph_stays_good_while_lengths_grow(choice, device):
    """Captured at one length and replayed at others, it gives what a call gives; nothing waits on the host."""
    case = Case((3000, 900), 1, 12, 2, 64, 64, NSAConfig(), choice)
    inputs = make_inputs(case, torch.bfloat16, device)
    # Shorter sequences read other slots of the ring.
    cache = inputs.cache._make(None if x is None else x.nan_to_num() for x in inputs.cache)
    inputs = inputs._replace(cache=cache)
    run(inputs, case)
    lengths, graph = inputs.lengths.clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(inputs, case)
    for fewer in (0, 1, 500, 899):
        inputs.lengths.copy_(lengths - fewer)
        graph.replay()
        assert torch.equal(out, run(inputs, case))
