"""Parts of NSA for the attention benchmark, as callables over their inputs, with several kinds of block selection.

random: every query selects its free blocks independently and uniformly (the worst case for reuse). smooth: queries of a
64-token segment mostly share their selection (as in trained models). sink: every query selects the earliest blocks. real:
the output of `select_blocks` for the compressed scores of the same inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

import nsa_lab.attention as attention
from nsa_lab.attention import geometry, reference
from nsa_lab.attention.dispatch import ResolvedBackend, nsa_attention
from nsa_lab.bench.harness import RandomInputs, make_leaves
from nsa_lab.config import NSAConfig

SELECTION_KINDS = ("random", "smooth", "sink", "real")
_CHUNK = 4096


@dataclass(frozen=True)
class Part:
    """`run(*inputs)` returns one tensor. `useful_flops` counts its forward pass; 0 for a memory-bound part."""

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
    """Return the parts compressed, choice (block selection), selected (per kind of selection), window, gate and whole.

    All use the same random inputs. Values have width `Dv`; None: `D`.
    """
    Dv = Dv or D
    random = RandomInputs(device, dtype, seed)
    normal = random.normal
    N = geometry.num_compressed(T, nsa)
    q, k_cmp, v_cmp = normal(B, T, H, D), normal(B, N, G, D), normal(B, N, G, Dv)
    k_sel, v_sel, k_win, v_win = (normal(B, T, G, width) for width in (D, Dv, D, Dv))
    outs = [normal(B, T, H, Dv) for _ in range(3)]
    gates = random.gates(B, T, H, 3)
    backend = {part: resolved.backend for part, resolved in backends.items()}
    with torch.no_grad():
        lse = attention.compressed_attention(q, k_cmp, v_cmp, nsa, backend=backend["compressed"])[1]
        real_blocks = attention.select_blocks(q, k_cmp, lse, nsa, backend=backend["selection"])
    reads = geometry.mean_reads(T, nsa)
    flops_per_score = 2 * D * H * B * T  # one key per query
    flops_per_pair = 2 * (D + Dv) * H * B * T  # score and weighted value of one key per query

    def compressed(q, k, v):
        return attention.compressed_attention(q, k, v, nsa, backend=backend["compressed"])[0]

    def select(q, k, lse):
        return attention.select_blocks(q, k, lse, nsa, backend=backend["selection"])

    def selected(q, k, v, blocks):
        return attention.selected_attention(q, k, v, blocks, nsa, backend=backend["selected"])[0]

    def window(q, k, v):
        return attention.window_attention(q, k, v, nsa, backend=backend["window"])[0]

    def whole(*inputs: Tensor) -> Tensor:
        return nsa_attention(*inputs, nsa=nsa, backend=backends)

    parts = [
        Part("compressed", backend["compressed"], compressed, make_leaves(q, k_cmp, v_cmp), flops_per_pair * reads["cmp"]),
        Part("choice", backend["selection"], select, [q, k_cmp, lse], flops_per_score * reads["cmp"]),
    ]
    for kind in SELECTION_KINDS:
        blocks = real_blocks if kind == "real" else make_selection(kind, B, T, G, nsa, device, seed)
        parts.append(
            Part(
                f"selected, {kind}",
                backend["selected"],
                selected,
                [*make_leaves(q, k_sel, v_sel), blocks],
                flops_per_pair * reads["sel"],
                blocks,
            )
        )
    parts += [
        Part("window", backend["window"], window, make_leaves(q, k_win, v_win), flops_per_pair * reads["win"]),
        Part("gate", backend["combine"], _get_gate(backends["combine"].backend), make_leaves(*outs, gates), 0.0),
        Part(
            "whole",
            "+".join(dict.fromkeys(backend.values())),
            whole,
            make_leaves(q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates),
            flops_per_score * reads["cmp"] + flops_per_pair * (reads["cmp"] + reads["sel"] + reads["win"]),
            real_blocks,
        ),
    ]
    return parts


def make_selection(kind: str, B: int, T: int, G: int, nsa: NSAConfig, device, seed: int = 0) -> Tensor:
    """Return blocks int32 [B, T, G, n_sel] of one kind, in the format of `select_blocks`."""
    generator = torch.Generator(device).manual_seed(seed + 1)
    n = geometry.num_selection(T, nsa)
    blocks = []
    for first in range(0, T, _CHUNK):
        n_queries = min(_CHUNK, T - first)
        if kind == "sink":
            importance = -torch.arange(n, device=device, dtype=torch.float32).expand(B, n_queries, G, n)
        else:
            importance = torch.rand(B, n_queries, G, n, device=device, generator=generator)
        if kind == "smooth":
            n_segments = -(-n_queries // 64)
            shared = torch.rand(B, n_segments, G, n, device=device, generator=generator).repeat_interleave(64, 1)[
                :, :n_queries
            ]
            importance = shared + 0.05 * importance
        blocks.append(reference.select_by_importance(importance, nsa, first))
    return torch.cat(blocks, 1)


def _get_gate(backend: str) -> Callable[..., Tensor]:
    if backend == "triton":
        from nsa_lab.attention import kernels

        return kernels.combine
    return reference.combine
