"""The parts beside attention: norm, MLP, rotary embedding. Shape suffixes: B batch, T time, H heads, D head width."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm, silu

from nsa_lab.attention import Span, geometry
from nsa_lab.config import ModelConfig

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
    """x / rms(x) over the last dimension, times `weight` where there is one, in float32; as x in shape and dtype."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return rms_norm(x.to(wide), x.shape[-1:], None if weight is None else weight.to(wide), eps).to(x.dtype)


class ShortConvolution(nn.Module):
    """A causal depthwise convolution of width 2 over keys x [B, T, branches, G, D]: w[0] x[t] + w[1] x[t - 1].

    Nothing is read across the beginning of a document. The weights [2, branches, G, D] start as a shift by one in the first
    group, whose keys are then those of the token before, and as the identity in the others.
    """

    def __init__(self, n_branches: int, n_groups: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2, n_branches, n_groups, width))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.weight.zero_()
        self.weight[1, :, 0] = self.weight[0, :, 1:] = 1.0

    def forward(self, x: Tensor, is_document_start: Tensor | None = None, previous_k: Tensor | None = None) -> Tensor:
        """The sum. `before` [B, 1, branches, G, D] is the row before these; None: these are the first.

        `begins`, bool [T]: whether a row is the first of its document; None: one document.
        """
        first = torch.zeros_like(x[:, :1]) if previous_k is None else previous_k
        late = torch.cat([first, x[:, :-1]], dim=1)
        if is_document_start is not None:
            late = late.masked_fill(is_document_start.view(-1, *[1] * (x.ndim - 2)), 0)
        this, last = self.weight.to(x.dtype)
        return x * this + late * last


class MLP(nn.Module):
    """`plain`: down(SiLU(up x)). `gated`: down(SiLU(gate x) * up x) (arXiv 2002.05202)."""

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


def compute_rotary(positions: Tensor, width: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin, float32 [..., width/2], of the angles t * theta**(-2i/width) at positions [...] (arXiv 2104.09864)."""
    rate = theta ** (-torch.arange(0, width, 2, dtype=torch.float32, device=positions.device) / width)
    angle = positions.to(torch.float32)[..., None] * rate
    return angle.cos(), angle.sin()


def get_rotary_table(
    length: int, width: int, theta: float, device: torch.device, span: Span | None = None
) -> tuple[Tensor, Tensor]:
    """`rotary_at` the positions of `span`, by default 0 .. length-1."""
    positions = geometry.positions(0, length, device) if span is None else span.positions(device)
    return compute_rotary(positions, width, theta)


def rotate(x_BTHD: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Turns the pairs (i, i + R/2) of every head by its position's angle, in float32; R is twice the width of the tables.

    Tables are [T, R/2], or [B, T, R/2] where rows stand at positions of their own.

    Where R < D, what comes after the first R stays as it is: it says what a token is, wherever it stands (partial rotary
    embedding, as in GPT-NeoX, arXiv 2204.06745).
    """
    wide = torch.promote_types(x_BTHD.dtype, torch.float32)
    cos, sin = (table.to(wide).unsqueeze(-2) for table in rotary)
    turned, still = x_BTHD.split([2 * cos.shape[-1], x_BTHD.shape[-1] - 2 * cos.shape[-1]], dim=-1)
    first, second = turned.to(wide).chunk(2, dim=-1)
    parts = [first * cos - second * sin, second * cos + first * sin]
    if still.shape[-1]:
        parts.append(still.to(wide))
    return torch.cat(parts, dim=-1).to(x_BTHD.dtype)


def subsample_rotary(rotary: Rotary, width: int) -> Rotary:
    """Tables of heads of which `width` = R/n channels are turned, of those for R: every nth angle.

    It is the table of that width, since theta ** (-2 (i n) / R) is theta ** (-2 i / (R/n)).
    """
    n = 2 * rotary[0].shape[-1] // width
    if n == 1:  # every layer asks, at every step that writes a token
        return rotary
    return rotary[0][..., ::n], rotary[1][..., ::n]


def check_span(span: Span | None, n_tokens: int) -> None:
    """Raises ValueError unless `rows` of input hold all queries and all keys of `span`."""
    if span is None:
        return
    if not isinstance(span, Span):
        raise ValueError(f"span: expected a Span, got a {type(span).__name__}; use Span.full, Span.chunk or Span.packed")
    if span.start:
        raise ValueError(
            f"span = {span}: a forward pass computes all keys from its own input, and has no cache with those before "
            f"position {span.start}; give all tokens and Span.full or Span.packed"
        )
    if span.n_queries != n_tokens:
        raise ValueError(
            f"span = {span} has {span.n_queries} tokens, and the input has {n_tokens}; give the span of this input"
        )
