"""Notebook 01 has all of NSA in 40 lines, and what teaches the choice: held against the library, on odd shapes too."""

from __future__ import annotations

import ast
import math

import jupytext
import pytest
import torch

from nsa_lab import NSAttention
from nsa_lab.attention import compress, reference, selection_loss
from nsa_lab.attention.compression import BlockPool
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


@pytest.fixture(scope="module")
def lessons() -> dict:
    """What the cells define that teach the choice, and the helpers that they use."""
    notebook = jupytext.read(ROOT / "notebooks" / "01_branch_derivations.py")
    names: dict = {"torch": torch, "math": math, "Tensor": torch.Tensor, "NSAConfig": NSAConfig}
    for defined in ("spread", "inside", "index_importance", "choice_loss"):
        (source,) = [cell.source for cell in notebook.cells if f"\ndef {defined}(" in f"\n{cell.source}"]
        # The definitions alone: a cell may go on with what needs the cells before it.
        parts = [part for part in ast.parse(source).body if isinstance(part, ast.FunctionDef)]
        exec(compile(ast.Module(body=list(parts), type_ignores=[]), defined, "exec"), names)
    return names


@pytest.mark.parametrize("length, block, l_sel", [(1, 2, 8), (7, 8, 8), (61, 2, 6), (61, 3, 6), (130, 1, 5), (97, 8, 8)])
def test_the_indexer_and_its_loss_are_the_librarys(lessons: dict, length: int, block: int, l_sel: int) -> None:
    torch.manual_seed(length)
    nsa = NSAConfig(l=block, d=block, l_sel=l_sel, n_sel=4, phi="pool")
    q, k, k_sel = (torch.randn(length, 2, 6, dtype=torch.float64) for _ in range(3))
    looking, phi = torch.randn(length, 6, 6, dtype=torch.float64), BlockPool(block, 6).double()
    for weight in phi.parameters():
        torch.nn.init.normal_(weight)
    found = lessons["index_importance"](q, k, block, nsa, phi.score, phi.place)
    k_cmp = compress(k[None], nsa, phi)
    _, lse = reference.compressed_attention(q[None], k_cmp, k_cmp, nsa)
    # The library ranks in float32.
    torch.testing.assert_close(
        found, reference.block_importance(q[None], k_cmp, lse, nsa)[0].double(), rtol=0, atol=1e-6, check_dtype=False
    )
    loss = lessons["choice_loss"](found, looking, k_sel, nsa)
    wanted = selection_loss(q[None], k_cmp, k_sel[None], nsa, attention_q=looking[None], n_queries=None)
    torch.testing.assert_close(loss, wanted, rtol=0, atol=1e-12)


def test_they_are_forty_at_most(cell: str) -> None:
    assert len([line for line in cell.splitlines() if line.strip()]) <= 40
