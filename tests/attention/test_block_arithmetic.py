"""Blocks, overlaps and counts: eq. 9 for all block ratios, and the numbers that a correct NSA must have."""

from __future__ import annotations

import itertools

import pytest
import torch
from attention_inputs import GEOMETRIES
from hypothesis import given
from hypothesis import strategies as st
from looping import looped

from nsa_lab import attention
from nsa_lab.attention import geometry, torch_backend
from nsa_lab.config import NSAConfig

BLOCK_RATIOS = list(itertools.product([1, 2, 3, 16], [1, 2, 3, 4, 5, 8], [1, 2, 3, 4, 6, 8]))  # d, l/d, l_sel/d


@st.composite
def random_geometries(draw: st.DrawFn) -> NSAConfig:
    d = draw(st.integers(1, 16))
    return NSAConfig(
        l=d * draw(st.integers(1, 6)),
        d=d,
        l_sel=d * draw(st.integers(1, 6)),
        n_sel=draw(st.integers(3, 8)),
        w=draw(st.integers(1, 64)),
    )


def build_equation_9_weights(n_compressed: int, n_selection: int, nsa: NSAConfig, first: int) -> torch.Tensor:
    """p_slc[j] = sum over m < l'/d, n < l/d of p_cmp[(l'/d) j - m - n], as a matrix; both indices start at `first`."""
    weights = torch.zeros(n_compressed, n_selection)
    for j in range(first, n_selection + first):
        for m, n in itertools.product(range(nsa.l_sel // nsa.d), range(nsa.l // nsa.d)):
            i = nsa.l_sel // nsa.d * j - m - n
            if first <= i < n_compressed + first:
                weights[i - first, j - first] += 1
    return weights


@looped
@pytest.mark.parametrize(("d", "l_over_d", "l_sel_over_d"), BLOCK_RATIOS)
def test_equation_9_with_indices_from_1_counts_shared_tokens(d: int, l_over_d: int, l_sel_over_d: int) -> None:
    nsa = NSAConfig(d=d, l=d * l_over_d, l_sel=d * l_sel_over_d)
    for length in (nsa.l, nsa.l_sel, 3 * nsa.l_sel + nsa.l + d - 1, 7 * nsa.l_sel):
        sizes = geometry.num_compressed(length, nsa), geometry.num_selection(length, nsa)
        assert torch.equal(geometry.overlap(*sizes, nsa), build_equation_9_weights(*sizes, nsa, first=1))


@looped
@pytest.mark.parametrize(("d", "l_over_d", "l_sel_over_d"), BLOCK_RATIOS)
def test_equation_9_with_indices_from_0_ranks_a_block_of_the_past(d: int, l_over_d: int, l_sel_over_d: int) -> None:
    """Counterexample. With indices from 0, block j sums compressed blocks l'/d - 1 before those that overlap it, which is
    the same only where a selection block is one stride long.
    """
    nsa = NSAConfig(d=d, l=d * l_over_d, l_sel=d * l_sel_over_d)
    length = 6 * nsa.l_sel + nsa.l
    sizes = geometry.num_compressed(length, nsa), geometry.num_selection(length, nsa)
    shared, from_0 = geometry.overlap(*sizes, nsa), build_equation_9_weights(*sizes, nsa, first=0)
    shift = l_sel_over_d - 1
    assert torch.equal(from_0[: sizes[0] - shift], shared[shift:])
    assert torch.equal(from_0, shared) == (l_sel_over_d == 1)
    if l_sel_over_d >= l_over_d:
        # The last compression block inside selection block 1 distinguishes blocks 0 and 1.
        inside = 2 * l_sel_over_d - l_over_d
        assert shared[inside].argmax() == 1
        assert l_sel_over_d == 1 or from_0[inside, 2] > 0 == shared[inside, 2]


def test_the_default_weights_are_1_2_2_2_1() -> None:
    weights = geometry.overlap(40, 10, NSAConfig())
    assert weights[:4, 0].tolist() == [2, 2, 2, 1]
    for j in range(1, 9):
        assert weights[:, j].nonzero().flatten().tolist() == [4 * j - 1, 4 * j, 4 * j + 1, 4 * j + 2, 4 * j + 3]
        assert weights[4 * j - 1 : 4 * j + 4, j].tolist() == [1, 2, 2, 2, 1]


@given(nsa=random_geometries(), length=st.integers(1, 200))
def test_overlap_counts_shared_tokens_of_an_incomplete_last_block(nsa: NSAConfig, length: int) -> None:
    compressed = [set(range(s, s + nsa.l)) for s in range(0, length, nsa.d) if s + nsa.l <= length]
    selection = [set(range(s, s + nsa.l_sel)) for s in range(0, length, nsa.l_sel)]
    assert (len(compressed), len(selection)) == (geometry.num_compressed(length, nsa), geometry.num_selection(length, nsa))
    counted = torch.tensor([[len(c & s) / nsa.d for s in selection] for c in compressed]).reshape(-1, len(selection))
    assert torch.equal(geometry.overlap(len(compressed), len(selection), nsa), counted)


@given(nsa=random_geometries(), length=st.integers(1, 200))
def test_the_torch_backend_sums_importance_like_the_matrix(nsa: NSAConfig, length: int) -> None:
    n, blocks = geometry.num_compressed(length, nsa), geometry.num_selection(length, nsa)
    p = torch.rand(2, n, dtype=torch.float64)
    expected = p @ geometry.overlap(n, blocks, nsa, dtype=torch.float64)
    torch.testing.assert_close(
        torch_backend.compute_importance(p.unsqueeze(-2), blocks, nsa), expected, rtol=1e-13, atol=1e-13
    )


@given(nsa=random_geometries(), length=st.integers(1, 150))
def test_visible_candidate_and_forced_blocks_equal_counting(nsa: NSAConfig, length: int) -> None:
    t = torch.arange(length)
    blocks = geometry.num_selection(length, nsa)
    ends = [s + nsa.l - 1 for s in range(0, length, nsa.d) if s + nsa.l <= length]
    assert geometry.visible_compressed(t, nsa).tolist() == [sum(end <= i for end in ends) for i in range(length)]
    candidate, forced = geometry.candidate_blocks(t, blocks, nsa), geometry.forced_blocks(t, blocks, nsa)
    for i in range(length):
        own = i // nsa.l_sel
        assert candidate[i].nonzero().flatten().tolist() == list(range(own + 1))
        assert forced[i].nonzero().flatten().tolist() == sorted({0, max(own - 1, 0), own})


def count_selected_keys(length: int, nsa: NSAConfig) -> list[int]:
    """Count the selected keys at each position for random inputs."""
    generator = torch.Generator().manual_seed(length)
    q = torch.randn(1, length, 1, 2, generator=generator)
    k_cmp = torch.randn(1, geometry.num_compressed(length, nsa), 1, 2, generator=generator)
    _, lse = attention.compressed_attention(q, k_cmp, k_cmp, nsa)
    blocks = attention.select_blocks(q, k_cmp, lse, nsa)[0, :, 0]
    first = blocks * nsa.l_sel
    keys = (torch.minimum(first + nsa.l_sel - 1, torch.arange(length)[:, None]) - first + 1).where(blocks >= 0, 0)
    return keys.sum(-1).tolist()


def test_mean_selected_keys_at_2048_is_752_and_a_half() -> None:
    nsa = NSAConfig()
    counted = count_selected_keys(2048, nsa)
    assert sum(counted) / 2048 == 752.5 == geometry.mean_selected_keys(2048, nsa)
    assert max(counted) == 1024 and counted.count(1024) == 17


def test_721_is_a_forced_current_block_that_counts_only_once_it_is_complete() -> None:
    """A known faulty implementation: the query's own block is forced, but it is read only if it ends by t.

    The mean alone proves little: if another block took that place, it would be 752.5 by accident.
    """
    nsa = NSAConfig()
    place_lost, place_kept = [], []
    for t in range(2048):
        complete, own = (t + 1) // nsa.l_sel, t // nsa.l_sel
        others = min(complete, nsa.n_sel if complete > own else nsa.n_sel - 1)
        place_lost.append(others * nsa.l_sel)
        place_kept.append(min(complete, nsa.n_sel) * nsa.l_sel)
    assert sum(place_lost) / 2048 == 721.0
    assert sum(place_kept) / 2048 == 752.5
    assert place_kept != count_selected_keys(2048, nsa)


@given(nsa=random_geometries(), length=st.integers(1, 300))
def test_selected_keys_in_closed_form_equal_counting(nsa: NSAConfig, length: int) -> None:
    counted = count_selected_keys(length, nsa)
    assert counted == [geometry.selected_keys(t, nsa) for t in range(length)]
    assert geometry.mean_selected_keys(length, nsa) == pytest.approx(sum(counted) / length, rel=1e-12)


@looped
@pytest.mark.parametrize("nsa", GEOMETRIES.values(), ids=GEOMETRIES)
@pytest.mark.parametrize("length", [0, 1, 31, 32, 33, 47, 48, 63, 64, 1000, 65536])
def test_decode_reads_follow_the_formula(nsa: NSAConfig, length: int) -> None:
    causal = (length - 1) % nsa.l_sel + 1 + (min(nsa.n_sel, -(-length // nsa.l_sel)) - 1) * nsa.l_sel if length else 0
    assert geometry.decode_reads(length, nsa) == {
        "cmp": max((length - nsa.l) // nsa.d + 1, 0),
        "sel": min(causal, nsa.n_sel * nsa.l_sel),
        "win": min(nsa.w, length),
    }


def test_decode_reads_equal_the_paper() -> None:
    assert sum(geometry.decode_reads(65536, NSAConfig()).values()) == 4095 + 1024 + 512


@given(nsa=random_geometries(), length=st.integers(1, 150))
def test_reads_are_the_keys_that_change_an_output(nsa: NSAConfig, length: int) -> None:
    """A key is read if the gradient of the last output with respect to its value is not zero."""
    generator = torch.Generator().manual_seed(length)
    q = torch.randn(1, length, 1, 2, generator=generator, dtype=torch.float64)
    k, v_sel, v_win = (torch.randn(1, length, 1, 2, generator=generator, dtype=torch.float64) for _ in range(3))
    k_cmp, v_cmp = (
        torch.randn(1, geometry.num_compressed(length, nsa), 1, 2, generator=generator, dtype=torch.float64)
        for _ in range(2)
    )
    values = [v.requires_grad_() for v in (v_cmp, v_sel, v_win)]
    gates = torch.ones(1, length, 1, 3, dtype=torch.float64)
    out = attention.nsa_attention(q, k_cmp, v_cmp, k, v_sel, k, v_win, gates, nsa)
    grads = torch.autograd.grad(out[0, -1].sum(), values)
    counted = [int((g != 0).any(-1).sum()) for g in grads]
    assert dict(zip(("cmp", "sel", "win"), counted, strict=True)) == geometry.decode_reads(length, nsa)


@given(nsa=random_geometries(), length=st.integers(1, 200))
def test_mean_reads_are_the_mean_of_decode_reads(nsa: NSAConfig, length: int) -> None:
    every = [geometry.decode_reads(t + 1, nsa) for t in range(length)]
    mean = geometry.mean_reads(length, nsa)
    for branch in ("cmp", "sel", "win"):
        assert mean[branch] == pytest.approx(sum(reads[branch] for reads in every) / length, rel=1e-12)
    assert mean["dense"] == (length + 1) / 2


@given(nsa=random_geometries(), lengths=st.dictionaries(st.integers(0, 60), st.integers(0, 3), min_size=1))
def test_mean_reads_of_documents_are_the_mean_over_all_their_queries(nsa: NSAConfig, lengths: dict[int, int]) -> None:
    ends = [t + 1 for length, count in lengths.items() for _ in range(count) for t in range(length)]
    if not ends:
        return
    mean = geometry.mean_reads(lengths, nsa)
    for branch in ("cmp", "sel", "win"):
        assert mean[branch] == pytest.approx(sum(geometry.decode_reads(end, nsa)[branch] for end in ends) / len(ends))
    assert mean["dense"] == pytest.approx(sum(ends) / len(ends))


def test_counts_are_exact_beyond_float32() -> None:
    nsa, far = NSAConfig(), 2**33 + 5
    assert geometry.visible_compressed(torch.tensor(far), nsa).item() == (far + 1 - 32) // 16 + 1
    assert geometry.selected_keys(far, nsa) == 15 * 64 + far % 64 + 1
