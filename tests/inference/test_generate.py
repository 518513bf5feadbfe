"""Generation: greedy decoding equals the argmax of full forward passes; batches equal single prompts; errors."""

from __future__ import annotations

import importlib
import math

import pytest
import torch
from looping import looped
from tiny_models import build_model, tiny_config
from torch import Tensor

from nsa_lab.inference import Decoder, generate
from nsa_lab.inference.generate import StopSequences
from nsa_lab.model import NSATransformer

# Shorter than a compression block, around block boundaries, longer than all selected tokens.
LENGTHS = (1, 5, 8, 17, 40)
VARIANTS = [{}, {"attention": "dense"}]


def make_prompts(lengths: tuple[int, ...] = LENGTHS, vocab_size: int = 37) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(0, vocab_size, (length,), generator=generator) for length in lengths]


def generate_by_full_passes(model: NSATransformer, prompt: Tensor, n: int) -> Tensor:
    tokens = prompt
    for _ in range(n):
        tokens = torch.cat([tokens, model(tokens[None])[0, -1].argmax()[None]])
    return tokens[len(prompt) :]


@pytest.fixture(params=VARIANTS, ids=["nsa", "dense"])
def model(request: pytest.FixtureRequest) -> NSATransformer:
    return build_model(tiny_config(**request.param))


@pytest.fixture
def byte_model() -> NSATransformer:
    return build_model(tiny_config(vocab_size=256, n_layers=1))


@pytest.mark.slow
def test_greedy_equals_argmax_of_full_forward_passes(model: NSATransformer) -> None:
    prompts = make_prompts()
    results = generate(model, prompts, max_new_tokens=12)
    for prompt, new in zip(prompts, results, strict=True):
        assert new.dtype == torch.int64
        assert torch.equal(new, generate_by_full_passes(model, prompt, 12))
    top_1 = generate(model, prompts, max_new_tokens=12, temperature=3.0, top_k=1, seed=9)
    tiny_top_p = generate(model, prompts, max_new_tokens=12, temperature=3.0, top_p=1e-9, seed=9)
    tiny_temperature = generate(model, prompts, max_new_tokens=12, temperature=1e-42, seed=9)
    for i, new in enumerate(results):
        assert torch.equal(new, top_1[i]) and torch.equal(new, tiny_top_p[i]) and torch.equal(new, tiny_temperature[i])


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_batched_prompts_equal_single_prompts(model: NSATransformer, temperature: float) -> None:
    prompts = make_prompts((17, 1, 40, 17))
    prompts.append(prompts[0])
    whole = generate(model, prompts, max_new_tokens=9, temperature=temperature, seed=4)
    for prompt, new in zip(prompts, whole, strict=True):
        assert torch.equal(new, generate(model, [prompt], max_new_tokens=9, temperature=temperature, seed=4)[0])


