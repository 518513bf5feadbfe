"""Generate tokens after prompts. All sampling goes through `_sample_tokens`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from nsa_lab.config import BYTE_VOCAB_SIZE
from nsa_lab.inference.decode import MAX_PREFILL_TOKENS, Decoder
from nsa_lab.inference.sampling import Sampling
from nsa_lab.model import NSATransformer

Stop = int | str | bytes | Iterable[int | str | bytes]


def generate(
    model: NSATransformer,
    prompts: Sequence[Tensor | str],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    stop: Stop | None = None,
    stream: Callable[[int, int], object] | None = None,
) -> list[Tensor]:
    """Return the new tokens of each prompt, in the order of `prompts`: int64 [n], n <= `max_new_tokens`.

    prompts: list of token ids, int64 [T] with T >= 1, or of texts, of any lengths. A text is encoded as its UTF-8 bytes
        without special tokens, so it needs a byte model (`vocab_size` 256, the default of `nsa-lab`). For another model,
        encode it with the run's tokenizer (`nsa_lab.data.load_tokenizer`). Results are always tokens; decode bytes with
        `bytes(new.tolist()).decode(errors="replace")`. A result is on the device of its prompt; for a text, on the CPU.
    temperature, top_k, top_p: see `Sampling`. The default, temperature 0, selects the most likely token.
    seed: makes the result depend only on the arguments. Every prompt uses its own generator with this seed, so its result
        does not depend on the other prompts, and equal prompts give equal results; for several continuations of a prompt,
        call with several seeds. None: derive the seeds from torch's global generator.
    stop: a token id, a text or bytes, or a list of these. Generation of a prompt ends with the first of them, which is
        included in the result. Only new tokens are searched. None: generate `max_new_tokens` for every prompt.
    stream: called as `stream(prompt_index, token)` for each sampled token. Prompts that fit in one batch are decoded
        together, one token each in turn.

    Raises ValueError for an invalid argument before any computation, and ArithmeticError for logits that are not finite.
    """
    vocab_size = model.config.vocab_size
    if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, int) or max_new_tokens < 1:
        raise ValueError(f"max_new_tokens = {max_new_tokens!r}: expected an integer >= 1")
    if seed is not None and not (type(seed) is int and -(2**63) <= seed < 2**63):
        raise ValueError(f"seed = {seed!r}: expected a 64-bit integer, or None for torch's global generator")
    if stream is not None and not callable(stream):
        raise ValueError(f"stream: expected a function of a prompt index and a token, got {type(stream).__name__}")
    sampling = Sampling(temperature, top_k, top_p)
    stops = StopSequences(stop, vocab_size=vocab_size, is_byte_model=vocab_size == BYTE_VOCAB_SIZE)
    encoded = [_encode_prompt(prompt, index, vocab_size) for index, prompt in enumerate(_check_prompt_list(prompts))]
    new_tokens: list[list[int]] = [[] for _ in encoded]
    for first, batch in _batch_prompts(encoded, max_new_tokens):
        for row, token in _sample_tokens(model, batch, max_new_tokens, sampling, seed, stops=stops):
            new_tokens[first + row].append(token)
            if stream is not None:
                stream(first + row, token)
    return [
        torch.tensor(tokens, dtype=torch.int64, device=prompt.device)
        for tokens, prompt in zip(new_tokens, encoded, strict=True)
    ]


def generate_tokens(
    model: NSATransformer,
    prompt: Tensor,
    count: int,
    sampling: Sampling,
    seed: int | None,
    *,
    sampled_vocab_size: int | None = None,
) -> Iterator[int]:
    """Yield `count` tokens after `prompt`, int64 [T], each as soon as it is sampled; `seed` as in `generate`.

    sampled_vocab_size: only ids below it are sampled. Larger ids pad the vocabulary of a model beyond its tokenizer's.
    Raises ArithmeticError for logits that are not finite.
    """
    return (
        token for _, token in _sample_tokens(model, [prompt], count, sampling, seed, sampled_vocab_size=sampled_vocab_size)
    )


def _sample_tokens(
    model: NSATransformer,
    prompts: Sequence[Tensor],
    count: int,
    sampling: Sampling,
    seed: int | None,
    *,
    sampled_vocab_size: int | None = None,
    stops: StopSequences | None = None,
) -> Iterator[tuple[int, int]]:
    """Yield (prompt index, next token), one token per unfinished prompt in turn."""
    generators = [_make_generator(seed, sampling) for _ in prompts]
    lengths = [len(prompt) for prompt in prompts]
    decoder = Decoder(model, max(lengths) + count, len(prompts))
    logits = decoder.last(pad_sequence([prompt.cpu() for prompt in prompts], batch_first=True), lengths)
    new_tokens: list[list[int]] = [[] for _ in prompts]
    unfinished = list(range(len(prompts)))
    while True:
        cpu_logits = logits.cpu()[unfinished, :sampled_vocab_size].float()
        sampled = sampling.sample(cpu_logits, [generators[row] for row in unfinished])
        for row, token in zip(unfinished, sampled, strict=True):
            new_tokens[row].append(token)
            yield row, token
        unfinished = [
            row for row in unfinished if len(new_tokens[row]) < count and not (stops and stops.is_reached(new_tokens[row]))
        ]
        if not unfinished:
            return
        # Finished prompts continue, but their tokens are not used: the batch keeps its shape and no tensor is moved.
        logits = decoder.last(torch.tensor([[tokens[-1]] for tokens in new_tokens]))


def _batch_prompts(prompts: Sequence[Tensor], count: int) -> Iterator[tuple[int, Sequence[Tensor]]]:
    """Yield batches of consecutive prompts, each with the index of its first prompt."""
    start = 0
    while start < len(prompts):
        end, max_length = start + 1, len(prompts[start])
        while end < len(prompts):
            max_length = max(max_length, len(prompts[end]))
            if (end + 1 - start) * (max_length + count) > MAX_PREFILL_TOKENS:
                break
            end += 1
        yield start, prompts[start:end]
        start = end


def _make_generator(seed: int | None, sampling: Sampling) -> torch.Generator:
    if seed is None and sampling.temperature > 0:
        seed = int(torch.randint(2**63 - 1, ()))
    return torch.Generator().manual_seed(seed or 0)


def _check_prompt_list(prompts: Sequence[Tensor | str]) -> Sequence[Tensor | str]:
    if isinstance(prompts, Tensor | str | bytes) or not isinstance(prompts, Sequence):
        raise ValueError(f"prompts: expected a list of prompts, got one {type(prompts).__name__}; use [prompt]")
    if not len(prompts):
        raise ValueError("prompts: expected at least one prompt, got an empty list")
    return prompts


def _encode_prompt(prompt: Tensor | str, index: int, vocab_size: int) -> Tensor:
    """Return the ids of a prompt, int64 [T], T >= 1, all below `vocab_size`. Raises ValueError otherwise."""
    if isinstance(prompt, str):
        if vocab_size != BYTE_VOCAB_SIZE:
            raise ValueError(
                f"prompts[{index}]: text needs a model with 256 tokens (bytes), and this model has {vocab_size}; "
                "encode it with the run's tokenizer (nsa_lab.data.load_tokenizer) and give int64 tokens"
            )
        try:
            prompt = torch.tensor(list(prompt.encode("utf-8")), dtype=torch.int64)
        except UnicodeEncodeError as error:
            raise ValueError(
                f"prompts[{index}]: expected text that UTF-8 can encode, got {error.object[error.start]!r} at position "
                f"{error.start}; remove it, or give bytes as int64 tokens"
            ) from None
    if not isinstance(prompt, Tensor):
        raise ValueError(f"prompts[{index}]: expected an int64 tensor [T] or text, got {type(prompt).__name__}")
    if prompt.dtype != torch.int64 or prompt.ndim != 1:
        raise ValueError(f"prompts[{index}]: expected an int64 tensor [T], got {prompt.dtype} {tuple(prompt.shape)}")
    if not len(prompt):
        raise ValueError(f"prompts[{index}]: expected at least one token, got an empty prompt; give for example a newline")
    if prompt.min() < 0 or prompt.max() >= vocab_size:
        raise ValueError(
            f"prompts[{index}]: expected tokens in 0..{vocab_size - 1}, got {int(prompt.min())}..{int(prompt.max())}; "
            "encode the prompt with the tokenizer of this model"
        )
    return prompt


class StopSequences:
    """Stop sequences for a model of `vocab_size` tokens. Raises ValueError for an empty or impossible one.

    A token id ends generation when it is sampled; a text (its UTF-8 bytes) or bytes when the new tokens end with it.
    is_byte_model: the tokens of the model are bytes. Only then may a stop sequence be text or bytes.
    """

    def __init__(self, stop: Stop | None, *, vocab_size: int, is_byte_model: bool) -> None:
        stops = (
            []
            if stop is None
            else list(stop)
            if isinstance(stop, Iterable) and not isinstance(stop, str | bytes)
            else [stop]
        )
        self._sequences = [_encode_stop(item, vocab_size, is_byte_model) for item in stops]

    def is_reached(self, tokens: Sequence[int]) -> bool:
        """Return True if `tokens` end with a stop sequence."""
        return any(list(tokens[-len(sequence) :]) == sequence for sequence in self._sequences)


def _encode_stop(stop: int | str | bytes, vocab_size: int, is_byte_model: bool) -> list[int]:
    if isinstance(stop, int) and not isinstance(stop, bool):
        if not 0 <= stop < vocab_size:
            raise ValueError(f"stop = {stop}: expected a token in 0..{vocab_size - 1}")
        return [stop]
    if not isinstance(stop, str | bytes):
        raise ValueError(f"stop: expected a token id, a text or bytes, or a list of these, got {type(stop).__name__}")
    if not is_byte_model:
        raise ValueError(f"stop = {stop!r}: the tokens of this model are not bytes; give token ids of its tokenizer")
    if not stop:
        raise ValueError(f"stop = {stop!r}: expected at least one character, or None for no stop sequence")
    return list(stop.encode("utf-8") if isinstance(stop, str) else stop)
