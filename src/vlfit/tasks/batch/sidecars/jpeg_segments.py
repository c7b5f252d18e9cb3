"""The segments before a JPEG's pixels, and what in them says where other pictures in the file are.

Phones put several pictures into one file (CIPA DC-007, "MPF": a preview, a gain map for bright screens), with
their sizes and places in a table. When something before them grows, the table has to say so. Does not know
EXIF.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from vlfit.tasks.batch.sidecars.exif_block import BadExif

_MPF = b"MPF\0"
_ENTRIES = 0xB002


@dataclass(frozen=True, slots=True)
class Segment:
    """From ``start`` to ``end``; ``body`` is behind marker and length. ``marker`` is 0xE1 for APP1."""

    marker: int
    start: int
    body: int
    end: int


def segments(data: bytes) -> Iterator[Segment]:
    """Those between the start of the file and its pixels. Raises ``BadExif`` where they break off."""
    place = 2
    while True:
        start = place
        if data[place : place + 1] != b"\xff":
            raise BadExif("its segments are broken")
        while data[place : place + 1] == b"\xff":  # any number of them may stand before a marker
            place += 1
        marker = data[place] if place < len(data) else 0
        if marker == 0xDA:
            return
        size = int.from_bytes(data[place + 1 : place + 3], "big")
        end = place + 1 + size
        if size < 2 or end > len(data) or 0xD0 <= marker <= 0xD9:
            raise BadExif("its segments are broken")
        yield Segment(marker, start, place + 3, end)
        place = end


def moved(data: bytes, start: int, growth: int) -> bytes:
    """``data``, of which all behind the segment at ``start`` is ``growth`` bytes further back than it was,
    with its table true again.
    """
    tables = (part for part in segments(data) if part.marker == 0xE2 and data.startswith(_MPF, part.body))
    table = next(tables, None)
    if table is None:
        return data
    base = table.body + len(_MPF)
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(data[base : base + 4])
    if order is None:
        raise BadExif("its table of pictures (MPF) is broken")
    changed = bytearray(data)
    try:
        for number, place in enumerate(_entries(data, base, order)):
            _, size, offset = struct.unpack_from(f"{order}III", data, place)
            if number == 0:
                size += growth  # the picture that all programs show, with its segments
            elif offset:
                # Places count from the table's own start, which may have moved as well, or not.
                was = base - growth if table.start > start else base
                target = was + offset
                offset += (growth if target >= start else 0) - (base - was)
            struct.pack_into(f"{order}III", changed, place, _, size, offset)
    except struct.error:
        raise BadExif("its table of pictures (MPF) is broken") from None
    return bytes(changed)


def _entries(data: bytes, base: int, order: str) -> Iterator[int]:
    """Where the table's entries of 16 bytes are."""
    (directory,) = struct.unpack_from(f"{order}I", data, base + 4)
    (count,) = struct.unpack_from(f"{order}H", data, base + directory)
    for index in range(count):
        tag, _, size, place = struct.unpack_from(f"{order}HHII", data, base + directory + 2 + 12 * index)
        if tag == _ENTRIES:
            yield from range(base + place, base + place + size - size % 16, 16)
