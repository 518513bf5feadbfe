"""Facts: a name, a value, and the sentences that state and ask for them. All texts are bytes."""

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
# A code is two letters and a three-digit number.
N_CODES = len(LETTERS) ** 2 * 1000
# A newline ends an answer, as in typed text. It is not part of the value that the model must recall.
ANSWER_END = b"\n"


@dataclass(frozen=True)
class Fact:
    """Texts of a fact: `statement` states it, `question` asks for it, and `value` is the expected answer."""

    statement: bytes
    question: bytes
    value: bytes


def sample_facts(count: int, recall: RecallConfig, rng: np.random.Generator) -> list[Fact]:
    """Return `count` facts with different names, and with different values if there are at least `count` values.

    Raises `DataError` if there are fewer than `count` names.
    """
    available = len(ADJECTIVES) * len(NOUNS) if recall.names == "words" else N_CODES
    if count > available:
        raise DataError(
            f"{count} facts in one sequence: data.names = {recall.names} has only {available} names; "
            "raise data.bytes_per_fact or set data.names: codes"
        )
    indices = rng.choice(available, size=count, replace=False)
    names = [_make_name(int(number), recall) for number in indices]
    return [_make_fact(name, value, recall) for name, value in zip(names, _sample_values(count, recall, rng), strict=True)]


def make_longest_fact(recall: RecallConfig) -> Fact:
    """Return a fact with the maximum length of any sampled fact."""
    longest = max(map(len, ADJECTIVES)) + 1 + max(map(len, NOUNS)) if recall.names == "words" else len("kq-417")
    return _make_fact("x" * longest, "x" * recall.value_length, recall)


def compute_max_fact_bytes(recall: RecallConfig) -> int:
    """Return the maximum number of bytes of a fact, its question and its answer."""
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
    can_differ = len(ALPHABETS[recall.values]) ** recall.value_length >= count
    values: list[str] = []
    used: set[str] = set()
    while len(values) < count:
        value = _sample_value(recall, rng)
        if not can_differ or value not in used:
            values.append(value)
            used.add(value)
    return values


def _sample_value(recall: RecallConfig, rng: np.random.Generator) -> str:
    alphabet = ALPHABETS[recall.values]
    return "".join(alphabet[place] for place in rng.integers(len(alphabet), size=recall.value_length))
