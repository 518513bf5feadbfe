"""The `transformers` model generates what `nsa_lab` generates: greedy, beam search, padded, from disk, in a pipeline."""

from __future__ import annotations

import copy
import functools
import math
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from fake_run import make_config, write_checkpoint, write_run
from looping import looped
from micro_batches import LENGTH, check_gradients
from safetensors.torch import load_file, save
from tiny_models import TINY_NSA, tiny_config
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers.utils.generic import find_labels

from nsa_lab.config import ConfigError, RunConfig
from nsa_lab.inference import generate, hf
from nsa_lab.model import NSATransformer

ROOT = Path(__file__).parents[2]
VARIANTS = [
    {},
    {"attention": "dense"},
    {"rotary_share": 0.5, "matching_heads": 1, "selection_loss": 0.1, "indexer_block": 2},
    {"nsa": TINY_NSA.model_copy(update={"phi": "mlp", "gate": "softmax"})},
    {"ngrams": 4, "ngram_rows": 100, "ngram_width": 5},
    {
        "branches": ("sel", "win"),
        "shared_kv": True,
        "selection_loss": 0.1,
        "indexer_block": 2,
        "indexer_every": 2,
        "indexer_order": ("pool", "norm", "rotate"),
        "indexer_dtype": "fp8",
    },
]
PROMPTS = ["a", "def generate(model, prompts):\n    ", "h\u00e9llo"]


@pytest.fixture(params=VARIANTS)
def model(request: pytest.FixtureRequest) -> hf.NSALabForCausalLM:
    torch.manual_seed(3)
    config = hf.NSALabConfig(tiny_config(vocab_size=256, **request.param).model_dump())
    return hf.NSALabForCausalLM(config).double().eval()


@pytest.fixture
def tokenizer() -> hf.NSALabTokenizer:
    return hf.NSALabTokenizer()


def tokenize_padded(tokenizer: hf.NSALabTokenizer, side: str = "left") -> dict[str, Tensor]:
    return tokenizer(PROMPTS, padding=True, padding_side=side, return_tensors="pt")


@pytest.mark.slow
def test_greedy_equals_generate(model: hf.NSALabForCausalLM, tokenizer: hf.NSALabTokenizer) -> None:
    """Prompts are padded on the left; the padding token also begins every prompt."""
    inputs = tokenize_padded(tokenizer)
    generated = model.generate(**inputs, max_new_tokens=30, do_sample=False, eos_token_id=None)
    rows = zip(inputs["input_ids"], inputs["attention_mask"].bool(), strict=True)
    expected = generate(model.model, [row[mask] for row, mask in rows], max_new_tokens=30)
    assert torch.equal(generated[:, inputs["input_ids"].shape[1] :], torch.stack(expected))


@pytest.mark.slow
@looped
@pytest.mark.parametrize("how", [{"num_beams": 4}, {"num_beams": 3, "length_penalty": 2.0, "num_return_sequences": 2}, {}])
def test_cached_generation_equals_full_forward_passes(
    model: hf.NSALabForCausalLM, tokenizer: hf.NSALabTokenizer, how: dict
) -> None:
    inputs = tokenize_padded(tokenizer)
    cached, full = (
        model.generate(**inputs, max_new_tokens=16, do_sample=False, use_cache=use_cache, **how)
        for use_cache in (True, False)
    )
    assert torch.equal(cached, full)


@looped
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_row_equals_single_row(model: hf.NSALabForCausalLM, tokenizer: hf.NSALabTokenizer, side: str) -> None:
    inputs = tokenize_padded(tokenizer, side)
    for use_cache in (False, True):
        logits = model(**inputs, use_cache=use_cache).logits
        for row, mask, row_logits in zip(inputs["input_ids"], inputs["attention_mask"].bool(), logits, strict=True):
            torch.testing.assert_close(row_logits[mask], model.model(row[mask][None])[0], rtol=0, atol=1e-10)


def test_labels_give_mean_loss_and_gradients(model: hf.NSALabForCausalLM) -> None:
    tokens = torch.randint(0, 256, (2, 30), generator=torch.Generator().manual_seed(1))
    labels = tokens.masked_fill(torch.arange(30) < 7, -100)
    loss = model(input_ids=tokens, labels=labels).loss
    ours = torch.nn.functional.cross_entropy(model.model(tokens)[:, 6:-1].flatten(0, 1), tokens[:, 7:].flatten())
    torch.testing.assert_close(loss.double(), ours, rtol=1e-5, atol=1e-5)
    loss.backward()
    assert model.model.embedding.weight.grad.abs().sum() > 0


def test_cache_grows(model: hf.NSALabForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf.cache, "MIN_CACHE_TOKENS", 4)
    tokens = torch.randint(0, 256, (2, 40), generator=torch.Generator().manual_seed(1))
    first = model(tokens[:, :5], use_cache=True)
    rest = [model(tokens[:, at : at + 7], past_key_values=first.past_key_values).logits for at in range(5, 40, 7)]
    assert first.past_key_values.get_seq_length() == 40
    torch.testing.assert_close(torch.cat([first.logits, *rest], dim=1), model.model(tokens), rtol=0, atol=1e-10)


