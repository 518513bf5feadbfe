"""Compare the first event of an attempt with config.yaml, environment.json, and the measured sizes.

A run may be created on one machine and start on another, or with code that was changed in between, so a difference to
environment.json is a warning. A combination that no run can record fails. A value that was not recorded
agrees with everything.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from nsa_lab.config import ConfigError, RunConfig
from nsa_lab.config.errors import shorten
from nsa_lab.health.verdict import Problem
from nsa_lab.runs import directory
from nsa_lab.runs.event_fields import is_finite
from nsa_lab.runs.history import History

# Beginning of the reason for the kernels' backend, followed by the name of the device.
KERNEL_REASON = "CUDA device "
# Largest factor between recorded and computed work (1.00 measured with dense attention), and numbers of the optimizer that
# are no moments: one step for each tensor.
WORK_FACTOR, MAX_STATES = 2.0, 1 << 16
SHARE_ERROR = 1e-3


class Statement(NamedTuple):
    """A value in the first event of an attempt, and the same statement at another place.

    `get_recorded(event)`, `get_other(history, event)`: None if it was not recorded. `agrees(recorded, other)`.
    """

    subject: str
    get_recorded: Callable[[Any], Any]
    place: str
    get_other: Callable[[History, Any], Any]
    agrees: Callable[[Any, Any], bool] = operator.eq


def _get(value: Any, *keys: str) -> Any:
    """Return a value in nested mappings; None if it is missing, or one of them is no mapping."""
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _is_configured_device(device: str, configured: str) -> bool:
    return configured == "auto" or (device == "cpu") == (configured == "cpu")


def _measures_gpu(history: History, event: Any) -> bool | None:
    """Return True if the attempt records the utilization of a GPU; None if it does not."""
    return True if event["attempt"] in history.gpu_attempts or event.get("gpu_util") == "on" else None


def _get_backends(event: Any) -> dict[str, tuple[Any, Any]] | None:
    """Return part of attention -> backend and its reason; None if a part was not recorded."""
    parts = event.get("backend")
    if not isinstance(parts, dict):
        return None
    return {part: (_get(choice, "backend"), _get(choice, "reason")) for part, choice in parts.items()}


def _follow_from_device(backends: dict[str, tuple[Any, Any]], device: str) -> bool:
    """Return whether every backend that was chosen because of a GPU has the kernels of this GPU."""
    chosen = [(name, reason) for name, reason in backends.values() if str(reason).startswith(KERNEL_REASON)]
    return all(name == "triton" and reason == KERNEL_REASON + device for name, reason in chosen)


def _are_requested(backends: dict[str, tuple[Any, Any]], requested: str) -> bool:
    """Return whether all parts have the backend that the configuration names. Dense attention and `flash` have others."""
    if requested in ("auto", "flash"):
        return True
    return all(name == requested for part, (name, _) in backends.items() if part != "dense")


def _can_share_steps(ranks: int, config: RunConfig) -> bool:
    try:
        config.check_ranks(ranks)
    except ConfigError:
        return False
    return True


def _has_gpu_build(version: str, device: str) -> bool:
    """Return whether this build of torch, such as 2.11.0+cpu, can use the device."""
    return device == "cpu" or not version.endswith("+cpu")


STATEMENTS = (
    Statement(
        "threads", lambda e: e.get("threads"), "torch, which has at least one", lambda *_: True, lambda own, _: own > 0
    ),
    Statement(
        *("torch", lambda e: _get(e.get("versions"), "torch"), "its device", lambda _, e: e.get("device")),
        lambda own, device: _has_gpu_build(str(own), device),
    ),
    Statement("device", lambda e: e.get("device"), "heartbeats of a GPU", _measures_gpu, lambda own, _: own != "cpu"),
    Statement("backends", _get_backends, "its device", lambda _, e: e.get("device"), _follow_from_device),
    Statement("ranks", lambda e: e.get("ranks") or None, "config.yaml", lambda h, _: h.config, _can_share_steps),
)
# Execution settings may change when a run is resumed, and config.yaml describes the last attempt.
LAST_STATEMENTS = (
    Statement(
        *("device", lambda e: e.get("device"), "runtime.device of config.yaml", lambda h, _: h.config.runtime.device),
        _is_configured_device,
    ),
    Statement(
        *("backends", _get_backends, "runtime.backend of config.yaml", lambda h, _: h.config.runtime.backend),
        _are_requested,
    ),
)
CREATION_STATEMENTS = (
    *(
        Statement(
            f"code.{key}",
            lambda e, key=key: _get(e.get("code"), key),
            "environment.json",
            lambda h, _, key=key: _get(h.environment, "code", key),
        )
        for key in ("source", "commit", "dirty")
    ),
    Statement(
        *("versions", lambda e: e.get("versions"), "environment.json", lambda h, _: _get(h.environment, "versions")),
        lambda own, created: not _list_other_versions(own, created),
    ),
    Statement(
        *("device", lambda e: e.get("device"), "environment.json", lambda h, _: _list_gpus(h) or None),
        lambda device, gpus: device == "cpu" or device in gpus,
    ),
)


def _list_other_versions(versions: Any, created: Any) -> list[str]:
    """Return the packages whose versions differ. The trainer also records the build of torch: 2.11.0+cu130."""
    if not isinstance(versions, dict) or not isinstance(created, dict):
        return []
    return [
        name
        for name in versions.keys() & created.keys()
        if str(versions[name]).partition("+")[0] != str(created[name]).partition("+")[0]
    ]


def _list_gpus(history: History) -> list[Any] | None:
    gpus = history.environment.get("gpus")
    return [_get(gpu, "name") for gpu in gpus] if isinstance(gpus, list) else None


def find_contradiction(history: History) -> str | None:
    """Return a text on an attempt whose first event and configuration, or heartbeats, exclude each other; None if none."""
    for event in history.first_events:
        is_last = event["attempt"] == history.last_attempt
        if problem := _find_difference(history, event, STATEMENTS + (LAST_STATEMENTS if is_last else ())):
            return problem
    return None


def find_other_creation(history: History) -> str | None:
    """Return a text on code, packages or a GPU of the first attempt that are not those of environment.json; None if none.

    Later attempts have other checks.
    """
    first = next((event for event in history.first_events if event["attempt"] == 1), None)
    return _find_difference(history, first, CREATION_STATEMENTS) if first else None


def _find_difference(history: History, event: Any, statements: tuple[Statement, ...]) -> str | None:
    for statement in statements:
        own, other = statement.get_recorded(event), statement.get_other(history, event)
        if own is not None and other is not None and not statement.agrees(own, other):
            text = f"{statement.subject} of attempt {event['attempt']} is {shorten(str(own))}, "
            return text + f"which contradicts {statement.place}" + _format_other(other)
    return None


def _format_other(other: Any) -> str:
    return f": {shorten(str(other))}" if isinstance(other, (str, list)) else ""


def find_wrong_environment(history: History) -> str | None:
    """Return a text on an environment.json that is no JSON object, or has lost its `config_hash`; None if it is neither.

    Every version that records its settings in the first event also writes the hash.
    """
    if not history.environment:
        is_file = (history.run_dir / directory.ENVIRONMENT).is_file()
        return f"{directory.ENVIRONMENT}: expected a JSON object with values; restore the file" if is_file else None
    is_recent = any("settings" in event for event in history.first_events)
    if is_recent and not isinstance(history.environment.get("config_hash"), str):
        return f"{directory.ENVIRONMENT} has no config_hash, which every new run records; restore the file"
    return None


def find_gap(history: History) -> str | None:
    """Return what environment.json does not record, so that it cannot be compared with the first event; None if nothing."""
    if not history.environment:
        return f"{directory.ENVIRONMENT} is missing"
    if "config_hash" not in history.environment:
        return f"{directory.ENVIRONMENT} does not record its configuration"
    devices = {event.get("device") for event in history.first_events if event["attempt"] == 1} - {None, "cpu"}
    if devices and _list_gpus(history) == []:
        return f"{directory.ENVIRONMENT} lists no GPU: nvidia-smi was missing, or it is of another machine"
    return None


def _get_item_bytes(dtype: str) -> int | None:
    """Return the size of a number of a dtype, by its name: 2 for bfloat16; None if the name has no size."""
    bits = re.search(r"\d+", dtype)
    return int(bits[0]) // 8 or None if bits else None


def _count_numbers(n_bytes: Any) -> float | None:
    """Return the numbers in a mapping from dtype to bytes; None if it is none, or has a dtype of unknown size."""
    if not isinstance(n_bytes, dict) or not n_bytes:
        return None
    sizes = [(value, _get_item_bytes(dtype)) for dtype, value in n_bytes.items()]
    known = [value / size for value, size in sizes if size and is_finite(value)]
    return sum(known) if len(known) == len(sizes) else None


def _iterate_sizes(history: History) -> Iterator[tuple[int, Any, float, float | None]]:
    """Yield step, first event, weights and numbers of the optimizer of each reading of an attempt with whole weights."""
    first_events = {event["attempt"]: event for event in history.first_events}
    weighed = history.steps.select(history.steps.has("weight_bytes"))
    for event in weighed:
        first, weights = first_events.get(event["attempt"]), _count_numbers(event.get("weight_bytes"))
        is_whole = first is not None and (first.get("ranks") == 1 or history.config.runtime.parallel == "ddp")
        if is_whole and weights:
            yield event["step"], first, weights, _count_numbers(event.get("optimizer_bytes"))


def _check_parameters(history: History) -> Problem | None:
    """The weights on a rank are the parameters, unless they are sharded."""
    for step, first, weights, _ in _iterate_sizes(history):
        if first.get("params") is not None and first["params"] != weights:
            text = f"{weights:,.0f} weights, but attempt {first['attempt']} records {first['params']:,} parameters,"
            return Problem(np.array([step]), text)
    return None


def _check_moments(history: History) -> Problem | None:
    """AdamW has two moments per weight; Muon has one for matrices. Frozen weights have none."""
    train = history.config.train
    if train.trainable != "all":
        return None
    lowest, highest = 1.0 if train.optimizer == "muon" else 2.0, 2.0
    for step, _, weights, moments in _iterate_sizes(history):
        if moments is not None and not lowest * weights <= moments <= highest * weights + MAX_STATES:
            text = f"{moments / weights:.2f} moments per weight, expected {lowest:g} to {highest:g} ({train.optimizer}),"
            return Problem(np.array([step]), text)
    return None


def _check_work_per_token(history: History) -> Problem | None:
    """A weight in a matrix product takes 6 FLOPs per token, forward and backward, and a key that is read 6 per channel."""
    model, train = history.config.model, history.config.train
    tables = model.vocab_size * model.dim
    tables += (model.ngrams - 1) * model.ngram_rows * (model.ngram_width or 0) if model.ngrams else 0
    per_key = 6 * model.n_layers * model.n_heads * (model.d_k + model.d_v)
    for event in history.first_events:
        params, reads = event.get("params"), event.get("reads_per_token")
        if params is None:
            continue
        products = 6 * max(params - tables, 0)
        reads = reads if isinstance(reads, dict) else {}
        sparse = [reads.get(name) for name in model.branches]
        bounds = {
            "dense": (reads.get("dense") or 0, reads.get("dense") or max(stage.seq_len for stage in train.plan)),
            # Scores of blocks come on top of the keys that are read.
            "nsa": (sum(value or 0 for value in sparse), np.inf),
        }
        for name, (fewest, most) in bounds.items():
            recorded = _get(event.get("flops_per_token"), name)
            teacher = 4 / 3 if train.teacher_weight else 1.0
            low, high = (products + per_key * fewest) / WORK_FACTOR, WORK_FACTOR * teacher * (products + per_key * most)
            if is_finite(recorded) and not low <= recorded <= high:
                text = f"{recorded:,.0f} FLOPs per token of {name}, expected {low:,.0f} to {high:,.0f},"
                return Problem(np.array([event["step"]]), text)
    return None


def _check_packing(history: History) -> Problem | None:
    """Shares are those of their counts, and every document is in a row."""
    for event in history.first_events:
        stages = event.get("packing")
        for stage, counts in zip(history.config.train.plan, stages if isinstance(stages, list) else (), strict=False):
            if problem := _find_packing_problem(counts, stage.seq_len):
                return Problem(np.array([event["step"]]), f"packing: {problem},")
    return None


def _find_packing_problem(counts: Any, seq_len: int) -> str | None:
    names = ("rows", "documents", "cut_documents", "padded_tokens", "cut_share", "padded_share")
    rows, documents, cut, padded, cut_share, padded_share = (_get(counts, name) for name in names)
    for name, share, part, whole in (
        ("documents are cut", cut_share, cut, documents),
        ("tokens are padding", padded_share, padded, None if rows is None else rows * seq_len),
    ):
        if is_finite(share) and is_finite(part) and whole and abs(share - part / whole) > SHARE_ERROR:
            return f"{part:,} of {whole:,} {name}, but their share is {share:.3g}"
    most = _get(counts, "most_documents")
    if is_finite(rows) and is_finite(documents) and is_finite(most) and documents > rows * most:
        return f"{documents:,} documents in {rows:,} rows of at most {most:,}"
    return None


RELATIONS: tuple[Callable[[History], Problem | None], ...] = (
    _check_parameters,
    _check_moments,
    _check_work_per_token,
    _check_packing,
)
