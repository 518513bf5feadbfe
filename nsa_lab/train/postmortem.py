"""The bundle that a halt leaves behind: which step, which data, which layer went wrong first.

The step is replayed forward and backward on the weights that it was taken from (a bad update was never applied), with
hooks that name the first module whose output is not finite.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nsa_lab.data import Batch
from nsa_lab.runs.atomic_io import write_json
from nsa_lab.train.build import TrainContext, force_eager
from nsa_lab.train.guard import Finding
from nsa_lab.train.packing import compute_logits, make_span
from nsa_lab.train.step import sum_token_losses
from nsa_lab.train.validation import compute_branch_statistics, compute_norms_by_layer


def collect_postmortem(context: TrainContext, finding: Finding, weights_step: int) -> dict[str, Any]:
    """What can be said about the finding's step: data, losses of its micro-batches, norms and statistics of the layers."""
    index = max(finding.step - 1, 0)
    stage = context.enter_stage(index + 1)
    start, count = context.world.get_sequence_share(stage.sequences_per_step)
    batch = context.batches.weighted_batch(index, start, count)
    losses, first_bad = _replay_step(context, batch)
    return {
        "rule": finding.rule,
        "step": finding.step,
        "value": repr(finding.value),
        "limit": repr(finding.limit),
        "text": finding.text,
        "weights_of_step": weights_step,
        "rank": context.world.rank,
        "batch_hash": context.batches.compute_hash(index),
        "batch_positions": context.batches.get_text_positions(index, start, count),
        "micro_batch_losses": losses,
        "first_non_finite_module": first_bad,
        "parameter_norms": _format_norms(context, compute_norms_by_layer(context.model, lambda p: p)),
        "gradient_norms": _format_norms(context, compute_norms_by_layer(context.model, lambda p: p.grad)),
        "statistics": {
            name: [repr(v) for v in value.tolist()] for name, value in compute_branch_statistics(context, batch).items()
        },
    }


def write_postmortem(run_dir: Path, finding: Finding, rank: int, bundle: dict[str, Any]) -> Path:
    """Write the bundle of one rank into `halt-<step>/`."""
    folder = run_dir / f"halt-{finding.step:08d}"
    folder.mkdir(exist_ok=True)
    name = "diagnosis.json" if rank == 0 else f"diagnosis-rank{rank}.json"
    write_json(folder / name, bundle)
    return folder


def _replay_step(context: TrainContext, batch: Batch) -> tuple[list[str], str | None]:
    context.optimizer.zero_grad(set_to_none=True)
    losses = []
    with force_eager(), _collect_non_finite_modules(context.model) as first_bad:
        for part in context.stepper.split_micro_batches(batch):
            tokens = part.targets.numel()
            with context.stepper.autocast():
                logits = compute_logits(context.model, part.inputs.to(context.device), make_span(part.documents))
            loss = sum_token_losses(logits, part.targets.to(context.device)) / tokens
            losses.append(repr(loss.item()))
            share = loss * tokens / context.stepper.stage.tokens_per_step
            (share + context.stepper.compute_auxiliary_loss(tokens)).backward()
    return losses, first_bad[0] if first_bad else None


@contextmanager
def _collect_non_finite_modules(model: nn.Module) -> Iterator[list[str]]:
    """Collects the names of modules whose output is not finite, in the order in which they ran."""
    bad: list[str] = []

    def hook(name: str) -> Any:
        def look(module: nn.Module, inputs: Any, output: Any) -> None:
            parts = output if isinstance(output, tuple) else (output,)
            if any(isinstance(part, Tensor) and not torch.isfinite(part).all() for part in parts):
                bad.append(name or "model")

        return look

    handles = [module.register_forward_hook(hook(name)) for name, module in model.named_modules()]
    try:
        yield bad
    finally:
        for handle in handles:
            handle.remove()


def _format_norms(context: TrainContext, norms: dict[str, Tensor]) -> dict[str, str]:
    return {layer: repr(context.world.full_tensor(norm).item()) for layer, norm in norms.items()}
