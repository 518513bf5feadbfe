"""What a checkpoint holds, taken from a live trainer and put back into one.

Invariants
* Everything the trajectory depends on is either in here or a function of (seed, step): learning rate and batches are the
  latter.
* A checkpoint of another trajectory (other data, other mathematics) is refused, naming what differs.
* The probe, logits of a fixed input, must come out again after loading: equal bits where nothing else changed.
"""

from __future__ import annotations

import io
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save
from torch import Tensor

from nsa_lab.config import RunConfig
from nsa_lab.config.run_config import DEFAULTS_OF_ADDED_KEYS
from nsa_lab.runs import checkpoint_files
from nsa_lab.train.build import TrainContext
from nsa_lab.train.checkpoint import Serializer

MODEL, OPTIMIZER, STATE, PROBE = "model.safetensors", "optimizer.pt", "state.json", "probe.safetensors"

# Settings that a resumed run may change: they decide what is watched, saved and where, not where training goes.
CHANGEABLE_TRAIN_KEYS = frozenset(
    {
        "micro_batch_size",
        "log_every",
        "stats_every",
        "eval_every",
        "eval_batches",
        "save_every",
        "keep_last",
        "keep_every",
        "spike_sigma",
        "min_tokens_per_s",
        "stall_action",
    }
)
CHANGEABLE_DATA_KEYS = frozenset({"path", "timeout_s"})

PROBE_TOKENS = 256
PROBE_TOLERANCE = {"fp32": 1e-4, "bf16": 5e-2}


class ResumeRefused(RuntimeError):
    """The checkpoint belongs to another trajectory, or the code computes something else than the one that wrote it."""


def get_trajectory_settings(config: RunConfig) -> dict[str, Any]:
    """The dotted settings that decide where training goes."""
    sections = config.to_dict()
    # How a stage's batch is grouped on a device is as free as that of a run without stages.
    stages = [
        {k: v for k, v in stage.items() if k not in CHANGEABLE_TRAIN_KEYS} for stage in sections["train"].get("stages", [])
    ]
    if stages:
        sections["train"]["stages"] = stages
    kept = {
        "model": sections["model"],
        "nsa": sections["nsa"],
        "runtime": {"precision": sections["runtime"]["precision"]},
        "train": {k: v for k, v in sections["train"].items() if k not in CHANGEABLE_TRAIN_KEYS},
        "data": {k: v for k, v in sections["data"].items() if k not in CHANGEABLE_DATA_KEYS},
    }
    return {f"{section}.{key}": value for section, values in kept.items() for key, value in values.items()}


def check_same_trajectory(state: dict[str, Any], config: RunConfig, data_identity: str) -> None:
    """Raise `ResumeRefused` unless `state` (of a checkpoint) was on the way that `config` and the data describe."""
    # What neither wrote is at the value that it had before there was such a key.
    unwritten = {
        f"{section}.{key}": value for section, keys in DEFAULTS_OF_ADDED_KEYS.items() for key, value in keys.items()
    }
    now, then = unwritten | get_trajectory_settings(config), unwritten | state["trajectory"]
    changed = [
        f"{key}: {then.get(key)!r} then, {now.get(key)!r} now"
        for key in sorted(now | then)
        if then.get(key) != now.get(key)
    ]
    if state["data_identity"] != data_identity:
        changed.append(f"data: {state['data_identity'][:16]} then, {data_identity[:16]} now")
    if changed:
        raise ResumeRefused(
            "this run cannot go on from its checkpoint, because it would be another run: "
            + "; ".join(changed)
            + ". Put the settings back, or create a new run"
        )


def make_checkpoint_files(
    context: TrainContext, state: dict[str, Any], compute_probe: Callable[[], Tensor]
) -> dict[str, Serializer]:
    """The files of a checkpoint, each serialised when it is written, so that one at a time is in memory."""
    return {
        MODEL: lambda: save(gather_weights(context)),
        OPTIMIZER: lambda: _serialize_torch({"moments": gather_moments(context), "rng": get_rng_states()}),
        STATE: lambda: json.dumps(state, indent=1).encode(),
        PROBE: lambda: save({"logits": compute_probe().contiguous()}),
    }


