"""Build `Events` from the lines of a record: check them against the schema, and store those with equal fields together."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

from nsa_lab.runs import event_fields, event_schema
from nsa_lab.runs.event_columns import INT, NUMBER, NUMBERS
from nsa_lab.runs.event_table import MAX_LISTED, Events, EventTable, Violation, Violations

BATCH = 256
MAX_KINDS, MAX_FIELDS = 64, 256  # different ones in a record; a bound on its memory


def make_events(events: Iterable[Mapping[str, Any]]) -> Events[Any]:
    """Return events in this order, as they are; they need only a kind."""
    if isinstance(events, Events):
        return events
    builder = EventsBuilder(validate=False)
    for line, event in enumerate(events, 1):
        builder.add(line, event)
    return builder.build()


class EventsBuilder:
    """Collects events, validates them against the schema, and builds `Events`.

    `max_step`: events of later steps are violations. `validate=False`: accept everything that has a kind, for events that
    were read before.
    """

    def __init__(self, max_step: int | None = None, *, validate: bool = True) -> None:
        self.violations = Violations()
        self._max_step = event_fields.MAX_INT if max_step is None else max_step
        self._validate = validate
        self._tables: dict[str, EventTable] = {}
        # (kind, names of the fields) -> events, lines
        self._pending: dict[tuple[str, tuple[str, ...]], tuple[list[Mapping[str, Any]], list[int]]] = {}

    def add(self, line: int, event: Any) -> None:
        """Add the event of a line."""
        # The test of a mapping is slow.
        kind = event.get("kind") if type(event) is dict or isinstance(event, Mapping) else None
        if not isinstance(kind, str):
            problem = (
                "expected an object with the name of a kind" if kind is None else f"kind: expected text, got {kind!r:.40}"
            )
            self.violations.add(Violation(line, "", problem, True))
            return
        form = kind, tuple(event)
        pending = self._pending.get(form)
        if pending is None or len(pending[0]) >= BATCH:
            if pending:
                self._flush(*form, *pending)
            elif len(self._pending) > MAX_KINDS:
                self._flush_all()
            pending = self._pending[form] = ([], [])
        pending[0].append(event)
        pending[1].append(line)

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
        for form, pending in self._pending.items():
            self._flush(*form, *pending)
        self._pending.clear()

    def _flush(self, kind: str, names: tuple[str, ...], events: list[Mapping[str, Any]], lines: list[int]) -> None:
        """Store events with the same names. If one is invalid, all are examined and stored one by one."""
        fields = {name: [event[name] for event in events] for name in names}
        if not self._validate:
            self._store(kind, fields, lines)
        elif self._are_valid(kind, names, fields):
            missing = event_fields.find_missing(kind, {name: values[0] for name, values in fields.items()})
            nullable = [name for name in missing if event_fields.get_fields(kind)[name].is_nullable and name not in names]
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
        known = event_fields.get_fields(kind)
        wrong = event_fields.find_wrong_types(kind, event)
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
            table = self._tables[kind] = EventTable(kind)
        table.extend(fields, lines)

    def _are_valid(self, kind: str, names: tuple[str, ...], fields: dict[str, list[Any]]) -> bool:
        if not {"t", "attempt", "step"} <= fields.keys() or self._exceeds_bounds(kind, names):
            return False
        known, n_events = event_fields.get_fields(kind), len(fields["t"])
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
        missing = event_fields.find_missing(kind, event)
        return f"{', '.join(missing)}: expected a value, got null"


def _have_type(field_type: event_fields.FieldType, values: list[Any], n_events: int) -> bool:
    """Return whether all values have the type of the field, with fast paths. A single null is a missing value."""
    types = set(map(type, values))
    if (field_type.form == NUMBER and types == {float}) or (field_type.form == "text" and types == {str}):
        return True
    if field_type.form == NUMBERS and types == {list} and set(map(type, chain.from_iterable(values))) <= {float}:
        return True
    if field_type.form in (NUMBER, INT) and event_fields.are_ints(values):
        return True
    if all(map(field_type.accepts, values)):
        return True
    return n_events == 1 and values[0] is None and field_type.name not in event_fields.get_fields("")
