"""Batches as a pure function of (seed, step).

Invariants
* `batch(step)` depends on the tokens, `seq_len`, `sequences_per_step`, `seed` and `step` alone: nothing to save, nothing to
  restore, and any division among ranks and micro-batches gives the same global batch.
* An epoch reads disjoint windows (the last token of one is the first input of its neighbour), each once, in an order given
  by a permutation that is computed, not stored; the next epoch shifts all windows by a new offset.
* What a planter makes of a window depends on the window and the number of its sequence alone.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence

import numpy as np
import torch

from nsa_lab.data.errors import DataError
from nsa_lab.data.shards import TokenStore

FEISTEL_ROUNDS = 4

# A window of text, int64 [T + 1], and the number of its sequence -> the window with something planted into it, and what
# each token weighs in the loss, float32 [T + 1].
Planter = Callable[[np.ndarray, int], tuple[np.ndarray, np.ndarray]]


class Batches:
    """Training windows of `tokens`, by `planter` if there is one. Raises `DataError` if the tokens do not fill one window
    of `seq_len` + 1."""

    def __init__(
        self, tokens: TokenStore, seq_len: int, sequences_per_step: int, seed: int, planter: Planter | None = None
    ) -> None:
        _check_length(tokens, seq_len)
        self.seq_len = seq_len
        self.sequences_per_step = sequences_per_step
        self._tokens = tokens
        self._seed = seed
        self._planter = planter
        # One window fewer than fit, so that every offset has the same number of windows.
        self.windows_per_epoch = max(1, (len(tokens) - seq_len) // seq_len)
        self._offsets = min(seq_len, len(tokens) - self.windows_per_epoch * seq_len)

    def batch(self, step: int, start: int = 0, count: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets, int64 `[count, seq_len]` each: sequences `start` to `start + count` of the step's batch.

        The whole batch by default. Targets are the inputs one token later.
        """
        inputs, targets, _ = self.weighted(step, start, count)
        return inputs, targets

    def weighted(
        self, step: int, start: int = 0, count: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """`batch`, and what each target weighs in the loss, float32 `[count, seq_len]`; None where all weigh alike."""
        numbers = self._numbers(step, start, count)
        if self._planter is None:
            return *_windows(self._tokens, [self._position(n) for n in numbers], self.seq_len), None
        planted, weights = zip(*(self._planter(self._window(n), n) for n in numbers), strict=True)
        return *_shifted(np.stack(planted)), torch.from_numpy(np.stack(weights)[:, 1:].copy())

    def positions(self, step: int, start: int = 0, count: int | None = None) -> list[int]:
        """The first token of each of those sequences, as an index into the tokens."""
        return [self._position(n) for n in self._numbers(step, start, count)]

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
            window = self._window(number)
            digest.update((self._planter(window, number)[0] if self._planter else window).astype("<i8").tobytes())
        return digest.hexdigest()[:16]

    def eval_batches(self, windows: int, at_once: int) -> EvalBatches:
        """The same tokens as `EvalBatches`: fixed windows, in order, for validation."""
        return EvalBatches(self._tokens, self.seq_len, windows, at_once)

    def _window(self, sequence: int) -> np.ndarray:
        return self._tokens.read(self._position(sequence), self.seq_len + 1)

    def _position(self, sequence: int) -> int:
        epoch, index = divmod(sequence, self.windows_per_epoch)
        key = f"{self._seed}:{epoch}"
        offset = _draw(key, "offset") % self._offsets
        return offset + permute(index, self.windows_per_epoch, key) * self.seq_len


class EvalBatches(Sequence):
    """`windows` fixed, disjoint windows of `tokens`, fewer if the tokens hold fewer, `at_once` in a batch.

    The tokens are cut into as many equal stretches, and the first window of each is taken: every document has a part in
    proportion to its length. What is read depends on the tokens, `seq_len` and `windows` alone; `at_once` groups it.
    Item i is (inputs, targets), int64 `[<= at_once, seq_len]`; only the last may be smaller, so weight by rows.
    """

    def __init__(self, tokens: TokenStore, seq_len: int, windows: int, at_once: int) -> None:
        _check_length(tokens, seq_len)
        self._tokens = tokens
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


def permute(index: int, size: int, key: str) -> int:
    """Where a random permutation of `range(size)`, named by `key`, sends `index`; in constant time and memory.

    A Feistel network permutes the least 4^k >= size numbers whatever its round function is; walking on from a result that
    is not below `size` until one is (fewer than four walks on average) leaves a permutation of `range(size)`.
    """
    half = max(1, -(-(size - 1).bit_length() // 2))
    mask = (1 << half) - 1
    while True:
        left, right = index >> half, index & mask
        for turn in range(FEISTEL_ROUNDS):
            left, right = right, left ^ (_draw(key, f"{turn}:{right}") & mask)
        index = left << half | right
        if index < size:
            return index


def _draw(key: str, what: str) -> int:
    """64 bits that look random and depend on the arguments alone."""
    return int.from_bytes(hashlib.blake2b(f"{key}:{what}".encode(), digest_size=8).digest(), "little")


def _windows(tokens: TokenStore, positions: list[int], seq_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    return _shifted(np.stack([tokens.read(position, seq_len + 1) for position in positions]))


def _shifted(windows: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of windows that are one token longer."""
    both = torch.from_numpy(windows)
    return both[:, :-1].contiguous(), both[:, 1:].contiguous()


def _check_length(tokens: TokenStore, seq_len: int) -> None:
    if len(tokens) < seq_len + 1:
        raise DataError(
            f"{len(tokens)} tokens do not hold one sequence of {seq_len} and its last target; "
            "give more text, or lower train.seq_len"
        )
