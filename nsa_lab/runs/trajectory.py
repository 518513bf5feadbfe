"""Settings that determine the trajectory of training, as every checkpoint records them in state.json.

The trainer, which resumes from a checkpoint, and every reader of its weights use the same comparison.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nsa_lab.config import RunConfig
from nsa_lab.config.run_config import DEFAULTS_OF_ADDED_KEYS

# Settings that a resumed run may change: they affect monitoring, checkpoints and paths, but not the trajectory.
CHANGEABLE_TRAIN_KEYS = frozenset(
    {
        "micro_batch_size",
        "log_every",
        "stats_every",
        "eval_every",
        "eval_batches",
        "save_every",
        "keep_last",
        "keep_every",
        "spike_sigma",
        "min_tokens_per_s",
        "stall_action",
    }
)
CHANGEABLE_DATA_KEYS = frozenset({"path", "timeout_s"})


def get_trajectory_settings(config: RunConfig) -> dict[str, Any]:
    """Return the settings, by dotted key, that determine the trajectory of training."""
    sections = config.to_dict()
    # Within a stage, too, keys that do not affect the trajectory may change (micro_batch_size).
    stages = [
        {key: value for key, value in stage.items() if key not in CHANGEABLE_TRAIN_KEYS}
        for stage in sections["train"].get("stages", [])
    ]
    if stages:
        sections["train"]["stages"] = stages
    selected = {
        "model": sections["model"],
        "nsa": sections["nsa"],
        "runtime": {"precision": sections["runtime"]["precision"]},
        "train": {key: value for key, value in sections["train"].items() if key not in CHANGEABLE_TRAIN_KEYS},
        "data": {key: value for key, value in sections["data"].items() if key not in CHANGEABLE_DATA_KEYS},
    }
    return {f"{section}.{key}": value for section, values in selected.items() for key, value in values.items()}


def list_changed_settings(recorded: Mapping[str, Any], config: RunConfig) -> list[str]:
    """Return a text for each setting of `config` that differs from the `recorded` trajectory of a checkpoint."""
    # A key that was not recorded has the value that it had before the key existed.
    defaults = {
        f"{section}.{key}": value for section, keys in DEFAULTS_OF_ADDED_KEYS.items() for key, value in keys.items()
    }
    current, recorded = defaults | get_trajectory_settings(config), defaults | dict(recorded)
    return [
        f"{key}: {recorded.get(key)!r} in the checkpoint, {current.get(key)!r} now"
        for key in sorted(current | recorded)
        if recorded.get(key) != current.get(key)
    ]
