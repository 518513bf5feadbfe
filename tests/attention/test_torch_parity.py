"""The torch backend equals the definition: values and gradients, all length classes and dtypes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from attention_inputs import CORNERS, Inputs, Shape, every_torch_variant, random_shapes, use_variant
from hypothesis import given
from looping import looped
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from nsa_lab import attention
from nsa_lab.attention.compression import compress, make_phi
from nsa_lab.config import NSAConfig

LIMITS = {torch.float64: 1e-10, torch.float32: 1e-5}
LONG_LENGTH = 1000
LENGTHS = [1, 15, 31, 32, 33, 63, 64, 65, 200]
HEADS = [(2, 6), (1, 4), (4, 1)]
heads = pytest.mark.parametrize(("G", "h"), HEADS)
dtypes = pytest.mark.parametrize("dtype", LIMITS, ids=str)


def compute_branches(inputs: Inputs, nsa: NSAConfig, backend: str) -> dict[str, Tensor]:
    """Return the results of the public functions for the same blocks, with LSE 0 instead of -inf."""
    out_cmp, lse_cmp = attention.compressed_attention(inputs.q, inputs.k_cmp, inputs.v_cmp, nsa, backend=backend)
    blocks = attention.select_blocks(inputs.q, inputs.k_cmp, lse_cmp.detach(), nsa, backend=backend)
    out_sel, lse_sel = attention.selected_attention(inputs.q, inputs.k_sel, inputs.v_sel, blocks, nsa, backend=backend)
    out_win, lse_win = attention.window_attention(inputs.q, inputs.k_win, inputs.v_win, nsa, backend=backend)
    results = {
        "blocks": blocks,
        "out_cmp": out_cmp,
        "lse_cmp": lse_cmp,
        "out_sel": out_sel,
        "lse_sel": lse_sel,
        "out_win": out_win,
        "lse_win": lse_win,
    }
    if (
        inputs.q.shape[1] < LONG_LENGTH
    ):  # past that, the reference takes seconds, and the sum of the branches tells nothing new
        results["mixed"] = attention.nsa_attention(*inputs, nsa, backend=backend)
    return results


def compute_gradients(inputs: Inputs, nsa: NSAConfig, backend: str) -> dict[str, Tensor]:
    """Return the gradients of a random combination of all outputs and LSEs with respect to all inputs."""
    leaves = inputs.map(lambda x: x.detach().requires_grad_())
    generator = torch.Generator().manual_seed(1)
    loss = torch.zeros((), dtype=torch.float64)
    for name, x in compute_branches(leaves, nsa, backend).items():
        if name != "blocks":
            weight = torch.randn(x.shape, generator=generator, dtype=torch.float64)
            loss = loss + (torch.where(torch.isneginf(x), 0.0, x) * weight).sum()
    return dict(zip(Inputs._fields, torch.autograd.grad(loss, leaves), strict=True))


def assert_parity(
    call: Callable[..., dict[str, Tensor]], shape: Shape, dtype: torch.dtype, limit: float, variant: str
) -> None:
    inputs = shape.inputs(dtype)
    expected = call(inputs, shape.nsa, "reference")
    with use_variant(variant) as backend:
        actual = call(inputs, shape.nsa, backend)
    for name, x in expected.items():
        assert actual[name].dtype == x.dtype, name
        assert not actual[name].isnan().any(), name
        scale = x[x.isfinite()].abs().max().item() if x.isfinite().any() else 1.0
        torch.testing.assert_close(
            actual[name], x, rtol=limit, atol=limit * max(scale, 1.0), msg=lambda m, name=name: f"{name}: {m}"
        )


@pytest.mark.slow
@looped
@dtypes
@heads
@pytest.mark.parametrize("length", LENGTHS)
def test_values_at_the_default_geometry(length: int, G: int, h: int, dtype: torch.dtype) -> None:
    assert_parity(compute_branches, Shape(NSAConfig(), length, 1, G, h, 16, 8), dtype, LIMITS[dtype], "torch")


@pytest.mark.slow
@looped
@dtypes
@pytest.mark.parametrize("length", [1025, 2048])
def test_values_of_long_sequences(length: int, dtype: torch.dtype) -> None:
    """Few heads, because the reference builds the full score matrix of each."""
    assert_parity(compute_branches, Shape(NSAConfig(), length, 1, 2, 2, 4, 4), dtype, LIMITS[dtype], "torch")


@pytest.mark.slow
@looped
@dtypes
@heads
@pytest.mark.parametrize("length", [1, 31, 33, 65, 200])
def test_gradients_at_the_default_geometry(length: int, G: int, h: int, dtype: torch.dtype) -> None:
    assert_parity(compute_gradients, Shape(NSAConfig(), length, 2, G, h, 8, 4), dtype, LIMITS[dtype], "torch")


@looped
@every_torch_variant
@pytest.mark.parametrize("dtype", [torch.float64, pytest.param(torch.float32, marks=pytest.mark.nightly)], ids=str)
@pytest.mark.parametrize("shape", CORNERS.values(), ids=CORNERS)
def test_values_and_gradients_in_the_corners(shape: Shape, dtype: torch.dtype, variant: str) -> None:
    assert_parity(compute_branches, shape, dtype, LIMITS[dtype], variant)
    assert_parity(compute_gradients, shape, dtype, LIMITS[dtype], variant)


def test_gathering_hundreds_of_blocks() -> None:
    """Token and block indices that exceed small integer types."""
    shape = Shape(NSAConfig(l=2, d=1, l_sel=1, n_sel=3, w=2), T=400, G=1, h=1, d_k=2, d_v=2)
    assert_parity(compute_gradients, shape, torch.float64, LIMITS[torch.float64], "torch")


@pytest.mark.slow
@every_torch_variant
@given(shape=random_shapes(max_tokens=60))
def test_gradients_for_any_shape(variant: str, shape: Shape) -> None:
    assert_parity(compute_gradients, shape, torch.float64, LIMITS[torch.float64], variant)


@looped
@pytest.mark.parametrize("phi", ["avg", "linear", "mlp", "pool"])
@pytest.mark.parametrize("gate", ["sigmoid", "softmax"])
@dtypes
def test_every_variant_from_raw_keys_to_output(phi: str, gate: str, dtype: torch.dtype) -> None:
    """phi, branches and gate in one graph, as in the model, including gradients of phi's weights."""
    shape = Shape(Shape().nsa.model_copy(update={"phi": phi, "gate": gate}), T=45, d_v=6)
    torch.manual_seed(0)
    phi_k, phi_v = (make_phi(shape.nsa, 6) for _ in range(2))
    for module in (phi_k, phi_v):
        if module is not None:
            module.to(dtype)
    results = {}
    for backend, operator in (("reference", attention.reference.compress), ("torch", compress)):
        inputs = shape.inputs(dtype).map(lambda x: x.requires_grad_())
        logits = inputs.gates.logit()
        gates = logits.sigmoid() if gate == "sigmoid" else logits.softmax(-1)
        raw = inputs.k_sel, inputs.v_sel
        compressed = operator(raw[0], shape.nsa, phi_k), operator(raw[1], shape.nsa, phi_v)
        tensors = (inputs.q, *compressed, *raw, inputs.k_win, inputs.v_win, gates)
        out = attention.nsa_attention(*tensors, shape.nsa, backend=backend)
        weights = [p for module in (phi_k, phi_v) if module is not None for p in module.parameters()]
        used = [inputs.q, *raw, inputs.k_win, inputs.v_win, inputs.gates, *weights]
        results[backend] = [out, *torch.autograd.grad(out.square().sum(), used)]
    for actual, expected in zip(results["torch"], results["reference"], strict=True):
        limit = LIMITS[dtype] * max(expected.abs().max().item(), 1.0)
        torch.testing.assert_close(actual, expected, rtol=LIMITS[dtype], atol=limit)


