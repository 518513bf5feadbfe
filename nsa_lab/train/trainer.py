"""The training loop: steps, logging, evaluation and checkpoints at their intervals.

Invariants
* The state after step s is a function of configuration and data. Killing and resuming a run changes nothing on a CPU or
  with `runtime.deterministic`, and only rounding otherwise.
* Step s, counted from 1, uses batch s - 1. `completed_steps` is the last step whose update was applied.
* The host reads results one step late, also at log points, so the device has the next step queued. The host waits for the
  device only when it needs its state: for evaluations and saves.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import math
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
from nsa_lab.train.step import (
    AUXILIARY,
    GRAD_NORM,
    LOSS,
    NON_FINITE,
    STOP,
    TEACHER_KL,
    TEXT_LOSS,
    TEXT_TOKENS,
    AsyncHostCopy,
    Readback,
)
from nsa_lab.train.telemetry.awake_clock import AwakeClock
from nsa_lab.train.telemetry.recorder import Recorder
from nsa_lab.train.telemetry.system_metrics import compute_percentile, count_bytes_by_dtype, get_peak_memory_bytes
from nsa_lab.train.validation import (
    MAX_MEASURED_TOKENS,
    GateMovement,
    compute_branch_statistics,
    compute_norms_by_layer,
    evaluate_held_out,
    measure_conversion_progress,
    measure_run_selection_benefit,
)

logger = logging.getLogger("nsa_lab.train")


class Trainer:
    """Trains a run from `completed_steps` to its last step. `context` is built and restored already.

    `is_evaluated`: whether the events contain an evaluation after `completed_steps` steps. If one was due but
    interrupted, it is done first.
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
        # Steps to log once their result is read: learning rate and, if collected, statistics.
        self._pending_logs: dict[int, tuple[float, AsyncHostCopy | None]] = {}
        self._interval = _LogInterval(completed_steps, recorder.phases.clock)
        self._first_step = completed_steps + 1
        self._stage_first_steps = self.train.first_steps
        if context.world.is_first and self.train.longest_stage.seq_len > MAX_MEASURED_TOKENS:
            logger.info(
                "layer statistics and the selection benefit are measured on texts of %s tokens, not of %s",
                f"{MAX_MEASURED_TOKENS:,}",
                f"{self.train.longest_stage.seq_len:,}",
            )

    def run(self) -> None:
        """Train to the last step. Raises `StopRequested` or `Halt` after saving the state."""
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
            # Read the pending results first, so that a bad step is not saved as a good one.
            with contextlib.suppress(StopRequested):
                self._process_results(include_newest=True)
            self._save_final()
            raise
        self._save_final()

    def _compile_ahead(self) -> None:
        """Compile everything that later steps need, by dry runs without effect on the state.

        Covers the first step of every stage to come and, if blocks are compiled, the first step with each new document
        capacity.
        """
        if self._stage_first_steps[-1] <= self.completed_steps + 1 and not self.context.config.runtime.compile:
            return
        with self._exclude_from_step_time("compile"), self._allow_interrupt():
            steps = self._list_steps_to_compile()
            for step in steps:
                self.context.enter_stage(step)
                self.context.stepper.dry_run(self._get_batch_share(step - 1))
                self.recorder.phases.report_progress()
            self.context.enter_stage(self.completed_steps)
        if steps:
            self.recorder.record_compile([self.train.stage_at(step) for step in steps])

    def _list_steps_to_compile(self) -> list[int]:
        """Return the steps after the next one that would compile. The next step itself compiles when it runs."""
        next_step = self.completed_steps + 1
        steps = set(self._stage_first_steps)
        if self.context.config.runtime.compile:
            world = self.context.world
            steps.update(
                find_steps_with_new_capacity(
                    self.context.batches, self.train, world.size, next_step, world.context_parallel
                )
            )
        return sorted(step for step in steps if step > next_step)

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
        """Return the sequences of batch `index` that this rank computes, alone or with others."""
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
        assert batch is not None, "get returns None only after a stop request, which raise_if_requested raises"
        self._interval.data_waits_s.append(self.recorder.phases.get_last_duration("data"))
        # The first step of an attempt compiles and autotunes for minutes inside torch. The first step of a later stage
        # was compiled ahead, but captures a CUDA graph if its steps use graphs.
        is_first = step == self._first_step or step in self._stage_first_steps
        if is_first:
            self.context.enter_stage(step)
        phase = "compile" if is_first else "step"
        with self.recorder.phases(phase):
            result = self.context.stepper.step(
                batch.inputs,
                batch.targets,
                compute_learning_rate(step, self.train),
                self._poll_stop,
                weights=batch.weights,
                documents=batch.documents,
                should_stop=self.signals.should_stop(),
                interruptible=self._allow_interrupt if is_first else contextlib.nullcontext,
            )
        self.completed_steps = step
        self.recorder.set_step(step)
        self._readback.push(step, result)
        self._finish_step(step, batch, phase)

    def _finish_step(self, step: int, batch: Batch, phase: str) -> None:
        train, is_last = self.train, step == self.train.steps
        has_statistics = step % train.stats_every == 0
        should_log = has_statistics or is_last or step in self._stage_first_steps or step % train.log_every == 0
        should_evaluate = self._is_evaluation_due(step)
        should_save = bool(train.save_every) and step % train.save_every == 0
        if should_log:
            self._pending_logs[step] = (
                self.context.stepper.applied_lr,
                self._collect_statistics(batch) if has_statistics else None,
            )
        self._process_results(
            include_newest=is_last or should_evaluate or should_save or step == self._first_step, phase=phase
        )
        if step == self._first_step:
            # Objects created so far stay alive; without freeze, every garbage collection would scan them again.
            gc.collect()
            gc.freeze()
        self._checkpoints.record_if_done()
        if should_evaluate:
            self._evaluate()
        if should_save:
            self._save()

    def _is_evaluation_due(self, step: int) -> bool:
        every = self.train.eval_every
        return bool(every) and (step == self.train.steps or step % every == 0)

    def _process_results(self, *, include_newest: bool, phase: str = "step") -> None:
        # On a GPU the step only queues work; the wait for its results is here.
        with self.recorder.phases(phase, record_duration=False):
            results = self._readback.take(include_newest=include_newest)
        for step, result in results:
            finding = check_non_finite(step, result[LOSS], result[GRAD_NORM], result[NON_FINITE])
            if finding:
                # The device skipped this step and later ones.
                self.completed_steps = step - 1
                self.recorder.set_step(self.completed_steps)
                self._handle_finding(finding)
            self._latest_result = result
            if step in self._stage_first_steps[1:]:
                # Losses and pace of another sequence length are not comparable.
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
        """Record a step whose result was just read."""
        loss, grad_norm = self._latest_result[LOSS], self._latest_result[GRAD_NORM]
        n_steps, dt_s, waits_s = self._interval.close(step)
        n_tokens = self.train.tokens_until(step) - self.train.tokens_until(step - n_steps)
        tokens_per_s = n_tokens / (n_steps * dt_s)
        numbers: dict[str, Any] = {
            "loss": loss,
            "bpb": self._to_bits_per_byte(loss),
            **self._compute_losses_by_kind(),
            **({"selection_loss": self._latest_result[AUXILIARY]} if self.context.config.model.has_selection_loss else {}),
            **({"teacher_kl": self._latest_result[TEACHER_KL]} if self.context.teacher else {}),
            "lr": lr,
            "grad_norm": grad_norm,
            "dt_s": dt_s,
            "data_s": math.fsum(waits_s) / n_steps,
            "data_s_p50": compute_percentile(waits_s, 0.5),
            "data_s_p95": compute_percentile(waits_s, 0.95),
            "tokens_per_s": tokens_per_s,
            "mem_peak_bytes": get_peak_memory_bytes(self.context.device),
        }
        if statistics or step in self._stage_first_steps:
            numbers["weight_bytes"] = count_bytes_by_dtype(self.context.model.parameters())
            moments = (value for state in self.context.optimizer.state.values() for value in state.values())
            numbers["optimizer_bytes"] = count_bytes_by_dtype(moments)
        if statistics:
            numbers |= {"grad_norm_layers": [], "gate_update": []} | statistics.wait()
            # Undo the clipping: the norms were computed after it.
            scale = max(1.0, grad_norm / self.train.grad_clip)
            numbers["grad_norm_layers"] = [scale * value for value in numbers["grad_norm_layers"]]
        self.recorder.record_step(step, numbers)
        for finding in self._gate_rule.observe(step, numbers.get("gate_saturation", []), numbers.get("gate_update", [])):
            self._handle_finding(finding)
        if step > self._first_step and step not in self._stage_first_steps:
            # Ranks measure different times, but must reach the same decision.
            tokens_per_s = self.context.world.broadcast_from_first(tokens_per_s, self.context.device)
            self._handle_finding(self._throughput_rule.observe(step, tokens_per_s, n_tokens / tokens_per_s))

    def _collect_statistics(self, batch: Batch) -> AsyncHostCopy:
        """Compute statistics per layer: gates, selection, branch norms, movement of gate weights, clipped gradient norms.

        On a GPU they are queued and nothing waits for them. On a CPU they are computed here, and the time is not counted
        as step time. A stop request is handled afterwards: the step is complete, and a step without statistics would not
        get them later.
        """
        phase = self._exclude_from_step_time if self.context.device.type == "cpu" else self.recorder.phases
        full_tensor = self.context.world.full_tensor
        with phase("stats"):
            vectors = compute_branch_statistics(self.context, batch)
            norms = compute_norms_by_layer(self.context.model, lambda parameter: parameter.grad)
            layers = [full_tensor(norm) for name, norm in norms.items() if name.startswith("blocks.")]
            movements = [full_tensor(distance) for distance in self._gate_movement.measure()]
            if layers:
                vectors["grad_norm_layers"] = torch.stack(layers)
            if movements:
                vectors["gate_update"] = torch.stack(movements)
            return AsyncHostCopy(vectors)

    def _evaluate(self) -> None:
        held_out = self.context.get_evaluation(self.completed_steps)
        length = min(self.train.stage_at(self.completed_steps).seq_len, MAX_MEASURED_TOKENS)
        # One phase, whose duration the record has.
        with self._exclude_from_step_time("eval"), self._allow_interrupt():
            result = evaluate_held_out(self.context, held_out, self._poll_stop)
            benefit = measure_run_selection_benefit(self.context, length)
            conversion = measure_conversion_progress(self.context, length)
        fields = {
            "seq_len": self.train.stage_at(self.completed_steps).seq_len,
            "windows": held_out.n_windows,
            "text": held_out.identity,
            "loss": result.loss,
            "bpb": self._to_bits_per_byte(result.loss),
            **({} if result.first_token_loss is None else {"first_loss": result.first_token_loss}),
            **({"window_losses": result.window_losses} if self.completed_steps == self.train.steps else {}),
        }
        # Record all or none: after an interrupted evaluation, the next attempt evaluates this step again.
        self.recorder.record_evaluation("validation", fields)
        if benefit is not None:
            self.recorder.record_selection_benefit(length, benefit)
        if conversion is not None:
            self.recorder.record_conversion(length, conversion)

    def _save(self) -> None:
        """Write a checkpoint of the state after `completed_steps` steps, once. Two consecutive failures halt the run."""
        if self.completed_steps != self._checkpoints.last_saved_step:
            with self._exclude_from_step_time("save"):
                self._checkpoints.save(self.completed_steps, self._spike_rule.losses)

    def _save_final(self) -> None:
        """Save the final state; retry once immediately, because there is no later save. Raises `Halt` if that fails too."""
        self._finish_save()
        while self.completed_steps != self._checkpoints.last_saved_step:
            self._save()
            self._finish_save()

    def _finish_save(self) -> None:
        with self._exclude_from_step_time("save"):
            self._checkpoints.finish()

    def _write_postmortem(self, finding: Finding) -> None:
        """Save the good state first, then replay the bad step and write the diagnosis."""
        with contextlib.suppress(Halt):
            self._save()
            self._finish_save()
        with self.recorder.phases("diagnosis"):
            diagnosis = postmortem.collect_postmortem(self.context, finding, self.completed_steps)
            try:
                folder = postmortem.write_postmortem(self.run_dir, finding, self.context.world.rank, diagnosis)
            except OSError as error:
                self.recorder.record_nonfatal_error("diagnosis", error)
                return
        logger.info("diagnosis in %s", folder)

    @property
    def _is_single_rank(self) -> bool:
        return self.context.world.size == 1

    def _poll_stop(self) -> None:
        # Several ranks must stop at the same step: their requests are reduced together with the loss.
        if self._is_single_rank:
            self.signals.raise_if_requested()

    def _allow_interrupt(self) -> contextlib.AbstractContextManager:
        """Let a stop request interrupt this block at any line, if there is one rank.

        The block must not change state that a checkpoint contains.
        """
        return self.signals.raise_immediately() if self._is_single_rank else contextlib.nullcontext()

    @contextlib.contextmanager
    def _exclude_from_step_time(self, phase: str) -> Iterator[None]:
        with self.recorder.phases(phase):
            yield
        self._interval.excluded_s += self.recorder.phases.get_last_duration(phase)

    def _compute_losses_by_kind(self) -> dict[str, float]:
        """Return the losses by kind of token, for a step with weights.

        The field `loss` is the weighted mean over all tokens, which is trained on. `bpb` covers tokens with weight 1
        (text), `marked_loss` the others, in nats per token. With document masking, `first_loss` covers first tokens of
        documents, which have no context; `loss` and `bpb` include them. If answers have weight 1 as well, all tokens
        count as text.
        """
        names = ("bpb", "marked_loss", "first_loss")
        sums, counts = self._latest_result[TEXT_LOSS::2], self._latest_result[TEXT_TOKENS::2]
        losses = {name: total / n for name, total, n in zip(names, sums, counts, strict=False) if n}
        return losses | ({"bpb": self._to_bits_per_byte(losses["bpb"])} if "bpb" in losses else {})

    def _to_bits_per_byte(self, loss: float) -> float:
        return loss / math.log(2) / self.context.dataset.bytes_per_token


class _LogInterval:
    """Measures the time between two log points, without evaluation, saves and statistics."""

    def __init__(self, step: int, clock: AwakeClock) -> None:
        self._clock = clock
        self._step, self._start_time = step, clock.now()
        self.excluded_s = 0.0
        self.data_waits_s: list[float] = []

    def close(self, step: int) -> tuple[int, float, list[float]]:
        """Return steps since the last call, mean seconds per step, and the seconds that each step waited for data."""
        n_steps, now = step - self._step, self._clock.now()
        result = n_steps, max(now - self._start_time - self.excluded_s, 1e-9) / n_steps, self.data_waits_s
        self._step, self._start_time = step, now
        self.excluded_s, self.data_waits_s = 0.0, []
        return result
