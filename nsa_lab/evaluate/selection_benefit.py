"""Selection benefit: loss on far needles with and without the model's block selection. Cheap enough for every validation.

The facts of a few needles are outside the window and the forced blocks. They are scored with the unmodified model, with
random blocks, with the nearest blocks, and without the selected branch. If these are equally good, selection has no effect.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nsa_lab.config import NSAConfig, RecallConfig
from nsa_lab.data.recall import compute_max_fact_bytes, make_needle_task
from nsa_lab.evaluate.ablations import run_ablations
from nsa_lab.evaluate.block_selectors import check_is_sparse, explain_no_selection
from nsa_lab.evaluate.scoring import stack_samples
from nsa_lab.model import NSATransformer

COMPARED_ABLATIONS = ("random", "nearest", "no_sel")
MAX_BATCH_TOKENS = 1 << 16
# Two random selections differ by up to 0.60 of the loss over 4 sequences, by up to 0.27 over 16
# (docs/log/retrieval.md); the check "selection finds" requires a saving of half.
DEFAULT_SEQUENCES = 16


@dataclass(frozen=True)
class SelectionBenefit:
    """Per ablation, including `chosen`: mean answer loss in nats per token, and accuracy of the answers."""

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
    """Measure the benefit on `sequences` needles of `length` tokens in held-out `text`, int64 bytes.

    Returns a string with the reason if it is undefined: the model has no selected branch, all blocks are selected at this
    length, no fact fits outside the window and the forced blocks, or the text is too short. The result depends only on the
    arguments and on the device type, which determines the random blocks. The dtype is that of autocast. Raises ValueError
    for a dense model.
    """
    check_is_sparse(model)
    if reason := explain_no_selection(model.config):
        return reason
    depths = _compute_depths(length, model.config.nsa, recall, sequences)
    if isinstance(depths, str):
        return depths
    if len(text) < length:
        return f"the held-out text has {len(text)} bytes, and a sequence needs {length}"
    samples = [
        make_needle_task(length, depth, recall, np.random.default_rng([seed, length, number]), text)
        for number, depth in enumerate(depths)
    ]
    tokens, answer_positions = stack_samples(samples, model.head.weight.device)
    results = run_ablations(
        model, tokens, answer_positions, names=COMPARED_ABLATIONS, seed=seed, batch_size=max(1, MAX_BATCH_TOKENS // length)
    )
    return SelectionBenefit(
        length,
        sequences,
        {result.name: result.answer_loss for result in results},
        {result.name: result.accuracy for result in results},
    )


def _compute_depths(length: int, nsa: NSAConfig, recall: RecallConfig, count: int) -> list[float] | str:
    """Return depths outside the window and the forced blocks, or why there are none.

    A depth is a fraction of the text before the question.
    """
    if length <= nsa.n_sel * nsa.l_sel:
        return f"{length} tokens are at most nsa.n_sel * nsa.l_sel = {nsa.n_sel * nsa.l_sel}: all blocks are selected"
    if nsa.n_sel <= nsa.n_forced:
        return f"nsa.n_sel = {nsa.n_sel}: all selected blocks are forced"
    fact_length = compute_max_fact_bytes(recall)
    text_length = length - fact_length  # lower limit of the bytes before the question
    # The last query that needs the fact is the last token of the answer.
    max_position = length - max(nsa.w, nsa.local_blocks * nsa.l_sel) - fact_length
    min_position = nsa.sink_blocks * nsa.l_sel
    if max_position <= min_position:
        return (
            f"{length} tokens have no room for a fact of {fact_length} bytes outside the blocks that are always "
            f"selected and the window of {nsa.w}"
        )
    first, last = min_position / text_length, min(max_position / text_length, 1.0)
    return [first + (last - first) * (number + 0.5) / count for number in range(count)]
