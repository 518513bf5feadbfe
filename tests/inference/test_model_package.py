"""From a run to a model that ships and back by its name: what is in the folder, what the card says, and what is refused."""

from __future__ import annotations

import json
import math
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_run import write_checkpoint, write_run
from safetensors.torch import load_file, save
from typer.testing import CliRunner

from nsa_lab import cli
from nsa_lab.config import ConfigError, RunConfig
from nsa_lab.data import prepare
from nsa_lab.evaluate import evaluate_run
from nsa_lab.inference import NoCheckpoint, generate, load_model, ship
from nsa_lab.inference.model_card import build_model_card
from nsa_lab.inference.package import check_new_folder
from nsa_lab.model import NSATransformer
from nsa_lab.runs import directory, evaluation, lifecycle, resolve
from nsa_lab.runs.atomic_io import write_json
from nsa_lab.runs.directory import RunDirectoryError
from nsa_lab.runs.evaluation import EVALUATION, compute_wilson_interval
from nsa_lab.runs.history import History
from nsa_lab.train.attempt import run
from nsa_lab.train.build import Builders

ABOUT = "## Data\n\nWords about the weather.\n"
STEPS = 3


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with texts, where runs are made and shards kept."""
    folder, dice = tmp_path_factory.mktemp("shipping"), random.Random(5)
    (folder / "texts").mkdir()
    for number in range(30):
        words = (dice.choice(["sun", "rain", "wind", "and", "the", "falls"]) for _ in range(250))
        (folder / "texts" / f"{number}.txt").write_text(" ".join(words))
    return folder


@pytest.fixture(scope="module")
def builder(place: Path) -> Callable[..., Any]:
    return lambda *given: prepare(*given, cache=place / "shards")


@pytest.fixture(scope="module")
def run_dir(place: Path, builder: Callable[..., Any]) -> Path:
    """A tiny run with the recipe that finds, trained for a few steps and evaluated."""
    config = RunConfig.from_dict(
        {
            "name": "tiny",
            "model": {"dim": 32, "n_layers": 1, "n_heads": 4, "n_kv_groups": 2, "d_k": 8, "d_v": 8, "rotary_share": 0.5}
            | {"matching_heads": 1, "selection_loss": 0.05, "indexer_block": 4},
            "nsa": {"l": 8, "d": 4, "l_sel": 16, "n_sel": 4, "w": 16},
            "runtime": {"device": "cpu"},
            "data": {"source": "recall", "path": str(place / "texts"), "val_fraction": 0.4, "bytes_per_fact": 300},
            "train": {"steps": STEPS, "seq_len": 300, "batch_size": 2, "lr": 1e-3, "log_every": 1, "eval_every": 3},
        }
    )
    made = lifecycle.create_run(config, place / "outputs")
    assert run(made, builders=Builders(data=builder)) == 0
    evaluate_run(made, depths=(0.0, 0.5), per_depth=2, windows=2, ablation_sequences=2, device="cpu", prepare_data=builder)
    return made


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that models ship in, empty, and a working directory where nothing has their names."""
    for folder in ("models", "here"):
        (tmp_path / folder).mkdir()
    monkeypatch.setattr(resolve, "MODELS_DIR", tmp_path / "models")
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "models"


@pytest.fixture
def shipped(run_dir: Path, models: Path) -> Path:
    return ship(run_dir, models / "tiny-0m", ABOUT)


def get_weights_path(folder: Path) -> Path:
    return folder / "checkpoints" / f"step-{STEPS:08d}" / "model.safetensors"


@pytest.mark.slow
def test_a_run_ships_and_is_loaded_by_name(shipped: Path, run_dir: Path) -> None:
    model, trained = load_model("tiny-0m"), load_model(run_dir)
    for (name, here), there in zip(model.state_dict().items(), trained.state_dict().values(), strict=True):
        assert here.dtype == torch.float32 and torch.equal(here, there.bfloat16().float()), name
    assert {value.dtype for value in load_file(get_weights_path(shipped)).values()} == {torch.bfloat16}
    assert not model.training
    prompt = ["the rain falls and " * 8]
    assert torch.equal(
        generate(model, prompt, max_new_tokens=5)[0], generate(load_model(shipped), prompt, max_new_tokens=5)[0]
    )


@pytest.mark.slow
def test_nothing_of_this_machine_travels(shipped: Path, place: Path) -> None:
    files = {path.relative_to(shipped).as_posix(): path for path in shipped.rglob("*") if path.is_file()}
    inner = f"checkpoints/step-{STEPS:08d}/"
    assert set(files) == {"README.md", "config.yaml", EVALUATION, inner + "MANIFEST.json", inner + "model.safetensors"}
    assert not [name for name, path in files.items() if str(place).encode() in path.read_bytes()]
    data = RunConfig.from_yaml(files["config.yaml"]).data
    assert (data.path, data.source) == (None, "recall")


