import errno
import io
import itertools
import json
import multiprocessing
import os
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nsa_lab.config import DataConfig
from nsa_lab.data import (
    BuildProgress,
    ByteTokenizer,
    DataError,
    Document,
    ProgressMeter,
    check,
    compute_split_fraction,
    prepare,
    shards,
)
from nsa_lab.data.build_shards import BuildOptions, build_shards
from nsa_lab.data.dataset import describe_split
from nsa_lab.data.shards import TokenStore, read_manifest
from nsa_lab.runs.summary import format_fill_progress

SEPARATOR = ByteTokenizer.separator


def local(folder: Path, **options: object) -> DataConfig:
    return DataConfig(source="local", path=str(folder), **{"val_fraction": 0.3, **options})


def documents_of(tokens: TokenStore) -> list[str]:
    content = tokens.read(0, len(tokens)).astype(np.uint8).tobytes()
    assert content.endswith(bytes([SEPARATOR]))
    return [part.decode() for part in content.split(bytes([SEPARATOR]))[:-1]]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


class ListSource:
    def __init__(self, texts: list[str], fail_at: int | None = None) -> None:
        self.identity = {"source": "list"}
        self.texts = texts
        self.fail_at = fail_at
        self.asked: list[int] = []

    def documents(self, cursor: dict | None = None) -> Iterator[Document]:
        first = cursor["n"] if cursor else 0
        self.asked.append(first)
        for index in range(first, len(self.texts)):
            if index == self.fail_at:
                raise ConnectionError("gone")
            yield Document(self.texts[index], {"n": index + 1})


def plan(**options: object) -> BuildOptions:
    return BuildOptions(
        **{"tokenizer": ByteTokenizer(), "val_fraction": 0.3, "max_tokens": None, "settings": {}, **options}
    )


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


@pytest.mark.parametrize("damage", ["flip", "truncate", "delete", "manifest"])
def test_damage_is_detected_and_reported(corpus: Path, tmp_path: Path, refuses, damage: str) -> None:
    dataset = prepare(local(corpus), cache=tmp_path / "cache")
    path = dataset.folder / ("manifest.json" if damage == "manifest" else "train-00000.bin")
    content = bytearray(path.read_bytes())
    if damage == "flip":
        content[1234] ^= 1
    elif damage == "manifest":
        content = content.replace(b'"tokens": ', b'"tokens": 1')
    else:
        del content[-1]
    path.write_bytes(content)
    if damage == "delete":
        path.unlink()
    refuses(lambda: prepare(local(corpus), cache=tmp_path / "cache"), path, "delete the folder")


def test_interruptions_change_nothing(tmp_path: Path) -> None:
    texts = [f"{i} " * (i % 17 + 1) for i in range(300)]
    build_shards(ListSource(texts), plan(shard_bytes=500), tmp_path / "whole")
    for fail_at in (40, 90, 91, 250):
        with pytest.raises(ConnectionError):
            build_shards(ListSource(texts, fail_at), plan(shard_bytes=500), tmp_path / "broken")
        assert not (tmp_path / "broken").exists()
    source = ListSource(texts)
    build_shards(source, plan(shard_bytes=500), tmp_path / "broken")
    assert source.asked[0] > 200
    assert contents(tmp_path / "broken") == contents(tmp_path / "whole")


def test_a_build_stopped_at_the_cap_adds_nothing_on_resume(tmp_path: Path) -> None:
    texts = [f"{i:9}" for i in range(60)]
    capped = plan(shard_bytes=1, max_tokens=100)
    build_shards(ListSource(texts), capped, tmp_path / "whole")

    def stop(progress: BuildProgress) -> None:
        if progress.train_tokens >= 100:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_shards(ListSource(texts), capped, tmp_path / "broken", stop)
    build_shards(ListSource(texts), capped, tmp_path / "broken")
    assert contents(tmp_path / "broken") == contents(tmp_path / "whole")
    assert read_manifest(tmp_path / "whole")["splits"]["train"]["tokens"] == 100, "a cap that is met exactly is met"


