"""Padded batches, packed by their mask and unpacked, equal separate rows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from looping import looped
from torch import Tensor

from nsa_lab.attention import pack_padded, unpack_padded
from nsa_lab.config import ModelConfig, NSAConfig
from nsa_lab.model import NSATransformer, NSAttention

LENGTHS = (9, 0, 23, 1)
NSA = NSAConfig(l=4, d=2, l_sel=4, n_sel=3, w=5)


def make_mask(side: str) -> Tensor:
    """Return a mask [4, 23] with padding on one side or anywhere."""
    mask = torch.zeros(4, 23, dtype=torch.bool)
    for row, length in zip(mask, LENGTHS, strict=True):
        row[:length] = True
        if side == "left":
            row.copy_(row.flip(0))
        elif side == "anywhere":
            row.copy_(row[torch.randperm(23, generator=torch.Generator().manual_seed(length))])
    return mask


@pytest.mark.parametrize("side", ["right", "left", "anywhere"])
def test_a_padded_batch_equals_its_rows(side: str) -> None:
    """Outputs and gradients of the input; padding has no effect and no gradient."""
    torch.manual_seed(0)
    layer = NSAttention(24, 4, 2, nsa=NSA).double()
    mask, x = make_mask(side), torch.randn(4, 23, 24, dtype=torch.float64)
    padded, separate = x.clone(), x.clone().requires_grad_()
    padded[~mask] = float("nan")
    padded.requires_grad_()
    packed, span = pack_padded(padded, mask)
    assert packed.shape == (1, sum(LENGTHS), 24) and span.bounds == (0, 9, 9, 32, 33)
    out = unpack_padded(layer(packed, span), mask)
    expected = torch.zeros_like(out)
    for number in (0, 2, 3):
        expected[number, mask[number]] = layer(separate[number : number + 1, mask[number]])[0]
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
    assert (out[~mask] == 0).all()
    grads = [torch.autograd.grad(y.square().sum(), at)[0] for y, at in ((out, padded), (expected, separate))]
    torch.testing.assert_close(*grads, rtol=1e-9, atol=1e-9)
    assert (grads[0][~mask] == 0).all()


def test_token_ids_and_integer_masks_are_packed_too() -> None:
    config = ModelConfig(dim=16, n_layers=1, n_heads=2, n_kv_groups=1, d_k=4, d_v=4, nsa=NSA)
    model = NSATransformer(config, dtype=torch.float64, seed=0).double()
    mask = make_mask("right").long()
    tokens = torch.randint(256, (4, 23), generator=torch.Generator().manual_seed(0))
    packed, span = pack_padded(tokens, mask)
    logits = unpack_padded(model(packed, span), mask)
    for number, length in enumerate(LENGTHS):
        if length:
            torch.testing.assert_close(logits[number, :length], model(tokens[number : number + 1, :length])[0])
    assert torch.equal(unpack_padded(packed, mask), tokens * mask)


X, MASK = torch.zeros(4, 23, 2), make_mask("right")


@looped
@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: pack_padded(X, MASK[:3]), r"x \(4, 23, 2\) and mask \(3, 23\): expected x \[B, T, \.\.\.\] and mask"),
        (
            lambda: pack_padded(X, MASK.float()),
            r"expected bool \[B, T\], or integers 0 and 1.*; got torch.float32 \(4, 23\)",
        ),
        (lambda: pack_padded(X, MASK.long() * 7), r"got torch.int64 from 0 to 7"),
        (lambda: pack_padded(X, -MASK.long()), r"got torch.int64 from -1 to 0"),
        (lambda: pack_padded(X, MASK[..., None]), r"got torch.bool \(4, 23, 1\)"),
        (lambda: pack_padded(X, torch.zeros_like(MASK)), r"marks no token; drop a batch that is all padding"),
        (lambda: unpack_padded(X[:1], MASK), r"x \(1, 23, 2\) and a mask \(4, 23\) of 33 tokens: expected x \[1, tokens"),
        (lambda: unpack_padded(torch.zeros(2, 33), MASK), r"use the mask that packed it"),
    ],
)
def test_inconsistent_inputs_raise(call: Callable[[], object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()
