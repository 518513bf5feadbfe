"""Check that the files of a checkpoint have the content that a resumed run reads, before any of it is used.

A file may match its digest and still be of another program, or incomplete when it was signed. Such a checkpoint is
quarantined like a damaged one.
"""

from __future__ import annotations

import json
import pickle
import random
import zipfile
from collections.abc import Callable, Iterable, Mapping, Set
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from nsa_lab.model.indexer import is_indexer_weight
from nsa_lab.runs.atomic_io import parse_unique_json, read_bounded
from nsa_lab.runs.checkpoint_files import MODEL, OPTIMIZER, PROBE, RANDOM, STATE, parse_step
from nsa_lab.runs.event_fields import is_finite, is_int
from nsa_lab.runs.finite_weights import describe_nonfinite, find_nonfinite_weights
from nsa_lab.train.checkpoint_state import WEIGHTS
from nsa_lab.train.muon import is_muon_weight

MAX_STATE_BYTES = 1 << 24
# Errors of reading a file of unexpected content.
READ_ERRORS = (
    *(OSError, ValueError, TypeError, LookupError, AttributeError, RuntimeError, ArithmeticError, RecursionError),
    *(EOFError, SafetensorError, pickle.UnpicklingError, zipfile.BadZipFile, MemoryError),
)
_STATE_TYPES: dict[str, type] = {
    **dict.fromkeys(("trajectory", "code", "versions", "backend", "guard"), dict),
    **dict.fromkeys(("data_identity", "device"), str),
    **dict.fromkeys(("step", "threads", "ranks"), int),
}
_WEIGHT_TYPE = "F32"  # of the weights that are trained, at every precision
_ADAMW_MOMENTS, _MUON_MOMENTS = {"step", "exp_avg", "exp_avg_sq"}, {"momentum_buffer"}
_NONNEGATIVE = ("exp_avg_sq", "step")
_FLOAT_TYPES = ("F64", "F32", "F16", "BF16")


class ContentError(ValueError):
    """A file has another content than a checkpoint of this program."""


def find_problems(checkpoint: Path) -> list[str]:
    """Return one problem per file of a checkpoint whose content cannot be restored. Empty if all can."""
    checks: dict[str, Callable[[Path], None]] = {STATE: _check_state, PROBE: _check_probe}
    if (checkpoint / MODEL).is_file():
        checks |= {MODEL: _check_weights, OPTIMIZER: _check_optimizer}
    else:
        checks |= {RANDOM: _check_random}
    problems = []
    for name, check in checks.items():
        try:
            check(checkpoint / name)
        except READ_ERRORS as error:
            reason = str(error) if isinstance(error, ContentError) else f"{type(error).__name__}: {error}"
            problems.append(f"{name} cannot be read ({' '.join(reason.split())[:200]})")
    return problems or _find_shard_problems(checkpoint)


def _find_shard_problems(checkpoint: Path) -> list[str]:
    if (checkpoint / MODEL).is_file():
        return []
    from nsa_lab.model import sharded_files

    weights, moments = set[str](), dict[str, set[str]]()
    try:
        for key, tensor in sharded_files.iterate_tensors(checkpoint):
            part, _, name = key.partition(".")
            if part == WEIGHTS:
                _check_values(key, tensor)
                weights.add(name)
            else:
                _check_moment(checkpoint, key, tensor)
                weight, _, kind = name.rpartition(".")
                moments.setdefault(weight, set()).add(kind)
        _check_moment_names(checkpoint, moments, weights)
    except ContentError as error:
        return [str(error)]
    except (sharded_files.ShardError, *READ_ERRORS) as error:
        return [f"{sharded_files.INDEX} cannot be read ({' '.join(str(error).split())[:200]})"]
    return []


def _check_state(path: Path) -> None:
    state = parse_unique_json(read_bounded(path, MAX_STATE_BYTES))
    if not isinstance(state, dict):
        raise ContentError(f"expected a mapping, got {state!r:.40}")
    for name, kind in _STATE_TYPES.items():
        if type(state.get(name)) is not kind:
            raise ContentError(f"{name}: expected {kind.__name__}, got {state.get(name)!r:.40}")
    losses = state["guard"].get("losses")
    if not isinstance(losses, list) or not all(map(is_finite, losses)):
        raise ContentError(f"guard.losses: expected a list of numbers, got {losses!r:.40}")
    n_steps = state["trajectory"].get("train.steps")
    if is_int(n_steps) and state["step"] > n_steps:
        raise ContentError(f"step: expected at most the {n_steps} steps of the run, got {state['step']}")
    if "source" not in state["code"]:
        raise ContentError("code.source is missing")


def _check_weights(path: Path) -> None:
    for name, (dtype, shape) in _read_header(path).items():
        if dtype != _WEIGHT_TYPE or 0 in shape:
            raise ContentError(f"{name}: expected weights of type {_WEIGHT_TYPE}, got {dtype} {shape}")
    if problem := find_nonfinite_weights(path):
        raise ContentError(problem)


