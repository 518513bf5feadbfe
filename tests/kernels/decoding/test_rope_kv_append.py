"""RoPE and cache writes of new tokens, and compression of the blocks that they complete, against plain loops.

Every element of the cache has the value of the loops or is unchanged.
"""

from __future__ import annotations

import math

import pytest
import torch
from looping import looped
from torch import Tensor

from nsa_lab.attention import kernels
from nsa_lab.attention.compression import BlockPool, compress
from nsa_lab.attention.key_storage import decode_keys, encode_keys, get_row_format
from nsa_lab.attention.layer_cache import CacheWriteBuffers
from nsa_lab.config import NSAConfig
from nsa_lab.model.layers import RMSNorm
from nsa_lab.model.layers import rotate as rotate_heads

# The interpreter takes a tenth of a second per case.
pytestmark = pytest.mark.slow

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
THETA = 100.0


def rotate(row: Tensor, position: int, R: int) -> Tensor:
    """Rotate the pairs (i, i + R/2) of a float64 row one by one."""
    out = row.clone()
    for i in range(R // 2):
        angle = position * THETA ** (-2 * i / R)
        out[i] = row[i] * math.cos(angle) - row[i + R // 2] * math.sin(angle)
        out[i + R // 2] = row[i + R // 2] * math.cos(angle) + row[i] * math.sin(angle)
    return out


# Lengths, S, H, G, d_k, d_v, R, slots of the raw ring, slots of the window ring, cache capacity.
CASES = [
    ((0, 5, 22), 1, 6, 2, 32, 16, 32, 7, 11, 40),
    ((37, 3), 5, 3, 1, 48, 80, 16, 9, 5, 39),  # padding past the capacity; a ring as long as the step
    ((12,), 3, 4, 4, 16, 16, 0, 5, 64, 15),  # no rotation
    ((8, 9, 10, 30), 2, 5, 1, 96, 32, 96, 33, 8, 31),
]


def allocate(*shape: int, dtype: torch.dtype) -> Tensor:
    """Allocate NaN with one spare row per sequence, to detect writes past the end of a sequence."""
    return torch.full((shape[0], shape[1] + 1, *shape[2:]), float("nan"), device=DEVICE, dtype=dtype)


def interleave_nan(table: Tensor) -> Tensor:
    """Return a strided view of the table with a NaN after every element: an indexer narrower than a head skips angles."""
    return torch.stack([table, torch.full_like(table, float("nan"))], -1).flatten(1)[:, ::2]


def assert_close(actual: Tensor, expected_value: Tensor, dtype: torch.dtype) -> None:
    off = 2e-6 if dtype == torch.float32 else 4e-3
    torch.testing.assert_close(actual.double().cpu(), expected_value, rtol=off, atol=off, equal_nan=True)


@looped
@pytest.mark.parametrize("convolved", [False, True], ids=["plain", "convolved"])
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float16, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("case", CASES)
def test_cache_equals_loops(case: tuple, dtype: torch.dtype, convolved: bool) -> None:
    lengths, S, H, G, Dk, Dv, R, raw_slots, slots, capacity = case
    generator, B, conv_slots = torch.Generator().manual_seed(S), len(lengths), S + 2
    # Views of one row, as the output of a projection.
    projection = torch.randn(B, S, (H + 3 * G) * Dk + 3 * G * Dv + 3, generator=generator).to(DEVICE, dtype)
    q_and_k, values, _ = projection.split([(H + 3 * G) * Dk, 3 * G * Dv, 3], dim=-1)
    q_and_k, values = q_and_k.unflatten(-1, (-1, Dk)), values.unflatten(-1, (-1, Dv))
    buffers = [allocate(B, n, G, width, dtype=dtype) for n in (raw_slots, capacity, slots) for width in (Dk, Dv)]
    lengths_tensor = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    rates = THETA ** (-torch.arange(0, R, 2, device=DEVICE).double() / max(R, 1))
    angles = torch.arange(capacity, device=DEVICE).double()[:, None] * rates
    rotary = interleave_nan(angles.cos().float()), interleave_nan(angles.sin().float())
    k_before_conv = torch.full((B, conv_slots, 3 * G, Dk), float("nan"), device=DEVICE, dtype=dtype)
    for b, length in enumerate(lengths):
        if length:  # nothing is read at the start of a sequence
            k_before_conv[b, (length - 1) % conv_slots] = torch.randn(3 * G, Dk, generator=generator).to(k_before_conv)
    expected_k_before_conv, conv_weight = (
        k_before_conv.double().cpu(),
        torch.randn(2, 3 * G, Dk, generator=generator).to(DEVICE, dtype),
    )

    write_buffers = CacheWriteBuffers(*(x[:, :-1] for x in buffers))
    q = kernels.rotate_and_append(
        q_and_k,
        values,
        rotary,
        lengths_tensor,
        write_buffers,
        **({"k_before_conv": k_before_conv, "conv_weight": conv_weight} if convolved else {}),
    )

    expected = [torch.full(x.shape, float("nan"), dtype=torch.float64) for x in buffers]
    expected_q = torch.empty(B, S, H, Dk, dtype=torch.float64)
    exact_qk, exact_v, (own_weight, previous_weight) = (
        q_and_k.double().cpu(),
        values.double().cpu(),
        conv_weight.double().cpu(),
    )
    for b, length in enumerate(lengths):
        for s in range(S):
            p = length + s
            angle = min(p, capacity - 1)  # tokens past the capacity are padding
            for head in range(H):
                expected_q[b, s, head] = rotate(exact_qk[b, s, head], angle, R)
            raw_k = exact_qk[b, s, H:]
            k = raw_k
            if convolved:
                k = raw_k * own_weight
                if p:
                    k = k + expected_k_before_conv[b, (p - 1) % conv_slots] * previous_weight
                expected_k_before_conv[b, p % conv_slots] = raw_k
            for branch, slot in enumerate((p % raw_slots, p, p % slots)):
                for g in range(G):
                    if branch == 1 and p >= capacity:
                        continue
                    expected[2 * branch][b, slot, g] = rotate(k[branch * G + g], angle, R)
                    expected[2 * branch + 1][b, slot, g] = exact_v[b, s, branch * G + g]
    assert_close(q, expected_q, dtype)
    for actual, expected_value in zip([*buffers, k_before_conv], [*expected, expected_k_before_conv], strict=True):
        assert_close(actual, expected_value, dtype)


@looped
@pytest.mark.parametrize("convolved", [False, True])
@pytest.mark.parametrize("rotates", [False, True])
@pytest.mark.parametrize(("S", "l"), [(4, 1), (4, 3), (1, 4), (7, 2)])
def test_index_tokens_equal_loops(S: int, l: int, rotates: bool, convolved: bool) -> None:
    """Queries, and the rings of tokens and of keys before the convolution; other slots are unchanged."""
    H, G, D, R, lengths = 3, 2, 48, 32, (0, 8, 13)
    slots, conv_slots, B = l - 1 + S, S + 1, len(lengths)
    generator = torch.Generator().manual_seed(S)
    qk = torch.randn(B, S, H + G, D + 2, generator=generator).to(DEVICE)[..., :D]
    ring, history = (torch.randn(B, n, G, D, generator=generator).to(DEVICE) for n in (slots, conv_slots))
    history[0] = float("nan")  # a sequence without tokens has no previous key
    keys, weight = torch.zeros(B, 30, G, D, device=DEVICE), torch.randn(2, G, D, generator=generator).to(DEVICE)
    angles = torch.arange(40).double()[:, None] * THETA ** (-torch.arange(0, R, 2).double() / R)
    rotary = tuple(interleave_nan(x.float().to(DEVICE)) for x in (angles.cos(), angles.sin()))
    expected_ring, expected_history = ring.double().cpu(), history.double().cpu()
    q = kernels.append_index(
        qk, rotary, torch.tensor(lengths, dtype=torch.int32, device=DEVICE), ring, keys, NSAConfig(l=l, d=l, l_sel=12 * l),
        **({"k_before_conv": history, "conv_weight": weight} if convolved else {}), rotates_tokens=rotates,
    )  # fmt: skip
    exact, (own_weight, previous_weight) = qk.double().cpu(), weight.double().cpu()
    for b, length in enumerate(lengths):
        for s in range(S):
            p = length + s
            expected_q = torch.stack([rotate(row, p, R) for row in exact[b, s, :H]])
            assert_close(q[b, s], expected_q, torch.float32)
            k = exact[b, s, H:]
            if convolved:
                previous = expected_history[b, (p - 1) % conv_slots] * previous_weight if p else 0
                expected_history[b, p % conv_slots] = k
                k = k * own_weight + previous
            expected_ring[b, p % slots] = torch.stack([rotate(row, p, R) for row in k]) if rotates else k
    assert_close(ring, expected_ring, torch.float32)
    assert_close(history, expected_history, torch.float32)


# Lengths, S, l, d, d_k, d_v, rows of blocks.
BLOCKS = [
    ((0, 3, 30, 31), 1, 32, 16, 64, 48, 4),
    ((15, 47, 33, 2), 17, 32, 16, 16, 32, 3),  # two blocks at once, and more than the capacity
    ((5, 0, 7), 5, 2, 2, 80, 16, 9),
    ((9, 4, 5), 1, 6, 2, 32, 96, 9),
]


@looped
@pytest.mark.parametrize("phi", ["avg", "pool"])
@pytest.mark.parametrize("values", [True, False], ids=["keys and values", "only keys"])
@pytest.mark.parametrize("case", BLOCKS)
def test_compressed_blocks_equal_loops(case: tuple, phi: str, values: bool) -> None:
    lengths, S, l, d, Dk, Dv, N = case
    nsa = NSAConfig(l=l, d=d, l_sel=l * 2, phi=phi)
    generator, B, G, slots = torch.Generator().manual_seed(l), len(lengths), 2, l - 1 + S + 2
    lengths_tensor = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    widths = (Dk, Dv) if values else (Dk,)
    raw = [torch.full((B, slots, G, width), float("nan"), device=DEVICE) for width in widths]
    blocks = [allocate(B, N, G, width, dtype=torch.float32) for width in widths]
    pools = [BlockPool(l, width).to(DEVICE) for width in widths]
    with torch.no_grad():
        for pool in pools:
            pool.score.copy_(torch.randn(pool.score.shape, generator=generator) * 0.3)
            pool.place.copy_(torch.randn(pool.place.shape, generator=generator))
    for b, length in enumerate(lengths):
        for p in range(max(length + S - slots, 0), length + S):
            for x in raw:
                x[b, p % slots] = torch.randn(G, x.shape[3], generator=generator).to(DEVICE)
    weights = [(pool.score, pool.place) if phi == "pool" else None for pool in pools]
    if not values:
        raw, blocks, weights = [*raw, None], [*blocks, None], [*weights, None]
    kernels.update_compressed(
        *raw, *(x if x is None else x[:, :-1] for x in blocks), lengths_tensor, S, nsa, k_pool=weights[0], v_pool=weights[1]
    )
    for x, target, pool in zip(raw, blocks, pools, strict=False):
        if x is None or target is None:
            continue
        expected = torch.full(target.shape, float("nan"), dtype=torch.float64)
        for b, length in enumerate(lengths):
            for i in range(N):
                if length < i * d + l <= length + S:
                    for g in range(G):
                        tokens = torch.stack([x[b, p % slots, g].double().cpu() for p in range(i * d, i * d + l)])
                        token_weights = torch.full_like(tokens, 1 / l)
                        if phi == "pool":
                            score, position_bias = pool.score.double().cpu(), pool.place.double().cpu()
                            token_weights = torch.stack([score @ token for token in tokens]).add(position_bias.T).softmax(0)
                        expected[b, i, g] = (token_weights * tokens).sum(0)
        assert_close(target, expected, torch.float32)


def test_unsupported_width_raises() -> None:
    with pytest.raises(NotImplementedError, match="rotate_and_append, backend = 'triton': the kernels take head widths"):
        kernels.rotate_and_append(
            torch.zeros(1, 1, 5, 20), torch.zeros(1, 1, 3, 16), (), torch.zeros(1), CacheWriteBuffers()
        )  # pyright: ignore[reportArgumentType]


INDEX_STEPS = [(), ("rotate",), ("norm", "rotate"), ("rotate", "norm"), ("norm",)]


@looped
@pytest.mark.parametrize("index_dtype", ["bf16", "fp8", "mxfp4"])
@pytest.mark.parametrize(
    ("steps", "dtype"),
    [
        (steps, dtype) if dtype == torch.float32 else pytest.param(steps, dtype, marks=pytest.mark.nightly)
        for dtype in (torch.float32, torch.float16)
        for steps in INDEX_STEPS
    ],
)
def test_index_keys_equal_those_of_torch(index_dtype: str, steps: tuple[str, ...], dtype: torch.dtype) -> None:
    """Pooled, normalized, rotated and stored: equal, but for values that rounding moves over a midpoint of two codes."""
    S, G, capacity, raw_slots = 5, 2, 40, 20
    n_moved, n_values = 0, 0
    for l, D, R in ((1, 64, 32), (4, 96, 96), (3, 16, 16)):
        if index_dtype == "mxfp4" and D % 32 and D > 32:
            continue
        generator, nsa = torch.Generator().manual_seed(l), NSAConfig(l=l, d=l, l_sel=12 * l)
        lengths = (0, 7, 21)
        texts = [torch.randn(length + S, G, D, generator=generator).to(DEVICE, dtype) for length in lengths]
        if l == 1:  # many values are midpoints
            texts = [(16 * text).round() / 16 for text in texts]
        pool = BlockPool(l, D).to(DEVICE, dtype)
        norm = RMSNorm(D, 1e-5).to(DEVICE, dtype)
        with torch.no_grad():
            for weight in (*pool.parameters(), norm.weight):
                weight.add_(0.5 * torch.randn(weight.shape, generator=generator).to(weight))
        angles = torch.arange(capacity, device=DEVICE).double()[:, None] * THETA ** (
            -torch.arange(0, R, 2, device=DEVICE).double() / R
        )
        rotary = interleave_nan(angles.cos().float()), interleave_nan(angles.sin().float())
        ring = torch.full((len(lengths), raw_slots, G, D), float("nan"), device=DEVICE, dtype=dtype)
        for row, text, length in zip(ring, texts, lengths, strict=True):
            for position in range(max(0, len(text) - raw_slots), length):
                row[position % raw_slots] = text[position]
        qk = torch.stack([text[-S:] for text in texts])  # no queries
        n_blocks = max(len(text) // l for text in texts)
        width, stored_dtype = get_row_format(index_dtype, D, dtype)
        keys = torch.zeros(len(lengths), n_blocks + 1, G, width, device=DEVICE, dtype=torch.float32)
        keys = keys.to(stored_dtype)
        kernels.append_index(
            qk, rotary, torch.tensor(lengths, dtype=torch.int32, device=DEVICE), ring, keys, nsa,
            pool=None if l == 1 else (pool.score, pool.place),
            norm=(norm.weight, norm.eps) if "norm" in steps else None,
            rotates_blocks="rotate" in steps, is_norm_first=steps[:1] == ("norm",),
        )  # fmt: skip
        for row, text, length in zip(keys, texts, lengths, strict=True):
            first, last = length // l, len(text) // l
            with torch.no_grad():
                k = compress(
                    text[None], nsa.model_copy(update={"phi": "pool" if l > 1 else "avg"}), pool if l > 1 else None
                )
                for step in steps:
                    angles_of_blocks = tuple(x[: k.shape[1] * l : l] for x in rotary)
                    k = norm(k) if step == "norm" else rotate_heads(k, angles_of_blocks)
            actual, expected = (decode_keys(x, D, dtype) for x in (row, encode_keys(k[0], index_dtype)))
            assert not row.view(torch.uint8)[:first].any() and not row.view(torch.uint8)[last:].any()
            difference = (actual[first:last].double() - expected[first:last].double()).abs()
            if l == 1 and not steps:
                assert not difference.any()
            elif index_dtype == "bf16":
                assert difference.max() < (1e-5 if dtype == torch.float32 else 2e-2)
            else:  # a rounding error can move a value over a midpoint
                n_moved, n_values = n_moved + int((difference > 1e-6).sum()), n_values + difference.numel()
                assert (difference <= 0.26 * expected[first:last].abs().double().amax(-1, keepdim=True)).all()
    # Over all shapes: some rows complete a single block of 32 values.
    assert n_moved <= (1e-3 if dtype == torch.float32 else 0.02) * n_values
