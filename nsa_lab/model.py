"""The model: a pre-norm decoder whose token mixing is Native Sparse Attention, or dense attention for its twin.

Invariants
* One query projection, separate keys and values for each branch (paper, section 3.3.3), all from one GEMM.
* Rotary embedding per head, after the heads are split, on queries and on the keys of every branch, before compression.
* The backend is resolved once, when the model is built, and `backends` says which and why.
* Causal: the logits at <= t do not move when tokens > t do.
* Positions restart in every document of a packed row (`Span.packed`), and no document sees another.
`NSAttention` is the attention layer by itself, for other models; `SparseAttention` is the layer that both are made of.
Shape suffixes: B batch, T time, H query heads, G key/value groups, C model width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm, silu
from torch.utils.checkpoint import checkpoint

from nsa_lab.attention import (
    Span,
    compress,
    compressed_attention,
    dense_attention,
    geometry,
    nsa_attention,
    resolve_backend,
    select_blocks,
    selected_attention,
    window_attention,
)
from nsa_lab.attention.compression import BlockMap, make_phi
from nsa_lab.attention.dispatch import Choice
from nsa_lab.config import ModelConfig, NSAConfig

BRANCHES = ("cmp", "sel", "win")
# What `nsa_attention` takes: q, then keys and values of cmp, sel and win, then gates.
AttentionInputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
BACKWARD_FLOPS = 2.0  # of the forward pass's: two products for every one
SATURATED = 0.01  # a gate this close to 0 or 1 has stopped passing gradient


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, in float32 (arXiv 1910.07467)."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        return rms_norm(x.to(wide), self.weight.shape, self.weight.to(wide), self.eps).to(x.dtype)


def rotary_at(positions: Tensor, width: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin, float32 [T, width/2], of the angles t * theta**(-2i/width) at positions int [T] (arXiv 2104.09864)."""
    rate = theta ** (-torch.arange(0, width, 2, dtype=torch.float32, device=positions.device) / width)
    angle = positions.to(torch.float32)[:, None] * rate
    return angle.cos(), angle.sin()


def rotary_table(
    length: int, width: int, theta: float, device: torch.device, span: Span | None = None
) -> tuple[Tensor, Tensor]:
    """`rotary_at` the positions of `span`, by default 0 .. length-1."""
    positions = geometry.positions(0, length, device) if span is None else span.positions(device)
    return rotary_at(positions, width, theta)


def rotate(x_BTHD: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Turns the pairs (i, i + D/2) of every head by its position's angle, in float32."""
    wide = torch.promote_types(x_BTHD.dtype, torch.float32)
    cos, sin = (table.to(wide).unsqueeze(1) for table in rotary)
    first, second = x_BTHD.to(wide).chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x_BTHD.dtype)


