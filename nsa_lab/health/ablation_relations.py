"""Relations between the measurements of the selection benefit (`reach`), and the evaluations that they belong to."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np

from nsa_lab.health.branch_checks import list_active_branches
from nsa_lab.health.verdict import Problem
from nsa_lab.runs.event_fields import is_finite, is_number
from nsa_lab.runs.history import History

ROUNDING = 1e-3
MIN_EQUAL = 2  # two ablations had the same loss to the last bit in one reading of one recorded run


def _check_answers(history: History) -> Problem | None:
    """A wrong token is not the most likely one, so it costs at least ln 2; all tokens of a right answer cost at most ln V.

    `accuracy` is the share of answers with right tokens only, one of each sequence, and `answer_loss` the mean over their
    `value_length` tokens.
    """
    least_of_wrong = math.log(2) / history.config.data.value_length
    highest_of_right = math.log(history.config.model.vocab_size)
    for event in history.events_of_kind("reach"):
        losses, accuracies = event.get("answer_loss"), event.get("accuracy")
        if not isinstance(losses, dict) or not isinstance(accuracies, dict):
            continue
        for name, share in accuracies.items():
            loss = losses.get(name)
            if not is_finite(share) or loss is None or not is_number(loss):
                continue
            lowest, highest = (1 - share) * least_of_wrong, highest_of_right if share == 1 else math.inf
            if not lowest - ROUNDING <= loss <= highest + ROUNDING:
                text = f"{name}: {share:.0%} of the answers are right with a loss of {loss:.4g} nats per token,"
                return Problem(np.array([event["step"]]), text)
            right = (event.get("sequences") or 0) * share
            if abs(right - round(right)) > ROUNDING:
                text = f"{name}: {share:.4g} of {event['sequences']:,} answers are right, which is no number of answers,"
                return Problem(np.array([event["step"]]), text)
    return None


def _check_ablations_differ(history: History) -> Problem | None:
    """Other blocks give other losses. Equal losses in several measurements have one ablation."""
    if "sel" not in list_active_branches(history) or not has_choice(history):
        return None
    steps: dict[tuple[str, str], list[int]] = {}
    for event in history.current_events("reach"):
        losses = event.get("answer_loss")
        for pair in itertools.combinations(losses, 2) if isinstance(losses, dict) else ():
            first, second = (losses[name] for name in pair)
            if first and first == second:
                steps.setdefault(pair, []).append(event["step"])
    for (first, second), equal in steps.items():
        if len(equal) >= MIN_EQUAL:
            return Problem(np.array(equal), f"the answers cost the same with {first} and with {second} blocks")
    return None


def has_choice(history: History) -> bool:
    """Return whether queries select some of their blocks, which are neither forced nor all selected."""
    nsa = history.config.nsa
    return nsa.n_sel > nsa.sink_blocks + nsa.local_blocks


def _check_ablations_complete(history: History) -> Problem | None:
    """All measurements of an attempt have the same ablations."""
    names: dict[int, set[str]] = {}
    for event in history.current_events("reach"):
        losses, accuracies = event.get("answer_loss"), event.get("accuracy")
        if not isinstance(losses, dict) or not isinstance(accuracies, dict):
            continue
        expected = names.setdefault(event["attempt"], {*losses, *accuracies})
        if missing := sorted(expected - (losses.keys() & accuracies.keys())):
            return Problem(np.array([event["step"]]), f"the selection benefit has no {', '.join(missing)}")
    return None


def _check_measured(history: History) -> Problem | None:
    """A run that measures the selection benefit does so after every evaluation. The last one may be interrupted."""
    measured = history.events_of_kind("reach", "conversion")
    for kind in ("reach", "conversion"):
        own = measured.of_kind(kind)
        for attempt in np.unique(own.ints("attempt")).tolist():
            evaluated, recorded = (
                events.ints("step")[events.ints("attempt") == attempt] for events in (history.events_of_kind("eval"), own)
            )
            trained = history.events_of_kind("step")
            last = int(trained.ints("step")[trained.ints("attempt") == attempt].max(initial=0))
            is_due = (evaluated > recorded.min()) & ((evaluated < last) | history.is_done)
            missing = np.setdiff1d(evaluated[is_due], recorded)
            if len(missing):
                return Problem(missing, f"an evaluation without the {kind} event of the others")
    return None


RELATIONS: tuple[Callable[[History], Problem | None], ...] = (
    _check_answers,
    _check_ablations_differ,
    _check_ablations_complete,
    _check_measured,
)
