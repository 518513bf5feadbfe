"""Decoding with a cache gives the logits of a full forward pass, wherever blocks and windows begin and end."""

from __future__ import annotations

import pytest
import torch
from tiny_models import GEOMETRY, built, tiny

from nsa_lab.inference import Decoder

# Around every length that something begins or ends at: d, l, l_sel, w, n_sel * l_sel.
PREFILLS = (1, 3, 4, 7, 8, 9, 11, 12, 13, 16, 31, 32, 33, 47)
LENGTH = 48


@pytest.mark.parametrize(
    "variant",
    [
        {},
        {"nsa": GEOMETRY.model_copy(update={"phi": "mlp", "gate": "softmax"})},
        {"attention": "dense"},
        {"n_kv_groups": 1},
        {"n_kv_groups": 4},
        {"rotary_share": 0.5, "matching_heads": 1},
        {"d_k": 8, "rotary_share": 0.5, "matching_heads": 1, "selection_loss": 0.1, "indexer_block": 1},
        {"d_k": 8, "selection_loss": 0.1, "indexer_block": 2, "nsa": GEOMETRY.model_copy(update={"phi": "mlp"})},
        {"rotary_share": 0.5, "matching_heads": 2, "attention": "dense"},
    ],
)
def test_token_by_token_equals_full_forward(variant: dict) -> None:
    model = built(tiny(**variant))
    tokens = torch.randint(0, 37, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    full = model(tokens)
    for prefill in PREFILLS if not variant else (1, 9, 33):
        decoder = Decoder(model, LENGTH, batch=2)
        parts = [decoder.append(tokens[:, :prefill]), decoder.append(tokens[:, prefill:])]
        torch.testing.assert_close(torch.cat(parts, 1), full, rtol=0, atol=1e-10)


def test_a_decoder_that_is_full_says_so() -> None:
    decoder = Decoder(built(tiny(n_layers=1)), 4)
    with pytest.raises(ValueError, match="5 tokens do not fit into a decoder of capacity 4"):
        decoder.append(torch.zeros(1, 5, dtype=torch.int64))
