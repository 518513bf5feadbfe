"""Muon and AdamW as one optimiser: the definition in plain float64, torch's own of both, and which matrices are whose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nsa_lab.config import RunConfig
from nsa_lab.model import MLP, DenseAttention, SparseAttention, get_rotary_table
from nsa_lab.train.build import build_model
from nsa_lab.train.muon import Muon, find_muon_matrices, orthogonalize
from nsa_lab.train.step import make_optimizer

Tiny = Callable[..., RunConfig]
CPU = torch.device("cpu")
ADAM: dict[str, Any] = {"betas": (0.8, 0.9), "eps": 1e-6}
OURS = ("attention.qkv.weight", "attention.out.weight", "mlp.up.weight", "mlp.down.weight")


def orthogonal(x: Tensor) -> Tensor:
    """U p(S) V^T of one matrix, float64: the quintic five times on the singular values over their norm."""
    u, s, v = torch.linalg.svd(x.double(), full_matrices=False)
    s = s / s.norm()
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u @ s.diag() @ v


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.parametrize("shape", [(3, 5, 9), (2, 11, 4), (1, 1, 7), (2, 6, 6)])
def test_newton_schulz_is_the_polynomial_of_the_singular_values(shape: tuple[int, ...]) -> None:
    """Of each matrix by itself, whatever the size of its neighbours."""
    x = random(*shape) * torch.logspace(-3, 3, shape[0], dtype=torch.float64)[:, None, None]
    truth = torch.stack([orthogonal(one) for one in x])
    torch.testing.assert_close(orthogonalize(x, torch.float64), truth, rtol=0, atol=1e-10)
    torch.testing.assert_close(orthogonalize(x.float(), torch.float32).double(), truth, rtol=0, atol=1e-3)
    low = orthogonalize(x.float(), torch.bfloat16)
    assert low.dtype == torch.bfloat16
    assert (low.double() - truth).norm() < 0.05 * truth.norm()


def test_of_a_matrix_of_zeros_nothing_becomes_of_nan() -> None:
    assert torch.equal(orthogonalize(torch.zeros(2, 5, 3), torch.float32), torch.zeros(2, 5, 3))


def filled(*weights: Tensor) -> list[nn.Parameter]:
    return [nn.Parameter(weight.clone()) for weight in weights]


def give_gradients(parameters: list[nn.Parameter], seed: int) -> None:
    for number, p in enumerate(parameters):
        p.grad = random(*p.shape, seed=100 * seed + number, dtype=p.dtype)


def test_an_update_is_that_of_the_definition() -> None:
    """Several steps of every matrix of a weight by itself: Nesterov momentum, scale, decay, a rate that changes."""
    rows = [[3, 4, 4], [5], [4, 4], [1]]
    begun = [random(sum(r), columns, seed=7 + columns) for r, columns in zip(rows, (5, 9, 5, 7), strict=True)]
    weights = filled(*begun)
    optimizer = Muon(dict(zip(weights, rows, strict=True)), [], lr=1.0, weight_decay=0.3, **ADAM)
    truth, momenta = [w.clone() for w in begun], [torch.zeros_like(w) for w in begun]
    for step, lr in enumerate((0.1, 0.02, 0.05)):
        give_gradients(weights, step)
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
        for w, m, p, sizes in zip(truth, momenta, weights, rows, strict=True):
            assert p.grad is not None
            for here in torch.arange(sum(sizes)).split(sizes):
                m[here] = 0.95 * m[here] + 0.05 * p.grad[here]
                moved = orthogonal(0.95 * m[here] + 0.05 * p.grad[here])
                w[here] = (1 - lr * 0.3) * w[here] - lr * 0.2 * max(len(here), w.shape[1]) ** 0.5 * moved
    for w, m, p in zip(truth, momenta, weights, strict=True):
        torch.testing.assert_close(p.detach(), w, rtol=0, atol=1e-10)
        torch.testing.assert_close(optimizer.state[p], {"momentum_buffer": m}, rtol=0, atol=1e-12)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch 2.9 brought its own")
def test_it_moves_as_torch_does() -> None:
    """Which computes in bfloat16 on a CPU, too."""
    begun = [random(*shape, dtype=torch.float32) for shape in ((33, 17), (17, 33), (24, 24), (33, 17))]
    ours, theirs = filled(*begun), filled(*begun)
    settings: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1}
    muon = Muon({p: [len(p)] for p in ours}, [], **settings, **ADAM)
    torchs = torch.optim.Muon(theirs, adjust_lr_fn="match_rms_adamw", momentum=0.95, **settings)
    for step in range(4):
        for parameters, optimizer in ((ours, muon), (theirs, torchs)):
            give_gradients(parameters, step)
            optimizer.step()
    for p, other, w in zip(ours, theirs, begun, strict=True):
        assert (p - other).norm() < 0.02 * (other - w).norm()
        assert torch.equal(muon.state[p]["momentum_buffer"], torchs.state[other]["momentum_buffer"])


def test_what_is_not_its_own_moves_as_adamw_does_bit_for_bit() -> None:
    """A skipped update included, one without gradients, and a rate that changes."""
    begun = [random(5, 7, dtype=torch.float32), random(11, dtype=torch.float32), random(2, 3, 3, dtype=torch.float32)]
    ours, theirs = filled(*begun), filled(*begun)
    groups = [
        [{"params": [p[0], p[2]], "weight_decay": 0.3}, {"params": [p[1]], "weight_decay": 0.0}] for p in (ours, theirs)
    ]
    (matrix,) = filled(random(6, 4, dtype=torch.float32))
    muon = Muon({matrix: [6]}, groups[0], lr=0.02, weight_decay=0.1, **ADAM)
    adamw = torch.optim.AdamW(groups[1], lr=0.02, fused=True, **ADAM)
    for step in range(5):
        for parameters, optimizer in ((ours, muon), (theirs, adamw)):
            give_gradients(parameters, step)
            parameters[2].grad = None if step == 3 else parameters[2].grad
            for group in optimizer.param_groups:
                group["lr"] = 0.02 / (1 + step)
            optimizer.found_inf = torch.tensor(float(step == 2))
            optimizer.step()
    for p, other in zip(ours, theirs, strict=True):
        assert torch.equal(p, other)
        assert muon.state[p].keys() == adamw.state[other].keys()
        assert all(torch.equal(muon.state[p][key], value) for key, value in adamw.state[other].items())


def test_a_matrix_without_a_gradient_stays_and_those_after_it_move() -> None:
    begun = random(6, 4), random(6, 4, seed=1)
    still, moving = filled(*begun)
    moving.grad = random(6, 4, seed=2)
    Muon({still: [6], moving: [6]}, [], lr=0.1, weight_decay=0.2, **ADAM).step()
    assert torch.equal(still, begun[0]) and not torch.equal(moving, begun[1])


def test_where_an_update_is_skipped_no_bit_changes_and_the_next_one_is_as_if_it_had_not_been() -> None:
    (weight,) = filled(random(6, 4))
    (other,) = filled(weight.detach())
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
def test_it_takes_the_projections_and_no_gate_norm_embedding_or_indexer(tiny: Tiny, kind: str) -> None:
    config = tiny(optimizer="muon", weight_decay=0.3, **MODELS[kind])
    model = build_model(config, CPU)
    name_of = {p: name for name, p in model.named_parameters()}
    taken, decayed, spared = make_optimizer(model, config.train).param_groups
    assert {name_of[p] for p in taken["params"]} == {f"blocks.{block}.{name}" for block in range(2) for name in OURS}
    assert taken["weight_decay"] == decayed["weight_decay"] == 0.3 and spared["weight_decay"] == 0.0
    rest = [*decayed["params"], *spared["params"]]
    assert all(p.ndim >= 2 for p in decayed["params"]) and all(p.ndim == 1 for p in spared["params"])
    assert {*taken["params"], *rest} == {*name_of} and len(rest) + len(taken["params"]) == len(name_of)


@pytest.mark.parametrize("kind", MODELS)
def test_matrices_are_what_a_layer_tells_apart(tiny: Tiny, kind: str) -> None:
    """With all rows of a weight at zero but those of one matrix, that one's output alone is not zero."""
    model = build_model(tiny(**MODELS[kind]), CPU)
    found, x = find_muon_matrices(model), random(1, 5, 16, dtype=torch.float32)
    layer, mlp = model.blocks[0].attention, model.blocks[0].mlp
    assert isinstance(layer, SparseAttention | DenseAttention) and isinstance(mlp, MLP)
    weight = layer.qkv.weight.detach().clone()
    for number, here in enumerate(torch.arange(len(weight)).split(found[layer.qkv.weight])):
        with torch.no_grad():
            layer.qkv.weight.zero_()[here] = weight[here]
            q, keys, values, _ = layer.project_heads(x, get_rotary_table(5, 4, 1e4, CPU))
        assert [bool(out.any()) for out in (q, *keys, *values)] == [number == n for n in range(1 + 2 * layer.N_BRANCHES)]
    halves = mlp.up(x).chunk(2 if mlp.is_gated else 1, dim=-1)
    assert found[mlp.up.weight] == [half.shape[-1] for half in halves]
    assert found[layer.out.weight] == [16] and found[mlp.down.weight] == [16]


def test_an_update_is_about_as_large_as_one_of_adamw(tiny: Tiny) -> None:
    """So that one rate serves both: AdamW's are between .2 and .4 of the rate once its moments have settled."""
    config = tiny(optimizer="muon", weight_decay=0.0)
    model = build_model(config, CPU)
    optimizer = make_optimizer(model, config.train)
    before = {p: p.detach().clone() for p in model.parameters()}
    give_gradients(list(model.parameters()), 0)
    optimizer.step()
    for p, rows in find_muon_matrices(model).items():
        for moved in (p.detach() - before[p]).split(rows):
            assert 0.13 < moved.square().mean().sqrt() / config.train.lr < 0.25
