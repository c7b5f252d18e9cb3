"""What decoding a picture takes of RAM, by its format, and that not too much of it is taken at once.

Knows: the copies that Pillow's decoders and our own steps make of a picture, in bytes a pixel. Does not know:
files, nor what is done with the pixels. A file says its size before it is decoded: 34 bytes of WebP can claim
169 megapixels, and Pillow would take 2.8 GB for them.

Measured with pictures of 20 megapixels, Pillow 13: peak of the process above what it held before, in bytes a
pixel. JPEG 4.0, turned 8.0, progressive 7.0 at 4:2:0 and 10.0 at 4:4:4 (all coefficients are kept); PNG 4.0,
with transparency 8.6; WebP 16.1 to 16.9 (two canvases and a copy); AVIF 9.3 and 12.4; JPEG 2000 19.4; greys
and palettes 5.0 with their RGB, deep greys 9.1; BMP, TIFF and PPM 4.0.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from PIL import Image

from vlfit.errors import PictureTooLarge
from vlfit.units import GIB, MIB

# For one picture, and for all that are decoded at the same time. A choice: the largest JPEG that is taken at
# all (``picture_files.MAX_PIXELS``) needs 0.67 GiB, one of 108 megapixels that is to be turned 0.8.
MOST_BYTES = GIB

_RGB = 4  # Pillow keeps a pixel of RGB in four bytes
_HELD = {"1": 1, "L": 1, "P": 1, "I;16": 2, "I;16B": 2, "I;16L": 2, "I;16N": 2}  # all other modes: 4
_EXTRA = {"WEBP": 13, "AVIF": 10, "JPEG2000": 16, "QOI": 8, "TIFF": 4}  # of decoders, beside the picture
_RESIZED = 2  # what a large picture takes on its way to the size that the model sees
_ORIENTATION = 0x0112

# Decoders written in Python take a second and more for a megapixel, and hold up whoever else computes.
_SLOW_PIXELS = 4_000_000


def bytes_to_decode(image: Image.Image) -> int:
    """Most bytes of RAM that ``image``, opened and not yet loaded, takes until it is upright RGB."""
    held = _HELD.get(image.mode, _RGB)
    extra = _EXTRA.get(image.format or "", 0)
    if image.info.get("progressive"):
        extra = _coefficients(image)
    turned = 2 * held if _may_turn(image) else 0
    as_rgb = held + (_RGB if image.mode != "RGB" else 0) + _RESIZED
    return image.width * image.height * max(held + extra, turned, as_rgb)


def check_room(image: Image.Image, label: str) -> int:
    """``bytes_to_decode``. Raises ``PictureTooLarge`` if that is more than is ever spent on one picture."""
    pixels = image.width * image.height
    if _is_slow(image) and pixels > _SLOW_PIXELS:
        raise PictureTooLarge(
            f"{label}: {pixels / 1e6:,.0f} megapixels as {image.format}; "
            f"at most {_SLOW_PIXELS / 1e6:.0f} are decoded of a format that is read so slowly",
            "Save it as PNG or JPEG.",
        )
    price = bytes_to_decode(image)
    if price > MOST_BYTES:
        raise PictureTooLarge(
            f"{label}: to decode {image.width}x{image.height} pixels of {image.format} takes "
            f"{price / MIB:,.0f} MiB of RAM; at most {MOST_BYTES / MIB:,.0f} are spent on a picture",
            "Scale it down first, or save it as JPEG; the model sees at most 16.8 megapixels.",
        )
    return price


class Room:
    """``limit`` bytes for all that are decoded at once; who finds too little left waits its turn."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._taken = 0
        self._changed = threading.Condition()
        self._coming = 0
        self._turn = 0

    @contextmanager
    def take(self, count: int) -> Iterator[None]:
        """``count`` bytes, at most ``limit``, for as long as the block lasts."""
        with self._changed:
            ticket = self._coming
            self._coming += 1
            self._changed.wait_for(lambda: self._turn == ticket and self._taken + count <= self._limit)
            self._turn += 1
            self._taken += count
            self._changed.notify_all()  # there may be room for the next one as well
        try:
            yield
        finally:
            with self._changed:
                self._taken -= count
                self._changed.notify_all()


def _coefficients(image: Image.Image) -> int:
    """Bytes a pixel that a progressive JPEG keeps until its last scan: two for each sample."""
    try:
        shares: list[int] = [across * down for _, across, down, _ in image.layer]  # type: ignore[attr-defined]
        return -(-2 * sum(shares) // max(shares))
    except (AttributeError, TypeError, ValueError, ZeroDivisionError):
        return 8  # four colours, none of them halved


def _is_slow(image: Image.Image) -> bool:
    plain = image.format == "PPM" and any(tile[0] == "ppm_plain" for tile in image.tile)  # type: ignore[attr-defined]
    return plain or image.format == "QOI"


def _may_turn(image: Image.Image) -> bool:
    """Whether EXIF will have it turned. Of most formats only decoding tells."""
    if image.format != "JPEG":
        return image.format not in ("GIF", "BMP", "PPM", "QOI")
    try:
        return bool(image.getexif().get(_ORIENTATION, 1) != 1)
    except Exception:  # it will not be turned by what cannot be read
        return False
