"""RULER's tasks: small programs solve them, prompts are as long as fits, and the score is the published one."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_tokenizer import save_tokenizer
from torch import Tensor

from nsa_lab.config import ConfigError, ModelConfig, NSAConfig
from nsa_lab.data import ByteTokenizer, DataError, TokenStore, load_tokenizer
from nsa_lab.evaluate import RULER_TASKS, evaluate_ruler, ruler, ruler_tasks
from nsa_lab.evaluate.ruler_tasks import Question, count_matches, find_most_units, make_questions, split_sentences
from nsa_lab.evaluate.ruler_words import ADJECTIVES, NOUNS, WORDS
from nsa_lab.model import NSATransformer
from nsa_lab.runs.evaluation import compute_wilson_interval

RNG = np.random.default_rng(0)
DOCUMENT_WORDS = ["".join(RNG.choice(list("abcdefgh"), 5)) + "." * (n % 9 == 8) for n in range(40_000)]
NIAH = {task for task in RULER_TASKS if task.startswith("niah")}
ESSAYS = {task for task, declared in RULER_TASKS.items() if declared.has_documents}
N_REFERENCES = {**dict.fromkeys(RULER_TASKS, 1), "niah_multivalue": 4, "niah_multiquery": 4, "vt": 5, "cwe": 10, "fwe": 3}


def count_bytes(text: str) -> int:
    return len(text.encode())


def count_pieces(text: str) -> int:
    """Count tokens as a coarse tokenizer: words, digits in groups of three, and signs."""
    return len(re.findall(r"[a-zA-Z]+|\d{1,3}|[^\w\s]", text))


def ask(
    task: str, length: int, count: int = 1, count_tokens: Callable[[str], int] = count_pieces, seed: int = 0
) -> list[Question]:
    return list(make_questions(task, length, count, count_tokens, DOCUMENT_WORDS, seed))


def find_needles(prompt: str) -> list[tuple[str, str]]:
    return re.findall(r"One of the special magic (?:numbers|uuids) for (\S+) is: (\S+)\.", prompt)


def solve_needles(prompt: str) -> list[str]:
    """Return the values of the queried keys, in the order of the query."""
    (query,) = re.findall(r" for ([^.?]+) mentioned in the provided text (?:is|are)$", prompt)
    keys = re.split(r", and |, ", query)
    return [value for key in keys for own, value in find_needles(prompt) if own == key]


def split_example(prompt: str, start: str) -> tuple[str, str]:
    """Return the worked example and the question."""
    assert prompt.startswith(start) and prompt.count(start) == 2
    cut = prompt.index(start, 1)
    return prompt[:cut], prompt[cut:]


def find_chain(text: str) -> tuple[list[str], list[str], list[str]]:
    """Return names, sources, and the answer that follows the text."""
    lines = re.findall(r"^VAR (\w+) = ((?:VAR )?\w+)( ?)$", text, re.MULTILINE)
    assert [space for *_, space in lines] == ["", " ", " ", " ", " "], "as published"
    return [line[0] for line in lines], [line[1].removeprefix("VAR ") for line in lines], text.rsplit(": ", 1)[1].split()


def solve_variables(prompt: str) -> list[str]:
    _, text = split_example(prompt, "Memorize and track")
    names, sources, _ = find_chain(text)
    (value,) = re.findall(r"5 variables are assigned the value (\d+), they are: $", text)
    assert sources == [value, *names[:-1]], "a chain of four hops, in order"
    return names


def list_entries(text: str) -> list[str]:
    (body,) = re.findall(r"appear most often\.\n(.*)\nQuestion", text)
    numbers, words = zip(*re.findall(r"(\d+)\. (\S+)", body), strict=True)
    assert [int(number) for number in numbers] == list(range(1, len(words) + 1))
    return list(words)


def solve_common_words(prompt: str) -> list[str]:
    _, text = split_example(prompt, "Below is a numbered list of words.")
    return [word for word, _ in Counter(list_entries(text)).most_common(10)]


def count_coded_words(prompt: str) -> list[tuple[str, int]]:
    (body,) = re.findall(r"coded words\. (.*)\nQuestion", prompt)
    return Counter(body.split(" ")).most_common()


def solve_frequent_words(prompt: str) -> list[str]:
    counts = count_coded_words(prompt)
    assert counts[0][0] == "..." and counts[3][1] > counts[4][1], "ignore the dots; the third word is unique"
    return [word for word, _ in counts[1:4]]


SOLVERS: dict[str, Callable[[str], list[str]]] = {
    **dict.fromkeys(NIAH, solve_needles),
    "vt": solve_variables,
    "cwe": solve_common_words,
    "fwe": solve_frequent_words,
}


@pytest.mark.parametrize("count_tokens", [count_bytes, count_pieces])
def test_small_programs_find_the_answers_and_prompts_are_as_long_as_fits(count_tokens: Callable[[str], int]) -> None:
    for task, declared in RULER_TASKS.items():
        for length in (3001, 16_389):
            for question in ask(task, length, 3, count_tokens):
                n_tokens = count_tokens(question.prompt) + declared.tokens_to_generate
                # A unit of haystack has up to 121 bytes (UUIDs). Counts of `fwe` rise by several words at once.
                assert length - 125 < n_tokens <= length, (task, length, n_tokens)
                assert len({*question.references}) == len(question.references) == N_REFERENCES[task]
                assert sorted(SOLVERS[task](question.prompt)) == sorted(question.references), (task, length)
                assert task not in ("niah_multiquery", "vt", "fwe") or SOLVERS[task](question.prompt) == question.references


def test_sentences_are_the_published_ones() -> None:
    """Digests of template + answer_prefix in scripts/data/synthetic/constants.py of github.com/NVIDIA/RULER."""
    published = {
        ruler_tasks.NIAH.replace("{kind}", "{type_needle_v}"): "d285336585494ddc",
        ruler_tasks.VT.replace("{count}", "{num_v}"): "2cb3a86e01be9650",
        ruler_tasks.CWE: "c2426f94a28fc3a2",
        ruler_tasks.FWE: "0bfad42dcc7b1cff",
    }
    assert {text: hashlib.sha256(text.encode()).hexdigest()[:16] for text in published} == published
    singular = ruler_tasks.NIAH
    for plural, single in (("Some", "A"), ("are all", "is"), ("are", "is")):
        singular = singular.replace(plural, single)
    assert singular == ruler_tasks.NIAH_SINGLE
    tokens = {task: declared.tokens_to_generate for task, declared in RULER_TASKS.items()}
    assert tokens == {**dict.fromkeys(NIAH, 128), "vt": 30, "cwe": 120, "fwe": 50}


def test_needles_are_the_published_ones() -> None:
    prompts = {task: ask(task, 8001)[0].prompt for task in NIAH}
    counts = {
        task: (len(found), len({key for key, _ in found}))
        for task in NIAH
        if (found := find_needles(prompts[task])) and task not in ("niah_multikey_2", "niah_multikey_3")
    }
    single = dict.fromkeys(("niah_single_1", "niah_single_2", "niah_single_3"), (1, 1))
    four = {"niah_multikey_1": (4, 4), "niah_multiquery": (4, 4), "niah_multivalue": (4, 1)}
    assert counts == single | four
    for task, is_uuid in (("niah_multikey_2", False), ("niah_multikey_3", True)):
        lines = prompts[task].split("\n")[1:-1]
        found = find_needles(prompts[task])
        assert len(found) == len(lines) == len({key for key, _ in found}) > 100, "needles are the haystack"
        assert all((len(key) == 36) == is_uuid for key, _ in found)
    uuids = {"niah_single_3", "niah_multikey_3"}
    for task, prompt in prompts.items():
        kind = "uuid" if task in uuids else "number"
        is_plural = task in ("niah_multivalue", "niah_multiquery")
        start = f"Some special magic {kind}s are hidden" if is_plural else f"A special magic {kind} is hidden"
        assert prompt.startswith(start) and prompt.count(f"special magic {kind}s for") >= 1
        for key, value in find_needles(prompt)[:20]:
            assert re.fullmatch(r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f-]{21}" if task in uuids else r"[1-9]\d{6}", value)
            adjective, _, noun = key.partition("-")
            assert task == "niah_multikey_3" or (adjective in ADJECTIVES and noun in NOUNS)
    noise = prompts["niah_single_1"].split("\n")[1:-1]
    assert {*noise} - {ruler_tasks.NOISE} == {line for line in noise if "magic" in line} and len(noise) > 100


def test_haystacks_are_documents_with_needles_between_sentences() -> None:
    """The context without needles is a part of the documents, which begin again at their end."""
    text, starts = " ".join(DOCUMENT_WORDS * 2), set()
    for task in ESSAYS:
        depths = set()
        for question in ask(task, 6001, 8):
            context = question.prompt.split("\n")[1]
            parts = re.split(r"\s*One of the special magic \w+ for \S+ is: \S+\.\s*", context)
            hay = " ".join(part for part in parts if part)
            assert hay in text
            starts.add(text.index(hay))
            assert all(part.endswith(".") for part, after in pairwise(parts) if part and after), "not inside a sentence"
            depths |= {round(len(part) / len(hay), 1) for part in parts[:-1]}
        assert len(depths) > 4, "needles at different depths"
    assert len(starts) > 4 * len(ESSAYS)
    assert split_sentences(["a", "b.", "c!", "d", "e?", "f"]) == ["a b.", "c!", "d e?", "f"]
    assert [len(sentence.split()) for sentence in split_sentences(["x"] * 100)] == [40, 40, 20]


def test_the_example_of_variables_is_an_own_chain() -> None:
    for question in ask("vt", 4001, 5):
        example, text = split_example(question.prompt, "Memorize and track")
        names, sources, answer = find_chain(example)
        assert names == answer and sources[1:] == names[:-1] and {len(name) for name in names} == {3}
        assert f"value {sources[0]}, they are:  {' '.join(names)}\n\n" in example, "two spaces, as published"
        assert count_pieces(example.rsplit(":", 1)[0]) <= 500 < count_pieces(example) + count_pieces(ruler_tasks.NOISE)
        own, values, _ = find_chain(text)
        assert {len(name) for name in own} == {5} and values[0] != sources[0]
        assert 10_000 <= int(values[0]) <= 99_998


def test_repetitions_of_common_words() -> None:
    for length, example_counts, counts in ((4095, (3, 1), (6, 1)), (4096, (10, 3), (30, 3))):
        example, text = split_example(ask("cwe", length)[0].prompt, "Below is a numbered list of words.")
        repeats = Counter(Counter(list_entries(example)).values())
        assert repeats == {example_counts[0]: 10, example_counts[1]: 10 if length < 4096 else 30}
        repeats = Counter(Counter(list_entries(text)).values())
        assert repeats[counts[0]] == 10 and {*repeats} == {*counts} and {*list_entries(text)} <= {*WORDS}
        answer = re.findall(r"\d+\. (\w+)", example.rsplit("list are: ", 1)[1])
        assert [word for word, _ in Counter(list_entries(example)).most_common(10)] != [] and len(answer) == 10
        assert {word for word, n in Counter(list_entries(example)).items() if n == example_counts[0]} == {*answer}
    long = list_entries(split_example(ask("cwe", 65_537)[0].prompt, "Below")[1])
    assert len({*long}) > len(WORDS) and not {*long} & {*WORDS}, "a longer list has made-up words"
    assert max(map(len, WORDS)) == 7 and len(WORDS) > 2900


def test_counts_of_coded_words_are_a_zeta_distribution() -> None:
    prompt = ask("fwe", 8001)[0].prompt
    counts = np.array([n for _, n in count_coded_words(prompt)])
    n_words = counts[0] / (6 / np.pi**2)
    expected = n_words * 6 / np.pi**2 / np.arange(1, len(counts) + 1) ** 2.0
    assert np.all(np.abs(counts - np.floor(expected)) <= 1) and counts[0] > 100
    assert len(counts) <= (8001 - 50) // 50
    assert all(re.fullmatch(r"[a-z]{6}", word) for word, _ in count_coded_words(prompt)[1:])


def test_questions_are_a_function_of_seed_and_number() -> None:
    for task in RULER_TASKS:
        first, second = ask(task, 4001, 2)
        assert first != second and ask(task, 4001, 1) == [first] and ask(task, 4001, 1, seed=1) != [first]
        assert ask(task, 4001, 3)[:2] == [first, second]


def test_misfits_are_explained() -> None:
    for task, declared in RULER_TASKS.items():
        for length in (0, declared.tokens_to_generate, 200):
            with pytest.raises(
                DataError, match=f"{task} needs [0-9,]+ tokens and does not fit into {length}; use a greater"
            ):
                ask(task, length, count_tokens=count_bytes)
    for words in ([], ["one"], DOCUMENT_WORDS[:300]):
        with pytest.raises(DataError, match=r"give (more )?text"):
            list(make_questions("niah_multikey_1", 4096, 1, count_pieces, words))
    with pytest.raises(ConfigError, match="task = niah: unknown task of RULER; available: niah_single_1, "):
        list(evaluate_ruler(make_model(), ByteTokenizer(), ["a"], [999], tasks=["niah"]))


def test_search_for_the_longest_haystack() -> None:
    for overhead, per_unit in ((0, 1.0), (900, 7.3), (40, 0.2), (3, 250.0)):
        for budget in (0, 899, 5000, 123_457):
            for guess in (1, 5, 700, 10**6):
                calls: list[int] = []

                def count(n: int, overhead: int = overhead, per_unit: float = per_unit, calls: list[int] = calls) -> int:
                    calls.append(n)
                    return overhead + int(per_unit * n) + n % 3 // 2

                found = find_most_units(count, budget, 5, 40_000, guess)
                assert len(calls) <= 30 and max(calls, default=0) <= 40_000
                assert found == 4 or count(found) <= budget
                assert found == 40_000 or count(found + 1) > budget


def test_score_is_string_match_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mean over questions of the share of references in the text, without regard to case and order, times 100."""
    assert count_matches("x CAR, aBc", ["car", "ABC", "dog"]) == 2
    replies = iter(["all", "none", "first", "last"])

    def reply(model: Any, prompts: Sequence[Tensor], *, max_new_tokens: int, stop: int) -> list[Tensor]:
        assert max_new_tokens == 50 and stop == 0xFF
        texts = []
        for prompt, choice in zip(prompts, replies, strict=True):
            words = solve_frequent_words(bytes(prompt.tolist()).decode())
            chosen = {"all": words[::-1], "none": [], "first": words[:1], "last": words[2:]}[choice]
            texts.append(torch.tensor([*" and ".join(chosen).upper().encode(), 0xFF]))
        return texts

    monkeypatch.setattr(ruler, "generate", reply)
    (result,) = evaluate_ruler(make_model(), ByteTokenizer(), ["a"], [2001], tasks=["fwe"], questions=4)
    assert (result.found, result.references, result.questions) == ([3, 0, 1, 1], 3, 4)
    assert result.score == round(100 * 5 / 12, 2) and 1900 < result.prompt_tokens <= 1951
    low, high = compute_wilson_interval(4 * 5 / 12, 4)
    assert (result.low, result.high) == (round(100 * low, 2), round(100 * high, 2)) and 0 < low < 5 / 12 < high < 1


