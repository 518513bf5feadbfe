"""Questions of RULER's tasks (Hsieh et al. 2024, arXiv 2404.06654) that need no download.

The sentences and parameters are the published ones (github.com/NVIDIA/RULER, commit c3f5e3b, Apache-2.0): `niah.py`,
`variable_tracking.py`, `common_words_extraction.py`, `freq_words_extraction.py`, `constants.py` and `synthetic.yaml` there.
These differ:
* Essays are the caller's documents, from a place that each question draws. A sentence of documents ends after a period, an
  exclamation mark or a question mark, or after `MAX_SENTENCE_WORDS` words (RULER: nltk).
* Words are those of `ruler_words` (RULER: wonderwords). Longer lists of `cwe` have made-up words (RULER: a larger list).
* Keys of distractors are distinct. Each question draws its own order of words (RULER: one order for all questions).
* The example of `vt` has at least five times the noise, also if it is then longer than `VT_EXAMPLE_TOKENS` tokens (bytes).

Invariant: a question depends only on its key, its task, the length, the tokenizer and the documents. Its prompt has at most
`length` - `tokens_to_generate` tokens, and one unit of haystack more would not fit.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from nsa_lab.data import DataError
from nsa_lab.evaluate.ruler_words import ADJECTIVES, NOUNS, WORDS

CountTokens = Callable[[str], int]

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
NEEDLE = "One of the special magic {kind} for {key} is: {value}."
NIAH = (
    "Some special magic {kind} are hidden within the following text. Make sure to memorize it. I will quiz you about the "
    "{kind} afterwards.\n{context}\nWhat are all the special magic {kind} for {query} mentioned in the provided text? The "
    "special magic {kind} for {query} mentioned in the provided text are"
)
NIAH_SINGLE = (
    "A special magic {kind} is hidden within the following text. Make sure to memorize it. I will quiz you about the "
    "{kind} afterwards.\n{context}\nWhat is the special magic {kind} for {query} mentioned in the provided text? The "
    "special magic {kind} for {query} mentioned in the provided text is"
)
VT = (
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}\nQuestion: Find all "
    "variables that are assigned the value {query} in the text above. Answer: According to the chain(s) of variable "
    "assignment in the text above, {count} variables are assigned the value {query}, they are: "
)
CWE = (
    "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that appear "
    "most often.\n{context}\nQuestion: What are the 10 most common words in the above list? Answer: The top 10 words that "
    "appear most often in the list are:"
)
FWE = (
    "Read the following coded text and track the frequency of each coded word. Find the three most frequently appeared "
    "coded words. {context}\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the three "
    "most frequently appeared words in the above coded text? Answer: According to the coded text above, the three most "
    "frequently appeared words are:"
)
# Depths of needles in documents, percent of the sentences.
DEPTHS = tuple(int(depth) for depth in np.round(np.linspace(0, 100, 40)))
MAX_SENTENCE_WORDS = 40
N_HOPS = 4
VT_EXAMPLE_TOKENS = 500
N_COMMON = 10
CWE_LONG_TOKENS = 4096  # from this length on, words are repeated more often
# Exponent of the zeta distribution of `fwe`, and the sum of all k ** -exponent.
FWE_EXPONENT, FWE_ZETA = 2.0, math.pi**2 / 6
FWE_WORD_LETTERS, FWE_TOKENS_PER_WORD, FWE_ANSWERS = 6, 50, 3
# From this number of words on, ranks 4 and 5 differ: int(53 * 0.608 / 4**2) > int(53 * 0.608 / 5**2), and so on.
FWE_LEAST_WORDS = 53
LOWER, UPPER = "abcdefghijklmnopqrstuvwxyz", "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
CONSONANTS, VOWELS = "bcdfghjklmnpqrstvwxz", "aeiou"
# Estimates of a search before it only halves its range.
MAX_ESTIMATES = 8


class Question(NamedTuple):
    """Text that a model continues, and the strings that the continuation must contain."""

    prompt: str
    references: list[str]


class Request(NamedTuple):
    """Tokens of a sequence and of its prompt, the tokenizer's count of a text, and the words of the documents."""

    length: int
    n_prompt: int
    count_tokens: CountTokens
    words: Sequence[str]


class Plan(NamedTuple):
    """Questions of a task at a length. `make` takes the number of units of haystack, `least` to `most`."""

    make: Callable[[int, np.random.Generator], Question]
    least: int
    most: int


