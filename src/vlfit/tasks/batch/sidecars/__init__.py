"""What was said of a picture, beside it or in it, for programs that look there: ``.txt``, XMP, EXIF.

Knows the kinds by name. The order of reading: ``writer.py`` decides whether anything is written,
``writer.py``, ``xmp.py`` and ``exif.py`` what, ``writer.py`` how a file changes at once or not at all.
EXIF is written by ``exiftool``, which ``tasks/batch/sidecars/exif.py`` runs.
"""

from vlfit.errors import UsageError
from vlfit.tasks.batch.items import Sidecar

KINDS = ("txt", "xmp", "xmp-stem", "exif")


def sidecar(kind: str, *, overwrite: bool = False, backup: bool = False, keep_times: bool = False) -> Sidecar:
    """``txt``: ``photo.txt``; ``xmp``: ``photo.jpg.xmp``; ``xmp-stem``: ``photo.xmp``; ``exif``: in the file.

    ``overwrite``: other words that are there are replaced, which by itself they are not. For ``exif``:
    ``backup`` leaves the picture as it was in ``photo.jpg_original``, ``keep_times`` its time. Raises
    ``UsageError`` for another kind, and for ``exif`` where exiftool is not installed.
    """
    if kind == "txt":
        from vlfit.tasks.batch.sidecars.writer import TextSidecar

        return TextSidecar(overwrite)
    if kind in ("xmp", "xmp-stem"):
        from vlfit.tasks.batch.sidecars.xmp import XmpSidecar

        return XmpSidecar(overwrite, stem=kind == "xmp-stem")
    if kind == "exif":
        from vlfit.tasks.batch.sidecars.exif import ExifSidecar

        return ExifSidecar(overwrite, backup=backup, keep_times=keep_times)
    raise UsageError(f"there is no sidecar {kind!r}", f"Write one of: {', '.join(KINDS)}.")
