"""Converted models: equal to the dense model if every block is selected, and consistent with themselves if not."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from looping import looped
from tiny_dense_models import ALL, FAMILIES, FEW, make_dense, make_tokens
from torch import Tensor
from transformers import PreTrainedModel

from nsa_lab import NSAConfig, sparsify
from nsa_lab.inference.hf import CACHE_ARGUMENT

# The dense model's own error in float32 is up to 6e-5: its logits are up to 10.
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-12}
# RoPE computes angles in float32, and padding moves the positions.
MOVED: dict[str, Any] = {"atol": 1e-4, "rtol": 1e-4}
# Positions of three documents in one row.
PACKED = torch.cat([torch.arange(n) for n in (20, 17, 13)])[None]
VARIANTS: list[dict[str, Any]] = [
    {},
    {"indexer_block": 2, "indexer_order": ("pool", "rotate"), "indexer_keys": "shared"},
    {"indexer_block": 4, "indexer_heads": 2, "indexer_width": 4, "indexer_order": ("norm", "rotate", "pool")},
    {"indexer_every": 2, "indexer_dtype": "fp8"},
    {"config": FEW.model_copy(update={"scores": "mean_key"})},
    {"config": FEW.model_copy(update={"head_reduction": "max", "block_reduction": "max"})},
]


def convert(dense: PreTrainedModel, config: NSAConfig = FEW, **options: Any) -> PreTrainedModel:
    return sparsify(copy.deepcopy(dense), config, **options)


def pad_first_row(tokens: Tensor, side: str) -> Tensor:
    """Return a mask [B, T] with 13 columns of padding in row 0."""
    mask = torch.ones_like(tokens)
    mask[0, slice(0, 13) if side == "left" else slice(-13, None)] = 0
    return mask


@looped
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("family", FAMILIES)
def test_all_blocks_equal_dense(family: str, dtype: torch.dtype) -> None:
    dense = make_dense(family).to(dtype)
    sparse, tokens = convert(dense, ALL), make_tokens()
    tolerance: dict[str, Any] = {"atol": TOLERANCE[dtype], "rtol": TOLERANCE[dtype]}
    for use_cache in (True, False):
        expected = dense(tokens, use_cache=use_cache).logits
        torch.testing.assert_close(sparse(tokens, use_cache=use_cache).logits, expected, **tolerance)
        for side in ("left", "right"):
            mask = pad_first_row(tokens, side)
            expected, actual = (m(tokens, attention_mask=mask, use_cache=use_cache).logits for m in (dense, sparse))
            torch.testing.assert_close(actual[mask.bool()], expected[mask.bool()], **tolerance)
    expected, actual = (m(tokens[:1], position_ids=PACKED, use_cache=False).logits for m in (dense, sparse))
    torch.testing.assert_close(actual, expected, **tolerance)
    assert (convert(dense, FEW)(tokens).logits - dense(tokens).logits).abs().max() > 0.01, "the test could not fail"


def test_positions_that_count_padding_equal_dense() -> None:
    """The dense model counts columns unless it is given positions. Padding is inside of the rows, and at one beginning."""
    dense = make_dense().double()
    sparse, tokens = convert(dense, ALL), make_tokens()
    mask = pad_first_row(tokens, "left")
    mask[:, 20:27] = 0
    counted = mask.cumsum(1) - 1
    for positions in (torch.arange(tokens.shape[1])[None], counted.clamp_min(0), None):
        for use_cache in (True, False):
            inputs = {"attention_mask": mask, "position_ids": positions, "use_cache": use_cache}
            expected, actual = (model(tokens, **inputs).logits for model in (dense, sparse))
            torch.testing.assert_close(actual[mask.bool()], expected[mask.bool()], **MOVED)
    with pytest.raises(ValueError, match="count up by one"):
        sparse(tokens, attention_mask=mask, position_ids=2 * torch.arange(tokens.shape[1])[None])


def test_arguments_without_a_meaning_are_refused() -> None:
    sparse, tokens = convert(make_dense()), make_tokens()
    for n_labels in (0, -3, float("nan"), torch.tensor([0])):
        with pytest.raises(ValueError, match=r"num_items_in_batch = .*: expected the number of labels"):
            sparse(tokens, labels=tokens, num_items_in_batch=n_labels)
    with pytest.raises(ValueError, match="use_cache = 'false': expected True, False or None"):
        sparse(tokens, use_cache="false")
    for name in ("input_ids", "attention_mask", "position_ids", "labels", "shift_labels"):
        with pytest.raises(ValueError, match=f"^{name}: expected a tensor, got a list"):
            sparse(**{"input_ids": tokens, name: tokens.tolist()})
    with pytest.raises(ValueError, match="input_ids: expected a tensor, got a ndarray"):
        sparse.model(tokens.numpy())


@pytest.mark.slow
@looped
@pytest.mark.parametrize("how", [{}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 2}])
@pytest.mark.parametrize("family", FAMILIES)
def test_generation_equals_dense(family: str, how: dict[str, Any]) -> None:
    """Prompts are padded on the left. Assisted generation crops the cache."""
    dense = make_dense(family).double()
    sparse, tokens = convert(dense, ALL), make_tokens(2, 24)
    inputs: dict[str, Any] = {"input_ids": tokens, "attention_mask": pad_first_row(tokens, "left")}
    if "prompt_lookup_num_tokens" in how:  # which takes a single prompt
        inputs = {"input_ids": tokens[:1].repeat(1, 2)[:, :30]}
    options = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    assert torch.equal(sparse.generate(**inputs, **options, **how), dense.generate(**inputs, **options, **how))


@looped
@pytest.mark.parametrize("options", VARIANTS)
@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
def test_cached_steps_equal_one_pass(family: str, options: dict[str, Any]) -> None:
    """With few blocks: rows of different lengths, several tokens at a time, and a cache that grows."""
    sparse, tokens = convert(make_dense(family).double(), **options), make_tokens(2, 330)
    mask = pad_first_row(tokens, "left")
    expected = sparse(tokens, attention_mask=mask, use_cache=False).logits
    cache, parts = None, []
    for begin, end in [(0, 16), (16, 17), (17, 22), (22, 329), (329, 330)]:
        output = sparse(tokens[:, begin:end], attention_mask=mask[:, :end], use_cache=True, **{CACHE_ARGUMENT: cache})
        cache = output[CACHE_ARGUMENT]
        parts.append(output.logits)
    torch.testing.assert_close(torch.cat(parts, dim=1)[mask.bool()], expected[mask.bool()], atol=1e-5, rtol=1e-5)


@looped
@pytest.mark.parametrize("options", VARIANTS)
def test_padded_and_packed_texts_equal_single_texts(options: dict[str, Any]) -> None:
    sparse, tokens = convert(make_dense().double(), **options), make_tokens()
    for side in ("left", "right"):
        mask = pad_first_row(tokens, side)
        actual = sparse(tokens, attention_mask=mask, use_cache=False, output_hidden_states=True)
        alone = sparse(tokens[:1, mask[0].bool()], use_cache=False, output_hidden_states=True)
        torch.testing.assert_close(actual.logits[:1, mask[0].bool()], alone.logits, **MOVED)
        for padded, single in zip(actual.hidden_states, alone.hidden_states, strict=True):
            torch.testing.assert_close(padded[:1, mask[0].bool()], single, **MOVED)
    actual = sparse(tokens[:1], position_ids=PACKED).logits
    parts = [sparse(part, use_cache=False).logits for part in tokens[:1].split([20, 17, 13], dim=1)]
    torch.testing.assert_close(actual, torch.cat(parts, dim=1), **MOVED)


def test_weights_keep_their_names_and_the_dense_model_stays() -> None:
    dense = make_dense()
    shared = type(dense)(dense.config)  # another model with the same configuration object
    before, tokens = copy.deepcopy(dense.state_dict()), make_tokens()
    how = {"attention_mask": pad_first_row(tokens, "left"), "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    expected, generated = dense(tokens).logits, dense.generate(tokens, **how)
    sparse = sparsify(dense, FEW)
    assert sparse is dense
    added = sparse.state_dict().keys() - before.keys()
    assert added and all(".self_attn.indexer." in name for name in added)
    assert all(torch.equal(sparse.state_dict()[name], value) for name, value in before.items())
    assert shared.config.model_type == "llama" and shared.config._attn_implementation != "nsa_lab"
    assert not torch.equal(sparse(tokens).logits, expected)
    sparse.set_attn_implementation("sdpa")
    assert torch.equal(sparse(tokens).logits, expected)
    assert torch.equal(sparse.generate(tokens, **how), generated)
    sparse.set_attn_implementation("nsa_lab_dense")
    torch.testing.assert_close(sparse(tokens, use_cache=False).logits, expected, atol=2e-5, rtol=2e-5)


def test_copies_and_pickles() -> None:
    sparse, tokens = convert(make_dense()), make_tokens()
    expected = sparse(tokens).logits
    for copied in (copy.deepcopy(sparse), pickle.loads(pickle.dumps(sparse))):
        assert torch.equal(copied(tokens).logits, expected)


@looped
@pytest.mark.parametrize("family", FAMILIES)
def test_the_indexer_starts_as_the_first_heads(family: str) -> None:
    """With a single query head per group, its scores equal the attention's, so it selects the oracle's blocks."""
    dense = make_dense(family, num_attention_heads=2, num_key_value_heads=2).double()
    sparse, tokens = convert(dense, FEW), make_tokens()
    layer, seen = sparse.model.layers[0].self_attn, {}
    layer.indexer.register_forward_hook(lambda module, args, output: seen.update(index=output))
    layer.o_proj.register_forward_hook(lambda module, args, output: seen.update(hidden=args[0]))
    sparse(tokens, use_cache=False)
    hidden = sparse.model.layers[0].input_layernorm(sparse.model.embed_tokens(tokens))
    cos_sin = sparse.model.rotary_emb(hidden, position_ids=torch.arange(tokens.shape[1])[None])
    norms = [getattr(layer, name, lambda x: x) for name in ("q_norm", "k_norm")]
    heads = [
        norm(projection(hidden).unflatten(-1, (2, -1))).transpose(1, 2)
        for norm, projection in zip(norms, (layer.q_proj, layer.k_proj), strict=True)
    ]
    rotate = __import__(type(dense).__module__, fromlist=["apply_rotary_pos_emb"]).apply_rotary_pos_emb
    q, k = (x.transpose(1, 2) for x in rotate(*heads, *cos_sin))
    torch.testing.assert_close(seen["index"].q, q, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(seen["index"].k, k, atol=1e-5, rtol=1e-5)
