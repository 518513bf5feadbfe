"""Every part of `bench attention` at one small shape; shapes.py draws more of them."""

from __future__ import annotations

import pytest
import shapes
import torch

from nsa_lab.attention import geometry
from nsa_lab.config import NSAConfig


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")
def test_every_part_of_a_shape_matches_the_reference() -> None:
    """A small shape with more blocks than n_sel. Random shapes have too few blocks or are too long for the interpreter."""
    nsa = NSAConfig(l=8, d=4, l_sel=16, n_sel=3, w=5)
    shape = shapes.RandomShape(T=69, B=1, h=3, G=1, D=16, Dv=48, dtype=torch.float16, nsa=nsa)
    assert geometry.num_selection(shape.T, nsa) > nsa.n_sel
    errors = shapes.compute_worst_errors(shape, seed=1)
    assert {quantity.split()[0] for quantity in errors} == {"compressed", "choice", "selected", "window", "gate", "whole"}
    assert max(errors.values()) <= 1, errors
