"""Tokens > t change no bit of the model's logits at <= t."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from looping import looped
from model_inputs import NGRAMS, VARIANTS, format_variant, make_config, make_tokens

from nsa_lab.model import NSATransformer

T = 67


def replace_future(tokens: torch.Tensor, last: int, vocabulary: int) -> torch.Tensor:
    changed = tokens.clone()
    changed[:, last + 1 :] = (changed[:, last + 1 :] + 1 + tokens[:, last + 1 :] % (vocabulary - 1)) % vocabulary
    return changed


@pytest.mark.slow
@looped
@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("precision", ["float64", "float32", "bf16 autocast"])
@pytest.mark.parametrize("variant", [*VARIANTS[::3], NGRAMS], ids=format_variant)
def test_logits_are_causal(variant: dict[str, str], precision: str, backend: str) -> None:
    config = make_config(**variant)
    model = NSATransformer(config, backend=backend, seed=0)
    if precision == "float64":
        model.double()
    context = torch.autocast("cpu", torch.bfloat16) if precision == "bf16 autocast" else nullcontext()
    tokens, cuts = make_tokens(config, T, batch=1), (0, 6, 7, 8, 10, 31, 32, 40, T - 2)
    # In one batch: the same text once per cut, and, in the same places, with another future after each.
    with torch.no_grad(), context:
        before = model(tokens.expand(len(cuts), -1))
        after = model(torch.cat([replace_future(tokens, last, config.vocab_size) for last in cuts]))
    for row, last in enumerate(cuts):
        assert torch.equal(before[row, : last + 1], after[row, : last + 1])
        assert not torch.equal(before[row, last + 1], after[row, last + 1])


@looped
@pytest.mark.parametrize("attention", ["nsa", "dense"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_no_gradient_flows_into_the_past_from_the_future(attention: str, checkpointing: bool) -> None:
    """d logits[t] / d embedding[s] is exactly 0 for s > t, and non-zero for s = t."""
    config = make_config(attention=attention)
    model = NSATransformer(config, seed=0)
    model.gradient_checkpointing = checkpointing
    caught = []
    model.embedding.register_forward_hook(lambda _, __, out: caught.append(out.requires_grad_()))
    logits = model(make_tokens(config, T))
    for t in (0, 7, 30, T - 1):
        (grad,) = torch.autograd.grad(logits[:, t].logsumexp(-1).sum(), caught[-1], retain_graph=True)
        assert (grad[:, t + 1 :] == 0).all() and (grad[:, t] != 0).any(-1).all()


@pytest.mark.parametrize("more", [{}, NGRAMS], ids=format_variant)
def test_sequences_of_a_batch_do_not_see_each_other(more: dict[str, int]) -> None:
    config = make_config(**more)
    model = NSATransformer(config, seed=0)
    tokens = make_tokens(config, T, batch=3)
    changed = tokens.clone()
    changed[1] = 0
    before, after = model(tokens), model(changed)
    assert torch.equal(before[[0, 2]], after[[0, 2]]) and not torch.equal(before[1], after[1])


@pytest.mark.parametrize("kind", ["reference", "torch", "dense"])
def test_a_prefix_equals_the_start_of_the_full_sequence(kind: str) -> None:
    """Decoding relies on this: a prefix has equal logits, for lengths around l, d, l_sel and w."""
    config = make_config(attention="dense" if kind == "dense" else "nsa", **NGRAMS)
    model = NSATransformer(config, backend="torch" if kind == "dense" else kind, dtype=torch.float64, seed=0).double()
    tokens = make_tokens(config, T)
    with torch.no_grad():
        whole = model(tokens)
        for length in (1, 7, 8, 9, 10, 11, 12, 13, 24, 25, 40, 63, 64):
            torch.testing.assert_close(model(tokens[:, :length]), whole[:, :length], rtol=1e-10, atol=1e-10)
