"""Work done while Python still imports torch: the CUDA context, Triton's cache key, weights into the page
cache. And a part of torch that is not imported at all.

Each takes a third of a second to several and hardly any Python. Imports no torch. Failures are ignored:
the work is then done, and its error reported, where the result is needed.
"""

import ctypes
import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Thread
from types import ModuleType
from typing import Any

from vlfit.checkpoint.headers import shard_files
from vlfit.errors import VlfitError
from vlfit.machine.gpu import read_gpus
from vlfit.machine.host import read_host
from vlfit.machine.model import Gpu
from vlfit.units import MIB

_CHUNK = 4 * MIB  # of a file, read at a time
_PROBE = 4096  # bytes tested to decide whether a chunk is cached

# Shapes of operations, written in Python, for torch.compile and the meta device. With what it imports
# (torch._decomp, _refs, _prims) it is a third of importing the engine (docs/log.md).
_META_REGISTRATIONS = "torch._meta_registrations"
_COMPILER = "torch._dynamo"
_TESTED_TORCH = ("2.11.", "2.13.")

_gpus_before: list[tuple[Gpu, ...]] = []  # at most one entry


class _LazyModule(ModuleType):
    """Stands in for a module until an attribute of it is read, which imports it."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)  # what the import system asks of every module
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)


def defer_meta_registrations() -> None:
    """Make ``import torch`` import ``torch._meta_registrations`` only when something reads it.

    Does nothing if torch is imported already, is not installed, or is a version that this was not tested
    with. For a process that only runs the engine, which needs shapes on the meta device for views alone.
    """
    if "torch" in sys.modules:
        return
    from importlib.metadata import PackageNotFoundError, version

    with suppress(PackageNotFoundError):
        if version("torch").startswith(_TESTED_TORCH):
            sys.modules.setdefault(_META_REGISTRATIONS, _LazyModule(_META_REGISTRATIONS))


def leave_out_compiler() -> None:
    """Keep torch from importing ``torch._dynamo``, of which torch.compile is a part: two seconds and more.

    torch imports it to disable it for some functions of the meta device, which then run as they are. For a
    process that compiles nothing by torch, after torch was imported. Does nothing if ``torch._dynamo`` is
    imported already, or with a torch that this was not tested with.
    """
    import torch

    if torch.__version__.startswith(_TESTED_TORCH) and _COMPILER not in sys.modules:
        stub = ModuleType(_COMPILER)
        stub.disable = lambda function, *_, **__: function  # type: ignore[attr-defined]
        sys.modules[_COMPILER] = torch._dynamo = stub


def start_cuda_context(device: str) -> tuple[Gpu, ...]:
    """Start a thread that creates the CUDA context on ``device`` (``EngineOptions.device``) for torch.

    Returns the GPUs as they were before, whose free memory plans are based on; () for ``cpu``. Starts no
    thread if ``device`` is not among them, or torch is imported already or no CUDA build. Also calls
    ``defer_meta_registrations``, so only for a process that will run an engine.
    """
    defer_meta_registrations()
    if device == "cpu":
        return ()
    gpus = read_gpus()[0]
    _, _, number = device.partition(":")
    index = int(number) if number.isdecimal() else 0
    if index < len(gpus) and _torch_has_cuda():
        _gpus_before[:] = [gpus]
        # Not a daemon thread: a process that exits while CUDA starts may crash.
        Thread(target=_create_context, args=(index,), name="vlfit-cuda").start()
    return gpus


def import_triton(device: str) -> None:
    """Import Triton, and start a thread that hashes its files for the key of its kernel cache.

    Call it between ``start_cuda_context`` and ``take_gpus_before_context``: does nothing unless the former
    started its thread, and nothing for ``cpu`` or if Triton is imported already. Not while another thread
    imports: two threads that run Python slow each other down.
    """
    if device != "cpu" and _gpus_before and "triton" not in sys.modules:
        with suppress(Exception):
            importlib.import_module("triton")
            Thread(target=_read_triton, name="vlfit-triton").start()


def take_gpus_before_context() -> tuple[Gpu, ...]:
    """The GPUs as they were before ``start_cuda_context`` created a context, once: () at every later call.

    () too if it started no thread.
    """
    return _gpus_before.pop() if _gpus_before else ()


def gpus_at_start() -> tuple[Gpu, ...]:
    """The GPUs as ``start_cuda_context`` found them; read now if it was not called, or they were taken."""
    return _gpus_before[0] if _gpus_before else read_gpus()[0]


def has_cuda_build() -> bool:
    """Whether the torch that is installed is a CUDA build; does not import it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    return (Path(spec.origin).parent / "lib" / "libtorch_cuda.so").exists()


def read_ahead(folder: Path) -> None:
    """Start a thread that reads the weights in ``folder`` into the page cache, if all fit in free RAM.

    Does nothing if they do not, or cannot be found, and on systems without ``RWF_NOWAIT`` (other than Linux).
    """
    try:
        files = shard_files(folder)
        size = sum(file.stat().st_size for file in files)
    except (OSError, VlfitError):
        return
    if hasattr(os, "RWF_NOWAIT") and size <= read_host().ram_available:
        Thread(target=_read_ahead, args=(files,), name="vlfit-ahead", daemon=True).start()


def _create_context(index: int) -> None:
    # Before CUDA 12.2 the default loads all kernels of all libraries at once.
    os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")
    with suppress(OSError, AttributeError):
        cuda = ctypes.CDLL("libcuda.so.1")
        device, context = ctypes.c_int(), ctypes.c_void_p()
        if not cuda.cuInit(0) and not cuda.cuDeviceGet(ctypes.byref(device), index):
            cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)


def _torch_has_cuda() -> bool:
    """Whether torch is not imported yet and is a CUDA build."""
    return "torch" not in sys.modules and has_cuda_build()


def _read_triton() -> None:
    with suppress(Exception):
        from triton.runtime.cache import triton_key  # caches its result

        triton_key()


def _read_ahead(files: Sequence[Path]) -> None:
    buffer = bytearray(_CHUNK)
    with suppress(OSError):
        for file in files:
            descriptor = os.open(file, os.O_RDONLY)
            try:
                for start in _uncached_chunks(descriptor, file.stat().st_size):
                    os.preadv(descriptor, [buffer], start)
            finally:
                os.close(descriptor)


def _uncached_chunks(descriptor: int, size: int) -> Iterator[int]:
    """Offsets of chunks whose first bytes are not in the page cache."""
    first = bytearray(_PROBE)
    for start in range(0, size, _CHUNK):
        try:
            os.preadv(descriptor, [first], start, os.RWF_NOWAIT)
        except BlockingIOError:
            yield start
