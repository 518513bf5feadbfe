"""Converted models with a cache: whose cache it is, which positions continue it, gradients, and autocast."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from looping import looped
from tiny_dense_models import ALL, FEW, make_dense, make_tokens
from torch import Tensor

from nsa_lab import NSAConfig, sparsify
from nsa_lab.inference.hf import CACHE_ARGUMENT

GREEDY: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}


def convert(config: NSAConfig = FEW, dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    dense: Any = make_dense()
    return sparsify(dense.to(dtype), config, **options)


def make_cache(model: Any, tokens: Tensor, **inputs: Any) -> Any:
    with torch.no_grad():
        return model(tokens, use_cache=True, **inputs)[CACHE_ARGUMENT]


def test_a_pass_with_a_cache_refuses_its_backward_pass() -> None:
    """Cached keys and values have no gradients. The configuration requests a cache in evaluation mode."""
    model, tokens = convert(), make_tokens()
    for is_training, use_cache in ((False, None), (False, True), (True, True)):
        for labels in (None, tokens):
            output = model.train(is_training)(tokens, use_cache=use_cache, labels=labels, output_hidden_states=True)
            for result in (output.logits, output.hidden_states[1]) if labels is None else (output.loss,):
                with pytest.raises(NotImplementedError, match="a pass with a cache has no gradients; pass use_cache=False"):
                    result.sum().backward(retain_graph=True)
    model.train().zero_grad()  # the head has gradients
    model(tokens, labels=tokens).loss.backward()
    expected = {name: weight.grad for name, weight in model.named_parameters() if ".indexer." not in name}
    model.eval().zero_grad()
    model(tokens, labels=tokens, use_cache=False).loss.backward()
    for name, gradient in expected.items():
        torch.testing.assert_close(model.get_parameter(name).grad, gradient)


def test_caches_of_other_models_and_of_other_attention_are_refused() -> None:
    model, tokens = convert(), make_tokens()
    cache = make_cache(model, tokens[:, :20])
    other = copy.deepcopy(model)
    with pytest.raises(ValueError, match="cache: expected a cache of this model, got that of another one"):
        other(tokens[:, 20:], **{CACHE_ARGUMENT: cache})
    model.set_attn_implementation("sdpa")
    with pytest.raises(TypeError, match="cache: expected one of transformers with attention 'sdpa', got a SparseCache"):
        model(tokens[:, 20:], **{CACHE_ARGUMENT: cache})
    model.set_attn_implementation("nsa_lab")
    expected = model(tokens, use_cache=False).logits[:, 20:]
    torch.testing.assert_close(model(tokens[:, 20:], **{CACHE_ARGUMENT: cache}).logits, expected)


@looped
@pytest.mark.parametrize("style", ["tokens", "columns", "none", "rows"])
def test_positions_continue_the_cached_tokens(style: str) -> None:
    """They count tokens or columns, from any number; others are refused. Beams are reordered, and the cache is cropped."""
    model, tokens = convert(), make_tokens(2, 40)
    mask = torch.ones_like(tokens)
    mask[0, :6] = mask[1, 9:12] = mask[1, 18:20] = 0
    columns = torch.arange(40)[None].expand(2, -1)
    styles = {"tokens": mask.cumsum(1) - 1, "columns": columns, "rows": columns + torch.tensor([[100], [7]])}
    positions = styles.get(style)
    expected = model(tokens, attention_mask=mask, position_ids=positions, use_cache=False).logits

    def run(cache: Any, begin: int, end: int, rows: Tensor, shift: int = 0) -> Any:
        own = None if positions is None else positions[rows, begin:end] + shift
        inputs = {"attention_mask": mask[rows, :end], "position_ids": own, CACHE_ARGUMENT: cache}
        return model(tokens[rows, begin:end], use_cache=True, **inputs)

    rows, swapped = torch.tensor([0, 1]), torch.tensor([1, 0])
    cache = run(None, 0, 20, rows)[CACHE_ARGUMENT]
    cache.reorder_cache(swapped)
    for begin, end in ((20, 23), (23, 30), (30, 31)):
        actual = run(cache, begin, end, swapped).logits
        torch.testing.assert_close(actual, expected[swapped, begin:end])
    cache.crop(-4)
    torch.testing.assert_close(run(cache, 27, 40, swapped).logits, expected[swapped, 27:])
    if positions is not None:
        cache.crop(-13)
        for shift in (1, -1, 20, -20):
            with pytest.raises(ValueError, match=r"position_ids: expected \d+ for the first new token of row 0"):
                run(cache, 27, 40, swapped, shift)


def test_a_cache_of_more_tokens_than_the_prompt_is_refused() -> None:
    model, tokens = convert(), make_tokens(2, 20)
    output = model.generate(tokens, return_dict_in_generate=True, **GREEDY)
    with pytest.raises(ValueError, match="position_ids: expected 25 for the first new token of row 0"):
        model.generate(tokens, **{CACHE_ARGUMENT: output[CACHE_ARGUMENT]}, **GREEDY)


def test_padding_after_a_prompt_repeats_its_last_token() -> None:
    """The first new token continues the prompt. `generate` then counts from the padding, which is refused."""
    model, tokens = convert(), make_tokens(2, 20)
    mask = torch.ones_like(tokens)
    mask[0, 13:] = 0
    expected = model(tokens[:1, :13], use_cache=False).logits[0, -1:]
    for use_cache in (True, False):
        logits = model(tokens, attention_mask=mask, use_cache=use_cache).logits
        torch.testing.assert_close(logits[0, 13:], expected.expand(7, -1))
        last = model(tokens, attention_mask=mask, use_cache=use_cache, logits_to_keep=1).logits
        torch.testing.assert_close(last[0], expected)
        with pytest.raises(ValueError, match=r"attention_mask: expected padding before the tokens .* pad on the left"):
            model.generate(tokens, attention_mask=mask, use_cache=use_cache, **GREEDY)


def test_a_cache_outlives_inference_mode() -> None:
    model, tokens = convert(), make_tokens(2, 600)
    with torch.inference_mode():
        cache = model(tokens[:, :20], use_cache=True)[CACHE_ARGUMENT]
    parts = [model(tokens[:, 20:23], **{CACHE_ARGUMENT: cache}).logits]
    with torch.inference_mode():  # the cache grows
        parts.append(model(tokens[:, 23:599], **{CACHE_ARGUMENT: cache}).logits)
    cache.reorder_cache(torch.tensor([0, 1]))
    parts.append(model(tokens[:, 599:], **{CACHE_ARGUMENT: cache}).logits)
    torch.testing.assert_close(torch.cat(parts, 1), model(tokens, use_cache=False).logits[:, 20:])


@looped
@pytest.mark.parametrize("options", [{}, {"indexer_dtype": "fp8", "indexer_every": 2}, {"config": ALL}])
def test_autocast_computes_in_its_dtype(options: dict[str, Any]) -> None:
    """Weights in float32, as a Trainer with bf16=True has them: attention in bfloat16, and gradients for all weights.

    If every block is selected, the error equals the dense model's under autocast.
    """
    model, tokens = convert(dtype=torch.float32, **options), make_tokens(2, 60)
    dense = make_dense()
    with torch.no_grad():
        expected = dense(tokens).logits
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            error = (dense(tokens).logits - expected).abs().mean()
            full = model(tokens, use_cache=False).logits
            cache = make_cache(model, tokens[:, :40])
            steps = [model(tokens[:, i : i + 1], **{CACHE_ARGUMENT: cache}).logits for i in range(40, 60)]
        loss = model.train()(tokens, labels=tokens).loss
    assert full.dtype == torch.bfloat16
    if options.get("config") is ALL:
        assert (full - expected).abs().mean() < 2 * error
        assert (torch.cat(steps, 1) - full[:, 40:]).abs().mean() < 2 * error
    loss.backward()
    assert all(weight.grad is not None and weight.grad.isfinite().all() for weight in model.parameters())
