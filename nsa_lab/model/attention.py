"""The attention layers: projections, rotary embedding, compression, gate and output around the operator.

Matching heads (`ModelConfig.matching_heads`): a short convolution lets the keys of the first group start as those of the
token before, and some of its heads start with the keys' own weights for their queries. Such a head looks for the places
whose previous token was like the present one, and reads what came next there: it copies before anything is learned
(docs/science/retrieval.md).
Shape suffixes: B batch, T time, H query heads, G key/value groups, C model width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from nsa_lab.attention import (
    Span,
    choose_blocks,
    compress,
    compressed_attention,
    dense_attention,
    nsa_attention,
    resolve_backend,
    selected_attention,
    selection_loss,
    window_attention,
)
from nsa_lab.attention.compression import make_phi
from nsa_lab.attention.dispatch import Choice
from nsa_lab.attention.tracing import untraced
from nsa_lab.config import ModelConfig
from nsa_lab.model.indexer import Index, Indexer
from nsa_lab.model.layers import Rotary, ShortConvolution, rotate

# What `nsa_attention` takes: q, then keys and values of cmp, sel and win, then gates.
AttentionInputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


class Heads(NamedTuple):
    """What a layer's projection gives for x [B, T, C], rotated: of every branch for NSA, of one for dense attention."""

    q: Tensor
    """[B, T, H, d_k]"""
    keys: tuple[Tensor, ...]
    """[B, T, G, d_k] each, before compression; of cmp, sel, win."""
    values: tuple[Tensor, ...]
    """[B, T, G, d_v] each."""
    unread: Tensor | None
    """With matching heads, the last token's keys before the convolution, [B, 1, branches, G, d_k]: the next `before`."""


def project_heads(
    qkv: Tensor,
    config: ModelConfig,
    convolution: ShortConvolution | None,
    branches: int,
    rotary: Rotary,
    span: Span | None,
    before: Tensor | None,
) -> Heads:
    """`Heads` of a projection's output [B, T, H d_k + branches G (d_k + d_v)], for x of positions `rotary` in `span`.

    `before` is the `unread` of the tokens before these; None: these are the first.
    """
    c, keys = config, branches * config.n_kv_groups
    roped, values = qkv.split([(c.n_heads + keys) * c.d_k, keys * c.d_v], dim=-1)
    roped, unread = roped.unflatten(-1, (c.n_heads + keys, c.d_k)), None
    if convolution:
        q, k = roped.split([c.n_heads, keys], dim=2)
        k, unread = convolution(k.unflatten(2, (branches, c.n_kv_groups)), span, before)
        roped = torch.cat([q, k.flatten(2, 3)], dim=2)
    # q and all keys are neighbours in the projection, so that one rotation turns them all.
    q, *turned = rotate(roped, rotary).split([c.n_heads, *[c.n_kv_groups] * branches], dim=2)
    return Heads(q, tuple(turned), values.unflatten(-1, (keys, c.d_v)).split(c.n_kv_groups, dim=2), unread)


def _is_packed(span: Span | None) -> bool:
    return span is not None and span.kind == "packed"


def weighted(taught: Tensor | None, weight: float, like: Tensor) -> Tensor:
    """A selection loss times its weight, 0-d; where there is none, 0 on the device of `like`."""
    return torch.zeros((), device=like.device) if taught is None else taught * weight