@looped
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("phi", ["avg", "linear", "mlp", "pool"])
@pytest.mark.parametrize("length", [1, 5, 40])
def test_compression_in_half_precision(phi: str, dtype: torch.dtype, length: int) -> None:
    nsa = NSAConfig(l=8, d=4, l_sel=8, n_sel=3, w=4, phi=phi)
    torch.manual_seed(0)
    module = make_phi(nsa, 6)
    module = module and module.to(dtype)
    x = torch.randn(2, length, 3, 6).to(dtype)
    expected = attention.reference.compress(x, nsa, module)
    actual = compress(x, nsa, module)
    assert actual.dtype == expected.dtype == dtype
    torch.testing.assert_close(actual, expected, rtol=2e-2 if dtype == torch.bfloat16 else 2e-3, atol=1e-3)


@looped
@pytest.mark.parametrize("operator", [attention.reference.compress, compress], ids=["reference", "fast"])
@pytest.mark.parametrize("phi", ["avg", "pool"])
@pytest.mark.parametrize(("dtype", "unit"), [(torch.bfloat16, 2**-8), (torch.float16, 2**-11)], ids=str)
def test_a_mean_in_half_precision_is_rounded_once(
    operator: Callable[..., Tensor], phi: str, dtype: torch.dtype, unit: float
) -> None:
    """Tokens that nearly cancel have a small mean, which half-precision sums or weights would lose."""
    nsa = NSAConfig(l=9, d=3, l_sel=9, n_sel=3, w=4, phi=phi)
    draw = torch.Generator().manual_seed(0)
    x = (torch.randn(1, 59, 2, 6, generator=draw) * 100).to(dtype)
    module = make_phi(nsa, 6)
    module = module and module.to(dtype)
    expected = torch.stack([x[:, i : i + 9].double().mean(1) for i in range(0, 59 - 9 + 1, 3)], 1)
    torch.testing.assert_close(operator(x, nsa, module).double(), expected, rtol=unit, atol=1e-4)


