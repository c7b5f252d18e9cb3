"""Large files in request bodies: cut out of the JSON and decoded from base64 while the body arrives.

In memory as strings of the parsed request they would be several times their size, and each step would hold
the GIL, which delays the engine's tokens. So a body is never whole in this process: what remains of it is
JSON with a random token in place of each file, and the files are outside of the heap (``spooled_file.py``).
"""

import binascii
import re
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import TypeVar

from vlfit.errors import InvalidRequest
from vlfit.images.spooled_file import EncodedFile, FileSpool, read_at
from vlfit.tasks.pictures import InlineFile
from vlfit.units import KIB

MIN_INLINE_FILE = 64 * KIB  # characters of base64; parsing less takes no time
# Of a string, before it is looked at. Strings of twice that are never missed, and shorter ones may be taken.
_MIN_STRING = MIN_INLINE_FILE // 2
# PHP writes / as \/ in JSON.
_URL_HEAD = re.compile(rb'data:(?:[^",\\]|\\/){0,248};base64,')
_CLIP_HEAD = b"data:video/jpeg;base64,"  # vLLM's name for frames in one URL, separated by commas
_BARE_HEADER = "data:application/octet-stream;base64"
_BASE64_START = re.compile(rb"(?:[A-Za-z0-9+/]|\\/){64}")
_TOKEN_BYTES = 16
_ENCODED_AT_ONCE = 384 * KIB  # a multiple of 3

Files = dict[str, InlineFile]
Params = TypeVar("Params")

# The files of the request that this task answers, by what stands for them in its URLs.
_files: ContextVar[Files] = ContextVar("files")


@dataclass(frozen=True, slots=True)
class _Cut:
    """What a token stands for: base64 of the first ``size`` bytes of ``data``, then ``last`` as it is.

    ``digest``: equal for files of equal content. ``is_file``: all of it is a file, ``data``. Else it turned
    out to be no base64.
    """

    token: bytes
    data: EncodedFile
    digest: bytes
    size: int
    last: bytes
    is_file: bool


class ReceivedBody:
    """A request's body without its large files; ``BodyReader`` makes it. ``size``: bytes that arrived.

    ``files``: by the token that stands for each. Files of equal content are one object.
    """

    def __init__(self, reduced: bytearray, cuts: list[_Cut], size: int) -> None:
        self._reduced = reduced
        self.size = size
        files: dict[bytes, InlineFile] = {}
        self.files: Files = {}
        self._cuts: list[_Cut] = []
        for cut in cuts:
            if cut.is_file:
                file = files.setdefault(cut.digest, InlineFile(cut.data))
                self.files[cut.token.decode()] = file
                cut = replace(cut, data=file.data)  # a copy is freed
            self._cuts.append(cut)

    def reduced(self) -> bytearray:
        """The body with a token in place of the base64 of each file."""
        return self._restored([cut for cut in self._cuts if not cut.is_file])

    def whole(self) -> bytearray:
        """The body as it arrived, but for ``\\/`` in base64, which is ``/`` here and stands for the same."""
        return self._restored(self._cuts)

    def _restored(self, cuts: list[_Cut]) -> bytearray:
        if not cuts:
            return self._reduced
        restored = bytearray()
        last = 0
        for cut in cuts:
            start = self._reduced.find(cut.token, last)
            restored += memoryview(self._reduced)[last:start]
            for offset in range(0, cut.size, _ENCODED_AT_ONCE):
                piece = read_at(cut.data, offset, min(_ENCODED_AT_ONCE, cut.size - offset))
                restored += binascii.b2a_base64(piece, newline=False)
                time.sleep(0)  # gives the GIL away
            restored += cut.last
            last = start + len(cut.token)
        restored += memoryview(self._reduced)[last:]
        return restored


