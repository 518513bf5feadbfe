"""Compare random packings of documents with one call per document: `python tests/kernels/packings.py 1000`.

Arguments: number of packings, maximum tokens of a document, number of the first packing, and the step from one to the next.
On a CPU under TRITON_INTERPRET=1 a packing of any size takes minutes: `packings.py 2 40`. `packings.py 84 4096 3 12` runs
only the fourth configuration, so that twelve processes share a thousand packings and no two compile the same kernels.
Prints progress and, at the end, the worst relative error of each part as a fraction of the limit, by configuration. Exits
with 1 if a limit is exceeded, or if a neighbor changes a bit of a document's results.

As in the parity checks, the limit is 2 (outputs) or 3 (gradients) times the error of the same computation in plain low
precision. In half precision this error is at least one rounding of the result, and the limit here assumes exactly one
rounding. In float32, where any sum over thousands of rows has an error of more than one rounding, plain float32 is also
computed with the torch backend and compared with float64. Other tests check calls for a single document.
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


def replace_bfloat16(config: Configuration) -> Configuration:
    """Replace bfloat16, which Triton's interpreter multiplies wrongly, by float16."""
    return config._replace(dtype=FP16) if config.dtype == BF16 else config


class Packing(NamedTuple):
    """Inputs. Keys and values of the compressed branch are raw, so that compression is part of the comparison."""

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


def draw_lengths(rng: random.Random, nsa: NSAConfig, max_documents: int, max_tokens: int) -> list[int]:
    """Draw document lengths, both arbitrary ones and ones close to an edge of a block or of a tile."""
    edges = [0, 1, nsa.l - 1, nsa.l, nsa.l_sel, nsa.l_sel + 1, 63, 64, 65, 128]
    n_documents = rng.randint(1, max_documents)
    lengths = [rng.choice([rng.choice(edges), rng.randint(0, max_tokens)]) for _ in range(n_documents)]
    return lengths if sum(lengths) else [*lengths[1:], rng.randint(1, max_tokens)]


def draw_inputs(total: int, config: Configuration, seed: int) -> Packing:
    generator = torch.Generator(DEVICE).manual_seed(seed)

    def normal(heads: int, width: int) -> Tensor:
        return torch.randn(1, total, heads, width, generator=generator, device=DEVICE).to(config.dtype).requires_grad_()

    H = config.h * config.G
    return Packing(normal(H, config.D), *(normal(config.G, config.D) for _ in range(6)), normal(H, 3))


def compute_results(
    x: Packing, config: Configuration, span: Span | None, phi: list, d_out: Tensor, backend: str = "triton"
) -> dict[str, Tensor]:
    """Return outputs, LSEs and blocks of each part, and gradients of the operator and of each branch's output and LSE."""
    options = {"backend": backend, "span": span}
    k_cmp, v_cmp = (
        compress_in_float64(y, config.nsa, module, span) for y, module in zip((x.k_raw, x.v_raw), phi, strict=True)
    )
    out_cmp, lse_cmp = attention.compressed_attention(x.q, k_cmp, v_cmp, config.nsa, **options)
    blocks = attention.select_blocks(x.q, k_cmp, lse_cmp, config.nsa, **options)
    out_sel, lse_sel = attention.selected_attention(x.q, x.k_sel, x.v_sel, blocks, config.nsa, **options)
    out_win, lse_win = attention.window_attention(x.q, x.k_win, x.v_win, config.nsa, **options)
    out = attention.nsa_attention(x.q, k_cmp, v_cmp, *x[3:], config.nsa, **options)
    results = {"out_cmp": out_cmp, "out_sel": out_sel, "out_win": out_win, "out": out, "lse_cmp": lse_cmp,
             "lse_sel": lse_sel, "lse_win": lse_win, "blocks": blocks}  # fmt: skip
    grads = torch.autograd.grad(out, x, d_out, allow_unused=True, retain_graph=True)
    results |= {f"d{name}": zero_if_none(g, y) for name, g, y in zip(x._fields, grads, x, strict=True)}
    for name, y, lse in (("cmp", out_cmp, lse_cmp), ("sel", out_sel, lse_sel), ("win", out_win, lse_win)):
        leaves = [x.q, *((x.k_raw, x.v_raw) if name == "cmp" else (getattr(x, f"k_{name}"), getattr(x, f"v_{name}")))]
        d_lse = torch.where(torch.isinf(lse), 0.0, d_out[..., 0].to(lse.dtype))
        grads = torch.autograd.grad((y, lse), leaves, (d_out, d_lse), allow_unused=True)
        results |= {f"{name}_d{leaf}": zero_if_none(g, z) for leaf, g, z in zip("qkv", grads, leaves, strict=True)}
    return {name: y.detach() for name, y in results.items()}


def compress_in_float64(y: Tensor, nsa: NSAConfig, phi: torch.nn.Module | None, span: Span | None) -> Tensor:
    """Compress in float64, because the rounding of a low-precision matrix product depends on its number of rows."""
    return compress(y.double(), nsa, phi, span=span).to(y.dtype)


def zero_if_none(grad: Tensor | None, like: Tensor) -> Tensor:
    """Return zeros if there is no gradient: raw keys of a document without compressed blocks have none."""
    return torch.zeros_like(like) if grad is None else grad


