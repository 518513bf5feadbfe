"""The cases of memcheck.py take the paths that they name, and together they take every path."""

from __future__ import annotations

import memcheck
import pytest

from nsa_lab.attention.kernels.selected import launch as selected
from nsa_lab.attention.kernels.selected import workspace_pieces


def test_cases_take_every_path(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = ((selected, "UNION_TOKENS"), (workspace_pieces, "SORT_ABOVE_BYTES"), (workspace_pieces, "WORKSPACE_BYTES"))
    for module, name in limits:
        monkeypatch.setattr(module, name, getattr(module, name))  # restores it at the end
    for case in memcheck.CASES:
        assert memcheck.force_path(case) == (case.is_union, case.is_sorted, case.in_pieces), case
    paths = {(case.is_union, case.is_sorted, case.in_pieces) for case in memcheck.CASES}
    assert paths >= {(True, False, False), (False, False, False), (False, True, False), (False, True, True)}
