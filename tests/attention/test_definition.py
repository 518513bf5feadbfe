"""Every function in every variant equals loops over single tokens in float64 (`brute_force`)."""

from __future__ import annotations

import re
from collections.abc import Callable

import brute_force
import numpy as np
import pytest
import torch
from attention_inputs import (
    CORNERS,
    SMALL,
    Shape,
    every_variant,
    random_shapes,
    to_brute_force_geometry,
    to_lists,
    to_numpy,
    use_variant,
)
from hypothesis import given
from looping import looped

from nsa_lab import attention
from nsa_lab.attention import geometry, reference
from nsa_lab.attention.compression import compress, make_phi

LIMIT = 1e-12
corners = pytest.mark.parametrize("shape", CORNERS.values(), ids=CORNERS)


def assert_equal(actual: torch.Tensor, expected: np.ndarray) -> None:
    np.testing.assert_allclose(actual.numpy(), expected, rtol=LIMIT, atol=LIMIT)


def check_all(shape: Shape, variant: str) -> None:
    """Each function gets its own inputs, so that one fault does not hide another."""
    inputs, nsa, g = shape.inputs(), shape.nsa, to_brute_force_geometry(shape.nsa)
    q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, _ = to_numpy(inputs)
    with use_variant(variant) as backend:
        out, lse = attention.compressed_attention(inputs.q, inputs.k_cmp, inputs.v_cmp, nsa, backend=backend)
        true_out, true_lse = brute_force.compressed_attention(q, k_cmp, v_cmp, g)
        assert_equal(out, true_out)
        assert_equal(lse, true_lse)

        blocks = attention.select_blocks(inputs.q, inputs.k_cmp, torch.from_numpy(true_lse), nsa, backend=backend)
        true_blocks = brute_force.select_blocks(q, k_cmp, g)
        assert to_lists(blocks) == true_blocks
        assert blocks.dtype == torch.int32 and blocks.shape == (shape.B, shape.T, shape.G, nsa.n_sel)
        assert_padding_is_last(blocks)

        out, lse = attention.selected_attention(inputs.q, inputs.k_sel, inputs.v_sel, blocks, nsa, backend=backend)
        true_out, true_lse = brute_force.selected_attention(q, k_sel, v_sel, true_blocks, g)
        assert_equal(out, true_out)
        assert_equal(lse, true_lse)

        out, lse = attention.window_attention(inputs.q, inputs.k_win, inputs.v_win, nsa, backend=backend)
        true_out, true_lse = brute_force.window_attention(q, k_win, v_win, g)
        assert_equal(out, true_out)
        assert_equal(lse, true_lse)

        assert_equal(
            attention.nsa_attention(*inputs, nsa, backend=backend), brute_force.nsa_attention(*to_numpy(inputs), g)
        )


def assert_padding_is_last(blocks: torch.Tensor) -> None:
    padding = (blocks == -1).int()
    assert (padding.diff(dim=-1) >= 0).all()


@looped
@every_variant
@corners
def test_every_function_equals_brute_force_in_the_corners(shape: Shape, variant: str) -> None:
    check_all(shape, variant)


@pytest.mark.slow
@every_variant
@given(shape=random_shapes())
def test_every_function_equals_brute_force_for_any_shape(variant: str, shape: Shape) -> None:
    check_all(shape, variant)


@given(shape=random_shapes())
def test_importance_equals_brute_force(shape: Shape) -> None:
    inputs = shape.inputs()
    _, lse = reference.compressed_attention(inputs.q, inputs.k_cmp, inputs.v_cmp, shape.nsa)
    importance = reference.block_importance(inputs.q, inputs.k_cmp, lse, shape.nsa)
    true = brute_force.importance(inputs.q.numpy(), inputs.k_cmp.numpy(), to_brute_force_geometry(shape.nsa))
    assert importance.dtype == torch.float32
    np.testing.assert_allclose(importance.numpy(), true, rtol=1e-6, atol=1e-12)


