"""Block selection: the same sets as the reference, including ties, and causal."""

from __future__ import annotations

import itertools

import pytest
import torch
from looping import looped, tiered

from nsa_lab import attention
from nsa_lab.attention import geometry, reference
from nsa_lab.attention.kernels import block_topk, launch_table, select_blocks
from nsa_lab.attention.layout import Span
from nsa_lab.config import NSAConfig

# Minutes on a CPU, under the interpreter.
pytestmark = pytest.mark.slow

CUDA = torch.cuda.is_available()
# B, T, H, G, D, geometry: the default ratios, l = d, l > l_sel + d (compressed blocks overlap several), l_sel/d = 3.
CASES = [
    (2, 77, 6, 2, 32, NSAConfig(l=8, d=4, l_sel=8, n_sel=4)),
    (1, 400, 3, 1, 64, NSAConfig(l=32, d=16, l_sel=16, n_sel=7)),
    (1, 300, 2, 1, 32, NSAConfig(l=8, d=4, l_sel=16, n_sel=5)),
    (1, 200, 2, 1, 96, NSAConfig(l=32, d=4, l_sel=8, n_sel=5)),
    (1, 200, 4, 1, 32, NSAConfig(l=12, d=4, l_sel=12, n_sel=6)),
    (1, 9, 3, 1, 96, NSAConfig(l=16, d=16)),
    (1, 130, 3, 3, 32, NSAConfig(l=4, d=4, l_sel=4, n_sel=3)),
    (2, 1, 2, 1, 32, NSAConfig()),
    (1, 230, 2, 1, 144, NSAConfig(l=4, d=2, l_sel=32, n_sel=4)),  # keys are loaded in parts of their width
]
GPU_CASES = [
    (2, 2500, 12, 2, 64, NSAConfig()),
    (1, 5000, 12, 2, 64, NSAConfig()),
    (1, 3000, 16, 1, 128, NSAConfig(n_sel=32)),
    (1, 20000, 3, 1, 64, NSAConfig()),
    (1, 4000, 5, 1, 128, NSAConfig(l=64, d=16, l_sel=128, n_sel=9)),
    (1, 4000, 5, 1, 256, NSAConfig(l=16, d=16, l_sel=256, n_sel=9)),
]
# More selection blocks than a tile scores at once, and slots for some of the competing blocks.
SEVERAL_TILES = [
    (1, 400, 3, 1, 32, NSAConfig(l=4, d=2, l_sel=8, n_sel=7)),
    (1, 330, 1, 1, 32, NSAConfig(l=10, d=2, l_sel=8, n_sel=5)),
]
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if CUDA else [])
# Relative error of a float32 sum of exponentials of float32 scores of unit size.
ROUNDING = 2e-5


