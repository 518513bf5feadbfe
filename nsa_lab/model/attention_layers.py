"""Attention layers: projections, rotary embedding, compression, gate and output projection around the operator.

Induction-initialized heads (`ModelConfig.matching_heads`): a short convolution over the keys starts as a shift by one token
in the first group, and some query heads of this group start with the weights of its keys. Such a head attends to positions
whose previous token equals the current one, and reads the token that followed. It copies before any training
(docs/science/retrieval.md). Key convolutions, partial key offsets and smeared keys are related.

Shape suffixes: B batch, T time, H query heads, G key/value groups, C model width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from nsa_lab.attention import (
    Span,
    compress,
    compressed_attention,
    dense_attention,
    nsa_attention,
    resolve_backend,
    score_and_select_blocks,
    selected_attention,
    selection_loss,
    window_attention,
)
from nsa_lab.attention.compile_utils import disable_compile
from nsa_lab.attention.compression import make_phi
from nsa_lab.attention.dense import find_single_call
from nsa_lab.attention.dispatch import ResolvedBackend
from nsa_lab.attention.exported import compress_padded, exported_attention
from nsa_lab.attention.layout import Layout
from nsa_lab.config import BRANCHES, ModelConfig, NSAConfig
from nsa_lab.model.cached_pass import CachedLayer
from nsa_lab.model.indexer import Indexer
from nsa_lab.model.layers import Rotary, ShortConvolution, convolve_keys, rotate

# Arguments of `nsa_attention`: q, then keys and values of cmp, sel and win, then gates.
AttentionInputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
SelectionInputs = tuple[Tensor, Tensor, NSAConfig]
"""Inputs of block selection: queries [B, T, ., D], compressed keys [B, N, G, D], and the configuration of the keys."""


def get_layouts(span: Span | None, config: ModelConfig, device: torch.device) -> tuple[Layout, ...] | None:
    """Return the layouts of a packed span for a layer: of `config.nsa`, and with an indexer also of its index keys.

    Built once per span and device, for all layers. None if `span` is not packed: everything then follows from shapes.
    """
    return None if span is None or span.kind != "packed" else _build_layouts(span, config, device)


@disable_compile
def _build_layouts(span: Span, config: ModelConfig, device: torch.device) -> tuple[Layout, ...]:
    if config.attention == "dense":
        return (span.layout(config.nsa, device)._replace(varlen_attn=find_single_call(span, device)),)
    geometries = (config.nsa, config.selection_nsa) if config.has_indexer else (config.nsa,)
    return tuple(span.layout(nsa, device) for nsa in geometries)


class ProjectedHeads(NamedTuple):
    """Rotated heads of x [B, T, C]: three branches for NSA, one for dense attention."""

    q: Tensor
    """[B, T, H, d_k]"""
    keys: tuple[Tensor, ...]
    """[B, T, G, d_k] per branch (cmp, sel, win), before compression."""
    values: tuple[Tensor, ...]
    """[B, T, G, d_v] per branch."""
    k_before_conv: Tensor | None
    """[B, T, branches, G, d_k], keys before the convolution. The last token's row is the next call's `previous_k`.

    None without induction-initialized heads (`matching_heads`).
    """


class UnrotatedHeads(NamedTuple):
    """Heads before the rotation."""

    qk: Tensor
    """[B, T, H + branches G, d_k]: queries, then the keys of every branch."""
    values: Tensor
    """[B, T, branches G, d_v]"""
    k_before_conv: Tensor | None
    """As in `ProjectedHeads`."""


def split_heads(
    qkv: Tensor,
    config: ModelConfig,
    convolution: ShortConvolution | None,
    n_branches: int,
    is_document_start: Tensor | None,
    previous_k: Tensor | None,
) -> UnrotatedHeads:
    """Split the output of a layer's projection, [B, T, H d_k + branches G (d_k + d_v)], and convolve the keys.

    `is_document_start`: as in `Layout`; None: one document. `previous_k`: `k_before_conv` of the token before,
    [B, 1, branches, G, d_k]; None: x starts the sequence.
    """
    qk, values = split_projection(qkv, config, n_branches)
    k_before_conv = None
    if convolution:
        q, k = qk.split([config.n_heads, values.shape[2]], dim=2)
        k_before_conv = k.unflatten(2, (n_branches, config.n_kv_groups))
        qk = torch.cat([q, convolve_keys(convolution, k_before_conv, is_document_start, previous_k).flatten(2, 3)], dim=2)
    return UnrotatedHeads(qk, values, k_before_conv)


def split_projection(qkv: Tensor, config: ModelConfig, n_branches: int) -> tuple[Tensor, Tensor]:
    """Return queries and keys [B, T, H + branches G, d_k] and values [B, T, branches G, d_v] of a projection's output."""
    c, n_keys = config, n_branches * config.n_kv_groups
    qk, values = qkv.split([(c.n_heads + n_keys) * c.d_k, n_keys * c.d_v], dim=-1)
    return qk.unflatten(-1, (c.n_heads + n_keys, c.d_k)), values.unflatten(-1, (n_keys, c.d_v))


