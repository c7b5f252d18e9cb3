"""Pictures that a list names: a text file with a path or URL in each line, or JSONL with further fields.

Knows: lines, what they may hold, and how names in them become keys. A line that names no picture is an item
that fails, so that it is listed with the others. Does not know how a path or a URL is read (``items.py``).
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
from vlfit.tasks.batch.items import FileBytes, Item, KeySet, Unreadable, UrlBytes, key_of
from vlfit.units import MIB

PICTURE_FIELDS = ("picture", "image", "url", "image_url", "path", "image_path", "file_name")
KEY_FIELDS = ("key", "id")
# A data: URL of the largest file that is fetched (64 MiB) is four thirds of it.
_LONGEST_LINE = 96 * MIB
_BLOCK = 2**16


def picture_named(text: str, folder: str, *, allow_private: bool) -> Item:
    """The picture that ``text`` (a path below ``folder``, or a URL) names; its key is ``text``, tidied."""
    scheme = text[:8].lower()
    if scheme.startswith(("http://", "https://")):
        return Item(key_of(_address(text)), UrlBytes(text, allow_private).read)
    if scheme.startswith("data:"):
        return Item("data: URL", UrlBytes(text).read)
    if "://" in text[:16] or scheme.startswith("file:"):
        hint = "Give a file by its plain path."
        short = key_of(text[:120])
        problem = Unreadable(short, f"{short}: of URLs, http:, https: and data: are read", hint)
        return Item(short, problem.read)
    path = os.path.join(folder, os.path.expanduser(text))
    # Not normpath: past a link, .. is another folder than it looks.
    return Item(key_of(str(Path(text))), FileBytes(str(Path(os.getcwd(), path))).read, Path(path))


@dataclass(slots=True)
class ListSource:
    """A ``Source`` of what a list names. ``name`` is a file, or ``-``: standard input, which is read once.

    Lines are UTF-8 (other bytes of names stay as they are) or UTF-16; empty ones and those that begin with
    ``#`` are passed over. Where a NUL is found, as ``find -print0`` writes it, it ends names in place of the
    line. JSONL is told by its first letter.
    """

    name: str
    allow_private: bool = False
    _repeated: int = 0
    _told_apart: int = 0
    _taken: bool = False

    def __iter__(self) -> Iterator[Item]:
        folder = os.path.dirname(self.name) if self.name != "-" else ""
        seen = KeySet()
        # Of JSONL, where a key may be another word than the picture's name: both together.
        pairs = KeySet()
        self._repeated = self._told_apart = 0
        with self._open() as opened:
            for number, text in _entries(cast(io.BufferedReader, opened)):
                pair = ""
                if isinstance(text, Unreadable):
                    item = Item(f"line {number}", text.read)
                elif text.startswith("{"):
                    item, picture = self._from_json(text, folder, number)
                    pair = f"{item.key}\0{picture}"
                else:
                    item = picture_named(text, folder, allow_private=self.allow_private)
                    if len(pairs):
                        pair = f"{item.key}\0{item.key}"
                if item.key in seen:
                    another = bool(pair) and pair not in pairs
                    self._told_apart += another
                    self._repeated += not another
                    # The same picture once; but with fields of its own it may be meant twice.
                    if not item.extra and not another:
                        continue
                    item = Item(f"{item.key}#line {number}", item.read, item.path, item.extra)
                seen.add(item.key)
                if pair:
                    pairs.add(pair)
                yield item

    def count(self) -> int | None:
        """Goes through the list; None for standard input, which cannot be read twice."""
        return None if self.name == "-" else sum(1 for _ in self)

    def notes(self) -> list[str]:
        """How many lines of the last pass named what an earlier one had named, or called another so."""
        notes = []
        if self._repeated:
            lines = "1 line names" if self._repeated == 1 else f"{self._repeated:,} lines name"
            notes.append(f"{self._shown()}: {lines} a picture that an earlier line names")
        if self._told_apart:
            lines = "1 line gives" if self._told_apart == 1 else f"{self._told_apart:,} lines give"
            notes.append(
                f"{self._shown()}: {lines} another picture the key of an earlier line; such keys end in"
                ' "#line" and its number'
            )
        return notes

    def _open(self) -> Any:
        if self.name != "-":
            try:
                return open(self.name, "rb")
            except OSError as error:
                raise UsageError(
                    f"the list {self._shown()} cannot be read: {error.strerror}", "Check its name."
                ) from None
        if self._taken:
            raise UsageError("standard input can be read once only", "Keep the list in a file.")
        if sys.stdin is None or sys.stdin.isatty():
            raise UsageError(
                "- means a list on standard input, and nothing is piped into it",
                "Write: find photos -name '*.jpg' | vlfit batch - ...",
            )
        self._taken = True
        return nullcontext(sys.stdin.buffer)

    def _shown(self) -> str:
        return "standard input" if self.name == "-" else key_of(self.name)

    def _from_json(self, text: str, folder: str, number: int) -> tuple[Item, str]:
        """The item of a line, and what it calls the picture, which need not be the item's key."""
        try:
            fields = json.loads(text, parse_constant=str)  # NaN is no JSON
        except (ValueError, RecursionError) as error:
            return self._broken(number, f"is no JSON: {error}")
        if not isinstance(fields, dict):
            return self._broken(number, "is no JSON object")
        field = next((name for name in PICTURE_FIELDS if name in fields), None)
        named = fields.pop(field) if field else None
        if isinstance(named, Mapping):  # as messages of OpenAI have it
            named = named.get("url")
        if not isinstance(named, str) or not named:
            return self._broken(number, f"names no picture: it has none of {', '.join(PICTURE_FIELDS)}")
        item = picture_named(named, folder, allow_private=self.allow_private)
        is_data = named[:5].lower() == "data:"
        key = f"line {number}" if is_data else item.key
        own = next((name for name in KEY_FIELDS if isinstance(fields.get(name), str | int)), None)
        if own is not None:
            key = key_of(str(fields.pop(own)))
        return Item(key, item.read, item.path, fields), named if is_data else item.key

    def _broken(self, number: int, what: str) -> tuple[Item, str]:
        message = f"{self._shown()}, line {number}, {what}"
        return Item(f"line {number}", Unreadable(f"line {number}", message, "Mend the line.").read), ""


