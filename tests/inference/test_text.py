"""A prompt is the beginning of a document: what the model is given for it, and what is told of what it answers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tiny_models import built, tiny
from torch import Tensor

from nsa_lab.data import load_tokenizer
from nsa_lab.inference import Sampling, text, write_on
from nsa_lab.inference.generate import tokens_after


def test_a_prompt_stands_behind_a_separator_as_a_document_does_in_training(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[list[int]] = []

    def spied(model: object, prompt: Tensor, count: int, *_: object, **__: object) -> Iterator[int]:
        given.append(prompt.tolist())
        yield from b"ok"[:count]

    monkeypatch.setattr(text, "tokens_after", spied)
    tokenizer = load_tokenizer("byte")
    for prompt in ("a\u00e9", "", "\n"):
        assert "".join(write_on(built(tiny(vocab_size=256, n_layers=1)), tokenizer, prompt, 2, Sampling())) == "ok"
    assert given == [[255, *"a\u00e9".encode()], [255], [255, 10]]


def test_what_is_written_is_what_follows_the_separator_and_the_prompt() -> None:
    """The model's own continuation of that document, drawn as `tokens_after` draws it."""
    model, tokenizer, sampling = built(tiny(vocab_size=256, n_layers=1)), load_tokenizer("byte"), Sampling(2.0)
    said = "".join(write_on(model, tokenizer, "ab", 12, sampling, seed=3))
    behind = tokens_after(model, torch.tensor([255, 97, 98]), 12, sampling, 3, drawable=256)
    without = tokens_after(model, torch.tensor([97, 98]), 12, sampling, 3, drawable=256)
    assert said == tokenizer.decode(list(behind)) != tokenizer.decode(list(without))
