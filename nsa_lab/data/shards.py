"""Token shards on disk: what a manifest says, how it is verified, how tokens are read.

A cache folder holds `train-00000.bin`, `validation-00000.bin`, ... (raw little-endian uint8, uint16 or uint32, by
vocabulary size) and `manifest.json`, which was written last. Shards end at document ends and are read memory-mapped.
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
# Hashing two gigabytes takes seconds; beyond that sizes are checked at every start, and content on request.
MAX_BYTES_HASHED_AT_OPEN = 2 << 30


class TokenStore:
    """The tokens of one split, in the order in which the documents came. Read-only, memory-mapped."""

    def __init__(self, shards: Sequence[np.ndarray]) -> None:
        self._shards = [shard for shard in shards if len(shard)]
        self._ends = np.cumsum([len(shard) for shard in self._shards], dtype=np.int64).tolist()
        self._positions_by_token: dict[int, np.ndarray] = {}

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def read(self, start: int, count: int) -> np.ndarray:
        """int64 `[count]`, the tokens from `start` on, across shard boundaries."""
        if start < 0 or count < 0 or start + count > len(self):
            raise IndexError(f"tokens {start}..{start + count} of a store that holds {len(self)}")
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
        """int64, ascending: where `token` stands. All tokens are read once, and what was found is kept."""
        if token not in self._positions_by_token:
            begins = [end - len(shard) for end, shard in zip(self._ends, self._shards, strict=True)]
            places = [begin + np.flatnonzero(shard == token) for begin, shard in zip(begins, self._shards, strict=True)]
            self._positions_by_token[token] = np.concatenate([np.zeros(0, np.int64), *places])
        return self._positions_by_token[token]

    def drop_short_documents(self, separator: int, min_tokens: int) -> TokenStore:
        """The documents of at least `least` tokens, each with the separator that ends it; nothing is copied.

        Raises `DataError` if there is none.
        """
        ends = self.find(separator) + 1
        lengths = np.diff(ends, prepend=0)
        kept = lengths > min_tokens
        if not kept.any():
            longest = max(lengths.tolist(), default=1) - 1
            raise DataError(
                f"train.min_document_tokens = {min_tokens}: the longest of {len(ends)} documents has {longest} tokens; lower it"
            )
        # Neighbours that are kept are one stretch.
        edges = np.flatnonzero(np.diff(kept, prepend=False, append=False))
        firsts, lasts = edges[::2], edges[1::2] - 1
        return self._select_ranges((ends[firsts] - lengths[firsts]).tolist(), ends[lasts].tolist())

    def _select_ranges(self, begins: list[int], ends: list[int]) -> TokenStore:
        """The tokens from each of `begins` up to the one of `ends` that belongs to it."""
        parts = []
        for shard, last in zip(self._shards, self._ends, strict=True):
            first = last - len(shard)
            inside = slice(bisect.bisect_right(ends, first), bisect.bisect_left(begins, last))
            parts += [
                shard[max(begin - first, 0) : end - first] for begin, end in zip(begins[inside], ends[inside], strict=True)
            ]
        return TokenStore(parts)


def get_token_dtype(vocab_size: int) -> np.dtype:
    """The smallest unsigned type that holds every id, little-endian."""
    return np.dtype("u1" if vocab_size <= 1 << 8 else "<u2" if vocab_size <= 1 << 16 else "<u4")


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a finished folder. Raises `DataError` if it is damaged."""
    path = folder / MANIFEST
    manifest: dict[str, Any] = {}
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        intact = manifest["format"] == FORMAT and manifest["identity"] == compute_content_identity(manifest)
    except (OSError, ValueError, KeyError, TypeError):
        intact = False
    if not intact:
        raise DataError(f"{path}: damaged, or of another version; delete the folder {folder} to fill it again")
    return manifest


def compute_content_identity(manifest: dict[str, Any]) -> str:
    """sha256 over what a model can see: tokenizer and shards. The same content elsewhere has the same identity."""
    visible = {
        "tokenizer": manifest["tokenizer"]["identity"],
        "dtype": manifest["dtype"],
        "splits": {
            split: [[shard["tokens"], shard["sha256"]] for shard in manifest["splits"][split]["shards"]] for split in SPLITS
        },
    }
    return hashlib.sha256(json.dumps(visible, sort_keys=True).encode()).hexdigest()


def verify(folder: Path, manifest: dict[str, Any], content: bool = True) -> None:
    """Compare every shard with the manifest: sizes always, sha256 if `content`. Raises `DataError` naming the file."""
    remedy = f"it has changed since it was written; delete the folder {folder} to fill it again"
    for shard in _list_shards(manifest):
        path = folder / shard["file"]
        size = path.stat().st_size if path.is_file() else None
        if size != shard["bytes"]:
            came = "is missing" if size is None else f"has {size} bytes"
            raise DataError(f"{path}: {came}, and the manifest says {shard['bytes']} bytes; {remedy}")
        if content and (digest := hash_file(path)) != shard["sha256"]:
            raise DataError(
                f"{path}: sha256 is {digest[:16]}..., and the manifest says {shard['sha256'][:16]}...; {remedy}"
            )


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
    """Replace `path` so that a crash leaves the old content or the new, never a part."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make renames inside `folder` survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _list_shards(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    return [shard for split in SPLITS for shard in manifest["splits"][split]["shards"]]
