"""One attempt at a run, from taking its lock to its last event and exit code.

Invariants
* One trainer per run directory. A new attempt goes on from the newest valid checkpoint; where checkpoints were written and
  none is valid it stops and says so, and never starts over.
* Statuses: RUNNING, then DONE (exit 0), HALTED by a rule (3), PREEMPTED on request (75). Wrong settings or data exit 2,
  a bug exits 1; both leave HALTED with the reason, and the traceback in an `error` event.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from pathlib import Path
from typing import Any, cast

import torch

from nsa_lab.attention import BackendError, geometry
from nsa_lab.config import ConfigError, RunConfig
from nsa_lab.data import BuildProgress, DataError, ProgressMeter
from nsa_lab.model import NSATransformer
from nsa_lab.runs import directory, monitor_settings, older_variables
from nsa_lab.runs.checkpoint_files import parse_step
from nsa_lab.runs.environment import get_code_identity, get_versions
from nsa_lab.runs.events import read_events
from nsa_lab.runs.lock import ANOTHER_TRAINER, lock_owner, sign_lock, take_lock
from nsa_lab.train import checkpoint_state
from nsa_lab.train.build import Builders, TrainContext, build_context, select_device, set_determinism
from nsa_lab.train.checkpoint import CheckpointStore, NoValidCheckpoint
from nsa_lab.train.distributed import World
from nsa_lab.train.estimate import average_over_stages, compute_flops_per_token
from nsa_lab.train.guard import Finding, Halt
from nsa_lab.train.preflight.startup_checks import run_preflight
from nsa_lab.train.signals import StopRequested, StopSignals
from nsa_lab.train.telemetry.event_log import EventLog
from nsa_lab.train.telemetry.heartbeat import Heartbeat, StallRule
from nsa_lab.train.telemetry.recorder import Recorder
from nsa_lab.train.telemetry.system_metrics import make_gpu_utilization_reader
from nsa_lab.train.trainer import Trainer
from nsa_lab.train.validation import compute_probe_logits, measure_xz_reference

logger = logging.getLogger("nsa_lab.train")

USAGE_ERRORS = (ConfigError, DataError, BackendError, NotImplementedError, checkpoint_state.ResumeRefused)

# Phases in which a long silence is normal; everything else is judged against its own median.
PHASE_STALL_FLOORS_S = {
    "prepare": 1800.0,
    "build": 600.0,
    "preflight": 900.0,
    "compile": 1800.0,
    "eval": 900.0,
    "save": 600.0,
    "restore": 600.0,
}


def run(run_dir: str | Path, *, builders: Builders | None = None, lock: int | None = None, supervised: bool = False) -> int:
    """Train the run in `run_dir` to its end, or to a stop; the exit code.

    `lock` is the run's lock if the caller took it already (see `take_lock`); `supervised` says that the process
    which started this rank took it and signed it. Raises `RunDirectoryError` if the directory is not a run's or another
    trainer works in it.
    """
    folder, world = directory.check_run_dir(run_dir), World.from_environment()
    held = _take_run_lock(folder, lock) if world.is_first and not supervised else lock
    try:
        config = RunConfig.from_yaml(folder / directory.CONFIG)
        return _Attempt(folder, config, world, builders or Builders()).run()
    except ConfigError as error:
        logger.error("%s", error)
        directory.write_status(
            folder, run=folder.name, status=directory.HALTED, exit_code=directory.EXIT_USAGE, reason=str(error)
        )
        return directory.EXIT_USAGE
    finally:
        if held is not None:
            os.close(held)


def _take_run_lock(folder: Path, lock: int | None) -> int:
    lock = take_lock(folder) if lock is None else lock
    if lock is None:
        raise directory.RunDirectoryError(ANOTHER_TRAINER.format(folder=folder, owner=lock_owner(folder)))
    os.set_inheritable(lock, False)
    sign_lock(lock, os.getpid())
    return lock


class _Attempt:
    """Builds the parts, restores them, trains, and turns every way of ending into an event, a status and an exit code."""

    def __init__(self, folder: Path, config: RunConfig, world: World, builders: Builders) -> None:
        self.folder, self.config, self.world, self.builders = folder, config, world, builders
        self.events = read_events(folder)
        attempt = 1 + max((event["attempt"] for event in self.events), default=0)
        log = EventLog(folder, folder.name, attempt)
        self.recorder = Recorder(
            folder, log, is_first=world.is_first, steps=config.train.steps, count_tokens=config.train.tokens_until
        )
        self._fill_pace = ProgressMeter()
        self._stall_finding: Finding | None = None
        self.signals = StopSignals(folder / "stacks.txt", self._on_signal, self._on_second_signal)

    def run(self) -> int:
        with self.signals:
            try:
                self.recorder.write_status(directory.RUNNING)
                return self._train()
            except StopRequested as stop:
                if self._stall_finding:
                    return self._record_end("halt", directory.HALTED, directory.EXIT_HALTED, self._stall_finding.text)
                return self._record_end("end", directory.PREEMPTED, directory.EXIT_STOPPED, f"stopped on request ({stop})")
            except Halt as halt:
                return self._record_end("halt", directory.HALTED, directory.EXIT_HALTED, str(halt))
            except NoValidCheckpoint as error:
                self.recorder.record_error(error, expected=True)
                return self._record_end("halt", directory.HALTED, directory.EXIT_HALTED, str(error))
            except USAGE_ERRORS as error:
                self.recorder.record_error(error, expected=True)
                return self._record_end("halt", directory.HALTED, directory.EXIT_USAGE, str(error))
            except Exception as error:  # noqa: BLE001 - nothing above this records it
                self.recorder.record_error(error)
                return self._record_end("halt", directory.HALTED, directory.EXIT_BUG, f"{type(error).__name__}: {error}")
            finally:
                self.recorder.close()
                self.world.destroy_process_group()

    def _train(self) -> int:
        if self.world.is_first and (warning := older_variables.warning(os.environ)):
            logger.warning("%s", warning)
        device = select_device(self.config, self.world)
        set_determinism(self.config.runtime.deterministic)
        if self.world.is_first:
            self._remove_leftovers()
        self.world.init_process_group(device)
        # The first rank may have written its first event before another counted the attempts.
        self.recorder.log.attempt = int(self.world.broadcast_from_first(self.recorder.log.attempt, device))
        self.config.train.check_ranks(self.world.size)
        utilisation, why_none = make_gpu_utilization_reader(device)
        heartbeat = Heartbeat(
            self.recorder.log,
            self.recorder.phases,
            every_s=self.config.runtime.heartbeat_s,
            rule=StallRule(floors_s={**PHASE_STALL_FLOORS_S, "data": self.config.data.timeout_s}),
            stacks=self.folder / "stacks.txt",
            get_gpu_util=utilisation,
            on_stall=self._on_stall,
            on_unresponsive=self._on_unresponsive,
        )
        if self.world.is_first:
            heartbeat.start()
        try:
            parts = self._build_context(device)
            parts.facts["gpu_util"] = why_none or "on"
            with self.recorder.phases("restore"):
                done, losses = self._resume(parts)
            evaluated = any(event["kind"] == "eval" and event["step"] == done for event in self.events)
            trainer = Trainer(
                self.folder,
                parts,
                self.recorder,
                self.signals,
                completed_steps=done,
                spike_losses=losses,
                is_evaluated=evaluated,
            )
            trainer.run()
        finally:
            heartbeat.stop()
        return self._record_end("end", directory.DONE, directory.EXIT_DONE, f"all {self.config.train.steps} steps done")

    def _remove_leftovers(self) -> None:
        """What a check before the run, or a status being written, left behind when it was killed."""
        for leftover in self.folder.glob(".preflight-*"):
            shutil.rmtree(leftover)
        # Nobody else writes these: this process holds the lock, and has written its first status.
        for leftover in self.folder.glob(f".{directory.STATUS}.*"):
            leftover.unlink()

    def _build_context(self, device: torch.device) -> TrainContext:
        model, train = self.config.model, self.config.train
        with self.recorder.phases("prepare"), self._allow_interrupt():
            dataset = self.builders.data(
                self.config.data,
                model.vocab_size,
                train.longest_stage.seq_len,
                self._on_fill,
                self._get_recorded_data_identity(),
            )
        with self.recorder.phases("build"), self._allow_interrupt():
            parts = build_context(self.config, self.world, device, dataset, self.builders)
        parts.facts.update(self._collect_facts(parts))
        return parts

    def _get_recorded_data_identity(self) -> str | None:
        """What the run was begun with, as its record says; None for a run that begins now."""
        begun = [event["data_identity"] for event in self.events if event.get("data_identity")]
        return begun[-1] if begun else None

    def _collect_facts(self, context: TrainContext) -> dict[str, Any]:
        """What identifies this run and this attempt, for the first event and for every checkpoint."""
        device = torch.cuda.get_device_name(context.device) if context.device.type == "cuda" else "cpu"
        return {
            "run": self.folder.name,
            "config_hash": self.config.hash(),
            "trajectory": checkpoint_state.get_trajectory_settings(self.config),
            "data_identity": context.dataset.identity,
            **({"source_missing": context.dataset.source_error} if context.dataset.source_error else {}),
            "code": get_code_identity(),
            "versions": {**get_versions(), "torch": torch.__version__, "cuda": torch.version.cuda},
            "device": device,
            "ranks": self.world.size,
            "threads": torch.get_num_threads(),
            "backend": {
                branch: {"backend": choice.backend, "reason": choice.reason}
                for branch, choice in context.model.backends.items()
            },
            "params": context.model.parameter_count(),
            **self._compute_work_per_token(context),
        }

    def _compute_work_per_token(self, context: TrainContext) -> dict[str, Any]:
        """What a token costs, of documents as long as they are; and how they lie in the rows of a first epoch."""
        train, data, lengths = self.config.train, self.config.data, context.batches.count_document_lengths()
        reads = [geometry.mean_reads(of_stage, self.config.nsa) for of_stage in lengths]
        laid_out = (
            {"packing": context.batches.summarize_packing()}
            if data.documents == "mask" or data.packing == "best_fit"
            else {}
        )
        return {
            "flops_per_token": compute_flops_per_token(cast(NSATransformer, context.model), train, lengths),
            "reads_per_token": average_over_stages(train, reads),
            **laid_out,
        }

    def _resume(self, context: TrainContext) -> tuple[int, list[float]]:
        """Steps done and the losses of the spike window: of the newest valid checkpoint, or of a fresh start."""
        store = CheckpointStore(self.folder / directory.CHECKPOINTS)
        path = self._find_newest_checkpoint(store, context.device)
        if path is None:
            if any(event["kind"] == "checkpoint" for event in self.events):
                raise NoValidCheckpoint(
                    f"{store.folder}: the record speaks of checkpoints and the folder holds none. "
                    "The run is not started over; restore a step-… folder, or create a new run"
                )
            self.recorder.record_start(0, {**context.facts, "settings": monitor_settings.get_monitor_settings(self.config)})
            self.recorder.record_reference(measure_xz_reference(context))
            self._run_preflight(context)
            return 0, []
        state = checkpoint_state.read_state(path)
        checkpoint_state.check_same_trajectory(state, self.config, context.dataset.identity)
        checkpoint_state.restore(path, context)
        context.enter_stage(state["step"])
        difference = checkpoint_state.check_probe(
            path,
            compute_probe_logits(context),
            require_equal=self._requires_equal_bits(state, context.facts),
            precision=self.config.runtime.precision,
        )
        found = {"checkpoint": path.name, "probe_difference": difference}
        self.recorder.record_start(
            state["step"], {**context.facts, "settings": monitor_settings.get_monitor_settings(self.config), **found}
        )
        return state["step"], state["guard"]["losses"]

    def _requires_equal_bits(self, state: dict[str, Any], facts: dict[str, Any]) -> bool:
        """Whether equal bits are owed: same code, versions, device, kernels and threads, and exact kernels."""
        exact = facts["device"] == "cpu" or self.config.runtime.deterministic
        same = ("versions", "device", "backend", "threads", "ranks")
        return exact and state["code"]["source"] == facts["code"]["source"] and all(state[k] == facts[k] for k in same)

    def _find_newest_checkpoint(self, store: CheckpointStore, device: torch.device) -> Path | None:
        """The newest valid checkpoint. The first rank verifies and moves damaged ones aside; the others take its word."""
        path, moved = store.load_latest() if self.world.is_first else (None, [])
        for found in moved:
            self.recorder.record_quarantine(found)
        step = self.world.broadcast_from_first(float(parse_step(path)) if path else -1.0, device)
        return store.get_path(int(step)) if step >= 0 else None

    def _run_preflight(self, context: TrainContext) -> None:
        with self.recorder.phases("preflight"), self._allow_interrupt():
            failed = []
            for check in run_preflight(context, self.folder):
                self.recorder.record_preflight(check)
                failed += [] if check.ok else [f"{check.name}: {check.value} (limit: {check.limit})"]
        if self.world.any_rank(bool(failed), context.device):
            reasons = "; ".join(failed) or "see the other ranks"
            raise Halt(Finding("preflight", 0, len(failed), 0, "halt", f"preflight refuses this run: {reasons}"))

    def _allow_interrupt(self) -> contextlib.AbstractContextManager:
        """One rank among several must not leave the others waiting in a collective; it stops at its first step."""
        return self.signals.raise_immediately() if self.world.size == 1 else contextlib.nullcontext()

    def _on_fill(self, progress: BuildProgress) -> None:
        self.signals.raise_if_requested()
        if self._fill_pace.observe(progress):
            self.recorder.phases.report_progress()
        if told := self._fill_pace.take_report():
            self.recorder.record_fill(told)

    def _on_stall(self, phase: str, seconds: float, limit_s: float) -> bool:
        """In the heartbeat's thread: halt the run, where it is to, by the way that a stop request takes."""
        if self.config.train.stall_action != "halt":
            return False
        step = self.recorder.log.step
        text = (
            f"step {step}: the phase {phase} has lasted {seconds:.0f} s without a sign, and {limit_s:.0f} s is its limit "
            "(train.stall_action: halt); stacks.txt shows where every thread stood"
        )
        self._stall_finding = Finding("stall", step, seconds, limit_s, "halt", text)
        self.recorder.record_finding(self._stall_finding)
        self.signals.request_stop()
        return True

    def _on_unresponsive(self) -> None:
        """In the heartbeat's thread: the trainer does not come back from where it stalled, so nothing more can be saved."""
        assert self._stall_finding is not None, "nothing is waited for before a stall"
        reason = (
            f"{self._stall_finding.text}. The trainer did not answer a request to save, and the newest checkpoint stands"
        )
        self.recorder.record_end("halt", directory.HALTED, directory.EXIT_HALTED, reason)
        os._exit(directory.EXIT_HALTED)

    def _on_signal(self, name: str) -> None:
        self.recorder.log.append("signal", signal=name, phase=self.recorder.phases.get_current()[0], action="save and exit")

    def _on_second_signal(self, name: str) -> None:
        self.recorder.log.append("signal", signal=name, phase=self.recorder.phases.get_current()[0], action="exit at once")
        self.recorder.write_status(
            directory.PREEMPTED, exit_code=directory.EXIT_STOPPED, reason=f"stopped at once ({name})"
        )

    def _record_end(self, kind: str, status: str, exit_code: int, reason: str) -> int:
        self.recorder.record_end(kind, status, exit_code, reason)
        return exit_code
