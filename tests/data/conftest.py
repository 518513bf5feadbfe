from collections.abc import Callable
from pathlib import Path

import pytest

from nsa_lab.data import DataError


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Return a folder of forty small, different documents."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    for index in range(40):
        (folder / f"{index:02d}.txt").write_text(
            f"Document {index}: " + "grüße, naïve café ☕ " * (index + 3), encoding="utf-8"
        )
    return folder


@pytest.fixture
def refuses() -> Callable[..., str]:
    """Return `refuses(call, *words)`: assert that the call raises a one-line DataError with all words; return the line."""

    def check(call: Callable[[], object], *words: object) -> str:
        with pytest.raises(DataError) as caught:
            call()
        message = str(caught.value)
        assert "\n" not in message
        for word in words:
            assert str(word) in message
        assert isinstance(caught.value, ValueError)
        return message

    return check


@pytest.fixture(scope="session")
def save_tokenizer() -> Callable[..., Path]:
    """Return `save_tokenizer(folder, special)`: write a small byte-level tokenizer.json with that special token."""
    tokenizers = pytest.importorskip("tokenizers")

    def save(folder: Path, special: str) -> Path:
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = tokenizers.decoders.ByteLevel()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=300,
            special_tokens=[special],
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator(["the cat sat on the mat, naïve café, Document, café"] * 4, trainer)
        tokenizer.save(str(folder / "tokenizer.json"))
        return folder / "tokenizer.json"

    return save
