"""Parity check of a part against the definition, run before its speed is measured.

Two checks. On at most 1,024 tokens, output and every gradient are compared with the definition in float64. Their errors may
be 2 (output) and 3 (gradient) times the error of the same mathematics in plain low precision. At the timed length, the last
rows of the output (up to 512) are compared with float64. Their error may be 2 times that of plain low precision, on these
rows or on the shorter sequence, whichever is larger. Fewer rows would be an unfair comparison: matrix products of 16 rows
are summed in another order, which may halve their error (H200, float32: 2.3e-7 for 16 rows alone, 4.7e-7 for the same rows
among all others). Gate, whole and selection loss are compared on the shorter sequence only. A block selection passes if it
equals the definition's, except for scores that differ by less than rounding.

Notebook 03 uses the same error rule, `compute_plain` and `compute_error_and_limit`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nsa_lab.attention import geometry, reference
from nsa_lab.attention.selection_loss import MIN_IMPORTANCE, sample_rows
from nsa_lab.bench.attention_parts import Part, arrange_whole_inputs, list_whole_inputs, prepare_index_keys
from nsa_lab.config import ModelConfig, NSAConfig

# Limit of the error of an output and of a gradient, as a multiple of the error of plain low precision.
OUTPUT_FACTOR, GRADIENT_FACTOR = 2, 3

# Number of last rows of a long output that are checked; fewer if their float64 scores would exceed 1 GB.
_MAX_ROWS, _MAX_SCORES = 512, 2**27
# Block selections are compared per row, so a few rows suffice.
_SELECTION_ROWS = 16
_SCORE_ROUNDING = 2e-5


def check_parity(short: Part, long: Part, nsa: NSAConfig) -> tuple[dict[str, list[float]], bool]:
    """Return {tensor: [error, limit]}, and whether every error is within its limit (NaN is not)."""
    if short.name == "choice":
        errors = {
            "blocks": [_compute_selection_error(short), _SCORE_ROUNDING],
            "long blocks": [_compute_selection_error(long), _SCORE_ROUNDING],
        }
    else:
        errors = _compare_with_float64(short, nsa)
        if long.name not in ("gate", "whole", "selection loss"):
            error, allowed = _compare_last_rows(long, nsa)
            errors["long out"] = [error, max(allowed, errors["out"][1])]
    return errors, all(error <= limit for error, limit in errors.values())


def compute_plain(name: str, inputs: Sequence[Tensor], blocks: Tensor | None, nsa: NSAConfig) -> Tensor:
    """Compute the part called `name` throughout in the dtype of `inputs`, for a given block selection.

    `inputs`: q, k, v for a branch; the outputs of the branches and the gates for `gate`; the arguments of `nsa_attention`
    for `whole`.
    """
    return _compute_plain_whole(inputs, blocks, nsa) if name == "whole" else _compute_plain_part(name, inputs, blocks, nsa)


def _compute_plain_whole(inputs: Sequence[Tensor | None], blocks: Tensor | None, nsa: NSAConfig) -> Tensor:
    q, *kv, gates = inputs
    assert q is not None, "the queries are an input of every model"
    outs: list[Tensor] = []
    for name, k, v in zip(("compressed", "selected", "window"), kv[::2], kv[1::2], strict=True):
        if k is not None and v is not None:
            outs.append(_compute_plain_part(name, (q, k, v), blocks, nsa))
    return outs[0] if gates is None else reference.combine(*outs, gates)


def _compute_plain_part(name: str, inputs: Sequence[Tensor], blocks: Tensor | None, nsa: NSAConfig) -> Tensor:
    if name == "gate":
        return reference.combine(*inputs)
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
    float64_inputs = [x.detach().double().requires_grad_(x.requires_grad) for x in inputs]
    rough_inputs = [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs]
    out = part.run(*part.inputs)
    exact, rough = (_compute_plain_of(part, x, nsa) for x in (float64_inputs, rough_inputs))
    d_out = torch.randn(out.shape, device=out.device, dtype=out.dtype, generator=torch.Generator(out.device).manual_seed(7))
    grads, exact_grads, rough_grads = (
        torch.autograd.grad(result, [x for x in leaves if x.requires_grad], d_out.to(result.dtype))
        for result, leaves in ((out, part.inputs), (exact, float64_inputs), (rough, rough_inputs))
    )
    names = _name_gradients(part)
    errors = {"out": compute_error_and_limit(out, exact, rough, OUTPUT_FACTOR)}
    for name, grad, exact_grad, rough_grad in zip(names, grads, exact_grads, rough_grads, strict=True):
        errors[f"d{name}"] = compute_error_and_limit(grad, exact_grad, rough_grad, GRADIENT_FACTOR)
    return errors


def _name_gradients(part: Part) -> Sequence[str]:
    if part.name == "whole":
        return list_whole_inputs(part.model)
    if part.name == "gate":
        return [*(f"out_{branch}" for branch in part.model.branches), "gates"]
    return ("q", "k", "v")[: sum(x.requires_grad for x in part.inputs)]


def _compute_plain_of(part: Part, inputs: Sequence[Tensor], nsa: NSAConfig) -> Tensor:
    """Compute a part throughout in the dtype of `inputs`, in the order of the part."""
    if part.name == "selection loss":
        return _compute_plain_selection_loss(part.model, *inputs)
    if part.name == "whole":
        return _compute_plain_whole(arrange_whole_inputs(part.model, inputs), part.blocks, nsa)
    return _compute_plain_part(part.name, inputs, part.blocks, nsa)


def _compute_plain_selection_loss(model: ModelConfig, q: Tensor, k: Tensor, k_sel: Tensor, attention_q: Tensor) -> Tensor:
    """Compute the definition of `nsa_lab.attention.selection_loss` for one document."""
    nsa, T = model.selection_nsa, q.shape[1]
    k = prepare_index_keys(k, model, k_sel.shape[2])
    t = sample_rows(T, model.selection_queries, q.device)
    n_blocks = geometry.num_selection(T, nsa)
    with torch.no_grad():
        is_past = geometry.positions(0, T, q.device) <= t[:, None]
        mass = _compute_probabilities(attention_q[:, t], k_sel, is_past).mean(3)
        mass = torch.nn.functional.pad(mass, (0, n_blocks * nsa.l_sel - T)).unflatten(-1, (n_blocks, -1)).sum(-1)
    probabilities = _compute_probabilities(q[:, t], k, geometry.sees_compressed(t, k.shape[1], nsa))
    importance = _reduce_to_importance(probabilities, n_blocks, nsa)
    if nsa.head_reduction == "sum":
        importance = importance / probabilities.shape[3]
    importance = importance + MIN_IMPORTANCE
    is_free = geometry.candidate_blocks(t, n_blocks, nsa) & ~geometry.forced_blocks(t, n_blocks, nsa)
    is_free = is_free[:, None]
    log_share = importance.log() - (importance * is_free).sum(-1, keepdim=True).clamp_min(MIN_IMPORTANCE).log()
    return -(mass * is_free * log_share).sum(-1).mean()


def _compute_probabilities(q: Tensor, k: Tensor, is_visible: Tensor, lse: Tensor | None = None) -> Tensor:
    """Return the attention of q [B, R, H, D] over the visible keys, bool [R, N], of k [B, N, G, D]: [B, R, G, h, N].

    `lse`: the LSE of the scores, [B, R, H]; None: compute it.
    """
    scores = torch.einsum("brghd,bsgd->brghs", q.unflatten(2, (k.shape[2], -1)), k) * q.shape[-1] ** -0.5
    is_visible = is_visible[:, None, None]
    if lse is not None:
        lse = lse.nan_to_num(neginf=0.0).unflatten(2, (k.shape[2], -1)).unsqueeze(-1)
        return torch.where(is_visible, (scores - lse).exp(), 0.0)
    sees_nothing = ~is_visible.any(-1, keepdim=True)
    return scores.masked_fill(~(is_visible | sees_nothing), float("-inf")).softmax(-1) * is_visible


def _reduce_to_importance(p: Tensor, n_blocks: int, nsa: NSAConfig) -> Tensor:
    """Reduce the probabilities [B, R, G, h, N] of index keys to the importance of the blocks, [B, R, G, n_blocks]."""
    overlap = geometry.overlap(p.shape[-1], n_blocks, nsa, dtype=p.dtype, device=p.device)
    p = p.sum(3) if nsa.head_reduction == "sum" else p.amax(3)
    if nsa.block_reduction == "sum" or not p.shape[-1]:
        return p @ overlap
    # Row by row: the weights of all rows would not fit into memory at the timed length.
    return torch.stack([torch.where(overlap > 0, row.unsqueeze(-1), 0.0).amax(-2) for row in p.unbind(1)], 1)


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


def _compute_selection_error(part: Part) -> float:
    """Return the largest relative score by which a rejected block exceeds a selected one, over the last rows.

    Infinity for a set of the wrong size.
    """
    nsa = part.model.selection_nsa
    blocks = part.run(*part.inputs)[-1:, -_SELECTION_ROWS:]
    q, k, *given_lse = part.inputs
    T, n_rows = q.shape[1], blocks.shape[1]
    k = prepare_index_keys(k[-1:], part.model, blocks.shape[2]).double()
    t = torch.arange(T - n_rows, T, device=q.device)
    q, *lse = (x[-1:, -n_rows:].double() for x in (q, *given_lse))
    p = _compute_probabilities(q, k, geometry.sees_compressed(t, k.shape[1], nsa), *lse)
    importance = _reduce_to_importance(p, geometry.num_selection(T, nsa), nsa)
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
