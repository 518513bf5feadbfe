"""Parquet files: the only file that imports pyarrow. Every error names the file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

from nsa_lab.config.optional_deps import MissingPackage, require
from nsa_lab.data.errors import DataError

BATCH_ROWS = 256


def open_parquet(source: str | BinaryIO, name: str, text_column: str) -> Any:
    """Return a `pyarrow.parquet.ParquetFile` with a text column of strings. Raises `DataError` naming `name`."""
    try:
        require("pyarrow")
    except MissingPackage as error:
        raise DataError(f"{name}: {error}, or give jsonl or txt") from None
    import pyarrow.parquet

    with _raise_data_errors(name):
        file = pyarrow.parquet.ParquetFile(source, page_checksum_verification=True)
    _check_text_column(file.schema_arrow, name, text_column)
    return file


def iter_rows(file: Any, name: str, text_column: str, first_row: int = 0) -> Iterator[tuple[int, str]]:
    """Yield (row, text) starting at `first_row`. Null is an empty text."""
    groups, row = _list_row_groups_from(file, first_row)
    with _raise_data_errors(name):
        for batch in file.iter_batches(BATCH_ROWS, row_groups=groups, columns=[text_column]):
            for text in batch.column(0).to_pylist():
                if row >= first_row:
                    yield row, text or ""
                row += 1


def read_row_group(file: Any, name: str, text_column: str, group: int) -> list[str]:
    """Return the texts of a row group. Null is an empty text."""
    with _raise_data_errors(name):
        return [text or "" for text in file.read_row_group(group, columns=[text_column]).column(0).to_pylist()]


@contextmanager
def _raise_data_errors(name: str) -> Iterator[None]:
    """Convert Arrow's errors about damaged content to `DataError`. Errors of the disk and the network pass through."""
    import pyarrow

    try:
        yield
    except UnicodeDecodeError as error:
        # Arrow does not verify that the strings of a file are UTF-8.
        raise DataError(f"{name}: a text is not UTF-8 ({error.reason}); decode the text and write the file again") from None
    except (pyarrow.ArrowException, OSError) as error:
        # Arrow raises its own errors or a plain OSError. System errors have an errno, network errors are subclasses.
        if isinstance(error, OSError) and (type(error) is not OSError or error.errno is not None):
            raise
        reason = " ".join(str(error).split())[:200]
        raise DataError(f"{name}: not a readable parquet file ({reason}); download it again or remove it") from None


def _list_row_groups_from(file: Any, first_row: int) -> tuple[list[int], int]:
    """Return the row groups starting with the one that holds `first_row`, and the first row of that group."""
    start = 0
    for group in range(file.num_row_groups):
        count = file.metadata.row_group(group).num_rows
        if first_row < start + count:
            return list(range(group, file.num_row_groups)), start
        start += count
    return [], start


def _check_text_column(schema: Any, name: str, text_column: str) -> None:
    import pyarrow.types as types

    if text_column not in schema.names:
        raise DataError(
            f"{name}: no column {text_column!r}; it has {', '.join(schema.names) or 'none'}; "
            "set data.text_column to the one with the text"
        )
    if (count := schema.names.count(text_column)) > 1:
        raise DataError(
            f"{name}: {count} columns are called {text_column!r}; rename the ones without the text, or "
            "set data.text_column to another"
        )
    kind = schema.field(text_column).type
    if types.is_dictionary(kind):
        kind = kind.value_type
    if not (types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)):
        raise DataError(
            f"{name}: column {text_column!r}: expected strings, got {kind}; set data.text_column to a column of strings"
        )