def test_next_in_line_records_the_closest_validation_candidates(tmp_path: Path) -> None:
    texts = [f"document {i}" for i in range(60)]
    build_shards(ListSource(texts), plan(), tmp_path / "key")
    trained = sorted([compute_split_fraction(text), len(text) + 1] for text in texts if compute_split_fraction(text) >= 0.3)
    told = sorted([-negative, tokens] for negative, tokens in read_manifest(tmp_path / "key")["next_in_line"])
    assert told == trained[:16]


def test_every_shard_has_its_own_file(tmp_path: Path) -> None:
    """Also if a part has documents of only one split."""
    build_shards(ListSource([f"document {i}" for i in range(20)]), plan(shard_bytes=1), tmp_path / "key")
    splits = read_manifest(tmp_path / "key")["splits"].values()
    assert len({shard["file"] for split in splits for shard in split["shards"]}) == 20


def test_document_length_is_measured_in_bytes(tmp_path: Path) -> None:
    told: list[BuildProgress] = []
    texts = ["é" * 6, "e" * 6] + ["e" * n for n in range(10, 40)]
    build_shards(ListSource(texts), plan(min_document_bytes=10), tmp_path / "key", told.append)
    manifest = read_manifest(tmp_path / "key")
    train, held_out = (manifest["splits"][split] for split in shards.SPLITS)
    assert manifest["short_documents"] == 1 and train["documents"] + held_out["documents"] == 31
    assert told[-1].train_tokens == train["tokens"] and told[-1].tokens == train["tokens"] + held_out["tokens"]
    assert held_out["tokens"] > 0


def _fill_and_die(texts: list[str], die_at: int, folder: Path) -> None:
    class Dies(ListSource):
        def documents(self, cursor: dict | None = None) -> Iterator[Document]:
            for document in super().documents(cursor):
                if document.cursor["n"] == die_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                yield document

    build_shards(Dies(texts), plan(shard_bytes=500), folder)


@pytest.mark.slow
def test_a_killed_build_continues(tmp_path: Path) -> None:
    texts = [f"{i} " * (i % 17 + 1) for i in range(300)]
    build_shards(ListSource(texts), plan(shard_bytes=500), tmp_path / "whole")
    for die_at in (5, 120, 121, 240):
        victim = multiprocessing.get_context("fork").Process(
            target=_fill_and_die, args=(texts, die_at, tmp_path / "killed")
        )
        victim.start()
        victim.join(30)
        assert victim.exitcode == -signal.SIGKILL and not (tmp_path / "killed").exists()
    source = ListSource(texts)
    build_shards(source, plan(shard_bytes=500), tmp_path / "killed")
    assert source.asked[0] > 200
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")


def test_a_damaged_record_of_progress_starts_the_build_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    build_shards(ListSource(["one", "two"]), plan(), tmp_path / "whole")
    for content in (b"", b"\0\0", b"[1]", b"{}", b'{"cursor": 3, "splits": 4}', b'"text"'):
        (tmp_path / "odd.partial").mkdir()
        (tmp_path / "odd.partial" / "progress.json").write_bytes(content)
        build_shards(ListSource(["one", "two"]), plan(), tmp_path / "odd")
        assert contents(tmp_path / "odd") == contents(tmp_path / "whole"), content
        shutil.rmtree(tmp_path / "odd")
    assert caplog.text.count("progress.json: damaged and ignored") == 6


def test_a_cache_folder_of_another_kind_is_named(corpus: Path, tmp_path: Path, refuses) -> None:
    folder = prepare(local(corpus), 256, 32, cache=tmp_path / "cache").folder
    for put in (lambda: folder.write_text(""), lambda: folder.symlink_to("absent")):
        folder.rename(tmp_path / "saved")
        put()
        refuses(lambda: prepare(local(corpus), 256, 32, cache=tmp_path / "cache"), f"{folder}: expected a folder of token")
        folder.unlink()
        (tmp_path / "saved").rename(folder)


