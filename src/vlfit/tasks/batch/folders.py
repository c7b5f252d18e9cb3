"""Source of the pictures in a folder tree, or of those that match a glob (``photos/**/cat-*.jpg``).

Files are chosen by name alone and sorted within each folder; links are followed without going in circles.
Only the names in the folders on the current path are in memory.
"""

import fnmatch
import os
import stat
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from vlfit.errors import PictureNotFound
from vlfit.images.file_kinds import HEIF_EXTENSIONS, PICTURE_EXTENSIONS
from vlfit.tasks.batch.items import Item, Unreadable, extension_of, key_of
from vlfit.tasks.batch.media_items import ANIMATION_EXTENSIONS, file_items
from vlfit.tasks.files import MediaOptions, kind_by_extension
from vlfit.units import counted

DEFAULT_MEDIA = MediaOptions()
ANY_PATH = ("**",)
# Thumbnails and leftovers of Synology, macOS and Windows: treated as hidden.
_SYSTEM_FOLDERS = frozenset(("@eaDir", "__MACOSX", "$RECYCLE.BIN"))
_GLOB_CHARACTERS = frozenset("*?[")


class FolderSource:
    """A ``Source`` of the pictures below the folder ``root``, chosen by file name. Keys are relative to it.

    ``pattern``: glob parts that a path below ``root`` must match, ``**`` for any number of folders; None: any
    path. ``extensions`` to take: lower case, with the dot; None: any. ``hidden``: include names that start
    with a dot. ``media``: what to take of videos and animations.

    A link to a folder outside ``root`` is followed, each such folder once; links to folders inside are left
    out, as their pictures are reached anyway.
    """

    def __init__(
        self,
        root: str,
        pattern: tuple[str, ...] | None = None,
        extensions: frozenset[str] | None = PICTURE_EXTENSIONS,
        hidden: bool = False,
        media: MediaOptions = DEFAULT_MEDIA,
    ) -> None:
        self.root = root
        self.pattern = pattern
        self.extensions = extensions
        self.hidden = hidden
        self.media = media
        self._skipped: Counter[str] = Counter()
        self._parent_links = 0

    def __iter__(self) -> Iterator[Item]:
        home = os.path.join(self.root, "")
        base = os.path.join(str(Path(os.getcwd(), self.root)), "")
        for name in self.names():
            if isinstance(name, Unreadable):
                yield Item(key_of(name.name), name.read)
            else:
                yield from file_items(key_of(name), base + name, Path(home + name), self.media)

    def names(self) -> Iterator[str | Unreadable]:
        """Paths of the chosen files relative to ``root``, sorted within each folder.

        A folder that cannot be read is an ``Unreadable`` among them.
        """
        walk = _FolderWalk(self.root, self.extensions, self.hidden)
        try:
            yield from walk.names(self.pattern)
        finally:
            self._skipped, self._parent_links = walk.skipped, walk.parent_links

    def count(self) -> int | None:
        """Number of items, by walking the whole tree again.

        None if a file may be several items: a PDF, or a video or animation with ``media.at``.
        """
        total = 0
        for name in self.names():
            extension = "" if isinstance(name, Unreadable) else extension_of(name)
            kind = kind_by_extension(extension)
            moves = kind == "video" or extension in ANIMATION_EXTENSIONS
            if kind == "pdf" or (moves and self.media.at):
                return None
            total += 1
        return total

    def notes(self) -> list[str]:
        """What the last iteration left out: files, counted by extension, and links to parent folders.

        Empty if nothing was left out.
        """
        notes = []
        if self._parent_links:
            links = counted(self._parent_links, "link")
            notes.append(f"{key_of(self.root)}: left out {links} to parent folders")
        if not self._skipped:
            return notes
        kinds = ", ".join(f"{kind} {count:,}" for kind, count in self._skipped.most_common(8))
        more = ", ..." if len(self._skipped) > 8 else ""
        total = self._skipped.total()
        files = counted(total, "file that is not a picture", "files that are not pictures")
        kinds_left = {kind_by_extension(extension) for extension in self._skipped} - {None}
        taken = ",".join(sorted(kind for kind in kinds_left if kind))
        advice = f"; --include {taken} takes them" if taken else ""
        if any(extension in HEIF_EXTENSIONS for extension in self._skipped):
            advice += "; pip install 'vlfit[heif]' adds HEIC"
        notes.append(f"{key_of(self.root)}: left out {files}, by name ({kinds}{more}){advice}")
        return notes


def split_glob(pattern: str) -> tuple[str, tuple[str, ...]]:
    """Split a glob into the folder before its first wildcard and the remaining parts.

    ``a/b/**/*.jpg`` gives ``a/b`` and ``("**", "*.jpg")``; ``*.jpg`` gives ``.`` and ``("*.jpg",)``. ``~`` is
    expanded.
    """
    parts = os.path.expanduser(pattern).replace(os.sep, "/").split("/")
    fixed = next((index for index, part in enumerate(parts) if _GLOB_CHARACTERS & set(part)), len(parts) - 1)
    root = "/".join(parts[:fixed])
    return root or ("/" if fixed else "."), tuple(part for part in parts[fixed:] if part not in ("", "."))


