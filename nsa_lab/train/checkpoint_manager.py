"""Checkpoints written during training: each step once, with handling of failed saves."""

from __future__ import annotations

from pathlib import Path

from nsa_lab.runs.directory import CHECKPOINTS
from nsa_lab.train.build import TrainContext
from nsa_lab.train.checkpoint import CheckpointStore, SavedCheckpoint
from nsa_lab.train.checkpoint_writer import CheckpointWriter
from nsa_lab.train.guard import Finding, Halt
from nsa_lab.train.telemetry.recorder import Recorder


class CheckpointManager:
    """Writes the checkpoints of one attempt that starts after `completed_steps` steps.

    `last_saved_step`: the step of the last checkpoint that is written, or is being written.
    """

    def __init__(self, run_dir: Path, context: TrainContext, recorder: Recorder, *, completed_steps: int) -> None:
        self.context, self.recorder, self.last_saved_step = context, recorder, completed_steps
        train = context.config.train
        self._store = CheckpointStore(run_dir / CHECKPOINTS, keep_last=train.keep_last, keep_every=train.keep_every)
        self._writer = CheckpointWriter(context, self._store)
        self._n_failures, self._last_completed_step = 0, completed_steps
        self._recorded_path: Path | None = None

    def save(self, step: int, spike_losses: list[float]) -> None:
        """Write the state after `step` steps, and the losses in the window of the spike rule. Collective.

        With sharded weights, the save continues in the background; `finish` has its result. Raises `Halt` as `finish`.
        """
        self.finish()
        state = {
            **self.context.facts,
            "step": step,
            "tokens": self.context.config.train.tokens_until(step),
            "attempt": self.recorder.log.attempt,
            "guard": {"losses": spike_losses},
        }
        if self.context.world.is_first and not self._store.folder.exists():
            self._recreate_folder(step)
        facts = {"config_hash": state["config_hash"], "data_identity": state["data_identity"]}
        self._writer.start(step, state, facts)
        self.last_saved_step = step
        if not self.context.world.is_sharded:
            self.finish()

    def record_if_done(self) -> None:
        """Record a save that has completed in the background."""
        self._record(self._writer.poll())

    def finish(self) -> None:
        """Wait for the save in progress and record it. Collective.

        A failure is recorded and resets `last_saved_step`. Raises `Halt` after two consecutive failures.
        """
        if not self._writer.is_writing:
            return
        try:
            self._record(self._writer.finish())
        except OSError as error:
            # The disk may have space again at the next save, and earlier checkpoints are unchanged.
            step, self.last_saved_step = self.last_saved_step, self._last_completed_step
            if self.context.world.is_first:
                self.recorder.record_nonfatal_error("save", error)
            self._n_failures += 1
            if self._n_failures > 1:
                text = f"step {step}: saving failed {self._n_failures} consecutive times: {error}"
                raise Halt(Finding("save", step, self._n_failures, 1, "halt", text)) from None
        else:
            self._last_completed_step, self._n_failures = self.last_saved_step, 0

    def _record(self, saved: SavedCheckpoint | None) -> None:
        if saved and saved.path != self._recorded_path:
            self._recorded_path = saved.path
            self.recorder.record_checkpoint(saved)

    def _recreate_folder(self, step: int) -> None:
        try:
            self._store.folder.mkdir()
        except OSError:
            return  # the save fails with the same error, and is counted
        name = self._store.folder.name
        text = (
            f"step {step}: {name}/ was removed during training, with all checkpoints; "
            "the folder was created again, and saving continues"
        )
        self.recorder.record_finding(Finding("checkpoints", step, 0, 1, "warn", text))