class BodyReader:
    """Takes the large files out of a JSON body, piece by piece as it arrives.

    A file: the base64 of a ``data:`` URL of over ``MIN_INLINE_FILE`` characters; shorter ones may be taken,
    too. ``bare``: also other long strings of base64. Each piece takes time in proportion to its size.
    """

    def __init__(self, *, bare: bool = False) -> None:
        self._bare = bare
        self.clear()

    def clear(self) -> None:
        """Forget what was fed."""
        self._size = 0
        self._kept = bytearray()
        self._cuts: list[_Cut] = []
        self._quote = -1  # in ``_kept``, the last one, and whether the string after it was looked at
        self._was_looked_at = False
        self._file: _Base64 | None = None  # that is being read
        self._is_clip = False

    def feed(self, data: bytes) -> None:
        """Read the next bytes of the body. Raises ``MemoryError``."""
        self._size += len(data)
        position = 0
        while position < len(data):
            read = self._read_text if self._file is None else self._read_file
            position = read(data, position)

    def finish(self) -> ReceivedBody:
        """The body. Call it once."""
        if self._file is not None:  # it ends within a string
            self._end_file(is_file=False)
        return ReceivedBody(self._kept, self._cuts, self._size)

    def _read_text(self, data: bytes, position: int) -> int:
        piece = data[position : position + _MIN_STRING]
        quote = piece.rfind(b'"')
        if quote >= 0:
            self._quote = len(self._kept) + quote
            self._was_looked_at = False
        self._kept += piece
        if len(self._kept) - self._quote > _MIN_STRING and not self._was_looked_at:
            self._was_looked_at = True
            self._look_at_string()
        return position + len(piece)

    def _look_at_string(self) -> None:
        """Begin a file if the string that begins with the last quote is one."""
        kept, start = self._kept, self._quote + 1
        # A quote after a backslash is part of a string. Any other begins one: what follows one that ends a
        # string is neither a letter nor base64.
        if not start or kept[start - 2 : start - 1] == b"\\":
            return
        head = _URL_HEAD.match(kept, start)
        if head is None and not (self._bare and _BASE64_START.match(kept, start)):
            return
        self._is_clip = head is not None and head[0].replace(b"\\", b"") == _CLIP_HEAD
        begin = start if head is None else head.end()
        content = bytes(memoryview(kept)[begin:])
        del head  # it exports the buffer
        del kept[begin:]
        self._begin_file()
        position = 0
        while position < len(content):
            if self._file is None:
                kept += content[position:]
                return
            position = self._read_file(content, position)

    def _begin_file(self) -> None:
        self._file = _Base64()
        self._kept += self._file.token

    def _read_file(self, data: bytes, position: int) -> int:
        assert self._file is not None
        end = data.find(b'"', position)
        stop = end if end >= 0 else len(data)
        comma = data.find(b",", position, stop) if self._is_clip else -1
        stop = comma if comma >= 0 else stop
        is_base64 = self._file.feed(data[position:stop])
        if not is_base64:
            self._end_file(is_file=False)
        elif stop < len(data):
            self._end_file(is_file=True)
            if comma >= 0 and self._cuts[-1].is_file:
                self._kept += b","
                self._begin_file()
                return stop + 1
        return stop

    def _end_file(self, *, is_file: bool) -> None:
        assert self._file is not None
        self._cuts.append(self._file.finish(is_file=is_file))
        self._file = None


class _Base64:
    """The base64 of one file, decoded as it arrives."""

    def __init__(self) -> None:
        self.token = secrets.token_hex(_TOKEN_BYTES).encode()
        self._spool = FileSpool()
        self._rest = b""  # of the last group of four, which may have padding, or more if it is no base64

    def feed(self, characters: bytes) -> bool:
        """Decode the next characters; False if they are no base64, and the last that are fed."""
        data = self._rest + characters
        if b"\\" in data:
            data = data.replace(b"\\/", b"/")  # a backslash at the end stays in ``_rest``
        count = max(len(data) - 1, 0) // 4 * 4
        try:
            decoded = binascii.a2b_base64(data[:count], strict_mode=True)
        except binascii.Error:
            self._rest = data
            return False
        if data[:count].endswith(b"="):
            self._rest = data
            return False
        self._spool.write(decoded)
        self._rest = data[count:]
        return True

    def finish(self, *, is_file: bool) -> _Cut:
        size, end = self._spool.size, b""
        if is_file:
            unpadded = self._rest.rstrip(b"=")  # many clients leave out the padding
            try:
                end = binascii.a2b_base64(unpadded + b"=" * (-len(unpadded) % 4), strict_mode=True)
            except binascii.Error:
                is_file = False
        self._spool.write(end)
        digest = self._spool.digest
        return _Cut(self.token, self._spool.finish(), digest, size, self._rest, is_file)


def parse_request(
    parse: Callable[[bytes | bytearray], Params],
    file_urls: Callable[[Params], Iterable[str]],
    body: ReceivedBody,
) -> tuple[Params, Files]:
    """Parse ``body`` without the large files in it; returns the request and the files, for ``use_files``.

    In the request, a token stands for each file's base64. ``file_urls``: returns the URLs of files in a
    parsed request, ``bare_file_url`` of those that are plain base64. If they do not contain each token once,
    as when a file's base64 is in a text, the whole body is parsed and no files are returned. Raises what
    ``parse`` raises.
    """
    if body.files:
        try:
            params = parse(body.reduced())
            found = Counter(url[-2 * _TOKEN_BYTES :] for url in file_urls(params))
        except InvalidRequest:
            pass  # parse the whole: the message may quote it
        else:
            if all(found[token] == 1 for token in body.files):
                return params, body.files
    return parse(body.whole()), {}


def use_files(files: Files) -> None:
    """Make ``file_of`` find ``files`` (from ``parse_request``) within this asyncio task."""
    _files.set(files)


def file_of(url: str) -> InlineFile | None:
    """The file whose token ``url`` ends with (``use_files``); None for any other URL."""
    return _files.get({}).get(url[-2 * _TOKEN_BYTES :])


def release_files() -> None:
    """Make ``file_of`` forget this task's files, so that they are freed after decoding."""
    _files.get({}).clear()


def bare_file_url(file: str) -> str:
    """The data: URL of ``file``, which is base64 (type unknown) or a data: URL already."""
    return file if file[:5].lower() == "data:" else f"{_BARE_HEADER},{file}"
