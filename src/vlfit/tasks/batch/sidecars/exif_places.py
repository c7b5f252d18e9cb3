"""Where files of four formats have their EXIF: found, and put there with all else as it was.

JPEG: a segment APP1 (CIPA DC-008); PNG: a chunk ``eXIf`` (PNG, third edition); WebP: a chunk ``EXIF``
(RFC 9649); TIFF: the file itself. Knows what else in a file depends on its length or on not being changed.
Does not know what is in a block of EXIF.
"""

import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from vlfit.tasks.batch.sidecars.exif_block import DESCRIPTION, BadExif, Block
from vlfit.tasks.batch.sidecars.jpeg_segments import Segment, moved, segments
from vlfit.tasks.batch.sidecars.webp_header import extended
from vlfit.tasks.batch.sidecars.writer import Left

_EXIF = b"Exif\0\0"
_PNG = b"\x89PNG\r\n\x1a\n"
_MOST_IN_SEGMENT = 65_533 - len(_EXIF)
_SIGNED = "Content Credentials (C2PA) are in the file, and any change makes them void"
_DNG_VERSION = 0xC612
_C2PA_TAG = 0xCD41


@dataclass(frozen=True, slots=True)
class Place:
    """``find`` gives the block or None, ``put`` the file with another, ``check`` raises ``Left`` for files
    that are not to be changed. All raise ``BadExif`` for files that are broken.
    """

    find: Callable[[bytes], bytes | None]
    put: Callable[[bytes, bytes], bytes]
    check: Callable[[bytes], None]


# --- JPEG --------------------------------------------------------------------------------------------------


def _find_in_jpeg(data: bytes) -> bytes | None:
    found = next((part for part in segments(data) if _is_exif(part, data)), None)
    return data[found.body + len(_EXIF) : found.end] if found else None


def _put_in_jpeg(data: bytes, block: bytes) -> bytes:
    if len(block) > _MOST_IN_SEGMENT:
        raise BadExif("its EXIF would be longer than the 64 KiB that a JPEG has for it")
    parts = list(segments(data))
    old = next((part for part in parts if _is_exif(part, data)), None)
    # Behind JFIF's own segment, which wants to be the first as EXIF's does; so ExifTool and phones have it.
    start = old.start if old else (parts[0].end if parts and parts[0].marker == 0xE0 else 2)
    end = old.end if old else start
    segment = b"\xff\xe1" + struct.pack(">H", len(block) + len(_EXIF) + 2) + _EXIF + block
    return moved(data[:start] + segment + data[end:], start, len(segment) - (end - start))


def _check_jpeg(data: bytes) -> None:
    if any(part.marker == 0xEB and b"c2pa" in data[part.body : part.body + 100] for part in segments(data)):
        raise Left(_SIGNED)


def _is_exif(part: Segment, data: bytes) -> bool:
    return part.marker == 0xE1 and data.startswith(_EXIF, part.body)


# --- PNG ---------------------------------------------------------------------------------------------------


def _chunks(data: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Name, start and end of each chunk, to the last."""
    place = len(_PNG)
    while place + 12 <= len(data):
        (size,) = struct.unpack_from(">I", data, place)
        name, end = data[place + 4 : place + 8], place + 12 + size
        if end > len(data):
            break
        yield name, place, end
        if name == b"IEND":
            return
        place = end
    raise BadExif("it breaks off")


def _find_in_png(data: bytes) -> bytes | None:
    return next((data[start + 8 : end - 4] for name, start, end in _chunks(data) if name == b"eXIf"), None)


def _put_in_png(data: bytes, block: bytes) -> bytes:
    body = b"eXIf" + block
    chunk = struct.pack(">I", len(block)) + body + struct.pack(">I", zlib.crc32(body))
    parts = list(_chunks(data))
    for name, start, end in parts:
        if name == b"eXIf":
            return data[:start] + chunk + data[end:]
    # Anywhere but between the chunks of the pixels.
    place = next((start for name, start, _ in parts if name == b"IDAT"), None)
    if place is None:
        raise BadExif("it has no pixels")
    return data[:place] + chunk + data[place:]


def _check_png(data: bytes) -> None:
    for name, start, end in _chunks(data):
        if name == b"caBX":
            raise Left(_SIGNED)
        keyword = data[start + 8 : end].split(b"\0")[0] if name in (b"tEXt", b"zTXt", b"iTXt") else b""
        if keyword in (b"Raw profile type exif", b"Raw profile type APP1"):
            raise Left("the EXIF is in a form of before 2017 (Raw profile type exif)")


# --- WebP --------------------------------------------------------------------------------------------------


def _riff_chunks(data: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Name, start and end (with a byte of padding) of each chunk within the length that the file gives."""
    (size,) = struct.unpack_from("<I", data, 4)
    place, last = 12, size + 8
    if last > len(data):
        raise BadExif("it breaks off")
    while place + 8 <= last:
        (size,) = struct.unpack_from("<I", data, place + 4)
        end = place + 8 + size + size % 2
        if end > last + 1 or place + 8 + size > last:
            raise BadExif("it breaks off")
        yield data[place : place + 4], place, min(end, last)
        place = end


def _find_in_webp(data: bytes) -> bytes | None:
    for name, start, _ in _riff_chunks(data):
        if name == b"EXIF":
            (size,) = struct.unpack_from("<I", data, start + 4)
            # Some programs put JPEG's mark before it.
            return data[start + 8 : start + 8 + size].removeprefix(_EXIF)
    return None


def _put_in_webp(data: bytes, block: bytes) -> bytes:
    chunks = [(name, data[start:end]) for name, start, end in _riff_chunks(data)]
    rest = data[8 + struct.unpack_from("<I", data, 4)[0] :]
    mine = b"EXIF" + struct.pack("<I", len(block)) + block + bytes(len(block) % 2)
    names = [name for name, _ in chunks]
    if b"EXIF" in names:
        chunks[names.index(b"EXIF")] = (b"EXIF", mine)
    else:
        # The order of RFC 9649: pixels, EXIF, XMP.
        chunks.insert(names.index(b"XMP ") if b"XMP " in names else len(names), (b"EXIF", mine))
    body = b"WEBP" + b"".join(extended(chunks))
    return b"RIFF" + struct.pack("<I", len(body)) + body + rest


def _check_webp(data: bytes) -> None:
    if any(name == b"C2PA" for name, _, _ in _riff_chunks(data)):
        raise Left(_SIGNED)


# --- TIFF --------------------------------------------------------------------------------------------------


def _check_tiff(data: bytes) -> None:
    block = Block(data)
    if _DNG_VERSION in block.tags:
        raise Left("it is DNG, a camera's raw picture")
    if _C2PA_TAG in block.tags:
        raise Left(_SIGNED)
    if DESCRIPTION in block.tags and block.description.startswith(("<?xml", "<OME", "ImageJ=")):
        raise Left("a microscope's program has its settings where the description would be")


PLACES = {
    "a JPEG": Place(_find_in_jpeg, _put_in_jpeg, _check_jpeg),
    "a PNG": Place(_find_in_png, _put_in_png, _check_png),
    "a WebP": Place(_find_in_webp, _put_in_webp, _check_webp),
    "a TIFF": Place(lambda data: data, lambda _, block: block, _check_tiff),
}