class SparseAttention(nn.Module):
    """Projections, compression, gate and output around `nsa_attention`: x [B, T, C] -> [B, T, C].

    `backends` is what `resolve_backend` gave; None: resolved for the device and dtype of each input, and kept.
    """

    def __init__(self, config: ModelConfig, backends: Mapping[str, Choice] | None) -> None:
        super().__init__()
        H, G, d_k, d_v = config.n_heads, config.n_kv_groups, config.d_k, config.d_v
        self.config, self.backends = config, backends
        self.qkv = nn.Linear(config.dim, H * d_k + 3 * G * (d_k + d_v), bias=False)
        self.gate = nn.Linear(config.dim, 3 * H, bias=False)
        self.phi_k, self.phi_v = make_phi(config.nsa, d_k), make_phi(config.nsa, d_v)
        self.out = nn.Linear(H * d_v, config.dim, bias=False)
        self._resolved: dict[tuple[torch.device, torch.dtype, bool], Mapping[str, Choice]] = {}

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], span: Span | None = None) -> Tensor:
        inputs = self.project(x, rotary, span)
        backends = self.backends or self._resolve(inputs[0], span)
        mixed = nsa_attention(*inputs, self.config.nsa, backend=backends, span=span)
        return self.out(mixed.flatten(2))

    def project(self, x: Tensor, rotary: tuple[Tensor, Tensor], span: Span | None = None) -> AttentionInputs:
        """q [B, T, H, d_k]; k, v of cmp [B, N, G, .], of sel and win [B, T, G, .]; gates [B, T, H, 3].

        `rotary` is that of x's positions. x holds all keys: a span is full or packed.
        """
        c = self.config
        H, G = c.n_heads, c.n_kv_groups
        roped, values = self.qkv(x).split([(H + 3 * G) * c.d_k, 3 * G * c.d_v], dim=-1)
        # q and the three keys are neighbours in the projection, so that one rotation turns them all.
        q, k_cmp, k_sel, k_win = rotate(roped.unflatten(-1, (H + 3 * G, c.d_k)), rotary).split([H, G, G, G], dim=2)
        v_cmp, v_sel, v_win = values.unflatten(-1, (3 * G, c.d_v)).split(G, dim=2)
        k_cmp, v_cmp = compress(k_cmp, c.nsa, self.phi_k, span=span), compress(v_cmp, c.nsa, self.phi_v, span=span)
        return q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, self.gates(x).to(q.dtype)

    def gates(self, x: Tensor) -> Tensor:
        """[B, T, H, 3] in the order cmp, sel, win: sigmoid per branch (paper), or softmax over the branches."""
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
    def observe(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        """What each branch did: `gates`, `blocks`, `out_cmp`, `out_sel`, `out_win`, `lse_cmp`, `lse_sel`, `lse_sink`.

        `lse_sink` is the LSE of the first selection block alone, so exp(lse_sink - lse_sel) is the share it holds.
        """
        nsa = self.config.nsa
        q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates = self.project(x, rotary)
        name = {part: choice.backend for part, choice in (self.backends or self._resolve(q, None)).items()}
        out_cmp, lse_cmp = compressed_attention(q, k_cmp, v_cmp, nsa, backend=name["compressed"])
        blocks = select_blocks(q, k_cmp, lse_cmp, nsa, backend=name["selection"])
        out_sel, lse_sel = selected_attention(q, k_sel, v_sel, blocks, nsa, backend=name["selected"])
        only_first = torch.full_like(blocks, -1)
        only_first[..., 0] = 0
        _, lse_sink = selected_attention(q, k_sel, v_sel, only_first, nsa, backend=name["selected"])
        out_win, _ = window_attention(q, k_win, v_win, nsa, backend=name["window"])
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

    def __init__(self, config: ModelConfig, backends: Mapping[str, Choice]) -> None:
        super().__init__()
        H, G, d_k, d_v = config.n_heads, config.n_kv_groups, config.d_k, config.d_v
        self.config, self.backends = config, backends
        self.qkv = nn.Linear(config.dim, H * d_k + G * (d_k + d_v), bias=False)
        self.out = nn.Linear(H * d_v, config.dim, bias=False)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], span: Span | None = None) -> Tensor:
        c = self.config
        roped, values = self.qkv(x).split([(c.n_heads + c.n_kv_groups) * c.d_k, c.n_kv_groups * c.d_v], dim=-1)
        q, k = rotate(roped.unflatten(-1, (-1, c.d_k)), rotary).split([c.n_heads, c.n_kv_groups], dim=2)
        v = values.unflatten(-1, (c.n_kv_groups, c.d_v))
        return self.out(dense_attention(q, k, v, backend=self.backends["dense"].backend, span=span).flatten(2))


