"""The configuration of a run: typed, frozen, validated, YAML in and out, hashed.

Invariants
* Five sections, `model`, `nsa`, `runtime`, `train`, `data`, with the key names of the NSA community's YAML files.
* An unknown key, a wrong type or an impossible combination raises `ConfigError`: what was expected, what came, what to do.
* Nothing reads the environment, and nothing changes after construction.
* A step is an optimiser step; a batch is `train.batch_size * train.accumulate_grad_batches` sequences.
* A run is a sequence of stages (`TrainConfig.plan`); without `train.stages` it is one, made of the section's own keys.
* A key that the run does not read is not written, so that a new key changes nothing about the runs that do not use it.
"""

from nsa_lab.config.base import MAX_COUNT, MAX_SIZE
from nsa_lab.config.data_config import DataConfig, RecallConfig
from nsa_lab.config.errors import ConfigError, UsageError, list_keys
from nsa_lab.config.model_config import BRANCHES, BYTE_VOCAB_SIZE, ModelConfig, NSAConfig
from nsa_lab.config.project import find_project_root
from nsa_lab.config.run_config import RunConfig, apply_overrides, parse_override
from nsa_lab.config.sweep_config import SweepConfig, SweepRun
from nsa_lab.config.train_config import Backend, RuntimeConfig, StageConfig, TrainConfig, divide_among_ranks

__all__ = [
    "BRANCHES",
    "BYTE_VOCAB_SIZE",
    "MAX_COUNT",
    "MAX_SIZE",
    "Backend",
    "ConfigError",
    "DataConfig",
    "ModelConfig",
    "NSAConfig",
    "RecallConfig",
    "RunConfig",
    "RuntimeConfig",
    "StageConfig",
    "SweepConfig",
    "SweepRun",
    "TrainConfig",
    "UsageError",
    "apply_overrides",
    "divide_among_ranks",
    "find_project_root",
    "list_keys",
    "parse_override",
]
