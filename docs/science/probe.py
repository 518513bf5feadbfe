"""The probe behind docs/science/retrieval_log.md: trains one model on text with planted facts, and asks for the facts.

    NAME=nsa_start2_half ARGS='{"kind": "nsa", "start": 2, "rotated": 0.5}' OUT=. python docs/science/probe.py CORPUS

Needs one CUDA device with about 40 GB. CORPUS holds train-*.parquet, validation-*.parquet and long-*.parquet with a column
`text`, or the first two files of each as one SPLIT.jsonl.xz. Everything random is a function of the seed in ARGS. Writes NAME.json: arguments, speed, curve, needle accuracy by
length and depth, the same under interventions, and bits per byte of `long` in windows of 32 768. It is written for the
library as it was at commit e5ad06b: check that out beside this one, and put it on PYTHONPATH.

STEPS=393,262,254 shortens the phases. SAVE=FILE keeps weights and moments after the first phase, LOAD=FILE begins with the second.

ARGS: kind (nsa, dense), seed, phases (run only the first ones), and the factors that the table varies:
conv     width of a causal depthwise convolution of the keys before rotation, k + SiLU(conv k)
canon    width of the same, linear, over the inputs of attention and MLP of every block
share    "all": one K and V for the three branches
start    width of a linear causal depthwise convolution of the keys that starts as a shift by one in the first group, where
         half of the heads start with the weights of the keys as their query weights: matching heads from step 0
shift    true: `start` without a convolution: the first group's keys are those of the token before, and stay so
rotated  share of a head's width that rotary embedding turns
cmp_keys "selected": the compressed keys are made from the selected branch's keys
oracle   weight of a loss that teaches the compressed keys where the selected branch would look if it read everything: on
         64 random queries per sequence, cross-entropy of the importances against the selected branch's own attention
         mass over all blocks but the forced ones, with everything but the compressed keys' own weights held fixed
oracle_trunk  true: that loss also moves what lies before the compressed keys, and the queries; the target stays fixed
         (a list: the weight in each phase)
pool     true: compressed keys and values are weighted means, the weights a softmax over the block of a score per token
cpool    true: compressed keys and values are means weighted by channel, the weights a softmax over the block's tokens of a linear
         map of the token's own key (value), and of its place; they start equal
indexer  true: the choice has a query and a key of its own, one head per group, from an input that passes no gradient on;
         `oracle` then teaches these alone
still    true: these are not rotated
n_sel    blocks that a query reads
l, d     compressed blocks: length and stride
rule_set the rules of `rules`
rules    true: at the end, text and needles at 32 768 under other rules of choice on the same weights (see RULES)
"""

from __future__ import annotations

import json
import lzma
import math
import multiprocessing as mp
import os
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nsa_lab import model as library
from nsa_lab.attention import (
    compress,
    compressed_attention,
    dense_attention,
    nsa_attention,
    reference,
    select_blocks,
    selected_attention,
    window_attention,
)
from nsa_lab.attention.geometry import forced_blocks, num_compressed, num_selection, overlap, visible_compressed
from nsa_lab.config import ModelConfig, NSAConfig

ARGS, NAME = json.loads(os.environ["ARGS"]), os.environ["NAME"]
CORPUS, OUT = Path(sys.argv[1]), Path(os.environ.get("OUT", "."))
PLAN = [(2048, 32, 1e-3, 393), (8192, 8, 7e-4, 523), (32768, 2, 4e-4, 508)]  # length, sequences, peak rate, steps
if "STEPS" in os.environ:
    PLAN = [(*p[:3], int(n)) for p, n in zip(PLAN, os.environ["STEPS"].split(","), strict=False)]
BYTES_PER_FACT, ANSWER_WEIGHT, WARMUP = 512, 5, 100
ADJECTIVES = """
amber brass coral dusty ebony frost golden hazel ivory jade khaki lilac maroon navy olive pearl quartz ruby
silver teal umber violet walnut yellow
"""
NOUNS = """
anchor badger candle dragon engine falcon garden hammer island jacket kettle ladder mirror needle oyster
pillow quiver rocket saddle temple urchin violin wagon zephyr
"""
# What the selected branch reads, or which branch is silent: chosen all nosel nocmp nowin, or a rule of choice, see RULES
MODE = ["chosen"]


