"""Paths that are neither a file nor a folder: what lies there, found without opening it.

Opening a pipe would wait for whoever writes into it, perhaps for ever.
"""

import errno
import os
import stat
from pathlib import Path

_KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
_HINT = "A model is read from files on a disk: copy it there, and name the file."
_LINK_HINT = "Mend the link, or name the file itself."


def describe_special(path: Path) -> tuple[str, str] | None:
    """What is at ``path``, as a phrase, and what to do; None for a file, a folder, or if nothing is there."""
    try:
        target = os.readlink(path)
    except (OSError, ValueError):
        target = ""
    try:
        kind = _KINDS.get(stat.S_IFMT(os.stat(path).st_mode))
    except ValueError:
        return None
    except OSError as error:
        if not target:
            return None
        if error.errno == errno.ELOOP:
            return "a link that leads back to itself", _LINK_HINT
        reason = "where nothing is" if error.errno == errno.ENOENT else error.strerror
        return f"a link to {target}, {reason}", _LINK_HINT
    return None if kind is None else (kind, _HINT)
