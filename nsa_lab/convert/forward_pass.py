"""Attention of a converted model: the function that `transformers` calls, and the state of one forward pass.

`transformers` projects, normalizes and rotates queries and keys, and calls the attention function that is registered under
the name in the model's configuration:

    nsa_lab        attention to the selected blocks
    nsa_lab_dense  attention to all tokens, which an indexer is trained to predict; without a cache

All state of a pass is in one `ForwardPass`, which `hooks` prepare and `transformers` hands through the keyword arguments of
the layers.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from nsa_lab.attention import Span, dense_attention, nsa_attention, score_and_select_blocks, selection_loss
from nsa_lab.attention.compression import compress
from nsa_lab.attention.layout import Layout
from nsa_lab.config import UsageError
from nsa_lab.convert.cache import SparseCache
from nsa_lab.convert.settings import ConversionSettings
from nsa_lab.inference.cache import Step
from nsa_lab.inference.hf.inputs import (
    PaddingPermutation,
)
from nsa_lab.model import Indexer, ProjectedHeads, Rotary, SparseAttention
from nsa_lab.model.attention_layers import SelectionInputs

SPARSE, DENSE = "nsa_lab", "nsa_lab_dense"
PASS, HIDDEN = "nsa_pass", "nsa_hidden_states"
"""Keyword arguments of the attention function that the hooks add."""


@dataclass
class ForwardPass:
    """A pass of the converted model over the tokens of a batch, without padding at the beginning of a row."""

    settings: ConversionSettings
    is_dense: bool
    span: Span | None
    """Packed documents; None: each row is one document."""
    layouts: tuple[Layout, ...] | None
    rotary: Rotary
    """RoPE tables at the positions of the tokens, [T, R/2]; with a cache, tables of all its positions."""
    n_columns: int
    """Number of columns of the input, padding included."""
    counts: list[int]
    """Number of tokens per row."""
    permutation: PaddingPermutation | None
    cache: SparseCache | None
    steps: list[Step]
    losses: dict[int, Tensor] | None
    """Selection loss by layer; None: not requested."""
    has_gradients: bool
    query_weights: Tensor | None
    """Weights of the sampled queries in the selection loss, [B, R]; None: equal."""
    blocks: dict[tuple[int, int], Tensor] = field(default_factory=dict[tuple[int, int], Tensor])
    """Selected blocks by layer and first column, for layers that have no indexer (`indexer_every`)."""

    def attend(self, attention: nn.Module, heads: ProjectedHeads, hidden: Tensor) -> Tensor:
        """Return the attention of all heads [B, T, H, D] for the layer's normalized input `hidden` [B, T, C]."""
        if self.cache is not None:
            return self._attend_cached(attention, heads, hidden)
        q, (k,), (v,) = heads.q, heads.keys, heads.values
        c, index = self.settings.model, cast(Any, attention).layer_idx
        backends = self.settings.resolve_backends(q.device, q.dtype)
        layout, selection_layout = (self.layouts[0], self.layouts[-1]) if self.layouts else (None, None)
        scoring = None
        if c.scores == "mean_key" or c.has_indexer_in(index):
            scoring = self._project_selection_inputs(attention, heads, hidden, selection_layout)
        if self.losses is not None and c.has_indexer and scoring is not None:
            index_q, index_k, nsa = scoring
            self.losses[index] = selection_loss(
                index_q,
                index_k,
                k,
                nsa,
                attention_q=q,
                n_queries=c.selection_queries,
                span=self.span,
                layout=selection_layout,
                query_weights=self.query_weights,
                backend=backends,
            )
        if self.is_dense:
            backend = "flash" if self.settings.backend == "flash" else "torch"
            return dense_attention(q, k, v, backend=backend, span=self.span)
        if scoring is not None:
            self.blocks[index, 0] = score_and_select_blocks(
                *scoring, backend=backends, span=self.span, layout=selection_layout
            )
        blocks = self.blocks[index - index % c.indexer_every, 0].to(q.device)
        inputs = q, None, None, k, v, None, None, None
        return nsa_attention(*inputs, c.nsa, blocks=blocks, backend=backends, span=self.span, layout=layout)

    def _project_selection_inputs(
        self, attention: nn.Module, heads: ProjectedHeads, hidden: Tensor, layout: Layout | None
    ) -> SelectionInputs:
        """Return queries, keys of blocks, and the configuration of these keys."""
        c, (k,) = self.settings.model, heads.keys
        if not c.has_indexer:
            return heads.q.detach(), compress(k.detach(), c.selection_nsa, span=self.span), c.selection_nsa
        indexer = cast(Indexer, attention.indexer)
        rotary = cast(Rotary, tuple(table.to(hidden.device) for table in self.rotary))
        output = indexer(hidden, rotary)
        keys = indexer.compress(output.k, rotary, self.span, layout)
        return output.q, keys.expand(-1, -1, c.n_kv_groups, -1), c.selection_nsa

    @torch.no_grad()
    def _attend_cached(self, attention: nn.Module, heads: ProjectedHeads, hidden: Tensor) -> Tensor:
        """Return `attend` for new tokens, and store their keys, values and index keys."""
        c, index, cache = self.settings.model, cast(Any, attention).layer_idx, cast(SparseCache, self.cache)
        assert cache.tokens is not None
        layer = cast(Any, cache.tokens.layers[index])
        outputs, start = [], 0
        for step in self.steps:
            columns = slice(start, start + step.width)
            q, k, v = (x[:, columns] for x in (heads.q, *heads.keys, *heads.values))
            view = _CachedAttention(attention, ProjectedHeads(q, (k,), (v,), None), self.settings)
            inputs = cast(SparseAttention, view), hidden[:, columns], cache.get_rotary(q.device), step.to(q.device)
            out, blocks = layer.attend(*inputs, self.blocks.get((index - index % c.indexer_every, start)))
            if c.has_indexer_in(index):
                self.blocks[index, start] = blocks
            outputs.append(out)
            start += step.width
        return torch.cat(outputs, dim=1).unflatten(-1, (c.n_heads, -1))


