"""What stands behind an item's ``read``: small frozen records, so that an item travels to another process.

Knows files, URLs, and parts of files. Does not know who found them (``folders.py``, ``list_files.py``,
``webdataset.py``) or what is done with the bytes.
"""

import os
import stat
from dataclasses import dataclass
from pathlib import Path

from vlfit.errors import NotAPicture, PictureNotFound, PictureTooLarge, PrivateAddress
from vlfit.tasks.batch.names import key_of, shown_name
from vlfit.tasks.pictures import MAX_FILE_BYTES, load_picture, read_file
from vlfit.units import MIB


@dataclass(frozen=True, slots=True)
class FileBytes:
    """A file of its own. ``name`` is its path, absolute: another process may stand in another folder.

    As text, and not as a ``Path`` until something is wrong: there are a million of them.
    """

    name: str

    def read(self) -> bytes:
        """Raises ``PictureNotFound``, ``PictureTooLarge``. A pipe is refused: it would keep whoever reads."""
        label = key_of(self.name)
        try:
            mode = os.stat(self.name).st_mode
            ordinary = stat.S_ISREG(mode) or stat.S_ISDIR(mode)
        except (OSError, ValueError):
            ordinary = True  # read_file says what is wrong
        if not ordinary:
            raise PictureNotFound(f"{label} is no ordinary file", "Name files that hold a picture each.")
        return read_file(self.name, label)


@dataclass(frozen=True, slots=True)
class UrlBytes:
    """What is behind an ``http:``, ``https:`` or ``data:`` URL that stands in a list or a table.

    Whoever wrote the list says where this computer connects to: private networks are for those who allow it.
    """

    url: str
    allow_private: bool = False

    def read(self) -> bytes:
        """Raises ``PictureNotFound``, ``NotAPicture``, ``PictureTooLarge``, ``PrivateAddress``."""
        try:
            return load_picture(self.url, allow_private=self.allow_private).data
        except PrivateAddress as error:
            raise PrivateAddress(
                error.message, "If the list is your own and you mean it, add --allow-private-urls."
            ) from error


@dataclass(frozen=True, slots=True)
class Span:
    """``size`` bytes of the file ``path`` from ``offset`` on: a member of a tar shard."""

    path: Path
    offset: int
    size: int
    label: str

    def read(self) -> bytes:
        """Raises ``PictureNotFound`` for a file that is gone, ``NotAPicture`` for one that ends too early,
        ``PictureTooLarge``.
        """
        if self.size > MAX_FILE_BYTES:
            raise PictureTooLarge(
                f"{self.label} is larger than {MAX_FILE_BYTES // MIB} MiB", "Scale the picture down first."
            )
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset)
                data = file.read(self.size)
        except OSError as error:
            raise PictureNotFound(
                f"{shown_name(self.path)} cannot be read: {error.strerror}", "Was it moved?"
            ) from error
        if len(data) < self.size:
            raise NotAPicture(
                f"{self.label}: {self.size} bytes were to be there, {len(data)} are",
                f"{shown_name(self.path)} was cut off: copy it again.",
            )
        return data


@dataclass(frozen=True, slots=True)
class Unreadable:
    """Stands where pictures were to be and are not: ``read`` says why, so that it is listed with bad files.

    ``name`` is the part of a source that it stands for: a folder, a shard, a line of a list.
    """

    name: str
    message: str
    hint: str = ""

    def read(self) -> bytes:
        """Raises ``PictureNotFound``, always."""
        raise PictureNotFound(self.message, self.hint)
