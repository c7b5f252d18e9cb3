"""Safetensors headers: the tensors of a checkpoint and where they lie in its files.

The format: 8 bytes of header length, a JSON header, then the data; one file, or shards with an index. Nothing
here reads past a header.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

from vlfit.checkpoint import store
from vlfit.checkpoint.fields import Fields
from vlfit.checkpoint.gguf.gguf_folder import is_gguf_folder, read_sources
from vlfit.checkpoint.gguf.stored_blocks import BlockPart, StoredBlocks
from vlfit.errors import BrokenShard, MissingFile

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

# The format's own limit; a larger length means that the file is not a safetensors file.
MAX_HEADER_BYTES = 100_000_000
# Enough to recognise what a file is instead.
_SAMPLE_BYTES = 256
_DTYPE_BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "I8", "U8", "BOOL"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
_FETCH_AGAIN = "Delete this file and fetch it again: vlfit pull NAME resumes a download."


def dtype_bytes(dtype: str, count: int) -> int:
    """Bytes of ``count`` numbers of ``dtype``, as safetensors names it. Raises ``KeyError`` for another."""
    return count * _DTYPE_BITS[dtype] // 8


class StoredLayout(Enum):
    """How the numbers of a tensor [rows, columns] lie in its file.

    ``PLAIN``: [rows, columns]. ``TRANSPOSED``: [columns, rows]. ``GPTQ_ZEROS``: [columns, rows], and each of
    the eight 4-bit codes in a word is stored less one. ``AWQ_CODES``: [columns, rows / 8]; a word has the
    codes of eight rows, from its lowest bits in the order 0, 2, 4, 6, 1, 3, 5, 7. ``AWQ_ZEROS``: [columns,
    rows], with the eight codes of a word in the same order. ``GGUF_BLOCKS``: in blocks of a GGUF file, which
    ``TensorInfo.blocks`` describes.
    """

    PLAIN = auto()
    TRANSPOSED = auto()
    GPTQ_ZEROS = auto()
    AWQ_CODES = auto()
    AWQ_ZEROS = auto()
    GGUF_BLOCKS = auto()


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor in a safetensors or GGUF file. Its data are at ``file[start:end]``.

    ``start``, ``end``: in bytes from the beginning of the file, not from the end of the header as in
    safetensors' ``data_offsets``. ``dtype``: as safetensors spells it: ``BF16``, ``F16``, ``F8_E4M3``, ...
    ``shape``: of packed weights, in packed words. ``layout``: how the data differ from ``shape``; other than
    ``PLAIN`` only for the tensors of AWQ and GPTQ, after ``tensors.normalize_gptq_awq``, and of GGUF files.
    ``blocks``: only with ``GGUF_BLOCKS``: ``dtype`` and ``shape`` are then those of the unpacked blocks. A
    matrix becomes a tensor of codes and one of scales, with the same ``start`` and ``end``.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    end: int
    layout: StoredLayout = StoredLayout.PLAIN
    blocks: StoredBlocks | None = None

    @property
    def bytes(self) -> int:
        """Bytes of the tensor's data in the file; 0 for scales in blocks that another tensor counts."""
        if self.blocks is None:
            return self.end - self.start
        if self.blocks.part in (BlockPart.SCALES, BlockPart.SUPER_SCALES):
            return 0
        return (self.end - self.start) * self.blocks.pieces

    @property
    def loaded_bytes(self) -> int:
        """Bytes of the tensor in memory in its ``dtype``."""
        return dtype_bytes(self.dtype, self.count)

    @property
    def count(self) -> int:
        """Number of elements; a packed word counts as one."""
        return prod(self.shape)


def read_headers(folder: Path) -> dict[str, TensorInfo]:
    """Every tensor of the checkpoint in ``folder``, by name as in its files: ``model.safetensors`` or shards.

    Raises ``MissingFile`` for a missing file or shard, ``BrokenShard`` for a file whose header is invalid or
    does not match its size, and ``CheckpointError`` for an invalid index.
    """
    tensors: dict[str, TensorInfo] = {}
    for path in shard_files(folder):
        tensors.update(_read_header(path))
    return tensors


def shard_files(folder: Path) -> list[Path]:
    """Paths of ``shard_names`` in ``folder``, or the GGUF files that it stands for.

    Raises ``MissingFile`` if one does not exist.
    """
    if is_gguf_folder(folder):
        return list(read_sources(folder).files)
    names = shard_names(folder)
    missing = [name for name in names if not (folder / name).is_file()]
    command = store.convert_command(folder) if missing else ""
    if missing == [SINGLE_FILE]:
        raise MissingFile(
            f"{folder} holds no weights: neither {SINGLE_FILE} nor {INDEX_FILE} is there",
            f"Convert it again: {command}"
            if command
            else "Fetch the whole checkpoint: vlfit pull NAME. Files of the kind .bin are not read.",
        )
    if missing:
        raise MissingFile(
            f"{len(missing)} of {len(names)} shards are missing in {folder}: {', '.join(missing[:5])}",
            f"Convert it again: {command}"
            if command
            else "Fetch the rest: vlfit pull NAME goes on where a download was cut off.",
        )
    return [folder / name for name in names]


