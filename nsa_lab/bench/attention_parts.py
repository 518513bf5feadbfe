"""What the attention bench measures: each part of NSA as a callable over its inputs, for several kinds of selection.

random: every query picks its free blocks independently and uniformly (the worst case for reuse). smooth: queries of one
64-token stretch mostly share their picks (what trained models tend to). sink: everybody picks the earliest blocks.
real: what `select_blocks` chooses from the compressed scores of the very inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

import nsa_lab.attention as attention
from nsa_lab.attention import geometry, reference
from nsa_lab.attention.dispatch import ResolvedBackend, nsa_attention
from nsa_lab.config import NSAConfig

SELECTION_KINDS = ("random", "smooth", "sink", "real")
_CHUNK = 4096


@dataclass(frozen=True)
class Part:
    """`run(*inputs)` gives one tensor; `useful_flops` counts its forward pass, 0 where bytes bound it."""

    name: str
    backend: str
    run: Callable[..., Tensor]
    inputs: list[Tensor]
    useful_flops: float
    blocks: Tensor | None = None


def make_parts(
    T: int,
    B: int,
    H: int,
    G: int,
    D: int,
    nsa: NSAConfig,
    backends: Mapping[str, ResolvedBackend],
    device,
    dtype,
    seed: int = 0,
    Dv: int | None = None,
) -> list[Part]:
    """compressed, choice, selected by each kind of selection, window, gate and whole, over one set of random inputs.

    Values are `Dv` wide, or `D` where it is None."""
    Dv = Dv or D
    draw = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=dtype, generator=draw)

    N = geometry.num_compressed(T, nsa)
    q, k_cmp, v_cmp = normal(B, T, H, D), normal(B, N, G, D), normal(B, N, G, Dv)
    k_sel, v_sel, k_win, v_win = (normal(B, T, G, width) for width in (D, Dv, D, Dv))
    outs = [normal(B, T, H, Dv) for _ in range(3)]
    gates = torch.rand(B, T, H, 3, device=device, generator=draw).to(dtype)  # as the model has them
    name = {part: choice.backend for part, choice in backends.items()}
    with torch.no_grad():
        lse = attention.compressed_attention(q, k_cmp, v_cmp, nsa, backend=name["compressed"])[1]
        real = attention.select_blocks(q, k_cmp, lse, nsa, backend=name["selection"])
    reads = geometry.mean_reads(T, nsa)
    score = 2 * D * H * B * T  # of one key that every query reads
    pair = 2 * (D + Dv) * H * B * T  # its score, and its weighted value

    def compressed(q, k, v):
        return attention.compressed_attention(q, k, v, nsa, backend=name["compressed"])[0]

    def choice(q, k, lse):
        return attention.select_blocks(q, k, lse, nsa, backend=name["selection"])

    def selected(q, k, v, blocks):
        return attention.selected_attention(q, k, v, blocks, nsa, backend=name["selected"])[0]

    def window(q, k, v):
        return attention.window_attention(q, k, v, nsa, backend=name["window"])[0]

    def whole(*inputs: Tensor) -> Tensor:
        return nsa_attention(*inputs, nsa=nsa, backend=backends)

    parts = [
        Part("compressed", name["compressed"], compressed, _make_leaves(q, k_cmp, v_cmp), pair * reads["cmp"]),
        Part("choice", name["selection"], choice, [q, k_cmp, lse], score * reads["cmp"]),
    ]
    for kind in SELECTION_KINDS:
        blocks = real if kind == "real" else make_selection(kind, B, T, G, nsa, device, seed)
        parts.append(
            Part(
                f"selected, {kind}",
                name["selected"],
                selected,
                [*_make_leaves(q, k_sel, v_sel), blocks],
                pair * reads["sel"],
                blocks,
            )
        )
    parts += [
        Part("window", name["window"], window, _make_leaves(q, k_win, v_win), pair * reads["win"]),
        Part("gate", name["combine"], _get_gate(backends["combine"].backend), _make_leaves(*outs, gates), 0.0),
        Part(
            "whole",
            "+".join(dict.fromkeys(name.values())),
            whole,
            _make_leaves(q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates),
            score * reads["cmp"] + pair * (reads["cmp"] + reads["sel"] + reads["win"]),
            real,
        ),
    ]
    return parts


def make_selection(kind: str, B: int, T: int, G: int, nsa: NSAConfig, device, seed: int = 0) -> Tensor:
    """Blocks int32 [B, T, G, n_sel] of one kind, valid as `select_blocks` gives them."""
    draw = torch.Generator(device).manual_seed(seed + 1)
    n = geometry.num_selection(T, nsa)
    chosen = []
    for first in range(0, T, _CHUNK):
        queries = min(_CHUNK, T - first)
        if kind == "sink":
            importance = -torch.arange(n, device=device, dtype=torch.float32).expand(B, queries, G, n)
        else:
            importance = torch.rand(B, queries, G, n, device=device, generator=draw)
        if kind == "smooth":
            stretches = -(-queries // 64)
            shared = torch.rand(B, stretches, G, n, device=device, generator=draw).repeat_interleave(64, 1)[:, :queries]
            importance = shared + 0.05 * importance
        chosen.append(reference.select_by_importance(importance, nsa, first))
    return torch.cat(chosen, 1)


def _make_leaves(*tensors: Tensor) -> list[Tensor]:
    return [x.detach().requires_grad_() for x in tensors]


def _get_gate(backend: str) -> Callable[..., Tensor]:
    if backend == "triton":
        from nsa_lab.attention import kernels

        return kernels.combine
    return reference.combine
