"""Source of pictures in tar shards (WebDataset): ``7.jpg`` and ``7.json`` form one sample.

Only headers are read while listing; pictures are read by offset, so that a continued job skips finished ones.
Text, numbers and JSON of a sample go into ``extra``. Damaged and hostile tar files end in an item that fails.
"""

import json
import tarfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from vlfit.images.file_kinds import PICTURE_EXTENSIONS
from vlfit.tasks.batch.items import FileRange, Item, Unreadable, display_name, extension_of, key_of
from vlfit.units import GIB, MIB

# Limit of the headers before one member's bytes (long names, attributes): a header may claim any length, and
# tarfile reads it whole. Resource forks of macOS stay far below.
_MAX_HEADER_BYTES = 4 * MIB
_COMPRESSED = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ\x00": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"PK\x03\x04": "ZIP",
}
COMPRESSED_HINT = "Decompress it once (gunzip, zstd -d): compressed shards cannot be read at an offset."


@dataclass(frozen=True, slots=True)
class TarMember:
    """A member of a tar file: its content is the ``size`` bytes from ``offset`` in the tar.

    ``kind``: ``folder``, ``link``, ...; empty for a regular file.
    """

    name: str
    offset: int
    size: int
    kind: str = ""


@dataclass(frozen=True, slots=True)
class MissingEndMarker:
    """The tar file ends right after its last member, without end-of-archive blocks: it may be truncated."""


def compression_of(path: Path) -> str | None:
    """Name of the compression of the file ``path`` (``gzip``, ``zstd``, ...), by its first bytes.

    None if the file is not compressed, or cannot be read.
    """
    try:
        with path.open("rb") as file:
            head = file.read(6)
    except OSError:
        return None
    return next((name for start, name in _COMPRESSED.items() if head.startswith(start)), None)


def read_members(path: Path, name: str) -> Iterator[TarMember | Unreadable | MissingEndMarker]:
    """The members of the tar file ``path``, in order, from the headers alone. Never raises.

    If the file is compressed, damaged or cannot be read, the last element is an ``Unreadable`` called
    ``name``, as later members cannot be found; if its end marker is missing, a ``MissingEndMarker``.
    """
    try:
        file = path.open("rb")
    except OSError as error:
        yield Unreadable(name, f"{display_name(path)} cannot be read: {error.strerror}", "Check its name.")
        return
    with file:
        compression = compression_of(path)
        if compression is not None:
            yield Unreadable(name, f"{display_name(path)} is compressed with {compression}", COMPRESSED_HINT)
            return
        num_members, position, damage = 0, 0, ""
        reader = _HeaderReader(file)
        try:
            tar = tarfile.TarFile(
                fileobj=cast(IO[bytes], reader), encoding="utf-8", errors="surrogateescape", mode="r"
            )
            while (info := tar.next()) is not None:
                cast(Any, tar).members.clear()  # else tarfile keeps all of them in memory
                reader.next_member()
                num_members += 1
                yield _member(info)
            position = tar.offset
        except GeneratorExit:
            raise
        except Exception as error:  # hostile bytes make tarfile raise anything
            endless = isinstance(error, RecursionError)
            position, damage = file.tell(), "nested headers" if endless else str(error)
        yield from _check_end(file, name, display_name(path), num_members, position, damage)


def _member(info: tarfile.TarInfo) -> TarMember:
    if info.issparse():
        kind = "sparse file"
    elif info.isdir():
        kind = "folder"
    elif not info.isreg():
        kind = "link" if info.issym() or info.islnk() else "special file"
    else:
        kind = "" if info.size >= 0 else "file of a negative size"
    return TarMember(info.name, info.offset_data, info.size, kind)


