"""Pretrained weights in an `NSATransformer`, and its trained indexers in a converted model.

An `NSATransformer` has this project's trainer, evaluation and decoding, which records CUDA graphs. It holds plain Llama
models: no biases, no norms of queries and keys; RoPE as it is, linearly scaled or with YaRN.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from nsa_lab.config import ConfigError, ModelConfig, NSAConfig, RopeScaling
from nsa_lab.convert.models import ConvertedModel, check_dense_model, convert_model, make_indexers
from nsa_lab.convert.settings import (
    DEFAULT_NSA,
    ConversionSettings,
    IndexerOptions,
    add_indexer_defaults,
    check_dense_config,
    describe_attention,
)
from nsa_lab.convert.sources import load_dense
from nsa_lab.inference import load_model
from nsa_lab.model import NSATransformer, SparseAttention
from nsa_lab.model.init_weights import init_indexer
from nsa_lab.runs import directory

Model = TypeVar("Model", bound=PreTrainedModel)
MARKER = ".indexer."  # in the names of an indexer's weights

# Settings that follow from the weights. The others describe the attention.
WEIGHT_KEYS = (
    *("dim", "n_layers", "n_heads", "n_kv_groups", "d_k", "d_v", "vocab_size", "mlp", "mlp_hidden", "rope_theta"),
    *("norm_eps", "rotary_share", "matching_heads", "embedding_norm", "ngrams", "ngram_rows", "ngram_width"),
)


def describe_model(dense: PreTrainedConfig, nsa: NSAConfig = DEFAULT_NSA, **indexer: Any) -> ModelConfig:
    """Return the configuration of an `NSATransformer` with the weights of a dense model and the selected branch.

    indexer: as in `sparsify`. Raises ConfigError for a model that an `NSATransformer` cannot hold.
    """
    check_dense_config(dense)
    rope = dense.rope_parameters or {}
    unsupported = {
        "attention_bias": getattr(dense, "attention_bias", False) or dense.model_type.endswith("qwen2"),
        "mlp_bias": getattr(dense, "mlp_bias", False),
        "norms of queries and keys": dense.model_type.endswith("qwen3"),
        f"rope_type = {rope.get('rope_type')!r}": rope.get("rope_type", "default") not in ("default", "linear", "yarn"),
        f"hidden_act = {dense.hidden_act!r}": dense.hidden_act != "silu",
    }
    if problem := next((name for name, is_used in unsupported.items() if is_used), None):
        raise ConfigError(f"{dense.model_type}: NSATransformer has no {problem}; use nsa_lab.sparsify and transformers")
    own: dict[str, Any] = {"mlp": "gated", "mlp_hidden": dense.intermediate_size, "rope_theta": rope["rope_theta"]}
    if rope.get("rope_type", "default") != "default":
        scaling = {key: value for key, value in rope.items() if key != "rope_theta" and value is not None}
        if unknown := sorted(scaling.keys() - RopeScaling.model_fields.keys()):
            raise ConfigError(
                f"{dense.model_type}: NSATransformer has no rope_parameters.{unknown[0]} = {scaling[unknown[0]]}; use "
                "nsa_lab.sparsify and transformers"
            )
        own["rope_scaling"] = RopeScaling(**scaling)
    return describe_attention(dense, nsa, add_indexer_defaults(dense, nsa, indexer), **own)


@torch.no_grad()
def copy_weights(dense: PreTrainedModel, model: NSATransformer) -> None:
    """Copy the weights of a dense or converted model to an `NSATransformer` with the sizes of `describe_model`.

    The `NSATransformer` has the selected branch only, or dense attention. Indexers start with the weights of the first
    heads; of a converted model, they are copied. Tied embeddings are copied to the embedding and to the head. Raises
    ConfigError if the model has another architecture.
    """
    _check_architecture(dense, model.config)
    base: Any = dense.base_model
    layers: Any = base.layers
    blocks: Any = model.blocks
    model.embedding.weight.copy_(base.embed_tokens.weight)
    for layer, block in zip(layers, blocks, strict=True):
        attention, own = layer.self_attn, block.attention
        own.qkv.weight.copy_(torch.cat([x.weight for x in (attention.q_proj, attention.k_proj, attention.v_proj)]))
        own.out.weight.copy_(attention.o_proj.weight)
        block.mlp.up.weight.copy_(torch.cat([layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight]))
        block.mlp.down.weight.copy_(layer.mlp.down_proj.weight)
        block.attention_norm.weight.copy_(layer.input_layernorm.weight)
        block.mlp_norm.weight.copy_(layer.post_attention_layernorm.weight)
        if isinstance(own, SparseAttention) and own.indexer is not None:
            if hasattr(attention, "indexer"):
                own.indexer.load_state_dict(attention.indexer.state_dict())
            else:
                init_indexer(own, own.indexer)
    model.norm.weight.copy_(base.norm.weight)
    model.head.weight.copy_(cast(Any, dense.get_output_embeddings()).weight)


def _check_architecture(dense: PreTrainedModel, config: ModelConfig) -> None:
    """Raise ConfigError unless `config` has the architecture of a dense or converted model."""
    expected = describe_model(dense.config, NSAConfig(scores="mean_key"))
    keys = WEIGHT_KEYS if config.attention == "dense" else (*WEIGHT_KEYS, "branches")
    if expected.rope_scaling is not None:  # otherwise, the run may extend the context
        keys = (*keys, "rope_scaling")
    if differing := [key for key in keys if getattr(expected, key) != getattr(config, key)]:
        key = differing[0]
        raise ConfigError(
            f"model.{key} = {getattr(config, key)}: expected {getattr(expected, key)}, as in the pretrained model; set it, "
            "or use nsa_lab.convert.describe_model"
        )


def make_nsa_transformer(
    dense: PreTrainedModel, nsa: NSAConfig = DEFAULT_NSA, *, backend: str = "auto", **indexer: Any
) -> NSATransformer:
    """Return an `NSATransformer` with the weights of a dense model, on its device, in evaluation mode.

    A converted model keeps its settings. The rest as in `describe_model`.
    """
    if isinstance(dense, ConvertedModel):
        own: Any = dense.base_model.conversion
        nsa, indexer = own.nsa, own.indexer
    config = describe_model(dense.config, nsa, **indexer)
    weight = cast(Any, dense.get_input_embeddings()).weight
    dtype, device = weight.dtype, weight.device
    model = NSATransformer(config, backend=backend, device=device, dtype=dtype, seed=0)
    copy_weights(dense, model)
    return model.to(dtype).eval()


def load_initial_weights(model: NSATransformer, source: str | Path) -> None:
    """Load pretrained weights into `model`, whose sizes are those of `describe_model`.

    source: as in `load_dense`, or a run of this project that is dense or has the selected branch only. Indexers are copied
        if the source has them (`has_indexers`); otherwise they start with the weights of the first heads.
    Raises the errors of `load_dense`, or of `load_model` for a run, and ConfigError if the model has another architecture.
    """
    if (Path(source) / directory.CONFIG).is_file():
        _copy_run_weights(load_model(source), model)
    else:
        copy_weights(load_dense(source), model)


@torch.no_grad()
def _copy_run_weights(source: NSATransformer, model: NSATransformer) -> None:
    """Copy the weights of a run. Those of the indexers may be missing on either side."""
    weights, own = source.state_dict(), model.state_dict()
    trunk = {name for name in own | weights if MARKER not in name}
    indexers = {name for name in own if MARKER in name}
    has_trained_indexers = any(MARKER in name for name in weights) and bool(indexers)
    differing = sorted(
        name
        for name in (own | weights if has_trained_indexers else trunk)
        if name not in own or name not in weights or own[name].shape != weights[name].shape
    )
    if differing:
        raise ConfigError(
            f"train.initial_weights: {differing[0]} differs between the run and the model; use the model section "
            "of the run, with branches: [sel] and an indexer for a dense one"
        )
    model.load_state_dict({name: value for name, value in weights.items() if name in own}, strict=False)
    if not has_trained_indexers:
        for module in model.modules():
            if isinstance(module, SparseAttention) and module.indexer is not None:
                init_indexer(module, module.indexer)


def convert_with_trained_indexers(dense: Model, trained: NSATransformer, *, backend: str = "auto") -> Model:
    """Convert a dense model in place with the settings and indexers of a trained `NSATransformer`, and return it."""
    c = trained.config
    check_dense_model(dense)
    _check_architecture(dense, c)
    options = {key: getattr(c, key) for key in IndexerOptions.__annotations__ if c.has_indexer}
    settings = ConversionSettings(dense.config, c.nsa, options, backend)
    indexers, blocks = make_indexers(dense, settings), cast(Any, trained.blocks)
    for index, indexer in indexers.items():
        indexer.load_state_dict(blocks[index].attention.indexer.state_dict())
    return convert_model(dense, settings, indexers)