@dataclass(frozen=True)
class RulerTask:
    """A task. `plan` may raise `DataError`; `has_documents`: the haystack is documents."""

    plan: Callable[[Request], Plan]
    tokens_to_generate: int
    has_documents: bool = False


def make_questions(
    task: str, length: int, count: int, count_tokens: CountTokens, words: Sequence[str], seed: int = 0
) -> Iterator[Question]:
    """Yield `count` questions of `RULER_TASKS[task]` for sequences of `length` tokens, with the longest haystacks that fit.

    words: of the documents, as `split_words` returns them. Raises `DataError` if the task does not fit into `length` or
    needs more documents.
    """
    declared = RULER_TASKS[task]
    n_prompt = length - declared.tokens_to_generate
    plan = declared.plan(Request(length, n_prompt, count_tokens, words))
    n_units = plan.least
    for number in range(count):
        key = [seed, list(RULER_TASKS).index(task), length, number]

        def make(n_units: int, key: list[int] = key) -> Question:
            return plan.make(n_units, np.random.default_rng(key))

        n_units = find_most_units(
            lambda n, make=make: count_tokens(make(n).prompt), n_prompt, plan.least, plan.most, n_units
        )
        if n_units < plan.least:
            needed = count_tokens(make(plan.least).prompt) + declared.tokens_to_generate
            raise DataError(f"{task} needs {needed:,} tokens and does not fit into {length:,}; use a greater length")
        if declared.has_documents and n_units == plan.most:
            raise DataError(
                f"the documents have {len(words):,} words, all of which fit into {length:,} tokens; give more text or use "
                "a smaller length"
            )
        yield make(n_units)


def find_most_units(count_tokens: Callable[[int], int], budget: int, least: int, most: int, guess: int) -> int:
    """Return the largest number of units, `least` to `most`, that takes at most `budget` tokens; least - 1 if none does.

    count_tokens: increasing in the number of units. guess: where to begin.
    """
    low, high, guess = least - 1, most + 1, min(max(guess, least), most)
    last: tuple[int, int] | None = None
    for attempt in range(most - least + 1):
        tokens = count_tokens(guess)
        low, high = (guess, high) if tokens <= budget else (low, guess)
        if high - low < 2:
            break
        # Tokens per unit between the last two points. A proportion is more: a text without haystack has tokens, too.
        proportion = tokens / guess
        slope = (tokens - last[1]) / (guess - last[0]) if last and guess != last[0] else proportion
        last = guess, tokens
        estimate = guess + math.floor((budget - tokens) / max(slope, proportion / 2))
        guess = min(max(estimate, low + 1), high - 1) if attempt < MAX_ESTIMATES else (low + high) // 2
    return low


def split_words(documents: Sequence[str]) -> list[str]:
    """Return the words of all documents, in order. White space separates them."""
    return [word for document in documents for word in document.split()]


def count_matches(text: str, references: Sequence[str]) -> int:
    """Return the number of references that occur in the text. Case does not matter, as in RULER's `string_match_all`."""
    return sum(reference.lower() in text.lower() for reference in references)


