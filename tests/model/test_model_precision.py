"""bf16 autocast, gradient checkpointing, and the dense baseline, compared with the plain model."""

from __future__ import annotations

import math

import pytest
import torch
from looping import looped
from model_inputs import TINY_NSA, VARIANTS, compute_loss, format_variant, make_config, make_tokens

from nsa_lab.attention import reference, torch_backend
from nsa_lab.model import NSATransformer, compute_rotary, rotate
from nsa_lab.model.layers import rms_normalize

EDGES = sorted({1, TINY_NSA["l"] - 1, TINY_NSA["l"], TINY_NSA["l_sel"], TINY_NSA["w"] + 1, 2, 64})


@looped
@pytest.mark.parametrize("attention", ["nsa", "dense"])
@pytest.mark.parametrize("length", EDGES)
def test_bf16_autocast_is_finite_at_edge_lengths(length: int, attention: str) -> None:
    """Values and gradients of the first step; weights and gradients stay float32."""
    config = make_config(attention=attention)
    model = NSATransformer(config, dtype=torch.bfloat16, seed=0)
    with torch.autocast("cpu", torch.bfloat16):
        loss = compute_loss(model, make_tokens(config, length + 1))
    loss.backward()
    assert loss.isfinite()
    for name, p in model.named_parameters():
        assert p.dtype == torch.float32
        # Below one compression block phi has nothing to compress, and no gradient.
        assert p.grad is not None and p.grad.dtype == torch.float32 and p.grad.isfinite().all(), name


@looped
@pytest.mark.parametrize("variant", VARIANTS, ids=format_variant)
def test_bf16_autocast_stays_near_float32(variant: dict[str, str]) -> None:
    config = make_config(**variant)
    model = NSATransformer(config, seed=0)
    tokens = make_tokens(config, 65)
    exact = compute_loss(model, tokens)
    with torch.autocast("cpu", torch.bfloat16):
        rough = compute_loss(model, tokens)
    assert rough.item() == pytest.approx(exact.item(), rel=2e-3)
    model.eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(compute_loss(model, tokens), rough.detach())


