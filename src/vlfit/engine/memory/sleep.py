"""Sleep and wake: an idle engine frees its device; weights move to RAM, or are read from files again.

The KV cache with its prefixes, cached image features, workspaces and graphs are dropped; on a GPU only the
CUDA context remains. Waking allocates first: if memory is short, the engine stays asleep for the next
attempt.

Tensors stay the same objects: their storages are emptied, and filled again at another address. Bytes are
copied in transfers of 16 MiB through pinned staging buffers, each with a stream and thread of its own, so
that the bus and RAM copies overlap. The RAM itself is not pinned: it may be swapped out, and WSL2 limits
pinned memory (benchmarks/sleep.py compares both).
"""

import ctypes
import logging
import mmap
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, UntypedStorage

from vlfit.api.engine_options import SleepLevel
from vlfit.api.stats import SleepState
from vlfit.checkpoint.source import Checkpoint
from vlfit.engine.execution.model_runner import ModelRunner
from vlfit.engine.execution.step_executor import drop_tracebacks
from vlfit.engine.memory.budget import Budget, is_out_of_memory
from vlfit.engine.memory.usage import CpuMatrix, cpu_matrices_in, storages_in
from vlfit.engine.scheduling.scheduler import Scheduler
from vlfit.errors import CannotWake, DoesNotFit, MissingFile, UsageError
from vlfit.loading.pinned import side_stream, staging_buffer
from vlfit.machine.host import read_host
from vlfit.plan.native.ram import RAM_RESERVE
from vlfit.units import MIB, format_bytes

logger = logging.getLogger(__name__)

RETRY_SECONDS = 10  # suggested to clients when waking fails
STAGE_BYTES = 16 * MIB
STAGES = 4  # throughput almost doubles from one to two and to four, hardly beyond (docs/log.md)


@dataclass(frozen=True, slots=True)
class StorageSlice:
    """``length`` bytes of a storage, from byte ``begin`` on. ``whole``: the whole storage as uint8 tensor."""

    whole: Tensor
    begin: int
    length: int

    @property
    def bytes(self) -> Tensor:
        """The slice as a uint8 view."""
        return self.whole[self.begin : self.begin + self.length]


@dataclass(frozen=True, slots=True)
class Transfer:
    """Slices copied together. Their copies in RAM are adjacent, from byte ``start`` of the buffer on."""

    start: int
    slices: tuple[StorageSlice, ...]

    @property
    def length(self) -> int:
        """Bytes of all slices."""
        return sum(each.length for each in self.slices)


class OffloadedStorages:
    """Copies of ``storages`` on ``device`` in RAM. The constructor copies the bytes and empties the storages.

    ``restore`` refills them. ``nbytes``: bytes of all storages. Raises ``MemoryError`` if there is not enough
    RAM, or what copying raises; the storages then stay as they were.
    """

    def __init__(self, storages: Sequence[UntypedStorage], device: torch.device) -> None:
        self.device = device
        self._sizes = [(storage, storage.nbytes()) for storage in storages]
        self._transfers = cut_transfers(
            [(_as_bytes(storage, device), size) for storage, size in self._sizes], STAGE_BYTES
        )
        self.nbytes = sum(size for _, size in self._sizes)
        self._ram = _allocate_ram(self.nbytes)
        self._run_threads(self._copy_out)
        empty_storages(storages)

    def restore(self) -> None:
        """Allocate the storages again and copy the bytes back, so that their tensors can be used again.

        The copy in RAM is freed only with this object. Raises ``torch.OutOfMemoryError`` if the device is
        full; the storages are then empty as before, and ``restore`` may be called again.
        """
        try:
            for storage, size in self._sizes:
                storage.resize_(size)
            self._run_threads(self._copy_back)
        except BaseException:
            empty_storages([storage for storage, _ in self._sizes])
            raise

    def _run_threads(self, move: Callable[[Iterator[Transfer]], None]) -> None:
        """Run ``move`` on several threads that share one iterator of transfers."""
        if not self._transfers:
            return
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # running kernels may use the memory that is copied
        pending = iter(self._transfers)  # a list iterator gives each transfer to one thread only
        count = min(STAGES, _num_cores(), len(self._transfers))
        with ThreadPoolExecutor(count, "vlfit-sleep") as threads:
            for done in [threads.submit(move, pending) for _ in range(count)]:
                done.result()

    def _copy_out(self, transfers: Iterator[Transfer]) -> None:
        with _staging(self.device) as (stage, wait):
            stage_view = stage.numpy()
            for transfer in transfers:
                end = 0
                for each in transfer.slices:
                    stage[end : end + each.length].copy_(each.bytes, non_blocking=True)
                    end += each.length
                wait()
                # With numpy: torch would start a thread pool for each of these threads.
                self._ram[transfer.start : transfer.start + end] = stage_view[:end]

    def _copy_back(self, transfers: Iterator[Transfer]) -> None:
        with _staging(self.device) as (stage, wait):
            stage_view = stage.numpy()
            for transfer in transfers:
                stage_view[: transfer.length] = self._ram[transfer.start : transfer.start + transfer.length]
                end = 0
                for each in transfer.slices:
                    each.bytes.copy_(stage[end : end + each.length], non_blocking=True)
                    end += each.length
                wait()


