"""What all sidecars have in common: which words, whether they are written, and what is said at the end.

Knows that a file with other words is somebody's work. Does not know what files look like.
"""

import os
import shutil
import stat
from abc import ABC, abstractmethod
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from vlfit.errors import CannotWrite, UsageError
from vlfit.tasks.batch.folders import PICTURES
from vlfit.tasks.batch.items import Item, Record, shown_name
from vlfit.units import MIB


class Left(Exception):
    """Nothing is written, with good reason: words that can stand behind "3 pictures were left alone: "."""


class Writer(ABC):
    """A ``Sidecar``: ``write`` asks ``_write`` to do it."""

    def __init__(self, overwrite: bool) -> None:
        self.overwrite = overwrite
        self._left: Counter[str] = Counter()
        self._first: dict[str, str] = {}

    def write(self, item: Item, record: Record) -> None:
        """Raises ``UsageError`` for a picture that is no file of its own, ``CannotWrite`` for what cannot be
        written. A second time with the same record changes nothing.
        """
        if item.path is None:
            raise UsageError(
                f"{item.key} is no file of its own: there is no place beside it",
                "Write no sidecars for shards, tables and URLs: what was said is in the output.",
            )
        words = words_of(record)
        try:
            if not words:
                raise Left("nothing was said")
            self._write(item.path, words)
        except Left as left:
            reason = str(left)
            self._left[reason] += 1
            self._first.setdefault(reason, shown_name(item.path))

    def notes(self) -> list[str]:
        """For each reason how many pictures were left alone, and the first of them."""
        return [
            f"{count:,} {'picture was' if count == 1 else 'pictures were'} left alone: {reason} "
            f"({self._first[reason]}{', ...' if count > 1 else ''})"
            for reason, count in self._left.most_common()
        ]

    def _may_replace(self, old: str, new: str, what: str) -> bool:
        """Whether to write; False if the same is there. Raises ``Left`` for other words that are to stay."""
        if old.strip() and old.strip() != new.strip() and not self.overwrite:
            raise Left(f"{what} says something else, which --overwrite replaces")
        return old.strip() != new.strip()

    @abstractmethod
    def _write(self, path: Path, words: str) -> None:
        """Write ``words``, which are not empty. Raises ``Left`` and ``CannotWrite``."""


def words_of(record: Record) -> str:
    """What a record says in words: a scene's summary, the names of what was detected, else the text."""
    if isinstance(record.get("summary"), str):
        words = record["summary"]
    elif isinstance(record.get("objects"), list):
        words = ", ".join(dict.fromkeys(str(thing.get("label", "")) for thing in record["objects"]))
    else:
        words = str(record.get("text") or "")
    # Neither XML nor EXIF can hold these, and nobody means them.
    kept = (letter for letter in words if letter in "\t\n" or _is_word(letter))
    return "".join(kept).strip()


def _is_word(letter: str) -> bool:
    code = ord(letter)
    return code >= 0x20 and code != 0x7F and not 0xD800 <= code <= 0xDFFF and code & 0xFFFE != 0xFFFE


# A file that changes at once or not at all, and stays whose it was: its mode, owner and attributes.
#
# Knows what it takes to replace a file. Does not know what is in it.


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


# ``photo.txt`` beside ``photo.jpg``, as programs that train on pictures read captions: one line of UTF-8.
#
# Does not know what else may be said in files.


_MOST = MIB


class TextSidecar(Writer):
    """One line, because there are programs that read no second one."""

    def _write(self, path: Path, words: str) -> None:
        place = path.with_suffix(".txt")
        line = " ".join(words.split())
        original = read_original(place, _MOST)
        if original is None:
            write_new(place, f"{line}\n".encode())
            return
        old = original.data.decode("utf-8", "replace").removeprefix("\ufeff")
        if self._may_replace(old, line, "the .txt that is there"):
            check_alone(path)
            replace_file(original, f"{line}\n".encode())


def check_alone(path: Path) -> None:
    """Raises ``Left`` where ``photo.jpg`` and ``photo.png`` would replace each other's words for ever."""
    for kind in PICTURES - {path.suffix.lower()}:
        if path.with_suffix(kind).exists() or path.with_suffix(kind.upper()).exists():
            raise Left("another picture has the same name but for its kind, and the sidecar")
