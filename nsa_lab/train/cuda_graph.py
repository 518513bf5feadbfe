"""Forward and backward pass of a step as CUDA graphs: one launch by the host for all kernels of the step.

Graphs help when the host is the bottleneck, which is the case for small batches. They run the same kernels as a step
without a graph, so the results agree up to the order of additions. The optimizer runs outside the graph, so that a bad
update can be skipped on the device without a second graph.

With document masking, every batch has other document boundaries. Kernels read them only from tensors that the spans
cache. A graph is captured with its own spans; before a replay, the documents of the batch are copied into these tensors.
If a part of the model reads the boundaries on the host instead, the replay silently repeats the values of the capture.
Each graph is therefore checked, before its first use, against a pass without a graph on documents that it was not
captured with.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nsa_lab.attention import Span
from nsa_lab.attention.dense import force_single_call
from nsa_lab.config import ConfigError, StageConfig
from nsa_lab.data import Batch
from nsa_lab.train.packing import make_different_span

WARM_UP_PASSES = 3  # compilation, autotuning and allocation of workspaces must be complete before the capture
# Maximum relative difference of loss and gradient between a replay and a pass without a graph. The kernels are the same;
# only the order of some additions differs. With other documents the loss differs by about 1e-2. The rounding error of the
# gradient is estimated from two passes without a graph; twice their difference is allowed, at most
# MAX_GRADIENT_TOLERANCE. It was 6e-5 with initial weights. A dense model was refused after 300 steps at 2.2e-3 although
# its loss was equal bit for bit; the difference between its two passes was not recorded.
ROUNDING_TOLERANCE = 1e-3
MAX_GRADIENT_TOLERANCE = 5e-3

Spans = Sequence[Span | None]
"""One span per micro-batch of a step; None without document masking."""
LossesAndGrads = tuple[Tensor, Sequence[Tensor | None]]
"""Vector of losses returned by a pass, and the gradients of all parameters."""


@dataclass(frozen=True)
class CapturedStep:
    """A CUDA graph, the tensors that it reads (`batch`, `spans`) and those that it writes (`losses`, `grads`)."""

    batch: Batch
    spans: Spans
    launch: Callable[[], None]
    losses: Tensor
    grads: list[Tensor | None]

    def replay(self, batch: Batch, spans: Spans) -> None:
        """Compute `losses` and `grads` of `batch`, with the documents of `spans`."""
        for own, new in zip(self.batch[:3], batch[:3], strict=True):
            if own is not None and new is not None:
                own.copy_(new, non_blocking=True)
        for own_span, span in zip(self.spans, spans, strict=True):
            if own_span is not None and span is not None:
                own_span.replace_documents(span)
        self.launch()


class GradientGraphs:
    """Runs `compute_gradients(batch, spans) -> losses`, which writes `.grad`, as a CUDA graph.

    There is one graph per `Span.graph_key` of the micro-batches, captured on first use. A capture runs a few passes
    without a graph, in memory outside the graph pool. All graphs share one pool, except that each has its own gradients.
    All graphs belong to one stage; when another stage begins, they and their memory are released. `after_warm_up` is
    called just before the first capture of a stage, while the gradients of the warm-up exist.

    Gradients and losses are in the graphs' memory. The next call overwrites them, whichever graph it replays, so nothing
    else may set `.grad` to None.
    """

    def __init__(
        self,
        compute_gradients: Callable[[Batch, Spans], Tensor],
        parameters: Iterable[Tensor],
        device: torch.device,
        after_warm_up: Callable[[], None] = lambda: None,
    ) -> None:
        self._compute_gradients, self._parameters, self._device = compute_gradients, list(parameters), device
        self._after_warm_up = after_warm_up
        self._captured_steps: dict[Hashable, CapturedStep] = {}
        self._pool: Any = None
        self._stage: StageConfig | None = None

    def __call__(self, batch: Batch, spans: Spans, stage: StageConfig) -> Tensor:
        """Return the losses of `batch`, a device tensor.

        Inputs, targets and weights have the shapes of the first call of this `stage`; the documents are those in `spans`.
        Raises `ConfigError` if a step cannot be captured, or if a part of the model ignores the documents of `spans` when
        it is replayed.
        """
        if stage != self._stage:
            self.release()
            self._stage = stage
        layout = tuple(span and span.graph_key for span in spans)
        if layout not in self._captured_steps:
            with force_single_call():
                self._captured_steps[layout] = self._capture(batch, spans)
        step = self._captured_steps[layout]
        step.replay(batch, spans)
        for parameter, grad in zip(self._parameters, step.grads, strict=True):
            parameter.grad = grad
        return step.losses

    def _capture(self, batch: Batch, spans: Spans) -> CapturedStep:
        inputs, targets, weights = (x if x is None else x.to(self._device, copy=True) for x in batch[:3])
        assert inputs is not None and targets is not None, "a batch has inputs and targets"
        own_batch = Batch(inputs, targets, weights)
        # Copies, because replays overwrite their documents.
        own_spans = [copy.copy(span) for span in spans]
        different_spans = [span and make_different_span(span) for span in spans]
        with use_side_stream(self._device):
            for _ in range(WARM_UP_PASSES):
                self._run_without_graph(own_batch, own_spans)
            # Run before the capture, while the graph pool holds no activations; keep these gradients on the CPU.
            expected = [
                (self._run_without_graph(own_batch, different_spans).cpu(), self._get_gradients(device="cpu"))
                for _ in range(2 * any(different_spans))
            ]
        if not self._captured_steps:
            self._after_warm_up()
        # Without existing gradients, backward writes them instead of adding to the result of the previous replay.
        self._clear_gradients()
        try:
            launch, loss, self._pool = capture_graph(lambda: self._compute_gradients(own_batch, own_spans), self._pool)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise ConfigError(
                f"runtime.cuda_graph = True: a step cannot be captured ({str(error).splitlines()[0]}): a part of "
                "this model synchronizes with the host or copies from it, as the backends torch and reference may; "
                "set cuda_graph: false in runtime or in the stage"
            ) from error
        step = CapturedStep(own_batch, own_spans, launch, loss, self._get_gradients())
        if expected:
            step.replay(own_batch, different_spans)
            _check_replay(step, *expected)
        return step

    def _run_without_graph(self, batch: Batch, spans: Spans) -> Tensor:
        self._clear_gradients()
        return self._compute_gradients(batch, spans)

    def _get_gradients(self, device: str | None = None) -> list[Tensor | None]:
        return [p.grad if p.grad is None or device is None else p.grad.to(device) for p in self._parameters]

    def release(self) -> None:
        """Set all gradients to None and free the graphs and their memory pool."""
        # Gradients are in the graphs' memory pool, which is freed only when no tensor uses it.
        self._clear_gradients()
        self._captured_steps.clear()
        self._pool = self._stage = None

    def _clear_gradients(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None


@contextmanager
def use_side_stream(device: torch.device) -> Iterator[None]:
    """Run the warm-up of a capture on a side stream, ordered after queued work and before later work."""
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream(device).wait_stream(stream)


def capture_graph(run: Callable[[], Tensor], pool: Any) -> tuple[Callable[[], None], Tensor, Any]:
    """Capture `run`. Return the replay function, its output tensor, and the memory pool for the next graph.

    Every replay overwrites the output tensor. `pool`: the pool returned by the previous capture, None for the first.
    Graphs that share a pool can be replayed in any order, one at a time, because no graph reads what another one wrote.
    """
    graph = torch.cuda.CUDAGraph()
    # thread_local: the data-loading thread pins memory meanwhile, which a global capture would forbid.
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        result = run()
    return graph.replay, result, graph.pool()


def _check_replay(step: CapturedStep, expected: LossesAndGrads, repeated: LossesAndGrads) -> None:
    """Raise `ConfigError` unless the replayed losses and gradients match `expected` up to rounding.

    `expected` and `repeated` are losses and gradients, on the CPU, of two passes without a graph on the same batch.
    """
    allowed = min(max(ROUNDING_TOLERANCE, 2 * _compare_gradients(repeated, expected)), MAX_GRADIENT_TOLERANCE)
    actual = step.losses, step.grads
    loss_difference = max(
        _compute_relative_difference([loss], [expected_loss])
        for loss, expected_loss in zip(actual[0], expected[0], strict=True)
    )
    grad_difference = _compare_gradients(actual, expected)
    if not (loss_difference <= ROUNDING_TOLERANCE and grad_difference <= allowed):  # also fails for NaN
        raise ConfigError(
            "runtime.cuda_graph = True: a step replayed with other documents differs from a step without a graph: "
            f"relative difference of the loss {loss_difference:.2g} (allowed {ROUNDING_TOLERANCE:g}), of the gradient "
            f"{grad_difference:.2g} (allowed {allowed:.2g}). A part of this model reads document boundaries on the host, "
            "as the backends torch and reference do; set cuda_graph: false in runtime or in the stage"
        )


def _compare_gradients(actual: LossesAndGrads, expected: LossesAndGrads) -> float:
    return _compute_relative_difference(
        *([grad for grad in result[1] if grad is not None] for result in (actual, expected))
    )


def _compute_relative_difference(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the norm of the difference divided by the norm of `expected`, over all tensors as one vector."""
    pairs = [(x, y.to(x.device)) for x, y in zip(actual, expected, strict=True)]
    difference, size = (_compute_norm(tensors) for tensors in ([a - b for a, b in pairs], [b for _, b in pairs]))
    return difference / max(size, sys.float_info.min)


def _compute_norm(tensors: Sequence[Tensor]) -> float:
    return float(torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(x.float()) for x in tensors])))
