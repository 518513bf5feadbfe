"""Parity check of a model's decode steps: logits through the cache against a full forward pass in float64."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nsa_lab.bench.decode_attention import compute_limit
from nsa_lab.config import ModelConfig
from nsa_lab.inference import Decoder
from nsa_lab.model import NSATransformer

N_STEPS = 16  # checked steps of one token per sequence; on a GPU the first is captured, and the others replay it
N_UNSELECTED = 500  # tokens of the longest sequence beyond those that a query can select


@torch.no_grad()
def check_model_parity(model: NSATransformer, backend: str) -> dict[str, Any]:
    """Return the error of the decode steps of `model` with `backend` of cached attention, its limit, and `passed`.

    Three sequences of one batch are checked separately: one longer than what a query selects, one whose blocks are all
    selected, and one of three tokens. Errors are root mean squares of logits, relative to a full forward pass in float64.
    The limit depends on the error of a full forward pass with the torch backend in the model's own dtype (`compute_limit`).
    Each pass selects its own blocks, so the limit of the longest sequence is wide in low precision. The sequence that uses
    the largest share of its limit is returned.
    """
    lengths = _choose_lengths(model.config)
    shape, generator = (len(lengths), max(lengths) + N_STEPS), torch.Generator().manual_seed(1)
    tokens = torch.randint(model.config.vocab_size, shape, generator=generator)
    exact = _compute_logits(_copy_model(model, torch.float64), tokens, lengths)
    plain = _compute_logits(_copy_model(model, next(model.parameters()).dtype), tokens, lengths)
    decoded = _decode_logits(model, tokens, lengths, backend)
    limits = [compute_limit(error) for error in _compute_relative_errors(plain, exact)]
    checked = list(zip(_compute_relative_errors(decoded, exact), limits, strict=True))
    # The comparison is written so that NaN is the worst and does not pass.
    error, limit = next(
        (pair for pair in checked if not pair[0] <= pair[1]), max(checked, key=lambda pair: pair[0] / pair[1])
    )
    return {"error": error, "limit": limit, "passed": error <= limit}


def _choose_lengths(config: ModelConfig) -> list[int]:
    """Return the tokens of each sequence before the checked steps."""
    n_selected = config.nsa.n_sel * config.nsa.l_sel
    return [n_selected + N_UNSELECTED, max(n_selected - N_STEPS, 3), 3]


def _copy_model(model: NSATransformer, dtype: torch.dtype) -> NSATransformer:
    """Return a copy in `dtype` whose attention is computed by the torch backend."""
    device = next(model.parameters()).device
    copied = NSATransformer(model.config, backend="torch", device=device, dtype=dtype, seed=0).to(dtype).eval()
    copied.load_state_dict(model.state_dict())
    return copied


def _compute_logits(model: NSATransformer, tokens: Tensor, lengths: list[int]) -> Tensor:
    """Return the logits of the checked steps from a forward pass per sequence, float64 [sequences, N_STEPS, V]."""
    device = next(model.parameters()).device
    logits = [
        model(row[None, : length + N_STEPS].to(device))[0, -N_STEPS:] for row, length in zip(tokens, lengths, strict=True)
    ]
    return torch.stack(logits).double()


def _decode_logits(model: NSATransformer, tokens: Tensor, lengths: list[int], backend: str) -> Tensor:
    """Return the same logits from a decoder: the tokens before as one prefill, then a step per token."""
    decoder = Decoder(model, max(lengths) + N_STEPS, len(lengths), backend=backend)
    decoder.last(tokens[:, : max(lengths)], lengths)
    positions = torch.tensor(lengths)[:, None]
    return torch.stack([decoder.last(tokens.gather(1, positions + i)) for i in range(N_STEPS)], dim=1).double()


def _compute_relative_errors(logits: Tensor, exact: Tensor) -> list[float]:
    """Return the relative error of each sequence."""
    return ((logits - exact).flatten(1).norm(dim=1) / exact.flatten(1).norm(dim=1)).tolist()
