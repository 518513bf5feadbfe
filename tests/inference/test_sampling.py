"""What temperature, top-k and top-p leave to draw from, against the definitions spelled out one token at a time."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nsa_lab.inference import Sampling

LOGITS = st.lists(st.floats(-9, 9, width=32), min_size=1, max_size=12)


def get_allowed_tokens(sampling: Sampling, logits: list[float]) -> set[int]:
    return set(sampling.compute_probabilities(torch.tensor(logits)).nonzero().flatten().tolist())


@given(LOGITS, st.integers(1, 14))
def test_top_k_keeps_the_likeliest_and_their_equals(logits: list[float], k: int) -> None:
    floor = sorted(logits, reverse=True)[:k][-1]
    assert get_allowed_tokens(Sampling(1.0, top_k=k), logits) == {i for i, logit in enumerate(logits) if logit >= floor}


@given(LOGITS, st.floats(0.01, 0.99), st.sampled_from([0.5, 1.0, 2.0]))
def test_top_p_keeps_the_smallest_set_that_reaches_it(logits: list[float], top_p: float, temperature: float) -> None:
    scaled = [math.exp(logit / temperature) for logit in logits]
    p = [one / sum(scaled) for one in scaled]
    kept = get_allowed_tokens(Sampling(temperature, top_p=top_p), logits)
    mass = math.fsum(p[i] for i in kept)
    assert kept and mass >= top_p - 1e-5
    assert all(p[i] >= p[j] - 1e-6 for i in kept for j in range(len(p)) if j not in kept)
    assert len(kept) == 1 or mass - min(p[i] for i in kept) < top_p + 1e-5


def test_top_p_counts_what_top_k_left() -> None:
    logits = [math.log(p) for p in (0.4, 0.3, 0.2, 0.1)]
    # Of the two that top_k leaves the first has 4/7.
    assert get_allowed_tokens(Sampling(1.0, top_k=2, top_p=0.5), logits) == {0}
    assert get_allowed_tokens(Sampling(1.0, top_p=0.5), logits) == {0, 1}
    assert get_allowed_tokens(Sampling(1.0, top_p=1.0), [0.0, -80.0]) == {0, 1}
    # What reaches it exactly is enough.
    assert get_allowed_tokens(Sampling(1.0, top_p=0.5), [0.0, 0.0]) == {0}


def test_draws_follow_the_probabilities() -> None:
    p, draws, generator = (0.5, 0.3, 0.2), 4000, torch.Generator().manual_seed(0)
    logits = torch.tensor(p).log()
    found = Counter(Sampling(1.0).sample(logits, generator) for _ in range(draws))
    for token, expected in enumerate(p):
        # Four standard deviations.
        assert abs(found[token] / draws - expected) < 4 * math.sqrt(expected * (1 - expected) / draws)


@given(LOGITS, st.sampled_from([0.25, 0.5, 1.0, 2.0, 8.0]))
def test_logits_are_divided_by_the_temperature(logits: list[float], temperature: float) -> None:
    weights = [math.exp(logit / temperature) for logit in logits]
    expected = torch.tensor([weight / sum(weights) for weight in weights])
    found = Sampling(temperature).compute_probabilities(torch.tensor(logits))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_heat_evens_out_what_is_drawn() -> None:
    """Of two tokens that are 1 : e^2, the second is drawn as often as its share says, colder or warmer."""
    logits, draws = torch.tensor([0.0, 2.0]), 2000
    for temperature in (0.5, 1.0, 4.0):
        generator, sampling = torch.Generator().manual_seed(0), Sampling(temperature)
        expected = 1 / (1 + math.exp(-2 / temperature))
        found = sum(sampling.sample(logits, generator) for _ in range(draws)) / draws
        assert abs(found - expected) < 4 * math.sqrt(expected * (1 - expected) / draws)


def test_the_likeliest_is_the_lowest_among_equals() -> None:
    assert Sampling().sample(torch.tensor([1.0, 3.0, 3.0]), torch.Generator()) == 1


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_token_is_drawn_from_logits_that_are_not_finite(value: float, temperature: float) -> None:
    with pytest.raises(ArithmeticError, match="not finite"):
        Sampling(temperature).sample(torch.tensor([0.0, value]), torch.Generator())


def test_all_but_one_token_is_all_but_the_least_likely() -> None:
    logits = torch.tensor([0.0, 2.0, -1.0, 1.0])
    assert Sampling(1.0, top_k=3).compute_probabilities(logits).gt(0).tolist() == [True, True, False, True]
