"""Checks of conversion runs: levels of each check, and which checks of other runs do not apply."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_run import LAYERS, make_config, write_run
from looping import looped

from nsa_lab.health import Verdict, list_verdicts
from nsa_lab.health.headline_questions import answer_questions

Event = dict[str, Any]
COMPARISON: Event = {
    "length": 2048,
    "windows": 4,
    "loss": {"dense": 2.0, "selected": 2.01, "nearest": 2.2},
    "attention_mass": [0.97, 0.96, 0.98],
    "attention_mass_nearest": [0.8, 0.7, 0.6],
}


def examine(
    folder: Path,
    selection_loss: Callable[[int], float] = lambda step: 1 - step / 1000,
    trainable: str = "indexer",
    indexer: str | None = None,
    edit: Callable[[list[Event]], None] = lambda events: None,
    **changes: Any,
) -> dict[str, Verdict]:
    """Return the results by name of a run whose last comparison has `changes`.

    `indexer`: field of its first event. `edit`: of the comparisons.
    """
    model = {"branches": ["sel"], "indexer_block": 1, "selection_loss": 0.05}
    config = make_config(
        train__initial_weights="somewhere", train__trainable=trainable, **{f"model__{key}": v for key, v in model.items()}
    )

    def add_comparisons(events: list[Event]) -> None:
        for event in events:
            if event["kind"] == "start" and indexer:
                event["indexer"] = indexer
            if event["kind"] == "step":
                event["selection_loss"] = selection_loss(event["step"]) * (1 + 5e-5 * math.sin(event["step"] ** 2))
        events[:] = [event for event in events if event["kind"] != "reach"]
        evaluations = [event for event in events if event["kind"] == "eval"]
        for event in evaluations:
            event["loss"] = 2.05 - 1e-5 * event["step"]  # of the same weights, and of more text
            event["bpb"] = event["loss"] / math.log(2)
            comparison = COMPARISON | (changes if event is evaluations[-1] else {})
            own = {"kind": "conversion", "attempt": 1, "step": event["step"], **copy.deepcopy(comparison)}
            if isinstance(own["loss"], dict) and "selected" in own["loss"]:
                own["loss"]["selected"] += event["step"] * 1e-9  # the indexer changes
            events.insert(events.index(event) + 1, {key: value for key, value in own.items() if value is not None})
        edit([event for event in events if event["kind"] == "conversion"])

    return {verdict.name: verdict for verdict in list_verdicts(write_run(folder, config, add_comparisons))}


def rise(step: int) -> float:
    """Return a selection loss that rises by 16% in a run of 200 steps."""
    return 1 + step / 1000


def test_a_good_conversion_passes(tmp_path: Path) -> None:
    found = examine(tmp_path)
    assert {found[name].level for name in ("indexer learns", "attention mass", "converted loss")} == {"passed"}
    assert not {"loss fell", "training loss"} & found.keys()
    assert [verdict.name for verdict in found.values() if verdict.ok is False] == []
    worked, *_, selects = answer_questions(list(found.values()))
    assert "selected blocks +0.0100" in worked.text
    # No facts are retrieved; the attention mass decides.
    assert found["selection finds"].ok is not True and selects.ok and "of the mass of the best blocks" in selects.text
    others = {verdict.name for verdict in list_verdicts(write_run(tmp_path / "other"))}
    assert "loss fell" in others and "converted loss" not in others


@pytest.mark.parametrize(
    ("name", "changes", "level", "text"),
    [
        ("converted loss", {"loss": COMPARISON["loss"] | {"selected": 2.05}}, "warning", "limit: +0.030"),
        ("converted loss", {"loss": COMPARISON["loss"] | {"selected": 2.2}}, "failed", "no better than the nearest"),
        ("converted loss", {"loss": {"dense": 2.0, "nearest": 2.2}}, "failed", "missing"),
        ("converted loss", {"loss": None, "why_not": "all blocks are selected"}, "passed", "+0.0100"),
        ("attention mass", {"attention_mass": [0.97, 0.9, 0.92]}, "warning", "lowest: layer 1 with 90.0%"),
        ("attention mass", {"attention_mass": [0.7] * LAYERS}, "failed", "the indexer is no better"),
        ("attention mass", {"attention_mass": [0.97, None, 0.98]}, "failed", "not finite"),
        ("finite numbers", {"attention_mass": [0.97, 1.5, 0.98]}, "failed", "attention_mass is 1.5"),
        ("indexer learns", {"selection_loss": rise}, "failed", "higher"),
        ("indexer learns", {"selection_loss": rise, "trainable": "all"}, "passed", "25% higher"),
        ("indexer learns", {"selection_loss": lambda step: 1 + step / 500, "trainable": "all"}, "failed", "25% higher"),
        ("indexer learns", {"selection_loss": rise, "trainable": "all", "indexer": "loaded"}, "passed", "25% higher"),
        (
            "indexer learns",
            {"selection_loss": rise, "trainable": "all", "indexer": "new"},
            "failed",
            "required: 1.0% lower",
        ),
        ("indexer learns", {"selection_loss": rise, "indexer": "loaded"}, "passed", "25% higher"),
        ("indexer learns", {"selection_loss": lambda step: 1 + step % 20 / 100 + step / 9e4}, "unknown", "by chance"),
    ],
)
def test_levels(tmp_path: Path, name: str, changes: dict[str, Any], level: str, text: str) -> None:
    verdict = examine(tmp_path, **changes)[name]
    assert (verdict.level, text in verdict.text) == (level, True), verdict.text


def test_a_teacher_whose_predictions_are_lost_gives_a_warning(tmp_path: Path) -> None:
    config = make_config(train__initial_weights="somewhere", train__teacher_weight=1.0, model__attention="dense")
    for folder, at_end, level in (("near", 0.09, "passed"), ("far", 0.11, "warning")):

        def add_divergence(events: list[Event], at_end: float = at_end) -> None:
            steps = [event for event in events if event["kind"] == "step"]
            for event in steps:
                event["teacher_kl"] = at_end if event["step"] > 100 else 0.01

        found = {verdict.name: verdict for verdict in list_verdicts(write_run(tmp_path / folder, config, add_divergence))}
        assert found["teacher"].level == level and "0.0100 at the beginning" in found["teacher"].text
    without = {verdict.name for verdict in list_verdicts(write_run(tmp_path / "other"))}
    assert "teacher" not in without


def test_the_gap_of_a_source_is_a_warning_unless_validation_rises(tmp_path: Path) -> None:
    """The source may have learned from the training text, so the run begins with a gap."""
    source = make_config(train__initial_weights="somewhere", model__attention="dense")
    cases = ((source, 0, "warning"), (source, 0.01, "failed"), (make_config(model__attention="dense"), 0, "failed"))
    for number, (config, rise, level) in enumerate(cases):

        def add_gap(events: list[Event], rise: float = rise) -> None:
            evaluations = [event for event in events if event["kind"] == "eval"]
            for event in evaluations:
                event["bpb"] = 2.2 + (rise if event is evaluations[-1] else 0)
            for event in events:
                if event["kind"] == "step":
                    event["bpb"] = 1.4 + 1e-3 * math.sin(event["step"] ** 2)

        found = {v.name: v for v in list_verdicts(write_run(tmp_path / str(number), config, add_gap))}["generalises"]
        assert found.level == level, found


def set_losses(**losses: float) -> Callable[[list[Event]], None]:
    return lambda events: events[-1]["loss"].update(losses)


def add_to_losses(difference: float) -> Callable[[list[Event]], None]:
    return lambda events: events[-1].update(loss={name: loss + difference for name, loss in events[-1]["loss"].items()})


def repeat_comparison(events: list[Event]) -> None:
    events[-1].update(copy.deepcopy({name: events[-2][name] for name in ("loss", "attention_mass")}))


CONSISTENT, MASS = "consistent numbers", "attention mass"
FAULTS: dict[str, tuple[str, Callable[[list[Event]], None], str]] = {
    "blocks better than all": (
        CONSISTENT,
        set_losses(selected=1.8),
        "selected blocks have a loss of 1.8, dense attention 2",
    ),
    "nearest blocks better than all": (CONSISTENT, set_losses(nearest=1.7), "nearest blocks have a loss of 1.7"),
    "worse than equal probabilities": (CONSISTENT, add_to_losses(8.0), "nats per token with dense attention, highest"),
    "another level than the evaluation": (CONSISTENT, add_to_losses(2.5), "in the comparison and 2.04"),
    "a loss of 0": (CONSISTENT, set_losses(dense=0.0, selected=0.0, nearest=0.0), "a loss of 0 in the comparison"),
    "a frozen trunk that changes": (CONSISTENT, add_to_losses(-0.05), "but only the indexer is trained"),
    "the loss of dense attention": (
        CONSISTENT,
        set_losses(selected=2.0),
        "selected blocks and dense attention have the same",
    ),
    "the comparison before": (CONSISTENT, repeat_comparison, "are those of the comparison before"),
    "equal layers": (
        CONSISTENT,
        lambda events: events[-1].update(attention_mass=[0.97] * LAYERS),
        "attention_mass is the same in all layers",
    ),
    "a lost layer": (
        CONSISTENT,
        lambda events: events[-1].update(attention_mass=[0.97] * (LAYERS - 1)),
        f"attention_mass has {LAYERS - 1} layers, the model {LAYERS}",
    ),
    "a layer without the mass": (
        MASS,
        lambda events: events[-1].update(attention_mass=[0.99, 0.31, 0.98], attention_mass_nearest=[0.4, 0.42, 0.3]),
        "in layer 1 selected blocks have 31.0%, 11.0% below the nearest ones",
    ),
}


@looped
@pytest.mark.parametrize("fault", list(FAULTS))
def test_impossible_comparisons_fail(tmp_path: Path, fault: str) -> None:
    name, edit, text = FAULTS[fault]
    found = examine(tmp_path, edit=edit)[name]
    assert (found.level, text in found.text) == ("failed", True), found


def test_dense_attention_may_change_with_its_weights(tmp_path: Path) -> None:
    found = examine(tmp_path, trainable="all", edit=add_to_losses(-0.05))
    assert found[CONSISTENT].level == "passed", found[CONSISTENT]


def test_the_last_comparison_of_a_finished_run_is_not_lost(tmp_path: Path) -> None:
    def drop_last(events: list[Event]) -> None:
        events.remove([event for event in events if event["kind"] == "reach"][-1])

    for folder, edit, level in (("whole", lambda events: None, "passed"), ("lost", drop_last, "failed")):
        found = {v.name: v for v in list_verdicts(write_run(tmp_path / folder, None, edit))}[CONSISTENT]
        assert found.level == level, found


def test_validation_of_pretrained_weights_is_judged_from_two_evaluations(tmp_path: Path) -> None:
    frozen = {"train__trainable": "indexer", "model__branches": ["sel"], "model__indexer_block": 1}
    frozen |= {"model__selection_loss": 0.05}
    cases = (({}, 1.03, "passed"), ({}, 1.1, "warning"), ({}, 1.3, "failed"), (frozen, 1.03, "failed"))
    for number, (options, factor, level) in enumerate(cases):
        config = make_config(train__initial_weights="somewhere", **options)

        def keep_two(events: list[Event], factor: float = factor) -> None:
            evaluations = [event for event in events if event["kind"] == "eval"]
            events[:] = [event for event in events if event not in evaluations[1:-1]]
            evaluations[0]["bpb"] = 2.2
            evaluations[-1]["bpb"] = 2.2 * factor

        found = {v.name: v for v in list_verdicts(write_run(tmp_path / str(number), config, keep_two))}["loss kept"]
        assert found.level == level, found


def test_a_teacher_without_divergence_fails(tmp_path: Path) -> None:
    config = make_config(train__initial_weights="somewhere", train__teacher_weight=1.0, model__attention="dense")
    for folder, value, text in (("lost", 3.0, "limit: 0.1"), ("equal", 0.0, "is 0 in"), ("missing", None, "0 readings")):

        def set_divergence(events: list[Event], value: float | None = value) -> None:
            for event in events:
                if event["kind"] == "step" and value is not None:
                    event["teacher_kl"] = value

        found = {v.name: v for v in list_verdicts(write_run(tmp_path / folder, config, set_divergence))}["teacher"]
        assert found.level == "failed" and text in found.text, found
