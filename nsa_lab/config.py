"""The configuration of a run: typed, frozen, validated, YAML in and out, hashed.

Invariants
* Five sections, `model`, `nsa`, `runtime`, `train`, `data`, with the key names of the NSA community's YAML files.
* An unknown key, a wrong type or an impossible combination raises `ConfigError`: what was expected, what came, what to do.
* Nothing reads the environment, and nothing changes after construction.
* A step is an optimiser step; a batch is `train.batch_size * train.accumulate_grad_batches` sequences.
* A run is a sequence of stages (`TrainConfig.plan`); without `train.stages` it is one, made of the section's own keys.
* A key that the run does not read is not written, so that a new key changes nothing about the runs that do not use it.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import reprlib
import string
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

import pydantic
from pydantic import Field, model_validator

BYTE_VOCABULARY = 256
COUNT = 2**31 - 1
"""The largest length or count: what kernels and shards number with 32 bits."""
SIZE = 2**18
"""The largest width, number of heads or number of sequences, so that no tensor has more bytes than 64 bits count."""
Backend = Literal["auto", "reference", "torch", "triton", "flash"]

# Keys of older NSA configurations that did nothing, or no longer exist, and what takes their place.
RETIRED_KEYS = {
    "runtime.use_flash": "remove it; runtime.backend chooses the kernels (auto, reference, torch, triton, flash)",
    "runtime.use_triton_sel": "remove it; runtime.backend: triton asks for the Triton kernels by name",
    "runtime.sel_triton_min_L": "remove it; the kernels choose their own strategy by length",
    "runtime.compile_cmp_win": "remove it; runtime.compile compiles the whole block",
    "train.max_grad_norm": "use train.grad_clip",
    "train.out_dir": "remove it; every run gets a directory of its own under outputs/",
}


class ConfigError(ValueError):
    """The configuration cannot be used. The message is one line per problem: key, value, remedy."""


class _Section(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    def __init__(self, /, **values: Any) -> None:
        try:
            super().__init__(**values)
        except pydantic.ValidationError as error:
            raise ConfigError(_explain(error, type(self))) from None


class NSAConfig(_Section):
    """Geometry and variants of Native Sparse Attention (arXiv 2502.11089, section 3.3).

    Lengths are in tokens, `n_sel` in blocks.
    """

    l: int = Field(default=32, ge=1, le=COUNT, description="compression block length, tokens")
    d: int = Field(default=16, ge=1, le=COUNT, description="stride between compression blocks, tokens")
    l_sel: int = Field(default=64, ge=1, le=COUNT, description="selection block length, tokens")
    n_sel: int = Field(default=16, le=COUNT, description="selection blocks read by a query, the forced ones included")
    w: int = Field(default=512, ge=1, le=COUNT, description="sliding window, tokens, the query's own included")
    phi: Literal["avg", "linear", "mlp"] = Field(default="avg", description="compression operator")
    gate: Literal["sigmoid", "softmax"] = Field(default="sigmoid", description="gate over the three branches")

    @model_validator(mode="after")
    def _geometry(self) -> NSAConfig:
        for name in ("l", "l_sel"):
            length = getattr(self, name)
            if length % self.d:
                low = max(length // self.d, 1) * self.d
                raise ValueError(
                    f"nsa.{name} = {length} is not a multiple of nsa.d = {self.d}; "
                    f"use nsa.{name} = {low} or {low + self.d}, or a stride that divides {length}"
                )
        if self.n_sel < 3:
            raise ValueError(
                f"nsa.n_sel = {self.n_sel} leaves no room for the three forced blocks "
                "(the first, the current and the one before it); use nsa.n_sel >= 3"
            )
        return self


class ModelConfig(_Section):
    """A decoder-only transformer. `nsa` is read from the YAML section of that name."""

    dim: int = Field(default=768, ge=1, le=SIZE, description="width of the residual stream")
    n_layers: int = Field(default=12, ge=1, le=10_000)
    n_heads: int = Field(default=12, ge=1, le=SIZE, description="query heads, H")
    n_kv_groups: int = Field(default=2, ge=1, le=SIZE, description="key/value groups, G")
    d_k: int = Field(default=64, ge=2, le=SIZE, description="width of a query or key head")
    d_v: int = Field(default=64, ge=1, le=SIZE, description="width of a value head")
    vocab_size: int = Field(default=BYTE_VOCABULARY, ge=2, le=2**24)
    attention: Literal["nsa", "dense"] = "nsa"
    mlp: Literal["plain", "gated"] = Field(default="plain", description="plain: SiLU; gated: SwiGLU")
    mlp_hidden: int | None = Field(default=None, ge=1, le=SIZE, description="hidden width of the MLP; None: 4 * dim")
    rope_theta: float = Field(default=10000.0, gt=0)
    rotary_share: float = Field(default=1.0, gt=0, le=1, description="share of a head's width that rotary embedding turns")
    matching_heads: int = Field(
        default=0,
        ge=0,
        description="heads of the first group that start by looking for what came after the present token before; "
        "with any, that group's keys are those of the token before",
    )
    selection_loss: float = Field(
        default=0.0, ge=0, description="weight of the loss that teaches the choice where the selected branch would look"
    )
    norm_eps: float = Field(default=1e-5, gt=0)
    nsa: NSAConfig = NSAConfig()

    @model_validator(mode="after")
    def _heads(self) -> ModelConfig:
        if self.n_heads % self.n_kv_groups:
            near = min(
                (g for g in range(1, self.n_heads + 1) if self.n_heads % g == 0), key=lambda g: abs(g - self.n_kv_groups)
            )
            raise ValueError(
                f"model.n_heads = {self.n_heads} is not a multiple of model.n_kv_groups = {self.n_kv_groups}; "
                f"the nearest number of groups that divides it is {near}"
            )
        if self.d_k % 2:
            raise ValueError(
                f"model.d_k = {self.d_k} is odd, and rotary embedding turns pairs; use {self.d_k - 1} or {self.d_k + 1}"
            )
        return self

    @model_validator(mode="after")
    def _recall(self) -> ModelConfig:
        turned = self.rotary_share * self.d_k
        if turned != int(turned) or int(turned) % 2 or turned < 2:
            near = max(2, 2 * round(turned / 2))
            raise ValueError(
                f"model.rotary_share = {self.rotary_share} of model.d_k = {self.d_k} is {turned:g} channels, and rotary "
                f"embedding turns pairs; use {near / self.d_k:g}"
            )
        if self.matching_heads > self.heads_per_group:
            raise ValueError(
                f"model.matching_heads = {self.matching_heads} is more than the {self.heads_per_group} heads of a group; "
                f"use at most {self.heads_per_group}"
            )
        return self

    @property
    def taught(self) -> bool:
        """Whether the model adds a selection loss to what it is trained on."""
        return self.attention == "nsa" and self.selection_loss > 0

    @property
    def rotary_width(self) -> int:
        """Channels of a query or key head that rotary embedding turns."""
        return int(self.rotary_share * self.d_k)

    @property
    def heads_per_group(self) -> int:
        return self.n_heads // self.n_kv_groups

    @property
    def hidden(self) -> int:
        return self.mlp_hidden or 4 * self.dim


class RuntimeConfig(_Section):
    """Where and how the run computes. Nothing here changes the mathematics beyond rounding."""

    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="auto: CUDA if there is one")
    precision: Literal["fp32", "bf16"] = Field(default="fp32", description="bf16: autocast over fp32 master weights")
    backend: Backend = "auto"
    compile: bool = Field(default=False, description="torch.compile the model")
    gradient_checkpointing: bool = False
    cuda_graph: bool = Field(
        default=False, description="replay a step's gradients as one CUDA graph; worth it for small batches"
    )
    deterministic: bool = Field(default=False, description="bit-exact resume on a GPU too, at some cost in speed")
    parallel: Literal["ddp", "fsdp"] = Field(
        default="ddp",
        description="several ranks: ddp copies the model to each, fsdp shards its weights and moments over them",
    )
    heartbeat_s: float = Field(default=10.0, gt=0, description="seconds between heartbeat events")
    profile: Literal["smoke", "production"] = Field(
        default="smoke", description="production: preflight refuses toy models, save_every 0 and synthetic data"
    )

    @model_validator(mode="after")
    def _graphable(self) -> RuntimeConfig:
        if self.cuda_graph and self.gradient_checkpointing:
            raise ValueError(
                "runtime.cuda_graph and runtime.gradient_checkpointing exclude each other: recomputation keeps random "
                "state that a graph cannot hold; set one of them to false"
            )
        if self.cuda_graph and self.device == "cpu":
            raise ValueError("runtime.cuda_graph = True needs runtime.device: cuda; set it to false on a CPU")
        return self


class StageConfig(_Section):
    """A stretch of training with one length, one batch and one schedule. Every count is in optimiser steps."""

    steps: int = Field(default=200, ge=1, le=COUNT)
    seq_len: int = Field(default=512, ge=2, le=COUNT, description="tokens per sequence")
    batch_size: int = Field(default=4, ge=1, le=SIZE, description="sequences per forward pass")
    accumulate_grad_batches: int = Field(default=1, ge=1, le=SIZE, description="forward passes per optimiser step")
    micro_batch_size: int | None = Field(
        default=None,
        ge=1,
        le=SIZE,
        description="sequences a forward pass may hold on this device; regroups the batch, not its mathematics",
    )
    lr: float = Field(default=2e-4, gt=0, description="peak learning rate")
    lr_schedule: Literal["cosine", "constant"] = "cosine"
    min_lr: float = Field(default=0.0, ge=0, description="learning rate at the last step")
    warmup_steps: int = Field(default=0, ge=0, le=COUNT)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.warmup_steps >= self.steps and self.warmup_steps:
            raise ValueError(
                f"train.warmup_steps = {self.warmup_steps} is not below train.steps = {self.steps}; "
                f"use at most {self.steps - 1} (both count optimiser steps)"
            )
        if self.min_lr > self.lr:
            raise ValueError(f"train.min_lr = {self.min_lr} is above train.lr = {self.lr}; swap or lower it")
        if self.micro_batch_size and self.sequences_per_step % self.micro_batch_size:
            near = max(m for m in range(1, self.micro_batch_size + 1) if self.sequences_per_step % m == 0)
            raise ValueError(
                f"train.micro_batch_size = {self.micro_batch_size} does not divide the "
                f"{self.sequences_per_step} sequences of a step; use {near}"
            )
        return self

    @property
    def sequences_per_step(self) -> int:
        return self.batch_size * self.accumulate_grad_batches

    @property
    def tokens_per_step(self) -> int:
        return self.sequences_per_step * self.seq_len

    @property
    def sequences_at_once(self) -> int:
        """Sequences of a forward pass, on one rank alone."""
        return self.micro_batch_size or self.batch_size


class TrainConfig(StageConfig):
    """The optimisation. Every count is in optimiser steps unless its name says otherwise.

    With `stages`, the keys of a stage stand there and not here; read from here they are those of the last stage, and
    `steps` is the sum over all. What depends on the step asks `plan` and `at`.
    """

    stages: tuple[StageConfig, ...] = Field(
        default=(), strict=False, description="stretches of training, one after another, each with its own seq_len, lr, ..."
    )
    weight_decay: float = Field(default=0.01, ge=0)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    eps: float = Field(default=1e-8, gt=0)
    grad_clip: float = Field(default=1.0, gt=0, description="limit of the global gradient norm")
    seed: int = Field(default=1337, ge=0, lt=2**63)
    log_every: int = Field(default=10, ge=1, le=COUNT)
    stats_every: int = Field(default=100, ge=1, le=COUNT, description="steps between gate and selection statistics")
    eval_every: int = Field(default=100, ge=0, le=COUNT, description="0: never")
    eval_batches: int = Field(default=8, ge=1, le=SIZE, description="held-out text: this many times batch_size sequences")
    save_every: int = Field(default=100, ge=0, le=COUNT, description="0: never")
    keep_last: int = Field(default=3, ge=1, le=COUNT, description="checkpoints kept besides the permanent ones")
    keep_every: int = Field(default=0, ge=0, le=COUNT, description="steps between permanent checkpoints; 0: none")
    spike_sigma: float = Field(default=0.0, ge=0, description="halt on a loss this many deviations over its window; 0: off")
    min_tokens_per_s: float = Field(default=0.0, ge=0, description="throughput gate; 0: off")
    stall_action: Literal["record", "halt"] = Field(
        default="record", description="halt: end a phase that lasts far longer than usual; save what can be, exit 3"
    )

    @model_validator(mode="after")
    def _of_stages(self) -> TrainConfig:
        if not self.stages:
            return self
        beside = sorted(self.model_fields_set & self.unread)
        if beside:
            raise ValueError(
                f"train.stages beside {', '.join(f'train.{key}' for key in beside)}: every stage has its own; "
                "move the keys into the stages, or remove train.stages"
            )
        for index, stage in enumerate(self.stages):
            missing = [key for key in ("steps", "seq_len", "batch_size", "lr") if key not in stage.model_fields_set]
            if missing:
                raise ValueError(f"train.stages.{index} has no {', '.join(missing)}; every stage says its own")
        # Frozen for everyone else; here it is still being made.
        for key, value in (*self.stages[-1], ("steps", sum(stage.steps for stage in self.stages))):
            object.__setattr__(self, key, value)
        return self

    @model_validator(mode="after")
    def _countable(self) -> Self:
        if self.tokens >= 2**63:
            raise ValueError(
                f"train.steps = {self.steps}: this run would take {self.tokens:.2g} tokens, more than 64 bits count; "
                "lower the steps, seq_len or the batch"
            )
        return self

    @property
    def plan(self) -> tuple[StageConfig, ...]:
        """The stages in their order; of a run without `stages`, the one that this section describes."""
        return self.stages or (self,)

    def at(self, step: int) -> tuple[int, int]:
        """The stage of optimiser step `step`, as an index into `plan`, and the step's number in it, from 1.

        Step 0, before all others, is of the first stage. Raises ValueError for a step that the run does not have.
        """
        within = step
        for index, stage in enumerate(self.plan):
            if 0 <= within <= stage.steps:
                return index, within
            within -= stage.steps
        raise ValueError(f"step {step} is outside 0..{self.steps}, the optimiser steps of this run")

    def stage_at(self, step: int) -> StageConfig:
        return self.plan[self.at(step)[0]]

    @property
    def first_steps(self) -> list[int]:
        """The first optimiser step of every stage."""
        return [1 + sum(stage.steps for stage in self.plan[:index]) for index in range(len(self.plan))]

    def tokens_by(self, step: int) -> int:
        """Tokens that the first `step` optimiser steps take."""
        index, within = self.at(step)
        before = sum(stage.steps * stage.tokens_per_step for stage in self.plan[:index])
        return before + within * self.plan[index].tokens_per_step

    @property
    def tokens(self) -> int:
        """Tokens of the whole run."""
        return self.tokens_by(self.steps)

    @property
    def longest(self) -> StageConfig:
        """The stage with the longest sequences."""
        return max(self.plan, key=lambda stage: stage.seq_len)

    @property
    def unread(self) -> set[str]:
        """The keys that this run does not read."""
        return set(StageConfig.model_fields) if self.stages else {"stages"}


class RecallConfig(_Section):
    """Facts that data.source: recall plants into text, and their questions. Lengths are in bytes."""

    bytes_per_fact: int = Field(
        default=512, ge=1, le=COUNT, description="recall: one fact for this many bytes of a sequence"
    )
    distractors: float = Field(default=0.0, ge=0, lt=1, description="recall: share of the facts that nobody asks for")
    questions_together: int = Field(default=1, ge=1, le=COUNT, description="recall: questions that stand in one place")
    names: Literal["words", "codes"] = Field(default="words", description="recall: amber anchor, or kq-417")
    values: Literal["digits", "letters", "hex"] = Field(default="digits", description="recall: what a value is made of")
    value_length: int = Field(default=7, ge=1, le=COUNT, description="recall: characters of a value")
    statement: str = Field(
        default="\nThe secret number of the {name} is {value}.\n", description="recall: how a fact is told"
    )
    question: str = Field(
        default="\nQ: What is the secret number of the {name}? A: ", description="recall: how it is asked for"
    )
    distance: Literal["uniform", "log"] = Field(
        default="uniform", description="recall: from fact to question; log: every order of magnitude alike"
    )
    answer_weight: float = Field(default=5.0, gt=0, description="recall: weight of an answer's bytes in the loss; text: 1")

    @model_validator(mode="after")
    def _templates(self) -> Self:
        for key, wanted in (("statement", {"name", "value"}), ("question", {"name"})):
            text = getattr(self, key)
            try:
                found = {field for _, field, _, _ in string.Formatter().parse(text) if field is not None}
            except ValueError as error:
                raise ValueError(f"data.{key} = {text!r}: {error}; double a brace that is meant as one") from None
            if found != wanted:
                raise ValueError(
                    f"data.{key} = {text!r} holds {', '.join(sorted(found)) or 'no field'}; "
                    f"expected {' and '.join(f'{{{field}}}' for field in sorted(wanted))}"
                )
        return self


class DataConfig(RecallConfig):
    """Where the text comes from. Noise is trained on only with `source: synthetic`."""

    source: Literal["stdlib", "local", "fineweb_edu", "synthetic", "recall"] = Field(
        default="stdlib", description="recall: facts planted into the text of data.path, or of stdlib without one"
    )
    path: str | None = Field(default=None, description="local, recall: a file, a folder or a glob of txt, jsonl or parquet")
    text_column: str = Field(default="text", description="name of the text column of parquet and jsonl")
    tokenizer: str = Field(default="byte", description="byte, or the path of a tokenizer.json")
    max_tokens: int | None = Field(
        default=None, ge=1, le=2**63 - 1, description="stop filling shards after this many training tokens"
    )
    val_fraction: float = Field(default=0.02, gt=0, lt=1, description="share of documents held out, by document hash")
    dataset: str = Field(default="HuggingFaceFW/fineweb-edu", description="fineweb_edu: repository on the hub")
    subset: str = Field(default="sample-10BT", description="fineweb_edu: configuration of the data set")
    timeout_s: float = Field(default=120.0, gt=0, description="longest wait for the source before it is called stalled")

    @model_validator(mode="after")
    def _path(self) -> DataConfig:
        if self.source == "local" and not self.path:
            raise ValueError("data.source = local needs data.path: a file, a folder or a glob of txt, jsonl or parquet")
        if self.source not in ("local", "recall") and self.path:
            raise ValueError(
                f"data.path = {self.path!r} is not read by data.source = {self.source}; "
                "set data.source: local, or remove the path"
            )
        return self

    @model_validator(mode="after")
    def _recall(self) -> DataConfig:
        given = sorted(self.model_fields_set & self.unread)
        if given:
            raise ValueError(
                f"{', '.join(f'data.{key}' for key in given)}: not read by data.source = {self.source}; "
                "set data.source: recall, or remove it"
            )
        return self

    @property
    def unread(self) -> set[str]:
        """The keys that this run does not read."""
        return set() if self.source == "recall" else set(RecallConfig.model_fields)


class RunConfig(_Section):
    """One run: five sections and a name (the stem of its file in params/)."""

    name: str = Field(default="run", max_length=100, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    model: ModelConfig = ModelConfig()
    runtime: RuntimeConfig = RuntimeConfig()
    train: TrainConfig = TrainConfig()
    data: DataConfig = DataConfig()

    @model_validator(mode="after")
    def _graphs_have_one_shape(self) -> RunConfig:
        shapes = {(stage.sequences_per_step, stage.seq_len) for stage in self.train.plan}
        if self.runtime.cuda_graph and len(shapes) > 1:
            raise ValueError(
                f"runtime.cuda_graph = True replays batches of one shape, and train.stages has {len(shapes)}; "
                "set it to false"
            )
        return self

    def __init__(self, /, **values: Any) -> None:
        if "nsa" in values:
            values["model"] = _with_nsa(values.get("model", {}), values["nsa"])
            del values["nsa"]
        super().__init__(**values)

    @property
    def nsa(self) -> NSAConfig:
        return self.model.nsa

    @classmethod
    def from_dict(cls, sections: dict[str, Any]) -> RunConfig:
        """Sections as they stand in YAML. Raises `ConfigError` naming every key that is wrong."""
        if not isinstance(sections, dict):
            raise ConfigError(f"a configuration is a mapping of sections, and this is {type(sections).__name__}")
        if isinstance(sections.get("model"), dict) and "nsa" in sections["model"]:
            raise ConfigError("model.nsa: the geometry has a section of its own; move these keys to nsa:")
        retired = [
            f"{section}.{key}"
            for section, keys in sections.items()
            if isinstance(keys, dict)
            for key in keys
            if f"{section}.{key}" in RETIRED_KEYS
        ]
        if retired:
            raise ConfigError("\n".join(f"{key} is not a setting of this project: {RETIRED_KEYS[key]}" for key in retired))
        return cls(**{key: value for key, value in sections.items() if value is not None})

    @classmethod
    def from_yaml(cls, path: str | Path, overrides: dict[str, Any] | None = None) -> RunConfig:
        """The file at `path`, with dotted `overrides` (`{"train.steps": 10}`) laid over it."""
        path = Path(path)
        try:
            sections = _read_yaml(path.read_bytes().decode("utf-8-sig")) or {}
        except (FileNotFoundError, IsADirectoryError):
            raise ConfigError(f"{path}: no such configuration file") from None
        except UnicodeDecodeError as error:
            line = 1 + error.object[: error.start].count(b"\n")
            raise ConfigError(
                f"{path}: line {line} has a byte {error.object[error.start]:#04x}, which is not UTF-8; save it as UTF-8"
            ) from None
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None
        except (OSError, ValueError) as error:
            raise ConfigError(f"{_brief(str(path))!r}: cannot be read: {getattr(error, 'strerror', error)}") from None
        if not isinstance(sections, dict):
            raise ConfigError(f"{path}: expected a mapping of sections, found {type(sections).__name__}")
        sections.setdefault("name", path.stem)
        return cls.from_dict(apply_overrides(sections, overrides or {}))

    def to_dict(self) -> dict[str, Any]:
        """The sections as they stand in YAML; `from_dict` gives back an equal configuration."""
        sections = self.model_dump(mode="json")
        nsa = sections["model"].pop("nsa")
        for name, unread in (("model", frozenset[str]()), ("train", self.train.unread), ("data", self.data.unread)):
            later = _LATER_KEYS.get(name, {})
            sections[name] = {
                key: value
                for key, value in sections[name].items()
                if key not in unread and not (key in later and value == later[key])
            }
        return {
            "name": sections["name"],
            "model": sections["model"],
            "nsa": nsa,
            **{key: sections[key] for key in ("runtime", "train", "data")},
        }

    def to_yaml(self) -> str:
        from nsa_lab import yaml_text

        return yaml_text.write(self.to_dict())

    def hash(self) -> str:
        """Sixteen hex digits over every value: equal configurations, equal hash."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()[:16]


