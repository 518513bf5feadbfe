"""RULER's tasks: small programs solve them, lengths are exact, and the score is recall in generated text."""

from __future__ import annotations

import importlib
import re
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from nsa_lab.config import ModelConfig, NSAConfig, RecallConfig
from nsa_lab.data import DataError
from nsa_lab.data.recall import RetrievalTask
from nsa_lab.evaluate import RULER_TASKS, evaluate_retrieval
from nsa_lab.evaluate.retrieval import _make_sample, explain_misfit
from nsa_lab.evaluate.scoring import score_recall
from nsa_lab.model import NSATransformer
from nsa_lab.runs.evaluation import get_depth_counts

# Held-out text with spaces, line ends and separators.
TEXT = np.random.default_rng(0).choice([*range(0x61, 0x7B), 32, 32, 32, 10, 0xFF], 40_000)
N_REFERENCES = {**dict.fromkeys(RULER_TASKS, 1), "niah_multivalue": 4, "niah_multiquery": 4, "vt": 5, "cwe": 10, "fwe": 3}


def make_sample(task: str, length: int, number: int, depth: float = 0.5, seed: int = 0) -> RetrievalTask:
    return _make_sample(task, length, depth, number, RecallConfig(), seed, TEXT)


def split_prompt(sample: RetrievalTask) -> tuple[str, list[str]]:
    text = bytes(sample.tokens.tolist()).decode("latin-1")
    return text[: sample.answers[0, 0]], ["".join(text[place] for place in answer) for answer in sample.answers]


def solve_needles(prompt: str) -> list[str]:
    keys = re.findall(r"[\w-]+-[\w-]+", prompt[prompt.rindex("? For ") :])
    return [value for key in keys for value in re.findall(rf"A secret \w+ of {key} is ([\w-]+)\.", prompt)]


def solve_variables(prompt: str) -> list[str]:
    value = re.findall(r"have the value (\d+): $", prompt)[0]
    values: dict[str, str] = {}
    values: dict[str, str] = {}
    for name, source in re.findall(r"^VAR (\w+) = (?:VAR )?(\w+)$", prompt, re.MULTILINE):
        values[name] = values.get(str(source), str(source))
    return [name for name, found in values.items() if found == value]


def solve_common_words(prompt: str) -> list[str]:
    entries = prompt.rsplit("than others.\n", 1)[1].split("\n", 1)[0].split()[1::2]
    counts = Counter(entries).most_common()
    assert counts[9][1] > counts[10][1]
    return [word for word, _ in counts[:10]]


def solve_frequent_words(prompt: str) -> list[str]:
    counts = Counter(prompt.rsplit("the dots.\n", 1)[1].split("\n", 1)[0].split()).most_common()
    assert counts[0][0] == "..." and counts[3][1] > counts[4][1]
    return [word for word, _ in counts[1:4]]


SOLVERS: dict[str, Callable[[str], list[str]]] = {
    **dict.fromkeys(RULER_TASKS, solve_needles),
    "vt": solve_variables,
    "cwe": solve_common_words,
    "fwe": solve_frequent_words,
}


def test_small_programs_find_the_answers_and_lengths_are_exact() -> None:
    for task, declared in RULER_TASKS.items():
        for length in (3001, 16_389):
            for number in range(3):
                sample = make_sample(task, length, number, depth=number / 3)
                prompt, references = split_prompt(sample)
                assert len(prompt) + declared.answer_bytes == length
                answer_length = sample.answers[-1, -1] + 1 - len(prompt)
                assert len(sample.tokens) == len(prompt) + answer_length and answer_length <= declared.answer_bytes
                assert len({*references}) == len(references) == N_REFERENCES[task]
                assert sorted(SOLVERS[task](prompt)) == sorted(references), (task, length, number)


