"""Whether selection finds what nothing else can: cheap enough for every evaluation of a run.

A few needles whose fact lies beyond the window, and not in the first block, asked with the model as it is, with random
blocks, with the nearest blocks, and without the selected branch. Where these are as good, the choice does nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nsa_lab.config import NSAConfig, RecallConfig
from nsa_lab.config.model_config import N_FORCED_BLOCKS
from nsa_lab.data.recall import compute_max_fact_bytes, make_needle_task
from nsa_lab.evaluate.ablations import run_ablations
from nsa_lab.evaluate.block_selectors import check_is_sparse
from nsa_lab.evaluate.scoring import stack_samples
from nsa_lab.model import NSATransformer

COMPARED_ABLATIONS = ("random", "nearest", "no_sel")
MAX_BATCH_TOKENS = 1 << 16
# One random choice saves up to .60 of what another costs over 4 sequences, .27 over 16 (docs/science/retrieval_log.md), and
# the verdict "selection finds" asks for half.
DEFAULT_SEQUENCES = 16


@dataclass(frozen=True)
class SelectionBenefit:
    """By intervention, `chosen` among them: mean loss of the answers, nats per token, and share of them that are right."""

    length: int
    sequences: int
    answer_loss: dict[str, float]
    accuracy: dict[str, float]


def measure_selection_benefit(
    model: NSATransformer,
    text: np.ndarray,
    length: int,
    recall: RecallConfig,
    *,
    sequences: int = DEFAULT_SEQUENCES,
    seed: int = 0,
) -> SelectionBenefit | str:
    """Ask for `sequences` facts in held-out `text`, int64 bytes, at `length` tokens; a function of its arguments, and of
    the kind of device that throws the dice for random blocks.

    A string says why this cannot be judged: all blocks are read at this length, or no fact fits where only selection
    looks, or the text is too short. In the dtype that autocast gives. Raises ValueError for a dense model.
    """
    check_is_sparse(model)
    depths = _compute_depths(length, model.config.nsa, recall, sequences)
    if isinstance(depths, str):
        return depths
    if len(text) < length:
        return f"the held-out text has {len(text)} bytes, fewer than a sequence of {length}"
    asked = [
        make_needle_task(length, depth, recall, np.random.default_rng([seed, length, number]), text)
        for number, depth in enumerate(depths)
    ]
    tokens, places = stack_samples(asked, model.head.weight.device)
    effects = run_ablations(
        model, tokens, places, names=COMPARED_ABLATIONS, seed=seed, batch_size=max(1, MAX_BATCH_TOKENS // length)
    )
    return SelectionBenefit(
        length,
        sequences,
        {effect.name: effect.answer_loss for effect in effects},
        {effect.name: effect.accuracy for effect in effects},
    )


def _compute_depths(length: int, nsa: NSAConfig, recall: RecallConfig, count: int) -> list[float] | str:
    """Shares of the text before the question, over where neither window nor forced blocks look; or why there are none."""
    if length <= nsa.n_sel * nsa.l_sel:
        return f"{length} tokens are at most nsa.n_sel * nsa.l_sel = {nsa.n_sel * nsa.l_sel}: all blocks are read"
    if nsa.n_sel <= N_FORCED_BLOCKS:
        return f"nsa.n_sel = {nsa.n_sel}: the forced blocks are all, and none is chosen"
    longest = compute_max_fact_bytes(recall)
    body = length - longest  # at least what precedes the question
    # The last query that looks for the fact is the last token of the answer.
    nearest = length - max(nsa.w, 2 * nsa.l_sel) - longest
    if nearest <= nsa.l_sel:
        return (
            f"{length} tokens hold no place for a fact of {longest} bytes beyond the first block and the window of {nsa.w}"
        )
    first, last = nsa.l_sel / body, min(nearest / body, 1.0)
    return [first + (last - first) * (number + 0.5) / count for number in range(count)]
