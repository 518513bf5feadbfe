"""The batches of a whole run, stage after stage.

Invariants
* `batch(step)` is a pure function of the step, counted from 0 over the whole run; a stage is a `Batches` of its own.
* The first stage reads what a run without stages reads. Later ones have seeds of their own, so that a stage does not begin
  with the texts that the one before it began with.
"""

from __future__ import annotations

import bisect
import hashlib

import torch

from nsa_lab.config import DataConfig, TrainConfig
from nsa_lab.data.batches import Batches, EvalBatches, Planter
from nsa_lab.data.recall import planter
from nsa_lab.data.shards import TokenStore


class StagedBatches:
    """Training batches of `train.plan`. Raises `DataError` if the tokens do not hold one sequence of every stage."""

    def __init__(self, tokens: TokenStore, train: TrainConfig, data: DataConfig) -> None:
        self._train = train
        self._begins = [first - 1 for first in train.first_steps]
        self._stages = [
            Batches(tokens, stage.seq_len, stage.sequences_per_step, seed, _planter(data, stage.seq_len, seed))
            for stage, seed in zip(train.plan, map(self._seed, range(len(train.plan))), strict=True)
        ]

    def batch(self, step: int, start: int = 0, count: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets of step `step`, int64 `[count, seq_len]` of its stage; see `Batches.batch`."""
        batches, within = self._at(step)
        return batches.batch(within, start, count)

    def weighted(
        self, step: int, start: int = 0, count: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """`batch`, and what each target weighs in the loss; see `Batches.weighted`."""
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


def held_out(tokens: TokenStore, train: TrainConfig) -> tuple[EvalBatches, ...]:
    """For every stage, held-out text in sequences of its length; raises `DataError` as `EvalBatches` does.

    As many as `eval_batches` batches of `batch_size` hold; how many a forward pass takes changes nothing of that.
    """
    return tuple(
        EvalBatches(tokens, stage.seq_len, train.eval_batches * stage.batch_size, stage.sequences_at_once)
        for stage in train.plan
    )


def _planter(data: DataConfig, seq_len: int, seed: int) -> Planter | None:
    return planter(data, seq_len, seed) if data.source == "recall" else None
