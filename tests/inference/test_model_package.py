"""Packaging of models: contents of the folder, model card, loading by name, and errors."""

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
from fake_evaluation import make_evaluation
from fake_run import write_checkpoint, write_run
from looping import looped
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
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with texts, for runs and shards."""
    folder, rng = tmp_path_factory.mktemp("shipping"), random.Random(5)
    (folder / "texts").mkdir()
    for number in range(30):
        words = (rng.choice(["sun", "rain", "wind", "and", "the", "falls"]) for _ in range(250))
        (folder / "texts" / f"{number}.txt").write_text(" ".join(words))
    return folder


@pytest.fixture(scope="module")
def builder(workspace: Path) -> Callable[..., Any]:
    return lambda *given: prepare(*given, cache=workspace / "shards")


@pytest.fixture(scope="module")
def run_dir(workspace: Path, builder: Callable[..., Any]) -> Path:
    """Return a tiny run with the training recipe, trained for a few steps and evaluated."""
    config = RunConfig.from_dict(
        {
            "name": "tiny",
            "model": {"dim": 32, "n_layers": 1, "n_heads": 4, "n_kv_groups": 2, "d_k": 8, "d_v": 8, "rotary_share": 0.5}
            | {"matching_heads": 1, "selection_loss": 0.05, "indexer_block": 4},
            "nsa": {"l": 8, "d": 4, "l_sel": 16, "n_sel": 4, "w": 16},
            "runtime": {"device": "cpu"},
            "data": {"source": "recall", "path": str(workspace / "texts"), "val_fraction": 0.4, "bytes_per_fact": 300},
            "train": {"steps": STEPS, "seq_len": 300, "batch_size": 2, "lr": 1e-3, "log_every": 1, "eval_every": 3},
        }
    )
    created = lifecycle.create_run(config, workspace / "outputs")
    assert run(created, builders=Builders(data=builder)) == 0
    evaluate_run(
        created, depths=(0.0, 0.5), per_depth=2, windows=2, ablation_sequences=2, device="cpu", prepare_data=builder
    )
    return created


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Replace the folder of bundled models by an empty one, and change to an empty working directory."""
    for folder in ("models", "here"):
        (tmp_path / folder).mkdir()
    monkeypatch.setattr(resolve, "MODELS_DIR", tmp_path / "models")
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "models"


@pytest.fixture
def packaged(run_dir: Path, models: Path) -> Path:
    return ship(run_dir, models / "tiny-0m", ABOUT)


def get_weights_path(folder: Path) -> Path:
    return folder / "checkpoints" / f"step-{STEPS:08d}" / "model.safetensors"


@pytest.mark.slow
def test_packaged_model_loads_by_name(packaged: Path, run_dir: Path) -> None:
    model, trained = load_model("tiny-0m"), load_model(run_dir)
    for (name, here), there in zip(model.state_dict().items(), trained.state_dict().values(), strict=True):
        assert here.dtype == torch.float32 and torch.equal(here, there.bfloat16().float()), name
    assert {value.dtype for value in load_file(get_weights_path(packaged)).values()} == {torch.bfloat16}
    assert not model.training
    prompt = ["the rain falls and " * 8]
    assert torch.equal(
        generate(model, prompt, max_new_tokens=5)[0], generate(load_model(packaged), prompt, max_new_tokens=5)[0]
    )


@pytest.mark.slow
def test_package_has_no_local_paths(packaged: Path, workspace: Path) -> None:
    files = {path.relative_to(packaged).as_posix(): path for path in packaged.rglob("*") if path.is_file()}
    inner = f"checkpoints/step-{STEPS:08d}/"
    assert set(files) == {"README.md", "config.yaml", EVALUATION, inner + "MANIFEST.json", inner + "model.safetensors"}
    assert not [name for name, path in files.items() if str(workspace).encode() in path.read_bytes()]
    data = RunConfig.from_yaml(files["config.yaml"]).data
    assert (data.path, data.source) == (None, "recall")


