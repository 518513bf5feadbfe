"""Does a part compute the definition? Asked before its speed.

Two checks. On at most 1024 tokens, output and every gradient against the definition in float64: within 2 and 3 times
what the same mathematics errs in plain low precision. At the length that is timed, the output's last rows against
float64, up to 512 of them, within 2 times what plain low precision errs on them or on the shorter sequence. Fewer are
no fair measure: products of 16 rows are summed in another order, which may err half as much (on an H200, float32:
2.3e-7 of 16 rows, 4.7e-7 of the same rows among all others). A choice of blocks passes where it is the definition's, up
to scores that differ by less than rounding.

The rule of error itself, `plain` and `error_and_allowed`, is what notebook 02 judges by too.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nsa_lab.attention import geometry, reference
from nsa_lab.bench.attention_parts import Part
from nsa_lab.config import NSAConfig

# How many times the error of plain low precision an output and a gradient may have.
OUTPUT_FACTOR, GRADIENT_FACTOR = 2, 3

# Of a long output the last rows are judged: at most so many, and so many that their scores in float64 take 1 GB or less.
_MAX_ROWS, _MAX_SCORES = 512, 2**27
# A choice is judged row by row, so that a few tell enough.
_SELECTION_ROWS = 16
_SCORE_ROUNDING = 2e-5
_INPUTS = {
    "gate": ("out_cmp", "out_sel", "out_win", "gates"),
    "whole": ("q", "k_cmp", "v_cmp", "k_sel", "v_sel", "k_win", "v_win", "gates"),
}


def check_parity(short: Part, long: Part, nsa: NSAConfig) -> tuple[dict[str, list[float]], bool]:
    """{what: [error, limit]} and whether every error is within its limit (NaN is not)."""
    if short.name == "choice":
        found = {
            "blocks": [_compute_selection_error(short.inputs, nsa), _SCORE_ROUNDING],
            "long blocks": [_compute_selection_error(long.inputs, nsa, long.run), _SCORE_ROUNDING],
        }
    else:
        found = _compare_with_float64(short, nsa)
        if long.name not in ("gate", "whole"):
            error, allowed = _compare_last_rows(long, nsa)
            found["long out"] = [error, max(allowed, found["out"][1])]
    return found, all(error <= limit for error, limit in found.values())


def compute_plain(name: str, inputs: Sequence[Tensor], blocks: Tensor | None, nsa: NSAConfig) -> Tensor:
    """The mathematics of the part called `name` in the dtype of `inputs` throughout, the choice of blocks given.

    `inputs` are q, k, v for a branch, the three outputs and the gates for `gate`, what `nsa_attention` takes for `whole`.
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
    """The relative error of `actual`, and `factor` times that of `rough`, which counts for no less than one rounding."""
    return [
        compute_relative_error(actual, exact),
        factor * max(compute_relative_error(rough, exact), torch.finfo(actual.dtype).eps),
    ]


def compute_relative_error(actual: Tensor, exact: Tensor) -> float:
    """||actual - exact|| / ||exact||, NaN where anything is; the root mean square error where `exact` is all zero."""
    size = exact.double().norm().item() or max(exact.numel(), 1) ** 0.5
    return (actual.double() - exact.double()).norm().item() / size


def _compare_with_float64(part: Part, nsa: NSAConfig) -> dict[str, list[float]]:
    inputs = part.inputs[:-1] if part.name.startswith("selected") else part.inputs
    wide = [x.detach().double().requires_grad_() for x in inputs]
    low = [x.detach().clone().requires_grad_() for x in inputs]
    out, exact, rough = part.run(*part.inputs), *(compute_plain(part.name, x, part.blocks, nsa) for x in (wide, low))
    d_out = torch.randn(out.shape, device=out.device, dtype=out.dtype, generator=torch.Generator(out.device).manual_seed(7))
    leaves = [x for x in part.inputs if x.requires_grad]
    grads = torch.autograd.grad(out, leaves, d_out)
    wide_grads = torch.autograd.grad(exact, wide, d_out.double())
    low_grads = torch.autograd.grad(rough, low, d_out.to(rough.dtype))
    names = _INPUTS.get(part.name, ("q", "k", "v"))
    found = {"out": compute_error_and_limit(out, exact, rough, OUTPUT_FACTOR)}
    for name, ours, theirs, low_grad in zip(names, grads, wide_grads, low_grads, strict=True):
        found[f"d{name}"] = compute_error_and_limit(ours, theirs, low_grad, GRADIENT_FACTOR)
    return found


