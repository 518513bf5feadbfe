"""Independent NSA implementation, token by token in float64, that `nsa_lab.attention.reference` is compared with.

It follows only the definition (docs and arXiv 2502.11089, section 3.3). It imports nothing from the library and shares no
formula with it: blocks are lists of token indices, overlaps are counted, the softmax is over a list of keys, and
derivatives are written out. Arrays are numpy, [B, T, H, D]. `first` is the position of the first query if queries are the
last of the keys. Documents in one row are computed one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

Array = np.ndarray
# (sequence, position of the query, group) -> the keys that the query attends to
Reads = Callable[[int, int, int], Iterable[int]]


class Geometry(NamedTuple):
    l: int
    d: int
    l_sel: int
    n_sel: int
    w: int
    sink: int = 1  # first blocks that are always selected
    local: int = 2  # latest blocks that are always selected
    over_heads: str = "sum"  # or max: how the scores of a group's heads are reduced
    over_block: str = "sum"  # or max: how the scores of the keys in a block are reduced


def compressed_blocks(length: int, geometry: Geometry) -> list[list[int]]:
    """Return the tokens of every complete compression block."""
    starts = range(0, length, geometry.d)
    return [list(range(s, s + geometry.l)) for s in starts if s + geometry.l <= length]


def selection_blocks(length: int, geometry: Geometry) -> list[list[int]]:
    """Return the tokens of every selection block; the last one can be incomplete."""
    return [[t for t in range(length) if t // geometry.l_sel == j] for j in range((length - 1) // geometry.l_sel + 1)]


def mean(block: Array) -> Array:
    """Return the mean of block [l, D] (phi = avg), [D]."""
    total = np.zeros(block.shape[1])
    for token in block:
        total = total + token
    return total / len(block)


def linear(position: Array, weight: Array) -> Callable[[Array], Array]:
    """Return phi = linear: add position encodings, then multiply the concatenated tokens with a matrix."""
    return lambda block: weight @ np.concatenate([token + p for token, p in zip(block, position, strict=True)])


def mlp(position: Array, first: Array, second: Array) -> Callable[[Array], Array]:
    """Return phi = mlp: like `linear`, with a SiLU between two matrices."""

    def apply(block: Array) -> Array:
        hidden = linear(position, first)(block)
        return second @ (hidden / (1 + np.exp(-hidden)))

    return apply


def pool(score: Array, place: Array) -> Callable[[Array], Array]:
    """Return phi = pool: a softmax-weighted mean of the block's tokens per channel; score [D, D], place [D, l]."""

    def apply(block: Array) -> Array:
        weights = np.stack([score @ token + place[:, i] for i, token in enumerate(block)])  # [l, D]
        return np.array([softmax(weights[:, c]) @ block[:, c] for c in range(block.shape[1])])

    return apply


def compress(x: Array, geometry: Geometry, phi: Callable[[Array], Array] = mean) -> Array:
    B, T, G, D = x.shape
    blocks = compressed_blocks(T, geometry)
    out = np.zeros((B, len(blocks), G, D))
    for b in range(B):
        for i, tokens in enumerate(blocks):
            for g in range(G):
                out[b, i, g] = phi(np.stack([x[b, t, g] for t in tokens]))
    return out


def softmax(scores: Array) -> Array:
    e = np.exp(scores - scores.max())
    return e / e.sum()


def attention(q: Array, k: Array, v: Array, reads: Reads, first: int = 0) -> tuple[Array, Array]:
    """Return softmax attention of every query over the keys that `reads` lists: out, LSE. No keys: 0 and -inf."""
    B, T, H, D = q.shape
    heads = H // k.shape[2]
    out, lse = np.zeros((B, T, H, v.shape[3])), np.full((B, T, H), -np.inf)
    for b in range(B):
        for t in range(T):
            for n in range(H):
                g = n // heads
                keys = list(reads(b, first + t, g))
                if keys:
                    scores = k[b, keys, g] @ q[b, t, n] / np.sqrt(D)
                    out[b, t, n] = softmax(scores) @ v[b, keys, g]
                    lse[b, t, n] = scores.max() + np.log(np.exp(scores - scores.max()).sum())
    return out, lse


