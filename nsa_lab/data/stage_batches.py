"""Batches of a whole run, stage by stage.

Invariants
* `batch(step)` is a pure function of the step, counted from 0 over the whole run. Each stage has its own `Batches`.
* The first stage reads the same batches as a run without stages. Each later stage has its own seed, so that it does not
  start with the same texts as the stage before it.
* The section `data` sets packing and document masking for all stages. Each stage sets which documents are read
  (`min_document_tokens`) and in which share of the sequences facts are inserted (`planted_share`).
"""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Mapping
from typing import Any

import torch

from nsa_lab.config import DataConfig, StageConfig, TrainConfig
from nsa_lab.data.batches import Batch, Batches, EvalBatches, Inserter
from nsa_lab.data.recall import insert_in_share, insert_per_document, make_inserter
from nsa_lab.data.sequence_packing import BestFitPacking
from nsa_lab.data.shards import TokenStore


class StagedBatches:
    """Training batches of `train.plan`. Raises `DataError` if the tokens are shorter than one sequence of any stage.

    `separator`: the tokenizer's. It is required if documents are masked, packed by best fit, or dropped for their length.
    """

    def __init__(self, tokens: TokenStore, train: TrainConfig, data: DataConfig, separator: int | None = None) -> None:
        self._train = train
        self._start_steps = [first - 1 for first in train.first_steps]
        self._stages = [
            _make_batches(tokens, stage, seed, data, separator)
            for stage, seed in zip(train.plan, map(self._derive_seed, range(len(train.plan))), strict=True)
        ]

    def count_document_lengths(self) -> list[Mapping[int, int]]:
        """Return `Batches.count_document_lengths` of each stage."""
        return [stage.count_document_lengths() for stage in self._stages]

    def summarize_packing(self) -> list[dict[str, Any]]:
        """Return `Batches.summarize_packing` of each stage, with the maximum number of documents in a row."""
        return [{**stage.summarize_packing(), "most_documents": stage.max_documents_per_row} for stage in self._stages]

    def batch(self, step: int, start: int = 0, count: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs and targets of `step`, int64 `[count, seq_len]` of its stage; see `Batches.batch`."""
        batches, within = self._locate_step(step)
        return batches.batch(within, start, count)

    def weighted_batch(self, step: int, start: int = 0, count: int | None = None) -> Batch:
        """Return `batch` with loss weights and document starts; see `Batches.weighted_batch`."""
        batches, within = self._locate_step(step)
        return batches.weighted_batch(within, start, count)

    def find_documents(self, step: int) -> torch.Tensor | None:
        """Return the document starts of all rows of the step; see `Batches.find_documents`."""
        batches, within = self._locate_step(step)
        return batches.find_documents(within)

    def get_text_positions(self, step: int, start: int = 0, count: int | None = None) -> list[int]:
        """Return the index of the first token of each of these sequences in the text."""
        batches, within = self._locate_step(step)
        return batches.get_text_positions(within, start, count)

    def compute_hash(self, step: int) -> str:
        """Return sixteen hex digits of a hash over the tokens of the global batch, for diagnosis."""
        batches, within = self._locate_step(step)
        return batches.compute_hash(within)

    def _locate_step(self, step: int) -> tuple[Batches, int]:
        """Return the stage of a step and the step's index in it, from 0. Steps past the end belong to the last stage."""
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
    """Return held-out text in sequences of each stage's length. Raises `DataError` as `EvalBatches` does.

    The number of windows is that of `eval_batches` batches of `batch_size`; it does not depend on how many sequences a
    forward pass takes. With a `separator`, document starts are recorded.
    """
    return tuple(
        EvalBatches(tokens, stage.seq_len, train.eval_batches * stage.batch_size, stage.sequences_per_forward, separator)
        for stage in train.plan
    )


def _make_batches(tokens: TokenStore, stage: StageConfig, seed: int, data: DataConfig, separator: int | None) -> Batches:
    is_masked, is_packed = data.documents == "mask", data.packing == "best_fit"
    if separator is None and (is_masked or is_packed or stage.min_document_tokens):
        raise ValueError("StagedBatches: documents are separated by a token; pass the tokenizer's separator")
    if separator is not None and stage.min_document_tokens:
        tokens = tokens.drop_short_documents(separator, stage.min_document_tokens)
    return Batches(
        tokens,
        stage.seq_len,
        stage.sequences_per_step,
        seed,
        _make_inserter(stage, seed, data, separator) if data.source == "recall" else None,
        packing=BestFitPacking(tokens, stage.seq_len, separator) if is_packed and separator is not None else None,
        separator=separator if is_masked else None,
    )


def _make_inserter(stage: StageConfig, seed: int, data: DataConfig, separator: int | None) -> Inserter:
    inserter = make_inserter(data, stage.seq_len, seed)
    document_inserter = (
        insert_per_document(inserter, separator) if data.documents == "mask" and separator is not None else inserter
    )
    return insert_in_share(document_inserter, stage.planted_share)
