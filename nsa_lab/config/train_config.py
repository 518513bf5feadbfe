"""Sections `runtime` and `train`: device and execution settings, and the training schedule."""

from __future__ import annotations

import math
from typing import Literal, Self

from pydantic import Field, model_validator

from nsa_lab.config.base import MAX_COUNT, MAX_SIZE, Section
from nsa_lab.config.errors import ConfigError

Backend = Literal["auto", "reference", "torch", "triton", "flash"]


class RuntimeConfig(Section):
    """Device and execution settings of a run. They affect the results only by rounding."""

    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="auto: CUDA if available, else CPU")
    precision: Literal["fp32", "bf16"] = Field(default="fp32", description="bf16: autocast with fp32 master weights")
    backend: Backend = Field(default="auto", description="attention backend; auto: the fastest one that can run")
    compile: bool = Field(default=False, description="torch.compile the model")
    gradient_checkpointing: bool = Field(
        default=False, description="recompute the activations of each block in the backward pass: less memory, slower"
    )
    cuda_graph: bool = Field(
        default=False, description="capture forward and backward pass of a step as a CUDA graph; faster for small batches"
    )
    deterministic: bool = Field(default=False, description="make resuming bit-exact on a GPU too, which is slower")
    parallel: Literal["ddp", "fsdp", "hsdp"] = Field(
        default="ddp",
        description="with several ranks; ddp: replicate the model on each, fsdp: shard weights and optimizer state, "
        "hsdp: shard them within each host and replicate them over hosts",
    )
    context_parallel: int = Field(
        default=1,
        ge=1,
        le=MAX_SIZE,
        description="ranks that share each sequence; more where the ranks cannot share the sequences of a step otherwise",
    )
    heartbeat_s: float = Field(default=10.0, ge=0.001, le=86_400, description="seconds between heartbeat events")
    profile: Literal["smoke", "production"] = Field(
        default="smoke", description="production: preflight rejects toy models, save_every 0 and synthetic data"
    )

    @model_validator(mode="after")
    def _check_cuda_graph(self) -> RuntimeConfig:
        if self.cuda_graph:
            self.check_cuda_graph("runtime.cuda_graph")
        return self

    def check_cuda_graph(self, key: str) -> None:
        """Raise ValueError if steps cannot be replayed as CUDA graphs; `key` is the setting that requests it."""
        if self.gradient_checkpointing:
            raise ValueError(
                f"{key} and runtime.gradient_checkpointing exclude each other: recomputation saves random state, "
                "which a graph cannot capture; set one of them to false"
            )
        if self.device == "cpu":
            raise ValueError(f"{key} = True needs runtime.device: cuda; set it to false on a CPU")


