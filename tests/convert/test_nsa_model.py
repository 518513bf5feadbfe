"""Pretrained weights in an NSATransformer: the logits of the dense and of the converted model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from looping import looped
from tiny_dense_models import ALL, FEW, YARN, make_dense, make_tokens

from nsa_lab import NSATransformer, generate, sparsify
from nsa_lab.config import ConfigError
from nsa_lab.convert import convert_with_trained_indexers, copy_weights, describe_model, make_nsa_transformer

PLAIN: dict[str, Any] = {"attention_bias": False, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"indexer_keys": "shared", "indexer_block": 2, "indexer_order": ("pool", "rotate"), "indexer_every": 2},
    {"indexer_heads": 2, "indexer_width": 4},
]


SCALED: list[dict[str, Any]] = [
    {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0},
    {"rope_type": "yarn", "rope_theta": 500.0, "factor": 8.0, "original_max_position_embeddings": 16},
    {**YARN, "rope_theta": 100.0, "beta_fast": 2.0, "beta_slow": 0.5, "attention_factor": 1.5},
]


def test_all_blocks_equal_the_dense_model() -> None:
    for family in ("Llama", "SmolLM2", "Mistral"):
        dense, tokens = make_dense(family, **PLAIN).double(), make_tokens()
        model = make_nsa_transformer(dense, ALL)
        torch.testing.assert_close(model(tokens), dense(tokens).logits, atol=1e-4, rtol=1e-4)


@looped
@pytest.mark.parametrize("rope", SCALED)
def test_with_an_extended_context_all_blocks_equal_the_dense_model(rope: dict[str, Any]) -> None:
    """And few blocks equal the converted model, also in cached decoding."""
    options = PLAIN | {"rope_parameters": rope}
    dense, tokens = make_dense(**options).double(), make_tokens()
    expected = dense(tokens).logits
    assert not torch.allclose(expected, make_dense(**PLAIN).double()(tokens).logits, atol=1e-2)
    torch.testing.assert_close(make_nsa_transformer(dense, ALL)(tokens), expected, atol=1e-4, rtol=1e-4)
    control = NSATransformer(describe_model(dense.config, FEW).model_copy(update={"attention": "dense"})).double()
    copy_weights(dense, control)
    torch.testing.assert_close(control(tokens), expected, atol=1e-4, rtol=1e-4)
    model, converted = make_nsa_transformer(dense, FEW, indexer_width=4), sparsify(dense, FEW, indexer_width=4)
    torch.testing.assert_close(model(tokens), converted(tokens).logits, atol=1e-4, rtol=1e-4)
    new = generate(model, [tokens[0]], max_new_tokens=10)[0]
    rows = torch.cat([tokens[0], new])[None]
    assert torch.equal(new, model(rows)[0, len(tokens[0]) - 1 : -1].argmax(-1))


def test_a_model_without_the_scaling_of_its_weights_is_refused() -> None:
    dense = make_dense(**PLAIN | {"rope_parameters": SCALED[1]})
    model = NSATransformer(describe_model(dense.config).model_copy(update={"rope_scaling": None}))
    with pytest.raises(ConfigError, match=r"model.rope_scaling = None: expected rope_type='yarn'"):
        copy_weights(dense, model)
    unknown = {"rope_parameters": {**SCALED[1], "mscale": 0.7}}
    with pytest.raises(ConfigError, match=r"NSATransformer has no rope_parameters\.mscale = 0\.7; use nsa_lab\.sparsify"):
        describe_model(make_dense(**PLAIN | unknown).config)
    # The reverse extends the context.
    extended = describe_model(make_dense(**PLAIN).config).model_copy(update={"rope_scaling": model.config.rope_scaling})
    copy_weights(make_dense(**PLAIN), NSATransformer(extended))


def test_the_dense_control_has_the_dense_logits() -> None:
    dense, tokens = make_dense(**PLAIN).double(), make_tokens()
    model = NSATransformer(describe_model(dense.config, FEW).model_copy(update={"attention": "dense"})).double()
    copy_weights(dense, model)
    torch.testing.assert_close(model(tokens), dense(tokens).logits, atol=1e-4, rtol=1e-4)


@looped
@pytest.mark.parametrize("options", OPTIONS)
def test_few_blocks_equal_the_converted_model(options: dict[str, Any]) -> None:
    dense, tokens = make_dense(**PLAIN).double(), make_tokens()
    model, converted = make_nsa_transformer(dense, FEW, **options), sparsify(copy.deepcopy(dense), FEW, **options)
    torch.testing.assert_close(model(tokens), converted(tokens).logits, atol=1e-4, rtol=1e-4)
    new = generate(model, [tokens[0]], max_new_tokens=10)[0]
    how = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = converted.generate(tokens[:1], attention_mask=torch.ones_like(tokens[:1]), **how)
    assert torch.equal(new, expected[0, tokens.shape[1] :])


@looped
@pytest.mark.parametrize("options", OPTIONS)
def test_trained_indexers_go_both_ways(options: dict[str, Any]) -> None:
    dense, tokens = make_dense(**PLAIN).double(), make_tokens()
    trained = make_nsa_transformer(dense, FEW, **options)
    for name, parameter in trained.named_parameters():
        if ".indexer." in name:
            parameter.data.normal_(std=0.3, generator=torch.Generator().manual_seed(1))
    converted = convert_with_trained_indexers(copy.deepcopy(dense), trained)
    torch.testing.assert_close(converted(tokens).logits, trained(tokens), atol=1e-4, rtol=1e-4)
    assert torch.equal(make_nsa_transformer(converted)(tokens), trained(tokens))


def test_what_an_nsa_transformer_lacks_is_refused() -> None:
    for family, options, message in (
        ("Llama", {"rope_parameters": PLAIN["rope_parameters"]}, "attention_bias"),
        ("Llama", {"attention_bias": False}, "rope_type = 'llama3'"),
        ("Qwen2", PLAIN, "attention_bias"),
        ("Qwen3", PLAIN, "norms of queries and keys"),
    ):
        with pytest.raises(ConfigError, match=message):
            describe_model(make_dense(family, **options).config)
    dense = make_dense(**PLAIN)
    model = NSATransformer(describe_model(dense.config).model_copy(update={"rope_theta": 1e4}))
    with pytest.raises(ConfigError, match=r"model.rope_theta = 10000.0: expected 500.0"):
        copy_weights(dense, model)
