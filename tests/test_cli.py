"""The command line: what a user does wrong is one line with the remedy, exit code 2, and nothing is left behind."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import nbformat
import pyarrow
import pyarrow.parquet
import pytest
import torch
from fake_run import write_run
from nbformat.v4 import new_code_cell, new_notebook

from nsa_lab import cli
from nsa_lab.cli import inspect_commands, model_commands
from nsa_lab.config import RunConfig
from nsa_lab.health import write_verdict
from nsa_lab.runs import directory, lifecycle, resolve
from nsa_lab.runs.live_view import RunView, format_note, watch
from nsa_lab.runs.resolve import find_notebook, find_params_file, find_run, get_outputs_dir
from nsa_lab.runs.sweep_runner import Sweep

torch.set_num_threads(1)

TINY = """
model: {dim: 16, n_layers: 1, n_heads: 2, n_kv_groups: 1, d_k: 8, d_v: 8}
nsa: {l: 8, d: 4, l_sel: 8, n_sel: 4, w: 16}
train: {steps: 6, seq_len: 32, batch_size: 2, log_every: 2, stats_every: 2, eval_every: 3, eval_batches: 1, save_every: 3}
runtime: {device: cpu}
data: {source: local, val_fraction: 0.4}
"""


HALTED = {"status": directory.HALTED, "reason": "step 101: the loss is nan"}


class CliResult(NamedTuple):
    exit_code: int
    out: str
    err: str


@pytest.fixture
def say(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    """Runs the console script in this process, with outputs below the test's own folder."""

    def run(*arguments: object, outputs: bool = True) -> CliResult:
        where = ["--outputs", str(tmp_path / "outputs")] if outputs else []
        monkeypatch.setattr(sys, "argv", ["nsa-lab", *map(str, arguments), *where])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main()
        code = ended.value.code or 0
        out, err = capsys.readouterr()
        return CliResult(code, out, err)

    return run


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A params file of a model that trains in a second, and its text."""
    text = tmp_path / "text"
    text.mkdir()
    for index in range(12):
        (text / f"{index}.txt").write_text(f"Document {index}: " + "the quick brown fox jumps over the lazy dog. " * 9)
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY.replace("source: local", f"source: local, path: '{text}'"))
    return path


def make_missing_path(folder: Path) -> Path:
    return folder / "nowhere"


def make_empty_file(folder: Path) -> Path:
    (folder / "empty.txt").touch()
    return folder / "empty.txt"


def make_file_without_text(folder: Path) -> Path:
    pyarrow.parquet.write_table(pyarrow.table({"body": ["a", "b"]}), folder / "other.parquet")
    return folder / "other.parquet"


def write_notebook(folder: Path, *cells: str) -> Path:
    parameters = new_code_cell('run_dir: str = ""', metadata={"tags": ["parameters"]})
    path = folder / "training.ipynb"
    nbformat.write(new_notebook(cells=[parameters, *map(new_code_cell, cells)]), path)
    return path


def get_notebook_option(command: str, folder: Path) -> list[object]:
    return ["--notebook", write_notebook(folder)] if command == "run" else []


@pytest.mark.parametrize("command", ["run", "train"])
@pytest.mark.parametrize(
    ("override", "answer"),
    [
        ("train.stepz=10", "did you mean train.steps?"),
        ("nsa.d=5", "use nsa.l = 5 or 10"),
        ("model.n_heads=3,", "model.n_heads"),
        ("train.steps", "expected section.key=value"),
        ("train.steps=[1", "-p train.steps=[1: line 1"),
        ("data.path=" + "x" * 300, "nothing at"),
        ("model.dim=1000000000000", "model.dim = 1000000000000"),
        ("runtime.backend=flash", "backend = 'flash' cannot run"),
        ("runtime.backend=triton", "backend = 'triton' does not take this shape"),
    ],
)
def test_a_wrong_setting_is_one_line_and_leaves_nothing(
    say, tiny: Path, tmp_path: Path, command: str, override: str, answer: str
) -> None:
    said = say(command, tiny, "-p", override, *get_notebook_option(command, tmp_path))
    assert said.code == 2
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert answer in said.err
    assert not (tmp_path / "outputs").exists()


def make_single_text(folder: Path) -> Path:
    (folder / "input.txt").write_text("First Citizen: before we proceed any further, hear me speak. " * 99)
    return folder / "input.txt"


@pytest.mark.slow
@pytest.mark.parametrize("command", ["run", "train"])
@pytest.mark.parametrize(
    ("make", "answer"),
    [
        (make_single_text, "split -C 64k"),
        (make_missing_path, "nowhere"),
        (make_empty_file, "empty"),
        (make_file_without_text, "text"),
    ],
)
def test_text_that_cannot_be_read_is_one_line_and_leaves_nothing(
    say, tiny: Path, tmp_path: Path, command: str, make, answer: str
) -> None:
    path = make(tmp_path)
    said = say(command, tiny, "-p", f"data.path={path}", *get_notebook_option(command, tmp_path))
    assert said.code == 2
    assert said.err.startswith("nsa-lab: ")
    assert said.err.count("\n") == 1
    assert str(path) in said.err
    assert answer in said.err
    assert not (tmp_path / "outputs").exists()


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        (["run", "smoek"], "did you mean smoke?"),
        (["sweep", "smoke_rate"], "did you mean smoke_rates?"),
        (["run"], "give the NAME of a params file"),
        (["run", __file__], "expected a .yaml file, found one of .py"),
        (["run", "smoke", "--notebook", "no_such_notebook"], "--notebook no_such_notebook: no such notebook; "),
        (["health", "no-such-run"], "no run was made yet"),
        (["stop", "latest"], "no run was made yet"),
        (["generate", "latest"], "no run was made yet"),
    ],
)
def test_a_name_that_is_not_there_says_what_is(say, arguments: list[str], answer: str, tmp_path: Path) -> None:
    said = say(*arguments)
    assert said.code == 2
    assert said.err.count("\n") == 1
    assert answer in said.err
    assert not (tmp_path / "outputs").exists()


def test_a_table_is_written_where_that_can_be_or_refused_in_a_line(say, tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "outputs")
    for path in (tmp_path / "nowhere" / "table.csv", tmp_path):
        said = say("export", run_dir, "--csv", "--into", path)
        assert said.code == 2 and f"--into {path}: cannot be written" in said.err and said.err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        (["generate", "needle-8m", "--seed", str(2**70)], "--seed"),
        (["evaluate", "needle-8m", "--seed", str(2**70)], "--seed"),
        (["generate", "needle-8m", "--prompt", "\udcff"], "--prompt '\\udcff': expected a UTF-8 text"),
        (["evaluate", "needle-8m", "--out", __file__], "it cannot hold an evaluation"),
        (["bench", "attention", "--json", "/nowhere/x.json"], "--json"),
        (["bench", "decode", "--picture", "/nowhere/x.png"], "--picture"),
        (["bench", "attention", "--backend", "cuda"], "--backend"),
        (["bench", "attention", "--shape", "0x8"], "--shape: shape '0x8'"),
        (["bench", "train", "--shape", "64x0"], "64x0: expected tokens x sequences"),
        (["bench", "train", "--preset", "prodaction_50k"], "production_50k"),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_is(say, arguments: list[str], answer: str) -> None:
    said = say(*arguments, outputs=arguments[0] != "bench")
    assert said.code == 2 and said.out == "" and answer in said.err


@pytest.mark.parametrize("seconds", ["-1", "nan", "inf"])
def test_a_wait_that_is_no_number_of_seconds_is_refused_before_the_trainer_is_asked(say, seconds, tmp_path: Path) -> None:
    said = say("stop", write_run(tmp_path), "--timeout", seconds)
    assert said.code == 2 and f"--timeout {seconds}: expected a number of seconds" in said.err
    assert said.err.count("\n") == 1 and not said.out


@pytest.mark.parametrize("speed", ["0", "-5", "nan", "inf"])
def test_a_plan_is_made_with_a_speed_that_can_be(say, tiny: Path, speed: str) -> None:
    said = say("plan", tiny, "--tokens-per-s", speed)
    assert said.code == 2 and f"--tokens-per-s {speed}: expected a number above 0" in said.err and said.err.count("\n") == 1


def test_outputs_that_cannot_be_a_folder_are_refused_in_a_line(tiny: Path) -> None:
    for folder in (tiny, tiny / "inside"):
        with pytest.raises(directory.RunDirectoryError, match=r"tiny.yaml.*: no run can be made there"):
            lifecycle.create_run(RunConfig.from_yaml(tiny), folder)


def test_ranks_that_cannot_share_a_step_are_refused_before_one_starts(
    say, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifecycle, "take_lock", lambda _: pytest.fail("a trainer was about to start"))
    said = say("train", tiny, "--ranks", "1000")
    assert said.code == 2 and "1000 ranks cannot share evenly" in said.err and said.err.count("\n") == 1
    assert not (tmp_path / "outputs").exists()
    run_dir = lifecycle.create_run(RunConfig.from_yaml(tiny), tmp_path / "outputs")
    said = say("resume", run_dir, "--ranks", "1000")
    assert said.code == 2 and "1000 ranks cannot share evenly" in said.err and said.err.count("\n") == 1


def test_a_run_that_goes_on_already_is_not_said_to_be_resumed(
    say, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = lifecycle.create_run(RunConfig.from_yaml(tiny), tmp_path / "outputs")
    monkeypatch.setattr(lifecycle, "resume_hint", lambda folder, ranks: 7)
    for alive, told in ((True, "process 7 already trains "), (False, "process 7 trains ")):
        monkeypatch.setattr(lifecycle, "is_alive", lambda folder, alive=alive: alive)
        said = say("resume", run_dir)
        assert said.code == 0 and said.out.startswith(f"{told}{run_dir.name}; nsa-lab follow ")


def test_a_prompt_is_one_text_that_can_be_read(say, tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "outputs")
    (tmp_path / "bytes").write_bytes(b"\xff")
    for path in (tmp_path / "nowhere", tmp_path / "bytes", tmp_path):
        said = say("generate", run_dir, "--prompt-file", path)
        assert said.code == 2 and f"--prompt-file {path}: expected a UTF-8 text" in said.err and said.err.count("\n") == 1
    assert say("generate", run_dir, "--prompt", "a", "--prompt-file", tmp_path / "bytes").code == 2


def test_line_ends_of_a_prompt_are_read_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "crlf.txt").write_bytes(b"one\r\ntwo\r")
    assert model_commands._read_text(tmp_path / "crlf.txt", "--prompt-file") == "one\r\ntwo\r"


def test_a_plan_is_made_for_ranks_that_can_share_it(say, tiny: Path) -> None:
    said = say("plan", tiny, "--ranks", "1000")
    assert said.code == 2 and "1000 ranks cannot share evenly" in said.err and said.err.count("\n") == 1


def test_a_bug_is_not_dressed_up_as_a_wrong_usage(say, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise AttributeError("a bug")

    monkeypatch.setattr(resolve, "find_run", broken)
    monkeypatch.setattr(sys, "argv", ["nsa-lab", "health", "latest"])
    with pytest.raises(AttributeError, match="a bug"):
        cli.main()


def test_the_command_line_starts_without_the_heavy_packages() -> None:
    heavy = ("torch", "matplotlib", "papermill", "nbconvert", "pyarrow", "numpy")
    code = f"import sys, nsa_lab.cli; print([name for name in {heavy} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_health_exits_0_or_3_and_names_the_first_failure(say, tmp_path: Path) -> None:
    good = write_run(tmp_path / "good")
    bad = write_run(
        tmp_path / "bad",
        spoil=lambda events: [e for e in events if e["step"] <= 100],
        status=HALTED,
    )
    said = say("health", good)
    assert said.code == 0
    assert f"{good.name}: healthy: 30 of 30 hold\n" in said.out
    said = say("health", good, bad)
    assert said.code == 3
    assert "NOT healthy: finished: HALTED at step 100 of 200" in " ".join(said.out.split())


def test_status_tells_loss_and_verdict_and_the_state_once(say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    run_dir = write_run(tmp_path / "outputs")
    (line,) = [line for line in say("status").out.splitlines() if run_dir.name in line]
    assert line.split()[:5] == [run_dir.name, "DONE", "200", "2.140", "8,195"] and line.strip().endswith("not judged yet")
    write_verdict(run_dir)
    assert say("status").out.splitlines()[1].split()[-1] == "healthy"
    shown = say("status", "latest").out
    assert shown.count("DONE") == 1 and "healthy: " in shown and "16 min" not in shown
    told = json.loads(say("status", "--json").out)
    assert told == [json.loads(say("status", "latest", "--json").out)]
    assert told[0]["last_validation_bpb"] == pytest.approx(2.14, abs=1e-3) and told[0]["verdict"]["ok"] is True


def test_follow_says_of_a_killed_trainer_what_to_do(say, tmp_path: Path) -> None:
    """It ended with "is DEAD: None"."""
    spoil = lambda events: [e for e in events if e["step"] <= 100]  # noqa: E731
    run_dir = write_run(tmp_path / "outputs", spoil=spoil, status={"status": directory.RUNNING, "reason": None})
    said = say("follow", "latest")
    assert said.code == directory.EXIT_BUG
    assert said.out.splitlines()[-1].startswith(
        f"{run_dir.name} is DEAD: The trainer was killed; the last recorded step is 100."
    )
    assert f"nsa-lab resume {run_dir.name} goes on" in said.out


def test_status_of_a_halted_run_says_why_and_what_to_do(say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = write_run(tmp_path / "outputs", spoil=lambda events: [e for e in events if e["step"] <= 100], status=HALTED)
    monkeypatch.setenv("COLUMNS", "80")
    said = say("status", "latest").out
    assert said.splitlines()[-1].endswith(f"nsa-lab resume {run_dir.name}"), "a command is not broken over lines"
    shown = " ".join(said.split())
    assert "why step 101: the loss is nan" in shown
    assert "The newest halt-… folder of the run holds the diagnosis." in shown
    begun = ("fill", "start")
    run_dir = write_run(tmp_path / "texts", spoil=lambda events: [e for e in events if e["kind"] in begun], status=HALTED)
    shown = " ".join(say("status", run_dir).out.split())
    assert "diagnosis" not in shown and "If the cause is a value" in shown, "text that cannot be read leaves no such folder"
    assert "Nothing was trained yet." in shown and "weights" not in shown
    told = json.loads(say("status", "latest", "--json").out)
    assert told["reason"] == HALTED["reason"] and told["advice"][-1].endswith(f"nsa-lab resume {run_dir.name}")


def test_status_of_a_trainer_that_was_killed_says_what_its_record_does_not(say, tmp_path: Path) -> None:
    """Its status has a reason that is null."""
    status = {"status": directory.RUNNING, "reason": None}
    run_dir = write_run(tmp_path / "outputs", spoil=lambda events: [e for e in events if e["step"] <= 100], status=status)
    said = say("status", "latest")
    assert said.code == 0 and "why its status does not say" in " ".join(said.out.split())
    assert said.out.splitlines()[-1].endswith(f"nsa-lab resume {run_dir.name} goes on from the newest checkpoint.")


def test_what_follows_a_run_that_lies_elsewhere_says_where(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The commands as they were printed found no such run."""
    from nsa_lab.cli.training_commands import _print_started

    _print_started(get_outputs_dir() / "fake-1", 7)
    assert "nsa-lab follow fake-1 shows it, nsa-lab stop fake-1 ends it" in capsys.readouterr().out
    _print_started(tmp_path / "my runs" / "fake-1", 7)
    assert f"nsa-lab follow fake-1 --outputs '{tmp_path}/my runs' shows it" in capsys.readouterr().out


