"""A run's record as one table, for a spreadsheet or a data frame. Only the standard library; files are left alone."""

from __future__ import annotations

import csv
from typing import Any, TextIO

from nsa_lab.runs.history import History

# Of an evaluation, in columns of its own beside those of the step: `validation_bpb`, ...
EVAL_COLUMNS = ("seq_len", "windows", "text", "loss", "bpb", "seconds")
# In every event, and of no use in a table of one run.
EXCLUDED_FIELDS = frozenset({"v", "run", "kind", "nonfinite"})
FIRST_COLUMNS = ("step", "tokens", "attempt", "t")


def build_table(history: History) -> list[dict[str, Any]]:
    """One row per step that was logged or evaluated, ascending; each step once, in its latest attempt.

    A statistic per layer becomes a column per layer (`gate_entropy.0`), and one by name a column per name
    (`weight_bytes.float32`). What a step does not say is absent; a number that was not finite is None.
    """
    rows: dict[int, dict[str, Any]] = {}
    for event in history.steps:
        rows[event["step"]] = dict(
            _flatten_fields({name: value for name, value in event.items() if name not in EXCLUDED_FIELDS})
        )
    for event in history.evaluations:
        row = rows.setdefault(event["step"], {name: event[name] for name in FIRST_COLUMNS if name in event})
        row |= {f"validation_{name}": event[name] for name in EVAL_COLUMNS if name in event}
    return [rows[step] for step in sorted(rows)]


def write_csv(history: History, file: TextIO) -> int:
    """Write `table` as CSV with a header; the number of rows. An empty cell is what a step does not say."""
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
