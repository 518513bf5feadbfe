from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsa_lab.data import ByteTokenizer, load_tokenizer

TEXT = st.text(st.characters(codec="utf-8"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, save_tokenizer: Callable[..., Path]) -> Path:
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"), "<|endoftext|>")


@given(TEXT)
def test_bytes_round_trip_and_never_hold_the_separator(text: str) -> None:
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert ids.dtype == np.uint8 and tokenizer.separator not in ids
    assert tokenizer.decode(ids) == text
    assert ids.size == 0 or ids.max() < tokenizer.vocab_size


def test_bytes_decode_what_is_not_text() -> None:
    assert ByteTokenizer().decode([72, 105, 0xFF, 0xC3]) == "Hi\ufffd\ufffd"


def test_ids_outside_the_vocabulary_are_refused(refuses) -> None:
    refuses(lambda: ByteTokenizer().decode([5, 256]), "5..256", "0..255", "mask")


@given(text=TEXT)
def test_file_tokenizer_round_trips(trained: Path, text: str) -> None:
    tokenizer = load_tokenizer(str(trained))
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_document_that_spells_the_separator_does_not_hold_it(trained: Path) -> None:
    tokenizer = load_tokenizer(str(trained))
    ids = tokenizer.encode("what <|endoftext|> means")
    assert tokenizer.separator not in ids
    assert tokenizer.decode(ids) == "what <|endoftext|> means"
    assert tokenizer.decode([tokenizer.separator]) == "<|endoftext|>"
    assert max(ids) < tokenizer.vocab_size


def test_identity_follows_the_content(trained: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.json"
    copy.write_bytes(trained.read_bytes())
    assert load_tokenizer(str(copy)).identity == load_tokenizer(str(trained)).identity
    assert load_tokenizer(str(copy)).identity != load_tokenizer("byte").identity


def test_errors_say_what_to_do(tmp_path: Path, refuses, save_tokenizer) -> None:
    refuses(lambda: load_tokenizer("nowhere.json"), "nowhere.json", "no file at", "use byte")
    broken = tmp_path / "broken.json"
    broken.write_text("{}")
    refuses(lambda: load_tokenizer(str(broken)), broken, "not a tokenizer.json", "byte")
    endless = save_tokenizer(tmp_path, "<pad>")
    refuses(lambda: load_tokenizer(str(endless)), endless, "<|endoftext|>", "</s>")


def test_without_the_library(trained: Path, refuses, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    refuses(lambda: load_tokenizer(str(trained)), "tokenizers is not installed; run: pip install 'nsa-lab[data]'", "byte")