def test_runs_are_found_by_path_id_beginning_and_latest(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path)
    for named in (str(run_dir), run_dir.name, "fake", "latest"):
        assert find_run(named, tmp_path) == run_dir
    second = write_run(tmp_path / "other")
    second.rename(tmp_path / "fake-20260202T000000Z-ffff")
    with pytest.raises(directory.RunDirectoryError, match="begins the names of 2 runs"):
        find_run("fake-2026", tmp_path)


def test_params_and_notebooks_are_found_by_name() -> None:
    assert find_params_file("smoke").name == "smoke.yaml"
    assert find_params_file("some/where.yaml") == Path("some/where.yaml")


def test_production_configurations_take_the_production_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "notebooks").mkdir()
    for stem in ("03_smoke_training", "04_production_run"):
        (tmp_path / "notebooks" / f"{stem}.ipynb").touch()
    monkeypatch.setattr("nsa_lab.runs.resolve.root", lambda: tmp_path)
    from nsa_lab.config import RunConfig

    assert find_notebook(None, RunConfig(name="production_50k")).stem == "04_production_run"
    assert find_notebook(None, RunConfig(name="ci")).stem == "03_smoke_training"
    assert find_notebook("04_production_run", RunConfig(name="ci")).stem == "04_production_run"


@pytest.mark.slow
@pytest.mark.parametrize(("option", "alone"), [(["--record"], True), ([], False)])
def test_a_report_of_the_record_is_one(say, tmp_path: Path, monkeypatch, option: list[str], alone: bool) -> None:
    run_dir = write_run(tmp_path / "outputs")
    page, asked = tmp_path / "page.html", []
    monkeypatch.setattr("nsa_lab.report.write_report", lambda *given, **named: asked.append((given, named)) or page)
    assert say("report", run_dir.name, "--page", page, *option).code == 0
    assert asked == [((run_dir, page), {"record_alone": alone})]