def test_cache_is_accepted_under_both_names_only(model: hf.NSALabForCausalLM) -> None:
    tokens = torch.randint(0, 255, (2, 12), generator=torch.Generator().manual_seed(0))
    whole = model(tokens).logits
    for name in ("cache", "past_key_values"):
        cache = model(tokens[:, :7], use_cache=True)[hf.CACHE_ARGUMENT]
        torch.testing.assert_close(model(tokens[:, 7:], **{name: cache}).logits, whole[:, 7:])
    with pytest.raises(TypeError, match="are the same argument"):
        model(tokens, cache=cache, past_key_values=cache)
    with pytest.raises(ValueError, match="expected a cache of this model, got that of another one"):
        make_model()(tokens, cache=cache)
    with pytest.raises(TypeError, match=r"got memory=; install a tested version of transformers"):
        model(tokens, memory=cache)


# `generate` knew only one name before transformers 5.24.
@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({hf.CACHE_ARGUMENT, "past_key_values"}))
def test_generation_continues_from_its_cache(model: hf.NSALabForCausalLM, tokenizer: hf.NSALabTokenizer, name: str) -> None:
    """All tokens are passed again, as `transformers` requires; cached tokens are not computed twice."""
    inputs, options = tokenize_padded(tokenizer), {"do_sample": False, "eos_token_id": None}
    whole = model.generate(**inputs, max_new_tokens=14, **options)
    first_part = model.generate(**inputs, max_new_tokens=6, return_dict_in_generate=True, **options)
    mask = torch.cat([inputs["attention_mask"], torch.ones(3, 6, dtype=torch.int64)], dim=1)
    n_cached = first_part[hf.CACHE_ARGUMENT].get_seq_length()
    continued = model.generate(
        first_part.sequences, attention_mask=mask, max_new_tokens=8, **{name: first_part[hf.CACHE_ARGUMENT]}, **options
    )
    assert torch.equal(continued, whole) and first_part[hf.CACHE_ARGUMENT].get_seq_length() == n_cached + 8


def test_unsupported_inputs_are_named(model: hf.NSALabForCausalLM, tokenizer: hf.NSALabTokenizer) -> None:
    tokens = torch.randint(0, 255, (2, 9), generator=torch.Generator().manual_seed(0))
    with pytest.raises(TypeError, match="expected an NSALabCache, got DynamicCache"):
        model(tokens, cache=transformers.DynamicCache())
    with pytest.raises(TypeError, match=r"unexpected keyword argument lables=; the nearest is labels=$"):
        model(tokens, lables=tokens)
    for arguments in ({}, {"input_ids": tokens, "inputs_embeds": torch.zeros(2, 9, 24)}):
        with pytest.raises(ValueError, match="expected either input_ids= or inputs_embeds=, got both or neither"):
            model(**arguments)
    columns = torch.tensor([1, 4])
    assert torch.equal(model(tokens, logits_to_keep=columns).logits, model(tokens).logits[:, columns])


def test_packed_documents_equal_single_documents(model: hf.NSALabForCausalLM) -> None:
    """Documents packed by DataCollatorWithFlattening; also positions that start anywhere, with and without padding."""
    texts = [list(b"a first document, of some length"), list(b"the second"), list(b"x")]
    flat = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
    batch = flat([{"input_ids": text, "labels": text} for text in texts])
    packed = model(**batch)
    separate = [model(torch.tensor([text])).logits for text in texts]
    assert torch.equal(packed.logits, torch.cat(separate, 1)) or (packed.logits - torch.cat(separate, 1)).abs().max() < 1e-5
    targets = [
        (logits[0, :-1], torch.tensor(text[1:], dtype=torch.int64)) for logits, text in zip(separate, texts, strict=True)
    ]
    losses = torch.cat([torch.nn.functional.cross_entropy(a, b, reduction="none") for a, b in targets])
    torch.testing.assert_close(packed.loss.double(), losses.mean(), rtol=1e-5, atol=1e-6)
    tokens = torch.tensor([texts[0], texts[0]])
    positions = torch.arange(len(texts[0]))[None]
    assert torch.equal(model(tokens, position_ids=positions + 100).logits, model(tokens).logits)
    padded = torch.cat([torch.full((2, 3), 255), tokens], 1)
    mask = torch.ones_like(padded).index_fill(1, torch.arange(3), 0)
    padded_logits = model(padded, attention_mask=mask, position_ids=mask.cumsum(1) - 1).logits[:, 3:]
    torch.testing.assert_close(padded_logits, model(tokens).logits, rtol=1e-5, atol=1e-5)


