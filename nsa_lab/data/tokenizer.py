"""Text to token ids and back. Owns the separator that follows every document.

Invariants
* Byte tokenizer: ids 0..255 are UTF-8 bytes. The separator is 0xFF, which valid UTF-8 never contains, so the vocabulary
  stays at 256 and a separator cannot be confused with text.
* `encode` never returns the separator, so counting separators counts documents.
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
from nsa_lab.data.file_search import get_mode
from nsa_lab.data.paths import list_candidate_paths

# End-of-text tokens of common tokenizers, in order of preference.
SEPARATOR_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]")


class Tokenizer(Protocol):
    """Interface of a tokenizer for shards and sampling."""

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
        """Return one id per byte, uint8 `[n]`. `bytes` are taken unchanged (the synthetic source)."""
        return np.frombuffer(text.encode("utf-8") if isinstance(text, str) else text, dtype=np.uint8)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`. Bytes that are not UTF-8 (a separator, half a character) become U+FFFD."""
        ids = _to_id_array(ids, self.vocab_size)
        return ids.astype(np.uint8).tobytes().decode("utf-8", errors="replace")


class FileTokenizer:
    """A `tokenizer.json` of the `tokenizers` library; the separator is its end-of-text token.

    Raises `DataError` if the library or the file is missing, or if the vocabulary has no end-of-text token.
    """

    def __init__(self, path: Path) -> None:
        try:
            require("tokenizers")
        except MissingPackage as error:
            raise DataError(f"data.tokenizer = {path}: {error}, or use data.tokenizer: byte") from None
        import tokenizers

        try:
            content = path.read_bytes()
        except OSError as error:
            raise DataError(
                f"data.tokenizer = {path}: cannot be read ({(error.strerror or str(error)).lower()}); use another file"
            ) from None
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(content.decode("utf-8"))
        except Exception as error:  # noqa: BLE001 - the Rust library raises bare Exception
            reason = " ".join(str(error).split())
            raise DataError(
                f"data.tokenizer = {path}: not a tokenizer.json ({reason}); use data.tokenizer: byte, or another file"
            ) from None
        # "<|endoftext|>" in the text of a document is text, not a separator.
        self._tokenizer.encode_special_tokens = True
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        end_of_text = next((token for token in SEPARATOR_TOKENS if token in vocabulary), None)
        if end_of_text is None:
            raise DataError(
                f"data.tokenizer = {path}: no end-of-text token; add one of {', '.join(SEPARATOR_TOKENS)} "
                "as a special token, or use data.tokenizer: byte"
            )
        self.vocab_size = max(vocabulary.values()) + 1
        self.separator = vocabulary[end_of_text]
        self.identity = hashlib.sha256(content).hexdigest()

    def encode(self, text: str | bytes) -> np.ndarray:
        """Return int64 `[n]`, without the separator and without the template's special tokens."""
        text = text.decode("utf-8") if isinstance(text, bytes) else text
        ids = np.asarray(self._tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int64)
        if (ids == self.separator).any():
            raise DataError(
                "data.tokenizer: the text of a document encodes to the separator token; "
                "mark that token as special in tokenizer.json"
            )
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`, including special tokens."""
        return self._tokenizer.decode(_to_id_array(ids, self.vocab_size).tolist(), skip_special_tokens=False)


def load_tokenizer(name: str = "byte") -> Tokenizer:
    """Load a tokenizer: `"byte"`, or the path of a tokenizer.json.

    A relative path is tried below the project root, then below the working directory.
    """
    if name == "byte":
        return ByteTokenizer()
    candidates = list_candidate_paths(name)
    for path in candidates:
        if os.path.isfile(path):
            return FileTokenizer(path)
    problems = ((path, get_mode(path)[1]) for path in candidates)
    locations = " or ".join(f"{path} ({problem})" if problem else str(path) for path, problem in problems)
    raise DataError(f"data.tokenizer = {name!r}: no file at {locations}; give the path of a tokenizer.json, or use byte")


def _to_id_array(ids: Iterable[int], vocab_size: int) -> np.ndarray:
    ids = np.asarray(ids if hasattr(ids, "__len__") else list(ids), dtype=np.int64).reshape(-1)
    if ids.size and not (ids.min() >= 0 and ids.max() < vocab_size):
        raise DataError(
            f"decode: expected ids in 0..{vocab_size - 1}, got {ids.min()}..{ids.max()}; mask the logits of padded ids"
        )
    return ids
