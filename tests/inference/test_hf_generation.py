"""The `transformers` model generates what `nsa_lab` generates: greedy, beam search, padded, assisted, from a cache."""

from __future__ import annotations

import copy

import pytest
import torch
from hf_models import make_model, sample_bytes, tokenize_padded
from looping import looped

from nsa_lab.inference import generate, hf


@pytest.mark.slow
def test_greedy_equals_generate(model: hf.NSALabForCausalLM, tokenizer: hf.NSALabTokenizer) -> None:
    """Prompts are padded on the left; the padding token also begins every prompt."""
    inputs = tokenize_padded(tokenizer)
    generated = model.generate(**inputs, max_new_tokens=30, do_sample=False, eos_token_id=None)
    rows = zip(inputs["input_ids"], inputs["attention_mask"].bool(), strict=True)
    expected = generate(model.model, [row[mask] for row, mask in rows], max_new_tokens=30)
    assert torch.equal(generated[:, inputs["input_ids"].shape[1] :], torch.stack(expected))


@pytest.mark.slow
@looped
@pytest.mark.parametrize("how", [{"num_beams": 4}, {"num_beams": 3, "length_penalty": 2.0, "num_return_sequences": 2}, {}])
def test_cached_generation_equals_full_forward_passes(
    model: hf.NSALabForCausalLM, tokenizer: hf.NSALabTokenizer, how: dict
) -> None:
    inputs = tokenize_padded(tokenizer)
    cached, full = (
        model.generate(**inputs, max_new_tokens=16, do_sample=False, use_cache=use_cache, **how)
        for use_cache in (True, False)
    )
    assert torch.equal(cached, full)


@looped
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_row_equals_single_row(model: hf.NSALabForCausalLM, tokenizer: hf.NSALabTokenizer, side: str) -> None:
    inputs = tokenize_padded(tokenizer, side)
    for use_cache in (False, True):
        logits = model(**inputs, use_cache=use_cache).logits
        for row, mask, row_logits in zip(inputs["input_ids"], inputs["attention_mask"].bool(), logits, strict=True):
            torch.testing.assert_close(row_logits[mask], model.model(row[mask][None])[0], rtol=0, atol=1e-10)


def test_cache_grows(model: hf.NSALabForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf.cache, "MIN_CACHE_TOKENS", 4)
    tokens = torch.randint(0, 256, (2, 40), generator=torch.Generator().manual_seed(1))
    first = model(tokens[:, :5], use_cache=True)
    rest = [model(tokens[:, at : at + 7], past_key_values=first.past_key_values).logits for at in range(5, 40, 7)]
    assert first.past_key_values.get_seq_length() == 40
    torch.testing.assert_close(torch.cat([first.logits, *rest], dim=1), model.model(tokens), rtol=0, atol=1e-10)


def test_cache_is_accepted_under_both_names_only(model: hf.NSALabForCausalLM) -> None:
    tokens = torch.randint(0, 255, (2, 12), generator=torch.Generator().manual_seed(0))
    whole = model(tokens).logits
    for name in ("cache", "past_key_values"):
        cache = model(tokens[:, :7], use_cache=True)[hf.CACHE_ARGUMENT]
        torch.testing.assert_close(model(tokens[:, 7:], **{name: cache}).logits, whole[:, 7:])
    with pytest.raises(TypeError, match="are the same argument"):
        model(tokens, cache=cache, past_key_values=cache)
    with pytest.raises(ValueError, match="expected a cache of this model, got that of another one"):
        make_model()(tokens, cache=cache)
    with pytest.raises(TypeError, match=r"got memory=; install a tested version of transformers"):
        model(tokens, memory=cache)


# `generate` knew only one name before transformers 5.24.
@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({hf.CACHE_ARGUMENT, "past_key_values"}))
def test_generation_continues_from_its_cache(model: hf.NSALabForCausalLM, tokenizer: hf.NSALabTokenizer, name: str) -> None:
    """All tokens are passed again, as `transformers` requires; cached tokens are not computed twice."""
    inputs, options = tokenize_padded(tokenizer), {"do_sample": False, "eos_token_id": None}
    whole = model.generate(**inputs, max_new_tokens=14, **options)
    first_part = model.generate(**inputs, max_new_tokens=6, return_dict_in_generate=True, **options)
    mask = torch.cat([inputs["attention_mask"], torch.ones(3, 6, dtype=torch.int64)], dim=1)
    n_cached = first_part[hf.CACHE_ARGUMENT].get_seq_length()
    continued = model.generate(
        first_part.sequences, attention_mask=mask, max_new_tokens=8, **{name: first_part[hf.CACHE_ARGUMENT]}, **options
    )
    assert torch.equal(continued, whole) and first_part[hf.CACHE_ARGUMENT].get_seq_length() == n_cached + 8


