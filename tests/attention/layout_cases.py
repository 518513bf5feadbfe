"""Random chunks and packed documents, and a comparison of each function with `brute_force`, including gradients.

`python tests/attention/layout_cases.py 200` checks 200 of each kind and prints the worst error of each backend.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import brute_force
import numpy as np
import torch
from attention_inputs import TORCH_VARIANTS, Inputs, to_brute_force_geometry, to_lists, use_variant
from torch import Tensor

from nsa_lab import attention
from nsa_lab.attention import Span
from nsa_lab.attention.compression import compress
from nsa_lab.config import NSAConfig

MAX_TOKENS = 200  # per document


@dataclass(frozen=True)
class Case:
    """A layout and the sizes of a call. `starts`, `lengths`: position of the first query, and queries, of each document."""

    nsa: NSAConfig
    span: Span
    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    B: int
    G: int
    h: int
    d_k: int
    d_v: int
    seed: int

    @property
    def variant(self) -> str:
        return TORCH_VARIANTS[self.seed % len(TORCH_VARIANTS)]

    @property
    def blocks(self) -> list[int]:
        """Number of compressed blocks of every document."""
        ends = [start + length for start, length in zip(self.starts, self.lengths, strict=True)]
        return [len(brute_force.compressed_blocks(end, to_brute_force_geometry(self.nsa))) for end in ends]

    def inputs(self, dtype: torch.dtype = torch.float64) -> Inputs:
        """Draw inputs as `Shape.inputs`, for all documents one after another."""
        generator = torch.Generator().manual_seed(self.seed)
        queries, keys = sum(self.lengths), sum(self.starts) + sum(self.lengths)
        blocks = keys // self.nsa.d if self.span.capacity else sum(self.blocks)

        def normal(tokens: int, heads: int, width: int) -> Tensor:
            return torch.randn(self.B, tokens, heads, width, generator=generator, dtype=torch.float64)

        pairs = [normal(tokens, self.G, width) for tokens in (blocks, keys, keys) for width in (self.d_k, self.d_v)]
        heads = self.G * self.h
        q, gates = 2 * normal(queries, heads, self.d_k), normal(queries, heads, 3).sigmoid()
        return Inputs(q, *pairs, gates).map(lambda x: x.to(dtype))

    def documents(self, x: Inputs) -> Iterator[tuple[int, Inputs]]:
        """Yield the position of the first query and the inputs of every document that has queries."""
        query = key = block = 0
        for start, length, blocks in zip(self.starts, self.lengths, self.blocks, strict=True):
            rows, raw = slice(query, query + length), slice(key, key + start + length)
            cmp = slice(block, block + blocks)
            query, key, block = rows.stop, raw.stop, cmp.stop
            if length:
                yield start, Inputs(x.q[:, rows], *(x[i][:, cmp] for i in (1, 2)), *(x[i][:, raw] for i in (3, 4, 5, 6)),
                                    x.gates[:, rows])  # fmt: skip


def draw_geometry(draw: random.Random) -> NSAConfig:
    d = draw.randint(1, 9)
    return NSAConfig(
        l=d * draw.randint(1, 4), d=d, l_sel=d * draw.randint(1, 5), n_sel=draw.randint(3, 6), w=draw.randint(1, 70)
    )


def draw_sizes(draw: random.Random) -> dict[str, int]:
    return {"G": draw.randint(1, 3), "h": draw.randint(1, 3), "d_k": draw.randint(1, 7), "d_v": draw.randint(1, 7)}


def make_chunk_case(seed: int) -> Case:
    draw = random.Random(f"chunk {seed}")
    nsa = draw_geometry(draw)
    end = draw.randint(1, MAX_TOKENS)
    length = draw.choice([1, min(nsa.l, end), draw.randint(1, end)])
    span = Span.chunk(end - length, length)
    return Case(nsa, span, (end - length,), (length,), draw.randint(1, 2), **draw_sizes(draw), seed=seed)


def make_packed_case(seed: int) -> Case:
    draw = random.Random(f"packed {seed}")
    nsa = draw_geometry(draw)
    edges = [0, 1, nsa.l - 1, nsa.l, nsa.l_sel + 1]
    lengths = [
        draw.choice([*edges, draw.randint(0, MAX_TOKENS), draw.randint(0, MAX_TOKENS)]) for _ in range(draw.randint(1, 5))
    ]
    if not sum(lengths):
        lengths[-1] = draw.randint(1, MAX_TOKENS)
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    span = Span.packed(bounds, capacity=draw.choice([None, len(lengths), len(lengths) + 3]))
    return Case(nsa, span, (0,) * len(lengths), tuple(lengths), 1, **draw_sizes(draw), seed=seed)


CASE_BUILDERS = {"chunk": make_chunk_case, "packed": make_packed_case}


def compute_expected(
    case: Case, x: Inputs, weights: dict[str, Tensor]
) -> tuple[dict[str, np.ndarray], list, dict[str, np.ndarray]]:
    """Return every function's result, the blocks, and the gradients of the weighted sum of all results."""
    g = to_brute_force_geometry(case.nsa)
    results: dict[str, list[np.ndarray]] = {name: [] for name in weights}
    blocks: list = [[] for _ in range(case.B)]
    gradients = {name: [] for name in Inputs._fields}
    row = 0
    for first, part in case.documents(x):
        q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates = (y.numpy() for y in part)
        T = q.shape[1]
        selected = brute_force.select_blocks(q, k_cmp, g, first)
        reads = {
            "cmp": (k_cmp, v_cmp, brute_force.compressed_reads(first + T, g)),
            "sel": (k_sel, v_sel, brute_force.selected_reads(selected, first + T, g, first)),
            "win": (k_win, v_win, brute_force.window_reads(g)),
        }
        w = {name: weight[:, row : row + T].numpy() for name, weight in weights.items()}
        mixed, d_q, d_gates = 0.0, np.zeros(q.shape), np.zeros(gates.shape)
        for i, (name, (k, v, read)) in enumerate(reads.items()):
            out, lse = brute_force.attention(q, k, v, read, first)
            results[f"out_{name}"].append(out)
            results[f"lse_{name}"].append(lse)
            mixed = mixed + gates[..., i, None] * out
            d_gates[..., i] = (out * w["mixed"]).sum(-1)
            d_out = w[f"out_{name}"] + gates[..., i, None] * w["mixed"]
            d_q_branch, d_k, d_v = brute_force.attention_gradients(q, k, v, read, d_out, w[f"lse_{name}"], first)
            d_q += d_q_branch
            gradients[f"k_{name}"].append(d_k)
            gradients[f"v_{name}"].append(d_v)
        results["mixed"].append(mixed)
        gradients["q"].append(d_q)
        gradients["gates"].append(d_gates)
        for b in range(case.B):
            blocks[b] += selected[b]
        row += T
    joined = [{name: np.concatenate(parts, 1) for name, parts in results_of.items()} for results_of in (results, gradients)]
    return joined[0], blocks, joined[1]