def test_status_follow_and_report_read_a_finished_run(say, tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "outputs")
    assert run_dir.name in say("status").out
    assert "8.000 → 2.140" in say("status", "latest").out
    followed = say("follow", "latest")
    assert followed.code == 0
    assert "step 200/200" in followed.out
    said = say("report", "latest")
    assert said.code == 0
    assert Path(said.out.strip()) == run_dir / "report.html"
    assert f'href="{run_dir.name}/report.html"' in (tmp_path / "outputs" / "index.html").read_text(encoding="utf-8")


def test_plan_says_what_a_run_takes(say, tiny: Path, tmp_path: Path) -> None:
    said = say("plan", tiny)
    assert said.code == 0
    assert "optimiser steps" in said.out
    assert "not known before one was measured: nsa-lab preflight tiny" in said.out
    before = write_run(tmp_path / "outputs", RunConfig.from_yaml(tiny))
    said = say("plan", tiny)
    assert "8,195 tokens/s" in said.out and f"that of {before.name}, a run of this very configuration" in said.out


@pytest.mark.parametrize("command", ["preflight", "train", "run"])
def test_a_model_larger_than_the_machine_is_refused_before_anything_is_built(say, tiny: Path, command: str) -> None:
    said = say(command, tiny, "-p", "model.dim=100000", "-p", "model.n_layers=8")
    assert said.code == 2 and said.out == "" and len(said.err.splitlines()) == 1
    assert said.err.startswith("nsa-lab: a model of ") and "Lower model.dim or model.n_layers" in said.err
    assert not list(tiny.parent.glob("outputs/*"))


