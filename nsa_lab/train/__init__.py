"""Training. `run(run_dir)` trains in this process; `nsa_lab.runs.lifecycle` starts a detached process.

`run` is imported lazily: the supervisor of several ranks does not need torch, and a rank must be bound to its supervisor
before it spends seconds on importing torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nsa_lab.config.optional_deps import require

require("safetensors", "yaml", "filelock")

if TYPE_CHECKING:
    from nsa_lab.train.attempt import run

__all__ = ["run"]


def __getattr__(name: str) -> Any:
    if name != "run":
        raise AttributeError(f"module 'nsa_lab.train' has no attribute {name!r}; did you mean run?")
    from nsa_lab.train.attempt import run

    return run
