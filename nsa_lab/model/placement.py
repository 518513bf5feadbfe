"""Device and dtype in which a model computes.

They are not read from one fixed weight: it may be quantized, replaced by an adapter, or on the meta device until a hook of
`accelerate` loads it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn


class Placement(NamedTuple):
    """Device and dtype of the activations of a module."""

    device: torch.device
    dtype: torch.dtype


def find_placement(module: nn.Module) -> Placement:
    """Return the device and dtype in which `module` computes; float32 on the CPU for a module without weights.

    This is the device of the first weight in memory. If a hook of `accelerate` loads the weights for each call, it is the
    device that they are loaded to. Quantized weights do not have the dtype of the activations and are skipped.
    """
    device = dtype = hook_device = None
    for owner in module.modules():
        own_hook_device = _get_hook_device(owner)
        hook_device = hook_device or own_hook_device
        for weight in owner.parameters(recurse=False):
            if device is None and (own_hook_device is not None or not weight.is_meta):
                device = own_hook_device or weight.device
            if dtype is None and weight.is_floating_point() and weight.dtype.itemsize > 1:
                dtype = weight.dtype
        if device is not None and dtype is not None:
            return Placement(device, dtype)
    has_weights = next(module.parameters(), None) is not None
    fallback = hook_device or torch.device("meta" if has_weights else "cpu")
    return Placement(device or fallback, dtype or torch.float32)


def check_weights_in_memory(model: nn.Module) -> None:
    """Raise ValueError for a weight on the meta device, unless a hook of `accelerate` loads it for each call."""
    hooked: list[str] = []  # prefixes of the weights that hooks load
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        if getattr(module, "_hf_hook", None) is not None:
            hooked.append(prefix)
        for weight_name, weight in module.named_parameters(recurse=False):
            if weight.is_meta and not prefix.startswith(tuple(hooked)):
                raise ValueError(
                    f"{prefix}{weight_name}: expected a weight in memory, got one on the meta device; load the weights "
                    "first, or let accelerate load them for each call (dispatch_model, device_map=)"
                )


def _get_hook_device(module: nn.Module) -> torch.device | None:
    """Return the device of a hook of `accelerate` on this module, or None."""
    hook: Any = getattr(module, "_hf_hook", None)
    for part in (hook, *getattr(hook, "hooks", ())):
        device = getattr(part, "execution_device", None)
        if device is not None:
            return torch.device(device)
    return None
