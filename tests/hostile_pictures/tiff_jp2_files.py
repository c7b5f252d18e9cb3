"""TIFF and JPEG 2000: strips, tiles, tags, precincts and components."""

import struct
import zlib
from array import array

from tests.hostile_pictures.kinds import encoded, ifd, jpeg_segment, kind, noisy, zlib_of_zeros

_SHORT, _LONG = 3, 4
_NONE, _LZW, _GROUP4, _DEFLATE, _PACKBITS = 1, 5, 4, 8, 32_773


def _tiff(data: bytes, *entries: tuple[int, int, int, int | bytes], following: int = 0) -> bytes:
    """Little-endian: header, ``data`` at 8, long values, directory. ``following``: the next directory."""
    values, ready = b"", []
    for tag, type_, count, value in sorted(entries, key=lambda entry: entry[0]):
        if isinstance(value, bytes):
            if len(value) > 4:
                ready.append((tag, type_, count, 8 + len(data) + len(values)))
                values += value
                continue
            value = int.from_bytes(value, "little")
        ready.append((tag, type_, count, value))
    offset = 8 + len(data) + len(values)
    return b"II*\x00" + struct.pack("<I", offset) + data + values + ifd(*ready, following=following)


def _longs(values: range) -> bytes:
    return array("I", values).tobytes()


def _grey(
    width: int, height: int, compression: int = _NONE, bits: int = 8
) -> list[tuple[int, int, int, int | bytes]]:
    return [
        (256, _LONG, 1, width),
        (257, _LONG, 1, height),
        (258, _SHORT, 1, bits),
        (259, _SHORT, 1, compression),
        (262, _SHORT, 1, 1),
        (277, _SHORT, 1, 1),
    ]


def _one_strip(width: int, height: int, compression: int, data: bytes, bits: int = 8) -> bytes:
    rows = [(273, _LONG, 1, 8), (278, _LONG, 1, height), (279, _LONG, 1, len(data))]
    return _tiff(data, *_grey(width, height, compression, bits), *rows)


@kind("CPU and GIL: 400,000 strips that rise by a byte, each nearly the whole picture", default_format=False)
def tiff_400000_strips() -> bytes:
    side, strips = 1_650, 400_000
    offsets = (273, _LONG, strips, _longs(range(8, 8 + strips)))
    counts = (279, _LONG, 1, side * side)
    return _tiff(bytes(side * side + strips), *_grey(side, side), offsets, (278, _LONG, 1, side - 1), counts)


@kind("memory and GIL: 5 million strips of a picture of 64x64", default_format=False)
def tiff_5_million_strips() -> bytes:
    strips = 5_000_000
    offsets = (273, _LONG, strips, array("I", [8]).tobytes() * strips)
    counts = (279, _SHORT, strips, array("H", [64]).tobytes() * strips)
    return _tiff(bytes(64 * 64), *_grey(64, 64), offsets, (278, _LONG, 1, 1), counts)


@kind("memory: a picture of 16x16 in a tile of 32768x16384", default_format=False)
def tiff_tile_of_512_megapixels() -> bytes:
    data = zlib.compress(bytes(1_000_000))
    tile = [(322, _LONG, 1, 32_768), (323, _LONG, 1, 16_384), (324, _LONG, 1, 8), (325, _LONG, 1, len(data))]
    return _tiff(data, *_grey(16, 16, _DEFLATE), *tile)


@kind("memory: 4,000 tags that share 1 MiB", default_format=False)
def tiff_tags_sharing_1_mib() -> bytes:
    shared = [(40_000 + n, _SHORT, 2**19, 8) for n in range(4_000)]
    strip = [(273, _LONG, 1, 8), (278, _LONG, 1, 64), (279, _LONG, 1, 4_096)]
    return _tiff(bytes(2**20), *_grey(64, 64), *strip, *shared)


@kind("parser: directories in circles", default_format=False)
def tiff_directories_in_circles() -> bytes:
    strip = [
        (273, _LONG, 1, 8),
        (278, _LONG, 1, 64),
        (279, _LONG, 1, 4_096),
        (330, _LONG, 1, 4_104),
        (34_665, _LONG, 1, 4_104),
    ]
    return _tiff(bytes(4_096), *_grey(64, 64), *strip, following=4_104)