class _CachedAttention:
    """A layer's attention as its cache reads it: heads that are projected already, no gates, and the indexer."""

    def __init__(self, attention: nn.Module, heads: ProjectedHeads, settings: ConversionSettings) -> None:
        self._heads, self.indexer = heads, getattr(attention, "indexer", None)
        self.backends = settings.resolve_backends(heads.q.device, heads.q.dtype)

    def project_heads(self, *_: object) -> ProjectedHeads:
        return self._heads

    def compute_gates(self, x: Tensor) -> None:
        """Return None: a single branch has no gate."""


def attend(
    attention: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **arguments: Any
) -> tuple[Tensor, None]:
    """Return the attention output [B, T, H, D] of rotated heads [B, H, T, D]; registered with `transformers`."""
    current = arguments.get(PASS)
    if not isinstance(current, ForwardPass):
        raise UsageError(
            f"{type(attention).__name__}: expected a call by the converted model, got one without its hooks; call the "
            "model, not its layers"
        )
    if current.losses is not None and current.has_gradients and not torch.is_grad_enabled():
        raise NotImplementedError(
            "gradient checkpointing with use_reentrant=True: the selection loss would have no gradient; use "
            'gradient_checkpointing_kwargs={"use_reentrant": False}'
        )
    # Under autocast, transformers rotates queries and keys in float32.
    is_autocast = torch.is_autocast_enabled(value.device.type) and value.dtype != torch.float64
    dtype = torch.get_autocast_dtype(value.device.type) if is_autocast else value.dtype
    q, k, v = (x.transpose(1, 2).to(dtype) for x in (query, key, value))
    return current.attend(attention, ProjectedHeads(q, (k,), (v,), None), arguments[HIDDEN]), None


AttentionInterface.register(SPARSE, attend)
AttentionInterface.register(DENSE, attend)