class SparseAttention(nn.Module):
    """Projections, compression, gate and output around `nsa_attention`: x [B, T, C] -> [B, T, C].

    `backends` is what `resolve_backend` gave; None: resolved for the device and dtype of each input, and kept.
    """

    BRANCHES = 3

    def __init__(self, config: ModelConfig, backends: Mapping[str, Choice] | None) -> None:
        super().__init__()
        H, G, d_k, d_v = config.n_heads, config.n_kv_groups, config.d_k, config.d_v
        self.config, self.backends = config, backends
        self.qkv = nn.Linear(config.dim, H * d_k + 3 * G * (d_k + d_v), bias=False)
        self.gate = nn.Linear(config.dim, 3 * H, bias=False)
        self.phi_k, self.phi_v = make_phi(config.nsa, d_k), make_phi(config.nsa, d_v)
        self.convolution = ShortConvolution(self.BRANCHES, G, d_k) if config.matching_heads else None
        self.indexer = Indexer(config) if config.indexer_width else None
        self.out = nn.Linear(H * d_v, config.dim, bias=False)
        self._resolved: dict[tuple[torch.device, torch.dtype, bool], Mapping[str, Choice]] = {}

    def forward(self, x: Tensor, rotary: Rotary, span: Span | None = None) -> tuple[Tensor, Tensor | None]:
        """The output, and in training the layer's `selection_loss`, 0-d; None where `ModelConfig.selection_loss` is 0."""
        mix = _mix_documents if _is_packed(span) else SparseAttention.mix
        index = self.indexer(x, rotary, span) if self.indexer else None
        mixed, taught = mix(self, self.heads(x, rotary, span), index, self.gates(x), span)
        return self.out(mixed.flatten(2)), taught

    def mix(self, heads: Heads, index: Index | None, gates: Tensor, span: Span | None) -> tuple[Tensor, Tensor | None]:
        """What the branches find, [B, T, H, d_v], and the selection loss as in `forward`."""
        inputs, nsa = self._inputs(heads, gates, span), self.config.nsa
        q, k_cmp, _, k_sel, *_ = inputs
        backends, blocks, looking = self.backends or self._resolve(q, span), None, None
        if self.indexer and index:
            looking, q, k_cmp = q, index.q, self.indexer.compress(index.k, span)
            blocks = choose_blocks(q, k_cmp, nsa, backend=backends, span=span)
        mixed = nsa_attention(*inputs, nsa, blocks=blocks, backend=backends, span=span)
        if not (self.training and self.config.taught):
            return mixed, None
        return mixed, selection_loss(q, k_cmp, k_sel, nsa, looking=looking, span=span)

    def scoring(
        self, x: Tensor, inputs: AttentionInputs, rotary: Rotary, span: Span | None = None
    ) -> tuple[Tensor, Tensor]:
        """What chooses blocks: queries [B, T, ., D] and compressed keys [B, N, G, D], the indexer's or the branch's own.

        `inputs` are those of `project` for the same x.
        """
        if self.indexer is None:
            return inputs[0], inputs[1]
        index = self.indexer(x, rotary, span)
        return index.q, self.indexer.compress(index.k, span)

    def project(self, x: Tensor, rotary: Rotary, span: Span | None = None) -> AttentionInputs:
        """q [B, T, H, d_k]; k, v of cmp [B, N, G, .], of sel and win [B, T, G, .]; gates [B, T, H, 3].

        `rotary` is that of x's positions. x holds all keys: a span is full or packed.
        """
        return self._inputs(self.heads(x, rotary, span), self.gates(x), span)

    def _inputs(self, heads: Heads, gates: Tensor, span: Span | None) -> AttentionInputs:
        nsa = self.config.nsa
        q, (k_cmp, k_sel, k_win), (v_cmp, v_sel, v_win), _ = heads
        k_cmp, v_cmp = compress(k_cmp, nsa, self.phi_k, span=span), compress(v_cmp, nsa, self.phi_v, span=span)
        return q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates.to(q.dtype)

    def heads(self, x: Tensor, rotary: Rotary, span: Span | None = None, before: Tensor | None = None) -> Heads:
        """Queries, keys and values of x, before compression; `before` as in `project_heads`."""
        return project_heads(self.qkv(x), self.config, self.convolution, self.BRANCHES, rotary, span, before)

    def gates(self, x: Tensor) -> Tensor:
        """[B, T, H, 3] in the order cmp, sel, win: sigmoid per branch, or softmax over the branches.

        Of one linear map, where the paper has an MLP and gives neither its width nor its activation. One map lets a gate
        depend on the token and has no hidden layer that could start dead; what an MLP would add was not measured.
        """
        logits = self.gate(x).unflatten(-1, (self.config.n_heads, 3))
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return logits.sigmoid() if self.config.nsa.gate == "sigmoid" else logits.softmax(-1)

    def _resolve(self, q: Tensor, span: Span | None) -> Mapping[str, Choice]:
        """For q's dtype: what attention computes in, autocast included."""
        full = span is None or span.is_full
        key = (q.device, q.dtype, full)
        if key not in self._resolved:
            self._resolved[key] = resolve_backend(q.device, q.dtype, self.config.nsa, self.config, span=span)
        return self._resolved[key]

    @torch.no_grad()
    def observe(self, x: Tensor, rotary: Rotary, span: Span | None = None) -> dict[str, Tensor]:
        """What each branch did: `gates`, `blocks`, `out_cmp`, `out_sel`, `out_win`, `lse_cmp`, `lse_sel`, `lse_sink`.

        `lse_sink` is the LSE of the first selection block alone, so exp(lse_sink - lse_sel) is the share it holds. Blocks
        are each document's own.
        """
        nsa = self.config.nsa
        inputs = self.project(x, rotary, span)
        q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates = inputs
        name = {part: choice.backend for part, choice in (self.backends or self._resolve(q, span)).items()}
        out_cmp, lse_cmp = compressed_attention(q, k_cmp, v_cmp, nsa, backend=name["compressed"], span=span)
        blocks = choose_blocks(
            *self.scoring(x, inputs, rotary, span), nsa, backend=self.backends or self._resolve(q, span), span=span
        )
        out_sel, lse_sel = selected_attention(q, k_sel, v_sel, blocks, nsa, backend=name["selected"], span=span)
        only_first = torch.full_like(blocks, -1)
        only_first[..., 0] = 0
        _, lse_sink = selected_attention(q, k_sel, v_sel, only_first, nsa, backend=name["selected"], span=span)
        out_win, _ = window_attention(q, k_win, v_win, nsa, backend=name["window"], span=span)
        return {
            "gates": gates,
            "blocks": blocks,
            "out_cmp": out_cmp,
            "out_sel": out_sel,
            "out_win": out_win,
            "lse_cmp": lse_cmp,
            "lse_sel": lse_sel,
            "lse_sink": lse_sink,
        }


