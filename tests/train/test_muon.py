"""Muon and AdamW in one optimizer: compared with the definition in float64, with torch's own, and which weights each
updates.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from looping import looped
from torch import Tensor, nn

from nsa_lab.config import RunConfig
from nsa_lab.model import MLP, DenseAttention, SparseAttention, get_rotary_table
from nsa_lab.train.build import build_model
from nsa_lab.train.muon import Muon, find_muon_matrices, is_muon_weight, orthogonalize
from nsa_lab.train.step import make_optimizer

Tiny = Callable[..., RunConfig]
CPU = torch.device("cpu")
ADAM: dict[str, Any] = {"betas": (0.8, 0.9), "eps": 1e-6}
OURS = ("attention.qkv.weight", "attention.out.weight", "mlp.up.weight", "mlp.down.weight")


def orthogonal(x: Tensor) -> Tensor:
    """Return U p(S) V^T of one matrix in float64: the quintic five times on the normalized singular values."""
    u, s, v = torch.linalg.svd(x.double(), full_matrices=False)
    s = s / s.norm()
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u @ s.diag() @ v


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@looped
@pytest.mark.parametrize("shape", [(3, 5, 9), (2, 11, 4), (1, 1, 7), (2, 6, 6)])
def test_newton_schulz_is_the_polynomial_of_the_singular_values(shape: tuple[int, ...]) -> None:
    """Each matrix is computed independently, whatever the scale of the others."""
    x = random(*shape) * torch.logspace(-3, 3, shape[0], dtype=torch.float64)[:, None, None]
    expected = torch.stack([orthogonal(one) for one in x])
    torch.testing.assert_close(orthogonalize(x, torch.float64), expected, rtol=0, atol=1e-10)
    torch.testing.assert_close(orthogonalize(x.float(), torch.float32).double(), expected, rtol=0, atol=1e-3)
    low = orthogonalize(x.float(), torch.bfloat16)
    assert low.dtype == torch.bfloat16
    assert (low.double() - expected).norm() < 0.05 * expected.norm()


def test_a_zero_matrix_stays_zero() -> None:
    assert torch.equal(orthogonalize(torch.zeros(2, 5, 3), torch.float32), torch.zeros(2, 5, 3))


def make_parameters(*weights: Tensor) -> list[nn.Parameter]:
    return [nn.Parameter(weight.clone()) for weight in weights]


def give_gradients(parameters: list[nn.Parameter], seed: int) -> None:
    for number, p in enumerate(parameters):
        p.grad = random(*p.shape, seed=100 * seed + number, dtype=p.dtype)


def test_an_update_follows_the_definition() -> None:
    """Several steps, each matrix of a weight separately: Nesterov momentum, scale, decay, a changing learning rate."""
    rows = [[3, 4, 4], [5], [4, 4], [1]]
    initial = [random(sum(r), columns, seed=7 + columns) for r, columns in zip(rows, (5, 9, 5, 7), strict=True)]
    weights = make_parameters(*initial)
    optimizer = Muon(dict(zip(weights, rows, strict=True)), [], lr=1.0, weight_decay=0.3, **ADAM)
    expected, momenta = [w.clone() for w in initial], [torch.zeros_like(w) for w in initial]
    for step, lr in enumerate((0.1, 0.02, 0.05)):
        give_gradients(weights, step)
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
        for w, m, p, sizes in zip(expected, momenta, weights, rows, strict=True):
            assert p.grad is not None
            for rows_of_matrix in torch.arange(sum(sizes)).split(sizes):
                m[rows_of_matrix] = 0.95 * m[rows_of_matrix] + 0.05 * p.grad[rows_of_matrix]
                moved = orthogonal(0.95 * m[rows_of_matrix] + 0.05 * p.grad[rows_of_matrix])
                w[rows_of_matrix] = (1 - lr * 0.3) * w[rows_of_matrix] - lr * 0.2 * max(
                    len(rows_of_matrix), w.shape[1]
                ) ** 0.5 * moved
    for w, m, p in zip(expected, momenta, weights, strict=True):
        torch.testing.assert_close(p.detach(), w, rtol=0, atol=1e-10)
        torch.testing.assert_close(optimizer.state[p], {"momentum_buffer": m}, rtol=0, atol=1e-12)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch 2.9 brought its own")
def test_muon_agrees_with_torch() -> None:
    """torch.optim.Muon computes in bfloat16 on a CPU too, so the tolerance is wide."""
    initial = [random(*shape, dtype=torch.float32) for shape in ((33, 17), (17, 33), (24, 24), (33, 17))]
    parameters_a, parameters_b = make_parameters(*initial), make_parameters(*initial)
    settings: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1}
    muon = Muon({p: [len(p)] for p in parameters_a}, [], **settings, **ADAM)
    torchs = torch.optim.Muon(parameters_b, adjust_lr_fn="match_rms_adamw", momentum=0.95, **settings)
    for step in range(4):
        for parameters, optimizer in ((parameters_a, muon), (parameters_b, torchs)):
            give_gradients(parameters, step)
            optimizer.step()
    for p, other, w in zip(parameters_a, parameters_b, initial, strict=True):
        assert (p - other).norm() < 0.02 * (other - w).norm()
        assert torch.equal(muon.state[p]["momentum_buffer"], torchs.state[other]["momentum_buffer"])


def test_the_adamw_part_equals_torch_bit_for_bit() -> None:
    """Includes a skipped update, a missing gradient, and a changing learning rate."""
    initial = [random(5, 7, dtype=torch.float32), random(11, dtype=torch.float32), random(2, 3, 3, dtype=torch.float32)]
    parameters_a, parameters_b = make_parameters(*initial), make_parameters(*initial)
    groups = [
        [{"params": [p[0], p[2]], "weight_decay": 0.3}, {"params": [p[1]], "weight_decay": 0.0}]
        for p in (parameters_a, parameters_b)
    ]
    (matrix,) = make_parameters(random(6, 4, dtype=torch.float32))
    muon = Muon({matrix: [6]}, groups[0], lr=0.02, weight_decay=0.1, **ADAM)
    adamw = torch.optim.AdamW(groups[1], lr=0.02, fused=True, **ADAM)
    for step in range(5):
        for parameters, optimizer in ((parameters_a, muon), (parameters_b, adamw)):
            give_gradients(parameters, step)
            parameters[2].grad = None if step == 3 else parameters[2].grad
            for group in optimizer.param_groups:
                group["lr"] = 0.02 / (1 + step)
            optimizer.found_inf = torch.tensor(float(step == 2))
            optimizer.step()
    for p, other in zip(parameters_a, parameters_b, strict=True):
        assert torch.equal(p, other)
        assert muon.state[p].keys() == adamw.state[other].keys()
        assert all(torch.equal(muon.state[p][key], value) for key, value in adamw.state[other].items())


def test_a_matrix_without_gradient_is_unchanged_and_later_ones_are_updated() -> None:
    initial = random(6, 4), random(6, 4, seed=1)
    unchanged, changed = make_parameters(*initial)
    changed.grad = random(6, 4, seed=2)
    Muon({unchanged: [6], changed: [6]}, [], lr=0.1, weight_decay=0.2, **ADAM).step()
    assert torch.equal(unchanged, initial[0]) and not torch.equal(changed, initial[1])


def test_a_skipped_update_has_no_effect_on_the_next_one() -> None:
    (weight,) = make_parameters(random(6, 4))
    (other,) = make_parameters(weight.detach())
    one, two = (Muon({p: [2, 4]}, [], lr=0.1, weight_decay=0.2, **ADAM) for p in (weight, other))
    for step in range(3):
        give_gradients([weight], step)
        weight.grad = weight.grad * float("nan") if step == 1 else weight.grad
        one.found_inf = torch.tensor(float(step == 1))
        one.step()
        if step != 1:
            give_gradients([other], step)
            two.step()
        assert torch.equal(weight, other)
    assert torch.equal(one.state[weight]["momentum_buffer"], two.state[other]["momentum_buffer"])


MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "everything": {
        "model": {"mlp": "gated", "d_v": 6, "matching_heads": 1, "selection_loss": 0.1, "indexer_block": 4},
        "nsa": {"phi": "mlp"},
    },
    "dense": {"model": {"attention": "dense", "d_v": 6}},
}


@pytest.mark.parametrize("kind", MODELS)
def test_muon_updates_projections_and_no_gate_norm_embedding_or_indexer(make_tiny_config: Tiny, kind: str) -> None:
    config = make_tiny_config(optimizer="muon", weight_decay=0.3, **MODELS[kind])
    model = build_model(config, CPU)
    name_of = {p: name for name, p in model.named_parameters()}
    taken, decayed, spared = make_optimizer(model, config.train).param_groups
    assert {name_of[p] for p in taken["params"]} == {f"blocks.{block}.{name}" for block in range(2) for name in OURS}
    assert {name_of[p] for p in taken["params"]} == {*filter(is_muon_weight, name_of.values())}
    assert taken["weight_decay"] == decayed["weight_decay"] == 0.3 and spared["weight_decay"] == 0.0
    rest = [*decayed["params"], *spared["params"]]
    assert all(p.ndim >= 2 for p in decayed["params"]) and all(p.ndim == 1 for p in spared["params"])
    assert {*taken["params"], *rest} == {*name_of} and len(rest) + len(taken["params"]) == len(name_of)


@pytest.mark.parametrize("kind", MODELS)
def test_matrix_rows_match_the_outputs_of_a_layer(make_tiny_config: Tiny, kind: str) -> None:
    """If all rows of a weight except one matrix are zero, only the output of that matrix is nonzero."""
    model = build_model(make_tiny_config(**MODELS[kind]), CPU)
    matrix_rows, x = find_muon_matrices(model), random(1, 5, 16, dtype=torch.float32)
    layer, mlp = model.blocks[0].attention, model.blocks[0].mlp
    assert isinstance(layer, SparseAttention | DenseAttention) and isinstance(mlp, MLP)
    weight = layer.qkv.weight.detach().clone()
    for number, rows_of_matrix in enumerate(torch.arange(len(weight)).split(matrix_rows[layer.qkv.weight])):
        with torch.no_grad():
            layer.qkv.weight.zero_()[rows_of_matrix] = weight[rows_of_matrix]
            q, keys, values, _ = layer.project_heads(x, get_rotary_table(5, 4, 1e4, CPU))
        assert [bool(out.any()) for out in (q, *keys, *values)] == [
            number == n for n in range(1 + 2 * len(layer.config.kv_sets))
        ]
    halves = mlp.up(x).chunk(2 if mlp.is_gated else 1, dim=-1)
    assert matrix_rows[mlp.up.weight] == [half.shape[-1] for half in halves]
    assert matrix_rows[layer.out.weight] == [16] and matrix_rows[mlp.down.weight] == [16]


def test_an_update_is_about_as_large_as_one_of_adamw(make_tiny_config: Tiny) -> None:
    """One learning rate serves both: AdamW's updates are 0.2 to 0.4 times the rate once its moments have converged."""
    config = make_tiny_config(optimizer="muon", weight_decay=0.0)
    model = build_model(config, CPU)
    optimizer = make_optimizer(model, config.train)
    before = {p: p.detach().clone() for p in model.parameters()}
    give_gradients(list(model.parameters()), 0)
    optimizer.step()
    for p, rows in find_muon_matrices(model).items():
        for moved in (p.detach() - before[p]).split(rows):
            assert 0.13 < moved.square().mean().sqrt() / config.train.lr < 0.25
