"""The `torch` backend: vectorised, any device, memory linear in T.

Queries go in chunks; a chunk meets a contiguous range of keys under a mask, or, for the selected branch of a long
sequence, the gathered tokens of its own blocks. The backward pass recomputes a chunk's probabilities from the saved LSE,
so no score of more than one chunk is ever held. Same functions and shapes as `reference`.

torch.compile steps around these functions: traced, the loop over chunks is unrolled and its backward pass comes out wrong
(torch 2.13; tests/model holds compiled gradients against eager ones).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from nsa_lab.attention import geometry, reference
from nsa_lab.config import NSAConfig

# Bytes of scores, or of gathered keys, that a chunk of queries may take: about a CPU's cache, or enough to fill a GPU.
CHUNK_BYTES = {"cpu": 4 * 2**20, "cuda": 256 * 2**20}
# Past this many selection budgets of keys, gathering each query's blocks beats masking the whole past.
GATHER_PAST_BUDGETS = 8

# (first query, last query + 1) -> the range of keys they may see, and which of those each may not: bool [B|1, G|1, C, keys]
KeyRange = Callable[[int, int], tuple[slice, Tensor]]


@torch._disable_dynamo
def compressed_attention(q: Tensor, k_cmp: Tensor, v_cmp: Tensor, nsa: NSAConfig) -> tuple[Tensor, Tensor]:
    """As `reference.compressed_attention`. Computes in `reference`'s wide dtype, since the block choice hangs on it."""

    def keys(first: int, last: int) -> tuple[slice, Tensor]:
        t = torch.arange(first, last, device=q.device)
        visible = geometry.visible_compressed(t, nsa)
        stop = int(geometry.visible_compressed(torch.tensor(last - 1), nsa))
        return slice(0, stop), (torch.arange(stop, device=q.device) >= visible[:, None])[None, None]

    return _RangeAttention.apply(q, k_cmp, v_cmp, keys, _choice_dtype(q.dtype), k_cmp.shape[1])


