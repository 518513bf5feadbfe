"""Build the command that trains a run again with some settings changed and all other settings equal."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

from nsa_lab.config import ConfigError, RunConfig, parse_override
from nsa_lab.runs import directory, resolve
from nsa_lab.runs.summary import diff_settings


def build_rerun_command(run_dir: Path, config: RunConfig, new_config: RunConfig) -> str:
    """Return `nsa-lab run NAME -p KEY=VALUE ...`, which trains `new_config`.

    `config` is the configuration of the run in `run_dir`. Settings that differ between `config` and `new_config` come
    first. NAME is the run's preset if the preset with these options gives exactly `new_config`. Otherwise, for example if
    the preset has changed since, NAME is the configuration file in `run_dir`.
    """
    name, base = config.name, config
    changed_keys = [key for key, *_ in diff_settings(config, new_config)]
    try:
        base = resolve.load_config(name, [])
        is_exact = resolve.load_config(name, _list_overrides(base, new_config, changed_keys)).hash() == new_config.hash()
    except ConfigError:
        is_exact = False
    if not is_exact:
        name, base = f"{run_dir.parent.name}/{run_dir.name}/{directory.CONFIG}", config
    options = [f"-p {shlex.quote(override)}" for override in _list_overrides(base, new_config, changed_keys)]
    return " ".join(["nsa-lab run", shlex.quote(name), *options])


def _list_overrides(base: RunConfig, new_config: RunConfig, changed_keys: list[str]) -> list[str]:
    """Return the `-p` overrides that turn `base` into `new_config`.

    They include `changed_keys` even if `base` has the new value already, and omit keys that `new_config` does not read.
    """
    new_settings = new_config.settings()
    keys = dict.fromkeys([*changed_keys, *(key for key, *_ in diff_settings(base, new_config))])
    return [_format_override(key, new_settings[key]) for key in keys if key in new_settings]


def _format_override(key: str, value: Any) -> str:
    """Return `key=value`, for example `train.lr=0.001`. Quote a string only if YAML would parse it as another value."""
    unquoted = f"{key}={value}"
    try:
        is_plain_string = isinstance(value, str) and parse_override(unquoted)[1] == value
    except ConfigError:
        is_plain_string = False
    return unquoted if is_plain_string else f"{key}={json.dumps(value)}"
