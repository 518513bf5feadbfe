"""Configurations with several stages."""

from __future__ import annotations

from typing import Any

from nsa_lab.config import RunConfig, StageConfig


def make_staged_config(config: RunConfig, stages: list[dict[str, Any]], **train: Any) -> RunConfig:
    """Return `config` with `stages` instead of its single stage, and with other settings of `train`."""
    sections = config.to_dict()
    retained = {key: value for key, value in sections["train"].items() if key not in StageConfig.model_fields}
    return RunConfig.from_dict({**sections, "train": {**retained, "stages": stages, **train}})