def test_prompts_are_split_into_batches(model: NSATransformer, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, sizes = make_prompts((17, 1, 40, 17, 5, 90)), []
    together = generate(model, prompts, max_new_tokens=9, temperature=1.5, seed=4)
    module = importlib.import_module("nsa_lab.inference.generate")

    class CountingDecoder(Decoder):
        def __init__(self, model: NSATransformer, capacity: int, batch: int) -> None:
            sizes.append((capacity, batch))
            super().__init__(model, capacity, batch)

    monkeypatch.setattr(module, "Decoder", CountingDecoder)
    monkeypatch.setattr(module, "MAX_PREFILL_TOKENS", 98)
    streamed: list[tuple[int, int]] = []
    in_batches = generate(
        model,
        prompts,
        max_new_tokens=9,
        temperature=1.5,
        seed=4,
        stream=lambda index, token: streamed.append((index, token)),
    )
    assert sizes == [(26, 2), (49, 2), (14, 1), (99, 1)]
    for index, (expected, actual) in enumerate(zip(together, in_batches, strict=True)):
        assert (
            torch.equal(expected, actual)
            and [token for prompt_index, token in streamed if prompt_index == index] == actual.tolist()
        )


@pytest.mark.slow
def test_results_depend_only_on_the_seed() -> None:
    model, prompts = build_model(tiny_config()), make_prompts()

    def sample(seed: int | None) -> list[list[int]]:
        return [new.tolist() for new in generate(model, prompts, max_new_tokens=12, temperature=1.0, seed=seed)]

    torch.manual_seed(0)
    first = sample(3)
    torch.manual_seed(1)
    assert sample(3) == first != sample(4)
    torch.manual_seed(7)
    unseeded = sample(None)
    assert sample(None) != unseeded
    torch.manual_seed(7)
    assert sample(None) == unseeded


def test_seeded_and_greedy_generation_do_not_use_the_global_generator() -> None:
    model, before = build_model(tiny_config(n_layers=1)), torch.get_rng_state()
    generate(model, make_prompts((3,)), max_new_tokens=4, temperature=1.0, seed=1)
    generate(model, make_prompts((3,)), max_new_tokens=4)
    assert torch.equal(before, torch.get_rng_state())


def test_text_prompts_equal_byte_prompts(byte_model: NSATransformer) -> None:
    as_bytes = torch.tensor(list("né".encode()))
    by_text, by_tokens = generate(byte_model, ["né", as_bytes], max_new_tokens=6, temperature=1.0, seed=1)
    assert by_text.dtype == torch.int64 and torch.equal(by_text, by_tokens)


def test_every_token_is_streamed_when_it_is_sampled(model: NSATransformer) -> None:
    streamed: list[tuple[int, int]] = []
    prompts = make_prompts((3, 9))
    results = generate(model, prompts, max_new_tokens=5, stream=lambda index, token: streamed.append((index, token)))
    assert streamed == [
        (index, token) for tokens in zip(*map(Tensor.tolist, results), strict=True) for index, token in enumerate(tokens)
    ]

    def interrupt(index: int, token: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate(model, prompts, max_new_tokens=10**4, stream=interrupt)


def test_stop_token_ends_its_own_prompt(model: NSATransformer) -> None:
    prompts = make_prompts((3, 9, 20))
    free = [new.tolist() for new in generate(model, prompts, max_new_tokens=30, temperature=1.0, seed=2)]
    stop = free[0][4]
    stopped = generate(model, prompts, max_new_tokens=30, temperature=1.0, seed=2, stop=[stop, free[1][7]])
    for new, whole in zip(stopped, free, strict=True):
        ends = [i for i, token in enumerate(whole) if token in (stop, free[1][7])]
        assert new.tolist() == whole[: ends[0] + 1 if ends else None]


def test_stop_text(byte_model: NSATransformer) -> None:
    (free,) = generate(byte_model, ["ab"], max_new_tokens=20, temperature=1.0, seed=2)
    pair = bytes(free[6:8].tolist())
    end = bytes(free.tolist()).index(pair) + 2
    for stop in (pair, [b"never sampled", pair]):
        (new,) = generate(byte_model, ["ab"], max_new_tokens=20, temperature=1.0, seed=2, stop=stop)
        assert torch.equal(new, free[:end])
    # Text that the prompt ends with stops nothing: only new tokens are searched.
    assert len(generate(byte_model, ["ab"], max_new_tokens=3, stop="ab")[0]) == 3


def test_stop_texts_of_three_bytes_and_more(byte_model: NSATransformer) -> None:
    (free,) = generate(byte_model, ["ab"], max_new_tokens=30, temperature=1.0, seed=2)
    text = bytes(free.tolist())
    for length in (3, 4, 5, 9):
        stop = text[11 : 11 + length]
        end = text.index(stop) + length
        # The same beginning with another last byte, and the same end with another first byte, stop nothing.
        others = [stop[:-1] + bytes([stop[-1] ^ 1]), bytes([stop[0] ^ 1]) + stop[1:], stop + b"\0" * 3, b"\0" * 3 + stop]
        assert not any(other in text for other in others)
        (new,) = generate(byte_model, ["ab"], max_new_tokens=30, temperature=1.0, seed=2, stop=[*others, stop])
        assert torch.equal(new, free[:end])
        (new,) = generate(byte_model, ["ab"], max_new_tokens=30, temperature=1.0, seed=2, stop=others)
        assert torch.equal(new, free)


def test_long_stop_texts_match_only_in_full() -> None:
    for stop in (b"abc", b"abcd", b"aab", "\u20ac".encode(), b"</answer>", b"aaaa"):
        stops = StopSequences(stop, vocab_size=256, is_byte_model=True)
        assert stops.is_reached(list(stop)) and stops.is_reached(list(b"x" + stop))
        assert not stops.is_reached(list(stop + b"x")) and not stops.is_reached([])
        for position in range(len(stop)):
            wrong = bytearray(stop)
            wrong[position] ^= 1
            assert not stops.is_reached(list(wrong)), (stop, position)
            assert not stops.is_reached(list(stop[:position])), (stop, position)
            assert position == 0 or stop == b"aaaa" or not stops.is_reached(list(stop[position:])), (stop, position)


def test_stop_text_matches_only_in_full() -> None:
    stops = StopSequences([b"ab", 7], vocab_size=256, is_byte_model=True)
    expected = {b"ab": True, b"xab": True, b"b": False, b"bb": False, b"a": False, b"abx": False, b"": False, b"x\7": True}
    assert {text: stops.is_reached(list(text)) for text in expected} == expected
    accented = StopSequences("\u00e9", vocab_size=256, is_byte_model=True)
    assert accented.is_reached(list("n\u00e9".encode())) and not accented.is_reached([0xE9])


@looped
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompts": []}, "expected at least one prompt, got an empty list"),
        ({"prompts": "text"}, r"expected a list of prompts, got one str; use \[prompt\]"),
        ({"prompts": torch.zeros(3, dtype=torch.int64)}, "got one Tensor"),
        ({"prompts": [torch.zeros(0, dtype=torch.int64)]}, r"prompts\[0\]: expected at least one token"),
        ({"prompts": ["a", ""]}, r"prompts\[1\]: expected at least one token"),
        ({"prompts": [torch.zeros(3)]}, r"expected an int64 tensor \[T\], got torch.float32 \(3,\)"),
        ({"prompts": [torch.zeros(3, dtype=torch.int32)]}, "got torch.int32"),
        ({"prompts": [torch.zeros(1, 3, dtype=torch.int64)]}, r"got torch.int64 \(1, 3\)"),
        ({"prompts": [[1, 2]]}, "expected an int64 tensor .* or text, got list"),
        ({"prompts": [torch.tensor([3, 256])]}, r"expected tokens in 0..255, got 3..256"),
        ({"prompts": [torch.tensor([-1])]}, r"got -1..-1"),
        ({"max_new_tokens": 0}, "max_new_tokens = 0: expected an integer >= 1"),
        ({"max_new_tokens": 2.5}, "max_new_tokens = 2.5"),
        ({"max_new_tokens": True}, "max_new_tokens = True"),
        ({"prompts": None}, "expected a list of prompts, got one NoneType"),
        ({"seed": 2**64}, "seed = 18446744073709551616: expected a 64-bit integer"),
        ({"seed": 1.5}, "seed = 1.5"),
        ({"stream": 3}, "stream: expected a function"),
        ({"temperature": "hot"}, "temperature = 'hot'"),
        ({"top_k": 2.5}, "top_k = 2.5"),
        ({"top_p": "1"}, "top_p = '1'"),
        ({"stop": 1.5}, "stop: expected a token id"),
        ({"temperature": -0.1}, "temperature = -0.1"),
        ({"temperature": math.nan}, "temperature = nan"),
        ({"temperature": math.inf}, "temperature = inf"),
        ({"top_k": 0}, "top_k = 0: expected an integer >= 1"),
        ({"top_p": 0.0}, r"top_p = 0.0: expected a probability in \(0, 1\]"),
        ({"top_p": 1.1}, "top_p = 1.1"),
        ({"top_p": math.nan}, "top_p = nan"),
        ({"stop": 256}, r"stop = 256: expected a token in 0..255"),
        ({"stop": ["\n", ""]}, "stop = '': expected at least one character"),
        ({"stop": [1.5]}, "stop: expected a token id, a text or bytes, or a list of these, got float"),
        ({"prompts": ["a", "b\ud800"]}, r"prompts\[1\]: expected text that UTF-8 can encode, got '\\ud800' at position 1"),
        ({"temperature": True}, "temperature = True: expected a finite number"),
        ({"top_p": True}, "top_p = True: expected a probability"),
        ({"seed": True}, "seed = True: expected a 64-bit integer"),
    ],
)
def test_invalid_arguments_are_rejected_before_sampling(byte_model: NSATransformer, arguments: dict, message: str) -> None:
    def fail(index: int, token: int) -> None:
        raise AssertionError("a token was sampled")

    with pytest.raises(ValueError, match=message):
        generate(byte_model, **{"prompts": ["a"], "max_new_tokens": 3, "stream": fail, **arguments})


def test_text_needs_a_byte_model() -> None:
    model = build_model(tiny_config(n_layers=1))
    with pytest.raises(ValueError, match="this model has 37; encode it with the run's tokenizer"):
        generate(model, ["text"], max_new_tokens=1)
    with pytest.raises(ValueError, match="tokens of this model are not bytes"):
        generate(model, make_prompts((3,)), max_new_tokens=1, stop="\n")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_non_finite_logits_raise(temperature: float) -> None:
    model = build_model(tiny_config(n_layers=1))
    torch.nn.init.constant_(model.norm.weight, math.nan)
    with pytest.raises(ArithmeticError, match="the model's logits are not finite"):
        generate(model, make_prompts((3,)), max_new_tokens=1, temperature=temperature)
