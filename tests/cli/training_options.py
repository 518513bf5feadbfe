"""Options of the commands that plan, start, resume and stop training."""

from __future__ import annotations

from types import SimpleNamespace

from option_cases import OUT, case, stop

CREATE = "nsa_lab.runs.lifecycle.create_run"
NOTEBOOK = "nsa_lab.report.notebook_runner.execute_notebook"

words_of = {"run": "run {params} --notebook {folder}/x.ipynb", "train": "train {params}", "convert": "convert S {params}"}
for command in ("run", "train", "convert"):
    line = f"{words_of[command]} {OUT}"
    case(command, "name", line, CREATE, lambda config, folder: config.name == "params" and config.train.steps == 7, stop)
    case(command, "param", f"{line} -p train.lr=0.5", CREATE, lambda config, folder: config.train.lr == 0.5, stop)
    case(command, "outputs", line, CREATE, lambda config, folder: folder.name == "outputs", stop)
case(
    "run",
    "notebook",
    f"run --into {{run}} {OUT} --notebook {{folder}}/x.ipynb",
    NOTEBOOK,
    lambda file, *_: file.name == "x.ipynb",
    stop,
)
case(
    "run",
    "into",
    f"run --into {{run}} {OUT} --notebook {{folder}}/x.ipynb",
    NOTEBOOK,
    lambda file, run, _: run.name.startswith("fake"),
    stop,
)
STARTABLE = "nsa_lab.train.preflight.startup_checks.check_startable"
for command in ("train", "convert"):
    line = f"{words_of[command]} {OUT}"
    case(command, "ranks", f"{line} --ranks 2", STARTABLE, lambda config, ranks: ranks == 2, stop)
    case(command, "foreground", f"{line} --foreground", "nsa_lab.train.__main__.main", lambda words: len(words) == 1, 0)
case(
    "convert",
    "source",
    f"convert S {{params}} {OUT}",
    "nsa_lab.convert.describe_source",
    lambda source, folder: source == "S" and folder.name == "outputs",
    stop,
)
case(
    "resume",
    "run",
    f"resume {{run}} {OUT}",
    "nsa_lab.runs.lifecycle.resume",
    lambda run, ranks: run.name.startswith("fake"),
    7,
)
case(
    "resume",
    "outputs",
    f"resume {{run}} {OUT}",
    "nsa_lab.runs.lifecycle.resume",
    lambda run, ranks: run.parent.name == "outputs",
    7,
)
case(
    "resume", "ranks", f"resume {{run}} {OUT} --ranks 3", "nsa_lab.runs.lifecycle.resume", lambda run, ranks: ranks == 3, 7
)
case(
    "stop",
    "run",
    f"stop {{run}} {OUT}",
    "nsa_lab.runs.lifecycle.stop",
    lambda run, timeout: run.name.startswith("fake"),
    "DONE",
)
case(
    "stop",
    "outputs",
    f"stop {{run}} {OUT}",
    "nsa_lab.runs.lifecycle.stop",
    lambda run, timeout: run.parent.name == "outputs",
    "DONE",
)
case(
    "stop",
    "timeout",
    f"stop {{run}} {OUT} --timeout 5.5",
    "nsa_lab.runs.lifecycle.stop",
    lambda run, timeout: timeout == 5.5,
    "DONE",
)

