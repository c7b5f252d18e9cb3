"""The embedded preview of a camera RAW photo: what runs in a media worker. The sensor's data are not
developed.
"""

from dataclasses import dataclass
from io import BytesIO

from vlfit.errors import NotAPicture

_ORIENTATION = 0x0112
_HINT = "Export it as JPEG in the program that develops it."


@dataclass(frozen=True, slots=True)
class Preview:
    """The preview in a RAW photo.

    ``data``: a JPEG file of ``width`` x ``height`` pixels, to be rotated if its EXIF says so.
    """

    data: bytes
    width: int
    height: int


def read_preview(data: bytes, label: str) -> Preview:
    """The preview that LibRaw extracts from a RAW photo. ``label``: what errors call it.

    Raises ``NotAPicture`` if the photo is damaged, of an unknown camera, or has no preview.
    """
    import rawpy
    from PIL import Image

    try:
        with rawpy.imread(BytesIO(data)) as raw:
            flip = int(raw.sizes.flip)
            thumb = raw.extract_thumb()
    except (rawpy.LibRawNoThumbnailError, rawpy.LibRawUnsupportedThumbnailError):
        raise NotAPicture(f"{label} is a camera RAW photo without an embedded preview", _HINT) from None
    except rawpy.LibRawError as error:
        why = error.args[0].decode("utf-8", "replace") if isinstance(error.args[0], bytes) else str(error)
        raise NotAPicture(
            f"{label} is a camera RAW photo that is damaged, or of an unknown camera: {why}", _HINT
        ) from None
    content = thumb.data  # a JPEG file, or pixels
    try:
        image = Image.open(BytesIO(content)) if isinstance(content, bytes) else Image.fromarray(content)
        is_upright = not flip or _ORIENTATION in image.getexif()
    except Exception as error:  # decoders raise anything on malformed data
        raise NotAPicture(f"{label}: its embedded preview is damaged: {error}", _HINT) from None
    if isinstance(content, bytes) and is_upright:
        return Preview(content, image.width, image.height)
    # LibRaw's ``flip``: 3 is half a turn, 5 a quarter counterclockwise, 6 clockwise.
    turned = {
        3: Image.Transpose.ROTATE_180,
        5: Image.Transpose.ROTATE_90,
        6: Image.Transpose.ROTATE_270,
    }.get(0 if is_upright else flip)
    try:
        image = image.convert("RGB") if turned is None else image.convert("RGB").transpose(turned)
    except (OSError, ValueError, SyntaxError) as error:
        raise NotAPicture(f"{label}: its embedded preview is damaged: {error}", _HINT) from None
    buffer = BytesIO()
    image.save(buffer, "JPEG", quality=95, subsampling=0)
    return Preview(buffer.getvalue(), image.width, image.height)
