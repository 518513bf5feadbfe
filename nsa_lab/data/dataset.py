"""From a configuration to tokens: find the cache folder, fill it once, verify it, open it."""

from __future__ import annotations

import hashlib
import json
import logging
import shlex
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nsa_lab.config import DataConfig
from nsa_lab.config.optional_deps import require
from nsa_lab.data import shards
from nsa_lab.data.build_shards import BuildOptions, BuildProgress, build_shards
from nsa_lab.data.errors import DataError
from nsa_lab.data.paths import get_cache_folder
from nsa_lab.data.retry import TICK_INTERVAL_S
from nsa_lab.data.shards import TokenStore
from nsa_lab.data.sources import Source, open_source
from nsa_lab.data.tokenizer import Tokenizer, load_tokenizer

ProgressCallback = Callable[[BuildProgress], None]

logger = logging.getLogger("nsa_lab.data")


@dataclass(frozen=True)
class Dataset:
    """Verified tokens of a training and a held-out part, disjoint by document.

    `identity` is the sha256 of the content (64 hex digits); a run that resumes must find the same one.
    """

    train: TokenStore
    validation: TokenStore
    manifest: dict[str, Any]
    folder: Path
    tokenizer: Tokenizer
    # Why the source could not be read, where its shards in the cache take its place.
    source_error: str | None = None

    @property
    def identity(self) -> str:
        return self.manifest["identity"]

    @property
    def vocab_size(self) -> int:
        return self.tokenizer.vocab_size

    @property
    def bytes_per_token(self) -> float:
        """Text bytes a validation token stands for, a separator counted as one: 1.0 for the byte tokenizer.

        Bits per byte = loss in nats / ln 2 / bytes_per_token.
        """
        held_out = self.manifest["splits"]["validation"]
        return (held_out["text_bytes"] + held_out["documents"]) / held_out["tokens"]

    def verify(self) -> None:
        """Hash every shard against the manifest, whatever its size. Raises `DataError` naming a changed file."""
        shards.verify(self.folder, self.manifest)


def prepare(
    data: DataConfig,
    vocab_size: int | None = None,
    seq_len: int | None = None,
    progress: ProgressCallback | None = None,
    identity: str | None = None,
    cache: Path | None = None,
) -> Dataset:
    """Fill the shards that `data` describes unless they are there, verify them, and open them.

    `identity` is that of the data set which a run has begun with. Where its source cannot be read any more, the shards of
    that identity in the cache take its place, once every one of them has been hashed (`Dataset.source_missing` says so).

    Safe to call from several processes at once: one fills, the others wait. `progress` is called for every document and
    about twice a second while waiting; what it raises stops the call, and a later call continues the filling.

    Raises `DataError` if the source cannot be read, a shard has changed since it was written, the vocabulary of the model
    (`vocab_size`) is smaller than the tokenizer's, or a split is shorter than one sequence of `seq_len` tokens.
    """
    tokenizer, cache, missing = _load_compatible_tokenizer(data, vocab_size), cache or get_cache_folder(), None
    try:
        source = open_source(data, tick=_make_tick(progress, "waiting for the source"))
    except DataError as error:
        folder = _find_cached_folder(cache, data, tokenizer, identity)
        if folder is None:
            raise
        missing = str(error)
        logger.warning("the source cannot be read, and its shards in %s take its place: %s", folder, missing)
    else:
        folder = _build_if_missing(source, data, tokenizer, cache, progress)
    manifest = shards.read_manifest(folder)
    small = shards.sum_shard_bytes(manifest) < shards.MAX_BYTES_HASHED_AT_OPEN
    shards.verify(folder, manifest, content=small or missing is not None)
    _check_split_lengths(manifest, data, (seq_len or 1) + 1)
    stores = shards.open_stores(folder, manifest)
    return Dataset(stores["train"], stores["validation"], manifest, folder, tokenizer, missing)


def check(data: DataConfig, vocab_size: int | None = None, *, to_train: bool = False) -> dict[str, Any]:
    """The identity of the source, after every check that needs no filling. Raises `DataError` as `prepare` would.

    `to_train`: a path that is one .txt is refused, too, since it is one document and whole documents are held out.
    """
    _load_compatible_tokenizer(data, vocab_size)
    identity = open_source(data).identity
    if to_train and data.path and data.path.lower().endswith(".txt") and len(identity["files"]) == 1:
        raise DataError(
            f"data.path = {data.path!r}: one .txt is one document, and whole documents are held out for validation; cut it "
            "into several, and give their folder. With GNU split: mkdir texts && split -C 64k --additional-suffix=.txt "
            f"{shlex.quote(identity['files'][0][0])} texts/"
        )
    return identity


