"""The parts of a trainer, built from a configuration: device, data, model, optimiser.

`Builders` names the two that tests replace; everything else follows from the configuration.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from nsa_lab.config import ConfigError, RunConfig, StageConfig
from nsa_lab.data import Dataset, EvalBatches, StagedBatches, make_validation_batches, prepare
from nsa_lab.model import NSATransformer
from nsa_lab.train.distributed import World
from nsa_lab.train.estimate import check_state_fits
from nsa_lab.train.step import Stepper, make_optimizer

MAX_COMPILED_SHAPES_PER_STAGE = 16  # twice torch's own limit of what it compiles one function for


def build_model(config: RunConfig, device: torch.device) -> NSATransformer:
    """The model with float32 weights on `device`; under bf16 its attention computes in bfloat16."""
    runtime = config.runtime
    dtype = torch.bfloat16 if runtime.precision == "bf16" else torch.float32
    model = NSATransformer(config.model_at(0), backend=runtime.backend, device=device, dtype=dtype, seed=config.train.seed)
    model.gradient_checkpointing = runtime.gradient_checkpointing
    return model


@dataclass(frozen=True)
class Builders:
    """How a model is made of (configuration, device), and a data set of (data section, vocab_size, seq_len, progress, the
    identity that the run began with)."""

    model: Callable[[RunConfig, torch.device], NSATransformer] = build_model
    data: Callable[..., Dataset] = prepare


@dataclass
class TrainContext:
    """Everything that a step, an evaluation or a check needs."""

    config: RunConfig
    world: World
    device: torch.device
    dataset: Dataset
    batches: StagedBatches
    # One for each stage.
    evaluations: tuple[EvalBatches, ...]
    model: NSATransformer
    optimizer: torch.optim.Optimizer
    stepper: Stepper
    facts: dict[str, Any] = field(default_factory=dict)

    def get_evaluation(self, step: int) -> EvalBatches:
        """Held-out text in sequences as long as those of the stage that `step` belongs to."""
        return self.evaluations[self.config.train.locate_step(step)[0]]

    def enter_stage(self, step: int) -> StageConfig:
        """From here on, forward passes and steps are those of the stage that `step` belongs to."""
        self.stepper.stage = self.config.train.stage_at(step)
        self.model.config = self.config.model_at(step)
        return self.stepper.stage

    @property
    def use_bf16(self) -> bool:
        return self.config.runtime.precision == "bf16"


def select_device(config: RunConfig, world: World) -> torch.device:
    """`runtime.device`, with `auto` taking CUDA where there is one.

    Raises `ConfigError` for a GPU that is not there, and for a device that the model's state does not fit into.
    """
    device = _resolve_device(config, world)
    check_state_fits(config, device, world.size)
    return device


def _resolve_device(config: RunConfig, world: World) -> torch.device:
    wanted = config.runtime.device
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError("runtime.device = 'cuda': torch sees no CUDA device; use auto or cpu, or install a CUDA build")
    if wanted == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    if world.local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"local rank {world.local_rank} has no GPU: torch sees {torch.cuda.device_count()} here; "
            "start at most one rank for each"
        )
    device = torch.device("cuda", world.local_rank)
    torch.cuda.set_device(device)
    return device


def set_determinism(deterministic: bool) -> None:
    """Bit-exact kernels on a GPU. A CPU run is exact without it."""
    if deterministic:
        # cuBLAS reads this when its handle is made; nothing of ours does.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(deterministic)


def build_context(
    config: RunConfig, world: World, device: torch.device, dataset: Dataset, builders: Builders
) -> TrainContext:
    """Model, optimiser and batches around data that is ready."""
    train = config.train
    masked, separator = config.data.documents == "mask", dataset.tokenizer.separator
    batches = StagedBatches(dataset.train, train, config.data, separator)
    evaluations = make_validation_batches(dataset.validation, train, separator if masked else None)
    world = replace(world, sharded=config.runtime.parallel == "fsdp" and world.size > 1)
    model = builders.model(config, device)
    if config.runtime.compile:
        compile_blocks(model, len(train.plan))
    # Sharding replaces the parameters, which the optimiser must not have seen before.
    forward = world.wrap(model)
    optimizer = make_optimizer(model, train)
    stepper = Stepper(
        model,
        forward,
        optimizer,
        train,
        device=device,
        use_bf16=config.runtime.precision == "bf16",
        world=world,
        use_graph=_make_graph_predicate(config, world, device),
        auxiliary_loss=model.auxiliary_loss if config.model.has_selection_loss else None,
        separator=separator if masked else None,
    )
    return TrainContext(config, world, device, dataset, batches, evaluations, model, optimizer, stepper)


def _make_graph_predicate(config: RunConfig, world: World, device: torch.device) -> Callable[[StageConfig], bool]:
    if any(config.uses_cuda_graph(stage) for stage in config.train.plan) and (device.type != "cuda" or world.size > 1):
        raise ConfigError(
            f"cuda_graph = True, of runtime or of a stage, needs one CUDA device, and this is {world.size} rank(s) on "
            f"{device.type}; set it to false"
        )
    return config.uses_cuda_graph


def compile_blocks(model: nn.Module, n_stages: int = 1) -> None:
    """Compile each block in place: layers share their code, so that one compilation serves all of them.

    Each shape is compiled by itself, and those of so many `stages` are kept. It holds in the thread that calls.
    """
    from torch._dynamo import config  # most of a second to load

    # Beyond the limit blocks run uncompiled, without an error. A stage has few shapes: micro-batches, the last one smaller,
    # in training and in evaluation, and of documents told apart one more for each capacity, and where their longest has
    # another power of two; a dense twin has others for batches with long documents.
    limit = "recompile_limit" if hasattr(config, "recompile_limit") else "cache_size_limit"  # before torch 2.7
    setattr(config, limit, max(getattr(config, limit), MAX_COMPILED_SHAPES_PER_STAGE * n_stages))
    for block in getattr(model, "blocks", [model]):
        block.compile(dynamic=False)


def force_eager() -> Any:
    """A context in which compiled blocks run as plain Python: for single calls on shapes of their own."""
    return torch.compiler.set_stance("force_eager")