def make_inputs(B: int, T: int, H: int, G: int, D: int, nsa: NSAConfig, dtype, device, scale: float = 1.0, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    q = (torch.randn(B, T, H, D, generator=generator) * scale).to(device, dtype)
    k = torch.randn(B, geometry.num_compressed(T, nsa), G, D, generator=generator).to(device, dtype)
    lse = reference.compressed_attention(q.double(), k.double(), k.double(), nsa)[1].float()
    return q, k, lse


def assert_same_selection(blocks, q, k, lse, nsa):
    """Assert equality with the float64 reference, except for blocks within rounding of the score threshold."""
    importance = reference.block_importance(q.double(), k.double(), lse.double(), nsa)
    expected = reference.select_by_importance(importance, nsa)
    assert blocks.dtype == torch.int32 and blocks.shape == expected.shape
    for b, t, g in (blocks != expected).any(-1).nonzero().tolist():
        actual, wanted = set(blocks[b, t, g].tolist()), set(expected[b, t, g].tolist())
        assert len(actual - {-1}) == len(wanted - {-1})
        scores = importance[b, t, g].tolist()
        missing_scores, extra_scores = (
            [scores[j] for j in wanted - actual],
            [scores[j] for j in actual - wanted],
        )
        assert max(missing_scores) - min(extra_scores) <= ROUNDING * max(missing_scores), (
            f"query {t}: selected {sorted(actual)}, expected {sorted(wanted)}"
        )


@looped
@pytest.mark.parametrize(
    ("case", "dtype"),
    tiered(
        itertools.product(CASES + (GPU_CASES if CUDA else []), DTYPES),
        nightly=lambda case, dtype: case in GPU_CASES or (dtype != torch.float32 and case != CASES[0]),
    ),
)
def test_matches_the_definition(case, dtype, device, poisoned):
    *shape, nsa = case
    q, k, lse = make_inputs(*shape, nsa, dtype, device)
    blocks = select_blocks(q, k, lse, nsa)
    assert_same_selection(blocks, q, k, lse, nsa)
    # Ascending and distinct, then -1; the forced blocks are included.
    order = torch.where(blocks < 0, 2**30, blocks)
    assert ((order[..., 1:] > order[..., :-1]) | (blocks[..., 1:] < 0)).all()
    own = torch.arange(q.shape[1], device=device) // nsa.l_sel
    for forced in (torch.zeros_like(own), own, (own - 1).clamp_min(0)):
        assert (blocks == forced[None, :, None, None]).any(-1).all()


@looped
@pytest.mark.parametrize("case", [*CASES[:4], *(GPU_CASES[:3] if CUDA else [])])
def test_selection_is_equal_without_tf32(case, device, poisoned, monkeypatch):
    """This is the variant that is compiled with Triton 3.2."""
    *shape, nsa = case
    x = make_inputs(*shape, nsa, torch.float16, device)
    blocks = select_blocks(*x, nsa)
    monkeypatch.setattr(block_topk, "CAN_COMPILE_TF32_SHIFT", False)
    assert torch.equal(select_blocks(*x, nsa), blocks)


@looped
@pytest.mark.parametrize("case", CASES[:5])
def test_ties_go_to_the_lower_index(case, device):
    """With q = 0 all visible blocks have equal probabilities, so inner selection blocks tie exactly."""
    *shape, nsa = case
    q, k, lse = make_inputs(*shape, nsa, torch.float32, device, scale=0.0)
    lse = torch.zeros_like(lse)  # p = 1 exactly, so rounding breaks no tie
    assert torch.equal(select_blocks(q, k, lse, nsa), reference.select_blocks(q, k, lse, nsa))


@looped
@pytest.mark.parametrize("case", SEVERAL_TILES)
def test_better_block_replaces_higher_of_two_ties(case, device):
    """Ties between blocks that already have a slot and later blocks with higher scores.

    Every probability is exactly 0 or 1, so scores are small integers with many ties. If all scores are equal, as above, no
    block is ever replaced.
    """
    B, T, H, G, D, nsa = case
    generator = torch.Generator().manual_seed(3)
    q = torch.zeros(B, T, H, D)
    q[..., 0] = torch.rand(B, T, H, generator=generator) < 0.8
    k = torch.zeros(B, geometry.num_compressed(T, nsa), G, D)
    k[..., 0] = -6e4 * (torch.rand(k.shape[:3], generator=generator) < 0.6)  # its scaled exponential is 0
    q, k, lse = q.to(device), k.to(device), torch.zeros(B, T, H, device=device)
    importance = reference.block_importance(q.double(), k.double(), lse.double(), nsa)
    assert torch.equal(importance * nsa.d, (importance * nsa.d).round())
    expected = reference.select_by_importance(importance, nsa)
    # With ties to the higher index, the selection differs for many queries.
    blocks = torch.arange(importance.shape[-1], device=device)
    others = reference.select_by_importance(importance + 1e-3 * blocks, nsa)
    assert (others != expected).any(-1).double().mean() > 0.2
    assert torch.equal(select_blocks(q, k, lse, nsa), expected)


def test_selection_is_causal_bit_for_bit(device):
    nsa = NSAConfig(l=8, d=4, l_sel=8, n_sel=4)
    T, cut = 150, 90
    q, k, lse = make_inputs(1, T, 6, 2, 32, nsa, torch.float32, device)
    for future in (37.0, float("inf"), float("nan")):
        changed = k.clone()
        changed[:, geometry.num_compressed(cut, nsa) :] = future
        assert torch.equal(select_blocks(q, k, lse, nsa)[:, :cut], select_blocks(q, changed, lse, nsa)[:, :cut])


def test_large_logits_do_not_overflow(device):
    nsa = NSAConfig(l=8, d=4, l_sel=8, n_sel=5)
    q, k, lse = make_inputs(1, 200, 4, 1, 32, nsa, torch.float32, device, scale=60.0)
    blocks = select_blocks(q, k, lse, nsa)
    assert (blocks >= 0).sum(-1).eq(((torch.arange(200, device=device) // 8) + 1).clamp_max(5)[None, :, None]).all()


def test_runs_are_bit_identical_and_strides_do_not_matter(device):
    nsa = NSAConfig(l=8, d=4, l_sel=8, n_sel=4)
    q, k, lse = make_inputs(2, 120, 6, 2, 32, nsa, torch.float16, device)
    first = select_blocks(q, k, lse, nsa)
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, lse)]
    for arguments in ((q, k, lse), strided):
        for _ in range(20 if CUDA else 1):
            assert torch.equal(first, select_blocks(*arguments, nsa))


# B, T, G, D, geometry: one head per group and non-overlapping compressed blocks. Strides per selection block: as many as
# are processed at once, fewer, more, and not a multiple; more selection blocks than in a step, and as many as there are
# slots.
ONE_HEAD = [
    (2, 77, 2, 32, NSAConfig(l=4, d=4, l_sel=16, n_sel=4)),
    (1, 411, 1, 64, NSAConfig(l=1, d=1, l_sel=16, n_sel=5)),
    (1, 700, 1, 16, NSAConfig(l=2, d=2, l_sel=32, n_sel=6)),
    (1, 333, 3, 32, NSAConfig(l=4, d=4, l_sel=48, n_sel=5)),
    (1, 300, 1, 48, NSAConfig(l=16, d=16, l_sel=16, n_sel=7)),
    (1, 130, 1, 32, NSAConfig(l=8, d=8, l_sel=16, n_sel=3)),
    (2, 1, 1, 32, NSAConfig(l=8, d=8)),
]
GPU_ONE_HEAD = [
    (2, 2500, 2, 64, NSAConfig(l=8, d=8)),
    (1, 20000, 2, 64, NSAConfig(l=2, d=2)),
    (1, 9000, 2, 128, NSAConfig(l=1, d=1, n_sel=32)),
    (1, 5000, 1, 192, NSAConfig(l=4, d=4)),
]

GPU_SEVERAL_HEADS = [
    (1, 3000, 4, 2, 64, NSAConfig(l=1, d=1)),
    (1, 5000, 8, 2, 128, NSAConfig(l=4, d=4, n_sel=32)),
] * CUDA


# The interpreter warns about log2(0), for a query that attends to no block, and about NaN.
ignore_interpreter_warnings = pytest.mark.filterwarnings(
    "ignore:(divide by zero|invalid value|All-NaN slice) encountered:RuntimeWarning"
)


@ignore_interpreter_warnings
@looped
@pytest.mark.parametrize(
    ("case", "dtype", "scale"),
    tiered(
        itertools.product(ONE_HEAD + (GPU_ONE_HEAD if CUDA else []), DTYPES, [1.0, 30.0]),
        nightly=lambda case, dtype, scale: (
            case in GPU_ONE_HEAD
            or case is ONE_HEAD[1]
            or ((dtype != torch.float32 or scale != 1.0) and case is not ONE_HEAD[0])
        ),
    ),
)
def test_one_head_with_disjoint_blocks_needs_no_lse(case, dtype, scale, device, poisoned):
    """With sharp scores, most importances underflow in float32 relative to the largest, and are still ranked correctly."""
    B, T, G, D, nsa = case
    q, k, lse = make_inputs(B, T, G, G, D, nsa, dtype, device, scale)
    blocks = select_blocks(q, k, None, nsa)
    assert_same_selection(blocks, q, k, lse.double(), nsa)
    assert torch.equal(blocks, attention.score_and_select_blocks(q, k, nsa, backend="triton"))


@ignore_interpreter_warnings
@looped
@pytest.mark.parametrize("case", ONE_HEAD[:4])
def test_ties_go_to_the_lower_index_without_lse(case, device):
    """All keys of a selection block score -1000, or all -1001: sums of equal numbers of equal keys are bit-identical."""
    B, T, G, D, nsa = case
    q, k = torch.zeros(B, T, G, D), torch.zeros(B, geometry.num_compressed(T, nsa), G, D)
    q[..., 0] = D**0.5
    generator = torch.Generator().manual_seed(3)
    per_block = nsa.l_sel // nsa.d
    few = torch.rand(B, geometry.num_selection(T, nsa), G, generator=generator) < 0.4
    k[..., 0] = -1000 - few.repeat_interleave(per_block, 1)[:, : k.shape[1]].float()
    q, k = q.to(device), k.to(device)
    lse = torch.full(q.shape[:3], -1000.0, dtype=torch.float64, device=device)
    importance = reference.block_importance(q.double(), k.double(), lse, nsa)
    assert torch.equal(select_blocks(q, k, None, nsa), reference.select_by_importance(importance, nsa))


@ignore_interpreter_warnings
def test_selection_without_lse_is_causal_bit_for_bit(device):
    nsa = NSAConfig(l=4, d=4, l_sel=16, n_sel=5)
    T, cut = 250, 150
    q, k, _ = make_inputs(1, T, 2, 2, 32, nsa, torch.float32, device)
    for future in (37.0, -1e30, float("inf"), float("nan")):
        changed = k.clone()
        changed[:, geometry.num_compressed(cut, nsa) :] = future
        assert torch.equal(select_blocks(q, k, None, nsa)[:, :cut], select_blocks(q, changed, None, nsa)[:, :cut])


@ignore_interpreter_warnings
@looped
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize(
    "span",
    [
        Span.chunk(start=83, length=130),
        Span.packed(torch.tensor([0, 1, 100, 100, 213], dtype=torch.int32)),
        Span.full(213),
    ],
)
def test_scores_are_stored_for_a_few_tiles_at_a_time(heads, span, device, poisoned, monkeypatch):
    """Packed documents and chunks; the log-sum-exps of every tile of queries are stored and ranked by separate launches.

    Several programs rank the blocks of a tile.
    """
    nsa = NSAConfig(l=1, d=1, l_sel=8, n_sel=4, local_blocks=1)
    generator = torch.Generator().manual_seed(5)
    q = torch.randn(1, 130 if span.kind == "chunk" else 213, 2 * heads, 16, generator=generator)
    # One key for both groups, as `indexer_keys: shared`.
    k = torch.randn(1, 213, 1, 16, generator=generator).expand(-1, -1, 2, -1)
    expected = reference.select_blocks(q.double(), k.double(), None, nsa, span=span)
    for programs, queries in ((launch_table.BLOCK_SCORES_PROGRAMS, launch_table.RANKED_QUERIES), (1, 8)):
        monkeypatch.setattr(launch_table, "BLOCK_SCORES_PROGRAMS", programs)
        monkeypatch.setattr(launch_table, "RANKED_QUERIES", queries)
        assert torch.equal(select_blocks(q.to(device), k.to(device), None, nsa, span=span).cpu(), expected)


@ignore_interpreter_warnings
@looped
@pytest.mark.parametrize("future", [37.0, -1e30, float("inf"), float("nan")])
def test_selection_by_several_heads_is_causal_bit_for_bit(future, device):
    """Local blocks do not compete, but are a part of the LSE."""
    nsa = NSAConfig(l=4, d=4, l_sel=16, n_sel=5)
    q, k, _ = make_inputs(1, 250, 4, 2, 32, nsa, torch.float32, device)
    changed = k.clone()
    changed[:, geometry.num_compressed(150, nsa) :] = future
    assert torch.equal(select_blocks(q, k, None, nsa)[:, :150], select_blocks(q, changed, None, nsa)[:, :150])


@looped
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", [(1, 260, 4, 2, 32, NSAConfig(l=1, d=1, l_sel=8, n_sel=5)), *GPU_SEVERAL_HEADS])
def test_several_heads_with_disjoint_blocks_match_the_definition(case, dtype, device, poisoned):
    *shape, nsa = case
    q, k, lse = make_inputs(*shape, nsa, dtype, device)
    assert_same_selection(select_blocks(q, k, None, nsa), q, k, lse.double(), nsa)


def test_local_blocks_are_part_of_the_lse_of_each_head(device):
    """The first head of a group attends to the query's own token, so the other head decides which blocks are selected."""
    nsa = NSAConfig(l=1, d=1, l_sel=8, n_sel=5)
    q, k, _ = make_inputs(1, 260, 4, 2, 32, nsa, torch.float32, device)
    q[:, :, ::2] = 2 * k
    lse = reference.compressed_attention(q.double(), k.double(), k.double(), nsa)[1]
    assert_same_selection(select_blocks(q, k, None, nsa), q, k, lse, nsa)


def test_several_heads_or_overlapping_blocks_compute_the_lse(device):
    for heads, nsa in ((4, NSAConfig(l=4, d=4, l_sel=16, n_sel=5)), (2, NSAConfig(l=8, d=4, l_sel=16, n_sel=5))):
        q, k, lse = make_inputs(1, 200, heads, 2, 32, nsa, torch.float32, device)
        assert_same_selection(select_blocks(q, k, None, nsa), q, k, lse.double(), nsa)


def test_opcheck_and_torch_compile(device):
    nsa = NSAConfig(l=8, d=4, l_sel=8, n_sel=4)
    q, k, lse = make_inputs(1, 60, 2, 1, 32, nsa, torch.float32, device)
    torch.library.opcheck(torch.ops.nsa_lab.select_blocks.default, (q, k, lse, 8, 4, 8, 4))
    compiled = torch.compile(lambda *x: select_blocks(*x, nsa), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q.requires_grad_(), k, lse), select_blocks(q, k, lse, nsa))
    q, k, _ = make_inputs(1, 60, 2, 2, 32, nsa, torch.float32, device)
    torch.library.opcheck(torch.ops.nsa_lab.select_blocks.default, (q, k, None, 4, 4, 8, 4))


def test_error_names_the_limit(device):
    nsa = NSAConfig(l=8, d=4, l_sel=8, n_sel=4)
    q, k, lse = make_inputs(1, 40, 2, 1, 32, nsa, torch.float32, device)
    with pytest.raises(NotImplementedError, match="at most"):
        select_blocks(q, k, lse, nsa.model_copy(update={"n_sel": 65}))
    with pytest.raises(ValueError, match="lse"):
        attention.select_blocks(q, k, lse[:, 1:], nsa.model_copy(update={"l_sel": 16}), backend="triton")


RULES = [
    {"sink_blocks": 0, "local_blocks": 1, "n_sel": 3},
    {"sink_blocks": 2, "local_blocks": 2, "n_sel": 6, "head_reduction": "max"},
    {"sink_blocks": 1, "local_blocks": 3, "n_sel": 4},  # no free slots
    {"sink_blocks": 0, "local_blocks": 2, "n_sel": 4},  # blocks that begin before the first one
    {"sink_blocks": 1, "local_blocks": 1, "n_sel": 4},  # the last competing block is read in part
    {"l": 40, "sink_blocks": 1, "local_blocks": 1, "n_sel": 4},  # blocks that reach into three later ones
    {"l": 8, "sink_blocks": 1, "local_blocks": 1, "n_sel": 4, "block_reduction": "max"},
    {"l": 8, "sink_blocks": 0, "local_blocks": 2, "n_sel": 4, "head_reduction": "max", "block_reduction": "max"},
    {"l": 1, "d": 1, "l_sel": 44, "sink_blocks": 1, "local_blocks": 1, "n_sel": 4},  # slices of 8 keys, the last one of 4
    {"l": 1, "d": 1, "l_sel": 44, "n_sel": 4, "head_reduction": "max", "block_reduction": "max"},
]


@looped
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("heads", [1, 3])
def test_rules_match_the_reference(rule: dict[str, object], heads: int, device: torch.device, poisoned) -> None:
    """Sink and local blocks, and maxima instead of sums; one head without an LSE, and several heads."""
    nsa = NSAConfig(**{"l": 16, "d": 8, "l_sel": 16, "w": 9, **rule})
    generator, T = torch.Generator().manual_seed(3), 203
    q = torch.randn(1, T, 2 * heads, 16, generator=generator)
    k = torch.randn(1, geometry.num_compressed(T, nsa), 2, 16, generator=generator)
    blocks = select_blocks(q.to(device), k.to(device), None, nsa)
    assert torch.equal(blocks.cpu(), reference.select_blocks(q.double(), k.double(), None, nsa))