@looped
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"position_ids": torch.tensor([[0, 1, 3]])}, "count up by one"),
        ({"position_ids": torch.tensor([[1, 0, 1]])}, "count up by one"),
        ({"position_ids": torch.tensor([[0, 0, 1]]), "use_cache": True}, "without padding and cache"),
        (
            {"position_ids": torch.tensor([[0, 0, 1]]), "attention_mask": torch.tensor([[1, 1, 0]])},
            "without padding and cache",
        ),
        (
            {"position_ids": torch.tensor([[0, 1, 2]]), "attention_mask": torch.tensor([[1, 0, 1]])},
            "count up by one from token to token, without a step at padding",
        ),
        ({"position_ids": torch.tensor([[0, 1]])}, r"the shape of input_ids, \(1, 3\), got \(1, 2\)"),
        *(
            ({"num_items_in_batch": n}, rf"num_items_in_batch = {n!r}: expected .* at least 1")
            for n in (0, -3, math.nan, "3")
        ),
        ({"num_items_in_batch": torch.tensor([0])}, r"num_items_in_batch = 0: expected .* at least 1"),
        ({"use_cache": "false"}, "use_cache = 'false': expected True, False or None"),
        ({"return_dict": "no"}, "return_dict = 'no': expected True, False or None"),
        ({"seq_idx": torch.tensor([[0, 0, 1]])}, "seq_idx: not supported alone; separate documents with position_ids="),
        ({"attention_mask": torch.tensor([[0, 1]])}, r"expected \[B, T\] as input_ids \(1, 3\)"),
        ({"attention_mask": torch.ones(2, 3)}, r"got \(2, 3\)"),
        ({"attention_mask": torch.ones(1, 1, 3, 3)}, r"masks \[T, T\] are not supported"),
        ({"attention_mask": torch.tensor([[-1e9, 0.0, 0.0]])}, "1 for a token and 0 for padding"),
        (
            {"input_ids": torch.ones(1, 0, dtype=torch.int64)},
            "input_ids: expected .* begin an empty text with the separator",
        ),
        ({"input_ids": [[1, 2, 3]]}, "input_ids: expected a tensor, got a list"),
        ({"input_ids": None, "inputs_embeds": [[[0.5]]]}, "inputs_embeds: expected a tensor, got a list"),
        ({"labels": [[1, 2, 3]]}, "labels: expected a tensor, got a list"),
        ({"attention_mask": [[1, 1, 1]]}, "attention_mask: expected a tensor, got a list"),
        ({"position_ids": [[0, 1, 2]]}, "position_ids: expected a tensor, got a list"),
        (
            {"labels": torch.ones(1, 2, dtype=torch.int64)},
            r"labels: expected int64 \[B, T\], \(1, 3\), got torch.int64 \(1, 2\)",
        ),
        ({"labels": torch.ones(1, 3)}, "labels: expected int64 .* got torch.float32"),
        ({"shift_labels": torch.ones(3, dtype=torch.int64)}, "shift_labels: expected int64"),
        ({"logits_to_keep": -3}, "logits_to_keep = -3: expected a number of columns"),
        ({"attention_mask": torch.zeros(1, 3), "use_cache": True}, "attention_mask: expected a token in at least one row"),
    ],
)
def test_invalid_masks_and_positions_are_rejected(
    model: hf.NSALabForCausalLM, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        model(**{"input_ids": torch.tensor([[1, 2, 3]]), **arguments})


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


def test_other_outputs_and_vocabulary_sizes_are_rejected(model: hf.NSALabForCausalLM) -> None:
    with pytest.raises(NotImplementedError, match="omit output_attentions="):
        model(torch.tensor([[1, 2, 3]]), output_attentions=True)
    with pytest.raises(NotImplementedError, match="omit output_attentions="):
        model.base_model(torch.tensor([[1, 2, 3]]), output_attentions=True)
    with pytest.raises(NotImplementedError, match="expected 256 tokens, which are part of the architecture, got 300"):
        model.resize_token_embeddings(300)
    assert model.resize_token_embeddings(256) is model.get_input_embeddings()


def test_copied_cache_shares_the_model(model: hf.NSALabForCausalLM) -> None:
    """Two generations continue independently from one prompt."""
    prompt, *more = (torch.randint(0, 255, (1, n), generator=torch.Generator().manual_seed(n)) for n in (40, 5, 7))
    cache = model(prompt, use_cache=True)[hf.CACHE_ARGUMENT]
    for tokens in more:
        copied = copy.deepcopy(cache)
        assert copied._model is model.model and copied.decoder._model is model.model
        logits = model(tokens, **{hf.CACHE_ARGUMENT: copied}).logits
        torch.testing.assert_close(logits, model(torch.cat([prompt, tokens], 1)).logits[:, 40:], rtol=1e-4, atol=1e-5)
    assert cache.get_seq_length() == 40


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


def test_unsupported_cache_operations_raise(model: hf.NSALabForCausalLM) -> None:
    cache = model(torch.zeros(2, 5, dtype=torch.int64), use_cache=True).past_key_values
    for call in (lambda: cache.batch_repeat_interleave(2), lambda: cache.batch_select_indices([0])):
        with pytest.raises(NotImplementedError, match="NSALabCache"):
            call()


def test_other_kinds_of_caches_are_refused() -> None:
    """Also in a generation configuration. The cache grows with the text, as "dynamic" requests."""
    model, tokens = make_model().eval(), sample_bytes(2, 9)
    options = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 255}
    expected = model.generate(tokens, **options)
    assert torch.equal(model.generate(tokens, cache_implementation="dynamic", **options), expected)
    for kind in ("static", "quantized", "offloaded"):
        with pytest.raises(NotImplementedError, match=f"cache_implementation = '{kind}': expected None or 'dynamic'"):
            model.generate(tokens, cache_implementation=kind, **options)
    model.generation_config.cache_implementation = "static"
    with pytest.raises(NotImplementedError, match="cache_implementation = 'static'"):
        model.generate(tokens, num_beams=2, **options)
    model.generation_config.cache_implementation = None
    for call in (
        lambda: model.generate(tokens, cache_implementation="paged", **options),
        lambda: model.generate_batch(tokens.tolist()),
    ):
        with pytest.raises(NotImplementedError, match="continuous batching is not supported"):
            call()


def test_early_exit_is_refused() -> None:
    """Any number of layers is refused, in an argument and in a generation configuration."""
    model, tokens = make_model().eval(), sample_bytes(1, 9)
    for n_layers in (0, 1, 2):
        with pytest.raises(NotImplementedError, match=f"assistant_early_exit = {n_layers}: expected None"):
            model.generate(tokens, max_new_tokens=4, assistant_early_exit=n_layers)
    model.generation_config.assistant_early_exit = 1
    with pytest.raises(NotImplementedError, match="assistant_early_exit = 1"):
        model.generate(tokens, max_new_tokens=4)


