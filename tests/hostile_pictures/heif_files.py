"""AVIF and HEIC: boxes of HEIF, AV1 and HEVC."""

import base64
import struct
from array import array

from tests.hostile_pictures.kinds import Bits, encoded, kind, noise_bytes, noisy


def _box(name: bytes, *parts: bytes) -> bytes:
    body = b"".join(parts)
    return struct.pack(">I", len(body) + 8) + name + body


def _full(name: bytes, version: int, flags: int, *parts: bytes) -> bytes:
    return _box(name, struct.pack(">I", version << 24 | flags), *parts)


def _ceil_log2(value: int, unit: int = 1) -> int:
    bits = 0
    while unit << bits < value:
        bits += 1
    return bits


def _av1(width: int, height: int) -> bytes:
    """A grey still picture of AV1 (reduced header) whose tiles are all zeros."""
    head = Bits()
    head.put(0, 3)  # profile
    head.put(3, 2)  # still picture, reduced header
    head.put(31, 5)  # no level
    head.put(15, 4)
    head.put(15, 4)
    head.put(width - 1, 16)
    head.put(height - 1, 16)
    head.put(0, 6)  # no large superblocks, filters, CDEF, restoration
    head.put(0b0100, 4)  # 8 bits, monochrome, no description, limited range
    head.put(0b01, 2)  # no film grain; then the trailing bit
    columns, rows = -(-width // 64), -(-height // 64)
    most = _ceil_log2(columns, 64)
    least = max(most, _ceil_log2(columns * rows, 2304))
    column_bits, row_bits = most, max(least - most, 0)
    frame = Bits()
    frame.put(0, 3)  # CDF updates, no screen content, size as in the sequence
    frame.put(1, 1)  # uniform tiles
    if column_bits < _ceil_log2(min(columns, 64)):
        frame.put(0, 1)
    if row_bits < _ceil_log2(min(rows, 64)):
        frame.put(0, 1)
    if column_bits + row_bits:
        frame.put(0, column_bits + row_bits)
        frame.put(1, 2)  # sizes of tiles in two bytes
    frame.put(255, 8)  # quantizer
    frame.put(0, 4)  # no delta, matrices, segments, delta of blocks
    frame.put(0, 6 + 6 + 3 + 1)  # no loop filter
    frame.put(0, 2)  # largest transforms
    tiles = 2 ** (column_bits + row_bits)
    data = bytes(1_000)  # enough for the largest tile
    group = (b"\x00" if tiles > 1 else b"") + (struct.pack("<H", len(data) - 1) + data) * (tiles - 1) + data
    sequence, picture = head.bytes(), frame.bytes() + group
    return b"".join(
        bytes((kind << 3 | 2,)) + _leb128(len(body)) + body for kind, body in ((1, sequence), (6, picture))
    )


def _leb128(value: int) -> bytes:
    result = b""
    while value > 127:
        result += bytes((value & 127 | 128,))
        value >>= 7
    return result + bytes((value,))


def _still(
    brand: bytes,
    item: bytes,
    properties: list[bytes],
    data: bytes,
    *,
    items: int = 1,
    grid: tuple[int, int, int, int] | None = None,
) -> bytes:
    """A HEIF file of one item, or of a grid (rows, columns, width, height) of that item again and again.

    ``items``: how often the item is listed, all with the same bytes.
    """
    ispe = len(properties)
    count = items + (grid is not None)
    derived = b""
    associations = [(number + 1, range(1, ispe + 1)) for number in range(items)]
    references = b""
    if grid is not None:
        rows, columns, width, height = grid
        derived = struct.pack(">BBBBII", 0, 1, rows - 1, columns - 1, width, height)
        properties = [*properties, _full(b"ispe", 0, 0, struct.pack(">II", width, height))]
        associations.append((count, range(ispe + 1, ispe + 2)))
        cells = array("H", [number % items + 1 for number in range(rows * columns)])
        cells.byteswap()
        references = _full(
            b"iref", 0, 0, _box(b"dimg", struct.pack(">HH", count, rows * columns), cells.tobytes())
        )

    def meta(offset: int) -> bytes:
        kinds = [item] * items + ([b"grid"] if grid is not None else [])
        infos = [
            _full(b"infe", 2, 0, struct.pack(">HH", n + 1, 0), kind, b"\x00") for n, kind in enumerate(kinds)
        ]
        spans = [(offset + len(derived), len(data))] * items + ([(offset, len(derived))] if derived else [])
        places = b"".join(
            struct.pack(">HHHII", n + 1, 0, 1, start, length) for n, (start, length) in enumerate(spans)
        )
        tied = b"".join(
            struct.pack(">HB", number, len(indexes)) + bytes(indexes) for number, indexes in associations
        )
        return _full(
            b"meta",
            0,
            0,
            _full(b"hdlr", 0, 0, bytes(4) + b"pict" + bytes(13)),
            _full(b"pitm", 0, 0, struct.pack(">H", count)),
            _full(b"iloc", 0, 0, b"\x44\x00", struct.pack(">H", count), places),
            _full(b"iinf", 0, 0, struct.pack(">H", count), *infos),
            references,
            _box(b"iprp", _box(b"ipco", *properties), _full(b"ipma", 0, 0, struct.pack(">I", count), tied)),
        )

    head = _box(b"ftyp", brand, bytes(4), brand, b"mif1", b"miaf")
    size = len(head) + len(meta(0)) + 8
    return head + meta(size) + _box(b"mdat", derived, data)


def _avif(width: int, height: int, claimed: tuple[int, int], **more: object) -> bytes:
    properties = [
        _full(b"ispe", 0, 0, struct.pack(">II", *claimed)),
        _full(b"pixi", 0, 0, b"\x01\x08"),
        _box(b"av1C", b"\x81\x1f\x1c\x00"),
    ]
    return _still(b"avif", b"av01", properties, _av1(width, height), **more)  # type: ignore[arg-type]


@kind("memory: 64x64 in its header, a frame of 16000x16000 inside")
def avif_frame_larger_than_its_header() -> bytes:
    return _avif(16_000, 16_000, (64, 64))


@kind("memory and CPU: 81 megapixels out of 16 KB")
def avif_81_megapixels() -> bytes:
    return _avif(9_000, 9_000, (9_000, 9_000))


@kind("limits: 16 gigapixels in its header, 64x64 inside")
def avif_16_gigapixels_claimed() -> bytes:
    return _avif(64, 64, (2**17, 2**17))


@kind("CPU and memory: a grid of 100x100 tiles that share their bytes")
def avif_grid_of_10000_tiles() -> bytes:
    return _avif(128, 128, (128, 128), items=10_000, grid=(100, 100, 12_800, 12_800))


@kind("parser: 16,000 items that share their bytes")
def avif_16000_items() -> bytes:
    return _avif(64, 64, (64, 64), items=16_000)


@kind("limits: the first half of a file")
def avif_truncated() -> bytes:
    return encoded(noisy(200, 150).convert("RGB"), "AVIF", speed=10)[:2_000]


# 1024x1024 pixels of HEVC, all the same, as an encoder wrote them: the configuration, then the data.
_HEVC_CONFIGURATION = base64.b64decode(
    "AQNwAAAAkAAAAAAAePAA/P34+AAADwNgAAEAGEABDAH//wNwAAADAJAAAAMAAAMAeLoCQGEAAQAtQgEBA3AAAAMAkAAAAwAA"
    "AwB4oAIAgBAFlupJKa5uAhoMCAAAAwDIAAADAAhAYgABAAdEAcFysGJA"
)
_HEVC = base64.b64decode(
    "AAABNSgBrwQQgaJRJJFFA8888888+Px5OOv/+ZCPz8BcKsRv7BOZ0dwKYWJmAAADAAADAAADAAdcp+juBmDFPQAAAwAAAwAA"
    "AwAAAwG3kw00wAAAAwAAAwAAAwAAAwAEPIcAAAMAAAMAAAMAAAMAAAMAETAAAAMAAAMAAAMAAAMAAAMAA9IAAAMAAAMAAAMA"
    "AAMAAAMAS8AAAAMAAAMAAAMAAAMAAAMBaQAAAwAAAwAAAwAAAwAABIwAAAMAAAMAAAMAAAMAAAnoAAADAAADAAADAAADAAAO"
    "2AAAAwAAAwAAAwAAAwAAGRAAAAMAAAMAAAMAAAMAACbgAAADAAADAAADAAADAAAyIAAAAwAAAwAAAwAAAwAASsAAAAMAAAMA"
    "AAMAAAMAAGLAAAADAAADAAADAAADAACFgA=="
)


def _heic(claimed: tuple[int, int], data: bytes = _HEVC, **more: object) -> bytes:
    properties = [
        _full(b"ispe", 0, 0, struct.pack(">II", *claimed)),
        _full(b"pixi", 0, 0, b"\x03\x08\x08\x08"),
        _box(b"hvcC", _HEVC_CONFIGURATION),
    ]
    return _still(b"heic", b"hvc1", properties, data, **more)  # type: ignore[arg-type]


@kind("CPU and memory: 85 megapixels, a grid of 9x9 tiles that are all the same")
def heic_grid_of_81_tiles() -> bytes:
    return _heic((1024, 1024), grid=(9, 9, 9_216, 9_216))


@kind("memory: 900 tiles of 1024x1024 for a picture of 64x64")
def heic_grid_larger_than_its_header() -> bytes:
    return _heic((64, 64), grid=(30, 30, 64, 64))


@kind("limits: 169 megapixels in its header, 1024x1024 inside")
def heic_169_megapixels_claimed() -> bytes:
    return _heic((13_000, 13_000))


@kind("limits: a grid of one row that says 4 gigapixels")
def heic_grid_of_4_gigapixels() -> bytes:
    return _heic((1024, 1024), grid=(1, 2, 65_535, 65_535))


@kind("parser: a grid of 65,025 tiles")
def heic_grid_of_65025_tiles() -> bytes:
    return _heic((1024, 1024), grid=(255, 255, 12_288, 12_288))


@kind("parser: noise where the picture is")
def heic_of_noise() -> bytes:
    return _heic((1024, 1024), data=struct.pack(">I", 5_000) + b"\x26\x01" + noise_bytes(4_998))


@kind("parser: boxes that say they are longer than the file, and boxes in boxes")
def heic_boxes_in_boxes() -> bytes:
    nested = b""
    for _ in range(2_000):
        nested = _box(b"meta", bytes(4), nested)
    return _box(b"ftyp", b"heic", bytes(4), b"heicmif1") + nested + struct.pack(">I", 2**31) + b"mdat"