def _read_header(path: Path) -> dict[str, tuple[str, list[int]]]:
    """Return dtype and shape of each tensor. The library checks that they agree with the size of the file."""
    with safe_open(path, framework="pt") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
        return {name: (weight.get_dtype(), weight.get_shape()) for name, weight in slices.items()}


def _check_probe(path: Path) -> None:
    header = _read_header(path)
    if list(header) != ["logits"] or header["logits"][0] not in _FLOAT_TYPES:
        raise ContentError(f"expected logits, got {', '.join(header) or 'nothing'}")
    if problem := find_nonfinite_weights(path):
        raise ContentError(problem)


def _check_optimizer(path: Path) -> None:
    content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    _check_rng(_get_mapping(content, "rng"))
    shapes = {name: shape for name, (_, shape) in _read_header(path.with_name(MODEL)).items()}
    all_moments = _get_mapping(content, "moments")
    kinds = {name: set(_get_mapping(all_moments, name)) for name in all_moments}
    _check_moment_names(path.parent, kinds, shapes)
    for name, moments in all_moments.items():
        for key, moment in moments.items():
            # Names that the weights do not have are those of another model, which `describe_mismatch` explains.
            shape = [] if key == "step" else shapes.get(name)
            if not isinstance(moment, Tensor) or (shape is not None and list(moment.shape) != shape):
                raise ContentError(f"{name}.{key}: expected a moment of shape {shape}, got {moment!r:.60}")
            _check_moment(path.parent, f"{name}.{key}", moment)


def _check_moment_names(checkpoint: Path, kinds: Mapping[str, Set[str]], weights: Iterable[str]) -> None:
    """Raise `ContentError` unless all trained weights have the moments of the run's optimizer. At step 0, the optimizer may
    have none yet.

    A resumed run would give new moments to a weight without them. `kinds`: names of the moments of each weight.
    """
    trajectory = json.loads((checkpoint / STATE).read_text(encoding="utf-8"))["trajectory"]
    has_muon, trainable = trajectory.get("train.optimizer") == "muon", trajectory.get("train.trainable", "all")
    trained = {name for name in weights if trainable == "all" or is_indexer_weight(name)}
    missing = sorted(trained - kinds.keys())
    if missing and (kinds or parse_step(checkpoint)):
        numbers = f"expected those of {len(trained)} trained weights, got none of {len(missing)}"
        raise ContentError(f"moments: {numbers}, for example {missing[0]}")
    for name, own in kinds.items():
        expected = _MUON_MOMENTS if has_muon and is_muon_weight(name) else _ADAMW_MOMENTS
        if own != expected:
            numbers = f"expected {', '.join(sorted(expected))}, got {', '.join(sorted(map(str, own))) or 'none'}"
            raise ContentError(f"moments of {name}: {numbers}")


def _check_moment(checkpoint: Path, name: str, moment: Tensor) -> None:
    """Raise `ContentError` for a value that training never has, also for another number of steps than the checkpoint's.

    Each step updates every trained weight.
    """
    _check_values(name, moment)
    if name.endswith(".step") and moment != parse_step(checkpoint):
        raise ContentError(f"{name}: expected {parse_step(checkpoint)} steps, got {float(moment):g}")


def _check_values(name: str, tensor: Tensor) -> None:
    """Raise `ContentError` for values that training never has: half precision, NaN, infinity, or a negative second moment
    or step.
    """
    if tensor.dtype != torch.float32:
        raise ContentError(f"{name}: expected torch.float32, got {tensor.dtype}")
    if problem := describe_nonfinite(name, tensor):
        raise ContentError(problem)
    if name.rpartition(".")[2] in _NONNEGATIVE and (n_negative := int((tensor < 0).sum())):
        raise ContentError(f"{name}: {n_negative:,} of {tensor.numel():,} values are negative")


def _get_mapping(content: Any, name: str) -> dict[str, Any]:
    value = content.get(name) if isinstance(content, dict) else None
    if not isinstance(value, dict):
        raise ContentError(f"{name}: expected a mapping, got {value!r:.40}")
    return value


def _check_random(path: Path) -> None:
    _check_rng(_get_mapping(torch.load(path, map_location="cpu", weights_only=True), "rng"))


def _check_rng(states: Mapping[str, Any]) -> None:
    """Restore the random states into new generators, to see that `checkpoint_state.restore_rng` can."""
    version, python_state, gauss = states["python"]
    random.Random().setstate((version, tuple(python_state), gauss))
    name, keys, *rest = states["numpy"]
    np.random.RandomState().set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.Generator().set_state(states["torch"])
    if not isinstance(states["cuda"], list):
        raise ContentError(f"rng.cuda: expected a list, got {states['cuda']!r:.40}")
