"""Reads tensors from safetensors and GGUF files to the device.

Large tensors that a GPU stores as they are in the file, and blocks of GGUF files, which it takes apart, are
read by threads through pinned staging buffers, asynchronously. All others are read from memory-mapped files
when requested, and converted or repacked (``repack.py``).
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
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from vlfit.api.progress import ByteProgress
from vlfit.checkpoint.gguf.stored_blocks import EXACT_FORMS, BlockPart, StoredBlocks
from vlfit.checkpoint.headers import StoredLayout, TensorInfo
from vlfit.errors import CheckpointError, UnknownWeightsFormat
from vlfit.loading.block_tensors import fill_from_blocks, fill_rows, has_codec, rows_at_once, rows_in_tensor
from vlfit.loading.pinned import side_stream, staging_buffer
from vlfit.loading.repack import repack, shape_in_file
from vlfit.units import MIB, format_bandwidth, format_bytes, format_seconds

PIECE_BYTES = 16 * MIB  # staging buffer of each thread
_THREADS = 4
# GIL switch interval in seconds. With Python's default of 5 ms each piece waits for computing threads four
# times.
_SWITCH_INTERVAL = 0.0005


class ThreadedReader:
    """Fills tensors on ``device`` from files, on a few threads: ``read``, then ``synchronize``, ``close``.

    One thread that reads and copies in turn reaches about a gigabyte a second, the page cache ten. Files are
    read by ``pread``: mapped files fault page by page. ``read_piece`` leaves the copying to its caller. Until
    ``close`` Python's thread switch interval is shorter. ``bytes``: requested so far.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = ThreadPoolExecutor(_THREADS, "vlfit-read")
        self._pending: deque[tuple[Future[None], int]] = deque()  # with their sizes
        self._thread_local = threading.local()
        self._files: dict[Path, int] = {}
        self._began: float | None = None  # time of the first read
        self._ended = 0.0  # time of the last copy
        self.bytes = 0  # requested
        self._switch_interval = sys.getswitchinterval()
        sys.setswitchinterval(min(_SWITCH_INTERVAL, self._switch_interval))

    def read(self, path: Path, start: int, target: Tensor) -> None:
        """Start filling ``target``, contiguous, with the bytes of the file ``path`` from offset ``start`` on.

        ``target`` is complete after ``synchronize``.
        """
        target_bytes = target.view(-1).view(torch.uint8)
        for begin in range(0, len(target_bytes), PIECE_BYTES):
            piece = target_bytes[begin : begin + PIECE_BYTES]
            copy = partial(piece.copy_, non_blocking=True)
            self.read_piece(path, start + begin, len(piece), copy, len(piece))

    def read_piece(
        self, path: Path, start: int, size: int, use: Callable[[Tensor], object], counts: int
    ) -> None:
        """Start reading ``size`` bytes, at most ``PIECE_BYTES``, from offset ``start`` of the file ``path``.

        ``use`` is called with them, [size] uint8 in RAM, on a thread of this reader, on a GPU with its stream
        as the current one. They are overwritten when what ``use`` launched there is done. ``counts``: bytes
        that ``synchronize`` reports for it.
        """
        if path not in self._files:
            self._files[path] = os.open(path, os.O_RDONLY)
        if self._device.type == "cuda":  # earlier users of the memory to be filled must be done
            self._stream().wait_stream(torch.cuda.current_stream(self._device))
        self._began = self._began or time.perf_counter()
        self.bytes += size
        self._pending.append((self._pool.submit(self._read_piece, path, start, size, use), counts))

    def synchronize(self, on_read: Callable[[int], None] | None = None) -> None:
        """Wait for all reads; ``on_read`` is called with the number of bytes of each piece.

        Raises ``CheckpointError`` if a file ends too early, and the ``OSError`` of a read.
        """
        while self._pending:
            piece, size = self._pending.popleft()
            piece.result()
            if on_read is not None:
                on_read(size)

    @property
    def seconds(self) -> float:
        """Seconds from the first read to the last copy."""
        return max(self._ended - self._began, 0.0) if self._began else 0.0

    def close(self) -> None:
        """Cancel pending reads, end the threads, close the files."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        sys.setswitchinterval(self._switch_interval)
        self._pending.clear()
        for file in self._files.values():
            os.close(file)
        self._files.clear()

    def _read_piece(self, path: Path, start: int, size: int, use: Callable[[Tensor], object]) -> None:
        stage = self._stage()
        filled = 0
        buffer = stage.numpy().data
        while filled < size:
            count_read = os.preadv(self._files[path], [buffer[filled:size]], start + filled)
            if not count_read:
                raise CheckpointError(
                    f"{path} ends after {start + filled} bytes, in the middle of a tensor",
                    "The download may be incomplete: vlfit pull fetches what is missing.",
                )
            filled += count_read
        # Inference mode and the current stream belong to a thread.
        with torch.inference_mode():
            if self._device.type != "cuda":
                use(stage[:size])
                self._ended = time.perf_counter()
                return
            stream = self._stream()
            used = torch.cuda.Event()
            with torch.cuda.stream(stream):
                use(stage[:size])
                used.record(stream)
            used.synchronize()
        self._ended = time.perf_counter()

    def _stream(self) -> torch.cuda.Stream:
        """Not the stream of graph capture, which goes on while weights are read."""
        return side_stream(self._device, "reading")

    def _stage(self) -> Tensor:
        """The calling thread's staging buffer."""
        if not hasattr(self._thread_local, "stage"):
            self._thread_local.stage = staging_buffer(PIECE_BYTES, self._device)
        stage: Tensor = self._thread_local.stage
        return stage