@dataclass(slots=True)
class _OpenFolder:
    """A folder on the path of a walk. ``names``: what is left, in reverse order; folders end in ``/``."""

    prefix: str
    names: list[str]
    states: frozenset[int]
    outside: bool


@dataclass(slots=True)
class _FolderWalk:
    root: str
    extensions: frozenset[str] | None
    hidden: bool
    skipped: Counter[str] = field(default_factory=Counter)
    parent_links: int = 0  # links to folders that contain the root, which are not followed
    # Device and inode of the folders outside the root that were entered through links.
    entered: set[tuple[int, int]] = field(default_factory=set)

    def names(self, pattern: tuple[str, ...] | None) -> Iterator[str | Unreadable]:
        """Paths relative to the root. Not recursive: folders may be nested deeper than Python's limit."""
        parts = pattern if pattern is not None else ANY_PATH
        stack: list[_OpenFolder] = []
        name, states, outside = "", _skip_any_depth(frozenset((0,)), parts), False
        while True:
            listed = self._list_folder(name, states, outside, parts)
            if isinstance(listed, _OpenFolder):
                stack.append(listed)
            elif listed is not None:
                yield listed
            while stack and (not stack[-1].names or not stack[-1].names[-1].endswith("/")):
                if stack[-1].names:
                    yield stack[-1].prefix + stack[-1].names.pop()
                else:
                    stack.pop()
            if not stack:
                return
            listed = stack[-1]
            folder = listed.names.pop()
            name, outside = listed.prefix + folder, listed.outside
            states = self._advance(listed.states, folder[:-1], parts)

    def _list_folder(
        self, prefix: str, states: frozenset[int], outside: bool, parts: tuple[str, ...]
    ) -> _OpenFolder | Unreadable | None:
        """Read a folder; None if it is reached another way."""
        path = os.path.join(self.root, prefix)
        try:
            if prefix and os.path.islink(path[:-1]):
                outside = True
                if not self._leads_outside(path[:-1]):
                    return None
            if outside and not self._mark_entered(path):
                return None
            with os.scandir(path) as entries:
                names = [name for entry in entries if (name := self._matched_name(entry, states, parts))]
        except OSError as error:
            message = f"{key_of(path)}: the folder cannot be read: {error.strerror}"
            return Unreadable(prefix or "/", message, "Check its permissions.")
        names.sort(reverse=True)
        return _OpenFolder(prefix, names, states, outside)

    def _matched_name(
        self, entry: "os.DirEntry[str]", states: frozenset[int], parts: tuple[str, ...]
    ) -> str | None:
        name = entry.name
        if name in _SYSTEM_FOLDERS:
            return None
        after = self._advance(states, name, parts)
        if not after:
            return None
        if _entry_is(entry.is_dir):
            return name + "/" if any(state < len(parts) for state in after) else None
        if len(parts) not in after:
            return None
        kind = extension_of(name)
        if self.extensions is not None and kind not in self.extensions:
            self.skipped[kind or "without extension"] += 1
            return None
        # A dangling link is an item too: reading it fails, so it is listed as missing.
        if _entry_is(entry.is_file) or entry.is_symlink():
            return name
        self.skipped["not a regular file"] += 1
        return None

    def _advance(self, states: frozenset[int], name: str, parts: tuple[str, ...]) -> frozenset[int]:
        """States of the pattern after ``name``; none if it is hidden and hidden names are not matched."""
        if parts is ANY_PATH:
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
        return _skip_any_depth(frozenset(after), parts)

    def _leads_outside(self, link: str) -> bool:
        """Whether the target of ``link`` is neither inside the root nor contains it."""
        target = os.path.join(os.path.realpath(link), "")
        root = os.path.join(os.path.realpath(self.root), "")
        if root.startswith(target) and root != target:
            self.parent_links += 1
        return not root.startswith(target) and not target.startswith(root)

    def _mark_entered(self, path: str) -> bool:
        found = os.stat(path)
        if (found.st_dev, found.st_ino) in self.entered:
            return False
        self.entered.add((found.st_dev, found.st_ino))
        return True


def _entry_is(check: Callable[[], bool]) -> bool:
    """``check`` of a directory entry; False if the system cannot tell, as for circular links."""
    try:
        return check()
    except OSError:
        return False


def _skip_any_depth(states: frozenset[int], parts: tuple[str, ...]) -> frozenset[int]:
    """``states`` (indices into ``parts``) and those behind each ``**``, which also matches no folder."""
    expanded = set(states)
    for state in sorted(states):
        while state < len(parts) and parts[state] == "**":
            state += 1
            expanded.add(state)
    return frozenset(expanded)


def check_folder(root: str) -> None:
    """Raise ``PictureNotFound`` if ``root`` is not a readable folder. Call it before loading a model."""
    try:
        if not stat.S_ISDIR(os.stat(root).st_mode):
            raise PictureNotFound(f"{key_of(root)} is not a folder", "Name a folder of pictures.")
        os.scandir(root).close()
    except OSError as error:
        raise PictureNotFound(
            f"{key_of(root)}: the folder cannot be read: {error.strerror}", "Check its name and permissions."
        ) from None
