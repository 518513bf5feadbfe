"""The decoding kernels against plain loops in float64, with NaN in all cache rows that must not be read."""

from __future__ import annotations

import itertools

import pytest
import torch
from cache_cases import Case, attend_all, compute_all_importances, make_inputs, select_best_blocks
from looping import looped, tiered

from nsa_lab.attention.cached_attention import attend_and_select, cached_attention
from nsa_lab.attention.kernels.block_topk import SelectionRule
from nsa_lab.attention.kernels.decoding import decoding_table, launch
from nsa_lab.attention.kernels.decoding.launch import SelectionScores
from nsa_lab.attention.key_storage import decode_keys, encode_keys
from nsa_lab.config import NSAConfig

# Minutes on a CPU, under the interpreter.
pytestmark = pytest.mark.slow

CUDA = torch.cuda.is_available()
SMALL = NSAConfig(l=8, d=4, l_sel=16, n_sel=4, w=20)
CASES = [
    Case((0, 1, 7, 8), 1, 6, 2, 32, 32, SMALL),
    Case((0, 7, 6), 8, 3, 1, 32, 48, SMALL),
    Case((203, 37, 130), 1, 6, 2, 32, 16, SMALL),
    Case((251, 100), 5, 5, 1, 96, 32, SMALL),
    # l > l_sel + d: a compressed block overlaps several selection blocks.
    Case((150, 333), 2, 2, 1, 16, 16, NSAConfig(l=40, d=4, l_sel=16, n_sel=5, w=33)),
    Case((161,), 3, 2, 2, 32, 64, NSAConfig(l=16, d=16, l_sel=48, n_sel=3, w=1)),  # no free slots
    Case((651, 3), 2, 6, 2, 16, 16, NSAConfig(l=32, d=16, l_sel=80, n_sel=5, w=20)),  # five keys start in a block
    Case(
        (211, 5), 2, 64, 1, 16, 16, NSAConfig(l=8, d=8, l_sel=16, n_sel=6, w=500)
    ),  # 128 rows; a window longer than the sequence
    Case((90, 40), 1, 4, 2, 16, 16, NSAConfig(l=8, d=4, l_sel=16, n_sel=16, w=7)),  # all blocks are selected
    Case(
        (3,), 1, 2, 1, 16, 16, NSAConfig(l=32, d=16, l_sel=64, n_sel=4, w=7), spare_rows=0
    ),  # no compressed key fits in the cache
    Case((201, 9, 64), 1, 6, 2, 32, 32, SMALL, NSAConfig(l=8, d=8, l_sel=16, n_sel=4)),
    Case((140, 0), 4, 4, 2, 32, 16, NSAConfig(l=16, d=8, l_sel=32, n_sel=4, w=9), NSAConfig(l=8, d=8, l_sel=32, n_sel=4)),
    Case((140, 3), 2, 4, 2, 16, 16, SMALL, NSAConfig(l=1, d=1, l_sel=16, n_sel=4)),  # a key for every token
    Case(
        (600, 70), 1, 4, 2, 16, 16, NSAConfig(l=8, d=4, l_sel=64, n_sel=4, w=20), NSAConfig(l=1, d=1, n_sel=4)
    ),  # l_sel = 64
    # Most of the probability is in forced blocks, a different share of each head.
    Case(
        (331, 9, 241, 290),
        4,
        6,
        2,
        32,
        32,
        SMALL.model_copy(update={"n_sel": 12, "local_blocks": 7}),
        NSAConfig(l=4, d=4, l_sel=16, n_sel=4),
        index_heads=3,
    ),
    Case((77, 240), 19, 6, 2, 16, 16, SMALL),  # a chunk of a prompt
    Case((260,), 2, 3, 1, 48, 80, NSAConfig(l=24, d=8, l_sel=80, n_sel=3, w=19)),  # blocks longer than a tile
]
GPU_CASES = [
    Case((5000, 777, 0), 1, 64, 4, 128, 128, NSAConfig()),
    Case((3333, 2049), 8, 12, 2, 64, 64, NSAConfig()),
    Case((3000, 1024, 31, 1500), 1, 12, 2, 64, 64, NSAConfig(), NSAConfig(l=8, d=8)),
    Case((3000, 31, 1500), 1, 12, 2, 64, 64, NSAConfig(), NSAConfig(l=1, d=1), index_heads=2),
    Case((2100,), 3, 32, 2, 192, 128, NSAConfig(w=77)),
    Case((1900, 600), 2, 16, 2, 256, 256, NSAConfig(n_sel=9)),
]
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if CUDA else [])
# Relative error of a float32 sum of exponentials of float32 scores of unit size.
ROUNDING = 2e-5


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    """The interpreter runs programs one after another, so on a CPU keys are split into few parts."""
    if not CUDA:
        monkeypatch.setattr(decoding_table, "DECODING_PROGRAMS", 32)


