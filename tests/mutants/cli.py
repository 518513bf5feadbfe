"""Mutants of nsa_lab/cli: one planted fault each."""

from __future__ import annotations

from mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        "bench: a model has as many layers as it would have anyway",
        "cli.bench_commands",
        "layers=layers, backend=backend",
        "layers=None, backend=backend",
    ),
    Mutant(
        "report: a page of the record is made from the notebook",
        "cli.inspect_commands",
        "record_only=record)",
        "record_only=False)",
    ),
]