def compute_actual(
    case: Case, x: Inputs, weights: dict[str, Tensor], backend: str
) -> tuple[dict[str, Tensor], Tensor, Inputs]:
    """Return the same from the library, on a GPU if one is available and the backend needs it."""
    device = "cuda" if backend == "triton" and torch.cuda.is_available() else "cpu"
    x, weights = x.map(lambda y: y.detach().to(device).requires_grad_()), {n: w.to(device) for n, w in weights.items()}
    nsa, options = case.nsa, {"backend": backend, "span": case.span}
    out_cmp, lse_cmp = attention.compressed_attention(x.q, x.k_cmp, x.v_cmp, nsa, **options)
    blocks = attention.select_blocks(x.q, x.k_cmp, lse_cmp, nsa, **options)
    out_sel, lse_sel = attention.selected_attention(x.q, x.k_sel, x.v_sel, blocks, nsa, **options)
    out_win, lse_win = attention.window_attention(x.q, x.k_win, x.v_win, nsa, **options)
    mixed = attention.nsa_attention(*x, nsa, **options)
    results = {"out_cmp": out_cmp, "lse_cmp": lse_cmp, "out_sel": out_sel, "lse_sel": lse_sel, "out_win": out_win,
               "lse_win": lse_win, "mixed": mixed}  # fmt: skip
    loss = sum((torch.where(torch.isneginf(y), 0.0, y) * weights[name]).sum() for name, y in results.items())
    grads = Inputs(*torch.autograd.grad(loss, x)).map(torch.Tensor.cpu)
    return {name: y.detach().cpu() for name, y in results.items()}, blocks.cpu(), grads


