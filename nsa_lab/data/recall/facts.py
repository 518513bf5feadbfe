"""Facts: a name, a value, and the sentences that state and ask for them. All texts are bytes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from nsa_lab.config import RecallConfig
from nsa_lab.data.errors import DataError
from nsa_lab.data.recall.grammar import GRAMMARS

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
# No configuration trains on capitals: they are held out for evaluation.
ALPHABETS = {"digits": "0123456789", "letters": LETTERS, "hex": "0123456789abcdef", "capitals": LETTERS.upper()}
MIXED_VALUES = ("digits", "letters", "hex")
# Wordings of `data.wordings: several`, in addition to `data.statement` and `data.question`.
STATEMENTS = (
    "\nRemember: the code {value} is for the {name}.\n",
    "\nIn the list, the {name} has the entry {value}.\n",
    "\n{value} belongs to the {name}.\n",
    "\n{name}: {value}\n",
)
QUESTIONS = (
    "\nWhich code is for the {name}? It is ",
    "\nPlease look up the entry of the {name}: ",
    "\nTo the {name} belongs ",
    "\n{name}? ",
)
# Wordings (statement, question) that no configuration trains on unless it names them.
HELD_OUT_WORDINGS = (
    ("\nNote that the {name} opens with {value}.\n", "\nWhat does the {name} open with? "),
    ("\nWe keep {value} as the label of our {name}, as always.\n", "\nThe label that we keep for our {name} reads "),
)
# Precedes a question for the earlier value of an updated fact.
BEFORE_CHANGE = "\nBefore the change:"
# A code is two letters and a three-digit number.
N_CODES = len(LETTERS) ** 2 * 1000
# A newline ends an answer, as in typed text. It is not part of the value that the model must recall.
ANSWER_END = b"\n"


@dataclass(frozen=True)
class Fact:
    """Texts of a fact: `statement` states it, `question` asks for it, and `value` is the expected answer.

    `wording`: templates of the statement that has the answer and of the question. `replaced`: the same name with another
    value, stated earlier; None if the fact has only one value.
    """

    statement: bytes
    question: bytes
    value: bytes
    wording: tuple[str, str]
    replaced: Fact | None = None


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
    values = _sample_values(count, recall, rng)
    wordings = [_sample_wording(recall, rng) for _ in names]
    facts = [_make_fact(*parts) for parts in zip(names, values, wordings, strict=True)]
    return (
        [_add_replaced(fact, name, recall, rng) for fact, name in zip(facts, names, strict=True)]
        if recall.updates
        else facts
    )


def make_longest_fact(recall: RecallConfig) -> Fact:
    """Return a fact with the maximum length of any sampled fact."""
    longest = max(map(len, ADJECTIVES)) + 1 + max(map(len, NOUNS)) if recall.names == "words" else len("kq-417")
    name, value = "x" * longest, "x" * recall.value_length
    statement, question = (
        max(templates, key=lambda template: len(template.format(name=name, value=value).encode()))
        for templates in _list_wordings(recall)
    )
    fact = _make_fact(name, value, (statement, question))
    fact = replace(fact, replaced=fact if recall.updates else None)
    return ask_for_first_value(fact) if recall.first_values else fact


def ask_for_first_value(fact: Fact) -> Fact:
    """Return an updated fact with a question for its earlier value."""
    assert fact.replaced is not None
    return replace(
        fact,
        question=BEFORE_CHANGE.encode() + fact.question,
        value=fact.replaced.value,
        wording=(fact.replaced.wording[0], BEFORE_CHANGE + fact.wording[1]),
    )


def compute_max_fact_bytes(recall: RecallConfig) -> int:
    """Return the maximum number of bytes of a fact, its replaced statement, its question and its answer."""
    fact = make_longest_fact(recall)
    replaced = fact.replaced.statement if fact.replaced else b""
    return len(replaced) + len(fact.statement) + len(fact.question) + len(fact.value + ANSWER_END)


def _make_fact(name: str, value: str, wording: tuple[str, str]) -> Fact:
    statement, question = (template.format(name=name, value=value).encode() for template in wording)
    return Fact(statement, question, value.encode(), wording)


def _list_wordings(recall: RecallConfig) -> tuple[list[str], list[str]]:
    """Return the templates of statements and of questions."""
    if recall.wordings in GRAMMARS:
        return GRAMMARS[recall.wordings]
    others = (STATEMENTS, QUESTIONS) if recall.wordings == "several" else ((), ())
    return [recall.statement, *others[0]], [recall.question, *others[1]]


def _sample_wording(recall: RecallConfig, rng: np.random.Generator) -> tuple[str, str]:
    statements, questions = _list_wordings(recall)
    # A single wording draws nothing, so the text of older configurations stays the same.
    if len(statements) == 1:
        return statements[0], questions[0]
    return statements[rng.integers(len(statements))], questions[rng.integers(len(questions))]


def _add_replaced(fact: Fact, name: str, recall: RecallConfig, rng: np.random.Generator) -> Fact:
    """Return the fact with an earlier statement of another value, with probability `recall.updates`."""
    if rng.random() >= recall.updates:
        return fact
    value = fact.value.decode()
    while value == fact.value.decode():
        value = _sample_value(recall, rng)
    return replace(fact, replaced=_make_fact(name, value, _sample_wording(recall, rng)))


def _make_name(number: int, recall: RecallConfig) -> str:
    if recall.names == "words":
        return f"{ADJECTIVES[number // len(NOUNS)]} {NOUNS[number % len(NOUNS)]}"
    letters, digits = divmod(number, 1000)
    return f"{LETTERS[letters // len(LETTERS)]}{LETTERS[letters % len(LETTERS)]}-{digits:03d}"


def _sample_values(count: int, recall: RecallConfig, rng: np.random.Generator) -> list[str]:
    n_characters = min(len(ALPHABETS[name]) for name in _list_alphabets(recall))
    can_differ = n_characters**recall.value_length >= count
    values: list[str] = []
    used: set[str] = set()
    while len(values) < count:
        value = _sample_value(recall, rng)
        if not can_differ or value not in used:
            values.append(value)
            used.add(value)
    return values


def _list_alphabets(recall: RecallConfig) -> tuple[str, ...]:
    return MIXED_VALUES if recall.values == "mixed" else (recall.values,)


def _sample_value(recall: RecallConfig, rng: np.random.Generator) -> str:
    names = _list_alphabets(recall)
    alphabet = ALPHABETS[names[0] if len(names) == 1 else names[rng.integers(len(names))]]
    return "".join(alphabet[place] for place in rng.integers(len(alphabet), size=recall.value_length))
