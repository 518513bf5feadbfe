"""Relations in `evaluation.json`: means follow from their parts, and settings agree with the run."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from nsa_lab.runs.evaluation import compute_wilson_interval
from nsa_lab.runs.evaluation_schema import SCORE_ROUNDING
from nsa_lab.runs.event_fields import is_finite
from nsa_lab.runs.history import History

# Relative difference of two sums of the same numbers, and absolute one of a difference of two losses (9e-6 measured).
MEAN_ERROR, DIFFERENCE_ERROR = 1e-3, 1e-4
TEXT_SIZE = re.compile(r"([\d,]+) validation tokens")  # in the text of the preflight's check of the data
MIN_EQUAL = 3  # losses of an evaluation that are all equal
# Largest factor between a loss in an evaluation and the loss that the run measured at the same step: on other windows of
# its own held-out text (1.25 measured), and on other texts (1.41 measured).
OWN_TEXT, OTHER_TEXT = 1.5, 3.0
# Largest difference in the share of right answers between two samples of single facts (0.1 measured), and their least size.
ANSWER_DIFFERENCE, MIN_ANSWERS = 0.5, 8


def find_evaluation_problem(history: History, record: dict[str, Any]) -> str | None:
    """Return a text on the first relation of a valid record that does not hold; None if all do.

    The schema has the bounds of single values.
    """
    return next(filter(None, (find(history, record) for find in RELATIONS)), None)


def _find_other_setting(history: History, record: dict[str, Any]) -> str | None:
    """The model and the data agree with the run."""
    if problem := find_other_data(history, record):
        return problem
    if record["attention"] != history.config.model.attention:
        return f"attention is {record['attention']}, but the run has {history.config.model.attention}"
    for name, value in record.get("recall", {}).items():
        configured = getattr(history.config.data, name, value)
        if configured != value:
            return f"recall.{name} is {value!r}, but config.yaml has data.{name} = {configured!r}"
    return None


def find_other_data(history: History, record: dict[str, Any]) -> str | None:
    """Return a text on the text of another run, or on an impossible duration; None if there is neither."""
    identities = {event.get("data_identity") for event in history.first_events} - {None, ""}
    if identities and record["data_identity"] not in identities:
        return f"the text is of {record['data_identity']:.16}, that of the run of {min(identities):.16}"
    seconds: Any = record.get("seconds")
    return f"it took {seconds} s" if is_finite(seconds) and seconds <= 0 else None


def _find_repeated_cell(history: History, record: dict[str, Any]) -> str | None:
    cells = [(cell["task"], cell["length"], cell["depth"]) for cell in record.get("retrieval", ())]
    for task, length, depth in sorted({cell for cell in cells if cells.count(cell) > 1}):
        return f"{task} at {length:,} tokens and depth {depth:g} was evaluated twice"
    return None


def _iterate_losses(record: dict[str, Any]) -> Iterator[tuple[str, list[float]]]:
    """Yield subject and losses, in nats per token, of measurements of different text."""
    positions, documents = record.get("positions"), record.get("documents")
    yield "retrieval", [cell["loss"] for cell in record.get("retrieval", ()) if cell.get("loss") is not None]
    if positions:
        yield "positions", [part["loss"] for part in positions["octaves"]]
    if documents:
        yield "documents", [documents[name] for name in ("alone", "across", "first_alone", "first_across")]
    for name, text in record.get("texts", {}).items():
        yield f"the text {name}", [loss for _, loss in text["rows"]]
        yield f"the text {name}", [text["loss"]]


def _find_constant_losses(history: History, record: dict[str, Any]) -> str | None:
    """Different texts have different finite losses, and none is 0. Answers may cost almost nothing."""
    for subject, losses in _iterate_losses(record):
        if nonfinite := [loss for loss in losses if not math.isfinite(loss)]:
            return f"a loss of {subject} is {nonfinite[0]:g} nats per token"
        if len(losses) >= MIN_EQUAL and len(set(losses)) == 1:
            return f"all {len(losses)} losses of {subject} are {losses[0]:g}"
        if subject != "retrieval" and any(loss <= 0 for loss in losses):
            return f"a loss of {subject} is {min(losses):g} nats per token"
    return None


def _find_unlikely_tokens(history: History, record: dict[str, Any]) -> str | None:
    """The most likely of V tokens has a loss of at most ln V."""
    highest = math.log(history.config.model.vocab_size)
    for cell in record.get("retrieval", ()):
        loss, tokens = cell.get("loss"), cell.get("tokens")
        if loss is not None and tokens and cell.get("tokens_right") == tokens and loss > highest * (1 + MEAN_ERROR):
            place = f"{cell['task']} at {cell['length']:,} tokens and depth {cell['depth']:g}"
            return f"{place} has a loss of {loss:g} nats with all tokens right, expected at most {highest:.3f}"
    return None


def _find_other_size(history: History, record: dict[str, Any]) -> str | None:
    """The text has as many tokens as the preflight found."""
    size = record.get("text_tokens")
    values = [str(event.get("value")) for event in history.events_of_kind("preflight") if event.get("name") == "data"]
    sizes = {int(found[1].replace(",", "")) for value in values if (found := TEXT_SIZE.search(value))}
    if size is not None and sizes and size not in sizes:
        return f"the text has {size:,} tokens, in the preflight {min(sizes):,}"
    return None


def _find_other_interval(history: History, record: dict[str, Any]) -> str | None:
    """The interval of a RULER score follows from it and the number of questions. Prompts fit into their length."""
    for result in record.get("results", ()):
        n, prompt = result["questions"], result.get("prompt_tokens") or 0
        share = sum(result["found"]) / (result["references"] * n)
        for name, bound in zip(("low", "high"), compute_wilson_interval(share * n, n), strict=True):
            if abs(result[name] - 100 * bound) > SCORE_ROUNDING:
                place = f"{result['task']} at {result['length']:,} tokens"
                return f"{place}: {name} is {result[name]:g}, expected {100 * bound:.2f} with {n} questions"
        if prompt > result["length"]:
            return f"{result['task']} has prompts of {prompt:,} tokens, expected at most {result['length']:,}"
    return None


def _find_other_mean(history: History, record: dict[str, Any]) -> str | None:
    """A loss is the mean over its windows or rows."""
    positions = record.get("positions")
    for part in positions["octaves"] if positions else ():
        windows = part.get("windows")
        if windows and _differ(part["loss"], math.fsum(windows) / len(windows)):
            return f"the loss of positions {part['first']:,} to {part['last']:,} is not the mean of its windows"
    for name, text in record.get("texts", {}).items():
        n_tokens = sum(count for count, _ in text["rows"])
        if _differ(text["loss"], math.fsum(count * loss for count, loss in text["rows"]) / n_tokens):
            return f"the loss of the text {name} is not the mean of its rows"
    documents = record.get("documents")
    if documents:
        difference = documents["across"] - documents["alone"]
        if abs(difference - documents["difference"]) > DIFFERENCE_ERROR:
            return f"the loss of packed documents differs by {difference:.5f}, recorded: {documents['difference']:.5f}"
    return None


def _differ(value: float, expected: float) -> bool:
    return abs(value - expected) > MEAN_ERROR * abs(expected)


def _find_other_ranges(history: History, record: dict[str, Any]) -> str | None:
    """Ranges of positions follow one another, up to the length of the windows."""
    positions = record.get("positions")
    ranges = [(positions["length"], [(part["first"], part["last"]) for part in positions["octaves"]])] if positions else []
    ranges += [(text["length"], [tuple(part) for part in text["octaves"]]) for text in record.get("texts", {}).values()]
    return next(filter(None, (find_gap(length, parts) for length, parts in ranges)), None)


def find_gap(length: int, parts: Sequence[Sequence[int]]) -> str | None:
    """Return a text on ranges of positions that do not follow one another, or do not end at `length`; None if they do."""
    for (_, end), (first, _) in itertools.pairwise([(0, 0), *parts]):
        if first != end:
            return f"a range of positions starts at {first:,}, the one before it ends at {end:,}"
    last = parts[-1][1]
    return None if last == length else f"the ranges of positions end at {last:,} of {length:,} tokens"


def _find_other_measurement(history: History, record: dict[str, Any]) -> str | None:
    """Losses and answers agree with those that the run measured at the same step: the same weights were evaluated."""
    measured = history.evaluations.select(history.evaluations.ints("step") == record["step"])
    for event in measured:
        own: Any = event.get("loss")
        if not is_finite(own) or own <= 0:
            continue
        for subject, loss, factor in _iterate_text_losses(record, event.get("seq_len")):
            if not 1 / factor <= loss / own <= factor:
                return f"{subject} has {loss:.4g} nats per token, the run measured {own:.4g} at step {record['step']:,}"
    cells = [cell for cell in record.get("retrieval", ()) if cell["task"] == "needle"]
    for event in history.events_of_kind("reach"):
        accuracy: Any = (event.get("accuracy") or {}).get("chosen")
        if event["step"] != record["step"] or not is_finite(accuracy) or (event.get("sequences") or 0) < MIN_ANSWERS:
            continue
        own_cells = [cell for cell in cells if cell["length"] == event.get("length")]
        n_answers, n_right = (sum(cell[name] for cell in own_cells) for name in ("answers", "right"))
        if n_answers >= MIN_ANSWERS and abs(n_right / n_answers - accuracy) > ANSWER_DIFFERENCE:
            found = f"{n_right} of {n_answers} single facts at {event.get('length'):,} tokens"
            return f"{found} are answered, the run measured {accuracy:.0%} at step {record['step']:,}"
    return None


def _find_other_count(history: History, record: dict[str, Any]) -> str | None:
    """Numbers of tokens follow from the rows and windows, and no row is longer than its windows."""
    positions = record.get("positions")
    for part in positions["octaves"] if positions else ():
        n_windows, width = len(part.get("windows") or ()), part["last"] - part["first"]
        if n_windows and part.get("tokens", n_windows * width) != n_windows * width:
            place = f"positions {part['first']:,} to {part['last']:,}"
            return f"{place} have {part['tokens']:,} tokens, expected {n_windows} windows of {width:,}"
    for name, text in record.get("texts", {}).items():
        counts = [count for count, _ in text["rows"]]
        if text.get("tokens", sum(counts)) != sum(counts):
            return f"the text {name} has {text['tokens']:,} tokens, its rows {sum(counts):,}"
        if max(counts) > text["length"]:
            return f"a row of the text {name} has {max(counts):,} tokens, expected at most {text['length']:,}"
    return None


def _find_copied_text(history: History, record: dict[str, Any]) -> str | None:
    """Different texts have different losses, to the last bit."""
    texts = record.get("texts", {})
    for (one, first), (other, second) in itertools.combinations(texts.items(), 2):
        # A user may evaluate one text under two names.
        is_one_text = None is not first.get("identity") == second.get("identity")
        if first["rows"] == second["rows"] and not is_one_text:
            return f"the texts {one} and {other} have the same losses, but are different texts"
    return None


def _iterate_text_losses(record: dict[str, Any], length: Any) -> Iterator[tuple[str, float, float]]:
    """Yield subject, loss and largest factor to the loss of the run's own windows of `length` tokens."""
    positions, documents = record.get("positions"), record.get("documents")
    if positions and positions["length"] == length:
        parts = positions["octaves"]
        loss = math.fsum((part["last"] - part["first"]) * part["loss"] for part in parts) / length
        yield "held-out text by position", loss, OWN_TEXT
    if documents:
        yield "whole documents", documents["alone"], OWN_TEXT
    for name, text in record.get("texts", {}).items():
        yield f"the text {name}", text["loss"], OTHER_TEXT


RELATIONS: tuple[Callable[[History, dict[str, Any]], str | None], ...] = (
    _find_other_setting,
    _find_repeated_cell,
    _find_constant_losses,
    _find_unlikely_tokens,
    _find_other_size,
    _find_other_interval,
    _find_other_mean,
    _find_other_ranges,
    _find_other_measurement,
    _find_other_count,
    _find_copied_text,
)
