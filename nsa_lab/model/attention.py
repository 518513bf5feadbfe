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
    kernels,
    nsa_attention,
    resolve_backend,
    selected_attention,
    selection_loss,
    window_attention,
)
from nsa_lab.attention.compression import BlockRows, block_rows, compress_documents, make_phi
from nsa_lab.attention.dense import DocumentBounds, document_bounds, documents_attention, takes_documents
from nsa_lab.attention.dispatch import Choice
from nsa_lab.attention.selection_loss import AskedQueries, asked, loss_of
from nsa_lab.attention.tracing import untraced
from nsa_lab.config import BRANCHES, ModelConfig, NSAConfig
from nsa_lab.model.indexer import Indexer
from nsa_lab.model.layers import Rotary, ShortConvolution, rotate

# What `nsa_attention` takes: q, then keys and values of cmp, sel and win, then gates.
AttentionInputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
Scoring = tuple[Tensor, Tensor, NSAConfig]
"""What blocks are chosen by: queries [B, T, ., D], compressed keys [B, N, G, D], and how those were compressed."""


class Packing(NamedTuple):
    """What a layer has to know of packed documents, as tensors: traced, it is the same whatever documents they are."""

    begins: Tensor
    """Bool [T], whether a token is the first of its document."""
    blocks: BlockRows
    index_blocks: BlockRows | None
    """Of the indexer's keys; None without one."""
    asked: AskedQueries | None
    """None where the choice is not taught."""
    table: kernels.DocumentTable | None
    """What the kernels ask; None where some part of attention is not theirs."""
    index_table: kernels.DocumentTable | None


def packing_of(
    span: Span | None, config: ModelConfig, backends: Mapping[str, Choice] | None, device: torch.device, *, taught: bool
) -> Packing | None:
    """Of a layer with these `backends`, whose choice is `taught`; None where there is one document, and then a layer stays
    one graph. What it holds is made once per span, device and geometry."""
    if span is None or span.kind != "packed":
        return None
    return _packing_of(span, config, backends, device, taught)


@untraced
def _packing_of(
    span: Span, config: ModelConfig, backends: Mapping[str, Choice] | None, device: torch.device, taught: bool
) -> Packing:
    ours = backends is not None and all(choice.backend == "triton" for choice in backends.values())
    return Packing(
        span.begins(device),
        block_rows(span, config.nsa, device),
        block_rows(span, config.choice_nsa, device) if config.indexed else None,
        asked(span, config.choice_nsa, device) if taught else None,
        kernels.document_table(span, config.nsa, device) if ours else None,
        kernels.document_table(span, config.choice_nsa, device) if ours and config.indexed else None,
    )


class DensePacking(NamedTuple):
    """As `Packing`, of a dense layer."""

    begins: Tensor
    documents: DocumentBounds | None
    """None where documents are attended in several calls."""


def dense_packing_of(span: Span | None, device: torch.device) -> DensePacking | None:
    """As `packing_of`, of a dense layer."""
    return None if span is None or span.kind != "packed" else _dense_packing_of(span, device)


@untraced
def _dense_packing_of(span: Span, device: torch.device) -> DensePacking:
    return DensePacking(span.begins(device), document_bounds(span, device))


class Heads(NamedTuple):
    """What a layer's projection gives for x [B, T, C], rotated: of every branch for NSA, of one for dense attention."""

    q: Tensor
    """[B, T, H, d_k]"""
    keys: tuple[Tensor, ...]
    """[B, T, G, d_k] each, before compression; of cmp, sel, win."""
    values: tuple[Tensor, ...]
    """[B, T, G, d_v] each."""
    unmixed: Tensor | None
    """With matching heads, keys before the convolution, [B, T, branches, G, d_k]; a token's are the next one's `before`."""


class Unturned(NamedTuple):
    """What `Heads` are made of, before the rotation."""

    roped: Tensor
    """[B, T, H + branches G, d_k]: queries, then the keys of every branch."""
    values: Tensor
    """[B, T, branches G, d_v]"""
    unmixed: Tensor | None
    """As in `Heads`."""


def unturned_heads(
    qkv: Tensor,
    config: ModelConfig,
    convolution: ShortConvolution | None,
    branches: int,
    begins: Tensor | None,
    before: Tensor | None,
) -> Unturned:
    """`Unturned` of a projection's output [B, T, H d_k + branches G (d_k + d_v)].

    `begins` as in `Packing`; None: one document. `before` is `unmixed` of the tokens before these, [B, 1, ...];
    None: these are the first.
    """
    roped, values = split_projection(qkv, config, branches)
    unmixed = None
    if convolution:
        q, k = roped.split([config.n_heads, values.shape[2]], dim=2)
        unmixed = k.unflatten(2, (branches, config.n_kv_groups))
        roped = torch.cat([q, convolution(unmixed, begins, before).flatten(2, 3)], dim=2)
    return Unturned(roped, values, unmixed)