def test_a_manifest_without_permission_is_not_called_damaged(
    corpus: Path, tmp_path: Path, refuses, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = prepare(local(corpus), 256, 32, cache=tmp_path / "cache").folder

    def refuse(path: Path, **options: object) -> str:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_text", refuse)
    refuses(lambda: read_manifest(folder), "manifest.json: permission denied; let its owner open")


def test_a_build_without_a_complete_part_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConnectionError):
        build_shards(ListSource(["a", "b"], fail_at=1), plan(), tmp_path / "key")
    assert list(tmp_path.iterdir()) == []


def test_progress_can_stop_a_build(tmp_path: Path, corpus: Path) -> None:
    def stop(state: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(local(corpus), progress=stop, cache=tmp_path / "cache")
    assert len(prepare(local(corpus), cache=tmp_path / "cache").train) > 0


def test_a_full_disk_is_an_error_with_a_remedy(tmp_path: Path, refuses) -> None:
    class Full(ListSource):
        def documents(self, cursor: dict | None = None) -> Iterator[Document]:
            raise OSError(28, "No space left on device")
            yield

    refuses(lambda: build_shards(Full([]), plan(), tmp_path / "key"), "disk is full", "data.max_tokens")


def _prepare_in_process(corpus: str, cache: str, results: "multiprocessing.Queue") -> None:
    phases = set()
    dataset = prepare(local(Path(corpus)), progress=lambda state: phases.add(state.phase), cache=Path(cache))
    results.put((dataset.identity, "filling" in phases))


def test_two_processes_build_once(corpus: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    workers = [
        context.Process(target=_prepare_in_process, args=(str(corpus), str(tmp_path / "cache"), results)) for _ in range(3)
    ]
    for worker in workers:
        worker.start()
    answers = [results.get(timeout=30) for _ in workers]
    for worker in workers:
        worker.join(10)
    assert len({identity for identity, _ in answers}) == 1
    assert sum(filled for _, filled in answers) == 1


@pytest.mark.parametrize("seq_len", [64, 300])
def test_a_small_split_suggests_a_val_fraction(tmp_path: Path, refuses, seq_len: int) -> None:
    """The suggested fraction holds out one document, or enough for one sequence."""
    folder = tmp_path / "c"
    folder.mkdir()
    for index in range(4):
        (folder / f"{index}.txt").write_text(f"document {index} " * 20)
    message = refuses(
        lambda: prepare(local(folder, val_fraction=1e-6), seq_len=seq_len, cache=tmp_path / "cache"),
        "the validation split has 0 tokens of 4 documents",
        f"needs {seq_len + 1}",
        "data.val_fraction: 0.",
    )
    fraction = float(message.rsplit(" ", 1)[1])
    dataset = prepare(local(folder, val_fraction=fraction), seq_len=seq_len, cache=tmp_path / "cache")
    assert len(dataset.validation) > seq_len


def test_the_suggested_fraction_accounts_for_copies_of_a_text(tmp_path: Path, refuses) -> None:
    """The copies outnumber the recorded candidates, and all of them are held out together."""
    folder = tmp_path / "c"
    folder.mkdir()
    texts = [f"document {i} " * 20 for i in range(4)]
    first = min((str(i) for i in range(100)), key=compute_split_fraction)
    assert compute_split_fraction(first) < min(map(compute_split_fraction, texts))
    for index, text in enumerate([*[first] * 20, *texts]):
        (folder / f"{index}.txt").write_text(text)
    message = refuses(
        lambda: prepare(local(folder, val_fraction=1e-6), seq_len=100, cache=tmp_path / "cache"), "data.val_fraction: 0."
    )
    fraction = float(message.rsplit(" ", 1)[1])
    assert len(prepare(local(folder, val_fraction=fraction), seq_len=100, cache=tmp_path / "cache").validation) > 100


@pytest.mark.parametrize("short", ["validation", "training"])
def test_a_split_needs_exactly_one_sequence(tmp_path: Path, refuses, short: str) -> None:
    texts = [f"document {i} " * (10 + i) for i in range(20)]
    held_out, trained = next(
        (a, b)
        for a in texts
        for b in texts
        if compute_split_fraction(a) < 0.3 <= compute_split_fraction(b) and (len(a) < len(b)) == (short == "validation")
    )
    folder = tmp_path / "c"
    folder.mkdir()
    (folder / "a.txt").write_text(held_out)
    (folder / "b.txt").write_text(trained)
    least = min(len(held_out), len(trained)) + 1
    found = prepare(local(folder), seq_len=least - 1, cache=tmp_path / "cache")
    assert min(len(found.train), len(found.validation)) == least
    refuses(
        lambda: prepare(local(folder), seq_len=least, cache=tmp_path / "cache"),
        f"the {short} split has {least} tokens",
        f"a sequence needs {least + 1}",
    )


def test_lengths_are_checked(corpus: Path, tmp_path: Path, refuses) -> None:
    cache = tmp_path / "cache"
    pair = tmp_path / "two.jsonl"
    pair.write_text('{"text": "one document"}\n{"text": "and another"}\n')
    refuses(
        lambda: prepare(local(pair, val_fraction=1e-6), seq_len=20, cache=cache),
        "the validation split has 0 tokens",
        "give more documents",
    )
    refuses(
        lambda: prepare(local(pair, val_fraction=0.999999), cache=cache),
        "the training split has 0 tokens",
        "lower data.val_fraction",
    )
    refuses(lambda: prepare(local(corpus), seq_len=10**6, cache=cache), "lower train.seq_len")


SINGLE = {
    "input.txt": lambda text: text.encode(),
    "one.jsonl": lambda text: json.dumps({"text": text}).encode() + b'\n\n{"text": ""}\n',
    "one.parquet": lambda text: write_parquet([text]),
}


def write_parquet(texts: list[str]) -> bytes:
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), buffer)
    return buffer.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize("name", SINGLE)
