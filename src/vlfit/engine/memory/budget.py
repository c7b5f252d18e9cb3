"""What the engine may take of its device, and what is said of an allocation that fails in spite of all.

Knows torch's allocator on a GPU: its cap, its spare memory, the words of its errors. A CPU has no cap: there
the system's memory is asked. Does not know requests (``step_executor.py``) or the plan (``fit.py``).
"""

import re

import torch

from vlfit.errors import UsageError
from vlfit.machine.host import read_host
from vlfit.units import format_bytes, parse_bytes

_ASKED = re.compile(r"ried to allocate (\d+(?:\.\d+)?) ?(bytes|[KMG]iB)")
# What runs out of memory beside torch's own allocations: libraries, and kernels as the driver loads them.
_WORDS = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")


class Budget:
    """``limit``: most bytes that torch's pool may come to on a GPU, all engines of the process together."""

    def __init__(self, device: torch.device, limit: int | None = None) -> None:
        self.device = device
        self.limit = limit if device.type == "cuda" else None
        if self.limit is not None:
            whole = torch.cuda.get_device_properties(device).total_memory
            index = torch.cuda.current_device() if device.index is None else device.index
            # torch takes a share and cuts off what is behind the point, so half a byte is added.
            torch.cuda.set_per_process_memory_fraction(min((self.limit + 0.5) / whole, 1.0), index)

    def free(self) -> int:
        """Bytes that an allocation may still have: free on the device or spare in torch's pool, up to the
        limit. On a CPU what may be had without swapping.
        """
        if self.device.type == "cpu":
            return read_host().ram_available
        free = self.device_free()
        reserved = torch.cuda.memory_reserved(self.device)
        spare = reserved - torch.cuda.memory_allocated(self.device)
        if self.limit is not None:
            free = min(free, max(self.limit - reserved, 0))
        return free + spare

    def device_free(self) -> int:
        """Bytes of the GPU that no process has."""
        free: int = torch.cuda.mem_get_info(self.device)[0]
        return free

    def release(self) -> None:
        """Give torch's spare memory back to the driver: what lies there in pieces is whole again."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def shortage(self) -> str:
        """What is free, in words."""
        of = f" of the {format_bytes(self.limit)} that the plan allows" if self.limit is not None else ""
        return f"{format_bytes(self.free())}{of} were free"


def is_shortage(error: BaseException) -> bool:
    """Whether ``error`` says that there was no memory."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in _WORDS)


def asked_bytes(error: BaseException) -> int | None:
    """How much was asked for when there was no memory; None where the words do not tell."""
    found = _ASKED.search(str(error))
    if found is None:
        return None
    unit = "B" if found[2] == "bytes" else found[2]
    try:
        return parse_bytes(f"{found[1]}{unit}")
    except UsageError:
        return None
