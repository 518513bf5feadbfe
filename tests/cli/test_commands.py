"""Commands: their runs, outputs and exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
import torch
from cli_notebook import write_notebook
from fake_run import write_run

from nsa_lab import cli
from nsa_lab.cli import inspect_commands, model_commands
from nsa_lab.config import RunConfig
from nsa_lab.health import CHECKS
from nsa_lab.health.verdict_file import write_verdict
from nsa_lab.runs import directory, lifecycle
from nsa_lab.runs.live_view import RunView, format_note, watch
from nsa_lab.runs.resolve import find_notebook, find_params_file, find_run, get_outputs_dir
from nsa_lab.runs.sweep_runner import Sweep

torch.set_num_threads(1)

HALTED = {"status": directory.HALTED, "reason": "step 101: the loss is nan"}

# Replaces a cell that starts a trainer and waits for it; the trainer itself is tested elsewhere.
TRAIN_CELL = """
from pathlib import Path
from nsa_lab.runs import directory, lifecycle
directory.write_status(Path(run_dir), run=Path(run_dir).name, status=directory.DONE, step=6, exit_code=0)
print(lifecycle.get_state(run_dir))
"""

LOCALES = {
    "ascii": {"PYTHONIOENCODING": "ascii"},
    "latin-1": {"PYTHONIOENCODING": "latin-1"},
    "C": {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
}

REASON = "the file café…–→ is missing"

# Runs the command of each line of its input, and prints a separator after each but the last. A process has one encoding
# for all commands.
END = "\x1e"
RUN_LINES = f"""
import json, sys
from nsa_lab import cli

for number, line in enumerate(sys.stdin):
    if number:
        print({END!r}, end="")
    sys.argv = ["nsa-lab", *json.loads(line)]
    try:
        cli.main()
    except SystemExit as end:
        assert (end.code or 0) in (0, 2, 3), (line, end.code)
