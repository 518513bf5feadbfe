"""Optional dependencies: which extra of nsa-lab installs a package, and an error with the command if it is missing.

The core (attention, model and configuration) needs only torch, numpy and pydantic.
"""

from __future__ import annotations

import importlib.util
import sys

from nsa_lab.config.errors import UsageError

EXTRA_BY_MODULE = {
    "filelock": "train",
    "rich": "train",
    "safetensors": "train",
    "tensorboard": "train",
    "typer": "train",
    "yaml": "train",
    "datasets": "data",
    "huggingface_hub": "data",
    "pyarrow": "data",
    "tokenizers": "data",
    "transformers": "hf",
    "accelerate": "convert",
    "gguf": "convert",
    "IPython": "notebooks",
    "ipywidgets": "notebooks",
    "jinja2": "notebooks",
    "latex2mathml": "notebooks",
    "matplotlib": "notebooks",
    "nbclient": "notebooks",
    "nbconvert": "notebooks",
    "nbformat": "notebooks",
    "nh3": "notebooks",
    "papermill": "notebooks",
    "pygments": "notebooks",
}


class MissingPackage(UsageError, ModuleNotFoundError):
    """An optional package is not installed. The message has the pip command for the extra that installs it."""


def require(*modules: str) -> None:
    """Raise `MissingPackage` for the first of `modules`, keys of `EXTRA_BY_MODULE`, that is not installed. Import none."""
    for module in modules:
        if not _is_installed(module):
            raise MissingPackage(
                f"{module} is not installed; run: pip install 'nsa-lab[{EXTRA_BY_MODULE[module]}]'", name=module
            )


def _is_installed(module: str) -> bool:
    return sys.modules.get(module) is not None or importlib.util.find_spec(module) is not None
