"""Compare the branches, as the run will compute them, with the definition in float64.

Uses the heads, widths and NSA settings of the run. The error of a kernel may be at most 2 times (forward) or 3 times
(backward) the error of the same mathematics in plain low precision.
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
# Maximum length: the definition materializes the full score matrices.
MAX_LENGTH_GPU, MAX_LENGTH_CPU = 2048, 256
# Errors below this fraction of the largest value are rounding from another summation order.
ERROR_FLOOR = {torch.float32: 2e-5, torch.bfloat16: 4e-3}
MAX_DIFFERING_FRACTION = 0.01


def find_worst_error_ratio(context: TrainContext) -> tuple[float, str]:
    """Return the largest error of the model's branches divided by the allowed error, and its location. At most 1 passes."""
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
    backend = {part: resolved.backend for part, resolved in context.model.backends.items()}
    ratios: list[tuple[float, str]] = []
    cases: dict[str, tuple[TensorFunction, TensorFunction, tuple[Tensor, ...]]] = {}
    # If no block fits, the compressed branch is zero by definition, and there is nothing to compare.
    if "cmp" in model.branches and k_cmp.shape[1]:
        cases["compressed"] = (
            lambda *x: compressed_attention(*x, nsa=nsa, backend=backend["compressed"])[0],
            lambda *x: reference.compressed_attention(*x, nsa=nsa)[0],
            (q, k_cmp, v_cmp),
        )
    if "sel" in model.branches:
        scoring_nsa, scoring_q, scoring_k = model.selection_nsa, q, k
        if model.has_indexer:
            scoring_q, scoring_k = (draw(heads, model.index_width) for heads in (model.n_index_queries, model.n_kv_groups))
        scoring_k = _compress_by_mean(scoring_k, scoring_nsa)
        expected = reference.select_blocks(scoring_q, scoring_k, None, scoring_nsa)
        selected = score_and_select_blocks(scoring_q, scoring_k, scoring_nsa, backend=backend["selection"])
        differing = (selected != expected).any(-1).float().mean().item()
        ratios.append((differing / MAX_DIFFERING_FRACTION, f"selection, {differing:.2%} of the queries differ"))
        cases["selected"] = (
            lambda *x: selected_attention(*x, blocks=expected, nsa=nsa, backend=backend["selected"])[0],
            lambda *x: reference.selected_attention(*x, blocks=expected, nsa=nsa)[0],
            (q, k, v),
        )
    if "win" in model.branches:
        cases["window"] = (
            lambda *x: window_attention(*x, nsa=nsa, backend=backend["window"])[0],
            lambda *x: reference.window_attention(*x, nsa=nsa)[0],
            (q, k, v),
        )
    if "triton" in backend.values():
        # Imported here because Triton is optional. Compiled one after another, the kernels would take most of this check.
        from nsa_lab.attention.kernels.parallel_compile import try_compile_in_parallel

        try_compile_in_parallel(
            lambda: [_compute_output_and_gradients(function, inputs) for function, _, inputs in cases.values()]
        )
    for branch, (function, definition, inputs) in cases.items():
        ratios += [
            (ratio, f"{branch}, {quantity}")
            for quantity, ratio in _compute_error_ratios(function, definition, inputs).items()
        ]
    return max(ratios, default=(0.0, "no branch has keys"))


def _compress_by_mean(x: Tensor, nsa: NSAConfig) -> Tensor:
    """Return compressed keys or values. The compared functions take them as input, so the mean serves for every phi."""
    return reference.compress(x, nsa.model_copy(update={"phi": "avg"}))


def _compute_error_ratios(
    function: TensorFunction, definition: TensorFunction, inputs: tuple[Tensor, ...]
) -> dict[str, float]:
    exact_values = _compute_output_and_gradients(definition, tuple(x.double() for x in inputs))
    low_precision_values, kernel_values = (
        _compute_output_and_gradients(definition, inputs),
        _compute_output_and_gradients(function, inputs),
    )
    names = ("output", "gradient of q", "gradient of k", "gradient of v")
    ratios = {}
    for name, exact, low_precision, actual in zip(names, exact_values, low_precision_values, kernel_values, strict=True):
        factor = FORWARD_LIMIT if name == "output" else BACKWARD_LIMIT
        # A query with one key has gradient 0. Its error is then relative to the scale of the inputs, which is 1.
        scale = float(exact.abs().max()) or 1.0
        allowed = factor * (low_precision - exact).abs().max() + ERROR_FLOOR[inputs[0].dtype] * scale
        ratio = float((actual - exact).abs().max() / allowed)
        # Comparisons with NaN are false; NaN is the worst error.
        ratios[name] = math.inf if math.isnan(ratio) else ratio
    return ratios


def _compute_output_and_gradients(function: TensorFunction, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """Return output and input gradients in float64, for a fixed gradient of the output."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    output = function(*leaves)
    output_gradient = torch.linspace(-1, 1, output.numel(), device=output.device, dtype=torch.float64).view_as(output)
    gradients = torch.autograd.grad(output, leaves, output_gradient.to(output.dtype))
    return [output.detach().double(), *(gradient.double() for gradient in gradients)]
