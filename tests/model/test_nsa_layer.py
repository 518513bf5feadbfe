"""`NSAttention`, the stand-alone layer, and packed documents in the layer and in the model."""

from __future__ import annotations

import copy
import inspect
import shutil
from collections.abc import Callable
from typing import Any

import brute_force
import numpy as np
import pytest
import torch
from looping import looped
from model_inputs import TINY_NSA, compute_loss, make_config, make_tokens
from torch._dynamo.testing import CompileCounter
from torch.utils._python_dispatch import TorchDispatchMode

from nsa_lab.attention import Span, reference, torch_backend
from nsa_lab.config import NSAConfig
from nsa_lab.model import NSATransformer, NSAttention, SparseAttention, compute_rotary, get_rotary_table
from nsa_lab.model import attention_layers as layers_module
from nsa_lab.model.layers import check_span

PHIS = ["avg", "linear", "mlp", "pool"]
LENGTHS = (0, 21, 1, 40, 7, 0, 9)
CPU = torch.device("cpu")


def make_packed_span(*lengths: int, capacity: int | None = None) -> Span:
    return Span.packed(torch.tensor([0, *lengths]).cumsum(0).int(), capacity)


def make_layer(phi: str = "avg", gate: str = "sigmoid", seed: int = 0, **sizes: float | None) -> NSAttention:
    torch.manual_seed(seed)
    return NSAttention(24, 4, 2, **{"value_dim": 5, **sizes}, nsa=NSAConfig(**TINY_NSA, phi=phi, gate=gate))


def run_under_autocast(dtype: torch.dtype) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return make_layer()(torch.zeros(1, 9, 24, dtype=dtype))


def run_model(tokens: torch.Tensor) -> torch.Tensor:
    return NSATransformer(make_config(vocab_size=17, n_layers=1), seed=0)(tokens)