class DenseAttention(nn.Module):
    """Causal attention with G key/value groups, for the dense twin: x [B, T, C] -> [B, T, C]."""

    BRANCHES = 1

    def __init__(self, config: ModelConfig, backends: Mapping[str, Choice]) -> None:
        super().__init__()
        H, G, d_k, d_v = config.n_heads, config.n_kv_groups, config.d_k, config.d_v
        self.config, self.backends = config, backends
        self.qkv = nn.Linear(config.dim, H * d_k + G * (d_k + d_v), bias=False)
        self.convolution = ShortConvolution(self.BRANCHES, G, d_k) if config.matching_heads else None
        self.out = nn.Linear(H * d_v, config.dim, bias=False)

    def forward(self, x: Tensor, rotary: Rotary, span: Span | None = None) -> tuple[Tensor, None]:
        """The output, and no selection loss: as `SparseAttention.forward`."""
        q, (k,), (v,), _ = self.heads(x, rotary, span)
        attend = _attend_documents if _is_packed(span) else dense_attention
        return self.out(attend(q, k, v, backend=self.backends["dense"].backend, span=span).flatten(2)), None

    def heads(self, x: Tensor, rotary: Rotary, span: Span | None = None, before: Tensor | None = None) -> Heads:
        """As `SparseAttention.heads`, of one branch."""
        return project_heads(self.qkv(x), self.config, self.convolution, self.BRANCHES, rotary, span, before)


# Documents are another layout in every batch: traced, their bounds would be constants, and each batch be compiled anew.
_mix_documents = untraced(SparseAttention.mix)
_attend_documents = untraced(dense_attention)
