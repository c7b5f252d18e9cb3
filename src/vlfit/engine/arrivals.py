"""How the numbers of a tensor come from its file to where they stay: at once, or while others go on.

Large tensors that a GPU gets as they are in their file are read by threads (``reading.py``); the others are
converted and put in order from a mapped file as they are asked for (``mapped_files.py``, ``repack.py``).
Knows both ways and counts bytes. Does not know what a tensor is for (``loader.py``).
"""

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from vlfit.checkpoint.headers import Layout, TensorInfo
from vlfit.engine.mapped_files import MappedFiles, torch_dtype
from vlfit.engine.reading import Reader
from vlfit.engine.repack import repack, shape_in_file
from vlfit.units import MIB, format_bandwidth, format_bytes, format_seconds

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
