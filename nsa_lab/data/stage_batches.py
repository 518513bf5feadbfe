"""The batches of a whole run, stage after stage.

Invariants
* `batch(step)` is a pure function of the step, counted from 0 over the whole run; a stage is a `Batches` of its own.
* The first stage reads what a run without stages reads. Later ones have seeds of their own, so that a stage does not begin
  with the texts that the one before it began with.
* How text becomes rows, and whether their documents are told apart, is that of the section `data`, in every stage. Which
  documents are read, and how many sequences are planted into, a stage says itself.
"""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Mapping
from typing import Any

import torch

from nsa_lab.config import DataConfig, StageConfig, TrainConfig
from nsa_lab.data.batches import Batch, Batches, EvalBatches, Inserter
from nsa_lab.data.document_starts import Documents
from nsa_lab.data.recall import insert_in_share, insert_per_document, make_inserter
from nsa_lab.data.sequence_packing import BestFitPacking
from nsa_lab.data.shards import TokenStore


class StagedBatches:
    """Training batches of `train.plan`. Raises `DataError` if the tokens do not hold one sequence of every stage.

    `separator` is the tokenizer's; it is needed where `data` tells documents apart or keeps them whole, and where a stage
    leaves out short ones.
    """

    def __init__(self, tokens: TokenStore, train: TrainConfig, data: DataConfig, separator: int | None = None) -> None:
        self._train = train
        self._start_steps = [first - 1 for first in train.first_steps]
        self._stages = [
            _make_batches(tokens, stage, seed, data, separator)
            for stage, seed in zip(train.plan, map(self._derive_seed, range(len(train.plan))), strict=True)
        ]

    def count_document_lengths(self) -> list[Mapping[int, int]]:
        """Of each stage, `Batches.lengths`."""
        return [stage.count_document_lengths() for stage in self._stages]

    def summarize_packing(self) -> list[dict[str, Any]]:
        """Of each stage, `Batches.packing`, and the most documents of a row."""
        return [{**stage.summarize_packing(), "most_documents": stage.max_documents_per_row} for stage in self._stages]

    def batch(self, step: int, start: int = 0, count: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets of step `step`, int64 `[count, seq_len]` of its stage; see `Batches.batch`."""
        batches, within = self._locate_step(step)
        return batches.batch(within, start, count)

    def weighted_batch(self, step: int, start: int = 0, count: int | None = None) -> Batch:
        """`batch`, what each target weighs in the loss, and where documents begin; see `Batches.weighted`."""
        batches, within = self._locate_step(step)
        return batches.weighted_batch(within, start, count)

    def find_documents(self, step: int) -> Documents | None:
        """Where documents begin in all rows of the step; see `Batches.documents`."""
        batches, within = self._locate_step(step)
        return batches.find_documents(within)

    def get_text_positions(self, step: int, start: int = 0, count: int | None = None) -> list[int]:
        """The first token of each of those sequences, as an index into the tokens."""
        batches, within = self._locate_step(step)
        return batches.get_text_positions(within, start, count)

    def compute_hash(self, step: int) -> str:
        """Sixteen hex digits over the tokens of the global batch, for a diagnosis."""
        batches, within = self._locate_step(step)
        return batches.compute_hash(within)

    def _locate_step(self, step: int) -> tuple[Batches, int]:
        """The stage of a step, and the step's number in it, from 0. Past the run's end the last stage goes on."""
        index = max(bisect.bisect_right(self._start_steps, step) - 1, 0)
        return self._stages[index], step - self._start_steps[index]

    def _derive_seed(self, index: int) -> int:
        if index == 0:
            return self._train.seed
        digest = hashlib.blake2b(f"{self._train.seed}:stage {index}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little")


def make_validation_batches(
    tokens: TokenStore, train: TrainConfig, separator: int | None = None
) -> tuple[EvalBatches, ...]:
    """For every stage, held-out text in sequences of its length; raises `DataError` as `EvalBatches` does.

    As many as `eval_batches` batches of `batch_size` hold; how many a forward pass takes changes nothing of that. With a
    `separator` their documents are told apart.
    """
    return tuple(
        EvalBatches(tokens, stage.seq_len, train.eval_batches * stage.batch_size, stage.sequences_per_forward, separator)
        for stage in train.plan
    )


def _make_batches(tokens: TokenStore, stage: StageConfig, seed: int, data: DataConfig, separator: int | None) -> Batches:
    masked, packed = data.documents == "mask", data.packing == "best_fit"
    if separator is None and (masked or packed or stage.min_document_tokens):
        raise ValueError("StagedBatches: documents are told apart by their separator; give the tokenizer's")
    if separator is not None and stage.min_document_tokens:
        tokens = tokens.drop_short_documents(separator, stage.min_document_tokens)
    return Batches(
        tokens,
        stage.seq_len,
        stage.sequences_per_step,
        seed,
        _make_inserter(stage, seed, data, separator) if data.source == "recall" else None,
        packing=BestFitPacking(tokens, stage.seq_len, separator) if packed and separator is not None else None,
        separator=separator if masked else None,
    )


def _make_inserter(stage: StageConfig, seed: int, data: DataConfig, separator: int | None) -> Inserter:
    plant = make_inserter(data, stage.seq_len, seed)
    whole = insert_per_document(plant, separator) if data.documents == "mask" and separator is not None else plant
    return insert_in_share(whole, stage.planted_share)