def test_copied_cache_shares_the_model(model: hf.NSALabForCausalLM) -> None:
    """Two generations continue independently from one prompt."""
    prompt, *more = (torch.randint(0, 255, (1, n), generator=torch.Generator().manual_seed(n)) for n in (40, 5, 7))
    cache = model(prompt, use_cache=True)[hf.CACHE_ARGUMENT]
    for tokens in more:
        copied = copy.deepcopy(cache)
        assert copied._model is model.model and copied.decoder._model is model.model
        logits = model(tokens, **{hf.CACHE_ARGUMENT: copied}).logits
        torch.testing.assert_close(logits, model(torch.cat([prompt, tokens], 1)).logits[:, 40:], rtol=1e-4, atol=1e-5)
    assert cache.get_seq_length() == 40


def test_unsupported_cache_operations_raise(model: hf.NSALabForCausalLM) -> None:
    cache = model(torch.zeros(2, 5, dtype=torch.int64), use_cache=True).past_key_values
    for call in (lambda: cache.batch_repeat_interleave(2), lambda: cache.batch_select_indices([0])):
        with pytest.raises(NotImplementedError, match="NSALabCache"):
            call()


def test_other_kinds_of_caches_are_refused() -> None:
    """Also in a generation configuration. The cache grows with the text, as "dynamic" requests."""
    model, tokens = make_model().eval(), sample_bytes(2, 9)
    options = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 255}
    expected = model.generate(tokens, **options)
    assert torch.equal(model.generate(tokens, cache_implementation="dynamic", **options), expected)
    for kind in ("static", "quantized", "offloaded"):
        with pytest.raises(NotImplementedError, match=f"cache_implementation = '{kind}': expected None or 'dynamic'"):
            model.generate(tokens, cache_implementation=kind, **options)
    model.generation_config.cache_implementation = "static"
    with pytest.raises(NotImplementedError, match="cache_implementation = 'static'"):
        model.generate(tokens, num_beams=2, **options)
    model.generation_config.cache_implementation = None
    for call in (
        lambda: model.generate(tokens, cache_implementation="paged", **options),
        lambda: model.generate_batch(tokens.tolist()),
    ):
        with pytest.raises(NotImplementedError, match="continuous batching is not supported"):
            call()


def test_early_exit_is_refused() -> None:
    """Any number of layers is refused, in an argument and in a generation configuration."""
    model, tokens = make_model().eval(), sample_bytes(1, 9)
    for n_layers in (0, 1, 2):
        with pytest.raises(NotImplementedError, match=f"assistant_early_exit = {n_layers}: expected None"):
            model.generate(tokens, max_new_tokens=4, assistant_early_exit=n_layers)
    model.generation_config.assistant_early_exit = 1
    with pytest.raises(NotImplementedError, match="assistant_early_exit = 1"):
        model.generate(tokens, max_new_tokens=4)


def test_a_cache_outlives_inference_mode() -> None:
    model, tokens = make_model().eval(), sample_bytes(2, 600)
    with torch.inference_mode():
        cache = model(tokens[:, :20], use_cache=True)[hf.CACHE_ARGUMENT]
    parts = [model(tokens[:, 20:23], cache=cache).logits]
    with torch.inference_mode():  # the cache grows
        parts.append(model(tokens[:, 23:599], cache=cache).logits)
    cache.reorder_cache(torch.tensor([0, 1]))
    parts.append(model(tokens[:, 599:], cache=cache).logits)
    torch.testing.assert_close(torch.cat(parts, 1), model(tokens).logits[:, 20:])


def test_reset_cache_is_empty(model: hf.NSALabForCausalLM) -> None:
    tokens = torch.randint(0, 255, (1, 20), generator=torch.Generator().manual_seed(0))
    first = model(tokens, use_cache=True)
    first[hf.CACHE_ARGUMENT].reset()
    assert first[hf.CACHE_ARGUMENT].get_seq_length() == 0
    assert torch.equal(model(tokens, cache=first[hf.CACHE_ARGUMENT]).logits, first.logits)


