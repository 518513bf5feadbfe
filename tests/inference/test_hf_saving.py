"""Folders for `transformers`: exported, saved and loaded again."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from fake_run import make_config, write_checkpoint, write_run
from hf_models import INDEXER, make_model, sample_bytes
from safetensors.torch import load_file, save
from tiny_models import TINY_NSA, tiny_config

from nsa_lab.config import ConfigError, RunConfig
from nsa_lab.inference import hf
from nsa_lab.model import NSATransformer

ROOT = Path(__file__).parents[2]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    run_dir = write_run(tmp_path)
    write_checkpoint(run_dir, 200, save(NSATransformer(make_config().model, seed=1).state_dict()))
    return run_dir


def read_folder(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


# A Trainer with label smoothing shifts the labels only for classes in the list of names.
LOAD = """
import sys
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
source, target = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained(source, trust_remote_code=True)
out = model.generate(**tokenizer('def ', return_tensors='pt'), max_new_tokens=5, eos_token_id=None)
assert out.shape == (1, 10), out.shape
assert type(model).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
assert AutoModel.from_pretrained(source, trust_remote_code=True)(out).last_hidden_state.shape[:2] == (1, 10)
model.save_pretrained(target)
tokenizer.save_pretrained(target)
"""


def test_a_folder_with_weights_that_are_not_finite_is_refused(tmp_path: Path) -> None:
    hf.NSALabForCausalLM(hf.NSALabConfig(tiny_config().model_dump())).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.head.weight"].view(-1)[3] = 1e30  # finite in float32
    (tmp_path / "model.safetensors").write_bytes(save(weights, {"format": "pt"}))
    hf.NSALabForCausalLM.from_pretrained(tmp_path)
    for value, dtype in ((1e30, torch.float16), (math.nan, torch.float32)):
        weights["model.head.weight"].view(-1)[3] = value
        (tmp_path / "model.safetensors").write_bytes(save(weights, {"format": "pt"}))
        for options in ({}, {"output_loading_info": True}):
            with pytest.raises(ConfigError, match=rf"{tmp_path}: model\.head\.weight: 1 of .* in {dtype}; save or export"):
                transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype, **options)


def test_arguments_that_contradict_the_architecture_are_rejected(tmp_path: Path) -> None:
    """They would have no effect on the model."""
    architecture = tiny_config().model_dump()
    for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_key_value_heads", "head_dim", "intermediate_size"):
        with pytest.raises(ValueError, match=rf"{name} = 1: expected \d+, as in the architecture"):
            hf.NSALabConfig(architecture, **{name: 1})
    with pytest.raises(ValueError, match="NSALabConfig: use_cache = 'false': expected True, False or None"):
        hf.NSALabConfig(architecture, use_cache="false")
    with pytest.raises(ValueError, match=r"branches= belongs to the architecture; use architecture="):
        hf.NSALabConfig(branches=["sel"])
    for name, nearest in (
        ("n_layer", "architecture={'n_layers': ...}"),
        ("rope_thetas", "architecture={'rope_theta': ...}"),
        ("hidden_sizes", "hidden_size="),
        ("num_hidden_layer", "num_hidden_layers="),
        ("max_position_embedding", "max_position_embeddings="),
        ("backends", "backend="),
    ):
        with pytest.raises(ValueError, match=re.escape(f"NSALabConfig: {name}= is no setting; the nearest is {nearest}")):
            hf.NSALabConfig(architecture, **{name: 1})
    for wrong in (-4, 0, 2.5, True):
        with pytest.raises(ValueError, match=f"max_position_embeddings = {wrong}: expected an integer of at least 1"):
            hf.NSALabConfig(architecture, max_position_embeddings=wrong)
    # Names that transformers and other packages pass.
    options = transformers.PreTrainedConfig().to_dict() | vars(transformers.GenerationConfig())
    names = ("num_labels", "pruned_heads", "sep_token_id", "torch_dtype", "hidden_act", "my_note")
    options = {name: value for name, value in options.items() if name != "model_type"} | dict.fromkeys(names, None)
    hf.NSALabConfig(
        architecture, **{name: value for name, value in options.items() if not name.startswith("_")} | {"num_labels": 2}
    )
    hf.NSALabForCausalLM(hf.NSALabConfig(architecture)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="num_hidden_layers = 1: expected 2"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path, num_hidden_layers=1)


@pytest.mark.parametrize("how", ["configuration", "by hand", "untied"])
def test_tied_embedding_is_saved(how: str, tmp_path: Path) -> None:
    """The head has the weights of the embedding as configured, and also after loading if they were tied by hand."""
    config = hf.NSALabConfig(tiny_config().model_dump(), tie_word_embeddings=how != "by hand")
    model = hf.NSALabForCausalLM(config).eval()
    if how == "by hand":
        model.model.head.weight = model.model.embedding.weight
    if how == "untied":
        model.model.head.weight = torch.nn.Parameter(model.model.head.weight + 1)
    model.save_pretrained(tmp_path)
    loaded = hf.NSALabForCausalLM.from_pretrained(tmp_path)
    tokens = torch.randint(0, 37, (1, 20), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(loaded(tokens).logits, model(tokens).logits, rtol=0, atol=0)
    assert (loaded.model.head.weight is loaded.model.embedding.weight) == (how != "untied")


def test_special_and_added_tokens_are_decoded_by_name(tokenizer: hf.NSALabTokenizer) -> None:
    ids = [255, *b"a", 255, *"\u20ac".encode()]
    assert (
        tokenizer.decode(ids) == "<|separator|>a<|separator|>\u20ac"
        and tokenizer.decode(ids, skip_special_tokens=True) == "a\u20ac"
    )
    assert tokenizer.convert_tokens_to_ids(["\u20ac", "<|im_end|>", "\xff", "a"]) == [None, None, None, 97]
    for wrong in (-1, 256):
        with pytest.raises(ValueError, match=f"id {wrong}: expected 0 to 255"):
            tokenizer.decode([wrong])
    more = hf.NSALabTokenizer()
    more.add_special_tokens({"pad_token": "[PAD]"})
    assert len(more) == 257 and more.decode([97, 256]) == "a[PAD]"


def test_tokenizer_encodes_bytes_after_a_separator(tokenizer: hf.NSALabTokenizer, tmp_path: Path) -> None:
    for text in ("h\u00e9llo", "", "\n a  b", "\x00\x7f"):
        ids = tokenizer(text)["input_ids"]
        assert ids == [255, *text.encode()] and tokenizer.decode(ids, skip_special_tokens=True) == text
    tokenizer.save_pretrained(tmp_path)
    again = hf.NSALabTokenizer.from_pretrained(tmp_path)
    assert len(again) == 256 and again.padding_side == "left" and again("a")["input_ids"] == [255, 97]
    assert {again.bos_token_id, again.eos_token_id, again.pad_token_id} == {255}


def test_exported_run_equals_the_model(run_dir: Path, tmp_path: Path) -> None:
    folder = hf.export(run_dir, tmp_path / "exported", max_shard_size="50KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    weights = NSATransformer(make_config().model, seed=1).state_dict()
    assert all(torch.equal(model.model.state_dict()[name], weights[name]) for name in weights)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == 255
    result = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer)("def ", max_new_tokens=3)
    assert result[0]["generated_text"].startswith("def ")
    with pytest.raises(ConfigError, match="expected an empty or new folder"):
        hf.export(run_dir, folder)


@pytest.mark.parametrize(
    "options",
    [
        {"branches": ("cmp", "sel"), "shared_kv": True},
        {"branches": ("sel",), "nsa": TINY_NSA.model_copy(update={"scores": "mean_key", "sink_blocks": 0})},
        {"branches": ("win",)},
        {"d_k": 32, "selection_loss": 0.1, "indexer_block": 2, "indexer_keys": "shared", "indexer_dtype": "mxfp4"},
        {"selection_loss": 0.1, "indexer_block": 2, "indexer_heads": 2, "indexer_dtype": "fp8", "indexer_every": 2},
    ],
)
def test_every_setting_of_the_architecture_is_saved(options: dict, tmp_path: Path) -> None:
    model = make_model(**options).float().eval()
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.model.config == model.model.config == tiny_config(vocab_size=256, **options)
    tokens, choices = sample_bytes(2, 40), {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    assert torch.equal(loaded(tokens).logits, model(tokens).logits)
    assert torch.equal(loaded.generate(tokens, **choices), model.generate(tokens, **choices, use_cache=False))


def test_missing_weights_are_those_of_a_new_model(tmp_path: Path) -> None:
    """`transformers` warns of them. Without an initialization, they would be whatever the memory contained."""
    make_model(**INDEXER).float().save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    missing = ["model.blocks.0.mlp.down.weight", "model.blocks.1.attention.indexer.qk.weight", "model.norm.weight"]
    kept = {name: weight + 1 for name, weight in weights.items() if name not in missing}
    (tmp_path / "model.safetensors").write_bytes(save(kept, {"format": "pt"}))
    torch.manual_seed(5)
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert info["missing_keys"] == set(missing)
    torch.manual_seed(5)
    with torch.device("meta"):
        NSATransformer(loaded.model.config)  # the model without weights, which draws a seed too
    new = NSATransformer(loaded.model.config)
    for name, weight in loaded.state_dict().items():
        assert torch.equal(weight, kept[name] if name in kept else new.state_dict()[name.removeprefix("model.")]), name


def test_requested_step_is_exported_with_the_settings_of_its_stage(tmp_path: Path) -> None:
    stage = {"steps": 100, "seq_len": 1024, "batch_size": 4, "lr": 1e-3}
    stages = [stage, {**stage, "rope_theta": 500_000.0}]
    config = RunConfig.from_dict({**make_config().to_dict(), "train": {"stages": stages}})
    run_dir = write_run(tmp_path, config)
    states = {step: NSATransformer(config.model, seed=step).state_dict() for step in (100, 200)}
    for step, base in ((100, config.model.rope_theta), (200, 500_000.0)):
        write_checkpoint(run_dir, step, save(states[step]))
        out = hf.export(run_dir, tmp_path / f"out{step}", step=step)
        exported = transformers.AutoModelForCausalLM.from_pretrained(out)
        assert (
            torch.equal(exported.model.head.weight, states[step]["head.weight"])
            and exported.model.config.rope_theta == base
        )
    first = transformers.AutoModelForCausalLM.from_pretrained(hf.export(run_dir, tmp_path / "again", step=100))
    assert torch.equal(first.model.head.weight, states[100]["head.weight"]), "the newest checkpoint is another one"


def test_model_saved_without_a_tokenizer_can_be_imported(tmp_path: Path) -> None:
    """A Trainer checkpoint has every file that auto_map names, and no source file of the library."""
    make_model().save_pretrained(tmp_path)
    auto_map = transformers.AutoConfig.from_pretrained(tmp_path).auto_map
    assert {name.split(".")[0] for name in auto_map.values()} == {"nsa_lab_in_transformers"}
    assert {path.name for path in tmp_path.glob("*.py")} == {"nsa_lab_in_transformers.py"}


@pytest.mark.slow
def test_saved_folders_equal_the_exported_one(run_dir: Path, tmp_path: Path) -> None:
    """Saved again in this process, and in a fresh one that has not imported nsa_lab."""
    folders = [hf.export(run_dir, tmp_path / "exported"), tmp_path / "here", tmp_path / "fresh"]
    transformers.AutoModelForCausalLM.from_pretrained(folders[0]).save_pretrained(folders[1])
    transformers.AutoTokenizer.from_pretrained(folders[0]).save_pretrained(folders[1])
    environment = {"PYTHONPATH": str(ROOT), "HF_HOME": str(tmp_path / "hf"), "PATH": "", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", LOAD, str(folders[0]), str(folders[2])]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    first = read_folder(folders[0])
    assert {"config.json", "nsa_lab_in_transformers.py", "tokenizer_config.json", "model.safetensors"} < first.keys()
    for folder in folders[1:]:
        saved = read_folder(folder)
        assert saved.keys() == first.keys()
        assert [name for name in first if saved[name] != first[name]] == []


def test_trained_length_is_exported(tmp_path: Path) -> None:
    """The longest sequences until the exported step."""
    stage = {"steps": 100, "seq_len": 512, "batch_size": 4, "lr": 1e-3}
    stages = [stage, {**stage, "seq_len": 2048}, {**stage, "seq_len": 1024}]
    config = RunConfig.from_dict({**make_config().to_dict(), "train": {"stages": stages}})
    run_dir = write_run(tmp_path, config)
    for step, length in ((100, 512), (200, 2048), (300, 2048)):
        write_checkpoint(run_dir, step, save(NSATransformer(config.model, seed=step).state_dict()))
        folder = hf.export(run_dir, tmp_path / f"out{step}", step=step)
        assert transformers.AutoConfig.from_pretrained(folder).max_position_embeddings == length
        assert transformers.AutoTokenizer.from_pretrained(folder).model_max_length == length
    assert not hasattr(hf.NSALabConfig(), "max_position_embeddings")


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, INDEXER])
def test_exported_program_takes_other_lengths_and_masks(options: dict) -> None:
    """With padding on both sides; documents in positions are refused, because a program cannot read values."""
    model, tokens = make_model(**options).float().eval(), sample_bytes(3, 40)
    dims = {0: torch.export.Dim("B", min=1, max=16), 1: torch.export.Dim("T", min=2, max=4096)}
    arguments = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    run = torch.export.export(model, (), kwargs=arguments, dynamic_shapes=dict.fromkeys(arguments, dims)).module()
    for length in (7, 33, 90):
        tokens = sample_bytes(2, length)
        mask = torch.ones_like(tokens)
        mask[0, :3] = mask[1, -2:] = 0
        logits, expected = (call(input_ids=tokens, attention_mask=mask).logits for call in (run, model))
        torch.testing.assert_close(logits[mask.bool()], expected[mask.bool()], rtol=0, atol=2e-6)
    with pytest.raises(NotImplementedError, match=r"position_ids: not supported by torch\.export"):
        torch.export.export(model, (), kwargs={"input_ids": tokens, "position_ids": torch.arange(90)[None]})
