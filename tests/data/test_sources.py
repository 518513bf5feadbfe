import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nsa_lab.config import DataConfig
from nsa_lab.data import check, open_source
from nsa_lab.data.sources.stdlib import StdlibSource


def local(path: Path, **settings: object) -> DataConfig:
    return DataConfig(source="local", path=str(path), **settings)


def texts(data: DataConfig) -> list[str]:
    return [document.text for document in open_source(data).documents()]


def write_jsonl(path: Path, *records: object) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def write_parquet(path: Path, **columns: list) -> Path:
    pq.write_table(pa.table(columns), path, row_group_size=3)
    return path


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    (tmp_path / "b").mkdir()
    (tmp_path / "a.txt").write_bytes("one\r\ntwo ☕".encode())
    write_jsonl(tmp_path / "b" / "c.jsonl", {"text": "three"}, {"text": "four\nlines", "other": 1}, {"text": None})
    write_parquet(tmp_path / "b" / "d.parquet", text=[f"row {i}" for i in range(10)], source=["s"] * 10)
    (tmp_path / "notes.md").write_text("not a document")
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden" / "x.txt").write_text("not a document")
    return tmp_path


MIXED = ["one\r\ntwo ☕", "three", "four\nlines", "", *[f"row {i}" for i in range(10)]]


def test_a_folder_is_read_whole_and_in_order(mixed: Path) -> None:
    assert texts(local(mixed)) == MIXED


def test_a_glob_and_a_single_file(mixed: Path) -> None:
    assert texts(local(mixed / "**" / "*.jsonl")) == ["three", "four\nlines", ""]
    assert texts(local(mixed / "a.txt")) == MIXED[:1]


