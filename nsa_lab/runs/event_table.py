"""Events of a run, stored by field instead of by event.

A record of 200 MB takes about 100 MB this way; as dictionaries it would take 2 GB. `Events` is a sequence of events, which
are built on access, and gives whole fields as arrays. `event_builder` builds it.

Invariants
* An event that is read back equals the event that was added. Changing it does not change the record.
* Every event has a kind, a finite time, an attempt and a step. Fields have the types of the schema. A required field that
  may be null is null if it is missing.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Generic, TypeVar, cast, overload

import numpy as np

from nsa_lab.runs import event_fields
from nsa_lab.runs.event_columns import Column, ListColumn, make_column

E = TypeVar("E", bound=Mapping[str, Any])

MAX_LISTED = 100  # violations in the list; the others are only counted


@dataclass(frozen=True)
class Violation:
    """An event that violates the schema. `line`: its line in `events.jsonl`, from 1. `is_skipped`: it is not an event."""

    line: int
    kind: str
    problem: str
    is_skipped: bool

    def __str__(self) -> str:
        return f"line {self.line:,}: {f'{self.kind}: ' if self.kind else ''}{self.problem}"


@dataclass
class Violations:
    """Violations of a record, at most `MAX_LISTED`, and the number of all. `torn`: lines that are not JSON."""

    listed: list[Violation] = field(default_factory=list)
    count: int = 0
    torn: list[int] = field(default_factory=list)

    def add(self, violation: Violation) -> None:
        self.count += 1
        if len(self.listed) < MAX_LISTED:
            self.listed.append(violation)


class EventTable:
    """Events of one kind. `lines`: their lines in the file, ascending."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.lines: array[int] = array("q")
        self.columns: dict[str, Column] = {}
        self._fields = event_fields.get_fields(kind)

    def __len__(self) -> int:
        return len(self.lines)

    def extend(self, fields: dict[str, list[Any]], lines: list[int]) -> None:
        """Append events with equal names of fields, given by field."""
        first_row = len(self.lines)
        for name, values in fields.items():
            column = self.columns.get(name)
            if column is None:
                known = self._fields.get(name)
                column = self.columns[name] = make_column(known and known.form, values)
            column.extend(first_row, values)
        self.lines.extend(lines)

    def make_event(self, row: int) -> dict[str, Any]:
        event: dict[str, Any] = {}
        for name, column in self.columns.items():
            index = column.find(row)
            if index is not None:
                event[name] = column[index]
        return event


