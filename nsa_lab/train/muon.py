"""Muon for the matrices of the blocks and AdamW for all other parameters, in one optimizer (`train.optimizer: muon`).

Muon (Jordan et al., 2024, https://kellerjordan.github.io/posts/muon) updates a matrix by its Nesterov momentum after five
Newton-Schulz steps, which make all singular values nearly 1. Scaled by 0.2 sqrt(max(rows, columns)), an update is about
as large as AdamW's (Moonlight, arXiv 2502.16982, section 2.2), so both use the same learning rate and weight decay.

Invariants
* Muon updates the projections of attention and MLP. AdamW updates embeddings, n-gram tables and their projection, head,
  gates, norms, compression, convolutions and the indexer, bit for bit as torch.optim.AdamW does.
* Matrices that share a weight are orthogonalized separately: queries, keys and values of each branch, and the two halves
  of a gated MLP.
* If `found_inf` is 1, nothing changes. Nothing here synchronizes with the device.
* Sharded matrices (FSDP) are orthogonalized by one rank each. All other arithmetic is elementwise, on each rank's shard.
"""

# torch.optim's multi-tensor copy has no public name.
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false
from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from nsa_lab.model import MLP, DenseAttention, SparseAttention

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

MOMENTUM = 0.95
NEWTON_SCHULZ_COEFFICIENTS, NEWTON_SCHULZ_STEPS = (3.4445, -4.7750, 2.0315), 5
NORM_EPS = 1e-7  # lower bound of the norm in a division
UPDATE_RMS = 0.2  # RMS of an update divided by the learning rate


def find_muon_matrices(model: nn.Module) -> dict[Tensor, list[int]]:
    """Return the weights [rows, columns] that Muon updates, each with the row counts of the matrices that share it."""
    matrix_rows: dict[Tensor, list[int]] = {}
    for module in model.modules():
        if isinstance(module, SparseAttention | DenseAttention):
            config, n_sets = module.config, len(module.config.kv_sets)
            keys, values = [config.n_kv_groups * config.d_k] * n_sets, [config.n_kv_groups * config.d_v] * n_sets
            matrix_rows[module.qkv.weight] = [config.n_heads * config.d_k, *keys, *values]
            matrix_rows[module.out.weight] = [config.dim]
        elif isinstance(module, MLP):
            matrix_rows[module.up.weight] = [module.down.in_features] * (2 if module.is_gated else 1)
            matrix_rows[module.down.weight] = [module.down.out_features]
    return {weight: rows for weight, rows in matrix_rows.items() if weight.requires_grad}


def is_muon_weight(name: str) -> bool:
    """Return whether `find_muon_matrices` returns the weight `name` of a model, if it is trained."""
    return name.endswith(("attention.qkv.weight", "attention.out.weight", "mlp.up.weight", "mlp.down.weight"))


