"""Selection benefit: facts are where only selection finds them, and a replaced selection has its own loss."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
import torch
from looping import looped

from nsa_lab.config import ModelConfig, NSAConfig, RecallConfig
from nsa_lab.evaluate import SelectionBenefit, block_selectors, measure_selection_benefit
from nsa_lab.evaluate.ablations import AblationResult
from nsa_lab.model import NSATransformer

NSA = NSAConfig(l=8, d=4, l_sel=8, n_sel=4, w=11)
RECALL = RecallConfig(statement="{name}={value}. ", question="{name}?", value_length=3)
TEXT = np.random.default_rng(0).integers(97, 123, 5000)
LENGTH = 203


def make_model(**changes: object) -> NSATransformer:
    sizes = {"dim": 24, "n_layers": 2, "n_heads": 4, "n_kv_groups": 2, "d_k": 6, "d_v": 5, "nsa": NSA}
    return NSATransformer(ModelConfig(**{**sizes, **changes}), seed=3, backend="torch", dtype=torch.float64).double().eval()


def measure(model: NSATransformer, length: int = LENGTH, **settings: int) -> SelectionBenefit:
    result = measure_selection_benefit(model, TEXT, length, RECALL, **settings)
    assert isinstance(result, SelectionBenefit), result
    return result


@looped
@pytest.mark.parametrize(("length", "window"), [(100, 11), (203, 11), (1000, 11), (203, 40)])
def test_facts_are_outside_window_and_forced_blocks(length: int, window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    module = importlib.import_module("nsa_lab.evaluate.selection_benefit")
    monkeypatch.setattr(
        module,
        "run_ablations",
        lambda model, tokens, answer_positions, **rest: calls.append((tokens, answer_positions)) or [],
    )
    measure_selection_benefit(make_model(nsa=NSA.model_copy(update={"w": window})), TEXT, length, RECALL, sequences=97)
    ((tokens, answer_positions),) = calls
    assert tokens.shape == (97, length) and len({tuple(row) for row in answer_positions.flatten(1).tolist()}) == 1
    fact_starts = []
    for row, positions in zip(tokens.tolist(), answer_positions[:, 0].tolist(), strict=True):
        answer = bytes(row[positions[0] : positions[-1] + 1])
        context = bytes(row[: positions[0]])
        value_start = context.index(b"=" + answer + b".") + 1
        fact_starts.append(value_start)
        assert context.index(b" ") >= NSA.l_sel + 4  # the space in the name, whose first word has four letters
        last = value_start + len(answer) - 1
        assert last < positions[0] - 1 - max(window, 2 * NSA.l_sel) + 1
    assert max(fact_starts) - min(fact_starts) > 0.4 * (length - window - 49)


@pytest.mark.slow
def test_replaced_selection_and_zero_branch(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    expected = measure(model)
    assert set(expected.answer_loss) == set(expected.accuracy) == {"chosen", "random", "nearest", "no_sel"}
    assert len(set(expected.answer_loss.values())) == 4 and expected.length == LENGTH and expected.sequences == 16
    assert measure(model).answer_loss == expected.answer_loss
    with monkeypatch.context() as patch:
        patch.setattr(
            block_selectors,
            "select_model_blocks",
            lambda scoring, layer: block_selectors.select_nearest_blocks(scoring[0], 2, NSA),
        )
        with_nearest = measure(model).answer_loss
    assert with_nearest["chosen"] == with_nearest["nearest"] == expected.answer_loss["nearest"]
    with torch.no_grad():
        for block in model.blocks:
            first = (4 + 3 * 2) * 6 + 2 * 5
            block.attention.qkv.weight[first : first + 2 * 5] = 0  # values of the selected branch
    with_zeros = measure(model).answer_loss
    assert with_zeros["chosen"] == pytest.approx(with_zeros["no_sel"], abs=1e-12)
    assert with_zeros["chosen"] == pytest.approx(with_zeros["random"], abs=1e-12)


def test_reason_is_returned_if_undefined() -> None:
    model = make_model()
    covered = measure_selection_benefit(model, TEXT, 32, RECALL)
    assert covered == "32 tokens are at most nsa.n_sel * nsa.l_sel = 32: all blocks are selected"
    assert "have no room for a fact of" in str(measure_selection_benefit(model, TEXT, 50, RECALL))
    forced = NSA.model_copy(update={"n_sel": 3})
    assert (
        measure_selection_benefit(make_model(nsa=forced), TEXT, LENGTH, RECALL)
        == "nsa.n_sel = 3: all selected blocks are forced"
    )
    assert "has 5000 bytes, and a sequence needs 6000" in str(measure_selection_benefit(model, TEXT, 6000, RECALL))
    without_selection = measure_selection_benefit(make_model(branches=("cmp", "win")), TEXT, LENGTH, RECALL)
    assert "has no selected branch" in str(without_selection)
    with pytest.raises(ValueError, match="got a dense model"):
        measure_selection_benefit(make_model(attention="dense"), TEXT, LENGTH, RECALL)


def test_result_uses_answers_and_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    module, calls = importlib.import_module("nsa_lab.evaluate.selection_benefit"), []

    def fake_ablations(
        model: NSATransformer, tokens: torch.Tensor, answer_positions: torch.Tensor, **options: object
    ) -> list[AblationResult]:
        calls.append((tokens.gather(1, answer_positions.flatten(1)).tolist(), options["seed"]))
        return [
            AblationResult("chosen", 9.0, 0.5, 0.75, 0.0, 0.0, 0.0, []),
            AblationResult("random", 9.0, 2.5, 0.25, 0.0, 2.0, -0.5, []),
        ]

    monkeypatch.setattr(module, "run_ablations", fake_ablations)
    results = [measure(make_model(), seed=seed) for seed in (4, 5)]
    assert results[0].answer_loss == {"chosen": 0.5, "random": 2.5} and results[0].accuracy == {
        "chosen": 0.75,
        "random": 0.25,
    }
    (values, first), (others, second) = calls
    assert (first, second) == (4, 5) and values != others
    assert len({tuple(value) for value in values}) > 8, "facts differ between sequences"
