"""The transformer around the attention layers, with honest counts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from nsa_lab.attention import Span, geometry, resolve_backend
from nsa_lab.attention.dispatch import ResolvedBackend
from nsa_lab.config import ModelConfig
from nsa_lab.model.attention_layers import (
    DenseAttention,
    DensePackedInputs,
    PackedInputs,
    SparseAttention,
    get_dense_packed_inputs,
    get_packed_inputs,
    scale_selection_loss,
)
from nsa_lab.model.init_weights import initialize_weights
from nsa_lab.model.layers import MLP, RMSNorm, Rotary, check_span, get_rotary_table, rms_normalize
from nsa_lab.model.ngrams import NgramEmbedding
from nsa_lab.model.statistics import compute_branch_statistics

BACKWARD_FLOPS = 2.0  # of the forward pass's: two products for every one


class Block(nn.Module):
    """x + attention(norm x), then x + MLP(norm x)."""

    def __init__(self, config: ModelConfig, backends: Mapping[str, ResolvedBackend]) -> None:
        super().__init__()
        mixing = SparseAttention if config.attention == "nsa" else DenseAttention
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.attention = mixing(config, backends)
        self.mlp_norm = RMSNorm(config.dim, config.norm_eps)
        self.mlp = MLP(config)

    def forward(
        self,
        x: Tensor,
        rotary: tuple[Tensor, Tensor],
        span: Span | None = None,
        packed_inputs: PackedInputs | DensePackedInputs | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """The output, and the selection loss of its attention or None; `packing` as its attention takes it."""
        # Returned, and not kept aside: what shards or recomputes a block knows of its outputs alone.
        mixed, taught = self.attention(self.attention_norm(x), rotary, span, packed_inputs)
        x = x + mixed
        return x + self.mlp(self.mlp_norm(x)), taught


class NSATransformer(nn.Module):
    """Decoder-only language model: tokens int64 [B, T] -> logits [B, T, V].

    `backend` is resolved here for `device` and for `dtype`, the dtype that attention computes in (bfloat16 under
    autocast); weights are float32. `seed` makes the initial weights a function of it alone; without one they follow torch's
    global generator. Within `torch.device("meta")` it has shapes and no weights. Raises what `resolve_backend` raises.
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
        self._selection_loss: Tensor | None = None
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.ngrams = NgramEmbedding(config) if config.ngrams else None
        self.blocks = nn.ModuleList(Block(config, self.backends) for _ in range(config.n_layers))
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False)
        self.reset_parameters(seed)
        if not self.head.weight.is_meta:
            self.to(device)

    def reset_parameters(self, seed: int | None = None) -> None:
        """New weights, a function of `seed` alone, or of one number of torch's global generator; outputs into the residual
        stream are smaller by sqrt(2 * layers)."""
        drawn = seed if seed is not None else int(torch.randint(2**63 - 1, (), device="cpu"))
        generator = torch.Generator().manual_seed(drawn)
        initialize_weights(self, residual_scale=(2 * self.config.n_layers) ** -0.5, generator=generator)

    def forward(self, tokens: Tensor, span: Span | None = None) -> Tensor:
        """tokens int64 [B, T] -> logits [B, T, V]. With `Span.packed`, B is 1 and every document is alone, from position 0.

        Raises ValueError for tokens of another kind, and for a chunk that starts past 0.
        """
        self._selection_loss = None  # if this pass fails, the one before it is not the last
        x, rotary = self.prepare_inputs(tokens, span)
        packing = self._get_packed_inputs(span, x.device)
        losses: list[Tensor] = []
        for block in self.blocks:
            if self.gradient_checkpointing and self.training:
                x, taught = checkpoint(block, x, rotary, span, packing, use_reentrant=False)
            else:
                x, taught = block(x, rotary, span, packing)
            if taught is not None:
                losses.append(taught)
        self._selection_loss = torch.stack(losses).sum() if losses else None
        return self.head(self.norm(x))

    def embed(self, tokens: Tensor, positions: Tensor | None = None, previous_tokens: Tensor | None = None) -> Tensor:
        """What enters the first layer, [B, T, C], of tokens int64 [B, T]; `positions` and `before` as `NgramEmbedding` has
        them, for a model with n-grams."""
        x = self.embedding(tokens)
        if self.ngrams:
            x = x + self.ngrams(tokens, positions, previous_tokens)
        # Looked up, a vector is small (a deviation of .02), and what layers add to it drowns it.
        return rms_normalize(x, self.config.norm_eps) if self.config.embedding_norm else x

    def auxiliary_loss(self) -> Tensor:
        """What to add to the loss of the last forward pass: `ModelConfig.selection_loss` times the sum over layers, 0-d.

        0 in evaluation, for a dense model, and with a weight of 0.
        """
        return scale_selection_loss(self._selection_loss, self.config.selection_loss, self.head.weight)

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_taught": None}  # of a pass, not of the model: a copy has none

    @torch.no_grad()
    def observe(self, tokens: Tensor, span: Span | None = None) -> list[dict[str, Tensor]]:
        """`SparseAttention.observe` of every layer on tokens [B, T]: for pictures and statistics, not for speed."""
        if self.config.attention != "nsa":
            raise ValueError("observe: a dense model has no branches to observe; use model.attention: nsa")
        x, rotary = self.prepare_inputs(tokens, span)
        seen = []
        for block in cast("list[Block]", self.blocks):
            layer = cast(SparseAttention, block.attention)
            seen.append(layer.observe(block.attention_norm(x), rotary, span))
            x, _ = block(x, rotary, span)
        return seen

    def statistics(self, tokens: Tensor, span: Span | None = None) -> dict[str, Tensor]:
        """Gate and selection statistics of every layer on tokens [B, T]: name -> [n_layers]. Empty for a dense model."""
        if self.config.attention != "nsa":
            return {}
        layers = [compute_branch_statistics(seen, self.config, span) for seen in self.observe(tokens, span)]
        return {name: torch.stack([layer[name] for layer in layers]) for name in layers[0]}

    def parameter_count(self) -> int:
        return sum(p.numel() for p in self.parameters())

    def embedding_parameter_count(self) -> int:
        """Of `parameter_count`, those in tables, which no product reads."""
        return sum(module.weight.numel() for module in self.modules() if isinstance(module, nn.Embedding))

    def flops_per_token(self, lengths: int | Mapping[int, int]) -> dict[str, float]:
        """Training FLOPs per token in documents of `lengths`, forward and backward, of this model's weights.

        One length, or how many documents there are of each; the mean is over their tokens. `nsa` and `dense` differ in
        attention: the keys that NSA reads, or all causal ones. An indexer scores its keys once, forward, with one query per
        group. Lookups, norms, the recomputation inside kernels and the selection loss's few queries are not counted.
        """
        c = self.config
        matmul = 2 * (self.parameter_count() - self.embedding_parameter_count())
        per_key = 2 * c.n_layers * c.n_heads * (c.d_k + c.d_v)
        reads = geometry.mean_reads(lengths, c.nsa)
        sparse = reads["cmp"] + reads["sel"] + reads["win"]
        flops = {
            kind: (1 + BACKWARD_FLOPS) * (matmul + per_key * keys)
            for kind, keys in (("nsa", sparse), ("dense", reads["dense"]))
        }
        if c.has_indexer:
            keys = geometry.mean_reads(lengths, c.selection_nsa)["cmp"]
            flops["nsa"] += 2 * c.n_layers * c.n_kv_groups * c.index_width * keys
        return flops

    def describe(self, length: int) -> str:
        """One line: what was built, with the real counts."""
        c, flops = self.config, self.flops_per_token(length)
        backends = ", ".join(f"{part} {choice.backend}" for part, choice in self.backends.items())
        return (
            f"{c.attention} transformer: {self.parameter_count():,} parameters, {c.n_layers} layers of width {c.dim}, "
            f"{c.n_heads} heads in {c.n_kv_groups} groups; {flops[c.attention] / 1e6:,.1f} MFLOPs per token at {length:,} "
            f"tokens ({flops['nsa'] / flops['dense']:.2f} of dense); backends: {backends}"
        )

    def _get_packed_inputs(self, span: Span | None, device: torch.device) -> PackedInputs | DensePackedInputs | None:
        """Of every layer; None where there is one document."""
        if self.config.attention == "dense":
            return get_dense_packed_inputs(span, device)
        return get_packed_inputs(
            span, self.config, self.backends, device, has_selection_loss=self.training and self.config.has_selection_loss
        )

    def prepare_inputs(self, tokens: Tensor, span: Span | None = None) -> tuple[Tensor, Rotary]:
        """What a block is called with, for who goes through the blocks one by one: x [B, T, C] and the rotation.

        Raises ValueError as `forward` does.
        """
        if tokens.ndim != 2 or tokens.dtype != torch.int64 or 0 in tokens.shape:
            raise ValueError(
                f"tokens: expected int64 [B, T], got {tokens.dtype} {tuple(tokens.shape)}; B and T are at least 1"
            )
        check_span(span, tokens.shape[1])
        c = self.config
        # Elsewhere the host would have to wait for them.
        if tokens.device.type == "cpu" and not torch.compiler.is_compiling():
            low, high = map(int, tokens.aminmax())
            if low < 0 or high >= c.vocab_size:
                raise ValueError(
                    f"tokens: expected numbers from 0 to {c.vocab_size - 1} (model.vocab_size = {c.vocab_size}), got "
                    f"{low} to {high}; use the tokenizer that the model was trained with"
                )
        positions = None if span is None else span.positions(tokens.device)
        rotary = get_rotary_table(tokens.shape[1], c.rotary_width, c.rope_theta, tokens.device, span)
        return self.embed(tokens, positions), rotary
