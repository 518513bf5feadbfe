"""Fill a cache folder with shards: once, crash-safe, resumable from the source's own cursor.

Invariants
* Work happens in `<key>.partial`, renamed to `<key>` when the manifest stands. A reader never sees a half-filled folder.
* A part is one training and one validation shard, ended at a document. `progress.json` is replaced, with the cursor,
  after both are on disk; what follows the last recorded part is thrown away and made again.
* Tokens in = tokens in shards: every document whole, one separator after each, nothing else. What is shorter than
  `min_document_bytes` is no document. It is left out here, where documents are whole (rows cut them), so that
  `max_tokens` counts what is trained on and what is held out is of the same kind.
* A text falls into training or validation by its own sha256, so its duplicates fall on the same side.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import heapq
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from nsa_lab.data.errors import DataError
from nsa_lab.data.shards import (
    FORMAT,
    MANIFEST,
    SPLITS,
    compute_content_identity,
    get_token_dtype,
    sync_folder,
    write_durably,
)
from nsa_lab.data.sources import Document, Source
from nsa_lab.data.tokenizer import Tokenizer

SHARD_BYTES = 64 << 20
PROGRESS_FILE = "progress.json"
# How many of the documents next in line for validation a manifest remembers, for the remedy of a split too small.
N_VALIDATION_CANDIDATES = 16


@dataclass(frozen=True)
class BuildProgress:
    """How far a filling is. `tokens`, `documents` and `text_bytes` are those of both splits; `train_tokens` are those that
    the cap `total_tokens` counts, which is None without one."""

    phase: str
    tokens: int
    documents: int
    total_tokens: int | None
    text_bytes: int = 0
    train_tokens: int = 0


@dataclass(frozen=True)
class BuildOptions:
    """What a filling makes, apart from the documents themselves."""

    tokenizer: Tokenizer
    val_fraction: float
    max_tokens: int | None
    settings: dict[str, Any]
    shard_bytes: int = SHARD_BYTES
    min_document_bytes: int = 0


def compute_split_fraction(text: str | bytes) -> float:
    """Where a text stands in [0, 1): its sha256 read as a fraction. Below `val_fraction` it is validation."""
    return int.from_bytes(hashlib.sha256(_to_bytes(text)).digest()[:8], "big") / 2**64


def build_shards(
    source: Source, options: BuildOptions, folder: Path, progress: Callable[[BuildProgress], None] | None = None
) -> None:
    """Write `folder` from `source`, continuing an interrupted filling of the same folder.

    An exception from the source or from `progress` (a signal, say) stops the filling; finished parts are kept.
    """
    partial = folder.with_name(folder.name + ".partial")
    partial.mkdir(parents=True, exist_ok=True)
    filling = _ShardBuilder(partial, options)
    try:
        for document in () if filling.is_full else source.documents(filling.state["cursor"]):
            filling.add_document(document)
            if progress:
                progress(filling.get_progress())
            if filling.is_full:
                break
        filling.finish(source.identity)
    except BaseException as error:
        filling.abort()
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise DataError(
                f"{partial}: the disk is full; free some space and start again, or lower data.max_tokens"
            ) from error
        raise
    os.rename(partial, folder)
    sync_folder(folder.parent)
    (folder / PROGRESS_FILE).unlink(missing_ok=True)


class _ShardBuilder:
    """The state of one filling: what `progress.json` records, and the part being written."""

    def __init__(self, folder: Path, plan: BuildOptions) -> None:
        self._folder = folder
        self._options = plan
        self._dtype = get_token_dtype(plan.tokenizer.vocab_size)
        self._separator = np.array([plan.tokenizer.separator], self._dtype).tobytes()
        self.state = _read_progress(folder) or {
            "cursor": None,
            "empty_documents": 0,
            **({"short_documents": 0} if plan.min_document_bytes else {}),
            "next_in_line": [],
            "splits": {split: {"tokens": 0, "documents": 0, "text_bytes": 0, "shards": []} for split in SPLITS},
        }
        self._cursor = self.state["cursor"]
        self._part: dict[str, _ShardWriter] = {}

    @property
    def is_full(self) -> bool:
        cap = self._options.max_tokens
        return cap is not None and self.state["splits"]["train"]["tokens"] >= cap

    def get_progress(self) -> BuildProgress:
        splits = self.state["splits"].values()
        return BuildProgress(
            "filling",
            sum(split["tokens"] for split in splits),
            sum(split["documents"] for split in splits),
            self._options.max_tokens,
            sum(split["text_bytes"] for split in splits),
            self.state["splits"]["train"]["tokens"],
        )

    def add_document(self, document: Document) -> None:
        if len(_to_bytes(document.text)) >= max(self._options.min_document_bytes, 1):
            self._write_document(document.text)
        else:
            self.state["short_documents" if document.text else "empty_documents"] += 1
        self._cursor = document.cursor
        if sum(shard.bytes for shard in self._part.values()) >= self._options.shard_bytes:
            self._close_part()

    def finish(self, source_identity: dict[str, Any]) -> None:
        """End the last part and write the manifest."""
        if self._part:
            self._close_part()
        tokenizer = self._options.tokenizer
        manifest = {
            "format": FORMAT,
            "settings": self._options.settings,
            "source": source_identity,
            "tokenizer": {
                "identity": tokenizer.identity,
                "vocab_size": tokenizer.vocab_size,
                "separator": tokenizer.separator,
            },
            "dtype": self._dtype.str,
            **self.state,
        }
        manifest["identity"] = compute_content_identity(manifest)
        write_durably(self._folder / MANIFEST, json.dumps(manifest, indent=1).encode())

    def abort(self) -> None:
        """Leave what a later filling can continue from, or nothing."""
        for shard in self._part.values():
            shard.discard()
        if not (self._folder / PROGRESS_FILE).exists():
            shutil.rmtree(self._folder)

    def _write_document(self, text: str | bytes) -> None:
        fraction = compute_split_fraction(text)
        split = "validation" if fraction < self._options.val_fraction else "train"
        ids = self._options.tokenizer.encode(text)
        if split not in self._part:
            self._part[split] = _ShardWriter(self._folder, split, len(self.state["splits"][split]["shards"]))
        self._part[split].write(ids.astype(self._dtype).tobytes() + self._separator)
        counts = self.state["splits"][split]
        counts["tokens"] += len(ids) + 1
        counts["documents"] += 1
        counts["text_bytes"] += len(_to_bytes(text))
        if split == "train":
            self._update_validation_candidates(fraction, len(ids) + 1)

    def _update_validation_candidates(self, fraction: float, tokens: int) -> None:
        # Kept as a heap with the farthest on top: most documents of a long filling fail this one comparison.
        heap = self.state["next_in_line"]
        entry = [-fraction, tokens]
        if entry in heap:
            return
        if len(heap) < N_VALIDATION_CANDIDATES:
            heapq.heappush(heap, entry)
        elif entry > heap[0]:
            heapq.heapreplace(heap, entry)

    def _close_part(self) -> None:
        for split, shard in self._part.items():
            self.state["splits"][split]["shards"].append(shard.close(self._dtype.itemsize))
        self._part = {}
        self.state["cursor"] = self._cursor
        sync_folder(self._folder)
        write_durably(self._folder / PROGRESS_FILE, json.dumps(self.state).encode())


class _ShardWriter:
    """A shard being written, hashed on the way."""

    def __init__(self, folder: Path, split: str, index: int) -> None:
        self._name = f"{split}-{index:05d}.bin"
        self._file: BinaryIO = (folder / self._name).open("wb")
        self._digest = hashlib.sha256()
        self.bytes = 0

    def write(self, content: bytes) -> None:
        self._file.write(content)
        self._digest.update(content)
        self.bytes += len(content)

    def close(self, token_bytes: int) -> dict[str, Any]:
        """Force the content to disk; the manifest's entry."""
        with self._file as file:
            file.flush()
            os.fsync(file.fileno())
        return {
            "file": self._name,
            "bytes": self.bytes,
            "tokens": self.bytes // token_bytes,
            "sha256": self._digest.hexdigest(),
        }

    def discard(self) -> None:
        # Unbuffered by now or not, nothing of this shard is recorded; on a full disk even closing flushes and fails.
        with contextlib.suppress(OSError):
            self._file.close()
        Path(self._file.name).unlink(missing_ok=True)


def _to_bytes(text: str | bytes) -> bytes:
    return text.encode("utf-8") if isinstance(text, str) else text


def _read_progress(folder: Path) -> dict[str, Any] | None:
    path = folder / PROGRESS_FILE
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