def read(split: str) -> np.ndarray:
    if (packed := CORPUS / f"{split}.jsonl.xz").exists():
        with lzma.open(packed, "rt", encoding="utf-8") as lines:
            texts = [json.loads(line)["text"] for line in lines]
    else:
        from pyarrow import parquet

        texts = [text for f in sorted(CORPUS.glob(f"{split}-*.parquet"))[:2] for text in parquet.read_table(f)["text"].to_pylist()]
    return np.frombuffer("\n\n".join(texts).encode(), np.uint8)


def name(rng: np.random.Generator) -> str:
    adjectives, nouns = ADJECTIVES.split(), NOUNS.split()
    return f"{adjectives[rng.integers(len(adjectives))]} {nouns[rng.integers(len(nouns))]}"


def fact(name: str, digits: str) -> bytes:
    return f"\nThe secret number of the {name} is {digits}.\n".encode()


def question(name: str) -> bytes:
    return f"\nQ: What is the secret number of the {name}? A: ".encode()


def sequence(T: int, rng: np.random.Generator, text: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Bytes and their weights, T + 1 of each: text, T // 512 facts in it, and every fact asked for once later."""
    names: list[str] = []
    while len(names) < max(1, T // BYTES_PER_FACT):
        fresh = name(rng)
        if fresh not in names:
            names.append(fresh)
    items = []  # place in the text (0 to 1), bytes, answer
    for who in names:
        digits = f"{rng.integers(10**7):07d}"
        first, second = sorted(rng.random(2))
        items.append((first * 0.97, fact(who, digits), b""))
        items.append((first + (second - first) * 0.999 + 1e-6, question(who), f"{digits}\n".encode()))
    items.sort(key=lambda item: item[0])
    rest = T + 1 - sum(len(body) + len(answer) for _, body, answer in items)
    start = rng.integers(len(text) - rest)
    body, parts, weights, last = text[start : start + rest], [], [], 0
    for place, said, answer in items:
        cut = max(int(place * rest), last)
        parts += [body[last:cut], np.frombuffer(said, np.uint8), np.frombuffer(answer, np.uint8)]
        weights.append(np.ones(cut - last + len(said), np.float32))
        if answer:
            weights.append(np.array([ANSWER_WEIGHT] * 7 + [1], np.float32))
        last = cut
    parts.append(body[last:])
    weights.append(np.ones(rest - last, np.float32))
    return np.concatenate(parts), np.concatenate(weights)


def needle(T: int, depth: float, rng: np.random.Generator, text: np.ndarray) -> np.ndarray:
    """T bytes of text with one fact at `depth` and its question at the end; the last seven bytes are the answer."""
    who, digits = name(rng), f"{rng.integers(10**7):07d}"
    rest = T - len(fact(who, digits)) - len(question(who)) - 7
    start = rng.integers(len(text) - rest)
    body, cut = text[start : start + rest], int(depth * rest)
    told, asked = np.frombuffer(fact(who, digits), np.uint8), np.frombuffer(question(who) + digits.encode(), np.uint8)
    return np.concatenate([body[:cut], told, body[cut:], asked])


def batch(job: tuple[int, int, int]) -> tuple[np.ndarray, np.ndarray]:
    T, sequences, seed = job
    rng = np.random.default_rng(seed)
    made = [sequence(T, rng, TRAIN) for _ in range(sequences)]
    return np.stack([tokens for tokens, _ in made]), np.stack([weights for _, weights in made])


def lagged(x: Tensor, weight: Tensor) -> Tensor:
    """Causal depthwise convolution of x [B, T, C] with weight [width, C]: sum over j of weight[j] * x[t - j]."""
    weight = weight.to(x.dtype)
    total = x * weight[0]
    for j in range(1, len(weight)):
        total = total + F.pad(x, (0, 0, j, 0))[:, : x.shape[1]] * weight[j]
    return total


class Lags(nn.Module):
    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, channels).uniform_(-(width**-0.5), width**-0.5))

    def forward(self, x: Tensor) -> Tensor:
        return lagged(x, self.weight)


