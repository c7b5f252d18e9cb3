"""Source of the pictures in a list: a text file with a path or URL per line, or JSONL with further fields.

A line that names no picture becomes an item that fails, so that it is listed among the failures.
"""

import io
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, AnyStr, cast

from vlfit.errors import UsageError
from vlfit.tasks.batch.items import Item, KeySet, Unreadable, UrlBytes, extension_of, key_of
from vlfit.tasks.batch.media_items import ClipFrames, NamedAsPicture, PageBytes, PreviewBytes
from vlfit.tasks.files import MediaOptions, kind_by_extension, split_pages
from vlfit.units import MIB, counted

PICTURE_FIELDS = ("picture", "image", "url", "image_url", "path", "image_path", "file_name")
KEY_FIELDS = ("key", "id")
# Base64 of the largest file that is fetched (64 MiB) takes four thirds of it.
_MAX_LINE_BYTES = 96 * MIB
_BLOCK = 2**16


def make_item(text: str, folder: str, *, allow_private: bool) -> Item:
    """The item for ``text``: a path (absolute, or relative to ``folder``), or an ``http(s):`` or ``data:``
    URL.

    Its key is ``text`` without ``./``, and of a URL without credentials and fragment; for a ``data:`` URL,
    ``data: URL``. Other kinds of URL become an item that fails. A PDF must name one page (``a.pdf#3``) or
    have only one. ``allow_private``: URLs may lead into private networks.
    """
    scheme = text[:8].lower()
    if scheme.startswith(("http://", "https://")):
        return Item(key_of(_bare_url(text)), UrlBytes(text, allow_private).read)
    if scheme.startswith("data:"):
        return Item("data: URL", UrlBytes(text).read)
    if "://" in text[:16] or scheme.startswith("file:"):
        hint = "Give a file by its plain path."
        short = key_of(text[:120])
        problem = Unreadable(short, f"{short}: of URLs, http:, https: and data: are read", hint)
        return Item(short, problem.read)
    bare, ranges = split_pages(text)
    path = os.path.join(folder, os.path.expanduser(bare if ranges else text))
    absolute = str(Path(os.getcwd(), path))
    kind = kind_by_extension(extension_of(path))
    if kind == "pdf" and all(first == last for first, last in ranges) and len(ranges) <= 1:
        return Item(key_of(str(Path(text))), PageBytes(absolute, ranges[0][0] if ranges else 0).read)
    if kind == "video":
        return Item(key_of(str(Path(text))), ClipFrames(absolute, MediaOptions()).read, Path(path))
    if kind == "raw":
        return Item(key_of(str(Path(text))), PreviewBytes(absolute).read, Path(path))
    # Not normpath: after a symbolic link, .. is another folder than it seems.
    return Item(key_of(str(Path(text))), NamedAsPicture(absolute, MediaOptions()).read, Path(path))


