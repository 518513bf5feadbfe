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
    compress,
    compressed_attention,
    dense_attention,
    kernels,
    nsa_attention,
    resolve_backend,
    score_and_select_blocks,
    selected_attention,
    selection_loss,
    window_attention,
)
from nsa_lab.attention.compile_utils import disable_compile
from nsa_lab.attention.compression import PackedBlockIndices, compress_packed, get_packed_indices, make_phi
from nsa_lab.attention.dense import VarlenInputs, get_varlen_inputs, packed_dense_attention, supports_varlen
from nsa_lab.attention.dispatch import ResolvedBackend
from nsa_lab.attention.selection_loss import SampledQueries, compute_sampled_loss, get_sampled_queries
from nsa_lab.config import BRANCHES, ModelConfig, NSAConfig
from nsa_lab.model.indexer import Indexer
from nsa_lab.model.layers import Rotary, ShortConvolution, rotate

# What `nsa_attention` takes: q, then keys and values of cmp, sel and win, then gates.
AttentionInputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
SelectionInputs = tuple[Tensor, Tensor, NSAConfig]
"""What blocks are chosen by: queries [B, T, ., D], compressed keys [B, N, G, D], and how those were compressed."""


class PackedInputs(NamedTuple):
    """What a layer has to know of packed documents, as tensors: traced, it is the same whatever documents they are."""

    is_document_start: Tensor
    """Bool [T], whether a token is the first of its document."""
    block_indices: PackedBlockIndices
    indexer_block_indices: PackedBlockIndices | None
    """Of the indexer's keys; None without one."""
    sampled_queries: SampledQueries | None
    """None where the choice is not taught."""
    kernel_table: kernels.DocumentTable | None
    """What the kernels ask; None where some part of attention is not theirs."""
    indexer_kernel_table: kernels.DocumentTable | None


def get_packed_inputs(
    span: Span | None,
    config: ModelConfig,
    backends: Mapping[str, ResolvedBackend] | None,
    device: torch.device,
    *,
    has_selection_loss: bool,
) -> PackedInputs | None:
    """Of a layer with these `backends`, whose choice is `taught`; None where there is one document, and then a layer stays
    one graph. What it holds is made once per span, device and geometry."""
    if span is None or span.kind != "packed":
        return None
    return _build_packed_inputs(span, config, backends, device, has_selection_loss)


@disable_compile
def _build_packed_inputs(
    span: Span,
    config: ModelConfig,
    backends: Mapping[str, ResolvedBackend] | None,
    device: torch.device,
    has_selection_loss: bool,
) -> PackedInputs:
    ours = backends is not None and all(choice.backend == "triton" for choice in backends.values())
    return PackedInputs(
        span.is_document_start(device),
        get_packed_indices(span, config.nsa, device),
        get_packed_indices(span, config.selection_nsa, device) if config.has_indexer else None,
        get_sampled_queries(span, config.selection_nsa, device) if has_selection_loss else None,
        kernels.make_document_table(span, config.nsa, device) if ours else None,
        kernels.make_document_table(span, config.selection_nsa, device) if ours and config.has_indexer else None,
    )


class DensePackedInputs(NamedTuple):
    """As `Packing`, of a dense layer."""

    is_document_start: Tensor
    varlen_inputs: VarlenInputs | None
    """None where documents are attended in several calls."""


def get_dense_packed_inputs(span: Span | None, device: torch.device) -> DensePackedInputs | None:
    """As `packing_of`, of a dense layer."""
    return None if span is None or span.kind != "packed" else _build_dense_packed_inputs(span, device)


@disable_compile
def _build_dense_packed_inputs(span: Span, device: torch.device) -> DensePackedInputs:
    return DensePackedInputs(span.is_document_start(device), get_varlen_inputs(span, device))


class ProjectedHeads(NamedTuple):
    """What a layer's projection gives for x [B, T, C], rotated: of every branch for NSA, of one for dense attention."""

    q: Tensor
    """[B, T, H, d_k]"""
    keys: tuple[Tensor, ...]
    """[B, T, G, d_k] each, before compression; of cmp, sel, win."""
    values: tuple[Tensor, ...]
    """[B, T, G, d_v] each."""
    k_before_conv: Tensor | None
    """With matching heads, keys before the convolution, [B, T, branches, G, d_k]; a token's are the next one's `before`."""


class UnrotatedHeads(NamedTuple):
    """What `Heads` are made of, before the rotation."""

    qk: Tensor
    """[B, T, H + branches G, d_k]: queries, then the keys of every branch."""
    values: Tensor
    """[B, T, branches G, d_v]"""
    k_before_conv: Tensor | None
    """As in `Heads`."""


