"""Attention of one query per sequence over full caches: NSA beside every dense attention here, each checked first.

On a GPU each is timed as a CUDA graph of as many layers as fit, every one with a cache of its own: what a model's step is.
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
from nsa_lab.bench.timing import describe_refusal, time_interleaved_ms, time_ms
from nsa_lab.config import NSAConfig

PARITY_LENGTHS = (1999, 700, 3)  # tokens before the new one, of three sequences in one batch
PARITY_FACTOR = 2.0  # of the error that the same mathematics makes in plain torch at the same dtype
PARITY_FAILED = "FAILED PARITY: no speed"
MAX_LAYERS, MAX_TOKENS = 8, 2**21  # layers in a graph, and tokens of all their caches, at most


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
    """A new token at the end of each of `batch` sequences of `length` tokens, itself included."""

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

    def sample_normal(self, *shape: int) -> Tensor:
        return torch.randn(self.batch, *shape, device=self.device, dtype=self.dtype)

    def make_sparse_inputs(self) -> tuple[Tensor, Tensor, LayerCache, Tensor]:
        """What `cached_attention` takes."""
        h, rows = self.heads, (geometry.num_compressed(self.length, self.nsa), self.length, self.nsa.w)
        cache = LayerCache(*(self.sample_normal(n, h.G, h.D) for n in rows for _ in "kv"))
        return self.sample_normal(1, h.H, h.D), self.sample_normal(1, h.H, 3).sigmoid(), cache, self.cached_lengths

    def make_dense_inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """q [B, 1, H, D] and k, v [B, T, G, D], on a GPU in the order that its kernels like best: group by group."""
        h = self.heads
        if self.device.type == "cuda":
            k, v = (self.sample_normal(h.G, self.length, h.D).transpose(1, 2) for _ in "kv")
        else:
            k, v = (self.sample_normal(self.length, h.G, h.D) for _ in "kv")
        return self.sample_normal(1, h.H, h.D), k, v


@dataclass
class Contender:
    """`ms` is of one token of every sequence; None where it failed parity or does not run, as `note` says."""

    kind: str
    name: str
    error: float
    limit: float
    ms: float | None = None
    note: str = ""


def time_contenders(step: QueryStep, backend: str, has_passed: bool = True) -> list[Contender]:
    """NSA by `backend`, and every dense attention: what each errs, and the time of those that err no more than they may.

    `passed`: whether `parity` allows NSA a time at all.
    """
    found: list[Contender] = []
    runs: dict[str, Callable[[], object]] = {}
    sparse = [step.make_sparse_inputs() for _ in range(step.n_layers)]
    out = cached_attention(*sparse[-1], step.nsa, backend=backend)
    error, limit = compute_errors(out, sparse[-1], step.nsa, [step.batch - 1])
    found.append(Contender("nsa", backend, error, limit, note="" if has_passed and error <= limit else PARITY_FAILED))
    runs[backend] = lambda: [cached_attention(*layer, step.nsa, backend=backend) for layer in sparse]
    dense = [step.make_dense_inputs() for _ in range(step.n_layers)]
    for by, attend in list_dense_attentions(step):
        found.append(_check_dense(by, attend, dense[-1]))
        runs[by] = lambda attend=attend: [attend(*layer) for layer in dense]
    good = {one.name: runs[one.name] for one in found if not one.note}
    # What waits for the host cannot be captured.
    graphs = step.device.type == "cuda" and backend == "triton"
    took = {by: time_ms(run, step.device) for by, run in good.items()} if graphs else time_interleaved_ms(good, step.device)
    for one in found:
        one.ms = took[one.name] / step.n_layers if one.name in took else None
    return found


def check_decode_parity(
    heads: HeadSizes, nsa: NSAConfig, dtype: torch.dtype, device: torch.device, backend: str
) -> dict[str, Any]:
    """The largest error of `cached_attention` against the definition in float64, and what is allowed."""
    make = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=make).to(device, dtype)

    batch, longest = len(PARITY_LENGTHS), max(PARITY_LENGTHS) + 1
    q, gates = normal(batch, 1, heads.H, heads.D), normal(batch, 1, heads.H, 3).sigmoid()
    k, v = (normal(batch, longest, heads.G, heads.D) for _ in range(2))
    k_cmp, v_cmp = (compress(normal(batch, longest, heads.G, heads.D), nsa) for _ in range(2))
    k_win, v_win = (normal(batch, nsa.w, heads.G, heads.D) for _ in range(2))
    lengths = torch.tensor(PARITY_LENGTHS, dtype=torch.int32, device=device)
    inputs = q, gates, LayerCache(k_cmp, v_cmp, k, v, k_win, v_win), lengths
    error, limit = compute_errors(cached_attention(*inputs, nsa, backend=backend), inputs, nsa, range(batch))
    return {"error": error, "limit": limit, "passed": error <= limit}


def compute_errors(
    out: Tensor, inputs: tuple[Tensor, Tensor, LayerCache, Tensor], nsa: NSAConfig, rows: Sequence[int]
) -> tuple[float, float]:
    """The largest error of some sequences' `out` against the definition in float64, and what is allowed."""
    q, gates, cache, lengths = inputs
    ours, plain = [], []
    for b in rows:
        here, length = slice(b, b + 1), int(lengths[b])
        blocks = geometry.num_compressed(length + 1, nsa)
        # A ring, unrolled: what it no longer holds no window reaches.
        slots = torch.arange(length + 1, device=q.device) % cache.k_win.shape[1]
        raw = [cache.k_sel[here, : length + 1], cache.v_sel[here, : length + 1], cache.k_win[here, slots]]
        cut = [cache.k_cmp[here, :blocks], cache.v_cmp[here, :blocks], *raw, cache.v_win[here, slots]]
        told, span = [q[here], *cut, gates[here]], Span.chunk(length, 1)
        true = _compute_reference([x.double() for x in told], nsa, span)
        ours.append((out[here] - true).abs().max())
        plain.append((_compute_reference(told, nsa, span) - true).abs().max())
    # torch's largest is NaN where one is; Python's would pass over it.
    return torch.stack(ours).max().item(), _compute_limit(torch.stack(plain).max().item())


