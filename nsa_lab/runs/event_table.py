"""Events of a run, stored by field instead of by event.

A record of 200 MB takes about 100 MB this way; as dictionaries it would take 2 GB. `Events` is a sequence of events, which
are built on access, and gives whole fields as arrays.

Invariants
* An event that is read back equals the event that was added. Changing it does not change the record.
* Every event has a kind, a finite time, an attempt and a step. Fields have the types of the schema. A required field that
  may be null is null if it is missing.
"""

from __future__ import annotations

import copy
import math
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, cast, overload

import numpy as np

from nsa_lab.runs import event_schema

E = TypeVar("E", bound=Mapping[str, Any])

BATCH = 256
MAX_KINDS, MAX_FIELDS = 64, 256  # different ones in a record; a bound on its memory
MAX_LISTED = 100  # violations in the list; the others are only counted
EXACT_INT = 2**53  # larger integers are not exact in float64
NUMBER, INT, NUMBERS, OBJECT = "number", "int", "numbers", "object"
_NUMBER_TYPES = frozenset({float, int, type(None)})


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


class _Column:
    """Values of one field. `rows`: the rows of the table that have it, ascending; None if it is the first `len` rows."""

    form = OBJECT

    def __init__(self) -> None:
        self.rows: array[int] | None = None
        self.exceptions: dict[int, Any] = {}  # values that do not fit the storage, by index

    def __len__(self) -> int:
        raise NotImplementedError

    def extend(self, first_row: int, values: list[Any]) -> None:
        """Append the values of consecutive rows."""
        if self.rows is None and first_row != len(self):
            self.rows = array("q", range(len(self)))
        if self.rows is not None:
            self.rows.extend(range(first_row, first_row + len(values)))
        self._store(values)

    def _store(self, values: list[Any]) -> None:
        raise NotImplementedError

    def __getitem__(self, index: int) -> Any:
        raise NotImplementedError

    def find(self, row: int) -> int | None:
        """Return the index of the value of a row; None if the row has none."""
        if self.rows is None:
            return row if row < len(self) else None
        index = bisect_left(self.rows, row)
        return index if index < len(self.rows) and self.rows[index] == row else None

    def locate(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return which of `rows` have a value, bool, and the indices of these values."""
        if self.rows is None:
            has = rows < len(self)
            return has, rows[has]
        own = np.frombuffer(self.rows, dtype=np.int64)
        indices = np.minimum(np.searchsorted(own, rows), len(own) - 1)
        has = own[indices] == rows
        return has, indices[has]

    def numbers(self, indices: np.ndarray) -> np.ndarray:
        """Return values as float64; NaN for a value that is not a number."""
        values = (self[index] for index in indices.tolist())
        return np.array([_to_float(value) if _is_number(value) else math.nan for value in values], dtype=np.float64)


class _ArrayColumn(_Column):
    """Numbers in an array."""

    typecode = "d"
    placeholder: float = math.nan

    def __init__(self) -> None:
        super().__init__()
        self._data = array(self.typecode)

    def __len__(self) -> int:
        return len(self._data)

    def _store(self, values: list[Any]) -> None:
        if self._fits(values):
            self._data.fromlist(values)
            return
        for value in values:
            if not self._fits([value]):
                self.exceptions[len(self._data)] = value
                value = self.placeholder
            self._data.append(value)

    def _fits(self, values: list[Any]) -> bool:
        types = set(map(type, values))
        if types == {float}:
            return True
        return types <= {float, int} and all(abs(value) <= EXACT_INT for value in values if type(value) is int)

    def __getitem__(self, index: int) -> Any:
        return self.exceptions[index] if index in self.exceptions else self._data[index]

    def numbers(self, indices: np.ndarray) -> np.ndarray:
        values = np.frombuffer(self._data, dtype=self.typecode).astype(np.float64)
        if self.exceptions:
            numbers = [_to_float(value) if _is_number(value) else math.nan for value in self.exceptions.values()]
            values[list(self.exceptions)] = numbers
        return values[indices]


class _NumberColumn(_ArrayColumn):
    form = NUMBER


class _IntColumn(_ArrayColumn):
    form, typecode, placeholder = INT, "q", 0

    def _fits(self, values: list[Any]) -> bool:
        return set(map(type, values)) == {int} and all(map(event_schema.is_int, values))


class _ListColumn(_Column):
    """Lists of numbers in one array."""

    form = NUMBERS

    def __init__(self) -> None:
        super().__init__()
        self._data, self._ends = array("d"), array("q")

    def __len__(self) -> int:
        return len(self._ends)

    def _store(self, values: list[Any]) -> None:
        for value in values:
            if isinstance(value, list) and set(map(type, value)) <= _NUMBER_TYPES:
                if None in value or not all(map(_is_exact, value)):
                    self.exceptions[len(self._ends)] = value
                self._data.extend([math.nan if number is None else _to_float(number) for number in value])
            else:
                self.exceptions[len(self._ends)] = value
            self._ends.append(len(self._data))

    def __getitem__(self, index: int) -> Any:
        if index in self.exceptions:
            return copy.deepcopy(self.exceptions[index])
        start = self._ends[index - 1] if index else 0
        return self._data[start : self._ends[index]].tolist()

    def lists(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return (lengths, starts, data): value i is data[starts[i] : starts[i] + lengths[i]], NaN for null.

        The length is 0 for an empty list and for a value that is not a list of numbers.
        """
        ends = np.frombuffer(self._ends, dtype=np.int64)
        starts = np.concatenate([[0], ends[:-1]])
        return (ends - starts)[indices], starts[indices], np.frombuffer(self._data, dtype=np.float64)


class _ObjectColumn(_Column):
    """Any values. Equal texts, and equal values in a row, are stored once."""

    def __init__(self) -> None:
        super().__init__()
        self._data: list[Any] = []
        self._texts: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._data)

    def _store(self, values: list[Any]) -> None:
        for value in values:
            if isinstance(value, str):
                value = self._texts.setdefault(value, value)
            elif self._data and type(value) is type(self._data[-1]) and value == self._data[-1]:
                value = self._data[-1]
            self._data.append(value)

    def __getitem__(self, index: int) -> Any:
        value = self._data[index]
        return copy.deepcopy(value) if isinstance(value, (dict, list)) else value


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _is_exact(value: Any) -> bool:
    return type(value) is not int or abs(value) <= EXACT_INT


