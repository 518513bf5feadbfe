"""Partial RoPE, induction-initialized heads, and the selection loss of the compressed branch."""

from __future__ import annotations

import copy
from typing import cast

import pytest
import torch
from looping import looped
from model_inputs import TINY_NSA, compute_loss, make_config, make_tokens

from nsa_lab.attention import Span, selection_loss
from nsa_lab.config import ConfigError, ModelConfig, NSAConfig
from nsa_lab.model import Block, NSATransformer, NSAttention, SparseAttention, compute_rotary, rotate
from nsa_lab.model.layers import ShortConvolution, convolve_keys

CPU = torch.device("cpu")
TRAINING_RECIPE = {"d_k": 8, "rotary_share": 0.5, "matching_heads": 2, "selection_loss": 0.1}


def make_model(**changes: object) -> NSATransformer:
    return NSATransformer(make_config(**{**TRAINING_RECIPE, **changes}), dtype=torch.float64, seed=0).double()


def test_partial_rope_keeps_the_other_channels() -> None:
    x = torch.randn(1, 9, 3, 8, dtype=torch.float64)
    rotated = rotate(x, compute_rotary(torch.arange(9), 4, 100.0))
    assert torch.equal(rotated[..., 4:], x[..., 4:])
    assert torch.equal(rotated[..., :4], rotate(x[..., :4].contiguous(), compute_rotary(torch.arange(9), 4, 100.0)))
    assert not torch.equal(rotated[:, 1:, :, :4], x[:, 1:, :, :4])


@pytest.mark.parametrize("attention", ["nsa", "dense"])
def test_induction_heads_attend_to_the_token_after_a_match_at_initialization(attention: str) -> None:
    """With one layer and two rotated channels, the best match is the token after an earlier equal token."""
    config = make_config(attention=attention, d_k=32, dim=64, rotary_share=1 / 16, matching_heads=2, n_layers=1)
    model = NSATransformer(config, dtype=torch.float64, seed=3).double()
    layer = model.blocks[0].attention
    tokens = torch.randperm(60, generator=torch.Generator().manual_seed(0))[:40][None]
    tokens[0, 30] = tokens[0, 7]
    x, rotary = model.prepare_inputs(tokens)
    q, (k, *_), _, _ = layer.project_heads(model.blocks[0].attention_norm(x), rotary)
    for head in (0, 1):
        assert (q[0, 30, head] @ k[0, :31, 0].T).argmax() == 8
    assert (q[0, 30, 3] @ k[0, :31, 1].T).argmax() != 8
    n_sets = 3 if attention == "nsa" else 1
    weights = layer.qkv.weight[: (4 + n_sets * 2) * 32].view(-1, 32, 64)
    keys = weights[4:].view(n_sets, 2, 32, 64)
    unshifted = (model.blocks[0].attention_norm(x) @ keys[0, 1].T)[..., 2:]
    torch.testing.assert_close(k[0, :, 1, 2:], unshifted[0])  # the second group's keys are not shifted
    assert torch.equal(weights[0], keys[0, 0]) and torch.equal(weights[1], keys[0, 0])
    assert not torch.equal(weights[2], keys[0, 1]) and not torch.equal(weights[3], keys[0, 1])
    assert all(torch.equal(branch, keys[0]) for branch in keys)


def test_a_part_of_packed_keys_is_convolved_after_the_key_before_it() -> None:
    convolution = ShortConvolution(2, 1, 3).double()
    torch.nn.init.normal_(convolution.weight, generator=torch.Generator().manual_seed(0))
    k = torch.randn(2, 9, 2, 1, 3, dtype=torch.float64)
    for starts in (None, torch.zeros(9, dtype=torch.bool).index_fill(0, torch.tensor([0, 4, 5, 8]), True)):
        whole = convolve_keys(convolution, k, starts, None)
        for first in range(1, 9):
            own_starts = None if starts is None else starts[first:]
            part = convolve_keys(convolution, k[:, first:], own_starts, k[:, first - 1 : first])
            assert torch.equal(part, whole[:, first:])


