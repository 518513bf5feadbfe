"""Common steps of the notebooks: build the configuration from parameters, start or find a run, and print its verdict.

A problem that the user can solve is one line in the notebook instead of a traceback: `Stop`.
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
from nsa_lab.runs.tables import Table

N_LOG_LINES = 12


class Stop(Exception):
    """Stop a notebook with a line that states the problem and what to do."""

    def _render_traceback_(self) -> list[str]:
        return [str(self)]


def load_configuration(name: str, sections: dict[str, dict[str, Any]], run_dir: str = "") -> RunConfig:
    """Return `params/<name>.yaml` with `sections` on top, or the configuration of the run in `run_dir`.

    With a new name, the sections are the whole configuration. Raises `Stop` with a line for each problem. A name that is
    similar to a preset's name is not new but misspelt.
    """
    overrides = {section: _parse_numbers(section, values) for section, values in sections.items() if values}
    try:
        if run_dir:
            if overrides:
                raise ConfigError(
                    f"run_dir = {run_dir!r} and values for {', '.join(overrides)}: the configuration of a run is fixed; "
                    "leave run_dir empty to change values, or leave the sections empty to attach to the run"
                )
            return History.read(find_run_directory(run_dir)).config
        if overrides and resolve.is_new_name(name):
            return RunConfig.from_dict({"name": name, **overrides})
        return RunConfig.from_yaml(resolve.find_params_file(name), overrides)
    except UsageError as error:
        raise Stop(f"{type(error).__name__}: {error}") from None


def find_run_directory(run_dir: str) -> Path:
    """Return a run directory by path (relative to the project), by id, or by the first characters of its id."""
    path = resolve.get_root() / run_dir
    return resolve.find_run(str(path) if path.is_dir() else run_dir, resolve.get_outputs_dir())


def find_run(run: str) -> Path:
    """Return `find_run_directory(run)`. Raises `Stop` if there is no such run."""
    try:
        return find_run_directory(run)
    except RunDirectoryError as error:
        raise Stop(f"RunDirectoryError: {error}") from None


def start_run(config: RunConfig, run_dir: str = "", *, outputs: str = "", new_run: bool = False) -> Path:
    """Return the directory of a run that is running or finished, and print the action. Raises `Stop`.

    With `run_dir`, attach to that run, resume it, or show it. Otherwise take the latest unfinished run of exactly this
    configuration, else a finished one made by the same code, else start a new run. `new_run` always starts a new run.
    """
    folder = resolve.get_root() / outputs if outputs else resolve.get_outputs_dir()
    try:
        # If two notebooks have the same parameters, one starts a run and the other attaches to it.
        with lifecycle.hold_creation_lock(folder):
            if run_dir:
                existing_run = find_run_directory(run_dir)
            elif new_run:
                existing_run = None
            else:
                existing_run = lifecycle.find_unfinished(config, folder) or _find_finished(config, folder)
            if existing_run is None:
                run = lifecycle.ensure(lifecycle.create_run(config, folder))
                print(f"new run: {run}")
                return run
            state, action = lifecycle.get_state(existing_run), _describe_start(existing_run)
            run = lifecycle.ensure(existing_run)
    except UsageError as error:
        raise Stop(f"{type(error).__name__}: {error}") from None
    messages = {
        directory.RUNNING: "attached to the running run",
        directory.DONE: "this run is finished and shown below; set new_run = True to train again",
        directory.HALTED: "this run was halted; the reason and the advice are below",
    }
    print(f"{messages.get(state, action)}: {run}")
    return run


def _describe_start(run: Path) -> str:
    """Return how a trainer started now begins, according to the run's record and checkpoints."""
    if not any(event["kind"] in ("start", "resume") for event in read_events(run)):
        return "started"
    checkpoint_steps = checkpoint_files.list_steps(checkpoint_files.get_checkpoint_dir(run))
    return (
        f"resumed from its checkpoint of step {checkpoint_steps[-1]:,}"
        if checkpoint_steps
        else "started from step 0, because it has no checkpoint"
    )


def print_verdicts(run: str | Path | History, *, without_answers: bool = False) -> None:
    """Print every check of the run, one line each, and the headline.

    With `without_answers`, omit the checks that `print_answers` shows.
    """
    health = examine(run)
    print(*(list_other_verdicts(health.verdicts) if without_answers else health.verdicts), sep="\n")
    print(f"\n{health.headline}\n")


