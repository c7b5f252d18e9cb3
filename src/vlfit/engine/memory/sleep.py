"""An engine gives its device back and takes it again: what is kept, what is forgotten, what must be free.

Asleep, the weights wait in RAM, or in the files that they came from; the KV pool is gone, and with it what
was known of earlier prompts, as are pictures' features, workspaces and graphs. On a GPU the CUDA context is
what stays. Waking asks for the memory first: where others have it, all stays as it is, for the next who asks.
Knows what holds memory. Does not know when to sleep (``loop.py``) or how bytes are carried (``sleep.py``).
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
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, UntypedStorage

from vlfit.api.engine_options import Park
from vlfit.api.stats import Asleep
from vlfit.checkpoint.source import Checkpoint
from vlfit.engine.execution.model_runner import Runner
from vlfit.engine.execution.step_executor import drop_tracebacks
from vlfit.engine.memory.budget import Budget, is_shortage
from vlfit.engine.memory.usage import halves_in, storages_in
from vlfit.engine.scheduling.scheduler import Scheduler
from vlfit.errors import CannotWake, DoesNotFit, MissingFile, UsageError
from vlfit.layers.cpu_linear import Half
from vlfit.loading.pinned import make_stage, side_stream
from vlfit.machine.host import read_host
from vlfit.units import MIB, format_bytes

# Puts the bytes of tensors away into RAM and back; the tensors, and all views of them, stay who they are.
#
# A tensor is a view of a storage. A storage can be emptied and filled again, at another address, and
# whatever looks at it sees the same bytes as before. Bytes travel in loads of 16 MiB through a few stages
# of pinned memory, each with a stream and a thread of its own: while one is carried over the bus another is
# copied between its stage and RAM. The RAM itself is not pinned: what waits there may be swapped out, and
# WSL2 allows little to be pinned (benchmarks/sleep.py has both ways). Knows storages, streams and threads.
# Does not know what the bytes are, or when to put them away (``sleep.py``).


STAGE_BYTES = 16 * MIB
STAGES = 4  # each doubling from one to four carried almost twice as much, eight hardly more (docs/log.md)


@dataclass(frozen=True, slots=True)
class Piece:
    """``length`` bytes of a storage, from byte ``begin`` on; ``whole`` is all of it, byte by byte."""

    whole: Tensor
    begin: int
    length: int

    @property
    def bytes(self) -> Tensor:
        return self.whole[self.begin : self.begin + self.length]


@dataclass(frozen=True, slots=True)
class Load:
    """What passes a stage at once: ``pieces`` that lie side by side in RAM, from byte ``start`` on."""

    start: int
    pieces: tuple[Piece, ...]

    @property
    def length(self) -> int:
        return sum(piece.length for piece in self.pieces)


class Parked:
    """The bytes of ``storages``, which are all on ``device``, in RAM; the storages are empty.

    Raises ``MemoryError`` where there is no RAM for them, and whatever copying raises; then nothing changed.
    """

    def __init__(self, storages: Sequence[UntypedStorage], device: torch.device) -> None:
        self.device = device
        self._sizes = [(storage, storage.nbytes()) for storage in storages]
        self._loads = loads_of(
            [(_whole(storage, device), size) for storage, size in self._sizes], STAGE_BYTES
        )
        self.nbytes = sum(size for _, size in self._sizes)
        self._ram = _ram(self.nbytes)
        self._carry(self._store)
        empty(storages)

    def restore(self) -> None:
        """Fill the storages again. Raises ``torch.OutOfMemoryError``; then they are as empty as before, and
        the bytes wait on.
        """
        try:
            for storage, size in self._sizes:
                storage.resize_(size)
            self._carry(self._fetch)
        except BaseException:
            empty([storage for storage, _ in self._sizes])
            raise

    def _carry(self, move: Callable[[Iterator[Load]], None]) -> None:
        """All loads, dealt out to the threads as they come to the end of their last."""
        if not self._loads:
            return
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # what still runs may use the memory that is copied
        waiting = iter(self._loads)  # a list's iterator hands each load to one thread only
        count = min(STAGES, _cores(), len(self._loads))
        with ThreadPoolExecutor(count, "vlfit-parking") as threads:
            for done in [threads.submit(move, waiting) for _ in range(count)]:
                done.result()

    def _store(self, loads: Iterator[Load]) -> None:
        with _stage(self.device) as (stage, wait):
            shown = stage.numpy()
            for load in loads:
                at = 0
                for piece in load.pieces:
                    stage[at : at + piece.length].copy_(piece.bytes, non_blocking=True)
                    at += piece.length
                wait()
                # By numpy: torch would wake a pool of threads of its own for each of ours.
                self._ram[load.start : load.start + at] = shown[:at]

    def _fetch(self, loads: Iterator[Load]) -> None:
        with _stage(self.device) as (stage, wait):
            shown = stage.numpy()
            for load in loads:
                shown[: load.length] = self._ram[load.start : load.start + load.length]
                at = 0
                for piece in load.pieces:
                    piece.bytes.copy_(stage[at : at + piece.length], non_blocking=True)
                    at += piece.length
                wait()


def empty(storages: Sequence[UntypedStorage]) -> None:
    """Give back what ``storages`` hold. Their tensors stay, and must not be read."""
    for storage in storages:
        storage.resize_(0)


def give_back_ram() -> None:
    """Let the C library give the system what was freed but kept in case: glibc does so when told."""
    if sys.platform == "linux":
        library = ctypes.CDLL(None)
        if hasattr(library, "malloc_trim"):
            library.malloc_trim(0)


def loads_of(wholes: Sequence[tuple[Tensor, int]], most: int) -> list[Load]:
    """Storages (each as bytes, with its length) one behind the other, cut into loads of ``most`` bytes."""
    loads: list[Load] = []
    pieces: list[Piece] = []
    start = filled = 0
    for whole, size in wholes:
        begin = 0
        while begin < size:
            length = min(size - begin, most - filled)
            pieces.append(Piece(whole, begin, length))
            begin, filled = begin + length, filled + length
            if filled == most:
                loads.append(Load(start, tuple(pieces)))
                pieces, start, filled = [], start + most, 0
    if pieces:
        loads.append(Load(start, tuple(pieces)))
    return loads


def _whole(storage: UntypedStorage, device: torch.device) -> Tensor:
    whole = torch.empty(0, dtype=torch.uint8, device=device)
    return whole.set_(storage, 0, (storage.nbytes(),), (1,))


def _ram(size: int) -> "np.ndarray[tuple[int], np.dtype[np.uint8]]":
    """``size`` bytes of RAM; the system gives pages as they are written, large ones if it can."""
    try:
        if sys.platform == "win32":
            mapped = mmap.mmap(-1, max(size, 1))
        else:
            # Private: large pages are for memory that no other process could share, and with small ones the
            # system takes longer to give them than the bus to fill them.
            mapped = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"no room for {size} bytes of RAM: {error}") from None
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapped.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(mapped, dtype=np.uint8)


@contextmanager
def _stage(device: torch.device) -> Iterator[tuple[Tensor, Callable[[], None]]]:
    """A stage for the calling thread, and how to wait until what was sent through it has arrived."""
    if device.type != "cuda":
        yield make_stage(STAGE_BYTES, device), lambda: None
        return
    stage = make_stage(STAGE_BYTES, device)
    stream = side_stream(device)
    # Inference mode and the current stream belong to a thread.
    with torch.inference_mode(), torch.cuda.device(device), torch.cuda.stream(stream):
        yield stage, stream.synchronize


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


logger = logging.getLogger(__name__)

RAM_LEFT = 512 * MIB  # what parked weights leave of the RAM that is free: a choice, for the desktop
RETRY_SECONDS = 10  # until somebody may have closed a program: a choice


class Sleep:
    """``least``: blocks that the pool has at least after waking; ``reserve``: bytes that more of them leave
    free. ``release`` forgets graphs and gives torch's spare memory back to the driver. ``load_again`` builds
    the model from its files anew and puts it where the old one is.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        runner: Runner,
        scheduler: Scheduler,
        budget: Budget,
        least: int,
        reserve: int,
        release: Callable[[], None],
        load_again: Callable[[], None],
    ) -> None:
        self.asleep: Asleep | None = None
        self._files = {info.file for info in checkpoint.tensors.values()}
        self._runner = runner
        self._scheduler = scheduler
        self._budget = budget
        self._least = least
        self._most = scheduler.pool.blocks
        self._reserve = reserve
        self._release = release
        self._load_again = load_again
        self._parked: Parked | None = None
        self._beside = 0  # bytes that are held beside the KV pool when awake

    def fall_asleep(self, park: Park = "auto") -> Asleep:
        """Nothing may run or wait. Raises ``DoesNotFit`` where ``park`` is ``ram`` and there is too little of
        it, ``UsageError`` where that would free nothing, ``MissingFile`` where no files are there to wake
        from; then all is as it was.
        """
        began = time.perf_counter()
        size = sum(storage.nbytes() for storage in self._storages()[0])
        size += sum(half.nbytes() for half in self._halves())
        place = self._place(park, size)
        held = self._held(size)
        cache = self._runner.cache.nbytes
        self._release()  # graphs first: they have tensors of their own, at addresses of their own
        weights, tables = self._storages()
        if place == "ram":
            try:
                self._parked = Parked([*weights, *tables], self._budget.device)
            except MemoryError:  # somebody was faster
                if park == "ram":
                    raise _too_little_ram(size) from None
                self._check_files()
                place = "files"
        if place == "files":
            self._parked = Parked(tables, self._budget.device)
        self._empty()
        freed = held - self._held(0)
        self._beside = freed - cache
        seconds = round(time.perf_counter() - began, 3)
        self.asleep = Asleep(place, size if place == "ram" else 0, freed, seconds)
        return self.asleep

    def wake(self) -> None:
        """Have all back. Raises ``CannotWake`` where there is too little memory, or what reading the files
        raises; then it sleeps on, and nothing is lost.
        """
        if self.asleep is None:
            return
        free = self._budget.free()
        block = self._runner.cache.block_bytes
        needed = self._beside + self._least * block
        if free < needed:
            raise self._cannot(needed)
        if self._reserve:
            free = min(free, self._budget.device_free() - self._reserve)
        fitting = (free - self._beside) // block
        failure = self._attempt(self.asleep, min(self._most, max(fitting, self._least)))
        if failure is not None:
            # A traceback holds frames, and they hold what was allocated so far.
            drop_tracebacks(failure)
            self._empty()
            raise self._cannot(needed) if is_shortage(failure) else failure
        self._parked = None
        self.asleep = None

    def _attempt(self, asleep: Asleep, blocks: int) -> Exception | None:
        """Weights, then a pool of ``blocks``; what went wrong is given, not raised."""
        try:
            if self._parked is not None:
                self._parked.restore()
            if asleep.parked == "files":
                self._load_again()
            self._resize_pool(blocks)
        except Exception as error:
            return error
        return None

    def _empty(self) -> None:
        """Give back all that the engine holds on the device."""
        self._runner.image_cache.clear()
        self._resize_pool(0)
        weights, tables = self._storages()
        empty([*weights, *tables])
        for half in self._halves():
            half.empty()
        if self._budget.device.type == "cuda":
            torch._C._cuda_clearCublasWorkspaces()  # of matrix products; they come back with the first
        else:
            give_back_ram()
        self._release()

    def _resize_pool(self, blocks: int) -> None:
        self._scheduler.resize(blocks)
        self._runner.cache.resize(blocks, {}, self._release)

    def _storages(self) -> tuple[list[UntypedStorage], list[UntypedStorage]]:
        """What the model has on the device, and what tables the runner has there, which no file holds.

        Without the caches, which nobody misses.
        """
        runner, device = self._runner, self._budget.device.type
        seen = {id(runner.cache), id(runner.image_cache)}
        weights = list(storages_in((runner.text, runner.vision), seen))
        tables = list(storages_in(runner, seen))
        return (
            [storage for storage in weights if storage.device.type == device],
            [storage for storage in tables if storage.device.type == device],
        )

    def _halves(self) -> list[Half]:
        """Matrices that are laid out for a CPU's products. They come from the files again, as all there."""
        return halves_in((self._runner.text, self._runner.vision))

    def _held(self, weights: int) -> int:
        """Bytes of the device: what torch took of it, or on a CPU ``weights`` and the caches."""
        if self._budget.device.type == "cuda":
            return torch.cuda.memory_reserved(self._budget.device)
        return weights + self._runner.cache.nbytes + self._runner.image_cache.used_bytes

    def _place(self, park: Park, size: int) -> str:
        """``ram`` or ``files``. Raises what ``fall_asleep`` does."""
        if self._budget.device.type == "cpu":
            if park == "ram":
                raise UsageError(
                    "the model runs on a CPU: its weights are in RAM, and parking them there frees nothing",
                    "use files: they are read again when it wakes",
                    param="park",
                )
            park = "files"
        free = read_host().ram_available
        if park != "files" and size + RAM_LEFT <= free:
            return "ram"
        if park == "ram":
            raise _too_little_ram(size)
        self._check_files()
        if park == "auto":
            logger.info(
                "%s of weights are read from the files again when it wakes: %s of RAM are free",
                *map(format_bytes, (size, free)),
            )
        return "files"

    def _check_files(self) -> None:
        for file in self._files:
            if not file.exists():
                raise MissingFile(f"{file} is gone: the model could not wake", "park it in RAM")

    def _cannot(self, needed: int) -> CannotWake:
        return CannotWake(
            f"the model sleeps and cannot wake: it needs {format_bytes(needed)}, {self._budget.shortage()}",
            "close programs that have the memory (vlfit machine names those on a GPU) and ask again",
            retry_after=RETRY_SECONDS,
        )


def _too_little_ram(size: int) -> DoesNotFit:
    free = format_bytes(read_host().ram_available)
    return DoesNotFit(
        f"{format_bytes(size)} of weights do not fit in RAM, of which {free} are free and "
        f"{format_bytes(RAM_LEFT)} are left to others",
        "use files: they are read again when it wakes",
        param="park",
    )