def draw_rows(length: int, batch: int = 2, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(batch, length, 24, generator=torch.Generator().manual_seed(length), dtype=dtype)


def test_the_signature_is_the_public_one() -> None:
    expected = (
        "(dim: 'int', n_heads: 'int', n_kv_groups: 'int', *, head_dim: 'int | None' = None, "
        f"value_dim: 'int | None' = None, nsa: 'NSAConfig' = {NSAConfig()!r}, rope_theta: 'float' = 10000.0, "
        "rotary_share: 'float' = 1.0, matching_heads: 'int' = 0, selection_loss: 'float' = 0.0, "
        "indexer_block: 'int' = 0, indexer_width: 'int' = 0, indexer_heads: 'int' = 1, "
        "indexer_keys: \"Literal['group', 'shared']\" = 'group', "
        "indexer_order: \"Sequence[Literal['rotate', 'pool', 'norm']]\" = ('rotate', 'pool'), "
        "indexer_dtype: \"Literal['bf16', 'fp8', 'mxfp4']\" = 'bf16', "
        "branches: \"Sequence[Literal['cmp', 'sel', 'win']]\" = ('cmp', 'sel', 'win'), shared_kv: 'bool' = False, "
        "backend: 'str' = 'auto') -> 'None'"
    )
    assert str(inspect.signature(NSAttention)) == expected
    assert list(inspect.signature(NSAttention.forward).parameters) == ["self", "x", "span"]


@looped
@pytest.mark.parametrize("phi", PHIS)
@pytest.mark.parametrize("gate", ["sigmoid", "softmax"])
def test_it_equals_the_definition(phi: str, gate: str) -> None:
    """The layer equals brute force, up to the float32 of the RoPE table."""
    layer = make_layer(phi, gate).double()
    c, n = layer.config, layer.config.nsa
    weights = {name: y.detach().numpy() for name, y in layer.state_dict().items()}
    geometry = brute_force.Geometry(n.l, n.d, n.l_sel, n.n_sel, n.w)
    plain = brute_force.Model(4, 2, c.d_k, c.d_v, c.rope_theta, c.norm_eps, geometry, gate, phi, False, weights)
    for length in (3, 29):
        x = draw_rows(length)
        expected, _ = brute_force.attention_layer(x.numpy(), plain, "attention")
        with torch.no_grad():
            np.testing.assert_allclose(layer(x).numpy(), expected, rtol=1e-4, atol=2e-5 * np.abs(expected).max())


@looped
@pytest.mark.parametrize("phi", PHIS)
def test_it_equals_the_reference_bitwise_in_float64(phi: str) -> None:
    """Starting from its own projections, for a full sequence and for documents."""
    layer = make_layer(phi).double()
    inner, c = layer.attention, layer.config
    for x, span in ((draw_rows(61), None), (draw_rows(sum(LENGTHS), batch=1), make_packed_span(*LENGTHS, capacity=8))):
        rotary = get_rotary_table(x.shape[1], c.d_k, c.rope_theta, CPU, span)
        out = reference.nsa_attention(*inner.project(x, rotary, span), c.nsa, span=span)
        torch.testing.assert_close(layer(x, span), inner.out(out.flatten(2)), rtol=1e-12, atol=1e-12)


def check_packed_equals_separate(call: Callable[..., torch.Tensor], x: torch.Tensor, capacity: int | None) -> None:
    packed = call(x, make_packed_span(*LENGTHS, capacity=capacity))
    parts = [call(part, None) for part in x.split(LENGTHS, dim=1) if part.shape[1]]
    torch.testing.assert_close(packed, torch.cat(parts, 1), rtol=1e-10, atol=1e-10)


@looped
@pytest.mark.parametrize("phi", PHIS)
@pytest.mark.parametrize("capacity", [None, 8])
def test_packed_documents_equal_separate_documents(phi: str, capacity: int | None) -> None:
    layer = make_layer(phi).double()
    check_packed_equals_separate(layer, draw_rows(sum(LENGTHS), batch=1), capacity)


@looped
@pytest.mark.parametrize("attention", ["nsa", "dense"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_packed_documents_through_the_whole_model(attention: str, checkpointing: bool) -> None:
    """Logits and the gradient of every weight."""
    config = make_config(attention=attention, phi="mlp")
    model = NSATransformer(config, dtype=torch.float64, seed=0).double()
    model.gradient_checkpointing = checkpointing
    tokens = make_tokens(config, sum(LENGTHS), batch=1)
    check_packed_equals_separate(model, tokens, None)
    grads = []
    for logits in (
        model(tokens, make_packed_span(*LENGTHS)),
        torch.cat([model(t) for t in tokens.split(LENGTHS, 1) if t.numel()], 1),
    ):
        grads.append(torch.autograd.grad(logits.logsumexp(-1).square().sum(), list(model.parameters())))
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_a_document_does_not_affect_its_neighbor() -> None:
    model = NSATransformer(make_config(), seed=0)
    tokens, span = make_tokens(model.config, sum(LENGTHS), batch=1), make_packed_span(*LENGTHS)
    before = model(tokens, span)
    for document in span.documents:
        changed = tokens.clone()
        changed[:, document.query_rows] = (changed[:, document.query_rows] + 1) % model.config.vocab_size
        changed_rows = (model(changed, span) != before).flatten(2).any(-1)[0].nonzero().flatten().tolist()
        assert changed_rows == list(range(document.query_rows.start, document.query_rows.stop))


def test_positions_restart_in_every_document() -> None:
    cos, sin = get_rotary_table(12, 6, 100.0, CPU, make_packed_span(5, 0, 7))
    positions = torch.tensor([*range(5), *range(7)])
    assert all(torch.equal(a, b) for a, b in zip((cos, sin), compute_rotary(positions, 6, 100.0), strict=True))


@pytest.mark.parametrize("build", [make_layer, lambda: NSATransformer(make_config(), seed=0)], ids=["layer", "model"])
def test_a_chunk_without_a_cache_raises(build: Callable[[], torch.nn.Module]) -> None:
    module = build()
    x = draw_rows(7, dtype=torch.float32) if isinstance(module, NSAttention) else make_tokens(module.config, 7)
    assert torch.equal(module(x, Span.chunk(0, 7)), module(x))
    with pytest.raises(ValueError, match=r"has no cache of keys before position 3; pass all tokens"):
        module(x, Span.chunk(3, 7))


@looped
@pytest.mark.parametrize("phi", PHIS)
@pytest.mark.parametrize("span", [None, make_packed_span(*LENGTHS, capacity=8)], ids=["full", "packed"])
def test_a_step_changes_every_parameter(phi: str, span: Span | None) -> None:
    layer = make_layer(phi)
    before = {name: p.detach().clone() for name, p in layer.named_parameters()}
    x = draw_rows(sum(LENGTHS), batch=1, dtype=torch.float32)
    optimizer = torch.optim.Adam(layer.parameters(), lr=1e-3)
    layer(x, span).square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() and p.grad.abs().max() > 0 for p in layer.parameters())
    optimizer.step()
    assert not any(torch.equal(p, before[name]) for name, p in layer.named_parameters())


def test_it_starts_as_the_transformer_does() -> None:
    """Standard deviations are equal, except for the output projection, which is not scaled by depth."""
    one, same, other = make_layer(), make_layer(), make_layer(seed=1)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), same.parameters(), strict=True))
    assert not torch.equal(one.attention.qkv.weight, other.attention.qkv.weight)
    wide = NSAttention(512, 8, 2, nsa=NSAConfig(**TINY_NSA, phi="mlp"))
    model_layer = (
        NSATransformer(make_config(dim=512, n_heads=8, d_k=64, d_v=64, n_layers=1, phi="mlp"), seed=0).blocks[0].attention
    )
    for name, weight in wide.attention.named_parameters():
        expected = model_layer.get_parameter(name).std() * (2**0.5 if name == "out.weight" else 1.0)
        torch.testing.assert_close(weight.std(), expected, rtol=0.15, atol=0.0)


