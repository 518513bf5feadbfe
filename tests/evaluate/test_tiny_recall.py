"""The tiny recall task: its sequences ask what they told, and the recipe learns to find where plain NSA does not."""

from __future__ import annotations

import pytest
import torch
from matplotlib.colors import to_hex

from nsa_lab import figures
from nsa_lab.evaluate import run_ablations
from nsa_lab.evaluate.scoring import score_teacher_forced
from nsa_lab.evaluate.tiny_recall import EVAL_STREAM, TINY_NSA, TRAIN_STREAM, TinyRecall, build_tiny_model, train_tiny_model

TASK = TinyRecall()
RECIPE = {"rotary_share": 0.5, "matching_heads": 1, "selection_loss": 0.2, "indexer_block": 2}


def test_every_question_repeats_a_pair_that_was_told_once() -> None:
    tokens, places = TASK.make_batch(3, 40)
    assert tokens.shape == (40, 64) and places.shape == (40, 16, 1) and tokens.dtype == torch.int64
    for row, asked in zip(tokens.tolist(), places.flatten(1).tolist(), strict=True):
        pairs = list(zip(row[::2], row[1::2], strict=True))
        assert all(key < 16 <= value < 32 for key, value in pairs)
        assert len(set(pairs)) == len({key for key, _ in pairs}) == 16
        again = [2 * i + 1 for i, pair in enumerate(pairs) if pair in pairs[:i]]
        assert sorted(asked) == again, "asked is what stands for the second time"
        assert sorted(asked[-TASK.n_far :]) == list(range(53, 64, 2)), "the far ones are asked last"


def test_the_choice_matters() -> None:
    """Most of what the far questions ask for stands in blocks that are not forced, before the window."""
    tokens, places = TASK.make_batch(0, 200)
    assert TASK.length > TINY_NSA.n_sel * TINY_NSA.l_sel
    hidden = total = 0
    for row, asked in zip(tokens.tolist(), places.flatten(1).tolist(), strict=True):
        for place in asked[-TASK.n_far :]:
            query, told = place - 1, row.index(row[place - 1]) + 1
            own, block = query // TINY_NSA.l_sel, told // TINY_NSA.l_sel
            hidden += block not in (0, own - 1, own) and told <= query - TINY_NSA.w
            total += 1
    assert hidden / total > 0.5


def test_sequences_are_a_function_of_seed_stream_and_step() -> None:
    one = TASK.make_batch(7, 8, seed=1)
    assert all(torch.equal(a, b) for a, b in zip(one, TASK.make_batch(7, 8, seed=1), strict=True))
    for other in (
        TASK.make_batch(8, 8, seed=1),
        TASK.make_batch(7, 8, seed=2),
        TASK.make_batch(7, 8, seed=1, stream=EVAL_STREAM),
    ):
        assert not torch.equal(one[0], other[0])
    assert TRAIN_STREAM != EVAL_STREAM


@pytest.mark.parametrize("sizes", [{"length": 62}, {"far": 0}, {"far": 17}, {"symbols": 15}])
def test_sizes_that_do_not_go_together_are_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"length = .*, far = .*, symbols = .*: expected"):
        TinyRecall(**sizes)


def test_training_adds_the_selection_loss_and_repeats_itself() -> None:
    """The loss moves the first step's weights; a second run gives the same numbers."""
    task = TinyRecall(length=40, n_far=3)

    def after_a_step(**changes: float) -> tuple[list[object], torch.Tensor]:
        model = build_tiny_model(task, **changes)
        curve = list(train_tiny_model(model, task, steps=1, eval_every=1, batch_size=2, n_eval_sequences=4))
        return curve, model.blocks[0].attention.qkv.weight.detach()  # pyright: ignore

    (plain, weights), (again, same), (_, taught) = after_a_step(), after_a_step(), after_a_step(selection_loss=1.0)
    assert plain == again and torch.equal(weights, same)
    assert not torch.equal(weights, taught)


@pytest.mark.parametrize("changes", [{"attention": "dense"}, RECIPE])
def test_a_step_is_a_step_of_any_attention(changes: dict[str, object]) -> None:
    points = list(train_tiny_model(build_tiny_model(**changes), steps=2, eval_every=1, batch_size=2, n_eval_sequences=4))
    assert [point.step for point in points] == [1, 2]
    # Untrained: the answer is one of 32 tokens.
    assert points[0].loss == pytest.approx(3.4, abs=0.3)


def test_what_is_told_is_that_of_the_far_questions_of_fresh_sequences() -> None:
    model = build_tiny_model(seed=4)
    (point,) = train_tiny_model(model, steps=1, eval_every=1, batch_size=2, n_eval_sequences=6, seed=4)
    tokens, places = TASK.make_batch(0, 6, 4, EVAL_STREAM)
    right, losses, _ = score_teacher_forced(model.eval(), tokens, places[:, -6:])
    assert point.accuracy == pytest.approx(right.float().mean().item(), abs=1e-7)
    assert point.loss == pytest.approx(losses.mean().item(), rel=1e-6)


@pytest.mark.soak
@pytest.mark.slow  # about a minute of one core
def test_the_recipe_finds_long_before_plain_nsa_copies() -> None:
    """docs/science/tiny_recall.md has whole curves: after 100 steps of 700, 1 against .13."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        models = build_tiny_model(TASK, **RECIPE), build_tiny_model(TASK)
        recipe, plain = (list(train_tiny_model(model, TASK, steps=100))[-1].accuracy for model in models)
    finally:
        torch.set_num_threads(threads)
    assert recipe > 0.95 and plain < 0.3
    tokens, places = TASK.make_batch(1, 256, 0, EVAL_STREAM)
    effects = run_ablations(models[0].eval(), tokens, places[:, -TASK.n_far :], batch_size=64)
    change = {effect.name: effect.d_accuracy for effect in effects}
    assert change["random"] < -0.3, "it is the choice that finds"
    assert change["no_sel"] < -0.2, "and the selected branch that reads"


def test_a_model_keeps_its_colour_from_one_picture_to_the_next() -> None:
    curves = figures.plot_recall_accuracy({name: [(1, 0.5)] for name in ("dense", "avg", "recipe")}, chance=0.1)
    bars = figures.plot_ablation_accuracy({name: {"chosen": 0.5} for name in ("avg", "recipe")}, ["dense", "avg", "recipe"])
    lines = {line.get_label(): to_hex(line.get_color()) for line in curves.axes[0].lines}
    for container in bars.axes[0].containers:
        assert to_hex(container[0].get_facecolor()) == lines[container.get_label()]  # pyright: ignore
