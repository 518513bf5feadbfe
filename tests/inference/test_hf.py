"""In `transformers` a model generates what it does here: greedily, in beams, padded, from disk, in a pipeline."""

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


def test_greedy_is_ours(model: hf.NSALabForCausalLM, tokenizer: hf.NSALabTokenizer) -> None:
    """Prompts padded on the left, and the padding is a token that they begin with."""
    inputs = tokenize_padded(tokenizer)
    found = model.generate(**inputs, max_new_tokens=30, do_sample=False, eos_token_id=None)
    rows = zip(inputs["input_ids"], inputs["attention_mask"].bool(), strict=True)
    ours = generate(model.model, [row[mask] for row, mask in rows], max_new_tokens=30)
    assert torch.equal(found[:, inputs["input_ids"].shape[1] :], torch.stack(ours))


@pytest.mark.parametrize("how", [{"num_beams": 4}, {"num_beams": 3, "length_penalty": 2.0, "num_return_sequences": 2}, {}])
def test_with_a_cache_generation_is_that_of_full_forward_passes(
    model: hf.NSALabForCausalLM, tokenizer: hf.NSALabTokenizer, how: dict
) -> None:
    inputs = tokenize_padded(tokenizer)
    cached, full = (
        model.generate(**inputs, max_new_tokens=16, do_sample=False, use_cache=use_cache, **how)
        for use_cache in (True, False)
    )
    assert torch.equal(cached, full)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_row_is_the_row_alone(model: hf.NSALabForCausalLM, tokenizer: hf.NSALabTokenizer, side: str) -> None:
    inputs = tokenize_padded(tokenizer, side)
    for use_cache in (False, True):
        logits = model(**inputs, use_cache=use_cache).logits
        for row, mask, found in zip(inputs["input_ids"], inputs["attention_mask"].bool(), logits, strict=True):
            torch.testing.assert_close(found[mask], model.model(row[mask][None])[0], rtol=0, atol=1e-10)


def test_labels_give_the_mean_loss_and_its_gradients(model: hf.NSALabForCausalLM) -> None:
    tokens = torch.randint(0, 256, (2, 30), generator=torch.Generator().manual_seed(1))
    labels = tokens.masked_fill(torch.arange(30) < 7, -100)
    loss = model(input_ids=tokens, labels=labels).loss
    ours = torch.nn.functional.cross_entropy(model.model(tokens)[:, 6:-1].flatten(0, 1), tokens[:, 7:].flatten())
    torch.testing.assert_close(loss.double(), ours, rtol=1e-5, atol=1e-5)
    loss.backward()
    assert model.model.embedding.weight.grad.abs().sum() > 0


def test_a_cache_grows_and_goes_on(model: hf.NSALabForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf, "MIN_CACHE_TOKENS", 4)
    tokens = torch.randint(0, 256, (2, 40), generator=torch.Generator().manual_seed(1))
    first = model(tokens[:, :5], use_cache=True)
    rest = [model(tokens[:, at : at + 7], past_key_values=first.past_key_values).logits for at in range(5, 40, 7)]
    assert first.past_key_values.get_seq_length() == 40
    torch.testing.assert_close(torch.cat([first.logits, *rest], dim=1), model.model(tokens), rtol=0, atol=1e-10)


def test_a_cache_goes_by_either_name_and_by_no_other(model: hf.NSALabForCausalLM) -> None:
    tokens = torch.randint(0, 255, (2, 12), generator=torch.Generator().manual_seed(0))
    whole = model(tokens).logits
    for name in ("cache", "past_key_values"):
        kept = model(tokens[:, :7], use_cache=True)[hf.CACHE_ARGUMENT]
        torch.testing.assert_close(model(tokens[:, 7:], **{name: kept}).logits, whole[:, 7:])
    with pytest.raises(TypeError, match="two names of one thing"):
        model(tokens, cache=kept, past_key_values=kept)
    with pytest.raises(TypeError, match=r"it came as memory=; install a version of transformers"):
        model(tokens, memory=kept)


# Of `generate`, which before 5.24 knew one name.
@pytest.mark.parametrize("name", sorted({hf.CACHE_ARGUMENT, "past_key_values"}))
def test_a_generation_goes_on_from_its_cache(model: hf.NSALabForCausalLM, tokenizer: hf.NSALabTokenizer, name: str) -> None:
    """All that was written is handed in again, as that library asks; what the cache has is not read twice."""
    inputs, how = tokenize_padded(tokenizer), {"do_sample": False, "eos_token_id": None}
    whole = model.generate(**inputs, max_new_tokens=14, **how)
    begun = model.generate(**inputs, max_new_tokens=6, return_dict_in_generate=True, **how)
    mask = torch.cat([inputs["attention_mask"], torch.ones(3, 6, dtype=torch.int64)], dim=1)
    read = begun[hf.CACHE_ARGUMENT].get_seq_length()
    found = model.generate(
        begun.sequences, attention_mask=mask, max_new_tokens=8, **{name: begun[hf.CACHE_ARGUMENT]}, **how
    )
    assert torch.equal(found, whole) and begun[hf.CACHE_ARGUMENT].get_seq_length() == read + 8


