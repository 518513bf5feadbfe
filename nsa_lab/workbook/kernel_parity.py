"""Every backend against the definition in float64: errors of outputs and gradients, part by part, and what cannot run here.

A row compares a backend with `reference` on the same numbers, widened. What it may err:

* half precision: twice (output) and three times (gradients) what the same mathematics errs when written plainly in that
  dtype, as relative norms and never less than one rounding each: the rule of the benchmark and of the kernels' tests.
* float32: outputs 1e-5, the largest difference. Gradients as in half precision, but never less than `LEAST_FLOAT32`.
* float64: 1e-10, the largest difference, outputs and gradients.
* choices of blocks: sets, of which float64 may differ in none, other dtypes where the definition's own rounding does.
"""

from __future__ import annotations

import math
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
from nsa_lab.bench.attention_parity import GRADIENT_FACTOR, OUTPUT_FACTOR, compute_error_and_limit, compute_plain
from nsa_lab.config import NSAConfig
from nsa_lab.workbook.examples import make_random_example

# Largest difference from float64 that an output may have, its size being about 1.
LIMITS = {torch.float64: 1e-10, torch.float32: 1e-5}
# Relative error that a float32 gradient may have whatever plain float32 errs. The gradient of a query with one key is
# exactly 0, which a plain softmax finds; a kernel that keeps no probabilities subtracts two equal sums, and is left with
# their rounding: at T = 1 and width 64 up to 1e-6, where three roundings of 1 are 3.6e-7.
MIN_ALLOWED_FLOAT32 = 5e-6
MAX_DIFFERING_FRACTION = 1e-3  # share of the queries that may choose other blocks where scores are equal but for rounding
BACKENDS = ("torch", "triton", "flash")
PARTS = ("compressed", "selection", "selected", "window", "whole")
INPUT_NAMES = ("q", "k_cmp", "v_cmp", "k", "v", "gates")


@dataclass(frozen=True)
class ParityCase:
    """One test case: q [1, T, H, D], keys and values after compression, gates, the gradient of the output that comes in
    from above, and the blocks to read."""

    q: Tensor
    k_cmp: Tensor
    v_cmp: Tensor
    k: Tensor
    v: Tensor
    gates: Tensor
    d_out: Tensor
    lse: Tensor
    blocks: Tensor
    nsa: NSAConfig

    def list_leaves(self) -> list[Tensor]:
        return [getattr(self, name) for name in INPUT_NAMES]


@dataclass(frozen=True)
class ErrorCheck:
    """An error beside the one that is allowed, both in the same measure; `of` names what errs."""

    quantity: str
    error: float
    allowed: float

    @property
    def fraction_of_allowed(self) -> float:
        """The error in units of what is allowed: at most 1 is ok, and what is not a number is infinitely wrong."""
        if self.error == 0:
            return 0.0
        share = self.error / self.allowed if self.allowed else math.inf
        return math.inf if math.isnan(share) else share

    @property
    def ok(self) -> bool:
        return self.fraction_of_allowed <= 1


@dataclass(frozen=True)
class Comparison:
    """One backend, part, length and dtype: its output (for `selection`, the choice) and the worst of its gradients."""

    part: str
    backend: str
    length: int
    dtype: str
    output: ErrorCheck
    gradient: ErrorCheck | None

    @property
    def ok(self) -> bool:
        return self.output.ok and (self.gradient is None or self.gradient.ok)


def find_usable_backends(device: str, dtype: torch.dtype, nsa: NSAConfig) -> tuple[list[str], dict[str, str]]:
    """The backends that can run here, and for the others the reason with its remedy."""
    names, reasons = [], {}
    for backend in BACKENDS:
        try:
            resolve_backend(device, dtype, nsa, backend=backend)
            names.append(backend)
        except (BackendError, NotImplementedError) as error:
            reasons[backend] = str(error)
    return names, reasons


def describe_backends(device: str, dtypes: list[torch.dtype], nsa: NSAConfig) -> str:
    """The device, what can run on it in which dtypes, and each reason of what cannot, once."""
    lines = [f"device: {torch.cuda.get_device_name() if device == 'cuda' else device}"]
    missing: dict[str, list[str]] = {}
    for dtype in dtypes:
        names, reasons = find_usable_backends(device, dtype, nsa)
        lines.append(f"{_dtype_name(dtype):<9} {', '.join(names)}")
        for reason in reasons.values():
            missing.setdefault(reason, []).append(_dtype_name(dtype))
    return "\n".join(lines + [f"not in {', '.join(named)}: {reason}" for reason, named in missing.items()])