def _check_end(
    file: IO[bytes], name: str, shown: str, num_members: int, position: int, damage: str
) -> Iterator[Unreadable | MissingEndMarker]:
    """Check that the archive really ends here: ``tarfile`` also stops at any header it cannot read."""
    size = file.seek(0, 2)
    before = f"; the {num_members:,} files before that are read" if num_members else ""
    if not damage:
        file.seek(min(position, size))
        block = file.read(tarfile.BLOCKSIZE)
        if len(block) == tarfile.BLOCKSIZE and not any(block):
            return
        if not block and position == size:
            yield MissingEndMarker()
            return
        damage = "" if len(block) < tarfile.BLOCKSIZE else "no header found"
    if not size:
        yield Unreadable(name, f"{shown} is empty", "Copy it again.")
    elif not damage or position >= size:
        yield Unreadable(name, f"{shown} is truncated after {size:,} bytes{before}", "Copy it again.")
    elif not num_members and position <= tarfile.BLOCKSIZE:
        yield Unreadable(name, f"{shown} is not a tar file", "Name uncompressed tar files.")
    else:
        message = f"{shown} is broken at byte {position:,} ({damage[:200]}){before}"
        yield Unreadable(name, message, "Copy it again; GNU tar -t shows details.")


class _HeaderReader:
    """File for ``tarfile`` to read headers from: limited reads, no seeking back, so it always terminates."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._bytes_left = _MAX_HEADER_BYTES

    def next_member(self) -> None:
        """Allow ``_MAX_HEADER_BYTES`` again, for the next member's headers."""
        self._bytes_left = _MAX_HEADER_BYTES

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= self._bytes_left:
            raise tarfile.ReadError(f"headers of more than {_MAX_HEADER_BYTES // MIB} MiB")
        self._bytes_left -= size
        return self._file.read(size)

    def seek(self, position: int) -> int:
        if position < self._file.tell() - 1:  # tarfile seeks to the last byte before a header
            raise tarfile.ReadError("a header points backwards")
        return self._file.seek(position)

    def tell(self) -> int:
        return self._file.tell()


# Extensions that webdataset decodes by default (its "basic handlers").
_TEXT_KINDS = frozenset((".txt", ".text", ".transcript", ".caption"))
_NUMBER_KINDS = frozenset((".cls", ".cls2", ".class", ".count", ".index", ".inx", ".id"))
_JSON_KINDS = frozenset((".json", ".jsn"))
_SAMPLE_KINDS = PICTURE_EXTENSIONS | _TEXT_KINDS | _NUMBER_KINDS | _JSON_KINDS
_MAX_METADATA_BYTES = MIB
# In a tar that is not WebDataset, thousands of files may share the part before the first dot.
_MAX_SAMPLE_FILES = 64
# A header takes 30 us from the page cache, and a seek on a hard disk.
_MAX_COUNTED_BYTES = 4 * GIB


