"""Which pictures the tools of MCP may read: files below named folders, and public URLs if allowed."""

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from vlfit.api.conversation import ImagePart
from vlfit.errors import PictureError, PictureNotFound, PictureTooLarge, PrivateAddress, UsageError
from vlfit.tasks.fetch import MAX_BYTES
from vlfit.tasks.files import FilePart, media_part, split_pages
from vlfit.tasks.pictures import load_picture, read_file_url

_MAX_NAME = 4_096
_SHOWN = 200  # characters of a name in an error


class NotAllowed(PictureError):
    """A file outside the folders that were named, or a URL where none is allowed."""

    http_status = 403
    code = "not_allowed"


@dataclass(frozen=True)
class AllowedFiles:
    """What tools may read.

    ``roots``: absolute folders without links in them (``open_roots``); ``urls``: public URLs, too.
    """

    roots: tuple[Path, ...] = ()
    urls: bool = False

    def load(self, name: str) -> FilePart:
        """The picture, PDF (``report.pdf#2-5``) or video ``name``: a path, a ``file:`` or ``data:`` URL, or a
        public URL.

        A relative path is looked for in each root. Nothing is decoded. Raises ``NotAllowed`` for what is
        outside, also by a link, whether it exists or not; else as ``load_picture``.
        """
        if name[:5].lower() == "data:":
            return media_part(load_picture(name, allow_private=False, any_file=True))
        if name[:8].lower().startswith(("http://", "https://")):
            if not self.urls:
                raise NotAllowed("URLs are not allowed here", "Start it with --allow-urls, or name a file.")
            try:
                return media_part(load_picture(name, allow_private=False, any_file=True))
            except PrivateAddress as error:
                raise NotAllowed(error.message, "Name a file below a root.") from error
        bare, ranges = split_pages(_path_of_url(name) if name[:5].lower() == "file:" else name)
        path, root = self._find(bare)
        return media_part(ImagePart(self._read(path, root, name), path.name), ranges=ranges)

    def _read(self, path: Path, root: Path, name: str) -> bytes:
        """The bytes of ``path`` below ``root``; errors call it ``name``, as the client did."""
        url = path.as_uri()
        try:
            return read_file_url(url, root, MAX_BYTES)
        except PrivateAddress:  # a link that has appeared meanwhile
            raise self._outside(name) from None
        except PictureNotFound as error:
            reason = error.message.removeprefix(url[:120]).removeprefix(":").strip()
            raise PictureNotFound(
                f"{name[:_SHOWN]}: {reason}", "Name a picture, PDF or video in a folder that may be read."
            ) from None
        except PictureTooLarge as error:
            raise PictureTooLarge(error.message.replace(url[:120], name[:_SHOWN]), error.hint) from None

    def folder(self, name: str | None) -> Path:
        """The folder ``name`` below a root; None: the first root. Raises ``NotAllowed``."""
        if name is None:
            if not self.roots:
                raise self._outside("a folder")
            return self.roots[0]
        return self._find(name)[0]

    def _find(self, name: str) -> tuple[Path, Path]:
        """The path ``name`` without links, and its root."""
        if not name or len(name) > _MAX_NAME or not _is_writable(name):
            raise NotAllowed(
                "the name of a file is empty, too long or has characters that no name has", "Name a picture."
            )
        # Absolute names are the same below every root.
        candidates = [(Path(os.path.realpath(root / os.path.expanduser(name))), root) for root in self.roots]
        inside = [(path, root) for path, _ in candidates for root in self.roots if path.is_relative_to(root)]
        found = next((each for each in inside if os.path.exists(each[0])), None)  # False for too long a name
        if found is None:
            if inside:
                return inside[0]  # reading it says that it is missing
            raise self._outside(name)
        return found

    def _outside(self, name: str) -> NotAllowed:
        roots = ", ".join(map(str, self.roots)) or "none"
        return NotAllowed(
            f"{name[:_SHOWN]} is not in a folder that may be read", f"Folders that may be read: {roots}."
        )


def _is_writable(name: str) -> bool:
    """Whether the system can write ``name``: no NUL, and no lone surrogate, which JSON may have."""
    try:
        return b"\0" not in os.fsencode(name)
    except UnicodeEncodeError:
        return False


def _path_of_url(url: str) -> str:
    """The path that ``file:///...`` names, pages included. Raises ``NotAllowed`` for another computer's."""
    with suppress(ValueError):
        parts = urlsplit(url)
        if parts.netloc.lower() in ("", "localhost") and parts.path.startswith("/") and not parts.query:
            return unquote(parts.path) + (f"#{parts.fragment}" if parts.fragment else "")
    raise NotAllowed(f"{url[:_SHOWN]} names no file of this computer", "Write file:///folder/name.")


def open_roots(folders: Sequence[Path]) -> tuple[Path, ...]:
    """``folders`` as absolute paths without links. Raises ``UsageError`` for one that is no folder."""
    roots = []
    for folder in folders:
        root = Path(os.path.realpath(folder.expanduser()))
        if not root.is_dir():
            raise UsageError(f"--root {folder} is not a folder", "Name a folder of pictures.")
        roots.append(root)
    return tuple(dict.fromkeys(roots))
