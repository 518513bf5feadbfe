"""A profile can be read by the names of the kernels alone."""

from __future__ import annotations

import pytest
from kernel_sources import constants_from_calls, jitted, launched, launched_names

from nsa_lab.attention.kernels.band.bounds import named_by_branch
from nsa_lab.attention.kernels.vocabulary import KERNEL_PARTS, part_of_kernel


def test_every_kernel_that_is_launched_has_a_name_of_ours_and_a_part() -> None:
    assert len(launched()) >= 16
    assert {name for name in jitted() if name.startswith("nsa_")} == launched(), "only what is launched has such a name"
    for name in launched_names():
        assert sum(name.startswith(prefix) for prefix in KERNEL_PARTS) == 1, name
    assert {part_of_kernel(name) for name in launched_names()} == set(KERNEL_PARTS.values())


def test_no_constant_is_what_a_function_of_tritons_gives() -> None:
    """Before Triton 3.7 that is a number of the running kernel, and whatever needs a constant does not compile."""
    assert constants_from_calls() == []


@pytest.mark.parametrize("name", ["_gather_kernel", "nsa_lab::nsa_fwd", "void pytorch_flash::flash_fwd_kernel"])
def test_other_names_have_no_part(name: str) -> None:
    assert part_of_kernel(name) is None


@pytest.mark.parametrize(("window", "name"), [(0, "nsa_compressed_dq"), (1, "nsa_window_dq"), (512, "nsa_window_dq")])
def test_a_kernel_of_the_band_is_named_by_its_branch(window: int, name: str) -> None:
    class Specialization:
        constants = {"W": window, "HEADS": 6}  # noqa: RUF012

    assert named_by_branch("dq")(Specialization()) == name
