"""What a run's record is judged by: settings that may change between its attempts, told by the first event of each."""

from __future__ import annotations

from typing import Any

from nsa_lab.config import ConfigError, RunConfig, apply_overrides

# How often things are written, and the rules that may halt the run.
MONITOR_SETTINGS = (
    *("train.log_every", "train.stats_every", "train.eval_every", "train.save_every"),
    *("train.spike_sigma", "train.min_tokens_per_s", "train.stall_action"),
    "runtime.heartbeat_s",
)


def get_monitor_settings(config: RunConfig) -> dict[str, Any]:
    """Dotted key -> value."""
    return {key: getattr(getattr(config, section), name) for key in MONITOR_SETTINGS for section, name in [key.split(".")]}


def apply_monitor_settings(config: RunConfig, settings: Any) -> RunConfig | None:
    """`config` with what `told` gave then; None if `settings`, read from a file, are not that."""
    if not isinstance(settings, dict):
        return None
    try:
        return RunConfig.from_dict(
            apply_overrides(config.to_dict(), {k: v for k, v in settings.items() if k in MONITOR_SETTINGS})
        )
    except ConfigError:
        return None
