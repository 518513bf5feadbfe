"""Settings of a conversion run that follow from its source."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fake_run import make_config, write_checkpoint, write_run
from safetensors.torch import save
from tiny_dense_models import FEW, YARN, make_dense
from transformers import PreTrainedTokenizerFast

from nsa_lab import NSATransformer, sparsify
from nsa_lab.cli.sweep_command import sweep_command
from nsa_lab.config import ConfigError, RunConfig
from nsa_lab.convert import describe_source, has_indexers, load_initial_weights
from nsa_lab.runs.sweep_runner import Sweep

PLAIN: dict[str, Any] = {"attention_bias": False, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}


def save_tokenizer(folder: Path, n_tokens: int) -> None:
    from tokenizers import Tokenizer, models

    vocabulary = {"<|endoftext|>": 0, **{str(index): index for index in range(1, n_tokens)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<|endoftext|>"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>").save_pretrained(folder)


def test_a_pretrained_model_gives_sizes_weights_and_tokenizer(tmp_path: Path) -> None:
    dense = make_dense(**PLAIN)
    dense.save_pretrained(tmp_path / "dense")
    save_tokenizer(tmp_path / "dense", 97)
    settings = describe_source(str(tmp_path / "dense"), tmp_path / "outputs")
    preset = tmp_path / "preset.yaml"
    preset.write_text("name: x\nmodel: {branches: [sel], indexer_block: 1, selection_loss: 0.05}\nnsa: {n_sel: 4}\n")
    config = RunConfig.from_yaml(preset, settings)
    assert (config.model.dim, config.model.n_heads, config.model.rope_theta) == (48, 6, 500.0)
    yarn = make_dense(**PLAIN | {"rope_parameters": YARN})
    yarn.config.save_pretrained(tmp_path / "yarn")
    save_tokenizer(tmp_path / "yarn", 97)
    scaled = RunConfig.from_yaml(preset, describe_source(str(tmp_path / "yarn"), tmp_path / "outputs")).model.rope_scaling
    assert scaled is not None and (scaled.rope_type, scaled.factor, scaled.beta_fast) == ("yarn", 8.0, 32.0)
    assert Path(config.data.tokenizer).read_bytes()
    assert describe_source(str(tmp_path / "dense"), tmp_path / "outputs") == settings
    model = NSATransformer(config.model_at(0), seed=0)
    load_initial_weights(model, config.train.initial_weights or "")
    assert torch.equal(model.blocks[1].mlp.down.weight, dense.model.layers[1].mlp.down_proj.weight)
    save_tokenizer(tmp_path / "dense", 98)
    with pytest.raises(ConfigError, match="at most 97 tokens, as the model embeds, got 98"):
        describe_source(str(tmp_path / "dense"), tmp_path / "outputs")


def test_a_sweep_gets_the_settings_of_a_conversion_from_its_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_dense(**PLAIN).save_pretrained(tmp_path / "dense")
    save_tokenizer(tmp_path / "dense", 97)
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "forms.yaml"
    file.write_text(
        "preset: convert_tiny\ncommon: {train.initial_weights: dense}\nseeds: [0]\n"
        "variants: {base: {}, wider: {model.indexer_heads: 2}, other: {data.tokenizer: own.json}}\n"
    )
    loaded: list[Sweep] = []
    monkeypatch.setattr("nsa_lab.cli.sweep_command._show_plan", loaded.append)
    sweep_command(str(file), tmp_path / "outputs", dry_run=True)
    settings = describe_source(str(tmp_path / "dense"), tmp_path / "outputs")
    base, wider, other = (run.config for run in loaded[0].runs)
    for config in (base, wider):
        assert {key: config.settings()[key] for key in ("model.dim", "model.mlp_hidden", "data.tokenizer")} == {
            key: settings[key] for key in ("model.dim", "model.mlp_hidden", "data.tokenizer")
        }
    assert base.train.initial_weights == str((tmp_path / "dense").resolve())
    assert (base.model.indexer_heads, wider.model.indexer_heads) == (1, 2)
    assert other.data.tokenizer == "own.json", "the sweep takes precedence"
    file.write_text(file.read_text().replace("initial_weights: dense", "initial_weights: absent"))
    with pytest.raises(ConfigError, match="variants base, wider, other: 'absent': no such folder; give a folder"):
        sweep_command(str(file), tmp_path / "outputs", dry_run=True)


def test_a_dense_run_is_a_source(tmp_path: Path) -> None:
    config = make_config(model__attention="dense")
    run_dir = write_run(tmp_path, config=config)
    dense = NSATransformer(config.model, seed=3)
    write_checkpoint(run_dir, 3, save(dense.state_dict()))
    settings = describe_source(str(run_dir), tmp_path)
    sparse = {"attention": "nsa", "branches": ("sel",), "indexer_block": 1, "selection_loss": 0.05, "nsa": FEW}
    own = {key.removeprefix("model."): value for key, value in settings.items() if key.startswith("model.")}
    model = NSATransformer(config.model.model_copy(update={**own, **sparse}), seed=0)
    load_initial_weights(model, settings["train.initial_weights"])
    state = model.state_dict()
    assert all(torch.equal(state[name], value) for name, value in dense.state_dict().items())
    # A converted run gives the form of its indexer, with the RoPE base of its last stage.
    stage = {"steps": 2, "seq_len": 64, "batch_size": 1, "lr": 1e-3}
    form = {"branches": ["sel"], "indexer_block": 2, "indexer_heads": 2, "selection_loss": 0.05}
    sections = make_config(**{f"model__{key}": value for key, value in form.items()}).to_dict()
    sections["nsa"]["block_reduction"] = "max"
    sections["train"] = {"stages": [stage, {**stage, "rope_theta": 1e6}]}
    settings = describe_source(str(write_run(tmp_path / "converted", RunConfig.from_dict(sections))), tmp_path)
    assert (settings["model.indexer_block"], settings["model.indexer_heads"], settings["model.rope_theta"]) == (2, 2, 1e6)
    assert (settings["nsa.block_reduction"], settings["nsa.head_reduction"]) == ("max", "sum")
    assert "model.rope_scaling" not in settings, "a preset may extend the context"
    with pytest.raises(ConfigError, match="expected a dense run, or one with the selected branch only"):
        describe_source(str(write_run(tmp_path / "other")), tmp_path)


def test_sources_with_trained_indexers(tmp_path: Path) -> None:
    make_dense(**PLAIN).save_pretrained(tmp_path / "dense")
    sparsify(make_dense(**PLAIN), FEW).save_pretrained(tmp_path / "converted")
    sparsify(make_dense(**PLAIN), FEW.model_copy(update={"scores": "mean_key"})).save_pretrained(tmp_path / "mean_keys")
    form = {"branches": ["sel"], "indexer_block": 2, "selection_loss": 0.05}
    indexed = write_run(tmp_path / "indexed", config=make_config(**{f"model__{key}": value for key, value in form.items()}))
    dense = write_run(tmp_path / "run", config=make_config(model__attention="dense"))
    sources = [tmp_path / "dense", tmp_path / "converted", tmp_path / "mean_keys", indexed, dense]
    assert [has_indexers(str(source)) for source in sources] == [False, True, False, True, False]
