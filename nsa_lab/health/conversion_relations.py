"""Relations in `conversion.json`: rows of one model on the same windows, and shares of the oracle's attention mass."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from nsa_lab.health.evaluation_relations import find_gap, find_other_data
from nsa_lab.runs.event_fields import is_finite
from nsa_lab.runs.history import History

FREE = "_free"  # suffix of shares of the mass outside the forced blocks
BLOCK_ROWS = ("selected", "mean_key", "nearest", "oracle")
SELECTIONS = ("chosen", "nearest", "random")
ROUNDING = 1e-3  # of a share of the mass
MAX_LOSS = 2.0  # largest loss / ln(vocabulary)
# Largest difference between two losses with all tokens, in nats: 1.4e-6 in float32 and 0.0072 in bfloat16 measured.
SAME_LOSS = {"float64": 1e-3, "float32": 1e-3}
SAME_LOSS_ROUNDED = 0.05
# Largest relative difference between two measurements of the same weights on the same windows, one in bfloat16 (0.0013
# measured), and largest factor between the losses of different texts (1.3 measured).
SAME_WINDOWS = 0.02
OTHER_TEXT = 3.0
# Largest gain over dense attention on frozen weights, in nats, mean over windows (0.0019 measured, 0.018 in one window).
MAX_GAIN = 0.1
MAX_WORSE_LAYERS = 0.25  # largest share of layers in which random blocks have more mass than the indexer's (0 measured)
# Largest mean difference of the loss of blocks with more attention mass from that of others, in nats (1.0e-5 in float32 and
# 4.5e-4 in bfloat16 measured), and standard errors over windows that are added to it.
MAX_WORSE, MAX_WORSE_ROUNDED, WORSE_ERRORS = 5e-4, 5e-3, 3

Find = Callable[[History, dict[str, Any]], str | None]


def find_conversion_problem(history: History, record: dict[str, Any]) -> str | None:
    """Return a text on the first relation of a valid record that does not hold; None if all do."""
    if problem := find_other_data(history, record):
        return problem
    for name, text in record["texts"].items():
        for find in RELATIONS:
            if problem := find(history, {**text, "dtype": record["dtype"], "step": record["step"]}):
                return f"the text {name}: {problem}"
    has_row = any(row["attention"] == "control" for text in record["texts"].values() for row in text["losses"])
    control = record.get("control")
    if has_row != bool(control):
        return "a control has losses and a run, expected both or neither"
    if control and control["run"] == record["run"]:
        return "the control is the run itself, expected another run"
    return _find_copied_text(record["texts"])


def _find_copied_text(texts: dict[str, Any]) -> str | None:
    """Different texts have different losses, to the last bit."""
    for (one, first), (other, second) in itertools.combinations(texts.items(), 2):
        if first["identity"] == second["identity"]:
            continue  # one text with two names
        for row in first["losses"]:
            same = [own for own in second["losses"] if own["windows"] == row["windows"]]
            if same:
                return f"{_name_row(row)} has the same losses in the texts {one} and {other}, expected others"
    return None


def _name_row(row: dict[str, Any]) -> str:
    return row["attention"] if row["blocks"] is None else f"{row['attention']} with {row['blocks']} blocks"


def _find_other_rows(history: History, text: dict[str, Any]) -> str | None:
    """Windows have the longest length of the run. Each row occurs once; blocks have losses and attention mass."""
    length, n_forced = history.config.train.longest_stage.seq_len, history.config.model.nsa.n_forced
    if text["length"] != length:
        return f"windows of {text['length']:,} tokens, but config.yaml has {length:,}"
    if problem := find_gap(text["length"], text["ranges"]):
        return problem
    names = [_name_row(row) for row in text["losses"]]
    if repeated := [name for name in names if names.count(name) > 1]:
        return f"{repeated[0]} was evaluated twice"
    blocks = [mass["blocks"] for mass in text["mass"]]
    expected = {
        "dense": [None],
        "window": [n_forced],
        **dict.fromkeys(("selected", "mean_key", "nearest", "oracle"), blocks),
    }
    for attention, numbers in expected.items():
        found = [row["blocks"] for row in text["losses"] if row["attention"] == attention]
        if found != numbers:
            return f"{attention} has losses with {found} blocks, expected {numbers}"
    return None


def _find_impossible_loss(history: History, text: dict[str, Any]) -> str | None:
    highest = MAX_LOSS * math.log(history.config.model.vocab_size)
    for row in text["losses"]:
        for loss in itertools.chain.from_iterable(row["windows"]):
            if not is_finite(loss) or not 0 < loss <= highest:
                return f"a loss of {_name_row(row)} is {loss:g} nats per token, expected above 0 and at most {highest:.3g}"
    return None


def _find_repeated_windows(history: History, text: dict[str, Any]) -> str | None:
    """Different windows have different losses, to the last bit."""
    for row in text["losses"]:
        if len(row["windows"]) > 1 and all(window == row["windows"][0] for window in row["windows"]):
            return f"all {len(row['windows'])} windows of {_name_row(row)} have the same losses"
    return None


def _find_other_measurement(history: History, text: dict[str, Any]) -> str | None:
    """The run measured the same weights: its evaluation, and its comparison with dense attention.

    These may be of the same windows. The losses of other texts are of the same size.
    """
    steps = history.evaluations.ints("step") == text["step"]
    lengths = np.array([last - first for first, last in text["ranges"]])
    means = {
        _get_key(row): float((np.array(row["windows"]).mean(axis=0) * lengths).sum() / lengths.sum())
        for row in text["losses"]
    }
    dense, n_windows = means["dense", None], len(text["losses"][0]["windows"])
    for event in history.evaluations.select(steps):
        loss: Any = event.get("loss")
        if not is_finite(loss) or loss <= 0:
            continue
        if not 1 / OTHER_TEXT <= dense / loss <= OTHER_TEXT:
            return f"dense has a loss of {dense:.4g} nats, the evaluation at step {text['step']:,} of {loss:.4g}"
        if (event.get("text"), event.get("windows"), event.get("seq_len")) != (text["identity"], n_windows, text["length"]):
            continue
        expected: dict[tuple[str, int | None], Any] = {("selected", history.config.model.nsa.n_sel): loss}
        for comparison in history.current_events("conversion"):
            losses = comparison.get("loss")
            is_same = (comparison["step"], comparison.get("windows")) == (text["step"], n_windows)
            if is_same and isinstance(losses, dict):
                expected["dense", None] = losses.get("dense")
        for key, value in expected.items():
            found = means.get(key)
            if found is not None and is_finite(value) and abs(found - value) > SAME_WINDOWS * value:
                return f"{key[0]} has a loss of {found:.4f} nats on the windows on which the run measured {value:.4f}"
    return None


def _get_key(row: dict[str, Any]) -> tuple[str, int | None]:
    return row["attention"], row["blocks"]


def _iterate_sparse_rows(text: dict[str, Any]) -> Iterator[tuple[str, int, np.ndarray, np.ndarray]]:
    """Yield name, number of blocks, losses and those of dense attention on the same weights, [windows, ranges]."""
    dense = np.array(text["losses"][0]["windows"])
    for row in text["losses"]:
        if row["blocks"] is not None:
            yield _name_row(row), row["blocks"], np.array(row["windows"]), dense


def _find_other_early_loss(history: History, text: dict[str, Any]) -> str | None:
    """Early positions have no more blocks than are selected, so they attend to all tokens. Later ones do not."""
    l_sel = history.config.model.nsa.l_sel
    tolerance = SAME_LOSS.get(text["dtype"], SAME_LOSS_ROUNDED)
    for name, blocks, losses, dense in _iterate_sparse_rows(text):
        for index, (first, last) in enumerate(text["ranges"]):
            difference = float(np.abs(losses[:, index] - dense[:, index]).max())
            if last <= blocks * l_sel and difference > tolerance:
                place = f"positions {first:,} to {last - 1:,}"
                return f"{name} differs by {difference:.3g} nats from dense at {place}, which have no other blocks"
        if text["length"] > blocks * l_sel and (losses == dense).all():
            return f"{name} has the losses of dense, but selects {blocks} of {-(-text['length'] // l_sel):,} blocks"
    return None


def _find_copied_row(history: History, text: dict[str, Any]) -> str | None:
    """Rows that attend to other tokens or have other weights differ to the last bit."""
    nsa = history.config.model.nsa

    def describe_keys(row: dict[str, Any]) -> tuple[str, int]:
        """Return what a row attends to: equal descriptions allow equal losses."""
        if row["attention"] == "control":
            return "control", 0
        if row["blocks"] is None or row["blocks"] * nsa.l_sel >= text["length"]:
            return "all", 0
        return ("forced", row["blocks"]) if row["blocks"] <= nsa.n_forced else (row["attention"], row["blocks"])

    for row, other in itertools.combinations(text["losses"], 2):
        if row["windows"] == other["windows"] and describe_keys(row) != describe_keys(other):
            return f"{_name_row(other)} has the losses of {_name_row(row)}, expected others"
    return None


def _find_worse_blocks(history: History, text: dict[str, Any]) -> str | None:
    """Blocks with more attention mass in all layers do not have a higher loss. Those of the oracle have the most.

    A trunk that was trained with the blocks of its indexer may prefer these.
    """
    lengths = np.array([last - first for first, last in text["ranges"]])
    means = {_get_key(row): (np.array(row["windows"]) * lengths).sum(axis=1) / lengths.sum() for row in text["losses"]}
    allowed = MAX_WORSE if text["dtype"] in SAME_LOSS else MAX_WORSE_ROUNDED
    for mass in text["mass"]:
        blocks, fractions = mass["blocks"], mass["fractions"]
        is_trained = history.config.train.trainable == "all"
        pairs = [("oracle", name) for name in ("nearest", "mean_key", *(() if is_trained else ("selected",)))]
        chosen, nearest = (np.array(fractions.get(name, [])) for name in ("chosen", "nearest"))
        if len(chosen) == len(nearest) and (chosen > nearest).all():
            pairs.append(("selected", "nearest"))
        for better, worse in pairs:
            difference = means[better, blocks] - means[worse, blocks]
            error = float(difference.std(ddof=1)) / len(difference) ** 0.5 if len(difference) > 1 else 0.0
            if (gap := float(difference.mean())) > allowed + WORSE_ERRORS * error:
                bound = f"at most {allowed:g} plus {WORSE_ERRORS} standard errors of {error:.2g}"
                return f"{better} is {gap:.2g} nats above {worse} with {blocks} blocks, expected {bound}"
    return None


def _find_impossible_gain(history: History, text: dict[str, Any]) -> str | None:
    """Blocks of a frozen model do not have a much lower loss than all tokens.

    Dense attention may fail beyond the length of its training: ranges with a higher loss than the first one are skipped.
    """
    if history.config.train.trainable == "all":
        return None
    for name, _, losses, dense in _iterate_sparse_rows(text):
        means = dense.mean(axis=0)
        gains = np.where(means <= means[0], means - losses.mean(axis=0), 0.0)
        index = int(gains.argmax())
        if gains[index] > MAX_GAIN:
            first, last = text["ranges"][index]
            place = f"positions {first:,} to {last - 1:,}"
            return (
                f"{name} is {gains[index]:.3f} nats below dense at {place}, expected at most {MAX_GAIN:g} on frozen weights"
            )
    return None


def _find_impossible_mass(history: History, text: dict[str, Any]) -> str | None:
    """The oracle's blocks have the most mass. Without the forced blocks, which all selections have, a share is lower."""
    n_layers, nsa = history.config.model.n_layers, history.config.model.nsa
    for mass in text["mass"]:
        subject, fractions = f"the mass of {mass['blocks']} blocks", mass["fractions"]
        if text["length"] <= mass["blocks"] * nsa.l_sel and not fractions:
            continue
        # If all blocks are forced, the rest has no mass.
        suffixes = ("", FREE) if mass["blocks"] > nsa.n_forced else ("",)
        if not 1 <= mass["windows"] <= len(text["losses"][0]["windows"]):
            return f"{subject} is of {mass['windows']} windows, the losses of {len(text['losses'][0]['windows'])}"
        for name in (selection + suffix for selection in SELECTIONS for suffix in suffixes):
            values = fractions.get(name, [])
            if len(values) != n_layers:
                return f"{subject}: {name} has {len(values)} layers, but config.yaml has {n_layers}"
            if wrong := [value for value in values if not -ROUNDING <= value <= 1 + ROUNDING]:
                return f"{subject}: {name} is {wrong[0]:g} of the oracle's, expected 0 to 1"
        for one, other in itertools.combinations(SELECTIONS, 2):
            if FREE in suffixes and n_layers > 1 and fractions[one + FREE] == fractions[other + FREE]:
                return f"{subject}: {one} and {other} have the same shares in all layers"
        for name in SELECTIONS if FREE in suffixes else ():
            above = np.array(fractions[name + FREE]) - np.array(fractions[name])
            if (above > ROUNDING).any():
                return f"{subject}: {name}{FREE} is above {name} in layer {int(above.argmax())}"
        chosen, chance = (np.array(fractions[name]) for name in ("chosen", "random"))
        worse = chosen < chance - ROUNDING
        # The indexer of a new model has no better blocks.
        if text["step"] and (chosen.mean() < chance.mean() - ROUNDING or worse.mean() > MAX_WORSE_LAYERS):
            numbers = f"{chosen.mean():.3f} of the oracle's, random ones {chance.mean():.3f}"
            return f"{subject}: the indexer's have {numbers}: worse than chance in {worse.sum()} of {n_layers} layers"
    return None


RELATIONS: tuple[Find, ...] = (
    _find_other_rows,
    _find_impossible_loss,
    _find_repeated_windows,
    _find_other_measurement,
    _find_other_early_loss,
    _find_copied_row,
    _find_impossible_gain,
    _find_impossible_mass,
    _find_worse_blocks,
)