"""


def test_line_ends_of_a_prompt_file_are_preserved(tmp_path: Path) -> None:
    (tmp_path / "crlf.txt").write_bytes(b"one\r\ntwo\r")
    assert model_commands._read_text(tmp_path / "crlf.txt", "--prompt-file") == "one\r\ntwo\r"


def test_summaries_of_the_commands_fit_into_80_columns(monkeypatch: pytest.MonkeyPatch, run_cli) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for group in ([], ["bench"]):
        commands = run_cli(*group, "--help", outputs=False).out.partition("Commands:")[2]
        assert commands and "..." not in commands


def test_startup_imports_no_heavy_packages() -> None:
    heavy = ("torch", "matplotlib", "papermill", "nbconvert", "pyarrow", "numpy")
    code = f"import sys, nsa_lab.cli; print([name for name in {heavy} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
    code = (
        "import sys\nfrom nsa_lab import cli\n"
        "for command in ('health', 'stop', 'resume', 'follow'):\n"
        "    sys.argv = ['nsa-lab', command, 'no-such-run']\n"
        "    try:\n        cli.main()\n    except SystemExit as end:\n        assert end.code == 2\n"
        f"    print([name for name in {heavy} if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n" * 4, result


def test_health_exit_code_and_first_failure(run_cli, tmp_path: Path) -> None:
    good = write_run(tmp_path / "good")
    bad = write_run(
        tmp_path / "bad",
        spoil=lambda events: [e for e in events if e["step"] <= 100],
        status=HALTED,
    )
    guard = {"rule": "frozen", "value": 0.0, "limit": 0.0, "action": "warn", "text": "step 90: a layer does not move"}
    warned = write_run(
        tmp_path / "warned", spoil=lambda events: events.insert(-1, {"kind": "guard", "attempt": 1, "step": 90, **guard})
    )
    result = run_cli("health", good)
    assert result.exit_code == 0
    n_checks = len(CHECKS) - 2  # without a teacher and without digests
    assert f"{good.name}: healthy: {n_checks} of {n_checks} checks passed\n" in result.out
    assert (
        result.out.startswith("Run of the configuration fake, which has no description.\nThis NSA model of ")
        and json.loads((good / directory.VERDICT).read_text())["level"] == "passed"
    )
    assert run_cli("health", warned).exit_code == 0
    assert "passed with 1 warning: guards" in " ".join(run_cli("health", warned).out.split())
    result = run_cli("health", good, bad)
    assert result.exit_code == 3
    assert "NOT healthy: finished: HALTED at step 100 of 200" in " ".join(result.out.split())


def test_status_shows_loss_verdict_and_state(run_cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    run_dir = write_run(tmp_path / "outputs")
    (line,) = [line for line in run_cli("status").out.splitlines() if run_dir.name in line]
    assert line.split()[:5] == [run_dir.name, "DONE", "200", "2.140", "8,192"] and line.strip().endswith("not checked yet")
    write_verdict(run_dir)
    assert run_cli("status").out.splitlines()[1].split()[-1] == "healthy"
    shown = run_cli("status", "latest").out
    assert shown.count("DONE") == 1 and "healthy: " in shown and "16 min" not in shown
    summaries = json.loads(run_cli("status", "--json").out)
    whole = json.loads(run_cli("status", "latest", "--json").out)
    assert summaries == [{key: whole[key] for key in summaries[0]}], "the list has a part of the facts of one run"
    assert summaries[0]["last_validation_bpb"] == pytest.approx(2.14, abs=1e-3) and summaries[0]["verdict"]["ok"] is True


def test_follow_gives_advice_for_a_killed_trainer(run_cli, tmp_path: Path) -> None:
    """Regression: the line ended with "is DEAD: None"."""
    spoil = lambda events: [e for e in events if e["step"] <= 100]  # noqa: E731
    run_dir = write_run(tmp_path / "outputs", spoil=spoil, status={"status": directory.RUNNING, "reason": None})
    result = run_cli("follow", "latest")
    assert result.exit_code == directory.EXIT_BUG
    assert result.out.splitlines()[-1].startswith(
        f"{run_dir.name} is DEAD: The trainer was killed; the last recorded step is 100."
    )
    assert f"nsa-lab resume {run_dir.name} continues" in result.out


def test_status_of_a_halted_run_shows_reason_and_advice(run_cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = write_run(tmp_path / "outputs", spoil=lambda events: [e for e in events if e["step"] <= 100], status=HALTED)
    monkeypatch.setenv("COLUMNS", "80")
    result = run_cli("status", "latest").out
    assert result.splitlines()[-1].endswith(f"nsa-lab resume {run_dir.name}"), "a command is not wrapped"
    shown = " ".join(result.split())
    assert "reason step 101: the loss is nan" in shown
    assert "See the newest halt-… folder of the run for the diagnosis." in shown
    first_kinds = ("fill", "start")
    run_dir = write_run(
        tmp_path / "texts", spoil=lambda events: [e for e in events if e["kind"] in first_kinds], status=HALTED
    )
    shown = " ".join(run_cli("status", run_dir).out.split())
    assert "diagnosis" not in shown and "If the cause is a setting" in shown, "unreadable text leaves no halt folder"
    assert "Training has not started." in shown and "weights" not in shown
    summary = json.loads(run_cli("status", "latest", "--json").out)
    assert summary["reason"] == HALTED["reason"] and summary["advice"][-1].endswith(f"nsa-lab resume {run_dir.name}")


def test_status_of_a_killed_trainer_without_a_recorded_reason(run_cli, tmp_path: Path) -> None:
    """The reason in its status is null."""
    status = {"status": directory.RUNNING, "reason": None}
    run_dir = write_run(tmp_path / "outputs", spoil=lambda events: [e for e in events if e["step"] <= 100], status=status)
    result = run_cli("status", "latest")
    assert result.exit_code == 0 and "reason not recorded in its status" in " ".join(result.out.split())
    assert result.out.splitlines()[-1].endswith(f"nsa-lab resume {run_dir.name} continues from the newest checkpoint.")


def test_printed_commands_include_a_non_default_outputs_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Regression: the printed commands did not find the run."""
    from nsa_lab.cli.training_commands import _print_started

    _print_started(get_outputs_dir() / "fake-1", 7)
    assert "follow it with nsa-lab follow fake-1, stop it with nsa-lab stop fake-1" in capsys.readouterr().out
    _print_started(tmp_path / "my runs" / "fake-1", 7)
    assert f"follow it with nsa-lab follow fake-1 --outputs '{tmp_path}/my runs'" in capsys.readouterr().out


def test_runs_are_found_by_path_id_prefix_and_latest(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path)
    for named in (str(run_dir), run_dir.name, "fake", "latest"):
        assert find_run(named, tmp_path) == run_dir
    second = write_run(tmp_path / "other")
    second.rename(tmp_path / "fake-20260202T000000Z-ffff")
    with pytest.raises(directory.RunDirectoryError, match="matches 2 runs"):
        find_run("fake-2026", tmp_path)


def test_params_and_notebooks_are_found_by_name() -> None:
    assert find_params_file("smoke").name == "smoke.yaml"
    assert find_params_file("some/where.yaml") == Path("some/where.yaml")


