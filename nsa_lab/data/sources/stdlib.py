"""The text that comes with Python itself: the standard library's source, its licence and pydoc's topics.

About ten megabytes of English and code on every machine, without a network. The test suites are left out (some
distributions do not ship them, and they hold large generated tables), and so is what a machine's own build wrote.
"""

from __future__ import annotations

import hashlib
import platform
import sysconfig
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from nsa_lab.data.errors import DataError
from nsa_lab.data.sources.source import Cursor, Document

# encodings/ is a megabyte of near-identical character tables.
SKIPPED_FOLDERS = {
    "site-packages",
    "dist-packages",
    "__pycache__",
    "test",
    "tests",
    "idle_test",
    "encodings",
    "_bundled",
    "turtledemo",
}


class StdlibSource:
    """Every .py file of the standard library, LICENSE.txt, and one document for each pydoc topic, in sorted order."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder or Path(sysconfig.get_path("stdlib"))
        self._files = sorted(self._find_files(), key=lambda path: path.relative_to(self._folder).as_posix())
        if not self._files:
            raise DataError(
                f"data.source = stdlib: no .py files in {self._folder}; this Python ships its library compiled or zipped, "
                "so set data.source: local and data.path"
            )
        listing = "\n".join(f"{path.relative_to(self._folder).as_posix()} {path.stat().st_size}" for path in self._files)
        self.identity = {
            "source": "stdlib",
            "python": platform.python_version(),
            "files": len(self._files),
            "listing_sha256": hashlib.sha256(listing.encode()).hexdigest(),
        }

    def documents(self, cursor: Cursor | None = None) -> Iterator[Document]:
        first = cursor["document"] if cursor else 0
        for index, text in enumerate(islice(self._iter_texts(), first, None), start=first + 1):
            yield Document(text, {"document": index})

    def _iter_texts(self) -> Iterator[str]:
        for path in self._files:
            try:
                yield path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                # A handful of files declare another encoding (PEP 263); they are data for the parser, not prose.
                continue
        from pydoc_data.topics import topics

        yield from (topics[name] for name in sorted(topics))

    def _find_files(self) -> Iterator[Path]:
        for path in self._folder.rglob("*.py"):
            folders = path.relative_to(self._folder).parts[:-1]
            generated = path.name.startswith("_sysconfigdata") or folders == ("pydoc_data",)
            if not generated and not SKIPPED_FOLDERS.intersection(folders):
                yield path
        licence = self._folder / "LICENSE.txt"
        if licence.is_file():
            yield licence
