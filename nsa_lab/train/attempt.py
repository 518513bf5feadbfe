"""One attempt at a run, from taking its lock to its last event and exit code.

Invariants
* One trainer per run directory. A new attempt resumes from the newest valid checkpoint. If checkpoints were written and
  none is valid, it stops with an error; it never starts over.
* Status: RUNNING, then DONE (exit 0), HALTED by a rule (3), or PREEMPTED on request (75). Invalid settings or data exit
  with 2, a bug with 1. Both leave HALTED with the reason, and the traceback in an `error` event.
"""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path
from typing import Any, cast

import torch

from nsa_lab.attention import BackendError, geometry
from nsa_lab.config import ConfigError, RunConfig
from nsa_lab.config.errors import describe_os_error
from nsa_lab.data import BuildProgress, DataError, ProgressMeter
from nsa_lab.model import NSATransformer
from nsa_lab.runs import directory
from nsa_lab.runs.atomic_io import remove_path, warn_of_remainder
from nsa_lab.runs.checkpoint_files import parse_step
from nsa_lab.runs.environment import get_code_identity, get_versions
from nsa_lab.runs.events import read_events
from nsa_lab.runs.history import get_monitor_settings
from nsa_lab.runs.lock import ANOTHER_TRAINER, lock_owner, sign_lock, take_lock
from nsa_lab.runs.trajectory import get_trajectory_settings
from nsa_lab.train import checkpoint_content, checkpoint_state
from nsa_lab.train.build import Builders, TrainContext, build_context, select_device, set_determinism
from nsa_lab.train.checkpoint import CheckpointStore, NoValidCheckpoint
from nsa_lab.train.distributed import World
from nsa_lab.train.estimate import average_over_stages, compute_flops_per_token
from nsa_lab.train.guard import Finding, Halt
from nsa_lab.train.precompile import precompile_in_trainer
from nsa_lab.train.preflight.startup_checks import run_preflight
from nsa_lab.train.signals import StopRequested, StopSignals
from nsa_lab.train.teacher import compute_fingerprint
from nsa_lab.train.telemetry.event_log import EventLog
from nsa_lab.train.telemetry.heartbeat import Heartbeat, StallRule
from nsa_lab.train.telemetry.recorder import Recorder
from nsa_lab.train.telemetry.system_metrics import make_gpu_utilization_reader
from nsa_lab.train.trainer import Trainer
from nsa_lab.train.validation import compute_probe_logits, measure_references

logger = logging.getLogger("nsa_lab.train")

USAGE_ERRORS = (
    *(ConfigError, DataError, BackendError, NotImplementedError, checkpoint_state.ResumeRefused),
    directory.RunDirectoryError,
)

# Minimum duration of a stall for phases that may run long without progress; other phases use StallRule.floor_s.
PHASE_STALL_FLOORS_S = {
    "prepare": 1800.0,
    "build": 600.0,
    "preflight": 900.0,
    "compile": 1800.0,
    "eval": 900.0,
    "save": 600.0,
    "restore": 600.0,
}


def run(
    run_dir: str | Path, *, builders: Builders | None = None, lock: int | None = None, store: Path | None = None
) -> int:
    """Train the run in `run_dir` until it is done or stopped. Return the exit code.

    `lock`: descriptor of the run's lock if the caller has taken it already (see `take_lock`). `store`: this process is a
    rank of a supervisor, which has taken and signed the lock, and this is the file in which its ranks meet. Raises
    `RunDirectoryError` if `run_dir` is not a run directory or another trainer is using it.
    """
    folder, environment_error = directory.check_run_dir(run_dir), None
    try:
        world = World.from_environment(store)
    except ConfigError as error:
        world, environment_error = World(), error
    lock_fd = _take_run_lock(folder, lock) if world.is_first and not store else lock
    try:
        if environment_error:
            raise environment_error
        config = RunConfig.from_yaml(folder / directory.CONFIG)
        return _Attempt(folder, config, world, builders or Builders()).run()
    except (ConfigError, OSError) as error:
        reason = describe_os_error(error) if isinstance(error, OSError) else str(error)
        if reason is None:
            raise
        logger.error("%s", reason)
        directory.write_status(
            folder, run=folder.name, status=directory.HALTED, exit_code=directory.EXIT_USAGE, reason=reason
        )
        return directory.EXIT_USAGE
    finally:
        if lock_fd is not None:
            os.close(lock_fd)


def _take_run_lock(folder: Path, lock: int | None) -> int:
    lock = take_lock(folder) if lock is None else lock
    if lock is None:
        raise directory.RunDirectoryError(ANOTHER_TRAINER.format(folder=folder, owner=lock_owner(folder)))
    os.set_inheritable(lock, False)
    sign_lock(lock, os.getpid())
    return lock