def test_production_configurations_use_the_production_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "notebooks").mkdir()
    for stem in ("04_smoke_training", "05_production_run"):
        (tmp_path / "notebooks" / f"{stem}.ipynb").touch()
    monkeypatch.setattr("nsa_lab.runs.resolve.get_root", lambda: tmp_path)
    from nsa_lab.config import RunConfig

    assert find_notebook(None, RunConfig(name="production_50k")).stem == "05_production_run"
    assert find_notebook(None, RunConfig(name="ci")).stem == "04_smoke_training"
    assert find_notebook("05_production_run", RunConfig(name="ci")).stem == "05_production_run"


@pytest.mark.slow
@pytest.mark.parametrize(("option", "record_only"), [(["--record"], True), ([], False)])
def test_report_record_option_is_passed_on(
    run_cli, tmp_path: Path, monkeypatch, option: list[str], record_only: bool
) -> None:
    run_dir = write_run(tmp_path / "outputs")
    page, calls = tmp_path / "page.html", []
    monkeypatch.setattr(
        "nsa_lab.report.write_report",
        lambda history, *given, **named: calls.append((history.run_dir, given, named)) or page,
    )
    assert run_cli("report", run_dir.name, "--page", page, *option).exit_code == 0
    assert calls == [(run_dir, (page,), {"record_only": record_only})]


@pytest.mark.slow
def test_status_follow_and_report_read_a_finished_run(run_cli, tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "outputs")
    assert run_dir.name in run_cli("status").out
    assert "8.000 → 2.140" in run_cli("status", "latest").out
    followed = run_cli("follow", "latest")
    assert followed.exit_code == 0
    assert "step 200/200" in followed.out
    result = run_cli("report", "latest")
    assert result.exit_code == 0
    assert Path(result.out.strip()) == run_dir / "report.html"
    assert f'href="{run_dir.name}/report.html"' in (tmp_path / "outputs" / "index.html").read_text(encoding="utf-8")


def test_plan_shows_steps_and_the_source_of_the_speed(run_cli, tiny: Path, tmp_path: Path) -> None:
    result = run_cli("plan", tiny)
    assert result.exit_code == 0
    assert "optimizer steps" in result.out
    assert "measure it with nsa-lab preflight tiny" in result.out
    before = write_run(tmp_path / "outputs", RunConfig.from_yaml(tiny))
    result = run_cli("plan", tiny)
    assert "128 tokens/s" in result.out and f"measured by {before.name}, a run with this configuration" in result.out


@pytest.mark.slow
def test_plan_uses_a_reference_speed_only_for_the_same_configuration(run_cli) -> None:
    reference = run_cli("plan", "production_50k")
    assert "measured on one NVIDIA" in reference.out and "unknown" not in reference.out
    for other in ("model.dim=384", "train.seq_len=1024", "runtime.cuda_graph=false", "runtime.compile=false"):
        result = run_cli("plan", "production_50k", "-p", other, "-p", "train.min_tokens_per_s=0")
        assert result.exit_code == 0 and result.out.count("unknown") == 3 and "measured on" not in result.out
    limited = run_cli("plan", "production_50k", "-p", "model.dim=384")
    assert "20,000 tokens/s" in limited.out and "train.min_tokens_per_s, the lower limit" in limited.out
    assert "2 h 16 min" in run_cli("plan", "production_50k", "--tokens-per-s", "50000").out
    decoding = run_cli("plan", "production_50k", "--decode").out.splitlines()
    assert any(line.split()[0] == "65,536" and line.endswith("34.60 MB") for line in decoding if line)
    assert decoding[-1] == "  each token of a sequence uses 6,528 bytes"


@pytest.mark.slow
def test_train_detached_then_stop_resume_and_generate(run_cli, tiny: Path, tmp_path: Path) -> None:
    result = run_cli("train", tiny)
    assert result.exit_code == 0
    run_dir = Path(result.out.splitlines()[-1])
    assert lifecycle.wait(run_dir, timeout_s=180)
    assert lifecycle.get_state(run_dir) == directory.DONE
    assert "DONE" in run_cli("stop", "latest").out
    refused = run_cli("resume", "latest")
    assert refused.exit_code == 2
    assert "DONE" in refused.err
    sampled = run_cli("generate", "latest", "--prompt", "the ", "--tokens", "20").out
    assert (
        len(sampled) > 1
        and sampled != run_cli("generate", "latest", "--prompt", "the ", "--tokens", "20", "--seed", "1").out
    )
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("the " * 30)
    greedy = run_cli("generate", "latest", "--prompt-file", prompt, "--tokens", "20", "--temperature", "0")
    assert greedy.out == run_cli("generate", "latest", "--prompt", "the " * 30, "--tokens", "20", "--temperature", "0").out
    assert greedy.err.startswith("prompt of 121 tokens, first token after ") and greedy.err.endswith(" tokens/s\n")
    refused = run_cli("generate", "latest", "--step", "5")
    assert refused.exit_code == 2
    assert "no checkpoint of step 5; available: 3, 6" in refused.err