def test_samples_are_a_function_of_seed_and_index() -> None:
    for task in RULER_TASKS:
        samples = [make_sample(task, 4096, *place) for place in ((0, 0.5), (0, 0.5), (1, 0.5), (0, 0.4))]
        samples.append(make_sample(task, 4096, 0, seed=1))
        first, same, *others = [tuple(sample.tokens) for sample in samples]
        assert first == same and all(first != other for other in others), task


def test_settings_are_the_published_ones() -> None:
    prompts = {task: split_prompt(make_sample(task, 16_384, 0)) for task in RULER_TASKS}
    needles = {task: re.findall(r"A secret \w+ of (\S+) is (\S+)\.\n", prompt) for task, (prompt, _) in prompts.items()}
    counts = {task: (len(found), len({key for key, _ in found})) for task, found in needles.items()}
    haystacks = {"niah_multikey_2", "niah_multikey_3"}
    assert {task: count for task, count in counts.items() if task not in haystacks and count[0]} == {
        "niah_single_1": (1, 1),
        "niah_single_2": (1, 1),
        "niah_single_3": (1, 1),
        "niah_multikey_1": (4, 4),
        "niah_multivalue": (4, 1),
        "niah_multiquery": (4, 4),
    }
    assert all(counts[task][0] == counts[task][1] > 100 for task in haystacks), "distractors fill the haystack"
    is_uuid = {task: len(references[0]) == 36 for task, (_, references) in prompts.items()}
    assert [task for task, found in is_uuid.items() if found] == ["niah_single_3", "niah_multikey_3"]
    assert len(needles["niah_multikey_3"][0][0]) == 36 and len(needles["niah_multikey_2"][0][0]) < 36
    assert prompts["niah_single_1"][0].count("Rivers run slowly") > 100 and "Rivers" in prompts["vt"][0]
    assert all("Rivers" not in prompts[task][0] for task in RULER_TASKS if task not in ("niah_single_1", "vt"))
    for length, frequencies in ((16_383, {6, 1}), (16_384, {30, 3})):
        prompt, _ = split_prompt(make_sample("cwe", length, 0))
        words = prompt.rsplit("than others.\n", 1)[1].split("\n", 1)[0].split()[1::2]
        assert {*Counter(words).values()} == frequencies and list(Counter(Counter(words).values()).values()).count(10) == 1


def test_the_first_answer_is_at_the_depth_on_a_line_of_its_own() -> None:
    for task, declared in RULER_TASKS.items():
        for depth in (0.0, 0.3, 0.9) if declared.has_depth else ():
            prompt, references = split_prompt(make_sample(task, 20_000, 2, depth))
            line = re.search(rf"^A secret \w+ of \S+ is {references[0]}\.$", prompt, re.MULTILINE)
            assert line and abs(line.start() / len(prompt) - depth) < 0.03, (task, depth)


@pytest.mark.slow
def test_misfit_is_explained_and_does_not_depend_on_the_sample() -> None:
    for task, declared in RULER_TASKS.items():
        reasons = [explain_misfit(task, length, RecallConfig(), TEXT) for length in range(130, 4096, 7)]
        fits = [reason is None for reason in reasons]
        assert fits == sorted(fits) and len({*fits}) == 2 and "use a greater length" in (reasons[0] or ""), task
        first = 130 + 7 * fits.index(True)
        for number in range(20):
            make_sample(task, first, number)
            with pytest.raises(DataError):
                make_sample(task, first - 7, number)
        assert declared.answer_bytes < first
    short_text = explain_misfit("niah_single_2", 4096, RecallConfig(), TEXT[:4095])
    assert "give more text" in (short_text or "")
    assert "keys: expected at most" in (explain_misfit("niah_multikey_2", 1 << 20, RecallConfig(), TEXT) or "")


def make_model() -> NSATransformer:
    nsa = NSAConfig(l=8, d=4, l_sel=8, n_sel=4, w=11)
    config = ModelConfig(dim=16, n_layers=1, n_heads=2, n_kv_groups=1, d_k=8, d_v=8, nsa=nsa)
    return NSATransformer(config, seed=1).eval()