def compare_backends(
    lengths: list[int],
    dtypes: list[torch.dtype],
    nsa: NSAConfig,
    *,
    device: str = "cpu",
    heads: int = 12,
    groups: int = 2,
    head_dim: int = 64,
) -> Iterator[Comparison]:
    """A row for each part, usable backend, length and dtype, as they are computed."""
    for dtype in dtypes:
        backends, _ = find_usable_backends(device, dtype, nsa)
        for length in lengths:
            case = _make_case(length, nsa, dtype, device, heads, groups, head_dim)
            for part in PARTS:
                truth = _compute_part(part, "reference", _cast_case(case, torch.float64))
                rough = _compute_plain_baseline(part, case)
                for backend in backends:
                    if backend == "flash" and part != "window":
                        continue
                    output, gradient = _check_part(part, dtype, _compute_part(part, backend, case), truth, rough)
                    yield Comparison(part, backend, length, _dtype_name(dtype), output, gradient)


def format_table(rows: list[Comparison]) -> str:
    """The rows as aligned text, with a verdict each."""
    lines = [
        f"{'part':<11} {'backend':<8} {'T':>6} {'dtype':<9} {'error':>8} {'allowed':>8}  {'gradient':>8} {'allowed':>8}  of"
    ]
    for row in rows:
        gradient = (
            f"{_format_errors(row.gradient)}  {row.gradient.quantity:<6}" if row.gradient else f"{'–':>8} {'–':>8}  {'':<6}"
        )
        lines.append(
            f"{row.part:<11} {row.backend:<8} {row.length:>6,} {row.dtype:<9} {_format_errors(row.output)}  {gradient}  "
            f"{'ok' if row.ok else 'TOO LARGE'}"
        )
    return "\n".join(lines)


def compute_worst_fractions(rows: list[Comparison], dtype: torch.dtype) -> list[tuple[str, str, float]]:
    """Over all lengths, the largest share of the allowed error, as (what of which part, backend, share)."""
    worst: dict[tuple[str, str], float] = {}
    for row in rows:
        if row.dtype == _dtype_name(dtype):
            for what, judged in (("output" if row.gradient else "choice", row.output), ("gradients", row.gradient)):
                if judged is not None:
                    key = (f"{row.part}, {what}", row.backend)
                    worst[key] = max(worst.get(key, 0.0), judged.fraction_of_allowed)
    return [(what, backend, share) for (what, backend), share in worst.items()]


def _make_case(
    length: int, nsa: NSAConfig, dtype: torch.dtype, device: str, heads: int, groups: int, head_dim: int
) -> ParityCase:
    """Normal numbers, rounded to `dtype` first: every implementation gets the same ones."""
    x = make_random_example(length, heads=heads, groups=groups, head_dim=head_dim, seed=length, dtype=dtype)
    generator = torch.Generator().manual_seed(length + 1)
    gates = torch.rand(1, length, heads, 3, generator=generator, dtype=torch.float64).to(dtype)
    q, k_cmp, v_cmp = x.q, reference.compress(x.k_cmp, nsa), reference.compress(x.v_cmp, nsa)
    _, lse = reference.compressed_attention(q.double(), k_cmp.double(), v_cmp.double(), nsa)
    # The choice that every backend's selected branch is given: of the rounded keys, made in float64.
    blocks = reference.select_blocks(q.double(), k_cmp.double(), lse, nsa)
    lse = lse if dtype == torch.float64 else lse.float()
    d_out = torch.randn(q.shape, generator=generator, dtype=torch.float64).to(dtype)
    on = [part.to(device) for part in (q, k_cmp, v_cmp, x.k_sel, x.v_sel, gates, d_out, lse, blocks)]
    return ParityCase(*on, nsa=nsa)


def _cast_case(case: ParityCase, dtype: torch.dtype) -> ParityCase:
    parts = [part.to(dtype) for part in (*case.list_leaves(), case.d_out, case.lse)]
    return ParityCase(*parts, blocks=case.blocks, nsa=case.nsa)


