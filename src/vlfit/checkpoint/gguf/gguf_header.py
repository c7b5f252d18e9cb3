"""The header of a GGUF file: metadata and tensors, read within bounds, of a file or of its first bytes.

A parser of our own, as ``gguf.GGUFReader`` takes 5.7 seconds for a vocabulary of 150,000 tokens (this one
0.15), trusts every count in the file, and needs the whole file. Tables (types, sizes of blocks) are the
``gguf`` package's.

The format (all little-endian): magic, version, number of tensors and of metadata entries; the entries; name,
shape, type and offset of each tensor; padding to ``general.alignment``; the data.
"""

import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vlfit.checkpoint.fields import Fields
from vlfit.checkpoint.gguf.advice import FETCH_AGAIN, OTHER_METADATA
from vlfit.checkpoint.headers import is_html
from vlfit.errors import BrokenShard, MissingFile, UnknownWeightsFormat

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
ALIGNMENT_KEY = "general.alignment"
# Bounds. Real files have some 40 entries and 1,500 tensors, vocabularies of 260,000 tokens with 510,000
# merges, and headers of up to 20 MB; ggml itself allows 4 dimensions and names of 63 bytes.
MAX_HEADER_BYTES = 64 * 2**20
MAX_ENTRIES = 4096
MAX_TENSORS = 65536
MAX_KEY_BYTES = 1024
MAX_STRING_BYTES = 8 * 2**20  # a chat template, a tokenizer.json
MAX_ARRAY_ITEMS = 2**21  # also of all arrays of strings together: Python takes up to 84 bytes for each
MAX_DIMENSIONS = 4
MAX_NAME_BYTES = 127
_SHORT_ARRAY = 4096
# Ends of tensors' names and beginnings of metadata keys: where one is read as the other, counts are wrong.
_TENSOR_ENDINGS = (".weight", ".bias")
_KEY_BEGINNINGS = ("general.", "tokenizer.", "split.", "quantize.")
_MAX_ELEMENTS = 2**48
_MIN_ALIGNMENT, _MAX_ALIGNMENT = 8, 2**20
_STRING, _ARRAY, _BOOL = 8, 9, 7
# Value types of metadata as numpy's; the numbers are the format's.
_SCALARS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "|b1",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}

# A metadata value. Arrays of numbers are numpy's, arrays of strings lists.
Value = bool | int | float | str | list[str] | npt.NDArray[np.generic]


class NeedMoreBytes(Exception):
    """The header goes on after the bytes that were given; ``count``: how many from the start are needed.

    A lower bound: the next attempt may need more still. Never raised for a file on disk.
    """

    def __init__(self, count: int) -> None:
        super().__init__(f"the header needs at least {count:,} bytes")
        self.count = count


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """A tensor's entry: its data are the ``nbytes`` bytes from ``offset`` on, counted from the file's start.

    ``type``: name in ``gguf.GGMLQuantizationType``, such as ``Q4_K``. ``shape``: outputs first as in
    safetensors (the file has inputs first), in elements. ``rows_after``: starts of further tensors of as many
    bytes, whose rows follow; ``shape`` is that of all of them. Only of a tower inside (``tower_inside.py``).
    """

    name: str
    type: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    rows_after: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """Metadata and tensors of one GGUF file, in the file's order.

    ``data_start``: length of the header, padded to ``alignment``: where tensor data begin. ``size``: bytes
    that the file must have at least: up to the end of its last tensor.
    """

    name: str
    version: int
    metadata: dict[str, Value]
    tensors: dict[str, GGUFTensor]
    alignment: int
    data_start: int
    size: int

    @property
    def architecture(self) -> str:
        """``general.architecture``, such as ``qwen3vl`` or ``clip``. Raises ``CheckpointError`` without."""
        return self.fields.text("general.architecture")

    @property
    def fields(self) -> Fields:
        """The metadata, to be read by type; long arrays (of a number for each token) are left out."""
        values = {
            key: _as_list(value) if isinstance(value, np.ndarray) else value
            for key, value in self.metadata.items()
            if not isinstance(value, np.ndarray) or len(value) <= _SHORT_ARRAY
        }
        return Fields(values, self.name, hint=OTHER_METADATA)


