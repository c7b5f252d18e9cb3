"""What hostile files are made of, and the registry of their kinds."""

import random
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from io import BytesIO

from PIL import Image

LARGEST = 42 * 2**20


@dataclass(frozen=True, slots=True)
class HostileKind:
    """``attacks``: what the file is meant to exhaust or break. ``build``: makes its bytes."""

    name: str
    attacks: str
    build: Callable[[], bytes]
    default_format: bool

    def file(self) -> bytes:
        return self.build()


KINDS: dict[str, HostileKind] = {}


def kind(
    attacks: str, *, default_format: bool = True
) -> Callable[[Callable[[], bytes]], Callable[[], bytes]]:
    """Decorator: add a function that makes a file to ``KINDS``, under its own name with dashes."""

    def add(build: Callable[[], bytes]) -> Callable[[], bytes]:
        name = build.__name__.replace("_", "-")
        KINDS[name] = HostileKind(name, attacks, build, default_format)
        return build

    return add


def encoded(image: Image.Image, file_format: str, **options: object) -> bytes:
    buffer = BytesIO()
    image.save(buffer, file_format, **options)
    return buffer.getvalue()


@cache
def small(file_format: str) -> bytes:
    """A sound picture of 64x48 pixels."""
    return encoded(Image.linear_gradient("L").resize((64, 48)).convert("RGB"), file_format)


@cache
def noise_bytes(count: int) -> bytes:
    return random.Random(20).randbytes(count)


def noisy(width: int, height: int) -> Image.Image:
    return Image.frombytes("L", (width, height), noise_bytes(width * height))


@cache
def zlib_of_zeros(count: int) -> bytes:
    """``count`` zeros and a few more as zlib has them, without compressing them all: a block, repeated."""
    size = 2**20
    compressor = zlib.compressobj(9)
    start = compressor.compress(bytes(size)) + compressor.flush(zlib.Z_FULL_FLUSH)
    block = compressor.compress(bytes(size)) + compressor.flush(zlib.Z_FULL_FLUSH)
    blocks = -(-count // size)
    adler = struct.pack(">HH", blocks * size % 65_521, 1)
    return start + block * (blocks - 1) + b"\x03\x00" + adler


class Bits:
    """Bits, most significant first."""

    def __init__(self) -> None:
        self._text: list[str] = []

    def put(self, value: int, count: int) -> None:
        self._text.append(f"{value:0{count}b}")

    def bytes(self, fill: str = "0") -> bytes:
        text = "".join(self._text)
        text += fill * (-len(text) % 8)
        return int(text or "0", 2).to_bytes(len(text) // 8, "big")


def ifd(*entries: tuple[int, int, int, int], following: int = 0) -> bytes:
    """A little-endian TIFF directory of (tag, type, count, value or offset), in any order."""
    body = b"".join(struct.pack("<HHII", *entry) for entry in entries)
    return struct.pack("<H", len(entries)) + body + struct.pack("<I", following)


def jpeg_segment(marker: int, body: bytes) -> bytes:
    """A segment of a JPEG or of a JPEG 2000 codestream."""
    return struct.pack(">BBH", 0xFF, marker, len(body) + 2) + body
