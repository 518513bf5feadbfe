"""The files of a run directory: to which run a path belongs, so that no command writes a result over it."""

from __future__ import annotations

from pathlib import Path

from nsa_lab.runs.directory import (
    CHECKPOINTS,
    CONFIG,
    ENVIRONMENT,
    LOCK,
    LOG,
    RECORD_FILES,
    RECORDED,
    STACKS,
    TENSORBOARD,
    VERDICT,
)
from nsa_lab.runs.evaluation import CONVERSION, EVALUATION, RULER, RULER_UNFINISHED, UNFINISHED

# Files that a run writes, and folders of which all files are its own.
RUN_FILES = frozenset(
    {*RECORD_FILES, ENVIRONMENT, VERDICT, RECORDED, LOG, LOCK, STACKS}
    | {EVALUATION, UNFINISHED, CONVERSION, RULER, RULER_UNFINISHED}
)
RUN_FOLDERS = frozenset({CHECKPOINTS, TENSORBOARD})


def find_run_of_file(path: Path) -> str | None:
    """Return the name of the run directory to which a file belongs; None for other files, also in a run directory."""
    file = path.parent.resolve() / path.name
    for folder in file.parents:
        if (folder / CONFIG).is_file():
            parts = file.relative_to(folder).parts
            return folder.name if parts[0] in (RUN_FILES if len(parts) == 1 else RUN_FOLDERS) else None
    return None
