"""Sweeps: reading and checking the file, and training each run once."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_run import make_config, write_run
from looping import looped

from nsa_lab.cli.sweep_command import _report_unfinished
from nsa_lab.config import ConfigError, RunConfig, SweepConfig
from nsa_lab.runs import directory, lifecycle, sweep_runner
from nsa_lab.runs.directory import DONE, HALTED, PREEMPTED, RunDirectoryError
from nsa_lab.runs.sweep_runner import Sweep, SweepRunState

ROOT = Path(__file__).parents[2]
Load = Callable[..., Sweep]
BODY = "preset: ci\nvariants: {as_it_is: {}, slow: {train.lr: 1.0e-3}}\nseeds: [0, 1]\n"


@pytest.fixture
def load(tmp_path: Path) -> Load:
    def make(text: str = BODY, name: str = "rates") -> Sweep:
        (tmp_path / f"{name}.yaml").write_text(text)
        return Sweep.load(str(tmp_path / f"{name}.yaml"), tmp_path / "outputs")

    return make


class FakeTrainers:
    """Fake trainers that live for a number of `is_alive` calls and end in the state in `ends`, DONE by default."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.started: list[tuple[str, str | None]] = []
        self.stopped: list[str] = []
        self.ends: dict[str, str] = {}
        self.remaining_calls: dict[Path, int] = {}
        self.busy_gpus: list[set[str | None]] = []
        self.gpus: dict[Path, str | None] = {}
        for name in ("start", "is_alive", "request_stop"):
            monkeypatch.setattr(lifecycle, name, getattr(self, name))
        monkeypatch.setattr(sweep_runner, "POLL_S", 0.0)
        # The real function calls git and nvidia-smi for each run.
        monkeypatch.setattr(lifecycle, "collect_environment", dict)

    def start(self, run_dir: Path, *, gpu: str | None = None) -> int:
        self.started.append((get_name(run_dir), gpu))
        self.remaining_calls[run_dir], self.gpus[run_dir] = 7 + len(self.started), gpu
        alive = [self.gpus[other] for other in self.remaining_calls]
        assert len(set(alive)) == len(alive), "two runs on one GPU"
        self.busy_gpus.append(set(alive))
        return 1

    def is_alive(self, run_dir: Path) -> bool:
        if run_dir not in self.remaining_calls:
            return False
        self.remaining_calls[run_dir] -= 1
        if not self.remaining_calls[run_dir]:
            self.end(run_dir, self.ends.get(get_name(run_dir), DONE))
        return run_dir in self.remaining_calls

    def end(self, run_dir: Path, status: str, **fields: object) -> None:
        del self.remaining_calls[run_dir]
        directory.write_status(run_dir, run=run_dir.name, status=status, reason="as planned", **fields)

    def request_stop(self, run_dir: Path) -> None:
        self.stopped.append(get_name(run_dir))
        self.end(run_dir, PREEMPTED, exit_code=directory.EXIT_STOPPED)


def get_name(run_dir: Path) -> str:
    return run_dir.name.rsplit("-", 2)[0]


@pytest.fixture
def trainers(monkeypatch: pytest.MonkeyPatch) -> FakeTrainers:
    return FakeTrainers(monkeypatch)


def test_runs_are_named_uniquely_with_the_baseline_first(load: Load) -> None:
    runs = load(BODY + "repeats: 2\ncommon: {train: {steps: 7}}\n").runs
    assert [run.config.name for run in runs[:5]] == [
        *("rates.as_it_is.s0", "rates.as_it_is.s0.r2", "rates.as_it_is.s1", "rates.as_it_is.s1.r2", "rates.slow.s0")
    ]
    assert len({run.config.name for run in runs}) == len({run.config.hash() for run in runs}) == 8
    assert {run.config.train.steps for run in runs} == {7}
    assert [run.config.train.lr for run in runs] == [3e-3] * 4 + [1e-3] * 4
    assert [run.config.train.seed for run in runs] == [0, 0, 1, 1] * 2


