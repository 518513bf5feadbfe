"""The model: parameters, initial values and loss, FLOPs, and gradients of all parameters."""

from __future__ import annotations

import math

import pytest
import torch
from looping import looped
from model_inputs import VARIANTS, compute_loss, format_variant, make_config, make_tokens
from torch.utils.flop_counter import FlopCounterMode

from nsa_lab.attention import geometry, reference
from nsa_lab.attention.compression import make_phi
from nsa_lab.config import ModelConfig, NSAConfig
from nsa_lab.model import BACKWARD_FLOPS, MLP, NSATransformer

PRODUCTION = {"dim": 768, "n_heads": 12, "n_kv_groups": 2, "d_k": 64, "d_v": 64, "vocab_size": 256}


def test_the_default_model_has_78_600_960_parameters() -> None:
    with torch.device("meta"):
        model = NSATransformer(ModelConfig(), device="meta", backend="torch")
    per_layer = 768 * (12 * 64 + 3 * 2 * 128) + 768 * 36 + 768 * 768 + 8 * 768 * 768 + 2 * 768
    assert model.parameter_count() == 78_600_960 == 12 * per_layer + 2 * 256 * 768 + 768


@looped
@pytest.mark.parametrize("variant", VARIANTS, ids=format_variant)
@pytest.mark.parametrize("length", [12, 41])
def test_every_parameter_gets_a_gradient(variant: dict[str, str], length: int) -> None:
    """A branch that is a constant leaves its keys without one. From two compression blocks on (l + d tokens), because a
    softmax over one key is a constant too, and the phi of the keys learns nothing from it.
    """
    config = make_config(**variant)
    model = NSATransformer(config, seed=0)
    compute_loss(model, make_tokens(config, length + 1)).backward()
    for name, p in model.named_parameters():
        assert p.grad is not None and p.grad.isfinite().all() and p.grad.abs().max() > 0, name


@pytest.mark.parametrize("attention", ["nsa", "dense"])
def test_normalized_embeddings_have_unit_rms(attention: str) -> None:
    config = make_config(attention=attention, embedding_norm=True)
    model, entered = NSATransformer(config, seed=0), []
    plain = NSATransformer(make_config(attention=attention), seed=0)
    assert model.parameter_count() == plain.parameter_count() and model.flops_per_token(31) == plain.flops_per_token(31)
    model.blocks[0].register_forward_pre_hook(lambda _, inputs: entered.append(inputs[0]))
    tokens = make_tokens(config, 31)
    compute_loss(model, tokens).backward()
    looked_up = model.embedding(tokens[:, :-1]).double()
    wanted = looked_up / (looked_up.square().mean(-1, keepdim=True) + config.norm_eps).sqrt()
    torch.testing.assert_close(entered[0].double(), wanted, rtol=1e-6, atol=1e-6)
    assert model.embedding.weight.grad.abs().max() > 0


def test_every_branch_uses_its_own_rows_of_the_projection() -> None:
    """Every row of the projection: queries, and keys and values of all three branches."""
    config = make_config()
    model = NSATransformer(config, seed=0)
    compute_loss(model, make_tokens(config, 60)).backward()
    for block in model.blocks:
        assert (block.attention.qkv.weight.grad.abs().max(1).values > 0).all()
        assert (block.attention.gate.weight.grad.abs().max(1).values > 0).all()


@pytest.mark.slow
@looped
@pytest.mark.parametrize(
    ("config", "length"),
    [
        (ModelConfig(**PRODUCTION, n_layers=2), 256),
        (ModelConfig(**PRODUCTION, n_layers=1, mlp="gated"), 64),
        (ModelConfig(dim=128, n_layers=4, n_heads=4, n_kv_groups=2, d_k=32, d_v=32), 256),
        (ModelConfig(dim=64, n_layers=2, n_heads=4, n_kv_groups=1, d_k=16, d_v=16, attention="dense"), 256),
        (ModelConfig(dim=32, n_layers=1, n_heads=2, n_kv_groups=1, d_k=16, d_v=16, vocab_size=5000), 256),
    ],
    ids=["production width", "gated", "small", "dense", "large vocabulary"],
)
def test_the_first_loss_is_ln_v(config: ModelConfig, length: int) -> None:
    model = NSATransformer(config, seed=0)
    with torch.no_grad():
        loss = compute_loss(model, make_tokens(config, length + 1, batch=2)).item()
    assert loss == pytest.approx(math.log(config.vocab_size), rel=0.02)