@pytest.fixture
def selected_blocks(monkeypatch):
    """Record the blocks that the kernels select in each call."""
    calls, original = [], launch.launch_selected_and_window

    def record(*arguments):
        calls.append(original(*arguments))
        return calls[-1]

    monkeypatch.setattr(launch, "launch_selected_and_window", record)
    return calls


def run(inputs, case):
    return cached_attention(
        inputs.q, inputs.gates, inputs.cache, inputs.lengths, case.nsa,
        index_q=inputs.index_q, selection_nsa=case.selection_nsa, backend="triton",
    )  # fmt: skip


def assert_same_selection(blocks, inputs, case):
    """Assert equality with plain loops, except for blocks within rounding of the score threshold."""
    for (b, s, g), importance in compute_all_importances(inputs, case).items():
        expected, actual = select_best_blocks(importance, case.nsa), [j for j in blocks[b, s, g].tolist() if j >= 0]
        assert blocks[b, s, g].tolist() == actual + [-1] * (case.nsa.n_sel - len(actual))
        assert actual == sorted(set(actual)) and len(actual) == len(expected)
        if actual == expected:
            continue
        missing_scores, extra_scores = (
            [importance[j] for j in a if j not in c] for a, c in ((expected, actual), (actual, expected))
        )
        assert max(missing_scores) - min(extra_scores) <= ROUNDING * max(missing_scores), (
            f"{b, s, g}: selected {actual}, expected {expected}"
        )


def check_case(case, dtype, device, selected_blocks, assert_error_within):
    inputs = make_inputs(case, dtype, device)
    out, blocks = run(inputs, case), None
    if "sel" in case.branches:
        blocks = selected_blocks[-1]
        assert_same_selection(blocks, inputs, case)
    assert out.dtype == dtype and out.isfinite().all()
    exact = attend_all(inputs.to("cpu", torch.float64), blocks, case)
    assert_error_within("out", out.cpu(), exact, attend_all(inputs.to("cpu"), blocks, case), 2)


@looped
@pytest.mark.parametrize(
    ("case", "dtype"),
    tiered(
        itertools.product(CASES + (GPU_CASES if CUDA else []), DTYPES),
        nightly=lambda case, dtype: case in GPU_CASES or (dtype != torch.float32 and case is not CASES[2]),
    ),
)
def test_equals_plain_loops(case, dtype, device, poisoned, selected_blocks, assert_error_within):
    check_case(case, dtype, device, selected_blocks, assert_error_within)


def make_rule(sink: int, local: int, heads: str = "sum", block: str = "sum", **more: int) -> NSAConfig:
    free = more.pop("free", 2)
    rule = {"sink_blocks": sink, "local_blocks": local, "head_reduction": heads, "block_reduction": block}
    return NSAConfig(**{"l": 8, "d": 4, "l_sel": 16, "w": 20, "n_sel": sink + local + free, **rule, **more})


def make_index_case(*sizes, rule: NSAConfig, tokens: int = 4, **options) -> Case:
    """Return a case with an indexer whose keys cover `tokens` tokens each."""
    return Case(*sizes, rule, rule.model_copy(update={"l": tokens, "d": tokens}), **options)


BRANCH_CASES = [
    Case((203, 37, 3), 1, 6, 2, 32, 16, make_rule(0, 1)),
    Case((203, 37), 2, 6, 2, 32, 16, make_rule(2, 3, "max")),
    Case((203, 5), 2, 6, 2, 16, 16, make_rule(1, 1, "max", "max", l=4)),
    Case((203, 37), 1, 6, 2, 16, 16, make_rule(1, 2, free=0), branches=("cmp", "sel")),  # no free slots
    Case((203, 37), 1, 6, 2, 16, 16, make_rule(1, 2), branches=("cmp", "win")),
    Case((203, 37), 3, 6, 2, 16, 32, make_rule(1, 2), branches=("cmp",)),
    Case((203, 0), 1, 6, 2, 16, 16, make_rule(1, 2), branches=("win",)),
    make_index_case((203, 37), 2, 4, 2, 16, 16, rule=make_rule(0, 2), branches=("sel",)),
    make_index_case((203, 37), 1, 4, 2, 16, 16, rule=make_rule(0, 1, "sum", "max"), branches=("sel", "win")),
    make_index_case((203, 37), 1, 4, 2, 16, 16, rule=make_rule(1, 2, "sum", "max"), branches=("sel",), index_heads=2),
    make_index_case((203, 37), 2, 4, 2, 16, 16, rule=make_rule(1, 2, "max", "max"), tokens=1, index_heads=4),
    make_index_case((203, 37), 1, 4, 2, 16, 16, rule=make_rule(2, 1, "max"), branches=("sel", "win"), index_heads=3),
    make_index_case((203, 37), 1, 4, 2, 16, 16, rule=make_rule(1, 2), tokens=16, branches=("sel",), index_heads=2),
]