def test_overrides_have_three_equivalent_forms(load: Load) -> None:
    forms = ("{train: {lr: 1.0e-3, steps: 9}}", "{train.lr: 1.0e-3, train.steps: 9}", "[train.lr=1e-3, train.steps=9]")
    configs = [load(BODY.replace("{train.lr: 1.0e-3}", form)).runs[-1].config for form in forms]
    assert configs[0] == configs[1] == configs[2] and (configs[0].train.lr, configs[0].train.steps) == (1e-3, 9)


@looped
@pytest.mark.parametrize(
    ("old", "new", "answer"),
    [
        ("[0, 1]", "[0, 1]\nrepeat: 2", "repeat = 2: no such key; did you mean repeats?"),
        ("preset: ci\n", "", "preset: missing"),
        ("preset: ci", "preset: ic", "'ic': no such file in"),
        ("slow", "as_it_is", "the key 'as_it_is' occurs twice"),
        ("slow", "a.b", "should match pattern"),
        ("{as_it_is: {}, slow: {train.lr: 1.0e-3}}", "{}", "variants = {}"),
        ("train.lr: 1.0e-3", "train.seed: 3", "variants.slow: train.seed cannot be overridden in a sweep"),
        ("train.lr: 1.0e-3", "train: {seed: 3}", "variants.slow: train.seed cannot be overridden in a sweep"),
        ("train.lr: 1.0e-3", "name: other", "variants.slow: name cannot be overridden in a sweep"),
        ("train.lr: 1.0e-3", "train.lr: 1, train: {lr: 2}", "variants.slow: train.lr occurs twice"),
        ("{train.lr: 1.0e-3}", "[train.lr]", "variants.slow: -p train.lr: expected section.key=value"),
        ("{train.lr: 1.0e-3}", "3", "variants.slow: overrides: expected a mapping"),
        ("train.lr: 1.0e-3", "train.lrr: 1", "variant slow: train.lrr = 1: no such key; did you mean train.lr?"),
        ("train.lr: 1.0e-3", "nsa.d: 5", "variant slow: nsa.l = 8 is not a multiple of nsa.d = 5"),
        ("train.lr: 1.0e-3", "train.lr: 3.0e-3", "variant slow: same configuration as as_it_is"),
        ("train.lr: 1.0e-3", "train.eval_every: 0", "variant slow: train.eval_every = 0"),
        ("[0, 1]", "[0, 0]", "0 occurs twice; for several runs of one seed set repeats"),
        ("[0, 1]", "[0, '1']", "seeds.1 = '1'"),
        ("[0, 1]", "[]", "seeds = []"),
    ],
)
def test_error_is_one_line_with_file_and_variant(load: Load, old: str, new: str, answer: str) -> None:
    assert old in BODY
    with pytest.raises(ConfigError) as caught:
        load(BODY.replace(old, new))
    assert answer in str(caught.value) and len(str(caught.value).splitlines()) == 1
    assert "rates.yaml: " in str(caught.value)


def test_all_invalid_variants_are_named_at_once(load: Load) -> None:
    with pytest.raises(ConfigError) as caught:
        load(BODY.replace("as_it_is: {}", "as_it_is: {train.lr: -1}").replace("1.0e-3", "-2"))
    assert [line.split(": ")[1] for line in str(caught.value).splitlines()] == ["variant as_it_is", "variant slow"]


