"""NSA once more, token by token in float64: what `nsa_lab.attention.reference` itself is held against.

Written from the definition (docs and arXiv 2502.11089, section 3.3) and nothing else: no function here comes from the
library, and none shares its formulas. Blocks are lists of token numbers, overlaps are counted, softmax runs over a list of
keys. Arrays are numpy, laid out [B, T, H, D]; the geometry is five plain numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

Array = np.ndarray
# (sequence, token, group) -> the numbers of the keys which that query reads
Reads = Callable[[int, int, int], Iterable[int]]


class Geometry(NamedTuple):
    l: int
    d: int
    l_sel: int
    n_sel: int
    w: int


def compressed_blocks(length: int, geometry: Geometry) -> list[list[int]]:
    """The tokens of every whole compression block."""
    starts = range(0, length, geometry.d)
    return [list(range(s, s + geometry.l)) for s in starts if s + geometry.l <= length]


def selection_blocks(length: int, geometry: Geometry) -> list[list[int]]:
    """The tokens of every selection block, the last one possibly cut."""
    return [[t for t in range(length) if t // geometry.l_sel == j] for j in range((length - 1) // geometry.l_sel + 1)]


def mean(block: Array) -> Array:
    """phi = avg: block [l, D] -> [D]."""
    total = np.zeros(block.shape[1])
    for token in block:
        total = total + token
    return total / len(block)


def linear(position: Array, weight: Array) -> Callable[[Array], Array]:
    """phi = linear: position encoding, then one matrix over the block's tokens, end to end."""
    return lambda block: weight @ np.concatenate([token + p for token, p in zip(block, position, strict=True)])


def mlp(position: Array, first: Array, second: Array) -> Callable[[Array], Array]:
    """phi = mlp: as `linear`, with a SiLU between two matrices."""

    def apply(block: Array) -> Array:
        hidden = linear(position, first)(block)
        return second @ (hidden / (1 + np.exp(-hidden)))

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


def attention(q: Array, k: Array, v: Array, reads: Reads) -> tuple[Array, Array]:
    """Softmax attention of every query over the keys that `reads` lists: out, LSE. No keys: 0 and -inf."""
    B, T, H, D = q.shape
    heads = H // k.shape[2]
    out, lse = np.zeros((B, T, H, v.shape[3])), np.full((B, T, H), -np.inf)
    for b in range(B):
        for t in range(T):
            for n in range(H):
                g = n // heads
                keys = list(reads(b, t, g))
                if keys:
                    scores = np.array([q[b, t, n] @ k[b, s, g] for s in keys]) / np.sqrt(D)
                    out[b, t, n] = sum(p * v[b, s, g] for p, s in zip(softmax(scores), keys, strict=True))
                    lse[b, t, n] = scores.max() + np.log(np.exp(scores - scores.max()).sum())
    return out, lse


def dense_attention(q: Array, k: Array, v: Array) -> tuple[Array, Array]:
    return attention(q, k, v, lambda b, t, g: range(t + 1))


def visible(t: int, length: int, geometry: Geometry) -> list[int]:
    """Compression blocks whose last token the query at t has seen."""
    return [i for i, tokens in enumerate(compressed_blocks(length, geometry)) if tokens[-1] <= t]


def compressed_attention(q: Array, k_cmp: Array, v_cmp: Array, geometry: Geometry) -> tuple[Array, Array]:
    length = q.shape[1]
    return attention(q, k_cmp, v_cmp, lambda b, t, g: visible(t, length, geometry))


