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

from nsa_lab.health.twins import data_identities, learned_by, same_training
from nsa_lab.runs.history import History, evaluated_apart

STRETCHES = 20
# Quantile .975 of Student's t for 1 to 19 degrees of freedom.
T_QUANTILES = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093),
)
# Of the steps that both logged: the first half is learning, and what one run learns some steps earlier is no difference.
COMPARED = 0.5


@dataclass(frozen=True)
class Difference:
    """The mean over `pairs` of the first run's bits per byte less the second's, and half of its 95 % interval."""

    of: str
    mean: float
    half: float
    pairs: int

    @property
    def beyond_noise(self) -> bool:
        return abs(self.mean) > self.half

    def __str__(self) -> str:
        worth = "" if self.beyond_noise else "; no difference can be told"
        return f"{self.of}: {self.mean:+.4f} ± {self.half:.4f} bits per byte over {self.pairs:,} pairs{worth}"


def difference(of: str, first: np.ndarray, second: np.ndarray, weights: np.ndarray | None = None) -> Difference | str:
    """The paired difference of two series of equal length, bits per byte; a line that says why there is none.

    `weights` are those of the pairs in every mean: how many tokens each is of, where that is not the same of all.
    """
    told = np.isfinite(first - second)
    apart, weights = (first - second)[told], (np.ones(len(first)) if weights is None else weights)[told]
    if len(apart) < 2:
        return f"{of}: {len(apart)} pair{'s' * (len(apart) != 1)}, so no interval: two are the least"
    stretches = np.array_split(np.arange(len(apart)), min(len(apart), STRETCHES))
    means = np.array([np.average(apart[one], weights=weights[one]) for one in stretches])
    half = T_QUANTILES[len(means) - 2] * means.std(ddof=1) / math.sqrt(len(means))
    return Difference(of, float(np.average(apart, weights=weights)), float(half), len(apart))


def over_windows(first: History, second: History) -> Difference | str:
    """Of the windows of held-out text, at the last evaluation of both."""
    of = "validation, window by window"
    if not (first.evaluations and second.evaluations):
        return f"{of}: a run was not evaluated"
    if evaluated_apart((first, second)):
        return f"{of}: they were evaluated on different texts, which cannot be compared"
    losses = [_window_bits(run) for run in (first, second)]
    if not all(len(one) for one in losses) or len(losses[0]) != len(losses[1]):
        return f"{of}: not recorded by both; the last evaluation of a run records it, in older runs it did not"
    return difference(of, *losses)


def over_training(first: History, second: History) -> Difference | str:
    """Of the training batches of the later half of the steps that both logged."""
    of = "training, batch by batch, later half"
    if _batches(first) != _batches(second):
        return f"{of}: they were trained on different batches, which make no pairs"
    steps, losses = paired_losses(first, second)
    return difference(of, *losses[:, steps > COMPARED * steps.max(initial=0)])


def paired_losses(first: History, second: History) -> tuple[np.ndarray, np.ndarray]:
    """The steps that both logged, ascending, and the bits per byte of their batches, [2, steps]."""
    told = [dict(zip(*(values.tolist() for values in run.series("bpb")), strict=True)) for run in (first, second)]
    steps = sorted(told[0].keys() & told[1].keys())
    return np.array(steps), np.array([[one[step] for step in steps] for one in told]).reshape(2, -1)


def over_seeds(runs: Sequence[History]) -> list[Difference | str]:
    """Of NSA runs and their dense twins of the same seed: the last validation, for every configuration among the runs."""
    grouped: dict[str, list[tuple[History, History]]] = {}
    for nsa, dense in twin_pairs(runs):
        grouped.setdefault(but_seed(nsa) + but_seed(dense), []).append((nsa, dense))
    return [_over_seeds(pairs) for pairs in grouped.values()]


def twin_pairs(runs: Sequence[History]) -> list[tuple[History, History]]:
    """Every NSA run among `runs` with every dense run that is its twin, in their order."""
    nsa, dense = ([run for run in runs if run.config.model.attention == kind] for kind in ("nsa", "dense"))
    return [(one, twin) for one in nsa for twin in dense if same_training(one, twin).ok]


def compared(runs: Sequence[History]) -> list[str]:
    """What can be said of several runs: of two, window by window and batch by batch; of twins, over their seeds."""
    lines = [str(over(*runs)) for over in (over_windows, over_training)] if len(runs) == 2 else []
    return lines + [str(found) for found in over_seeds(runs)]


def _over_seeds(pairs: list[tuple[History, History]]) -> Difference | str:
    by_seed = {nsa.config.train.seed: (nsa, dense) for nsa, dense in pairs}
    if len(by_seed) < len(pairs):
        seeds = sorted(nsa.config.train.seed for nsa, _ in pairs)
        twice = ", ".join(str(seed) for seed in sorted(set(seeds)) if seeds.count(seed) > 1)
        return f"NSA less dense: more than one pair at seed {twice}, so no interval; leave all but one out"
    of = f"NSA less dense, {len(by_seed)} seed{'s' * (len(by_seed) != 1)} ({', '.join(map(str, sorted(by_seed)))})"
    last = [[run.validation()[1][-1] if run.evaluations else np.nan for run in pair] for pair in by_seed.values()]
    return difference(of, *np.array(last).T)


def _window_bits(run: History) -> np.ndarray:
    """Bits per byte of each window at the last evaluation; empty where they were not recorded."""
    event = run.evaluations[-1]
    if not (event.get("loss") and event.get("bpb")):
        return np.empty(0)
    nats = np.array([np.nan if loss is None else loss for loss in event.get("window_losses", [])], dtype=np.float64)
    return nats * event["bpb"] / event["loss"]


def _batches(run: History) -> tuple[object, ...]:
    train = run.config.train
    shapes = tuple(
        (stage.steps, stage.seq_len, stage.sequences_per_step, stage.min_document_tokens, stage.planted_share)
        for stage in train.plan
    )
    return train.seed, shapes, frozenset(data_identities(run))


def but_seed(run: History) -> str:
    """What decides what the run learns, but for its seed, as one text: runs of one model have it in common."""
    return repr({**learned_by(run.config), "train.seed": None, "data": sorted(data_identities(run))})