class NSAttention(nn.Module):
    """Native Sparse Attention as a layer to put where attention was: x [B, T, C] -> [B, T, C], C = `dim`.

    One query projection of `n_heads` heads, keys and values of `n_kv_groups` groups for each branch, rotary embedding of
    its own, gate and output projection (arXiv 2502.11089, section 3.3). No norm and no residual connection. The backend is
    resolved for the device and dtype that attention computes in, autocast included. Weights start from torch's global
    generator, by the rules of `NSATransformer`; the output projection at fan_in**-0.5, since the depth is not known here.

    `head_dim` (queries and keys) is dim // n_heads by default, `value_dim` is head_dim. Raises ValueError for sizes that do
    not go together.
    """

    def __init__(
        self,
        dim: int,
        n_heads: int,
        n_kv_groups: int,
        *,
        head_dim: int | None = None,
        value_dim: int | None = None,
        nsa: NSAConfig = NSAConfig(),  # noqa: B008 - frozen
        rope_theta: float = 10000.0,
    ) -> None:
        super().__init__()
        d_k = _head_width(dim, n_heads) if head_dim is None else head_dim
        if d_k % 2:
            raise ValueError(
                f"NSAttention: head_dim = {d_k} is odd, and rotary embedding turns pairs; "
                f"give head_dim={d_k - 1} or head_dim={d_k + 1}"
            )
        config = ModelConfig(
            dim=dim,
            n_heads=n_heads,
            n_kv_groups=n_kv_groups,
            d_k=d_k,
            d_v=d_k if value_dim is None else value_dim,
            rope_theta=rope_theta,
            nsa=nsa,
        )
        self.config = config
        self.attention = SparseAttention(config, None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """New weights from torch's global generator."""
        _initialise(self, into_residual=1.0)

    def forward(self, x: Tensor, span: Span | None = None) -> Tensor:
        """x [B, T, C], floating point, its rows both queries and keys -> [B, T, C]. With `Span.packed`, B is 1.

        Raises ValueError for x of another shape, and for a chunk that starts past 0: its earlier keys are in no cache here.
        """
        c = self.config
        if x.ndim != 3 or x.shape[2] != c.dim:
            raise ValueError(f"NSAttention: expected x [B, T, {c.dim}], got {tuple(x.shape)}")
        _check_span(span, x.shape[1])
        rotary = rotary_table(x.shape[1], c.d_k, c.rope_theta, x.device, span)
        return self.attention(x, rotary, span)


def _head_width(dim: int, n_heads: int) -> int:
    if n_heads < 1:
        raise ValueError(f"NSAttention: n_heads = {n_heads}: expected at least 1")
    if dim % n_heads:
        low = max(dim // n_heads, 1) * n_heads
        raise ValueError(
            f"NSAttention: dim = {dim} does not divide into n_heads = {n_heads}; "
            f"give head_dim=, or use dim = {low} or {low + n_heads}"
        )
    return dim // n_heads


def _check_span(span: Span | None, rows: int) -> None:
    """Raises ValueError unless `rows` of input hold all queries and all keys of `span`."""
    if span is None:
        return
    if span.start:
        raise ValueError(
            f"span = {span}: a forward pass computes all keys from its own input, and has no cache with those before "
            f"position {span.start}; give all tokens and Span.full or Span.packed"
        )
    if span.queries != rows:
        raise ValueError(f"span = {span} has {span.queries} tokens, and the input has {rows}; give the span of this input")


@torch.no_grad()
def _initialise(root: nn.Module, into_residual: float, generator: torch.Generator | None = None) -> None:
    """Normal weights of deviation fan_in**-0.5; those into the residual stream times `into_residual`.

    Gates start at Xavier, never at zero: a zero gate gives its own input no gradient. The head starts at 1/dim, so that the
    first loss is ln V.
    """
    for name, module in root.named_modules():
        if isinstance(module, RMSNorm):
            module.weight.fill_(1.0)
        elif isinstance(module, nn.Embedding):
            module.weight.normal_(std=0.02, generator=generator)
        elif isinstance(module, BlockMap):
            module.position.normal_(std=0.02, generator=generator)
        elif isinstance(module, nn.Linear):
            std = module.in_features**-0.5
            if name == "head":
                std = 1.0 / module.in_features
            elif name.endswith(("attention.out", "mlp.down")):
                std *= into_residual
            elif name.endswith("attention.gate"):
                std = (2.0 / (module.in_features + module.out_features)) ** 0.5
            module.weight.normal_(std=std, generator=generator)


class MLP(nn.Module):
    """`plain`: down(SiLU(up x)). `gated`: down(SiLU(gate x) * up x) (arXiv 2002.05202)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gated = config.mlp == "gated"
        self.up = nn.Linear(config.dim, config.hidden * (2 if self.gated else 1), bias=False)
        self.down = nn.Linear(config.hidden, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        if self.gated:
            gate, hidden = hidden.chunk(2, dim=-1)
            return self.down(silu(gate) * hidden)
        return self.down(silu(hidden))


class Block(nn.Module):
    """x + attention(norm x), then x + MLP(norm x)."""

    def __init__(self, config: ModelConfig, backends: Mapping[str, Choice]) -> None:
        super().__init__()
        mixing = SparseAttention if config.attention == "nsa" else DenseAttention
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.attention = mixing(config, backends)
        self.mlp_norm = RMSNorm(config.dim, config.norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], span: Span | None = None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotary, span)
        return x + self.mlp(self.mlp_norm(x))


class NSATransformer(nn.Module):
    """Decoder-only language model: tokens int64 [B, T] -> logits [B, T, V].

    `backend` is resolved here for `device` and for `dtype`, the dtype that attention computes in (bfloat16 under
    autocast); weights are float32. `seed` makes the initial weights a function of it alone. Raises what
    `resolve_backend` raises.
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
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.blocks = nn.ModuleList(Block(config, self.backends) for _ in range(config.n_layers))
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False)
        self.reset_parameters(seed)
        self.to(device)

    def reset_parameters(self, seed: int | None = None) -> None:
        """New weights, a function of `seed` alone; outputs into the residual stream are smaller by sqrt(2 * layers)."""
        generator = torch.Generator().manual_seed(torch.seed() if seed is None else seed)
        _initialise(self, into_residual=(2 * self.config.n_layers) ** -0.5, generator=generator)

    def forward(self, tokens: Tensor, span: Span | None = None) -> Tensor:
        """tokens int64 [B, T] -> logits [B, T, V]. With `Span.packed`, B is 1 and every document is alone, from position 0.

        Raises ValueError for tokens of another kind, and for a chunk that starts past 0.
        """
        x, rotary = self._enter(tokens, span)
        for block in self.blocks:
            if self.gradient_checkpointing and self.training:
                x = checkpoint(block, x, rotary, span, use_reentrant=False)
            else:
                x = block(x, rotary, span)
        return self.head(self.norm(x))

    @torch.no_grad()
    def observe(self, tokens: Tensor) -> list[dict[str, Tensor]]:
        """`SparseAttention.observe` of every layer on tokens [B, T]: for pictures and statistics, not for speed."""
        if self.config.attention != "nsa":
            raise ValueError("observe: a dense model has no branches to observe; use model.attention: nsa")
        x, rotary = self._enter(tokens)
        seen = []
        for block in cast("list[Block]", self.blocks):
            layer = cast(SparseAttention, block.attention)
            seen.append(layer.observe(block.attention_norm(x), rotary))
            x = block(x, rotary)
        return seen

    def statistics(self, tokens: Tensor) -> dict[str, Tensor]:
        """Gate and selection statistics of every layer on tokens [B, T]: name -> [n_layers]. Empty for a dense model."""
        if self.config.attention != "nsa":
            return {}
        layers = [branch_statistics(seen, self.config) for seen in self.observe(tokens)]
        return {name: torch.stack([layer[name] for layer in layers]) for name in layers[0]}

    def parameter_count(self) -> int:
        return sum(p.numel() for p in self.parameters())

    def flops_per_token(self, length: int) -> dict[str, float]:
        """Training FLOPs per token at sequences of `length`, forward and backward, of this model's weights.

        `nsa` and `dense` differ in attention: the keys that NSA reads, or all causal ones. Lookups, norms and the
        recomputation inside kernels are not counted.
        """
        c = self.config
        matmul = 2 * (self.parameter_count() - self.embedding.weight.numel())
        per_key = 2 * c.n_layers * c.n_heads * (c.d_k + c.d_v)
        reads = geometry.mean_reads(length, c.nsa)
        sparse = reads["cmp"] + reads["sel"] + reads["win"]
        return {
            kind: (1 + BACKWARD_FLOPS) * (matmul + per_key * keys)
            for kind, keys in (("nsa", sparse), ("dense", reads["dense"]))
        }

    def describe(self, length: int) -> str:
        """One line: what was built, with the real counts."""
        c, flops = self.config, self.flops_per_token(length)
        backends = ", ".join(f"{part} {choice.backend}" for part, choice in self.backends.items())
        return (
            f"{c.attention} transformer: {self.parameter_count():,} parameters, {c.n_layers} layers of width {c.dim}, "
            f"{c.n_heads} heads in {c.n_kv_groups} groups; {flops[c.attention]:.3g} FLOPs per token at {length} tokens "
            f"({flops['nsa'] / flops['dense']:.2f} of dense); backends: {backends}"
        )

    def _enter(self, tokens: Tensor, span: Span | None = None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        if tokens.ndim != 2 or tokens.dtype != torch.int64:
            raise ValueError(f"tokens: expected int64 [B, T], got {tokens.dtype} {tuple(tokens.shape)}")
        _check_span(span, tokens.shape[1])
        c = self.config
        return self.embedding(tokens), rotary_table(tokens.shape[1], c.d_k, c.rope_theta, tokens.device, span)


def branch_statistics(seen: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Scalars (0-d tensors, on the device) of one layer's `observe`.

    gate_share_*: mean share of a branch in the gate's sum; gate_entropy: nats, of those shares, ln 3 at most;
    gate_saturation: share of gates within 0.01 of 0 or 1; sel_reuse: share of a query's blocks that the query before it
    chose too; sel_distance: mean distance of the chosen blocks, in blocks; sel_sink_share: attention that the first block
    holds, over queries past it; sel_window_overlap: share of the selected keys that the window reads too; sel_keys and
    sel_keys_most: selected keys of a query, mean and most; norm_*: root mean square of a branch's output.
    """
    nsa = config.nsa
    gates, blocks = seen["gates"].float(), seen["blocks"].long()
    share = gates / gates.sum(-1, keepdim=True)
    stats = {f"gate_share_{name}": share[..., i].mean() for i, name in enumerate(BRANCHES)}
    stats["gate_entropy"] = -(share * share.clamp_min(1e-9).log()).sum(-1).mean()
    stats["gate_saturation"] = ((gates < SATURATED) | (gates > 1 - SATURATED)).float().mean()

    T = blocks.shape[1]
    t = geometry.positions(0, T, blocks.device)[:, None, None]
    valid = blocks >= 0
    bits = torch.zeros(*blocks.shape[:3], geometry.num_selection(T, nsa) + 1, dtype=torch.bool, device=blocks.device)
    bits.scatter_(-1, torch.where(valid, blocks, bits.shape[-1] - 1), True)
    again = (bits[:, 1:, :, :-1] & bits[:, :-1, :, :-1]).sum(-1) / valid[:, 1:].sum(-1)
    stats["sel_reuse"] = again.mean() if T > 1 else gates.new_zeros(())
    stats["sel_distance"] = torch.where(valid, geometry.own_block(t, nsa) - blocks, 0).sum() / valid.sum()
    past_first = slice(geometry.after_first_block(T, nsa), None)
    stats["sel_sink_share"] = (seen["lse_sink"] - seen["lse_sel"])[:, past_first].float().exp().mean()

    keys, near = geometry.keys_of_blocks(blocks, t, nsa)
    stats["sel_window_overlap"] = near.sum() / keys.sum()
    per_query = keys.sum(-1).float()
    stats["sel_keys"], stats["sel_keys_most"] = per_query.mean(), per_query.max()
    for name in BRANCHES:
        stats[f"norm_{name}"] = seen[f"out_{name}"].float().pow(2).mean().sqrt()
    return stats
