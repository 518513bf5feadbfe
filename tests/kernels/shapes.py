"""Compare random heads and geometries with float64 in every kernel: `python tests/kernels/shapes.py 200`.

Widths of keys and values are drawn independently, up to 64 heads per group, odd lengths, any block lengths that the kernels
support, and three dtypes. For each shape, every part of `bench attention` (output, gradients and selection) is checked with
the limits of that benchmark: 2 (outputs) and 3 (gradients) times the error of the same computation in plain low precision.

Arguments: number of shapes, maximum tokens of a sequence, number of the first shape, and the step from one to the next.
`shapes.py 20 999 3 10` is one of ten processes that share two hundred shapes; each takes up to 10 GB of GPU memory. Prints
each shape with its worst part and, at the end, the worst error of every part as a fraction of its limit. Exits with 1 if a
limit is exceeded.
"""

from __future__ import annotations

import math
import random
import sys
from typing import NamedTuple

import torch

from nsa_lab.attention import resolve_backend
from nsa_lab.attention.kernels import L_SEL_STEP, N_SEL_LIMIT, STRIDES_LIMIT, WIDTH_LIMIT, WIDTH_STEP
from nsa_lab.bench.attention_parity import check_parity
from nsa_lab.bench.attention_parts import make_parts
from nsa_lab.config import NSAConfig

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
MAX_TOKENS = 999
HEADS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 33, 48, 64)
LONGEST_BLOCK = 256


class RandomShape(NamedTuple):
    """B sequences of T tokens, G groups of h heads, key width D, value width Dv."""

    T: int
    B: int
    h: int
    G: int
    D: int
    Dv: int
    dtype: torch.dtype
    nsa: NSAConfig

    def __str__(self) -> str:
        n = self.nsa
        dtype = str(self.dtype).removeprefix("torch.")
        return (
            f"{self.T}x{self.B} h{self.h} G{self.G} {self.D}/{self.Dv} {dtype} "
            f"l{n.l} d{n.d} l_sel{n.l_sel} n_sel{n.n_sel} w{n.w}"
        )


def draw_shape(number: int, max_tokens: int = MAX_TOKENS) -> RandomShape:
    """Draw the shape with this number. It is the same on every machine."""
    rng = random.Random(number)
    d = rng.choice((1, 2, 3, 4, 5, 8, 12, 16, 16, 16, 32))
    step = math.lcm(L_SEL_STEP, d)
    max_blocks = min(LONGEST_BLOCK, STRIDES_LIMIT * d) // step  # limit of the selection kernel
    l_sel = step * rng.randint(1, max(max_blocks, 1))
    D, Dv = (WIDTH_STEP * rng.randint(1, WIDTH_LIMIT // WIDTH_STEP) for _ in "kv")
    return RandomShape(
        T=2 * rng.randint(0, (max_tokens - 1) // 2) + 1,
        B=rng.choice((1, 1, 2)),
        h=rng.choice(HEADS),
        G=rng.choice((1, 1, 2, 3)),
        D=D,
        Dv=rng.choice((D, Dv)),
        # Triton's interpreter multiplies bfloat16 wrongly.
        dtype=rng.choice((torch.bfloat16 if DEVICE.type == "cuda" else torch.float16, torch.float16, torch.float32)),
        nsa=NSAConfig(
            l=d * rng.choice((1, 2, 2, 3, 4)),
            d=d,
            l_sel=l_sel,
            n_sel=rng.randint(3, N_SEL_LIMIT),
            w=rng.choice((1, rng.randint(2, max_tokens), 512)),
        ),
    )


def compute_worst_errors(shape: RandomShape, seed: int) -> dict[str, float]:
    """Return the worst error of each part's output, gradients and selection, as a fraction of the limit."""
    backends = resolve_backend(DEVICE, shape.dtype, shape.nsa, backend="triton")
    sizes = shape.h * shape.G, shape.G, shape.D, shape.nsa, backends, DEVICE, shape.dtype
    worst = {}
    for part in make_parts(shape.T, shape.B, *sizes, seed=seed, Dv=shape.Dv):
        errors, passed = check_parity(part, part, shape.nsa)
        ratios = {quantity: error / limit for quantity, (error, limit) in errors.items()}
        name = part.name.split(",")[0]
        for quantity, ratio in ratios.items():
            key = f"{name} {quantity}"
            worst[key] = max(worst.get(key, 0.0), ratio if math.isfinite(ratio) else math.inf)
        assert passed == all(ratio <= 1 for ratio in ratios.values())
    return worst


def main(count: int, max_tokens: int = MAX_TOKENS, first: int = 0, step: int = 1) -> int:
    worst: dict[str, float] = {}
    for number in range(first, first + step * count, step):
        shape = draw_shape(number, max_tokens)
        try:
            errors = compute_worst_errors(shape, number)
        except Exception as error:  # noqa: BLE001 - continue with the other shapes
            errors = {f"{type(error).__name__}: {error}": math.inf}
        quantity = max(errors, key=errors.__getitem__)
        print(f"{number}: {shape}: {errors[quantity]:.2f} {quantity}", flush=True)
        for quantity, error_ratio in errors.items():
            worst[quantity] = max(worst.get(quantity, 0.0), error_ratio)
    print(f"{count} shapes: { {quantity: round(ratio, 2) for quantity, ratio in worst.items()} }", flush=True)
    return int(max(worst.values()) > 1)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