class _Attempt:
    """Build the training context, restore it, train, and turn every outcome into an event, a status and an exit code."""

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
        self.signals = StopSignals(
            folder / directory.STACKS, self._on_signal, self._on_second_signal, self.recorder.phases.clock.note_continued
        )

    def run(self) -> int:
        code = directory.EXIT_BUG
        with self.signals:
            try:
                code = self._train_and_record_end()
            finally:
                self.recorder.close()
                # All ranks stop, halt and end at the same step. One rank can fail without the others.
                self.world.destroy_process_group(is_alone=code in (directory.EXIT_USAGE, directory.EXIT_BUG))
        return code

    def _train_and_record_end(self) -> int:
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
        except Exception as error:  # noqa: BLE001 - any other error is a bug; record it
            text = describe_os_error(error) if isinstance(error, OSError) else None
            self.recorder.record_error(error, expected=text is not None)
            if text is not None:
                return self._record_end("halt", directory.HALTED, directory.EXIT_USAGE, text)
            return self._record_end("halt", directory.HALTED, directory.EXIT_BUG, f"{type(error).__name__}: {error}")

    def _train(self) -> int:
        device = select_device(self.config, self.world)
        set_determinism(self.config.runtime.deterministic)
        if self.world.is_first:
            self._remove_leftovers()
        self.world.init_process_group(device)
        # Rank 0 may have written its first event before another rank counted the attempts.
        self.recorder.log.attempt = int(self.world.broadcast_from_first(self.recorder.log.attempt, device))
        self.config.check_ranks(self.world.size)
        get_gpu_util, unavailable_reason = make_gpu_utilization_reader(device)
        heartbeat = Heartbeat(
            self.recorder.log,
            self.recorder.phases,
            every_s=self.config.runtime.heartbeat_s,
            rule=StallRule(floors_s={**PHASE_STALL_FLOORS_S, "data": self.config.data.timeout_s}),
            stacks=self.folder / directory.STACKS,
            get_gpu_util=get_gpu_util,
            on_stall=self._on_stall,
            on_unresponsive=self._on_unresponsive,
        )
        if self.world.is_first:
            heartbeat.start()
        try:
            context = self._build_context(device)
            context.facts["gpu_util"] = unavailable_reason or "on"
            with self.recorder.phases("compile"), self._allow_interrupt():
                if seconds := precompile_in_trainer(self.config, device):
                    logger.info("compiled the kernels of every stage in %.1f s", seconds)
            with self.recorder.phases("restore"):
                completed_steps, spike_losses = self._resume(context)
            is_evaluated = any(event["kind"] == "eval" and event["step"] == completed_steps for event in self.events)
            # On another host, the events that a rank has read may be older.
            is_evaluated = bool(self.world.broadcast_from_first(float(is_evaluated), device))
            trainer = Trainer(
                self.folder,
                context,
                self.recorder,
                self.signals,
                completed_steps=completed_steps,
                spike_losses=spike_losses,
                is_evaluated=is_evaluated,
            )
            trainer.run()
        finally:
            heartbeat.stop()
        reason = directory.format_done_reason(self.config.train.steps)
        return self._record_end("end", directory.DONE, directory.EXIT_DONE, reason)

    def _remove_leftovers(self) -> None:
        """Remove the files that a killed process left: folders of a preflight, and a half-written status."""
        # No other process writes these: this process holds the lock and has written its first status.
        for leftover in (*self.folder.glob(".preflight-*"), *self.folder.glob(f".{directory.STATUS}.*")):
            try:
                remove_path(leftover)
            except OSError as error:
                warn_of_remainder(leftover, error)

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
            context = build_context(self.config, self.world, device, dataset, self.builders)
        context.facts.update(self._collect_facts(context))
        return context

    def _get_recorded_data_identity(self) -> str | None:
        """Return the data identity that earlier events of this run recorded; None for a new run."""
        identities = [event["data_identity"] for event in self.events if event.get("data_identity")]
        return identities[-1] if identities else None

    def _collect_facts(self, context: TrainContext) -> dict[str, Any]:
        """Return what identifies this run and this attempt, for the first event and for every checkpoint."""
        device = torch.cuda.get_device_name(context.device) if context.device.type == "cuda" else "cpu"
        return {
            "run": self.folder.name,
            "config_hash": self.config.hash(),
            "trajectory": get_trajectory_settings(self.config),
            "data_identity": context.dataset.identity,
            **({"source_missing": context.dataset.source_error} if context.dataset.source_error else {}),
            "code": get_code_identity(),
            "versions": {**get_versions(), "torch": torch.__version__, "cuda": torch.version.cuda},
            "device": device,
            "ranks": self.world.size,
            "threads": torch.get_num_threads(),
            "backend": {
                branch: {"backend": resolved.backend, "reason": resolved.reason}
                for branch, resolved in context.model.backends.items()
            },
            "params": context.model.parameter_count(),
            **({"teacher": compute_fingerprint(context.teacher)} if context.teacher else {}),
            **({"indexer": self._describe_indexers()} if self.config.is_conversion else {}),
            **self._compute_work_per_token(context),
        }

    def _describe_indexers(self) -> str:
        from nsa_lab.convert import has_indexers  # needs the extra hf

        return "loaded" if has_indexers(cast(str, self.config.train.initial_weights)) else "new"

    def _compute_work_per_token(self, context: TrainContext) -> dict[str, Any]:
        """Return FLOPs and attention reads per token for the actual document lengths, and packing statistics of epoch 1."""
        train, data, lengths = self.config.train, self.config.data, context.batches.count_document_lengths()
        reads_per_token = [geometry.mean_reads(stage_lengths, self.config.nsa) for stage_lengths in lengths]
        packing = (
            {"packing": context.batches.summarize_packing()}
            if data.documents == "mask" or data.packing == "best_fit"
            else {}
        )
        return {
            "flops_per_token": compute_flops_per_token(cast(NSATransformer, context.model), train, lengths),
            "reads_per_token": average_over_stages(train, reads_per_token),
            **packing,
        }

    def _resume(self, context: TrainContext) -> tuple[int, list[float]]:
        """Restore the newest valid checkpoint, or start a new run.

        Return the number of completed steps and the losses in the window of the spike rule.
        """
        store = CheckpointStore(self.folder / directory.CHECKPOINTS)
        path = self._find_newest_checkpoint(store, context.device)
        if path is None:
            if any(event["kind"] == "checkpoint" for event in self.events):
                raise NoValidCheckpoint(
                    f"{store.folder}: the events record checkpoints, but the folder has none. "
                    "The run is not started over; restore a step-… folder, or create a new run"
                )
            self.recorder.record_start(0, {**context.facts, "settings": get_monitor_settings(self.config)})
            self.recorder.record_references(measure_references(context))
            self._run_preflight(context)
            return 0, []
        state = checkpoint_state.read_state(path)
        checkpoint_state.check_same_trajectory(state, self.config, context.dataset.identity, context.facts.get("teacher"))
        checkpoint_state.restore(path, context)
        context.enter_stage(state["step"])
        difference = checkpoint_state.check_probe(
            path,
            compute_probe_logits(context),
            require_equal=self._requires_equal_bits(state, context.facts),
            precision=self.config.runtime.precision,
        )
        restored = {"checkpoint": path.name, "probe_difference": difference}
        self.recorder.record_start(
            state["step"], {**context.facts, "settings": get_monitor_settings(self.config), **restored}
        )
        return state["step"], state["guard"]["losses"]

    def _requires_equal_bits(self, state: dict[str, Any], facts: dict[str, Any]) -> bool:
        """Return whether the restored model must reproduce the probe bit for bit.

        True if code, versions, device, backends, threads and ranks are the same, and the kernels are deterministic.
        """
        is_deterministic = facts["device"] == "cpu" or self.config.runtime.deterministic
        keys = ("versions", "device", "backend", "threads", "ranks")
        return (
            is_deterministic
            and state["code"]["source"] == facts["code"]["source"]
            and all(state[key] == facts[key] for key in keys)
        )

    def _find_newest_checkpoint(self, store: CheckpointStore, device: torch.device) -> Path | None:
        """Return the newest valid checkpoint. Rank 0 verifies and quarantines damaged ones; other ranks get its result."""
        path, quarantined = store.load_latest(checkpoint_content.find_problems) if self.world.is_first else (None, [])
        for checkpoint in quarantined:
            self.recorder.record_quarantine(checkpoint)
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
            raise Halt(Finding("preflight", 0, len(failed), 0, "halt", f"preflight failed: {reasons}"))

    def _allow_interrupt(self) -> contextlib.AbstractContextManager:
        """Let a stop request interrupt this block if there is one rank.

        With several ranks, an interrupted rank would leave the others waiting in a collective; they stop at the next
        step.
        """
        return self.signals.raise_immediately() if self.world.size == 1 else contextlib.nullcontext()

    def _on_fill(self, progress: BuildProgress) -> None:
        self.signals.raise_if_requested()
        if self._fill_pace.observe(progress):
            self.recorder.phases.report_progress()
        if report := self._fill_pace.take_report():
            self.recorder.record_fill(report)

    def _on_stall(self, phase: str, seconds: float, limit_s: float) -> bool:
        """Stop the run, as a stop request does, if `train.stall_action` is halt. Runs in the heartbeat thread."""
        if self.config.train.stall_action != "halt":
            return False
        step = self.recorder.log.step
        text = (
            f"step {step}: the phase {phase} has made no progress for {seconds:.0f} s, limit {limit_s:.0f} s "
            f"(train.stall_action: halt); {directory.STACKS} has the stack of every thread"
        )
        self._stall_finding = Finding("stall", step, seconds, limit_s, "halt", text)
        self.recorder.record_finding(self._stall_finding)
        self.signals.request_stop()
        return True

    def _on_unresponsive(self) -> None:
        """End the process, because the trainer did not return from the stalled phase and cannot save.

        Runs in the heartbeat thread.
        """
        assert self._stall_finding is not None, "only called after a stall"
        reason = (
            f"{self._stall_finding.text}. The trainer did not respond to the request to save; "
            "the newest checkpoint is unchanged"
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