def test_a_single_document_is_split_by_position(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    text = "".join(f"línea {i}\r\n" for i in range(999))
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / name).write_bytes(SINGLE[name](text))
    data = local(tmp_path / "c", val_fraction=0.1)
    with caplog.at_level("INFO", "nsa_lab.data"):
        dataset = prepare(data, seq_len=512, cache=tmp_path / "cache")
    (trained,), (held_out,) = documents_of(dataset.train), documents_of(dataset.validation)
    assert trained + held_out == text
    assert len(held_out) == pytest.approx(0.1 * len(text), abs=1)
    assert "split by position: its last 0.1 are" in caplog.text
    identity = check(data, seq_len=512)
    assert describe_split(identity, 0.1) and identity == dataset.manifest["source"]
    (tmp_path / "c" / "second.txt").write_text("another document")
    identity = check(data)
    assert "split" not in identity and describe_split(identity, 0.1) is None


def test_check_finds_short_texts_without_a_build(tmp_path: Path, refuses, save_tokenizer) -> None:
    """Every text that `prepare` refuses for its length is refused by `check`, and no other; the remedy works."""
    folder, cache = tmp_path / "c", tmp_path / "cache"
    folder.mkdir()
    letters = {"ascii": "plain ", "late": "a" * 30 + "é", "unicode": "日本語"}
    n_refused = n_fixed = 0
    for (kind, letter), length, fraction, seq_len in itertools.product(
        letters.items(), (3, 90, 700), (1e-5, 0.02, 0.3, 0.97), (16, 64)
    ):
        (folder / "input.txt").write_text((letter * length)[:length])
        data = local(folder, val_fraction=fraction)
        try:
            prepare(data, seq_len=seq_len, cache=cache)
        except DataError as error:
            message = str(error)
            assert refuses(lambda data=data, n=seq_len: check(data, seq_len=n)) == message
            n_refused += 1
            if found := re.search(r"set data.val_fraction: ([\d.]+)", message):
                check(local(folder, val_fraction=float(found[1])), seq_len=seq_len)
                n_fixed += 1
            else:
                assert "too short for a sequence in each split" in message
                assert len((letter * length)[:length].encode()) < 2.3 * (seq_len + 1), (kind, message)
        else:
            check(data, seq_len=seq_len)
    assert n_refused > 20 and n_fixed > 10


