"""Columns of an event table: the values of one field, stored as compactly as their form allows.

Invariant: a value that is read back equals the value that was added. Changing it does not change the column.
"""

from __future__ import annotations

import copy
import math
from array import array
from bisect import bisect_left
from itertools import accumulate, chain
from typing import Any

import numpy as np

from nsa_lab.runs import event_fields

EXACT_INT = 2**53  # larger integers are not exact in float64
NUMBER, INT, NUMBERS, OBJECT = "number", "int", "numbers", "object"
_NUMBER_TYPES = frozenset({float, int, type(None)})


class Column:
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

    def get_values(self, indices: list[int]) -> list[Any]:
        """Return the values at these indices."""
        return [self[index] for index in indices]

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
        if not len(rows):
            return np.zeros(0, dtype=bool), rows
        # A table from row to index is twice as fast as a search for each row. Most readers ask for one attempt only.
        own, first, last = np.frombuffer(self.rows, dtype=np.int64), int(rows.min()), int(rows.max())
        start, end = np.searchsorted(own, (first, last + 1))
        table = np.full(last - first + 1, -1)
        table[own[start:end] - first] = np.arange(start, end)
        indices = table[rows - first]
        has = indices >= 0
        return has, indices[has]

    def numbers(self, indices: np.ndarray) -> np.ndarray:
        """Return values as float64; NaN for a value that is not a number."""
        values = (self[index] for index in indices.tolist())
        return np.array([_to_float(value) if _is_number(value) else math.nan for value in values], dtype=np.float64)


class _ArrayColumn(Column):
    """Numbers in an array."""

    typecode = "d"
    placeholder: float = math.nan

    def __init__(self) -> None:
        super().__init__()
        self._data = array(self.typecode)
        # Indices, ascending, and numbers of the first exceptions.
        self._known_exceptions = np.zeros(0, np.int64), np.zeros(0)

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
        values = np.frombuffer(self._data, dtype=self.typecode)[indices].astype(np.float64)
        if self.exceptions:
            own, numbers = self._get_exceptions()
            positions = np.minimum(np.searchsorted(own, indices), len(own) - 1)
            is_exception = own[positions] == indices
            values[is_exception] = numbers[positions[is_exception]]
        return values

    def _get_exceptions(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the indices of the exceptions, ascending, and their numbers."""
        if len(self._known_exceptions[0]) < len(self.exceptions):
            numbers = [_to_float(value) if _is_number(value) else math.nan for value in self.exceptions.values()]
            self._known_exceptions = np.array(list(self.exceptions), np.int64), np.array(numbers, np.float64)
        return self._known_exceptions


class _NumberColumn(_ArrayColumn):
    form = NUMBER


class _IntColumn(_ArrayColumn):
    form, typecode, placeholder = INT, "q", 0

    def _fits(self, values: list[Any]) -> bool:
        return event_fields.are_ints(values)


class ListColumn(Column):
    """Lists of numbers in one array."""

    form = NUMBERS

    def __init__(self) -> None:
        super().__init__()
        self._data, self._ends = array("d"), array("q")

    def __len__(self) -> int:
        return len(self._ends)

    def _store(self, values: list[Any]) -> None:
        if set(map(type, values)) == {list} and set(map(type, chain.from_iterable(values))) <= {float}:
            self._ends.extend(accumulate(map(len, values[1:]), initial=len(self._data) + len(values[0])))
            self._data.extend(chain.from_iterable(values))
            return
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


class _ObjectColumn(Column):
    """Any values. Equal texts, and equal values in a row, are stored once."""

    def __init__(self) -> None:
        super().__init__()
        self._data: list[Any] = []
        self._texts: dict[str, str] = {}
        self._has_containers = False  # which are copied, because a reader may change them

    def __len__(self) -> int:
        return len(self._data)

    def _store(self, values: list[Any]) -> None:
        types = set(map(type, values))
        if types == {str}:
            self._data += [self._texts.setdefault(value, value) for value in values]
            return
        self._has_containers |= any(issubclass(kind, (dict, list)) for kind in types)
        for value in values:
            if isinstance(value, str):
                value = self._texts.setdefault(value, value)
            elif self._data and type(value) is type(self._data[-1]) and value == self._data[-1]:
                value = self._data[-1]
            self._data.append(value)

    def __getitem__(self, index: int) -> Any:
        value = self._data[index]
        return copy.deepcopy(value) if isinstance(value, (dict, list)) else value

    def get_values(self, indices: list[int]) -> list[Any]:
        values = [self._data[index] for index in indices]
        if not self._has_containers:
            return values
        return [copy.deepcopy(value) if isinstance(value, (dict, list)) else value for value in values]


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _is_exact(value: Any) -> bool:
    return type(value) is not int or abs(value) <= EXACT_INT


def _to_float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf


def make_column(form: str | None, values: list[Any]) -> Column:
    """Return an empty column for a form of the schema; for an unknown field, by its first values."""
    if form is None:
        types = set(map(type, values))
        is_list = types == {list} and all(set(map(type, value)) <= _NUMBER_TYPES for value in values)
        form = INT if types == {int} else NUMBER if types <= {float, int} else NUMBERS if is_list else OBJECT
    return {NUMBER: _NumberColumn, INT: _IntColumn, NUMBERS: ListColumn}.get(form, _ObjectColumn)()