@given(shape=random_shapes())
def test_importance_of_a_row_sums_to_its_overlap(shape: Shape) -> None:
    """Probabilities of a head sum to 1, and a compression block shares l tokens with the selection blocks."""
    inputs = shape.inputs()
    _, lse = reference.compressed_attention(inputs.q, inputs.k_cmp, inputs.v_cmp, shape.nsa)
    total = reference.block_importance(inputs.q, inputs.k_cmp, lse, shape.nsa).sum(-1)
    seen = geometry.visible_compressed(torch.arange(shape.T), shape.nsa) > 0
    expected = torch.where(seen, shape.h * shape.nsa.l / shape.nsa.d, 0.0)
    torch.testing.assert_close(total, expected[None, :, None].expand_as(total), rtol=1e-5, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("implementation", [reference.compress, compress], ids=["reference", "fast"])
@pytest.mark.parametrize("phi", ["avg", "linear", "mlp", "pool"])
@given(shape=random_shapes(max_tokens=25))
def test_compression_equals_brute_force(implementation, phi: str, shape: Shape) -> None:
    nsa = shape.nsa.model_copy(update={"phi": phi})
    x = shape.inputs().k_sel
    torch.manual_seed(shape.seed)
    module = make_phi(nsa, shape.d_k)
    if module is not None:
        module = module.double()
        for p in module.parameters():  # a pool starts as the mean
            torch.nn.init.normal_(p)
        weights = [p.detach().numpy() for p in module.parameters()]
    true_phi = {
        "avg": lambda: brute_force.mean,
        "linear": lambda: brute_force.linear(*weights),
        "mlp": lambda: brute_force.mlp(*weights),
        "pool": lambda: brute_force.pool(*weights),
    }[phi]()
    with torch.no_grad():
        blocks = implementation(x, nsa, module)
    assert_equal(blocks, brute_force.compress(x.numpy(), to_brute_force_geometry(nsa), true_phi))


@looped
@every_variant
@pytest.mark.parametrize("length", [1, 2, 7, 512])
def test_one_query_attends_to_every_earlier_key(variant: str, length: int) -> None:
    """The last query over `length` keys is a plain softmax, and it depends on the last value."""
    shape = Shape(nsa=Shape().nsa.model_copy(update={"w": length, "l_sel": length + length % 2}), T=length, h=1)
    inputs = shape.inputs()
    q, k, v = inputs.q, inputs.k_win, inputs.v_win
    scores = torch.einsum("bgd,bsgd->bgs", q[:, -1], k) * shape.d_k**-0.5
    true = torch.einsum("bgs,bsgd->bgd", scores.softmax(-1), v)
    blocks = torch.full((1, length, shape.G, shape.nsa.n_sel), -1, dtype=torch.int32)
    blocks[..., 0] = 0
    with use_variant(variant) as backend:
        for call in (
            lambda v: attention.window_attention(q, k, v, shape.nsa, backend=backend)[0],
            lambda v: attention.selected_attention(q, k, v, blocks, shape.nsa, backend=backend)[0],
        ):
            torch.testing.assert_close(call(v)[:, -1], true, rtol=LIMIT, atol=LIMIT)
            changed = v.clone()
            changed[:, -1] += 1
            assert not torch.allclose(call(changed)[:, -1], true)


@looped
@every_variant
def test_blocks_need_not_come_from_select_blocks(variant: str) -> None:
    """Unsorted blocks, -1 in between, no block, future blocks: each query attends to the tokens <= t of its blocks."""
    shape = Shape(T=23)
    inputs = shape.inputs()
    generator = torch.Generator().manual_seed(5)
    order = torch.rand(1, shape.T, shape.G, 6, generator=generator).argsort(-1)[..., : shape.nsa.n_sel]
    hole = torch.rand(order.shape, generator=generator) < 0.3
    blocks = torch.where(hole, -1, order).to(torch.int32)
    blocks[:, 9] = -1
    with use_variant(variant) as backend:
        out, lse = attention.selected_attention(inputs.q, inputs.k_sel, inputs.v_sel, blocks, shape.nsa, backend=backend)
    true_out, true_lse = brute_force.selected_attention(
        inputs.q.numpy(), inputs.k_sel.numpy(), inputs.v_sel.numpy(), to_lists(blocks), to_brute_force_geometry(shape.nsa)
    )
    assert_equal(out, true_out)
    assert_equal(lse, true_lse)
    assert (out[:, 9] == 0).all() and torch.isneginf(lse[:, 9]).all()


@looped
@every_variant
@pytest.mark.parametrize("scale", [1e-3, 1.0, 300.0])
def test_scores_neither_overflow_nor_underflow(variant: str, scale: float) -> None:
    shape = Shape(T=33)
    inputs = shape.inputs()._replace(q=shape.inputs().q * scale)
    with use_variant(variant) as backend:
        out = attention.nsa_attention(*inputs, shape.nsa, backend=backend)
    expected = brute_force.nsa_attention(*to_numpy(inputs), to_brute_force_geometry(shape.nsa))
    np.testing.assert_allclose(out.numpy(), expected, rtol=1e-10, atol=1e-10)


@looped
@every_variant
def test_given_blocks_replace_the_selected_ones(variant: str) -> None:
    """Blocks selected by other queries and keys, one query per group and one key per two tokens: forward and gradients."""
    shape = Shape(SMALL.model_copy(update={"n_sel": 5}), T=45)
    inputs, nsa, g = shape.inputs(), shape.nsa, to_brute_force_geometry(shape.nsa)
    chooser = nsa.model_copy(update={"l": 2, "d": 2})
    generator, (B, _, G, _) = torch.Generator().manual_seed(5), inputs.k_sel.shape
    q, k = (torch.randn(B, n, G, 3, generator=generator).to(inputs.q.dtype) for n in (45, 45 // 2))
    leaves = [x.clone().requires_grad_() for x in inputs]
    with use_variant(variant) as backend:
        blocks = attention.score_and_select_blocks(q, k, chooser, backend=backend)
        out = attention.nsa_attention(*leaves, nsa, blocks=blocks, backend=backend)
        own = attention.nsa_attention(*inputs, nsa, backend=backend)
    assert to_lists(blocks) == brute_force.select_blocks(q.numpy(), k.numpy(), to_brute_force_geometry(chooser))
    chosen_by = q.numpy(), k.numpy(), to_brute_force_geometry(chooser)
    assert_equal(out.detach(), brute_force.nsa_attention(*to_numpy(inputs), g, chosen_by))
    assert not torch.allclose(out.detach(), own)
    definition = [x.clone().requires_grad_() for x in inputs]
    expected = attention.reference.nsa_attention(*definition, nsa, blocks=blocks)
    actual = torch.autograd.grad(out.square().sum(), leaves)
    for a, b in zip(actual, torch.autograd.grad(expected.square().sum(), definition), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


@looped
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda blocks: blocks.long(), "blocks: expected int32, got torch.int64; use blocks.int()"),
        (lambda blocks: blocks[:, 1:], "blocks: expected"),
        (lambda blocks: blocks[..., 1:], "blocks: expected"),
        (lambda blocks: blocks[..., :1].expand_as(blocks), ", some twice; remove duplicates"),
        (lambda blocks: torch.cat([blocks[..., 1:], blocks[..., :1]], -1).clamp_min(0), ", some twice; remove duplicates"),
        (lambda blocks: blocks - 1, "or -1 for none; got -2 to "),
        (lambda blocks: torch.where(blocks == -1, blocks, blocks + 1), "blocks: expected indices from 0 to "),
    ],
)
def test_invalid_given_blocks_raise(change: Callable[[torch.Tensor], torch.Tensor], words: str) -> None:
    shape = Shape(SMALL.model_copy(update={"n_sel": 5}), T=45)
    inputs = shape.inputs()
    blocks = change(attention.score_and_select_blocks(inputs.q, inputs.k_cmp, shape.nsa))
    with pytest.raises(ValueError, match=re.escape(words)):
        attention.nsa_attention(*inputs, shape.nsa, blocks=blocks)
