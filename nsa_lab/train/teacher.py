"""The teacher of a conversion: the pretrained weights with dense attention, whose predictions the model learns from.

Invariants
* The teacher never changes and has no gradients. It is not part of a checkpoint: every attempt loads it from
  `train.initial_weights` again, and a resumed run checks that its fingerprint is the same.
* No float32 tensor of the divergence has more than `CHUNK_NUMBERS` numbers, however many tokens and words there are.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from nsa_lab.config import RuntimeConfig
from nsa_lab.model import NSATransformer

CHUNK_NUMBERS = 1 << 26  # 256 MiB in float32
FLOAT32_TENSORS_PER_CHUNK = 6  # both distributions, their temporary copies, and the gradient


def make_teacher(model: NSATransformer, runtime: RuntimeConfig) -> NSATransformer:
    """Return a frozen copy of `model` with dense attention, on its device, in evaluation mode; without indexers.

    model: dense, or with the selected branch only, and with its initial weights.
    """
    weights, config = model.state_dict(), model.config.model_copy(update={"attention": "dense"})
    dtype = torch.bfloat16 if runtime.precision == "bf16" else torch.float32
    with torch.device("meta"):
        teacher = NSATransformer(config, backend=runtime.backend, device=model.head.weight.device, dtype=dtype)
    own = {name: weights[name].clone() for name in teacher.state_dict()}
    teacher.load_state_dict(own, assign=True)
    return teacher.requires_grad_(False).eval()


def compute_fingerprint(model: NSATransformer) -> str:
    """Return 16 hex digits that depend on every weight of the model, bit by bit."""
    digest = hashlib.sha256()
    for name, weight in model.state_dict().items():
        digest.update(f"{name} {weight.dtype} {tuple(weight.shape)}\n".encode())
        digest.update(weight.detach().cpu().contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()[:16]


def sum_kl_divergence(logits: Tensor, teacher_logits: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return KL(teacher || model) in nats, summed over tokens, 0-d, for logits [B, T, V] of both.

    weights: weights of the tokens, float32 [B, T]; None: 1. Computed in float32 in chunks of tokens, and again in the
    backward pass, so that only one chunk at a time is in memory.
    """
    n_rows = max(CHUNK_NUMBERS // logits.shape[-1], 1)
    token_weights = torch.ones_like(logits[..., 0], dtype=torch.float32) if weights is None else weights
    chunks = (x.flatten(0, 1).split(n_rows) for x in (logits, teacher_logits, token_weights.unsqueeze(-1)))
    # Recomputation draws no random numbers; a CUDA graph could not capture saving their state.
    sums = [
        checkpoint(_sum_chunk, *chunk, use_reentrant=False, preserve_rng_state=False) for chunk in zip(*chunks, strict=True)
    ]
    return torch.stack(sums).sum()


def _sum_chunk(logits: Tensor, teacher_logits: Tensor, weights: Tensor) -> Tensor:
    own, expected = (functional.log_softmax(_to_wide(x), dim=-1) for x in (logits, teacher_logits))
    return (functional.kl_div(own, expected, reduction="none", log_target=True).sum(-1) * weights[:, 0]).sum()


def _to_wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
