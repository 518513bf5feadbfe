"""The branches as they will run, against the definition in float64, on the run's own heads, widths and geometry.

A kernel may err at most twice (forward) or three times (backward) of what the same mathematics in plain low precision errs.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from nsa_lab.attention import choose_blocks, compressed_attention, reference, selected_attention, window_attention
from nsa_lab.config import NSAConfig
from nsa_lab.train.parts import Parts

Function = Callable[..., Tensor]

FORWARD, BACKWARD = 2.0, 3.0
# Longest sequence compared: the definition forms whole score matrices.
LENGTH_GPU, LENGTH_CPU = 2048, 256
# Below this, relative to the largest value, a difference is rounding in another order and not an error.
FLOOR = {torch.float32: 2e-5, torch.bfloat16: 4e-3}
DIFFERING_BLOCKS = 0.01


def worst_ratio(parts: Parts) -> tuple[float, str]:
    """The largest error in units of what is allowed, and where it is. At most 1 is parity."""
    model, nsa = parts.config.model, parts.config.nsa
    dtype = torch.bfloat16 if parts.bf16 else torch.float32
    length = min(parts.config.train.longest.seq_len, LENGTH_GPU if parts.device.type == "cuda" else LENGTH_CPU)
    generator = torch.Generator().manual_seed(0)

    def draw(heads: int, width: int) -> Tensor:
        return torch.randn(1, length, heads, width, generator=generator).to(parts.device, dtype)

    q, k, v = draw(model.n_heads, model.d_k), draw(model.n_kv_groups, model.d_k), draw(model.n_kv_groups, model.d_v)
    k_cmp, v_cmp = (_means(x, nsa) for x in (k, v))
    name = {part: choice.backend for part, choice in parts.model.backends.items()}
    chooser, asking, asked = model.choice_nsa, q, k_cmp
    if model.indexed:
        asking, asked = (draw(model.n_kv_groups, model.index_width) for _ in "qk")
        asked = _means(asked, chooser)
    expected = reference.select_blocks(asking, asked, None, chooser)
    found = choose_blocks(asking, asked, chooser, backend=name["selection"])
    differing = (found != expected).any(-1).float().mean().item()
    cases: dict[str, tuple[Function, Function, tuple[Tensor, ...]]] = {
        "compressed": (
            lambda *x: compressed_attention(*x, nsa=nsa, backend=name["compressed"])[0],
            lambda *x: reference.compressed_attention(*x, nsa=nsa)[0],
            (q, k_cmp, v_cmp),
        ),
        "selected": (
            lambda *x: selected_attention(*x, blocks=expected, nsa=nsa, backend=name["selected"])[0],
            lambda *x: reference.selected_attention(*x, blocks=expected, nsa=nsa)[0],
            (q, k, v),
        ),
        "window": (
            lambda *x: window_attention(*x, nsa=nsa, backend=name["window"])[0],
            lambda *x: reference.window_attention(*x, nsa=nsa)[0],
            (q, k, v),
        ),
    }
    if k_cmp.shape[1] == 0:
        # No block fits: there is nothing to compare, and the branch is zero by definition.
        del cases["compressed"]
    if "triton" in name.values():
        # Optional; one after another, they would take the longest part of this check.
        from nsa_lab.attention.kernels.ahead import together

        together(lambda: [_values(fast, inputs) for fast, _, inputs in cases.values()])
    ratios = [(differing / DIFFERING_BLOCKS, f"selection, {differing:.2%} of the queries differ")]
    for branch, (fast, definition, inputs) in cases.items():
        ratios += [(ratio, f"{branch}, {what}") for what, ratio in _compare(fast, definition, inputs).items()]
    return max(ratios)


def _means(x: Tensor, nsa: NSAConfig) -> Tensor:
    """Compressed keys or values. What is compared takes them as they come, so a mean serves whatever the run's phi is."""
    return reference.compress(x, nsa.model_copy(update={"phi": "avg"}))


def _compare(fast: Function, definition: Function, inputs: tuple[Tensor, ...]) -> dict[str, float]:
    truth = _values(definition, tuple(x.double() for x in inputs))
    plain, ours = _values(definition, inputs), _values(fast, inputs)
    names = ("output", "gradient of q", "gradient of k", "gradient of v")
    found = {}
    for name, exact, low, value in zip(names, truth, plain, ours, strict=True):
        factor = FORWARD if name == "output" else BACKWARD
        # A query with one key has no gradient: what it may err is then told on the scale of the inputs, which is 1.
        size = float(exact.abs().max()) or 1.0
        allowed = factor * (low - exact).abs().max() + FLOOR[inputs[0].dtype] * size
        ratio = float((value - exact).abs().max() / allowed)
        # NaN compares as neither larger nor smaller, and is the worst error of all.
        found[name] = math.inf if math.isnan(ratio) else ratio
    return found


def _values(function: Function, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """Output and gradients, in float64, for a fixed gradient of the output."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    output = function(*leaves)
    slope = torch.linspace(-1, 1, output.numel(), device=output.device, dtype=torch.float64).view_as(output)
    gradients = torch.autograd.grad(output, leaves, slope.to(output.dtype))
    return [output.detach().double(), *(gradient.double() for gradient in gradients)]
