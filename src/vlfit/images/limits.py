"""Limits of decoding: sizes, formats, and the time that one picture may take. Imports no Pillow."""

import math
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


_SECONDS_OF_EACH = 1.0  # that every picture may take, however many slow ones there were before


@dataclass(frozen=True, slots=True)
class DecodeLimits:
    """What decoding one picture may take, beside memory (``decode_memory.py``).

    ``formats``: of ``FORMATS``; others are refused unopened. ``cpu_seconds``: of its decode worker.
    ``wall_seconds``: from the moment that it has a worker; slow pictures of one request share them
    (``DecodeAllowance``). ``request_seconds``: all pictures of one request together.
    ``low_priority_when_slow``: its worker gets a lower priority once it has taken ``SLOW_SECONDS``.
    """

    formats: tuple[str, ...]
    cpu_seconds: int
    wall_seconds: float
    request_seconds: float = math.inf
    low_priority_when_slow: bool = False


OWN_PICTURES = DecodeLimits(FORMATS, cpu_seconds=60, wall_seconds=120.0)
CLIENT_PICTURES = DecodeLimits(
    SERVER_FORMATS, cpu_seconds=15, wall_seconds=20.0, request_seconds=60.0, low_priority_when_slow=True
)

_thread = threading.local()


class DecodeAllowance:
    """``limits`` for the pictures of one request, whose slow ones share ``limits.wall_seconds``."""

    def __init__(self, limits: DecodeLimits) -> None:
        self.limits = limits
        self._seconds = 0.0  # of earlier pictures
        self._slow_seconds = 0.0  # of them, each beyond its first second

    @property
    def wall_seconds(self) -> float:
        """What is left for the next picture."""
        least = min(_SECONDS_OF_EACH, self.limits.wall_seconds)
        left = max(self.limits.wall_seconds - self._slow_seconds, least)
        return min(left, max(self.limits.request_seconds - self._seconds, 0.0))

    def spend(self, seconds: float) -> None:
        """Count a picture that has taken ``seconds``."""
        self._seconds += seconds
        self._slow_seconds += max(seconds - _SECONDS_OF_EACH, 0.0)


@contextmanager
def use_limits(limits: DecodeLimits) -> Iterator[None]:
    """Within the block, count all pictures that this thread decodes as one request's, under ``limits``.

    Each is held to them; slow ones share ``wall_seconds``.
    """
    before: DecodeAllowance | None = getattr(_thread, "allowance", None)
    _thread.allowance = DecodeAllowance(limits)
    try:
        yield
    finally:
        _thread.allowance = before


def current_allowance() -> DecodeAllowance:
    """That of this thread's request; without ``use_limits``, a new one of ``OWN_PICTURES`` each time."""
    allowance: DecodeAllowance | None = getattr(_thread, "allowance", None)
    return allowance or DecodeAllowance(OWN_PICTURES)


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
