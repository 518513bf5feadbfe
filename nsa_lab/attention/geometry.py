"""Block arithmetic of NSA: number, visibility and overlap of blocks, and the number of keys that each branch attends to.

Integers and small tables only. Everything here is exact, and all backends use it. Positions start at 0 in each
document; `layout` maps documents to rows of tensors.
Source: arXiv 2502.11089, section 3.3. Letters as in `NSAConfig`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from nsa_lab.config import NSAConfig


def positions(first: int, last: int, device: torch.device | None = None) -> torch.Tensor:
    """Return the positions first .. last-1, int64 [last - first]."""
    return torch.arange(first, last, device=device)


def num_compressed(length: int, nsa: NSAConfig) -> int:
    """Return the number of compression blocks in `length` tokens: block i covers [i*d, i*d + l), complete blocks only."""
    return 0 if length < nsa.l else (length - nsa.l) // nsa.d + 1


def max_length(n_compressed: int, nsa: NSAConfig) -> int:
    """Return the largest number of tokens that have at most `n_compressed` compression blocks."""
    return n_compressed * nsa.d + nsa.l - 1


def num_selection(length: int, nsa: NSAConfig) -> int:
    """Return the number of selection blocks in `length` tokens; the last one can be incomplete."""
    return -(-length // nsa.l_sel)


def visible_compressed(position: torch.Tensor, nsa: NSAConfig) -> torch.Tensor:
    """Return the number of compression blocks visible to the query at `position` (0-based, any integer shape).

    Block i is visible once its last token is: i*d + l - 1 <= t. The visible blocks are a prefix, 0 .. count-1.
    """
    return ((position + 1 - nsa.l).div(nsa.d, rounding_mode="floor") + 1).clamp_min(0)


def sees_compressed(position: torch.Tensor, n_compressed: int, nsa: NSAConfig) -> torch.Tensor:
    """Return the compression blocks visible to the query at `position`, bool [..., n_compressed]."""
    return torch.arange(n_compressed, device=position.device) < visible_compressed(position, nsa).unsqueeze(-1)


def overlap(
    n_compressed: int,
    n_selection: int,
    nsa: NSAConfig,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
) -> torch.Tensor:
    """Return the weights [n_compressed, n_selection] that map probabilities of compression to selection blocks (eq. 9).

    Entry (i, j) is the number of tokens that compression block i and selection block j share, divided by d. For
    l, d, l_sel = 32, 16, 64, block j sums compressed blocks 4j-1 .. 4j+3 with weights 1, 2, 2, 2, 1.

    Erratum: the paper counts i and j from 0 (eq. 7, 12). Its double sum of p[(l_sel/d) j - m - n] is then l_sel/d - 1
    strides too early. The sum of p[(l_sel/d) j + m - n] gives the weights of this table.
    """
    start_i = torch.arange(n_compressed, device=device).unsqueeze(1) * nsa.d
    start_j = torch.arange(n_selection, device=device).unsqueeze(0) * nsa.l_sel
    shared = torch.minimum(start_i + nsa.l, start_j + nsa.l_sel) - torch.maximum(start_i, start_j)
    return shared.clamp_min(0).to(dtype) / nsa.d


def get_scoring_geometry(nsa: NSAConfig) -> NSAConfig:
    """Return the geometry of the keys whose scores select blocks: `nsa`, or one mean key per selection block.

    For nsa.scores = mean_key, block i of l = d = l_sel tokens is selection block i, and its mean is its key.
    """
    if nsa.scores != "mean_key":
        return nsa
    return nsa.model_copy(update={"l": nsa.l_sel, "d": nsa.l_sel, "phi": "avg"})


def own_block(position: torch.Tensor, nsa: NSAConfig) -> torch.Tensor:
    """Return the selection block that contains `position` (any integer shape)."""
    return position // nsa.l_sel


def forced_blocks(position: torch.Tensor, n_selection: int, nsa: NSAConfig) -> torch.Tensor:
    """Return the always-selected blocks, bool [..., n_selection]: the first `sink_blocks` and the latest `local_blocks`.

    Blocks after the query's own are not included.
    """
    block = torch.arange(n_selection, device=position.device)
    own = own_block(position, nsa).unsqueeze(-1)
    return (block <= own) & ((block < nsa.sink_blocks) | (block > own - nsa.local_blocks))


def candidate_blocks(position: torch.Tensor, n_selection: int, nsa: NSAConfig) -> torch.Tensor:
    """Return the blocks that start at or before the query's position, j*l_sel <= t: bool [..., n_selection]."""
    return torch.arange(n_selection, device=position.device) * nsa.l_sel <= position.unsqueeze(-1)


