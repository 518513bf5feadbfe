"""The record of a run as tables, the input of figures, health checks and reports.

Only files are read; neither torch nor the trainer is imported. A copy of a run without its checkpoints therefore gives the
same tables. Each step counts once, as its latest attempt recorded it. Events are stored by field (`event_table`): prefer
`series` and `Events.numbers` to loops over events, of which a long run has a million.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from nsa_lab.config import ConfigError, RunConfig, TrainConfig, apply_overrides
from nsa_lab.runs import directory, events
from nsa_lab.runs.atomic_io import read_json
from nsa_lab.runs.attempts import Attempt, StepRange, build_attempts
from nsa_lab.runs.directory import RunDirectoryError
from nsa_lab.runs.event_builder import make_events
from nsa_lab.runs.event_schema import FIRST_KINDS, AttemptEvent, EvalEvent, StepEvent
from nsa_lab.runs.event_table import Events
from nsa_lab.runs.events import Event
from nsa_lab.runs.lock import lock_owner

# Settings that health checks need to judge a record: intervals of logging, evaluation and saving, and rules that may halt
# the run. They may change when a run is resumed, so the first event of each attempt records them.
MONITOR_SETTINGS = (
    *("train.log_every", "train.stats_every", "train.eval_every", "train.save_every"),
    *("train.spike_sigma", "train.min_tokens_per_s", "train.stall_action"),
    "runtime.heartbeat_s",
)


@dataclass(frozen=True)
class History:
    """The record of a run. `events`: all events. `steps`, `evaluations`: one event per step, ascending."""

    run_dir: Path
    config: RunConfig
    status: dict[str, Any]
    environment: dict[str, Any]
    events: Events[Event]
    steps: Events[StepEvent]
    evaluations: Events[EvalEvent]

    def __post_init__(self) -> None:
        # Edited records of tests are lists.
        for name in ("events", "steps", "evaluations"):
            object.__setattr__(self, name, make_events(getattr(self, name)))

    @classmethod
    def read(cls, run: str | Path | History) -> History:
        """Read the record in a run directory.

        Events of steps after the last step of the configuration are skipped, and are in `events.violations`. Raises
        `RunDirectoryError` if it is not a run directory or cannot be read, `ConfigError` if its configuration is not valid
        here.
        """
        if isinstance(run, History):
            return run
        run_dir = directory.check_run_dir(run)
        config = RunConfig.from_yaml(run_dir / directory.CONFIG)
        try:
            record = events.read_events(run_dir, config.train.steps)
        except OSError as error:
            raise RunDirectoryError(f"{run_dir / directory.EVENTS}: cannot be read: {error.strerror or error}") from None
        return cls(
            run_dir=run_dir,
            config=config,
            status=directory.read_status(run_dir) or events.infer_status(record),
            environment=read_json(run_dir / directory.ENVIRONMENT),
            events=record,
            steps=events.get_step_events(record),
            evaluations=events.get_eval_events(record),
        )

    @property
    def run(self) -> str:
        return self.run_dir.name

    @cached_property
    def last_step(self) -> int:
        """The last step that is recorded as completed."""
        return int(self.current_events("step", "eval", "checkpoint").ints("step").max(initial=0))

    @cached_property
    def last_attempt(self) -> int:
        """Number of the newest attempt; 0 before the first."""
        return int(self.events.ints("attempt").max(initial=0))

    @property
    def is_done(self) -> bool:
        return self.status.get("status") == directory.DONE

    @property
    def state(self) -> str | None:
        """The recorded status; DEAD if it is RUNNING but no trainer is alive; None if none is recorded."""
        status = self.status.get("status")
        return "DEAD" if status == directory.RUNNING and not self.is_alive else status

    @property
    def is_alive(self) -> bool:
        """True while a trainer holds the lock of this directory."""
        return lock_owner(self.run_dir) is not None

    def events_of_kind(self, *kinds: str) -> Events[Any]:
        """Return all events of these kinds in the order of writing."""
        return self.events.of_kind(*kinds)

    def current_events(self, *kinds: str) -> Events[Any]:
        """Return events of these kinds, without those about steps that a later attempt repeated."""
        return self._current.of_kind(*kinds)

    @cached_property
    def _current(self) -> Events[Event]:
        return events.drop_superseded(self.events)

    @cached_property
    def first_events(self) -> Events[AttemptEvent]:
        """The first event of each attempt that recorded one. Most checks read them, so each is built once."""
        return self.events.of_kind(*FIRST_KINDS).build_once()

    @cached_property
    def gpu_attempts(self) -> frozenset[int]:
        """The attempts whose heartbeats have the utilization of a GPU."""
        beats = self.events_of_kind("heartbeat")
        return frozenset(beats.ints("attempt")[np.isfinite(beats.numbers("gpu_util"))].tolist())

    def series(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the steps and values of a numeric field of the `step` events. Values that were not finite are NaN."""
        recorded = self.steps.select(self.steps.has(name))
        return recorded.ints("step"), recorded.numbers(name)

    def layer_series(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Return steps [readings] and values [readings, layers] of a per-layer statistic; empty if none was recorded.

        Values that are not a list of numbers, or do not have the first reading's number of layers, are ignored.
        """
        positions, values = self.steps.matrix(name)
        return self.steps.ints("step")[positions], values

    def validation(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the steps and bits per byte of the evaluations on held-out text."""
        return self.evaluations.ints("step"), self.evaluations.numbers("bpb")

    def truncate_at(self, step: int) -> History:
        """Return the record up to and including `step`."""
        all_events, steps, evaluations = (
            record.select(record.ints("step") <= step) for record in (self.events, self.steps, self.evaluations)
        )
        return replace(self, events=all_events, steps=steps, evaluations=evaluations)

    def select_current_length(self, steps: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the readings from stages with the sequence length of the run's current stage."""
        train = self.config.train
        length = train.stage_at(self.last_step).seq_len
        lengths = np.array([stage.seq_len for stage in train.plan])
        has_length = lengths[find_stages(steps, train)] == length
        return steps[has_length], values[has_length]

    def describe_eval_text(self, evaluation: EvalEvent) -> str:
        """Return an identifier of the evaluated text. Evaluations with equal identifiers are comparable.

        Older runs did not record it. For them it is derived from the data and the sequences per forward pass, which
        determined the text.
        """
        if "text" in evaluation:
            return evaluation["text"]
        train = self.config.train
        stage = train.stage_at(evaluation["step"])
        windows = train.eval_batches * stage.sequences_per_forward
        return f"{windows} × {stage.seq_len} of {self._data_identities}"

    @cached_property
    def _data_identities(self) -> str:
        return ", ".join(sorted({str(identity) for identity in self.first_events.values("data_identity")}))

    def attempts(self) -> list[Attempt]:
        """Return the attempts in the order of their numbers."""
        return build_attempts(self.events, self.first_events, self.is_alive)

    def config_of_attempt(self, attempt: int) -> RunConfig | None:
        """Return the configuration of an attempt; None if unknown.

        Settings may change between attempts, and config.yaml holds the latest. The first event of an attempt records its
        monitor settings. Older runs did not record them: if the recorded hash is that of config.yaml, its settings hold.
        """
        return self._configs.get(attempt, self.config)

    @cached_property
    def _configs(self) -> dict[int, RunConfig | None]:
        """Configuration of each attempt with a first event. Attempts with the same settings share it."""
        own_hash, by_settings, configs = self.config.hash(), dict[str, RunConfig | None](), dict[int, RunConfig | None]()
        first_event: Any
        for first_event in self.first_events:
            if "settings" in first_event:
                key = repr(first_event["settings"])
                if key not in by_settings:
                    by_settings[key] = apply_monitor_settings(self.config, first_event["settings"])
                configs[first_event["attempt"]] = by_settings[key]
            else:
                is_known = first_event.get("config_hash", own_hash) == own_hash
                configs[first_event["attempt"]] = self.config if is_known else None
        return configs

    def step_ranges(self) -> list[StepRange]:
        """Return the completed steps in order, split by the attempt whose record of them counts."""
        from_steps = np.nan_to_num(self.first_events.numbers("from_step")).astype(np.int64)
        first_steps = dict(zip(self.first_events.ints("attempt").tolist(), from_steps.tolist(), strict=True))
        ranges, end = [], self.last_step
        for attempt, from_step in sorted(first_steps.items(), reverse=True):
            if from_step < end:
                ranges.append(StepRange(attempt, from_step + 1, end, self.config_of_attempt(attempt)))
                end = from_step
        # Steps before the first recorded start: use the configuration that is known.
        return [*([StepRange(0, 1, end, self.config)] if end > 0 else []), *reversed(ranges)]


def find_stages(steps: np.ndarray, train: TrainConfig) -> np.ndarray:
    """Return the index of the training stage of each step; step 0 belongs to the first stage."""
    last_steps = np.cumsum([stage.steps for stage in train.plan])
    return np.minimum(np.searchsorted(last_steps, steps), len(last_steps) - 1)


# One reading is the loss of one batch, which is noisy. The training loss is therefore reported as the mean of the latest
# readings, at most a tenth of all. If batches differ so much that the relative standard error of this mean is above
# LATEST_MAX_ERROR (for example steps of one long document each), up to half of all readings are used.
LATEST_READINGS = 50
LATEST_MAX_ERROR = 0.05


def select_latest(values: np.ndarray) -> np.ndarray:
    """Return the latest readings, whose mean is the current value of a training metric. Non-finite readings are dropped."""
    finite = values[np.isfinite(values)]
    count = max(1, min(LATEST_READINGS, len(finite) // 10))
    while count < len(finite) // 2 and _compute_relative_error(finite[-count:]) > LATEST_MAX_ERROR:
        count += 1
    return finite[-count:]


def _compute_relative_error(readings: np.ndarray) -> float:
    """Return the standard error of the mean divided by the mean; infinity for a single reading."""
    if len(readings) < 2:
        return math.inf
    return float(readings.std(ddof=1) / len(readings) ** 0.5 / max(abs(readings.mean()), 1e-9))


def get_latest_training_losses(history: History, name: str = "bpb") -> np.ndarray:
    """Return the readings of `loss` or `bpb` whose mean is the current training loss. Every report uses these readings.

    Only stages with the current sequence length count, because a longer context makes text easier to predict.
    """
    return select_latest(history.select_current_length(*history.series(name))[1])


def compute_median_speeds(history: History) -> list[float]:
    """Return the median tokens per second of each stage that has readings. Every report uses these values."""
    steps, speeds = history.series("tokens_per_s")
    stages = find_stages(steps, history.config.train)
    finite = [speeds[(stages == stage) & np.isfinite(speeds)] for stage in np.unique(stages)]
    return [float(np.median(values)) for values in finite if len(values)]


def is_with_compilation(history: History) -> np.ndarray:
    """Return which `step` events include compilation, bool: the first of an attempt, and the first step of a stage."""
    steps, attempts = history.steps.ints("step"), history.steps.ints("attempt")
    is_first_of_attempt = np.zeros(len(steps), dtype=bool)
    is_first_of_attempt[np.unique(attempts, return_index=True)[1]] = True
    return is_first_of_attempt | np.isin(steps, list(history.config.train.first_steps))


def compute_cumulative_step_time(history: History) -> tuple[np.ndarray, np.ndarray]:
    """Return steps, starting at 0, and the cumulative step time in seconds: without evaluation, saving and one-time work.

    The first reading of an attempt and the first step of a stage include compilation. They are replaced by the step time of
    the next reading.
    """
    step_s = history.steps.numbers("dt_s")
    is_used = ~is_with_compilation(history) & np.isfinite(step_s)
    steps = np.concatenate([[0], history.steps.ints("step")[is_used]])
    return steps, np.concatenate([[0.0], np.cumsum(step_s[is_used] * np.diff(steps))])


def compute_step_time(history: History) -> float | None:
    """Return the step time of all steps in seconds (`compute_cumulative_step_time`); None if too few were logged."""
    steps, seconds = compute_cumulative_step_time(history)
    return float(seconds[-1]) if len(steps) > 1 else None


def have_different_eval_texts(runs: Sequence[History]) -> bool:
    """Return True if the last evaluations of these runs used different texts, so that their losses are not comparable."""
    return len({run.describe_eval_text(run.evaluations[-1]) for run in runs if run.evaluations}) > 1


@dataclass(frozen=True)
class RunFacts:
    """Key numbers of a run. None if the run did not record a number.

    `tokens`: of the completed steps. `wall_s`: duration of all attempts, in seconds. `elapsed_s`: from the first to the
    last event, with pauses between attempts. `tokens_per_s`: median of the readings of the last stage. Validation is on
    held-out text. `last_train_bpb`: mean of the last `last_train_readings` readings. `backend`: backend of each part of
    attention, and the reason for it. `seq_len`: the longest of all stages.
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
    """Compute the key numbers of a run from its record."""
    history = History.read(run)
    first_event: Any = history.first_events[-1] if history.first_events else {}
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
        parameters=first_event.get("params"),
        device=first_event.get("device"),
        backend=first_event.get("backend"),
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


def get_monitor_settings(config: RunConfig) -> dict[str, Any]:
    """Return the monitor settings of a configuration, dotted key -> value."""
    return {key: getattr(getattr(config, section), name) for key in MONITOR_SETTINGS for section, name in [key.split(".")]}


def apply_monitor_settings(config: RunConfig, settings: Any) -> RunConfig | None:
    """Return `config` with the recorded `settings` of `get_monitor_settings`; None if `settings` are invalid.

    Unknown keys are ignored, because a newer version may record more settings.
    """
    if not isinstance(settings, dict):
        return None
    try:
        return RunConfig.from_dict(
            apply_overrides(config.to_dict(), {k: v for k, v in settings.items() if k in MONITOR_SETTINGS})
        )
    except ConfigError:
        return None
