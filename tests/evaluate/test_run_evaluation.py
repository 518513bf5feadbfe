"""Evaluation of a run: one file that records its origin and is shown in the report."""

from __future__ import annotations

import json
import math
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from looping import looped
from tiny_tokenizer import save_tokenizer
from typer.testing import CliRunner
from unpainted import unpainted

from nsa_lab import cli, figures
from nsa_lab.config import ConfigError, ModelConfig, NSAConfig, RecallConfig, RunConfig
from nsa_lab.data import DataError, load_tokenizer, prepare
from nsa_lab.evaluate import (
    ABLATIONS,
    NEEDLE_FORMS,
    RULER_TASKS,
    TASKS,
    evaluate_run,
    evaluate_run_with_ruler,
    ruler,
    run_evaluation,
)
from nsa_lab.evaluate.ablations import list_ablations, run_ablations
from nsa_lab.evaluate.retrieval import make_needles
from nsa_lab.evaluate.scoring import stack_samples
from nsa_lab.model import NSATransformer
from nsa_lab.report import write_report
from nsa_lab.runs import events, lifecycle
from nsa_lab.runs.evaluation import EVALUATION, UNFINISHED, read_evaluation, read_ruler, write_evaluation
from nsa_lab.train.attempt import run
from nsa_lab.train.build import Builders

# Every test needs a trained run.
pytestmark = pytest.mark.slow

