"""Notebook 03: a correct backend passes, and every kind of error fails, in each dtype."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from looping import looped
from torch import Tensor

from nsa_lab import figures
from nsa_lab.attention import torch_backend
from nsa_lab.bench.attention_parity import compute_error_and_limit
from nsa_lab.config import ConfigError, NSAConfig
from nsa_lab.figures.style import get_title, render_png
from nsa_lab.workbook import kernel_parity
from nsa_lab.workbook.kernel_parity import Comparison, ErrorCheck

NSA = NSAConfig(l=8, d=4, l_sel=8, n_sel=4, w=13)
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
HONEST = torch_backend.window_attention


def compared(dtype: torch.dtype, length: int = 40) -> dict[str, Comparison]:
    """Return the comparisons of the torch backend by part."""
    rows = kernel_parity.compare_backends([length], [dtype], NSA, heads=2, groups=1, head_dim=32)
    return {row.part: row for row in rows if row.backend == "torch"}


class Spoilt(torch.autograd.Function):
    """Identity in the forward pass; applies `spoil` to the gradient."""

    @staticmethod
    def forward(ctx, x: Tensor, spoil: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.spoil = spoil
        return x.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.spoil(gradient), None


def one_key_more(q: Tensor, k: Tensor, v: Tensor, nsa: NSAConfig) -> tuple[Tensor, Tensor]:
    return HONEST(q, k, v, nsa.model_copy(update={"w": nsa.w + 1}))


def one_nan(x: Tensor) -> Tensor:
    x = x.clone()
    x[0, -1, 0, 0] = math.nan
    return x


@looped
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", [1, 40])
def test_every_usable_backend_passes(dtype: torch.dtype, length: int) -> None:
    names, reasons = kernel_parity.find_usable_backends("cpu", dtype, NSA)
    assert "torch" in names and set(names) | set(reasons) == set(kernel_parity.BACKENDS)
    rows = list(kernel_parity.compare_backends([length], [dtype], NSA, heads=2, groups=1, head_dim=32))
    assert {(row.part, row.backend) for row in rows} == {(part, name) for part in kernel_parity.PARTS for name in names}
    assert all(row.ok for row in rows), kernel_parity.format_table(rows)
    assert all((row.gradient is None) == (row.part == "selection") for row in rows)


def test_each_reason_is_listed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    reasons = {torch.float32: {"flash": "no half precision"}, torch.float64: {"flash": "no half precision"}}
    monkeypatch.setattr(kernel_parity, "find_usable_backends", lambda device, dtype, nsa: (["torch"], reasons[dtype]))
    assert kernel_parity.describe_backends("cpu", list(reasons), NSA).splitlines() == [
        "device: cpu",
        "float32   torch",
        "float64   torch",
        "not in float32, float64: no half precision",
    ]


@looped
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_window_with_one_key_more_fails(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_backend, "window_attention", one_key_more)
    rows = compared(dtype)
    assert not rows["window"].ok and not rows["whole"].ok
    assert rows["compressed"].ok and rows["selection"].ok and rows["selected"].ok
    assert "TOO LARGE" in kernel_parity.format_table([rows["window"]]) and "TOO LARGE" not in kernel_parity.format_table(
        [rows["selected"]]
    )


@looped
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_output_with_a_few_rounding_errors_fails(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """In half precision 3 rounding errors, in wider dtypes an error above the limit."""
    off = max(3 * torch.finfo(dtype).eps, 5 * kernel_parity.LIMITS.get(dtype, 0.0))

    def coarse(q, k, v, nsa):
        out, lse = HONEST(q, k, v, nsa)
        return out * (1 + off), lse

    monkeypatch.setattr(torch_backend, "window_attention", coarse)
    assert not compared(dtype)["window"].output.ok


@looped
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("of", ["q", "k", "v"])
def test_gradient_five_percent_too_large_fails(of, dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoilt(q, k, v, nsa):
        inputs = {"q": q, "k": k, "v": v}
        inputs[of] = Spoilt.apply(inputs[of], lambda gradient: gradient * 1.05)
        return HONEST(**inputs, nsa=nsa)

    monkeypatch.setattr(torch_backend, "window_attention", spoilt)
    row = compared(dtype)["window"]
    assert row.output.ok and not row.ok and row.gradient.quantity == f"d{of}"


@looped
@pytest.mark.parametrize("of", ["q", "k", "v"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_fails(of: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoilt(q, k, v, nsa):
        inputs = {"q": q, "k": k, "v": v}
        inputs[of] = Spoilt.apply(inputs[of], one_nan)
        return HONEST(**inputs, nsa=nsa)

    monkeypatch.setattr(torch_backend, "window_attention", spoilt)
    row = compared(dtype)["window"]
    assert (
        row.output.ok and not row.ok and row.gradient.quantity == f"d{of}" and row.gradient.fraction_of_allowed == math.inf
    )
    monkeypatch.setattr(torch_backend, "window_attention", lambda *x: (one_nan(HONEST(*x)[0]), HONEST(*x)[1]))
    assert not compared(dtype)["window"].output.ok


@looped
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_query_with_other_blocks_fails(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = torch_backend.select_blocks

    def spoilt(*inputs):
        blocks = honest(*inputs).clone()
        left_out = set(range(5)) - set(blocks[0, 39, 0].tolist())
        assert len(left_out) == 1 and blocks[0, 39, 0, 1] not in (0, 3, 4)
        blocks[0, 39, 0, 1] = left_out.pop()
        return blocks

    monkeypatch.setattr(torch_backend, "select_blocks", spoilt)
    row = compared(dtype)["selection"]
    assert row.output.error == 1 / 40 and not row.ok


def test_float64_requires_equal_blocks() -> None:
    truth = {"blocks": torch.zeros(1, 2000, 1, 3, dtype=torch.int32)}
    got = {"blocks": truth["blocks"].clone()}
    got["blocks"][0, 0] = 1
    assert not kernel_parity._check_part("selection", torch.float64, got, truth, truth)[0].ok
    assert kernel_parity._check_part("selection", torch.float32, got, truth, truth)[0].ok


def test_limit_is_a_multiple_of_the_plain_error() -> None:
    exact = torch.ones(1000, dtype=torch.float64)
    actual = torch.full((1000,), 1.03125, dtype=torch.bfloat16)
    for rough, allowed in ((1.0625, 2 * 0.0625), (1.0, 2 * torch.finfo(torch.bfloat16).eps)):
        assert compute_error_and_limit(actual, exact, torch.full_like(actual, rough), 2) == pytest.approx(
            [0.03125, allowed]
        )
    error, allowed = compute_error_and_limit(actual, exact, torch.full_like(actual, math.nan), 2)
    assert not ErrorCheck("output", error, allowed).ok


def test_fraction_of_a_zero_limit_and_of_nan() -> None:
    assert ErrorCheck("x", 0.0, 0.0).fraction_of_allowed == 0 and ErrorCheck("x", 0.0, 0.0).ok
    assert ErrorCheck("x", 1e-9, 0.0).fraction_of_allowed == math.inf
    assert ErrorCheck("x", 1.0, 1.0).ok and not ErrorCheck("x", 1.0001, 1.0).ok
    assert not ErrorCheck("x", math.nan, 1.0).ok


def test_plot_of_allowed_errors() -> None:
    def row(length: int, output: float, gradient: float) -> Comparison:
        return Comparison(
            "window", "torch", length, "bfloat16", ErrorCheck("output", output, 2.0), ErrorCheck("dq", gradient, 3.0)
        )

    exact = Comparison("selection", "triton", 1, "bfloat16", ErrorCheck("blocks", 0.0, 1e-3), None)
    broken = Comparison("selection", "torch", 1, "bfloat16", ErrorCheck("blocks", math.nan, 1e-3), None)
    shares = kernel_parity.compute_worst_fractions([row(1, 1.0, 6.0), row(2, 0.5, 3.0), exact, broken], torch.bfloat16)
    assert shares == [
        ("window, output", "torch", 0.5),
        ("window, gradients", "torch", 2.0),
        ("selection, blocks", "triton", 0.0),
        ("selection, blocks", "torch", math.inf),
    ]
    assert kernel_parity.compute_worst_fractions([exact], torch.float32) == []
    figure = figures.plot_allowed_errors(shares, "made up")
    (axes,) = figure.axes
    assert render_png(figure).startswith(b"\x89PNG") and get_title(figure) == "made up" and "allowed" in axes.get_xlabel()
    assert [text.get_text() for text in axes.texts] == ["0.5", "2: TOO LARGE", "inf: TOO LARGE", "exact"]
    assert sorted(bar.get_width() > 1 for bar in axes.patches) == [False, False, True, True]
    assert [line.get_xdata()[0] for line in axes.lines] == [1]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["torch", "triton", "1: limit"]


def test_heads_that_do_not_fill_the_groups_are_refused() -> None:
    with pytest.raises(ConfigError, match="heads = 3: expected a positive multiple of the 2 groups, for example 4"):
        next(kernel_parity.compare_backends([40], [torch.float64], NSA, heads=3, groups=2, head_dim=32))
