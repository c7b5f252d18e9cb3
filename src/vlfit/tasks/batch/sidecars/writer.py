"""Base class of sidecars, atomic replacement of files, and the ``.txt`` sidecar.

A file with other text is somebody's work: it is only replaced with ``--overwrite``.
"""

import os
import re
import shutil
import socket
import stat
import sys
from abc import ABC, abstractmethod
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from vlfit.errors import CannotWrite, UsageError
from vlfit.images.file_kinds import PICTURE_EXTENSIONS
from vlfit.tasks.batch.items import Item, Record, display_name
from vlfit.units import MIB, counted


class Skipped(Exception):
    """Raised by ``_write`` to leave a picture alone, on purpose; the message is the reason, for ``notes``."""


class SidecarWriter(ABC):
    """Base class of sidecar writers: a ``Sidecar`` that counts the pictures it leaves alone, for ``notes``.

    Subclasses implement ``_write``. ``overwrite``: replace other text that is there already; False: keep
    it.
    """

    def __init__(self, overwrite: bool) -> None:
        self.overwrite = overwrite
        self._cleaned: set[Path] = set()  # folders
        self._last_cleaned: Path | None = None
        self._skipped: Counter[str] = Counter()
        self._examples: dict[str, str] = {}

    def write(self, item: Item, record: Record) -> None:
        """Write the text of ``record`` (``sidecar_text``) to the sidecar of the picture ``item``, or into it.

        Writing the same text again changes nothing. The picture is left alone, and counted for ``notes``,
        if there is no text or other text is to be kept. Raises ``UsageError`` if the item is no file of
        its own (a member of a shard, a row, a URL), ``CannotWrite`` if writing fails.
        """
        if item.path is None:
            raise UsageError(
                f"{item.key} is not a file of its own, so it has no place for a sidecar",
                "Leave out --sidecar for shards, tables and URLs: the text is in the output.",
            )
        text = sidecar_text(record)
        self._remove_stale_parts(item.path)
        try:
            if not text:
                raise Skipped("the answer has no text")
            self._write(item.path, text)
        except Skipped as left:
            reason = str(left)
            self._skipped[reason] += 1
            self._examples.setdefault(reason, display_name(item.path))

    def clean(self, item: Item) -> None:
        """Remove unfinished files that killed runs left in the folder of ``item``. Never raises."""
        path = item.path
        if path is not None and (path.parent != self._last_cleaned or path.is_symlink()):
            self._last_cleaned = path.parent
            self._remove_stale_parts(path)

    def notes(self) -> list[str]:
        """One note per reason: how many pictures were left alone, and the first of them; empty if none."""
        return [
            f"{counted(count, 'picture was', 'pictures were')} left alone: {reason} "
            f"({self._examples[reason]}{', ...' if count > 1 else ''})"
            for reason, count in self._skipped.most_common()
        ]

    def _remove_stale_parts(self, path: Path) -> None:
        """Once for each folder, that of ``path`` and that of the file it links to."""
        for folder in {path.absolute().parent, Path(os.path.realpath(path)).parent} - self._cleaned:
            self._cleaned.add(folder)
            remove_stale_parts(folder)

    def _may_replace(self, old: str, new: str, what: str) -> bool:
        """Whether to write; False if ``old`` equals ``new``. Raises ``Skipped`` for other text to be kept."""
        if old.strip() and old.strip() != new.strip() and not self.overwrite:
            raise Skipped(f"{what} has other text, which --overwrite replaces")
        return old.strip() != new.strip()

    @abstractmethod
    def _write(self, path: Path, text: str) -> None:
        """Write ``text``, which is not empty. Raises ``Skipped`` and ``CannotWrite``."""


def sidecar_text(record: Record) -> str:
    """The text for a sidecar: the summary of a scene, the labels of a detection, else the answer; may be
    empty.

    Labels are separated by commas, each once. Control characters other than tab and newline are removed, as
    neither XML nor EXIF can hold them.
    """
    if isinstance(record.get("summary"), str):
        text = record["summary"]
    elif isinstance(record.get("objects"), list):
        text = ", ".join(dict.fromkeys(str(thing.get("label", "")) for thing in record["objects"]))
    else:
        text = str(record.get("text") or "")
    kept = (character for character in text if character in "\t\n" or _is_printable(character))
    return "".join(kept).strip()


def _is_printable(character: str) -> bool:
    code = ord(character)
    return code >= 0x20 and code != 0x7F and not 0xD800 <= code <= 0xDFFF and code & 0xFFFE != 0xFFFE


# Atomic replacement of files, which keeps mode, owner and attributes.

MAX_REPLACED_BYTES = 512 * MIB


@dataclass(frozen=True, slots=True)
class OriginalFile:
    """The content of a file that is to be replaced. ``path``: with links resolved.

    ``stamp``: size in bytes and modification time in ns, when it was read, to detect later changes.
    """

    path: Path
    data: bytes
    stamp: tuple[int, int]


