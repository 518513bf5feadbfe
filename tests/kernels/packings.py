"""Random packings of documents through the kernels, against one call per document: `python tests/kernels/packings.py 1000`.

On a CPU under TRITON_INTERPRET=1, where it takes minutes per packing of any size: `packings.py 2 40`. The second number is
the most tokens of a document, a third would be the number of the first packing, and a fourth the step from one to the next:
`packings.py 84 4096 3 12` takes the fourth configuration alone, so that twelve processes share a thousand and no two
compile the same kernels. Prints how far it is and, at the end, the worst relative error of each part, over what is
allowed, by configuration; exits with 1 where one is above it, and where a document's neighbours change a bit of what it
gives.

What is allowed is the parity bar: 2 (outputs) or 3 (gradients) times what the same maths in plain low precision errs. In
half precision that is one rounding of the result at least, and no more is allowed here. In float32, where a sum over
thousands of rows errs by more than one rounding, however it is ordered, plain float32 is computed as well, by the torch
backend, and held against float64. That a call for one document is right is other tests' matter.
"""

from __future__ import annotations

import random
import sys
from typing import NamedTuple

import torch
from torch import Tensor

from nsa_lab import attention
from nsa_lab.attention import Span, compress
from nsa_lab.attention.compression import make_phi
from nsa_lab.bench.attention_parity import GRADIENT_FACTOR, OUTPUT_FACTOR, compute_relative_error
from nsa_lab.config import NSAConfig

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
MAX_DOCUMENTS, MAX_TOKENS = 64, 4096
LARGE = 1e4  # finite in all dtypes, and so are its products


class Configuration(NamedTuple):
    """Heads per group, groups, head width, dtype, geometry."""

    h: int
    G: int
    D: int
    dtype: torch.dtype
    nsa: NSAConfig


FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
CONFIGURATIONS = (
    Configuration(6, 2, 64, BF16, NSAConfig()),
    Configuration(16, 1, 128, BF16, NSAConfig()),
    Configuration(8, 2, 128, BF16, NSAConfig(phi="mlp")),
    Configuration(1, 4, 64, BF16, NSAConfig(phi="linear")),
    Configuration(5, 1, 64, FP16, NSAConfig(l=24, d=8, l_sel=32, n_sel=7, w=333)),
    Configuration(7, 1, 96, BF16, NSAConfig(l=48, d=16, l_sel=48, n_sel=5, w=100, phi="mlp")),
    Configuration(16, 1, 64, FP16, NSAConfig(l=16, d=16, l_sel=128, n_sel=4, phi="linear")),
    Configuration(1, 3, 96, FP32, NSAConfig(l=9, d=3, l_sel=48, n_sel=3, w=1)),
    Configuration(6, 1, 128, FP16, NSAConfig(l=64, d=16, l_sel=144, n_sel=9, w=700)),
    Configuration(8, 1, 64, BF16, NSAConfig(l=64, d=4, l_sel=16, n_sel=32, w=64)),
    Configuration(5, 2, 96, BF16, NSAConfig(l=32, d=32, l_sel=32, n_sel=16, phi="mlp")),
    Configuration(7, 1, 64, FP32, NSAConfig(l=15, d=5, l_sel=80, n_sel=6, w=17, phi="linear")),
)


def replace_bfloat16(c: Configuration) -> Configuration:
    """Triton's interpreter multiplies bfloat16 wrongly."""
    return c._replace(dtype=FP16) if c.dtype == BF16 else c


class Packing(NamedTuple):
    """Raw keys and values of the compressed branch stand before compression, so that phi is part of what is compared."""

    q: Tensor
    k_raw: Tensor
    v_raw: Tensor
    k_sel: Tensor
    v_sel: Tensor
    k_win: Tensor
    v_win: Tensor
    gates: Tensor

    def slice_rows(self, rows: slice) -> Packing:
        return Packing(*(x[:, rows] for x in self))


def draw_lengths(draw: random.Random, nsa: NSAConfig, most_documents: int, most_tokens: int) -> list[int]:
    """Of documents: any, and those next to an edge of a block or of a tile."""
    edges = [0, 1, nsa.l - 1, nsa.l, nsa.l_sel, nsa.l_sel + 1, 63, 64, 65, 128]
    number = draw.randint(1, most_documents)
    lengths = [draw.choice([draw.choice(edges), draw.randint(0, most_tokens)]) for _ in range(number)]
    return lengths if sum(lengths) else [*lengths[1:], draw.randint(1, most_tokens)]