@pytest.mark.slow
def test_the_card_says_what_the_records_say(shipped: Path, run_dir: Path) -> None:
    card = (shipped / "README.md").read_text()
    found = json.loads((run_dir / EVALUATION).read_text())
    parameters = sum(value.numel() for value in load_file(get_weights_path(shipped)).values())
    assert card.startswith(f"# tiny-0m\n\n{parameters:,} parameters (") and card.endswith(ABOUT)
    assert f"Trained on {STEPS * 2 * 300:,} bytes by the run `{run_dir.name}`" in card
    cells = [cell for cell in found["retrieval"] if (cell["task"], cell["length"]) == ("needle", 300)]
    right, asked = sum(cell["right"] for cell in cells), sum(cell["answers"] for cell in cells)
    assert asked == 4 and f"| needle | {right} of 4 (" in card and "| needle, written | " in card
    octave, documents = found["positions"]["octaves"][0], found["documents"]
    assert f"| positions 0 to 256 | {octave['tokens']:,} | {octave['loss'] / math.log(2):.3f} ± " in card
    assert f"| {documents['tokens']:,} | {documents['alone'] / math.log(2):.3f} |" in card
    effects = found["selection"][0]["interventions"]
    assert " | ".join(f"{effect['accuracy']:.0%}" for effect in effects) in card


def test_the_card_tells_what_was_written_apart_errors_in_bits_and_every_length_that_was_judged(run_dir: Path) -> None:
    found = json.loads((run_dir / EVALUATION).read_text())
    for cell in found["retrieval"]:
        cell.update(right=2, answers=4, written=3, written_right=1)
    found["positions"]["octaves"][0].update(loss=math.log(2), error=0.1 * math.log(2))
    judged = next(part for part in found["selection"] if part["interventions"])
    found["selection"] = [{**judged, "interventions": []}, judged, {**judged, "length": 4321}]
    card = build_model_card("tiny", History.read(run_dir), found, 1 << 20, ABOUT)
    cells = sum((cell["task"], cell["length"]) == ("needle", 300) for cell in found["retrieval"])
    assert f"| needle | {2 * cells} of {4 * cells} (" in card and f"| needle, written | {cells} of {3 * cells} (" in card
    assert "| 1.000 ± 0.100 |" in card
    shares = " | ".join(f"{effect['accuracy']:.0%}" for effect in judged["interventions"])
    rows = [f"| {length} | {judged['sequences']} | {shares} |" for length in (f"{judged['length']:,}", "4,321")]
    assert "\n".join(rows) in card and card.count(shares) == 2


@pytest.mark.slow
def test_commands_take_it_by_name(shipped: Path, models: Path, tmp_path: Path, builder: Callable[..., Any]) -> None:
    said = CliRunner().invoke(cli.app, ["generate", "tiny-0m", "--prompt", "the rain", "--tokens", "4"])
    assert said.exit_code == 0, said.output
    with pytest.raises(ConfigError, match=re.escape("tiny-0m ships with nsa-lab, and its own evaluation stays as it is")):
        evaluate_run(shipped, prepare_data=builder)
    before, out = (shipped / EVALUATION).read_bytes(), tmp_path / "asked" / "again"
    asked = ["--length", "300:1", "--per-depth", "1", "--windows", "1", "--task", "needle"]
    said = CliRunner().invoke(cli.app, ["evaluate", "tiny-0m", "--out", str(out), *asked])
    assert said.exit_code == 0, said.output
    assert evaluation.read_evaluation(out)["run"] == "tiny-0m" and said.output.endswith(f"{out / EVALUATION}\n")
    assert (shipped / EVALUATION).read_bytes() == before and {path.name for path in out.iterdir()} == {EVALUATION}


@pytest.mark.slow
def test_damaged_weights_are_refused(shipped: Path) -> None:
    data = bytearray(get_weights_path(shipped).read_bytes())
    data[-1] ^= 1
    get_weights_path(shipped).write_bytes(data)
    with pytest.raises(NoCheckpoint, match=r"model\.safetensors does not match its sha256; install nsa-lab again"):
        load_model("tiny-0m")


def write_run_with_weights(folder: Path, seed: int, name: str) -> Path:
    """A run directory of that name whose weights are those of the seed."""
    made = write_run(folder, name=name)
    write_checkpoint(
        made, 200, save(NSATransformer(RunConfig.from_yaml(made / directory.CONFIG).model, seed=seed).state_dict())
    )
    return made