@dataclass(slots=True)
class ListFileSource:
    """A ``Source`` of the pictures in a list. ``name``: the file, or ``-`` for standard input, read only
    once.

    One path or URL per line, in UTF-8 (other bytes are kept) or UTF-16 with BOM. Empty lines and lines
    starting with ``#`` are skipped. If the list contains NULs, as from ``find -print0``, they separate names
    instead of newlines. Lines starting with ``{`` are JSON objects: the picture in one of ``PICTURE_FIELDS``,
    its key in one of ``KEY_FIELDS`` if any, all other fields in ``Item.extra``.

    A line that repeats a picture is left out, unless it has other fields; a key that occurred before gets
    ``#line N`` added. ``allow_private``: URLs may lead into private networks. Iterating raises ``UsageError``
    if the list cannot be read.
    """

    name: str
    allow_private: bool = False
    _repeated: int = 0
    _same_key: int = 0
    _stdin_read: bool = False

    def __iter__(self) -> Iterator[Item]:
        folder = os.path.dirname(self.name) if self.name != "-" else ""
        seen = KeySet()
        # Key and picture of JSONL lines, where the key may differ from the picture's name.
        pairs = KeySet()
        self._repeated = self._same_key = 0
        with self._open() as opened:
            for number, text in _numbered_lines(cast(io.BufferedReader, opened)):
                pair = ""
                if isinstance(text, Unreadable):
                    item = Item(f"line {number}", text.read)
                elif text.startswith("{"):
                    item, picture = self._from_json(text, folder, number)
                    pair = f"{item.key}\0{picture}"
                else:
                    item = make_item(text, folder, allow_private=self.allow_private)
                    if len(pairs):
                        pair = f"{item.key}\0{item.key}"
                if item.key in seen:
                    another = bool(pair) and pair not in pairs
                    self._same_key += another
                    self._repeated += not another
                    # Skip repeated pictures, unless the line has fields of its own.
                    if not item.extra and not another:
                        continue
                    item = Item(f"{item.key}#line {number}", item.read, item.path, item.extra)
                seen.add(item.key)
                if pair:
                    pairs.add(pair)
                yield item

    def count(self) -> int | None:
        """Number of items, by reading the whole list; None for standard input."""
        return None if self.name == "-" else sum(1 for _ in self)

    def notes(self) -> list[str]:
        """Sentences: how many lines of the last iteration repeated an earlier line's picture or key."""
        notes = []
        if self._repeated:
            lines = counted(self._repeated, "line names", "lines name")
            notes.append(f"{self._label()}: {lines} a picture of an earlier line")
        if self._same_key:
            lines = counted(self._same_key, "line gives", "lines give")
            notes.append(
                f"{self._label()}: {lines} another picture the key of an earlier line; such keys end in"
                ' "#line" and its number'
            )
        return notes

    def _open(self) -> Any:
        if self.name != "-":
            try:
                return open(self.name, "rb")
            except OSError as error:
                raise UsageError(
                    f"the list {self._label()} cannot be read: {error.strerror}", "Check its name."
                ) from None
        if self._stdin_read:
            raise UsageError("standard input can only be read once", "Write the list to a file.")
        if sys.stdin is None or sys.stdin.isatty():
            raise UsageError(
                "- means a list on standard input, but nothing is piped into it",
                "Write: find photos -name '*.jpg' | vlfit batch - ...",
            )
        self._stdin_read = True
        return nullcontext(sys.stdin.buffer)

    def _label(self) -> str:
        return "standard input" if self.name == "-" else key_of(self.name)

    def _from_json(self, text: str, folder: str, number: int) -> tuple[Item, str]:
        """The item of a JSON line, and the picture as named there, which may differ from the item's key."""
        try:
            fields = json.loads(text, parse_constant=str)  # NaN is not JSON
        except (ValueError, RecursionError) as error:
            return self._bad_line(number, f"is not JSON: {error}")
        if not isinstance(fields, dict):
            return self._bad_line(number, "is not a JSON object")
        field = next((name for name in PICTURE_FIELDS if name in fields), None)
        named = fields.pop(field) if field else None
        if isinstance(named, Mapping):  # as in OpenAI messages
            named = named.get("url")
        if not isinstance(named, str) or not named:
            return self._bad_line(number, f"names no picture: no field {', '.join(PICTURE_FIELDS)}")
        item = make_item(named, folder, allow_private=self.allow_private)
        is_data = named[:5].lower() == "data:"
        key = f"line {number}" if is_data else item.key
        own = next((name for name in KEY_FIELDS if isinstance(fields.get(name), str | int)), None)
        if own is not None:
            key = key_of(str(fields.pop(own)))
        return Item(key, item.read, item.path, fields), named if is_data else item.key

    def _bad_line(self, number: int, what: str) -> tuple[Item, str]:
        message = f"{self._label()}, line {number}, {what}"
        return Item(f"line {number}", Unreadable(f"line {number}", message, "Correct the line.").read), ""


def _numbered_lines(file: io.BufferedReader) -> Iterator[tuple[int, str | Unreadable]]:
    """Line numbers, from 1, and lines without blank lines and comments."""
    head = file.peek(_BLOCK)
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):  # UTF-16 BOM, as PowerShell writes it
        pieces = _utf16_lines(file)
    elif b"\0" in head:
        pieces = _nul_separated(file)
    else:
        pieces = _lines(file.readline)
    for number, piece in enumerate(pieces, 1):
        if len(piece) > _MAX_LINE_BYTES:
            message = f"line {number} is longer than {_MAX_LINE_BYTES // MIB} MiB; nothing after it was read"
            yield number, Unreadable(f"line {number}", message, "Is it a list?")
            return
        text = os.fsdecode(piece.removeprefix(b"\xef\xbb\xbf") if number == 1 else piece).strip()
        if text and not text.startswith("#"):
            yield number, text


def _utf16_lines(file: io.BufferedReader) -> Iterator[bytes]:
    wide = io.TextIOWrapper(file, encoding="utf-16", errors="replace")
    try:
        for line in _lines(wide.readline):
            yield line.encode("utf-8", "surrogatepass")
    finally:
        with suppress(ValueError):  # closed already
            wide.detach()


def _lines(readline: Callable[[int], AnyStr]) -> Iterator[AnyStr]:
    while line := readline(_MAX_LINE_BYTES + 1):
        yield line


def _nul_separated(file: io.BufferedReader) -> Iterator[bytes]:
    rest = b""
    while block := file.read(_BLOCK):
        *whole, rest = (rest + block).split(b"\0")
        yield from whole
        if len(rest) > _MAX_LINE_BYTES:
            break
    if rest:
        yield rest


def _bare_url(url: str) -> str:
    """``url`` without credentials and fragment, for the output."""
    scheme, separator, rest = url.partition("#")[0].partition("://")
    host, slash, path = rest.partition("/")
    return f"{scheme}{separator}{host.rpartition('@')[2]}{slash}{path}"
