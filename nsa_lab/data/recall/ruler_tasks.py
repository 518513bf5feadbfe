"""Sequences of RULER's tasks (Hsieh et al. 2024, arXiv 2404.06654) that need no download. All texts are bytes.

The structure is the published one: kinds and numbers of keys, values, questions and haystacks, hops, frequencies, and a
worked example before `vt` and `cwe`. These differ, because nothing is downloaded and tokens are bytes:
* Instructions and noise are in this project's words. Essays are the caller's held-out text.
* Keys of words have two adjectives and a noun. The words of `cwe` are made up, of six letters.
* A length is in tokens of the model: bytes. `cwe` has the frequencies of short sequences below 16,384 bytes (4,096 tokens
  of four bytes). A model may generate at least the bytes of the answer.

A prompt has the requested length less the bytes that may be generated. The answers follow it. Bytes that no list fills are
newlines at the start. Whether a task fits does not depend on the sample.
"""

from __future__ import annotations

import itertools
import math
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from nsa_lab.config import RecallConfig
from nsa_lab.data.errors import DataError
from nsa_lab.data.recall.facts import ADJECTIVES, LETTERS, NOUNS
from nsa_lab.data.recall.needle_insertion import Insertion, insert_texts
from nsa_lab.data.recall.retrieval_tasks import RetrievalTask

NOISE = b"Rivers run slowly. Hills are far away. Nothing else happens here. Walk on, then turn around.\n"
N_WORD_KEYS = len(ADJECTIVES) * (len(ADJECTIVES) - 1) * len(NOUNS)
WORD_KEY_LENGTHS = tuple(2 * bound(map(len, ADJECTIVES)) + bound(map(len, NOUNS)) + 2 for bound in (min, max))
CONSONANTS, VOWELS = "bcdfghjklmnpqrstvwxz", "aeiou"
LONG_CWE_BYTES = 16_384
N_COMMON, N_FREQUENT, N_VARIABLES = 10, 3, 5
# Sum of all 1 / k ** 2: the frequencies of `fwe` are a zeta distribution with exponent 2.
ZETA_2 = math.pi**2 / 6


class Request(NamedTuple):
    """Bytes of the whole sequence and of its prompt, depth of the first needle, source of randomness, held-out text."""

    length: int
    n_prompt: int
    depth: float
    rng: np.random.Generator
    text: np.ndarray


@dataclass(frozen=True)
class RulerTask:
    """A task: `make` builds a sample; up to `answer_bytes` bytes may be generated.

    `has_depth`: the needle of the first answer is at the given depth. Call a task as `make_needle_task`. The configuration
    of facts has no effect. Raises `DataError` if the task does not fit.
    """

    make: Callable[[Request], RetrievalTask]
    answer_bytes: int
    has_depth: bool

    def __call__(
        self, length: int, depth: float, recall: RecallConfig, rng: np.random.Generator, text: np.ndarray
    ) -> RetrievalTask:
        """Return a sample whose prompt has `length` - `answer_bytes` bytes. text: int64, at least `length` bytes."""
        return self.make(Request(length, length - self.answer_bytes, depth, rng, text))


