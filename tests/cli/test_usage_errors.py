"""Command line: a usage error gives one line with the remedy and exit code 2, and writes nothing."""

from __future__ import annotations

import multiprocessing
import os
import stat
import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import torch
from cli_notebook import write_notebook
from fake_run import write_run
from looping import looped

from nsa_lab import cli
from nsa_lab.config import ConfigError, RunConfig
from nsa_lab.runs import directory, lifecycle, resolve
from nsa_lab.runs.atomic_io import UnwritableFile
from nsa_lab.runs.model_files import make_evaluation_folder
from nsa_lab.runs.run_files import find_run_of_file

torch.set_num_threads(1)

ROOT = Path(__file__).parents[2]

# A head of width 8 is refused where the kernels can run on a CPU at all; see tests/conftest.py.
TRITON_REFUSAL = (
    "backend = 'triton' does not support this shape: the kernels take head widths in multiples of 16"
    if os.environ.get("TRITON_INTERPRET") == "1"
    else "backend = 'triton' cannot run: the device is cpu"
)


def make_missing_path(folder: Path) -> Path:
    return folder / "nowhere"


def make_empty_file(folder: Path) -> Path:
    (folder / "empty.txt").touch()
    return folder / "empty.txt"


def make_file_without_text(folder: Path) -> Path:
    pyarrow.parquet.write_table(pyarrow.table({"body": ["a", "b"]}), folder / "other.parquet")
    return folder / "other.parquet"


def get_notebook_option(command: str, folder: Path) -> list[object]:
    return ["--notebook", write_notebook(folder)] if command == "run" else []


@looped
@pytest.mark.parametrize("command", ["run", "train"])
@pytest.mark.parametrize(
    ("override", "answer"),
    [
        ("train.stepz=10", "did you mean train.steps?"),
        ("nsa.d=5", "use nsa.l = 5 or 10"),
        ("model.n_heads=3,", "model.n_heads"),
        ("train.steps", "expected section.key=value"),
        ("train.steps=[1", "-p train.steps=[1: line 1"),
        ('name="\\U00110000"', "an escape (\\U) expects a character of Unicode"),
        ("data.path=" + "x" * 300, "nothing at"),
        ("model.dim=1000000000000", "model.dim = 1000000000000"),
        ("runtime.backend=flash", "backend = 'flash' cannot run"),
        ("runtime.backend=triton", TRITON_REFUSAL),
    ],
)
def test_wrong_setting_is_reported_in_one_line_and_writes_nothing(
    run_cli, tiny: Path, tmp_path: Path, command: str, override: str, answer: str
) -> None:
    result = run_cli(command, tiny, "-p", override, *get_notebook_option(command, tmp_path))
    assert result.exit_code == 2
    assert result.out == ""
    assert result.err.count("\n") == 1
    assert answer in result.err
    assert not (tmp_path / "outputs").exists()


def test_a_single_text_is_accepted_and_said_to_be_split_by_position(
    run_cli, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "input.txt").write_text("First Citizen: before we proceed any further, hear me speak. " * 99)
    monkeypatch.setattr(lifecycle, "start", lambda run_dir, ranks: 7)
    result = run_cli("train", tiny, "-p", f"data.path={tmp_path / 'input.txt'}")
    assert result.exit_code == 0 and "split by position: its last 0.4 are the validation text" in result.err
    assert len(list((tmp_path / "outputs").iterdir())) == 1


