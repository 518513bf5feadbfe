"""Convert the record of a run to one table, for a spreadsheet or a data frame. Standard library only."""

from __future__ import annotations

import csv
from typing import Any, TextIO

from nsa_lab.runs.history import History

# Fields of evaluations. Their columns have the prefix `validation_`, next to the columns of the step.
EVAL_COLUMNS = ("seq_len", "windows", "text", "loss", "bpb", "seconds")
# Fields of every event that are useless in a table of one run.
EXCLUDED_FIELDS = frozenset({"v", "run", "kind", "nonfinite"})
FIRST_COLUMNS = ("step", "tokens", "attempt", "t")


def build_table(history: History) -> list[dict[str, Any]]:
    """Return one row per logged or evaluated step, ascending. Each step occurs once, as its latest attempt recorded it.

    Lists become one column per layer (`gate_entropy.0`), mappings one column per name (`weight_bytes.float32`). Fields that
    a step did not record are absent; numbers that were not finite are None.
    """
    rows: dict[int, dict[str, Any]] = {}
    for event in history.steps:
        rows[event["step"]] = dict(
            _flatten_fields({name: value for name, value in event.items() if name not in EXCLUDED_FIELDS})
        )
    for event in history.evaluations:
        row = rows.setdefault(event["step"], {name: event[name] for name in FIRST_COLUMNS if name in event})
        row |= {f"validation_{name}": value for name, value in event.items() if name in EVAL_COLUMNS}
    return [rows[step] for step in sorted(rows)]


def write_csv(history: History, file: TextIO) -> int:
    """Write `build_table` as CSV with a header. Return the number of rows. Missing fields are empty cells."""
    rows = build_table(history)
    columns = dict.fromkeys([*FIRST_COLUMNS, *(name for row in rows for name in row)])
    writer = csv.DictWriter(file, list(columns), restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return len(rows)


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