class Events(Sequence[E], Generic[E]):
    """A sequence of events in the order of writing, or a selection of it. Slicing and the methods below give selections.

    `violations`: of the whole record, even for a selection.
    """

    def __init__(self, tables: list[EventTable], violations: Violations, ids: np.ndarray | None = None) -> None:
        self._tables, self.violations = tables, violations
        # The id of row r of table k is offsets[k] + r.
        self._offsets = np.cumsum([0, *map(len, tables)])
        if ids is None:
            lines = [np.frombuffer(table.lines, dtype=np.int64) for table in tables if len(table)]
            ids = np.argsort(np.concatenate(lines), kind="stable") if lines else np.zeros(0, np.int64)
        self._ids: np.ndarray = ids
        self._built: list[E] | None = None

    def build_once(self) -> Events[E]:
        """Return the same events, each of which is built now and shared by all readers, who must not change it."""
        events: Events[E] = Events(self._tables, self.violations, self._ids)
        events._built = list(self)
        return events

    def __len__(self) -> int:
        return len(self._ids)

    @overload
    def __getitem__(self, index: int) -> E: ...
    @overload
    def __getitem__(self, index: slice) -> Events[E]: ...
    def __getitem__(self, index: int | slice) -> E | Events[E]:
        if isinstance(index, slice):
            return self.select(index)
        return self._make_event(int(self._ids[index])) if self._built is None else self._built[index]

    def __iter__(self) -> Iterator[E]:
        return map(self._make_event, self._ids.tolist()) if self._built is None else iter(self._built)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def __repr__(self) -> str:
        return f"Events({len(self)} events)"

    def __deepcopy__(self, memo: Any) -> list[E]:
        """Return a list of events that may be changed."""
        return list(map(self._make_event, self._ids.tolist()))

    def select(self, which: Any) -> Events[E]:
        """Return the events at a slice, a bool mask or an array of positions."""
        return Events(self._tables, self.violations, self._ids[which])

    def is_kind(self, *kinds: str) -> np.ndarray:
        """Return which events are of these kinds, bool."""
        mask = np.zeros(len(self._ids), dtype=bool)
        for index, table in enumerate(self._tables):
            if table.kind in kinds:
                mask |= (self._ids >= self._offsets[index]) & (self._ids < self._offsets[index + 1])
        return mask

    def of_kind(self, *kinds: str) -> Events[Any]:
        """Return the events of these kinds."""
        return self.select(self.is_kind(*kinds))

    def list_fields(self) -> dict[str, str]:
        """Return the names of all fields of these events, and the form of each: number, int, numbers, text or object."""
        forms: dict[str, str] = {}
        for table, _, rows in self._split():
            for name, column in table.columns.items():
                if column.locate(rows)[0].any():
                    forms.setdefault(name, column.form)
        return forms

    def lines(self) -> np.ndarray:
        """Return the line of each event in the file, int64, from 1."""
        result = np.zeros(len(self), dtype=np.int64)
        for table, where, rows in self._split():
            result[where] = np.frombuffer(table.lines, dtype=np.int64)[rows]
        return result

    def has(self, name: str) -> np.ndarray:
        """Return which events have the field, bool. A field that is null counts."""
        result = np.zeros(len(self), dtype=bool)
        for table, where, rows in self._split(name):
            result[where] = table.columns[name].locate(rows)[0]
        return result

    def numbers(self, name: str) -> np.ndarray:
        """Return the values of a field as float64; NaN where it is missing, null or not a number."""
        result = np.full(len(self), np.nan)
        for table, where, rows in self._split(name):
            column = table.columns[name]
            has, indices = column.locate(rows)
            result[where[has]] = column.numbers(indices)
        return result

    def ints(self, name: str) -> np.ndarray:
        """Return the values of a field that every event has as an integer, such as `step` and `attempt`, as int64."""
        return self.numbers(name).astype(np.int64)

    def values(self, name: str) -> list[Any]:
        """Return the values of a field; None where it is missing."""
        result: list[Any] = [None] * len(self)
        for table, where, rows in self._split(name):
            column = table.columns[name]
            has, indices = column.locate(rows)
            for position, value in zip(where[has].tolist(), column.get_values(indices.tolist()), strict=True):
                result[position] = value
        return result

    def lists(self, name: str) -> tuple[np.ndarray, list[np.ndarray]]:
        """Return the positions of the events whose field is a list of numbers, and the lists; NaN for null.

        Empty lists are not returned.
        """
        positions, starts, lengths, data = self._locate_lists(name)
        return positions, [data[start : start + length] for start, length in zip(starts, lengths, strict=True)]

    def matrix(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the positions [n] of the lists of numbers that are as long as the first one, and the lists [n, length].

        NaN for null. Empty lists are not returned.
        """
        positions, starts, lengths, data = self._locate_lists(name)
        if not len(positions):
            return positions, np.zeros((0, 0))
        is_first_length = lengths == lengths[0]
        return positions[is_first_length], data[starts[is_first_length, None] + np.arange(lengths[0])]

    def _locate_lists(self, name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Return positions, starts and lengths of the lists in the order of the events, and the data that they are in."""
        parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        blocks, size = [np.zeros(0)], 0
        for table, where, rows in self._split(name):
            column = table.columns[name]
            if isinstance(column, ListColumn):
                has, indices = column.locate(rows)
                lengths, starts, data = column.lists(indices)
                is_list = lengths > 0
                parts.append((where[has][is_list], starts[is_list] + size, lengths[is_list]))
                blocks, size = [*blocks, data], size + len(data)
        if len(parts) == 1:
            return *parts[0], blocks[1]
        positions, starts, lengths = (
            np.concatenate([part[n] for part in parts]) if parts else np.zeros(0, np.int64) for n in range(3)
        )
        order = np.argsort(positions, kind="stable")
        return positions[order], starts[order], lengths[order], np.concatenate(blocks)

    def _split(self, name: str | None = None) -> Iterator[tuple[EventTable, np.ndarray, np.ndarray]]:
        """Yield (table, positions in this selection, rows of the table) for each table with rows, and with the field."""
        for table, where, rows in self._parts:
            if name is None or name in table.columns:
                yield table, where, rows

    @cached_property
    def _parts(self) -> list[tuple[EventTable, np.ndarray, np.ndarray]]:
        parts: list[tuple[EventTable, np.ndarray, np.ndarray]] = []
        for index, table in enumerate(self._tables):
            start, end = self._offsets[index], self._offsets[index + 1]
            where = np.flatnonzero((self._ids >= start) & (self._ids < end))
            if len(where):
                parts.append((table, where, self._ids[where] - start))
        return parts

    def _make_event(self, event_id: int) -> E:
        index = int(np.searchsorted(self._offsets, event_id, side="right")) - 1
        # Tables are never empty, so the offsets are distinct.
        return cast("E", self._tables[index].make_event(event_id - int(self._offsets[index])))