class StageConfig(Section):
    """One stage of training with a fixed sequence length, batch and schedule. All counts are in optimizer steps."""

    steps: int = Field(default=200, ge=1, le=MAX_COUNT, description="optimizer steps")
    token_budget: int | None = Field(
        default=None, ge=1, description="number of training tokens, instead of steps; rounded down to whole steps"
    )
    seq_len: int = Field(default=512, ge=2, le=MAX_COUNT, description="tokens per sequence")
    batch_size: int = Field(default=4, ge=1, le=MAX_SIZE, description="sequences per forward pass")
    accumulate_grad_batches: int = Field(default=1, ge=1, le=MAX_SIZE, description="forward passes per optimizer step")
    micro_batch_size: int | None = Field(
        default=None,
        ge=1,
        le=MAX_SIZE,
        description="maximum sequences per forward pass on this device; regroups the batch without changing the gradient",
    )
    lr: float = Field(default=2e-4, gt=0, description="peak learning rate")
    lr_schedule: Literal["cosine", "constant", "wsd"] = Field(
        default="cosine", description="wsd: warmup, constant at lr, then linear decay to min_lr over the last decay_share"
    )
    decay_share: float = Field(default=0.2, gt=0, le=1, description="wsd: fraction of the steps in the final decay")
    min_lr: float = Field(default=0.0, ge=0, description="learning rate at the last step")
    warmup_steps: int = Field(default=0, ge=0, le=MAX_COUNT, description="steps of linear warmup")
    min_document_tokens: int = Field(
        default=0, ge=0, le=MAX_COUNT, description="exclude shorter documents from training; held-out text keeps them"
    )
    planted_share: float = Field(
        default=1.0, ge=0, le=1, description="data.source: recall: fraction of the sequences that contain inserted facts"
    )
    rope_theta: float | None = Field(default=None, gt=0, description="RoPE base in this stage; None: model.rope_theta")
    cuda_graph: bool | None = Field(
        default=None, description="replay the steps of this stage as CUDA graphs; None: as runtime.cuda_graph"
    )

    @model_validator(mode="after")
    def _convert_token_budget(self) -> Self:
        """Replace the token budget by a number of steps; files and records contain only steps."""
        if self.token_budget is None:
            return self
        if "steps" in self.model_fields_set:
            raise ValueError(
                f"train.token_budget = {self.token_budget} and train.steps = {self.steps} both set the length; keep one"
            )
        if self.token_budget < self.tokens_per_step:
            raise ValueError(
                f"train.token_budget = {self.token_budget} is less than one step of {self.tokens_per_step} tokens; "
                "raise it, or lower seq_len or the batch"
            )
        # The instance is frozen only after validation.
        object.__setattr__(self, "steps", self.token_budget // self.tokens_per_step)
        object.__setattr__(self, "token_budget", None)
        self.model_fields_set.add("steps")
        return self

    @model_validator(mode="after")
    def _check_schedule(self) -> Self:
        if self.warmup_steps >= self.steps and self.warmup_steps:
            raise ValueError(
                f"train.warmup_steps = {self.warmup_steps} is not below train.steps = {self.steps}; "
                f"use at most {self.steps - 1} (both count optimizer steps)"
            )
        if self.lr_schedule != "wsd" and self.decay_share != StageConfig.model_fields["decay_share"].default:
            raise ValueError(
                f"train.decay_share = {self.decay_share} is used only by train.lr_schedule: wsd, not by "
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
            nearest = max(m for m in range(1, self.micro_batch_size + 1) if self.sequences_per_step % m == 0)
            raise ValueError(
                f"train.micro_batch_size = {self.micro_batch_size} does not divide the "
                f"{self.sequences_per_step} sequences of a step; use {nearest}"
            )
        return self

    @property
    def decay_steps(self) -> int:
        """Number of steps in the final decay of a `wsd` schedule, at least one."""
        return max(round(self.decay_share * self.steps), 1)

    @property
    def sequences_per_step(self) -> int:
        return self.batch_size * self.accumulate_grad_batches

    @property
    def tokens_per_step(self) -> int:
        return self.sequences_per_step * self.seq_len

    @property
    def sequences_per_forward(self) -> int:
        """Number of sequences per forward pass, if there is one rank."""
        return self.micro_batch_size or self.batch_size


class TrainConfig(StageConfig):
    """Training settings. All counts are in optimizer steps unless the name says otherwise.

    With `stages`, the keys of `StageConfig` are set in each stage and not here. Read from here, they have the values
    of the last stage, except `steps`, which is the total. Code that depends on the step uses `plan` and `locate_step`.
    """

    stages: tuple[StageConfig, ...] = Field(
        default=(), strict=False, description="consecutive training stages, each with its own seq_len, batch_size, lr, ..."
    )
    optimizer: Literal["adamw", "muon"] = Field(
        default="adamw", description="muon: Muon for the matrices of the blocks and AdamW for the rest, with the same lr"
    )
    weight_decay: float = Field(default=0.01, ge=0, description="decoupled weight decay of all matrices")
    beta1: float = Field(default=0.9, ge=0, lt=1, description="AdamW, like beta2 and eps")
    beta2: float = Field(default=0.95, ge=0, lt=1, description="AdamW")
    eps: float = Field(default=1e-8, gt=0, description="AdamW")
    grad_clip: float = Field(default=1.0, gt=0, description="maximum global gradient norm")
    seed: int = Field(default=1337, ge=0, lt=2**63, description="seed of the initial weights and of the order of the text")
    initial_weights: str | None = Field(
        default=None,
        min_length=1,
        description="pretrained dense model that is converted: an id of the Hugging Face Hub, a folder, a GGUF file, a "
        "package that contains one, or a dense run of this project; None: random weights",
    )
    trainable: Literal["all", "indexer"] = Field(
        default="all",
        description="indexer: only the indexer is trained, while every layer attends to all tokens; evaluations attend to "
        "the selected blocks",
    )
    teacher_weight: float = Field(
        default=0.0,
        ge=0,
        description="weight of KL(teacher || model) in the training loss; the teacher has the initial weights and attends "
        "to all tokens; 0: no teacher",
    )
    log_every: int = Field(default=10, ge=1, le=MAX_COUNT, description="steps between logged steps")
    stats_every: int = Field(default=100, ge=1, le=MAX_COUNT, description="steps between gate and selection statistics")
    eval_every: int = Field(default=100, ge=0, le=MAX_COUNT, description="0: only before the first step")
    eval_batches: int = Field(
        default=8, ge=1, le=MAX_SIZE, description="held-out text per evaluation, in batches of batch_size sequences"
    )
    save_every: int = Field(default=100, ge=0, le=MAX_COUNT, description="0: never")
    keep_last: int = Field(default=3, ge=1, le=MAX_COUNT, description="latest checkpoints to keep, plus permanent ones")
    keep_every: int = Field(default=0, ge=0, le=MAX_COUNT, description="steps between permanent checkpoints; 0: none")
    spike_sigma: float = Field(
        default=0.0, ge=0, description="halt if the loss exceeds its recent mean by this many standard deviations; 0: off"
    )
    min_tokens_per_s: float = Field(default=0.0, ge=0, description="minimum training throughput; 0: off")
    stall_action: Literal["record", "halt"] = Field(
        default="record", description="halt: end a phase that takes far longer than usual, save if possible, exit with 3"
    )

    @model_validator(mode="after")
    def _check_stages(self) -> TrainConfig:
        if not self.stages:
            for key, elsewhere in (("rope_theta", "model.rope_theta"), ("cuda_graph", "runtime.cuda_graph")):
                value = getattr(self, key)
                if value is not None:
                    value = str(value).lower() if isinstance(value, bool) else f"{value:g}"
                    raise ValueError(
                        f"train.{key} = {value} is a setting of a stage in train.stages; without stages, set "
                        f"{elsewhere}: {value}"
                    )
            return self
        conflicting = sorted(self.model_fields_set & self.unused_keys)
        if conflicting:
            raise ValueError(
                f"train.stages and {', '.join(f'train.{key}' for key in conflicting)}: every stage has its own; "
                "move the keys into the stages, or remove train.stages"
            )
        for index, stage in enumerate(self.stages):
            missing = [key for key in ("steps", "seq_len", "batch_size", "lr") if key not in stage.model_fields_set]
            if missing:
                raise ValueError(f"train.stages.{index} has no {', '.join(missing)}; set them in every stage")
        # The instance is frozen only after validation.
        for key, value in (*self.stages[-1], ("steps", sum(stage.steps for stage in self.stages))):
            object.__setattr__(self, key, value)
        return self

    @model_validator(mode="after")
    def _check_token_count(self) -> Self:
        if self.tokens >= 2**63:
            raise ValueError(
                f"train.steps = {self.steps}: this run would train on {self.tokens:.2g} tokens, which exceeds 64 bits; "
                "lower the steps, seq_len or the batch"
            )
        return self

    @property
    def plan(self) -> tuple[StageConfig, ...]:
        """The stages in order; without `stages`, the single stage that this section describes."""
        return self.stages or (self,)

    def locate_step(self, step: int) -> tuple[int, int]:
        """Return the stage of optimizer step `step`, as an index into `plan`, and the step's number in it, from 1.

        Step 0, before training, belongs to the first stage. Raise ValueError for a step outside the run.
        """
        step_in_stage = step
        for index, stage in enumerate(self.plan):
            if 0 <= step_in_stage <= stage.steps:
                return index, step_in_stage
            step_in_stage -= stage.steps
        raise ValueError(f"step {step} is outside 0..{self.steps}, the optimizer steps of this run")

    def stage_at(self, step: int) -> StageConfig:
        return self.plan[self.locate_step(step)[0]]

    @property
    def first_steps(self) -> list[int]:
        """First optimizer step of every stage."""
        return [1 + sum(stage.steps for stage in self.plan[:index]) for index in range(len(self.plan))]

    def tokens_until(self, step: int) -> int:
        """Return the number of tokens in the first `step` optimizer steps."""
        index, step_in_stage = self.locate_step(step)
        tokens_before = sum(stage.steps * stage.tokens_per_step for stage in self.plan[:index])
        return tokens_before + step_in_stage * self.plan[index].tokens_per_step

    @property
    def tokens(self) -> int:
        """Number of tokens of the entire run."""
        return self.tokens_until(self.steps)

    def check_ranks(self, n_ranks: int, context_parallel: int = 1) -> None:
        """Raise `ConfigError` unless `n_ranks` ranks can share every step; see `compute_context_size`."""
        for stage in self.plan:
            size = compute_context_size(stage.sequences_per_step, n_ranks, context_parallel)
            if stage.seq_len < 2 * size:
                raise ConfigError(
                    f"a step has {stage.sequences_per_step} sequences of {stage.seq_len} tokens (train.batch_size * "
                    f"train.accumulate_grad_batches), which {n_ranks} ranks cannot share evenly: {size} ranks would share "
                    f"each sequence, and a rank takes at least 2 tokens of it; use a number of ranks that divides "
                    f"{stage.sequences_per_step}, or fewer"
                )

    def list_context_sizes(self, n_ranks: int, context_parallel: int = 1) -> list[int]:
        """Return the number of ranks that share each sequence, for every stage of `plan`."""
        return [compute_context_size(stage.sequences_per_step, n_ranks, context_parallel) for stage in self.plan]

    @property
    def longest_stage(self) -> StageConfig:
        """The stage with the longest sequences."""
        return max(self.plan, key=lambda stage: stage.seq_len)

    @property
    def unused_keys(self) -> set[str]:
        """Keys that this run does not use."""
        return set(StageConfig.model_fields) if self.stages else {"stages"}


def compute_context_size(n_sequences: int, n_ranks: int, context_parallel: int = 1) -> int:
    """Return the number of ranks that share each of the `n_sequences` sequences of a step: 1 without context parallelism.

    It is the smallest multiple of `context_parallel` for which groups of this size share the sequences evenly. Raise
    `ConfigError` if `context_parallel` does not divide `n_ranks`.
    """
    if n_ranks % context_parallel:
        raise ConfigError(
            f"runtime.context_parallel = {context_parallel}: expected a divisor of the number of ranks, {n_ranks}; "
            f"set {math.gcd(n_ranks, context_parallel)}, or start a multiple of {context_parallel} ranks"
        )
    return n_ranks // math.gcd(n_sequences, n_ranks // context_parallel)
