"""Tokenizer of UTF-8 bytes for `transformers`."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportUntypedBaseClass=false

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizer

from nsa_lab.data import ByteTokenizer
from nsa_lab.inference.hf.configuration import REMOTE_CODE, TOKENIZER_AUTO_MAP, SavedWithImport, write_remote_code

# Options of `from_pretrained` that `transformers` keeps with the settings of a tokenizer.
LOADING_OPTIONS = ("is_local", "local_files_only", "trust_remote_code")


class NSALabTokenizer(SavedWithImport, PreTrainedTokenizer):
    """Tokenizer of UTF-8 bytes. Byte 255, which is never part of UTF-8, is the BOS, EOS, padding and separator token."""

    SEPARATOR = "<|separator|>"
    model_input_names = ["input_ids", "attention_mask"]  # noqa: RUF012 - as transformers declares it
    _auto_map = TOKENIZER_AUTO_MAP  # saved in tokenizer_config.json

    def __init__(self, **kwargs: Any) -> None:
        special_tokens = dict.fromkeys(("bos_token", "eos_token", "pad_token"), self.SEPARATOR)
        options = {"padding_side": "left", "clean_up_tokenization_spaces": False, **special_tokens, **kwargs}
        super().__init__(**{"special_tokens_pattern": "bos", **options})

    @property
    def vocab_size(self) -> int:
        return ByteTokenizer.vocab_size

    def get_vocab(self) -> dict[str, int]:
        return {self._convert_id_to_token(index): index for index in range(self.vocab_size)} | self.added_tokens_encoder

    def build_inputs_with_special_tokens(self, token_ids_0: list[int], token_ids_1: list[int] | None = None) -> list[int]:
        # In training a separator precedes every document.
        parts = [token_ids_0] if token_ids_1 is None else [token_ids_0, token_ids_1]
        return [index for part in parts for index in (ByteTokenizer.separator, *part)]

    def _tokenize(self, text: str, **_: Any) -> list[str]:
        return [chr(byte) for byte in text.encode("utf-8")]

    def _convert_token_to_id(self, token: str) -> int | None:
        if token == self.SEPARATOR:
            return ByteTokenizer.separator
        unknown: Any = self.unk_token_id
        return ord(token) if _is_byte(token) else unknown

    def _convert_id_to_token(self, index: int) -> str:
        if not 0 <= index < self.vocab_size:
            raise ValueError(f"id {index}: expected 0 to {self.vocab_size - 1}, or the id of an added token")
        return self.SEPARATOR if index == ByteTokenizer.separator else chr(index)

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        # Tokens that are not bytes are copied: added tokens, and separators unless they are skipped.
        groups = ((is_byte, list(group)) for is_byte, group in groupby(tokens, key=_is_byte))
        return "".join(ByteTokenizer().decode(map(ord, group)) if is_byte else "".join(group) for is_byte, group in groups)

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        """Save the tokenizer. How it was loaded is not part of it, so a folder that is saved again is equal."""
        for name in LOADING_OPTIONS:
            self.init_kwargs.pop(name, None)
        return super().save_pretrained(save_directory, *args, **kwargs)

    def save_vocabulary(self, save_directory: str, filename_prefix: str | None = None) -> tuple[str, ...]:
        """Write the file with which `trust_remote_code=True` imports nsa_lab. There is no vocabulary."""
        write_remote_code(save_directory)
        return (str(Path(save_directory) / REMOTE_CODE),)


def _is_byte(token: str) -> bool:
    return len(token) == 1 and ord(token) < ByteTokenizer.separator