@dataclass(slots=True)
class _BlocksToRead:
    """A tensor of a GGUF file at ``start``, in rows of ``row_bytes``, and the ``targets`` that it fills.

    ``targets``: each with its ``StoredBlocks``, which differ in nothing but ``part``.
    """

    file: Path
    start: int
    row_bytes: int
    targets: list[tuple[StoredBlocks, Tensor]] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        """Whether all that the tensor becomes is in ``targets``: weights, or codes and scales."""
        blocks = self.targets[0][0]
        if blocks.part is BlockPart.WEIGHTS:
            return True
        return len(self.targets) == (2 if EXACT_FORMS[blocks.type].super_group is None else 3)


class BlockReader:
    """Takes blocks of GGUF files apart on ``device``, read by ``reader``: ``read`` each, then ``flush``.

    Codes, scales and super scales of a matrix are asked for one by one. Its blocks are read, and cross the
    bus, once, when all of them are known; those that have no codec become weights in RAM. Beside the targets
    the device holds what ``block_tensors.py`` takes for one slice, and the bytes of one for each thread.
    """

    def __init__(self, reader: ThreadedReader, device: torch.device) -> None:
        self._reader = reader
        self._device = device
        self._incomplete: dict[tuple[Path, int, tuple[int, ...]], _BlocksToRead] = {}
        self._one_slice = threading.Lock()

    @staticmethod
    def can_read(blocks: StoredBlocks, size: int) -> bool:
        """Whether ``blocks``, ``size`` bytes in the file, are in rows of at most a piece, and not halves."""
        return size > 0 and blocks.second_half is None and size // blocks.shape[0] <= PIECE_BYTES

    def read(self, info: TensorInfo, blocks: StoredBlocks, target: Tensor) -> None:
        """Fill ``target`` with ``info``, whose ``blocks`` ``can_read`` allows, as ``fill_from_blocks`` does.

        It is complete after ``flush`` and the reader's ``synchronize``.
        """
        row_bytes = (info.end - info.start) // blocks.shape[0]
        starts, one = (info.start, *blocks.rows_after), replace(blocks, rows_after=())
        for start, rows in zip(starts, target.chunk(len(starts)), strict=True):
            place = info.file, start, blocks.shape
            wanted = self._incomplete.setdefault(place, _BlocksToRead(info.file, start, row_bytes))
            wanted.targets.append((one, rows))
            if wanted.is_complete:
                self._start(self._incomplete.pop(place))

    def flush(self) -> None:
        """Start reading also tensors of which not all parts were asked for."""
        while self._incomplete:
            self._start(self._incomplete.popitem()[1])

    def _start(self, wanted: _BlocksToRead) -> None:
        blocks, row_bytes = wanted.targets[0][0], wanted.row_bytes
        places = rows_in_tensor(blocks)
        count = min(rows_at_once(blocks, self._device), PIECE_BYTES // row_bytes)
        for first in range(0, blocks.shape[0], count):
            size = min(count, blocks.shape[0] - first) * row_bytes
            use = partial(self._take_apart, wanted, first, places)
            self._reader.read_piece(wanted.file, wanted.start + first * row_bytes, size, use, size)

    def _take_apart(self, wanted: _BlocksToRead, first: int, places: Tensor | None, read: Tensor) -> None:
        """Fill the targets of ``wanted`` with the bytes ``read``, of rows from ``first`` on."""
        raw = read.view(-1, wanted.row_bytes)
        if has_codec(wanted.targets[0][0].type):
            raw = raw.to(self._device, non_blocking=True)
        with self._one_slice:
            for blocks, target in wanted.targets:
                fill_rows(raw, first, blocks, target, places)


TORCH_DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
}


