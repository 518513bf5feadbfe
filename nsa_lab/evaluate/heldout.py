"""Loss on texts of any kind, kept part by part: what two runs are compared by in pairs.

Every part of a text is read by every model in the same cut, so that part i of one evaluation is part i of another.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nsa_lab.data import BestFitPacking, ByteTokenizer, TokenStore
from nsa_lab.data.sources.local import LocalSource
from nsa_lab.evaluate.document_loss import compute_token_losses, get_packed_row
from nsa_lab.evaluate.loss_by_position import split_into_ranges
from nsa_lab.model import NSATransformer


@dataclass(frozen=True)
class TextLoss:
    """Mean losses in nats per token, separators included; lists in the order of the text.

    `loss` is that of all `tokens`, every document read by itself from its first token on (in parts of `length` where it is
    longer), and `rows` are the tokens and the loss of each row of whole documents that it was read in. `windows` has the
    loss in each of `octaves` of the position, of each window of `length` tokens that lies inside one document, and
    `window_documents` the number of that document.
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


def read_text(path: str) -> TokenStore:
    """The documents of a file, a folder or a glob of txt, jsonl or parquet, as bytes. Raises `DataError` if it cannot."""
    tokenizer = ByteTokenizer()
    end = np.array([tokenizer.separator], np.uint8)
    source = LocalSource(path, label="text")
    documents = [tokenizer.encode(document.text).astype(np.uint8) for document in source.documents()]
    return TokenStore([np.concatenate([part for text in documents if len(text) for part in (text, end)])])


def compute_text_digest(text: TokenStore) -> str:
    """Sixteen hex digits over a text's bytes."""
    return hashlib.sha256(text.read(0, len(text)).astype(np.uint8).tobytes()).hexdigest()[:16]


@torch.no_grad()
def measure_text_loss(model: NSATransformer, text: TokenStore, length: int) -> TextLoss:
    """Losses of a byte model on all of `text`, documents as `read_text` gives them, in rows and windows of `length`."""
    separator = ByteTokenizer().separator
    packed = BestFitPacking(text, length, separator)
    rows = [_score_row(model, packed, row, separator) for row in range(packed.rows_per_epoch)]
    tokens, edges = sum(count for count, _ in rows), split_into_ranges(length)
    numbers, windows = [], []
    for number, window in iterate_inner_windows(text, separator, length):
        losses = compute_token_losses(model, window)
        numbers.append(number)
        windows.append([losses[first:last].mean().item() for first, last in edges])
    loss = sum(count * mean for count, mean in rows) / tokens
    documents = len(text.find(separator))
    return TextLoss(compute_text_digest(text), documents, tokens, length, loss, rows, edges, windows, numbers)


def iterate_inner_windows(text: TokenStore, separator: int, length: int) -> Iterator[tuple[int, Tensor]]:
    """Windows of `length` + 1 tokens that lie inside a document, with its number.

    The first begins with the separator before the document; they overlap by one token, as inputs and targets of a text do.
    """
    ends = text.find(separator)
    for number, (begin, tokens) in enumerate(zip(np.append(-1, ends[:-1]), np.diff(ends, prepend=-1), strict=True)):
        for first in range(int(begin), int(begin) + int(tokens) // length * length, length):
            inside = text.read(max(first, 0), length + 1 if first >= 0 else length)
            yield number, torch.from_numpy(inside if first >= 0 else np.append(separator, inside))


def _score_row(model: NSATransformer, packed: BestFitPacking, row: int, separator: int) -> tuple[int, float]:
    window, filled, span = get_packed_row(packed, row, separator)
    return filled, compute_token_losses(model, window, span)[:filled].mean().item()