@pytest.mark.slow
def test_model_card_matches_the_records(packaged: Path, run_dir: Path) -> None:
    card = (packaged / "README.md").read_text()
    results = json.loads((run_dir / EVALUATION).read_text())
    parameters = sum(value.numel() for value in load_file(get_weights_path(packaged)).values())
    assert card.startswith(f"# tiny-0m\n\n{parameters:,} parameters (") and card.endswith(ABOUT)
    assert f"Trained on {STEPS * 2 * 300:,} bytes by the run `{run_dir.name}`" in card
    cells = [cell for cell in results["retrieval"] if (cell["task"], cell["length"]) == ("needle", 300)]
    correct, total = sum(cell["right"] for cell in cells), sum(cell["answers"] for cell in cells)
    assert total == 4 and f"| needle | {correct} of 4 (" in card and "| needle, generated | " in card
    position_range, documents = results["positions"]["octaves"][0], results["documents"]
    assert f"| positions 0 to 256 | {position_range['tokens']:,} | {position_range['loss'] / math.log(2):.3f} ± " in card
    assert f"| {documents['tokens']:,} | {documents['alone'] / math.log(2):.3f} |" in card
    ablations = results["selection"][0]["interventions"]
    assert " | ".join(f"{ablation['accuracy']:.0%}" for ablation in ablations) in card


@pytest.mark.slow
def test_model_card_rows_and_units(run_dir: Path) -> None:
    results = json.loads((run_dir / EVALUATION).read_text())
    for cell in results["retrieval"]:
        cell.update(right=2, answers=4, written=3, written_right=1)
    results["positions"]["octaves"][0].update(loss=math.log(2), error=0.1 * math.log(2))
    evaluated = next(part for part in results["selection"] if part["interventions"])
    results["selection"] = [{**evaluated, "interventions": []}, evaluated, {**evaluated, "length": 4321}]
    card = build_model_card("tiny", History.read(run_dir), results, 1 << 20, ABOUT)
    cells = sum((cell["task"], cell["length"]) == ("needle", 300) for cell in results["retrieval"])
    assert f"| needle | {2 * cells} of {4 * cells} (" in card and f"| needle, generated | {cells} of {3 * cells} (" in card
    assert "| 1.000 ± 0.100 |" in card
    shares = " | ".join(f"{ablation['accuracy']:.0%}" for ablation in evaluated["interventions"])
    rows = [f"| {length} | {evaluated['sequences']} | {shares} |" for length in (f"{evaluated['length']:,}", "4,321")]
    assert "\n".join(rows) in card and card.count(shares) == 2


@pytest.mark.slow
def test_commands_accept_a_model_name(packaged: Path, models: Path, tmp_path: Path, builder: Callable[..., Any]) -> None:
    result = CliRunner().invoke(cli.app, ["generate", "tiny-0m", "--prompt", "the rain", "--tokens", "4"])
    assert result.exit_code == 0, result.output
    message = r"tiny-0m is a bundled model, whose evaluation is fixed; give an output folder, for example --out .*tiny-0m"
    with pytest.raises(ConfigError, match=message):
        evaluate_run(packaged, prepare_data=builder)
    before, out = (packaged / EVALUATION).read_bytes(), tmp_path / "asked" / "again"
    options = ["--length", "300:1", "--per-depth", "1", "--windows", "1", "--task", "needle"]
    result = CliRunner().invoke(cli.app, ["evaluate", "tiny-0m", "--out", str(out), *options])
    assert result.exit_code == 0, result.output
    assert evaluation.read_evaluation(out)["run"] == "tiny-0m" and result.output.endswith(f"{out / EVALUATION}\n")
    assert (packaged / EVALUATION).read_bytes() == before and {path.name for path in out.iterdir()} == {EVALUATION}


@pytest.mark.slow
def test_damaged_weights_are_rejected(packaged: Path) -> None:
    data = bytearray(get_weights_path(packaged).read_bytes())
    data[-1] ^= 1
    get_weights_path(packaged).write_bytes(data)
    with pytest.raises(NoCheckpoint, match=r"model\.safetensors does not match its sha256; install nsa-lab again"):
        load_model("tiny-0m")


