"""Triton's interpreter with less to do: what it computes stays the same, call for call.

Triton 3.7 looks through its whole language for what to replace each time that a kernel calls a function,
though the launch has replaced all of it, and writes down a table of numpy's types for each value that it
makes. That was most of the time of interpreted kernels. Of what was left, half went into looking for integers
that overflow, for an assertion that is only made while debugging (the compiler for NVIDIA leaves both away),
and into describing the same few shapes again for each value.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

_HASTENED: list[Any] = []  # at most one entry


def hasten_interpreter(interpreter: Any) -> None:
    """Let ``triton.runtime.interpreter`` do it all once; a version of Triton without them stays as it is."""
    if interpreter in _HASTENED:
        return
    _HASTENED.append(interpreter)
    if all(hasattr(interpreter, name) for name in ("_patch_lang", "_LangPatchScope", "_get_np_dtype", "tl")):
        _patch_once_a_launch(interpreter)
        _keep_types(interpreter)
        _leave_overflows(interpreter)
        _keep_shapes(interpreter.tl)


def _patch_once_a_launch(interpreter: Any) -> None:
    patch, tl = interpreter._patch_lang, interpreter.tl
    callers: set[int] = set()
    patched: set[frozenset[str]] = set()

    class OfLaunch(interpreter._LangPatchScope):  # type: ignore[misc]
        """What a launch has replaced, and gives back at its end."""

        def restore(self) -> None:
            callers.clear()
            patched.clear()
            super().restore()

    def patch_once(fn: Any) -> Any:
        scope, caller = OfLaunch(), fn.__globals__
        if id(caller) in callers:
            return scope
        callers.add(id(caller))
        languages = frozenset(each.__name__ for each in caller.values() if each is tl or each is tl.core)
        if languages not in patched:
            patched.add(languages)
            scope._changes = patch(fn)._changes
        return scope

    interpreter._patch_lang = patch_once


def _keep_types(interpreter: Any) -> None:
    find, tl = interpreter._get_np_dtype, interpreter.tl
    found: dict[str, Any] = {}

    def of(dtype: Any) -> Any:
        """A scalar's type by its name; all pointers are alike."""
        scalar = dtype.scalar
        name = "pointer" if isinstance(scalar, tl.pointer_type) else scalar.name
        if name not in found:
            found[name] = find(scalar)
        return found[name]

    interpreter._get_np_dtype = of


def _leave_overflows(interpreter: Any) -> None:
    builder: Any = getattr(interpreter, "interpreter_builder", None)
    options: Any = getattr(builder, "options", None)
    if options is None or options.debug or not hasattr(options, "sanitize_overflow"):
        return
    builder.options = replace(options, sanitize_overflow=False)


def _keep_shapes(tl: Any) -> None:
    core = tl.core
    describe = core.block_type.__init__

    @cache
    def of_type(shape: tuple[int, ...]) -> tuple[Any, int, str]:
        """A block's shape, its number of elements, and what its name says of the shape."""
        described = core.block_type.__new__(core.block_type)
        describe(described, core.int32, list(shape))
        return described.shape, described.numel, str(described.shape)

    def describe_block(self: Any, element_ty: Any, shape: Sequence[Any]) -> None:
        sizes = tuple(shape.values if isinstance(shape, core.tuple) else shape)
        if any(type(size) is not int for size in sizes):  # constants, whose value is meant
            describe(self, element_ty, shape)
            return
        self.element_ty = element_ty
        self.shape, self.numel, words = of_type(sizes)
        self.name = f"<{words}, {element_ty}>"

    @cache
    def of_value(shape: tuple[int, ...]) -> tuple[Any, Any]:
        """The shape of a value and its number of elements."""
        count = 1
        for size in shape:
            count *= size
        return core.tuple([core.constexpr(size) for size in shape]), core.constexpr(count)

    def describe_value(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = of_value(tuple(type.shape.values) if type.is_block() else ())

    core.block_type.__init__ = describe_block
    core.tensor.__init__ = describe_value