def test_tokenizer_encodes_bytes_after_a_separator(tokenizer: hf.NSALabTokenizer, tmp_path: Path) -> None:
    for text in ("h\u00e9llo", "", "\n a  b", "\x00\x7f"):
        ids = tokenizer(text)["input_ids"]
        assert ids == [255, *text.encode()] and tokenizer.decode(ids, skip_special_tokens=True) == text
    tokenizer.save_pretrained(tmp_path)
    again = hf.NSALabTokenizer.from_pretrained(tmp_path)
    assert len(again) == 256 and again.padding_side == "left" and again("a")["input_ids"] == [255, 97]
    assert {again.bos_token_id, again.eos_token_id, again.pad_token_id} == {255}


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    run_dir = write_run(tmp_path)
    write_checkpoint(run_dir, 200, save(NSATransformer(make_config().model, seed=1).state_dict()))
    return run_dir


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


@pytest.mark.slow
def test_exported_folder_loads_in_a_fresh_process(run_dir: Path, tmp_path: Path) -> None:
    """In a process that has not imported nsa_lab."""
    folder = hf.export(run_dir, tmp_path / "exported")
    code = (
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n"
        "from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES\n"
        f"tokenizer = AutoTokenizer.from_pretrained({str(folder)!r}, trust_remote_code=True)\n"
        f"model = AutoModelForCausalLM.from_pretrained({str(folder)!r}, trust_remote_code=True)\n"
        "out = model.generate(**tokenizer('def ', return_tensors='pt'), max_new_tokens=5, eos_token_id=None)\n"
        "assert out.shape == (1, 10), out.shape\n"
        # A Trainer with label smoothing shifts the labels only for classes in this list.
        "assert type(model).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()\n"
    )
    environment = {"PYTHONPATH": str(ROOT), "HF_HOME": str(tmp_path / "hf"), "PATH": "", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("side", ["left", "right"])
def test_loss_of_padded_rows_is_the_loss_of_their_tokens(
    model: hf.NSALabForCausalLM, tokenizer: hf.NSALabTokenizer, side: str
) -> None:
    batch = tokenize_padded(tokenizer, side)
    # The first token is not a target. After padding it would be one, for undefined logits.
    labels = batch["input_ids"].masked_fill(batch["input_ids"] == 255, -100)
    rows = [tokenizer(text, return_tensors="pt")["input_ids"] for text in PROMPTS]
    losses = [torch.nn.functional.cross_entropy(model(row).logits[0, :-1], row[0, 1:], reduction="none") for row in rows]
    assert model(**batch, labels=labels).loss.item() == pytest.approx(torch.cat(losses).mean().item())


def test_a_cache_outlives_inference_mode() -> None:
    model, tokens = make_model().eval(), sample_bytes(2, 600)
    with torch.inference_mode():
        cache = model(tokens[:, :20], use_cache=True)[hf.CACHE_ARGUMENT]
    parts = [model(tokens[:, 20:23], cache=cache).logits]
    with torch.inference_mode():  # the cache grows
        parts.append(model(tokens[:, 23:599], cache=cache).logits)
    cache.reorder_cache(torch.tensor([0, 1]))
    parts.append(model(tokens[:, 599:], cache=cache).logits)
    torch.testing.assert_close(torch.cat(parts, 1), model(tokens).logits[:, 20:])


def test_reset_cache_is_empty(model: hf.NSALabForCausalLM) -> None:
    tokens = torch.randint(0, 255, (1, 20), generator=torch.Generator().manual_seed(0))
    first = model(tokens, use_cache=True)
    first[hf.CACHE_ARGUMENT].reset()
    assert first[hf.CACHE_ARGUMENT].get_seq_length() == 0
    assert torch.equal(model(tokens, cache=first[hf.CACHE_ARGUMENT]).logits, first.logits)


def test_tuple_output_and_text_pair(model: hf.NSALabForCausalLM, tokenizer: hf.NSALabTokenizer) -> None:
    tokens = torch.randint(0, 255, (1, 12), generator=torch.Generator().manual_seed(0))
    loss, logits = model(tokens, labels=tokens, return_dict=False)
    assert loss.ndim == 0 and logits.shape == (1, 12, 256)
    assert tokenizer("a", "b")["input_ids"] == [255, 97, 255, 98]


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


def test_labels_that_padding_predicts_are_ignored() -> None:
    """The first token of a row has a label, and the column before it is padding, whose logits are undefined."""
    model, tokens = make_model().eval(), sample_bytes(3, 20)
    mask = torch.ones_like(tokens)
    mask[0, :6] = mask[1, 15:] = mask[2, 8] = 0
    labels = tokens.masked_fill(mask == 0, -100)
    losses = []
    for row, kept, row_labels in zip(tokens, mask.bool(), labels, strict=True):
        targets = torch.cat([row_labels[1:].masked_fill(~kept[:-1], -100), row_labels.new_tensor([-100])])[kept]
        losses.append(torch.nn.functional.cross_entropy(model(row[kept][None]).logits[0], targets, reduction="none"))
    expected = (torch.cat(losses).sum() / (13 + 14 + 17)).float()  # as transformers computes it
    shifted = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    for arguments in ({"labels": labels}, {"shift_labels": shifted}, {"labels": labels, "num_items_in_batch": 44}):
        torch.testing.assert_close(model(tokens, attention_mask=mask, **arguments).loss, expected)


def sample_bytes(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 255, shape, generator=torch.Generator().manual_seed(seed))


def make_model(**options: Any) -> hf.NSALabForCausalLM:
    torch.manual_seed(3)
    return hf.NSALabForCausalLM(hf.NSALabConfig(tiny_config(vocab_size=256, **options).model_dump())).double()


INDEXER = {"matching_heads": 1, "selection_loss": 0.1, "indexer_block": 2}


@pytest.mark.parametrize("options", [{}, INDEXER])
def test_loss_does_not_depend_on_micro_batches(options: dict) -> None:
    """Texts with 10 and 100 labels: the gradients of one batch equal those of two micro-batches."""
    model = make_model(**options).train()
    tokens = sample_bytes(2, 101)
    labels = tokens.clone()
    labels[0, 11:] = -100
    n_items = labels[:, 1:].ne(-100).sum()

    def compute_gradients(*batches: slice) -> Tensor:
        model.zero_grad()
        for rows in batches:
            model(tokens[rows], labels=labels[rows], num_items_in_batch=n_items).loss.backward()
        return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])

    whole, split = compute_gradients(slice(0, 2)), compute_gradients(slice(0, 1), slice(1, 2))
    assert model.accepts_loss_kwargs and n_items == 110
    assert find_labels(type(model)) == ["labels"]  # columns that a Trainer expects; without one, it reports no loss
    torch.testing.assert_close(split, whole, rtol=1e-4, atol=1e-7)
    mean = model(tokens, labels=labels).loss
    if not options:  # with its number, labels also weight the selection losses of the texts
        torch.testing.assert_close(model(tokens, labels=labels, num_items_in_batch=110).loss, mean)
    shifted = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    torch.testing.assert_close(model(tokens, shift_labels=shifted).loss, mean)
    shifted[:, 5:] = -100  # other labels than the tokens
    other = model(tokens, shift_labels=shifted).loss
    assert not torch.isclose(other, mean)
    torch.testing.assert_close(model(tokens, labels=labels, shift_labels=shifted).loss, other)
    views = [x.T.contiguous().T for x in (tokens, labels, shifted)]
    assert not any(view.is_contiguous() for view in views)
    torch.testing.assert_close(model(views[0], labels=views[1], shift_labels=views[2]).loss, other)


