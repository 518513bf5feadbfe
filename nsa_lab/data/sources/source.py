"""Interface of a document source.

Invariants
* The documents and their order are a function of `identity`, a JSON mapping.
* A source with a single document has "split": `BY_POSITION` in its identity. It cannot be split by document.
* A document carries the cursor of its successor: `documents(cursor)` yields exactly the documents that follow it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

# JSON; only the source that created it interprets it.
Cursor = dict[str, Any]
BY_POSITION = "position"


class Document(NamedTuple):
    """A document and the position after it. `text` is bytes only for noise."""

    text: str | bytes
    cursor: Cursor


class Source(Protocol):
    """Documents in a fixed order. The constructor checks everything that can be checked without reading all text."""

    identity: dict[str, Any]

    def documents(self, cursor: Cursor | None = None) -> Iterator[Document]: ...
