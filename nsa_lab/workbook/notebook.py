"""What a training notebook does besides drawing: parameters to a configuration, a run to follow, a verdict at the end.

A problem that the reader can solve is one line in the notebook, not a traceback: `Stop`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from nsa_lab.config import ConfigError, RunConfig, UsageError, parse_override
from nsa_lab.health import examine
from nsa_lab.health.headline_questions import answer_questions, list_other_verdicts
from nsa_lab.health.next_actions import list_next_actions
from nsa_lab.runs import checkpoint_files, directory, lifecycle, resolve
from nsa_lab.runs.atomic_io import read_json
from nsa_lab.runs.directory import RunDirectoryError
from nsa_lab.runs.environment import get_code_identity
from nsa_lab.runs.events import read_events
from nsa_lab.runs.history import History
from nsa_lab.runs.summary import format_facts

N_LOG_LINES = 12


class Stop(Exception):
    """Ends a notebook with a line that says what it met, and what to do."""

    def _render_traceback_(self) -> list[str]:
        return [str(self)]


def load_configuration(name: str, sections: dict[str, dict[str, Any]], run_dir: str = "") -> RunConfig:
    """`params/<name>.yaml` with `sections` laid over it, or what `run_dir` was made with.

    Without a file of that name the sections are the whole configuration. Raises `Stop` with a line for each problem.
    """
    given = {section: _parse_numbers(section, values) for section, values in sections.items() if values}
    try:
        if run_dir:
            if given:
                raise ConfigError(
                    f"run_dir = {run_dir!r} and values for {', '.join(given)}: a run keeps its "
                    "configuration; leave run_dir empty to change it, or the sections to attach to the run"
                )
            return History.read(find_run_directory(run_dir)).config
        file = resolve.get_root() / "params" / f"{name}.yaml"
        if given and not file.is_file():
            return RunConfig.from_dict({"name": name, **given})
        return RunConfig.from_yaml(resolve.find_params_file(name), given)
    except UsageError as error:
        raise Stop(f"{type(error).__name__}: {error}") from None


def find_run_directory(run_dir: str) -> Path:
    """A run directory by path (from the project's folder), by id, or by the beginning of its id."""
    here = resolve.get_root() / run_dir
    return resolve.find_run(str(here) if here.is_dir() else run_dir, resolve.get_outputs_dir())


def find_run(run: str) -> Path:
    """`run_directory`. Raises `Stop`."""
    try:
        return find_run_directory(run)
    except RunDirectoryError as error:
        raise Stop(f"RunDirectoryError: {error}") from None


def start_run(config: RunConfig, run_dir: str = "", *, outputs: str = "", new_run: bool = False) -> Path:
    """The directory of a run that is under way or finished; says what it did to get there. Raises `Stop`.

    With `run_dir`, that run: attached to, resumed, or shown. Otherwise the latest run of exactly this configuration that is
    unfinished; else one that this very code finished; else, or with `new_run`, a new run.
    """
    folder = resolve.get_root() / outputs if outputs else resolve.get_outputs_dir()
    try:
        if run_dir:
            found = find_run_directory(run_dir)
        elif new_run:
            found = None
        else:
            found = lifecycle.find_unfinished(config, folder) or _find_finished(config, folder)
        if found is None:
            run = lifecycle.ensure(config, folder, new=True)
            print(f"new run: {run}")
            return run
        before, way = lifecycle.get_state(found), _describe_start(found)
        run = lifecycle.ensure(found)
    except UsageError as error:
        raise Stop(f"{type(error).__name__}: {error}") from None
    did = {
        directory.RUNNING: "attached to the run that is under way",
        directory.DONE: "this run is finished and is shown below; set new_run = True to train again",
        directory.HALTED: "this run was halted; why, and what to do, stands below",
    }
    print(f"{did.get(before, way)}: {run}")
    return run


def _describe_start(run: Path) -> str:
    """How a trainer that is started now gets into the run: its record and its checkpoints tell, not its state."""
    if not any(event["kind"] in ("start", "resume") for event in read_events(run)):
        return "started"
    saved = checkpoint_files.list_steps(checkpoint_files.get_checkpoint_dir(run))
    return f"resumed from its checkpoint of step {saved[-1]:,}" if saved else "started anew, for it has saved no checkpoint"


def print_verdicts(run: str | Path | History, *, without_answers: bool = False) -> None:
    """Every verdict on the run, one line each, and the headline; or those alone that `print_answers` does not tell."""
    health = examine(run)
    print(*(list_other_verdicts(health.verdicts) if without_answers else health.verdicts), sep="\n")
    print(f"\n{health.headline}\n")


def print_answers(run: str | Path | History) -> None:
    """Did it work, how fast, is the gate alive, is selection doing anything: one line each."""
    for answer in answer_questions(examine(run).verdicts):
        print(f"{answer.mark:<4} {answer.name} {answer.text}")


def print_columns(header: Sequence[str], rows: Iterable[tuple[str, *tuple[str | float | None, ...]]]) -> None:
    """What is told of each beside each other, one line per name: texts, numbers to three digits, a dash where it is not
    known. The line between names and values keeps it a table on a page, however narrow."""
    print(f"{header[0]:<32}│" + "".join(f"{name:>18}" for name in header[1:]))
    for name, *values in rows:
        told = ("–" if value is None else value if isinstance(value, str) else f"{value:.3f}" for value in values)
        print(f"{name:<32}│" + "".join(f"{text:>18}" for text in told))


def print_final_verdict(run: Path) -> None:
    """Print the verdicts on the run. Raises `Stop` if it ended badly, so that the notebook says so too."""
    print_verdicts(run)
    state = lifecycle.get_state(run)
    if state in (directory.HALTED, "DEAD"):
        # Why it ended stands in the verdicts.
        raise Stop("\n".join([f"the run is {state}.", *list_next_actions(History.read(run))[:1]]))


def read_log_tail(run: Path) -> str:
    """The last lines of the trainer's log, for a trainer that died without a word."""
    log = run / directory.LOG
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.is_file() else []
    return "\n".join(lines[-N_LOG_LINES:])


def find_latest_finished(outputs: str = "") -> Path:
    """The newest run directory whose run is DONE. Raises `Stop` if there is none."""
    folder = resolve.get_root() / outputs if outputs else resolve.get_outputs_dir()
    for run in reversed(resolve.list_run_dirs(folder)):
        if directory.read_status(run).get("status") == directory.DONE:
            return run
    raise Stop(f"no finished run in {folder}; make one with: nsa-lab run smoke")


def read_histories(run_dir: str = "", other_run: str = "", outputs: str = "") -> list[History]:
    """The record of the run that is named, by default of the newest finished one, then of the other if one is named.

    Raises `Stop`.
    """
    run = find_run(run_dir) if run_dir else find_latest_finished(outputs)
    return [History.read(each) for each in (run, *([find_run(other_run)] if other_run else []))]


def format_facts_table(history: History) -> str:
    """What a run was and what it came to, as a table in Markdown."""
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in format_facts(history))])


