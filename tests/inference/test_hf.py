"""The `transformers` model generates what `nsa_lab` generates: greedy, beam search, padded, from disk, in a pipeline."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from fake_run import make_config, write_checkpoint, write_run
from safetensors.torch import save
from tiny_models import TINY_NSA, tiny_config
from torch import Tensor

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


def test_greedy_equals_generate(model: hf.NSALabForCausalLM, tokenizer: hf.NSALabTokenizer) -> None:
    """Prompts are padded on the left; the padding token also begins every prompt."""
    inputs = tokenize_padded(tokenizer)
    generated = model.generate(**inputs, max_new_tokens=30, do_sample=False, eos_token_id=None)
    rows = zip(inputs["input_ids"], inputs["attention_mask"].bool(), strict=True)
    expected = generate(model.model, [row[mask] for row, mask in rows], max_new_tokens=30)
    assert torch.equal(generated[:, inputs["input_ids"].shape[1] :], torch.stack(expected))


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
    monkeypatch.setattr(hf, "MIN_CACHE_TOKENS", 4)
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
    with pytest.raises(TypeError, match=r"got memory=; install a tested version of transformers"):
        model(tokens, memory=cache)


# `generate` knew only one name before transformers 5.24.
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
    with pytest.raises(TypeError, match=r"inputs_embeds= is not supported; give input_ids="):
        model.generate(inputs_embeds=model.model.embedding(tokens), max_new_tokens=2)
    columns = torch.tensor([1, 4])
    assert torch.equal(model(tokens, logits_to_keep=columns).logits, model(tokens).logits[:, columns])
    assert not model.accepts_loss_kwargs, "a Trainer divides by its accumulation steps"


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
        ({"position_ids": torch.tensor([[0, 1]])}, r"the shape of input_ids, \(1, 3\), got \(1, 2\)"),
        ({"seq_idx": torch.tensor([[0, 0, 1]])}, "seq_idx: not supported alone; separate documents with position_ids="),
        ({"attention_mask": torch.tensor([[0, 1]])}, r"expected \[B, T\] as input_ids \(1, 3\)"),
        ({"attention_mask": torch.ones(2, 3)}, r"got \(2, 3\)"),
        ({"attention_mask": torch.ones(1, 1, 3, 3)}, r"masks \[T, T\] are not supported"),
        ({"attention_mask": torch.tensor([[-1e9, 0.0, 0.0]])}, "1 for a token and 0 for padding"),
        ({"attention_mask": torch.zeros(1, 3), "use_cache": True}, "attention_mask: expected a token in at least one row"),
    ],
)
def test_invalid_masks_and_positions_are_rejected(
    model: hf.NSALabForCausalLM, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        model(torch.tensor([[1, 2, 3]]), **arguments)


def test_other_outputs_and_vocabulary_sizes_are_rejected(model: hf.NSALabForCausalLM) -> None:
    with pytest.raises(NotImplementedError, match="omit output_attentions="):
        model(torch.tensor([[1, 2, 3]]), output_attentions=True)
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
    for call in (lambda: cache.crop(1), lambda: cache.batch_repeat_interleave(2), lambda: cache.batch_select_indices([0])):
        with pytest.raises(NotImplementedError, match="NSALabCache"):
            call()


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


@pytest.mark.slow
def test_exported_folder_loads_in_a_fresh_process(run_dir: Path, tmp_path: Path) -> None:
    """In a process that has not imported nsa_lab."""
    folder = hf.export(run_dir, tmp_path / "exported")
    code = (
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n"
        f"tokenizer = AutoTokenizer.from_pretrained({str(folder)!r}, trust_remote_code=True)\n"
        f"model = AutoModelForCausalLM.from_pretrained({str(folder)!r}, trust_remote_code=True)\n"
        "out = model.generate(**tokenizer('def ', return_tensors='pt'), max_new_tokens=5, eos_token_id=None)\n"
        "assert out.shape == (1, 10), out.shape\n"
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
