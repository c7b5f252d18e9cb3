"""Makes pictures for tests: plain ones, and one of every oddity that people send."""

import struct
import zlib
from functools import lru_cache
from io import BytesIO
from typing import Any

import numpy as np
from PIL import Image


def scene(width: int, height: int, seed: int = 0) -> Image.Image:
    """An RGB picture with smooth parts, edges and noise, so that resampling errors would show."""
    random = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width].astype(np.float64)
    channels = []
    for channel in range(3):
        smooth = 127 + 90 * np.sin(x / (7 + channel)) * np.cos(y / (11 - channel))
        edges = 120.0 * ((x // 5 + y // 9 + channel) % 2)
        noise = random.integers(0, 40, size=(height, width))
        channels.append(np.where(x + y < (width + height) / 2, smooth, edges) + noise)
    return Image.fromarray(np.clip(np.stack(channels, axis=-1), 0, 255).astype(np.uint8))


def encoded(image: Image.Image, file_format: str = "PNG", **options: Any) -> bytes:
    buffer = BytesIO()
    image.save(buffer, file_format, **options)
    return buffer.getvalue()


def picture(
    width: int = 96, height: int = 64, file_format: str = "PNG", seed: int = 0, **options: Any
) -> bytes:
    if options:
        return encoded(scene(width, height, seed), file_format, **options)
    return _plain_picture(width, height, file_format, seed)


@lru_cache(maxsize=256)  # tests ask for the same ones again and again
def _plain_picture(width: int, height: int, file_format: str, seed: int) -> bytes:
    return encoded(scene(width, height, seed), file_format)


def rotated_by_exif(orientation: int, width: int = 96, height: int = 64) -> bytes:
    return picture(width, height, "JPEG", quality=95, exif=exif_orientation(orientation))


def exif_orientation(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


def gif_claiming_4_gigapixels() -> bytes:
    """44 bytes whose header says 65535x65535."""
    screen = b"GIF89a" + struct.pack("<HHBBB", 65535, 65535, 0x80, 0, 0) + b"\x00\x00\x00\xff\xff\xff"
    frame = b"," + struct.pack("<HHHHB", 0, 0, 65535, 65535, 0) + b"\x02\x02\x4c\x01\x00;"
    return (screen + frame).ljust(44, b"\x00")


def png_claiming(width: int, height: int) -> bytes:
    """A well-formed PNG header of any size, and as little data as deflate gives for a start of it."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = zlib.compress(bytes(100_000))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def deep_png(values: np.ndarray[Any, Any]) -> bytes:
    """A 16-bit grey PNG of ``values`` (uint16 [height, width])."""
    return encoded(Image.fromarray(values.astype(np.uint16)), "PNG")


def cmyk_jpeg(width: int = 96, height: int = 64) -> bytes:
    """As print shops send it: four inks, stored inverted with an Adobe marker."""
    return encoded(scene(width, height).convert("CMYK"), "JPEG", quality=95)


def animation(file_format: str, frames: int = 3, width: int = 64, height: int = 48) -> bytes:
    pictures = [scene(width, height, seed) for seed in range(frames)]
    return encoded(
        pictures[0], file_format, save_all=True, append_images=pictures[1:], duration=100, lossless=True
    )


def half_transparent(mode: str = "RGBA", width: int = 64, height: int = 48) -> Image.Image:
    """Left half opaque, right half fully transparent over black."""
    rgba = scene(width, height).convert("RGBA")
    alpha = np.zeros((height, width), dtype=np.uint8)
    alpha[:, : width // 2] = 255
    values = np.asarray(rgba).copy()
    values[..., 3] = alpha
    values[alpha == 0, :3] = 0
    return Image.fromarray(values).convert(mode)
