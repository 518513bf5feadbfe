"""The trainer. `run(run_dir)` trains in this process; `nsa_lab.runs.launch` does it in a detached one."""

from nsa_lab.extras import require

require("safetensors", "yaml", "filelock")

from nsa_lab.train.attempt import run

__all__ = ["run"]