def test_selection_loss_does_not_depend_on_micro_batches() -> None:
    """A text has the weight of its labels; those of padding and of other documents do not count."""
    model = make_model(**INDEXER, selection_queries=256).train()
    check_gradients(model, sample_bytes(2, LENGTH))
    # Without labels for a text, and for a whole batch.
    tokens, no_labels = sample_bytes(2, 40), torch.full((2, 40), -100)
    one = torch.cat([no_labels[:1], tokens[1:]])
    output, alone = (model(x, labels=y, num_items_in_batch=39) for x, y in ((tokens, one), (tokens[1:], tokens[1:])))
    torch.testing.assert_close(output.aux_loss, alone.aux_loss)
    assert model(tokens, labels=no_labels, num_items_in_batch=39).aux_loss == 0


def test_selection_loss_is_part_of_the_training_loss() -> None:
    """Weighted as in the configuration, reported before its weight; absent in evaluation and without an indexer."""
    model, tokens = make_model(**INDEXER).train(), sample_bytes(2, 40)
    output = model(tokens, labels=tokens)
    nll = torch.nn.functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    torch.testing.assert_close(output.loss, nll + 0.1 * output.aux_loss, check_dtype=False, rtol=1e-5, atol=1e-6)
    output.loss.backward()
    assert model.model.blocks[0].attention.indexer.qk.weight.grad.abs().sum() > 0
    # A third of the labels of an optimizer step has a third of the weight.
    nll_part = model(tokens, labels=tokens, num_items_in_batch=3 * 78).loss
    torch.testing.assert_close(nll_part, output.loss / 3, check_dtype=False)
    for other in (model.eval(), make_model().train()):
        output = other(tokens, labels=tokens)
        nll = torch.nn.functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        assert output.aux_loss is None and torch.isclose(output.loss.double(), nll, atol=1e-5)


def test_loss_computed_from_logits_trains_the_indexer() -> None:
    """Label smoothing of a Trainer and DPO compute one. The gradients are equal to the gradients of `loss`."""
    model, tokens = make_model(**INDEXER).train(), sample_bytes(2, 70)
    model(tokens, labels=tokens).loss.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    output = model(tokens)
    assert not output.aux_loss.requires_grad  # it is included, so it cannot be added again
    torch.nn.functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-4, atol=1e-7)
    assert expected["model.blocks.0.attention.indexer.qk.weight"].abs().sum() > 0


