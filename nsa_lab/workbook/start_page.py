"""What the landing notebook says: what this machine can do, and which runs there are. Markdown, to be displayed."""

from __future__ import annotations

from pathlib import Path

import torch

from nsa_lab.attention import resolve_backend
from nsa_lab.config import ConfigError, NSAConfig
from nsa_lab.runs import lifecycle, resolve
from nsa_lab.runs.directory import RunDirectoryError
from nsa_lab.runs.history import History

MAX_LISTED_RUNS = 12


def describe_machine() -> str:
    """The device that training picks here, and what each part of attention runs on and why."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    choices = resolve_backend(device, torch.bfloat16 if cuda else torch.float32, NSAConfig())
    rows = [f"| {part} | {choice.backend} | {choice.reason} |" for part, choice in choices.items()]
    threads = torch.get_num_threads()
    named = torch.cuda.get_device_name(device) if cuda else f"CPU, {threads} thread{'s' * (threads != 1)}"
    return "\n".join([f"**{named}**, torch {torch.__version__}", "", "| part | backend | why |", "|---|---|---|", *rows])


def list_runs(outputs: str = "") -> str:
    """The latest runs, newest first, with their reports where they have one."""
    folder = resolve.get_root() / outputs if outputs else resolve.get_outputs_dir()
    found = list(reversed(resolve.list_run_dirs(folder)))[:MAX_LISTED_RUNS]
    if not found:
        return f"No runs in `{folder}` yet: notebook 03 makes one."
    return "\n".join(["| run | state | step | report |", "|---|---|---|---|", *map(_format_row, found)])


def _format_row(run: Path) -> str:
    page = run / "report.html"
    try:
        history, state = History.read(run), lifecycle.get_state(run)
    except (ConfigError, RunDirectoryError) as error:
        return f"| `{run.name}` | ? | {' '.join(str(error).split())} | |"
    # Links are read from the folder of the notebook; a page elsewhere is named by its path.
    link = (
        f"[report](../{page.relative_to(resolve.get_root())})" if page.is_relative_to(resolve.get_root()) else f"`{page}`"
    )
    steps = f"{history.last_step:,} of {history.config.train.steps:,}"
    return f"| `{run.name}` | {state} | {steps} | {link if page.is_file() else ''} |"
