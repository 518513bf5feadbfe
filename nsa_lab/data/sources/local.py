"""Local files: a .txt is one document, a .jsonl has one document per line, a .parquet one per row.

Invariants
* Files are read in path order. Nothing is truncated, and no line or row is skipped silently.
* A warning names what a folder or a pattern left out (`file_search`): hidden folders and texts, what this user may not
  read, and links that lead back or nowhere. A file that cannot be read is an error.
* Cheap checks run when the source is opened: paths, sizes, columns, first lines.
"""

from __future__ import annotations

import functools
import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from nsa_lab.data.errors import DataError
from nsa_lab.data.file_search import HIDDEN, find_matches
from nsa_lab.data.paths import list_candidate_paths
from nsa_lab.data.sources import parquet
from nsa_lab.data.sources.source import BY_POSITION, Cursor, Document

logger = logging.getLogger("nsa_lab.data")

N_LISTED = 5  # names in a message

# (file, text column, first row) -> (row, text) pairs.
Reader = Callable[[Path, str, int], Iterator[tuple[int, str]]]


class LocalSource:
    """`path` is a file, a folder (searched recursively) or a glob. `label` names it in error messages.

    Raises `DataError` for unreadable or empty files.
    """

    def __init__(self, path: str, text_column: str = "text", label: str = "data.path =") -> None:
        self._files = find_files(path, label)
        self._column = text_column
        entries = []
        for file in self._files:
            with _explain_os_errors(file):
                _check_file(file, text_column)
                entries.append([str(file), file.stat().st_size, file.stat().st_mtime_ns])
        self.identity = {
            "source": "local",
            "text_column": text_column,
            "files": entries,
            **({"split": BY_POSITION} if self._has_single_document() else {}),
        }

    def documents(self, cursor: Cursor | None = None) -> Iterator[Document]:
        first_file, first_row = (cursor["file"], cursor["row"]) if cursor else (0, 0)
        for index in range(first_file, len(self._files)):
            file = self._files[index]
            is_empty = first_row == 0
            for row, text in _read_rows(file, self._column, first_row):
                is_empty = is_empty and not text.strip()
                yield Document(text, {"file": index, "row": row + 1})
            if is_empty:
                raise DataError(f"{file}: the file contains no text; remove it or fill it")
            first_row = 0

    def _has_single_document(self) -> bool:
        if len(self._files) > 1:
            return False
        (file,) = self._files
        if file.suffix.lower() == ".txt":
            return True
        texts = (text for _, text in _read_rows(file, self._column, 0))
        return len(list(islice(filter(None, texts), 2))) == 1


def find_files(path: str, label: str = "data.path =") -> list[Path]:
    """Return the .txt, .jsonl and .parquet files at `path`, sorted. Raises `DataError` if there are none."""
    candidates, denied = list_candidate_paths(path), list[str]()
    for candidate in candidates:
        matches = find_matches(candidate)
        left_out = [f"{left} ({reason})" for left, reason in matches.left_out if reason != HIDDEN or _may_have_text(left)]
        files = sorted(file for file in matches.files if file.suffix.lower() in READERS)
        if unreadable := [str(file) for file in files if not os.access(file, os.R_OK)]:
            raise DataError(_explain_denied(path, label, unreadable))
        if files:
            _warn_of_left_out(path, label, tuple(left_out))
            return files
        denied += matches.list_denied()
        if matches.has_match and not denied:
            suffixes = sorted({file.suffix or file.name for file in matches.files})[:N_LISTED]
            found = f"{', '.join(suffixes) or 'nothing'}{f'; left out: {_join(left_out)}' if left_out else ''}"
            raise DataError(
                f"{label} {path!r}: no {', '.join(READERS)} file in {candidate} (found {found}); "
                "convert the text to one of these, or give another path"
            )
    if denied:
        raise DataError(_explain_denied(path, label, denied))
    locations = " or ".join(str(candidate) for candidate in candidates)
    raise DataError(f"{label} {path!r}: nothing at {locations}; give a file, a folder or a glob of {', '.join(READERS)}")


