"""After a save that fails at any point, or after damage to files, loading gives a complete state or an explanation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nsa_lab.train.checkpoint import LATEST, MANIFEST, CheckpointStore, Filesystem, NoValidCheckpoint, find_problems


class Crash(BaseException):
    """The process is gone: the code under test must have no further effect."""


class FailingFilesystem(Filesystem):
    """Performs `survives` calls and half of the next one, then crashes."""

    def __init__(self, survives: int) -> None:
        self.left = survives

    def _next(self, half: Callable[[], Any], whole: Callable[[], Any]) -> None:
        if self.left == 0:
            half()
            raise Crash
        self.left -= 1
        whole()

    def make_dir(self, path: Path) -> None:
        self._next(lambda: None, lambda: super(FailingFilesystem, self).make_dir(path))

    def write(self, path: Path, data: bytes | memoryview) -> None:
        self._next(
            lambda: path.write_bytes(data[: len(data) // 2]), lambda: super(FailingFilesystem, self).write(path, data)
        )

    def sync_dir(self, path: Path) -> None:
        self._next(lambda: None, lambda: super(FailingFilesystem, self).sync_dir(path))

    def rename(self, source: Path, target: Path) -> None:
        self._next(lambda: None, lambda: super(FailingFilesystem, self).rename(source, target))

    def unlink(self, path: Path) -> None:
        self._next(lambda: None, lambda: super(FailingFilesystem, self).unlink(path))

    def remove_tree(self, path: Path) -> None:
        self._next(lambda: next(path.iterdir()).unlink(), lambda: super(FailingFilesystem, self).remove_tree(path))


def content(step: int) -> dict[str, bytes]:
    return {"model.safetensors": b"weights %d " % step * 50, "state.json": b'{"step": %d}' % step}


def save(store: CheckpointStore, step: int) -> None:
    store.save(step, {name: (lambda data=data: data) for name, data in content(step).items()}, {"config_hash": "c"})


def loaded(folder: Path) -> int | None:
    """Return the step of the state that loading gives, after checking every byte of it."""
    path, _ = CheckpointStore(folder).load_latest()
    if path is None:
        return None
    step = int(path.name[5:])
    assert {name: (path / name).read_bytes() for name in content(step)} == content(step)
    return step


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    """A store with checkpoints of steps 1 to 3; 2 and 3 are retained, and a fourth save prunes again."""
    store = CheckpointStore(tmp_path, keep_last=2)
    for step in (1, 2, 3):
        save(store, step)
    assert store.list_steps() == [2, 3]
    return tmp_path


def test_a_crash_at_any_call_of_the_first_save_leaves_nothing_or_a_complete_state(tmp_path: Path) -> None:
    seen = []
    for survives in range(100):
        folder = tmp_path / str(survives)
        try:
            save(CheckpointStore(folder, fs=FailingFilesystem(survives)), 1)
        except Crash:
            seen.append(loaded(folder))
            save(CheckpointStore(folder), 1)
            assert loaded(folder) == 1
            continue
        break
    assert survives > 8 and set(seen) == {None, 1}
    assert seen == sorted(seen, key=lambda step: step or 0), "once the new state is there it stays"


@pytest.mark.slow
def test_a_crash_at_any_call_of_a_pruning_save_leaves_the_old_or_the_new_state(filled: Path) -> None:
    seen, survives = [], 0
    while True:
        store = CheckpointStore(filled, keep_last=2, fs=FailingFilesystem(survives))
        newest = store.list_steps()[-1]
        try:
            save(store, newest + 1)
        except Crash:
            seen.append(loaded(filled) - newest)
            assert seen[-1] in (0, 1)
            save(CheckpointStore(filled, keep_last=2), newest + 2)
            assert loaded(filled) == newest + 2
            assert not list(filled.glob(".*ing-*")), "what a crash left behind is cleared away by the next save"
            survives += 1
            continue
        break
    assert survives > 12 and set(seen) == {0, 1}


def damages() -> list[Any]:
    def flip(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 0x10
        path.write_bytes(data)

    def truncate(path: Path) -> None:
        path.write_bytes(path.read_bytes()[:-1])

    def empty(path: Path) -> None:
        path.write_bytes(b"")

    return [pytest.param(f, id=f.__name__) for f in (flip, truncate, empty, Path.unlink)]


@pytest.mark.parametrize("damage", damages())
@pytest.mark.parametrize("name", [*content(1), MANIFEST])
def test_a_damaged_checkpoint_is_quarantined_and_the_previous_one_loaded(filled: Path, name: str, damage: Any) -> None:
    damage(filled / "step-00000003" / name)
    path, moved = CheckpointStore(filled).load_latest()
    assert path.name == "step-00000002"
    assert [m.step for m in moved] == [3] and name in moved[0].problems[0]
    assert moved[0].path.parent.name == "quarantine" and moved[0].path.is_dir()
    save(CheckpointStore(filled), 3)
    assert loaded(filled) == 3


def test_a_checkpoint_damaged_later_is_saved_again_and_quarantined(filled: Path) -> None:
    for number in range(3):
        (filled / "step-00000003" / "state.json").write_bytes(b"%d" % number)
        save(CheckpointStore(filled), 3)
        assert loaded(filled) == 3
    retained = [filled / "quarantine" / f"step-00000003-{number}" / "state.json" for number in range(3)]
    assert [path.read_bytes() for path in retained] == [b"0", b"1", b"2"]


def test_every_flipped_bit_of_a_manifest_is_noticed_or_harmless(filled: Path) -> None:
    path = filled / "step-00000003"
    whole = (path / MANIFEST).read_bytes()
    for index in range(len(whole)):
        data = bytearray(whole)
        data[index] ^= 0x01
        (path / MANIFEST).write_bytes(data)
        if not find_problems(path):
            assert whole[index : index + 1].isspace(), "only the space between values may differ"


def test_loading_with_all_checkpoints_damaged_explains(filled: Path) -> None:
    for step in (2, 3):
        (filled / f"step-0000000{step}" / "model.safetensors").write_bytes(b"")
    with pytest.raises(NoValidCheckpoint, match="not started over"):
        CheckpointStore(filled).load_latest()
    with pytest.raises(NoValidCheckpoint, match="quarantine"):
        CheckpointStore(filled).load_latest()
    (filled / LATEST).unlink()
    with pytest.raises(NoValidCheckpoint, match="quarantine"):
        CheckpointStore(filled).load_latest()


def test_a_missing_latest_file_or_checkpoint_folder_is_not_a_new_run(filled: Path) -> None:
    (filled / LATEST).unlink()
    assert loaded(filled) == 3
    for step in (2, 3):
        (filled / f"step-0000000{step}").rename(filled.parent / f"{filled.name}-{step}")
    (filled / LATEST).write_text("step-00000003\n")
    with pytest.raises(NoValidCheckpoint):
        loaded(filled)


def test_pruning_retains_the_last_and_the_permanent_checkpoints(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=2, keep_every=4)
    for step in range(1, 12):
        save(store, step)
    assert store.list_steps() == [4, 8, 10, 11]
    assert (tmp_path / LATEST).read_text() == "step-00000011\n"
    assert loaded(tmp_path) == 11