def test_sweep_dry_run_and_table(run_cli, rates: Path, tmp_path: Path) -> None:
    result = run_cli("sweep", rates, "--dry-run")
    assert result.exit_code == 0 and result.out.count("to start") == 4
    assert "4 runs, 4 to train; the baseline is as_it_is" in result.out
    assert not (tmp_path / "outputs").exists()
    for run in Sweep.load(str(rates), tmp_path / "outputs").runs[:3]:
        write_run(tmp_path / "outputs", run.config, name=run.config.name)
    assert "4 runs, 1 to train" in run_cli("sweep", rates, "--dry-run").out
    table = run_cli("sweep", rates, "--table").out
    assert "2 of 2" in table and "1 of 2" in table and "slow: single seed" in table
    json_table = json.loads(run_cli("sweep", rates, "--table", "--json").out)
    assert json_table["baseline"] == "as_it_is" and [len(variant["runs"]) for variant in json_table["variants"]] == [2, 2]
    assert not (tmp_path / "outputs/sweeps").exists(), "--table writes nothing"


@pytest.mark.slow
def test_run_executes_a_notebook_and_prints_the_report_last(run_cli, tiny: Path, tmp_path: Path) -> None:
    result = run_cli("run", tiny, "--notebook", write_notebook(tmp_path, TRAIN_CELL))
    assert result.exit_code == 0, result.err
    page = Path(result.out.splitlines()[-1])
    assert page.name == "report.html"
    assert lifecycle.get_state(page.parent) == directory.DONE
    executed = nbformat.read(page.parent / "report.ipynb", as_version=4)
    assert executed.cells[-1].outputs[-1].text == "DONE\n"


@pytest.mark.slow
def test_failing_notebook_gives_a_report_and_exit_code_1(run_cli, tiny: Path, tmp_path: Path) -> None:
    source = write_notebook(tmp_path, TRAIN_CELL, "1 / 0", "print('never')")
    result = run_cli("run", tiny, "--notebook", source)
    assert result.exit_code == 1
    assert "ZeroDivisionError" in result.err
    page = Path(result.out.splitlines()[-1]).read_text(encoding="utf-8")
    assert "The notebook stopped in code cell" in page
    assert "ZeroDivisionError: division by zero" in page
    again = run_cli("run", "--into", "latest", "--notebook", write_notebook(tmp_path, TRAIN_CELL))
    assert again.exit_code == 0, again.err
    assert [path.name for path in (tmp_path / "outputs").iterdir() if path.is_file()] == ["index.html"]
    assert len(list((tmp_path / "outputs").glob("*/"))) == 1


def test_exit_code_of_a_run_takes_precedence_over_the_notebook(tmp_path: Path) -> None:
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
    assert view.format_numbers()["phase"].startswith("ended, ")  # a finished run is not stuck in its last phase
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


@pytest.mark.slow
def test_commands_work_in_a_locale_that_is_not_utf8(tmp_path: Path, rates: Path) -> None:
    run_dir = write_run(tmp_path / "outputs", status={"status": directory.HALTED, "reason": REASON})
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("LC_", "LANG", "PYTHONIO"))}
    commands = (
        ["status"],
        ["status", run_dir.name],
        ["status", run_dir.name, "--json"],
        ["health", run_dir.name],
        ["compare", run_dir.name],
        ["sweep", str(rates), "--dry-run"],
    )
    lines = [json.dumps([*arguments, "--outputs", str(tmp_path / "outputs")]) for arguments in commands]
    for name, variables in LOCALES.items():
        result = subprocess.run(
            [sys.executable, "-c", RUN_LINES],
            input="\n".join(lines).encode(),
            capture_output=True,
            env={**environment, **variables},
            check=False,
        )
        encoding = "latin-1" if name == "latin-1" else "ascii"
        assert not result.returncode and "Traceback" not in result.stderr.decode(encoding), result.stderr
        shown = dict(zip(map(tuple, commands), result.stdout.decode(encoding).split(END), strict=True))
        assert not any("Traceback" in text for text in shown.values()), shown
        assert json.loads(shown["status", run_dir.name, "--json"])["reason"] == REASON
        described = " ".join(shown["status", run_dir.name].split())
        assert ("café...-->" if name == "latin-1" else "caf\\xe9...-->") in described


def test_prompts_are_read_in_an_ascii_locale(monkeypatch: pytest.MonkeyPatch) -> None:
    assert model_commands._read_prompt("caf\udcc3\udca9", None) == "café"


def test_path_with_an_equals_sign_is_not_a_named_run() -> None:
    assert inspect_commands._parse_named_run("outputs/lr=3e-4-2026") == (None, "outputs/lr=3e-4-2026")
