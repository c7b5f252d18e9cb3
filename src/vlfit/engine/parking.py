"""Puts the bytes of tensors away into RAM and back; the tensors, and all views of them, stay who they are.

A tensor is a view of a storage. A storage can be emptied and filled again, at another address, and whatever
looks at it sees the same bytes as before. Bytes travel in loads of 16 MiB through a few stages of pinned
memory, each with a stream and a thread of its own: while one is carried over the bus another is copied
between its stage and RAM. The RAM itself is not pinned: what waits there may be swapped out, and WSL2 allows
little to be pinned (benchmarks/sleep.py has both ways). Knows storages, streams and threads. Does not know
what the bytes are, or when to put them away (``sleep.py``).
"""

import ctypes
import mmap
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, UntypedStorage

from vlfit.engine.pinned import make_stage
from vlfit.engine.streams import side_stream
from vlfit.units import MIB

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
