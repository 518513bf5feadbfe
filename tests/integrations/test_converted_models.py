"""Converted models under the libraries that people train with: Trainer and PEFT."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("accelerate", reason="install '.[integrations]'")
peft = pytest.importorskip("peft", reason="install '.[integrations]'")

sys.path.insert(0, str(Path(__file__).parents[1] / "convert"))

from tiny_dense_models import FEW, make_dense, make_tokens  # noqa: E402
from transformers import Trainer, TrainingArguments  # noqa: E402

from nsa_lab import sparsify  # noqa: E402

PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj"]


def make_trainer(model: Any, folder: Path, **options: Any) -> Trainer:
    rows = [{"input_ids": row, "labels": row} for row in make_tokens(8, 48)]
    arguments: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": 4,
        "per_device_train_batch_size": 4,
        "learning_rate": 0.01,
        "lr_scheduler_type": "constant",
        "report_to": [],
        "save_strategy": "no",
        "logging_steps": 1,
        "use_cpu": True,
        "seed": 1,
        "disable_tqdm": True,
    }
    return Trainer(model, TrainingArguments(**{**arguments, **options}), train_dataset=rows)


@pytest.mark.slow
def test_trainer_trains_trunk_and_indexer(tmp_path: Path) -> None:
    """The losses do not depend on the number of micro-batches, and gradient checkpointing does not change them."""
    weights, losses = [], []
    for options in (
        {},
        {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
        {"gradient_checkpointing": True},
    ):
        model = sparsify(make_dense(), FEW)
        before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        trainer = make_trainer(model, tmp_path, **options)
        trainer.train()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
        weights.append(dict(model.named_parameters()))
        changed = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
        assert changed == before.keys()
    for other in losses[1:]:
        torch.testing.assert_close(torch.tensor(other), torch.tensor(losses[0]), atol=1e-3, rtol=1e-3)


@pytest.mark.slow
def test_lora_on_the_projections(tmp_path: Path) -> None:
    """The adapters change what the sparse attention sees; the rest is frozen; the adapter is saved, loaded and merged."""
    tokens = make_tokens()
    config = peft.LoraConfig(target_modules=PROJECTIONS, r=4, init_lora_weights=False)
    torch.manual_seed(0)
    model = peft.get_peft_model(sparsify(make_dense(), FEW), config)
    plain = sparsify(make_dense(), FEW).train()
    assert not torch.allclose(model(tokens).logits, plain(tokens).logits, atol=1e-2)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    make_trainer(model, tmp_path / "run").train()
    changed = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    assert changed == {name for name in before if "lora_" in name}
    model.eval().save_pretrained(tmp_path / "lora")
    expected = model(tokens).logits
    loaded = peft.PeftModel.from_pretrained(sparsify(make_dense(), FEW), str(tmp_path / "lora")).eval()
    torch.testing.assert_close(loaded(tokens).logits, expected, atol=1e-5, rtol=1e-5)
    generated = loaded.generate(input_ids=tokens[:, :8], max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert torch.equal(
        generated, model.generate(input_ids=tokens[:, :8], max_new_tokens=4, do_sample=False, pad_token_id=0)
    )
    merged = loaded.merge_and_unload()
    torch.testing.assert_close(merged(tokens).logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
def test_peft_trains_the_indexer_as_a_whole(tmp_path: Path) -> None:
    """`modules_to_save` wraps the indexer, so its module is called, not read."""
    config = peft.LoraConfig(target_modules=PROJECTIONS, modules_to_save=["indexer"], r=4)
    model = peft.get_peft_model(sparsify(make_dense(), FEW, indexer_block=2, indexer_order=("pool", "rotate")), config)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    make_trainer(model, tmp_path / "run").train()
    changed = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    assert any("indexer.modules_to_save" in name for name in changed)
    assert all("lora_" in name or "indexer.modules_to_save" in name for name in changed)
    tokens = make_tokens()
    model.eval()
    model.save_pretrained(tmp_path / "lora")
    dense = sparsify(make_dense(), FEW, indexer_block=2, indexer_order=("pool", "rotate"))
    loaded = peft.PeftModel.from_pretrained(dense, str(tmp_path / "lora")).eval()
    torch.testing.assert_close(loaded(tokens).logits, model(tokens).logits, atol=1e-5, rtol=1e-5)
    generated = model.generate(input_ids=tokens[:, :8], max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert torch.equal(
        generated,
        model.generate(input_ids=tokens[:, :8], max_new_tokens=4, do_sample=False, pad_token_id=0, use_cache=False),
    )


def test_prefix_tuning_is_refused_with_its_reason() -> None:
    tokens = make_tokens(2, 20)
    inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5)
    model = peft.get_peft_model(sparsify(make_dense(), FEW), config)
    for call in (lambda: model(**inputs), lambda: model.generate(**inputs, max_new_tokens=2)):
        with pytest.raises(TypeError, match="prefix tuning, whose keys and values belong to no branch, is not supported"):
            call()


def test_prompt_tuning_generates_the_same_with_and_without_a_cache() -> None:
    tokens = make_tokens(2, 20)
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5)
    model = peft.get_peft_model(sparsify(make_dense(), FEW), config).eval()
    base, expected = model.get_base_model(), tokens
    for _ in range(8):
        embeddings = torch.cat([model.get_prompt(batch_size=2), base.get_input_embeddings()(expected)], dim=1)
        next_token = base(inputs_embeds=embeddings, use_cache=False).logits[:, -1:].argmax(-1)
        expected = torch.cat([expected, next_token], dim=1)
    inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    for use_cache in (True, False):
        assert torch.equal(model.generate(**inputs, **options, use_cache=use_cache), expected), f"use_cache={use_cache}"
