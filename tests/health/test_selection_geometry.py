"""Selected keys of a query, and bounds of their overlap with the window, from lengths and configuration."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from fake_run import LAYERS, Event, make_config, write_run

from nsa_lab.attention import geometry
from nsa_lab.config import NSAConfig, RunConfig
from nsa_lab.health import Verdict, examine
from nsa_lab.health.selection_geometry import MEASURED_SEQUENCES, MEASURED_TOKENS, count_keys
from nsa_lab.train import validation

# A window within the two latest blocks, which are always selected; a longer one; one as long as the text.
WITHIN, LONGER, WHOLE = 16, 44, 128
LENGTH = 128


def make_nsa(w: int, **options: int) -> NSAConfig:
    return NSAConfig.model_validate({"l": 8, "d": 4, "l_sel": 16, "w": w, "n_sel": 4} | options)


def test_counts_are_those_of_all_selections() -> None:
    """Go through every possible selection of every query."""
    for w, options in itertools.product(
        (1, WITHIN, 23, LONGER, WHOLE), ({}, {"sink_blocks": 2}, {"sink_blocks": 0, "n_sel": 5}, {"local_blocks": 3})
    ):
        nsa = make_nsa(w, **options)
        for length in (1, 15, 40, 101, LENGTH):
            keys, least, largest = 0, 0, 0
            for t in range(length):
                own = t // nsa.l_sel
                forced = {*range(min(nsa.sink_blocks, own + 1)), *range(max(0, own + 1 - nsa.local_blocks), own + 1)}
                others, free = sorted({*range(own + 1)} - forced), min(nsa.n_sel, own + 1) - len(forced)
                counts = [
                    geometry.keys_of_blocks(torch.tensor(sorted(forced | {*chosen})), torch.tensor(t), nsa)
                    for chosen in itertools.combinations(others, free)
                ]
                in_window = [int(own_window.sum()) for _, own_window in counts]
                keys, least, largest = keys + int(counts[0][0].sum()), least + min(in_window), largest + max(in_window)
            counted = count_keys(length, nsa)
            assert counted.selected == pytest.approx(keys / length), (w, options, length)
            assert counted.window == pytest.approx(sum(min(t + 1, w) for t in range(length)) / length)
            assert (counted.least_overlap, counted.largest_overlap) == pytest.approx((least / keys, largest / keys))


def test_measured_text_is_that_of_the_trainer() -> None:
    assert (MEASURED_SEQUENCES, MEASURED_TOKENS) == (validation.STATISTICS_SEQUENCES, validation.MAX_MEASURED_TOKENS)


def make_short_config(w: int, documents: str = "cross") -> RunConfig:
    sizes = {
        f"nsa__{name}": value
        for name, value in make_nsa(w).model_dump().items()
        if name in ("l", "d", "l_sel", "n_sel", "w")
    }
    return make_config(train__seq_len=LENGTH, data__documents=documents, **sizes)


def examine_statistics(folder: Path, config: RunConfig, **values: float) -> dict[str, Verdict]:
    """Return the verdicts on a run whose readings of the layers have these values."""

    def edit(events: list[Event]) -> None:
        for event in (event for event in events if "sel_reuse" in event):
            event.update({name: [value] * LAYERS for name, value in values.items()})
        for event in (event for event in events if event["kind"] == "reach"):
            event["length"] = LENGTH

    return {verdict.name: verdict for verdict in examine(write_run(folder, config, edit)).verdicts}


def test_overlap_that_only_geometry_determines_may_repeat(tmp_path: Path) -> None:
    folders = (tmp_path / str(number) for number in itertools.count())
    for w in (WITHIN, LONGER, WHOLE):
        counts = count_keys(LENGTH, make_nsa(w))
        middle, is_fixed = (counts.least_overlap + counts.largest_overlap) / 2, w != LONGER
        for documents, keys, overlap, may_repeat in (
            ("cross", counts.selected, counts.least_overlap, True),
            ("cross", counts.selected, counts.largest_overlap, True),
            ("cross", counts.selected, middle, is_fixed),
            ("mask", counts.selected, counts.least_overlap, True),
            ("mask", counts.selected, middle, is_fixed),
            ("mask", 0.9 * counts.selected, middle, is_fixed),
            ("mask", math.nan, middle, is_fixed),
        ):
            values = {"sel_window_overlap": overlap} | (
                {} if math.isnan(keys) else {"sel_keys": keys, "sel_keys_most": 64.0}
            )
            verdict = examine_statistics(next(folders), make_short_config(w, documents), **values)["repeated values"]
            assert verdict.ok is may_repeat, (w, documents, keys, overlap, verdict.text)


def test_impossible_keys_and_overlaps_fail(tmp_path: Path) -> None:
    folders = (tmp_path / str(number) for number in itertools.count())
    counts = count_keys(LENGTH, make_nsa(LONGER))
    for documents, keys, overlap, problem in (
        ("cross", counts.selected, 0.7, None),
        ("cross", 0.9 * counts.selected, 0.7, "selected keys on average"),
        ("cross", 1.1 * counts.selected, 0.7, "selected keys on average"),
        ("cross", counts.selected, counts.least_overlap - 0.01, "but every selection has"),
        ("cross", counts.selected, counts.largest_overlap + 0.01, "but every selection has"),
        # Whole documents of 64 tokens, and as many of a single token.
        ("mask", 16.8, 0.99, None),
        ("mask", 0.9 * counts.selected, 0.7, None),
        ("mask", 0.1 * counts.selected, 0.7, "selected keys on average"),
        ("mask", 0.5 * counts.selected, 0.3, "but every selection has"),
    ):
        config = make_short_config(LONGER, documents)
        values = {"sel_window_overlap": overlap, "sel_keys": keys, "sel_keys_most": 64.0}
        verdict = examine_statistics(next(folders), config, **values)["consistent numbers"]
        assert verdict.ok is (problem is None) and (problem or "") in verdict.text, (documents, keys, overlap, verdict.text)


def test_ratios_of_counts_may_return(tmp_path: Path) -> None:
    """With few queries there are few ratios; a loss that takes turns among as few values is no measurement."""

    def take_turns(name: str) -> Callable[[list[Event]], None]:
        def edit(events: list[Event]) -> None:
            for number, event in enumerate(event for event in events if event["kind"] == "step"):
                value = 0.6 + 0.01 * (number * number % 7)
                event[name] = [value] * LAYERS if isinstance(event.get(name), list) else value

        return edit

    config = make_config(train__log_every=2, train__stats_every=2)
    for name, may_return in (("sel_reuse", True), ("sel_distance", True), ("sel_sink_share", False), ("grad_norm", False)):
        run = write_run(tmp_path / name, config, take_turns(name))
        verdict = next(verdict for verdict in examine(run).verdicts if verdict.name == "repeated values")
        assert verdict.ok is may_return, (name, verdict.text)
