"""Group runs into models. Runs that differ only in `train.seed`, or in how they were computed, are one model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from nsa_lab.config import ConfigError
from nsa_lab.health.matched_pair import get_data_digests
from nsa_lab.health.paired_difference import make_seed_group_key
from nsa_lab.runs.evaluation import read_evaluation, read_ruler
from nsa_lab.runs.history import History
from nsa_lab.runs.summary import diff_settings

AddNote = Callable[[str], None]
# Settings that runs of one model may differ in without a note: the seed and monitoring.
IGNORED_SETTINGS = {"train.seed", "runtime.heartbeat_s", "runtime.profile"}


@dataclass(frozen=True)
class EvaluatedRun:
    """A run and the results of `nsa-lab evaluate` at its last step, also of `--ruler`; None if there are none."""

    history: History
    evaluation: dict[str, Any] | None
    ruler: dict[str, Any] | None

    @property
    def name(self) -> str:
        return self.history.run


@dataclass(frozen=True)
class ModelRuns:
    """A model: its runs by seed, ascending."""

    name: str
    runs: dict[int, EvaluatedRun]

    @property
    def attention(self) -> str:
        return next(iter(self.runs.values())).history.config.model.attention

    @property
    def evaluated(self) -> dict[int, dict[str, Any]]:
        """The available evaluations by seed."""
        return {seed: run.evaluation for seed, run in self.runs.items() if run.evaluation is not None}

    @property
    def with_ruler(self) -> dict[int, dict[str, Any]]:
        """The available results of RULER's tasks by seed."""
        return {seed: run.ruler for seed, run in self.runs.items() if run.ruler is not None}


ReadEach = Callable[[Callable[[Path], EvaluatedRun], Iterable[Path]], Iterable[EvaluatedRun]]


def group_runs(
    runs: Sequence[Path], named: Mapping[str, Sequence[Path]], add_note: AddNote, read_each: ReadEach = map
) -> list[ModelRuns]:
    """Group `runs` into models by name. `named` maps the name of a model to its runs and takes precedence.

    `add_note` receives a line for each run with incomplete results. `read_each` applies a function to each directory and
    may skip runs that cannot be read; a model without runs is omitted. Raises `ConfigError` if two models have one name or
    two runs of a model have one seed.
    """
    read = partial(_read_run, add_note=add_note)
    grouped: dict[str, list[EvaluatedRun]] = {}
    for name, own in named.items():
        if readable := list(read_each(read, dict.fromkeys(own))):
            grouped[name] = readable
    named_runs = {run for own in named.values() for run in own}
    for run in read_each(read, [run for run in dict.fromkeys(runs) if run not in named_runs]):
        same_name = grouped.setdefault(get_model_name(run.history), [])
        same_name.append(run)
        if make_seed_group_key(same_name[0].history) != make_seed_group_key(run.history):
            raise ConfigError(
                f"{same_name[0].name} and {run.name} have one name but differ in "
                f"{_describe_differences(same_name[0], run)}; give the runs of one of them another name: NAME=RUN"
            )
    for name, own in grouped.items():
        _note_differences(name, own, add_note)
    return [_build_model(name, own) for name, own in grouped.items()]


def get_model_name(history: History) -> str:
    """Return the run's name without the seed that a sweep adds: `rates.high.s0` and `rates.high.s1` are one model."""
    parts, seed = history.config.name.split("."), f"s{history.config.train.seed}"
    return ".".join(part for place, part in enumerate(parts) if part != seed or place == 0)


def find_baseline(models: Sequence[ModelRuns], against: str | None, option: str = "--against") -> ModelRuns:
    """Return the model named `against`; None: the only dense model. `option` names the argument in errors.

    Raises `ConfigError` if there is no such model.
    """
    names = ", ".join(model.name for model in models)
    if against is not None:
        matching = [model for model in models if model.name == against]
        if not matching:
            raise ConfigError(f"{option} {against}: no such model among these runs; available: {names}")
        return matching[0]
    dense = [model for model in models if model.attention == "dense"]
    if len(dense) != 1:
        raise ConfigError(
            f"baseline: expected exactly one dense model, got {len(dense)} of {len(models)} models; name the baseline: "
            f"{option} NAME, one of {names}"
        )
    return dense[0]


def _build_model(name: str, own: list[EvaluatedRun]) -> ModelRuns:
    by_seed: dict[int, EvaluatedRun] = {}
    for run in own:
        other = by_seed.setdefault(run.history.config.train.seed, run)
        if other is not run:
            raise ConfigError(
                f"{other.name} and {run.name} are both {name} with seed {run.history.config.train.seed}; omit one of them "
                "or give it another name: NAME=RUN"
            )
    return ModelRuns(name, dict(sorted(by_seed.items())))


def _read_run(run: Path, add_note: AddNote) -> EvaluatedRun:
    history = History.read(run)
    steps = history.config.train.steps
    evaluation, ruler = (read(history.run_dir) for read in (read_evaluation, read_ruler))
    if history.state != "DONE":
        add_note(f"{history.run} is {history.state}: its cost covers {history.last_step:,} of {steps:,} steps")
    if evaluation is None:
        listed = "its cost is" if ruler is None else "its cost and its RULER scores are"
        add_note(f"{history.run} has no readable evaluation, so only {listed} listed; run nsa-lab evaluate")
    return EvaluatedRun(history, *(_select_final(history, record, add_note) for record in (evaluation, ruler)))


def _select_final(history: History, record: dict[str, Any] | None, add_note: AddNote) -> dict[str, Any] | None:
    """Return an evaluation at the last step; None for others, with a note."""
    steps = history.config.train.steps
    if record is None or record.get("step") == steps:
        return record
    add_note(
        f"{history.run} was evaluated at step {record.get('step')} of {steps}, so that evaluation is not listed; run "
        "nsa-lab evaluate at its last step"
    )
    return None


def _note_differences(name: str, own: list[EvaluatedRun], add_note: AddNote) -> None:
    for run in own[1:]:
        if difference := _describe_differences(own[0], run):
            has_other_training = make_seed_group_key(run.history) != make_seed_group_key(own[0].history)
            note = "was named as one model" if has_other_training else "was computed in different ways"
            add_note(f"{name} {note}: {own[0].name} and {run.name} differ in {difference}")


def _describe_differences(first: EvaluatedRun, second: EvaluatedRun) -> str:
    settings = diff_settings(first.history.config, second.history.config)
    has_other_data = get_data_digests(first.history) != get_data_digests(second.history)
    return ", ".join([*(key for key, *_ in settings if key not in IGNORED_SETTINGS), *["the data"] * has_other_data])
