"""Sidecars: a picture's text beside it or in it, for other programs: ``.txt``, XMP, EXIF."""

from vlfit.errors import UsageError
from vlfit.tasks.batch.items import Sidecar

KINDS = ("txt", "xmp", "xmp-stem", "exif")


def make_sidecar(
    kind: str, *, overwrite: bool = False, backup: bool = False, keep_times: bool = False
) -> Sidecar:
    """Create a writer of sidecars, one of ``KINDS``.

    For ``photo.jpg``: ``txt`` writes ``photo.txt``, ``xmp`` ``photo.jpg.xmp``, ``xmp-stem`` ``photo.xmp``,
    ``exif`` into the picture itself. ``overwrite``: replace other text that is there already; False: keep it.
    For ``exif``: ``backup`` keeps the original picture as ``photo.jpg_original``, ``keep_times`` the file's
    modification time. Raises ``UsageError`` for an unknown kind, and for ``exif`` if exiftool is not
    installed.
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
    raise UsageError(f"unknown kind of sidecar {kind!r}", f"Use one of: {', '.join(KINDS)}.")
