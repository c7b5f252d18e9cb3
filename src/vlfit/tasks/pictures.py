"""Load the bytes of a picture from a path, a URL, standard input, bytes, or a Pillow image.

Pictures are not decoded here; only their first bytes are checked. Servers read files only below the folder of
``--allow-files``: neither ``..`` nor a link leads out of it, not even a link created between check and read.
"""

import base64
import binascii
import glob
import os
import shlex
import stat
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO
from urllib.parse import unquote, unquote_to_bytes, urlsplit

from vlfit.api.conversation import ImagePart
from vlfit.errors import (
    NotAPicture,
    PictureNotFound,
    PictureTooLarge,
    PrivateAddress,
    UsageError,
    raise_if_out_of_files,
)
from vlfit.images.file_kinds import PICTURE_EXTENSIONS, hint_for, kind_of, rules_out_picture
from vlfit.images.media_kinds import MEDIA_EXTENSIONS, media_kind_of
from vlfit.images.spooled_file import EncodedFile, read_at
from vlfit.units import MIB

if TYPE_CHECKING:
    from PIL import Image


# Enough for an uncompressed TIFF of a large camera.
MAX_FILE_BYTES = 512 * MIB
_MOST_NAMES = 10_000  # of a folder, to look for one that was meant
_READ_BYTES = MIB // 16  # read size for pipes, whose length is unknown
_BASE64_PIECE = 2**19  # characters, a multiple of 4
_HEAD_BYTES = 4096  # more than its type is known from
_PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")


@dataclass(frozen=True, slots=True, eq=False)
class InlineFile:
    """The file of a ``data:`` URL, decoded while the request arrived."""

    data: EncodedFile


def load_picture(
    source: "str | Path | bytes | InlineFile | Image.Image",
    *,
    allow_private: bool = True,
    files: Path | None = None,
    timeout_s: float = 20.0,
    any_file: bool = False,
) -> ImagePart:
    """Read or download a picture, without decoding it. Starts a decode worker in the background.

    ``source``: a path, an ``http(s):`` or ``data:`` URL, ``-`` (standard input), encoded bytes, a
    ``InlineFile``, or a Pillow image. ``allow_private=False``, for servers, refuses paths, standard input,
    and URLs that lead into a private network. ``files``, for servers: the folder below which ``file:`` URLs
    are read; None: ``file:`` URLs are refused. ``timeout_s``: seconds for a whole download. ``any_file``:
    also take PDF documents, videos and camera RAW photos, whose bytes are returned as an ``ImagePart`` too.

    Raises ``PictureNotFound``, ``NotAPicture``, ``PictureTooLarge``, ``PrivateAddress``, or ``UsageError``
    for a source of another type. Only the first bytes are checked: damage shows when decoding.
    """
    from vlfit.images.decode_pool import decode_pool  # here, as commands without pictures import this module

    decode_pool().start()  # what is loaded is decoded next
    if isinstance(source, bytes):
        return make_image_part(source, "picture", any_file=any_file)
    if isinstance(source, InlineFile):
        return make_image_part(source.data, "data: URL", any_file=any_file)
    if isinstance(source, Path):
        source = str(source)
    if not isinstance(source, str):
        return _from_pillow(source)
    if not source.strip():
        raise PictureNotFound(
            "the name of a picture is empty", "Name a file, a URL, or - for standard input."
        )
    scheme = source[:8].lower()
    if scheme.startswith("data:"):
        return make_image_part(_from_data_url(source), source_label(source), any_file=any_file)
    if scheme.startswith(("http://", "https://")):
        from vlfit.tasks.fetch import fetch  # imports an HTTP client, which no other picture needs

        data = fetch(source, allow_private=allow_private, timeout_s=timeout_s, any_file=any_file)
        return ImagePart(data, source_label(source))
    if files is not None and scheme.startswith("file:"):
        return make_image_part(
            read_file_url(source, files, MAX_FILE_BYTES), source_label(source), any_file=any_file
        )
    if not allow_private:
        raise PrivateAddress(
            f"{_short(source)!r} is not an http:, https: or data: URL, and this server does not read files",
            "Send the picture itself as data:image/jpeg;base64,... or give an https: address.",
        )
    if source == "-":
        return make_image_part(_from_stdin(), "standard input", any_file=any_file)
    if "://" in source[:16] or scheme.startswith("file:"):
        raise PictureNotFound(
            f"{_short(source)}: this kind of URL is not supported (http:, https: and data: are)",
            "Name a file by its plain path.",
        )
    return make_image_part(_from_file(source), _short(source), any_file=any_file)