def split_projection(qkv: Tensor, config: ModelConfig, branches: int) -> tuple[Tensor, Tensor]:
    """Queries and keys [B, T, H + branches G, d_k] and values [B, T, branches G, d_v] of a projection's output."""
    c, keys = config, branches * config.n_kv_groups
    roped, values = qkv.split([(c.n_heads + keys) * c.d_k, keys * c.d_v], dim=-1)
    return roped.unflatten(-1, (c.n_heads + keys, c.d_k)), values.unflatten(-1, (keys, c.d_v))


def turned_heads(unturned: Unturned, config: ModelConfig, branches: int, rotary: Rotary) -> Heads:
    """`Heads` for x of positions `rotary`."""
    # q and all keys are neighbours in the projection, so that one rotation turns them all.
    q, *turned = rotate(unturned.roped, rotary).split([config.n_heads, *[config.n_kv_groups] * branches], dim=2)
    return Heads(q, tuple(turned), unturned.values.split(config.n_kv_groups, dim=2), unturned.unmixed)


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
        self.indexer = Indexer(config) if config.indexer_block else None
        self.out = nn.Linear(H * d_v, config.dim, bias=False)
        self._resolved: dict[tuple[torch.device, torch.dtype, bool], Mapping[str, Choice]] = {}

    def forward(
        self, x: Tensor, rotary: Rotary, span: Span | None = None, packing: Packing | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """The output, and in training the layer's `selection_loss`, 0-d; None where `ModelConfig.selection_loss` is 0.

        `packing` is what `packing_of` gives of this layer; None: it is asked here, which splits what is compiled in two.
        """
        packing = packing or self._packing(span, x.device)
        inputs = self._project(x, rotary, span, packing)
        index = self._index(x, rotary, span, packing)
        taught = self._teach(inputs, index, span, packing) if self._teaches else None
        if packing is None:
            mixed = self._attend(inputs, index, span)
        elif packing.table is None:
            mixed = _attend_documents(self, inputs, index, span)
        else:
            mixed = self._attend_by_tables(inputs, index, packing)
        return self.out(mixed.flatten(2)), taught

    def project(self, x: Tensor, rotary: Rotary, span: Span | None = None) -> AttentionInputs:
        """q [B, T, H, d_k]; k, v of cmp [B, N, G, .], of sel and win [B, T, G, .]; gates [B, T, H, 3].

        `rotary` is that of x's positions. x holds all keys: a span is full or packed.
        """
        return self._project(x, rotary, span, self._packing(span, x.device))

    def scoring(self, x: Tensor, inputs: AttentionInputs, rotary: Rotary, span: Span | None = None) -> Scoring:
        """What chooses the blocks: the indexer, or the compressed branch; `inputs` are those of `project` for this x."""
        return self._index(x, rotary, span, self._packing(span, x.device)) or (*inputs[:2], self.config.nsa)

    def heads(self, x: Tensor, rotary: Rotary, begins: Tensor | None = None, before: Tensor | None = None) -> Heads:
        """Queries, keys and values of x, before compression; `begins` and `before` as in `unturned_heads`."""
        return turned_heads(self.unturned(x, begins, before), self.config, self.BRANCHES, rotary)

    def unturned(self, x: Tensor, begins: Tensor | None = None, before: Tensor | None = None) -> Unturned:
        """As `heads`, before the rotation."""
        return unturned_heads(self.qkv(x), self.config, self.convolution, self.BRANCHES, begins, before)

    def _packing(self, span: Span | None, device: torch.device) -> Packing | None:
        return packing_of(span, self.config, self.backends, device, taught=self._teaches)

    def _project(self, x: Tensor, rotary: Rotary, span: Span | None, packing: Packing | None) -> AttentionInputs:
        q, (k_cmp, k_sel, k_win), (v_cmp, v_sel, v_win), _ = self.heads(x, rotary, packing and packing.begins)
        nsa = self.config.nsa
        if packing is None:
            k_cmp, v_cmp = compress(k_cmp, nsa, self.phi_k, span=span), compress(v_cmp, nsa, self.phi_v, span=span)
        else:
            k_cmp = compress_documents(k_cmp, nsa, self.phi_k, packing.blocks)
            v_cmp = compress_documents(v_cmp, nsa, self.phi_v, packing.blocks)
        return q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, self.gates(x).to(q.dtype)

    def _index(self, x: Tensor, rotary: Rotary, span: Span | None, packing: Packing | None) -> Scoring | None:
        """None without an indexer."""
        if self.indexer is None:
            return None
        index = self.indexer(x, rotary, packing and packing.begins)
        return index.q, self.indexer.compress(index.k, span, packing and packing.index_blocks), self.indexer.nsa

    @property
    def _teaches(self) -> bool:
        return self.training and self.config.taught

    def _teach(self, inputs: AttentionInputs, index: Scoring | None, span: Span | None, packing: Packing | None) -> Tensor:
        looking, k_cmp, _, k_sel, *_ = inputs
        q, k_cmp, nsa = index or (looking, k_cmp, self.config.nsa)
        if packing is None or packing.asked is None:
            return selection_loss(q, k_cmp, k_sel, nsa, looking=looking, span=span)
        return loss_of(q, k_cmp, looking, k_sel, nsa, packing.asked)

    def _attend(self, inputs: AttentionInputs, index: Scoring | None, span: Span | None) -> Tensor:
        """What the branches find, [B, T, H, d_v]."""
        nsa, backends = self.config.nsa, self.backends or self._resolve(inputs[0], span)
        blocks = choose_blocks(*index, backend=backends, span=span) if index else None
        return nsa_attention(*inputs, nsa, blocks=blocks, backend=backends, span=span)

    def _attend_by_tables(self, inputs: AttentionInputs, index: Scoring | None, packing: Packing) -> Tensor:
        """As `_attend`, by the kernels alone."""
        blocks = None
        if index:
            with torch.no_grad():
                blocks = kernels.select_blocks(*index[:2], None, index[2], span=packing.index_table)
        return kernels.nsa_attention(*inputs, self.config.nsa, blocks=blocks, span=packing.table)

    def gates(self, x: Tensor) -> Tensor:
        """[B, T, H, 3] in the order cmp, sel, win: sigmoid per branch, or softmax over the branches; 0 for those that are
        `silent`.

        Of one linear map, where the paper has an MLP and gives neither its width nor its activation. One map lets a gate
        depend on the token and has no hidden layer that could start dead; what an MLP would add was not measured.
        """
        return self.opened(self.gate(x))

    def opened(self, logits: Tensor) -> Tensor:
        """`gates` [B, T, H, 3] of what its linear map gives, [B, T, 3 H]."""
        logits = logits.unflatten(-1, (self.config.n_heads, 3))
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.config.silent:
            named = zip(BRANCHES, logits.unbind(-1), strict=True)
            shut = [torch.full_like(of, float("-inf")) if name in self.config.silent else of for name, of in named]
            logits = torch.stack(shut, dim=-1)
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
        backends = self.backends or self._resolve(q, span)
        name = {part: choice.backend for part, choice in backends.items()}
        out_cmp, lse_cmp = compressed_attention(q, k_cmp, v_cmp, nsa, backend=name["compressed"], span=span)
        blocks = choose_blocks(*self.scoring(x, inputs, rotary, span), backend=backends, span=span)
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

    def forward(
        self, x: Tensor, rotary: Rotary, span: Span | None = None, packing: DensePacking | None = None
    ) -> tuple[Tensor, None]:
        """The output, and no selection loss: as `SparseAttention.forward`, with what `dense_packing_of` gives."""
        packing = packing or dense_packing_of(span, x.device)
        q, (k,), (v,), _ = self.heads(x, rotary, packing and packing.begins)
        backend = self.backends["dense"].backend
        if packing is None:
            mixed = dense_attention(q, k, v, backend=backend, span=span)
        elif packing.documents is not None and backend == "torch" and takes_documents(q, v):
            mixed = documents_attention(q, k, v, packing.documents)
        else:
            mixed = _attend_densely(q, k, v, backend=backend, span=span)
        return self.out(mixed.flatten(2)), None

    def heads(self, x: Tensor, rotary: Rotary, begins: Tensor | None = None, before: Tensor | None = None) -> Heads:
        """As `SparseAttention.heads`, of one branch."""
        unturned = unturned_heads(self.qkv(x), self.config, self.convolution, self.BRANCHES, begins, before)
        return turned_heads(unturned, self.config, self.BRANCHES, rotary)


# Documents are another layout in every batch: traced, their bounds would be constants, and each batch be compiled anew.
_attend_documents = untraced(SparseAttention._attend)  # pyright: ignore[reportPrivateUsage]
_attend_densely = untraced(dense_attention)