def shard_names(folder: Path) -> list[str]:
    """Names of the safetensors files that the index lists, sorted; without an index ``model.safetensors``.

    The files need not exist. Raises ``CheckpointError`` for an invalid index.
    """
    if not (folder / INDEX_FILE).is_file():
        return [SINGLE_FILE]
    index = Fields.read(folder / INDEX_FILE)
    names = sorted({str(name) for name in index.section("weight_map").values.values()})
    if not names:
        raise index.field_error("weight_map", "is empty", "the shard of every tensor")
    for name in names:
        # The index is not trusted: a name must not lead out of the folder.
        if Path(name).name != name or name == "..":
            raise index.field_error("weight_map", f"names the file {name!r}", "file names without a folder")
    return names


def _read_header(path: Path) -> Iterator[tuple[str, TensorInfo]]:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(_SAMPLE_BYTES)
            length = int.from_bytes(start[:8], "little")
            if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
                raise _not_safetensors(path, size, length, start)
            file.seek(8)
            header = json.loads(file.read(length))
    except OSError as error:
        raise BrokenShard(
            f"{path} cannot be read: {error}", "Check the disk and the file's permissions."
        ) from None
    except (ValueError, RecursionError) as error:
        raise BrokenShard(f"{path} has a header that is not JSON: {error}", _fetch_again(path)) from None
    if not isinstance(header, dict):
        raise BrokenShard(f"{path} has a header that is not a JSON object", _fetch_again(path))
    infos = [
        _parse_entry(path, name, entry, 8 + length)
        for name, entry in header.items()
        if name != "__metadata__"
    ]
    _check_offsets(path, infos, 8 + length, size)
    return iter([(info.name, info) for info in infos])


def _fetch_again(path: Path) -> str:
    """The hint for a broken file: convert the copy again that it is of, or download it again."""
    command = store.convert_command(path.parent)
    return f"Convert it again: {command}" if command else _FETCH_AGAIN


def _not_safetensors(path: Path, size: int, length: int, start: bytes) -> BrokenShard:
    """The error for a file without a header; ``start``: its first bytes, which may tell what it is."""
    if start.startswith(b"version https://git-lfs"):
        return BrokenShard(
            f"{path} is a git-lfs pointer ({size:,} bytes), not the weights themselves",
            "Run git lfs pull in that folder, or fetch the checkpoint with vlfit pull NAME.",
        )
    if is_html(start):
        return BrokenShard(
            f"{path} is a web page (HTML, {size:,} bytes), not weights",
            "The server sent a page, such as a login or an error. " + _fetch_again(path),
        )
    claim = f"its header claims {length:,} bytes" if size >= 8 else "too short for a header"
    return BrokenShard(f"{path} has {size:,} bytes; {claim}", _fetch_again(path))


def is_html(data: bytes) -> bool:
    """Whether ``data``, the first bytes of a file, looks like the beginning of a web page."""
    return data.lstrip(b"\xef\xbb\xbf \t\r\n").lower().startswith((b"<!doctype", b"<html", b"<head"))


def _parse_entry(path: Path, name: str, entry: Any, data_start: int) -> TensorInfo:
    """A tensor of the header, checked: known dtype, whole numbers, as many bytes as its shape takes."""
    fields = entry if isinstance(entry, dict) else {}
    dtype, shape, offsets = (
        fields.get("dtype"),
        _whole_numbers(fields, "shape"),
        _whole_numbers(fields, "data_offsets"),
    )
    if dtype not in _DTYPE_BITS or shape is None or offsets is None or len(offsets) != 2:
        raise BrokenShard(
            f"{path} has an invalid header entry for {name}: {str(entry)[:200]}", _fetch_again(path)
        )
    begin, end = offsets
    expected = dtype_bytes(dtype, prod(shape))
    if end - begin != expected:
        raise BrokenShard(
            f"{path}: {name} ({dtype} {list(shape)}) takes {expected:,} bytes, not {end - begin:,}",
            _fetch_again(path),
        )
    return TensorInfo(name, dtype, shape, path, data_start + begin, data_start + end)


def _whole_numbers(fields: dict[str, Any], name: str) -> tuple[int, ...] | None:
    value = fields.get(name)
    good = isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)
    return tuple(value) if good and value is not None else None


def _check_offsets(path: Path, infos: list[TensorInfo], data_start: int, size: int) -> None:
    """Check that the tensors fill the file from the header to its end, without gaps or overlaps."""
    ordered = sorted(infos, key=lambda info: (info.start, info.end))
    end = max((info.end for info in ordered), default=data_start)
    if size != end:
        what = "truncated" if size < end else "longer than its header says"
        raise BrokenShard(
            f"{path} is {what}: {end:,} bytes expected, {size:,} bytes found", _fetch_again(path)
        )
    if ordered and ordered[0].start != data_start:
        raise BrokenShard(f"{path} leaves a gap after its header", _fetch_again(path))
    for before, after in pairwise(ordered):
        if before.end != after.start:
            what = "overlap" if before.end > after.start else "leave a gap between them"
            raise BrokenShard(f"{path}: {before.name} and {after.name} {what}", _fetch_again(path))
