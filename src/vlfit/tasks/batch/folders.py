"""Pictures in a folder and all below it, or those of them that a pattern (``photos/**/cat-*.jpg``) means.

Knows: which file names are pictures', hidden files, links that lead in circles. Looks at names alone, sorted
in each folder, and holds those of the folders that it stands in: a million files are no million objects. Does
not know what is in a file.
"""

import fnmatch
import os
import stat
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from vlfit.errors import PictureNotFound
from vlfit.tasks.batch.items import FileBytes, Item, Unreadable, extension_of, key_of

# What ``images/decode.py`` decodes, by the names that people give it.
PICTURES = frozenset(
    (
        *(
            ".jpg",
            ".jpeg",
            ".jpe",
            ".jfif",
            ".png",
            ".apng",
            ".webp",
            ".gif",
            ".bmp",
            ".dib",
            ".tif",
            ".tiff",
        ),
        *(".avif", ".jp2", ".j2k", ".jpx", ".ppm", ".pgm", ".pbm", ".pnm", ".pfm", ".qoi"),
    )
)
ALL = ("**",)
# Small copies and leftovers that Synology, macOS and Windows lay beside pictures: hidden, if not by a dot.
_NOT_THEIRS = frozenset(("@eaDir", "__MACOSX", "$RECYCLE.BIN"))
_MAGIC = frozenset("*?[")


class FolderSource:
    """A ``Source`` of the pictures below ``root``, by name; a link to a folder outside is followed once.

    ``pattern``: what a path below ``root`` must match, ``**`` being any folders; None: every picture.
    ``extensions``: lower case, with the dot; None: whatever the pattern matches. ``hidden``: names that begin
    with a dot too.
    """

    def __init__(
        self,
        root: str,
        pattern: tuple[str, ...] | None = None,
        extensions: frozenset[str] | None = PICTURES,
        hidden: bool = False,
    ) -> None:
        self.root = root
        self.pattern = pattern
        self.extensions = extensions
        self.hidden = hidden
        self._skipped: Counter[str] = Counter()
        self._around = 0

    def __iter__(self) -> Iterator[Item]:
        home = os.path.join(self.root, "")
        base = os.path.join(str(Path(os.getcwd(), self.root)), "")
        for name in self.names():
            if isinstance(name, Unreadable):
                yield Item(key_of(name.name), name.read)
            else:
                yield Item(key_of(name), FileBytes(base + name).read, Path(home + name))

    def names(self) -> Iterator[str | Unreadable]:
        """The paths below ``root``, in order. A folder that cannot be read is an ``Unreadable``."""
        walk = _Walk(self.root, self.extensions, self.hidden)
        try:
            yield from walk.names(self.pattern)
        finally:
            self._skipped, self._around = walk.skipped, walk.around

    def count(self) -> int:
        """Goes through the folder, without keeping anything."""
        return sum(1 for _ in self.names())

    def notes(self) -> list[str]:
        """What the last pass left out, in words."""
        notes = []
        if self._around:
            links = "1 link" if self._around == 1 else f"{self._around:,} links"
            notes.append(f"{key_of(self.root)}: left out {links} to folders that this one lies in")
        if not self._skipped:
            return notes
        kinds = ", ".join(f"{kind} {count:,}" for kind, count in self._skipped.most_common(8))
        more = ", ..." if len(self._skipped) > 8 else ""
        total = self._skipped.total()
        files = "1 file that by name is" if total == 1 else f"{total:,} files that by name are"
        notes.append(f"{key_of(self.root)}: left out {files} no picture ({kinds}{more})")
        return notes


def split_pattern(pattern: str) -> tuple[str, tuple[str, ...]]:
    """The folder that a pattern begins with, and its parts: ``a/b/*.jpg`` is ``a/b`` and ``("*.jpg",)``."""
    parts = os.path.expanduser(pattern).replace(os.sep, "/").split("/")
    fixed = next((index for index, part in enumerate(parts) if _MAGIC & set(part)), len(parts) - 1)
    root = "/".join(parts[:fixed])
    return root or ("/" if fixed else "."), tuple(part for part in parts[fixed:] if part not in ("", "."))


@dataclass(slots=True)
class _Level:
    """A folder that the walk stands in. ``names``: what is left to see, last first; folders end in ``/``."""

    prefix: str
    names: list[str]
    states: frozenset[int]
    outside: bool


