"""PEFT, Trainer, TRL and lm-eval use the exported models (extra `integrations`). Tests of a missing package are skipped."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_run import make_config, write_checkpoint, write_run
from safetensors.torch import save
from torch import Tensor, nn

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'nsa-lab[integrations]'")

import transformers

from nsa_lab import sparsify
from nsa_lab.config import ModelConfig, NSAConfig
from nsa_lab.inference import hf
from nsa_lab.model import NSATransformer

pytestmark = pytest.mark.nightly
ROOT = Path(__file__).parents[2]
NSA = NSAConfig(l=8, d=4, l_sel=8, n_sel=4, w=12, phi="mlp")
SEPARATOR = 255


def require(package: str) -> Any:
    return pytest.importorskip(package, reason=f"{package} is not installed: pip install 'nsa-lab[integrations]'")


def make_model(**options: Any) -> hf.NSALabForCausalLM:
    sizes = {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_groups": 2, "d_k": 8, "d_v": 8, "vocab_size": 256, "nsa": NSA}
    torch.manual_seed(0)
    config = hf.NSALabConfig(ModelConfig(**{**sizes, **options}).model_dump(), max_position_embeddings=64)
    return hf.NSALabForCausalLM(config)


INDEXED = {"matching_heads": 1, "selection_loss": 0.1, "indexer_block": 2}


def sample_bytes(*shape: int) -> Tensor:
    return torch.randint(0, 255, shape, generator=torch.Generator().manual_seed(1))


def make_texts(lengths: list[int]) -> list[dict[str, list[int]]]:
    texts = [sample_bytes(length).tolist() for length in lengths]
    return [{"input_ids": text, "labels": text} for text in texts]


def collate(rows: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    def pad(name: str, value: int) -> Tensor:
        tensors = [torch.tensor(row[name]) for row in rows]
        return nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=value)

    mask = nn.utils.rnn.pad_sequence(
        [torch.ones(len(row["input_ids"]), dtype=torch.int64) for row in rows], batch_first=True
    )
    return {"input_ids": pad("input_ids", SEPARATOR), "labels": pad("labels", -100), "attention_mask": mask}


def randomize_adapter(model: nn.Module) -> None:
    """Give adapters an effect: PEFT initializes them without one."""
    generator = torch.Generator().manual_seed(2)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            noise = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            parameter.data.add_(0.2 * noise if "ia3" not in name else 0.5 * noise.abs())


def list_linears(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]


PEFT_CONFIGS = {
    "LoRA": lambda peft, names: peft.LoraConfig(r=2, target_modules=names),
    "LoRA on all-linear": lambda peft, names: peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"),
    "DoRA": lambda peft, names: peft.LoraConfig(r=2, target_modules=names, use_dora=True),
    "IA3": lambda peft, names: peft.IA3Config(
        target_modules=names, feedforward_modules=[name for name in names if name.endswith("down")]
    ),
}


@pytest.mark.parametrize("options", [{}, INDEXED, {"attention": "dense"}], ids=["nsa", "indexer", "dense"])
@pytest.mark.parametrize("kind", PEFT_CONFIGS)
def test_peft_adapters_take_part_in_cached_steps(kind: str, options: dict) -> None:
    """On every linear layer: an effect, equal logits of cached steps, a gradient, and equal logits after merging."""
    peft = require("peft")
    base = make_model(**options).eval()
    tokens = sample_bytes(2, 40)
    plain = base(tokens).logits.detach()
    model = peft.get_peft_model(base, PEFT_CONFIGS[kind](peft, list_linears(base)))
    randomize_adapter(model)
    full = model(input_ids=tokens).logits
    assert (full - plain).abs().max() > 0.01, "the adapter has no effect"
    first = model(input_ids=tokens[:, :30], use_cache=True)
    cache, parts = first[hf.CACHE_ARGUMENT], [first.logits]
    parts += [model(input_ids=tokens[:, at : at + 1], **{hf.CACHE_ARGUMENT: cache}).logits for at in range(30, 40)]
    torch.testing.assert_close(torch.cat(parts, dim=1), full, rtol=0, atol=2e-5)
    model.train()
    model(input_ids=tokens, labels=tokens).loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters() if p.requires_grad)
    model.eval()
    torch.testing.assert_close(model.merge_and_unload()(tokens).logits, full, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("options", [{}, {"attention": "dense"}], ids=["nsa", "dense"])
def test_peft_prompt_tuning(options: dict) -> None:
    """Virtual tokens are embeddings before the text: the loss has a gradient, and cached generation equals uncached."""
    peft = require("peft")
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5)
    model = peft.get_peft_model(make_model(**options), config)
    tokens = sample_bytes(2, 20)
    model(input_ids=tokens, attention_mask=torch.ones_like(tokens), labels=tokens).loss.backward()
    (prompt,) = [p for p in model.parameters() if p.requires_grad]
    assert prompt.grad.abs().sum() > 0
    model.eval()
    generated = [
        model.generate(
            input_ids=tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=8,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=SEPARATOR,
            use_cache=use_cache,
        )
        for use_cache in (True, False)
    ]
    base, expected = model.get_base_model(), tokens
    for _ in range(8):
        embeddings = torch.cat([model.get_prompt(batch_size=2), base.get_input_embeddings()(expected)], dim=1)
        next_token = base(inputs_embeds=embeddings).logits[:, -1:].argmax(-1)
        expected = torch.cat([expected, next_token], dim=1)
    assert torch.equal(generated[1], expected) and torch.equal(generated[0], expected)


def test_peft_prefix_tuning_is_refused_with_its_reason() -> None:
    """Its keys and values belong to no branch; `generate` gives the same reason as `forward`."""
    peft = require("peft")
    tokens = sample_bytes(2, 20)
    inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    sizes = {"num_layers": 2, "token_dim": 16, "num_attention_heads": 2}
    config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5, **sizes)
    model = peft.get_peft_model(make_model(), config)
    calls = [lambda: model(**inputs)]
    calls += [lambda use=use: model.generate(**inputs, max_new_tokens=2, use_cache=use) for use in (True, False)]
    for call in calls:
        with pytest.raises(TypeError, match="prefix tuning, whose keys and values belong to no branch, is not supported"):
            call()


@pytest.mark.parametrize("options", [{}, INDEXED, {"attention": "dense"}], ids=["nsa", "indexer", "dense"])
@pytest.mark.parametrize("how", ["cpu_offload", "disk_offload"])
def test_weights_offloaded_by_accelerate(how: str, options: dict, tmp_path: Path) -> None:
    """Every weight is on the meta device between calls; forward pass and generation equal the model in memory."""
    accelerate = require("accelerate")
    model, tokens = make_model(**options).eval(), sample_bytes(2, 30)
    choices = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": SEPARATOR}
    expected, generated = model(tokens).logits.detach(), model.generate(tokens, **choices)
    if how == "cpu_offload":
        model = accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    else:
        model = accelerate.disk_offload(model, str(tmp_path), execution_device=torch.device("cpu"))
    assert all(p.is_meta for p in model.parameters())
    torch.testing.assert_close(model(tokens).logits, expected)
    assert torch.equal(model.generate(tokens, **choices), generated)
    accelerate.hooks.remove_hook_from_submodules(model)
    with pytest.raises(ValueError, match="expected a weight in memory, got one on the meta device"):
        model.to("meta").generate(tokens, **choices)


class RecordGradients(transformers.TrainerCallback):
    """Keep the gradient of the first optimizer step."""

    def __init__(self) -> None:
        self.gradient: Tensor | None = None

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if self.gradient is None:
            self.gradient = torch.cat([p.grad.flatten() for p in model.parameters()]).clone()


def train(folder: Path, model: nn.Module, rows: list, **options: Any) -> tuple[transformers.Trainer, Tensor]:
    arguments = transformers.TrainingArguments(
        str(folder), max_steps=1, report_to=[], use_cpu=True, max_grad_norm=0, save_strategy="no", seed=0, **options
    )
    recorder = RecordGradients()
    trainer = transformers.Trainer(
        model,
        arguments,
        train_dataset=rows,
        data_collator=collate,
        callbacks=[recorder],
        processing_class=hf.NSALabTokenizer(),
    )
    trainer.train()
    assert recorder.gradient is not None
    return trainer, recorder.gradient


@pytest.mark.parametrize("options", [{}, INDEXED], ids=["nsa", "indexer"])
def test_trainer_accumulates_what_one_batch_gives(options: dict, tmp_path: Path) -> None:
    require("accelerate")
    rows = make_texts([11, 101])
    _, whole = train(tmp_path / "a", make_model(**options), rows, per_device_train_batch_size=2)
    accumulation = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2}
    trainer, split = train(tmp_path / "b", make_model(**options), rows, **accumulation)
    indexer = [slice(start - p.numel(), start) for name, p, start in _locate_parameters(trainer.model) if "indexer" in name]
    assert bool(indexer) == bool(options)
    for part in indexer:
        assert split[part].abs().sum() > 0, "the indexer is not trained"
        split[part] = whole[part] = 0  # its loss samples queries per micro-batch
    torch.testing.assert_close(split, whole, rtol=1e-3, atol=1e-6)
    assert trainer.model_accepts_loss_kwargs


@pytest.mark.parametrize("adapter", [False, True], ids=["whole", "LoRA"])
@pytest.mark.parametrize("is_converted", [False, True], ids=["own", "converted"])
def test_label_smoothing_shifts_the_labels(is_converted: bool, adapter: bool, tmp_path: Path) -> None:
    """A Trainer computes this loss from the logits, by the name of the model's class."""
    require("accelerate")
    model: Any = make_model()
    if is_converted:
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
        model = sparsify(transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=256, **sizes)))
    if adapter:
        peft = require("peft")
        model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"))
    batch = collate(make_texts([40, 30]))
    log_p = model.eval()(**batch).logits[:, :-1].log_softmax(-1)
    labels = batch["labels"][:, 1:]
    nll = -log_p.gather(-1, labels.clamp_min(0)[..., None])[..., 0]
    expected = (0.9 * nll - 0.1 * log_p.mean(-1))[labels != -100].mean()
    arguments = transformers.TrainingArguments(str(tmp_path), report_to=[], use_cpu=True, label_smoothing_factor=0.1)
    trainer = transformers.Trainer(model, arguments)
    torch.testing.assert_close(trainer.compute_loss(model, batch), expected)


