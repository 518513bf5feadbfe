"""Evaluations: the same text for every grouping, a mean over tokens, in bits per byte."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from looping import looped

from nsa_lab.config import RunConfig
from nsa_lab.data import Dataset, EvalBatches, TokenStore
from nsa_lab.health.matched_pair import build_side_by_side, check_matched_pair
from nsa_lab.health.paired_difference import PairedDifference, compare_validation_windows
from nsa_lab.report.header import build_comparison_rows
from nsa_lab.runs import events
from nsa_lab.runs.history import History, collect_facts, have_different_eval_texts
from nsa_lab.train.build import Builders, TrainContext, build_context
from nsa_lab.train.distributed import World
from nsa_lab.train.trainer import Trainer
from nsa_lab.train.validation import (
    compute_branch_statistics,
    compute_probe_logits,
    evaluate_held_out,
)
from nsa_lab.workbook.run_comparison import format_numbers_at

Make, Train = Callable[..., Path], Callable[..., int]
CPU = torch.device("cpu")


def parts_of(config: RunConfig, builders: Builders, dataset: Dataset | None = None) -> TrainContext:
    dataset = dataset or builders.data(config.data, 256, config.train.seq_len, None)
    return build_context(config, World(), CPU, dataset, builders)


def text_of(parts: TrainContext) -> torch.Tensor:
    return torch.cat([inputs for inputs, _ in parts.get_evaluation(0)])


@pytest.mark.parametrize("micro", [1, 2, 4])
def test_the_text_does_not_depend_on_the_micro_batch(
    make_tiny_config: Callable[..., RunConfig], builders: Builders, micro: int
) -> None:
    whole, grouped = (
        parts_of(make_tiny_config(eval_batches=3), builders),
        parts_of(make_tiny_config(eval_batches=3, micro_batch_size=micro), builders),
    )
    assert len(text_of(whole)) == 3 * 2
    assert torch.equal(text_of(grouped), text_of(whole))
    assert grouped.get_evaluation(0).identity == whole.get_evaluation(0).identity
    assert max(len(inputs) for inputs, _ in grouped.get_evaluation(0)) <= micro
    losses = [evaluate_held_out(parts, parts.get_evaluation(0), lambda: None).loss for parts in (whole, grouped)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    twice = parts_of(make_tiny_config(eval_batches=3, accumulate_grad_batches=4), builders)
    assert torch.equal(text_of(twice), text_of(whole)), "nor on how many of them a step takes"


@looped
@pytest.mark.parametrize(
    "look",
    [
        pytest.param(lambda parts: evaluate_held_out(parts, parts.get_evaluation(0), lambda: None).loss, id="evaluation"),
        pytest.param(lambda parts: compute_branch_statistics(parts, parts.batches.weighted_batch(0)), id="statistics"),
        pytest.param(compute_probe_logits, id="probe"),
    ],
)
def test_measurements_do_not_train_and_restore_training_mode(
    make_tiny_config: Callable[..., RunConfig], builders: Builders, look: Callable[[TrainContext], object]
) -> None:
    """Evaluation mode has no selection loss; a run that stayed in it would train without this loss."""
    parts, seen = parts_of(make_tiny_config(model={"selection_loss": 0.1}), builders), []
    parts.model.blocks[0].register_forward_hook(lambda module, inputs, output: seen.append(output[1].loss))
    look(parts)
    assert set(seen) == {None}
    assert all(module.training for module in parts.model.modules())


def test_the_loss_is_the_mean_over_tokens_also_with_a_short_last_batch(
    make_tiny_config: Callable[..., RunConfig], builders: Builders
) -> None:
    """Five windows, two per batch: the mean of the three batch means differs from the mean over tokens."""
    config = make_tiny_config(eval_batches=5, batch_size=1, accumulate_grad_batches=2, micro_batch_size=2)
    parts = parts_of(config, builders)
    sizes, total, means, by_window = [], 0.0, [], []
    with torch.no_grad():
        # Bias the model towards some tokens, so that windows differ.
        parts.model.head.weight[:40] += 0.5
        for inputs, targets in parts.get_evaluation(0):
            recorded = parts.model(inputs).double().log_softmax(-1).gather(-1, targets[..., None])
            sizes.append(len(inputs))
            total -= recorded.sum().item()
            means.append(-recorded.mean().item())
            by_window += (-recorded.mean((1, 2))).tolist()
    assert sizes == [2, 2, 1]
    result = evaluate_held_out(parts, parts.get_evaluation(0), lambda: None)
    assert result.loss == pytest.approx(total / (5 * 32), rel=1e-6)
    assert result.window_losses == pytest.approx(by_window, abs=2e-6)
    assert abs(np.mean(means) / result.loss - 1) > 1e-4, "the test can tell"


class FourBytes(Dataset):
    """Tokens of four bytes each."""

    @property
    def bytes_per_token(self) -> float:
        return 4.0


def test_bits_per_byte_count_the_bytes_of_a_token(new_run: Make, train: Train, builders: Builders) -> None:
    def data(*arguments: Any) -> Dataset:
        return FourBytes(**vars(builders.data(*arguments)))

    run_dir = new_run(steps=2, warmup_steps=0, eval_every=1, save_every=0)
    assert train(run_dir, builders=replace(builders, data=data)) == 0
    record = events.read_events(run_dir)
    recorded = [*events.get_step_events(record), *events.get_eval_events(record)]
    assert len(recorded) == 5
    assert [e["bpb"] for e in recorded] == pytest.approx([e["loss"] / math.log(2) / 4 for e in recorded])


@pytest.mark.slow
def test_evaluations_record_their_text_and_different_texts_are_not_compared(
    new_run: Make, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, real = [], EvalBatches.__getitem__
    monkeypatch.setattr(EvalBatches, "__getitem__", lambda self, index: read.append(index) or real(self, index))
    runs = [new_run(steps=2, warmup_steps=0, save_every=0, **changes) for changes in (
        {},
        {"micro_batch_size": 1, "model": {"attention": "dense"}},
        {"eval_batches": 3, "model": {"attention": "dense"}},
    )]  # fmt: skip
    assert [train(run_dir) for run_dir in runs] == [0, 0, 0]
    # Each evaluation reads its text once, including the last; before that, preflight reads one batch.
    assert read == [0, *[0, 1] * 2, 0, *[0, 1, 2, 3] * 2, 0, *[0, 1, 2] * 2]
    nsa, twin, other = map(History.read, runs)
    text_file = [{event["text"] for event in history.evaluations} for history in (nsa, twin, other)]
    assert text_file[0] == text_file[1] and len(text_file[0]) == 1 and text_file[2].isdisjoint(text_file[0])
    assert [history.evaluations[0]["windows"] for history in (nsa, twin, other)] == [4, 4, 6]
    for history in (nsa, twin, other):
        first, last = history.evaluations[0], history.evaluations[-1]
        assert "window_losses" not in first, "it is the last evaluation that is compared"
        assert len(last["window_losses"]) == last["windows"] and len(set(last["window_losses"])) > 1
        assert np.mean(last["window_losses"]) == pytest.approx(last["loss"], abs=2e-6)
    assert isinstance(compare_validation_windows(nsa, twin), PairedDifference) and "different texts" in str(
        compare_validation_windows(nsa, other)
    )

    same, good = check_matched_pair(nsa, twin)
    assert same.ok and good.ok is not None and not have_different_eval_texts([nsa, twin])
    same, good = check_matched_pair(nsa, other)
    assert same.ok is False and "the evaluated text" in same.text
    assert good.ok is None and "different texts" in good.text
    ratios = {name: ratio for name, *_, ratio in build_side_by_side(nsa, other)}
    assert ratios["validation, bits per byte"] is None and ratios["parameters"] is not None
    assert "Do not compare" in format_numbers_at([nsa, other], 0, 2) and "Do not compare" not in format_numbers_at(
        [nsa, twin], 0, 2
    )
    recorded = {
        "headline": "healthy",
        "facts": [("validation, bits per byte", "1.0")],
        "different_settings": {},
        "numbers": collect_facts(nsa),
    }
    name, shown = build_comparison_rows([recorded] * 2, have_different_eval_texts([nsa, other]))[1]
    assert name.endswith("not comparable)") and shown == ["1.0", "1.0", "–"]
    assert dict(build_comparison_rows([recorded] * 2))["validation, bits per byte"] == ["1.0", "1.0", "+0.0000 (+0.0%)"]


def test_a_record_without_text_identity_is_compared_only_with_similar_records(new_run: Make) -> None:
    """In older records the text follows from the data and from the sequences per forward pass."""

    def history(**changes: Any) -> History:
        read = History.read(new_run(**changes))
        start = {"kind": "start", "attempt": 1, "step": 0, "data_identity": "d"}
        evaluation = {"kind": "eval", "attempt": 1, "step": 0, "bpb": 8.0, "loss": 5.5}
        return replace(read, events=[start, evaluation], evaluations=[evaluation])

    assert not have_different_eval_texts([history(), history(accumulate_grad_batches=4)])
    assert have_different_eval_texts([history(), history(micro_batch_size=4)])
    assert have_different_eval_texts([history(), history(eval_batches=7)])


def test_evaluation_reads_no_training_token(make_tiny_config: Callable[..., RunConfig], builders: Builders) -> None:
    config = make_tiny_config()
    dataset = builders.data(config.data, 256, config.train.seq_len, None)
    marked = replace(dataset, train=TokenStore([np.full(5000, 7, dtype=np.uint8)]))
    assert torch.equal(text_of(parts_of(config, builders, marked)), text_of(parts_of(config, builders, dataset)))


def test_the_trainer_evaluates_the_held_out_batches_of_the_stage(
    new_run: Make, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recorded loss equals a separate evaluation of the same held-out batches before the first step."""
    seen: list[float] = []
    before = Trainer._evaluate

    def spy(self: Trainer) -> None:
        seen.append(evaluate_held_out(self.context, self.context.get_evaluation(self.completed_steps), lambda: None).loss)
        before(self)

    monkeypatch.setattr(Trainer, "_evaluate", spy)
    run_dir = new_run(steps=2, warmup_steps=0, save_every=0)
    assert train(run_dir) == 0
    assert [event["loss"] for event in History.read(run_dir).evaluations] == seen
