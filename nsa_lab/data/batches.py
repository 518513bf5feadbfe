"""Batches as a pure function of (seed, step).

Invariants
* `batch(step)` depends on the tokens, `seq_len`, `sequences_per_step`, `seed` and `step` alone: nothing to save, nothing to
  restore, and any division among ranks and micro-batches gives the same global batch.
* An epoch reads each row of the text once (`rows`), in an order given by a permutation that is computed, not stored; the
  next epoch takes another, and a stream shifts all its windows by a new offset.
* What a planter makes of a window depends on the window and the number of its sequence alone.
* With a `separator`, a batch says where documents begin in its rows, and what is padding weighs nothing.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from nsa_lab.data.document_starts import Documents, locate_documents
from nsa_lab.data.sequence_packing import RowPacking, StreamPacking, check_length
from nsa_lab.data.shards import TokenStore

# A window of text, int64 [T + 1], and the number of its sequence -> the window with something planted into it, and what
# each token weighs in the loss, float32 [T + 1].
Inserter = Callable[[np.ndarray, int], tuple[np.ndarray, np.ndarray]]


class Batch(NamedTuple):
    """Rows of a step's batch."""

    inputs: torch.Tensor
    """int64 [rows, T]"""
    targets: torch.Tensor
    """int64 [rows, T], the inputs one token later."""
    weights: torch.Tensor | None = None
    """What each target weighs in the loss, float32 [rows, T]; None where all weigh alike."""
    documents: Documents | None = None
    """Where documents begin, which nothing reads across; None where a row is read as one text."""

    def split(self, size: int) -> list[Batch]:
        """`size` rows in each, in order."""
        inputs, targets = self.inputs.split(size), self.targets.split(size)
        weights = [None] * len(inputs) if self.weights is None else self.weights.split(size)
        documents = [None] * len(inputs) if self.documents is None else self.documents.split(size)
        return [Batch(*parts) for parts in zip(inputs, targets, weights, documents, strict=True)]


