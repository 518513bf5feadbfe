"""Adapter of a converted model: the indexers alone, for shipping them without the weights of the dense model.

adapter.safetensors  weights of the indexers, by their names in the model; an int8 matrix has a scale per row
adapter.json         `AdapterInfo`: the dense model, the settings of the conversion, the dtype and the size of the weights
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from nsa_lab.config import ConfigError, NSAConfig
from nsa_lab.convert.models import ConvertedModel, check_dense_model, convert_model, make_indexers
from nsa_lab.convert.settings import ConversionSettings, read_indexer_options
from nsa_lab.runs.atomic_io import open_regular, write_bytes, write_text
from nsa_lab.runs.finite_weights import describe_nonfinite
from nsa_lab.runs.resolve import ADAPTER_INFO

WEIGHTS, INFO = "adapter.safetensors", ADAPTER_INFO
FORMAT_VERSION = 1
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "int8": torch.int8}
MARKER = ".self_attn.indexer."
# A weight in int8 has a float32 scale per row, stored under its name and this suffix.
SCALE = ".row_scale"
# The weights of an indexer depend on these keys. Others differ between the sources of one model.
_ARCHITECTURE = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
)

Model = TypeVar("Model", bound=PreTrainedModel)


class AdapterInfo(BaseModel):
    """Contents of `adapter.json`."""

    model_config = ConfigDict(extra="forbid")

    version: int = FORMAT_VERSION
    base_model: str
    """Hub id, path or package of the dense model, as in `load_dense`."""
    base_hash: str
    """`compute_base_hash` of its configuration."""
    dtype: str
    n_bytes: int
    """Size of `adapter.safetensors`."""
    sha256: str
    """Of `adapter.safetensors`."""
    settings: dict[str, Any]
    """`ConversionSettings.to_mapping`."""


def compute_base_hash(config: PreTrainedConfig) -> str:
    """Return a hash of the architecture of a dense or converted model: its family, sizes and RoPE."""
    rope = {key: value for key, value in (config.rope_parameters or {}).items() if value is not None}
    values = {name: getattr(config, name) for name in _ARCHITECTURE}
    values |= {"family": config.model_type.removeprefix("nsa_lab_"), "rope": rope}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def save_adapter(model: PreTrainedModel, folder: str | Path, *, base_model: str, dtype: str = "bfloat16") -> AdapterInfo:
    """Write the indexers of a converted model to `folder`, and return what `adapter.json` contains.

    base_model: where the dense model is found; a Hub id, a folder, a GGUF file or the name of a package. dtype: a key of
    `DTYPES`. int8 rounds each row of a matrix to multiples of its largest value divided by 127; vectors are stored in
    bfloat16.
    Raises ConfigError for a model that is not converted and for an unknown dtype.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"dtype = {dtype!r}: expected one of {', '.join(DTYPES)}")
    settings = _get_settings(model)
    tensors: dict[str, Tensor] = {}
    for name, value in _list_indexer_weights(model):
        encoded = _encode(name, value.detach().cpu(), DTYPES[dtype])
        if value.isfinite().all() and not all(tensor.isfinite().all() for tensor in encoded.values()):
            raise ConfigError(f"dtype = {dtype!r}: {name} has values that it cannot hold; use bfloat16, float32 or int8")
        tensors |= encoded
    weights, folder = save(tensors), Path(folder)
    info = AdapterInfo(
        base_model=base_model,
        base_hash=compute_base_hash(model.config),
        dtype=dtype,
        n_bytes=len(weights),
        sha256=hashlib.sha256(weights).hexdigest(),
        settings=settings.to_mapping(),
    )
    folder.mkdir(parents=True, exist_ok=True)
    write_bytes(folder / WEIGHTS, weights)
    write_text(folder / INFO, info.model_dump_json(indent=2) + "\n")
    return info


