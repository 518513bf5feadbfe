"""A process that has imported everything and forks a trainer for each run directory that it reads from its input.

Prints the trainer's pid, and its exit status once it ended. Killing the trainer is a real SIGKILL of a real process; only
the seconds of importing are saved.
"""

from __future__ import annotations

import os
import sys

# What torch would import in every trainer anew: the first call of a function that its compiler leaves alone, and the
# first tensor without data.
import torch
import torch._dynamo
import torch._refs

from nsa_lab.train.attempt import run


def main() -> None:
    torch.set_num_threads(1)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            os.setsid()
            os._exit(run(line.strip()))
        print("pid", pid, flush=True)
        _, status = os.waitpid(pid, 0)
        print("exit", os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
