"""Programs of torch.export are valid for every length; other traces are refused with the way out."""

from __future__ import annotations

import functools
import io
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.torch_version import TorchVersion

from nsa_lab.attention import Span, dense_attention, selected_attention
from nsa_lab.attention.dispatch import BackendError
from nsa_lab.config import ModelConfig, NSAConfig
from nsa_lab.model import NSATransformer, NSAttention

sys.path.append(str(Path(__file__).parents[1] / "inference"))
from tiny_models import TINY_NSA, tiny_config

# torch.compiler has no flag that tells torch.export from torch.compile in torch 2.6.
NEEDS_EXPORT = pytest.mark.skipif(
    TorchVersion(torch.__version__) < "2.11", reason="torch.export is supported from torch 2.11 on"
)
LENGTHS = (2, 7, 8, 9, 33, 70)
VARIANTS = [
    {},
    {"nsa": TINY_NSA.model_copy(update={"phi": "mlp", "gate": "softmax"}), "mlp": "gated"},
    {"nsa": TINY_NSA.model_copy(update={"phi": "pool"}), "selection_loss": 0.1, "indexer_block": 2, "matching_heads": 1},
    {
        "branches": ["sel"],
        "selection_loss": 0.1,
        "indexer_block": 2,
        "indexer_order": ["pool", "norm", "rotate"],
        "indexer_dtype": "mxfp4",
        "indexer_keys": "shared",
        "indexer_heads": 2,
        "indexer_every": 2,
    },
    {"branches": ["sel", "win"], "shared_kv": True, "nsa": TINY_NSA.model_copy(update={"scores": "mean_key"})},
    {"attention": "dense", "matching_heads": 1, "embedding_norm": True},
    {"ngrams": 3, "ngram_rows": 50, "ngram_width": 4},
]


def sample_tokens(*shape: int) -> Tensor:
    return torch.randint(0, 37, shape, generator=torch.Generator().manual_seed(shape[-1]))


@NEEDS_EXPORT
@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_exported_program_equals_the_model_at_other_lengths(variant: dict) -> None:
    """With a dynamic batch and length, exported at one length and run at others, shorter than a block too; and saved."""
    if variant.get("attention") == "dense" and TorchVersion(torch.__version__) < "2.13":
        pytest.skip("scaled_dot_product_attention: torch before 2.13 cannot prove that min(8 T, 16 T) is 8 T")
    model = NSATransformer(tiny_config(**variant), seed=5).eval()
    shapes = {"tokens": {0: torch.export.Dim("B", min=1, max=8), 1: torch.export.Dim("T", min=2, max=4096)}}
    exported = torch.export.export(model, (sample_tokens(3, 40),), dynamic_shapes=shapes)
    buffer = io.BytesIO()
    torch.export.save(exported, buffer)
    buffer.seek(0)
    run = torch.export.load(buffer).module()
    with torch.no_grad():
        for length in LENGTHS:
            for batch in (1, 4):
                tokens = sample_tokens(batch, length)
                torch.testing.assert_close(run(tokens), model(tokens), rtol=0, atol=2e-6)


@NEEDS_EXPORT
def test_exported_layer_equals_the_layer() -> None:
    torch.manual_seed(0)
    layer = NSAttention(24, 4, 2, nsa=TINY_NSA).eval()
    shapes = {"x": {1: torch.export.Dim("T", min=2, max=4096)}}
    run = torch.export.export(layer, (torch.randn(2, 40, 24),), dynamic_shapes=shapes).module()
    for length in LENGTHS:
        x = torch.randn(2, length, 24)
        torch.testing.assert_close(run(x), layer(x), rtol=0, atol=2e-6)


def test_backend_of_a_layer() -> None:
    """By name: the same values, or an error; unknown names are rejected at construction."""
    layers = {}
    for backend in ("auto", "torch", "reference", "flash"):
        torch.manual_seed(0)
        layers[backend] = NSAttention(24, 4, 2, nsa=TINY_NSA, backend=backend)
    x = torch.randn(2, 40, 24)
    for backend in ("torch", "reference"):
        torch.testing.assert_close(layers[backend](x), layers["auto"](x), rtol=1e-5, atol=1e-6)
        resolved = next(iter(layers[backend].attention._resolved_backends.values()))
        assert {part.backend for part in resolved.values()} == {backend}
    if not torch.cuda.is_available():
        with pytest.raises((BackendError, NotImplementedError), match="flash"):
            layers["flash"](x)
    with pytest.raises(
        ValueError, match="NSAttention: backend = 'trition': expected one of auto, reference, torch, triton"
    ):
        NSAttention(24, 4, 2, backend="trition")


