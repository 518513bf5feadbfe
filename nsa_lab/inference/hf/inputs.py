"""Padding masks and packed documents, as `transformers` passes them, and what `NSATransformer` takes instead."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from nsa_lab.attention import Span
from nsa_lab.attention.input_checks import check_tensors
from nsa_lab.attention.segment_ops import find_documents_of_rows
from nsa_lab.attention.selection_loss import sample_rows

TENSOR_ARGUMENTS = ("input_ids", "inputs_embeds", "attention_mask", "position_ids", "labels", "shift_labels")
# Error for the positions that `generate` passes after padding at the end of a row, where the caller rotates by them.
PADDED_AT_END = (
    "attention_mask: expected padding before the tokens of each prompt, got padding after them, whose position `generate` "
    "continues; pad on the left"
)


def check_tensor_arguments(arguments: Mapping[str, Any]) -> None:
    """Raise ValueError for one of `TENSOR_ARGUMENTS` that was passed to a model and is not a dense tensor."""
    check_tensors(**{name: arguments[name] for name in TENSOR_ARGUMENTS if arguments.get(name) is not None})


def slice_mask(mask: Tensor, n_rows: int, n_columns: int) -> Tensor | None:
    """Return the last `n_columns` columns of `mask`, or None if there is no padding. Raises ValueError for an invalid mask.

    Traced by torch.export or torch.compile, which must not read values, the mask is returned unchecked.
    """
    if mask.ndim != 2 or mask.shape[0] != n_rows or mask.shape[1] < n_columns:
        raise ValueError(
            f"attention_mask: expected [B, T] as input_ids {(n_rows, n_columns)}, or longer by the cached tokens, got "
            f"{tuple(mask.shape)}; masks [T, T] are not supported: separate documents with position_ids="
        )
    mask = mask[:, mask.shape[1] - n_columns :]
    if torch.compiler.is_compiling():
        return mask
    # One transfer for both: each generation step waits for it.
    is_valid, is_unpadded = torch.stack([(mask.eq(0) | mask.eq(1)).all(), mask.eq(1).all()]).tolist()
    if not is_valid:
        raise ValueError("attention_mask: expected 1 for a token and 0 for padding, got other values")
    return None if is_unpadded else mask


def check_flag(name: str, value: object) -> None:
    """Raise ValueError unless `value` is True, False or None: every text would count as True."""
    if value is not None and (isinstance(value, str) or value not in (True, False)):
        raise ValueError(f"{name} = {value!r}: expected True, False or None; pass it without quotation marks")


def check_item_count(value: Tensor | float | None) -> None:
    """Raise ValueError unless `num_items_in_batch` is None or a positive finite number. A tensor is read from its device.

    The loss is divided by it: 0 and NaN would end the training, and a negative number would train to a higher loss.
    """
    if value is None or torch.compiler.is_compiling():
        return
    number = value.sum().item() if isinstance(value, Tensor) else value
    if not (isinstance(number, Real) and 0 < number < math.inf):
        raise ValueError(
            f"num_items_in_batch = {number!r}: expected the number of labels in all micro-batches of the step, at least 1; "
            "omit it for a mean over the labels of this batch, and leave out batches in which every label is -100"
        )


def build_layout(
    inputs: Tensor, mask: Tensor | None, use_cache: bool, arguments: Mapping[str, Any], *, counts_padding: bool = False
) -> Span | None:
    """Return the layout given by `position_ids` in `arguments`: packed documents, or None for one text per row.

    Positions that count up by one from token to token may start anywhere: RoPE depends only on distances. Padding between
    tokens takes no position; what `generate` passes after padding at the end of a row is accepted (`find_continued`).
    `counts_padding`: the caller rotates by the positions; those that count up by one from column to column are accepted
    too, but not those that `generate` passes after padding at the end of a row.
    Raises ValueError for other positions, and if documents are separated only by another argument.
    """
    positions = arguments.get("position_ids")
    if positions is None:
        if other := [name for name in ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx") if arguments.get(name) is not None]:
            raise ValueError(f"{other[0]}: not supported alone; separate documents with position_ids= that restart at 0")
        return None
    n_rows, n_columns = inputs.shape[:2]
    if positions.ndim != 2 or positions.shape[0] not in (1, n_rows) or positions.shape[1] != n_columns:
        raise ValueError(
            f"position_ids: expected the shape of input_ids, {(n_rows, n_columns)}, got {tuple(positions.shape)}"
        )
    if torch.compiler.is_compiling():
        raise NotImplementedError(
            "position_ids: not supported by torch.export and torch.compile of the whole model, because documents are found "
            "from their values; omit them for one text per row, or compile the blocks (torch.compile of each Block)"
        )
    positions = positions.expand(n_rows, -1)
    counts_up, is_zero = positions.diff(dim=1).eq(1), positions.eq(0)
    # Each generation step has one column, and would wait for the GPU.
    is_continued = n_columns == 1 or bool(find_continued(positions, mask, with_restarts=not counts_padding).all())
    if is_continued or (counts_padding and bool(counts_up.all())):
        return None
    if mask is not None and bool(find_continued(positions, mask).all()):
        raise ValueError(PADDED_AT_END)
    if (
        n_rows > 1
        or mask is not None
        or use_cache
        or not (bool(is_zero[0, 0]) and bool((counts_up | is_zero[:, 1:]).all()))
    ):
        raise ValueError(
            "position_ids: expected positions that count up by one from token to token, without a step at padding or, in a "
            "single row without padding and cache, positions that restart at 0 for each document; omit them for one text "
            "per row"
        )
    starts = is_zero[0].nonzero().flatten().tolist()
    return Span.packed(torch.tensor([*starts, n_columns], dtype=torch.int32, device=inputs.device))


def compute_offsets(positions: Tensor, mask: Tensor | None) -> Tensor:
    """Return position minus index among the tokens of its row, int64 [B, T]: equal for all tokens that count up by one."""
    if mask is None:
        return positions - torch.arange(positions.shape[1], device=positions.device)
    return positions - (mask.to(positions.device).bool().cumsum(1) - 1)


def find_continued(positions: Tensor, mask: Tensor | None, *, with_restarts: bool = True) -> Tensor:
    """Return where a token continues the position of the token before it, bool [B, T]; True for padding and first tokens.

    After padding at the end of a prompt, `generate` counts from the position of the last column, 0 for padding: its first
    token has the position 1. This also counts as continued, `with_restarts`.
    """
    is_token = torch.ones_like(positions, dtype=torch.bool) if mask is None else mask.to(positions.device).bool()
    columns = torch.arange(positions.shape[1], device=positions.device)
    previous = pad(torch.where(is_token, columns, -1).cummax(1).values[:, :-1], (1, 0), value=-1)
    offsets = compute_offsets(positions, mask)
    is_same = (previous < 0) | (offsets == offsets.gather(1, previous.clamp_min(0)))
    is_continued = is_same | ~is_token
    if with_restarts:
        is_continued |= pad(~is_token[:, :-1] & positions[:, :-1].eq(0) & positions[:, 1:].eq(1), (1, 0))
    return is_continued


def find_end_offsets(positions: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the offsets of the first and of the last token of each row, int64 [B, 1]; 0 for a row of padding."""
    offsets = compute_offsets(positions, mask)
    if mask is None:
        return offsets[:, :1], offsets[:, -1:]
    mask = mask.to(positions.device).bool()
    first, last = find_ends(mask)
    is_text = mask.any(1, keepdim=True)
    return offsets.gather(1, first) * is_text, offsets.gather(1, last) * is_text