def _declare_needles(
    haystack: Literal["noise", "text", "needles"],
    keys: Literal["words", "uuids"] = "words",
    values: Literal["numbers", "uuids"] = "numbers",
    *,
    n_keys: int = 1,
    n_values: int = 1,
    n_queries: int = 1,
) -> RulerTask:
    """Return the task of `n_keys` needles with `n_values` values each in a haystack; `n_queries` keys are queried."""
    n_needles, n_references = n_keys * n_values, n_queries * n_values
    kind = {"numbers": "number", "uuids": "code"}[values]
    key_lengths = WORD_KEY_LENGTHS if keys == "words" else (36, 36)

    def state(key: str, value: str) -> bytes:
        return f"A secret {kind} of {key} is {value}.\n".encode()

    def ask(queried: Sequence[str]) -> bytes:
        listed = f"{', '.join(queried[:-1])}, and {queried[-1]}" if len(queried) > 1 else queried[0]
        kinds = f"{kind}s" if n_references > 1 else kind
        return f"\nWhich secret {kinds} does the text give for {listed}? For {listed}, it gives the {kinds} ".encode()

    def make(request: Request) -> RetrievalTask:
        length, n_prompt, depth, rng, text = request
        intro = f"Secret {kind}s are hidden in this text. Remember them for the question at the end.\n".encode()
        shortest, longest = (len(state("x" * n_chars, "x" * (7 if values == "numbers" else 36))) for n_chars in key_lengths)
        needed = len(intro) + n_needles * (1 + longest) + len(ask(["x" * key_lengths[1]] * n_queries))
        if needed > n_prompt:
            raise _make_misfit(needed + length - n_prompt, length)
        if haystack == "text" and len(text) < length:
            raise DataError(
                f"the text has {len(text)} bytes, {length} are required; give more text or use a smaller length"
            )
        n_distractors = n_prompt // shortest + 1 if haystack == "needles" else 0
        if keys == "words" and n_keys + n_distractors > N_WORD_KEYS // 2:
            raise DataError(f"{n_keys + n_distractors} keys: expected at most {N_WORD_KEYS // 2}; use a smaller length")
        all_keys = _sample_distinct(n_keys + n_distractors, _sample_words if keys == "words" else _sample_uuid, rng)
        all_values = _sample_distinct(
            n_needles + n_distractors, _sample_number if values == "numbers" else _sample_uuid, rng
        )
        # A needle starts a line. Only held-out text needs a line end before it.
        line_end = b"\n" if haystack == "text" else b""
        needles = [line_end + state(all_keys[index // n_values], all_values[index]) for index in range(n_needles)]
        question = ask(all_keys[:n_queries])
        n_text = n_prompt - len(intro) - len(question) - sum(map(len, needles))
        if haystack == "text":
            start = int(rng.integers(len(text) - n_text + 1))
            hay = text[start : start + n_text]
        elif haystack == "noise":
            hay = _fill(itertools.repeat(NOISE), n_text)
        else:
            hay = _fill(map(state, all_keys[n_keys:], all_values[n_needles:]), n_text)
        body = _insert(hay, [depth, *rng.random(n_needles - 1)], needles, b" \n" if haystack == "text" else b"\n")
        return _build_task(n_prompt, intro + body + question, all_values[:n_references], ", ")

    return RulerTask(make, answer_bytes=128, has_depth=True)


def _make_variables(request: Request) -> RetrievalTask:
    """Return a chain of variables in noise, each assigned to the next; all of them are the answer."""
    length, n_prompt, _, rng, _ = request
    intro = b"Follow the variables that are assigned in this text.\n"
    example_names, names = (
        _sample_distinct(N_VARIABLES, lambda rng, n=n: _sample_letters(n, LETTERS.upper(), rng), rng) for n in (3, 5)
    )
    value = str(10_000 + rng.integers(90_000))
    example_text = _insert_chain(_fill([NOISE] * 5, 5 * len(NOISE)), example_names, "12345", rng)
    shown = intro + example_text + _ask_variables("12345") + " ".join(example_names).encode() + b"\n\n"
    ends = shown + intro, _ask_variables(value)
    n_text = n_prompt - sum(map(len, (*ends, *_state_chain(names, value))))
    if n_text < 0:
        raise _make_misfit(length - n_text, length)
    body = _insert_chain(_fill(itertools.repeat(NOISE), n_text), names, value, rng)
    return _build_task(n_prompt, ends[0] + body + ends[1], names, " ")


def _make_common_words(request: Request) -> RetrievalTask:
    """Return a numbered list in which ten words, the answer, occur more often than all others."""
    length, n_prompt, _, rng, _ = request
    intro = b"This is a numbered list of words. Some words occur more often than others.\n"
    question = b"\nWhich 10 words occur most often? The 10 most common words of the list are: "
    is_long = length >= LONG_CWE_BYTES
    n_example_words, example_counts, counts = (40, (10, 3), (30, 3)) if is_long else (20, (3, 1), (6, 1))
    example_words = _sample_distinct(n_example_words, _sample_syllables, rng)
    shown = intro + _list_words(example_words, *example_counts, rng) + question
    shown += _number(example_words[:N_COMMON]) + b"\n\n"
    n_list = n_prompt - len(shown + intro + question + b"1. ")
    # Bytes of a list of 1, 2, ... entries: each has a number, a period, a space, six letters and a space, except the last.
    n_bytes = np.cumsum([len(str(n)) + 9 for n in range(1, max(n_list, 0) // 9 + 2)]) - 1
    n_others = (int(np.searchsorted(n_bytes, n_list, side="right")) - N_COMMON * counts[0]) // counts[1]
    if n_others < N_COMMON:
        raise DataError(
            f"{N_COMMON} words {counts[0]} times and {N_COMMON} words {counts[1]} times do not fit into {length} bytes; "
            "use a greater length"
        )
    words = _sample_distinct(N_COMMON + n_others, _sample_syllables, rng)
    prompt = shown + intro + _list_words(words, *counts, rng) + question + b"1. "
    return _build_task(n_prompt, prompt, words[:N_COMMON], *(f" {n}. " for n in range(2, N_COMMON + 1)))


def _make_frequent_words(request: Request) -> RetrievalTask:
    """Return coded words whose counts fall with the square of their rank: rank 1 is dots, ranks 2 to 4 are the answer."""
    length, n_prompt, _, rng, _ = request
    intro = b"Count the coded words of this text. Ignore the dots.\n"
    question = b"\nWhich three coded words occur most often? The three most frequent coded words are "
    counts = _count_coded_words(n_prompt - len(intro + question), n_prompt // 50)
    if len(counts) < N_FREQUENT + 2 or counts[N_FREQUENT] == counts[N_FREQUENT + 1]:
        raise DataError(f"coded words of ranks 4 and 5 are equally frequent in {length} bytes; use a greater length")
    words = ["...", *_sample_distinct(len(counts) - 1, lambda rng: _sample_letters(6, LETTERS, rng), rng)]
    body = " ".join(words[rank] for rank in rng.permutation(np.repeat(np.arange(len(words)), counts)))
    return _build_task(n_prompt, intro + body.encode() + question, words[1 : N_FREQUENT + 1], ", ")


# Names and settings as published. The order is part of the seed of every sample.
RULER_TASKS: dict[str, RulerTask] = {
    "niah_single_1": _declare_needles("noise"),
    "niah_single_2": _declare_needles("text"),
    "niah_single_3": _declare_needles("text", values="uuids"),
    "niah_multikey_1": _declare_needles("text", n_keys=4),
    "niah_multikey_2": _declare_needles("needles"),
    "niah_multikey_3": _declare_needles("needles", "uuids", "uuids"),
    "niah_multivalue": _declare_needles("text", n_values=4),
    "niah_multiquery": _declare_needles("text", n_keys=4, n_queries=4),
    "vt": RulerTask(_make_variables, answer_bytes=60, has_depth=False),
    "cwe": RulerTask(_make_common_words, answer_bytes=120, has_depth=False),
    "fwe": RulerTask(_make_frequent_words, answer_bytes=50, has_depth=False),
}


def _build_task(n_prompt: int, prompt: bytes, references: list[str], *separators: str) -> RetrievalTask:
    """Return newlines up to `n_prompt` bytes, the prompt, and the references, which have equal lengths."""
    width, n_references = len(references[0]), len(references)
    repeated = list(separators) * (n_references - 1 if len(separators) == 1 else 1)
    answer = references[0] + "".join(
        between + reference for between, reference in zip(repeated, references[1:], strict=True)
    )
    starts = n_prompt + np.cumsum([0, *(len(between) + width for between in repeated)])
    tokens = np.frombuffer(prompt.rjust(n_prompt, b"\n") + answer.encode(), np.uint8).astype(np.int64)
    return RetrievalTask(tokens, starts[:, None] + np.arange(width))


def _make_misfit(needed: int, length: int) -> DataError:
    return DataError(f"the task takes up to {needed} bytes and does not fit into {length}; use a greater length")


def _fill(lines: Iterable[bytes], n_bytes: int) -> np.ndarray:
    """Return the first `n_bytes` bytes of the lines, int64."""
    taken, total = [], 0
    for line in lines:
        if total >= n_bytes:
            break
        taken.append(line)
        total += len(line)
    return np.frombuffer(b"".join(taken)[:n_bytes], np.uint8).astype(np.int64)


def _insert(hay: np.ndarray, depths: Sequence[float], lines: Sequence[bytes], breaks: bytes) -> bytes:
    """Insert each line at its depth, after the last of the bytes `breaks` before it, or at the start."""
    places = np.concatenate([[0], np.flatnonzero(np.isin(hay, list(breaks))) + 1])
    cuts = [int(places[np.searchsorted(places, depth * len(hay), side="right") - 1]) for depth in depths]
    window = np.concatenate([hay, np.zeros(sum(map(len, lines)), np.int64)])
    # insert_texts rounds depth * length down.
    insertions = [Insertion((cut + 0.5) / max(len(hay), 1), line) for cut, line in zip(cuts, lines, strict=True)]
    return bytes(insert_texts(window, insertions, 1.0)[0].tolist())


def _state_chain(names: Sequence[str], value: str) -> list[bytes]:
    sources = [value, *(f"VAR {name}" for name in names)]
    return [f"VAR {name} = {source}\n".encode() for name, source in zip(names, sources, strict=False)]


def _insert_chain(hay: np.ndarray, names: Sequence[str], value: str, rng: np.random.Generator) -> bytes:
    return _insert(hay, np.sort(rng.random(len(names))).tolist(), _state_chain(names, value), b"\n")


def _ask_variables(value: str) -> bytes:
    return f"\nWhich variables have the value {value}? These {N_VARIABLES} variables have the value {value}: ".encode()


def _list_words(words: Sequence[str], n_common: int, n_other: int, rng: np.random.Generator) -> bytes:
    """Return a numbered list: the first ten words `n_common` times each, the others `n_other` times, shuffled."""
    entries = [*words[:N_COMMON]] * n_common + [*words[N_COMMON:]] * n_other
    return _number([entries[index] for index in rng.permutation(len(entries))])


def _number(words: Sequence[str]) -> bytes:
    return " ".join(f"{n}. {word}" for n, word in enumerate(words, 1)).encode()


def _count_coded_words(n_bytes: int, n_words: int) -> np.ndarray:
    """Return the counts by rank, int64, of the longest text of up to `n_words` words that fits in `n_bytes`."""
    shares = np.arange(1, n_words + 1) ** -2.0 / ZETA_2
    low, high = 0, max(n_bytes, 0)
    while low < high:
        middle = (low + high + 1) // 2
        counts = (middle * shares).astype(np.int64)
        # Dots and a space are four bytes, other words and a space seven.
        fits = 7 * counts.sum() - 3 * counts[:1].sum() - 1 <= n_bytes
        low, high = (middle, high) if fits else (low, middle - 1)
    counts = (low * shares).astype(np.int64)
    return counts[counts > 0]


def _sample_distinct(count: int, sample: Callable[[np.random.Generator], str], rng: np.random.Generator) -> list[str]:
    """Return `count` different samples, in the order of their first occurrence."""
    found: dict[str, None] = {}
    while len(found) < count:
        found.setdefault(sample(rng))
    return list(found)


def _sample_words(rng: np.random.Generator) -> str:
    first, step, noun = rng.integers((len(ADJECTIVES), len(ADJECTIVES) - 1, len(NOUNS)))
    return f"{ADJECTIVES[first]}-{ADJECTIVES[(first + 1 + step) % len(ADJECTIVES)]}-{NOUNS[noun]}"


def _sample_number(rng: np.random.Generator) -> str:
    return str(rng.integers(10**6, 10**7))


def _sample_uuid(rng: np.random.Generator) -> str:
    return str(uuid.UUID(bytes=rng.bytes(16), version=4))


def _sample_letters(count: int, alphabet: str, rng: np.random.Generator) -> str:
    return "".join(alphabet[place] for place in rng.integers(len(alphabet), size=count))


def _sample_syllables(rng: np.random.Generator) -> str:
    return "".join(_sample_letters(1, letters, rng) for letters in (CONSONANTS, VOWELS) * 3)