@pytest.mark.parametrize("gate", ["sigmoid", "softmax"])
def test_gates_start_different_and_have_a_gradient_for_their_input(gate: str) -> None:
    """A gate layer of zeros would give uniform gates and no gradient for its input."""
    config = make_config(gate=gate, dim=64)
    layer = NSATransformer(config, seed=0).blocks[0].attention
    x = torch.nn.functional.normalize(torch.randn(2, 50, 64), dim=-1) * 8  # rms 1, as after the norm
    x.requires_grad_()
    assert layer.gate(x).std() > 0.5
    gates = layer.compute_gates(x)
    assert gates.std() > 0.05 and not ((gates < 0.01) | (gates > 0.99)).float().mean() > 0.05
    (grad,) = torch.autograd.grad(gates[..., 0].sum(), x)
    assert (grad != 0).any(-1).all()


def test_activations_keep_their_scale_through_the_layers() -> None:
    """The residual stream grows about as much with twelve layers as with one."""
    growth = []
    for layers in (1, 12):
        model = NSATransformer(make_config(dim=96, n_layers=layers), seed=0)
        sizes = []
        model.norm.register_forward_pre_hook(lambda _, args, sizes=sizes: sizes.append(args[0].pow(2).mean().sqrt().item()))
        model(make_tokens(model.config, 40))
        growth.append(sizes[0])
    assert growth[1] < 2 * growth[0]


def test_equal_seeds_give_equal_models() -> None:
    one, same, other = (NSATransformer(make_config(phi="mlp"), seed=seed) for seed in (3, 3, 4))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), same.parameters(), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    other.reset_parameters(3)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_without_a_seed_models_differ() -> None:
    one, other = (NSATransformer(make_config()) for _ in range(2))
    assert not torch.equal(one.head.weight, other.head.weight)


def test_without_a_seed_weights_follow_the_global_generator_and_leave_it_seeded() -> None:
    made = []
    for _ in range(2):
        torch.manual_seed(11)
        made.append((NSATransformer(make_config()), torch.rand(3)))
    (one, next_one), (other, next_other) = made
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    assert torch.equal(next_one, next_other), "what else is drawn is not drawn anew"


