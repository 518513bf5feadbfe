"""Random heads and geometries through every kernel, against float64: `python tests/kernels/shapes.py 200`.

Widths of keys and of values by themselves, up to 64 heads in a group, odd lengths, any block lengths that the kernels
take, three dtypes. Of each shape every part of `bench attention`, output, gradients and choice, is judged as it is there:
2 (outputs) and 3 (gradients) times what the same maths in plain low precision errs.

The second number is the most tokens of a sequence, the third the number of the first shape, the fourth the step from one to
the next: `shapes.py 20 999 3 10` is one of ten processes that share two hundred, each of which takes up to 10 GB of a
GPU's memory. Prints each shape with its worst part, and at the end the worst of every part, over what is allowed; exits
with 1 where one is above it.
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
    """B sequences of T tokens, G groups of h heads, keys D and values Dv wide."""

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


def draw_shape(number: int, most_tokens: int = MAX_TOKENS) -> RandomShape:
    """The shape of that number: the same on every machine."""
    draw = random.Random(number)
    d = draw.choice((1, 2, 3, 4, 5, 8, 12, 16, 16, 16, 32))
    step = math.lcm(L_SEL_STEP, d)
    most = min(LONGEST_BLOCK, STRIDES_LIMIT * d) // step  # blocks that the choice's kernel takes
    l_sel = step * draw.randint(1, max(most, 1))
    D, Dv = (WIDTH_STEP * draw.randint(1, WIDTH_LIMIT // WIDTH_STEP) for _ in "kv")
    return RandomShape(
        T=2 * draw.randint(0, (most_tokens - 1) // 2) + 1,
        B=draw.choice((1, 1, 2)),
        h=draw.choice(HEADS),
        G=draw.choice((1, 1, 2, 3)),
        D=D,
        Dv=draw.choice((D, Dv)),
        # Triton's interpreter multiplies bfloat16 wrongly.
        dtype=draw.choice((torch.bfloat16 if DEVICE.type == "cuda" else torch.float16, torch.float16, torch.float32)),
        nsa=NSAConfig(
            l=d * draw.choice((1, 2, 2, 3, 4)),
            d=d,
            l_sel=l_sel,
            n_sel=draw.randint(3, N_SEL_LIMIT),
            w=draw.choice((1, draw.randint(2, most_tokens), 512)),
        ),
    )


def compute_worst_errors(shape: RandomShape, seed: int) -> dict[str, float]:
    """Of each part's output, gradients and choice: the worst error over what is allowed."""
    choices = resolve_backend(DEVICE, shape.dtype, shape.nsa, backend="triton")
    sizes = shape.h * shape.G, shape.G, shape.D, shape.nsa, choices, DEVICE, shape.dtype
    found = {}
    for part in make_parts(shape.T, shape.B, *sizes, seed=seed, Dv=shape.Dv):
        told, passed = check_parity(part, part, shape.nsa)
        shares = {what: error / limit for what, (error, limit) in told.items()}
        name = part.name.split(",")[0]
        for what, share in shares.items():
            key = f"{name} {what}"
            found[key] = max(found.get(key, 0.0), share if math.isfinite(share) else math.inf)
        assert passed == all(share <= 1 for share in shares.values())
    return found


def main(count: int, most_tokens: int = MAX_TOKENS, first: int = 0, step: int = 1) -> int:
    worst: dict[str, float] = {}
    for number in range(first, first + step * count, step):
        shape = draw_shape(number, most_tokens)
        try:
            found = compute_worst_errors(shape, number)
        except Exception as error:  # noqa: BLE001 - the next shape may tell of another fault
            found = {f"{type(error).__name__}: {error}": math.inf}
        at = max(found, key=found.__getitem__)
        print(f"{number}: {shape}: {found[at]:.2f} {at}", flush=True)
        for what, share in found.items():
            worst[what] = max(worst.get(what, 0.0), share)
    print(f"{count} shapes: { {what: round(share, 2) for what, share in worst.items()} }", flush=True)
    return int(max(worst.values()) > 1)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
