"""Converted models on disk: whole models and adapters. Unsupported models are refused in one line."""

from __future__ import annotations

import copy
import hashlib
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from looping import looped
from safetensors.torch import load_file, save_file
from tiny_dense_models import ALL, FAMILIES, FEW, make_dense, make_tokens
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from nsa_lab import NSAConfig, load_model, sparsify
from nsa_lab.config import ConfigError
from nsa_lab.config.optional_deps import MissingPackage
from nsa_lab.convert import (
    check_tokenizer,
    convert_with_trained_indexers,
    load_adapter,
    load_dense,
    make_nsa_transformer,
    read_adapter_info,
    save_adapter,
)
from nsa_lab.inference.hf import CACHE_ARGUMENT

ROOT = Path(__file__).parents[2]


def make_trained(family: str = "Llama", **options: Any) -> Any:
    """Return a converted model whose indexer has other weights than a new one."""
    model = sparsify(make_dense(family), FEW, **options)
    for name, parameter in model.named_parameters():
        if ".indexer." in name:
            parameter.data.normal_(std=0.3, generator=torch.Generator().manual_seed(2))
    return model


@looped
@pytest.mark.parametrize("family", FAMILIES)
def test_a_whole_model_is_saved_and_loaded(family: str, tmp_path: Path) -> None:
    model, tokens = make_trained(family, indexer_block=2, indexer_order=("pool", "rotate")), make_tokens()
    model.save_pretrained(tmp_path)
    for loaded in (type(model).from_pretrained(tmp_path), AutoModelForCausalLM.from_pretrained(tmp_path)):
        assert type(loaded) is type(model) and not loaded.training
        assert torch.equal(loaded(tokens).logits, model(tokens).logits)
    dense = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="sdpa")
    torch.testing.assert_close(dense(tokens).logits, make_dense(family)(tokens).logits, atol=1e-4, rtol=1e-4)
    with torch.no_grad():
        model.lm_head.weight[0, 0] = math.nan
    model.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"1 of .* values are NaN or infinite in torch\.float32; save or export"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.slow
def test_a_fresh_process_loads_a_whole_model(tmp_path: Path) -> None:
    """`trust_remote_code=True` imports nsa_lab; without it, transformers does not load a dense model silently."""
    model, tokens = make_trained(), make_tokens()
    model.save_pretrained(tmp_path)
    torch.save(model(tokens).logits, tmp_path / "logits.pt")
    code = (
        "import sys, torch, transformers\n"
        "folder = sys.argv[1]\n"
        "try: transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False)\n"
        "except ValueError: pass\n"
        "else: sys.exit('loaded without nsa_lab')\n"
        "model = transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)\n"
        "tokens = torch.randint(97, (2, 50), generator=torch.Generator().manual_seed(0))\n"
        "assert torch.equal(model(tokens).logits, torch.load(folder + '/logits.pt'))\n"
        # A Trainer with label smoothing shifts the labels only for classes in this list.
        "from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES\n"
        "assert type(model).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, cwd=ROOT, timeout=300)


def test_an_adapter_is_saved_and_loaded(tmp_path: Path) -> None:
    model, tokens = make_trained(indexer_keys="shared"), make_tokens()
    info = save_adapter(model, tmp_path / "adapter", base_model="base", dtype="float32")
    assert info == read_adapter_info(tmp_path / "adapter")
    assert info.n_bytes < 1000 + 4 * sum(p.numel() for n, p in model.named_parameters() if ".indexer." in n)
    loaded = load_adapter(make_dense(), tmp_path / "adapter")
    assert torch.equal(loaded(tokens).logits, model(tokens).logits)
    make_dense().save_pretrained(tmp_path / "base")
    loaded = load_model(tmp_path / "adapter", base=tmp_path / "base")
    assert torch.equal(loaded(tokens).logits, model(tokens).logits)
    assert save_adapter(model, tmp_path / "half", base_model="base").n_bytes < 0.6 * info.n_bytes


@looped
@pytest.mark.parametrize("folder", ["whole", "adapter"])
def test_options_that_were_not_stored_are_not_those_of_today(folder: str, tmp_path: Path) -> None:
    """`sparsify` once had one index head and bf16 keys by default, and stored only the options that it was given."""
    model, tokens = make_trained(indexer_heads=1, indexer_dtype="bf16"), make_tokens()
    if folder == "whole":
        model.save_pretrained(tmp_path)
        path, key = tmp_path / "config.json", "sparse_attention"
    else:
        save_adapter(model, tmp_path, base_model="tiny", dtype="float32")
        path, key = tmp_path / "adapter.json", "settings"
    stored = json.loads(path.read_text())
    for name in ("indexer_heads", "indexer_dtype"):
        del stored[key]["indexer"][name]
    path.write_text(json.dumps(stored))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path) if folder == "whole" else load_adapter(make_dense(), tmp_path)
    assert torch.equal(loaded(tokens).logits, model(tokens).logits)


