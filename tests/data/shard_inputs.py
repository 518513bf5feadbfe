"""Documents and sources for builds of shards."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from nsa_lab.config import DataConfig
from nsa_lab.data import (
    ByteTokenizer,
    Document,
)
from nsa_lab.data.build_shards import BuildOptions
from nsa_lab.data.shards import TokenStore

SEPARATOR = ByteTokenizer.separator


def local(folder: Path, **options: object) -> DataConfig:
    return DataConfig(source="local", path=str(folder), **{"val_fraction": 0.3, **options})


def documents_of(tokens: TokenStore) -> list[str]:
    content = tokens.read(0, len(tokens)).astype(np.uint8).tobytes()
    assert content.endswith(bytes([SEPARATOR]))
    return [part.decode() for part in content.split(bytes([SEPARATOR]))[:-1]]


class ListSource:
    def __init__(self, texts: list[str], fail_at: int | None = None) -> None:
        self.identity = {"source": "list"}
        self.texts = texts
        self.fail_at = fail_at
        self.asked: list[int] = []

    def documents(self, cursor: dict | None = None) -> Iterator[Document]:
        first = cursor["n"] if cursor else 0
        self.asked.append(first)
        for index in range(first, len(self.texts)):
            if index == self.fail_at:
                raise ConnectionError("gone")
            yield Document(self.texts[index], {"n": index + 1})


def plan(**options: object) -> BuildOptions:
    return BuildOptions(
        **{"tokenizer": ByteTokenizer(), "val_fraction": 0.3, "max_tokens": None, "settings": {}, **options}
    )
