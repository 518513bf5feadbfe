"""The trainer: step after step, with logging, evaluation and saves at their own cadences.

Invariants
* The state of the run after step s is a function of its configuration and data. Killing and resuming changes nothing;
  on a GPU, nothing but rounding unless `runtime.deterministic`.
* Step s, counted from 1, takes batch s - 1; `done` is the last step whose update was applied.
* The host looks at results one step late, and a log point is no exception: the device has the next step to work on while
  this one is written down. It is waited for where its state is needed: evaluations and saves.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from nsa_lab.data import Batch, Prefetcher
from nsa_lab.train import postmortem
from nsa_lab.train.build import TrainContext
from nsa_lab.train.checkpoint_manager import CheckpointManager
from nsa_lab.train.guard import Finding, GateRule, Halt, SpikeRule, ThroughputRule, check_non_finite
from nsa_lab.train.lr_schedule import compute_learning_rate
from nsa_lab.train.packing import find_steps_with_new_capacity
from nsa_lab.train.signals import StopRequested, StopSignals
from nsa_lab.train.step import AUXILIARY, GRAD_NORM, LOSS, NON_FINITE, STOP, TEXT_LOSS, TEXT_TOKENS, AsyncHostCopy, Readback
from nsa_lab.train.telemetry.recorder import Recorder
from nsa_lab.train.telemetry.system_metrics import compute_percentile, count_bytes_by_dtype, get_peak_memory_bytes
from nsa_lab.train.validation import (
    GateMovement,
    compute_branch_statistics,
    compute_norms_by_layer,
    dry_run_evaluation,
    evaluate_held_out,
    measure_run_selection_benefit,
)

logger = logging.getLogger("nsa_lab.train")


class Trainer:
    """Takes a run from `done` steps to all of them. `parts` are built and restored already.

    `evaluated`: whether the record has an evaluation of the state after `done` steps; one that was due there, and was
    stopped before it was over, is made up for.
    """

    def __init__(
        self,
        run_dir: Path,
        context: TrainContext,
        recorder: Recorder,
        signals: StopSignals,
        *,
        completed_steps: int,
        spike_losses: list[float],
        is_evaluated: bool = True,
    ) -> None:
        self.run_dir, self.context, self.recorder, self.signals = run_dir, context, recorder, signals
        self.train = context.config.train
        self.completed_steps = completed_steps
        self._is_evaluated = is_evaluated
        self._checkpoints = CheckpointManager(run_dir, context, recorder, completed_steps=completed_steps)
        self._readback = Readback(context.device)
        self._spike_rule = SpikeRule(self.train.spike_sigma, spike_losses)
        self._throughput_rule = ThroughputRule(self.train.min_tokens_per_s)
        self._gate_rule, self._gate_movement = GateRule(), GateMovement(context.model)
        self._latest_result: list[float] = []
        # Steps that are to be logged when their result is here: the rate they were taken with, and statistics, if any.
        self._pending_logs: dict[int, tuple[float, AsyncHostCopy | None]] = {}
        self._interval = _LogInterval(completed_steps)
        self._first_step = completed_steps + 1
        self._stage_first_steps = self.train.first_steps

    def run(self) -> None:
        """Train to the last step. Raises `StopRequested` or `Halt` with the state saved."""
        try:
            self._train()
        except Halt as halt:
            self._write_postmortem(halt.finding)
            raise
        finally:
            gc.unfreeze()

    def _train(self) -> None:
        try:
            if self.completed_steps == 0 or (self._is_evaluation_due(self.completed_steps) and not self._is_evaluated):
                self._evaluate()
            self._compile_ahead()
            self._train_steps()
        except StopRequested:
            # What is still on the device is read first, so that a bad step is not saved as a good one.
            with contextlib.suppress(StopRequested):
                self._process_results(include_newest=True)
            self._save_final()
            raise
        self._save_final()

    def _compile_ahead(self) -> None:
        """The first step, and an evaluation, of every stage that is still to begin, and the first step of each number of
        documents that blocks are compiled for, without an effect: what they compile is then there when it is needed."""
        if self._stage_first_steps[-1] <= self.completed_steps + 1 and not self.context.config.runtime.compile:
            return
        with self._exclude_from_step_time("compile"), self._allow_interrupt():
            ahead = self._list_steps_to_compile()
            for step in ahead:
                self.context.enter_stage(step)
                self.context.stepper.dry_run(self._get_batch_share(step - 1))
                if self.train.eval_every and step in self._stage_first_steps:
                    dry_run_evaluation(self.context, self.context.get_evaluation(step))
                self.recorder.phases.report_progress()
            self.context.enter_stage(self.completed_steps)
        if ahead:
            self.recorder.record_compile([self.train.stage_at(step) for step in ahead])

    def _list_steps_to_compile(self) -> list[int]:
        """Of the steps after the next one, which compiles for itself, those that would compile."""
        after = self.completed_steps + 1
        anew = set(self._stage_first_steps)
        if self.context.config.runtime.compile:
            anew.update(find_steps_with_new_capacity(self.context.batches, self.train, self.context.world.size, after))
        return sorted(step for step in anew if step > after)

    def _train_steps(self) -> None:
        with Prefetcher(
            self._get_batch_share,
            first=self.completed_steps,
            stop=self.train.steps,
            timeout_s=self.context.config.data.timeout_s,
            pin_memory=self.context.device.type == "cuda",
        ) as batches:
            while self.completed_steps < self.train.steps:
                self._train_step(self.completed_steps + 1, batches)

    def _get_batch_share(self, index: int) -> Batch:
        """This rank's sequences of batch `index`."""
        share = self.context.world.get_sequence_share(self.train.stage_at(index + 1).sequences_per_step)
        return self.context.batches.weighted_batch(index, *share)

    def _train_step(self, step: int, batches: Prefetcher) -> None:
        self._poll_stop()
        with self.recorder.phases("data"):
            batch: Batch | None = batches.get(
                step - 1, should_stop=self.signals.should_stop if self._is_single_rank else None
            )
        if batch is None:
            self.signals.raise_if_requested()
        assert batch is not None, "no batch comes only where a stop was asked for, which check() raises"
        self._interval.data_waits_s.append(self.recorder.phases.get_last_duration("data"))
        # The first step of an attempt compiles and tunes, for minutes, without a line of ours being run; that of a later
        # stage was rehearsed, and captures a graph where steps are graphs.
        first = step == self._first_step or step in self._stage_first_steps
        if first:
            self.context.enter_stage(step)
        phase = "compile" if first else "step"
        with self.recorder.phases(phase):
            result = self.context.stepper.step(
                batch.inputs,
                batch.targets,
                compute_learning_rate(step, self.train),
                self._poll_stop,
                weights=batch.weights,
                documents=batch.documents,
                should_stop=self.signals.should_stop(),
                interruptible=self._allow_interrupt if first else contextlib.nullcontext,
            )
        self.completed_steps = step
        self.recorder.set_step(step)
        self._readback.push(step, result)
        self._finish_step(step, batch, phase)

    def _finish_step(self, step: int, batch: Batch, phase: str) -> None:
        train, last = self.train, step == self.train.steps
        stats = step % train.stats_every == 0
        log = stats or last or step in self._stage_first_steps or step % train.log_every == 0
        evaluation = self._is_evaluation_due(step)
        save = bool(train.save_every) and step % train.save_every == 0
        if log:
            self._pending_logs[step] = self.context.stepper.applied_lr, self._collect_statistics(batch) if stats else None
        self._process_results(include_newest=last or evaluation or save or step == self._first_step, phase=phase)
        if step == self._first_step:
            # Nothing made so far is garbage; scanning it again and again would cost a pause each time.
            gc.collect()
            gc.freeze()
        if evaluation:
            self._evaluate()
        if save:
            self._save()

    def _is_evaluation_due(self, step: int) -> bool:
        every = self.train.eval_every
        return bool(every) and (step == self.train.steps or step % every == 0)

    def _process_results(self, *, include_newest: bool, phase: str = "step") -> None:
        # On a GPU the step itself only queues work, and it is here that it is waited for.
        with self.recorder.phases(phase, record_duration=False):
            ready = self._readback.take(include_newest=include_newest)
        for step, result in ready:
            finding = check_non_finite(step, result[LOSS], result[GRAD_NORM], result[NON_FINITE])
            if finding:
                # This step and those after it were skipped on the device.
                self.completed_steps = step - 1
                self.recorder.set_step(self.completed_steps)
                self._handle_finding(finding)
            self._latest_result = result
            if step in self._stage_first_steps[1:]:
                # Another length has losses and a pace of its own.
                self._spike_rule = SpikeRule(self.train.spike_sigma)
                self._throughput_rule = ThroughputRule(self.train.min_tokens_per_s)
            self._handle_finding(self._spike_rule.observe(step, result[LOSS]))
            if step in self._pending_logs:
                self._log_step(step, *self._pending_logs.pop(step))
            if result[STOP] and not self._is_single_rank:
                raise StopRequested(self.signals.requested_signal or "another rank")

    def _handle_finding(self, finding: Finding | None) -> None:
        if finding is None:
            return
        self.recorder.record_finding(finding)
        if finding.action == "halt":
            raise Halt(finding)

    def _log_step(self, step: int, lr: float, statistics: AsyncHostCopy | None) -> None:
        """Write down a step whose result was just read."""
        loss, norm = self._latest_result[LOSS], self._latest_result[GRAD_NORM]
        steps, dt_s, waits_s = self._interval.close(step)
        tokens = self.train.tokens_until(step) - self.train.tokens_until(step - steps)
        speed = tokens / (steps * dt_s)
        numbers: dict[str, Any] = {
            "loss": loss,
            "bpb": self._to_bits_per_byte(loss),
            **self._compute_losses_by_kind(),
            **({"selection_loss": self._latest_result[AUXILIARY]} if self.context.config.model.has_selection_loss else {}),
            "lr": lr,
            "grad_norm": norm,
            "dt_s": dt_s,
            "data_s": math.fsum(waits_s) / steps,
            "data_s_p50": compute_percentile(waits_s, 0.5),
            "data_s_p95": compute_percentile(waits_s, 0.95),
            "tokens_per_s": speed,
            "mem_peak_bytes": get_peak_memory_bytes(self.context.device),
        }
        if statistics or step in self._stage_first_steps:
            numbers["weight_bytes"] = count_bytes_by_dtype(self.context.model.parameters())
            moments = (value for state in self.context.optimizer.state.values() for value in state.values())
            numbers["optimizer_bytes"] = count_bytes_by_dtype(moments)
        if statistics:
            numbers |= {"grad_norm_layers": [], "gate_update": []} | statistics.wait()
            # They were taken after clipping.
            unclipped = max(1.0, norm / self.train.grad_clip)
            numbers["grad_norm_layers"] = [unclipped * value for value in numbers["grad_norm_layers"]]
        self.recorder.record_step(step, numbers)
        for finding in self._gate_rule.observe(step, numbers.get("gate_saturation", []), numbers.get("gate_update", [])):
            self._handle_finding(finding)
        if step > self._first_step and step not in self._stage_first_steps:
            # Ranks time themselves differently and must judge alike.
            speed = self.context.world.broadcast_from_first(speed, self.context.device)
            self._handle_finding(self._throughput_rule.observe(step, speed, tokens / speed))

    def _collect_statistics(self, batch: Batch) -> AsyncHostCopy:
        """Per layer: gates, selection, branch norms, how far the gate weights moved, gradient norms after clipping.

        Everything is queued on the device and nothing waits for it. On a CPU it is computed here, outside of training. A
        stop waits for it: the step is done, and a step that has no reading stays without one.
        """
        own_time = self._exclude_from_step_time if self.context.device.type == "cpu" else self.recorder.phases
        full = self.context.world.full_tensor
        with own_time("stats"):
            vectors = compute_branch_statistics(self.context, batch)
            norms = compute_norms_by_layer(self.context.model, lambda p: p.grad)
            layers = [full(norm) for name, norm in norms.items() if name.startswith("blocks.")]
            moved = [full(distance) for distance in self._gate_movement.measure()]
            if layers:
                vectors["grad_norm_layers"] = torch.stack(layers)
            if moved:
                vectors["gate_update"] = torch.stack(moved)
            return AsyncHostCopy(vectors)

    def _evaluate(self) -> None:
        held_out = self.context.get_evaluation(self.completed_steps)
        with self._exclude_from_step_time("eval"), self._allow_interrupt():
            found = evaluate_held_out(self.context, held_out, self._poll_stop)
        told = {
            "seq_len": self.train.stage_at(self.completed_steps).seq_len,
            "windows": held_out.n_windows,
            "text": held_out.identity,
            "loss": found.loss,
            "bpb": self._to_bits_per_byte(found.loss),
            **({} if found.first_token_loss is None else {"first_loss": found.first_token_loss}),
            **({"window_losses": found.window_losses} if self.completed_steps == self.train.steps else {}),
        }
        length = self.train.stage_at(self.completed_steps).seq_len
        with self._exclude_from_step_time("eval"), self._allow_interrupt():
            reached = measure_run_selection_benefit(self.context, length)
        # Both or neither: what a stop cut off is made up for where no evaluation of the step is recorded.
        self.recorder.record_evaluation("validation", told)
        if reached is not None:
            self.recorder.record_selection_benefit(length, reached)

    def _save(self) -> None:
        """Write a checkpoint of the state after `done` steps, once. Two failures in a row halt the run."""
        if self.completed_steps != self._checkpoints.last_saved_step:
            with self._exclude_from_step_time("save"):
                self._checkpoints.save(self.completed_steps, self._spike_rule.losses)

    def _save_final(self) -> None:
        """What is not saved now never is, so a failure is tried again at once. Raises `Halt` if that fails as well."""
        while self.completed_steps != self._checkpoints.last_saved_step:
            self._save()

    def _write_postmortem(self, finding: Finding) -> None:
        """Save the clean state first; the replay that the bundle needs comes after."""
        with contextlib.suppress(Halt):
            self._save()
        with self.recorder.phases("diagnosis"):
            bundle = postmortem.collect_postmortem(self.context, finding, self.completed_steps)
            try:
                folder = postmortem.write_postmortem(self.run_dir, finding, self.context.world.rank, bundle)
            except OSError as error:
                self.recorder.record_nonfatal_error("diagnosis", error)
                return
        logger.info("diagnosis in %s", folder)

    @property
    def _is_single_rank(self) -> bool:
        return self.context.world.size == 1

    def _poll_stop(self) -> None:
        # Several ranks must stop at the same step: their wishes travel with the loss instead.
        if self._is_single_rank:
            self.signals.raise_if_requested()

    def _allow_interrupt(self) -> contextlib.AbstractContextManager:
        """Where a stop may be raised at any line: nothing that a checkpoint holds is being changed."""
        return self.signals.raise_immediately() if self._is_single_rank else contextlib.nullcontext()

    @contextlib.contextmanager
    def _exclude_from_step_time(self, phase: str) -> Iterator[None]:
        with self.recorder.phases(phase):
            yield
        self._interval.excluded_s += self.recorder.phases.get_last_duration(phase)

    def _compute_losses_by_kind(self) -> dict[str, float]:
        """Of a step with weights: `loss` is the weighted mean that is trained on, over everything; `bpb` is that of text
        alone, whatever weighs 1; `marked_loss` is the mean over the rest, nats per token. `first_loss`, where documents are
        told apart, is that of their first tokens, which nothing leads to; `loss` and `bpb` count those as any other. Where
        answers weigh 1, too, nothing tells them apart, and all is text."""
        names = ("bpb", "marked_loss", "first_loss")
        sums, counts = self._latest_result[TEXT_LOSS::2], self._latest_result[TEXT_TOKENS::2]
        told = {name: total / n for name, total, n in zip(names, sums, counts, strict=False) if n}
        return told | ({"bpb": self._to_bits_per_byte(told["bpb"])} if "bpb" in told else {})

    def _to_bits_per_byte(self, loss: float) -> float:
        return loss / math.log(2) / self.context.dataset.bytes_per_token


class _LogInterval:
    """Time between two log points: seconds per step, without evaluation, saves and statistics."""

    def __init__(self, step: int) -> None:
        self._step, self._start_time = step, time.monotonic()
        self.excluded_s = 0.0
        self.data_waits_s: list[float] = []

    def close(self, step: int) -> tuple[int, float, list[float]]:
        """Steps since the last call, mean seconds per step, and the seconds that each waited for data."""
        count, now = step - self._step, time.monotonic()
        told = count, max(now - self._start_time - self.excluded_s, 1e-9) / count, self.data_waits_s
        self._step, self._start_time = step, now
        self.excluded_s, self.data_waits_s = 0.0, []
        return told
