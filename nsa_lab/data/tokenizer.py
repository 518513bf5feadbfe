"""Text to token ids and back. Owns the separator that stands after every document.

Invariants
* Byte tokenizer: ids 0..255 are the bytes of UTF-8. The separator is 0xFF, a byte that valid UTF-8 never contains,
  so the vocabulary stays at 256 and a separator cannot be mistaken for text.
* `encode` never emits the separator, so counting separators counts documents.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import numpy as np

from nsa_lab.config.optional_deps import MissingPackage, require
from nsa_lab.data.errors import DataError
from nsa_lab.data.paths import list_candidate_paths

# The end-of-text tokens of common tokenizers, best first.
SEPARATOR_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]")


class Tokenizer(Protocol):
    """What shards and sampling need of a tokenizer."""

    vocab_size: int
    separator: int
    identity: str

    def encode(self, text: str | bytes) -> np.ndarray: ...

    def decode(self, ids: Iterable[int]) -> str: ...


class ByteTokenizer:
    """UTF-8 bytes as tokens; `separator` is 0xFF."""

    vocab_size = 256
    separator = 0xFF
    identity = hashlib.sha256(b"bytes of UTF-8, separator 0xFF").hexdigest()

    def encode(self, text: str | bytes) -> np.ndarray:
        """uint8 `[n]`, one id per byte. Bytes are taken as they are (the synthetic source)."""
        return np.frombuffer(text.encode("utf-8") if isinstance(text, str) else text, dtype=np.uint8)

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`; what is not UTF-8 (a separator, half a character) shows as U+FFFD."""
        ids = _to_id_array(ids, self.vocab_size)
        return ids.astype(np.uint8).tobytes().decode("utf-8", errors="replace")


class FileTokenizer:
    """A `tokenizer.json` of the `tokenizers` library; the separator is its end-of-text token.

    Raises `DataError` if the library or the file is missing, or no end-of-text token is in the vocabulary.
    """

    def __init__(self, path: Path) -> None:
        try:
            require("tokenizers")
        except MissingPackage as error:
            raise DataError(f"data.tokenizer = {path}: {error}, or use data.tokenizer: byte") from None
        import tokenizers

        try:
            content = path.read_bytes()
            self._tokenizer = tokenizers.Tokenizer.from_str(content.decode("utf-8"))
        except Exception as error:  # noqa: BLE001 - the Rust library raises bare Exception
            reason = " ".join(str(error).split())
            raise DataError(
                f"data.tokenizer = {path}: not a tokenizer.json ({reason}); use data.tokenizer: byte, or another file"
            ) from None
        # A document that spells out "<|endoftext|>" is text about the separator, not a separator.
        self._tokenizer.encode_special_tokens = True
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        found = next((token for token in SEPARATOR_TOKENS if token in vocabulary), None)
        if found is None:
            raise DataError(
                f"data.tokenizer = {path}: no token ends a document; add one of {', '.join(SEPARATOR_TOKENS)} "
                "as a special token, or use data.tokenizer: byte"
            )
        self.vocab_size = max(vocabulary.values()) + 1
        self.separator = vocabulary[found]
        self.identity = hashlib.sha256(content).hexdigest()

    def encode(self, text: str | bytes) -> np.ndarray:
        """int64 `[n]`, without the separator and without the template's special tokens."""
        text = text.decode("utf-8") if isinstance(text, bytes) else text
        ids = np.asarray(self._tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int64)
        if (ids == self.separator).any():
            raise DataError(
                "data.tokenizer: a document's own text encodes to the separator token; "
                "mark that token as special in tokenizer.json"
            )
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`, special tokens spelled out."""
        return self._tokenizer.decode(_to_id_array(ids, self.vocab_size).tolist(), skip_special_tokens=False)


def load_tokenizer(name: str = "byte") -> Tokenizer:
    """`"byte"`, or the path of a tokenizer.json (relative: from the project root, then the working directory)."""
    if name == "byte":
        return ByteTokenizer()
    places = list_candidate_paths(name)
    for path in places:
        if os.path.isfile(path):
            return FileTokenizer(path)
    looked = " or ".join(str(path) for path in places)
    raise DataError(f"data.tokenizer = {name!r}: no file at {looked}; give the path of a tokenizer.json, or use byte")


def _to_id_array(ids: Iterable[int], vocab_size: int) -> np.ndarray:
    ids = np.asarray(ids if hasattr(ids, "__len__") else list(ids), dtype=np.int64).reshape(-1)
    if ids.size and not (ids.min() >= 0 and ids.max() < vocab_size):
        raise DataError(
            f"decode: ids lie in {ids.min()}..{ids.max()}, and the tokenizer has 0..{vocab_size - 1}; "
            "mask the logits of padded ids"
        )
    return ids
