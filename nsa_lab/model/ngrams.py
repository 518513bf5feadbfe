"""N-gram embeddings: the input of the first layer also depends on the last few tokens together, not only on each token.

A single byte carries little information. For each token, the 2, 3, ... n tokens that end with it are hashed into embedding
tables (hash n-gram embeddings: Byte Latent Transformer, arXiv 2412.09871, section 3.2.1; over-encoding, arXiv 2501.16975).
A table adds parameters but almost no FLOPs, so a model with the same number of parameters is faster.

Shape suffixes: B batch, T time, n the longest n-gram.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from nsa_lab.attention import geometry
from nsa_lab.config import ModelConfig

# The hash is a polynomial in _HASH_BASE of the tokens plus 1, modulo 2**64. Both factors are odd and large, so that the
# high bits depend on all tokens. They are folded into the low bits before and after the multiplication with
# _HASH_MULTIPLIER.
HASH_CONSTANTS = _HASH_BASE, _HASH_MULTIPLIER, _HASH_SHIFT = 0x5851F42D4C957F2D, 0x2545F4914F6CDD1D, 32


class NgramEmbedding(nn.Module):
    """Sum of one projected table row per n-gram length: tokens int64 [B, T] -> [B, T, C].

    Different n-grams of one length can share a row, because of hash collisions. An n-gram that would start before its
    document consists of the tokens that exist.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.max_n, self.rows_per_length = config.ngrams, config.ngram_rows
        self.table = nn.Embedding((self.max_n - 1) * self.rows_per_length, config.ngram_width)
        self.out = nn.Linear((self.max_n - 1) * config.ngram_width, config.dim, bias=False)

    def forward(
        self,
        tokens: Tensor | None,
        positions: Tensor | None = None,
        previous_tokens: Tensor | None = None,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Return the embeddings, [B, T, C].

        `positions`: position of each token in its document, int64 [T] or [B, T]; None: 0 .. T-1. `previous_tokens`: the
        tokens before these, int64 [B, n - 1], arbitrary before position 0; None: the tokens start the sequence. `rows`: the
        result of `compute_rows`, instead of tokens.
        """
        if rows is None:
            assert tokens is not None, "either tokens or rows"
            rows = self.compute_rows(tokens, positions, previous_tokens)
        return self.out(self.table(rows).flatten(-2))

    def compute_rows(
        self, tokens: Tensor, positions: Tensor | None = None, previous_tokens: Tensor | None = None
    ) -> Tensor:
        """Return the table rows of all n-grams, int64 [B, T, n - 1]."""
        n_previous = self.max_n - 1
        if positions is None:
            positions = geometry.positions(0, tokens.shape[1], tokens.device)
        context = pad(tokens, (n_previous, 0)) if previous_tokens is None else torch.cat([previous_tokens, tokens], dim=1)
        offsets = geometry.positions(0, self.max_n, tokens.device)
        # Latest token first. 0 stands for no token, so n-grams at a document start hash differently.
        shifted = [context[:, n_previous - n : n_previous - n + tokens.shape[1]] for n in range(self.max_n)]
        window = (torch.stack(shifted, dim=-1) + 1) * (positions[..., None] >= offsets)
        # Computed on the device: a CUDA graph cannot capture a copy from the host.
        powers = torch.full_like(offsets, _HASH_BASE).cumprod(0)
        hashes = (window * powers).cumsum(-1)[..., 1:]
        scrambled = (hashes ^ (hashes >> _HASH_SHIFT)) * _HASH_MULTIPLIER
        return (scrambled ^ (scrambled >> _HASH_SHIFT)) % self.rows_per_length + self.rows_per_length * offsets[:-1]
