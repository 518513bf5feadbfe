"""Configuration of a run: all sections and a name, with YAML input and output, overrides and a hash."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from nsa_lab.config.base import Section
from nsa_lab.config.data_config import DataConfig
from nsa_lab.config.errors import KNOWN_KEYS, VALUE_REPR, ConfigError, list_keys, shorten
from nsa_lab.config.model_config import ModelConfig
from nsa_lab.config.nsa_config import NSAConfig
from nsa_lab.config.train_config import RuntimeConfig, StageConfig, TrainConfig


class RunConfig(Section):
    """Configuration of a run: five sections, a name (default: the stem of its file in params/) and a description."""

    name: str = Field(
        default="run",
        max_length=100,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
        description="beginning of the run's id; in a file, its name without .yaml",
    )
    description: str = Field(default="", max_length=500, description="purpose of the run in a sentence, for its report")
    model: ModelConfig = ModelConfig()
    runtime: RuntimeConfig = RuntimeConfig()
    train: TrainConfig = TrainConfig()
    data: DataConfig = DataConfig()

    @model_validator(mode="after")
    def _check_planted_share(self) -> RunConfig:
        shares = [stage.planted_share for stage in self.train.plan if stage.planted_share != 1]
        if shares and self.data.source != "recall":
            raise ValueError(
                f"train.planted_share = {shares[0]:g}, but data.source = {self.data.source} inserts no facts; "
                "set data.source: recall, or remove it"
            )
        return self

    @model_validator(mode="after")
    def _check_stage_cuda_graphs(self) -> RunConfig:
        for index, stage in enumerate(self.train.stages):
            if stage.cuda_graph:
                self.runtime.check_cuda_graph(f"train.stages.{index}.cuda_graph")
        return self

    @model_validator(mode="after")
    def _check_conversion(self) -> RunConfig:
        train, model = self.train, self.model
        if train.trainable == "indexer" and (not model.has_indexer or model.branches != ("sel",)):
            raise ValueError(
                "train.trainable = indexer: expected the selected branch and an indexer, got model.attention = "
                f"{model.attention}, model.branches = {list(model.branches)} and model.indexer_block = "
                f"{model.indexer_block}; set model.attention: nsa, model.branches: [sel] and model.indexer_block: 1, or "
                "train.trainable: all"
            )
        if train.trainable == "indexer" and not train.initial_weights:
            raise ValueError(
                "train.trainable = indexer: expected pretrained weights for the rest of the model, got none in "
                "train.initial_weights; use nsa-lab convert SOURCE, or train.trainable: all"
            )
        if train.teacher_weight and not (train.initial_weights and train.trainable == "all"):
            raise ValueError(
                f"train.teacher_weight = {train.teacher_weight:g}: expected pretrained weights that are trained, got "
                f"train.initial_weights = {train.initial_weights} and train.trainable = {train.trainable}; use nsa-lab "
                "convert with train.trainable: all, or train.teacher_weight: 0"
            )
        if train.teacher_weight and model.attention != "dense" and model.branches != ("sel",):
            raise ValueError(
                f"train.teacher_weight = {train.teacher_weight:g}: the teacher has dense attention with the weights of the "
                f"selected branch only, and model.branches = {list(model.branches)}; set model.branches: [sel], or "
                "train.teacher_weight: 0"
            )
        if train.teacher_weight and any(stage.rope_theta for stage in train.stages):
            raise ValueError(
                f"train.teacher_weight = {train.teacher_weight:g}: the teacher was not trained with the RoPE bases of "
                "train.stages; remove their rope_theta, or set train.teacher_weight: 0"
            )
        if train.initial_weights and self.runtime.parallel != "ddp":
            raise ValueError(
                f"train.initial_weights = {train.initial_weights} and runtime.parallel = {self.runtime.parallel}: sharded "
                "weights are initialized layer by layer; use runtime.parallel: ddp"
            )
        return self

    def __init__(self, /, **values: Any) -> None:
        if "nsa" in values:
            values["model"] = _merge_nsa(values.get("model", {}), values["nsa"])
            del values["nsa"]
        super().__init__(**values)

    def check_ranks(self, n_ranks: int) -> None:
        """Raise `ConfigError` unless `n_ranks` ranks can share every step."""
        self.train.check_ranks(n_ranks, self.runtime.context_parallel)

    def list_context_sizes(self, n_ranks: int) -> list[int]:
        """Return the number of ranks that share each sequence, for every stage."""
        return self.train.list_context_sizes(n_ranks, self.runtime.context_parallel)

    @property
    def nsa(self) -> NSAConfig:
        return self.model.nsa

    @property
    def is_conversion(self) -> bool:
        """True if pretrained dense weights get an indexer, which selects the blocks of the only branch."""
        return bool(self.train.initial_weights) and self.model.has_indexer and self.model.branches == ("sel",)

    def model_at(self, step: int) -> ModelConfig:
        """Return `model` as trained at optimizer step `step`, with the RoPE base of that stage.

        A checkpoint of that step always computes with this base. All other settings, including the window, are the same in
        all stages, because layers, kernels and caches are built once. Raise ValueError as `TrainConfig.locate_step` does.
        """
        theta = self.train.stage_at(step).rope_theta
        return self.model if theta is None else self.model.model_copy(update={"rope_theta": theta})

    def uses_cuda_graph(self, stage: StageConfig) -> bool:
        """Return whether steps of `stage` are replayed as CUDA graphs: its own setting, or by default that of `runtime`."""
        return self.runtime.cuda_graph if stage.cuda_graph is None else stage.cuda_graph

    @classmethod
    def from_dict(cls, sections: dict[str, Any]) -> RunConfig:
        """Build a configuration from its YAML sections. Raise `ConfigError` that names every invalid key."""
        if not isinstance(sections, dict):
            raise ConfigError(f"configuration: expected a mapping of sections, got {type(sections).__name__}")
        if isinstance(sections.get("model"), dict) and "nsa" in sections["model"]:
            raise ConfigError("model.nsa: NSA settings have their own section; move these keys to nsa:")
        return cls(**{key: value for key, value in sections.items() if value is not None})

    @classmethod
    def from_yaml(cls, path: str | Path, overrides: dict[str, Any] | None = None) -> RunConfig:
        """Read the file at `path` and apply dotted `overrides`, for example `{"train.steps": 10}`."""
        path = Path(path)
        sections = read_mapping(path)
        sections.setdefault("name", path.stem)
        return cls.from_dict(apply_overrides(sections, overrides or {}))

    def to_dict(self) -> dict[str, Any]:
        """Return the sections in their YAML form; `from_dict` of it returns an equal configuration."""
        sections = self._dump_used_keys()
        for name, defaults in DEFAULTS_OF_ADDED_KEYS.items():
            sections[name] = _drop_defaults(sections[name], defaults)
        return sections

    def settings(self) -> dict[str, Any]:
        """Return every setting that this run uses, by dotted key, including defaults that are not written to a file."""
        sections = {name: values for name, values in self._dump_used_keys().items() if isinstance(values, dict)}
        return {f"{section}.{key}": value for section, values in sections.items() for key, value in values.items()}

    def _dump_used_keys(self) -> dict[str, Any]:
        """Return the name and the sections, with only the keys that this run uses."""
        sections = self.model_dump(mode="json")
        nsa = sections["model"].pop("nsa")
        for name, unused_keys in (("train", self.train.unused_keys), ("data", self.data.unused_keys)):
            sections[name] = {key: value for key, value in sections[name].items() if key not in unused_keys}
        if stages := sections["train"].get("stages"):
            sections["train"]["stages"] = [_drop_defaults(stage, DEFAULTS_OF_ADDED_KEYS["train"]) for stage in stages]
        return {
            "name": sections["name"],
            **({"description": self.description} if self.description else {}),
            "model": sections["model"],
            "nsa": nsa,
            **{key: sections[key] for key in ("runtime", "train", "data")},
        }

    def to_yaml(self) -> str:
        from nsa_lab.config import yaml_text

        return yaml_text.dump(self.to_dict())

    def hash(self) -> str:
        """Return 16 hex digits that depend on every written value but the description: equal runs have equal hashes."""
        values = {key: value for key, value in self.to_dict().items() if key != "description"}
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


KNOWN_KEYS += list_keys(RunConfig)
MAX_FILE_BYTES = 1 << 20

# Keys added after runs existed without them, with the value that those runs used. This value is not written, so the hashes
# of the older configurations stay the same.
DEFAULTS_OF_ADDED_KEYS: dict[str, dict[str, Any]] = {
    "model": {
        "rope_scaling": None,
        "rotary_share": 1.0,
        "matching_heads": 0,
        "selection_loss": 0.0,
        "selection_queries": 64,
        "indexer_block": 0,
        "indexer_width": 0,
        "branches": ["cmp", "sel", "win"],
        "shared_kv": False,
        "indexer_heads": 1,
        "indexer_keys": "group",
        "indexer_order": ["rotate", "pool"],
        "indexer_every": 1,
        "indexer_dtype": "bf16",
        "embedding_norm": False,
        "silent": [],
        "ngrams": 0,
        "ngram_rows": 32_768,
        "ngram_width": 128,
    },
    "nsa": {"sink_blocks": 1, "local_blocks": 2, "scores": None, "head_reduction": "sum", "block_reduction": "sum"},
    "runtime": {"context_parallel": 1},
    "train": {
        "stall_action": "record",
        "decay_share": 0.2,
        "optimizer": "adamw",
        "token_budget": None,
        "rope_theta": None,
        "cuda_graph": None,
        "min_document_tokens": 0,
        "planted_share": 1.0,
        "initial_weights": None,
        "trainable": "all",
        "teacher_weight": 0.0,
    },
    "data": {
        "documents": "cross",
        "packing": "stream",
        "min_document_bytes": 0,
        "wordings": "single",
        "updates": 0.0,
        "first_values": 0.0,
    },
}


def _drop_defaults(section: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """Return `section` without the keys that equal their value in `defaults`."""
    return {key: value for key, value in section.items() if not (key in defaults and value == defaults[key])}


def read_mapping(path: Path) -> dict[str, Any]:
    """Return the mapping in the YAML file at `path`. Raise `ConfigError` with one line if it is unreadable or not one."""
    try:
        sections = _parse_yaml(_read_bounded(path).decode("utf-8-sig"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such configuration file") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: expected a configuration file, got a folder; give a .yaml file") from None
    except UnicodeDecodeError as error:
        line = 1 + error.object[: error.start].count(b"\n")
        raise ConfigError(
            f"{path}: line {line} has a byte {error.object[error.start]:#04x}, which is not UTF-8; save it as UTF-8"
        ) from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", error)
        raise ConfigError(f"{shorten(str(path.parent))!r}: {shorten(path.name)} cannot be read: {reason}") from None
    if sections is None:
        raise ConfigError(
            f"{path}: expected a mapping of sections, found nothing; write {{}} for a configuration with all defaults"
        )
    if not isinstance(sections, dict):
        raise ConfigError(f"{path}: expected a mapping of sections, found {type(sections).__name__}")
    return sections


def _read_bounded(path: Path) -> bytes:
    """Return the content of a file. Raise ValueError if it is large, or not regular: its reader could wait forever."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with open(descriptor, "rb") as file:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(path)
        if not stat.S_ISREG(mode):
            raise ValueError("expected a regular file")
        content = file.read(MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:
        raise ValueError(f"larger than {MAX_FILE_BYTES:,} bytes")
    return content


def _parse_yaml(text: str) -> Any:
    # Imported here, so that a configuration built in Python does not need PyYAML.
    from nsa_lab.config import yaml_text

    try:
        return yaml_text.parse(text)
    except yaml_text.YAMLTextError as error:
        raise ConfigError(str(error)) from None


def apply_overrides(sections: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of `sections` with dotted keys set, for example `{"nsa.l": 16}`. Mappings are merged into a section.

    Raise `ConfigError` if the part before the dot is not a section, or if a whole section would be replaced by nothing.
    """
    merged = {key: dict(value) if isinstance(value, dict) else value for key, value in sections.items()}
    for dotted, value in overrides.items():
        section, _, key = dotted.partition(".")
        if key:
            if not isinstance(merged.setdefault(section, {}), dict):
                raise ConfigError(f"{dotted}: {section} is a value, not a section")
            merged[section][key] = value
        elif isinstance(value, dict):
            merged[section] = {**(merged.get(section) or {}), **value}
        elif value is None and isinstance(merged.get(section), dict):
            raise ConfigError(f"{section}: expected a key and value, as in {section}.key=value; found nothing")
        else:
            merged[section] = value
    return merged


def parse_override(text: str) -> tuple[str, Any]:
    """Return (key, value) of an override such as `"train.lr=1e-3"`; the value is parsed as YAML."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"-p {shorten(text)}: expected section.key=value, for example -p train.steps=100")
    try:
        return key.strip(), _parse_yaml(value)
    except ConfigError as error:
        raise ConfigError(f"-p {shorten(text)}: {error}") from None


def _merge_nsa(model: Any, nsa: Any) -> Any:
    if isinstance(model, ModelConfig):
        return model.model_copy(
            update={"nsa": nsa if isinstance(nsa, NSAConfig) else _build_section("nsa", NSAConfig, nsa)}
        )
    if isinstance(model, dict):
        return {**model, "nsa": nsa}
    return model


def _build_section(name: str, kind: type[Section], values: Any) -> Section:
    if not isinstance(values, dict):
        raise ConfigError(f"{name}: expected a mapping, found {VALUE_REPR.repr(values)}")
    return kind(**values)
