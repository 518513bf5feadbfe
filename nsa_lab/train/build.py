"""Build the context of a training run from its configuration: device, data, model, optimizer.

`Builders` has the two functions that tests replace; everything else follows from the configuration.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from nsa_lab.config import ConfigError, RunConfig, StageConfig
from nsa_lab.data import Dataset, EvalBatches, StagedBatches, make_validation_batches, prepare
from nsa_lab.data.tokenizer import ByteTokenizer
from nsa_lab.model import NSATransformer, SparseAttention
from nsa_lab.model.indexer import freeze_all_but_indexers
from nsa_lab.train.distributed import World
from nsa_lab.train.estimate import check_state_fits
from nsa_lab.train.step import Stepper, make_optimizer
from nsa_lab.train.teacher import make_teacher

if TYPE_CHECKING:
    from nsa_lab.train.sharded_checkpoint import ShardWriter

logger = logging.getLogger("nsa_lab.train")

MAX_COMPILED_SHAPES_PER_STAGE = 16  # twice the default recompile limit of torch


def build_model(config: RunConfig, device: torch.device, *, load_weights: bool = True) -> NSATransformer:
    """Return the model with float32 weights on `device`. With bf16, its attention computes in bfloat16.

    With `train.initial_weights` and `load_weights`, they are pretrained. With `train.trainable: indexer`, all other
    weights are frozen. Raises the errors of `nsa_lab.convert.load_initial_weights`.
    """
    runtime, train = config.runtime, config.train
    dtype = torch.bfloat16 if runtime.precision == "bf16" else torch.float32
    model = NSATransformer(config.model_at(0), backend=runtime.backend, device=device, dtype=dtype, seed=config.train.seed)
    model.gradient_checkpointing = runtime.gradient_checkpointing
    if train.initial_weights and load_weights:
        if config.data.tokenizer == "byte" and config.model.vocab_size > ByteTokenizer.vocab_size:
            raise ConfigError(
                f"data.tokenizer = byte and model.vocab_size = {config.model.vocab_size:,}: expected the tokenizer of "
                f"train.initial_weights = {train.initial_weights}; set data.tokenizer to its tokenizer.json, or use "
                "nsa-lab convert, which sets it"
            )
        from nsa_lab.convert import load_initial_weights  # needs the extra hf

        load_initial_weights(model, train.initial_weights)
    if train.trainable == "indexer":
        freeze_all_but_indexers(model)
        for module in model.modules():
            if isinstance(module, SparseAttention):
                module.trains_densely = True
    return model


@dataclass(frozen=True)
class Builders:
    """Functions that build the model and the data.

    `model(config, device)`. `data(data_config, vocab_size, seq_len, on_progress, recorded_identity)`; `recorded_identity`
    is the data identity that the run recorded at its start, None for a new run.
    """

    model: Callable[[RunConfig, torch.device], NSATransformer] = build_model
    data: Callable[..., Dataset] = prepare


@dataclass
class TrainContext:
    """Everything that a step, an evaluation or a preflight check needs.

    `evaluations`: held-out batches of each stage. `shard_writer`: writes checkpoints if weights are sharded, else None.
    `teacher`: the model of `train.teacher_weight`, if that is above 0.
    """

    config: RunConfig
    world: World
    device: torch.device
    dataset: Dataset
    batches: StagedBatches
    evaluations: tuple[EvalBatches, ...]
    model: NSATransformer
    optimizer: torch.optim.Optimizer
    stepper: Stepper
    shard_writer: ShardWriter | None = None
    teacher: NSATransformer | None = None
    facts: dict[str, Any] = field(default_factory=dict)

    def get_evaluation(self, step: int) -> EvalBatches:
        """Return held-out batches with the sequence length of the stage of `step`."""
        return self.evaluations[self.config.train.locate_step(step)[0]]

    def enter_stage(self, step: int) -> StageConfig:
        """Make forward passes and steps use the settings of the stage of `step`. Return that stage."""
        self.stepper.stage = self.config.train.stage_at(step)
        self.model.config = self.config.model_at(step)
        return self.stepper.stage

    @property
    def use_bf16(self) -> bool:
        return self.config.runtime.precision == "bf16"


def select_device(config: RunConfig, world: World) -> torch.device:
    """Return `runtime.device`; `auto` is CUDA if available.

    Raises `ConfigError` if there is no GPU, if steps are to be CUDA graphs on another device, or if the model's state does
    not fit into the device's memory.
    """
    device = _resolve_device(config, world)
    if device.type != "cuda" and world.size == 1 and any(config.uses_cuda_graph(stage) for stage in config.train.plan):
        raise ConfigError(
            f"cuda_graph = True, in runtime or in a stage: expected a CUDA device, got {device.type}; set it to false"
        )
    check_state_fits(config, device, world.size, replace(world, parallel=config.runtime.parallel).n_shards)
    return device


def _resolve_device(config: RunConfig, world: World) -> torch.device:
    requested = config.runtime.device
    if requested == "cuda" and not torch.cuda.is_available():
        raise ConfigError("runtime.device = 'cuda': torch sees no CUDA device; use auto or cpu, or install a CUDA build")
    if requested == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    if world.local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"local rank {world.local_rank} has no GPU: torch sees {torch.cuda.device_count()} here; "
            "start at most one rank per GPU"
        )
    device = torch.device("cuda", world.local_rank)
    torch.cuda.set_device(device)
    return device


def set_determinism(deterministic: bool) -> None:
    """Enable bit-exact kernels on a GPU. A CPU run is exact without them."""
    if deterministic:
        # cuBLAS reads this variable when its handle is created; this library does not read it.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(deterministic)


def build_context(
    config: RunConfig, world: World, device: torch.device, dataset: Dataset, builders: Builders
) -> TrainContext:
    """Build model, optimizer and batches for data that is already prepared."""
    train = config.train
    use_masking, separator = config.data.documents == "mask", dataset.tokenizer.separator
    batches = StagedBatches(dataset.train, train, config.data, separator)
    evaluations = make_validation_batches(dataset.validation, train, separator if use_masking else None)
    use_bf16 = config.runtime.precision == "bf16"
    world = replace(world, parallel=config.runtime.parallel, context_parallel=config.runtime.context_parallel)
    context_sizes = config.list_context_sizes(world.size)
    model = world.build_model(lambda: builders.model(config, device))
    # Here, also in a resumed run, the model has its initial weights.
    teacher = make_teacher(model, config.runtime) if train.teacher_weight else None
    if config.runtime.compile:
        for compiled in (model, teacher) if teacher else (model,):
            compile_blocks(compiled, len(train.plan))
    # Sharding replaces the parameters, so create the optimizer after it.
    forward = world.wrap(model, device, seed=train.seed, use_bf16=use_bf16)
    optimizer = make_optimizer(model, train)
    stepper = Stepper(
        model,
        forward,
        optimizer,
        train,
        device=device,
        use_bf16=use_bf16,
        world=world,
        use_graph=_make_graph_predicate(config, world),
        auxiliary_loss=model.auxiliary_loss if config.model.has_selection_loss else None,
        separator=separator if use_masking else None,
        context_groups={size: world.make_context_group(size, device) for size in sorted(set(context_sizes)) if size > 1},
        teacher=teacher,
    )
    if world.is_first:
        for line in describe_sharing(config, world.size):
            logger.info("%s", line)
    shard_writer = _make_shard_writer() if world.is_sharded else None
    return TrainContext(
        config, world, device, dataset, batches, evaluations, model, optimizer, stepper, shard_writer, teacher
    )


def describe_sharing(config: RunConfig, n_ranks: int) -> list[str]:
    """Return one line per stage in which several ranks share each sequence."""
    lines: list[str] = []
    for number, (stage, size) in enumerate(zip(config.train.plan, config.list_context_sizes(n_ranks), strict=True), 1):
        if size > 1:
            name = f"stage {number}: " if len(config.train.plan) > 1 else ""
            lines.append(
                f"{name}{stage.sequences_per_step} x {stage.seq_len:,} tokens per step on {n_ranks} ranks: "
                f"{size} ranks share each sequence (context parallelism)"
            )
    return lines


def _make_shard_writer() -> ShardWriter:
    from nsa_lab.train.sharded_checkpoint import ShardWriter  # takes a second to import

    return ShardWriter()


def _make_graph_predicate(config: RunConfig, world: World) -> Callable[[StageConfig], bool]:
    """Return a function that tells whether steps of a stage use a CUDA graph.

    With several ranks, `cuda_graph: true` means: where it is possible. Collectives are not captured, so it is not.
    """
    if world.size == 1:
        return config.uses_cuda_graph
    if world.is_first and any(config.uses_cuda_graph(stage) for stage in config.train.plan):
        logger.info(
            "cuda_graph = True with %d ranks means auto: steps contain collectives and run without a CUDA graph", world.size
        )
    return lambda stage: False


def compile_blocks(model: nn.Module, n_stages: int = 1) -> None:
    """Compile each block in place. Layers share their code, so one compilation serves all layers.

    Every shape is compiled separately; the recompile limit is raised for `n_stages`. It is a setting of the calling
    thread.
    """
    from torch._dynamo import config  # takes most of a second to import

    # Beyond the limit, blocks silently run without compilation. A stage has few shapes: micro-batches, the last of which
    # may be smaller, in training and in evaluation. Document masking adds one per capacity, and one whenever the longest
    # document has another power of two; a dense baseline has further ones for batches with long documents.
    limit = "recompile_limit" if hasattr(config, "recompile_limit") else "cache_size_limit"  # before torch 2.7
    setattr(config, limit, max(getattr(config, limit), MAX_COMPILED_SHAPES_PER_STAGE * n_stages))
    # For DDP, torch would cut a block's graphs where a bucket of gradients is full. The exchange overlaps with other blocks
    # anyway, and the cut of an MLP stores another residual stream per layer, 3 KB per token of width 768.
    config.optimize_ddp = False
    for block in getattr(model, "blocks", [model]):
        block.compile(dynamic=False)


def force_eager() -> Any:
    """Return a context in which compiled blocks run eagerly, for single calls with other shapes."""
    return torch.compiler.set_stance("force_eager")
