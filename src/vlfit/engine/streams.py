"""A stream of work on a GPU beside the one that everything runs on, and what recordings take."""

import ctypes
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, TypeVar

import torch

from vlfit.errors import DeviceError

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE

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
