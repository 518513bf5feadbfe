"""Schema of `events.jsonl`: one typed definition per event kind. Standard library only.

The trainer writes events through it (`nsa_lab.train.telemetry.event_log`) and readers read through it
(`nsa_lab.runs.events`). `docs/concepts/events.md` is generated from it (`tools/event_reference.py`).

Invariants
* Kinds and fields are a contract with older and newer versions: one may be added, none removed or changed in type.
* Unknown kinds and unknown fields, which a newer version may write, are valid, and readers return them.
* A number that was not finite is null. Integers fit into 64 bits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, NotRequired, TypedDict

SCHEMA_VERSION = 1
# The year 2100. The first time is 1970, as on a machine without a clock.
LAST_TIME = 4_102_444_800.0
# Resident memory of any Python process, in bytes.
LEAST_MEMORY = 1 << 20

# Phases of the trainer, in heartbeats and stalls. A newer version may add some.
PHASES = (
    *("start", "prepare", "build", "restore", "preflight", "compile", "data", "step", "stats", "eval", "save"),
    *("diagnosis",),
)

Number = float | None
"""A finite number; None if it was not finite."""
PerLayer = list[Number]
"""One number per layer, from the first layer on."""


@dataclass(frozen=True)
class Field:
    """Description of a field. `low` and `high` bound its possible values; `is_positive` excludes 0.

    A value outside its bounds is a finding of `nsa-lab health`, not a violation of the schema. `rounding`: by how much a
    value may be outside.
    """

    description: str
    unit: str = ""
    low: float = -math.inf
    high: float = math.inf
    is_positive: bool = False
    rounding: float = 0.0

    def allows(self, values: Any) -> Any:
        """Return whether finite values are possible, as bool; `values` is a number or an array."""
        is_inside = (values >= self.low - self.rounding) & (values <= self.high + self.rounding)
        return is_inside & (values > 0) if self.is_positive else is_inside


def _count(description: str, unit: str = "") -> Field:
    return Field(description, unit, low=0)


def _memory(description: str) -> Field:
    return Field(description, "bytes", low=0, high=1e14)


def _fraction(description: str) -> Field:
    return Field(description, "fraction", low=0, high=1, rounding=1e-3)


def _divergence(description: str, unit: str) -> Field:
    return Field(description, unit, low=0, rounding=1e-2)


class Event(TypedDict):
    """Fields of every event."""

    v: Annotated[int, Field("version of the schema")]
    t: Annotated[float, Field("time of writing", "seconds since 1970, UTC", low=0, high=LAST_TIME)]
    run: Annotated[str, Field("id of the run")]
    attempt: Annotated[int, _count("number of the training process, from 1")]
    kind: Annotated[str, Field("kind of the event")]
    step: Annotated[int, _count("last completed step, or the step that the event is about", "optimizer steps")]
    tokens: Annotated[int, _count("tokens of the steps up to `step`", "tokens")]
    nonfinite: NotRequired[Annotated[list[str], Field("names of the numbers of this event that were not finite")]]


class AttemptEvent(Event):
    """First event of an attempt: what trains, on what."""

    from_step: Annotated[int, _count("completed steps at the start; later steps of earlier attempts are repeated", "steps")]
    steps: Annotated[int, _count("steps of the whole run", "steps")]
    tensorboard: Annotated[str, Field("`on`, or why TensorBoard files are not written")]
    config_hash: Annotated[str, Field("`RunConfig.hash()` of the configuration")]
    data_identity: Annotated[str, Field("digest of the training text and its split")]
    code: Annotated[dict[str, str | bool | None], Field("`source` (digest of the package), `commit`, `dirty`")]
    versions: Annotated[dict[str, str | None], Field("package versions; null if not installed")]
    device: Annotated[str, Field("`cpu`, or the name of the GPU")]
    ranks: Annotated[int, Field("training processes", low=1)]
    threads: Annotated[int, _count("CPU threads of torch")]
    backend: Annotated[dict[str, dict[str, str]], Field("part of attention -> `backend` and `reason`")]
    params: Annotated[int, _count("parameters of the model")]
    flops_per_token: Annotated[
        dict[str, Number],
        Field("attention type -> work of a training step", "FLOPs per token", high=1e18, is_positive=True),
    ]
    reads_per_token: NotRequired[
        Annotated[dict[str, Number], Field("branch -> keys that a query reads, mean", "keys", low=0)]
    ]
    packing: NotRequired[Annotated[list[dict[str, Number]], Field("statistics of packed rows in epoch 1, per stage")]]
    settings: NotRequired[Annotated[dict[str, float | str | bool | None], Field("monitor settings of this attempt")]]
    source_missing: NotRequired[Annotated[str, Field("why the original text was not available; the prepared one was")]]
    teacher: NotRequired[Annotated[str, Field("digest of the teacher's weights")]]
    indexer: NotRequired[
        Annotated[str, Field("initial indexers of a conversion: `loaded` from `train.initial_weights`, or `new`")]
    ]
    gpu_util: Annotated[str, Field("`on`, or why GPU utilization is not recorded")]
    environment: NotRequired[Annotated[str, Field("SHA-256 of `environment.json`, or `missing`")]]


class StartEvent(AttemptEvent):
    """First event of an attempt that starts at step 0."""


class ResumeEvent(AttemptEvent):
    """First event of an attempt that continues from a checkpoint."""

    checkpoint: NotRequired[Annotated[str, Field("folder of the restored checkpoint")]]
    probe_difference: NotRequired[
        Annotated[Number, Field("largest difference of the probe's logits before saving and after loading", low=0)]
    ]


class FillEvent(Event):
    """Progress of the preparation of the text, before the first event of the attempt."""

    doing: Annotated[str, Field("activity")]
    documents: Annotated[Number, _count("documents so far")]
    bytes: Annotated[Number, _count("text so far", "bytes")]
    tokens_filled: Annotated[int, _count("training tokens so far", "tokens")]
    tokens_wanted: Annotated[int | None, _count("cap on the training tokens; null: none", "tokens")]
    bytes_per_s: Annotated[Number, Field("rate; null until it is known", "bytes per second", low=0)]
    left_s: Annotated[Number, Field("estimated remainder; null until it is known", "seconds", low=0)]


class CompileEvent(Event):
    """The shapes of later steps were compiled before the first step."""

    shapes: Annotated[list[list[int]], Field("(sequences per forward pass, tokens per sequence) of each shape")]
    seconds: Annotated[Number, Field("duration", "seconds", low=0)]


class ReferenceEvent(Event):
    """A reference value for the loss on the held-out text."""

    name: Annotated[str, Field("`xz` (a compressor), `order-0 entropy` or `order-1 entropy`")]
    bytes: Annotated[Number, _count("size of the text", "bytes")]
    bpb: Annotated[Number, Field("compressed size, or entropy", "bits per byte", low=0)]


class PreflightEvent(Event):
    """Result of one check before the first step of a new run."""

    name: Annotated[str, Field("name of the check")]
    ok: Annotated[bool, Field("whether it passed")]
    value: Annotated[str, Field("measured value")]
    limit: Annotated[str, Field("required value")]
    seconds: NotRequired[Annotated[Number, Field("duration", "seconds", low=0)]]
    numbers: NotRequired[Annotated[dict[str, Number], Field("further measurements; names contain the unit")]]


class HeartbeatEvent(Event):
    """Sign of life at regular times (`runtime.heartbeat_s`)."""

    phase: Annotated[str, Field("current phase of the trainer")]
    phase_age_s: Annotated[Number, Field("age of the phase", "seconds", low=0)]
    rss_bytes: Annotated[Number, Field("resident memory of the trainer", "bytes", low=LEAST_MEMORY, high=1e14)]
    gpu_util: Annotated[Number, Field("GPU utilization; null if unknown", "percent", low=0, high=100)]
    suspended_s: NotRequired[
        Annotated[
            Number,
            Field(
                "suspension of the process or machine, reported by the first or second heartbeat after it", "seconds", low=0
            ),
        ]
    ]


class StallEvent(Event):
    """A phase has lasted much longer than usual."""

    phase: Annotated[str, Field("phase of the trainer")]
    phase_age_s: Annotated[Number, Field("age of the phase", "seconds", low=0)]
    limit_s: Annotated[Number, Field("limit of the phase", "seconds", low=0)]
    stacks: Annotated[str, Field("file with the stacks of all threads")]


class StepEvent(Event):
    """Numbers of one optimizer step. Times and speeds are means since the previous `step` event."""

    loss: Annotated[Number, Field("training loss of the step's batch", "nats per token", low=0)]
    bpb: Annotated[Number, Field("the same", "bits per byte", low=0)]
    first_loss: NotRequired[
        Annotated[Number, Field("loss of the first tokens of documents or sequences", "nats per token", low=0)]
    ]
    marked_loss: NotRequired[Annotated[Number, Field("loss of the answers to planted questions", "nats per token", low=0)]]
    selection_loss: NotRequired[Annotated[Number, _divergence("selection loss of the indexer, mean over layers", "nats")]]
    teacher_kl: NotRequired[
        Annotated[Number, _divergence("KL divergence of the model's predictions from the teacher's", "nats per token")]
    ]
    lr: Annotated[Number, Field("learning rate", low=0)]
    grad_norm: Annotated[Number, Field("gradient norm before clipping", low=0)]
    dt_s: Annotated[Number, Field("duration of a step", "seconds", is_positive=True)]
    data_s: Annotated[Number, Field("wait for data per step", "seconds", low=0)]
    data_s_p50: NotRequired[Annotated[Number, Field("median wait for data", "seconds", low=0)]]
    data_s_p95: NotRequired[Annotated[Number, Field("95th percentile of the wait for data", "seconds", low=0)]]
    tokens_per_s: Annotated[Number, Field("speed", "tokens per second", is_positive=True)]
    mem_peak_bytes: Annotated[Number, _memory("peak memory so far: tensors on the GPU, or the whole process on a CPU")]
    weight_bytes: NotRequired[Annotated[dict[str, int], Field("dtype -> size of the weights on this rank", "bytes")]]
    optimizer_bytes: NotRequired[Annotated[dict[str, int], Field("dtype -> size of the optimizer state", "bytes")]]
    grad_norm_layers: NotRequired[Annotated[PerLayer, Field("gradient norm of each layer before clipping", low=0)]]
    gate_update: NotRequired[
        Annotated[PerLayer, Field("norm of the change of the gate weights since the last reading", low=0, high=1e4)]
    ]
    gate_share_cmp: NotRequired[Annotated[PerLayer, _fraction("share of the compressed branch in the gates")]]
    gate_share_sel: NotRequired[Annotated[PerLayer, _fraction("share of the selected branch in the gates")]]
    gate_share_win: NotRequired[Annotated[PerLayer, _fraction("share of the window branch in the gates")]]
    gate_entropy: NotRequired[
        Annotated[
            PerLayer,
            Field(
                "entropy of the branch shares, mean over tokens and heads", "nats", low=0, high=math.log(3), rounding=1e-3
            ),
        ]
    ]
    gate_saturation: NotRequired[Annotated[PerLayer, _fraction("gate values within 0.01 of 0 or 1")]]
    sel_reuse: NotRequired[Annotated[PerLayer, _fraction("selected blocks that the next query selects too")]]
    sel_distance: NotRequired[Annotated[PerLayer, Field("distance of the selected blocks, mean", "blocks", low=0)]]
    sel_sink_share: NotRequired[Annotated[PerLayer, _fraction("selected attention on the first block")]]
    sel_window_overlap: NotRequired[Annotated[PerLayer, _fraction("selected keys that the window reads too")]]
    sel_keys: NotRequired[Annotated[PerLayer, Field("keys that a query reads in selected blocks, mean", "keys", low=0)]]
    sel_keys_most: NotRequired[Annotated[PerLayer, Field("the same, maximum", "keys", low=0)]]
    norm_cmp: NotRequired[Annotated[PerLayer, Field("RMS of the compressed branch's output", low=0)]]
    norm_sel: NotRequired[Annotated[PerLayer, Field("RMS of the selected branch's output", low=0)]]
    norm_win: NotRequired[Annotated[PerLayer, Field("RMS of the window branch's output", low=0)]]


class EvalEvent(Event):
    """Loss on held-out text at a step."""

    split: Annotated[str, Field("`validation`")]
    seq_len: NotRequired[Annotated[int, _count("tokens per sequence", "tokens")]]
    windows: NotRequired[Annotated[int, _count("number of sequences")]]
    text: NotRequired[Annotated[str, Field("digest of the evaluated text; losses with equal digests are comparable")]]
    loss: Annotated[Number, Field("mean loss", "nats per token", low=0)]
    bpb: Annotated[Number, Field("the same", "bits per byte", low=0)]
    first_loss: NotRequired[
        Annotated[Number, Field("loss of the first tokens of documents or sequences", "nats per token", low=0)]
    ]
    window_losses: NotRequired[Annotated[list[Number], Field("loss of each sequence", "nats per token", low=0)]]
    seconds: NotRequired[Annotated[Number, Field("duration", "seconds", low=0)]]


class ReachEvent(Event):
    """Selection benefit: loss on facts outside the window, with the model's selection and with replacements of it.

    Without `answer_loss`, it was not measured, and `why_not` has the reason.
    """

    length: Annotated[int, _count("tokens per sequence", "tokens")]
    sequences: NotRequired[Annotated[int, _count("number of sequences; 4 in older runs")]]
    answer_loss: NotRequired[
        Annotated[dict[str, Number], Field("ablation (`chosen`: none) -> mean loss", "nats per token", low=0)]
    ]
    accuracy: NotRequired[Annotated[dict[str, Number], _fraction("ablation -> correct answers")]]
    why_not: NotRequired[Annotated[str, Field("why it was not measured")]]


class ConversionEvent(Event):
    """Comparison of a converted model with its own dense attention, on held-out text.

    Without `loss`, it was not measured, and `why_not` has the reason.
    """

    length: Annotated[int, _count("tokens per sequence", "tokens")]
    windows: NotRequired[Annotated[int, _count("number of sequences")]]
    loss: NotRequired[
        Annotated[
            dict[str, Number],
            Field("attention (`dense`, `selected` or `nearest` blocks) -> mean loss", "nats per token", low=0),
        ]
    ]
    attention_mass: NotRequired[
        Annotated[PerLayer, _fraction("dense attention mass in the selected blocks, relative to the best blocks")]
    ]
    attention_mass_nearest: NotRequired[Annotated[PerLayer, _fraction("the same for the nearest blocks")]]
    why_not: NotRequired[Annotated[str, Field("why it was not measured")]]


class CheckpointEvent(Event):
    """A checkpoint was saved."""

    path: Annotated[str, Field("folder, relative to the run directory")]
    bytes: Annotated[Number, _count("size", "bytes")]
    seconds: Annotated[Number, Field("duration", "seconds", low=0)]
    pruned: Annotated[list[str], Field("checkpoints that were removed to make room")]


class DigestEvent(Event):
    """Digest of the lines since the previous `digest` event, by which later changes of them are noticed.

    The lines of the first one begin with the file, and those of another with the previous event itself. Lines that another
    process wrote at the same time belong to the next one.
    """

    bytes: Annotated[int, _count("size of the lines", "bytes")]
    sha256: Annotated[str, Field("their SHA-256, 64 hex digits")]


class GuardEvent(Event):
    """A rule found a problem. `nsa_lab/train/guard.py` lists the rules."""

    rule: Annotated[str, Field("name of the rule")]
    value: Annotated[float | str | None, Field("measured value")]
    limit: Annotated[Number, Field("limit of the rule")]
    action: Annotated[str, Field("`warn`, `halt` or `quarantined`")]
    text: Annotated[str, Field("a sentence for the report")]
    path: NotRequired[Annotated[str, Field("quarantined checkpoint")]]
    checkpoint_step: NotRequired[Annotated[int, _count("step of the quarantined checkpoint")]]


class SignalEvent(Event):
    """A signal arrived."""

    signal: Annotated[str, Field("name of the signal")]
    phase: Annotated[str, Field("phase of the trainer")]
    action: Annotated[str, Field("`save and exit` or `exit at once`")]


class ErrorEvent(Event):
    """An error. Any rank may write it."""

    where: Annotated[str, Field("phase, or the part that failed")]
    type: NotRequired[Annotated[str, Field("type of the exception, or name of the signal")]]
    message: Annotated[str, Field("message of the exception")]
    traceback: NotRequired[Annotated[str, Field("traceback")]]
    fatal: Annotated[bool, Field("whether it ended the attempt")]
    cause: NotRequired[Annotated[bool, Field("true: errors that other ranks recorded before it are its consequences")]]


class EndEvent(Event):
    """Last event of an attempt."""

    status: Annotated[str, Field("final status")]
    exit_code: Annotated[int, Field("exit code of the trainer")]
    reason: Annotated[str, Field("reason, a sentence")]


class HaltEvent(EndEvent):
    """Last event of an attempt that a rule, an error or a wrong setting ended."""


KINDS: dict[str, type[Event]] = {
    "fill": FillEvent,
    "start": StartEvent,
    "resume": ResumeEvent,
    "reference": ReferenceEvent,
    "preflight": PreflightEvent,
    "compile": CompileEvent,
    "heartbeat": HeartbeatEvent,
    "step": StepEvent,
    "eval": EvalEvent,
    "reach": ReachEvent,
    "conversion": ConversionEvent,
    "checkpoint": CheckpointEvent,
    "digest": DigestEvent,
    "guard": GuardEvent,
    "stall": StallEvent,
    "signal": SignalEvent,
    "error": ErrorEvent,
    "halt": HaltEvent,
    "end": EndEvent,
}
"""Event kinds in the order in which they usually occur."""

FIRST_KINDS = ("start", "resume")
SUPERSEDED_KINDS = frozenset({"step", "eval", "reach", "conversion", "checkpoint", "guard"})
"""Kinds of events about one step. They are superseded if a later attempt repeats the step."""
