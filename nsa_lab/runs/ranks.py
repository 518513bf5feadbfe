"""How many ranks a run can be trained by on this host: asked once, by whoever is about to start them."""

from __future__ import annotations

from nsa_lab.config import ConfigError, RunConfig


def check_ranks(config: RunConfig, ranks: int) -> None:
    """Raises `ConfigError` where so many ranks cannot share every step evenly, or would not have a GPU each."""
    config.train.check_ranks(ranks)
    if ranks == 1 or config.runtime.device == "cpu":
        return
    # Only several ranks have to be counted against GPUs: whoever starts one, or reads a run, never waits for torch.
    import torch

    gpus = torch.cuda.device_count()
    # Without any, ranks of `auto` share the CPU, and a device that was asked for by name is refused by that name.
    if 0 < gpus < ranks:
        raise ConfigError(
            f"{ranks} ranks want a GPU each, and torch sees {gpus} here; use at most {gpus}, or runtime.device: cpu. "
            "On several hosts, start them with torchrun"
        )
