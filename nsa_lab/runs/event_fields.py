"""Types of the fields of events, and checks of their values against the schema (`nsa_lab.runs.event_schema`)."""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, NotRequired, get_args, get_origin

from nsa_lab.runs.event_schema import KINDS, Event, Field, Number

MAX_INT = 2**63 - 1


def is_int(value: Any) -> bool:
    """Return whether a value is an integer of at most 64 bits, not a boolean."""
    return type(value) is int and -MAX_INT - 1 <= value <= MAX_INT


def are_ints(values: list[Any]) -> bool:
    """Return whether all values are such integers. Faster than a call per value."""
    return set(map(type, values)) == {int} and min(values) >= -MAX_INT - 1 and max(values) <= MAX_INT


def is_number(value: Any) -> bool:
    """Return whether a value is an integer of at most 64 bits or a float, not a boolean."""
    return type(value) is float or is_int(value)


def is_finite(value: Any) -> bool:
    """Return whether a value is a finite number."""
    return is_number(value) and math.isfinite(value)


@dataclass(frozen=True)
class FieldType:
    """Type of a field as JSON. `form` is the storage class: number, int, text, numbers (a list) or object.

    `is_required`: every event of the kind has the field. `is_nullable`: null is allowed.
    """

    name: str
    form: str
    label: str
    is_required: bool
    is_nullable: bool
    info: Field
    accepts: Callable[[Any], bool]


@cache
def get_fields(kind: str) -> dict[str, FieldType]:
    """Return the fields of a kind by name. An unknown kind has the fields of every event."""
    definition = KINDS.get(kind, Event)
    hints = typing.get_type_hints(definition, include_extras=True)
    return {name: _make_field_type(name, hint) for name, hint in hints.items()}


def find_wrong_types(kind: str, event: Mapping[str, Any]) -> dict[str, str]:
    """Return name -> problem of the known fields whose values have a wrong type.

    null is never a wrong type outside the fields of every event: it counts as a missing value (`find_missing`).
    """
    fields, common = get_fields(kind), get_fields("")
    return {
        name: f"{name}: expected {fields[name].label}, got {_shorten(value)}"
        for name, value in event.items()
        if name in fields and not fields[name].accepts(value) and (value is not None or name in common)
    }


def find_missing(kind: str, event: Mapping[str, Any]) -> list[str]:
    """Return the required fields that an event lacks, and its fields that are null and must not be."""
    return [
        name
        for name, field in get_fields(kind).items()
        if (name not in event and field.is_required) or (event.get(name, 0) is None and not field.is_nullable)
    ]


def check_event(event: Mapping[str, Any]) -> str | None:
    """Return why a complete event violates the schema; None if it does not."""
    kind = event.get("kind")
    if not isinstance(kind, str):
        return f"kind: expected text, got {_shorten(kind)}"
    if problems := find_wrong_types(kind, event):
        return "; ".join(problems.values())
    missing = find_missing(kind, event)
    return f"{', '.join(missing)}: missing" if missing else None


def _shorten(value: Any) -> str:
    try:
        text = "nothing" if value is None else repr(value)
    except (ValueError, RecursionError):
        # Python refuses to print integers of thousands of digits.
        text = f"a {type(value).__name__} that is too long to print"
    return text if len(text) <= 40 else f"{text[:37]}..."


def _make_field_type(name: str, hint: Any) -> FieldType:
    is_required = get_origin(hint) is not NotRequired
    if not is_required:
        (hint,) = get_args(hint)
    annotated, info = get_args(hint)[:2]
    form, label, accepts = _describe_type(annotated)
    is_nullable = type(None) in get_args(annotated)
    return FieldType(name, form, label, is_required, is_nullable, info, accepts)


_PLAIN_TYPES: dict[Any, tuple[str, str, Callable[[Any], bool]]] = {
    int: ("int", "an integer", is_int),
    float: ("number", "a number", is_number),
    str: ("text", "text", lambda value: isinstance(value, str)),
    bool: ("object", "true or false", lambda value: isinstance(value, bool)),
    type(None): ("object", "null", lambda value: value is None),
}


def _describe_type(hint: Any) -> tuple[str, str, Callable[[Any], bool]]:
    """Return form, label and test of a type of the definitions above."""
    if hint in _PLAIN_TYPES:
        return _PLAIN_TYPES[hint]
    origin, parameters = get_origin(hint), get_args(hint)
    if origin in (types.UnionType, typing.Union):
        parts = [_describe_type(part) for part in parameters]
        label = " or ".join(part[1] for part in parts)
        form = parts[0][0] if parameters[0] in (int, float) and len(parts) == 2 else "object"
        tests = [part[2] for part in parts]
        return form, label, lambda value: any(test(value) for test in tests)
    _, label, test = _describe_type(parameters[-1])
    if origin is list:
        form = "numbers" if parameters[0] == Number else "object"
        return form, f"a list of {_plural(label)}", lambda value: isinstance(value, list) and all(map(test, value))
    if origin is dict:
        return (
            "object",
            f"a mapping to {_plural(label)}",
            lambda value: isinstance(value, dict) and all(map(test, value.values())),
        )
    raise TypeError(f"{hint}: no such type in an event; use int, float, str, bool, list or dict")


def _plural(label: str) -> str:
    return label.replace("a number", "numbers").replace("an integer", "integers").replace("a mapping", "mappings")
