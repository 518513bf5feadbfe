"""Tokens that follow prompts. `_drawn` is the one place where a model is asked for the next token."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from nsa_lab.config import BYTE_VOCAB_SIZE
from nsa_lab.inference.decode import MAX_PREFILL_TOKENS, Decoder
from nsa_lab.inference.sampling import Sampling
from nsa_lab.inference.stop_sequences import Stop, StopSequences
from nsa_lab.model import NSATransformer


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
    """The new tokens of each prompt, in the order of `prompts`: int64 [n], n <= `max_new_tokens`, without the prompt.

    prompts: a list of token ids, int64 [T] with T >= 1, or of texts, of any lengths. Text is read as its UTF-8 bytes, with
        nothing added, so it needs a model whose tokens are bytes (`vocab_size` 256, as `nsa-lab` trains by default); for
        another, encode it with the run's own tokenizer (`nsa_lab.data.load_tokenizer`). Text is answered in tokens too:
        `bytes(new.tolist()).decode(errors="replace")` reads them. Answers lie where their prompts do; to texts, on the CPU.
    temperature, top_k, top_p: as `Sampling` has them; temperature 0, the default, takes the likeliest token.
    seed: makes the result a function of the arguments alone. The draws of every prompt begin with it, so they do not depend
        on the other prompts, and the same prompt twice is continued twice alike; for several continuations of one prompt,
        call with several seeds. None: draws follow torch's global generator.
    stop: a token id, a text or bytes, or a list of these; the first to come ends the generation of its prompt and is itself
        the end of what is returned. Only new tokens are searched. None: every prompt gets `max_new_tokens`.
    stream: called as `stream(index of the prompt, token)` as soon as a token is drawn. Prompts that fit together are read
        together, and are given a token each in turn.

    Raises ValueError for an argument that cannot be used, before anything is computed, and ArithmeticError for logits that
    are not finite.
    """
    vocab_size = model.config.vocab_size
    if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, int) or max_new_tokens < 1:
        raise ValueError(f"max_new_tokens = {max_new_tokens!r}: expected a whole number from 1 up")
    if seed is not None and not (isinstance(seed, int) and -(2**63) <= seed < 2**63):
        raise ValueError(f"seed = {seed!r}: expected a whole number of 64 bits, or None for draws of torch's own")
    if stream is not None and not callable(stream):
        raise ValueError(f"stream: expected a function of a prompt's index and a token, got {type(stream).__name__}")
    sampling = Sampling(temperature, top_k, top_p)
    stops = StopSequences(stop, vocab_size=vocab_size, is_byte_model=vocab_size == BYTE_VOCAB_SIZE)
    read = [_encode_prompt(prompt, index, vocab_size) for index, prompt in enumerate(_check_prompt_list(prompts))]
    answers: list[list[int]] = [[] for _ in read]
    for at, batch in _batch_prompts(read, max_new_tokens):
        for row, token in _sample_tokens(model, batch, max_new_tokens, sampling, seed, stops=stops):
            answers[at + row].append(token)
            if stream is not None:
                stream(at + row, token)
    return [
        torch.tensor(answer, dtype=torch.int64, device=prompt.device) for answer, prompt in zip(answers, read, strict=True)
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
    """`count` tokens that follow `prompt`, int64 [T], each as soon as it is drawn; `seed` as in `generate`.

    Ids from `drawable` on, which pad a model's vocabulary beyond its tokenizer's, are never drawn. Raises ArithmeticError
    for logits that are not finite.
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
    """The number of a prompt and its next token, a token of every prompt that goes on in turn."""
    generators = [_make_generator(seed, sampling) for _ in prompts]
    lengths = [len(prompt) for prompt in prompts]
    decoder = Decoder(model, max(lengths) + count, len(prompts))
    logits = decoder.last(pad_sequence([prompt.cpu() for prompt in prompts], batch_first=True), lengths)
    answers: list[list[int]] = [[] for _ in prompts]
    going = list(range(len(prompts)))
    while True:
        told = logits[:, :sampled_vocab_size].float().cpu()
        for row in going:
            answers[row].append(sampling.sample(told[row], generators[row]))
            yield row, answers[row][-1]
        going = [row for row in going if len(answers[row]) < count and not (stops and stops.is_reached(answers[row]))]
        if not going:
            return
        # Those that have ended go on unheard: the batch keeps its shape, and nothing has to be moved.
        logits = decoder.last(torch.tensor([[answer[-1]] for answer in answers]))


def _batch_prompts(prompts: Sequence[Tensor], count: int) -> Iterator[tuple[int, Sequence[Tensor]]]:
    """Neighbouring prompts that are read together, and the number of the first."""
    at = 0
    while at < len(prompts):
        end, longest = at + 1, len(prompts[at])
        while end < len(prompts):
            longest = max(longest, len(prompts[end]))
            if (end + 1 - at) * (longest + count) > MAX_PREFILL_TOKENS:
                break
            end += 1
        yield at, prompts[at:end]
        at = end


def _make_generator(seed: int | None, sampling: Sampling) -> torch.Generator:
    if seed is None and sampling.temperature > 0:
        seed = int(torch.randint(2**63 - 1, ()))
    return torch.Generator().manual_seed(seed or 0)


def _check_prompt_list(prompts: Sequence[Tensor | str]) -> Sequence[Tensor | str]:
    if isinstance(prompts, Tensor | str | bytes) or not isinstance(prompts, Sequence):
        raise ValueError(f"prompts: expected a list of prompts, got one {type(prompts).__name__}; write [prompt]")
    if not len(prompts):
        raise ValueError("prompts: the list is empty; give at least one prompt")
    return prompts


def _encode_prompt(prompt: Tensor | str, index: int, vocab_size: int) -> Tensor:
    """The ids of a prompt, int64 [T], T >= 1, all below `vocab_size`; or ValueError."""
    if isinstance(prompt, str):
        if vocab_size != BYTE_VOCAB_SIZE:
            raise ValueError(
                f"prompts[{index}] is text, which is read as bytes, and this model has {vocab_size} tokens, not 256; "
                "encode it with the run's tokenizer (nsa_lab.data.load_tokenizer) and give int64 tokens"
            )
        prompt = torch.tensor(list(prompt.encode("utf-8")), dtype=torch.int64)
    if not isinstance(prompt, Tensor):
        raise ValueError(f"prompts[{index}]: expected an int64 tensor [T] or text, got {type(prompt).__name__}")
    if prompt.dtype != torch.int64 or prompt.ndim != 1:
        raise ValueError(f"prompts[{index}]: expected an int64 tensor [T], got {prompt.dtype} {tuple(prompt.shape)}")
    if not len(prompt):
        raise ValueError(f"prompts[{index}]: the prompt is empty; give at least one token, for example a newline")
    if prompt.min() < 0 or prompt.max() >= vocab_size:
        raise ValueError(
            f"prompts[{index}]: tokens lie in {int(prompt.min())}..{int(prompt.max())}, and the model has "
            f"0..{vocab_size - 1}; encode the prompt with this model's own tokenizer"
        )
    return prompt
