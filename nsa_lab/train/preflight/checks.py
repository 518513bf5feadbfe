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
from nsa_lab.config.model import FORCED_BLOCKS
from nsa_lab.data import DataError, FillPace, FillProgress
from nsa_lab.runs import names
from nsa_lab.runs.summary import filling_text, size_text
from nsa_lab.train import snapshot
from nsa_lab.train.checkpoint import CheckpointStore
from nsa_lab.train.distributed import World
from nsa_lab.train.documents import logits_of, span_of
from nsa_lab.train.measure import probe_logits
from nsa_lab.train.parts import Builders, Parts, assemble, choose_device, eager, set_determinism
from nsa_lab.train.plan import PRODUCTION_PARAMS, Plan, checkpoints_kept, hours, plan
from nsa_lab.train.preflight.check import Check
from nsa_lab.train.preflight.leakage import leaks
from nsa_lab.train.preflight.parity import worst_ratio
from nsa_lab.train.schedule import learning_rate
from nsa_lab.train.step import BAD, Readback, token_losses
from nsa_lab.train.telemetry.machine import memory_bytes

WARM_UP_STEPS, THROUGHPUT_STEPS = 3, 20


def preflight(parts: Parts, run_dir: Path) -> Iterator[Check]:
    """Every check of a run about to start in `run_dir`, as it is done. The weights are afterwards what they were."""
    planned = plan(parts.config, ranks=parts.world.size)
    told_apart = parts.config.data.documents == "mask"
    checks: list[Callable[[], Check]] = [
        lambda: profile(parts.config, planned),
        lambda: units(parts),
        lambda: disk(parts.config, planned, run_dir),
        lambda: data(parts),
        *([lambda: documents(parts)] if told_apart else []),
        lambda: initial_loss(parts),
        lambda: causality(parts),
        lambda: gradients(parts),
        lambda: memory(parts, planned),
        lambda: kernel_parity(parts),
    ]
    for check in checks:
        begun = time.monotonic()
        found = replace(check(), seconds=round(time.monotonic() - begun, 3))
        yield found
        if found.name == "documents" and not found.ok:
            return  # what comes after computes as training would
    yield from checkpoint_and_throughput(parts, run_dir)


