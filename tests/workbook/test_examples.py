"""Texts that the notebooks look at."""

from __future__ import annotations

from nsa_lab.workbook.examples import fact_in_library, standard_library_text


def test_a_fact_in_the_library_is_told_once_at_its_depth_and_asked_for_at_the_end() -> None:
    prompt, answer = fact_in_library(4096, 0.3, "argparse.py", seed=1)
    assert len(prompt) + len(answer) == 4096 and prompt.count(answer) == 1
    assert prompt.endswith(b"? A: ") and 0.29 < prompt.index(answer) / 4096 < 0.33
    assert prompt[:1000].decode() in standard_library_text(4 * 4096, "argparse.py")
    assert (
        fact_in_library(4096, 0.3, "argparse.py", seed=1) == (prompt, answer) != fact_in_library(4096, 0.3, "argparse.py")
    )
