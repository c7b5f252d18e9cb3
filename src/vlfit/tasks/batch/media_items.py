"""Items of a batch from PDF documents, videos, camera RAW photos and animations.

Each page of a document is an item, ``report.pdf#3``. A video is one item, a clip; or one for each of the
times ``MediaOptions.at``, a picture.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from vlfit.api.conversation import ImagePart, VideoPart
from vlfit.errors import NotAPicture, UsageError, VlfitError
from vlfit.images.media_kinds import MAX_PAGES, MediaKind, check_installed, is_animation, media_kind_of
from vlfit.tasks.batch.items import FileBytes, Item, Unreadable, extension_of, key_of
from vlfit.tasks.files import (
    MediaFile,
    MediaOptions,
    format_time,
    kind_by_extension,
    kind_of_file,
    load_file,
    single_picture,
    split_pages,
)

MAX_CLIP_FRAMES = 64
ANIMATION_EXTENSIONS = frozenset((".gif", ".webp", ".png", ".apng", ".avif"))


@dataclass(frozen=True, slots=True)
class PageBytes:
    """Reads page ``number`` of a PDF, from 1; 0: its only page. ``name``: the file's absolute path."""

    name: str
    number: int

    def read(self) -> bytes:
        """Render the page as the bytes of a PNG or JPEG file.

        Raises ``PictureError``, also for ``number`` 0 if the document has several pages: one item fails then,
        and the batch goes on.
        """
        document = MediaFile("pdf", Path(self.name), key_of(self.name))
        if self.number:
            document = replace(document, ranges=((self.number, self.number),))
        try:
            return bytes(single_picture(document).data)
        except UsageError as error:
            raise NotAPicture(error.message, error.hint) from error


@dataclass(frozen=True, slots=True)
class FrameBytes:
    """Reads the frame of a video or animation at ``seconds``. ``name``: the file's absolute path."""

    name: str
    seconds: float

    def read(self) -> bytes:
        """Decode the frame and encode it as the bytes of a JPEG file. Raises ``PictureError``."""
        options = MediaOptions(at=(self.seconds,), clip=True)
        if extension_of(self.name) in ANIMATION_EXTENSIONS:
            return bytes(single_picture(load_file(self.name, options)).data)
        video = MediaFile("video", Path(self.name), key_of(self.name), options=options)
        return bytes(video.pictures()[0].data)


@dataclass(frozen=True, slots=True)
class ClipFrames:
    """Reads a video, or with ``options.clip`` an animated picture. ``name``: the file's absolute path."""

    name: str
    options: MediaOptions

    def read(self) -> bytes | VideoPart:
        """A clip of at most ``MAX_CLIP_FRAMES`` frames; for a picture that is not animated, the file's bytes.

        Raises ``PictureError``.
        """
        part = load_file(self.name, self.options)
        if isinstance(part, MediaFile):
            return part.clip(MAX_CLIP_FRAMES)
        return part if isinstance(part, VideoPart) else bytes(part.data)


@dataclass(frozen=True, slots=True)
class NamedAsPicture:
    """Reads a file that is a picture by its name. What is in it counts: it may be a PDF that is called .jpg.

    ``name``: the file's absolute path.
    """

    name: str
    options: MediaOptions

    def read(self) -> bytes | ImagePart | VideoPart:
        """The file's bytes; of another kind of file what ``vlfit caption`` takes: a page, clip or preview.

        Raises ``PictureError``, also for a PDF of several pages and a video of which several times are
        wanted, as one item cannot hold them.
        """
        data = FileBytes(self.name).read()
        kind = media_kind_of(data)
        if kind is None:
            return data
        try:
            part = load_file(self.name, self.options)
            clip = kind == "video" and not self.options.at
            return (
                part.clip(MAX_CLIP_FRAMES) if clip and isinstance(part, MediaFile) else single_picture(part)
            )
        except UsageError as error:
            what, own = ("PDF document of several pages", ".pdf") if kind == "pdf" else ("video", ".mp4")
            raise NotAPicture(
                f"a {what} whose name is that of a picture: rename it so that it ends in {own}", error.message
            ) from error


