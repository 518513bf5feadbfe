"""Resolve the name of a run, model, configuration file or notebook to its path. Errors list the available names."""

from __future__ import annotations

import difflib
import os
import shlex
from collections.abc import Iterable, Mapping
from fnmatch import fnmatch
from glob import glob
from pathlib import Path
from typing import Any

from nsa_lab.config import ConfigError, RunConfig, find_project_root, parse_override
from nsa_lab.runs import directory
from nsa_lab.runs.directory import RunDirectoryError

LATEST = "latest"
MAX_LISTED = 6  # maximum number of names in an error message
SMOKE_NOTEBOOK, PRODUCTION_NOTEBOOK = "04_smoke_training", "05_production_run"
# File in the folder of an adapter for a pretrained model, as `nsa_lab.convert.adapter` writes it.
ADAPTER_INFO = "adapter.json"
# Models contained in the package. Each is a run directory with one checkpoint, or an adapter.
MODELS_DIR = Path(__file__).parents[1] / "models"


def get_root() -> Path:
    """Return the project's folder; the working directory if the package is installed outside a checkout."""
    return find_project_root() or Path.cwd()


def get_outputs_dir(outputs: Path | None = None) -> Path:
    """Return the folder of run directories: `outputs`, or the project's `outputs/` by default.

    The folder may be missing: the first run creates it. Raises `RunDirectoryError` for any kind of file and for links
    that lead to themselves.
    """
    if outputs is None:
        return get_root() / "outputs"
    try:
        resolved = outputs.resolve()
    except (OSError, RuntimeError) as error:  # a loop of links, by the version of Python
        raise RunDirectoryError(f"{outputs}: expected a folder of run directories, got a link: {error}") from None
    if resolved.exists() and not resolved.is_dir():
        kind = "a file" if resolved.is_file() else "a FIFO" if resolved.is_fifo() else "a device or socket"
        raise RunDirectoryError(f"{outputs}: expected a folder of run directories, got {kind}")
    return resolved


def get_readable_outputs_dir(outputs: Path | None = None) -> Path:
    """Return the folder of `get_outputs_dir`, to list its runs. The default folder may be missing: it has no runs yet.

    Raises `RunDirectoryError` also if `outputs` does not exist and if this user may not list the folder.
    """
    folder = get_outputs_dir(outputs)
    if outputs is not None and not folder.exists():
        raise RunDirectoryError(f"--outputs {outputs}: expected a folder of run directories, got nothing; check the path")
    if folder.exists() and not os.access(folder, os.R_OK | os.X_OK):
        raise RunDirectoryError(f"{folder}: permission denied; let its owner open the folder")
    return folder


def load_config(name: str, overrides: list[str], settings: Mapping[str, Any] | None = None) -> RunConfig:
    """Load `params/<name>.yaml`, or the file at path `name`, with `section.key=value` overrides. Raises `ConfigError`.

    `settings`: values by dotted key. They take precedence over the file, and the overrides over them.

    Paths relative to the working directory are made absolute, because the trainer runs in another directory.
    """
    from nsa_lab.data.paths import make_paths_absolute

    values = {**(settings or {}), **dict(parse_override(text) for text in overrides)}
    config = RunConfig.from_yaml(find_params_file(name), values)
    return config.model_copy(update={"data": make_paths_absolute(config.data)})


def find_params_file(name: str) -> Path:
    return _find_yaml_file(name, get_root() / "params")


def is_new_name(name: str) -> bool:
    """Return whether `name` can name a new configuration: no path, no preset, and not similar to the name of a preset."""
    known = _list_presets(get_root() / "params")
    return expand_path(name).suffix not in (".yaml", ".yml") and not difflib.get_close_matches(name, known, n=1)


def find_sweep_file(name: str) -> Path:
    return _find_yaml_file(name, get_root() / "params" / "sweeps")


def _find_yaml_file(name: str, folder: Path) -> Path:
    path = expand_path(name)
    if path.suffix in (".yaml", ".yml"):
        # Loading the configuration reports a missing file, with its path.
        return path
    preset = folder / f"{name}.yaml"
    if _is_file(preset):
        return preset
    suggestion = _suggest(name, _list_presets(folder), "give the path of a YAML file")
    given = describe_given(name)
    if given is None:
        if _is_file(Path(f"{path}.yaml")):
            suggestion = f"did you mean {path}.yaml?"
        raise ConfigError(f"{name!r}: no such file in {folder}; {suggestion}")
    if run_dir := _find_run_dir(name, Path(), get_outputs_dir()):
        suggestion = f"give {run_dir / directory.CONFIG}, or continue the run with nsa-lab resume"
    raise ConfigError(f"{name!r}: expected a name in {folder} or the path of a .yaml file, got {given}; {suggestion}")