def _entries(file: io.BufferedReader) -> Iterator[tuple[int, str | Unreadable]]:
    """Numbered from 1, without those that say nothing."""
    head = file.peek(_BLOCK)
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):  # as PowerShell writes
        pieces = _wide_lines(file)
    elif b"\0" in head:
        pieces = _between_nuls(file)
    else:
        pieces = _lines(file.readline)
    for number, piece in enumerate(pieces, 1):
        if len(piece) > _LONGEST_LINE:
            message = f"line {number} is longer than {_LONGEST_LINE // MIB} MiB; nothing after it was read"
            yield number, Unreadable(f"line {number}", message, "Is it a list?")
            return
        text = os.fsdecode(piece.removeprefix(b"\xef\xbb\xbf") if number == 1 else piece).strip()
        if text and not text.startswith("#"):
            yield number, text


def _wide_lines(file: io.BufferedReader) -> Iterator[bytes]:
    wide = io.TextIOWrapper(file, encoding="utf-16", errors="replace")
    try:
        for line in _lines(wide.readline):
            yield line.encode("utf-8", "surrogatepass")
    finally:
        with suppress(ValueError):  # closed already
            wide.detach()


def _lines(readline: Callable[[int], AnyStr]) -> Iterator[AnyStr]:
    while line := readline(_LONGEST_LINE + 1):
        yield line


def _between_nuls(file: io.BufferedReader) -> Iterator[bytes]:
    rest = b""
    while block := file.read(_BLOCK):
        *whole, rest = (rest + block).split(b"\0")
        yield from whole
        if len(rest) > _LONGEST_LINE:
            break
    if rest:
        yield rest


def _address(url: str) -> str:
    """``url`` without a password, which has no place in an output, and without a fragment."""
    scheme, separator, rest = url.partition("#")[0].partition("://")
    host, slash, path = rest.partition("/")
    return f"{scheme}{separator}{host.rpartition('@')[2]}{slash}{path}"
