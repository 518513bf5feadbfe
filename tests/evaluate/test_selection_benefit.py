"""Whether selection finds: what is asked lies where nothing else looks, and a choice that is another has its loss."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
import torch

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
    told = measure_selection_benefit(model, TEXT, length, RECALL, **settings)
    assert isinstance(told, SelectionBenefit), told
    return told


@pytest.mark.parametrize(("length", "window"), [(100, 11), (203, 11), (1000, 11), (203, 40)])
def test_facts_lie_where_neither_window_nor_forced_blocks_look(
    length: int, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    module = importlib.import_module(
        "nsa_lab.evaluate.selection_benefit"
    )  # its name in the package is that of its function
    monkeypatch.setattr(module, "run_ablations", lambda model, tokens, places, **rest: asked.append((tokens, places)) or [])
    measure_selection_benefit(make_model(nsa=NSA.model_copy(update={"w": window})), TEXT, length, RECALL, sequences=97)
    ((tokens, places),) = asked
    assert tokens.shape == (97, length) and len({tuple(row) for row in places.flatten(1).tolist()}) == 1
    begins = []
    for row, place in zip(tokens.tolist(), places[:, 0].tolist(), strict=True):
        answer = bytes(row[place[0] : place[-1] + 1])
        said = bytes(row[: place[0]])
        told = said.index(b"=" + answer + b".") + 1
        begins.append(told)
        assert said.index(b" ") >= NSA.l_sel + 4  # between the two words of the name, of which the first has four letters
        last = told + len(answer) - 1
        assert last < place[0] - 1 - max(window, 2 * NSA.l_sel) + 1
    assert max(begins) - min(begins) > 0.4 * (length - window - 49)


def test_what_replaces_the_choice_has_its_loss_and_a_branch_of_zeros_is_no_branch(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    usual = measure(model)
    assert set(usual.answer_loss) == set(usual.accuracy) == {"chosen", "random", "nearest", "no_sel"}
    assert len(set(usual.answer_loss.values())) == 4 and usual.length == LENGTH and usual.sequences == 16
    assert measure(model).answer_loss == usual.answer_loss
    with monkeypatch.context() as patch:
        patch.setattr(
            block_selectors,
            "select_model_blocks",
            lambda scoring, layer: block_selectors.select_nearest_blocks(scoring[0], 2, NSA),
        )
        near = measure(model).answer_loss
    assert near["chosen"] == near["nearest"] == usual.answer_loss["nearest"]
    with torch.no_grad():
        for block in model.blocks:
            first = (4 + 3 * 2) * 6 + 2 * 5
            block.attention.qkv.weight[first : first + 2 * 5] = 0  # the selected branch's values
    silent = measure(model).answer_loss
    assert silent["chosen"] == pytest.approx(silent["no_sel"], abs=1e-12)
    assert silent["chosen"] == pytest.approx(silent["random"], abs=1e-12)


def test_says_why_it_cannot_be_asked() -> None:
    model = make_model()
    covered = measure_selection_benefit(model, TEXT, 32, RECALL)
    assert covered == "32 tokens are at most nsa.n_sel * nsa.l_sel = 32: all blocks are read"
    assert "hold no place for a fact of" in str(measure_selection_benefit(model, TEXT, 50, RECALL))
    forced = NSA.model_copy(update={"n_sel": 3})
    assert (
        measure_selection_benefit(make_model(nsa=forced), TEXT, LENGTH, RECALL)
        == "nsa.n_sel = 3: the forced blocks are all, and none is chosen"
    )
    assert "has 5000 bytes, fewer than a sequence of 6000" in str(measure_selection_benefit(model, TEXT, 6000, RECALL))
    with pytest.raises(ValueError, match="a dense model chooses no blocks"):
        measure_selection_benefit(make_model(attention="dense"), TEXT, LENGTH, RECALL)


def test_what_is_told_is_of_the_answers_and_of_the_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    module, asked = importlib.import_module("nsa_lab.evaluate.selection_benefit"), []

    def answered(model: NSATransformer, tokens: torch.Tensor, places: torch.Tensor, **how: object) -> list[AblationResult]:
        asked.append((tokens.gather(1, places.flatten(1)).tolist(), how["seed"]))
        return [
            AblationResult("chosen", 9.0, 0.5, 0.75, 0.0, 0.0, 0.0, []),
            AblationResult("random", 9.0, 2.5, 0.25, 0.0, 2.0, -0.5, []),
        ]

    monkeypatch.setattr(module, "run_ablations", answered)
    told = [measure(make_model(), seed=seed) for seed in (4, 5)]
    assert told[0].answer_loss == {"chosen": 0.5, "random": 2.5} and told[0].accuracy == {"chosen": 0.75, "random": 0.25}
    (values, first), (others, second) = asked
    assert (first, second) == (4, 5) and values != others
    assert len({tuple(value) for value in values}) > 8, "a fact of its own in every sequence"