def test_base_model_returns_the_last_hidden_state(model: hf.NSALabForCausalLM) -> None:
    """With the same weights under the same names; a loss computed from it trains the indexer too."""
    tokens, base = sample_bytes(2, 30), model.base_model
    mask = torch.ones_like(tokens).index_fill(1, torch.arange(4), 0)
    for arguments in ({}, {"attention_mask": mask}, {"use_cache": True}):
        hidden = base(tokens, **arguments).last_hidden_state
        expected = model(tokens, **arguments).logits
        torch.testing.assert_close(model.get_output_embeddings()(hidden)[:, 4:], expected[:, 4:], rtol=0, atol=1e-10)
    assert base.state_dict().keys() == model.state_dict().keys() and base is model.base_model is model.get_decoder()
    assert copy.deepcopy(model).base_model.model is not model.model
    assert len(dict(model.named_parameters())) == len(dict(model.model.named_parameters()))
    if model.model.config.has_indexer:
        tokens = sample_bytes(2, 70)  # with blocks to choose from
        model.train()
        base(tokens).last_hidden_state.sum().backward()
        by_base = model.model.blocks[0].attention.indexer.qk.weight.grad.clone()
        model.zero_grad()
        model(tokens)
        model.model.auxiliary_loss().backward()
        expected = model.model.blocks[0].attention.indexer.qk.weight.grad
        torch.testing.assert_close(by_base, expected, rtol=1e-6, atol=0)
        assert expected.abs().sum() > 0


def test_hidden_states_and_embeddings(model: hf.NSALabForCausalLM) -> None:
    """With and without padding and cache: the inputs of the blocks, and embeddings instead of tokens."""
    tokens, caught = sample_bytes(2, 30), []
    handles = [block.register_forward_pre_hook(lambda _, inputs: caught.append(inputs[0])) for block in model.model.blocks]
    output = model(tokens, output_hidden_states=True)
    for handle in handles:
        handle.remove()
    assert len(output.hidden_states) == 3
    for hidden in output.hidden_states:
        hidden.retain_grad()
    output.logits.sum().backward(retain_graph=True)
    assert all(hidden.grad.abs().sum() > 0 for hidden in output.hidden_states)
    for hidden, expected in zip(output.hidden_states, [*caught, model.base_model(tokens).last_hidden_state], strict=True):
        torch.testing.assert_close(hidden, expected, rtol=0, atol=1e-10)
    first = model(tokens[:, :17], output_hidden_states=True, use_cache=True)
    model.config.output_hidden_states = True
    rest = model(tokens[:, 17:], cache=first[hf.CACHE_ARGUMENT])
    model.config.output_hidden_states = False
    for parts in zip(first.hidden_states, rest.hidden_states, output.hidden_states, strict=True):
        torch.testing.assert_close(torch.cat(parts[:2], dim=1), parts[2], rtol=0, atol=1e-10)
    padded, mask = torch.nn.functional.pad(tokens, (3, 0)), torch.nn.functional.pad(torch.ones_like(tokens), (3, 0))
    with_padding = model(padded, attention_mask=mask, output_hidden_states=True, logits_to_keep=2)
    torch.testing.assert_close(with_padding.hidden_states[1][:, 3:], output.hidden_states[1], rtol=0, atol=1e-10)
    torch.testing.assert_close(with_padding.logits, output.logits[:, -2:], rtol=0, atol=1e-10)
    embeddings = model.get_input_embeddings()(tokens)
    if model.model.ngrams:
        with pytest.raises(ValueError, match=r"expected tokens for a model with n-grams \(model.ngrams = 4\)"):
            model(inputs_embeds=embeddings)
        return
    torch.testing.assert_close(model(inputs_embeds=embeddings).logits, output.logits, rtol=0, atol=0)
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    generated = model.generate(inputs_embeds=embeddings, **options)
    assert torch.equal(generated, model.generate(tokens, **options)[:, 30:])
    model.set_input_embeddings(torch.nn.Embedding.from_pretrained(model.get_input_embeddings().weight.detach() * 2))
    assert not torch.equal(model(tokens).logits, output.logits)


def switch_checkpointing(model: hf.NSALabForCausalLM, how: str, *arguments: dict) -> None:
    """Call `gradient_checkpointing_enable` or `_disable` by the name that is not deprecated."""
    names = (f"activation_checkpointing_{how}", f"gradient_checkpointing_{how}")
    next(getattr(model, name) for name in names if hasattr(model, name))(*arguments)


def test_gradient_checkpointing_is_the_switch_of_the_model(model: hf.NSALabForCausalLM) -> None:
    model.train()
    tokens = sample_bytes(2, 30)

    def compute_gradients() -> Tensor:
        model.zero_grad()
        model(tokens, labels=tokens).loss.backward()
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    expected = compute_gradients()
    switch_checkpointing(model, "enable")
    assert model.supports_gradient_checkpointing and model.model.gradient_checkpointing
    torch.testing.assert_close(compute_gradients(), expected)
    switch_checkpointing(model, "disable")
    assert not model.model.gradient_checkpointing


def test_settings_of_gradient_checkpointing_have_an_effect() -> None:
    """Every second block is recomputed. The reentrant form, which would lose the selection loss, runs as the other one."""
    model, tokens = make_model(n_layers=4, **INDEXER).train(), sample_bytes(2, 30)

    def count_calls_of_blocks() -> tuple[list[int], Tensor]:
        calls, gradients = [0] * 4, []
        model.zero_grad()
        handles = [
            block.attention_norm.register_forward_pre_hook(lambda *_, i=i: calls.__setitem__(i, calls[i] + 1))
            for i, block in enumerate(model.model.blocks)
        ]
        model(tokens, labels=tokens).loss.backward()
        for handle in handles:
            handle.remove()
        gradients = [p.grad.flatten() for p in model.parameters()]
        return calls, torch.cat(gradients)

    calls, expected = count_calls_of_blocks()
    assert calls == [1, 1, 1, 1]
    used = []
    settings = {
        "preserve_rng_state": False,
        "use_reentrant": True,
        "context_fn": lambda: used.append(1) or (nullcontext(),) * 2,
    }
    model._set_gradient_checkpointing(True, functools.partial(checkpoint, **settings), every_n_layers=2)
    calls, gradients = count_calls_of_blocks()
    assert calls == [2, 1, 2, 1] and len(used) == 2
    torch.testing.assert_close(gradients, expected)
    switch_checkpointing(model, "enable", {"use_reentrant": True})
    calls, gradients = count_calls_of_blocks()
    assert calls == [2, 2, 2, 2]
    torch.testing.assert_close(gradients, expected)


