"""Inputs of the public functions."""

from __future__ import annotations

import torch
from attention_inputs import Inputs, Shape

from nsa_lab import attention
from nsa_lab.config import NSAConfig

NSA = Shape().nsa


def call_all_functions(x: Inputs, nsa: NSAConfig, backend: str) -> list[torch.Tensor]:
    out_cmp, lse_cmp = attention.compressed_attention(x.q, x.k_cmp, x.v_cmp, nsa, backend=backend)
    blocks = attention.select_blocks(x.q, x.k_cmp, lse_cmp, nsa, backend=backend)
    out_sel, lse_sel = attention.selected_attention(x.q, x.k_sel, x.v_sel, blocks, nsa, backend=backend)
    out_win, lse_win = attention.window_attention(x.q, x.k_win, x.v_win, nsa, backend=backend)
    out = attention.nsa_attention(*x, nsa, backend=backend)
    return [out_cmp, lse_cmp, blocks, out_sel, lse_sel, out_win, lse_win, out]


PACKED = attention.Span.packed(torch.tensor([0, 9, 21], dtype=torch.int32))
