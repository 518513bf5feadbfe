"""The numbers of the five reports that this project began from, what they meant, and what a run of ours recorded instead.

Theirs are quoted; ours are read from the run's own record, or said not to be in it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from nsa_lab.health.matched_pair import build_side_by_side, find_matched_pair
from nsa_lab.inference import NoCheckpoint
from nsa_lab.runs.events import Event
from nsa_lab.runs.history import History, collect_facts
from nsa_lab.runs.summary import format_backends, format_size, format_speed, format_training_time
from nsa_lab.workbook.samples import count_selected_keys

REPORTS = {
    "S0": "Single A100 Production Run, 2025-08-28",
    "S1": "A100 Retest Performance Still Critical v2, 2025-08-31",
    "S2": "Single A100 Production Run v2, 2025-08-28",
    "S3": "FlashAttention Fix Validation v1, 2025-08-28",
    "S4": "A100 80GB 50k Training Run Configuration",
}
LAST_STEP, LAST_TOKENS = 1740, 1740 * 2 * 2047  # where S4 was written: its step is a micro-batch of 2 x 2047 targets
NOT_RECORDED = "not recorded"


@dataclass(frozen=True)
class Number:
    """One number of a report: what of, in its own words, the report, what a reading of its code found it to mean, and how
    ours is read from a run (and its dense twin, where there is one); None: the run does not say."""

    what: str
    theirs: str
    report: str
    meant: str
    ours: Callable[[History, History | None], str | None]


def table(run: History, twin: History | None = None) -> str:
    """Every number beside ours, as a Markdown table with its legend."""
    head = ["| | their number | in | what it meant | ours |", "|---|---|---|---|---|"]
    rows = [f"| {n.what} | {n.theirs} | {n.report} | {n.meant} | {_cell(n.ours(run, twin))} |" for n in NUMBERS]
    legend = "; ".join(f"{key}: *{title}*" for key, title in REPORTS.items())
    return "\n".join([*head, *rows, "", f"Ours: `{run.run}`. {legend}."])


def _cell(text: str | None) -> str:
    return (text or NOT_RECORDED).replace("|", "\\|")


def _steps_done(run: History, _: History | None) -> str:
    attempts = run.attempts()
    return (
        f"{run.last_step:,} of {run.config.train.steps:,} optimiser steps, {run.status.get('status', 'unknown')}, "
        f"{len(attempts)} attempt{'s' * (len(attempts) != 1)}"
    )


def _speed(run: History, _: History | None) -> str | None:
    speed = run.series("tokens_per_s")[1]
    device = collect_facts(run).device
    return f"{format_speed(run)} median, {speed.max():,.0f} peak, on {device}" if len(speed) else None


def _speed_without_checkpointing(run: History, twin: History | None) -> str | None:
    told = _speed(run, twin)
    return told and f"{told}; gradient checkpointing {'on' if run.config.runtime.gradient_checkpointing else 'off'}"


def _step_seconds(run: History, _: History | None) -> str | None:
    took = run.series("dt_s")[1]
    tokens = run.config.train.tokens // run.config.train.steps
    return f"{np.median(took):.4g} s per optimiser step of {tokens:,} tokens" if len(took) else None


def _time(run: History, _: History | None) -> str | None:
    known = collect_facts(run)
    return f"{format_training_time(known)}: {known.step:,} steps, {known.tokens:,} tokens" if known.wall_s else None


def _finite(run: History, _: History | None) -> str | None:
    bad = [event for event in run.current_events("step", "eval") if event.get("nonfinite")]
    if not run.steps:
        return None
    return f"step {bad[0]['step']:,}: {', '.join(bad[0]['nonfinite'])}" if bad else f"never, in {run.last_step:,} steps"


def _silence(run: History, _: History | None) -> str | None:
    gaps = [
        later["t"] - earlier["t"]
        for earlier, later in zip(run.events, run.events[1:], strict=False)
        if earlier["attempt"] == later["attempt"]
    ]
    if not gaps:
        return None
    stalls = len(run.events_of_kind("stall"))
    return f"{stalls or 'no'} stall{'s' * (stalls != 1)}; the record was silent for {max(gaps):.1f} s at most"


def _gpu_use(run: History, _: History | None) -> str | None:
    beats = run.events_of_kind("heartbeat")
    used = [beat["gpu_util"] for beat in beats if beat.get("phase") == "step" and beat.get("gpu_util") is not None]
    return (
        f"{np.median(used):.0f} % median, over the {len(used)} of {len(beats)} heartbeats within a step" if used else None
    )


def _memory(run: History, _: History | None) -> str | None:
    peak = collect_facts(run).memory_peak_bytes
    if not peak:
        return None
    at_once = run.config.train.micro_batch_size or run.config.train.batch_size
    return f"{format_size(peak)} at the peak, {at_once} sequences at once"


def _data_wait(run: History, _: History | None) -> str | None:
    waited = run.series("data_s")[1]
    return f"{1000 * np.median(waited):.2f} ms per step, median" if len(waited) else None


def _parameters(run: History, _: History | None) -> str | None:
    counted = collect_facts(run).parameters
    return f"{counted:,}" if counted else None


def _at(run: History, step: int) -> Event | None:
    """The last reading at or before a step that the run got to."""
    before = [event for event in run.steps if event["step"] <= step] if run.last_step >= step else []
    return before[-1] if before else None


def _loss_at(step_of: Callable[[History], int]) -> Callable[[History, History | None], str | None]:
    def read(run: History, _: History | None) -> str | None:
        first, found = _at(run, 1), _at(run, step_of(run))
        if found is None or first is None or None in (found["bpb"], first["bpb"]):
            return None
        return f"{first['bpb']:.2f} → {found['bpb']:.2f} bits per byte at step {found['step']:,}"

    return read


def _rate(run: History, _: History | None) -> str | None:
    found = _at(run, LAST_STEP)
    return f"{found['lr']:.3g} at step {found['step']:,}" if found else None


def _validation(run: History, _: History | None) -> str | None:
    steps, bpb = run.validation()
    return f"{bpb[-1]:.3f} bits per byte at step {steps[-1]:,}, {len(bpb)} evaluations" if len(bpb) else None


def _entropy(run: History, _: History | None) -> str | None:
    steps, values = run.layer_series("gate_entropy")
    return (
        f"{values[-1].min():.3f} to {values[-1].max():.3f} by layer at step {steps[-1]:,}; "
        f"{values[0].min():.3f} to {values[0].max():.3f} at step {steps[0]:,}"
        if len(values)
        else None
    )


def _shares(run: History, _: History | None) -> str | None:
    last = [values[-1] for branch in ("cmp", "sel", "win") if len(values := run.layer_series(f"gate_share_{branch}")[1])]
    mean = ", ".join(f"{share.mean():.3f}" for share in last)
    spread = max((np.ptp(share) for share in last), default=0.0)
    return f"[{mean}] mean over layers; a branch differs by up to {spread:.3f} between layers" if last else None


def _keys(run: History, _: History | None) -> str | None:
    if run.config.model.attention != "nsa":
        return None
    try:
        mean, most = count_selected_keys(run.run_dir)
    except NoCheckpoint:
        return None
    return f"{mean:.1f} mean, {most:,} most at {run.config.train.seq_len:,} tokens, counted in the last checkpoint's blocks"


def _fallbacks(run: History, _: History | None) -> str | None:
    named = format_backends(collect_facts(run).backend)
    return named and f"{named}, chosen once, before the first step"


def _against_dense(run: History, twin: History | None) -> str | None:
    pair = find_matched_pair([run, twin]) if twin else None
    ratio = pair and {name: ratio for name, *_, ratio in build_side_by_side(*pair)}["tokens per second, median"]
    return f"{ratio:.2f} of the dense twin's tokens per second at {run.config.train.seq_len:,} tokens" if ratio else None


NUMBERS = (
    Number(
        "steps finished",
        "“successful 50k training run”",
        "S4",
        "written at step 1,740 of 50,000, 3.5 %; the end is recorded nowhere",
        _steps_done,
    ),
    Number(
        "tokens per second",
        "16 with gradient checkpointing, 27 without; 785 expected",
        "S0",
        "without flash-attn every row fell back to a slow path, and no error said so; checkpointing costs 1.7×, not 49×",
        _speed_without_checkpointing,
    ),
    Number(
        "tokens per second",
        "11 at 512 tokens, 10 at 2,048",
        "S1",
        "one Python call per token and layer; the switches that were tried are not read on that route",
        _speed,
    ),
    Number(
        "tokens per second",
        "39; 300+ asked",
        "S3",
        "most likely the same route; the 17.6 M tokens per second beside it are one attention call, not a model",
        _speed,
    ),
    Number(
        "tokens per second",
        "9,200–9,400, peak 9,546",
        "S4",
        "the speed is real, the model under it is not NSA: its compressed branch is a constant",
        _speed,
    ),
    Number(
        "time per step", "0.436 s", "S4", "a micro-batch of 4,094 tokens; two of them are an optimiser step", _step_seconds
    ),
    Number("time of 50k steps", "~6 hours", "S4", "50,000 micro-batches: 204.7 M tokens, 25,000 updates", _time),
    Number(
        "against dense",
        "“3–4× speedup”",
        "S4",
        "its selection masks a dense S × S product: nothing gets cheaper",
        _against_dense,
    ),
    Number(
        "first NaN",
        "at step 1",
        "S2",
        "never explained; an inverted mask and an uninitialised index buffer fit the flags",
        _finite,
    ),
    Number("hang", "“hung at step 5”", "S3", "most likely the log: a line for steps 1 to 5, then every 20th", _silence),
    Number("GPU utilisation", "29 % (CPU 96 %)", "S1", "the GPU waited for Python", _gpu_use),
    Number("GPU utilisation", "68–73 %", "S4", "about 1.4 % of the card's arithmetic", _gpu_use),
    Number("memory", "3,069 MiB", "S4", "with gradient checkpointing, which cost it 40 % of its speed", _memory),
    Number("waiting for data", "0 ms", "S4", "the loader was armed to go on with noise when the text failed", _data_wait),
    Number("parameters", "“125m” in the configuration's name", "S4", "78.30 M with bytes as tokens", _parameters),
    Number(
        "loss at step 1,740",
        f"5.73 → 2.64 nats = {5.73 / math.log(2):.2f} → {2.64 / math.log(2):.2f} bits per byte",
        "S4",
        "between counting single bytes and counting pairs: gradients flow, more it does not show",
        _loss_at(lambda run: LAST_STEP),
    ),
    Number(
        "the same after as many tokens",
        f"{LAST_TOKENS / 1e6:.2f} M tokens",
        "S4",
        "its steps were micro-batches, ours are optimiser steps",
        _loss_at(lambda run: max(1, LAST_TOKENS * run.config.train.steps // run.config.train.tokens)),
    ),
    Number("validation", "none given", "S4", "its shard was drawn from the training stream", _validation),
    Number(
        "learning rate at step 1,740",
        "8.71e-05 (“warmup phase”)",
        "S4",
        "1.74e-4 is what its configuration says for that step: the schedule ran at half speed",
        _rate,
    ),
    Number("gate entropy", "1.098 (“healthy, no collapse”)", "S4", "ln 3: the gate never moved", _entropy),
    Number("branch shares", "[0.333, 0.334, 0.333] (“balanced”)", "S4", "the same: a gate at its start", _shares),
    Number(
        "selected keys",
        "721 mean, 1024 max",
        "S4",
        "what comes out when a query's own block is never selected; 752.5 is right at 2,048 tokens",
        _keys,
    ),
    Number(
        "fallbacks", "~10 mask fails (“negligible”)", "S4", "most likely the ten batches of its one evaluation", _fallbacks
    ),
)