@pytest.mark.parametrize(("dtype", "unit"), [(torch.bfloat16, 2**-8), (torch.float16, 2**-11)], ids=str)
def test_rope_and_norm_in_half_precision_round_once(dtype: torch.dtype, unit: float) -> None:
    """Angles, sums of squares and weights stay float32; one rounding errs by at most `unit` of the result."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(2, 31, 3, 10, generator=draw).to(dtype)
    cos, sin = compute_rotary(torch.arange(31), 6, 100.0)
    first, second, still = x.double().split([3, 3, 4], -1)
    turn, tilt = (table.double()[:, None] for table in (cos, sin))
    turned = torch.cat([first * turn - second * tilt, second * turn + first * tilt, still], -1)
    found = rotate(x, (cos, sin))
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), turned, rtol=unit, atol=1e-6)
    weight = torch.rand(10, generator=draw) + 0.5
    normal = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    found = rms_normalize(x, 1e-5, weight)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), normal, rtol=unit * 1.001, atol=1e-6)


@looped
@pytest.mark.parametrize("position", [2049, 4097, 65_535, 131_071])
def test_rope_angles_are_exact_at_far_positions(position: int) -> None:
    """Half precision would rotate neighbors equally; float32 errs by the rounding of the largest angle."""
    cos, sin = compute_rotary(torch.tensor([position]), 8, 10000.0)
    for i in range(4):
        angle = position * 10000.0 ** (-2 * i / 8)
        assert (cos[0, i].item(), sin[0, i].item()) == pytest.approx((math.cos(angle), math.sin(angle)), abs=0.02)


def test_autocast_reaches_attention_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = set()
    real = torch_backend.selected_attention

    def spy(q, k, v, *rest):
        seen.update({q.dtype, k.dtype, v.dtype})
        return real(q, k, v, *rest)

    monkeypatch.setattr(torch_backend, "selected_attention", spy)
    config = make_config()
    with torch.autocast("cpu", torch.bfloat16):
        NSATransformer(config, seed=0)(make_tokens(config, 20))
    assert seen == {torch.bfloat16}


@pytest.mark.parametrize("attention", ["nsa", "dense"])
def test_induction_heads_stay_near_float32_under_autocast(attention: str) -> None:
    """The key convolution has float32 weights, but attention needs a single dtype."""
    indexer = {"indexer_block": 2, "selection_loss": 0.05} if attention == "nsa" else {}
    config = make_config(attention=attention, d_k=8, rotary_share=0.5, matching_heads=2, **indexer)
    model = NSATransformer(config, seed=0)
    tokens = make_tokens(config, 46)
    exact = compute_loss(model, tokens)
    with torch.autocast("cpu", torch.bfloat16):
        rough = compute_loss(model, tokens)
    assert rough.item() == pytest.approx(exact.item(), rel=2e-3)
    convolution = model.blocks[0].attention.convolution
    keys = torch.randn(1, 9, convolution.weight.shape[1], 2, 8).bfloat16()
    assert convolution.weight.dtype == torch.float32 and convolution(keys).dtype == torch.bfloat16


@pytest.mark.parametrize("attention", ["nsa", "dense"])
def test_a_model_wholly_in_bf16_runs(attention: str) -> None:
    config = make_config(attention=attention)
    model = NSATransformer(config, dtype=torch.bfloat16, seed=0).bfloat16()
    loss = compute_loss(model, make_tokens(config, 33))
    loss.backward()
    assert loss.isfinite() and all(p.grad.isfinite().all() for p in model.parameters())


@looped
@pytest.mark.parametrize("attention", ["nsa", "dense"])
@pytest.mark.parametrize("autocast", [False, True])
def test_gradient_checkpointing_changes_no_bit(attention: str, autocast: bool) -> None:
    config = make_config(attention=attention, phi="mlp")
    model = NSATransformer(config, seed=0)
    tokens = make_tokens(config, 50)
    results = []
    for checkpointing in (False, True):
        model.gradient_checkpointing = checkpointing
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = compute_loss(model, tokens)
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_gradient_checkpointing_saves_memory() -> None:
    """It stores less for the backward pass, and has no effect in eval mode."""
    config = make_config(n_layers=4)
    model = NSATransformer(config, seed=0)
    sizes = []
    for checkpointing in (False, True):
        model.gradient_checkpointing = checkpointing
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, saved=saved: saved.append(x.numel()) or x, lambda x: x):
            compute_loss(model, make_tokens(config, 50))
        sizes.append(sum(saved))
    assert sizes[1] < sizes[0] / 2


def test_backends_agree_through_the_whole_model() -> None:
    config = make_config(phi="linear")
    tokens = make_tokens(config, 80)
    losses, grads = [], []
    for backend in ("reference", "torch"):
        model = NSATransformer(config, backend=backend, seed=0)
        loss = compute_loss(model, tokens)
        loss.backward()
        losses.append(loss.item())
        grads.append([p.grad for p in model.parameters()])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_the_dense_baseline_shares_everything_except_attention() -> None:
    nsa, dense = (NSATransformer(make_config(attention=kind), seed=0) for kind in ("nsa", "dense"))
    names = {kind: {n for n, _ in model.named_parameters()} for kind, model in (("nsa", nsa), ("dense", dense))}
    assert {n.rsplit(".attention.")[-1] for n in names["nsa"] - names["dense"]} == {"gate.weight"}
    assert dense.blocks[0].attention.qkv.out_features == 4 * 6 + 2 * (6 + 5)
    assert set(dense.backends) == {"dense"}


def test_nsa_with_full_coverage_equals_the_dense_baseline(monkeypatch: pytest.MonkeyPatch) -> None:
    """With only the selected branch, a budget of the full sequence and equal weights, logits equal the dense baseline's."""
    config = make_config(nsa={"l_sel": 16, "n_sel": 4})
    nsa, dense = NSATransformer(config, seed=0), NSATransformer(config.model_copy(update={"attention": "dense"}), seed=1)
    H, G, d_k, d_v = 4, 2, 6, 5
    state = {k: v for k, v in dense.state_dict().items() if "qkv" not in k}
    nsa.load_state_dict(state, strict=False)
    with torch.no_grad():
        for nsa_block, dense_block in zip(nsa.blocks, dense.blocks, strict=True):
            q, k, v = dense_block.attention.qkv.weight.split([H * d_k, G * d_k, G * d_v])
            nsa_block.attention.qkv.weight.copy_(torch.cat([q, k, k, k, v, v, v]))

    def selection_only(self, x):
        return torch.tensor([0.0, 1.0, 0.0]).expand(*x.shape[:2], H, 3)

    monkeypatch.setattr(type(nsa.blocks[0].attention), "compute_gates", selection_only)
    tokens = make_tokens(config, 64)
    torch.testing.assert_close(nsa(tokens), dense(tokens), rtol=1e-4, atol=1e-5)
    longer = make_tokens(config, 80)
    close = torch.isclose(nsa(longer), dense(longer), rtol=1e-4, atol=1e-5).all(-1)
    assert close[:, :64].all() and not close[:, 64:].any()


def test_reference_is_imported_and_not_touched_by_the_torch_backend() -> None:
    """Both share only `select_by_importance` and `combine`; the torch backend implements everything else itself."""
    shared = {
        name
        for name in ("compressed_attention", "select_blocks", "selected_attention", "window_attention")
        if getattr(torch_backend, name) is getattr(reference, name)
    }
    assert not shared
