"""Format the numbers and settings of a run for people."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from nsa_lab.config import RunConfig, TrainConfig
from nsa_lab.runs.attempts import shorten_middle
from nsa_lab.runs.history import History, RunFacts, collect_facts, compute_median_speeds

MAX_SECONDS = 1000 * 365 * 86_400
# Descriptions of `data.source`.
SOURCE_NAMES = {
    "stdlib": "Python's own source text",
    "local": "local files",
    "fineweb_edu": "FineWeb-Edu",
    "synthetic": "random bytes",
    "recall": "text with facts to retrieve",
}


def format_settings(config: RunConfig) -> str:
    """Return the configuration in one line, for a heading."""
    model = config.model
    return (
        f"{model.attention}, {model.n_layers} layers of width {model.dim:,}, {format_steps(config.train)} tokens, "
        f"{SOURCE_NAMES[config.data.source]}, {config.runtime.precision}"
    )


def format_steps(train: TrainConfig) -> str:
    """Return `300 steps of 4 × 512`, for all stages."""
    return ", then ".join(
        f"{stage.steps:,} steps of {stage.sequences_per_step:,} × {stage.seq_len:,}" for stage in train.plan
    )


def format_lengths(train: TrainConfig) -> str:
    """Return the sequence lengths: `512`, or `2,048, then 8,192` if stages differ."""
    return ", then ".join(dict.fromkeys(f"{stage.seq_len:,}" for stage in train.plan))


def format_facts(history: History) -> list[tuple[str, str]]:
    """Return names and formatted values of the key numbers of a run, without those that it did not record."""
    facts = collect_facts(history)
    formatted = {
        "state": history.state,
        "steps": f"{facts.step:,} of {facts.steps:,}",
        "tokens": f"{facts.tokens:,}",
        "validation, bits per byte": format_validation(history, facts),
        "training, bits per byte": _format_optional(
            facts.last_train_bpb, "{:,.3f}" + _format_n_readings(facts.last_train_readings)
        ),
        "tokens per second, median": format_speed(history),
        "training time": format_training_time(facts),
        "peak memory": _format_optional(facts.memory_peak_bytes, format_size),
        "peak memory counts": describe_memory(facts),
        "attempts": format_attempts(history),
        "attention": facts.attention,
        "parameters": _format_optional(facts.parameters, "{:,}"),
        "device": facts.device,
        "backend": format_backend(history, facts),
        "text": f"{SOURCE_NAMES[facts.source]} (data.source: {facts.source}), "
        f"{format_lengths(history.config.train)} tokens per sequence",
        "guards": format_guards(history.config.train),
        "configuration": facts.config_hash,
    }
    return [(name, value) for name, value in formatted.items() if value]


def format_validation(history: History, facts: RunFacts) -> str | None:
    """Return `7.991 → 0.922 (best 0.921)`, or `7.991, untrained`."""
    first, last, best = facts.first_validation_bpb, facts.last_validation_bpb, facts.best_validation_bpb
    if first is None or last is None or best is None:
        return None
    is_trained = any(event["step"] for event in history.evaluations)
    return f"{first:,.3f} → {last:,.3f} (best {best:,.3f})" if is_trained else f"{first:,.3f}, untrained"


def _format_n_readings(n_readings: int) -> str:
    return f" (mean of the last {n_readings} readings)" if n_readings > 1 else ""


# Fields of `RunFacts` that two runs are compared by, under the names of `format_facts`.
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


def format_differences(first: RunFacts, second: RunFacts) -> dict[str, str]:
    """Return `second` relative to `first` in percent, by name. Losses also have the difference in bits per byte."""
    differences = {}
    for name, field in COMPARED_FACTS.items():
        before, after = getattr(first, field), getattr(second, field)
        if before and after is not None:
            percent = f"{after / before - 1:+.1%}"
            differences[name] = f"{after - before:+.4f} ({percent})" if name.endswith("bits per byte") else percent
    return differences


def diff_settings(first: RunConfig, second: RunConfig) -> list[tuple[str, object, object]]:
    """Return (dotted key, first value, second value) of the settings that differ. None: a configuration lacks the key."""
    a, b = first.settings(), second.settings()
    return [(key, a.get(key), b.get(key)) for key in {**a, **b} if a.get(key) != b.get(key)]


def format_speed(history: History) -> str | None:
    """Return the median tokens per second of each stage: `424,276`, or `424,276, then 339,000`."""
    return ", then ".join(f"{speed:,.0f}" for speed in compute_median_speeds(history)) or None


def format_training_time(facts: RunFacts) -> str | None:
    """Return the duration of all attempts, `17 min 37 s`. For several attempts also the time from first start to end."""
    if facts.wall_s is None or facts.elapsed_s is None:
        return None
    if facts.attempts < 2:
        return format_duration(facts.wall_s)
    return (
        f"{format_duration(facts.wall_s)} over {facts.attempts} attempts; "
        f"{format_duration(facts.elapsed_s)} from start to end"
    )


def describe_memory(facts: RunFacts) -> str | None:
    """Return what `peak memory` counts on the device of the run (the trainer's `memory_peak_bytes`)."""
    if not facts.memory_peak_bytes or not facts.device:
        return None
    return "the whole process, with Python and torch" if facts.device == "cpu" else "tensors on the GPU"


def format_size(size_bytes: float) -> str:
    """Return `4.76 GB` or `45.60 MB`; GB are 10^9 bytes, MB 10^6."""
    return f"{size_bytes / 1e9:.2f} GB" if size_bytes >= 5e8 else f"{size_bytes / 1e6:.2f} MB"


def format_backend(history: History, facts: RunFacts) -> str | None:
    """Return `triton (requested: auto)`."""
    backends = format_backends(facts.backend)
    return backends and f"{backends} (requested: {history.config.runtime.backend})"


def format_attempts(history: History) -> str:
    """Return `1`, or the number of attempts and the steps and outcome of each."""
    attempts = history.attempts()
    if len(attempts) < 2:
        return str(len(attempts))
    return f"{len(attempts)}: " + ", ".join(
        shorten_middle([f"{a.from_step:,} to {a.last_step:,} {a.outcome}" for a in attempts])
    )


def format_guards(train: TrainConfig) -> str:
    """Return which rules could halt the run and which were disabled. Without this, "no guard fired" means little."""
    rules = {
        f"a loss {train.spike_sigma:g} standard deviations above its window": train.spike_sigma > 0,
        f"fewer than {train.min_tokens_per_s:,.0f} tokens/s": train.min_tokens_per_s > 0,
        "a stall": train.stall_action == "halt",
    }
    names = dict(zip(rules, ("train.spike_sigma", "train.min_tokens_per_s", "train.stall_action"), strict=True))
    on = ["a non-finite number", *(rule for rule, is_on in rules.items() if is_on)]
    off = [names[rule] for rule, is_on in rules.items() if not is_on]
    return f"halts on {', '.join(on)}" + (f"; disabled: {', '.join(off)}" if off else "")


def format_backends(backend: dict[str, Any] | None) -> str | None:
    """Return `triton`, or the backend of each part if they differ."""
    if not backend:
        return None
    names = {part: entry["backend"] for part, entry in backend.items()}
    return next(iter(names.values())) if len(set(names.values())) == 1 else ", ".join(f"{p} {n}" for p, n in names.items())


def format_fill_progress(event: Mapping[str, Any]) -> str:
    """Return a `fill` event as text: `filling: 12,345 documents, 45.6 MB, 3.2 MB/s, 5 min 12 s left`."""
    activity, rate, remaining_s = event.get("doing", "filling"), event.get("bytes_per_s"), event.get("left_s")
    if not event.get("documents"):
        return activity
    parts = [f"{event['documents']:,} documents", f"{event.get('bytes', 0) / 1e6:,.1f} MB"]
    parts += [f"{rate / 1e6:,.1f} MB/s"] if rate is not None else []
    parts += [f"{format_duration(remaining_s)} left"] if remaining_s is not None else []
    return f"{activity}: {', '.join(parts)}"


def format_duration(seconds: float) -> str:
    """Return `1 h 02 min`, `3 min 05 s` or `12 s`; `over 1,000 years`, as at a speed of nearly 0, also for infinity."""
    if seconds > MAX_SECONDS:
        return "over 1,000 years"
    total = round(seconds)
    if total >= 3600:
        return f"{total // 3600} h {total % 3600 // 60:02d} min"
    return f"{total // 60} min {total % 60:02d} s" if total >= 60 else f"{total} s"


def _format_optional(value: float | None, format_value: str | Callable[[float], str]) -> str | None:
    if value is None:
        return None
    return format_value.format(value) if isinstance(format_value, str) else format_value(value)
