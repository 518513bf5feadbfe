"""Branches that are silent by configuration: the rest computes as if they said nothing, and nothing of theirs learns."""

from __future__ import annotations

import pytest
import torch
from model_inputs import compute_loss, make_config, make_tokens

from nsa_lab.config import ConfigError, ModelConfig, RunConfig
from nsa_lab.evaluate import Ablation, forward_with_ablation
from nsa_lab.inference.decode import Decoder
from nsa_lab.model import BRANCHES, NSATransformer, SparseAttention


def make_model(**changes: object) -> NSATransformer:
    return NSATransformer(make_config(**changes), dtype=torch.float64, seed=0).double()


@pytest.mark.parametrize("branch", BRANCHES)
def test_disabling_a_branch_sets_its_gate_to_zero(branch: str) -> None:
    """Trained or not: the same weights, computed by parts, with that branch's output replaced by zeros."""
    heard, tokens = make_model(), make_tokens(make_config(), 61)
    silent = make_model(silent=[branch])
    silent.load_state_dict(heard.state_dict())
    torch.testing.assert_close(
        silent(tokens), forward_with_ablation(heard, tokens, Ablation(disabled_branch=branch)), rtol=0, atol=1e-12
    )


def test_with_only_the_window_outputs_depend_only_on_the_window() -> None:
    """Two layers of a window of 10: a token 19 back is out of reach, one 18 back is not."""
    model, tokens = make_model(silent=["cmp", "sel"]), make_tokens(make_config(), 61, batch=1)
    before = model(tokens)[0, 40]
    for back, reached in ((19, False), (18, True)):
        other = tokens.clone()
        other[0, 40 - back] = (other[0, 40 - back] + 1) % 64
        assert torch.equal(model(other)[0, 40], before) != reached


def test_softmax_gates_are_normalized_over_the_other_branches() -> None:
    model = make_model(gate="softmax", silent=["sel"])
    layer = model.blocks[0].attention
    assert isinstance(layer, SparseAttention)
    gates = layer.compute_gates(torch.randn(2, 5, 24, dtype=torch.float64))
    assert (gates[..., 1] == 0).all() and torch.allclose(gates.sum(-1), torch.ones((), dtype=torch.float64))


@pytest.mark.parametrize("gate", ["sigmoid", "softmax"])
def test_only_the_enabled_branches_are_trained(gate: str) -> None:
    model = make_model(silent=["win"], gate=gate)
    compute_loss(model, make_tokens(model.config, 62)).backward()
    c = model.config
    for block in model.blocks:
        q, k, v = block.attention.qkv.weight.grad.split([4 * c.d_k, 6 * c.d_k, 6 * c.d_v])
        gates = block.attention.gate.weight.grad.view(4, 3, -1)
        assert (k.view(3, -1)[2] == 0).all() and (v.view(3, -1)[2] == 0).all() and (gates[:, 2] == 0).all()
        assert (q != 0).any(1).all() and all((part.view(3, -1)[:2] != 0).any(1).all() for part in (k, v))


def test_branches_are_disabled_in_decoding_too() -> None:
    model, tokens = make_model(silent=["sel"]).eval(), make_tokens(make_config(), 33)
    decoder = Decoder(model, 33, batch=2)
    told = torch.cat([decoder.append(part) for part in tokens.split([20, 1, 1, 11], dim=1)], dim=1)
    torch.testing.assert_close(told, model(tokens), rtol=0, atol=1e-10)


def test_invalid_disabled_branches_raise() -> None:
    for silent in (["cmp", "sel", "win"], ["cmp", "cmp"]):
        with pytest.raises(ConfigError, match="name a branch once, and leave one of cmp, sel and win"):
            ModelConfig(silent=silent)
    with pytest.raises(ConfigError, match="a dense model has no branches"):
        ModelConfig(silent=["cmp"], attention="dense")
    with pytest.raises(ConfigError, match=r"model\.silent\.0 = 'all'"):
        RunConfig.from_dict({"model": {"silent": ["all"]}})
    assert "silent" not in RunConfig().to_dict()["model"]
    said = RunConfig.from_dict({"model": {"silent": ["cmp", "sel"]}})
    assert RunConfig.from_dict(said.to_dict()) == said and said.to_dict()["model"]["silent"] == ["cmp", "sel"]