def test_torch_func_is_refused_with_the_way_out() -> None:
    """Except on the reference, where it gives the gradient of autograd."""
    torch.manual_seed(0)
    x = torch.randn(1, 20, 24)
    layers = {name: NSAttention(24, 4, 2, nsa=TINY_NSA, backend=name) for name in ("torch", "reference")}
    layers["reference"].load_state_dict(layers["torch"].state_dict())
    for transform in (
        torch.func.grad(lambda x: layers["torch"](x).sum()),
        torch.func.vmap(lambda x: layers["torch"](x[None])[0]),
    ):
        with pytest.raises(NotImplementedError, match=r"torch\.func.*backend = 'torch'.*use backend='reference'"):
            transform(x)
    model, tokens = NSATransformer(tiny_config(), backend="torch", seed=5), sample_tokens(2, 40)
    with pytest.raises(NotImplementedError, match=r"torch\.func.*backend = 'torch'.*use backend='reference'"):
        torch.func.vmap(lambda row: model(row[None])[0])(tokens)
    model = NSATransformer(tiny_config(), backend="reference", seed=5)
    torch.testing.assert_close(torch.func.vmap(lambda row: model(row[None])[0])(tokens), model(tokens))

    def compute_loss(weights: dict[str, torch.Tensor], row: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, weights, (row[None],)).logsumexp(-1).sum()

    per_row = torch.func.vmap(torch.func.grad(compute_loss), in_dims=(None, 0))(dict(model.named_parameters()), tokens)
    compute_loss({}, tokens[1]).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(per_row[name][1], parameter.grad, rtol=1e-4, atol=1e-5)
    by_func = torch.func.grad(lambda x: layers["reference"](x).pow(2).sum())(x)
    x.requires_grad_()
    layers["torch"](x).pow(2).sum().backward()
    torch.testing.assert_close(by_func, x.grad, rtol=1e-4, atol=1e-5)


def push_forward(function: Callable[[Tensor], Tensor], x: Tensor, direction: Tensor) -> Any:
    """Return the derivative of `function` at x in a direction, by forward-mode differentiation."""
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(function(forward_ad.make_dual(x, direction))).tangent


@pytest.mark.slow
def test_forward_mode_runs_on_the_reference() -> None:
    """Also for packed documents, and on any backend if only other tensors have tangents; otherwise it is refused."""
    torch.manual_seed(0)
    x, direction = torch.randn(2, 1, 20, 24, dtype=torch.float64)
    layers = {name: NSAttention(24, 4, 2, nsa=TINY_NSA, backend=name).double() for name in ("torch", "reference")}
    for span in (None, Span.packed(torch.tensor([0, 9, 9, 20], dtype=torch.int32))):
        run = functools.partial(layers["reference"], span=span)
        _, expected = torch.autograd.functional.jvp(run, x, direction)  # by two backward passes
        torch.testing.assert_close(push_forward(run, x, direction), expected, rtol=1e-9, atol=1e-12)
        by_func = torch.func.grad(lambda x, run=run: run(x).pow(2).sum())(x)
        leaf = x.clone().requires_grad_()
        run(leaf).pow(2).sum().backward()
        torch.testing.assert_close(by_func, leaf.grad, rtol=1e-9, atol=1e-12)
        for transform in (torch.func.linearize, lambda layer, x: push_forward(layer, x, x)):
            with pytest.raises(NotImplementedError, match=r"torch\.func.*forward_ad.*backend = 'torch'.*use backend='ref"):
                transform(functools.partial(layers["torch"], span=span), x)
    assert push_forward(lambda scale: scale * layers["torch"](x), torch.ones(1), torch.ones(1)) is not None
    # Linearization traces: it has no values to check.
    q, k, blocks = torch.randn(1, 20, 4, 6), torch.randn(1, 20, 2, 6), torch.zeros(1, 20, 2, 1, dtype=torch.int32)
    nsa = TINY_NSA.model_copy(update={"n_sel": 1, "local_blocks": 0})
    out, linear = torch.func.linearize(lambda v: selected_attention(q, k, v, blocks, nsa, backend="reference")[0], k)
    torch.testing.assert_close(linear(k), out)  # linear in the values


