"""Sequences that a model is asked with: text, one or several facts in it, and questions at the end.

Needle: one fact at a given depth. Multi-key: the same among many facts that nobody asks for. Multi-query: several facts,
all asked for. Seeded by the generator that is handed in; the text is handed in, too.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from nsa_lab.config import RecallConfig
from nsa_lab.data.errors import DataError
from nsa_lab.data.recall.facts import ANSWER_END, Fact, make_longest_fact, sample_facts
from nsa_lab.data.recall.needle_insertion import Insertion, insert_texts


class RetrievalTask(NamedTuple):
    """`tokens` int64 [T], and where its answers stand: `answers` int64 [n, value_length], positions in `tokens`."""

    tokens: np.ndarray
    answers: np.ndarray


def make_needle_task(
    length: int, depth: float, recall: RecallConfig, rng: np.random.Generator, text: np.ndarray
) -> RetrievalTask:
    """One fact at `depth` (0: the beginning, 1: just before the question) of `length` bytes that end with its answer.

    `text` is int64, at least as long. Raises `DataError` where it or `length` is too short, for the longest names there
    are: whether a task fits into a length does not depend on what is drawn.
    """
    (fact,) = sample_facts(1, recall, rng)
    return _make_task(length, [Insertion(depth, fact.statement)], [fact], recall, rng, text)


def make_multi_key_task(
    length: int, depth: float, recall: RecallConfig, rng: np.random.Generator, text: np.ndarray
) -> RetrievalTask:
    """`needle` among one fact for every `bytes_per_fact` bytes, at random places, that nobody asks for."""
    fact, *others = sample_facts(1 + max(1, length // recall.bytes_per_fact), recall, rng)
    inserts = [Insertion(depth, fact.statement), *(Insertion(rng.random(), other.statement) for other in others)]
    return _make_task(length, inserts, [fact], recall, rng, text)


def make_multi_query_task(
    length: int, depth: float, recall: RecallConfig, rng: np.random.Generator, text: np.ndarray, n_queries: int = 4
) -> RetrievalTask:
    """`queries` facts, the first at `depth` and the others at random places, asked for one after the other at the end."""
    facts = sample_facts(n_queries, recall, rng)
    places = [depth, *rng.random(n_queries - 1)]
    inserts = [Insertion(place, fact.statement) for place, fact in zip(places, facts, strict=True)]
    return _make_task(length, inserts, facts, recall, rng, text)


def _make_task(
    length: int,
    insertions: list[Insertion],
    queried_facts: list[Fact],
    recall: RecallConfig,
    rng: np.random.Generator,
    text: np.ndarray,
) -> RetrievalTask:
    pieces = [piece for fact in queried_facts for piece in (fact.question, fact.value, ANSWER_END)][:-1]
    body, longest = length - sum(map(len, pieces)), make_longest_fact(recall)
    most = (
        len(insertions) * len(longest.statement)
        + len(queried_facts) * len(longest.question + longest.value + ANSWER_END)
        - 1
    )
    if most > length:
        raise DataError(
            f"{len(insertions)} facts and {len(queried_facts)} questions take up to {most} bytes and do not fit into {length}; ask at "
            "greater lengths"
        )
    if len(text) < length:
        raise DataError(f"the text has {len(text)} bytes, and {length} are asked for; give more text, or ask at less")
    start = int(rng.integers(len(text) - body + 1))
    tokens, _ = insert_texts(text[start : start + body], insertions, 1.0)
    ends = body + np.cumsum([len(piece) for piece in pieces])
    answers = np.stack([np.arange(end - len(fact.value), end) for fact, end in zip(queried_facts, ends[1::3], strict=True)])
    return RetrievalTask(np.concatenate([tokens, np.frombuffer(b"".join(pieces), np.uint8)]).astype(np.int64), answers)