def gather_weights(context: TrainContext) -> dict[str, Tensor]:
    """Every weight by name, whole, a copy on the CPU. With sharded weights every rank must ask."""
    full = context.world.full_tensor
    return {name: full(t.detach()).to("cpu", copy=True).contiguous() for name, t in context.model.state_dict().items()}


def gather_moments(context: TrainContext) -> dict[str, dict[str, Tensor]]:
    """The optimiser's state by parameter name, whole, on the CPU; it does not depend on the number of ranks."""
    full, state = context.world.full_tensor, context.optimizer.state
    return {
        name: {key: full(value).cpu() for key, value in state[p].items()}
        for name, p in context.model.named_parameters()
        if p in state
    }


def read_state(path: Path) -> dict[str, Any]:
    return json.loads((path / STATE).read_text(encoding="utf-8"))


def restore(path: Path, context: TrainContext) -> None:
    """Put weights, moments and random states back. Every name must match; nothing is left as it was."""
    live, saved = context.model.state_dict(), load_file(path / MODEL)
    if other := checkpoint_files.describe_mismatch(path, saved, live):
        raise ResumeRefused(other)
    context.model.load_state_dict(
        {name: _place_like(context, value, live[name]) for name, value in saved.items()}, strict=True
    )
    rest = torch.load(path / OPTIMIZER, map_location="cpu", weights_only=True)
    context.optimizer.state.clear()
    for name, parameter in context.model.named_parameters():
        if name in rest["moments"]:
            # The counter is a scalar and is copied to every rank; moments are sharded as their weights are.
            context.optimizer.state[parameter] = {
                key: _place_like(context, value, parameter) if value.ndim else value.to(context.device)
                for key, value in rest["moments"][name].items()
            }
    restore_rng(rest["rng"])


def check_probe(path: Path, logits: Tensor, *, require_equal: bool, precision: str) -> float:
    """Compare the probe with what the restored model gives; the largest difference, relative to the largest logit.

    Raises `ResumeRefused` beyond the tolerance (0 if `exact`).
    """
    saved = load_file(path / PROBE)["logits"]
    limit = 0.0 if require_equal else PROBE_TOLERANCE[precision]
    if saved.shape != logits.shape:
        raise ResumeRefused(f"{path.name}: the probe has shape {tuple(saved.shape)}, this model's is {tuple(logits.shape)}")
    difference = float((saved - logits).abs().max() / saved.abs().max().clamp_min(1e-30))
    if not difference <= limit:
        raise ResumeRefused(
            f"{path.name}: its files match their checksums, but the model gives other logits for the probe (relative "
            f"difference {difference:.3g}, allowed {limit:g}): the code or a kernel computes something else than when it "
            "was saved. Go back to the code of environment.json, or create a new run"
        )
    return difference


def make_probe_input(vocab_size: int, seq_len: int) -> Tensor:
    """A fixed token sequence `[1, min(seq_len, 256)]`."""
    return (torch.arange(min(seq_len, PROBE_TOKENS)) * 7919 + 11).remainder(vocab_size)[None]


def get_rng_states() -> dict[str, Any]:
    version, python, gauss = random.getstate()
    state = np.random.get_state(legacy=True)
    assert isinstance(state, tuple), "legacy=True asks for the tuple"
    name, keys, position, has_gauss, cached = state
    return {
        "python": [version, list(python), gauss],
        "numpy": [str(name), torch.from_numpy(keys.astype(np.int64)), int(position), int(has_gauss), float(cached)],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def restore_rng(states: dict[str, Any]) -> None:
    """Training draws no random numbers of its own; the states are put back for whoever adds something that does."""
    version, python, gauss = states["python"]
    random.setstate((version, tuple(python), gauss))
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(states["torch"])
    if len(states["cuda"]) == torch.cuda.device_count() and states["cuda"]:
        torch.cuda.set_rng_state_all(states["cuda"])


def _place_like(context: TrainContext, value: Tensor, reference: Tensor) -> Tensor:
    return context.world.distribute_like(value.to(context.device), reference)


def _serialize_torch(value: Any) -> memoryview:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getbuffer()
