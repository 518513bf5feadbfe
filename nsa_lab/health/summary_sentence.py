"""The purpose of a run, and one sentence in words on its outcome: model, steps, loss, facts retrieved, checks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nsa_lab.config import RunConfig
from nsa_lab.health.verdict import Verdict
from nsa_lab.runs import directory
from nsa_lab.runs.evaluation import read_evaluation
from nsa_lab.runs.history import History, RunFacts, collect_facts

KINDS = {"nsa": "NSA model", "dense": "model with dense attention"}


def describe_purpose(config: RunConfig) -> str:
    """Return the purpose of a run: the description in its configuration, or its name if there is none."""
    return config.description or f"Run of the configuration {config.name}, which has no description."


def describe_outcome(history: History, verdicts: Sequence[Verdict]) -> str:
    """Return the sentence, for example `This NSA model of 78.6 M parameters finished its 50,000 steps, has ...`."""
    facts = collect_facts(history)
    size = f" of {facts.parameters / 1e6:,.1f} M parameters" if facts.parameters else ""
    parts = [
        f"This {KINDS[facts.attention]}{size} {_describe_progress(history, facts)}",
        _describe_loss(history, facts),
        _describe_facts(read_evaluation(history.run_dir)),
        _describe_checks(verdicts),
    ]
    known = [part for part in parts if part]
    return f"{', '.join(known[:-1])}, and {known[-1]}."


def _describe_progress(history: History, facts: RunFacts) -> str:
    if history.state == directory.DONE:
        return f"finished its {facts.steps:,} steps"
    verbs = {directory.RUNNING: "is", directory.HALTED: "was halted", directory.PREEMPTED: "was stopped"}
    return f"{verbs.get(history.state or '', 'ended without a message')} at step {facts.step:,} of {facts.steps:,}"


def _describe_loss(history: History, facts: RunFacts) -> str | None:
    if facts.last_validation_bpb is None or not any(event["step"] for event in history.evaluations):
        return None
    untrained = f" (untrained: {facts.first_validation_bpb:,.3f})" if facts.first_validation_bpb else ""
    return f"has {facts.last_validation_bpb:,.3f} bits per byte on held-out text{untrained}"


def _describe_facts(evaluation: dict[str, Any] | None) -> str | None:
    """Return the single facts retrieved at the longest length, or None if there are none."""
    cells = [cell for cell in (evaluation or {}).get("retrieval", []) if cell["task"] == "needle"]
    if not cells:
        return None
    longest = max(cell["length"] for cell in cells)
    own = [cell for cell in cells if cell["length"] == longest]
    n_right, n_answers = (sum(cell[key] for cell in own) for key in ("right", "answers"))
    return f"retrieves {n_right:,} of {n_answers:,} single facts from {longest:,} bytes"


def _describe_checks(verdicts: Sequence[Verdict]) -> str:
    by_level = {level: [v for v in verdicts if v.level == level] for level in ("failed", "warning", "unknown")}
    names = {level: ", ".join(verdict.name for verdict in verdicts) for level, verdicts in by_level.items()}
    unknown = f" ({len(by_level['unknown'])} unknown)" if by_level["unknown"] else ""
    if by_level["failed"]:
        return f"failed {format_count(len(by_level['failed']), 'check')}: {names['failed']}"
    if by_level["warning"]:
        return f"passed its checks with {format_count(len(by_level['warning']), 'warning')}{unknown}: {names['warning']}"
    is_judged = any(verdict.ok for verdict in verdicts)
    return f"passed its checks{unknown}" if is_judged else "has no check that can be judged yet"


def format_count(count: int, noun: str) -> str:
    """Return "1 seed" or "3 seeds"."""
    return f"{count} {noun}{'s' * (count != 1)}"