def test_edited_configuration_of_a_model_is_rejected(tmp_path: Path) -> None:
    copy = shutil.copytree(resolve.MODELS_DIR / "needle-8m", tmp_path / "needle-8m")
    config = copy / "config.yaml"
    config.write_text(config.read_text().replace("rope_theta: 500000.0", "rope_theta: 10000.0"))
    with pytest.raises(NoCheckpoint, match=f"{config}: expected the configuration of the checkpoint step-00001526"):
        load_model(copy)


def write_run_with_weights(folder: Path, seed: int, name: str) -> Path:
    """Create a run directory whose weights are initialized with `seed`."""
    run_dir = write_run(folder, name=name)
    write_checkpoint(
        run_dir, 200, save(NSATransformer(RunConfig.from_yaml(run_dir / directory.CONFIG).model, seed=seed).state_dict())
    )
    return run_dir


def test_paths_and_runs_take_precedence_over_bundled_models(models: Path, tmp_path: Path) -> None:
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
    # Commands that change a run do not accept a bundled model.
    with pytest.raises(RunDirectoryError, match="no such run"):
        resolve.find_run("m", outputs)


def _make_child_path(folder: Path, name: str) -> Path:
    folder.mkdir(exist_ok=True)
    return folder / name


def test_unknown_name_lists_models_and_runs(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_runs_that_cannot_be_packaged_are_rejected_without_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir, to = write_run_with_weights(tmp_path, 0, "fake"), tmp_path / "models" / "m"
    with pytest.raises(ConfigError, match=r"no evaluation.json of step 200; run nsa-lab evaluate fake-"):
        ship(run_dir, to, ABOUT)
    write_json(run_dir / EVALUATION, make_evaluation(0, step=100, run=run_dir.name))
    with pytest.raises(ConfigError, match=r"no evaluation.json of step 200"):
        ship(run_dir, to, ABOUT)
    write_json(run_dir / EVALUATION, make_evaluation(0, step=200, run=run_dir.name))
    monkeypatch.setattr("nsa_lab.inference.package.MAX_WEIGHT_BYTES", 1000)
    with pytest.raises(ConfigError, match="expected at most 1,000 bytes of bfloat16 weights"):
        ship(run_dir, to, ABOUT)
    directory.write_status(run_dir, run=run_dir.name, status=directory.PREEMPTED)
    with pytest.raises(
        ConfigError, match="expected a run that is done, got PREEMPTED with its newest checkpoint at step 200 of 200"
    ):
        ship(run_dir, to, ABOUT)
    with pytest.raises(ConfigError, match="expected an empty or new folder"):
        ship(run_dir, run_dir, ABOUT)
    assert not to.exists()


@looped
@pytest.mark.parametrize(("correct", "total"), [(0, 1), (0, 20), (1, 1), (7, 20), (198, 200), (200, 200)])
def test_wilson_interval(correct: int, total: int) -> None:
    """Each end p differs from the observed proportion by 1.96 standard deviations sqrt(p (1 - p) / n)."""
    observed, (low, high) = correct / total, compute_wilson_interval(correct, total)
    assert 0 <= low <= observed <= high <= 1 and low < high
    for end, distance in ((low, observed - low), (high, high - observed)):
        assert distance == pytest.approx(1.959964 * math.sqrt(end * (1 - end) / total), abs=1e-6)


def test_wilson_interval_without_trials_is_rejected() -> None:
    for correct, total in ((0, 0), (3, 2), (-1, 2)):
        with pytest.raises(
            ValueError, match=f"n_correct = {correct}, n_total = {total}: expected 0 <= n_correct <= n_total"
        ):
            compute_wilson_interval(correct, total)


@pytest.mark.parametrize("workspace", ["file", "file/below"])
def test_folder_that_cannot_be_created_is_rejected_without_output(tmp_path: Path, workspace: str) -> None:
    (tmp_path / "file").write_text("kept")
    with pytest.raises(ConfigError, match=r"cannot write the model to this folder .*; give another folder"):
        check_new_folder(tmp_path / workspace)
    assert [*tmp_path.iterdir()] == [tmp_path / "file"] and (tmp_path / "file").read_text() == "kept"
    assert check_new_folder(tmp_path / "a" / "b") == tmp_path / "a" / "b" and len([*tmp_path.iterdir()]) == 1
