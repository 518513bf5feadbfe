"""Checks before a run. Each is one function, one event and one line of output. A run that fails a check does not start.

profile       model size, checkpoints and data satisfy runtime.profile
units         steps, tokens, epochs and learning rates
disk          free space for the checkpoints that will be retained
data          the shards match their manifest
documents     document masking: the backend supports it, and poisoning a document changes no logit of another, bit for bit
initial_loss  loss and logits as the initialization of the head implies; targets are the inputs one token later
causality     no logit changes when later tokens change, bit for bit
gradients     every parameter gets a nonzero, finite gradient
memory        the peak of a full micro-batch fits; its ratio to the estimate is reported
kernel_parity the branches match the definition at the shapes of the run
checkpoint    save, train, load: the probe is reproduced
throughput    20 steps, at least train.min_tokens_per_s (0: no limit, and then not measured on a CPU)

`check_startable` is a cheaper check of the settings, which needs no model or data in memory.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch

from nsa_lab.attention import resolve_backend
from nsa_lab.config import RunConfig, StageConfig
from nsa_lab.data import Batch, BuildProgress, DataError, ProgressMeter, describe_split
from nsa_lab.runs import resolve
from nsa_lab.runs.atomic_io import add_number, find_free_number
from nsa_lab.runs.checkpoint_files import find_problems
from nsa_lab.runs.lifecycle import check_ranks, check_text
from nsa_lab.runs.summary import format_fill_progress, format_size
from nsa_lab.train import checkpoint_state
from nsa_lab.train.build import Builders, TrainContext, build_context, force_eager, select_device, set_determinism
from nsa_lab.train.checkpoint import CheckpointStore
from nsa_lab.train.checkpoint_writer import CheckpointWriter
from nsa_lab.train.communication import count_text_tokens
from nsa_lab.train.distributed import World
from nsa_lab.train.estimate import (
    MIN_PRODUCTION_PARAMS,
    ResourceEstimate,
    compute_hours,
    count_retained_checkpoints,
    estimate_resources,
)
from nsa_lab.train.guard import PreflightCheck
from nsa_lab.train.lr_schedule import compute_learning_rate
from nsa_lab.train.packing import make_span, take_share
from nsa_lab.train.preflight.branch_parity import find_worst_error_ratio
from nsa_lab.train.preflight.initial_loss import check_initial_loss
from nsa_lab.train.preflight.leakage import make_probe_text, measure_leakage
from nsa_lab.train.step import NON_FINITE, Readback, sum_token_losses
from nsa_lab.train.telemetry.system_metrics import get_memory_capacity
from nsa_lab.train.validation import compute_probe_logits

WARM_UP_STEPS, THROUGHPUT_STEPS = 3, 20


def run_preflight(context: TrainContext, run_dir: Path) -> Iterator[PreflightCheck]:
    """Yield the result of every check of a run that is about to start in `run_dir`. The weights are restored afterwards."""
    estimate = estimate_resources(context.config, n_ranks=context.world.size)
    use_masking = context.config.data.documents == "mask"
    checks: list[Callable[[], PreflightCheck]] = [
        lambda: check_profile(context.config, estimate),
        lambda: check_units(context),
        lambda: check_disk(context.config, estimate, run_dir),
        lambda: check_data(context),
        *([lambda: check_documents(context)] if use_masking else []),
        lambda: check_initial_loss(context),
        lambda: check_causality(context),
        lambda: check_gradients(context),
        lambda: check_memory(context, estimate),
        lambda: check_kernel_parity(context),
    ]
    for check in checks:
        start = time.monotonic()
        result = replace(check(), seconds=round(time.monotonic() - start, 3))
        yield result
        if result.name == "documents" and not result.ok:
            return  # later checks would compute with this backend too
    yield from check_checkpoint_and_throughput(context, run_dir)


def run_preflight_without_run(
    config: RunConfig,
    outputs: Path | None = None,
    builders: Builders | None = None,
    report: Callable[[str], None] = lambda _: None,
) -> Iterator[PreflightCheck]:
    """Run the checks without a run: build the context and leave no files. Raises the errors of building it.

    `report` gets lines about the progress of data preparation.
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
    meter = ProgressMeter()

    def on_progress(progress: BuildProgress) -> None:
        meter.observe(progress)
        if progress_fields := meter.take_report():
            report(format_fill_progress(progress_fields))

    return on_progress