@looped
@every_torch_variant
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_errs_no_more_than_rounding_the_result(variant: str, dtype: torch.dtype) -> None:
    """Scores and sums are float32: the error is at most 2x (forward) or 3x (backward) of naive attention in `dtype`."""
    shape = Shape(NSAConfig(l=8, d=4, l_sel=16, n_sel=3, w=24), T=150, h=3, d_k=16, d_v=16)
    low = shape.inputs(dtype)
    # Other blocks would not be a rounding error, so all use the exact selection.
    exact = low.map(lambda x: x.double())
    _, lse = attention.compressed_attention(exact.q, exact.k_cmp, exact.v_cmp, shape.nsa, backend="reference")
    blocks = attention.select_blocks(exact.q, exact.k_cmp, lse, shape.nsa, backend="reference")

    def run(inputs: Inputs, attend: Callable[..., Tensor]) -> list[Tensor]:
        leaves = inputs.map(lambda x: x.detach().requires_grad_())
        out = attend(leaves)
        return [x.double() for x in (out, *torch.autograd.grad(out.double().square().sum(), leaves[3:5] + leaves[:1]))]

    def selected(backend: str) -> Callable[[Inputs], Tensor]:
        return lambda x: attention.selected_attention(x.q, x.k_sel, x.v_sel, blocks, shape.nsa, backend=backend)[0]

    with use_variant(variant) as backend:
        actual = run(low, selected(backend))
    true = run(exact, selected("reference"))
    allowed = mark_selected_tokens(blocks, shape)
    rough = run(low, lambda x: naive_attention(x.q, x.k_sel, x.v_sel, allowed))
    for i, (mine, exactly, roughly) in enumerate(zip(actual, true, rough, strict=True)):
        bound = (3 if i else 2) * (roughly - exactly).abs().max() + 1e-6
        assert (mine - exactly).abs().max() <= bound


@pytest.mark.parametrize("part", ["compressed", "selected", "window"])
def test_gradients_of_half_precision_do_not_depend_on_the_chunks(part: str) -> None:
    """Gradients of keys and values are summed over chunks in float32 and rounded at the end."""
    shape = Shape(NSAConfig(l=3, d=1, l_sel=5, n_sel=4, w=90), T=97, d_v=6)
    results = []
    for variant in ("torch", "torch, one query a chunk"):
        x = shape.inputs(torch.bfloat16)
        keys = {"compressed": (x.k_cmp, x.v_cmp), "selected": (x.k_sel, x.v_sel), "window": (x.k_win, x.v_win)}[part]
        leaves = [y.detach().requires_grad_() for y in (x.q, *keys)]
        blocks = attention.score_and_select_blocks(x.q, x.k_cmp, shape.nsa, backend="torch")
        with use_variant(variant) as backend:
            attend = getattr(attention, f"{part}_attention")
            out, _ = attend(*leaves, *([blocks] if part == "selected" else []), shape.nsa, backend=backend)
            results.append(torch.autograd.grad(out.float().square().sum(), leaves))
    for one, many in zip(*results, strict=True):
        torch.testing.assert_close(many.float(), one.float(), rtol=2**-7, atol=1e-4)


