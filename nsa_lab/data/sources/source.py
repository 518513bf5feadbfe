"""What a source is.

Invariants
* The documents and their order are a function of `identity`, a JSON mapping.
* A document carries the cursor of its successor: `documents(cursor)` yields exactly what would have followed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

# JSON, and opaque to everyone but the source that made it.
Cursor = dict[str, Any]


class Document(NamedTuple):
    """One document and the position after it. `text` is bytes for noise only."""

    text: str | bytes
    cursor: Cursor


class Source(Protocol):
    """Documents in a fixed order. Opening one checks what can be checked without reading everything."""

    identity: dict[str, Any]

    def documents(self, cursor: Cursor | None = None) -> Iterator[Document]: ...