def rotate(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    share = ARGS.get("rotated", 1)
    if share == 1:
        return library.rotate(x, rotary)
    turned = int(x.shape[-1] * share)
    table = library.get_rotary_table(x.shape[1], turned, 500000.0, x.device)
    return torch.cat([library.rotate(x[..., :turned], table), x[..., turned:]], -1)


def keys_of(attention: nn.Module, keys: Tensor) -> Tensor:
    if "conv" in ARGS:
        return keys + F.silu(attention.lags(keys))
    if ARGS.get("shift"):
        return shifted(keys, attention)
    return attention.lags(keys) if "start" in ARGS else keys


def shifted(keys: Tensor, attention: nn.Module) -> Tensor:
    """The first group's keys one position late, in every branch: keys [B, T, n * G * D]."""
    c = attention.config
    k = keys.unflatten(-1, (-1, c.n_kv_groups, c.d_k))
    late = F.pad(k[:, :-1, :, :1], (0, 0, 0, 0, 0, 0, 1, 0))
    return torch.cat([late, k[:, :, :, 1:]], 3).flatten(2)


class Sparse(library.NSAttention):
    def project(self, x, rotary):
        c = self.config
        H, G, n = c.n_heads, c.n_kv_groups, 1 if ARGS.get("share") else 3
        q, keys, values = self.qkv(x).split([H * c.d_k, n * G * c.d_k, n * G * c.d_v], dim=-1)
        qk = torch.cat([q, keys_of(self, keys)], -1).unflatten(-1, (H + n * G, c.d_k))
        q, *k = rotate(qk, rotary).split([H] + [G] * n, 2)
        v = values.unflatten(-1, (n * G, c.d_v)).split(G, 2)
        (k_cmp, k_sel, k_win), (v_cmp, v_sel, v_win) = (k * 3, v * 3) if n == 1 else (k, v)
        if ARGS.get("cmp_keys") == "selected":
            k_cmp = k_sel
        gates = self.gates(x).to(q.dtype)
        if ARGS.get("pool"):
            k_cmp, v_cmp = self.pooled(x, k_cmp, v_cmp)
        elif ARGS.get("cpool"):
            k_cmp, v_cmp = self.pool_k(k_cmp, c.nsa), self.pool_v(v_cmp, c.nsa)
        else:
            k_cmp, v_cmp = compress(k_cmp, c.nsa), compress(v_cmp, c.nsa)
        if ARGS.get("indexer"):
            self.scored = self.own_scores(x.detach(), rotary)
            if "oracle" in ARGS and self.training:
                self.taught = oracle_loss(*self.scored, k_sel.detach(), c.nsa, target=q.detach())
        elif "oracle" in ARGS and self.training:
            if ARGS.get("oracle_trunk"):
                self.taught = oracle_loss(q, k_cmp, k_sel.detach(), c.nsa)
            else:
                self.taught = oracle_loss(q.detach(), self.compressed_keys(x.detach(), rotary), k_sel.detach(), c.nsa)
        return q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates

    def own_scores(self, x, rotary):
        """The choice's own queries [B, T, G, d_k] and compressed keys [B, N, G, d_k]."""
        c = self.config
        q, k = self.scores(x).unflatten(-1, (2, c.n_kv_groups, c.d_k)).unbind(2)
        k = self.score_lags(k.flatten(2)).unflatten(-1, (c.n_kv_groups, c.d_k))
        if not ARGS.get("still"):
            q, k = rotate(torch.cat([q, k], 2), rotary).split(c.n_kv_groups, 2)
        return q, self.pool_s(k, c.nsa) if ARGS.get("cpool") else compress(k, c.nsa)

    def pooled(self, x, k, v):
        """Blocks as weighted means; the weights a softmax over the block of a score per token and group."""
        nsa, N = self.config.nsa, num_compressed(x.shape[1], self.config.nsa)
        score = self.salience(x).float().exp()[..., None]  # [B, T, G, 1]

        def sums(y):  # [B, T, G, D] -> [B, N, G, D]: blocks are twice as long as their stride
            y = y[:, : (N + 1) * nsa.d].unflatten(1, (N + 1, nsa.d)).sum(2)
            return y[:, :-1] + y[:, 1:]

        total = sums(score)
        return [(sums(y.float() * score) / total).to(y.dtype) for y in (k, v)]

    def compressed_keys(self, x, rotary):
        """The compressed branch's keys again, from an input that passes no gradient on."""
        c = self.config
        first, width = c.n_heads * c.d_k, c.n_kv_groups * c.d_k
        keys = F.linear(x, self.qkv.weight[first : first + width].to(x.dtype))
        if ARGS.get("shift"):
            keys = shifted(keys, self)
        elif "start" in ARGS:
            keys = lagged(keys, self.lags.weight[:, :width])
        return compress(rotate(keys.unflatten(-1, (c.n_kv_groups, c.d_k)), rotary), c.nsa)

    def forward(self, x, rotary):
        parts = self.project(x, rotary)
        if MODE[0] == "chosen" and ARGS.get("indexer"):
            return self.out(indexed(*parts, *self.scored, self.config.nsa).flatten(2))
        if MODE[0] == "chosen":
            return self.out(nsa_attention(*parts, self.config.nsa, backend=self.backends).flatten(2))
        return self.out(self.changed(*parts).flatten(2))

    def changed(self, q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates):
        """Attention under the intervention MODE."""
        nsa = self.config.nsa
        cmp, lse = compressed_attention(q, k_cmp, v_cmp, nsa, backend="triton")
        if MODE[0] == "all":
            sel = dense_attention(q, k_sel, v_sel)
        else:
            rule, _, n_sel = MODE[0].partition("-")
            wide = nsa.model_copy(update={"n_sel": int(n_sel)}) if n_sel else nsa
            if ARGS.get("indexer") and rule in ("chosen", "nosel", "nocmp", "nowin"):
                blocks = blocks_of(*self.scored, wide)
            elif rule in RULES:
                blocks = chosen_by(RULES[rule], q, k_cmp, k_sel, wide)
            else:
                blocks = select_blocks(q, k_cmp, lse, wide, backend="triton")
            sel = selected_attention(q, k_sel, v_sel, blocks, wide, backend="triton")[0]
        win = window_attention(q, k_win, v_win, nsa, backend="triton")[0]
        silent = ("nocmp", "nosel", "nowin")
        branches = [out * (MODE[0] != mode) for out, mode in zip((cmp, sel, win), silent, strict=True)]
        return reference.combine(*branches, gates)


class Pool(nn.Module):
    """phi [B, T, G, D] -> [B, N, G, D]: a mean over the block, weighted by channel; the weights start equal."""

    def __init__(self, l: int, width: int) -> None:
        super().__init__()
        self.salience, self.place = nn.Parameter(torch.zeros(width, width)), nn.Parameter(torch.zeros(l, width))

    def forward(self, x, nsa):
        score = x @ self.salience.to(x.dtype)
        blocks, scores = x.unfold(1, nsa.l, nsa.d), score.unfold(1, nsa.l, nsa.d)  # [B, N, G, D, l]
        return ((scores.float() + self.place.T).softmax(-1) * blocks.float()).sum(-1).to(x.dtype)


def blocks_of(q, k, nsa):
    lse = compressed_attention(q, k, k, nsa, backend="triton")[1]
    return select_blocks(q, k, lse, nsa, backend="triton")


@torch.compiler.disable
def indexed(q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates, q_score, k_score, nsa):
    """NSA with blocks chosen by other queries and keys than the compressed branch's."""
    with torch.no_grad():
        blocks = blocks_of(q_score, k_score, nsa)
    cmp = compressed_attention(q, k_cmp, v_cmp, nsa, backend="triton")[0]
    sel = selected_attention(q, k_sel, v_sel, blocks, nsa, backend="triton")[0]
    win = window_attention(q, k_win, v_win, nsa, backend="triton")[0]
    return reference.combine(cmp, sel, win, gates)


def chosen_by(rule, q: Tensor, k_cmp: Tensor, k_sel: Tensor, nsa: NSAConfig, rows: int = 1024) -> Tensor:
    """Blocks [B, T, G, n_sel] by the importances that `rule` gives, `rows` queries at a time."""
    T, G = q.shape[1], k_sel.shape[2]
    q = q.unflatten(2, (G, -1))
    pieces = []
    for i in range(0, T, rows):
        t = torch.arange(i, min(i + rows, T), device=q.device)
        pieces.append(reference.select_by_importance(rule(q[:, i : i + rows], t, k_cmp, k_sel, nsa), nsa, first=i))
    return torch.cat(pieces, 1)


def attended(q: Tensor, k: Tensor, seen: Tensor) -> Tensor:
    """Shares [B, G, R, h, S] of queries [B, R, G, h, D] over keys [B, S, G, D], of which `seen` [R, S] may be looked at."""
    scores = torch.einsum("brghd,bsgd->bgrhs", q, k).float() * q.shape[-1] ** -0.5
    return scores.masked_fill_(~seen[:, None], -1e9).softmax(-1)


def by_block(p: Tensor, T: int, nsa: NSAConfig) -> Tensor:
    """Sums [..., blocks] of what keys [..., T] of a block have."""
    blocks = num_selection(T, nsa)
    return F.pad(p, (0, blocks * nsa.l_sel - T)).unflatten(-1, (blocks, nsa.l_sel)).sum(-1)


def by_mass(q, t, k_cmp, k_sel, nsa):
    """The oracle: the selected branch's own attention over all keys."""
    T = k_sel.shape[1]
    p = attended(q, k_sel, torch.arange(T, device=q.device) <= t[:, None])
    return by_block(p.mean(3), T, nsa).transpose(1, 2)


def by_blocks(pool, keys):
    """The choice's own rule, from the compressed keys or from means of the selected branch's; `pool` joins the heads."""

    def rule(q, t, k_cmp, k_sel, nsa):
        k = k_cmp if keys == "compressed" else compress(k_sel, nsa)
        N, T = k.shape[1], k_sel.shape[1]
        p = attended(q, k, torch.arange(N, device=q.device) < visible_compressed(t, nsa)[:, None])
        return (pool(p) @ overlap(N, num_selection(T, nsa), nsa, device=q.device)).transpose(1, 2)

    return rule


def by_bounds(q, t, k_cmp, k_sel, nsa):
    """The largest score that a key of the block could have, by the least and the greatest of each channel (Quest)."""
    T, scale = k_sel.shape[1], q.shape[-1] ** -0.5
    k = F.pad(k_sel, (0, 0, 0, 0, 0, -T % nsa.l_sel)).unflatten(1, (-1, nsa.l_sel)).float()
    positive, negative = q.float().clamp_min(0), q.float().clamp_max(0)
    bound = torch.einsum("brghd,bngd->bgrhn", positive, k.amax(2)) + torch.einsum("brghd,bngd->bgrhn", negative, k.amin(2))
    begun = torch.arange(k.shape[1], device=q.device) * nsa.l_sel <= t[:, None]
    return (bound * scale).masked_fill(~begun[:, None], -1e9).softmax(-1).mean(3).transpose(1, 2)


def at_random(q, t, k_cmp, k_sel, nsa):
    return torch.rand(*q.shape[:3], num_selection(k_sel.shape[1], nsa), device=q.device)


def nearest(q, t, k_cmp, k_sel, nsa):
    blocks = torch.arange(num_selection(k_sel.shape[1], nsa), device=q.device, dtype=torch.float32)
    return blocks.expand(*q.shape[:3], -1)


# Importances [B, R, G, blocks] of queries [B, R, G, h, D] at positions t; "NAME-64" reads 64 blocks in place of n_sel.
RULES = {
    "random": at_random,
    "nearest": nearest,
    "oracle": by_mass,
    "max": by_blocks(lambda p: p.amax(3), "compressed"),
    "means": by_blocks(lambda p: p.mean(3), "selected"),
    "maxmeans": by_blocks(lambda p: p.amax(3), "selected"),
    "bounds": by_bounds,
}


def oracle_loss(q: Tensor, k_cmp: Tensor, k_sel: Tensor, nsa: NSAConfig, rows: int = 64, target: Tensor | None = None) -> Tensor:
    """Cross-entropy of the importances against where the selected branch looks when it may read everything.

    `target`: the selected branch's own queries, where q are others.
    """
    T, G, scale = q.shape[1], k_sel.shape[2], q.shape[-1] ** -0.5
    blocks = num_selection(T, nsa)
    t = torch.randint(T, (rows,), device=q.device)
    q = q[:, t].unflatten(2, (G, -1))  # [B, R, G, h, D]
    with torch.no_grad():
        looks = q if target is None else target[:, t].unflatten(2, (G, -1))
        scores = torch.einsum("brghd,bsgd->bgrhs", looks, k_sel).float() * scale
        scores.masked_fill_(torch.arange(T, device=q.device) > t[:, None, None], float("-inf"))
        mass = F.pad(scores.softmax(-1).mean(3), (0, blocks * nsa.l_sel - T)).unflatten(-1, (blocks, nsa.l_sel)).sum(-1)
        free = ~forced_blocks(t, blocks, nsa) & (torch.arange(blocks, device=q.device) * nsa.l_sel <= t[:, None])
    scores = torch.einsum("brghd,bngd->bgrhn", q, k_cmp).float() * scale
    N = num_compressed(T, nsa)
    seen = (torch.arange(N, device=q.device) < visible_compressed(t, nsa)[:, None])[:, None]  # [R, 1, N]
    p = scores.masked_fill(~seen, -1e9).softmax(-1).mean(3)
    importance = (p @ overlap(N, blocks, nsa, device=q.device)).masked_fill(~free, 0) + 1e-9
    share = (importance / importance.sum(-1, keepdim=True)).log()
    return -(mass.masked_fill(~free, 0) * share).sum(-1).mean()


class Dense(library.DenseAttention):
    def forward(self, x, rotary):
        c = self.config
        H, G = c.n_heads, c.n_kv_groups
        q, k, v = self.qkv(x).split([H * c.d_k, G * c.d_k, G * c.d_v], dim=-1)
        qk = torch.cat([q, keys_of(self, k)], -1).unflatten(-1, (H + G, c.d_k))
        q, k = rotate(qk, rotary).split([H, G], 2)
        return self.out(dense_attention(q, k, v.unflatten(-1, (G, c.d_v))).flatten(2))


class Block(library.Block):
    def forward(self, x, rotary):
        normed = self.attention_norm(x)
        x = x + self.attention(normed + self.before_attention(normed), rotary)
        normed = self.mlp_norm(x)
        return x + self.mlp(normed + self.before_mlp(normed))


@torch.no_grad()
def start_as_matching(attention: nn.Module, n: int, width: int) -> None:
    """The first group's keys are of the token before; half of its heads ask with the keys' own weights."""
    c = attention.config
    G, d, h = c.n_kv_groups, c.d_k, c.heads_per_group
    if width:
        weight = torch.zeros(width, n, G, d)
        weight[1, :, 0], weight[0, :, 1:] = 1, 1
        attention.lags.weight.copy_(weight.flatten(1))
    rows = attention.qkv.weight
    queries = rows[: G * h * d].view(G, h, d, -1)
    keys = rows[G * h * d :][: n * G * d].view(n, G, d, -1)
    keys[:] = keys[:1].clone()
    queries[0, : h // 2] = keys[0, 0]


@torch.no_grad()
def start_scores_as_matching(attention: nn.Module) -> None:
    """The choice starts as the first group's matching heads do, and as the second group's first head."""
    c = attention.config
    G, d, h = c.n_kv_groups, c.d_k, c.heads_per_group
    attention.score_lags.weight.copy_(attention.lags.weight.unflatten(1, (-1, G, d))[:, 0].flatten(1))
    rows = attention.qkv.weight
    queries, keys = rows[: G * h * d].view(G, h, d, -1)[:, 0], rows[G * h * d :][: G * d].view(G, d, -1)
    attention.scores.weight.copy_(torch.cat([queries, keys]).flatten(0, 1))


def save_state(model: nn.Module, optimizer: torch.optim.Optimizer, path: str) -> None:
    torch.save({n: (p.detach(), optimizer.state.get(p, {})) for n, p in model.named_parameters()}, path)


@torch.no_grad()
def load_state(model: nn.Module, optimizer: torch.optim.Optimizer, path: str) -> None:
    """Weights and moments by name; parameters that the file does not know start anew."""
    saved = torch.load(path, map_location="cuda", weights_only=True)
    for name, p in model.named_parameters():
        if name in saved:
            p.copy_(saved[name][0])
            optimizer.state[p] = dict(saved[name][1])


def build() -> library.NSATransformer:
    seed, nsa = ARGS.get("seed", 0), ARGS["kind"] == "nsa"
    config = ModelConfig(attention=ARGS["kind"], rope_theta=500000.0, nsa=NSAConfig(**{k: ARGS[k] for k in ("n_sel", "l", "d") if k in ARGS}))
    torch.manual_seed(seed)
    model = library.NSATransformer(config, device="cuda", dtype=torch.bfloat16, seed=seed)
    n = 3 if nsa and not ARGS.get("share") else 1
    for block in model.blocks:
        attention = block.attention
        attention.__class__ = Sparse if nsa else Dense
        if nsa and n == 1:
            width = config.n_heads * config.d_k + config.n_kv_groups * (config.d_k + config.d_v)
            attention.qkv = nn.Linear(config.dim, width, bias=False)
            nn.init.normal_(attention.qkv.weight, std=config.dim**-0.5)
        width = ARGS.get("conv") or ARGS.get("start")
        if width:
            attention.lags = Lags(n * config.n_kv_groups * config.d_k, width)
        if "start" in ARGS or ARGS.get("shift"):
            start_as_matching(attention, n, width)
        if ARGS.get("pool"):
            attention.salience = nn.Linear(config.dim, config.n_kv_groups, bias=False)
            nn.init.zeros_(attention.salience.weight)
        if ARGS.get("cpool"):
            attention.pool_k, attention.pool_v = Pool(config.nsa.l, config.d_k), Pool(config.nsa.l, config.d_v)
            if ARGS.get("indexer"):
                attention.pool_s = Pool(config.nsa.l, config.d_k)
        if ARGS.get("indexer"):
            attention.scores = nn.Linear(config.dim, 2 * config.n_kv_groups * config.d_k, bias=False)
            nn.init.normal_(attention.scores.weight, std=config.dim**-0.5)
            attention.score_lags = Lags(config.n_kv_groups * config.d_k, 2)
            start_scores_as_matching(attention)
        if "canon" in ARGS:
            block.__class__ = Block
            block.before_attention, block.before_mlp = (Lags(config.dim, ARGS["canon"]) for _ in range(2))
    return model.to("cuda")


def logits_of(model: nn.Module, tokens: Tensor) -> Tensor:
    with torch.autocast("cuda", torch.bfloat16):
        return model(tokens)


@torch.no_grad()
def ask(model: nn.Module, T: int, per_depth: int) -> dict:
    """Share of needles answered in full, teacher-forced, by depth; and share of digits."""
    rng, by_depth, digits = np.random.default_rng(99), {}, []
    at_once = max(1, 131072 // T)
    for depth in range(10):
        rows = np.stack([needle(T, depth / 10, rng, VALIDATION) for _ in range(per_depth)])
        right = []
        for i in range(0, per_depth, at_once):
            tokens = torch.from_numpy(rows[i : i + at_once].astype(np.int64)).cuda()
            right.append(logits_of(model, tokens[:, :-1])[:, -7:].argmax(-1) == tokens[:, -7:])
        right = torch.cat(right)
        by_depth[f"{depth / 10:.1f}"] = right.all(-1).float().mean().item()
        digits.append(right.float().mean().item())
    return {"by_depth": by_depth, "mean": float(np.mean(list(by_depth.values()))), "digits": float(np.mean(digits))}


@torch.no_grad()
def long_text(model: nn.Module, T: int = 32768, every: int = 1) -> list[float]:
    """Bits per byte of every window of T bytes of `long`, or of each `every`-th."""
    text, losses = read("long"), []
    for start in range(0, len(text) - T - 1, every * T):
        row = torch.from_numpy(text[start : start + T + 1].astype(np.int64)).cuda()
        losses.append(F.cross_entropy(logits_of(model, row[None, :-1]).float()[0], row[1:]).item() / math.log(2))
    return losses


def weight_of_oracle(phase: int) -> float:
    weight = ARGS["oracle"]
    return weight[phase] if isinstance(weight, list) else weight


def train_phase(model: nn.Module, optimizer: torch.optim.Optimizer, pool, phase: int, record: dict) -> None:
    T, sequences, peak, steps = PLAN[phase]
    torch._dynamo.reset()
    compiled = torch.compile(model, dynamic=False)
    seeds = iter(range(10**7 * (phase + 10 * ARGS.get("seed", 0)), 10**9))
    waiting = [pool.apply_async(batch, ((T, sequences, next(seeds)),)) for _ in range(40)]
    for step in range(steps):
        tokens, weights = waiting.pop(0).get()
        waiting.append(pool.apply_async(batch, ((T, sequences, next(seeds)),)))
        tokens, weights = torch.from_numpy(tokens.astype(np.int64)).cuda(), torch.from_numpy(weights[:, 1:]).cuda()
        fall = max(0.1, 1 - step / steps) if phase == len(PLAN) - 1 else 1
        for group in optimizer.param_groups:
            group["lr"] = peak * min(1, (step + 1) / WARMUP) * fall
        logits = logits_of(compiled, tokens[:, :-1].contiguous()).float().flatten(0, 1)
        losses, w = F.cross_entropy(logits, tokens[:, 1:].flatten(), reduction="none"), weights.flatten()
        loss = (losses * w).sum() / w.sum()
        if "oracle" in ARGS:
            loss = loss + weight_of_oracle(phase) * sum(block.attention.taught for block in model.blocks)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step == 2:
            torch.cuda.synchronize()
            began = time.time()
        if step % 25 == 24 and "oracle" in ARGS:
            print(NAME, "taught", [round(b.attention.taught.item(), 2) for b in model.blocks], flush=True)
        if step % 25 == 24:
            by_digit = losses[w > 1].view(-1, 7).mean(0).tolist()
            row = (phase, step + 1, losses[w == 1].mean().item(), float(np.mean(by_digit)), norm.item(), by_digit)
            record["curve"].append(row)
            print(NAME, T, f"step {step + 1} text {row[2]:.3f} answer {row[3]:.3f} nats", flush=True)
    torch.cuda.synchronize()
    seconds = time.time() - began
    record["phases"].append({"T": T, "steps": steps, "secs": seconds, "tok_s": (steps - 3) * T * sequences / seconds})


def judge_phase(model: nn.Module, phase: int, last: bool, record: dict) -> None:
    T = PLAN[phase][0]
    model.eval()
    for length in (2048, 8192, 32768, 65536):
        if length <= (2 if last else 4) * T:
            result = ask(model, length, per_depth=(20 if length < 65536 else 4) if last else 6)
            record["needle"].setdefault(f"after{T}", {})[length] = result
            print(NAME, f"after {T}: needle at {length} {result['mean']:.3f}", flush=True)
    if ARGS["kind"] == "nsa" and record["needle"][f"after{T}"][T]["mean"] > 0.02:
        for mode in ("all",) if not last else ("random", "all", "nocmp"):
            MODE[0] = mode
            for length in {T, min(4 * T, 32768)} if T > 2048 else {T}:
                record["needle"][f"after{T}-{mode}-{length}"] = found = {length: ask(model, length, per_depth=3)}
                print(NAME, f"after {T}, {mode}: needle at {length} {found[length]['mean']:.3f}", flush=True)
        MODE[0] = "chosen"
    model.train()


def compare_rules(model: nn.Module, record: dict) -> None:
    """Text of every 18th window of `long` and needles at the last length, by rule of choice on the same weights."""
    T, record["rules"] = PLAN[-1][0], {}
    for mode in ARGS.get("rule_set", ["chosen", "oracle", "all", "chosen-64", "random"]):
        MODE[0] = mode
        record["rules"][mode] = row = {"long": long_text(model, T, every=18)}
        if mode in ("chosen", "all", "means", "bounds"):
            row["needle"] = ask(model, T, per_depth=2)["mean"]
        print(NAME, f"rule {mode}: long {np.mean(row['long']):.4f}, needle {row.get('needle', -1):.2f}", flush=True)
    MODE[0] = "chosen"


def main(pool) -> None:
    torch.set_float32_matmul_precision("high")
    model = build()
    record = {"name": NAME, "args": ARGS, "params": model.parameter_count(), "phases": [], "needle": {}, "curve": []}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    phases = ARGS.get("phases", len(PLAN))
    first = 0
    if "LOAD" in os.environ:
        load_state(model, optimizer, os.environ["LOAD"])
        first = 1
    for phase in range(first, phases):
        train_phase(model, optimizer, pool, phase, record)
        if phase == 0 and "SAVE" in os.environ:
            save_state(model, optimizer, os.environ["SAVE"])
        judge_phase(model, phase, phase == phases - 1, record)
        (OUT / f"{NAME}.json").write_text(json.dumps(record))
    if phases == len(PLAN):
        record["long"] = long_text(model.eval())
        print(NAME, f"long text: {np.mean(record['long']):.4f} bits per byte", flush=True)
        (OUT / f"{NAME}.json").write_text(json.dumps(record))
        if ARGS.get("rules"):
            compare_rules(model, record)
            (OUT / f"{NAME}.json").write_text(json.dumps(record))


if __name__ == "__main__":
    TRAIN, VALIDATION = read("train"), read("validation")
    with mp.get_context("fork").Pool(12) as workers:
        main(workers)
