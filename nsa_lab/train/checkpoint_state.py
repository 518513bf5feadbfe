"""The contents of a checkpoint: collected from a training context, and restored into one.

Invariants
* Everything that the trajectory depends on is either in the checkpoint or a function of (seed, step): learning rate and
  batches are functions of (seed, step).
* A checkpoint of another trajectory (other data or other mathematics) is refused, with the settings that differ.
* The logits of a fixed input, the probe, must be reproduced after loading: bit for bit if nothing else has changed.
"""

from __future__ import annotations

import io
import json
import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save
from torch import Tensor

from nsa_lab.config import RunConfig
from nsa_lab.runs import checkpoint_files
from nsa_lab.runs.checkpoint_files import MODEL, OPTIMIZER, PROBE, RANDOM, STATE
from nsa_lab.runs.trajectory import list_changed_settings
from nsa_lab.train.build import TrainContext
from nsa_lab.train.checkpoint import Serializer

# The parts of a sharded checkpoint, as in nsa_lab.model.sharded_files, which takes a second to import.
WEIGHTS, MOMENTS = "weights", "moments"

PROBE_TOKENS = 256
PROBE_TOLERANCE = {"fp32": 1e-4, "bf16": 5e-2}


class ResumeRefused(RuntimeError):
    """The checkpoint belongs to another trajectory, or the code computes something else than when it was saved."""


def check_same_trajectory(state: dict[str, Any], config: RunConfig, data_identity: str, teacher: str | None = None) -> None:
    """Raise `ResumeRefused` unless the checkpoint with this `state` is on the trajectory of `config` and the data.

    `teacher`: fingerprint of the teacher's weights; None: no teacher.
    """
    differences = list_changed_settings(state["trajectory"], config)
    if state["data_identity"] != data_identity:
        differences.append(f"data: {state['data_identity'][:16]} in the checkpoint, {data_identity[:16]} now")
    if state.get("teacher") != teacher:
        differences.append(
            f"weights of the teacher (train.initial_weights): {state.get('teacher')} in the checkpoint, {teacher} now"
        )
    if differences:
        raise ResumeRefused(
            "this run cannot resume from its checkpoint, because its trajectory would change: "
            + "; ".join(differences)
            + ". Restore these settings, or create a new run"
        )


def make_checkpoint_files(
    context: TrainContext, state: Mapping[str, Any], compute_probe: Callable[[], Tensor]
) -> dict[str, Serializer]:
    """Return the files of a single-file checkpoint by name.

    Each is serialized when it is written, so one at a time is in memory.
    """
    return {
        MODEL: lambda: save(collect_weights(context)),
        OPTIMIZER: lambda: serialize_torch({"moments": collect_moments(context), "rng": get_rng_states()}),
        STATE: lambda: json.dumps(state, indent=1).encode(),
        PROBE: lambda: save({"logits": compute_probe().contiguous()}),
    }


def make_small_files(state: Mapping[str, Any], probe: Tensor) -> dict[str, Serializer]:
    """Return the files of a sharded checkpoint that rank 0 writes in addition to the shards."""
    rng = get_rng_states()
    return {
        RANDOM: lambda: serialize_torch({"rng": rng}),
        STATE: lambda: json.dumps(state, indent=1).encode(),
        PROBE: lambda: save({"logits": probe.contiguous()}),
    }


def collect_weights(context: TrainContext) -> dict[str, Tensor]:
    """Return copies of all weights by name, on the CPU."""
    state = context.model.state_dict()
    return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in state.items()}


def collect_moments(context: TrainContext) -> dict[str, dict[str, Tensor]]:
    """Return the optimizer state by parameter name, on the CPU."""
    return {name: {key: value.cpu() for key, value in moments.items()} for name, moments in _list_moments(context)}


def collect_shards(context: TrainContext) -> dict[str, dict[str, Any]]:
    """Return the sharded weights and optimizer state, as `sharded_files.fill_tensors` takes them. They are no copies."""
    weights = {name: tensor.detach() for name, tensor in context.model.state_dict().items()}
    return {WEIGHTS: weights, MOMENTS: dict(_list_moments(context))}


def count_bytes(shards: Mapping[str, Mapping[str, Any]]) -> int:
    """Return the size of the full tensors of `collect_shards`, in bytes."""
    tensors = [*shards[WEIGHTS].values(), *(value for moments in shards[MOMENTS].values() for value in moments.values())]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _list_moments(context: TrainContext) -> Iterator[tuple[str, dict[str, Tensor]]]:
    state = context.optimizer.state
    for name, parameter in context.model.named_parameters():
        if parameter in state:
            yield name, state[parameter]