def _list_presets(folder: Path) -> list[str]:
    return sorted(path.stem for path in folder.glob("*.yaml"))


def expand_path(text: str) -> Path:
    """Return the path in a text, with ~ for the home folder, as shells expand it, but not after `--option=`."""
    return Path(os.path.expanduser(text))


def describe_given(name: str) -> str | None:
    """Return what `name` is, for a message that expected something else: "a folder", "the id of a run"; None if unknown."""
    if not name.strip():
        return "an empty text"
    path = expand_path(name)
    if os.path.isdir(path):
        return "the directory of a run" if _is_file(path / directory.CONFIG) else "a folder"
    if _is_file(path):
        return f"a {path.suffix} file" if path.suffix else "a file without a suffix"
    if name == LATEST or _find_run_dir(name, get_outputs_dir()):
        return "the id of a run"
    return "the name of a preset" if _is_file(get_root() / "params" / f"{name}.yaml") else None


def find_notebook(notebook: str | None, config: RunConfig) -> Path:
    """Return the path of a notebook given by path or name.

    Default: the production notebook if the configuration's name starts with "production", else the smoke notebook.
    """
    default = PRODUCTION_NOTEBOOK if config.name.startswith("production") else SMOKE_NOTEBOOK
    name = default if notebook is None else notebook
    folder = get_root() / "notebooks"
    for path in (expand_path(name), folder / name, folder / f"{name}.ipynb"):
        if path.suffix == ".ipynb" and _is_file(path):
            return path.resolve()
    known = sorted(path.stem for path in folder.glob("*.ipynb"))
    suggestion = _suggest(name, known, f"{folder} has no notebooks: run make notebooks")
    given = describe_given(name)
    problem = f"expected a name in {folder} or the path of an .ipynb file, got {given}" if given else "no such notebook"
    raise ConfigError(f"--notebook {name}: {problem}; {suggestion}")


def list_run_dirs(outputs: Path) -> list[Path]:
    """Return all run directories in the folder, oldest first, also those whose config.yaml is a link to nothing."""
    folders = (path for path in outputs.glob("*") if not path.name.startswith("."))
    return sort_by_creation(path for path in folders if os.path.lexists(path / directory.CONFIG))


def sort_by_creation(run_dirs: Iterable[Path]) -> list[Path]:
    """Return run directories, oldest first; the random digits of an id order only runs of the same time."""
    return sorted(run_dirs, key=lambda path: (directory.get_creation_time(path), path.name))


def list_private_run_dirs(outputs: Path) -> list[Path]:
    """Return the folders with a run id as name that this user may not search, by name."""
    folders = [path for path in outputs.glob("*") if directory.is_run_id(path.name) and path.is_dir()]
    return sorted(path for path in folders if not os.access(path, os.R_OK | os.X_OK))


def list_own_run_dirs(outputs: Path) -> list[Path]:
    """Return the run directories in the folder without the recorded ones, oldest first."""
    return [run_dir for run_dir in list_run_dirs(outputs) if not directory.is_recorded(run_dir)]


