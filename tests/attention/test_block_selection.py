"""Selected blocks: forced blocks, ties, distinctness and groups, equal for all dtypes and variants."""

from __future__ import annotations

import brute_force
import numpy as np
import pytest
import torch
from attention_inputs import Shape, every_variant, random_shapes, to_brute_force_geometry, to_lists, use_variant
from hypothesis import given
from hypothesis import strategies as st
from looping import looped

from nsa_lab import attention
from nsa_lab.attention import geometry, reference
from nsa_lab.config import NSAConfig

dtypes = pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
FIVE_BLOCKS = NSAConfig(l=2, d=2, l_sel=2, n_sel=5, w=4)


def select(q: torch.Tensor, k_cmp: torch.Tensor, nsa: NSAConfig, backend: str) -> torch.Tensor:
    _, lse = attention.compressed_attention(q, k_cmp, k_cmp, nsa, backend=backend)
    return attention.select_blocks(q, k_cmp, lse, nsa, backend=backend)


@every_variant
@given(shape=random_shapes(max_tokens=60))
def test_selection_is_distinct_ascending_causal_full_and_contains_forced_blocks(variant: str, shape: Shape) -> None:
    inputs, nsa = shape.inputs(), shape.nsa
    with use_variant(variant) as backend:
        blocks = select(inputs.q, inputs.k_cmp, nsa, backend)
    for sequence in to_lists(blocks):
        for t, groups in enumerate(sequence):
            own = t // nsa.l_sel
            for selected in groups:
                assert selected == sorted(set(selected))
                assert selected[-1] == own and selected[0] == 0 and {max(own - 1, 0)} <= set(selected)
                assert len(selected) == min(nsa.n_sel, own + 1)