@dataclass(frozen=True, slots=True)
class PreviewBytes:
    """Reads the embedded preview of a camera RAW photo. ``name``: the file's absolute path."""

    name: str

    def read(self) -> ImagePart:
        """The preview, a JPEG file, with a note that it is a preview. Raises ``PictureError``."""
        return single_picture(load_file(self.name))


def file_items(
    key: str, name: str, path: Path, options: MediaOptions, kind: MediaKind | None = None
) -> Iterator[Item]:
    """The items of a local file of ``kind``; None: by its extension.

    One for each page of a PDF, or for each time in ``options.at`` of a video; else one, with ``path`` as
    ``Item.path``. ``name``: the file's absolute path, which is read. ``key``: the item's key; of pages and
    times, the start of it. A document that cannot be opened is one item that fails.
    """
    kind = kind or kind_by_extension(extension_of(name))
    if kind == "pdf":
        yield from page_items(key, name, ((1, 0),))
    elif options.at and (kind == "video" or _is_animation(name)):
        for seconds in options.at:
            yield Item(f"{key} at {format_time(seconds)}", FrameBytes(name, seconds).read)
    elif kind == "video" or (options.clip and extension_of(name) in ANIMATION_EXTENSIONS):
        yield Item(key, ClipFrames(name, options).read, path)
    elif kind == "raw":
        yield Item(key, PreviewBytes(name).read, path)
    else:
        yield Item(key, NamedAsPicture(name, options).read, path)


def _is_animation(name: str) -> bool:
    if extension_of(name) not in ANIMATION_EXTENSIONS:
        return False
    try:
        return is_animation(FileBytes(name).read())
    except VlfitError:
        return False  # the item fails when it is read


def page_items(key: str, name: str, ranges: tuple[tuple[int, int], ...]) -> Iterator[Item]:
    """An item for each page in ``ranges`` (see ``MediaFile``), with the key ``{key}#3``. Opens the document.

    ``name``: the document's absolute path. Pages after the first ``MAX_PAGES`` are left out. One item that
    fails if the document cannot be opened, or lacks a page.
    """
    try:
        numbers = MediaFile("pdf", Path(name), key_of(name), ranges).page_numbers()
    except VlfitError as error:
        yield Item(key, Unreadable(key, error.message, error.hint).read)
        return
    for number in numbers[:MAX_PAGES]:
        yield Item(f"{key}#{number}", PageBytes(name, number).read)


def named_items(text: str, options: MediaOptions) -> list[Item] | None:
    """The items of a document, video or RAW photo that the user named as ``text`` (``report.pdf#3-5``).

    None if ``text`` is a URL, or names no such file, neither by its extension nor by its first bytes. With
    ``options.clip`` also the items of a picture that may be animated, by its extension.
    """
    bare, ranges = split_pages(text)
    kind = kind_by_extension(extension_of(bare if ranges else text))
    if "://" in text[:16] or text[:5].lower() == "data:":
        return None
    if kind is None:
        path = Path(text).expanduser()
        with suppress(OSError, ValueError):  # reading it raises the reason
            kind = kind_of_file(path) if path.is_file() else None
    moves = options.clip and extension_of(text) in ANIMATION_EXTENSIONS
    if kind is None and not moves:
        return None
    name = str(Path(Path.cwd(), Path(bare if ranges else text).expanduser()))
    key = key_of(str(Path(bare if ranges else text)))
    if ranges:
        return list(page_items(key, name, ranges))
    return list(file_items(key, name, Path(text), options, kind))


def check_kinds_installed(kinds: frozenset[MediaKind]) -> None:
    """Raise ``NotAPicture``, naming the extra, if a package for one of ``kinds`` is not installed."""
    for kind in sorted(kinds):
        check_installed(kind, f"--include {kind}")
