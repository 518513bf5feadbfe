"""The model equals brute force, and RoPE has its defining properties."""

from __future__ import annotations

from itertools import pairwise

import brute_force
import numpy as np
import pytest
import torch
from looping import looped
from model_forms import to_brute_force_model
from model_inputs import VARIANTS, format_variant, make_config, make_tokens

from nsa_lab.attention import resolve_backend, window_attention
from nsa_lab.config import ModelConfig, RopeScaling
from nsa_lab.model import NSATransformer, SparseAttention, compute_rotary, get_rotary_table, rotate
from nsa_lab.model.layers import subsample_rotary

CPU = torch.device("cpu")


INDEXER = {"d_k": 8, "rotary_share": 0.5, "selection_loss": 0.1}
RECALL_OPTIONS = [
    {"d_k": 8, "rotary_share": 0.5},
    {"matching_heads": 2},
    {"d_k": 8, "rotary_share": 0.25, "matching_heads": 1},
    INDEXER | {"indexer_block": 2, "matching_heads": 1},
    INDEXER | {"indexer_block": 1},
    INDEXER | {"d_k": 16, "indexer_block": 1, "indexer_width": 8, "matching_heads": 1},
    {"d_k": 12, "selection_loss": 0.1, "indexer_block": 2, "indexer_width": 2},
    INDEXER | {"indexer_block": 4, "phi": "linear"},
]


# Options that training_speed.md found useful.
FAST_CASES = [
    {"embedding_norm": True},
    {"embedding_norm": True, "matching_heads": 1, "mlp": "gated"},
    {"ngrams": 2, "ngram_rows": 64, "ngram_width": 3},
    {"ngrams": 5, "ngram_rows": 37, "ngram_width": 4, "embedding_norm": True},
]


@pytest.mark.slow
@looped
@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("variant", [*VARIANTS, *RECALL_OPTIONS, *FAST_CASES], ids=format_variant)
def test_logits_equal_brute_force(variant: dict[str, str], backend: str) -> None:
    """They agree to float32, because the RoPE table is float32."""
    config = make_config(**variant)
    model = NSATransformer(config, backend=backend, dtype=torch.float64, seed=0).double()
    with torch.no_grad():
        for (
            x
        ) in model.parameters():  # change norms and gates from their initial values, so that swapped weights are detected
            x.add_(0.3 * torch.randn(x.shape, generator=torch.Generator().manual_seed(x.numel()), dtype=x.dtype))
        for length in (3, 29):
            tokens = make_tokens(config, length)
            expected = brute_force.logits(tokens.numpy(), to_brute_force_model(model), config.n_layers)
            np.testing.assert_allclose(model(tokens).numpy(), expected, rtol=1e-4, atol=2e-5 * np.abs(expected).max())


