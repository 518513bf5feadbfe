"""Interface of a document source, and the source of noise.

Invariants
* The documents and their order are a function of `identity`, a JSON mapping.
* A source with a single document has "split": `BY_POSITION` in its identity. It cannot be split by document.
* A document carries the cursor of its successor: `documents(cursor)` yields exactly the documents that follow it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np

# JSON; only the source that created it interprets it.
Cursor = dict[str, Any]
BY_POSITION = "position"
# Defaults of `SyntheticSource`.
DOCUMENT_BYTES = 4096
DEFAULT_TOKENS = 1 << 22


class Document(NamedTuple):
    """A document and the position after it. `text` is bytes only for noise."""

    text: str | bytes
    cursor: Cursor


class Source(Protocol):
    """Documents in a fixed order. The constructor checks everything that can be checked without reading all text."""

    identity: dict[str, Any]

    def documents(self, cursor: Cursor | None = None) -> Iterator[Document]: ...


class SyntheticSource:
    """Noise: uniform random bytes. It contains nothing to learn, so a loss below its entropy indicates a leak.

    Documents of 4096 bytes: unlimited if `max_tokens` is set, otherwise about four million tokens in total. The bytes are
    0..254, because 255 is the separator. The minimum loss is ln 255 = 5.541; ln 256 is 5.545.
    """

    def __init__(self, max_tokens: int | None = None) -> None:
        self._documents = None if max_tokens else DEFAULT_TOKENS // (DOCUMENT_BYTES + 1)
        self.identity = {
            "source": "synthetic",
            "noise": True,
            "documents": self._documents,
            "document_bytes": DOCUMENT_BYTES,
        }

    def documents(self, cursor: Cursor | None = None) -> Iterator[Document]:
        index = cursor["document"] if cursor else 0
        while self._documents is None or index < self._documents:
            noise = np.random.Generator(np.random.Philox(key=index)).integers(0, 255, DOCUMENT_BYTES, dtype=np.uint8)
            index += 1
            yield Document(noise.tobytes(), {"document": index})
