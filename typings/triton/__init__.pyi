"""Triton as far as this project calls it.

The body of a kernel has no types that Python could name: `triton.jit` compiles its text. Triton's own annotations give a
kernel the signature of the function it is made from, which neither a launch nor a call from another kernel has.
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
