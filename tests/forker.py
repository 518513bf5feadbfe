"""Trainers, and kernels of notebooks, as processes of their own without the seconds in which each would import torch.

One process per test session has imported what they need. With the fixture `forked`, what starts `python -m nsa_lab.train`,
a kernel or a script of the tests through `subprocess` gets a fork of that process, not an interpreter that starts anew. All
else is as it would be: the process is a child of the one that asked, with the descriptors, environment, working
directory, session, process group and signal mask that it asked for, and dies of a SIGKILL as any other.

A supervisor of several ranks forks them from itself. What a kernel starts is started anew: it has threads.

A fault that mutants.py plants is in no fork: it is held to tests that train in their own process.

Where a process cannot adopt another one's children, which is everywhere but on Linux, every start is a real one.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent
TRAINER, KERNEL = "nsa_lab.train", "ipykernel_launcher"
# What torch would import in every trainer anew (for the first optimiser, the first tensor without data, the record's
# mirror, and where weights are sharded), and what notebooks import.
NEEDED = {
    TRAINER: (
        "torch._dynamo",
        "torch._refs",
        "torch.distributed.fsdp",
        "torch.utils.tensorboard",
        "nsa_lab.train.__main__",
        "nsa_lab.train.attempt",
    ),
    KERNEL: (
        "ipykernel.kernelapp",
        "matplotlib.backends.backend_agg",
        "matplotlib_inline.backend_inline",
        "nsa_lab.evaluate.tiny_recall",
        "nsa_lab.workbook.recall_explorer",
        "nsa_lab.workbook.kernel_parity",
        "nsa_lab.workbook.query_explorer",
        "nsa_lab.workbook.run_explorer",
        "nsa_lab.workbook.training_session",
    ),
}

PR_SET_CHILD_SUBREAPER = 36

start_anew = subprocess._fork_exec


@dataclass
class Start:
    """What `subprocess` asks of a new process. `keep` are the descriptors it is to have, `sources` where they are now; the
    last of these is none of them: `subprocess` waits until all of its copies are closed, which is when the new process has
    its own session and descriptors."""

    command: list[str]
    cwd: str
    environment: dict[str, str]
    keep: list[int]
    sources: list[int]
    session: bool
    group: int
    blocked: list[int]

    @classmethod
    def asked(cls, args: Any, rest: tuple[Any, ...]) -> Start | None:
        """From the arguments of `subprocess._fork_exec`; None for what must be started anew."""
        command = [os.fsdecode(arg) for arg in args]
        if command[0] != sys.executable or len(command) < 2:
            return None
        named = command[1] == "-m" and command[2] in NEEDED
        script = Path(command[1]).is_relative_to(TESTS) and command[1] != __file__
        if not (named or script):
            return None
        _, _, passed, cwd, environment, stdin, _, _, stdout, _, stderr, _, failed, _, session, group, *_ = rest
        keep = [0, 1, 2, *sorted({*passed} - {failed})]
        stdio = [number if given == -1 else given for number, given in enumerate((stdin, stdout, stderr))]
        return cls(
            command,
            os.fsdecode(cwd or os.getcwd()),
            dict(os.environ) if environment is None else dict(os.fsdecode(e).split("=", 1) for e in environment),
            keep,
            [*stdio, *keep[3:], failed],
            bool(session),
            group,
            sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        )

    @property
    def kernel(self) -> bool:
        return self.command[1:3] == ["-m", KERNEL]

    def become(self) -> None:
        """Turn this process, a fork, into the one that was asked for. Does not return."""
        code = 1
        try:
            self._take_over()
            code = self._run()
        except BaseException:  # noqa: BLE001 - as the interpreter would end
            traceback.print_exc()
        finally:
            with contextlib.suppress(OSError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def _take_over(self) -> None:
        if self.session:
            os.setsid()
        if self.group >= 0:
            os.setpgid(0, self.group)
        # Above all that are to be taken, so that none is closed before it was read.
        above = [fcntl.fcntl(source, fcntl.F_DUPFD, max(*self.keep, *self.sources) + 1) for source in self.sources]
        for source, number in zip(above[:-1], self.keep, strict=True):
            os.dup2(source, number)
        for first, after in zip(self.keep[2:], [*self.keep[3:], os.sysconf("SC_OPEN_MAX")], strict=True):
            os.closerange(first + 1, after)
        os.chdir(self.cwd)
        os.environ.clear()
        os.environ.update(self.environment)
        sys.stdout.reconfigure(line_buffering=True)
        signal.pthread_sigmask(signal.SIG_SETMASK, self.blocked)

    def _run(self) -> int:
        if not self.kernel:
            subprocess._fork_exec = fork_from_here
        try:
            if self.command[1] == "-m":
                sys.argv, sys.path[0] = self.command[2:], self.cwd
                runpy.run_module(self.command[2], run_name="__main__", alter_sys=True)
            else:
                sys.argv, sys.path[0] = self.command[1:], str(Path(self.command[1]).parent)
                runpy.run_path(self.command[1], run_name="__main__")
        except SystemExit as end:
            if isinstance(end.code, str):
                print(end.code, file=sys.stderr)
            return int(end.code or 0) if not isinstance(end.code, str) else 1
        return 0


def fork_from_here(args: Any, *rest: Any) -> int:
    """`subprocess._fork_exec` of a process that was forked: its children are forks of it."""
    start = Start.asked(args, rest)
    if start is None:
        return start_anew(args, *rest)
    pid = os.fork()
    if not pid:
        start.become()
    return pid


class Forker:
    """The process that forks, as those see it that ask for forks."""

    def __init__(self) -> None:
        self._alone = threading.Lock()
        self._process: subprocess.Popen | None = None

    def _start(self) -> subprocess.Popen:
        """At the first fork that is asked for."""
        self._socket, its = socket.socketpair()
        self._answers = self._socket.makefile()
        # Triton's interpreter is the kernel tests' own.
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        with its:
            # In a session of its own: a Ctrl-C at the terminal is not for it.
            return subprocess.Popen([sys.executable, __file__], stdin=its, start_new_session=True, env=environment)

    @contextlib.contextmanager
    def forking(self) -> Iterator[None]:
        """Meanwhile what this process starts is forked where that can be."""
        if sys.platform == "linux":
            subprocess._fork_exec = self._fork_exec
        try:
            yield
        finally:
            subprocess._fork_exec = start_anew

    def _fork_exec(self, args: Any, *rest: Any) -> int:
        """`subprocess._fork_exec` meanwhile."""
        start = Start.asked(args, rest)
        if start is None:
            return start_anew(args, *rest)
        with self._alone, adopting():
            self._process = self._process or self._start()
            socket.send_fds(self._socket, [json.dumps(asdict(start)).encode() + b"\n"], start.sources)
            return int(self._answers.readline())

    def close(self) -> None:
        if self._process is None:
            return
        self._answers.close()
        self._socket.close()
        self._process.wait(timeout=30)


@contextlib.contextmanager
def adopting() -> Iterator[None]:
    """Meanwhile this process becomes the parent of the orphans among its descendants."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")
    try:
        yield
    finally:
        libc.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def serve(asked: socket.socket) -> None:
    """Fork for each request; answer with the pid once the one that asked is its parent."""
    while True:
        text, sources, _, _ = socket.recv_fds(asked, 1 << 16, 64)
        while text and not text.endswith(b"\n"):
            text += asked.recv(1 << 16)
        if not text:
            return
        start = Start(**json.loads(text) | {"sources": sources})
        if start.kernel:
            load(KERNEL)
        reading, writing = os.pipe()
        between = os.fork()
        if not between:
            pid = os.fork()
            if not pid:
                asked.detach()
                start.become()
            os.write(writing, b"%d\n" % pid)
            os._exit(0)
        # With the process between them gone, the one that asked adopts the fork.
        os.waitpid(between, 0)
        asked.sendall(os.read(reading, 20))
        for descriptor in (*sources, reading, writing):
            os.close(descriptor)


def load(what: str) -> None:
    """Import what it needs, and let no fork look through that for garbage."""
    for module in NEEDED[what]:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()


def main() -> None:
    asked = socket.socket(fileno=os.dup(0))
    # As a kernel sets it before anything can import matplotlib.
    os.environ["MPLBACKEND"] = "module://matplotlib_inline.backend_inline"
    load(TRAINER)
    sys.modules["torch"].set_num_threads(1)
    serve(asked)


if __name__ == "__main__":
    main()
