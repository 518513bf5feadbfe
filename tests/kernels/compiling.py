"""Compile kernels for a GPU that this machine does not have: `python compiling.py ARCHITECTURE SET ...`, e.g. `80 narrow
wide`.

Sets of shapes:
    narrow, wide      heads of width 64 and 128, for which the kernels are tuned; together they cover every kernel
    wider             wider heads, which have not been timed
    corners           the limits of the supported shapes
    documents         packed documents
    two_selections    two variants of the block selection kernel
    in_parallel       the same two, compiled in parallel
    lengths           compile nothing; count which kernels other lengths would compile again
    translate         the kernels of `narrow` in Triton's own representation only, which takes a fifth of the time
    cached_launches   compile nothing; compare the launches of `fast_launch` with Triton's own
    first_calls       count the kernels of first calls that are compiled in parallel and one by one

Prints the shared memory of each kernel in bytes, or the counts, as JSON.

The launchers run unchanged on CPU tensors. Triton gets a fake driver with the given architecture, compiles, and launches
nothing. This does not work under the interpreter.
"""

from __future__ import annotations

import functools
import itertools
import json
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from nsa_lab.attention import Span, kernels, selection_loss
from nsa_lab.attention.dispatch import ResolvedBackend
from nsa_lab.attention.geometry import num_compressed, num_selection
from nsa_lab.attention.kernels import fast_launch, launch_table
from nsa_lab.attention.kernels.parallel_compile import compile_in_parallel
from nsa_lab.attention.kernels.selected import launch as selected
from nsa_lab.attention.kernels.selected import workspace_pieces
from nsa_lab.attention.kernels.selected.inverted_index import globalize_blocks
from nsa_lab.attention.key_storage import encode_keys
from nsa_lab.attention.layer_cache import CacheWriteBuffers, LayerCache
from nsa_lab.config import NSAConfig
from nsa_lab.model.ngrams import HASH_CONSTANTS

AMD = sys.argv[1].startswith("gfx")
TRITON = {"selection": ResolvedBackend("triton", "by name, where no kernel can run")}
ARCHITECTURE = 0 if AMD else int(sys.argv[1])
shared_memory: dict[str, int] = {}
# The device of the tensors is a CPU.
launch_table.supports_pdl = lambda device: ARCHITECTURE >= 90


