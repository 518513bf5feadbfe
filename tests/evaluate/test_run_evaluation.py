"""The evaluation of a run: one file that says what it was made from, and is shown in the report."""

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
from typer.testing import CliRunner
from unpainted import unpainted

from nsa_lab import cli, figures
from nsa_lab.config import ConfigError, ModelConfig, NSAConfig, RecallConfig, RunConfig
from nsa_lab.data import DataError, prepare
from nsa_lab.evaluate import ABLATIONS, NEEDLE_FORMS, TASKS, evaluate_run, run_evaluation
from nsa_lab.evaluate.ablations import run_ablations
from nsa_lab.evaluate.retrieval import make_needles
from nsa_lab.evaluate.scoring import stack_samples
from nsa_lab.model import NSATransformer
from nsa_lab.report import write_report
from nsa_lab.runs import events, lifecycle
from nsa_lab.runs.evaluation import EVALUATION, UNFINISHED, read_evaluation, write_evaluation
from nsa_lab.train.attempt import run
from nsa_lab.train.build import Builders

# Each asks a run that is trained for it.
pytestmark = pytest.mark.slow

DATA: dict[str, Any] = {"source": "recall", "val_fraction": 0.4, "bytes_per_fact": 400, "value_length": 4}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with texts, where runs are made and shards kept."""
    folder, dice = tmp_path_factory.mktemp("evaluated"), random.Random(3)
    (folder / "texts").mkdir()
    for number in range(40):
        words = (dice.choice(["sun", "rain", "wind", "and", "the", "falls", "blows"]) for _ in range(300))
        (folder / "texts" / f"{number}.txt").write_text(" ".join(words))
    return folder


def train_run(place: Path, **model: Any) -> Path:
    config = RunConfig.from_dict(
        {
            "name": "asked",
            "model": {"dim": 32, "n_layers": 1, "n_heads": 4, "n_kv_groups": 2, "d_k": 4, "d_v": 4, **model},
            "nsa": {"l": 8, "d": 4, "l_sel": 16, "n_sel": 8, "w": 16},
            "runtime": {"device": "cpu"},
            "data": {**DATA, "path": str(place / "texts")},
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
    run_dir = lifecycle.create_run(config, place / "outputs")
    assert run(run_dir, builders=Builders(data=lambda *given: prepare(*given, cache=place / "shards"))) == 0
    return run_dir


@pytest.fixture(scope="module")
def run_dir(place: Path) -> Path:
    return train_run(place)


@pytest.fixture(scope="module")
def evaluation(run_dir: Path, place: Path) -> dict[str, Any]:
    return evaluate(run_dir, place)


def evaluate(run_dir: Path, place: Path, **settings: Any) -> dict[str, Any]:
    return evaluate_run(
        run_dir,
        depths=(0.0, 0.6),
        per_depth=1,
        device="cpu",
        prepare_data=lambda *given: prepare(*given, cache=place / "shards"),
        **{"intervened": 2, "windows": 3, **settings},
    )


def test_text_and_answers_of_training_are_told_apart(run_dir: Path) -> None:
    for step in events.get_step_events(events.read_events(run_dir)):
        text, marked = step["bpb"] * 0.6931471805599453, step["marked_loss"]
        # Per sequence of 260 or 330 tokens one answer of four, which weigh 5.
        length = 260 if step["step"] <= 2 else 330
        weighted = (text * (length - 4) + 5 * marked * 4) / (length - 4 + 20)
        assert step["loss"] == pytest.approx(weighted, rel=2e-3)


def test_the_file_says_what_was_asked_and_of_what(evaluation: dict[str, Any], run_dir: Path) -> None:
    assert read_evaluation(run_dir) == json.loads(json.dumps(evaluation))
    assert (evaluation["run"], evaluation["step"], evaluation["seed"]) == (run_dir.name, 3, 0)
    assert evaluation["recall"]["value_length"] == 4 and evaluation["device"] == "cpu" and evaluation["code"]
    lengths = {cell["length"] for cell in evaluation["retrieval"]}
    assert lengths == {260, 330, 660}
    assert len([c for c in evaluation["retrieval"] if c["task"] == "needle"]) == 3 * 2
    assert all(cell["sequences"] == 1 for cell in evaluation["retrieval"])
    assert {(row["task"], row["length"]) for row in evaluation["not_asked"]} <= {("multi_query", n) for n in (260, 330)}
    assert evaluation["positions"]["windows"] == 3 and len(evaluation["positions"]["octaves"]) == 2
    documents = evaluation["documents"]
    assert documents["rows"] == 3 and documents["length"] == 330 and documents["tokens"] <= 3 * 330
    for part in evaluation["selection"]:
        assert [effect["name"] for effect in part["interventions"]] == list(ABLATIONS)
        assert len(part["quality"]["chosen"]) == 1


def test_the_same_again_but_for_the_clock_and_another_checkpoint_differs(
    evaluation: dict[str, Any], run_dir: Path, place: Path
) -> None:
    again = evaluate(run_dir, place)
    assert {**again, "seconds": 0} == {**evaluation, "seconds": 0}
    earlier = evaluate(run_dir, place, step=2, lengths=[450])
    assert earlier["step"] == 2 and {cell["length"] for cell in earlier["retrieval"]} == {450}
    assert earlier["positions"] != evaluation["positions"]
    write_evaluation(run_dir, evaluation)


def test_one_that_was_broken_off_goes_on(
    run_dir: Path, place: Path, evaluation: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By an error in its last part, twice: what was answered is not asked again, and of another seed nothing is known."""
    told: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(run_evaluation, "run_ablations", lambda *_, **__: 1 / 0)
        for seed in (0, 0, 1):
            with pytest.raises(ZeroDivisionError):
                evaluate(run_dir, place, lengths=[260], seed=seed, say=told.append)
            assert read_evaluation(run_dir) == json.loads(json.dumps(evaluation))
            with pytest.raises(ZeroDivisionError):
                evaluate(run_dir, place, lengths=[260, 330], seed=seed, say=told.append)
    assert sum(line.startswith("needle at 260") for line in told) == 2
    assert sum(line.startswith("needle at 330") for line in told) == 2
    found = evaluate(run_dir, place, lengths=[260], seed=1, say=told.append)
    assert sum(line.startswith("needle at 260") for line in told) == 2 and not (run_dir / UNFINISHED).exists()
    assert {**found, "seconds": 0} == {**evaluate(run_dir, place, lengths=[260], seed=1), "seconds": 0}
    write_evaluation(run_dir, evaluation)


