"""Blocks chosen by float32 products of queries and keys, wherever float64 provably chooses the same.

On a CPU float64 products of many keys with one query take most of a decoding step. Of the choice they decide nearly always
nothing: float32 misses a score by at most eps = (D + 4) 2^-24 |q| |k| D^-1/2 (D products added up in any order, a query
rounded when scaled), so a softmax of wide arithmetic over such scores is right to a factor of exp(2 eps), and two
importances further apart than exp(4 eps) are in their true order. Only the last block chosen and the first one left out
have to be. Where they are not, `clear` says so, and the choice is the caller's to make wide.
"""

from __future__ import annotations

from functools import lru_cache
from typing import cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from nsa_lab.attention import geometry
from nsa_lab.config import NSAConfig

# Roundings of one score and of the norms that bound them, and what float32 can tell apart when it ranks importances.
UNIT_ROUNDOFF, BOUND_MARGIN, RANKING_ERROR = 2.0**-24, 1.01, 2.0**-22
# Importances below this may meet the smallest number of float32, where relative bounds end.
MIN_IMPORTANCE = 1e-30
FP64_ERROR_FACTOR = 1 + RANKING_ERROR
"""The doubt of importances that were computed wide: float32, which ranks them, may take two for equal."""
# Fewer keys are multiplied in float64 sooner than doubt is computed; docs/kernel_log.md has the times.
MIN_KEYS = 512


def can_score_in_fp32(q: Tensor, n_keys: int) -> bool:
    """Whether products of q with so many keys are better tried in float32 than made in float64 at once."""
    return q.dtype == torch.float32 and q.device.type == "cpu" and n_keys >= MIN_KEYS and _is_full_precision_matmul()


def _is_full_precision_matmul() -> bool:
    # oneDNN may be allowed to round factors to bfloat16 or tf32.
    allowed = getattr(torch.backends.mkldnn, "matmul", None)
    if allowed is None:  # before torch 2.9
        return torch.get_float32_matmul_precision() == "highest"
    return allowed.fp32_precision in ("none", "ieee")


def compute_error_factor(q: Tensor, k: Tensor) -> Tensor:
    """By what factor importances of q [B, C, H, D] over keys k [B, n, G, D] may mislead: float64 [B, C, G], above 1.

    A pair further apart is in its true order, and stays in it when float64 rounds to float32 for ranking. inf or NaN where
    a query or a key is not finite.
    """
    D, G = k.shape[3], k.shape[2]
    longest_q, longest_k = torch.unflatten(_compute_norms(q), 2, (G, -1)).amax(-1), _compute_norms(k).amax(1, keepdim=True)
    off = (longest_q * longest_k).double() * (4 * BOUND_MARGIN * (D + 4) * UNIT_ROUNDOFF * D**-0.5)
    return off.exp_() * FP64_ERROR_FACTOR


def _compute_norms(x: Tensor) -> Tensor:
    return cast(Tensor, torch.linalg.vector_norm(x, dim=-1))  # pyright: ignore[reportUnknownMemberType]


def select_certain_blocks(
    importance: Tensor, error_factor: Tensor | float, nsa: NSAConfig, first: int
) -> tuple[Tensor, Tensor]:
    """As `reference.choose`, of float64 importances [B, C, G, blocks] that may mislead by factors of `doubt` [B, C, G].

    -> blocks int32 [B, C, G, n_sel], and whether they are certain, bool [B, C, G]; what is not certain means nothing.
    """
    rank = _compute_ranks(importance, nsa, first)
    best, order = rank.topk(nsa.n_sel + 1)
    last, next_one = best[..., -2:].unbind(-1)
    clear = torch.isneginf(next_one) | (last > (next_one * error_factor).clamp_min(MIN_IMPORTANCE))
    order = order[..., :-1]
    if geometry.num_selection(first + 1, nsa) >= nsa.n_sel:  # as many have begun as are chosen
        return order.sort().values.to(torch.int32), clear
    order = torch.where(torch.isneginf(best[..., :-1]), rank.shape[-1], order).sort().values
    return torch.where(order < rank.shape[-1], order, -1).to(torch.int32), clear


def _compute_ranks(importance: Tensor, nsa: NSAConfig, first: int) -> Tensor:
    """What blocks are ranked by: inf where one is always in, -inf where it has not begun; at least n_sel + 1 of them.

    `reference.choose` says it by masks. Of one query, to make them would be 2 to 3 % of a decoding step.
    """
    missing = nsa.n_sel + 1 - importance.shape[-1]
    if missing > 0:
        importance = pad(importance, (0, missing))
    begun = tuple(geometry.num_selection(first + at + 1, nsa) for at in range(importance.shape[1]))
    competes, others = _build_forced_ranks(begun, importance.shape[-1], importance.dtype, importance.device)
    return torch.where(competes, importance, others)


@lru_cache(maxsize=256)  # a batch may have as many lengths as sequences
def _build_forced_ranks(
    n_candidates: tuple[int, ...], n_blocks: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Which blocks compete, bool [C, 1, blocks], for queries that so many have begun for; and the ranks of the others.

    The same in all layers, and of one query while its own block lasts: kept for these, and not to be written to.
    """
    with torch.inference_mode(False):  # what is kept has to serve every caller
        ranks = torch.zeros(len(n_candidates), 1, n_blocks, dtype=dtype)
        for rank, end in zip(ranks[:, 0], n_candidates, strict=True):
            rank[0] = rank[max(end - 2, 0) : end] = float("inf")
            rank[end:] = float("-inf")
        return (ranks == 0).to(device), ranks.to(device)
