"""The header that a WebP file needs before it may hold more than its pixels (RFC 9649, chunk ``VP8X``).

Knows where the two kinds of pixels tell their size. Does not know EXIF.
"""

import struct

from vlfit.tasks.batch.sidecars.exif_block import BadExif

_HAS_EXIF = 0x08
_HAS_ALPHA = 0x10


def extended(chunks: list[tuple[bytes, bytes]]) -> list[bytes]:
    """``chunks`` (name, whole bytes) as they go into the file: with a header that says that there is EXIF."""
    if not chunks:
        raise BadExif("it holds nothing")
    name, first = chunks[0]
    rest = [chunk for _, chunk in chunks[1:]]
    if name == b"VP8X" and len(first) >= 18:
        return [first[:8] + bytes([first[8] | _HAS_EXIF]) + first[9:], *rest]
    width, height, alpha = _size(name, first[8:])
    if not width or not height:
        raise BadExif("it is 0 pixels wide or high")
    flags = _HAS_EXIF | (_HAS_ALPHA if alpha else 0)
    edges = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    return [b"VP8X" + struct.pack("<I", 10) + bytes([flags, 0, 0, 0]) + edges, first, *rest]


def _size(name: bytes, pixels: bytes) -> tuple[int, int, bool]:
    """Width and height in pixels, and whether some may be transparent."""
    if name == b"VP8 " and pixels[3:6] == b"\x9d\x01\x2a" and len(pixels) >= 10:
        width, height = struct.unpack_from("<HH", pixels, 6)
        return width & 0x3FFF, height & 0x3FFF, False
    if name == b"VP8L" and pixels[:1] == b"\x2f" and len(pixels) >= 5:
        (bits,) = struct.unpack_from("<I", pixels, 1)
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1, bool(bits >> 28 & 1)
    raise BadExif("its first chunk is no WebP's")
