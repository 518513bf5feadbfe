"""Write checkpoints of a training context: as single files by rank 0, or sharded by all ranks in the background."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from nsa_lab.runs.atomic_io import is_disk_full
from nsa_lab.train import checkpoint_state
from nsa_lab.train.build import TrainContext
from nsa_lab.train.checkpoint import CheckpointStore, SavedCheckpoint, StartedSave
from nsa_lab.train.validation import compute_probe_logits


class SaveFailed(OSError):
    """Another rank could not save."""


class CheckpointWriter:
    """Writes checkpoints into `store`, one at a time. Collective: all ranks call `start` and `finish` in the same order."""

    def __init__(self, context: TrainContext, store: CheckpointStore) -> None:
        self._context, self._store = context, store
        self._pending: Future[SavedCheckpoint | None] | None = None
        self._abandon: Callable[[OSError], OSError] | None = None

    def start(self, step: int, state: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        """Start to write the state after `step` steps. `state`: contents of state.json; `facts`: fields of the manifest.

        The previous save must be finished. Later changes of the context do not affect the checkpoint.
        """
        if self._context.shard_writer:
            self._pending = self._start_sharded(step, state, facts)
        elif self._context.world.is_first:
            files = checkpoint_state.make_checkpoint_files(
                self._context, state, lambda: compute_probe_logits(self._context)
            )
            self._pending = _run(lambda: self._store.save(step, files, facts))
        else:
            self._pending = _run(lambda: None)

    @property
    def is_writing(self) -> bool:
        """True from `start` until `finish`, on all ranks."""
        return self._pending is not None

    def poll(self) -> SavedCheckpoint | None:
        """Return the result of a save that has completed in the meantime, on rank 0; else None. Not collective."""
        pending = self._pending
        return pending.result() if pending and pending.done() and not pending.exception() else None

    def finish(self) -> SavedCheckpoint | None:
        """Wait for the save in progress. Return its result on rank 0; None on other ranks, or without a save.

        Raises an `OSError` on all ranks if a rank failed.
        """
        if self._pending is None:
            return None
        pending, self._pending = self._pending, None
        error = pending.exception()
        if error and not isinstance(error, OSError):
            raise error
        if error and self._abandon:
            error = self._abandon(error)
        if self._context.world.any_rank(error is not None, self._context.device):
            raise error or SaveFailed("another rank could not save; see the events of rank 0")
        return pending.result()

    def _start_sharded(
        self, step: int, state: Mapping[str, Any], facts: Mapping[str, Any]
    ) -> Future[SavedCheckpoint | None]:
        context, store, writer = self._context, self._store, self._context.shard_writer
        assert writer is not None, "only called with sharded weights"
        # All ranks take part in the forward pass of a sharded model.
        files = checkpoint_state.make_small_files(state, compute_probe_logits(context))
        begun = _run(lambda: store.begin(step)) if context.world.is_first else _run(lambda: None)
        is_new = begun.exception() is None and isinstance(begun.result(), StartedSave)
        # -1: failed, or saved already.
        number = int(context.world.broadcast_from_first(float(begun.result().number) if is_new else -1.0, context.device))
        if number < 0:
            return begun
        shards = checkpoint_state.collect_shards(context)
        started = begun.result() or StartedSave(step, store.get_temporary_path(step, number), 0.0, number)

        def complete(entries: dict[str, dict[str, Any]]) -> SavedCheckpoint:
            return store.complete(started, files, facts, entries)

        def abandon(error: OSError) -> OSError:
            store.abandon(started, error)
            return store.make_disk_full_error(checkpoint_state.count_bytes(shards)) if is_disk_full(error) else error

        if context.world.is_first:
            self._abandon = abandon
        return writer.start(started.folder, shards, complete)


def _run(action: Callable[[], Any]) -> Future[Any]:
    """Return a completed future with the result of `action`, or with its `OSError`."""
    future: Future[Any] = Future()
    try:
        future.set_result(action())
    except OSError as error:
        future.set_exception(error)
    return future
