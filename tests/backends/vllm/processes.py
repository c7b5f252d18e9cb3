"""Running processes, as the system lists them."""

import time
from collections.abc import Iterator
from pathlib import Path


def all_command_lines() -> Iterator[tuple[int, str]]:
    """Each running process with its command line."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
        except OSError:
            continue
        if state not in "ZX":
            yield int(entry.name), words


def processes_with(word: str) -> list[tuple[int, str]]:
    """Running processes whose command line contains ``word``."""
    return [(pid, words) for pid, words in all_command_lines() if word in words]


def wait_until_gone(word: str, seconds: float = 60.0) -> bool:
    """Whether within ``seconds`` no process has ``word`` any more."""
    end = time.monotonic() + seconds
    while processes_with(word):
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True
