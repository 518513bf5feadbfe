"""A forked process is, as soon as `subprocess` has it, what it was asked to be."""

import os
import subprocess
import sys


def test_a_session_of_its_own_is_there_when_the_process_is(forked: None) -> None:
    """Whoever asks for the process group at once, to interrupt it later, must not get that of the process that forks."""
    for _ in range(20):
        with subprocess.Popen(
            [sys.executable, "-m", "nsa_lab.train"], stderr=subprocess.DEVNULL, start_new_session=True
        ) as it:
            assert os.getsid(it.pid) == os.getpgid(it.pid) == it.pid
