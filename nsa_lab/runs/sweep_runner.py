"""The runs of a sweep: which there are, and the rest trained, one process on each GPU at a time, or one on the CPU.

Invariants
* They are ordinary runs of the outputs folder, found again by name and configuration. The sweep keeps no state of its own,
  so that one started again takes up what runs, resumes what stopped, starts what is missing, and leaves alone what ended.
* Of one sweep there is one supervisor at a time. Trainers outlive it, as they outlive everybody.
* Nothing here imports torch.
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
from nsa_lab.runs import directory, lifecycle, resolve
from nsa_lab.runs.directory import DONE, HALTED, RUNNING, RunDirectoryError
from nsa_lab.runs.summary import diff_settings

SWEEPS_DIR, TABLE_FILE, PICTURE_FILE, LOCK_FILE = "sweeps", "sweep.json", "sweep.png", "sweep.lock"
# Of several runs of one configuration the one that counts: what goes on or ended well before what would have to be done.
STATE_PREFERENCE = (RUNNING, DONE, directory.PREEMPTED, "DEAD", HALTED)
POLL_S = 0.2
STOP_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class SweepRunState:
    """A run that a sweep asks for, where it is, and its state; both None if nobody made it yet."""

    requested: SweepRun
    run_dir: Path | None = None
    state: str | None = None

    @property
    def name(self) -> str:
        return self.run_dir.name if self.run_dir else self.requested.config.name

    @property
    def needs_training(self) -> bool:
        """Whether it is to be started, or resumed."""
        return self.state not in (RUNNING, DONE, HALTED)

    @property
    def status(self) -> dict[str, object]:
        return directory.read_status(self.run_dir) if self.run_dir else {}


@dataclass(frozen=True)
class Sweep:
    """What a sweep asks for, and the folder of runs that it is carried out in."""

    config: SweepConfig
    runs: list[SweepRun]
    outputs: Path

    @classmethod
    def load(cls, name: str, outputs: Path) -> Sweep:
        """`params/sweeps/<name>.yaml`, or the file of that path. `ConfigError` tells all that is wrong with any."""
        file = resolve.find_sweep_file(name)
        config = SweepConfig.from_yaml(file)
        try:
            sweep = cls(config, config.build_runs(resolve.find_params_file(config.preset)), outputs)
            sweep._check_names()
        except ConfigError as error:
            raise ConfigError("\n".join(f"{file}: {line}" for line in str(error).splitlines())) from None
        return sweep

    @property
    def folder(self) -> Path:
        """Where its table and picture are."""
        return self.outputs / SWEEPS_DIR / self.config.name

    def get_run_states(self) -> list[SweepRunState]:
        """Every run that is asked for, in order."""
        return [self._get_run_state(asked) for asked in self.runs]

    def _get_run_state(self, asked: SweepRun) -> SweepRunState:
        runs = lifecycle.find_runs_of_config(asked.config, self.outputs)
        run_dir, found = min(runs, key=lambda run: STATE_PREFERENCE.index(run[1]), default=(None, None))
        return SweepRunState(asked, run_dir, found)

    def _check_names(self) -> None:
        """A name stands for one configuration: raise `ConfigError` where a run of another has it already."""
        for asked in self.runs:
            for run_dir in lifecycle.list_runs_named(asked.config.name, self.outputs):
                if differs := _describe_difference(run_dir, asked.config):
                    raise ConfigError(
                        f"variant {asked.variant}: {run_dir.name} has its name and another configuration ({differs}); "
                        "give the variant, or the sweep, another name, or move that run away"
                    )

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Meanwhile no other process carries out this sweep. Raises `RunDirectoryError` if one does."""
        require("filelock")
        import filelock

        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            with filelock.FileLock(self.folder / LOCK_FILE, timeout=0):
                yield
        except filelock.Timeout:
            raise RunDirectoryError(
                f"{self.folder}: another process carries out this sweep; --table shows how far it is"
            ) from None

    def run_all(
        self, gpus: Sequence[str | None], report: Callable[[str], None], on_run_end: Callable[[], None] = lambda: None
    ) -> list[SweepRunState]:
        """Train what is not done, a run on each of `gpus` at a time (None: the CPU); how every run stands at the end.

        A run that fails ends nothing but itself. KeyboardInterrupt makes every run save and exit, and is raised again.
        """
        begun = self.get_run_states()
        # A trainer that somebody resumed by hand was given no GPU, and takes the first.
        busy = {run.run_dir: run.status.get("gpu") or gpus[0] for run in begun if run.run_dir and run.state == RUNNING}
        waiting = deque(run for run in begun if run.needs_training)
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
                        does = "goes on" if run.run_dir else "starts"
                        report(
                            f"{run_dir.name} {does} on {'the CPU' if gpu is None else f'GPU {gpu}'}; {len(waiting)} wait"
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

    def _stop_all(self, say: Callable[[str], None]) -> None:
        """Ask every run to save and exit, then wait for all. Also those that were being started this moment."""
        alive = [run.run_dir for run in self.get_run_states() if run.run_dir and run.state == RUNNING]
        say(f"{len(alive)} of its runs are asked to save and exit")
        for run_dir in alive:
            try:
                lifecycle.request_stop(run_dir)
            except (RunDirectoryError, ProcessLookupError) as error:
                if lifecycle.is_alive(run_dir):
                    say(str(error))
        for run_dir in alive:
            if lifecycle.wait(run_dir, STOP_TIMEOUT_S):
                say(f"{run_dir.name} is {lifecycle.get_state(run_dir)}: {directory.read_status(run_dir).get('reason')}")
            else:
                say(f"{run_dir.name} is alive after {STOP_TIMEOUT_S:g} s; nsa-lab stop {run_dir.name} asks again")


def _describe_difference(run_dir: Path, config: RunConfig) -> str:
    """In which settings a run of this very name differs; empty if in none, or if its name only begins so."""
    if run_dir.name.rsplit("-", 2)[0] != config.name:
        return ""
    try:
        its_own = RunConfig.from_yaml(run_dir / directory.CONFIG)
    except ConfigError:
        return "one that this version of the project does not read"
    return ", ".join(f"{key} = {there}, and not {here}" for key, here, there in diff_settings(config, its_own))
