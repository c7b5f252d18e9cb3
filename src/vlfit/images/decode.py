"""Decode picture files to upright RGB, within limits of size and memory.

Colour follows the reference (transformers' ``convert_to_rgb``): transparency is laid on white. Where the
reference clips, values are scaled: 16-bit and floating-point greys keep their shades.
"""

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import numpy as np
from PIL import Image

from vlfit.errors import NotAPicture, PictureTooLarge
from vlfit.images.decode_memory import MAX_DECODE_BYTES, DecodeBudget, check_decode_memory
from vlfit.images.file_kinds import FORMATS_HINT, UNKNOWN, hint_for, kind_of, rules_out_picture

# Pillow's own limit, above which it refuses to open a file: 512 MiB at 3 bytes a pixel, 683 MiB as decoded.
# The largest phone cameras make 108 and, rarely, 200 megapixels; the model sees 16.8 at most.
MAX_PIXELS = 178_956_970
MAX_ASPECT = 200

# Common formats whose decoders run in this process and know the size before decoding. Excluded: EPS starts
# Ghostscript, and ICO decodes pictures whose sizes its header does not state.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "JPEG2000", "PPM", "QOI")

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

_budget = DecodeBudget(MAX_DECODE_BYTES)
_STRIP_PIXELS = 2**20  # processed at a time, where a copy of the whole picture would take much memory


@dataclass(frozen=True, slots=True, eq=False)
class DecodedImage:
    """``image``: upright, mode RGB; ``notes``: what was done to it."""

    image: Image.Image
    notes: tuple[str, ...]


def decode(data: bytes, label: str) -> DecodedImage:
    """Decode the first picture of a file; ``label`` names it in errors.

    Limits are checked on the header, before any pixel is decoded. Raises ``NotAPicture`` for data that is not
    a picture, truncated or damaged, and ``PictureTooLarge`` above ``MAX_PIXELS``, an aspect ratio of
    ``MAX_ASPECT`` or the RAM allowed for one picture (``decode_memory.py``).
    """
    with _pillow_quiet():
        image = _open(data, label)
        check_size(image.width, image.height, label)
        with _budget.reserve(check_decode_memory(image, label)):
            try:
                notes = _frame_notes(image)
                image.load()
            except Exception as error:  # decoders raise anything on malformed data
                raise _damaged(label, data, image.format, str(error)) from error
            file_format = image.format
            image = _upright(image, notes)
            try:
                return DecodedImage(_to_rgb(image, file_format, notes), tuple(notes))
            except (ValueError, OSError) as error:
                raise NotAPicture(
                    f"{label}: colour mode {image.mode} cannot be rotated into RGB", "Save it as RGB first."
                ) from error


def validate(data: bytes, label: str) -> bool:
    """Raise the errors of ``decode`` at less cost: a JPEG is decoded at an eighth of its size.

    Returns whether other programs decode the picture as ``decode`` does: a common format, 8 bits, no
    transparency, no EXIF rotation.
    """
    with _pillow_quiet():
        image = _open(data, label)
        check_size(image.width, image.height, label)
        with _budget.reserve(check_decode_memory(image, label)):
            try:
                image.draft(None, (image.width // 8, image.height // 8))  # no effect on other formats
                image.load()
            except Exception as error:  # as above
                raise _damaged(label, data, image.format, str(error)) from error
            usual = image.format in _USUAL_FORMATS and image.mode in _USUAL_MODES
            return usual and "transparency" not in image.info and not _has_rotation(image)


def _has_rotation(image: Image.Image) -> bool:
    try:
        return image.getexif().get(_EXIF_ORIENTATION, 1) in _TRANSPOSES
    except Exception:  # as in ``_upright``
        return False


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


def _open(data: bytes, label: str) -> Image.Image:
    """Read the header. Unlike ``Image.open``, errors on large files include their size."""
    Image.init()
    failure: Exception | None = None
    file_format: str | None = None
    for name in FORMATS:
        factory, accepts = Image.OPEN.get(name, (None, None))
        if factory is None or accepts is None or accepts(data[:16]) is not True:
            continue
        try:
            opened: Image.Image = factory(BytesIO(data), "")
            return opened
        except Exception as error:  # as above
            failure, file_format = error, name
    kind = kind_of(data)
    if failure is None or rules_out_picture(kind):
        what = "it is empty" if kind == "empty" else f"it is {kind}"
        raise NotAPicture(f"{label} is not a picture that vlfit can read: {what}", hint_for(kind))
    claimed = _claimed_size(data)
    if claimed is not None and 0 in claimed:
        check_size(*claimed, label)
    # Pillow's own message here ("not identified by this driver") helps no one.
    try:
        raise _damaged(label, data, file_format, "its header is not readable") from failure
    finally:
        del failure  # break the reference cycle with this frame, which would keep the file in memory


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
        notes.append("transparency laid on white")
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


_quiet_lock = threading.Lock()
_quiet_depth = 0
_quiet_filters: "warnings.catch_warnings[None] | None" = None


@contextmanager
def _pillow_quiet() -> Iterator[None]:
    """Silence Pillow's warnings about odd files; what matters becomes an error or a note.

    Warning filters are global to the process, so threads share one saved state: the first to enter saves it,
    the last to leave restores it.
    """
    global _quiet_depth, _quiet_filters
    with _quiet_lock:
        if _quiet_depth == 0:
            _quiet_filters = warnings.catch_warnings()
            _quiet_filters.__enter__()
            warnings.filterwarnings("ignore", module=r"PIL\b")
        _quiet_depth += 1
    try:
        yield
    finally:
        with _quiet_lock:
            _quiet_depth -= 1
            if _quiet_depth == 0 and _quiet_filters is not None:
                _quiet_filters.__exit__(None, None, None)
                _quiet_filters = None
