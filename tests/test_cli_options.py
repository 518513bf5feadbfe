"""Each option and argument of the command line reaches its function. A new one without a test fails.

The library functions that a command calls are replaced by recorders. A case is a command line and the value that must
arrive; the test sees to it that each option of each command has a case.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args, get_type_hints

import pytest
import torch
import typer
from fake_run import write_run

from nsa_lab import cli
from nsa_lab.cli.common import parse_path
from nsa_lab.evaluate import NEEDLE_FORMS, RULER_TASKS, TASKS
from nsa_lab.inference import Sampling
from nsa_lab.runs import lifecycle
from nsa_lab.runs.evaluation import NEEDLE_FORM_NAMES, RULER_NAMES, TASK_NAMES

torch.set_num_threads(1)


class Recorder:
    """Stand-in for a function: records its calls, and returns `result`."""

    def __init__(self, result: Any = None) -> None:
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self.result = result

    def __call__(self, *given: Any, **named: Any) -> Any:
        self.calls.append((given, named))
        return self.result(*given, **named) if callable(self.result) else self.result


class Workspace:
    """A folder with a finished run and its name, a second run, a text and a params file."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.outputs = folder, folder / "outputs"
        self.run = write_run(self.outputs)
        self.text = folder / "about.md"
        self.text.write_text("some text")
        self.params = folder / "params.yaml"
        self.params.write_text("train: {steps: 7, warmup_steps: 1}\nruntime: {device: cpu}\n")
        self.sweep = folder / "rates.yaml"
        self.sweep.write_text(f"preset: '{self.params}'\nvariants: {{one: }}\nseeds: [0, 1]\n")

    def format(self, text: str) -> str:
        names = ("folder", "outputs", "text", "params", "sweep")
        return text.format(run=self.run.name, **{name: getattr(self, name) for name in names})


@dataclass
class SimpleComparison:
    models: tuple[str, ...] = ()


# (command line, function to replace, its result, check of the call) by command and parameter. A parameter that goes to
# several functions has several cases, "step", "step: checked"; the text after the colon names the function.
Case = tuple[str, str, Any, Callable[..., bool]]
CASES: dict[str, dict[str, Case]] = {}


def case(command: str, name: str, line: str, function: str, check: Callable[..., bool], result: Any = None) -> None:
    CASES.setdefault(command, {})[name] = (line, function, result, check)


OUT = "--outputs {outputs}"
EVALUATE = "nsa_lab.evaluate.evaluate_run"
COMPLETE = "nsa_lab.inference.complete_prompt"
CREATE = "nsa_lab.runs.lifecycle.create_run"
NOTEBOOK = "nsa_lab.report.notebook_runner.execute_notebook"


class Stopped(Exception):
    """Ends a command where its option has arrived."""


def stop(*_: Any, **__: Any) -> Any:
    raise Stopped


# Options of the commands that train.
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

# Commands that inspect runs.
case(
    "status",
    "run",
    f"status {{run}} {OUT} --json",
    "nsa_lab.cli.status_table.summarize_run",
    lambda run: run.name.startswith("fake"),
    {},
)
case(
    "status",
    "outputs",
    f"status {OUT} --json",
    "nsa_lab.cli.status_table.summarize_runs",
    lambda folder, **_: folder.name == "outputs",
    [],
)
case("status", "as_json", f"status {OUT} --json", "nsa_lab.cli.status_table.summarize_runs", lambda folder, **_: True, [])
case(
    "status",
    "recorded",
    f"status {OUT} --json --recorded",
    "nsa_lab.cli.status_table.summarize_runs",
    lambda folder, recorded: recorded,
    [],
)
WATCH = "nsa_lab.runs.live_view.watch"
case("follow", "run", f"follow {{run}} {OUT}", WATCH, lambda run, *_: run.name.startswith("fake"))
case("follow", "outputs", f"follow {{run}} {OUT}", WATCH, lambda run, *_: run.parent.name == "outputs")
EXAMINE = "nsa_lab.health.examine"
case("health", "runs", f"health {{run}} {OUT}", EXAMINE, lambda history: history.run.startswith("fake"), stop)
case("health", "outputs", f"health {{run}} {OUT}", EXAMINE, lambda history: history.run_dir.parent.name == "outputs", stop)
GROUP, BASELINE = "nsa_lab.health.model_runs.group_runs", "nsa_lab.health.model_runs.find_baseline"
case("compare", "runs", f"compare a={{run}} {OUT}", GROUP, lambda runs, named, note: "a" in named, stop)
case(
    "compare", "outputs", f"compare {{run}} {OUT}", GROUP, lambda runs, named, note: runs[0].parent.name == "outputs", stop
)
case("compare", "against", f"compare {{run}} {OUT} --against base", BASELINE, lambda models, name: name == "base", stop)
case(
    "compare",
    "as_json",
    f"compare {{run}} {OUT} --json",
    "nsa_lab.cli.inspect_commands.dump_json",
    lambda value: value["v"] == 1,
    "{}",
)
for name, options, check in (
    ("runs", "", lambda run, page, record_only: run.name.startswith("fake")),
    ("outputs", "", lambda run, page, record_only: run.parent.name == "outputs"),
    ("page", "--page {folder}/p.html", lambda run, page, record_only: page.name == "p.html"),
    ("record", "--record", lambda run, page, record_only: record_only),
):
    case("report", name, f"report {{run}} {OUT} {options}", "nsa_lab.report.write_report", check, stop)
