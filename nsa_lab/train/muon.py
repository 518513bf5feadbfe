"""Muon for the matrices of the blocks and AdamW for everything else, as one optimiser (`train.optimizer: muon`).

Muon (Jordan et al., 2024, https://kellerjordan.github.io/posts/muon) moves a matrix by its Nesterov momentum, of which five
Newton-Schulz steps have made all singular values nearly 1. Scaled by .2 sqrt(max(rows, columns)), an update is about as
large as AdamW's (Moonlight, arXiv 2502.16982, section 2.2), so that one learning rate and one weight decay serve both.

Invariants
* Muon has the projections of attention and MLP. Embeddings, tables of n-grams and their map, head, gates, norms,
  compression, convolutions and the indexer are AdamW's, equal to torch.optim.AdamW bit for bit.
* Matrices that share a weight are orthogonalised one by one: queries, each branch's keys and values, the halves of a gated
  MLP.
* Where `found_inf` is 1 nothing changes, and nothing here waits for the device.
"""

# torch.optim's own copies of many tensors at once have no public name.
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false
from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from nsa_lab.model import MLP, DenseAttention, SparseAttention

MOMENTUM = 0.95
NEWTON_SCHULZ_COEFFICIENTS, NEWTON_SCHULZ_STEPS = (3.4445, -4.7750, 2.0315), 5
NORM_EPS = 1e-7  # a norm that is divided by
UPDATE_RMS = 0.2  # of an update, over the learning rate


def find_muon_matrices(model: nn.Module) -> dict[Tensor, list[int]]:
    """The weights [rows, columns] of `model` that Muon takes, and the rows of each matrix that shares one, in order."""
    found: dict[Tensor, list[int]] = {}
    for module in model.modules():
        if isinstance(module, SparseAttention | DenseAttention):
            c, branches = module.config, module.N_BRANCHES
            keys, values = [c.n_kv_groups * c.d_k] * branches, [c.n_kv_groups * c.d_v] * branches
            found[module.qkv.weight] = [c.n_heads * c.d_k, *keys, *values]
            found[module.out.weight] = [c.dim]
        elif isinstance(module, MLP):
            found[module.up.weight] = [module.down.in_features] * (2 if module.is_gated else 1)
            found[module.down.weight] = [module.down.out_features]
    return {weight: rows for weight, rows in found.items() if weight.requires_grad}


def orthogonalize(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Of matrices U S V^T, [n, rows, columns], nearly U V^T, in `dtype`, which the products are computed in.

    Five steps of a x + b (x x^T) x + c (x x^T)^2 x bring singular values from a hundredth of the norm on to between .68 and
    1.14, and leave a zero matrix at zero.
    """
    a, b, c = NEWTON_SCHULZ_COEFFICIENTS
    x = (x / torch.linalg.matrix_norm(x, keepdim=True).clamp_min(NORM_EPS)).to(dtype)
    tall = x.shape[-2] > x.shape[-1]
    wide = x.mT if tall else x
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = wide @ wide.mT
        wide = torch.baddbmm(wide, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return wide.mT if tall else wide


class Muon(torch.optim.Optimizer):
    """`matrices` (as the function gives them) by Muon, then `groups` by AdamW with their own `weight_decay`.

    Weights, gradients and state are float32. Newton-Schulz computes in bfloat16 on a GPU and in float32 on a CPU, on all
    matrices of one shape at once, of which it holds a few copies for as long. `momentum_buffer` is a mean, as in
    torch.optim.Muon. `found_inf`, 0-d or None: an update is skipped where it is 1.
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

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride] - takes no closure
        ours, *others = self.param_groups
        self._step_muon(ours)
        for group in others:
            self._step_adamw(group)

    def _step_muon(self, group: dict[str, Any]) -> None:
        alike: dict[torch.Size, list[tuple[Tensor, ...]]] = {}
        for p in group["params"]:
            if p.grad is None:
                continue
            state = self.state[p]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(p)
            together = (p, p.grad, state["momentum_buffer"])
            for one in zip(*(tensor.split(self._matrix_rows[p]) for tensor in together), strict=True):
                alike.setdefault(one[0].shape, []).append(one)
        for of_one_shape in alike.values():
            weights, grads, momenta = (list(tensors) for tensors in zip(*of_one_shape, strict=True))
            self._update_matrices(weights, grads, momenta, group["lr"], group["weight_decay"])

    def _update_matrices(
        self, weights: list[Tensor], grads: list[Tensor], momenta: list[Tensor], lr: float, decay: float
    ) -> None:
        """One update of matrices of one shape."""
        weight, grad, before = (torch.stack(tensors) for tensors in (weights, grads, momenta))
        momentum = before.lerp(grad, 1 - MOMENTUM)
        precision = torch.bfloat16 if weight.is_cuda else weight.dtype
        direction = orthogonalize(grad.lerp(momentum, MOMENTUM), precision)
        rate = lr * UPDATE_RMS * math.sqrt(max(weight.shape[-2:]))
        moved = weight.mul(1 - lr * decay).add_(direction, alpha=-rate)
        if self.found_inf is not None:
            # Chosen, not multiplied: a bad update is not finite.
            bad = self.found_inf.bool()
            momentum, moved = torch.where(bad, before, momentum), torch.where(bad, weight, moved)
        torch._foreach_copy_([*momenta, *weights], [*momentum, *moved])  # in few launches

    def _step_adamw(self, group: dict[str, Any]) -> None:
        updated = [p for p in group["params"] if p.grad is not None]
        for p in updated:
            if not self.state[p]:
                count, zero = torch.zeros((), device=p.device), torch.zeros_like(p)
                self.state[p] = {"step": count, "exp_avg": zero, "exp_avg_sq": zero.clone()}
        states = [self.state[p] for p in updated]
        beta1, beta2 = group["betas"]
        adamw(
            updated,
            [p.grad for p in updated],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
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