def split_heads(
    qkv: Tensor,
    config: ModelConfig,
    convolution: ShortConvolution | None,
    n_branches: int,
    is_document_start: Tensor | None,
    previous_k: Tensor | None,
) -> UnrotatedHeads:
    """`Unturned` of a projection's output [B, T, H d_k + branches G (d_k + d_v)].

    `begins` as in `Packing`; None: one document. `before` is `unmixed` of the tokens before these, [B, 1, ...];
    None: these are the first.
    """
    roped, values = split_projection(qkv, config, n_branches)
    unmixed = None
    if convolution:
        q, k = roped.split([config.n_heads, values.shape[2]], dim=2)
        unmixed = k.unflatten(2, (n_branches, config.n_kv_groups))
        roped = torch.cat([q, convolution(unmixed, is_document_start, previous_k).flatten(2, 3)], dim=2)
    return UnrotatedHeads(roped, values, unmixed)


def split_projection(qkv: Tensor, config: ModelConfig, n_branches: int) -> tuple[Tensor, Tensor]:
    """Queries and keys [B, T, H + branches G, d_k] and values [B, T, branches G, d_v] of a projection's output."""
    c, keys = config, n_branches * config.n_kv_groups
    roped, values = qkv.split([(c.n_heads + keys) * c.d_k, keys * c.d_v], dim=-1)
    return roped.unflatten(-1, (c.n_heads + keys, c.d_k)), values.unflatten(-1, (keys, c.d_v))


def rotate_heads(unrotated: UnrotatedHeads, config: ModelConfig, n_branches: int, rotary: Rotary) -> ProjectedHeads:
    """`Heads` for x of positions `rotary`."""
    # q and all keys are neighbours in the projection, so that one rotation turns them all.
    q, *turned = rotate(unrotated.qk, rotary).split([config.n_heads, *[config.n_kv_groups] * n_branches], dim=2)
    return ProjectedHeads(q, tuple(turned), unrotated.values.split(config.n_kv_groups, dim=2), unrotated.k_before_conv)


def scale_selection_loss(loss: Tensor | None, weight: float, like: Tensor) -> Tensor:
    """A selection loss times its weight, 0-d; where there is none, 0 on the device of `like`."""
    return torch.zeros((), device=like.device) if loss is None else loss * weight