class FakeDriver(DriverBase):
    def __init__(self) -> None:
        pass  # the base class would search for CUDA libraries

    is_active = staticmethod(lambda: True)
    map_python_to_cpp_type = get_benchmarker = set_current_device = None  # only needed to launch

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("hip", sys.argv[1], 64) if AMD else GPUTarget("cuda", ARCHITECTURE, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0


def compile_only(kernel: JITFunction, grid):
    def launch(*args, **options) -> None:
        compiled = kernel.run(*args, grid=grid, warmup=True, **options)
        name = compiled.metadata.name  # the name in a profile
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
    """Compile the operator, and the selected branch separately, forward and backward."""
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
    # Distinct and existing blocks, as the public function requires.
    slots = torch.arange(nsa.n_sel, dtype=torch.int32)
    blocks = torch.where(slots < num_selection(T, nsa), slots, -1).expand(1, T, G, -1).contiguous()
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
    capacity: int = 2000,
    has_indexer: bool = False,
) -> None:
    """Compile a decoding step of one sequence with a cache for `capacity` tokens."""
    nsa = nsa or NSAConfig()
    cache_rows = (num_compressed(capacity, nsa), capacity, nsa.w + S)
    cache = [torch.zeros(1, n, G, width, dtype=dtype) for n in cache_rows for width in (D, Dv or D)]
    index_q, k_index = (torch.zeros(1, n, G, D, dtype=dtype) if has_indexer else None for n in (S, capacity // nsa.d))
    indexer_nsa = nsa.model_copy(update={"l": nsa.d}) if has_indexer else None
    q, gates = torch.zeros(1, S, H, D, dtype=dtype), torch.zeros(1, S, H, 3, dtype=dtype)
    lengths = torch.zeros(1, dtype=torch.int32)
    layer_cache = LayerCache(*cache, k_index)
    kernels.cached_attention(q, gates, layer_cache, lengths, nsa, index_q=index_q, selection_nsa=indexer_nsa)
    # Views of one row, as the output of a projection.
    q_and_k, values = torch.zeros(1, S, (H + 3 * G) * D + 3 * G * (Dv or D), dtype=dtype).split((H + 3 * G) * D, dim=-1)
    rotary = torch.zeros(capacity, D // 2), torch.zeros(capacity, D // 2)
    raw_rings = [torch.zeros(1, nsa.l - 1 + 256, G, width, dtype=dtype) for width in (D, Dv or D)]
    q_and_k, values = q_and_k.unflatten(-1, (-1, D)), values.unflatten(-1, (-1, Dv or D))
    conv_args = {}
    if has_indexer:
        conv_args = {
            "k_before_conv": torch.zeros(1, 257, 3 * G, D, dtype=dtype),
            "conv_weight": torch.zeros(2, 3 * G, D, dtype=dtype),
        }
    kernels.rotate_and_append(
        q_and_k, values, rotary, lengths, CacheWriteBuffers(*raw_rings, *cache[2:]), **conv_args, can_prefetch=True
    )
    kernels.update_compressed(*raw_rings, *cache[:2], lengths, S, nsa, can_prefetch=True)
    if index_q is not None and k_index is not None and indexer_nsa is not None:
        pool = torch.zeros(D, D, dtype=dtype), torch.zeros(D, indexer_nsa.l, dtype=dtype)
        kernels.update_compressed(raw_rings[0], None, k_index, None, lengths, S, indexer_nsa, k_pool=pool)
        kernels.append_index(
            index_q.repeat(1, 1, 2, 1), rotary, lengths, raw_rings[0], k_index, indexer_nsa, pool=pool, rotates_tokens=True
        )
    tables = (torch.zeros(rows, width, dtype=dtype) for rows, width in ((300, 12 * D), (200, 9), (12 * D, 18)))
    latest, tokens = torch.zeros(1, 300, dtype=torch.int64), torch.zeros(1, S, dtype=torch.int64)
    kernels.embed_ngrams(tokens, latest, lengths, *tables, 100, HASH_CONSTANTS, 1e-5)
    x, norm = torch.zeros(1, S, 12 * D, dtype=dtype), (torch.zeros(12 * D, dtype=dtype), 1e-5)
    projections = [
        (torch.zeros(columns, 12 * D, dtype=dtype), activation) for columns, activation in ((H * D, ""), (3 * H, "sigmoid"))
    ]
    kernels.linear(x, *projections, norm=norm, can_prefetch=True)
    kernels.linear(x, (projections[0][0], "silu"), norm=norm, is_gated=True, can_prefetch=True)
    kernels.linear(x, projections[0], residual=torch.zeros(1, S, H * D, dtype=dtype))


def decode_selected(S: int, H: int, G: int, D: int, index_dtype: str, index_heads: int) -> None:
    """Compile a decoding step of the selected branch alone, with one index key per token for all groups."""
    nsa = NSAConfig(sink_blocks=0, local_blocks=9)
    indexer_nsa = nsa.model_copy(update={"l": 1, "d": 1})
    k_sel, v_sel = (torch.zeros(1, 2000, G, D, dtype=torch.bfloat16) for _ in range(2))
    q, index_q = (torch.zeros(1, S, heads, D, dtype=torch.bfloat16) for heads in (H, G * index_heads))
    k_index = encode_keys(torch.zeros(1, 2000, 1, D, dtype=torch.bfloat16), index_dtype).expand(-1, -1, G, -1)
    ring, norm = torch.zeros(1, 256, 1, D, dtype=torch.bfloat16), (torch.zeros(D, dtype=torch.bfloat16), 1e-5)
    rotary = torch.zeros(2000, D // 2), torch.zeros(2000, D // 2)
    stored = k_index[:, :, :1]
    for order in (True, False):
        lengths = torch.zeros(1, dtype=torch.int32)
        kernels.append_index(
            torch.zeros(1, S, G * index_heads + 1, D, dtype=torch.bfloat16), rotary, lengths, ring, stored, indexer_nsa,
            norm=norm, rotates_blocks=True, is_norm_first=order,
            k_before_conv=torch.zeros(1, 257, 1, D, dtype=torch.bfloat16),
            conv_weight=torch.zeros(2, 1, D, dtype=torch.bfloat16),
        )  # fmt: skip
    cache = LayerCache(k_sel=k_sel, v_sel=v_sel, k_index=k_index)
    lengths = torch.zeros(1, dtype=torch.int32)
    kernels.cached_attention(q, None, cache, lengths, nsa, index_q=index_q, selection_nsa=indexer_nsa)


def lean() -> None:
    """Compile forms without a compressed branch: indexers of one and more heads, and index keys in few bits."""
    for index_dtype, index_heads in itertools.product(("bf16", "fp8", "mxfp4"), (1, 4)):
        decode_selected(1, 12, 2, 64, index_dtype, index_heads)
    decode_selected(1, 32, 2, 128, "mxfp4", 1)
    for index_heads in (1, 4):
        rule = NSAConfig(l=1, d=1, sink_blocks=0, local_blocks=9, head_reduction="max", block_reduction="max")
        for index_nsa in (rule, NSAConfig(l=1, d=1)):
            kernels.select_blocks(
                torch.zeros(1, 300, 2 * index_heads, 64, dtype=torch.bfloat16),
                torch.zeros(1, 300, 2, 64, dtype=torch.bfloat16),
                None,
                index_nsa,
            )
    k = torch.zeros(1, 300, 2, 64, dtype=torch.bfloat16, requires_grad=True)
    q = torch.zeros(1, 300, 12, 64, dtype=torch.bfloat16, requires_grad=True)
    blocks = torch.zeros(1, 300, 2, 16, dtype=torch.int32).fill_(-1).index_fill(3, torch.tensor([0]), 0)
    kernels.nsa_attention(q, None, None, k, k, None, None, None, NSAConfig(), blocks=blocks).sum().backward()


def select(T: int, G: int, D: int, d: int, dtype: torch.dtype = torch.bfloat16) -> None:
    """Compile the block selection of an indexer and its loss: one head per group, a key for every d tokens."""
    q, k = (torch.zeros(1, n, G, D, dtype=dtype, requires_grad=True) for n in (T, T // d))
    k_sel = torch.zeros(1, T, G, D, dtype=dtype)
    nsa = NSAConfig(l=d, d=d)
    kernels.select_blocks(q, k, None, nsa)
    selection_loss(q, k, k_sel, nsa, attention_q=q.detach().repeat(1, 1, 6, 1), n_queries=5, backend=TRITON).backward()


# Ranges of lengths with equal launch decisions. Three lengths of a range compile all of its kernels.
CLASSES = ((1024, 2047), (2112, 4031), (4160, 16000))

driver.set_active(FakeDriver())
original_getitem = JITFunction.__getitem__
JITFunction.__getitem__ = compile_only
launch_table.is_amd = lambda: AMD
launch_table.is_hopper = lambda device: ARCHITECTURE == 90
launch_table.has_large_shared_memory = lambda device: ARCHITECTURE in (80, 90, 100)
launch_table.supports_pdl = lambda device: ARCHITECTURE >= 90
launch_table.is_blackwell = lambda device: ARCHITECTURE == 100


def narrow() -> None:
    # The only kernel that is used for packed documents and not otherwise.
    table = Span.packed(torch.tensor([0, 9, 20], dtype=torch.int32)).layout(NSAConfig(), torch.device("cpu")).bounds
    globalize_blocks(torch.zeros(1, 20, 1, 16, dtype=torch.int32), 64, table[0])
    attend(T=300, H=6, G=1, D=64)
    selected.UNION_TOKENS = 0
    attend(T=300, H=6, G=1, D=64)
    decode(S=1, H=6, G=1, D=64, has_indexer=True)
    decode(S=1, H=6, G=1, D=64, capacity=1024)  # all blocks can be selected
    select(T=300, G=2, D=64, d=2)


def wide() -> None:
    selected.UNION_TOKENS = 0
    workspace_pieces.SORT_ABOVE_BYTES = 0
    attend(T=320, H=32, G=2, D=128)  # a length that fills its tiles
    workspace_pieces.WORKSPACE_BYTES = 30 * 2**20  # several pieces
    attend(T=300, H=32, G=2, D=128)
    decode(S=8, H=32, G=2, D=128)
    decode(S=1, H=32, G=2, D=128, has_indexer=True)
    select(T=300, G=2, D=128, d=8)


def wider() -> None:
    attend(T=320, H=16, G=2, D=192, Dv=256)
    selected.UNION_TOKENS = 0
    attend(T=320, H=16, G=2, D=256, Dv=128)
    attend(T=320, H=2, G=2, D=256, dtype=torch.float32)
    decode(S=1, H=16, G=2, D=192, Dv=128)
    decode(S=8, H=16, G=2, D=256)
    decode(S=8, H=16, G=2, D=256, dtype=torch.float32)
    select(T=320, G=2, D=256, d=8)
    select(T=320, G=2, D=256, d=1, dtype=torch.float32)
    for l_sel in (16, 96):  # tiles of 16 keys and of 32
        attend(T=200, H=1, G=1, D=256, nsa=NSAConfig(l=16, d=16, l_sel=l_sel, n_sel=4, w=32))
    for dtype in (torch.bfloat16, torch.float32):  # the maximum number of strides of a selection block
        attend(T=1100, H=4, G=2, D=256, nsa=NSAConfig(l=16, d=8, l_sel=128, n_sel=4, w=32), dtype=dtype)


def corners() -> None:
    """Compile different widths of keys and values, sizes that are not powers of two, and the other dtypes."""
    attend(130, 3, 1, 96, 32, NSAConfig(l=16, d=16, l_sel=48, n_sel=5, w=1), torch.float16)
    decode(3, 3, 1, 96, 32, NSAConfig(l=16, d=16, l_sel=48, n_sel=5, w=1), torch.float16, has_indexer=True)
    select(130, 1, 96, 16, torch.float16)


def documents() -> None:
    span = Span.packed(torch.tensor([0, 1, 170, 170, 300], dtype=torch.int32))
    attend(T=300, H=6, G=1, D=64, span=span)
    selected.UNION_TOKENS = 0
    attend(T=300, H=32, G=2, D=128, span=span)
    attend(300, 3, 1, 96, 32, NSAConfig(l=16, d=16, l_sel=48, n_sel=5, w=1), torch.float16, span)
    q, k = (torch.zeros(1, 300, heads, 64, dtype=torch.bfloat16, requires_grad=True) for heads in (4, 2))
    nsa = NSAConfig(l=1, d=1)
    kernels.select_blocks(q, k, None, nsa, span=span)
    selection_loss(q, k, k.detach(), nsa, n_queries=5, span=span, backend=TRITON).backward()


def lengths() -> None:
    """Count the kernels that a length compiles after three other lengths of its range."""
    compiled: set[tuple[str, str]] = set()
    is_warm = False

    def record_compile(*, key: Any, fn: Any, **_: Any) -> bool:
        """Record a kernel that Triton is about to compile, and prevent the compilation."""
        new = is_warm and (fn.name, str(key)) not in compiled
        shared_memory[fn.name] = shared_memory.get(fn.name, 0) + new
        compiled.add((fn.name, str(key)))
        return True

    triton.knobs.runtime.jit_cache_hook = record_compile
    JITFunction.__getitem__ = lambda kernel, grid: functools.partial(kernel.run, grid=grid, warmup=True)
    rng = random.Random(3)
    for low, high in CLASSES:
        # The last tile of keys is full or partial.
        for index, T in enumerate([low, low + 1, high, *(rng.randint(low, high) for _ in range(12))]):
            is_warm = index > 2
            attend(T, H=6, G=2, D=64)
            select(T, G=2, D=64, d=8)
            decode(S=1, H=6, G=2, D=64, capacity=T)
            decode(S=1, H=6, G=2, D=64, capacity=T, has_indexer=True)
            cu_seqlens = torch.tensor([0, 3, T // 2, T], dtype=torch.int32)
            attend(T, H=6, G=2, D=64, span=Span.packed(cu_seqlens, capacity=4, longest=high))


def translate() -> None:
    """Translate the kernels of `narrow` into Triton's own representation, and compile no further."""
    target = driver.active.get_current_target()

    def translate_kernel(kernel, key, signature, device, constexprs, options, attrs, warmup):
        backend, context = kernel.device_caches[device][3], ir.context()
        ir.load_dialects(context)
        backend.load_dialects(context)
        source = kernel.ASTSource(kernel, signature, constexprs, attrs)
        code = backend.get_codegen_implementation(options), backend.get_module_map()
        module = source.make_ir(target, options, *code, context)
        assert module.verify(), kernel
        translated = SimpleNamespace(metadata=SimpleNamespace(name=module.get_entry_func_name(), shared=0))
        kernel.device_caches[device][0][key] = translated
        return translated

    JITFunction._do_compile = translate_kernel
    narrow()


class RecordingKernel(CompiledKernel):
    """A kernel that is not compiled and records its launches."""

    function = packed_metadata = None

    def __init__(self) -> None:
        self.arguments: list[tuple[object, ...]] = []

    def run(self, *args) -> None:
        self.arguments.append(args[9:])  # after the grid, the stream, the function and its hooks

    def launch_metadata(self, *args) -> None:
        return None

    def _init_handles(self) -> None:
        pass


def cached_launches() -> None:
    """Count all launches, launches of a cached kernel, and launches that differ from Triton's in kernel or arguments."""
    JITFunction.__getitem__ = original_getitem
    recorded = defaultdict[Any, RecordingKernel](RecordingKernel)
    JITFunction._do_compile = lambda kernel, key, *args: kernel.device_caches[0][0].setdefault(key, recorded[kernel, key])
    launch, count = fast_launch.CachedLauncher._launch, Counter[str]()

    def find_launched_kernel(call: Callable[[], object]) -> tuple[RecordingKernel, tuple[object, ...]]:
        call()
        kernel = next(kernel for kernel in recorded.values() if kernel.arguments)
        return kernel, kernel.arguments.pop()

    def compare(self, grid, *args, **options) -> None:
        if not fast_launch.is_launch_enabled():  # parallel compilation before the first call of a kind
            return
        n_cached = len(self._compiled)
        kernel, actual = find_launched_kernel(lambda: launch(self, grid, *args, **options))
        triton_kernel, expected = find_launched_kernel(lambda: self.kernel[grid](*args, **options))
        is_same = kernel is triton_kernel and all(a is b or a == b for a, b in zip(actual, expected, strict=True))
        count.update(launches=1, cached=len(self._compiled) == n_cached, other=not is_same)

    fast_launch.CachedLauncher._launch = compare
    rng = random.Random(5)
    for T in (1, 2, 15, 16, 64, 127, 300, 300, 1024, 2047, 4160, 4160):
        attend(T, H=6, G=2, D=64)
        attend(T, H=rng.choice((2, 4)), G=1, D=rng.choice((32, 48, 96)), dtype=rng.choice((torch.float16, torch.float32)))
        decode(S=rng.choice((1, 3)), H=6, G=2, D=64, capacity=T + 64, has_indexer=rng.random() < 0.5)
        cu_seqlens = torch.tensor([0, 0, T // 2, T], dtype=torch.int32)
        attend(T, H=6, G=2, D=64, span=Span.packed(cu_seqlens, capacity=4, longest=T))
    # Addresses that are aligned to 4 and to 16 bytes, and rows that are not adjacent.
    wide = [torch.zeros(1, n, heads, 72, dtype=torch.bfloat16) for n, heads in ((300, 6), (17, 2), (17, 2))]
    for first in (0, 1, 2, 8, 0, 1, 2, 8):
        kernels.compressed_attention(*(x[..., first : first + 64] for x in wide), NSAConfig())
    shared_memory.update(count)


def first_calls() -> None:
    """Count the kernels of first calls that are compiled in parallel, and those that are compiled one by one."""
    from triton.runtime._async_compile import active_mode

    count = Counter(parallel=0, serial=0)
    triton.knobs.runtime.jit_post_compile_hook = lambda **_: count.update(["parallel" if active_mode.get() else "serial"])
    attend(T=300, H=6, G=2, D=64)
    attend(T=290, H=6, G=2, D=64)
    shared_memory.clear()
    shared_memory.update(count)


def two_selections() -> None:
    for D in (64, 32):
        q, k = (torch.zeros(1, n, 2, D, dtype=torch.bfloat16) for n in (300, num_compressed(300, NSAConfig())))
        kernels.select_blocks(q, k, torch.zeros(1, 300, 2), NSAConfig())


def in_parallel() -> None:
    """Compile the kernels of `two_selections` in parallel, and count them."""
    JITFunction.__getitem__ = original_getitem
    shared_memory["kernels"] = compile_in_parallel(two_selections, n_threads=2)


for name in sys.argv[2:]:
    globals()[name]()
print(json.dumps(shared_memory))
