"""Loss on held-out texts, recorded per part for paired comparison of runs.

A text is cut independently of the model, so part i of one evaluation is part i of every other evaluation.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nsa_lab.data import BestFitPacking, ByteTokenizer, Tokenizer, TokenStore
from nsa_lab.data.shards import get_token_dtype
from nsa_lab.data.sources.local import LocalSource
from nsa_lab.evaluate.document_loss import compute_token_losses, get_packed_row
from nsa_lab.evaluate.loss_by_position import split_into_ranges
from nsa_lab.model import NSATransformer


@dataclass(frozen=True)
class TextLoss:
    """Mean losses in nats per token, including separators; lists in the order of the text.

    `loss`: mean over all `tokens`, with each document scored separately (in parts of `length` if it is longer).
    `rows`: (tokens, loss) of each row of whole documents. `windows`: for each window of `length` tokens inside one
    document, the loss in each position range of `octaves`; `window_documents`: the index of that document.
    """

    identity: str
    documents: int
    tokens: int
    length: int
    loss: float
    rows: list[tuple[int, float]]
    octaves: list[tuple[int, int]]
    windows: list[list[float]]
    window_documents: list[int]


def read_text(path: str, tokenizer: Tokenizer | None = None) -> TokenStore:
    """Read the documents of a file, folder or glob (txt, jsonl, parquet). tokenizer: None: bytes.

    Raises `DataError` if that fails.
    """
    tokenizer = tokenizer or ByteTokenizer()
    dtype = get_token_dtype(tokenizer.vocab_size)
    separator = np.array([tokenizer.separator], dtype)
    source = LocalSource(path, label="text")
    documents = [tokenizer.encode(document.text).astype(dtype) for document in source.documents()]
    return TokenStore([np.concatenate([part for text in documents if len(text) for part in (text, separator)])])


def compute_text_digest(text: TokenStore) -> str:
    """Return the first 16 hex digits of the SHA-256 of a text."""
    return hashlib.sha256(text.read(0, len(text)).astype(np.uint8).tobytes()).hexdigest()[:16]


@torch.no_grad()
def measure_text_loss(model: NSATransformer, text: TokenStore, length: int) -> TextLoss:
    """Measure the loss of a byte model on all of `text` from `read_text`, in rows and windows of `length` tokens."""
    separator = ByteTokenizer().separator
    packed = BestFitPacking(text, length, separator)
    rows = [_score_row(model, packed, row, separator) for row in range(packed.rows_per_epoch)]
    tokens, ranges = sum(n_tokens for n_tokens, _ in rows), split_into_ranges(length)
    window_documents, windows = [], []
    for document, window in iterate_inner_windows(text, separator, length):
        losses = compute_token_losses(model, window)
        window_documents.append(document)
        windows.append([losses[first:last].mean().item() for first, last in ranges])
    loss = sum(n_tokens * mean for n_tokens, mean in rows) / tokens
    documents = len(text.find(separator))
    return TextLoss(compute_text_digest(text), documents, tokens, length, loss, rows, ranges, windows, window_documents)


def iterate_inner_windows(text: TokenStore, separator: int, length: int) -> Iterator[tuple[int, Tensor]]:
    """Yield the windows of `length` + 1 tokens inside each document, with the document index.

    The first window starts at the separator before the document. Windows overlap by one token, the last target of one and
    the first input of the next.
    """
    ends = text.find(separator)
    for document, (start, n_tokens) in enumerate(zip(np.append(-1, ends[:-1]), np.diff(ends, prepend=-1), strict=True)):
        for first in range(int(start), int(start) + int(n_tokens) // length * length, length):
            window_tokens = text.read(max(first, 0), length + 1 if first >= 0 else length)
            yield document, torch.from_numpy(window_tokens if first >= 0 else np.append(separator, window_tokens))


def _score_row(model: NSATransformer, packed: BestFitPacking, row: int, separator: int) -> tuple[int, float]:
    window, n_targets, span = get_packed_row(packed, row, separator)
    return n_targets, compute_token_losses(model, window, span)[:n_targets].mean().item()
