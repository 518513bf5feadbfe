"""Triton as far as this project calls it.

What happens inside a kernel has no types in Python: `triton.jit` compiles the function's text. Triton's own annotations say that
a kernel is called like the function it is made from; it is not, and no launch would check.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, overload

from triton import runtime as runtime

__version__: str

class Kernel(Protocol):
    """Launched from the host as `kernel[grid](*arguments, **constants_and_options)`, called by other kernels as it is."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]: ...
    def __call__(self, *arguments: Any) -> Any: ...

@overload
def jit(fn: Callable[..., Any]) -> Kernel: ...
@overload
def jit(
    *, do_not_specialize: Sequence[str] = (), repr: Callable[[Any], str] | None = None
) -> Callable[[Callable[..., Any]], Kernel]: ...
