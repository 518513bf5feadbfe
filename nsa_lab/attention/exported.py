"""NSA as operators of a program that torch.export traced, valid for every length.

The backends choose loops and shapes by the length, which would make it a constant of the program. In the program, all of
attention is therefore one call of `nsa_lab::exported_attention`, which selects its backend when it runs. Block selection by
other keys than the compressed branch's is a call of `nsa_lab::exported_selection` before it. Compressed blocks are computed
outside of them, because phi is a module, for a padded text; the operators drop blocks that are not complete.

A saved program needs `import nsa_lab.model` where it is loaded. The operators have no backward pass.
"""

# The functions of torch.library have no type annotations.
# pyright: reportUnknownMemberType=false, reportUntypedFunctionDecorator=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from nsa_lab.attention import geometry
from nsa_lab.attention.compile_utils import is_exporting
from nsa_lab.attention.compression import compress
from nsa_lab.attention.dispatch import nsa_attention, score_and_select_blocks
from nsa_lab.attention.layout import Layout, Span
from nsa_lab.config import NSAConfig

torch.library.define(
    "nsa_lab::exported_attention",
    "(Tensor q, Tensor?[] keys_and_values, Tensor? gates, Tensor? blocks, str nsa) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
torch.library.define(
    "nsa_lab::exported_selection", "(Tensor q, Tensor k, str nsa) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,)
)
torch.library.define("nsa_lab::unfold_padded", "(Tensor x, int l, int d) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))


def exported_attention(inputs: Sequence[Tensor | None], blocks: Tensor | None, nsa: str) -> Tensor:
    """Return `nsa_attention` of its eight inputs, [B, T, H, Dv]; None for the inputs of a missing branch.

    Compressed keys and values are results of `compress_padded`. `blocks`: the selected blocks; None: select them by the
    compressed branch. `nsa`: JSON of the configuration; tracing cannot write it.
    """
    q, *keys_and_values, gates = inputs
    return torch.ops.nsa_lab.exported_attention.default(q, keys_and_values, gates, blocks, nsa)


def exported_selection(q: Tensor, k: Tensor, nsa: str) -> Tensor:
    """Return `score_and_select_blocks` of queries and a result of `compress_padded`; `nsa`: JSON of their configuration."""
    return torch.ops.nsa_lab.exported_selection.default(q, k, nsa)


def compress_traceable(
    x: Tensor, nsa: NSAConfig, phi: nn.Module | None, *, span: Span | None = None, layout: Layout | None = None
) -> Tensor:
    """Return `compress` of x [B, T, G, D]; `compress_padded` while torch.export traces."""
    if is_exporting():
        return compress_padded(x, nsa, phi)
    return compress(x, nsa, phi, span=span, layout=layout)


def compress_padded(x: Tensor, nsa: NSAConfig, phi: nn.Module | None) -> Tensor:
    """Return the blocks of x [B, T, G, D] followed by zeros, [B, T // d + 2, G, D]; the last ones are not complete."""
    blocks = torch.ops.nsa_lab.unfold_padded.default(x, nsa.l, nsa.d)  # [B, N, G, D, l]
    if phi is not None:
        return phi(blocks)
    acc_dtype = torch.promote_types(x.dtype, torch.float32)
    return blocks.to(acc_dtype).mean(-1).to(x.dtype)


@torch.library.impl("nsa_lab::unfold_padded", ("cpu", "cuda"))
def _(x: Tensor, l: int, d: int) -> Tensor:
    return pad(x, (0, 0, 0, 0, 0, l + d)).unfold(1, l, d).contiguous()


@torch.library.register_fake("nsa_lab::unfold_padded")
def _(x: Tensor, l: int, d: int) -> Tensor:
    # Their number is a new symbol: about an expression such as T // d + 2, tracing cannot prove its conditions.
    n_blocks = torch.library.get_ctx().new_dynamic_size(min=2)
    return x.new_empty(x.shape[0], n_blocks, *x.shape[2:], l)


@torch.library.impl("nsa_lab::exported_selection", ("cpu", "cuda"))
def _(q: Tensor, k: Tensor, nsa: str) -> Tensor:
    config = NSAConfig.model_validate_json(nsa)
    return score_and_select_blocks(q, k[:, : geometry.num_compressed(q.shape[1], config)], config)


@torch.library.register_fake("nsa_lab::exported_selection")
def _(q: Tensor, k: Tensor, nsa: str) -> Tensor:
    n_sel = NSAConfig.model_validate_json(nsa).n_sel
    return q.new_empty(*q.shape[:2], k.shape[2], n_sel, dtype=torch.int32)


@torch.library.impl("nsa_lab::exported_attention", ("cpu", "cuda"))
def _(q: Tensor, keys_and_values: list[Tensor | None], gates: Tensor | None, blocks: Tensor | None, nsa: str) -> Tensor:
    config = NSAConfig.model_validate_json(nsa)
    k_cmp, v_cmp, *rest = keys_and_values
    n_complete = geometry.num_compressed(q.shape[1], config)
    k_cmp, v_cmp = (None if x is None else x[:, :n_complete] for x in (k_cmp, v_cmp))
    inputs: Any = q, k_cmp, v_cmp, *rest, gates, config
    return nsa_attention(*inputs, blocks=blocks)


@torch.library.register_fake("nsa_lab::exported_attention")
def _(q: Tensor, keys_and_values: list[Tensor | None], *_: object) -> Tensor:
    value_width = next(v.shape[3] for v in keys_and_values[1::2] if v is not None)
    return q.new_empty(*q.shape[:3], value_width)
