"""Draw labelled boxes over a picture, and save it as another file."""

import io
import os
from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from vlfit.api.conversation import ImagePart
from vlfit.atomic_write import write_whole
from vlfit.errors import UsageError
from vlfit.images.decode_pool import decode_pool
from vlfit.tasks.boxes import SceneObject

# Distinguishable with most kinds of colour blindness (Okabe and Ito, "Color Universal Design", 2008).
_COLOURS = ("#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7")


def draw_boxes(picture: ImagePart, objects: Sequence[SceneObject]) -> Image.Image:
    """Decode ``picture``, upright and at full size, and draw the boxes of ``objects`` with their labels on
    it.

    Objects with the same label have the same colour. Raises ``PictureError`` if the picture cannot be
    decoded.
    """
    image = Image.fromarray(decode_pool().decode(picture.data, picture.label, _at_full_size).pixels)
    pen = ImageDraw.Draw(image)
    width = max(2, round(max(image.size) / 300))
    font = ImageFont.load_default(max(12, round(max(image.size) / 45)))
    labels = list(dict.fromkeys(thing.label for thing in objects))
    for thing in objects:
        colour = _COLOURS[labels.index(thing.label) % len(_COLOURS)]
        left, top, right, bottom = thing.box
        pen.rectangle((left, top, max(right - 1, left), max(bottom - 1, top)), outline=colour, width=width)
        text = _label_text(thing.label)
        _, _, text_width, text_height = pen.textbbox((0, 0), text, font=font)
        # Above the box if there is space, else inside.
        x = max(min(left, image.width - round(text_width) - 4), 0)
        y = top - round(text_height) - 4 if top >= text_height + 4 else top
        pen.rectangle((x, y, x + text_width + 4, y + text_height + 4), fill=colour)
        pen.text((x + 2, y + 1), text, fill="black", font=font)
    return image


def _at_full_size(width: int, height: int) -> tuple[int, int]:
    return width, height


def check_drawing_path(path: Path, source: str) -> None:
    """Raise ``UsageError`` if ``save_drawing`` could not write to ``path``. Writes nothing.

    To call before the model runs, which may take minutes. ``source``: the name of the picture as given, which
    must not be overwritten if it is a file.
    """
    if Image.registered_extensions().get(path.suffix.lower()) not in Image.SAVE:
        raise _no_extension(path)
    if path.is_dir():
        raise UsageError(f"{path} is a folder", f"Name a file in it: {path / 'found.png'}.")
    if not path.parent.is_dir():
        raise UsageError(f"{path} cannot be written: no such folder", f"Make it: mkdir -p {path.parent}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UsageError(f"{path} cannot be written: no permission", "Name a file elsewhere.")
    if Path(source).exists() and path.exists() and path.samefile(source):
        raise UsageError(f"{path} is the picture itself", "Name another file to draw to.")


def save_drawing(image: Image.Image, path: Path, source: str) -> None:
    """Save ``image`` to ``path``, in the format of its extension; replaces an existing file once it is whole.

    Raises ``CannotWrite`` if the disk is full, ``UsageError`` if it fails otherwise, or if ``path`` is the
    same file as ``source``, the picture.
    """
    check_drawing_path(path, source)
    encoded = _NamedBuffer()
    encoded.name = str(path)
    try:
        image.save(encoded)
        write_whole(path, encoded.getvalue())
    except ValueError as error:
        raise _no_extension(path) from error
    except OSError as error:
        raise UsageError(
            f"{path} cannot be written: {error.strerror or error}", "Name a file elsewhere."
        ) from error


class _NamedBuffer(io.BytesIO):
    """Encoded bytes, with the name from which Pillow takes their format."""

    name = ""


def _no_extension(path: Path) -> UsageError:
    return UsageError(
        f"{path} has no picture extension", f"Name it {path.stem or 'found'}.png, or .jpg, .webp."
    )


def _label_text(label: str) -> str:
    """``label`` on one line, shortened to 60 characters."""
    line = " ".join(label.split())
    return line if len(line) <= 60 else f"{line[:57]}..."
