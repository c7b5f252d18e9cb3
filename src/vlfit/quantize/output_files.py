"""Plan and write the files of a converted checkpoint: safetensors shards written piece by piece, the small
files that are copied, and a folder that appears complete or not at all.
"""

import errno
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from vlfit.checkpoint import pooling_files
from vlfit.checkpoint.headers import SINGLE_FILE, TensorInfo, dtype_bytes
from vlfit.checkpoint.quantization import FLOAT_FORMAT, PACKED_FORMAT, Fp8Format
from vlfit.checkpoint.source import Checkpoint
from vlfit.checkpoint.tensors import (
    COMPRESSED_SCALE_SUFFIX,
    FP8_SCALE_SUFFIX,
    plain_tensor_shapes,
    quantizable_weight_shapes,
)
from vlfit.errors import UsageError, VlfitError
from vlfit.quantize.recipe import HEAD, Recipe, TargetFormat
from vlfit.units import MIB, format_bytes


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """One tensor of the new checkpoint; ``dtype`` as safetensors spells it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int


@dataclass(frozen=True, slots=True)
class TensorConversion:
    """One tensor of the source checkpoint, ``source``, and the tensors written for it, ``outputs``.

    ``target_format``: the tensor is quantized, and ``outputs`` are codes, scales and possibly a shape. None:
    the only output is a copy, or the values in bfloat16 if ``dequantized``. ``scale``: the scales of an FP8
    source that is not copied; else None.
    """

    source: TensorInfo
    outputs: tuple[OutputTensor, ...]
    target_format: TargetFormat | None = None
    scale: TensorInfo | None = None
    dequantized: bool = False

    @property
    def bytes(self) -> int:
        """Bytes of all ``outputs``."""
        return sum(output.bytes for output in self.outputs)

    @property
    def stays_fp8(self) -> bool:
        """Whether ``source`` is an FP8 weight that is copied."""
        return self.source.dtype == "F8_E4M3" and self.target_format is None and not self.dequantized

    @property
    def bytes_read(self) -> int:
        """Bytes of ``source`` and ``scale``."""
        return self.source.bytes + (self.scale.bytes if self.scale else 0)


@dataclass(frozen=True, slots=True)
class Shard:
    """One safetensors file to write, called ``name``, for ``tensors``.

    ``header``: its first bytes, the 8 bytes of the header's length included. ``offsets``: for each output by
    name, its first byte and the one after its last, from the beginning of the file.
    """

    name: str
    tensors: tuple[TensorConversion, ...]
    header: bytes
    offsets: dict[str, tuple[int, int]]


def plan_tensors(checkpoint: Checkpoint, recipe: Recipe) -> list[TensorConversion]:
    """Plan what is written for each tensor of ``checkpoint``, in the order of its files. Reads no weights.

    Left out are FP8 scales that are no longer needed and, if the embedding is quantized, a redundant copy of
    a tied head.
    """
    shapes = quantizable_weight_shapes(plain_tensor_shapes(checkpoint.config))
    # A redundant copy of a tied embedding would stay in 16 bits.
    copied_head = f"{HEAD}.weight" if checkpoint.config.tie_word_embeddings and recipe.embedding else None
    tensors: list[TensorConversion] = []
    for name, info in checkpoint.tensors.items():
        if name != copied_head:
            tensors += _plan_tensor(checkpoint, recipe, info, shapes.get(name))
    return tensors


def _plan_tensor(
    checkpoint: Checkpoint, recipe: Recipe, info: TensorInfo, shape: tuple[int, int] | None
) -> Iterator[TensorConversion]:
    """What is written for one tensor; scales of FP8 are written only with weights that stay FP8."""
    name = info.name
    is_fp8 = info.dtype == "F8_E4M3"
    if recipe.keeps_fp8_text and (is_fp8 or name.endswith(FP8_SCALE_SUFFIX)):
        new_name = name.replace(f".weight{FP8_SCALE_SUFFIX}", COMPRESSED_SCALE_SUFFIX)
        yield TensorConversion(info, (OutputTensor(new_name, info.dtype, info.shape, info.bytes),))
        return
    if name.endswith(FP8_SCALE_SUFFIX):
        return
    scale = checkpoint.tensors[name + FP8_SCALE_SUFFIX] if is_fp8 else None
    target_format = recipe.target_format_for(name, shape[1]) if shape else None
    if target_format is not None and shape is not None:
        yield TensorConversion(
            info, tuple(_quantized_outputs(target_format, name, *shape)), target_format, scale
        )
    elif is_fp8:
        yield TensorConversion(
            info, (_output_tensor(name, "BF16", info.shape),), None, scale, dequantized=True
        )
    else:
        yield TensorConversion(info, (OutputTensor(name, info.dtype, info.shape, info.bytes),))


def _quantized_outputs(
    target_format: TargetFormat, name: str, rows: int, columns: int
) -> Iterator[OutputTensor]:
    """Outputs of a quantized weight: codes, scales, and the shape that packed codes do not tell."""
    if isinstance(target_format, Fp8Format):
        yield _output_tensor(name, "F8_E4M3", (rows, columns))
        yield _output_tensor(name + FP8_SCALE_SUFFIX, "BF16", target_format.scale_shape(rows, columns))
        return
    module = name.removesuffix(".weight")
    dtypes = {
        "weight": "F8_E4M3" if target_format.kind == FLOAT_FORMAT else "I8",
        "weight_packed": "I32",
        "weight_scale": "BF16",
    }
    for part, shape in target_format.tensor_shapes(rows, columns).items():
        yield _output_tensor(f"{module}.{part}", dtypes[part], shape)
    if target_format.kind == PACKED_FORMAT:
        yield _output_tensor(f"{module}.weight_shape", "I64", (2,))


def _output_tensor(name: str, dtype: str, shape: tuple[int, ...]) -> OutputTensor:
    return OutputTensor(name, dtype, shape, dtype_bytes(dtype, prod(shape)))


def plan_shards(tensors: list[TensorConversion], limit: int) -> list[Shard]:
    """Group tensors, in order, into files of at most ``limit`` bytes of data; a larger tensor gets its own.

    Names the files as transformers does: ``model.safetensors``, or ``model-00001-of-00002.safetensors``, ...
    """
    groups: list[list[TensorConversion]] = []
    filled = limit
    for tensor in tensors:
        if not groups or filled + tensor.bytes > limit:
            groups.append([])
            filled = 0
        groups[-1].append(tensor)
        filled += tensor.bytes
    if len(groups) == 1:
        return [_plan_shard(SINGLE_FILE, groups[0])]
    count = len(groups)
    return [
        _plan_shard(f"model-{number:05d}-of-{count:05d}.safetensors", group)
        for number, group in enumerate(groups, 1)
    ]


def _plan_shard(name: str, tensors: list[TensorConversion]) -> Shard:
    # Wide types first, so that every tensor is aligned to its item size.
    outputs = [output for tensor in tensors for output in tensor.outputs]
    outputs.sort(key=lambda output: -output.bytes // max(prod(output.shape), 1))
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    ends: dict[str, int] = {}
    end = 0
    for output in outputs:
        data_offsets = [end, end + output.bytes]
        entries[output.name] = {
            "dtype": output.dtype,
            "shape": list(output.shape),
            "data_offsets": data_offsets,
        }
        end = ends[output.name] = end + output.bytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    offsets = {
        output.name: (len(header) + ends[output.name] - output.bytes, len(header) + ends[output.name])
        for output in outputs
    }
    return Shard(name, tuple(tensors), header, offsets)


def safetensors_index(shards: list[Shard]) -> dict[str, Any]:
    """The content of ``model.safetensors.index.json`` for ``shards``."""
    weight_map = {name: shard.name for shard in shards for name in shard.offsets}
    total = sum(tensor.bytes for shard in shards for tensor in shard.tensors)
    return {"metadata": {"total_size": total}, "weight_map": weight_map}


ORIGINAL_CARD = "README.original.md"
_SMALL_SUFFIXES = (".json", ".jinja", ".txt", ".model")
_LICENSE_PREFIXES = ("LICENSE", "LICENCE", "NOTICE", "COPYING")
_COPY_CHUNK = 16 * MIB
# For the model card and partial disk blocks: a few KiB. The bytes of the weights are known exactly.
_DISK_RESERVE = MIB // 4


@contextmanager
def atomic_folder(target: Path, source: Path, *, replace: bool) -> Iterator[Path]:
    """Yield a temporary folder, which becomes ``target`` if the block ends without an error, else is removed.

    ``replace``: an existing checkpoint ``target`` is replaced at the end; an empty folder always is. A killed
    process leaves a folder ``.NAME.PID.incomplete``, which the next conversion to ``target`` removes, unless
    a process with that id is running. Raises ``UsageError`` if ``target`` exists and is not to be replaced or
    is no checkpoint, or if it is, contains or is inside the folder ``source``.
    """
    target = target.resolve()
    _check_target(target, source.resolve(), replace=replace)
    target.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(target)
    temporary = target.parent / f".{target.name}.{os.getpid()}.incomplete"
    temporary.mkdir()
    try:
        yield temporary
        _publish(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # no longer there after success


def _check_target(target: Path, source: Path, *, replace: bool) -> None:
    if target == source or target in source.parents or source in target.parents:
        raise UsageError(
            f"{target} is, contains, or is inside the checkpoint to convert ({source})",
            "Choose another folder with --out.",
        )
    if not os.path.lexists(target) or _is_empty_folder(target):
        return
    if not replace:
        raise UsageError(
            f"{target} already exists", "Choose another folder with --out, or replace it with --force."
        )
    if not (target / "config.json").is_file() and not any(target.glob("*.gguf")):
        raise UsageError(
            f"{target} is not a checkpoint (it has no config.json), so --force does not delete it",
            "Choose another folder with --out, or delete it yourself.",
        )


def _is_empty_folder(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


def _remove_leftovers(target: Path) -> None:
    """Remove what killed conversions to the same target left behind."""
    # Until the target exists, the old checkpoint that was being replaced is the only copy.
    kinds = ("incomplete", "old") if target.exists() else ("incomplete",)
    for path in target.parent.iterdir():
        number, _, kind = path.name.removeprefix(f".{target.name}.").partition(".")
        if path.name != f".{target.name}.{number}.{kind}" or kind not in kinds or not number.isdecimal():
            continue
        # Including our own id: nothing is written yet, and process ids repeat in containers.
        if int(number) == os.getpid() or not _is_running(int(number)):
            shutil.rmtree(path, ignore_errors=True)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # it exists and belongs to another user
    return True


def _publish(temporary: Path, target: Path) -> None:
    if not os.path.lexists(target) or _is_empty_folder(target):
        temporary.rename(target)
        return
    old = target.parent / f".{target.name}.{os.getpid()}.old"
    try:
        target.rename(old)
        temporary.rename(target)
    except BaseException:
        if old.exists() and not target.exists():
            old.rename(target)
        raise
    shutil.rmtree(old, ignore_errors=True)


def check_disk_space(folder: Path, needed: int) -> None:
    """Raise ``VlfitError`` unless ``needed`` bytes and 256 KiB more are free on the disk of ``folder``."""
    free = shutil.disk_usage(folder).free
    if free < needed + _DISK_RESERVE:
        raise VlfitError(
            f"{folder.parent} has {format_bytes(free)} free; the new checkpoint takes "
            f"{format_bytes(needed)}, plus {format_bytes(_DISK_RESERVE)} for its model card",
            "Free disk space, or choose a folder on another disk with --out.",
        )


def write_error(target: Path, error: OSError) -> VlfitError:
    """The error to raise for ``error``, which ended the writing of ``target``, with a hint by its errno.

    Call it after partial files have been removed: the hints say so.
    """
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        hint = (
            "Free disk space, or choose a folder on another disk with --out. Partial files have been removed."
        )
        return VlfitError(f"the disk is full: {target} was not written", hint)
    if error.errno == errno.EFBIG:
        hint = (
            "Files of this size are not allowed here (`ulimit -f`, or a limit of the file system): write "
            "smaller ones with --shard-mib, or choose another folder with --out."
        )
    elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        hint = "Choose a folder that you can write to with --out."
    else:
        hint = "Nothing was left behind. Try another folder with --out."
    named = f" ({error.filename})" if error.filename else ""
    return VlfitError(f"cannot write {target}: {error.strerror or error}{named}", hint)


def small_files_bytes(source: Path) -> int:
    """Bytes that ``copy_small_files`` would write from ``source``."""
    return sum(path.stat().st_size for path, _ in _small_files(source))


def copy_small_files(source: Path, folder: Path) -> None:
    """Copy tokenizer, image processor, templates and licences from ``source``; no config.json, no weights.

    The source's README.md becomes ``README.original.md``: its scores are those of the original.
    """
    for path, name in _small_files(source):
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(path, folder / name)


def _small_files(source: Path) -> Iterator[tuple[Path, str]]:
    """Files to copy, each with its new name."""
    for path in sorted(source.iterdir()):
        name = path.name
        is_small_file = name.endswith(_SMALL_SUFFIXES) or name.upper().startswith(_LICENSE_PREFIXES)
        if name == "README.md":
            yield path, ORIGINAL_CARD
        elif is_small_file and path.is_file() and name != "config.json" and not name.endswith(".index.json"):
            yield path, name
    for name in pooling_files.FILES:
        if "/" in name and (source / name).is_file():
            yield source / name, name


class ShardWriter:
    """Creates the file of ``shard`` in ``folder``. A context manager: its end syncs the file to disk.

    ``append`` or ``copy`` every output, in any order and in several parts each, so that only one part has to
    be in memory. Raises ``FileExistsError`` if the file exists, ``ValueError`` at the end of the block if an
    output is incomplete.
    """

    def __init__(self, folder: Path, shard: Shard) -> None:
        self._shard = shard
        self._next = {name: start for name, (start, _) in shard.offsets.items()}
        self._file = (folder / shard.name).open("xb")

    def __enter__(self) -> "ShardWriter":
        self._file.write(self._shard.header)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._check_complete()
                self._file.flush()
                os.fsync(self._file.fileno())
        finally:
            self._file.close()

    def append(self, name: str, part: bytes | memoryview) -> None:
        """Write the next bytes of the output ``name``, after those written before.

        Raises ``ValueError`` if they exceed the output's size.
        """
        view = memoryview(part).cast("B")
        start = self._next[name]
        if start + len(view) > self._shard.offsets[name][1]:
            raise ValueError(f"{name}: more bytes than planned in {self._shard.name} has")
        self._file.seek(start)
        self._file.write(view)
        self._next[name] = start + len(view)

    def copy(self, info: TensorInfo, name: str) -> None:
        """Append the bytes of the tensor ``info``, read from its file as they are, to the output ``name``.

        Reads piece by piece, so the tensor is never in memory whole. Raises ``ValueError`` if the output
        has no room for them, ``OSError`` if the source file cannot be read or has become shorter.
        """
        with info.file.open("rb") as source:
            source.seek(info.start)
            left = info.bytes
            while left:
                part = source.read(min(left, _COPY_CHUNK))
                if not part:
                    raise OSError(f"{info.file} ended early; it changed while it was read")
                self.append(name, part)
                left -= len(part)

    def _check_complete(self) -> None:
        for name, (_, end) in self._shard.offsets.items():
            if self._next[name] != end:
                raise ValueError(f"{name}: {end - self._next[name]} bytes were never written")


def write_text_synced(path: Path, text: str) -> None:
    """Write ``text`` to ``path``, replacing an existing file, and sync it to disk."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