def test_plan_reckons_with_a_recorded_speed_only_for_the_very_same_training(say) -> None:
    known = say("plan", "production_50k")
    assert "measured on one NVIDIA" in known.out and "not known" not in known.out
    for other in ("model.dim=384", "train.seq_len=1024", "runtime.cuda_graph=false", "runtime.compile=false"):
        said = say("plan", "production_50k", "-p", other, "-p", "train.min_tokens_per_s=0")
        assert said.code == 0 and said.out.count("not known") == 3 and "measured on" not in said.out
    gated = say("plan", "production_50k", "-p", "model.dim=384")
    assert "20,000 tokens/s" in gated.out and "the slowest that the run accepts" in gated.out
    assert "2 h 16 min" in say("plan", "production_50k", "--tokens-per-s", "50000").out
    decoding = say("plan", "production_50k", "--decode").out.splitlines()
    assert any(line.split()[0] == "65,536" and line.endswith("34.60 MB") for line in decoding if line)
    assert decoding[-1] == "  each token of a sequence takes 6,528 bytes"


@pytest.mark.slow
def test_train_detached_then_stop_resume_and_generate(say, tiny: Path, tmp_path: Path) -> None:
    said = say("train", tiny)
    assert said.code == 0
    run_dir = Path(said.out.splitlines()[-1])
    assert lifecycle.wait(run_dir, timeout_s=180)
    assert lifecycle.get_state(run_dir) == directory.DONE
    assert "DONE" in say("stop", "latest").out
    refused = say("resume", "latest")
    assert refused.code == 2
    assert "DONE" in refused.err
    drawn = say("generate", "latest", "--prompt", "the ", "--tokens", "20").out
    assert len(drawn) > 1 and drawn != say("generate", "latest", "--prompt", "the ", "--tokens", "20", "--seed", "1").out
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("the " * 30)
    told = say("generate", "latest", "--prompt-file", prompt, "--tokens", "20", "--temperature", "0")
    assert told.out == say("generate", "latest", "--prompt", "the " * 30, "--tokens", "20", "--temperature", "0").out
    assert told.err.startswith("121 tokens read, the first drawn after ") and told.err.endswith(" tokens/s\n")
    refused = say("generate", "latest", "--step", "5")
    assert refused.code == 2
    assert "no checkpoint of step 5; there is 3, 6" in refused.err


