"""GIF, WebP and BMP: LZW, frames, canvases and run lengths."""

import struct
from functools import cache

from tests.hostile_pictures.kinds import encoded, kind, noisy

# --- GIF ----------------------------------------------------------------------------------------------------


def _gif_screen(width: int, height: int) -> bytes:
    return b"GIF89a" + struct.pack("<HHBBB", width, height, 0x80, 0, 0) + b"\x00\x00\x00\xff\xff\xff"


def _gif_frame(width: int, height: int, codes: bytes, left: int = 0, top: int = 0) -> bytes:
    blocks = b"".join(
        bytes((len(codes[at : at + 255]),)) + codes[at : at + 255] for at in range(0, len(codes), 255)
    )
    return b"," + struct.pack("<HHHHB", left, top, width, height, 0) + b"\x02" + blocks + b"\x00"


@cache
def _lzw_of_zeros(count: int) -> bytes:
    """LZW codes (2 bits at first) of ``count`` zeros or a few more: each code stands for one pixel more."""
    bits = ["001", "000"]  # clear, then a zero; bits of a code are least significant first
    code, width, done = 6, 3, 1
    while done < count:
        bits.append(f"{min(code, 4095):0{width}b}"[::-1])
        done += min(code, 4095) - 4
        code += 1
        if code == 2**width and width < 12:
            width += 1
    text = "".join(bits)
    text += "0" * (-len(text) % 8)
    return int(text[::-1], 2).to_bytes(len(text) // 8, "little")


@kind("memory and CPU: 144 megapixels of LZW out of 55 KB")
def gif_lzw_144_megapixels() -> bytes:
    return _gif_screen(12_000, 12_000) + _gif_frame(12_000, 12_000, _lzw_of_zeros(144_000_000)) + b";"


@kind("limits: 44 bytes that say 4 gigapixels")
def gif_4_gigapixels_claimed() -> bytes:
    return _gif_screen(65_535, 65_535) + _gif_frame(65_535, 65_535, b"\x4c\x01") + b";"


@kind("CPU: 100,000 frames")
def gif_100000_frames() -> bytes:
    return _gif_screen(64, 48) + _gif_frame(64, 48, _lzw_of_zeros(64 * 48)) * 100_000 + b";"


@kind("memory: a second frame far outside the first, 65535x65535")
def gif_frame_outside() -> bytes:
    second = _gif_frame(65_535, 65_535, b"\x4c\x01", 65_535, 65_535)
    return _gif_screen(64, 48) + _gif_frame(64, 48, _lzw_of_zeros(64 * 48)) + second + b";"


@kind("memory: a first frame of 100 megapixels on a screen of one pixel")
def gif_frame_larger_than_its_screen() -> bytes:
    return _gif_screen(1, 1) + _gif_frame(10_000, 10_000, _lzw_of_zeros(100_000_000)) + b";"


@kind("CPU and GIL: 20 MB of comment in blocks of one byte")
def gif_20_mb_of_comment() -> bytes:
    return (
        _gif_screen(64, 48)
        + b"!\xfe"
        + b"\x01x" * 10_000_000
        + b"\x00"
        + _gif_frame(64, 48, _lzw_of_zeros(3072))
        + b";"
    )


@kind("CPU and GIL: a million extensions before the first frame")
def gif_million_extensions() -> bytes:
    control = b"!\xf9\x04\x08\x00\x00\x00\x00"
    return _gif_screen(64, 48) + control * 1_000_000 + _gif_frame(64, 48, _lzw_of_zeros(3072)) + b";"


@kind("CPU: 10 million clear codes for no pixel")
def gif_clear_codes_only() -> bytes:
    return _gif_screen(2_000, 2_000) + _gif_frame(2_000, 2_000, b"\x24\x49\x92" * 1_250_000) + b";"


@kind("limits: 0 pixels")
def gif_of_no_pixels() -> bytes:
    return _gif_screen(0, 0) + _gif_frame(0, 0, b"\x4c\x01") + b";"


@kind("limits: the first half of a file")
def gif_truncated() -> bytes:
    return encoded(noisy(800, 600), "GIF")[:100_000]


# --- WebP ---------------------------------------------------------------------------------------------------


def _riff(*chunks: tuple[bytes, bytes]) -> bytes:
    body = b"".join(
        name + struct.pack("<I", len(data)) + data + b"\x00" * (len(data) % 2) for name, data in chunks
    )
    return b"RIFF" + struct.pack("<I", len(body) + 4) + b"WEBP" + body


def _vp8l(width: int, height: int) -> bytes:
    """Lossless, every pixel the same."""
    return b"\x2f" + struct.pack("<I", (width - 1) | (height - 1) << 14) + b"\x88\x88\x08" + bytes(6)


def _u24(value: int) -> bytes:
    return value.to_bytes(3, "little")


@kind("memory: 34 bytes that say 169 megapixels")
def webp_169_megapixels_in_34_bytes() -> bytes:
    return _riff((b"VP8L", _vp8l(13_000, 13_000)))


@kind("memory: 34 bytes of 62 megapixels, 1 GB to decode")
def webp_62_megapixels_in_34_bytes() -> bytes:
    return _riff((b"VP8L", _vp8l(7_900, 7_900)))


@kind("memory: a canvas of 268 megapixels around a small frame")
def webp_canvas_of_268_megapixels() -> bytes:
    frame = struct.pack("<4sI", b"VP8L", 14) + _vp8l(64, 48)
    anmf = _u24(0) + _u24(0) + _u24(63) + _u24(47) + _u24(100) + b"\x00" + frame
    head = b"\x02\x00\x00\x00" + _u24(16_382) + _u24(16_382)
    return _riff((b"VP8X", head), (b"ANIM", bytes(6)), (b"ANMF", anmf))


def _animated_webp(width: int, height: int, frames: int) -> bytes:
    frame = struct.pack("<4sI", b"VP8L", 16) + _vp8l(width, height) + b"\x00\x00"
    anmf = _u24(0) + _u24(0) + _u24(width - 1) + _u24(height - 1) + _u24(100) + b"\x00" + frame
    head = b"\x02\x00\x00\x00" + _u24(width - 1) + _u24(height - 1)
    return _riff((b"VP8X", head), (b"ANIM", bytes(6)), *[(b"ANMF", anmf)] * frames)


@kind("CPU and memory: 100,000 frames of 36 megapixels each")
def webp_100000_frames() -> bytes:
    return _animated_webp(6_000, 6_000, 100_000)


@kind("parser: a frame larger than its canvas")
def webp_frame_larger_than_its_canvas() -> bytes:
    head = b"\x10\x00\x00\x00" + _u24(63) + _u24(47)
    return _riff((b"VP8X", head), (b"VP8L", _vp8l(7_900, 7_900)))


@kind("parser: 2 million chunks that nobody knows")
def webp_2_million_chunks() -> bytes:
    head = b"\x00\x00\x00\x00" + _u24(63) + _u24(47)
    sound = _riff((b"VP8X", head), (b"VP8L", _vp8l(64, 48)))
    end = sound.index(b"VP8L")
    chunks = b"zzzz\x00\x00\x00\x00" * 2_000_000
    size = struct.pack("<I", len(sound) - 8 + len(chunks))
    return b"RIFF" + size + sound[8:end] + chunks + sound[end:]


@kind("limits: the first half of a file")
def webp_truncated() -> bytes:
    return encoded(noisy(800, 600).convert("RGB"), "WEBP")[:20_000]


# --- BMP ----------------------------------------------------------------------------------------------------


def _bmp(width: int, height: int, bits: int, compression: int, data: bytes, colours: int = 0) -> bytes:
    palette = bytes(4 * (colours or (2**bits if bits <= 8 else 0)))
    info = struct.pack("<IiiHHIIiiII", 40, width, height, 1, bits, compression, len(data), 0, 0, colours, 0)
    offset = 14 + len(info) + len(palette)
    return b"BM" + struct.pack("<IHHI", offset + len(data), 0, 0, offset) + info + palette + data


@kind("CPU and GIL: 2,200 ends of a line of 65,000 pixels, filled one by one")
def bmp_rle8_65000_wide() -> bytes:
    return _bmp(65_000, 2_200, 8, 1, b"\x01\x00\x00\x00" * 2_200 + b"\x00\x01")


@kind("CPU and GIL: the same in 4 bits, 1,000 lines")
def bmp_rle4_65000_wide() -> bytes:
    return _bmp(65_000, 1_000, 4, 2, b"\x02\x00\x00\x00" * 1_000 + b"\x00\x01")


@kind("CPU and GIL: the same, small: 250 lines")
def bmp_rle8_small() -> bytes:
    return _bmp(40_000, 250, 8, 1, b"\x01\x00\x00\x00" * 250 + b"\x00\x01")


@kind("memory: a million jumps of 255x255 pixels")
def bmp_rle8_jumps() -> bytes:
    return _bmp(12_000, 12_000, 8, 1, b"\x00\x02\xff\xff" * 1_000_000 + b"\x00\x01")


@kind("memory: 144 megapixels claimed by no data")
def bmp_144_megapixels_claimed() -> bytes:
    return _bmp(12_000, 12_000, 24, 0, bytes(100))


@kind("limits: a height of -2**31")
def bmp_of_negative_height() -> bytes:
    return _bmp(2_000, -(2**31), 24, 0, bytes(100))


@kind("limits: 0 pixels")
def bmp_of_no_pixels() -> bytes:
    return _bmp(0, 0, 24, 0, b"")


@kind("parser: a palette of 4 billion colours")
def bmp_palette_of_4_billion() -> bytes:
    info = struct.pack("<IiiHHIIiiII", 40, 64, 48, 1, 8, 0, 0, 0, 0, 2**32 - 1, 0)
    return b"BM" + struct.pack("<IHHI", 5_000, 0, 0, 54) + info + bytes(5_000)
