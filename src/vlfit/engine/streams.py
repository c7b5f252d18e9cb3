"""A stream of work on a GPU beside the one that everything runs on."""

import ctypes
from functools import cache

import torch

from vlfit.errors import DeviceError


@cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """The same one for all who ask, which is kept: recordings, and copies beside computation.

    Made by hand, as torch makes 32 streams of a kind when the first is asked for: they took 70 MiB of an H200
    (docs/log.md). Raises ``DeviceError``.
    """
    handle = ctypes.c_void_p()
    with torch.cuda.device(device):
        error = int(torch.cuda.cudart().cudaStreamCreate(ctypes.addressof(handle)))
    if error or handle.value is None:
        raise DeviceError(f"CUDA makes no stream (error {error})", "try again; restart what uses the GPU")
    return torch.cuda.ExternalStream(handle.value, device=device)