def read_original(path: Path, max_bytes: int = MAX_REPLACED_BYTES) -> OriginalFile | None:
    """Read the file at ``path``, following links, for ``replace_file``; None if it does not exist.

    Raises ``CannotWrite`` if the file must not be replaced (read-only, not a regular file, larger than
    ``max_bytes``) or cannot be read.
    """
    path = Path(os.path.realpath(path))
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _write_error(path, error) from error
    # The mode is checked too, as root can write anything and a read-only file can be renamed over.
    if not stat.S_ISREG(found.st_mode) or not found.st_mode & 0o222 or not os.access(path, os.W_OK):
        what = "is read-only" if stat.S_ISREG(found.st_mode) else "is not a regular file"
        raise CannotWrite(f"{display_name(path)} {what}", "Make it writable, if it is yours.")
    if found.st_size > max_bytes:
        raise CannotWrite(
            f"{display_name(path)} is larger than {max_bytes // MIB} MiB", "It was not changed."
        )
    try:
        return OriginalFile(path, path.read_bytes(), (found.st_size, found.st_mtime_ns))
    except OSError as error:
        raise _write_error(path, error) from error


def replace_file(original: OriginalFile, data: bytes) -> None:
    """Replace the content of the file by ``data``, atomically; mode, owner and attributes stay.

    Raises ``CannotWrite``, and leaves the file as it is, if writing fails or the file was changed since
    ``original`` was read.
    """
    path = original.path
    fresh = _part_path(path)
    try:
        before = path.stat()
        _write(fresh, data)
        shutil.copystat(path, fresh)
        with suppress(PermissionError):
            os.chown(fresh, before.st_uid, before.st_gid)
        os.utime(fresh)
        if (before.st_size, before.st_mtime_ns) != original.stamp:
            raise CannotWrite(f"{display_name(path)} was changed by another program", "It was not replaced.")
        fresh.replace(path)
    except OSError as error:
        raise _write_error(path, error) from error
    finally:
        with suppress(OSError):
            fresh.unlink()


def write_new(path: Path, data: bytes) -> None:
    """Write ``data`` to the file ``path``, atomically; replaces an existing file. Raises ``CannotWrite``."""
    fresh = _part_path(path)
    try:
        _write(fresh, data)
        fresh.replace(path)
    except OSError as error:
        raise _write_error(path, error) from error
    finally:
        with suppress(OSError):
            fresh.unlink()


# Hidden, so that programs that watch the folder do not take it for a picture. The host is in the name, as
# folders are shared over networks and a process of another computer looks dead from here.
_HOST = re.sub(r"\W", "_", socket.gethostname(), flags=re.ASCII)[:24]
_PART = re.compile(r"\..+\.vlfit-(?P<host>\w+)-(?P<pid>[1-9][0-9]{0,9})\.part", re.DOTALL | re.ASCII)
_MAX_NAME_BYTES = 200  # of 255, and the rest for host and process id


def _part_path(path: Path) -> Path:
    name = os.fsencode(path.name)[:_MAX_NAME_BYTES].decode("utf-8", "ignore")
    return path.with_name(f".{name}.vlfit-{_HOST}-{os.getpid()}.part")


def remove_stale_parts(folder: Path) -> None:
    """Remove unfinished files that killed processes of this computer left in ``folder``. Never raises."""
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            match = _PART.fullmatch(entry.name) if entry.name.endswith(".part") else None
            if match is None or match["host"] != _HOST or _is_alive(int(match["pid"])):
                continue
            with suppress(OSError):
                if entry.is_file(follow_symlinks=False):
                    os.unlink(entry.path)


def _is_alive(pid: int) -> bool:
    if sys.platform == "win32":  # where signal 0 is Ctrl-C
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # another user's process, or no process id
        return True
    return not _is_zombie(pid)


def _is_zombie(pid: int) -> bool:
    """Whether ``pid`` has ended and its parent has not asked: for ever in a container whose init does not."""
    try:
        # The program's name, in brackets, may hold anything.
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] in (b"Z", b"X")
    except (OSError, IndexError):  # not Linux, or it is gone by now
        return False


def _write(path: Path, data: bytes) -> None:
    path.unlink(missing_ok=True)
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())  # else it may be empty after a power failure


def _write_error(path: Path, error: OSError) -> CannotWrite:
    return CannotWrite(
        f"{display_name(path)} cannot be written: {error.strerror or error}",
        "Check the permissions of the folder and the free disk space.",
    )


_MAX_TEXT_BYTES = MIB


class TextSidecar(SidecarWriter):
    """``photo.txt`` beside ``photo.jpg``: one line of UTF-8, as training programs read captions."""

    def _write(self, path: Path, text: str) -> None:
        sidecar = path.with_suffix(".txt")
        line = " ".join(text.split())
        original = read_original(sidecar, _MAX_TEXT_BYTES)
        if original is None:
            write_new(sidecar, f"{line}\n".encode())
            return
        old = original.data.decode("utf-8", "replace").removeprefix("\ufeff")
        if self._may_replace(old, line, "the existing .txt"):
            check_sidecar_not_shared(path)
            replace_file(original, f"{line}\n".encode())


def check_sidecar_not_shared(path: Path) -> None:
    """Raise ``Skipped`` if another picture in the folder of ``path`` would have the same ``photo.txt``.

    ``photo.png`` beside ``photo.jpg``, for example.
    """
    for kind in PICTURE_EXTENSIONS - {path.suffix.lower()}:
        if path.with_suffix(kind).exists() or path.with_suffix(kind.upper()).exists():
            raise Skipped("another picture with the same name but another extension has this sidecar")