class MappedFiles:
    """Memory-mapped files: each is mapped at its first read, and unmapped by ``close``."""

    def __init__(self) -> None:
        self._maps: dict[Path, mmap.mmap] = {}

    def close(self) -> None:
        """Unmap all files."""
        for mapped in self._maps.values():
            mapped.close()
        self._maps.clear()

    @contextmanager
    def read_values(self, info: TensorInfo) -> Iterator[Tensor]:
        """A context manager: the elements of ``info`` as stored, flat, in ``torch_dtype(info)``.

        Valid only within the block; leaving it releases their pages. They stay in the page cache for the
        next start but do not count as this process's memory: loading holds no second copy of the model.
        Raises as ``torch_dtype``.
        """
        with self.read_bytes(info.file, info.start, info.end) as raw:
            dtype = torch_dtype(info)
            yield (raw.clone() if raw.storage_offset() % dtype.itemsize else raw).view(dtype)

    @contextmanager
    def read_bytes(self, file: Path, start: int, end: int) -> Iterator[Tensor]:
        """A context manager: ``file[start:end]``, at least one byte, as uint8; else like ``read_values``."""
        mapped = self._mapped(file)
        yield torch.frombuffer(mapped, dtype=torch.uint8, count=end - start, offset=start)
        first = start - start % mmap.PAGESIZE
        mapped.madvise(mmap.MADV_DONTNEED, first, end - first)

    def _mapped(self, file: Path) -> mmap.mmap:
        if file not in self._maps:
            with file.open("rb") as handle:
                # A private writable mapping, as torch wants a writable buffer; the file is never written.
                self._maps[file] = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_COPY)
        return self._maps[file]


def torch_dtype(info: TensorInfo) -> torch.dtype:
    """torch's dtype for ``info``. Raises ``UnknownWeightsFormat`` for one that vlfit does not read."""
    dtype = TORCH_DTYPES.get(info.dtype)
    if dtype is None:
        raise UnknownWeightsFormat(
            f"tensor {info.name} has dtype {info.dtype}",
            f"Use a checkpoint in one of: {', '.join(TORCH_DTYPES)}.",
        )
    return dtype


logger = logging.getLogger(__name__)

_ASYNC_MIN_BYTES = MIB  # smaller tensors are read at once


