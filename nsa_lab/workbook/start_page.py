"""Markdown for the start notebook: what this machine can run, and the list of runs."""

from __future__ import annotations

from pathlib import Path

import torch

from nsa_lab.attention import resolve_backend
from nsa_lab.config import ConfigError, NSAConfig
from nsa_lab.runs import lifecycle, resolve
from nsa_lab.runs.directory import RunDirectoryError
from nsa_lab.runs.history import History
from nsa_lab.runs.tables import Table

MAX_LISTED_RUNS = 12


def describe_machine() -> str:
    """Return the device that training uses here, and the backend of each part of attention with the reason."""
    has_cuda = torch.cuda.is_available()
    device = torch.device("cuda" if has_cuda else "cpu")
    resolved = resolve_backend(device, torch.bfloat16 if has_cuda else torch.float32, NSAConfig())
    rows = [(part, backend.backend, backend.reason) for part, backend in resolved.items()]
    threads = torch.get_num_threads()
    device_name = torch.cuda.get_device_name(device) if has_cuda else f"CPU, {threads} thread{'s' * (threads != 1)}"
    table = Table(("part", "backend", "why"), rows).to_markdown()
    return f"**{device_name}**, torch {torch.__version__}\n\n{table}"


def list_runs(outputs: str = "") -> str:
    """Return a table of the latest runs, newest first, with links to their reports."""
    folder = resolve.get_root() / outputs if outputs else resolve.get_outputs_dir()
    run_dirs = list(reversed(resolve.list_own_run_dirs(folder)))[:MAX_LISTED_RUNS]
    if not run_dirs:
        return f"No runs in `{folder}` yet. Notebook 04 trains one."
    return Table(("run", "state", "step", "report"), map(_format_row, run_dirs)).to_markdown()


def _format_row(run: Path) -> tuple[str, str, str, str]:
    page = run / "report.html"
    try:
        history, state = History.read(run), lifecycle.get_state(run)
    except (ConfigError, RunDirectoryError) as error:
        return f"`{run.name}`", "?", str(error), ""
    # Links are relative to the notebook's folder. A page outside the project is shown as a path.
    link = (
        f"[report](../{page.relative_to(resolve.get_root())})" if page.is_relative_to(resolve.get_root()) else f"`{page}`"
    )
    steps = f"{history.last_step:,} of {history.config.train.steps:,}"
    return f"`{run.name}`", state, steps, link if page.is_file() else ""