DATA: dict[str, Any] = {"source": "recall", "val_fraction": 0.4, "bytes_per_fact": 400, "value_length": 4}


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with texts, for runs and shards."""
    folder, rng = tmp_path_factory.mktemp("evaluated"), random.Random(3)
    (folder / "texts").mkdir()
    for number in range(40):
        words = (rng.choice(["sun", "rain", "wind", "and", "the", "falls", "blows"]) for _ in range(300))
        (folder / "texts" / f"{number}.txt").write_text(" ".join(words))
    return folder


def train_run(workspace: Path, data: dict[str, Any] = DATA, **model: Any) -> Path:
    config = RunConfig.from_dict(
        {
            "name": "asked",
            "model": {"dim": 32, "n_layers": 1, "n_heads": 4, "n_kv_groups": 2, "d_k": 4, "d_v": 4, **model},
            "nsa": {"l": 8, "d": 4, "l_sel": 16, "n_sel": 8, "w": 16},
            "runtime": {"device": "cpu"},
            "data": {**data, "path": str(workspace / "texts")},
            "train": {
                "stages": [
                    {"steps": 2, "seq_len": 260, "batch_size": 2, "lr": 1e-3},
                    {"steps": 1, "seq_len": 330, "batch_size": 1, "lr": 1e-3},
                ],
                "log_every": 1,
                "eval_every": 0,
                "save_every": 2,
            },
        }
    )
    run_dir = lifecycle.create_run(config, workspace / "outputs")
    assert run(run_dir, builders=Builders(data=lambda *given: prepare(*given, cache=workspace / "shards"))) == 0
    return run_dir


@pytest.fixture(scope="module")
def run_dir(workspace: Path) -> Path:
    return train_run(workspace)


@pytest.fixture(scope="module")
def evaluation(run_dir: Path, workspace: Path) -> dict[str, Any]:
    return evaluate(run_dir, workspace)


def evaluate(run_dir: Path, workspace: Path, **settings: Any) -> dict[str, Any]:
    return evaluate_run(
        run_dir,
        depths=(0.0, 0.6),
        per_depth=1,
        device="cpu",
        prepare_data=lambda *given: prepare(*given, cache=workspace / "shards"),
        **{"ablation_sequences": 2, "windows": 3, **settings},
    )


def without_time(evaluation: dict[str, Any]) -> dict[str, Any]:
    """Return the content without its duration, and without the digest of both."""
    return {name: value for name, value in evaluation.items() if name not in ("seconds", "digest")}


def test_training_records_text_and_answer_losses_separately(run_dir: Path) -> None:
    for step in events.get_step_events(events.read_events(run_dir)):
        text, marked = step["bpb"] * 0.6931471805599453, step["marked_loss"]
        # Per sequence of 260 or 330 tokens one answer of four, which weigh 5.
        length = 260 if step["step"] <= 2 else 330
        weighted = (text * (length - 4) + 5 * marked * 4) / (length - 4 + 20)
        assert step["loss"] == pytest.approx(weighted, rel=2e-3)


def test_file_records_settings_and_origin(evaluation: dict[str, Any], run_dir: Path) -> None:
    assert read_evaluation(run_dir) == json.loads(json.dumps(evaluation))
    assert (evaluation["run"], evaluation["step"], evaluation["seed"]) == (run_dir.name, 3, 0)
    assert evaluation["recall"]["value_length"] == 4 and evaluation["device"] == "cpu" and evaluation["code"]
    lengths = {cell["length"] for cell in evaluation["retrieval"]}
    assert lengths == {260, 330, 660}
    assert len([c for c in evaluation["retrieval"] if c["task"] == "needle"]) == 3 * 2
    assert all(cell["sequences"] == 1 for cell in evaluation["retrieval"])
    assert (evaluation["statements"], evaluation["questions"]) == ([RecallConfig().statement], [RecallConfig().question])
    for cell in evaluation["retrieval"]:
        assert len(cell["wordings"]) == cell["answers"] and sum(right for *_, right in cell["wordings"]) == cell["right"]
        assert all((statement, question) == (0, 0) for statement, question, _ in cell["wordings"])
    assert {(row["task"], row["length"]) for row in evaluation["not_asked"]} <= {("multi_query", n) for n in (260, 330)}
    assert evaluation["positions"]["windows"] == 3 and len(evaluation["positions"]["octaves"]) == 2
    documents = evaluation["documents"]
    assert documents["rows"] == 3 and documents["length"] == 330 and documents["tokens"] <= 3 * 330
    for part in evaluation["selection"]:
        assert [effect["name"] for effect in part["interventions"]] == list(ABLATIONS)
        assert len(part["quality"]["chosen"]) == 1


def test_wordings_are_indexed() -> None:
    answers = [[("b {name}", "x", True), ("a {name}", "y", False)], [("a {name}", "z", True)]]
    cells = [{"task": "needle", "wordings": answer} for answer in answers]
    indexed = run_evaluation._index_wordings(cells)
    assert (indexed["statements"], indexed["questions"]) == (["a {name}", "b {name}"], ["x", "y", "z"])
    assert [cell["wordings"] for cell in indexed["retrieval"]] == [[[1, 0, 1], [0, 1, 0]], [[0, 2, 1]]]
    assert [cell["wordings"] for cell in cells] == answers, "stored parts are unchanged"


def test_evaluation_is_deterministic_and_depends_on_the_checkpoint(
    evaluation: dict[str, Any], run_dir: Path, workspace: Path
) -> None:
    again = evaluate(run_dir, workspace)
    assert without_time(again) == without_time(evaluation)
    earlier = evaluate(run_dir, workspace, step=2, lengths=[450])
    assert earlier["step"] == 2 and {cell["length"] for cell in earlier["retrieval"]} == {450}
    assert earlier["positions"] != evaluation["positions"]
    write_evaluation(run_dir, evaluation)


def test_interrupted_evaluation_continues(
    run_dir: Path, workspace: Path, evaluation: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted in its last part, twice: complete parts are reused, but not for another seed."""
    lines: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(run_evaluation, "run_ablations", lambda *_, **__: 1 / 0)
        for seed in (0, 0, 1):
            with pytest.raises(ZeroDivisionError):
                evaluate(run_dir, workspace, lengths=[260], seed=seed, log=lines.append)
            assert read_evaluation(run_dir) == json.loads(json.dumps(evaluation))
            with pytest.raises(ZeroDivisionError):
                evaluate(run_dir, workspace, lengths=[260, 330], seed=seed, log=lines.append)
    assert sum(line.startswith("needle at 260") for line in lines) == 2
    assert sum(line.startswith("needle at 330") for line in lines) == 2
    results = evaluate(run_dir, workspace, lengths=[260], seed=1, log=lines.append)
    assert sum(line.startswith("needle at 260") for line in lines) == 2 and not (run_dir / UNFINISHED).exists()
    assert without_time(results) == without_time(evaluate(run_dir, workspace, lengths=[260], seed=1))
    write_evaluation(run_dir, evaluation)


