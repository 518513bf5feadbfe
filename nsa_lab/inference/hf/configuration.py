"""Configuration of an NSA model in `transformers`, and the files that import this package with `trust_remote_code=True`."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportUntypedBaseClass=false

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from nsa_lab.config import ModelConfig
from nsa_lab.inference.hf.inputs import check_flag
from nsa_lab.runs.atomic_io import write_text

# File in a saved folder from which `trust_remote_code=True` imports the classes of this package.
REMOTE_CODE = "nsa_lab_in_transformers.py"
_AUTO_CLASSES = {"AutoConfig": "NSALabConfig", "AutoModel": "NSALabModel", "AutoModelForCausalLM": "NSALabForCausalLM"}
_TOKENIZER = "NSALabTokenizer"
# Similarity, by difflib, from which a name is a misspelt setting. Names that `transformers` passes are below 0.75.
MISSPELT = 0.75
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

    Attributes such as `hidden_size` and `num_hidden_layers` repeat the architecture.

    `max_position_embeddings`: the longest sequence in training. Longer inputs are accepted; evaluation harnesses cut
    prompts to it. None: unknown. The ids of special tokens equal the tokenizer's. `use_cache`: whether a call of the model
    returns a cache by default; `generate` uses one in any case.

    Raises ConfigError for an invalid architecture, ValueError for arguments that contradict it or belong to it, and for
    misspelt ones.
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
        sizes = _get_sizes(config)
        _check_names(kwargs, sizes)
        self.architecture, self.backend = config.model_dump(), backend
        for name, value in sizes.items():
            setattr(self, name, value)
        if max_position_embeddings is not None:
            if type(max_position_embeddings) is not int or max_position_embeddings < 1:
                raise ValueError(
                    f"NSALabConfig: max_position_embeddings = {max_position_embeddings!r}: expected an integer of at "
                    "least 1, or None if the trained length is unknown"
                )
            self.max_position_embeddings = max_position_embeddings
        self.use_cache = use_cache
        self.bos_token_id, self.eos_token_id, self.pad_token_id = bos_token_id, eos_token_id, pad_token_id
        super().__init__(**{"tie_word_embeddings": False, **kwargs})
        self.check_sizes()

    def check_sizes(self) -> None:
        """Raise ValueError for an attribute that differs from the architecture, which it would not change, and for a
        `use_cache` that is a text.
        """
        check_flag("NSALabConfig: use_cache", self.use_cache)
        for name, value in _get_sizes(ModelConfig(**self.architecture)).items():
            if getattr(self, name) != value:
                raise ValueError(
                    f"NSALabConfig: {name} = {getattr(self, name)!r}: expected {value}, as in the architecture; build "
                    "an NSALabConfig with another architecture="
                )

    def save_pretrained(self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> Any:
        """Save the configuration, and the file with which `trust_remote_code=True` imports nsa_lab."""
        self.auto_map = dict(AUTO_MAP)
        os.makedirs(save_directory, exist_ok=True)
        write_remote_code(save_directory)
        return super().save_pretrained(save_directory, *args, **kwargs)


def _check_names(names: Iterable[str], sizes: Iterable[str]) -> None:
    """Raise ValueError for a setting of the architecture and for a misspelt one. Other names belong to `transformers`."""
    known = [*sizes, *ModelConfig.model_fields, "backend", "max_position_embeddings", "use_cache"]
    for name in names:
        nearest = difflib.get_close_matches(name, known, n=1, cutoff=MISSPELT)
        if not nearest or name in sizes:
            continue
        is_part = nearest[0] in ModelConfig.model_fields and nearest[0] not in sizes
        form = f"architecture={{{nearest[0]!r}: ...}}" if is_part else f"{nearest[0]}="
        reason = "belongs to the architecture; use" if name == nearest[0] else "is no setting; the nearest is"
        raise ValueError(f"NSALabConfig: {name}= {reason} {form}")


def _get_sizes(config: ModelConfig) -> dict[str, int]:
    """Return the attributes under which `transformers` and other packages look for the sizes of a model."""
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_groups,
        "head_dim": config.d_k,
        "intermediate_size": config.hidden_width,
    }