def preflight_alone(
    config: RunConfig,
    outputs: Path | None = None,
    builders: Builders | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Iterator[Check]:
    """The same checks without a run: builds the parts, leaves nothing behind. Raises what building them raises.

    `say` is told how a filling of the data goes on.
    """
    builders, world = builders or Builders(), World()
    root = outputs or names.outputs_folder()
    root.mkdir(parents=True, exist_ok=True)
    device = choose_device(config, world)
    set_determinism(config.runtime.deterministic)
    dataset = builders.data(config.data, config.model.vocab_size, config.train.longest.seq_len, _telling(say))
    with tempfile.TemporaryDirectory(dir=root, prefix=".preflight-") as folder:
        yield from preflight(assemble(config, world, device, dataset, builders), Path(folder))


def _telling(say: Callable[[str], None]) -> Callable[[FillProgress], None]:
    pace = FillPace()

    def filling(progress: FillProgress) -> None:
        pace.observe(progress)
        if told := pace.due():
            say(filling_text(told))

    return filling


def profile(config: RunConfig, planned: Plan) -> Check:
    value = (
        f"{planned.params:,} parameters, a checkpoint every {config.train.save_every:,} steps, {config.data.source} data"
    )
    if config.runtime.profile == "smoke":
        return Check("profile", True, value, "smoke: any")
    ok = planned.params >= PRODUCTION_PARAMS and config.train.save_every > 0 and config.data.source != "synthetic"
    return Check(
        "profile",
        ok,
        value,
        f"production: at least {PRODUCTION_PARAMS:,} parameters, save_every above 0, no synthetic data",
    )


def units(parts: Parts) -> Check:
    train = parts.config.train
    counted = " + ".join(f"{stage.steps:,} optimiser steps x {stage.tokens_per_step:,} tokens" for stage in train.plan)
    peaks = [
        (first + max(stage.warmup_steps, 1) - 1, stage.lr)
        for first, stage in zip(train.first_steps, train.plan, strict=True)
    ]
    return Check(
        "units",
        all(learning_rate(step, train) == lr for step, lr in peaks),
        f"{counted} = {train.tokens:,} tokens, {train.tokens / len(parts.dataset.train):.2f} epochs; "
        f"lr {', '.join(f'{lr:g} at step {step:,}' for step, lr in peaks)}, "
        f"{learning_rate(train.steps, train):g} at the last",
        "the peak rate at the end of warm-up",
    )


def disk(config: RunConfig, planned: Plan, run_dir: Path) -> Check:
    needed = checkpoints_kept(config) * planned.checkpoint_bytes
    free = shutil.disk_usage(run_dir).free
    return Check(
        "disk", free > needed, f"{size_text(free)} free", f"{size_text(needed)} for {checkpoints_kept(config)} checkpoints"
    )


def data(parts: Parts) -> Check:
    try:
        parts.dataset.verify()
    except DataError as error:
        return Check("data", False, str(error), "shards that match their manifest")
    train, held_out = len(parts.dataset.train), len(parts.dataset.validation)
    identity = parts.dataset.identity[:16]
    return Check(
        "data",
        True,
        f"{train:,} training and {held_out:,} validation tokens, identity {identity}",
        "shards that match their manifest",
    )


@torch.no_grad()
def initial_loss(parts: Parts) -> Check:
    inputs, targets = parts.evaluations[0][0]
    span = span_of(parts.evaluations[0].documents(inputs))
    with eager(), parts.stepper.autocast():
        logits = logits_of(parts.model, inputs.to(parts.device), span)
    loss = token_losses(logits, targets.to(parts.device)).item() / targets.numel()
    expected = math.log(parts.config.model.vocab_size)
    return Check("initial_loss", abs(loss / expected - 1) <= 0.02, f"{loss:.4f}", f"{expected:.4f} (ln V) within 2 %")


@torch.no_grad()
def causality(parts: Parts) -> Check:
    length, size = parts.config.train.longest.seq_len, parts.config.model.vocab_size
    tokens = snapshot.probe_input(size, length).to(parts.device).repeat(1, -(-length // snapshot.PROBE_TOKENS))[:, :length]
    cut = length // 2
    changed = tokens.clone()
    changed[:, cut:] = (changed[:, cut:] + 1) % size
    with eager(), parts.stepper.autocast():
        moved = (parts.model(tokens)[:, :cut] - parts.model(changed)[:, :cut]).abs().max().item()
    return Check("causality", moved == 0.0, f"logits before token {cut} move by {moved:g} when later tokens change", "0")


@torch.no_grad()
def documents(parts: Parts) -> Check:
    """Whether documents can be told apart here, and are; and how they lie in the rows of the text."""
    try:
        moved = leaks(parts)
    except NotImplementedError as error:
        return Check("documents", False, str(error), "a backend that takes packed documents (runtime.backend: torch)")
    laid_out = [
        f"{found['documents']:,} documents in {found['rows']:,} rows, at most {found['most_documents']} in one, "
        f"{found['cut_share']:.1%} of them cut, {found['padded_share']:.1%} of the tokens padding"
        for found in parts.batches.packing()
    ]
    said = f"logits of other documents move by {moved:g} when one is poisoned; {'; then '.join(laid_out)}"
    return Check("documents", moved == 0.0, said, "0")


def gradients(parts: Parts) -> Check:
    """The largest micro-batch forward and backward; the step it belongs to is not taken."""
    train = parts.config.train
    first, stage = max(
        zip(train.first_steps, train.plan, strict=True), key=lambda begun: begun[1].sequences_at_once * begun[1].seq_len
    )
    batch = parts.batches.weighted(first - 1, 0, min(stage.sequences_at_once, stage.sequences_per_step))
    if parts.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(parts.device)
    with parts.stepper.autocast():
        logits = logits_of(parts.model, batch.inputs.to(parts.device), span_of(batch.documents))
    (token_losses(logits, batch.targets.to(parts.device)) + parts.stepper.added(batch.inputs.numel())).backward()
    wanted = [(name, p) for name, p in parts.model.named_parameters() if p.requires_grad]
    without = [name for name, p in wanted if p.grad is None or not _usable(parts.world.full(p.grad))]
    parts.optimizer.zero_grad(set_to_none=True)
    if stage.seq_len < parts.config.nsa.l:
        # No compression block fits, so its operator has nothing to learn from.
        without = [name for name in without if ".phi_" not in name]
    if stage.seq_len <= (FORCED_BLOCKS + 1) * parts.config.nsa.l_sel:
        # All blocks but one are read whatever their scores, and one has all of the choice: nothing to teach an indexer.
        without = [name for name in without if ".indexer." not in name]
    return Check("gradients", not without, f"without: {', '.join(without)}" if without else "all", "all parameters")


def _usable(gradient: torch.Tensor) -> bool:
    return bool(gradient.any()) and bool(gradient.isfinite().all())


def memory(parts: Parts, planned: Plan) -> Check:
    """After `gradients`: its peak, and the moments that the first step will add."""
    if parts.device.type != "cuda":
        return Check(
            "memory", True, "the device is a CPU", f"{size_text(planned.memory_bytes)} of tensors planned, for a GPU"
        )
    moments = sum(2 * 4 * p.numel() for p in parts.model.parameters())
    peak = torch.cuda.max_memory_allocated(parts.device) + moments
    capacity = memory_bytes(parts.device)
    return Check(
        "memory",
        peak < 0.95 * capacity,
        f"{size_text(peak)} at the peak, {peak / planned.memory_bytes:.2f} of the plan",
        f"95 % of {size_text(capacity)}; planned {size_text(planned.memory_bytes)}. "
        "Lower train.micro_batch_size, or set runtime.gradient_checkpointing",
        numbers={"peak_bytes": float(peak), "planned_bytes": float(planned.memory_bytes)},
    )


def kernel_parity(parts: Parts) -> Check:
    if parts.config.model.attention == "dense":
        return Check("kernel_parity", True, "dense attention", "no NSA kernels")
    ratio, worst = worst_ratio(parts)
    return Check(
        "kernel_parity",
        ratio <= 1.0,
        f"{ratio:.2f} of what is allowed ({worst})",
        "2x forward, 3x backward of what plain low precision errs against float64",
    )


def checkpoint_and_throughput(parts: Parts, run_dir: Path) -> Iterator[Check]:
    """Save, take steps, load; the steps are timed on a GPU or if there is a gate, and undone either way."""
    gate, begun = parts.config.train.min_tokens_per_s, time.monotonic()
    timed = bool(gate) or parts.device.type == "cuda"
    with tempfile.TemporaryDirectory(dir=run_dir, prefix=".preflight-") as folder:
        before = probe_logits(parts)
        store = CheckpointStore(Path(folder))
        try:
            saved = store.save(0, snapshot.files(parts, {"step": 0}, lambda: before), {})
        except OSError as error:
            yield Check("checkpoint", False, str(error), "a checkpoint that can be saved")
            return
        speed, bad = _take_steps(parts, THROUGHPUT_STEPS if timed else 1)
        path, damaged = store.load_latest()
        assert path is not None, "saved above; were it damaged, load_latest would have raised"
        snapshot.restore(path, parts)
        same = torch.equal(before, probe_logits(parts))
    found = "the probe is the same after loading" if same else "the probe is different after loading"
    found += "; the steps in between were not finite" if bad else ""
    yield Check(
        "checkpoint",
        same and not damaged and not bad,
        f"{size_text(saved.size_bytes)} saved in {saved.seconds:.2f} s; {found}",
        "the same logits",
        round(time.monotonic() - begun, 3),
    )
    expected = hours(parts.config.train.tokens, speed)
    yield Check(
        "throughput",
        speed >= gate,
        f"{speed:,.0f} tokens/s, {expected:.2f} h for the run" if timed else "not measured",
        f"{gate:,.0f} tokens/s" if gate else "no gate (train.min_tokens_per_s = 0)",
        numbers={"tokens_per_s": speed} if timed else {},
    )


def _take_steps(parts: Parts, count: int) -> tuple[float, bool]:
    """Tokens per second over `count` steps of the first stage, after a warm-up if they are several; was one bad?

    A stage of fewer steps begins again.
    """
    stage = parts.enter(1)
    start, share = parts.world.share(stage.sequences_per_step)
    readback, lr = Readback(parts.device), learning_rate(1, parts.config.train)

    def take(number: int) -> float:
        batches = (parts.batches.weighted(index % stage.steps, start, share) for index in range(number))
        results = [
            parts.stepper.step(x, y, lr, lambda: None, weights=weights, documents=documents)
            for x, y, weights, documents in batches
        ]
        readback.push(number, results[-1])
        return readback.take(everything=True)[-1][1][BAD]

    bad = take(WARM_UP_STEPS) if count > 1 else 0.0
    begun = time.monotonic()
    bad = max(bad, take(count))
    speed = count * stage.tokens_per_step / (time.monotonic() - begun)
    parts.optimizer.zero_grad(set_to_none=True)
    return parts.world.from_first(speed, parts.device), bool(bad)
