"""Checkpoints as files: where they lie, which there are, and whether one is whole.

The trainer, which writes them, and all who read them ask here, so that what one of them refuses every other refuses too.
Only the standard library.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from nsa_lab.runs.directory import CHECKPOINTS

MANIFEST = "MANIFEST.json"
FORMAT_VERSION = 1
PREFIX = "step-"
_STEP_NAME = re.compile(rf"{PREFIX}[0-9]{{8,18}}")


def get_checkpoint_dir(run_dir: str | Path) -> Path:
    """The folder that a run keeps its checkpoints in; it need not exist."""
    return Path(run_dir) / CHECKPOINTS


def get_checkpoint_path(folder: Path, step: int) -> Path:
    """Where the checkpoint of `step` lies in a run's `checkpoints/` folder."""
    return folder / f"{PREFIX}{step:08d}"


def describe_mismatch(checkpoint: Path, saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> str | None:
    """None, or in a sentence how a checkpoint's weights differ from those of the model that asks, by name or by shape.

    Both are tensors by name.
    """
    has, needs = set(saved), set(wanted)
    if has == needs:
        shapes = ((name, tuple(saved[name].shape), tuple(weight.shape)) for name, weight in wanted.items())
        for name, written, asked in shapes:
            if written != asked:
                return (
                    f"{checkpoint}: its weights are not those of this model: its {name} is {list(written)}, the model's "
                    f"{list(asked)}. It was trained with another configuration: put the run's config.yaml back as it was"
                )
        return None
    parts = [
        f"{words} {', '.join(sorted(names)[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}"
        for words, names in (("it lacks", needs - has), ("it has", has - needs))
        if names
    ]
    return (
        f"{checkpoint}: its weights are not those of this model: {', and '.join(parts)}. Other code wrote it: use the "
        "commit that its run's environment.json names"
    )


def parse_step(checkpoint: Path) -> int:
    """The optimiser step of a checkpoint, from its name."""
    return int(checkpoint.name.removeprefix(PREFIX))


def list_steps(folder: Path) -> list[int]:
    """Steps of the checkpoints in a run's `checkpoints/` folder, ascending; they need not be whole (see `verify`).

    What is called `step-…` and is no folder of that very name is not one.
    """
    found = [path for path in folder.glob(f"{PREFIX}*") if path.is_dir() and _STEP_NAME.fullmatch(path.name)]
    return sorted(parse_step(path) for path in found if path == get_checkpoint_path(folder, parse_step(path)))


def format_manifest(step: int, files: Mapping[str, Mapping[str, Any]], facts: Mapping[str, Any] | None = None) -> str:
    """The text of a manifest: `files` by name, as `entry_of` describes them, and `facts` (hashes of config and data)."""
    manifest = {"v": FORMAT_VERSION, "step": step, **(facts or {}), "files": files}
    return json.dumps({**manifest, "digest": compute_digest(manifest)}, indent=1)


def make_manifest_entry(data: bytes | memoryview) -> dict[str, Any]:
    """What a manifest says of a file with this content."""
    return {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def compute_digest(manifest: Mapping[str, Any]) -> str:
    """What a manifest says of itself under `digest`: the sha256 of all that it says besides."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def find_problems(checkpoint: Path, *, check_hashes: bool = True) -> list[str]:
    """What is wrong with a checkpoint, file by file; empty if its manifest is its own and every file is as that says.

    Sizes are always compared; without `hashes` the files are not read, which for a model of gigabytes takes a while.
    """
    if not checkpoint.is_dir():
        return [f"{checkpoint.name} is gone"]
    try:
        manifest = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))
        claimed = manifest.pop("digest")
    except FileNotFoundError:
        return [f"{MANIFEST} is missing"]
    except (OSError, ValueError, RecursionError, KeyError, AttributeError, TypeError) as error:
        return [f"{MANIFEST} cannot be read ({type(error).__name__})"]
    if claimed != compute_digest(manifest):
        return [f"{MANIFEST} does not match its own digest"]
    # What is computed with weights depends on the step that they are of: a stage has a rope_theta of its own.
    step = manifest.get("step")
    if isinstance(step, int) and checkpoint.name != get_checkpoint_path(checkpoint.parent, step).name:
        return [
            f"its {MANIFEST} is that of step {step}: call the folder {get_checkpoint_path(checkpoint.parent, step).name}"
        ]
    files = _get_manifest_files(manifest)
    if files is None:
        return [f"{MANIFEST} is no list of files with their sizes and sha256"]
    with ThreadPoolExecutor(max(len(files), 1)) as readers:
        found = readers.map(lambda item: _find_file_problem(checkpoint / item[0], item[1], check_hashes), files)
        return [problem for problem in found if problem]


def _get_manifest_files(manifest: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]] | None:
    """Names and entries of the files, or None if a manifest says something else there."""
    files = manifest.get("files")
    if not isinstance(files, dict) or not all(isinstance(entry, dict) for entry in files.values()):
        return None
    # A name with a folder in it would lead out of the checkpoint.
    fits = all(
        Path(name).name == name and isinstance(entry.get("size"), int) and isinstance(entry.get("sha256"), str)
        for name, entry in files.items()
    )
    return list(files.items()) if fits else None


def _find_file_problem(path: Path, entry: Mapping[str, Any], hashes: bool) -> str | None:
    if not path.is_file():
        return f"{path.name} is missing"
    size = path.stat().st_size
    if size != entry["size"]:
        return f"{path.name} has {size} bytes, its manifest says {entry['size']}"
    if not hashes:
        return None
    with open(path, "rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    return None if found == entry["sha256"] else f"{path.name} does not match its sha256"
