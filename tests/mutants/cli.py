"""Mutants of nsa_lab/cli: one planted fault each."""

from __future__ import annotations

from mutants.mutant import Mutant

MUTANTS = [
    Mutant("cli: an empty path is the working directory", "cli.common", "if not str(text).strip():", "if False:"),
    Mutant(
        "bench: --layers is ignored",
        "cli.bench_commands",
        "layers=layers,",
        "layers=None,",
    ),
    Mutant(
        "plan: --tokens-per-s is not compared with the run",
        "cli.training_commands",
        "compare_plan_with_run(History.read(run_dir), tokens_per_s)",
        "compare_plan_with_run(History.read(run_dir))",
    ),
    Mutant(
        "evaluate: --windows is ignored with --blocks",
        "cli.model_commands",
        "blocks=blocks, texts=texts, windows=windows,",
        "blocks=blocks, texts=texts, windows=16,",
    ),
    Mutant(
        "report: --record is ignored",
        "cli.inspect_commands",
        "record_only=record)",
        "record_only=False)",
    ),
]