def test_calls_return_a_cache_as_configured() -> None:
    """`generate` uses a cache in any case. A Trainer sets the value of the configuration to False."""
    model, tokens = make_model().eval(), sample_bytes(1, 20)
    appended, append = [], hf.NSALabCache.append
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            hf.NSALabCache, "append", lambda cache, *args, **options: appended.append(1) or append(cache, *args, **options)
        )
        model.generate(tokens, max_new_tokens=3, do_sample=False)
        assert len(appended) == 3 and not model.config.use_cache and model.generation_config.use_cache
        assert hf.CACHE_ARGUMENT not in model(tokens)
        model.config.use_cache = True
        assert model(tokens)[hf.CACHE_ARGUMENT].get_seq_length() == 20
        model.train()(tokens, labels=tokens).loss.backward()  # in training there are gradients
        assert model(tokens, use_cache=True)[hf.CACHE_ARGUMENT] is not None


@pytest.mark.slow
@pytest.mark.parametrize("how", ["assistant", "prompt lookup"])
def test_assisted_generation_equals_greedy(model: hf.NSALabForCausalLM, how: str) -> None:
    """Rejected tokens are removed from the cache: by an assistant that is often wrong, and by repetition of the prompt."""
    prompt = torch.tensor([list(b"abcabdabcabdab")])
    options = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None, "pad_token_id": 255}
    assistant = make_model(n_layers=1, nsa=model.model.config.nsa).eval()
    assistant.model.embedding.load_state_dict(model.model.embedding.state_dict())
    assist = {"assistant_model": assistant} if how == "assistant" else {"prompt_lookup_num_tokens": 5}
    removed, crop = [], hf.NSALabCache.crop
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hf.NSALabCache, "crop", lambda cache, n: removed.append(n) or crop(cache, n))
        assisted = model.generate(prompt, **assist, **options)
    assert torch.equal(assisted, model.generate(prompt, **options)) and any(removed)


def test_cropped_cache_continues(model: hf.NSALabForCausalLM) -> None:
    tokens = sample_bytes(2, 40)
    for argument in (-7, 33):
        cache = model(tokens, use_cache=True)[hf.CACHE_ARGUMENT]
        cache.crop(argument)
        assert cache.get_seq_length() == 33 and cache.is_croppable
        other = model(tokens[:, :9], cache=cache).logits
        torch.testing.assert_close(
            other, model(torch.cat([tokens[:, :33], tokens[:, :9]], 1)).logits[:, 33:], rtol=0, atol=1e-9
        )
    with pytest.raises(ValueError, match="crop: expected at most 42 columns, got 43"):
        cache.crop(-43)
    cache.reset()
    model(tokens, cache=cache)
    assert cache.get_seq_length() == 40


def test_cropped_padding_leaves_no_trace() -> None:
    """Padding at the end, between tokens and before them; beams change the order of the rows."""
    model, tokens, more = make_model().eval(), sample_bytes(2, 40), sample_bytes(2, 5)
    mask = torch.ones_like(tokens)
    mask[0, :3] = mask[1, 33:36] = mask[1, -3:] = 0
    for n_removed in (0, 2, 4, 7):
        cache = model(tokens, attention_mask=mask, use_cache=True)[hf.CACHE_ARGUMENT]
        cache.reorder_cache(torch.tensor([1, 0]))
        cache.crop(-n_removed)
        n = 40 - n_removed
        assert torch.equal(cache.make_mask(2), mask[[1, 0], :n].bool())
        other = model(more, cache=cache).logits
        for row, source in enumerate((1, 0)):
            text = torch.cat([tokens[source, :n][mask[source, :n].bool()], more[row]])
            torch.testing.assert_close(other[row], model(text[None]).logits[0, -5:], rtol=0, atol=1e-9)


def test_positions_continue_the_cached_tokens() -> None:
    """Positions are not an input of the cached path, so those that do not count on are refused."""
    model, tokens = make_model().eval(), sample_bytes(2, 9)
    mask = torch.ones_like(tokens)
    mask[0, :3] = mask[1, 4] = 0
    positions = mask.cumsum(1) - 1
    for first, padding, expected in (
        (None, None, [9, 9]),
        (torch.arange(9)[None], None, [9, 9]),
        (torch.arange(9)[None] + 100, None, [109, 109]),
        (positions, mask, [6, 8]),
        (positions + torch.tensor([[0], [50]]), mask, [6, 58]),
    ):
        cache = model(tokens, attention_mask=padding, position_ids=first, use_cache=True)[hf.CACHE_ARGUMENT]
        cache.reorder_cache(torch.tensor([1, 0]))
        cache.crop(-1)
        right = torch.tensor([[expected[1] - 1], [expected[0] - 1]])
        model(tokens[:, :1], position_ids=right, cache=cache)
        model(tokens[:, :1], cache=cache)
        model(tokens[:, :2], position_ids=right + torch.tensor([[2, 3]]), cache=cache)
        wrong = right + torch.tensor([[4], [5]])
        row = f"{right[1, 0] + 4} for the first new token of row 1, after cached tokens, got {wrong[1, 0]}"
        with pytest.raises(ValueError, match=f"position_ids: expected {row}; omit"):
            model(tokens[:, :1], position_ids=wrong, cache=cache)


