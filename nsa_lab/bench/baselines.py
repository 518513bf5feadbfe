"""Baselines of the attention benchmark: SDPA, flash-attn (if installed) and FlexAttention."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from nsa_lab.attention import flash, geometry
from nsa_lab.bench.attention_rows import Shape
from nsa_lab.bench.harness import RandomInputs, make_leaves
from nsa_lab.config import NSAConfig

Baseline = tuple[str, Callable[..., Tensor], list[Tensor]]


def list_dense(shape: Shape, device: torch.device, dtype: torch.dtype) -> Iterator[Baseline]:
    """Yield (name, run, inputs) of dense causal attention; on a CPU only the math kernel.

    A kernel that requires values as wide as keys gets such values, so that no copy is timed.
    """
    kernels = {"SDPA flash": SDPBackend.FLASH_ATTENTION, "SDPA cuDNN": SDPBackend.CUDNN_ATTENTION}
    if device.type != "cuda":
        kernels = {"SDPA math": SDPBackend.MATH}
    for name, kernel in kernels.items():
        q, k, v = _make_inputs(shape, shape.H, device, dtype, heads_first=True)
        if shape.value_width != shape.D and not _can_run(kernel, q, k, v):
            v = torch.randn_like(k).requires_grad_()

        def run(q: Tensor, k: Tensor, v: Tensor, kernel=kernel) -> Tensor:
            with sdpa_kernel(kernel):
                return scaled_dot_product_attention(q, k, v, is_causal=True)

        yield name, run, [q, k, v]
    if not flash.find_flash_problem(device, dtype) and shape.value_width == shape.D:
        yield "flash-attn", flash.flash_dense_attention, _make_inputs(shape, shape.G, device, dtype, heads_first=False)


def _can_run(kernel: SDPBackend, q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return whether this SDPA kernel reports that it runs here."""
    checks = {
        SDPBackend.FLASH_ATTENTION: torch.backends.cuda.can_use_flash_attention,
        SDPBackend.CUDNN_ATTENTION: torch.backends.cuda.can_use_cudnn_attention,
    }
    params = torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, True, False)
    return kernel not in checks or checks[kernel](params, False)


def list_branches(
    shape: Shape, nsa: NSAConfig, parts: Collection[str], device: torch.device, dtype: torch.dtype
) -> Iterator[tuple[str, str, Callable[..., Tensor], list[Tensor]]]:
    """Yield (part, name, run, inputs) of baselines for those of window and compressed in `parts`; none on a CPU."""
    if device.type != "cuda":
        return
    if "window" in parts and not flash.find_flash_problem(device, dtype) and shape.value_width == shape.D:
        yield (
            "window",
            "flash-attn",
            lambda q, k, v: flash.flash_window_attention(q, k, v, nsa)[0],
            _make_inputs(shape, shape.G, device, dtype, heads_first=False),
        )

    def sees_window(b, h, t, i):
        return (i <= t) & (i > t - nsa.w)

    def sees_compressed(b, h, t, i):
        return i * nsa.d + nsa.l - 1 <= t

    for part, sees, keys in (
        ("window", sees_window, shape.T),
        ("compressed", sees_compressed, geometry.num_compressed(shape.T, nsa)),
    ):
        if keys and part in parts:
            yield (
                part,
                "FlexAttention",
                _compile_flex_attention(sees, shape.T, keys, device),
                _make_inputs(shape, shape.G, device, dtype, heads_first=True, keys=keys),
            )


def _compile_flex_attention(mask_mod, queries: int, keys: int, device: torch.device) -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    mask = torch.compile(create_block_mask)(mask_mod, None, None, queries, keys, device=device)
    compiled = torch.compile(flex_attention)
    return lambda q, k, v: compiled(q, k, v, block_mask=mask, enable_gqa=True)


def _make_inputs(
    shape: Shape, kv_heads: int, device: torch.device, dtype: torch.dtype, *, heads_first: bool, keys: int | None = None
) -> list[Tensor]:
    """Return random q, k, v that require gradients: [B, heads, length, width], or [B, length, heads, width]."""
    S = keys or shape.T
    sizes = ((shape.T, shape.H, shape.D), (S, kv_heads, shape.D), (S, kv_heads, shape.value_width))
    random = RandomInputs(device, dtype)
    return make_leaves(
        *(
            random.normal(shape.B, *((heads, length) if heads_first else (length, heads)), width)
            for length, heads, width in sizes
        )
    )