@pytest.fixture
def rates(tiny: Path, tmp_path: Path) -> Path:
    """The file of a sweep over the rates of the tiny model."""
    path = tmp_path / "rates.yaml"
    path.write_text(f"preset: '{tiny}'\nvariants: {{as_it_is: , slow: train.lr=1e-5}}\nseeds: [0, 1]\n")
    return path


def test_a_sweep_says_what_it_would_train_and_what_is_known(say, rates: Path, tmp_path: Path) -> None:
    said = say("sweep", rates, "--dry-run")
    assert said.code == 0 and said.out.count("to start") == 4
    assert "4 runs, 4 to train; the baseline is as_it_is" in said.out
    assert not (tmp_path / "outputs").exists()
    for run in Sweep.load(str(rates), tmp_path / "outputs").runs[:3]:
        write_run(tmp_path / "outputs", run.config, name=run.config.name)
    assert "4 runs, 1 to train" in say("sweep", rates, "--dry-run").out
    table = say("sweep", rates, "--table").out
    assert "2 of 2" in table and "1 of 2" in table and "slow: a single seed has no interval" in table
    told = json.loads(say("sweep", rates, "--table", "--json").out)
    assert told["baseline"] == "as_it_is" and [len(one["runs"]) for one in told["variants"]] == [2, 2]
    assert not (tmp_path / "outputs/sweeps").exists(), "what only reads writes nothing"


