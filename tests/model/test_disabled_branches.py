"""Disabled branches (`ModelConfig.silent`): their output is zero, and their weights are not trained."""

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
    """The model equals one with the same weights and the output of that branch replaced by zeros."""
    full, tokens = make_model(), make_tokens(make_config(), 61)
    disabled = make_model(silent=[branch])
    disabled.load_state_dict(full.state_dict())
    torch.testing.assert_close(
        disabled(tokens), forward_with_ablation(full, tokens, Ablation(disabled_branch=branch)), rtol=0, atol=1e-12
    )


def test_with_only_the_window_outputs_depend_only_on_the_window() -> None:
    """Two layers with a window of 10 depend on the token 18 back, but not on the one 19 back."""
    model, tokens = make_model(silent=["cmp", "sel"]), make_tokens(make_config(), 61, batch=1)
    before = model(tokens)[0, 40]
    for back, is_in_reach in ((19, False), (18, True)):
        other = tokens.clone()
        other[0, 40 - back] = (other[0, 40 - back] + 1) % 64
        assert torch.equal(model(other)[0, 40], before) != is_in_reach


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
    logits = torch.cat([decoder.append(part) for part in tokens.split([20, 1, 1, 11], dim=1)], dim=1)
    torch.testing.assert_close(logits, model(tokens), rtol=0, atol=1e-10)


def test_invalid_disabled_branches_raise() -> None:
    for silent in (["cmp", "sel", "win"], ["cmp", "cmp"]):
        with pytest.raises(ConfigError, match="name each branch once, and not all of cmp, sel, win"):
            ModelConfig(silent=silent)
    with pytest.raises(ConfigError, match="a dense model has no branches"):
        ModelConfig(silent=["cmp"], attention="dense")
    with pytest.raises(ConfigError, match=r"model\.silent\.0 = 'all'"):
        RunConfig.from_dict({"model": {"silent": ["all"]}})
    assert "silent" not in RunConfig().to_dict()["model"]
    config = RunConfig.from_dict({"model": {"silent": ["cmp", "sel"]}})
    assert RunConfig.from_dict(config.to_dict()) == config and config.to_dict()["model"]["silent"] == ["cmp", "sel"]
