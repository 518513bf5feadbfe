"""A run directory as tables: what pictures, verdicts and reports are made from.

Reads files and nothing else: no torch, nothing of the trainer, so a run that was copied here without its checkpoints
reads the same. Every step counts once, in its latest attempt.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from nsa_lab.config import RunConfig
from nsa_lab.runs import directory, events, monitor_settings
from nsa_lab.runs.atomic_io import read_json
from nsa_lab.runs.events import Event
from nsa_lab.runs.lock import lock_owner


@dataclass(frozen=True)
class Attempt:
    """One process that trained: steps it did, when (seconds since 1970), and how it ended.

    `ending`: done, halted, stopped (on request), failed (an error), running, or killed (it left no word).
    """

    number: int
    from_step: int
    last_step: int
    started_at: float
    ended_at: float
    outcome: str


@dataclass(frozen=True)
class StepRange:
    """The steps from `first` to `last` that count as those of one attempt: no later attempt did them again.

    `config` is what it ran with, or None where that is not known.
    """

    attempt: int
    first: int
    last: int
    config: RunConfig | None

    def list_multiples(self, every: int) -> set[int]:
        """Those of its steps that `every` divides; none for 0, which is never."""
        return set(range(-(-self.first // every) * every, self.last + 1, every)) if every else set()


@dataclass(frozen=True)
class History:
    """What a run recorded. `events` are all of them; `steps` and `evaluations` hold each step once, ascending."""

    run_dir: Path
    config: RunConfig
    status: dict[str, Any]
    environment: dict[str, Any]
    events: list[Event]
    steps: list[Event]
    evaluations: list[Event]

    @classmethod
    def read(cls, run: str | Path | History) -> History:
        """The record in a run directory. Raises `RunDirectoryError` if it is none, `ConfigError` for a foreign config."""
        if isinstance(run, History):
            return run
        run_dir = directory.check_run_dir(run)
        record = events.read_events(run_dir)
        return cls(
            run_dir=run_dir,
            config=RunConfig.from_yaml(run_dir / directory.CONFIG),
            status=directory.read_status(run_dir) or events.infer_status(record),
            environment=read_json(run_dir / directory.ENVIRONMENT),
            events=record,
            steps=events.get_step_events(record),
            evaluations=events.get_eval_events(record),
        )

    @property
    def run(self) -> str:
        return self.run_dir.name

    @property
    def last_step(self) -> int:
        """The last step that is known to be done."""
        return max((event["step"] for event in self.current_events("step", "eval", "checkpoint")), default=0)

    @property
    def last_attempt(self) -> int:
        """The number of the newest attempt; 0 before the first."""
        return max((event["attempt"] for event in self.events), default=0)

    @property
    def is_done(self) -> bool:
        return self.status.get("status") == directory.DONE

    @property
    def state(self) -> str | None:
        """What the run's status says; DEAD where it says RUNNING and no trainer is alive, None where it says nothing."""
        said = self.status.get("status")
        return "DEAD" if said == directory.RUNNING and not self.is_alive else said

    @property
    def is_alive(self) -> bool:
        """Whether a trainer holds this directory now."""
        return lock_owner(self.run_dir) is not None

    def events_of_kind(self, *kinds: str) -> list[Event]:
        return [event for event in self.events if event["kind"] in kinds]

    def current_events(self, *kinds: str) -> list[Event]:
        """Events of these kinds, without those about steps that a later attempt did again."""
        return [event for event in events.drop_superseded(self.events) if event["kind"] in kinds]

    def series(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Steps and values of a number of the `step` events; a value that was not finite is NaN."""
        seen = [(event["step"], event[name]) for event in self.steps if name in event]
        return (
            np.array([step for step, _ in seen], dtype=np.int64),
            np.array([np.nan if value is None else value for _, value in seen], dtype=np.float64),
        )

    def layer_series(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Steps and values `[readings, layers]` of a per-layer statistic; empty where the run has none.

        What is no list of numbers, or of another number of layers than the first that is, is no reading.
        """
        seen = [(event["step"], event[name]) for event in self.steps if _is_number_list(event.get(name))]
        seen = [(step, value) for step, value in seen if len(value) == len(seen[0][1])]
        values = np.array([value for _, value in seen], dtype=np.float64)
        return np.array([step for step, _ in seen], dtype=np.int64), values if seen else values.reshape(0, 0)

    def validation(self) -> tuple[np.ndarray, np.ndarray]:
        """Steps and bits per byte on held-out text."""
        seen = [(event["step"], event.get("bpb")) for event in self.evaluations]
        return (
            np.array([step for step, _ in seen], dtype=np.int64),
            np.array([np.nan if value is None else value for _, value in seen], dtype=np.float64),
        )

    def truncate_at(self, step: int) -> History:
        """The record as it was when `step` was done."""
        events, steps, evaluations = (
            [event for event in record if event["step"] <= step] for record in (self.events, self.steps, self.evaluations)
        )
        return replace(self, events=events, steps=steps, evaluations=evaluations)

    def select_current_length(self, steps: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The readings of stages that are as long as the one the run is in."""
        train = self.config.train
        length = train.stage_at(self.last_step).seq_len
        same = np.array([train.stage_at(int(step)).seq_len == length for step in steps], dtype=bool)
        return steps[same], values[same]

    def describe_eval_text(self, evaluation: Event) -> str:
        """Names the text that an evaluation read; two of one name may be compared.

        Runs from before it was recorded read what their data, and the sequences of a forward pass, made of it.
        """
        if "text" in evaluation:
            return evaluation["text"]
        train = self.config.train
        stage = train.stage_at(evaluation["step"])
        data = {event.get("data_identity") for event in self.events_of_kind("start", "resume")}
        windows = train.eval_batches * stage.sequences_per_forward
        return f"{windows} × {stage.seq_len} of {', '.join(sorted(map(str, data)))}"

    def attempts(self) -> list[Attempt]:
        """The attempts in order of their numbers."""
        begun = self.events_of_kind("start", "resume")
        return [self._build_attempt(event, is_last=index == len(begun) - 1) for index, event in enumerate(begun)]

    def config_of_attempt(self, attempt: int) -> RunConfig | None:
        """What an attempt ran with. A run's settings may change between attempts, and config.yaml holds the latest.

        Its first event tells those that its record is judged by. Where it does not, as in runs from before that, they are
        those of config.yaml if the hash is; else they are not known.
        """
        begin = next((e for e in reversed(self.events_of_kind("start", "resume")) if e["attempt"] == attempt), {})
        if "settings" in begin:
            return monitor_settings.apply_monitor_settings(self.config, begin["settings"])
        return self.config if begin.get("config_hash", self.config.hash()) == self.config.hash() else None

    def step_ranges(self) -> list[StepRange]:
        """The steps that were done, by the attempt whose record of them counts, in order."""
        begun = {event["attempt"]: event.get("from_step") or 0 for event in self.events_of_kind("start", "resume")}
        found, end = [], self.last_step
        for attempt, from_step in sorted(begun.items(), reverse=True):
            if from_step < end:
                found.append(StepRange(attempt, from_step + 1, end, self.config_of_attempt(attempt)))
                end = from_step
        # What nobody says to have begun is judged by what is known.
        return [*([StepRange(0, 1, end, self.config)] if end > 0 else []), *reversed(found)]

    def _build_attempt(self, begin: Event, *, is_last: bool) -> Attempt:
        own = [event for event in self.events if event["attempt"] == begin["attempt"]]
        said = next(
            (_OUTCOMES[e["kind"], e.get("status")] for e in reversed(own) if (e["kind"], e.get("status")) in _OUTCOMES),
            None,
        )
        silent = "running" if is_last and self.is_alive else "killed"
        fatal = any(e["kind"] == "error" and e.get("fatal") for e in own)
        return Attempt(
            number=begin["attempt"],
            from_step=begin["step"] if begin.get("from_step") is None else begin["from_step"],
            last_step=max(event["step"] for event in own),
            started_at=begin["t"],
            ended_at=own[-1]["t"],
            outcome="failed" if fatal else said or silent,
        )


def _is_number_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(entry, int | float | None) for entry in value)


_OUTCOMES = {
    ("end", directory.DONE): "done",
    ("end", directory.PREEMPTED): "stopped",
    ("end", directory.HALTED): "halted",
    ("halt", directory.HALTED): "halted",
    ("halt", None): "halted",
    ("end", None): "done",
}


# One reading is one batch, and noise: training loss is told as the mean of the latest, of a tenth of the run at most. Where
# batches differ so much that this mean is not known to a twentieth (steps of one long document each), of up to half of it.
LATEST_READINGS = 50
LATEST_MAX_ERROR = 0.05


def select_latest(values: np.ndarray) -> np.ndarray:
    """Of readings of training, those whose mean says where it stands. What is no number is no reading."""
    finite = values[np.isfinite(values)]
    count = max(1, min(LATEST_READINGS, len(finite) // 10))
    while count < len(finite) // 2 and _compute_relative_error(finite[-count:]) > LATEST_MAX_ERROR:
        count += 1
    return finite[-count:]


def _compute_relative_error(readings: np.ndarray) -> float:
    """The standard error of their mean as a share of it; of one reading nobody knows."""
    if len(readings) < 2:
        return math.inf
    return float(readings.std(ddof=1) / len(readings) ** 0.5 / max(abs(readings.mean()), 1e-9))


def get_latest_training_losses(history: History, name: str = "bpb") -> np.ndarray:
    """The readings of `loss` or `bpb` whose mean says where training stands: the one place that chooses them.

    Of the stage lengths, the last alone: a longer past makes text easier to predict.
    """
    return select_latest(history.select_current_length(*history.series(name))[1])


def compute_median_speeds(history: History) -> list[float]:
    """Tokens per second, the median of the readings, of each stage that has any: the one place that works it out."""
    by_stage: dict[int, list[float]] = {}
    for step, speed in zip(*history.series("tokens_per_s"), strict=True):
        by_stage.setdefault(history.config.train.locate_step(int(step))[0], []).append(float(speed))
    finite = [np.array(speeds)[np.isfinite(speeds)] for _, speeds in sorted(by_stage.items())]
    return [float(np.median(speeds)) for speeds in finite if len(speeds)]


def compute_cumulative_step_time(history: History) -> tuple[np.ndarray, np.ndarray]:
    """Steps, from 0, and the seconds that all steps up to each took: without evaluations, saves, and what is done once.

    A step that compiles (the first reading of an attempt, and the first step of a stage) says nothing of the others: it
    counts as long as those of the reading after it.
    """
    firsts, attempts, readings = set(history.config.train.first_steps), set[int](), [(0, 0.0)]
    for event in history.steps:
        compiles = event["step"] in firsts or event["attempt"] not in attempts
        attempts.add(event["attempt"])
        if not compiles and event.get("dt_s") is not None:
            before, seconds = readings[-1]
            readings.append((event["step"], seconds + event["dt_s"] * (event["step"] - before)))
    steps, seconds = zip(*readings, strict=True)
    return np.array(steps, dtype=np.int64), np.array(seconds, dtype=np.float64)


def compute_step_time(history: History) -> float | None:
    """`training_seconds` of all steps; None where too few were logged to tell."""
    steps, seconds = compute_cumulative_step_time(history)
    return float(seconds[-1]) if len(steps) > 1 else None


def have_different_eval_texts(runs: Sequence[History]) -> bool:
    """Whether the last evaluations of these runs read different texts, so that their losses say nothing of each other."""
    return len({run.describe_eval_text(run.evaluations[-1]) for run in runs if run.evaluations}) > 1


@dataclass(frozen=True)
class RunFacts:
    """The numbers a reader asks for first; None where the run does not say.

    `tokens` are those of the steps done; `wall_s` are the seconds of all attempts together, in which the trainer ran, and
    `elapsed_s` those from the first event to the last, pauses between attempts included. `tokens_per_s` is the median of
    the readings of the last stage (`median_speeds`); validation is on held-out text; `last_train_bpb` is the mean of the
    last `last_train_readings` readings. `backend` says of each part of attention what computes it and why. `seq_len` is
    the longest of the run.
    """

    run: str
    status: str | None
    step: int
    steps: int
    tokens: int
    wall_s: float | None
    elapsed_s: float | None
    attempts: int
    attention: str
    parameters: int | None
    device: str | None
    backend: dict[str, Any] | None
    tokens_per_s: float | None
    memory_peak_bytes: float | None
    first_validation_bpb: float | None
    last_validation_bpb: float | None
    best_validation_bpb: float | None
    last_train_bpb: float | None
    last_train_readings: int
    source: str
    seq_len: int
    config_hash: str


def collect_facts(run: str | Path | History) -> RunFacts:
    """The numbers a reader asks for first, from its record."""
    history = History.read(run)
    begin = next(iter(reversed(history.events_of_kind("start", "resume"))), {})
    attempts = history.attempts()
    _, validation = history.validation()
    speeds = compute_median_speeds(history)
    _, memory = history.series("mem_peak_bytes")
    recent = get_latest_training_losses(history)
    tokens = history.config.train.tokens_until(history.last_step)
    return RunFacts(
        run=history.run,
        status=history.status.get("status"),
        step=history.last_step,
        steps=history.config.train.steps,
        tokens=tokens,
        wall_s=sum(a.ended_at - a.started_at for a in attempts) or None,
        elapsed_s=attempts[-1].ended_at - attempts[0].started_at if attempts else None,
        attempts=len(attempts),
        attention=history.config.model.attention,
        parameters=begin.get("params"),
        device=begin.get("device"),
        backend=begin.get("backend"),
        tokens_per_s=speeds[-1] if speeds else None,
        memory_peak_bytes=float(np.nanmax(memory)) if np.isfinite(memory).any() else None,
        first_validation_bpb=float(validation[0]) if len(validation) else None,
        last_validation_bpb=float(validation[-1]) if len(validation) else None,
        best_validation_bpb=float(np.nanmin(validation)) if np.isfinite(validation).any() else None,
        last_train_bpb=float(np.mean(recent)) if len(recent) else None,
        last_train_readings=len(recent),
        source=history.config.data.source,
        seq_len=history.config.train.longest_stage.seq_len,
        config_hash=history.config.hash(),
    )
