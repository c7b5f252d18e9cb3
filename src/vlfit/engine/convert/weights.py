"""One weight at a time: read some rows, round them on all cores, write what stands for them.

Knows: how rows are shared among threads, and the account of what rounding changed. Does not know: folders.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from vlfit.checkpoint.quantization import Fp8Format, WeightScheme
from vlfit.engine.convert.files import ShardWriter
from vlfit.engine.convert.layout import Job
from vlfit.engine.convert.quantize import quantize_fp8, quantize_int4
from vlfit.engine.layers.linear import dequantize_fp8, dequantize_int4
from vlfit.engine.loader import Loader
from vlfit.errors import BrokenShard

_ROWS_READ = 1024
# What one thread rounds at a time: small enough for its cache, whole rows of FP8 blocks.
_ROWS_ROUNDED = 128


class Rounded(NamedTuple):
    """Some rows: what is written for them, and squares for the account of errors."""

    codes: Tensor
    scale: Tensor
    missed: float
    size: float


class Errors:
    """Adds up what rounding changed, by kind of layer (``q_proj``, ``down_proj``, ...)."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float, float]] = {}

    def add(self, kind: str, rounded: Rounded) -> None:
        missed, size = self._sums.get(kind, (0.0, 0.0))
        self._sums[kind] = missed + rounded.missed, size + rounded.size

    def relative(self) -> dict[str, float]:
        """Root of the squared error over the root of the squared weights; 0 where all weights are 0."""
        return {kind: (missed / size) ** 0.5 if size else 0.0 for kind, (missed, size) in self._sums.items()}


class Converter:
    """Rounds weights to ``form``. A context manager: within its block torch has one thread an operation.

    Rows are shared out instead: torch's own way, many threads for each short operation, takes ten times as
    long on a machine that has other things to do.
    """

    def __init__(self, loader: Loader, form: Fp8Format | WeightScheme, errors: Errors) -> None:
        self._loader = loader
        self._form = form
        self._errors = errors
        self._threads = torch.get_num_threads()

    def __enter__(self) -> "Converter":
        torch.set_num_threads(1)
        workers = min(self._threads, os.cpu_count() or 1)
        self._pool = ThreadPoolExecutor(workers, initializer=partial(torch.set_num_threads, 1))
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)
        torch.set_num_threads(self._threads)

    def convert(self, job: Job, writer: ShardWriter) -> None:
        """Write the pieces of ``job``. Raises ``BrokenShard`` where a weight is no number."""
        kind = job.source.name.split(".")[-2]
        for rows in self._loader.rows(job.source.name, _ROWS_READ):
            if not bool(rows.isfinite().all()):
                raise BrokenShard(
                    f"{job.source.name} holds NaN or infinity",
                    "The weights are broken: fetch or train them again.",
                )
            for part in self._pool.map(partial(_round, self._form), rows.split(_ROWS_ROUNDED)):
                self._errors.add(kind, part)
                writer.append(job.pieces[0].name, _bytes(part.codes))
                writer.append(job.pieces[1].name, _bytes(part.scale))
        for piece in job.pieces[2:]:  # int4 says the shape too
            writer.append(piece.name, _bytes(torch.tensor(job.source.shape)))


def _round(form: Fp8Format | WeightScheme, rows: Tensor) -> Rounded:
    if isinstance(form, Fp8Format):
        block = (form.block_rows, form.block_columns)
        codes, scale = quantize_fp8(rows, block)
        back = dequantize_fp8(codes, scale, block, torch.float32)
    else:
        codes, scale = quantize_int4(rows, form.group_size)
        back = dequantize_int4(codes, scale, None, torch.float32)
    missed = float((back - rows).square().sum(dtype=torch.float64))
    return Rounded(codes, scale, missed, float(rows.square().sum(dtype=torch.float64)))


def _bytes(tensor: Tensor) -> memoryview:
    data: memoryview = tensor.contiguous().view(torch.uint8).numpy().data
    return data