def _locate_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter, int]]:
    located, end = [], 0
    for name, parameter in model.named_parameters():
        end += parameter.numel()
        located.append((name, parameter, end))
    return located


def test_checkpoint_of_a_trainer_equals_the_exported_folder(tmp_path: Path) -> None:
    """Byte by byte, after a step with a learning rate of 0, with the files of the Trainer in addition."""
    require("accelerate")
    run_dir = write_run(tmp_path)
    write_checkpoint(run_dir, 200, save(NSATransformer(make_config().model, seed=1).state_dict()))
    exported = hf.export(run_dir, tmp_path / "exported")
    model = transformers.AutoModelForCausalLM.from_pretrained(exported)
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
    arguments = transformers.TrainingArguments(
        str(tmp_path / "trainer"), max_steps=1, save_steps=1, learning_rate=0, report_to=[], use_cpu=True
    )
    rows = make_texts([40, 30])
    trainer = transformers.Trainer(model, arguments, train_dataset=rows, data_collator=collate, processing_class=tokenizer)
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    for folder in (tmp_path / "trainer/checkpoint-1", tmp_path / "saved"):
        differing = [
            path.name for path in sorted(exported.iterdir()) if (folder / path.name).read_bytes() != path.read_bytes()
        ]
        assert differing == []
        assert {path.name for path in folder.glob("*.py")} == {"nsa_lab_in_transformers.py"}


