"""A file that changes at once or not at all, and stays whose it was: its mode, owner and attributes.

Knows what it takes to replace a file. Does not know what is in it.
"""

import os
import shutil
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from vlfit.errors import CannotWrite
from vlfit.tasks.batch.names import shown_name
from vlfit.units import MIB

MOST_BYTES = 512 * MIB


@dataclass(frozen=True, slots=True)
class Original:
    """A file as it was read: its bytes, and by which one sees that it has been changed since."""

    path: Path
    data: bytes
    stamp: tuple[int, int]


def read_original(path: Path, most: int = MOST_BYTES) -> Original | None:
    """The file at ``path``, through links; None if there is none. Raises ``CannotWrite`` for one that is not
    to be replaced: read-only, no plain file, larger than ``most``, or another's.
    """
    path = Path(os.path.realpath(path))
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _failed(path, error) from error
    # Root may write everything, and a name can be replaced where the file cannot: both are not asked.
    if not stat.S_ISREG(found.st_mode) or not found.st_mode & 0o222 or not os.access(path, os.W_OK):
        what = "is read-only" if stat.S_ISREG(found.st_mode) else "is no plain file"
        raise CannotWrite(f"{shown_name(path)} {what}", "Make it writable if it is yours to change.")
    if found.st_size > most:
        raise CannotWrite(f"{shown_name(path)} is larger than {most // MIB} MiB", "It is left as it is.")
    try:
        return Original(path, path.read_bytes(), (found.st_size, found.st_mtime_ns))
    except OSError as error:
        raise _failed(path, error) from error


def replace_file(original: Original, data: bytes) -> None:
    """Put ``data`` in its place. Raises ``CannotWrite``; then it is as it was."""
    path = original.path
    fresh = _beside(path)
    try:
        before = path.stat()
        _write(fresh, data)
        shutil.copystat(path, fresh)
        with suppress(PermissionError):
            os.chown(fresh, before.st_uid, before.st_gid)
        os.utime(fresh)
        if (before.st_size, before.st_mtime_ns) != original.stamp:
            raise CannotWrite(f"{shown_name(path)} was changed by another program", "It is left as it is.")
        fresh.replace(path)
    except OSError as error:
        raise _failed(path, error) from error
    finally:
        with suppress(OSError):
            fresh.unlink()


def write_new(path: Path, data: bytes) -> None:
    """A file that is not there yet. Raises ``CannotWrite``."""
    fresh = _beside(path)
    try:
        _write(fresh, data)
        fresh.replace(path)
    except OSError as error:
        raise _failed(path, error) from error
    finally:
        with suppress(OSError):
            fresh.unlink()


def _beside(path: Path) -> Path:
    # Hidden, so that no program that watches the folder takes it for a picture.
    return path.with_name(f".{path.name[:200]}.{os.getpid()}.part")


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())  # else a file may be empty after the power fails, though it has its name


def _failed(path: Path, error: OSError) -> CannotWrite:
    return CannotWrite(
        f"{shown_name(path)} cannot be written: {error.strerror or error}",
        "Check that the folder is yours to write, and that there is room.",
    )
