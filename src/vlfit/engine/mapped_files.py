"""Safetensors files mapped into memory: the numbers of one tensor after the other, each read once.

Knows files, bytes and dtypes. Does not know what tensors are for, nor devices.
"""

import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from vlfit.checkpoint.headers import TensorInfo
from vlfit.errors import UnknownWeightsFormat

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
