"""Limits of decoding: sizes, formats, and the time that one picture may take. Imports no Pillow."""

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from vlfit.errors import NotAPicture, PictureTooLarge, QueueFull
from vlfit.images.cancellation import check_cancelled
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


_RETRY_SECONDS = 10  # what others decode meanwhile has mostly ended by then
_SECONDS_OF_EACH = 1.0  # that every picture may take, however many slow ones there were before


@dataclass(frozen=True, slots=True)
class DecodeLimits:
    """Formats and time for decoding; memory is limited in ``decode_memory.py``.

    ``formats``: of ``FORMATS``; files of other formats are refused unopened. ``media``: kinds of files that a
    server takes apart (``media_kinds.MediaKind``). ``cpu_seconds``: for one picture, in its worker.
    ``wall_seconds``: for one picture, from when it has a worker; slow pictures of a request share them
    (``DecodeAllowance``). ``request_seconds``: for all pictures of a request. ``wait_seconds``: how long a
    picture waits for a worker; and all large or slow ones of a request together for memory, or for their turn
    among the slow ones. ``yields_when_slow``: while other pictures wait, a slow one gets a lower priority, or
    is stopped and decoded again later (``decode_queue.py``).
    """

    formats: tuple[str, ...]
    cpu_seconds: int
    wall_seconds: float
    request_seconds: float = math.inf
    wait_seconds: float = math.inf
    yields_when_slow: bool = False
    media: tuple[str, ...] = ()


OWN_PICTURES = DecodeLimits(FORMATS, cpu_seconds=60, wall_seconds=120.0)
CLIENT_PICTURES = DecodeLimits(
    SERVER_FORMATS,
    cpu_seconds=15,
    wall_seconds=20.0,
    request_seconds=60.0,
    wait_seconds=45.0,
    yields_when_slow=True,
)

_thread = threading.local()


class DecodeAllowance:
    """Decoding time of one request. Read ``wall_seconds`` before each picture, ``spend`` after it.

    Every picture gets a second; the time that slow ones take beyond that adds up to at most
    ``limits.wall_seconds``.
    """

    def __init__(self, limits: DecodeLimits, waited: float = 0.0) -> None:
        """``waited``: seconds that the request has waited already, which count as those of every picture."""
        self.limits = limits
        self._waited_before = waited
        self._seconds = 0.0  # of earlier pictures
        self._slow_seconds = 0.0  # of them, each beyond its first second
        self._waited_seconds = waited

    @property
    def wall_seconds(self) -> float:
        """Wall seconds left for the next picture; 0 if the request has used up ``limits.request_seconds``."""
        least = min(_SECONDS_OF_EACH, self.limits.wall_seconds)
        left = max(self.limits.wall_seconds - self._slow_seconds, least)
        return min(left, max(self.limits.request_seconds - self._seconds, 0.0))

    def limit_in_words(self, seconds: float) -> str:
        """For an error: ``wall_seconds`` as it was, ``seconds``, and why it is less than the limit if so."""
        limits = self.limits
        if seconds == limits.wall_seconds:
            return f"{seconds:g} s"
        return (
            f"{seconds:.1f} s, which is what earlier pictures of the request have left of "
            f"{limits.wall_seconds:g} s for slow ones and {limits.request_seconds:g} s for all"
        )

    @contextmanager
    def waiting(self, label: str, *, adds_up: bool) -> Iterator[Callable[[], None]]:
        """A wait of the picture ``label``: within the block, call the function that it yields now and then.

        That raises ``Cancelled``, and ``QueueFull`` after ``limits.wait_seconds``. ``adds_up``: earlier such
        waits of the request count as well.
        """
        began = time.monotonic()
        left = self.limits.wait_seconds - (self._waited_seconds if adds_up else self._waited_before)

        def check() -> None:
            check_cancelled()
            if time.monotonic() - began > left:
                raise QueueFull(
                    f"{label} could not be decoded within {self.limits.wait_seconds:g} s: pictures of other "
                    "requests have taken all decode workers, or the memory for large ones",
                    f"Try again in {_RETRY_SECONDS} s, or scale it down first.",
                    retry_after=_RETRY_SECONDS,
                )

        try:
            yield check
        finally:
            if adds_up:
                self._waited_seconds += time.monotonic() - began

    def spend(self, seconds: float) -> None:
        """Subtract the wall ``seconds`` that a picture took."""
        self._seconds += seconds
        self._slow_seconds += max(seconds - _SECONDS_OF_EACH, 0.0)


@contextmanager
def use_limits(limits: DecodeLimits, waited: float = 0.0) -> Iterator[None]:
    """Within the block, decode this thread's pictures under ``limits``, all counted as one request's.

    ``waited``: as for ``DecodeAllowance``.
    """
    before: DecodeAllowance | None = getattr(_thread, "allowance", None)
    _thread.allowance = DecodeAllowance(limits, waited)
    try:
        yield
    finally:
        _thread.allowance = before


def current_allowance() -> DecodeAllowance:
    """The allowance of this thread's ``use_limits`` block; outside one, a new one of ``OWN_PICTURES``."""
    allowance: DecodeAllowance | None = getattr(_thread, "allowance", None)
    return allowance or DecodeAllowance(OWN_PICTURES)


def check_picture_size(width: int, height: int, label: str) -> None:
    """Raise ``NotAPicture`` for 0 pixels, ``PictureTooLarge`` above ``MAX_PIXELS`` or ``MAX_ASPECT``."""
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
