"""Helpers of kernel launches: launch cache, PDL options, split-K counters, compile statistics, toolchain."""

import importlib.util
import logging
import os
import shutil
import sysconfig
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vlfit.checkpoint.quantization import INT4
from vlfit.errors import DeviceError
from vlfit.kernels.target import card_of, per_device
from vlfit.units import format_seconds

logger = logging.getLogger(__name__)

MAX_TILE_COUNTERS = 16384  # far above the tiles of any split GEMM: only small ones are split


# Compiled kernels take constants among their arguments, as ``LaunchCache`` relies on, from this version on.
_TRITON_WITH_CONSTANTS = (3, 4)
_INT32_LIMIT = 1 << 31


class KernelConstant:
    """Base of a dataclass that kernels take as a constant, and whose fields and properties they read.

    Triton finds compiled kernels on disk by the text of their constants. A dataclass's own text has its
    fields alone; then, after a property has changed, the kernel compiled before would still be found.
    """

    __slots__ = ()

    def __str__(self) -> str:
        """Every public attribute and property with its value."""
        values = {name: getattr(self, name) for name in dir(self) if not name.startswith("_")}
        said = ", ".join(f"{name}={value}" for name, value in values.items() if not callable(value))
        return f"{type(self).__name__}({said})"


def cache_launches(kernel: Any) -> Any:
    """Decorate a kernel made by ``triton.jit`` so that launching it again takes the host less time.

    A prompt launches hundreds of kernels one by one, and Triton binds and inspects all arguments of each.
    Returns ``kernel`` itself under Triton's interpreter, or a version before 3.4.
    """
    import triton
    from triton.runtime import JITFunction

    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    usable = isinstance(kernel, JITFunction) and version >= _TRITON_WITH_CONSTANTS
    return LaunchCache(kernel) if usable else kernel


class LaunchCache:
    """A Triton ``kernel`` that finds its compiled form by the little that Triton compiles it anew for.

    Called as the kernel is: ``cache[grid](*arguments, **constants)``, arguments in order and first, constants
    and options by name. The first launch of each combination goes through Triton; hooks of Triton's profiler
    see no other.
    """

    def __init__(
        self,
        kernel: Any,
        current_device: Callable[[], int] = torch.cuda.current_device,
        current_stream: Callable[[int], Any] | None = None,
    ) -> None:
        self.kernel = kernel
        self._current_device = current_device
        self._current_stream = current_stream or _current_raw_stream
        self._compiled: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, **constants: Any) -> None:
            self._launch(grid, arguments, constants)

        return launch

    def _launch(self, grid: tuple[int, ...], arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
        device = self._current_device()
        key: list[Any] = [device, *constants.items()]
        passed: list[Any] = []
        # Triton compiles anew for types, for addresses and integers divisible by 16, for 1, and for 64 bits.
        for argument in arguments:
            kind = type(argument)
            if kind is Tensor or isinstance(argument, Tensor):
                address = argument.data_ptr()
                key.append(argument.dtype)
                key.append(address & 15 == 0)
                passed.append(address)  # of a tensor, the launcher would ask the driver
                continue
            if kind is int:
                fits = -_INT32_LIMIT <= argument < _INT32_LIMIT
                key.append((argument & 15 == 0) + 2 * (argument == 1) + 4 * fits)
            else:
                key.append(kind)
            passed.append(argument)
        known = self._compiled.get(tuple(key))
        if known is None:
            compiled = self.kernel[grid](*arguments, **constants)
            values = tuple(constants[name] for name in self.kernel.arg_names[len(arguments) :])
            self._compiled[tuple(key)] = compiled, values
            return
        compiled, values = known
        x, y, z = (*grid, 1, 1)[:3]
        stream = self._current_stream(device)
        metadata = compiled.packed_metadata
        compiled.run(x, y, z, stream, compiled.function, metadata, None, None, None, *passed, *values)


# A torch without CUDA has no such function, and nothing to launch.
_current_raw_stream: Callable[[int], Any] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0)


def next_power_of_2(size: int) -> int:
    """The smallest power of two that is at least ``size`` (1 or more)."""
    return 1 << (size - 1).bit_length()