ESTIMATE = "nsa_lab.train.estimate.estimate_resources"
case("plan", "name", "plan {params}", ESTIMATE, lambda config, speed, ranks: config.name == "params", "")
case("plan", "param", "plan {params} -p train.lr=0.5", ESTIMATE, lambda config, speed, ranks: config.train.lr == 0.5, "")
case(
    "plan", "ranks", "plan {params} --ranks 4 -p train.batch_size=8", ESTIMATE, lambda config, speed, ranks: ranks == 4, ""
)
case("plan", "tokens_per_s", "plan {params} --tokens-per-s 123", ESTIMATE, lambda config, speed, ranks: speed == 123, "")
COMPARE_PLAN = "nsa_lab.workbook.plan_vs_actual.compare_plan_with_run"
case(
    "plan",
    "run",
    f"plan {{params}} --run {{run}} {OUT}",
    COMPARE_PLAN,
    lambda history, speed: history.run.startswith("fake"),
    "",
)
case(
    "plan",
    "outputs",
    f"plan {{params}} --run {{run}} {OUT}",
    COMPARE_PLAN,
    lambda history, speed: history.run_dir.parent.name == "outputs",
    "",
)
case(
    "plan",
    "show_baseline",
    "plan {params} --twin",
    "nsa_lab.train.matched_baseline.build_matched_baseline",
    lambda config: config.name == "params",
    "",
)
case(
    "plan",
    "show_decoding",
    "plan {params} --decode",
    "nsa_lab.inference.kv_cache_size.format_decoding_estimate",
    lambda model, n, free: n > 0,
    "",
)
PREFLIGHT = "nsa_lab.train.preflight.startup_checks.run_preflight_without_run"
for name, options, check in (
    ("name", "", lambda config, *_, **__: config.name == "params"),
    ("param", "-p train.lr=0.5", lambda config, *_, **__: config.train.lr == 0.5),
    ("outputs", "", lambda config, folder, **_: folder.name == "outputs"),
):
    case("preflight", name, f"preflight {{params}} {options} {OUT}", PREFLIGHT, check, ())
WARMUP = "nsa_lab.train.precompile.precompile_kernels"
DONE = SimpleNamespace(n_kernels=1, seconds=1.0, threads=1)
case("warmup", "name", "warmup {params}", WARMUP, lambda config, threads: config.name == "params", DONE)
case("warmup", "param", "warmup {params} -p train.lr=0.5", WARMUP, lambda config, threads: config.train.lr == 0.5, DONE)
case("warmup", "threads", "warmup {params} --threads 3", WARMUP, lambda config, threads: threads == 3, DONE)

LOAD = "nsa_lab.runs.sweep_runner.Sweep.load"
case("sweep", "file", f"sweep {{sweep}} {OUT}", LOAD, lambda file, folder, _: file.endswith("rates.yaml"), stop)
case("sweep", "outputs", f"sweep {{sweep}} {OUT}", LOAD, lambda file, folder, _: folder.name == "outputs", stop)
case("sweep", "dry_run", f"sweep {{sweep}} {OUT} --dry-run", "nsa_lab.cli.sweep_command._show_plan", lambda sweep: True)
case(
    "sweep",
    "table",
    f"sweep {{sweep}} {OUT} --table",
    "nsa_lab.cli.sweep_command._show_results",
    lambda sweep, as_json: not as_json,
)
case(
    "sweep",
    "as_json",
    f"sweep {{sweep}} {OUT} --table --json",
    "nsa_lab.cli.sweep_command._show_results",
    lambda sweep, as_json: as_json,
)

# Options that go to a second function: in another mode of the command, or to a check before it starts.
case(
    "plan",
    "tokens_per_s: compared",
    f"plan {{params}} --run {{run}} --tokens-per-s 123 {OUT}",
    COMPARE_PLAN,
    lambda _, speed: speed == 123,
    "",
)
case(
    "plan",
    "outputs: measured speed",
    f"plan {{params}} {OUT}",
    "nsa_lab.cli.training_commands._find_measured_run",
    lambda config, folder: folder.name == "outputs",
)
for command in ("train", "convert"):
    case(
        command,
        "ranks: started",
        f"{words_of[command]} {OUT} --ranks 2",
        "nsa_lab.runs.lifecycle.start",
        lambda run, ranks: ranks == 2,
        stop,
    )
case(
    "convert",
    "outputs: source",
    f"convert S {{params}} {OUT}",
    "nsa_lab.convert.describe_source",
    lambda source, folder: folder.name == "outputs",
    stop,
)
case(
    "sweep",
    "as_json: trained",
    f"sweep {{sweep}} {OUT} --json",
    "nsa_lab.cli.sweep_command._show_results",
    lambda sweep, as_json: as_json,
    stop,
)
