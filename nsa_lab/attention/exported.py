"""NSA as one operator of a program that torch.export traced, valid for every length.

The backends choose loops and shapes by the length, which would make it a constant of the program. In the program, all of
attention is therefore one call of `nsa_lab::exported_attention`, which selects its backend when it runs. Compressed blocks
are computed outside of it, because phi is a module, for a padded text; the operator drops blocks that are not complete.

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
from nsa_lab.attention.dispatch import nsa_attention, score_and_select_blocks
from nsa_lab.config import NSAConfig

torch.library.define(
    "nsa_lab::exported_attention",
    "(Tensor q, Tensor?[] keys_and_values, Tensor? gates, str nsa, Tensor? index_q, Tensor? index_k, str index_nsa)"
    " -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
torch.library.define("nsa_lab::unfold_padded", "(Tensor x, int l, int d) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))


def exported_attention(
    inputs: Sequence[Tensor | None], selection_inputs: Sequence[Any] | None, geometries: tuple[str, str]
) -> Tensor:
    """Return `nsa_attention` of its eight inputs, [B, T, H, Dv]; None for those of a branch that does not exist.

    Compressed keys and values are results of `compress_padded`, also those of an indexer, in `selection_inputs` (queries,
    keys, ...). `geometries`: JSON of the configurations of the branches and of the indexer's keys, which tracing cannot
    write.
    """
    q, *keys_and_values, gates = inputs
    index_q, index_k = (None, None) if selection_inputs is None else selection_inputs[:2]
    nsa, index_nsa = geometries
    return torch.ops.nsa_lab.exported_attention.default(q, keys_and_values, gates, nsa, index_q, index_k, index_nsa)


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
    # Their number is a new symbol: tracing cannot prove what it asks about an expression such as T // d + 2.
    n_blocks = torch.library.get_ctx().new_dynamic_size(min=2)
    return x.new_empty(x.shape[0], n_blocks, *x.shape[2:], l)


@torch.library.impl("nsa_lab::exported_attention", ("cpu", "cuda"))
def _(
    q: Tensor,
    keys_and_values: list[Tensor | None],
    gates: Tensor | None,
    nsa: str,
    index_q: Tensor | None,
    index_k: Tensor | None,
    index_nsa: str,
) -> Tensor:
    config, index_config = NSAConfig.model_validate_json(nsa), NSAConfig.model_validate_json(index_nsa)
    k_cmp, v_cmp, *rest = keys_and_values
    n_complete = geometry.num_compressed(q.shape[1], config)
    blocks = None
    if index_q is not None and index_k is not None:
        complete = index_k[:, : geometry.num_compressed(q.shape[1], index_config)]
        blocks = score_and_select_blocks(index_q, complete, index_config)
    k_cmp, v_cmp = (None if x is None else x[:, :n_complete] for x in (k_cmp, v_cmp))
    k_sel, v_sel, k_win, v_win = rest
    inputs: Any = q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates, config
    return nsa_attention(*inputs, blocks=blocks)


@torch.library.register_fake("nsa_lab::exported_attention")
def _(q: Tensor, keys_and_values: list[Tensor | None], *_: object) -> Tensor:
    value_width = next(v.shape[3] for v in keys_and_values[1::2] if v is not None)
    return q.new_empty(*q.shape[:3], value_width)
