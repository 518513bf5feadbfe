"""Mutants of the checks that compare the files of a record with each other: one planted fault each."""

from __future__ import annotations

from mutants.mutant import Mutant

MUTANTS = [
    *(
        Mutant(f"records: a fault passes: {function}", "health.start_checks", f"    {function},\n", "")
        for function in ("_check_parameters", "_check_moments", "_check_work_per_token", "_check_packing")
    ),
    Mutant(
        "records: sharded weights are fewer than the parameters",
        "health.start_checks",
        'is_whole = first is not None and (first.get("ranks") == 1 or history.config.runtime.parallel == "ddp")',
        "is_whole = first is not None",
    ),
    Mutant(
        "records: a GPU that a CPU run measures",
        "health.start_checks",
        "_measures_gpu, lambda own, _: own",
        "lambda *_: None, lambda own, _: own",
    ),
    Mutant(
        "records: another backend than that of the device",
        "health.start_checks",
        'name == "triton" and reason',
        "reason",
    ),
    Mutant(
        "records: the configuration is that of every attempt",
        "health.start_checks",
        'is_last = event["attempt"] == history.last_attempt',
        "is_last = True",
    ),
    Mutant("records: the build of torch is another version", "health.start_checks", '.partition("+")[0] != str', " != str"),
    Mutant(
        "records: an old run without a hash fails",
        "health.start_checks",
        'is_recent = any("settings" in event for event in history.first_events)',
        "is_recent = True",
    ),
    Mutant(
        "records: a lost hash passes",
        "health.start_checks",
        'if is_recent and not isinstance(history.environment.get("config_hash"), str):',
        "if False:",
    ),
]