CSV = "nsa_lab.runs.csv_export.write_csv"
case("export", "run", f"export {{run}} {OUT} --csv", CSV, lambda history, file: history.run.startswith("fake"), 3)
case(
    "export",
    "outputs",
    f"export {{run}} {OUT} --csv",
    CSV,
    lambda history, file: history.run_dir.parent.name == "outputs",
    3,
)
case("export", "csv", f"export {{run}} {OUT} --csv", CSV, lambda history, file: True, 3)
case(
    "export",
    "into",
    f"export {{run}} {OUT} --csv --into {{folder}}/t.csv",
    CSV,
    lambda history, file: file.name.endswith("t.csv"),
    3,
)

# Commands that use a model.
for name, options, check in (
    ("run", "", lambda run, *_, **__: run.name == "needle-8m"),
    ("prompt", "--prompt abc", lambda run, text, *_, **__: text == "abc"),
    ("prompt_file", "--prompt-file {text}", lambda run, text, *_, **__: text == "some text"),
    ("tokens", "--tokens 9", lambda run, text, tokens, *_, **__: tokens == 9),
    ("temperature", "--temperature 0.3", lambda run, text, tokens, sampling, **_: sampling.temperature == 0.3),
    ("top_k", "--top-k 4", lambda run, text, tokens, sampling, **_: sampling.top_k == 4),
    ("top_p", "--top-p 0.4", lambda run, text, tokens, sampling, **_: sampling == Sampling(0.8, None, 0.4)),
    ("seed", "--seed 5", lambda *_, seed, **__: seed == 5),
    ("step", "--step 1526", lambda *_, step, **__: step == 1526),
):
    case("generate", name, f"generate needle-8m {options}", COMPLETE, check, ())
FIND_MODEL = "nsa_lab.runs.resolve.find_model"
for command, line in {
    "generate": "generate needle-8m",
    "evaluate": "evaluate needle-8m",
    "export-hf": "export-hf needle-8m {folder}/new",
}.items():
    case(command, "outputs", f"{line} {OUT}", FIND_MODEL, lambda model, folder: folder.name == "outputs", stop)
HF = "nsa_lab.inference.hf.export"
ADAPTER = "nsa_lab.convert.export_adapter"
INFO = SimpleNamespace(n_bytes=1, dtype="bfloat16", base_model="x")
for name, options, check in (
    ("run", "", lambda run, folder, **_: run.name.startswith("fake")),
    ("outputs", "", lambda run, folder, **_: run.parent.name == "outputs"),
    ("folder", "", lambda run, folder, **_: folder.name == "new"),
    ("step", "--step 1526", lambda run, folder, *, step, **_: step == 1526),
    ("dtype", "--dtype float16", lambda run, folder, *, dtype, **_: dtype == "float16"),
    ("about", "--about {text}", lambda run, folder, *, about, **_: about == "some text"),
):
    case("export-adapter", name, f"export-adapter {{run}} {{folder}}/new {options} {OUT}", ADAPTER, check, INFO)
