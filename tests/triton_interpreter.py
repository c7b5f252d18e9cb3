"""Triton's interpreter with less to do: what it computes stays the same, call for call.

Triton 3.7 looks through its whole language for what to replace each time that a kernel calls a function,
though the launch has replaced all of it, and writes down a table of numpy's types for each value that it
makes. That was most of the time of interpreted kernels.
"""

from typing import Any

_HASTENED: list[Any] = []  # at most one entry


def hasten_interpreter(interpreter: Any) -> None:
    """Let ``triton.runtime.interpreter`` do both once; a version of Triton without them stays as it is."""
    if interpreter in _HASTENED:
        return
    _HASTENED.append(interpreter)
    if all(hasattr(interpreter, name) for name in ("_patch_lang", "_LangPatchScope", "_get_np_dtype", "tl")):
        _patch_once_a_launch(interpreter)
        _keep_types(interpreter)


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
