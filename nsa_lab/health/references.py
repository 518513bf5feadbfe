"""Reference values for a run's result: whether the run was long enough to judge, and the bpb of others on the same text.

References come only from records: compressor results recorded by the trainer, and other runs in the same folder.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from nsa_lab.config import RunConfig
from nsa_lab.health.matched_pair import check_same_training
from nsa_lab.health.verdict import Limits
from nsa_lab.runs import directory, resolve
from nsa_lab.runs.history import History, collect_facts, have_different_eval_texts
from nsa_lab.runs.summary import format_size


@dataclass(frozen=True)
class Reference:
    """Bits per byte of another run or a compressor on the evaluated text of a run. `note` describes it."""

    name: str
    bpb: float
    note: str

    def __str__(self) -> str:
        return f"{self.name} {self.bpb:.3f}"


def explain_trial(history: History, limits: Limits) -> str | None:
    """Return why the run is too short to judge its model; None if it is long enough or the model size is unknown.

    A run is too short with fewer steps than the checks need, or fewer tokens than the model has parameters.
    """
    facts = collect_facts(history)
    steps, tokens = facts.step, facts.tokens
    if steps < limits.trial_steps:
        return f"{steps:,} steps, fewer than {limits.trial_steps}"
    if facts.parameters and tokens < limits.trial_tokens * facts.parameters:
        return f"{steps:,} steps with {tokens:,} tokens for {facts.parameters:,} parameters"
    return None


def find_references(history: History) -> list[Reference]:
    """Return the references of a run: its matched baseline, else the previous run of its name, and the compressors.

    The matched baseline of a dense run is the NSA run.
    """
    runs = _list_comparable_runs(history)
    baseline = next((run for run in runs if _is_matched_pair(history, run)), None)
    earlier = next((run for run in runs if _is_earlier(history, run)), None)
    references = [_make_baseline_reference(baseline)] if baseline else [_make_earlier_reference(earlier)] if earlier else []
    return [*references, *_list_compressor_references(history)]


def _list_comparable_runs(history: History) -> list[History]:
    """Return finished runs in the same folder with the same length and evaluated text, newest first.

    Unreadable runs are left out; they are reported elsewhere.
    """
    run_dirs = resolve.list_run_dirs(history.run_dir.resolve().parent)
    comparable: list[History] = []
    for run_dir in reversed(run_dirs):
        if run_dir.name == history.run:
            continue
        try:
            run = History.read(run_dir) if _is_comparable(run_dir, history.config) else None
            if run and run.evaluations and not have_different_eval_texts((history, run)):
                comparable.append(run)
        except directory.READ_ERRORS:
            continue
    return comparable


def _is_comparable(run_dir: Path, config: RunConfig) -> bool:
    """Return True if the run is DONE with the same steps and data source. Raises an error of `directory.READ_ERRORS`."""
    other = RunConfig.from_yaml(run_dir / directory.CONFIG)
    is_done = directory.read_status(run_dir).get("status") == directory.DONE
    return is_done and (other.train.steps, other.data.source) == (config.train.steps, config.data.source)


def _is_matched_pair(history: History, other: History) -> bool:
    kinds = {history.config.model.attention, other.config.model.attention}
    return len(kinds) == 2 and check_same_training(history, other).ok is True


def _is_earlier(history: History, other: History) -> bool:
    starts = [run.attempts()[0].started_at for run in (other, history) if run.attempts()]
    return history.config.name == other.config.name and len(starts) == 2 and starts[0] < starts[1]


def _make_baseline_reference(baseline: History) -> Reference:
    facts = collect_facts(baseline)
    assert facts.last_validation_bpb is not None, "it has evaluations"
    kind = {"dense": "dense baseline", "nsa": "matched NSA run"}[facts.attention]
    size = f"{facts.parameters:,} parameters, " if facts.parameters else ""
    return Reference(kind, facts.last_validation_bpb, f"{baseline.run}: {size}one run of each")


def _make_earlier_reference(run: History) -> Reference:
    facts = collect_facts(run)
    assert facts.last_validation_bpb is not None, "it has evaluations"
    return Reference("previous run", facts.last_validation_bpb, run.run)


def _list_compressor_references(history: History) -> list[Reference]:
    events = {event.get("name"): event for event in history.events_of_kind("reference")}
    events = {name: event for name, event in events.items() if not str(name).endswith("entropy")}
    return [
        Reference(
            f"compressor {name} on the same text", event["bpb"], f"{format_size(event['bytes'])} of the held-out text"
        )
        for name, event in events.items()
        if event.get("bpb") and event.get("bytes")
    ]
