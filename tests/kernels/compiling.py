"""Compiles kernels for a GPU that is not there: `python compiling.py 80 narrow wide`. `narrow` and `wide` are heads of 64
and of 128, the shapes that kernels are tuned for, and together every kernel; `wider`, heads that nobody timed; `corners`,
the ends of what they take; `documents`, packed rows.

Prints the bytes of shared memory of each kernel, as JSON.

The launchers run as they are, on CPU tensors; Triton is told of a device of that architecture, compiles, and launches
nothing. Not under the interpreter.
"""

from __future__ import annotations

import json
import sys

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from nsa_lab.attention import Span, kernels
from nsa_lab.attention.decoding import LayerCache
from nsa_lab.attention.geometry import num_compressed
from nsa_lab.attention.kernels import launch_table
from nsa_lab.attention.kernels.documents import raw_bounds
from nsa_lab.attention.kernels.selected import launch as selected
from nsa_lab.attention.kernels.selected import pieces
from nsa_lab.attention.kernels.selected.inverted_index import number_blocks
from nsa_lab.config import NSAConfig

ARCHITECTURE = int(sys.argv[1])
shared_memory: dict[str, int] = {}


class AbsentDevice(DriverBase):
    def __init__(self) -> None:
        pass  # the parent's looks for CUDA's libraries

    is_active = staticmethod(lambda: True)
    map_python_to_cpp_type = get_benchmarker = set_current_device = None  # what only a launch would ask for

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", ARCHITECTURE, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0


def compile_only(kernel: JITFunction, grid):
    def launch(*args, **options) -> None:
        compiled = kernel.run(*args, grid=grid, warmup=True, **options)
        name = compiled.metadata.name  # what a profile shows
        shared_memory[name] = max(shared_memory.get(name, 0), compiled.metadata.shared)

    return launch


def attend(
    T: int,
    H: int,
    G: int,
    D: int,
    Dv: int | None = None,
    nsa: NSAConfig | None = None,
    dtype: torch.dtype = torch.bfloat16,
    span: Span | None = None,
) -> None:
    """The whole operator and the selected branch on its own, forward and backward."""
    nsa = nsa or NSAConfig()
    compressed = num_compressed(T, nsa) if span is None else span.num_compressed(nsa)
    widths = (D, Dv or D)
    q, *kv = (
        torch.zeros(1, length, heads, width, dtype=dtype, requires_grad=True)
        for length, heads, width in (
            (T, H, D),
            *((compressed, G, width) for width in widths),
            *((T, G, width) for width in widths * 2),
        )
    )
    gates = torch.zeros(1, T, H, 3, dtype=dtype, requires_grad=True)
    kernels.nsa_attention(q, *kv, gates, nsa, span=span).sum().backward()
    blocks = torch.zeros(1, T, G, nsa.n_sel, dtype=torch.int32)
    kernels.selected_attention(q, *kv[2:4], blocks, nsa, span=span)[0].sum().backward()


def decode(
    S: int,
    H: int,
    G: int,
    D: int,
    Dv: int | None = None,
    nsa: NSAConfig | None = None,
    dtype: torch.dtype = torch.bfloat16,
    *,
    indexed: bool = False,
) -> None:
    """A decoding step of one sequence."""
    nsa, capacity = nsa or NSAConfig(), 2000
    rows = (num_compressed(capacity, nsa), capacity, nsa.w + S)
    cache = [torch.zeros(1, n, G, width, dtype=dtype) for n in rows for width in (D, Dv or D)]
    index_q, k_index = (torch.zeros(1, n, G, D, dtype=dtype) if indexed else None for n in (S, capacity // nsa.d))
    choice_nsa = nsa.model_copy(update={"l": nsa.d}) if indexed else None
    q, gates = torch.zeros(1, S, H, D, dtype=dtype), torch.zeros(1, S, H, 3, dtype=dtype)
    lengths = torch.zeros(1, dtype=torch.int32)
    kernels.cached_attention(q, gates, LayerCache(*cache, k_index), lengths, nsa, index_q=index_q, choice_nsa=choice_nsa)


driver.set_active(AbsentDevice())
JITFunction.__getitem__ = compile_only
launch_table.is_hopper = lambda device: ARCHITECTURE == 90
launch_table.is_roomy = lambda device: ARCHITECTURE in (80, 90, 100)
launch_table.is_blackwell = lambda device: ARCHITECTURE == 100


def narrow() -> None:
    # What documents alone need; the others they share with what has none.
    table = Span.packed(torch.tensor([0, 9, 20], dtype=torch.int32)).row_bounds(NSAConfig(), torch.device("cpu"))
    number_blocks(torch.zeros(1, 20, 1, 16, dtype=torch.int32), 64, raw_bounds(table, 16, 20))
    attend(T=300, H=6, G=1, D=64)
    selected.UNION_TOKENS = 0
    attend(T=300, H=6, G=1, D=64)
    decode(S=1, H=6, G=1, D=64, indexed=True)


def wide() -> None:
    selected.UNION_TOKENS = 0
    pieces.ORDERED_BYTES = 0
    attend(T=320, H=32, G=2, D=128)  # a length that fills its tiles
    pieces.WORKSPACE_BYTES = 30 * 2**20  # in pieces
    attend(T=300, H=32, G=2, D=128)
    decode(S=8, H=32, G=2, D=128)
    decode(S=1, H=32, G=2, D=128, indexed=True)


def wider() -> None:
    attend(T=320, H=16, G=2, D=192, Dv=256)
    selected.UNION_TOKENS = 0
    attend(T=320, H=16, G=2, D=256, Dv=128)
    attend(T=320, H=2, G=2, D=256, dtype=torch.float32)
    decode(S=1, H=16, G=2, D=192, Dv=128)
    decode(S=8, H=16, G=2, D=256)
    decode(S=8, H=16, G=2, D=256, dtype=torch.float32)


def corners() -> None:
    """Widths that differ, one no power of two; heads that are none, blocks that are none, and the other dtypes."""
    attend(130, 3, 1, 96, 32, NSAConfig(l=16, d=16, l_sel=48, n_sel=5, w=1), torch.float16)
    decode(3, 3, 1, 96, 32, NSAConfig(l=16, d=16, l_sel=48, n_sel=5, w=1), torch.float16, indexed=True)


def documents() -> None:
    span = Span.packed(torch.tensor([0, 1, 170, 170, 300], dtype=torch.int32))
    attend(T=300, H=6, G=1, D=64, span=span)
    selected.UNION_TOKENS = 0
    attend(T=300, H=32, G=2, D=128, span=span)
    attend(300, 3, 1, 96, 32, NSAConfig(l=16, d=16, l_sel=48, n_sel=5, w=1), torch.float16, span)


for shapes in sys.argv[2:]:
    {"narrow": narrow, "wide": wide, "wider": wider, "corners": corners, "documents": documents}[shapes]()
print(json.dumps(shared_memory))