def load_adapter(model: Model, folder: str | Path, *, backend: str | None = None) -> Model:
    """Convert a dense model in place with the settings and indexers in `folder`, and return it.

    backend: as in `NSATransformer`; None: as stored. Raises ConfigError if the folder is not a complete adapter or belongs
    to another architecture; the model is then unchanged.
    """
    info, folder = read_adapter_info(folder), Path(folder)
    check_dense_model(model)
    base_hash = compute_base_hash(model.config)
    if info.base_hash != base_hash:
        raise ConfigError(
            f"{folder}: expected a model of the architecture of {info.base_model} (hash {info.base_hash}), got another "
            f"(hash {base_hash}); load {info.base_model}"
        )
    weights = _decode(_read_weights(folder, info))
    stored = info.settings
    for name, kind in (("backend", str), ("indexer", dict), ("nsa", dict)):
        if not isinstance(stored.get(name), kind):
            found = f"got a {type(stored[name]).__name__}" if name in stored else "it is missing"
            raise ConfigError(
                f"{folder / INFO}: settings.{name}: expected a {kind.__name__}, {found}; download or save the adapter again"
            )
    options = read_indexer_options(stored)
    settings = ConversionSettings(model.config, NSAConfig(**stored["nsa"]), options, backend or stored["backend"])
    indexers = make_indexers(model, settings)
    own = {
        f"model.layers.{index}{MARKER}{name}": weight
        for index, indexer in indexers.items()
        for name, weight in indexer.named_parameters()
    }
    if own.keys() != weights.keys() or any(own[name].shape != value.shape for name, value in weights.items()):
        raise ConfigError(f"{folder / WEIGHTS}: its weights do not match the settings in {INFO}; download or save it again")
    with torch.no_grad():
        for name, value in weights.items():
            own[name].copy_(value)
    return convert_model(model, settings, indexers)


def read_adapter_info(folder: str | Path) -> AdapterInfo:
    """Return the contents of `adapter.json`. Raises ConfigError if it is missing or invalid."""
    path = Path(folder) / INFO
    try:
        info = AdapterInfo.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ConfigError(
            f"{path}: {error.strerror}; expected the folder of an adapter, with {INFO} and {WEIGHTS}"
        ) from None
    except ValidationError as error:
        problem = error.errors()[0]
        name = ".".join(map(str, problem["loc"])) or INFO
        raise ConfigError(f"{path}: {name}: {problem['msg']}; download or save the adapter again") from None
    if info.version != FORMAT_VERSION:
        raise ConfigError(f"{path}: version = {info.version}: expected {FORMAT_VERSION}; install a newer nsa-lab")
    return info


def _read_weights(folder: Path, info: AdapterInfo) -> dict[str, Tensor]:
    path = folder / WEIGHTS
    try:
        with open_regular(path) as file:
            data = file.read()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; download or save the adapter again") from None
    if hashlib.sha256(data).hexdigest() != info.sha256:
        raise ConfigError(
            f"{path}: expected the {info.n_bytes:,} bytes of {INFO}, got {len(data):,} with another hash; download or save "
            "the adapter again"
        )
    try:
        weights = load(data)
    except SafetensorError as error:
        raise ConfigError(f"{path}: {error}; download or save the adapter again") from None
    for name, weight in weights.items():
        if problem := describe_nonfinite(name, weight):
            raise ConfigError(f"{path}: {problem}; download or save the adapter again")
        if not weight.is_floating_point() and weight.dtype != torch.int8:
            raise ConfigError(
                f"{path}: {name} has dtype {weight.dtype}, expected a floating-point type or int8; download or save the "
                "adapter again"
            )
        scale = weights.get(name + SCALE)
        if weight.dtype == torch.int8 and (scale is None or scale.shape != weight.shape[:-1]):
            raise ConfigError(f"{path}: {name}: expected a scale for each row of int8; download or save the adapter again")
    return weights


def _encode(name: str, value: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the tensors that are stored for a weight, by name."""
    if dtype != torch.int8:
        return {name: value.to(dtype).contiguous()}
    if value.dim() < 2 or not value.isfinite().all():  # loading refuses a weight that is not finite
        return {name: value.bfloat16().contiguous()}
    scale = value.float().abs().amax(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny) / 127
    return {name: (value.float() / scale).round().to(torch.int8).contiguous(), name + SCALE: scale.squeeze(-1).contiguous()}


def _decode(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return weights by name from the tensors that are stored for them."""
    return {
        name: value.float() * tensors[name + SCALE][..., None] if name + SCALE in tensors else value
        for name, value in tensors.items()
        if not name.endswith(SCALE)
    }


def _get_settings(model: Any) -> ConversionSettings:
    if not isinstance(model, ConvertedModel):
        raise ConfigError(f"model: expected a converted model, got a {type(model).__name__}; call nsa_lab.sparsify first")
    return model.base_model.conversion


def _list_indexer_weights(model: PreTrainedModel) -> list[tuple[str, Tensor]]:
    return [(name, value) for name, value in model.named_parameters() if MARKER in f".{name}"]
