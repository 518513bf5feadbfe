"""Files of the user's own: a .txt is a document, a .jsonl has one per line, a .parquet one per row.

Invariants
* Files are read in the order of their paths; nothing is shortened, and no line or row is passed over in silence.
* What can be wrong is found when the source is opened where that is cheap: paths, sizes, columns, first lines.
"""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from nsa_lab.data.errors import DataError
from nsa_lab.data.paths import list_candidate_paths
from nsa_lab.data.sources import parquet
from nsa_lab.data.sources.source import Cursor, Document

# (row, text) from a first row on, given the file and the name of its text column.
Reader = Callable[[Path, str, int], Iterator[tuple[int, str]]]


class LocalSource:
    """`path` is a file, a folder (searched through), or a glob; `called` is what a message calls it.

    Raises `DataError` as the module says.
    """

    def __init__(self, path: str, text_column: str = "text", label: str = "data.path =") -> None:
        self._files = find_files(path, label)
        self._column = text_column
        for file in self._files:
            _check_file(file, text_column)
        self.identity = {
            "source": "local",
            "text_column": text_column,
            "files": [[str(file), file.stat().st_size, file.stat().st_mtime_ns] for file in self._files],
        }

    def documents(self, cursor: Cursor | None = None) -> Iterator[Document]:
        first_file, first_row = (cursor["file"], cursor["row"]) if cursor else (0, 0)
        for index in range(first_file, len(self._files)):
            file = self._files[index]
            empty = first_row == 0
            for row, text in READERS[file.suffix.lower()](file, self._column, first_row):
                empty = empty and not text.strip()
                yield Document(text, {"file": index, "row": row + 1})
            if empty:
                raise DataError(f"{file}: no text in it; remove the file or fill it")
            first_row = 0


def find_files(path: str, label: str = "data.path =") -> list[Path]:
    """The .txt, .jsonl and .parquet files that `path` means, sorted. Raises `DataError` if there are none."""
    places = list_candidate_paths(path)
    for place in places:
        found = _list_matches(place)
        if found is None:
            continue
        files = sorted(file for file in found if file.suffix.lower() in READERS and file.is_file())
        if files:
            return files
        kinds = sorted({file.suffix or file.name for file in found if file.is_file()})[:5]
        raise DataError(
            f"{label} {path!r}: no {', '.join(READERS)} file in {place} (found {', '.join(kinds) or 'nothing'}); "
            "convert the text to one of these, or give another path"
        )
    looked = " or ".join(str(place) for place in places)
    raise DataError(f"{label} {path!r}: nothing at {looked}; give a file, a folder or a glob of {', '.join(READERS)}")


def _list_matches(place: Path) -> list[Path] | None:
    """The files that a place stands for; None if it stands for nothing."""
    # Unlike Path's own tests, these are False for what can be no path, such as a name that is too long.
    if os.path.isfile(place):
        return [place]
    if os.path.isdir(place):
        # What a hidden folder holds (.git, .cache, .ipynb_checkpoints) is not text that anyone meant to train on.
        return [
            file for file in place.rglob("*") if not any(part.startswith(".") for part in file.relative_to(place).parts)
        ]
    return [Path(match) for match in glob.glob(str(place), recursive=True)] or None


def _check_file(file: Path, text_column: str) -> None:
    if file.stat().st_size == 0:
        raise DataError(f"{file}: the file is empty; remove it or fill it")
    if file.suffix.lower() == ".parquet":
        found = parquet.open_parquet(str(file), str(file), text_column)
        if found.metadata.num_rows == 0:
            raise DataError(f"{file}: the file has no rows; remove it or fill it")
        found.close()
    elif file.suffix.lower() == ".jsonl":
        next(_read_jsonl(file, text_column, 0), None)


def _read_txt(file: Path, text_column: str, first_row: int) -> Iterator[tuple[int, str]]:
    if first_row > 0:
        return
    try:
        # Bytes, not text mode: line ends are part of the document. A mark of the encoding before the first letter is not.
        yield 0, file.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{file}: not UTF-8 at byte {error.start}; convert it, for example with: iconv -t utf-8") from None


def _read_jsonl(file: Path, text_column: str, first_row: int) -> Iterator[tuple[int, str]]:
    with file.open("rb") as lines:
        for row, line in enumerate(lines):
            if row >= first_row and line.strip():
                yield row, _parse_line(line, f"{file} line {row + 1}", text_column)


def _parse_line(line: bytes, location: str, text_column: str) -> str:
    try:
        record = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise DataError(
            f"{location}: not UTF-8 at byte {error.start} of the line; convert the file, for example with: iconv -t utf-8"
        ) from None
    except RecursionError:
        raise DataError(f"{location}: lists or objects nested too deep to be read; remove the line") from None
    except json.JSONDecodeError as error:
        raise DataError(
            f"{location}: not JSON ({error.msg} at column {error.colno}); write one object per line, or remove the line"
        ) from None
    if not isinstance(record, dict):
        raise DataError(
            f"{location}: expected an object with the key {text_column!r}, found {_describe_type(record)}; write one object per line"
        )
    if text_column not in record:
        raise DataError(
            f"{location}: no key {text_column!r}; it has {', '.join(record) or 'none'}; "
            "set data.text_column to the one with the text"
        )
    text = record[text_column]
    if text is not None and not isinstance(text, str):
        raise DataError(
            f"{location}: {text_column!r} holds {_describe_type(text)}, and text is wanted; set data.text_column to a key with text"
        )
    # JSON can spell half a surrogate pair, which no UTF-8 has.
    return (text or "").encode("utf-8", "surrogatepass").decode("utf-8", "replace")


def _read_parquet(file: Path, text_column: str, first_row: int) -> Iterator[tuple[int, str]]:
    opened = parquet.open_parquet(str(file), str(file), text_column)
    try:
        yield from parquet.iter_rows(opened, str(file), text_column, first_row)
    finally:
        opened.close()


def _describe_type(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


READERS: dict[str, Reader] = {".txt": _read_txt, ".jsonl": _read_jsonl, ".parquet": _read_parquet}