def test_the_backend_is_resolved_for_the_autocast_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    resolved_for = []
    real = layers_module.resolve_backend
    monkeypatch.setattr(layers_module, "resolve_backend", lambda *a, **k: resolved_for.append(a[:2]) or real(*a, **k))
    seen = set()
    attend = torch_backend.selected_attention
    monkeypatch.setattr(torch_backend, "selected_attention", lambda q, *rest: seen.add(q.dtype) or attend(q, *rest))
    layer, x = make_layer(), draw_rows(33, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        bf16_outputs = [layer(x) for _ in range(2)]
    assert resolved_for == [(CPU, torch.bfloat16)] and seen == {torch.bfloat16}
    fp32_output = layer(x)
    assert resolved_for == [(CPU, torch.bfloat16), (CPU, torch.float32)] and seen == {torch.bfloat16, torch.float32}
    assert (bf16_outputs[0].float() - fp32_output).norm() < 0.01 * fp32_output.norm()
    bf16_outputs[0].float().square().mean().backward()
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in layer.parameters())


def test_it_can_be_copied_and_loaded(tmp_path) -> None:
    layer, x = make_layer("mlp"), draw_rows(30, dtype=torch.float32)
    out = layer(x)
    assert torch.equal(copy.deepcopy(layer)(x), out)
    torch.save(layer.state_dict(), tmp_path / "weights.pt")
    other = make_layer("mlp", seed=5)
    assert not torch.equal(other(x), out)
    other.load_state_dict(torch.load(tmp_path / "weights.pt"))
    assert torch.equal(other(x), out)
    assert {name.split(".")[0] for name in layer.state_dict()} == {"attention"}


def test_state_dict_keys_of_a_transformer_layer() -> None:
    """Checkpoints from before the stand-alone layer existed can be loaded."""
    names = set(NSATransformer(make_config(n_layers=1), seed=0).state_dict())
    inside = {f"blocks.0.attention.{name}.weight" for name in ("qkv", "gate", "out")}
    norms = {"blocks.0.attention_norm.weight", "blocks.0.mlp_norm.weight", "norm.weight"}
    assert names == inside | norms | {
        "embedding.weight",
        "head.weight",
        "blocks.0.mlp.up.weight",
        "blocks.0.mlp.down.weight",
    }
    assert type(NSATransformer(make_config(), seed=0).blocks[0].attention) is SparseAttention


