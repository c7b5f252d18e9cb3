"""PNG: deflate, text, colour profiles, chunks, animations."""

import struct
import zlib

from tests.hostile_pictures.kinds import encoded, ifd, kind, noisy, small, zlib_of_zeros

_PNG = b"\x89PNG\r\n\x1a\n"


def _chunk(name: bytes, body: bytes = b"") -> bytes:
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))


def _header(width: int, height: int, depth: int = 8, colour: int = 2, interlaced: int = 0) -> bytes:
    return _PNG + _chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, interlaced))


def _png_of_zeros(width: int, height: int, depth: int = 8, colour: int = 2, interlaced: int = 0) -> bytes:
    channels = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}[colour]
    count = (width * channels * depth // 8 + 8) * height
    palette = _chunk(b"PLTE", bytes(768)) if colour == 3 else b""
    return (
        _header(width, height, depth, colour, interlaced)
        + palette
        + _chunk(b"IDAT", zlib_of_zeros(count))
        + _chunk(b"IEND")
    )


@kind("memory: 143 megapixels of black and white out of 17 KB")
def png_1_bit_143_megapixels() -> bytes:
    return _png_of_zeros(13_000, 11_000, 1, 0)


@kind("memory: 130 megapixels out of 400 KB")
def png_130_megapixels() -> bytes:
    return _png_of_zeros(11_400, 11_400)


@kind("memory: 100 megapixels with transparency")
def png_100_transparent_megapixels() -> bytes:
    return _png_of_zeros(10_000, 10_000, 8, 6)


@kind("memory: 100 megapixels in 16 bits, which become floating-point numbers")
def png_100_megapixels_in_16_bits() -> bytes:
    return _png_of_zeros(10_000, 10_000, 16, 0)


@kind("CPU: 144 megapixels, interlaced")
def png_interlaced_144_megapixels() -> bytes:
    return _png_of_zeros(12_000, 12_000, 8, 0, 1)


@kind("limits: a header that says 4 gigapixels")
def png_4_gigapixels_claimed() -> bytes:
    return _header(65_535, 65_535) + _chunk(b"IDAT", zlib_of_zeros(100_000)) + _chunk(b"IEND")


@kind("limits: 2**31-1 pixels wide")
def png_of_largest_width() -> bytes:
    return _header(2**31 - 1, 2**31 - 1) + _chunk(b"IDAT", zlib_of_zeros(100_000)) + _chunk(b"IEND")


@kind("limits: 0 pixels")
def png_of_no_pixels() -> bytes:
    return _header(0, 0) + _chunk(b"IDAT", zlib_of_zeros(1)) + _chunk(b"IEND")


@kind("limits: 1 pixel wide, 100,000 high")
def png_aspect_100000() -> bytes:
    return _png_of_zeros(1, 100_000)


def _png_with(*chunks: bytes) -> bytes:
    """A sound PNG with ``chunks`` between header and data."""
    sound = small("PNG")
    return sound[:33] + b"".join(chunks) + sound[33:]


@kind("memory: 60 compressed texts of 1 GB each")
def png_ztxt_bombs() -> bytes:
    return _png_with(*(_chunk(b"zTXt", b"k%d\x00\x00" % n + zlib_of_zeros(2**30)) for n in range(8)))


@kind("memory: compressed texts just below Pillow's limit for one")
def png_itxt_below_the_limit() -> bytes:
    text = zlib.compress(b"x" * (2**20 - 100))
    return _png_with(*(_chunk(b"iTXt", b"k%d\x00\x01\x00\x00\x00" % n + text) for n in range(100)))


@kind("memory: a colour profile of 2 GB")
def png_icc_bomb() -> bytes:
    return _png_with(_chunk(b"iCCP", b"p\x00\x00" + zlib_of_zeros(2**31)))


@kind("CPU and GIL: a million empty IDAT chunks")
def png_million_idat_chunks() -> bytes:
    sound = small("PNG")
    end = sound.index(b"IDAT") - 4
    return sound[:end] + _chunk(b"IDAT") * 1_000_000 + sound[end:]


@kind("CPU and GIL: a million private chunks")
def png_million_private_chunks() -> bytes:
    return _png_with(_chunk(b"prIv") * 1_000_000)


@kind("parser: an animation of 2**31-1 frames")
def png_2_billion_frames() -> bytes:
    control = _chunk(b"fcTL", struct.pack(">IIIIIHHBB", 0, 64, 48, 0, 0, 1, 1, 0, 0))
    return _png_with(_chunk(b"acTL", struct.pack(">II", 2**31 - 1, 0)), control)


@kind("parser: an animation whose frame lies outside")
def png_frame_outside() -> bytes:
    control = _chunk(b"fcTL", struct.pack(">IIIIIHHBB", 0, 2**31 - 1, 2**31 - 1, 2**30, 2**30, 1, 0, 2, 1))
    return _png_with(_chunk(b"acTL", struct.pack(">II", 2, 0)), control)


@kind("CPU: 8 million empty deflate blocks")
def png_8_million_deflate_blocks() -> bytes:
    body = zlib.compress(bytes((64 * 3 + 1) * 48))
    return (
        _header(64, 48)
        + _chunk(b"IDAT", body[:2] + b"\x00\x00\x00\xff\xff" * 8_000_000 + body[2:])
        + _chunk(b"IEND")
    )


@kind("parser: a chunk that says 2 GB")
def png_chunk_of_2_gb() -> bytes:
    sound = small("PNG")
    return sound[:33] + struct.pack(">I", 2**31 - 1) + b"tEXt" + sound[33:]


@kind("parser: wrong checksums")
def png_wrong_checksums() -> bytes:
    sound = bytearray(small("PNG"))
    sound[29:33] = b"\x00\x00\x00\x00"
    return bytes(sound)


@kind("parser: EXIF in circles")
def png_exif_in_circles() -> bytes:
    return _png_with(
        _chunk(
            b"eXIf",
            b"II*\x00\x08\x00\x00\x00" + ifd((0x8769, 4, 1, 8), (0x0112, 7, 2**32 - 1, 8), following=8),
        )
    )


@kind("limits: the first half of a file")
def png_truncated() -> bytes:
    return encoded(noisy(800, 600), "PNG")[:100_000]
