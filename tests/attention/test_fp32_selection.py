"""Float32 scores select the same blocks as float64, or the selection is reported as uncertain."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from looping import looped
from torch import Tensor

from nsa_lab.attention import cached_attention as cached_module
from nsa_lab.attention import fp32_selection, geometry, reference
from nsa_lab.attention.cached_attention import cached_attention
from nsa_lab.attention.layer_cache import LayerCache
from nsa_lab.config import NSAConfig

# One key per selection block; and overlapping compression blocks, several per selection block, as in the presets.
NSAS = [NSAConfig(l=4, d=4, l_sel=4, n_sel=6, w=4), NSAConfig(l=8, d=4, l_sel=16, n_sel=5, w=8)]
LENGTH, G, h, D = 517, 2, 3, 16
SEEDS = range(12)
nsas = pytest.mark.parametrize("nsa", NSAS, ids=["no overlap", "overlapping"])


def draw_random_keys(draw: torch.Generator, n: int) -> Tensor:
    return torch.randn(1, n, G, D, generator=draw)


def draw_long_keys(draw: torch.Generator, n: int) -> Tensor:
    return 30 * draw_random_keys(draw, n)


def draw_nudged_keys(draw: torch.Generator, n: int) -> Tensor:
    """Equal keys except for a few ulps in some channels, which float32 products cannot resolve."""
    keys = draw_random_keys(draw, 1).expand(1, n, G, D)
    units = torch.randint(-2, 3, keys.shape, generator=draw) * (torch.rand(keys.shape, generator=draw) < 0.2)
    return keys * (1 + units * 2.0**-23)


def draw_equal_keys(draw: torch.Generator, n: int) -> Tensor:
    return draw_random_keys(draw, 1).expand(1, n, G, D).contiguous()


def draw_repeated_keys(draw: torch.Generator, n: int) -> Tensor:
    """Random keys with exact ties, as in a text with repetitions."""
    return draw_random_keys(draw, 5)[:, torch.randint(0, 5, (n,), generator=draw)]


def draw_cancelling_keys(draw: torch.Generator, n: int) -> Tensor:
    """Products that cancel: large terms with small sums."""
    half = 300 * torch.randn(1, n, G, D // 2, generator=draw)
    return torch.cat([half, -half], dim=-1) + 1e-2 * draw_random_keys(draw, n)


KEY_DRAWERS = [
    draw_random_keys,
    draw_long_keys,
    draw_nudged_keys,
    draw_equal_keys,
    draw_repeated_keys,
    draw_cancelling_keys,
]


def draw_query_and_keys(keys: object, nsa: NSAConfig, seed: int, S: int = 1) -> tuple[Tensor, Tensor]:
    """Return q [1, S, G*h, D] and compressed keys [1, n, G, D], float32, for `LENGTH` + S tokens."""
    draw = torch.Generator().manual_seed(seed)
    q = torch.randn(1, S, G * h, D, generator=draw)
    if keys is draw_cancelling_keys:
        q[..., D // 2 :] = q[..., : D // 2]
    return q, keys(draw, geometry.num_compressed(LENGTH + S, nsa))  # pyright: ignore[reportCallIssue]


def compute_importance(q: Tensor, k: Tensor, nsa: NSAConfig, score_dtype: torch.dtype) -> Tensor:
    """Return importances in float64 [1, S, G, blocks] from scores in `score_dtype`, with dense matrices only."""
    S = q.shape[1]
    t = geometry.positions(LENGTH, LENGTH + S)
    s = torch.einsum("bsghd,bngd->bsghn", q.unflatten(2, (G, h)).to(score_dtype), k.to(score_dtype)).double() * D**-0.5
    p = s.masked_fill(~geometry.sees_compressed(t, k.shape[1], nsa)[None, :, None, None], float("-inf")).softmax(-1)
    overlap = geometry.overlap(k.shape[1], geometry.num_selection(LENGTH + S, nsa), nsa, dtype=torch.float64)
    return p.sum(3) @ overlap


def get_selected_blocks(
    q: Tensor, k: Tensor, nsa: NSAConfig, monkeypatch: pytest.MonkeyPatch, **indexer: object
) -> tuple[Tensor, int]:
    """Return the blocks that `cached_attention` selects, and how often it computed probabilities in float64."""
    selected, is_float64, compute_probabilities = [], [], cached_module._compute_probabilities
    with monkeypatch.context() as patch:
        patch.setattr(fp32_selection, "MIN_KEYS", indexer.pop("min_keys", 1))
        patch.setattr(
            cached_module,
            "_attend_selected_by_gather",
            lambda q, k, v, blocks, *_: (selected.append(blocks), torch.zeros_like(q))[1],
        )
        patch.setattr(
            cached_module,
            "_compute_probabilities",
            lambda *args: (is_float64.append(args[-1] == torch.float64), compute_probabilities(*args))[1],
        )
        raw = torch.zeros(len(q), LENGTH + q.shape[1], G, D)
        cache = LayerCache(k, torch.zeros_like(k), raw, raw, raw, raw, indexer.pop("k_index", None))  # pyright: ignore[reportArgumentType]
        lengths = torch.full((len(q),), LENGTH, dtype=torch.int32)
        cached_attention(q, torch.ones(*q.shape[:3], 3), cache, lengths, nsa, **indexer)  # pyright: ignore[reportArgumentType]
    return selected[0], sum(is_float64)


@looped
@nsas
@pytest.mark.parametrize("S", [1, 3])
@pytest.mark.parametrize("keys", KEY_DRAWERS)
def test_selection_equals_float64(keys: object, S: int, nsa: NSAConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in SEEDS:
        q, k = draw_query_and_keys(keys, nsa, seed, S)
        blocks, _ = get_selected_blocks(q, k, nsa, monkeypatch)
        wide = cached_module._compute_probabilities(q, k, LENGTH, nsa, torch.float64)
        expected = reference.select_by_importance(
            cached_module._compute_importance(wide, LENGTH, nsa, nsa).float(), nsa, LENGTH
        )
        assert torch.equal(blocks, expected)


@looped
@pytest.mark.parametrize("min_keys", [1, 200])
@pytest.mark.parametrize("keys", [draw_random_keys, draw_nudged_keys])
def test_indexer_selection_equals_float64(keys: object, min_keys: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compressed branch has other queries and keys, and fewer than 200, so float32 is not tried for them."""
    nsa = NSAS[1]
    choice = nsa.model_copy(update={"l": 4, "d": 2})
    for seed in SEEDS:
        q, k = draw_query_and_keys(draw_random_keys, nsa, seed)
        index_q, k_index = draw_query_and_keys(keys, choice, seed + 1)
        index_q = index_q[:, :, ::h]
        indexer = {"k_index": k_index, "index_q": index_q, "selection_nsa": choice, "min_keys": min_keys}
        wide = cached_module._compute_probabilities(index_q, k_index, LENGTH, choice, torch.float64)
        # The compressed branch determines the number of selection blocks.
        expected = reference.select_by_importance(
            cached_module._compute_importance(wide, LENGTH, nsa, choice).float(), nsa, LENGTH
        )
        assert torch.equal(get_selected_blocks(q, k, nsa, monkeypatch, **indexer)[0], expected)


