"""Run a training notebook headlessly: papermill executes it, the terminal shows the run, and a report is always written.

The trainer is a separate process that the notebook starts or attaches to. An error in the notebook therefore does not
affect the run.
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
# The kernel logs that it uses TCP, and that it was interrupted. Neither is about the run.
KERNEL_ARGUMENTS = ["--log-level=50"]


def execute_notebook(notebook: Path, run_dir: Path, console: Console) -> str | None:
    """Execute the notebook for the run, saving it as `report.ipynb` meanwhile. Return its error, or None."""
    finished = threading.Event()
    # If this process is terminated, keep the partly executed notebook and write a report.
    previous_handler = signal.signal(signal.SIGTERM, signal.default_int_handler)
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
        signal.signal(signal.SIGTERM, previous_handler)
        finished.set()
        follower.join()
    return None


def write_run_report(run_dir: Path, problem: str | None, console: Console) -> None:
    """Write the report and the list of runs, print the outcome, and print the path of the report as the last line."""
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
            f"the trainer is still running: nsa-lab follow {run}, or nsa-lab stop {run}; "
            f"nsa-lab run --into {run} executes the notebook again"
        )
    if state == directory.DONE:
        return examine(run_dir).headline
    return "\n".join(
        [f"the run is {state}: {directory.read_status(run_dir).get('reason')}", *list_advice(History.read(run_dir))]
    )


def _run_papermill(notebook: Path, run_dir: Path) -> None:
    logging.getLogger("papermill").setLevel(logging.WARNING)
    output = run_dir / NOTEBOOK
    if output.is_symlink():
        output.unlink()  # papermill would write to a file outside of the run
    with warnings.catch_warnings():
        # jupyter_client and nbformat warn about future changes on every start, not about this notebook.
        warnings.simplefilter("ignore", DeprecationWarning)
        papermill.execute_notebook(
            notebook,
            output,
            parameters={"run_dir": str(run_dir)},
            kernel_name=KERNEL,
            language="python",
            progress_bar=False,
            autosave_cell_every=AUTOSAVE_S,
            extra_arguments=KERNEL_ARGUMENTS,
            cwd=str(resolve.get_root()),
        )
