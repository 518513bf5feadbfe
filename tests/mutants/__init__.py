"""Planted faults. `python tests/mutants/run.py` plants each of them and runs the tests that must catch it."""

from __future__ import annotations

from mutants import (
    attention,
    bench,
    cli,
    config,
    convert,
    data,
    evaluate,
    hardening,
    health,
    inference,
    kernels,
    model,
    runs,
    train,
    workbook,
)

MUTANTS = [
    m
    for area in (
        *(
            attention,
            bench,
            cli,
            config,
            convert,
            data,
            evaluate,
            hardening,
            health,
            inference,
            kernels,
            model,
            runs,
            train,
        ),
        workbook,
    )
    for m in area.MUTANTS
]
