"""A file of the server that a request may name, because it lies in a folder that was opened to requests.

Knows: ``file:`` URLs, and that neither ``..`` nor a link may lead out of the folder, not even one that is
changed between the look and the reading. Does not know: what is in the file.
"""

import os
import stat
from contextlib import suppress
from pathlib import Path
from urllib.parse import unquote, urlsplit

from vlfit.errors import PictureNotFound, PictureTooLarge, PrivateAddress
from vlfit.units import MIB

_HINT = "Name a file in the folder that the server was started with (--allow-files), as file:///folder/name."


def read_allowed(url: str, folder: Path, most: int) -> bytes:
    """The bytes of the file that ``url`` (``file:///...``) names, at most ``most``, if it is in ``folder``.

    Raises ``PrivateAddress`` for one outside, whether it is there or not; ``PictureNotFound`` for one that
    cannot be read or is no ordinary file, ``PictureTooLarge``.
    """
    label = url[:120]
    path = _path_of(url, label)
    try:
        root = folder.resolve(strict=True)
        inside = Path(os.path.realpath(path)).relative_to(root)
    except (ValueError, OSError):
        raise PrivateAddress(f"{label} is not in the folder that requests may read from", _HINT) from None
    try:
        with os.fdopen(_open_below(root, inside), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise PictureNotFound(f"{label} is no ordinary file", _HINT)
            data = file.read(most + 1)
    except OSError as error:
        raise PictureNotFound(f"{label}: {error.strerror}", _HINT) from None
    if len(data) > most:
        raise PictureTooLarge(f"{label} is larger than {most // MIB} MiB", "Scale the picture down first.")
    return data


def _path_of(url: str, label: str) -> str:
    with suppress(ValueError):
        parts = urlsplit(url)
        path = unquote(parts.path)
        sound = parts.netloc in ("", "localhost") and path.startswith("/") and "\0" not in path
        if sound and not parts.query and not parts.fragment:
            return path
    raise PrivateAddress(f"{label} is no file:///path of this server", _HINT)


def _open_below(root: Path, inside: Path) -> int:
    """A descriptor of ``root / inside``, a path that has no links: one that has come since is not followed.

    Not waiting: a pipe would keep whoever opens it.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    here = os.open(root, flags | os.O_DIRECTORY)
    steps = inside.parts
    for index, step in enumerate(steps):
        below = flags if index == len(steps) - 1 else flags | os.O_DIRECTORY
        try:
            there = os.open(step, below, dir_fd=here)
        finally:
            os.close(here)
        here = there
    return here
