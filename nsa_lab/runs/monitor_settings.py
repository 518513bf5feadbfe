"""Settings that health checks need to judge a record. They may change when a run is resumed.

The first event of each attempt records them.
"""

from __future__ import annotations

from typing import Any

from nsa_lab.config import ConfigError, RunConfig, apply_overrides

# Intervals of logging, evaluation and saving, and the rules that may halt the run.
MONITOR_SETTINGS = (
    *("train.log_every", "train.stats_every", "train.eval_every", "train.save_every"),
    *("train.spike_sigma", "train.min_tokens_per_s", "train.stall_action"),
    "runtime.heartbeat_s",
)


def get_monitor_settings(config: RunConfig) -> dict[str, Any]:
    """Return the monitor settings of a configuration, dotted key -> value."""
    return {key: getattr(getattr(config, section), name) for key in MONITOR_SETTINGS for section, name in [key.split(".")]}


def apply_monitor_settings(config: RunConfig, settings: Any) -> RunConfig | None:
    """Return `config` with the recorded `settings` of `get_monitor_settings`; None if `settings` are invalid.

    Unknown keys are ignored, because a newer version may record more settings.
    """
    if not isinstance(settings, dict):
        return None
    try:
        return RunConfig.from_dict(
            apply_overrides(config.to_dict(), {k: v for k, v in settings.items() if k in MONITOR_SETTINGS})
        )
    except ConfigError:
        return None