def empty_storages(storages: Sequence[UntypedStorage]) -> None:
    """Free the memory of ``storages``. Their tensors stay, but must not be read until they are refilled."""
    for storage in storages:
        storage.resize_(0)


def trim_heap() -> None:
    """Return freed heap memory to the system (glibc's ``malloc_trim``); elsewhere do nothing."""
    if sys.platform == "linux":
        library = ctypes.CDLL(None)
        if hasattr(library, "malloc_trim"):
            library.malloc_trim(0)


def cut_transfers(storages: Sequence[tuple[Tensor, int]], max_bytes: int) -> list[Transfer]:
    """Lay ``storages`` end to end and cut them into transfers of ``max_bytes`` bytes; the last may be less.

    ``storages``: for each, a uint8 view and its number of bytes. A storage may span several transfers.
    """
    cut: list[Transfer] = []
    slices: list[StorageSlice] = []
    start = filled = 0
    for whole, size in storages:
        begin = 0
        while begin < size:
            length = min(size - begin, max_bytes - filled)
            slices.append(StorageSlice(whole, begin, length))
            begin, filled = begin + length, filled + length
            if filled == max_bytes:
                cut.append(Transfer(start, tuple(slices)))
                slices, start, filled = [], start + max_bytes, 0
    if slices:
        cut.append(Transfer(start, tuple(slices)))
    return cut


def _as_bytes(storage: UntypedStorage, device: torch.device) -> Tensor:
    whole = torch.empty(0, dtype=torch.uint8, device=device)
    return whole.set_(storage, 0, (storage.nbytes(),), (1,))


def _allocate_ram(size: int) -> "np.ndarray[tuple[int], np.dtype[np.uint8]]":
    """``size`` bytes of RAM, with huge pages if possible; the system provides pages as they are written."""
    try:
        if sys.platform == "win32":
            mapped = mmap.mmap(-1, max(size, 1))
        else:
            # Private: shared mappings get no huge pages, and with small ones the system provides pages slower
            # than the bus fills them.
            mapped = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{size} bytes of RAM cannot be allocated: {error}") from None
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapped.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(mapped, dtype=np.uint8)