@dataclass(slots=True)
class _Walk:
    root: str
    extensions: frozenset[str] | None
    hidden: bool
    skipped: Counter[str] = field(default_factory=Counter)
    around: int = 0  # links to folders that the root lies in, and so others beside it
    # Folders outside the root that were entered through links: each once, whatever leads there.
    entered: set[tuple[int, int]] = field(default_factory=set)

    def names(self, pattern: tuple[str, ...] | None) -> Iterator[str | Unreadable]:
        """Not recursive: folders may lie deeper than Python calls."""
        parts = pattern if pattern is not None else ALL
        stack: list[_Level] = []
        name, states, outside = "", _reach(frozenset((0,)), parts), False
        while True:
            level = self._look(name, states, outside, parts)
            if isinstance(level, _Level):
                stack.append(level)
            elif level is not None:
                yield level
            while stack and (not stack[-1].names or not stack[-1].names[-1].endswith("/")):
                if stack[-1].names:
                    yield stack[-1].prefix + stack[-1].names.pop()
                else:
                    stack.pop()
            if not stack:
                return
            level = stack[-1]
            folder = level.names.pop()
            name, outside = level.prefix + folder, level.outside
            states = self._step(level.states, folder[:-1], parts)

    def _look(
        self, prefix: str, states: frozenset[int], outside: bool, parts: tuple[str, ...]
    ) -> _Level | Unreadable | None:
        """The names in a folder; None for one that is seen elsewhere."""
        path = os.path.join(self.root, prefix)
        try:
            if prefix and os.path.islink(path[:-1]):
                outside = True
                if not self._leads_out(path[:-1]):
                    return None
            if outside and not self._first_time(path):
                return None
            with os.scandir(path) as entries:
                names = [name for entry in entries if (name := self._take(entry, states, parts))]
        except OSError as error:
            message = f"{key_of(path)}: the folder cannot be read: {error.strerror}"
            return Unreadable(prefix or "/", message, "Check its permissions.")
        names.sort(reverse=True)
        return _Level(prefix, names, states, outside)

    def _take(self, entry: "os.DirEntry[str]", states: frozenset[int], parts: tuple[str, ...]) -> str | None:
        name = entry.name
        if name in _NOT_THEIRS:
            return None
        after = self._step(states, name, parts)
        if not after:
            return None
        if _is(entry.is_dir):
            return name + "/" if any(state < len(parts) for state in after) else None
        if len(parts) not in after:
            return None
        kind = extension_of(name)
        if self.extensions is not None and kind not in self.extensions:
            self.skipped[kind or "without extension"] += 1
            return None
        # A link that leads nowhere is a picture that is missing, and listed so when it is read.
        if _is(entry.is_file) or entry.is_symlink():
            return name
        self.skipped["no ordinary file"] += 1
        return None

    def _step(self, states: frozenset[int], name: str, parts: tuple[str, ...]) -> frozenset[int]:
        """Where a path is in ``parts`` after ``name``: nowhere if that is hidden and not meant."""
        if parts is ALL:
            return states if self.hidden or name[0] != "." else frozenset()
        after = set()
        for state in states:
            if state == len(parts):
                continue
            part = parts[state]
            if name.startswith(".") and not (self.hidden or part.startswith(".")):
                continue
            if part == "**":
                after.add(state)
            elif part == "*" or fnmatch.fnmatchcase(name, part):
                after.add(state + 1)
        return _reach(frozenset(after), parts)

    def _leads_out(self, link: str) -> bool:
        """Whether what ``link`` leads to is found through it alone: neither in the root nor around it."""
        there = os.path.join(os.path.realpath(link), "")
        here = os.path.join(os.path.realpath(self.root), "")
        if here.startswith(there) and here != there:
            self.around += 1
        return not here.startswith(there) and not there.startswith(here)

    def _first_time(self, path: str) -> bool:
        found = os.stat(path)
        if (found.st_dev, found.st_ino) in self.entered:
            return False
        self.entered.add((found.st_dev, found.st_ino))
        return True


def _is(asked: Callable[[], bool]) -> bool:
    """What a directory entry says of itself; of a link that leads in a circle the system says nothing."""
    try:
        return asked()
    except OSError:
        return False


def _reach(states: frozenset[int], parts: tuple[str, ...]) -> frozenset[int]:
    """``states`` are places in ``parts`` that a path has come to; ``**`` may also be no folder at all."""
    reached = set(states)
    for state in sorted(states):
        while state < len(parts) and parts[state] == "**":
            state += 1
            reached.add(state)
    return frozenset(reached)


def check_folder(root: str) -> None:
    """Raises ``PictureNotFound`` for a folder that cannot be read, before anything is loaded for it."""
    try:
        if not stat.S_ISDIR(os.stat(root).st_mode):
            raise PictureNotFound(f"{key_of(root)} is no folder", "Name a folder of pictures.")
        os.scandir(root).close()
    except OSError as error:
        raise PictureNotFound(
            f"{key_of(root)}: the folder cannot be read: {error.strerror}", "Check its name and permissions."
        ) from None
