"""Names of pictures as keys of records: valid Unicode, ``/`` between folders, the same on every machine.

Knows that a file's name is bytes, and that not all of them are UTF-8. A byte that is none stands in a key as
``\\xff``, so that JSON, Parquet and terminals can hold it, and ``name_of_key`` finds the way back. Does not
know which pictures there are.
"""

import os
import re
from pathlib import Path

_SURROGATE = re.compile("[\ud800-\udfff]")
# What an escape looks like. A name that holds one by its own letters is escaped too: no two have one key.
_ESCAPED = re.compile(r"\\(?:\\|x([0-9a-f]{2})|u(d[89a-f][0-9a-f]{2}))")


def key_of(name: str) -> str:
    """``name``, as Python gives file names (``surrogateescape``), as a key. No two names have the same."""
    if os.sep != "/":
        name = name.replace(os.sep, "/")
    # All but a few names are their own keys, and this is done for every one of a million.
    if name.isascii() and "\\" not in name:
        return name
    if not _SURROGATE.search(name) and not _ESCAPED.search(name):
        return name
    return _SURROGATE.sub(_escape, name.replace("\\", "\\\\"))


def name_of_key(key: str) -> str:
    """The name that ``key_of`` made ``key`` of, for Python's functions of files."""
    return _ESCAPED.sub(_unescape, key) if _ESCAPED.search(key) else key


def shown_name(path: Path) -> str:
    """``path`` as text that can be written anywhere, with the folders as they were typed."""
    return key_of(str(path))


def extension_of(name: str) -> str:
    """``.jpg`` of ``Photos/Cat.JPG``; empty for none. Quicker than a ``Path``, for a million of names."""
    return os.path.splitext(name)[1].lower()


def _escape(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code - 0xDC00:02x}" if 0xDC80 <= code <= 0xDCFF else f"\\u{code:04x}"


def _unescape(found: re.Match[str]) -> str:
    if found[1]:
        return chr(0xDC00 + int(found[1], 16))
    return chr(int(found[2], 16)) if found[2] else "\\"