def test_check_reads_no_more_than_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "c"
    folder.mkdir()
    for index in range(300):
        (folder / f"{index:03}.txt").write_text(f"document {index} " * 20)
    read: list[int] = []
    encode = ByteTokenizer.encode
    monkeypatch.setattr(ByteTokenizer, "encode", lambda self, text: read.append(len(text)) or encode(self, text))
    check(local(folder), seq_len=128)
    assert 0 < len(read) < 30
    read.clear()
    (tmp_path / "long.txt").write_text("word " * 100_000)
    check(local(tmp_path / "long.txt"), seq_len=128)
    assert sum(read) < 50_000


@pytest.mark.parametrize("fraction", [1e-6, 0.3, 0.9999])
def test_identical_files_are_one_text(tmp_path: Path, refuses, fraction: float) -> None:
    folder = tmp_path / "c"
    folder.mkdir()
    for index in range(5):
        (folder / f"{index}.txt").write_text("the same words " * 90)
    data = local(folder, val_fraction=fraction)
    for call in (lambda: check(data, seq_len=64), lambda: prepare(data, seq_len=64, cache=tmp_path / "cache")):
        message = refuses(call, "all 5 documents are copies of one text", "or a single copy", str(folder))
        assert "val_fraction" not in message
    for index in range(1, 5):
        (folder / f"{index}.txt").unlink()
    check(local(folder, val_fraction=0.3), seq_len=64)


def test_the_suggested_fraction_keeps_enough_for_training(tmp_path: Path, refuses) -> None:
    """Copies move together: a fraction that leaves the training split too short is not suggested."""
    folder = tmp_path / "c"
    folder.mkdir()
    often, once = sorted(("a text " * 20, "another text " * 9), key=compute_split_fraction)
    for index, text in enumerate([often] * 6 + [once]):
        (folder / f"{index}.txt").write_text(text)
    data = local(folder, val_fraction=compute_split_fraction(often) / 2)
    check(local(folder, val_fraction=compute_split_fraction(once)), seq_len=100)
    message = refuses(lambda: check(data, seq_len=100), "data.val_fraction: 0.")
    check(local(folder, val_fraction=float(message.rsplit(" ", 1)[1])), seq_len=100)
    assert "data.val_fraction: " not in refuses(lambda: check(data, seq_len=130))


def test_a_vocabulary_smaller_than_the_tokenizers_raises(corpus: Path, tmp_path: Path, refuses) -> None:
    refuses(lambda: prepare(local(corpus), 255, cache=tmp_path), "model.vocab_size = 255", "set model.vocab_size: 256")
    assert prepare(local(corpus), 256, cache=tmp_path).vocab_size == 256


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


