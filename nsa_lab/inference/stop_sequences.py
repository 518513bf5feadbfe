"""What ends a prompt's generation: token ids, or sequences of tokens spelled as text or bytes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Stop = int | str | bytes | Iterable[int | str | bytes]


class StopSequences:
    """The ends that `stop` names, for a model of `vocab_size` tokens. Raises ValueError for an empty or impossible one.

    A token id ends a generation as soon as it is drawn; text (its UTF-8 bytes) and bytes do once the generated tokens end
    with them. `bytewise` says whether the model's tokens are bytes; only then can a stop be spelled.
    """

    def __init__(self, stop: Stop | None, *, vocab_size: int, is_byte_model: bool) -> None:
        given = (
            []
            if stop is None
            else list(stop)
            if isinstance(stop, Iterable) and not isinstance(stop, str | bytes)
            else [stop]
        )
        self._sequences = [_encode_stop(one, vocab_size, is_byte_model) for one in given]

    def is_reached(self, tokens: Sequence[int]) -> bool:
        """Whether the tokens drawn so far end with one of them."""
        return any(list(tokens[-len(end) :]) == end for end in self._sequences)


def _encode_stop(stop: int | str | bytes, vocab_size: int, is_byte_model: bool) -> list[int]:
    if isinstance(stop, int) and not isinstance(stop, bool):
        if not 0 <= stop < vocab_size:
            raise ValueError(f"stop = {stop}: the model has tokens 0..{vocab_size - 1}; give one of them")
        return [stop]
    if not isinstance(stop, str | bytes):
        raise ValueError(f"stop: expected a token id, a text or bytes, or a list of these, got {type(stop).__name__}")
    if not is_byte_model:
        raise ValueError(f"stop = {stop!r}: this model's tokens are not bytes; give token ids of its own tokenizer")
    if not stop:
        raise ValueError(f"stop = {stop!r}: every text ends with nothing; give at least one character, or None for no stop")
    return list(stop.encode("utf-8") if isinstance(stop, str) else stop)
