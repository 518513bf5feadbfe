"""Parity check of a part against the definition, run before its speed is measured.

Two checks. On at most 1,024 tokens, output and every gradient are compared with the definition in float64. Their errors may
be 2 (output) and 3 (gradient) times the error of the same mathematics in plain low precision. At the timed length, the last
rows of the output (up to 512) are compared with float64. Their error may be 2 times that of plain low precision, on these
rows or on the shorter sequence, whichever is larger. Fewer rows would be an unfair comparison: matrix products of 16 rows
are summed in another order, which may halve their error (H200, float32: 2.3e-7 for 16 rows alone, 4.7e-7 for the same rows
among all others). A block selection passes if it equals the definition's, except for scores that differ by less than
rounding.

Notebook 03 uses the same error rule, `compute_plain` and `compute_error_and_limit`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nsa_lab.attention import geometry, reference
from nsa_lab.bench.attention_parts import Part
from nsa_lab.config import NSAConfig

# Limit of the error of an output and of a gradient, as a multiple of the error of plain low precision.
OUTPUT_FACTOR, GRADIENT_FACTOR = 2, 3

# Number of last rows of a long output that are checked; fewer if their float64 scores would exceed 1 GB.
_MAX_ROWS, _MAX_SCORES = 512, 2**27
# Block selections are compared per row, so a few rows suffice.
_SELECTION_ROWS = 16
_SCORE_ROUNDING = 2e-5
_INPUTS = {
    "gate": ("out_cmp", "out_sel", "out_win", "gates"),
    "whole": ("q", "k_cmp", "v_cmp", "k_sel", "v_sel", "k_win", "v_win", "gates"),
}


def check_parity(short: Part, long: Part, nsa: NSAConfig) -> tuple[dict[str, list[float]], bool]:
    """Return {tensor: [error, limit]}, and whether every error is within its limit (NaN is not)."""
    if short.name == "choice":
        errors = {
            "blocks": [_compute_selection_error(short.inputs, nsa), _SCORE_ROUNDING],
            "long blocks": [_compute_selection_error(long.inputs, nsa, long.run), _SCORE_ROUNDING],
        }
    else:
        errors = _compare_with_float64(short, nsa)
        if long.name not in ("gate", "whole"):
            error, allowed = _compare_last_rows(long, nsa)
            errors["long out"] = [error, max(allowed, errors["out"][1])]
    return errors, all(error <= limit for error, limit in errors.values())


def compute_plain(name: str, inputs: Sequence[Tensor], blocks: Tensor | None, nsa: NSAConfig) -> Tensor:
    """Compute the part called `name` throughout in the dtype of `inputs`, for a given block selection.

    `inputs`: q, k, v for a branch; the three outputs and the gates for `gate`; the arguments of `nsa_attention` for
    `whole`.
    """
    if name == "gate":
        return reference.combine(*inputs)
    if name == "whole":
        q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates = inputs
        outs = (
            _attend_masked(q, k_cmp, v_cmp, _make_mask("compressed", q, k_cmp, None, nsa)),
            _attend_masked(q, k_sel, v_sel, _make_mask("selected", q, k_sel, blocks, nsa)),
            _attend_masked(q, k_win, v_win, _make_mask("window", q, k_win, None, nsa)),
        )
        return reference.combine(*outs, gates)
    q, k, v = inputs
    return _attend_masked(q, k, v, _make_mask(name, q, k, blocks, nsa))


def compute_error_and_limit(actual: Tensor, exact: Tensor, rough: Tensor, factor: float) -> list[float]:
    """Return the relative error of `actual`, and its limit: `factor` times that of `rough` or one rounding."""
    return [
        compute_relative_error(actual, exact),
        factor * max(compute_relative_error(rough, exact), torch.finfo(actual.dtype).eps),
    ]


def compute_relative_error(actual: Tensor, exact: Tensor) -> float:
    """Return ||actual - exact|| / ||exact||; NaN if any value is NaN; the root mean square error if `exact` is zero."""
    size = exact.double().norm().item() or max(exact.numel(), 1) ** 0.5
    return (actual.double() - exact.double()).norm().item() / size


def _compare_with_float64(part: Part, nsa: NSAConfig) -> dict[str, list[float]]:
    inputs = part.inputs[:-1] if part.name.startswith("selected") else part.inputs
    float64_inputs = [x.detach().double().requires_grad_() for x in inputs]
    rough_inputs = [x.detach().clone().requires_grad_() for x in inputs]
    out = part.run(*part.inputs)
    exact, rough = (compute_plain(part.name, x, part.blocks, nsa) for x in (float64_inputs, rough_inputs))
    d_out = torch.randn(out.shape, device=out.device, dtype=out.dtype, generator=torch.Generator(out.device).manual_seed(7))
    leaves = [x for x in part.inputs if x.requires_grad]
    grads = torch.autograd.grad(out, leaves, d_out)
    exact_grads = torch.autograd.grad(exact, float64_inputs, d_out.double())
    rough_grads = torch.autograd.grad(rough, rough_inputs, d_out.to(rough.dtype))
    names = _INPUTS.get(part.name, ("q", "k", "v"))
    errors = {"out": compute_error_and_limit(out, exact, rough, OUTPUT_FACTOR)}
    for name, grad, exact_grad, rough_grad in zip(names, grads, exact_grads, rough_grads, strict=True):
        errors[f"d{name}"] = compute_error_and_limit(grad, exact_grad, rough_grad, GRADIENT_FACTOR)
    return errors


def _make_mask(name: str, q: Tensor, k: Tensor, blocks: Tensor | None, nsa: NSAConfig, first: int = 0) -> Tensor:
    """Return which keys the queries first .. first+T-1 see, bool [B or 1, T, G or 1, S]."""
    t = torch.arange(first, first + q.shape[1], device=q.device)[:, None]
    i = torch.arange(k.shape[1], device=q.device)
    if name == "compressed":
        return (i * nsa.d + nsa.l - 1 <= t)[None, :, None]
    if name == "window":
        return ((i <= t) & (i > t - nsa.w))[None, :, None]
    if blocks is None:
        raise ValueError(
            f"{name}: the selected branch needs a block selection; expected blocks int32 [B, T, G, n_sel], got None"
        )
    n = geometry.num_selection(k.shape[1], nsa)
    is_selected = torch.zeros(*blocks.shape[:3], n + 1, dtype=torch.bool, device=q.device)
    is_selected.scatter_(-1, torch.where(blocks < 0, n, blocks).long(), True)
    return is_selected[..., i // nsa.l_sel] & (i <= t)[None, :, None]


def _attend_masked(q: Tensor, k: Tensor, v: Tensor, is_visible: Tensor) -> Tensor:
    h = q.shape[2] // k.shape[2]
    is_visible = is_visible.repeat_interleave(h, 2) if is_visible.shape[2] > 1 else is_visible
    scores = torch.einsum("bthd,bshd->bths", q, k.repeat_interleave(h, 2)) * q.shape[-1] ** -0.5
    sees_nothing = ~is_visible.any(-1, keepdim=True)
    p = scores.masked_fill(~(is_visible | sees_nothing), float("-inf")).softmax(-1).masked_fill(sees_nothing, 0.0)
    return torch.einsum("bths,bshd->bthd", p, v.repeat_interleave(h, 2))


def _compare_last_rows(part: Part, nsa: NSAConfig) -> list[float]:
    with torch.no_grad():
        q, k, v = (x[-1:].detach() for x in part.inputs[:3])
        scores_per_row = max(q.shape[2] * k.shape[1], 1)  # there are no keys if no block is full
        n_rows = min(q.shape[1], max(min(_MAX_ROWS, _MAX_SCORES // scores_per_row), 16))
        out = part.run(*part.inputs)[-1:, -n_rows:]
        blocks = None if part.blocks is None else part.blocks[-1:, -n_rows:]
        is_visible = _make_mask(part.name, q[:, -n_rows:], k, blocks, nsa, q.shape[1] - n_rows)
        q = q[:, -n_rows:]
        rough = _attend_masked(q, k, v, is_visible)
        exact = _attend_masked(q.double(), k.double(), v.double(), is_visible)
    return compute_error_and_limit(out, exact, rough, OUTPUT_FACTOR)


def _compute_selection_error(inputs: list[Tensor], nsa: NSAConfig, run=None) -> float:
    """Return the largest relative score by which a rejected block exceeds a selected one, over the last rows.

    Infinity for a set of the wrong size.
    """
    from nsa_lab.attention import select_blocks

    q, k, lse = (x.detach() for x in inputs)
    T = q.shape[1]
    blocks = (run(q, k, lse) if run else select_blocks(q, k, lse, nsa))[-1:, -_SELECTION_ROWS:]
    n_rows = min(_SELECTION_ROWS, T)
    q, k, lse = q[-1:, -n_rows:].double(), k[-1:].double(), lse[-1:, -n_rows:].double()
    h = q.shape[2] // k.shape[2]
    t = torch.arange(T - n_rows, T, device=q.device)
    is_visible = torch.arange(k.shape[1], device=q.device) < geometry.visible_compressed(t, nsa).unsqueeze(-1)
    scores = torch.einsum("bthd,bshd->bths", q, k.repeat_interleave(h, 2)) * q.shape[-1] ** -0.5
    p = torch.where(is_visible[None, :, None], (scores - lse.nan_to_num(neginf=0.0).unsqueeze(-1)).exp(), 0.0)
    overlap = geometry.overlap(k.shape[1], geometry.num_selection(T, nsa), nsa, dtype=torch.float64, device=q.device)
    importance = p.unflatten(2, (k.shape[2], h)).sum(3) @ overlap
    expected = reference.select_by_importance(importance, nsa, T - n_rows)
    worst = 0.0
    for b, row, g in (blocks != expected).any(-1).nonzero().tolist():
        selected, expected_blocks = set(blocks[b, row, g].tolist()), set(expected[b, row, g].tolist())
        if len(selected) != len(expected_blocks):
            return float("inf")
        score = importance[b, row, g]
        best_rejected = max(score[j].item() for j in expected_blocks - selected)
        worst_selected = min(score[j].item() for j in selected - expected_blocks)
        worst = max(worst, (best_rejected - worst_selected) / best_rejected)
    return worst