case("export-hf", "run", "export-hf needle-8m {folder}/new", HF, lambda run, folder, step: run.name == "needle-8m", "")
case("export-hf", "folder", "export-hf needle-8m {folder}/new", HF, lambda run, folder, step: folder.name == "new", "")
case("export-hf", "step", "export-hf needle-8m {folder}/new --step 1526", HF, lambda run, folder, step: step == 1526, "")
FIND_CHECKPOINT = "nsa_lab.inference.load.find_checkpoint"
for name, options, check in (
    ("run", "", lambda run, step: run.name.startswith("fake")),
    ("step", "--step 7", lambda run, step: step == 7),
    ("outputs", "", lambda run, step: run.parent.name == "outputs"),
):
    case(
        "convert-checkpoint",
        name,
        f"convert-checkpoint {{run}} {{folder}}/new {options} {OUT}",
        FIND_CHECKPOINT,
        check,
        stop,
    )
CONVERT = "nsa_lab.train.checkpoint_convert.convert_checkpoint"
for name, options, check in (
    ("folder", "", lambda checkpoint, folder, form: folder.name == "new" and form == "single"),
    ("form", "--form sharded", lambda checkpoint, folder, form: form == "sharded"),
):
    case("convert-checkpoint", name, f"convert-checkpoint {{run}} {{folder}}/new {options} {OUT}", CONVERT, check, "")
SHIP = "nsa_lab.inference.ship"
for name, check in (
    ("run", lambda run, folder, about: run.name.startswith("fake")),
    ("folder", lambda run, folder, about: folder.name == "new"),
    ("about", lambda run, folder, about: about == "some text"),
    ("outputs", lambda run, folder, about: run.parent.name == "outputs"),
):
    case("ship", name, f"ship {{run}} {{folder}}/new --about {{text}} {OUT}", SHIP, check, "")
for name, options, check in (
    ("run", "", lambda run, **_: run.name == "needle-8m"),
    (
        "length",
        "--length 600 --length 700:3",
        lambda run, lengths, per_depth_at, **_: lengths == [600, 700] and per_depth_at == {700: 3},
    ),
    ("task", "--task hex --task needle", lambda run, tasks, **_: tasks == ["hex", "needle"]),
    ("text", "--text a={text_file}", lambda run, texts, **_: list(texts) == ["a"]),
    ("per_depth", "--per-depth 3", lambda run, per_depth, **_: per_depth == 3),
    ("windows", "--windows 5", lambda run, windows, **_: windows == 5),
    ("intervened", "--intervened 6", lambda run, ablation_sequences, **_: ablation_sequences == 6),
    ("seed", "--seed 7", lambda run, seed, **_: seed == 7),
    ("bf16", "--bf16", lambda run, dtype, **_: dtype == torch.bfloat16),
    ("step", "--step 1526", lambda run, step, **_: step == 1526),
    ("out", "", lambda run, out, **_: out.name == "out"),
):
    options = options.replace("{text_file}", "{folder}/t.txt")
    case("evaluate", name, f"evaluate needle-8m --out {{folder}}/out {options}", EVALUATE, check, {})
case(
    "evaluate",
    "ruler",
    "evaluate needle-8m --out {folder}/out --ruler --task vt --length 700:3",
    "nsa_lab.evaluate.evaluate_run_with_ruler",
    lambda run, tasks, lengths, questions, questions_at, **_: (
        (tasks, lengths, questions, questions_at) == (["vt"], [700], 20, {700: 3})
    ),
    {},
)
CONVERSION = "nsa_lab.evaluate.conversion.evaluate_conversion"
case(
    "evaluate",
    "blocks",
    "evaluate needle-8m --out {folder}/out --blocks 16 --blocks 32",
    CONVERSION,
    lambda run, *, blocks, **_: blocks == [16, 32],
    {},
)
case(
    "evaluate",
    "control",
    f"evaluate needle-8m --out {{folder}}/out --blocks 16 --control {{run}} {OUT}",
    CONVERSION,
    lambda run, *, control, **_: control.is_dir(),
    {},
)
DEMO = "nsa_lab.bench.demo.run_demo"
case("demo", "seconds", "demo --seconds 9", DEMO, lambda seconds, picture: seconds == 9)
case("demo", "picture", "demo --picture {folder}/p.png", DEMO, lambda seconds, picture: picture.name == "p.png")

