"""What a source is, and which one a configuration names.

Invariants
* The documents and their order are a function of `identity`, a JSON mapping.
* A document carries the cursor of its successor: `documents(cursor)` yields exactly what would have followed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

from nsa_lab.config import DataConfig

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


def open_source(data: DataConfig, tick: Callable[[], None] | None = None) -> Source:
    """The source that `data` names. `tick` is called about twice a second while a source waits for the network.

    Raises `DataError` if the source cannot work: a missing path, no text column, no network.
    """
    if data.source == "stdlib":
        from nsa_lab.data.sources.stdlib import StdlibSource

        return StdlibSource()
    if data.source == "local":
        from nsa_lab.data.sources.local import LocalSource

        return LocalSource(data.path, data.text_column)
    if data.source == "fineweb_edu":
        from nsa_lab.data.sources.fineweb_edu import FinewebEduSource

        return FinewebEduSource(data.dataset, data.subset, data.text_column, data.timeout_s, tick)
    from nsa_lab.data.sources.synthetic import SyntheticSource

    return SyntheticSource(data.max_tokens)
