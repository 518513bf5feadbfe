"""Settings of a converted model: what `sparsify` is given, checked against the dense model's configuration.

They are stored in the configuration of the converted model and in an adapter, as a mapping with the keys `nsa`, `backend`
and the options of the indexer.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypedDict

import torch
from transformers import PreTrainedConfig

from nsa_lab.attention import resolve_backend
from nsa_lab.attention.dispatch import BACKENDS, ResolvedBackend
from nsa_lab.config import ConfigError, ModelConfig, NSAConfig

DEFAULT_NSA = NSAConfig(n_sel=40, local_blocks=8)
"""40 blocks of 64 tokens for each query: the first, the 8 latest, and 31 by score."""
DEFAULT_INDEXER = {"indexer_block": 1, "indexer_heads": 2, "indexer_dtype": "fp8", "selection_loss": 0.05}
"""The form that lost least per byte of index keys on SmolLM2 (docs/science/convert.md)."""

SUPPORTED_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
# The frequencies of other kinds change with the length of the text, so stored index keys would become invalid.
SUPPORTED_ROPE = ("default", "linear", "llama3", "yarn")


class IndexerOptions(TypedDict, total=False):
    """Options of the indexer; each is the setting of that name in `ModelConfig`."""

    indexer_block: int
    indexer_width: int
    indexer_heads: int
    indexer_keys: Literal["group", "shared"]
    indexer_order: tuple[Literal["rotate", "pool", "norm"], ...]
    indexer_every: int
    indexer_dtype: Literal["bf16", "fp8", "mxfp4"]
    selection_loss: float
    selection_queries: int


class ConversionSettings:
    """The attention of a converted model. `model` describes it as a `ModelConfig` with the selected branch only."""

    def __init__(
        self, dense: PreTrainedConfig, nsa: NSAConfig, indexer: Mapping[str, Any] | None = None, backend: str = "auto"
    ) -> None:
        if not isinstance(nsa, NSAConfig):
            raise ConfigError(f"config: expected an NSAConfig, got a {type(nsa).__name__}; use nsa_lab.NSAConfig(...)")
        if backend not in BACKENDS:
            raise ConfigError(f"backend = {backend!r}: expected one of {', '.join(BACKENDS)}")
        self.nsa, self.indexer, self.backend = nsa, add_indexer_defaults(dense, nsa, indexer or {}), backend
        self.model = describe_attention(dense, nsa, self.indexer)
        self._resolved: dict[tuple[torch.device, torch.dtype], dict[str, ResolvedBackend]] = {}

    @classmethod
    def from_mapping(cls, dense: PreTrainedConfig, settings: Mapping[str, Any]) -> ConversionSettings:
        """Return the settings that `to_mapping` stored."""
        nsa = NSAConfig(**settings["nsa"])
        return cls(dense, nsa, read_indexer_options(settings), settings.get("backend", "auto"))

    def to_mapping(self) -> dict[str, Any]:
        """Return the settings as a mapping for JSON."""
        indexer = {key: list(value) if isinstance(value, tuple) else value for key, value in self.indexer.items()}
        return {"nsa": self.nsa.model_dump(), "indexer": indexer, "backend": self.backend}

    def resolve_backends(self, device: torch.device, dtype: torch.dtype) -> dict[str, ResolvedBackend]:
        """Return the backend of each part for inputs of this device and dtype, resolved once."""
        if (device, dtype) not in self._resolved:
            self._resolved[device, dtype] = resolve_backend(device, dtype, self.nsa, self.model, self.backend)
        return self._resolved[device, dtype]


def check_dense_config(dense: PreTrainedConfig) -> None:
    """Raise ConfigError, in one line, for a model whose attention is not plain causal attention with RoPE."""
    family = dense.model_type.removeprefix("nsa_lab_")
    if getattr(dense, "kv_lora_rank", None):
        raise ConfigError(
            f"model_type = {family!r}: multi-head latent attention has no keys per head to select blocks of; expected one "
            f"of {', '.join(SUPPORTED_FAMILIES)}"
        )
    if getattr(dense, "attn_logit_softcapping", None):
        raise ConfigError(
            f"attn_logit_softcapping = {dense.attn_logit_softcapping}: attention scores are not capped by NSA; use a model "
            "without it"
        )
    if family == "gpt_oss":
        raise ConfigError(
            f"model_type = {family!r}: learned attention sinks are not supported; expected one of "
            f"{', '.join(SUPPORTED_FAMILIES)}"
        )
    if family not in SUPPORTED_FAMILIES:
        raise ConfigError(f"model_type = {family!r}: expected one of {', '.join(SUPPORTED_FAMILIES)}")
    layer_types = getattr(dense, "layer_types", None)
    has_window = "sliding_attention" in layer_types if layer_types else True
    if getattr(dense, "sliding_window", None) is not None and has_window:
        raise ConfigError(
            f"sliding_window = {dense.sliding_window}: layers that attend to a window have no blocks to select; use a "
            "model without sliding-window layers, or load it with sliding_window=None"
        )
    if getattr(dense, "attention_dropout", 0.0):
        raise ConfigError(f"attention_dropout = {dense.attention_dropout}: not supported; set it to 0")
    if not getattr(dense, "is_causal", True):
        raise ConfigError("is_causal = False: block selection is causal; use a causal language model")
    rope_type = (getattr(dense, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope_type not in SUPPORTED_ROPE:
        raise ConfigError(
            f"rope_type = {rope_type!r}: its frequencies change with the length, so cached index keys would become "
            f"invalid; expected one of {', '.join(SUPPORTED_ROPE)}"
        )


def read_indexer_options(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of the indexer in stored settings.

    An option that they do not have is the default of `ModelConfig`, as it was when they were stored, and not that of
    `sparsify`, which has changed since.
    """
    return {key: ModelConfig.model_fields[key].default for key in IndexerOptions.__annotations__} | settings["indexer"]


def add_indexer_defaults(dense: PreTrainedConfig, nsa: NSAConfig, indexer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of the indexer with `DEFAULT_INDEXER`; mean keys need no indexer.

    A group with one query head has one index head, since a second would start as its copy and learn the same.
    """
    if nsa.scores == "mean_key":
        return dict(indexer)
    has_one_head = dense.num_attention_heads == dense.num_key_value_heads
    return {**DEFAULT_INDEXER, **({"indexer_heads": 1} if has_one_head else {}), **indexer}


def describe_attention(dense: PreTrainedConfig, nsa: NSAConfig, indexer: Mapping[str, Any], **others: Any) -> ModelConfig:
    """Return the attention of a converted model as a `ModelConfig`, which checks the options.

    others: further settings of the `ModelConfig`. Raises ConfigError for a model that is not supported.
    """
    check_dense_config(dense)
    return ModelConfig(
        dim=dense.hidden_size,
        n_layers=dense.num_hidden_layers,
        n_heads=dense.num_attention_heads,
        n_kv_groups=dense.num_key_value_heads,
        d_k=dense.head_dim,
        d_v=dense.head_dim,
        vocab_size=dense.vocab_size,
        branches=("sel",),
        norm_eps=float(f"{dense.rms_norm_eps:.6g}"),  # GGUF files store it as float32
        nsa=nsa,
        **indexer,
        **others,
    )
