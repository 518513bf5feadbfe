"""Whether a run could start here: what would refuse it, before anything is written."""

from __future__ import annotations

import torch

from nsa_lab.attention import resolve_backend
from nsa_lab.config import RunConfig
from nsa_lab.data import check
from nsa_lab.runs.lifecycle import check_ranks
from nsa_lab.train.build import select_device
from nsa_lab.train.distributed import World


def check_startable(config: RunConfig, n_ranks: int = 1) -> None:
    """Raise what is wrong with the ranks, the data, the device, the model's size or the backend."""
    check_ranks(config, n_ranks)
    check(config.data, config.model.vocab_size)
    dtype = torch.bfloat16 if config.runtime.precision == "bf16" else torch.float32
    resolve_backend(select_device(config, World(size=n_ranks)), dtype, config.nsa, config.model, config.runtime.backend)