@contextmanager
def _staging(device: torch.device) -> Iterator[tuple[Tensor, Callable[[], None]]]:
    """A staging buffer of the calling thread, and a function that waits for its copies."""
    if device.type != "cuda":
        yield staging_buffer(STAGE_BYTES, device), lambda: None
        return
    stage = staging_buffer(STAGE_BYTES, device)
    stream = side_stream(device, "sleep")  # another engine may capture a graph on the stream for that
    # Inference mode and the current stream belong to a thread.
    with torch.inference_mode(), torch.cuda.device(device), torch.cuda.stream(stream):
        yield stage, stream.synchronize


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Sleeper:
    """Puts an engine to sleep (``fall_asleep``) and wakes it (``wake``).

    ``min_blocks``: KV blocks without which it does not wake. ``reserve``: bytes of the device to leave free
    when it wakes with more blocks than ``min_blocks``. ``release``: drops graphs and returns free memory of
    torch's pool to the driver. ``reload_weights``: replaces the runner's model by one loaded from the files.
    ``asleep``: None while awake.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        runner: ModelRunner,
        scheduler: Scheduler,
        budget: Budget,
        min_blocks: int,
        reserve: int,
        release: Callable[[], None],
        reload_weights: Callable[[], None],
    ) -> None:
        self.asleep: SleepState | None = None
        self._files = {info.file for info in checkpoint.tensors.values()}
        self._runner = runner
        self._scheduler = scheduler
        self._budget = budget
        self._min_blocks = min_blocks
        self._planned_blocks = scheduler.block_manager.num_blocks
        self._reserve = reserve
        self._release = release
        self._reload_weights = reload_weights
        self._offloaded: tuple[OffloadedStorages, ...] = ()  # weights that wait in RAM, if any, and tables
        self._bytes_beside_kv = 0  # when awake

    def fall_asleep(self, level: SleepLevel = "auto") -> SleepState:
        """Free the device's memory. The engine must be awake, with no request running or waiting.

        ``level`` "ram": keep the weights in RAM; "files": drop them, and read the files again on waking;
        "auto": "ram" if there is enough RAM, else "files"; on a CPU always "files". Raises ``DoesNotFit`` for
        "ram" if RAM is short, ``UsageError`` for "ram" on a CPU, where it would free nothing, and
        ``MissingFile`` if the files to wake from are gone; the engine then stays awake.
        """
        began = time.perf_counter()
        weight_bytes = sum(storage.nbytes() for storage in self._storages()[0])
        weight_bytes += sum(matrix.nbytes() for matrix in self._cpu_matrices())
        chosen = self._choose_level(level, weight_bytes)
        used_before = self._used_bytes(weight_bytes)
        # Without states, which come back whole.
        kv_bytes = self._scheduler.block_manager.num_blocks * self._runner.cache.block_bytes
        self._release()  # graphs first: they own tensors at fixed addresses
        weights, tables = self._storages()
        copies = [OffloadedStorages(tables, self._budget.device)]
        if chosen == "ram":
            try:
                copies.insert(0, OffloadedStorages(weights, self._budget.device))
            except MemoryError:  # another program took the RAM meanwhile
                if level == "ram":
                    copies[0].restore()
                    raise _ram_error(weight_bytes) from None
                self._check_files()
                chosen = "files"
        self._offloaded = tuple(copies)
        self._empty()
        self._budget.suspend()
        freed = used_before - self._used_bytes(0)
        self._bytes_beside_kv = freed - kv_bytes
        seconds = round(time.perf_counter() - began, 3)
        self.asleep = SleepState(chosen, weight_bytes if chosen == "ram" else 0, freed, seconds)
        return self.asleep

    def leave_ram(self) -> SleepState:
        """Free the RAM that the weights of a sleeping engine take: waking reads the files again.

        Raises ``MissingFile`` if these are gone; the weights then stay in RAM.
        """
        asleep = self.asleep
        if asleep is None or asleep.level != "ram":
            raise RuntimeError("no weights wait in RAM")
        self._check_files()
        self._offloaded = self._offloaded[-1:]
        self.asleep = replace(asleep, level="files", ram_bytes=0)
        return self.asleep

    def wake(self) -> None:
        """Restore the weights and an empty KV cache, as large as fits, up to its planned size.

        Does nothing if awake. Raises ``CannotWake`` if memory is short, or what reading the files raises; the
        engine then stays asleep and may be woken later.
        """
        if self.asleep is None:
            return
        self._budget.resume()
        try:
            self._wake(self.asleep)
        except BaseException:
            self._budget.suspend()
            raise

    def _wake(self, asleep: SleepState) -> None:
        free = self._budget.available_bytes()
        block_bytes = self._runner.cache.block_bytes
        needed = self._bytes_beside_kv + self._min_blocks * block_bytes
        if free < needed:
            raise self._cannot_wake(needed)
        if self._reserve:
            free = min(free, self._budget.device_free_bytes() - self._reserve)
        fitting_blocks = (free - self._bytes_beside_kv) // block_bytes
        failure = self._try_wake(asleep, min(self._planned_blocks, max(fitting_blocks, self._min_blocks)))
        if failure is not None:
            # A traceback keeps frames alive, and with them what was allocated so far.
            drop_tracebacks(failure)
            self._empty()
            raise self._cannot_wake(needed) if is_out_of_memory(failure) else failure
        self._offloaded = ()
        self.asleep = None

    def _try_wake(self, asleep: SleepState, blocks: int) -> Exception | None:
        """Restore weights, then allocate ``blocks`` KV blocks. Errors are returned, not raised."""
        try:
            for each in self._offloaded:
                each.restore()
            if asleep.level == "files":
                self._reload_weights()
            self._resize_pool(blocks)
        except Exception as error:
            return error
        return None

    def _empty(self) -> None:
        """Free everything that the engine holds on the device."""
        self._runner.encoder_cache.clear()
        self._resize_pool(0)
        weights, tables = self._storages()
        empty_storages([*weights, *tables])
        for matrix in self._cpu_matrices():
            matrix.free()
        if self._budget.device.type == "cuda":
            torch._C._cuda_clearCublasWorkspaces()  # allocated again by the first matrix product
        else:
            trim_heap()
        self._release()

    def _resize_pool(self, blocks: int) -> None:
        self._scheduler.resize(blocks)
        self._runner.cache.resize(blocks, {}, self._release)

    def _storages(self) -> tuple[list[UntypedStorage], list[UntypedStorage]]:
        """Storages of the model on the device, and of the runner's own tables, which no file holds.

        Without the KV cache and the encoder cache.
        """
        runner, device = self._runner, self._budget.device.type
        seen = {id(runner.cache), id(runner.encoder_cache)}
        weights = list(storages_in(runner.models, seen))
        tables = list(storages_in(runner, seen))
        return (
            [storage for storage in weights if storage.device.type == device],
            [storage for storage in tables if storage.device.type == device],
        )

    def _cpu_matrices(self) -> list[CpuMatrix]:
        """Weights of a CPU that are no tensors. They are read from the files again."""
        return cpu_matrices_in(self._runner.models)

    def _used_bytes(self, weights: int) -> int:
        """Bytes on the device: torch's reserved memory on a GPU; ``weights`` and caches on a CPU."""
        if self._budget.device.type == "cuda":
            return torch.cuda.memory_reserved(self._budget.device)
        return weights + self._runner.cache.nbytes + self._runner.encoder_cache.used_bytes

    def _choose_level(self, level: SleepLevel, size: int) -> str:
        """``ram`` or ``files``. Raises what ``fall_asleep`` does."""
        if self._budget.device.type == "cpu":
            if level == "ram":
                raise UsageError(
                    "the model runs on a CPU: its weights are in RAM already, so this would free nothing",
                    "Use files: they are read again when it wakes.",
                    param="park",
                )
            level = "files"
        free = read_host().ram_available
        if level != "files" and size + RAM_RESERVE <= free:
            return "ram"
        if level == "ram":
            raise _ram_error(size)
        self._check_files()
        if level == "auto":
            logger.info(
                "%s of weights will be read from the files again on waking: only %s of RAM are free",
                *map(format_bytes, (size, free)),
            )
        return "files"

    def _check_files(self) -> None:
        for file in self._files:
            if not file.exists():
                raise MissingFile(
                    f"{file} is gone: the model could not wake without it", "Sleep with the weights in RAM."
                )

    def _cannot_wake(self, needed: int) -> CannotWake:
        return CannotWake(
            f"the model cannot wake: it needs {format_bytes(needed)}, {self._budget.describe_free()}",
            "Close programs that hold the memory (vlfit machine lists those on a GPU) and try again.",
            retry_after=RETRY_SECONDS,
        )


def _ram_error(size: int) -> DoesNotFit:
    free = format_bytes(read_host().ram_available)
    return DoesNotFit(
        f"{format_bytes(size)} of weights do not fit in RAM: {free} are free, of which "
        f"{format_bytes(RAM_RESERVE)} are reserved for other programs",
        "Use files: they are read again when it wakes.",
        param="park",
    )