def test_a_path_and_a_run_of_that_name_come_first(models: Path, tmp_path: Path) -> None:
    outputs = tmp_path / "outputs"
    for number, folder in enumerate((models, outputs, tmp_path / "here")):
        write_run_with_weights(tmp_path / "made", number, f"run{number}").rename(_make_child_path(folder, "m"))
    assert resolve.find_model("m", outputs) == tmp_path / "here" / "m"
    embedded = load_model("m").embedding.weight
    assert torch.equal(embedded, load_model(tmp_path / "here" / "m").embedding.weight)
    shutil.rmtree(tmp_path / "here" / "m")
    assert resolve.find_model("m", outputs) == outputs / "m"
    assert resolve.find_run("m", outputs) == outputs / "m"
    shutil.rmtree(outputs / "m")
    assert resolve.find_model("m", outputs) == models / "m" and resolve.is_packaged_model(models / "m")
    assert not torch.equal(load_model("m").embedding.weight, embedded)
    # What changes a run does not take a model of the package for one.
    with pytest.raises(RunDirectoryError, match="no such run"):
        resolve.find_run("m", outputs)


def _make_child_path(folder: Path, name: str) -> Path:
    folder.mkdir(exist_ok=True)
    return folder / name


def test_an_unknown_name_says_what_there_is(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve, "get_root", lambda: tmp_path)
    with pytest.raises(NoCheckpoint, match="this package contains no models; no runs in "):
        load_model("needle")
    run_dir = write_run_with_weights(tmp_path / "outputs", 0, "some")
    write_run_with_weights(tmp_path / "made", 0, "other").rename(models / "tiny-0m")
    there = f"packaged models: tiny-0m; runs in {tmp_path / 'outputs'}: {run_dir.name}"
    with pytest.raises(NoCheckpoint, match=re.escape(f"or the name of a model; {there}")):
        load_model("needle")
    with pytest.raises(RunDirectoryError, match=re.escape(f"available: {run_dir.name}; packaged models: tiny-0m")):
        resolve.find_model("needle", tmp_path / "outputs")


def test_what_cannot_ship_is_refused_and_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir, to = write_run_with_weights(tmp_path, 0, "fake"), tmp_path / "models" / "m"
    with pytest.raises(ConfigError, match=r"has no evaluation.json of step 200; nsa-lab evaluate fake-"):
        ship(run_dir, to, ABOUT)
    write_json(run_dir / EVALUATION, {"v": 1, "step": 100})
    with pytest.raises(ConfigError, match=r"has no evaluation.json of step 200"):
        ship(run_dir, to, ABOUT)
    write_json(run_dir / EVALUATION, {"v": 1, "step": 200})
    monkeypatch.setattr("nsa_lab.inference.package.MOST_BYTES", 1000)
    with pytest.raises(ConfigError, match="in bfloat16, and a model that ships has at most 1,000; train a smaller one"):
        ship(run_dir, to, ABOUT)
    directory.write_status(run_dir, run=run_dir.name, status=directory.PREEMPTED)
    with pytest.raises(
        ConfigError, match="is PREEMPTED, its newest checkpoint is of step 200 of 200: expected a run that is done"
    ):
        ship(run_dir, to, ABOUT)
    with pytest.raises(ConfigError, match="expected an empty or a new folder"):
        ship(run_dir, run_dir, ABOUT)
    assert not to.exists()


@pytest.mark.parametrize(("right", "asked"), [(0, 1), (0, 20), (1, 1), (7, 20), (198, 200), (200, 200)])
def test_an_interval_is_wilsons(right: int, asked: int) -> None:
    """Its ends are the shares p that lie 1.96 deviations of their own, sqrt(p (1 - p) / n), from what was seen."""
    seen, (low, high) = right / asked, compute_wilson_interval(right, asked)
    assert 0 <= low <= seen <= high <= 1 and low < high
    for end, away in ((low, seen - low), (high, high - seen)):
        assert away == pytest.approx(1.959964 * math.sqrt(end * (1 - end) / asked), abs=1e-6)


def test_an_interval_of_nothing_is_refused() -> None:
    for right, asked in ((0, 0), (3, 2), (-1, 2)):
        with pytest.raises(ValueError, match=f"right = {right} of {asked}"):
            compute_wilson_interval(right, asked)


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_where_no_folder_can_be_nothing_is_left(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("kept")
    with pytest.raises(ConfigError, match=r"no folder to write the model to .*; name another"):
        check_new_folder(tmp_path / place)
    assert [*tmp_path.iterdir()] == [tmp_path / "file"] and (tmp_path / "file").read_text() == "kept"
    assert check_new_folder(tmp_path / "a" / "b") == tmp_path / "a" / "b" and len([*tmp_path.iterdir()]) == 1
