"""What a person calls a run, a model, a params file or a notebook, and where it is. Errors say what there is instead."""

from __future__ import annotations

import difflib
import os
from fnmatch import fnmatch
from glob import glob
from pathlib import Path

from nsa_lab.config import ConfigError, RunConfig, find_project_root, parse_override
from nsa_lab.runs import directory
from nsa_lab.runs.directory import RunDirectoryError

LATEST = "latest"
MAX_LISTED = 6  # names that a refusal tells of, at most
SMOKE_NOTEBOOK, PRODUCTION_NOTEBOOK = "03_smoke_training", "04_production_run"
# Models that ship with the package, each laid out as a run with one checkpoint.
MODELS_DIR = Path(__file__).parents[1] / "models"


def get_root() -> Path:
    """The project's folder, or the working directory of an installed package that is used elsewhere."""
    return find_project_root() or Path.cwd()


def get_outputs_dir(outputs: Path | None = None) -> Path:
    """Where run directories are kept: `outputs`, by default the project's own folder of that name."""
    return outputs.resolve() if outputs else get_root() / "outputs"


def load_config(name: str, overrides: list[str]) -> RunConfig:
    """`params/<name>.yaml`, or the file of that path, with `section.key=value` overrides. Raises `ConfigError`.

    A path that means something in the working directory alone is made absolute, since the run is trained elsewhere.
    """
    from nsa_lab.data.paths import make_paths_absolute

    config = RunConfig.from_yaml(find_params_file(name), dict(parse_override(text) for text in overrides))
    return config.model_copy(update={"data": make_paths_absolute(config.data)})


def find_params_file(name: str) -> Path:
    return _find_yaml_file(name, get_root() / "params")


def find_sweep_file(name: str) -> Path:
    return _find_yaml_file(name, get_root() / "params" / "sweeps")


def _find_yaml_file(name: str, folder: Path) -> Path:
    given = Path(name)
    if given.suffix in (".yaml", ".yml"):
        # A missing file is refused by the configuration, with its path.
        return given
    if given.suffix and _is_file(given):
        raise ConfigError(f"{name!r}: expected a .yaml file, found one of {given.suffix}")
    found = folder / f"{name}.yaml"
    if _is_file(found):
        return found
    known = sorted(path.stem for path in folder.glob("*.yaml"))
    instead = _suggest(name, known, "give the path of a YAML file")
    raise ConfigError(f"{name!r}: no such file in {folder}; {instead}")


def find_notebook(notebook: str | None, config: RunConfig) -> Path:
    """The notebook by path or by name; by default the production one for a configuration of that name, else smoke."""
    default = PRODUCTION_NOTEBOOK if config.name.startswith("production") else SMOKE_NOTEBOOK
    name = notebook or default
    folder = get_root() / "notebooks"
    for path in (Path(name), folder / name, folder / f"{name}.ipynb"):
        if path.suffix == ".ipynb" and _is_file(path):
            return path.resolve()
    known = sorted(path.stem for path in folder.glob("*.ipynb"))
    instead = _suggest(name, known, f"{folder} holds none: run make notebooks")
    raise ConfigError(f"--notebook {name}: no such notebook; {instead}")


def list_run_dirs(outputs: Path) -> list[Path]:
    """Every run directory in the folder, oldest first."""
    found = [path.parent for path in outputs.glob(f"*/{directory.CONFIG}") if not path.parent.name.startswith(".")]
    return sorted(found, key=lambda path: (directory.get_creation_time(path), path.name))


def find_run(run: str, outputs: Path) -> Path:
    """A run directory by path, by run id, by the beginning of one run's id, or `latest`. Raises `RunDirectoryError`."""
    if found := _find_run_dir(run, Path(), outputs):
        return found
    there = list_run_dirs(outputs)
    if run == LATEST and there:
        return there[-1]
    matching = [path for path in there if path.name.startswith(run)]
    if len(matching) == 1:
        return matching[0]
    if matching:
        raise RunDirectoryError(
            f"{run!r} begins the names of {len(matching)} runs; say which: {_format_names([path.name for path in matching])}"
        )
    instead = _suggest(run, [path.name for path in there], "no run was made yet: nsa-lab run smoke")
    raise RunDirectoryError(f"{run!r}: no such run in {outputs}; {instead}")


def find_runs(run: str, outputs: Path) -> list[Path]:
    """As `find_run`, and where `run` is a pattern (with `*`, `?` or `[`) all that it names, as ids or as paths."""
    if not set("*?[") & set(run) or _is_file(Path(run) / directory.CONFIG):
        return [find_run(run, outputs)]
    there = list_run_dirs(outputs)
    paths = [Path(path).resolve() for path in sorted(glob(run)) if _is_file(Path(path) / directory.CONFIG)]
    if found := [path for path in there if fnmatch(path.name, run)] or paths:
        return found
    instead = _suggest(run, [path.name for path in there], "no run was made yet: nsa-lab run smoke")
    raise RunDirectoryError(f"{run!r}: it names no run in {outputs}; {instead}")


def find_model(model: str, outputs: Path) -> Path:
    """A run as `find_run` has it, or the folder of a model that ships with the package, by its name.

    A path and a run's whole id come before the models, the beginning of an id after them. Raises `RunDirectoryError`.
    """
    if found := _find_run_dir(model, Path(), outputs, MODELS_DIR):
        return found
    try:
        return find_run(model, outputs)
    except RunDirectoryError as error:
        raise RunDirectoryError(f"{error}; {describe_models()}") from None


def describe_models() -> str:
    """In words, the names of the models that ship with the package."""
    known = sorted(path.parent.name for path in MODELS_DIR.glob(f"*/{directory.CONFIG}"))
    return f"models that ship: {', '.join(known)}" if known else "no model ships with this package"


def describe_runs(outputs: Path) -> str:
    """In words, the ids of the newest runs in the folder."""
    known = [path.name for path in list_run_dirs(outputs)]
    return f"runs in {outputs}: {', '.join(known[-6:])}" if known else f"no run is in {outputs}"


def is_packaged_model(run_dir: Path) -> bool:
    """Whether this folder is a model of the package itself, whose files nobody changes."""
    return run_dir.resolve().parent == MODELS_DIR.resolve()


def _find_run_dir(name: str, *folders: Path) -> Path | None:
    """What lies under this name, or path, in the first of the folders that has it as a run directory."""
    return next(((path / name).resolve() for path in folders if _is_file(path / name / directory.CONFIG)), None)


def _is_file(path: Path) -> bool:
    """As `Path.is_file`, and False for what can be no path: longer than the file system takes, or with a zero byte."""
    return os.path.isfile(path)


def _suggest(name: str, known: list[str], none: str) -> str:
    if not known:
        return none
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]}?" if near else f"there is {_format_names(known)}"


def _format_names(names: list[str]) -> str:
    """The last of these names, and how many more there are."""
    return ", ".join(names[-MAX_LISTED:]) + (f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else "")