@pytest.mark.parametrize("options", [{}, INDEXED], ids=["nsa", "indexer"])
def test_trainer_evaluates_and_predicts(options: dict, tmp_path: Path) -> None:
    """The evaluation loss is the mean NLL without the selection loss; predictions are logits."""
    require("accelerate")
    model, rows = make_model(**options), make_texts([40, 40])
    arguments = transformers.TrainingArguments(
        str(tmp_path), per_device_eval_batch_size=2, report_to=[], use_cpu=True, eval_accumulation_steps=1
    )
    trainer = transformers.Trainer(model, arguments, eval_dataset=rows, data_collator=collate)
    model.eval()
    tokens = torch.tensor([row["input_ids"] for row in rows])
    logits = model(tokens).logits.detach()
    loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    assert trainer.evaluate()["eval_loss"] == pytest.approx(loss.item(), rel=1e-5)
    predictions = trainer.predict(rows).predictions
    torch.testing.assert_close(torch.as_tensor(predictions), logits)


@pytest.mark.parametrize("options", [{}, INDEXED, {"attention": "dense"}], ids=["nsa", "indexer", "dense"])
@pytest.mark.parametrize("how", ["torchao", "bitsandbytes"])
def test_quantized_weights_take_part_in_cached_steps(how: str, options: dict, tmp_path: Path) -> None:
    """Weights of 8 bits, quantized while a saved folder is loaded: they change the logits, of cached steps alike."""
    require(how)
    model, tokens = make_model(**options).eval(), sample_bytes(2, 40)
    model.save_pretrained(tmp_path)
    if how == "torchao":
        from torchao.quantization import Int8WeightOnlyConfig

        config = transformers.TorchAoConfig(Int8WeightOnlyConfig())
    else:
        config = transformers.BitsAndBytesConfig(load_in_8bit=True)
    quantized = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config, device_map="cpu")
    out = quantized.model.blocks[0].attention.out
    assert type(out) is not nn.Linear or type(out.weight) is not nn.Parameter
    with torch.no_grad():
        full = quantized(tokens).logits
        change = (full - model(tokens).logits).abs().max()
        assert 1e-3 < change < 0.3, change
        first = quantized(tokens[:, :30], use_cache=True)
        cache, parts = first[hf.CACHE_ARGUMENT], [first.logits]
        for at in range(30, 40):
            parts.append(quantized(tokens[:, at : at + 1], **{hf.CACHE_ARGUMENT: cache}).logits)
    torch.testing.assert_close(torch.cat(parts, dim=1), full, rtol=0, atol=2e-5)


