"""Token shards on disk: manifest, verification, and reading.

A cache folder holds `train-00000.bin`, `validation-00000.bin`, ... (raw little-endian uint8, uint16 or uint32, by
vocabulary size) and `manifest.json`, which is written last. Shards end at document ends and are memory-mapped.
"""

from __future__ import annotations

import bisect
import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nsa_lab.data.errors import DataError

FORMAT = 1
SPLITS = ("train", "validation")
MANIFEST = "manifest.json"
TOKEN_DTYPES = ("|u1", "<u2", "<u4")
# Hashing two gigabytes takes seconds. Above this size, only file sizes are checked at startup, and hashes on request.
MAX_BYTES_HASHED_AT_OPEN = 2 << 30


class TokenStore:
    """Tokens of one split, in document order. Read-only, memory-mapped."""

    def __init__(self, shards: Sequence[np.ndarray]) -> None:
        self._shards = [shard for shard in shards if len(shard)]
        self._ends = np.cumsum([len(shard) for shard in self._shards], dtype=np.int64).tolist()
        self._positions_by_token: dict[int, np.ndarray] = {}

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def read(self, start: int, count: int) -> np.ndarray:
        """Return `count` tokens from `start`, int64 `[count]`, across shard boundaries."""
        if start < 0 or count < 0 or start + count > len(self):
            raise IndexError(f"tokens {start}..{start + count}: out of range for a store of {len(self)} tokens")
        out = np.empty(count, dtype=np.int64)
        filled = 0
        index = bisect.bisect_right(self._ends, start)
        while filled < count:
            shard = self._shards[index]
            offset = start + filled - (self._ends[index] - len(shard))
            piece = shard[offset : offset + count - filled]
            out[filled : filled + len(piece)] = piece
            filled += len(piece)
            index += 1
        return out

    def find(self, token: int) -> np.ndarray:
        """Return the ascending positions of `token`, int64. The first call reads all tokens; the result is cached."""
        if token not in self._positions_by_token:
            starts = [end - len(shard) for end, shard in zip(self._ends, self._shards, strict=True)]
            positions = [start + np.flatnonzero(shard == token) for start, shard in zip(starts, self._shards, strict=True)]
            self._positions_by_token[token] = np.concatenate([np.zeros(0, np.int64), *positions])
        return self._positions_by_token[token]

    def drop_short_documents(self, separator: int, min_tokens: int) -> TokenStore:
        """Return the documents of at least `min_tokens` tokens, each with the separator that ends it. Nothing is copied.

        Raises `DataError` if there are none.
        """
        ends = self.find(separator) + 1
        lengths = np.diff(ends, prepend=0)
        is_long = lengths > min_tokens
        if not is_long.any():
            longest = max(lengths.tolist(), default=1) - 1
            raise DataError(
                f"train.min_document_tokens = {min_tokens}: the longest of {len(ends)} documents has {longest} tokens; "
                "lower it"
            )
        # Consecutive long documents form one range.
        edges = np.flatnonzero(np.diff(is_long, prepend=False, append=False))
        firsts, lasts = edges[::2], edges[1::2] - 1
        return self._select_ranges((ends[firsts] - lengths[firsts]).tolist(), ends[lasts].tolist())

    def _select_ranges(self, starts: list[int], ends: list[int]) -> TokenStore:
        """Return the tokens of the ranges from `starts[i]` to `ends[i]`, as views."""
        parts = []
        for shard, last in zip(self._shards, self._ends, strict=True):
            first = last - len(shard)
            overlapping = slice(bisect.bisect_right(ends, first), bisect.bisect_left(starts, last))
            parts += [
                shard[max(start - first, 0) : end - first]
                for start, end in zip(starts[overlapping], ends[overlapping], strict=True)
            ]
        return TokenStore(parts)


def get_token_dtype(vocab_size: int) -> np.dtype:
    """Return the smallest unsigned little-endian dtype that holds every id."""
    return np.dtype("u1" if vocab_size <= 1 << 8 else "<u2" if vocab_size <= 1 << 16 else "<u4")


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of a complete folder. Raises `DataError` if it is damaged."""
    path = folder / MANIFEST
    manifest: dict[str, Any] = {}
    try:
        # A FIFO would block the reader.
        manifest = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        is_intact = manifest["format"] == FORMAT and manifest["identity"] == compute_content_identity(manifest)
        is_intact = is_intact and _is_consistent(manifest)
    except PermissionError:
        raise DataError(f"{path}: permission denied; let its owner open the folder {folder}, or move it away") from None
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        is_intact = False
    if not is_intact:
        raise DataError(f"{path}: damaged or of another format version; delete the folder {folder} to build it again")
    return manifest


def _is_consistent(manifest: dict[str, Any]) -> bool:
    """Return whether the sizes agree with each other and every shard is a file of the folder itself."""
    width = np.dtype(manifest["dtype"]).itemsize
    if manifest["dtype"] not in TOKEN_DTYPES or not isinstance(manifest["source"], dict):
        return False
    for split in SPLITS:
        own = manifest["splits"][split]
        if own["tokens"] != sum(shard["tokens"] for shard in own["shards"]):
            return False
        for shard in own["shards"]:
            if Path(shard["file"]).name != shard["file"] or shard["bytes"] != shard["tokens"] * width:
                return False
    return True


def compute_content_identity(manifest: dict[str, Any]) -> str:
    """Return the sha256 of the content that a model sees: tokenizer and shards.

    Equal content has the same identity everywhere.
    """
    visible = {
        "tokenizer": manifest["tokenizer"]["identity"],
        "dtype": manifest["dtype"],
        "splits": {
            split: [[shard["tokens"], shard["sha256"]] for shard in manifest["splits"][split]["shards"]] for split in SPLITS
        },
    }
    return hashlib.sha256(json.dumps(visible, sort_keys=True).encode()).hexdigest()


def verify(folder: Path, manifest: dict[str, Any], content: bool = True) -> None:
    """Compare every shard with the manifest: always the size, and the sha256 if `content`.

    Raises `DataError` naming the file.
    """
    remedy = f"it has changed since it was written; delete the folder {folder} to build it again"
    for shard in _list_shards(manifest):
        path = folder / shard["file"]
        size = path.stat().st_size if path.is_file() else None
        if size != shard["bytes"]:
            finding = "is missing" if size is None else f"has {size} bytes"
            raise DataError(f"{path}: {finding}, the manifest records {shard['bytes']} bytes; {remedy}")
        if content and (digest := hash_file(path)) != shard["sha256"]:
            raise DataError(f"{path}: sha256 is {digest[:16]}..., the manifest records {shard['sha256'][:16]}...; {remedy}")


def open_stores(folder: Path, manifest: dict[str, Any]) -> dict[str, TokenStore]:
    """Memory-map the shards of both splits."""
    dtype = np.dtype(manifest["dtype"])
    return {
        split: TokenStore(
            [
                np.memmap(folder / shard["file"], dtype=dtype, mode="r")
                for shard in manifest["splits"][split]["shards"]
                if shard["tokens"]
            ]
        )
        for split in SPLITS
    }


def sum_shard_bytes(manifest: dict[str, Any]) -> int:
    return sum(shard["bytes"] for shard in _list_shards(manifest))


def hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_durably(path: Path, content: bytes) -> None:
    """Replace `path` so that a crash leaves either the old or the new content, never a part of it."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make renames inside `folder` survive a power failure."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _list_shards(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    return [shard for split in SPLITS for shard in manifest["splits"][split]["shards"]]
