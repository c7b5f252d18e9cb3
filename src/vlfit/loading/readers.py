"""How the numbers of a tensor come from its file to where they stay: at once, or while others go on.

Large tensors that a GPU gets as they are in their file are read by threads (``reading.py``); the others are
converted and put in order from a mapped file as they are asked for (``loading/readers.py``, ``repack.py``).
Knows both ways and counts bytes. Does not know what a tensor is for (``loader.py``).
"""

import logging
import mmap
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from vlfit.checkpoint.headers import Layout, TensorInfo
from vlfit.errors import CheckpointError, UnknownWeightsFormat
from vlfit.loading.pinned import make_stage, side_stream
from vlfit.loading.repack import repack, shape_in_file
from vlfit.units import MIB, format_bandwidth, format_bytes, format_seconds

# Large tensors from files to a GPU: a few pieces at once, each read into RAM that the GPU copies from.
#
# One thread that reads and copies in turn brings about a gigabyte a second; the page cache has ten to give.
# A mapped file is read page by page as it is touched, so files are read by ``pread`` here. Knows bytes,
# files and threads. Does not know dtypes or what a tensor is for: ``loader.py`` converts what is not as in
# the file.
#
# Whoever asks goes on with other work meanwhile, and waits once, at the end.


PIECE_BYTES = 16 * MIB  # RAM that each thread has
_THREADS = 4
# Seconds for which a thread of Python keeps the others waiting. With Python's own 5 ms each piece would wait
# for whoever computes meanwhile, four times.
_TURN = 0.0005


class Reader:
    """Fills tensors of ``device`` from files. What ``read`` was told is there after ``settle``."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = ThreadPoolExecutor(_THREADS, "vlfit-read")
        self._pending: deque[tuple[Future[None], int]] = deque()  # and how many bytes
        self._own = threading.local()
        self._files: dict[Path, int] = {}
        self._first: float | None = None  # when something was first asked for
        self._last = 0.0  # when something last arrived
        self.bytes = 0  # asked for
        self._turn = sys.getswitchinterval()
        sys.setswitchinterval(min(_TURN, self._turn))

    def read(self, path: Path, start: int, target: Tensor) -> None:
        """The bytes of ``path`` from ``start`` on into ``target`` (contiguous), as many as it has."""
        if path not in self._files:
            self._files[path] = os.open(path, os.O_RDONLY)
        if self._device.type == "cuda":  # what used this memory before has ended
            self._stream().wait_stream(torch.cuda.current_stream(self._device))
        self._first = self._first or time.perf_counter()
        whole = target.view(-1).view(torch.uint8)
        self.bytes += len(whole)
        for begin in range(0, len(whole), PIECE_BYTES):
            piece = whole[begin : begin + PIECE_BYTES]
            self._pending.append((self._pool.submit(self._piece, path, start + begin, piece), len(piece)))

    def settle(self, arrived: Callable[[int], None] | None = None) -> None:
        """Wait until all is there; ``arrived`` is told of each piece how many bytes it has.

        Raises ``CheckpointError`` where a file ends too early.
        """
        while self._pending:
            piece, size = self._pending.popleft()
            piece.result()
            if arrived is not None:
                arrived(size)

    @property
    def seconds(self) -> float:
        """From when something was first asked for until all was there."""
        return max(self._last - self._first, 0.0) if self._first else 0.0

    def close(self) -> None:
        """Stop: what was not begun is not read any more."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        sys.setswitchinterval(self._turn)
        self._pending.clear()
        for file in self._files.values():
            os.close(file)
        self._files.clear()

    def _piece(self, path: Path, start: int, target: Tensor) -> None:
        stage = self._stage()
        count, filled = len(target), 0
        shown = stage.numpy().data
        while filled < count:
            got = os.preadv(self._files[path], [shown[filled:count]], start + filled)
            if not got:
                raise CheckpointError(
                    f"{path} ends after {start + filled} bytes, in the middle of a tensor",
                    "the download may be incomplete: `vlfit pull` fetches what is missing",
                )
            filled += got
        # Inference mode and the current stream belong to a thread.
        with torch.inference_mode():
            if self._device.type != "cuda":
                target.copy_(stage[:count])
                self._last = time.perf_counter()
                return
            stream = self._stream()
            arrived = torch.cuda.Event()
            with torch.cuda.stream(stream):
                target.copy_(stage[:count], non_blocking=True)
                arrived.record(stream)
            arrived.synchronize()
        self._last = time.perf_counter()

    def _stream(self) -> torch.cuda.Stream:
        """Not the one of recordings, which go on while weights arrive."""
        return side_stream(self._device, "reading")

    def _stage(self) -> Tensor:
        """The calling thread's own."""
        if not hasattr(self._own, "stage"):
            self._own.stage = make_stage(PIECE_BYTES, self._device)
        stage: Tensor = self._own.stage
        return stage


