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
        "records: an attempt that records no text passes",
        "health.attempt_checks",
        "if values[0] is not None and values[1] is None:",
        "if False:",
    ),
    Mutant(
        "records: fewer questions pass",
        "health.attempt_checks",
        "if previous.get(field) != event.get(field):",
        "if False:",
    ),
    Mutant(
        "records: more questions of a newer version fail",
        "health.attempt_checks",
        'if previous["attempt"] == event["attempt"]:',
        "if True:",
    ),
    Mutant(
        "records: a share of answers that is no number",
        "health.ablation_relations",
        "if abs(right - round(right)) > ROUNDING:",
        "if False:",
    ),
    Mutant(
        "records: another reason of a finished run passes",
        "health.ending_checks",
        "if problem := _find_other_reason(history, endings):",
        "if problem := None:",
    ),
    Mutant(
        "records: a status of another year passes",
        "health.record_checks",
        "if ok and (problem := _find_other_date(history, limits)):",
        "if problem := None:",
    ),
    Mutant(
        "records: a later status of a stopped run fails",
        "health.record_checks",
        "last + tolerance if state == directory.DONE else math.inf",
        "last + tolerance",
    ),
    Mutant(
        "records: a checkpoint outside its folder passes",
        "health.step_accounting",
        'if event.get("path") not in (None, path):',
        'if event.get("path") and event["path"][-8:] != path[-8:]:',
    ),
    Mutant(
        "records: an old phase passes",
        "health.consistency_checks",
        "    _check_phase_ages,\n",
        "",
    ),
    Mutant(
        "records: events of another version are read without a word",
        "health.record_checks",
        "if not others and unknown:",
        "if False:",
    ),
    Mutant(
        "records: an evaluation of another configuration passes",
        "health.evaluation_checks",
        "if recorded is not None and hashes and recorded not in hashes:",
        "if False:",
    ),
    Mutant(
        "records: an evaluation of a checkpoint fails",
        "health.evaluation_checks",
        "return {history.config.train.steps, *saved,",
        "return {history.config.train.steps,",
    ),
    Mutant(
        "records: a lost hash passes",
        "health.start_checks",
        'if is_recent and not isinstance(history.environment.get("config_hash"), str):',
        "if False:",
    ),
]