def test_shifted_keys_do_not_cross_documents() -> None:
    model = make_model()
    lengths = (5, 0, 17, 1, 30)
    tokens = make_tokens(model.config, sum(lengths), batch=1)
    packed = model(tokens, Span.packed(torch.tensor([0, *lengths]).cumsum(0).int()))
    alone = [model(document) for document in tokens.split(lengths, dim=1) if document.shape[1]]
    torch.testing.assert_close(packed, torch.cat(alone, dim=1), rtol=0, atol=1e-12)


def test_the_auxiliary_loss_is_the_sum_over_layers_in_training_and_zero_otherwise() -> None:
    model = make_model()
    tokens = make_tokens(model.config, 61)
    assert model.auxiliary_loss() == 0.0
    model(tokens)
    x, rotary = model.prepare_inputs(tokens)
    expected = torch.zeros((), dtype=torch.float64)
    for block in cast("list[Block]", model.blocks):
        q, k_cmp, _, k_sel, *_ = cast(SparseAttention, block.attention).project(block.attention_norm(x), rotary)
        expected = expected + selection_loss(q, k_cmp, k_sel, model.config.nsa)
        x, _ = block(x, rotary)
    torch.testing.assert_close(model.auxiliary_loss(), 0.1 * expected, rtol=1e-12, atol=0.0)
    assert model.auxiliary_loss() > 0
    assert copy.deepcopy(model).auxiliary_loss() == 0.0
    with pytest.raises(ValueError, match="tokens: expected values"):
        model(torch.full_like(tokens, 10**6))
    assert model.auxiliary_loss() == 0.0, "a failed pass must not keep the loss of the pass before"
    model.eval()(tokens)
    assert model.auxiliary_loss() == 0.0
    for other in (make_model(selection_loss=0.0), make_model(attention="dense")):
        other(tokens)
        assert other.auxiliary_loss() == 0.0 and not other.auxiliary_loss().requires_grad


def test_the_auxiliary_loss_changes_no_logit_and_trains_the_compressed_keys() -> None:
    model, plain = make_model(), make_model(selection_loss=0.0)
    tokens = make_tokens(model.config, 61)
    assert torch.equal(model(tokens), plain(tokens))
    model.auxiliary_loss().backward()
    c = model.config
    rows = model.blocks[
        -1
    ].attention.qkv.weight.grad  # in a lower layer, the inputs of the layers above have a gradient too
    q, k_cmp, rest = rows.split([c.n_heads * c.d_k, 2 * c.d_k, 4 * c.d_k + 6 * c.d_v])
    assert q.abs().sum() > 0 and k_cmp.abs().sum() > 0 and rest.abs().sum() == 0
    assert model.embedding.weight.grad.abs().sum() > 0


def test_recomputation_gives_the_same_gradients() -> None:
    tokens, gradients = make_tokens(make_config(**TRAINING_RECIPE), 62), []
    for checkpointing in (False, True):
        model = make_model()
        model.gradient_checkpointing = checkpointing
        (compute_loss(model, tokens) + model.auxiliary_loss()).backward()
        gradients.append([p.grad for p in model.parameters()])
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


def test_the_stand_alone_layer_supports_it_too() -> None:
    torch.manual_seed(0)
    layer = NSAttention(32, 4, 2, nsa=NSAConfig(**TINY_NSA), rotary_share=0.5, matching_heads=1, selection_loss=0.5)
    layer(torch.randn(2, 50, 32))
    layer.auxiliary_loss().backward()
    assert layer.attention.qkv.weight.grad.abs().sum() > 0
    layer.eval()(torch.randn(2, 50, 32))
    assert layer.auxiliary_loss() == 0.0


@looped
@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"rotary_share": 0.3}, "rotary_share = 0.3 of model.d_k = 64 is 19.2 channels.*use 0.3125"),
        ({"rotary_share": 0.01}, "use 0.03125"),
        ({"d_k": 6, "rotary_share": 0.5}, "is 3 channels"),
        ({"matching_heads": 7}, "matching_heads = 7 is more than the 6 heads of a group"),
        ({"selection_loss": -1.0}, "greater than or equal to 0"),
    ],
)
def test_invalid_options_raise(wrong: dict[str, float], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ModelConfig(**wrong)
