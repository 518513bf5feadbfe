"""Texts of the notebooks."""

from __future__ import annotations

import torch

from nsa_lab.workbook.examples import insert_fact_in_library, make_text_example, read_standard_library


def test_fact_is_inserted_once_at_its_depth() -> None:
    prompt, answer = insert_fact_in_library(4096, 0.3, "argparse.py", seed=1)
    assert len(prompt) + len(answer) == 4096 and prompt.count(answer) == 1
    assert prompt.endswith(b"? A: ") and 0.29 < prompt.index(answer) / 4096 < 0.33
    assert prompt[:1000].decode() in read_standard_library(4 * 4096, "argparse.py")
    assert (
        insert_fact_in_library(4096, 0.3, "argparse.py", seed=1)
        == (prompt, answer)
        != insert_fact_in_library(4096, 0.3, "argparse.py")
    )


def test_slice_document() -> None:
    whole = make_text_example("a text, and another text", head_dim=4)
    part = whole.slice_document(8, 24)
    assert (part.text, part.length) == ("and another text", 16)
    assert torch.equal(part.q, whole.q[:, 8:24]) and torch.equal(part.v_win, whole.v_win[:, 8:24])
