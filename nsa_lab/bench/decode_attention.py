"""Attention of one query per sequence over full caches: NSA and every dense attention here, checked, then timed.

On a GPU, each is timed as a CUDA graph of as many layers as fit, with a separate cache per layer, as in a decode step of a
model.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from nsa_lab.attention import Span, compress, geometry, reference
from nsa_lab.attention.cached_attention import cached_attention, cached_dense_attention
from nsa_lab.attention.layer_cache import LayerCache
from nsa_lab.bench.harness import RandomInputs, make_parity_note
from nsa_lab.bench.timing import describe_refusal, time_interleaved_ms, time_ms
from nsa_lab.config import NSAConfig

PARITY_LENGTHS = (1999, 700, 3)  # context lengths of three sequences in one batch
PARITY_FACTOR = 2.0  # limit as a multiple of the error of plain torch at the same dtype
MAX_LAYERS, MAX_TOKENS = 8, 2**21  # maximum layers in a graph, and tokens in all their caches


@dataclass(frozen=True)
class HeadSizes:
    """H query heads, G groups, head width D."""

    H: int
    G: int
    D: int

    def __str__(self) -> str:
        return f"H{self.H} G{self.G} d{self.D}"


@dataclass(frozen=True)
class QueryStep:
    """One new token at the end of each of `batch` sequences of `length` tokens, including the new one."""

    heads: HeadSizes
    nsa: NSAConfig
    length: int
    batch: int
    dtype: torch.dtype
    device: torch.device

    @property
    def n_layers(self) -> int:
        return max(1, min(MAX_LAYERS, MAX_TOKENS // (self.batch * self.length))) if self.device.type == "cuda" else 1

    @property
    def cached_lengths(self) -> Tensor:
        return torch.full((self.batch,), self.length - 1, dtype=torch.int32, device=self.device)

    def make_sparse_inputs(self) -> tuple[Tensor, Tensor, LayerCache, Tensor]:
        """Return the arguments of `cached_attention`: q, gates, cache, lengths before the new token."""
        h, B = self.heads, self.batch
        lengths = geometry.num_compressed(self.length, self.nsa), self.length, self.nsa.w
        normal = self._inputs.normal
        cache = LayerCache(*(normal(B, length, h.G, h.D) for length in lengths for _ in "kv"))
        return normal(B, 1, h.H, h.D), normal(B, 1, h.H, 3).sigmoid(), cache, self.cached_lengths

    def make_dense_inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return q [B, 1, H, D] and k, v [B, T, G, D]. On a GPU, k and v are stored per group, as its kernels prefer."""
        h, B = self.heads, self.batch
        normal = self._inputs.normal
        if self.device.type == "cuda":
            k, v = (normal(B, h.G, self.length, h.D).transpose(1, 2) for _ in "kv")
        else:
            k, v = (normal(B, self.length, h.G, h.D) for _ in "kv")
        return normal(B, 1, h.H, h.D), k, v

    @property
    def _inputs(self) -> RandomInputs:
        return RandomInputs(self.device, self.dtype)


@dataclass
class Contender:
    """An implementation (`kind`: nsa or dense) and its time. `ms`: one token for every sequence; None: see `note`."""

    kind: str
    name: str
    error: float
    limit: float
    ms: float | None = None
    note: str = ""


