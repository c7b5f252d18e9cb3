"""Pinned RAM, side streams and CUDA graph capture.

Pinned pages are mapped and locked in place (``cudaHostRegister``): torch's pinned allocator rounds up to the
next power of two, up to twice what is needed.
"""

import contextlib
import ctypes
import mmap
import threading
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


# cudaHostRegisterPortable: for all devices; cudaHostRegisterMapped: kernels may read it in place.
_REGISTER_PORTABLE, _REGISTER_MAPPED = 1, 2


class PinnedBytes:
    """``size`` bytes of RAM as the tensor ``bytes`` [size] uint8, pinned if ``device`` is a GPU.

    Unpinned with the last reference to this object, which must outlive the tensor's use. Raises
    ``DeviceError`` if the system does not pin so much: under WSL2 Windows limits it to part of the RAM.
    """

    _view: Tensor | None = None  # ``bytes`` at their address on the device

    def __init__(self, size: int, device: torch.device) -> None:
        pages = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            pages.madvise(mmap.MADV_HUGEPAGE)  # 512 times fewer pages to lock
        self.bytes = torch.frombuffer(pages, dtype=torch.uint8)[:size]
        if device.type == "cuda":
            address = self.bytes.data_ptr()
            _lock(address, len(pages), device)
            weakref.finalize(self, _unlock, address, device, pages)
        self._device = device

    def on_device(self, tensor: Tensor) -> Tensor:
        """``tensor``, which lies in ``bytes``, as a tensor of the device: kernels read it over the bus.

        Captured graphs may read it, too. ``tensor`` itself if the device is a CPU. Raises ``DeviceError`` if
        the driver has no address for these bytes on the device.
        """
        if self._device.type != "cuda":
            return tensor
        if self._view is None:
            address = _device_address(self.bytes.data_ptr(), self._device)
            self._view = torch.as_tensor(_DeviceBytes(address, len(self.bytes)), device=self._device)
        start = tensor.data_ptr() - self.bytes.data_ptr()
        return self._view[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)


class _DeviceBytes:
    """``size`` bytes at an ``address`` of the device, for ``torch.as_tensor``, which copies nothing.

    Refers to nothing, as the tensor keeps it: the memory is to outlive both.
    """

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def _device_address(address: int, device: torch.device) -> int:
    """The address on ``device`` of the pinned byte at ``address``; WSL2's may differ from the host's."""
    torch.cuda.synchronize(device)  # makes its context current in this thread, as the driver's call needs
    with torch.cuda.device(device):
        found = ctypes.c_uint64()
        error = ctypes.CDLL("libcuda.so.1").cuMemHostGetDevicePointer_v2(
            ctypes.byref(found), ctypes.c_void_p(address), 0
        )
    if error or not found.value:
        raise DeviceError(
            f"CUDA cannot read pinned RAM in place (error {error})", "Restart vlfit, and update the driver."
        )
    return found.value


def staging_buffer(size: int, device: torch.device) -> Tensor:
    """Uninitialized RAM for copies to and from ``device``, [size] uint8.

    Pinned for a GPU if the system allows it (WSL2 allows little); otherwise silently pageable, for which
    copies are slower.
    """
    if device.type == "cuda":
        with contextlib.suppress(RuntimeError):
            return torch.empty(size, dtype=torch.uint8, pin_memory=True)
    return torch.empty(size, dtype=torch.uint8)


def _lock(address: int, size: int, device: torch.device) -> None:
    with torch.cuda.device(device):
        torch.cuda.current_stream()  # initializes CUDA on this device
        error = int(
            torch.cuda.cudart().cudaHostRegister(address, size, _REGISTER_PORTABLE | _REGISTER_MAPPED)
        )
    if error:
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device=device)  # clears the error, which the next launch would report
        raise DeviceError(
            f"the system refuses to pin {format_bytes(size)} more of RAM for the GPU (CUDA error {error})",
            "Use a smaller --offload, if any. Under WSL2 Windows lets CUDA pin only part of the RAM: give "
            "WSL2 more (memory= in .wslconfig), and stop other programs that pin RAM.",
        )


def _unlock(address: int, device: torch.device, pages: mmap.mmap) -> None:
    """Unpin ``pages`` and free them, after pending copies."""
    torch.cuda.synchronize(device)
    torch.cuda.cudart().cudaHostUnregister(address)
    del pages


T = TypeVar("T")

CAPTURING = threading.Lock()  # held during a capture: torch's pool must not be emptied meanwhile
_STREAM_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: no implicit synchronization with the default stream


@cache
def side_stream(device: torch.device, purpose: str = "") -> torch.cuda.Stream:
    """A CUDA stream of ``device`` beside the main one, the same for each call with the same ``purpose``.

    ``purpose`` "" is graph capture's: copies on the same stream would be captured too. Created by the
    driver's call: torch creates 32 streams with the first one, which took 70 MiB of an H200 (docs/log.md).
    Raises ``DeviceError``.
    """
    torch.cuda.synchronize(device)  # makes its context current in this thread, as the driver's call needs
    with torch.cuda.device(device):
        handle = ctypes.c_void_p()
        error = ctypes.CDLL("libcuda.so.1").cuStreamCreate(ctypes.byref(handle), _STREAM_NON_BLOCKING)
    if error or handle.value is None:
        raise DeviceError(
            f"CUDA cannot create a stream (error {error})", "Try again, or restart programs that use the GPU."
        )
    return torch.cuda.ExternalStream(handle.value, device=device)


def capture_graph(
    device: torch.device, run: Callable[[], T], pool: "_POOL_HANDLE | None" = None
) -> tuple[Callable[[], None], T]:
    """Capture ``run`` as a CUDA graph; return the function that replays it, and what ``run`` returned.

    ``run`` is called once, but what it launches is only recorded: tensors that it returns have values after
    the first replay. Those that it allocates lie in ``pool`` (None: one of its own). Raises what ``run``
    raises: ending an interrupted capture raises another error, which is suppressed. On the meta device there
    is nothing to replay.
    """
    if device.type == "meta":
        return (lambda: None), run()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    # Not torch.cuda.graph, which creates streams of its own. One capture at a time on the stream, over all
    # engines of the process.
    with CAPTURING, torch.cuda.stream(side_stream(device)):
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            result = run()
        except BaseException:
            with suppress(RuntimeError):
                graph.capture_end()
            raise
        graph.capture_end()
    return graph.replay, result


class GraphPool:
    """Memory that CUDA graphs on ``device`` share, as they are replayed one after the other on one stream.

    ``nbytes``: what torch's allocator reserved for it; 0 without a GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self.nbytes = 0
        self._device = device
        self._handle: _POOL_HANDLE | None = None  # from the first capture on

    def capture(self, run: Callable[[], T]) -> tuple[Callable[[], None], T]:
        """``capture_graph`` of ``run``. Tensors that it returned must be dropped before ``release``."""
        if self._handle is None and self._device.type != "meta":
            self._handle = torch.cuda.graph_pool_handle()
        captured = capture_graph(self._device, run, self._handle)
        self.nbytes = graph_pool_bytes(self._handle)
        return captured

    def release(self) -> None:
        """Take new memory for the next capture; this is free once its graphs are dropped."""
        self._handle, self.nbytes = None, 0


def graph_pool_bytes(pool: "_POOL_HANDLE | None") -> int:
    """Bytes that torch's allocator reserved for ``pool``, the memory of CUDA graphs; 0 without a GPU."""
    segments = torch.cuda.memory_snapshot() if torch.cuda.is_available() else []
    return sum(segment["total_size"] for segment in segments if tuple(segment["segment_pool_id"]) == pool)