@torch._disable_dynamo
def select_blocks(q: Tensor, k_cmp: Tensor, lse: Tensor, nsa: NSAConfig) -> Tensor:
    """As `reference.select_blocks`, streamed over chunks of queries."""
    B, T, H, _ = q.shape
    N, G = k_cmp.shape[1:3]
    wide = _choice_dtype(q.dtype)
    k = k_cmp.detach().to(wide).transpose(1, 2)  # [B, G, N, D]
    chosen = torch.empty(B, T, G, nsa.n_sel, dtype=torch.int32, device=q.device)
    with torch.no_grad():
        for first, last in _chunks(T, B * H * max(N, 1) * wide.itemsize, q.device):
            n = int(geometry.visible_compressed(torch.tensor(last - 1), nsa))
            s = _rows(q[:, first:last], G, wide) @ k[:, :, :n].mT * q.shape[-1] ** -0.5
            s = s.unflatten(2, (last - first, H // G))  # [B, G, C, h, n]
            norm = lse[:, first:last].to(wide).unflatten(2, (G, H // G)).transpose(1, 2).unsqueeze(-1)
            seen = torch.arange(n, device=q.device) < geometry.visible_compressed(
                torch.arange(first, last, device=q.device), nsa
            ).unsqueeze(-1)
            p = torch.where(seen.unsqueeze(1), s - norm, float("-inf")).exp().sum(3)  # [B, G, C, n]
            importance = _carry(p, geometry.num_selection(last, nsa), nsa).float().transpose(1, 2)
            chosen[:, first:last] = reference.choose(importance, nsa, first=first)
    return chosen


@torch._disable_dynamo
def selected_attention(q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, nsa: NSAConfig) -> tuple[Tensor, Tensor]:
    """As `reference.selected_attention`."""
    T = q.shape[1]
    if GATHER_PAST_BUDGETS * nsa.n_sel * nsa.l_sel < T:
        return _GatherAttention.apply(q, k, v, blocks, nsa.l_sel)
    per_group = blocks.transpose(1, 2)  # [B, G, T, n_sel]

    def keys(first: int, last: int) -> tuple[slice, Tensor]:
        n = geometry.num_selection(last, nsa)
        picks = per_group[:, :, first:last]
        passed_over = torch.ones(*picks.shape[:3], n + 1, dtype=torch.bool, device=q.device)
        # Padding, and a block that no query of the chunk has reached, land in a spare column.
        passed_over.scatter_(-1, torch.where((picks < 0) | (picks > n), n, picks).long(), False)
        tokens = passed_over[..., :n].repeat_interleave(nsa.l_sel, dim=-1)[..., :last]
        return slice(0, last), tokens | ~_causal(first, last, 0, last, q.device)

    return _RangeAttention.apply(q, k, v, keys, _wide(q.dtype), T)


@torch._disable_dynamo
def window_attention(q: Tensor, k: Tensor, v: Tensor, nsa: NSAConfig) -> tuple[Tensor, Tensor]:
    """As `reference.window_attention`."""

    def keys(first: int, last: int) -> tuple[slice, Tensor]:
        start = max(first - nsa.w + 1, 0)
        future = ~_causal(first, last, start, last, q.device)
        too_old = _causal(first - nsa.w, last - nsa.w, start, last, q.device)
        return slice(start, last), (future | too_old)[None, None]

    # The chunk's own length adds to its range, so chunks longer than the window would only grow the mask.
    return _RangeAttention.apply(q, k, v, keys, _wide(q.dtype), min(2 * nsa.w, q.shape[1]), nsa.w)


combine = reference.combine


class _RangeAttention(torch.autograd.Function):
    """Masked softmax attention of chunks of queries over ranges of keys; scores are recomputed in backward."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, keys: KeyRange, wide: torch.dtype, widest: int, longest: int = 0
    ) -> tuple[Tensor, Tensor]:
        B, T, H, D = q.shape
        G, Dv, scale = k.shape[2], v.shape[3], D**-0.5
        out = q.new_empty(B, T, H, Dv)
        lse = torch.empty(B, T, H, dtype=_lse_dtype(q.dtype), device=q.device)
        chunks = _chunks(T, B * H * max(widest, 1) * wide.itemsize, q.device, longest)
        for first, last in chunks:
            span, hidden = keys(first, last)
            k_T, v_wide = k[:, span].to(wide).transpose(1, 2).mT, v[:, span].to(wide).transpose(1, 2)
            p = _masked(_rows(q[:, first:last], G, wide) * scale @ k_T, hidden)
            total, chunk_lse = _exponentiate(p)
            o = p.flatten(2, 3) @ v_wide / total.flatten(2, 3)
            out[:, first:last] = _unrows(o, H // G).to(q.dtype)
            lse[:, first:last] = chunk_lse.transpose(1, 2).flatten(2)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.keys, ctx.wide, ctx.chunks = keys, wide, chunks
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        wide, h, G = ctx.wide, q.shape[2] // k.shape[2], k.shape[2]
        scale = q.shape[-1] ** -0.5
        grad_q = torch.empty_like(q)
        grad_k = torch.zeros(k.transpose(1, 2).shape, dtype=wide, device=k.device)
        grad_v = torch.zeros(v.transpose(1, 2).shape, dtype=wide, device=k.device)
        # d loss / d score = p * (dp - row), with row = sum(out * grad_out) - grad_lse
        row = (out.to(wide) * grad_out.to(wide)).sum(-1) - grad_lse.to(wide)
        for first, last in ctx.chunks:
            span, hidden = ctx.keys(first, last)
            q_rows, do_rows = _rows(q[:, first:last], G, wide) * scale, _rows(grad_out[:, first:last], G, wide)
            k_wide, v_wide = k[:, span].to(wide).transpose(1, 2), v[:, span].to(wide).transpose(1, 2)
            p = _masked(q_rows @ k_wide.mT, hidden)
            p.sub_(_finite(_per_row(lse[:, first:last], G, wide)).unsqueeze(-1)).exp_()
            p = p.flatten(2, 3)
            ds = (do_rows @ v_wide.mT).sub_(_per_row(row[:, first:last], G, wide).flatten(2, 3).unsqueeze(-1)).mul_(p)
            grad_v[:, :, span] += p.mT @ do_rows
            grad_k[:, :, span] += ds.mT @ q_rows
            grad_q[:, first:last] = _unrows(ds @ k_wide * scale, h).to(q.dtype)
        return grad_q, grad_k.transpose(1, 2).to(k.dtype), grad_v.transpose(1, 2).to(v.dtype), None, None, None, None


class _GatherAttention(torch.autograd.Function):
    """Selected attention by gathering every query's own blocks: work and memory follow n_sel*l_sel, not T."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, l_sel: int) -> tuple[Tensor, Tensor]:
        B, T, H, D = q.shape
        G, Dv = k.shape[2], v.shape[3]
        wide = _wide(q.dtype)
        out = q.new_empty(B, T, H, Dv)
        lse = torch.empty(B, T, H, dtype=_lse_dtype(q.dtype), device=q.device)
        chunks = _chunks(T, B * G * blocks.shape[3] * l_sel * (D + Dv + H // G) * wide.itemsize, q.device)
        for first, last in chunks:
            k_own, v_own, hidden, _ = _gathered(k, v, blocks, first, last, l_sel, wide)
            p = _heads(q[:, first:last], G, wide) * D**-0.5 @ k_own.mT  # [B, C, G, h, S]
            p.masked_fill_(hidden.unsqueeze(3), float("-inf"))
            total, chunk_lse = _exponentiate(p)
            out[:, first:last] = (p @ v_own / total).flatten(2, 3).to(q.dtype)
            lse[:, first:last] = chunk_lse.flatten(2, 3)
        ctx.save_for_backward(q, k, v, blocks, out, lse)
        ctx.chunks, ctx.l_sel = chunks, l_sel
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, blocks, out, lse = ctx.saved_tensors
        G, scale, wide = k.shape[2], q.shape[-1] ** -0.5, _wide(q.dtype)
        grad_q = torch.empty_like(q)
        grad_k = torch.zeros(k.shape, dtype=wide, device=k.device)
        grad_v = torch.zeros(v.shape, dtype=wide, device=k.device)
        row = (out.to(wide) * grad_out.to(wide)).sum(-1) - grad_lse.to(wide)
        for first, last in ctx.chunks:
            k_own, v_own, hidden, tokens = _gathered(k, v, blocks, first, last, ctx.l_sel, wide)
            q_own, do_own = _heads(q[:, first:last], G, wide) * scale, _heads(grad_out[:, first:last], G, wide)
            p = (q_own @ k_own.mT).masked_fill_(hidden.unsqueeze(3), float("-inf"))
            p.sub_(_finite(_heads(lse[:, first:last].unsqueeze(-1), G, wide))).exp_()
            ds = (do_own @ v_own.mT).sub_(_heads(row[:, first:last].unsqueeze(-1), G, wide)).mul_(p)
            grad_q[:, first:last] = (ds @ k_own * scale).flatten(2, 3).to(q.dtype)
            _scatter_add(grad_k, tokens, ds.mT @ q_own)
            _scatter_add(grad_v, tokens, p.mT @ do_own)
        return grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype), None, None


def _gathered(
    k: Tensor, v: Tensor, blocks: Tensor, first: int, last: int, l_sel: int, wide: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Keys and values [B, C, G, S, D] of the chunk's own blocks, which of them are hidden, and their token numbers."""
    own = blocks[:, first:last]
    tokens = (own.long().unsqueeze(-1) * l_sel + torch.arange(l_sel, device=k.device)).flatten(-2)  # [B, C, G, S]
    t = torch.arange(first, last, device=k.device)[:, None, None]
    hidden = (tokens < 0) | (tokens > t)
    tokens = torch.where(hidden, 0, tokens)
    batch = torch.arange(k.shape[0], device=k.device)[:, None, None, None]
    group = torch.arange(k.shape[2], device=k.device)[:, None]
    return k[batch, tokens, group].to(wide), v[batch, tokens, group].to(wide), hidden, tokens


def _scatter_add(grad: Tensor, tokens: Tensor, parts: Tensor) -> None:
    """Adds parts [B, C, G, S, D] to grad [B, T, G, D] at tokens [B, C, G, S]."""
    index = tokens.transpose(1, 2).flatten(2).unsqueeze(-1)  # [B, G, C*S, 1]
    flat = parts.transpose(1, 2).flatten(2, 3)  # [B, G, C*S, D]
    grad.transpose(1, 2).scatter_add_(2, index.expand_as(flat), flat)


def _carry(p: Tensor, blocks: int, nsa: NSAConfig) -> Tensor:
    """Eq. 9 without its matrix: p [..., n] over compressed blocks -> importance [..., blocks].

    Every selection block collects the same run of l_sel/d + l/d - 1 compressed blocks with the same weights, l_sel/d apart.
    """
    step, lead = nsa.l_sel // nsa.d, nsa.l // nsa.d - 1
    span = step + lead
    rising = torch.arange(1, span + 1)
    weights = torch.minimum(rising, rising.flip(0)).clamp_max(min(step, lead + 1)).to(p)
    needed = (blocks - 1) * step + span
    padded = pad(p, (lead, max(needed - lead - p.shape[-1], 0)))[..., :needed]
    return padded.unfold(-1, span, step) @ weights


def _causal(first: int, last: int, start: int, stop: int, device: torch.device) -> Tensor:
    """Bool [last - first, stop - start]: key number <= query number."""
    return torch.arange(start, stop, device=device) <= torch.arange(first, last, device=device)[:, None]


def _chunks(T: int, bytes_per_query: int, device: torch.device, longest: int = 0) -> list[tuple[int, int]]:
    size = max(CHUNK_BYTES[device.type] // bytes_per_query, 1)
    size = min(size, longest) if longest else size
    return [(first, min(first + size, T)) for first in range(0, T, size)]


def _masked(s: Tensor, hidden: Tensor) -> Tensor:
    """Scores [B, G, C*h, keys] -> [B, G, C, h, keys], in place, -inf where hidden."""
    return s.unflatten(2, (hidden.shape[2], -1)).masked_fill_(hidden.unsqueeze(3), float("-inf"))


def _exponentiate(s: Tensor) -> tuple[Tensor, Tensor]:
    """Turns scores into exp(s - max), in place; returns their sum [..., 1] and LSE [...].

    A row that sees nothing becomes zeros with sum 1 and LSE -inf, also when there is no key at all.
    """
    if s.shape[-1] == 0:
        return s.new_ones(*s.shape[:-1], 1), s.new_full(s.shape[:-1], float("-inf"))
    top = _finite(s.amax(-1, keepdim=True))
    total = s.sub_(top).exp_().sum(-1, keepdim=True)
    return torch.where(total == 0, 1.0, total), (top + total.log()).squeeze(-1)


def _finite(lse: Tensor) -> Tensor:
    """-inf, the mark of a row that sees nothing, as 0: its scores are all -inf, and their exp must come out 0."""
    return torch.where(torch.isneginf(lse), 0.0, lse)


def _rows(x: Tensor, groups: int, wide: torch.dtype) -> Tensor:
    """[B, C, H, D] -> [B, G, C*h, D]: the heads of a group are rows of one matrix."""
    return x.to(wide).unflatten(2, (groups, -1)).transpose(1, 2).flatten(2, 3)


def _unrows(x: Tensor, heads: int) -> Tensor:
    """[B, G, C*h, D] -> [B, C, H, D]."""
    return x.unflatten(2, (-1, heads)).transpose(1, 2).flatten(2, 3)


def _per_row(x: Tensor, groups: int, wide: torch.dtype) -> Tensor:
    """[B, C, H] -> [B, G, C, h]."""
    return x.to(wide).unflatten(2, (groups, -1)).transpose(1, 2)


def _heads(x: Tensor, groups: int, wide: torch.dtype) -> Tensor:
    """[B, C, H, D] -> [B, C, G, h, D]."""
    return x.to(wide).unflatten(2, (groups, -1))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _choice_dtype(dtype: torch.dtype) -> torch.dtype:
    """As in `reference`: two backends that round alike here choose the same blocks."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else torch.float64


def _lse_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
