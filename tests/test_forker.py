"""A forked process has its own session as soon as `subprocess` returns it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


@pytest.mark.slow
def test_a_forked_process_is_in_its_session_at_once(forked: None) -> None:
    """A test that reads the process group at once, to interrupt it later, must not get that of the process that forks."""
    command = [sys.executable, "-m", "nsa_lab.train"]
    for _ in range(8):
        with subprocess.Popen(command, stderr=subprocess.DEVNULL, start_new_session=True) as process:
            assert os.getsid(process.pid) == os.getpgid(process.pid) == process.pid
