"""The real hub client with a hub on localhost, set by HF_ENDPOINT as a user would.

The client reads HF_ENDPOINT at import, so the calls below run in a new process.
"""

import multiprocessing
import os
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hub_server import REPOSITORY, Hub

from nsa_lab.config import DataConfig
from nsa_lab.data import DataError, Document, prepare
from nsa_lab.data.sources.fineweb_edu import FinewebEduSource

# Looked for, not imported: this file is also read by the client's process, which must import things as a user's would.
pytestmark = pytest.mark.skipif(not find_spec("datasets"), reason="needs datasets: pip install 'nsa-lab[data]'")
Run = Callable[..., Any]
TEXTS = [f"file {file} row {row} " + "Text von Wert. " * 30 for file in range(3) for row in range(12)]


def data(timeout_s: float = 30.0, subset: str = "sample-tiny", dataset: str = REPOSITORY, **options: object) -> DataConfig:
    return DataConfig(
        source="fineweb_edu", dataset=dataset, subset=subset, timeout_s=timeout_s, val_fraction=0.3, **options
    )


def collect(config: DataConfig, cursor: dict | None = None, count: int | None = None) -> list[Document]:
    """In the client's process: return the documents after `cursor`, at most `count`."""
    source = FinewebEduSource(config.dataset, config.subset, config.text_column, config.timeout_s)
    documents = source.documents(cursor)
    return [document for document, _ in zip(documents, range(count or 10**6), strict=False)]


def fill_shards(config: DataConfig, cache: str, shard_bytes: int = 64 << 20) -> tuple[str, list[bytes]]:
    """In the client's process: return the identity of the dataset and the content of the shards."""
    import nsa_lab.data.dataset as module
    from nsa_lab.data.build_shards import BuildOptions

    module.BuildOptions = lambda *values, **named: BuildOptions(*values, **named, shard_bytes=shard_bytes)
    dataset = prepare(config, cache=Path(cache))
    return dataset.identity, [path.read_bytes() for path in sorted(dataset.folder.glob("*.bin"))]


def stream_with_datasets() -> list[str]:
    """In the client's process: return the texts streamed by the `datasets` library."""
    import datasets

    return [row["text"] for row in datasets.load_dataset(REPOSITORY, "sample-tiny", split="train", streaming=True)]


def patience_with_ticks(config: DataConfig) -> int:
    """In the client's process: return the number of ticks of a stalled wait until it was stopped."""
    ticks = []

    def tick() -> None:
        ticks.append(1)
        if len(ticks) == 12:
            raise KeyboardInterrupt

    source = FinewebEduSource(config.dataset, config.subset, timeout_s=config.timeout_s, tick=tick)
    try:
        list(source.documents())
    except KeyboardInterrupt:
        return len(ticks)
    return -1


@pytest.fixture(scope="module")
def server() -> Iterator[Hub]:
    hub = Hub()
    yield hub
    hub.close()


