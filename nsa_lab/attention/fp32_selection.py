"""Block selection with float32 scores, where they provably give the same blocks as float64.

On a CPU, float64 products of one query with many keys take most of a decoding step, but they rarely change the selection.
The error of a float32 score is at most eps = (D + 4) 2^-24 |q| |k| D^-1/2 (D products summed in any order, and a query
rounded when scaled). A float64 softmax of such scores is then exact up to a factor of exp(2 eps), and two importances whose
ratio exceeds exp(4 eps) are in their true order. Only the last selected block and the first one that is not selected must
be in order. If they are not certain to be, `is_certain` is False, and the caller repeats the selection in float64.
"""

from __future__ import annotations

from functools import lru_cache
from typing import cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from nsa_lab.attention import geometry
from nsa_lab.config import NSAConfig

# Unit roundoff of float32, margin for rounding in the norms, and the relative resolution of the float32 ranking.
UNIT_ROUNDOFF, BOUND_MARGIN, RANKING_ERROR = 2.0**-24, 1.01, 2.0**-22
# Smaller importances can reach the subnormal numbers of float32, for which relative bounds do not hold.
MIN_IMPORTANCE = 1e-30
FP64_ERROR_FACTOR = 1 + RANKING_ERROR
"""Error factor of importances computed in float64: the ranking in float32 can take two of them for equal."""
# With fewer keys, float64 products take less time than the error factor; the measured times are in docs/log/kernels.md.
MIN_KEYS = 512


def can_score_in_fp32(q: Tensor, n_keys: int) -> bool:
    """Return whether scoring q against `n_keys` keys in float32 first is faster than scoring in float64."""
    return q.dtype == torch.float32 and q.device.type == "cpu" and n_keys >= MIN_KEYS and _is_full_precision_matmul()


def _is_full_precision_matmul() -> bool:
    # oneDNN can be set to round factors to bfloat16 or tf32.
    matmul_settings = getattr(torch.backends.mkldnn, "matmul", None)
    if matmul_settings is None:  # before torch 2.9
        return torch.get_float32_matmul_precision() == "highest"
    return matmul_settings.fp32_precision in ("none", "ieee")


def compute_error_factor(q: Tensor, k: Tensor) -> Tensor:
    """Return the factor by which ratios of importances can be wrong: float64 [B, C, G], above 1.

    q [B, C, H, D], k [B, n, G, D]. Two importances whose ratio exceeds the factor are in their true order, also after
    float64 values are rounded to float32 for the ranking. The factor is inf or NaN if a query or key is not finite.
    """
    D, G = k.shape[3], k.shape[2]
    max_q_norm, max_k_norm = (
        torch.unflatten(_compute_norms(q), 2, (G, -1)).amax(-1),
        _compute_norms(k).amax(1, keepdim=True),
    )
    error = (max_q_norm * max_k_norm).double() * (4 * BOUND_MARGIN * (D + 4) * UNIT_ROUNDOFF * D**-0.5)
    return error.exp_() * FP64_ERROR_FACTOR


def _compute_norms(x: Tensor) -> Tensor:
    return cast(Tensor, torch.linalg.vector_norm(x, dim=-1))  # pyright: ignore[reportUnknownMemberType]


def select_certain_blocks(
    importance: Tensor, error_factor: Tensor | float, nsa: NSAConfig, first: int
) -> tuple[Tensor, Tensor]:
    """Select blocks as `reference.select_by_importance`, and return which selections are certain.

    importance float64 [B, C, G, blocks]; error_factor [B, C, G]. Return blocks int32 [B, C, G, n_sel] and is_certain, bool
    [B, C, G]; a selection that is not certain must not be used.
    """
    rank = _compute_ranks(importance, nsa, first)
    top_ranks, order = rank.topk(nsa.n_sel + 1)
    last_selected, first_rejected = top_ranks[..., -2:].unbind(-1)
    is_certain = torch.isneginf(first_rejected) | (
        last_selected > (first_rejected * error_factor).clamp_min(MIN_IMPORTANCE)
    )
    order = order[..., :-1]
    if geometry.num_selection(first + 1, nsa) >= nsa.n_sel:  # at least n_sel candidates for every query
        return order.sort().values.to(torch.int32), is_certain
    order = torch.where(torch.isneginf(top_ranks[..., :-1]), rank.shape[-1], order).sort().values
    return torch.where(order < rank.shape[-1], order, -1).to(torch.int32), is_certain


def _compute_ranks(importance: Tensor, nsa: NSAConfig, first: int) -> Tensor:
    """Return the ranks of at least n_sel + 1 blocks: inf if always selected, -inf if not a candidate, else the importance.

    Equal to the masks of `reference.select_by_importance`, which would take 2% to 3% of a decoding step with one query.
    """
    n_missing = nsa.n_sel + 1 - importance.shape[-1]
    if n_missing > 0:
        importance = pad(importance, (0, n_missing))
    n_candidates = tuple(geometry.num_selection(first + query + 1, nsa) for query in range(importance.shape[1]))
    is_free, forced_ranks = _build_forced_ranks(
        n_candidates, nsa.sink_blocks, nsa.local_blocks, importance.shape[-1], importance.dtype, importance.device
    )
    return torch.where(is_free, importance, forced_ranks)


@lru_cache(maxsize=256)  # a batch can have as many lengths as sequences
def _build_forced_ranks(
    n_candidates: tuple[int, ...],
    sink_blocks: int,
    local_blocks: int,
    n_blocks: int,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """Return which blocks are ranked by importance, bool [C, 1, blocks], and the ranks of the other blocks.

    `n_candidates`: number of candidate blocks of each query. The result is equal for all layers, and for one query as long
    as it stays in its block, so it is cached. Do not write to it.
    """
    with torch.inference_mode(False):  # the cached tensors serve callers in and outside of inference mode
        ranks = torch.zeros(len(n_candidates), 1, n_blocks, dtype=dtype)
        for rank, end in zip(ranks[:, 0], n_candidates, strict=True):
            rank[:sink_blocks] = rank[max(end - local_blocks, 0) : end] = float("inf")
            rank[end:] = float("-inf")
        return (ranks == 0).to(device), ranks.to(device)