def test_tasks_counts_and_texts_are_those_asked_for_and_are_gone_on_with(
    run_dir: Path, place: Path, evaluation: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken off in the second of two texts: the first is not read again, unless its content is another."""
    told: list[str] = []
    for name, letters in (("first", "ab" * 200), ("second", "cd" * 300)):
        (place / f"{name}.txt").write_text(letters)
    asked: dict[str, Any] = {
        "lengths": [260, 400],
        "tasks": ["letters", "needle"],
        "per_depth_at": {400: 3},
        "texts": {name: str(place / f"{name}.txt") for name in ("first", "second")},
        "say": told.append,
    }
    whole = run_evaluation.measure_text_loss
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(
            run_evaluation,
            "measure_text_loss",
            lambda model, text, length: whole(model, text, length) if len(text) < 500 else 1 / 0,
        )
        evaluate(run_dir, place, **asked)
    found = evaluate(run_dir, place, **asked)
    assert sum(line.startswith("first: ") for line in told) == sum(line.startswith("letters at 260") for line in told) == 1
    assert "reading first: 401 bytes, separators included" in told
    cells = [(cell["task"], cell["length"], cell["depth"], cell["sequences"]) for cell in found["retrieval"]]
    assert cells == [
        (task, length, depth, {260: 1, 400: 3}[length])
        for task in ("letters", "needle")
        for length in (260, 400)
        for depth in (0.0, 0.6)
    ]
    first, second = found["texts"]["first"], found["texts"]["second"]
    assert (first["tokens"], second["tokens"], first["length"]) == (401, 601, 330) and len(second["windows"]) == 1
    (place / "first.txt").write_text("ba" * 200)
    again = evaluate(run_dir, place, **asked, dtype=torch.bfloat16)
    assert again["dtype"] == "bfloat16" and found["dtype"] == "float32"
    assert again["texts"]["first"]["identity"] != first["identity"]
    assert again["texts"]["second"]["loss"] == pytest.approx(second["loss"], rel=0.02)
    with pytest.raises(ConfigError, match="task = nedle: there is no such task; there is needle, multi_key"):
        evaluate(run_dir, place, tasks=["nedle"])
    with pytest.raises(DataError, match=r"^text '/nowhere': nothing at /nowhere; give a file"):
        evaluate(run_dir, place, texts={"lost": "/nowhere"})
    write_evaluation(run_dir, evaluation)


def test_where_all_blocks_are_read_nothing_is_judged(run_dir: Path, place: Path, evaluation: dict[str, Any]) -> None:
    (part,) = evaluate(run_dir, place, lengths=[120])["selection"]
    assert part["interventions"] == [] and part["why_not"]
    (part,) = evaluate(run_dir, place, lengths=[330], intervened=0)["selection"]
    assert part["interventions"] == [] and part["why_not"] == "not asked"
    write_evaluation(run_dir, evaluation)


@unpainted()
def test_the_report_shows_it(evaluation: dict[str, Any], run_dir: Path) -> None:
    page = write_report(run_dir).read_text(encoding="utf-8")
    section = page[page.index("What it finds in long texts") :]
    assert len(re.findall(r'<div class="wide"><img ', section)) == 2 and f"Facts found by {run_dir.name}" in section
    documents = evaluation["documents"]
    alone = f"{documents['alone'] / 0.6931471805599453:.4f} bits per byte with each read alone"
    assert f"Whole documents, {documents['documents']}" in section and alone in section
    assert re.search(r"<td>660</td><td>oracle</td><td>\d+%</td>", section)


def test_a_run_without_an_evaluation_shows_none_and_another_version_is_not_read(run_dir: Path, tmp_path: Path) -> None:
    assert read_evaluation(tmp_path) is None
    (tmp_path / EVALUATION).write_text('{"v": 99}')
    assert read_evaluation(tmp_path) is None


def test_the_map_has_a_cell_for_each_length_and_depth(evaluation: dict[str, Any]) -> None:
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


def test_a_dense_run_is_asked_and_has_no_selection(place: Path) -> None:
    found = evaluate(train_run(place, attention="dense"), place, lengths=[260])
    assert found["selection"] == [] and found["attention"] == "dense" and found["retrieval"]


def test_the_command_writes_the_file(run_dir: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import nsa_lab.evaluate

    asked: dict[str, Any] = {}
    monkeypatch.setattr(nsa_lab.evaluate, "evaluate_run", lambda folder, **settings: asked.update(settings, run=folder))
    arguments = ["evaluate", run_dir.name, "--outputs", str(place / "outputs"), "--length", "256", "--seed", "4"]
    told = CliRunner().invoke(cli.app, arguments)
    assert told.exit_code == 0 and told.output.strip().endswith(EVALUATION)
    assert (asked["run"], asked["lengths"], asked["seed"], asked["per_depth"]) == (run_dir, [256], 4, 20)
    assert (asked["tasks"], asked["texts"], asked["per_depth_at"]) == ([*TASKS], {}, {})
    assert asked["intervened"] == 10
    more = ["--length", "512:3", "--task", "all", "--text", "long=a=b.txt", "--bf16", "--intervened", "0"]
    assert CliRunner().invoke(cli.app, arguments + more).exit_code == 0
    assert (asked["lengths"], asked["per_depth_at"], asked["texts"]) == ([256, 512], {512: 3}, {"long": "a=b.txt"})
    assert asked["tasks"] == [*TASKS, *NEEDLE_FORMS] and asked["dtype"] == torch.bfloat16 and asked["intervened"] == 0
    for wrong in (["--length", "63"], ["--length", "512:0"], ["--length", "many"], ["--text", "long"]):
        with pytest.raises(ConfigError, match=rf"{wrong[0]} {wrong[1]}: expected"):
            CliRunner().invoke(cli.app, arguments + wrong, catch_exceptions=False)


def test_only_bytes_can_be_asked_for(run_dir: Path, tmp_path: Path) -> None:
    copy = tmp_path / run_dir.name
    copy.mkdir()
    text = (run_dir / "config.yaml").read_text().replace("tokenizer: byte", "tokenizer: other.json")
    (copy / "config.yaml").write_text(text)
    (copy / "status.json").write_text((run_dir / "status.json").read_text())
    (copy / "events.jsonl").write_text("")
    with pytest.raises(ConfigError, match=r"data\.tokenizer: byte"):
        evaluate_run(copy)


def test_two_evaluated_runs_are_compared(run_dir: Path, place: Path, evaluation: dict[str, Any]) -> None:
    """What an evaluation holds is what the comparison reads: two windows of 330 in one document, and two in the other."""
    twin = train_run(place, attention="dense")
    words = random.Random(5).choices(["sun", "rain", "and", "falls"], k=400)
    (place / "long.jsonl").write_text("".join(json.dumps({"text": " ".join(words[i::2])}) + "\n" for i in (0, 1)))
    asked: dict[str, Any] = {"lengths": [260, 330], "tasks": ["needle"], "texts": {"long": str(place / "long.jsonl")}}
    ours, theirs = evaluate(run_dir, place, **asked), evaluate(twin, place, **asked)
    arguments = ["compare", f"nsa={run_dir}", f"dense={twin}"]
    told, data = (CliRunner().invoke(cli.app, [*arguments, *more]) for more in ([], ["--json"]))
    assert told.exit_code == data.exit_code == 0 and "### long: nsa less dense, seed 1337" in told.output
    found = json.loads(data.output)
    texts = {text["text"]: {place["place"]: place for place in text["places"]} for text in found["texts"]}
    assert [place["windows"] for place in texts["long"].values()] == [len(ours["texts"]["long"]["rows"]), 4, 4]
    apart = [one[1] - other[1] for one, other in zip(*(e["texts"]["long"]["windows"] for e in (ours, theirs)), strict=True)]
    assert texts["long"]["256 to 329"]["difference"] == pytest.approx(sum(apart) / 4 / math.log(2))
    apart = [e["positions"]["octaves"][0]["loss"] / math.log(2) for e in (ours, theirs)]
    own = texts["held-out text"]["0 to 255"]
    assert own["difference"] == pytest.approx(apart[0] - apart[1]) and own["windows"] == 3
    right = sum(cell["right"] for cell in ours["retrieval"] if cell["length"] == 260)
    assert found["needles"][0]["every"]["right"] == right and found["needles"][0]["every"]["asked"] == 2
    chosen = found["interventions"][0]
    assert (chosen["length"], chosen["name"], chosen["every"]["asked"]) == (260, "chosen", 2)
    # Of two needles one is at depth 0, in the first block.
    assert chosen["far"]["asked"] == 1
    write_evaluation(run_dir, evaluation)


def interrupt_evaluation(run_dir: Path, place: Path, monkeypatch: pytest.MonkeyPatch, **asked: Any) -> None:
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(run_evaluation, "run_ablations", lambda *_, **__: 1 / 0)
        evaluate(run_dir, place, lengths=[330], **asked)


@pytest.mark.slow
def test_what_was_broken_off_is_not_taken_for_another_question(
    run_dir: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of other windows, other counts, or a text of other content."""
    (place / "t.txt").write_text("ab" * 200)
    texts = {"t": str(place / "t.txt")}
    interrupt_evaluation(run_dir, place, monkeypatch, texts=texts)
    (place / "t.txt").write_text("ba" * 250)
    found = evaluate(run_dir, place, lengths=[330], texts=texts, per_depth_at={330: 2})
    assert found["texts"]["t"]["tokens"] == 501
    assert {cell["sequences"] for cell in found["retrieval"]} == {2}
    interrupt_evaluation(run_dir, place, monkeypatch)
    assert evaluate(run_dir, place, lengths=[330], windows=2)["positions"]["windows"] == 2


SMALL = ModelConfig(
    dim=32, n_layers=1, n_heads=4, n_kv_groups=2, d_k=8, d_v=8, nsa=NSAConfig(l=8, d=4, l_sel=8, n_sel=4, w=13)
)


def test_interventions_are_of_the_seed() -> None:
    model, text = NSATransformer(SMALL, seed=0), np.random.default_rng(0).integers(97, 122, 5000)
    recall = RecallConfig(value_length=4)
    found = run_evaluation._run_ablations(
        run_evaluation._RetrievalSettings(model, text, recall, (0.0,), 1, {}, 0, 7), 330, 2, lambda line: None
    )
    wanted = run_ablations(model, *stack_samples(make_needles(330, 2, recall, 7, text), torch.device("cpu")), seed=7)
    assert [one["d_loss"] for one in found["interventions"]] == [one.d_loss for one in wanted]


def test_what_is_asked_is_the_runs_own_held_out_text(
    run_dir: Path, place: Path, evaluation: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the longest of its lengths, and by dice of the seed."""
    asked: dict[str, Any] = {}

    def seen(name: str) -> Any:
        real = getattr(run_evaluation, name)
        return lambda *given, **how: asked.update({name: (given, how)}) or real(*given, **how)

    for name in ("retrieval", "loss_by_position", "document_loss", "choice_quality"):
        monkeypatch.setattr(run_evaluation, name, seen(name))
    data = prepare(RunConfig.from_yaml(run_dir / "config.yaml").data, 256, 330, cache=place / "shards")
    asks = {"lengths": [330], "tasks": ["needle"], "depths": (0.0,), "per_depth": 1, "windows": 3, "intervened": 2}
    evaluate_run(run_dir, **asks, seed=7, device="cpu", prepare_data=lambda *given: data)
    (_, text, _), how = asked["retrieval"]
    assert np.array_equal(text, data.validation.read(0, len(data.validation))) and how["seed"] == 7
    assert asked["loss_by_position"][0][1:] == (data.validation, 330, 3)
    assert asked["document_loss"][0][1] is data.validation and asked["document_loss"][0][3:] == (330, 3)
    assert asked["choice_quality"][0][2] == 7
    write_evaluation(run_dir, evaluation)