def test_tasks_counts_and_texts_of_a_continued_evaluation(
    run_dir: Path, workspace: Path, evaluation: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted in the second of two texts: the first is evaluated again only if its content changes."""
    lines: list[str] = []
    for name, letters in (("first", "ab" * 200), ("second", "cd" * 300)):
        (workspace / f"{name}.txt").write_text(letters)
    settings: dict[str, Any] = {
        "lengths": [260, 400],
        "tasks": ["letters", "needle"],
        "per_depth_at": {400: 3},
        "texts": {name: str(workspace / f"{name}.txt") for name in ("first", "second")},
        "log": lines.append,
    }
    real_measure = run_evaluation.measure_text_loss
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(
            run_evaluation,
            "measure_text_loss",
            lambda model, text, length: real_measure(model, text, length) if len(text) < 500 else 1 / 0,
        )
        evaluate(run_dir, workspace, **settings)
    results = evaluate(run_dir, workspace, **settings)
    assert (
        sum(line.startswith("first: ") for line in lines) == sum(line.startswith("letters at 260") for line in lines) == 1
    )
    assert "evaluating first: 401 bytes, including separators" in lines
    cells = [(cell["task"], cell["length"], cell["depth"], cell["sequences"]) for cell in results["retrieval"]]
    assert cells == [
        (task, length, depth, {260: 1, 400: 3}[length])
        for task in ("letters", "needle")
        for length in (260, 400)
        for depth in (0.0, 0.6)
    ]
    first, second = results["texts"]["first"], results["texts"]["second"]
    assert (first["tokens"], second["tokens"], first["length"]) == (401, 601, 330) and len(second["windows"]) == 1
    (workspace / "first.txt").write_text("ba" * 200)
    again = evaluate(run_dir, workspace, **settings, dtype=torch.bfloat16)
    assert again["dtype"] == "bfloat16" and results["dtype"] == "float32"
    assert again["texts"]["first"]["identity"] != first["identity"]
    assert again["texts"]["second"]["loss"] == pytest.approx(second["loss"], rel=0.02)
    with pytest.raises(ConfigError, match="task = nedle: unknown task; available: needle, multi_key"):
        evaluate(run_dir, workspace, tasks=["nedle"])
    with pytest.raises(DataError, match=r"^text '/nowhere': nothing at /nowhere; give a file"):
        evaluate(run_dir, workspace, texts={"lost": "/nowhere"})
    write_evaluation(run_dir, evaluation)


def test_no_ablations_if_all_blocks_are_selected(run_dir: Path, workspace: Path, evaluation: dict[str, Any]) -> None:
    (part,) = evaluate(run_dir, workspace, lengths=[120])["selection"]
    assert part["interventions"] == [] and part["why_not"]
    (part,) = evaluate(run_dir, workspace, lengths=[330], ablation_sequences=0)["selection"]
    assert part["interventions"] == [] and part["why_not"] == "not requested"
    write_evaluation(run_dir, evaluation)


@unpainted()
def test_report_shows_the_evaluation(evaluation: dict[str, Any], run_dir: Path) -> None:
    page = write_report(run_dir).read_text(encoding="utf-8")
    section = page[page.index("Evaluation on long texts") :]
    pictures = re.findall(r"<img ", section[: section.index("</details>")])
    assert len(pictures) == 2 and run_dir.name in section
    documents = evaluation["documents"]
    alone = f"{documents['alone'] / 0.6931471805599453:.4f} bits per byte with each as a separate sequence"
    assert f"{documents['documents']:,} whole documents" in section and alone in section
    assert re.search(r"<td>660</td><td>oracle</td><td>\d+%</td>", section)


def test_missing_and_other_versions_are_not_read(run_dir: Path, tmp_path: Path) -> None:
    assert read_evaluation(tmp_path) is None
    (tmp_path / EVALUATION).write_text('{"v": 99}')
    assert read_evaluation(tmp_path) is None


def test_retrieval_map_has_a_cell_per_length_and_depth(evaluation: dict[str, Any]) -> None:
    figure = figures.plot_retrieval(evaluation)
    maps = [axes for axes in figure.axes if axes.images]
    assert [axes.get_title() for axes in maps][:2] == ["needle", "needle among other facts"]
    assert maps[0].images[0].get_array().shape == (2, 3) and len(maps[0].texts) == 6
    assert all(axes.images[0].get_array().shape[0] == 2 for axes in maps)
    cells = [{key: value for key, value in cell.items() if key != "right_at_depth"} for cell in evaluation["retrieval"]]
    earlier = [axes for axes in figures.plot_retrieval({**evaluation, "retrieval": cells}).axes if axes.images]
    assert [axes.images[0].get_array().shape[0] for axes in earlier] == [2, 2, 1], (
        "four facts, of which one is at the depth"
    )
    assert [label.get_text() for label in earlier[2].get_yticklabels()] == ["any"]
    empty = figures.plot_retrieval({**evaluation, "retrieval": []})
    assert "no task fits" in empty.axes[0].texts[0].get_text()


def test_dense_run_has_no_selection_part(workspace: Path) -> None:
    results = evaluate(train_run(workspace, attention="dense"), workspace, lengths=[260])
    assert results["selection"] == [] and results["attention"] == "dense" and results["retrieval"]


def test_the_command_writes_the_file(run_dir: Path, workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import nsa_lab.evaluate

    settings_passed: dict[str, Any] = {}
    monkeypatch.setattr(
        nsa_lab.evaluate, "evaluate_run", lambda folder, **settings: settings_passed.update(settings, run=folder)
    )
    arguments = ["evaluate", run_dir.name, "--outputs", str(workspace / "outputs"), "--length", "256", "--seed", "4"]
    result = CliRunner().invoke(cli.app, arguments)
    assert result.exit_code == 0 and result.output.strip().endswith(EVALUATION)
    assert (settings_passed["run"], settings_passed["lengths"], settings_passed["seed"], settings_passed["per_depth"]) == (
        run_dir,
        [256],
        4,
        20,
    )
    assert (settings_passed["tasks"], settings_passed["texts"], settings_passed["per_depth_at"]) == ([*TASKS], {}, {})
    assert settings_passed["ablation_sequences"] == 10
    text = workspace / "a=b.txt"
    text.write_text("text\n")
    more = ["--length", "512:3", "--task", "all", "--text", f"long={text}", "--bf16", "--intervened", "0"]
    assert CliRunner().invoke(cli.app, arguments + more).exit_code == 0
    assert (settings_passed["lengths"], settings_passed["per_depth_at"], settings_passed["texts"]) == (
        [256, 512],
        {512: 3},
        {"long": str(text)},
    )
    assert (
        settings_passed["tasks"] == [*TASKS, *NEEDLE_FORMS]
        and settings_passed["dtype"] == torch.bfloat16
        and settings_passed["ablation_sequences"] == 0
    )
    for wrong in (["--length", "63"], ["--length", "512:0"], ["--length", "many"], ["--text", "long"]):
        with pytest.raises(ConfigError, match=rf"{wrong[0]} {wrong[1]}: expected"):
            CliRunner().invoke(cli.app, arguments + wrong, catch_exceptions=False)


def test_the_command_with_ruler(run_dir: Path, workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings_passed: dict[str, Any] = {}
    monkeypatch.setattr(
        "nsa_lab.evaluate.evaluate_run_with_ruler", lambda folder, **settings: settings_passed.update(settings, run=folder)
    )
    arguments, text = ["evaluate", run_dir.name, "--outputs", str(workspace / "outputs")], workspace / "texts" / "0.txt"
    for options, tasks in (
        (["--ruler"], [*RULER_TASKS]),
        (["--ruler", "--task", "all"], [*RULER_TASKS]),
        (["--ruler", "--task", "vt", "--task", "fwe", "--task", "vt"], ["vt", "fwe"]),
    ):
        result = CliRunner().invoke(cli.app, [*arguments, *options, "--per-depth", "7", "--length", "900:3", "--bf16"])
        assert result.exit_code == 0 and result.output.strip().endswith("ruler.json") and settings_passed["run"] == run_dir
        assert (settings_passed["tasks"], settings_passed["lengths"], settings_passed["questions"]) == (tasks, [900], 7)
        assert settings_passed["questions_at"] == {900: 3} and settings_passed["dtype"] == torch.bfloat16
    for options, message in (
        (["--task", "vt"], "--task vt: unknown task; available: needle, .*, all; add --ruler for this task"),
        (["--ruler", "--task", "needle"], "--task needle: unknown task; available: niah_single_1, .*, fwe, all$"),
        (["--ruler", "--blocks", "9"], "--blocks: no facts are evaluated; omit --length, --task and --ruler"),
        (["--ruler", "--text", f"a={text}"], "--text: RULER's haystacks are the run's held-out text"),
    ):
        with pytest.raises(ConfigError, match=message):
            CliRunner().invoke(cli.app, [*arguments, *options], catch_exceptions=False)


def test_a_run_with_ruler(run_dir: Path, workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks that do not fit are recorded; an interrupted evaluation continues; report and comparison show the scores."""
    lines: list[str] = []
    settings: dict[str, Any] = {
        "tasks": ["niah_single_2", "vt", "fwe"],
        "lengths": [900, 820],
        "questions": 2,
        "questions_at": {820: 1},
        "device": "cpu",
        "prepare_data": lambda *given: prepare(*given, cache=workspace / "shards"),
        "log": lines.append,
    }
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(ruler, "count_matches", lambda text, references: 1 if len(references) < 3 else 1 / 0)
        evaluate_run_with_ruler(run_dir, **settings)
    assert [line.partition(":")[0] for line in lines] == [
        "niah_single_2 at 820",
        "niah_single_2 at 900",
        "vt at 820",
        "vt at 900",
    ]
    # Other counts for parts that are evaluated again.
    monkeypatch.setattr(ruler, "count_matches", lambda text, references: 0 if len(references) < 3 else 1)
    record = evaluate_run_with_ruler(run_dir, **settings)
    assert read_ruler(run_dir) == json.loads(json.dumps(record)) and not (run_dir / "ruler.unfinished.json").exists()
    cells = [(cell["task"], cell["length"], cell["questions"], cell["found"]) for cell in record["results"]]
    assert cells == [
        ("niah_single_2", 820, 1, [1]),
        ("niah_single_2", 900, 2, [1, 1]),
        ("fwe", 820, 1, [1]),
        ("fwe", 900, 2, [1, 1]),
    ]
    assert all(cell["prompt_tokens"] <= cell["length"] - 50 for cell in record["results"])
    assert [(row["task"], row["length"]) for row in record["not_asked"]] == [("vt", 820), ("vt", 900)]
    assert (record["run"], record["step"], record["seed"], record["tokenizer"]) == (run_dir.name, 3, 0, "byte")
    page = write_report(run_dir, record_only=True).read_text(encoding="utf-8")
    assert re.search(r"<th>task</th><th>820</th><th>900</th>", page)
    assert re.search(r"<td>fwe</td><td>33\.3 \[3, 91\]</td><td>33\.3 \[5, 84\]</td>", page), page[page.index("RULER") :][
        :900
    ]
    assert "Skipped: vt at 820: vt needs" in page
    dense = train_run(workspace, attention="dense")
    evaluate_run_with_ruler(dense, **{**settings, "tasks": ["fwe"], "lengths": [900], "seed": 1})
    result = CliRunner().invoke(cli.app, ["compare", f"nsa={run_dir}", f"dense={dense}"], catch_exceptions=False)
    assert re.search(r"\| fwe +\| 900 +\| 33\.3: 33\.3 \[4\.\d, 8\d\.\d\] of 2 +\| 33\.3: ", result.output), result.output
    assert re.search(r"\| fwe +\| 820 +\| 33\.3: .* of 1 +\| – ", result.output), result.output
    assert "the RULER evaluations differ in the seed of the questions" in result.output
    assert f"niah_single_2 at 820: not requested ({dense.name})" in result.output
    (run_dir / "ruler.json").unlink()


def test_runs_with_a_file_tokenizer_are_evaluated_with_ruler_only(workspace: Path) -> None:
    file = save_tokenizer(workspace)
    folder = train_run(workspace, {"source": "local", "tokenizer": str(file), "val_fraction": 0.4}, vocab_size=320)
    record = evaluate_run_with_ruler(
        folder,
        tasks=["niah_multikey_2"],
        lengths=[900],
        questions=2,
        device="cpu",
        prepare_data=lambda *given: prepare(*given, cache=workspace / "shards"),
    )
    assert len(record["results"]) == 1 and record["tokenizer"] == load_tokenizer(str(file)).identity
    with pytest.raises(ConfigError, match=r"data\.tokenizer: byte, or add --ruler"):
        evaluate_run(folder)


def test_only_byte_models_are_accepted(run_dir: Path, tmp_path: Path) -> None:
    copy = tmp_path / run_dir.name
    copy.mkdir()
    text = (run_dir / "config.yaml").read_text().replace("tokenizer: byte", "tokenizer: other.json")
    (copy / "config.yaml").write_text(text)
    (copy / "status.json").write_text((run_dir / "status.json").read_text())
    (copy / "events.jsonl").write_text("")
    with pytest.raises(ConfigError, match=r"data\.tokenizer: byte"):
        evaluate_run(copy)


def test_two_evaluated_runs_are_compared(run_dir: Path, workspace: Path, evaluation: dict[str, Any]) -> None:
    """The comparison reads evaluation.json; each of two documents has two windows of 330."""
    dense_run = train_run(workspace, attention="dense")
    words = random.Random(5).choices(["sun", "rain", "and", "falls"], k=400)
    (workspace / "long.jsonl").write_text("".join(json.dumps({"text": " ".join(words[i::2])}) + "\n" for i in (0, 1)))
    settings: dict[str, Any] = {
        "lengths": [260, 330],
        "tasks": ["needle"],
        "texts": {"long": str(workspace / "long.jsonl")},
    }
    nsa, dense = evaluate(run_dir, workspace, **settings), evaluate(dense_run, workspace, **settings)
    arguments = ["compare", f"nsa={run_dir}", f"dense={dense_run}"]
    markdown, json_result = (CliRunner().invoke(cli.app, [*arguments, *more]) for more in ([], ["--json"]))
    assert markdown.exit_code == json_result.exit_code == 0 and "long: nsa" in markdown.output
    comparison = json.loads(json_result.output)
    texts = {text["text"]: {place["place"]: place for place in text["places"]} for text in comparison["texts"]}
    assert [place["windows"] for place in texts["long"].values()] == [len(nsa["texts"]["long"]["rows"]), 4, 4]
    differences = [
        one[1] - other[1] for one, other in zip(*(e["texts"]["long"]["windows"] for e in (nsa, dense)), strict=True)
    ]
    assert texts["long"]["256 to 329"]["difference"] == pytest.approx(sum(differences) / 4 / math.log(2))
    differences = [e["positions"]["octaves"][0]["loss"] / math.log(2) for e in (nsa, dense)]
    first_range = texts["held-out text"]["0 to 255"]
    assert first_range["difference"] == pytest.approx(differences[0] - differences[1]) and first_range["windows"] == 3
    n_correct = sum(cell["right"] for cell in nsa["retrieval"] if cell["length"] == 260)
    assert comparison["needles"][0]["every"]["right"] == n_correct and comparison["needles"][0]["every"]["total"] == 2
    chosen = comparison["interventions"][0]
    assert (chosen["length"], chosen["name"], chosen["every"]["total"]) == (260, "chosen", 2)
    # One of the two needles is at depth 0, in the first block.
    assert chosen["far"]["total"] == 1
    write_evaluation(run_dir, evaluation)


def interrupt_evaluation(run_dir: Path, workspace: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(run_evaluation, "run_ablations", lambda *_, **__: 1 / 0)
        evaluate(run_dir, workspace, lengths=[330], **settings)


@pytest.mark.slow
def test_interrupted_parts_are_not_reused_for_other_settings(
    run_dir: Path, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other windows, counts, or contents of a text."""
    (workspace / "t.txt").write_text("ab" * 200)
    texts = {"t": str(workspace / "t.txt")}
    interrupt_evaluation(run_dir, workspace, monkeypatch, texts=texts)
    (workspace / "t.txt").write_text("ba" * 250)
    results = evaluate(run_dir, workspace, lengths=[330], texts=texts, per_depth_at={330: 2})
    assert results["texts"]["t"]["tokens"] == 501
    assert {cell["sequences"] for cell in results["retrieval"]} == {2}
    interrupt_evaluation(run_dir, workspace, monkeypatch)
    assert evaluate(run_dir, workspace, lengths=[330], windows=2)["positions"]["windows"] == 2


SMALL = ModelConfig(
    dim=32, n_layers=1, n_heads=4, n_kv_groups=2, d_k=8, d_v=8, nsa=NSAConfig(l=8, d=4, l_sel=8, n_sel=4, w=13)
)


def test_ablations_use_the_seed() -> None:
    model, text = NSATransformer(SMALL, seed=0), np.random.default_rng(0).integers(97, 122, 5000)
    recall = RecallConfig(value_length=4)
    results = run_evaluation._run_ablations(
        run_evaluation._RetrievalSettings(model, text, recall, (0.0,), 1, {}, 0, 7), 330, 2, lambda line: None
    )
    expected = run_ablations(model, *stack_samples(make_needles(330, 2, recall, 7, text), torch.device("cpu")), seed=7)
    assert [result["d_loss"] for result in results["interventions"]] == [result.d_loss for result in expected]


@looped
@pytest.mark.parametrize("branches", [("cmp", "sel"), ("cmp", "win"), ("win",)])
def test_ablations_of_a_model_without_some_branches(branches: tuple[str, ...]) -> None:
    """Those of the branches that exist; the length that selects all blocks has no effect without a selected branch."""
    model, text = NSATransformer(SMALL.model_copy(update={"branches": branches}), seed=0), np.arange(5000) % 26 + 97
    settings = run_evaluation._RetrievalSettings(model, text, RecallConfig(value_length=4), (0.0,), 1, {}, 0, 7)
    results = run_evaluation._run_ablations(settings, 330, 2, lambda line: None)
    assert [result["name"] for result in results["interventions"]] == list_ablations(model.config)
    assert (results["quality"] is None) == ("sel" not in branches)
    short = run_evaluation._run_ablations(settings, 32, 2, lambda line: None)
    assert not short["interventions"] and ("so all are selected" in short["why_not"]) == ("sel" in branches)


def test_evaluation_uses_the_held_out_text_of_the_run(
    run_dir: Path, workspace: Path, evaluation: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the longest length of the run, with the given seed."""
    calls: dict[str, Any] = {}

    def spy(name: str) -> Any:
        real = getattr(run_evaluation, name)
        return lambda *args, **options: calls.update({name: (args, options)}) or real(*args, **options)

    for name in ("evaluate_retrieval", "measure_loss_by_position", "measure_document_loss", "measure_selection_quality"):
        monkeypatch.setattr(run_evaluation, name, spy(name))
    data = prepare(RunConfig.from_yaml(run_dir / "config.yaml").data, 256, 330, cache=workspace / "shards")
    settings = {
        "lengths": [330],
        "tasks": ["needle"],
        "depths": (0.0,),
        "per_depth": 1,
        "windows": 3,
        "ablation_sequences": 2,
    }
    evaluate_run(run_dir, **settings, seed=7, device="cpu", prepare_data=lambda *args: data)
    (_, text, _), options = calls["evaluate_retrieval"]
    assert np.array_equal(text, data.validation.read(0, len(data.validation))) and options["seed"] == 7
    assert calls["measure_loss_by_position"][0][1:] == (data.validation, 330, 3)
    assert calls["measure_document_loss"][0][1] is data.validation and calls["measure_document_loss"][0][3:] == (330, 3)
    assert calls["measure_selection_quality"][0][2] == 7
    write_evaluation(run_dir, evaluation)
