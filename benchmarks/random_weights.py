"""Random bytes into a hollow checkpoint (``hollow.py``), so that reading it reads memory and not holes.

Values are finite and of the size that trained ones have: no score of anything, but nothing overflows. Knows
dtypes. Does not know what the tensors do.
"""

import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.hollow import write_hollow
from vlfit.checkpoint.headers import TensorInfo, read_headers
from vlfit.quantize.conversion import DEFAULT_GROUP_SIZE

BLOCK = 16 * 2**20  # bytes made once for each kind, and written over and over
WEIGHT = 0.02  # standard deviation
SCALE = 0.002  # of quantized weights, about WEIGHT over what their codes come to
ONE = np.array([0x3F80], dtype=np.uint16)  # in bfloat16


def write_random(
    folder: Path, size: str, weights: str, int8: Collection[str] = (), group_size: int = DEFAULT_GROUP_SIZE
) -> Path:
    """A checkpoint as ``write_hollow`` makes it, in the new ``folder``, and its bytes in memory."""
    write_hollow(folder, size, weights, int8, group_size)
    fill(folder)
    return folder


def room_in_memory(least: int = 10**10) -> str | None:
    """A folder whose files are pages of memory, if there is one with so many bytes free; else None.

    Files anywhere else are in the page cache too once they are written, while the system has room for them.
    """
    memory = Path("/dev/shm")
    return str(memory) if memory.is_dir() and shutil.disk_usage(memory).free > least else None


def fill(folder: Path) -> None:
    """Write all tensors that the headers in ``folder`` name."""
    made: dict[str, bytes] = {}
    for info in read_headers(folder).values():
        kind = kind_of(info)
        if kind is None:
            continue
        if kind not in made:
            made[kind] = MAKERS[kind](np.random.default_rng(7)).tobytes()
        with info.file.open("r+b", buffering=0) as file:
            file.seek(info.start)
            left = info.bytes
            while left:
                left -= file.write(made[kind][: min(left, BLOCK)])


def kind_of(info: TensorInfo) -> str | None:
    """Which of ``MAKERS`` fills a tensor; None for what says shapes and is not read."""
    if info.name.endswith(".weight_shape"):
        return None
    if "_scale" in info.name:
        return f"scale {info.dtype}"
    if info.dtype == "BF16" and len(info.shape) == 1 and info.name.endswith(".weight"):
        return "norm"
    return info.dtype


def _bfloat16(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def _bytes(random: np.random.Generator) -> np.ndarray[Any, Any]:
    return random.integers(0, 256, BLOCK, dtype=np.uint8)


MAKERS: dict[str, Callable[[np.random.Generator], np.ndarray[Any, Any]]] = {
    "BF16": lambda random: _bfloat16(random.normal(0, WEIGHT, BLOCK // 2)),
    "F32": lambda random: random.normal(0, WEIGHT, BLOCK // 4).astype(np.float32),
    "norm": lambda random: np.repeat(ONE, BLOCK // 2),
    # Without the exponent's first bit nothing is above 2, and nothing is "not a number".
    "F8_E4M3": lambda random: _bytes(random) & np.uint8(0xBF),
    "I32": _bytes,
    "I8": _bytes,
    "scale F32": lambda random: random.uniform(SCALE / 2, SCALE, BLOCK // 4).astype(np.float32),
    "scale BF16": lambda random: _bfloat16(random.uniform(SCALE / 2, SCALE, BLOCK // 2)),
}
