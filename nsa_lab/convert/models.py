"""Converted models: `sparsify`, and a class for each family, which loads a converted model that was saved as a whole."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportUntypedBaseClass=false
# pyright: reportIncompatibleMethodOverride=false, reportIncompatibleVariableOverride=false

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar, Unpack, cast

from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from nsa_lab.config import ConfigError, NSAConfig
from nsa_lab.convert.cache import SparseCache
from nsa_lab.convert.forward_pass import SPARSE
from nsa_lab.convert.hooks import CACHE_NAMES, add_hooks, is_converted
from nsa_lab.convert.indexer import ConvertedIndexer, copy_first_heads, make_indexer
from nsa_lab.convert.settings import DEFAULT_NSA, ConversionSettings, IndexerOptions, check_dense_config
from nsa_lab.inference.hf.cache import PassesCacheToPeft, check_cache_implementation
from nsa_lab.inference.hf.configuration import SavedWithImport
from nsa_lab.inference.hf.modeling import CACHE_ARGUMENT, SavedModel, register_causal_lm
from nsa_lab.runs.atomic_io import write_text

# File in a saved folder from which `trust_remote_code=True` imports the classes of this package.
REMOTE_CODE = "nsa_lab_converted.py"

Model = TypeVar("Model", bound=PreTrainedModel)


def sparsify(
    model: Model, config: NSAConfig = DEFAULT_NSA, *, backend: str = "auto", **indexer: Unpack[IndexerOptions]
) -> Model:
    """Replace the attention of a `transformers` model by attention to selected blocks, in place, and return the model.

    All weights keep their values and names. The first `config.sink_blocks`, the latest `config.local_blocks` and, up to
    `config.n_sel`, the blocks with the highest scores are attended to in one softmax. If a text has at most n_sel blocks,
    the logits equal the dense model's.

    model: a causal language model of the families Llama, Mistral, Qwen2 or Qwen3, such as SmolLM2.
    config: block length and numbers of blocks. `scores`: "indexer" (also None) or "mean_key", which adds no weights.
    backend: as in `NSATransformer`.
    indexer: options of `ModelConfig` that start with `indexer_`, and `selection_loss`, the weight of the loss that trains
        the indexer. Default: two queries per group and one key per token and group in fp8. The indexer starts with the
        weights of each group's first query heads and of its keys.

    In training mode the output has `aux_loss`, the sum of the layers' selection losses, which is added to the loss of
    `labels` with its weight. `model.set_attn_implementation("sdpa")` makes the model dense again, and "nsa_lab" sparse.

    Raises ConfigError for a model that is not supported and for options that do not fit it; the model is then unchanged.
    """
    check_dense_model(model)
    settings = ConversionSettings(model.config, config, indexer, backend)
    indexers = make_indexers(model, settings)
    for index, new_indexer in indexers.items():
        copy_first_heads(cast(Any, model).model.layers[index].self_attn, new_indexer, settings.model)
    return convert_model(model, settings, indexers)


def check_dense_model(model: Any) -> None:
    """Raise ConfigError for a model that cannot be converted."""
    if not isinstance(model, PreTrainedModel):
        raise ConfigError(
            f"model: expected a causal language model of transformers, got a {type(model).__name__}; convert a model "
            "before adapters wrap it"
        )
    if isinstance(model, ConvertedModel):
        raise ConfigError(f"model: {type(model).__name__} is converted already; convert a dense model")
    check_dense_config(model.config)
    if _find_converted_class(model) is None:
        expected = ", ".join(cls.dense_class.__name__ for cls in CONVERTED_CLASSES)
        raise ConfigError(f"model: {type(model).__name__} is not supported; expected one of {expected}")


def make_indexers(model: Any, settings: ConversionSettings) -> dict[int, ConvertedIndexer]:
    """Return a new indexer, with PyTorch's initial weights, for each layer that has one, by layer; `model` is unchanged."""
    return {
        index: make_indexer(layer.self_attn, settings.model)
        for index, layer in enumerate(model.model.layers)
        if settings.model.has_indexer_in(index)
    }


def convert_model(model: Model, settings: ConversionSettings, indexers: Mapping[int, ConvertedIndexer]) -> Model:
    """Convert a dense model that `check_dense_model` accepts in place, with the result of `make_indexers`, and return it.

    Everything that can fail is done before this call, so that an error leaves the caller's model unchanged.
    """
    dense: Any = model
    converted_class = _find_converted_class(model)
    own_config = copy.deepcopy(dense.config)  # the configuration may be shared with a dense model
    own_config.__class__ = converted_class.config_class
    own_config.sparse_attention = settings.to_mapping()
    own_config.architectures = [converted_class.__name__]
    own_config._attn_implementation = SPARSE
    for module in model.modules():
        if getattr(module, "config", None) is not None:
            module.config = own_config
    dense.__class__ = converted_class
    _add_attention(model, settings, indexers)
    return model