def test_a_run_continues_from_the_cache_if_its_source_is_missing(corpus: Path, tmp_path: Path) -> None:
    cache, data = tmp_path / "cache", local(corpus)
    first = prepare(data, cache=cache)
    prepare(local(corpus, val_fraction=0.4), cache=cache)
    corpus.rename(tmp_path / "away")
    with pytest.raises(DataError, match="nothing at"):
        prepare(data, cache=cache)
    with pytest.raises(DataError, match="nothing at"):
        prepare(data, identity="0" * 64, cache=cache)
    with pytest.raises(DataError, match="nothing at"):
        prepare(local(corpus, val_fraction=0.1), identity=first.identity, cache=cache)
    again = prepare(data, identity=first.identity, cache=cache)
    assert again.folder == first.folder and again.identity == first.identity
    assert "nothing at" in again.source_error and first.source_error is None
    shard = next(again.folder.glob("train-*.bin"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    with pytest.raises(DataError, match="sha256"):
        prepare(data, identity=first.identity, cache=cache)


def test_without_a_source_every_shard_is_hashed_whatever_its_size(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, data = tmp_path / "cache", local(corpus)
    first = prepare(data, cache=cache)
    monkeypatch.setattr(shards, "MAX_BYTES_HASHED_AT_OPEN", 0)
    hashed = []
    digest = shards.hash_file
    monkeypatch.setattr(shards, "hash_file", lambda path: hashed.append(path.name) or digest(path))
    prepare(data, identity=first.identity, cache=cache)
    assert not hashed
    corpus.rename(tmp_path / "away")
    prepare(data, identity=first.identity, cache=cache)
    assert set(hashed) == {path.name for path in first.folder.glob("*.bin")}


def test_progress_reports_rate_and_remaining_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("nsa_lab.data.build_shards.time.monotonic", lambda: now[0])
    told = ProgressMeter(interval_s=5.0)
    assert told.take_report() is None
    assert not told.observe(BuildProgress("waiting for the source", 0, 0, None))
    assert format_fill_progress(told.take_report()) == "waiting for the source"
    now[0] = 110.0
    # Documents of an earlier filling that was interrupted are not this one's speed.
    assert told.observe(BuildProgress("filling", 1_010_000, 100, 5_000_000, 1_000_000, 1_000_000))
    assert told.take_report()["bytes_per_s"] is None
    now[0] = 112.0
    assert told.observe(BuildProgress("filling", 2_020_000, 200, 5_000_000, 2_000_000, 2_000_000))
    assert not told.observe(BuildProgress("filling", 2_020_000, 200, 5_000_000, 2_000_000, 2_000_000))
    assert told.take_report() is None, "too soon"
    now[0] = 120.0
    fields = told.take_report()
    assert fields["bytes_per_s"] == 100_000 and fields["left_s"] == 30.0
    assert format_fill_progress(fields) == "filling: 200 documents, 2.0 MB, 0.1 MB/s, 30 s left"


def test_signed_manifest_that_lies_is_refused(tmp_path: Path) -> None:
    from nsa_lab.data.shards import MANIFEST, compute_content_identity

    for number in range(6):
        (tmp_path / f"{number}.txt").write_text(f"document {number} " * 400)
    data = DataConfig(source="local", path=str(tmp_path), val_fraction=0.3)
    prepare(data, 256, 32, cache=tmp_path / "cache")
    path = next((tmp_path / "cache").glob(f"*/{MANIFEST}"))
    intact = path.read_text()
    lies = [{"dtype": dtype} for dtype in ("O", "<u4", "<f2", 7)] + [{"source": None}]
    lies += [{"file": "../other.bin"}, {"file": None}, {"bytes": None}, {"bytes": 1}, {"tokens": 10**9}]
    for lie in lies:
        manifest = json.loads(intact)
        target = manifest if lie.keys() & manifest.keys() else manifest["splits"]["train"]["shards"][0]
        target.update(lie)
        path.write_text(json.dumps({**manifest, "identity": compute_content_identity(manifest)}))
        with pytest.raises(DataError, match="damaged"):
            prepare(data, 256, 32, cache=tmp_path / "cache")
    path.write_text("[" * 200_000)
    with pytest.raises(DataError, match="damaged"):
        prepare(data, 256, 32, cache=tmp_path / "cache")
