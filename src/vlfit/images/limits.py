"""Limits of decoding: sizes, formats, and the time that one picture may take. Imports no Pillow."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from vlfit.errors import NotAPicture, PictureTooLarge
from vlfit.images.file_kinds import FORMATS_HINT

# Pillow's own limit, above which it refuses to open a file: 512 MiB at 3 bytes a pixel, 683 MiB as decoded.
# The largest phone cameras make 108 and, rarely, 200 megapixels; the model sees 16.8 at most.
MAX_PIXELS = 178_956_970
MAX_ASPECT = 200

# Common formats that state their size before decoding, by Pillow's names. Excluded: EPS starts Ghostscript,
# and ICO decodes pictures whose sizes its header does not state.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "HEIF", "JPEG2000", "PPM", "QOI")
# What browsers and phones send. The others' decoders are large or slow: a server takes them only if told to.
SERVER_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "AVIF", "HEIF")


@dataclass(frozen=True, slots=True)
class DecodeLimits:
    """What decoding one picture may take, beside memory (``decode_memory.py``).

    ``formats``: of ``FORMATS``; others are refused unopened. ``cpu_seconds``: of its decode worker.
    ``wall_seconds``: from the moment that it has a worker. ``yields``: slow ones get a lower priority.
    """

    formats: tuple[str, ...]
    cpu_seconds: int
    wall_seconds: float
    yields: bool = False


OWN_PICTURES = DecodeLimits(FORMATS, cpu_seconds=60, wall_seconds=120.0)
CLIENT_PICTURES = DecodeLimits(SERVER_FORMATS, cpu_seconds=15, wall_seconds=20.0, yields=True)

_thread = threading.local()


@contextmanager
def use_limits(limits: DecodeLimits) -> Iterator[None]:
    """Within the block, pictures that this thread decodes are under ``limits``."""
    before = current_limits()
    _thread.limits = limits
    try:
        yield
    finally:
        _thread.limits = before


def current_limits() -> DecodeLimits:
    """The limits of this thread: ``OWN_PICTURES`` unless ``use_limits`` says otherwise."""
    limits: DecodeLimits = getattr(_thread, "limits", OWN_PICTURES)
    return limits


def check_size(width: int, height: int, label: str) -> None:
    """Refuse empty pictures, too many pixels, and aspect ratios that the model does not accept."""
    if width <= 0 or height <= 0:
        raise NotAPicture(f"{label}: the picture is empty, {width}x{height} pixels", FORMATS_HINT)
    if width * height > MAX_PIXELS:
        raise PictureTooLarge(
            f"{label}: {width}x{height} is {width * height / 1e6:,.0f} megapixels; "
            f"at most {MAX_PIXELS / 1e6:.0f} are decoded",
            "Scale it down first; the model sees at most 16.8 megapixels.",
        )
    if max(width, height) > MAX_ASPECT * min(width, height):
        ratio = max(width, height) / min(width, height)
        raise PictureTooLarge(
            f"{label}: {width}x{height} has aspect ratio 1:{ratio:,.0f}; at most 1:{MAX_ASPECT} is supported",
            "Split it, or pad the short side.",
        )
