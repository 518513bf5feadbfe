"""Tables and the figure of conversion.json."""

from __future__ import annotations

from typing import Any

import pytest

from nsa_lab.figures import plot_conversion
from nsa_lab.workbook.conversion import make_loss_table, make_mass_table

FRACTIONS = {"chosen": [0.99, 0.98], "nearest": [0.9, 0.8], "random": [0.7, 0.6], "chosen_free": [0.5, 0.5]}
RESULT: dict[str, Any] = {
    "ranges": [[0, 256], [256, 512]],
    "losses": [
        {"attention": "dense", "blocks": None, "windows": [[1.0, 2.0], [3.0, 2.0]]},
        {"attention": "selected", "blocks": 8, "windows": [[1.5, 1.5], [2.5, 2.0]]},
    ],
    "mass": [{"blocks": 8, "windows": 2, "fractions": FRACTIONS}, {"blocks": 32, "windows": 0, "fractions": {}}],
}


def test_losses_are_means_over_windows_and_differences_from_dense_attention() -> None:
    table = make_loss_table({"texts": {"long": RESULT}}, "long").to_markdown()
    header, _, dense, selected = table.strip().splitlines()
    assert "0 to 255" in header and "256 to 511" in header
    assert "2.0000" in dense and "+0.0000" in selected and "-0.2500" in selected


def test_mass_is_by_layer_and_leaves_out_numbers_of_blocks_that_select_everything() -> None:
    header, _, *layers = make_mass_table({"texts": {"validation": RESULT}}).to_markdown().strip().splitlines()
    assert "selected, 8" in header and "32" not in header
    assert len(layers) == 2 and "98.0%" in layers[1] and "60.0%" in layers[1]


def test_the_figure_has_differences_from_the_control_and_the_mass_of_the_given_blocks() -> None:
    losses = [
        *RESULT["losses"],
        {"attention": "window", "blocks": 3, "windows": [[2.0, 2.0], [2.0, 4.0]]},
        {"attention": "control", "blocks": None, "windows": [[1.0, 1.0], [2.0, 1.0]]},
    ]
    record = {"run": "converted", "step": 100, "texts": {"long": {**RESULT, "losses": losses}}}
    differences, mass = plot_conversion(record, "long", 8).axes
    drawn = {container.get_label(): container.lines[0].get_ydata().tolist() for container in differences.containers}
    assert drawn == {"selected": [0.5, 0.75], "window": [0.5, 2.0], "dense": [0.5, 1.0]}
    # 1.96 standard errors of two windows: half of their difference, times 1.96.
    [low, high] = differences.containers[1].lines[2][0].get_segments()[1][:, 1]
    assert (low, high) == pytest.approx((2.0 - 1.96, 2.0 + 1.96))
    assert {line.get_label(): line.get_ydata().tolist() for line in mass.lines} == {
        "selected": [0.99, 0.98],
        "nearest": [0.9, 0.8],
        "random": [0.7, 0.6],
    }
    for text, blocks in (("short", 8), ("long", 9)):
        with pytest.raises(ValueError, match="the record has long with"):
            plot_conversion(record, text, blocks)