def test_a_model_on_the_meta_device_gets_weights_later() -> None:
    with torch.device("meta"):
        model = NSATransformer(make_config(phi="mlp"))
    assert all(p.is_meta for p in model.parameters())
    model.to_empty(device="cpu").reset_parameters(3)
    for name, weights in NSATransformer(make_config(phi="mlp"), seed=3).state_dict().items():
        assert torch.equal(model.state_dict()[name], weights), name


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        (torch.zeros(4, dtype=torch.int64), r"expected int64 \[B, T\], got torch.int64 \(4,\)"),
        (torch.zeros(1, 4, dtype=torch.int32), "got torch.int32"),
        (torch.zeros(1, 4), "got torch.float32"),
    ],
)
def test_tokens_of_another_dtype_or_shape_raise(tokens: torch.Tensor, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        NSATransformer(make_config())(tokens)


@pytest.mark.parametrize(("attention", "mlp"), [("nsa", "plain"), ("nsa", "gated"), ("dense", "plain")])
def test_weight_flops_equal_torchs_count(attention: str, mlp: str) -> None:
    """Forward and backward of every matrix; 0.1 % apart, which is the norms, counted here as if they were matrices."""
    config = make_config(dim=96, attention=attention, mlp=mlp, vocab_size=256)
    model = NSATransformer(config, seed=0)
    tokens = make_tokens(config, 33)
    with FlopCounterMode(display=False) as counter:
        compute_loss(model, tokens).backward()
    counts = counter.get_flop_counts()["Global"]
    linear = counts[torch.ops.aten.mm]
    per_key = 2 * config.n_layers * config.n_heads * (config.d_k + config.d_v)
    reads = geometry.mean_reads(32, config.nsa)
    keys = {"nsa": reads["cmp"] + reads["sel"] + reads["win"], "dense": reads["dense"]}
    for kind in ("nsa", "dense"):
        weights = model.flops_per_token(32)[kind] - (1 + BACKWARD_FLOPS) * per_key * keys[kind]
        # torch counts no gradient of the first layer's input where the input needs none; the embedding's does.
        assert weights * 64 == pytest.approx(linear, rel=4e-3)


def test_flops_of_documents_are_the_mean_over_their_tokens() -> None:
    model = NSATransformer(make_config(), seed=0)
    alone = {length: model.flops_per_token(length) for length in (5, 64)}
    mean = model.flops_per_token({5: 4, 64: 2, 0: 3})
    for kind in ("nsa", "dense"):
        assert mean[kind] == pytest.approx((20 * alone[5][kind] + 128 * alone[64][kind]) / 148)
        assert model.flops_per_token({64: 7}) == alone[64] != mean


@pytest.mark.parametrize("length", [17, 40])
def test_key_flops_equal_torchs_count(length: int) -> None:
    """The reference computes all scores: T keys per query."""
    q, k, v = torch.randn(1, length, 4, 6), torch.randn(1, length, 2, 6), torch.randn(1, length, 2, 5)
    with FlopCounterMode(display=False) as counter:
        reference.window_attention(q, k, v, NSAConfig())
    assert counter.get_total_flops() == 2 * 4 * (6 + 5) * length * length


def test_sparse_flops_cross_dense_flops_at_the_computed_length() -> None:
    """At 2048 tokens NSA attends to 1.26 times as many keys as dense attention, and at 64k to far fewer."""
    nsa = NSAConfig()
    ratio = {}
    for length in (2048, 65536):
        reads = geometry.mean_reads(length, nsa)
        ratio[length] = (reads["cmp"] + reads["sel"] + reads["win"]) / reads["dense"]
    assert ratio[2048] == pytest.approx(1.2, abs=0.1)
    assert ratio[65536] < 0.12


def test_describe_has_the_real_counts() -> None:
    model = NSATransformer(make_config(), seed=0)
    line = model.describe(64)
    assert f"{model.parameter_count():,} parameters" in line and "compressed torch" in line and "\n" not in line
    flops = model.flops_per_token(64)
    assert f"{flops['nsa'] / 1e6:,.1f} MFLOPs per token at 64 tokens (" in line, "in the unit of a plan"


@pytest.mark.parametrize("attention", ["nsa", "dense"])
def test_a_model_describes_its_own_attention(attention: str) -> None:
    model = NSATransformer(make_config(attention=attention), seed=0)
    flops = model.flops_per_token(2048)
    assert flops["nsa"] != flops["dense"]
    told = (
        f"; {flops[attention] / 1e6:,.1f} MFLOPs per token at 2,048 tokens ({flops['nsa'] / flops['dense']:.2f} of dense)"
    )
    line = model.describe(2048)
    assert line.startswith(f"{attention} transformer: ") and told in line


@pytest.mark.parametrize("width", [6, 5])
def test_phi_as_an_mlp_is_four_head_widths_wide(width: int) -> None:
    """For keys and for values; checkpoints depend on it."""
    phi = make_phi(make_config(phi="mlp").nsa, width)
    assert phi is not None and sum(p.numel() for p in phi.parameters()) == 8 * width + 8 * width * 4 * width + 4 * width**2


@pytest.mark.parametrize("kind", ["plain", "gated"])
def test_hidden_width_of_the_mlp(kind: str) -> None:
    config = make_config(mlp=kind, mlp_hidden=17)
    mlp = MLP(config)
    assert mlp.down.in_features == 17 and mlp.up.out_features == (34 if kind == "gated" else 17)
    assert MLP(make_config(mlp=kind)).down.in_features == 96


def test_the_number_of_operations_is_sublinear_in_tokens() -> None:
    """No operation runs once per token: 48 tokens need as many operations as 24, if both fit one chunk."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.calls += 1
            return func(*args, **(kwargs or {}))

    model, counts = NSATransformer(make_config(n_layers=1, nsa={"w": 64, "n_sel": 8}), seed=0), []
    for length in (24, 48):
        with torch.no_grad(), Count() as count:
            model(make_tokens(model.config, length))
        counts.append(count.calls)
    assert counts[0] == counts[1]


@looped
@pytest.mark.parametrize("layers", [1, 2, 5, 12])
def test_any_depth_trains(layers: int) -> None:
    config = make_config(n_layers=layers, dim=16)
    model = NSATransformer(config, seed=0)
    compute_loss(model, make_tokens(config, 33)).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_gates_use_xavier_initialization() -> None:
    model = NSATransformer(ModelConfig(dim=512, n_layers=1, n_heads=16, d_k=16, d_v=16), seed=0)
    weight = model.blocks[0].attention.gate.weight
    assert weight.std().item() == pytest.approx((2 / sum(weight.shape)) ** 0.5, rel=0.05)
