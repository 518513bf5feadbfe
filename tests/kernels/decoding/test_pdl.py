"""Programmatic dependent launch: where kernels wait, and when it is used."""

from __future__ import annotations

import ast

import pytest
import torch
from kernel_sources import FOLDER, TREES, find_launched

from nsa_lab.attention.kernels import launch_table
from nsa_lab.attention.kernels.decoding import decoding_table, pdl

KERNELS = {
    node.name: node
    for path, tree in TREES.items()
    if path.is_relative_to(FOLDER / "decoding")
    for node in ast.walk(tree)
    if isinstance(node, ast.FunctionDef) and node.name in find_launched()
}


def find_early_exits(body: list[ast.stmt], has_waited: bool) -> tuple[bool, list[int]]:
    """Return (True if `body` always calls `pdl_wait`, lines that return or store before it)."""
    early_lines: list[int] = []
    for statement in body:
        if isinstance(statement, ast.If):
            waited_before, then_branch, else_branch = (
                has_waited,
                *(find_early_exits(part, has_waited) for part in (statement.body, statement.orelse)),
            )
            early_lines += then_branch[1] + else_branch[1]
            returns = isinstance(statement.body[-1], ast.Return)
            has_waited = waited_before or (else_branch[0] and (returns or then_branch[0]))
        elif isinstance(statement, ast.For):
            early_lines += find_early_exits(statement.body, has_waited)[1]
        else:
            calls = [ast.unparse(node.func) for node in ast.walk(statement) if isinstance(node, ast.Call)]
            has_waited |= "pdl_wait" in calls
            stores = any(name.split(".")[-1].startswith("store") for name in calls)
            if not has_waited and (stores or isinstance(statement, ast.Return)):
                early_lines.append(statement.lineno)
    return has_waited, early_lines


def test_every_program_waits_before_it_stores_or_returns() -> None:
    assert KERNELS
    for name, kernel in KERNELS.items():
        assert find_early_exits(kernel.body, False) == (True, []), name


def test_pdl_only_on_hopper_with_few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cpu")
    assert pdl.get_pdl_options(device, 1) == {"USE_PDL": False}
    monkeypatch.setattr(launch_table, "supports_pdl", lambda device: True)
    monkeypatch.setattr(pdl, "_has_pdl_option", lambda: True)
    early = {"USE_PDL": True, "launch_pdl": True}
    most = decoding_table.MAX_PDL_TOKENS
    assert [pdl.get_pdl_options(device, tokens) == early for tokens in (1, most, most + 1)] == [True, True, False]
    assert pdl.get_pdl_options(device, 1, can_prefetch=False) == {"USE_PDL": False}
    monkeypatch.setattr(pdl, "_has_pdl_option", lambda: False)
    assert pdl.get_pdl_options(device, 1) == {"USE_PDL": False}
