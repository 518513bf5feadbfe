"""The branches as they will run, against the definition in float64, on the run's own heads, widths and geometry.

A kernel may err at most twice (forward) or three times (backward) of what the same mathematics in plain low precision errs.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from nsa_lab.attention import compressed_attention, reference, score_and_select_blocks, selected_attention, window_attention
from nsa_lab.config import NSAConfig
from nsa_lab.train.build import TrainContext

TensorFunction = Callable[..., Tensor]

FORWARD_LIMIT, BACKWARD_LIMIT = 2.0, 3.0
# Longest sequence compared: the definition forms whole score matrices.
MAX_LENGTH_GPU, MAX_LENGTH_CPU = 2048, 256
# Below this, relative to the largest value, a difference is rounding in another order and not an error.
ERROR_FLOOR = {torch.float32: 2e-5, torch.bfloat16: 4e-3}
MAX_DIFFERING_FRACTION = 0.01


def find_worst_error_ratio(context: TrainContext) -> tuple[float, str]:
    """The largest error in units of what is allowed, and where it is. At most 1 is parity."""
    model, nsa = context.config.model, context.config.nsa
    dtype = torch.bfloat16 if context.use_bf16 else torch.float32
    length = min(
        context.config.train.longest_stage.seq_len, MAX_LENGTH_GPU if context.device.type == "cuda" else MAX_LENGTH_CPU
    )
    generator = torch.Generator().manual_seed(0)

    def draw(heads: int, width: int) -> Tensor:
        return torch.randn(1, length, heads, width, generator=generator).to(context.device, dtype)

    q, k, v = draw(model.n_heads, model.d_k), draw(model.n_kv_groups, model.d_k), draw(model.n_kv_groups, model.d_v)
    k_cmp, v_cmp = (_compress_by_mean(x, nsa) for x in (k, v))
    name = {part: choice.backend for part, choice in context.model.backends.items()}
    chooser, asking, asked = model.selection_nsa, q, k_cmp
    if model.has_indexer:
        asking, asked = (draw(model.n_kv_groups, model.index_width) for _ in "qk")
        asked = _compress_by_mean(asked, chooser)
    expected = reference.select_blocks(asking, asked, None, chooser)
    found = score_and_select_blocks(asking, asked, chooser, backend=name["selection"])
    differing = (found != expected).any(-1).float().mean().item()
    cases: dict[str, tuple[TensorFunction, TensorFunction, tuple[Tensor, ...]]] = {
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
        from nsa_lab.attention.kernels.parallel_compile import try_compile_in_parallel

        try_compile_in_parallel(lambda: [_compute_output_and_gradients(fast, inputs) for fast, _, inputs in cases.values()])
    ratios = [(differing / MAX_DIFFERING_FRACTION, f"selection, {differing:.2%} of the queries differ")]
    for branch, (fast, definition, inputs) in cases.items():
        ratios += [(ratio, f"{branch}, {what}") for what, ratio in _compute_error_ratios(fast, definition, inputs).items()]
    return max(ratios)


def _compress_by_mean(x: Tensor, nsa: NSAConfig) -> Tensor:
    """Compressed keys or values. What is compared takes them as they come, so a mean serves whatever the run's phi is."""
    return reference.compress(x, nsa.model_copy(update={"phi": "avg"}))


def _compute_error_ratios(fast: TensorFunction, definition: TensorFunction, inputs: tuple[Tensor, ...]) -> dict[str, float]:
    truth = _compute_output_and_gradients(definition, tuple(x.double() for x in inputs))
    plain, ours = _compute_output_and_gradients(definition, inputs), _compute_output_and_gradients(fast, inputs)
    names = ("output", "gradient of q", "gradient of k", "gradient of v")
    found = {}
    for name, exact, low, value in zip(names, truth, plain, ours, strict=True):
        factor = FORWARD_LIMIT if name == "output" else BACKWARD_LIMIT
        # A query with one key has no gradient: what it may err is then told on the scale of the inputs, which is 1.
        size = float(exact.abs().max()) or 1.0
        allowed = factor * (low - exact).abs().max() + ERROR_FLOOR[inputs[0].dtype] * size
        ratio = float((value - exact).abs().max() / allowed)
        # NaN compares as neither larger nor smaller, and is the worst error of all.
        found[name] = math.inf if math.isnan(ratio) else ratio
    return found


def _compute_output_and_gradients(function: TensorFunction, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """Output and gradients, in float64, for a fixed gradient of the output."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    output = function(*leaves)
    slope = torch.linspace(-1, 1, output.numel(), device=output.device, dtype=torch.float64).view_as(output)
    gradients = torch.autograd.grad(output, leaves, slope.to(output.dtype))
    return [output.detach().double(), *(gradient.double() for gradient in gradients)]
