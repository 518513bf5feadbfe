"""The public functions check their inputs, and outputs have the shapes and dtypes of the contract."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from attention_inputs import CORNERS, Inputs, Shape, every_variant, use_variant
from dispatch_inputs import NSA, PACKED, call_all_functions
from looping import looped

from nsa_lab import attention
from nsa_lab.attention import geometry, reference
from nsa_lab.attention.compression import compress, make_phi


def change_inputs(**changes: Callable[[torch.Tensor], Any]) -> Inputs:
    x = Shape().inputs()
    return x._replace(**{name: change(getattr(x, name)) for name, change in changes.items()})


def drop_last_token(x: torch.Tensor) -> torch.Tensor:
    return x[:, :-1]


MISTAKES = {
    "an array": (change_inputs(q=lambda x: x.numpy()), "q: expected a tensor, got a ndarray"),
    "lists": (change_inputs(k_sel=torch.Tensor.tolist), "k_sel: expected a tensor, got a list"),
    "a number": (change_inputs(gates=lambda x: 1.0), "gates: expected a tensor, got a float"),
    "a sparse tensor": (
        change_inputs(v_win=torch.Tensor.to_sparse),
        "v_win: expected a dense tensor, got the layout torch.sp",
    ),
    "three dimensions": (change_inputs(q=lambda x: x[0]), "3, 4 and 4 dimensions"),
    "heads that do not divide": (change_inputs(q=lambda x: x[:, :, :5]), "5 query heads do not divide into 2"),
    "no groups": (change_inputs(k_cmp=lambda x: x[:, :, :0]), "6 query heads do not divide into 0"),
    "a compressed key too few": (
        change_inputs(k_cmp=drop_last_token, v_cmp=drop_last_token),
        "expected shape (1, 9, 2, 6), got (1, 8, 2, 6)",
    ),
    "raw keys for compressed ones": (
        change_inputs(k_cmp=lambda x: Shape().inputs().k_sel),
        "k_cmp: expected shape (1, 9, 2, 6)",
    ),
    "selected keys too short": (
        change_inputs(k_sel=drop_last_token, v_sel=drop_last_token),
        "expected shape (1, 21, 2, 6), got (1, 20, 2, 6)",
    ),
    "window keys too short": (change_inputs(k_win=drop_last_token, v_win=drop_last_token), "k_win: expected shape"),
    "keys of another width": (
        change_inputs(k_sel=lambda x: x[..., :5]),
        "k_sel: expected shape (1, 21, 2, 6), got (1, 21, 2, 5)",
    ),
    "another batch": (change_inputs(k_win=lambda x: x.expand(2, -1, -1, -1)), "k_win: expected shape"),
    "values of another length": (change_inputs(v_sel=drop_last_token), "v_sel: expected shape"),
    "values of other groups": (change_inputs(v_win=lambda x: x[:, :, :1]), "v_win: expected shape"),
    "two dtypes": (
        change_inputs(v_cmp=lambda x: x.float()),
        "differ in dtype: torch.float64, torch.float64, torch.float32",
    ),
    "two devices": (change_inputs(v_cmp=lambda x: x.to("meta")), "are on cpu, cpu and meta"),
    "gates without branches": (change_inputs(gates=lambda x: x[..., 0]), "gates: expected shape (1, 21, 6, 3)"),
    "gates of groups": (
        change_inputs(gates=lambda x: x[:, :, :2]),
        "gates: expected shape (1, 21, 6, 3), got (1, 21, 2, 3)",
    ),
    "gates of another dtype": (
        change_inputs(gates=torch.Tensor.float),
        "gates: expected torch.float64, the dtype of q, got torch.float32",
    ),
    "gates elsewhere": (change_inputs(gates=lambda x: x.to("meta")), "gates: on meta, but q is on cpu"),
    "integers": (change_inputs().map(torch.Tensor.int), "expected float64, float32, bfloat16 or float16, got torch.int32"),
    "complex numbers": (change_inputs().map(lambda x: x.to(torch.complex128)), "got torch.complex128"),
    "no numbers at all": (change_inputs().map(lambda x: x.to("meta")), "on the meta device, which has no data"),
    "other groups in one branch": (
        change_inputs(k_win=lambda x: x[:, :, :1], v_win=lambda x: x[:, :, :1]),
        "the branches differ in key/value groups: k_cmp, k_sel, k_win have G = [2, 2, 1]",
    ),
    "values one wide": (change_inputs(v_win=lambda x: x[..., :1]), "v_cmp, v_sel, v_win have Dv = [4, 4, 1]"),
    "values of another width": (change_inputs(v_cmp=lambda x: x[..., :3]), "v_cmp, v_sel, v_win have Dv = [3, 4, 4]"),
    "values of no width": (
        change_inputs(v_sel=lambda x: x[..., :0]),
        "v_sel: expected shape (1, 21, 2, 'Dv'), got (1, 21, 2, 0)",
    ),
    "no sequence": (change_inputs().map(lambda x: x[:0]), "q: expected [B, T, H, D]: batch, time, query heads, head width"),
    "no token": (change_inputs().map(lambda x: x[:, :0]), "each at least 1; got (1, 0, 6, 6)"),
    "no head": (change_inputs(q=lambda x: x[:, :, :0]), "each at least 1; got (1, 21, 0, 6)"),
    "no width": (change_inputs(q=lambda x: x[..., :0], k_cmp=lambda x: x[..., :0]), "each at least 1; got (1, 21, 6, 0)"),
    "axes as torch has them": (
        change_inputs().map(lambda x: x.transpose(1, 2)),
        "q and k_cmp look like [B, H, T, D]: use transpose(1, 2)",
    ),
    "queries as torch has them": (
        change_inputs(q=lambda x: x.transpose(1, 2)),
        "q looks like [B, H, T, D]: use transpose(1, 2)",
    ),
    "keys as torch has them": (
        change_inputs(k_sel=lambda x: x.transpose(1, 2), v_sel=lambda x: x.transpose(1, 2)),
        "k_sel looks like [B, G, T, D]: use transpose(1, 2)",
    ),
}


SPAN_MISTAKES = {
    "another number of queries": (
        attention.Span.full(20),
        {},
        "q: Span.full(20) has 20 queries, and q (1, 21, 6, 6) has 21",
    ),
    "keys of the chunk alone": (attention.Span.chunk(4, 21), {}, "k_cmp: expected shape (1, 11, 2, 6), got (1, 9, 2, 6)"),
    "blocks over the border": (PACKED, {}, "k_cmp: expected shape (1, 8, 2, 6), got (1, 9, 2, 6)"),
    "two rows of documents": (PACKED, {"B": 2}, "is one row of documents, B = 1; got B = 2"),
    "axes as torch has them": (PACKED, {"swap": True}, "q looks like [B, H, T, D]: use transpose(1, 2)"),
}


@pytest.mark.parametrize("nsa", [None, {"l": 4}])
def test_a_wrong_nsa_type_raises(nsa: Any) -> None:
    with pytest.raises(TypeError, match=f"nsa: expected an NSAConfig, got {type(nsa).__name__}"):
        attention.nsa_attention(*Shape().inputs(), nsa)


@looped
@every_variant
def test_inputs_are_not_modified(variant: str) -> None:
    """Forward and backward, including the caller's blocks, which need not be sorted."""
    inputs = Shape().inputs().map(lambda x: x.requires_grad_())
    before = inputs.map(lambda x: x.detach().clone())
    blocks = torch.tensor([2, -1, 0], dtype=torch.int32).expand(1, Shape().T, Shape().G, 3).contiguous()
    lse = torch.zeros(1, Shape().T, 6, dtype=torch.float64)
    expected = blocks.clone(), lse.clone()
    with use_variant(variant) as backend:
        results = call_all_functions(inputs, NSA, backend)
        sum(torch.where(torch.isneginf(x), 0.0, x).sum() for x in results).backward()
        attention.selected_attention(inputs.q, inputs.k_sel, inputs.v_sel, blocks, NSA, backend=backend)
        attention.select_blocks(inputs.q, inputs.k_cmp, lse, NSA, backend=backend)
    assert all(torch.equal(a, b) for a, b in zip(inputs, before, strict=True))
    assert torch.equal(blocks, expected[0]) and torch.equal(lse, expected[1])


