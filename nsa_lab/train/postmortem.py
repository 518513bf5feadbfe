"""The diagnosis of a halted run: the step, its data, and the first layer that was not finite.

The step is replayed forward and backward on the weights before it (a bad update is never applied), with hooks that record
the first module whose output is not finite.
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
from nsa_lab.train.packing import make_span
from nsa_lab.train.step import sum_token_losses
from nsa_lab.train.validation import compute_branch_statistics, compute_norms_by_layer


def collect_postmortem(context: TrainContext, finding: Finding, weights_step: int) -> dict[str, Any]:
    """Return data, micro-batch losses, norms and layer statistics of the step of `finding`, as JSON values.

    If several ranks share each sequence, losses and gradients belong to the tokens of this rank. Collective.
    `weights_step`: the number of steps that the current weights have completed.
    """
    index = max(finding.step - 1, 0)
    stage = context.enter_stage(index + 1)
    start, n_sequences = context.world.get_sequence_share(stage.sequences_per_step)
    batch = context.batches.weighted_batch(index, start, n_sequences)
    losses, first_non_finite = _replay_step(context, batch)
    return {
        "rule": finding.rule,
        "step": finding.step,
        "value": repr(finding.value),
        "limit": repr(finding.limit),
        "text": finding.text,
        "weights_of_step": weights_step,
        "rank": context.world.rank,
        "batch_hash": context.batches.compute_hash(index),
        "batch_positions": context.batches.get_text_positions(index, start, n_sequences),
        "micro_batch_losses": losses,
        "first_non_finite_module": first_non_finite,
        "parameter_norms": _format_norms(context, compute_norms_by_layer(context.model, lambda parameter: parameter)),
        "gradient_norms": _format_norms(context, compute_norms_by_layer(context.model, lambda parameter: parameter.grad)),
        "statistics": {
            name: [repr(value) for value in values.tolist()]
            for name, values in compute_branch_statistics(context, batch).items()
        },
    }


def write_postmortem(run_dir: Path, finding: Finding, rank: int, bundle: dict[str, Any]) -> Path:
    """Write the diagnosis of one rank into `halt-<step>/`. Return that folder."""
    folder = run_dir / f"halt-{finding.step:08d}"
    folder.mkdir(exist_ok=True)
    name = "diagnosis.json" if rank == 0 else f"diagnosis-rank{rank}.json"
    write_json(folder / name, bundle)
    return folder


def _replay_step(context: TrainContext, batch: Batch) -> tuple[list[str], str | None]:
    context.optimizer.zero_grad(set_to_none=True)
    losses = []
    with force_eager(), _collect_non_finite_modules(context.model) as non_finite_modules:
        for micro_batch in context.stepper.split_micro_batches(batch):
            span = make_span(micro_batch.documents, micro_batch.inputs.shape[1])
            computed = context.stepper.compute_logits(context.model, micro_batch, span)
            loss = sum_token_losses(computed.logits, computed.targets)
            losses.append(repr(loss.item() / computed.targets.numel()))
            trained_loss, _ = context.stepper.add_teacher_kl(loss, computed, micro_batch, span)
            contribution = trained_loss / context.stepper.stage.tokens_per_step
            (contribution + context.stepper.compute_auxiliary_loss(micro_batch.targets.numel())).backward()
    return losses, non_finite_modules[0] if non_finite_modules else None


@contextmanager
def _collect_non_finite_modules(model: nn.Module) -> Iterator[list[str]]:
    """Collect the names of modules whose output is not finite, in execution order."""
    names: list[str] = []

    def hook(name: str) -> Any:
        def check_output(module: nn.Module, inputs: Any, output: Any) -> None:
            outputs = output if isinstance(output, tuple) else (output,)
            if any(isinstance(tensor, Tensor) and not torch.isfinite(tensor).all() for tensor in outputs):
                names.append(name or "model")

        return check_output

    handles = [module.register_forward_hook(hook(name)) for name, module in model.named_modules()]
    try:
        yield names
    finally:
        for handle in handles:
            handle.remove()


def _format_norms(context: TrainContext, norms: dict[str, Tensor]) -> dict[str, str]:
    return {layer: repr(context.world.full_tensor(norm).item()) for layer, norm in norms.items()}
