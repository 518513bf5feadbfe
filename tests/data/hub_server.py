"""A hub on localhost: the part of the Hugging Face API that reading a parquet dataset needs, with faults.

It serves one repository from memory, logs every request, and can stall, answer 500, cut the connection or serve damaged
bytes. HF_ENDPOINT directs a client to it.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

import pyarrow as pa
import pyarrow.parquet as pq

REPOSITORY = "lab/fineweb-edu"
CARD = """---
configs:
- config_name: default
  data_files:
  - split: train
    path: data/*
- config_name: sample-tiny
  data_files:
  - split: train
    path: sample/tiny/*
---
# A small data set
"""


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    range: str | None
    agent: str

    @property
    def reads_parquet(self) -> bool:
        return self.method == "GET" and "/resolve/" in self.path and self.path.endswith(".parquet")


class Hub:
    """A server at `url`, running until `close`.

    Files may be added or damaged at any time; each change creates a new revision.
    """

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {"README.md": CARD.encode()}
        self.revisions: dict[str, dict[str, bytes]] = {}
        self.log: list[Request] = []
        self._faults: dict[str, deque[str]] = {}
        self._released = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def add_parquet(self, path: str, texts: list[str], row_group_size: int = 5, column: str = "text") -> None:
        buffer = io.BytesIO()
        table = pa.table({"id": [f"{path}:{i}" for i in range(len(texts))], column: texts, "score": [1.0] * len(texts)})
        pq.write_table(table, buffer, row_group_size=row_group_size, use_dictionary=False, write_page_checksum=True)
        self.files[path] = buffer.getvalue()

    def damage_page(self, path: str) -> None:
        """Overwrite the end of the first row group's text."""
        column = pq.ParquetFile(io.BytesIO(self.files[path])).metadata.row_group(0).column(1)
        self._overwrite(path, column.data_page_offset + column.total_compressed_size - 40)

    def damage_footer(self, path: str) -> None:
        self._overwrite(path, len(self.files[path]) - 60)

    def plan(self, *faults: str) -> None:
        """Set the responses to the next parquet reads of the newest revision.

        One each of: "stall", "500", "404", "cut", "ok". They are bound to the revision, because a client may still retry
        abandoned requests of an older one.
        """
        self._faults[self.head()] = deque(faults)

    def next_fault(self, revision: str) -> str | None:
        faults = self._faults.get(revision)
        return faults.popleft() if faults else None

    def head(self) -> str:
        """Newest revision. The files of a revision never change."""
        digest = hashlib.sha1()
        for path in sorted(self.files):
            digest.update(path.encode() + hashlib.sha1(self.files[path]).digest())
        self.revisions.setdefault(digest.hexdigest(), dict(self.files))
        return digest.hexdigest()

    def stall(self) -> None:
        self._released.wait(60)

    def _overwrite(self, path: str, start: int) -> None:
        content = bytearray(self.files[path])
        content[start : start + 40] = b"\xaa" * 40
        self.files[path] = bytes(content)

    def parquet_reads(self) -> list[Request]:
        return [request for request in self.log if request.reads_parquet]

    def close(self) -> None:
        self._released.set()
        self._server.shutdown()
        self._server.server_close()


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(_Handler):
        pass

    Handler.hub = hub
    return Handler


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self) -> None:
        url = urlsplit(self.path)
        path = unquote(url.path)
        request = Request(self.command, path, self.headers.get("Range"), self.headers.get("User-Agent", ""))
        self.hub.log.append(request)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        for pattern, answer in ROUTES:
            match = re.fullmatch(pattern, path)
            if match:
                revision = self._revision(match.groupdict().get("revision"))
                if revision is None:
                    self._error(404, "RevisionNotFound")
                else:
                    answer(self, request, revision, match.groupdict().get("path") or "", parse_qs(url.query), body)
                return
        self._error(404, "RepoNotFound" if REPOSITORY not in path else "EntryNotFound")

    def _revision(self, name: str | None) -> str | None:
        head = self.hub.head()
        name = name or "main"
        return head if name == "main" else name if name in self.hub.revisions else None

    def _info(self, _: Request, revision: str, path: str, query: dict, body: bytes) -> None:
        siblings = [{"rfilename": name} for name in self.hub.revisions[revision]]
        self._json(
            {
                "_id": "1",
                "id": REPOSITORY,
                "sha": revision,
                "private": False,
                "gated": False,
                "disabled": False,
                "downloads": 0,
                "likes": 0,
                "tags": [],
                "siblings": siblings,
            }
        )

    def _tree(self, _: Request, revision: str, path: str, query: dict, body: bytes) -> None:
        recursive = query.get("recursive", ["false"])[0].lower() == "true"
        entries = self._entries(revision)
        prefix = f"{path}/" if path else ""
        chosen = [
            entry
            for name, entry in sorted(entries.items())
            if name.startswith(prefix) and (recursive or "/" not in name[len(prefix) :])
        ]
        self._json(chosen) if chosen or not path else self._error(404, "EntryNotFound")

    def _paths_info(self, _: Request, revision: str, path: str, query: dict, body: bytes) -> None:
        text = body.decode()
        wanted = json.loads(text)["paths"] if text.startswith("{") else parse_qs(text)["paths"]
        entries = self._entries(revision)
        self._json([entries[name] for name in wanted if name in entries])

    def _entries(self, revision: str) -> dict[str, dict]:
        entries = {}
        for name, content in self.hub.revisions[revision].items():
            entries[name] = {"type": "file", "oid": hashlib.sha1(content).hexdigest(), "size": len(content), "path": name}
            folder = name
            while "/" in folder:
                folder = folder.rsplit("/", 1)[0]
                entries[folder] = {
                    "type": "directory",
                    "oid": hashlib.sha1(folder.encode()).hexdigest(),
                    "size": 0,
                    "path": folder,
                }
        return entries

    def _resolve(self, request: Request, revision: str, path: str, query: dict, body: bytes) -> None:
        content = self.hub.revisions[revision].get(path)
        if content is None:
            self._error(404, "EntryNotFound")
            return
        fault = self.hub.next_fault(revision) if request.reads_parquet else None
        if fault == "stall":
            self.hub.stall()
            self.close_connection = True
            return
        if fault in ("500", "404"):
            self._error(int(fault), "EntryNotFound" if fault == "404" else "")
            return
        status, start, end = 200, 0, len(content)
        if request.range:
            first, last = re.fullmatch(r"bytes=(\d+)-(\d*)", request.range).groups()
            status, start, end = 206, int(first), min(int(last or len(content)) + 1, len(content))
        headers = {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": revision, "Accept-Ranges": "bytes"}
        if status == 206:
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{len(content)}"
        piece = content[start:end]
        self._send(status, piece, headers, cut=fault == "cut")

    def _json(self, value: object) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _error(self, status: int, code: str) -> None:
        headers = {"X-Error-Code": code, "X-Error-Message": code} if code else {}
        self._send(status, b'{"error": "as planned"}', {"Content-Type": "application/json", **headers})

    def _send(self, status: int, body: bytes, headers: dict[str, str], cut: bool = False) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[: len(body) // 2] if cut else body)
        if cut:
            self.close_connection = True


Answer = Callable[[_Handler, Request, str, str, dict, bytes], None]
API = f"/api/datasets/{REPOSITORY}"
ROUTES: list[tuple[str, Answer]] = [
    (f"{API}", _Handler._info),
    (f"{API}/revision/(?P<revision>[^/]+)", _Handler._info),
    (f"{API}/tree/(?P<revision>[^/]+)(/(?P<path>.+))?", _Handler._tree),
    (f"{API}/paths-info/(?P<revision>[^/]+)", _Handler._paths_info),
    (f"/datasets/{REPOSITORY}/resolve/(?P<revision>[^/]+)/(?P<path>.+)", _Handler._resolve),
]
