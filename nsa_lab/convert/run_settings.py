"""Settings of a conversion run that follow from its source: the sizes of the model, its weights and its tokenizer."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

from nsa_lab.config import ConfigError, ModelConfig, NSAConfig, RunConfig
from nsa_lab.config.model_config import INDEXER_KEYS
from nsa_lab.convert.nsa_model import WEIGHT_KEYS, describe_model
from nsa_lab.convert.settings import ConversionSettings
from nsa_lab.convert.sources import load_dense_config, load_fast_tokenizer
from nsa_lab.runs import directory
from nsa_lab.runs.atomic_io import write_bytes


def describe_source(source: str, folder: Path) -> dict[str, Any]:
    """Return the settings of a run that converts `source`, by dotted key, for `RunConfig.from_yaml`.

    source: as in `load_initial_weights`; of a converted run, the form of the indexer too. folder: where the tokenizer of a
    pretrained model is stored. Raises ConfigError for a source that is not found, has other branches than the selected one,
    or that an `NSATransformer` cannot hold.
    """
    source = os.path.expanduser(source)
    if source.strip() and (Path(source) / directory.CONFIG).is_file():
        run = RunConfig.from_yaml(Path(source) / directory.CONFIG)
        model = run.model_at(run.train.steps)  # with the RoPE base of the last stage
        if run.model.attention != "dense" and run.model.branches != ("sel",):
            raise ConfigError(
                f"{source}: model.branches = {list(run.model.branches)}: expected a dense run, or one with the selected "
                "branch only; convert a dense model"
            )
        settings = _name_settings(str(Path(source).resolve()), model, run.data.tokenizer)
        if not model.has_indexer:
            return settings
        settings |= {f"model.{key}": getattr(model, key) for key in ("indexer_block", *INDEXER_KEYS)}
        return settings | {f"nsa.{key}": getattr(model.nsa, key) for key in ("head_reduction", "block_reduction")}
    model = describe_model(load_dense_config(source), NSAConfig(scores="mean_key"))
    content = load_fast_tokenizer(source, model.vocab_size)
    file = folder / ".tokenizers" / f"{hashlib.sha256(content).hexdigest()[:16]}.json"
    if not file.is_file():
        file.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(file, content)
    is_path = Path(source).exists()
    return _name_settings(str(Path(source).resolve()) if is_path else source, model, str(file.resolve()))


def has_indexers(source: str) -> bool:
    """Return whether a source of `load_initial_weights` has trained indexers, with which a run then starts."""
    if (Path(source) / directory.CONFIG).is_file():
        return RunConfig.from_yaml(Path(source) / directory.CONFIG).model.has_indexer
    dense = load_dense_config(source)
    settings = getattr(dense, "sparse_attention", None)  # of a converted model
    return bool(settings) and ConversionSettings.from_mapping(dense, settings).model.has_indexer


def _name_settings(source: str, model: ModelConfig, tokenizer: str) -> dict[str, Any]:
    values = {f"model.{key}": getattr(model, key) for key in WEIGHT_KEYS}
    if model.rope_scaling is not None:  # otherwise, a preset may extend the context
        values["model.rope_scaling"] = model.rope_scaling.model_dump()
    # Keys of tables that do not exist are refused, even with their defaults.
    values = {key: value for key, value in values.items() if model.ngrams or not key.startswith("model.ngram")}
    return {**values, "train.initial_weights": source, "data.tokenizer": tokenizer}