def compute_per_document(
    x: Packing, config: Configuration, span: Span, phi: list, d_out: Tensor, **how: str
) -> dict[str, Tensor]:
    """Compute the results of each document separately and concatenate them."""
    parts = [
        compute_results(x.slice_rows(d.query_rows), config, None, phi, d_out[:, d.query_rows], **how)
        for d in span.documents
        if d.end
    ]
    return {name: torch.cat([part[name] for part in parts], 1) for name in parts[0]}


def compute_plain_errors(x: Packing, config: Configuration, span: Span, phi: list, d_out: Tensor) -> dict[str, float]:
    """Return the relative errors of plain float32 against float64; {} for half precision."""
    if config.dtype != FP32:
        return {}
    exact = Packing(*(y.detach().double().requires_grad_() for y in x))
    true = compute_per_document(exact, config, span, phi, d_out.double(), backend="torch")
    plain = compute_per_document(x, config, span, phi, d_out, backend="torch")
    pairs = {name: (y, true[name], torch.isneginf(true[name])) for name, y in plain.items() if name != "blocks"}
    return {name: compute_relative_error(y.masked_fill(e, 0), z.masked_fill(e, 0)) for name, (y, z, e) in pairs.items()}


def compute_errors(packed: dict[str, Tensor], separate: dict[str, Tensor], plain: dict[str, float]) -> dict[str, float]:
    """Return the relative error of each result as a fraction of the limit; infinite if blocks or infinities differ."""
    errors = {}
    for name, expected in separate.items():
        y = packed[name]
        if name == "blocks":
            errors[name] = 0.0 if torch.equal(y, expected) else float("inf")
            continue
        empty = torch.isneginf(expected)
        if not torch.equal(torch.isneginf(y), empty):
            errors[name] = float("inf")
            continue
        factor = GRADIENT_FACTOR if name.startswith("d") or "_d" in name else OUTPUT_FACTOR
        error = compute_relative_error(y.masked_fill(empty, 0), expected.masked_fill(empty, 0))
        errors[name] = error / (factor * max(torch.finfo(y.dtype).eps, plain.get(name, 0.0)))
    return errors


def check(seed: int, config: Configuration, max_documents: int, max_tokens: int) -> dict[str, float]:
    """Return the errors of one packing, including `leak`: infinite if large values in another document change a bit."""
    rng = random.Random(f"packing {seed}")
    lengths = draw_lengths(rng, config.nsa, max_documents, max_tokens)
    capacity, longest = rng.choice([None, len(lengths) + rng.randint(0, 3)]), rng.choice([None, max(lengths) * 2])
    span = Span.packed(torch.tensor([0, *lengths]).cumsum(0).int(), capacity, longest)
    torch.manual_seed(seed)
    phi = [
        None if (m := make_phi(config.nsa, config.D)) is None else m.to(DEVICE, torch.float64).requires_grad_(False)
        for _ in "kv"
    ]
    x = draw_inputs(span.n_queries, config, seed)
    d_out = torch.randn(x.q.shape, device=DEVICE).to(config.dtype)
    packed = compute_results(x, config, span, phi, d_out)
    errors = compute_errors(
        packed, compute_per_document(x, config, span, phi, d_out), compute_plain_errors(x, config, span, phi, d_out)
    )
    changed_rows = rng.choice([d for d in span.documents if d.end]).query_rows
    poisoned = Packing(*(y.detach().clone() for y in x))
    for name, y in poisoned._asdict().items():
        if name != "gates":
            y[:, changed_rows] = LARGE
    changed_results = compute_results(Packing(*(y.requires_grad_() for y in poisoned)), config, span, phi, d_out)
    others = torch.ones(span.n_queries, dtype=torch.bool, device=DEVICE)
    others[changed_rows] = False
    is_same = all(torch.equal(y[:, others], changed_results[name][:, others]) for name, y in packed.items())
    return {**errors, "leak": 0.0 if is_same else float("inf")}


def main(count: int = 1000, max_tokens: int = MAX_TOKENS, first: int = 0, step: int = 1) -> int:
    worst: dict[Configuration, dict[str, float]] = {config: {} for config in CONFIGURATIONS}
    for index, seed in enumerate(range(first, first + count * step, step), 1):
        config = CONFIGURATIONS[seed % len(CONFIGURATIONS)]
        config = replace_bfloat16(config) if DEVICE.type == "cpu" else config
        errors = check(seed, config, MAX_DOCUMENTS if max_tokens == MAX_TOKENS else 4, max_tokens)
        worst_errors = worst.setdefault(config, {})
        for name, error in errors.items():
            worst_errors[name] = max(worst_errors.get(name, 0.0), error)
            if not error <= 1:
                print(f"packing {seed}, {config}: {name}: {error:.2f} of the limit", flush=True)
        if index % 10 == 0:
            print(f"{index} of {count}", flush=True)
    for config, worst_errors in worst.items():
        if worst_errors:
            name = max(worst_errors, key=lambda part: worst_errors[part])
            print(
                f"h {config.h} G {config.G} d {config.D} {config.dtype} {config.nsa}: "
                f"worst {name} {worst_errors[name]:.2f}",
                flush=True,
            )
    parts = {
        name: max(worst_errors.get(name, 0.0) for worst_errors in worst.values())
        for worst_errors in worst.values()
        for name in worst_errors
    }
    print(f"{count} packings: { ({name: round(error, 2) for name, error in parts.items()}) }")
    return int(not all(error <= 1 for error in parts.values()))


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