def _compute_part(part: str, backend: str, case: ParityCase) -> dict[str, Tensor]:
    """The part's output and the gradients of all that it depends on, by name; the choice alone for `selection`."""
    n = case.nsa
    if part == "selection":
        return {"choice": select_blocks(case.q, case.k_cmp, case.lse, n, backend=backend)}
    q, k_cmp, v_cmp, k, v, gates = leaves = [leaf.detach().requires_grad_() for leaf in case.list_leaves()]
    if part == "compressed":
        out, _ = compressed_attention(q, k_cmp, v_cmp, n, backend=backend)
    elif part == "selected":
        out, _ = selected_attention(q, k, v, case.blocks, n, backend=backend)
    elif part == "window":
        out, _ = window_attention(q, k, v, n, backend=backend)
    else:
        out = nsa_attention(q, k_cmp, v_cmp, k, v, k, v, gates, n, backend=backend)
    return _add_gradients(out, leaves, case)


def _compute_plain_baseline(part: str, case: ParityCase) -> dict[str, Tensor]:
    """The yardstick: the part in plain arithmetic of the case's dtype; for the choice, the definition in it."""
    if part == "selection":
        return _compute_part(part, "reference", case)
    q, k_cmp, v_cmp, k, v, gates = leaves = [leaf.detach().requires_grad_() for leaf in case.list_leaves()]
    inputs = {"compressed": (q, k_cmp, v_cmp), "whole": (q, k_cmp, v_cmp, k, v, k, v, gates)}.get(part, (q, k, v))
    return _add_gradients(compute_plain(part, inputs, case.blocks, case.nsa), leaves, case)


def _add_gradients(out: Tensor, leaves: list[Tensor], case: ParityCase) -> dict[str, Tensor]:
    grads = torch.autograd.grad(out, leaves, case.d_out, allow_unused=True)
    named = zip(INPUT_NAMES, grads, strict=True)
    return {"output": out.detach(), **{f"d{name}": grad for name, grad in named if grad is not None}}


def _check_part(
    part: str, dtype: torch.dtype, results: dict[str, Tensor], expected: dict[str, Tensor], plain_results: dict[str, Tensor]
) -> tuple[ErrorCheck, ErrorCheck | None]:
    """The output, or the choice, and the gradient that comes nearest to what it is allowed, or goes farthest beyond it."""
    if part == "selection":
        share, baseline = (_differing_fraction(blocks["choice"], expected["choice"]) for blocks in (results, plain_results))
        # Scores that are equal but for rounding may swap; the definition's own rounding shows how often.
        return ErrorCheck(
            "choice", share, 0.0 if dtype == torch.float64 else max(2 * baseline, MAX_DIFFERING_FRACTION)
        ), None
    if results.keys() != expected.keys():
        raise RuntimeError(f"{part}: gradients of {', '.join(expected)} expected, and those of {', '.join(results)} came")
    judged = [_check_tensor(name, dtype, results[name], expected[name], plain_results[name]) for name in expected]
    return judged[0], max(judged[1:], key=lambda one: one.fraction_of_allowed)


def _check_tensor(name: str, dtype: torch.dtype, result: Tensor, expected: Tensor, plain_result: Tensor) -> ErrorCheck:
    output = name == "output"
    if dtype == torch.float64 or (dtype == torch.float32 and output):
        return ErrorCheck(name, float((result.double() - expected).abs().max()) if result.numel() else 0.0, LIMITS[dtype])
    error, allowed = compute_error_and_limit(result, expected, plain_result, OUTPUT_FACTOR if output else GRADIENT_FACTOR)
    return ErrorCheck(name, error, max(allowed, MIN_ALLOWED_FLOAT32) if dtype == torch.float32 else allowed)


def _differing_fraction(blocks: Tensor, expected: Tensor) -> float:
    """Share of queries and groups whose chosen sets differ; both are ascending, so equal sets are equal rows."""
    return float((blocks != expected).any(-1).double().mean())


def _format_errors(judged: ErrorCheck) -> str:
    return f"{judged.error:>8.1e} {judged.allowed:>8.1e}"


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