def test_default_head_widths() -> None:
    assert (make_layer(value_dim=None).config.d_k, make_layer(value_dim=None).config.d_v) == (6, 6)
    layer = NSAttention(25, 4, 2, head_dim=8, value_dim=3, nsa=NSAConfig(**TINY_NSA))
    assert layer(torch.randn(1, 9, 25)).shape == (1, 9, 25)
    assert layer.attention.qkv.out_features == 4 * 8 + 3 * 2 * (8 + 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_autocast_accepts_dtypes_that_it_casts(dtype: torch.dtype) -> None:
    x = draw_rows(33, dtype=torch.float32).to(dtype)
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = make_layer()(x), make_layer()(x.float())
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)


def test_its_loss_belongs_to_the_last_pass() -> None:
    """Neither a copy nor a failed pass has a loss."""
    layer = make_layer(selection_loss=0.5)
    layer(draw_rows(41, dtype=torch.float32))
    assert layer.auxiliary_loss() > 0 and copy.deepcopy(layer).auxiliary_loss() == 0.0
    with pytest.raises(ValueError, match="expected x"):
        layer(torch.randn(1, 9, 23))
    assert layer.auxiliary_loss() == 0.0


def test_every_argument_reaches_the_layer() -> None:
    options = {"rope_theta": 50.0, "rotary_share": 0.5, "matching_heads": 1, "selection_loss": 0.25, "indexer_block": 2}
    layer = make_layer(head_dim=8, indexer_width=4, **options).double()
    assert {name: getattr(layer.config, name) for name in options} == options and layer.config.index_width == 4
    x, inner = draw_rows(29), layer.attention
    rotary = compute_rotary(torch.arange(29), 4, 50.0)
    torch.testing.assert_close(layer(x), inner(x, rotary)[0], rtol=0, atol=0)
    q, k, *_ = inner.project(x, rotary)
    torch.testing.assert_close(layer.auxiliary_loss(), 0.25 * inner(x, rotary)[1].loss, rtol=1e-12, atol=0)
    assert (
        q.shape[3] == k.shape[3] == 8
        and inner.project_selection_inputs(x, inner.project(x, rotary), rotary)[0].shape[3] == 4
    )