@nsas
def test_float32_alone_selects_other_blocks(nsa: NSAConfig) -> None:
    """Without the error bound, near-ties are resolved differently, so the tests above can fail."""
    n_different = 0
    for seed in SEEDS:
        q, k = draw_query_and_keys(draw_nudged_keys, nsa, seed)
        float32, float64 = (compute_importance(q, k, nsa, dtype) for dtype in (torch.float32, torch.float64))
        n_different += not torch.equal(
            reference.select_by_importance(float32.float(), nsa, LENGTH),
            reference.select_by_importance(float64.float(), nsa, LENGTH),
        )
    assert n_different


@looped
@nsas
@pytest.mark.parametrize("keys", KEY_DRAWERS)
def test_importance_errors_are_within_the_bound(keys: object, nsa: NSAConfig) -> None:
    """The ratio of two importances errs by the factor, each of them by its square root."""
    max_error = 0.0
    for seed in SEEDS:
        q, k = draw_query_and_keys(keys, nsa, seed, 3)
        bound = fp32_selection.compute_error_factor(q, k).log() / 2
        float32, float64 = (compute_importance(q, k, nsa, dtype) for dtype in (torch.float32, torch.float64))
        is_visible = float64 > fp32_selection.MIN_IMPORTANCE
        error = torch.where(is_visible, float32 / float64, 1.0).log().abs() / bound.unsqueeze(-1)
        max_error = max(max_error, error.max().item())
    assert max_error < 1.0
    # Equal keys have equal products if the library multiplies each in the same way.
    assert max_error > 0.0 or keys is draw_equal_keys


