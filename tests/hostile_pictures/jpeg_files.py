"""JPEG: scans, segments, tables, EXIF and MPO."""

import struct

from tests.hostile_pictures.kinds import Bits, encoded, ifd, jpeg_segment, kind, noisy, small

_SOI, _EOI = b"\xff\xd8", b"\xff\xd9"
_QUANTIZATION = b"\xff\xdb" + struct.pack(">HB", 67, 0) + b"\x01" * 64
_JFIF = b"\xff\xe0\x00\x10JFIF\x00\x01\x01\x00\x00\x01\x00\x01\x00\x00"


def _frame(
    marker: int, width: int, height: int, components: int = 1, sampling: int = 0x11, bits: int = 8
) -> bytes:
    parts = b"".join(
        bytes((number + 1, sampling if number == 0 else 0x11, 0)) for number in range(components)
    )
    return jpeg_segment(marker, struct.pack(">BHHB", bits, height, width, components) + parts)


def _huffman(table: int, *symbols: int) -> bytes:
    """A table in which the first symbol is the bit 0, the second 10, the third 110, ..."""
    counts = bytes(1 if length < len(symbols) else 0 for length in range(16))
    return jpeg_segment(0xC4, bytes((table,)) + counts + bytes(symbols))


def _scan(components: int, first: int, last: int, high: int, low: int, data: bytes) -> bytes:
    parts = b"".join(bytes((number + 1, 0)) for number in range(components))
    return jpeg_segment(0xDA, bytes((components,)) + parts + bytes((first, last, high << 4 | low))) + data