def source_label(source: str) -> str:
    """``source`` as errors name it: a URL without credentials and query, a ``data:`` URL as ``data: URL``."""
    scheme = source[:8].lower()
    if scheme.startswith("data:"):
        return "data: URL"
    if not scheme.startswith(("http://", "https://")):
        return source
    from vlfit.tasks.fetch import url_label

    return url_label(source)


def expand_globs(patterns: list[str]) -> list[str]:
    """Replace each glob (``'photos/**/*.jpg'``) by the sorted names of its files; other names, URLs and ``-``
    stay.

    Raises ``PictureNotFound`` for a glob that matches no file. A name that exists, such as ``a[1].jpg``, is
    no glob.
    """
    names: list[str] = []
    for pattern in patterns:
        # In URLs ? and * have another meaning.
        is_url = "://" in pattern[:16] or pattern[:5].lower() == "data:"
        if is_url or not glob.has_magic(pattern) or _exists(pattern):
            names.append(pattern)
            continue
        expanded = str(Path(pattern).expanduser())
        found = sorted(name for name in glob.glob(expanded, recursive=True) if not Path(name).is_dir())
        if not found:
            raise PictureNotFound(f"{pattern} matches no file", f"You are in {Path.cwd()}.")
        names += found
    return names


def _from_stdin() -> bytes:
    if sys.stdin is None or sys.stdin.isatty():
        raise PictureNotFound(
            "- means standard input, but nothing is piped into it", "Write: vlfit caption - < photo.jpg"
        )
    return _read(sys.stdin.buffer, "standard input")


def read_file(path: str | Path, label: str) -> bytes:
    """The bytes of the file ``path``, which errors call ``label``.

    Raises ``PictureNotFound`` if it cannot be read, ``PictureTooLarge`` above ``MAX_FILE_BYTES``.
    """
    try:
        with open(path, "rb") as file:
            return _read(file, label, os.fstat(file.fileno()).st_size)
    except FileNotFoundError:
        what, hint = describe_missing(str(path))
    except IsADirectoryError:
        what, hint = "is a folder", _how_to_name_pictures_in(Path(path))
    except OSError as error:
        what, hint = f"cannot be read: {error.strerror}", "Check its name and permissions."
    except ValueError as error:  # a NUL in the name
        what, hint = f"is not a file name: {error}", "Check its name."
    raise PictureNotFound(f"{label}: {what}", hint)


def _how_to_name_pictures_in(folder: Path) -> str:
    """A hint with the pattern of most of the pictures in ``folder``, and the command for many of them."""
    try:
        with os.scandir(folder) as entries:
            found = [entry for entry in islice(entries, _MOST_NAMES) if entry.name[0] not in "._"]
            has_folders = any(entry.is_dir() for entry in found)
    except OSError as error:
        return f"It cannot be listed: {error.strerror}."
    media = frozenset().union(*MEDIA_EXTENSIONS.values())
    suffixes = Counter(Path(entry.name).suffix for entry in found)
    pictures = Counter({each: n for each, n in suffixes.items() if each.lower() in PICTURE_EXTENSIONS})
    documents = Counter({each: n for each, n in suffixes.items() if each.lower() in media})
    batch = f"vlfit batch {shlex.quote(str(folder))} -o captions.jsonl"
    if not (pictures or documents):
        below = f"; of the folders in it: {batch}" if has_folders else ""
        return f"By the names of its files there is no picture in it{below}."
    suffix = (pictures or documents).most_common(1)[0][0]
    pattern = shlex.quote(str(Path(glob.escape(str(folder))) / f"*{suffix}"))
    return f"Name the pictures in it: {pattern}" + (f"; or all of them: {batch}" if pictures else "") + "."


