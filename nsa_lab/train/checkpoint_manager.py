"""The checkpoints that a trainer writes: each step's once, and what happens where one cannot be written."""

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
    """Writes the checkpoints of one attempt, which begins after `done` steps. `saved` is the step that was written last."""

    def __init__(self, run_dir: Path, context: TrainContext, recorder: Recorder, *, completed_steps: int) -> None:
        self.context, self.recorder, self.last_saved_step = context, recorder, completed_steps
        train = context.config.train
        self._store = CheckpointStore(run_dir / CHECKPOINTS, keep_last=train.keep_last, keep_every=train.keep_every)
        self._n_failures, self._failure_reason = 0, "see the record of the first rank"

    def save(self, step: int, spike_losses: list[float]) -> None:
        """Write the state after `step` steps, and the losses of the spike window; every rank takes part.

        A failure is recorded, and `saved` stays. Raises `Halt` at the second in a row.
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
            text = f"step {step}: saving failed {self._n_failures} times in a row: {self._failure_reason}"
            raise Halt(Finding("save", step, self._n_failures, 1, "halt", text))

    def _write_checkpoint(self, step: int, state: dict[str, Any], files: dict[str, Serializer]) -> bool:
        if self.context.world.is_sharded:
            # Every rank takes part in gathering, and none may wait in it if the first cannot write.
            gathered = {name: serialise() for name, serialise in files.items()}
            files = {name: (lambda data=data: data) for name, data in gathered.items()}
        if not self.context.world.is_first:
            return True
        facts = {"config_hash": state["config_hash"], "data_identity": state["data_identity"]}
        try:
            if not self._store.folder.exists():
                self._recreate_folder(step)
            self.recorder.record_checkpoint(self._store.save(step, files, facts))
        except OSError as error:
            # A full disk now need not be full at the next save, and the earlier checkpoints stand.
            self.recorder.record_nonfatal_error("save", error)
            self._failure_reason = str(error)
            return False
        return True

    def _recreate_folder(self, step: int) -> None:
        self._store.folder.mkdir()
        name = self._store.folder.name
        text = (
            f"step {step}: {name}/ was removed while the run trained, and every checkpoint with it; "
            "the folder is made again, and saving goes on"
        )
        self.recorder.record_finding(Finding("checkpoints", step, 0, 1, "warn", text))
