"""Loading a model from a run directory and generating text: selection of the checkpoint, and errors."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
import torch
from fake_run import make_config, write_checkpoint, write_run
from safetensors.torch import save

from nsa_lab.config import ConfigError
from nsa_lab.data import load_tokenizer
from nsa_lab.inference import NoCheckpoint, Sampling, complete_prompt, continue_text, find_checkpoint, load_model
from nsa_lab.model import NSATransformer
from nsa_lab.runs import checkpoint_files
from nsa_lab.runs.trajectory import get_trajectory_settings


def test_run_completes_a_prompt(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path)
    model = NSATransformer(make_config().model, seed=1)
    folder = write_checkpoint(run_dir, 200, save(model.state_dict()))
    assert find_checkpoint(run_dir) == folder
    text = "".join(complete_prompt(run_dir, "def ", 30, Sampling(0.8), seed=1))
    assert text
    assert text == "".join(complete_prompt(run_dir, "def ", 30, Sampling(0.8), seed=1, step=200))
    for path in (folder, run_dir, str(run_dir)):
        assert torch.equal(load_model(path).head.weight, model.head.weight)


def test_run_directory_loads_its_newest_checkpoint(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path)
    models = {step: NSATransformer(make_config().model, seed=step) for step in (100, 200)}
    for step, model in models.items():
        write_checkpoint(run_dir, step, save(model.state_dict()))
    assert torch.equal(load_model(run_dir).head.weight, models[200].head.weight)


@pytest.mark.slow
def test_completion_depends_on_seed_and_step(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path)
    for step in (100, 200):
        write_checkpoint(run_dir, step, save(NSATransformer(make_config().model, seed=step).state_dict()))

    def complete(seed: int, step: int | None) -> str:
        return "".join(complete_prompt(run_dir, "def ", 30, Sampling(0.8), seed=seed, step=step))

    assert len({complete(0, 100), complete(1, 100), complete(1, 200)}) == 3 and complete(1, None) == complete(1, 200)


def test_text_contains_no_padding_ids_of_the_vocabulary() -> None:
    """A model may have more tokens than its tokenizer, which could not decode the additional ids."""
    model = NSATransformer(make_config(model__vocab_size=300, model__n_layers=1).model, seed=1)
    with torch.no_grad():
        model.embedding.weight.normal_(std=4.0)
    text = "".join(continue_text(model, load_tokenizer("byte"), "a", 40, Sampling(50.0), seed=2))
    assert len(text) >= 10


def test_load_errors_name_the_remedy(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path)
    with pytest.raises(NoCheckpoint, match="no checkpoint found"):
        find_checkpoint(run_dir)
    folder = write_checkpoint(run_dir, 100)
    with pytest.raises(NoCheckpoint, match="no checkpoint of step 7; available: 100"):
        find_checkpoint(run_dir, 7)
    (folder / "model.safetensors").write_bytes(b"10 letters")
    with pytest.raises(NoCheckpoint, match="does not match its sha256"):
        load_model(folder)
    with pytest.raises(NoCheckpoint, match="no such folder; give a run directory"):
        load_model(tmp_path / "nowhere")
    for path, words in (("/", "MANIFEST.json is missing"), ("\x00", "no such folder"), ("/dev/zero", "no such folder")):
        with pytest.raises(NoCheckpoint, match=words):
            load_model(path)


def test_invalid_dtype_and_device_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for place, words in (
        ({"dtype": "bfloat16"}, "dtype = 'bfloat16': expected one of torch.float64, .*, for example dtype=torch.bfloat16"),
        ({"dtype": torch.int8}, "dtype = torch.int8: expected one of"),
        ({"device": "gpu"}, "device = 'gpu': expected a torch device"),
        ({"device": None}, "device = None: expected a torch device"),
        ({"device": "meta"}, "device = 'meta': torch cannot compute on it .*; use cpu"),
        ({"device": "cuda:1"}, "device = 'cuda:1': torch finds no CUDA device; use cpu"),
    ):
        with pytest.raises(ConfigError, match=words):
            load_model("needle-8m", **place)
    assert load_model("needle-8m", device="cpu:7").head.weight.device == torch.device("cpu")


def test_weights_with_other_names_are_rejected(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path)
    weights = NSATransformer(make_config().model, seed=1).state_dict()
    weights["blocks.0.attention.former"] = weights.pop("blocks.0.attention.gate.weight")
    folder = write_checkpoint(run_dir, 200, save(weights))
    message = (
        "it lacks blocks.0.attention.gate.weight, and it has blocks.0.attention.former. Another version of the code "
        "wrote it: check out the commit recorded in its run's environment.json"
    )
    with pytest.raises(NoCheckpoint, match=re.escape(message)):
        load_model(folder)


def test_weights_with_other_shapes_are_rejected(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path)
    model = make_config().model
    wider = NSATransformer(model.model_copy(update={"mlp_hidden": model.hidden_width + 1}), seed=1).state_dict()
    folder = write_checkpoint(run_dir, 200, save(wider))
    message = (
        f"blocks.0.mlp.up.weight has shape [{model.hidden_width + 1}, {model.dim}], the model needs "
        f"[{model.hidden_width}, {model.dim}]. It was trained with another configuration: restore its config.yaml"
    )
    with pytest.raises(NoCheckpoint, match=re.escape(message)):
        load_model(folder)


def test_non_finite_weights_are_refused(tmp_path: Path) -> None:
    """The newest checkpoint of a halted run may already be broken."""
    run_dir = write_run(tmp_path)
    weights = NSATransformer(make_config().model, seed=1).state_dict()
    problem = "head.weight: 1 of 8,192 values are NaN or infinite in torch."
    for step, value, dtype in (
        (50, math.nan, torch.float32),
        (100, -math.nan, torch.float32),
        (150, -math.inf, torch.bfloat16),
        (200, 70_000.0, torch.float16),
    ):
        weights["head.weight"].view(-1)[7] = value
        folder = write_checkpoint(run_dir, step, save(weights))
        with pytest.raises(NoCheckpoint, match=f"{folder}: {problem}{str(dtype)[6:]}; use an earlier checkpoint"):
            load_model(folder, dtype=dtype)
    assert load_model(folder).head.weight.max() == 70_000


def test_edited_configuration_is_refused(tmp_path: Path) -> None:
    """An edit that keeps the shapes of the weights would compute something else in silence."""
    config = make_config()
    run_dir = write_run(tmp_path)
    folder = write_checkpoint(run_dir, 200, save(NSATransformer(config.model, seed=1).state_dict()))
    edited = make_config(model__rope_theta=5e5, nsa__n_sel=4)
    harmless = make_config(train__log_every=7, train__micro_batch_size=1)
    for state, words in (
        ({}, "settings not recorded"),
        ({"trajectory": 7}, "settings not recorded"),
        (
            {"trajectory": get_trajectory_settings(config)},
            "model.rope_theta: 10000.0 in the checkpoint, 500000.0 now; nsa.n_sel: 16 in the checkpoint, 4 now",
        ),
    ):
        (folder / "state.json").write_text(json.dumps(state))
        names = ("model.safetensors", "state.json")
        entries = {name: checkpoint_files.read_manifest_entry(folder / name) for name in names}
        manifest = checkpoint_files.format_manifest(200, entries, {"config_hash": config.hash()})
        (folder / "MANIFEST.json").write_text(manifest)
        (run_dir / "config.yaml").write_text(config.to_yaml())
        load_model(run_dir)
        (run_dir / "config.yaml").write_text(edited.to_yaml())
        problem = (
            f"{run_dir / 'config.yaml'}: expected the configuration of the checkpoint step-00000200 with hash "
            f"{config.hash()}, got {edited.hash()} ({words}); restore the file"
        )
        with pytest.raises(NoCheckpoint, match=re.escape(problem)):
            load_model(run_dir)
    (run_dir / "config.yaml").write_text(harmless.to_yaml())
    load_model(run_dir)
