"""Texts that are too short or equal are refused with a remedy, without a build."""

from __future__ import annotations

import io
import itertools
import json
import re
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from shard_inputs import documents_of, local

from nsa_lab.data import (
    ByteTokenizer,
    DataError,
    check,
    compute_split_fraction,
    prepare,
)
from nsa_lab.data.dataset import describe_split

SINGLE = {
    "input.txt": lambda text: text.encode(),
    "one.jsonl": lambda text: json.dumps({"text": text}).encode() + b'\n\n{"text": ""}\n',
    "one.parquet": lambda text: write_parquet([text]),
}


def write_parquet(texts: list[str]) -> bytes:
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), buffer)
    return buffer.getvalue()


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
