"""Files of what was measured on this machine: where they lie and how they are written, not what they hold."""

import contextlib
import os
import re
from pathlib import Path

from vlfit.errors import UsageError


def kept_file(kind: str, *parts: str) -> Path:
    """``$XDG_CACHE_HOME/vlfit/KIND/PARTS.json``, with ``parts`` joined as file systems allow."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    # The standard ignores a relative path there.
    base = Path(cache) if cache and Path(cache).is_absolute() else Path.home() / ".cache"
    name = "-".join(re.sub(r"[^A-Za-z0-9.+]+", "-", part).strip("-.") or "none" for part in parts)
    return base / "vlfit" / kind / f"{name}.json"


def write_whole(path: Path, words: str, what: str) -> None:
    """Whole or not at all. Raises ``UsageError``, which calls it ``what``, if it cannot be written."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(words, "utf-8")
        part.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink()
        raise UsageError(
            f"cannot keep the {what} in {path}: {error.strerror}",
            "set XDG_CACHE_HOME to a folder that can be written",
        ) from None
