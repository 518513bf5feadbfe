"""What the Triton kernels share: what they accept, how a refusal reads, and the few sizes they agree on.

Tensors are [B, T, H, D] with any strides but a contiguous last axis. Nothing here synchronises with the device.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator

import torch
import triton
from torch import Tensor

from nsa_lab.attention.kernels import DTYPES, HEAD_WIDTHS

LOG2E = 1.4426950408889634


@triton.jit
def _probe():
    pass


INTERPRETED = not isinstance(_probe, triton.runtime.jit.JITFunction)
"""True when Triton was imported under TRITON_INTERPRET=1, and so runs kernels on CPU tensors."""


def check_attention_inputs(name: str, q: Tensor, k: Tensor, v: Tensor, n_keys: int) -> None:
    """Raise unless q [B, T, H, Dk], k [B, n_keys, G, Dk] and v [B, n_keys, G, Dv] are what the kernels take.

    ValueError: shapes that do not fit together. NotImplementedError: sound inputs past a limit of these kernels.
    """
    for label, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4:
            raise ValueError(f"{name}: {label} has shape {list(x.shape)}; expected four axes, [batch, time, heads, width]")
    B, T, H, Dk = q.shape
    G, Dv = k.shape[2], v.shape[3]
    if k.shape != (B, n_keys, G, Dk) or v.shape[:3] != k.shape[:3]:
        raise ValueError(
            f"{name}: for q {list(q.shape)} expected k [{B}, {n_keys}, G, {Dk}] and v [{B}, {n_keys}, G, Dv]; "
            f"got k {list(k.shape)}, v {list(v.shape)}"
        )
    if G == 0 or H % G:
        raise ValueError(f"{name}: {H} query heads cannot be shared by {G} key/value groups; H must be a multiple of G")
    if T < 1 or B < 1:
        raise ValueError(f"{name}: q {list(q.shape)} holds no query; expected B >= 1 and T >= 1")
    check_kernel_limits(name, (q, k, v), (Dk, Dv))


def check_kernel_limits(name: str, tensors: tuple[Tensor, ...], widths: tuple[int, ...]) -> None:
    """Raise NotImplementedError for a dtype, head width or device that the kernels do not serve."""
    dtypes = {x.dtype for x in tensors}
    if len(dtypes) != 1:
        raise ValueError(f"{name}: inputs have dtypes {sorted(map(str, dtypes))}; cast them to one")
    if tensors[0].dtype not in DTYPES:
        raise NotImplementedError(f"{name}: the Triton kernels take bfloat16, float16 or float32, not {tensors[0].dtype}")
    for width in widths:
        if width not in HEAD_WIDTHS:
            raise NotImplementedError(f"{name}: the Triton kernels take head widths {HEAD_WIDTHS}, not {width}")
    check_device(name, tensors[0].device)
    if tensors[0].device.type == "cpu" and tensors[0].dtype == torch.bfloat16:
        raise NotImplementedError(f"{name}: Triton's interpreter multiplies bfloat16 wrongly; use float32 or float16")


def check_device(name: str, device: torch.device) -> None:
    """Raise NotImplementedError where Triton cannot run: CPU tensors without the interpreter, or an old GPU."""
    if device.type == "cuda":
        if torch.cuda.get_device_capability(device) < (8, 0):
            raise NotImplementedError(f"{name}: the Triton kernels need compute capability 8.0 (A100) or later")
    elif not (device.type == "cpu" and INTERPRETED):
        raise NotImplementedError(
            f"{name}: the Triton kernels run on CUDA tensors, not {device.type}; move the inputs, use backend='torch', "
            "or set TRITON_INTERPRET=1 before Python starts to run them, slowly, on a CPU"
        )


def with_short_rows(x: Tensor) -> Tensor:
    """`x` [B, T, H, D], copied only where its last axis is not contiguous or 256 steps of its second overflow 32 bits.

    The kernels read whole rows, and offsets inside a tile are 32-bit; everything outside the tile is 64-bit.
    """
    return x if x.stride(3) == 1 and x.stride(1) < 2**23 else x.contiguous()


@functools.cache
def _second_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@contextlib.contextmanager
def beside(device: torch.device) -> Iterator[Callable[[], None]]:
    """What is launched inside may run beside what is launched after it, until the function that this gives is called.

    It starts after all that was launched before. Tensors that it reads must live until that call; those made inside, as
    results or for a while, need no care: whatever is made inside next time comes after that time's start. A CUDA graph
    records it like anything else. On a CPU it is as if nothing were said.
    """
    if device.type != "cuda":
        yield lambda: None
        return
    second, first = _second_stream(device), torch.cuda.current_stream(device)
    second.wait_stream(first)
    with torch.cuda.stream(second):
        yield lambda: first.wait_stream(second)


# Plain integers: Triton's own helpers of these names cost several microseconds a call on the host.
def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def padded_width(width: int) -> int:
    """The power of two that this many elements occupy in a tile."""
    return 1 << (width - 1).bit_length()


def roomy(device: torch.device) -> bool:
    """Whether a block may use 160 KB of shared memory (A100, H100 and their kin), and not the 99 KB of smaller GPUs."""
    return device.type != "cuda" or torch.cuda.get_device_properties(device).shared_memory_per_block_optin >= 160 * 1024
