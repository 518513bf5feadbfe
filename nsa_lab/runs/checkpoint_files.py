"""Checkpoints as files: paths, manifests and integrity checks. Standard library only.

The trainer, which writes checkpoints, and every reader use this module, so all of them accept and refuse the same ones.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from nsa_lab.runs.atomic_io import compute_digest, parse_unique_json, read_bounded, read_json
from nsa_lab.runs.directory import CHECKPOINTS

MANIFEST = "MANIFEST.json"
FORMAT_VERSION = 1
MODEL, OPTIMIZER, STATE, PROBE = "model.safetensors", "optimizer.pt", "state.json", "probe.safetensors"
RANDOM = "random.pt"  # random states of a sharded checkpoint, which has no optimizer.pt
# The weights of a checkpoint: one file, or the index of sharded ones.
WEIGHT_FILES = (MODEL, ".metadata")
SHARD_SUFFIX = ".distcp"
MAX_MANIFEST_BYTES = 1 << 24
MAX_FILES = 100_000  # of a checkpoint: one per rank, and a few more
N_READERS = 8  # threads that compute hashes
MAX_PROBLEMS = 10
PREFIX = "step-"
_STEP_NAME = re.compile(rf"{PREFIX}[0-9]{{8,18}}")


def get_checkpoint_dir(run_dir: str | Path) -> Path:
    """Return the `checkpoints/` folder of a run. It may not exist."""
    return Path(run_dir) / CHECKPOINTS


def get_checkpoint_path(folder: Path, step: int) -> Path:
    """Return the path of the checkpoint of `step` in a run's `checkpoints/` folder."""
    return folder / f"{PREFIX}{step:08d}"


def describe_mismatch(checkpoint: Path, saved: Mapping[str, Any], expected: Mapping[str, Any]) -> str | None:
    """Return how a checkpoint's tensors differ from a model's in name or shape, as a message; None if they agree.

    `saved`, `expected`: tensors of the checkpoint and of the model, by name.
    """
    has, needs = set(saved), set(expected)
    if has == needs:
        shapes = ((name, tuple(saved[name].shape), tuple(weight.shape)) for name, weight in expected.items())
        for name, saved_shape, expected_shape in shapes:
            if saved_shape != expected_shape:
                return (
                    f"{checkpoint}: its weights do not fit this model: {name} has shape {list(saved_shape)}, the model "
                    f"needs {list(expected_shape)}. It was trained with another configuration: restore its config.yaml"
                )
        return None
    parts = [
        f"{words} {', '.join(sorted(names)[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}"
        for words, names in (("it lacks", needs - has), ("it has", has - needs))
        if names
    ]
    return (
        f"{checkpoint}: its weights do not fit this model: {', and '.join(parts)}. Another version of the code wrote it: "
        "check out the commit recorded in its run's environment.json"
    )


def parse_step(checkpoint: Path) -> int:
    """Return the optimizer step of a checkpoint, from its folder name."""
    return int(checkpoint.name.removeprefix(PREFIX))


def is_checkpoint_name(name: str) -> bool:
    """Return whether `name` is the name of the folder of a checkpoint."""
    return bool(_STEP_NAME.fullmatch(name)) and name == get_checkpoint_path(Path(), parse_step(Path(name))).name


def list_steps(folder: Path) -> list[int]:
    """Return the steps of the checkpoints in a run's `checkpoints/` folder, ascending.

    Contents are not checked (see `find_problems`). Entries named `step-...` that are not a folder with exactly the name of
    a checkpoint are ignored. Raises OSError for a folder that this user may not read, which `Path.glob` takes as empty.
    """
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(parse_step(Path(name)) for name in names if is_checkpoint_name(name) and (folder / name).is_dir())


def format_manifest(step: int, files: Mapping[str, Mapping[str, Any]], facts: Mapping[str, Any] | None = None) -> str:
    """Return the JSON text of a manifest.

    `files`: entries of `make_manifest_entry` by file name. `facts`: further fields, such as hashes of config and data.
    """
    manifest = {"v": FORMAT_VERSION, "step": step, **(facts or {}), "files": files}
    return json.dumps({**manifest, "digest": compute_digest(manifest)}, indent=1)