@pytest.mark.parametrize(
    ("old", "new", "answer"),
    [
        ("train.lr=1e-5", "train.lrr=1", "variant slow: train.lrr = 1: no such key"),
        pytest.param("train.lr=1e-5", "data.path=nowhere", "variant slow: ", marks=pytest.mark.slow),
        pytest.param(
            "train.lr=1e-5", "runtime.backend=flash", "variant slow: backend = 'flash' cannot run", marks=pytest.mark.slow
        ),
        ("[0, 1]", "[0, 1]\ngpus: [9]", "gpus = [9]: 9 is none that can be used; no run of this sweep takes one here"),
    ],
)
def test_what_is_wrong_with_a_sweep_is_one_line_and_leaves_nothing(
    say, rates: Path, tmp_path: Path, old: str, new: str, answer: str
) -> None:
    rates.write_text(rates.read_text().replace(old, new))
    said = say("sweep", rates)
    assert (said.code, said.out) == (2, "") and len(said.err.splitlines()) == 1 and answer in said.err
    assert not (tmp_path / "outputs").exists()


# Stands for a cell that starts a trainer and waits for it; the trainer itself is proved elsewhere.
TRAIN_CELL = """
from pathlib import Path
from nsa_lab.runs import launch, directory
directory.write_status(Path(run_dir), run=Path(run_dir).name, status=directory.DONE, step=6, exit_code=0)
print(launch.state(run_dir))
"""