def describe_missing(name: str, what: str = "no such file") -> tuple[str, str]:
    """Message and hint about the path ``name``, which does not exist: a dangling link, wrong pages, a typo.

    ``what``: the message if nothing better is known. The hint names files of the folder with similar names.
    """
    from difflib import get_close_matches

    path, here = Path(name), f"You are in {Path.cwd()}."
    with suppress(OSError, ValueError):
        if path.is_symlink():
            return f"is a link to {os.readlink(path)}, which does not exist", "Name the file itself."
        bare, mark, pages = name.rpartition("#")
        if mark and Path(bare).is_file():
            if bare.lower().endswith(".pdf"):
                return f"{pages!r} is no page", f"Write {bare}#3, or {bare}#2-5,9 for several."
            return what, f"{bare} is a file, but only PDF documents have pages: leave out #{pages}."
        folder = path.expanduser().parent
        if not folder.is_dir():
            return f"no such folder: {folder}", here
        with os.scandir(folder) as entries:
            names = [entry.name for entry in islice(entries, _MOST_NAMES)]
        by_lower = {each.lower(): each for each in reversed(names)}
        near = [by_lower[each] for each in get_close_matches(path.name.lower(), by_lower, 3, 0.7)]
        if near:
            return what, f"Did you mean {' or '.join(str(path.parent / each) for each in near)}? {here}"
    return what, here


def _from_file(name: str) -> bytes:
    try:
        path = Path(name).expanduser()
    except RuntimeError as error:  # ~ of an unknown user
        raise PictureNotFound(f"{_short(name)}: is not a file name: {error}", "Check its name.") from None
    return read_file(path, _short(name))


def _read(file: BinaryIO, label: str, size: int = 0) -> bytes:
    """Read to the end. ``size``: length of the file; 0 for a pipe.

    Not with ``read(MAX_FILE_BYTES)``: Python allocates that much first, which took longer than reading a
    small file.
    """
    blocks: list[bytes] = []
    total, block_size = 0, (size or _READ_BYTES) + 1
    while size <= MAX_FILE_BYTES:
        blocks.append(file.read(block_size))
        total += len(blocks[-1])
        if total > MAX_FILE_BYTES:
            break
        if len(blocks[-1]) < block_size:
            return b"".join(blocks)
    raise PictureTooLarge(
        f"{label} is larger than {MAX_FILE_BYTES // MIB} MiB", "Scale the picture down first."
    )


def _from_data_url(url: str) -> bytes:
    comma = url.find(",")
    if comma < 0:
        raise NotAPicture("the data: URL has no comma", "Write it as data:image/jpeg;base64,AAAA...")
    is_base64 = url[:comma].lower().rstrip().endswith(";base64")
    if is_base64:
        with suppress(ValueError):
            return _from_strict_base64(url, comma + 1)
    data = unquote_to_bytes(url[comma + 1 :])
    if not is_base64:
        return data
    encoded = b"".join(data.split())
    try:
        # Many clients leave out the padding.
        unpadded = encoded.rstrip(b"=")
        return base64.b64decode(unpadded + b"=" * (-len(unpadded) % 4), validate=True)
    except binascii.Error as error:
        raise NotAPicture(
            f"the data: URL is not valid base64: {error}",
            "Encode the bytes of the file: base64 -w0 photo.jpg",
        ) from error


def _from_strict_base64(text: str, start: int) -> bytes:
    """Decode base64 without escapes, spaces or missing padding; ``ValueError`` for anything else.

    Piece by piece, without a copy of the whole, and the GIL is given away in between: one call for a picture
    of 40 MB would hold it for 0.1 s, and delay the engine's tokens.
    """
    decoded = BytesIO()
    for begin in range(start, len(text), _BASE64_PIECE):
        piece = text[begin : begin + _BASE64_PIECE]
        if begin + _BASE64_PIECE < len(text) and piece.endswith("="):
            raise ValueError("data after padding")
        decoded.write(binascii.a2b_base64(piece, strict_mode=True))
        if begin + _BASE64_PIECE < len(text):
            time.sleep(0)
    return decoded.getvalue()  # not a copy