def draw_weights(case: Case, x: Inputs) -> dict[str, Tensor]:
    """Draw a random direction for every result, so that no gradients cancel in a sum."""
    generator = torch.Generator().manual_seed(case.seed + 1)
    out, lse = (*x.q.shape[:3], case.d_v), x.q.shape[:3]
    names = {"out_cmp": out, "lse_cmp": lse, "out_sel": out, "lse_sel": lse, "out_win": out, "lse_win": lse, "mixed": out}
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in names.items()}


def compute_error(actual: Tensor, expected: np.ndarray) -> float:
    """Return the largest difference, relative to the largest value if that exceeds 1; inf if infinities differ."""
    a, hidden = actual.numpy(), np.isinf(expected)
    assert a.shape == expected.shape
    if not np.array_equal(np.isinf(a), hidden):
        return float("inf")
    a, e = a[~hidden], expected[~hidden]
    return float(np.abs(a - e).max() / max(np.abs(e).max(), 1.0)) if a.size else 0.0


def compute_worst_errors(case: Case) -> dict[str, float]:
    """Return the worst error of results and gradients by backend. Raise AssertionError for wrong blocks or padding rows."""
    x = case.inputs()
    weights = draw_weights(case, x)
    results, blocks, gradients = compute_expected(case, x, weights)
    worst = {}
    for variant in ("reference", case.variant):
        with use_variant(variant) as backend:
            actual, actual_blocks, grads = compute_actual(case, x, weights, backend)
        assert to_lists(actual_blocks) == blocks, f"{case}: {variant} selects other blocks"
        errors = [compute_error(actual[name], results[name]) for name in results]
        for name, gradient in zip(Inputs._fields, grads, strict=True):
            expected_gradient = gradients[name]
            assert (gradient[:, expected_gradient.shape[1] :] == 0).all(), (
                f"{case}: {variant}: {name}: padding has a gradient"
            )
            errors.append(compute_error(gradient[:, : expected_gradient.shape[1]], expected_gradient))
        worst[backend] = max(errors)
    return worst


def compute_compression_error(case: Case) -> float:
    """Return the worst error of values and gradients of `compress` and `reference.compress`, for phi = avg."""
    g, x = to_brute_force_geometry(case.nsa), case.inputs().k_sel.requires_grad_()
    parts = [part.k_sel.detach().numpy() for _, part in case.documents(case.inputs())]
    expected = np.concatenate([brute_force.compress(part, g) for part in parts], axis=1)
    d_out = np.random.default_rng(case.seed).normal(size=expected.shape)
    gradient, row = np.zeros(x.shape), 0
    begin = 0
    for part in parts:
        for tokens in brute_force.compressed_blocks(part.shape[1], g):
            for token in tokens:
                gradient[:, begin + token] += d_out[:, row] / g.l
            row += 1
        begin += part.shape[1]
    errors = []
    for operator in (attention.reference.compress, compress):
        out = operator(x, case.nsa, span=case.span)
        n = expected.shape[1]
        assert out.shape[1] == case.span.num_compressed(case.nsa) >= n and (out[:, n:] == 0).all()
        (grad,) = torch.autograd.grad((out[:, :n] * torch.from_numpy(d_out)).sum() + out[:, n:].sum() + 0 * x.sum(), x)
        errors += [compute_error(out[:, :n].detach(), expected), compute_error(grad, gradient)]
    return max(errors)


def main(count: int) -> None:
    torch.set_num_threads(1)
    for kind, build in CASE_BUILDERS.items():
        worst: dict[str, float] = {}
        for seed in range(count):
            case = build(seed)
            errors = {**compute_worst_errors(case), "compress": compute_compression_error(case)}
            worst = {name: max(worst.get(name, 0.0), x) for name, x in errors.items()}
        print(f"{kind}: {count} cases, worst error {worst}, longest {MAX_TOKENS} tokens", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 200)
