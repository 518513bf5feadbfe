"""Noise: uniform random bytes. It contains nothing to learn, so a loss below its entropy indicates a leak.

The bytes are 0..254, because 255 is the separator. The minimum loss is ln 255 = 5.541; ln 256 is 5.545.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from nsa_lab.data.sources.source import Cursor, Document

DOCUMENT_BYTES = 4096
DEFAULT_TOKENS = 1 << 22


class SyntheticSource:
    """Documents of 4096 uniform bytes: unlimited if `max_tokens` is set, otherwise about four million tokens in total."""

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