def find_run(run: str, outputs: Path) -> Path:
    """Return the run directory for a path, a run id, a unique prefix of one, or `latest`. Raises `RunDirectoryError`.

    `latest` is the newest run of the user, never a recorded run.
    """
    if run.strip() and (run_dir := _find_run_dir(run, Path(), outputs)):
        return run_dir
    run_dirs = list_run_dirs(outputs)
    if run == LATEST:
        if own := list_own_run_dirs(outputs):
            return own[-1]
        recorded = f" or name a recorded one: {_format_names([path.name for path in run_dirs])}" if run_dirs else ""
        raise RunDirectoryError(f"latest: no runs yet in {outputs}; start one: nsa-lab run smoke{recorded}")
    matching = [path for path in run_dirs if run.strip() and path.name.startswith(run)]
    if len(matching) == 1:
        return matching[0]
    if matching:
        raise RunDirectoryError(
            f"{run!r} matches {len(matching)} runs; give one of: {_format_names([path.name for path in matching])}"
        )
    for path in (expand_path(run), outputs / run):
        if os.path.isdir(path) and not os.access(path, os.R_OK | os.X_OK):
            raise RunDirectoryError(f"{path}: permission denied; let its owner open the folder")
        if os.path.lexists(path / directory.CONFIG):
            directory.check_run_dir(path)  # names the file of a run that is no file
    suggestion = _suggest(run, [path.name for path in run_dirs], "no runs yet; start one: nsa-lab run smoke")
    given = describe_given(run)
    if given is None or given == "the id of a run":  # of a run in another folder
        raise RunDirectoryError(f"{run!r}: no such run in {outputs}; {suggestion}")
    if given == "the name of a preset":
        suggestion = f"start a run of it: nsa-lab train {run}"
    elif _is_file(parent := expand_path(run).parent / directory.CONFIG):
        suggestion = f"give its folder, {parent.parent}"
    raise RunDirectoryError(f"{run!r}: expected a run in {outputs} or the path of one, got {given}; {suggestion}")


def find_runs(run: str, outputs: Path) -> list[Path]:
    """Return the run of `find_run` or, if `run` is a pattern (with `*`, `?` or `[`), all runs whose id or path matches."""
    if not set("*?[") & set(run) or _is_file(Path(run) / directory.CONFIG):
        return [find_run(run, outputs)]
    run_dirs = list_run_dirs(outputs)
    paths = [Path(path).resolve() for path in sorted(glob(run)) if _is_file(Path(path) / directory.CONFIG)]
    if matching := [path for path in run_dirs if fnmatch(path.name, run)] or paths:
        return matching
    suggestion = _suggest(run, [path.name for path in run_dirs], "no runs yet; start one: nsa-lab run smoke")
    raise RunDirectoryError(f"{run!r} matches no run in {outputs}; {suggestion}")


def find_model(model: str, outputs: Path) -> Path:
    """Return the run directory of `find_run`, or the folder of a model contained in the package, by name.

    Precedence: path, complete run id, packaged model, prefix of a run id. Raises `RunDirectoryError`.
    """
    if model.strip() and (run_dir := _find_run_dir(model, Path(), outputs, MODELS_DIR)):
        return run_dir
    try:
        return find_run(model, outputs)
    except RunDirectoryError as error:
        raise RunDirectoryError(f"{error}; {describe_models()}") from None


def format_run_argument(run_dir: Path) -> str:
    """Return what a command needs to find the run: its id, and --outputs if it is not in the default folder."""
    folder = run_dir.resolve().parent
    return run_dir.name if folder == get_outputs_dir() else f"{run_dir.name} --outputs {shlex.quote(str(folder))}"


def describe_models() -> str:
    """Return a text with the names of the models contained in the package."""
    known = sorted(path.parent.name for name in (directory.CONFIG, ADAPTER_INFO) for path in MODELS_DIR.glob(f"*/{name}"))
    return f"packaged models: {', '.join(known)}" if known else "this package contains no models"


def describe_runs(outputs: Path) -> str:
    """Return a text with the ids of the newest runs in the folder."""
    known = [path.name for path in list_run_dirs(outputs)]
    return f"runs in {outputs}: {', '.join(known[-6:])}" if known else f"no runs in {outputs}"


def is_packaged_model(run_dir: Path) -> bool:
    """Return True if this folder is a model contained in the package. Its files are read-only."""
    return run_dir.resolve().parent == MODELS_DIR.resolve()


def _find_run_dir(name: str, *folders: Path) -> Path | None:
    """Return the run directory `name` in the first of the folders that has it; None if none has."""
    paths = (folder / expand_path(name) for folder in folders)
    return next((path.resolve() for path in paths if _is_file(path / directory.CONFIG)), None)


def _is_file(path: Path) -> bool:
    """Return `Path.is_file`, but False for texts that cannot be a path: too long, or with a zero byte."""
    return os.path.isfile(path)


def _suggest(name: str, known: list[str], none: str) -> str:
    if not known:
        return none
    nearest = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {nearest[0]}?" if nearest else f"available: {_format_names(known)}"


def _format_names(names: list[str]) -> str:
    """Return the last `MAX_LISTED` names and the number of others."""
    return ", ".join(names[-MAX_LISTED:]) + (f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else "")