def _may_have_text(path: Path) -> bool:
    return path.suffix.lower() in READERS or path.is_dir()


def _explain_denied(path: str, label: str, denied: Sequence[str]) -> str:
    remedy = "change their permissions or those of their folders, or move them away"
    return f"{label} {path!r}: permission denied: {_join(denied)}; {remedy}"


@functools.lru_cache(maxsize=64)
def _warn_of_left_out(path: str, label: str, left_out: tuple[str, ...]) -> None:
    """Log the paths that were left out, once."""
    if left_out:
        logger.warning("%s %r: left out: %s", label, path, _join(left_out))


def _join(names: Sequence[str]) -> str:
    more = f" and {len(names) - N_LISTED} more" if len(names) > N_LISTED else ""
    return ", ".join(names[:N_LISTED]) + more


@contextmanager
def _explain_os_errors(file: Path) -> Iterator[None]:
    """Convert an error of the system to `DataError`: the file was removed after it was found, or the disk has an error."""
    try:
        yield
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise DataError(f"{file}: cannot be read ({reason}); restore the file, or start again without it") from error


def _read_rows(file: Path, text_column: str, first_row: int) -> Iterator[tuple[int, str]]:
    with _explain_os_errors(file):
        yield from READERS[file.suffix.lower()](file, text_column, first_row)


def _check_file(file: Path, text_column: str) -> None:
    if file.stat().st_size == 0:
        raise DataError(f"{file}: the file is empty; remove it or fill it")
    if file.suffix.lower() == ".parquet":
        parquet_file = parquet.open_parquet(str(file), str(file), text_column)
        if parquet_file.metadata.num_rows == 0:
            raise DataError(f"{file}: the file has no rows; remove it or fill it")
        parquet_file.close()
    elif file.suffix.lower() == ".jsonl":
        next(_read_jsonl(file, text_column, 0), None)


def _read_txt(file: Path, text_column: str, first_row: int) -> Iterator[tuple[int, str]]:
    if first_row > 0:
        return
    try:
        # Binary mode keeps line endings, which are part of the document. utf-8-sig drops a byte order mark.
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
        raise DataError(f"{location}: lists or objects are nested too deeply; remove the line") from None
    except json.JSONDecodeError as error:
        raise DataError(
            f"{location}: not JSON ({error.msg} at column {error.colno}); write one object per line, or remove the line"
        ) from None
    except ValueError:  # Python reads integers of at most 4,300 digits
        raise DataError(f"{location}: an integer has too many digits; write it as text, or remove the line") from None
    if not isinstance(record, dict):
        raise DataError(
            f"{location}: expected an object with the key {text_column!r}, got {_describe_type(record)}; "
            "write one object per line"
        )
    if text_column not in record:
        raise DataError(
            f"{location}: no key {text_column!r}; it has {', '.join(record) or 'none'}; "
            "set data.text_column to the one with the text"
        )
    text = record[text_column]
    if text is not None and not isinstance(text, str):
        raise DataError(
            f"{location}: {text_column!r}: expected text, got {_describe_type(text)}; "
            "set data.text_column to a key with text"
        )
    # JSON can encode half a surrogate pair, which UTF-8 cannot.
    return (text or "").encode("utf-8", "surrogatepass").decode("utf-8", "replace")


def _read_parquet(file: Path, text_column: str, first_row: int) -> Iterator[tuple[int, str]]:
    parquet_file = parquet.open_parquet(str(file), str(file), text_column)
    try:
        yield from parquet.iter_rows(parquet_file, str(file), text_column, first_row)
    finally:
        parquet_file.close()


def _describe_type(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


READERS: dict[str, Reader] = {".txt": _read_txt, ".jsonl": _read_jsonl, ".parquet": _read_parquet}
