"""Training changes every parameter, learns text, and learns noise only if the future leaks."""

from __future__ import annotations

import math
import this
from collections.abc import Callable, Iterator

import pytest
import torch
from model_inputs import compute_loss, make_config

from nsa_lab.attention import torch_backend
from nsa_lab.config import ModelConfig
from nsa_lab.model import NSATransformer

LEARNING_RATE = 2e-4
NOISE_MARGIN = 0.02  # nats below ln V at which noise would have been learnt


def train(model: NSATransformer, batches: Iterator[torch.Tensor], steps: int, lr: float) -> list[float]:
    """Train and return the loss of each new batch before its update."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
    losses = []
    for _ in range(steps):
        loss = compute_loss(model, next(batches))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def generate_text(length: int = 48, batch: int = 4) -> Iterator[torch.Tensor]:
    """Yield windows of an essay that is part of every Python installation."""
    essay = torch.tensor(list("".join(this.d.get(c, c) for c in this.s).encode()))
    generator = torch.Generator().manual_seed(0)
    while True:
        starts = torch.randint(0, len(essay) - length - 1, (batch,), generator=generator)
        yield torch.stack([essay[s : s + length + 1] for s in starts.tolist()])


def generate_noise(length: int = 64, batch: int = 8) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    while True:
        yield torch.randint(0, 256, (batch, length + 1), generator=generator)


@pytest.mark.slow
@pytest.mark.parametrize(("gate", "phi"), [pytest.param("sigmoid", "avg", marks=pytest.mark.nightly), ("softmax", "mlp")])
def test_200_steps_change_every_parameter_and_learn_the_text(gate: str, phi: str) -> None:
    model = NSATransformer(make_config(gate=gate, phi=phi, vocab_size=256), seed=0)
    with torch.no_grad():  # gates that start all but flat: entropy ln 3, where a gate that cannot learn stays
        for block in model.blocks:
            block.attention.gate.weight.mul_(0.01)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    probe = next(generate_text())[:, :-1]
    entropy = model.statistics(probe)["gate_entropy"]
    assert (entropy - math.log(3)).abs().max() < 1e-3
    losses = train(model, generate_text(), 200, lr=3e-3)
    assert not any(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert (model.statistics(probe)["gate_entropy"] - entropy).abs().min() > 1e-3
    assert sum(losses[-20:]) / 20 < losses[0] - 2


def find_unchanged_parameters(dtype: torch.dtype) -> set[str]:
    """Return the parameters that 200 steps at the production learning rate do not change."""
    model = NSATransformer(make_config(vocab_size=256), dtype=dtype, seed=0).to(dtype)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    train(model, generate_text(length=24, batch=2), 200, LEARNING_RATE)
    return {name for name, p in model.named_parameters() if torch.equal(p, before[name])}


@pytest.mark.slow
def test_float32_weights_all_change_at_the_production_rate_and_bf16_ones_do_not() -> None:
    """The check detects it: 2e-4 is below half an ulp of a bf16 weight of 1.0, so norms do not change."""
    assert not find_unchanged_parameters(torch.float32)
    stuck = find_unchanged_parameters(torch.bfloat16)
    assert {name for name in stuck if "norm" in name} == {
        "norm.weight",
        *(f"blocks.{i}.{part}_norm.weight" for i in range(2) for part in ("attention", "mlp")),
    }


def make_noise_config() -> ModelConfig:
    return make_config(dim=64, n_layers=1, n_heads=2, n_kv_groups=1, d_k=32, d_v=32, vocab_size=256, nsa={"w": 4})


def assert_nothing_learned(losses: list[float]) -> None:
    floor = math.log(256) - NOISE_MARGIN
    assert sum(losses[-50:]) / 50 >= floor, "noise was learnt: the future leaks"


@pytest.mark.nightly
def test_noise_stays_at_ln_256() -> None:
    assert_nothing_learned(train(NSATransformer(make_noise_config(), seed=0), generate_noise(), 300, lr=3e-3))


def shift_window_ahead(real: Callable) -> Callable:
    return lambda q, k, v, nsa: real(q, k.roll(-1, 1), v.roll(-1, 1), nsa)


def shift_selection_ahead(real: Callable) -> Callable:
    return lambda q, k, v, blocks, nsa: real(q, k.roll(-1, 1), v.roll(-1, 1), blocks, nsa)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("branch", "leak"),
    [
        ("window_attention", shift_window_ahead),
        pytest.param("selected_attention", shift_selection_ahead, marks=pytest.mark.nightly),
    ],
)
def test_a_leak_of_one_token_is_caught(branch: str, leak: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_backend, branch, leak(getattr(torch_backend, branch)))
    losses = train(NSATransformer(make_noise_config(), seed=0), generate_noise(), 150, lr=3e-3)
    with pytest.raises(AssertionError, match="the future leaks"):
        assert_nothing_learned(losses)
