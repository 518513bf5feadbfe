"""`python -m nsa_lab.train RUN_DIR`: train a run in this process until it is done or stopped."""

from __future__ import annotations

import argparse
import faulthandler
import logging
import os
import sys
from collections.abc import Sequence

from nsa_lab.config import UsageError
from nsa_lab.config.errors import describe_os_error
from nsa_lab.runs.directory import EXIT_STOPPED, EXIT_USAGE
from nsa_lab.runs.text_output import allow_any_text
from nsa_lab.train import launcher


def main(arguments_text: Sequence[str] | None = None) -> int:
    """Train the run that the arguments name and return the exit code. Default: the arguments of this process."""
    parser = argparse.ArgumentParser(prog="python -m nsa_lab.train", description=__doc__)
    parser.add_argument("run_dir", help="run directory, created by nsa_lab.runs.lifecycle.create_run")
    parser.add_argument("--ranks", type=int, default=1, help="processes on this host, one per device (or use torchrun)")
    parser.add_argument("--lock", type=int, help="inherited file descriptor that holds the run's lock")
    parser.add_argument("--supervised", metavar="HANDLE", help="run as a rank of the supervisor that started this process")
    arguments = parser.parse_args(arguments_text)
    allow_any_text()
    # A fault that ends the process, such as SIGBUS for a data shard that was truncated meanwhile, leaves its stacks in the
    # log.
    faulthandler.enable(all_threads=True)
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO, stream=sys.stdout)
    try:
        if arguments.ranks > 1:
            return launcher.launch_ranks(arguments.run_dir, arguments.ranks, arguments.lock)
        lock, store = launcher.bind_to_supervisor(arguments.supervised) if arguments.supervised else (arguments.lock, None)
        from nsa_lab.train import run

        code = run(arguments.run_dir, lock=lock, store=store)
        # torchrun starts all ranks again if one exits with another code than 0. The status of the run has the code 75.
        return 0 if code == EXIT_STOPPED and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0" else code
    except UsageError as error:
        print(error, file=sys.stderr)
        return EXIT_USAGE
    except OSError as error:
        text = describe_os_error(error)
        if text is None:
            raise
        print(text, file=sys.stderr)
        return EXIT_USAGE


if __name__ == "__main__":
    sys.exit(main())
