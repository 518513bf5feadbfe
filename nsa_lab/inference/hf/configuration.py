"""Configuration of an NSA model in `transformers`, and the files that import this package with `trust_remote_code=True`."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportUntypedBaseClass=false

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from nsa_lab.config import ModelConfig
from nsa_lab.runs.atomic_io import write_text

# File in a saved folder from which `trust_remote_code=True` imports the classes of this package.
REMOTE_CODE = "nsa_lab_in_transformers.py"
_AUTO_CLASSES = {"AutoConfig": "NSALabConfig", "AutoModel": "NSALabModel", "AutoModelForCausalLM": "NSALabForCausalLM"}
_TOKENIZER = "NSALabTokenizer"
AUTO_MAP = {auto: f"{REMOTE_CODE.removesuffix('.py')}.{name}" for auto, name in _AUTO_CLASSES.items()}
TOKENIZER_AUTO_MAP = {"AutoTokenizer": [f"{REMOTE_CODE.removesuffix('.py')}.{_TOKENIZER}", None]}


def write_remote_code(folder: str | os.PathLike[str]) -> None:
    """Write the file that the `auto_map` of a saved folder names. It imports the installed nsa_lab."""
    names = [*_AUTO_CLASSES.values(), _TOKENIZER]
    write_text(Path(folder) / REMOTE_CODE, f"from nsa_lab.inference.hf import {', '.join(names)}\n\n__all__ = {names}\n")


class SavedWithImport:
    """Base of classes that are saved with `REMOTE_CODE`, not with a copy of the file that defines them."""

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "") -> None:
        """Do nothing. `transformers` calls it after loading with `trust_remote_code=True`, and then copies source files."""


class NSALabConfig(SavedWithImport, PreTrainedConfig):
    """Configuration. `architecture`: a `ModelConfig` as a mapping, including `nsa`; `backend`: as in `NSATransformer`.

    `max_position_embeddings`: the longest sequence in training. Longer inputs are accepted; evaluation harnesses cut
    prompts to it. None: unknown. The ids of special tokens equal the tokenizer's. `use_cache`: whether a call of the model
    returns a cache by default; `generate` uses one in any case.
    """

    model_type = "nsa_lab"
    keys_to_ignore_at_inference = ["past_key_values", "cache"]  # noqa: RUF012 - as transformers declares it

    def __init__(
        self,
        architecture: Mapping[str, Any] | None = None,
        backend: str = "auto",
        max_position_embeddings: int | None = None,
        bos_token_id: int | None = None,
        eos_token_id: int | None = None,
        pad_token_id: int | None = None,
        use_cache: bool = False,
        **kwargs: Any,
    ) -> None:
        config = ModelConfig(**(architecture or {}))
        self.architecture, self.backend = config.model_dump(), backend
        self.vocab_size, self.hidden_size = config.vocab_size, config.dim
        self.num_hidden_layers, self.num_attention_heads = config.n_layers, config.n_heads
        self.num_key_value_heads, self.head_dim = config.n_kv_groups, config.d_k
        self.intermediate_size = config.hidden_width
        if max_position_embeddings is not None:
            self.max_position_embeddings = max_position_embeddings
        self.use_cache = use_cache
        self.bos_token_id, self.eos_token_id, self.pad_token_id = bos_token_id, eos_token_id, pad_token_id
        super().__init__(**{"tie_word_embeddings": False, **kwargs})

    def save_pretrained(self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> Any:
        """Save the configuration, and the file with which `trust_remote_code=True` imports nsa_lab."""
        self.auto_map = dict(AUTO_MAP)
        os.makedirs(save_directory, exist_ok=True)
        write_remote_code(save_directory)
        return super().save_pretrained(save_directory, *args, **kwargs)
