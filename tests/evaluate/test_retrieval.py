"""Retrieval: scoring of answers, samples that are equal for all models, and loss by position."""

from __future__ import annotations

import importlib
import itertools
import re
from collections.abc import Sequence
from dataclasses import asdict

import numpy as np
import pytest
import torch
from torch import Tensor

from nsa_lab.config import ModelConfig, NSAConfig, RecallConfig
from nsa_lab.data import DataError, TokenStore
from nsa_lab.data.recall import RetrievalTask, make_multi_query_task
from nsa_lab.data.recall.facts import BEFORE_CHANGE
from nsa_lab.data.recall.grammar import GRAMMARS
from nsa_lab.evaluate import evaluate_retrieval, measure_loss_by_position
from nsa_lab.evaluate.loss_by_position import split_into_ranges
from nsa_lab.evaluate.retrieval import (
    ALL_TASKS,
    DEPTHS,
    NEEDLE_FORMS,
    TASKS,
    _make_sample,
    explain_misfit,
    make_needles,
    spread_depths,
)
from nsa_lab.evaluate.scoring import score_generated, score_teacher_forced, stack_samples
from nsa_lab.model import NSATransformer
from nsa_lab.runs.evaluation import get_depth_counts

TEXT = np.random.default_rng(0).integers(0x80, 0xFF, 5000)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model() -> NSATransformer:
    nsa = NSAConfig(l=8, d=4, l_sel=8, n_sel=4, w=11)
    return NSATransformer(ModelConfig(dim=16, n_layers=1, n_heads=2, n_kv_groups=1, d_k=8, d_v=8, nsa=nsa), seed=1).eval()


def score_with_errors(
    rows: list[RetrievalTask], wrong: set[tuple[int, int, int]] = frozenset()
) -> tuple[Tensor, Tensor, Tensor]:
    """Score a model that predicts all tokens except those at (row, answer, position)."""
    tokens, answer_positions = stack_samples(rows, CPU)
    predicted = tokens.clone()
    for row, answer, position in wrong:
        predicted[row, answer_positions[row, answer, position]] += 1
    return score_teacher_forced(
        lambda rows: 10.0 * torch.nn.functional.one_hot(predicted[:, 1:], 256), tokens, answer_positions
    )


