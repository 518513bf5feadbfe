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
from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from nsa_lab.attention.kernels import launch_table


@triton.jit
def pdl_wait(EARLY: tl.constexpr):
    """Until the kernel ahead has ended and what it wrote can be seen; then the kernel behind may begin."""
    if EARLY:
        # Triton's own words for these two do not compile in 3.4.
        tl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
        tl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )


@functools.cache
def _has_pdl_option() -> bool:
    try:
        from triton.backends.nvidia.compiler import CUDAOptions
    except ImportError:  # a Triton for other GPUs alone
        return False
    return "launch_pdl" in CUDAOptions.__dataclass_fields__  # from Triton 3.4 on


def get_pdl_options(device: torch.device, n_tokens: int, can_prefetch: bool = True) -> dict[str, Any]:
    """How a kernel for so many new tokens of all sequences is launched: whether EARLY, and what tells CUDA so."""
    few = n_tokens <= launch_table.MAX_PDL_TOKENS
    if not (can_prefetch and few and launch_table.supports_pdl(device) and _has_pdl_option()):
        return {"EARLY": False}
    return {"EARLY": True, "launch_pdl": True}
