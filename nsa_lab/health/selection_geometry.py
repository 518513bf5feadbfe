"""Numbers of selected keys, and their overlap with the window, as far as lengths and configuration determine them.

Every query reads all of its selected blocks, so `sel_keys` depends on the lengths of the documents only. The first blocks
and the latest ones are always selected, so `sel_window_overlap` has bounds that no selection exceeds.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nsa_lab.config import NSAConfig
from nsa_lab.runs.history import History, find_stages

# Constants of nsa_lab.train.validation: it measures the first sequences of a batch, or the start of a longer one.
MEASURED_SEQUENCES, MEASURED_TOKENS = 2, 1 << 16
FLOAT32_ERROR, ROUNDING = 1e-6, 1e-3
# Minimum number of readings with few keys, and of the others; largest of their keys / least of the others (0.91 measured).
MIN_FALLEN, FALL_OF_KEYS = 5, 0.75


@dataclass(frozen=True)
class KeyCounts:
    """Keys of a query, means over one document: in selected blocks and in the window.

    `least_overlap` and `largest_overlap`: fraction of the selected keys that are in the window too, if the farthest or the
    nearest blocks are always selected.
    """

    selected: float
    window: float
    least_overlap: float
    largest_overlap: float


def count_keys(length: int, nsa: NSAConfig) -> KeyCounts:
    """Count the keys of every query of a document of `length` tokens."""
    t = np.arange(length)
    own, window = t // nsa.l_sel, np.minimum(t + 1, nsa.w)
    selected = np.minimum(own, nsa.n_sel - 1) * nsa.l_sel + t % nsa.l_sel + 1
    first = t + 1 - window

    def count_window_keys(oldest: int, latest: int) -> np.ndarray:
        """Count the keys in the window of the `oldest` and the `latest` blocks, which may be all blocks."""
        end, start = np.minimum(oldest * nsa.l_sel, t + 1), np.maximum((own + 1 - latest) * nsa.l_sel, 0)
        return np.maximum(end - first, 0) + (t + 1) - np.maximum(np.maximum(start, first), end)

    farthest = count_window_keys(nsa.n_sel - nsa.local_blocks, nsa.local_blocks)
    nearest = count_window_keys(nsa.sink_blocks, nsa.n_sel - nsa.sink_blocks)
    total = float(selected.sum())
    return KeyCounts(total / length, float(window.mean()), float(farthest.sum()) / total, float(nearest.sum()) / total)


@dataclass(frozen=True)
class SelectionBounds:
    """Bounds of the mean number of selected keys and of the overlap, and whether the overlap is the same for any selection.

    All are [readings].
    """

    lowest_keys: np.ndarray
    highest_keys: np.ndarray
    least_overlap: np.ndarray
    largest_overlap: np.ndarray
    is_fixed: np.ndarray


def compute_bounds(history: History, steps: np.ndarray) -> SelectionBounds:
    """Compute the bounds of the readings at `steps`, from the stage and from the recorded keys.

    Sequences of several masked documents have fewer keys than the sequence of one. How many depends on lengths that are not
    recorded. Known is that the query with the most keys has as many queries before it, each with one key fewer, and all of
    these read their whole document.
    """
    train, nsa = history.config.train, history.config.nsa
    stages = find_stages(steps, train)
    lengths = np.array([stage.seq_len for stage in train.plan])[stages]
    counts = [count_keys(stage.seq_len, nsa) for stage in train.plan]
    selected, window, least, largest = (
        np.array([getattr(count, name) for count in counts])[stages]
        for name in ("selected", "window", "least_overlap", "largest_overlap")
    )
    is_known, is_masked = lengths <= MEASURED_TOKENS, history.config.data.documents == "mask"
    keys = _get_readings(history, "sel_keys", steps)
    keys = keys if is_masked else np.where(np.isnan(keys), selected, keys)
    most = np.nan_to_num(_get_readings(history, "sel_keys_most", steps), nan=1.0)
    n_tokens = MEASURED_SEQUENCES * lengths
    n_full = np.clip(most, 1, np.minimum(nsa.n_sel * nsa.l_sel, lengths))
    n_short = np.minimum(n_full, nsa.w)
    keys_of_full = n_full * (n_full + 1) / 2
    shared_of_full = n_short * (n_short + 1) / 2 + (n_full - n_short) * nsa.w
    is_whole = is_known & np.isclose(keys, selected, rtol=FLOAT32_ERROR, atol=0)
    rest = n_tokens - n_full  # each of these queries has at least its own key
    return SelectionBounds(
        lowest_keys=np.where(is_known & (not is_masked), selected, (keys_of_full + rest) / n_tokens),
        highest_keys=selected,
        least_overlap=np.where(is_whole, least, (shared_of_full + rest * min(nsa.w, 1)) / n_tokens / keys),
        largest_overlap=np.where(is_whole, largest, np.minimum(1.0, window / keys)),
        is_fixed=np.isclose(least, largest, rtol=FLOAT32_ERROR, atol=0),
    )


def find_fixed_overlaps(history: History, steps: np.ndarray, overlaps: np.ndarray) -> np.ndarray:
    """Return which `overlaps` [readings, layers] may repeat, bool: geometry determines them, or they are at a bound.

    Only the latest blocks of a selection, which are always selected, may be in the window, or the whole selection.
    """
    bounds = compute_bounds(history, steps)
    is_bound = [
        np.isclose(overlaps, bound[:, None], rtol=FLOAT32_ERROR, atol=0)
        for bound in (bounds.least_overlap, bounds.largest_overlap)
    ]
    return bounds.is_fixed[:, None] | is_bound[0] | is_bound[1]


def find_impossible_keys(history: History) -> tuple[np.ndarray, str] | None:
    """Return the steps of readings with numbers of selected keys that no text gives, and a text; None without readings.

    All layers read equally many keys, which depend on the lengths of the documents only.
    """
    nsa = history.config.nsa
    steps, keys = history.layer_series("sel_keys")
    most_steps, most = history.layer_series("sel_keys_most")
    if not len(steps) or not np.array_equal(steps, most_steps):
        return None
    if (is_wrong := (most > nsa.n_sel * nsa.l_sel) | (keys > most * (1 + ROUNDING))).any():
        text = f"a query reads more than nsa.n_sel * nsa.l_sel = {nsa.n_sel * nsa.l_sel:,} selected keys"
        return steps[is_wrong.any(axis=1)], text
    bounds = compute_bounds(history, steps)
    low, high = bounds.lowest_keys[:, None] * (1 - ROUNDING), bounds.highest_keys[:, None] * (1 + ROUNDING)
    if (is_outside := (keys < low) | (keys > high)).any():
        first = int(is_outside.any(axis=1).argmax())
        text = f"a query reads {keys[first][is_outside[first]][0]:,.1f} selected keys on average, expected"
        text += f" {bounds.lowest_keys[first]:,.1f} to {bounds.highest_keys[first]:,.1f},"
        return steps[is_outside.any(axis=1)], text
    is_wrong = (np.ptp(keys, axis=1) > ROUNDING * keys.max(axis=1)) | (np.ptp(most, axis=1) > 0)
    if is_wrong.any():
        return steps[is_wrong], "the layers read different numbers of selected keys"
    return _find_fall_of_keys(history, steps, keys[:, 0])


def find_impossible_distance(history: History) -> tuple[np.ndarray, str] | None:
    """Return the steps of readings with a distance of selected blocks beyond their sequence, and a text; None without."""
    steps, distances = history.layer_series("sel_distance")
    if not len(steps):
        return None
    train = history.config.train
    lengths = np.array([stage.seq_len for stage in train.plan])[find_stages(steps, train)]
    highest = (lengths - 1) // history.config.nsa.l_sel
    is_wrong = (distances > highest[:, None]).any(axis=1)
    text = "the selected blocks are farther away than the first block of the sequence"
    return (steps[is_wrong], text) if is_wrong.any() else None


def _find_fall_of_keys(history: History, steps: np.ndarray, keys: np.ndarray) -> tuple[np.ndarray, str] | None:
    """Return the steps of readings in a row that are far below all others of their stage; None if there are none.

    Batches are a random sample of the documents, so the shortest documents are not next to each other.
    """
    stages = find_stages(steps, history.config.train)
    for stage in np.unique(stages):
        own_steps, own = steps[stages == stage], keys[stages == stage]
        order = np.sort(own)
        for count in range(MIN_FALLEN, len(own) - MIN_FALLEN + 1):
            is_low = own < FALL_OF_KEYS * order[count]
            if is_low.sum() == count and np.flatnonzero(is_low)[-1] - int(is_low.argmax()) == count - 1:
                text = f"a query reads {own[is_low].max():,.1f} selected keys or fewer in {count} readings in a row"
                return own_steps[is_low], f"{text}, and {order[count]:,.1f} or more in the others of the stage,"
    return None


def find_impossible_overlap(history: History) -> tuple[np.ndarray, str] | None:
    """Return the steps of readings whose overlap with the window no selection has, and a text; None without readings."""
    steps, overlaps = history.layer_series("sel_window_overlap")
    if not len(steps):
        return None
    bounds = compute_bounds(history, steps)
    low, high = bounds.least_overlap * (1 - ROUNDING), bounds.largest_overlap * (1 + ROUNDING)
    is_wrong = ((overlaps < low[:, None]) | (overlaps > high[:, None])).any(axis=1)
    if not is_wrong.any():
        return None
    first = int(is_wrong.argmax())
    text = f"sel_window_overlap is {overlaps[first].min():.3f} to {overlaps[first].max():.3f}, by layer, "
    text += f"but every selection has {bounds.least_overlap[first]:.3f} to {bounds.largest_overlap[first]:.3f}"
    return steps[is_wrong], text


def _get_readings(history: History, name: str, steps: np.ndarray) -> np.ndarray:
    """Return the first layer of a statistic at `steps`; NaN where it was not recorded."""
    own_steps, values = history.layer_series(name)
    readings = np.full(len(steps), np.nan)
    if len(own_steps):
        indices = np.minimum(np.searchsorted(own_steps, steps), len(own_steps) - 1)
        readings = np.where(own_steps[indices] == steps, values[indices, 0], np.nan)
    return readings
