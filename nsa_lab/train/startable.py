"""Whether a run could start here: what would refuse it, before anything is written."""

from __future__ import annotations

import torch

from nsa_lab.attention import resolve_backend
from nsa_lab.config import RunConfig
from nsa_lab.data import check
from nsa_lab.runs.ranks import check_ranks
from nsa_lab.train.distributed import World
from nsa_lab.train.parts import choose_device


def check_startable(config: RunConfig, ranks: int = 1) -> None:
    """Raise what is wrong with the ranks, the data, the device, the model's size or the backend."""
    check_ranks(config, ranks)
    check(config.data, config.model.vocab_size)
    dtype = torch.bfloat16 if config.runtime.precision == "bf16" else torch.float32
    resolve_backend(choose_device(config, World(size=ranks)), dtype, config.nsa, config.model, config.runtime.backend)