def attention_gradients(
    q: Array, k: Array, v: Array, reads: Reads, d_out: Array, d_lse: Array, first: int = 0
) -> tuple[Array, Array, Array]:
    """Return the gradients of sum(out * d_out) + sum(lse * d_lse) for q, k and v, query by query."""
    B, T, H, D = q.shape
    heads = H // k.shape[2]
    d_q, d_k, d_v = np.zeros(q.shape), np.zeros(k.shape), np.zeros(v.shape)
    for b in range(B):
        for t in range(T):
            for n in range(H):
                g = n // heads
                keys = list(reads(b, first + t, g))
                if keys:
                    p = softmax(k[b, keys, g] @ q[b, t, n] / np.sqrt(D))
                    d_probability = v[b, keys, g] @ d_out[b, t, n]
                    d_score = p * (d_probability - p @ d_probability + d_lse[b, t, n]) / np.sqrt(D)
                    d_q[b, t, n] += d_score @ k[b, keys, g]
                    np.add.at(d_v[b, :, g], keys, np.outer(p, d_out[b, t, n]))
                    np.add.at(d_k[b, :, g], keys, np.outer(d_score, q[b, t, n]))
    return d_q, d_k, d_v


def dense_attention(q: Array, k: Array, v: Array) -> tuple[Array, Array]:
    return attention(q, k, v, lambda b, t, g: range(t + 1))


def visible(t: int, length: int, geometry: Geometry) -> list[int]:
    """Return the compression blocks whose last token is at or before t."""
    return [i for i, tokens in enumerate(compressed_blocks(length, geometry)) if tokens[-1] <= t]


def compressed_reads(length: int, geometry: Geometry) -> Reads:
    """Return the compressed blocks that the queries of a document of `length` tokens attend to."""
    last = [tokens[-1] for tokens in compressed_blocks(length, geometry)]
    return lambda b, t, g: [i for i, end in enumerate(last) if end <= t]


def compressed_attention(q: Array, k_cmp: Array, v_cmp: Array, geometry: Geometry, first: int = 0) -> tuple[Array, Array]:
    return attention(q, k_cmp, v_cmp, compressed_reads(first + q.shape[1], geometry), first)