def time_contenders(step: QueryStep, backend: str, has_passed: bool = True) -> list[Contender]:
    """Check NSA with `backend` and every dense attention, and time those whose error is within its limit.

    `has_passed`: the result of `check_decode_parity`; if False, NSA is not timed.
    """
    contenders: list[Contender] = []
    runs: dict[str, Callable[[], object]] = {}
    sparse_inputs = [step.make_sparse_inputs() for _ in range(step.n_layers)]
    out = cached_attention(*sparse_inputs[-1], step.nsa, backend=backend)
    error, limit = compute_errors(out, sparse_inputs[-1], step.nsa, [step.batch - 1])
    contenders.append(Contender("nsa", backend, error, limit, note=make_parity_note(has_passed and error <= limit)))
    runs[backend] = lambda: [cached_attention(*layer, step.nsa, backend=backend) for layer in sparse_inputs]
    dense_inputs = [step.make_dense_inputs() for _ in range(step.n_layers)]
    for name, attend in list_dense_attentions(step):
        contenders.append(_check_dense(name, attend, dense_inputs[-1]))
        runs[name] = lambda attend=attend: [attend(*layer) for layer in dense_inputs]
    correct_runs = {contender.name: runs[contender.name] for contender in contenders if not contender.note}
    # Only triton runs without host synchronization, which CUDA graph capture requires.
    if step.device.type == "cuda" and backend == "triton":
        times = {name: time_ms(run, step.device) for name, run in correct_runs.items()}
    else:
        times = time_interleaved_ms(correct_runs, step.device)
    for contender in contenders:
        contender.ms = times[contender.name] / step.n_layers if contender.name in times else None
    return contenders


def check_decode_parity(
    heads: HeadSizes, nsa: NSAConfig, dtype: torch.dtype, device: torch.device, backend: str
) -> dict[str, Any]:
    """Return the largest error of `cached_attention` against the definition in float64, and its limit."""
    inputs = RandomInputs("cpu", torch.float32, seed=1)

    def normal(*shape: int) -> Tensor:
        return inputs.normal(*shape).to(device, dtype)

    batch, longest = len(PARITY_LENGTHS), max(PARITY_LENGTHS) + 1
    q, gates = normal(batch, 1, heads.H, heads.D), normal(batch, 1, heads.H, 3).sigmoid()
    k, v = (normal(batch, longest, heads.G, heads.D) for _ in range(2))
    k_cmp, v_cmp = (compress(normal(batch, longest, heads.G, heads.D), nsa) for _ in range(2))
    k_win, v_win = (normal(batch, nsa.w, heads.G, heads.D) for _ in range(2))
    lengths = torch.tensor(PARITY_LENGTHS, dtype=torch.int32, device=device)
    arguments = q, gates, LayerCache(k_cmp, v_cmp, k, v, k_win, v_win), lengths
    error, limit = compute_errors(cached_attention(*arguments, nsa, backend=backend), arguments, nsa, range(batch))
    return {"error": error, "limit": limit, "passed": error <= limit}


def compute_errors(
    out: Tensor, inputs: tuple[Tensor, Tensor, LayerCache, Tensor], nsa: NSAConfig, rows: Sequence[int]
) -> tuple[float, float]:
    """Return the largest error of the given rows (sequences) of `out` against the definition in float64, and its limit."""
    lengths = inputs[3]
    errors, plain_errors = [], []
    for b in rows:
        arguments, span = _read_sequence(inputs, b, nsa), Span.chunk(int(lengths[b]), 1)
        sequence = slice(b, b + 1)
        exact = _compute_reference([None if x is None else x.double() for x in arguments], nsa, span)
        errors.append((out[sequence] - exact).abs().max())
        plain_errors.append((_compute_reference(arguments, nsa, span) - exact).abs().max())
    # torch's max propagates NaN; Python's does not.
    return torch.stack(errors).max().item(), compute_limit(torch.stack(plain_errors).max().item())


def _read_sequence(inputs: tuple[Tensor, Tensor, LayerCache, Tensor], b: int, nsa: NSAConfig) -> list[Tensor | None]:
    """Return the arguments of `nsa_attention` for one sequence: its query, its cached keys and values, and its gates."""
    q, gates, cache, lengths = inputs
    sequence, n_tokens = slice(b, b + 1), int(lengths[b]) + 1
    rows: list[slice | Tensor] = [slice(geometry.num_compressed(n_tokens, nsa)), slice(n_tokens)]
    if cache.k_win is not None:
        # Unroll the ring buffer. Overwritten slots are outside of the window.
        rows.append(torch.arange(n_tokens, device=q.device) % cache.k_win.shape[1])
    branches = ((cache.k_cmp, cache.v_cmp), (cache.k_sel, cache.v_sel), (cache.k_win, cache.v_win))
    cached = [None if x is None else x[sequence, rows[index]] for index, pair in enumerate(branches) for x in pair]
    return [q[sequence], *cached, gates[sequence]]


