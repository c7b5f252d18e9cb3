"""A checkpoint in, the same model in fewer bits out, tensor by tensor.

From 16 bits, or from FP8 to less. Some rows of one tensor are in memory at a time, whatever the size of the
model. Norms, and what nobody asked to round (embedding, head, vision tower), keep their bytes.
"""

import json
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from vlfit.checkpoint.conversions import GROUP_SIZE
from vlfit.checkpoint.headers import INDEX_FILE
from vlfit.checkpoint.quantization import FLOAT_FORMAT, INT4, Fp8Format
from vlfit.checkpoint.source import Checkpoint, read_checkpoint
from vlfit.errors import BrokenShard
from vlfit.layers.linear import dequantize_fp8, dequantize_int4, dequantize_int8, signed_codes
from vlfit.loading.loader import Loader
from vlfit.quantize.model_card import Conversion, card
from vlfit.quantize.output_files import (
    Job,
    Shard,
    ShardWriter,
    cannot_write,
    check_disk,
    copy_small_files,
    index,
    jobs,
    new_folder,
    shards,
    small_bytes,
    write_text,
)
from vlfit.quantize.recipe import (
    KEPT,
    TOWER,
    Form,
    Recipe,
    Wanted,
    kept_layers,
    new_recipe,
    quantization_config,
)
from vlfit.quantize.rounding import nearest_error, quantize_fp8, quantize_integers
from vlfit.units import GIB

# One weight at a time: read some rows, round them on all cores, write what stands for them.
#
# Knows: how rows are shared among threads, and the account of what rounding changed. Does not know:
# folders.


_ROWS_READ = 1024
# What one thread rounds at a time: small enough for its cache, whole rows of FP8 blocks.
_ROWS_ROUNDED = 128


class Rounded(NamedTuple):
    """Some rows: what is written for them, and squares for the account of errors."""

    codes: Tensor
    scale: Tensor
    missed: float
    missed_by_nearest: float
    size: float


