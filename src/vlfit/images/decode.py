"""Decode picture files to upright RGB: what runs in a decode worker.

Colour follows the reference (transformers' ``convert_to_rgb``): transparency is laid on white. Where the
reference clips, values are scaled: 16-bit and floating-point greys keep their shades.
"""

import importlib
import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import numpy as np
from PIL import Image

from vlfit.errors import NotAPicture
from vlfit.images.decode_memory import (
    WEBP_BYTES,
    bytes_to_decode,
    check_decode_memory,
    check_slow_format_size,
)
from vlfit.images.file_kinds import (
    HEIF_PACKAGES,
    SERVER_FORMATS_HINT,
    UNKNOWN,
    hint_for,
    kind_of,
    rules_out_picture,
)
from vlfit.images.limits import FORMATS, check_picture_size
from vlfit.images.sandbox import clear_errno, ran_out_of_memory

_PLUGINS = ("Jpeg", "Mpo", "Png", "WebP", "Gif", "Bmp", "Tiff", "Avif", "Jpeg2K", "Ppm", "Qoi")

# Formats and modes that every program decodes in the same way as ``decode``.
_USUAL_FORMATS = ("JPEG", "PNG", "WEBP", "GIF")
_USUAL_MODES = ("RGB", "L", "P", "1")

_TRANSPOSES = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_EXIF_ORIENTATION = 0x0112
LAID_ON_WHITE = "transparency laid on white"  # in ``DecodedImage.notes``

_STRIP_PIXELS = 2**20  # processed at a time, where a copy of the whole picture would take much memory


@dataclass(frozen=True, slots=True, eq=False)
class DecodedImage:
    """A decoded picture: upright, mode RGB. ``notes``: how it was changed ("first of 12 frames", ...)."""

    image: Image.Image
    notes: tuple[str, ...]


def import_plugins() -> None:
    """Import Pillow's decoders of ``FORMATS``, set to one thread. Called when this module is imported.

    Skips AVIF if Pillow was built without it, HEIF if no package that decodes it is installed.
    """
    for name in _PLUGINS:
        with suppress(ImportError):  # Pillow without AVIF
            plugin = importlib.import_module(f"PIL.{name}ImagePlugin")
            if name == "Avif":
                vars(plugin)["DEFAULT_MAX_THREADS"] = 1
    for name in HEIF_PACKAGES:
        with suppress(ImportError):
            # Without thumbnails, or ``draft`` would choose one in place of the picture.
            importlib.import_module(name).register_heif_opener(
                decode_threads=1, thumbnails=False, depth_images=False, aux_images=False
            )
            return


