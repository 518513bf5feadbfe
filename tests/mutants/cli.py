"""Mutants of nsa_lab/cli: one planted fault each."""

from __future__ import annotations

from mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        "bench: a model has as many layers as it would have anyway",
        "cli.benches",
        "layers=layers, backend=backend",
        "layers=None, backend=backend",
    ),
    Mutant(
        "report: a page of the record is made from the notebook",
        "cli.reading",
        "record_alone=record)",
        "record_alone=False)",
    ),
]
