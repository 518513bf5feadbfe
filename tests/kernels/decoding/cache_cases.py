"""Caches of random sequences, NaN wherever nothing may be read, and attention through them in plain loops."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from nsa_lab.attention.layer_cache import LayerCache
from nsa_lab.config import NSAConfig


class Case(NamedTuple):
    """Sequences of so many tokens before S new ones; `choice` is an indexer's geometry."""

    lengths: tuple[int, ...]
    S: int
    H: int
    G: int
    Dk: int
    Dv: int
    nsa: NSAConfig
    selection_nsa: NSAConfig | None = None
    spare_rows: int = 5  # rows that nobody needs, in every tensor of the cache

    def __str__(self) -> str:
        index = f"-index{self.selection_nsa.l}" if self.selection_nsa else ""
        geometry = f"l{self.nsa.l}d{self.nsa.d}s{self.nsa.l_sel}n{self.nsa.n_sel}w{self.nsa.w}"
        return f"{'+'.join(map(str, self.lengths))}x{self.S}-H{self.H}G{self.G}-{self.Dk}x{self.Dv}-{geometry}{index}"


class Inputs(NamedTuple):
    """What `cached_attention` takes."""

    q: Tensor
    gates: Tensor
    cache: LayerCache
    lengths: Tensor
    index_q: Tensor | None

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Inputs:
        """The same values elsewhere, or in another floating dtype."""

        def move(x: Tensor | None) -> Tensor | None:
            return None if x is None else x.to(device=device, dtype=dtype)

        cache = LayerCache(*map(move, self.cache))  # pyright: ignore[reportArgumentType]
        gates, q = move(self.gates), move(self.q)
        assert q is not None and gates is not None
        return Inputs(q, gates, cache, self.lengths.to(device), move(self.index_q))


def count_compressed(tokens: int, nsa: NSAConfig) -> int:
    return sum(i * nsa.d + nsa.l <= tokens for i in range(tokens))


def make_inputs(case: Case, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Inputs:
    generator = torch.Generator().manual_seed(seed)
    B, nsa, ends = len(case.lengths), case.nsa, [length + case.S for length in case.lengths]

    def filled(width: int, rows: list[list[int]], room: int) -> Tensor:
        x = torch.full((B, room + case.spare_rows, case.G, width), float("nan"))
        for b, slots in enumerate(rows):
            x[b, slots] = torch.randn(len(slots), case.G, width, generator=generator)
        return x.to(device, dtype)

    def compressed(width: int, geometry: NSAConfig) -> Tensor:
        rows = [list(range(count_compressed(end, geometry))) for end in ends]
        return filled(width, rows, max(map(len, rows)))

    ring = nsa.w + case.S - 1
    recent = [[p % (ring + case.spare_rows) for p in range(max(0, end - ring), end)] for end in ends]
    raw = [list(range(end)) for end in ends]
    widths = (case.Dk, case.Dv)
    cache = LayerCache(
        *(compressed(width, nsa) for width in widths),
        *(filled(width, raw, max(ends)) for width in widths),
        *(filled(width, recent, ring) for width in widths),
        k_index=compressed(case.Dk, case.selection_nsa) if case.selection_nsa else None,
    )
    q = torch.randn(B, case.S, case.H, case.Dk, generator=generator).to(device, dtype)
    gates = torch.rand(B, case.S, case.H, 3, generator=generator).to(device, dtype)
    index_q = torch.randn(B, case.S, case.G, case.Dk, generator=generator).to(device, dtype) if case.selection_nsa else None
    return Inputs(q, gates, cache, torch.tensor(case.lengths, dtype=torch.int32, device=device), index_q)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One query of one head, in the dtype that it has."""
    if len(k) == 0:
        return v.new_zeros(v.shape[1])
    return torch.softmax(k @ q * q.shape[0] ** -0.5, 0) @ v


def compute_importances(q: Tensor, k: Tensor, position: int, nsa: NSAConfig, geometry: NSAConfig) -> list[float]:
    """Of every selection block that has begun, to the heads q [h, D] of a group; k [N, D] are what they see."""
    tokens = [0.0] * (position // nsa.l_sel + 1)
    if len(k) == 0:
        return tokens
    shares = torch.softmax(q @ k.T * q.shape[1] ** -0.5, 1).sum(0).tolist()
    for i, share in enumerate(shares):
        for token in range(i * geometry.d, i * geometry.d + geometry.l):
            if token // nsa.l_sel < len(tokens):
                tokens[token // nsa.l_sel] += share / geometry.d
    return tokens


def compute_all_importances(inputs: Inputs, case: Case) -> dict[tuple[int, int, int], list[float]]:
    """{(b, s, g): importance of every block that has begun}, in float64."""
    wide, h = inputs.to("cpu", torch.float64), case.H // case.G
    geometry, found = case.selection_nsa or case.nsa, {}
    for b, before in enumerate(case.lengths):
        for s in range(case.S):
            seen = count_compressed(before + s + 1, geometry)
            for g in range(case.G):
                if wide.index_q is not None and wide.cache.k_index is not None:
                    q, k = wide.index_q[b, s, g : g + 1], wide.cache.k_index[b, :seen, g]
                else:
                    q, k = wide.q[b, s, g * h : (g + 1) * h], wide.cache.k_cmp[b, :seen, g]
                found[b, s, g] = compute_importances(q, k, before + s, case.nsa, geometry)
    return found


def select_best_blocks(importance: list[float], nsa: NSAConfig) -> list[int]:
    own = len(importance) - 1
    forced = {0, own, max(own - 1, 0)}
    rest = sorted((j for j in range(own) if j not in forced), key=lambda j: (-importance[j], j))
    return sorted(forced | set(rest[: nsa.n_sel - 3]))


def attend_all(inputs: Inputs, blocks: Tensor, case: Case) -> Tensor:
    """The gated sum [B, S, H, Dv] with the blocks given, row by row and head by head, in the inputs' dtype throughout."""
    q, gates, cache, _, _ = inputs
    out, h = q.new_zeros(*q.shape[:3], case.Dv), case.H // case.G
    ring = cache.k_win.shape[1]
    for b, before in enumerate(case.lengths):
        for s in range(case.S):
            position = before + s
            whole = count_compressed(position + 1, case.nsa)
            near = [p % ring for p in range(max(0, position - case.nsa.w + 1), position + 1)]
            for n in range(case.H):
                g = n // h
                chosen = [j for j in blocks[b, s, g].tolist() if j >= 0]
                read = [p for j in chosen for p in range(j * case.nsa.l_sel, (j + 1) * case.nsa.l_sel) if p <= position]
                branches = (
                    attend(q[b, s, n], cache.k_cmp[b, :whole, g], cache.v_cmp[b, :whole, g]),
                    attend(q[b, s, n], cache.k_sel[b, read, g], cache.v_sel[b, read, g]),
                    attend(q[b, s, n], cache.k_win[b, near, g], cache.v_win[b, near, g]),
                )
                out[b, s, n] = sum(gate * branch for gate, branch in zip(gates[b, s, n], branches, strict=True))
    return out
