"""The code of notebooks 01 and 02 equals the library, also for odd shapes: NSA in 40 lines, indexer and selection loss."""

from __future__ import annotations

import ast
import math

import jupytext
import pytest
import torch
from looping import looped

from nsa_lab import NSAttention
from nsa_lab.attention import compress, reference, selection_loss
from nsa_lab.attention.compression import BlockPool
from nsa_lab.config import NSAConfig

from .conftest import ROOT

NAME = "native_sparse_attention"
SIZES = ("l", "d", "l_sel", "n_sel", "w")


@pytest.fixture(scope="module")
def cell() -> str:
    notebook = jupytext.read(ROOT / "notebooks" / "01_branches.py")
    (source,) = [cell.source for cell in notebook.cells if f"def {NAME}(" in cell.source]
    return source


@looped
@pytest.mark.parametrize("heads, groups", [(4, 2), (3, 1), (2, 2)])
@pytest.mark.parametrize(
    "length, sizes",
    [(1, (8, 4, 8, 4, 12)), (7, (8, 4, 8, 4, 12)), (9, (8, 8, 8, 3, 1)), (61, (4, 4, 8, 3, 5)), (130, (8, 2, 6, 4, 200))],
)
def test_forty_lines_equal_the_layer(cell: str, heads: int, groups: int, length: int, sizes: tuple[int, ...]) -> None:
    names: dict = {}
    exec(cell, names)  # the cell uses no name of another cell
    nsa = dict(zip(SIZES, sizes, strict=True))
    torch.manual_seed(length)
    layer = NSAttention(24, heads, groups, head_dim=8, nsa=NSAConfig(**nsa)).double()
    weights = {name.split(".")[1]: weight for name, weight in layer.named_parameters()}
    x = torch.randn(length, 24, dtype=torch.float64)
    torch.testing.assert_close(names[NAME](x, weights, heads, groups, **nsa), layer(x[None])[0], rtol=0, atol=1e-12)


@pytest.fixture(scope="module")
def lessons() -> dict:
    """Return the functions that notebook 02 defines for the indexer and its loss, with their helpers."""
    names: dict = {"torch": torch, "math": math, "Tensor": torch.Tensor, "NSAConfig": NSAConfig}
    # Only the definitions: the rest of a cell may need earlier cells.
    parts = list(list_functions("02_in_practice").values())
    exec(compile(ast.Module(body=list(parts), type_ignores=[]), "02_in_practice", "exec"), names)
    return names


def list_functions(stem: str) -> dict[str, ast.FunctionDef]:
    notebook = jupytext.read(ROOT / "notebooks" / f"{stem}.py")
    code = [cell.source for cell in notebook.cells if cell.cell_type == "code" and "load_ext" not in cell.source]
    return {part.name: part for source in code for part in ast.parse(source).body if isinstance(part, ast.FunctionDef)}


def test_functions_of_notebook_01_are_the_same_in_notebook_02() -> None:
    first, second = list_functions("01_branches"), list_functions("02_in_practice")
    common = first.keys() & second.keys()
    assert common == {"check_equal", "expand_groups", "get_block_mask", "select_by_importance"}
    assert all(ast.dump(first[name]) == ast.dump(second[name]) for name in common)


@looped
@pytest.mark.parametrize("length, block, l_sel", [(1, 2, 8), (7, 8, 8), (61, 2, 6), (61, 3, 6), (130, 1, 5), (97, 8, 8)])
def test_indexer_and_loss_equal_the_library(lessons: dict, length: int, block: int, l_sel: int) -> None:
    torch.manual_seed(length)
    nsa = NSAConfig(l=block, d=block, l_sel=l_sel, n_sel=4, phi="pool")
    q, k, k_sel = (torch.randn(length, 2, 6, dtype=torch.float64) for _ in range(3))
    attention_q, phi = torch.randn(length, 6, 6, dtype=torch.float64), BlockPool(block, 6).double()
    for weight in phi.parameters():
        torch.nn.init.normal_(weight)
    importance = lessons["compute_index_importance"](q, k, block, nsa, phi.score, phi.place)
    k_cmp = compress(k[None], nsa, phi)
    _, lse = reference.compressed_attention(q[None], k_cmp, k_cmp, nsa)
    # The library computes importance in float32.
    torch.testing.assert_close(
        importance, reference.block_importance(q[None], k_cmp, lse, nsa)[0].double(), rtol=0, atol=1e-6, check_dtype=False
    )
    loss = lessons["compute_selection_loss"](importance, attention_q, k_sel, nsa)
    expected = selection_loss(q[None], k_cmp, k_sel[None], nsa, attention_q=attention_q[None], n_queries=None)
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-12)


def test_at_most_forty_lines(cell: str) -> None:
    assert len([line for line in cell.splitlines() if line.strip()]) <= 40
