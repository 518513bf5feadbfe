"""Tokens > t change no bit of results at <= t: every function, every variant."""

from __future__ import annotations

import pytest
import torch
from attention_inputs import Inputs, Shape, every_variant, use_variant
from looping import looped
from torch import Tensor

from nsa_lab import attention
from nsa_lab.attention.compression import make_phi
from nsa_lab.config import NSAConfig

SHAPES = {
    "small": Shape(nsa=NSAConfig(l=6, d=3, l_sel=6, n_sel=4, w=5), T=61),
    "few blocks of a long past": Shape(nsa=NSAConfig(l=2, d=1, l_sel=2, n_sel=3, w=3), T=83, h=2),
    "compression longer than selection": Shape(nsa=NSAConfig(l=12, d=2, l_sel=4, n_sel=4, w=7), T=61),
}
shapes = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
# The fast tests use only the wider of the two dtypes that backends compute in without conversion.
DTYPES = [torch.float64, pytest.param(torch.float32, marks=pytest.mark.nightly), torch.bfloat16]


def get_cuts(shape: Shape) -> list[int]:
    """Return the last unchanged positions: at block edges, next to them, and the second to last."""
    nsa = shape.nsa
    return sorted({0, nsa.l - 2, nsa.l - 1, nsa.l_sel - 1, nsa.l_sel, nsa.w, 4 * nsa.l_sel - 1, shape.T // 2, shape.T - 2})


def compute_all(inputs: Inputs, shape: Shape, backend: str) -> dict[str, Tensor]:
    nsa = shape.nsa
    k_cmp, v_cmp = attention.compress(inputs.k_sel, nsa), attention.compress(inputs.v_sel, nsa)
    out_cmp, lse_cmp = attention.compressed_attention(inputs.q, k_cmp, v_cmp, nsa, backend=backend)
    blocks = attention.select_blocks(inputs.q, k_cmp, lse_cmp, nsa, backend=backend)
    out_sel, lse_sel = attention.selected_attention(inputs.q, inputs.k_sel, inputs.v_sel, blocks, nsa, backend=backend)
    out_win, lse_win = attention.window_attention(inputs.q, inputs.k_win, inputs.v_win, nsa, backend=backend)
    out = attention.nsa_attention(inputs.q, k_cmp, v_cmp, *inputs[3:], nsa, backend=backend)
    return {
        "out_cmp": out_cmp,
        "lse_cmp": lse_cmp,
        "blocks": blocks,
        "out_sel": out_sel,
        "lse_sel": lse_sel,
        "out_win": out_win,
        "lse_win": lse_win,
        "mixed": out,
    }


def replace_future(inputs: Inputs, shape: Shape, last: int) -> Inputs:
    """Scale the future up, so that a leak would dominate the softmax."""
    other = Shape(**{**shape.__dict__, "seed": shape.seed + 1}).inputs(inputs.q.dtype).map(lambda x: 10 * x)
    pairs = zip(inputs, other, strict=True)
    return Inputs(*(torch.cat([mine[:, : last + 1], new[:, last + 1 :]], dim=1) for mine, new in pairs))


def compute_with_futures(shape: Shape, variant: str, dtype: torch.dtype) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return results of the sequence, repeated per cut, and of sequences that differ after the cut, in one batch."""
    inputs, ends = shape.inputs(dtype), get_cuts(shape)
    others = zip(*(replace_future(inputs, shape, last) for last in ends), strict=True)
    with use_variant(variant, batch=len(ends)) as backend:
        now = compute_all(inputs.map(lambda x: x.repeat(len(ends), 1, 1, 1)), shape, backend)
        return now, compute_all(Inputs(*map(torch.cat, others)), shape, backend)


@looped
@every_variant
@shapes
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_future_changes_no_bit_of_the_past(shape: Shape, variant: str, dtype: torch.dtype) -> None:
    before, after = compute_with_futures(shape, variant, dtype)
    for row, last in enumerate(get_cuts(shape)):
        for name, x in before.items():
            assert torch.equal(x[row, : last + 1], after[name][row, : last + 1]), f"{name} at <= {last}"


NONFINITE_VALUES = {
    "NaN in v": (torch.nan, ("v_sel", "v_win")),
    "inf in v": (torch.inf, ("v_sel", "v_win")),
    "NaN in everything": (torch.nan, Inputs._fields),
}


@pytest.mark.slow
@looped
@every_variant
@shapes
def test_a_nonfinite_future_changes_no_bit_of_the_past(shape: Shape, variant: str) -> None:
    """A mask is not sufficient: zero times NaN is NaN."""
    inputs = shape.inputs(torch.float32)
    with use_variant(variant) as backend:
        before = compute_all(inputs, shape, backend)
        for what, (poison, names) in NONFINITE_VALUES.items():
            for last in (shape.nsa.l_sel - 1, shape.T // 2):
                # `compute_all` compresses k_sel and v_sel itself.
                spoilt = {name: getattr(inputs, name).clone() for name in names}
                for x in spoilt.values():
                    x[:, last + 1 :] = poison
                after = compute_all(inputs._replace(**spoilt), shape, backend)
                for name, x in before.items():
                    assert torch.equal(x[:, : last + 1], after[name][:, : last + 1]), f"{name} at <= {last}, {what}"
                assert not after["mixed"][:, last + 1].isfinite().any(), "queries that attend to it must show it"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dense_attention_is_causal_for_finite_values(dtype: torch.dtype) -> None:
    inputs = Shape(nsa=NSAConfig(l=6, d=3, l_sel=6, n_sel=4, w=5), T=61).inputs(dtype)
    before = attention.dense_attention(inputs.q, inputs.k_win, inputs.v_win)
    for last in (0, 15, 30, 59):
        v = inputs.v_win.clone()
        v[:, last + 1 :] = torch.finfo(dtype).max
        after = attention.dense_attention(inputs.q, inputs.k_win, v)
        assert torch.equal(before[:, : last + 1], after[:, : last + 1])


@pytest.mark.slow
@looped
@every_variant
@shapes
def test_changes_at_a_position_do_change_its_output(shape: Shape, variant: str) -> None:
    """The tests above can fail: a query's own token changes each branch that attends to it."""
    before, after = compute_with_futures(shape, variant, torch.float64)
    for row, last in enumerate(get_cuts(shape)):
        for name in ("out_sel", "out_win", "mixed"):
            assert not torch.equal(before[name][row, last + 1], after[name][row, last + 1]), f"{name} at {last + 1}"


@pytest.mark.slow
@looped
@every_variant
@shapes
def test_cutting_the_tail_changes_nothing_before_it(shape: Shape, variant: str) -> None:
    """A prefix has the same results as within the longer sequence, including the selected blocks."""
    inputs = shape.inputs()
    with use_variant(variant) as backend:
        whole = compute_all(inputs, shape, backend)
        for last in get_cuts(shape):
            prefix = compute_all(inputs.map(lambda x, last=last: x[:, : last + 1]), shape, backend)
            for name, x in prefix.items():
                torch.testing.assert_close(x, whole[name][:, : last + 1], rtol=1e-12, atol=1e-12)


@looped
@every_variant
def test_a_compressed_block_is_visible_from_its_last_token_on(variant: str) -> None:
    shape = SHAPES["small"]
    nsa, inputs = shape.nsa, shape.inputs()
    with use_variant(variant) as backend:
        before, _ = attention.compressed_attention(inputs.q, inputs.k_cmp, inputs.v_cmp, nsa, backend=backend)
        for block in range(inputs.v_cmp.shape[1]):
            changed = inputs.v_cmp.clone()
            changed[:, block] += 1
            after, _ = attention.compressed_attention(inputs.q, inputs.k_cmp, changed, nsa, backend=backend)
            moved = (after != before).flatten(2).any(-1)[0]
            assert moved.nonzero()[0].item() == block * nsa.d + nsa.l - 1


@looped
@every_variant
@pytest.mark.parametrize("w", [1, 4, 5, 100])
def test_the_window_has_exactly_w_keys(variant: str, w: int) -> None:
    shape = Shape(nsa=NSAConfig(l=4, d=2, l_sel=4, n_sel=3, w=w), T=23)
    inputs = shape.inputs()
    v = inputs.v_win.requires_grad_()
    with use_variant(variant) as backend:
        out, _ = attention.window_attention(inputs.q, inputs.k_win, v, shape.nsa, backend=backend)
        for t in range(shape.T):
            (grad,) = torch.autograd.grad(out[:, t].sum(), v, retain_graph=True)
            read = (grad != 0).flatten(2).any(-1)[0].nonzero().flatten().tolist()
            assert read == list(range(max(t - w + 1, 0), t + 1))
        if w == 1:
            torch.testing.assert_close(out, v.repeat_interleave(shape.h, dim=2), rtol=1e-12, atol=1e-12)


@looped
@pytest.mark.parametrize("phi", ["avg", "linear", "mlp", "pool"])
@pytest.mark.parametrize("operator", [attention.reference.compress, attention.compress], ids=["reference", "fast"])
def test_a_compressed_block_depends_only_on_its_tokens(operator, phi: str) -> None:
    nsa = NSAConfig(l=6, d=3, l_sel=6, n_sel=3, w=4, phi=phi)
    torch.manual_seed(0)
    module = make_phi(nsa, 4)
    x = torch.randn(1, 25, 2, 4)
    before = operator(x, nsa, module)
    for token in range(25):
        changed = x.clone()
        changed[:, token] += 1
        moved = (operator(changed, nsa, module) != before).flatten(2).any(-1)[0].nonzero().flatten().tolist()
        assert moved == [i for i in range(before.shape[1]) if 3 * i <= token < 3 * i + 6]