@pytest.mark.parametrize("width", [2, 6, 64])
def test_every_head_is_rotated_separately(width: int) -> None:
    x = torch.randn(2, 11, 3, width, dtype=torch.float64)
    expected = brute_force.rotate(x.numpy(), 10000.0)
    np.testing.assert_allclose(rotate(x, get_rotary_table(11, width, 10000.0, CPU)).numpy(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("width", [2, 4, 8])
def test_every_nth_angle_is_the_table_of_the_smaller_width(width: int) -> None:
    for found, expected in zip(
        subsample_rotary(get_rotary_table(11, 8, 10000.0, CPU), width),
        get_rotary_table(11, width, 10000.0, CPU),
        strict=True,
    ):
        torch.testing.assert_close(found, expected)


def test_scaled_frequencies_are_those_of_the_definition() -> None:
    """YaRN (arXiv 2309.00071, section 3.2): the number of rotations in the original length decides."""
    theta, width, length, factor = 1000.0, 16, 500, 6.0
    rates = [theta ** (-2 * i / width) for i in range(width // 2)]
    positions = np.array([0, 1, 7, 2999])
    linear = RopeScaling(rope_type="linear", factor=factor)
    yarn = RopeScaling(
        rope_type="yarn", factor=factor, original_max_position_embeddings=length, beta_fast=20.0, beta_slow=2.0
    )
    found = {kind: compute_rotary(torch.from_numpy(positions), width, theta, kind) for kind in (linear, yarn)}
    np.testing.assert_allclose(found[linear][0], np.cos(positions[:, None] * np.array(rates) / factor), atol=2e-4)
    np.testing.assert_allclose(found[linear][1], np.sin(positions[:, None] * np.array(rates) / factor), atol=2e-4)
    rotations = [length * rate / (2 * np.pi) for rate in rates]
    # The indices at which a frequency has 20 and 2 rotations, rounded outwards.
    first = max(index for index in range(width // 2) if rotations[index] >= 20.0)
    last = min(index for index in range(width // 2) if rotations[index] <= 2.0)
    assert 0 < first < last - 1 and last < width // 2 - 1
    shares = [min(max((index - first) / (last - first), 0.0), 1.0) for index in range(width // 2)]
    expected = np.array([(1 - share) * rate + share * rate / factor for share, rate in zip(shares, rates, strict=True)])
    scale = 0.1 * np.log(factor) + 1
    np.testing.assert_allclose(found[yarn][0], scale * np.cos(positions[:, None] * expected), atol=5e-4)
    np.testing.assert_allclose(found[yarn][1], scale * np.sin(positions[:, None] * expected), atol=5e-4)
    given = yarn.model_copy(update={"attention_factor": 1.5})
    torch.testing.assert_close(compute_rotary(torch.arange(3), width, theta, given)[0][0], torch.full((8,), 1.5))


@looped
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rotation_keeps_dtype_and_norm(dtype: torch.dtype) -> None:
    x = torch.randn(1, 9, 2, 8).to(dtype)
    turned = rotate(x, get_rotary_table(9, 8, 10000.0, CPU))
    assert turned.dtype == dtype
    torch.testing.assert_close(turned.float().norm(dim=-1), x.float().norm(dim=-1), rtol=2e-2, atol=1e-2)


def make_layer(config: ModelConfig) -> SparseAttention:
    return NSATransformer(config, seed=0).blocks[0].attention


def test_scores_depend_only_on_the_distance() -> None:
    """With equal tokens, the product of q at t and k at t - o depends only on o."""
    config = make_config(dim=48, n_heads=6, d_k=8, d_v=8)
    layer, T = make_layer(config), 120
    x = torch.randn(1, 1, config.dim, generator=torch.Generator().manual_seed(0)).expand(1, T, -1)
    q, _, _, k_sel, _, k_win, _, _ = layer.project(x, get_rotary_table(T, config.d_k, config.rope_theta, CPU))
    for k in (k_sel, k_win):
        means = []
        for offset in (0, 1, 7, 50):
            products = (q[0, offset:] * k[0, : T - offset].repeat_interleave(3, dim=1)).sum(-1)  # [T - offset, H]
            assert products.std(0).max() < 1e-4
            means.append(products.mean(0))
        assert all((a - b).abs().min() > 1e-4 for a, b in pairwise(means))


def test_compressed_keys_are_rotated_before_they_are_compressed() -> None:
    """Shifting the query and the compressed block by one stride does not change their product."""
    config = make_config(d_k=8)
    layer, T, d = make_layer(config), 80, config.nsa.d
    x = torch.randn(1, 1, config.dim, generator=torch.Generator().manual_seed(0)).expand(1, T, -1)
    q, k_cmp = layer.project(x, get_rotary_table(T, config.d_k, config.rope_theta, CPU))[:2]
    products = torch.einsum("btghd,bigd->bghti", q.unflatten(2, (2, 2)), k_cmp)[0].flatten(0, 1)
    moved = products[:, d:, 1:] - products[:, :-d, :-1]
    assert moved.abs().max() < 1e-4
    assert (products[:, -1, 0] - products[:, -1, -1]).abs().min() > 1e-4


def test_the_window_branch_is_translation_invariant() -> None:
    """The same last tokens after another prefix, 13 positions later, have the same output."""
    config = make_config(d_k=8, d_v=8, nsa={"w": 10})
    layer = make_layer(config)
    generator = torch.Generator().manual_seed(0)
    tail = torch.randn(1, 25, config.dim, generator=generator)
    later = torch.cat([torch.randn(1, 13, config.dim, generator=generator), tail], dim=1)
    outs = []
    for x in (tail, later):
        q, *_, k_win, v_win, _ = layer.project(x, get_rotary_table(x.shape[1], config.d_k, config.rope_theta, CPU))
        outs.append(window_attention(q, k_win, v_win, config.nsa)[0])
    torch.testing.assert_close(outs[1][:, 13 + 9 :], outs[0][:, 9:], rtol=1e-4, atol=1e-5)


def test_two_models_do_not_share_a_rotary_table() -> None:
    one, other = (NSATransformer(make_config(rope_theta=theta), seed=0) for theta in (10000.0, 100.0))
    tokens = make_tokens(one.config, 30)
    before = one(tokens)
    assert not torch.allclose(other(tokens), before)
    assert torch.equal(one(tokens), before)


def test_each_branch_has_its_own_keys_and_values() -> None:
    config = make_config()
    layer = make_layer(config)
    assert layer.qkv.out_features == 4 * 6 + 3 * 2 * (6 + 5)
    x = torch.randn(1, 20, config.dim)
    _, _, _, k_sel, v_sel, k_win, v_win, _ = layer.project(x, get_rotary_table(20, 6, 10000.0, CPU))
    assert not torch.allclose(k_sel, k_win) and not torch.allclose(v_sel, v_win)


@pytest.mark.parametrize("gate", ["sigmoid", "softmax"])
def test_gates_are_per_head_and_token(gate: str) -> None:
    config = make_config(gate=gate)
    gates = make_layer(config).compute_gates(torch.randn(2, 9, config.dim))
    assert gates.shape == (2, 9, 4, 3) and (gates > 0).all() and (gates < 1).all()
    assert gates.std(dim=2).min() > 0 and gates.std(dim=1).min() > 0
    assert torch.allclose(gates.sum(-1), torch.ones(())) == (gate == "softmax")


def test_the_backend_is_resolved_once_when_the_model_is_built() -> None:
    model = NSATransformer(make_config(), backend="reference")
    expected = resolve_backend("cpu", torch.float32, model.config.nsa, model.config, "reference")
    assert model.backends == expected
    assert all(block.attention.backends is model.backends for block in model.blocks)
