"""FineWeb-Edu, or a dataset of the same format, from the Hugging Face hub.

`datasets` resolves the files of a configuration. Their row groups are then read by HTTP range requests through the hub's
file system, which respects HF_ENDPOINT.

Invariants
* The cursor is our own: revision, file, row group, row. The streaming state of `datasets` has lost rows on resume in
  several releases (its issues 8145, 8308, 8360).
* A build keeps the revision with which it started, however often it is interrupted.
* Network errors are retried and then reported; missing text is never replaced by other text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from nsa_lab.config.optional_deps import MissingPackage, require
from nsa_lab.data.errors import DataError
from nsa_lab.data.retry import call_with_retry
from nsa_lab.data.sources import parquet
from nsa_lab.data.sources.source import Cursor, Document

T = TypeVar("T")
SPLIT = "train"
# A machine without a network should fail within seconds, not after data.timeout_s.
MAX_FIRST_ATTEMPTS = 3
RETRIED_STATUS_CODES = {408, 425, 429}
# The hub client has changed its HTTP library twice. Errors from any of these packages are connection errors.
HTTP_LIBRARIES = {"requests", "urllib3", "httpx", "httpx2", "httpcore", "httpcore2"}
OFFLINE_REMEDY = "check the network, set HF_ENDPOINT to a mirror, or set data.source: local (files of your own) or stdlib"
STALL_REMEDY = "start again to continue from here; if it stays slow, raise data.timeout_s or set data.source: local"


class FinewebEduSource:
    """Documents of `subset` of the hub repository `dataset`. The network is first used by `documents`."""

    def __init__(
        self,
        dataset: str,
        subset: str,
        text_column: str = "text",
        timeout_s: float = 120.0,
        tick: Callable[[], None] | None = None,
    ) -> None:
        self._dataset = dataset
        self._subset = subset
        self._column = text_column
        self._timeout_s = timeout_s
        self._tick = tick or (lambda: None)
        self.identity = {"source": "fineweb_edu", "dataset": dataset, "subset": subset, "text_column": text_column}

    def documents(self, cursor: Cursor | None = None) -> Iterator[Document]:
        """Yield the documents after `cursor`.

        Raises `DataError` for an unreachable hub, a stall of `timeout_s`, an unknown name, or a corrupt file.
        """
        revision = cursor["revision"] if cursor else self._get_newest_revision()
        files = self._list_files(revision)
        position = (cursor["file"], cursor["row_group"], cursor["row"]) if cursor else (0, 0, 0)
        for file in range(position[0], len(files)):
            remote = _RemoteParquet(files[file], self._column)
            group, first_row = position[1:] if file == position[0] else (0, 0)
            while (texts := self._read(remote, group)) is not None:
                for row, text in enumerate(texts[first_row:], start=first_row + 1):
                    yield Document(text, {"revision": revision, "file": file, "row_group": group, "row": row})
                group, first_row = group + 1, 0

    def _get_newest_revision(self) -> str:
        hub = _import_hub()
        return self._request(
            lambda: hub.HfApi().dataset_info(self._dataset, timeout=10).sha,
            f"fineweb_edu: requesting {self._dataset} from {hub.constants.ENDPOINT}",
        )

    def _list_files(self, revision: str) -> list[str]:
        """Return the addresses of the subset's parquet files at `revision`, in the order of `datasets`."""
        datasets = _import_datasets()
        splits = self._request(
            lambda: datasets.load_dataset_builder(self._dataset, self._subset, revision=revision).config.data_files,
            f"fineweb_edu: listing the files of {self._dataset} {self._subset}",
        )
        files = [str(file) for file in (splits or {}).get(SPLIT, []) if str(file).endswith(".parquet")]
        if not files:
            split_names = ", ".join(splits or {}) or "none"
            raise DataError(
                f"data.subset = {self._subset!r} of {self._dataset}: no parquet files in a split {SPLIT!r} "
                f"(splits: {split_names}); set another data.subset or data.dataset"
            )
        return files

    def _request(self, function: Callable[[], T], phase: str) -> T:
        try:
            return call_with_retry(
                function, phase, OFFLINE_REMEDY, self._timeout_s, _is_transient, self._tick, MAX_FIRST_ATTEMPTS
            )
        except (OSError, ValueError) as error:
            raise self._make_error(error, phase) from None

    def _read(self, remote: _RemoteParquet, group: int) -> list[str] | None:
        """Return the texts of a row group, or None after the last row group."""
        phase = f"fineweb_edu: reading {remote.address} row group {group}"
        try:
            return call_with_retry(
                lambda: remote.read(group), phase, STALL_REMEDY, self._timeout_s, _is_transient, self._tick
            )
        except OSError as error:
            raise self._make_error(error, phase) from None

    def _make_error(self, error: Exception, phase: str) -> DataError:
        if isinstance(error, DataError):
            return error
        reason = " ".join(str(error).split())[:300]
        return DataError(f"{phase}: {reason}; check data.dataset and data.subset, or log in with: hf auth login")


class _RemoteParquet:
    """A file on the hub. It is opened at the first read and reopened after a failure, which discards broken state."""

    def __init__(self, address: str, text_column: str) -> None:
        self.address = address
        self._column = text_column
        self._file: Any = None

    def read(self, group: int) -> list[str] | None:
        """Return the texts of a row group, or None after the last row group."""
        file, self._file = self._file or self._open(), None
        exists = group < file.num_row_groups
        texts = parquet.read_row_group(file, self.address, self._column, group) if exists else None
        self._file = file
        return texts

    def _open(self) -> Any:
        # Exact ranges: read-ahead would also fetch other columns.
        file_system = _import_hub().HfFileSystem(skip_instance_cache=True)
        return parquet.open_parquet(file_system.open(self.address, "rb", cache_type="none"), self.address, self._column)


def _is_transient(error: BaseException) -> bool:
    """Return whether the same request may succeed later: a broken connection or a busy server, not a rejected request."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status is not None:
        return status >= 500 or status in RETRIED_STATUS_CODES
    return isinstance(error, (ConnectionError, TimeoutError)) or type(error).__module__.split(".")[0] in HTTP_LIBRARIES


def _import_hub() -> Any:
    _require_library("huggingface_hub")
    import huggingface_hub
    import huggingface_hub.constants

    return huggingface_hub


def _import_datasets() -> Any:
    _require_library("datasets")
    import datasets

    return datasets


def _require_library(library: str) -> None:
    try:
        require(library)
    except MissingPackage as error:
        raise DataError(f"data.source = fineweb_edu: {error}, or set data.source: local") from None
