"""Triton's interpreter, without the work that it repeats: at every call of a device function it looks through the whole
language again for what to replace, for every value it builds the table of dtypes anew, and for every sum of integers it
asks whether it overflows and throws the answer away. What it computes is the same.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
import types
from collections.abc import Callable
from typing import Any


def keep_what_it_repeats() -> None:
    """Once the tests are collected; nothing where no test has imported Triton, or it is a version with other insides."""
    interpreter: Any = sys.modules.get("triton.runtime.interpreter")
    if interpreter is None or not all(hasattr(interpreter, name) for name in ("_patch_lang", "_get_np_dtype")):
        return
    if interpreter._patch_lang.__module__ == __name__:
        return
    interpreter._patch_lang = _once_per_launch(interpreter)
    interpreter._get_np_dtype = _by_name(interpreter._get_np_dtype)
    options = interpreter.interpreter_builder.options
    # Without `debug`, `device_assert` drops the condition that it is given.
    if getattr(options, "sanitize_overflow", False) and not options.debug:
        interpreter.interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=False)


def _once_per_launch(interpreter: Any) -> Callable[[Any], Any]:
    """A device function finds the modules of the language as the kernel that calls it left them: replaced already."""
    patch, language = interpreter._patch_lang, (interpreter.tl, interpreter.tl.core)
    replaced: set[str] = set()

    class Scope:
        def __init__(self, fn: Any, names: frozenset[str]) -> None:
            self.scope, self.names = patch(fn), names - replaced
            replaced.update(names)

        def restore(self) -> None:
            self.scope.restore()
            replaced.difference_update(self.names)

    modules: dict[Any, frozenset[str]] = {}

    def patch_lang(fn: Any) -> Any:
        if fn not in modules:
            values = (value for value in fn.__globals__.values() if inspect.ismodule(value))
            modules[fn] = frozenset(value.__name__ for value in values if value in language)
        return types.SimpleNamespace(restore=lambda: None) if modules[fn] <= replaced else Scope(fn, modules[fn])

    return patch_lang


def _by_name(np_dtype: Callable[[Any], Any]) -> Callable[[Any], Any]:
    known: dict[str, Any] = {}

    def of(dtype: Any) -> Any:
        element = getattr(dtype, "element_ty", dtype) if type(dtype).__name__ == "block_type" else dtype
        if element.name not in known:
            known[element.name] = np_dtype(element)
        return known[element.name]

    return of
