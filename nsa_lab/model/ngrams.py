"""Embeddings of n-grams: what enters the first layer knows the last few tokens as a whole, and not the last one alone.

A byte says little. Of every token the 2, 3, ... n tokens that end with it are hashed into tables (hash n-gram embeddings:
Byte Latent Transformer, arXiv 2412.09871, section 3.2.1; over-encoding, arXiv 2501.16975). A table costs parameters and
hardly any products, so that a model of as many parameters is a quicker one.
Shape suffixes: B batch, T time, n the longest n-gram.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from nsa_lab.attention import geometry
from nsa_lab.config import ModelConfig

# A hash is a polynomial in _BASE, of the tokens plus 1, modulo 2**64; both numbers are odd and reach the high bits, which
# are folded into the low ones before and after _MIX.
_HASH_BASE, _HASH_MULTIPLIER, _HASH_SHIFT = 0x5851F42D4C957F2D, 0x2545F4914F6CDD1D, 32


class NgramEmbedding(nn.Module):
    """tokens int64 [B, T] -> [B, T, C]: a sum of maps of one looked-up row per n-gram length.

    Different n-grams of one length may share a row, as their hashes do. An n-gram that would begin before its document is
    the one of the tokens that there are.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.max_n, self.rows_per_length = config.ngrams, config.ngram_rows
        self.table = nn.Embedding((self.max_n - 1) * self.rows_per_length, config.ngram_width)
        self.out = nn.Linear((self.max_n - 1) * config.ngram_width, config.dim, bias=False)

    def forward(self, tokens: Tensor, positions: Tensor | None = None, previous_tokens: Tensor | None = None) -> Tensor:
        """`positions`: of tokens in their documents, int64 [T] or [B, T]; None: 0 .. T-1.

        before: the tokens before these, int64 [B, n - 1], of which those that positions rule out may be any; None: these
        are the first.
        """
        return self.out(self.table(self.compute_rows(tokens, positions, previous_tokens)).flatten(-2))

    def compute_rows(
        self, tokens: Tensor, positions: Tensor | None = None, previous_tokens: Tensor | None = None
    ) -> Tensor:
        """The rows of the table that are looked up, int64 [B, T, n - 1]."""
        reach = self.max_n - 1
        if positions is None:
            positions = geometry.positions(0, tokens.shape[1], tokens.device)
        seen = pad(tokens, (reach, 0)) if previous_tokens is None else torch.cat([previous_tokens, tokens], dim=1)
        back = geometry.positions(0, self.max_n, tokens.device)
        # Last first; 0 is none, so that what begins a document is no other n-gram.
        own = (seen + 1).unfold(1, self.max_n, 1).flip(-1) * (positions[..., None] >= back)
        # Made where they are used: a copy from the host could not be captured in a CUDA graph.
        powers = torch.full_like(back, _HASH_BASE).cumprod(0)
        told = (own * powers).cumsum(-1)[..., 1:]
        mixed = (told ^ (told >> _HASH_SHIFT)) * _HASH_MULTIPLIER
        return (mixed ^ (mixed >> _HASH_SHIFT)) % self.rows_per_length + self.rows_per_length * back[:-1]