def _from_pillow(image: object) -> ImagePart:
    """A Pillow image as a lossless file, with its EXIF, so that it is turned upright like any file."""
    from PIL import Image

    if not isinstance(image, Image.Image):
        raise UsageError(
            f"a picture cannot be of type {type(image).__name__}",
            "Give a path, a URL, bytes, or a Pillow image (Image.fromarray makes one of a numpy array).",
        )
    if 0 in image.size:
        raise NotAPicture(f"the Pillow image is {image.width}x{image.height}: it has no pixels")
    buffer = BytesIO()
    try:
        exif = image.getexif()
        if image.mode in _PNG_MODES:
            image.save(buffer, "PNG", compress_level=1, exif=exif)
        else:
            # CMYK, floating point and other modes that PNG does not support.
            image.save(buffer, "TIFF", exif=exif)
    except (OSError, ValueError, KeyError) as error:
        raise NotAPicture(
            f"the Pillow image (mode {image.mode}) cannot be saved: {error}",
            "Convert it: image.convert('RGB')",
        ) from error
    return ImagePart(buffer.getvalue(), "Pillow image")


def make_image_part(data: EncodedFile, label: str, *, any_file: bool = False) -> ImagePart:
    """Check the first bytes of ``data`` and make it a picture, which errors call ``label``. Decodes nothing.

    Raises ``NotAPicture`` if ``data`` is empty, or starts like another kind of file (HTML, ZIP, ...).
    ``any_file``: PDF documents, videos and camera RAW photos are let through.
    """
    kind = kind_of(read_at(data, 0, _HEAD_BYTES))
    if rules_out_picture(kind) and not (any_file and media_kind_of(data)):
        what = "is empty" if kind == "empty" else f"is {kind}, not a picture"
        raise NotAPicture(f"{label} {what}", hint_for(kind))
    return ImagePart(data, label)


def _exists(name: str) -> bool:
    try:
        return Path(name).exists()
    except (OSError, ValueError):
        return False


def _short(name: str) -> str:
    return name if len(name) <= 120 else name[:117] + "..."


# Files that requests to a server may name, below the folder of --allow-files.

_FILE_URL_HINT = (
    "Name a file in the folder that the server was started with (--allow-files), as file:///folder/name."
)


def read_file_url(url: str, folder: Path, max_bytes: int) -> bytes:
    """The bytes of the file that ``url`` (``file:///...``) names, which must be below ``folder``.

    Raises ``PrivateAddress`` for a path outside, existing or not; ``PictureNotFound`` for a file that cannot
    be read or is not a regular file; ``PictureTooLarge`` above ``max_bytes``.
    """
    label = url[:120]
    path = _path_of(url, label)
    try:
        root = folder.resolve(strict=True)
        inside = Path(os.path.realpath(path)).relative_to(root)
    except (ValueError, OSError):
        raise PrivateAddress(
            f"{label} is not in the folder that requests may read from", _FILE_URL_HINT
        ) from None
    try:
        with os.fdopen(_open_below(root, inside), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise PictureNotFound(f"{label} is not a regular file", _FILE_URL_HINT)
            data = file.read(max_bytes + 1)
    except OSError as error:
        raise_if_out_of_files(error)
        raise PictureNotFound(f"{label}: {error.strerror}", _FILE_URL_HINT) from None
    if len(data) > max_bytes:
        raise PictureTooLarge(
            f"{label} is larger than {max_bytes // MIB} MiB", "Scale the picture down first."
        )
    return data


def _path_of(url: str, label: str) -> str:
    with suppress(ValueError):
        parts = urlsplit(url)
        path = unquote(parts.path)
        sound = parts.netloc in ("", "localhost") and path.startswith("/") and "\0" not in path
        if sound and not parts.query and not parts.fragment:
            return path
    raise PrivateAddress(f"{label} is not a file:///path of this server", _FILE_URL_HINT)


def _open_below(root: Path, inside: Path) -> int:
    """A file descriptor of ``root / inside``, without following links, which may have appeared meanwhile.

    Non-blocking, as opening a pipe would wait for its writer.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    current = os.open(root, flags | os.O_DIRECTORY)
    parts = inside.parts
    for index, part in enumerate(parts):
        part_flags = flags if index == len(parts) - 1 else flags | os.O_DIRECTORY
        try:
            following = os.open(part, part_flags, dir_fd=current)
        finally:
            os.close(current)
        current = following
    return current
