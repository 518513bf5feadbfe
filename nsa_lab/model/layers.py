"""Norm, MLP, key convolution and rotary embedding. Shape suffixes: B batch, T time, H heads, D head width."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, rms_norm, silu

from nsa_lab.attention import Span, geometry
from nsa_lab.config import ModelConfig, RopeScaling

Rotary = tuple[Tensor, Tensor]


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, in float32 (arXiv 1910.07467)."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_normalize(x, self.eps, self.weight)


def rms_normalize(x: Tensor, eps: float, weight: Tensor | None = None) -> Tensor:
    """Return x / rms(x) over the last dimension, times `weight` if given. Computed in float32, returned in x's dtype."""
    acc_dtype = torch.promote_types(x.dtype, torch.float32)
    return rms_norm(x.to(acc_dtype), x.shape[-1:], None if weight is None else weight.to(acc_dtype), eps).to(x.dtype)


class ShortConvolution(nn.Module):
    """Causal depthwise convolution of width 2 over keys x [B, T, branches, G, D]: w[0] x[t] + w[1] x[t - 1].

    It does not cross document boundaries. The weights [2, branches, G, D] start as a shift by one token in the first group
    and as the identity in the other groups.
    """

    def __init__(self, n_branches: int, n_groups: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2, n_branches, n_groups, width))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.weight.zero_()
        self.weight[1, :, 0] = self.weight[0, :, 1:] = 1.0

    def forward(self, x: Tensor, is_document_start: Tensor | None = None) -> Tensor:
        """Convolve x. `is_document_start`, bool [T]: True at the first row of each document; None: one document."""
        shifted = torch.cat([torch.zeros_like(x[:, :1]), x], dim=1)[:, : x.shape[1]]
        if is_document_start is not None:
            shifted = shifted.masked_fill(is_document_start.view(-1, *[1] * (x.ndim - 2)), 0)
        current_weight, previous_weight = self.weight.to(x.dtype)
        return x * current_weight + shifted * previous_weight


def convolve_keys(
    convolution: ShortConvolution, k: Tensor, is_document_start: Tensor | None, previous_k: Tensor | None
) -> Tensor:
    """Return the convolution of keys k [B, T, branches, G, D]; `is_document_start` as in `ShortConvolution.forward`.

    `previous_k` [B, 1, branches, G, D]: the key before k; None: k starts the sequence.
    """
    if previous_k is None:
        return convolution(k, is_document_start)
    if is_document_start is not None:
        is_document_start = pad(is_document_start, (1, 0))
    # The previous key passes through the module too: hooks on it apply to all keys.
    return convolution(torch.cat([previous_k.to(k.dtype), k], dim=1), is_document_start)[:, 1:]


