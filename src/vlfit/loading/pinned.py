"""RAM that a GPU reads by itself, while the processor does other things: pages that are never swapped out.

Knows how such memory is asked for and given back. Does not know what lies in it.

Pages are taken from the system and locked where they are (``cudaHostRegister``), as torch's own allocator for
such memory takes the next power of two: up to twice what is needed.
"""

import contextlib
import ctypes
import mmap
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from vlfit.errors import DeviceError
from vlfit.units import format_bytes

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE


_FOR_ALL_DEVICES = 1  # cudaHostRegisterPortable: not only for the device that is current just now


class PinnedBytes:
    """``size`` bytes of RAM as the tensor ``bytes`` [size] uint8, locked for ``device`` if it is a GPU.

    Given back when nobody refers to it any more. Raises ``DeviceError`` where the system does not lock so
    much: under WSL2 Windows allows a part of the RAM only.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        pages = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            pages.madvise(mmap.MADV_HUGEPAGE)  # 512 times fewer pages to lock, where the system has them
        self.bytes = torch.frombuffer(pages, dtype=torch.uint8)[:size]
        if device.type == "cuda":
            address = self.bytes.data_ptr()
            _lock(address, len(pages), device)
            weakref.finalize(self, _unlock, address, device, pages)


def make_stage(size: int, device: torch.device) -> Tensor:
    """RAM through which bytes travel to ``device`` and back, [size] uint8.

    Pinned for a GPU where the system pins more (WSL2 allows little); else copying is slower, and as right.
    """
    if device.type == "cuda":
        with contextlib.suppress(RuntimeError):
            return torch.empty(size, dtype=torch.uint8, pin_memory=True)
    return torch.empty(size, dtype=torch.uint8)


def _lock(address: int, size: int, device: torch.device) -> None:
    with torch.cuda.device(device):
        torch.cuda.current_stream()  # CUDA is started, on this device
        error = int(torch.cuda.cudart().cudaHostRegister(address, size, _FOR_ALL_DEVICES))
    if error:
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device=device)  # CUDA repeats its last error to whoever launches next
        raise DeviceError(
            f"the system does not lock {format_bytes(size)} more of RAM for the GPU (CUDA error {error})",
            "let fewer layers wait in RAM: a smaller --offload. Under WSL2 Windows lets CUDA lock only part "
            "of the RAM: give WSL2 more (memory= in .wslconfig), and stop what else has locked some",
        )


def _unlock(address: int, device: torch.device, pages: mmap.mmap) -> None:
    """``pages`` are kept until this is done. Copies under way read them until they end."""
    torch.cuda.synchronize(device)
    torch.cuda.cudart().cudaHostUnregister(address)
    del pages


# A stream of work on a GPU beside the one that everything runs on, and what recordings take.


Found = TypeVar("Found")

_NOT_WITH_OTHERS = 1  # CU_STREAM_NON_BLOCKING: it does not wait for the stream that everything runs on


@cache
def side_stream(device: torch.device, purpose: str = "") -> torch.cuda.Stream:
    """The same one for all who ask for one ``purpose``, which is kept: copies beside computation, recordings.

    What is recorded needs one that nobody copies by meanwhile: that would be recorded too.

    By the driver's own call, as torch makes 32 streams of a kind when the first is asked for, which took 70
    MiB of an H200 (docs/log.md). Raises ``DeviceError``.
    """
    with torch.cuda.device(device):
        torch.cuda.current_stream()  # CUDA is started, on this device
        handle = ctypes.c_void_p()
        error = ctypes.CDLL("libcuda.so.1").cuStreamCreate(ctypes.byref(handle), _NOT_WITH_OTHERS)
    if error or handle.value is None:
        raise DeviceError(f"CUDA makes no stream (error {error})", "try again; restart what uses the GPU")
    return torch.cuda.ExternalStream(handle.value, device=device)


def record(
    device: torch.device, run: Callable[[], Found], pool: "_POOL_HANDLE | None" = None
) -> tuple[Callable[[], None], Found]:
    """``run`` as a CUDA graph, whose tensors live in ``pool``: what replays it, and what ``run`` has given.

    Raises what ``run`` raises: a recording that broke off says something else of itself when it is ended.
    """
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    # Not by torch.cuda.graph, which makes streams of its own.
    with torch.cuda.stream(side_stream(device)):
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            found = run()
        except BaseException:
            with suppress(RuntimeError):
                graph.capture_end()
            raise
        graph.capture_end()
    return graph.replay, found


def bytes_of(pool: "_POOL_HANDLE") -> int:
    """What torch took from the driver for ``pool``, which recordings have their tensors in."""
    segments = torch.cuda.memory_snapshot() if torch.cuda.is_available() else []
    return sum(segment["total_size"] for segment in segments if tuple(segment["segment_pool_id"]) == pool)