def read_gguf_header(source: Path | bytes | memoryview, name: str | None = None) -> GGUFHeader:
    """Read the header of a GGUF file: of the file at a path (mapped, not copied), or of its first bytes.

    ``name``: of the file in errors; None: the path's name. Raises ``NeedMoreBytes`` if the bytes given end
    within the header; ``MissingFile`` if there is no such file; ``BrokenShard`` for what is no GGUF file,
    for a damaged or truncated one and for counts and sizes beyond the bounds of this module;
    ``UnknownWeightsFormat`` for a version or block type that the ``gguf`` package does not know.
    """
    if not isinstance(source, Path):
        return _Parser(memoryview(source), name or "the GGUF file", partial=True).header()
    name = name or source.name
    try:
        with source.open("rb") as file:
            size = source.stat().st_size
            if size < 24:
                raise _no_gguf(name, file.read(24), size)
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped, memoryview(mapped) as data:
                parser = _Parser(data, name, partial=False)
                try:
                    header = parser.header()
                finally:
                    parser.close()
    except FileNotFoundError:
        raise MissingFile(f"there is no file {source}", "Check the path.") from None
    except OSError as error:
        raise BrokenShard(
            f"{source} cannot be read: {error}", "Check the disk and the file's permissions."
        ) from None
    if header.size > size:
        raise BrokenShard(
            f"{name} is truncated: {header.size:,} bytes expected, {size:,} bytes found", FETCH_AGAIN
        )
    return header


def shortest(number: np.floating[Any]) -> float:
    """The shortest decimal number that is the same float32: 1e-06, where 9.99999997e-07 is stored."""
    return float(str(number))


def _as_list(values: npt.NDArray[np.generic]) -> list[Any]:
    if np.issubdtype(values.dtype, np.floating):
        return [shortest(each) for each in values]
    found: list[Any] = values.tolist()
    return found


@cache
def block_sizes() -> dict[int, tuple[str, int, int]]:
    """By type number: name, elements of a block and bytes of a block, from the ``gguf`` package."""
    from gguf.constants import GGML_QUANT_SIZES

    return {kind.value: (kind.name, *sizes) for kind, sizes in GGML_QUANT_SIZES.items()}


