"""Kernels that begin before the ones ahead have ended: where they wait, and when they are launched so."""

from __future__ import annotations

import ast

import pytest
import torch
from kernel_sources import FOLDER, TREES, find_launched

from nsa_lab.attention.kernels import launch_table
from nsa_lab.attention.kernels.decoding import pdl

KERNELS = {
    node.name: node
    for path, tree in TREES.items()
    if path.is_relative_to(FOLDER / "decoding")
    for node in ast.walk(tree)
    if isinstance(node, ast.FunctionDef) and node.name in find_launched()
}


def find_early_exits(body: list[ast.stmt], taken: bool) -> tuple[bool, list[int]]:
    """Whether the turn has been taken for certain at the end of `body`, and the lines that return or store before it is."""
    early: list[int] = []
    for statement in body:
        if isinstance(statement, ast.If):
            whole, one, other = taken, *(find_early_exits(part, taken) for part in (statement.body, statement.orelse))
            early += one[1] + other[1]
            returned = isinstance(statement.body[-1], ast.Return)
            taken = whole or (other[0] and (returned or one[0]))
        elif isinstance(statement, ast.For):
            early += find_early_exits(statement.body, taken)[1]
        else:
            calls = [ast.unparse(node.func) for node in ast.walk(statement) if isinstance(node, ast.Call)]
            taken |= "take_turn" in calls
            stores = any(name.split(".")[-1].startswith("store") for name in calls)
            if not taken and (stores or isinstance(statement, ast.Return)):
                early.append(statement.lineno)
    return taken, early


@pytest.mark.parametrize("name", sorted(KERNELS))
def test_every_program_takes_its_turn_before_it_stores_or_ends(name: str) -> None:
    assert find_early_exits(KERNELS[name].body, False) == (True, [])


def test_few_tokens_on_hopper_alone_are_early(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cpu")
    assert pdl.get_pdl_options(device, 1) == {"EARLY": False}
    monkeypatch.setattr(launch_table, "supports_pdl", lambda device: True)
    monkeypatch.setattr(pdl, "_has_pdl_option", lambda: True)
    early = {"EARLY": True, "launch_pdl": True}
    assert [pdl.get_pdl_options(device, tokens) == early for tokens in (1, 4, 5)] == [True, True, False]
    assert pdl.get_pdl_options(device, 1, can_prefetch=False) == {"EARLY": False}
    monkeypatch.setattr(pdl, "_has_pdl_option", lambda: False)
    assert pdl.get_pdl_options(device, 1) == {"EARLY": False}
