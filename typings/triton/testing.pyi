from collections.abc import Callable
from typing import Literal

def do_bench(
    fn: Callable[[], object],
    warmup: float = 25,
    rep: float = 100,
    return_mode: Literal["min", "max", "mean", "median"] = "mean",
) -> float:
    """Milliseconds of one call; `warmup` and `rep` are the milliseconds to spend."""
