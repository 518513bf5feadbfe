"""Temperature, top-k and top-p against their definitions, token by token."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from looping import looped

from nsa_lab.inference import Sampling

LOGITS = st.lists(st.floats(-9, 9, width=32), min_size=1, max_size=12)


def get_allowed_tokens(sampling: Sampling, logits: list[float]) -> set[int]:
    return set(sampling.compute_probabilities(torch.tensor(logits)).nonzero().flatten().tolist())


@pytest.mark.slow
@given(LOGITS, st.integers(1, 14))
def test_top_k_keeps_the_most_likely_tokens_and_ties(logits: list[float], k: int) -> None:
    floor = sorted(logits, reverse=True)[:k][-1]
    assert get_allowed_tokens(Sampling(1.0, top_k=k), logits) == {i for i, logit in enumerate(logits) if logit >= floor}


@pytest.mark.slow
@given(LOGITS, st.floats(0.01, 0.99), st.sampled_from([0.5, 1.0, 2.0]))
def test_top_p_keeps_the_smallest_sufficient_set(logits: list[float], top_p: float, temperature: float) -> None:
    scaled = [math.exp(logit / temperature) for logit in logits]
    p = [weight / sum(scaled) for weight in scaled]
    kept = get_allowed_tokens(Sampling(temperature, top_p=top_p), logits)
    mass = math.fsum(p[i] for i in kept)
    assert kept and mass >= top_p - 1e-5
    assert all(p[i] >= p[j] - 1e-6 for i in kept for j in range(len(p)) if j not in kept)
    assert len(kept) == 1 or mass - min(p[i] for i in kept) < top_p + 1e-5


def test_top_p_is_applied_after_top_k() -> None:
    logits = [math.log(p) for p in (0.4, 0.3, 0.2, 0.1)]
    # The first of the two tokens that top_k keeps has probability 4/7.
    assert get_allowed_tokens(Sampling(1.0, top_k=2, top_p=0.5), logits) == {0}
    assert get_allowed_tokens(Sampling(1.0, top_p=0.5), logits) == {0, 1}
    assert get_allowed_tokens(Sampling(1.0, top_p=1.0), [0.0, -80.0]) == {0, 1}
    # Reaching top_p exactly is enough.
    assert get_allowed_tokens(Sampling(1.0, top_p=0.5), [0.0, 0.0]) == {0}


def test_samples_follow_the_probabilities() -> None:
    p, n_samples, generator = (0.5, 0.3, 0.2), 4000, torch.Generator().manual_seed(0)
    logits = torch.tensor(p).log()
    counts = Counter(Sampling(1.0).sample(logits.expand(n_samples, -1), [generator] * n_samples))
    for token, expected in enumerate(p):
        # Four standard deviations.
        assert abs(counts[token] / n_samples - expected) < 4 * math.sqrt(expected * (1 - expected) / n_samples)


@given(LOGITS, st.sampled_from([0.25, 0.5, 1.0, 2.0, 8.0]))
def test_logits_are_divided_by_the_temperature(logits: list[float], temperature: float) -> None:
    weights = [math.exp(logit / temperature) for logit in logits]
    expected = torch.tensor([weight / sum(weights) for weight in weights])
    probabilities = Sampling(temperature).compute_probabilities(torch.tensor(logits))
    torch.testing.assert_close(probabilities, expected, rtol=1e-4, atol=1e-6)


def test_samples_follow_the_temperature() -> None:
    """The second of two tokens with odds 1 : e^2 is sampled with its probability, at low and high temperature."""
    logits, n_samples = torch.tensor([0.0, 2.0]), 2000
    for temperature in (0.5, 1.0, 4.0):
        generator, sampling = torch.Generator().manual_seed(0), Sampling(temperature)
        expected = 1 / (1 + math.exp(-2 / temperature))
        frequency = sum(sampling.sample(logits.expand(n_samples, -1), [generator] * n_samples)) / n_samples
        assert abs(frequency - expected) < 4 * math.sqrt(expected * (1 - expected) / n_samples)


def test_greedy_takes_the_lowest_id_of_equal_tokens() -> None:
    assert Sampling().sample(torch.tensor([[1.0, 3.0, 3.0], [2.0, 1.0, 2.0]]), [torch.Generator()] * 2) == [1, 0]


@looped
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_non_finite_logits_raise(value: float, temperature: float) -> None:
    with pytest.raises(ArithmeticError, match="not finite"):
        Sampling(temperature).sample(torch.tensor([[0.0, 0.0], [0.0, value]]), [torch.Generator()] * 2)


def test_top_k_of_all_but_one_token_excludes_the_least_likely() -> None:
    logits = torch.tensor([0.0, 2.0, -1.0, 1.0])
    assert Sampling(1.0, top_k=3).compute_probabilities(logits).gt(0).tolist() == [True, True, False, True]


def test_tiny_temperatures_select_the_most_likely_token() -> None:
    logits = torch.tensor([1.0, 3.0, 2.0])
    for temperature in (5e-324, 1e-300, 1e-45, 1e-38, 1e-6):
        assert Sampling(temperature).compute_probabilities(logits).tolist() == [0.0, 1.0, 0.0], temperature
