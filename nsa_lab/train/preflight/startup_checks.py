"""Checks before a run, each one function and one line. A run that fails one does not start.

profile       the model and the plan are what the profile promises
units         steps, tokens and epochs, spelt out
disk          room for the checkpoints that will be kept
data          the shards are those of their manifest
documents     told apart: the backend takes them, and nothing of one moves when its neighbour is poisoned, bit for bit
initial_loss  within 2 % of ln V
causality     no logit moves when later tokens change, bit for bit
gradients     every parameter receives one
memory        the peak of a full micro-batch fits, and is near the plan
kernel_parity the branches against the definition, on the run's own shapes
checkpoint    save, train on, load, and the probe comes out as it was
throughput    20 steps against train.min_tokens_per_s (0: no gate; on a CPU not measured then)
"""

from __future__ import annotations

import math
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch

from nsa_lab.config import RunConfig
from nsa_lab.config.model_config import N_FORCED_BLOCKS
from nsa_lab.data import BuildProgress, DataError, ProgressMeter
from nsa_lab.runs import resolve
from nsa_lab.runs.summary import format_fill_progress, format_size
from nsa_lab.train import checkpoint_state
from nsa_lab.train.build import Builders, TrainContext, build_context, force_eager, select_device, set_determinism
from nsa_lab.train.checkpoint import CheckpointStore
from nsa_lab.train.distributed import World
from nsa_lab.train.estimate import (
    MIN_PRODUCTION_PARAMS,
    ResourceEstimate,
    compute_hours,
    count_retained_checkpoints,
    estimate_resources,
)
from nsa_lab.train.lr_schedule import compute_learning_rate
from nsa_lab.train.packing import compute_logits, make_span
from nsa_lab.train.preflight.check import PreflightCheck
from nsa_lab.train.preflight.kernel_parity import find_worst_error_ratio
from nsa_lab.train.preflight.leakage import measure_leakage
from nsa_lab.train.step import NON_FINITE, Readback, sum_token_losses
from nsa_lab.train.telemetry.system_metrics import get_memory_capacity
from nsa_lab.train.validation import compute_probe_logits

WARM_UP_STEPS, THROUGHPUT_STEPS = 3, 20


def run_preflight(context: TrainContext, run_dir: Path) -> Iterator[PreflightCheck]:
    """Every check of a run about to start in `run_dir`, as it is done. The weights are afterwards what they were."""
    planned = estimate_resources(context.config, n_ranks=context.world.size)
    told_apart = context.config.data.documents == "mask"
    checks: list[Callable[[], PreflightCheck]] = [
        lambda: check_profile(context.config, planned),
        lambda: check_units(context),
        lambda: check_disk(context.config, planned, run_dir),
        lambda: check_data(context),
        *([lambda: check_documents(context)] if told_apart else []),
        lambda: check_initial_loss(context),
        lambda: check_causality(context),
        lambda: check_gradients(context),
        lambda: check_memory(context, planned),
        lambda: check_kernel_parity(context),
    ]
    for check in checks:
        begun = time.monotonic()
        found = replace(check(), seconds=round(time.monotonic() - begun, 3))
        yield found
        if found.name == "documents" and not found.ok:
            return  # what comes after computes as training would
    yield from check_checkpoint_and_throughput(context, run_dir)


def run_preflight_without_run(
    config: RunConfig,
    outputs: Path | None = None,
    builders: Builders | None = None,
    report: Callable[[str], None] = lambda _: None,
) -> Iterator[PreflightCheck]:
    """The same checks without a run: builds the parts, leaves nothing behind. Raises what building them raises.

    `say` is told how a filling of the data goes on.
    """
    builders, world = builders or Builders(), World()
    root = outputs or resolve.get_outputs_dir()
    root.mkdir(parents=True, exist_ok=True)
    device = select_device(config, world)
    set_determinism(config.runtime.deterministic)
    dataset = builders.data(
        config.data, config.model.vocab_size, config.train.longest_stage.seq_len, _make_fill_callback(report)
    )
    with tempfile.TemporaryDirectory(dir=root, prefix=".preflight-") as folder:
        yield from run_preflight(build_context(config, world, device, dataset, builders), Path(folder))


