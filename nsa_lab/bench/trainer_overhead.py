"""Overhead of the trainer, measured on real run directories: telemetry, saving, resuming, and scaling to several ranks.

All code is production code: `Trainer`, the checkpoint store, the detached process. Ratios are within one run.
"""

from __future__ import annotations

import gc
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console

from nsa_lab.bench.harness import Output, Setup, describe_code, make_record
from nsa_lab.config import ConfigError, DataConfig, RunConfig
from nsa_lab.data import prepare
from nsa_lab.runs import directory, lifecycle, resolve
from nsa_lab.runs.events import read_events
from nsa_lab.train.build import Builders, TrainContext, build_context, select_device
from nsa_lab.train.checkpoint import CheckpointStore
from nsa_lab.train.distributed import World
from nsa_lab.train.signals import StopSignals
from nsa_lab.train.telemetry.event_log import EventLog
from nsa_lab.train.telemetry.heartbeat import Heartbeat, StallRule
from nsa_lab.train.telemetry.recorder import Recorder
from nsa_lab.train.telemetry.system_metrics import make_gpu_utilization_reader
from nsa_lab.train.trainer import Trainer

NEVER = 10**9
# Limits on the reference GPU.
TELEMETRY_SHARE, SAVE_S, RESUME_S, SCALING = 0.01, 4.0, 90.0, {2: 1.9}
Log = Callable[[str], None]
Parallel = Literal["ddp", "fsdp", "hsdp"]
# Number of first log points that include compilation and warm-up.
N_WARMUP_POINTS = 2


def run_trainer_bench(
    json_path: Path | None = None,
    *,
    ranks: int = 1,
    parallel: Parallel = "ddp",
    steps: int | None = None,
    device: str | None = None,
    console: Console | None = None,
) -> dict[str, Any]:
    """Measure telemetry, saving and resuming of the production model; with several ranks, throughput against one rank.

    On a CPU a tiny model tests the code and gives no meaningful numbers. `parallel`: `runtime.parallel` of the several
    ranks. `steps`: length of a timed segment. Raises ConfigError if there are fewer GPUs than ranks.
    """
    setup, output = Setup.resolve(device), Output(json_path, console=console)
    if setup.is_gpu and torch.cuda.device_count() < ranks:
        raise ConfigError(f"--ranks {ranks}: this machine has {torch.cuda.device_count()} CUDA device(s)")
    record = make_record(setup, what="overhead of the trainer")
    with tempfile.TemporaryDirectory(prefix="nsa-bench-") as folder:
        if ranks == 1:
            config, steps = _load_production_config(setup.is_gpu), steps or setup.select(gpu=1000, cpu=20)
            record |= measure_overheads(config, Path(folder), steps, output.print_line)
        else:
            config, steps = _load_scaling_config(setup.is_gpu, parallel), steps or setup.select(gpu=120, cpu=10)
            record["ranks"] = measure_scaling(config, Path(folder), ranks, steps, output.print_line)
    for line in [*_format_lines(record), describe_code(record)]:
        output.print_line(line)
    output.write(record)
    return record