@nsas
def test_float64_is_computed_only_where_it_decides(nsa: NSAConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    q, tied = draw_query_and_keys(draw_equal_keys, nsa, 0)
    clear = torch.linspace(-4, 4, tied.shape[1])[None, :, None, None] * torch.sign(q.unflatten(2, (G, h))[:, :, :, 0])
    assert get_selected_blocks(q, clear.contiguous(), nsa, monkeypatch)[1] == 0
    assert get_selected_blocks(q, tied, nsa, monkeypatch)[1] == 1
    # In a batch of three sequences, only the uncertain one is repeated.
    together, n_float64 = get_selected_blocks(q.expand(3, -1, -1, -1), torch.cat([clear, tied, clear]), nsa, monkeypatch)
    assert n_float64 == 1
    for row, k in zip(together.split(1), (clear, tied, clear), strict=True):
        assert torch.equal(row, get_selected_blocks(q, k, nsa, monkeypatch)[0])


@given(
    scores=st.lists(
        st.sampled_from([0.0, 1e-40, 1e-31, 0.5, 0.5 + 2**-24, 0.5 + 2**-20, 1.0, 3.0]), min_size=1, max_size=14
    ),
    off=st.lists(st.floats(-1, 1), min_size=14, max_size=14),
    doubt=st.sampled_from([1 + fp32_selection.RANKING_ERROR, 1 + 2**-18, 1.5]),
)
def test_certain_selections_hold_for_any_error_within_the_bound(
    scores: list[float], off: list[float], doubt: float
) -> None:
    nsa = NSAS[0]
    ours = torch.tensor(scores, dtype=torch.float64)[None, None, None]
    blocks, clear = fp32_selection.select_certain_blocks(
        ours, torch.full((1, 1, 1), doubt), nsa, nsa.l_sel * len(scores) - 1
    )
    # Each importance may err by the square root of the factor, without the part for rounding to float32.
    log_bound = 0.5 * torch.tensor(doubt / (1 + fp32_selection.RANKING_ERROR), dtype=torch.float64).log()
    truth = ours * (log_bound * torch.tensor(off[: len(scores)], dtype=torch.float64)).exp()
    if clear.all():
        assert torch.equal(blocks, reference.select_by_importance(truth.float(), nsa, nsa.l_sel * len(scores) - 1))
    assert len(scores) > nsa.n_sel or clear.all()


@looped
@nsas
@pytest.mark.parametrize("S", [1, 3])
def test_certain_selections_equal_the_definition(S: int, nsa: NSAConfig) -> None:
    """From the first token on, with fewer candidates than n_sel."""
    draw = torch.Generator().manual_seed(S)
    for first in range(9 * nsa.l_sel):
        blocks = geometry.num_selection(first + S, nsa)
        importance = 1 + torch.rand(2, S, G, blocks, generator=draw, dtype=torch.float64)
        found, clear = fp32_selection.select_certain_blocks(
            importance.clone(), fp32_selection.FP64_ERROR_FACTOR, nsa, first
        )
        assert clear.all() and torch.equal(found, reference.select_by_importance(importance.float(), nsa, first))


@looped
@nsas
@pytest.mark.parametrize("apart", [2.0**-27, 2.0**-25, 2.0**-24, 2.0**-23])
def test_importances_equal_in_float32_are_never_certain(apart: float, nsa: NSAConfig) -> None:
    """The definition ranks in float32 and selects the lower of two blocks that are equal there."""
    importance = torch.ones(1, 1, 64, 30, dtype=torch.float64)
    lower = 1 + torch.rand(64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    importance[0, 0, :, 1 : nsa.n_sel - 3] = 9.0  # with the three forced blocks, all selected blocks except one
    importance[0, 0, :, 11], importance[0, 0, :, 12] = lower, lower * (1 + apart)
    first = 30 * nsa.l_sel - 1
    found, clear = fp32_selection.select_certain_blocks(importance.clone(), fp32_selection.FP64_ERROR_FACTOR, nsa, first)
    same = (found == reference.select_by_importance(importance.float(), nsa, first)).all(-1)
    assert (same | ~clear).all()
    assert same.all() == bool((importance.float()[..., 11] != importance.float()[..., 12]).all())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nonfinite_values_are_never_certain(bad: float) -> None:
    q, k = draw_query_and_keys(draw_random_keys, NSAS[0], 0)
    k[0, 3, 1, 2] = bad
    doubt = fp32_selection.compute_error_factor(q, k)
    _, clear = fp32_selection.select_certain_blocks(
        compute_importance(q, k, NSAS[0], torch.float32), doubt, NSAS[0], LENGTH
    )
    assert clear.flatten().tolist() == [True, False]


@pytest.fixture
def full_precision() -> Iterator[None]:
    yield
    torch.set_float32_matmul_precision("highest")


def test_float32_is_tried_only_in_full_precision_with_many_keys(full_precision: None) -> None:
    q = torch.ones(1)
    assert fp32_selection.can_score_in_fp32(q, fp32_selection.MIN_KEYS) and not fp32_selection.can_score_in_fp32(
        q, fp32_selection.MIN_KEYS - 1
    )
    assert not any(
        fp32_selection.can_score_in_fp32(q.to(dtype), fp32_selection.MIN_KEYS) for dtype in (torch.float64, torch.bfloat16)
    )
    torch.set_float32_matmul_precision("medium")
    assert not fp32_selection.can_score_in_fp32(q, fp32_selection.MIN_KEYS)
