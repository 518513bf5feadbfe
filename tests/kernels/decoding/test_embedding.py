"""Embeddings of new tokens and n-grams against the modules of the model."""

from __future__ import annotations

import pytest
import torch
from looping import looped

from nsa_lab.attention import kernels
from nsa_lab.config import ModelConfig
from nsa_lab.model.layers import rms_normalize
from nsa_lab.model.ngrams import HASH_CONSTANTS, NgramEmbedding

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LENGTHS = (0, 2, 47)  # no token before the new ones, fewer than an n-gram, more than the ring holds
RING = 12
STALE = -(10**12)  # in slots that must not be read


@looped
@pytest.mark.parametrize("n_new", [1, 3])
@pytest.mark.parametrize("norm_eps", [None, 1e-2])
def test_embeddings_equal_those_of_the_whole_text(n_new: int, norm_eps: float | None) -> None:
    config = ModelConfig(dim=40, vocab_size=37, ngrams=4, ngram_rows=97, ngram_width=5)
    torch.manual_seed(0)
    ngrams, embedding = NgramEmbedding(config).to(DEVICE), torch.randn(37, 40, device=DEVICE)
    text = torch.randint(37, (3, 60), device=DEVICE)
    latest = torch.full((3, RING), STALE, device=DEVICE)
    for b, length in enumerate(LENGTHS):
        for position in range(max(0, length - RING), length):
            latest[b, position % RING] = text[b, position]
    new = torch.stack([text[b, length : length + n_new] for b, length in enumerate(LENGTHS)])
    lengths = torch.tensor(LENGTHS, dtype=torch.int32, device=DEVICE)
    weights = embedding, ngrams.table.weight, ngrams.out.weight
    x = kernels.embed_ngrams(new, latest, lengths, *weights, ngrams.rows_per_length, HASH_CONSTANTS, norm_eps)
    expected = embedding[text] + ngrams(text)
    expected = expected if norm_eps is None else rms_normalize(expected, norm_eps)
    for b, length in enumerate(LENGTHS):
        torch.testing.assert_close(x[b], expected[b, length : length + n_new])
        assert [latest[b, (length + t) % RING] for t in range(n_new)] == new[b].tolist()