class Errors:
    """Adds up what rounding changed, by kind of layer (``q_proj``, ``lm_head``, ``vision.qkv``, ...)."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float, float, float]] = {}

    def add(self, kind: str, rounded: Rounded) -> None:
        missed, by_nearest, size = self._sums.get(kind, (0.0, 0.0, 0.0))
        self._sums[kind] = (
            missed + rounded.missed,
            by_nearest + rounded.missed_by_nearest,
            size + rounded.size,
        )

    def relative(self) -> dict[str, float]:
        """Root of the squared error over the root of the squared weights; 0 where all weights are 0."""
        return {kind: _share(missed, size) for kind, (missed, _, size) in self._sums.items()}

    def relative_of_nearest(self) -> dict[str, float]:
        """The same, had each weight gone to the nearest code, and the largest to the last one."""
        return {kind: _share(missed, size) for kind, (_, missed, size) in self._sums.items()}


def _share(missed: float, size: float) -> float:
    return (missed / size) ** 0.5 if size else 0.0


class Converter:
    """Rounds weights. A context manager: within its block torch has one thread an operation.

    Rows are shared out instead: torch's own way, many threads for each short operation, takes ten times as
    long on a machine that has other things to do.
    """

    def __init__(self, loader: Loader, errors: Errors) -> None:
        self._loader = loader
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
        if job.form is None:
            self._write(job, writer)
        else:
            self._round(job, job.form, writer)

    def _write(self, job: Job, writer: ShardWriter) -> None:
        """One piece: the bytes of the file, or what those of FP8 mean, in bfloat16."""
        name = job.pieces[0].name
        if not job.widened:
            writer.copy(job.source, name)
            return
        for rows in self._rows(job):
            writer.append(name, _bytes(rows.bfloat16()))

    def _round(self, job: Job, form: Form, writer: ShardWriter) -> None:
        kind = job.source.name.split(".")[-2]
        if job.source.name.startswith(TOWER):
            kind = f"vision.{kind}"
        for rows in self._rows(job):
            for part in self._pool.map(partial(_round, form), rows.split(_ROWS_ROUNDED)):
                self._errors.add(kind, part)
                writer.append(job.pieces[0].name, _bytes(part.codes))
                writer.append(job.pieces[1].name, _bytes(part.scale))
        for piece in job.pieces[2:]:  # packed codes say the shape too
            writer.append(piece.name, _bytes(torch.tensor(job.source.shape)))

    def _rows(self, job: Job) -> Iterator[Tensor]:
        """The values of a weight in float32, some rows after the other; those of FP8 times their scales."""
        scale = self._loader.tensor(job.scale.name) if job.scale else None
        fp8 = self._loader.checkpoint.config.fp8
        down = fp8.block_rows if fp8 and scale is not None else 1
        first = 0
        for rows in self._loader.rows(job.source.name, max(_ROWS_READ // down, 1) * down):
            if fp8 is not None and scale is not None:
                blocks = scale[first // down : -(-(first + len(rows)) // down)]
                first += len(rows)
                rows = dequantize_fp8(rows, blocks, (down, fp8.block_columns), torch.float32)
            if not bool(rows.isfinite().all()):
                raise BrokenShard(
                    f"{job.source.name} holds NaN or infinity",
                    "The weights are broken: fetch or train them again.",
                )
            yield rows


def _round(form: Form, rows: Tensor) -> Rounded:
    if isinstance(form, Fp8Format):
        return _round_to_floats(rows, (form.block_rows, form.block_columns))
    if form.kind == FLOAT_FORMAT:
        return _round_to_floats(rows, (form.block_rows, form.group_size or rows.shape[1]))
    return _round_to_integers(rows, form.bits, form.group_size)


def _round_to_floats(rows: Tensor, block: tuple[int, int]) -> Rounded:
    codes, scale = quantize_fp8(rows, block)
    missed = _power(dequantize_fp8(codes, scale, block, torch.float32).sub_(rows))
    return Rounded(codes, scale, missed, missed, _power(rows))


def _round_to_integers(rows: Tensor, bits: int, group_size: int | None) -> Rounded:
    codes, scale = quantize_integers(rows, bits, group_size)
    if bits == 4:
        back = dequantize_int4(codes, scale, None, torch.float32)
    else:
        back = dequantize_int8(signed_codes(codes.clone()), scale, torch.float32)
    nearest = nearest_error(rows, bits, group_size)
    return Rounded(codes, scale, _power(back.sub_(rows)), nearest, _power(rows))


def _power(values: Tensor) -> float:
    return float(values.square().sum(dtype=torch.float64))


def _bytes(tensor: Tensor) -> memoryview:
    data: memoryview = tensor.contiguous().view(torch.uint8).numpy().data
    return data


GROUP_SIZES = (32, 64, 128)  # what the kernels of vLLM take
DEFAULT_GROUP_SIZE = GROUP_SIZE
DEFAULT_SHARD_BYTES = 4 * GIB

Progress = Callable[[int, int], None]  # bytes read so far, bytes in all


def convert(
    checkpoint: Checkpoint,
    weights: str,
    target: Path,
    *,
    group_size: int = DEFAULT_GROUP_SIZE,
    head: str = KEPT,
    embedding: str = KEPT,
    vision: str = KEPT,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    replace: bool = False,
    progress: Progress | None = None,
) -> Conversion:
    """Write ``checkpoint`` to the folder ``target`` with its text layers in ``weights`` (``fp8``, ``int4``).

    ``head``: the output head's form, where it is not tied to the embedding (``16``, ``int8``, ``int4``);
    ``embedding`` and ``vision``: the table's and the tower's (``16``, ``int8``).

    ``target`` appears when all is written, or not at all. Raises ``UsageError`` for what cannot be made of
    this checkpoint (``new_recipe``) and a ``target`` that is taken (``replace`` takes the place of a
    checkpoint), and ``VlfitError`` when the disk is full or cannot be written.
    """
    started = time.perf_counter()
    wanted = Wanted(weights, group_size, head, embedding, vision)
    recipe = new_recipe(checkpoint, wanted)
    all_jobs = jobs(checkpoint, recipe)
    files = shards(all_jobs, shard_bytes)
    errors = Errors()
    try:
        with new_folder(target, checkpoint.folder, replace=replace) as folder:
            config = _config(checkpoint, recipe)
            listing = json.dumps(index(files), indent=2) + "\n" if len(files) > 1 else ""
            weight_bytes = sum(len(file.head) for file in files) + sum(job.bytes for job in all_jobs)
            check_disk(folder, weight_bytes + len(config + listing) + small_bytes(checkpoint.folder))
            _write_weights(checkpoint, files, folder, errors, progress)
            copy_small_files(checkpoint.folder, folder)
            if listing:
                write_text(folder / INDEX_FILE, listing)
            # Last: a folder without it is no checkpoint to anybody.
            write_text(folder / "config.json", config)
            read_checkpoint(target.name, folder)  # what cannot be opened again is not handed out
            done = _account(checkpoint, wanted, recipe, target, all_jobs, errors, started)
            write_text(folder / "README.md", card(done))
    except OSError as error:
        raise cannot_write(target, error) from error
    return done


def _account(
    checkpoint: Checkpoint,
    wanted: Wanted,
    recipe: Recipe,
    target: Path,
    all_jobs: list[Job],
    errors: Errors,
    started: float,
) -> Conversion:
    stay_fp8 = sum(job.source.count for job in all_jobs if job.stays_fp8)
    return Conversion(
        source=checkpoint.name,
        source_weights=checkpoint.weights_format,
        folder=target,
        weights=wanted.weights,
        bytes_before=checkpoint.weight_bytes,
        bytes_after=sum(job.bytes for job in all_jobs),
        parameters=checkpoint.parameter_count,
        converted_parameters=stay_fp8 + sum(job.source.count for job in all_jobs if job.form),
        group_size=wanted.group_size if wanted.weights == INT4 else None,
        head=wanted.head,
        embedding=wanted.embedding,
        vision=wanted.vision,
        kept=tuple(kept_layers(checkpoint, recipe)),
        relative_errors=errors.relative(),
        nearest_errors=errors.relative_of_nearest(),
        seconds=time.perf_counter() - started,
    )


def _write_weights(
    checkpoint: Checkpoint,
    files: list[Shard],
    folder: Path,
    errors: Errors,
    progress: Progress | None,
) -> None:
    total, read = checkpoint.weight_bytes, 0
    with (
        Loader(checkpoint, torch.device("cpu"), torch.float32) as loader,
        Converter(loader, errors) as converter,
    ):
        for shard in files:
            with ShardWriter(folder, shard) as writer:
                for job in shard.jobs:
                    converter.convert(job, writer)
                    read += job.bytes_read
                    if progress:
                        progress(read, total)


def _config(checkpoint: Checkpoint, recipe: Recipe) -> str:
    """config.json as it was, with a word about the weights."""
    config = json.loads((checkpoint.folder / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = quantization_config(checkpoint, recipe)
    return json.dumps(config, indent=2, ensure_ascii=False) + "\n"
