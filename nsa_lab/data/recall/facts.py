"""Facts: a name, a value, and the words in which they are told and asked for. Everything is bytes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nsa_lab.config import RecallConfig
from nsa_lab.data.errors import DataError

# fmt: off
ADJECTIVES = (
    "amber", "brass", "coral", "dusty", "ebony", "frost", "golden", "hazel", "ivory", "jade", "khaki", "lilac",
    "maroon", "navy", "olive", "pearl", "quartz", "ruby", "silver", "teal", "umber", "violet", "walnut", "yellow",
)
NOUNS = (
    "anchor", "badger", "candle", "dragon", "engine", "falcon", "garden", "hammer", "island", "jacket", "kettle",
    "ladder", "mirror", "needle", "oyster", "pillow", "quiver", "rocket", "saddle", "temple", "urchin", "violin",
    "wagon", "zephyr",
)
# fmt: on
LETTERS = "abcdefghijklmnopqrstuvwxyz"
ALPHABETS = {"digits": "0123456789", "letters": LETTERS, "hex": "0123456789abcdef"}
# A code is two letters and a number of three digits.
N_CODES = len(LETTERS) ** 2 * 1000
# An answer ends with a line, as one that a person types does; the line's end is no part of what has to be known.
ANSWER_END = b"\n"


@dataclass(frozen=True)
class Fact:
    """What is told (`statement`), asked for (`question`) and to be answered (`value`)."""

    statement: bytes
    question: bytes
    value: bytes


def sample_facts(count: int, recall: RecallConfig, rng: np.random.Generator) -> list[Fact]:
    """`count` facts about different names, with different values where there are as many.

    Raises `DataError` if there are not as many names.
    """
    available = len(ADJECTIVES) * len(NOUNS) if recall.names == "words" else N_CODES
    if count > available:
        raise DataError(
            f"{count} facts in one sequence, and data.names = {recall.names} has {available} names; "
            "raise data.bytes_per_fact, or set data.names: codes"
        )
    chosen = rng.choice(available, size=count, replace=False)
    names = [_make_name(int(number), recall) for number in chosen]
    return [_make_fact(name, value, recall) for name, value in zip(names, _sample_values(count, recall, rng), strict=True)]


def make_longest_fact(recall: RecallConfig) -> Fact:
    """As long as any that is drawn."""
    longest = max(map(len, ADJECTIVES)) + 1 + max(map(len, NOUNS)) if recall.names == "words" else len("kq-417")
    return _make_fact("x" * longest, "x" * recall.value_length, recall)


def compute_max_fact_bytes(recall: RecallConfig) -> int:
    """The most that a fact, its question and its answer may take."""
    fact = make_longest_fact(recall)
    return len(fact.statement) + len(fact.question) + len(fact.value + ANSWER_END)


def _make_fact(name: str, value: str, recall: RecallConfig) -> Fact:
    statement = recall.statement.format(name=name, value=value)
    return Fact(statement.encode(), recall.question.format(name=name).encode(), value.encode())


def _make_name(number: int, recall: RecallConfig) -> str:
    if recall.names == "words":
        return f"{ADJECTIVES[number // len(NOUNS)]} {NOUNS[number % len(NOUNS)]}"
    letters, digits = divmod(number, 1000)
    return f"{LETTERS[letters // len(LETTERS)]}{LETTERS[letters % len(LETTERS)]}-{digits:03d}"


def _sample_values(count: int, recall: RecallConfig, rng: np.random.Generator) -> list[str]:
    enough = len(ALPHABETS[recall.values]) ** recall.value_length >= count
    values: list[str] = []
    drawn: set[str] = set()
    while len(values) < count:
        value = _sample_value(recall, rng)
        if not enough or value not in drawn:
            values.append(value)
            drawn.add(value)
    return values


def _sample_value(recall: RecallConfig, rng: np.random.Generator) -> str:
    alphabet = ALPHABETS[recall.values]
    return "".join(alphabet[place] for place in rng.integers(len(alphabet), size=recall.value_length))