def test_an_int8_adapter_rounds_each_row_by_half_a_step(tmp_path: Path) -> None:
    model = make_trained("Qwen3", indexer_heads=2)  # with norms, whose weights are stored too
    with torch.no_grad():
        next(value for name, value in model.named_parameters() if name.endswith("indexer.qk.0.weight"))[1] = 0
    half = save_adapter(model, tmp_path / "half", base_model="base")
    info = save_adapter(model, tmp_path / "int8", base_model="base", dtype="int8")
    assert info.dtype == "int8" and info.n_bytes < 0.65 * half.n_bytes  # tiny rows, so scales count
    loaded = dict(load_adapter(make_dense("Qwen3"), tmp_path / "int8").named_parameters())
    for name, value in model.named_parameters():
        if ".indexer." in name:
            step = value.abs().amax(-1, keepdim=True) / 127 if value.dim() > 1 else value.abs() / 128
            assert bool(((loaded[name] - value).abs() <= 0.501 * step).all()), name
    path = tmp_path / "int8/adapter.safetensors"
    tensors = {name: value for name, value in load_file(path).items() if not name.endswith(".row_scale")}
    save_file(tensors, path)
    info_path = tmp_path / "int8/adapter.json"
    signed = info.model_copy(update={"sha256": hashlib.sha256(path.read_bytes()).hexdigest()})
    info_path.write_text(signed.model_dump_json())
    with pytest.raises(ConfigError, match="expected a scale for each row of int8"):
        load_adapter(make_dense("Qwen3"), tmp_path / "int8")


def describe(model: Any) -> tuple[Any, ...]:
    """Return everything that a conversion changes: classes, modules, hooks, configuration, weights and outputs."""
    hooks = [
        (name, type(module), len(module._forward_pre_hooks), len(module._forward_hooks))
        for name, module in model.named_modules()
    ]
    config = model.config.to_dict() if hasattr(model, "config") else {"model_type": None}
    weights = {name: (value.data_ptr(), value.sum().item()) for name, value in model.state_dict().items()}
    output = model(make_tokens())[0].tolist() if config["model_type"] in ("llama", "nsa_lab_llama") else None
    return type(model), hooks, config, weights, output


@contextmanager
def refuses(model: Any, message: str) -> Iterator[None]:
    """Expect a ConfigError of one line that leaves `model` as it was."""
    before = describe(model)
    with pytest.raises(ConfigError, match=message) as caught:
        yield
    assert "\n" not in str(caught.value)
    assert describe(model) == before


def test_an_adapter_that_cannot_be_loaded_does_not_change_the_model(tmp_path: Path) -> None:
    """The settings in adapter.json describe other weights than adapter.safetensors has, or no conversion of the model."""
    save_adapter(make_trained(), tmp_path, base_model="base")
    path, weights = tmp_path / "adapter.json", load_file(tmp_path / "adapter.safetensors")
    stored = json.loads(path.read_text())
    model = make_dense()

    def load(message: str, **settings: Any) -> None:
        path.write_text(json.dumps(stored | {"settings": stored["settings"] | settings}))
        with refuses(model, message):
            load_adapter(model, tmp_path)

    for indexer in ({"indexer_width": 4}, {"indexer_heads": 3}, {"indexer_every": 2}, {"indexer_keys": "shared"}):
        load("do not match the settings", indexer=stored["settings"]["indexer"] | indexer)
    load("indexer_width = 3", indexer=stored["settings"]["indexer"] | {"indexer_width": 3})
    load("n_sel", nsa={"n_sel": 0})
    load("backend = 'cuda'", backend="cuda")
    for name, value in (("indexer", 3), ("nsa", []), ("backend", None)):
        load(rf"settings\.{name}: expected a", **{name: value})
    first = next(iter(weights))
    for spoiled in ({first: weights[first][:-1]}, {first: weights[first][None]}, {"model.layers.9.x": torch.ones(2)}):
        save_file(weights | spoiled, tmp_path / "adapter.safetensors")
        content = (tmp_path / "adapter.safetensors").read_bytes()
        path.write_text(json.dumps(stored | {"sha256": hashlib.sha256(content).hexdigest()}))
        with refuses(model, "do not match the settings"):
            load_adapter(model, tmp_path)
    dense, shallow = make_dense("SmolLM2"), make_nsa_transformer(make_dense("SmolLM2", num_hidden_layers=2), FEW)
    with refuses(dense, r"model\.n_layers = 2: expected 3"):
        convert_with_trained_indexers(dense, shallow)
    save_adapter(make_trained(), tmp_path, base_model="base")
    for other, message in ((torch.nn.Linear(2, 2), "got a Linear"), (sparsify(make_dense(), FEW), "converted already")):
        with refuses(other, message):
            load_adapter(other, tmp_path)
    assert load_adapter(model, tmp_path) is model