def find_ends(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the columns of the first and of the last token of each row of a mask [B, T], int64 [B, 1]."""
    is_token = mask.byte()
    return is_token.argmax(1, keepdim=True), mask.shape[1] - 1 - is_token.flip(1).argmax(1, keepdim=True)


def weigh_queries(
    is_label: Tensor, n_columns: int, n_queries: int | None, *, span: Span | None = None, n_tokens: Tensor | None = None
) -> Tensor:
    """Return the `query_weights` of `selection_loss` by which each text has the weight of its share of the labels.

    A text is a row, or a document of packed `span`. `is_label` [B, T]: where a label is predicted. The sampled queries of a
    text have equal weights, those at padding 0. `n_columns`, `n_queries`: number of queries per row, and of sampled ones;
    `n_tokens` [B]: tokens per row, at its beginning; None: all. The sum over micro-batches, each times its share of the
    labels, then does not depend on how texts are divided, if all queries are sampled or all rows have equal length.
    """
    rows = sample_rows(n_columns, n_queries, is_label.device)
    is_token = torch.ones(len(is_label), len(rows), dtype=torch.bool, device=rows.device)
    if n_tokens is not None:
        is_token = rows < n_tokens.to(rows.device)[:, None]
    if span is None:
        n_labels, n_sampled = is_label.sum(1, keepdim=True), is_token.sum(1, keepdim=True)
    else:
        bounds = torch.tensor(span.bounds, device=rows.device)
        document = find_documents_of_rows(rows, bounds)
        n_labels = pad(is_label[0].cumsum(0), (1, 0))[bounds].diff()[document]
        n_sampled = torch.searchsorted(rows, bounds).diff()[document]
    # All of these are integers. float64 would not run on MPS, and float32 rounds the weights in float64 models.
    dtype = torch.float32 if rows.device.type == "mps" else torch.float64
    return is_token * (n_labels.to(dtype) / (n_sampled.clamp_min(1) * is_label.sum().clamp_min(1)))


class PaddingPermutation:
    """Column order of a mask [B, T] per row, tokens first, and its inverse. `mask`: bool, True for a token."""

    def __init__(self, mask: Tensor) -> None:
        self.mask = mask.bool()
        self._indices = self.mask.logical_not().byte().argsort(dim=1, stable=True)
        # A column of padding has the index of the token before it, or of the first token.
        self._inverse = (self.mask.cumsum(1) - 1).clamp_min(0)

    @cached_property
    def counts(self) -> list[int]:
        """Number of tokens per row."""
        return [int(count) for count in self.mask.sum(1).tolist()]

    def apply(self, x: Tensor) -> Tensor:
        """Return x [B, T, ...] with the tokens of each row first."""
        return _gather_columns(x, self._indices)

    def restore(self, x: Tensor) -> Tensor:
        """Return x [B, n, ...] of at least the tokens of each row in the order of the mask, [B, T, ...].

        Padding repeats the token before it: `generate` takes the next token from the last column, also if it is padding.
        """
        return _gather_columns(x, self._inverse)


def _gather_columns(x: Tensor, indices: Tensor) -> Tensor:
    """Return x[b, indices[b, t], ...] of x [B, T] or [B, T, C]."""
    return x.gather(1, indices if x.ndim == 2 else indices[:, :, None].expand(-1, -1, x.shape[2]))