@pytest.mark.slow
def test_forward_mode_of_dense_attention() -> None:
    """With every layout, by tangents and by torch.func, also of keys and values alone; of a dense model, and nested.

    Heads of equal widths, which a CPU computes with a kernel that has no derivatives in forward mode.
    """
    torch.manual_seed(0)
    heads = [torch.randn(1, 9, n_heads, 4, dtype=torch.float64) for n_heads in (4, 2, 2)]
    directions = [torch.randn_like(x) for x in heads]
    for span in (None, Span.packed(torch.tensor([0, 4, 4, 9], dtype=torch.int32)), Span.chunk(6, 3)):
        rows = slice(6 if span and span.kind == "chunk" else 0, 9)
        for index in range(3):

            def attend(x: Tensor, index: int = index, rows: slice = rows, span: Span | None = span) -> Tensor:
                q, k, v = (x if number == index else own for number, own in enumerate(heads))
                return dense_attention(q[:, rows], k, v, span=span)

            x, direction = heads[index], directions[index]
            jacobian = cast(Tensor, torch.autograd.functional.jacobian(attend, x))  # by backward passes
            expected = torch.einsum("bthdxyzw,xyzw->bthd", jacobian, direction)
            assert expected.abs().max() > 0.1
            torch.testing.assert_close(push_forward(attend, x, direction), expected, rtol=1e-9, atol=1e-12)
            by_func = torch.func.jvp(attend, (x,), (direction,))[1]
            torch.testing.assert_close(by_func, expected, rtol=1e-9, atol=1e-12)
        out, linear = torch.func.linearize(
            lambda v, span=span, rows=rows: dense_attention(heads[0][:, rows], heads[1], v, span=span), heads[2]
        )
        torch.testing.assert_close(linear(heads[2]), out)  # linear in the values
    batch, batch_direction = (torch.stack([x, 2 * x]) for x in (heads[0], directions[0]))
    by_rows = torch.func.vmap(lambda q: dense_attention(q, *heads[1:]))
    derivatives = torch.func.jvp(by_rows, (batch,), (batch_direction,))[1]
    for q, direction, derivative in zip(batch, batch_direction, derivatives, strict=True):
        expected = push_forward(lambda q: dense_attention(q, *heads[1:]), q, direction)
        torch.testing.assert_close(derivative, expected, rtol=1e-9, atol=1e-12)
    hessian = torch.func.hessian(lambda q: dense_attention(q, *heads[1:]).pow(3).sum())(heads[0])
    pair = torch.einsum("bthdxyzw,bthd,xyzw->", hessian, directions[0], directions[0])
    q = heads[0].clone().requires_grad_()
    (gradient,) = torch.autograd.grad(dense_attention_by_softmax(q, *heads[1:]).pow(3).sum(), q, create_graph=True)
    (second,) = torch.autograd.grad((gradient * directions[0]).sum(), q)
    torch.testing.assert_close(pair, (second * directions[0]).sum(), rtol=1e-9, atol=1e-12)
    with pytest.raises(NotImplementedError, match=r"torch\.func.*backend = 'flash'.*use backend='torch'"):
        torch.func.jvp(lambda q: dense_attention(q, *heads[1:], backend="flash"), (heads[0],), (directions[0],))
    model, tokens = NSATransformer(tiny_config(attention="dense"), seed=5).double(), sample_tokens(1, 20)
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    tangents = {name: torch.randn_like(weight) for name, weight in weights.items()}
    derivative = torch.func.jvp(
        lambda weights: torch.func.functional_call(model, weights, (tokens,)).logsumexp(-1).sum(), (weights,), (tangents,)
    )[1]
    model(tokens).logsumexp(-1).sum().backward()
    expected = sum((cast(Tensor, x.grad) * tangents[name]).sum() for name, x in model.named_parameters())
    torch.testing.assert_close(derivative, expected, rtol=1e-9, atol=1e-12)


def dense_attention_by_softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return causal attention with plain operations, which have derivatives of every order."""
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
    scores = torch.einsum("bthd,bshd->bhts", q, k) * q.shape[3] ** -0.5
    future = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).triu(1)
    return torch.einsum("bhts,bshd->bthd", scores.masked_fill(future, float("-inf")).softmax(-1), v)


def test_dynamically_quantized_layers_run() -> None:
    """Linear layers without a weight attribute: the layer finds its dtype elsewhere."""
    torch.manual_seed(0)
    layer, x = NSAttention(24, 4, 2, nsa=TINY_NSA).eval(), torch.randn(2, 40, 24)
    model, tokens = NSATransformer(tiny_config(), seed=5).eval(), sample_tokens(2, 40)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # torch.ao is deprecated
        for module, inputs in ((layer, x), (model, tokens)):
            quantized = torch.ao.quantization.quantize_dynamic(module, {nn.Linear}, dtype=torch.qint8)
            assert not any(type(part) is nn.Linear for part in quantized.modules())
            exact = module(inputs)
            assert 0 < (quantized(inputs) - exact).norm() / exact.norm() < 0.1


def test_jit_trace_is_refused_with_the_reason() -> None:
    model = NSATransformer(ModelConfig(**{**tiny_config().model_dump(), "nsa": NSAConfig()}), seed=5).eval()
    with pytest.raises(NotImplementedError, match=r"torch\.jit\.trace: .*only for the length.*use torch\.export\.export"):
        torch.jit.trace(model, (sample_tokens(1, 20),))
    layer = NSAttention(24, 4, 2, nsa=TINY_NSA)
    with pytest.raises(NotImplementedError, match=r"torch\.jit\.trace"):
        torch.jit.trace(layer, (torch.randn(1, 20, 24),))
