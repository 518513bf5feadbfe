"""The batches of a whole run, stage after stage.

Invariants
* `batch(step)` is a pure function of the step, counted from 0 over the whole run; a stage is a `Batches` of its own.
* The first stage reads what a run without stages reads. Later ones have seeds of their own, so that a stage does not begin
  with the texts that the one before it began with.
* How text becomes rows, and whether their documents are told apart, is that of the section `data`, in every stage.
"""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Mapping
from typing import Any

import torch

from nsa_lab.config import DataConfig, TrainConfig
from nsa_lab.data.batches import Batch, Batches, EvalBatches
from nsa_lab.data.recall import by_document, planter
from nsa_lab.data.rows import BestFitRows
from nsa_lab.data.shards import TokenStore


class StagedBatches:
    """Training batches of `train.plan`. Raises `DataError` if the tokens do not hold one sequence of every stage.

    `separator` is the tokenizer's; it is needed where `data` tells documents apart or keeps them whole.
    """

    def __init__(self, tokens: TokenStore, train: TrainConfig, data: DataConfig, separator: int | None = None) -> None:
        self._train = train
        self._begins = [first - 1 for first in train.first_steps]
        self._stages = [
            _batches(tokens, stage.seq_len, stage.sequences_per_step, seed, data, separator)
            for stage, seed in zip(train.plan, map(self._seed, range(len(train.plan))), strict=True)
        ]

    def lengths(self) -> list[Mapping[int, int]]:
        """Of each stage, `Batches.lengths`."""
        return [stage.lengths() for stage in self._stages]

    def packing(self) -> list[dict[str, Any]]:
        """Of each stage, `Batches.packing`, and the most documents of a row."""
        return [{**stage.packing(), "most_documents": stage.most_documents} for stage in self._stages]

    def batch(self, step: int, start: int = 0, count: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets of step `step`, int64 `[count, seq_len]` of its stage; see `Batches.batch`."""
        batches, within = self._at(step)
        return batches.batch(within, start, count)

    def weighted(self, step: int, start: int = 0, count: int | None = None) -> Batch:
        """`batch`, what each target weighs in the loss, and where documents begin; see `Batches.weighted`."""
        batches, within = self._at(step)
        return batches.weighted(within, start, count)

    def positions(self, step: int, start: int = 0, count: int | None = None) -> list[int]:
        """The first token of each of those sequences, as an index into the tokens."""
        batches, within = self._at(step)
        return batches.positions(within, start, count)

    def hash(self, step: int) -> str:
        """Sixteen hex digits over the tokens of the global batch, for a diagnosis."""
        batches, within = self._at(step)
        return batches.hash(within)

    def _at(self, step: int) -> tuple[Batches, int]:
        """The stage of a step, and the step's number in it, from 0. Past the run's end the last stage goes on."""
        index = max(bisect.bisect_right(self._begins, step) - 1, 0)
        return self._stages[index], step - self._begins[index]

    def _seed(self, index: int) -> int:
        if index == 0:
            return self._train.seed
        digest = hashlib.blake2b(f"{self._train.seed}:stage {index}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little")


def held_out(tokens: TokenStore, train: TrainConfig, separator: int | None = None) -> tuple[EvalBatches, ...]:
    """For every stage, held-out text in sequences of its length; raises `DataError` as `EvalBatches` does.

    As many as `eval_batches` batches of `batch_size` hold; how many a forward pass takes changes nothing of that. With a
    `separator` their documents are told apart.
    """
    return tuple(
        EvalBatches(tokens, stage.seq_len, train.eval_batches * stage.batch_size, stage.sequences_at_once, separator)
        for stage in train.plan
    )


def _batches(
    tokens: TokenStore, seq_len: int, sequences: int, seed: int, data: DataConfig, separator: int | None
) -> Batches:
    masked, plant = data.documents == "mask", planter(data, seq_len, seed) if data.source == "recall" else None
    if separator is None:
        if masked or data.packing == "best_fit":
            raise ValueError("StagedBatches: documents are told apart by their separator; give the tokenizer's")
        return Batches(tokens, seq_len, sequences, seed, plant)
    rows = BestFitRows(tokens, seq_len, separator) if data.packing == "best_fit" else None
    if plant and masked:
        plant = by_document(plant, separator)
    return Batches(tokens, seq_len, sequences, seed, plant, rows=rows, separator=separator if masked else None)
