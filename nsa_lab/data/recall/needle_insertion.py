"""Facts planted into windows of text, for training: each told once, and asked for once, later.

Invariants
* What is planted is a function of the seed, of the sequence's number and, where documents are told apart, of the document's
  place in it; the text around it is the beginning of what it is planted into, byte for byte and in order; the length stays.
* A question's answer stands earlier in the same sequence, in its statement and in that of no other fact (unless there are
  more facts than values). Where the text around happens to hold it too, it stays.
* Which sequences are planted into is a function of their number and of the share of them (`sparingly`).
* The bytes of answers weigh `data.answer_weight`, the end of an answer's line and everything else 1.
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
from nsa_lab.data.recall.facts import ANSWER_END, Fact, compute_max_fact_bytes, sample_facts


class Insertion(NamedTuple):
    """`said`, then `answer` and the end of its line if there is one, at `place`, a share of the text from 0 to 1."""

    depth: float
    text: bytes
    answer: bytes = b""


# A text, int64 [T], the number of its sequence and that of its part of it -> as a `Planter`.
PartInserter = Callable[..., tuple[np.ndarray, np.ndarray]]


def make_inserter(recall: RecallConfig, seq_len: int, seed: int) -> PartInserter:
    """Plants into windows of `seq_len` + 1 bytes, or into parts of them: one fact for every `bytes_per_fact` bytes.

    A whole window has one at least. Raises `DataError` if text would not fill half of one.
    """
    facts, largest = max(1, seq_len // recall.bytes_per_fact), compute_max_fact_bytes(recall)
    if 2 * facts * largest > seq_len + 1:
        raise DataError(
            f"{facts} facts and their questions take up to {facts * largest} of {seq_len + 1} bytes, and half has to stay "
            "text; raise data.bytes_per_fact or train.seq_len, or shorten data.statement, data.question or "
            "data.value_length"
        )

    def plant(window: np.ndarray, sequence: int, part: int = 0) -> tuple[np.ndarray, np.ndarray]:
        length = len(window) - 1
        count = facts if length == seq_len else min(length // recall.bytes_per_fact, len(window) // (2 * largest))
        if not count:
            return window, np.ones(len(window), np.float32)
        rng = np.random.Generator(np.random.Philox(key=np.array([seed, sequence], np.uint64), counter=[0, 0, 0, part]))
        return insert_texts(
            window, _make_insertions(sample_facts(count, recall, rng), recall, rng, length), recall.answer_weight
        )

    return plant


def insert_per_document(inserter: PartInserter, separator: int) -> Inserter:
    """`plant` in every document of a window by itself, so that a question never stands in another one than its answer."""

    def plant_each(window: np.ndarray, sequence: int) -> tuple[np.ndarray, np.ndarray]:
        begins = find_document_starts(window, separator)
        parts = [
            _insert_after_separators(separator, text, lambda text, part=part: inserter(text, sequence, part))
            for part, text in enumerate(np.split(window, begins[1:]))
        ]
        tokens, weights = zip(*parts, strict=True)
        return np.concatenate(tokens), np.concatenate(weights)

    return plant_each


def insert_in_share(inserter: Inserter, share: float) -> Inserter:
    """`plant` in that share of the sequences, spread evenly over their numbers."""

    def plant_some(window: np.ndarray, sequence: int) -> tuple[np.ndarray, np.ndarray]:
        if int((sequence + 1) * share) > int(sequence * share):
            return inserter(window, sequence)
        return window, np.ones(len(window), np.float32)

    return plant_some


def _insert_after_separators(
    separator: int, text: np.ndarray, plant: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]
) -> tuple[np.ndarray, np.ndarray]:
    """What `plant` makes of a document, behind the separators that it begins with."""
    head = int((text == separator).sum())
    if head == len(text):
        return text, np.ones(len(text), np.float32)
    tokens, weights = plant(text[head:])
    return np.concatenate([text[:head], tokens]), np.concatenate([np.ones(head, np.float32), weights])


def insert_texts(window: np.ndarray, insertions: list[Insertion], answer_weight: float) -> tuple[np.ndarray, np.ndarray]:
    """The inserts in a window of text int64 [T], in the order of their places -> tokens int64 [T], weights float32 [T].

    The end of the window gives way. Equal places keep the order of the list.
    """
    rest = len(window) - sum(len(_to_bytes(insert)) for insert in insertions)
    tokens, weights, last = [], [], 0
    for insert in sorted(insertions, key=lambda insert: insert.depth):
        cut = int(insert.depth * rest)
        tokens += [window[last:cut], np.frombuffer(_to_bytes(insert), np.uint8)]
        weights += [
            (1.0, cut - last + len(insert.text)),
            (answer_weight, len(insert.answer)),
            (1.0, len(_get_line_end(insert))),
        ]
        last = cut
    tokens.append(window[last:rest])
    weights.append((1.0, rest - last))
    values, counts = zip(*weights, strict=True)
    return np.concatenate(tokens).astype(np.int64), np.repeat(np.array(values, np.float32), counts)


def _to_bytes(insert: Insertion) -> bytes:
    return insert.text + insert.answer + _get_line_end(insert)


def _get_line_end(insert: Insertion) -> bytes:
    return ANSWER_END if insert.answer else b""


def _make_insertions(facts: list[Fact], recall: RecallConfig, rng: np.random.Generator, length: int) -> list[Insertion]:
    """Statements, and questions in groups of `questions_together`, each group behind all its statements."""
    asked = facts[: max(1, round(len(facts) * (1 - recall.distractors)))]
    inserts = [Insertion(rng.random(), fact.statement) for fact in facts[len(asked) :]]
    for first in range(0, len(asked), recall.questions_together):
        group = asked[first : first + recall.questions_together]
        told = [_sample_depths(recall, rng, length) for _ in group]
        inserts += [Insertion(place, fact.statement) for (place, _), fact in zip(told, group, strict=True)]
        # The list's order holds among equal places, so a question never comes before its statement.
        inserts += [Insertion(max(place for _, place in told), fact.question, fact.value) for fact in group]
    return inserts


def _sample_depths(recall: RecallConfig, rng: np.random.Generator, length: int) -> tuple[float, float]:
    """Where a fact is told and where it is asked for, as shares of the text."""
    if recall.distance == "uniform":
        first, second = sorted(rng.random(2))
        return first, second
    distance = math.exp(rng.uniform(-math.log(length), 0.0))
    first = rng.random() * (1 - distance)
    return first, first + distance
