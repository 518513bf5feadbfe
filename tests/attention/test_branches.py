"""Any set of branches, rules of selection and scorers of blocks, against the brute force."""

from __future__ import annotations

import pytest
import torch
from attention_inputs import Shape, every_variant, use_variant
from branch_cases import compute_decoding_error, compute_worst_errors, make_case
from looping import looped

from nsa_lab import attention
from nsa_lab.attention import geometry, nsa_attention
from nsa_lab.config import NSAConfig

LIMITS = {"reference": 1e-12, "torch": 1e-10}


@pytest.mark.slow
@looped
@pytest.mark.parametrize("kind", ["full", "chunk", "packed"])
@pytest.mark.parametrize("seed", [pytest.param(seed, marks=[pytest.mark.nightly] * (seed >= 8)) for seed in range(100)])
def test_random_forms_equal_the_brute_force(kind: str, seed: int) -> None:
    """Output, blocks and gradients; and a decoding call. More cases: python tests/attention/branch_cases.py 300."""
    form = make_case(seed, kind)
    for backend, worst in compute_worst_errors(form).items():
        assert worst <= LIMITS[backend], f"{backend}: {form}"
    if kind != "packed":
        assert compute_decoding_error(form) <= 1e-12, form


@every_variant
def test_the_selected_branch_alone_with_all_blocks_is_dense(variant: str) -> None:
    """In one softmax: values, and gradients of queries, keys and values."""
    nsa = NSAConfig(l=4, d=2, l_sel=4, n_sel=9, sink_blocks=0, local_blocks=1, scores="mean_key")
    x = Shape(nsa, T=35).inputs()
    with use_variant(variant) as backend:
        results = []
        for attend in (
            lambda q, k, v: nsa_attention(q, None, None, k, v, None, None, None, nsa, backend=backend),
            attention.dense_attention,
        ):
            leaves = [y.clone().requires_grad_() for y in (x.q, x.k_sel, x.v_sel)]
            out = attend(*leaves)
            results.append((out.detach(), *torch.autograd.grad(out.square().sum(), leaves)))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


@every_variant
def test_local_blocks_contain_the_window(variant: str) -> None:
    """With only local blocks, the selected branch attends to the window of as many tokens, up to the start of a block."""
    nsa = NSAConfig(l=4, d=2, l_sel=4, n_sel=3, w=9, sink_blocks=0, local_blocks=3, scores="mean_key")
    x = Shape(nsa, T=35).inputs()
    with use_variant(variant) as backend:
        selected = nsa_attention(x.q, None, None, x.k_sel, x.v_sel, None, None, None, nsa, backend=backend)
        window = nsa_attention(x.q, None, None, None, None, x.k_sel, x.v_sel, None, nsa, backend=backend)
    is_equal = torch.isclose(selected, window, rtol=1e-12, atol=1e-12).flatten(2).all(-1)[0]
    # A query that begins a block sees two whole blocks and itself: nine tokens.
    assert is_equal.nonzero().flatten().tolist() == [t for t in range(35) if t < 9 or t % 4 == 0]


def test_mean_keys_are_those_of_the_selected_branch() -> None:
    """Beside a window with other keys, the selected branch attends to the same blocks as alone."""
    nsa = NSAConfig(l=4, d=2, l_sel=4, n_sel=3, w=9, sink_blocks=0, local_blocks=1, scores="mean_key")
    x = Shape(nsa, T=35).inputs()
    gates = x.gates[..., 1:]
    for backend in LIMITS:
        selected = nsa_attention(x.q, None, None, x.k_sel, x.v_sel, None, None, None, nsa, backend=backend)
        window = nsa_attention(x.q, None, None, None, None, x.k_win, x.v_win, None, nsa, backend=backend)
        both = nsa_attention(x.q, None, None, x.k_sel, x.v_sel, x.k_win, x.v_win, gates, nsa, backend=backend)
        torch.testing.assert_close(both, gates[..., :1] * selected + gates[..., 1:] * window, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("T", [1, 7, 40])
def test_forced_blocks_equal_counting(T: int) -> None:
    for sink, local in ((0, 1), (1, 2), (2, 1), (3, 3), (9, 9)):
        nsa = NSAConfig(l=4, d=2, l_sel=4, n_sel=sink + local, sink_blocks=sink, local_blocks=local)
        n_blocks = geometry.num_selection(T, nsa)
        forced = geometry.forced_blocks(torch.arange(T), n_blocks, nsa)
        for t in range(T):
            own = t // 4
            expected = [j for j in range(own + 1) if j < sink or j > own - local]
            assert forced[t].nonzero().flatten().tolist() == expected


def test_inconsistent_branches_raise() -> None:
    x, nsa = Shape().inputs(), Shape().nsa
    cmp, sel, win = (x.k_cmp, x.v_cmp), (x.k_sel, x.v_sel), (x.k_win, x.v_win)
    none, gates = (None, None), x.gates
    cases = {
        r"gates: expected shape .*2\), got .*3\)": (*cmp, *none, *win, gates),
        "gates: expected None: a single branch has no gate, got a tensor": (*none, *none, *win, gates[..., :1]),
        "gates: expected one column for each of 2 branches, got None": (*cmp, *none, *win, None),
        "v_win: expected a tensor, as for k_win, got None; pass both, or None for both": (
            *cmp,
            *none,
            x.k_win,
            None,
            gates,
        ),
        "expected keys and values of at least one branch": (*none, *none, *none, None),
        r"nsa.scores = compressed \(the default\) needs keys of the compressed branch": (*none, *sel, *none, None),
    }
    for message, inputs in cases.items():
        with pytest.raises(ValueError, match=message):
            nsa_attention(x.q, *inputs, nsa)
    with pytest.raises(ValueError, match=r"nsa.scores = indexer: expected the blocks that an indexer selected"):
        nsa_attention(x.q, *cmp, *sel, *win, gates, nsa.model_copy(update={"scores": "indexer"}))
    blocks = torch.zeros(1, 21, 2, 3, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"blocks: expected None without a selected branch"):
        nsa_attention(x.q, *none, *none, *win, None, nsa, blocks=blocks)
