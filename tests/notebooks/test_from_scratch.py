"""Notebook 01 ends with all of NSA in 40 lines: they are held against the library's layer, on odd shapes too."""

from __future__ import annotations

import jupytext
import pytest
import torch

from nsa_lab import NSAttention
from nsa_lab.config import NSAConfig

from .conftest import ROOT

NAME = "native_sparse_attention"
SIZES = ("l", "d", "l_sel", "n_sel", "w")


@pytest.fixture(scope="module")
def cell() -> str:
    notebook = jupytext.read(ROOT / "notebooks" / "01_branch_derivations.py")
    (source,) = [cell.source for cell in notebook.cells if f"def {NAME}(" in cell.source]
    return source


@pytest.mark.parametrize("heads, groups", [(4, 2), (3, 1), (2, 2)])
@pytest.mark.parametrize(
    "length, sizes",
    [(1, (8, 4, 8, 4, 12)), (7, (8, 4, 8, 4, 12)), (9, (8, 8, 8, 3, 1)), (61, (4, 4, 8, 3, 5)), (130, (8, 2, 6, 4, 200))],
)
def test_the_forty_lines_are_the_layer(cell: str, heads: int, groups: int, length: int, sizes: tuple[int, ...]) -> None:
    names: dict = {}
    exec(cell, names)  # the cell stands alone: no name of another one
    nsa = dict(zip(SIZES, sizes, strict=True))
    torch.manual_seed(length)
    layer = NSAttention(24, heads, groups, head_dim=8, nsa=NSAConfig(**nsa)).double()
    weights = {name.split(".")[1]: weight for name, weight in layer.named_parameters()}
    x = torch.randn(length, 24, dtype=torch.float64)
    torch.testing.assert_close(names[NAME](x, weights, heads, groups, **nsa), layer(x[None])[0], rtol=0, atol=1e-12)


def test_they_are_forty_at_most(cell: str) -> None:
    assert len([line for line in cell.splitlines() if line.strip()]) <= 40