class WebDatasetSource:
    """A ``Source`` of the pictures in uncompressed tar files. Keys are ``NAME#member``.

    A member whose name occurred before in its shard has ``#2``, ... added. ``names``: of the shards, in keys;
    None: their file names. Text, numbers and JSON with the picture's name become ``Item.extra``, by
    extension.
    """

    def __init__(self, paths: Sequence[Path], names: Sequence[str] | None = None) -> None:
        self.paths = tuple(paths)
        self.names = tuple(names) if names is not None else tuple(key_of(path.name) for path in paths)
        self._skipped: Counter[str] = Counter()
        self._without_end: list[str] = []

    def __iter__(self) -> Iterator[Item]:
        self._skipped.clear()
        self._without_end.clear()
        for path, name in zip(self.paths, self.names, strict=True):
            yield from self._shard_items(path, name)

    def count(self) -> int | None:
        """Number of items, from the headers of all shards; None if they are larger than 4 GiB together."""
        sizes = [path.stat().st_size for path in self.paths if path.exists()]
        if sum(sizes) > _MAX_COUNTED_BYTES:
            return None
        return sum(
            isinstance(found, Unreadable) or (isinstance(found, TarMember) and _is_picture(found))
            for path, name in zip(self.paths, self.names, strict=True)
            for found in read_members(path, name)
        )

    def notes(self) -> list[str]:
        """Members that the last iteration left out, counted by extension, and shards without end marker."""
        notes = []
        if self._skipped:
            kinds = ", ".join(f"{kind} {count:,}" for kind, count in self._skipped.most_common(8))
            notes.append(f"tar shards: left out {self._skipped.total():,} members ({kinds})")
        if self._without_end:
            some = ", ".join(self._without_end[:5]) + (", ..." if len(self._without_end) > 5 else "")
            notes.append(f"no end of archive in {some}: if it is truncated, pictures are missing")
        return notes

    def _shard_items(self, path: Path, name: str) -> Iterator[Item]:
        path = path.absolute()
        seen: Counter[str] = Counter()
        with ExitStack() as opened:
            file: IO[bytes] | None = None
            for sample in self._samples(path, name):
                if isinstance(sample, Unreadable):
                    yield Item(name, sample.read)
                    continue
                file = file or opened.enter_context(path.open("rb"))
                extra = self._metadata(file, sample)
                for member in filter(_is_picture, sample):
                    inner = _strip_dot_slash(member.name)
                    seen[inner] += 1
                    again = f"#{seen[inner]}" if seen[inner] > 1 else ""
                    key = f"{name}#{key_of(inner)}{again}"
                    yield Item(key, FileRange(path, member.offset, member.size, key).read, None, extra)

    def _samples(self, path: Path, name: str) -> Iterator[list[TarMember] | Unreadable]:
        sample: list[TarMember] = []
        base: str | None = None
        for found in read_members(path, name):
            if isinstance(found, MissingEndMarker):
                self._without_end.append(display_name(path))
                continue
            if isinstance(found, Unreadable):
                if sample:
                    yield sample
                sample = []
                yield found
                continue
            if not self._is_sample_file(found):
                continue
            here = _sample_name(found.name)
            if sample and (here != base or len(sample) == _MAX_SAMPLE_FILES):
                yield sample
                sample = []
            base = here
            sample.append(found)
        if sample:
            yield sample

    def _is_sample_file(self, member: TarMember) -> bool:
        if member.kind == "folder" or _is_hidden(member.name):
            return False
        kind = extension_of(member.name)
        if not member.kind and kind in _SAMPLE_KINDS:
            return True
        self._skipped[member.kind or kind or "without extension"] += 1
        return False

    def _metadata(self, file: IO[bytes], sample: list[TarMember]) -> dict[str, Any]:
        """Text, numbers and JSON of a sample, by extension without the dot."""
        texts = [member for member in sample if not _is_picture(member)]
        if not texts or len(texts) == len(sample):
            return {}
        fields = {}
        for member in texts:
            if member.size > _MAX_METADATA_BYTES:
                self._skipped[f"{extension_of(member.name)} over {_MAX_METADATA_BYTES // MIB} MiB"] += 1
                continue
            extension = _strip_dot_slash(member.name)[len(_sample_name(member.name)) + 1 :]
            fields[key_of(extension)] = _field_value(file, member)
        return fields


def _is_picture(member: TarMember) -> bool:
    return not member.kind and extension_of(member.name) in PICTURE_EXTENSIONS and not _is_hidden(member.name)


def _is_hidden(name: str) -> bool:
    """Whether the file name starts with a dot, as macOS's resource files do."""
    return name[name.rfind("/") + 1 :].startswith(".")


def _strip_dot_slash(name: str) -> str:
    """``name`` without the ``./`` that ``tar cf shard.tar .`` puts before it."""
    return name.removeprefix("./")


def _sample_name(name: str) -> str:
    """The name shared by the files of a sample: folder, and file name up to its first dot."""
    folder, slash, file = _strip_dot_slash(name).rpartition("/")
    return folder + slash + file.partition(".")[0]


def _field_value(file: IO[bytes], member: TarMember) -> Any:
    file.seek(member.offset)
    text = file.read(member.size).decode("utf-8", "replace")
    kind = extension_of(member.name)
    try:
        if kind in _JSON_KINDS:
            return json.loads(text, parse_constant=str)  # NaN is not JSON
        return int(text) if kind in _NUMBER_KINDS else text
    except (ValueError, RecursionError):
        return text  # as it is: bad metadata must not fail the picture