def _to_float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _make_column(form: str | None, values: list[Any]) -> _Column:
    """Return an empty column for a form of the schema; for an unknown field, by its first values."""
    if form is None:
        types = set(map(type, values))
        is_list = types == {list} and all(set(map(type, value)) <= _NUMBER_TYPES for value in values)
        form = INT if types == {int} else NUMBER if types <= {float, int} else NUMBERS if is_list else OBJECT
    return {NUMBER: _NumberColumn, INT: _IntColumn, NUMBERS: _ListColumn}.get(form, _ObjectColumn)()


class _Table:
    """Events of one kind. `lines`: their lines in the file, ascending."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.lines: array[int] = array("q")
        self.columns: dict[str, _Column] = {}
        self._fields = event_schema.get_fields(kind)

    def __len__(self) -> int:
        return len(self.lines)

    def extend(self, fields: dict[str, list[Any]], lines: list[int]) -> None:
        """Append events with equal names of fields, given by field."""
        first_row = len(self.lines)
        for name, values in fields.items():
            column = self.columns.get(name)
            if column is None:
                known = self._fields.get(name)
                column = self.columns[name] = _make_column(known and known.form, values)
            column.extend(first_row, values)
        self.lines.extend(lines)

    def make_event(self, row: int) -> dict[str, Any]:
        event: dict[str, Any] = {}
        for name, column in self.columns.items():
            index = column.find(row)
            if index is not None:
                event[name] = column[index]
        return event


class EventsBuilder:
    """Collects events, validates them against the schema, and builds `Events`.

    `max_step`: events of later steps are violations. `validate=False`: accept everything that has a kind, for events that
    were read before.
    """

    def __init__(self, max_step: int | None = None, *, validate: bool = True) -> None:
        self.violations = Violations()
        self._max_step = event_schema.MAX_INT if max_step is None else max_step
        self._validate = validate
        self._tables: dict[str, _Table] = {}
        self._pending: dict[str, tuple[tuple[str, ...], list[Mapping[str, Any]], list[int]]] = {}

    def add(self, line: int, event: Any) -> None:
        """Add the event of a line. Lines of one kind must ascend."""
        kind = event.get("kind") if isinstance(event, Mapping) else None
        if not isinstance(kind, str):
            problem = (
                "expected an object with the name of a kind" if kind is None else f"kind: expected text, got {kind!r:.40}"
            )
            self.violations.add(Violation(line, "", problem, True))
            return
        names = tuple(event)
        pending = self._pending.get(kind)
        if pending is None or pending[0] != names or len(pending[1]) >= BATCH:
            if pending:
                self._flush(kind, *pending)
            elif len(self._pending) > MAX_KINDS:
                self._flush_all()
            pending = self._pending[kind] = (names, [], [])
        pending[1].append(event)
        pending[2].append(line)

    def add_torn(self, line: int) -> None:
        """Note a line that is not JSON."""
        if len(self.violations.torn) < MAX_LISTED:
            self.violations.torn.append(line)
        self.violations.add(Violation(line, "", "not JSON: incomplete or damaged", True))

    def build(self) -> Events[Any]:
        self._flush_all()
        self.violations.listed.sort(key=lambda violation: violation.line)
        return Events(list(self._tables.values()), self.violations)

    def _flush_all(self) -> None:
        for kind, pending in self._pending.items():
            self._flush(kind, *pending)
        self._pending.clear()

    def _flush(self, kind: str, names: tuple[str, ...], events: list[Mapping[str, Any]], lines: list[int]) -> None:
        """Store events with the same names. If one is invalid, all are examined and stored one by one."""
        fields = {name: [event[name] for event in events] for name in names}
        if not self._validate:
            self._store(kind, fields, lines)
        elif self._are_valid(kind, names, fields):
            missing = event_schema.find_missing(kind, {name: values[0] for name, values in fields.items()})
            nullable = [name for name in missing if event_schema.get_fields(kind)[name].is_nullable and name not in names]
            for line in lines if missing else ():
                self.violations.add(Violation(line, kind, f"{', '.join(missing)}: missing", False))
            self._store(kind, {**fields, **{name: [None] * len(lines) for name in nullable}}, lines)
        elif len(events) > 1:
            for event, line in zip(events, lines, strict=True):
                self._flush(kind, names, [event], [line])
        else:
            self._add_invalid(kind, events[0], lines[0])

    def _add_invalid(self, kind: str, event: Mapping[str, Any], line: int) -> None:
        """Report an invalid event. Store it if only optional fields are wrong, which become null."""
        known = event_schema.get_fields(kind)
        wrong = event_schema.find_wrong_types(kind, event)
        is_skipped = not wrong or any(known[name].is_required for name in wrong)
        problem = "; ".join(wrong.values()) or self._explain(kind, event)
        if not is_skipped:
            repaired = {**event, **dict.fromkeys(wrong)}
            is_skipped = not self._are_valid(kind, tuple(repaired), {name: [value] for name, value in repaired.items()})
            if not is_skipped:
                self._store(kind, {name: [value] for name, value in repaired.items()}, [line])
        self.violations.add(Violation(line, kind, problem, is_skipped))

    def _store(self, kind: str, fields: dict[str, list[Any]], lines: list[int]) -> None:
        table = self._tables.get(kind)
        if table is None:
            table = self._tables[kind] = _Table(kind)
        table.extend(fields, lines)

    def _are_valid(self, kind: str, names: tuple[str, ...], fields: dict[str, list[Any]]) -> bool:
        if not {"t", "attempt", "step"} <= fields.keys() or self._exceeds_bounds(kind, names):
            return False
        known, n_events = event_schema.get_fields(kind), len(fields["t"])
        for name, values in fields.items():
            if name in known and not _have_type(known[name], values, n_events):
                return False
        steps = fields["step"]
        return all(map(math.isfinite, fields["t"])) and min(steps) >= 0 and max(steps) <= self._max_step

    def _exceeds_bounds(self, kind: str, names: tuple[str, ...]) -> bool:
        table = self._tables.get(kind)
        if table is None:
            is_one_more = len(self._tables) >= MAX_KINDS and kind not in event_schema.KINDS
            return is_one_more or len(names) > MAX_FIELDS
        new = sum(name not in table.columns for name in names)
        return bool(new) and len(table.columns) + new > MAX_FIELDS

    def _explain(self, kind: str, event: Mapping[str, Any]) -> str:
        if absent := [name for name in ("t", "attempt", "step") if name not in event]:
            return f"{', '.join(absent)}: missing"
        if not math.isfinite(event["t"]):
            return f"t: expected a finite number, got {event['t']}"
        if not 0 <= event["step"] <= self._max_step:
            return f"step: expected 0 to {self._max_step:,}, the steps of the run, got {event['step']:,}"
        if self._exceeds_bounds(kind, tuple(event)):
            return f"expected at most {MAX_KINDS} kinds of events, with at most {MAX_FIELDS} fields each"
        missing = event_schema.find_missing(kind, event)
        return f"{', '.join(missing)}: expected a value, got null"


def _have_type(field_type: event_schema.FieldType, values: list[Any], n_events: int) -> bool:
    """Return whether all values have the type of the field, with a fast path. A single null is a missing value."""
    types = set(map(type, values))
    if (field_type.form == NUMBER and types == {float}) or (field_type.form == "text" and types == {str}):
        return True
    if all(map(field_type.accepts, values)):
        return True
    return n_events == 1 and values[0] is None and field_type.name not in event_schema.get_fields("")


class Events(Sequence[E], Generic[E]):
    """A sequence of events in the order of writing, or a selection of it. Slicing and the methods below give selections.

    `violations`: of the whole record, even for a selection.
    """

    def __init__(self, tables: list[_Table], violations: Violations, ids: np.ndarray | None = None) -> None:
        self._tables, self.violations = tables, violations
        # The id of row r of table k is offsets[k] + r.
        self._offsets = np.cumsum([0, *map(len, tables)])
        if ids is None:
            lines = [np.frombuffer(table.lines, dtype=np.int64) for table in tables if len(table)]
            ids = np.argsort(np.concatenate(lines), kind="stable") if lines else np.zeros(0, np.int64)
        self._ids: np.ndarray = ids

    @classmethod
    def from_list(cls, events: Iterable[Mapping[str, Any]]) -> Events[Any]:
        """Return events in this order, as they are; they need only a kind."""
        if isinstance(events, Events):
            return events
        builder = EventsBuilder(validate=False)
        for line, event in enumerate(events, 1):
            builder.add(line, event)
        return builder.build()

    def __len__(self) -> int:
        return len(self._ids)

    @overload
    def __getitem__(self, index: int) -> E: ...
    @overload
    def __getitem__(self, index: slice) -> Events[E]: ...
    def __getitem__(self, index: int | slice) -> E | Events[E]:
        if isinstance(index, slice):
            return self.select(index)
        return self._make_event(int(self._ids[index]))

    def __iter__(self) -> Iterator[E]:
        return map(self._make_event, self._ids.tolist())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def __repr__(self) -> str:
        return f"Events({len(self)} events)"

    def __deepcopy__(self, memo: Any) -> list[E]:
        """Return a list of events that may be changed."""
        return list(self)

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
            for position, index in zip(where[has].tolist(), indices.tolist(), strict=True):
                result[position] = column[index]
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
            if isinstance(column, _ListColumn):
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

    def _split(self, name: str | None = None) -> Iterator[tuple[_Table, np.ndarray, np.ndarray]]:
        """Yield (table, positions in this selection, rows of the table) for each table with rows, and with the field."""
        for index, table in enumerate(self._tables):
            if name is None or name in table.columns:
                start, end = self._offsets[index], self._offsets[index + 1]
                where = np.flatnonzero((self._ids >= start) & (self._ids < end))
                if len(where):
                    yield table, where, self._ids[where] - start

    def _make_event(self, event_id: int) -> E:
        index = int(np.searchsorted(self._offsets, event_id, side="right")) - 1
        # Tables are never empty, so the offsets are distinct.
        return cast("E", self._tables[index].make_event(event_id - int(self._offsets[index])))
