"""Programmatic dependent launch (PDL, Hopper and later): kernels that start before the previous kernel has ended.

The kernels of a decoding step take a few microseconds each, and much of this is latency: of the launch, and of loading
weights and lengths that no recent kernel has written. A kernel launched early overlaps this with the previous kernel. It
calls `pdl_wait` before it reads what the previous kernel has written, and before it writes anything, because its output
memory may still be in use there.

Rules
* Every program calls `pdl_wait`, even if it has nothing to do. Only then may the next kernel start, so at most one earlier
  kernel is still running: all launches before that one have ended and their writes are visible.
* Therefore a kernel may load before `pdl_wait` whatever the launch directly before it did not write. The kernels of
  `cached_attention` load only lengths, gates and index keys, which were written earlier. In other places the caller states
  it by `can_prefetch`. A kernel that has no registers for it prefetches to the L2.
"""

# Parameters of triton.jit functions have no Python types.
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportMissingTypeStubs=false
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from nsa_lab.attention.kernels import launch_table
from nsa_lab.attention.kernels.decoding import decoding_table


@triton.jit
def pdl_wait(USE_PDL: tl.constexpr):
    """Wait until the previous kernel has ended and its writes are visible, then allow the next kernel to start."""
    if USE_PDL:
        # Triton's functions for these two instructions do not compile in Triton 3.4.
        tl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
        tl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def prefetch_to_l2(pointers, mask):
    """Copy the cache lines at `pointers` to the L2 where `mask` is True: memory that is read after `pdl_wait`."""
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.b32 $0, 0; }",
        "=r,l,r",
        [pointers.to(tl.int64), mask.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@functools.cache
def _has_pdl_option() -> bool:
    try:
        from triton.backends.nvidia.compiler import CUDAOptions
    except ImportError:  # a Triton build without NVIDIA support
        return False
    return "launch_pdl" in CUDAOptions.__dataclass_fields__  # from Triton 3.4 on


def get_pdl_options(device: torch.device, n_tokens: int, can_prefetch: bool = True) -> dict[str, Any]:
    """Return the launch options of a kernel for `n_tokens` new tokens of all sequences: USE_PDL and the CUDA attribute."""
    is_small = n_tokens <= decoding_table.MAX_PDL_TOKENS
    if not (can_prefetch and is_small and launch_table.supports_pdl(device) and _has_pdl_option()):
        return {"USE_PDL": False}
    return {"USE_PDL": True, "launch_pdl": True}
