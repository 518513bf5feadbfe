"""The numbers and settings of a run, written as a person reads them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from nsa_lab.config import RunConfig, TrainConfig
from nsa_lab.runs.history import History, RunFacts, collect_facts, compute_median_speeds

# What `data.source` means.
SOURCE_NAMES = {
    "stdlib": "the text that comes with Python",
    "local": "files of one's own",
    "fineweb_edu": "FineWeb-Edu",
    "synthetic": "random bytes",
    "recall": "text with facts to look up",
}


def format_settings(config: RunConfig) -> str:
    """The configuration in one line, for a heading."""
    model = config.model
    return (
        f"{model.attention}, {model.n_layers} layers of width {model.dim:,}, {format_steps(config.train)} tokens, "
        f"{SOURCE_NAMES[config.data.source]}, {config.runtime.precision}"
    )


def format_steps(train: TrainConfig) -> str:
    """`300 steps of 4 × 512`, stage by stage."""
    return ", then ".join(
        f"{stage.steps:,} steps of {stage.sequences_per_step:,} × {stage.seq_len:,}" for stage in train.plan
    )


def format_lengths(train: TrainConfig) -> str:
    """`512`, or `2,048, then 8,192` where stages differ."""
    return ", then ".join(dict.fromkeys(f"{stage.seq_len:,}" for stage in train.plan))


def format_facts(history: History) -> list[tuple[str, str]]:
    """Names and values as a person reads them; what the run does not say is left out."""
    known = collect_facts(history)
    shown = {
        "state": history.state,
        "steps": f"{known.step:,} of {known.steps:,}",
        "tokens": f"{known.tokens:,}",
        "validation, bits per byte": format_validation(history, known),
        "training, bits per byte": _format_optional(
            known.last_train_bpb, "{:,.3f}" + _format_n_readings(known.last_train_readings)
        ),
        "tokens per second, median": format_speed(history),
        "training time": format_training_time(known),
        "peak memory": _format_optional(known.memory_peak_bytes, format_size),
        "peak memory counts": describe_memory(known),
        "attempts": format_attempts(history),
        "attention": known.attention,
        "parameters": _format_optional(known.parameters, "{:,}"),
        "device": known.device,
        "backend": format_backend(history, known),
        "text": f"{SOURCE_NAMES[known.source]} (data.source: {known.source}), "
        f"{format_lengths(history.config.train)} tokens per sequence",
        "guards": format_guards(history.config.train),
        "configuration": known.config_hash,
    }
    return [(name, value) for name, value in shown.items() if value]


def format_validation(history: History, known: RunFacts) -> str | None:
    """`7.991 → 0.922 (best 0.921)`, or `7.991, untrained`."""
    first, last, best = known.first_validation_bpb, known.last_validation_bpb, known.best_validation_bpb
    if first is None or last is None or best is None:
        return None
    trained = any(event["step"] for event in history.evaluations)
    return f"{first:,.3f} → {last:,.3f} (best {best:,.3f})" if trained else f"{first:,.3f}, untrained"


def _format_n_readings(readings: int) -> str:
    return f" (mean of the last {readings} readings)" if readings > 1 else ""


# Of `Facts`, under the names that `shown_facts` gives them.
COMPARED_FACTS = {
    "steps": "step",
    "tokens": "tokens",
    "validation, bits per byte": "last_validation_bpb",
    "training, bits per byte": "last_train_bpb",
    "tokens per second, median": "tokens_per_s",
    "training time": "wall_s",
    "peak memory": "memory_peak_bytes",
    "parameters": "parameters",
}


def format_differences(one: RunFacts, other: RunFacts) -> dict[str, str]:
    """By name, how much more `other` has than `one`, in percent, and of losses in bits per byte too."""
    told = {}
    for name, field in COMPARED_FACTS.items():
        before, after = getattr(one, field), getattr(other, field)
        if before and after is not None:
            share = f"{after / before - 1:+.1%}"
            told[name] = f"{after - before:+.4f} ({share})" if name.endswith("bits per byte") else share
    return told


def diff_settings(one: RunConfig, other: RunConfig) -> list[tuple[str, object, object]]:
    """Dotted keys of the settings in which two configurations differ, and both values; None where one does not read it."""
    ours, theirs = one.settings(), other.settings()
    return [(key, ours.get(key), theirs.get(key)) for key in {**ours, **theirs} if ours.get(key) != theirs.get(key)]


def format_speed(history: History) -> str | None:
    """`424,276`, or `424,276, then 339,000` where stages differ: tokens per second, each a median of readings."""
    return ", then ".join(f"{speed:,.0f}" for speed in compute_median_speeds(history)) or None


def format_training_time(known: RunFacts) -> str | None:
    """`17 min 37 s`: how long a trainer ran. Of several attempts also how long it was from the first start to the end."""
    if known.wall_s is None or known.elapsed_s is None:
        return None
    if known.attempts < 2:
        return format_duration(known.wall_s)
    return f"{format_duration(known.wall_s)} over {known.attempts} attempts; {format_duration(known.elapsed_s)} from start to end"


def describe_memory(known: RunFacts) -> str | None:
    """What `peak memory` is the size of, which differs by device (`memory_peak_bytes` of the trainer)."""
    if not known.memory_peak_bytes or not known.device:
        return None
    return "the whole process, with Python and torch" if known.device == "cpu" else "tensors on the GPU"


def format_size(size_bytes: float) -> str:
    """`4.76 GB` or `45.6 MB`: 10^9 and 10^6 bytes, here as everywhere."""
    return f"{size_bytes / 1e9:.2f} GB" if size_bytes >= 5e8 else f"{size_bytes / 1e6:.2f} MB"


def format_backend(history: History, known: RunFacts) -> str | None:
    """`triton (asked for: auto)`."""
    used = format_backends(known.backend)
    return used and f"{used} (asked for: {history.config.runtime.backend})"


def format_attempts(history: History) -> str:
    """`1`, or how each of several attempts went."""
    attempts = history.attempts()
    if len(attempts) < 2:
        return str(len(attempts))
    return f"{len(attempts)}: " + ", ".join(f"{a.from_step:,} to {a.last_step:,} {a.outcome}" for a in attempts)


def format_guards(train: TrainConfig) -> str:
    """Which rules could have halted the run, and which were off: what "no guard fired" is worth."""
    rules = {
        f"a loss {train.spike_sigma:g} deviations over its window": train.spike_sigma > 0,
        f"fewer than {train.min_tokens_per_s:,.0f} tokens/s": train.min_tokens_per_s > 0,
        "a stall": train.stall_action == "halt",
    }
    names = dict(zip(rules, ("train.spike_sigma", "train.min_tokens_per_s", "train.stall_action"), strict=True))
    on = ["a number that is not finite", *(rule for rule, is_on in rules.items() if is_on)]
    off = [names[rule] for rule, is_on in rules.items() if not is_on]
    return f"halts on {', '.join(on)}" + (f"; off: {', '.join(off)}" if off else "")


def format_backends(backend: dict[str, Any] | None) -> str | None:
    """`triton`, or which part runs on what where they differ."""
    if not backend:
        return None
    names = {part: choice["backend"] for part, choice in backend.items()}
    return next(iter(names.values())) if len(set(names.values())) == 1 else ", ".join(f"{p} {n}" for p, n in names.items())


def format_fill_progress(told: Mapping[str, Any]) -> str:
    """A `fill` event, or its fields, in words: `filling: 12,345 documents, 45.6 MB, 3.2 MB/s, 5 min 12 s left`."""
    doing, rate, left = told.get("doing", "filling"), told.get("bytes_per_s"), told.get("left_s")
    if not told.get("documents"):
        return doing
    parts = [f"{told['documents']:,} documents", f"{told.get('bytes', 0) / 1e6:,.1f} MB"]
    parts += [f"{rate / 1e6:,.1f} MB/s"] if rate is not None else []
    parts += [f"{format_duration(left)} left"] if left is not None else []
    return f"{doing}: {', '.join(parts)}"


def format_duration(seconds: float) -> str:
    """`1 h 02 min`, `3 min 05 s` or `12 s`."""
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 60} min {whole % 60:02d} s" if whole >= 60 else f"{whole} s"


def _format_optional(value: float | None, how: str | Callable[[float], str]) -> str | None:
    if value is None:
        return None
    return how.format(value) if isinstance(how, str) else how(value)
