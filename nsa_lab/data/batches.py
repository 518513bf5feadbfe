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

from nsa_lab.data.documents import Documents, documents_of
from nsa_lab.data.rows import StreamRows, TextRows, check_length
from nsa_lab.data.shards import TokenStore

# A window of text, int64 [T + 1], and the number of its sequence -> the window with something planted into it, and what
# each token weighs in the loss, float32 [T + 1].
Planter = Callable[[np.ndarray, int], tuple[np.ndarray, np.ndarray]]


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
        planter: Planter | None = None,
        *,
        rows: TextRows | None = None,
        separator: int | None = None,
    ) -> None:
        self.seq_len = seq_len
        self.sequences_per_step = sequences_per_step
        self._tokens = tokens
        self._seed = seed
        self._planter = planter
        self._rows = rows or StreamRows(tokens, seq_len, separator)
        self._separator = separator
        self.windows_per_epoch = self._rows.per_epoch

    def batch(self, step: int, start: int = 0, count: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets, int64 `[count, seq_len]` each: sequences `start` to `start + count` of the step's batch.

        The whole batch by default. Targets are the inputs one token later.
        """
        return self.weighted(step, start, count)[:2]

    def weighted(self, step: int, start: int = 0, count: int | None = None) -> Batch:
        """`batch`, what each target weighs in the loss, and where documents begin."""
        windows, weights = zip(*(self._planted(number) for number in self._numbers(step, start, count)), strict=True)
        inputs, targets = _shifted(np.stack(windows))
        heavy = None if weights[0] is None else torch.from_numpy(np.stack(weights)[:, 1:].copy())
        if self._separator is None:
            return Batch(inputs, targets, heavy)
        documents = documents_of(inputs.numpy(), self._separator)
        return Batch(inputs, targets, torch.ones(targets.shape) if heavy is None else heavy, documents)

    def documents(self, step: int) -> Documents | None:
        """Where documents begin in all rows of the step, as `weighted` says it; nothing is planted to find out."""
        if self._separator is None:
            return None
        rows = map(self._row, self._numbers(step, 0, None))
        return documents_of((self._rows.window(row)[:-1] for row in rows), self._separator)

    @functools.cached_property
    def most_documents(self) -> int:
        """The most that any row can hold, of all rows of the text."""
        return self._rows.most_documents()

    def lengths(self) -> Mapping[int, int]:
        """How many documents of each length the rows of the first epoch hold, parts of documents included; without padding.

        Rows that are read as one text count as one document.
        """
        return {self.seq_len: 1} if self._separator is None else self._rows.lengths(self._key(0))

    def packing(self) -> dict[str, Any]:
        """Of the first epoch: rows, documents, how many of them are cut, and how many tokens are padding."""
        return self._rows.report(self._key(0))

    def positions(self, step: int, start: int = 0, count: int | None = None) -> list[int]:
        """The first token of each of those sequences, as an index into the tokens."""
        return [self._rows.position(self._row(n)) for n in self._numbers(step, start, count)]

    def _numbers(self, step: int, start: int, count: int | None) -> range:
        """The sequences of all steps are numbered through."""
        count = self.sequences_per_step - start if count is None else count
        if step < 0 or start < 0 or count < 1 or start + count > self.sequences_per_step:
            raise ValueError(
                f"batch(step={step}, start={start}, count={count}): "
                f"a step is 0 or more and has {self.sequences_per_step} sequences"
            )
        first = step * self.sequences_per_step + start
        return range(first, first + count)

    def epoch(self, step: int) -> int:
        """How often the text had been read when `step` began."""
        return step * self.sequences_per_step // self.windows_per_epoch

    def hash(self, step: int) -> str:
        """Sixteen hex digits over the tokens of the global batch, for a diagnosis."""
        digest = hashlib.sha256()
        for number in self._numbers(step, 0, None):
            digest.update(self._planted(number)[0].astype("<i8").tobytes())
        return digest.hexdigest()[:16]

    def eval_batches(self, windows: int, at_once: int) -> EvalBatches:
        """The same tokens as `EvalBatches`: fixed windows, in order, for validation."""
        return EvalBatches(self._tokens, self.seq_len, windows, at_once, self._separator)

    def _planted(self, sequence: int) -> tuple[np.ndarray, np.ndarray | None]:
        """The window of a sequence, int64 [T + 1], and what its tokens weigh, float32 [T + 1]."""
        row = self._row(sequence)
        window, weights = self._rows.window(row), self._rows.weights(row)
        if self._planter is None:
            return window, weights
        window, planted = self._planter(window, sequence)
        return window, planted if weights is None else planted * weights

    def _row(self, sequence: int) -> int:
        epoch, index = divmod(sequence, self.windows_per_epoch)
        return self._rows.row(index, self._key(epoch))

    def _key(self, epoch: int) -> str:
        return f"{self._seed}:{epoch}"


class EvalBatches(Sequence):
    """`windows` fixed, disjoint windows of `tokens`, fewer if the tokens hold fewer, `at_once` in a batch.

    The tokens are cut into as many equal stretches, and the first window of each is taken: every document has a part in
    proportion to its length. What is read depends on the tokens, `seq_len` and `windows` alone; `at_once` groups it.
    Item i is (inputs, targets), int64 `[<= at_once, seq_len]`; only the last may be smaller, so weight by rows. With a
    `separator`, `documents` says where documents begin in them.
    """

    def __init__(self, tokens: TokenStore, seq_len: int, windows: int, at_once: int, separator: int | None = None) -> None:
        check_length(tokens, seq_len)
        self._tokens = tokens
        self._separator = separator
        self._seq_len = seq_len
        self._at_once = at_once
        self._available = (len(tokens) - 1) // seq_len
        self.windows = min(windows, self._available)

    def __len__(self) -> int:
        return -(-self.windows // self._at_once)

    @functools.cached_property
    def identity(self) -> str:
        """Sixteen hex digits over the text: equal for equal tokens in equal windows, however they are grouped."""
        digest = hashlib.sha256()
        for window in range(self.windows):
            digest.update(self._tokens.read(self._position(window), self._seq_len + 1).astype("<i8").tobytes())
        return digest.hexdigest()[:16]

    def documents(self, inputs: torch.Tensor) -> Documents | None:
        """Where documents begin in the inputs of an item; None where rows are read as one text."""
        return None if self._separator is None else documents_of(inputs.numpy(), self._separator)

    def _position(self, window: int) -> int:
        return window * self._available // self.windows * self._seq_len

    # One batch at a time: a slice of batches would hold them all in memory.
    def __getitem__(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, index: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"evaluation batch {index} of {len(self)}")
        return _windows(self._tokens, [self._position(window) for window in self.of_batch(index)], self._seq_len)

    def of_batch(self, index: int) -> range:
        """The windows of a batch, numbered from 0 in the order in which they stand in the text."""
        first = index * self._at_once
        return range(first, min(first + self._at_once, self.windows))


def _windows(tokens: TokenStore, positions: list[int], seq_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    return _shifted(np.stack([tokens.read(position, seq_len + 1) for position in positions]))


def _shifted(windows: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of windows that are one token longer."""
    both = torch.from_numpy(windows)
    return both[:, :-1].contiguous(), both[:, 1:].contiguous()
