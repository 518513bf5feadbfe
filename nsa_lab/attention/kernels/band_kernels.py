"""Triton kernels of attention over a band of keys: forward, dQ, dK/dV and the sum of its chunks.

Query t sees key i iff  i*d + l - 1 <= t  or, where there is a window (W > 0, and then l = d = 1),  t - w < i <= t.
`band.py` launches them and says what they promise. Scores are in units of log2 throughout: `scale` carries log2(e).
"""

from __future__ import annotations

import triton
import triton.language as tl

from nsa_lab.attention.kernels.common import LOG2E

_LOG2E = tl.constexpr(LOG2E)
_LN2 = tl.constexpr(1 / LOG2E)

# Their values do not shape the code; specialising on them would only compile the same kernel again.
_SIZES = ("T", "N", "B", "G", "chunk_steps")


@triton.jit
def _visible(t, L: tl.constexpr, STRIDE: tl.constexpr):
    """Keys that have ended by t: a prefix of that many."""
    return tl.maximum((t - L + 1 + STRIDE) // STRIDE, 0)


@triton.jit
def _load_keys(base, stride, first, N, D: tl.constexpr, DP: tl.constexpr, KEYS: tl.constexpr, CLAMP: tl.constexpr):
    """Rows first .. first+KEYS-1 of a [N, D] matrix as [KEYS, DP].

    CLAMP: some may lie past the end; they repeat the last row, and the caller masks them. Without it the offsets inside the
    tile do not change from one tile to the next, and the compiler takes them out of the loop; they fit 32 bits.
    """
    c = tl.arange(0, DP)
    i = tl.arange(0, KEYS)
    if CLAMP:
        i = tl.minimum(i, N - 1 - first)
    pointers = base + tl.cast(first, tl.int64) * stride + (i[:, None] * stride + c[None, :])
    if D == DP:
        return tl.load(pointers)
    return tl.load(pointers, mask=c[None, :] < D, other=0.0)


@triton.jit
def _load_rows(base, stride_t, stride_h, t, head, D: tl.constexpr, DP: tl.constexpr):
    """Rows (t, head) of a [T, h, D] tensor as [len(t), DP]."""
    c = tl.arange(0, DP)
    pointers = base + (t.to(tl.int64) * stride_t + head.to(tl.int64) * stride_h)[:, None] + c[None, :]
    if D == DP:
        return tl.load(pointers)
    return tl.load(pointers, mask=c[None, :] < D, other=0.0)


@triton.jit
def _in_band(i, t, N, L: tl.constexpr, STRIDE: tl.constexpr, W: tl.constexpr):
    """Whether query t sees key i; broadcasts."""
    if W > 0:
        return (t - i).to(tl.uint32) < W  # 0 <= t - i < W, and i <= t < N
    return (i < N) & (i < _visible(t, L, STRIDE))


@triton.jit
def _row_program(B, G):
    """Row tile, batch and group of this program; the last rows see most keys, so they start first."""
    tile = (tl.num_programs(0) - 1 - tl.program_id(0)) // (B * G)
    bg = tl.program_id(0) % (B * G)
    return tile, (bg // G).to(tl.int64), (bg % G).to(tl.int64)


@triton.jit
def _row_tile(tile, T, h: tl.constexpr, ROWS: tl.constexpr):
    """Queries and heads of a tile's rows. Rows past the end repeat the last one, so that loads need no mask."""
    row = tl.minimum(tile * ROWS + tl.arange(0, ROWS), T * h - 1)
    return row // h, row % h, (tile * ROWS) // h, tl.minimum((tile * ROWS + ROWS - 1) // h, T - 1)


@triton.jit
def _key_range(t_first, t_last, L: tl.constexpr, STRIDE: tl.constexpr, W: tl.constexpr, KEYS: tl.constexpr):
    """First key of a row tile, then where its left-masked, unmasked and right-masked key tiles end, in keys."""
    start = 0
    left = 0
    if W > 0:
        start = tl.maximum(t_first - W + 1, 0)
        left = tl.cdiv(tl.maximum(t_last - W + 1, 0) - start, KEYS) * KEYS
    stop = start + tl.cdiv(tl.maximum(_visible(t_last, L, STRIDE) - start, 0), KEYS) * KEYS
    full = start + tl.maximum(_visible(t_first, L, STRIDE) - start, 0) // KEYS * KEYS
    left = tl.minimum(start + left, stop)
    return start, left, tl.maximum(full, left), stop


@triton.jit
def _key_tile(step, left, full, MASKED: tl.constexpr):
    """Where a loop over key tiles is: of those between `left` and `full`, or, MASKED, of those before and after them.

    One loop takes both edges: with a loop for each, ptxas made every tensor-core product of the window's forward pass, with
    heads of 64, wait for the one before.
    """
    return step + tl.where(step < left, 0, full - left) if MASKED else step


@triton.jit
def _attend(
    acc,
    peak,
    total,
    q,
    k_base,
    v_base,
    stride_k,
    stride_v,
    t,
    start,
    left,
    full,
    stop,
    N,
    scale,
    L: tl.constexpr,
    STRIDE: tl.constexpr,
    W: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    DKP: tl.constexpr,
    DVP: tl.constexpr,
    KEYS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Online softmax over the key tiles of `_key_tile`; `scale` carries log2(e), peak is in the same units."""
    for step in range(start if MASKED else left, stop - full + left if MASKED else full, KEYS):
        n = _key_tile(step, left, full, MASKED)
        k = _load_keys(k_base, stride_k, n, N, DK, DKP, KEYS, MASKED)
        v = _load_keys(v_base, stride_v, n, N, DV, DVP, KEYS, MASKED)
        s = tl.dot(q, tl.trans(k), input_precision="ieee")
        if MASKED:
            i = n + tl.arange(0, KEYS)
            s = tl.where(_in_band(i[None, :], t[:, None], N, L, STRIDE, W), s, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(s, 1) * scale)
        p = tl.math.exp2(s * scale - new_peak[:, None])
        shrink = tl.math.exp2(peak - new_peak)
        total = total * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        peak = new_peak
    return acc, peak, total


@triton.jit(do_not_specialize=_SIZES)
def forward_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    q_b,
    q_t,
    q_h,
    k_b,
    k_n,
    k_g,
    v_b,
    v_n,
    v_g,
    T,
    N,
    B,
    G,
    scale,
    h: tl.constexpr,
    L: tl.constexpr,
    STRIDE: tl.constexpr,
    W: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    DKP: tl.constexpr,
    DVP: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    tile, b, g = _row_program(B, G)
    t, head, t_first, t_last = _row_tile(tile, T, h, ROWS)
    q = _load_rows(q_ptr + b * q_b + g * h * q_h, q_t, q_h, t, head, DK, DKP)
    k_base = k_ptr + b * k_b + g * k_g
    v_base = v_ptr + b * v_b + g * v_g
    start, left, full, stop = _key_range(t_first, t_last, L, STRIDE, W, KEYS)

    acc = tl.zeros([ROWS, DVP], tl.float32)
    # Finite, so that a wholly masked tile gives exp2(-inf - peak) = 0 and never inf - inf.
    peak = tl.full([ROWS], -3.0e38, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc, peak, total = _attend(
        acc,
        peak,
        total,
        q,
        k_base,
        v_base,
        k_n,
        v_n,
        t,
        start,
        left,
        full,
        stop,
        N,
        scale,
        L,
        STRIDE,
        W,
        DK,
        DV,
        DKP,
        DVP,
        KEYS,
        False,
    )
    acc, peak, total = _attend(
        acc,
        peak,
        total,
        q,
        k_base,
        v_base,
        k_n,
        v_n,
        t,
        start,
        left,
        full,
        stop,
        N,
        scale,
        L,
        STRIDE,
        W,
        DK,
        DV,
        DKP,
        DVP,
        KEYS,
        True,
    )

    empty = total == 0.0
    out = acc / tl.where(empty, 1.0, total)[:, None]
    lse = tl.where(empty, float("-inf"), (peak + tl.math.log2(tl.where(empty, 1.0, total))) * _LN2)
    live = tile * ROWS + tl.arange(0, ROWS) < T * h
    place = (b * T + t) * (G * h) + g * h + head
    tl.store(lse_ptr + place, lse, mask=live)
    c = tl.arange(0, DVP)
    tl.store(
        out_ptr + place[:, None] * DV + c[None, :], out.to(out_ptr.dtype.element_ty), mask=live[:, None] & (c[None, :] < DV)
    )


@triton.jit
def _dq_steps(
    dq,
    q,
    do,
    lse2,
    delta,
    k_base,
    v_base,
    stride_k,
    stride_v,
    t,
    start,
    left,
    full,
    stop,
    N,
    scale,
    L: tl.constexpr,
    STRIDE: tl.constexpr,
    W: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    DKP: tl.constexpr,
    DVP: tl.constexpr,
    KEYS: tl.constexpr,
    MASKED: tl.constexpr,
):
    for step in range(start if MASKED else left, stop - full + left if MASKED else full, KEYS):
        n = _key_tile(step, left, full, MASKED)
        k = _load_keys(k_base, stride_k, n, N, DK, DKP, KEYS, MASKED)
        v = _load_keys(v_base, stride_v, n, N, DV, DVP, KEYS, MASKED)
        s = tl.dot(q, tl.trans(k), input_precision="ieee")
        if MASKED:
            i = n + tl.arange(0, KEYS)
            s = tl.where(_in_band(i[None, :], t[:, None], N, L, STRIDE, W), s, float("-inf"))
        p = tl.math.exp2(s * scale - lse2[:, None])
        dp = tl.dot(do, tl.trans(v), input_precision="ieee")
        ds = p * (dp - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")
    return dq


@triton.jit(do_not_specialize=_SIZES)
def dq_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    do_ptr,
    dlse_ptr,
    delta_ptr,
    dq_ptr,
    stats_ptr,
    q_b,
    q_t,
    q_h,
    k_b,
    k_n,
    k_g,
    v_b,
    v_n,
    v_g,
    do_b,
    do_t,
    do_h,
    stats_t,
    T,
    N,
    B,
    G,
    scale,
    softmax_scale,
    h: tl.constexpr,
    L: tl.constexpr,
    STRIDE: tl.constexpr,
    W: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    DKP: tl.constexpr,
    DVP: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    HAS_DLSE: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    ADD: tl.constexpr,
    ONE_LOOP: tl.constexpr,
):
    """dQ of one row tile, and what the dK/dV kernel reads of its rows: stats [B, H, 2, >= T], lse*log2(e) over
    delta = sum(dO*O) - dLSE, query-contiguous as that kernel walks them. HAS_DELTA: it is known. ADD: to what dq holds."""
    tile, b, g = _row_program(B, G)
    t, head, t_first, t_last = _row_tile(tile, T, h, ROWS)
    live = tile * ROWS + tl.arange(0, ROWS) < T * h
    place = (b * T + t) * (G * h) + g * h + head
    q = _load_rows(q_ptr + b * q_b + g * h * q_h, q_t, q_h, t, head, DK, DKP)
    do = _load_rows(do_ptr + b * do_b + g * h * do_h, do_t, do_h, t, head, DV, DVP)
    if HAS_DELTA:
        delta = tl.load(delta_ptr + place)
    else:
        out = _load_rows(out_ptr + (b * T * G + g) * h * DV, G * h * DV, DV, t, head, DV, DVP)
        delta = tl.sum(do.to(tl.float32) * out.to(tl.float32), 1)
        if HAS_DLSE:
            delta -= tl.load(dlse_ptr + place)
    lse = tl.load(lse_ptr + place)
    # A row that sees nothing has lse = -inf; +inf makes every p = exp2(s - inf) of it 0.
    lse2 = tl.where(lse == float("-inf"), float("inf"), lse * _LOG2E)
    stats = stats_ptr + ((b * G + g) * h + head) * 2 * stats_t + t
    tl.store(stats, lse2, mask=live)
    tl.store(stats + stats_t, delta, mask=live)
    k_base = k_ptr + b * k_b + g * k_g
    v_base = v_ptr + b * v_b + g * v_g
    start, left, full, stop = _key_range(t_first, t_last, L, STRIDE, W, KEYS)

    dq = tl.zeros([ROWS, DKP], tl.float32)
    if ONE_LOOP:
        left, full = start, start
    else:
        dq = _dq_steps(
            dq,
            q,
            do,
            lse2,
            delta,
            k_base,
            v_base,
            k_n,
            v_n,
            t,
            start,
            left,
            full,
            stop,
            N,
            scale,
            L,
            STRIDE,
            W,
            DK,
            DV,
            DKP,
            DVP,
            KEYS,
            False,
        )
    dq = _dq_steps(
        dq,
        q,
        do,
        lse2,
        delta,
        k_base,
        v_base,
        k_n,
        v_n,
        t,
        start,
        left,
        full,
        stop,
        N,
        scale,
        L,
        STRIDE,
        W,
        DK,
        DV,
        DKP,
        DVP,
        KEYS,
        True,
    )
    c = tl.arange(0, DKP)
    dq_pointers = dq_ptr + place[:, None] * DK + c[None, :]
    inside = live[:, None] & (c[None, :] < DK)
    dq *= softmax_scale
    if ADD:
        dq += tl.load(dq_pointers, mask=inside, other=0.0).to(tl.float32)
    tl.store(dq_pointers, dq.to(dq_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _query_range(i_first, i_last, T, L: tl.constexpr, STRIDE: tl.constexpr, W: tl.constexpr):
    """Queries [first, stop) that see some key of [i_first, i_last], and [full, full_stop) that see all of them."""
    first = (i_first * STRIDE + L - 1) // 16 * 16  # aligned, for wide loads; those before the true first are masked
    full = i_last * STRIDE + L - 1
    if W > 0:
        return first, full, tl.minimum(i_first + W, T), tl.minimum(i_last + W, T)
    return first, full, T, T


@triton.jit
def _dkv_steps(
    dk,
    dv,
    k,
    v,
    i,
    q_base,
    do_base,
    stats_base,
    q_t,
    q_h,
    do_t,
    do_h,
    stats_t,
    t_origin,
    tiles,
    turn,
    first,
    last,
    N,
    T,
    scale,
    h: tl.constexpr,
    L: tl.constexpr,
    STRIDE: tl.constexpr,
    W: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    DKP: tl.constexpr,
    DVP: tl.constexpr,
    ROWS: tl.constexpr,
    MASKED: tl.constexpr,
    TAIL: tl.constexpr,
):
    """Steps [first, last): step x is head x % h of the x // h -th tile of ROWS queries from t_origin; in a window `turn`
    tiles further, and round. TAIL: some masked tile reaches past the last query."""
    PAST_END: tl.constexpr = MASKED and TAIL
    for x in range(first, last):
        tile = x // h
        if W > 0:
            tile += turn
            tile -= tl.where(tile >= tiles, tiles, 0)
        tile_t = t_origin + tile * ROWS
        head = tl.cast(x % h, tl.int64)
        q = _load_keys(q_base + head * q_h, q_t, tile_t, T, DK, DKP, ROWS, PAST_END)
        do = _load_keys(do_base + head * do_h, do_t, tile_t, T, DV, DVP, ROWS, PAST_END)
        t = tl.arange(0, ROWS)
        if PAST_END:
            t = tl.minimum(t, T - 1 - tile_t)
        stats = stats_base + head * 2 * stats_t + tl.multiple_of(tile_t, 16) + t
        lse2 = tl.load(stats)
        delta = tl.load(stats + stats_t)
        s = tl.dot(k, tl.trans(q), input_precision="ieee")
        if MASKED:
            position = tile_t + tl.arange(0, ROWS)
            seen = _in_band(i[:, None], position[None, :], N, L, STRIDE, W)
            if TAIL:
                seen = seen & (position < T)[None, :]
            s = tl.where(seen, s, float("-inf"))
        p = tl.math.exp2(s * scale - lse2[None, :])
        dv = tl.dot(p.to(do.dtype), do, dv, input_precision="ieee")
        dp = tl.dot(v, tl.trans(do), input_precision="ieee")
        ds = p * (dp - delta[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee")
    return dk, dv


@triton.jit
def _step_range(
    i_first, i_last, T, L: tl.constexpr, STRIDE: tl.constexpr, W: tl.constexpr, h: tl.constexpr, ROWS: tl.constexpr
):
    """The query from which steps are counted, and the steps [begin, end) of those that see some key of [i_first, i_last].

    Without a window all key tiles count from query 0, so that a chunk is the same queries for all of them.
    """
    t_first, _, _, t_stop = _query_range(i_first, i_last, T, L, STRIDE, W)
    t_origin = t_first if W > 0 else 0
    return t_origin, (t_first - t_origin) // ROWS * h, tl.cdiv(t_stop - t_origin, ROWS) * h


@triton.jit(do_not_specialize=_SIZES)
def dkv_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    do_ptr,
    stats_ptr,
    dk_ptr,
    dv_ptr,
    q_b,
    q_t,
    q_h,
    k_b,
    k_n,
    k_g,
    v_b,
    v_n,
    v_g,
    do_b,
    do_t,
    do_h,
    stats_t,
    T,
    N,
    B,
    G,
    chunk_steps,
    scale,
    softmax_scale,
    h: tl.constexpr,
    L: tl.constexpr,
    STRIDE: tl.constexpr,
    W: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    DKP: tl.constexpr,
    DVP: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    TAIL: tl.constexpr,
):
    """dK, dV of one key tile from one chunk of the queries that see it: [chunks, B, N, G, D], dtype of the pointers.

    Key tiles that run side by side come to a tile of queries at the same time, and all but one find its q and dO in the L2
    cache. Without a window a chunk's queries are the same for all key tiles. With one, a key tile sees about as many tiles
    as the next: it begins with the one whose number is a multiple of that, goes on to its last, and then to its first.
    """
    chunk = tl.num_programs(1) - 1 - tl.program_id(1)  # the last queries are seen by most keys
    bg = tl.program_id(0) % (B * G)
    b = (bg // G).to(tl.int64)
    g = (bg % G).to(tl.int64)
    i_first = tl.program_id(0) // (B * G) * KEYS
    i_last = tl.minimum(i_first + KEYS, N) - 1
    _, t_full, t_full_stop, _ = _query_range(i_first, i_last, T, L, STRIDE, W)
    t_origin, begin, end = _step_range(i_first, i_last, T, L, STRIDE, W, h, ROWS)
    first = tl.maximum(chunk * chunk_steps, begin)
    last = tl.minimum((chunk + 1) * chunk_steps, end)
    if first < last:
        # Queries of the tiles in [inner, outer) all see all keys; the other tiles are masked. In a window, which begins
        # with one of [inner, outer], those follow one another.
        tiles = end // h
        inner = tl.minimum(tl.cdiv(t_full - t_origin, ROWS), tiles)
        outer = tl.maximum(tl.minimum(tl.maximum(t_full_stop - t_origin, 0) // ROWS, tiles), inner)
        turn = 0
        if W > 0:
            turn = tl.minimum(tl.maximum((tiles - t_origin // ROWS % tiles) % tiles, inner), outer)
            inner, outer = outer - turn, tiles - turn + inner
        inner = tl.minimum(tl.maximum(inner * h, first), last)
        outer = tl.minimum(tl.maximum(outer * h, inner), last)

        i = i_first + tl.arange(0, KEYS)
        k = _load_keys(k_ptr + b * k_b + g * k_g, k_n, i_first, N, DK, DKP, KEYS, True)
        v = _load_keys(v_ptr + b * v_b + g * v_g, v_n, i_first, N, DV, DVP, KEYS, True)
        q_base = q_ptr + b * q_b + g * h * q_h
        do_base = do_ptr + b * do_b + g * h * do_h
        stats_base = stats_ptr + (b * G + g) * h * 2 * stats_t
        dk = tl.zeros([KEYS, DKP], tl.float32)
        dv = tl.zeros([KEYS, DVP], tl.float32)
        dk, dv = _dkv_steps(
            dk,
            dv,
            k,
            v,
            i,
            q_base,
            do_base,
            stats_base,
            q_t,
            q_h,
            do_t,
            do_h,
            stats_t,
            t_origin,
            tiles,
            turn,
            first,
            inner,
            N,
            T,
            scale,
            h,
            L,
            STRIDE,
            W,
            DK,
            DV,
            DKP,
            DVP,
            ROWS,
            W == 0,
            TAIL,
        )
        dk, dv = _dkv_steps(
            dk,
            dv,
            k,
            v,
            i,
            q_base,
            do_base,
            stats_base,
            q_t,
            q_h,
            do_t,
            do_h,
            stats_t,
            t_origin,
            tiles,
            turn,
            inner,
            outer,
            N,
            T,
            scale,
            h,
            L,
            STRIDE,
            W,
            DK,
            DV,
            DKP,
            DVP,
            ROWS,
            W > 0,
            TAIL,
        )
        if W > 0 or TAIL:
            dk, dv = _dkv_steps(
                dk,
                dv,
                k,
                v,
                i,
                q_base,
                do_base,
                stats_base,
                q_t,
                q_h,
                do_t,
                do_h,
                stats_t,
                t_origin,
                tiles,
                turn,
                outer,
                last,
                N,
                T,
                scale,
                h,
                L,
                STRIDE,
                W,
                DK,
                DV,
                DKP,
                DVP,
                ROWS,
                W == 0,
                TAIL,
            )

        place = ((chunk * B + b) * N + i) * G + g  # int64: b is
        ck = tl.arange(0, DKP)
        cv = tl.arange(0, DVP)
        tl.store(
            dk_ptr + place[:, None] * DK + ck[None, :],
            (dk * softmax_scale).to(dk_ptr.dtype.element_ty),
            mask=(i < N)[:, None] & (ck[None, :] < DK),
        )
        tl.store(
            dv_ptr + place[:, None] * DV + cv[None, :],
            dv.to(dv_ptr.dtype.element_ty),
            mask=(i < N)[:, None] & (cv[None, :] < DV),
        )


@triton.jit
def _sum_slice(
    partial_ptr,
    sum_ptr,
    first_chunk,
    chunks,
    chunk_rows,
    row,
    live,
    D: tl.constexpr,
    DP: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Rows `row` of a [chunks, chunk_rows, D] float32 tensor, summed over chunks from the first in a fixed order."""
    c = tl.arange(0, DP)
    at = row[:, None] * D + c[None, :]
    mask = live[:, None] & (c[None, :] < D)
    ahead = tl.arange(0, AT_ONCE)
    total = tl.zeros([row.shape[0], DP], tl.float32)
    for first in range(first_chunk, chunks, AT_ONCE):
        chunk = first + ahead
        pointers = partial_ptr + (chunk.to(tl.int64) * chunk_rows * D)[:, None, None] + at[None, :, :]
        total += tl.sum(tl.load(pointers, mask=mask[None, :, :] & (chunk < chunks)[:, None, None], other=0.0), 0)
    tl.store(sum_ptr + at, total.to(sum_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=_SIZES)
def sum_chunks_kernel(
    dk_partial_ptr,
    dv_partial_ptr,
    dk_ptr,
    dv_ptr,
    T,
    N,
    B,
    G,
    chunk_steps,
    h: tl.constexpr,
    L: tl.constexpr,
    STRIDE: tl.constexpr,
    W: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    DKP: tl.constexpr,
    DVP: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SLICE: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """dK, dV of SLICE keys from their chunks: [chunks, B, N, G, D] float32 -> [B, N, G, D]."""
    bg = tl.program_id(0) % (B * G)
    b = (bg // G).to(tl.int64)
    g = (bg % G).to(tl.int64)
    i_slice = tl.program_id(0) // (B * G) * SLICE
    i_first = i_slice // KEYS * KEYS
    i_last = tl.minimum(i_first + KEYS, N) - 1
    _, begin, end = _step_range(i_first, i_last, T, L, STRIDE, W, h, ROWS)
    first = begin // chunk_steps
    chunks = tl.cdiv(end, chunk_steps)
    i = i_slice + tl.arange(0, SLICE)
    row = (b * N + i) * G + g
    _sum_slice(dk_partial_ptr, dk_ptr, first, chunks, B * N * G, row, i < N, DK, DKP, AT_ONCE)
    _sum_slice(dv_partial_ptr, dv_ptr, first, chunks, B * N * G, row, i < N, DV, DVP, AT_ONCE)
