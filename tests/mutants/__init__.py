"""Planted faults. `python tests/mutants/run.py` plants each of them and runs the tests that must catch it."""

from __future__ import annotations

from importlib import import_module

AREAS = (
    *("attention", "bench", "cli", "config", "convert", "data", "evaluate", "hardening", "health", "inference", "kernels"),
    *("model", "records", "runs", "train", "workbook"),
)
MUTANTS = [mutant for area in AREAS for mutant in import_module(f"mutants.{area}").MUTANTS]