def test_trainer_checkpoint_loads_in_a_fresh_process(tmp_path: Path) -> None:
    require("accelerate")
    trainer, _ = train(tmp_path / "run", make_model(), make_texts([30, 30]), gradient_checkpointing=True)
    trainer.save_model(str(tmp_path / "saved"))
    code = (
        "import sys\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n"
        "model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)\n"
        "tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=True)\n"
        "print(model(**tokenizer('abc', return_tensors='pt')).logits.sum().item())\n"
    )
    environment = {"PYTHONPATH": str(ROOT), "HF_HOME": str(tmp_path / "hf"), "PATH": "", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", code, str(tmp_path / "saved")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    expected = trainer.model.eval()(torch.tensor([[SEPARATOR, *b"abc"]])).logits.sum().item()
    assert float(done.stdout) == pytest.approx(expected, rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("options", [{}, INDEXED], ids=["nsa", "indexer"])
def test_trl_sft_trains_for_three_steps(options: dict, tmp_path: Path) -> None:
    """The first loss is that of untrained bytes; every parameter changes, the indexer's too."""
    trl, datasets = require("trl"), require("datasets")
    model, tokenizer = make_model(**options), hf.NSALabTokenizer()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    texts = ["def generate(model, prompts):\n    return prompts * 3\n" * 4, "a short text", "and another one " * 5] * 4
    arguments = trl.SFTConfig(
        str(tmp_path), max_steps=3, per_device_train_batch_size=2, gradient_accumulation_steps=2, max_length=128,
        report_to=[], use_cpu=True, save_strategy="no", logging_steps=1, learning_rate=1e-3, bf16=False,
    )  # fmt: skip
    dataset = datasets.Dataset.from_dict({"text": texts})
    trainer = trl.SFTTrainer(model, arguments, train_dataset=dataset, processing_class=tokenizer)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 3 and losses[0] == pytest.approx(math.log(256), abs=0.5) and losses[-1] < losses[0]
    unchanged = [name for name, parameter in model.named_parameters() if torch.equal(parameter, before[name])]
    assert not unchanged


@pytest.mark.parametrize("how", [{"packing": True}, {"padding_free": True, "max_length": None}])
def test_trl_sft_packs_documents(how: dict, tmp_path: Path) -> None:
    """The loss of packed documents is that of single documents."""
    trl, datasets = require("trl"), require("datasets")
    texts = ["def generate(model, prompts):\n    return prompts * 3\n", "a short text", "and another one " * 3]
    losses = []
    for number, options in enumerate(({"max_length": 256}, {"max_length": 256, **how})):
        dataset = datasets.Dataset.from_dict({"text": texts})
        arguments = trl.SFTConfig(
            str(tmp_path / str(number)), per_device_train_batch_size=3, per_device_eval_batch_size=3, report_to=[],
            use_cpu=True, bf16=False, eval_packing=how.get("packing", False) and number == 1, **options,
        )  # fmt: skip
        trainer = trl.SFTTrainer(
            make_model(), arguments, train_dataset=dataset, eval_dataset=dataset, processing_class=hf.NSALabTokenizer()
        )
        losses.append(trainer.evaluate()["eval_loss"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_trl_dpo_trains_the_indexer(tmp_path: Path) -> None:
    """DPO computes its loss from logits of two models."""
    trl, datasets = require("trl"), require("datasets")
    make_model(**INDEXED).save_pretrained(tmp_path / "model")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    pairs = {"prompt": ["hello ", "bye "], "chosen": ["world" * 9, "now" * 9], "rejected": ["xx" * 9, "yyy" * 9]}
    arguments = trl.DPOConfig(
        str(tmp_path), max_steps=2, per_device_train_batch_size=2, max_length=64, report_to=[], use_cpu=True,
        save_strategy="no", logging_steps=1, learning_rate=1e-3, bf16=False,
    )  # fmt: skip
    trainer = trl.DPOTrainer(
        model, args=arguments, train_dataset=datasets.Dataset.from_dict(pairs), processing_class=hf.NSALabTokenizer()
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[0] == pytest.approx(math.log(2), abs=1e-4) and losses[1] < losses[0]
    assert not [name for name, parameter in model.named_parameters() if torch.equal(parameter, before[name])]


def test_lm_eval_log_likelihood_and_generation(tmp_path: Path) -> None:
    """Log-likelihoods equal a forward pass, generation equals greedy; prompts are cut to the trained length."""
    require("lm_eval")
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    model, tokenizer = make_model().eval(), hf.NSALabTokenizer(model_max_length=64)
    harness = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=2, device="cpu", add_bos_token=True)
    assert harness.max_length == 64
    pairs = [("The quick brown", " fox"), ("a", " b c d"), ("", "start")]
    requests = [Instance("loglikelihood", {}, pair, index) for index, pair in enumerate(pairs)]
    for (context, continuation), (value, is_greedy) in zip(pairs, harness.loglikelihood(requests), strict=True):
        prefix = [SEPARATOR, *context.encode()]
        tokens = torch.tensor([prefix + list(continuation.encode())])
        log_probabilities = model(tokens).logits[0, len(prefix) - 1 : -1].log_softmax(-1)
        targets = tokens[0, len(prefix) :]
        assert value == pytest.approx(log_probabilities.gather(1, targets[:, None]).sum().item(), abs=1e-3)
        assert is_greedy == torch.equal(log_probabilities.argmax(-1), targets)
    prompts = ["def f(x):", "a much longer prompt, " * 5]
    options = {"until": ["\0\0"], "max_gen_toks": 6, "do_sample": False}
    requests = [Instance("generate_until", {}, (prompt, options), index) for index, prompt in enumerate(prompts)]
    for prompt, text in zip(prompts, harness.generate_until(requests), strict=True):
        ids = torch.tensor([[SEPARATOR, *prompt.encode()][-58:]])
        expected = model.generate(ids, max_new_tokens=6, do_sample=False, eos_token_id=SEPARATOR, pad_token_id=SEPARATOR)
        assert text == tokenizer.decode(expected[0, ids.shape[1] :], skip_special_tokens=True)