# Benchmarks. Their options are also compared as a whole in tests/bench/test_bench_commands.py.
BENCH: dict[str, tuple[str, list[tuple[str, str, Callable[..., bool]]]]] = {
    "attention": (
        "attention_speed.run_attention_bench",
        [
            ("json_file", "--json {folder}/r.json", lambda shapes, file, **_: file.name == "r.json"),
            ("shape", "--shape 64x2", lambda shapes, file, **_: shapes[0].T == 64),
            ("picture", "--picture {folder}/p.png", lambda *_, picture, **__: picture.name == "p.png"),
            ("backend", "--backend torch", lambda *_, backend, **__: backend == "torch"),
            ("parts", "--parts", lambda *_, parts, **__: parts),
            ("preset", "--preset {params}", lambda *_, model, **__: model is not None),
            ("device", "", lambda *_, device, **__: device == "cpu"),
        ],
    ),
    "tune": (
        "tune_tiles.run_tune",
        [
            ("json_file", "--json {folder}/r.json", lambda shapes, file, **_: file.name == "r.json"),
            ("shape", "--shape 64x2", lambda shapes, file, **_: shapes[0].T == 64),
            ("kernel", "--kernel 'band_dq, window'", lambda *_, kernels, **__: kernels == ("band_dq, window",)),
            ("most", "--most 7", lambda *_, max_tiles, **__: max_tiles == 7),
            ("device", "", lambda *_, device, **__: device == "cpu"),
        ],
    ),
    "decode": (
        "decode_speed.run_decode_bench",
        [
            ("json_file", "--json {folder}/r.json", lambda lengths, file, **_: file.name == "r.json"),
            ("length", "--length 600", lambda lengths, file, **_: lengths == [600]),
            ("batch", "--batch 3", lambda *_, batches, **__: batches == [3]),
            ("layers", "--layers 5", lambda *_, layers, **__: layers == 5),
            ("backend", "--backend torch", lambda *_, backend, **__: backend == "torch"),
            ("picture", "--picture {folder}/p.png", lambda *_, picture, **__: picture.name == "p.png"),
            (
                "preset",
                "--preset {params} --preset long_64k_dense",
                lambda *_, model, baseline, **__: model.attention == "nsa" and baseline.attention == "dense",
            ),
            ("device", "", lambda *_, device, **__: device == "cpu"),
        ],
    ),
    "train": (
        "training_speed.run_train_bench",
        [
            ("json_file", "--json {folder}/r.json", lambda shapes, file, **_: file.name == "r.json"),
            ("shape", "--shape 64x2", lambda shapes, file, **_: shapes == ((64, 2),)),
            ("picture", "--picture {folder}/p.png", lambda *_, picture, **__: picture.name == "p.png"),
            ("preset", "--preset {params}", lambda *_, model, **__: model is not None),
            ("device", "", lambda *_, device, **__: device == "cpu"),
        ],
    ),
    "trainer": (
        "trainer_overhead.run_trainer_bench",
        [
            ("json_file", "--json {folder}/r.json", lambda file, **_: file.name == "r.json"),
            ("ranks", "--ranks 3", lambda file, ranks, **_: ranks == 3),
            ("parallel", "--parallel fsdp", lambda file, parallel, **_: parallel == "fsdp"),
            ("steps", "--steps 9", lambda file, steps, **_: steps == 9),
            ("device", "", lambda file, device, **_: device == "cpu"),
        ],
    ),
    "ranks": (
        "context_parallel.run_ranks_bench",
        [
            ("json_file", "--json {folder}/r.json", lambda lengths, file, **_: file.name == "r.json"),
            ("ranks", "--ranks 3", lambda *_, ranks, **__: ranks == 3),
            ("length", "--length 600", lambda lengths, file, **_: lengths == (600,)),
            ("part", "--part step", lambda *_, parts, **__: parts == ("step",)),
            ("preset", "--preset {params}", lambda *_, model, **__: model is not None),
            ("shared_only", "--shared-only", lambda *_, alone, **__: not alone),
            (
                "gradient_checkpointing",
                "--gradient-checkpointing",
                lambda *_, gradient_checkpointing, **__: gradient_checkpointing,
            ),
            ("device", "", lambda *_, device, **__: device == "cpu"),
        ],
    ),
    "curves": (
        "loss_curves.run_curves",
        [
            ("json_file", "--json {folder}/r.json", lambda steps, file, picture, log: file.name == "r.json"),
            ("picture", "--picture {folder}/p.png", lambda steps, file, picture, log: picture.name == "p.png"),
            ("steps", "--steps 19", lambda steps, file, picture, log: steps == 19),
        ],
    ),
}
for command, (function, options) in BENCH.items():
    device = " --device cpu" if "device" in [name for name, _, _ in options] else ""
    for name, words, check in options:
        case(f"bench {command}", name, f"bench {command}{device} {words}", f"nsa_lab.bench.{function}", check, stop)
