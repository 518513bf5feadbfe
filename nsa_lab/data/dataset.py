"""From a configuration to tokens: find the cache folder, build its shards once, verify them, open them."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nsa_lab.config import DataConfig
from nsa_lab.config.optional_deps import require
from nsa_lab.data import shards
from nsa_lab.data.build_shards import BuildOptions, BuildProgress, SplitCounter, build_shards
from nsa_lab.data.errors import DataError
from nsa_lab.data.paths import get_cache_folder
from nsa_lab.data.retry import TICK_INTERVAL_S
from nsa_lab.data.shards import TokenStore
from nsa_lab.data.sources import Source, open_source
from nsa_lab.data.sources.source import BY_POSITION
from nsa_lab.data.tokenizer import Tokenizer, load_tokenizer

ProgressCallback = Callable[[BuildProgress], None]

logger = logging.getLogger("nsa_lab.data")


@dataclass(frozen=True)
class Dataset:
    """Verified tokens of a training and a held-out part, disjoint by document (of a single document: by position).

    `identity` is the sha256 of the content (64 hex digits). A resumed run must find the same identity.
    """

    train: TokenStore
    validation: TokenStore
    manifest: dict[str, Any]
    folder: Path
    tokenizer: Tokenizer
    # Error of a source that could not be read and was replaced by its cached shards; None: the source was read.
    source_error: str | None = None

    @property
    def identity(self) -> str:
        return self.manifest["identity"]

    @property
    def vocab_size(self) -> int:
        return self.tokenizer.vocab_size

    @property
    def bytes_per_token(self) -> float:
        """Mean number of text bytes per validation token. A separator counts as one byte, so the byte tokenizer has 1.0.

        Bits per byte = loss in nats / ln 2 / bytes_per_token.
        """
        held_out = self.manifest["splits"]["validation"]
        return (held_out["text_bytes"] + held_out["documents"]) / held_out["tokens"]

    def verify(self) -> None:
        """Compare the hash of every shard with the manifest. Raises `DataError` with the name of a changed file."""
        shards.verify(self.folder, self.manifest)


def prepare(
    data: DataConfig,
    vocab_size: int | None = None,
    seq_len: int | None = None,
    progress: ProgressCallback | None = None,
    identity: str | None = None,
    cache: Path | None = None,
) -> Dataset:
    """Build the shards that `data` describes unless they exist, verify them, and open them.

    `identity`: the dataset identity with which a run started; None: a new run. If the source can no longer be read, cached
    shards with this identity replace it after every one of them has been hashed. `Dataset.source_error` then has the
    reason.
    `progress`: called for every document and about twice a second while waiting. An exception from it stops the call; a
    later call continues the build.

    Several processes may call this at once: one builds, the others wait.

    Raises `DataError` if the source cannot be read, if a shard has changed since it was written, if the model's vocabulary
    (`vocab_size`) is smaller than the tokenizer's, or if a split is shorter than one sequence of `seq_len` tokens.
    """
    tokenizer, cache, source_error = _load_compatible_tokenizer(data, vocab_size), cache or get_cache_folder(), None
    source = None
    try:
        source = open_source(data, tick=_make_tick(progress, "waiting for the source"))
    except DataError as error:
        folder = _find_cached_folder(cache, data, tokenizer, identity)
        if folder is None:
            raise
        source_error = str(error)
        logger.warning("the source cannot be read, using its cached shards in %s: %s", folder, source_error)
    else:
        folder = _build_if_missing(source, data, tokenizer, cache, progress)
    manifest = shards.read_manifest(folder)
    is_small = shards.sum_shard_bytes(manifest) < shards.MAX_BYTES_HASHED_AT_OPEN
    shards.verify(folder, manifest, content=is_small or source_error is not None)
    if note := describe_split(manifest["source"], data.val_fraction):
        logger.info(note)
    n_required = (seq_len or 1) + 1
    if source is not None and _find_short_split(manifest, n_required):
        _check_source_length(source, data, tokenizer, n_required)  # its message is more precise
    _check_split_lengths(manifest, data, n_required, manifest["source"])
    stores = shards.open_stores(folder, manifest)
    return Dataset(stores["train"], stores["validation"], manifest, folder, tokenizer, source_error)


def check(data: DataConfig, vocab_size: int | None = None, seq_len: int | None = None) -> dict[str, Any]:
    """Return the identity of the source after all checks that need no build. Raises `DataError` as `prepare` would.

    `seq_len`: also read as many documents as both splits need for one sequence; not from the network.
    """
    tokenizer = _load_compatible_tokenizer(data, vocab_size)
    source = open_source(data)
    if seq_len and data.source != "fineweb_edu":
        _check_source_length(source, data, tokenizer, seq_len + 1)
    return source.identity


def describe_split(source_identity: dict[str, Any], val_fraction: float) -> str | None:
    """Return a text on a source that is a single document and is therefore split by position; None for other sources."""
    if not _is_by_position(source_identity):
        return None
    return f"the text is a single document, so it is split by position: its last {val_fraction:.4g} are the validation text"


def _load_compatible_tokenizer(data: DataConfig, vocab_size: int | None) -> Tokenizer:
    tokenizer = load_tokenizer(data.tokenizer)
    if vocab_size is not None and vocab_size < tokenizer.vocab_size:
        raise DataError(
            f"model.vocab_size = {vocab_size}: data.tokenizer = {data.tokenizer} has {tokenizer.vocab_size} ids; "
            f"set model.vocab_size: {tokenizer.vocab_size}"
        )
    if data.source in ("synthetic", "recall") and data.tokenizer != "byte":
        raise DataError(
            f"data.tokenizer = {data.tokenizer}: data.source = {data.source} yields bytes, not text; "
            "set data.tokenizer: byte"
        )
    return tokenizer


def _get_cache_settings(data: DataConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    settings = {"tokenizer": tokenizer.identity, "val_fraction": data.val_fraction, "max_tokens": data.max_tokens}
    # Omitted if 0, so that cache folders from before this setting existed keep their key.
    return settings | ({"min_document_bytes": data.min_document_bytes} if data.min_document_bytes else {})


def _find_cached_folder(cache: Path, data: DataConfig, tokenizer: Tokenizer, identity: str | None) -> Path | None:
    """Return the cache folder that was built with these settings and has this content identity, or None."""
    for path in sorted(cache.glob(f"*/{shards.MANIFEST}")):
        try:
            manifest = shards.read_manifest(path.parent)
        except DataError:
            # A damaged manifest cannot belong to the requested dataset: `read_manifest` verifies the identity.
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
    if os.path.lexists(folder) and not folder.is_dir():  # another process may have built it meanwhile
        raise DataError(f"{folder}: expected a folder of token shards, got a file or a link to nothing; remove it")
    cache.mkdir(parents=True, exist_ok=True)
    with _hold_lock(
        folder.with_name(folder.name + ".lock"), _make_tick(progress, "waiting for another process that builds the shards")
    ):
        if not folder.is_dir():
            build_shards(source, _make_build_options(source, data, tokenizer), folder, progress)
    return folder


def _make_build_options(source: Source, data: DataConfig, tokenizer: Tokenizer) -> BuildOptions:
    return BuildOptions(
        tokenizer,
        data.val_fraction,
        data.max_tokens,
        _get_cache_settings(data, tokenizer),
        min_document_bytes=data.min_document_bytes,
        by_position=_is_by_position(source.identity),
    )


def _make_cache_key(identity: dict[str, Any], settings: dict[str, Any]) -> str:
    content = json.dumps([shards.FORMAT, identity, settings], sort_keys=True)
    return f"{identity['source']}-{hashlib.sha256(content.encode()).hexdigest()[:16]}"


@contextmanager
def _hold_lock(path: Path, tick: Callable[[], None]) -> Iterator[None]:
    require("filelock")
    import filelock

    # The operating system releases the lock of a process that dies; the lock file may remain.
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


def _is_by_position(source_identity: dict[str, Any]) -> bool:
    return source_identity.get("split") == BY_POSITION


def _check_source_length(source: Source, data: DataConfig, tokenizer: Tokenizer, n_required: int) -> None:
    """Raise `DataError` if a split of the source has fewer than `n_required` tokens; read no more than this needs."""
    counter = SplitCounter(_make_build_options(source, data, tokenizer), n_enough=n_required)
    for document in source.documents():
        for _ in counter.add(document.text):
            pass
        if counter.is_full or not _find_short_split(counter.counts, n_required):
            break
    _check_split_lengths(counter.counts, data, n_required, source.identity, is_one_text=counter.is_one_text)


def _find_short_split(counts: dict[str, Any], n_required: int) -> str | None:
    return next((split for split in ("validation", "train") if counts["splits"][split]["tokens"] < n_required), None)


def _check_split_lengths(
    counts: dict[str, Any],
    data: DataConfig,
    n_required: int,
    source_identity: dict[str, Any],
    *,
    is_one_text: bool = False,
) -> None:
    """`counts`: a manifest, or what `SplitCounter` counted."""
    short = _find_short_split(counts, n_required)
    if short is None:
        return
    name = f"data.path = {data.path!r}" if data.path else f"data.source = {data.source}"
    documents = sum(split["documents"] for split in counts["splits"].values())
    if documents == 0 and counts.get("short_documents"):
        raise DataError(
            f"{name}: all {counts['short_documents']} documents are shorter than "
            f"data.min_document_bytes = {data.min_document_bytes}; lower it or give longer documents"
        )
    if documents == 0:
        raise DataError(f"{name}: all documents are empty; give documents with text")
    if is_one_text:
        raise DataError(
            f"{name}: all {documents} documents are copies of one text, and all copies of a text are in the same split; "
            "give different texts, or a single copy, which is split by position"
        )
    if _is_by_position(source_identity):
        origin, remedy = "a single document", _suggest_position(counts, data.val_fraction, n_required)
    else:
        origin = f"{documents} documents"
        remedy = (
            _suggest_fraction(counts, n_required)
            if short == "validation"
            else "give more text, lower train.seq_len, or lower data.val_fraction"
        )
    split = "training" if short == "train" else short
    raise DataError(
        f"{name}: the {split} split has {counts['splits'][short]['tokens']} tokens of {origin}, "
        f"a sequence needs {n_required} (data.val_fraction = {data.val_fraction:g}); {remedy}"
    )


def _suggest_fraction(counts: dict[str, Any], needed: int) -> str:
    """Suggest the smallest `data.val_fraction` that is large enough, if it leaves enough for training."""
    next_in_line = sorted((-negative, tokens) for negative, tokens in counts["next_in_line"])
    n_train_tokens, n_validation_tokens = (counts["splits"][split]["tokens"] for split in shards.SPLITS)
    for fraction, tokens in next_in_line:
        n_validation_tokens, n_train_tokens = n_validation_tokens + tokens, n_train_tokens - tokens
        if n_train_tokens < needed:
            break
        if n_validation_tokens >= needed:
            # Round up, so that the document at `fraction` itself is held out.
            return f"give more documents, or set data.val_fraction: {min(fraction + 1e-4, 0.9999):.4f}"
    return "give more documents (a .txt is one, a line of .jsonl is one), or lower train.seq_len"


def _suggest_position(counts: dict[str, Any], val_fraction: float, needed: int) -> str:
    """Suggest a `data.val_fraction` at which both parts of a single document are long enough, if there is one."""
    train, held_out = (counts["splits"][split]["tokens"] for split in shards.SPLITS)
    # Assume the mean number of tokens per character, or fewer if the short part has fewer.
    share = needed / (train + held_out)
    if held_out < needed:
        fraction = math.ceil(1.02e4 * max(share, val_fraction * needed / held_out if held_out else 0)) / 1e4
    else:
        fraction = 1 - math.ceil(1.02e4 * max(share, (1 - val_fraction) * needed / train if train else 0)) / 1e4
    # Each part must have room for `needed` tokens at this fraction.
    if (train + held_out) * min(fraction, 1 - fraction) < needed:
        return "the text is too short for a sequence in each split; give more text, or lower train.seq_len"
    return f"set data.val_fraction: {fraction:.4f}, give more text, or lower train.seq_len"
