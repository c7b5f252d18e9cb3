"""Convert a checkpoint to FP8 or int4, tensor by tensor, from 16 bits or from FP8.

A few rows of one tensor are in memory at a time, whatever the size of the model. Norms, and parts that are
not to be quantized (embedding, head, vision tower), are copied byte for byte.
"""

import json
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from vlfit.api.progress import ByteProgress
from vlfit.checkpoint.conversions import GROUP_SIZE
from vlfit.checkpoint.headers import INDEX_FILE
from vlfit.checkpoint.quantization import FLOAT_FORMAT, INT4, Fp8Format
from vlfit.checkpoint.source import Checkpoint, read_checkpoint
from vlfit.checkpoint.tensors import is_vision
from vlfit.errors import BrokenShard
from vlfit.layers.linear import dequantize_fp8, dequantize_int4, dequantize_int8, unpack_int8
from vlfit.loading.loader import Loader
from vlfit.quantize.model_card import ConversionResult, model_card
from vlfit.quantize.output_files import (
    Shard,
    ShardWriter,
    TensorConversion,
    atomic_folder,
    check_disk_space,
    copy_small_files,
    plan_shards,
    plan_tensors,
    safetensors_index,
    small_files_bytes,
    write_error,
    write_text_synced,
)
from vlfit.quantize.recipe import (
    UNCHANGED,
    ConversionOptions,
    Recipe,
    TargetFormat,
    indivisible_layers,
    new_recipe,
    quantization_config,
)
from vlfit.quantize.rounding import nearest_squared_error, quantize_fp8, quantize_int
from vlfit.units import GIB

GROUP_SIZES = (32, 64, 128)  # that vLLM's kernels support
DEFAULT_GROUP_SIZE = GROUP_SIZE
DEFAULT_SHARD_BYTES = 4 * GIB

_READ_ROWS = 1024
# Rows that one thread quantizes at a time: they fit its cache, and are whole rows of FP8 blocks.
_QUANTIZE_ROWS = 128


class QuantizedRows(NamedTuple):
    """Rows of a weight after quantization, with sums of squares for its quantization errors.

    ``codes`` and ``scale``: as ``quantize_fp8`` or ``quantize_int`` returns them. ``squared_error``: of
    the quantized rows; ``nearest_squared_error``: of plain rounding to nearest; ``squared_norm``: of the
    unquantized weights.
    """

    codes: Tensor
    scale: Tensor
    squared_error: float
    nearest_squared_error: float
    squared_norm: float