def draw_inputs(total: int, c: Configuration, seed: int) -> Packing:
    generator = torch.Generator(DEVICE).manual_seed(seed)

    def normal(heads: int, width: int) -> Tensor:
        return torch.randn(1, total, heads, width, generator=generator, device=DEVICE).to(c.dtype).requires_grad_()

    H = c.h * c.G
    return Packing(normal(H, c.D), *(normal(c.G, c.D) for _ in range(6)), normal(H, 3))


def compute_results(
    x: Packing, c: Configuration, span: Span | None, phi: list, d_out: Tensor, backend: str = "triton"
) -> dict[str, Tensor]:
    """Outputs, LSEs and blocks of each part, and the gradients of the whole and of each branch's output and LSE."""
    how = {"backend": backend, "span": span}
    k_cmp, v_cmp = (compress_in_float64(y, c.nsa, module, span) for y, module in zip((x.k_raw, x.v_raw), phi, strict=True))
    out_cmp, lse_cmp = attention.compressed_attention(x.q, k_cmp, v_cmp, c.nsa, **how)
    blocks = attention.select_blocks(x.q, k_cmp, lse_cmp, c.nsa, **how)
    out_sel, lse_sel = attention.selected_attention(x.q, x.k_sel, x.v_sel, blocks, c.nsa, **how)
    out_win, lse_win = attention.window_attention(x.q, x.k_win, x.v_win, c.nsa, **how)
    out = attention.nsa_attention(x.q, k_cmp, v_cmp, *x[3:], c.nsa, **how)
    found = {"out_cmp": out_cmp, "out_sel": out_sel, "out_win": out_win, "out": out, "lse_cmp": lse_cmp,
             "lse_sel": lse_sel, "lse_win": lse_win, "blocks": blocks}  # fmt: skip
    grads = torch.autograd.grad(out, x, d_out, allow_unused=True, retain_graph=True)
    found |= {f"d{name}": zero_if_none(g, y) for name, g, y in zip(x._fields, grads, x, strict=True)}
    for name, y, lse in (("cmp", out_cmp, lse_cmp), ("sel", out_sel, lse_sel), ("win", out_win, lse_win)):
        leaves = [x.q, *((x.k_raw, x.v_raw) if name == "cmp" else (getattr(x, f"k_{name}"), getattr(x, f"v_{name}")))]
        d_lse = torch.where(torch.isinf(lse), 0.0, d_out[..., 0].to(lse.dtype))
        grads = torch.autograd.grad((y, lse), leaves, (d_out, d_lse), allow_unused=True)
        found |= {f"{name}_d{leaf}": zero_if_none(g, z) for leaf, g, z in zip("qkv", grads, leaves, strict=True)}
    return {name: y.detach() for name, y in found.items()}


def compress_in_float64(y: Tensor, nsa: NSAConfig, phi: torch.nn.Module | None, span: Span | None) -> Tensor:
    """`compress` in float64. How a matrix product of low precision rounds depends on how many rows it has."""
    return compress(y.double(), nsa, phi, span=span).to(y.dtype)


def zero_if_none(grad: Tensor | None, like: Tensor) -> Tensor:
    """A document without compressed blocks gives its raw keys no gradient."""
    return torch.zeros_like(like) if grad is None else grad


def compute_per_document(
    x: Packing, c: Configuration, span: Span, phi: list, d_out: Tensor, **how: str
) -> dict[str, Tensor]:
    """`results` of each document by itself, one after another."""
    parts = [
        compute_results(x.slice_rows(d.query_rows), c, None, phi, d_out[:, d.query_rows], **how)
        for d in span.documents
        if d.end
    ]
    return {name: torch.cat([part[name] for part in parts], 1) for name in parts[0]}


def compute_plain_errors(x: Packing, c: Configuration, span: Span, phi: list, d_out: Tensor) -> dict[str, float]:
    """Relative errors of plain float32 against float64; none for half precision, where they are a rounding at least."""
    if c.dtype != FP32:
        return {}
    exact = Packing(*(y.detach().double().requires_grad_() for y in x))
    true = compute_per_document(exact, c, span, phi, d_out.double(), backend="torch")
    plain = compute_per_document(x, c, span, phi, d_out, backend="torch")
    both = {name: (y, true[name], torch.isneginf(true[name])) for name, y in plain.items() if name != "blocks"}
    return {name: compute_relative_error(y.masked_fill(e, 0), z.masked_fill(e, 0)) for name, (y, z, e) in both.items()}


