"""Memory budget of the engine: torch's pool cap, free memory, and out-of-memory errors."""

import re
from contextlib import suppress
from weakref import WeakKeyDictionary

import torch

from vlfit.errors import UsageError
from vlfit.loading.pinned import CAPTURING
from vlfit.machine.host import read_host
from vlfit.units import MIB, format_bytes, parse_bytes

_REQUESTED = re.compile(r"ried to allocate (\d+(?:\.\d+)?) ?(bytes|[KMG]iB)")
# Messages of libraries and of kernels being loaded, beside torch's own allocations.
_OUT_OF_MEMORY = (
    "out of memory",
    "can't allocate memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)


# For small tensors that the rehearsal did not have at once; with 4 MiB a thousand mixed requests took 8 more.
# It comes out of the plan's slack for torch's pool: with it five servers under full load held 19 to 102 MiB
# less than planned (benchmarks/measured/memory-h200.json).
_SPARE = 12 * MIB
# Bytes of torch's pool that each engine of this process may take while it is awake, over all GPUs.
_shares: "WeakKeyDictionary[Budget, int]" = WeakKeyDictionary()


class Budget:
    """Free memory of one device, and one engine's share of torch's memory pool on a GPU.

    All engines of a process share the pool: the constructor and ``resume`` cap it at the sum of the shares
    of the engines that are awake. The cap stays when none is. ``limit``: the share in bytes; if other
    engines are awake, less what torch holds now. None, or a CPU: no cap.
    """

    def __init__(self, device: torch.device, limit: int | None = None) -> None:
        self.device = device
        self.limit = limit if device.type == "cuda" else None
        if self.limit is not None:
            if self._shares_of_others():
                self.limit -= torch.cuda.memory_reserved(device)
            self.resume()

    def suspend(self) -> None:
        """Give up the share while the engine sleeps, so that others may not use it beyond their own."""
        _shares.pop(self, None)
        if self.limit is not None and self._shares_of_others():
            self._cap_pool()

    def resume(self) -> None:
        """Take the share again, and cap the pool at the sum of all."""
        if self.limit is not None:
            _shares[self] = self.limit
            self._cap_pool()

    def _shares_of_others(self) -> int:
        index = self._index
        return sum(share for each, share in _shares.items() if each is not self and each._index == index)

    @property
    def _index(self) -> int:
        return torch.cuda.current_device() if self.device.index is None else self.device.index

    def _cap_pool(self) -> None:
        cap = _shares.get(self, 0) + self._shares_of_others()
        total = torch.cuda.get_device_properties(self.device).total_memory
        # torch takes a fraction and truncates, so half a byte is added.
        torch.cuda.set_per_process_memory_fraction(min((cap + 0.5) / total, 1.0), self._index)

    def available_bytes(self) -> int:
        """Bytes that torch can allocate now: free on the GPU, up to ``limit``, and free in torch's pool.

        On a CPU: the RAM available without swapping.
        """
        if self.device.type == "cpu":
            return read_host().ram_available
        free = self.device_free_bytes()
        reserved = torch.cuda.memory_reserved(self.device)
        pool_free = reserved - torch.cuda.memory_allocated(self.device)
        if self.limit is not None:
            free = min(free, max(self.limit + self._shares_of_others() - reserved, 0))
        return free + pool_free

    def device_free_bytes(self) -> int:
        """Bytes of the GPU that no process holds, whatever ``limit`` is. Fails on a CPU."""
        free: int = torch.cuda.mem_get_info(self.device)[0]
        return free

    def release(self) -> None:
        """Return the unused memory of torch's pool to the driver (``empty_cache``). Does nothing on a CPU."""
        if self.device.type == "cuda":
            with CAPTURING:  # of another engine of this process
                torch.cuda.empty_cache()

    def defragment(self) -> None:
        """Defragment torch's pool: one free segment in place of several. Does nothing on a CPU.

        A segment is as large as the tensor that it was taken for. A tensor of another size may fit into none
        of those that are free, and torch takes a further one; of a single segment it would be a part. Those
        for tensors up to a MiB become ``_SPARE`` larger. If another process takes the memory meanwhile,
        torch takes segments as they are needed, as before.
        """
        if self.device.type != "cuda":
            return
        with CAPTURING, suppress(torch.OutOfMemoryError):
            before = _reserved_bytes(self.device)
            torch.cuda.empty_cache()
            large, small = (a - b for a, b in zip(before, _reserved_bytes(self.device), strict=True))
            sizes = [large, *[MIB] * ((small + _SPARE) // MIB)]
            tensors = [torch.empty(size, dtype=torch.uint8, device=self.device) for size in sizes]
            del tensors

    def describe_free(self) -> str:
        """``available_bytes`` as a clause for an error message, such as "1.2 GiB were free"."""
        limit = f" of the {format_bytes(self.limit)} that the plan allows" if self.limit is not None else ""
        return f"{format_bytes(self.available_bytes())}{limit} were free"


def _reserved_bytes(device: torch.device) -> tuple[int, int]:
    """Bytes of torch's pool in segments for tensors of more than a MiB, and in those for smaller ones."""
    stats = torch.cuda.memory_stats(device)
    return stats["reserved_bytes.large_pool.current"], stats["reserved_bytes.small_pool.current"]


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` is a failure to allocate memory, in RAM or on a GPU, by torch or a CUDA library."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in _OUT_OF_MEMORY)


def requested_bytes(error: BaseException) -> int | None:
    """Size of the failed allocation in bytes, from the message of ``error``; None if it names none."""
    match = _REQUESTED.search(str(error))
    if match is None:
        return None
    unit = "B" if match[2] == "bytes" else match[2]
    try:
        return parse_bytes(f"{match[1]}{unit}")
    except UsageError:
        return None