def test_calls_return_a_cache_as_configured() -> None:
    """`generate` uses a cache in any case. A Trainer sets the value of the configuration to False."""
    model, tokens = make_model().eval(), sample_bytes(1, 20)
    appended, append = [], hf.NSALabCache.append
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            hf.NSALabCache, "append", lambda cache, *args, **options: appended.append(1) or append(cache, *args, **options)
        )
        model.generate(tokens, max_new_tokens=3, do_sample=False)
        assert len(appended) == 3 and not model.config.use_cache and model.generation_config.use_cache
        assert hf.CACHE_ARGUMENT not in model(tokens)
        model.config.use_cache = True
        assert model(tokens)[hf.CACHE_ARGUMENT].get_seq_length() == 20
        model.train()(tokens, labels=tokens).loss.backward()  # in training there are gradients
        assert model(tokens, use_cache=True)[hf.CACHE_ARGUMENT] is not None


@pytest.mark.slow
@pytest.mark.parametrize("how", ["assistant", "prompt lookup"])
def test_assisted_generation_equals_greedy(model: hf.NSALabForCausalLM, how: str) -> None:
    """Rejected tokens are removed from the cache: by an assistant that is often wrong, and by repetition of the prompt."""
    prompt = torch.tensor([list(b"abcabdabcabdab")])
    options = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None, "pad_token_id": 255}
    assistant = make_model(n_layers=1, nsa=model.model.config.nsa).eval()
    assistant.model.embedding.load_state_dict(model.model.embedding.state_dict())
    assist = {"assistant_model": assistant} if how == "assistant" else {"prompt_lookup_num_tokens": 5}
    removed, crop = [], hf.NSALabCache.crop
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hf.NSALabCache, "crop", lambda cache, n: removed.append(n) or crop(cache, n))
        assisted = model.generate(prompt, **assist, **options)
    assert torch.equal(assisted, model.generate(prompt, **options)) and any(removed)


def test_cropped_cache_continues(model: hf.NSALabForCausalLM) -> None:
    tokens = sample_bytes(2, 40)
    for argument in (-7, 33):
        cache = model(tokens, use_cache=True)[hf.CACHE_ARGUMENT]
        cache.crop(argument)
        assert cache.get_seq_length() == 33 and cache.is_croppable
        other = model(tokens[:, :9], cache=cache).logits
        torch.testing.assert_close(
            other, model(torch.cat([tokens[:, :33], tokens[:, :9]], 1)).logits[:, 33:], rtol=0, atol=1e-9
        )
    with pytest.raises(ValueError, match="crop: expected at most 42 columns, got 43"):
        cache.crop(-43)
    cache.reset()
    model(tokens, cache=cache)
    assert cache.get_seq_length() == 40


def test_cropped_padding_leaves_no_trace() -> None:
    """Padding at the end, between tokens and before them; beams change the order of the rows."""
    model, tokens, more = make_model().eval(), sample_bytes(2, 40), sample_bytes(2, 5)
    mask = torch.ones_like(tokens)
    mask[0, :3] = mask[1, 33:36] = mask[1, -3:] = 0
    for n_removed in (0, 2, 4, 7):
        cache = model(tokens, attention_mask=mask, use_cache=True)[hf.CACHE_ARGUMENT]
        cache.reorder_cache(torch.tensor([1, 0]))
        cache.crop(-n_removed)
        n = 40 - n_removed
        assert torch.equal(cache.make_mask(2), mask[[1, 0], :n].bool())
        other = model(more, cache=cache).logits
        for row, source in enumerate((1, 0)):
            text = torch.cat([tokens[source, :n][mask[source, :n].bool()], more[row]])
            torch.testing.assert_close(other[row], model(text[None]).logits[0, -5:], rtol=0, atol=1e-9)