# Keys that came after runs had been made without them: not written at the value that those ran with, so that the hash of a
# configuration is what it was.
_LATER_KEYS: dict[str, dict[str, Any]] = {
    "model": {"rotary_share": 1.0, "matching_heads": 0, "selection_loss": 0.0},
    "train": {"stall_action": "record"},
}


def _read_yaml(text: str) -> Any:
    # Imported here, because a configuration that is built in Python needs no YAML.
    from nsa_lab import yaml_text

    try:
        return yaml_text.read(text)
    except yaml_text.YAMLTextError as error:
        raise ConfigError(str(error)) from None


def apply_overrides(sections: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """A copy of `sections` with dotted keys set: `{"nsa.l": 16}`; a value may itself be a mapping, merged in."""
    merged = {key: dict(value) if isinstance(value, dict) else value for key, value in sections.items()}
    for dotted, value in overrides.items():
        section, _, key = dotted.partition(".")
        if key:
            if not isinstance(merged.setdefault(section, {}), dict):
                raise ConfigError(f"{dotted}: {section} is a value, not a section")
            merged[section][key] = value
        elif isinstance(value, dict):
            merged[section] = {**(merged.get(section) or {}), **value}
        else:
            merged[section] = value
    return merged


def parse_override(text: str) -> tuple[str, Any]:
    """`"train.lr=1e-3"` -> `("train.lr", 0.001)`; the value is read as YAML."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"-p {_brief(text)}: expected section.key=value, for example -p train.steps=100")
    try:
        return key.strip(), _read_yaml(value)
    except ConfigError as error:
        raise ConfigError(f"-p {_brief(text)}: {error}") from None


def _with_nsa(model: Any, nsa: Any) -> Any:
    if isinstance(model, ModelConfig):
        return model.model_copy(update={"nsa": nsa if isinstance(nsa, NSAConfig) else _section("nsa", NSAConfig, nsa)})
    if isinstance(model, dict):
        return {**model, "nsa": nsa}
    return model


def _section(name: str, kind: type[_Section], values: Any) -> _Section:
    if not isinstance(values, dict):
        raise ConfigError(f"{name}: expected a mapping, found {_VALUES.repr(values)}")
    return kind(**values)


def known_keys(kind: type[pydantic.BaseModel], prefix: str = "") -> list[str]:
    """Every dotted key of the YAML form, for the nearest-key hint and the documentation."""
    keys = []
    for name, info in kind.model_fields.items():
        inner = info.annotation
        if isinstance(inner, type) and issubclass(inner, pydantic.BaseModel):
            keys += known_keys(inner, "nsa." if name == "nsa" else f"{name}.")
        else:
            keys.append(prefix + name)
    return keys


_PREFIX = {
    "NSAConfig": "nsa",
    "ModelConfig": "model",
    "RuntimeConfig": "runtime",
    "TrainConfig": "train",
    "StageConfig": "train",
    "RecallConfig": "data",
    "DataConfig": "data",
}


# What an error repeats of a value: its beginning and end, and of lists in lists two levels.
_VALUES = reprlib.Repr()
_VALUES.maxlevel, _VALUES.maxstring, _VALUES.maxother, _VALUES.maxlong = 2, 100, 100, 40


def _brief(text: str) -> str:
    """`text` on one line, cut where it is longer than anyone would read."""
    line = " ".join(text.split())
    return line if len(line) <= 100 else f"{line[:97]}..."


def _explain(error: pydantic.ValidationError, kind: type[pydantic.BaseModel]) -> str:
    lines = []
    for problem in error.errors():
        path = [str(part) for part in problem["loc"]]
        if "nsa" in path:
            path = path[path.index("nsa") :]
        elif kind.__name__ in _PREFIX:
            path = [_PREFIX[kind.__name__], *path]
        lines.append(_explain_one(".".join(path), problem))
    return "\n".join(lines)


def _explain_one(key: str, problem: Mapping[str, Any]) -> str:
    value = problem.get("input")
    if problem["type"] == "extra_forbidden":
        return f"{_brief(key)} = {_VALUES.repr(value)}: no such key; {_nearest(key)}"
    if problem["type"] == "value_error":
        said = str(problem["ctx"]["error"])
        # A stage does not know which one it is.
        return said.replace("train.", f"{key}.") if key.startswith("train.stages.") else said
    reason = problem["msg"][0].lower() + problem["msg"][1:]
    if isinstance(value, float) and not math.isfinite(value):
        reason = "expected a finite number"
    if key == "runtime.precision" and value == "fp16":
        reason = "fp16 needs loss scaling and loses small updates; use bf16 (fp32 master weights) or fp32"
    return f"{_brief(key)} = {_VALUES.repr(value)}: {reason}"


def _nearest(key: str) -> str:
    known = known_keys(RunConfig)
    section = key.split(".")[0]
    sections = sorted({k.split(".")[0] for k in known})
    if section not in sections:
        near = difflib.get_close_matches(section, sections, n=1, cutoff=0.6) or _same_leaf(key, known)
        return f"did you mean {near[0]}?" if near else f"the sections are {', '.join(sections)}"
    own = [k for k in known if k.startswith(section + ".")]
    moved = [k for k in known if k.split(".")[-1] == key.split(".")[-1]]
    if moved:
        return f"did you mean {moved[0]}?"
    near = difflib.get_close_matches(key, own, n=1, cutoff=0.6)
    if near:
        return f"did you mean {near[0]}?"
    elsewhere = _same_leaf(key, known)
    return f"did you mean {elsewhere[0]}?" if elsewhere else f"{section} has {', '.join(k.split('.')[1] for k in own)}"


def _same_leaf(key: str, known: list[str]) -> list[str]:
    leaves = {k.split(".")[-1]: k for k in known}
    near = difflib.get_close_matches(key.split(".")[-1], leaves, n=1, cutoff=0.75)
    return [leaves[near[0]]] if near else []


def project_root() -> Path | None:
    """The folder that relative paths of a configuration, `params/` and `outputs/` are looked for in.

    The nearest folder above the working directory, or above this package, whose pyproject.toml is this project's; None for
    an installed package that is used elsewhere.
    """
    for start in (Path.cwd(), Path(__file__).resolve().parent):
        for folder in (start, *start.parents):
            if _is_this_project(folder / "pyproject.toml"):
                return folder
    return None


def _is_this_project(pyproject: Path) -> bool:
    try:
        project = tomllib.loads(pyproject.read_text(encoding="utf-8")).get("project", {})
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError):
        # A folder above ours without such a file, or with one that is not ours to judge.
        return False
    return str(project.get("name", "")).replace("-", "_").lower() == "nsa_lab"