def importance(q: Array, k_cmp: Array, geometry: Geometry) -> Array:
    """[B, T, G, selection blocks]: probability of compressed blocks, carried over by shared tokens, summed over heads."""
    B, T, H, D = q.shape
    G = k_cmp.shape[2]
    compressed = [set(tokens) for tokens in compressed_blocks(T, geometry)]
    selection = [set(range(j * geometry.l_sel, (j + 1) * geometry.l_sel)) for j in range((T - 1) // geometry.l_sel + 1)]
    out = np.zeros((B, T, G, len(selection)))
    for b in range(B):
        for t in range(T):
            seen = visible(t, T, geometry)
            for n in range(H if seen else 0):
                g = n // (H // G)
                p = softmax(np.array([q[b, t, n] @ k_cmp[b, i, g] for i in seen]) / np.sqrt(D))
                for j, block in enumerate(selection):
                    out[b, t, g, j] += sum(p[i] * len(compressed[i] & block) / geometry.d for i in seen)
    return out


def choose(scores: Array, t: int, geometry: Geometry) -> list[int]:
    """The blocks that the query at t reads: three forced, the rest by importance in float32, ties to the lower index."""
    candidates = [j for j in range(len(scores)) if j * geometry.l_sel <= t]
    own = t // geometry.l_sel
    forced = [j for j in candidates if j in (0, own - 1, own)]
    rest = sorted((j for j in candidates if j not in forced), key=lambda j: (-np.float32(scores[j]), j))
    return sorted((forced + rest)[: geometry.n_sel])


def select_blocks(q: Array, k_cmp: Array, geometry: Geometry) -> list[list[list[list[int]]]]:
    """[sequence][token][group] -> list of blocks, ascending."""
    scores = importance(q, k_cmp, geometry)
    B, T, G, _ = scores.shape
    return [[[choose(scores[b, t, g], t, geometry) for g in range(G)] for t in range(T)] for b in range(B)]


def selected_attention(
    q: Array, k: Array, v: Array, blocks: list[list[list[list[int]]]], geometry: Geometry
) -> tuple[Array, Array]:
    tokens = selection_blocks(q.shape[1], geometry)
    return attention(q, k, v, lambda b, t, g: [s for j in blocks[b][t][g] for s in tokens[j] if s <= t])


def window_attention(q: Array, k: Array, v: Array, geometry: Geometry) -> tuple[Array, Array]:
    return attention(q, k, v, lambda b, t, g: [s for s in range(t + 1) if t - s < geometry.w])


def nsa_attention(
    q: Array,
    k_cmp: Array,
    v_cmp: Array,
    k_sel: Array,
    v_sel: Array,
    k_win: Array,
    v_win: Array,
    gates: Array,
    geometry: Geometry,
) -> Array:
    branches = [
        compressed_attention(q, k_cmp, v_cmp, geometry)[0],
        selected_attention(q, k_sel, v_sel, select_blocks(q, k_cmp, geometry), geometry)[0],
        window_attention(q, k_win, v_win, geometry)[0],
    ]
    return sum(gates[..., i, None] * branch for i, branch in enumerate(branches))


def rotate(x: Array, theta: float) -> Array:
    """Rotary embedding of every head by itself: pair (i, i + D/2) is a complex number, turned by t * theta**(-2i/D)."""
    half = x.shape[-1] // 2
    turned = x[..., :half] + 1j * x[..., half:]
    for t in range(x.shape[1]):
        for i in range(half):
            turned[:, t, :, i] *= np.exp(1j * t * theta ** (-2 * i / (2 * half)))
    return np.concatenate([turned.real, turned.imag], axis=-1)


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


class Model(NamedTuple):
    """The numbers of a model, and its weights by the names of its state_dict."""

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


def attention_layer(x: Array, model: Model, prefix: str) -> Array:
    """The rows of `qkv` are q, then the keys of cmp, sel and win, then the values of cmp, sel and win."""
    B, T, _ = x.shape
    H, G, d_k, d_v = model.heads, model.groups, model.d_k, model.d_v
    rows, start = {}, 0
    for name, heads, width in [
        ("q", H, d_k),
        ("k_cmp", G, d_k),
        ("k_sel", G, d_k),
        ("k_win", G, d_k),
        ("v_cmp", G, d_v),
        ("v_sel", G, d_v),
        ("v_win", G, d_v),
    ]:
        weight = model.weights[f"{prefix}.qkv.weight"][start : start + heads * width]
        start += heads * width
        rows[name] = (x @ weight.T).reshape(B, T, heads, width)
        if name[0] in "qk":
            rows[name] = rotate(rows[name], model.theta)
    k_cmp = compress(rows["k_cmp"], model.geometry, phi_of(model, f"{prefix}.phi_k"))
    v_cmp = compress(rows["v_cmp"], model.geometry, phi_of(model, f"{prefix}.phi_v"))
    logits = (x @ model.weights[f"{prefix}.gate.weight"].T).reshape(B, T, H, 3)
    gates = sigmoid(logits) if model.gate == "sigmoid" else np.apply_along_axis(softmax, -1, logits)
    mixed = nsa_attention(
        rows["q"], k_cmp, v_cmp, rows["k_sel"], rows["v_sel"], rows["k_win"], rows["v_win"], gates, model.geometry
    )
    return mixed.reshape(B, T, H * d_v) @ model.weights[f"{prefix}.out.weight"].T


def phi_of(model: Model, prefix: str) -> Callable[[Array], Array]:
    if model.phi == "avg":
        return mean
    position = model.weights[f"{prefix}.position"]
    if model.phi == "linear":
        return linear(position, model.weights[f"{prefix}.map.weight"])
    return mlp(position, model.weights[f"{prefix}.map.0.weight"], model.weights[f"{prefix}.map.2.weight"])


def logits(tokens: Array, model: Model, layers: int) -> Array:
    """The whole transformer: tokens [B, T] -> [B, T, V]."""
    w = model.weights
    x = w["embedding.weight"][tokens]
    for i in range(layers):
        mixed = rms_norm(x, w[f"blocks.{i}.attention_norm.weight"], model.eps)
        x = x + attention_layer(mixed, model, f"blocks.{i}.attention")
        hidden = rms_norm(x, w[f"blocks.{i}.mlp_norm.weight"], model.eps) @ w[f"blocks.{i}.mlp.up.weight"].T
        if model.gated_mlp:
            gate, hidden = np.split(hidden, 2, axis=-1)
            hidden = gate * sigmoid(gate) * hidden
        else:
            hidden = hidden * sigmoid(hidden)
        x = x + hidden @ w[f"blocks.{i}.mlp.down.weight"].T
    return rms_norm(x, w["norm.weight"], model.eps) @ w["head.weight"].T
