"""What a run's result is worth: whether the run was long enough to say anything, and what others make of the same text.

References come from records alone: what the trainer wrote of a compressor, and runs beside this one in its folder.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from nsa_lab.config import ConfigError, RunConfig
from nsa_lab.health.matched_pair import check_same_training
from nsa_lab.health.verdict import Limits
from nsa_lab.runs import directory, resolve
from nsa_lab.runs.history import History, collect_facts, have_different_eval_texts
from nsa_lab.runs.summary import format_size


@dataclass(frozen=True)
class Reference:
    """Bits per byte of something else on the text that the run was evaluated on; `note` says what it is."""

    name: str
    bpb: float
    note: str

    def __str__(self) -> str:
        return f"{self.name} {self.bpb:.3f}"


def explain_trial(history: History, limits: Limits) -> str | None:
    """Why the run is too short to say what its model can do; None if it is not, or if its size is not known.

    Fewer steps than verdicts need, or fewer tokens than the model has parameters.
    """
    known = collect_facts(history)
    steps, tokens = known.step, known.tokens
    if steps < limits.trial_steps:
        return f"{steps:,} steps, and under {limits.trial_steps} say little"
    if known.parameters and tokens < limits.trial_tokens * known.parameters:
        return f"{steps:,} steps, and {tokens:,} tokens for {known.parameters:,} parameters"
    return None


def find_references(history: History) -> list[Reference]:
    """The dense twin (of a dense run the NSA twin), the compressor, and, without a twin, the run before of that name."""
    beside = _list_comparable_runs(history)
    twin = next((run for run in beside if _is_matched_pair(history, run)), None)
    before = next((run for run in beside if _is_earlier(history, run)), None)
    found = [_make_baseline_reference(twin)] if twin else [_make_earlier_reference(before)] if before else []
    return [*found, *_list_compressor_references(history)]


def _list_comparable_runs(history: History) -> list[History]:
    """Finished runs in the same folder, as long as this one and evaluated on the same text, newest first."""
    folder = resolve.list_run_dirs(history.run_dir.resolve().parent)
    found = [
        History.read(run) for run in reversed(folder) if run.name != history.run and _is_comparable(run, history.config)
    ]
    return [run for run in found if run.evaluations and not have_different_eval_texts((history, run))]


def _is_comparable(run_dir: Path, config: RunConfig) -> bool:
    """Whether it is DONE, after as many steps on the same source. The list of runs names those that cannot be read."""
    try:
        other = RunConfig.from_yaml(run_dir / directory.CONFIG)
    except ConfigError:
        return False
    done = directory.read_status(run_dir).get("status") == directory.DONE
    return done and (other.train.steps, other.data.source) == (config.train.steps, config.data.source)


def _is_matched_pair(history: History, other: History) -> bool:
    kinds = {history.config.model.attention, other.config.model.attention}
    return len(kinds) == 2 and check_same_training(history, other).ok is True


def _is_earlier(history: History, other: History) -> bool:
    began = [run.attempts()[0].started_at for run in (other, history) if run.attempts()]
    return history.config.name == other.config.name and len(began) == 2 and began[0] < began[1]


def _make_baseline_reference(twin: History) -> Reference:
    known = collect_facts(twin)
    assert known.last_validation_bpb is not None, "it has evaluations"
    kind = {"dense": "dense twin", "nsa": "NSA twin"}[known.attention]
    size = f"{known.parameters:,} parameters, " if known.parameters else ""
    return Reference(kind, known.last_validation_bpb, f"{twin.run}: {size}one run of each")


def _make_earlier_reference(run: History) -> Reference:
    known = collect_facts(run)
    assert known.last_validation_bpb is not None, "it has evaluations"
    return Reference("the run before", known.last_validation_bpb, run.run)


def _list_compressor_references(history: History) -> list[Reference]:
    told = {event.get("name"): event for event in history.events_of_kind("reference")}
    return [
        Reference(
            f"the compressor {name} on the same text", event["bpb"], f"{format_size(event['bytes'])} of the held-out text"
        )
        for name, event in told.items()
        if event.get("bpb") and event.get("bytes")
    ]
