"""The description in the picture's own file: EXIF in a JPEG, PNG, WebP or TIFF. No pixel is touched.

No library, for want of a fitting one: Pillow would compress a JPEG again; piexif (last released in 2019) and
exif write all of EXIF anew, and lose what they do not know; those around Exiv2 are under the GPL. What is
needed is a segment put between two others. Does not know what EXIF looks like (``exif_block.py``) or where a
format has it (``exif_places.py``).
"""

from pathlib import Path

from vlfit.engine.file_kinds import kind_of
from vlfit.errors import CannotWrite
from vlfit.tasks.batch.names import shown_name
from vlfit.tasks.batch.sidecars.exif_block import BadExif, Block
from vlfit.tasks.batch.sidecars.exif_places import PLACES, Place
from vlfit.tasks.batch.sidecars.replacing import read_original, replace_file
from vlfit.tasks.batch.sidecars.writer import Left, Writer
from vlfit.units import MIB

# A few times as much is held while one is written.
_MOST = 128 * MIB


class ExifSidecar(Writer):
    """``backup``: the picture as it was stays beside it. ``keep_times``: the file's time stays as it was."""

    def __init__(self, overwrite: bool, *, backup: bool = False, keep_times: bool = False) -> None:
        super().__init__(overwrite)
        self.backup = backup
        self.keep_times = keep_times

    def _write(self, path: Path, words: str) -> None:
        original = read_original(path, _MOST)
        if original is None:
            raise CannotWrite(f"{shown_name(path)} is not there any more", "Was it moved?")
        place = PLACES.get(kind_of(original.data[:32]))
        if place is None:
            raise Left("in files of this kind vlfit writes no EXIF (--sidecar xmp goes beside any)")
        try:
            if self._may_replace(_description(place, original.data), words, "the EXIF"):
                changed = place.put(original.data, block_with(place, original.data, words))
                if _description(place, changed) != words.strip():
                    raise BadExif("what was written would not be read back")
                replace_file(original, changed, keep_times=self.keep_times, backup=self.backup)
        except BadExif as error:
            raise CannotWrite(
                f"{shown_name(path)} is left as it is: {error}", "--sidecar xmp puts the words beside it."
            ) from None


def block_with(place: Place, data: bytes, words: str) -> bytes:
    """The EXIF of the file ``data``, or a first one, with ``words``. Raises ``BadExif``, ``Left``."""
    place.check(data)
    found = place.find(data)
    return (Block(found) if found is not None else Block.empty()).with_description(words).data


def _description(place: Place, data: bytes) -> str:
    found = place.find(data)
    return Block(found).description if found is not None else ""
