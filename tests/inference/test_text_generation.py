"""Text generation: how a prompt is encoded, and how its continuation is decoded in pieces."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import build_model, tiny_config
from torch import Tensor

from nsa_lab.data import load_tokenizer
from nsa_lab.inference import Sampling, continue_text, text_generation
from nsa_lab.inference.generate import generate_tokens
from nsa_lab.model import NSATransformer


def test_prompt_follows_a_separator_as_in_training(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts: list[list[int]] = []

    def spy(model: object, prompt: Tensor, count: int, *_: object, **__: object) -> Iterator[int]:
        prompts.append(prompt.tolist())
        yield from b"ok"[:count]

    monkeypatch.setattr(text_generation, "generate_tokens", spy)
    tokenizer = load_tokenizer("byte")
    for prompt in ("a\u00e9", "", "\n"):
        assert (
            "".join(continue_text(build_model(tiny_config(vocab_size=256, n_layers=1)), tokenizer, prompt, 2, Sampling()))
            == "ok"
        )
    assert prompts == [[255, *"a\u00e9".encode()], [255], [255, 10]]


def test_text_continues_the_separator_and_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """The text equals that of `generate_tokens` after the separator.

    The prompt is recorded: an untrained model may continue a prompt without separator with the same tokens.
    """
    prompts: list[list[int]] = []

    def spy(model: NSATransformer, prompt: Tensor, *arguments: Any, **options: Any) -> Iterator[int]:
        prompts.append(prompt.tolist())
        return generate_tokens(model, prompt, *arguments, **options)

    monkeypatch.setattr(text_generation, "generate_tokens", spy)
    model, tokenizer, sampling = build_model(tiny_config(vocab_size=256, n_layers=1)), load_tokenizer("byte"), Sampling(2.0)
    text_after = "".join(continue_text(model, tokenizer, "ab", 12, sampling, seed=3))
    assert prompts == [[255, 97, 98]]
    with_separator = generate_tokens(model, torch.tensor(prompts[0]), 12, sampling, 3, sampled_vocab_size=256)
    assert text_after == tokenizer.decode(list(with_separator))


def test_padding_ids_of_the_vocabulary_are_not_sampled() -> None:
    model, sampling = build_model(tiny_config(vocab_size=300, n_layers=1)), Sampling(100.0)
    text_after = "".join(continue_text(model, load_tokenizer("byte"), "ab", 40, sampling, seed=3))
    sampled = list(generate_tokens(model, torch.tensor([255, 97, 98]), 40, sampling, 3, sampled_vocab_size=256))
    assert text_after == load_tokenizer("byte").decode(sampled)
    assert max(generate_tokens(model, torch.tensor([255, 97, 98]), 40, sampling, 3)) >= 256, (
        "without the limit the model samples them"
    )


@given(st.lists(st.integers(0, 255), max_size=40))
def test_pieces_join_to_the_decoded_text(tokens: list[int]) -> None:
    tokenizer = load_tokenizer("byte")
    assert "".join(text_generation.decode_whole_characters(tokenizer, tokens)) == tokenizer.decode(tokens)


def test_characters_are_yielded_when_complete_and_decoded_in_short_pieces() -> None:
    tokenizer, decoded_lengths = load_tokenizer("byte"), []

    class Spy:
        def decode(self, ids: list[int]) -> str:
            decoded_lengths.append(len(ids))
            return tokenizer.decode(ids)

    expected = "a\u00e9\u20ac" * 50
    assert [piece for piece in text_generation.decode_whole_characters(Spy(), expected.encode()) if piece] == list(expected)
    assert max(decoded_lengths) <= 6


def test_text_of_a_token_may_depend_on_the_previous_token() -> None:
    """For example a space between words, which the first word of a text does not have."""

    class Words:
        def decode(self, ids: list[int]) -> str:
            return " ".join(map(str, ids))

    assert list(text_generation.decode_whole_characters(Words(), [7, 8, 9])) == ["7", " 8", " 9", ""]


def test_speed_meter_counts_tokens() -> None:
    meter = text_generation.SpeedMeter()
    assert list(meter.measure(iter([5, 6, 7]), 1234)) == [5, 6, 7]
    assert meter.n_tokens == 3 and 0 < meter.first_token_s < meter.seconds
    assert str(meter).startswith("prompt of 1,234 tokens, first token after ")
    meter.n_tokens, meter.first_token_s, meter.seconds = 5, 1.0, 3.0
    assert str(meter) == "prompt of 1,234 tokens, first token after 1.00 s, then 2.0 tokens/s"
