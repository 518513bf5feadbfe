"""Pretrained weights in an NSATransformer: the logits of the dense and of the converted model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from looping import looped
from tiny_dense_models import ALL, FEW, make_dense, make_tokens

from nsa_lab import NSATransformer, generate, sparsify
from nsa_lab.config import ConfigError
from nsa_lab.convert import convert_with_trained_indexers, copy_weights, describe_model, make_nsa_transformer

PLAIN: dict[str, Any] = {"attention_bias": False, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"indexer_keys": "shared", "indexer_block": 2, "indexer_order": ("pool", "rotate"), "indexer_every": 2},
    {"indexer_heads": 2, "indexer_width": 4},
]


def test_all_blocks_equal_the_dense_model() -> None:
    for family in ("Llama", "SmolLM2", "Mistral"):
        dense, tokens = make_dense(family, **PLAIN).double(), make_tokens()
        model = make_nsa_transformer(dense, ALL)
        torch.testing.assert_close(model(tokens), dense(tokens).logits, atol=1e-4, rtol=1e-4)


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
