"""Large tensors from files to a GPU: a few pieces at once, each read into RAM that the GPU copies from.

One thread that reads and copies in turn brings about a gigabyte a second; the page cache has ten to give. A
mapped file is read page by page as it is touched, so files are read by ``pread`` here. Knows bytes, files and
threads. Does not know dtypes or what a tensor is for: ``loader.py`` converts what is not as in the file.

Whoever asks goes on with other work meanwhile, and waits once, at the end.
"""

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from vlfit.engine.pinned import make_stage
from vlfit.engine.streams import side_stream
from vlfit.errors import CheckpointError
from vlfit.units import MIB

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