def _find_converted_class(model: Any) -> Any:
    return next((cls for cls in CONVERTED_CLASSES if cls.dense_class is type(model)), None)


def _add_attention(model: Any, settings: ConversionSettings, indexers: Mapping[int, ConvertedIndexer]) -> None:
    for index, indexer in indexers.items():
        model.model.layers[index].self_attn.indexer = indexer
    add_hooks(model, settings)


class ConvertedModel(PassesCacheToPeft, SavedModel):
    """Methods of all converted models. A class for a family lists it before the dense class."""

    dense_class: type[PreTrainedModel]
    config_class: type[PreTrainedConfig]

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        if not config.sparse_attention:
            raise ConfigError(
                f"{type(self).__name__}: expected the configuration of a converted model, with sparse_attention, got one "
                "without; load the dense model and call nsa_lab.sparsify"
            )
        requested = config._attn_implementation
        dense: Any = super()
        dense.__init__(config, *args, **kwargs)
        self.config._attn_implementation = requested or SPARSE
        settings = ConversionSettings.from_mapping(config, config.sparse_attention)
        _add_attention(self, settings, make_indexers(self, settings))

    def _prepare_cache_for_generation(self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any) -> Any:
        """Create the cache of `generate`, which assisted generation needs before the first forward pass."""
        model: Any = self
        if is_converted(model) and generation_config.use_cache is not False:
            check_cache_implementation(generation_config)
            if all(model_kwargs.get(name) is None for name in CACHE_NAMES):
                model_kwargs[CACHE_ARGUMENT] = SparseCache(model.base_model, model.base_model.conversion)
        dense: Any = super()
        return dense._prepare_cache_for_generation(generation_config, model_kwargs, *args)


class ConvertedConfig(SavedWithImport):
    """Methods of the configurations of converted models."""

    def save_pretrained(self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> Any:
        """Save the configuration, and the file with which `trust_remote_code=True` imports nsa_lab."""
        cls = next(cls for cls in CONVERTED_CLASSES if cls.config_class is type(self))
        names = {"AutoConfig": cls.config_class.__name__, "AutoModelForCausalLM": cls.__name__}
        self.auto_map = {auto: f"{REMOTE_CODE.removesuffix('.py')}.{name}" for auto, name in names.items()}
        os.makedirs(save_directory, exist_ok=True)
        code = f"from nsa_lab.convert.models import {', '.join(names.values())}\n\n__all__ = {list(names.values())}\n"
        write_text(Path(save_directory) / REMOTE_CODE, code)
        dense: Any = super()
        return dense.save_pretrained(save_directory, *args, **kwargs)


class SparseLlamaConfig(ConvertedConfig, LlamaConfig):
    """Configuration of a converted Llama model."""

    model_type = "nsa_lab_llama"
    sparse_attention: dict[str, Any] | None = None


class SparseMistralConfig(ConvertedConfig, MistralConfig):
    """Configuration of a converted Mistral model."""

    model_type = "nsa_lab_mistral"
    sparse_attention: dict[str, Any] | None = None


class SparseQwen2Config(ConvertedConfig, Qwen2Config):
    """Configuration of a converted Qwen2 model."""

    model_type = "nsa_lab_qwen2"
    sparse_attention: dict[str, Any] | None = None


class SparseQwen3Config(ConvertedConfig, Qwen3Config):
    """Configuration of a converted Qwen3 model."""

    model_type = "nsa_lab_qwen3"
    sparse_attention: dict[str, Any] | None = None


class SparseLlamaForCausalLM(ConvertedModel, LlamaForCausalLM):
    """A Llama model with attention to selected blocks, for example SmolLM2."""

    dense_class, config_class = LlamaForCausalLM, SparseLlamaConfig


class SparseMistralForCausalLM(ConvertedModel, MistralForCausalLM):
    """A Mistral model with attention to selected blocks."""

    dense_class, config_class = MistralForCausalLM, SparseMistralConfig


class SparseQwen2ForCausalLM(ConvertedModel, Qwen2ForCausalLM):
    """A Qwen2 model with attention to selected blocks."""

    dense_class, config_class = Qwen2ForCausalLM, SparseQwen2Config


class SparseQwen3ForCausalLM(ConvertedModel, Qwen3ForCausalLM):
    """A Qwen3 model with attention to selected blocks."""

    dense_class, config_class = Qwen3ForCausalLM, SparseQwen3Config


CONVERTED_CLASSES: tuple[Any, ...] = (
    SparseLlamaForCausalLM,
    SparseMistralForCausalLM,
    SparseQwen2ForCausalLM,
    SparseQwen3ForCausalLM,
)
for _class in CONVERTED_CLASSES:
    register_causal_lm(_class)
