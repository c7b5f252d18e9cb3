"""Ways to carry a model's bytes from the GPU to RAM and back, each timed with getting the RAM ready.

Among them the one that the engine takes (``engine/memory/sleep.py``), with other numbers of stages.
"""

import gc
import mmap
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.measure import MIB
from benchmarks.report import print_rows

if TYPE_CHECKING:
    from torch import Tensor, UntypedStorage

CHUNK = 64 * MIB
THREADS = 8


@dataclass
class Way:
    """One way to carry ``bytes`` to RAM and back: seconds, with getting the RAM ready and giving it back."""

    name: str
    bytes: int
    store_s: float
    fetch_s: float
    free_s: float


def all_ways(sizes: Sequence[int]) -> Iterator[Way]:
    """Each way on storages of ``sizes``, which are made for it. What was carried is compared."""
    import torch

    from vlfit.engine.memory import sleep as parking

    gc.collect()  # of the engine that was here before, and of its cap
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1.0)
    for stages in (1, 2, 4, 8):
        parking.STAGES = stages
        yield _timed(f"{stages} stages of pinned RAM and threads", sizes, _staged)
    parking.STAGES = 4
    for mib in (4, 64):
        usual, parking.STAGE_BYTES = parking.STAGE_BYTES, mib * MIB
        yield _timed(f"4 stages of {mib} MiB", sizes, _staged)
        parking.STAGE_BYTES = usual
    yield _timed("plain RAM, copied by torch", sizes, lambda all: _Whole(all, _plain))
    yield _timed("RAM pinned by torch", sizes, lambda all: _Whole(all, _pinned))
    yield _timed("RAM that is locked after threads have touched it", sizes, lambda all: _Whole(all, _locked))
    torch.cuda.empty_cache()


def _timed(name: str, sizes: Sequence[int], park: "Callable[[list[UntypedStorage]], Any]") -> Way:
    import torch

    tensors = [torch.empty(size, dtype=torch.uint8, device="cuda") for size in sizes]
    for number, tensor in enumerate(tensors):
        tensor.fill_(number % 251 + 1)
    storages = [tensor.untyped_storage() for tensor in tensors]
    torch.cuda.synchronize()
    began = time.perf_counter()
    parked = park(storages)
    torch.cuda.empty_cache()
    stored = time.perf_counter()
    parked.restore()
    torch.cuda.synchronize()
    fetched = time.perf_counter()
    del parked
    freed = time.perf_counter()
    for number, tensor in enumerate(tensors):
        if not bool((tensor == number % 251 + 1).all()):
            raise ValueError(f"{name} lost bytes")
    del tensors, tensor, storages
    torch.cuda.empty_cache()
    return Way(name, sum(sizes), stored - began, fetched - stored, freed - fetched)


def _staged(storages: "list[UntypedStorage]") -> Any:
    import torch

    from vlfit.engine.memory.sleep import OffloadedStorages

    return OffloadedStorages(storages, torch.device("cuda"))


class _Whole:
    """All storages in one run of RAM that ``make`` gives, each copied there directly."""

    def __init__(self, storages: "list[UntypedStorage]", make: "Callable[[int], tuple[Tensor, Any]]") -> None:
        import torch

        self._sizes = [(storage, storage.nbytes()) for storage in storages]
        self._wholes = [
            torch.empty(0, dtype=torch.uint8, device="cuda").set_(storage, 0, (size,), (1,))
            for storage, size in self._sizes
        ]
        self._ram, self._kept = make(sum(size for _, size in self._sizes))
        for whole, part in self._pairs():
            part.copy_(whole, non_blocking=True)
        torch.cuda.synchronize()
        for storage, _ in self._sizes:
            storage.resize_(0)

    def restore(self) -> None:
        for storage, size in self._sizes:
            storage.resize_(size)
        for whole, part in self._pairs():
            whole.copy_(part, non_blocking=True)

    def _pairs(self) -> "Iterator[tuple[Tensor, Tensor]]":
        start = 0
        for whole, (_, size) in zip(self._wholes, self._sizes, strict=True):
            yield whole, self._ram[start : start + size]
            start += size


def _plain(size: int) -> "tuple[Tensor, Any]":
    import torch

    return torch.empty(size, dtype=torch.uint8), None


def _pinned(size: int) -> "tuple[Tensor, Any]":
    import torch

    return torch.empty(size, dtype=torch.uint8, pin_memory=True), None


def _locked(size: int) -> "tuple[Tensor, Any]":
    import numpy as np
    import torch

    from vlfit.loading import pinned

    def touch(start: int) -> None:
        shown[start : start + CHUNK] = 0

    if not hasattr(mmap, "MADV_HUGEPAGE"):
        raise OSError("needs Linux")
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_HUGEPAGE)
    shown = np.frombuffer(pages, dtype=np.uint8)
    with ThreadPoolExecutor(THREADS) as threads:
        list(threads.map(touch, range(0, size, CHUNK)))
    whole = torch.frombuffer(pages, dtype=torch.uint8)
    pinned._lock(whole.data_ptr(), size, torch.device("cuda"))
    return whole, _Locked(whole.data_ptr(), pages)


class _Locked:
    """Lets pages go when it is forgotten."""

    def __init__(self, address: int, pages: mmap.mmap) -> None:
        self._address, self._pages = address, pages

    def __del__(self) -> None:
        import torch

        torch.cuda.cudart().cudaHostUnregister(self._address)


def print_ways(ways: Sequence[Way]) -> None:
    heading = ["way", "MiB", "to RAM s", "GB/s", "back s", "GB/s", "RAM freed s"]
    rows = [
        [
            way.name,
            f"{way.bytes / MIB:,.0f}",
            f"{way.store_s:.2f}",
            f"{way.bytes / way.store_s / 1e9:.1f}",
            f"{way.fetch_s:.2f}",
            f"{way.bytes / way.fetch_s / 1e9:.1f}",
            f"{way.free_s:.2f}",
        ]
        for way in ways
    ]
    print_rows([heading, *rows])
