"""Compare every backend with the float64 definition: errors of outputs and gradients, part by part.

Each comparison runs a backend and `reference` on the same numbers, widened to float64 for `reference`. The allowed errors
are:

* Half precision: 2 times (output) and 3 times (gradients) the error of the same mathematics written plainly in that
  dtype, as relative norms, and at least one rounding error. The benchmark and the kernel tests use the same rule.
* float32: 1e-5 for outputs, as the largest difference. Gradients as in half precision, but at least
  `MIN_ALLOWED_FLOAT32`.
* float64: 1e-10 for outputs and gradients, as the largest difference.
* Selected blocks, compared as sets: no difference in float64; in other dtypes about as many as the definition has in that
  dtype.
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
from nsa_lab.config import ConfigError, NSAConfig
from nsa_lab.workbook.examples import make_random_example

# Largest allowed difference of an output from float64. Outputs are of size about 1.
LIMITS = {torch.float64: 1e-10, torch.float32: 1e-5}
# Relative error that is always allowed for a float32 gradient. The gradient of a query with one key is exactly 0, which a
# plain softmax computes exactly. A kernel that does not store the probabilities subtracts two equal sums, and their
# rounding error remains: up to 1e-6 at T = 1 and head_dim 64, while three rounding errors of 1 are 3.6e-7.
MIN_ALLOWED_FLOAT32 = 5e-6
MAX_DIFFERING_FRACTION = 1e-3  # of the queries, whose scores are equal up to rounding
BACKENDS = ("torch", "triton", "flash")
PARTS = ("compressed", "selection", "selected", "window", "whole")
INPUT_NAMES = ("q", "k_cmp", "v_cmp", "k", "v", "gates")


@dataclass(frozen=True)
class ParityCase:
    """One test case: q [1, T, H, D], compressed keys and values, gates, the output gradient, and the blocks to read."""

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
    """An error and its limit in the same measure. `quantity` names the tensor."""

    quantity: str
    error: float
    allowed: float

    @property
    def fraction_of_allowed(self) -> float:
        """Return the error divided by its limit. At most 1 is ok; NaN counts as infinite."""
        if self.error == 0:
            return 0.0
        fraction = self.error / self.allowed if self.allowed else math.inf
        return math.inf if math.isnan(fraction) else fraction

    @property
    def ok(self) -> bool:
        return self.fraction_of_allowed <= 1


@dataclass(frozen=True)
class Comparison:
    """Results of one backend, part, length and dtype: its output (for `selection`, the blocks) and its worst gradient."""

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
    """Return the backends that can run here, and for the others the reason and the remedy."""
    names, reasons = [], {}
    for backend in BACKENDS:
        try:
            resolve_backend(device, dtype, nsa, backend=backend)
            names.append(backend)
        except (BackendError, NotImplementedError) as error:
            reasons[backend] = str(error)
    return names, reasons


def describe_backends(device: str, dtypes: list[torch.dtype], nsa: NSAConfig) -> str:
    """Describe the device, the backends for each dtype, and once per reason why a backend cannot run."""
    lines = [f"device: {torch.cuda.get_device_name() if device == 'cuda' else device}"]
    dtypes_by_reason: dict[str, list[str]] = {}
    for dtype in dtypes:
        names, reasons = find_usable_backends(device, dtype, nsa)
        lines.append(f"{_dtype_name(dtype):<9} {', '.join(names)}")
        for reason in reasons.values():
            dtypes_by_reason.setdefault(reason, []).append(_dtype_name(dtype))
    lines += [f"not in {', '.join(names)}: {reason}" for reason, names in dtypes_by_reason.items()]
    return "\n".join(lines)


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
    """Yield a comparison for each part, usable backend, length and dtype. Raises `ConfigError` for uneven groups."""
    if heads < 1 or heads % groups:
        raise ConfigError(f"heads = {heads}: expected a positive multiple of the {groups} groups, for example {2 * groups}")
    for dtype in dtypes:
        backends, _ = find_usable_backends(device, dtype, nsa)
        for length in lengths:
            case = _make_case(length, nsa, dtype, device, heads, groups, head_dim)
            for part in PARTS:
                expected = _compute_part(part, "reference", _cast_case(case, torch.float64))
                plain_results = _compute_plain_baseline(part, case)
                for backend in backends:
                    if backend == "flash" and part != "window":
                        continue
                    output, gradient = _check_part(part, dtype, _compute_part(part, backend, case), expected, plain_results)
                    yield Comparison(part, backend, length, _dtype_name(dtype), output, gradient)


def format_table(rows: list[Comparison]) -> str:
    """Format the comparisons as aligned text, with `ok` or `TOO LARGE`."""
    lines = [
        f"{'part':<11} {'backend':<8} {'T':>6} {'dtype':<9} {'error':>8} {'limit':>8}  {'gradient':>8} {'limit':>8}  tensor"
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
    """Return the largest fraction of the allowed error over all lengths, as (part and quantity, backend, fraction)."""
    worst: dict[tuple[str, str], float] = {}
    for row in rows:
        if row.dtype == _dtype_name(dtype):
            for quantity, check in (("output" if row.gradient else "blocks", row.output), ("gradients", row.gradient)):
                if check is not None:
                    key = (f"{row.part}, {quantity}", row.backend)
                    worst[key] = max(worst.get(key, 0.0), check.fraction_of_allowed)
    return [(quantity, backend, fraction) for (quantity, backend), fraction in worst.items()]


def _make_case(
    length: int, nsa: NSAConfig, dtype: torch.dtype, device: str, heads: int, groups: int, head_dim: int
) -> ParityCase:
    """Return normal random numbers, rounded to `dtype` first, so that every implementation gets the same ones."""
    x = make_random_example(length, heads=heads, groups=groups, head_dim=head_dim, seed=length, dtype=dtype)
    generator = torch.Generator().manual_seed(length + 1)
    gates = torch.rand(1, length, heads, 3, generator=generator, dtype=torch.float64).to(dtype)
    q, k_cmp, v_cmp = x.q, reference.compress(x.k_cmp, nsa), reference.compress(x.v_cmp, nsa)
    _, lse = reference.compressed_attention(q.double(), k_cmp.double(), v_cmp.double(), nsa)
    # Every backend's selected branch gets the same blocks, selected in float64 from the rounded keys.
    blocks = reference.select_blocks(q.double(), k_cmp.double(), lse, nsa)
    lse = lse if dtype == torch.float64 else lse.float()
    d_out = torch.randn(q.shape, generator=generator, dtype=torch.float64).to(dtype)
    tensors = [part.to(device) for part in (q, k_cmp, v_cmp, x.k_sel, x.v_sel, gates, d_out, lse, blocks)]
    return ParityCase(*tensors, nsa=nsa)


def _cast_case(case: ParityCase, dtype: torch.dtype) -> ParityCase:
    parts = [part.to(dtype) for part in (*case.list_leaves(), case.d_out, case.lse)]
    return ParityCase(*parts, blocks=case.blocks, nsa=case.nsa)


def _compute_part(part: str, backend: str, case: ParityCase) -> dict[str, Tensor]:
    """Return the part's output and the gradients of all its inputs, by name. For `selection`, only the blocks."""
    n = case.nsa
    if part == "selection":
        return {"blocks": select_blocks(case.q, case.k_cmp, case.lse, n, backend=backend)}
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
    """Return the part in plain arithmetic of the case's dtype. For `selection`, the definition in that dtype."""
    if part == "selection":
        return _compute_part(part, "reference", case)
    q, k_cmp, v_cmp, k, v, gates = leaves = [leaf.detach().requires_grad_() for leaf in case.list_leaves()]
    inputs = {"compressed": (q, k_cmp, v_cmp), "whole": (q, k_cmp, v_cmp, k, v, k, v, gates)}.get(part, (q, k, v))
    return _add_gradients(compute_plain(part, inputs, case.blocks, case.nsa), leaves, case)


