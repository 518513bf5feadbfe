"""Sources of documents. A source yields whole documents in a fixed order, each with a cursor to resume from."""

from __future__ import annotations

from collections.abc import Callable

from nsa_lab.config import DataConfig
from nsa_lab.data.sources.source import Document, Source

__all__ = ["Document", "Source", "open_source"]


def open_source(data: DataConfig, tick: Callable[[], None] | None = None) -> Source:
    """Return the source that `data` names; for recall, the source of the text into which facts are inserted.

    `tick` is called about twice a second while a source waits for the network.

    Raises `DataError` if the source cannot work: a missing path, no text column, no network.
    """
    if data.source == "stdlib" or (data.source == "recall" and not data.path):
        from nsa_lab.data.sources.stdlib import StdlibSource

        return StdlibSource()
    if data.source in ("local", "recall"):
        from nsa_lab.data.sources.local import LocalSource

        assert data.path, "DataConfig rejects source local without a path, and recall without a path reads stdlib"
        return LocalSource(data.path, data.text_column)
    if data.source == "fineweb_edu":
        from nsa_lab.data.sources.fineweb_edu import FinewebEduSource

        return FinewebEduSource(data.dataset, data.subset, data.text_column, data.timeout_s, tick)
    from nsa_lab.data.sources.source import SyntheticSource

    return SyntheticSource(data.max_tokens)