@looped
@every_variant
@dtypes
def test_equal_scores_go_to_the_lower_index(variant: str, dtype: torch.dtype) -> None:
    """With equal keys, all compressed blocks have the same probability, and the lowest indices are selected."""
    q = torch.randn(1, 40, 4, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    k_cmp = torch.ones(1, geometry.num_compressed(40, FIVE_BLOCKS), 2, 8, dtype=dtype)
    with use_variant(variant) as backend:
        blocks = to_lists(select(q, k_cmp, FIVE_BLOCKS, backend))[0]
    for t, groups in enumerate(blocks):
        own = t // 2
        expected = sorted({0, max(own - 1, 0), own} | set(range(1, min(3, own))))[:5]
        assert groups == [expected, expected]


@given(scores=st.lists(st.sampled_from([0.0, 1e-30, 0.5, 0.5 + 2**-24, 1.0, 1.0 + 2**-23, 3.0]), min_size=12, max_size=12))
def test_ranking_is_exact_to_the_last_bit_of_float32(scores: list[float]) -> None:
    """A tie-break by a small bias per index would reorder scores that differ by one ulp."""
    nsa = FIVE_BLOCKS
    importance = torch.tensor(scores).expand(1, 24, 1, 12).contiguous()
    selected = to_lists(reference.select_by_importance(importance, nsa))[0]
    for t, (groups,) in enumerate(selected):
        assert groups == brute_force.select_by_importance(np.array(scores), t, to_brute_force_geometry(nsa))


def test_one_ulp_decides() -> None:
    importance = torch.full((1, 24, 1, 12), 0.25)
    importance[..., 7] = torch.nextafter(torch.tensor(0.25), torch.tensor(1.0))
    assert to_lists(reference.select_by_importance(importance, FIVE_BLOCKS))[0][-1] == [[0, 1, 7, 10, 11]]


@looped
@every_variant
def test_every_dtype_selects_the_same_blocks(variant: str) -> None:
    """For inputs that all dtypes represent exactly, the selection does not depend on the dtype."""
    generator = torch.Generator().manual_seed(3)
    nsa = FIVE_BLOCKS
    q = torch.randint(-3, 4, (2, 60, 6, 4), generator=generator).double()
    k_cmp = torch.randint(-3, 4, (2, geometry.num_compressed(60, nsa), 2, 4), generator=generator).double() / 4
    with use_variant(variant) as backend:
        selected = [
            to_lists(select(q.to(d), k_cmp.to(d), nsa, backend))
            for d in (torch.float64, torch.float32, torch.bfloat16, torch.float16)
        ]
    assert selected[0] == brute_force.select_blocks(q.numpy(), k_cmp.numpy(), to_brute_force_geometry(nsa))
    # Half precision uses a float32 softmax, whose rounding can break exact ties.
    assert selected[0] == selected[1]
    for half in selected[2:]:
        assert_equal_except_ties(half, selected[0], q, k_cmp, nsa)


def assert_equal_except_ties(actual: list, expected: list, q: torch.Tensor, k_cmp: torch.Tensor, nsa: NSAConfig) -> None:
    scores = brute_force.importance(q.numpy(), k_cmp.numpy(), to_brute_force_geometry(nsa))
    for b, t, g in np.ndindex(scores.shape[:3]):
        mine, true = set(actual[b][t][g]), set(expected[b][t][g])
        swapped = [scores[b, t, g, j] for j in mine ^ true]
        assert not swapped or max(swapped) - min(swapped) < 1e-5 * max(swapped)


@looped
@every_variant
def test_permuting_heads_of_a_group_permutes_outputs_and_keeps_the_selection(variant: str) -> None:
    shape = Shape(T=37, G=2, h=4)
    inputs = shape.inputs()
    order = torch.tensor([2, 0, 3, 1, 5, 4, 7, 6])
    permuted = inputs._replace(q=inputs.q[:, :, order], gates=inputs.gates[:, :, order])
    with use_variant(variant) as backend:
        assert torch.equal(
            select(inputs.q, inputs.k_cmp, shape.nsa, backend), select(permuted.q, inputs.k_cmp, shape.nsa, backend)
        )
        out = attention.nsa_attention(*inputs, shape.nsa, backend=backend)
        again = attention.nsa_attention(*permuted, shape.nsa, backend=backend)
    torch.testing.assert_close(again, out[:, :, order], rtol=1e-12, atol=1e-12)


@looped
@every_variant
def test_permuting_groups_permutes_everything(variant: str) -> None:
    shape = Shape(T=37, G=3, h=2)
    inputs = shape.inputs()
    groups, heads = torch.tensor([2, 0, 1]), torch.tensor([4, 5, 0, 1, 2, 3])
    permuted = inputs.map(lambda x: x[:, :, groups if x.shape[2] == 3 else heads])
    with use_variant(variant) as backend:
        assert torch.equal(
            select(permuted.q, permuted.k_cmp, shape.nsa, backend),
            select(inputs.q, inputs.k_cmp, shape.nsa, backend)[:, :, groups],
        )
        out = attention.nsa_attention(*inputs, shape.nsa, backend=backend)
        torch.testing.assert_close(
            attention.nsa_attention(*permuted, shape.nsa, backend=backend), out[:, :, heads], rtol=1e-12, atol=1e-12
        )


def test_identical_heads_score_h_times_one_head() -> None:
    """Eq. 10 sums over the heads of a group."""
    shape = Shape(G=1, h=1)
    inputs = shape.inputs()
    _, lse = reference.compressed_attention(inputs.q, inputs.k_cmp, inputs.v_cmp, shape.nsa)
    one = reference.block_importance(inputs.q, inputs.k_cmp, lse, shape.nsa)
    five = reference.block_importance(inputs.q.repeat(1, 1, 5, 1), inputs.k_cmp, lse.repeat(1, 1, 5), shape.nsa)
    torch.testing.assert_close(five, 5 * one)


@looped
@every_variant
def test_selection_has_no_gradient(variant: str) -> None:
    inputs = Shape().inputs().map(lambda x: x.requires_grad_())
    with use_variant(variant) as backend:
        assert not select(inputs.q, inputs.k_cmp, Shape().nsa, backend).requires_grad


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_the_block_of_a_needle_is_selected(backend: str) -> None:
    """A distant key that matches one query is selected by its compressed block, at the defaults and 4096 tokens."""
    nsa, T, needle = NSAConfig(), 4096, 1000
    generator = torch.Generator().manual_seed(0)
    k = 0.05 * torch.randn(1, T, 1, 8, generator=generator)
    q = torch.randn(1, T, 1, 8, generator=generator)
    k[:, needle] = 40 * torch.nn.functional.normalize(q[:, -1], dim=-1)
    k_cmp = attention.compress(k, nsa)
    blocks = to_lists(select(q, k_cmp, nsa, backend))
    assert needle // nsa.l_sel in blocks[0][-1][0]


@looped
@every_variant
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_near_ties_are_resolved_as_in_the_definition(variant: str, dtype: torch.dtype) -> None:
    """Scores are float64, and importances are ranked in float32: only smaller differences are ties."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 79, 6, 8, generator=generator)
    one = torch.randn(1, 1, 2, 8, generator=generator)
    nudges = torch.randint(-2, 3, (1, 39, 2, 8), generator=generator)
    unit = 2.0**-23 if dtype == torch.float32 else 2.0**-27
    k = one.to(dtype) * (1 + nudges.to(dtype) * unit)
    with use_variant(variant) as backend:
        actual = attention.score_and_select_blocks(q.to(dtype), k, FIVE_BLOCKS, backend=backend)
    assert torch.equal(actual, attention.score_and_select_blocks(q.to(dtype), k, FIVE_BLOCKS, backend="reference"))