class WeightStreamer:
    """Copies tensors of a checkpoint to ``device``: ``copy`` each, ``synchronize``, at the end ``close``.

    ``total``: bytes of the checkpoint. ``progress`` is called with the bytes read so far and ``total``.
    """

    def __init__(self, device: torch.device, total: int, progress: ByteProgress | None) -> None:
        self._files = MappedFiles()
        self._kept: dict[Path, mmap.mmap] = {}  # of ``mapped``; closed with their last tensor
        self._reader = ThreadedReader(device) if device.type == "cuda" else None
        self._block_reader = None if self._reader is None else BlockReader(self._reader, device)
        self._progress = progress
        self._read = 0
        self._total = total

    @property
    def fraction_read(self) -> float:
        """Share of ``total`` that has been read, 0 to 1."""
        return self._read / self._total

    def copy(
        self, info: TensorInfo, target: Tensor, order: Tensor | None, bits: int, *, asynchronous: bool
    ) -> None:
        """Fill ``target`` with the tensor ``info``, converted to ``target``'s dtype and ``PLAIN`` layout.

        ``order`` and ``bits``: as in ``repack``. ``asynchronous``: allows a large tensor, or one of blocks,
        on a GPU to be complete only after ``synchronize``. Raises ``UnknownWeightsFormat`` for a dtype that
        vlfit does not read.
        """
        if asynchronous and order is None and self._reader is not None and _is_plain_copy(info, target):
            self._reader.read(info.file, info.start, target)
            return
        if (
            asynchronous
            and info.blocks is not None
            and self._block_reader is not None
            and target.is_cuda
            and self._block_reader.can_read(info.blocks, info.end - info.start)
        ):
            self._block_reader.read(info, info.blocks, target)
            return
        if info.blocks is not None:
            self._fill_from_blocks(info, info.blocks, target)
        elif info.bytes:
            with self._files.read_values(info) as values:
                if info.layout is StoredLayout.PLAIN and order is None:
                    target.copy_(values.view(info.shape))
                else:
                    in_file = values.view(shape_in_file(info.shape, info.layout))
                    repack(in_file, info.layout, target, order, bits)
        self._count(info.bytes)

    def mapped(self, info: TensorInfo) -> Tensor | None:
        """The tensor ``info`` as stored, in the pages of its file; None if it has to be copied.

        Copied are tensors in another layout, GGUF's blocks, and empty ones. The file stays mapped as long as
        the tensor is referred to, also after ``close``; the tensor must not be changed. Raises
        ``CheckpointError`` if the file is too short, and as ``torch_dtype``.
        """
        if info.layout is not StoredLayout.PLAIN or info.blocks is not None or not info.bytes:
            return None
        raw = self._pages(info, info.start, info.end)
        self._count(info.bytes)
        return raw.view(torch_dtype(info)).view(info.shape)

    def mapped_blocks(self, info: TensorInfo, blocks: StoredBlocks) -> list[Tensor]:
        """The rows [rows, bytes] uint8 of each tensor of the file that ``info`` consists of, in its pages.

        As ``mapped``; ``blocks`` are those of ``info``.
        """
        size, starts = info.end - info.start, (info.start, *blocks.rows_after)
        pieces = [self._pages(info, start, start + size).view(blocks.shape[0], -1) for start in starts]
        self._count(info.bytes)
        return pieces

    def _pages(self, info: TensorInfo, start: int, end: int) -> Tensor:
        """Bytes of the file of ``info``, mapped; they are read ahead."""
        if info.file not in self._kept:
            with info.file.open("rb") as handle:
                # Private and writable, as torch wants it; nothing is ever written.
                self._kept[info.file] = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_COPY)
        file = self._kept[info.file]
        if end > len(file):
            raise CheckpointError(
                f"{info.file} ends after {len(file)} bytes, in the middle of a tensor",
                "The download may be incomplete: vlfit pull fetches what is missing.",
            )
        if hasattr(mmap, "MADV_WILLNEED"):
            first = start - start % mmap.PAGESIZE
            file.madvise(mmap.MADV_WILLNEED, first, end - first)
        return torch.frombuffer(memoryview(file)[start:end], dtype=torch.uint8)

    def _fill_from_blocks(self, info: TensorInfo, blocks: StoredBlocks, target: Tensor) -> None:
        size, second = info.end - info.start, blocks.second_half
        if blocks.rows_after:
            for at, rows in zip((info.start, *blocks.rows_after), target.chunk(blocks.pieces), strict=True):
                with self._files.read_bytes(info.file, at, at + size) as raw:
                    fill_from_blocks(raw, blocks, rows)
            return
        with ExitStack() as stack:
            starts = [info.start] if second is None else [info.start, second]
            parts = [stack.enter_context(self._files.read_bytes(info.file, at, at + size)) for at in starts]
            fill_from_blocks(parts[0], blocks, target, None if second is None else parts[1])

    def synchronize(self) -> None:
        """Wait for asynchronous copies. Raises ``CheckpointError`` if a file ends too early."""
        if self._block_reader is not None:
            self._block_reader.flush()
        if self._reader is not None:
            self._reader.synchronize(self._count)

    def log_throughput(self) -> None:
        """Log how fast asynchronous reads were, if there were any."""
        reader = self._reader
        if reader is not None and reader.seconds:
            speed = format_bandwidth(round(reader.bytes / reader.seconds))
            took = format_seconds(reader.seconds)
            logger.info("%s of weights read in %s, %s", format_bytes(reader.bytes), took, speed)

    def close(self) -> None:
        """Stop reading and close the files."""
        self._files.close()
        if self._reader is not None:
            self._reader.close()

    def _count(self, size: int) -> None:
        """Report ``size`` more bytes."""
        self._read += size
        if self._progress:
            self._progress(self._read, self._total)


def _is_plain_copy(info: TensorInfo, target: Tensor) -> bool:
    """Whether ``target`` is a large GPU tensor that takes the bytes of ``info`` unchanged."""
    return (
        target.device.type == "cuda"
        and info.bytes >= _ASYNC_MIN_BYTES
        and target.dtype == torch_dtype(info)
        and info.layout is StoredLayout.PLAIN
        and target.is_contiguous()
    )