def _compute_limit(plain: float) -> float:
    # The definition computes float32 in float64, and then makes no error to speak of.
    return PARITY_FACTOR * plain + 8 * torch.finfo(torch.float32).eps


def _compute_reference(inputs: Sequence[Tensor], nsa: NSAConfig, span: Span) -> Tensor:
    q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates = inputs
    return reference.nsa_attention(q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates, nsa, span=span)


def _check_dense(by: str, attend: Callable[..., Tensor], inputs: tuple[Tensor, Tensor, Tensor]) -> Contender:
    q, k, v = (x[-1:] for x in inputs)
    true = _compute_plain_dense(q.double(), k.double(), v.double())
    limit = _compute_limit((_compute_plain_dense(q, k, v) - true).abs().max().item())
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            error = (attend(*inputs)[-1:] - true).abs().max().item()
        except RuntimeError as reason:  # a kernel that does not take these shapes says so here
            return Contender(
                "dense", by, float("nan"), limit, note=describe_refusal(reason, [str(w.message) for w in warned])
            )
    for w in warned:
        warnings.warn_explicit(w.message, w.category, w.filename, w.lineno)
    return Contender("dense", by, error, limit, note="" if error <= limit else PARITY_FAILED)


def _compute_plain_dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q [B, 1, H, D], k and v [B, T, G, D] -> [B, 1, H, D], in their dtype throughout."""
    grouped = q.unflatten(2, (k.shape[2], -1))
    p = torch.softmax(torch.einsum("bsghd,btgd->bsght", grouped, k) * q.shape[3] ** -0.5, -1)
    return torch.einsum("bsght,btgd->bsghd", p, v).flatten(2, 3)


def list_dense_attentions(step: QueryStep) -> Iterator[tuple[str, Callable[..., Tensor]]]:
    """(name, run) of every dense attention of one query here; `run` takes and gives what `_plain_dense` does.

    SDPA gets the heads of a group as that many queries of one head, which reads keys once; its own way with groups beside.
    """
    if step.device.type != "cuda":
        yield "SDPA", lambda q, k, v: cached_dense_attention(q, k, v, step.cached_lengths)
        return
    kinds = {"flash": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}
    kinds["efficient"] = SDPBackend.EFFICIENT_ATTENTION
    for name, kind in kinds.items():
        yield f"SDPA {name}", _make_sdpa(kind, grouped=True)
        yield f"SDPA {name}, enable_gqa", _make_sdpa(kind, grouped=False)
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
    """Our own kernels."""

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return cached_dense_attention(q, k, v, step.cached_lengths, backend="triton")

    return run
