"""The transformer: blocks, embeddings and head, with parameter and FLOP counts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from nsa_lab.attention import Span, geometry, resolve_backend
from nsa_lab.attention.compile_utils import check_no_transform, check_not_traced
from nsa_lab.attention.context_parallel import ContextShard
from nsa_lab.attention.dispatch import ResolvedBackend
from nsa_lab.attention.input_checks import can_read_values, check_tensors
from nsa_lab.attention.layout import Layout
from nsa_lab.config import ModelConfig
from nsa_lab.model.attention_layers import (
    DenseAttention,
    Selection,
    SparseAttention,
    get_layouts,
    scale_selection_loss,
)
from nsa_lab.model.cache_protocols import CachedLayer, CachedPass
from nsa_lab.model.context_parallel import check_shard, compute_ngram_rows
from nsa_lab.model.init_weights import initialize_weights
from nsa_lab.model.layers import MLP, RMSNorm, Rotary, check_span, get_rotary_table, rms_normalize
from nsa_lab.model.ngrams import NgramEmbedding
from nsa_lab.model.statistics import compute_branch_statistics

BACKWARD_FLOPS = 2.0  # relative to the forward pass: two matrix products for each of its products


class Block(nn.Module):
    """Pre-norm transformer block: x + attention(norm x), then x + MLP(norm x)."""

    def __init__(self, config: ModelConfig, backends: Mapping[str, ResolvedBackend], layer_index: int = 0) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        if config.attention == "nsa":
            self.attention = SparseAttention(config, backends, layer_index=layer_index)
        else:
            self.attention = DenseAttention(config, backends)
        self.mlp_norm = RMSNorm(config.dim, config.norm_eps)
        self.mlp = MLP(config)

    def forward(
        self,
        x: Tensor,
        rotary: tuple[Tensor, Tensor] | None,
        span: Span | ContextShard | None = None,
        layouts: tuple[Layout, ...] | None = None,
        cache: CachedLayer | None = None,
        blocks: Tensor | None = None,
        query_weights: Tensor | None = None,
    ) -> tuple[Tensor, Selection]:
        """Return the output and the result of block selection; `layouts`: the result of `get_layouts`.

        `blocks`, `query_weights`: as in `SparseAttention.forward`. With a `cache`, x are new tokens, `rotary` is not used,
        and the selection is empty.
        """
        if cache is not None:
            return cache.run_block(self, x), Selection()
        # The loss is returned, not stored: FSDP and activation checkpointing handle only the outputs of a block.
        attended, selection = self.attention(self.attention_norm(x), rotary, span, layouts, None, blocks, query_weights)
        x = x + attended
        return x + self.mlp(self.mlp_norm(x)), selection


class NSATransformer(nn.Module):
    """Decoder-only language model: tokens int64 [B, T] -> logits [B, T, V].

    `backend` is resolved for `device` and `dtype`, the dtype that attention computes in (bfloat16 under autocast). Weights
    are float32. With `seed`, the initial weights depend only on it; without, on PyTorch's global generator. Under
    `torch.device("meta")`, the model has shapes but no weights. Raise the errors of `resolve_backend`.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        backend: str = "auto",
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.backends = resolve_backend(device, dtype, config.nsa, config, backend)
        self.gradient_checkpointing = False
        # With gradient checkpointing, how blocks are recomputed, and of how many blocks the first is.
        self.checkpoint_function: Callable[..., Any] = partial(checkpoint, use_reentrant=False)
        self.checkpoint_interval = 1
        self._selection_loss: Tensor | None = None
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.ngrams = NgramEmbedding(config) if config.ngrams else None
        self.blocks = nn.ModuleList(Block(config, self.backends, index) for index in range(config.n_layers))
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False)
        self.reset_parameters(seed)
        if not self.head.weight.is_meta:
            self.to(device)

    def reset_parameters(self, seed: int | None = None) -> None:
        """Initialize the weights from `seed`, or from one number of PyTorch's global generator.

        Layers that write into the residual stream are scaled by (2 * n_layers) ** -0.5.
        """
        init_seed = seed if seed is not None else int(torch.randint(2**63 - 1, (), device="cpu"))
        generator = torch.Generator().manual_seed(init_seed)
        for name in self.get_layers():
            self.initialize_layer(name, generator)

    def get_layers(self) -> dict[str, nn.Module]:
        """Return the modules that make up the model by name, in the order of their computation and initialization."""
        tables = {"embedding": self.embedding} | ({"ngrams": self.ngrams} if self.ngrams else {})
        blocks = {f"blocks.{index}": block for index, block in enumerate(self.blocks)}
        return {**tables, **blocks, "norm": self.norm, "head": self.head}

    def initialize_layer(self, name: str, generator: torch.Generator) -> None:
        """Initialize one of `get_layers`. Initialized in their order, all layers together equal `reset_parameters`."""
        layer, residual_scale = self.get_submodule(name), (2 * self.config.n_layers) ** -0.5
        initialize_weights(layer, residual_scale=residual_scale, generator=generator, name=name)

    def forward(
        self,
        tokens: Tensor | None,
        span: Span | ContextShard | None = None,
        *,
        embeddings: Tensor | None = None,
        cache: CachedPass | None = None,
        columns: Tensor | slice | None = None,
        output: Literal["logits", "hidden", "all"] = "logits",
        query_weights: Tensor | None = None,
    ) -> Any:
        """Return logits [B, T, V] for tokens int64 [B, T].

        With `Span.packed`, B is 1 and every document is computed separately, from position 0. With a `ContextShard`, the
        tokens and logits belong to this rank, and all ranks of its group call the model.

        embeddings: [B, T, C], instead of `tokens`: outputs of `embedding`, or other vectors. Not for a model with n-grams.
        cache: the tokens are new tokens of cached sequences.
        columns: the tokens whose logits are computed: a slice or int64 [n], or one index per row, int64 [B, 1].
        output: "hidden" returns the normalized output of the last block, [B, T, C], instead of logits. "all" returns both,
            logits first, with the inputs of all blocks: a tuple of n_layers + 1 tensors [B, T, C], of which the last is
            normalized.
        query_weights: as in `selection_loss`; None: the selection loss is a mean over all sampled queries.

        Raise ValueError for tokens of another shape or dtype, and for a chunk that starts after position 0.
        """
        check_not_traced()
        if self.config.attention == "nsa":
            # The operator refuses it too, but a transform ends in an obscure error at the check of the tokens before it.
            check_no_transform(resolved.backend for resolved in self.backends.values())
        self._selection_loss = None  # in case this pass fails: do not return the loss of the pass before
        if cache is None:
            x, rotary = self.prepare_inputs(tokens, span, embeddings)
            layouts = get_layouts(span, self.config, x.device)
        else:
            x, rotary, layouts = cache.embed(self, tokens, embeddings), None, None
        losses: list[Tensor] = []
        hidden_states: list[Tensor] = []
        selected: Tensor | None = None
        for index, block in enumerate(self.blocks):
            if output == "all":
                hidden_states.append(x)
            if cache is not None:
                layer = cache.get_layer(index)
                x, _ = block(x, rotary, cache=layer)
                continue
            blocks = None if self.config.has_indexer_in(index) else selected
            if self.gradient_checkpointing and self.training and index % self.checkpoint_interval == 0:
                x, selection = self.checkpoint_function(block, x, rotary, span, layouts, None, blocks, query_weights)
            else:
                x, selection = block(x, rotary, span, layouts, None, blocks, query_weights)
            selected = selection.blocks
            if selection.loss is not None:
                losses.append(selection.loss)
        self._selection_loss = torch.stack(losses).sum() if losses else None
        if output == "hidden":
            return self.norm(x)
        kept = x if columns is None else _select_columns(x, columns)
        if output == "all":
            hidden = self.norm(x)
            return self.head(hidden if columns is None else _select_columns(hidden, columns)), (*hidden_states, hidden)
        return self.head(self.norm(kept)) if cache is None else cache.compute_logits(self, kept)

    def embed(
        self,
        tokens: Tensor | None,
        positions: Tensor | None = None,
        previous_tokens: Tensor | None = None,
        embeddings: Tensor | None = None,
        ngram_rows: Tensor | None = None,
    ) -> Tensor:
        """Return the input of the first layer, [B, T, C], for tokens int64 [B, T].

        `positions`, `previous_tokens`, `ngram_rows`: as in `NgramEmbedding`, for a model with n-grams. `embeddings`: as in
        `forward`.
        """
        x = self.embedding(tokens) if embeddings is None else embeddings
        if self.ngrams:
            if tokens is None:
                raise ValueError(
                    f"embeddings: expected tokens for a model with n-grams (model.ngrams = {self.config.ngrams}), which "
                    "depend on token ids, got only embeddings; pass tokens"
                )
            x = x + (
                self.ngrams(tokens, positions, previous_tokens)
                if ngram_rows is None
                else self.ngrams(None, rows=ngram_rows)
            )
        # Embeddings are small (standard deviation 0.02). Without the norm, the outputs of the first layers dominate them.
        return rms_normalize(x, self.config.norm_eps) if self.config.embedding_norm else x

    def auxiliary_loss(self) -> Tensor:
        """Return the sum of the layers' selection losses in the last forward pass, times `ModelConfig.selection_loss`, 0-d.

        Add it to the loss in training. It is 0 in eval mode, for a dense model, and with a weight of 0.
        """
        return scale_selection_loss(self._selection_loss, self.config.selection_loss, self.head.weight)

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_selection_loss": None}  # belongs to a forward pass, not to the model; do not copy it

    @torch.no_grad()
    def observe(self, tokens: Tensor, span: Span | None = None) -> list[dict[str, Tensor]]:
        """Return `SparseAttention.observe` of every layer on tokens [B, T], for figures and statistics; it is slow."""
        if self.config.attention != "nsa":
            raise ValueError("observe: a dense model has no branches to observe; use model.attention: nsa")
        x, rotary = self.prepare_inputs(tokens, span)
        observed: list[dict[str, Tensor]] = []
        selected: Tensor | None = None
        for index, block in enumerate(cast("list[Block]", self.blocks)):
            layer = cast(SparseAttention, block.attention)
            blocks = None if self.config.has_indexer_in(index) else selected
            observed.append(layer.observe(block.attention_norm(x), rotary, span, blocks))
            x, selection = block(x, rotary, span, blocks=blocks)
            selected = selection.blocks
        return observed

    def statistics(self, tokens: Tensor, span: Span | None = None) -> dict[str, Tensor]:
        """Return gate and selection statistics on tokens [B, T], name -> [n_layers]; empty for a dense model."""
        if self.config.attention != "nsa":
            return {}
        layers = [compute_branch_statistics(observed, self.config, span) for observed in self.observe(tokens, span)]
        return {name: torch.stack([layer[name] for layer in layers]) for name in layers[0]}

    def parameter_count(self) -> int:
        return sum(p.numel() for p in self.parameters())

    def embedding_parameter_count(self) -> int:
        """Return the number of parameters in embedding tables, which take part in no matrix product."""
        return sum(module.weight.numel() for module in self.modules() if isinstance(module, nn.Embedding))

    def flops_per_token(self, lengths: int | Mapping[int, int]) -> dict[str, float]:
        """Return training FLOPs per token, forward and backward, with NSA ("nsa") and with dense attention ("dense").

        `lengths`: the length of a document, or a mapping from length to number of documents. The result is the mean over
        tokens. Both entries use this model's weights; they differ in the number of keys. Keys that only select blocks, of
        an indexer or mean keys, are scored once, forward only. Not counted: lookups, norms, recomputation inside kernels,
        and the selection loss, which has few queries.
        """
        c = self.config
        matmul = 2 * (self.parameter_count() - self.embedding_parameter_count())
        per_key = 2 * c.n_layers * c.n_heads * (c.d_k + c.d_v)
        reads = geometry.mean_reads(lengths, c.nsa)
        sparse = sum(reads[name] for name in c.branches)
        flops = {
            kind: (1 + BACKWARD_FLOPS) * (matmul + per_key * keys)
            for kind, keys in (("nsa", sparse), ("dense", reads["dense"]))
        }
        if c.scores in ("indexer", "mean_key"):
            per_index_key = 2 * (c.n_index_queries * c.index_width if c.has_indexer else c.n_heads * c.d_k)
            flops["nsa"] += c.n_scoring_layers * per_index_key * geometry.mean_reads(lengths, c.selection_nsa)["cmp"]
        return flops

    def describe(self, length: int) -> str:
        """Return one line on the model: parameters, sizes, FLOPs and backends."""
        c, flops = self.config, self.flops_per_token(length)
        backends = ", ".join(f"{part} {resolved.backend}" for part, resolved in self.backends.items())
        return (
            f"{c.attention} transformer: {self.parameter_count():,} parameters, {c.n_layers} layers of width {c.dim}, "
            f"{c.n_heads} heads in {c.n_kv_groups} groups; {flops[c.attention] / 1e6:,.1f} MFLOPs per token at {length:,} "
            f"tokens ({flops['nsa'] / flops['dense']:.2f} of dense); backends: {backends}"
        )

    def prepare_inputs(
        self, tokens: Tensor | None, span: Span | ContextShard | None = None, embeddings: Tensor | None = None
    ) -> tuple[Tensor, Rotary]:
        """Return the inputs of the first block, x [B, T, C] and the RoPE tables, for callers that iterate over blocks.

        Raise ValueError as `forward` does.
        """
        n_tokens, device = self._check_inputs(tokens, embeddings)
        c = self.config
        if isinstance(span, ContextShard):
            check_shard(span, n_tokens)
            rows = compute_ngram_rows(self.ngrams, tokens, span) if self.ngrams and tokens is not None else None
            # Keys of all tokens are rotated after they were gathered, so the tables cover the whole text.
            text_rotary = get_rotary_table(
                span.text.n_queries, c.rotary_width, c.rope_theta, device, span.text, c.rope_scaling
            )
            return self.embed(tokens, embeddings=embeddings, ngram_rows=rows), text_rotary
        check_span(span, n_tokens)
        positions = None if span is None else span.positions(device)
        rotary = get_rotary_table(n_tokens, c.rotary_width, c.rope_theta, device, span, c.rope_scaling)
        return self.embed(tokens, positions, embeddings=embeddings), rotary

    def _check_inputs(self, tokens: Tensor | None, embeddings: Tensor | None) -> tuple[int, torch.device]:
        """Return the number of tokens per row and their device. Raise ValueError for invalid tokens or embeddings."""
        if (tokens is None) == (embeddings is None):
            raise ValueError("NSATransformer: expected either tokens or embeddings, got both or neither; pass one of them")
        c = self.config
        if embeddings is not None:
            check_tensors(embeddings=embeddings)
            if embeddings.ndim != 3 or embeddings.shape[2] != c.dim or 0 in embeddings.shape:
                raise ValueError(f"embeddings: expected [B, T, {c.dim}], B and T at least 1, got {tuple(embeddings.shape)}")
            return embeddings.shape[1], embeddings.device
        assert tokens is not None
        check_tensors(tokens=tokens)
        if tokens.ndim != 2 or tokens.dtype != torch.int64 or 0 in tokens.shape:
            raise ValueError(
                f"tokens: expected int64 [B, T], got {tokens.dtype} {tuple(tokens.shape)}; B and T are at least 1"
            )
        if can_read_values(tokens):
            low, high = map(int, tokens.aminmax())
            if low < 0 or high >= c.vocab_size:
                raise ValueError(
                    f"tokens: expected values from 0 to {c.vocab_size - 1} (model.vocab_size = {c.vocab_size}), got "
                    f"{low} to {high}; use the tokenizer that the model was trained with"
                )
        return tokens.shape[1], tokens.device


def _select_columns(x: Tensor, columns: Tensor | slice) -> Tensor:
    """Return columns of x [B, T, C]: a slice, indices int64 [n] for all rows, or one index per row, int64 [B, 1]."""
    if isinstance(columns, Tensor) and columns.ndim == 2:
        return x.gather(1, columns[:, :, None].expand(-1, -1, x.shape[2]))
    return x[:, columns]