def decode(data: bytes, label: str, formats: tuple[str, ...] = FORMATS) -> DecodedImage:
    """Decode the first picture of a file in this process, where a hostile file can do harm.

    Not thread-safe. Raises the errors of ``PictureFile``.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return PictureFile(data, label, formats).decode()


class PictureFile:
    """A picture file, opened: its header is read and within limits, its pixels are not decoded.

    ``label``: what errors call it. ``width``, ``height``: as stored, perhaps not upright. ``memory``: bytes
    of RAM to decode it. Raises ``NotAPicture`` for damaged data or a format not in ``formats``,
    ``PictureTooLarge`` above ``MAX_PIXELS``, ``MAX_ASPECT`` or the RAM allowed for one picture
    (``decode_memory.py``), and ``MemoryError``. Call either ``decode`` or ``is_plain``, and only once.
    """

    def __init__(self, data: bytes, label: str, formats: tuple[str, ...] = FORMATS) -> None:
        clear_errno()
        self._data = data
        self._label = label
        self._formats = formats
        self._image: Image.Image | None = None
        size = webp_size(data) if "WEBP" in formats else None
        if size is None:
            self._image = _open(data, label, formats)
            size = self._image.size
        self.width, self.height = size
        check_picture_size(self.width, self.height, label)
        if self._image is None:
            self.memory = WEBP_BYTES * self.width * self.height
        else:
            check_slow_format_size(self._image, label)
            self.memory = bytes_to_decode(self._image)
        file_format = "WEBP" if self._image is None else str(self._image.format)
        check_decode_memory(self.memory, size, file_format, label)

    def decode(self) -> DecodedImage:
        """Decode the file's first picture to upright RGB. Raises ``NotAPicture`` or ``MemoryError``."""
        image = self._take()
        try:
            notes = _frame_notes(image)
            image.load()
        except Exception as error:  # decoders raise anything on malformed data
            raise _failure(error, self._label, self._data, image.format) from error
        file_format = image.format
        image = _upright(image, notes)
        try:
            return DecodedImage(_to_rgb(image, file_format, notes), tuple(notes))
        except (ValueError, OSError) as error:
            if ran_out_of_memory(error):
                raise MemoryError from error
            raise NotAPicture(
                f"{self._label}: colour mode {image.mode} cannot be rotated into RGB", "Save it as RGB first."
            ) from error

    def is_plain(self) -> bool:
        """Whether other programs decode the picture as ``decode`` does.

        True for a common format with 8 bits per channel, no transparency and no EXIF rotation. Decodes the
        picture to find damage, a JPEG at an eighth of its size. Raises the errors of ``decode``.
        """
        image = self._take()
        try:
            image.draft(None, (image.width // 8, image.height // 8))  # no effect on other formats
            image.load()
        except Exception as error:  # as above
            raise _failure(error, self._label, self._data, image.format) from error
        usual = image.format in _USUAL_FORMATS and image.mode in _USUAL_MODES
        return usual and "transparency" not in image.info and not _has_rotation(image)

    def _take(self) -> Image.Image:
        """Pillow's image, which the caller alone keeps: its memory is freed as soon as it is not needed."""
        clear_errno()
        image, self._image = self._image, None
        if image is None:
            image = _open(self._data, self._label, self._formats)
        if image.size != (self.width, self.height):
            raise _damaged(self._label, self._data, image.format, "it has two sizes")
        return image


def webp_size(data: bytes) -> tuple[int, int] | None:
    """Width and height in a WebP's header; None if ``data`` is no WebP.

    Reads it without Pillow, which allocates the pixels when it opens a WebP.
    """
    if data[:4] != b"RIFF" or data[8:12] != b"WEBP" or len(data) < 30:
        return None
    kind, first, second = data[12:16], int.from_bytes(data[24:27], "little"), data[27:30]
    if kind == b"VP8X":
        return first + 1, int.from_bytes(second, "little") + 1
    if kind == b"VP8L":
        bits = int.from_bytes(data[21:25], "little")
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    if kind == b"VP8 ":
        return int.from_bytes(data[26:28], "little") & 0x3FFF, int.from_bytes(data[28:30], "little") & 0x3FFF
    return None


def resize(image: Image.Image, width: int, height: int) -> Image.Image:
    """Resample ``image`` to ``width`` x ``height`` pixels as the reference does: bicubic, antialiased.

    Returns ``image`` itself if it has that size already.
    """
    return image if image.size == (width, height) else image.resize((width, height), Image.Resampling.BICUBIC)


def _has_rotation(image: Image.Image) -> bool:
    try:
        return image.getexif().get(_EXIF_ORIENTATION, 1) in _TRANSPOSES
    except Exception:  # as in ``_upright``
        return False


def _open(data: bytes, label: str, formats: tuple[str, ...]) -> Image.Image:
    """Read the header. Unlike ``Image.open``, errors on large files include their size."""
    failure: Exception | None = None
    file_format: str | None = None
    for name in FORMATS:
        factory, accepts = Image.OPEN.get(name, (None, None))
        if factory is None or accepts is None or accepts(data[:16]) is not True:
            continue
        if name not in formats:
            raise _refused(label, name)
        try:
            opened: Image.Image = factory(BytesIO(data), "")
            return opened
        except Exception as error:  # as above
            if ran_out_of_memory(error):
                raise MemoryError from error
            failure, file_format = error, name
    kind = kind_of(data)
    if failure is None or rules_out_picture(kind):
        what = "it is empty" if kind == "empty" else f"it is {kind}"
        raise NotAPicture(f"{label} is not a picture that vlfit can read: {what}", hint_for(kind))
    claimed = _claimed_size(data)
    if claimed is not None and 0 in claimed:
        check_picture_size(*claimed, label)
    # Pillow's own message here ("not identified by this driver") helps no one.
    try:
        raise _damaged(label, data, file_format, "its header is not readable") from failure
    finally:
        del failure  # break the reference cycle with this frame, which would keep the file in memory


def _refused(label: str, file_format: str) -> NotAPicture:
    return NotAPicture(
        f"{label} is a {file_format} file, which this server does not take",
        f"{SERVER_FORMATS_HINT} A server started with --image-formats all takes it.",
    )


def _failure(error: Exception, label: str, data: bytes, file_format: str | None) -> Exception:
    """What to raise for ``error``, which came out of a decoder."""
    if ran_out_of_memory(error):
        return MemoryError()
    return _damaged(label, data, file_format, str(error))


def _claimed_size(data: bytes) -> tuple[int, int] | None:
    """(width, height) from a header that Pillow refused, since it does not report a size of 0."""
    if data.startswith(b"\x89PNG") and data[12:16] == b"IHDR" and len(data) >= 24:
        return int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")
    if data.startswith(b"GIF8") and len(data) >= 10:
        return int.from_bytes(data[6:8], "little"), int.from_bytes(data[8:10], "little")
    return None


def _damaged(label: str, data: bytes, file_format: str | None, why: str) -> NotAPicture:
    kind = kind_of(data)
    if kind == UNKNOWN:  # only Pillow recognized it
        kind = f"a {file_format} file"
    return NotAPicture(
        f"{label} is {kind} that is truncated or damaged ({len(data):,} bytes{why and ': '}{why})",
        "Copy or download it again.",
    )


def _frame_notes(image: Image.Image) -> list[str]:
    if not getattr(image, "is_animated", False):
        return []
    if image.format in ("PNG", "WEBP", "AVIF", "MPO"):  # in their headers; a GIF would have to be scanned
        return [f"first of {getattr(image, 'n_frames', 1)} frames"]
    if image.format == "HEIF":
        return [f"main one of {getattr(image, 'n_frames', 1)} pictures"]
    return ["first of several pages" if image.format == "TIFF" else "first frame of an animation"]


def _upright(image: Image.Image, notes: list[str]) -> Image.Image:
    try:
        orientation = image.getexif().get(_EXIF_ORIENTATION, 1)
    except Exception:  # use the picture even if its metadata is damaged
        notes.append("EXIF unreadable, not rotated")
        return image
    transpose = _TRANSPOSES.get(orientation)
    if transpose is None:
        return image
    notes.append(f"turned upright (EXIF orientation {orientation})")
    rotated = image.transpose(transpose)
    rotated.info = image.info
    return rotated


def _to_rgb(image: Image.Image, file_format: str | None, notes: list[str]) -> Image.Image:
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        image = _to_8_bits(image, file_format, notes)
    if image.mode not in ("RGB", "RGBA", "L", "LA", "P", "PA", "1"):
        notes.append(f"converted from {image.mode}")
    if "A" not in image.getbands() and image.info.get("transparency") is None:
        return image if image.mode == "RGB" else image.convert("RGB")
    return _flatten_on_white(image, notes)


def _strips(image: Image.Image) -> Iterator[tuple[int, Image.Image]]:
    """Yield horizontal strips of ``image`` with their top rows, to limit the memory of copies."""
    rows = max(_STRIP_PIXELS // image.width, 1)
    for top in range(0, image.height, rows):
        yield top, image.crop((0, top, image.width, min(top + rows, image.height)))


def _flatten_on_white(image: Image.Image, notes: list[str]) -> Image.Image:
    result = Image.new("RGB", image.size)
    opaque = True
    for top, strip in _strips(image):
        strip = strip.convert("RGBA")
        if np.asarray(strip.getchannel("A")).min() < 255:
            opaque = False
            strip = Image.alpha_composite(Image.new("RGBA", strip.size, (255, 255, 255, 255)), strip)
        result.paste(strip.convert("RGB"), (0, top))
    if not opaque:
        notes.append(LAID_ON_WHITE)
    return result


def _to_8_bits(image: Image.Image, file_format: str | None, notes: list[str]) -> Image.Image:
    """Scale grey of more than 8 bits to 8 without clipping; black and white stay as they are."""
    extremes = [(float(each.min()), float(each.max())) for _, each in _float_strips(image)]
    low, high = min(least for least, _ in extremes), max(most for _, most in extremes)
    depth = "floating-point" if image.mode == "F" else "16-bit" if high <= 65535 else "32-bit"
    if image.mode.startswith("I;16"):
        white = 65535.0
    elif image.mode == "F":
        white = 1.0 if high <= 1.0 else 255.0
    else:
        # A 32-bit TIFF does not define white; other files in this mode are 16-bit.
        white = 255.0 if high <= 255.0 and file_format == "TIFF" else 65535.0
    stretched = low < 0.0 or high > white
    if stretched:
        notes.append(f"{depth} grey from {low:g} to {high:g} stretched to 8 bits")
    else:
        notes.append(f"{depth} grey reduced to 8 bits")
    factor = 255.0 / ((high - low) or 1.0) if stretched else 255.0 / white
    transparent = image.info.get("transparency")
    result = Image.new("L", image.size)
    for top, values in _float_strips(image):
        grey = np.rint((values - low if stretched else values) * factor).astype(np.uint8)
        if isinstance(transparent, int):
            grey[values == transparent] = 255
        result.paste(Image.fromarray(grey), (0, top))
    return result


def _float_strips(image: Image.Image) -> "Iterator[tuple[int, np.ndarray[Any, np.dtype[np.float32]]]]":
    for top, strip in _strips(image):
        values = np.asarray(strip, dtype=np.float32)
        yield top, np.nan_to_num(values, posinf=0.0, neginf=0.0)


import_plugins()
