"""New tokens in one launch, and the blocks that they complete in one: each number of the cache is the one that plain loops
write, or still what it was."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from nsa_lab.attention import kernels
from nsa_lab.attention.compression import BlockPool
from nsa_lab.attention.layer_cache import CacheWriteBuffers
from nsa_lab.config import NSAConfig

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
THETA = 100.0


def rotate(row: Tensor, position: int, R: int) -> Tensor:
    """The pairs (i, i + R/2) of a row of float64, turned one by one."""
    out = row.clone()
    for i in range(R // 2):
        angle = position * THETA ** (-2 * i / R)
        out[i] = row[i] * math.cos(angle) - row[i + R // 2] * math.sin(angle)
        out[i + R // 2] = row[i + R // 2] * math.cos(angle) + row[i] * math.sin(angle)
    return out


# Lengths, S, H, G, d_k, d_v, R, and slots of the raw ring, of the window's, and rows of all tokens.
CASES = [
    ((0, 5, 22), 1, 6, 2, 32, 16, 32, 7, 11, 40),
    ((37, 3), 5, 3, 1, 48, 80, 16, 9, 5, 39),  # padding past the capacity, and a ring as long as the step
    ((12,), 3, 4, 4, 16, 16, 0, 5, 64, 15),  # nothing is turned
    ((8, 9, 10, 30), 2, 5, 1, 96, 32, 96, 33, 8, 31),
]


def allocate(*shape: int, dtype: torch.dtype) -> Tensor:
    """NaN, and in every sequence a row more than there are: what lies behind a sequence is not written either."""
    return torch.full((shape[0], shape[1] + 1, *shape[2:]), float("nan"), device=DEVICE, dtype=dtype)


def interleave_nan(table: Tensor) -> Tensor:
    """The same, with a NaN behind every number: an indexer narrower than a head takes every so manieth of its angles."""
    return torch.stack([table, torch.full_like(table, float("nan"))], -1).flatten(1)[:, ::2]


def assert_close(found: Tensor, true: Tensor, dtype: torch.dtype) -> None:
    off = 2e-6 if dtype == torch.float32 else 4e-3
    torch.testing.assert_close(found.double().cpu(), true, rtol=off, atol=off, equal_nan=True)


@pytest.mark.parametrize("mixed", [False, True], ids=["as they come", "mixed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("case", CASES)
def test_what_is_kept_is_what_loops_keep(case: tuple, dtype: torch.dtype, mixed: bool) -> None:
    lengths, S, H, G, Dk, Dv, R, raw_slots, slots, capacity = case
    draw, B, past_slots = torch.Generator().manual_seed(S), len(lengths), S + 2
    # As a projection gives them: neighbours in one row.
    given = torch.randn(B, S, (H + 3 * G) * Dk + 3 * G * Dv + 3, generator=draw).to(DEVICE, dtype)
    roped, values, _ = given.split([(H + 3 * G) * Dk, 3 * G * Dv, 3], dim=-1)
    roped, values = roped.unflatten(-1, (-1, Dk)), values.unflatten(-1, (-1, Dv))
    kept = [allocate(B, n, G, width, dtype=dtype) for n in (raw_slots, capacity, slots) for width in (Dk, Dv)]
    before = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    rates = THETA ** (-torch.arange(0, R, 2, device=DEVICE).double() / max(R, 1))
    angles = torch.arange(capacity, device=DEVICE).double()[:, None] * rates
    rotary = interleave_nan(angles.cos().float()), interleave_nan(angles.sin().float())
    past = torch.full((B, past_slots, 3 * G, Dk), float("nan"), device=DEVICE, dtype=dtype)
    for b, length in enumerate(lengths):
        if length:  # of a sequence that begins nothing is read
            past[b, (length - 1) % past_slots] = torch.randn(3 * G, Dk, generator=draw).to(past)
    expected_past, mix = past.double().cpu(), torch.randn(2, 3 * G, Dk, generator=draw).to(DEVICE, dtype)

    places = CacheWriteBuffers(*(x[:, :-1] for x in kept))
    q = kernels.rotate_and_append(roped, values, rotary, before, places, **({"past": past, "mix": mix} if mixed else {}))

    expected = [torch.full(x.shape, float("nan"), dtype=torch.float64) for x in kept]
    turned_q = torch.empty(B, S, H, Dk, dtype=torch.float64)
    wide_k, wide_v, (this, late) = roped.double().cpu(), values.double().cpu(), mix.double().cpu()
    for b, length in enumerate(lengths):
        for s in range(S):
            p = length + s
            angle = min(p, capacity - 1)  # past the capacity is padding
            for head in range(H):
                turned_q[b, s, head] = rotate(wide_k[b, s, head], angle, R)
            came = wide_k[b, s, H:]
            own = came
            if mixed:
                own = came * this
                if p:
                    own = own + expected_past[b, (p - 1) % past_slots] * late
                expected_past[b, p % past_slots] = came
            for branch, place in enumerate((p % raw_slots, p, p % slots)):
                for g in range(G):
                    if branch == 1 and p >= capacity:
                        continue
                    expected[2 * branch][b, place, g] = rotate(own[branch * G + g], angle, R)
                    expected[2 * branch + 1][b, place, g] = wide_v[b, s, branch * G + g]
    assert_close(q, turned_q, dtype)
    for found, true in zip([*kept, past], [*expected, expected_past], strict=True):
        assert_close(found, true, dtype)


@pytest.mark.parametrize("mixed", [False, True], ids=["as they come", "mixed"])
def test_an_indexer_keeps_keys_alone(mixed: bool) -> None:
    S, G, D, slots, lengths = 4, 2, 48, 9, (0, 7)
    draw = torch.Generator().manual_seed(3)
    roped = torch.randn(2, S, 2 * G, D, generator=draw).to(DEVICE)
    raw, before = allocate(2, slots, G, D, dtype=torch.float32), torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    past, mix = torch.randn(2, S + 1, G, D, generator=draw).to(DEVICE), torch.randn(2, G, D, generator=draw).to(DEVICE)
    rotary = torch.ones(20, 0, device=DEVICE), torch.ones(20, 0, device=DEVICE)
    came_before = past[1, 6 % (S + 1)].clone()
    mixing = {"past": past, "mix": mix} if mixed else {}
    q = kernels.rotate_and_append(roped, None, rotary, before, CacheWriteBuffers(k_raw=raw[:, :-1]), **mixing)
    assert torch.equal(q, roped[:, :, :G])
    keys = roped[:, :, G:]
    if mixed:
        late = torch.cat([torch.stack([torch.zeros_like(came_before), came_before])[:, None], keys[:, :-1]], dim=1)
        keys = keys * mix[0] + late * mix[1]
    for b, length in enumerate(lengths):
        held = [(length + s) % slots for s in range(S)]
        torch.testing.assert_close(raw[b, held], keys[b])
        assert raw[b, [n for n in range(slots + 1) if n not in held]].isnan().all()


# Lengths, S, l, d, d_k, d_v, rows of blocks.
BLOCKS = [
    ((0, 3, 30, 31), 1, 32, 16, 64, 48, 4),
    ((15, 47, 33, 2), 17, 32, 16, 16, 32, 3),  # two blocks at once, and more than there is room for
    ((5, 0, 7), 5, 2, 2, 80, 16, 9),
    ((9, 4, 5), 1, 6, 2, 32, 96, 9),
]


@pytest.mark.parametrize("phi", ["avg", "pool"])
@pytest.mark.parametrize("values", [True, False], ids=["keys and values", "keys alone"])
@pytest.mark.parametrize("case", BLOCKS)
def test_blocks_are_those_of_their_tokens(case: tuple, phi: str, values: bool) -> None:
    lengths, S, l, d, Dk, Dv, N = case
    nsa = NSAConfig(l=l, d=d, l_sel=l * 2, phi=phi)
    draw, B, G, slots = torch.Generator().manual_seed(l), len(lengths), 2, l - 1 + S + 2
    before = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    widths = (Dk, Dv) if values else (Dk,)
    raw = [torch.full((B, slots, G, width), float("nan"), device=DEVICE) for width in widths]
    blocks = [allocate(B, N, G, width, dtype=torch.float32) for width in widths]
    pools = [BlockPool(l, width).to(DEVICE) for width in widths]
    with torch.no_grad():
        for pool in pools:
            pool.score.copy_(torch.randn(pool.score.shape, generator=draw) * 0.3)
            pool.place.copy_(torch.randn(pool.place.shape, generator=draw))
    for b, length in enumerate(lengths):
        for p in range(max(length + S - slots, 0), length + S):
            for x in raw:
                x[b, p % slots] = torch.randn(G, x.shape[3], generator=draw).to(DEVICE)
    weights = [(pool.score, pool.place) if phi == "pool" else None for pool in pools]
    if not values:
        raw, blocks, weights = [*raw, None], [*blocks, None], [*weights, None]
    kernels.update_compressed(
        *raw, *(x if x is None else x[:, :-1] for x in blocks), before, S, nsa, k_pool=weights[0], v_pool=weights[1]
    )
    for x, into, pool in zip(raw, blocks, pools, strict=False):
        if x is None or into is None:
            continue
        expected = torch.full(into.shape, float("nan"), dtype=torch.float64)
        for b, length in enumerate(lengths):
            for i in range(N):
                if length < i * d + l <= length + S:
                    for g in range(G):
                        tokens = torch.stack([x[b, p % slots, g].double().cpu() for p in range(i * d, i * d + l)])
                        share = torch.full_like(tokens, 1 / l)
                        if phi == "pool":
                            score, place = pool.score.double().cpu(), pool.place.double().cpu()
                            share = torch.stack([score @ token for token in tokens]).add(place.T).softmax(0)
                        expected[b, i, g] = (share * tokens).sum(0)
        assert_close(into, expected, torch.float32)


def test_widths_that_kernels_do_not_take_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="append, backend = 'triton': the kernels take head widths"):
        kernels.rotate_and_append(
            torch.zeros(1, 1, 5, 20), torch.zeros(1, 1, 3, 16), (), torch.zeros(1), CacheWriteBuffers()
        )  # pyright: ignore[reportArgumentType]