case(
    "bench attention",
    "packed",
    "bench attention --device cpu --packed",
    "nsa_lab.bench.packed_attention.run_packed_bench",
    lambda *_, **__: True,
)
DOCUMENTS = "nsa_lab.bench.document_masking.run_documents_bench"
case("bench train", "documents", "bench train --device cpu --documents", DOCUMENTS, lambda *_, **__: True)
case(
    "bench train",
    "text",
    "bench train --device cpu --documents --text a.txt",
    DOCUMENTS,
    lambda *_, text, **__: text == Path("a.txt"),
)
RATES = "nsa_lab.bench.roofline.read_rows"
for name, words, check in (
    ("record", "", lambda record, flops, bandwidth: record["when"] == "2026"),
    ("flops", "--flops 5", lambda record, flops, bandwidth: flops == 5),
    ("bandwidth", "--bandwidth 6", lambda record, flops, bandwidth: bandwidth == 6),
):
    case("bench limits", name, f"bench limits {{folder}}/record.json {words}", RATES, check, stop)
case(
    "bench limits",
    "picture",
    "bench limits {folder}/record.json --picture {folder}/p.png",
    "nsa_lab.bench.roofline.plot_roofline",
    lambda rows, rates, title, picture: picture.name == "p.png",
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
for name, options, check in (
    ("run: table", "{run}", lambda run: run.name.startswith("fake")),
    ("outputs: table", "{run}", lambda run: run.parent.name == "outputs"),
):
    case("status", name, f"status {options} {OUT}", "nsa_lab.cli.status_table.build_run_table", check, stop)
for name, options, check in (
    ("outputs: runs", "", lambda folder, width, recorded: folder.name == "outputs"),
    ("recorded: table", "--recorded", lambda folder, width, recorded: recorded),
):
    case("status", name, f"status {OUT} {options}", "nsa_lab.cli.status_table.render_runs", check, stop)
for name, options, check in (
    ("runs: compared", "", lambda runs, page: len(runs) == 2),
    ("outputs: compared", "", lambda runs, page: page.parent.name == "outputs"),
    ("page: compared", "--page {folder}/p.html", lambda runs, page: page.name == "p.html"),
):
    case("report", name, f"report {{run}} {{run}} {OUT} {options}", "nsa_lab.report.write_comparison", check, stop)
case(
    "sweep",
    "as_json: trained",
    f"sweep {{sweep}} {OUT} --json",
    "nsa_lab.cli.sweep_command._show_results",
    lambda sweep, as_json: as_json,
    stop,
)
FIND, NEW_FOLDER = (f"nsa_lab.cli.model_commands.{name}" for name in ("find_checkpoint", "check_new_folder"))
for command, line in {
    "generate": "generate needle-8m",
    "export-hf": "export-hf needle-8m {folder}/new",
    "export-adapter": f"export-adapter {{run}} {{folder}}/new {OUT}",
}.items():
    case(command, "step: checked", f"{line} --step 1526", FIND, lambda run, step: step == 1526, stop)
for command, line in {
    "export-hf": "export-hf needle-8m {folder}/new",
    "export-adapter": f"export-adapter {{run}} {{folder}}/new {OUT}",
    "ship": f"ship {{run}} {{folder}}/new --about {{text}} {OUT}",
}.items():
    case(command, "folder: checked", line, NEW_FOLDER, lambda folder: folder.name == "new", stop)
for name, options, check in (
    ("run", "", lambda run, **_: run.name == "needle-8m"),
    ("task", "--task vt", lambda run, tasks, **_: tasks == ["vt"]),
    ("per_depth", "--per-depth 3", lambda run, questions, **_: questions == 3),
    ("seed", "--seed 7", lambda run, seed, **_: seed == 7),
    ("bf16", "--bf16", lambda run, dtype, **_: dtype == torch.bfloat16),
    ("step", "--step 1526", lambda run, step, **_: step == 1526),
    ("out", "", lambda run, out, **_: out.name == "out"),
):
    line = f"evaluate needle-8m --out {{folder}}/out --ruler {options}"
    case("evaluate", f"{name}: RULER", line, "nsa_lab.evaluate.evaluate_run_with_ruler", check, {})
for name, options, check in (
    ("run", "", lambda run, **_: run.name == "needle-8m"),
    ("text", "--text a={folder}/t.txt", lambda run, texts, **_: list(texts) == ["a"]),
    ("windows", "--windows 5", lambda run, windows, **_: windows == 5),
    ("bf16", "--bf16", lambda run, dtype, **_: dtype == torch.bfloat16),
    ("step", "--step 1526", lambda run, step, **_: step == 1526),
    ("out", "", lambda run, out, **_: out.name == "out"),
    ("outputs", f"--control {{run}} {OUT}", lambda run, control, **_: control.parent.name == "outputs"),
):
    line = f"evaluate needle-8m --out {{folder}}/out --blocks 16 {options}"
    case("evaluate", f"{name}: conversion", line, CONVERSION, check, {})
for name, check in (("step", lambda run, out, step: step == 1526), ("out", lambda run, out, step: out.name == "out")):
    line = "evaluate needle-8m --out {folder}/out --step 1526"
    case("evaluate", f"{name}: checked", line, "nsa_lab.cli.model_commands.check_evaluable", check, stop)
PACKED = "nsa_lab.bench.packed_attention.run_packed_bench"
for name, options, check in (
    ("json_file", "--json {folder}/r.json", lambda file, **_: file.name == "r.json"),
    ("backend", "--backend torch", lambda file, backend, **_: backend == "torch"),
    ("device", "", lambda file, device, **_: device == "cpu"),
):
    case("bench attention", f"{name}: packed", f"bench attention --device cpu --packed {options}", PACKED, check)
for name, options, check in (
    ("json_file", "--json {folder}/r.json", lambda shapes, file, **_: file.name == "r.json"),
    ("shape", "--shape 64x2", lambda shapes, file, **_: shapes == ((64, 2),)),
    ("device", "", lambda shapes, file, device, **_: device == "cpu"),
):
    case("bench train", f"{name}: documents", f"bench train --device cpu --documents {options}", DOCUMENTS, check)
for name, check in (
    ("flops", lambda _, flops, bandwidth: flops == 5),
    ("bandwidth", lambda _, flops, bandwidth: bandwidth == 6),
):
    line = "bench limits {folder}/record.json --flops 5 --bandwidth 6"
    case("bench limits", f"{name}: checked", line, "nsa_lab.bench.attention_rows.parse_record", check, stop)


def list_commands(group: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from list_commands(command, f"{prefix}{name} ")
        else:
            yield prefix + name, command


COMMANDS = dict(list_commands(typer.main.get_command(cli.app)))


def test_every_option_of_every_command_has_a_case() -> None:
    declared = {(name, p.name) for name, command in COMMANDS.items() for p in command.params if p.name != "help"}
    tested = {(command, name.partition(":")[0]) for command, cases in CASES.items() for name in cases}
    assert not declared - tested, "add a case to tests/test_cli_options.py"
    assert not tested - declared, "no such option"


def test_every_path_refuses_an_empty_text_and_expands_the_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without `parse_path`, an empty text is the working directory, and `--outputs=~/runs` a folder that is called ~."""
    functions = [
        command.callback for group in cli.app.registered_groups for command in group.typer_instance.registered_commands
    ]
    n_paths = 0
    for function in functions:
        for name, hint in get_type_hints(function, include_extras=True).items():
            kind, *infos = get_args(hint) or (hint,)
            if Path in (kind, *get_args(kind)):
                assert infos[0].parser is parse_path, f"{function.__name__}: {name}: add parser=parse_path"
                n_paths += 1
    assert n_paths > 30
    monkeypatch.setenv("HOME", "/home/somebody")
    with pytest.raises(typer.BadParameter, match="got an empty text"):
        parse_path("")
    assert parse_path("~/runs") == Path("/home/somebody/runs")


@pytest.mark.slow
@pytest.mark.parametrize("command", CASES)
def test_values_arrive(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    workspace = Workspace(tmp_path)
    (tmp_path / "x.ipynb").write_text("{}")
    (tmp_path / "t.txt").write_text("some text " * 9)
    record = {"when": "2026", "device": "d", "rows": [], "nsa": {}, "dtype": "torch.float32", "rates": {"flops": 1}}
    (tmp_path / "record.json").write_text(json.dumps(record))
    for name, (line, function, result, check) in CASES[command].items():
        with monkeypatch.context() as patch:
            recorder = Recorder(result)
            allow_everything(patch, command)
            patch.setattr(function, recorder)
            patch.setattr(sys, "argv", ["nsa-lab", *shlex.split(workspace.format(line))])
            with pytest.raises((SystemExit, Stopped)) as ended:
                cli.main()
            assert recorder.calls, f"{line}: {name} never arrives ({ended.value!r})"
            given, named = recorder.calls[-1]
            assert check(*given, **named), f"{line}: {given} {named}"


def allow_everything(patch: pytest.MonkeyPatch, command: str) -> None:
    """Replace the checks and results that a command needs in addition to the function under test."""
    patch.setattr(lifecycle, "check_text", lambda config: None)
    patch.setattr("nsa_lab.train.preflight.startup_checks.check_startable", lambda *_: None)
    patch.setattr("nsa_lab.train.matched_baseline.build_matched_baseline", lambda config: "")
    if command == "plan":
        patch.setattr("nsa_lab.train.estimate.estimate_resources", lambda *_: "")
    if command in ("train", "convert"):
        patch.setattr(lifecycle, "create_run", lambda config, folder: folder / "fake")
        patch.setattr("nsa_lab.convert.describe_source", lambda source, folder: {})
    if command in ("ship", "export-adapter"):
        for name in ("read_final_evaluation", "find_checkpoint"):
            patch.setattr(f"nsa_lab.cli.model_commands.{name}", lambda *_: Path("step-00000001"))
    if command == "convert-checkpoint":
        patch.setattr("nsa_lab.inference.load.find_checkpoint", lambda *_: Path("step-00000001"))
    if command == "sweep":
        patch.setattr("nsa_lab.cli.sweep_command._find_gpus", lambda _: [None])
        patch.setattr("nsa_lab.cli.sweep_command._write_results", lambda *_: None)
        patch.setattr("nsa_lab.runs.sweep_runner.Sweep.run_all", lambda *_: [])
    if command == "compare":
        patch.setattr("nsa_lab.health.model_runs.group_runs", lambda *_: [])
        patch.setattr("nsa_lab.health.model_runs.find_baseline", lambda *_: "a")
        patch.setattr("nsa_lab.health.comparison.compare_models", lambda *_: SimpleComparison())
    if command == "bench limits":
        patch.setattr("nsa_lab.bench.roofline.read_rows", lambda *_: ([], None))
        patch.setattr("nsa_lab.bench.roofline.make_limit_table", lambda *_: "")


def test_several_ranks_in_the_foreground_replace_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check has created a CUDA context, which a supervisor of ranks would keep."""
    monkeypatch.chdir(tmp_path)
    workspace, execute = Workspace(tmp_path), Recorder(stop)
    allow_everything(monkeypatch, "train")
    monkeypatch.setattr("os.execv", execute)
    line = workspace.format(f"train {{params}} {OUT} --foreground --ranks 2")
    monkeypatch.setattr(sys, "argv", ["nsa-lab", *shlex.split(line)])
    with pytest.raises(Stopped):
        cli.main()
    ((_, command),) = [given for given, _ in execute.calls]
    assert command[1:3] == ["-m", "nsa_lab.train"] and command[-2:] == ["--ranks", "2"]


def test_global_options(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for words, expected in (
        (["--version"], "nsa-lab "),
        (["-h"], "Usage"),
        (["--help"], "Usage"),
        (["run", "-h"], "Usage"),
    ):
        monkeypatch.setattr(sys, "argv", ["nsa-lab", *words])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert not ended.value.code and expected in capsys.readouterr().out


def test_task_names_of_the_command_line_are_those_of_the_evaluation() -> None:
    assert list(TASKS) == list(TASK_NAMES) and list(NEEDLE_FORMS) == list(NEEDLE_FORM_NAMES)
    assert list(RULER_TASKS) == list(RULER_NAMES)