@per_device
def pdl_options(device: torch.device) -> dict[str, Any]:
    """Keyword arguments of a kernel launch that turn programmatic dependent launch on or off.

    On from compute capability 9.0. The kernel takes ``USE_PDL`` and waits as ``primitives.pdl_sync`` does.
    """
    card = card_of(device)
    if card is not None and card.capability >= (9, 0):
        return {"USE_PDL": True, "launch_pdl": True}
    return {"USE_PDL": False}


def triggers_late(rows: int, form: str, device: torch.device) -> bool:
    """Whether a product of 2 to 64 ``rows`` triggers the next launch late (``primitives.py``).

    ``form``: of quantized weights, "" for others. Chosen by steps of whole models on an H200 and on 30 of its
    multiprocessors (docs/log.md, 2026-11-29). 9 to 16 rows: late, except int4 with few multiprocessors. 2 to
    8 rows: early, except int4 with many multiprocessors, and 16 bits with few. More rows were not measured
    and are early; other formats were not, either, and are as FP8.
    """
    card = card_of(device)
    few = card is not None and card.has_few_multiprocessors
    if rows > 16:
        return False
    if form == INT4:
        return not few
    return rows > 8 or (few and not form)


@cache
def tile_counters(device: torch.device) -> Tensor:
    """Counters [MAX_TILE_COUNTERS] int32 for kernels in which several programs share an output tile or row.

    Each program increments the counter of its tile when it has finished; the last one resets it to 0. One
    tensor for all kernels on ``device``, so no two that use it may run at the same time.
    """
    return torch.zeros(MAX_TILE_COUNTERS, dtype=torch.int32, device=device)


@dataclass
class CompileStats:
    """Number of ``kernels`` compiled, without those found in Triton's cache, and ``seconds`` that took."""

    kernels: int = 0
    seconds: float = 0.0

    def record(self, *, times: Any, cache_hit: bool, **_: Any) -> None:
        """Triton's compilation listener: count one kernel, unless it was in the cache. Logs the first."""
        if cache_hit:
            return
        if not self.kernels:
            logger.info("compiling kernels for this card; later starts reuse Triton's cache")
        self.kernels += 1
        self.seconds += times.total / 1e6  # microseconds

    def log_summary(self) -> None:
        """Log how many kernels were compiled and how long it took; nothing if none were."""
        if self.kernels:
            logger.info("%d kernels compiled in %s", self.kernels, format_seconds(self.seconds))


def count_compilations(device: str) -> CompileStats:
    """Count the kernels that this process compiles from now on, in the object returned.

    Triton compiles a kernel for each combination of dtypes and constants and keeps it in a cache on disk; the
    first start on a card takes half a minute. Replaces Triton's compilation listener. The counts stay 0 if
    ``device`` (``EngineOptions.device``) is ``cpu``, no GPU is found, or Triton has no such listener.
    """
    compiled = CompileStats()
    if device == "cpu" or not torch.cuda.is_available():
        return compiled
    with suppress(ImportError, AttributeError):  # a Triton without a listener, or none
        from triton import knobs

        knobs.compilation.listener = compiled.record
    return compiled


def check_toolchain() -> None:
    """Check that this computer can build kernels: Triton, a C compiler and Python's headers.

    Triton compiles the kernels itself, but builds a small C extension to launch them, at the first launch.
    Raises ``DeviceError`` with what is missing and how to install it.
    """
    if importlib.util.find_spec("triton") is None:
        raise DeviceError(
            "Triton is not installed, and vlfit's GPU kernels need it",
            "Install it: pip install triton; CUDA builds of torch for Linux include it. Or use --device cpu.",
        )
    # As Triton looks for it (triton/runtime/build.py): CC, else gcc, else clang.
    cc = os.environ.get("CC")
    if not any(shutil.which(name) for name in (("gcc", "clang") if cc is None else (cc,))):
        cc_note = "" if cc is None else f" (CC is set to {cc!r})"
        raise DeviceError(
            f"no C compiler found{cc_note}; Triton needs one to launch kernels on a GPU",
            "Install one, as with sudo apt install gcc, or set CC to a compiler. Or use --device cpu.",
        )
    scheme = sysconfig.get_default_scheme()
    paths = sysconfig.get_paths("posix_prefix" if scheme == "posix_local" else scheme)
    headers = Path(paths["include"])
    if not (headers / "Python.h").exists():
        raise DeviceError(
            f"Python's headers are missing ({headers}/Python.h); Triton needs them to launch kernels",
            "Install those of this Python, as with sudo apt install python3-dev. Or use --device cpu.",
        )