@pytest.mark.slow
def test_an_oracle_scores_100_and_random_answers_score_0(monkeypatch: pytest.MonkeyPatch) -> None:
    scoring, model = importlib.import_module("nsa_lab.evaluate.scoring"), make_model()
    rng, solve = np.random.default_rng(0), solve_needles

    def answer(model: NSATransformer, prompts: list[Tensor], *, max_new_tokens: int) -> list[Tensor]:
        answers = [", ".join(solve(bytes(prompt.tolist()).decode("latin-1"))).upper() for prompt in prompts]
        return [torch.tensor(list(text.encode("latin-1")[:max_new_tokens])) for text in answers]

    def guess(model: NSATransformer, prompts: list[Tensor], *, max_new_tokens: int) -> list[Tensor]:
        return [torch.from_numpy(rng.integers(32, 127, max_new_tokens)) for _ in prompts]

    options = {"depths": (0.0, 0.5), "per_depth": 2, "generated_per_depth": 0}
    for task, declared in RULER_TASKS.items():
        solve, n_answers = SOLVERS[task], 2 * N_REFERENCES[task]
        for generate, n_right in ((answer, n_answers), (guess, 0)):
            monkeypatch.setattr(scoring, "generate", generate)
            for cell in evaluate_retrieval(model, TEXT, [3000], tasks=[task], **options):
                assert (cell.right, cell.answers, cell.written_right, cell.written) == (n_right, n_answers) * 2, task
                assert cell.sequences == 2 and cell.tokens >= n_answers and cell.loss > 0
                n_first = 2 * (n_right > 0) if declared.has_depth else None
                assert cell.right_at_depth == n_first
                assert get_depth_counts(vars(cell)) == (None if n_first is None else (n_first, 2))


def test_only_the_first_answer_counts_at_the_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer_one(place: int) -> Callable[..., list[Tensor]]:
        def answer(model: NSATransformer, prompts: list[Tensor], *, max_new_tokens: int) -> list[Tensor]:
            answers = [solve_needles(bytes(prompt.tolist()).decode("latin-1"))[place] for prompt in prompts]
            return [torch.tensor(list(text.encode())) for text in answers]

        return answer

    for place, n_first in ((0, 3), (3, 0)):
        monkeypatch.setattr(importlib.import_module("nsa_lab.evaluate.scoring"), "generate", answer_one(place))
        options = {"tasks": ["niah_multiquery"], "depths": (0.5,), "per_depth": 3}
        (cell,) = evaluate_retrieval(make_model(), TEXT, [1200], **options)
        assert (cell.right, cell.answers, cell.right_at_depth) == (3, 12, n_first)


def test_recall_is_the_share_of_references_in_the_generated_text(monkeypatch: pytest.MonkeyPatch) -> None:
    sample = make_sample("fwe", 3000, 0)
    _, words = split_prompt(sample)
    prompts_seen: list[Tensor] = []

    def answer(model: NSATransformer, prompts: list[Tensor], *, max_new_tokens: int) -> list[Tensor]:
        prompts_seen.extend(prompts)
        assert max_new_tokens == 50
        return [torch.tensor(list(f"{words[2]}{words[0].upper()}x".encode()))] * len(prompts)

    monkeypatch.setattr(importlib.import_module("nsa_lab.evaluate.scoring"), "generate", answer)
    assert score_recall(make_model(), [sample], 50).tolist() == [[True, False, True]]
    assert prompts_seen[0].tolist() == sample.tokens[: sample.answers[0, 0]].tolist()


def test_a_model_generates_the_answers() -> None:
    (cell,) = evaluate_retrieval(make_model(), TEXT, [700], tasks=["niah_single_1"], depths=(0.5,), per_depth=2)
    assert (cell.right, cell.answers, cell.tokens, cell.length) == (0, 2, 14, 700)