def compute_limit(plain: float) -> float:
    """Return the allowed error, given the error of plain torch in the same dtype."""
    # The definition computes float32 inputs in float64, with a negligible error; hence the additive term.
    return PARITY_FACTOR * plain + 8 * torch.finfo(torch.float32).eps


def _compute_reference(inputs: Sequence[Tensor | None], nsa: NSAConfig, span: Span) -> Tensor:
    q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates = inputs
    assert q is not None
    return reference.nsa_attention(q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates, nsa, span=span)


def _check_dense(by: str, attend: Callable[..., Tensor], inputs: tuple[Tensor, Tensor, Tensor]) -> Contender:
    q, k, v = (x[-1:] for x in inputs)
    exact = _compute_plain_dense(q.double(), k.double(), v.double())
    limit = compute_limit((_compute_plain_dense(q, k, v) - exact).abs().max().item())
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            error = (attend(*inputs)[-1:] - exact).abs().max().item()
        except RuntimeError as reason:  # the kernel does not support these shapes
            return Contender(
                "dense", by, float("nan"), limit, note=describe_refusal(reason, [str(w.message) for w in warned])
            )
    for w in warned:
        warnings.warn_explicit(w.message, w.category, w.filename, w.lineno)
    return Contender("dense", by, error, limit, note=make_parity_note(error <= limit))


def _compute_plain_dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute dense attention in the dtype of the inputs: q [B, 1, H, D], k and v [B, T, G, D] -> [B, 1, H, D]."""
    grouped = q.unflatten(2, (k.shape[2], -1))
    p = torch.softmax(torch.einsum("bsghd,btgd->bsght", grouped, k) * q.shape[3] ** -0.5, -1)
    return torch.einsum("bsght,btgd->bsghd", p, v).flatten(2, 3)


def list_dense_attentions(step: QueryStep) -> Iterator[tuple[str, Callable[..., Tensor]]]:
    """Yield (name, run) of every dense attention of one query here, with the signature of `_compute_plain_dense`.

    SDPA gets the heads of a group as queries of one head, which reads each key once; and also runs with `enable_gqa`.
    """
    if step.device.type != "cuda":
        yield "SDPA", lambda q, k, v: cached_dense_attention(q, k, v, step.cached_lengths)
        return
    kernels = {"flash": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}
    kernels["efficient"] = SDPBackend.EFFICIENT_ATTENTION
    for name, kernel in kernels.items():
        yield f"SDPA {name}", _make_sdpa(kernel, grouped=True)
        yield f"SDPA {name}, enable_gqa", _make_sdpa(kernel, grouped=False)
    yield "these kernels, every key", _make_dense_kernel(step)


def _make_sdpa(kind: SDPBackend, *, grouped: bool) -> Callable[..., Tensor]:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads_first = q.transpose(1, 2)
        rows = torch.unflatten(heads_first.squeeze(2), 1, (k.shape[2], -1)) if grouped else heads_first
        with sdpa_kernel(kind):
            out = scaled_dot_product_attention(rows, k.transpose(1, 2), v.transpose(1, 2), enable_gqa=not grouped)
        return out.reshape(heads_first.shape).transpose(1, 2)

    return run


def _make_dense_kernel(step: QueryStep) -> Callable[..., Tensor]:
    """Return dense attention with this library's decoding kernels."""

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return cached_dense_attention(q, k, v, step.cached_lengths, backend="triton")

    return run
