"""Shards have all text of the documents, are split by content, and are identified by content and settings."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from shard_inputs import SEPARATOR, ListSource, documents_of, local, plan

from nsa_lab.config import DataConfig
from nsa_lab.data import (
    BuildProgress,
    compute_split_fraction,
    prepare,
    shards,
)
from nsa_lab.data.build_shards import build_shards
from nsa_lab.data.shards import read_manifest


def test_nothing_is_lost_and_documents_are_separated(corpus: Path, tmp_path: Path) -> None:
    dataset = prepare(local(corpus), 256, 32, cache=tmp_path / "cache")
    written = [path.read_text(encoding="utf-8") for path in sorted(corpus.iterdir())]
    train, held_out = documents_of(dataset.train), documents_of(dataset.validation)
    assert train == [text for text in written if compute_split_fraction(text) >= 0.3]
    assert held_out == [text for text in written if compute_split_fraction(text) < 0.3]
    assert train and held_out
    assert len(dataset.train) + len(dataset.validation) == sum(len(text.encode()) + 1 for text in written)
    splits = dataset.manifest["splits"]
    assert [splits[split]["documents"] for split in ("train", "validation")] == [len(train), len(held_out)]
    assert dataset.bytes_per_token == 1.0


@pytest.mark.slow
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    texts=st.lists(st.text(st.characters(codec="utf-8"), max_size=30), max_size=40),
    shard_bytes=st.integers(1, 200),
    max_tokens=st.none() | st.integers(1, 300),
)
def test_conservation_for_any_documents(
    tmp_path_factory, texts: list[str], shard_bytes: int, max_tokens: int | None
) -> None:
    folder = tmp_path_factory.mktemp("fill") / "key"
    build_shards(ListSource(texts), plan(shard_bytes=shard_bytes, max_tokens=max_tokens), folder)
    manifest = read_manifest(folder)
    kept: dict[str, list[str]] = {"train": [], "validation": []}
    for text in filter(None, texts):
        if max_tokens is not None and sum(len(t.encode()) + 1 for t in kept["train"]) >= max_tokens:
            break
        kept["validation" if compute_split_fraction(text) < 0.3 else "train"].append(text)
    for split, expected in kept.items():
        content = b"".join((folder / shard["file"]).read_bytes() for shard in manifest["splits"][split]["shards"])
        assert content == b"".join(text.encode() + bytes([SEPARATOR]) for text in expected)
        assert manifest["splits"][split]["tokens"] == len(content)
        assert manifest["splits"][split]["documents"] == len(expected)


def test_copies_of_a_text_are_in_the_same_split(tmp_path: Path) -> None:
    texts = [f"text {i % 50}" for i in range(200)]
    build_shards(ListSource(texts), plan(), tmp_path / "key")
    content = {
        split: (tmp_path / "key" / f"{split}-00000.bin").read_bytes().split(b"\xff")[:-1]
        for split in ("train", "validation")
    }
    assert not set(content["train"]) & set(content["validation"])
    assert sum(map(len, content.values())) == 200


def test_files_named_for_a_split_are_still_split_by_hash(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    folder.mkdir()
    for split in ("train", "validation"):
        lines = [json.dumps({"text": f"{split} {i}"}) for i in range(40)]
        (folder / f"{split}-00000.jsonl").write_text("\n".join(lines))
    dataset = prepare(local(folder), cache=tmp_path / "cache")
    held_out = documents_of(dataset.validation)
    assert {text.split()[0] for text in held_out} == {"train", "validation"}
    assert all(compute_split_fraction(text) < 0.3 for text in held_out)


def test_the_token_cap_ends_at_a_document(corpus: Path, tmp_path: Path) -> None:
    dataset = prepare(local(corpus, max_tokens=1000), cache=tmp_path / "cache")
    last = documents_of(dataset.train)[-1]
    assert 1000 <= len(dataset.train) < 1000 + len(last.encode()) + 1


def test_shards_are_built_once_and_reused(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = prepare(local(corpus), cache=tmp_path / "cache")
    monkeypatch.setattr("nsa_lab.data.dataset.build_shards", lambda *_: pytest.fail("built twice"))
    second = prepare(local(corpus), cache=tmp_path / "cache")
    assert first.identity == second.identity and len(first.identity) == 64
    monkeypatch.undo()
    assert prepare(local(corpus, val_fraction=0.4), cache=tmp_path / "cache").folder != first.folder


def test_other_settings_have_another_cache_folder(
    corpus: Path, tmp_path: Path, save_tokenizer: Callable[..., Path]
) -> None:
    tokenizer = str(save_tokenizer(tmp_path, "<|endoftext|>"))
    settings = ({}, {"tokenizer": tokenizer}, {"val_fraction": 0.4}, {"max_tokens": 10**6}, {"min_document_bytes": 1})
    filled = [prepare(local(corpus, **options), cache=tmp_path / "cache").folder for options in settings]
    assert len(set(filled)) == len(settings)
    assert filled == [prepare(local(corpus, **options), cache=tmp_path / "cache").folder for options in settings]


def test_identity_depends_on_content_not_location(corpus: Path, tmp_path: Path) -> None:
    here = prepare(local(corpus), cache=tmp_path / "cache")
    there = prepare(local(corpus.rename(tmp_path / "moved")), cache=tmp_path / "cache")
    assert here.folder != there.folder and here.identity == there.identity


def test_a_rewritten_file_is_read_again_even_with_equal_size(corpus: Path, tmp_path: Path) -> None:
    before = prepare(local(corpus), cache=tmp_path / "cache")
    file = next(
        path for path in sorted(corpus.iterdir()) if compute_split_fraction(path.read_text(encoding="utf-8")) >= 0.3
    )
    changed = file.stat()
    file.write_bytes(file.read_bytes()[::-1] if file.read_bytes().isascii() else b"x" * changed.st_size)
    os.utime(file, ns=(changed.st_atime_ns, changed.st_mtime_ns + 1))
    assert file.stat().st_size == changed.st_size
    assert prepare(local(corpus), cache=tmp_path / "cache").identity != before.identity


def test_identity_covers_both_splits(tmp_path: Path) -> None:
    texts = [f"document {i}" for i in range(40)]
    held_out, trained = (
        next(t for t in texts if compute_split_fraction(t) < 0.3),
        next(t for t in texts if compute_split_fraction(t) >= 0.3),
    )
    identities = set()
    for name, left_out in (("whole", None), ("validation", held_out), ("training", trained)):
        build_shards(ListSource([text for text in texts if text != left_out]), plan(), tmp_path / name)
        identities.add(read_manifest(tmp_path / name)["identity"])
    assert len(identities) == 3


def test_next_in_line_records_the_closest_validation_candidates(tmp_path: Path) -> None:
    texts = [f"document {i}" for i in range(60)]
    build_shards(ListSource(texts), plan(), tmp_path / "key")
    trained = sorted([compute_split_fraction(text), len(text) + 1] for text in texts if compute_split_fraction(text) >= 0.3)
    queue = sorted([-negative, tokens] for negative, tokens in read_manifest(tmp_path / "key")["next_in_line"])
    assert queue == trained[:16]


def test_every_shard_has_its_own_file(tmp_path: Path) -> None:
    """Also if a part has documents of only one split."""
    build_shards(ListSource([f"document {i}" for i in range(20)]), plan(shard_bytes=1), tmp_path / "key")
    splits = read_manifest(tmp_path / "key")["splits"].values()
    assert len({shard["file"] for split in splits for shard in split["shards"]}) == 20


def test_document_length_is_measured_in_bytes(tmp_path: Path) -> None:
    reports: list[BuildProgress] = []
    texts = ["é" * 6, "e" * 6] + ["e" * n for n in range(10, 40)]
    build_shards(ListSource(texts), plan(min_document_bytes=10), tmp_path / "key", reports.append)
    manifest = read_manifest(tmp_path / "key")
    train, held_out = (manifest["splits"][split] for split in shards.SPLITS)
    assert manifest["short_documents"] == 1 and train["documents"] + held_out["documents"] == 31
    assert reports[-1].train_tokens == train["tokens"] and reports[-1].tokens == train["tokens"] + held_out["tokens"]
    assert held_out["tokens"] > 0


def test_token_dtype_is_the_smallest_that_holds_every_id() -> None:
    sizes = {256: "|u1", 257: "<u2", 1 << 16: "<u2", (1 << 16) + 1: "<u4", 1 << 17: "<u4"}
    assert {size: shards.get_token_dtype(size).str for size in sizes} == sizes


def test_a_file_tokenizer_writes_uint16_shards(corpus: Path, tmp_path: Path, save_tokenizer) -> None:
    data = local(corpus, tokenizer=str(save_tokenizer(tmp_path, "<|endoftext|>")))
    dataset = prepare(data, cache=tmp_path / "cache")
    assert dataset.manifest["dtype"] == "<u2" and dataset.vocab_size > 256
    ids = dataset.train.read(0, len(dataset.train))
    assert (ids == dataset.tokenizer.separator).sum() == dataset.manifest["splits"]["train"]["documents"]
    written = [path.read_text(encoding="utf-8") for path in sorted(corpus.iterdir())]
    assert dataset.tokenizer.decode(ids) == "".join(
        text + "<|endoftext|>" for text in written if compute_split_fraction(text) >= 0.3
    )
    held_out = [text.encode() for text in written if compute_split_fraction(text) < 0.3]
    assert dataset.bytes_per_token == sum(len(text) + 1 for text in held_out) / len(dataset.validation) > 1
    synthetic = DataConfig(source="synthetic", tokenizer=data.tokenizer)
    with pytest.raises(ValueError, match="yields bytes, not text"):
        prepare(synthetic, cache=tmp_path / "cache")
