"""The checkpoints that a trainer writes: each step's once, and what happens where one cannot be written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nsa_lab.runs.directory import CHECKPOINTS
from nsa_lab.train import snapshot
from nsa_lab.train.checkpoint import CheckpointStore, Serialiser
from nsa_lab.train.guard import Finding, Halt
from nsa_lab.train.measure import probe_logits
from nsa_lab.train.parts import Parts
from nsa_lab.train.telemetry.recorder import Recorder


class Saves:
    """Writes the checkpoints of one attempt, which begins after `done` steps. `saved` is the step that was written last."""

    def __init__(self, run_dir: Path, parts: Parts, record: Recorder, *, done: int) -> None:
        self.parts, self.record, self.saved = parts, record, done
        train = parts.config.train
        self._store = CheckpointStore(run_dir / CHECKPOINTS, keep_last=train.keep_last, keep_every=train.keep_every)
        self._failed, self._why = 0, "see the record of the first rank"

    def save(self, step: int, losses: list[float]) -> None:
        """Write the state after `step` steps, and the losses of the spike window; every rank takes part.

        A failure is recorded, and `saved` stays. Raises `Halt` at the second in a row.
        """
        state = {
            **self.parts.facts,
            "step": step,
            "tokens": self.parts.config.train.tokens_by(step),
            "attempt": self.record.log.attempt,
            "guard": {"losses": losses},
        }
        files = snapshot.files(self.parts, state, lambda: probe_logits(self.parts))
        if self.parts.world.any(not self._write(step, state, files), self.parts.device):
            self._count_failure(step)
        else:
            self.saved, self._failed = step, 0

    def _count_failure(self, step: int) -> None:
        self._failed += 1
        if self._failed > 1:
            text = f"step {step}: saving failed {self._failed} times in a row: {self._why}"
            raise Halt(Finding("save", step, self._failed, 1, "halt", text))

    def _write(self, step: int, state: dict[str, Any], files: dict[str, Serialiser]) -> bool:
        if self.parts.world.sharded:
            # Every rank takes part in gathering, and none may wait in it if the first cannot write.
            gathered = {name: serialise() for name, serialise in files.items()}
            files = {name: (lambda data=data: data) for name, data in gathered.items()}
        if not self.parts.world.first:
            return True
        facts = {"config_hash": state["config_hash"], "data_identity": state["data_identity"]}
        try:
            if not self._store.folder.exists():
                self._make_folder_again(step)
            self.record.saved(self._store.save(step, files, facts))
        except OSError as error:
            # A full disk now need not be full at the next save, and the earlier checkpoints stand.
            self.record.trouble("save", error)
            self._why = str(error)
            return False
        return True

    def _make_folder_again(self, step: int) -> None:
        self._store.folder.mkdir()
        name = self._store.folder.name
        text = (
            f"step {step}: {name}/ was removed while the run trained, and every checkpoint with it; "
            "the folder is made again, and saving goes on"
        )
        self.record.finding(Finding("checkpoints", step, 0, 1, "warn", text))
