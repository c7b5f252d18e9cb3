"""Large files in request bodies: taken out as base64 before the JSON is parsed, and decoded out of the body.

As strings of the parsed request they would be in memory three times, and each step would hold the GIL, which
delays the engine's tokens: parsing a picture of 45 MB alone takes 0.1 s.
"""

import re
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from hashlib import blake2b
from typing import TypeVar

from vlfit.errors import InvalidRequest
from vlfit.tasks.pictures import Base64File
from vlfit.units import KIB

MIN_INLINE_FILE = 64 * KIB  # characters of base64; parsing less takes no time
_START, _END_OF_HEADER = b'"data:', b";base64"
_MAX_HEADER = 256
MAX_URLS = 4096  # URLs looked at in one body: no body has room for so many large ones, and each takes 1 us
_TOKEN_BYTES = 16
_BARE_HEADER = "data:application/octet-stream;base64"
_BASE64_START = re.compile(rb"[A-Za-z0-9+/]{64}")

Files = dict[str, Base64File]
Params = TypeVar("Params")

# The files of the request that this task answers, by what stands for them in its URLs.
_files: ContextVar[Files] = ContextVar("files")


def parse_request(
    parse: Callable[[bytes | bytearray], Params],
    file_urls: Callable[[Params], Iterable[str]],
    body: bytes | bytearray,
    *,
    bare: bool = False,
) -> tuple[Params, Files]:
    """Parse ``body`` without the large files in it; returns the request and the files, for ``use_files``.

    In the request, a token stands for each file's base64. ``file_urls``: returns the URLs of files in a
    parsed request. If they do not contain each token once, as when a file's base64 is in a text, the whole
    body is parsed and no files are returned. ``bare``: take out base64 without the head of a data: URL, too;
    then ``file_urls`` returns ``bare_file_url`` of such strings. Raises what ``parse`` raises.
    """
    reduced, files = take_files(body, bare=bare)
    if files:
        try:
            params = parse(reduced)
            found = Counter(url[-2 * _TOKEN_BYTES :] for url in file_urls(params))
        except InvalidRequest:
            pass  # parse the whole: the message may quote it
        else:
            if all(found[token] == 1 for token in files):
                return params, files
    return parse(body), {}


def use_files(files: Files) -> None:
    """Make ``file_of`` find ``files`` (from ``parse_request``) within this asyncio task."""
    _files.set(files)


def file_of(url: str) -> Base64File | None:
    """The file whose token ``url`` ends with (``use_files``); None for any other URL."""
    return _files.get({}).get(url[-2 * _TOKEN_BYTES :])


def release_files() -> None:
    """Make ``file_of`` forget this task's files, so that they and the body are freed after decoding."""
    _files.get({}).clear()


def bare_file_url(file: str) -> str:
    """The data: URL of ``file``, which is base64 (type unknown) or a data: URL already."""
    return file if file[:5].lower() == "data:" else f"{_BARE_HEADER},{file}"


def take_files(body: bytes | bytearray, *, bare: bool = False) -> tuple[bytes, Files]:
    """``body`` with a random token in place of the base64 of each large data: URL, and the files by token.

    Without such URLs: ``b""`` and no files. Large: over ``MIN_INLINE_FILE`` characters. Files of equal
    content are one object. ``bare``: also take long strings that look like base64.
    """
    spans = sorted([*_spans_of_urls(body), *(_spans_of_base64(body) if bare else ())])
    view = memoryview(body)
    kept: list[memoryview | bytes] = []
    contents: dict[str, tuple[str, memoryview]] = {}
    last = 0
    for start, end, header in spans:
        token = secrets.token_hex(_TOKEN_BYTES)
        kept += (view[last:start], token.encode())
        contents[token] = header, view[start:end]
        last = end
    kept.append(view[last:])
    return b"".join(kept) if contents else b"", _merge_equal(contents)


def _spans_of_urls(body: bytes | bytearray) -> Iterator[tuple[int, int, str]]:
    """Start and end of the base64 in each large data: URL, and the URL up to its comma.

    Only the first ``MAX_URLS`` URLs are looked at, so that a body full of small ones takes no time.
    """
    position = 0
    for _ in range(MAX_URLS):
        start = body.find(_START, position)
        if start < 0:
            break
        comma = body.find(b",", start, start + _MAX_HEADER)
        header = body[start + 1 : max(comma, start + 1)]
        # A quote after a backslash is part of a string. Any other begins one, as no letter follows one that
        # ends a string.
        if not header.endswith(_END_OF_HEADER) or body[start - 1 : start] == b"\\":
            position = start + len(_START)
            continue
        end = position = body.find(b'"', comma)
        if end < 0:
            break
        if end - comma <= MIN_INLINE_FILE or body.find(b"\\", comma, end) >= 0:
            continue
        yield comma + 1, end, header.decode("utf-8", "replace")


def _spans_of_base64(body: bytes | bytearray) -> Iterator[tuple[int, int, str]]:
    """Start and end of each long string that begins like base64, and the header of a URL for it.

    Such a string covers a multiple of its least length: only those places are looked at.
    """
    position = MIN_INLINE_FILE
    while position < len(body):
        start, end = body.rfind(b'"', 0, position) + 1, body.find(b'"', position)
        if end < 0:
            return
        is_long = start > 0 and end - start > MIN_INLINE_FILE
        if is_long and _BASE64_START.match(body, start, end) and body.find(b"\\", start - 2, end) < 0:
            yield start, end, _BARE_HEADER
        position = max(end + 1, position + MIN_INLINE_FILE)


def _merge_equal(contents: dict[str, tuple[str, memoryview]]) -> Files:
    sizes = Counter(len(content) for _, content in contents.values())
    files: dict[object, Base64File] = {}
    result: Files = {}
    for token, (header, content) in contents.items():
        # The hash, unlike a comparison, is computed without the GIL.
        key = (len(content), blake2b(content).digest()) if sizes[len(content)] > 1 else token
        result[token] = files.setdefault((header, key), Base64File(header, content))
    return result