def rotate_heads(unrotated: UnrotatedHeads, config: ModelConfig, n_branches: int, rotary: Rotary) -> ProjectedHeads:
    """Apply RoPE at the positions of `rotary` and split the keys and values by branch."""
    # Queries and all keys are adjacent in the projection, so one call rotates them all.
    q, *keys = rotate(unrotated.qk, rotary).split([config.n_heads, *[config.n_kv_groups] * n_branches], dim=2)
    return ProjectedHeads(q, tuple(keys), unrotated.values.split(config.n_kv_groups, dim=2), unrotated.k_before_conv)


def scale_selection_loss(loss: Tensor | None, weight: float, like: Tensor) -> Tensor:
    """Return the selection loss times its weight, 0-d; without a loss, 0 on the device of `like`."""
    return torch.zeros((), device=like.device) if loss is None else loss * weight


class SparseAttention(nn.Module):
    """Projections, compression, gate and output projection around `nsa_attention`: x [B, T, C] -> [B, T, C].

    `backends`: the result of `resolve_backend`; None: resolve `backend` for the device and dtype of each input, once.
    """

    N_BRANCHES = 3

    def __init__(self, config: ModelConfig, backends: Mapping[str, ResolvedBackend] | None, backend: str = "auto") -> None:
        super().__init__()
        H, G, d_k, d_v = config.n_heads, config.n_kv_groups, config.d_k, config.d_v
        self.config, self.backends, self._backend = config, backends, backend
        self._geometries = config.nsa.model_dump_json(), config.selection_nsa.model_dump_json()
        self.qkv = nn.Linear(config.dim, H * d_k + 3 * G * (d_k + d_v), bias=False)
        self.gate = nn.Linear(config.dim, 3 * H, bias=False)
        self.phi_k, self.phi_v = make_phi(config.nsa, d_k), make_phi(config.nsa, d_v)
        self.convolution = ShortConvolution(self.N_BRANCHES, G, d_k) if config.matching_heads else None
        self.indexer = Indexer(config) if config.indexer_block else None
        self.out = nn.Linear(H * d_v, config.dim, bias=False)
        self._resolved_backends: dict[tuple[torch.device, torch.dtype, bool], Mapping[str, ResolvedBackend]] = {}

    def forward(
        self,
        x: Tensor,
        rotary: Rotary,
        span: Span | None = None,
        layouts: tuple[Layout, ...] | None = None,
        cache: CachedLayer | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output and, in training, the layer's `selection_loss`, 0-d; None if `ModelConfig.selection_loss` is 0.

        `layouts`: the result of `get_layouts` for this layer; None: build it here, which breaks a compiled graph in two.
        `cache`: the cache of this layer, if x are new tokens; there is no loss then.
        """
        if cache is not None:
            return self.out(cache.attend(self, x)), None
        layouts = layouts or get_layouts(span, self.config, x.device)
        layout, index_layout = (layouts[0], layouts[-1]) if layouts else (None, None)
        inputs = self._project(x, rotary, span, layout)
        selection_inputs = self._project_indexer(x, rotary, span, index_layout)
        loss = None
        if self.training and self.config.has_selection_loss:
            q, k, nsa = selection_inputs or (*inputs[:2], self.config.nsa)
            loss = selection_loss(q, k, inputs[3], nsa, attention_q=inputs[0], span=span, layout=index_layout)
        if torch.compiler.is_exporting():
            return self.out(exported_attention(inputs, selection_inputs, self._geometries).flatten(2)), loss
        backends, blocks = self.backends or self._get_backends(inputs[0], span), None
        if selection_inputs:
            blocks = score_and_select_blocks(*selection_inputs, backend=backends, span=span, layout=index_layout)
        out = nsa_attention(*inputs, self.config.nsa, blocks=blocks, backend=backends, span=span, layout=layout)
        return self.out(out.flatten(2)), loss

    def project(self, x: Tensor, rotary: Rotary, span: Span | None = None) -> AttentionInputs:
        """Return q [B, T, H, d_k]; k, v of cmp [B, N, G, .], of sel and win [B, T, G, .]; gates [B, T, H, 3].

        `rotary`: tables at the positions of x. x holds all keys, so `span` is full or packed.
        """
        layouts = get_layouts(span, self.config, x.device)
        return self._project(x, rotary, span, layouts[0] if layouts else None)

    def project_selection_inputs(
        self, x: Tensor, inputs: AttentionInputs, rotary: Rotary, span: Span | None = None
    ) -> SelectionInputs:
        """Return the selection inputs of the indexer, or of the compressed branch in `inputs` (from `project`)."""
        layouts = get_layouts(span, self.config, x.device)
        return self._project_indexer(x, rotary, span, layouts[-1] if layouts else None) or (*inputs[:2], self.config.nsa)

    def project_heads(
        self, x: Tensor, rotary: Rotary, is_document_start: Tensor | None = None, previous_k: Tensor | None = None
    ) -> ProjectedHeads:
        """Return the rotated heads of x, before compression; `is_document_start`, `previous_k` as in `split_heads`."""
        return rotate_heads(self.project_unrotated(x, is_document_start, previous_k), self.config, self.N_BRANCHES, rotary)

    def project_unrotated(
        self, x: Tensor, is_document_start: Tensor | None = None, previous_k: Tensor | None = None
    ) -> UnrotatedHeads:
        """Return the heads of x before the rotation."""
        return split_heads(self.qkv(x), self.config, self.convolution, self.N_BRANCHES, is_document_start, previous_k)

    def _project(self, x: Tensor, rotary: Rotary, span: Span | None, layout: Layout | None) -> AttentionInputs:
        q, (k_cmp, k_sel, k_win), (v_cmp, v_sel, v_win), _ = self.project_heads(
            x, rotary, layout and layout.is_document_start
        )
        nsa = self.config.nsa
        if torch.compiler.is_exporting():
            k_cmp, v_cmp = compress_padded(k_cmp, nsa, self.phi_k), compress_padded(v_cmp, nsa, self.phi_v)
        else:
            k_cmp, v_cmp = (
                compress(raw, nsa, phi, span=span, layout=layout) for raw, phi in ((k_cmp, self.phi_k), (v_cmp, self.phi_v))
            )
        return q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, self.compute_gates(x).to(q.dtype)

    def _project_indexer(
        self, x: Tensor, rotary: Rotary, span: Span | None, layout: Layout | None
    ) -> SelectionInputs | None:
        """Return the indexer's selection inputs; None without an indexer."""
        if self.indexer is None:
            return None
        output = self.indexer(x, rotary, layout and layout.is_document_start)
        if torch.compiler.is_exporting():
            return output.q, compress_padded(output.k, self.indexer.nsa, self.indexer.phi), self.indexer.nsa
        return output.q, self.indexer.compress(output.k, span, layout), self.indexer.nsa

    def compute_gates(self, x: Tensor) -> Tensor:
        """Return the gates [B, T, H, 3] in the order cmp, sel, win: sigmoid per branch, or softmax over branches.

        Gates of branches in `config.silent` are 0. The gate is a single linear map. The paper has an MLP, but gives neither
        its width nor its activation. A linear map depends on the token and has no hidden layer that could start dead; the
        benefit of an MLP was not measured.
        """
        return self.activate_gates(self.gate(x))

    def activate_gates(self, logits: Tensor) -> Tensor:
        """Return the gates [B, T, H, 3] for the output of the gate's linear map, [B, T, 3 H]."""
        logits = logits.unflatten(-1, (self.config.n_heads, 3))
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.config.silent:
            branch_logits = zip(BRANCHES, logits.unbind(-1), strict=True)
            masked = [
                torch.full_like(values, float("-inf")) if name in self.config.silent else values
                for name, values in branch_logits
            ]
            logits = torch.stack(masked, dim=-1)
        return logits.sigmoid() if self.config.nsa.gate == "sigmoid" else logits.softmax(-1)

    def _get_backends(self, q: Tensor, span: Span | None) -> Mapping[str, ResolvedBackend]:
        """Return the backends for q's device and dtype, which under autocast is the dtype that attention computes in."""
        is_full = span is None or span.is_full
        key = (q.device, q.dtype, is_full)
        if key not in self._resolved_backends:
            self._resolved_backends[key] = resolve_backend(
                q.device, q.dtype, self.config.nsa, self.config, self._backend, span=span
            )
        return self._resolved_backends[key]

    @torch.no_grad()
    def observe(self, x: Tensor, rotary: Rotary, span: Span | None = None) -> dict[str, Tensor]:
        """Return `gates`, `blocks`, `out_cmp`, `out_sel`, `out_win`, `lse_cmp`, `lse_sel`, `lse_sink` of the branches.

        `lse_sink` is the LSE over the first selection block only: exp(lse_sink - lse_sel) is its share of the selected
        branch's attention. Block indices are local to each document.
        """
        nsa = self.config.nsa
        inputs = self.project(x, rotary, span)
        q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates = inputs
        backends = self.backends or self._get_backends(q, span)
        name = {part: resolved.backend for part, resolved in backends.items()}
        out_cmp, lse_cmp = compressed_attention(q, k_cmp, v_cmp, nsa, backend=name["compressed"], span=span)
        blocks = score_and_select_blocks(
            *self.project_selection_inputs(x, inputs, rotary, span), backend=backends, span=span
        )
        out_sel, lse_sel = selected_attention(q, k_sel, v_sel, blocks, nsa, backend=name["selected"], span=span)
        first_block = torch.full_like(blocks, -1)
        first_block[..., 0] = 0
        _, lse_sink = selected_attention(q, k_sel, v_sel, first_block, nsa, backend=name["selected"], span=span)
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
    """Causal attention with G key/value groups, for the dense baseline: x [B, T, C] -> [B, T, C]."""

    N_BRANCHES = 1

    def __init__(self, config: ModelConfig, backends: Mapping[str, ResolvedBackend]) -> None:
        super().__init__()
        H, G, d_k, d_v = config.n_heads, config.n_kv_groups, config.d_k, config.d_v
        self.config, self.backends = config, backends
        self.qkv = nn.Linear(config.dim, H * d_k + G * (d_k + d_v), bias=False)
        self.convolution = ShortConvolution(self.N_BRANCHES, G, d_k) if config.matching_heads else None
        self.out = nn.Linear(H * d_v, config.dim, bias=False)

    def forward(
        self,
        x: Tensor,
        rotary: Rotary,
        span: Span | None = None,
        layouts: tuple[Layout, ...] | None = None,
        cache: CachedLayer | None = None,
    ) -> tuple[Tensor, None]:
        """Return the output and None (no selection loss); `layouts`: the result of `get_layouts`.

        `cache` as in `SparseAttention.forward`.
        """
        if cache is not None:
            return self.out(cache.attend(self, x)), None
        layouts = layouts or get_layouts(span, self.config, x.device)
        layout = layouts[0] if layouts else None
        q, (k,), (v,), _ = self.project_heads(x, rotary, layout and layout.is_document_start)
        out = dense_attention(q, k, v, backend=self.backends["dense"].backend, span=span, layout=layout)
        return self.out(out.flatten(2)), None

    def project_heads(
        self, x: Tensor, rotary: Rotary, is_document_start: Tensor | None = None, previous_k: Tensor | None = None
    ) -> ProjectedHeads:
        """Return the rotated heads of x, as `SparseAttention.project_heads`, with one branch."""
        unrotated = split_heads(self.qkv(x), self.config, self.convolution, self.N_BRANCHES, is_document_start, previous_k)
        return rotate_heads(unrotated, self.config, self.N_BRANCHES, rotary)