def test_positions_continue_the_cached_tokens() -> None:
    """Positions are not an input of the cached path, so those that do not count on are refused."""
    model, tokens = make_model().eval(), sample_bytes(2, 9)
    mask = torch.ones_like(tokens)
    mask[0, :3] = mask[1, 4] = 0
    positions = mask.cumsum(1) - 1
    for first, padding, expected in (
        (None, None, [9, 9]),
        (torch.arange(9)[None], None, [9, 9]),
        (torch.arange(9)[None] + 100, None, [109, 109]),
        (positions, mask, [6, 8]),
        (positions + torch.tensor([[0], [50]]), mask, [6, 58]),
    ):
        cache = model(tokens, attention_mask=padding, position_ids=first, use_cache=True)[hf.CACHE_ARGUMENT]
        cache.reorder_cache(torch.tensor([1, 0]))
        cache.crop(-1)
        right = torch.tensor([[expected[1] - 1], [expected[0] - 1]])
        model(tokens[:, :1], position_ids=right, cache=cache)
        model(tokens[:, :1], cache=cache)
        model(tokens[:, :2], position_ids=right + torch.tensor([[2, 3]]), cache=cache)
        wrong = right + torch.tensor([[4], [5]])
        row = f"{right[1, 0] + 4} for the first new token of row 1, after cached tokens, got {wrong[1, 0]}"
        with pytest.raises(ValueError, match=f"position_ids: expected {row}; omit"):
            model(tokens[:, :1], position_ids=wrong, cache=cache)


@pytest.mark.slow
def test_masks_with_holes_generate_as_their_tokens() -> None:
    """Padding before, between and after tokens, by every way to generate; each row as its tokens in a single row."""
    model, tokens = make_model().eval(), sample_bytes(2, 14)
    mask = torch.ones_like(tokens)
    mask[0, :5] = mask[1, 3] = mask[1, 7:9] = 0
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 255}
    rows = [tokens[row][mask[row].bool()][None] for row in range(2)]
    expected = torch.cat([model.generate(row, max_new_tokens=8, **options)[:, -8:] for row in rows])
    beams = torch.cat([model.generate(row, max_new_tokens=8, num_beams=3, **options)[:, -8:] for row in rows])
    inputs = {"attention_mask": mask, "max_new_tokens": 8, **options}
    assert torch.equal(model.generate(tokens, num_beams=3, **inputs)[:, -8:], beams)
    embeddings = model.get_input_embeddings()(tokens)
    for how in ({}, {"use_cache": False}, {"prefill_chunk_size": 5}, {"position_ids": mask.cumsum(1) - 1}):
        assert torch.equal(model.generate(tokens, **how, **inputs)[:, -8:], expected), how
    assert torch.equal(model.generate(inputs_embeds=embeddings, **inputs), expected)
    part = model.generate(tokens, return_dict_in_generate=True, **inputs | {"max_new_tokens": 3})
    continued = model.generate(part.sequences, max_new_tokens=5, **{hf.CACHE_ARGUMENT: part[hf.CACHE_ARGUMENT]}, **options)
    assert torch.equal(continued[:, -8:], expected)
    assistant = make_model(n_layers=1).eval()
    for row in range(2):
        for how in ({"assistant_model": assistant}, {"prompt_lookup_num_tokens": 3}):
            single = inputs | {"attention_mask": mask[row : row + 1]}
            assert torch.equal(model.generate(tokens[row : row + 1], **how, **single)[0, -8:], expected[row])
    with pytest.raises(ValueError, match="count up by one from token to token, without a step at padding"):
        model.generate(tokens, position_ids=torch.arange(14)[None], **inputs)
    # With padding at the end, `transformers` takes the first token from the last column, and continues from position 0.
    mask[1, 12:] = 0
    row = tokens[1][mask[1].bool()][None]
    for how in ({}, {"use_cache": False}, {"num_beams": 3}):
        expected = model.generate(row, max_new_tokens=8, **how, **options)[0, -8:]
        assert torch.equal(model.generate(tokens, **how, **inputs)[1, -8:], expected), how


@pytest.mark.slow
def test_a_generated_pad_token_is_a_token_for_an_assistant() -> None:
    """`transformers` infers padding from the pad token, also in the text that an assistant continues."""
    model, prompt, options = make_model().eval(), sample_bytes(1, 9), {"max_new_tokens": 40, "do_sample": False}
    assistant = make_model(n_layers=1).eval()
    expected = model.generate(prompt, eos_token_id=None, **options)
    for token in sorted(set(expected[0, 9:].tolist()) - set(prompt[0].tolist()))[::4]:
        inputs = {"eos_token_id": None, "pad_token_id": token, "assistant_model": assistant}
        for mask in (None, torch.ones_like(prompt)):
            assert torch.equal(model.generate(prompt, attention_mask=mask, **inputs, **options), expected)