@pytest.fixture(scope="module")
def client(server: Hub, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    yield from start_client(server.url, tmp_path_factory.mktemp("hub"))


def start_client(url: str, home: Path) -> Iterator[Run]:
    settings = {"HF_ENDPOINT": url, "HF_HOME": str(home), "HF_HUB_DISABLE_PROGRESS_BARS": "1", "OMP_NUM_THREADS": "1"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setenv(name, value)
        for name in ("HF_HUB_OFFLINE", "HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy", "ALL_PROXY", "all_proxy"):
            patch.delenv(name, raising=False)
        pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
        pool.submit(os.getpid).result(60)
    yield lambda function, *arguments: pool.submit(function, *arguments).result(90)
    pool.shutdown(cancel_futures=True)


@pytest.fixture
def hub(server: Hub, request: pytest.FixtureRequest) -> Hub:
    """Return the server at a new revision: three files of twelve rows in groups of five, no faults, an empty log."""
    server.files = {"README.md": server.files["README.md"], "test.txt": request.node.name.encode()}
    for file in range(3):
        server.add_parquet(f"sample/tiny/{file:03d}_00000.parquet", TEXTS[file * 12 : file * 12 + 12])
    server.add_parquet("data/whole.parquet", ["a text of another configuration"])
    server.log.clear()
    return server


def texts(documents: list[Document]) -> list[str]:
    return [document.text for document in documents]


@pytest.mark.slow
def test_the_subset_is_read_whole_over_ranges(hub: Hub, client: Run) -> None:
    assert texts(client(collect, data())) == TEXTS
    reads = hub.parquet_reads()
    assert reads and all(request.range for request in reads)
    assert not any("whole.parquet" in request.path for request in reads)
    assert any(request.agent.startswith("datasets/") for request in hub.log), "the files were resolved by datasets"


@pytest.mark.slow
def test_only_the_text_is_fetched(hub: Hub, client: Run) -> None:
    hub.add_parquet("sample/tiny/000_00000.parquet", [f"{i} short" for i in range(50)], row_group_size=10)
    documents = client(collect, data(), None, 10)
    assert len(documents) == 10
    # The footer, then one row group's column; the other four groups are not wanted yet.
    assert len(hub.parquet_reads()) <= 3


@pytest.mark.slow
def test_the_datasets_library_streams_the_same_rows(hub: Hub, client: Run) -> None:
    assert client(stream_with_datasets) == TEXTS
    reads = hub.parquet_reads()
    assert {request.path.rsplit("/", 1)[1] for request in reads} == {f"{file:03d}_00000.parquet" for file in range(3)}
    assert all(request.range for request in reads)
    assert any(request.agent.startswith("datasets/") for request in hub.log)
    hub.log.clear()
    assert texts(client(collect, data())) == TEXTS


@pytest.mark.slow
def test_the_cursor_resumes_exactly_twice_in_a_row(hub: Hub, client: Run) -> None:
    for first, second in ((1, 1), (5, 7), (12, 12), (7, 22), (35, 1)):
        begun = client(collect, data(), None, first)
        resumed = client(collect, data(), begun[-1].cursor, second)
        finished = client(collect, data(), resumed[-1].cursor)
        assert texts(begun + resumed + finished) == TEXTS


@pytest.mark.slow
def test_a_resumed_build_keeps_its_revision(hub: Hub, client: Run) -> None:
    begun = client(collect, data(), None, 20)
    hub.add_parquet("sample/tiny/000_00000.parquet", ["the hub has moved on"])
    assert texts(begun + client(collect, data(), begun[-1].cursor)) == TEXTS
    assert texts(client(collect, data()))[0] == "the hub has moved on"


@pytest.mark.slow
def test_an_interrupted_build_gives_the_same_shards(hub: Hub, client: Run, tmp_path: Path) -> None:
    whole = client(fill_shards, data(), str(tmp_path / "whole"), 2000)
    hub.log.clear()
    for reads in (6, 3):
        hub.plan(*["ok"] * reads, "404")
        with pytest.raises(DataError, match=r"reading .* row group .* check data"):
            client(fill_shards, data(), str(tmp_path / "broken"), 2000)
    hub.plan()
    hub.log.clear()
    assert client(fill_shards, data(), str(tmp_path / "broken"), 2000) == whole
    assert not any("000_00000" in request.path for request in hub.parquet_reads()), "what was filled is not read again"
    tokens = b"".join(whole[1])
    assert len(tokens) == sum(len(text.encode()) + 1 for text in TEXTS) and tokens.count(b"\xff") == len(TEXTS)


@pytest.mark.slow
def test_built_shards_need_no_network(hub: Hub, client: Run, tmp_path: Path) -> None:
    client(fill_shards, data(), str(tmp_path))
    hub.log.clear()
    client(fill_shards, data(), str(tmp_path))
    assert hub.log == []


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["500", "cut"])
def test_a_transient_fault_is_retried(hub: Hub, client: Run, fault: str) -> None:
    hub.plan("ok", "ok", fault, "ok", fault)
    assert texts(client(collect, data())) == TEXTS


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["500", "cut"])
def test_a_permanent_fault_is_reported_with_its_phase(hub: Hub, client: Run, refuses, fault: str) -> None:
    hub.plan("ok", "ok", *[fault] * 50)
    refuses(lambda: client(collect, data(timeout_s=2.0)), "000_00000.parquet row group 1", "2 s", "data.timeout_s")


@pytest.mark.slow
def test_a_stall_ends_in_time_and_is_reported(hub: Hub, client: Run, refuses) -> None:
    hub.plan("ok", "ok", "stall", "stall")
    started = time.monotonic()
    refuses(
        lambda: client(collect, data(timeout_s=1.5)),
        "fineweb_edu: reading",
        "000_00000.parquet row group 1",
        "no answer within 1.5 s",
        "data.timeout_s",
        "start again",
    )
    assert time.monotonic() - started < 10


@pytest.mark.slow
def test_a_stop_request_interrupts_a_stall(hub: Hub, client: Run) -> None:
    hub.plan("ok", "stall", "stall")
    assert client(patience_with_ticks, data(timeout_s=60.0)) == 12


@pytest.mark.parametrize("damage", [Hub.damage_page, Hub.damage_footer])
def test_a_corrupt_file_is_reported(hub: Hub, client: Run, refuses, damage: Callable[[Hub, str], None]) -> None:
    damage(hub, "sample/tiny/001_00000.parquet")
    refuses(lambda: client(collect, data()), "001_00000.parquet", "not a readable parquet file", "download it again")


@pytest.mark.slow
def test_unknown_names_raise(hub: Hub, client: Run, refuses) -> None:
    refuses(
        lambda: client(collect, data(subset="sample-huge")),
        "sample-huge",
        "sample-tiny",
        "check data.dataset and data.subset",
    )
    refuses(lambda: client(collect, data(dataset="lab/nothing")), "lab/nothing", "check data.dataset")
    refuses(lambda: client(collect, data(text_column="body")), "no column 'body'", "id, text, score", "data.text_column")


@pytest.mark.slow
def test_a_machine_without_network_fails_soon(tmp_path: Path, refuses) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        client = start_client(url, tmp_path)
        run = next(client)
        started = time.monotonic()
        refuses(lambda: run(collect, data(timeout_s=60.0)), url, "tried 3 times", "data.source: local", "stdlib")
        assert time.monotonic() - started < 30
        client.close()