@kind("memory and CPU: 169 megapixels of deflate", default_format=False)
def tiff_deflate_169_megapixels() -> bytes:
    return _one_strip(13_000, 13_000, _DEFLATE, zlib_of_zeros(169_000_000))


@kind("memory and CPU: 169 megapixels of fax without a line", default_format=False)
def tiff_fax_169_megapixels() -> bytes:
    return _one_strip(13_000, 13_000, _GROUP4, b"\xff" * 2_000, bits=1)


@kind("memory and CPU: 150 megapixels of PackBits", default_format=False)
def tiff_packbits_150_megapixels() -> bytes:
    return _one_strip(12_200, 12_200, _PACKBITS, b"\x81\x00" * 1_170_000)


@kind("parser: 65,535 samples a pixel", default_format=False)
def tiff_65535_samples() -> bytes:
    entries = [each for each in _grey(1_000, 1_000) if each[0] not in (258, 277)]
    many: list[tuple[int, int, int, int | bytes]] = [
        (258, _SHORT, 65_535, array("H", [8]).tobytes() * 65_535),
        (277, _SHORT, 1, 65_535),
    ]
    return _tiff(
        bytes(4_096), *entries, *many, (273, _LONG, 1, 8), (278, _LONG, 1, 1), (279, _LONG, 1, 4_096)
    )


@kind("parser: tags with counts of 4 billion", default_format=False)
def tiff_counts_of_4_billion() -> bytes:
    strip = [
        (273, _LONG, 2**32 - 1, 8),
        (278, _LONG, 1, 1),
        (279, _LONG, 2**32 - 1, 8),
        (320, _SHORT, 2**32 - 1, 8),
    ]
    return _tiff(bytes(4_096), *_grey(64, 64), *strip)


@kind("limits: the first half of a file", default_format=False)
def tiff_truncated() -> bytes:
    return encoded(noisy(800, 600), "TIFF", compression="tiff_lzw")[:200_000]


# --- JPEG 2000 ---------------------------------------------------------------------------------------------


def _jp2(
    width: int,
    height: int,
    *,
    tile: tuple[int, int] | None = None,
    components: int = 3,
    levels: int = 5,
    layers: int = 1,
    precincts: int | None = None,
    block: int = 4,
    size: int = 2_000,
) -> bytes:
    """A codestream of ``size`` bytes of empty packets. ``block``: log2 of the side of a code block."""
    across, down = tile or (width, height)
    siz = (
        struct.pack(">HIIIIIIIIH", 0, width, height, 0, 0, across, down, 0, 0, components)
        + b"\x07\x01\x01" * components
    )
    style = struct.pack(">BBHBBBBBB", precincts is not None, 0, layers, 0, levels, block - 2, block - 2, 0, 1)
    cod = style + (bytes((precincts,)) * (levels + 1) if precincts is not None else b"")
    qcd = b"\x40" + b"\x40" * (3 * levels + 1)
    segments = ((0x51, siz), (0x52, cod), (0x5C, qcd), (0x90, struct.pack(">HIBB", 0, 0, 0, 1)))
    return (
        b"\xff\x4f"
        + b"".join(jpeg_segment(*each) for each in segments)
        + b"\xff\x93"
        + bytes(size)
        + b"\xff\xd9"
    )


@kind("memory: 2 KB of 2000x2000 in precincts of one pixel", default_format=False)
def jp2_precincts_of_a_pixel() -> bytes:
    return _jp2(2_000, 2_000, levels=0, precincts=0, block=2)


@kind("memory: the same, small: 600x600", default_format=False)
def jp2_small_precincts_of_a_pixel() -> bytes:
    return _jp2(600, 600, levels=0, precincts=0, block=2)


@kind("CPU, GIL and memory: 49 megapixels", default_format=False)
def jp2_49_megapixels() -> bytes:
    return _jp2(7_000, 7_000)


@kind("CPU: 65,000 tiles", default_format=False)
def jp2_65000_tiles() -> bytes:
    return _jp2(2_550, 2_550, tile=(10, 10), levels=0)


@kind("memory: 16,384 components", default_format=False)
def jp2_16384_components() -> bytes:
    return _jp2(500, 500, components=16_384)


@kind("CPU: 65,535 quality layers", default_format=False)
def jp2_65535_layers() -> bytes:
    return _jp2(1_000, 1_000, layers=65_535, precincts=0x11, size=200_000)
