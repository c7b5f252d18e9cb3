"""The description in a block of EXIF (or a TIFF file, which has the same form), read and replaced.

Nothing in the block moves: cameras keep notes in it (MakerNote) whose offsets count from its start. A
directory that gets an entry is written again behind all else, and what pointed to it is changed. Knows
directories and entries as TIFF 6.0 has them, and the two tags of CIPA DC-008 (EXIF) that describe a picture.
Does not know where in a file the block is.
"""

import struct
from dataclasses import dataclass, replace

DESCRIPTION = 0x010E
COMMENT = 0x9286
_EXIF_DIRECTORY = 0x8769
_EXIF_VERSION = 0x9000
_ASCII, _LONG, _UNDEFINED = 2, 4, 7
_SIZES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4, 129: 1}
_EMPTY = b"II*\x00" + struct.pack("<IHI", 8, 0, 0)


class BadExif(Exception):
    """What is wrong with a block of EXIF, or with the file around it."""


@dataclass(frozen=True, slots=True)
class _Entry:
    """One entry of a directory: ``value`` are its last four bytes, the value itself or where it is."""

    tag: int
    kind: int
    count: int
    value: bytes


@dataclass(frozen=True, slots=True)
class Block:
    """EXIF as bytes, from its byte order on. Raises ``BadExif`` where a directory leads out of it."""

    data: bytes

    @classmethod
    def empty(cls) -> "Block":
        """EXIF that says nothing."""
        return cls(_EMPTY)

    def __post_init__(self) -> None:
        if self.data[:4] not in (b"II*\x00", b"MM\x00*"):
            big = self.data[:4] in (b"II+\x00", b"MM\x00+")
            raise BadExif("it is a BigTIFF" if big else "its EXIF does not begin as EXIF does")
        self._directory(self._first())

    @property
    def tags(self) -> frozenset[int]:
        """The tags of its first directory."""
        return frozenset(entry.tag for entry in self._directory(self._first())[0])

    @property
    def description(self) -> str:
        """``ImageDescription``; empty for none. UTF-8, as most programs write it, else Latin-1."""
        entry = self._find(self._first(), DESCRIPTION)
        if entry is None or entry.kind not in (_ASCII, 1, _UNDEFINED, 129):
            return ""
        return _decoded(self._value(entry).split(b"\0")[0]).strip()

    @property
    def comment(self) -> str:
        """``UserComment`` behind the eight letters that say how it is written; empty for none."""
        place = self._exif_directory()
        entry = self._find(place, COMMENT) if place else None
        if entry is None:
            return ""
        value = self._value(entry)
        if value[:8] == b"UNICODE\0":
            wide = "utf-16-le" if self._order == "<" else "utf-16-be"
            return value[8:].decode(wide, "replace").rstrip("\0").strip()
        return _decoded(value[8:].split(b"\0")[0]).strip()

    def with_description(self, words: str) -> "Block":
        """``words`` as ``ImageDescription``, in UTF-8.

        As ``UserComment`` too, which can say all letters by the standard, where none is, or the old
        description is: there are programs that keep their settings in it.
        """
        block, changes = self, {DESCRIPTION: (_ASCII, words.encode() + b"\0")}
        if self.comment in ("", self.description):
            before = self._exif_directory()
            inner = {COMMENT: (_UNDEFINED, self._as_comment(words))}
            if before is None:
                inner[_EXIF_VERSION] = (_UNDEFINED, b"0232")
            block, place = self._with(before, inner)
            if place != before:
                changes[_EXIF_DIRECTORY] = (_LONG, struct.pack(f"{self._order}I", place))
        block, first = block._with(block._first(), changes)
        return Block(block.data[:4] + struct.pack(f"{self._order}I", first) + block.data[8:])

    @property
    def _order(self) -> str:
        return "<" if self.data[:2] == b"II" else ">"

    def _first(self) -> int:
        return self._unpack("I", 4)[0]

    def _unpack(self, form: str, place: int) -> tuple[int, ...]:
        try:
            return struct.unpack_from(self._order + form, self.data, place)
        except struct.error:
            raise BadExif("its EXIF leads out of itself") from None

    def _directory(self, place: int) -> tuple[list[_Entry], int]:
        """The entries of the directory at ``place``, and where the next one is."""
        (count,) = self._unpack("H", place)
        entries = []
        for index in range(count):
            at = place + 2 + 12 * index
            tag, kind, number = self._unpack("HHI", at)
            value = self.data[at + 8 : at + 12]
            entries.append(_Entry(tag, kind, number, value))
        return entries, self._unpack("I", place + 2 + 12 * count)[0]

    def _find(self, place: int, tag: int) -> _Entry | None:
        return next((entry for entry in self._directory(place)[0] if entry.tag == tag), None)

    def _exif_directory(self) -> int | None:
        entry = self._find(self._first(), _EXIF_DIRECTORY)
        if entry is None:
            return None
        place = int.from_bytes(entry.value, "little" if self._order == "<" else "big")
        self._directory(place)
        return place

    def _value(self, entry: _Entry) -> bytes:
        size = entry.count * _SIZES.get(entry.kind, 1)
        if size <= 4:
            return entry.value[:size]
        (place,) = struct.unpack(f"{self._order}I", entry.value)
        if place + size > len(self.data):
            raise BadExif("its EXIF leads out of itself")
        return self.data[place : place + size]

    def _as_comment(self, words: str) -> bytes:
        if words.isascii():
            return b"ASCII\0\0\0" + words.encode()
        return b"UNICODE\0" + words.encode("utf-16-le" if self._order == "<" else "utf-16-be")

    def _with(self, place: int | None, changes: dict[int, tuple[int, bytes]]) -> tuple["Block", int]:
        """The directory at ``place`` (None: a new one) with ``changes``, and where it is then.

        What fits where it was is written there: a description that is replaced often takes no more room.
        """
        entries, following = self._directory(place) if place is not None else ([], 0)
        data = bytearray(self.data)
        if place is not None and all(self._fits(entries, tag, value) for tag, (_, value) in changes.items()):
            for index, entry in enumerate(entries):
                if entry.tag in changes:
                    self._put(data, place + 2 + 12 * index, entry, *changes[entry.tag])
            return replace(self, data=bytes(data)), place
        kept = [entry for entry in entries if entry.tag not in changes]
        data += bytes(len(data) % 2)  # directories begin on even bytes
        start = len(data)
        values = start + 2 + 12 * (len(kept) + len(changes)) + 4
        behind = bytearray()
        for tag, (kind, value) in changes.items():
            inner = value.ljust(4, b"\0")
            if len(value) > 4:
                inner = struct.pack(f"{self._order}I", values + len(behind))
                behind += value + bytes(len(value) % 2)
            kept.append(_Entry(tag, kind, len(value) // _SIZES[kind], inner))
        kept.sort(key=lambda entry: entry.tag)
        data += struct.pack(f"{self._order}H", len(kept))
        for entry in kept:
            data += struct.pack(f"{self._order}HHI", entry.tag, entry.kind, entry.count) + entry.value
        data += struct.pack(f"{self._order}I", following) + behind
        return replace(self, data=bytes(data)), start

    def _fits(self, entries: list[_Entry], tag: int, value: bytes) -> bool:
        found = next((entry for entry in entries if entry.tag == tag), None)
        if found is None:
            return False
        room = len(self._value(found))
        # Two entries may share a place, where a program saved some bytes.
        alone = sum(entry.value == found.value for entry in entries) == 1
        return alone and len(value) <= room and (len(value) > 4) == (room > 4)

    def _put(self, data: bytearray, at: int, entry: _Entry, kind: int, value: bytes) -> None:
        old = len(self._value(entry))
        (place,) = struct.unpack(f"{self._order}I", entry.value) if old > 4 else (at + 8,)
        data[place : place + old] = value.ljust(old, b"\0")
        data[at + 2 : at + 8] = struct.pack(f"{self._order}HI", kind, len(value) // _SIZES[kind])


def _decoded(value: bytes) -> str:
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError:
        return value.decode("latin-1")