def test_an_adapter_of_another_model_or_with_damage_is_refused(tmp_path: Path) -> None:
    save_adapter(make_trained(), tmp_path, base_model="base")
    for family, options in (("Qwen3", {}), ("Llama", {"num_hidden_layers": 2}), ("Llama", {"rope_parameters": None})):
        with pytest.raises(ConfigError, match="expected a model of the architecture of base"):
            load_adapter(make_dense(family, **options), tmp_path)
    spoiled = make_trained()
    with torch.no_grad():
        next(value for name, value in spoiled.named_parameters() if "indexer" in name).view(-1)[3] = -math.inf
    save_adapter(spoiled, tmp_path / "infinite", base_model="base")
    with pytest.raises(ConfigError, match=r"1 of .* values are NaN or infinite; download or save the adapter again"):
        load_adapter(make_dense(), tmp_path / "infinite")
    for parameter in (value for name, value in spoiled.named_parameters() if "indexer" in name):
        parameter.data.fill_(1e5)
    with pytest.raises(ConfigError, match=r"dtype = 'float16': .* has values that it cannot hold"):
        save_adapter(spoiled, tmp_path / "float16", base_model="base", dtype="float16")
    info, path = json.loads((tmp_path / "adapter.json").read_text()), tmp_path / "adapter.safetensors"
    (tmp_path / "adapter.json").write_text(json.dumps(info | {"settings": {}}))
    with pytest.raises(ConfigError, match=r"settings\.backend: .* missing"):
        load_adapter(make_dense(), tmp_path)
    save_file({name: value.long() for name, value in load_file(path).items()}, tmp_path / "integers")
    content, own = path.read_bytes(), (tmp_path / "integers").read_bytes()
    path.write_bytes(own)
    (tmp_path / "adapter.json").write_text(json.dumps(info | {"sha256": hashlib.sha256(own).hexdigest()}))
    with pytest.raises(ConfigError, match="expected a floating-point type or int8"):
        load_adapter(make_dense(), tmp_path)
    (tmp_path / "adapter.json").write_text(json.dumps(info))
    path.write_bytes(content[:-1])
    with pytest.raises(ConfigError, match="another hash"):
        load_adapter(make_dense(), tmp_path)
    (tmp_path / "adapter.json").write_text('{"version": 1}')
    with pytest.raises(ConfigError, match="base_model"):
        read_adapter_info(tmp_path)
    with pytest.raises(ConfigError, match=r"adapter\.json"):
        read_adapter_info(tmp_path / "missing")


def make_config(**values: Any) -> LlamaForCausalLM:
    """Return a tiny Llama model whose configuration is then changed."""
    model = make_dense()
    for name, value in values.items():
        setattr(model.config, name, value)
    return model  # pyright: ignore[reportReturnType]


REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (lambda: torch.nn.Linear(2, 2), {}, "expected a causal language model of transformers, got a Linear"),
    (lambda: make_config(model_type="gpt2"), {}, "model_type = 'gpt2': expected one of llama"),
    (lambda: make_config(model_type="gpt_oss"), {}, "sinks"),
    (lambda: make_config(model_type="deepseek_v3", kv_lora_rank=8), {}, "multi-head latent attention"),
    (lambda: make_config(model_type="gemma2", attn_logit_softcapping=50.0), {}, "attn_logit_softcapping = 50.0"),
    (lambda: make_config(sliding_window=16), {}, "sliding_window = 16"),
    (lambda: make_config(attention_dropout=0.1), {}, "attention_dropout = 0.1"),
    (lambda: make_config(rope_parameters={"rope_type": "dynamic", "factor": 2.0}), {}, "rope_type = 'dynamic'"),
    (lambda: make_dense().model, {}, "LlamaModel is not supported"),
    (lambda: sparsify(make_dense(), FEW), {}, "converted already|expected one of"),
    (make_dense, {"config": {"n_sel": 4}}, "expected an NSAConfig, got a dict"),
    (make_dense, {"config": NSAConfig(scores="compressed")}, "nsa.scores"),
    (make_dense, {"indexer_width": 3}, "indexer_width = 3"),
    (make_dense, {"indexer_block": 3}, "indexer_block = 3"),
    (make_dense, {"indexer_blok": 1}, "indexer_blok"),
    (make_dense, {"backend": "cuda"}, "backend = 'cuda'"),
    (make_dense, {"config": FEW.model_copy(update={"scores": "mean_key"}), "indexer_block": 1}, "mean_key"),
]


@looped
@pytest.mark.parametrize(("make", "options", "message"), REFUSED)
def test_what_cannot_be_converted_is_refused_in_one_line(make: Any, options: dict[str, Any], message: str) -> None:
    model = make()
    with refuses(model, message):
        sparsify(model, **options)


