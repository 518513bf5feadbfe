"""Convert the record of a run to one table, for a spreadsheet or a data frame. Does not import torch."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any, TextIO

from nsa_lab.runs import tables
from nsa_lab.runs.history import History

# Fields of evaluations. Their columns have the prefix `validation_`, next to the columns of the step.
EVAL_COLUMNS = ("seq_len", "windows", "text", "loss", "bpb", "seconds")
# Fields of every event that are useless in a table of one run.
EXCLUDED_FIELDS = frozenset({"v", "run", "kind", "nonfinite"})
FIRST_COLUMNS = ("step", "tokens", "attempt", "t")


def iterate_rows(history: History) -> Iterator[dict[str, Any]]:
    """Yield one row per logged or evaluated step, ascending. Each step occurs once, as its latest attempt recorded it.

    Lists become one column per layer (`gate_entropy.0`), mappings one column per name (`weight_bytes.float32`). Fields that
    a step did not record are absent; numbers that were not finite are None.
    """
    rows = heapq.merge(
        ((event["step"], _make_step_row(event)) for event in history.steps),
        ((event["step"], _make_eval_row(event)) for event in history.evaluations),
        key=lambda row: row[0],
    )
    for _, same_step in groupby(rows, key=lambda row: row[0]):
        merged: dict[str, Any] = {}
        for _, row in same_step:
            # If both events have a column, the `step` event's value counts.
            merged = {**row, **merged}
        yield merged


def write_csv(history: History, file: TextIO) -> int:
    """Write `iterate_rows` as CSV with a header, one row at a time. Return the number of rows."""
    columns: dict[str, None] = dict.fromkeys(FIRST_COLUMNS)
    for row in iterate_rows(history):
        columns |= dict.fromkeys(row)
    return tables.write_csv(file, list(columns), iterate_rows(history))


def _make_step_row(event: Mapping[str, Any]) -> dict[str, Any]:
    return dict(_flatten_fields({name: value for name, value in event.items() if name not in EXCLUDED_FIELDS}))


def _make_eval_row(event: Mapping[str, Any]) -> dict[str, Any]:
    row = {name: event[name] for name in FIRST_COLUMNS if name in event}
    return row | {f"validation_{name}": event[name] for name in EVAL_COLUMNS if name in event}


def _flatten_fields(fields: dict[str, Any]) -> list[tuple[str, Any]]:
    columns: list[tuple[str, Any]] = []
    for name, value in fields.items():
        if isinstance(value, dict):
            columns += [(f"{name}.{key}", inner) for key, inner in value.items()]
        elif isinstance(value, list):
            columns += [(f"{name}.{index}", inner) for index, inner in enumerate(value)]
        else:
            columns.append((name, value))
    return columns