@looped
@pytest.mark.parametrize("path", sorted((ROOT / "params/sweeps").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_sweep_of_the_project_loads(path: Path, tmp_path: Path) -> None:
    assert Sweep.load(path.stem, tmp_path).runs and SweepConfig.from_yaml(path).name == path.stem


def test_the_recall_sweep_is_the_first_stage_of_its_preset() -> None:
    sweep = SweepConfig.from_yaml(ROOT / "params/sweeps/recall_scatter.yaml")
    preset = RunConfig.from_yaml(ROOT / "params/recall_taught.yaml")
    baseline, stage = sweep.build_runs(ROOT / "params/recall_taught.yaml")[0].config, preset.train.stages[0]
    assert {key: getattr(baseline.train, key) for key in type(stage).model_fields} == stage.model_dump()
    expected = preset.model.model_copy(update={"embedding_norm": False, "indexer_block": 8})
    assert baseline.model == expected and baseline.data == preset.data


@pytest.mark.slow
def test_one_run_per_gpu_and_all_gpus_are_used(load: Load, trainers: FakeTrainers) -> None:
    sweep, lines = load(BODY + "repeats: 2\n"), []
    states = sweep.run_all(["2", "5", "7"], lines.append)
    assert [run.state for run in states] == [DONE] * 8
    assert [name for name, _ in trainers.started] == [run.config.name for run in sweep.runs]
    assert {"2", "5", "7"} in trainers.busy_gpus and set().union(*trainers.busy_gpus) == {"2", "5", "7"}
    assert sum("is DONE: as planned" in line for line in lines) == 8


@pytest.mark.slow
def test_second_start_trains_only_unfinished_runs(load: Load, trainers: FakeTrainers) -> None:
    sweep = load()
    names = [run.config.name for run in sweep.runs]
    trainers.ends = {names[0]: HALTED, names[1]: PREEMPTED}
    first = sweep.run_all([None], lambda line: None)
    assert [run.state for run in first] == [HALTED, PREEMPTED, DONE, DONE], "other runs continue if one fails"
    trainers.started.clear()
    trainers.ends = {}
    second = load().run_all([None], lambda line: None)
    assert trainers.started == [(names[1], None)] and [run.state for run in second] == [HALTED, DONE, DONE, DONE]
    assert [run.run_dir for run in second] == [run.run_dir for run in first], "resumed in the same directory"
    third = load(BODY + "repeats: 2\n").run_all([None], lambda line: None)
    assert [name for name, _ in trainers.started[1:]] == [f"{name}.r2" for name in names] and len(third) == 8


@pytest.mark.slow
def test_live_trainer_keeps_its_gpu(load: Load, trainers: FakeTrainers) -> None:
    sweep = load()
    living = lifecycle.create_run(sweep.runs[0].config, sweep.outputs)
    directory.write_status(living, run=living.name, status=directory.RUNNING, gpu="1")
    trainers.remaining_calls[living], trainers.gpus[living] = 400, "1"
    sweep.run_all(["0", "1"], lambda line: None)
    assert [gpu for _, gpu in trainers.started] == ["0", "0", "0"], "GPU 1 is in use"


@pytest.mark.slow
def test_failed_start_is_reported_and_others_continue(
    load: Load, trainers: FakeTrainers, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep, lines, create = load(), [], lifecycle.create_run

    def full(config: RunConfig, outputs: Path) -> Path:
        if config.train.seed == 1:
            raise OSError("no space remaining_calls")
        return create(config, outputs)

    monkeypatch.setattr(lifecycle, "create_run", full)
    assert [run.state for run in sweep.run_all([None], lines.append)] == [DONE, None, DONE, None]
    assert "rates.as_it_is.s1 could not be started: no space remaining_calls" in lines


@pytest.mark.parametrize(
    ("ends", "code"),
    [
        ((DONE, DONE), directory.EXIT_DONE),
        ((DONE, PREEMPTED), directory.EXIT_STOPPED),
        ((PREEMPTED, HALTED), directory.EXIT_HALTED),
        ((HALTED, "DEAD"), directory.EXIT_BUG),
        ((DONE, None), directory.EXIT_BUG),
    ],
)
def test_exit_code_follows_the_states_of_the_runs(
    load: Load, tmp_path: Path, ends: tuple[str | None, ...], code: int
) -> None:
    codes = {DONE: directory.EXIT_DONE, PREEMPTED: directory.EXIT_STOPPED, HALTED: directory.EXIT_HALTED}
    states, lines = [], []
    for number, state in enumerate(ends):
        run_dir = tmp_path / f"run-{number}" if state else None
        if run_dir:
            run_dir.mkdir()
            directory.write_status(run_dir, run=run_dir.name, status=state, reason=None, exit_code=codes.get(state))
        states.append(SweepRunState(load().runs[number], run_dir, state))
    assert _report_unfinished(states, "x.yaml", lines.append) == code
    assert len(lines) == sum(state != DONE for state in ends) and "None" not in "".join(lines)
    assert ("it could not be started" in "".join(lines)) == (None in ends)


@pytest.mark.slow
def test_interrupt_stops_all_runs(load: Load, trainers: FakeTrainers) -> None:
    sweep, lines = load(), []

    def report(line: str) -> None:
        lines.append(line)
        if "slow.s0" in line and "starts" in line:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sweep.run_all(["0", "1", "2"], report)
    assert sorted(trainers.stopped) == [run.config.name for run in sweep.runs[:3]]
    assert [run.state for run in sweep.get_run_states()] == [PREEMPTED] * 3 + [None]


@pytest.mark.slow
def test_run_with_the_same_name_and_other_config_is_refused(load: Load) -> None:
    sweep = load()
    run_dir = lifecycle.create_run(sweep.runs[2].config, sweep.outputs)
    assert load().get_run_states()[2].run_dir == run_dir
    with pytest.raises(ConfigError) as caught:
        load(BODY.replace("1.0e-3", "2.0e-3"))
    message = f"variant slow: {run_dir.name} has the same name and another configuration (train.lr = 0.001, expected 0.002)"
    assert message in str(caught.value)


def test_lock_allows_one_supervisor(load: Load) -> None:
    with load().lock(), pytest.raises(RunDirectoryError, match="another process is running this sweep"), load().lock():
        raise AssertionError
    with load().lock():
        pass


def test_gpu_is_set_and_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir, visible_devices = write_run(tmp_path, make_config()), []

    class Popen:
        pid = 1

        def __init__(self, command: list[str], env: dict[str, str], **rest: object) -> None:
            visible_devices.append(env.get("CUDA_VISIBLE_DEVICES"))

        def wait(self) -> int:
            return 0

    monkeypatch.setattr(lifecycle.subprocess, "Popen", Popen)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    lifecycle.start(run_dir, gpu="3")
    assert json.loads((run_dir / directory.STATUS).read_text())["gpu"] == "3"
    lifecycle.start(run_dir)
    assert visible_devices == ["3", None] and directory.read_status(run_dir)["gpu"] is None


def test_long_64k_ablations_change_one_setting_each() -> None:
    """All use the same tokens. `facts_everywhere` changes only the share; the paper's attention is that of recall_nsa."""
    preset = ROOT / "params/long_64k_three_branches.yaml"
    whole = RunConfig.from_yaml(preset)
    runs = {
        run.variant: run.config
        for run in SweepConfig.from_yaml(ROOT / "params/sweeps/long_64k_ablations.yaml").build_runs(preset)
    }
    assert all(config.train.tokens == whole.train.tokens and config.train.seed == 0 for config in runs.values())
    assert runs["as_it_is"].model == whole.model
    everywhere = runs["facts_everywhere"].train
    assert [stage.model_copy(update={"planted_share": 0.5}) for stage in everywhere.plan[2:]] == [*whole.train.plan[2:]]
    assert everywhere.plan[:2] == whole.train.plan[:2] and everywhere.plan[2].planted_share == 1
    paper = RunConfig.from_yaml(ROOT / "params/recall_nsa.yaml").model
    size = {name: getattr(paper, name) for name in ("n_layers", "mlp_hidden", "ngrams", "ngram_rows", "ngram_width")}
    assert runs["as_the_paper_has_it"].model.model_copy(update=size) == paper


@pytest.mark.slow
def test_done_run_is_preferred_to_a_halted_one(load: Load, trainers: FakeTrainers) -> None:
    sweep = load()
    run_dirs = sorted(lifecycle.create_run(sweep.runs[0].config, sweep.outputs) for _ in range(2))
    for run_dir, state in zip(run_dirs, (DONE, HALTED), strict=True):
        directory.write_status(run_dir, run=run_dir.name, status=state)
    assert sweep.get_run_states()[0].run_dir == run_dirs[0]


@pytest.mark.slow
def test_table_is_rebuilt_after_each_run(load: Load, trainers: FakeTrainers) -> None:
    calls: list[int] = []
    load().run_all([None], lambda text: None, on_run_end=lambda: calls.append(1))
    assert len(calls) == 4


@pytest.mark.slow
def test_run_with_a_longer_name_is_ignored(load: Load, trainers: FakeTrainers) -> None:
    sweep = load()
    config = sweep.runs[0].config
    train = config.train.model_copy(update={"lr": config.train.lr / 2})
    lifecycle.create_run(config.model_copy(update={"name": f"{config.name}-longer", "train": train}), sweep.outputs)
    load()
