"""Find and train the runs of a sweep: one process per GPU at a time, or one process on the CPU.

Invariants
* The runs are ordinary runs of the outputs folder, identified by name and configuration. The sweep itself stores no state.
  When started again, it attaches to live runs, resumes stopped runs, starts missing runs and skips finished runs.
* A sweep has one supervisor at a time. Trainers survive the supervisor.
* This module does not import torch.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from nsa_lab.config import ConfigError, RunConfig, SweepConfig, SweepRun, UsageError
from nsa_lab.config.optional_deps import require
from nsa_lab.config.sweep_config import DescribeSource, name_source
from nsa_lab.runs import directory, lifecycle, resolve
from nsa_lab.runs.directory import DONE, HALTED, RUNNING, RunDirectoryError
from nsa_lab.runs.summary import diff_settings

SWEEPS_DIR, TABLE_FILE, PICTURE_FILE, LOCK_FILE = "sweeps", "sweep.json", "sweep.png", "sweep.lock"
# If several runs have the same configuration, the one whose state comes first here counts: running and finished runs first.
STATE_PREFERENCE = (RUNNING, DONE, directory.PREEMPTED, "DEAD", HALTED)
POLL_S = 0.2
STOP_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class SweepRunState:
    """A run of a sweep, its directory and its state. Directory and state are None if it does not exist yet."""

    requested: SweepRun
    run_dir: Path | None = None
    state: str | None = None

    @property
    def name(self) -> str:
        return self.run_dir.name if self.run_dir else self.requested.config.name

    @property
    def needs_training(self) -> bool:
        """True if the run must be started or resumed."""
        return self.state not in (RUNNING, DONE, HALTED)

    @property
    def status(self) -> dict[str, object]:
        return directory.read_status(self.run_dir) if self.run_dir else {}


@dataclass(frozen=True)
class Sweep:
    """The runs of a sweep configuration and the folder in which they are trained."""

    config: SweepConfig
    runs: list[SweepRun]
    outputs: Path

    @classmethod
    def load(cls, name: str, outputs: Path, describe_source: DescribeSource = name_source) -> Sweep:
        """Load `params/sweeps/<name>.yaml` or the file at path `name`. `ConfigError` lists all problems of all variants.

        describe_source: as in `SweepConfig.build_runs`.
        """
        file = resolve.find_sweep_file(name)
        config = SweepConfig.from_yaml(file)
        try:
            runs = config.build_runs(resolve.find_params_file(config.preset), describe_source)
            sweep = cls(config, runs, outputs)
            sweep._check_names()
        except ConfigError as error:
            raise ConfigError("\n".join(f"{file}: {line}" for line in str(error).splitlines())) from None
        return sweep

    @property
    def folder(self) -> Path:
        """Directory of the sweep's table and picture."""
        return self.outputs / SWEEPS_DIR / self.config.name

    def get_run_states(self) -> list[SweepRunState]:
        """Return the state of every run of the sweep, in order."""
        return [self._get_run_state(requested) for requested in self.runs]

    def _get_run_state(self, requested: SweepRun) -> SweepRunState:
        runs = lifecycle.find_runs_of_config(requested.config, self.outputs)
        run_dir, state = min(runs, key=lambda run: STATE_PREFERENCE.index(run[1]), default=(None, None))
        return SweepRunState(requested, run_dir, state)

    def _check_names(self) -> None:
        """Raise `ConfigError` if an existing run has the name of a run of this sweep and another configuration."""
        for requested in self.runs:
            for run_dir in lifecycle.list_runs_named(requested.config.name, self.outputs):
                if difference := _describe_difference(run_dir, requested.config):
                    raise ConfigError(
                        f"variant {requested.variant}: {run_dir.name} has the same name and another configuration "
                        f"({difference}); rename the variant or the sweep, or move that run to another folder"
                    )

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the exclusive lock of this sweep. Raises `RunDirectoryError` if another process holds it."""
        require("filelock")
        import filelock

        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            with filelock.FileLock(self.folder / LOCK_FILE, timeout=0):
                yield
        except filelock.Timeout:
            raise RunDirectoryError(
                f"{self.folder}: another process is running this sweep; --table shows its progress"
            ) from None

    def run_all(
        self, gpus: Sequence[str | None], report: Callable[[str], None], on_run_end: Callable[[], None] = lambda: None
    ) -> list[SweepRunState]:
        """Train all unfinished runs, one at a time on each of `gpus` (None: the CPU). Return the final state of every run.

        Other runs continue if one fails. KeyboardInterrupt makes every run save and exit, and is raised again.
        """
        states = self.get_run_states()
        # A trainer that was resumed by hand has no recorded GPU and uses the first.
        busy = {run.run_dir: run.status.get("gpu") or gpus[0] for run in states if run.run_dir and run.state == RUNNING}
        waiting = deque(run for run in states if run.needs_training)
        try:
            while waiting or busy:
                for gpu in [gpu for gpu in gpus if gpu not in busy.values()]:
                    if waiting:
                        run = waiting.popleft()
                        try:
                            run_dir = run.run_dir or lifecycle.create_run(run.requested.config, self.outputs)
                            lifecycle.start(run_dir, gpu=gpu)
                        except (UsageError, OSError) as error:
                            report(f"{run.name} could not be started: {error}")
                            continue
                        busy[run_dir] = gpu
                        verb = "resumes" if run.run_dir else "starts"
                        report(
                            f"{run_dir.name} {verb} on {'the CPU' if gpu is None else f'GPU {gpu}'}; {len(waiting)} waiting"
                        )
                ended = [run_dir for run_dir in busy if not lifecycle.is_alive(run_dir)]
                for run_dir in ended:
                    del busy[run_dir]
                    report(
                        f"{run_dir.name} is {lifecycle.get_state(run_dir)}: {directory.read_status(run_dir).get('reason')}"
                    )
                    on_run_end()
                if not ended:
                    time.sleep(POLL_S)
        except KeyboardInterrupt:
            self._stop_all(report)
            raise
        return self.get_run_states()

    def _stop_all(self, report: Callable[[str], None]) -> None:
        """Request every run to save and exit, including runs that are starting right now, then wait for all."""
        alive = [run.run_dir for run in self.get_run_states() if run.run_dir and run.state == RUNNING]
        report(f"stopping {len(alive)} runs: they save and exit")
        for run_dir in alive:
            try:
                lifecycle.request_stop(run_dir)
            except (RunDirectoryError, ProcessLookupError) as error:
                if lifecycle.is_alive(run_dir):
                    report(str(error))
        for run_dir in alive:
            if lifecycle.wait(run_dir, STOP_TIMEOUT_S):
                report(f"{run_dir.name} is {lifecycle.get_state(run_dir)}: {directory.read_status(run_dir).get('reason')}")
            else:
                report(
                    f"{run_dir.name} is still alive after {STOP_TIMEOUT_S:g} s; stop it with nsa-lab stop {run_dir.name}"
                )


def _describe_difference(run_dir: Path, config: RunConfig) -> str:
    """Return the settings in which a run of the same name differs. Empty if it is equal or has a longer name."""
    if run_dir.name.rsplit("-", 2)[0] != config.name:
        return ""
    try:
        run_config = RunConfig.from_yaml(run_dir / directory.CONFIG)
    except ConfigError:
        return "one that is not valid in this version"
    return ", ".join(
        f"{key} = {actual}, expected {expected}" for key, expected, actual in diff_settings(config, run_config)
    )