def read_state(path: Path) -> dict[str, Any]:
    return json.loads((path / STATE).read_text(encoding="utf-8"))


def restore(path: Path, context: TrainContext) -> None:
    """Restore weights, moments and random states of a single-file or sharded checkpoint, in any number of ranks.

    Every name must match; all previous state is replaced. Raises `ResumeRefused`. Collective.
    """
    if (path / MODEL).is_file():
        _restore_single_file(path, context)
        return
    from nsa_lab.train import sharded_checkpoint

    if mismatch := sharded_checkpoint.restore(path, context):
        raise ResumeRefused(mismatch)
    restore_rng(torch.load(path / RANDOM, map_location="cpu", weights_only=True)["rng"])


def _restore_single_file(path: Path, context: TrainContext) -> None:
    parameters = dict(context.model.named_parameters())
    with safe_open(path / MODEL, framework="pt") as saved:
        names = saved.keys()
        slices = {name: saved.get_slice(name) for name in names}
        shapes = {name: torch.empty(weight.get_shape(), device="meta") for name, weight in slices.items()}
        if mismatch := checkpoint_files.describe_mismatch(path, shapes, parameters):
            raise ResumeRefused(mismatch)
        for name, weight in slices.items():
            context.world.copy_rows(parameters[name], weight)
    # Mapped, so that a rank of a sharded model reads only its own rows.
    training_state = torch.load(path / OPTIMIZER, map_location="cpu", weights_only=True, mmap=True)
    context.optimizer.state.clear()
    for name, parameter in parameters.items():
        if name in training_state["moments"]:
            context.optimizer.state[parameter] = {
                key: _make_moment(context, parameter, value) for key, value in training_state["moments"][name].items()
            }
    restore_rng(training_state["rng"])


def _make_moment(context: TrainContext, parameter: Tensor, saved: Tensor) -> Tensor:
    """Return a moment of `parameter`, sharded as it is. The step counter is a scalar, copied to every rank."""
    if not saved.ndim:
        return saved.to(context.device, copy=True)
    moment = torch.zeros_like(parameter, requires_grad=False)
    context.world.copy_rows(moment, saved)
    return moment


def check_probe(path: Path, logits: Tensor, *, require_equal: bool, precision: str) -> float:
    """Compare the saved probe with `logits` of the restored model.

    Return the largest difference relative to the largest logit. Raises `ResumeRefused` above the tolerance, which is 0
    with `require_equal`.
    """
    saved = load_file(path / PROBE)["logits"]
    limit = 0.0 if require_equal else PROBE_TOLERANCE[precision]
    if saved.shape != logits.shape:
        raise ResumeRefused(f"{path.name}: expected a probe of shape {tuple(logits.shape)}, got {tuple(saved.shape)}")
    difference = float((saved - logits).abs().max() / saved.abs().max().clamp_min(1e-30))
    if not difference <= limit:
        raise ResumeRefused(
            f"{path.name}: its files match their checksums, but the model computes other logits for the probe (relative "
            f"difference {difference:.3g}, allowed {limit:g}): the code or a kernel has changed since it was saved. "
            "Use the code version in environment.json, or create a new run"
        )
    return difference


def make_probe_input(vocab_size: int, seq_len: int) -> Tensor:
    """Return the fixed probe tokens, [1, min(seq_len, 256)]."""
    return (torch.arange(min(seq_len, PROBE_TOKENS)) * 7919 + 11).remainder(vocab_size)[None]


def get_rng_states() -> dict[str, Any]:
    version, python_state, gauss = random.getstate()
    state = np.random.get_state(legacy=True)
    assert isinstance(state, tuple), "legacy=True returns a tuple"
    name, keys, position, has_gauss, cached = state
    return {
        "python": [version, list(python_state), gauss],
        "numpy": [str(name), torch.from_numpy(keys.astype(np.int64)), int(position), int(has_gauss), float(cached)],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def restore_rng(states: dict[str, Any]) -> None:
    """Restore the random states. Training draws no random numbers today; this is for code that may do so later."""
    version, python_state, gauss = states["python"]
    random.setstate((version, tuple(python_state), gauss))
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(states["torch"])
    if len(states["cuda"]) == torch.cuda.device_count() and states["cuda"]:
        torch.cuda.set_rng_state_all(states["cuda"])


def serialize_torch(value: Any) -> memoryview:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getbuffer()