def check_startable(config: RunConfig, n_ranks: int = 1) -> None:
    """Raise an error if the ranks, the data, the device, the model's size or the backend would prevent a run.

    `lifecycle.check_ranks` and `check_text` check the first two without torch.
    """
    check_ranks(config, n_ranks)
    check_text(config)
    dtype = torch.bfloat16 if config.runtime.precision == "bf16" else torch.float32
    resolve_backend(select_device(config, World(size=n_ranks)), dtype, config.nsa, config.model, config.runtime.backend)


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
    steps_text = " + ".join(f"{stage.steps:,} optimizer steps x {stage.tokens_per_step:,} tokens" for stage in train.plan)
    peaks = [
        (first_step + max(stage.warmup_steps, 1) - 1, stage.lr)
        for first_step, stage in zip(train.first_steps, train.plan, strict=True)
    ]
    return PreflightCheck(
        "units",
        all(compute_learning_rate(step, train) == lr for step, lr in peaks),
        f"{steps_text} = {train.tokens:,} tokens, {train.tokens / len(context.dataset.train):.2f} epochs; "
        f"lr {', '.join(f'{lr:g} at step {step:,}' for step, lr in peaks)}, "
        f"{compute_learning_rate(train.steps, train):g} at the last step",
        "train.lr at the end of warm-up",
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
    split_note = describe_split(context.dataset.manifest["source"], context.config.data.val_fraction)
    return PreflightCheck(
        "data",
        True,
        f"{train:,} training and {held_out:,} validation tokens, identity {identity}"
        + (f"; {split_note}" if split_note else ""),
        "shards that match their manifest",
    )


@torch.no_grad()
def check_causality(context: TrainContext) -> PreflightCheck:
    stage, vocab_size = context.config.train.longest_stage, context.config.model.vocab_size
    tokens, cut = make_probe_text(vocab_size, stage.seq_len), stage.seq_len // 2
    is_later = torch.arange(stage.seq_len)[None] >= cut
    texts = tokens, torch.where(is_later, (tokens + 1) % vocab_size, tokens)
    with context.stepper.use_stage(stage), force_eager():
        first, second = (context.stepper.compute_logits(context.model, Batch(text, text), None) for text in texts)
    difference = (first.logits - second.logits).abs().amax(-1)
    own_is_later = take_share(is_later, first.shard).to(context.device)
    change = context.world.all_reduce(difference.masked_fill(own_is_later, 0.0).max()).item()
    return PreflightCheck(
        "causality", change == 0.0, f"logits before token {cut} change by {change:g} when later tokens change", "0"
    )


@torch.no_grad()
def check_documents(context: TrainContext) -> PreflightCheck:
    """Check that documents do not affect each other; report how they are packed into rows."""
    try:
        change = measure_leakage(context)
    except NotImplementedError as error:
        return PreflightCheck(
            "documents", False, str(error), "a backend that supports packed documents (runtime.backend: torch)"
        )
    packing = [
        f"{stage['documents']:,} documents in {stage['rows']:,} rows, at most {stage['most_documents']} per row, "
        f"{stage['cut_share']:.1%} of them cut, {stage['padded_share']:.1%} of the tokens padding"
        for stage in context.batches.summarize_packing()
    ]
    value = f"logits of other documents change by {change:g} when one is poisoned; {'; then '.join(packing)}"
    return PreflightCheck("documents", change == 0.0, value, "0")


def check_gradients(context: TrainContext) -> PreflightCheck:
    """Run this rank's largest micro-batch forward and backward, without an update."""
    train, world = context.config.train, context.world

    def count_own_tokens(stage: StageConfig) -> int:
        size = world.get_context_size(stage.sequences_per_step)
        return count_text_tokens(stage, size, world.size) // size

    first_step, stage = max(
        zip(train.first_steps, train.plan, strict=True), key=lambda first_and_stage: count_own_tokens(first_and_stage[1])
    )
    start, n_sequences = world.get_sequence_share(stage.sequences_per_step)
    batch = context.batches.weighted_batch(first_step - 1, start, min(stage.sequences_per_forward, n_sequences))
    if context.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(context.device)
    span, n_tokens = make_span(batch.documents, batch.inputs.shape[1]), batch.inputs.numel()
    with context.stepper.use_stage(stage):
        computed = context.stepper.compute_logits(context.model, batch, span)
        loss = sum_token_losses(computed.logits, computed.targets) + context.stepper.compute_auxiliary_loss(n_tokens)
        trained_loss, _ = context.stepper.add_teacher_kl(loss, computed, batch, span)
        trained_loss.backward()
    if computed.shard is not None and not world.is_sharded:
        # Each rank has the gradient of its tokens.
        for parameter in context.model.parameters():
            if parameter.grad is not None:
                world.all_reduce(parameter.grad)
    trained = [(name, parameter) for name, parameter in context.model.named_parameters() if parameter.requires_grad]
    missing = [
        name for name, parameter in trained if parameter.grad is None or not _is_usable(world.full_tensor(parameter.grad))
    ]
    context.optimizer.zero_grad(set_to_none=True)
    if stage.seq_len < context.config.nsa.l:
        # No compression block fits, so the compression operator gets no gradient.
        missing = [name for name in missing if ".phi_" not in name]
    if stage.seq_len <= (context.config.nsa.n_forced + 1) * context.config.nsa.l_sel:
        # All blocks but one are always selected, so the remaining one has probability 1 and the indexer gets no gradient.
        missing = [name for name in missing if ".indexer." not in name]
    return PreflightCheck(
        "gradients", not missing, f"missing or unusable: {', '.join(missing)}" if missing else "all", "all parameters"
    )


def _is_usable(gradient: torch.Tensor) -> bool:
    return bool(gradient.any()) and bool(gradient.isfinite().all())


def check_memory(context: TrainContext, estimate: ResourceEstimate) -> PreflightCheck:
    """Check the peak of `check_gradients` plus the moments that the first step will allocate."""
    if context.device.type != "cuda":
        return PreflightCheck(
            "memory", True, "the device is a CPU", f"{format_size(estimate.memory_bytes)} of tensors estimated, for a GPU"
        )
    # A sharded parameter counts the numbers of all ranks.
    moment_bytes = sum(2 * 4 * parameter.numel() for parameter in context.model.parameters()) // context.world.n_shards
    peak_bytes = torch.cuda.max_memory_allocated(context.device) + moment_bytes
    capacity = get_memory_capacity(context.device)
    return PreflightCheck(
        "memory",
        peak_bytes < 0.95 * capacity,
        f"peak {format_size(peak_bytes)}, {peak_bytes / estimate.memory_bytes:.2f} of the estimate",
        f"95% of {format_size(capacity)}; estimate {format_size(estimate.memory_bytes)}. "
        "Lower train.micro_batch_size, or set runtime.gradient_checkpointing",
        numbers={"peak_bytes": float(peak_bytes), "planned_bytes": float(estimate.memory_bytes)},
    )


def check_kernel_parity(context: TrainContext) -> PreflightCheck:
    if context.config.model.attention == "dense":
        return PreflightCheck("kernel_parity", True, "dense attention", "no NSA kernels")
    ratio, location = find_worst_error_ratio(context)
    return PreflightCheck(
        "kernel_parity",
        ratio <= 1.0,
        f"{ratio:.2f} of the allowed error ({location})",
        "2x (forward) and 3x (backward) the error of plain low precision against float64",
    )


def check_checkpoint_and_throughput(context: TrainContext, run_dir: Path) -> Iterator[PreflightCheck]:
    """Save, take steps, and load, which undoes the steps.

    The steps are timed on a GPU, or if there is a minimum throughput.
    """
    min_tokens_per_s, start = context.config.train.min_tokens_per_s, time.monotonic()
    is_timed = bool(min_tokens_per_s) or context.device.type == "cuda"
    folder = run_dir / ".preflight-checkpoint"
    # One folder for all ranks. One that is left over and belongs to another user is not used.
    folder = add_number(folder, int(context.world.broadcast_from_first(float(find_free_number(folder)), context.device)))
    try:
        probe, store = compute_probe_logits(context), CheckpointStore(folder)
        writer = CheckpointWriter(context, store)
        writer.start(0, {"step": 0}, {})
        try:
            saved = writer.finish()
        except OSError as error:
            yield PreflightCheck("checkpoint", False, str(error), "a checkpoint that can be saved")
            return
        speed, is_bad = _time_steps(context, THROUGHPUT_STEPS if is_timed else 1)
        problems = find_problems(store.get_path(0)) if context.world.is_first else []
        if not context.world.any_rank(bool(problems), context.device):
            checkpoint_state.restore(store.get_path(0), context)
            is_equal = torch.equal(probe, compute_probe_logits(context))
            # Also makes rank 0 wait until every rank has read the files.
            if context.world.any_rank(not is_equal, context.device):
                problems = ["the probe differs after loading"]
    finally:
        if context.world.is_first:
            shutil.rmtree(folder, ignore_errors=True)
    result = "; ".join(problems) or "the probe is equal after loading"
    result += "; the steps in between were not finite" if is_bad else ""
    yield PreflightCheck(
        "checkpoint",
        not problems and not is_bad,
        f"{format_size(saved.size_bytes)} saved in {saved.seconds:.2f} s; {result}" if saved else result,
        "equal logits",
        round(time.monotonic() - start, 3),
    )
    hours = compute_hours(context.config.train.tokens, speed)
    yield PreflightCheck(
        "throughput",
        speed >= min_tokens_per_s,
        f"{speed:,.0f} tokens/s, {hours:.2f} h for the run" if is_timed else "not measured",
        f"{min_tokens_per_s:,.0f} tokens/s" if min_tokens_per_s else "no minimum (train.min_tokens_per_s = 0)",
        numbers={"tokens_per_s": speed} if is_timed else {},
    )


def _time_steps(context: TrainContext, n_steps: int) -> tuple[float, bool]:
    """Return tokens per second over `n_steps` steps of stage 1, and whether a step was not finite.

    Several steps are preceded by a warm-up. The batches repeat if the stage has fewer steps.
    """
    stage = context.enter_stage(1)
    start, count = context.world.get_sequence_share(stage.sequences_per_step)
    readback, lr = Readback(context.device), compute_learning_rate(1, context.config.train)

    def take_steps(n: int) -> float:
        batches = (context.batches.weighted_batch(index % stage.steps, start, count) for index in range(n))
        results = [
            context.stepper.step(inputs, targets, lr, lambda: None, weights=weights, documents=documents)
            for inputs, targets, weights, documents in batches
        ]
        readback.push(n, results[-1])
        return readback.take(include_newest=True)[-1][1][NON_FINITE]

    is_bad = take_steps(WARM_UP_STEPS) if n_steps > 1 else 0.0
    start_time = time.monotonic()
    is_bad = max(is_bad, take_steps(n_steps))
    speed = n_steps * stage.tokens_per_step / (time.monotonic() - start_time)
    context.optimizer.zero_grad(set_to_none=True)
    return context.world.broadcast_from_first(speed, context.device), bool(is_bad)