class Batches:
    """Training batches of rows of `tokens`, by `planter` if there is one. Raises `DataError` if the tokens do not fill one
    row of `seq_len` + 1.

    `separator`: the token between documents, where they are to be told apart. `rows`: by default the text as it comes.
    """

    def __init__(
        self,
        tokens: TokenStore,
        seq_len: int,
        sequences_per_step: int,
        seed: int,
        inserter: Inserter | None = None,
        *,
        packing: RowPacking | None = None,
        separator: int | None = None,
    ) -> None:
        self.seq_len = seq_len
        self.sequences_per_step = sequences_per_step
        self._tokens = tokens
        self._seed = seed
        self._inserter = inserter
        self._packing = packing or StreamPacking(tokens, seq_len, separator)
        self._separator = separator
        self.windows_per_epoch = self._packing.rows_per_epoch

    def batch(self, step: int, start: int = 0, count: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets, int64 `[count, seq_len]` each: sequences `start` to `start + count` of the step's batch.

        The whole batch by default. Targets are the inputs one token later.
        """
        return self.weighted_batch(step, start, count)[:2]

    def weighted_batch(self, step: int, start: int = 0, count: int | None = None) -> Batch:
        """`batch`, what each target weighs in the loss, and where documents begin."""
        windows, weights = zip(
            *(self._read_sequence(number) for number in self._get_sequence_numbers(step, start, count)), strict=True
        )
        inputs, targets = _split_inputs_and_targets(np.stack(windows))
        heavy = None if weights[0] is None else torch.from_numpy(np.stack(weights)[:, 1:].copy())
        if self._separator is None:
            return Batch(inputs, targets, heavy)
        documents = locate_documents(inputs.numpy(), self._separator)
        return Batch(inputs, targets, torch.ones(targets.shape) if heavy is None else heavy, documents)

    def find_documents(self, step: int) -> Documents | None:
        """Where documents begin in all rows of the step, as `weighted` says it; nothing is planted to find out."""
        if self._separator is None:
            return None
        rows = map(self._get_row, self._get_sequence_numbers(step, 0, None))
        return locate_documents((self._packing.read_window(row)[:-1] for row in rows), self._separator)

    @functools.cached_property
    def max_documents_per_row(self) -> int:
        """The most that any row can hold, of all rows of the text."""
        return self._packing.count_max_documents()

    def count_document_lengths(self) -> Mapping[int, int]:
        """How many documents of each length the rows of the first epoch hold, parts of documents included; without padding.

        Rows that are read as one text count as one document.
        """
        return (
            {self.seq_len: 1} if self._separator is None else self._packing.count_document_lengths(self._make_epoch_key(0))
        )

    def summarize_packing(self) -> dict[str, Any]:
        """Of the first epoch: rows, documents, how many of them are cut, and how many tokens are padding."""
        return self._packing.summarize(self._make_epoch_key(0))

    def get_text_positions(self, step: int, start: int = 0, count: int | None = None) -> list[int]:
        """The first token of each of those sequences, as an index into the tokens."""
        return [self._packing.get_position(self._get_row(n)) for n in self._get_sequence_numbers(step, start, count)]

    def _get_sequence_numbers(self, step: int, start: int, count: int | None) -> range:
        """The sequences of all steps are numbered through."""
        count = self.sequences_per_step - start if count is None else count
        if step < 0 or start < 0 or count < 1 or start + count > self.sequences_per_step:
            raise ValueError(
                f"batch(step={step}, start={start}, count={count}): "
                f"a step is 0 or more and has {self.sequences_per_step} sequences"
            )
        first = step * self.sequences_per_step + start
        return range(first, first + count)

    def get_epoch(self, step: int) -> int:
        """How often the text had been read when `step` began."""
        return step * self.sequences_per_step // self.windows_per_epoch

    def compute_hash(self, step: int) -> str:
        """Sixteen hex digits over the tokens of the global batch, for a diagnosis."""
        digest = hashlib.sha256()
        for number in self._get_sequence_numbers(step, 0, None):
            digest.update(self._read_sequence(number)[0].astype("<i8").tobytes())
        return digest.hexdigest()[:16]

    def make_eval_batches(self, n_windows: int, batch_size: int) -> EvalBatches:
        """The same tokens as `EvalBatches`: fixed windows, in order, for validation."""
        return EvalBatches(self._tokens, self.seq_len, n_windows, batch_size, self._separator)

    def _read_sequence(self, sequence: int) -> tuple[np.ndarray, np.ndarray | None]:
        """The window of a sequence, int64 [T + 1], and what its tokens weigh, float32 [T + 1]."""
        row = self._get_row(sequence)
        window, weights = self._packing.read_window(row), self._packing.get_weights(row)
        if self._inserter is None:
            return window, weights
        window, planted = self._inserter(window, sequence)
        return window, planted if weights is None else planted * weights

    def _get_row(self, sequence: int) -> int:
        epoch, index = divmod(sequence, self.windows_per_epoch)
        return self._packing.get_row(index, self._make_epoch_key(epoch))

    def _make_epoch_key(self, epoch: int) -> str:
        return f"{self._seed}:{epoch}"


class EvalBatches(Sequence):
    """`windows` fixed, disjoint windows of `tokens`, fewer if the tokens hold fewer, `at_once` in a batch.

    The tokens are cut into as many equal stretches, and the first window of each is taken: every document has a part in
    proportion to its length. What is read depends on the tokens, `seq_len` and `windows` alone; `at_once` groups it.
    Item i is (inputs, targets), int64 `[<= at_once, seq_len]`; only the last may be smaller, so weight by rows. With a
    `separator`, `documents` says where documents begin in them.
    """

    def __init__(
        self, tokens: TokenStore, seq_len: int, n_windows: int, batch_size: int, separator: int | None = None
    ) -> None:
        check_length(tokens, seq_len)
        self._tokens = tokens
        self._separator = separator
        self._seq_len = seq_len
        self._batch_size = batch_size
        self._n_available = (len(tokens) - 1) // seq_len
        self.n_windows = min(n_windows, self._n_available)

    def __len__(self) -> int:
        return -(-self.n_windows // self._batch_size)

    @functools.cached_property
    def identity(self) -> str:
        """Sixteen hex digits over the text: equal for equal tokens in equal windows, however they are grouped."""
        digest = hashlib.sha256()
        for window in range(self.n_windows):
            digest.update(self._tokens.read(self._get_position(window), self._seq_len + 1).astype("<i8").tobytes())
        return digest.hexdigest()[:16]

    def find_documents(self, inputs: torch.Tensor) -> Documents | None:
        """Where documents begin in the inputs of an item; None where rows are read as one text."""
        return None if self._separator is None else locate_documents(inputs.numpy(), self._separator)

    def _get_position(self, window: int) -> int:
        return window * self._n_available // self.n_windows * self._seq_len

    # One batch at a time: a slice of batches would hold them all in memory.
    def __getitem__(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, index: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"evaluation batch {index} of {len(self)}")
        return _read_windows(
            self._tokens, [self._get_position(window) for window in self.get_window_range(index)], self._seq_len
        )

    def get_window_range(self, index: int) -> range:
        """The windows of a batch, numbered from 0 in the order in which they stand in the text."""
        first = index * self._batch_size
        return range(first, min(first + self._batch_size, self.n_windows))


def _read_windows(tokens: TokenStore, positions: list[int], seq_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    return _split_inputs_and_targets(np.stack([tokens.read(position, seq_len + 1) for position in positions]))


def _split_inputs_and_targets(windows: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of windows that are one token longer."""
    both = torch.from_numpy(windows)
    return both[:, :-1].contiguous(), both[:, 1:].contiguous()
