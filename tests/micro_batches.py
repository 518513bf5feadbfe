"""Divisions of a batch of two texts with 10 and 100 labels, and the gradients of a model of `transformers` for them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

N_LABELS = (10, 100)
LENGTH, SHORT_LENGTH = 101, 60  # of the texts in tokens; SHORT_LENGTH with padding and in packed documents

Call = dict[str, Tensor]


def list_divisions(tokens: Tensor) -> Iterator[tuple[str, Call, list[Call]]]:
    """Yield a name, the batch as one call, and the calls of its micro-batches. `tokens`: int64 [2, LENGTH].

    Micro-batches have the padding of the batch only in "rows".
    """
    labels = tokens.clone()
    for row, n_labels in zip(labels, N_LABELS, strict=True):
        row[:-n_labels] = -100
    yield (
        "rows",
        {"input_ids": tokens, "labels": labels},
        [{"input_ids": tokens[[i]], "labels": labels[[i]]} for i in (0, 1)],
    )
    texts = [(tokens[[0], -SHORT_LENGTH:], labels[[0], -SHORT_LENGTH:]), (tokens[[1]], labels[[1]])]
    parts = [{"input_ids": text, "labels": targets} for text, targets in texts]
    for side, rows in (("right", slice(0, SHORT_LENGTH)), ("left", slice(LENGTH - SHORT_LENGTH, LENGTH))):
        padded = {
            "input_ids": torch.zeros_like(tokens),
            "labels": torch.full_like(tokens, -100),
            "attention_mask": torch.zeros_like(tokens),
        }
        for name, value in {**parts[0], "attention_mask": 1}.items():
            padded[name][0, rows] = value
        for name, value in {**parts[1], "attention_mask": 1}.items():
            padded[name][1] = value
        yield f"{side} padding", padded, parts
    packed = {name: torch.cat([part[name] for part in parts], 1) for name in ("input_ids", "labels")}
    packed["labels"][0, SHORT_LENGTH] = -100  # no text predicts the beginning of the next one
    packed["position_ids"] = torch.cat([torch.arange(SHORT_LENGTH), torch.arange(LENGTH)])[None]
    yield "packed documents", packed, parts


def compute_gradients(model: Any, *calls: Call) -> dict[str, Tensor]:
    """Return the gradients of the weights, summed over the micro-batches of one optimizer step."""
    model.zero_grad()
    for call in calls:
        model(**call, num_items_in_batch=torch.tensor(sum(N_LABELS))).loss.backward()
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}


def check_gradients(model: Any, tokens: Tensor) -> None:
    """Check that a batch and its micro-batches have equal gradients. `model`: in float64, with an indexer.

    `transformers` computes shares of the labels and tables of RoPE in float32.
    """
    for name, batch, micro_batches in list_divisions(tokens):
        whole, split = compute_gradients(model, batch), compute_gradients(model, *micro_batches)
        assert any("indexer" in key and gradient.any() for key, gradient in whole.items()), name
        for key, gradient in whole.items():
            assert (split[key] - gradient).norm() <= 2e-6 * gradient.norm(), (name, key)
