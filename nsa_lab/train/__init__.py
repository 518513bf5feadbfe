"""The trainer. `run(run_dir)` trains in this process; `nsa_lab.launch` does it in a detached one."""

from nsa_lab.extras import require

require("safetensors", "yaml", "filelock")

from nsa_lab.train.loop import run

__all__ = ["run"]