def test_what_it_does_not_take_is_named(model: hf.NSALabForCausalLM, tokenizer: hf.NSALabTokenizer) -> None:
    tokens = torch.randint(0, 255, (2, 9), generator=torch.Generator().manual_seed(0))
    with pytest.raises(TypeError, match="keeps what it read in an NSALabCache, and was given a DynamicCache"):
        model(tokens, cache=transformers.DynamicCache())
    with pytest.raises(TypeError, match=r"no inputs_embeds=: give input_ids="):
        model.generate(inputs_embeds=model.model.embedding(tokens), max_new_tokens=2)
    columns = torch.tensor([1, 4])
    assert torch.equal(model(tokens, logits_to_keep=columns).logits, model(tokens).logits[:, columns])
    assert not model.accepts_loss_kwargs, "a Trainer that accumulates divides by itself"


def test_documents_in_one_row_are_documents_alone(model: hf.NSALabForCausalLM) -> None:
    """As the library's own collator packs them; where they begin within a row of one text does not matter."""
    texts = [list(b"a first document, of some length"), list(b"the second"), list(b"x")]
    flat = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
    batch = flat([{"input_ids": text, "labels": text} for text in texts])
    found = model(**batch)
    alone = [model(torch.tensor([text])).logits for text in texts]
    assert torch.equal(found.logits, torch.cat(alone, 1)) or (found.logits - torch.cat(alone, 1)).abs().max() < 1e-5
    targets = [
        (logits[0, :-1], torch.tensor(text[1:], dtype=torch.int64)) for logits, text in zip(alone, texts, strict=True)
    ]
    losses = torch.cat([torch.nn.functional.cross_entropy(a, b, reduction="none") for a, b in targets])
    torch.testing.assert_close(found.loss.double(), losses.mean(), rtol=1e-5, atol=1e-6)
    tokens = torch.tensor([texts[0], texts[0]])
    counted = torch.arange(len(texts[0]))[None]
    assert torch.equal(model(tokens, position_ids=counted + 100).logits, model(tokens).logits)
    padded = torch.cat([torch.full((2, 3), 255), tokens], 1)
    mask = torch.ones_like(padded).index_fill(1, torch.arange(3), 0)
    there = model(padded, attention_mask=mask, position_ids=mask.cumsum(1) - 1).logits[:, 3:]
    torch.testing.assert_close(there, model(tokens).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"position_ids": torch.tensor([[0, 1, 3]])}, "count up by one"),
        ({"position_ids": torch.tensor([[1, 0, 1]])}, "count up by one"),
        ({"position_ids": torch.tensor([[0, 0, 1]]), "use_cache": True}, "without padding and cache"),
        (
            {"position_ids": torch.tensor([[0, 0, 1]]), "attention_mask": torch.tensor([[1, 1, 0]])},
            "without padding and cache",
        ),
        ({"position_ids": torch.tensor([[0, 1]])}, r"the shape of input_ids, \(1, 3\), not \(1, 2\)"),
        ({"seq_idx": torch.tensor([[0, 0, 1]])}, "seq_idx: documents in one row are told by position_ids="),
        ({"attention_mask": torch.tensor([[0, 1]])}, r"expected \[B, T\] as input_ids \(1, 3\)"),
        ({"attention_mask": torch.ones(2, 3)}, r"and it is \(2, 3\)"),
        ({"attention_mask": torch.ones(1, 1, 3, 3)}, "masks of pairs of positions are not taken"),
        ({"attention_mask": torch.tensor([[-1e9, 0.0, 0.0]])}, "1 for a token and 0 for padding"),
        ({"attention_mask": torch.zeros(1, 3), "use_cache": True}, "attention_mask: expected a token in at least one row"),
    ],
)
def test_masks_and_positions_that_say_something_else_are_refused(
    model: hf.NSALabForCausalLM, given: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        model(torch.tensor([[1, 2, 3]]), **given)


def test_no_more_than_logits_and_no_other_vocabulary(model: hf.NSALabForCausalLM) -> None:
    with pytest.raises(NotImplementedError, match="leave out output_attentions="):
        model(torch.tensor([[1, 2, 3]]), output_attentions=True)
    with pytest.raises(NotImplementedError, match="256 tokens are part of the architecture, and 300"):
        model.resize_token_embeddings(300)
    assert model.resize_token_embeddings(256) is model.get_input_embeddings()


def test_a_copied_cache_is_another_of_the_same_model(model: hf.NSALabForCausalLM) -> None:
    """Two generations go on from one prompt, neither heard by the other."""
    prompt, *more = (torch.randint(0, 255, (1, n), generator=torch.Generator().manual_seed(n)) for n in (40, 5, 7))
    kept = model(prompt, use_cache=True)[hf.CACHE_ARGUMENT]
    for tokens in more:
        copied = copy.deepcopy(kept)
        assert copied._model is model.model and copied.decoder._model is model.model
        found = model(tokens, **{hf.CACHE_ARGUMENT: copied}).logits
        torch.testing.assert_close(found, model(torch.cat([prompt, tokens], 1)).logits[:, 40:], rtol=1e-4, atol=1e-5)
    assert kept.get_seq_length() == 40


def test_what_is_no_byte_keeps_its_name(tokenizer: hf.NSALabTokenizer) -> None:
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


def test_what_a_cache_cannot_do_it_refuses(model: hf.NSALabForCausalLM) -> None:
    cache = model(torch.zeros(2, 5, dtype=torch.int64), use_cache=True).past_key_values
    for call in (lambda: cache.crop(1), lambda: cache.batch_repeat_interleave(2), lambda: cache.batch_select_indices([0])):
        with pytest.raises(NotImplementedError, match="NSALabCache"):
            call()


def test_the_tokenizer_is_bytes_behind_a_separator(tokenizer: hf.NSALabTokenizer, tmp_path: Path) -> None:
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


def test_an_exported_run_is_the_run_s_model(run_dir: Path, tmp_path: Path) -> None:
    folder = hf.export(run_dir, tmp_path / "exported", max_shard_size="50KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    weights = NSATransformer(make_config().model, seed=1).state_dict()
    assert all(torch.equal(model.model.state_dict()[name], weights[name]) for name in weights)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == 255
    told = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer)("def ", max_new_tokens=3)
    assert told[0]["generated_text"].startswith("def ")
    with pytest.raises(ConfigError, match="expected an empty or a new folder"):
        hf.export(run_dir, folder)


@pytest.mark.slow
def test_a_folder_names_the_code_that_loads_it(run_dir: Path, tmp_path: Path) -> None:
    """In a process that has imported nothing of ours."""
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
def test_the_loss_of_padded_rows_is_that_of_their_tokens(
    model: hf.NSALabForCausalLM, tokenizer: hf.NSALabTokenizer, side: str
) -> None:
    batch = tokenize_padded(tokenizer, side)
    # A first token is no target; behind padding it would be one, of logits that mean nothing.
    labels = batch["input_ids"].masked_fill(batch["input_ids"] == 255, -100)
    rows = [tokenizer(text, return_tensors="pt")["input_ids"] for text in PROMPTS]
    told = [torch.nn.functional.cross_entropy(model(row).logits[0, :-1], row[0, 1:], reduction="none") for row in rows]
    assert model(**batch, labels=labels).loss.item() == pytest.approx(torch.cat(told).mean().item())


def test_a_cache_that_is_reset_has_forgotten(model: hf.NSALabForCausalLM) -> None:
    tokens = torch.randint(0, 255, (1, 20), generator=torch.Generator().manual_seed(0))
    first = model(tokens, use_cache=True)
    first[hf.CACHE_ARGUMENT].reset()
    assert first[hf.CACHE_ARGUMENT].get_seq_length() == 0
    assert torch.equal(model(tokens, cache=first[hf.CACHE_ARGUMENT]).logits, first.logits)


def test_a_tuple_begins_with_the_loss_and_a_pair_has_two_separators(
    model: hf.NSALabForCausalLM, tokenizer: hf.NSALabTokenizer
) -> None:
    tokens = torch.randint(0, 255, (1, 12), generator=torch.Generator().manual_seed(0))
    loss, logits = model(tokens, labels=tokens, return_dict=False)
    assert loss.ndim == 0 and logits.shape == (1, 12, 256)
    assert tokenizer("a", "b")["input_ids"] == [255, 97, 255, 98]


def test_the_step_that_is_asked_for_is_exported_as_its_stage_has_it(tmp_path: Path) -> None:
    stage = {"steps": 100, "seq_len": 1024, "batch_size": 4, "lr": 1e-3}
    stages = [stage, {**stage, "rope_theta": 500_000.0}]
    config = RunConfig.from_dict({**make_config().to_dict(), "train": {"stages": stages}})
    run_dir = write_run(tmp_path, config)
    states = {step: NSATransformer(config.model, seed=step).state_dict() for step in (100, 200)}
    for step, base in ((100, config.model.rope_theta), (200, 500_000.0)):
        write_checkpoint(run_dir, step, save(states[step]))
        out = hf.export(run_dir, tmp_path / f"out{step}", step=step)
        found = transformers.AutoModelForCausalLM.from_pretrained(out)
        assert torch.equal(found.model.head.weight, states[step]["head.weight"]) and found.model.config.rope_theta == base
    first = transformers.AutoModelForCausalLM.from_pretrained(hf.export(run_dir, tmp_path / "again", step=100))
    assert torch.equal(first.model.head.weight, states[100]["head.weight"]), "though a newer one is there"
