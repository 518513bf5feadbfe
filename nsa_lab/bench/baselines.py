"""Other implementations of the same attention, timed beside ours: SDPA, flash-attn if installed, FlexAttention."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from nsa_lab.attention import flash, geometry
from nsa_lab.config import NSAConfig

Baseline = tuple[str, Callable[..., Tensor], list[Tensor]]


def list_dense(shape, device: torch.device, dtype: torch.dtype) -> Iterator[Baseline]:
    """(name, run, inputs) of dense causal attention; on a CPU the math kernel alone.

    A kernel that asks for values as wide as keys is given such values, so that it is timed without a copy."""
    kinds = {"SDPA flash": SDPBackend.FLASH_ATTENTION, "SDPA cuDNN": SDPBackend.CUDNN_ATTENTION}
    if device.type != "cuda":
        kinds = {"SDPA math": SDPBackend.MATH}
    for name, kind in kinds.items():
        q, k, v = _make_inputs(shape, shape.H, device, dtype, heads_first=True)
        if shape.values != shape.D and not _can_run(kind, q, k, v):
            v = torch.randn_like(k).requires_grad_()

        def run(q: Tensor, k: Tensor, v: Tensor, kind=kind) -> Tensor:
            with sdpa_kernel(kind):
                return scaled_dot_product_attention(q, k, v, is_causal=True)

        yield name, run, [q, k, v]
    if not flash.get_flash_problem(device, dtype) and shape.values == shape.D:
        yield "flash-attn", flash.flash_dense_attention, _make_inputs(shape, shape.G, device, dtype, heads_first=False)


def _can_run(kind: SDPBackend, q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether this kernel of SDPA says that it runs here."""
    can = {
        SDPBackend.FLASH_ATTENTION: torch.backends.cuda.can_use_flash_attention,
        SDPBackend.CUDNN_ATTENTION: torch.backends.cuda.can_use_cudnn_attention,
    }
    ask = torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, True, False)
    return kind not in can or can[kind](ask, False)


def list_branches(
    shape, nsa: NSAConfig, device: torch.device, dtype: torch.dtype
) -> Iterator[tuple[str, str, Callable[..., Tensor], list[Tensor]]]:
    """(part, name, run, inputs) of peers for the window and the compressed branch; none on a CPU."""
    if device.type != "cuda":
        return
    if not flash.get_flash_problem(device, dtype) and shape.values == shape.D:
        yield (
            "window",
            "flash-attn",
            lambda q, k, v: flash.flash_window_attention(q, k, v, nsa)[0],
            _make_inputs(shape, shape.G, device, dtype, heads_first=False),
        )

    def near(b, h, t, i):
        return (i <= t) & (i > t - nsa.w)

    def ended(b, h, t, i):
        return i * nsa.d + nsa.l - 1 <= t

    for part, sees, keys in (("window", near, shape.T), ("compressed", ended, geometry.num_compressed(shape.T, nsa))):
        if keys:
            yield (
                part,
                "FlexAttention",
                _compile_flex_attention(sees, shape.T, keys, device),
                _make_inputs(shape, shape.G, device, dtype, heads_first=True, keys=keys),
            )


def _compile_flex_attention(sees, queries: int, keys: int, device: torch.device) -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    mask = torch.compile(create_block_mask)(sees, None, None, queries, keys, device=device)
    compiled = torch.compile(flex_attention)
    return lambda q, k, v: compiled(q, k, v, block_mask=mask, enable_gqa=True)


def _make_inputs(shape, kv_heads: int, device, dtype, *, heads_first: bool, keys: int | None = None) -> list[Tensor]:
    inputs = []
    S = keys or shape.T
    for length, heads, width in ((shape.T, shape.H, shape.D), (S, kv_heads, shape.D), (S, kv_heads, shape.values)):
        size = (shape.B, heads, length, width) if heads_first else (shape.B, length, heads, width)
        inputs.append(torch.randn(size, device=device, dtype=dtype).requires_grad_())
    return inputs