def measure_overheads(config: RunConfig, outputs: Path, steps: int, log: Log, rounds: int = 2) -> dict[str, Any]:
    """Return the time share of telemetry, and the seconds of a save, of its verification, and of a restart.

    Segments of `steps` with telemetry (as configured) and without (no statistics, log points or heartbeat) alternate in one
    process, `rounds` of each, after a warm-up of a tenth. A restart ends with the first logged step.
    """
    n_warmup = max(steps // 10, 2)
    run_dir = lifecycle.create_run(config, outputs)
    segments = _TimedSegments(run_dir, config)
    segments.run_segment(n_warmup, telemetry=True)
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(rounds):
        for telemetry in (True, False):
            seconds[telemetry].append(segments.run_segment(steps, telemetry=telemetry))
            log(f"{steps} steps {'with' if telemetry else 'without'} telemetry: {seconds[telemetry][-1]:.2f} s")
    on_s, off_s = (statistics.fmean(seconds[telemetry]) for telemetry in (True, False))
    store = CheckpointStore(run_dir / directory.CHECKPOINTS)
    save_s, start = segments.get_save_s(), time.monotonic()
    newest, _ = store.load_latest()
    verify_s = time.monotonic() - start
    assert newest is not None, "get_save_s() has read a checkpoint event"
    segments.close()
    return {
        "telemetry": {
            "on_s": seconds[True],
            "off_s": seconds[False],
            "steps": steps,
            "share": on_s / off_s - 1,
            "tokens_per_s": steps * config.train.tokens_per_step / on_s,
        },
        "save": {"save_s": save_s, "verify_s": verify_s, "bytes": sum(file.stat().st_size for file in newest.iterdir())},
        "resume_s": measure_resume_s(config, outputs),
    }


def measure_resume_s(config: RunConfig, outputs: Path) -> float:
    """Return the seconds from starting the trainer on a killed run until its first step is logged."""
    save_every = max(config.train.save_every // 100, 2)
    run_dir = lifecycle.create_run(_override(config, name="bench-resume", save_every=save_every, log_every=1), outputs)
    pid = lifecycle.start(run_dir)
    _wait_for_event(run_dir, "checkpoint", attempt=1)
    os.kill(pid, signal.SIGKILL)
    lifecycle.wait(run_dir)
    start = time.time()
    lifecycle.start(run_dir)
    first_step = _wait_for_event(run_dir, "step", attempt=2)
    lifecycle.stop(run_dir)
    return first_step["t"] - start


def measure_scaling(config: RunConfig, outputs: Path, ranks: int, steps: int, log: Log) -> dict[str, Any]:
    """Return the median tokens per second of `ranks` ranks and of one, with the same batch on each rank."""
    speeds = {}
    for count in (1, ranks):
        batch_size, start = config.train.batch_size, time.monotonic()
        rank_config = _override(
            config,
            name=f"bench-ranks-{count}",
            steps=steps,
            log_every=max(steps // 12, 1),
            batch_size=batch_size * count,
            micro_batch_size=batch_size,
            eval_every=0,
            save_every=0,
        )
        run_dir = lifecycle.create_run(rank_config, outputs)
        lifecycle.start(run_dir, ranks=count)
        lifecycle.wait(run_dir)
        if lifecycle.get_state(run_dir) != directory.DONE:
            raise RuntimeError(
                f"{run_dir.name} ended {lifecycle.get_state(run_dir)}: {directory.read_status(run_dir).get('reason')}"
            )
        points = [event["tokens_per_s"] for event in read_events(run_dir) if event["kind"] == "step"]
        speeds[count] = statistics.median(points[N_WARMUP_POINTS:])
        duration_s = time.monotonic() - start
        log(f"{count} rank{'s' * (count > 1)}: {speeds[count]:,.0f} tokens/s, {duration_s:.0f} s from start to end")
    return {
        "ranks": ranks,
        "parallel": config.runtime.parallel,
        "seq_len": config.train.seq_len,
        "sequences_a_rank": config.train.batch_size,
        "one_tokens_per_s": speeds[1],
        "all_tokens_per_s": speeds[ranks],
        "ratio": speeds[ranks] / speeds[1],
    }


def _wait_for_event(run_dir: Path, kind: str, attempt: int) -> dict[str, Any]:
    """Return the first event of a kind in an attempt. Raises RuntimeError if the trainer ends without it."""
    while True:
        is_alive = lifecycle.is_alive(run_dir)
        for event in read_events(run_dir):
            if event["kind"] == kind and event["attempt"] == attempt:
                return event
        if not is_alive:
            raise RuntimeError(f"{run_dir.name} ended without a {kind}: {directory.read_status(run_dir).get('reason')}")
        time.sleep(0.05)


class _TimedSegments:
    """Segments of one training run in this process, each timed without its final save."""

    def __init__(self, run_dir: Path, config: RunConfig) -> None:
        self.run_dir, self.n_done, self._configured = run_dir, 0, config
        dataset = prepare(config.data, config.model.vocab_size, config.train.seq_len)
        self.parts: TrainContext = build_context(config, World(), select_device(config, World()), dataset, Builders())
        self.parts.facts |= {"config_hash": config.hash(), "data_identity": dataset.identity}

    def run_segment(self, steps: int, *, telemetry: bool) -> float:
        """Return the seconds of `steps` more steps."""
        config = _override(self._configured, steps=self.n_done + steps, eval_every=0, save_every=0)
        self.parts.config = config if telemetry else _override(config, log_every=NEVER, stats_every=NEVER)
        train = self.parts.config.train
        log = EventLog(self.run_dir, self.run_dir.name, 1)
        record = Recorder(self.run_dir, log, is_first=True, steps=train.steps, count_tokens=train.tokens_until)
        record.record_start(self.n_done, {})
        get_gpu_util, _ = make_gpu_utilization_reader(self.parts.device)
        heartbeat = Heartbeat(
            log,
            record.phases,
            every_s=config.runtime.heartbeat_s,
            rule=StallRule(),
            stacks=self.run_dir / "stacks.txt",
            get_gpu_util=get_gpu_util,
        )
        with StopSignals(self.run_dir / "stacks.txt", lambda name: None, lambda name: None) as signals:
            trainer = Trainer(self.run_dir, self.parts, record, signals, completed_steps=self.n_done, spike_losses=[])
            if telemetry:
                heartbeat.start()
            start = time.monotonic()
            trainer.run()
            duration_s = time.monotonic() - start
        heartbeat.stop()
        record.close()
        self.n_done += steps
        return duration_s - record.phases.get_last_duration("save") - record.phases.get_last_duration("eval")

    def close(self) -> None:
        """Free the device memory."""
        del self.parts
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def get_save_s(self) -> float:
        """Return the seconds of the last save, including serialization and syncing to disk."""
        return [event for event in read_events(self.run_dir) if event["kind"] == "checkpoint"][-1]["seconds"]


def _load_production_config(is_gpu: bool) -> RunConfig:
    """Return the production run on text that is always available; on a CPU the run of the tests."""
    config = resolve.load_config("production_50k" if is_gpu else "ci", [])
    runtime = config.runtime.model_copy(update={"profile": "smoke"})
    return config.model_copy(update={"name": "bench", "data": DataConfig(), "runtime": runtime})


def _load_scaling_config(is_gpu: bool, parallel: Parallel) -> RunConfig:
    """Return a run with the batch size of the training benchmark per rank, without a CUDA graph (one rank only)."""
    config = _load_production_config(is_gpu)
    runtime = config.runtime.model_copy(update={"cuda_graph": False, "parallel": parallel})
    return _override(
        config.model_copy(update={"runtime": runtime}), batch_size=32 if is_gpu else 2, accumulate_grad_batches=1
    )


def _override(config: RunConfig, *, name: str | None = None, **train: int) -> RunConfig:
    train_config = config.train.model_copy(update={"warmup_steps": 0, "micro_batch_size": None, **train})
    return config.model_copy(update={"train": train_config, "name": name or config.name})


def _format_lines(record: dict[str, Any]) -> list[str]:
    lines = [f"on {record['device']}"]
    if "telemetry" in record:
        telemetry, save = record["telemetry"], record["save"]
        lines += [
            f"telemetry: {telemetry['share']:+.2%} of the time (limit {TELEMETRY_SHARE:.0%}), "
            f"{telemetry['tokens_per_s']:,.0f} tokens/s with it",
            f"save + verify: {save['save_s']:.2f} + {save['verify_s']:.2f} s for {save['bytes'] / 1e6:,.0f} MB "
            f"(limit {SAVE_S:g} s)",
            f"restart after a kill, until the first step: {record['resume_s']:.1f} s (limit {RESUME_S:g} s)",
        ]
    if "ranks" in record:
        ranks = record["ranks"]
        target = f" (target {SCALING[ranks['ranks']]})" if ranks["ranks"] in SCALING and ranks["parallel"] == "ddp" else ""
        lines += [
            f"{ranks['ranks']} ranks, {ranks['parallel']}: {ranks['all_tokens_per_s']:,.0f} tokens/s, "
            f"one: {ranks['one_tokens_per_s']:,.0f}, ratio {ranks['ratio']:.3f}{target}, "
            f"{ranks['seq_len']} x {ranks['sequences_a_rank']} on each"
        ]
    return lines