@looped
@pytest.mark.parametrize("case", tiered(((case,) for case in BRANCH_CASES), nightly=lambda case: case.S > 1))
def test_branches_and_rules_equal_plain_loops(case, device, poisoned, selected_blocks, assert_error_within):
    check_case(case, torch.float32, device, selected_blocks, assert_error_within)


@pytest.mark.parametrize("case", [BRANCH_CASES[0], BRANCH_CASES[7]], ids=str)
def test_given_blocks_give_the_output_of_the_call_that_selected_them(case, device, poisoned):
    inputs = make_inputs(case, torch.float32, device)
    options = {"index_q": inputs.index_q, "selection_nsa": case.selection_nsa, "backend": "triton"}
    arguments = inputs.q, inputs.gates, inputs.cache, inputs.lengths, case.nsa
    out, blocks = attend_and_select(*arguments, **options)
    cache = inputs.cache._replace(k_index=None)
    again, same = attend_and_select(*arguments[:2], cache, *arguments[3:], blocks=blocks, backend="triton")
    assert torch.equal(out, again) and torch.equal(blocks, same)


@looped
@pytest.mark.parametrize(
    ("index_dtype", "index_heads", "reduction", "width", "dtype"),
    [
        ("fp8", 1, "sum", 64, torch.float32),
        ("fp8", 2, "sum", 64, DTYPES[-1]),
        ("fp8", 2, "max", 64, torch.float32),
        ("mxfp4", 1, "sum", 64, torch.float32),
        ("mxfp4", 2, "sum", 64, DTYPES[-1]),
        ("mxfp4", 2, "sum", 96, torch.float32),
        ("mxfp4", 1, "sum", 16, torch.float32),
        ("mxfp4", 2, "max", 64, torch.float32),
    ],
)
def test_index_keys_in_few_bits_give_the_output_of_their_decoded_values(
    index_dtype, index_heads, reduction, width, dtype, device, poisoned
):
    """With one key for all groups. In half precision, queries are scaled, which rounds nothing.

    The maximum over heads has another kernel than the sum. Of MXFP4, keys of 64 channels take an even number of bytes, keys
    of 16 and 96 channels an odd one.
    """
    rule = make_rule(1, 1, reduction)
    case = make_index_case((203, 37), 2, 4, 2, width, 16, rule=rule, tokens=1, branches=("sel",), index_heads=index_heads)
    inputs = make_inputs(case, dtype, device)
    shared = inputs.cache.k_index[:, :, :1].float() * torch.logspace(-3, 2, width, device=device)
    stored = encode_keys(shared, index_dtype)
    assert stored[0, 0, 0].nbytes == {"fp8": width, "mxfp4": width // 2 + -(-width // 32)}[index_dtype]
    results = []
    decoded = decode_keys(stored, width, dtype)
    for keys in (stored.expand(-1, -1, 2, -1), decoded.expand(-1, -1, 2, -1), decoded.repeat(1, 1, 2, 1)):
        cache = inputs.cache._replace(k_index=keys)
        options = {"index_q": inputs.index_q, "selection_nsa": case.selection_nsa, "backend": "triton"}
        results.append(attend_and_select(inputs.q, inputs.gates, cache, inputs.lengths, case.nsa, **options))
    for a, b, separate in zip(*results, strict=True):
        assert torch.equal(a, b) and a.isfinite().all()
        torch.testing.assert_close(a, separate)  # a key for each group


def test_more_index_blocks_than_are_ranked_at_once(device, poisoned, selected_blocks, assert_error_within, monkeypatch):
    """Positive and negative logarithms as scores, and several programs per query."""
    monkeypatch.setattr(decoding_table, "TOPK_BLOCKS", 8)
    monkeypatch.setattr(decoding_table, "DECODING_PROGRAMS", 64)
    case = Case((520, 301), 2, 2, 1, 16, 16, NSAConfig(l=8, d=4, l_sel=16, n_sel=7, w=9), NSAConfig(l=2, d=2, l_sel=16))
    check_case(case, torch.float32, device, selected_blocks, assert_error_within)


@looped
@pytest.mark.parametrize("programs", [1, 8, 10**6])
def test_any_number_of_parts(programs, device, poisoned, selected_blocks, assert_error_within, monkeypatch):
    monkeypatch.setattr(decoding_table, "DECODING_PROGRAMS", programs)
    check_case(Case((310, 2, 77), 2, 6, 2, 32, 32, SMALL), torch.float32, device, selected_blocks, assert_error_within)


def test_more_blocks_than_are_ranked_at_once(device, poisoned, selected_blocks, assert_error_within, monkeypatch):
    monkeypatch.setattr(decoding_table, "TOPK_BLOCKS", 8)
    case = Case((520, 300), 2, 2, 1, 16, 16, NSAConfig(l=8, d=4, l_sel=16, n_sel=7, w=9))
    check_case(case, torch.float32, device, selected_blocks, assert_error_within)


def test_heads_with_different_score_scales(device, poisoned, selected_blocks):
    """Each head is normalized over all parts of its keys: one head has flat scores, the other sharp ones."""
    case = Case((520, 300, 411), 2, 6, 3, 16, 16, NSAConfig(l=8, d=4, l_sel=16, n_sel=7, w=9))
    inputs = make_inputs(case, torch.float32, device)
    inputs = inputs._replace(q=inputs.q * torch.tensor([0.3, 5.0], device=device).repeat(3)[:, None])
    run(inputs, case)
    assert_same_selection(selected_blocks[-1], inputs, case)


def select_topk(scores: torch.Tensor, lengths: torch.Tensor, nsa: NSAConfig) -> torch.Tensor:
    """Return the blocks that the kernel selects by `scores` [B, T, G, n_blocks]."""
    B, T, G, n_blocks = scores.shape
    q = torch.zeros(B, T, G, 16, device=scores.device)
    k = torch.zeros(B, n_blocks * nsa.l_sel, G, 16, device=scores.device)
    parts, rule = launch.allocate_parts(q, None, k, None, nsa.n_sel, 0), SelectionRule.from_config(nsa)
    return launch.launch_selected_and_window(q, k, k, None, None, None, scores, lengths, parts, nsa.l_sel, 0, rule)


def select_by_loops(importance: torch.Tensor, nsa: NSAConfig) -> list[int]:
    return select_best_blocks(importance.tolist(), nsa)


def test_ties_go_to_the_lower_index(device, monkeypatch):
    """All probabilities are small integers, so there are many ties, also between tiles of blocks."""
    monkeypatch.setattr(decoding_table, "TOPK_BLOCKS", 8)
    nsa, T, G, h, before = NSAConfig(l=4, d=2, l_sel=16, n_sel=7), 3, 2, 2, 809
    N = (before + T - nsa.l) // nsa.d + 1
    is_visible = torch.rand(1, T, G * h, N, generator=torch.Generator().manual_seed(1)) < 0.3
    scores = torch.where(is_visible, 0.0, float("-inf"))
    sums = torch.tensor([0.0, 1.0], device=device).expand(1, T, G * h, 1, 2).contiguous()
    selection_scores = SelectionScores(scores.to(device), sums, 1, nsa.l, nsa.d)
    lengths = torch.tensor([before], dtype=torch.int32, device=device)
    importances = launch.compute_importance(
        T, G, selection_scores, lengths, (before + T) // nsa.l_sel + 1, nsa.l_sel, SelectionRule(nsa.n_sel)
    )
    blocks = select_topk(importances, lengths, nsa)
    for t in range(T):
        for g in range(G):
            position = before + t
            importance = torch.zeros(position // nsa.l_sel + 1)
            for i in range((position + 1 - nsa.l) // nsa.d + 1):
                weight = is_visible[0, t, g * h : (g + 1) * h, i].sum()
                for token in range(i * nsa.d, i * nsa.d + nsa.l):
                    importance[token // nsa.l_sel] += weight
            assert blocks[0, t, g].tolist() == select_by_loops(importance, nsa)


@looped
@pytest.mark.parametrize("blocks_at_once", [8, 2048])
def test_positive_and_negative_scores_are_ranked(blocks_at_once, device, monkeypatch):
    """Scores are logarithms of either sign. +inf ranks first; -inf and NaN rank last."""
    monkeypatch.setattr(decoding_table, "TOPK_BLOCKS", blocks_at_once)
    nsa, T, G, before, n_blocks = NSAConfig(l=4, d=2, l_sel=16, n_sel=7), 3, 2, 829, 55
    scores = torch.randn(1, T, G, n_blocks, generator=torch.Generator().manual_seed(1)) - 2
    scores[..., 3], scores[..., 7], scores[..., 12], scores[..., 50:] = float("inf"), float("nan"), float("-inf"), 9e9
    lengths = torch.tensor([before], dtype=torch.int32, device=device)
    blocks = select_topk(scores.to(device), lengths, nsa)
    for t in range(T):
        for g in range(G):
            importance = scores[0, t, g, : (before + t) // nsa.l_sel + 1].nan_to_num(-1e30, 1e30, -1e30)
            assert blocks[0, t, g].tolist() == select_by_loops(importance, nsa)


def test_sequences_are_independent(device, poisoned):
    case = Case((120, 64, 200), 2, 6, 2, 32, 32, SMALL)
    other = case._replace(lengths=(30, 64, 7))
    inputs, others = make_inputs(case, torch.float16, device), make_inputs(other, torch.float16, device, seed=1)
    for target, source in zip((*inputs[:2], *inputs.cache[:6]), (*others[:2], *others.cache[:6]), strict=True):
        rows = min(target.shape[1], source.shape[1])
        for b in (0, 2):
            target[b] = float("nan")
            target[b, :rows] = source[b, :rows]
    unchanged = make_inputs(case, torch.float16, device)
    changed = inputs._replace(lengths=others.lengths)
    assert torch.equal(run(changed, case)[1], run(unchanged, case)[1])


def test_runs_are_bit_identical_and_strides_do_not_matter(device, poisoned):
    case = Case((211, 40), 2, 6, 2, 32, 32, SMALL)
    inputs = make_inputs(case, torch.float16, device)
    first = run(inputs, case)
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs.cache[:6]]
    gates = inputs.gates.transpose(1, 3).contiguous().transpose(1, 3)
    other = inputs._replace(cache=inputs.cache._make([*strided, None]), gates=gates, q=inputs.q.mT.contiguous().mT)
    for case_inputs in (inputs, other):
        assert torch.equal(first, run(case_inputs, case))


def test_nan_reaches_the_output(device):
    case = Case((100, 100), 1, 2, 1, 16, 16, SMALL)
    for tensor, slot in (("k_cmp", 3), ("v_cmp", 3), ("k_sel", 1), ("v_sel", 1), ("k_win", 5), ("v_win", 5)):
        inputs = make_inputs(case, torch.float32, device)
        ring = inputs.cache.k_win.shape[1]
        getattr(inputs.cache, tensor)[1, (100 - slot) % ring if "win" in tensor else slot] = float("nan")
        out = run(inputs, case)
        assert out[0].isfinite().all() and out[1].isnan().any(), tensor


def test_opcheck(device):
    case = Case((60,), 1, 2, 1, 16, 16, SMALL)
    q, gates, cache, lengths, _ = make_inputs(case, torch.float32, device)
    geometry = SMALL.l, SMALL.d, SMALL.l_sel, SMALL.n_sel, SMALL.w
    arguments = (q, gates, lengths, *(x.nan_to_num() for x in cache[:6]), *geometry)
    torch.library.opcheck(
        torch.ops.nsa_lab.cached_attention.default, arguments, test_utils=("test_schema", "test_faketensor")
    )


def test_error_names_the_limit(device):
    case = Case((60,), 1, 2, 2, 16, 16, SMALL)
    inputs = make_inputs(case, torch.float32, device)
    with pytest.raises(NotImplementedError, match="head widths"):
        run(inputs._replace(q=inputs.q[..., :12]), case)
    with pytest.raises(NotImplementedError, match="at most"):
        run(inputs, case._replace(nsa=SMALL.model_copy(update={"n_sel": 65})))
    indexer_case = case._replace(selection_nsa=NSAConfig(l=8, d=8, l_sel=16, n_sel=4))
    indexer_inputs = make_inputs(indexer_case, torch.float32, device)
    with pytest.raises(NotImplementedError, match=r"index_q.*head widths"):
        run(indexer_inputs._replace(index_q=indexer_inputs.index_q[..., :12]), indexer_case)
    k_sel = inputs.cache.k_sel.mT.contiguous().mT
    with pytest.raises(ValueError, match=r"k_sel.*last axis"):
        run(inputs._replace(cache=inputs.cache._replace(k_sel=k_sel)), case)


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize("selection_nsa", [None, NSAConfig(l=8, d=8)], ids=["own", "indexer"])
def test_cuda_graph_stays_valid_while_lengths_grow(selection_nsa, device):
    """A graph captured at one length and replayed at others equals a call. There is no host synchronization."""
    case = Case((3000, 900), 1, 12, 2, 64, 64, NSAConfig(), selection_nsa)
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