def print_answers(run: str | Path | History) -> None:
    """Print one line for each headline question: training, throughput, gates and selection."""
    for answer in answer_questions(examine(run).verdicts):
        print(f"{answer.mark:<4} {answer.name} {answer.text}")


def print_columns(header: Sequence[str], rows: Iterable[tuple[str, *tuple[str | float | None, ...]]]) -> None:
    """Print a table, one line per name: texts, numbers with three digits, and a dash for unknown values.

    The box character between names and values keeps the lines unwrapped on a page.
    """
    print(Table(header, rows).to_text())


def print_final_verdict(run: Path) -> None:
    """Print the checks of the run. Raises `Stop` if the run ended badly, so that the notebook fails too."""
    print_verdicts(run)
    state = lifecycle.get_state(run)
    if state in (directory.HALTED, "DEAD"):
        # The checks above give the reason.
        raise Stop("\n".join([f"the run is {state}.", *list_next_actions(History.read(run))[:1]]))


def read_log_tail(run: Path) -> str:
    """Return the last lines of the trainer's log, for a trainer that ended without a message."""
    log = run / directory.LOG
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.is_file() else []
    return "\n".join(lines[-N_LOG_LINES:])


def find_latest_finished(outputs: str = "") -> Path:
    """Return the newest run directory with status DONE, of the user if there is one. Raises `Stop` if there is none."""
    folder = resolve.get_root() / outputs if outputs else resolve.get_outputs_dir()
    newest_first = list(reversed(resolve.list_run_dirs(folder)))
    for run in sorted(newest_first, key=directory.is_recorded):
        if directory.read_status(run).get("status") == directory.DONE:
            return run
    raise Stop(f"no finished run in {folder}; make one with: nsa-lab run smoke")


def read_histories(run_dir: str = "", other_run: str = "", outputs: str = "") -> list[History]:
    """Return the histories of `run_dir` (default: the newest finished run) and of `other_run`, if given. Raises `Stop`."""
    run = find_run(run_dir) if run_dir else find_latest_finished(outputs)
    return [History.read(each) for each in (run, *([find_run(other_run)] if other_run else []))]


def format_facts_table(history: History) -> str:
    """Return the main facts of a run as a Markdown table."""
    return Table(("", ""), format_facts(history)).to_markdown()


def list_other_runs(runs: list[History], outputs: str = "") -> list[Path]:
    """Return the other runs in the folder that have recorded events, newest first."""
    folder = resolve.get_root() / outputs if outputs else resolve.get_outputs_dir()
    names = {history.run for history in runs}
    run_dirs = reversed(resolve.list_run_dirs(folder))
    return [run for run in run_dirs if run.name not in names and (run / directory.EVENTS).is_file()]


def _find_finished(config: RunConfig, folder: Path) -> Path | None:
    """Return the latest finished run with exactly this configuration and the same source code, or None."""
    source = get_code_identity()["source"]
    for run in reversed(resolve.list_own_run_dirs(folder)):
        if directory.read_status(run).get("status") != directory.DONE:
            continue
        environment = read_json(run / directory.ENVIRONMENT)
        is_same = environment.get("config_hash") == config.hash() and environment.get("code", {}).get("source") == source
        if is_same and run.name.startswith(f"{config.name}-"):
            return run
    return None


def _parse_numbers(section: str, values: dict[str, Any]) -> dict[str, Any]:
    """Convert texts such as "1e-3" to numbers. Papermill reads `lr: 1e-3` as text, because it parses YAML 1.1."""
    if not isinstance(values, dict):
        raise Stop(f"{section} = {values!r}: expected a mapping of keys and values")
    if wrong := [key for key in values if not isinstance(key, str)]:
        raise Stop(
            f"{section}: expected names of settings as keys, got {wrong[0]!r}; write for example {{steps: 6}} for train"
        )

    def number(value: Any) -> Any:
        parsed = parse_override(f"value={value}")[1] if isinstance(value, str) and "e" in value.lower() else value
        return parsed if isinstance(parsed, float) else value

    return {key: number(value) for key, value in values.items()}