class MLP(nn.Module):
    """down(SiLU(up x)) for "plain", down(SiLU(gate x) * up x) for "gated" (arXiv 2002.05202)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.is_gated = config.mlp == "gated"
        self.up = nn.Linear(config.dim, config.hidden_width * (2 if self.is_gated else 1), bias=False)
        self.down = nn.Linear(config.hidden_width, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        if self.is_gated:
            gate, hidden = hidden.chunk(2, dim=-1)
            return self.down(silu(gate) * hidden)
        return self.down(silu(hidden))


def compute_rotary(
    positions: Tensor, width: int, theta: float, scaling: RopeScaling | None = None
) -> tuple[Tensor, Tensor]:
    """Return cos and sin, float32 [..., width/2], of t * theta**(-2i/width) at positions [...] (arXiv 2104.09864).

    `scaling`: changes the frequencies and, with YaRN, scales cos and sin.
    """
    rate = theta ** (-torch.arange(0, width, 2, dtype=torch.float32, device=positions.device) / width)
    if scaling is not None:
        rate = scale_rates(rate, theta, scaling)
    angle = positions.to(torch.float32)[..., None] * rate
    if scaling is None or scaling.rope_type == "linear":
        return angle.cos(), angle.sin()
    factor = scaling.attention_factor or 0.1 * math.log(scaling.factor) + 1
    return factor * angle.cos(), factor * angle.sin()


def scale_rates(rate: Tensor, theta: float, scaling: RopeScaling) -> Tensor:
    """Return the frequencies [n] of scaled RoPE. `rate`: theta ** (-i / n) for i = 0 .. n-1, in radians per token."""
    scaled, length = rate / scaling.factor, scaling.original_max_position_embeddings
    if scaling.rope_type == "linear":
        return scaled
    assert length is not None, "checked by RopeScaling"
    n_rates = len(rate)
    # The index of the frequency with this number of rotations in the original length, as a real number.
    first, last = (
        n_rates * math.log(length / (2 * math.pi * rotations)) / math.log(theta)
        for rotations in (scaling.beta_fast, scaling.beta_slow)
    )
    first, last = max(math.floor(first), 0), min(math.ceil(last), 2 * n_rates - 1)
    index = torch.arange(n_rates, dtype=torch.float32, device=rate.device)
    share = ((index - first) / max(last - first, 1e-3)).clamp(0, 1)
    return rate * (1 - share) + scaled * share


def get_rotary_table(
    length: int,
    width: int,
    theta: float,
    device: torch.device,
    span: Span | None = None,
    scaling: RopeScaling | None = None,
) -> tuple[Tensor, Tensor]:
    """Return `compute_rotary` at the positions of `span`; None: 0 .. length-1."""
    positions = geometry.positions(0, length, device) if span is None else span.positions(device)
    return compute_rotary(positions, width, theta, scaling)


def rotate(x_BTHD: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate the channel pairs (i, i + R/2) of every head by the angle of its position, in float32.

    The tables are [T, R/2], or [B, T, R/2] if rows have different positions. If R < D, the remaining channels are not
    rotated and match tokens at any distance (partial RoPE, as in GPT-NeoX, arXiv 2204.06745).
    """
    acc_dtype = torch.promote_types(x_BTHD.dtype, torch.float32)
    cos, sin = (table.to(acc_dtype).unsqueeze(-2) for table in rotary)
    rotated, unrotated = x_BTHD.split([2 * cos.shape[-1], x_BTHD.shape[-1] - 2 * cos.shape[-1]], dim=-1)
    first, second = rotated.to(acc_dtype).chunk(2, dim=-1)
    parts = [first * cos - second * sin, second * cos + first * sin]
    if unrotated.shape[-1]:
        parts.append(unrotated.to(acc_dtype))
    return torch.cat(parts, dim=-1).to(x_BTHD.dtype)


def subsample_rotary(rotary: Rotary, width: int) -> Rotary:
    """Return tables for `width` = R/n rotated channels from tables for R channels: every nth angle.

    Without scaling, they equal the tables of that width, because theta ** (-2 (i n) / R) is theta ** (-2 i / (R/n)).
    """
    n = 2 * rotary[0].shape[-1] // width
    if n == 1:  # the common case in decoding, where every layer calls this in every step
        return rotary
    return rotary[0][..., ::n], rotary[1][..., ::n]


def check_span(span: Span | None, n_tokens: int) -> None:
    """Raise ValueError unless an input of `n_tokens` tokens holds all queries and all keys of `span`."""
    if span is None:
        return
    if not isinstance(span, Span):
        raise ValueError(f"span: expected a Span, got a {type(span).__name__}; use Span.full, Span.chunk or Span.packed")
    if span.start:
        raise ValueError(
            f"span = {span}: a forward pass computes all keys from its own input, and has no cache of keys before "
            f"position {span.start}; pass all tokens and Span.full or Span.packed"
        )
    if span.n_queries != n_tokens:
        raise ValueError(
            f"span = {span} has {span.n_queries} tokens, but the input has {n_tokens}; pass the span of this input"
        )
