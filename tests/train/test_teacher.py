"""The teacher of a conversion: its divergence, its part of a step, and its identity."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from nsa_lab.config import ConfigError, RunConfig
from nsa_lab.data import Batch
from nsa_lab.model import NSATransformer
from nsa_lab.train import teacher as teacher_module
from nsa_lab.train.checkpoint_state import ResumeRefused, check_same_trajectory
from nsa_lab.train.distributed import World
from nsa_lab.train.step import AUXILIARY, LOSS, TEACHER_KL, Stepper, make_optimizer
from nsa_lab.train.teacher import compute_fingerprint, make_teacher, sum_kl_divergence

CPU = torch.device("cpu")
SHAPE = {"dim": 24, "n_layers": 2, "n_heads": 4, "n_kv_groups": 2, "d_k": 6, "d_v": 6}
CONVERTED = SHAPE | {"branches": ["sel"], "indexer_block": 1, "selection_loss": 0.3}


def make_config(**train: Any) -> RunConfig:
    train = {"seq_len": 32, "batch_size": 4, "initial_weights": "somewhere", "teacher_weight": 0.7, **train}
    return RunConfig.from_dict({"model": CONVERTED, "nsa": {"l": 4, "d": 4, "l_sel": 4, "n_sel": 3}, "train": train})


def make_stepper(config: RunConfig, model: NSATransformer, teacher: NSATransformer | None = None) -> Stepper:
    settings: dict[str, Any] = {"device": CPU, "use_bf16": False, "world": World(), "teacher": teacher}
    optimizer = make_optimizer(model, config.train)
    return Stepper(model, model, optimizer, config.train, auxiliary_loss=model.auxiliary_loss, **settings)


def test_the_divergence_is_that_of_float64_in_chunks_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    own, expected = (4 * torch.randn(3, 7, 11, generator=generator) for _ in range(2))
    weights = torch.rand(3, 7, generator=generator).masked_fill(torch.rand(3, 7, generator=generator) < 0.3, 0.0)
    wide = own.double().requires_grad_()
    p, q = expected.double().softmax(-1), wide.softmax(-1)
    for token_weights in (None, weights):
        by_token = (p * (p.log() - q.log())).sum(-1)
        reference = (by_token * (1 if token_weights is None else token_weights.double())).sum()
        (gradient,) = torch.autograd.grad(reference, wide, retain_graph=True)
        for n_numbers in (1, 2 * 11, 5 * 11 + 3, 1 << 20):
            monkeypatch.setattr(teacher_module, "CHUNK_NUMBERS", n_numbers)
            logits = own.clone().requires_grad_()
            result = sum_kl_divergence(logits, expected, token_weights)
            result.backward()
            assert result.dtype == torch.float32 and logits.grad is not None
            torch.testing.assert_close(result.double(), reference, rtol=1e-6, atol=0)
            torch.testing.assert_close(logits.grad.double(), gradient, rtol=1e-5, atol=1e-6)


def test_float32_tensors_are_limited_to_a_chunk_forward_and_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    class LargestFloat32(TorchDispatchMode):
        n_numbers = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            for tensor in result if isinstance(result, (tuple, list)) else (result,):
                if isinstance(tensor, Tensor) and tensor.dtype == torch.float32:
                    self.n_numbers = max(self.n_numbers, tensor.numel())
            return result

    monkeypatch.setattr(teacher_module, "CHUNK_NUMBERS", 300)
    own, expected = (torch.randn(2, 50, 31).bfloat16().requires_grad_() for _ in range(2))
    with LargestFloat32() as largest:
        sum_kl_divergence(own, expected.detach()).backward()
    assert own.grad is not None and own.grad.dtype == torch.bfloat16
    assert 200 < largest.n_numbers <= 300


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("micro_batch_size", [1, 4])
def test_a_step_adds_the_weighted_divergence(micro_batch_size: int, weighted: bool) -> None:
    config = make_config(micro_batch_size=micro_batch_size)
    model = NSATransformer(config.model, seed=0)
    teacher = make_teacher(NSATransformer(config.model, seed=1), config.runtime)
    before = compute_fingerprint(teacher)
    step = make_stepper(config, model, teacher)
    tokens = torch.randint(256, (4, 33), generator=torch.Generator().manual_seed(0))
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    weights = torch.rand(4, 32, generator=torch.Generator().manual_seed(1)) if weighted else torch.ones(4, 32)
    logits = model(inputs)
    auxiliary = model.auxiliary_loss()
    by_token = nn.functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
    loss = (by_token * weights).sum() / weights.sum()
    kl = sum_kl_divergence(logits, teacher(inputs), weights) / weights.sum()
    expected = torch.autograd.grad(loss + auxiliary + 0.7 * kl, list(model.parameters()))
    result = step.step(inputs, targets, 0.0, lambda: None, weights=weights if weighted else None)
    torch.testing.assert_close(result[[LOSS, AUXILIARY, TEACHER_KL]], torch.stack([loss, auxiliary, kl]).detach())
    scale = min(1.0, config.train.grad_clip / float(torch.cat([g.flatten() for g in expected]).norm()))
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, scale * gradient, rtol=1e-3, atol=1e-6)
    assert compute_fingerprint(teacher) == before and not any(p.requires_grad for p in teacher.parameters())


def test_the_teacher_is_the_model_with_dense_attention() -> None:
    config = make_config()
    model = NSATransformer(config.model, seed=0).eval()
    teacher, tokens = make_teacher(model, config.runtime), torch.randint(256, (2, 32))
    every = model.config.model_copy(update={"nsa": model.config.nsa.model_copy(update={"n_sel": 8})})
    all_selected = NSATransformer(every, seed=0).eval()
    torch.testing.assert_close(teacher(tokens), all_selected(tokens))
    assert not torch.allclose(teacher(tokens), model(tokens), atol=1e-3)
    fingerprint = compute_fingerprint(teacher)
    with torch.no_grad():
        model.head.weight.add_(1.0)  # not a weight of the teacher
    assert compute_fingerprint(teacher) == fingerprint
    with torch.no_grad():
        teacher.norm.weight[0] = torch.nextafter(teacher.norm.weight[0], torch.tensor(2.0))
    assert compute_fingerprint(teacher) != fingerprint


def test_without_a_teacher_its_divergence_is_zero() -> None:
    config = make_config(teacher_weight=0.0)
    model = NSATransformer(config.model, seed=0)
    step = make_stepper(config, model)
    tokens = torch.zeros(4, 32, dtype=torch.int64)
    assert step.step(tokens, tokens, 0.0, lambda: None)[TEACHER_KL] == 0
    computed = step.compute_logits(model, Batch(tokens, tokens), None)
    loss = computed.logits.sum()
    unchanged, divergence = step.add_teacher_kl(loss, computed, Batch(tokens, tokens), None)
    assert unchanged is loss and divergence == 0


def test_another_teacher_and_settings_without_one_are_refused() -> None:
    config = make_config()
    state = {"trajectory": {}, "data_identity": "text", "teacher": "0123"}
    for other in ("4567", None):
        with pytest.raises(ResumeRefused, match=rf"weights of the teacher .*: 0123 in the checkpoint, {other} now"):
            check_same_trajectory(state, config, "text", other)
    for train, message in (
        ({"initial_weights": None}, r"expected pretrained weights that are trained, got train.initial_weights = None"),
        ({"trainable": "indexer"}, r"train.trainable = indexer; use nsa-lab convert"),
        ({"stages": [{"steps": 1, "seq_len": 32, "batch_size": 1, "lr": 1.0, "rope_theta": 1e6}]}, r"RoPE bases"),
    ):
        with pytest.raises(ConfigError, match=message):
            sections = make_config().to_dict()
            if "stages" in train:
                for key in ("seq_len", "batch_size", "lr", "steps"):
                    sections["train"].pop(key, None)
            sections["train"] = {"initial_weights": "somewhere", "teacher_weight": 1.0, **train}
            RunConfig.from_dict(sections)
    with pytest.raises(ConfigError, match=r"model.branches = \['cmp', 'sel', 'win'\]; set model.branches: \[sel\]"):
        RunConfig.from_dict({"train": {"initial_weights": "somewhere", "teacher_weight": 1.0}})
