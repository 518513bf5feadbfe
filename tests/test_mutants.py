"""The planted faults of tests/mutants apply to the source, and the tests that must catch them exist."""

from __future__ import annotations

from mutants.run import list_missing_tests, list_stale


def test_every_mutant_applies_to_the_source() -> None:
    assert not list_stale()


def test_every_test_that_must_catch_a_mutant_exists() -> None:
    """A renamed test would leave its mutants without a test."""
    assert not list_missing_tests()
