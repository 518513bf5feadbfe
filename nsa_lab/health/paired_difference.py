"""Two runs read pair by pair: the same window of held-out text, the same training batch, the same seed.

What is common to a pair, how hard its text is above all, drops out of its difference, so that differences can be told that
are far smaller than the noise of either run. Windows and batches near each other are alike (parts of one document, one
state of the weights), so an interval is over the means of up to `STRETCHES` equal stretches of pairs in order. Where pairs
correlate, an interval that took them for independent would be too narrow: between the production run and its dense twin the
differences of logged batches correlate by .58 from one to the next over the whole run, though by .00 over its later half.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nsa_lab.health.matched_pair import check_same_training, get_data_digests, get_training_settings
from nsa_lab.runs.history import History, have_different_eval_texts

MAX_SEGMENTS = 20
# Quantile .975 of Student's t for 1 to 19 degrees of freedom.
T_QUANTILES = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093),
)
# Of the steps that both logged: the first half is learning, and what one run learns some steps earlier is no difference.
EXCLUDED_FRACTION = 0.5


@dataclass(frozen=True)
class PairedDifference:
    """The mean over `pairs` of the first run's bits per byte less the second's, and half of its 95 % interval."""

    label: str
    mean: float
    half_width: float
    n_pairs: int

    @property
    def is_significant(self) -> bool:
        return abs(self.mean) > self.half_width

    def __str__(self) -> str:
        worth = "" if self.is_significant else "; no difference can be told"
        return f"{self.label}: {self.mean:+.4f} ± {self.half_width:.4f} bits per byte over {self.n_pairs:,} pairs{worth}"


def compute_paired_difference(
    of: str, first: np.ndarray, second: np.ndarray, weights: np.ndarray | None = None
) -> PairedDifference | str:
    """The paired difference of two series of equal length, bits per byte; a line that says why there is none.

    `weights` are those of the pairs in every mean: how many tokens each is of, where that is not the same of all.
    """
    told = np.isfinite(first - second)
    apart, weights = (first - second)[told], (np.ones(len(first)) if weights is None else weights)[told]
    if len(apart) < 2:
        return f"{of}: {len(apart)} pair{'s' * (len(apart) != 1)}, so no interval: two are the least"
    stretches = np.array_split(np.arange(len(apart)), min(len(apart), MAX_SEGMENTS))
    means = np.array([np.average(apart[one], weights=weights[one]) for one in stretches])
    half = T_QUANTILES[len(means) - 2] * means.std(ddof=1) / math.sqrt(len(means))
    return PairedDifference(of, float(np.average(apart, weights=weights)), float(half), len(apart))


def compare_validation_windows(first: History, second: History) -> PairedDifference | str:
    """Of the windows of held-out text, at the last evaluation of both."""
    of = "validation, window by window"
    if not (first.evaluations and second.evaluations):
        return f"{of}: a run was not evaluated"
    if have_different_eval_texts((first, second)):
        return f"{of}: they were evaluated on different texts, which cannot be compared"
    losses = [_compute_window_bpb(run) for run in (first, second)]
    if not all(len(one) for one in losses) or len(losses[0]) != len(losses[1]):
        return f"{of}: not recorded by both; the last evaluation of a run records it, in older runs it did not"
    return compute_paired_difference(of, *losses)


def compare_training_batches(first: History, second: History) -> PairedDifference | str:
    """Of the training batches of the later half of the steps that both logged."""
    of = "training, batch by batch, later half"
    if _get_batch_identity(first) != _get_batch_identity(second):
        return f"{of}: they were trained on different batches, which make no pairs"
    steps, losses = pair_training_losses(first, second)
    return compute_paired_difference(of, *losses[:, steps > EXCLUDED_FRACTION * steps.max(initial=0)])


def pair_training_losses(first: History, second: History) -> tuple[np.ndarray, np.ndarray]:
    """The steps that both logged, ascending, and the bits per byte of their batches, [2, steps]."""
    told = [dict(zip(*(values.tolist() for values in run.series("bpb")), strict=True)) for run in (first, second)]
    steps = sorted(told[0].keys() & told[1].keys())
    return np.array(steps), np.array([[one[step] for step in steps] for one in told]).reshape(2, -1)


def compare_seeds(runs: Sequence[History]) -> list[PairedDifference | str]:
    """Of NSA runs and their dense twins of the same seed: the last validation, for every configuration among the runs."""
    grouped: dict[str, list[tuple[History, History]]] = {}
    for nsa, dense in find_matched_pairs(runs):
        grouped.setdefault(make_seed_group_key(nsa) + make_seed_group_key(dense), []).append((nsa, dense))
    return [_compare_seed_group(pairs) for pairs in grouped.values()]


def find_matched_pairs(runs: Sequence[History]) -> list[tuple[History, History]]:
    """Every NSA run among `runs` with every dense run that is its twin, in their order."""
    nsa, dense = ([run for run in runs if run.config.model.attention == kind] for kind in ("nsa", "dense"))
    return [(one, twin) for one in nsa for twin in dense if check_same_training(one, twin).ok]


def summarize_comparisons(runs: Sequence[History]) -> list[str]:
    """What can be said of several runs: of two, window by window and batch by batch; of twins, over their seeds."""
    lines = [str(over(*runs)) for over in (compare_validation_windows, compare_training_batches)] if len(runs) == 2 else []
    return lines + [str(found) for found in compare_seeds(runs)]


def _compare_seed_group(pairs: list[tuple[History, History]]) -> PairedDifference | str:
    by_seed = {nsa.config.train.seed: (nsa, dense) for nsa, dense in pairs}
    if len(by_seed) < len(pairs):
        seeds = sorted(nsa.config.train.seed for nsa, _ in pairs)
        twice = ", ".join(str(seed) for seed in sorted(set(seeds)) if seeds.count(seed) > 1)
        return f"NSA less dense: more than one pair at seed {twice}, so no interval; leave all but one out"
    of = f"NSA less dense, {len(by_seed)} seed{'s' * (len(by_seed) != 1)} ({', '.join(map(str, sorted(by_seed)))})"
    last = [[run.validation()[1][-1] if run.evaluations else np.nan for run in pair] for pair in by_seed.values()]
    return compute_paired_difference(of, *np.array(last).T)


def _compute_window_bpb(run: History) -> np.ndarray:
    """Bits per byte of each window at the last evaluation; empty where they were not recorded."""
    event = run.evaluations[-1]
    if not (event.get("loss") and event.get("bpb")):
        return np.empty(0)
    nats = np.array([np.nan if loss is None else loss for loss in event.get("window_losses", [])], dtype=np.float64)
    return nats * event["bpb"] / event["loss"]


def _get_batch_identity(run: History) -> tuple[object, ...]:
    train = run.config.train
    shapes = tuple(
        (stage.steps, stage.seq_len, stage.sequences_per_step, stage.min_document_tokens, stage.planted_share)
        for stage in train.plan
    )
    return train.seed, shapes, frozenset(get_data_digests(run))


def make_seed_group_key(run: History) -> str:
    """What decides what the run learns, but for its seed, as one text: runs of one model have it in common."""
    return repr({**get_training_settings(run.config), "train.seed": None, "data": sorted(get_data_digests(run))})