def _add_gradients(out: Tensor, leaves: list[Tensor], case: ParityCase) -> dict[str, Tensor]:
    grads = torch.autograd.grad(out, leaves, case.d_out, allow_unused=True)
    pairs = zip(INPUT_NAMES, grads, strict=True)
    return {"output": out.detach(), **{f"d{name}": grad for name, grad in pairs if grad is not None}}


def _check_part(
    part: str, dtype: torch.dtype, results: dict[str, Tensor], expected: dict[str, Tensor], plain_results: dict[str, Tensor]
) -> tuple[ErrorCheck, ErrorCheck | None]:
    """Return the check of the output or of the blocks, and of the gradient with the largest fraction of its limit."""
    if part == "selection":
        fraction, baseline = (
            _differing_fraction(blocks["blocks"], expected["blocks"]) for blocks in (results, plain_results)
        )
        # Scores that are equal up to rounding may swap. The definition in the same dtype shows how often.
        return ErrorCheck(
            "blocks", fraction, 0.0 if dtype == torch.float64 else max(2 * baseline, MAX_DIFFERING_FRACTION)
        ), None
    if results.keys() != expected.keys():
        raise RuntimeError(f"{part}: expected gradients of {', '.join(expected)}, got {', '.join(results)}")
    checks = [_check_tensor(name, dtype, results[name], expected[name], plain_results[name]) for name in expected]
    return checks[0], max(checks[1:], key=lambda check: check.fraction_of_allowed)


def _check_tensor(name: str, dtype: torch.dtype, result: Tensor, expected: Tensor, plain_result: Tensor) -> ErrorCheck:
    is_output = name == "output"
    if dtype == torch.float64 or (dtype == torch.float32 and is_output):
        return ErrorCheck(name, float((result.double() - expected).abs().max()) if result.numel() else 0.0, LIMITS[dtype])
    error, allowed = compute_error_and_limit(
        result, expected, plain_result, OUTPUT_FACTOR if is_output else GRADIENT_FACTOR
    )
    return ErrorCheck(name, error, max(allowed, MIN_ALLOWED_FLOAT32) if dtype == torch.float32 else allowed)


def _differing_fraction(blocks: Tensor, expected: Tensor) -> float:
    """Return the fraction of queries and groups whose sets differ. Both are ascending, so equal sets are equal rows."""
    return float((blocks != expected).any(-1).double().mean())


def _format_errors(check: ErrorCheck) -> str:
    return f"{check.error:>8.1e} {check.allowed:>8.1e}"


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
