"""Convert a pretrained dense model of `transformers` to sparse attention (extra `hf`).

`sparsify` replaces the attention of a model in place. The weights keep their values and names; an indexer is added to each
layer, and its scores select the blocks of tokens that a query attends to.

    settings.py      the supported families, and the settings of a conversion
    models.py        `sparsify`, and a class for each family
    hooks.py         hooks around the dense model's own code
    forward_pass.py  the attention function, which runs the operator of nsa_lab, and the state of a pass
    indexer.py       the indexer of a converted layer and its initial weights
    cache.py         `SparseCache`, the key/value cache of `generate`
    adapter.py       the indexers alone, as files
    export.py        the adapter of a run, with a model card
    nsa_model.py     pretrained weights in an `NSATransformer`, for this project's trainer and decoder
    run_settings.py  settings of a conversion run that follow from its source
    sources.py       dense models: of the Hub, a folder, a GGUF file or a Python package
"""

# ruff: noqa: E402 - require() first, for its error message

from __future__ import annotations

from nsa_lab.config.optional_deps import require

require("transformers")

from nsa_lab.convert.adapter import AdapterInfo, load_adapter, read_adapter_info, save_adapter
from nsa_lab.convert.cache import SparseCache
from nsa_lab.convert.export import export_adapter
from nsa_lab.convert.models import (
    SparseLlamaForCausalLM,
    SparseMistralForCausalLM,
    SparseQwen2ForCausalLM,
    SparseQwen3ForCausalLM,
    sparsify,
)
from nsa_lab.convert.nsa_model import (
    convert_with_trained_indexers,
    copy_weights,
    describe_model,
    load_initial_weights,
    make_nsa_transformer,
)
from nsa_lab.convert.run_settings import describe_source, has_indexers
from nsa_lab.convert.settings import DEFAULT_NSA, IndexerOptions
from nsa_lab.convert.sources import check_tokenizer, load_dense, load_tokenizer

__all__ = [
    "DEFAULT_NSA",
    "AdapterInfo",
    "IndexerOptions",
    "SparseCache",
    "SparseLlamaForCausalLM",
    "SparseMistralForCausalLM",
    "SparseQwen2ForCausalLM",
    "SparseQwen3ForCausalLM",
    "check_tokenizer",
    "convert_with_trained_indexers",
    "copy_weights",
    "describe_model",
    "describe_source",
    "export_adapter",
    "has_indexers",
    "load_adapter",
    "load_dense",
    "load_initial_weights",
    "load_tokenizer",
    "make_nsa_transformer",
    "read_adapter_info",
    "save_adapter",
    "sparsify",
]
