"""Where documents come from. A source yields whole documents in a fixed order and says where to continue."""

from nsa_lab.data.sources.base import Document, Source, open_source

__all__ = ["Document", "Source", "open_source"]
