"""Find out whether a stopped run can resume with a config.yaml that was edited after its last attempt.

The result is the same as for `nsa-lab resume`, which compares the settings of the trajectory with the newest checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nsa_lab.config.errors import shorten
from nsa_lab.runs.atomic_io import read_json
from nsa_lab.runs.checkpoint_files import STATE, get_checkpoint_dir, get_checkpoint_path, list_steps
from nsa_lab.runs.history import History
from nsa_lab.runs.trajectory import list_changed_settings

N_DESCRIBED = 3


@dataclass(frozen=True)
class ConfigEdit:
    """An edit of config.yaml after the last attempt. `is_accepted`: the run can resume with it."""

    is_accepted: bool
    text: str


def find_config_edit(history: History) -> ConfigEdit | None:
    """Return the edit; None without one, for a run that cannot resume, and if no checkpoint has its settings."""
    if history.is_alive or history.is_done or not history.first_events:
        return None
    last = history.first_events[-1]
    config, recorded = history.config_of_attempt(last["attempt"]), last.get("config_hash")
    if recorded is None or (config is not None and config.hash() == recorded):
        return None
    trajectory = _read_trajectory(history)
    if trajectory is None:
        return None
    differences = list_changed_settings(trajectory, history.config)
    attempt = last["attempt"]
    if not differences:
        text = f"config.yaml is not that of attempt {attempt}, but only settings differ that may change"
        return ConfigEdit(True, f"{text}: nsa-lab resume {history.run} trains with them; restore the file if that is wrong")
    described = "; ".join(shorten(text) for text in differences[:N_DESCRIBED])
    more = f"; and {len(differences) - N_DESCRIBED} more" if len(differences) > N_DESCRIBED else ""
    text = f"config.yaml was edited after attempt {attempt}: {described}{more}"
    return ConfigEdit(False, f"{text}; nsa-lab resume refuses this: restore these settings, or create a new run")


def _read_trajectory(history: History) -> dict[str, Any] | None:
    """Return the trajectory in the newest checkpoint; None if there is none, or it cannot be read."""
    folder = get_checkpoint_dir(history.run_dir)
    try:
        steps = list_steps(folder)
    except OSError:  # the check of the checkpoints reports it
        return None
    trajectory = read_json(get_checkpoint_path(folder, steps[-1]) / STATE).get("trajectory") if steps else None
    return trajectory if isinstance(trajectory, dict) else None
