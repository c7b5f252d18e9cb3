"""API keys: who may come in, and by which number they are called in logs.

Knows: hashes, and that a comparison must not tell by its time how much of a guess was right. Does not know
requests. Keys themselves are not kept: whatever is printed or dumped of a running server shows hashes.
"""

import hashlib
import hmac
from pathlib import Path

from vlfit.errors import UsageError


class Keys:
    """``keys`` in order: the first is ``key 1``. None: everybody may come in.

    Raises ``UsageError`` for a key that no client could send: HTTP headers hold printable ASCII.
    """

    def __init__(self, keys: tuple[str, ...] = ()) -> None:
        for number, key in enumerate(keys, 1):
            if not key or not all("!" <= letter <= "~" for letter in key):
                raise UsageError(
                    f"API key {number} is empty or holds more than printable ASCII without spaces",
                    "make one of letters and digits, such as that of `openssl rand -hex 24`",
                )
        self._hashes = [_hash(key.encode("ascii")) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._hashes)

    def number(self, authorization: str) -> int | None:
        """Which key an ``Authorization`` header holds, 1 for the first; None if it holds none of them.

        Every key is looked at, whichever fits, and each comparison takes the same time for every guess.
        """
        scheme, _, given = authorization.partition(" ")
        # Headers arrive read as Latin-1.
        guess = _hash(given.strip().encode("latin-1", "replace"))
        found = None
        for number, known in enumerate(self._hashes, 1):
            if hmac.compare_digest(known, guess):
                found = number
        return found if scheme.lower() == "bearer" else None


def read_keys(file: Path) -> tuple[str, ...]:
    """The keys in ``file``: one a line; empty lines and what follows a ``#`` say nothing.

    Raises ``UsageError`` if it cannot be read or holds none.
    """
    try:
        lines = file.expanduser().read_text("utf-8").splitlines()
    except (OSError, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise UsageError(f"the keys in {file} cannot be read: {why}", "write one key a line") from None
    keys = tuple(key for line in lines if (key := line.partition("#")[0].strip()))
    if not keys:
        raise UsageError(f"{file} holds no key", "write one key a line")
    return keys


def _hash(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