@pytest.mark.slow
def test_run_executes_a_notebook_and_prints_the_report_last(say, tiny: Path, tmp_path: Path) -> None:
    said = say("run", tiny, "--notebook", write_notebook(tmp_path, TRAIN_CELL))
    assert said.code == 0, said.err
    page = Path(said.out.splitlines()[-1])
    assert page.name == "report.html"
    assert lifecycle.get_state(page.parent) == directory.DONE
    executed = nbformat.read(page.parent / "report.ipynb", as_version=4)
    assert executed.cells[-1].outputs[-1].text == "DONE\n"


@pytest.mark.slow
def test_a_failing_notebook_still_gives_a_report_and_exit_code_1(say, tiny: Path, tmp_path: Path) -> None:
    source = write_notebook(tmp_path, TRAIN_CELL, "1 / 0", "print('never')")
    said = say("run", tiny, "--notebook", source)
    assert said.code == 1
    assert "ZeroDivisionError" in said.err
    page = Path(said.out.splitlines()[-1]).read_text(encoding="utf-8")
    assert "The notebook stopped in code cell" in page
    assert "ZeroDivisionError: division by zero" in page
    again = say("run", "--into", "latest", "--notebook", write_notebook(tmp_path, TRAIN_CELL))
    assert again.code == 0, again.err
    assert [path.name for path in (tmp_path / "outputs").iterdir() if path.is_file()] == ["index.html"]
    assert len(list((tmp_path / "outputs").glob("*/"))) == 1


def test_a_run_that_was_refused_by_the_trainer_has_the_trainers_exit_code(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path)
    for status, code, problem, wanted in (
        (directory.DONE, 0, None, 0),
        (directory.DONE, 0, "a cell failed", 1),
        (directory.HALTED, 3, "a cell failed", 3),
        (directory.HALTED, 2, None, 2),
        (directory.PREEMPTED, 75, None, 75),
        (directory.RUNNING, None, "killed", 1),
        (directory.RUNNING, None, "interrupted", 75),
    ):
        directory.write_status(run_dir, run=run_dir.name, status=status, exit_code=code)
        assert cli.get_exit_code(run_dir, problem) == wanted


def test_the_live_view_shows_numbers_phase_and_notes(tmp_path: Path) -> None:
    from rich.console import Console

    guard = {"kind": "guard", "attempt": 1, "step": 90, "rule": "slowdown", "action": "warn", "text": "slow\nindeed"}
    run_dir = write_run(tmp_path, spoil=lambda events: [*events, guard])
    terminal = Console(force_terminal=True, width=100, record=True)
    view = watch(run_dir, lambda: True, terminal)
    shown = terminal.export_text()
    assert view.format_numbers()["phase"].startswith("ended, ")  # nothing hangs in the phase that it ended in
    for word in (
        "200 of 200",
        "tokens per second",
        "8,19",
        "compressed 40%",
        "slowdown: slow indeed",
        "blocks reused",
        "93%",
    ):
        assert word in shown
    assert view.eta_s == 0.0
    assert RunView(run_dir).format_line() == "step 0/200  starting"
    stall = {"kind": "stall", "t": 0.0, "step": 3, "phase": "data", "phase_age_s": 9}
    assert format_note(stall).endswith("step 3  stall in data after 9 s")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here: nothing is refused")
def test_warmup_needs_a_gpu(say, tiny: Path) -> None:
    said = say("warmup", tiny, outputs=False)
    assert said.code == 2 and said.err == (
        "nsa-lab: nsa-lab warmup compiles kernels for the GPU of this machine, and torch sees none\n"
    )


def test_a_path_with_a_sign_of_equality_is_a_path() -> None:
    assert inspect_commands._parse_named_run("outputs/lr=3e-4-2026") == (None, "outputs/lr=3e-4-2026")