def keys_of_blocks(blocks: torch.Tensor, position: torch.Tensor, nsa: NSAConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Return, for a query at `position`, the keys in each of its `blocks` and how many of them are in its window too.

    `blocks`: int, -1 for none; `position` broadcasts against it. Only keys up to `position` count.
    """
    first = blocks * nsa.l_sel
    last = torch.minimum(first + nsa.l_sel - 1, position)
    keys = torch.where(blocks >= 0, last - first + 1, 0)
    in_window = (last - torch.maximum(first, position - nsa.w + 1) + 1).clamp_min(0)
    return keys, torch.where(blocks >= 0, in_window, 0)


def after_first_block(length: int, nsa: NSAConfig) -> int:
    """Return the first position after selection block 0, or the last position if `length` tokens do not reach that far."""
    return min(nsa.l_sel, length - 1)


def selected_keys(position: int, nsa: NSAConfig) -> int:
    """Return the number of keys that the selected branch attends to at `position`.

    It is exact for any selection, because the query's own block, the only incomplete one, is always selected.
    """
    own, within = divmod(position, nsa.l_sel)
    return min(own, nsa.n_sel - 1) * nsa.l_sel + within + 1


def mean_selected_keys(length: int, nsa: NSAConfig) -> float:
    """Return the mean of `selected_keys` over a sequence, in closed form; 752.5 for 2048 tokens and the defaults.

    Complete block b = 0, 1, ... contributes l_sel * (min(b, n_sel-1) * l_sel + (l_sel+1)/2); an incomplete last block
    contributes the sum over its tokens.
    """
    whole, rest = divmod(length, nsa.l_sel)
    growing = min(whole, nsa.n_sel - 1)
    past_blocks = growing * (growing - 1) // 2 + (whole - growing) * (nsa.n_sel - 1)
    total = past_blocks * nsa.l_sel**2 + whole * nsa.l_sel * (nsa.l_sel + 1) / 2
    total += rest * min(whole, nsa.n_sel - 1) * nsa.l_sel + rest * (rest + 1) / 2
    return total / length


def ring_slots(queries: int, nsa: NSAConfig) -> int:
    """Return the number of slots of a window ring for `queries` adjacent queries: the tokens that any of them sees."""
    return nsa.w + queries - 1


def decode_reads(length: int, nsa: NSAConfig) -> dict[str, int]:
    """Return the keys that the last of `length` = S queries attends to: N(S), keys of selected blocks, and min(w, S)."""
    return {
        "cmp": num_compressed(length, nsa),
        "sel": selected_keys(length - 1, nsa) if length else 0,
        "win": min(nsa.w, length),
    }


def mean_reads(lengths: int | Mapping[int, int], nsa: NSAConfig) -> dict[str, float]:
    """Return the mean number of keys per query in each branch, and for dense attention under "dense".

    `lengths`: the length of a document, or a mapping from length to number of documents. The mean is over all queries.
    """
    if isinstance(lengths, int):
        return _compute_mean_reads(lengths, nsa)
    tokens = sum(length * count for length, count in lengths.items())
    each = {length: _compute_mean_reads(length, nsa) for length in lengths if length}
    return {
        branch: sum(length * lengths[length] * reads[branch] for length, reads in each.items()) / tokens
        for branch in ("cmp", "sel", "win", "dense")
    }


def _compute_mean_reads(length: int, nsa: NSAConfig) -> dict[str, float]:
    n = num_compressed(length, nsa)
    # Block i is visible to the length - (i*d + l - 1) queries from its last token on.
    cmp = n * (length - nsa.l + 1) - nsa.d * n * (n - 1) / 2
    full = max(length - nsa.w, 0)
    ramp = length - full
    return {
        "cmp": cmp / length,
        "sel": mean_selected_keys(length, nsa),
        "win": (ramp * (ramp + 1) / 2 + full * nsa.w) / length,
        "dense": (length + 1) / 2,
    }
