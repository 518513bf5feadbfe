"""Tiny recall task: questions repeat earlier pairs, and the training recipe learns the task much earlier than plain NSA."""

from __future__ import annotations

import pytest
import torch
from looping import looped
from matplotlib.colors import to_hex

from nsa_lab import figures
from nsa_lab.evaluate import run_ablations
from nsa_lab.evaluate.scoring import score_teacher_forced
from nsa_lab.evaluate.tiny_recall import EVAL_STREAM, TINY_NSA, TRAIN_STREAM, TinyRecall, build_tiny_model, train_tiny_model

TASK = TinyRecall()
RECIPE = {"rotary_share": 0.5, "matching_heads": 1, "selection_loss": 0.2, "indexer_block": 2}


def test_every_question_repeats_an_earlier_pair() -> None:
    tokens, answer_positions = TASK.make_batch(3, 40)
    assert tokens.shape == (40, 64) and answer_positions.shape == (40, 16, 1) and tokens.dtype == torch.int64
    for row, positions in zip(tokens.tolist(), answer_positions.flatten(1).tolist(), strict=True):
        pairs = list(zip(row[::2], row[1::2], strict=True))
        assert all(key < 16 <= value < 32 for key, value in pairs)
        assert len(set(pairs)) == len({key for key, _ in pairs}) == 16
        repeated = [2 * i + 1 for i, pair in enumerate(pairs) if pair in pairs[:i]]
        assert sorted(positions) == repeated, "answers are the second occurrences"
        assert sorted(positions[-TASK.n_far :]) == list(range(53, 64, 2)), "far questions are last"


def test_far_answers_need_block_selection() -> None:
    """Most facts of far questions are in blocks that are not forced, before the window."""
    tokens, answer_positions = TASK.make_batch(0, 200)
    assert TASK.length > TINY_NSA.n_sel * TINY_NSA.l_sel
    hidden = total = 0
    for row, positions in zip(tokens.tolist(), answer_positions.flatten(1).tolist(), strict=True):
        for answer in positions[-TASK.n_far :]:
            query, fact = answer - 1, row.index(row[answer - 1]) + 1
            own, block = query // TINY_NSA.l_sel, fact // TINY_NSA.l_sel
            hidden += block not in (0, own - 1, own) and fact <= query - TINY_NSA.w
            total += 1
    assert hidden / total > 0.5


def test_sequences_depend_on_seed_stream_and_step() -> None:
    batch = TASK.make_batch(7, 8, seed=1)
    assert all(torch.equal(a, b) for a, b in zip(batch, TASK.make_batch(7, 8, seed=1), strict=True))
    for other in (
        TASK.make_batch(8, 8, seed=1),
        TASK.make_batch(7, 8, seed=2),
        TASK.make_batch(7, 8, seed=1, stream=EVAL_STREAM),
    ):
        assert not torch.equal(batch[0], other[0])
    assert TRAIN_STREAM != EVAL_STREAM


@looped
@pytest.mark.parametrize("sizes", [{"length": 62}, {"n_far": 0}, {"n_far": 17}, {"n_symbols": 15}])
def test_invalid_sizes_are_rejected(sizes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"length = .*, n_far = .*, n_symbols = .*: expected"):
        TinyRecall(**sizes)


def test_training_is_deterministic_and_uses_the_selection_loss() -> None:
    """The selection loss changes the weights of the first step; a second run gives equal results."""
    task = TinyRecall(length=40, n_far=3)

    def train_one_step(**changes: float) -> tuple[list[object], torch.Tensor]:
        model = build_tiny_model(task, **changes)
        curve = list(train_tiny_model(model, task, steps=1, eval_every=1, batch_size=2, n_eval_sequences=4))
        return curve, model.blocks[0].attention.qkv.weight.detach()  # pyright: ignore

    (plain, weights), (repeated, repeated_weights), (_, with_selection_loss) = (
        train_one_step(),
        train_one_step(),
        train_one_step(selection_loss=1.0),
    )
    assert plain == repeated and torch.equal(weights, repeated_weights)
    assert not torch.equal(weights, with_selection_loss)


@pytest.mark.parametrize("changes", [{"attention": "dense"}, RECIPE])
def test_training_works_with_any_attention(changes: dict[str, object]) -> None:
    points = list(train_tiny_model(build_tiny_model(**changes), steps=2, eval_every=1, batch_size=2, n_eval_sequences=4))
    assert [point.step for point in points] == [1, 2]
    options = {"steps": 3, "eval_every": 3, "eval_also": (0, 2), "batch_size": 2, "n_eval_sequences": 4}
    also = list(train_tiny_model(build_tiny_model(**changes), **options))  # pyright: ignore
    assert [point.step for point in also] == [0, 2, 3]
    # Untrained: uniform over 32 tokens.
    assert points[0].loss == pytest.approx(3.4, abs=0.3)


def test_evaluation_uses_far_questions_of_the_evaluation_stream() -> None:
    model = build_tiny_model(seed=4)
    (point,) = train_tiny_model(model, steps=1, eval_every=1, batch_size=2, n_eval_sequences=6, seed=4)
    tokens, answer_positions = TASK.make_batch(0, 6, 4, EVAL_STREAM)
    is_correct, losses, _ = score_teacher_forced(model.eval(), tokens, answer_positions[:, -6:])
    assert point.accuracy == pytest.approx(is_correct.float().mean().item(), abs=1e-7)
    assert point.loss == pytest.approx(losses.mean().item(), rel=1e-6)


@pytest.mark.nightly
@pytest.mark.slow  # about a minute of one core
def test_training_recipe_learns_much_earlier_than_plain_nsa() -> None:
    """Accuracy 1 against 0.13 after 100 of 700 steps; docs/science/tiny_recall.md has the curves."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        models = build_tiny_model(TASK, **RECIPE), build_tiny_model(TASK)
        recipe, plain = (list(train_tiny_model(model, TASK, steps=100))[-1].accuracy for model in models)
    finally:
        torch.set_num_threads(threads)
    assert recipe > 0.95 and plain < 0.3
    tokens, answer_positions = TASK.make_batch(1, 256, 0, EVAL_STREAM)
    results = run_ablations(models[0].eval(), tokens, answer_positions[:, -TASK.n_far :], batch_size=64)
    accuracy_difference = {result.name: result.d_accuracy for result in results}
    assert accuracy_difference["random"] < -0.3, "selection finds the facts"
    assert accuracy_difference["no_sel"] < -0.2, "the selected branch reads them"


def test_model_colors_are_consistent_across_figures() -> None:
    curves = figures.plot_recall_accuracy({name: [(1, 0.5)] for name in ("dense", "avg", "recipe")}, chance=0.1)
    bars = figures.plot_ablation_accuracy({name: {"chosen": 0.5} for name in ("avg", "recipe")}, ["dense", "avg", "recipe"])
    lines = {line.get_label(): to_hex(line.get_color()) for line in curves.axes[0].lines}
    for container in bars.axes[0].containers:
        assert to_hex(container[0].get_facecolor()) == lines[container.get_label()]  # pyright: ignore