def test_too_short_texts_and_copies_are_refused_before_a_run_exists(
    run_cli, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checks that need torch are not reached."""
    monkeypatch.setattr("nsa_lab.train.preflight.startup_checks.check_startable", lambda *_: pytest.fail("too late"))
    folder = tmp_path / "same"
    folder.mkdir()
    for index in range(3):
        (folder / f"{index}.txt").write_text("the same text " * 30)
    for command in ("train", "preflight", "run"):
        for override, answer in (
            (f"data.path={folder}", "copies of one text"),
            ("train.seq_len=9999", "a sequence needs 10000"),
        ):
            result = run_cli(command, tiny, "-p", override, *get_notebook_option(command, tmp_path))
            assert result.exit_code == 2 and answer in result.err and result.err.count("\n") == 1
    assert not (tmp_path / "outputs").exists()


@pytest.mark.slow
@looped
@pytest.mark.parametrize("command", ["run", "train"])
@pytest.mark.parametrize(
    ("make", "answer"),
    [
        (make_missing_path, "nowhere"),
        (make_empty_file, "empty"),
        (make_file_without_text, "text"),
    ],
)
def test_unreadable_text_is_reported_in_one_line_and_writes_nothing(
    run_cli, tiny: Path, tmp_path: Path, command: str, make, answer: str
) -> None:
    path = make(tmp_path)
    result = run_cli(command, tiny, "-p", f"data.path={path}", *get_notebook_option(command, tmp_path))
    assert result.exit_code == 2
    assert result.err.startswith("nsa-lab: ")
    assert result.err.count("\n") == 1
    assert str(path) in result.err
    assert answer in result.err
    assert not (tmp_path / "outputs").exists()


@looped
@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        (["run", "smoek"], "did you mean smoke?"),
        (["sweep", "smoke_rate"], "did you mean smoke_rates?"),
        (["run"], "NAME of a params file"),
        (["run", __file__], "the path of a .yaml file, got a .py file; "),
        (["run", "smoke", "--notebook", "no_such_notebook"], "--notebook no_such_notebook: no such notebook; "),
        (["health", "no-such-run"], "no runs yet"),
        (["stop", "latest"], "no runs yet"),
        (["generate", "latest"], "no runs yet"),
    ],
)
def test_unknown_name_lists_the_known_names(run_cli, arguments: list[str], answer: str, tmp_path: Path) -> None:
    result = run_cli(*arguments)
    assert result.exit_code == 2
    assert result.err.count("\n") == 1
    assert answer in result.err
    assert not (tmp_path / "outputs").exists()


# Every option that writes a file. The commands are refused before any work, so that the run need not exist.
FILE_OPTIONS = (
    ("report", "absent", "--page"),
    ("export", "absent", "--csv", "--into"),
    ("demo", "--picture"),
    *(("bench", name, "--json") for name in ("attention", "tune", "decode", "train", "curves", "trainer", "ranks")),
    *(("bench", name, "--picture") for name in ("attention", "decode", "train", "curves")),
    ("bench", "limits", "absent.json", "--picture"),
)


@looped
@pytest.mark.parametrize("arguments", FILE_OPTIONS)
def test_output_path_that_is_no_regular_file_is_refused_before_the_work(
    run_cli, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    if not (tmp_path / "fifo").exists():  # the cases share the folder
        os.mkfifo(tmp_path / "fifo")
        os.mknod(tmp_path / "socket", stat.S_IFSOCK | 0o600)
        (tmp_path / "link").symlink_to("old.txt")
    for path, answer in (
        (tmp_path, "expected a regular file or a new path, got a folder"),
        (tmp_path / "fifo", "expected a regular file or a new path, got a FIFO"),
        (tmp_path / "link", "expected a regular file or a new path, got a symbolic link"),
        (tmp_path / "socket", "expected a regular file or a new path, got a device or socket"),
        (tmp_path / "nowhere" / "x.html", "expected a path in an existing folder"),
    ):
        mode = path.lstat().st_mode if os.path.lexists(path) else None
        result = run_cli(*arguments, path, outputs=False)
        assert result.exit_code == 2 and result.err.count("\n") == 1, result
        assert result.err.startswith(f"nsa-lab: {arguments[-1]} {path}: {answer}"), result
        assert (path.lstat().st_mode if os.path.lexists(path) else None) == mode


@looped
@pytest.mark.parametrize("arguments", FILE_OPTIONS)
@pytest.mark.parametrize("name", ["events.jsonl", "config.yaml", "conversion.json", "checkpoints/step-00000001/state.json"])
def test_a_result_is_not_written_over_the_record_of_a_run(
    run_cli, tmp_path: Path, arguments: tuple[str, ...], name: str
) -> None:
    (tmp_path / "own" / name).parent.mkdir(parents=True, exist_ok=True)
    for path in (tmp_path / "own" / "config.yaml", tmp_path / "own" / name):
        path.write_text("the record")
    result = run_cli(*arguments, tmp_path / "own" / name, outputs=False)
    assert result.exit_code == 2 and "expected a new file, got one of the run own" in result.err, result
    assert (tmp_path / "own" / name).read_text() == "the record"
    assert find_run_of_file(tmp_path / "own" / "metrics.csv") is find_run_of_file(tmp_path / name) is None


def test_an_evaluation_is_not_written_into_another_run(tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").touch()
    with pytest.raises(ConfigError, match="got another run; give another folder"):
        make_evaluation_folder(tmp_path / "one", tmp_path / "other", "evaluation.json")
    assert make_evaluation_folder(tmp_path / "one", tmp_path / "one", "evaluation.json") == tmp_path / "one"
    assert make_evaluation_folder(tmp_path / "one", tmp_path / "new", "evaluation.json").is_dir()


def test_evaluation_is_not_written_over_a_fifo(run_cli, tmp_path: Path) -> None:
    for name, options in (
        ("evaluation.json", []),
        ("ruler.unfinished.json", ["--ruler"]),
        ("conversion.json", ["--blocks", "2"]),
    ):
        out = tmp_path / name
        out.mkdir()
        os.mkfifo(out / name)
        with pytest.raises(UnwritableFile):  # before the command, which would evaluate for minutes
            make_evaluation_folder(tmp_path, out, name)
        result = run_cli("evaluate", "needle-8m", "--out", out, *options)
        assert result.exit_code == 2 and f"{out / name}: expected a regular file or a new path" in result.err, result
        assert (out / name).is_fifo()


@looped
@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        (["generate", "needle-8m", "--seed", str(2**70)], "--seed"),
        (["evaluate", "needle-8m", "--seed", str(2**70)], "--seed"),
        (["generate", "needle-8m", "--prompt", "\udcff"], "--prompt '\\udcff': expected valid UTF-8"),
        (["evaluate", "needle-8m", "--out", __file__], "cannot write an evaluation here"),
        *(
            (["evaluate", "needle-8m", "--length", text], f"--length {text[:90]}")
            for text in ("9" * 20, "2147483648", "9" * 5000, "63", "", "64:0", "64:2147483648", "64:-1", "1e9")
        ),
        (["evaluate", "needle-8m", "--per-depth", "9" * 20], "--per-depth"),
        (["evaluate", "needle-8m", "--intervened", "9" * 20], "--intervened"),
        (["bench", "decode", "--length", "9" * 20], "--length"),
        (["bench", "ranks", "--length", "9" * 20], "--length"),
        (["evaluate", "needle-8m", "--task", "need"], "--task need: unknown task; available: needle"),
        (["evaluate", "needle-8m", "--text", "a=/nowhere"], "text '/nowhere': nothing at /nowhere"),
        (["evaluate", "needle-8m", "--out", "x", "--step", "7"], "no checkpoint of step 7; available: 1526"),
        (["generate", "needle-8m", "--step", "7"], "no checkpoint of step 7; available: 1526"),
        (["export-hf", "needle-8m", ".", "--step", "7"], "no checkpoint of step 7; available: 1526"),
        (["bench", "attention", "--json", "/nowhere/x.json"], "--json"),
        (["bench", "decode", "--picture", "/nowhere/x.png"], "--picture"),
        *(
            ([*words, "--picture", name], f"--picture {name}: expected a name with one of the suffixes .png, ")
            for *words, _ in (options for options in FILE_OPTIONS if options[-1] == "--picture")
            for name in ("x.nix", "x", "png")
        ),
        (["bench", "attention", "--backend", "cuda"], "--backend"),
        (["bench", "attention", "--shape", "0x8"], "--shape: shape '0x8'"),
        (["bench", "train", "--shape", "64x0"], "64x0: expected tokens x sequences"),
        *(
            (["bench", command, "--shape", shape], "1 to 2147483647 tokens; each other number 1 to 262144")
            for command in ("attention", "train", "tune")
            for shape in ("1000000000000x1", "2147483648x1", "64x262145", f"64x{'9' * 5000}")
        ),
        *(
            (["bench", command, "--shape", f"64x1xH{heads}xG1xD{width}xV{value_width}"], "each other number 1 to 262144")
            for command in ("attention", "tune")
            for heads, width, value_width in ((10**12, 16, 16), (1, 262145, 16), (1, 16, 10**12))
        ),
        *(
            (["bench", *words, number], words[-1])
            for words in (("tune", "--most"), ("decode", "--batch"), ("decode", "--layers"), ("curves", "--steps"))
            for number in ("1000000000000", "9" * 20)
        ),
        *(
            (
                ["bench", command, "--device", "cpu", "--shape", "64x1xH5xG3xD64xV64"],
                "a multiple of G (groups), got 5 and 3",
            )
            for command in ("attention", "tune")
        ),
        (["bench", "limits", "/dev/zero"], "/dev/zero: expected a regular file"),
        (["bench", "trainer", "--steps", "1000000000000"], "--steps"),
        *(
            ([*words, "--ranks", number], "--ranks")
            for words in (["bench", "trainer"], ["bench", "ranks"], ["train", "smoke"], ["run", "smoke"], ["plan", "smoke"])
            for number in ("1025", "9" * 20)
        ),
        (["generate", "needle-8m", "--tokens", "2147483648"], "--tokens"),
        (["generate", "needle-8m", "--tokens", "1000000000000"], "--tokens"),
        (["bench", "train", "--preset", "prodaction_50k"], "production_50k"),
    ],
)
def test_wrong_usage_is_reported_before_any_work(run_cli, arguments: list[str], answer: str) -> None:
    result = run_cli(*arguments, outputs=arguments[0] not in ("bench", "demo"))
    assert result.exit_code == 2 and result.out == "" and answer in result.err


@pytest.mark.parametrize("seconds", ["-1", "nan", "inf"])
def test_stop_rejects_an_invalid_timeout(run_cli, seconds, tmp_path: Path) -> None:
    result = run_cli("stop", write_run(tmp_path), "--timeout", seconds)
    assert result.exit_code == 2 and f"--timeout {seconds}: expected a finite number of seconds >= 0" in result.err
    assert result.err.count("\n") == 1 and not result.out


@looped
@pytest.mark.parametrize("speed", ["0", "-5", "nan", "inf"])
def test_plan_rejects_an_invalid_speed(run_cli, tiny: Path, speed: str) -> None:
    result = run_cli("plan", tiny, "--tokens-per-s", speed)
    assert (
        result.exit_code == 2
        and f"--tokens-per-s {speed}: expected a finite number > 0" in result.err
        and result.err.count("\n") == 1
    )


def test_outputs_path_that_is_a_file_is_rejected(tiny: Path) -> None:
    config = RunConfig.from_yaml(tiny)
    for folder in (tiny, tiny / "inside"):
        with pytest.raises(directory.RunDirectoryError) as refused:
            lifecycle.create_run(config, folder)
        assert str(refused.value).startswith(f"{folder}: cannot create a run directory (")
        assert "choose a writable folder" in str(refused.value)
    assert RunConfig.from_yaml(tiny) == config


def test_rank_count_that_cannot_share_a_step_is_rejected_before_the_start(
    run_cli, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifecycle, "take_lock", lambda _: pytest.fail("a trainer was starting"))
    result = run_cli("train", tiny, "--ranks", "1000")
    assert result.exit_code == 2 and "1000 ranks cannot share evenly" in result.err and result.err.count("\n") == 1
    assert not (tmp_path / "outputs").exists()
    run_dir = lifecycle.create_run(RunConfig.from_yaml(tiny), tmp_path / "outputs")
    result = run_cli("resume", run_dir, "--ranks", "1000")
    assert result.exit_code == 2 and "1000 ranks cannot share evenly" in result.err and result.err.count("\n") == 1


def test_resume_of_a_running_run_reports_that_it_already_trains(
    run_cli, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = lifecycle.create_run(RunConfig.from_yaml(tiny), tmp_path / "outputs")
    monkeypatch.setattr(lifecycle, "resume", lambda folder, ranks: 7)
    for alive, prefix in ((True, "process 7 already trains "), (False, "process 7 trains ")):
        monkeypatch.setattr(lifecycle, "is_alive", lambda folder, alive=alive: alive)
        result = run_cli("resume", run_dir)
        assert result.exit_code == 0 and result.out.startswith(f"{prefix}{run_dir.name}; follow it with nsa-lab follow ")


def test_generate_rejects_unreadable_and_double_prompts(run_cli, tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "outputs")
    (tmp_path / "bytes").write_bytes(b"\xff")
    os.mkfifo(tmp_path / "fifo")
    with open(tmp_path / "large", "wb") as file:
        file.truncate(10**12)
    for path in (*(tmp_path / name for name in ("nowhere", "bytes", "fifo", "large")), tmp_path, Path("/dev/zero")):
        result = run_cli("generate", run_dir, "--prompt-file", path)
        assert (
            result.exit_code == 2
            and f"--prompt-file {path}: expected UTF-8 text" in result.err
            and result.err.count("\n") == 1
        )
    assert run_cli("generate", run_dir, "--prompt", "a", "--prompt-file", tmp_path / "bytes").exit_code == 2


def test_plan_rejects_a_rank_count_that_cannot_share_a_step(run_cli, tiny: Path) -> None:
    result = run_cli("plan", tiny, "--ranks", "1000")
    assert result.exit_code == 2 and "1000 ranks cannot share evenly" in result.err and result.err.count("\n") == 1


def test_internal_errors_are_not_reported_as_usage_errors(run_cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise AttributeError("a bug")

    monkeypatch.setattr(resolve, "find_run", broken)
    monkeypatch.setattr(sys, "argv", ["nsa-lab", "health", "latest"])
    with pytest.raises(AttributeError, match="a bug"):
        cli.main()


def test_wrong_arguments_are_refused_before_torch_is_imported(tiny: Path, tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from nsa_lab import cli\n"
        "for line in sys.stdin.read().splitlines():\n"
        "    sys.argv = ['nsa-lab', *line.split('|')]\n"
        "    try:\n"
        "        cli.main()\n"
        "    except SystemExit as end:\n"
        "        assert end.code == 2, (line, end.code)\n"
        "    assert 'torch' not in sys.modules, line\n"
    )
    lines = [
        "run|smok",
        f"train|{tiny}|-p|train.stepz=3",
        f"train|{tiny}|-p|train.steps=three",
        f"train|{tiny}|-p|data.path=/nowhere",
        f"train|{tiny}|--ranks|1000",
        f"train|{tiny}|-p|train.seq_len=9999",
        f"preflight|{tiny}|-p|nsa.d=5",
        f"plan|{tiny}|-p|nsa.d=5",
        "warmup|smok",
        "sweep|smok",
        "resume|nothing",
        "generate|nothing",
        "generate|needle-8m|--step|3",
        "generate|needle-8m|--prompt-file|/nowhere",
        "evaluate|needle-8m|--task|x",
        "evaluate|needle-8m|--text|a=/nowhere",
        "evaluate|needle-8m|--length|3",
        f"ship|nothing|{tmp_path / 'new'}|--about|{tiny}",
        "export-hf|needle-8m|.",
        "bench|attention|--shape|x",
        "bench|tune|--shape|x",
        "bench|tune|--kernel|x",
        f"bench|limits|{tiny}",
        f"bench|limits|{ROOT}/docs/benchmarks/decode-h200.json",
        "bench|train|--shape|x",
        "bench|train|--preset|smok",
        "bench|attention|--json|/nowhere/x",
        "demo|--picture|/nowhere/x.png",
        "health|nothing",
        "compare|nothing",
    ]
    result = subprocess.run(
        [sys.executable, "-c", code], input="\n".join(lines), capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stderr.count("nsa-lab") >= len(lines)


def test_too_little_memory_is_one_line(run_cli, monkeypatch: pytest.MonkeyPatch) -> None:
    errors = [
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 68719475712 bytes. Error code 12"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity"),
        MemoryError(),
        RuntimeError("another error"),
    ]
    remaining = iter(errors)

    def fail(*_: object, **__: object) -> None:
        raise next(remaining)

    monkeypatch.setattr("nsa_lab.bench.decode_speed.run_decode_bench", fail)
    for text in (" for 68719475712 bytes; ", " for 20.00 GiB; ", "not enough memory; "):
        result = run_cli("bench", "decode", "--device", "cpu", outputs=False)
        assert result.exit_code == 2 and len(result.err.splitlines()) == 1 and text in result.err, result.err
    with pytest.raises(RuntimeError, match="another error"):
        run_cli("bench", "decode", "--device", "cpu", outputs=False)


@pytest.mark.parametrize("command", ["preflight", "train", "run"])
def test_model_larger_than_memory_is_rejected_before_it_is_built(run_cli, tiny: Path, command: str) -> None:
    result = run_cli(command, tiny, "-p", "model.dim=100000", "-p", "model.n_layers=8")
    assert result.exit_code == 2 and result.out == "" and len(result.err.splitlines()) == 1
    assert result.err.startswith("nsa-lab: a model of ") and "Lower model.dim or model.n_layers" in result.err
    assert not list(tiny.parent.glob("outputs/*"))


@pytest.mark.parametrize(
    ("old", "new", "answer"),
    [
        ("train.lr=1e-5", "train.lrr=1", "variant slow: train.lrr = 1: no such key"),
        pytest.param("train.lr=1e-5", "data.path=nowhere", "variant slow: ", marks=pytest.mark.slow),
        pytest.param(
            "train.lr=1e-5", "runtime.backend=flash", "variant slow: backend = 'flash' cannot run", marks=pytest.mark.slow
        ),
        pytest.param(
            "[0, 1]",
            "[0, 1]\ngpus: [9]",
            "gpus = [9]: GPU 9 is not available; no run of this sweep uses a GPU here",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_wrong_sweep_is_reported_in_one_line_and_writes_nothing(
    run_cli, rates: Path, tmp_path: Path, old: str, new: str, answer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "flash" not in new:  # one case checks its variants in a new interpreter, as users do
        fork = multiprocessing.get_context("fork")
        monkeypatch.setattr(multiprocessing, "get_context", lambda method: fork)
    rates.write_text(rates.read_text().replace(old, new))
    result = run_cli("sweep", rates)
    assert (result.exit_code, result.out) == (2, "") and len(result.err.splitlines()) == 1 and answer in result.err
    assert not (tmp_path / "outputs").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_warmup_needs_a_gpu(run_cli, tiny: Path) -> None:
    result = run_cli("warmup", tiny, outputs=False)
    assert (result.exit_code, result.out) == (2, "") and result.err.count("\n") == 1
    assert result.err.startswith("nsa-lab: nsa-lab warmup ") and "torch sees no CUDA device" in result.err
