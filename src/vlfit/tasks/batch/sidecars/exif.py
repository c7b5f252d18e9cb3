"""The description in the picture's own file: EXIF in a JPEG, PNG, WebP or TIFF, written by ``exiftool``.

Knows which tags are read and written, and which pictures are left alone. Does not know EXIF, nor how the
program is run (``exiftool.py``).
"""

import html
import json
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from vlfit.engine.file_kinds import kind_of
from vlfit.errors import CannotWrite
from vlfit.tasks.batch.names import shown_name
from vlfit.tasks.batch.sidecars.exiftool import Exiftool, ExiftoolFailed
from vlfit.tasks.batch.sidecars.replacing import read_original
from vlfit.tasks.batch.sidecars.writer import Left, Writer
from vlfit.units import MIB

_MOST = 128 * MIB
_KINDS = ("a JPEG", "a PNG", "a WebP", "a TIFF")
# How a box of Content Credentials begins in all formats: its type is a UUID. Older versions of exiftool see
# it in some formats only.
_C2PA = b"jumdc2pa\x00\x11\x00\x10\x80\x00\x00\xaa\x00\x38\x9b\x71"
_DESCRIPTION, _COMMENT = "IFD0:ImageDescription", "ExifIFD:UserComment"


@dataclass(frozen=True, slots=True)
class _Found:
    """What is in a file: its type as exiftool calls it, ``ImageDescription``, and ``UserComment``."""

    kind: str
    description: str
    comment: str


class ExifSidecar(Writer):
    """``backup``: the picture as it was stays beside it. ``keep_times``: the file's time stays as it was.

    Raises ``UsageError`` where exiftool is not installed.
    """

    def __init__(self, overwrite: bool, *, backup: bool = False, keep_times: bool = False) -> None:
        super().__init__(overwrite)
        # Without -overwrite_original exiftool keeps the first original as FILE_original.
        self._options = [*([] if backup else ["-overwrite_original"]), *(["-P"] if keep_times else [])]
        self._exiftool = Exiftool()

    def _write(self, path: Path, words: str) -> None:
        original = read_original(path, _MOST)
        if original is None:
            raise CannotWrite(f"{shown_name(path)} is not there any more", "Was it moved?")
        if kind_of(original.data[:32]) not in _KINDS:
            raise Left("in files of this kind vlfit writes no EXIF (--sidecar xmp goes beside any)")
        if _C2PA in original.data:
            raise Left("Content Credentials (C2PA) are in the file, and any change makes them void")
        try:
            found = self._read(original.path)
            _check(found)
            if self._may_replace(found.description, words, "the EXIF"):
                # UserComment may hold another program's settings.
                alike = found.comment in ("", found.description)
                self._put(original.path, words, (_DESCRIPTION, _COMMENT) if alike else (_DESCRIPTION,))
        except ExiftoolFailed as error:
            raise CannotWrite(
                f"{shown_name(path)} is left as it is: {error}", "--sidecar xmp puts the words beside it."
            ) from None

    def _read(self, path: Path) -> _Found:
        said = self._exiftool.run(
            [b"-j", b"-FileType", f"-{_DESCRIPTION}".encode(), f"-{_COMMENT}".encode(), os.fsencode(path)]
        )
        start, end = said.find("[{"), said.rfind("}]")
        try:
            # exiftool writes a description of digits as a number: it is taken as it stands there.
            (facts,) = json.loads(said[start : end + 2], strict=False, parse_int=str, parse_float=str)
        except ValueError:
            raise ExiftoolFailed(_reason(said)) from None
        texts = [str(facts.get(name, "")).strip() for name in ("FileType", "ImageDescription", "UserComment")]
        return _Found(*texts)

    def _put(self, path: Path, words: str, tags: tuple[str, ...]) -> None:
        text = html.escape(words, quote=False).replace("\n", "&#10;")  # -E: one line, which is what is sent
        values = [f"-{tag}={text}" for tag in tags]
        unfinished = path.with_name(f"{path.name}_exiftool_tmp")
        was_there = unfinished.exists()
        try:
            said = self._exiftool.run(
                [*(word.encode() for word in ["-E", *self._options, *values]), os.fsencode(path)]
            )
        except ExiftoolFailed:
            if not was_there:
                with suppress(OSError):
                    unfinished.unlink(missing_ok=True)  # exiftool, if it was killed, could not
            raise
        if "1 image files updated" not in said:
            raise ExiftoolFailed(_reason(said))


def _check(found: _Found) -> None:
    """Raises ``Left`` for files that are not to be changed."""
    if found.kind == "DNG":
        raise Left("it is DNG, a camera's raw picture")
    if found.kind == "TIFF" and found.description.startswith(("<?xml", "<OME", "ImageJ=")):
        raise Left("a microscope's program has its settings where the description would be")


def _reason(said: str) -> str:
    """Why exiftool did nothing, without the name of the file, which may be long."""
    lines = said.strip().splitlines()
    told = next((line for line in lines if line.startswith("Error")), lines[0] if lines else "nothing")
    return f"exiftool says: {told.removeprefix('Error: ').partition(' - /')[0].strip()}"
