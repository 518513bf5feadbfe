"""Build a cache folder of token shards: once, crash-safe, resumable from the source's own cursor.

Invariants
* Work happens in `<key>.partial`, which is renamed to `<key>` after the manifest is written. Readers never see an
  incomplete folder.
* A part is one training shard and one validation shard that end at a document end. `progress.json`, with the cursor, is
  replaced after both are on disk. Anything after the last recorded part is deleted and built again.
* Tokens in = tokens in shards: every document whole, each followed by one separator, nothing else. Documents shorter than
  `min_document_bytes` are dropped here, where documents are still whole (rows cut them). `max_tokens` therefore counts only
  training text, and validation text is selected by the same rule.
* The sha256 of a text assigns it to training or validation, so its duplicates are in the same split. If the source is a
  single document, its end is the validation text.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import heapq
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
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

logger = logging.getLogger("nsa_lab.data")

# A build reports thousands of documents per second; an event every few seconds is enough for a reader.
REPORT_INTERVAL_S = 5.0

SHARD_BYTES = 64 << 20
PROGRESS_FILE = "progress.json"
# Number of training documents closest to the validation threshold that a manifest records, to suggest a `val_fraction`.
N_VALIDATION_CANDIDATES = 16
# If only `n_enough` tokens are needed, this many characters per token are tokenized first.
CHARACTERS_PER_TOKEN = 64


@dataclass(frozen=True)
class BuildProgress:
    """Progress of a build. `tokens`, `documents` and `text_bytes` count both splits.

    `train_tokens` counts the training split, which the cap `total_tokens` (None: no cap) applies to.
    """

    phase: str
    tokens: int
    documents: int
    total_tokens: int | None
    text_bytes: int = 0
    train_tokens: int = 0


@dataclass(frozen=True)
class BuildOptions:
    """Options of a build, independent of the documents."""

    tokenizer: Tokenizer
    val_fraction: float
    max_tokens: int | None
    settings: dict[str, Any]
    shard_bytes: int = SHARD_BYTES
    min_document_bytes: int = 0
    by_position: bool = False
    """The source is a single document: hold out its last `val_fraction` instead of whole documents."""


def compute_split_fraction(text: str | bytes) -> float:
    """Return the sha256 of a text as a fraction in [0, 1). A text below `val_fraction` belongs to validation."""
    return int.from_bytes(hashlib.sha256(_to_bytes(text)).digest()[:8], "big") / 2**64


class SplitCounter:
    """Assign documents to the splits, tokenize them and count both splits. `counts` becomes part of a manifest.

    `n_enough`: stop tokenizing a document that has at least this many tokens; its count is then a lower limit.
    """

    def __init__(self, options: BuildOptions, counts: dict[str, Any] | None = None, n_enough: int | None = None) -> None:
        self._options = options
        self._n_enough = n_enough
        self.counts = counts or {
            "empty_documents": 0,
            **({"short_documents": 0} if options.min_document_bytes else {}),
            "next_in_line": [],
            "splits": {split: {"tokens": 0, "documents": 0, "text_bytes": 0, "shards": []} for split in SPLITS},
        }
        self._seen: set[float] = set()

    @property
    def is_full(self) -> bool:
        cap = self._options.max_tokens
        return cap is not None and self.counts["splits"]["train"]["tokens"] >= cap

    @property
    def is_one_text(self) -> bool:
        """Return True if several documents were added and all have the same text."""
        return len(self._seen) == 1 and sum(split["documents"] for split in self.counts["splits"].values()) > 1

    def add(self, text: str | bytes) -> Iterator[tuple[str, np.ndarray]]:
        """Yield (split, token ids) of a document. A single document has a part in both splits, a short one has none."""
        if len(_to_bytes(text)) < max(self._options.min_document_bytes, 1):
            self.counts["short_documents" if text else "empty_documents"] += 1
            return
        fraction = compute_split_fraction(text)
        if self._options.by_position:
            end = int(len(text) * (1 - self._options.val_fraction))
            parts = {"train": text[:end], "validation": text[end:]}
        else:
            if len(self._seen) < 2:
                self._seen.add(fraction)
            parts = {"validation" if fraction < self._options.val_fraction else "train": text}
        for split, part in parts.items():
            if not part:
                continue
            ids = self._tokenize(part)
            counts = self.counts["splits"][split]
            counts["tokens"] += len(ids) + 1
            counts["documents"] += 1
            counts["text_bytes"] += len(_to_bytes(part))
            if split == "train" and not self._options.by_position:
                self._update_validation_candidates(fraction, len(ids) + 1)
            yield split, ids

    def _tokenize(self, text: str | bytes) -> np.ndarray:
        if self._n_enough and len(text) > (limit := self._n_enough * CHARACTERS_PER_TOKEN):
            ids = self._options.tokenizer.encode(text[:limit])
            if len(ids) >= self._n_enough:
                return ids
        return self._options.tokenizer.encode(text)

    def _update_validation_candidates(self, fraction: float, tokens: int) -> None:
        # A heap with the farthest candidate on top: in a long build, most documents fail the last comparison.
        heap = self.counts["next_in_line"]
        entry = [-fraction, tokens]
        for other in heap:
            if other[0] == -fraction:
                other[1] += tokens  # copies move together; the heap stays ordered by fraction
                return
        if len(heap) < N_VALIDATION_CANDIDATES:
            heapq.heappush(heap, entry)
        elif entry > heap[0]:
            heapq.heapreplace(heap, entry)


def build_shards(
    source: Source, options: BuildOptions, folder: Path, progress: Callable[[BuildProgress], None] | None = None
) -> None:
    """Write `folder` from `source`, continuing an interrupted build of the same folder.

    An exception from the source or from `progress` (e.g. on a signal) stops the build; completed parts stay on disk.
    """
    partial = folder.with_name(folder.name + ".partial")
    partial.mkdir(parents=True, exist_ok=True)
    builder = _ShardBuilder(partial, options)
    try:
        for document in () if builder.is_full else source.documents(builder.state["cursor"]):
            builder.add_document(document)
            if progress:
                progress(builder.get_progress())
            if builder.is_full:
                break
        builder.finish(source.identity)
    except BaseException as error:
        builder.abort()
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise DataError(
                f"{partial}: the disk is full; free some space and start again, or lower data.max_tokens"
            ) from error
        raise
    os.rename(partial, folder)
    sync_folder(folder.parent)
    (folder / PROGRESS_FILE).unlink(missing_ok=True)


class _ShardBuilder:
    """State of a build: the content of `progress.json`, and the part being written."""

    def __init__(self, folder: Path, plan: BuildOptions) -> None:
        self._folder = folder
        self._options = plan
        self._dtype = get_token_dtype(plan.tokenizer.vocab_size)
        self._separator = np.array([plan.tokenizer.separator], self._dtype).tobytes()
        first = {"cursor": None, **SplitCounter(plan).counts}
        self.state = _read_progress(folder, first) or first
        self._counter = SplitCounter(plan, self.state)
        self._cursor = self.state["cursor"]
        self._part: dict[str, _ShardWriter] = {}

    @property
    def is_full(self) -> bool:
        return self._counter.is_full

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
        for split, ids in self._counter.add(document.text):
            self._write_document(split, ids)
        self._cursor = document.cursor
        if sum(shard.bytes for shard in self._part.values()) >= self._options.shard_bytes:
            self._close_part()

    def finish(self, source_identity: dict[str, Any]) -> None:
        """Close the last part and write the manifest."""
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
        """Keep a resumable partial build; delete the folder if no part is complete."""
        for shard in self._part.values():
            shard.discard()
        if not (self._folder / PROGRESS_FILE).exists():
            shutil.rmtree(self._folder)

    def _write_document(self, split: str, ids: np.ndarray) -> None:
        if split not in self._part:
            self._part[split] = _ShardWriter(self._folder, split, len(self.state["splits"][split]["shards"]))
        self._part[split].write(ids.astype(self._dtype).tobytes() + self._separator)

    def _close_part(self) -> None:
        for split, shard in self._part.items():
            self.state["splits"][split]["shards"].append(shard.close(self._dtype.itemsize))
        self._part = {}
        self.state["cursor"] = self._cursor
        sync_folder(self._folder)
        write_durably(self._folder / PROGRESS_FILE, json.dumps(self.state).encode())


class _ShardWriter:
    """A shard being written, hashed incrementally."""

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
        """Flush the content to disk and return the manifest entry."""
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
        # The shard is not recorded, so lost content does not matter. On a full disk, close() flushes and fails.
        with contextlib.suppress(OSError):
            self._file.close()
        Path(self._file.name).unlink(missing_ok=True)


def _to_bytes(text: str | bytes) -> bytes:
    return text.encode("utf-8") if isinstance(text, str) else text


def _read_progress(folder: Path, first: dict[str, Any]) -> dict[str, Any] | None:
    """Return the recorded state of a build, with the keys of `first`; None if there is none or it is damaged."""
    path = folder / PROGRESS_FILE
    try:
        state = json.loads(path.read_bytes())
        if state.keys() == first.keys() and all(
            state["splits"][split].keys() == entry.keys() for split, entry in first["splits"].items()
        ):
            return state
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError, AttributeError, LookupError, TypeError):
        pass
    logger.warning("%s: damaged and ignored; the shards are built from the start", path)
    return None


class ProgressMeter:
    """Observe every progress report of a build and return event fields at intervals.

    The rate is measured from the first report with documents, because a resumed build starts with the documents of earlier
    calls.
    """

    def __init__(self, interval_s: float = REPORT_INTERVAL_S) -> None:
        self._interval_s = interval_s
        self._first: tuple[float, BuildProgress] | None = None
        self._latest: BuildProgress | None = None
        self._last_report_s = -interval_s

    def observe(self, progress: BuildProgress) -> bool:
        """Record a report and return whether the build advanced since the last one; waiting does not advance it."""
        has_advanced = bool(progress.documents) and (self._latest is None or progress.documents > self._latest.documents)
        if has_advanced:
            self._first = self._first or (time.monotonic(), progress)
        self._latest = progress
        return has_advanced

    def take_report(self) -> dict[str, Any] | None:
        """Return the fields of a `fill` event: phase, progress, bytes per second, seconds remaining.

        None if the last report is less than `interval_s` old.
        """
        now = time.monotonic()
        if self._latest is None or now - self._last_report_s < self._interval_s:
            return None
        self._last_report_s, latest = now, self._latest
        fields: dict[str, Any] = {
            "doing": latest.phase,
            "documents": latest.documents,
            "bytes": latest.text_bytes,
            "tokens_filled": latest.train_tokens,
            "tokens_wanted": latest.total_tokens,
            "bytes_per_s": None,
            "left_s": None,
        }
        if self._first is None or not latest.documents or now - self._first[0] < min(1.0, self._interval_s):
            return fields
        seconds, first = now - self._first[0], self._first[1]
        fields["bytes_per_s"] = (latest.text_bytes - first.text_bytes) / seconds
        rate = (latest.train_tokens - first.train_tokens) / seconds
        if latest.total_tokens and rate > 0:
            fields["left_s"] = max(latest.total_tokens - latest.train_tokens, 0) / rate
        return fields
