"""From the bytes of a picture file to upright RGB pixels, or an error that says what is wrong with the file.

Knows: Pillow, EXIF orientation, transparency, colour modes and bit depths, and how large a picture may be.
Does not know: what size the model wants (``image_processor.py``), nor where the bytes came from.

Colour follows the reference (transformers' ``convert_to_rgb``): transparency is laid on white. Where the
reference clips, we scale: 16-bit and floating-point greys keep their shades.
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
from vlfit.images.decode_memory import MOST_BYTES, Room, check_room
from vlfit.images.file_kinds import HINT, UNKNOWN, hint_for, is_surely_no_picture, kind_of

# Pillow's own ceiling, above which it refuses to open a file: 512 MiB as 3 bytes a pixel, 683 MiB as it
# decodes. The largest phone cameras make 108 and, rarely, 200 megapixels; the model sees 16.8 at most.
MAX_PIXELS = 178_956_970
MAX_ASPECT = 200

# Formats that people have, whose decoders run in this process and state the size before they decode.
# EPS starts Ghostscript, and ICO decodes pictures of sizes that its header does not tell: both stay out.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "JPEG2000", "PPM", "QOI")

# What every program that takes pictures decodes, and shows as ``decode`` does.
_USUAL_FORMATS = ("JPEG", "PNG", "WEBP", "GIF")
_USUAL_MODES = ("RGB", "L", "P", "1")

_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_EXIF_ORIENTATION = 0x0112

_room = Room(MOST_BYTES)
_STRIP_PIXELS = 2**20  # of a picture that are looked at at once, where whole copies would take memory


@dataclass(frozen=True, slots=True, eq=False)
class Decoded:
    """``image`` is upright and in mode RGB; ``notes`` say in words what was done to get there."""

    image: Image.Image
    notes: tuple[str, ...]


def decode(data: bytes, label: str) -> Decoded:
    """Decode the first picture of a file. ``label`` is what errors call it.

    The header is judged before any pixel is decoded. Raises ``NotAPicture`` for bytes that are none or break
    off, ``PictureTooLarge`` above ``MAX_PIXELS``, a side ratio of ``MAX_ASPECT`` or the RAM that is spent on
    one (``decoding_room``).
    """
    with _pillow_quiet():
        image = _open(data, label)
        check_size(image.width, image.height, label)
        with _room.take(check_room(image, label)):
            try:
                notes = _frame_notes(image)
                image.load()
            except Exception as error:  # decoders raise whatever hostile bytes drive them to
                raise _broken(label, data, image.format, str(error)) from error
            file_format = image.format
            image = _upright(image, notes)
            try:
                return Decoded(_to_rgb(image, file_format, notes), tuple(notes))
            except (ValueError, OSError) as error:
                raise NotAPicture(
                    f"{label}: colour mode {image.mode} cannot be turned into RGB", "Save it as RGB first."
                ) from error


def check(data: bytes, label: str) -> bool:
    """Refuse what ``decode`` refuses, at less cost: a JPEG is decoded at an eighth of its size.

    Returns whether another program can be relied upon to show the picture as ``decode`` does: it is of a
    usual format, has no transparency and colours of 8 bits, and nothing says that it is to be turned.
    """
    with _pillow_quiet():
        image = _open(data, label)
        check_size(image.width, image.height, label)
        with _room.take(check_room(image, label)):
            try:
                image.draft(None, (image.width // 8, image.height // 8))  # of a JPEG; others have none
                image.load()
            except Exception as error:  # as above
                raise _broken(label, data, image.format, str(error)) from error
            usual = image.format in _USUAL_FORMATS and image.mode in _USUAL_MODES
            return usual and "transparency" not in image.info and not _is_turned(image)


def _is_turned(image: Image.Image) -> bool:
    try:
        return image.getexif().get(_EXIF_ORIENTATION, 1) in _TURNS
    except Exception:  # as in ``_upright``
        return False


def check_size(width: int, height: int, label: str) -> None:
    """Refuse a picture of no pixels, of too many, or too long and thin for the model's patches."""
    if width <= 0 or height <= 0:
        raise NotAPicture(f"{label}: the picture is {width}x{height} pixels, there is nothing in it", HINT)
    if width * height > MAX_PIXELS:
        raise PictureTooLarge(
            f"{label}: {width}x{height} is {width * height / 1e6:,.0f} megapixels; "
            f"at most {MAX_PIXELS / 1e6:.0f} are decoded",
            "Scale it down first; the model sees at most 16.8 megapixels.",
        )
    if max(width, height) > MAX_ASPECT * min(width, height):
        ratio = max(width, height) / min(width, height)
        raise PictureTooLarge(
            f"{label}: {width}x{height} has sides 1:{ratio:,.0f}; the model takes at most 1:{MAX_ASPECT}",
            "Cut it into pieces, or pad the short side.",
        )


