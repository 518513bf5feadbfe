"""Attention layers: compression, gate, block selection and output projection around the operator.

Shape suffixes: B batch, T time, H query heads, G key/value groups, C model width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from nsa_lab.attention import (
    Span,
    compressed_attention,
    dense_attention,
    nsa_attention,
    resolve_backend,
    score_and_select_blocks,
    selected_attention,
    selection_loss,
    window_attention,
)
from nsa_lab.attention.compile_utils import disable_compile, is_exporting
from nsa_lab.attention.compression import make_phi
from nsa_lab.attention.context_parallel import ContextShard
from nsa_lab.attention.dense import find_single_call
from nsa_lab.attention.dispatch import ResolvedBackend
from nsa_lab.attention.exported import compress_traceable, exported_attention, exported_selection
from nsa_lab.attention.layout import Layout
from nsa_lab.config import BRANCHES, ModelConfig, NSAConfig
from nsa_lab.model.cache_protocols import CachedLayer
from nsa_lab.model.context_parallel import attend_dense_shard, attend_shard
from nsa_lab.model.head_projections import (
    ProjectedHeads,
    UnrotatedHeads,
    make_projections,
    rotate_heads,
    split_heads,
    split_projection,
)
from nsa_lab.model.indexer import Indexer
from nsa_lab.model.layers import Rotary

# Arguments of `nsa_attention`: q, then keys and values of cmp, sel and win, then gates.
AttentionInputs = tuple[
    Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None
]
SelectionInputs = tuple[Tensor, Tensor, NSAConfig]
"""Inputs of block selection: queries [B, T, ., D], compressed keys [B, N, G, D], and the configuration of the keys."""


class Selection(NamedTuple):
    """Result of block selection in a layer."""

    loss: Tensor | None = None
    """Selection loss, 0-d, in training with `ModelConfig.selection_loss`; otherwise None."""
    blocks: Tensor | None = None
    """int32 [B, T, G, n_sel], blocks for the layers after this one, if they have no indexer (`indexer_every`)."""


def get_layouts(span: Span | ContextShard | None, config: ModelConfig, device: torch.device) -> tuple[Layout, ...] | None:
    """Return the layouts of a packed span for a layer: of `config.nsa`, and of `config.selection_nsa` if it differs.

    Built once per span and device, for all layers. None if `span` is not packed: everything then follows from shapes. For a
    shard, the layouts of its text.
    """
    span = span.text if isinstance(span, ContextShard) else span
    return None if span is None or span.kind != "packed" else _build_layouts(span, config, device)


@disable_compile
def _build_layouts(span: Span, config: ModelConfig, device: torch.device) -> tuple[Layout, ...]:
    if config.attention == "dense":
        return (span.layout(config.nsa, device)._replace(varlen_attn=find_single_call(span, device)),)
    return tuple(span.layout(nsa, device) for nsa in dict.fromkeys((config.nsa, config.selection_nsa)))


def scale_selection_loss(loss: Tensor | None, weight: float, like: Tensor) -> Tensor:
    """Return the selection loss times its weight, 0-d; without a loss, 0 on the device of `like`."""
    return torch.zeros((), device=like.device) if loss is None else loss * weight


class SparseAttention(nn.Module):
    """Projections, compression, gate and output projection around `nsa_attention`: x [B, T, C] -> [B, T, C].

    `backends`: the result of `resolve_backend`; None: resolve `backend` for the device and dtype of each input, once.
    `layer_index`: number of the layer in its model. With `ModelConfig.indexer_every`, some layers have no indexer.
    """

    def __init__(
        self,
        config: ModelConfig,
        backends: Mapping[str, ResolvedBackend] | None,
        backend: str = "auto",
        layer_index: int = 0,
    ) -> None:
        super().__init__()
        self.config, self.backends, self._backend = config, backends, backend
        # A property that copies a configuration would break a traced graph.
        self.selection_nsa = config.selection_nsa
        self._geometries = config.nsa.model_dump_json(), self.selection_nsa.model_dump_json()
        has_compression = "cmp" in config.branches
        self.qkv, convolution, out = make_projections(config)
        # The output of a single branch needs no gate.
        n_gates = len(config.branches) if len(config.branches) > 1 else 0
        self.gate = nn.Linear(config.dim, n_gates * config.n_heads, bias=False) if n_gates else None
        self.phi_k, self.phi_v = (
            make_phi(config.nsa, width) if has_compression else None for width in (config.d_k, config.d_v)
        )
        self.convolution = convolution
        self.indexer = Indexer(config) if config.has_indexer_in(layer_index) else None
        self.out = out
        self._resolved_backends: dict[tuple[torch.device, torch.dtype, bool], Mapping[str, ResolvedBackend]] = {}
        self.trains_densely = False
        """In training, attend to all tokens: the indexer learns from a model that its selection does not change yet."""

    def forward(
        self,
        x: Tensor,
        rotary: Rotary,
        span: Span | ContextShard | None = None,
        layouts: tuple[Layout, ...] | None = None,
        cache: CachedLayer | None = None,
        blocks: Tensor | None = None,
        query_weights: Tensor | None = None,
    ) -> tuple[Tensor, Selection]:
        """Return the output and the result of block selection.

        `layouts`: the result of `get_layouts` for this layer; None: build it here, which breaks a compiled graph in two.
        `cache`: the cache of this layer, if x are new tokens; it holds the selected blocks. `blocks`: the blocks that an
        earlier layer selected, for a layer without an indexer in a model with one. With a `ContextShard`, x, the output and
        the blocks belong to this rank, and `rotary` has the positions of the whole text. `query_weights`: as in
        `selection_loss`, not with a ContextShard.
        """
        if cache is not None:
            return self.out(cache.attend(self, x)), Selection()
        self._check_blocks(blocks)
        layouts = layouts or get_layouts(span, self.config, x.device)
        if isinstance(span, ContextShard):
            out, *selection = attend_shard(
                self, *split_projection(self.qkv(x), self.config), x, rotary, span, layouts, blocks
            )
            return self.out(out.flatten(2)), Selection(*selection)
        layout, selection_layout = (layouts[0], layouts[-1]) if layouts else (None, None)
        inputs = self._project(x, rotary, span, layout)
        scoring = self._project_selection_inputs(x, inputs, rotary, span, selection_layout) if blocks is None else None
        loss = None
        backends = None if is_exporting() else self.backends or self._get_backends(inputs[0], span)
        if self.training and self.config.has_selection_loss and scoring is not None and inputs[3] is not None:
            q, k, nsa = scoring
            n_queries = self.config.selection_queries
            loss = selection_loss(
                q,
                k,
                inputs[3],
                nsa,
                attention_q=inputs[0],
                n_queries=n_queries,
                span=span,
                layout=selection_layout,
                query_weights=query_weights,
                backend=backends or "torch",
            )
        if self.training and self.trains_densely and inputs[3] is not None and inputs[4] is not None:
            out = dense_attention(inputs[0], inputs[3], inputs[4], span=span)
            # Later layers without an indexer check that they get blocks, and do not read them.
            return self.out(out.flatten(2)), Selection(loss, x.new_empty(0, dtype=torch.int32))
        # The scores of the compressed branch are a part of the operator, which selects the blocks then.
        if scoring is not None and self.config.scores != "compressed":
            if backends is None:
                blocks = exported_selection(*scoring[:2], self._geometries[1])
            else:
                blocks = score_and_select_blocks(*scoring, backend=backends, span=span, layout=selection_layout)
        if backends is None:
            out = exported_attention(inputs, blocks, self._geometries[0])
        else:
            out = nsa_attention(*inputs, self.config.nsa, blocks=blocks, backend=backends, span=span, layout=layout)
        return self.out(out.flatten(2)), Selection(loss, blocks if self.config.indexer_every > 1 else None)

    def project(self, x: Tensor, rotary: Rotary, span: Span | None = None) -> AttentionInputs:
        """Return q [B, T, H, d_k]; k, v of cmp [B, N, G, .], of sel and win [B, T, G, .]; gates [B, T, H, branches].

        None for branches that do not exist, and for the gates of a single branch. `rotary`: tables at the positions of x. x
        holds all keys, so `span` is full or packed.
        """
        layouts = get_layouts(span, self.config, x.device)
        return self._project(x, rotary, span, layouts[0] if layouts else None)

    def project_selection_inputs(
        self, x: Tensor, inputs: AttentionInputs, rotary: Rotary, span: Span | None = None
    ) -> SelectionInputs | None:
        """Return queries and keys that score the blocks: of the indexer, or in `inputs` (from `project`).

        None if this layer scores no blocks: without a selected branch, or if it uses the blocks of an earlier layer.
        """
        layouts = get_layouts(span, self.config, x.device)
        return self._project_selection_inputs(x, inputs, rotary, span, layouts[-1] if layouts else None)

    def project_heads(
        self, x: Tensor, rotary: Rotary, is_document_start: Tensor | None = None, previous_k: Tensor | None = None
    ) -> ProjectedHeads:
        """Return the rotated heads of x, before compression; `is_document_start`, `previous_k` as in `split_heads`."""
        return rotate_heads(self.project_unrotated(x, is_document_start, previous_k), self.config, rotary)

    def project_unrotated(
        self, x: Tensor, is_document_start: Tensor | None = None, previous_k: Tensor | None = None
    ) -> UnrotatedHeads:
        """Return the heads of x before the rotation."""
        return split_heads(self.qkv(x), self.config, self.convolution, is_document_start, previous_k)

    def _check_blocks(self, blocks: Tensor | None) -> None:
        needs_blocks = self.config.has_indexer and self.indexer is None
        if needs_blocks == (blocks is None):
            raise ValueError(
                "blocks: expected the blocks of the previous layer, which has an indexer, got None; pass its "
                "Selection.blocks"
                if needs_blocks
                else "blocks: expected None for a layer that selects its own blocks, got a tensor; remove it"
            )

    def _project(self, x: Tensor, rotary: Rotary, span: Span | None, layout: Layout | None) -> AttentionInputs:
        heads = self.project_heads(x, rotary, layout and layout.is_document_start)
        by_branch: dict[str, tuple[Tensor, Tensor]] = {
            name: (k, v)
            for names, k, v in zip(self.config.kv_sets, heads.keys, heads.values, strict=True)
            for name in names
        }
        if "cmp" in by_branch:
            k, v = by_branch["cmp"]
            by_branch["cmp"] = (
                compress_traceable(k, self.config.nsa, self.phi_k, span=span, layout=layout),
                compress_traceable(v, self.config.nsa, self.phi_v, span=span, layout=layout),
            )
        (k_cmp, v_cmp), (k_sel, v_sel), (k_win, v_win) = (by_branch.get(name, (None, None)) for name in BRANCHES)
        gates = self.compute_gates(x)
        return heads.q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, None if gates is None else gates.to(heads.q.dtype)

    def _project_selection_inputs(
        self, x: Tensor, inputs: AttentionInputs, rotary: Rotary, span: Span | None, layout: Layout | None
    ) -> SelectionInputs | None:
        """Return `project_selection_inputs`; `layout`: of a packed span, for `config.selection_nsa`."""
        c, (q, k_cmp, _, k_sel, *_) = self.config, inputs
        if self.indexer is not None:
            output = self.indexer(x, rotary, layout and layout.is_document_start)
            keys = self.indexer.compress(output.k, rotary, span, layout)
            return output.q, keys.expand(-1, -1, c.n_kv_groups, -1), self.selection_nsa
        if c.scores == "compressed" and k_cmp is not None:
            return q, k_cmp, c.nsa
        if c.scores == "mean_key" and k_sel is not None:
            keys = compress_traceable(k_sel, self.selection_nsa, None, span=span, layout=layout)
            return q, keys, self.selection_nsa
        return None

    def compute_gates(self, x: Tensor) -> Tensor | None:
        """Return the gates [B, T, H, branches] in the order cmp, sel, win: sigmoid per branch, or softmax over branches.

        None for a single branch. Gates of branches in `config.silent` are 0. The gate is a single linear map. The paper has
        an MLP, but gives neither its width nor its activation. A linear map depends on the token and has no hidden layer
        that could start dead; the benefit of an MLP was not measured.
        """
        return None if self.gate is None else self.activate_gates(self.gate(x))

    def activate_gates(self, logits: Tensor) -> Tensor:
        """Return the gates [B, T, H, branches] for the output of the gate's linear map, [B, T, branches H]."""
        logits = logits.unflatten(-1, (self.config.n_heads, len(self.config.branches)))
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.config.silent:
            branch_logits = zip(self.config.branches, logits.unbind(-1), strict=True)
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
    def observe(
        self, x: Tensor, rotary: Rotary, span: Span | None = None, blocks: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Return `gates`, `blocks`, `out_cmp`, `out_sel`, `out_win`, `lse_cmp`, `lse_sel`, `lse_sink` of the branches.

        Only of branches that exist; no `gates` for a single one. `lse_sink` is the LSE over the first selection block only:
        exp(lse_sink - lse_sel) is its share of the selected branch's attention. Block indices are local to each document.
        `blocks`: as in `forward`.
        """
        nsa = self.config.nsa
        self._check_blocks(blocks)
        inputs = self.project(x, rotary, span)
        q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates = inputs
        backends = self.backends or self._get_backends(q, span)
        name = {part: resolved.backend for part, resolved in backends.items()}
        observed: dict[str, Tensor] = {} if gates is None else {"gates": gates}
        if k_cmp is not None and v_cmp is not None:
            observed["out_cmp"], observed["lse_cmp"] = compressed_attention(
                q, k_cmp, v_cmp, nsa, backend=name["compressed"], span=span
            )
        if k_sel is not None and v_sel is not None:
            scoring = self.project_selection_inputs(x, inputs, rotary, span) if blocks is None else None
            if scoring is not None:
                blocks = score_and_select_blocks(*scoring, backend=backends, span=span)
            assert blocks is not None, "checked above"
            observed["blocks"] = blocks
            observed["out_sel"], observed["lse_sel"] = selected_attention(
                q, k_sel, v_sel, blocks, nsa, backend=name["selected"], span=span
            )
            first_block = torch.full_like(blocks, -1)
            first_block[..., 0] = torch.where((blocks == 0).any(-1), 0, -1)  # it may be neither forced nor selected
            _, observed["lse_sink"] = selected_attention(
                q, k_sel, v_sel, first_block, nsa, backend=name["selected"], span=span
            )
        if k_win is not None and v_win is not None:
            observed["out_win"], _ = window_attention(q, k_win, v_win, nsa, backend=name["window"], span=span)
        return observed


class DenseAttention(nn.Module):
    """Causal attention with G key/value groups, for the dense baseline: x [B, T, C] -> [B, T, C]."""

    def __init__(self, config: ModelConfig, backends: Mapping[str, ResolvedBackend]) -> None:
        super().__init__()
        self.config, self.backends = config, backends
        self.qkv, self.convolution, self.out = make_projections(config)

    def forward(
        self,
        x: Tensor,
        rotary: Rotary,
        span: Span | ContextShard | None = None,
        layouts: tuple[Layout, ...] | None = None,
        cache: CachedLayer | None = None,
        blocks: None = None,
        query_weights: None = None,
    ) -> tuple[Tensor, Selection]:
        """Return the output and an empty `Selection`; `layouts`: the result of `get_layouts`; there are no blocks
        and no selection loss.

        `cache` as in `SparseAttention.forward`.
        """
        if cache is not None:
            return self.out(cache.attend(self, x)), Selection()
        layouts = layouts or get_layouts(span, self.config, x.device)
        if isinstance(span, ContextShard):
            out = attend_dense_shard(self, *split_projection(self.qkv(x), self.config), rotary, span, layouts)
            return self.out(out.flatten(2)), Selection()
        layout = layouts[0] if layouts else None
        q, (k,), (v,), _ = self.project_heads(x, rotary, layout and layout.is_document_start)
        out = dense_attention(q, k, v, backend=self.backends["dense"].backend, span=span, layout=layout)
        return self.out(out.flatten(2)), Selection()

    def project_heads(
        self, x: Tensor, rotary: Rotary, is_document_start: Tensor | None = None, previous_k: Tensor | None = None
    ) -> ProjectedHeads:
        """Return the rotated heads of x, as `SparseAttention.project_heads`, with one set of keys and values."""
        unrotated = split_heads(self.qkv(x), self.config, self.convolution, is_document_start, previous_k)
        return rotate_heads(unrotated, self.config, rotary)
