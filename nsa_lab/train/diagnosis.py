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
from nsa_lab.runs.files import write_json
from nsa_lab.train.documents import logits_of, span_of
from nsa_lab.train.guard import Finding
from nsa_lab.train.measure import branch_statistics, layer_norms
from nsa_lab.train.parts import Parts, eager
from nsa_lab.train.step import token_losses


def diagnose(parts: Parts, finding: Finding, good_step: int) -> dict[str, Any]:
    """What can be said about the finding's step: data, losses of its micro-batches, norms and statistics of the layers."""
    index = max(finding.step - 1, 0)
    stage = parts.enter(index + 1)
    start, count = parts.world.share(stage.sequences_per_step)
    batch = parts.batches.weighted(index, start, count)
    losses, first_bad = _replay(parts, batch)
    return {
        "rule": finding.rule,
        "step": finding.step,
        "value": repr(finding.value),
        "limit": repr(finding.limit),
        "text": finding.text,
        "weights_of_step": good_step,
        "rank": parts.world.rank,
        "batch_hash": parts.batches.hash(index),
        "batch_positions": parts.batches.positions(index, start, count),
        "micro_batch_losses": losses,
        "first_non_finite_module": first_bad,
        "parameter_norms": _numbers(parts, layer_norms(parts.model, lambda p: p)),
        "gradient_norms": _numbers(parts, layer_norms(parts.model, lambda p: p.grad)),
        "statistics": {name: [repr(v) for v in value.tolist()] for name, value in branch_statistics(parts, batch).items()},
    }


def write(run_dir: Path, finding: Finding, rank: int, bundle: dict[str, Any]) -> Path:
    """Write the bundle of one rank into `halt-<step>/`."""
    folder = run_dir / f"halt-{finding.step:08d}"
    folder.mkdir(exist_ok=True)
    name = "diagnosis.json" if rank == 0 else f"diagnosis-rank{rank}.json"
    write_json(folder / name, bundle)
    return folder


def _replay(parts: Parts, batch: Batch) -> tuple[list[str], str | None]:
    parts.optimizer.zero_grad(set_to_none=True)
    losses = []
    with eager(), _watch(parts.model) as first_bad:
        for part in parts.stepper.micro_batches(batch):
            tokens = part.targets.numel()
            with parts.stepper.autocast():
                logits = logits_of(parts.model, part.inputs.to(parts.device), span_of(part.documents))
            loss = token_losses(logits, part.targets.to(parts.device)) / tokens
            losses.append(repr(loss.item()))
            share = loss * tokens / parts.stepper.stage.tokens_per_step
            (share + parts.stepper.added(tokens)).backward()
    return losses, first_bad[0] if first_bad else None


@contextmanager
def _watch(model: nn.Module) -> Iterator[list[str]]:
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


def _numbers(parts: Parts, norms: dict[str, Tensor]) -> dict[str, str]:
    return {layer: repr(parts.world.full(norm).item()) for layer, norm in norms.items()}
