"""Paired comparison of two runs: by held-out window, by training batch, or by seed.

Variation that both members of a pair share, mainly the difficulty of the text, cancels in the difference. The comparison
therefore resolves differences far smaller than the noise of either run.

Neighboring windows and batches are correlated: windows are parts of one document, batches see nearly the same weights.
Treating them as independent would make the confidence interval too narrow. The interval is therefore computed from the
means of up to `MAX_SEGMENTS` equal, contiguous segments of pairs. Example: between the production run and its dense
baseline, the lag-1 autocorrelation of the logged batch differences is 0.58 over the whole run and 0.00 over its later half.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nsa_lab.health.matched_pair import check_same_training, get_data_digests, get_training_settings
from nsa_lab.runs.history import History, have_different_eval_texts

MAX_SEGMENTS = 20
# 0.975 quantile of Student's t for 1 to 19 degrees of freedom.
T_QUANTILES = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093),
)
# Exclude the first half of the steps that both runs logged. The loss falls fast there, so a lead of a few steps would
# appear as a difference in quality.
EXCLUDED_FRACTION = 0.5


@dataclass(frozen=True)
class PairedDifference:
    """Mean of first minus second in bits per byte over `n_pairs`, and the half-width of its 95% confidence interval."""

    label: str
    mean: float
    half_width: float
    n_pairs: int

    @property
    def is_significant(self) -> bool:
        return abs(self.mean) > self.half_width

    def __str__(self) -> str:
        note = "" if self.is_significant else "; not significant"
        return f"{self.label}: {self.mean:+.4f} ± {self.half_width:.4f} bits per byte over {self.n_pairs:,} pairs{note}"


def compute_paired_difference(
    label: str, first: np.ndarray, second: np.ndarray, weights: np.ndarray | None = None
) -> PairedDifference | str:
    """Return the paired difference of two series of equal length, in bits per byte; a text with the reason if undefined.

    `weights`: tokens per pair, used as the pair's weight in every mean; None: all pairs have the same number of tokens.
    Pairs with a non-finite difference are dropped.
    """
    is_finite = np.isfinite(first - second)
    differences, weights = (first - second)[is_finite], (np.ones(len(first)) if weights is None else weights)[is_finite]
    if len(differences) < 2:
        return f"{label}: {len(differences)} pair{'s' * (len(differences) != 1)}; an interval needs at least 2"
    segments = np.array_split(np.arange(len(differences)), min(len(differences), MAX_SEGMENTS))
    segment_means = np.array([np.average(differences[segment], weights=weights[segment]) for segment in segments])
    half_width = T_QUANTILES[len(segment_means) - 2] * segment_means.std(ddof=1) / math.sqrt(len(segment_means))
    return PairedDifference(label, float(np.average(differences, weights=weights)), float(half_width), len(differences))


def compare_validation_windows(first: History, second: History) -> PairedDifference | str:
    """Compare two runs by window of held-out text, at the last evaluation of each run."""
    label = "validation, paired by window"
    if not (first.evaluations and second.evaluations):
        return f"{label}: at least one run has no evaluation"
    if have_different_eval_texts((first, second)):
        return f"{label}: the runs were evaluated on different texts, so their losses are not comparable"
    window_bpb = [_compute_window_bpb(run) for run in (first, second)]
    if not all(len(values) for values in window_bpb) or len(window_bpb[0]) != len(window_bpb[1]):
        return f"{label}: no matching window losses; only the final evaluation of a run records them, older runs have none"
    return compute_paired_difference(label, *window_bpb)


def compare_training_batches(first: History, second: History) -> PairedDifference | str:
    """Compare two runs by training batch, over the later half of the steps that both logged."""
    label = "training, paired by batch, later half"
    if _get_batch_identity(first) != _get_batch_identity(second):
        return f"{label}: the runs were trained on different batches, so their losses cannot be paired"
    steps, losses = pair_training_losses(first, second)
    return compute_paired_difference(label, *losses[:, steps > EXCLUDED_FRACTION * steps.max(initial=0)])


def pair_training_losses(first: History, second: History) -> tuple[np.ndarray, np.ndarray]:
    """Return the steps that both runs logged, ascending, and their training losses in bits per byte, [2, steps]."""
    bpb_by_step = [dict(zip(*(values.tolist() for values in run.series("bpb")), strict=True)) for run in (first, second)]
    steps = sorted(bpb_by_step[0].keys() & bpb_by_step[1].keys())
    return np.array(steps), np.array([[losses[step] for step in steps] for losses in bpb_by_step]).reshape(2, -1)


def compare_seeds(runs: Sequence[History]) -> list[PairedDifference | str]:
    """Compare NSA runs with their dense baselines by seed, on the last validation; one result per configuration."""
    groups: dict[str, list[tuple[History, History]]] = {}
    for nsa, dense in find_matched_pairs(runs):
        groups.setdefault(make_seed_group_key(nsa) + make_seed_group_key(dense), []).append((nsa, dense))
    return [_compare_seed_group(pairs) for pairs in groups.values()]


def find_matched_pairs(runs: Sequence[History]) -> list[tuple[History, History]]:
    """Return every (NSA run, dense baseline) pair with the same training, in the order of `runs`."""
    nsa_runs, dense_runs = ([run for run in runs if run.config.model.attention == kind] for kind in ("nsa", "dense"))
    return [(nsa, dense) for nsa in nsa_runs for dense in dense_runs if check_same_training(nsa, dense).ok]


def summarize_comparisons(runs: Sequence[History]) -> list[str]:
    """Return one line per comparison: by window and by batch for exactly two runs, by seed for matched pairs."""
    lines = (
        [str(compare(*runs)) for compare in (compare_validation_windows, compare_training_batches)]
        if len(runs) == 2
        else []
    )
    return lines + [str(result) for result in compare_seeds(runs)]


def _compare_seed_group(pairs: list[tuple[History, History]]) -> PairedDifference | str:
    pair_by_seed = {nsa.config.train.seed: (nsa, dense) for nsa, dense in pairs}
    if len(pair_by_seed) < len(pairs):
        seeds = sorted(nsa.config.train.seed for nsa, _ in pairs)
        repeated_seeds = ", ".join(str(seed) for seed in sorted(set(seeds)) if seeds.count(seed) > 1)
        return f"NSA minus dense: expected one pair per seed, got several for seed {repeated_seeds}; remove all but one"
    label = (
        f"NSA minus dense, {len(pair_by_seed)} seed{'s' * (len(pair_by_seed) != 1)} "
        f"({', '.join(map(str, sorted(pair_by_seed)))})"
    )
    last_bpb = [[run.validation()[1][-1] if run.evaluations else np.nan for run in pair] for pair in pair_by_seed.values()]
    return compute_paired_difference(label, *np.array(last_bpb).T)


def _compute_window_bpb(run: History) -> np.ndarray:
    """Return bits per byte for each window at the last evaluation; empty if window losses were not recorded."""
    event = run.evaluations[-1]
    loss, bpb = event.get("loss"), event.get("bpb")
    if not (loss and bpb):
        return np.empty(0)
    nats = np.array([np.nan if loss is None else loss for loss in event.get("window_losses", [])], dtype=np.float64)
    return nats * bpb / loss


def _get_batch_identity(run: History) -> tuple[object, ...]:
    train = run.config.train
    shapes = tuple(
        (stage.steps, stage.seq_len, stage.sequences_per_step, stage.min_document_tokens, stage.planted_share)
        for stage in train.plan
    )
    return train.seed, shapes, frozenset(get_data_digests(run))


def make_seed_group_key(run: History) -> str:
    """Return a text that is equal for runs that differ only in their seed.

    It contains the data digests and all settings that affect training, except the seed.
    """
    return repr({**get_training_settings(run.config), "train.seed": None, "data": sorted(get_data_digests(run))})