@pytest.mark.parametrize("variant", ["reference", "torch", "torch, gathering"])
def test_a_query_without_blocks_has_no_output_and_no_gradient(variant: str) -> None:
    """Every second query has no block; future blocks count as none."""
    shape = Shape(T=23)
    x = shape.inputs()
    q, k, v = (y.detach().requires_grad_() for y in (x.q, x.k_sel, x.v_sel))
    blocks = torch.full((1, 23, shape.G, shape.nsa.n_sel), -1, dtype=torch.int32)
    blocks[:, ::2, :, 0] = 0
    blocks[:, 1, :, 0] = 23 // shape.nsa.l_sel
    with use_variant(variant) as backend:
        out, lse = attention.selected_attention(q, k, v, blocks, shape.nsa, backend=backend)
    assert not out[:, 1::2].any() and torch.isneginf(lse[:, 1::2]).all() and lse[:, ::2].isfinite().all()
    grads = torch.autograd.grad(out.square().sum() + lse[:, ::2].sum(), (q, k, v))
    assert all(grad.isfinite().all() and grad.any() for grad in grads) and not grads[0][:, 1::2].any()


@looped
@pytest.mark.parametrize("variant", ["reference", "torch", "torch, gathering"])
@pytest.mark.parametrize("part", ["selected", "window"])
def test_a_nonfinite_key_reaches_only_gradients_of_its_queries(part: str, variant: str) -> None:
    """Gradients of earlier queries stay finite."""
    shape = Shape(T=23)
    x = shape.inputs()
    q, k, v = (y.detach().clone() for y in (x.q, x.k_sel, x.v_sel))
    blocks = attention.score_and_select_blocks(x.q, x.k_cmp, shape.nsa, backend="reference")
    grads = []
    for spoilt in (1.0, float("inf")):
        k[:, 13] *= spoilt
        leaves = [y.clone().requires_grad_() for y in (q, k, v)]
        with use_variant(variant) as backend:
            attend = getattr(attention, f"{part}_attention")
            out, _ = attend(*leaves, *([blocks] if part == "selected" else []), shape.nsa, backend=backend)
        grads.append(torch.autograd.grad(out[:, :13].square().sum(), leaves[0])[0][:, :13])
    assert grads[0].any() and torch.equal(*grads)


@pytest.mark.parametrize("w", [3, 70])
def test_window_chunks_are_bounded_by_the_window(w: int) -> None:
    """Longer chunks compute scores of keys that no query attends to; chunks of at least 64 queries are worth it."""
    T, chunk = 515, max(w, 64)
    x = Shape(NSAConfig(w=w), T=T, G=1, h=2, d_k=4, d_v=4).inputs()
    with FlopCounterMode(display=False) as counter:
        attention.window_attention(x.q, x.k_win, x.v_win, NSAConfig(w=w), backend="torch")
    assert 0 < counter.get_total_flops() <= 2 * 2 * (4 + 4) * T * (chunk + w)


def mark_selected_tokens(blocks: Tensor, shape: Shape) -> Tensor:
    t = torch.arange(shape.T)
    return ((t // shape.nsa.l_sel == blocks.unsqueeze(-1)).any(-2) & (t <= t[:, None])[None, :, None]).unsqueeze(3)


def naive_attention(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    """Compute unfused attention in the dtype of the inputs."""
    scores = torch.einsum("btghd,bsgd->btghs", q.unflatten(2, (k.shape[2], -1)), k) * q.shape[-1] ** -0.5
    p = scores.masked_fill(~allowed, float("-inf")).softmax(-1)
    return torch.einsum("btghs,bsgd->btghd", p, v).flatten(2, 3)