def _load_compatible_tokenizer(data: DataConfig, vocab_size: int | None) -> Tokenizer:
    tokenizer = load_tokenizer(data.tokenizer)
    if vocab_size is not None and vocab_size < tokenizer.vocab_size:
        raise DataError(
            f"model.vocab_size = {vocab_size}, and data.tokenizer = {data.tokenizer} has {tokenizer.vocab_size} ids; "
            f"set model.vocab_size: {tokenizer.vocab_size}"
        )
    if data.source in ("synthetic", "recall") and data.tokenizer != "byte":
        raise DataError(
            f"data.tokenizer = {data.tokenizer}: data.source = {data.source} makes bytes, not text; "
            "set data.tokenizer: byte"
        )
    return tokenizer


def _get_cache_settings(data: DataConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    settings = {"tokenizer": tokenizer.identity, "val_fraction": data.val_fraction, "max_tokens": data.max_tokens}
    # A folder that was filled without it is still the one that is meant.
    return settings | ({"min_document_bytes": data.min_document_bytes} if data.min_document_bytes else {})


def _find_cached_folder(cache: Path, data: DataConfig, tokenizer: Tokenizer, identity: str | None) -> Path | None:
    """The folder in the cache that was filled with these settings and holds the content of `identity`, if there is one."""
    for path in sorted(cache.glob(f"*/{shards.MANIFEST}")):
        try:
            manifest = shards.read_manifest(path.parent)
        except DataError:
            # Another's damage: what is looked for would be known by the identity in its manifest.
            continue
        if manifest["identity"] == identity and manifest["settings"] == _get_cache_settings(data, tokenizer):
            return path.parent
    return None


def _build_if_missing(
    source: Source, data: DataConfig, tokenizer: Tokenizer, cache: Path, progress: ProgressCallback | None
) -> Path:
    settings = _get_cache_settings(data, tokenizer)
    folder = cache / _make_cache_key(source.identity, settings)
    if folder.is_dir():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with _hold_lock(
        folder.with_name(folder.name + ".lock"), _make_tick(progress, "waiting for another process that fills")
    ):
        if not folder.is_dir():
            plan = BuildOptions(
                tokenizer,
                data.val_fraction,
                data.max_tokens,
                settings,
                min_document_bytes=data.min_document_bytes,
            )
            build_shards(source, plan, folder, progress)
    return folder


def _make_cache_key(identity: dict[str, Any], settings: dict[str, Any]) -> str:
    content = json.dumps([shards.FORMAT, identity, settings], sort_keys=True)
    return f"{identity['source']}-{hashlib.sha256(content.encode()).hexdigest()[:16]}"


@contextmanager
def _hold_lock(path: Path, tick: Callable[[], None]) -> Iterator[None]:
    require("filelock")
    import filelock

    # The system lets go of the lock of a process that dies; the file itself may stay.
    lock = filelock.FileLock(path)
    while not lock.is_locked:
        try:
            lock.acquire(blocking=False)
        except filelock.Timeout:
            tick()
            time.sleep(TICK_INTERVAL_S)
    try:
        yield
    finally:
        lock.release()


def _make_tick(progress: ProgressCallback | None, phase: str) -> Callable[[], None]:
    return lambda: progress(BuildProgress(phase, 0, 0, None)) if progress else None


def _check_split_lengths(manifest: dict[str, Any], data: DataConfig, n_required: int) -> None:
    train, held_out = (manifest["splits"][split] for split in shards.SPLITS)
    documents = train["documents"] + held_out["documents"]
    if documents == 0 and manifest.get("short_documents"):
        raise DataError(
            f"data.source = {data.source}: all {manifest['short_documents']} documents are shorter than "
            f"data.min_document_bytes = {data.min_document_bytes}; lower it, or give longer documents"
        )
    if documents == 0:
        raise DataError(f"data.source = {data.source}: no text in it; give documents that are not empty")
    if held_out["tokens"] < n_required:
        raise DataError(
            f"validation holds {held_out['tokens']} tokens of {documents} documents, and one sequence needs {n_required} "
            f"(data.val_fraction = {data.val_fraction:g}); {_suggest_remedy(manifest, held_out['tokens'], n_required)}"
        )
    if train["tokens"] < n_required:
        raise DataError(
            f"training holds {train['tokens']} tokens of {documents} documents, and one sequence needs {n_required}; "
            "give more text, lower train.seq_len, or lower data.val_fraction"
        )


def _suggest_remedy(manifest: dict[str, Any], held_out: int, needed: int) -> str:
    """The smallest `data.val_fraction` that holds out enough, if one leaves enough to train on."""
    next_in_line = sorted((-negative, tokens) for negative, tokens in manifest["next_in_line"])
    left = manifest["splits"]["train"]["tokens"]
    for fraction, tokens in next_in_line:
        held_out, left = held_out + tokens, left - tokens
        if left < needed:
            break
        if held_out >= needed:
            # Rounded up, so that the document at `fraction` itself is held out.
            return f"give more documents, or set data.val_fraction: {min(fraction + 1e-4, 0.9999):.4f}"
    return "give more documents (a .txt is one, a line of .jsonl is one), or lower train.seq_len"
