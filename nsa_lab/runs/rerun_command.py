"""The command that trains a run anew with a few settings changed, and all others as that run was started with them."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

from nsa_lab.config import ConfigError, RunConfig, parse_override
from nsa_lab.runs import directory, resolve
from nsa_lab.runs.summary import diff_settings


def build_rerun_command(run_dir: Path, config: RunConfig, changed: RunConfig) -> str:
    """`nsa-lab run NAME -p KEY=VALUE ...` for `changed`, which the run of `config` in `run_dir` is to be trained as; what
    changes comes first.

    NAME is the run's preset where that and the options give exactly `changed`; else, as where the preset is another one by
    now, it is the file that the run itself was made with.
    """
    name, base = config.name, config
    first = [key for key, *_ in diff_settings(config, changed)]
    try:
        base = resolve.load_config(name, [])
        found = resolve.load_config(name, _list_overrides(base, changed, first)).hash() == changed.hash()
    except ConfigError:
        found = False
    if not found:
        name, base = f"{run_dir.parent.name}/{run_dir.name}/{directory.CONFIG}", config
    options = [f"-p {shlex.quote(option)}" for option in _list_overrides(base, changed, first)]
    return " ".join(["nsa-lab run", shlex.quote(name), *options])


def _list_overrides(base: RunConfig, changed: RunConfig, first: list[str]) -> list[str]:
    """What `-p` must be given for `changed` to come out of `base`; the keys of `first` in any case."""
    read = changed.settings()
    keys = dict.fromkeys([*first, *(key for key, *_ in diff_settings(base, changed))])
    return [_format_override(key, read[key]) for key in keys if key in read]


def _format_override(key: str, value: Any) -> str:
    """`train.lr=0.001`; in quotes only a text that would be read as something else without them."""
    plain = f"{key}={value}"
    try:
        bare = isinstance(value, str) and parse_override(plain)[1] == value
    except ConfigError:
        bare = False
    return plain if bare else f"{key}={json.dumps(value)}"
