"""Sequences that a model is asked with: text, one or several facts in it, and questions at the end.

Needle: one fact at a given depth. Multi-key: the same among many facts that nobody asks for. Multi-query: several facts,
all asked for. Seeded by the generator that is handed in; the text is handed in, too.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from nsa_lab.config import RecallConfig
from nsa_lab.data.errors import DataError
from nsa_lab.data.recall.facts import ANSWER_END, Fact, draw_facts, longest_fact
from nsa_lab.data.recall.planting import Insert, woven


class Asked(NamedTuple):
    """`tokens` int64 [T], and where its answers stand: `answers` int64 [n, value_length], positions in `tokens`."""

    tokens: np.ndarray
    answers: np.ndarray


def needle(length: int, depth: float, recall: RecallConfig, rng: np.random.Generator, text: np.ndarray) -> Asked:
    """One fact at `depth` (0: the beginning, 1: just before the question) of `length` bytes that end with its answer.

    `text` is int64, at least as long. Raises `DataError` where it or `length` is too short, for the longest names there
    are: whether a task fits into a length does not depend on what is drawn.
    """
    (fact,) = draw_facts(1, recall, rng)
    return _asked(length, [Insert(depth, fact.statement)], [fact], recall, rng, text)


def multi_key(length: int, depth: float, recall: RecallConfig, rng: np.random.Generator, text: np.ndarray) -> Asked:
    """`needle` among one fact for every `bytes_per_fact` bytes, at random places, that nobody asks for."""
    fact, *others = draw_facts(1 + max(1, length // recall.bytes_per_fact), recall, rng)
    inserts = [Insert(depth, fact.statement), *(Insert(rng.random(), other.statement) for other in others)]
    return _asked(length, inserts, [fact], recall, rng, text)


def multi_query(
    length: int, depth: float, recall: RecallConfig, rng: np.random.Generator, text: np.ndarray, queries: int = 4
) -> Asked:
    """`queries` facts, the first at `depth` and the others at random places, asked for one after the other at the end."""
    facts = draw_facts(queries, recall, rng)
    places = [depth, *rng.random(queries - 1)]
    inserts = [Insert(place, fact.statement) for place, fact in zip(places, facts, strict=True)]
    return _asked(length, inserts, facts, recall, rng, text)


def _asked(
    length: int,
    inserts: list[Insert],
    asked: list[Fact],
    recall: RecallConfig,
    rng: np.random.Generator,
    text: np.ndarray,
) -> Asked:
    pieces = [piece for fact in asked for piece in (fact.question, fact.value, ANSWER_END)][:-1]
    body, longest = length - sum(map(len, pieces)), longest_fact(recall)
    most = len(inserts) * len(longest.statement) + len(asked) * len(longest.question + longest.value + ANSWER_END) - 1
    if most > length:
        raise DataError(
            f"{len(inserts)} facts and {len(asked)} questions take up to {most} bytes and do not fit into {length}; ask at "
            "greater lengths"
        )
    if len(text) < length:
        raise DataError(f"the text has {len(text)} bytes, and {length} are asked for; give more text, or ask at less")
    start = int(rng.integers(len(text) - body + 1))
    tokens, _ = woven(text[start : start + body], inserts, 1.0)
    ends = body + np.cumsum([len(piece) for piece in pieces])
    answers = np.stack([np.arange(end - len(fact.value), end) for fact, end in zip(asked, ends[1::3], strict=True)])
    return Asked(np.concatenate([tokens, np.frombuffer(b"".join(pieces), np.uint8)]).astype(np.int64), answers)