def test_a_byte_order_mark_is_dropped(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", {"text": "one"}, {"text": "two"})
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert texts(local(path)) == ["one", "two"]
    (tmp_path / "x.txt").write_bytes(b"\xef\xbb\xbfone")
    assert texts(local(tmp_path / "x.txt")) == ["one"]


def test_a_relative_path_resolves_from_the_working_directory(mixed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(mixed)
    assert texts(local(Path("a.txt"))) == MIXED[:1]


def test_a_relative_path_resolves_from_the_project_first(mixed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (mixed / "pyproject.toml").write_text('[project]\nname = "nsa-lab"\n')
    monkeypatch.chdir(mixed / "b")
    assert texts(local(Path("a.txt"))) == MIXED[:1]


def test_every_cursor_continues_exactly(mixed: Path) -> None:
    source = open_source(local(mixed))
    documents = list(source.documents())
    for index, document in enumerate(documents):
        assert [d.text for d in source.documents(document.cursor)] == MIXED[index + 1 :]


def test_identity_follows_the_files(mixed: Path) -> None:
    before = check(local(mixed))
    assert check(local(mixed)) == before
    with (mixed / "a.txt").open("a") as file:
        file.write("more")
    assert check(local(mixed)) != before


def test_half_a_surrogate_pair_becomes_a_replacement(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "a\\ud800b"}\n')
    assert texts(local(path)) == ["a\ufffd\ufffd\ufffdb"]


def test_paths_without_text_files_raise(tmp_path: Path, refuses) -> None:
    refuses(lambda: check(local(tmp_path / "gone")), "data.path", "nothing at", tmp_path / "gone", ".parquet")
    refuses(lambda: check(local(tmp_path / "*.txt")), "nothing at")
    (tmp_path / "table.csv").write_text("a,b")
    refuses(lambda: check(local(tmp_path)), "no .txt, .jsonl, .parquet file", ".csv", "convert")
    refuses(lambda: check(local(tmp_path / "table.csv")), "no .txt, .jsonl, .parquet file")


@pytest.mark.parametrize("name", ["x.txt", "x.jsonl", "x.parquet"])
def test_an_empty_file(tmp_path: Path, refuses, name: str) -> None:
    (tmp_path / name).touch()
    refuses(lambda: check(local(tmp_path)), tmp_path / name, "empty", "remove it")


def test_a_file_without_text(tmp_path: Path, refuses) -> None:
    for path in ((tmp_path / "x.txt"), write_jsonl(tmp_path / "x.jsonl", {"text": ""}, {"text": None})):
        if path.suffix == ".txt":
            path.write_text(" \n\t")
        refuses(lambda path=path: texts(local(path)), path, "contains no text")
    refuses(lambda: check(local(write_parquet(tmp_path / "x.parquet", text=pa.array([], pa.string())))), "no rows")


def test_a_missing_text_column(tmp_path: Path, refuses) -> None:
    parquet = write_parquet(tmp_path / "x.parquet", body=["a"], title=["b"])
    refuses(lambda: check(local(parquet)), parquet, "'text'", "body, title", "data.text_column")
    assert texts(local(parquet, text_column="body")) == ["a"]
    jsonl = write_jsonl(tmp_path / "x.jsonl", {"body": "a", "title": "b"})
    refuses(lambda: check(local(jsonl)), f"{jsonl} line 1", "'text'", "body, title", "data.text_column")


def test_a_text_column_that_is_not_text(tmp_path: Path, refuses) -> None:
    refuses(lambda: check(local(write_parquet(tmp_path / "x.parquet", text=[1, 2]))), "int64", "data.text_column")
    jsonl = write_jsonl(tmp_path / "x.jsonl", {"text": "fine"}, {"text": 3})
    refuses(lambda: texts(local(jsonl)), "line 2", "a number", "data.text_column")


def test_broken_files_are_reported(tmp_path: Path, refuses) -> None:
    jsonl = write_jsonl(tmp_path / "x.jsonl", {"text": "fine"})
    jsonl.write_bytes(jsonl.read_bytes() + b'{"text": \n')
    refuses(lambda: texts(local(jsonl)), f"{jsonl} line 2", "not JSON")
    jsonl.write_text('{"text": "a"}\n{"text": "b", "n": ' + "9" * 5000 + "}\n")
    refuses(lambda: texts(local(jsonl)), f"{jsonl} line 2", "too many digits")
    jsonl.write_bytes(b'{"text": "\xff"}\n')
    refuses(lambda: check(local(jsonl)), f"{jsonl} line 1", "not UTF-8", "iconv")
    refuses(lambda: check(local(write_jsonl(tmp_path / "y.jsonl", ["a"]))), "line 1", "a list")
    (tmp_path / "x.txt").write_bytes(b"abc\xffdef")
    refuses(lambda: texts(local(tmp_path / "x.txt")), "x.txt", "not UTF-8 at byte 3", "iconv")
    (tmp_path / "x.parquet").write_bytes(b"PAR1 nothing")
    refuses(lambda: check(local(tmp_path / "x.parquet")), "x.parquet", "not a readable parquet", "remove it")


def test_a_parquet_with_invalid_utf8_is_reported(tmp_path: Path, refuses) -> None:
    two = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    pq.write_table(two, tmp_path / "two.parquet")
    refuses(lambda: check(local(tmp_path / "two.parquet")), "two.parquet", "2 columns are called 'text'", "rename")
    begins = pa.py_buffer(np.array([0, 2], np.int32).tobytes())
    foreign = pa.Array.from_buffers(pa.string(), 1, [None, begins, pa.py_buffer(b"\xff\xfe")])
    pq.write_table(pa.table({"text": foreign}), tmp_path / "foreign.parquet")
    refuses(lambda: texts(local(tmp_path / "foreign.parquet")), "foreign.parquet", "not UTF-8", "write the file again")


def test_a_parquet_with_damaged_data_is_reported(tmp_path: Path, refuses) -> None:
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"text": [f"{i} " * 400 for i in range(300)]}), path, compression="zstd")
    content = bytearray(path.read_bytes())
    content[1000:-1000] = bytes(len(content) - 2000)
    path.write_bytes(content)
    refuses(lambda: texts(local(path)), path, "not a readable parquet")


@pytest.mark.slow
def test_stdlib_is_megabytes_of_text_in_a_fixed_order() -> None:
    source = open_source(DataConfig())
    documents = list(source.documents())
    assert sum(len(document.text) for document in documents) > 4_000_000
    assert documents == list(open_source(DataConfig()).documents())
    assert [d.text for d in source.documents(documents[9].cursor)] == [d.text for d in documents[10:]]


def test_a_python_without_sources(tmp_path: Path, refuses) -> None:
    refuses(lambda: StdlibSource(tmp_path), tmp_path, "data.source: local")


def test_noise_is_uniform_seeded_and_marked() -> None:
    source = open_source(DataConfig(source="synthetic"))
    assert source.identity["noise"] is True
    documents = list(source.documents())
    assert documents == list(source.documents())
    assert list(source.documents(documents[-2].cursor)) == documents[-1:]
    counts = np.bincount(np.frombuffer(b"".join(d.text for d in documents), np.uint8), minlength=256)
    assert counts[255] == 0
    assert abs(counts[:255] / counts.sum() * 255 - 1).max() < 0.06


def test_noise_requires_the_byte_tokenizer(refuses) -> None:
    data = DataConfig(source="synthetic", tokenizer="nowhere.json")
    refuses(lambda: check(data), "nowhere.json")
