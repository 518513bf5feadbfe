"""Sequences that test retrieval: text, one or several facts in it, and questions at the end.

Needle: one fact at a given depth. Multi-key: the same, among many facts that are not asked for. Multi-query: several facts,
all asked for. Updated: one fact, and an earlier value that it replaces. First value: the same, with a question for the
earlier value. The caller provides the random generator and the text.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from nsa_lab.config import RecallConfig
from nsa_lab.data.errors import DataError
from nsa_lab.data.recall.facts import ANSWER_END, Fact, ask_for_first_value, make_longest_fact, sample_facts
from nsa_lab.data.recall.needle_insertion import Insertion, insert_statements, insert_texts


class RetrievalTask(NamedTuple):
    """`tokens` int64 [T], and the positions of its answers in `tokens`, `answers` int64 [n, value_length].

    `wordings`: for each answer the templates of its statement and of its question.
    """

    tokens: np.ndarray
    answers: np.ndarray
    wordings: tuple[tuple[str, str], ...]


def make_needle_task(
    length: int, depth: float, recall: RecallConfig, rng: np.random.Generator, text: np.ndarray
) -> RetrievalTask:
    """Return one fact at `depth` (0: start, 1: just before the question) in `length` bytes that end with its answer.

    `text`: int64, at least `length` bytes. Raises `DataError` if it or `length` is too short for the longest possible
    names; whether a task fits therefore does not depend on the sampled facts.
    """
    (fact,) = sample_facts(1, recall, rng)
    return _make_task(length, [Insertion(depth, fact.statement)], [fact], recall, rng, text)


def make_multi_key_task(
    length: int, depth: float, recall: RecallConfig, rng: np.random.Generator, text: np.ndarray
) -> RetrievalTask:
    """Return `make_needle_task` with one additional fact per `bytes_per_fact` bytes at a random depth, never asked for."""
    fact, *others = sample_facts(1 + max(1, length // recall.bytes_per_fact), recall, rng)
    insertions = [Insertion(depth, fact.statement), *(Insertion(rng.random(), other.statement) for other in others)]
    return _make_task(length, insertions, [fact], recall, rng, text)


def make_multi_query_task(
    length: int, depth: float, recall: RecallConfig, rng: np.random.Generator, text: np.ndarray, n_queries: int = 4
) -> RetrievalTask:
    """Return a task with `n_queries` facts, the first at `depth`, the others at random depths, all asked for at the end."""
    facts = sample_facts(n_queries, recall, rng)
    depths = [depth, *rng.random(n_queries - 1)]
    insertions = [Insertion(fact_depth, fact.statement) for fact_depth, fact in zip(depths, facts, strict=True)]
    return _make_task(length, insertions, facts, recall, rng, text)


def make_updated_task(
    length: int, depth: float, recall: RecallConfig, rng: np.random.Generator, text: np.ndarray
) -> RetrievalTask:
    """Return `make_needle_task` with an earlier statement of another value; the later value is the answer."""
    (fact,) = sample_facts(1, recall.model_copy(update={"updates": 1.0}), rng)
    return _make_task(length, insert_statements(fact, depth, rng), [fact], recall, rng, text)


def make_first_value_task(
    length: int, depth: float, recall: RecallConfig, rng: np.random.Generator, text: np.ndarray
) -> RetrievalTask:
    """Return `make_updated_task` with a question for the earlier value. `depth`: of the later statement."""
    asked = recall.model_copy(update={"updates": 1.0, "first_values": 1.0})
    fact = ask_for_first_value(*sample_facts(1, asked, rng))
    return _make_task(length, insert_statements(fact, depth, rng), [fact], asked, rng, text)


def _make_task(
    length: int,
    insertions: list[Insertion],
    queried_facts: list[Fact],
    recall: RecallConfig,
    rng: np.random.Generator,
    text: np.ndarray,
) -> RetrievalTask:
    pieces = [piece for fact in queried_facts for piece in (fact.question, fact.value, ANSWER_END)][:-1]
    n_text, longest_fact = length - sum(map(len, pieces)), make_longest_fact(recall)
    max_bytes = (
        len(insertions) * len(longest_fact.statement)
        + len(queried_facts) * len(longest_fact.question + longest_fact.value + ANSWER_END)
        - 1
    )
    if max_bytes > length:
        raise DataError(
            f"{len(insertions)} facts and {len(queried_facts)} questions take up to {max_bytes} bytes "
            f"and do not fit into {length}; use a greater length"
        )
    if len(text) < length:
        raise DataError(f"the text has {len(text)} bytes, {length} are required; give more text or use a smaller length")
    start = int(rng.integers(len(text) - n_text + 1))
    tokens, _ = insert_texts(text[start : start + n_text], insertions, 1.0)
    ends = n_text + np.cumsum([len(piece) for piece in pieces])
    answers = np.stack([np.arange(end - len(fact.value), end) for fact, end in zip(queried_facts, ends[1::3], strict=True)])
    return RetrievalTask(
        np.concatenate([tokens, np.frombuffer(b"".join(pieces), np.uint8)]).astype(np.int64),
        answers,
        tuple(fact.wording for fact in queried_facts),
    )
