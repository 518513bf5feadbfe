"""Runs as models: those that differ in `train.seed`, or in how they were computed, are one, compared seed by seed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nsa_lab.config import ConfigError
from nsa_lab.health.matched_pair import get_data_digests
from nsa_lab.health.paired_difference import make_seed_group_key
from nsa_lab.runs.evaluation import read_evaluation
from nsa_lab.runs.history import History
from nsa_lab.runs.summary import diff_settings

AddNote = Callable[[str], None]
# The seed by which the runs of a model are told apart, and what is watched of a run while it is computed.
IGNORED_SETTINGS = {"train.seed", "runtime.heartbeat_s", "runtime.profile"}


@dataclass(frozen=True)
class EvaluatedRun:
    """A run and what `nsa-lab evaluate` found at its last step; None where it did not."""

    history: History
    evaluation: dict[str, Any] | None

    @property
    def name(self) -> str:
        return self.history.run


@dataclass(frozen=True)
class ModelRuns:
    """One model: its runs by seed, ascending."""

    name: str
    runs: dict[int, EvaluatedRun]

    @property
    def attention(self) -> str:
        return next(iter(self.runs.values())).history.config.model.attention

    @property
    def evaluated(self) -> dict[int, dict[str, Any]]:
        """The evaluations there are, by seed."""
        return {seed: run.evaluation for seed, run in self.runs.items() if run.evaluation is not None}


def group_runs(runs: Sequence[Path], named: Mapping[str, Sequence[Path]], say: AddNote) -> list[ModelRuns]:
    """Every model among `runs`, called as its runs are, and those that `named` makes of the runs under a name.

    `say` gets a line for each run that is told less of than of others. Raises `ConfigError` where a name would be that of
    two models, or a seed that of two runs of one.
    """
    grouped: dict[str, list[EvaluatedRun]] = {}
    for name, own in named.items():
        grouped[name] = [_read_run(run, say) for run in dict.fromkeys(own)]
    taken = {run for own in named.values() for run in own}
    for run in (_read_run(run, say) for run in dict.fromkeys(runs) if run not in taken):
        alike = grouped.setdefault(get_model_name(run.history), [])
        alike.append(run)
        if make_seed_group_key(alike[0].history) != make_seed_group_key(run.history):
            raise ConfigError(
                f"{alike[0].name} and {run.name} are called alike and differ in {_describe_differences(alike[0], run)}; give the "
                "runs of one of them a name: NAME=RUN"
            )
    for name, own in grouped.items():
        _note_differences(name, own, say)
    return [_build_model(name, own) for name, own in grouped.items()]


def get_model_name(history: History) -> str:
    """The run's name, without the seed that a sweep writes into it: `rates.high.s0` and `rates.high.s1` are one model."""
    parts, seed = history.config.name.split("."), f"s{history.config.train.seed}"
    return ".".join(part for place, part in enumerate(parts) if part != seed or place == 0)


def find_baseline(models: Sequence[ModelRuns], against: str | None) -> ModelRuns:
    """The model of the name `against`; without one, the only dense model. Raises `ConfigError` where that is none."""
    names = ", ".join(model.name for model in models)
    if against is not None:
        found = [model for model in models if model.name == against]
        if not found:
            raise ConfigError(f"--against {against}: there is no such model among these runs; there is {names}")
        return found[0]
    dense = [model for model in models if model.attention == "dense"]
    if len(dense) != 1:
        raise ConfigError(
            f"the baseline is the one dense model, and here {len(dense)} of {len(models)} models are dense; "
            f"say which is: --against NAME, of {names}"
        )
    return dense[0]


def _build_model(name: str, own: list[EvaluatedRun]) -> ModelRuns:
    by_seed: dict[int, EvaluatedRun] = {}
    for run in own:
        other = by_seed.setdefault(run.history.config.train.seed, run)
        if other is not run:
            raise ConfigError(
                f"{other.name} and {run.name} are both of {name} at seed {run.history.config.train.seed}; leave one of "
                "them out, or give it a name: NAME=RUN"
            )
    return ModelRuns(name, dict(sorted(by_seed.items())))


def _read_run(run: Path, say: AddNote) -> EvaluatedRun:
    history = History.read(run)
    found, steps = read_evaluation(history.run_dir), history.config.train.steps
    if history.state != "DONE":
        say(f"{history.run} is {history.state}: what it cost is told of {history.last_step:,} of {steps:,} steps")
    if found is None:
        say(f"{history.run} has no evaluation that can be read, so its cost alone is told; nsa-lab evaluate makes one")
    elif found.get("step") != steps:
        say(
            f"{history.run} was evaluated at step {found.get('step')} of {steps}, so its cost alone is told; "
            "nsa-lab evaluate asks its last step once it is there"
        )
        found = None
    return EvaluatedRun(history, found)


def _note_differences(name: str, own: list[EvaluatedRun], say: AddNote) -> None:
    for run in own[1:]:
        if differ := _describe_differences(own[0], run):
            learned = make_seed_group_key(run.history) != make_seed_group_key(own[0].history)
            why = "was said to be one model" if learned else "was computed in more than one way"
            say(f"{name} {why}: {own[0].name} and {run.name} differ in {differ}")


def _describe_differences(one: EvaluatedRun, other: EvaluatedRun) -> str:
    unlike = diff_settings(one.history.config, other.history.config)
    apart = get_data_digests(one.history) != get_data_digests(other.history)
    return ", ".join([*(key for key, *_ in unlike if key not in IGNORED_SETTINGS), *["the data"] * apart])
