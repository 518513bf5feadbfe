"""A prompt is the beginning of a document: what the model is given for it, and what is told of what it answers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import build_model, tiny_config
from torch import Tensor

from nsa_lab.data import load_tokenizer
from nsa_lab.inference import Sampling, continue_text, text_generation
from nsa_lab.inference.generate import generate_tokens


def test_a_prompt_stands_behind_a_separator_as_a_document_does_in_training(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[list[int]] = []

    def spied(model: object, prompt: Tensor, count: int, *_: object, **__: object) -> Iterator[int]:
        given.append(prompt.tolist())
        yield from b"ok"[:count]

    monkeypatch.setattr(text_generation, "generate_tokens", spied)
    tokenizer = load_tokenizer("byte")
    for prompt in ("a\u00e9", "", "\n"):
        assert (
            "".join(continue_text(build_model(tiny_config(vocab_size=256, n_layers=1)), tokenizer, prompt, 2, Sampling()))
            == "ok"
        )
    assert given == [[255, *"a\u00e9".encode()], [255], [255, 10]]


def test_what_is_written_is_what_follows_the_separator_and_the_prompt() -> None:
    """The model's own continuation of that document, drawn as `tokens_after` draws it."""
    model, tokenizer, sampling = build_model(tiny_config(vocab_size=256, n_layers=1)), load_tokenizer("byte"), Sampling(2.0)
    said = "".join(continue_text(model, tokenizer, "ab", 12, sampling, seed=3))
    behind = generate_tokens(model, torch.tensor([255, 97, 98]), 12, sampling, 3, sampled_vocab_size=256)
    without = generate_tokens(model, torch.tensor([97, 98]), 12, sampling, 3, sampled_vocab_size=256)
    assert said == tokenizer.decode(list(behind)) != tokenizer.decode(list(without))


def test_ids_that_only_pad_the_vocabulary_are_not_written() -> None:
    model, sampling = build_model(tiny_config(vocab_size=300, n_layers=1)), Sampling(100.0)
    said = "".join(continue_text(model, load_tokenizer("byte"), "ab", 40, sampling, seed=3))
    drawn = list(generate_tokens(model, torch.tensor([255, 97, 98]), 40, sampling, 3, sampled_vocab_size=256))
    assert said == load_tokenizer("byte").decode(drawn)
    assert max(generate_tokens(model, torch.tensor([255, 97, 98]), 40, sampling, 3)) >= 256, "the model would draw them"


@given(st.lists(st.integers(0, 255), max_size=40))
def test_pieces_are_the_text_whatever_the_bytes(tokens: list[int]) -> None:
    tokenizer = load_tokenizer("byte")
    assert "".join(text_generation.decode_whole_characters(tokenizer, tokens)) == tokenizer.decode(tokens)


def test_a_character_is_told_once_it_is_whole_and_nothing_is_decoded_anew() -> None:
    tokenizer, decoded = load_tokenizer("byte"), []

    class Spy:
        def decode(self, ids: list[int]) -> str:
            decoded.append(len(ids))
            return tokenizer.decode(ids)

    said = "a\u00e9\u20ac" * 50
    assert [piece for piece in text_generation.decode_whole_characters(Spy(), said.encode()) if piece] == list(said)
    assert max(decoded) <= 6


def test_a_token_may_be_spelled_by_the_one_before_it() -> None:
    """As a space between words, which the first word of a text has not."""

    class Words:
        def decode(self, ids: list[int]) -> str:
            return " ".join(map(str, ids))

    assert list(text_generation.decode_whole_characters(Words(), [7, 8, 9])) == ["7", " 8", " 9", ""]


def test_a_pace_counts_what_it_hands_on() -> None:
    pace = text_generation.SpeedMeter()
    assert list(pace.measure(iter([5, 6, 7]), 1234)) == [5, 6, 7]
    assert pace.n_tokens == 3 and 0 < pace.first_token_s < pace.seconds
    assert str(pace).startswith("1,234 tokens read, the first drawn after ")
    pace.n_tokens, pace.first_token_s, pace.seconds = 5, 1.0, 3.0
    assert str(pace) == "1,234 tokens read, the first drawn after 1.00 s, then 2.0 tokens/s"
