"""Geometries and block selections for the tests of the selected branch."""

from __future__ import annotations

import torch

from nsa_lab.attention import reference
from nsa_lab.config import NSAConfig


def make_config(n_sel: int, l_sel: int) -> NSAConfig:
    return NSAConfig(l=32, d=16, l_sel=l_sel, n_sel=n_sel)


def make_selection(B: int, T: int, G: int, nsa: NSAConfig, device, pattern: str = "random", seed: int = 0) -> torch.Tensor:
    """Select blocks by the reference from random importances. `shared`: equal importances for all queries."""
    generator = torch.Generator().manual_seed(seed)
    n_blocks = -(-T // nsa.l_sel)
    importance = torch.rand(B, 1 if pattern == "shared" else T, G, n_blocks, generator=generator).expand(B, T, G, n_blocks)
    blocks = reference.select_by_importance(importance, nsa)
    if pattern == "empty rows":
        blocks = torch.where(torch.rand(B, T, G, 1, generator=generator) < 0.3, -1, blocks)
        blocks[:, :, :, -1] = -1
    return blocks.to(device)