def jpeg_of_scans(side: int, scans: int) -> bytes:
    """A grey progressive JPEG whose scans refine coefficients that are all zero: nothing but time."""
    blocks = left = (-(-side // 8)) ** 2
    bits = Bits()
    while left:  # runs of blocks without coefficients
        run = min(left, 2**15 - 1)
        size = run.bit_length() - 1
        bits.put((2**size - 1) * 2, size + 1)
        if size:
            bits.put(run - 2**size, size)
        left -= run
    refinement = bits.bytes(fill="1").replace(b"\xff", b"\xff\x00")
    head = _SOI + _QUANTIZATION + _frame(0xC2, side, side) + _huffman(0, 0)
    head += _huffman(0x10, *(run << 4 for run in range(15)))
    first = _scan(1, 0, 0, 0, 1, bytes(blocks // 8 + 1))
    return head + first + scans * _scan(1, 1, 63, 1, 0, refinement) + _EOI


@kind("CPU: 17,094 scans over the same 4000x4000 pixels")
def jpeg_17094_scans() -> bytes:
    return jpeg_of_scans(4000, 17_094)


@kind("CPU: 1,500 scans over the same 3000x3000 pixels")
def jpeg_1500_scans() -> bytes:
    return jpeg_of_scans(3000, 1_500)


@kind("CPU and GIL: 40 MB of fill bytes, read one by one")
def jpeg_40_mb_of_fill_bytes() -> bytes:
    return _SOI + b"\xff" * 40_000_000


@kind("CPU and GIL: 4 MB of fill bytes before a sound picture")
def jpeg_4_mb_of_fill_bytes() -> bytes:
    return _SOI + b"\xff" * 4_000_000 + small("JPEG")[2:]


@kind("memory and GIL: 8 million empty comments")
def jpeg_8_million_comments() -> bytes:
    return _SOI + b"\xff\xfe\x00\x02" * 8_000_000 + small("JPEG")[2:]


@kind("CPU: a million Huffman tables")
def jpeg_million_huffman_tables() -> bytes:
    return _SOI + _huffman(0, 0) * 1_000_000 + small("JPEG")[2:]


@kind("CPU: 200,000 application segments of one byte")
def jpeg_200000_app_segments() -> bytes:
    return _SOI + jpeg_segment(0xEB, b"x") * 200_000 + small("JPEG")[2:]


@kind("memory: 177 megapixels claimed by 500 bytes")
def jpeg_177_megapixels_claimed() -> bytes:
    head = _SOI + _JFIF + _QUANTIZATION + _frame(0xC0, 13_300, 13_300, 3) + _huffman(0, 0) + _huffman(0x10, 0)
    return head + _scan(3, 0, 63, 0, 0, bytes(200)) + _EOI


@kind("memory: coefficients of a progressive 80-megapixel picture with no data")
def jpeg_progressive_80_megapixels() -> bytes:
    head = _SOI + _QUANTIZATION + _frame(0xC2, 9_000, 9_000, 3) + _huffman(0, 0) + _huffman(0x10, 0)
    return head + _scan(3, 0, 0, 0, 1, bytes(2_000)) + _EOI


@kind("CPU and memory: arithmetic coding, 12000x12000 out of 100 bytes")
def jpeg_arithmetic_144_megapixels() -> bytes:
    return _SOI + _QUANTIZATION + _frame(0xC9, 12_000, 12_000) + _scan(1, 0, 63, 0, 0, bytes(100)) + _EOI


@kind("CPU and memory: lossless process, 12000x12000 out of 100 bytes")
def jpeg_lossless_144_megapixels() -> bytes:
    head = _SOI + _frame(0xC3, 12_000, 12_000) + _huffman(0, 0)
    return head + _scan(1, 1, 0, 0, 0, bytes(100)) + _EOI


@kind("parser: a restart marker after every block, out of order")
def jpeg_restart_every_block() -> bytes:
    head = _SOI + _QUANTIZATION + _frame(0xC0, 8_000, 8_000) + _huffman(0, 0) + _huffman(0x10, 0)
    head += jpeg_segment(0xDD, struct.pack(">H", 1))
    return (
        head
        + _scan(1, 0, 63, 0, 0, b"".join(b"\x00\xff" + bytes((0xD0 + n * 3 % 8,)) for n in range(300_000)))
        + _EOI
    )


@kind("parser: no height in its header, 65,535 lines in a DNL segment")
def jpeg_height_in_dnl() -> bytes:
    head = _SOI + _QUANTIZATION + _frame(0xC0, 2_000, 0) + _huffman(0, 0) + _huffman(0x10, 0)
    return head + _scan(1, 0, 63, 0, 0, bytes(300)) + jpeg_segment(0xDC, b"\xff\xff") + _EOI


@kind("parser: a Huffman table with more codes than there are")
def jpeg_overfull_huffman_table() -> bytes:
    table = jpeg_segment(0xC4, b"\x00" + b"\xff" * 16 + bytes(256))
    return _SOI + _QUANTIZATION + _frame(0xC0, 64, 64) + table + _scan(1, 0, 63, 0, 0, b"\xaa" * 500) + _EOI


@kind("parser: sampling factors of 15, four components")
def jpeg_sampling_of_15() -> bytes:
    head = _SOI + _QUANTIZATION + _frame(0xC0, 5_000, 5_000, 4, 0xFF) + _huffman(0, 0) + _huffman(0x10, 0)
    return head + _scan(4, 0, 63, 0, 0, bytes(500)) + _EOI


@kind("parser: 255 components of 12 bits")
def jpeg_255_components() -> bytes:
    return (
        _SOI + _QUANTIZATION + _frame(0xC1, 64, 64, 255, 0x44, 12) + _scan(1, 0, 63, 0, 0, bytes(99)) + _EOI
    )


@kind("limits: 65500 pixels wide, 1 high")
def jpeg_aspect_65500() -> bytes:
    head = _SOI + _QUANTIZATION + _frame(0xC0, 65_500, 1) + _huffman(0, 0) + _huffman(0x10, 0)
    return head + _scan(1, 0, 63, 0, 0, bytes(99)) + _EOI


@kind("limits: 0 pixels")
def jpeg_of_no_pixels() -> bytes:
    return _SOI + _QUANTIZATION + _frame(0xC0, 0, 0) + _huffman(0, 0) + _scan(1, 0, 63, 0, 0, b"") + _EOI


def _jpeg_with_exif(exif: bytes) -> bytes:
    return _SOI + jpeg_segment(0xE1, b"Exif\x00\x00" + exif) + small("JPEG")[2:]


@kind("parser: EXIF directories that contain themselves")
def jpeg_exif_in_circles() -> bytes:
    loops = ifd((0x0112, 3, 1, 6), (0x8769, 4, 1, 8), (0x8825, 4, 1, 8), (0xA005, 4, 1, 8), following=8)
    return _jpeg_with_exif(b"II*\x00\x08\x00\x00\x00" + loops)


@kind("memory: EXIF values of 4 GB")
def jpeg_exif_of_4_gb() -> bytes:
    entries = [(tag, 7, 0xFFFF_FFF0, 8) for tag in (0x0112, 0x010E, 0x9286, 0x927C)]
    return _jpeg_with_exif(b"II*\x00\x08\x00\x00\x00" + ifd(*entries))


@kind("memory: 5,000 EXIF values that share 60 kB")
def jpeg_exif_sharing_60_kb() -> bytes:
    entries = [(0x9000 + n, 3, 2_500, 8) for n in range(5_000)]
    return _jpeg_with_exif(b"II*\x00\x08\x00\x00\x00" + ifd(*entries))


@kind("memory: 16 MB of colour profile in chunks of which most lie")
def jpeg_icc_profile_of_16_mb() -> bytes:
    chunks = [
        jpeg_segment(0xE2, b"ICC_PROFILE\x00" + bytes((n % 255 + 1, 255)) + bytes(65_000)) for n in range(255)
    ]
    return _SOI + b"".join(chunks) + small("JPEG")[2:]


def _mpo(index: bytes) -> bytes:
    return _SOI + jpeg_segment(0xE2, b"MPF\x00" + index) + small("JPEG")[2:]


@kind("parser: MPO of 65,000 frames, all of them this one")
def mpo_of_65000_frames() -> bytes:
    entries = 4_000
    head = b"II*\x00\x08\x00\x00\x00"
    index = ifd(
        (0xB000, 7, 4, int.from_bytes(b"0100", "little")),
        (0xB001, 4, 1, 65_000),
        (0xB002, 7, 16 * entries, 50),
    )
    return _mpo(head + index + bytes(50 - 8 - len(index)) + bytes(16 * entries))


@kind("parser: MPO whose frames begin outside and at each other")
def mpo_with_frames_in_circles() -> bytes:
    head = b"II*\x00\x08\x00\x00\x00"
    index = ifd(
        (0xB000, 7, 4, int.from_bytes(b"0100", "little")), (0xB001, 4, 1, 3), (0xB002, 7, 48, 50), following=8
    )
    frames = struct.pack("<IIIHH", 0x30000, 0xFFFF_FFFF, 0, 1, 2) + struct.pack("<IIIHH", 0, 10, 2, 0, 0) * 2
    return _mpo(head + index + bytes(50 - 8 - len(index)) + frames)


@kind("limits: the first half of a file")
def jpeg_truncated() -> bytes:
    return encoded(noisy(800, 600), "JPEG")[:40_000]