def orthogonalize(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Approximate U V^T of matrices U S V^T [n, rows, columns]; `dtype` is the compute dtype.

    Five steps of a x + b (x x^T) x + c (x x^T)^2 x map singular values from 1% of the norm upwards into [0.68, 1.14]. A
    zero matrix stays zero.
    """
    a, b, c = NEWTON_SCHULZ_COEFFICIENTS
    x = (x / torch.linalg.matrix_norm(x, keepdim=True).clamp_min(NORM_EPS)).to(dtype)
    is_tall = x.shape[-2] > x.shape[-1]
    wide = x.mT if is_tall else x
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = wide @ wide.mT
        wide = torch.baddbmm(wide, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return wide.mT if is_tall else wide


class Muon(torch.optim.Optimizer):
    """Updates the weights in `matrix_rows` (see `find_muon_matrices`) with Muon, and `groups` with AdamW.

    Each group has its own `weight_decay`. Weights, gradients and state are float32. Newton-Schulz computes in bfloat16 on
    a GPU and in float32 on a CPU, on all matrices of one shape at once; it temporarily allocates a few copies of them.
    `momentum_buffer` is a moving average, as in torch.optim.Muon. `found_inf`, 0-d or None: skip the update if it is 1.
    """

    found_inf: Tensor | None = None

    def __init__(
        self,
        matrix_rows: Mapping[Tensor, Sequence[int]],
        groups: Iterable[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__([{"params": list(matrix_rows)}, *groups], defaults)
        self._matrix_rows = matrix_rows
        self._is_sharded = any(hasattr(weight, "to_local") for weight in matrix_rows)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride] - takes no closure
        muon_group, *adamw_groups = self.param_groups
        if self._is_sharded:
            self._step_sharded_muon(muon_group)
        else:
            self._step_muon(muon_group)
        for group in adamw_groups:
            self._step_adamw(group)

    def _step_muon(self, group: dict[str, Any]) -> None:
        by_shape: dict[torch.Size, list[tuple[Tensor, ...]]] = {}
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(parameter)
            tensors = (parameter, parameter.grad, state["momentum_buffer"])
            for slices in zip(*(tensor.split(self._matrix_rows[parameter]) for tensor in tensors), strict=True):
                by_shape.setdefault(slices[0].shape, []).append(slices)
        for matrices in by_shape.values():
            weights, grads, momenta = (list(same_kind) for same_kind in zip(*matrices, strict=True))
            self._update_matrices(weights, grads, momenta, group["lr"], group["weight_decay"])

    def _update_matrices(
        self, weights: list[Tensor], grads: list[Tensor], momenta: list[Tensor], lr: float, decay: float
    ) -> None:
        """Update matrices of one shape."""
        weight, grad, old_momentum = (torch.stack(tensors) for tensors in (weights, grads, momenta))
        momentum = old_momentum.lerp(grad, 1 - MOMENTUM)
        direction = orthogonalize(grad.lerp(momentum, MOMENTUM), _get_compute_dtype(weight))
        rate = lr * UPDATE_RMS * math.sqrt(max(weight.shape[-2:]))
        new_weight = weight.mul(1 - lr * decay).add_(direction, alpha=-rate)
        if self.found_inf is not None:
            # Select, do not multiply: a bad update is not finite.
            skip = self.found_inf.bool()
            momentum, new_weight = torch.where(skip, old_momentum, momentum), torch.where(skip, weight, new_weight)
        torch._foreach_copy_([*momenta, *weights], [*momentum, *new_weight])  # few kernel launches

    def _step_sharded_muon(self, group: dict[str, Any]) -> None:
        """Update sharded matrices as `_step_muon` does. Collective."""
        from nsa_lab.train.matrix_exchange import exchange_matrices  # takes most of a second to import

        parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        weights, grads, old_momenta = (
            [_to_local(parameter) for parameter in parameters],
            [_to_local(parameter.grad) for parameter in parameters],
            [_to_local(self.state[parameter]["momentum_buffer"]) for parameter in parameters],
        )
        momenta = torch._foreach_lerp(old_momenta, grads, 1 - MOMENTUM)

        def orthogonalize_own(numbers: list[int], matrices: list[Tensor]) -> list[Tensor]:
            return _orthogonalize_scaled(matrices, [self._matrix_rows[parameters[i]] for i in numbers])

        directions = exchange_matrices(
            cast("list[DTensor]", parameters), torch._foreach_lerp(grads, momenta, MOMENTUM), orthogonalize_own
        )
        new_weights = torch._foreach_mul(weights, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(new_weights, directions, alpha=-group["lr"])
        old, new = [*old_momenta, *weights], [*momenta, *new_weights]
        if self.found_inf is not None:
            skip = self.found_inf.bool()
            new = [torch.where(skip, x, y) for x, y in zip(old, new, strict=True)]
        torch._foreach_copy_(old, new)

    def _step_adamw(self, group: dict[str, Any]) -> None:
        parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
        for parameter in parameters:
            if not self.state[parameter]:
                count, zeros = torch.zeros((), device=parameter.device), torch.zeros_like(parameter)
                self.state[parameter] = {"step": count, "exp_avg": zeros, "exp_avg_sq": zeros.clone()}
        states = [self.state[parameter] for parameter in parameters]
        beta1, beta2 = group["betas"]
        adamw(
            [_to_local(parameter) for parameter in parameters],
            [_to_local(parameter.grad) for parameter in parameters],
            [_to_local(state["exp_avg"]) for state in states],
            [_to_local(state["exp_avg_sq"]) for state in states],
            [],
            [state["step"] for state in states],
            fused=True,
            found_inf=self.found_inf,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


def _orthogonalize_scaled(tensors: list[Tensor], matrix_rows: list[Sequence[int]]) -> list[Tensor]:
    """Return the update directions of weights [rows, columns], scaled for the learning rate.

    `matrix_rows`: the row counts of the matrices in each weight. Matrices of one shape are orthogonalized at once.
    """
    matrices = [tensor.split(rows) for tensor, rows in zip(tensors, matrix_rows, strict=True)]
    by_shape: dict[torch.Size, list[Tensor]] = {}
    for matrix in (matrix for parts in matrices for matrix in parts):
        by_shape.setdefault(matrix.shape, []).append(matrix)
    directions: dict[torch.Size, Iterator[Tensor]] = {}
    for shape, same_shape in by_shape.items():
        stacked = torch.stack(same_shape)
        direction = orthogonalize(stacked, _get_compute_dtype(stacked)).to(stacked.dtype)
        directions[shape] = iter(direction * (UPDATE_RMS * math.sqrt(max(shape))))
    return [torch.cat([next(directions[matrix.shape]) for matrix in parts]) for parts in matrices]


def _get_compute_dtype(x: Tensor) -> torch.dtype:
    return torch.bfloat16 if x.is_cuda else x.dtype


def _to_local(x: Tensor) -> Tensor:
    """Return this rank's shard of a sharded tensor, which shares its memory; `x` itself if it is not sharded."""
    return cast("DTensor", x).to_local() if hasattr(x, "to_local") else x
