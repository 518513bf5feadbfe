"""Check the loss of initial weights against its distribution, which follows from the initialization of the head.

The head's weights are independent of the hidden states, with standard deviation 1/dim, and a hidden state has an RMS of 1
after the last norm. So the logits of a token are normal with standard deviation s = dim ** -0.5, whatever the layers before
compute, and

* the mean over the vocabulary of exp(logit) is exp(s^2 / 2): the expected loss is ln V + s^2 / 2, with any targets.
* If p is the distribution of the targets, the mean logit of the targets has a standard deviation of at most
  s * sqrt(sum p^2), reached if all hidden states are equal. That of the loss is then at most the same.
* The sum of squares over the vocabulary has a relative standard deviation of at most sqrt(2 / V), so that of s is
  1 / sqrt(2 V).

Targets are independent of the logits too, so the loss cannot show that they are not the inputs one token later. That is
compared directly.
"""

from __future__ import annotations

import math

import torch

from nsa_lab.config import ModelConfig
from nsa_lab.data import Batch
from nsa_lab.train.build import TrainContext, force_eager
from nsa_lab.train.guard import PreflightCheck
from nsa_lab.train.packing import make_span
from nsa_lab.train.step import sum_token_losses

NAME = "initial_loss"
DEVIATIONS = 5.0  # standard deviations from the expected value: one healthy run in a million is outside
PRECISION = 0.01  # relative error of a standard deviation in bfloat16
EMBEDDING_VARIANCE = 0.02**2  # of `initialize_weights`


@torch.no_grad()
def check_initial_loss(context: TrainContext) -> PreflightCheck:
    """Check loss, standard deviation of the logits, and targets of the first held-out batch. Collective."""
    inputs, targets = context.evaluations[0][0]
    if not torch.equal(targets[:, :-1], inputs[:, 1:]):
        text = "the targets are not the inputs one token later"
        return PreflightCheck(NAME, False, text, "targets that are the inputs one token later")
    span = make_span(context.evaluations[0].find_documents(inputs), inputs.shape[1])
    with context.stepper.use_stage(context.config.train.plan[0]), force_eager():
        computed = context.stepper.compute_logits(context.model, Batch(inputs, targets), span)
        n_groups = context.world.size // context.stepper.context_size
    variances = computed.logits.float().var(-1, correction=0)
    sums = torch.stack([sum_token_losses(computed.logits, computed.targets), variances.sum()])
    # Every group of ranks that share sequences computes the whole batch.
    loss, variance = (context.world.all_reduce(sums) / n_groups / targets.numel()).tolist()
    model = context.config.model
    if context.config.train.initial_weights:
        expected = math.log(model.vocab_size)
        return PreflightCheck(NAME, loss < expected, f"{loss:.4f}", f"below {expected:.4f} (ln V): pretrained weights")
    expected, tolerance = compute_expected_loss(model, targets)
    low, high = compute_logit_bounds(model)
    return PreflightCheck(
        NAME,
        abs(loss - expected) <= tolerance and low <= math.sqrt(variance) <= high,
        f"{loss:.4f}; standard deviation of the logits {math.sqrt(variance):.3f}",
        f"{expected:.4f} (ln V + s^2/2) ± {tolerance:.4f}; s from {low:.3f} to {high:.3f}",
    )


def compute_expected_loss(model: ModelConfig, targets: torch.Tensor) -> tuple[float, float]:
    """Return the expected initial loss in nats per token, and the largest deviation from it, for int64 targets [B, T]."""
    shares = targets.flatten().bincount().double() / targets.numel()
    deviation = float(shares.square().sum().sqrt()) * model.dim**-0.5
    return math.log(model.vocab_size) + 0.5 / model.dim, DEVIATIONS * deviation


def compute_logit_bounds(model: ModelConfig) -> tuple[float, float]:
    """Return the lowest and the highest standard deviation of the initial logits.

    The epsilon of the norms lowers it, most if the hidden states are as small as the embeddings.
    """
    deviation, relative = model.dim**-0.5, DEVIATIONS / math.sqrt(2 * model.vocab_size) + PRECISION
    smallest = 1.0 if model.embedding_norm else EMBEDDING_VARIANCE
    lowest = deviation * math.sqrt(smallest / (smallest + model.norm_eps))
    return lowest * (1 - relative), deviation * (1 + relative)