def _open(data: bytes, label: str) -> Image.Image:
    """Read the header. Not ``Image.open``, which refuses large files without saying their size."""
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
    if failure is None or is_surely_no_picture(kind):
        what = "it is empty" if kind == "empty" else f"it is {kind}"
        raise NotAPicture(f"{label} is not a picture that vlfit reads: {what}", hint_for(kind))
    claimed = _claimed_size(data)
    if claimed is not None and 0 in claimed:
        check_size(*claimed, label)
    # What Pillow says here ("not identified by this driver") only its makers understand.
    try:
        raise _broken(label, data, file_format, "its header is not readable") from failure
    finally:
        del failure  # it holds this frame, which would keep the file until the garbage collector comes


def _claimed_size(data: bytes) -> tuple[int, int] | None:
    """The (width, height) in a header that Pillow refused: of a size of 0 it says only that it is invalid."""
    if data.startswith(b"\x89PNG") and data[12:16] == b"IHDR" and len(data) >= 24:
        return int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")
    if data.startswith(b"GIF8") and len(data) >= 10:
        return int.from_bytes(data[6:8], "little"), int.from_bytes(data[8:10], "little")
    return None


def _broken(label: str, data: bytes, file_format: str | None, why: str) -> NotAPicture:
    kind = kind_of(data)
    if kind == UNKNOWN:  # known to Pillow alone
        kind = f"a {file_format} file"
    return NotAPicture(
        f"{label} is {kind} that breaks off or is damaged ({len(data):,} bytes{why and ': '}{why})",
        "Copy or download it again.",
    )


def _frame_notes(image: Image.Image) -> list[str]:
    if not getattr(image, "is_animated", False):
        return []
    if image.format in ("PNG", "WEBP", "AVIF", "MPO"):  # their headers tell; a GIF must be walked through
        return [f"first of {getattr(image, 'n_frames', 1)} frames"]
    return ["first of several pages" if image.format == "TIFF" else "first frame of an animation"]


def _upright(image: Image.Image, notes: list[str]) -> Image.Image:
    try:
        orientation = image.getexif().get(_EXIF_ORIENTATION, 1)
    except Exception:  # a picture is worth showing even if its metadata is garbage
        notes.append("EXIF unreadable, not rotated")
        return image
    turn = _TURNS.get(orientation)
    if turn is None:
        return image
    notes.append(f"turned upright (EXIF orientation {orientation})")
    turned = image.transpose(turn)
    turned.info = image.info
    return turned


def _to_rgb(image: Image.Image, file_format: str | None, notes: list[str]) -> Image.Image:
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        image = _to_8_bits(image, file_format, notes)
    if image.mode not in ("RGB", "RGBA", "L", "LA", "P", "PA", "1"):
        notes.append(f"converted from {image.mode}")
    if "A" not in image.getbands() and image.info.get("transparency") is None:
        return image if image.mode == "RGB" else image.convert("RGB")
    return _on_white(image, notes)


def _strips(image: Image.Image) -> Iterator[tuple[int, Image.Image]]:
    """``image`` from top to bottom in parts that take little memory, with the row that each begins at."""
    rows = max(_STRIP_PIXELS // image.width, 1)
    for top in range(0, image.height, rows):
        yield top, image.crop((0, top, image.width, min(top + rows, image.height)))


def _on_white(image: Image.Image, notes: list[str]) -> Image.Image:
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
    """Grey of more than 8 bits to 8: black stays black and white stays white, nothing is clipped."""
    extremes = [(float(each.min()), float(each.max())) for _, each in _values(image)]
    low, high = min(least for least, _ in extremes), max(most for _, most in extremes)
    depth = "floating-point" if image.mode == "F" else "16-bit" if high <= 65535 else "32-bit"
    if image.mode.startswith("I;16"):
        white = 65535.0
    elif image.mode == "F":
        white = 1.0 if high <= 1.0 else 255.0
    else:
        # A 32-bit TIFF says nowhere what white is; other files in this mode are 16-bit.
        white = 255.0 if high <= 255.0 and file_format == "TIFF" else 65535.0
    stretched = low < 0.0 or high > white
    if stretched:
        notes.append(f"{depth} grey from {low:g} to {high:g} stretched to 8 bits")
    else:
        notes.append(f"{depth} grey reduced to 8 bits")
    factor = 255.0 / ((high - low) or 1.0) if stretched else 255.0 / white
    transparent = image.info.get("transparency")
    result = Image.new("L", image.size)
    for top, values in _values(image):
        grey = np.rint((values - low if stretched else values) * factor).astype(np.uint8)
        if isinstance(transparent, int):
            grey[values == transparent] = 255
        result.paste(Image.fromarray(grey), (0, top))
    return result


def _values(image: Image.Image) -> "Iterator[tuple[int, np.ndarray[Any, np.dtype[np.float32]]]]":
    for top, strip in _strips(image):
        values = np.asarray(strip, dtype=np.float32)
        yield top, np.nan_to_num(values, posinf=0.0, neginf=0.0)


_quiet_lock = threading.Lock()
_quiet_depth = 0
_quiet_filters: "warnings.catch_warnings[None] | None" = None


@contextmanager
def _pillow_quiet() -> Iterator[None]:
    """Silence Pillow's warnings about odd files: what matters becomes an error or a note.

    Warning filters belong to the process and are restored by whoever saved them, so threads that decode at
    the same time share one saved state: the first in saves it, the last out restores it.
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