def importance(q: Array, k_cmp: Array, geometry: Geometry, first: int = 0) -> Array:
    """Return [B, T, G, selection blocks]: sum of compressed probabilities of a group's heads, weighted by shared tokens.

    Instead of the sums: the largest probability of the heads, or of the compressed blocks that share a token.
    """
    B, T, H, D = q.shape
    G, length = k_cmp.shape[2], first + q.shape[1]
    compressed = [set(tokens) for tokens in compressed_blocks(length, geometry)]
    starts = range(0, length, geometry.l_sel)
    selection = [set(range(start, start + geometry.l_sel)) for start in starts]
    shared = np.array([[len(i & j) / geometry.d for j in selection] for i in compressed])
    out = np.zeros((B, T, G, len(selection)))
    for b in range(B):
        for t in range(T):
            visible_blocks = visible(first + t, length, geometry)
            for g in range(G if visible_blocks else 0):
                heads = range(g * (H // G), (g + 1) * (H // G))
                p = [softmax(k_cmp[b, visible_blocks, g] @ q[b, t, n] / np.sqrt(D)) for n in heads]
                p = sum(p) if geometry.over_heads == "sum" else np.max(p, axis=0)
                for j in range(len(selection)):
                    share = shared[visible_blocks, j]
                    out[b, t, g, j] = p @ share if geometry.over_block == "sum" else max(p * (share > 0))
    return out


def select_by_importance(scores: Array, t: int, geometry: Geometry) -> list[int]:
    """Return the blocks of the query at t: some forced, the rest by importance in float32, ties to the lower index."""
    candidates = [j for j in range(len(scores)) if j * geometry.l_sel <= t]
    forced = [j for j in candidates if j in candidates[: geometry.sink] or j in candidates[-geometry.local :]]
    rest = sorted((j for j in candidates if j not in forced), key=lambda j: (-np.float32(scores[j]), j))
    return sorted((forced + rest)[: geometry.n_sel])


def select_blocks(q: Array, k_cmp: Array, geometry: Geometry, first: int = 0) -> list[list[list[list[int]]]]:
    """Return the selected blocks, [sequence][token][group] -> ascending list."""
    scores = importance(q, k_cmp, geometry, first)
    B, T, G, _ = scores.shape
    return [
        [[select_by_importance(scores[b, t, g], first + t, geometry) for g in range(G)] for t in range(T)] for b in range(B)
    ]


def selected_reads(blocks: list[list[list[list[int]]]], length: int, geometry: Geometry, first: int = 0) -> Reads:
    tokens = selection_blocks(length, geometry)
    return lambda b, t, g: [s for j in blocks[b][t - first][g] for s in tokens[j] if s <= t]


def selected_attention(
    q: Array, k: Array, v: Array, blocks: list[list[list[list[int]]]], geometry: Geometry, first: int = 0
) -> tuple[Array, Array]:
    return attention(q, k, v, selected_reads(blocks, first + q.shape[1], geometry, first), first)


def window_reads(geometry: Geometry) -> Reads:
    return lambda b, t, g: [s for s in range(t + 1) if t - s < geometry.w]


def window_attention(q: Array, k: Array, v: Array, geometry: Geometry, first: int = 0) -> tuple[Array, Array]:
    return attention(q, k, v, window_reads(geometry), first)


def mean_keys(k: Array, geometry: Geometry) -> tuple[Array, Geometry]:
    """Return the mean key of every complete selection block, and the geometry in which such a block is a compressed one."""
    geometry = geometry._replace(l=geometry.l_sel, d=geometry.l_sel)
    return compress(k, geometry), geometry


def nsa_attention(
    q: Array,
    k_cmp: Array | None,
    v_cmp: Array | None,
    k_sel: Array | None,
    v_sel: Array | None,
    k_win: Array | None,
    v_win: Array | None,
    gates: Array | None,
    geometry: Geometry,
    selection_inputs: tuple[Array, Array, Geometry] | None = None,
    first: int = 0,
    blocks: list[list[list[list[int]]]] | None = None,
) -> Array:
    """Return the gated sum of the branches whose keys are not None, or a single branch without gates.

    `selection_inputs`: queries, compressed keys and geometry for selection; None: q and k_cmp. `blocks`: those of
    `select_blocks`.
    """
    branches = []
    if k_cmp is not None:
        branches.append(compressed_attention(q, k_cmp, v_cmp, geometry, first)[0])
    if k_sel is not None:
        blocks = blocks or select_blocks(*(selection_inputs or (q, k_cmp, geometry)), first)
        branches.append(selected_attention(q, k_sel, v_sel, blocks, geometry, first)[0])
    if k_win is not None:
        branches.append(window_attention(q, k_win, v_win, geometry, first)[0])
    if gates is None:
        return branches[0]
    return sum(gates[..., i, None] * branch for i, branch in enumerate(branches))


def rotate(x: Array, theta: float, positions: list[int] | None = None) -> Array:
    """Rotate every head separately: pair (i, i + D/2) is a complex number, multiplied by exp(1j * t * theta**(-2i/D)).

    `positions`: t of every row; None: 0, 1, ...
    """
    half = x.shape[-1] // 2
    rotated = x[..., :half] + 1j * x[..., half:]
    for row in range(x.shape[1]):
        t = positions[row] if positions else row
        for i in range(half):
            rotated[:, row, :, i] *= np.exp(1j * t * theta ** (-2 * i / (2 * half)))
    return np.concatenate([rotated.real, rotated.imag], axis=-1)


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


class Model(NamedTuple):
    """Sizes of a model, and its weights by state_dict key."""

    heads: int
    groups: int
    d_k: int
    d_v: int
    theta: float
    eps: float
    geometry: Geometry
    gate: str
    phi: str
    gated_mlp: bool
    weights: dict[str, Array]
    rotary_width: int | None = None  # channels of a head that RoPE rotates; None: all
    embedding_norm: bool = False
    indexer: int = 0  # tokens per index key; 0: no indexer
    indexer_width: int | None = None  # None: d_k
    ngrams: tuple[int, int] = (0, 0)  # longest n-gram, and rows of each table
    branches: tuple[str, ...] = ("cmp", "sel", "win")
    shared_kv: bool = False
    mean_keys: bool = False  # they select the blocks
    index_heads: int = 1  # query heads per group of the indexer
    index_groups: int | None = None  # index keys per token; None: one per group
    index_order: tuple[str, ...] = ("rotate", "pool")
    indexer_every: int = 1
    index_format: str = "bf16"  # no rounding; fp8; mxfp4


def attention_layer(
    x: Array, model: Model, prefix: str, selects: bool = True, blocks: list | None = None
) -> tuple[Array, list | None]:
    """Compute an attention layer, and return the selected blocks as well.

    Rows of `qkv`: q, then the keys of every branch in the order cmp, sel, win, then their values; with `shared_kv`, one key
    and one value. `selects`: the layer selects its own blocks, otherwise `blocks` are those of an earlier layer.
    """
    B, T, _ = x.shape
    H, G, d_k, d_v = model.heads, model.groups, model.d_k, model.d_v
    sets = [model.branches] if model.shared_kv else [(branch,) for branch in model.branches]
    weight, start, rows = model.weights[f"{prefix}.qkv.weight"], 0, []
    for heads, width in [(H, d_k)] + [(G, d_k)] * len(sets) + [(G, d_v)] * len(sets):
        rows.append((x @ weight[start : start + heads * width].T).reshape(B, T, heads, width))
        start += heads * width
    assert start == len(weight)
    keys, values = {}, {}
    for i, branches in enumerate(sets):
        key = rows[1 + i]
        if f"{prefix}.convolution.weight" in model.weights:
            key = short_convolution(key, model.weights[f"{prefix}.convolution.weight"][:, i])
        for branch in branches:
            keys[branch], values[branch] = rotate_some(key, model.rotary_width, model.theta), rows[1 + len(sets) + i]
    q = rotate_some(rows[0], model.rotary_width, model.theta)
    raw_keys = dict(keys)
    if "cmp" in keys:
        keys["cmp"] = compress(keys["cmp"], model.geometry, get_phi(model, f"{prefix}.phi_k"))
        values["cmp"] = compress(values["cmp"], model.geometry, get_phi(model, f"{prefix}.phi_v"))
    gates = None
    if len(model.branches) > 1:
        logits = (x @ model.weights[f"{prefix}.gate.weight"].T).reshape(B, T, H, len(model.branches))
        gates = sigmoid(logits) if model.gate == "sigmoid" else np.apply_along_axis(softmax, -1, logits)
    if "sel" in keys and selects:
        if model.indexer:
            scoring = index_queries_and_keys(x, model, f"{prefix}.indexer")
        elif model.mean_keys:
            scoring = q, *mean_keys(raw_keys["sel"], model.geometry)
        else:
            scoring = q, keys["cmp"], model.geometry
        blocks = select_blocks(*scoring)
    inputs = [x.get(branch) for branch in ("cmp", "sel", "win") for x in (keys, values)]
    attended = nsa_attention(q, *inputs, gates, model.geometry, blocks=blocks)
    return attended.reshape(B, T, H * d_v) @ model.weights[f"{prefix}.out.weight"].T, blocks


def rotate_some(x: Array, width: int | None, theta: float, positions: list[int] | None = None) -> Array:
    """Rotate the first `width` channels of every head; None: all."""
    return np.concatenate([rotate(x[..., :width], theta, positions), x[..., width or x.shape[-1] :]], axis=-1)


def compute_ngram_rows(tokens: Array, max_n: int, rows: int, table: Array) -> Array:
    """Return the concatenated rows of the n-grams of 2 to `max_n` tokens that end with each token."""
    base, multiplier, modulus = 0x5851F42D4C957F2D, 0x2545F4914F6CDD1D, 2**64
    out = []
    for sequence in tokens.tolist():
        for t in range(len(sequence)):
            row = []
            for n in range(2, max_n + 1):
                value = sum((sequence[t - j] + 1) * base ** (j + 1) for j in range(n) if j <= t) % modulus
                value = fold_bits(fold_bits(value) * multiplier % modulus)
                signed = value - modulus if value >= modulus // 2 else value
                row.append(table[(n - 2) * rows + signed % rows])
            out.append(np.concatenate(row))
    return np.stack(out).reshape(*tokens.shape, -1)


def fold_bits(value: int) -> int:
    """Xor the upper half of a 64-bit number into the lower; the shift replicates the sign bit."""
    upper = value >> 32
    if value >= 2**63:
        upper |= 0xFFFFFFFF << 32
    return value ^ upper


def short_convolution(x: Array, weight: Array) -> Array:
    """Return x [B, T, G, D] times weight[0] plus the previous row times weight[1], [G, D] each."""
    out = x * weight[0]
    for t in range(1, x.shape[1]):
        out[:, t] += x[:, t - 1] * weight[1]
    return out


def index_queries_and_keys(x: Array, model: Model, prefix: str) -> tuple[Array, Array, Geometry]:
    """Return the indexer's queries [B, T, G * heads, width], keys [B, N, G, width], and their geometry."""
    B, T, _ = x.shape
    G, width, groups = model.groups, model.indexer_width or model.d_k, model.index_groups or model.groups
    geometry = model.geometry._replace(l=model.indexer, d=model.indexer)
    n_queries = G * model.index_heads
    rows = (x @ model.weights[f"{prefix}.qk.weight"].T).reshape(B, T, n_queries + groups, width)
    q, k = rows[:, :, :n_queries], rows[:, :, n_queries:]
    if f"{prefix}.convolution.weight" in model.weights:
        k = short_convolution(k, model.weights[f"{prefix}.convolution.weight"][:, 0])
    R = (model.rotary_width or model.d_k) * width // model.d_k
    has_weights = model.indexer > 1  # a single token needs no weights
    phi = pool(model.weights[f"{prefix}.phi.score"], model.weights[f"{prefix}.phi.place"]) if has_weights else mean
    positions = list(range(T))
    for step in model.index_order:
        if step == "rotate":
            k = rotate_some(k, R, model.theta, positions)
        elif step == "norm":
            k = rms_norm(k, model.weights[f"{prefix}.norm.weight"], model.eps)
        else:
            k, positions = compress(k, geometry, phi), [block[0] for block in compressed_blocks(T, geometry)]
    if k.size and model.index_format != "bf16":
        k = np.apply_along_axis({"fp8": round_to_fp8, "mxfp4": round_to_mxfp4}[model.index_format], -1, k)
    return rotate_some(q, R, model.theta), np.concatenate([k] * (G // groups), 2), geometry


# Magnitudes by code: e4m3 has four bits of exponent and three of mantissa, e2m1 two and one. 0 has two codes, with a sign.
E4M3 = [m / 512 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7) for e in range(16) for m in range(8)][:-1]
E2M1 = [m / 2 if e == 0 else (1 + m / 2) * 2.0 ** (e - 1) for e in range(4) for m in range(2)]


def round_to_code(x: float, magnitudes: list[float]) -> float:
    """Return the nearest value with a code, for a tie the one with the even code."""
    code = min(range(len(magnitudes)), key=lambda code: (abs(magnitudes[code] - abs(x)), code % 2))
    return np.copysign(magnitudes[code], x)


def round_to_fp8(key: Array) -> Array:
    return np.array([round_to_code(x, E4M3) for x in key.astype(np.float32).tolist()])


def round_to_mxfp4(key: Array) -> Array:
    """Round groups of 32 channels to e2m1 times a power of two, by which the largest magnitude is between 4 and 8."""
    out = []
    for group in np.split(key.astype(np.float32).astype(float), range(32, len(key), 32)):
        largest = np.abs(group).max()
        scale = 2.0 ** (np.floor(np.log2(largest)) - 2) if largest else 1.0
        out += [scale * round_to_code(x / scale, E2M1) for x in group]
    return np.array(out)


def get_phi(model: Model, prefix: str) -> Callable[[Array], Array]:
    if model.phi == "avg":
        return mean
    if model.phi == "pool":
        return pool(model.weights[f"{prefix}.score"], model.weights[f"{prefix}.place"])
    position = model.weights[f"{prefix}.position"]
    if model.phi == "linear":
        return linear(position, model.weights[f"{prefix}.map.weight"])
    return mlp(position, model.weights[f"{prefix}.map.0.weight"], model.weights[f"{prefix}.map.2.weight"])


def logits(tokens: Array, model: Model, layers: int, selections: list | None = None) -> Array:
    """Return the logits of the transformer, tokens [B, T] -> [B, T, V]. `selections` gets the blocks of each layer."""
    w = model.weights
    x = w["embedding.weight"][tokens]
    if model.ngrams[0]:
        x = x + compute_ngram_rows(tokens, *model.ngrams, w["ngrams.table.weight"]) @ w["ngrams.out.weight"].T
    if model.embedding_norm:
        x = rms_norm(x, np.ones(x.shape[-1]), model.eps)
    blocks = None
    for i in range(layers):
        mixed = rms_norm(x, w[f"blocks.{i}.attention_norm.weight"], model.eps)
        attended, blocks = attention_layer(mixed, model, f"blocks.{i}.attention", i % model.indexer_every == 0, blocks)
        x = x + attended
        if selections is not None:
            selections.append(blocks)
        hidden = rms_norm(x, w[f"blocks.{i}.mlp_norm.weight"], model.eps) @ w[f"blocks.{i}.mlp.up.weight"].T
        if model.gated_mlp:
            gate, hidden = np.split(hidden, 2, axis=-1)
            hidden = gate * sigmoid(gate) * hidden
        else:
            hidden = hidden * sigmoid(hidden)
        x = x + hidden @ w[f"blocks.{i}.mlp.down.weight"].T
    return rms_norm(x, w["norm.weight"], model.eps) @ w["head.weight"].T
