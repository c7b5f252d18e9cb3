"""RAM needed to decode a picture, by format.

The size is known from the header: 34 bytes of WebP can claim 169 megapixels, for which Pillow would take
2.8 GB.

Peak memory measured with 20 megapixels and Pillow 13, in bytes per pixel: JPEG 4.0, rotated 8.0, progressive
7.0 at 4:2:0 and 10.0 at 4:4:4 (all coefficients are kept); PNG 4.0, with transparency 8.6; WebP 16.1 to 16.9
(two canvases and a copy); AVIF 9.3 and 12.4; JPEG 2000 19.4; greys and palettes 5.0 with their RGB, 16-bit
greys 9.1; BMP, TIFF and PPM 4.0. HEIC with pillow-heif 1.8, in 8 bits 7.5, at 4:4:4 9.6, with transparency
8.5; in 10 bits 8.0, 15.5 and 12.0.
"""

from typing import TYPE_CHECKING

from vlfit.errors import PictureTooLarge
from vlfit.machine.host import usable_cores
from vlfit.units import GIB, MIB

if TYPE_CHECKING:
    from PIL import Image

# For one picture, and for all decoded at the same time. The largest JPEG accepted (``decode.MAX_PIXELS``)
# needs 0.67 GiB, a rotated one of 108 megapixels 0.8.
MAX_DECODE_BYTES = GIB
# Of every worker, beside what it takes before its first picture. Pictures that need no more than
# ``SMALL_BYTES`` reserve nothing else; the rest is what malloc keeps, and slack.
WORKER_BYTES = 48 * MIB
SMALL_BYTES = 32 * MIB
FORK_SERVER_BYTES = 64 * MIB  # what all workers share: Python, Pillow, numpy
MAX_WORKERS = 8  # one per core, at most this many
MAX_SLOW = 2  # more, while as many are slow
MAX_MEDIA_WORKERS = 2  # at once for documents and videos, and ``MAX_SLOW`` more
MEDIA_SERVER_BYTES = 96 * MIB  # what media workers share: as above, and PDFium, FFmpeg and LibRaw

_RGB = 4  # Pillow keeps a pixel of RGB in four bytes
_BYTES_PER_PIXEL = {
    "1": 1,
    "L": 1,
    "P": 1,
    "I;16": 2,
    "I;16B": 2,
    "I;16L": 2,
    "I;16N": 2,
}  # all other modes: 4
_DECODER_BYTES = {
    "WEBP": 13,
    "AVIF": 10,
    "QOI": 8,
    "TIFF": 4,
}  # of decoders, beside the picture
_RESIZE_BYTES = 2  # what a large picture takes on its way to the size that the model sees
_ORIENTATION = 0x0112

WEBP_BYTES = 17  # per pixel of a WebP, in any mode: two canvases and a copy

# These decoders are written in Python and take more than a second per megapixel.
_MAX_SLOW_PIXELS = 4_000_000


def default_num_workers() -> int:
    """Number of decode workers: one per usable core, at most ``MAX_WORKERS``."""
    return min(usable_cores(), MAX_WORKERS)


def max_bytes_of_workers(num_workers: int | None = None, *, media: bool = False) -> int:
    """The most RAM, in bytes, that a pool's decode processes take: fork server, all workers, large pictures.

    ``num_workers``: None for ``default_num_workers()``; workers for slow pictures are added. ``media``: with
    the media workers and their fork server; what their files take is part of that for large pictures.
    """
    workers = default_num_workers() if num_workers is None else num_workers
    others = MEDIA_SERVER_BYTES + (MAX_MEDIA_WORKERS + MAX_SLOW) * WORKER_BYTES if media else 0
    return FORK_SERVER_BYTES + (workers + MAX_SLOW) * WORKER_BYTES + MAX_DECODE_BYTES + others


def bytes_to_decode(image: "Image.Image") -> int:
    """Peak RAM to decode ``image``, opened and not yet loaded, to upright RGB. An estimate by format."""
    pixel = _BYTES_PER_PIXEL.get(image.mode, _RGB)
    extra = _DECODER_BYTES.get(image.format or "", 0)
    if image.format == "JPEG2000":
        extra = 4 * (len(image.getbands()) + 1)  # every sample as 32 bits
    if image.format == "HEIF":
        extra = 6 if image.info.get("bit_depth", 8) <= 8 else 12  # the header does not say which subsampling
    if image.info.get("progressive"):
        extra = _coefficients(image)
    rotated = 2 * pixel if _may_rotate(image) else 0
    as_rgb = pixel + (_RGB if image.mode != "RGB" else 0) + _RESIZE_BYTES
    return image.width * image.height * max(pixel + extra, rotated, as_rgb)


def check_decode_memory(count: int, size: tuple[int, int], file_format: str, label: str) -> None:
    """Raise ``PictureTooLarge`` if ``count`` bytes exceed ``MAX_DECODE_BYTES``.

    ``size``, ``file_format``, ``label``: for the message.
    """
    if count > MAX_DECODE_BYTES:
        raise PictureTooLarge(
            f"{label}: decoding {size[0]}x{size[1]} pixels of {file_format} takes "
            f"{count / MIB:,.0f} MiB of RAM; the limit is {MAX_DECODE_BYTES / MIB:,.0f}",
            "Scale it down first, or save it as JPEG; the model sees at most 16.8 megapixels.",
        )


def check_slow_format_size(image: "Image.Image", label: str) -> None:
    """Raise ``PictureTooLarge`` above 4 megapixels in a format that decodes slowly: plain PPM, or QOI."""
    pixels = image.width * image.height
    if _is_slow(image) and pixels > _MAX_SLOW_PIXELS:
        raise PictureTooLarge(
            f"{label}: {pixels / 1e6:,.0f} megapixels as {image.format}; "
            f"at most {_MAX_SLOW_PIXELS / 1e6:.0f} are supported in formats that decode this slowly",
            "Save it as PNG or JPEG.",
        )


def _coefficients(image: "Image.Image") -> int:
    """Bytes per pixel that a progressive JPEG keeps until its last scan: two per sample."""
    try:
        shares: list[int] = [across * down for _, across, down, _ in image.layer]  # type: ignore[attr-defined]
        return -(-2 * sum(shares) // max(shares))
    except (AttributeError, TypeError, ValueError, ZeroDivisionError):
        return 8  # four colours, none of them halved


def _is_slow(image: "Image.Image") -> bool:
    plain = image.format == "PPM" and any(tile[0] == "ppm_plain" for tile in image.tile)  # type: ignore[attr-defined]
    return plain or image.format == "QOI"


def _may_rotate(image: "Image.Image") -> bool:
    """Whether EXIF may require a rotation; for most formats known only after decoding."""
    if image.format != "JPEG":
        return image.format not in ("GIF", "BMP", "PPM", "QOI", "HEIF")
    try:
        return bool(image.getexif().get(_ORIENTATION, 1) != 1)
    except Exception:  # unreadable EXIF rotates nothing
        return False
