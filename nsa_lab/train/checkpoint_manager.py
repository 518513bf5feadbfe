"""Checkpoints written during training: each step once, with handling of failed saves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nsa_lab.runs.directory import CHECKPOINTS
from nsa_lab.train import checkpoint_state
from nsa_lab.train.build import TrainContext
from nsa_lab.train.checkpoint import CheckpointStore, Serializer
from nsa_lab.train.guard import Finding, Halt
from nsa_lab.train.telemetry.recorder import Recorder
from nsa_lab.train.validation import compute_probe_logits


class CheckpointManager:
    """Writes the checkpoints of one attempt that starts after `completed_steps` steps.

    `last_saved_step`: the step of the last checkpoint written.
    """

    def __init__(self, run_dir: Path, context: TrainContext, recorder: Recorder, *, completed_steps: int) -> None:
        self.context, self.recorder, self.last_saved_step = context, recorder, completed_steps
        train = context.config.train
        self._store = CheckpointStore(run_dir / CHECKPOINTS, keep_last=train.keep_last, keep_every=train.keep_every)
        self._n_failures, self._failure_reason = 0, "see the events of rank 0"

    def save(self, step: int, spike_losses: list[float]) -> None:
        """Write the state after `step` steps, and the losses in the window of the spike rule. Collective.

        A failure is recorded and leaves `last_saved_step` unchanged. Raises `Halt` after two consecutive failures.
        """
        state = {
            **self.context.facts,
            "step": step,
            "tokens": self.context.config.train.tokens_until(step),
            "attempt": self.recorder.log.attempt,
            "guard": {"losses": spike_losses},
        }
        files = checkpoint_state.make_checkpoint_files(self.context, state, lambda: compute_probe_logits(self.context))
        if self.context.world.any_rank(not self._write_checkpoint(step, state, files), self.context.device):
            self._count_failure(step)
        else:
            self.last_saved_step, self._n_failures = step, 0

    def _count_failure(self, step: int) -> None:
        self._n_failures += 1
        if self._n_failures > 1:
            text = f"step {step}: saving failed {self._n_failures} consecutive times: {self._failure_reason}"
            raise Halt(Finding("save", step, self._n_failures, 1, "halt", text))

    def _write_checkpoint(self, step: int, state: dict[str, Any], files: dict[str, Serializer]) -> bool:
        if self.context.world.is_sharded:
            # Gather on all ranks first: a collective would hang if rank 0 failed to write in between.
            serialized = {name: serialize() for name, serialize in files.items()}
            files = {name: (lambda data=data: data) for name, data in serialized.items()}
        if not self.context.world.is_first:
            return True
        facts = {"config_hash": state["config_hash"], "data_identity": state["data_identity"]}
        try:
            if not self._store.folder.exists():
                self._recreate_folder(step)
            self.recorder.record_checkpoint(self._store.save(step, files, facts))
        except OSError as error:
            # The disk may have space again at the next save, and earlier checkpoints are unchanged.
            self.recorder.record_nonfatal_error("save", error)
            self._failure_reason = str(error)
            return False
        return True

    def _recreate_folder(self, step: int) -> None:
        self._store.folder.mkdir()
        name = self._store.folder.name
        text = (
            f"step {step}: {name}/ was removed during training, with all checkpoints; "
            "the folder was created again, and saving continues"
        )
        self.recorder.record_finding(Finding("checkpoints", step, 0, 1, "warn", text))
