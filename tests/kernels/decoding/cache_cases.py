"""Random caches with NaN in all rows that must not be read, and attention over them in plain loops."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from nsa_lab.attention.layer_cache import LayerCache
from nsa_lab.config import NSAConfig


class Case(NamedTuple):
    """Sequences with `lengths` cached tokens and S new ones.

    `selection_nsa`: geometry of the keys of an indexer with `index_heads` queries per group.
    """

    lengths: tuple[int, ...]
    S: int
    H: int
    G: int
    Dk: int
    Dv: int
    nsa: NSAConfig
    selection_nsa: NSAConfig | None = None
    spare_rows: int = 5  # unused rows in every tensor of the cache
    branches: tuple[str, ...] = ("cmp", "sel", "win")
    index_heads: int = 1

    def __str__(self) -> str:
        index = f"-index{self.selection_nsa.l}" if self.selection_nsa else ""
        geometry = f"l{self.nsa.l}d{self.nsa.d}s{self.nsa.l_sel}n{self.nsa.n_sel}w{self.nsa.w}"
        branches = "+".join(self.branches) if len(self.branches) < 3 else ""
        sizes = f"{'+'.join(map(str, self.lengths))}x{self.S}-H{self.H}G{self.G}-{self.Dk}x{self.Dv}"
        forced = f"f{self.nsa.sink_blocks}+{self.nsa.local_blocks}{self.nsa.head_reduction}{self.nsa.block_reduction}"
        return f"{sizes}-{geometry}{forced}{index}x{self.index_heads}{branches}"


class Inputs(NamedTuple):
    """Arguments of `cached_attention`."""

    q: Tensor
    gates: Tensor | None
    cache: LayerCache
    lengths: Tensor
    index_q: Tensor | None

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Inputs:
        """Move to another device or convert to another floating dtype."""

        def move(x: Tensor | None) -> Tensor | None:
            return None if x is None else x.to(device=device, dtype=dtype)

        cache = LayerCache(*map(move, self.cache))  # pyright: ignore[reportArgumentType]
        gates, q = move(self.gates), move(self.q)
        assert q is not None
        return Inputs(q, gates, cache, self.lengths.to(device), move(self.index_q))


def count_compressed(tokens: int, nsa: NSAConfig) -> int:
    return sum(i * nsa.d + nsa.l <= tokens for i in range(tokens))


def make_inputs(case: Case, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Inputs:
    generator = torch.Generator().manual_seed(seed)
    B, nsa, ends = len(case.lengths), case.nsa, [length + case.S for length in case.lengths]

    def fill(width: int, rows: list[list[int]], n_rows: int) -> Tensor:
        x = torch.full((B, n_rows + case.spare_rows, case.G, width), float("nan"))
        for b, slots in enumerate(rows):
            x[b, slots] = torch.randn(len(slots), case.G, width, generator=generator)
        return x.to(device, dtype)

    def compressed(width: int, geometry: NSAConfig) -> Tensor:
        rows = [list(range(count_compressed(end, geometry))) for end in ends]
        return fill(width, rows, max(map(len, rows)))

    ring = nsa.w + case.S - 1
    recent = [[p % (ring + case.spare_rows) for p in range(max(0, end - ring), end)] for end in ends]
    raw = [list(range(end)) for end in ends]
    widths = (case.Dk, case.Dv)
    cache = LayerCache(
        *(compressed(width, nsa) for width in widths),
        *(fill(width, raw, max(ends)) for width in widths),
        *(fill(width, recent, ring) for width in widths),
        k_index=compressed(case.Dk, case.selection_nsa) if case.selection_nsa else None,
    )
    for branch in {"cmp", "sel", "win"} - set(case.branches):
        cache = cache._replace(**{f"k_{branch}": None, f"v_{branch}": None})
    q = torch.randn(B, case.S, case.H, case.Dk, generator=generator).to(device, dtype)
    gates = torch.rand(B, case.S, case.H, len(case.branches), generator=generator).to(device, dtype)
    gates = gates if len(case.branches) > 1 else None
    index_q = None
    if case.selection_nsa:
        index_q = torch.randn(B, case.S, case.G * case.index_heads, case.Dk, generator=generator).to(device, dtype)
    return Inputs(q, gates, cache, torch.tensor(case.lengths, dtype=torch.int32, device=device), index_q)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute attention of one query of one head, in its dtype."""
    if len(k) == 0:
        return v.new_zeros(v.shape[1])
    return torch.softmax(k @ q * q.shape[0] ** -0.5, 0) @ v