def make_manifest_entry(data: bytes | memoryview) -> dict[str, Any]:
    """Return the manifest entry of a file with this content: size and sha256."""
    return {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def read_manifest_entry(path: Path) -> dict[str, Any]:
    """Return the manifest entry of the file at `path`."""
    with open(path, "rb") as file:
        return {"size": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def find_problems(checkpoint: Path, *, check_hashes: bool = True) -> list[str]:
    """Return the problems of a checkpoint, file by file. Empty if the manifest and all files match their recorded values.

    Sizes are always compared. With `check_hashes` all files are read, which takes a while for models of gigabytes.
    """
    if not checkpoint.is_dir():
        return [f"{checkpoint.name} does not exist"]
    try:
        manifest = parse_unique_json(read_bounded(checkpoint / MANIFEST, MAX_MANIFEST_BYTES))
        recorded_digest = manifest.pop("digest")
    except FileNotFoundError:
        return [f"{MANIFEST} is missing"]
    except (OSError, ValueError, RecursionError, KeyError, AttributeError, TypeError) as error:
        return [f"{MANIFEST} cannot be read ({type(error).__name__})"]
    if recorded_digest != compute_digest(manifest):
        return [f"{MANIFEST} does not match its own digest"]
    if manifest.get("v") != FORMAT_VERSION:
        return [f"{MANIFEST}: expected version {FORMAT_VERSION} of the format, got {manifest.get('v')!r:.40}"]
    # Results depend on the step of the weights: each training stage has its own rope_theta.
    step = manifest.get("step")
    if type(step) is not int:
        return [f"{MANIFEST} has no step"]
    if checkpoint.name != get_checkpoint_path(checkpoint.parent, step).name:
        return [
            f"{MANIFEST} is that of step {step}: rename the folder to {get_checkpoint_path(checkpoint.parent, step).name}"
        ]
    files = _get_manifest_files(manifest)
    if files is None:
        return [f"{MANIFEST} has no valid list of files with size and sha256"]
    if not any(name in WEIGHT_FILES for name, _ in files):
        return [f"{MANIFEST} lists no weights ({' or '.join(WEIGHT_FILES)})"]
    if problem := _find_unlisted(checkpoint, {name for name, _ in files}):
        return [problem]
    if problem := _find_other_step(checkpoint, step):
        return [problem]
    # Sizes first: hashes of gigabytes need not be computed if a file is missing.
    problems = _list_problems(checkpoint, files, False)
    return _list_problems(checkpoint, files, True) if check_hashes and not problems else problems


def _find_other_step(checkpoint: Path, step: int) -> str | None:
    """Return a problem if the training state is that of another step: the manifest of a copy was edited."""
    if not (checkpoint / STATE).is_file():
        return None
    state_step = read_json(checkpoint / STATE).get("step")
    return None if state_step in (None, step) else f"{STATE} is of step {state_step!r:.40}, {MANIFEST} of step {step}"


def _find_unlisted(checkpoint: Path, listed: set[str]) -> str | None:
    """Return a problem if the manifest lists only a part of a checkpoint. A packaged model has its weights only."""
    if len(listed) > 1 and STATE not in listed:
        return f"{MANIFEST} does not list {STATE}"
    known = {*WEIGHT_FILES, OPTIMIZER, STATE, PROBE, RANDOM}
    try:
        names = {path.name for path in checkpoint.iterdir() if path.name in known or path.suffix == SHARD_SUFFIX}
    except OSError as error:
        return f"{checkpoint.name} cannot be read ({error.strerror})"
    unlisted = sorted(names - listed)
    return f"{MANIFEST} does not list {', '.join(unlisted[:MAX_PROBLEMS])}, which the folder has" if unlisted else None


def _list_problems(checkpoint: Path, files: Sequence[tuple[str, Mapping[str, Any]]], check_hashes: bool) -> list[str]:
    """Return the problems of the files, at most `MAX_PROBLEMS` and the number of others."""
    if check_hashes:
        with ThreadPoolExecutor(min(len(files), N_READERS)) as readers:
            found = list(readers.map(lambda item: _find_file_problem(checkpoint / item[0], item[1], True), files))
    else:
        found = [_find_file_problem(checkpoint / name, entry, False) for name, entry in files]
    problems = [problem for problem in found if problem]
    more = [f"{len(problems) - MAX_PROBLEMS} further files"] if len(problems) > MAX_PROBLEMS else []
    return [*problems[:MAX_PROBLEMS], *more]


def _get_manifest_files(manifest: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]] | None:
    """Return names and entries of the files; None if the manifest's `files` field is malformed."""
    files = manifest.get("files")
    if not isinstance(files, dict) or not all(isinstance(entry, dict) for entry in files.values()):
        return None
    if len(files) > MAX_FILES:
        return None
    # A name that contains a folder would lead out of the checkpoint.
    is_valid = all(
        Path(name).name == name and isinstance(entry.get("size"), int) and isinstance(entry.get("sha256"), str)
        for name, entry in files.items()
    )
    return list(files.items()) if is_valid else None


def _find_file_problem(path: Path, entry: Mapping[str, Any], check_hashes: bool) -> str | None:
    try:
        if not path.is_file():
            return f"{path.name} is missing"
        size = path.stat().st_size
        if size != entry["size"]:
            return f"{path.name} has {size} bytes, its manifest records {entry['size']}"
        if not check_hashes or read_manifest_entry(path)["sha256"] == entry["sha256"]:
            return None
    except OSError as error:
        return f"{path.name:.100} cannot be read ({error.strerror})"
    return f"{path.name} does not match its sha256"