def _make_fill_callback(report: Callable[[str], None]) -> Callable[[BuildProgress], None]:
    pace = ProgressMeter()

    def filling(progress: BuildProgress) -> None:
        pace.observe(progress)
        if told := pace.take_report():
            report(format_fill_progress(told))

    return filling


def check_profile(config: RunConfig, estimate: ResourceEstimate) -> PreflightCheck:
    value = (
        f"{estimate.params:,} parameters, a checkpoint every {config.train.save_every:,} steps, {config.data.source} data"
    )
    if config.runtime.profile == "smoke":
        return PreflightCheck("profile", True, value, "smoke: any")
    ok = estimate.params >= MIN_PRODUCTION_PARAMS and config.train.save_every > 0 and config.data.source != "synthetic"
    return PreflightCheck(
        "profile",
        ok,
        value,
        f"production: at least {MIN_PRODUCTION_PARAMS:,} parameters, save_every above 0, no synthetic data",
    )


def check_units(context: TrainContext) -> PreflightCheck:
    train = context.config.train
    counted = " + ".join(f"{stage.steps:,} optimiser steps x {stage.tokens_per_step:,} tokens" for stage in train.plan)
    peaks = [
        (first + max(stage.warmup_steps, 1) - 1, stage.lr)
        for first, stage in zip(train.first_steps, train.plan, strict=True)
    ]
    return PreflightCheck(
        "units",
        all(compute_learning_rate(step, train) == lr for step, lr in peaks),
        f"{counted} = {train.tokens:,} tokens, {train.tokens / len(context.dataset.train):.2f} epochs; "
        f"lr {', '.join(f'{lr:g} at step {step:,}' for step, lr in peaks)}, "
        f"{compute_learning_rate(train.steps, train):g} at the last",
        "the peak rate at the end of warm-up",
    )


def check_disk(config: RunConfig, estimate: ResourceEstimate, run_dir: Path) -> PreflightCheck:
    needed = count_retained_checkpoints(config) * estimate.checkpoint_bytes
    free = shutil.disk_usage(run_dir).free
    return PreflightCheck(
        "disk",
        free > needed,
        f"{format_size(free)} free",
        f"{format_size(needed)} for {count_retained_checkpoints(config)} checkpoints",
    )


def check_data(context: TrainContext) -> PreflightCheck:
    try:
        context.dataset.verify()
    except DataError as error:
        return PreflightCheck("data", False, str(error), "shards that match their manifest")
    train, held_out = len(context.dataset.train), len(context.dataset.validation)
    identity = context.dataset.identity[:16]
    return PreflightCheck(
        "data",
        True,
        f"{train:,} training and {held_out:,} validation tokens, identity {identity}",
        "shards that match their manifest",
    )


@torch.no_grad()
def check_initial_loss(context: TrainContext) -> PreflightCheck:
    inputs, targets = context.evaluations[0][0]
    span = make_span(context.evaluations[0].find_documents(inputs))
    with force_eager(), context.stepper.autocast():
        logits = compute_logits(context.model, inputs.to(context.device), span)
    loss = sum_token_losses(logits, targets.to(context.device)).item() / targets.numel()
    expected = math.log(context.config.model.vocab_size)
    return PreflightCheck(
        "initial_loss", abs(loss / expected - 1) <= 0.02, f"{loss:.4f}", f"{expected:.4f} (ln V) within 2 %"
    )


