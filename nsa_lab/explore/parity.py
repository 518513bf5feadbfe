"""Every backend against the definition in float64: errors of outputs and gradients, part by part, and what cannot run here.

A row compares a backend with `reference` on the same numbers, widened; beside it stands what `reference` itself loses when
its answer is rounded to the same dtype. The bar is on the output's error; block choices are compared as sets.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from nsa_lab.attention import (
    BackendError,
    compressed_attention,
    nsa_attention,
    reference,
    resolve_backend,
    select_blocks,
    selected_attention,
    window_attention,
)
from nsa_lab.config import NSAConfig
from nsa_lab.explore.examples import random_example

# Largest absolute error that a part may make against float64, outputs and gradients of size about 1.
LIMITS = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 5e-2, torch.float16: 1e-2}
GRADIENT_SLACK = 10.0  # gradients of keys and values sum over all queries that read them
BACKENDS = ("torch", "triton", "flash")
PARTS = ("compressed", "selection", "selected", "window", "whole")

@dataclass(frozen=True)
class Inputs:
    """Leaves of one test case: q [1, T, H, D], keys and values after compression, gates, and the blocks to read."""

    q: Tensor
    k_cmp: Tensor
    v_cmp: Tensor
    k: Tensor
    v: Tensor
    gates: Tensor
    lse: Tensor
    blocks: Tensor
    nsa: NSAConfig

    def leaves(self) -> list[Tensor]:
        return [self.q, self.k_cmp, self.v_cmp, self.k, self.v, self.gates]


@dataclass(frozen=True)
class Row:
    """One backend, part, length and dtype. Errors are largest absolute differences; for `selection`, shares of queries."""

    part: str
    backend: str
    length: int
    dtype: str
    error: float
    gradient_error: float | None
    rounding: float
    limit: float

    @property
    def ok(self) -> bool:
        return self.error <= self.limit and (self.gradient_error or 0.0) <= GRADIENT_SLACK * self.limit


def usable(device: str, dtype: torch.dtype, nsa: NSAConfig) -> tuple[list[str], dict[str, str]]:
    """The backends that can run here, and for the others the reason with its remedy."""
    names, reasons = [], {}
    for backend in BACKENDS:
        try:
            resolve_backend(device, dtype, nsa, backend=backend)
            names.append(backend)
        except (BackendError, NotImplementedError) as error:
            reasons[backend] = str(error)
    return names, reasons


def compare(
    lengths: list[int], dtypes: list[torch.dtype], nsa: NSAConfig, *, device: str = "cpu", heads: int = 12, groups: int = 2,
    width: int = 64,
) -> Iterator[Row]:
    """A row for each part, usable backend, length and dtype, as they are computed."""
    for dtype in dtypes:
        backends, _ = usable(device, dtype, nsa)
        for length in lengths:
            case = _inputs(length, nsa, dtype, device, heads, groups, width)
            for part in PARTS:
                truth = _outcome(part, "reference", _cast(case, torch.float64))
                rounded = _outcome(part, "reference", case)
                for backend in backends:
                    if backend == "flash" and part != "window":
                        continue
                    yield _row(part, backend, case, _outcome(part, backend, case), truth, rounded)


def table(rows: list[Row]) -> str:
    """The rows as aligned text, with a verdict each."""
    lines = [f"{'part':<11} {'backend':<8} {'T':>6} {'dtype':<9} {'error':>9} {'gradients':>10} {'rounding':>9} "
             f"{'limit':>7}"]
    for row in rows:
        gradient = "–" if row.gradient_error is None else f"{row.gradient_error:.1e}"
        lines.append(f"{row.part:<11} {row.backend:<8} {row.length:>6} {row.dtype:<9} {row.error:>9.1e} {gradient:>10} "
                     f"{row.rounding:>9.1e} {row.limit:>7.0e}  {'ok' if row.ok else 'TOO LARGE'}")
    return "\n".join(lines)


def _inputs(length: int, nsa: NSAConfig, dtype: torch.dtype, device: str, heads: int, groups: int, width: int) -> Inputs:
    """Normal numbers, rounded to `dtype` first: every implementation gets the same ones."""
    x = random_example(length, heads=heads, groups=groups, width=width, seed=length, dtype=dtype)
    generator = torch.Generator().manual_seed(length + 1)
    gates = torch.rand(1, length, heads, 3, generator=generator, dtype=torch.float64).to(dtype)
    q, k_cmp, v_cmp = x.q, reference.compress(x.k_cmp, nsa), reference.compress(x.v_cmp, nsa)
    _, lse = reference.compressed_attention(q.double(), k_cmp.double(), v_cmp.double(), nsa)
    # The choice that every backend's selected branch is given: of the rounded keys, made in float64.
    blocks = reference.select_blocks(q.double(), k_cmp.double(), lse, nsa)
    lse = lse if dtype == torch.float64 else lse.float()
    on = [part.to(device) for part in (q, k_cmp, v_cmp, x.k_sel, x.v_sel, gates, lse, blocks)]
    return Inputs(*on, nsa=nsa)


def _cast(case: Inputs, dtype: torch.dtype) -> Inputs:
    leaves = [leaf.to(dtype) for leaf in case.leaves()]
    return Inputs(*leaves, lse=case.lse.to(dtype), blocks=case.blocks, nsa=case.nsa)


def _outcome(part: str, backend: str, case: Inputs) -> tuple[Tensor, list[Tensor]]:
    """The part's output and the gradients of a fixed random projection of it; none for the choice."""
    c, n = case, case.nsa
    if part == "selection":
        return select_blocks(c.q, c.k_cmp, c.lse, n, backend=backend), []
    leaves = [leaf.detach().requires_grad_() for leaf in c.leaves()]
    q, k_cmp, v_cmp, k, v, gates = leaves
    if part == "compressed":
        out, _ = compressed_attention(q, k_cmp, v_cmp, n, backend=backend)
    elif part == "selected":
        out, _ = selected_attention(q, k, v, c.blocks, n, backend=backend)
    elif part == "window":
        out, _ = window_attention(q, k, v, n, backend=backend)
    else:
        out = nsa_attention(q, k_cmp, v_cmp, k, v, k, v, gates, n, backend=backend)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(out)
    grads = torch.autograd.grad((out * weights).sum(), leaves, allow_unused=True)
    return out.detach(), [grad for grad in grads if grad is not None]


def _row(part: str, backend: str, case: Inputs, got: tuple, truth: tuple, rounded: tuple) -> Row:
    dtype = case.q.dtype
    named, length = str(dtype).removeprefix("torch."), case.q.shape[1]
    if part == "selection":
        share, baseline = (_differing(blocks[0], truth[0]) for blocks in (got, rounded))
        # Scores that are equal but for rounding may swap; the definition's own rounding shows how often.
        return Row(part, backend, length, named, share, None, baseline, limit=max(2 * baseline, 1e-3))
    error, rounding = _error(got[0], truth[0]), _error(rounded[0], truth[0])
    gradient = max((_error(a, b) for a, b in zip(got[1], truth[1], strict=True)), default=0.0)
    return Row(part, backend, length, named, error, gradient, rounding, LIMITS[dtype])


def _error(got: Tensor, truth: Tensor) -> float:
    return float((got.double() - truth).abs().max()) if got.numel() else 0.0


def _differing(blocks: Tensor, truth: Tensor) -> float:
    """Share of queries and groups whose chosen sets differ; both are ascending, so equal sets are equal rows."""
    return float((blocks != truth).any(-1).double().mean())
