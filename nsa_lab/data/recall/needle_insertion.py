"""Insertion of facts into windows of training text: each fact is stated once and asked for once, later.

Invariants
* The insertions are a function of the seed, the sequence number and, with document masking, the index of the document in
  the sequence. The surrounding text is a prefix of the original text, unchanged and in order. The length stays the same.
* The answer to a question occurs earlier in the same sequence, in its own statement and in no other fact's statement
  (unless there are more facts than values, or a replaced value equals it). A replaced statement precedes the one that
  replaces it, and is the answer's statement if the question asks for the earlier value. A coincidental occurrence in the
  surrounding text is not removed.
* Which sequences get insertions is a function of the sequence number and the share (`insert_in_share`).
* Answer bytes have the loss weight `data.answer_weight`. The newline after an answer and all other text have weight 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from nsa_lab.config import RecallConfig
from nsa_lab.data.batches import Inserter
from nsa_lab.data.document_starts import find_document_starts
from nsa_lab.data.errors import DataError
from nsa_lab.data.recall.facts import ANSWER_END, Fact, ask_for_first_value, compute_max_fact_bytes, sample_facts


class Insertion(NamedTuple):
    """`text`, then `answer` and a newline (if there is an answer), at `depth`, a fraction of the text from 0 to 1."""

    depth: float
    text: bytes
    answer: bytes = b""


# (text int64 [T], sequence number, part number within the sequence) -> the outputs of an `Inserter`.
PartInserter = Callable[..., tuple[np.ndarray, np.ndarray]]


def make_inserter(recall: RecallConfig, seq_len: int, seed: int) -> PartInserter:
    """Return a function that inserts facts into windows of `seq_len` + 1 bytes or parts of them.

    There is one fact per `bytes_per_fact` bytes, and at least one in a whole window. Raises `DataError` if less than half
    of a window would remain text.
    """
    n_facts, max_fact_bytes = max(1, seq_len // recall.bytes_per_fact), compute_max_fact_bytes(recall)
    if 2 * n_facts * max_fact_bytes > seq_len + 1:
        raise DataError(
            f"{n_facts} facts and their questions take up to {n_facts * max_fact_bytes} of {seq_len + 1} bytes, more than "
            "half; raise data.bytes_per_fact or train.seq_len, or shorten data.statement, data.question or "
            "data.value_length"
        )

    def insert(window: np.ndarray, sequence: int, part: int = 0) -> tuple[np.ndarray, np.ndarray]:
        length = len(window) - 1
        count = n_facts if length == seq_len else min(length // recall.bytes_per_fact, len(window) // (2 * max_fact_bytes))
        if not count:
            return window, np.ones(len(window), np.float32)
        rng = np.random.Generator(np.random.Philox(key=np.array([seed, sequence], np.uint64), counter=[0, 0, 0, part]))
        return insert_texts(
            window, _make_insertions(sample_facts(count, recall, rng), recall, rng, length), recall.answer_weight
        )

    return insert


def insert_per_document(inserter: PartInserter, separator: int) -> Inserter:
    """Return an inserter that applies `inserter` to each document of a window.

    A question and its answer then share a document.
    """

    def insert_each(window: np.ndarray, sequence: int) -> tuple[np.ndarray, np.ndarray]:
        starts = find_document_starts(window, separator)
        parts = [
            _insert_after_separators(separator, text, lambda text, part=part: inserter(text, sequence, part))
            for part, text in enumerate(np.split(window, starts[1:]))
        ]
        tokens, weights = zip(*parts, strict=True)
        return np.concatenate(tokens), np.concatenate(weights)

    return insert_each


def insert_in_share(inserter: Inserter, share: float) -> Inserter:
    """Return an inserter that applies `inserter` to a fraction `share` of the sequences, evenly spaced by number."""

    def insert_some(window: np.ndarray, sequence: int) -> tuple[np.ndarray, np.ndarray]:
        if int((sequence + 1) * share) > int(sequence * share):
            return inserter(window, sequence)
        return window, np.ones(len(window), np.float32)

    return insert_some


def _insert_after_separators(
    separator: int, text: np.ndarray, insert: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]
) -> tuple[np.ndarray, np.ndarray]:
    """Apply `insert` to a document after its leading separators."""
    n_separators = int((text == separator).sum())
    if n_separators == len(text):
        return text, np.ones(len(text), np.float32)
    tokens, weights = insert(text[n_separators:])
    return np.concatenate([text[:n_separators], tokens]), np.concatenate([np.ones(n_separators, np.float32), weights])


def insert_texts(window: np.ndarray, insertions: list[Insertion], answer_weight: float) -> tuple[np.ndarray, np.ndarray]:
    """Insert texts into a window int64 [T] in the order of their depths.

    Returns tokens int64 [T] and loss weights float32 [T].

    The end of the window is dropped to keep the length. Insertions at equal depths keep the order of the list.
    """
    n_text = len(window) - sum(len(_to_bytes(insertion)) for insertion in insertions)
    tokens, weights, last = [], [], 0
    for insertion in sorted(insertions, key=lambda insertion: insertion.depth):
        cut = int(insertion.depth * n_text)
        tokens += [window[last:cut], np.frombuffer(_to_bytes(insertion), np.uint8)]
        weights += [
            (1.0, cut - last + len(insertion.text)),
            (answer_weight, len(insertion.answer)),
            (1.0, len(_get_line_end(insertion))),
        ]
        last = cut
    tokens.append(window[last:n_text])
    weights.append((1.0, n_text - last))
    values, counts = zip(*weights, strict=True)
    return np.concatenate(tokens).astype(np.int64), np.repeat(np.array(values, np.float32), counts)


def _to_bytes(insertion: Insertion) -> bytes:
    return insertion.text + insertion.answer + _get_line_end(insertion)


def _get_line_end(insertion: Insertion) -> bytes:
    return ANSWER_END if insertion.answer else b""


def _make_insertions(facts: list[Fact], recall: RecallConfig, rng: np.random.Generator, length: int) -> list[Insertion]:
    """Return statements, and questions in groups of `questions_together`. Each group follows all its statements."""
    queried = [
        # Without `first_values` nothing is drawn, so the text of older configurations stays the same.
        ask_for_first_value(fact) if recall.first_values and fact.replaced and rng.random() < recall.first_values else fact
        for fact in facts[: max(1, round(len(facts) * (1 - recall.distractors)))]
    ]
    insertions = [piece for fact in facts[len(queried) :] for piece in insert_statements(fact, rng.random(), rng)]
    for first in range(0, len(queried), recall.questions_together):
        group = queried[first : first + recall.questions_together]
        depths = [_sample_depths(recall, rng, length) for _ in group]
        for (depth, _), fact in zip(depths, group, strict=True):
            insertions += insert_statements(fact, depth, rng)
        # Equal depths keep the list order, so a question never comes before its statement.
        insertions += [Insertion(max(depth for _, depth in depths), fact.question, fact.value) for fact in group]
    return insertions


def insert_statements(fact: Fact, depth: float, rng: np.random.Generator) -> list[Insertion]:
    """Return the statement of a fact at `depth`, after the replaced one, if any, at a random smaller depth."""
    earlier = [Insertion(depth * rng.random(), fact.replaced.statement)] if fact.replaced else []
    return [*earlier, Insertion(depth, fact.statement)]


def _sample_depths(recall: RecallConfig, rng: np.random.Generator, length: int) -> tuple[float, float]:
    """Return the depths of a fact's statement and of its question, as fractions of the text."""
    if recall.distance == "uniform":
        first, second = sorted(rng.random(2))
        return first, second
    distance = math.exp(rng.uniform(-math.log(length), 0.0))
    first = rng.random() * (1 - distance)
    return first, first + distance