def list_other_runs(runs: list[History], outputs: str = "") -> list[Path]:
    """Runs in the folder besides these that recorded anything, newest first."""
    folder = resolve.get_root() / outputs if outputs else resolve.get_outputs_dir()
    known = {history.run for history in runs}
    there = reversed(resolve.list_run_dirs(folder))
    return [run for run in there if run.name not in known and (run / directory.EVENTS).is_file()]


def _find_finished(config: RunConfig, folder: Path) -> Path | None:
    """The latest run that is DONE, of exactly this configuration and made by this very code."""
    source = get_code_identity()["source"]
    for run in reversed(resolve.list_run_dirs(folder)):
        if directory.read_status(run).get("status") != directory.DONE:
            continue
        known = read_json(run / directory.ENVIRONMENT)
        same = known.get("config_hash") == config.hash() and known.get("code", {}).get("source") == source
        if same and run.name.startswith(f"{config.name}-"):
            return run
    return None


def _parse_numbers(section: str, values: dict[str, Any]) -> dict[str, Any]:
    """Papermill reads `lr: 1e-3` from YAML 1.1 as the text "1e-3"; here such a text is the number it means."""
    if not isinstance(values, dict):
        raise Stop(f"{section} = {values!r}: expected a mapping of keys and values")

    def number(value: Any) -> Any:
        read = parse_override(f"value={value}")[1] if isinstance(value, str) and "e" in value.lower() else value
        return read if isinstance(read, float) else value

    return {key: number(value) for key, value in values.items()}