@pytest.mark.slow
def test_masks_with_holes_generate_as_their_tokens() -> None:
    """Padding before, between and after tokens, by every way to generate; each row as its tokens in a single row."""
    model, tokens = make_model().eval(), sample_bytes(2, 14)
    mask = torch.ones_like(tokens)
    mask[0, :5] = mask[1, 3] = mask[1, 7:9] = 0
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 255}
    rows = [tokens[row][mask[row].bool()][None] for row in range(2)]
    expected = torch.cat([model.generate(row, max_new_tokens=8, **options)[:, -8:] for row in rows])
    beams = torch.cat([model.generate(row, max_new_tokens=8, num_beams=3, **options)[:, -8:] for row in rows])
    inputs = {"attention_mask": mask, "max_new_tokens": 8, **options}
    assert torch.equal(model.generate(tokens, num_beams=3, **inputs)[:, -8:], beams)
    embeddings = model.get_input_embeddings()(tokens)
    for how in ({}, {"use_cache": False}, {"prefill_chunk_size": 5}, {"position_ids": mask.cumsum(1) - 1}):
        assert torch.equal(model.generate(tokens, **how, **inputs)[:, -8:], expected), how
    assert torch.equal(model.generate(inputs_embeds=embeddings, **inputs), expected)
    part = model.generate(tokens, return_dict_in_generate=True, **inputs | {"max_new_tokens": 3})
    continued = model.generate(part.sequences, max_new_tokens=5, **{hf.CACHE_ARGUMENT: part[hf.CACHE_ARGUMENT]}, **options)
    assert torch.equal(continued[:, -8:], expected)
    assistant = make_model(n_layers=1).eval()
    for row in range(2):
        for how in ({"assistant_model": assistant}, {"prompt_lookup_num_tokens": 3}):
            single = inputs | {"attention_mask": mask[row : row + 1]}
            assert torch.equal(model.generate(tokens[row : row + 1], **how, **single)[0, -8:], expected[row])
    with pytest.raises(ValueError, match="count up by one from token to token, without a step at padding"):
        model.generate(tokens, position_ids=torch.arange(14)[None], **inputs)
    # With padding at the end, `transformers` takes the first token from the last column, and continues from position 0.
    mask[1, 12:] = 0
    row = tokens[1][mask[1].bool()][None]
    for how in ({}, {"use_cache": False}, {"num_beams": 3}):
        expected = model.generate(row, max_new_tokens=8, **how, **options)[0, -8:]
        assert torch.equal(model.generate(tokens, **how, **inputs)[1, -8:], expected), how


@pytest.mark.slow
def test_a_generated_pad_token_is_a_token_for_an_assistant() -> None:
    """`transformers` infers padding from the pad token, also in the text that an assistant continues."""
    model, prompt, options = make_model().eval(), sample_bytes(1, 9), {"max_new_tokens": 40, "do_sample": False}
    assistant = make_model(n_layers=1).eval()
    expected = model.generate(prompt, eos_token_id=None, **options)
    for token in sorted(set(expected[0, 9:].tolist()) - set(prompt[0].tolist()))[::4]:
        inputs = {"eos_token_id": None, "pad_token_id": token, "assistant_model": assistant}
        for mask in (None, torch.ones_like(prompt)):
            assert torch.equal(model.generate(prompt, attention_mask=mask, **inputs, **options), expected)


def read_folder(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


LOAD = """
import sys
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer
source, target = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained(source, trust_remote_code=True)
out = model.generate(**tokenizer('def ', return_tensors='pt'), max_new_tokens=5, eos_token_id=None)
assert out.shape == (1, 10), out.shape
assert AutoModel.from_pretrained(source, trust_remote_code=True)(out).last_hidden_state.shape[:2] == (1, 10)
model.save_pretrained(target)
tokenizer.save_pretrained(target)
"""


def test_model_saved_without_a_tokenizer_can_be_imported(tmp_path: Path) -> None:
    """A Trainer checkpoint has every file that auto_map names, and no source file of the library."""
    make_model().save_pretrained(tmp_path)
    auto_map = transformers.AutoConfig.from_pretrained(tmp_path).auto_map
    assert {name.split(".")[0] for name in auto_map.values()} == {"nsa_lab_in_transformers"}
    assert {path.name for path in tmp_path.glob("*.py")} == {"nsa_lab_in_transformers.py"}


@pytest.mark.slow
def test_saved_folders_equal_the_exported_one(run_dir: Path, tmp_path: Path) -> None:
    """Saved again in this process, and twice in fresh processes that load the folder saved before."""
    folders = [hf.export(run_dir, tmp_path / "exported"), *(tmp_path / f"again{i}" for i in range(3))]
    transformers.AutoModelForCausalLM.from_pretrained(folders[0]).save_pretrained(folders[1])
    transformers.AutoTokenizer.from_pretrained(folders[0]).save_pretrained(folders[1])
    environment = {"PYTHONPATH": str(ROOT), "HF_HOME": str(tmp_path / "hf"), "PATH": "", "HF_HUB_OFFLINE": "1"}
    for source, target in ((folders[1], folders[2]), (folders[2], folders[3])):
        command = [sys.executable, "-c", LOAD, str(source), str(target)]
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
