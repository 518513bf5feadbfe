"""Names of kernels: a profile is read by them."""

from __future__ import annotations

import pytest
from kernel_sources import find_constants_from_calls, find_jitted, find_launched, find_launched_names

from nsa_lab.attention.kernels.band.band_ranges import name_by_branch
from nsa_lab.attention.kernels.kernel_names import KERNEL_PARTS, get_kernel_part


def test_every_launched_kernel_has_a_prefix_and_a_part() -> None:
    assert len(find_launched()) >= 16
    assert {name for name in find_jitted() if name.startswith("nsa_")} == find_launched(), (
        "only launched kernels have the prefix nsa_"
    )
    for name in find_launched_names():
        assert sum(name.startswith(prefix) for prefix in KERNEL_PARTS) == 1, name
    assert {get_kernel_part(name) for name in find_launched_names()} == set(KERNEL_PARTS.values())


def test_no_constexpr_is_assigned_from_a_jit_call() -> None:
    """Before Triton 3.7 the result of such a call is a runtime value, which does not compile where a constant is needed."""
    assert find_constants_from_calls() == []


@pytest.mark.parametrize("name", ["_gather_kernel", "nsa_lab::nsa_fwd", "void pytorch_flash::flash_fwd_kernel"])
def test_other_kernels_have_no_part(name: str) -> None:
    assert get_kernel_part(name) is None


@pytest.mark.parametrize(("window", "name"), [(0, "nsa_compressed_dq"), (1, "nsa_window_dq"), (512, "nsa_window_dq")])
def test_band_kernels_are_named_by_branch(window: int, name: str) -> None:
    class Specialization:
        constants = {"W": window, "HEADS": 6}  # noqa: RUF012

    assert name_by_branch("dq")(Specialization()) == name
