"""Numbers that follow from the configuration: attention reads, sizes of tensors, shapes, stages and kinds of statistics.

A run that records others has trained something else than its configuration says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from nsa_lab.config import NSAConfig, RunConfig
from nsa_lab.health.completeness_checks import STATISTICS, list_possible_statistics
from nsa_lab.health.verdict import Problem
from nsa_lab.runs.event_columns import NUMBERS
from nsa_lab.runs.event_fields import is_finite, is_number
from nsa_lab.runs.history import History

READS_ERROR = 1e-2
N_LENGTHS = 512  # lengths of documents between which reads are interpolated
WEIGHT_DTYPES = {"float32"}  # `nsa_lab.train.build` trains float32 weights; attention may compute in bfloat16
# Evaluations of a small model take more than its training.
OTHER_BYTES = 1 << 34
MAX_PEAK_RATIO = 4.0  # peak memory / peak of the preflight, which has a step of every stage (2.0 measured)


def _compute_reads(longest: int, nsa: NSAConfig) -> dict[str, np.ndarray]:
    """Compute branch -> mean number of keys per query of a document, for each length from 1 to `longest`, float64."""
    t = np.arange(longest)
    keys = {
        "cmp": np.where(t + 1 >= nsa.l, (t + 1 - nsa.l) // nsa.d + 1, 0),
        "sel": np.minimum(t // nsa.l_sel, nsa.n_sel - 1) * nsa.l_sel + t % nsa.l_sel + 1,
        "win": np.minimum(t + 1, nsa.w),
        "dense": t + 1,
    }
    return {branch: np.cumsum(values, dtype=np.float64) / (t + 1) for branch, values in keys.items()}


def compute_read_bounds(config: RunConfig, dense: float) -> dict[str, tuple[float, float]]:
    """Compute branch -> lowest and highest mean of keys per query, if dense attention reads `dense` keys.

    Sequences of one document determine all of them. Documents of several lengths have a mean of the reads of their
    lengths, which is between the chords of reads over dense reads.
    """
    plan, train = config.train.plan, config.train
    longest = max(stage.seq_len for stage in plan)
    reads = _compute_reads(longest, config.nsa)
    if config.data.documents != "mask" and config.data.packing == "stream":
        shares = [stage.steps * stage.tokens_per_step / train.tokens for stage in plan]
        means = {
            branch: float(sum(share * own[stage.seq_len - 1] for share, stage in zip(shares, plan, strict=True)))
            for branch, own in reads.items()
        }
        return {branch: (mean, mean) for branch, mean in means.items()}
    lengths = np.unique(np.geomspace(1, longest, N_LENGTHS).astype(np.int64))
    x = reads["dense"][lengths - 1]
    dense = min(max(dense, float(x[0])), float(x[-1]))
    low, high = np.flatnonzero(x <= dense), np.flatnonzero(x >= dense)
    gap = x[high][None, :] - x[low][:, None]
    weight = np.divide(dense - x[low][:, None], gap, out=np.zeros_like(gap), where=gap > 0)
    bounds = {}
    for branch, own in reads.items():
        values = own[lengths - 1]
        chords = values[low][:, None] * (1 - weight) + values[high][None, :] * weight
        bounds[branch] = float(chords.min()), float(chords.max())
    return bounds


def _check_reads(history: History) -> Problem | None:
    """The documents, whose mean length dense reads give, determine the reads of all branches."""
    for event in history.first_events:
        reads: Any = event.get("reads_per_token")
        if not isinstance(reads, dict) or not is_finite(reads.get("dense")):
            continue
        for branch, (low, high) in compute_read_bounds(history.config, reads["dense"]).items():
            value: Any = reads.get(branch)
            slack = READS_ERROR * high + READS_ERROR
            if is_finite(value) and not low - slack <= value <= high + slack:
                text = f"reads_per_token: {value:,.1f} keys of {branch} with {reads['dense']:,.1f} of dense attention,"
                return Problem(np.array([event["step"]]), f"{text} expected {low:,.1f} to {high:,.1f},")
    return None


def _iterate_readings(history: History) -> Iterator[tuple[Any, dict[str, int], dict[str, int]]]:
    """Yield event, bytes of the weights and bytes of the optimizer state, by dtype, of the readings with both."""
    for event in history.steps.select(history.steps.has("weight_bytes")):
        weights, moments = event.get("weight_bytes"), event.get("optimizer_bytes")
        if isinstance(weights, dict) and isinstance(moments, dict):
            yield event, weights, moments


def _check_tensor_sizes(history: History) -> Problem | None:
    """An attempt trains the same tensors from its first step on, in float32. The peak memory includes them."""
    first: dict[int, tuple[dict[str, int], dict[str, int]]] = {}
    for event, *sizes in _iterate_readings(history):
        weights, moments = sizes
        before = first.setdefault(event["attempt"], (weights, moments))
        for name, own, previous in zip(("weights", "optimizer state"), sizes, before, strict=True):
            if own != previous:
                text = f"the {name} has other sizes than at the start of the attempt: {own} and {previous} bytes,"
                return Problem(np.array([event["step"]]), text)
        if others := weights.keys() - WEIGHT_DTYPES:
            return Problem(np.array([event["step"]]), f"the weights are {', '.join(sorted(others))}, expected float32,")
        total = sum(value for size in sizes for value in size.values() if is_number(value))
        peak = event.get("mem_peak_bytes")
        if is_finite(peak) and peak < total:
            text = f"the peak memory of {peak:,.0f} bytes is below the {total:,.0f} of weights and optimizer state,"
            return Problem(np.array([event["step"]]), text)
    return None


def _check_preflight_memory(history: History) -> Problem | None:
    """The preflight has measured the peak memory of training."""
    peaks = [_get_measured_peak(event) for event in history.events_of_kind("preflight")]
    measured = max((peak for peak in peaks if peak), default=None)
    recorded = history.steps.numbers("mem_peak_bytes")
    if measured is None or not (is_wrong := recorded > MAX_PEAK_RATIO * measured + OTHER_BYTES).any():
        return None
    text = f"the peak memory is {recorded[is_wrong][0]:,.0f} bytes, that of the preflight {measured:,.0f},"
    return Problem(history.steps.ints("step")[is_wrong], text)


def _get_measured_peak(event: Any) -> float | None:
    numbers = event.get("numbers")
    peak = numbers.get("peak_bytes") if isinstance(numbers, dict) and event.get("name") == "memory" else None
    return peak if is_finite(peak) else None


def _check_compiled_shapes(history: History) -> Problem | None:
    """The compiled shapes are those of stages. Ranks share the sequences of a step."""
    ranks = {event["attempt"]: event.get("ranks") for event in history.first_events}
    shapes = {(stage.sequences_per_forward, stage.seq_len) for stage in history.config.train.plan}
    for event in history.events_of_kind("compile"):
        recorded = event.get("shapes")
        others = [shape for shape in recorded if tuple(shape) not in shapes] if isinstance(recorded, list) else []
        if others and ranks.get(event["attempt"]) == 1:
            text = f"the shape {others[0]} was compiled, which no stage has: {sorted(map(list, shapes))},"
            return Problem(np.array([event["step"]]), text)
    return None


def _check_packed_stages(history: History) -> Problem | None:
    """Packing has an entry for each stage. Only packing by best fit pads rows."""
    train, data = history.config.train, history.config.data
    for event in history.first_events:
        stages = event.get("packing")
        if not isinstance(stages, list):
            continue
        if len(stages) != len(train.plan):
            text = f"packing of {len(stages)} stages, but {len(train.plan)} are configured,"
            return Problem(np.array([event["step"]]), text)
        for counts in stages:
            documents: Any = counts.get("documents")
            cut: Any = counts.get("cut_documents")
            if is_finite(documents) and is_finite(cut) and cut > documents:
                return Problem(np.array([event["step"]]), f"packing: {cut:,} of {documents:,} documents are cut,")
            padded = counts.get("padded_tokens")
            if data.packing != "best_fit" and is_finite(padded) and padded:
                text = f"packing: {padded:,} tokens are padding, but data.packing is {data.packing},"
                return Problem(np.array([event["step"]]), text)
    return None


def _check_statistics(history: History) -> Problem | None:
    """A model has no statistics of parts that its configuration does not have."""
    possible, model = list_possible_statistics(history.config), history.config.model
    for name, form in history.steps.list_fields().items():
        if not name.startswith(STATISTICS) or name in possible:
            continue
        # Lists of values per layer may be empty: no layer has them.
        steps, _ = history.layer_series(name) if form == NUMBERS else history.series(name)
        if len(steps):
            kind = "dense attention" if model.attention == "dense" else f"the branches {', '.join(model.branches)}"
            weights = f"selection_loss {model.selection_loss:g}, teacher_weight {history.config.train.teacher_weight:g}"
            return Problem(steps, f"{name} is recorded, but config.yaml has none: {kind}, {weights},")
    return None


RELATIONS: tuple[Callable[[History], Problem | None], ...] = (
    _check_reads,
    _check_tensor_sizes,
    _check_preflight_memory,
    _check_compiled_shapes,
    _check_packed_stages,
    _check_statistics,
)
