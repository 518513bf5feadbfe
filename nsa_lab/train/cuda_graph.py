"""A step's gradients as CUDA graphs: the host launches once, however many kernels the step has.

It pays where the host is the slower of the two: small batches. The kernels, and so the numbers, are those of the plain
step. The optimiser stays outside, so that the update of a bad step can be skipped on the device without a second graph.

Documents that are told apart lie elsewhere in every batch, and all that kernels know of them are tensors which spans keep.
A graph is captured with spans of its own, which take over the documents of a batch before it is replayed. What a part of
the model asks the host about documents instead, a graph replays as it was answered at the capture, for ever and without a
sign: so each is held against a pass without one, over documents that it was not captured with, before it is used.
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

WARM_UP_PASSES = 3  # compilation, autotuning and workspaces must be over when the capture begins
# How far loss and gradient of a replay may be from those of a plain pass, in shares of their size. The kernels are the
# same: what differs is the order in which some of them add. Of other documents the loss is another by a hundredth. What the
# order is worth of a gradient is told by two plain passes, twice of which is allowed, and never more than half a hundredth.
# With weights as they start they were 6e-5 apart; a dense model was refused after 300 steps for .0022, its loss equal to
# the bit, and how far its plain passes were apart is not known.
ROUNDING_TOLERANCE = 1e-3
MAX_GRADIENT_TOLERANCE = 5e-3

Spans = Sequence[Span | None]
"""Of the micro-batches of a step; None where rows are read as one text."""
LossesAndGrads = tuple[Tensor, Sequence[Tensor | None]]
"""What a pass says, a vector, and its gradients."""


@dataclass(frozen=True)
class CapturedStep:
    """A graph, the tensors that it reads and those that it writes."""

    batch: Batch
    spans: Spans
    launch: Callable[[], None]
    losses: Tensor
    grads: list[Tensor | None]

    def replay(self, batch: Batch, spans: Spans) -> None:
        """Compute `loss` and `grads` of a batch with documents as `spans` have them."""
        for here, there in zip(self.batch[:3], batch[:3], strict=True):
            if here is not None and there is not None:
                here.copy_(there, non_blocking=True)
        for held, span in zip(self.spans, spans, strict=True):
            if held is not None and span is not None:
                held.replace_documents(span)
        self.launch()


class GradientGraphs:
    """Calls `gradients(batch, spans) -> loss`, which leaves `.grad` behind, as a graph.

    There is one for each size that documents are laid out for (`Span.laid_out`), captured when it first comes. A capture
    takes a few plain passes, in memory beside that of the graphs; these share theirs, but for the gradients, of which each
    has its own. All are of one stage: where another begins, they and their memory are let go. `warmed_up` is called just
    before the first capture of a stage, while the gradients of a warm-up are there.
    Gradients and loss live in the graphs' own memory and are overwritten by the next call, whichever graph it replays:
    nothing may set `.grad` to None.
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
        """The loss, a device tensor. Inputs, targets and weights of `batch` have the shapes of the first call of its
        `stage`; where its documents begin is what `spans` say.

        Raises ConfigError where a step cannot be captured, and where documents are told apart and a part of the model,
        replayed, does not compute those of the spans.
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
        assert inputs is not None and targets is not None, "a batch has both"
        own = Batch(inputs, targets, weights)
        # Of its own: they come to hold documents that are not those of their bounds.
        held = [copy.copy(span) for span in spans]
        others = [span and make_different_span(span) for span in spans]
        with use_side_stream(self._device):
            for _ in range(WARM_UP_PASSES):
                self._run_without_graph(own, held)
            # Before the capture, when no activations lie in the graph's memory; the gradients wait on the CPU.
            expected = [
                (self._run_without_graph(own, others).cpu(), self._get_gradients(device="cpu"))
                for _ in range(2 * any(others))
            ]
        if not self._captured_steps:
            self._after_warm_up()
        # Backward must find no gradients, so that it writes them instead of adding to what a replay left.
        self._clear_gradients()
        try:
            run, loss, self._pool = capture_graph(lambda: self._compute_gradients(own, held), self._pool)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise ConfigError(
                f"runtime.cuda_graph = True: a step cannot be captured ({str(error).splitlines()[0]}): a part of "
                "this model waits for the host or copies from it, as the backends torch and reference may; "
                "set cuda_graph: false, of runtime or of the stage"
            ) from error
        step = CapturedStep(own, held, run, loss, self._get_gradients())
        if expected:
            step.replay(own, others)
            _check_replay(step, *expected)
        return step

    def _run_without_graph(self, batch: Batch, spans: Spans) -> Tensor:
        self._clear_gradients()
        return self._compute_gradients(batch, spans)

    def _get_gradients(self, device: str | None = None) -> list[Tensor | None]:
        return [p.grad if p.grad is None or device is None else p.grad.to(device) for p in self._parameters]

    def release(self) -> None:
        """Set every gradient to None, and give back the graphs and the memory that they share."""
        # Gradients lie in the graphs' memory, which is free when nothing does.
        self._clear_gradients()
        self._captured_steps.clear()
        self._pool = self._stage = None

    def _clear_gradients(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None


@contextmanager
def use_side_stream(device: torch.device) -> Iterator[None]:
    """Where what is to be captured is rehearsed: after all that is queued, and before all that follows."""
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream(device).wait_stream(stream)


def capture_graph(run: Callable[[], Tensor], pool: Any) -> tuple[Callable[[], None], Tensor, Any]:
    """What replays `run`, the tensor that every replay fills anew, and the memory that the next graph is to share; `pool`
    is what the last one gave, None before the first.

    Graphs may share it in whatever order they are replayed, one at a time: none reads what another left there.
    """
    graph = torch.cuda.CUDAGraph()
    # thread_local: the thread that loads the next batch pins memory, which a global capture would forbid.
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        result = run()
    return graph.replay, result, graph.pool()


def _check_replay(step: CapturedStep, expected: LossesAndGrads, repeated: LossesAndGrads) -> None:
    """Raises ConfigError unless a replay left the loss, a vector of what is told, and the gradients of a plain pass, on the
    CPU, to what is rounding; `again` is another pass over the same."""
    allowed = min(max(ROUNDING_TOLERANCE, 2 * _compare_gradients(repeated, expected)), MAX_GRADIENT_TOLERANCE)
    found = step.losses, step.grads
    loss_apart = max(_compute_relative_difference([one], [other]) for one, other in zip(found[0], expected[0], strict=True))
    grads_apart = _compare_gradients(found, expected)
    if not (loss_apart <= ROUNDING_TOLERANCE and grads_apart <= allowed):  # not so of NaN either
        raise ConfigError(
            f"runtime.cuda_graph = True: replayed with other documents, a step's loss is {loss_apart:.2g} and its gradient "
            f"{grads_apart:.2g} of their size away from those of a step without a graph, where {ROUNDING_TOLERANCE:g} and "
            f"{allowed:.2g} are rounding: a part of this model asks the host where documents begin, as the backends torch "
            "and reference do; set cuda_graph: false, of runtime or of the stage"
        )


def _compare_gradients(actual: LossesAndGrads, expected: LossesAndGrads) -> float:
    return _compute_relative_difference(*([grad for grad in told[1] if grad is not None] for told in (actual, expected)))


def _compute_relative_difference(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Norm of the difference over the norm of what was wanted, of all tensors as one vector."""
    pairs = [(here, there.to(here.device)) for here, there in zip(actual, expected, strict=True)]
    difference, size = (_compute_norm(tensors) for tensors in ([a - b for a, b in pairs], [b for _, b in pairs]))
    return difference / max(size, sys.float_info.min)


def _compute_norm(tensors: Sequence[Tensor]) -> float:
    return float(torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(x.float()) for x in tensors])))
