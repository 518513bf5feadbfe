import json
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
def test_bytes_round_trip_without_the_separator(text: str) -> None:
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert ids.dtype == np.uint8 and tokenizer.separator not in ids
    assert tokenizer.decode(ids) == text
    assert ids.size == 0 or ids.max() < tokenizer.vocab_size


def test_bytes_that_are_not_text_decode_to_replacements() -> None:
    assert ByteTokenizer().decode([72, 105, 0xFF, 0xC3]) == "Hi\ufffd\ufffd"


def test_ids_outside_the_vocabulary_raise(refuses) -> None:
    refuses(lambda: ByteTokenizer().decode([5, 256]), "5..256", "0..255", "mask")


@given(text=TEXT)
def test_file_tokenizer_round_trips(trained: Path, text: str) -> None:
    tokenizer = load_tokenizer(str(trained))
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_document_that_spells_the_separator_does_not_contain_it(trained: Path) -> None:
    tokenizer = load_tokenizer(str(trained))
    ids = tokenizer.encode("what <|endoftext|> means")
    assert tokenizer.separator not in ids
    assert tokenizer.decode(ids) == "what <|endoftext|> means"
    assert tokenizer.decode([tokenizer.separator]) == "<|endoftext|>"
    assert max(ids) < tokenizer.vocab_size


def changed(path: Path, folder: Path, **changes: object) -> Path:
    """Write a copy of a tokenizer.json with other entries."""
    copy = folder / "changed.json"
    copy.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return copy


def added(*tokens: tuple[int, str, bool]) -> list[dict[str, object]]:
    """Return added tokens in the format of a tokenizer.json: id, text, and whether it is special."""
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return [{"id": number, "content": text, "special": special, **plain} for number, text, special in tokens]


def test_the_preferred_end_of_text_is_used_and_gaps_count_as_ids(trained: Path, tmp_path: Path) -> None:
    model = json.loads(trained.read_text())["model"]
    model["vocab"]["zz"] = 4000
    both = added((0, "<|endoftext|>", True), (len(model["vocab"]), "</s>", True))
    tokenizer = load_tokenizer(str(changed(trained, tmp_path, added_tokens=both, model=model)))
    assert tokenizer.separator == 0 and tokenizer.vocab_size == 4001


def test_template_tokens_are_not_added(trained: Path, tmp_path: Path) -> None:
    end = {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}
    template = {
        "type": "TemplateProcessing",
        "single": [{"Sequence": {"id": "A", "type_id": 0}}, end],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}},
    }
    tokenizer = load_tokenizer(str(changed(trained, tmp_path, post_processor=template)))
    assert tokenizer.encode("the cat").tolist() == load_tokenizer(str(trained)).encode("the cat").tolist()


def test_a_document_that_encodes_to_the_separator_raises(trained: Path, tmp_path: Path, refuses) -> None:
    """An added token that is not special is found in text."""
    plain = added((0, "<|endoftext|>", False))
    tokenizer = load_tokenizer(str(changed(trained, tmp_path, added_tokens=plain)))
    assert tokenizer.separator not in tokenizer.encode("the cat")
    refuses(lambda: tokenizer.encode("the <|endoftext|>"), "encodes to the separator", "as special in tokenizer.json")


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
