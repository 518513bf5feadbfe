"""Retrieval by length and depth: facts in held-out text, and whether the model can say them at its end.

Invariant: a sequence is a function of the seed, its task, length, depth and number alone, so that any two models are asked
the same, whatever else they are asked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nsa_lab.config import RecallConfig
from nsa_lab.data import DataError
from nsa_lab.data.recall import RetrievalTask, make_multi_key_task, make_multi_query_task, make_needle_task
from nsa_lab.evaluate.scoring import score_generated, score_teacher_forced, stack_samples
from nsa_lab.model import NSATransformer

Task = Callable[[int, float, RecallConfig, np.random.Generator, np.ndarray], RetrievalTask]
TASKS: dict[str, Task] = {
    "needle": make_needle_task,
    "multi_key": make_multi_key_task,
    "multi_query": make_multi_query_task,
}


def _vary_needle(**changes: Any) -> Task:
    """`needle`, its fact told in another way than the run's."""

    def ask(length: int, depth: float, recall: RecallConfig, rng: np.random.Generator, text: np.ndarray) -> RetrievalTask:
        return make_needle_task(length, depth, recall.model_copy(update=changes), rng, text)

    return ask


# Needles in forms that a run with the default settings is not trained on.
NEEDLE_FORMS: dict[str, Task] = {
    "five_digits": _vary_needle(values="digits", value_length=5),
    "twelve_digits": _vary_needle(values="digits", value_length=12),
    "letters": _vary_needle(values="letters"),
    "hex": _vary_needle(values="hex"),
    "codes": _vary_needle(names="codes"),
    "other_words": _vary_needle(
        statement="\nNote that the {name} opens with {value}.\n", question="\nWhat does the {name} open with? "
    ),
}
# The order is part of every sequence's seed.
ALL_TASKS = TASKS | NEEDLE_FORMS
DEPTHS = tuple(depth / 10 for depth in range(10))


@dataclass(frozen=True)
class RetrievalCell:
    """One task at one length and depth. `right` of `answers` are right in every token, teacher-forced; `tokens_right` of
    `tokens` tokens of them; and `written_right` of `written` when the model writes them itself. `loss`: nats per token.

    `depth` is where the fact of each sequence's first question stands, as a share of the text around facts and questions;
    of the whole sequence that is off by at most .16 at 2,048 bytes, .05 at 8,192 and .02 at 32,768 (a single needle: .04,
    .01, .01). `right_at_depth` of `sequences` are right about that one. Facts of further questions stand anywhere."""

    task: str
    length: int
    depth: float
    sequences: int
    answers: int
    right: int
    tokens: int
    tokens_right: int
    right_at_depth: int
    loss: float
    written: int
    written_right: int


def evaluate_retrieval(
    model: NSATransformer,
    text: np.ndarray,
    lengths: Sequence[int],
    *,
    tasks: Sequence[str] = tuple(TASKS),
    depths: Sequence[float] = DEPTHS,
    per_depth: int = 20,
    generated_per_depth: int = 1,
    recall: RecallConfig = RecallConfig(),  # noqa: B008 - frozen
    seed: int = 0,
    max_batch_tokens: int = 1 << 16,
) -> Iterator[RetrievalCell]:
    """Ask a byte model with facts planted into `text`, int64 bytes that it was not trained on; a `Cell` as each is done.

    tasks: of `TASKS`, and of `FORMS`, needles that are told and asked for in other ways than `recall` says.
    `written_per_depth` of the `per_depth` sequences are answered by generation as well. Raises `DataError` where a task
    does not fit into a length, or the text is shorter than one.
    """
    for task in tasks:
        for length in lengths:
            for depth in depths:
                asked = [_make_sample(task, length, depth, number, recall, seed, text) for number in range(per_depth)]
                yield _score_cell(
                    model, task, length, depth, asked, generated_per_depth, max(1, max_batch_tokens // length)
                )


def explain_misfit(task: str, length: int, recall: RecallConfig, text: np.ndarray) -> str | None:
    """None, or why this task cannot be asked at this length."""
    try:
        _make_sample(task, length, 0.5, 0, recall, 0, text)
    except DataError as error:
        return str(error)
    return None


def make_needles(length: int, count: int, recall: RecallConfig, seed: int, text: np.ndarray) -> list[RetrievalTask]:
    """`count` needles of `retrieval`, at `spread_depths`."""
    return [
        _make_sample("needle", length, depth, number, recall, seed, text)
        for number, depth in enumerate(spread_depths(count))
    ]


def spread_depths(count: int) -> list[float]:
    """The depth of each of `count` needles, spread over the whole length."""
    return [DEPTHS[number * len(DEPTHS) // count % len(DEPTHS)] for number in range(count)]


def _make_sample(
    task: str, length: int, depth: float, number: int, recall: RecallConfig, seed: int, text: np.ndarray
) -> RetrievalTask:
    key = [seed, list(ALL_TASKS).index(task), length, round(depth * 1000), number]
    return ALL_TASKS[task](length, depth, recall, np.random.default_rng(key), text)


def _score_cell(
    model: NSATransformer,
    task: str,
    length: int,
    depth: float,
    samples: list[RetrievalTask],
    n_generated: int,
    batch_size: int,
) -> RetrievalCell:
    right, first, losses = [], [], []
    for start in range(0, len(samples), batch_size):
        found = score_teacher_forced(model, *stack_samples(samples[start : start + batch_size], model.head.weight.device))
        right.append(found[0].flatten(0, 1).cpu().numpy())
        first.append(found[0][:, 0].all(-1).cpu().numpy())
        losses.append(found[1].flatten().cpu().numpy())
    every = np.concatenate(right)
    own = score_generated(model, samples[:n_generated]) if n_generated else []
    return RetrievalCell(
        task=task,
        length=length,
        depth=depth,
        sequences=len(samples),
        answers=len(every),
        right=int(every.all(-1).sum()),
        tokens=every.size,
        tokens_right=int(every.sum()),
        right_at_depth=int(np.concatenate(first).sum()),
        loss=float(np.concatenate(losses).mean()),
        written=len(own),
        written_right=sum(own),
    )
