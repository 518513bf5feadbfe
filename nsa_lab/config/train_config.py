"""The sections `runtime` and `train`: where it runs, and how it is trained."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from nsa_lab.config.base import MAX_COUNT, MAX_SIZE, Section
from nsa_lab.config.errors import ConfigError

Backend = Literal["auto", "reference", "torch", "triton", "flash"]


class RuntimeConfig(Section):
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
    def _check_cuda_graph(self) -> RuntimeConfig:
        if self.cuda_graph:
            self.check_cuda_graph("runtime.cuda_graph")
        return self

    def check_cuda_graph(self, key: str) -> None:
        """Raises ValueError where steps cannot be replayed as graphs, which `key` asks for."""
        if self.gradient_checkpointing:
            raise ValueError(
                f"{key} and runtime.gradient_checkpointing exclude each other: recomputation keeps random "
                "state that a graph cannot hold; set one of them to false"
            )
        if self.device == "cpu":
            raise ValueError(f"{key} = True needs runtime.device: cuda; set it to false on a CPU")


class StageConfig(Section):
    """A stretch of training with one length, one batch and one schedule. Every count is in optimiser steps."""

    steps: int = Field(default=200, ge=1, le=MAX_COUNT)
    token_budget: int | None = Field(
        default=None, ge=1, description="tokens to train on, in place of steps: as many whole steps as it pays for"
    )
    seq_len: int = Field(default=512, ge=2, le=MAX_COUNT, description="tokens per sequence")
    batch_size: int = Field(default=4, ge=1, le=MAX_SIZE, description="sequences per forward pass")
    accumulate_grad_batches: int = Field(default=1, ge=1, le=MAX_SIZE, description="forward passes per optimiser step")
    micro_batch_size: int | None = Field(
        default=None,
        ge=1,
        le=MAX_SIZE,
        description="sequences a forward pass may hold on this device; regroups the batch, not its mathematics",
    )
    lr: float = Field(default=2e-4, gt=0, description="peak learning rate")
    lr_schedule: Literal["cosine", "constant", "wsd"] = Field(
        default="cosine", description="wsd: warm-up, stable at lr, then linear to min_lr over the last decay_share"
    )
    decay_share: float = Field(default=0.2, gt=0, le=1, description="wsd: the share of the steps in which the rate falls")
    min_lr: float = Field(default=0.0, ge=0, description="learning rate at the last step")
    warmup_steps: int = Field(default=0, ge=0, le=MAX_COUNT)
    min_document_tokens: int = Field(
        default=0, ge=0, le=MAX_COUNT, description="shorter documents are not trained on here; held-out text keeps them"
    )
    planted_share: float = Field(
        default=1.0, ge=0, le=1, description="data.source: recall: share of the sequences that facts are planted into"
    )
    rope_theta: float | None = Field(
        default=None, gt=0, description="base of the rotary embedding in a stage; None: model.rope_theta"
    )
    cuda_graph: bool | None = Field(
        default=None, description="a stage's steps as CUDA graphs; None: as runtime.cuda_graph has it"
    )

    @model_validator(mode="after")
    def _convert_token_budget(self) -> Self:
        """Steps for a budget: from here on, and in files, a run is counted in steps alone."""
        if self.token_budget is None:
            return self
        if "steps" in self.model_fields_set:
            raise ValueError(
                f"train.token_budget = {self.token_budget} beside train.steps = {self.steps}: both say how long; keep one"
            )
        if self.token_budget < self.tokens_per_step:
            raise ValueError(
                f"train.token_budget = {self.token_budget} does not pay for a step of {self.tokens_per_step} tokens; "
                "raise it, or lower seq_len or the batch"
            )
        # Frozen for everyone else; here it is still being made.
        object.__setattr__(self, "steps", self.token_budget // self.tokens_per_step)
        object.__setattr__(self, "token_budget", None)
        self.model_fields_set.add("steps")
        return self

    @model_validator(mode="after")
    def _check_schedule(self) -> Self:
        if self.warmup_steps >= self.steps and self.warmup_steps:
            raise ValueError(
                f"train.warmup_steps = {self.warmup_steps} is not below train.steps = {self.steps}; "
                f"use at most {self.steps - 1} (both count optimiser steps)"
            )
        if self.lr_schedule != "wsd" and self.decay_share != StageConfig.model_fields["decay_share"].default:
            raise ValueError(
                f"train.decay_share = {self.decay_share} is read by train.lr_schedule: wsd alone, and it is "
                f"{self.lr_schedule}; remove it, or set train.lr_schedule: wsd"
            )
        if self.lr_schedule == "wsd" and self.warmup_steps + self.decay_steps > self.steps:
            raise ValueError(
                f"train.decay_share = {self.decay_share} is {self.decay_steps} of {self.steps} steps, which overlap "
                f"train.warmup_steps = {self.warmup_steps}; lower one of them"
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
    def decay_steps(self) -> int:
        """Steps of the fall at the end of a `wsd` schedule: at least one."""
        return max(round(self.decay_share * self.steps), 1)

    @property
    def sequences_per_step(self) -> int:
        return self.batch_size * self.accumulate_grad_batches

    @property
    def tokens_per_step(self) -> int:
        return self.sequences_per_step * self.seq_len

    @property
    def sequences_per_forward(self) -> int:
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
    optimizer: Literal["adamw", "muon"] = Field(
        default="adamw", description="muon: for the matrices of the blocks, at the same rate; adamw has the rest"
    )
    weight_decay: float = Field(default=0.01, ge=0)
    beta1: float = Field(default=0.9, ge=0, lt=1, description="of adamw, as beta2 and eps are")
    beta2: float = Field(default=0.95, ge=0, lt=1)
    eps: float = Field(default=1e-8, gt=0)
    grad_clip: float = Field(default=1.0, gt=0, description="limit of the global gradient norm")
    seed: int = Field(default=1337, ge=0, lt=2**63)
    log_every: int = Field(default=10, ge=1, le=MAX_COUNT)
    stats_every: int = Field(default=100, ge=1, le=MAX_COUNT, description="steps between gate and selection statistics")
    eval_every: int = Field(default=100, ge=0, le=MAX_COUNT, description="0: before the first step alone")
    eval_batches: int = Field(
        default=8, ge=1, le=MAX_SIZE, description="held-out text: this many times batch_size sequences"
    )
    save_every: int = Field(default=100, ge=0, le=MAX_COUNT, description="0: never")
    keep_last: int = Field(default=3, ge=1, le=MAX_COUNT, description="checkpoints kept besides the permanent ones")
    keep_every: int = Field(default=0, ge=0, le=MAX_COUNT, description="steps between permanent checkpoints; 0: none")
    spike_sigma: float = Field(default=0.0, ge=0, description="halt on a loss this many deviations over its window; 0: off")
    min_tokens_per_s: float = Field(default=0.0, ge=0, description="throughput gate; 0: off")
    stall_action: Literal["record", "halt"] = Field(
        default="record", description="halt: end a phase that lasts far longer than usual; save what can be, exit 3"
    )

    @model_validator(mode="after")
    def _check_stages(self) -> TrainConfig:
        if not self.stages:
            for key, elsewhere in (("rope_theta", "model.rope_theta"), ("cuda_graph", "runtime.cuda_graph")):
                value = getattr(self, key)
                if value is not None:
                    value = str(value).lower() if isinstance(value, bool) else f"{value:g}"
                    raise ValueError(
                        f"train.{key} = {value} belongs into a stage of train.stages; without stages, set "
                        f"{elsewhere}: {value}"
                    )
            return self
        beside = sorted(self.model_fields_set & self.unused_keys)
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
    def _check_token_count(self) -> Self:
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

    def locate_step(self, step: int) -> tuple[int, int]:
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
        return self.plan[self.locate_step(step)[0]]

    @property
    def first_steps(self) -> list[int]:
        """The first optimiser step of every stage."""
        return [1 + sum(stage.steps for stage in self.plan[:index]) for index in range(len(self.plan))]

    def tokens_until(self, step: int) -> int:
        """Tokens that the first `step` optimiser steps take."""
        index, within = self.locate_step(step)
        before = sum(stage.steps * stage.tokens_per_step for stage in self.plan[:index])
        return before + within * self.plan[index].tokens_per_step

    @property
    def tokens(self) -> int:
        """Tokens of the whole run."""
        return self.tokens_until(self.steps)

    def check_ranks(self, n_ranks: int) -> None:
        """Raises `ConfigError` where so many ranks cannot share the sequences of every step evenly."""
        for stage in self.plan:
            divide_among_ranks(stage.sequences_per_step, n_ranks)

    @property
    def longest_stage(self) -> StageConfig:
        """The stage with the longest sequences."""
        return max(self.plan, key=lambda stage: stage.seq_len)

    @property
    def unused_keys(self) -> set[str]:
        """The keys that this run does not read."""
        return set(StageConfig.model_fields) if self.stages else {"stages"}


def divide_among_ranks(n_sequences: int, n_ranks: int) -> int:
    """How many sequences of a step each rank takes. Raises `ConfigError` where they cannot be shared evenly."""
    if n_sequences % n_ranks:
        raise ConfigError(
            f"a step has {n_sequences} sequences (train.batch_size * train.accumulate_grad_batches), which {n_ranks} "
            f"ranks cannot share evenly; use a number of ranks that divides {n_sequences}"
        )
    return n_sequences // n_ranks
