"""Files that commands write, whole or not at all: a full disk or Ctrl-C leaves the file as it was."""

import errno
import os
import secrets
import shutil
from pathlib import Path

from vlfit.errors import CannotWrite

_NO_SPACE = {errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC)}
_DISK_ERRORS = _NO_SPACE | {errno.EIO}


def write_whole(path: Path, data: bytes) -> None:
    """Write ``data`` to ``path``, by way of a file beside it that replaces an existing one.

    Links stay links, an existing file keeps its permissions, and pipes and devices are written to. Raises
    ``CannotWrite`` if the disk is full or fails, ``OSError`` if the path cannot be written for another
    reason.
    """
    try:
        _write(path, data)
    except OSError as error:
        if error.errno not in _DISK_ERRORS:
            raise
        raise CannotWrite(
            f"cannot write {path}: {error.strerror}", "Free some disk space, or write elsewhere."
        ) from error


def is_no_space(error: OSError) -> bool:
    """Whether ``error`` is a write for which the disk, the quota or the largest file has no room."""
    return error.errno in _NO_SPACE


def _write(path: Path, data: bytes) -> None:
    # /dev/stdout may be a file, but one that the shell holds open.
    is_special = path.exists() and (not path.is_file() or path.is_relative_to("/dev"))
    target = Path(os.path.realpath(path))
    if target.is_file() and not os.access(target, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    if is_special or (target.is_file() and not os.access(target.parent, os.W_OK)):
        path.write_bytes(data)
        return
    fresh = target.with_name(f".vlfit-{os.getpid()}-{secrets.token_hex(4)}.new")
    try:
        with fresh.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())  # some file systems notice only here that they are full
        if target.exists():
            shutil.copymode(target, fresh)
        fresh.replace(target)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise
