"""Batches with documents of given lengths, for steps without a data set."""

from __future__ import annotations

from itertools import accumulate

import torch

from nsa_lab.data import Batch

SEP = 255


def make_document_batch(lengths: list[list[int]], seed: int) -> Batch:
    """Return one row per list of document lengths; each document begins with a separator, and some tokens have weight 0."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(SEP, (len(lengths), sum(lengths[0]) + 1), generator=generator)
    rows = tuple(torch.tensor([*accumulate(row, initial=0)], dtype=torch.int32) for row in lengths)
    for row, bounds in enumerate(rows):
        tokens[row, bounds[:-1].long()] = SEP
    documents = torch.cat([bounds[:-1] + row * bounds[-1] for row, bounds in enumerate(rows)] + [rows[0][-1:] * len(rows)])
    weights = (torch.rand(tokens[:, 1:].shape, generator=generator) < 0.9).float()
    return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), weights, documents)
