"""What a run's result is worth: whether the run was long enough to say anything, and what others make of the same text.

References come from records alone: what the trainer wrote of a compressor, and runs beside this one in its folder.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from nsa_lab.config import ConfigError, RunConfig
from nsa_lab.health.twins import same_training
from nsa_lab.health.verdict import Limits
from nsa_lab.runs import directory, names
from nsa_lab.runs.history import History, evaluated_apart, facts
from nsa_lab.runs.summary import size_text


@dataclass(frozen=True)
class Reference:
    """Bits per byte of something else on the text that the run was evaluated on; `note` says what it is."""

    name: str
    bpb: float
    note: str

    def __str__(self) -> str:
        return f"{self.name} {self.bpb:.3f}"


def trial(history: History, limits: Limits) -> str | None:
    """Why the run is too short to say what its model can do; None if it is not, or if its size is not known.

    Fewer steps than verdicts need, or fewer tokens than the model has parameters.
    """
    known = facts(history)
    steps, tokens = known.step, known.tokens
    if steps < limits.trial_steps:
        return f"{steps:,} steps, and under {limits.trial_steps} say little"
    if known.parameters and tokens < limits.trial_tokens * known.parameters:
        return f"{steps:,} steps, and {tokens:,} tokens for {known.parameters:,} parameters"
    return None


def references(history: History) -> list[Reference]:
    """The dense twin (of a dense run the NSA twin), the compressor, and, without a twin, the run before of that name."""
    beside = _beside(history)
    twin = next((run for run in beside if _is_twin(history, run)), None)
    before = next((run for run in beside if _is_before(history, run)), None)
    found = [_twin(twin)] if twin else [_earlier(before)] if before else []
    return [*found, *_compressors(history)]


def _beside(history: History) -> list[History]:
    """Finished runs in the same folder, as long as this one and evaluated on the same text, newest first."""
    folder = names.run_directories(history.run_dir.resolve().parent)
    found = [History.read(run) for run in reversed(folder) if run.name != history.run and _as_long(run, history.config)]
    return [run for run in found if run.evaluations and not evaluated_apart((history, run))]


def _as_long(run_dir: Path, config: RunConfig) -> bool:
    """Whether it is DONE, after as many steps on the same source. The list of runs names those that cannot be read."""
    try:
        other = RunConfig.from_yaml(run_dir / directory.CONFIG)
    except ConfigError:
        return False
    done = directory.read_status(run_dir).get("status") == directory.DONE
    return done and (other.train.steps, other.data.source) == (config.train.steps, config.data.source)


def _is_twin(history: History, other: History) -> bool:
    kinds = {history.config.model.attention, other.config.model.attention}
    return len(kinds) == 2 and same_training(history, other).ok is True


def _is_before(history: History, other: History) -> bool:
    began = [run.attempts()[0].began for run in (other, history) if run.attempts()]
    return history.config.name == other.config.name and len(began) == 2 and began[0] < began[1]


def _twin(twin: History) -> Reference:
    known = facts(twin)
    assert known.last_validation_bpb is not None, "it has evaluations"
    kind = {"dense": "dense twin", "nsa": "NSA twin"}[known.attention]
    size = f"{known.parameters:,} parameters, " if known.parameters else ""
    return Reference(kind, known.last_validation_bpb, f"{twin.run}: {size}one run of each")


def _earlier(run: History) -> Reference:
    known = facts(run)
    assert known.last_validation_bpb is not None, "it has evaluations"
    return Reference("the run before", known.last_validation_bpb, run.run)


def _compressors(history: History) -> list[Reference]:
    told = {event.get("name"): event for event in history.of_kind("reference")}
    return [
        Reference(
            f"the compressor {name} on the same text", event["bpb"], f"{size_text(event['bytes'])} of the held-out text"
        )
        for name, event in told.items()
        if event.get("bpb") and event.get("bytes")
    ]