def _make_mask(name: str, q: Tensor, k: Tensor, blocks: Tensor | None, nsa: NSAConfig, first: int = 0) -> Tensor:
    """Bool [B or 1, T, G or 1, S]: which keys the queries first .. first+T-1 see."""
    t = torch.arange(first, first + q.shape[1], device=q.device)[:, None]
    i = torch.arange(k.shape[1], device=q.device)
    if name == "compressed":
        return (i * nsa.d + nsa.l - 1 <= t)[None, :, None]
    if name == "window":
        return ((i <= t) & (i > t - nsa.w))[None, :, None]
    if blocks is None:
        raise ValueError(
            f"{name}: the selected branch is judged for a choice; give blocks int32 [B, T, G, n_sel], not None"
        )
    n = geometry.num_selection(k.shape[1], nsa)
    chosen = torch.zeros(*blocks.shape[:3], n + 1, dtype=torch.bool, device=q.device)
    chosen.scatter_(-1, torch.where(blocks < 0, n, blocks).long(), True)
    return chosen[..., i // nsa.l_sel] & (i <= t)[None, :, None]


def _attend_masked(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    h = q.shape[2] // k.shape[2]
    seen = seen.repeat_interleave(h, 2) if seen.shape[2] > 1 else seen
    scores = torch.einsum("bthd,bshd->bths", q, k.repeat_interleave(h, 2)) * q.shape[-1] ** -0.5
    empty = ~seen.any(-1, keepdim=True)
    p = scores.masked_fill(~(seen | empty), float("-inf")).softmax(-1).masked_fill(empty, 0.0)
    return torch.einsum("bths,bshd->bthd", p, v.repeat_interleave(h, 2))


def _compare_last_rows(part: Part, nsa: NSAConfig) -> list[float]:
    with torch.no_grad():
        q, k, v = (x[-1:].detach() for x in part.inputs[:3])
        scores_per_row = max(q.shape[2] * k.shape[1], 1)  # none where no block is full
        rows = min(q.shape[1], max(min(_MAX_ROWS, _MAX_SCORES // scores_per_row), 16))
        out = part.run(*part.inputs)[-1:, -rows:]
        blocks = None if part.blocks is None else part.blocks[-1:, -rows:]
        seen = _make_mask(part.name, q[:, -rows:], k, blocks, nsa, q.shape[1] - rows)
        q = q[:, -rows:]
        rough = _attend_masked(q, k, v, seen)
        exact = _attend_masked(q.double(), k.double(), v.double(), seen)
    return compute_error_and_limit(out, exact, rough, OUTPUT_FACTOR)


def _compute_selection_error(inputs: list[Tensor], nsa: NSAConfig, run=None) -> float:
    """Largest relative score by which a block left out beats one taken in, over the last rows; inf for a malformed set."""
    from nsa_lab.attention import select_blocks

    q, k, lse = (x.detach() for x in inputs)
    T = q.shape[1]
    blocks = (run(q, k, lse) if run else select_blocks(q, k, lse, nsa))[-1:, -_SELECTION_ROWS:]
    rows = min(_SELECTION_ROWS, T)
    q, k, lse = q[-1:, -rows:].double(), k[-1:].double(), lse[-1:, -rows:].double()
    h = q.shape[2] // k.shape[2]
    t = torch.arange(T - rows, T, device=q.device)
    seen = torch.arange(k.shape[1], device=q.device) < geometry.visible_compressed(t, nsa).unsqueeze(-1)
    scores = torch.einsum("bthd,bshd->bths", q, k.repeat_interleave(h, 2)) * q.shape[-1] ** -0.5
    p = torch.where(seen[None, :, None], (scores - lse.nan_to_num(neginf=0.0).unsqueeze(-1)).exp(), 0.0)
    carry = geometry.overlap(k.shape[1], geometry.num_selection(T, nsa), nsa, dtype=torch.float64, device=q.device)
    importance = p.unflatten(2, (k.shape[2], h)).sum(3) @ carry
    expected = reference.select_by_importance(importance, nsa, T - rows)
    worst = 0.0
    for b, row, g in (blocks != expected).any(-1).nonzero().tolist():
        ours, theirs = set(blocks[b, row, g].tolist()), set(expected[b, row, g].tolist())
        if len(ours) != len(theirs):
            return float("inf")
        score = importance[b, row, g]
        out, into = max(score[j].item() for j in theirs - ours), min(score[j].item() for j in ours - theirs)
        worst = max(worst, (out - into) / out)
    return worst
