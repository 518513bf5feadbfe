"""Every part of `bench attention` at one small shape, and the shapes that shapes.py draws for a GPU."""

from __future__ import annotations

import pytest
import shapes
import torch

from nsa_lab.attention import geometry, kernels
from nsa_lab.config import NSAConfig


def test_random_shapes_are_supported_and_cover_every_width_and_block() -> None:
    drawn = [shapes.draw_shape(number) for number in range(200)]
    assert drawn == [shapes.draw_shape(number) for number in range(200)] and len({str(shape) for shape in drawn}) == 200
    assert not [shape for shape in drawn if kernels.find_shape_problem(shape.nsa, shape.D, shape.Dv)]
    assert all(shape.T % 2 for shape in drawn)
    assert {shape.h for shape in drawn} == set(shapes.HEADS)
    assert {shape.D for shape in drawn} == set(range(16, 257, 16)) == {shape.Dv for shape in drawn}
    assert {shape.nsa.l_sel for shape in drawn} >= {16, 48, 80, 128} and min(shape.nsa.w for shape in drawn) == 1
    assert any(shape.Dv != shape.D for shape in drawn) and len({shape.dtype for shape in drawn}) > 1


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