@looped
@pytest.mark.parametrize(
    ("build", "words"),
    [
        (
            lambda: NSAttention(100, 3, 1),
            r"dim = 100 is not a multiple of n_heads = 3; set head_dim=, or use dim = 99 or 102",
        ),
        (lambda: NSAttention(4, 8, 1), r"dim = 4 is not a multiple of n_heads = 8; set head_dim=, or use dim = 8 or 16"),
        (lambda: make_layer(value_dim=0), r"model.d_v = 0"),
        (lambda: NSAttention(15, 3, 1), r"head_dim = 5 is odd, .* use head_dim=4 or head_dim=6"),
        (lambda: NSAttention(4, 4, 2), r"head_dim = 1 is odd, .* use head_dim=2$"),
        (lambda: NSAttention(24, 4, 3), r"is not a multiple of model.n_kv_groups = 3"),
        (lambda: NSAttention(24, 0, 1), r"n_heads = 0: expected at least 1"),
        (lambda: make_layer()(torch.randn(9, 24)), r"expected x \[B, T, 24\], got \(9, 24\)"),
        (lambda: make_layer()(torch.randn(1, 9, 23)), r"expected x \[B, T, 24\], got \(1, 9, 23\)"),
        (lambda: make_layer()(torch.randn(1, 0, 24)), r"B and T at least 1; got \(1, 0, 24\)"),
        (
            lambda: make_layer()(torch.zeros(1, 9, 24, dtype=torch.int64)),
            r"expected x in torch.float32, as its weights, got torch.int64; use x.to\(torch.float32\)$",
        ),
        (
            lambda: make_layer()(torch.zeros(1, 9, 24, dtype=torch.float64)),
            r"got torch.float64; use x.to\(torch.float32\), or cast the layer: layer.to\(x.dtype\)$",
        ),
        (lambda: make_layer().bfloat16()(torch.zeros(1, 9, 24)), r"expected x in torch.bfloat16, .* got torch.float32"),
        (lambda: make_layer()(np.zeros((1, 9, 24), np.float32)), r"expected x \[B, T, 24\] as a tensor, got a ndarray"),
        (
            lambda: make_layer()(torch.zeros(1, 9, 24), torch.tensor([0, 9])),
            r"span: expected a Span, got a Tensor; use Span.full",
        ),
        (lambda: run_under_autocast(torch.float64), r"expected x in torch.float32, .* got torch.float64"),
        (lambda: run_under_autocast(torch.int64), r"expected x in torch.float32, .* got torch.int64"),
        (lambda: run_model(torch.zeros(1, 9)), r"tokens: expected int64 \[B, T\], got torch.float32 \(1, 9\)"),
        (
            lambda: run_model(torch.zeros(9, dtype=torch.int64)),
            r"tokens: expected int64 \[B, T\], got torch.int64 \(9,\)",
        ),
        (lambda: run_model(torch.tensor([[3, 17]])), r"expected values from 0 to 16 .*, got 3 to 17; use the tokenizer"),
        (lambda: run_model(torch.tensor([[-1, 3]])), r"expected values from 0 to 16 .*, got -1 to 3; use the tokenizer"),
        (lambda: make_layer()(torch.randn(2, 9, 24), make_packed_span(4, 5)), r"is one row of documents, B = 1; got B = 2"),
        (lambda: make_layer()(torch.randn(1, 9, 24), make_packed_span(4, 4)), r"Span.packed\(2 documents, 8 tokens\)"),
    ],
)
def test_inconsistent_arguments_raise(build: Callable[[], object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        build()


def test_padded_documents_train_as_unpadded_ones() -> None:
    """A capacity does not change the loss and gradients."""
    model = NSATransformer(make_config(phi="linear"), dtype=torch.float64, seed=0).double()
    tokens = make_tokens(model.config, sum(LENGTHS), batch=1)
    results = []
    for capacity in (None, 12):
        loss = model(tokens, make_packed_span(*LENGTHS, capacity=capacity)).logsumexp(-1).sum()
        results.append([loss, *torch.autograd.grad(loss, list(model.parameters()))])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    assert compute_loss(model, tokens).isfinite()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler's modules raise warnings
@pytest.mark.skipif(shutil.which("c++") is None, reason="torch.compile needs a C++ compiler on a CPU")
@pytest.mark.parametrize(
    "span",
    [None, pytest.param(make_packed_span(*LENGTHS), marks=pytest.mark.nightly), make_packed_span(*LENGTHS, capacity=9)],
    ids=["full", "packed", "padded"],
)
def test_the_compiled_layer_equals_the_eager_layer(span: Span | None) -> None:
    layer, x = make_layer(matching_heads=1, selection_loss=0.5), draw_rows(sum(LENGTHS), batch=1, dtype=torch.float32)

    def gradients(out: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(out.square().sum() + layer.auxiliary_loss(), list(layer.parameters()))

    eager = layer(x, span)
    expected = gradients(eager)
    compiled = torch.compile(layer, dynamic=False)(x, span)
    torch.testing.assert_close(compiled, eager, rtol=1e-5, atol=1e-5)
    for a, b in zip(gradients(compiled), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler's modules raise warnings
@pytest.mark.parametrize("attention", ["nsa", "dense"])
def test_compiled_blocks_support_any_documents_without_recompiling(attention: str) -> None:
    """Document bounds are inputs. As constants of the graph, every batch would compile again until the cache limit."""
    config = make_config(attention=attention, matching_heads=1, **({"selection_loss": 0.1} if attention == "nsa" else {}))
    model = NSATransformer(config, seed=0)
    for block in model.blocks:
        block.compile(dynamic=False, backend="eager")
    tokens, graphs = make_tokens(config, sum(LENGTHS), batch=1), torch._dynamo.utils.counters["stats"]
    before = graphs["unique_graphs"]
    counts = []
    for last in (1, 7, 20):
        span = make_packed_span(sum(LENGTHS) - last, 0, last, capacity=8)
        (model(tokens, span).sum() + model.auxiliary_loss()).backward()
        counts.append(graphs["unique_graphs"])
    assert before < counts[0] == counts[-1]


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "has_indexer", [pytest.param(False, marks=pytest.mark.nightly), True], ids=["compressed branch", "indexer"]
)
def test_a_layer_on_the_kernels_is_one_graph_for_all_documents(has_indexer: bool) -> None:
    """Gradients equal the torch backend's. The graph takes documents only as tensors."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    indexer = {"selection_loss": 0.1, "indexer_block": 4} if has_indexer else {}
    config = make_config(
        nsa={"l": 8, "d": 4, "l_sel": 16, "n_sel": 4, "w": 13}, d_k=16, d_v=16, matching_heads=1, **indexer
    )
    kernel_model, torch_model = (
        NSATransformer(config, backend=name, device=device, seed=0) for name in ("triton", "torch")
    )
    torch._dynamo.reset()  # compilations by other tests count toward the same limit
    counter = CompileCounter()
    for block in kernel_model.blocks:
        block.compile(dynamic=False, fullgraph=True, backend=counter)
    frames = []
    for lengths in ((81, 0, 10), (1, 7, 83)):
        span, tokens = make_packed_span(*lengths, capacity=4), make_tokens(config, sum(lengths), batch=1).to(device)
        found, expected = (
            torch.autograd.grad(model(tokens, span).square().sum() + model.auxiliary_loss(), list(model.parameters()))
            for model in (kernel_model, torch_model)
        )
        for a, b in zip(found, expected, strict=True):
            assert (a - b).norm() <= 1e-4 * b.norm() + 1e-6
        frames.append(counter.frame_count)
    assert frames[0] == frames[1] > 0


class CountOps(TorchDispatchMode):
    """Count the operations that reach the device."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


@looped
@pytest.mark.parametrize("phi", ["avg", "linear", "mlp", "pool"])
@pytest.mark.parametrize("has_loss", [False, True])
def test_the_number_of_launches_does_not_depend_on_the_documents(
    monkeypatch: pytest.MonkeyPatch, phi: str, has_loss: bool
) -> None:
    """Forward and backward, including tensors that are built once per layout. Attention is replaced by one operator."""

    def operator(q: torch.Tensor, *others: Any, **_: Any) -> torch.Tensor:
        mean = q.mean(-1, keepdim=True) + sum(x.mean() for x in others if torch.is_tensor(x))
        return mean.expand(*q.shape[:3], others[1].shape[-1])

    monkeypatch.setattr(layers_module, "nsa_attention", operator)
    model = NSATransformer(make_config(phi=phi, matching_heads=1, selection_loss=0.1 * has_loss), seed=0)
    tokens, counts = make_tokens(model.config, 200, batch=1), []
    for documents in (2, 2, 40):  # torch 2.6 runs more operations in a first backward pass
        with CountOps() as launches:
            loss = model(tokens, make_packed_span(*[200 // documents] * documents, capacity=48)).sum()
            (loss + model.auxiliary_loss()).backward()
        counts.append(launches.count)
    assert counts[1] == counts[2]


@pytest.mark.parametrize("tokens", [10, 30])
def test_a_layout_of_another_input_raises(tokens: int) -> None:
    with pytest.raises(ValueError, match="pass the span of this input"):
        check_span(Span.full(tokens), 20)


def test_a_layer_with_only_the_selected_branch_and_an_indexer_trains() -> None:
    """Every weight has a gradient; the selection loss reaches the indexer through keys that are rounded to fp8."""
    indexer = {
        "indexer_block": 2,
        "indexer_heads": 2,
        "indexer_keys": "shared",
        "indexer_dtype": "fp8",
        "selection_loss": 0.1,
    }
    nsa = NSAConfig(l=4, d=2, l_sel=4, n_sel=3, sink_blocks=0, local_blocks=1)
    layer = NSAttention(24, 4, 2, nsa=nsa, branches=["sel"], indexer_order=["pool", "norm", "rotate"], **indexer).double()
    assert layer.attention.gate is None and layer.attention.qkv.out_features == 24 + 2 * 2 * 6
    out = layer(draw_rows(40))
    (out.square().mean() + layer.auxiliary_loss()).backward()
    gradients = {name: p.grad for name, p in layer.named_parameters()}
    assert all(g is not None and g.isfinite().all() and g.any() for g in gradients.values()), gradients.keys()
