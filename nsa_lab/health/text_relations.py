"""Relations between the numbers about the held-out text: entropies, the size after compression, and the first loss."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from nsa_lab.health.verdict import Problem
from nsa_lab.runs.history import History

ROUNDING = 1e-3
LARGEST_ENTROPY = 8.0  # of a byte
# Other versions of a compressor may differ by this much.
REFERENCE_ERROR = 0.01
# Bytes that compression adds to a text of random bytes, and the largest order-1 entropy / compressed size (1.7 measured; a
# text of log lines has about 20).
HEADER_BYTES, LARGEST_RATIO = 1024, 100.0
INITIAL_ERROR = 0.05  # maximum difference of two losses of a new model on different text (0.5% measured)


def _check_entropies(history: History) -> Problem | None:
    """The entropy of bytes is at most 8 bits, and not higher if the previous byte is known."""
    references = {event.get("name"): event for event in history.events_of_kind("reference")}
    highest = LARGEST_ENTROPY
    for name in ("order-0 entropy", "order-1 entropy"):
        bits = references.get(name, {}).get("bpb")
        if bits is not None and bits > highest + ROUNDING:
            text = f"{name}: {bits:.3f} bits per byte, expected at most {highest:.3f},"
            return Problem(np.array([references[name]["step"]]), text)
        highest = highest if bits is None else bits
    return None


def _check_references(history: History) -> Problem | None:
    """References are of one text, and each has one value. Random bytes have the longest compressed form."""
    events = history.events_of_kind("reference")
    first: dict[str, float] = {}
    for event in events:
        name, step = str(event.get("name")), np.array([event["step"]])
        size, bits = event.get("bytes"), event.get("bpb")
        if size != events[0].get("bytes") or not size:
            return Problem(
                step, f"the reference {name} is of {size} bytes, {events[0].get('name')} of {events[0].get('bytes')},"
            )
        if bits is None:
            continue
        if abs(bits - first.setdefault(name, bits)) > REFERENCE_ERROR * abs(bits):
            return Problem(step, f"the reference {name} is {first[name]:.3f} and {bits:.3f} bits per byte,")
        if name == "xz" and bits > (highest := LARGEST_ENTROPY * (1 + ROUNDING + HEADER_BYTES / size)):
            return Problem(step, f"xz: {bits:.3f} bits per byte, expected at most {highest:.3f},")
    entropy, compressed = first.get("order-1 entropy"), first.get("xz")
    if entropy and compressed is not None and compressed * LARGEST_RATIO < entropy:
        text = f"xz: {compressed:.4f} bits per byte of a text with an order-1 entropy of {entropy:.3f}: it repeats itself,"
        return Problem(events.ints("step")[:1], text)
    return None


def _check_initial_loss(history: History) -> Problem | None:
    """The preflight and the first evaluation measure the same new model."""
    if history.config.train.initial_weights:
        return None  # of a trained model, losses of different text differ
    recorded = [event.get("value") for event in history.events_of_kind("preflight") if event.get("name") == "initial_loss"]
    evaluated = history.evaluations.numbers("loss")[history.evaluations.ints("step") == 0]
    try:
        initial = float(recorded[-1]) if recorded else float("nan")
    except (TypeError, ValueError):  # another version may add a unit
        return None
    is_wrong = np.abs(evaluated / initial - 1) > INITIAL_ERROR
    if not is_wrong.any():
        return None
    text = f"the loss of the new model is {evaluated[is_wrong][0]:.4f} nats per token, in the preflight {initial:.4f},"
    return Problem(np.zeros(int(is_wrong.sum()), dtype=np.int64), text)


RELATIONS: tuple[Callable[[History], Problem | None], ...] = (
    _check_entropies,
    _check_references,
    _check_initial_loss,
)