def test_answer_is_correct_if_all_its_tokens_are_most_likely() -> None:
    rows = [make_multi_query_task(901, 0.3, RecallConfig(), np.random.default_rng(n), TEXT) for n in range(3)]
    right, losses, text = score_with_errors(rows, {(1, 2, 0), (2, 3, 6), (2, 3, 5)})
    assert right.shape == losses.shape == (3, 4, 7)
    assert right.all(-1).tolist() == [[True] * 4, [True, True, False, True], [True, True, True, False]]
    knows, fails = -torch.tensor([10.0, 0.0]) + np.log(np.exp(10.0) + 255)
    torch.testing.assert_close(losses[1, 2], torch.tensor([fails, *[knows] * 6]), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(text, knows.expand(3), rtol=1e-3, atol=1e-6)


def test_text_loss_excludes_answers(model: NSATransformer) -> None:
    rows = [make_multi_query_task(901, 0.3, RecallConfig(), np.random.default_rng(4), TEXT)]
    tokens, answer_positions = stack_samples(rows, CPU)
    _, losses, text = score_teacher_forced(model, tokens, answer_positions)
    all_losses = torch.nn.functional.cross_entropy(model(tokens[:, :-1])[0], tokens[0, 1:], reduction="none")
    assert (text * (900 - 28) + losses.sum()).item() == pytest.approx(all_losses.sum().item(), rel=1e-5)


def test_generated_answer_must_match_entirely(model: NSATransformer) -> None:
    (row,) = make_needles(300, 1, RecallConfig(), 0, TEXT)
    assert score_generated(model, [row]) == [False]
    tokens = row.tokens.copy()
    for position in row.answers[0]:
        tokens[position] = model(torch.from_numpy(tokens[None, :position]))[0, -1].argmax().item()
    generated_sample = row._replace(tokens=tokens)
    assert score_generated(model, [generated_sample]) == [True]
    assert score_teacher_forced(model, *stack_samples([generated_sample], CPU))[0].all()
    tokens[row.answers[0, -1]] += 1
    assert score_generated(model, [generated_sample]) == [False]


@pytest.mark.slow
def test_samples_do_not_depend_on_other_settings(model: NSATransformer) -> None:
    settings = {"per_depth": 3, "recall": RecallConfig(value_length=3), "seed": 5}
    cells = list(evaluate_retrieval(model, TEXT, [700, 611], depths=(0.0, 0.5), **settings))
    assert [(c.task, c.length, c.depth) for c in cells] == [
        (task, length, depth)
        for task in ("needle", "multi_key", "multi_query")
        for length in (700, 611)
        for depth in (0.0, 0.5)
    ]
    for cell in cells:
        questions = 4 if cell.task == "multi_query" else 1
        assert (cell.sequences, cell.answers, cell.tokens) == (3, 3 * questions, 9 * questions)
        assert (cell.written, cell.written_right, cell.right) == (questions, 0, 0) and cell.tokens_right < cell.tokens
    (single,) = evaluate_retrieval(model, TEXT, [611], tasks=["multi_key"], depths=(0.5,), max_batch_tokens=1, **settings)
    (same,) = [c for c in cells if (c.task, c.length, c.depth) == ("multi_key", 611, 0.5)]
    assert single.loss == pytest.approx(same.loss, rel=1e-6) and single.tokens_right == same.tokens_right
    (other,) = evaluate_retrieval(model, TEXT, [611], tasks=["multi_key"], depths=(0.5,), **{**settings, "seed": 6})
    assert other.loss != single.loss


def test_misfit_is_explained(model: NSATransformer) -> None:
    assert explain_misfit("needle", 300, RecallConfig(), TEXT) is None
    assert "do not fit" in (explain_misfit("multi_query", 300, RecallConfig(), TEXT) or "")
    assert "give more text" in (explain_misfit("needle", 5001, RecallConfig(), TEXT) or "")
    with pytest.raises(DataError, match="do not fit"):
        list(evaluate_retrieval(model, TEXT, [300], tasks=["multi_query"]))


@pytest.mark.parametrize(("task", "around"), [("needle", 112), ("twelve_digits", 122), ("multi_query", 456)])
def test_fit_does_not_depend_on_the_sample(task: str, around: int) -> None:
    """Although names differ in length."""
    fits = []
    for length in range(around - 9, around + 9):
        reason = explain_misfit(task, length, RecallConfig(), TEXT)
        fits.append(reason is None)
        for number in range(40):
            rng = np.random.default_rng(number)
            try:
                ALL_TASKS[task](length, 0.3, RecallConfig(), rng, TEXT)
            except DataError:
                assert reason
            else:
                assert reason is None
    assert fits == sorted(fits) and len({*fits}) == 2


def test_needles_cover_all_depths() -> None:
    rows = make_needles(900, 10, RecallConfig(), 0, TEXT)
    starts = [bytes(row.tokens.astype(np.uint8)).index(b"\nThe secret") for row in rows]
    assert starts == sorted(starts) and starts[0] == 0 and starts[-1] > 600


@pytest.mark.parametrize(
    ("length", "bounds"), [(2048, (0.04, 0.16, 0.16)), (8192, (0.01, 0.05, 0.05)), (32768, (0.01, 0.02, 0.02))]
)
def test_depth_is_the_position_of_the_first_questioned_fact(length: int, bounds: tuple[float, ...]) -> None:
    text = np.resize(TEXT, length)
    for task, bound in zip(TASKS, bounds, strict=True):
        for depth in DEPTHS:
            for number in range(10):
                sample = _make_sample(task, length, depth, number, RecallConfig(), 0, text)
                value = bytes(sample.tokens[sample.answers[0]].tolist())
                position = bytes(sample.tokens.tolist()).index(b" is " + value + b".") / length
                assert abs(position - depth) < bound, (task, depth, number)


def test_first_question_is_counted_separately(monkeypatch: pytest.MonkeyPatch, model: NSATransformer) -> None:
    """The answers to the three other questions, whose facts are anywhere, have no effect."""

    def score_only_first(forward: object, tokens: Tensor, answer_positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        is_correct = torch.zeros(answer_positions.shape, dtype=torch.bool)
        is_correct[:, 0] = True
        is_correct[0, 0, -1] = False
        return is_correct, torch.zeros(answer_positions.shape), torch.zeros(len(tokens))

    monkeypatch.setattr(importlib.import_module("nsa_lab.evaluate.retrieval"), "score_teacher_forced", score_only_first)
    settings = {"depths": (0.5,), "per_depth": 3, "generated_per_depth": 0, "max_batch_tokens": 2000}
    (cell,) = evaluate_retrieval(model, TEXT, [1000], tasks=["multi_query"], **settings)
    assert (cell.sequences, cell.answers, cell.right, cell.right_at_depth) == (3, 12, 1, 1)
    form = (RecallConfig().statement, RecallConfig().question)
    assert cell.wordings == tuple((*form, number == 4) for number in range(12)), "the first question of the second sequence"
    assert get_depth_counts(asdict(cell)) == (1, 3)
    older_record = {key: value for key, value in asdict(cell).items() if key != "right_at_depth"}
    assert get_depth_counts(older_record) is None, "older records do not count it separately"
    assert get_depth_counts({**older_record, "answers": 3}) == (1, 3), "one question per sequence"


def test_ranges_cover_every_position_once() -> None:
    assert split_into_ranges(100) == [(0, 100)] and split_into_ranges(256) == [(0, 256)]
    assert split_into_ranges(1500) == [(0, 256), (256, 512), (512, 1024), (1024, 1500)]


def test_loss_by_position_averages_windows(model: NSATransformer) -> None:
    store = TokenStore([TEXT.astype(np.uint8)])
    ranges = measure_loss_by_position(model, store, 300, windows=4)
    assert [(o.first, o.last, o.tokens) for o in ranges] == [(0, 256, 1024), (256, 300, 176)]
    starts = [window * 16 // 4 * 300 for window in range(4)]
    rows = torch.from_numpy(np.stack([TEXT[start : start + 301] for start in starts]))
    losses = torch.nn.functional.cross_entropy(model(rows[:, :-1]).mT, rows[:, 1:], reduction="none").double()
    late = losses[:, 256:].mean(1)
    assert ranges[1].loss == pytest.approx(late.mean().item(), rel=1e-6)
    assert ranges[1].error == pytest.approx((late.std() / 2).item(), rel=1e-4)
    assert ranges[1].windows == pytest.approx(late.tolist(), rel=1e-6) and len(ranges[0].windows) == 4


def test_needle_forms() -> None:
    """Each form has its own alphabet, length, names or words."""
    samples = {task: _make_sample(task, 700, 0.5, 3, RecallConfig(), 1, TEXT) for task in ("needle", *NEEDLE_FORMS)}
    contents = {task: bytes(sample.tokens.tolist()) for task, sample in samples.items()}
    values = {task: bytes(sample.tokens[sample.answers[0]].tolist()).decode() for task, sample in samples.items()}
    for task, value in values.items():
        assert (
            contents[task].count(value.encode()) == 2
            and contents[task].endswith(value.encode())
            and len(contents[task]) == 700
        )
    assert {task: len(value) for task, value in values.items()} == {
        **dict.fromkeys(values, 7),
        "five_digits": 5,
        "twelve_digits": 12,
    }
    digits = [task for task, value in values.items() if value.isdigit()]
    assert [task for task in values if task not in digits] == ["letters", "hex", "capitals"]
    assert values["capitals"].isupper() and b"the label of our" in contents["more_words"]
    assert values["letters"].isalpha() and not values["hex"].isdigit() and int(values["hex"], 16) >= 0
    assert re.search(rb"secret number of the [a-z]{2}-\d{3} is", contents["codes"])
    assert (
        b"secret" not in contents["other_words"]
        and b"opens with " + values["other_words"].encode() in contents["other_words"]
    )
    others = ["other_words", "more_words", "new_words", "new_sentences"]
    assert [task for task in contents if b"secret number of the" not in contents[task]] == others
    questions = [task for task, content in contents.items() if b"\nBefore the change:\n" in content]
    assert questions == ["first_value"]


def test_held_out_wordings_do_not_depend_on_those_of_the_run() -> None:
    recall = RecallConfig(wordings="several", values="mixed", updates=1.0)
    for task, words in (("other_words", b"opens with"), ("more_words", b"the label of our")):
        for number in range(5):
            content = bytes(_make_sample(task, 700, 0.5, number, recall, 1, TEXT).tokens.tolist())
            assert content.count(words) == 1 and b"secret" not in content


def test_recorded_wordings_are_those_of_the_answers() -> None:
    """In every task of a run with the grammar; held-out ones are of their set, and `control_form` is that of any run."""
    recall = RecallConfig(wordings="grammar", values="mixed", updates=0.5, first_values=0.5)
    held_out = {"new_words", "new_sentences"}
    for task, number in itertools.product(ALL_TASKS, range(10)):
        sample = _make_sample(task, 3000, 0.5, number, recall, 1, np.resize(TEXT, 3000))
        content = bytes(sample.tokens.tolist())
        assert len(sample.wordings) == len(sample.answers)
        for (statement, question), answer in zip(sample.wordings, sample.answers, strict=True):
            start, value = int(answer[0]), content[answer[0] : answer[-1] + 1].decode()
            asked = re.search(
                re.escape(question).replace(r"\{name\}", "([a-z]+ [a-z]+|[a-z]{2}-[0-9]{3})") + "$",
                content[:start].decode("latin-1"),
            )
            assert asked and statement.format(name=asked[1], value=value).encode() in content[:start]
            if task in held_out or statement in GRAMMARS["grammar"][0]:
                statements, questions = GRAMMARS[task if task in held_out else "grammar"]
                assert statement in statements and question.removeprefix(BEFORE_CHANGE) in questions
            else:
                assert task in ("other_words", "more_words")
            assert question.startswith(BEFORE_CHANGE) == (task == "first_value")
        default = _make_sample("control_form", 3000, 0.5, number, RecallConfig(), 1, np.resize(TEXT, 3000))
        assert task != "control_form" or np.array_equal(sample.tokens, default.tokens)
        # The held-out forms and the control's state the fact among others, all in the same form.
        if task in {*held_out, "control_form"}:
            statements = [RecallConfig().statement] if task == "control_form" else GRAMMARS[task][0]
            assert count_statements(statements, content) == 1 + 3000 // 512


def count_statements(templates: Sequence[str], content: bytes) -> int:
    fields = {"name": "[a-z]+ [a-z]+", "value": "[0-9a-z]{7}"}
    patterns = (re.escape(template).replace(r"\{", "{").replace(r"\}", "}").format(**fields) for template in templates)
    return sum(len(re.findall(pattern.encode(), content)) for pattern in patterns)


def test_samples_of_the_basic_tasks_are_stable() -> None:
    for number, (task, make) in enumerate(TASKS.items()):
        rng = np.random.default_rng([9, number, 700, 300, 2])
        sample, expected = (
            _make_sample(task, 700, 0.3, 2, RecallConfig(), 9, TEXT),
            make(700, 0.3, RecallConfig(), rng, TEXT),
        )
        assert np.array_equal(sample.tokens, expected.tokens)


SMALL = ModelConfig(
    dim=32, n_layers=1, n_heads=4, n_kv_groups=2, d_k=8, d_v=8, nsa=NSAConfig(l=8, d=4, l_sel=8, n_sel=4, w=13)
)


def test_depths_are_spread_over_the_length() -> None:
    assert spread_depths(4) == [0.0, 0.2, 0.5, 0.7] and spread_depths(2) == [0.0, 0.5]


def test_the_first_samples_of_a_depth_are_generated(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are the same for any number of samples."""
    module, seen = importlib.import_module("nsa_lab.evaluate.retrieval"), []
    monkeypatch.setattr(module, "score_generated", lambda model, samples: seen.extend(samples) or [True] * len(samples))
    text = np.random.default_rng(0).integers(97, 122, 5000)
    model, recall = NSATransformer(SMALL), RecallConfig(value_length=4)
    options = {"tasks": ["needle"], "depths": [0.5], "per_depth": 3, "generated_per_depth": 1, "recall": recall}
    list(evaluate_retrieval(model, text, [330], **options))
    expected = _make_sample("needle", 330, 0.5, 0, recall, 0, text)
    assert [list(sample.tokens) for sample in seen] == [list(expected.tokens)]


def test_cell_loss_is_over_answer_tokens(model: NSATransformer) -> None:
    (cell,) = evaluate_retrieval(model, TEXT, [400], tasks=["needle"], depths=(0.5,), per_depth=3, generated_per_depth=0)
    samples = [_make_sample("needle", 400, 0.5, number, RecallConfig(), 0, TEXT) for number in range(3)]
    is_correct, losses, text = score_teacher_forced(model, *stack_samples(samples, CPU))
    assert cell.loss == pytest.approx(losses.mean().item(), rel=1e-6) != text.mean().item()
    assert cell.tokens_right == is_correct.sum().item()


def test_correct_tokens_are_counted_at_every_position(monkeypatch: pytest.MonkeyPatch, model: NSATransformer) -> None:
    def score_all_but_first(forward: object, tokens: Tensor, answer_positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        is_correct = torch.ones(answer_positions.shape, dtype=torch.bool)
        is_correct[..., 0] = False
        return is_correct, torch.zeros(answer_positions.shape), torch.zeros(len(tokens))

    monkeypatch.setattr(importlib.import_module("nsa_lab.evaluate.retrieval"), "score_teacher_forced", score_all_but_first)
    (cell,) = evaluate_retrieval(model, TEXT, [400], tasks=["needle"], depths=(0.5,), per_depth=3, generated_per_depth=0)
    assert (cell.right, cell.tokens, cell.tokens_right) == (0, 21, 18)


def test_needles_of_one_depth_have_different_facts() -> None:
    rows = make_needles(900, 20, RecallConfig(), 0, TEXT)
    assert len({tuple(row.tokens[row.answers[0]]) for row in rows}) == 20
    assert [tuple(row.tokens) for row in rows[:2]] == [
        tuple(_make_sample("needle", 900, 0.0, number, RecallConfig(), 0, TEXT).tokens) for number in (0, 1)
    ]