class _Parser:
    """Reads a header from front to back. ``partial``: ``data`` may be only the first part of the file."""

    def __init__(self, data: memoryview, name: str, *, partial: bool) -> None:
        self._data = data[: MAX_HEADER_BYTES + 8]
        self._name = name
        self._partial = partial
        self._at = 0
        self._num_strings = 0

    def close(self) -> None:
        """Release the buffer, so that a mapped file can be unmapped."""
        self._data.release()

    def header(self) -> GGUFHeader:
        self._check_magic()
        version, num_tensors, num_entries = self._unpack("<IQQ")
        self._check_version(version)
        self._bound("tensors", num_tensors, MAX_TENSORS)
        self._bound("metadata entries", num_entries, MAX_ENTRIES)
        metadata: dict[str, Value] = {}
        for _ in range(num_entries):
            key = self._string("a metadata key", MAX_KEY_BYTES)
            value_type = self._unpack("<I")[0]
            # Of a tensor the number of dimensions comes there.
            if key.endswith(_TENSOR_ENDINGS) and 1 <= value_type <= MAX_DIMENSIONS:
                raise self._error(
                    f"counts {num_entries:,} metadata entries in its header, but has {len(metadata):,}: "
                    f"the tensor {key[:80]} follows"
                )
            if key in metadata:
                raise self._error(f"has the metadata key {key[:80]!r} twice")
            metadata[key] = self._value(value_type, key)
        alignment = self._alignment(metadata.get(ALIGNMENT_KEY, DEFAULT_ALIGNMENT))
        self._require(num_tensors * 24)  # an entry's least size
        keys = (*_KEY_BEGINNINGS, f"{metadata.get('general.architecture', 'general')}.")
        entries = [self._tensor(number, num_tensors, keys, alignment) for number in range(num_tensors)]
        data_start = self._at + -self._at % alignment
        tensors: dict[str, GGUFTensor] = {}
        for name, kind, shape, offset, nbytes in entries:
            if name in tensors:
                raise self._error(f"has the tensor {name} twice")
            tensors[name] = GGUFTensor(name, kind, shape, data_start + offset, nbytes)
        self._check_overlaps(tensors)
        size = max((each.offset + each.nbytes for each in tensors.values()), default=self._at)
        return GGUFHeader(self._name, version, metadata, tensors, alignment, data_start, size)

    def _check_magic(self) -> None:
        start = bytes(self._data[:256])
        if start[:4] != MAGIC[: len(start)]:
            raise _no_gguf(self._name, start, None if self._partial else len(self._data))
        self._require(24)
        self._at = 4

    def _check_version(self, version: int) -> None:
        if version in VERSIONS:
            return
        if version and version & 0xFFFF == 0:
            raise UnknownWeightsFormat(
                f"{self._name} is a big-endian GGUF file",
                "vlfit reads little-endian ones, as nearly all are.",
            )
        raise UnknownWeightsFormat(
            f"{self._name} is GGUF version {version}",
            f"vlfit reads versions {VERSIONS[0]} and {VERSIONS[1]}. Convert the original model again."
            if version < min(VERSIONS)
            else "A newer vlfit may read it.",
        )

    def _value(self, kind: int, key: str) -> Value:
        if kind == _STRING:
            return self._string(key, MAX_STRING_BYTES)
        if kind == _ARRAY:
            return self._array(key)
        if kind not in _SCALARS:
            raise self._error(f"has a value of the unknown type {kind} for {key[:80]!r}")
        scalar = self._numbers(_SCALARS[kind], 1)[0]
        value: bool | int | float = shortest(scalar) if isinstance(scalar, np.floating) else scalar.item()
        return value

    def _array(self, key: str) -> Value:
        kind, count = self._unpack("<IQ")
        self._bound(f"items in {key[:80]!r}", count, MAX_ARRAY_ITEMS)
        if kind == _STRING:
            return self._strings(key, count)
        if kind in _SCALARS:
            return self._numbers(_SCALARS[kind], count)
        # The format allows arrays of arrays; no known key has one, so none is read (nor any depth of them).
        what = "an array of arrays" if kind == _ARRAY else f"values of the unknown type {kind}"
        raise self._error(f"has {what} in {key[:80]!r}")

    def _numbers(self, dtype: str, count: int) -> npt.NDArray[np.generic]:
        """The next ``count`` numbers. A copy: a view would keep a mapped file mapped."""
        size = np.dtype(dtype).itemsize * count
        self._require(size)
        found = np.frombuffer(bytes(self._data[self._at : self._at + size]), dtype)
        self._at += size
        if dtype == _SCALARS[_BOOL] and found.view(np.uint8).max(initial=0) > 1:
            raise self._error("has a truth value that is neither 0 nor 1")
        return found

    def _string(self, what: str, most: int) -> str:
        (length,) = self._unpack("<Q")
        self._bound(f"bytes in {what[:80]}", length, most)
        self._require(length)
        raw = bytes(self._data[self._at : self._at + length])
        self._at += length
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise self._error(f"has text that is not UTF-8 in {what[:80]}: {error}") from None

    def _strings(self, key: str, count: int) -> list[str]:
        """``count`` strings: 300,000 of them in a tenth of a second, so a loop of its own."""
        self._num_strings += count
        self._bound("strings in arrays", self._num_strings, MAX_ARRAY_ITEMS)
        self._require(count * 8)
        data, at, end = self._data, self._at, len(self._data)
        length_at: Callable[[memoryview, int], tuple[int]] = struct.Struct("<Q").unpack_from
        found: list[str] = []
        add = found.append
        try:
            for _ in range(count):
                start = at + 8
                at = start + length_at(data, at)[0]
                if at > end:
                    break
                add(str(data[start:at], "utf-8"))
        except struct.error:
            at = end + 1
        except UnicodeDecodeError as error:
            raise self._error(f"has text that is not UTF-8 in {key[:80]!r}: {error}") from None
        if len(found) < count:
            self._bound(f"bytes in an item of {key[:80]!r}", max(at - end, 0), MAX_STRING_BYTES)
            self._require(max(at, end + 1) - self._at + 8 * (count - len(found) - 1))
        self._at = at
        return found

    def _tensor(
        self, number: int, num_tensors: int, keys: tuple[str, ...], alignment: int
    ) -> tuple[str, str, tuple[int, ...], int, int]:
        """The next tensor's entry; ``number`` of ``num_tensors`` came before it.

        ``keys``: how names of metadata begin.
        """
        name = self._string("a tensor's name", MAX_NAME_BYTES)
        if name.startswith(keys) and not name.endswith(_TENSOR_ENDINGS):
            raise self._error(
                f"has more metadata entries than its header counts: {name} comes where a tensor should"
            )
        if not name:
            raise self._error(
                f"counts {num_tensors:,} tensors in its header, but has {number:,}"
                if number
                else "has a tensor without a name"
            )
        (dimensions,) = self._unpack("<I")
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise self._error(f"has {dimensions:,} dimensions for {name}; 1 to {MAX_DIMENSIONS} are possible")
        shape = self._unpack(f"<{dimensions}Q")[::-1]
        type_number, offset = self._unpack("<IQ")
        if type_number not in block_sizes():
            raise UnknownWeightsFormat(
                f"{self._name}: {name} is stored in the type {type_number} of ggml",
                "The gguf package does not know it: it is newer, or was withdrawn (Q4_2, Q4_0_4_4).",
            )
        kind, block, block_bytes = block_sizes()[type_number]
        elements = prod(shape)
        if not 0 < elements <= _MAX_ELEMENTS or shape[-1] % block:
            raise self._error(f"has the shape {list(shape)} for {name}, which {kind} cannot store")
        if offset % alignment:
            raise self._error(f"has {name} at the offset {offset:,}, not a multiple of {alignment}")
        if offset > _MAX_ELEMENTS * 8:
            raise self._error(f"has {name} at the offset {offset:,}, beyond any file")
        return name, kind, shape, offset, elements // block * block_bytes

    def _check_overlaps(self, tensors: dict[str, GGUFTensor]) -> None:
        before = None
        for each in sorted(tensors.values(), key=lambda tensor: tensor.offset):
            if before is not None and before.offset + before.nbytes > each.offset:
                raise self._error(f"has tensors that overlap: {before.name} and {each.name}")
            before = each

    def _alignment(self, value: Value) -> int:
        good = type(value) is int and _MIN_ALIGNMENT <= value <= _MAX_ALIGNMENT and value & (value - 1) == 0
        if not good or not isinstance(value, int):
            raise self._error(
                f"has the alignment {value!r}, no power of two from {_MIN_ALIGNMENT} to {_MAX_ALIGNMENT:,}"
            )
        return value

    def _unpack(self, form: str) -> tuple[int, ...]:
        size = struct.calcsize(form)
        self._require(size)
        found = struct.unpack_from(form, self._data, self._at)
        self._at += size
        return found

    def _require(self, count: int) -> None:
        """Check that ``count`` more bytes are there."""
        needed = self._at + count
        if needed > MAX_HEADER_BYTES:
            raise self._error(f"has a header of more than {MAX_HEADER_BYTES:,} bytes")
        if needed > len(self._data):
            if self._partial:
                raise NeedMoreBytes(needed)
            raise BrokenShard(
                f"{self._name} is truncated: its header takes {needed:,} bytes, the file has "
                f"{len(self._data):,}",
                FETCH_AGAIN,
            )

    def _bound(self, what: str, count: int, most: int) -> None:
        if count > most:
            raise self._error(f"claims {count:,} {what}; vlfit reads up to {most:,}")

    def _error(self, what: str) -> BrokenShard:
        return BrokenShard(f"{self._name} {what}", FETCH_AGAIN)


def _no_gguf(name: str, start: bytes, size: int | None) -> BrokenShard:
    """The error for a file that does not begin as GGUF; ``size`` None: not known."""
    length = "" if size is None else f" ({size:,} bytes)"
    if start.startswith(b"version https://git-lfs"):
        return BrokenShard(
            f"{name} is a git-lfs pointer{length}, not the weights themselves",
            "Run git lfs pull in that folder, or fetch the model with vlfit pull NAME.",
        )
    if is_html(start):
        return BrokenShard(
            f"{name} is a web page (HTML), not weights{length}",
            "The server sent a page, such as a login or an error. Fetch the file again.",
        )
    if start[:4] in (b"ggml", b"lmgg", b"fmgg", b"tjgg"):
        return BrokenShard(
            f"{name} is in a format from before GGUF (2023)", "Look for a GGUF file of the same model."
        )
    if size is not None and start[:4] == MAGIC:
        return BrokenShard(f"{name} is truncated: it ends after {size:,} bytes", FETCH_AGAIN)
    return BrokenShard(f"{name} is no GGUF file{length}: it does not begin with GGUF", FETCH_AGAIN)