def make_model(vocab_size: int = 256) -> NSATransformer:
    nsa = NSAConfig(l=8, d=4, l_sel=8, n_sel=4, w=11)
    config = ModelConfig(dim=16, n_layers=1, n_heads=2, n_kv_groups=1, d_k=8, d_v=8, vocab_size=vocab_size, nsa=nsa)
    return NSATransformer(config, seed=1).eval()


@pytest.mark.slow
def test_own_tokenizers_and_padded_vocabularies(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(save_tokenizer(tmp_path)))
    for own, n_ids in ((ByteTokenizer(), 256), (tokenizer, 300), (tokenizer, 320)):
        (result,) = evaluate_ruler(make_model(n_ids), own, ["a"], [777], tasks=["niah_single_1"], questions=3)
        assert result.found == [0, 0, 0] and result.prompt_tokens <= 777 - 128


@pytest.mark.slow
def test_models_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dense and converted, with padding: a prompt has the same continuation in a batch and alone."""
    transformers = pytest.importorskip("transformers")
    from nsa_lab.convert import sparsify

    file = str(save_tokenizer(tmp_path))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=file, eos_token="<|endoftext|>")
    config = transformers.LlamaConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        initializer_range=0.3,
        eos_token_id=None,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    dense = transformers.LlamaForCausalLM(config).eval()
    for model in (dense, sparsify(dense, NSAConfig(l=16, d=16, l_sel=16, n_sel=8, local_blocks=3))):
        text_model = ruler._TransformersModel(model, tokenizer)
        prompts = [text_model.encode(question.prompt) for question in ask("niah_multikey_1", 500, 3)]
        assert len({*map(len, prompts)}) > 1
        together = text_model.complete(prompts, 7)
        assert together == [text_model.complete([prompt], 7)[0] for prompt in prompts] and len({*together}) > 1
        monkeypatch.setattr(ruler, "MAX_BATCH_TOKENS", 2 * max(map(len, prompts)))
        assert text_model.complete(prompts, 7) == together, "in batches of one"
        monkeypatch.undo()
        options: dict[str, Any] = {"tasks": ["fwe"], "questions": 2}
        (result,) = evaluate_ruler(model, tokenizer, [], [777], **options)
        (own,) = evaluate_ruler(make_model(300), load_tokenizer(file), [], [777], **options)
        assert result.prompt_tokens == own.prompt_tokens <= 727 and result.found == [0, 0]


def test_documents_of_held_out_text() -> None:
    tokens = np.frombuffer("eins zwei\xff".encode("latin-1") + "drei\xff".encode("latin-1") + b"vier\xff", np.uint8)
    store = TokenStore([tokens])
    assert ruler.read_documents(store, ByteTokenizer(), 1000) == ["eins zwei", "drei", "vier", ""]
    assert ruler.read_documents(store, ByteTokenizer(), 17) == ["eins zwei", "drei", "vi"]
    assert ruler_tasks.split_words(["a  b\n c", "", "d"]) == ["a", "b", "c", "d"]
    for first, second in pairwise(WORDS):
        assert first < second
