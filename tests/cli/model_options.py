"""Options of the commands that use, convert or evaluate a model."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from option_cases import OUT, case, stop

from nsa_lab.inference import Sampling

EVALUATE = "nsa_lab.evaluate.evaluate_run"
COMPLETE = "nsa_lab.inference.complete_prompt"

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

# Options that go to a second function: in another mode of the command, or to a check before it starts.
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
