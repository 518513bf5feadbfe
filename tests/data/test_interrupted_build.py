"""A build of shards that is interrupted, damaged, shared or without its source."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from shard_inputs import ListSource, local, plan

from nsa_lab.config import DataConfig
from nsa_lab.data import (
    BuildProgress,
    DataError,
    Document,
    ProgressMeter,
    prepare,
    shards,
)
from nsa_lab.data.build_shards import build_shards
from nsa_lab.data.shards import read_manifest
from nsa_lab.runs.summary import format_fill_progress


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def _fill_and_die(texts: list[str], die_at: int, folder: Path) -> None:
    class Dies(ListSource):
        def documents(self, cursor: dict | None = None) -> Iterator[Document]:
            for document in super().documents(cursor):
                if document.cursor["n"] == die_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                yield document

    build_shards(Dies(texts), plan(shard_bytes=500), folder)


def _prepare_in_process(corpus: str, cache: str, results: multiprocessing.Queue) -> None:
    phases = set()
    dataset = prepare(local(Path(corpus)), progress=lambda state: phases.add(state.phase), cache=Path(cache))
    results.put((dataset.identity, "filling" in phases))


@pytest.mark.parametrize("damage", ["flip", "truncate", "delete", "manifest"])
def test_damage_is_detected_and_reported(corpus: Path, tmp_path: Path, refuses, damage: str) -> None:
    dataset = prepare(local(corpus), cache=tmp_path / "cache")
    path = dataset.folder / ("manifest.json" if damage == "manifest" else "train-00000.bin")
    content = bytearray(path.read_bytes())
    if damage == "flip":
        content[1234] ^= 1
    elif damage == "manifest":
        content = content.replace(b'"tokens": ', b'"tokens": 1')
    else:
        del content[-1]
    path.write_bytes(content)
    if damage == "delete":
        path.unlink()
    refuses(lambda: prepare(local(corpus), cache=tmp_path / "cache"), path, "delete the folder")


def test_interruptions_change_nothing(tmp_path: Path) -> None:
    texts = [f"{i} " * (i % 17 + 1) for i in range(300)]
    build_shards(ListSource(texts), plan(shard_bytes=500), tmp_path / "whole")
    for fail_at in (40, 90, 91, 250):
        with pytest.raises(ConnectionError):
            build_shards(ListSource(texts, fail_at), plan(shard_bytes=500), tmp_path / "broken")
        assert not (tmp_path / "broken").exists()
    source = ListSource(texts)
    build_shards(source, plan(shard_bytes=500), tmp_path / "broken")
    assert source.asked[0] > 200
    assert contents(tmp_path / "broken") == contents(tmp_path / "whole")


def test_a_build_stopped_at_the_cap_adds_nothing_on_resume(tmp_path: Path) -> None:
    texts = [f"{i:9}" for i in range(60)]
    capped = plan(shard_bytes=1, max_tokens=100)
    build_shards(ListSource(texts), capped, tmp_path / "whole")

    def stop(progress: BuildProgress) -> None:
        if progress.train_tokens >= 100:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_shards(ListSource(texts), capped, tmp_path / "broken", stop)
    build_shards(ListSource(texts), capped, tmp_path / "broken")
    assert contents(tmp_path / "broken") == contents(tmp_path / "whole")
    assert read_manifest(tmp_path / "whole")["splits"]["train"]["tokens"] == 100, "a cap that is met exactly is met"


@pytest.mark.slow
def test_a_killed_build_continues(tmp_path: Path) -> None:
    texts = [f"{i} " * (i % 17 + 1) for i in range(300)]
    build_shards(ListSource(texts), plan(shard_bytes=500), tmp_path / "whole")
    for die_at in (5, 120, 121, 240):
        victim = multiprocessing.get_context("fork").Process(
            target=_fill_and_die, args=(texts, die_at, tmp_path / "killed")
        )
        victim.start()
        victim.join(30)
        assert victim.exitcode == -signal.SIGKILL and not (tmp_path / "killed").exists()
    source = ListSource(texts)
    build_shards(source, plan(shard_bytes=500), tmp_path / "killed")
    assert source.asked[0] > 200
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")


def test_a_damaged_record_of_progress_starts_the_build_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    build_shards(ListSource(["one", "two"]), plan(), tmp_path / "whole")
    for content in (b"", b"\0\0", b"[1]", b"{}", b'{"cursor": 3, "splits": 4}', b'"text"'):
        (tmp_path / "odd.partial").mkdir()
        (tmp_path / "odd.partial" / "progress.json").write_bytes(content)
        build_shards(ListSource(["one", "two"]), plan(), tmp_path / "odd")
        assert contents(tmp_path / "odd") == contents(tmp_path / "whole"), content
        shutil.rmtree(tmp_path / "odd")
    assert caplog.text.count("progress.json: damaged and ignored") == 6


def test_a_cache_folder_of_another_kind_is_named(corpus: Path, tmp_path: Path, refuses) -> None:
    folder = prepare(local(corpus), 256, 32, cache=tmp_path / "cache").folder
    for put in (lambda: folder.write_text(""), lambda: folder.symlink_to("absent")):
        folder.rename(tmp_path / "saved")
        put()
        refuses(lambda: prepare(local(corpus), 256, 32, cache=tmp_path / "cache"), f"{folder}: expected a folder of token")
        folder.unlink()
        (tmp_path / "saved").rename(folder)


def test_a_manifest_without_permission_is_not_called_damaged(
    corpus: Path, tmp_path: Path, refuses, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = prepare(local(corpus), 256, 32, cache=tmp_path / "cache").folder

    def refuse(path: Path, **options: object) -> str:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_text", refuse)
    refuses(lambda: read_manifest(folder), "manifest.json: permission denied; let its owner open")


def test_a_build_without_a_complete_part_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConnectionError):
        build_shards(ListSource(["a", "b"], fail_at=1), plan(), tmp_path / "key")
    assert list(tmp_path.iterdir()) == []


def test_progress_can_stop_a_build(tmp_path: Path, corpus: Path) -> None:
    def stop(state: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(local(corpus), progress=stop, cache=tmp_path / "cache")
    assert len(prepare(local(corpus), cache=tmp_path / "cache").train) > 0


def test_a_full_disk_is_an_error_with_a_remedy(tmp_path: Path, refuses) -> None:
    class Full(ListSource):
        def documents(self, cursor: dict | None = None) -> Iterator[Document]:
            raise OSError(28, "No space left on device")
            yield

    refuses(lambda: build_shards(Full([]), plan(), tmp_path / "key"), "disk is full", "data.max_tokens")


def test_two_processes_build_once(corpus: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    workers = [
        context.Process(target=_prepare_in_process, args=(str(corpus), str(tmp_path / "cache"), results)) for _ in range(3)
    ]
    for worker in workers:
        worker.start()
    answers = [results.get(timeout=30) for _ in workers]
    for worker in workers:
        worker.join(10)
    assert len({identity for identity, _ in answers}) == 1
    assert sum(filled for _, filled in answers) == 1


def test_a_run_continues_from_the_cache_if_its_source_is_missing(corpus: Path, tmp_path: Path) -> None:
    cache, data = tmp_path / "cache", local(corpus)
    first = prepare(data, cache=cache)
    prepare(local(corpus, val_fraction=0.4), cache=cache)
    corpus.rename(tmp_path / "away")
    with pytest.raises(DataError, match="nothing at"):
        prepare(data, cache=cache)
    with pytest.raises(DataError, match="nothing at"):
        prepare(data, identity="0" * 64, cache=cache)
    with pytest.raises(DataError, match="nothing at"):
        prepare(local(corpus, val_fraction=0.1), identity=first.identity, cache=cache)
    again = prepare(data, identity=first.identity, cache=cache)
    assert again.folder == first.folder and again.identity == first.identity
    assert "nothing at" in again.source_error and first.source_error is None
    shard = next(again.folder.glob("train-*.bin"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    with pytest.raises(DataError, match="sha256"):
        prepare(data, identity=first.identity, cache=cache)


def test_without_a_source_every_shard_is_hashed_whatever_its_size(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, data = tmp_path / "cache", local(corpus)
    first = prepare(data, cache=cache)
    monkeypatch.setattr(shards, "MAX_BYTES_HASHED_AT_OPEN", 0)
    hashed = []
    digest = shards.hash_file
    monkeypatch.setattr(shards, "hash_file", lambda path: hashed.append(path.name) or digest(path))
    prepare(data, identity=first.identity, cache=cache)
    assert not hashed
    corpus.rename(tmp_path / "away")
    prepare(data, identity=first.identity, cache=cache)
    assert set(hashed) == {path.name for path in first.folder.glob("*.bin")}


def test_progress_reports_rate_and_remaining_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("nsa_lab.data.build_shards.time.monotonic", lambda: now[0])
    meter = ProgressMeter(interval_s=5.0)
    assert meter.take_report() is None
    assert not meter.observe(BuildProgress("waiting for the source", 0, 0, None))
    assert format_fill_progress(meter.take_report()) == "waiting for the source"
    now[0] = 110.0
    # Documents of an earlier filling that was interrupted are not this one's speed.
    assert meter.observe(BuildProgress("filling", 1_010_000, 100, 5_000_000, 1_000_000, 1_000_000))
    assert meter.take_report()["bytes_per_s"] is None
    now[0] = 112.0
    assert meter.observe(BuildProgress("filling", 2_020_000, 200, 5_000_000, 2_000_000, 2_000_000))
    assert not meter.observe(BuildProgress("filling", 2_020_000, 200, 5_000_000, 2_000_000, 2_000_000))
    assert meter.take_report() is None, "too soon"
    now[0] = 120.0
    fields = meter.take_report()
    assert fields["bytes_per_s"] == 100_000 and fields["left_s"] == 30.0
    assert format_fill_progress(fields) == "filling: 200 documents, 2.0 MB, 0.1 MB/s, 30 s left"


def test_signed_manifest_that_lies_is_refused(tmp_path: Path) -> None:
    from nsa_lab.data.shards import MANIFEST, compute_content_identity

    for number in range(6):
        (tmp_path / f"{number}.txt").write_text(f"document {number} " * 400)
    data = DataConfig(source="local", path=str(tmp_path), val_fraction=0.3)
    prepare(data, 256, 32, cache=tmp_path / "cache")
    path = next((tmp_path / "cache").glob(f"*/{MANIFEST}"))
    intact = path.read_text()
    lies = [{"dtype": dtype} for dtype in ("O", "<u4", "<f2", 7)] + [{"source": None}]
    lies += [{"file": "../other.bin"}, {"file": None}, {"bytes": None}, {"bytes": 1}, {"tokens": 10**9}]
    for lie in lies:
        manifest = json.loads(intact)
        target = manifest if lie.keys() & manifest.keys() else manifest["splits"]["train"]["shards"][0]
        target.update(lie)
        path.write_text(json.dumps({**manifest, "identity": compute_content_identity(manifest)}))
        with pytest.raises(DataError, match="damaged"):
            prepare(data, 256, 32, cache=tmp_path / "cache")
    path.write_text("[" * 200_000)
    with pytest.raises(DataError, match="damaged"):
        prepare(data, 256, 32, cache=tmp_path / "cache")