def _declare_needles(
    haystack: Literal["noise", "documents", "needles"],
    keys: Literal["words", "uuids"] = "words",
    values: Literal["numbers", "uuids"] = "numbers",
    *,
    n_keys: int = 1,
    n_values: int = 1,
    n_queries: int = 1,
) -> RulerTask:
    """Return the task of `n_keys` needles with `n_values` values each in a haystack; `n_queries` keys are queried."""
    n_keys = max(n_keys, n_queries)
    n_needles = n_keys * n_values
    is_single = n_queries * n_values == 1

    def state(key: str, value: str) -> str:
        return NEEDLE.format(kind=values, key=key, value=value)

    def plan(request: Request) -> Plan:
        def make(n_units: int, rng: np.random.Generator) -> Question:
            n_distractors = n_units if haystack == "needles" else 0
            all_keys = _sample_keys(keys, n_keys + n_distractors, rng)
            all_values = [_sample_value(values, rng) for _ in range(n_needles + n_distractors)]
            values_by_key = [all_values[first : first + n_values] for first in range(0, n_needles, n_values)]
            needles = [state(key, value) for key, own in zip(all_keys, values_by_key, strict=False) for value in own]
            needles = [needles[index] for index in rng.permutation(n_needles)]
            if haystack == "documents":
                hay = split_sentences(_read_words(request.words, int(rng.integers(len(request.words))), n_units))
                depths = sorted(rng.choice(DEPTHS, n_needles, replace=False))
                places = [len(hay) * depth // 100 for depth in depths]
            else:
                distractors = map(state, all_keys[n_keys:], all_values[n_needles:])
                hay = [NOISE] * n_units if haystack == "noise" else list(distractors)
                places = sorted(rng.choice(n_units, n_needles, replace=False))
            context = (" " if haystack == "documents" else "\n").join(_insert(hay, places, needles))
            indices = rng.choice(n_keys, n_queries, replace=False)
            return Question(
                (NIAH_SINGLE if is_single else NIAH).format(
                    kind=values.removesuffix("s") if is_single else values,
                    context=context,
                    query=_enumerate([all_keys[index] for index in indices]),
                ),
                [value for index in indices for value in values_by_key[index]],
            )

        most = {
            "noise": request.n_prompt,
            "documents": len(request.words),
            "needles": min(request.n_prompt, len(ADJECTIVES) * len(NOUNS) - n_keys),
        }
        if haystack == "documents" and len(request.words) < n_needles:
            raise DataError(f"the documents have {len(request.words)} words; give text for the haystack")
        return Plan(make, n_needles, most[haystack])

    return RulerTask(plan, tokens_to_generate=128, has_documents=haystack == "documents")


def _plan_variables(request: Request) -> Plan:
    """Return the task of a chain of variables in noise, each assigned to the next; all of them are the answer."""
    n_variables = N_HOPS + 1

    def make_example(n_noises: int, value: str, rng: np.random.Generator) -> Question:
        return _track_variables(n_noises, 3, value, rng)

    n_example = find_most_units(
        lambda n: request.count_tokens(make_example(n, "12345", np.random.default_rng(0)).prompt),
        VT_EXAMPLE_TOKENS,
        n_variables,
        VT_EXAMPLE_TOKENS,
        n_variables,
    )

    def make(n_noises: int, rng: np.random.Generator) -> Question:
        example_value, value = (str(10_000 + index) for index in rng.choice(89_999, 2, replace=False))
        example = make_example(max(n_example, n_variables), example_value, rng)
        question = _track_variables(n_noises, 5, value, rng)
        return question._replace(prompt=f"{example.prompt} {' '.join(example.references)}\n\n{question.prompt}")

    return Plan(make, n_variables, request.n_prompt)


def _track_variables(n_noises: int, n_letters: int, value: str, rng: np.random.Generator) -> Question:
    names = _sample_distinct(N_HOPS + 1, lambda: _sample_letters(n_letters, UPPER, rng))
    # All but the first line end with a space, as published.
    sources = [value, *(f"VAR {name} " for name in names[:-1])]
    lines = [f"VAR {name} = {source}" for name, source in zip(names, sources, strict=True)]
    places = sorted(rng.choice(n_noises, len(names), replace=False))
    context = "\n".join(_insert([NOISE] * n_noises, places, lines))
    return Question(VT.format(context=context, query=value, count=len(names)), names)


def _plan_common_words(request: Request) -> Plan:
    """Return the task of a numbered list in which ten words, the answer, occur more often than all others."""
    is_long = request.length >= CWE_LONG_TOKENS
    n_example_words, example_repeats, repeats = (40, (10, 3), (30, 3)) if is_long else (20, (3, 1), (6, 1))

    def make(n_words: int, rng: np.random.Generator) -> Question:
        example = _list_words(n_example_words, example_repeats, rng)
        question = _list_words(n_words, repeats, rng)
        return question._replace(prompt=f"{example.prompt} {_number(example.references)}\n{question.prompt}")

    return Plan(make, 2 * N_COMMON, request.n_prompt)


def _list_words(n_words: int, repeats: tuple[int, int], rng: np.random.Generator) -> Question:
    if n_words <= len(WORDS):
        words = [WORDS[index] for index in rng.permutation(len(WORDS))[:n_words]]
    else:
        words = _sample_distinct(n_words, lambda: _sample_syllables(rng))
    entries = words[:N_COMMON] * repeats[0] + words[N_COMMON:] * repeats[1]
    context = _number([entries[index] for index in rng.permutation(len(entries))])
    return Question(CWE.format(context=context), words[:N_COMMON])


def _plan_frequent_words(request: Request) -> Plan:
    """Return the task of coded words whose counts fall with their rank: rank 1 is dots, ranks 2 to 4 are the answer."""
    n_vocabulary = max(request.n_prompt // FWE_TOKENS_PER_WORD, FWE_ANSWERS + 2)
    shares = np.arange(1, n_vocabulary + 1, dtype=np.float64) ** -FWE_EXPONENT / FWE_ZETA

    def make(n_words: int, rng: np.random.Generator) -> Question:
        counts = (n_words * shares).astype(np.int64)
        words = ["...", *_sample_distinct(n_vocabulary - 1, lambda: _sample_letters(FWE_WORD_LETTERS, LOWER, rng))]
        context = " ".join(words[rank] for rank in rng.permutation(np.repeat(np.arange(n_vocabulary), counts)))
        return Question(FWE.format(context=context), words[1 : 1 + FWE_ANSWERS])

    return Plan(make, FWE_LEAST_WORDS, request.n_prompt)


# Names and parameters as published. The order is part of the key of every question.
RULER_TASKS: dict[str, RulerTask] = {
    "niah_single_1": _declare_needles("noise"),
    "niah_single_2": _declare_needles("documents"),
    "niah_single_3": _declare_needles("documents", values="uuids"),
    "niah_multikey_1": _declare_needles("documents", n_keys=4),
    "niah_multikey_2": _declare_needles("needles"),
    "niah_multikey_3": _declare_needles("needles", "uuids", "uuids"),
    "niah_multivalue": _declare_needles("documents", n_values=4),
    "niah_multiquery": _declare_needles("documents", n_queries=4),
    "vt": RulerTask(_plan_variables, tokens_to_generate=30),
    "cwe": RulerTask(_plan_common_words, tokens_to_generate=120),
    "fwe": RulerTask(_plan_frequent_words, tokens_to_generate=50),
}


def split_sentences(words: Sequence[str]) -> list[str]:
    """Return the sentences of a text, the words of each joined by spaces."""
    sentences: list[str] = []
    start = 0
    for end, word in enumerate(words, 1):
        if word[-1] in ".!?" or end - start == MAX_SENTENCE_WORDS or end == len(words):
            sentences.append(" ".join(words[start:end]))
            start = end
    return sentences


def _read_words(words: Sequence[str], start: int, count: int) -> Sequence[str]:
    """Return `count` words from `start`; after the last word comes the first."""
    return [*words[start : start + count], *words[: max(start + count - len(words), 0)]]


def _insert(items: list[str], places: Sequence[int], inserted: Sequence[str]) -> list[str]:
    """Return `items` with each string of `inserted` before the item at its place; places ascend."""
    result = list(items)
    for place, item in reversed(list(zip(places, inserted, strict=True))):
        result.insert(int(place), item)
    return result


def _enumerate(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])}, and {names[-1]}" if len(names) > 1 else names[0]


