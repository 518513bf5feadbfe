"""Triton's interpreter, without the work that it repeats: at every call of a device function it looks through the whole
language again for what to replace, for every value it builds the table of dtypes and the description of a shape anew, for
every sum of integers it asks whether it overflows and throws the answer away, and what it has no function of numpy for,
as the `xor` of a sort, it combines one number at a time. What it computes is the same.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np


def keep_what_it_repeats() -> None:
    """Once the tests are collected; nothing where no test has imported Triton, or it is a version with other insides."""
    interpreter: Any = sys.modules.get("triton.runtime.interpreter")
    if interpreter is None or not all(hasattr(interpreter, name) for name in ("_patch_lang", "_get_np_dtype")):
        return
    if interpreter._patch_lang.__module__ == __name__:
        return
    interpreter._patch_lang = _once_per_launch(interpreter)
    interpreter._get_np_dtype = _by_name(interpreter._get_np_dtype)
    _describe_each_shape_once(interpreter.tl.core)
    _xor_whole_arrays(interpreter)
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


def _describe_each_shape_once(core: Any) -> None:
    """Of values and of their types; only where they keep what is known here."""
    block, tensor = core.block_type, core.tensor
    pair = block(core.int32, [2])
    if {*vars(pair)} != {"element_ty", "shape", "numel", "name"}:
        return
    if {*vars(tensor(None, pair))} != {"handle", "shape", "numel", "type", "dtype"}:
        return
    new_block, new_tensor = block.__init__, tensor.__init__
    blocks: dict[Any, tuple[Any, Any]] = {}
    tensors: dict[Any, tuple[Any, Any]] = {}

    def describe_block(self: Any, element_ty: Any, shape: Any) -> None:
        key = tuple(shape)
        if key in blocks:
            self.element_ty = element_ty
            self.shape, self.numel = blocks[key]
            self.name = f"<{self.shape}, {element_ty}>"
            return
        new_block(self, element_ty, shape)
        if all(type(length) is int for length in key):
            blocks[key] = self.shape, self.numel

    def describe_tensor(self: Any, handle: Any, type: Any) -> None:
        key = tuple(type.shape) if type.is_block() else ()  # a list in Triton 3.2
        if key in tensors:
            self.handle, self.type, self.dtype = handle, type, type.scalar
            self.shape, self.numel = tensors[key]
            return
        new_tensor(self, handle, type)
        tensors[key] = self.shape, self.numel

    block.__init__, tensor.__init__ = describe_block, describe_tensor


def _xor_whole_arrays(interpreter: Any) -> None:
    """The exclusive or of integers, in whatever order they are combined, is one number."""
    combine, reduce = getattr(interpreter.tl.standard, "_xor_combine", None), interpreter.ReduceOps
    one_by_one = reduce.generic_reduce

    def generic_reduce(self: Any, values: Any) -> Any:
        if combine is None or self.combine_fn is not combine or self.axis is None:
            return one_by_one(self, values)
        return [
            self.to_tensor(np.bitwise_xor.reduce(value.handle.data, axis=self.axis, keepdims=self.keep_dims), value.dtype)
            for value in values
        ]

    reduce.generic_reduce = generic_reduce
