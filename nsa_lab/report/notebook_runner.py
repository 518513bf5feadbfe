"""A training notebook, headlessly: papermill executes it, the terminal shows the run, and a report always comes out.

The trainer is a process of its own that the notebook starts or attaches to, so what happens to the notebook does not
happen to the run.
"""

from __future__ import annotations

import logging
import signal
import sys
import threading
import warnings
from pathlib import Path

import papermill
from nbclient.exceptions import DeadKernelError
from papermill.exceptions import PapermillExecutionError
from rich.console import Console

from nsa_lab.health import examine
from nsa_lab.health.next_actions import list_advice
from nsa_lab.report import INDEX, NOTEBOOK, write_index, write_report
from nsa_lab.runs import directory, lifecycle, resolve
from nsa_lab.runs.history import History
from nsa_lab.runs.live_view import watch

AUTOSAVE_S = 10
KERNEL = "python3"
INTERRUPTED = "interrupted"
# A kernel logs that it talks over TCP, and its own end when it is interrupted; neither is about the run.
KERNEL_ARGUMENTS = ["--log-level=50"]


def execute_notebook(notebook: Path, run_dir: Path, console: Console) -> str | None:
    """Execute the notebook on the run, saving it as `report.ipynb` on the way; what went wrong in it, or None."""
    finished = threading.Event()
    # What stops this process must leave the notebook as far as it came, and a report.
    earlier = signal.signal(signal.SIGTERM, signal.default_int_handler)
    follower = threading.Thread(target=watch, args=(run_dir, finished.is_set, console), name="follow", daemon=True)
    follower.start()
    try:
        _run_papermill(notebook, run_dir)
    except PapermillExecutionError as error:
        return f"cell [{error.exec_count}]: {error.ename}: {' '.join(str(error.evalue).split())[:400]}"
    except DeadKernelError:
        return "its kernel died; the system may have killed it for memory"
    except KeyboardInterrupt:
        return INTERRUPTED
    finally:
        signal.signal(signal.SIGTERM, earlier)
        finished.set()
        follower.join()
    return None


def write_run_report(run_dir: Path, problem: str | None, console: Console) -> None:
    """Write the report and the list of runs, say how it went, and print the report's path as the last line."""
    state = lifecycle.get_state(run_dir)
    if problem:
        console.print(f"the notebook did not finish: {problem}", style="red", highlight=False, soft_wrap=True)
    console.print(_describe_outcome(run_dir, state), highlight=False, soft_wrap=True)
    if not (run_dir.parent / INDEX).is_file():
        write_index(run_dir.parent)  # the report links to it
    page = write_report(run_dir)
    console.print(f"all runs: {write_index(run_dir.parent)}", highlight=False, soft_wrap=True)
    sys.stdout.write(f"{page}\n")


def _describe_outcome(run_dir: Path, state: str) -> str:
    run = run_dir.name
    if state == directory.RUNNING:
        return (
            f"the trainer goes on: nsa-lab follow {run}, or nsa-lab stop {run}; "
            f"nsa-lab run --into {run} executes the notebook again"
        )
    if state == directory.DONE:
        return examine(run_dir).headline
    return "\n".join(
        [f"the run is {state}: {directory.read_status(run_dir).get('reason')}", *list_advice(History.read(run_dir))]
    )


def _run_papermill(notebook: Path, run_dir: Path) -> None:
    logging.getLogger("papermill").setLevel(logging.WARNING)
    with warnings.catch_warnings():
        # jupyter_client and nbformat announce changes to come on every start; they are not about this notebook.
        warnings.simplefilter("ignore", DeprecationWarning)
        papermill.execute_notebook(
            notebook,
            run_dir / NOTEBOOK,
            parameters={"run_dir": str(run_dir)},
            kernel_name=KERNEL,
            language="python",
            progress_bar=False,
            autosave_cell_every=AUTOSAVE_S,
            extra_arguments=KERNEL_ARGUMENTS,
            cwd=str(resolve.get_root()),
        )