@torch.no_grad()
def check_causality(context: TrainContext) -> PreflightCheck:
    length, size = context.config.train.longest_stage.seq_len, context.config.model.vocab_size
    tokens = (
        checkpoint_state.make_probe_input(size, length)
        .to(context.device)
        .repeat(1, -(-length // checkpoint_state.PROBE_TOKENS))[:, :length]
    )
    cut = length // 2
    changed = tokens.clone()
    changed[:, cut:] = (changed[:, cut:] + 1) % size
    with force_eager(), context.stepper.autocast():
        moved = (context.model(tokens)[:, :cut] - context.model(changed)[:, :cut]).abs().max().item()
    return PreflightCheck(
        "causality", moved == 0.0, f"logits before token {cut} move by {moved:g} when later tokens change", "0"
    )


@torch.no_grad()
def check_documents(context: TrainContext) -> PreflightCheck:
    """Whether documents can be told apart here, and are; and how they lie in the rows of the text."""
    try:
        moved = measure_leakage(context)
    except NotImplementedError as error:
        return PreflightCheck(
            "documents", False, str(error), "a backend that takes packed documents (runtime.backend: torch)"
        )
    laid_out = [
        f"{found['documents']:,} documents in {found['rows']:,} rows, at most {found['most_documents']} in one, "
        f"{found['cut_share']:.1%} of them cut, {found['padded_share']:.1%} of the tokens padding"
        for found in context.batches.summarize_packing()
    ]
    said = f"logits of other documents move by {moved:g} when one is poisoned; {'; then '.join(laid_out)}"
    return PreflightCheck("documents", moved == 0.0, said, "0")


def check_gradients(context: TrainContext) -> PreflightCheck:
    """The largest micro-batch forward and backward; the step it belongs to is not taken."""
    train = context.config.train
    first, stage = max(
        zip(train.first_steps, train.plan, strict=True), key=lambda begun: begun[1].sequences_per_forward * begun[1].seq_len
    )
    batch = context.batches.weighted_batch(first - 1, 0, min(stage.sequences_per_forward, stage.sequences_per_step))
    if context.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(context.device)
    with context.stepper.autocast():
        logits = compute_logits(context.model, batch.inputs.to(context.device), make_span(batch.documents))
    (
        sum_token_losses(logits, batch.targets.to(context.device))
        + context.stepper.compute_auxiliary_loss(batch.inputs.numel())
    ).backward()
    wanted = [(name, p) for name, p in context.model.named_parameters() if p.requires_grad]
    without = [name for name, p in wanted if p.grad is None or not _is_usable(context.world.full_tensor(p.grad))]
    context.optimizer.zero_grad(set_to_none=True)
    if stage.seq_len < context.config.nsa.l:
        # No compression block fits, so its operator has nothing to learn from.
        without = [name for name in without if ".phi_" not in name]
    if stage.seq_len <= (N_FORCED_BLOCKS + 1) * context.config.nsa.l_sel:
        # All blocks but one are read whatever their scores, and one has all of the choice: nothing to teach an indexer.
        without = [name for name in without if ".indexer." not in name]
    return PreflightCheck(
        "gradients", not without, f"without: {', '.join(without)}" if without else "all", "all parameters"
    )


def _is_usable(gradient: torch.Tensor) -> bool:
    return bool(gradient.any()) and bool(gradient.isfinite().all())


def check_memory(context: TrainContext, estimate: ResourceEstimate) -> PreflightCheck:
    """After `gradients`: its peak, and the moments that the first step will add."""
    if context.device.type != "cuda":
        return PreflightCheck(
            "memory", True, "the device is a CPU", f"{format_size(estimate.memory_bytes)} of tensors planned, for a GPU"
        )
    moments = sum(2 * 4 * p.numel() for p in context.model.parameters())
    peak = torch.cuda.max_memory_allocated(context.device) + moments
    capacity = get_memory_capacity(context.device)
    return PreflightCheck(
        "memory",
        peak < 0.95 * capacity,
        f"{format_size(peak)} at the peak, {peak / estimate.memory_bytes:.2f} of the plan",
        f"95 % of {format_size(capacity)}; planned {format_size(estimate.memory_bytes)}. "
        "Lower train.micro_batch_size, or set runtime.gradient_checkpointing",
        numbers={"peak_bytes": float(peak), "planned_bytes": float(estimate.memory_bytes)},
    )


def check_kernel_parity(context: TrainContext) -> PreflightCheck:
    if context.config.model.attention == "dense":
        return PreflightCheck("kernel_parity", True, "dense attention", "no NSA kernels")
    ratio, worst = find_worst_error_ratio(context)
    return PreflightCheck(
        "kernel_parity",
        ratio <= 1.0,
        f"{ratio:.2f} of what is allowed ({worst})",
        "2x forward, 3x backward of what plain low precision errs against float64",
    )


def check_checkpoint_and_throughput(context: TrainContext, run_dir: Path) -> Iterator[PreflightCheck]:
    """Save, take steps, load; the steps are timed on a GPU or if there is a gate, and undone either way."""
    gate, begun = context.config.train.min_tokens_per_s, time.monotonic()
    timed = bool(gate) or context.device.type == "cuda"
    with tempfile.TemporaryDirectory(dir=run_dir, prefix=".preflight-") as folder:
        before = compute_probe_logits(context)
        store = CheckpointStore(Path(folder))
        try:
            saved = store.save(0, checkpoint_state.make_checkpoint_files(context, {"step": 0}, lambda: before), {})
        except OSError as error:
            yield PreflightCheck("checkpoint", False, str(error), "a checkpoint that can be saved")
            return
        speed, bad = _time_steps(context, THROUGHPUT_STEPS if timed else 1)
        path, damaged = store.load_latest()
        assert path is not None, "saved above; were it damaged, load_latest would have raised"
        checkpoint_state.restore(path, context)
        same = torch.equal(before, compute_probe_logits(context))
    found = "the probe is the same after loading" if same else "the probe is different after loading"
    found += "; the steps in between were not finite" if bad else ""
    yield PreflightCheck(
        "checkpoint",
        same and not damaged and not bad,
        f"{format_size(saved.size_bytes)} saved in {saved.seconds:.2f} s; {found}",
        "the same logits",
        round(time.monotonic() - begun, 3),
    )
    expected = compute_hours(context.config.train.tokens, speed)
    yield PreflightCheck(
        "throughput",
        speed >= gate,
        f"{speed:,.0f} tokens/s, {expected:.2f} h for the run" if timed else "not measured",
        f"{gate:,.0f} tokens/s" if gate else "no gate (train.min_tokens_per_s = 0)",
        numbers={"tokens_per_s": speed} if timed else {},
    )


def _time_steps(context: TrainContext, n_steps: int) -> tuple[float, bool]:
    """Tokens per second over `count` steps of the first stage, after a warm-up if they are several; was one bad?

    A stage of fewer steps begins again.
    """
    stage = context.enter_stage(1)
    start, share = context.world.get_sequence_share(stage.sequences_per_step)
    readback, lr = Readback(context.device), compute_learning_rate(1, context.config.train)

    def take(number: int) -> float:
        batches = (context.batches.weighted_batch(index % stage.steps, start, share) for index in range(number))
        results = [
            context.stepper.step(x, y, lr, lambda: None, weights=weights, documents=documents)
            for x, y, weights, documents in batches
        ]
        readback.push(number, results[-1])
        return readback.take(include_newest=True)[-1][1][NON_FINITE]

    bad = take(WARM_UP_STEPS) if n_steps > 1 else 0.0
    begun = time.monotonic()
    bad = max(bad, take(n_steps))
    speed = n_steps * stage.tokens_per_step / (time.monotonic() - begun)
    context.optimizer.zero_grad(set_to_none=True)
    return context.world.broadcast_from_first(speed, context.device), bool(bad)