def _number(words: Sequence[str]) -> str:
    return " ".join(f"{n}. {word}" for n, word in enumerate(words, 1))


def _sample_keys(kind: Literal["words", "uuids"], count: int, rng: np.random.Generator) -> list[str]:
    def sample() -> str:
        return f"{ADJECTIVES[rng.integers(len(ADJECTIVES))]}-{NOUNS[rng.integers(len(NOUNS))]}"

    return _sample_distinct(count, sample if kind == "words" else lambda: _sample_uuid(rng))


def _sample_value(kind: Literal["numbers", "uuids"], rng: np.random.Generator) -> str:
    return str(rng.integers(10**6, 10**7)) if kind == "numbers" else _sample_uuid(rng)


def _sample_uuid(rng: np.random.Generator) -> str:
    return str(uuid.UUID(bytes=rng.bytes(16), version=4))


def _sample_letters(count: int, alphabet: str, rng: np.random.Generator) -> str:
    return "".join(alphabet[index] for index in rng.integers(len(alphabet), size=count))


def _sample_syllables(rng: np.random.Generator) -> str:
    return "".join(_sample_letters(1, letters, rng) for letters in (CONSONANTS, VOWELS) * 3)


def _sample_distinct(count: int, sample: Callable[[], str]) -> list[str]:
    """Return `count` different samples, in the order of their first occurrence."""
    found: dict[str, None] = {}
    while len(found) < count:
        found.setdefault(sample())
    return list(found)
