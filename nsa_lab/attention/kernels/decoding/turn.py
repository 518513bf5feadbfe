"""Kernels of a chain that begin before the ones ahead of them have ended (programmatic dependent launch, Hopper and up).

The kernels of a decoding step take a few microseconds each, of which much is waiting: for the launch, and for weights and
lengths that nothing near has written. A kernel that was launched early does that beside the one ahead, and takes its turn
before it reads what that one has written, or writes anything itself: memory that it was given may be in use there.

Rules
* Every program takes its turn, whether or not there is anything to do. Only then may the kernel behind begin, so that no
  more than one kernel is ever ahead: all that was launched before that one has ended and can be seen.
* So a kernel reads early what was not written by the launch just before it. Within `cached_attention` that is known of all
  kernels but the first; elsewhere whoever launches says that it is `settled`.
"""

# Functions under triton.jit are Triton's language: their parameters have no types that Python could name.
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportMissingTypeStubs=false
# pyright: reportOptionalCall=false
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from nsa_lab.attention.kernels import launch_table

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # before Triton 3.3
    gdc_launch_dependents = gdc_wait = None


@triton.jit
def take_turn(EARLY: tl.constexpr):
    """Until the kernel ahead has ended and what it wrote can be seen; then the kernel behind may begin."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()


def turn(device: torch.device, settled: bool = True) -> dict[str, Any]:
    """How a kernel of the chain is launched: whether EARLY, and what tells CUDA so."""
    if not settled or gdc_wait is None or not launch_table.begins_early(device):
        return {"EARLY": False}
    return {"EARLY": True, "launch_pdl": True}