class QuantizationErrors:
    """Sums up quantization errors by kind of layer (``q_proj``, ``lm_head``, ``vision.qkv``, ...)."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float, float, float]] = {}

    def add(self, kind: str, rows: QuantizedRows) -> None:
        """Add the errors of ``rows``, some rows of a layer of ``kind``."""
        error, nearest_error, norm = self._sums.get(kind, (0.0, 0.0, 0.0))
        self._sums[kind] = (
            error + rows.squared_error,
            nearest_error + rows.nearest_squared_error,
            norm + rows.squared_norm,
        )

    def relative_errors(self) -> dict[str, float]:
        """Relative error by kind: root of summed squared errors, over root of summed squared weights.

        0 if all weights are 0.
        """
        return {kind: _relative_error(error, norm) for kind, (error, _, norm) in self._sums.items()}

    def relative_errors_of_nearest(self) -> dict[str, float]:
        """What ``relative_errors`` would be for plain rounding to nearest (``nearest_squared_error``)."""
        return {kind: _relative_error(error, norm) for kind, (_, error, norm) in self._sums.items()}


def _relative_error(squared_error: float, squared_norm: float) -> float:
    return (squared_error / squared_norm) ** 0.5 if squared_norm else 0.0


class Converter:
    """Converts tensors one at a time, each on several threads, and adds their errors to ``errors``.

    A context manager: within its block torch uses one thread per operation in the whole process, and rows
    are distributed over threads instead. Torch's way, many threads for each short operation, takes ten times
    as long on a busy machine.
    """

    def __init__(self, loader: Loader, errors: QuantizationErrors) -> None:
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

    def convert(self, tensor: TensorConversion, writer: ShardWriter) -> None:
        """Read ``tensor.source`` and write all of ``tensor.outputs`` to ``writer``.

        Raises ``BrokenShard`` for NaN or infinity, unless the tensor is only copied.
        """
        if tensor.target_format is None:
            self._write_unquantized(tensor, writer)
        else:
            self._write_quantized(tensor, tensor.target_format, writer)

    def _write_unquantized(self, tensor: TensorConversion, writer: ShardWriter) -> None:
        """Write a tensor that is not quantized: its bytes, or dequantized from FP8 to bfloat16."""
        name = tensor.outputs[0].name
        if not tensor.dequantized:
            writer.copy(tensor.source, name)
            return
        for rows in self._rows(tensor):
            writer.append(name, _as_bytes(rows.bfloat16()))

    def _write_quantized(
        self, tensor: TensorConversion, target_format: TargetFormat, writer: ShardWriter
    ) -> None:
        kind = tensor.source.name.split(".")[-2]
        if is_vision(tensor.source.name):
            kind = f"vision.{kind}"
        for rows in self._rows(tensor):
            for quantized in self._pool.map(partial(_quantize, target_format), rows.split(_QUANTIZE_ROWS)):
                self._errors.add(kind, quantized)
                writer.append(tensor.outputs[0].name, _as_bytes(quantized.codes))
                writer.append(tensor.outputs[1].name, _as_bytes(quantized.scale))
        for output in tensor.outputs[2:]:  # the shape, which packed codes do not tell
            writer.append(output.name, _as_bytes(torch.tensor(tensor.source.shape)))

    def _rows(self, tensor: TensorConversion) -> Iterator[Tensor]:
        """The values of a weight in float32, a few rows at a time; FP8 is dequantized."""
        scale = self._loader.tensor(tensor.scale.name) if tensor.scale else None
        fp8 = self._loader.checkpoint.config.fp8
        block_rows = fp8.block_rows if fp8 and scale is not None else 1
        first = 0
        for rows in self._loader.rows(tensor.source.name, max(_READ_ROWS // block_rows, 1) * block_rows):
            if fp8 is not None and scale is not None:
                blocks = scale[first // block_rows : -(-(first + len(rows)) // block_rows)]
                first += len(rows)
                rows = dequantize_fp8(rows, blocks, (block_rows, fp8.block_columns), torch.float32)
            if not bool(rows.isfinite().all()):
                raise BrokenShard(
                    f"{tensor.source.name} contains NaN or infinity",
                    "The weights are corrupt: download the checkpoint again.",
                )
            yield rows


def _quantize(target_format: TargetFormat, rows: Tensor) -> QuantizedRows:
    if isinstance(target_format, Fp8Format):
        return _quantize_fp8(rows, (target_format.block_rows, target_format.block_columns))
    if target_format.kind == FLOAT_FORMAT:
        return _quantize_fp8(rows, (target_format.block_rows, target_format.group_size or rows.shape[1]))
    return _quantize_int(rows, target_format.bits, target_format.group_size)


def _quantize_fp8(rows: Tensor, block: tuple[int, int]) -> QuantizedRows:
    codes, scale = quantize_fp8(rows, block)
    error = _sum_of_squares(dequantize_fp8(codes, scale, block, torch.float32).sub_(rows))
    return QuantizedRows(codes, scale, error, error, _sum_of_squares(rows))


def _quantize_int(rows: Tensor, bits: int, group_size: int | None) -> QuantizedRows:
    codes, scale = quantize_int(rows, bits, group_size)
    if bits == 4:
        dequantized = dequantize_int4(codes, scale, None, torch.float32)
    else:
        dequantized = dequantize_int8(unpack_int8(codes.clone()), scale, torch.float32)
    nearest_error = nearest_squared_error(rows, bits, group_size)
    return QuantizedRows(
        codes, scale, _sum_of_squares(dequantized.sub_(rows)), nearest_error, _sum_of_squares(rows)
    )


def _sum_of_squares(values: Tensor) -> float:
    return float(values.square().sum(dtype=torch.float64))


def _as_bytes(tensor: Tensor) -> memoryview:
    data: memoryview = tensor.contiguous().view(torch.uint8).numpy().data
    return data


def convert(
    checkpoint: Checkpoint,
    weights: str,
    target: Path,
    *,
    group_size: int = DEFAULT_GROUP_SIZE,
    head: str = UNCHANGED,
    embedding: str = UNCHANGED,
    vision: str = UNCHANGED,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    replace: bool = False,
    progress: ByteProgress | None = None,
) -> ConversionResult:
    """Write ``checkpoint`` to the folder ``target`` with its text layers in ``weights`` (``fp8``, ``int4``).

    ``head``: format of the output head, if it is not tied to the embedding (``16``, ``int8``, ``int4``);
    ``embedding`` and ``vision``: of the embedding and the vision tower (``16``, ``int8``). ``16`` copies the
    part. ``group_size``: inputs that share a scale in int4. ``shard_bytes``: largest size of a file, unless
    one tensor is larger. ``replace``: if ``target`` is a checkpoint already, replace it. ``progress``: called
    with bytes read and in total.

    ``target`` appears when it is complete, or not at all. Raises ``UsageError`` if the options do not suit
    this checkpoint (``new_recipe``) or ``target`` exists and is not replaced, ``BrokenShard`` for NaN or
    infinity, and ``VlfitError`` if the disk is full or cannot be written.
    """
    started = time.perf_counter()
    options = ConversionOptions(weights, group_size, head, embedding, vision)
    recipe = new_recipe(checkpoint, options)
    tensors = plan_tensors(checkpoint, recipe)
    shards = plan_shards(tensors, shard_bytes)
    errors = QuantizationErrors()
    try:
        with atomic_folder(target, checkpoint.folder, replace=replace) as folder:
            config = _config_json(checkpoint, recipe)
            index_json = json.dumps(safetensors_index(shards), indent=2) + "\n" if len(shards) > 1 else ""
            weight_bytes = sum(len(shard.header) for shard in shards) + sum(
                tensor.bytes for tensor in tensors
            )
            check_disk_space(
                folder, weight_bytes + len(config + index_json) + small_files_bytes(checkpoint.folder)
            )
            _write_weights(checkpoint, shards, folder, errors, progress)
            copy_small_files(checkpoint.folder, folder)
            if index_json:
                write_text_synced(folder / INDEX_FILE, index_json)
            # Last: without it the folder is not a checkpoint.
            write_text_synced(folder / "config.json", config)
            read_checkpoint(target.name, folder)  # the result must open
            result = _conversion_result(checkpoint, options, recipe, target, tensors, errors, started)
            write_text_synced(folder / "README.md", model_card(result))
    except OSError as error:
        raise write_error(target, error) from error
    return result


def _conversion_result(
    checkpoint: Checkpoint,
    options: ConversionOptions,
    recipe: Recipe,
    target: Path,
    tensors: list[TensorConversion],
    errors: QuantizationErrors,
    started: float,
) -> ConversionResult:
    copied_fp8_parameters = sum(tensor.source.count for tensor in tensors if tensor.stays_fp8)
    return ConversionResult(
        source=checkpoint.name,
        source_weights=checkpoint.weights_format,
        folder=target,
        weights=options.weights,
        bytes_before=checkpoint.weight_bytes,
        bytes_after=sum(tensor.bytes for tensor in tensors),
        parameters=checkpoint.parameter_count,
        converted_parameters=copied_fp8_parameters
        + sum(tensor.source.count for tensor in tensors if tensor.target_format),
        group_size=options.group_size if options.weights == INT4 else None,
        head=options.head,
        embedding=options.embedding,
        vision=options.vision,
        kept=tuple(indivisible_layers(checkpoint, recipe)),
        relative_errors=errors.relative_errors(),
        nearest_errors=errors.relative_errors_of_nearest(),
        seconds=time.perf_counter() - started,
    )


def _write_weights(
    checkpoint: Checkpoint,
    shards: list[Shard],
    folder: Path,
    errors: QuantizationErrors,
    progress: ByteProgress | None,
) -> None:
    total, read = checkpoint.weight_bytes, 0
    with (
        Loader(checkpoint, torch.device("cpu"), torch.float32) as loader,
        Converter(loader, errors) as converter,
    ):
        for shard in shards:
            with ShardWriter(folder, shard) as writer:
                for tensor in shard.tensors:
                    converter.convert(tensor, writer)
                    read += tensor.bytes_read
                    if progress:
                        progress(read, total)


def _config_json(checkpoint: Checkpoint, recipe: Recipe) -> str:
    """config.json with the new ``quantization_config``."""
    config = json.loads((checkpoint.folder / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = quantization_config(checkpoint, recipe)
    return json.dumps(config, indent=2, ensure_ascii=False) + "\n"