def test_calls_that_cannot_be_answered_are_refused() -> None:
    model, tokens = sparsify(make_dense(), FEW), make_tokens()
    with pytest.raises(NotImplementedError, match="output_attentions"):
        model(tokens, output_attentions=True)
    with pytest.raises(ValueError, match=r"masks \[T, T\]"):
        model(tokens, attention_mask=torch.ones(2, 1, 50, 50))
    for kind in ("static", "quantized", "offloaded"):
        with pytest.raises(NotImplementedError, match=f"cache_implementation = '{kind}': expected None or 'dynamic'"):
            model.generate(tokens, cache_implementation=kind, max_new_tokens=2)
    assert torch.equal(*(model.generate(tokens, cache_implementation=kind, max_new_tokens=2) for kind in (None, "dynamic")))
    with pytest.raises(TypeError, match="SparseCache"):
        model(tokens, **{CACHE_ARGUMENT: DynamicCache()})
    cache = model(tokens, use_cache=True)[CACHE_ARGUMENT]
    with pytest.raises(ValueError, match="expected 2 rows"):
        model(tokens[:1], **{CACHE_ARGUMENT: cache})
    model.set_attn_implementation("nsa_lab_dense")
    with pytest.raises(NotImplementedError, match="no cache"):
        model(tokens, use_cache=True)


def test_sources_that_cannot_be_loaded_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    for name in ("notes", "folder/notes.txt"):
        (tmp_path / name).write_text("host")
    os.mkfifo(tmp_path / "fifo")
    for source, message in (
        ("no-such-folder", "no such folder"),
        ("", "'': no such folder"),
        (tmp_path / "x.gguf", "no such file"),
        (tmp_path / "notes", "notes: expected a folder, a GGUF file .* got a file without a suffix"),
        ("folder/notes.txt", r"notes\.txt: expected a folder, .* got a \.txt file"),
        (tmp_path / "fifo", "fifo: expected a folder, .* got another kind of file"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_dense(source)
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    with pytest.raises(ConfigError, match="model_type = 'mamba'"):
        load_dense(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="transformers cannot load it"):
        load_dense(tmp_path)
    folder = tmp_path / "dense"
    make_dense().save_pretrained(folder)
    weights, config = (folder / "model.safetensors").read_bytes(), (folder / "config.json").read_text()
    for content in (b"", weights[:1000], weights[:-10], b"text" * 100):
        (folder / "model.safetensors").write_bytes(content)
        with pytest.raises(ConfigError, match="transformers cannot load it"):
            load_dense(folder)
    spoiled = make_dense()
    with torch.no_grad():
        spoiled.lm_head.weight[0, 0] = math.nan
    spoiled.save_pretrained(folder)
    with pytest.raises(ConfigError, match=r"lm_head\.weight: 1 of .* values are NaN or infinite in torch\.float32"):
        load_dense(folder)
    (folder / "model.safetensors").write_bytes(weights)
    assert load_dense(folder)
    for key, value, message in (
        ("num_hidden_layers", 4, r"for model\.layers\.3\..* and \d+ others"),
        ("num_attention_heads", 0, "cannot load it"),
        ("hidden_size", "text", "cannot load it"),
    ):
        (folder / "config.json").write_text(json.dumps(json.loads(config) | {key: value}))
        with pytest.raises(ConfigError, match=message) as caught:
            load_dense(folder)
        assert "\n" not in str(caught.value)
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + bytes(100))
    with pytest.raises((ConfigError, MissingPackage)):
        load_dense(tmp_path / "bad.gguf")


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused() -> None:
    from tokenizers import Tokenizer, models

    def make_tokenizer(n: int) -> PreTrainedTokenizerFast:
        vocabulary = {str(index): index for index in range(n)}
        return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="0")))

    check_tokenizer(make_tokenizer(97), make_dense())
    with pytest.raises(ConfigError, match="at most 97 tokens, as the model embeds, got 98"):
        check_tokenizer(make_tokenizer(98), make_dense())


def test_the_class_of_a_family_needs_a_converted_configuration() -> None:
    from nsa_lab.convert.models import SparseLlamaConfig, SparseLlamaForCausalLM

    with pytest.raises(ConfigError, match="sparse_attention"):
        SparseLlamaForCausalLM(SparseLlamaConfig(**LlamaConfig().to_dict() | {"num_hidden_layers": 1}))


def test_a_text_of_at_most_n_sel_blocks_is_dense() -> None:
    dense, tokens = make_dense(), make_tokens(1, 64)
    torch.testing.assert_close(
        sparsify(copy.deepcopy(dense), ALL)(tokens).logits, dense(tokens).logits, atol=1e-4, rtol=1e-4
    )
