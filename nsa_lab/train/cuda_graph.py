"""A step's gradients as one CUDA graph: the host launches once, however many kernels the step has.

It pays where the host is the slower of the two: small batches. The kernels, and so the numbers, are those of the plain
step. The optimiser stays outside, so that the update of a bad step can be skipped on the device without a second graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

WARM_UP = 3  # compilation, autotuning and workspaces must be over when the capture begins


class GraphedGradients:
    """Calls `gradients(inputs, targets, weights) -> loss`, which leaves `.grad` behind, as a graph of the first call.

    `warmed_up` is called just before the capture, while the gradients of a warm-up are there.
    Gradients and loss live in the graph's own memory and are overwritten by the next call: nothing may set `.grad` to None.
    """

    def __init__(
        self,
        gradients: Callable[[Tensor, Tensor, Tensor | None], Tensor],
        parameters: Iterable[Tensor],
        device: torch.device,
        warmed_up: Callable[[], None] = lambda: None,
    ) -> None:
        self._gradients, self._parameters, self._device = gradients, list(parameters), device
        self._warmed_up = warmed_up
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, inputs: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
        """Token ids int64 `[n, T]` and weights, of the shapes of the first call; the loss, a device tensor."""
        if self._graph is None:
            self._graph = self._capture(inputs, targets, weights)
        self._inputs.copy_(inputs, non_blocking=True)
        self._targets.copy_(targets, non_blocking=True)
        if self._weights is not None and weights is not None:
            self._weights.copy_(weights, non_blocking=True)
        self._graph.replay()
        for parameter, grad in zip(self._parameters, self._grads, strict=True):
            parameter.grad = grad
        return self._loss

    def _capture(self, inputs: Tensor, targets: Tensor, weights: Tensor | None) -> torch.cuda.CUDAGraph:
        self._inputs, self._targets = (x.to(self._device, copy=True) for x in (inputs, targets))
        self._weights = None if weights is None else weights.to(self._device, copy=True)
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                self._clear()
                self._gradients(self._inputs, self._targets, self._weights)
        torch.cuda.current_stream(self._device).wait_stream(stream)
        self._warmed_up()
        # Backward must find no gradients, so that it writes them instead of adding to what a replay left.
        self._clear()
        graph = torch.cuda.CUDAGraph()
        # thread_local: the thread that loads the next batch pins memory, which a global capture would forbid.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self._loss = self._gradients(self._inputs, self._targets, self._weights)
        self._grads = [parameter.grad for parameter in self._parameters]
        return graph

    def _clear(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None
