"""What `memcheck.py` shows a memory checker is what it says: every path, among its cases, and each case on its own."""

from __future__ import annotations

import memcheck
import pytest

from nsa_lab.attention.kernels.selected import launch as selected
from nsa_lab.attention.kernels.selected import workspace_pieces


@pytest.mark.parametrize("case", memcheck.CASES, ids=str)
def test_a_case_takes_the_path_it_names(case, monkeypatch):
    for module, name in (
        (selected, "UNION_TOKENS"),
        (workspace_pieces, "ORDERED_BYTES"),
        (workspace_pieces, "WORKSPACE_BYTES"),
    ):
        monkeypatch.setattr(module, name, getattr(module, name))  # put back afterwards
    assert memcheck.force_path(case) == (case.union, case.ordered, case.in_pieces)


def test_every_path_is_taken():
    taken = {(case.is_union, case.is_sorted, case.in_pieces) for case in memcheck.CASES}
    assert taken >= {(True, False, False), (False, False, False), (False, True, False), (False, True, True)}
