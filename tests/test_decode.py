"""Decoding with a cache gives the logits of a full forward pass, wherever blocks and windows begin and end."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from fake_run import configuration, write_checkpoint, write_run
from safetensors.torch import save

from nsa_lab.config import ModelConfig, NSAConfig
from nsa_lab.decode import Decoder
from nsa_lab.generate import NoCheckpoint, complete, find_checkpoint, generate, load_model
from nsa_lab.model import NSATransformer

torch.set_num_threads(1)

GEOMETRY = NSAConfig(l=8, d=4, l_sel=8, n_sel=4, w=12)
# Around every length that something begins or ends at: d, l, l_sel, w, n_sel * l_sel.
PREFILLS = (1, 3, 4, 7, 8, 9, 11, 12, 13, 16, 31, 32, 33, 47)
LENGTH = 48


def tiny(**changes: object) -> ModelConfig:
    return ModelConfig(
        **{
            "dim": 24,
            "n_layers": 2,
            "n_heads": 4,
            "n_kv_groups": 2,
            "d_k": 8,
            "d_v": 6,
            "vocab_size": 37,
            "nsa": GEOMETRY,
            **changes,
        }
    )


def built(config: ModelConfig) -> NSATransformer:
    return NSATransformer(config, dtype=torch.float64, seed=5).double()


@pytest.mark.parametrize(
    "variant",
    [
        {},
        {"nsa": GEOMETRY.model_copy(update={"phi": "mlp", "gate": "softmax"})},
        {"attention": "dense"},
        {"n_kv_groups": 1},
        {"n_kv_groups": 4},
    ],
)
def test_token_by_token_equals_full_forward(variant: dict) -> None:
    model = built(tiny(**variant))
    tokens = torch.randint(0, 37, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    full = model(tokens)
    for prefill in PREFILLS if not variant else (1, 9, 33):
        decoder = Decoder(model, LENGTH, batch=2)
        parts = [decoder.append(tokens[:, :prefill]), decoder.append(tokens[:, prefill:])]
        torch.testing.assert_close(torch.cat(parts, 1), full, rtol=0, atol=1e-10)


def test_a_cache_reads_what_the_definition_reads() -> None:
    model = built(tiny(n_layers=1))
    decoder = Decoder(model, LENGTH)
    decoder.append(torch.zeros(1, 40, dtype=torch.int64))
    decoder.append(torch.ones(1, 8, dtype=torch.int64))
    cache = decoder._caches[0]
    assert cache._blocks == (LENGTH - GEOMETRY.l) // GEOMETRY.d + 1
    assert cache._k_win.shape[1] == GEOMETRY.w
    assert cache._k_raw.shape[1] < GEOMETRY.l


def test_a_decoder_that_is_full_says_so() -> None:
    decoder = Decoder(built(tiny(n_layers=1)), 4)
    with pytest.raises(ValueError, match="5 tokens do not fit into a decoder of capacity 4"):
        decoder.append(torch.zeros(1, 5, dtype=torch.int64))


def test_generation_is_a_function_of_its_seed_and_temperature_0_is_greedy() -> None:
    model = built(tiny())
    prompt = [1, 2, 3]
    assert generate(model, prompt, 12, seed=3) == generate(model, prompt, 12, seed=3)
    assert generate(model, prompt, 12, seed=3) != generate(model, prompt, 12, seed=4)
    greedy = list(prompt)
    for _ in range(12):
        greedy.append(int(model(torch.tensor([greedy]))[0, -1].argmax()))
    assert generate(model, prompt, 12, temperature=0) == greedy[3:]
    assert generate(model, prompt, 12, top_k=1, seed=9) == greedy[3:]
    assert max(generate(model, prompt, 40, temperature=5.0, vocab_size=10)) < 10


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="the prompt is empty"):
        generate(built(tiny(n_layers=1)), [], 3)


def test_a_run_goes_on_from_a_prompt(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path)
    model = NSATransformer(configuration().model, seed=1)
    folder = write_checkpoint(run_dir, 200, save(model.state_dict()))
    assert find_checkpoint(run_dir) == folder
    text = "".join(complete(run_dir, "def ", 30, seed=1))
    assert text
    assert text == "".join(complete(run_dir, "def ", 30, seed=1, step=200))
    torch.testing.assert_close(load_model(folder).head.weight, model.head.weight)


def test_what_cannot_be_loaded_is_explained(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path)
    with pytest.raises(NoCheckpoint, match="no checkpoint here"):
        find_checkpoint(run_dir)
    folder = write_checkpoint(run_dir, 100)
    with pytest.raises(NoCheckpoint, match="no checkpoint of step 7; there is 100"):
        find_checkpoint(run_dir, 7)
    (folder / "model.safetensors").write_bytes(b"other")
    with pytest.raises(NoCheckpoint, match="does not match its sha256"):
        load_model(folder)


def test_weights_that_are_broken_are_explained(tmp_path: Path) -> None:
    """The newest checkpoint of a run that was halted may be of the step before everything became nan."""
    run_dir = write_run(tmp_path)
    model = NSATransformer(configuration().model, seed=1)
    write_checkpoint(run_dir, 200, save({name: value * math.nan for name, value in model.state_dict().items()}))
    for temperature in (0.0, 0.8):
        with pytest.raises(NoCheckpoint, match="logits are not finite; use an earlier checkpoint"):
            "".join(complete(run_dir, "def ", 3, temperature=temperature))