@looped
@every_variant
def test_strides_do_not_matter(variant: str) -> None:
    """Transposed, sliced and expanded inputs give equal outputs and gradients."""

    def make_strided(x: torch.Tensor) -> torch.Tensor:
        wide = torch.stack([x, torch.full_like(x, torch.nan)], dim=-1)[..., 0]  # every second element of a buffer
        return wide.transpose(1, 2).contiguous().transpose(1, 2)[..., : x.shape[-1]].requires_grad_()

    contiguous = Shape(B=2).inputs().map(lambda x: x.requires_grad_())
    strided = contiguous.map(lambda x: make_strided(x.detach()))
    assert not any(x.is_contiguous() for x in strided)
    with use_variant(variant) as backend:
        results = [call_all_functions(x, NSA, backend) for x in (contiguous, strided)]
        grads = [torch.autograd.grad(x[-1].square().sum(), y) for x, y in zip(results, (contiguous, strided), strict=True)]
    for a, b in zip(results[0] + list(grads[0]), results[1] + list(grads[1]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@looped
@every_variant
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_outputs_keep_the_dtype_and_lse_is_float32(variant: str, dtype: torch.dtype) -> None:
    with use_variant(variant) as backend:
        out_cmp, lse_cmp, blocks, out_sel, lse_sel, out_win, lse_win, out = call_all_functions(
            Shape().inputs(dtype), NSA, backend
        )
    assert {x.dtype for x in (out_cmp, out_sel, out_win, out)} == {dtype}
    assert {x.dtype for x in (lse_cmp, lse_sel, lse_win)} == {torch.float64 if dtype == torch.float64 else torch.float32}
    assert blocks.dtype == torch.int32


@looped
@every_variant
@pytest.mark.parametrize("shape", CORNERS.values(), ids=CORNERS)
def test_shapes_follow_the_contract_without_nan(shape: Shape, variant: str) -> None:
    """Sizes differ from each other where possible, so a transposed output fails."""
    B, T, H = shape.B, shape.T, shape.G * shape.h
    with use_variant(variant) as backend:
        results = call_all_functions(shape.inputs(torch.float32), shape.nsa, backend)
    out, lse = (B, T, H, shape.d_v), (B, T, H)
    blocks = (B, T, shape.G, shape.nsa.n_sel)
    assert [tuple(x.shape) for x in results] == [out, lse, blocks, out, lse, out, lse, out]
    assert not any(x.isnan().any() for x in results)


@looped
@every_variant
def test_uninitialized_memory_is_never_read(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers that the backend allocates without initialization contain NaN; no output may be NaN."""
    empty, new_empty, empty_like = torch.empty, torch.Tensor.new_empty, torch.empty_like

    def poison(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def build(*args: Any, **kwargs: Any) -> torch.Tensor:
            x = make(*args, **kwargs)
            return x.fill_(float("nan")) if x.is_floating_point() else x.fill_(-7)

        return build

    shape = Shape(T=29)
    inputs = shape.inputs().map(lambda x: x.requires_grad_())
    monkeypatch.setattr(torch, "empty", poison(empty))
    monkeypatch.setattr(torch, "empty_like", poison(empty_like))
    monkeypatch.setattr(torch.Tensor, "new_empty", poison(new_empty))
    with use_variant(variant) as backend:
        results = call_all_functions(inputs, shape.nsa, backend)
        grads = torch.autograd.grad(results[-1].sum(), inputs)
    assert not any(x.isnan().any() for x in (*results, *grads)) and (results[2] >= -1).all()


@looped
@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_inconsistent_inputs_raise(mistake: str, backend: str) -> None:
    inputs, message = MISTAKES[mistake]
    with pytest.raises(ValueError) as caught:
        attention.nsa_attention(*inputs, NSA, backend=backend)
    assert message in str(caught.value)


def test_each_function_checks_its_own_inputs() -> None:
    x = Shape().inputs()
    blocks = torch.full((1, Shape().T, 2, 3), -1, dtype=torch.int32)
    lse = torch.zeros(1, Shape().T, 6)
    selected, sel = attention.selected_attention, (x.q, x.k_sel, x.v_sel)
    calls = {
        "k_cmp: expected shape": lambda: attention.compressed_attention(x.q, x.k_sel, x.v_sel, NSA),
        "k_cmp: expected shape (1, 9": lambda: attention.select_blocks(x.q, x.k_sel, lse, NSA),
        "lse: expected shape (1, 21, 6), got (1, 20, 6)": lambda: attention.select_blocks(x.q, x.k_cmp, lse[:, 1:], NSA),
        "lse: expected a tensor, got a NoneType": lambda: attention.select_blocks(x.q, x.k_cmp, None, NSA),
        "blocks: expected a tensor, got a list": lambda: selected(*sel, blocks.tolist(), NSA),
        "v: expected a tensor, got a list": lambda: attention.dense_attention(x.q, x.k_sel, x.v_sel.tolist()),
        "x: expected a tensor, got a ndarray": lambda: compress(x.k_sel.numpy(), NSA),
        "k: expected shape": lambda: selected(x.q, x.k_cmp, x.v_cmp, blocks, NSA),
        "blocks: expected shape (1, 21, 2, 3)": lambda: selected(*sel, blocks[..., 1:], NSA),
        "blocks: expected int32, got torch.int64": lambda: selected(*sel, blocks.long(), NSA),
        "v: expected shape": lambda: attention.window_attention(x.q, x.k_win, x.v_cmp, NSA),
        "lse: expected float32": lambda: attention.select_blocks(x.q, x.k_cmp, lse.half(), NSA),
        "lse: on meta": lambda: attention.select_blocks(x.q, x.k_cmp, lse.to("meta"), NSA),
        "blocks: on meta": lambda: selected(*sel, blocks.to("meta"), NSA),
        "x: expected [B, T, G, D]: batch, time, key/value groups, head width; got 3": lambda: compress(x.k_sel[0], NSA),
        "x: expected float64": lambda: compress(x.k_sel.int(), NSA),
        "each at least 1; got (1, 0, 2, 6)": lambda: compress(x.k_sel[:, :0], NSA),
        "x: on the meta device": lambda: compress(x.k_sel.to("meta"), NSA),
        "q, keys and values: expected float64": lambda: attention.dense_attention(x.q.int(), x.k_sel.int(), x.v_sel.int()),
        "q and k look like": lambda: attention.dense_attention(*(y.transpose(1, 2) for y in (x.q, x.k_sel, x.v_sel))),
    }
    for message, call in calls.items():
        with pytest.raises(ValueError) as caught:
            call()
        assert message in str(caught.value)


@looped
@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (torch.Tensor.long, "blocks: expected int32, got torch.int64"),
        (lambda blocks: blocks[:, 1:], "blocks: expected shape (1, 21, 2, 3), got (1, 20, 2, 3)"),
        (lambda blocks: blocks + 6, "expected indices from 0 to 5, each once in a row [n_sel], or -1 for none; got 5 to 6"),
        (lambda blocks: blocks - 1, "or -1 for none; got -2 to -1"),
        (lambda blocks: torch.zeros_like(blocks), "got 0 to 0, some twice"),
    ],
)
def test_given_blocks_are_checked(spoil: Callable[..., torch.Tensor], message: str, backend: str) -> None:
    x, nsa = Shape().inputs(), NSA
    blocks = torch.full((1, 21, 2, 3), -1, dtype=torch.int32)
    blocks[..., 0] = 0
    last = geometry.num_selection(21, nsa) - 1
    assert last == 5
    attention.nsa_attention(*x, nsa, blocks=torch.where(blocks == 0, last, blocks), backend=backend)
    with pytest.raises(ValueError) as caught:
        attention.nsa_attention(*x, nsa, blocks=spoil(blocks), backend=backend)
    assert message in str(caught.value)


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_packed_blocks_are_checked_per_document(backend: str) -> None:
    """The longest document has 12 tokens and three blocks; the row has six."""
    q, k, v = (torch.randn(1, 21, heads, 6, dtype=torch.float64) for heads in (6, 2, 2))
    for last in (2, 3):
        blocks = torch.tensor([0, last, -1], dtype=torch.int32).expand(1, 21, 2, 3).contiguous()
        if last == 2:
            attention.selected_attention(q, k, v, blocks, NSA, span=PACKED, backend=backend)
            continue
        with pytest.raises(ValueError, match="blocks: expected indices from 0 to 2, each once"):
            attention.selected_attention(q, k, v, blocks, NSA, span=PACKED, backend=backend)


@looped
@pytest.mark.parametrize("mistake", SPAN_MISTAKES)
def test_a_layout_that_does_not_fit_the_tensors_raises(mistake: str) -> None:
    span, options, message = SPAN_MISTAKES[mistake]
    x = Shape(B=options.get("B", 1)).inputs()
    if options.get("swap"):
        x = x._replace(q=x.q.transpose(1, 2), k_cmp=x.k_cmp[:, :8], v_cmp=x.v_cmp[:, :8])
    with pytest.raises(ValueError) as caught:
        attention.nsa_attention(*x, NSA, backend="torch", span=span)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("span", "message"),
    [
        (attention.Span.chunk(3, 4), "x: Span.chunk(3, 4) has 7 keys, and x (1, 21, 2, 6) has 21"),
        (attention.Span.full(2), "x looks like [B, G, T, D]: use transpose(1, 2)"),
    ],
)
def test_compress_needs_all_keys_of_the_layout(span: attention.Span, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        compress(Shape().inputs().k_sel, NSA, span=span)
    assert message in str(caught.value)


def test_compress_needs_one_row_of_documents() -> None:
    with pytest.raises(ValueError, match=r"^x: .* is one row of documents, B = 1; got B = 2 in \(2, 21, 2, 6\)$"):
        compress(Shape(B=2).inputs().k_sel, NSA, span=PACKED)


@looped
@pytest.mark.parametrize("operator", [reference.compress, compress], ids=["reference", "fast"])
@pytest.mark.parametrize("phi", ["avg", "linear", "mlp", "pool"])
def test_phi_must_match_the_configuration(operator: Callable[..., Any], phi: str) -> None:
    nsa = NSA.model_copy(update={"phi": phi})
    other = make_phi(nsa.model_copy(update={"phi": "linear"}), 6) if phi == "avg" else None
    with pytest.raises(ValueError, match="make_phi"):
        operator(Shape().inputs().k_sel, nsa, other)