# Safetensors files mapped into memory: the numbers of one tensor after the other, each read once.
#
# Knows files, bytes and dtypes. Does not know what tensors are for, nor devices.


TORCH_DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I8": torch.int8,
    "I32": torch.int32,
}


class MappedFiles:
    """Files, each mapped when it is first read from, until ``close``."""

    def __init__(self) -> None:
        self._maps: dict[Path, mmap.mmap] = {}

    def close(self) -> None:
        for mapped in self._maps.values():
            mapped.close()
        self._maps.clear()

    @contextmanager
    def numbers(self, info: TensorInfo) -> Iterator[Tensor]:
        """The numbers of ``info`` as they are in its file [count]; on leaving, the file's pages are let go.

        Pages stay in the kernel's cache (the next start reads them from there) but no longer count as this
        process's memory: while loading there is no second copy of the model.
        """
        mapped = self._mapped(info.file)
        raw = torch.frombuffer(mapped, dtype=torch.uint8, count=info.bytes, offset=info.start)
        dtype = torch_dtype(info)
        if raw.storage_offset() % dtype.itemsize:
            raw = raw.clone()
        yield raw.view(dtype)
        del raw
        first = info.start - info.start % mmap.PAGESIZE
        mapped.madvise(mmap.MADV_DONTNEED, first, info.end - first)

    def _mapped(self, file: Path) -> mmap.mmap:
        if file not in self._maps:
            with file.open("rb") as handle:
                # A private writable mapping: torch wants a writable buffer, and the file is never written.
                self._maps[file] = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_COPY)
        return self._maps[file]


def torch_dtype(info: TensorInfo) -> torch.dtype:
    """What torch calls the type that ``info`` is stored in. Raises ``UnknownWeightsFormat``."""
    dtype = TORCH_DTYPES.get(info.dtype)
    if dtype is None:
        raise UnknownWeightsFormat(
            f"tensor {info.name} has dtype {info.dtype}", f"vlfit reads {', '.join(TORCH_DTYPES)}"
        )
    return dtype


logger = logging.getLogger(__name__)

_LARGE = MIB  # bytes; smaller tensors are read when they are asked for

Progress = Callable[[int, int], None]  # bytes read so far, bytes in all


class Arrivals:
    """``total`` bytes are to come, to ``device`` most of them. ``progress`` is told of each that came."""

    def __init__(self, device: torch.device, total: int, progress: Progress | None) -> None:
        self._files = MappedFiles()
        self._reader = Reader(device) if device.type == "cuda" else None
        self._progress = progress
        self._read = 0
        self._total = total

    @property
    def share(self) -> float:
        """Of the bytes that are there."""
        return self._read / self._total

    def bring(
        self, info: TensorInfo, target: Tensor, order: Tensor | None, bits: int, *, later: bool
    ) -> None:
        """The numbers of ``info`` into ``target``, converted. With ``order`` its inputs, codes of ``bits``,
        in that order.

        ``later``: a large tensor on a GPU may be there only after ``settle``.
        """
        if later and order is None and self._reader is not None and _is_as_in_file(info, target):
            self._reader.read(info.file, info.start, target)
            return
        if info.bytes:
            with self._files.numbers(info) as numbers:
                if info.layout is Layout.AS_NAMED and order is None:
                    target.copy_(numbers.view(info.shape))
                else:
                    in_file = numbers.view(shape_in_file(info.shape, info.layout))
                    repack(in_file, info.layout, target, order, bits)
        self._count(info.bytes)

    def settle(self) -> None:
        """Wait for what may come later."""
        if self._reader is not None:
            self._reader.settle(self._count)

    def tell(self) -> None:
        """Say in the log how fast files were read."""
        reader = self._reader
        if reader is not None and reader.seconds:
            speed = format_bandwidth(round(reader.bytes / reader.seconds))
            took = format_seconds(reader.seconds)
            logger.info("%s of weights read in %s, %s", format_bytes(reader.bytes), took, speed)

    def close(self) -> None:
        """Stop, and let go of the files."""
        self._files.close()
        if self._reader is not None:
            self._reader.close()

    def _count(self, size: int) -> None:
        """``size`` more bytes are there."""
        self._read += size
        if self._progress:
            self._progress(self._read, self._total)


def _is_as_in_file(info: TensorInfo, target: Tensor) -> bool:
    """Whether ``target`` is large, on the GPU, and gets the bytes of ``info`` as they are."""
    return (
        target.device.type == "cuda"
        and info.bytes >= _LARGE
        and target.dtype == torch_dtype(info)
        and info.layout is Layout.AS_NAMED
        and target.is_contiguous()
    )
