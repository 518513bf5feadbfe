"""Tables of `conversion.json`: loss by attention and position, and attention mass by layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from nsa_lab.evaluate.conversion import VALIDATION
from nsa_lab.runs.tables import Table, TableColumn


def make_loss_table(record: Mapping[str, Any], text: str = VALIDATION) -> Table:
    """Return the loss of dense attention in nats per token, and of each other row minus it, by position range.

    record: as `evaluate_conversion` returns it. Raises KeyError for a text that it does not have.
    """
    result = record["texts"][text]
    losses = [(row["attention"], row["blocks"], np.mean(row["windows"], axis=0)) for row in result["losses"]]
    (dense,) = (mean for attention, _, mean in losses if attention == "dense")
    ranges = [TableColumn(f"{first:,} to {last - 1:,}", "right") for first, last in result["ranges"]]
    rows = [["dense", "all", *(f"{loss:.4f}" for loss in dense)]]
    rows += [
        [attention, "all" if blocks is None else f"{blocks}", *(f"{loss:+.4f}" for loss in mean - dense)]
        for attention, blocks, mean in losses
        if attention != "dense"
    ]
    return Table(["attention", TableColumn("blocks", "right"), *ranges], rows)


def make_mass_table(record: Mapping[str, Any], text: str = VALIDATION) -> Table:
    """Return the attention mass in the selected, nearest and random blocks, relative to the oracle's, by layer."""
    names = {"chosen": "selected", "nearest": "nearest", "random": "random"}
    measured = [mass for mass in record["texts"][text]["mass"] if mass["fractions"]]
    columns = [TableColumn(f"{label}, {mass['blocks']}", "right") for mass in measured for label in names.values()]
    layers = zip(*(mass["fractions"][name] for mass in measured for name in names), strict=True)
    rows = [[f"{layer}", *(f"{share:.1%}" for share in shares)] for layer, shares in enumerate(layers)]
    return Table([TableColumn("layer", "right"), *columns], rows)
