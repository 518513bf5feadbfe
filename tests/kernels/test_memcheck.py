"""The cases of `memcheck.py` take the paths that they name, and together all paths."""

from __future__ import annotations

import memcheck
import pytest

from nsa_lab.attention.kernels.selected import launch as selected
from nsa_lab.attention.kernels.selected import workspace_pieces


@pytest.mark.parametrize("case", memcheck.CASES, ids=str)
def test_case_takes_its_path(case, monkeypatch):
    for module, name in (
        (selected, "UNION_TOKENS"),
        (workspace_pieces, "SORT_ABOVE_BYTES"),
        (workspace_pieces, "WORKSPACE_BYTES"),
    ):
        monkeypatch.setattr(module, name, getattr(module, name))  # restored after the test
    assert memcheck.force_path(case) == (case.is_union, case.is_sorted, case.in_pieces)


def test_every_path_is_taken():
    taken = {(case.is_union, case.is_sorted, case.in_pieces) for case in memcheck.CASES}
    assert taken >= {(True, False, False), (False, False, False), (False, True, False), (False, True, True)}
