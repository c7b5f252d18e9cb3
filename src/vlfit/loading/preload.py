"""What a start can do while Python still imports torch: CUDA's context, what Triton knows its kernels by, and
files of weights into RAM.

Each takes a third of a second to several, and hardly any Python. Knows the driver's own calls and the page
cache. Imports no torch. It is a favour: what does not work here is left to whoever needs it, who says why.
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

from vlfit.checkpoint.headers import shard_files
from vlfit.errors import VlfitError
from vlfit.machine.gpu import read_gpus
from vlfit.machine.host import read_host
from vlfit.machine.model import Gpu
from vlfit.units import MIB

_PIECE = 4 * MIB  # of a file, read at a time
_LOOKED_AT = 4096  # bytes whose being in RAM stands for a piece

_before: list[tuple[Gpu, ...]] = []  # one look, until it is taken


def make_context(device: str) -> tuple[Gpu, ...]:
    """Begin to make CUDA's context on ``device`` (as in ``EngineOptions``), which torch will find and use.

    Gives the GPUs as they are before that: what is planned, is planned for that. None for a CPU. For a
    process that does nothing else.
    """
    if device == "cpu":
        return ()
    gpus = read_gpus()[0]
    _, _, number = device.partition(":")
    index = int(number) if number.isdecimal() else 0
    if index < len(gpus) and _torch_wants_one():
        _before[:] = [gpus]
        # No daemon: a process that ends while CUDA starts may crash.
        Thread(target=_make_context, args=(index,), name="vlfit-cuda").start()
    return gpus


def import_triton(device: str) -> None:
    """Import Triton if kernels will run, and begin to take the fingerprint of all its files, which is part of
    the name of every kernel that it has kept.

    Not beside another import: two threads that run Python hinder each other more than one is ahead.
    """
    if device != "cpu" and _before and "triton" not in sys.modules:
        with suppress(Exception):
            importlib.import_module("triton")
            Thread(target=_read_triton, name="vlfit-triton").start()


def gpus_before() -> tuple[Gpu, ...]:
    """The GPUs as they were before ``make_context``, once; none for who did not begin so."""
    return _before.pop() if _before else ()


def read_ahead(folder: Path) -> None:
    """Begin to read the weights in ``folder`` into the page cache, if RAM has room for all of them."""
    try:
        files = shard_files(folder)
        size = sum(file.stat().st_size for file in files)
    except (OSError, VlfitError):
        return
    if hasattr(os, "RWF_NOWAIT") and size <= read_host().ram_available:
        Thread(target=_read_ahead, args=(files,), name="vlfit-ahead", daemon=True).start()


def _make_context(index: int) -> None:
    # Before CUDA 12.2 all kernels of all libraries would be loaded at once.
    os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")
    with suppress(OSError, AttributeError):
        cuda = ctypes.CDLL("libcuda.so.1")
        device, context = ctypes.c_int(), ctypes.c_void_p()
        if not cuda.cuInit(0) and not cuda.cuDeviceGet(ctypes.byref(device), index):
            cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)


def _torch_wants_one() -> bool:
    """Whether this torch computes on GPUs; not if it is here already, as there is nothing to be ahead of."""
    spec = None if "torch" in sys.modules else importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    return (Path(spec.origin).parent / "lib" / "libtorch_cuda.so").exists()


def _read_triton() -> None:
    with suppress(Exception):
        from triton.runtime.cache import triton_key  # remembers what it has found

        triton_key()


def _read_ahead(files: Sequence[Path]) -> None:
    buffer = bytearray(_PIECE)
    with suppress(OSError):
        for file in files:
            descriptor = os.open(file, os.O_RDONLY)
            try:
                for start in _missing(descriptor, file.stat().st_size):
                    os.preadv(descriptor, [buffer], start)
            finally:
                os.close(descriptor)


def _missing(descriptor: int, size: int) -> Iterator[int]:
    """Where pieces begin whose first bytes are not in RAM yet."""
    first = bytearray(_LOOKED_AT)
    for start in range(0, size, _PIECE):
        try:
            os.preadv(descriptor, [first], start, os.RWF_NOWAIT)
        except BlockingIOError:
            yield start