class SparseAttention(nn.Module):
    """Projections, compression, gate and output around `nsa_attention`: x [B, T, C] -> [B, T, C].

    `backends` is what `resolve_backend` gave; None: resolved for the device and dtype of each input, and kept.
    """

    N_BRANCHES = 3

    def __init__(self, config: ModelConfig, backends: Mapping[str, ResolvedBackend] | None) -> None:
        super().__init__()
        H, G, d_k, d_v = config.n_heads, config.n_kv_groups, config.d_k, config.d_v
        self.config, self.backends = config, backends
        self.qkv = nn.Linear(config.dim, H * d_k + 3 * G * (d_k + d_v), bias=False)
        self.gate = nn.Linear(config.dim, 3 * H, bias=False)
        self.phi_k, self.phi_v = make_phi(config.nsa, d_k), make_phi(config.nsa, d_v)
        self.convolution = ShortConvolution(self.N_BRANCHES, G, d_k) if config.matching_heads else None
        self.indexer = Indexer(config) if config.indexer_block else None
        self.out = nn.Linear(H * d_v, config.dim, bias=False)
        self._resolved_backends: dict[tuple[torch.device, torch.dtype, bool], Mapping[str, ResolvedBackend]] = {}

    def forward(
        self, x: Tensor, rotary: Rotary, span: Span | None = None, packed_inputs: PackedInputs | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """The output, and in training the layer's `selection_loss`, 0-d; None where `ModelConfig.selection_loss` is 0.

        `packing` is what `packing_of` gives of this layer; None: it is asked here, which splits what is compiled in two.
        """
        packed_inputs = packed_inputs or self._get_packed_inputs(span, x.device)
        inputs = self._project(x, rotary, span, packed_inputs)
        index = self._project_indexer(x, rotary, span, packed_inputs)
        taught = self._compute_selection_loss(inputs, index, span, packed_inputs) if self._has_selection_loss else None
        if packed_inputs is None:
            mixed = self._attend(inputs, index, span)
        elif packed_inputs.kernel_table is None:
            mixed = _attend_uncompiled(self, inputs, index, span)
        else:
            mixed = self._attend_with_kernels(inputs, index, packed_inputs)
        return self.out(mixed.flatten(2)), taught

    def project(self, x: Tensor, rotary: Rotary, span: Span | None = None) -> AttentionInputs:
        """q [B, T, H, d_k]; k, v of cmp [B, N, G, .], of sel and win [B, T, G, .]; gates [B, T, H, 3].

        `rotary` is that of x's positions. x holds all keys: a span is full or packed.
        """
        return self._project(x, rotary, span, self._get_packed_inputs(span, x.device))

    def project_selection_inputs(
        self, x: Tensor, inputs: AttentionInputs, rotary: Rotary, span: Span | None = None
    ) -> SelectionInputs:
        """What chooses the blocks: the indexer, or the compressed branch; `inputs` are those of `project` for this x."""
        return self._project_indexer(x, rotary, span, self._get_packed_inputs(span, x.device)) or (
            *inputs[:2],
            self.config.nsa,
        )

    def project_heads(
        self, x: Tensor, rotary: Rotary, is_document_start: Tensor | None = None, previous_k: Tensor | None = None
    ) -> ProjectedHeads:
        """Queries, keys and values of x, before compression; `begins` and `before` as in `unturned_heads`."""
        return rotate_heads(self.project_unrotated(x, is_document_start, previous_k), self.config, self.N_BRANCHES, rotary)

    def project_unrotated(
        self, x: Tensor, is_document_start: Tensor | None = None, previous_k: Tensor | None = None
    ) -> UnrotatedHeads:
        """As `heads`, before the rotation."""
        return split_heads(self.qkv(x), self.config, self.convolution, self.N_BRANCHES, is_document_start, previous_k)

    def _get_packed_inputs(self, span: Span | None, device: torch.device) -> PackedInputs | None:
        return get_packed_inputs(span, self.config, self.backends, device, has_selection_loss=self._has_selection_loss)

    def _project(self, x: Tensor, rotary: Rotary, span: Span | None, packed_inputs: PackedInputs | None) -> AttentionInputs:
        q, (k_cmp, k_sel, k_win), (v_cmp, v_sel, v_win), _ = self.project_heads(
            x, rotary, packed_inputs and packed_inputs.is_document_start
        )
        nsa = self.config.nsa
        if packed_inputs is None:
            k_cmp, v_cmp = compress(k_cmp, nsa, self.phi_k, span=span), compress(v_cmp, nsa, self.phi_v, span=span)
        else:
            k_cmp = compress_packed(k_cmp, nsa, self.phi_k, packed_inputs.block_indices)
            v_cmp = compress_packed(v_cmp, nsa, self.phi_v, packed_inputs.block_indices)
        return q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, self.compute_gates(x).to(q.dtype)

    def _project_indexer(
        self, x: Tensor, rotary: Rotary, span: Span | None, packed_inputs: PackedInputs | None
    ) -> SelectionInputs | None:
        """None without an indexer."""
        if self.indexer is None:
            return None
        index = self.indexer(x, rotary, packed_inputs and packed_inputs.is_document_start)
        return (
            index.q,
            self.indexer.compress(index.k, span, packed_inputs and packed_inputs.indexer_block_indices),
            self.indexer.nsa,
        )

    @property
    def _has_selection_loss(self) -> bool:
        return self.training and self.config.has_selection_loss

    def _compute_selection_loss(
        self,
        inputs: AttentionInputs,
        selection_inputs: SelectionInputs | None,
        span: Span | None,
        packed_inputs: PackedInputs | None,
    ) -> Tensor:
        looking, k_cmp, _, k_sel, *_ = inputs
        q, k_cmp, nsa = selection_inputs or (looking, k_cmp, self.config.nsa)
        if packed_inputs is None or packed_inputs.sampled_queries is None:
            return selection_loss(q, k_cmp, k_sel, nsa, attention_q=looking, span=span)
        return compute_sampled_loss(q, k_cmp, looking, k_sel, nsa, packed_inputs.sampled_queries)

    def _attend(self, inputs: AttentionInputs, selection_inputs: SelectionInputs | None, span: Span | None) -> Tensor:
        """What the branches find, [B, T, H, d_v]."""
        nsa, backends = self.config.nsa, self.backends or self._get_backends(inputs[0], span)
        blocks = score_and_select_blocks(*selection_inputs, backend=backends, span=span) if selection_inputs else None
        return nsa_attention(*inputs, nsa, blocks=blocks, backend=backends, span=span)

    def _attend_with_kernels(
        self, inputs: AttentionInputs, selection_inputs: SelectionInputs | None, packed_inputs: PackedInputs
    ) -> Tensor:
        """As `_attend`, by the kernels alone."""
        blocks = None
        if selection_inputs:
            with torch.no_grad():
                blocks = kernels.select_blocks(
                    *selection_inputs[:2], None, selection_inputs[2], span=packed_inputs.indexer_kernel_table
                )
        return kernels.nsa_attention(*inputs, self.config.nsa, blocks=blocks, span=packed_inputs.kernel_table)

    def compute_gates(self, x: Tensor) -> Tensor:
        """[B, T, H, 3] in the order cmp, sel, win: sigmoid per branch, or softmax over the branches; 0 for those that are
        `silent`.

        Of one linear map, where the paper has an MLP and gives neither its width nor its activation. One map lets a gate
        depend on the token and has no hidden layer that could start dead; what an MLP would add was not measured.
        """
        return self.activate_gates(self.gate(x))

    def activate_gates(self, logits: Tensor) -> Tensor:
        """`gates` [B, T, H, 3] of what its linear map gives, [B, T, 3 H]."""
        logits = logits.unflatten(-1, (self.config.n_heads, 3))
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.config.silent:
            named = zip(BRANCHES, logits.unbind(-1), strict=True)
            shut = [torch.full_like(of, float("-inf")) if name in self.config.silent else of for name, of in named]
            logits = torch.stack(shut, dim=-1)
        return logits.sigmoid() if self.config.nsa.gate == "sigmoid" else logits.softmax(-1)

    def _get_backends(self, q: Tensor, span: Span | None) -> Mapping[str, ResolvedBackend]:
        """For q's dtype: what attention computes in, autocast included."""
        full = span is None or span.is_full
        key = (q.device, q.dtype, full)
        if key not in self._resolved_backends:
            self._resolved_backends[key] = resolve_backend(q.device, q.dtype, self.config.nsa, self.config, span=span)
        return self._resolved_backends[key]

    @torch.no_grad()
    def observe(self, x: Tensor, rotary: Rotary, span: Span | None = None) -> dict[str, Tensor]:
        """What each branch did: `gates`, `blocks`, `out_cmp`, `out_sel`, `out_win`, `lse_cmp`, `lse_sel`, `lse_sink`.

        `lse_sink` is the LSE of the first selection block alone, so exp(lse_sink - lse_sel) is the share it holds. Blocks
        are each document's own.
        """
        nsa = self.config.nsa
        inputs = self.project(x, rotary, span)
        q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates = inputs
        backends = self.backends or self._get_backends(q, span)
        name = {part: choice.backend for part, choice in backends.items()}
        out_cmp, lse_cmp = compressed_attention(q, k_cmp, v_cmp, nsa, backend=name["compressed"], span=span)
        blocks = score_and_select_blocks(
            *self.project_selection_inputs(x, inputs, rotary, span), backend=backends, span=span
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

    N_BRANCHES = 1

    def __init__(self, config: ModelConfig, backends: Mapping[str, ResolvedBackend]) -> None:
        super().__init__()
        H, G, d_k, d_v = config.n_heads, config.n_kv_groups, config.d_k, config.d_v
        self.config, self.backends = config, backends
        self.qkv = nn.Linear(config.dim, H * d_k + G * (d_k + d_v), bias=False)
        self.convolution = ShortConvolution(self.N_BRANCHES, G, d_k) if config.matching_heads else None
        self.out = nn.Linear(H * d_v, config.dim, bias=False)

    def forward(
        self, x: Tensor, rotary: Rotary, span: Span | None = None, packed_inputs: DensePackedInputs | None = None
    ) -> tuple[Tensor, None]:
        """The output, and no selection loss: as `SparseAttention.forward`, with what `dense_packing_of` gives."""
        packed_inputs = packed_inputs or get_dense_packed_inputs(span, x.device)
        q, (k,), (v,), _ = self.project_heads(x, rotary, packed_inputs and packed_inputs.is_document_start)
        backend = self.backends["dense"].backend
        if packed_inputs is None:
            mixed = dense_attention(q, k, v, backend=backend, span=span)
        elif packed_inputs.varlen_inputs is not None and backend == "torch" and supports_varlen(q, v):
            mixed = packed_dense_attention(q, k, v, packed_inputs.varlen_inputs)
        else:
            mixed = _dense_attention_uncompiled(q, k, v, backend=backend, span=span)
        return self.out(mixed.flatten(2)), None

    def project_heads(
        self, x: Tensor, rotary: Rotary, is_document_start: Tensor | None = None, previous_k: Tensor | None = None
    ) -> ProjectedHeads:
        """As `SparseAttention.heads`, of one branch."""
        unturned = split_heads(self.qkv(x), self.config, self.convolution, self.N_BRANCHES, is_document_start, previous_k)
        return rotate_heads(unturned, self.config, self.N_BRANCHES, rotary)


# Documents are another layout in every batch: traced, their bounds would be constants, and each batch be compiled anew.
_attend_uncompiled = disable_compile(SparseAttention._attend)  # pyright: ignore[reportPrivateUsage]
_dense_attention_uncompiled = disable_compile(dense_attention)