def compute_importances(q: Tensor, k: Tensor, position: int, nsa: NSAConfig, geometry: NSAConfig) -> list[float]:
    """Return the importance of every started selection block for heads q [h, D] of a group with visible keys k [N, D]."""
    importance = [0.0] * (position // nsa.l_sel + 1)
    if len(k) == 0:
        return importance
    probabilities = torch.softmax(q @ k.T * q.shape[1] ** -0.5, 1)
    probabilities = probabilities.sum(0) if nsa.head_reduction == "sum" else probabilities.amax(0)
    for i, probability in enumerate(probabilities.tolist()):
        for token in range(i * geometry.d, i * geometry.d + geometry.l):
            j = token // nsa.l_sel
            if j < len(importance) and nsa.block_reduction == "sum":
                importance[j] += probability / geometry.d
            elif j < len(importance):
                importance[j] = max(importance[j], probability)
    return importance


def compute_all_importances(inputs: Inputs, case: Case) -> dict[tuple[int, int, int], list[float]]:
    """Return {(b, s, g): importance of every started block}, in float64."""
    exact, heads = inputs.to("cpu", torch.float64), case.H // case.G
    geometry, importances = case.selection_nsa or case.nsa, {}
    for b, n_before in enumerate(case.lengths):
        for s in range(case.S):
            n_visible = count_compressed(n_before + s + 1, geometry)
            for g in range(case.G):
                if exact.index_q is not None and exact.cache.k_index is not None:
                    own = slice(g * case.index_heads, (g + 1) * case.index_heads)
                    q, k = exact.index_q[b, s, own], exact.cache.k_index[b, :n_visible, g]
                else:
                    q, k = exact.q[b, s, g * heads : (g + 1) * heads], exact.cache.k_cmp[b, :n_visible, g]
                importances[b, s, g] = compute_importances(q, k, n_before + s, case.nsa, geometry)
    return importances


def select_best_blocks(importance: list[float], nsa: NSAConfig) -> list[int]:
    candidates = range(len(importance))
    forced = {*candidates[: nsa.sink_blocks], *candidates[-nsa.local_blocks :]}
    others = sorted((j for j in candidates if j not in forced), key=lambda j: (-importance[j], j))
    return sorted(forced | set(others[: nsa.n_sel - nsa.sink_blocks - nsa.local_blocks]))


def attend_all(inputs: Inputs, blocks: Tensor, case: Case) -> Tensor:
    """Return the gated sum [B, S, H, Dv] for given blocks, by loops over rows and heads, in the dtype of the inputs."""
    q, gates, cache, _, _ = inputs
    out, h = q.new_zeros(*q.shape[:3], case.Dv), case.H // case.G
    ring = cache.k_win.shape[1] if cache.k_win is not None else 1
    for b, n_before in enumerate(case.lengths):
        for s in range(case.S):
            position = n_before + s
            n_compressed = count_compressed(position + 1, case.nsa)
            window_slots = [p % ring for p in range(max(0, position - case.nsa.w + 1), position + 1)]
            for n in range(case.H):
                g = n // h
                selected = [j for j in blocks[b, s, g].tolist() if j >= 0] if "sel" in case.branches else []
                positions = [
                    p for j in selected for p in range(j * case.nsa.l_sel, (j + 1) * case.nsa.l_sel) if p <= position
                ]
                rows = {"cmp": slice(n_compressed), "sel": positions, "win": window_slots}
                branches = [
                    attend(q[b, s, n], *(getattr(cache, f"{kind}_{name}")[b, rows[name], g] for kind in "kv"))
                    for name in case.branches
                ]
                weights = [1.0] if gates is None else gates[b, s, n]
                out[b, s, n] = sum(gate * branch for gate, branch in zip(weights, branches, strict=True))
    return out
