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
from nsa_lab.train import diagnosis
from nsa_lab.train.documents import first_of_each_room
from nsa_lab.train.guard import Finding, GateRule, Halt, SpikeRule, ThroughputRule, non_finite
from nsa_lab.train.measure import (
    GateMovement,
    branch_statistics,
    evaluate_apart,
    layer_norms,
    rehearse_evaluation,
    selection_reach,
)
from nsa_lab.train.parts import Parts
from nsa_lab.train.saves import Saves
from nsa_lab.train.schedule import learning_rate
from nsa_lab.train.signals import StopRequested, StopSignals
from nsa_lab.train.step import AUXILIARY, BAD, GRAD_NORM, LOSS, STOP, TEXT_LOSS, TEXT_TOKENS, Fetched, Readback
from nsa_lab.train.telemetry.machine import bytes_by_dtype, memory_peak_bytes, percentile
from nsa_lab.train.telemetry.recorder import Recorder

logger = logging.getLogger("nsa_lab.train")


class Trainer:
    """Takes a run from `done` steps to all of them. `parts` are built and restored already.

    `evaluated`: whether the record has an evaluation of the state after `done` steps; one that was due there, and was
    stopped before it was over, is made up for.
    """

    def __init__(
        self,
        run_dir: Path,
        parts: Parts,
        record: Recorder,
        signals: StopSignals,
        *,
        done: int,
        losses: list[float],
        evaluated: bool = True,
    ) -> None:
        self.run_dir, self.parts, self.record, self.signals = run_dir, parts, record, signals
        self.train = parts.config.train
        self.done = done
        self._evaluated = evaluated
        self._saves = Saves(run_dir, parts, record, done=done)
        self._readback = Readback(parts.device)
        self._spike = SpikeRule(self.train.spike_sigma, losses)
        self._throughput = ThroughputRule(self.train.min_tokens_per_s)
        self._gates, self._movement = GateRule(), GateMovement(parts.model)
        self._latest: list[float] = []
        # Steps that are to be logged when their result is here: the rate they were taken with, and statistics, if any.
        self._to_log: dict[int, tuple[float, Fetched | None]] = {}
        self._interval = _Interval(done)
        self._first = done + 1
        self._begins = self.train.first_steps

    def run(self) -> None:
        """Train to the last step. Raises `StopRequested` or `Halt` with the state saved."""
        try:
            self._run()
        except Halt as halt:
            self._leave_diagnosis(halt.finding)
            raise
        finally:
            gc.unfreeze()

    def _run(self) -> None:
        try:
            if self.done == 0 or (self._evaluation_due(self.done) and not self._evaluated):
                self._evaluate()
            self._rehearse()
            self._steps()
        except StopRequested:
            # What is still on the device is read first, so that a bad step is not saved as a good one.
            with contextlib.suppress(StopRequested):
                self._judge(everything=True)
            self._save_at_last()
            raise
        self._save_at_last()

    def _rehearse(self) -> None:
        """The first step, and an evaluation, of every stage that is still to begin, and the first step of each number of
        documents that blocks are compiled for, without an effect: what they compile is then there when it is needed."""
        if self._begins[-1] <= self.done + 1 and not self.parts.config.runtime.compile:
            return
        with self._outside_training("compile"), self._interruptible():
            ahead = self._compiled_anew()
            for step in ahead:
                self.parts.enter(step)
                self.parts.stepper.rehearse(self._share_of(step - 1))
                if self.train.eval_every and step in self._begins:
                    rehearse_evaluation(self.parts, self.parts.evaluation_at(step))
                self.record.phases.moved()
            self.parts.enter(self.done)
        if ahead:
            self.record.compiled_ahead([self.train.stage_at(step) for step in ahead])

    def _compiled_anew(self) -> list[int]:
        """Of the steps after the next one, which compiles for itself, those that would compile."""
        after = self.done + 1
        anew = set(self._begins)
        if self.parts.config.runtime.compile:
            anew.update(first_of_each_room(self.parts.batches, self.train, self.parts.world.size, after))
        return sorted(step for step in anew if step > after)

    def _steps(self) -> None:
        with Prefetcher(
            self._share_of,
            first=self.done,
            stop=self.train.steps,
            timeout_s=self.parts.config.data.timeout_s,
            pin_memory=self.parts.device.type == "cuda",
        ) as batches:
            while self.done < self.train.steps:
                self._one(self.done + 1, batches)

    def _share_of(self, index: int) -> Batch:
        """This rank's sequences of batch `index`."""
        share = self.parts.world.share(self.train.stage_at(index + 1).sequences_per_step)
        return self.parts.batches.weighted(index, *share)

    def _one(self, step: int, batches: Prefetcher) -> None:
        self._poll()
        with self.record.phases("data"):
            batch: Batch | None = batches.get(step - 1, should_stop=self.signals.should_stop if self._alone else None)
        if batch is None:
            self.signals.check()
        assert batch is not None, "no batch comes only where a stop was asked for, which check() raises"
        self._interval.waits_s.append(self.record.phases.last("data"))
        # The first step of an attempt compiles and tunes, for minutes, without a line of ours being run; that of a later
        # stage was rehearsed, and captures a graph where steps are graphs.
        first = step == self._first or step in self._begins
        if first:
            self.parts.enter(step)
        phase = "compile" if first else "step"
        with self.record.phases(phase):
            result = self.parts.stepper.step(
                batch.inputs,
                batch.targets,
                learning_rate(step, self.train),
                self._poll,
                weights=batch.weights,
                documents=batch.documents,
                stop=self.signals.should_stop(),
                interruptible=self._interruptible if first else contextlib.nullcontext,
            )
        self.done = step
        self.record.at(step)
        self._readback.push(step, result)
        self._after(step, batch, phase)

    def _after(self, step: int, batch: Batch, phase: str) -> None:
        train, last = self.train, step == self.train.steps
        stats = step % train.stats_every == 0
        log = stats or last or step in self._begins or step % train.log_every == 0
        evaluation = self._evaluation_due(step)
        save = bool(train.save_every) and step % train.save_every == 0
        if log:
            self._to_log[step] = self.parts.stepper.applied_lr, self._statistics(batch) if stats else None
        self._judge(everything=last or evaluation or save or step == self._first, phase=phase)
        if step == self._first:
            # Nothing made so far is garbage; scanning it again and again would cost a pause each time.
            gc.collect()
            gc.freeze()
        if evaluation:
            self._evaluate()
        if save:
            self._save()

    def _evaluation_due(self, step: int) -> bool:
        every = self.train.eval_every
        return bool(every) and (step == self.train.steps or step % every == 0)

    def _judge(self, *, everything: bool, phase: str = "step") -> None:
        # On a GPU the step itself only queues work, and it is here that it is waited for.
        with self.record.phases(phase, counts=False):
            ready = self._readback.take(everything=everything)
        for step, result in ready:
            finding = non_finite(step, result[LOSS], result[GRAD_NORM], result[BAD])
            if finding:
                # This step and those after it were skipped on the device.
                self.done = step - 1
                self.record.at(self.done)
                self._act(finding)
            self._latest = result
            if step in self._begins[1:]:
                # Another length has losses and a pace of its own.
                self._spike = SpikeRule(self.train.spike_sigma)
                self._throughput = ThroughputRule(self.train.min_tokens_per_s)
            self._act(self._spike.observe(step, result[LOSS]))
            if step in self._to_log:
                self._log(step, *self._to_log.pop(step))
            if result[STOP] and not self._alone:
                raise StopRequested(self.signals.requested or "another rank")

    def _act(self, finding: Finding | None) -> None:
        if finding is None:
            return
        self.record.finding(finding)
        if finding.action == "halt":
            raise Halt(finding)

    def _log(self, step: int, lr: float, statistics: Fetched | None) -> None:
        """Write down a step whose result was just read."""
        loss, norm = self._latest[LOSS], self._latest[GRAD_NORM]
        steps, dt_s, waits_s = self._interval.close(step)
        tokens = self.train.tokens_by(step) - self.train.tokens_by(step - steps)
        speed = tokens / (steps * dt_s)
        numbers: dict[str, Any] = {
            "loss": loss,
            "bpb": self._bits_per_byte(loss),
            **self._told_apart(),
            **({"selection_loss": self._latest[AUXILIARY]} if self.parts.config.model.taught else {}),
            "lr": lr,
            "grad_norm": norm,
            "dt_s": dt_s,
            "data_s": math.fsum(waits_s) / steps,
            "data_s_p50": percentile(waits_s, 0.5),
            "data_s_p95": percentile(waits_s, 0.95),
            "tokens_per_s": speed,
            "mem_peak_bytes": memory_peak_bytes(self.parts.device),
        }
        if statistics or step in self._begins:
            numbers["weight_bytes"] = bytes_by_dtype(self.parts.model.parameters())
            moments = (value for state in self.parts.optimizer.state.values() for value in state.values())
            numbers["optimizer_bytes"] = bytes_by_dtype(moments)
        if statistics:
            numbers |= {"grad_norm_layers": [], "gate_update": []} | statistics.take()
            # They were taken after clipping.
            unclipped = max(1.0, norm / self.train.grad_clip)
            numbers["grad_norm_layers"] = [unclipped * value for value in numbers["grad_norm_layers"]]
        self.record.step(step, numbers)
        for finding in self._gates.observe(step, numbers.get("gate_saturation", []), numbers.get("gate_update", [])):
            self._act(finding)
        if step > self._first and step not in self._begins:
            # Ranks time themselves differently and must judge alike.
            speed = self.parts.world.from_first(speed, self.parts.device)
            self._act(self._throughput.observe(step, speed, tokens / speed))

    def _statistics(self, batch: Batch) -> Fetched:
        """Per layer: gates, selection, branch norms, how far the gate weights moved, gradient norms after clipping.

        Everything is queued on the device and nothing waits for it. On a CPU it is computed here, outside of training. A
        stop waits for it: the step is done, and a step that has no reading stays without one.
        """
        own_time = self._outside_training if self.parts.device.type == "cpu" else self.record.phases
        full = self.parts.world.full
        with own_time("stats"):
            vectors = branch_statistics(self.parts, batch)
            norms = layer_norms(self.parts.model, lambda p: p.grad)
            layers = [full(norm) for name, norm in norms.items() if name.startswith("blocks.")]
            moved = [full(distance) for distance in self._movement.take()]
            if layers:
                vectors["grad_norm_layers"] = torch.stack(layers)
            if moved:
                vectors["gate_update"] = torch.stack(moved)
            return Fetched(vectors)

    def _evaluate(self) -> None:
        held_out = self.parts.evaluation_at(self.done)
        with self._outside_training("eval"), self._interruptible():
            found = evaluate_apart(self.parts, held_out, self._poll)
        told = {
            "seq_len": self.train.stage_at(self.done).seq_len,
            "windows": held_out.windows,
            "text": held_out.identity,
            "loss": found.loss,
            "bpb": self._bits_per_byte(found.loss),
            **({} if found.first_loss is None else {"first_loss": found.first_loss}),
            **({"window_losses": found.windows} if self.done == self.train.steps else {}),
        }
        length = self.train.stage_at(self.done).seq_len
        with self._outside_training("eval"), self._interruptible():
            reached = selection_reach(self.parts, length)
        # Both or neither: what a stop cut off is made up for where no evaluation of the step is recorded.
        self.record.evaluation("validation", told)
        if reached is not None:
            self.record.reach(length, reached)

    def _save(self) -> None:
        """Write a checkpoint of the state after `done` steps, once. Two failures in a row halt the run."""
        if self.done != self._saves.saved:
            with self._outside_training("save"):
                self._saves.save(self.done, self._spike.losses)

    def _save_at_last(self) -> None:
        """What is not saved now never is, so a failure is tried again at once. Raises `Halt` if that fails as well."""
        while self.done != self._saves.saved:
            self._save()

    def _leave_diagnosis(self, finding: Finding) -> None:
        """Save the clean state first; the replay that the bundle needs comes after."""
        with contextlib.suppress(Halt):
            self._save()
        with self.record.phases("diagnosis"):
            bundle = diagnosis.diagnose(self.parts, finding, self.done)
            try:
                folder = diagnosis.write(self.run_dir, finding, self.parts.world.rank, bundle)
            except OSError as error:
                self.record.trouble("diagnosis", error)
                return
        logger.info("diagnosis in %s", folder)

    @property
    def _alone(self) -> bool:
        return self.parts.world.size == 1

    def _poll(self) -> None:
        # Several ranks must stop at the same step: their wishes travel with the loss instead.
        if self._alone:
            self.signals.check()

    def _interruptible(self) -> contextlib.AbstractContextManager:
        """Where a stop may be raised at any line: nothing that a checkpoint holds is being changed."""
        return self.signals.at_once() if self._alone else contextlib.nullcontext()

    @contextlib.contextmanager
    def _outside_training(self, phase: str) -> Iterator[None]:
        with self.record.phases(phase):
            yield
        self._interval.excluded_s += self.record.phases.last(phase)

    def _told_apart(self) -> dict[str, float]:
        """Of a step with weights: `loss` is the weighted mean that is trained on, over everything; `bpb` is that of text
        alone, whatever weighs 1; `marked_loss` is the mean over the rest, nats per token. `first_loss`, where documents are
        told apart, is that of their first tokens, which nothing leads to; `loss` and `bpb` count those as any other. Where
        answers weigh 1, too, nothing tells them apart, and all is text."""
        names = ("bpb", "marked_loss", "first_loss")
        sums, counts = self._latest[TEXT_LOSS::2], self._latest[TEXT_TOKENS::2]
        told = {name: total / n for name, total, n in zip(names, sums, counts, strict=False) if n}
        return told | ({"bpb": self._bits_per_byte(told["bpb"])} if "bpb" in told else {})

    def _bits_per_byte(self, loss: float) -> float:
        return loss / math.log(2) / self.parts.dataset.bytes_per_token


class _Interval:
    """Time between two log points: seconds per step, without evaluation, saves and statistics."""

    def __init__(self, step: int) -> None:
        self._step, self._begun = step, time.monotonic()
        self.excluded_s = 0.0
        self.waits_s: list[float] = []

    def close(self, step: int) -> tuple[int, float, list[float]]:
        """Steps since the last call, mean seconds per step, and the seconds that each waited for data."""
        count, now = step - self._step, time.monotonic()
        told = count, max(now - self._begun - self.excluded_s, 1e-9) / count, self.waits_s
        self._step, self._begun = step, now
        self.excluded_s, self.waits_s = 0.0, []
        return told
