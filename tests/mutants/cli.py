"""Mutants of nsa_lab/cli: one planted fault each."""

from __future__ import annotations

from mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        "bench: --layers is ignored",
        "cli.bench_commands",
        "layers=layers,",
        "layers=None,",
    ),
    Mutant(
        "report: --record is ignored",
        "cli.inspect_commands",
        "record_only=record)",
        "record_only=False)",
    ),
]
