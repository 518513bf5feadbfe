"""Record what the trainer does: events, TensorBoard, status and the lines of trainer.log.

Only rank 0 records progress; every rank can record an error.
"""

from __future__ import annotations

import logging
import os
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nsa_lab.config import StageConfig
from nsa_lab.evaluate.conversion import ConversionProgress
from nsa_lab.evaluate.selection_benefit import SelectionBenefit
from nsa_lab.runs import directory
from nsa_lab.runs.checkpoint_files import parse_step
from nsa_lab.runs.summary import format_fill_progress
from nsa_lab.train.checkpoint import QuarantinedCheckpoint, SavedCheckpoint
from nsa_lab.train.guard import Finding, PreflightCheck
from nsa_lab.train.telemetry.event_log import EventLog
from nsa_lab.train.telemetry.phases import Phases
from nsa_lab.train.telemetry.tensorboard_writer import TensorBoardWriter

logger = logging.getLogger("nsa_lab.train")

STATUS_EVERY_S = 5.0


class Recorder:
    """Writes the records of one attempt.

    `is_first`: whether this is rank 0. `count_tokens(n)`: number of tokens of the first n steps.
    """

    def __init__(
        self, run_dir: Path, log: EventLog, *, is_first: bool, steps: int, count_tokens: Callable[[int], int]
    ) -> None:
        self.run_dir, self.log, self.phases = run_dir, log, Phases()
        self._is_first, self._steps, self._count_tokens = is_first, steps, count_tokens
        self._tensorboard: TensorBoardWriter | None = None
        self._status_time = 0.0

    def set_step(self, step: int) -> None:
        """Set the step of the following events."""
        self.log.step, self.log.tokens = step, self._count_tokens(step)

    def record_start(self, from_step: int, fields: dict[str, Any]) -> None:
        """Record the first event of an attempt: `start` at step 0, else `resume`."""
        self.set_step(from_step)
        if not self._is_first:
            return
        self._tensorboard = TensorBoardWriter(
            self.run_dir / directory.TENSORBOARD, from_step, lambda error: self.record_nonfatal_error("tensorboard", error)
        )
        kind = "resume" if from_step else "start"
        # The settings of the trajectory are in config.yaml and in every checkpoint, so the event omits them.
        event_fields = {name: value for name, value in fields.items() if name not in ("run", "trajectory")}
        self.log.append(
            kind,
            from_step=from_step,
            steps=self._steps,
            tensorboard=self._tensorboard.disabled_reason or "on",
            **self._describe_environment(),
            **event_fields,
        )
        self.log.append_digest()
        logger.info("%s of %s at step %d of %d", kind, self.log.run, from_step, self._steps)

    def _describe_environment(self) -> dict[str, str]:
        try:
            return {"environment": directory.compute_file_digest(self.run_dir / directory.ENVIRONMENT)}
        except OSError as error:
            self.record_nonfatal_error(directory.ENVIRONMENT, error)
            return {}

    def record_fill(self, progress: dict[str, Any]) -> None:
        """Record the progress of data preparation, before the run begins."""
        if self._is_first:
            self.log.append("fill", **progress)
            logger.info("%s", format_fill_progress(progress))

    def record_compile(self, stages: Sequence[StageConfig]) -> None:
        """Record the shapes of `stages`, compiled in the phase `compile` that just ended."""
        if self._is_first:
            shapes = list(dict.fromkeys((stage.sequences_per_forward, stage.seq_len) for stage in stages))
            seconds = round(self.phases.get_last_duration("compile"), 3)
            self.log.append("compile", shapes=shapes, seconds=seconds)
            logger.info("compiled ahead in %.1f s: %s", seconds, ", ".join(f"{n} x {length}" for n, length in shapes))

    def record_step(self, step: int, numbers: dict[str, Any]) -> None:
        """Record the numbers of a step, which may be the one before the current step."""
        if not self._is_first:
            return
        self._write_numbers("step", step, numbers)
        logger.info(
            "step %d/%d  loss %.4f  lr %.3g  grad norm %.3g  %.0f tokens/s",
            step,
            self._steps,
            numbers["loss"],
            numbers["lr"],
            numbers["grad_norm"],
            numbers["tokens_per_s"],
        )
        if time.monotonic() - self._status_time > STATUS_EVERY_S:
            self.write_status(directory.RUNNING)

    def record_evaluation(self, split: str, numbers: dict[str, Any]) -> None:
        """Record an evaluation at the current step. `numbers` has `loss`, `bpb` and the identity of the text."""
        if self._is_first:
            self._write_numbers(
                "eval", self.log.step, {"split": split, **numbers, "seconds": self.phases.get_last_duration("eval")}
            )
            values = self.log.step, split, numbers["loss"], numbers["bpb"]
            logger.info("step %d  %s loss %.4f  %.4f bits per byte", *values)

    def record_references(self, references: Sequence[dict[str, Any]]) -> None:
        """Record reference values for the held-out text: `name`, size of the text in `bytes`, and `bpb`."""
        for reference in references if self._is_first else ():
            self.log.append("reference", **reference)
            logger.info("%s of the held-out text: %.4f bits per byte", reference["name"], reference["bpb"])

    def record_selection_benefit(self, length: int, benefit: SelectionBenefit | str) -> None:
        """Record the selection benefit at the current step, or the reason why it was not measured."""
        if not self._is_first:
            return
        fields = {"length": length, "why_not": benefit} if isinstance(benefit, str) else asdict(benefit)
        self.log.append("reach", **fields)
        if not isinstance(benefit, str):
            losses = ", ".join(f"{name} {loss:.3f}" for name, loss in benefit.answer_loss.items())
            logger.info("step %d  answers beyond the window, nats per byte: %s", self.log.step, losses)

    def record_conversion(self, length: int, progress: ConversionProgress | str) -> None:
        """Record the comparison of a converted model with dense attention, or the reason why it was not measured."""
        if not self._is_first:
            return
        fields = {"length": length, "why_not": progress} if isinstance(progress, str) else asdict(progress)
        self.log.append("conversion", **fields)
        if not isinstance(progress, str):
            losses = ", ".join(f"{name} {loss:.4f}" for name, loss in progress.loss.items())
            logger.info("step %d  loss by attention, nats per token: %s", self.log.step, losses)

    def record_checkpoint(self, saved: SavedCheckpoint) -> None:
        """Record a checkpoint, which may be one of an earlier step: a save in the background takes several steps."""
        step = parse_step(saved.path)
        self.log.append(
            "checkpoint",
            step=step,
            tokens=self._count_tokens(step),
            path=f"{directory.CHECKPOINTS}/{saved.path.name}",
            bytes=saved.size_bytes,
            seconds=round(saved.seconds, 3),
            pruned=saved.pruned,
        )
        if self._is_first:
            self.log.append_digest()
        logger.info("saved %s, %.1f MB in %.2f s", saved.path.name, saved.size_bytes / 1e6, saved.seconds)
        self.write_status(directory.RUNNING)

    def record_nonfatal_error(self, where: str, error: Exception) -> None:
        """Record an `error` event for a failure that does not end the run."""
        self.log.append("error", where=where, type=type(error).__name__, message=str(error), fatal=False)
        logger.error("%s failed: %s", where, error)

    def record_quarantine(self, checkpoint: QuarantinedCheckpoint) -> None:
        problems = "; ".join(checkpoint.problems)
        self.log.append(
            "guard",
            rule="checkpoint",
            value=problems,
            limit=None,
            action="quarantined",
            path=checkpoint.path.relative_to(self.run_dir).as_posix(),
            checkpoint_step=checkpoint.step,
            text=f"the checkpoint of step {checkpoint.step} is damaged and was moved to quarantine: {problems}",
        )
        logger.warning("checkpoint of step %d quarantined: %s", checkpoint.step, problems)

    def record_preflight(self, check: PreflightCheck) -> None:
        if self._is_first:
            self.log.append("preflight", **asdict(check))
            logger.info(
                "preflight %-20s %s  %s (limit: %s)",
                check.name,
                "ok    " if check.ok else "FAILED",
                check.value,
                check.limit,
            )

    def record_finding(self, finding: Finding) -> None:
        if self._is_first:
            self.log.append("guard", **asdict(finding))
            logger.warning("%s: %s", finding.rule, finding.text)

    def record_error(self, error: BaseException, *, expected: bool = False) -> None:
        """Record a fatal `error` event of any rank, with traceback. The log contains the traceback of a bug only."""
        self.log.append(
            "error",
            where=self.phases.get_current()[0],
            type=type(error).__name__,
            message=str(error),
            traceback="".join(traceback.format_exception(error)),
            fatal=True,
        )
        logger.error("%s", error, exc_info=None if expected else error)

    def record_end(self, kind: str, status: str, exit_code: int, reason: str) -> None:
        """Record the end of an attempt: `end`, or `halt` with its reason, the digest of all lines, and the final status."""
        if not self._is_first:
            return
        self.log.append(kind, status=status, exit_code=exit_code, reason=reason)
        digest = self.log.append_digest()
        self.log.sync()  # the status must not name a digest that a power failure removes
        self.write_status(status, exit_code=exit_code, reason=reason, events_digest=digest)
        logger.info("%s at step %d: %s", status, self.log.step, reason)

    def write_status(
        self, status: str, *, exit_code: int | None = None, reason: str | None = None, events_digest: str | None = None
    ) -> None:
        """Replace the status. `events_digest`: SHA-256 of the line of the last `digest` event; None: as before."""
        if not self._is_first:
            return
        try:
            directory.write_status(
                self.run_dir,
                run=self.log.run,
                status=status,
                attempt=self.log.attempt,
                pid=os.getpid(),
                step=self.log.step,
                steps=self._steps,
                tokens=self.log.tokens,
                exit_code=exit_code,
                reason=reason,
                **({} if events_digest is None else {"events_digest": events_digest}),
            )
        except OSError as error:
            self.record_nonfatal_error("status", error)
        self._status_time = time.monotonic()

    def close(self) -> None:
        if self._tensorboard:
            self._tensorboard.close()
        self.log.close()

    def _write_numbers(self, kind: str, step: int, numbers: dict[str, Any]) -> None:
        self.log.append(kind, step=step, tokens=self._count_tokens(step), **numbers)
        if self._tensorboard:
            group = f"eval/{numbers['split']}" if kind == "eval" else "train"
            self._tensorboard.write(group, step, numbers)
