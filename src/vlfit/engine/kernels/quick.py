"""Launching a kernel that was launched before, in a little less time than Triton takes to look it up.

A prompt is hundreds of kernels launched one by one, and Triton binds and examines all arguments anew each
time: on one host 16.0 us a launch became 14.2 (docs/log.md, by hand). Here the little that decides which
compiled kernel is meant is looked at, and that one is launched. Knows nothing of what kernels compute.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime import JITFunction

# Compiled kernels take constants among their arguments, as is relied on here, from this version on; an older
# Triton, and its interpreter, launch as they always do.
_FROM = (3, 4)
_SHORT = 1 << 31  # integers below it have 32 bits in a kernel


def quick(kernel: Any) -> Any:
    """``kernel``, made by ``triton.jit``, as it is called: ``kernel[grid](arguments..., constants by name)``.

    Arguments come first and in order, then constants and options by their names.
    """
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    return Quick(kernel) if isinstance(kernel, JITFunction) and version >= _FROM else kernel


class Quick:
    """Keeps what ``kernel`` was compiled to, by what Triton compiles it anew for."""

    def __init__(self, kernel: Any, device: Callable[[], int] = torch.cuda.current_device) -> None:
        self.kernel = kernel
        self._device = device
        self._known: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, **named: Any) -> None:
            key = (self._device(), *named.items(), *map(_kind, arguments))
            found = self._known.get(key)
            if found is None:
                compiled = self.kernel[grid](*arguments, **named)
                constants = tuple(named[name] for name in self.kernel.arg_names[len(arguments) :])
                self._known[key] = compiled, constants
                return
            compiled, constants = found
            compiled[(*grid, 1, 1)[:3]](*arguments, *constants)

        return launch


def _kind(argument: Any) -> Any:
    """What Triton compiles a kernel anew for: types, addresses and numbers that are multiples of 16, ones."""
    kind = type(argument)
    if kind is Tensor:  # not by isinstance, which torch carries out in Python for what is none
        return argument.dtype, argument.data_ptr() & 15 == 0
    if kind is int:
        return argument & 15 == 0, argument == 1, -_SHORT <= argument < _SHORT
    return kind