def compute_errors(together: dict[str, Tensor], alone: dict[str, Tensor], plain: dict[str, float]) -> dict[str, float]:
    """Of each result: its relative error over what is allowed; infinite where blocks, or what is infinite, differ."""
    found = {}
    for name, expected in alone.items():
        y = together[name]
        if name == "blocks":
            found[name] = 0.0 if torch.equal(y, expected) else float("inf")
            continue
        empty = torch.isneginf(expected)
        if not torch.equal(torch.isneginf(y), empty):
            found[name] = float("inf")
            continue
        factor = GRADIENT_FACTOR if name.startswith("d") or "_d" in name else OUTPUT_FACTOR
        error = compute_relative_error(y.masked_fill(empty, 0), expected.masked_fill(empty, 0))
        found[name] = error / (factor * max(torch.finfo(y.dtype).eps, plain.get(name, 0.0)))
    return found


def check(seed: int, c: Configuration, most_documents: int, most_tokens: int) -> dict[str, float]:
    """`errors` of one packing, `leak` among them: infinite where a document's large neighbour changes a bit."""
    draw = random.Random(f"packing {seed}")
    lengths = draw_lengths(draw, c.nsa, most_documents, most_tokens)
    capacity, longest = draw.choice([None, len(lengths) + draw.randint(0, 3)]), draw.choice([None, max(lengths) * 2])
    span = Span.packed(torch.tensor([0, *lengths]).cumsum(0).int(), capacity, longest)
    torch.manual_seed(seed)
    phi = [None if (m := make_phi(c.nsa, c.D)) is None else m.to(DEVICE, torch.float64).requires_grad_(False) for _ in "kv"]
    x = draw_inputs(span.n_queries, c, seed)
    d_out = torch.randn(x.q.shape, device=DEVICE).to(c.dtype)
    together = compute_results(x, c, span, phi, d_out)
    found = compute_errors(
        together, compute_per_document(x, c, span, phi, d_out), compute_plain_errors(x, c, span, phi, d_out)
    )
    spoilt = draw.choice([d for d in span.documents if d.end]).query_rows
    poisoned = Packing(*(y.detach().clone() for y in x))
    for name, y in poisoned._asdict().items():
        if name != "gates":
            y[:, spoilt] = LARGE
    after = compute_results(Packing(*(y.requires_grad_() for y in poisoned)), c, span, phi, d_out)
    others = torch.ones(span.n_queries, dtype=torch.bool, device=DEVICE)
    others[spoilt] = False
    same = all(torch.equal(y[:, others], after[name][:, others]) for name, y in together.items())
    return {**found, "leak": 0.0 if same else float("inf")}


def main(count: int = 1000, most_tokens: int = MAX_TOKENS, first: int = 0, every: int = 1) -> int:
    worst: dict[Configuration, dict[str, float]] = {c: {} for c in CONFIGURATIONS}
    for number, seed in enumerate(range(first, first + count * every, every), 1):
        c = CONFIGURATIONS[seed % len(CONFIGURATIONS)]
        c = replace_bfloat16(c) if DEVICE.type == "cpu" else c
        found = check(seed, c, MAX_DOCUMENTS if most_tokens == MAX_TOKENS else 4, most_tokens)
        known = worst.setdefault(c, {})
        for name, error in found.items():
            known[name] = max(known.get(name, 0.0), error)
            if not error <= 1:
                print(f"packing {seed}, {c}: {name}: {error:.2f} of what is allowed", flush=True)
        if number % 10 == 0:
            print(f"{number} of {count}", flush=True)
    for c, known in worst.items():
        if known:
            name = max(known, key=lambda part: known[part])
            print(f"h {c.h} G {c.G} d {c.D} {c.dtype} {c.nsa}: worst {name} {known[name]:.2f}", flush=True)
    parts = {name: max(known.get(name, 0.0) for known in worst.values()) for known in worst.values() for name in known}
    print(f"{count} packings: { ({name: round(error, 2) for name, error in parts.items()}) }")
    return int(not all(error <= 1 for error in parts.values()))


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
