"""Configuration of a run: typed, immutable and validated, read from and written to YAML, with a hash.

Invariants
* Five sections, `model`, `nsa`, `runtime`, `train`, `data`, with the key names that NSA configurations commonly use.
* An unknown key, a wrong type or an impossible combination raises `ConfigError` with the key, the value and the remedy.
* No environment variable is read, and a configuration does not change after construction.
* A step is an optimizer step; its batch has `train.batch_size * train.accumulate_grad_batches` sequences.
* A run is a sequence of stages (`TrainConfig.plan`). Without `train.stages` it has one stage, from the keys of `train`.
* Keys that a run does not use are not written, so adding a new key does not change other configurations or their hashes.
"""

from nsa_lab.config.base import MAX_COUNT, MAX_LAYERS, MAX_SIZE
from nsa_lab.config.data_config import DataConfig, RecallConfig
from nsa_lab.config.errors import ConfigError, UsageError, list_keys
from nsa_lab.config.model_config import BYTE_VOCAB_SIZE, ModelConfig
from nsa_lab.config.nsa_config import BRANCHES, NSAConfig
from nsa_lab.config.project import find_project_root
from nsa_lab.config.rope_scaling import RopeScaling
from nsa_lab.config.run_config import RunConfig, apply_overrides, parse_override
from nsa_lab.config.sweep_config import SweepConfig, SweepRun
from nsa_lab.config.train_config import Backend, RuntimeConfig, StageConfig, TrainConfig, compute_context_size

__all__ = [
    "BRANCHES",
    "BYTE_VOCAB_SIZE",
    "MAX_COUNT",
    "MAX_LAYERS",
    "MAX_SIZE",
    "Backend",
    "ConfigError",
    "DataConfig",
    "ModelConfig",
    "NSAConfig",
    "RecallConfig",
    "RopeScaling",
    "RunConfig",
    "RuntimeConfig",
    "StageConfig",
    "SweepConfig",
    "SweepRun",
    "TrainConfig",
    "UsageError",
    "apply_overrides",
    "compute_context_size",
    "find_project_root",
    "list_keys",
    "parse_override",
]
